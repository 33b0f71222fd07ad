//! Plans of PostgreSQL follow tables that grow.

use gantry_db::{Database, Migrations, Settings, SqlMigration};
use sea_orm::{ConnectionTrait, DbBackend, DbErr, Statement};

struct One;

impl Migrations for One {
    const ALL: &'static [SqlMigration] = &[SqlMigration {
        name: "0001_growing",
        // Nobody analyzes it after this.
        sql: "CREATE TABLE growing (n BIGINT PRIMARY KEY) WITH (autovacuum_enabled = off);
              INSERT INTO growing SELECT * FROM generate_series(-100, 0); ANALYZE growing",
    }];
}

struct ByIndex;

impl Migrations for ByIndex {
    const ALL: &'static [SqlMigration] = One::ALL;
    const BY_INDEX: bool = true;
}

const LOOK: &str = "SELECT n FROM growing WHERE n IN (SELECT CAST(value AS BIGINT)
     FROM json_array_elements_text(CAST((SELECT CAST($1 AS TEXT)) AS JSON)))";

/// Looks for one row, and answers how the connection would do it the next time. `None`: it has not done it often enough.
async fn plan(database: &Database) -> Option<String> {
    let looked = database.write(async |txn| {
        let sql = |sql: &str| Statement::from_string(DbBackend::Postgres, sql);
        txn.query_all_raw(Statement::from_sql_and_values(DbBackend::Postgres, LOOK, ["[1]".into()])).await?;
        let ours = "SELECT name FROM pg_prepared_statements WHERE statement LIKE 'SELECT n FROM growing%' AND generic_plans > 0";
        let Some(row) = txn.query_one_raw(sql(ours)).await? else { return Ok(None) };
        let name: String = row.try_get("", "name")?;
        let mut lines = Vec::<String>::new();
        for row in txn.query_all_raw(sql(&format!("EXPLAIN EXECUTE {name}('[1]')"))).await? {
            lines.push(row.try_get("", "QUERY PLAN")?);
        }
        Ok::<_, DbErr>(Some(lines.join("\n")))
    });
    looked.await.expect("it answers")
}

#[tokio::test]
async fn what_was_planned_for_few_rows_is_planned_anew_for_many() {
    let database = testing::databases::postgres().await;
    let settings = Settings { connections: 2, ..(&*database.url).into() };
    let database = Database::open::<One>(&settings).await.expect("a database");
    // Both connections have planned it.
    let mut planned = 0;
    while planned < 40 {
        let Some(plan) = plan(&database).await else { continue };
        assert!(plan.contains("Seq Scan on growing"), "{plan}");
        planned += 1;
    }
    let grow = "INSERT INTO growing SELECT * FROM generate_series(1, 20000)";
    let grown = database.write(async |txn| txn.execute_unprepared(grow).await.map(drop));
    grown.await.map_err(|error: DbErr| error).expect("it grows");
    for _ in 0..5000 {
        if plan(&database).await.is_some_and(|plan| !plan.contains("Seq Scan on growing")) {
            return;
        }
    }
    panic!("the old plan stays: {:?}", plan(&database).await);
}

#[tokio::test]
async fn where_rows_are_looked_up_by_index_a_small_table_is_as_well() {
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
        // Not all of the index, compared with each that is asked for.
        assert!(plan.contains("Index Cond") && !plan.contains("Semi Join"), "{plan}");
        planned += 1;
    }
}
