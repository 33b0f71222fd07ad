//! Schemas that share a PostgreSQL database, and databases of older and newer programs.

use gantry_db::{ConnectError, Database, Migrations, Settings, SqlMigration};
use sea_orm::{ConnectionTrait, DbErr, Statement, TransactionTrait};

const FIRST: SqlMigration =
    SqlMigration { name: "0001_first", sql: "CREATE TABLE thing (n BIGINT NOT NULL)" };
const SECOND: SqlMigration =
    SqlMigration { name: "0002_second", sql: "CREATE TABLE other (n BIGINT NOT NULL)" };

struct Old;
struct New;

impl Migrations for Old {
    const ALL: &'static [SqlMigration] = &[FIRST];
}

impl Migrations for New {
    const ALL: &'static [SqlMigration] = &[FIRST, SECOND];
}

/// The first migration was edited after it had been applied somewhere.
struct Edited;

impl Migrations for Edited {
    const ALL: &'static [SqlMigration] = &[
        SqlMigration {
            name: "0001_first",
            sql: "CREATE TABLE thing (n BIGINT NOT NULL, m BIGINT NOT NULL DEFAULT 0)",
        },
        SECOND,
    ];
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
async fn schemas_of_one_database_are_isolated() {
    let shared = testing::databases::postgres().await;
    let settings = |schema: &str| Settings { schema: Some(schema.to_owned()), ..(&*shared.url).into() };
    // Two replicas of each service open the database at the same time.
    let [one, again, other, _] = open_replicas(&settings).await;
    add(&one, 1).await;
    add(&other, 2).await;
    assert_eq!(rows(&one).await, [1]);
    assert_eq!(rows(&again).await, [1], "a replica sees the same");
    assert_eq!(rows(&other).await, [2]);
    let public = Database::open::<Old>(&(&*shared.url).into()).await.expect("open");
    assert_eq!(rows(&public).await, [] as [i64; 0], "the default schema is separate");
}

#[tokio::test]
async fn own_connections_do_not_wait_for_pool() {
    let fresh = testing::databases::postgres().await;
    let settings = Settings { schema: Some("one".to_owned()), connections: 2, ..(&*fresh.url).into() };
    let database = Database::open::<Old>(&settings).await.expect("open");
    let own = database.with_own_connections(1).await.expect("connected");
    let all =
        [database.read().begin().await, database.read().begin().await].map(|begun| begun.expect("begun"));
    add(&own, 1).await;
    assert_eq!(rows(&own).await, [1]);
    drop(all);
    assert_eq!(rows(&database).await, [1]);
    let sqlite = Database::open::<Old>(&(&*testing::databases::sqlite().url).into()).await.expect("open");
    let own = sqlite.with_own_connections(1).await.expect("connected");
    add(&own, 2).await;
    assert_eq!(rows(&sqlite).await, [2], "on SQLite, the database is the same");
}

