//! Plans of PostgreSQL for tables that grow.

use gantry_db::{Database, Migrations, Settings, SqlMigration};
use sea_orm::{ConnectionTrait, DbBackend, DbErr, Statement};

struct Growing;

impl Migrations for Growing {
    const ALL: &'static [SqlMigration] = &[SqlMigration {
        name: "0001_growing",
        // PostgreSQL does not analyze the table again.
        sql: "CREATE TABLE growing (n BIGINT PRIMARY KEY) WITH (autovacuum_enabled = off);
              INSERT INTO growing SELECT * FROM generate_series(-100, 0); ANALYZE growing",
    }];
}

struct ByIndex;

impl Migrations for ByIndex {
    const ALL: &'static [SqlMigration] = Growing::ALL;
    const BY_INDEX: bool = true;
}

const SELECT: &str = "SELECT n FROM growing WHERE n IN (SELECT CAST(value AS BIGINT)
     FROM json_array_elements_text(CAST((SELECT CAST($1 AS TEXT)) AS JSON)))";

/// Selects one row, and returns the plan of the connection for the next time. Returns `None` if the
/// connection has not made a generic plan yet.
async fn plan(database: &Database) -> Option<String> {
    let plan = database.write(async |txn| {
        let sql = |sql: &str| Statement::from_string(DbBackend::Postgres, sql);
        txn.query_all_raw(Statement::from_sql_and_values(DbBackend::Postgres, SELECT, ["[1]".into()])).await?;
        let generic = "SELECT name FROM pg_prepared_statements WHERE statement LIKE 'SELECT n FROM growing%' AND generic_plans > 0";
        let Some(row) = txn.query_one_raw(sql(generic)).await? else { return Ok(None) };
        let name: String = row.try_get("", "name")?;
        let mut lines = Vec::<String>::new();
        for row in txn.query_all_raw(sql(&format!("EXPLAIN EXECUTE {name}('[1]')"))).await? {
            lines.push(row.try_get("", "QUERY PLAN")?);
        }
        Ok::<_, DbErr>(Some(lines.join("\n")))
    });
    plan.await.expect("query")
}

#[tokio::test]
async fn statement_is_replanned_when_table_grows() {
    let database = testing::databases::postgres().await;
    let settings = Settings { connections: 2, ..(&*database.url).into() };
    let database = Database::open::<Growing>(&settings).await.expect("a database");
    // Until both connections have planned the statement.
    let mut planned = 0;
    while planned < 40 {
        let Some(plan) = plan(&database).await else { continue };
        assert!(plan.contains("Seq Scan on growing"), "{plan}");
        planned += 1;
    }
    let grow = "INSERT INTO growing SELECT * FROM generate_series(1, 20000)";
    let grown = database.write(async |txn| txn.execute_unprepared(grow).await.map(drop));
    grown.await.map_err(|error: DbErr| error).expect("inserted");
    for _ in 0..5000 {
        if plan(&database).await.is_some_and(|plan| !plan.contains("Seq Scan on growing")) {
            return;
        }
    }
    panic!("the old plan stays: {:?}", plan(&database).await);
}

#[tokio::test]
async fn small_table_uses_index_with_by_index() {
    let database = testing::databases::postgres().await;
    let settings = Settings { connections: 2, ..(&*database.url).into() };
    let database = Database::open::<ByIndex>(&settings).await.expect("a database");
    let mut planned = 0;
    while planned < 10 {
        let Some(plan) = plan(&database).await else { continue };
        assert!(
            plan.contains("using growing_pkey on growing") && !plan.contains("Seq Scan on growing"),
            "{plan}"
        );
        // The plan must not scan the whole index and compare each entry with the values.
        assert!(plan.contains("Index Cond") && !plan.contains("Semi Join"), "{plan}");
        planned += 1;
    }
}
