//! Outages of PostgreSQL. Calls fail at once while it is unreachable, and work again soon after.

use std::time::{Duration, Instant};

use gantry_db::{Database, Migrations, Settings, SqlMigration};
use sea_orm::{ConnectionTrait, DbErr, TransactionTrait};
use testing::databases::Server;

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] =
        &[SqlMigration { name: "0001_rows", sql: "CREATE TABLE rows (n BIGINT)" }];
}

/// Longest time of a call that fails at once.
const AT_ONCE: Duration = Duration::from_millis(200);

async fn write(database: &Database) -> Result<(), DbErr> {
    database.write(async |txn| txn.execute_unprepared("INSERT INTO rows VALUES (1)").await.map(drop)).await
}

async fn read(database: &Database) -> Result<(), DbErr> {
    database.read().execute_unprepared("SELECT n FROM rows LIMIT 1").await.map(drop)
}

/// Returns the time of a call that must fail because of the outage.
async fn failure(call: impl Future<Output = Result<(), DbErr>>) -> Duration {
    let begun = Instant::now();
    let error = call.await.expect_err("PostgreSQL is away");
    assert!(gantry_db::is_retryable(&error), "{error}");
    begun.elapsed()
}

/// Calls until a call succeeds. Returns the time that this took.
async fn recovery(database: &Database) -> Duration {
    let begun = Instant::now();
    while write(database).await.is_err() || read(database).await.is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the database stays unavailable");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    begun.elapsed()
}

/// Calls until PostgreSQL counts as unreachable. Returns the time of the slowest call.
async fn first_failures(database: &Database) -> Duration {
    let mut slowest = Duration::ZERO;
    loop {
        let took = failure(write(database)).await;
        slowest = slowest.max(took);
        let error = read(database).await.expect_err("PostgreSQL is away").to_string();
        if error.contains("refused") || error.contains("did not answer") {
            return slowest;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_fail_at_once_while_server_is_away() {
    let mut server = Server::new();
    let database = Database::connect::<Schema>(&server.url("postgres")).await.expect("open");
    for crash in [false, true] {
        write(&database).await.expect("written");
        if crash {
            server.crash()
        } else {
            server.stop()
        }
        let slowest = first_failures(&database).await;
        assert!(slowest < Duration::from_secs(3), "a call took {slowest:?}");
        for _ in 0..50 {
            let (written, read) = (failure(write(&database)).await, failure(read(&database)).await);
            assert!(written.max(read) < AT_ONCE, "a write took {written:?}, a read took {read:?}");
        }
        assert!(database.ping().await.expect_err("not ready").contains("refused"));
        server.start();
        let recovered = recovery(&database).await;
        assert!(recovered < Duration::from_secs(2), "the calls failed for {recovered:?}");
    }
    database.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_server_costs_one_timeout() {
    let server = Server::new();
    let database = Database::connect::<Schema>(&server.url("postgres")).await.expect("open");
    write(&database).await.expect("written");
    server.freeze();
    let slowest = first_failures(&database).await;
    assert!(slowest < Duration::from_secs(9), "a call took {slowest:?}");
    for _ in 0..50 {
        let took = failure(write(&database)).await;
        assert!(took < AT_ONCE, "a write took {took:?}");
    }
    server.thaw();
    let recovered = recovery(&database).await;
    assert!(recovered < Duration::from_secs(2), "the calls failed for {recovered:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_pool_waits() {
    let server = testing::databases::postgres().await;
    let settings = Settings { connections: 2, ..(&*server.url).into() };
    let database = Database::open::<Schema>(&settings).await.expect("open");
    let hold = async |seconds: &str| {
        let sleep = format!("SELECT pg_sleep({seconds})");
        database.write(async |txn| txn.execute_unprepared(&sleep).await.map(drop)).await
    };
    let waiting = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        (write(&database).await, read(&database).await)
    };
    let (one, other, (written, read)) = tokio::join!(hold("3.5"), hold("3.5"), waiting);
    for done in [one, other, written, read] {
        done.map_err(|error: DbErr| error).expect("a busy pool is no outage");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lack_of_connections_is_explained() {
    let server = Server::new();
    server.execute("CREATE ROLE service LOGIN; GRANT CREATE ON SCHEMA public TO service");
    let settings = Settings { connections: 7, ..server.url("service").into() };
    let database = Database::open::<Schema>(&settings).await.expect("open");
    server.execute("ALTER ROLE service CONNECTION LIMIT 1");
    // The connections that exist stay.
    let mut all = Vec::new();
    while let Ok(begun) = tokio::time::timeout(Duration::from_secs(1), database.read().begin()).await {
        all.push(begun.expect("begun"));
    }
    let waiting = async { read(&database).await.expect_err("no further connection is admitted") };
    let (opened, waited) = tokio::join!(Database::open::<Schema>(&settings), waiting);
    let opened = opened.expect_err("no further connection is admitted");
    assert!(opened.is_unavailable() && gantry_db::is_retryable(&waited));
    for error in [domain::error_chain(&opened), domain::error_chain(&waited)] {
        for part in ["no free connection", "at most 7", "--database-connections", "max_connections"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    drop(all);
    recovery(&database).await;
}
