//! Schemas of one PostgreSQL database, and databases of older and newer programs.

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

#[tokio::test]
async fn who_has_connections_of_its_own_sees_the_same_and_waits_for_nobody() {
    let fresh = testing::databases::postgres().await;
    let settings = Settings { schema: Some("one".to_owned()), connections: 2, ..(&*fresh.url).into() };
    let database = Database::open::<Old>(&settings).await.expect("open");
    let apart = database.with_own_connections(1).await.expect("connected");
    let all =
        [database.read().begin().await, database.read().begin().await].map(|begun| begun.expect("begun"));
    add(&apart, 1).await;
    assert_eq!(rows(&apart).await, [1]);
    drop(all);
    assert_eq!(rows(&database).await, [1]);
    let alone = Database::open::<Old>(&(&*testing::databases::sqlite().url).into()).await.expect("open");
    let apart = alone.with_own_connections(1).await.expect("connected");
    add(&apart, 2).await;
    assert_eq!(rows(&alone).await, [2], "SQLite has one that writes");
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
            matches!(&refused, ConnectError::SchemaTooOld { missing } if missing == &["0001_first"]),
            "{refused}"
        );
        Database::open::<Old>(&may).await.expect("migrated");
        Database::open::<Old>(&may_not).await.expect("it is of this program");
        let refused = Database::open::<New>(&may_not).await.expect_err("it is older");
        assert!(
            matches!(&refused, ConnectError::SchemaTooOld { missing } if missing == &["0002_second"]),
            "{refused}"
        );
        Database::open::<New>(&may).await.expect("migrated");
        for settings in [&may, &may_not] {
            let refused = Database::open::<Old>(settings).await.expect_err("it is newer");
            assert!(
                matches!(&refused, ConnectError::SchemaTooNew { unknown } if unknown == &["0002_second"]),
                "{refused}"
            );
        }
    }
}

#[tokio::test]
async fn what_an_edited_migration_made_is_refused_and_keeps_everything() {
    for fresh in [testing::databases::sqlite(), testing::databases::postgres().await] {
        let (may, place) = (Settings::from(&*fresh.url), Settings::from(&*fresh.url).place());
        let may_not = Settings { migrate: false, ..may.clone() };
        let old = Database::open::<Old>(&may).await.expect("migrated");
        add(&old, 7).await;
        let refused = async || {
            let mut said = Vec::new();
            for settings in [&may, &may_not] {
                let error = Database::open::<Edited>(settings).await.expect_err("it has another schema");
                let ConnectError::OtherSchema { place: named, what } = &error else { panic!("{error}") };
                assert!(*named == place && error.to_string().contains(&place), "{error}");
                said.push(what.clone());
            }
            said
        };
        assert_eq!(refused().await, ["0001_first was another one then"; 2]);

        // From before digests were kept.
        let forget = async || {
            let forgotten = async |txn: gantry_db::Transaction| {
                txn.execute_unprepared("DROP TABLE migration_digests").await.map(drop)
            };
            old.write(forgotten).await.map_err(|error: DbErr| error).expect("forgotten");
        };
        forget().await;
        assert_eq!(refused().await, ["the table thing has no column m"; 2]);
        assert_eq!(rows(&old).await, [7]);

        // One that is the same is adopted, and brought further.
        Database::open::<New>(&may).await.expect("it is what our migration makes");
        assert_eq!(refused().await, ["0001_first was another one then"; 2]);
        assert_eq!(rows(&old).await, [7]);
        forget().await;
        Database::open::<New>(&may_not).await.expect("it is what our migrations make");
    }
}

#[test]
fn a_database_is_named_without_what_opens_it() {
    let named = |settings: Settings| settings.place();
    assert_eq!(named("sqlite:///var/lib/x.db".into()), "/var/lib/x.db");
    assert_eq!(named("sqlite:///var/lib/a%3Fb.db?mode=rwc".into()), "/var/lib/a?b.db");
    let postgres = Settings::from("postgres://me:secret@host:5432/gantry?sslmode=disable");
    assert_eq!(named(postgres.clone()), "database host:5432/gantry");
    let its = Settings { schema: Some("its".to_owned()), ..postgres };
    assert_eq!(named(its), "schema its of database host:5432/gantry");
}

#[tokio::test]
async fn one_that_does_not_answer_is_waited_for_and_one_that_refuses_is_not() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it").port();
    let nobody = Settings::from(format!("postgres://postgres@127.0.0.1:{port}/nothing"));
    let refused = Database::open::<Old>(&nobody).await.expect_err("nobody listens");
    assert!(refused.is_unavailable(), "{refused}");

    let there = testing::databases::postgres().await;
    let (server, _) = there.url.rsplit_once('/').expect("a database");
    let wrong = Settings { wait: true, ..format!("{server}/there_is_none").into() };
    let refused = Database::open::<Old>(&wrong).await.expect_err("there is no such database");
    assert!(!refused.is_unavailable(), "{refused}");
}

#[tokio::test]
async fn a_database_that_goes_away_is_told_from_a_statement_that_fails() {
    let there = testing::databases::postgres().await;
    let db = Database::open::<Old>(&there.url.as_str().into()).await.expect("open");
    let say = async |statement: &str| {
        let said = db.write(async |txn| txn.execute_unprepared(statement).await).await;
        said.expect_err("it fails")
    };
    let wrong = say("INSERT INTO thing (n) VALUES (NULL)").await;
    assert!(!gantry_db::is_retryable(&wrong), "{wrong}");
    let away = say("SELECT pg_terminate_backend(pg_backend_pid())").await;
    assert!(gantry_db::is_retryable(&away), "{away}");
    let busy = say("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$").await;
    assert!(gantry_db::is_retryable(&busy), "{busy}");
}
