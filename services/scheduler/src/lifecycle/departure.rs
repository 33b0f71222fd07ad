//! Departure of workers: cordon, retire, prune and expiry.
//!
//! ```text
//! run ◀─run─▶ cordon ─no uninterruptible lease is left─▶ drained
//!    ◀─run─▶ retire ─no lease is left, nothing is being settled, no last replica─▶ (removed)
//! not in contact ─prune─▶ leaving ─its leases have ended─▶ (removed)
//! lost and ephemeral ─its leases have ended─▶ (removed)
//! ```
//!
//! Operators write the desired state. A loop of each replica ([`depart_forever`]) visits the
//! workers that are cordoned or leaving, and executes the next step of each. Every step is guarded
//! and idempotent, so replicas may repeat each other's steps.
//!
//! Invariants:
//! - Only this module changes the desired state of a worker. No message of a worker does.
//! - A cordoned or retired worker gets no new lease, because [`crate::leases`] grants under a
//!   guard. A condition that was found to hold therefore stays true.
//! - A removed worker has no lease, and every message of its old session is rejected.

use std::collections::HashMap;
use std::time::Duration;

use domain::{LeaseId, Timestamp, WorkerId, WorkloadId};
use rpc::Reason;
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, Condition, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait,
    FromQueryResult, QueryFilter, QuerySelect, Set, Statement,
};
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use crate::db::entity::lease::{self, StopReason};
use crate::db::entity::removed_worker::{self, WorkerEnd};
use crate::db::entity::worker::{self, Desired, Model, State};
use crate::leases;
use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::store_client::Forget;
use crate::workers::lease_counts::{self, Load};
use crate::workers::{quarantine, removed, revisions};
use crate::workloads;

/// Reason why an operation on a worker fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    /// The worker is unknown.
    #[error("worker {0:?} is unknown")]
    NotFound(String),
    /// The worker is in contact. Only a worker out of contact may be pruned.
    #[error("cannot prune worker {0:?}: it is in contact")]
    InContact(String),
    /// The artifact store refuses to forget the worker, or does not answer.
    #[error("cannot remove the worker from the artifact store")]
    Kept(#[source] rpc::Refusal),
    /// The database failed.
    #[error("cannot access the worker in the database")]
    Database(#[from] DbErr),
}

/// Reads and locks the row of the worker with this name or id until the end of the transaction.
async fn lock(txn: &DatabaseTransaction, worker: &str) -> Result<Option<Model>, DbErr> {
    let mut matches = Condition::any().add(worker::Column::Name.eq(worker));
    if let Ok(id) = worker.parse::<WorkerId>() {
        matches = matches.add(worker::Column::Id.eq(id.uuid()));
    }
    worker::Entity::find().filter(matches).lock_exclusive().one(txn).await
}

/// The desired state of a worker that an operator takes out of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Withdrawal {
    /// The worker may take work again later.
    Cordon,
    /// The worker is removed once it is empty. `force`: even if last replicas are lost.
    Retire { force: bool },
}

