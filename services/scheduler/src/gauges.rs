//! What operators see of the scheduler's rows: counted when they look.

use db::Database;
use sea_orm::{
    ActiveEnum, ColumnTrait, ConnectionTrait, DbErr, EntityTrait, Iterable, PaginatorTrait, QueryFilter,
    QuerySelect, Statement,
};

use crate::entity::{worker, workload};

/// Sets the gauges whenever somebody reads them.
pub(crate) fn add(db: Database, host: &server::Host) {
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
        "gantry_scheduler_slots_drift",
        "How much the counters of workers and their leases disagree. Not 0: a defect."
    );
    metrics::describe_gauge!("gantry_scheduler_outbox", "What the artifact store has not acknowledged yet.");
    host.add_gauges(move || {
        let db = db.clone();
        async move {
            if let Err(error) = set(&db).await {
                tracing::debug!(error = domain::chain(&error), "cannot count for metrics");
            }
        }
    });
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
    for state in worker::State::iter() {
        let count = workers.iter().find(|(of, _)| *of == state).map_or(0, |(_, count)| *count);
        metrics::gauge!("gantry_scheduler_workers", "state" => state.to_value()).set(count as f64);
    }

    let why = [
        ("landing", worker::Column::Desired.eq(worker::Desired::Land)),
        ("retiring", worker::Column::Desired.eq(worker::Desired::Retire)),
        ("set_aside", worker::Column::SetAsideUntil.is_not_null()),
        ("incompatible", worker::Column::UnsupportedVersions.ne("[]")),
    ];
    for (why, matching) in why {
        let count = worker::Entity::find().filter(matching).count(db.read()).await?;
        metrics::gauge!("gantry_scheduler_workers_out_of_service", "why" => why).set(count as f64);
    }

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
    let sums = "SELECT (SELECT CAST(COALESCE(SUM(active_tasks), 0) AS BIGINT) FROM workers) AS slots, \
                (SELECT COUNT(*) FROM leases WHERE kind = 'task' AND state <> 'ended') AS tasks, \
                (SELECT COUNT(*) FROM leases WHERE kind = 'transfer' AND state <> 'ended') AS transfers, \
                (SELECT COUNT(*) FROM outbox) AS owed";
    let sums = Statement::from_string(db.read().get_database_backend(), sums);
    let Some(sums) = db.read().query_one_raw(sums).await? else { return Ok(()) };
    let sum = |name: &str| sums.try_get::<i64>("", name);
    let (slots, tasks) = (sum("slots")?, sum("tasks")?);
    metrics::gauge!("gantry_scheduler_slots_in_use").set(slots as f64);
    metrics::gauge!("gantry_scheduler_slots_drift").set((slots - tasks) as f64);
    metrics::gauge!("gantry_scheduler_leases", "kind" => "task").set(tasks as f64);
    metrics::gauge!("gantry_scheduler_leases", "kind" => "transfer").set(sum("transfers")? as f64);
    metrics::gauge!("gantry_scheduler_outbox").set(sum("owed")? as f64);
    Ok(())
}
