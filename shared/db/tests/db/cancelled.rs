//! Whoever changes something may be gone at any moment. His transaction goes with him, and nobody else finds himself within it.

use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use gantry_db::{Database, Migrations, SqlMigration};
use sea_orm::{ConnectionTrait, DbBackend, DbErr, Statement};
use testing::databases::TestDatabase;

struct One;

impl Migrations for One {
    const ALL: &'static [SqlMigration] =
        &[SqlMigration { name: "0001_rows", sql: "CREATE TABLE rows (n BIGINT PRIMARY KEY)" }];
}

/// How often each moment is tried.
const TIMES: usize = 40;

/// Drops `operation` when it waits for the `moment`th time. `None`: it was dropped.
async fn dropped_at<T>(moment: usize, operation: impl Future<Output = T>) -> Option<T> {
    let (mut operation, mut waited) = (pin!(operation), 0);
    std::future::poll_fn(move |context| {
        let polled = operation.as_mut().poll(context).map(Some);
        waited += usize::from(polled.is_pending());
        if waited == moment { Poll::Ready(None) } else { polled }
    })
    .await
}

/// In what state the other connections are, but those that nobody uses.
async fn in_use(database: &Database) -> Vec<String> {
    let others = "SELECT state FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'";
    let others = Statement::from_string(DbBackend::Postgres, others);
    let rows = database.read().query_all_raw(others).await.expect("it answers");
    rows.iter().map(|row| row.try_get("", "state").expect("a state")).collect()
}

/// Drops a transaction at each of its moments in turn. Afterwards everybody else finds the database as if it had never been, and may write.
async fn whoever_is_dropped_leaves_no_transaction_behind(
    server: TestDatabase,
    is_free: impl AsyncFn(&Database),
) {
    let database = Database::connect::<One>(&server.url).await.expect("a database");
    let looker = Database::connect::<One>(&server.url).await.expect("a database");
    let (mut written, mut latest) = (0, 0);
    for _ in 0..TIMES {
        let mut moment = 0;
        loop {
            moment += 1;
            let add = || {
                database.write(async |txn| {
                    let add = format!("INSERT INTO rows SELECT {written} WHERE NOT EXISTS (SELECT * FROM rows WHERE n = {written})");
                    txn.execute_unprepared(&add).await.map(drop)
                })
            };
            let done: Option<Result<(), DbErr>> = dropped_at(moment, add()).await;
            is_free(&looker).await;
            if let Some(done) = done {
                done.expect("written");
                break;
            }
            latest = latest.max(moment);
            add().await.expect("written");
            written += 1;
        }
        written += 1;
    }
    assert!(latest > 1, "they are dropped at more than one moment");
    let count = Statement::from_string(
        looker.read().get_database_backend(),
        "SELECT CAST(COUNT(*) AS BIGINT) AS n FROM rows",
    );
    let row = looker.read().query_one_raw(count).await.expect("it answers").expect("a row");
    assert_eq!(row.try_get::<i64>("", "n").expect("a number"), written);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_dropped_leaves_no_transaction_behind_postgres() {
    let server = testing::databases::postgres().await;
    whoever_is_dropped_leaves_no_transaction_behind(server, async |looker| {
        let begun = Instant::now();
        loop {
            let states = in_use(looker).await;
            if states.is_empty() {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "connections are still {states:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_is_dropped_leaves_no_transaction_behind_sqlite() {
    whoever_is_dropped_leaves_no_transaction_behind(testing::databases::sqlite(), async |_| {}).await;
}