/// Cordons or retires a worker. Returns `None` if the worker was removed already.
pub(crate) async fn withdraw_worker(
    txn: &DatabaseTransaction,
    worker: &str,
    down: Withdrawal,
    interrupt_after: Option<Duration>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<Option<WorkerId>, RegistryError> {
    let row = match lock(txn, worker).await? {
        Some(row) if row.leaving.is_none() => row,
        row => {
            let gone = row.is_some() || removed::find(txn, worker).await?.is_some();
            return match down {
                Withdrawal::Retire { .. } if gone => Ok(None),
                Withdrawal::Retire { .. } | Withdrawal::Cordon => {
                    Err(RegistryError::NotFound(worker.to_owned()))
                }
            };
        }
    };
    let (desired, force) = match down {
        Withdrawal::Cordon => (Desired::Cordon, false),
        Withdrawal::Retire { force } => (Desired::Retire, force),
    };
    let interrupt_at = interrupt_after.map(|after| (now + after).0).or(row.interrupt_at);
    if (desired, force, interrupt_at) != (row.desired, row.force_retire, row.interrupt_at) {
        worker::Entity::update_many()
            .set(worker::ActiveModel {
                desired: Set(desired),
                force_retire: Set(force),
                interrupt_at: Set(interrupt_at),
                blocked_by: Set(String::new()),
                generation: Set(row.generation + 1),
                ..Default::default()
            })
            .filter(worker::Column::Id.eq(row.id))
            .exec(txn)
            .await?;
        tracing::info!(worker.name = row.name, worker.desired = ?desired, "worker taken out of service");
        revisions::changed(txn, &[row.id], effects).await?;
    }
    effects.workers.push(WorkerId::from_uuid(row.id));
    effects.registry = true;
    Ok(Some(WorkerId::from_uuid(row.id)))
}

/// Lets a worker take work again, or lets a retired worker register again.
pub(crate) async fn run(
    txn: &DatabaseTransaction,
    worker: &str,
    effects: &mut Effects,
) -> Result<Option<WorkerId>, RegistryError> {
    let Some(row) = lock(txn, worker).await?.filter(|row| row.leaving.is_none()) else {
        let retired = removed::find(txn, worker).await?.filter(|gone| gone.how == WorkerEnd::Retired);
        let Some(retired) = retired else { return Err(RegistryError::NotFound(worker.to_owned())) };
        removed_worker::Entity::update_many()
            .col_expr(removed_worker::Column::MarkerId, Expr::value(None::<Uuid>))
            .filter(removed_worker::Column::Name.eq(retired.name))
            .exec(txn)
            .await?;
        return Ok(None);
    };
    if row.desired != Desired::Run || row.quarantines > 0 || row.failures > 0 {
        worker::Entity::update_many()
            .set(worker::ActiveModel {
                desired: Set(Desired::Run),
                force_retire: Set(false),
                interrupt_at: Set(None),
                landed_at: Set(None),
                blocked_by: Set(String::new()),
                generation: Set(row.generation + 1),
                ..quarantine::no_failures()
            })
            .filter(worker::Column::Id.eq(row.id))
            .exec(txn)
            .await?;
        tracing::info!(worker.name = row.name, "worker returned to service");
        revisions::changed(txn, &[row.id], effects).await?;
    }
    effects.workers.push(WorkerId::from_uuid(row.id));
    Ok(Some(WorkerId::from_uuid(row.id)))
}

/// Checks that the worker may be pruned, and returns its id. Returns `None` if the worker was
/// removed or is being removed.
pub(crate) async fn prunable(
    txn: &DatabaseTransaction,
    worker: &str,
) -> Result<Option<WorkerId>, RegistryError> {
    match lock(txn, worker).await? {
        Some(row) if row.leaving.is_some() => Ok(None),
        Some(row) if row.state == State::Running => Err(RegistryError::InContact(row.name)),
        Some(row) => Ok(Some(WorkerId::from_uuid(row.id))),
        None if removed::find(txn, worker).await?.is_some() => Ok(None),
        None => Err(RegistryError::NotFound(worker.to_owned())),
    }
}

/// Prunes a worker that is not in contact. From the commit on, its sessions are invalid.
pub(crate) async fn prune(
    txn: &DatabaseTransaction,
    worker: &str,
    effects: &mut Effects,
) -> Result<(), RegistryError> {
    let Some(id) = prunable(txn, worker).await? else { return Ok(()) };
    worker::Entity::update_many()
        .col_expr(worker::Column::Leaving, Expr::value(WorkerEnd::Pruned))
        .col_expr(worker::Column::State, Expr::value(State::Lost))
        .col_expr(worker::Column::Session, Expr::col(worker::Column::Session).add(1))
        .col_expr(worker::Column::Generation, Expr::col(worker::Column::Generation).add(1))
        .filter(worker::Column::Id.eq(id.uuid()))
        .exec(txn)
        .await?;
    revisions::changed(txn, &[id.uuid()], effects).await?;
    effects.workers.push(id);
    Ok(())
}

/// The live leases of a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OpenLeases {
    pub(crate) leases: usize,
    /// The workloads of these leases, with their teams.
    pub(crate) workloads: Vec<(String, WorkloadId)>,
}

#[derive(FromQueryResult)]
struct HeldLease {
    team: String,
    workload_id: Option<Uuid>,
}

/// Returns the live leases of `worker`, the oldest first.
pub(crate) async fn live_leases(db: &impl ConnectionTrait, worker: WorkerId) -> Result<OpenLeases, DbErr> {
    let sql = "SELECT l.team AS team, w.id AS workload_id
               FROM leases l LEFT JOIN workloads w ON w.id = l.workload_id AND w.lease_id = l.id AND w.state <> 'finished'
               WHERE l.worker_id = $1 AND l.state <> 'ended' ORDER BY l.granted_at, l.id";
    let statement = Statement::from_sql_and_values(db.get_database_backend(), sql, [worker.uuid().into()]);
    let held = HeldLease::find_by_statement(statement).all(db).await?;
    let leases = held.len();
    let workload = |held: HeldLease| Some((held.team, WorkloadId::from_uuid(held.workload_id?)));
    Ok(OpenLeases { leases, workloads: held.into_iter().filter_map(workload).collect() })
}

