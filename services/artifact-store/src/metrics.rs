//! Gauges of the rows in the store's database.
//!
//! A read of the metrics counts the rows, for at most a hundredth of the time.
//!
//! Each statement counts one slice of rows, because on SQLite a long read delays all other readers.
//! If rows change meanwhile, the sum matches no single instant. A count continues after its caller
//! has left. A read between two counts gets the result of the last count, with its time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use db::Database;
use domain::Timestamp;
use sea_orm::{ActiveEnum, ConnectionTrait, DbErr, Iterable, Statement};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::app::Store;
use crate::db::entity::{ArtifactState, State};
use crate::marks::sweep_queue;

/// Number of rows that one statement counts.
const SLICE: u64 = 10_000;

/// Pause after a count, as a multiple of the time that the count took.
const PAUSE_FACTOR: u32 = 99;

/// Registers the gauges. Each read of the metrics updates them.
pub(crate) fn add(store: &Arc<Store>, host: &server::Host) {
    metrics::describe_gauge!("gantry_store_artifacts", "Artifacts, by state.");
    metrics::describe_gauge!(
        "gantry_store_artifact_bytes",
        "Bytes of artifacts, each counted once, by state."
    );
    metrics::describe_gauge!("gantry_store_volumes", "Volumes on all workers, by state.");
    metrics::describe_gauge!(
        "gantry_store_volume_bytes",
        "Bytes of volumes, by state. Bytes that volumes share count for each of them."
    );
    metrics::describe_gauge!("gantry_store_containers", "Containers on all workers, by state.");
    metrics::describe_gauge!(
        "gantry_store_orphans",
        "Orphans: volumes and containers on workers that are unknown to a restored store."
    );
    metrics::describe_gauge!("gantry_store_pins", "Pins of workloads on artifacts.");
    metrics::describe_gauge!("gantry_store_builds", "Builds that have not ended.");
    metrics::describe_gauge!(
        "gantry_store_counted_timestamp_seconds",
        "Time of the last count of the store's rows, in seconds since 1970."
    );
    let counter = RowCounter { store: store.clone(), tasks: host.tasks(), next: Arc::default() };
    host.add_gauges(move || {
        let counter = counter.clone();
        async move { counter.gather().await }
    });
}

/// Counter of rows that limits how often it counts.
#[derive(Clone)]
struct RowCounter {
    store: Arc<Store>,
    tasks: TaskTracker,
    /// Earliest time of the next count. Locked while a count runs.
    next: Arc<Mutex<Option<Instant>>>,
}

impl RowCounter {
    /// Counts the rows, unless a count is running or the pause after the last one is not over.
    async fn gather(&self) {
        let Ok(mut next) = self.next.clone().try_lock_owned() else { return };
        let begun = Instant::now();
        if next.is_some_and(|next| next > begun) {
            return;
        }
        let store = self.store.clone();
        let counted = self.tasks.spawn(async move {
            if let Err(error) = set(&store.db, store.now()).await {
                tracing::debug!(error = domain::error_chain(&error), "cannot count for metrics");
            }
            *next = Some(Instant::now() + pause(begun.elapsed()));
        });
        // The task logs its own error.
        counted.await.ok();
    }
}

/// Returns the minimum pause after a count that took `took`.
fn pause(took: Duration) -> Duration {
    took.saturating_mul(PAUSE_FACTOR)
}

async fn set(db: &Database, now: Timestamp) -> Result<(), DbErr> {
    let artifacts = count(db, "artifacts", "artifact_id", "state", "size_bytes").await?;
    for state in ArtifactState::iter().map(|state| state.to_value()) {
        let (n, bytes) = artifacts.get(&state).copied().unwrap_or_default();
        metrics::gauge!("gantry_store_artifacts", "state" => state.clone()).set(n);
        metrics::gauge!("gantry_store_artifact_bytes", "state" => state).set(bytes);
    }
    let shown = sweep_queue::merged_state();
    let volumes = count(db, "volumes", "handle", &shown, "size_bytes").await?;
    for state in State::iter().map(|state| state.to_value()) {
        let (n, bytes) = volumes.get(&state).copied().unwrap_or_default();
        metrics::gauge!("gantry_store_volumes", "state" => state.clone()).set(n);
        metrics::gauge!("gantry_store_volume_bytes", "state" => state).set(bytes);
    }
    let containers = count(db, "containers", "handle", "state", "0").await?;
    for state in State::iter().map(|state| state.to_value()) {
        let (n, _) = containers.get(&state).copied().unwrap_or_default();
        metrics::gauge!("gantry_store_containers", "state" => state).set(n);
    }
    let orphans = count(db, "orphans", "handle", "'orphan'", "0").await?;
    metrics::gauge!("gantry_store_orphans").set(orphans.get("orphan").copied().unwrap_or_default().0);
    let pins = count(db, "pins", "holder_id", "'pinned'", "0").await?;
    metrics::gauge!("gantry_store_pins").set(pins.get("pinned").copied().unwrap_or_default().0);
    let ended = "CASE WHEN ended_at IS NULL THEN 'open' ELSE 'ended' END";
    let builds = count(db, "builds", "build_id", ended, "0").await?;
    metrics::gauge!("gantry_store_builds").set(builds.get("open").copied().unwrap_or_default().0);
    metrics::gauge!("gantry_store_counted_timestamp_seconds").set(now.0 as f64 / 1e6);
    Ok(())
}

