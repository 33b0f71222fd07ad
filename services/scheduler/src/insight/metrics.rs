//! Gauges of the scheduler's rows, counted when metrics are scraped.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use db::Database;
use domain::Timestamp;
use sea_orm::{
    ActiveEnum, ColumnTrait, ConnectionTrait, DbErr, EntityTrait, ExprTrait, Iterable, PaginatorTrait,
    QueryFilter, QuerySelect, Statement,
};

use crate::app::App;
use crate::db::entity::{lease, reservation, worker, workload};
use crate::placement::{CODES, DecidedBy, WAITS_FOR};

/// Maximum number of teams with their own gauges. Further teams share one label.
const TEAMS: usize = 100;

/// The team label of all further teams.
const OTHER: &str = "other";

/// Updates the gauges at each scrape.
pub(crate) fn add(app: App, host: &server::Host) {
    describe();
    // A counter exists from the start, with the value 0.
    for decided_by in DecidedBy::all() {
        metrics::counter!("gantry_scheduler_placements_total", "decided_by" => decided_by.name()).absolute(0);
    }
    for code in CODES {
        metrics::counter!("gantry_scheduler_refusals_total", "reason" => code).absolute(0);
    }
    _ = metrics::histogram!("gantry_scheduler_decision_seconds");
    let shown = Arc::new(Mutex::new(ExportedGauges::default()));
    host.add_gauges(move || {
        let (app, shown) = (app.clone(), shown.clone());
        async move {
            let waiting = waiting(&app, Timestamp::now());
            shown.lock().unwrap_or_else(PoisonError::into_inner).show(waiting);
            let drift = app.drift.total();
            for (what, count) in [("missing", drift.missing), ("stray", drift.stray)] {
                metrics::gauge!("gantry_scheduler_leases_drift", "what" => what).set(count as f64);
            }
            if let Err(error) = set(&app.context.db).await {
                tracing::debug!(error = domain::error_chain(&error), "cannot update the gauges of metrics");
            }
        }
    });
}

/// Requests of one team that wait for the same reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct WaitingTotals {
    count: usize,
    /// Waiting time of the oldest request.
    oldest: Duration,
}

/// Counts the waiting requests by team and reason.
fn waiting(app: &App, now: Timestamp) -> HashMap<(String, &'static str), WaitingTotals> {
    let lines: Vec<_> = {
        let queue = app.dispatch.queue();
        queue.demand().map(|(demand, count, oldest)| (demand.clone(), count, oldest)).collect()
    };
    let mut waiting = HashMap::<_, WaitingTotals>::new();
    for (demand, count, oldest) in lines {
        // The lock is taken for each demand, so that placement is not blocked for long.
        let reason = app.dispatch.workers.lock().waits_for(&demand);
        let of = waiting.entry((demand.shape.team.clone(), reason)).or_default();
        of.count += count;
        of.oldest = of.oldest.max(now.since(oldest));
    }
    waiting
}

