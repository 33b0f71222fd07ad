//! What operators see of the scheduler's rows: counted when they look.

use std::collections::HashMap;

use db::Database;
use sea_orm::{
    ActiveEnum, ColumnTrait, ConnectionTrait, DbErr, EntityTrait, Iterable, PaginatorTrait, QueryFilter,
    QuerySelect, Statement,
};

use crate::entity::{lease, worker, workload};

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
    let mut taken: i64 = 0;
    for kind in lease::Kind::iter() {
        let count = leases.get(&kind).copied().unwrap_or(0);
        metrics::gauge!("gantry_scheduler_leases", "kind" => kind.to_value()).set(count as f64);
        taken += if kind.takes_a_slot() { count } else { 0 };
    }
    metrics::gauge!("gantry_scheduler_slots_in_use").set(slots as f64);
    metrics::gauge!("gantry_scheduler_slots_drift").set((slots - taken) as f64);
    metrics::gauge!("gantry_scheduler_outbox").set(owed as f64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn everything_is_counted_on_both_databases() {
        let (sqlite, postgres) = (testing::databases::sqlite(), testing::databases::postgres().await);
        for database in [sqlite, postgres] {
            let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
            set(&db).await.expect("counted");
        }
    }
}
