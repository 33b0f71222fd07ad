//! What operators see of the scheduler's rows: counted when they look.

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

/// How many teams have gauges of their own. All others are one.
const TEAMS: usize = 100;

/// The name of all others.
const OTHER: &str = "other";

/// Sets the gauges whenever somebody reads them.
pub(crate) fn add(app: App, host: &server::Host) {
    describe();
    // What has not happened yet is 0, and not missing.
    for decided_by in DecidedBy::all() {
        metrics::counter!("gantry_scheduler_placements_total", "decided_by" => decided_by.name()).absolute(0);
    }
    for code in CODES {
        metrics::counter!("gantry_scheduler_refusals_total", "reason" => code).absolute(0);
    }
    _ = metrics::histogram!("gantry_scheduler_decision_seconds");
    let shown = Arc::new(Mutex::new(Shown::default()));
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
                tracing::debug!(error = domain::error_chain(&error), "cannot count for metrics");
            }
        }
    });
}

/// Those of a team that wait for the same reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Waiting {
    count: usize,
    /// For how long the oldest has.
    oldest: Duration,
}

/// Who waits, by team and reason.
fn waiting(app: &App, now: Timestamp) -> HashMap<(String, &'static str), Waiting> {
    let lines: Vec<_> = {
        let queue = app.dispatch.queue();
        queue.demand().map(|(demand, count, oldest)| (demand.clone(), count, oldest)).collect()
    };
    let mut waiting = HashMap::<_, Waiting>::new();
    for (demand, count, oldest) in lines {
        // Each for itself, so that nothing that is placed waits for all of them.
        let reason = app.dispatch.workers.lock().waits_for(&demand);
        let of = waiting.entry((demand.shape.team.clone(), reason)).or_default();
        of.count += count;
        of.oldest = of.oldest.max(now.since(oldest));
    }
    waiting
}

/// What is shown of those that wait, so that what is over becomes 0.
#[derive(Debug, Default)]
struct Shown {
    teams: HashSet<String>,
    labels: HashSet<(String, &'static str)>,
}

impl Shown {
    fn show(&mut self, waiting: HashMap<(String, &'static str), Waiting>) {
        for ((team, reason), now) in self.now(waiting) {
            let labels = [("team", team), ("reason", reason.to_owned())];
            metrics::gauge!("gantry_scheduler_queue_length", &labels).set(now.count as f64);
            metrics::gauge!("gantry_scheduler_queue_oldest_seconds", &labels).set(now.oldest.as_secs_f64());
        }
    }

    fn now(
        &mut self,
        waiting: HashMap<(String, &'static str), Waiting>,
    ) -> HashMap<(String, &'static str), Waiting> {
        let none = WAITS_FOR.into_iter().map(|reason| (OTHER.to_owned(), reason));
        let none = none.chain(self.labels.drain()).map(|labels| (labels, Waiting::default()));
        let mut now: HashMap<_, _> = none.collect();
        let mut waiting: Vec<_> = waiting.into_iter().collect();
        // Of many that are new the largest are shown.
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
        "Workloads and leases that wait for a worker, by team and by what they wait for."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_queue_oldest_seconds",
        "For how long the oldest of them has waited."
    );
    metrics::describe_counter!(
        "gantry_scheduler_placements_total",
        "What was granted a worker by this replica, by what made the difference between the worker and the next best."
    );
    metrics::describe_counter!(
        "gantry_scheduler_refusals_total",
        "What was not placed at once by this replica, by each reason that workers had."
    );
    metrics::describe_histogram!(
        "gantry_scheduler_decision_seconds",
        "How long this replica took to decide and grant what was asked for together."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_leases_drift",
        "Leases that their workers do not have, or have although they ended, for longer than messages take. Not 0: a defect."
    );
    metrics::describe_gauge!("gantry_scheduler_workers", "Workers, by whether they are in contact.");
    metrics::describe_gauge!(
        "gantry_scheduler_workers_out_of_service",
        "Workers that get no work although they may be in contact, by why; one may be several of these."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_workloads",
        "Workloads that have not finished, by state; `pending` is the queue."
    );
    metrics::describe_gauge!(
        "gantry_scheduler_slots_in_use",
        "Leases that take a slot, over all workers, as their counters say."
    );
    metrics::describe_gauge!("gantry_scheduler_leases", "Leases that have not ended, by kind.");
    metrics::describe_gauge!(
        "gantry_scheduler_counters_drift",
        "By how much the counters of workers and their leases disagree, by what is counted: summed over the workers, whichever is more. Not 0: a defect."
    );
    metrics::describe_gauge!("gantry_scheduler_outbox", "What the artifact store has not acknowledged yet.");
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
        metrics::gauge!("gantry_scheduler_workers_out_of_service", "why" => why).set(count as f64);
    }
    let count = reservation::all(db.read(), Timestamp::now()).await?.len();
    metrics::gauge!("gantry_scheduler_workers_out_of_service", "why" => "reserved").set(count as f64);

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

    // In one statement, so that what is compared belongs together.
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

/// By how much each counter of workers and their leases disagree: summed over the workers, so that one that has too much does not hide another
/// that has too little.
pub(crate) async fn counters_drift(db: &impl ConnectionTrait) -> Result<[(&'static str, i64); 5], DbErr> {
    // In one statement, so that what is compared belongs together.
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
    use crate::workers::test_support::hello;

    #[test]
    fn what_waits_no_more_becomes_none_and_teams_beyond_the_bound_are_one() {
        let waiting = |count: usize| Waiting { count, oldest: Duration::from_secs(count as u64) };
        let of = |team: usize, reason: &'static str| (format!("team-{team:03}"), reason);
        let mut shown = Shown::default();
        let now = shown.now((0..150).map(|team| (of(team, "FULL"), waiting(1000 - team))).collect());
        assert_eq!(now[&of(99, "FULL")], waiting(901));
        assert!(!now.contains_key(&of(100, "FULL")));
        let others = now[&(OTHER.to_owned(), "FULL")];
        assert_eq!(others, Waiting { count: (851..=900).sum(), oldest: Duration::from_secs(900) });
        let now = shown.now(HashMap::from([(of(7, "STALLED"), waiting(1)), (of(120, "FULL"), waiting(2))]));
        assert_eq!(now[&of(7, "FULL")], Waiting::default());
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
    async fn what_one_counter_has_too_much_another_that_has_too_little_does_not_hide() {
        let (sqlite, postgres) = (testing::databases::sqlite(), testing::databases::postgres().await);
        for database in [sqlite, postgres] {
            let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
            let drift = async || counters_drift(db.read()).await.expect("compared").map(|(_, drift)| drift);
            assert_eq!(drift().await, [0; 5], "there are no workers");
            let gateways = ["one", "two"].map(hello);
            let (hellos, config) = (gateways.iter().collect::<Vec<_>>(), Config::new("", ""));
            let now = Timestamp::now();
            db.write(async |txn| {
                workers::register(&txn, &hellos, &config, now, &mut Effects::default()).await
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