/// Returns the number of rows of a table in each state, and their bytes. An index must begin with
/// the column `id`.
async fn count(
    db: &Database,
    table: &str,
    id: &str,
    state: &str,
    bytes: &str,
) -> Result<HashMap<String, (f64, f64)>, DbErr> {
    let backend = db.read().get_database_backend();
    let end = format!("SELECT {id} AS id FROM {table} WHERE {id} > $1 ORDER BY {id} LIMIT 1 OFFSET {SLICE}");
    let slice = format!(
        "SELECT {state} AS state, COUNT(*) AS n, SUM(CAST({bytes} AS DOUBLE PRECISION)) AS bytes
         FROM {table} WHERE {id} > $1 AND {id} <= $2 GROUP BY 1"
    );
    let mut counted: HashMap<String, (f64, f64)> = HashMap::new();
    let mut after = Uuid::nil();
    while after < Uuid::max() {
        let last = Statement::from_sql_and_values(backend, &end, [after.into()]);
        let last = match db.read().query_one_raw(last).await? {
            Some(row) => row.try_get("", "id")?,
            None => Uuid::max(),
        };
        let slice = Statement::from_sql_and_values(backend, &slice, [after.into(), last.into()]);
        for row in db.read().query_all_raw(slice).await? {
            let (n, bytes) = counted.entry(row.try_get("", "state")?).or_default();
            *n += row.try_get::<i64>("", "n")? as f64;
            *bytes += row.try_get::<f64>("", "bytes")?;
        }
        after = last;
    }
    Ok(counted)
}

#[cfg(test)]
mod tests {
    use domain::ArtifactId;
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::artifacts;
    use crate::artifacts::NewArtifact;
    use crate::db::migrations::Schema;

    #[tokio::test(flavor = "multi_thread")]
    async fn gauges_sum_largest_sizes_on_sqlite() {
        gauges_sum_largest_sizes(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gauges_sum_largest_sizes_on_postgres() {
        gauges_sum_largest_sizes(databases::postgres().await).await;
    }

    /// Workers report sizes, and the store does not trust them.
    async fn gauges_sum_largest_sizes(database: TestDatabase) {
        let db = Database::open::<Schema>(&database.url.as_str().into()).await.expect("a database");
        for _ in 0..2 {
            let new = &NewArtifact {
                id: ArtifactId::new(),
                team: "main".to_owned(),
                label: String::new(),
                owner: None,
                tree: None,
            };
            let create =
                |txn: db::Transaction| async move { artifacts::create(&txn, new, Timestamp(1)).await };
            db.write(create).await.expect("made");
        }
        let largest = format!("UPDATE artifacts SET size_bytes = {}", i64::MAX);
        let largest = largest.as_str();
        db.write(|txn| async move { txn.execute_unprepared(largest).await }).await.expect("written");
        set(&db, Timestamp(1)).await.expect("counted");
        let counted = count(&db, "artifacts", "artifact_id", "state", "size_bytes").await.expect("counted");
        assert_eq!(counted, HashMap::from([("open".to_owned(), (2.0, 2.0 * i64::MAX as f64))]));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gauges_count_every_row_once_on_sqlite() {
        gauges_count_every_row_once(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gauges_count_every_row_once_on_postgres() {
        gauges_count_every_row_once(databases::postgres().await).await;
    }

    /// Covers several slices, and many rows with the same id.
    async fn gauges_count_every_row_once(database: TestDatabase) {
        let db = Database::open::<Schema>(&database.url.as_str().into()).await.expect("a database");
        let is_sqlite = db.is_sqlite();
        let id_of = |number: &str| match is_sqlite {
            true => format!("unhex(printf('%032x', {number}))"),
            false => format!("CAST(lpad(to_hex({number}), 32, '0') AS UUID)"),
        };
        let (id, holder) = (id_of("i"), id_of("1 + i / 100"));
        let rows = 2 * SLICE + 7;
        let numbers =
            format!("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})");
        for sql in [
            format!(
                "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, size_bytes, had_owner, created_at, marked_at)
                 {numbers} SELECT {id}, {id}, 'main', '', CASE WHEN i % 2 = 0 THEN 'open' ELSE 'deleting' END, i % 2, FALSE, 0, 0 FROM n"
            ),
            format!("INSERT INTO holders {numbers} SELECT {id}, 'main', 0, NULL, NULL, 0 FROM n"),
            format!("INSERT INTO pins {numbers} SELECT {holder}, {id}, 0 FROM n"),
        ] {
            let sql = sql.as_str();
            db.write(|txn| async move { txn.execute_unprepared(sql).await }).await.expect("written");
        }
        let artifacts = count(&db, "artifacts", "artifact_id", "state", "size_bytes").await.expect("counted");
        let (open, deleting) = ((rows / 2) as f64, rows.div_ceil(2) as f64);
        let expected = [("open".to_owned(), (open, 0.0)), ("deleting".to_owned(), (deleting, deleting))];
        assert_eq!(artifacts, HashMap::from(expected));
        let pins = count(&db, "pins", "holder_id", "'pinned'", "0").await.expect("counted");
        assert_eq!(pins, HashMap::from([("pinned".to_owned(), (rows as f64, 0.0))]));
        assert_eq!(count(&db, "volumes", "handle", "state", "0").await.expect("counted"), HashMap::new());
    }

    #[test]
    fn counts_take_a_hundredth_of_the_time() {
        let took = Duration::from_millis(700);
        assert_eq!(took.as_secs_f64() / (took + pause(took)).as_secs_f64(), 0.01);
    }
}
