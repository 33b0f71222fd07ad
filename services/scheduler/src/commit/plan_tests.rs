//! Query plans of PostgreSQL: lookups by id read only the requested rows, regardless of table
//! statistics.

use std::iter;
use std::time::Duration;

use db::Database;
use sea_orm::{Statement, TransactionTrait};
use testing::databases::TestDatabase;

use super::*;
use crate::config::Config;
use crate::db::entity::lease::{EndedBy, StopReason};
use crate::notify::changes::Effects;
use crate::workers;
use crate::workers::cache::WorkerCache;
use crate::workers::revisions;
use crate::workers::test_support::registration;
use crate::workloads;

/// Number of live rows, and of ended rows.
const ROWS: i64 = 5_000;
/// Number of rows in a nearly empty table.
const FEW: i64 = 300;
/// Number of requested rows.
const ASKED: usize = 10;

/// Creates a database with one worker.
async fn start() -> (TestDatabase, Database, Config) {
    let database = testing::databases::postgres().await;
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let (registration, config, now) = (registration("one"), Config::new("", ""), Timestamp::now());
    let let_in = db.write(async |txn| {
        workers::register(&txn, &[&registration], &config, now, &mut Effects::default()).await
    });
    let_in.await.expect("the database answers").remove(0).expect("registered");
    (database, db, config)
}

/// Inserts leases and workloads in these states.
async fn fill(db: &Database, lease: &str, workload: &str) {
    let id = "CAST(lpad(to_hex(n), 32, '0') AS UUID)";
    let from = if lease == "ended" { 1 } else { ROWS + 1 };
    let numbers = format!("generate_series({from}, {}) AS numbers (n)", from + ROWS - 1);
    for statement in [
        format!(
            "INSERT INTO workloads (id, sequence, team, spec, spec_digest, traceparent, settles, state, revision, submitted_at, locations, waiting_for)
             SELECT {id}, {id}, 'main', '', '', '', FALSE, '{workload}', 1, 1, '[]', '[]' FROM {numbers}"
        ),
        leases_in(lease, from, ROWS),
    ] {
        db.read().execute_unprepared(&statement).await.expect("rows");
    }
}

/// Returns the statement that inserts `count` leases in this state, with ids from `from` on.
fn leases_in(state: &str, from: i64, count: i64) -> String {
    let (ended_at, ended_by) = if state == "ended" { ("1", "'reported'") } else { ("NULL", "NULL") };
    format!(
        "INSERT INTO leases (id, worker_id, incarnation, kind, team, state, generation, phase, request, expires_at, granted_at, ended_at, ended_by)
         SELECT CAST(lpad(to_hex(n), 32, '0') AS UUID), workers.id, workers.incarnation, 'task', 'main', '{state}', 1, 0, '', 1, 1, {ended_at}, {ended_by}
         FROM workers, generate_series({from}, {}) AS numbers (n)",
        from + count - 1
    )
}

/// Returns the number of rows of `leases` and `workloads` read by this and earlier transactions, as
/// far as PostgreSQL has not reported them yet.
async fn read(txn: &DatabaseTransaction) -> i64 {
    let query =
        "SELECT CAST(SUM(seq_tup_read + idx_tup_fetch) AS BIGINT) AS rows FROM pg_stat_xact_user_tables
                 WHERE relname IN ('leases', 'workloads')";
    let statement = Statement::from_string(txn.get_database_backend(), query);
    let row = txn.query_one_raw(statement).await.expect("statistics").expect("a row");
    row.try_get("", "rows").expect("a number")
}