/// Returns whether a workload that ran on `worker` is being settled. Its outputs on the worker have
/// no owner until then.
async fn is_settling(db: &impl ConnectionTrait, worker: Uuid) -> Result<bool, DbErr> {
    let sql = "SELECT w.id AS id FROM workloads w
               WHERE w.state = 'settling' AND EXISTS
                 (SELECT 1 FROM leases l WHERE l.workload_id = w.id AND l.worker_id = $1) LIMIT 1";
    let statement = Statement::from_sql_and_values(db.get_database_backend(), sql, [worker.into()]);
    Ok(db.query_one_raw(statement).await?.is_some())
}

/// Returns workers that are cordoned, retired or being removed.
pub(crate) async fn departing(db: &impl ConnectionTrait) -> Result<Vec<Model>, DbErr> {
    // The text equals that of the partial index.
    let lost = Expr::cust("ephemeral = TRUE AND state = 'lost'");
    let mut rows =
        worker::Entity::find().filter(Expr::cust("desired <> 'run' OR leaving IS NOT NULL")).all(db).await?;
    let expired =
        worker::Entity::find().filter(lost).filter(worker::Column::Leaving.is_null()).all(db).await?;
    rows.extend(expired.into_iter().filter(|row| row.desired == Desired::Run));
    Ok(rows)
}

