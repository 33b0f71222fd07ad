//! Schemas of one PostgreSQL database, and databases of older and newer programs.

use gantry_db::{ConnectError, Database, Settings, SqlMigration, sql_migrations};
use sea_orm::{ConnectionTrait, DbErr, Statement};
use sea_orm_migration::{MigrationTrait, MigratorTrait};

const FIRST: SqlMigration =
    SqlMigration { name: "0001_first", sql: "CREATE TABLE thing (n BIGINT NOT NULL)" };
const SECOND: SqlMigration =
    SqlMigration { name: "0002_second", sql: "CREATE TABLE other (n BIGINT NOT NULL)" };

struct Old;
struct New;

impl MigratorTrait for Old {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        sql_migrations(&[FIRST])
    }
}

impl MigratorTrait for New {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        sql_migrations(&[FIRST, SECOND])
    }
}

async fn rows(database: &Database) -> Vec<i64> {
    let backend = database.read().get_database_backend();
    let rows = database
        .read()
        .query_all_raw(Statement::from_string(backend, "SELECT n FROM thing ORDER BY n"))
        .await;
    rows.expect("rows").iter().map(|row| row.try_get("", "n").expect("n")).collect()
}

async fn add(database: &Database, n: i64) {
    let insert = format!("INSERT INTO thing VALUES ({n})");
    let added = database.write(async |txn| txn.execute_unprepared(&insert).await.map(drop));
    added.await.map_err(|error: DbErr| error).expect("added");
}

#[tokio::test]
async fn services_share_a_database_and_see_nothing_of_each_other() {
    let shared = testing::databases::postgres().await;
    let settings = |schema: &str| Settings { schema: Some(schema.to_owned()), ..(&*shared.url).into() };
    // At once, and each twice: replicas.
    let [one, again, other, _] = futures(&settings).await;
    add(&one, 1).await;
    add(&other, 2).await;
    assert_eq!(rows(&one).await, [1]);
    assert_eq!(rows(&again).await, [1], "a replica sees the same");
    assert_eq!(rows(&other).await, [2]);
    let public = Database::open::<Old>(&(&*shared.url).into()).await.expect("open");
    assert_eq!(rows(&public).await, [] as [i64; 0], "a schema that nobody named is another one");
}

async fn futures(settings: &impl Fn(&str) -> Settings) -> [Database; 4] {
    let [one, again, other, last] = ["one", "one", "other", "other"].map(settings);
    let opened = tokio::join!(
        Database::open::<Old>(&one),
        Database::open::<Old>(&again),
        Database::open::<Old>(&other),
        Database::open::<Old>(&last)
    );
    let (one, again, other, last) = opened;
    [one, again, other, last].map(|opened| opened.expect("open"))
}

#[tokio::test]
async fn whoever_may_not_migrate_refuses_what_is_older_and_everybody_what_is_newer() {
    for fresh in [testing::databases::sqlite(), testing::databases::postgres().await] {
        let may = Settings::from(&*fresh.url);
        let may_not = Settings { migrate: false, ..may.clone() };
        let refused = Database::open::<Old>(&may_not).await.expect_err("it is empty");
        assert!(
            matches!(&refused, ConnectError::Older { missing } if missing == &["0001_first"]),
            "{refused}"
        );
        Database::open::<Old>(&may).await.expect("migrated");
        Database::open::<Old>(&may_not).await.expect("it is of this program");
        let refused = Database::open::<New>(&may_not).await.expect_err("it is older");
        assert!(
            matches!(&refused, ConnectError::Older { missing } if missing == &["0002_second"]),
            "{refused}"
        );
        Database::open::<New>(&may).await.expect("migrated");
        for settings in [&may, &may_not] {
            let refused = Database::open::<Old>(settings).await.expect_err("it is newer");
            assert!(
                matches!(&refused, ConnectError::Newer { unknown } if unknown == &["0002_second"]),
                "{refused}"
            );
        }
    }
}

#[tokio::test]
async fn one_that_does_not_answer_is_waited_for_and_one_that_refuses_is_not() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it").port();
    let nobody = Settings::from(format!("postgres://postgres@127.0.0.1:{port}/nothing"));
    let refused = Database::open::<Old>(&nobody).await.expect_err("nobody listens");
    assert!(refused.is_no_answer(), "{refused}");

    let there = testing::databases::postgres().await;
    let (server, _) = there.url.rsplit_once('/').expect("a database");
    let wrong = Settings { wait: true, ..format!("{server}/there_is_none").into() };
    let refused = Database::open::<Old>(&wrong).await.expect_err("there is no such database");
    assert!(!refused.is_no_answer(), "{refused}");
}