/// The statistics were taken when no row was live, so PostgreSQL expects an index of live rows to
/// be nearly empty.
#[tokio::test]
async fn rows_are_found_by_id_with_old_statistics() {
    let (_database, db, config) = start().await;
    let now = Timestamp::now();
    fill(&db, "ended", "finished").await;
    db.read().execute_unprepared("VACUUM ANALYZE").await.expect("analyzed");
    fill(&db, "granted", "pending").await;
    let counts = format!("UPDATE workers SET active_tasks = {ROWS}");
    db.read().execute_unprepared(&counts).await.expect("counted");

    let txn = db.read().begin().await.expect("a transaction");
    let ids = |from: i64| {
        let ids = (from..).take(ASKED).map(|n| Uuid::from_u128((ROWS + n) as u128));
        ids.collect::<Vec<_>>()
    };
    let leases = |from: i64| ids(from).into_iter().map(LeaseId::from_uuid).collect::<Vec<_>>();
    let mut before = read(&txn).await;
    let mut few = async |what: &str| {
        let after = read(&txn).await;
        assert!(after - before < 20 * ASKED as i64, "{what} read {} rows", after - before);
        before = after;
    };

    let worker = WorkerId::new();
    let released = leases(1).into_iter().map(|lease| (lease, worker)).collect::<Vec<_>>();
    let (ended, _) = release_and_lock(&txn, &released, iter::empty(), now).await.expect("released");
    assert_eq!(ended.len(), ASKED);
    few("releasing leases").await;

    let pinned =
        |id| PinnedWorkload { id: WorkloadId::from_uuid(id), locations: String::new(), reasons: vec![] };
    let plan = Plan { pinned: ids(1).into_iter().map(pinned).collect(), ..Plan::default() };
    let mut done = CommitResult::default();
    lock_waiting(&txn, &plan, &mut done).await.expect("locked");
    assert_eq!(done.settled.len(), ASKED, "pinned already");
    few("locking waiting workloads").await;

    let mut effects = Effects::default();
    for lease in leases(1000) {
        leases::renew(&txn, lease, now, Duration::from_secs(1)).await.expect("renewed");
        few("renewing a lease").await;
        assert!(leases::raise_phase(&txn, lease, 1).await.expect("noted"));
        few("raising a phase").await;
        let row = leases::find(&txn, lease).await.expect("leases").expect("a lease");
        leases::stop(&txn, row, StopReason::Cancelled, Duration::ZERO, &mut effects).await.expect("stopped");
        few("stopping a lease").await;
        assert!(leases::end(&txn, lease, EndedBy::Reported, now, &mut effects).await.expect("ended"));
        few("ending a lease").await;
    }

    let last = revisions::revisions(&txn).await.expect("revisions").last;
    assert!(workers::stranded_leases(&txn, last).await.expect("leases").is_empty());
    few("reading leases of lost workers").await;
    let late = now + config.lost_after;
    assert!(workers::leases_of_stalled(&txn, &config, late).await.expect("leases").is_empty());
    few("reading leases of stalled workers").await;
}

/// A prepared plan stays in use for a while, in which thousands of rows may be inserted.
#[tokio::test]
async fn old_plan_reads_few_rows_of_grown_table() {
    let (_database, db, config) = start().await;
    let mut cache = WorkerCache::new(&config);
    cache.catch_up(&db).await.expect("read");
    let worker = cache.workers.lock().workers().next().expect("a worker").id;
    // A table without statistics: PostgreSQL knows only its size.
    db.read().execute_unprepared(&leases_in("ended", ROWS * 10, FEW)).await.expect("leases");
    let txn = db.read().begin().await.expect("a transaction");
    let counts = format!("UPDATE workers SET active_tasks = {}", ROWS * 2);
    txn.execute_unprepared(&counts).await.expect("counted");
    let from = |n: i64| (0..ASKED as i64).map(move |more| Uuid::from_u128((n + more) as u128));
    let release = async |n: i64| {
        let releases: Vec<_> = from(n).map(|id| (LeaseId::from_uuid(id), worker)).collect();
        let released = release_and_lock(&txn, &releases, iter::empty(), Timestamp::now()).await;
        released.expect("released").0.len()
    };
    assert_eq!(release(ROWS * 10).await, 0, "planned");
    txn.execute_unprepared(&leases_in("granted", 1, ROWS)).await.expect("leases");
    let before = read(&txn).await;
    assert_eq!(release(1).await, ASKED);
    let rows = read(&txn).await - before;
    assert!(rows < 20 * ASKED as i64, "{rows} rows were read");
}

/// A statement must contain the condition of a partial index literally, because plans are made
/// without parameter values.
#[tokio::test]
async fn due_queries_read_no_other_rows() {
    let (_database, db, _) = start().await;
    fill(&db, "ended", "finished").await;
    fill(&db, "granted", "pending").await;
    let accepted = format!("id > CAST(lpad(to_hex({}), 32, '0') AS UUID)", ROWS + ROWS / 2);
    for due_later in [
        "UPDATE workloads SET finished_at = 2 WHERE state = 'finished'".to_owned(),
        "UPDATE workloads SET queue_deadline = 2, run_deadline = 2, start_timeout_us = 1 WHERE state = 'pending'".to_owned(),
        format!("UPDATE workloads SET submitted_at = 2, state = 'accepted' WHERE {accepted}"),
    ] {
        db.read().execute_unprepared(&due_later).await.expect("changed");
    }
    db.read().execute_unprepared("VACUUM ANALYZE").await.expect("analyzed");

    let txn = db.read().begin().await.expect("a transaction");
    let mut before = read(&txn).await;
    let mut none = async |what: &str| {
        let after = read(&txn).await;
        assert_eq!(after, before, "rows read while {what}");
        before = after;
    };
    let early = Timestamp(1);
    assert!(workloads::overdue(&txn, early).await.expect("workloads").is_empty());
    none("reading overdue workloads").await;
    assert!(workloads::forgotten(&txn, early).await.expect("workloads").is_empty());
    none("reading unpinned workloads").await;
    assert_eq!(workloads::forget(&txn, early).await.expect("workloads"), 0);
    none("reading old workloads").await;
    leases::forget(&txn, early).await.expect("leases");
    none("reading old leases").await;
    assert!(!leases::any_expired(&txn, early - Duration::from_secs(1)).await.expect("leases"));
    none("reading expired leases").await;
}
