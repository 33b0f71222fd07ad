//! Invariants that must hold whenever no operation is in progress.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use domain::{LeaseId, WorkloadId};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbBackend, DbErr, EntityTrait, QueryFilter, QueryOrder, Statement,
};

use super::{World, spec};
use crate::db::entity::lease::Kind;
use crate::db::entity::{event, from_json, lease, worker, workload};
use crate::insight::metrics;
use crate::workers::lease_counts;
use crate::workers::revisions;
use crate::workloads;
use crate::workloads::events::Event;

/// Waits until the transactions of killed operations are committed or rolled back. A transaction
/// may still commit after its process has ended. On SQLite, a writer has waited for the others.
async fn rest(txn: &db::Transaction) -> Result<(), DbErr> {
    if txn.get_database_backend() == DbBackend::Postgres {
        let tables =
            "LOCK TABLE workloads, events, leases, workers, heartbeats, reservations, outbox IN SHARE MODE";
        txn.execute_unprepared(tables).await?;
    }
    Ok(())
}

/// Waits like [`rest`], and until PostgreSQL has ended all statements of killed operations.
pub(crate) async fn rest_of_all(db: &db::Database) -> Result<(), DbErr> {
    db.write(async |txn| rest(&txn).await).await?;
    let db = db.read();
    if db.get_database_backend() != DbBackend::Postgres {
        return Ok(());
    }
    let others = "SELECT state || ': ' || query AS others FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'";
    let begun = Instant::now();
    loop {
        let rows = db.query_all_raw(Statement::from_string(DbBackend::Postgres, others)).await?;
        if rows.is_empty() {
            return Ok(());
        }
        let others =
            rows.iter().map(|row| row.try_get::<String>("", "others")).collect::<Result<Vec<_>, _>>()?;
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "the statements of killed operations do not end: {others:?}"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

impl World {
    /// Checks all invariants while no operation is in progress.
    pub(super) async fn check(&self) {
        self.db.write(async |txn| rest(&txn).await).await.expect("the database answers");
        let db = self.db.read();
        let all = lease::Entity::find().all(db).await.expect("leases");
        let live: Vec<_> = all.iter().filter(|lease| lease.state != lease::State::Ended).collect();

        for worker in worker::Entity::find().all(db).await.expect("workers") {
            let tasks: Vec<_> =
                live.iter().filter(|l| l.worker_id == worker.id && l.kind.takes_a_slot()).collect();
            let checks = tasks.iter().filter(|lease| lease.kind == Kind::Check).count();
            let memory: i64 = tasks.iter().map(|lease| lease.memory_bytes).sum();
            let tasks = i64::try_from(tasks.len()).expect("few");
            assert_eq!(worker.active_tasks, tasks, "the counter of {} differs from its leases", worker.name);
            assert_eq!(worker.active_checks, i64::try_from(checks).expect("few"));
            assert_eq!(worker.reserved_memory_bytes, memory);
            assert!(
                worker.memory_bytes.is_none_or(|all| memory <= all),
                "{} has {memory} bytes reserved",
                worker.name
            );
            let cpu = worker.reserved_cpu_millis;
            assert!(worker.cpu_millis.is_none_or(|all| cpu <= all), "{} has {cpu} cpu reserved", worker.name);
            assert!(worker.max_tasks.is_none_or(|max| tasks <= max), "{} has {tasks} tasks", worker.name);
            self.check_worker(&worker, &live).await;
        }
        let drift = metrics::counters_drift(db).await.expect("compared");
        assert!(drift.iter().all(|(_, drift)| *drift == 0), "counters and leases disagree: {drift:?}");
        let mut held = HashSet::new();
        for lease in &live {
            assert!(lease.workload_id.is_none_or(|id| held.insert(id)), "two live leases of a workload");
        }
        let workloads = workload::Entity::find().all(db).await.expect("workloads");
        for row in &workloads {
            self.check_workload(row, &live).await;
        }
        let known = workloads.iter().map(|row| WorkloadId::from_uuid(row.id)).collect();
        let (workers, now) = (worker::Entity::find().all(db).await.expect("workers"), self.now());
        self.seen(|seen| seen.promises.check(&all, &workers, &known, self.config.lease_term, now));
        let started = self.seen(|seen| {
            let is_denied = |lease: &LeaseId| seen.denied.get(lease).is_some_and(|times| *times > 0);
            let mut started = seen.started.clone();
            started.values_mut().for_each(|attempts| attempts.retain(|lease| !is_denied(lease)));
            started
        });
        for (workload, attempts) in &started {
            let row =
                workloads::find(db, *workload).await.expect("workloads").expect("no workload is deleted");
            assert!(row.retried <= i64::from(spec(*workload).retries), "{workload} was retried too often");
            assert!(
                spec(*workload).interruptible
                    || attempts.len() <= 1 + usize::try_from(row.retried).expect("few"),
                "{workload} was started {} times, is not interruptible and was retried {} times",
                attempts.len(),
                row.retried
            );
        }
        for lease in all.iter().filter(|lease| lease.stop_reason == Some(lease::StopReason::StartTimeout)) {
            let workload = lease.workload_id.map(WorkloadId::from_uuid).expect("a workload");
            let attempts = started.get(&workload);
            let id = LeaseId::from_uuid(lease.id);
            assert!(
                attempts.is_none_or(|attempts| !attempts.contains(&id)),
                "{workload} exceeded its start timeout, and started"
            );
        }
        let ended = all.iter().filter(|lease| lease.state == lease::State::Ended);
        let ended: Vec<_> = ended.map(|lease| (LeaseId::from_uuid(lease.id), lease.worker_id)).collect();
        let workers: HashSet<_> = workers.into_iter().map(|worker| worker.id).collect();
        let live: HashSet<_> = live.iter().map(|lease| LeaseId::from_uuid(lease.id)).collect();
        self.seen(|seen| {
            seen.ended_leases.retain(|_, worker| workers.contains(worker));
            let again = live.iter().find(|lease| seen.ended_leases.contains_key(lease));
            assert_eq!(again, None, "a lease that had ended is live again");
            seen.ended_leases.extend(ended);
        });
    }

    async fn check_worker(&self, worker: &worker::Model, live: &[&lease::Model]) {
        let own: HashSet<_> =
            live.iter().filter(|lease| lease.worker_id == worker.id).map(|lease| lease.id).collect();
        let load = lease_counts::loads(self.db.read(), &[worker.id]).await.expect("loads");
        let load = load.get(&worker.id).copied().unwrap_or_default();
        assert_eq!(load.leases as usize, own.len());
        if worker.landed_at.is_some() {
            assert_ne!(worker.desired, worker::Desired::Run, "{} takes work and is drained", worker.name);
            assert_eq!(load.uninterruptible, 0, "{} is drained, and has uninterruptible leases", worker.name);
        }
        self.seen(|seen| match worker.unsupported_versions.as_str() {
            "[]" => _ = seen.misfits.remove(&worker.id),
            _ => {
                if let Some(before) = seen.misfits.insert(worker.id, own.clone()) {
                    assert!(own.is_subset(&before), "{} is incompatible, and got a lease", worker.name);
                }
            }
        });
        let row = worker::Model {
            generation: 0,
            active_tasks: 0,
            active_checks: 0,
            reserved_cpu_millis: 0,
            reserved_memory_bytes: 0,
            reserved_disk_bytes: 0,
            ended_tasks: 0,
            ..worker.clone()
        };
        self.seen(|seen| {
            let previous = seen.rows.insert(worker.id, row.clone());
            if let Some(previous) = previous.filter(|previous| previous.revision == worker.revision) {
                assert_eq!(row, previous, "the row has changed without a new revision");
            }
        });
        let last = revisions::revisions(self.db.read()).await.expect("revisions").last;
        assert!(worker.revision <= last, "{} has a revision that was never assigned", worker.name);
        self.seen(|seen| {
            assert!(seen.revision <= last, "revisions fall");
            seen.revision = last;
            assert!(!seen.gone.contains(&worker.id), "{} was removed and exists", worker.name);
            if worker.desired == worker::Desired::Run {
                assert_eq!(
                    seen.down.remove(&worker.id),
                    None,
                    "{} takes work without an operation",
                    worker.name
                );
                return;
            }
            if let Some(before) = seen.down.get(&worker.id) {
                assert!(own.is_subset(before), "{} got a lease while out of service", worker.name);
            }
            seen.down.insert(worker.id, own);
        });
    }

    async fn check_workload(&self, row: &workload::Model, live: &[&lease::Model]) {
        use workload::State::{Accepted, Assigned, Finished, Pending, Running, Settling, Starting};
        let id = WorkloadId::from_uuid(row.id);
        let lease = live.iter().find(|lease| lease.workload_id == Some(row.id));
        match row.state {
            Assigned | Starting | Running => {
                assert_eq!(lease.map(|lease| lease.id), row.lease_id, "{id} is {:?}", row.state);
            }
            Pending | Finished => assert!(lease.is_none(), "{id} is {:?} and holds a lease", row.state),
            Accepted | Settling => panic!("{id} needs no store and is {:?}", row.state),
        }
        let events = event::Entity::find()
            .filter(event::Column::WorkloadId.eq(row.id))
            .order_by_asc(event::Column::Revision)
            .all(self.db.read())
            .await
            .expect("events");
        let revisions: Vec<_> = events.iter().map(|event| event.revision).collect();
        assert_eq!(revisions, (1..=row.revision).collect::<Vec<_>>(), "{id} misses a revision");
        let last = events.iter().position(|event| {
            matches!(from_json::<Event>(&event.event).expect("an event"), Event::Finished { .. })
        });
        match row.state {
            Finished => {
                assert_eq!(last, Some(events.len() - 1), "{id} has finished, and that is the last event")
            }
            _ => assert_eq!(last, None, "{id} has not finished"),
        }
        if let Some(ending) = &row.ending {
            let first = self.seen(|seen| seen.endings.entry(id).or_insert_with(|| ending.clone()).clone());
            assert_eq!(*ending, first, "{id} ended twice");
        }
    }
}