/// Interrupts the workloads and driven leases on `worker`: all of them, or only interruptible ones.
async fn interrupt(lifecycle: &Lifecycle, worker: Uuid, all: bool) -> Result<(), DbErr> {
    let live = lease::Entity::find()
        .filter(lease::Column::WorkerId.eq(worker))
        .filter(lease::is_live())
        .filter(lease::Column::StopReason.is_null())
        .all(lifecycle.context.db.read())
        .await?;
    for lease in live {
        let (id, workload) = (LeaseId::from_uuid(lease.id), lease.workload_id.map(WorkloadId::from_uuid));
        lifecycle
            .context
            .change(async |txn| {
                let (mut effects, now) = (Effects::default(), Timestamp::now());
                let (reason, grace) = (StopReason::Interrupted, lifecycle.context.config.timeout_grace);
                match workload {
                    Some(workload) => {
                        workloads::interrupt(&txn, workload, &lease, all, grace, &mut effects).await?;
                    }
                    None if all => leases::stop_driven(&txn, id, reason, grace, now, &mut effects).await?,
                    None => {}
                }
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    Ok(())
}

/// When the artifact store last refused to forget each worker. The check is expensive for the
/// store.
pub(crate) type LastChecks = HashMap<Uuid, Timestamp>;

/// Least time between two checks with the artifact store for one worker.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Executes the next step for one cordoned or leaving worker.
async fn depart_if_due(
    lifecycle: &Lifecycle,
    row: &Model,
    load: Load,
    last_checks: &mut LastChecks,
) -> Result<(), RegistryError> {
    let db = lifecycle.context.db.read();
    let expired = row.ephemeral && row.state == State::Lost;
    if row.leaving.is_some() || expired {
        let how = row.leaving.unwrap_or(WorkerEnd::Expired);
        return if load.leases == 0 { Ok(depart(lifecycle, row.id, how).await?) } else { Ok(()) };
    }
    let due = row.interrupt_at.is_some_and(|at| at <= Timestamp::now().0);
    if load.leases > 0 && (due || load.uninterruptible == 0) {
        interrupt(lifecycle, row.id, due).await?;
    }
    if due || (load.uninterruptible == 0 && row.landed_at.is_none()) {
        lifecycle
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                note_progress(&txn, row, due, Timestamp::now(), &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    let refused = last_checks.get(&row.id).filter(|_| !row.blocked_by.is_empty());
    let too_early = refused.is_some_and(|checked| Timestamp::now().since(*checked) < CHECK_INTERVAL);
    if row.desired == Desired::Retire && load.leases == 0 && !too_early && !is_settling(db, row.id).await? {
        last_checks.insert(row.id, Timestamp::now());
        if !row.force_retire
            && let Err(refusal) =
                lifecycle.store.forget_worker(WorkerId::from_uuid(row.id), Forget::Check).await
        {
            return Ok(record_refusal(lifecycle, row, refusal).await?);
        }
        depart(lifecycle, row.id, WorkerEnd::Retired).await?;
    }
    Ok(())
}

/// Records the progress of a cordoned or retired worker, unless the operation was revoked.
/// `interrupted`: its workloads were interrupted.
pub(crate) async fn note_progress(
    txn: &DatabaseTransaction,
    seen: &Model,
    interrupted: bool,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let row = worker::Entity::find_by_id(seen.id).lock_exclusive().one(txn).await?;
    let Some(row) = row.filter(|row| row.desired != Desired::Run && row.leaving.is_none()) else {
        return Ok(());
    };
    let mut noted = worker::ActiveModel { id: sea_orm::Unchanged(row.id), ..Default::default() };
    let load = lease_counts::loads(txn, &[row.id]).await?.get(&row.id).copied().unwrap_or_default();
    if load.uninterruptible == 0 && row.landed_at.is_none() {
        tracing::info!(worker.name = row.name, "worker has no uninterruptible lease any more");
        noted.landed_at = Set(Some(now.0));
    }
    if interrupted && row.interrupt_at.is_some() && row.interrupt_at == seen.interrupt_at {
        noted.interrupt_at = Set(None);
    }
    if noted.is_changed() {
        worker::Entity::update_many().set(noted).filter(worker::Column::Id.eq(row.id)).exec(txn).await?;
        revisions::changed(txn, &[row.id], effects).await?;
    }
    Ok(())
}

/// Records why the artifact store refuses to forget a worker. The check is repeated later.
async fn record_refusal(lifecycle: &Lifecycle, row: &Model, refusal: rpc::Refusal) -> Result<(), DbErr> {
    if refusal.is_transient() {
        tracing::debug!(worker.name = row.name, error = %refusal, "cannot check with the artifact store whether a worker may be removed");
        return Ok(());
    }
    let why = refusal.message;
    if why == row.blocked_by {
        return Ok(());
    }
    tracing::warn!(worker.name = row.name, why, "worker cannot be retired yet");
    lifecycle
        .context
        .change(async |txn| {
            let mut effects = Effects::default();
            let updated = worker::Entity::update_many()
                .col_expr(worker::Column::BlockedBy, Expr::value(why.clone()))
                .filter(worker::Column::Id.eq(row.id))
                .filter(worker::Column::Desired.eq(Desired::Retire))
                .exec(&*txn)
                .await?;
            if updated.rows_affected > 0 {
                revisions::changed(&txn, &[row.id], &mut effects).await?;
            }
            Ok::<_, DbErr>(((), effects))
        })
        .await
}

/// Removes a worker without leases, unless the removal was revoked, and notifies the artifact
/// store.
async fn depart(lifecycle: &Lifecycle, worker: Uuid, how: WorkerEnd) -> Result<(), DbErr> {
    let departed = lifecycle
        .context
        .change(async |txn| {
            let mut effects = Effects::default();
            let gone = remove(&txn, worker, how, Timestamp::now(), &mut effects).await?;
            Ok::<_, DbErr>((gone, effects))
        })
        .await?;
    if departed { remove_from_store(lifecycle, worker).await } else { Ok(()) }
}

/// Deletes the row of a worker and records its removal. Returns `false` if the removal was revoked.
pub(crate) async fn remove(
    txn: &DatabaseTransaction,
    worker: Uuid,
    how: WorkerEnd,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<bool, DbErr> {
    let row = worker::Entity::find_by_id(worker).lock_exclusive().one(txn).await?;
    let Some(row) = row else { return Ok(false) };
    let may_go = match how {
        WorkerEnd::Retired => row.desired == Desired::Retire && row.leaving.is_none(),
        WorkerEnd::Pruned => row.leaving == Some(WorkerEnd::Pruned),
        WorkerEnd::Expired => row.ephemeral && row.state == State::Lost,
    };
    let live = lease::Entity::find()
        .filter(lease::Column::WorkerId.eq(worker))
        .filter(lease::is_live())
        .one(txn)
        .await?;
    if !may_go || live.is_some() {
        return Ok(false);
    }
    lease::Entity::delete_many().filter(lease::Column::WorkerId.eq(worker)).exec(txn).await?;
    worker::Entity::delete_by_id(worker).exec(txn).await?;
    let gone = removed_worker::ActiveModel {
        id: Set(worker),
        name: Set(row.name.clone()),
        marker_id: Set((how == WorkerEnd::Retired).then_some(row.marker_id)),
        how: Set(how),
        removed_at: Set(now.0),
        revision: Set(revisions::next_revision(txn).await?),
        store_told: Set(false),
    };
    removed_worker::Entity::insert(gone).exec_without_returning(txn).await?;
    tracing::info!(worker.name = row.name, worker.id = %worker, how = ?how, "worker removed");
    effects.workers.push(WorkerId::from_uuid(worker));
    effects.registry = true;
    Ok(true)
}

/// Lets the artifact store forget a removed worker. A failed call is repeated later.
async fn remove_from_store(lifecycle: &Lifecycle, worker: Uuid) -> Result<(), DbErr> {
    let id = WorkerId::from_uuid(worker);
    if let Err(error) = lifecycle.store.forget_worker(id, Forget::Now).await {
        tracing::debug!(worker.id = %id, error = %error, "cannot remove a worker from the artifact store yet");
        return Ok(());
    }
    lifecycle
        .context
        .db
        .write(async |txn| {
            removed_worker::Entity::update_many()
                .col_expr(removed_worker::Column::StoreTold, Expr::value(true))
                .filter(removed_worker::Column::Id.eq(worker))
                .exec(&*txn)
                .await
                .map(|_| ())
        })
        .await
}

/// What a visit to the workers has left to do.
pub(crate) struct Remaining {
    /// Whether a cordoned or leaving worker may make progress soon.
    pub(crate) is_any_leaving: bool,
    /// Whether the store must still forget a worker, or a quarantine must end.
    is_any_due: bool,
}

/// Visits all cordoned or leaving workers once.
pub(crate) async fn depart_all(
    lifecycle: &Lifecycle,
    last_checks: &mut LastChecks,
) -> Result<Remaining, DbErr> {
    let rows = departing(lifecycle.context.db.read()).await?;
    last_checks.retain(|worker, _| rows.iter().any(|row| row.id == *worker));
    let mut all = HashMap::new();
    for some in rows.chunks(lease_counts::COUNTED_AT_ONCE) {
        let ids: Vec<_> = some.iter().map(|row| row.id).collect();
        all.extend(lease_counts::loads(lifecycle.context.db.read(), &ids).await?);
    }
    for row in &rows {
        let load = all.get(&row.id).copied().unwrap_or_default();
        match depart_if_due(lifecycle, row, load, last_checks).await {
            Ok(()) => {}
            Err(RegistryError::Database(error)) => return Err(error),
            Err(error) => {
                tracing::warn!(
                    worker.name = row.name,
                    error = domain::error_chain(&error),
                    "cannot complete the departure of a worker"
                );
            }
        }
    }
    let untold = removed_worker::Entity::find()
        .select_only()
        .column(removed_worker::Column::Id)
        .filter(Expr::cust("store_told = FALSE"))
        .into_tuple::<Uuid>()
        .all(lifecycle.context.db.read())
        .await?;
    for worker in &untold {
        remove_from_store(lifecycle, *worker).await?;
    }
    let is_any_quarantined = quarantine::end_quarantines(&lifecycle.context, Timestamp::now()).await?;
    // An attempt that a lost worker may still run can keep its lease forever.
    let waits =
        |row: &Model| row.state == State::Lost && all.get(&row.id).is_some_and(|load| load.leases > 0);
    Ok(Remaining {
        is_any_leaving: rows.iter().any(|row| !waits(row)),
        is_any_due: is_any_quarantined || !untold.is_empty(),
    })
}

/// Visits cordoned and leaving workers until the service stops.
pub(crate) async fn depart_forever(lifecycle: Lifecycle) {
    let mut last_checks = LastChecks::new();
    loop {
        let visited = tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            visited = depart_all(&lifecycle, &mut last_checks) => visited,
        };
        let (ticks, now) = (lifecycle.context.ticks, Instant::now());
        let next = match visited {
            Ok(Remaining { is_any_leaving, is_any_due }) => {
                lifecycle.context.notify.local.any_leaving(is_any_leaving);
                if is_any_leaving || is_any_due { ticks.after(now) } else { ticks.idle_after(now) }
            }
            Err(error) => {
                tracing::warn!(error = %error, "cannot read cordoned and leaving workers");
                ticks.after(now)
            }
        };
        tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            () = lifecycle.context.notify.local.registry().notified() => {}
            () = sleep_until(next) => {}
        }
    }
}

/// Returns whether the artifact store refuses to forget a worker because of its contents.
pub(crate) fn is_kept(refusal: &rpc::Refusal) -> bool {
    refusal.is(Reason::LastReplica) || refusal.is(Reason::HoldsOrphans)
}