/// The label sets with a gauge, so that a gauge without requests is reset to 0.
#[derive(Debug, Default)]
struct ExportedGauges {
    teams: HashSet<String>,
    labels: HashSet<(String, &'static str)>,
}

impl ExportedGauges {
    fn show(&mut self, waiting: HashMap<(String, &'static str), WaitingTotals>) {
        for ((team, reason), now) in self.now(waiting) {
            let labels = [("team", team), ("reason", reason.to_owned())];
            metrics::gauge!("gantry_scheduler_queue_length", &labels).set(now.count as f64);
            metrics::gauge!("gantry_scheduler_queue_oldest_seconds", &labels).set(now.oldest.as_secs_f64());
        }
    }

    fn now(
        &mut self,
        waiting: HashMap<(String, &'static str), WaitingTotals>,
    ) -> HashMap<(String, &'static str), WaitingTotals> {
        let none = WAITS_FOR.into_iter().map(|reason| (OTHER.to_owned(), reason));
        let none = none.chain(self.labels.drain()).map(|labels| (labels, WaitingTotals::default()));
        let mut now: HashMap<_, _> = none.collect();
        let mut waiting: Vec<_> = waiting.into_iter().collect();
        // Of new teams, the teams with the most requests get their own gauges.
        waiting.sort_by_key(|(_, waiting)| std::cmp::Reverse(waiting.count));
        for ((team, reason), more) in waiting {
            let is_shown = self.teams.contains(&team) || self.teams.len() < TEAMS;
            let team = if is_shown { team } else { OTHER.to_owned() };
            if is_shown {
                self.teams.insert(team.clone());
            }
            let of = now.entry((team, reason)).or_default();
            of.count += more.count;
            of.oldest = of.oldest.max(more.oldest);
        }
        self.labels = now.keys().cloned().collect();
        now
    }
}

fn describe() {
    metrics::describe_gauge!(
        "gantry_scheduler_queue_length",
        "Workloads and leases that wait for a worker, by team and reason."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_queue_oldest_seconds",
        "Waiting time of the oldest waiting workload or lease, by team and reason."
    );
    metrics::describe_counter!(
        "gantry_scheduler_placements_total",
        "Leases that this replica granted, by the strategy that ranked the chosen worker above the next."
    );
    metrics::describe_counter!(
        "gantry_scheduler_refusals_total",
        "Requests that this replica did not place at once, by each refusal reason of the workers."
    );
    metrics::describe_histogram!(
        "gantry_scheduler_decision_seconds",
        "Time that this replica took to decide and grant a batch."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_leases_drift",
        "Leases on which scheduler and worker disagree for longer than messages take: missing on the worker, or ended but still on the worker. A value other than 0 is a defect."
    );
    metrics::describe_gauge!("gantry_scheduler_workers", "Workers, by state: running, stalled or lost.");
    metrics::describe_gauge!(
        "gantry_scheduler_workers_out_of_service",
        "Workers that get no work although they may be in contact, by cause. A worker may have several causes."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_workloads",
        "Workloads that have not finished, by state; `pending` is the queue."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_slots_in_use",
        "Leases that use a slot, according to the counters of all workers."
    );
    metrics::describe_gauge!("gantry_scheduler_leases", "Leases that have not ended, by kind.");
    metrics::describe_gauge!(
        "gantry_scheduler_counters_drift",
        "Difference between the counters of workers and their leases, by counter: absolute differences summed over the workers. A value other than 0 is a defect."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_outbox",
        "Calls to the artifact store that are not acknowledged yet."
    );
}

async fn set(db: &Database) -> Result<(), DbErr> {
    let workers: Vec<(worker::State, i64)> = worker::Entity::find()
        .select_only()
        .column(worker::Column::State)
        .column_as(worker::Column::Id.count(), "count")
        .group_by(worker::Column::State)
        .into_tuple()
        .all(db.read())
        .await?;
    for state in [worker::State::Running, worker::State::Stalled, worker::State::Lost] {
        let count = workers.iter().find(|(of, _)| *of == state).map_or(0, |(_, count)| *count);
        metrics::gauge!("gantry_scheduler_workers", "state" => state.text()).set(count as f64);
    }

    let why = [
        ("cordoned", worker::Column::Desired.eq(worker::Desired::Cordon)),
        ("retiring", worker::Column::Desired.eq(worker::Desired::Retire)),
        (
            "quarantined",
            worker::Column::QuarantinedUntil.is_not_null().and(worker::Column::FailedTeam.is_null()),
        ),
        ("incompatible", worker::Column::UnsupportedVersions.ne("[]")),
    ];
    for (why, matching) in why {
        let count = worker::Entity::find().filter(matching).count(db.read()).await?;
        metrics::gauge!("gantry_scheduler_workers_out_of_service", "reason" => why).set(count as f64);
    }
    let count = reservation::all(db.read(), Timestamp::now()).await?.len();
    metrics::gauge!("gantry_scheduler_workers_out_of_service", "reason" => "reserved").set(count as f64);

    let workloads: Vec<(workload::State, i64)> = workload::Entity::find()
        .select_only()
        .column(workload::Column::State)
        .column_as(workload::Column::Id.count(), "count")
        .filter(workload::Column::State.ne(workload::State::Finished))
        .group_by(workload::Column::State)
        .into_tuple()
        .all(db.read())
        .await?;
    for state in workload::State::iter().filter(|state| *state != workload::State::Finished) {
        let count = workloads.iter().find(|(of, _)| *of == state).map_or(0, |(_, count)| *count);
        metrics::gauge!("gantry_scheduler_workloads", "state" => state.to_value()).set(count as f64);
    }

    // One statement, so that the compared counts belong to one snapshot.
    let sums = "SELECT (SELECT CAST(COALESCE(SUM(active_tasks), 0) AS BIGINT) FROM workers) AS slots, kind, COUNT(*) AS leases, \
                (SELECT COUNT(*) FROM outbox) AS owed FROM \
                (SELECT kind FROM leases WHERE state <> 'ended' UNION ALL SELECT NULL) AS live GROUP BY kind";
    let sums = Statement::from_string(db.read().get_database_backend(), sums);
    let (mut slots, mut owed, mut leases) = (0_i64, 0_i64, HashMap::new());
    for row in db.read().query_all_raw(sums).await? {
        (slots, owed) = (row.try_get("", "slots")?, row.try_get("", "owed")?);
        if let Some(kind) = row.try_get::<Option<lease::Kind>>("", "kind")? {
            leases.insert(kind, row.try_get::<i64>("", "leases")?);
        }
    }
    for kind in lease::Kind::ALL {
        let count = leases.get(&kind).copied().unwrap_or(0);
        metrics::gauge!("gantry_scheduler_leases", "kind" => kind.text()).set(count as f64);
    }
    metrics::gauge!("gantry_scheduler_slots_in_use").set(slots as f64);
    metrics::gauge!("gantry_scheduler_outbox").set(owed as f64);
    for (counter, drift) in counters_drift(db.read()).await? {
        metrics::gauge!("gantry_scheduler_counters_drift", "counter" => counter).set(drift as f64);
    }
    Ok(())
}

/// Sums the differences between the counters of workers and their leases. Differences are absolute,
/// so that a surplus does not hide a deficit.
pub(crate) async fn counters_drift(db: &impl ConnectionTrait) -> Result<[(&'static str, i64); 5], DbErr> {
    // One statement, so that the compared counts belong to one snapshot.
    let query = "SELECT CAST(COALESCE(SUM(ABS(active_tasks - COALESCE(tasks, 0))), 0) AS BIGINT) AS tasks, \
                 CAST(COALESCE(SUM(ABS(active_checks - COALESCE(checks, 0))), 0) AS BIGINT) AS checks, \
                 CAST(COALESCE(SUM(ABS(reserved_cpu_millis - COALESCE(cpu, 0))), 0) AS BIGINT) AS cpu_millis, \
                 CAST(COALESCE(SUM(ABS(reserved_memory_bytes - COALESCE(memory, 0))), 0) AS BIGINT) AS memory_bytes, \
                 CAST(COALESCE(SUM(ABS(reserved_disk_bytes - COALESCE(disk, 0))), 0) AS BIGINT) AS disk_bytes \
                 FROM workers LEFT JOIN \
                 (SELECT worker_id, COUNT(*) AS tasks, SUM(CASE kind WHEN 'check' THEN 1 ELSE 0 END) AS checks, SUM(cpu_millis) AS cpu, \
                 SUM(memory_bytes) AS memory, SUM(disk_bytes) AS disk \
                 FROM leases WHERE state <> 'ended' AND kind <> 'transfer' GROUP BY worker_id) AS held \
                 ON held.worker_id = workers.id";
    let row = db.query_one_raw(Statement::from_string(db.get_database_backend(), query)).await?;
    let drift = |counter: &'static str| {
        let drift: Option<i64> = row.as_ref().map(|row| row.try_get("", counter)).transpose()?;
        Ok::<_, DbErr>((counter, drift.unwrap_or_default()))
    };
    Ok([
        drift("tasks")?,
        drift("checks")?,
        drift("cpu_millis")?,
        drift("memory_bytes")?,
        drift("disk_bytes")?,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::notify::changes::Effects;
    use crate::workers;
    use crate::workers::test_support::registration;

    #[test]
    fn ended_waits_become_zero_and_further_teams_share() {
        let waiting = |count: usize| WaitingTotals { count, oldest: Duration::from_secs(count as u64) };
        let of = |team: usize, reason: &'static str| (format!("team-{team:03}"), reason);
        let mut shown = ExportedGauges::default();
        let now = shown.now((0..150).map(|team| (of(team, "FULL"), waiting(1000 - team))).collect());
        assert_eq!(now[&of(99, "FULL")], waiting(901));
        assert!(!now.contains_key(&of(100, "FULL")));
        let others = now[&(OTHER.to_owned(), "FULL")];
        assert_eq!(others, WaitingTotals { count: (851..=900).sum(), oldest: Duration::from_secs(900) });
        let now = shown.now(HashMap::from([(of(7, "STALLED"), waiting(1)), (of(120, "FULL"), waiting(2))]));
        assert_eq!(now[&of(7, "FULL")], WaitingTotals::default());
        assert_eq!(now[&of(7, "STALLED")], waiting(1));
        assert_eq!(now[&(OTHER.to_owned(), "FULL")], waiting(2));
        assert_eq!(now.len(), 100 + WAITS_FOR.len() + 1);
        assert!(shown.now(HashMap::new()).values().all(|waiting| waiting.count == 0));
    }

    #[tokio::test]
    async fn everything_is_counted_on_both_databases() {
        let (sqlite, postgres) = (testing::databases::sqlite(), testing::databases::postgres().await);
        for database in [sqlite, postgres] {
            let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
            set(&db).await.expect("counted");
        }
    }

    #[tokio::test]
    async fn opposite_counter_drifts_do_not_cancel_out() {
        let (sqlite, postgres) = (testing::databases::sqlite(), testing::databases::postgres().await);
        for database in [sqlite, postgres] {
            let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
            let drift = async || counters_drift(db.read()).await.expect("compared").map(|(_, drift)| drift);
            assert_eq!(drift().await, [0; 5], "there are no workers");
            let gateways = ["one", "two"].map(registration);
            let (registrations, config) = (gateways.iter().collect::<Vec<_>>(), Config::new("", ""));
            let now = Timestamp::now();
            db.write(async |txn| {
                workers::register(&txn, &registrations, &config, now, &mut Effects::default()).await
            })
            .await
            .expect("let in");
            assert_eq!(drift().await, [0; 5]);
            let apart = "UPDATE workers SET active_tasks = 3, active_checks = 1, reserved_cpu_millis = 10, reserved_memory_bytes = 7, \
                         reserved_disk_bytes = 5 WHERE name = 'one'";
            db.write(async |txn| txn.execute_unprepared(apart).await).await.expect("written");
            assert_eq!(drift().await, [3, 1, 10, 7, 5]);
            let grants = "INSERT INTO leases (id, worker_id, incarnation, kind, team, state, generation, phase, request, granted_at, \
                          cpu_millis, memory_bytes, disk_bytes, settles, owner) \
                          SELECT id, id, incarnation, CASE name WHEN 'two' THEN 'check' ELSE 'transfer' END, 'main', 'granted', 0, 0, '', 0, \
                          4, 1, 2, false, '' FROM workers";
            db.write(async |txn| txn.execute_unprepared(grants).await).await.expect("written");
            assert_eq!(drift().await, [4, 2, 14, 8, 7], "a transfer takes nothing");
        }
    }
}