async fn open_replicas(settings: &impl Fn(&str) -> Settings) -> [Database; 4] {
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
async fn database_of_other_version_is_rejected() {
    for fresh in [testing::databases::sqlite(), testing::databases::postgres().await] {
        let may = Settings::from(&*fresh.url);
        let may_not = Settings { migrate: false, ..may.clone() };
        let refused = Database::open::<Old>(&may_not).await.expect_err("the database is empty");
        assert!(
            matches!(&refused, ConnectError::SchemaTooOld { missing } if missing == &["0001_first"]),
            "{refused}"
        );
        Database::open::<Old>(&may).await.expect("migrated");
        Database::open::<Old>(&may_not).await.expect("the schema is that of this program");
        let refused = Database::open::<New>(&may_not).await.expect_err("the schema is older");
        assert!(
            matches!(&refused, ConnectError::SchemaTooOld { missing } if missing == &["0002_second"]),
            "{refused}"
        );
        Database::open::<New>(&may).await.expect("migrated");
        for settings in [&may, &may_not] {
            let refused = Database::open::<Old>(settings).await.expect_err("the schema is newer");
            assert!(
                matches!(&refused, ConnectError::SchemaTooNew { unknown } if unknown == &["0002_second"]),
                "{refused}"
            );
        }
    }
}

#[tokio::test]
async fn schema_of_edited_migration_is_rejected() {
    for fresh in [testing::databases::sqlite(), testing::databases::postgres().await] {
        let (may, place) = (Settings::from(&*fresh.url), Settings::from(&*fresh.url).place());
        let may_not = Settings { migrate: false, ..may.clone() };
        let old = Database::open::<Old>(&may).await.expect("migrated");
        add(&old, 7).await;
        let refused = async || {
            let mut differences = Vec::new();
            for settings in [&may, &may_not] {
                let error = Database::open::<Edited>(settings).await.expect_err("the schema differs");
                let ConnectError::OtherSchema { place: actual, what } = &error else { panic!("{error}") };
                assert!(*actual == place && error.to_string().contains(&place), "{error}");
                differences.push(what.clone());
            }
            differences
        };
        assert_eq!(refused().await, ["the migration 0001_first differs"; 2]);

        // Early databases have no digests.
        let drop_digests = async || {
            let drop_table = async |txn: gantry_db::Transaction| {
                txn.execute_unprepared("DROP TABLE migration_digests").await.map(drop)
            };
            old.write(drop_table).await.map_err(|error: DbErr| error).expect("dropped");
        };
        drop_digests().await;
        assert_eq!(refused().await, ["the table thing has no column m"; 2]);
        assert_eq!(rows(&old).await, [7]);

        // A database with the same columns is adopted and migrated.
        Database::open::<New>(&may).await.expect("the schema is that of the migrations");
        assert_eq!(refused().await, ["the migration 0001_first differs"; 2]);
        assert_eq!(rows(&old).await, [7]);
        drop_digests().await;
        Database::open::<New>(&may_not).await.expect("the schema is that of the migrations");
    }
}

#[test]
fn place_omits_credentials() {
    let place = |settings: Settings| settings.place();
    assert_eq!(place("sqlite:///var/lib/x.db".into()), "/var/lib/x.db");
    assert_eq!(place("sqlite:///var/lib/a%3Fb.db?mode=rwc".into()), "/var/lib/a?b.db");
    let postgres = Settings::from("postgres://me:secret@host:5432/gantry?sslmode=disable");
    assert_eq!(place(postgres.clone()), "database host:5432/gantry");
    let schema = Settings { schema: Some("own".to_owned()), ..postgres };
    assert_eq!(place(schema), "schema own of database host:5432/gantry");
}

#[tokio::test]
async fn only_unreachable_database_is_unavailable() {
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
    let closed = Settings::from(format!("postgres://postgres@127.0.0.1:{port}/nothing"));
    let refused = Database::open::<Old>(&closed).await.expect_err("nothing listens on the port");
    assert!(refused.is_unavailable(), "{refused}");

    let running = testing::databases::postgres().await;
    let (server, _) = running.url.rsplit_once('/').expect("a database");
    let wrong = Settings { wait: true, ..format!("{server}/there_is_none").into() };
    let refused = Database::open::<Old>(&wrong).await.expect_err("the database does not exist");
    assert!(!refused.is_unavailable(), "{refused}");
}

#[tokio::test]
async fn lost_connection_is_retryable() {
    let server = testing::databases::postgres().await;
    let db = Database::open::<Old>(&server.url.as_str().into()).await.expect("open");
    let run = async |statement: &str| {
        let result = db.write(async |txn| txn.execute_unprepared(statement).await).await;
        result.expect_err("the statement fails")
    };
    let wrong = run("INSERT INTO thing (n) VALUES (NULL)").await;
    assert!(!gantry_db::is_retryable(&wrong), "{wrong}");
    let lost = run("SELECT pg_terminate_backend(pg_backend_pid())").await;
    assert!(gantry_db::is_retryable(&lost), "{lost}");
    let conflict = run("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$").await;
    assert!(gantry_db::is_retryable(&conflict), "{conflict}");
}
