//! Cancellation of write transactions. A dropped caller leaves no open transaction on a connection.

use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use gantry_db::{Database, Migrations, SqlMigration};
use sea_orm::{ConnectionTrait, DbBackend, DbErr, Statement};
use testing::databases::TestDatabase;

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] =
        &[SqlMigration { name: "0001_rows", sql: "CREATE TABLE rows (n BIGINT PRIMARY KEY)" }];
}

/// Number of rounds. Each round drops a transaction at each of its await points.
const ROUNDS: usize = 40;

/// Runs `operation`, and drops it when it is pending for the `nth` time. Returns `None` if it was
/// dropped.
async fn drop_at<T>(nth: usize, operation: impl Future<Output = T>) -> Option<T> {
    let (mut operation, mut pending) = (pin!(operation), 0);
    std::future::poll_fn(move |context| {
        let polled = operation.as_mut().poll(context).map(Some);
        pending += usize::from(polled.is_pending());
        if pending == nth { Poll::Ready(None) } else { polled }
    })
    .await
}

/// Returns the states of all other connections that are not idle.
async fn busy_states(database: &Database) -> Vec<String> {
    let others = "SELECT state FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'";
    let others = Statement::from_string(DbBackend::Postgres, others);
    let rows = database.read().query_all_raw(others).await.expect("query");
    rows.iter().map(|row| row.try_get("", "state").expect("a state")).collect()
}

/// Drops a transaction at each of its await points in turn. After each drop, another connection can
/// write.
async fn dropped_writer_leaves_no_transaction(
    server: TestDatabase,
    wait_until_idle: impl AsyncFn(&Database),
) {
    let database = Database::connect::<Schema>(&server.url).await.expect("a database");
    let observer = Database::connect::<Schema>(&server.url).await.expect("a database");
    let (mut written, mut latest) = (0, 0);
    for _ in 0..ROUNDS {
        let mut nth = 0;
        loop {
            nth += 1;
            let add = || {
                database.write(async |txn| {
                    let add = format!("INSERT INTO rows SELECT {written} WHERE NOT EXISTS (SELECT * FROM rows WHERE n = {written})");
                    txn.execute_unprepared(&add).await.map(drop)
                })
            };
            let done: Option<Result<(), DbErr>> = drop_at(nth, add()).await;
            wait_until_idle(&observer).await;
            if let Some(done) = done {
                done.expect("written");
                break;
            }
            latest = latest.max(nth);
            add().await.expect("written");
            written += 1;
        }
        written += 1;
    }
    assert!(latest > 1, "transactions are dropped at more than one await point");
    let count = Statement::from_string(
        observer.read().get_database_backend(),
        "SELECT CAST(COUNT(*) AS BIGINT) AS n FROM rows",
    );
    let row = observer.read().query_one_raw(count).await.expect("query").expect("a row");
    assert_eq!(row.try_get::<i64>("", "n").expect("a number"), written);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_writer_leaves_no_transaction_postgres() {
    let server = testing::databases::postgres().await;
    dropped_writer_leaves_no_transaction(server, async |observer| {
        let start = Instant::now();
        loop {
            let states = busy_states(observer).await;
            if states.is_empty() {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "connections are still {states:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_writer_leaves_no_transaction_sqlite() {
    dropped_writer_leaves_no_transaction(testing::databases::sqlite(), async |_| {}).await;
}
