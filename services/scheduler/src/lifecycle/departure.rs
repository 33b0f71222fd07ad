//! Departures: what operators want of workers, and how workers go.
//!
//! ```text
//! run ◀─run─▶ cordon ─no lease is left that may not be interrupted─▶ drained
//!    ◀─run─▶ retire ─the same; no lease is left, nothing is being settled, no last replica─▶ (gone)
//! not in contact ─prune─▶ leaving ─its leases have ended─▶ (gone)       lost and ephemeral ─the same─▶ (gone)
//! ```
//!
//! Operators write what they want; a loop ([`depart_forever`]) of any replica looks at all that shall be cordoned or removed, and does what is due.
//! Every step is guarded and may be repeated, so replicas may do the same at once.
//!
//! Invariants: what a worker shall do is changed here alone, and never by what the worker says. Once a worker shall be cordoned or retired, it
//! gets no new lease ([`crate::leases`] grants under a guard), so what is found to be over stays over. A worker that has gone has no lease,
//! and whatever its gateway says in its old session is refused.

use std::collections::HashMap;
use std::time::Duration;

use domain::{LeaseId, Timestamp, WorkerId, WorkloadId};
use rpc::Reason;
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, Condition, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait,
    FromQueryResult, QueryFilter, QuerySelect, Set, Statement,
};
use uuid::Uuid;

use crate::db::entity::lease::{self, EndedBy};
use crate::db::entity::removed_worker::{self, WorkerEnd};
use crate::db::entity::worker::{self, Desired, Model, State};
use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::store_client::Forget;
use crate::workers::lease_counts::{self, Load};
use crate::workers::{quarantine, removed, revisions};
use crate::workloads;

/// What is asked of a worker cannot be done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegistryError {
    /// There is none.
    #[error("worker {0:?} is unknown")]
    NotFound(String),
    /// It is in contact, and only one that is not may be forgotten just so.
    #[error("worker {0:?} is in contact")]
    InContact(String),
    /// The artifact store does not want to forget it, or does not answer.
    #[error("the artifact store does not forget it")]
    Kept(#[source] rpc::Refusal),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// The row of the worker with this name or id, which nobody else changes until the end of the transaction.
async fn lock(txn: &DatabaseTransaction, worker: &str) -> Result<Option<Model>, DbErr> {
    let mut matches = Condition::any().add(worker::Column::Name.eq(worker));
    if let Ok(id) = worker.parse::<WorkerId>() {
        matches = matches.add(worker::Column::Id.eq(id.uuid()));
    }
    worker::Entity::find().filter(matches).lock_exclusive().one(txn).await
}

/// What an operator wants of a worker that shall go down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Withdrawal {
    /// It may take work again.
    Cordon,
    /// It does not. `force`: even if that loses last replicas.
    Retire { force: bool },
}

/// Lets a worker take no more work. `None`: it has gone, which is what was wanted.
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
            let gone = row.is_some() || removed::gone(txn, worker).await?.is_some();
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
                held_up_by: Set(String::new()),
                generation: Set(row.generation + 1),
                ..Default::default()
            })
            .filter(worker::Column::Id.eq(row.id))
            .exec(txn)
            .await?;
        tracing::info!(worker.name = row.name, worker.desired = ?desired, "a worker shall take no more work");
        revisions::changed(txn, &[row.id], effects).await?;
    }
    effects.workers.push(WorkerId::from_uuid(row.id));
    effects.registry = true;
    Ok(Some(WorkerId::from_uuid(row.id)))
}

/// Lets a worker take work again, or one that was retired register again.
pub(crate) async fn run(
    txn: &DatabaseTransaction,
    worker: &str,
    effects: &mut Effects,
) -> Result<Option<WorkerId>, RegistryError> {
    let Some(row) = lock(txn, worker).await?.filter(|row| row.leaving.is_none()) else {
        let retired = removed::gone(txn, worker).await?.filter(|gone| gone.how == WorkerEnd::Retired);
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
                held_up_by: Set(String::new()),
                generation: Set(row.generation + 1),
                ..quarantine::forgiven()
            })
            .filter(worker::Column::Id.eq(row.id))
            .exec(txn)
            .await?;
        tracing::info!(worker.name = row.name, "a worker may take work again");
        revisions::changed(txn, &[row.id], effects).await?;
    }
    effects.workers.push(WorkerId::from_uuid(row.id));
    Ok(Some(WorkerId::from_uuid(row.id)))
}

/// Whether the worker may be pruned: its id. `None`: it has gone, or is going.
pub(crate) async fn prunable(
    txn: &DatabaseTransaction,
    worker: &str,
) -> Result<Option<WorkerId>, RegistryError> {
    match lock(txn, worker).await? {
        Some(row) if row.leaving.is_some() => Ok(None),
        Some(row) if row.state == State::Running => Err(RegistryError::InContact(row.name)),
        Some(row) => Ok(Some(WorkerId::from_uuid(row.id))),
        None if removed::gone(txn, worker).await?.is_some() => Ok(None),
        None => Err(RegistryError::NotFound(worker.to_owned())),
    }
}

/// From the commit on, a worker that is not in contact is on its way out, and nobody speaks for it any more.
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

/// What of a worker has not ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OpenLeases {
    pub(crate) leases: usize,
    /// The workloads that wait for the end of one of them, with their teams.
    pub(crate) workloads: Vec<(String, WorkloadId)>,
}

#[derive(FromQueryResult)]
struct HeldLease {
    team: String,
    workload_id: Option<Uuid>,
}

/// What has not ended on `worker`, the oldest first.
pub(crate) async fn unended(db: &impl ConnectionTrait, worker: WorkerId) -> Result<OpenLeases, DbErr> {
    let sql = "SELECT l.team AS team, w.id AS workload_id
               FROM leases l LEFT JOIN workloads w ON w.id = l.workload_id AND w.lease_id = l.id AND w.state <> 'finished'
               WHERE l.worker_id = $1 AND l.state <> 'ended' ORDER BY l.granted_at, l.id";
    let statement = Statement::from_sql_and_values(db.get_database_backend(), sql, [worker.uuid().into()]);
    let held = HeldLease::find_by_statement(statement).all(db).await?;
    let leases = held.len();
    let workload = |held: HeldLease| Some((held.team, WorkloadId::from_uuid(held.workload_id?)));
    Ok(OpenLeases { leases, workloads: held.into_iter().filter_map(workload).collect() })
}

/// Whether a workload that ran on `worker` is still being settled: what it left there is kept by nobody until then.
async fn is_settling(db: &impl ConnectionTrait, worker: Uuid) -> Result<bool, DbErr> {
    let sql = "SELECT w.id AS id FROM workloads w
               WHERE w.state = 'settling' AND EXISTS
                 (SELECT 1 FROM leases l WHERE l.workload_id = w.id AND l.worker_id = $1) LIMIT 1";
    let statement = Statement::from_sql_and_values(db.get_database_backend(), sql, [worker.into()]);
    Ok(db.query_one_raw(statement).await?.is_some())
}

/// Workers that shall be cordoned, retired, or are on their way out.
pub(crate) async fn going(db: &impl ConnectionTrait) -> Result<Vec<Model>, DbErr> {
    // In the words of an index.
    let lost = Expr::cust("ephemeral = TRUE AND state = 'lost'");
    let mut rows =
        worker::Entity::find().filter(Expr::cust("desired <> 'run' OR leaving IS NOT NULL")).all(db).await?;
    let expired =
        worker::Entity::find().filter(lost).filter(worker::Column::Leaving.is_null()).all(db).await?;
    rows.extend(expired.into_iter().filter(|row| row.desired == Desired::Run));
    Ok(rows)
}

/// Lets what runs on `worker` be interrupted: all of it, or what may be. Answers when it was told to.
async fn interrupt(lifecycle: &Lifecycle, worker: Uuid, all: bool) -> Result<(), DbErr> {
    let live = lease::Entity::find()
        .filter(lease::Column::WorkerId.eq(worker))
        .filter(lease::is_live())
        .filter(lease::Column::StopReason.is_null())
        .all(lifecycle.context.db.read())
        .await?;
    for lease in live {
        let Some(workload) = lease.workload_id.map(WorkloadId::from_uuid) else {
            if all {
                lifecycle.end_lease(LeaseId::from_uuid(lease.id), EndedBy::Lost).await?;
            }
            continue;
        };
        lifecycle
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                let grace = lifecycle.context.config.timeout_grace;
                workloads::interrupt(&txn, workload, &lease, all, grace, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    Ok(())
}

/// When the artifact store was asked last about workers that it does not want to forget: that is work for it.
pub(crate) type LastAsked = HashMap<Uuid, Timestamp>;

/// How long it is not asked again.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// Does what is due for one worker that shall be cordoned or removed, and does so much now.
async fn depart_if_due(
    lifecycle: &Lifecycle,
    row: &Model,
    load: Load,
    asked: &mut LastAsked,
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
    let refused = asked.get(&row.id).filter(|_| !row.held_up_by.is_empty());
    let too_early = refused.is_some_and(|asked| Timestamp::now().since(*asked) < ASK_AGAIN);
    if row.desired == Desired::Retire && load.leases == 0 && !too_early && !is_settling(db, row.id).await? {
        asked.insert(row.id, Timestamp::now());
        if !row.force_retire
            && let Err(refusal) =
                lifecycle.store.forget_worker(WorkerId::from_uuid(row.id), Forget::Check).await
        {
            return Ok(held_up(lifecycle, row, refusal).await?);
        }
        depart(lifecycle, row.id, WorkerEnd::Retired).await?;
    }
    Ok(())
}

/// Notes how far a worker is that shall be cordoned or retired, unless that was called off, and whether what ran there was told to end.
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
        tracing::info!(worker.name = row.name, "nothing is left on a worker that may not be interrupted");
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

/// The artifact store does not want to forget a worker: that is noted, and it is asked again.
async fn held_up(lifecycle: &Lifecycle, row: &Model, refusal: rpc::Refusal) -> Result<(), DbErr> {
    if refusal.is_transient() {
        tracing::debug!(worker.name = row.name, error = %refusal, "the artifact store does not say whether a worker may go");
        return Ok(());
    }
    let why = refusal.message;
    if why == row.held_up_by {
        return Ok(());
    }
    tracing::warn!(worker.name = row.name, why, "a worker cannot be retired yet");
    lifecycle
        .context
        .change(async |txn| {
            let mut effects = Effects::default();
            let updated = worker::Entity::update_many()
                .col_expr(worker::Column::HeldUpBy, Expr::value(why.clone()))
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

/// Removes a worker that has no lease any more, unless it shall stay after all, and tells the store.
async fn depart(lifecycle: &Lifecycle, worker: Uuid, how: WorkerEnd) -> Result<(), DbErr> {
    let departed = lifecycle
        .context
        .change(async |txn| {
            let mut effects = Effects::default();
            let gone = remove(&txn, worker, how, Timestamp::now(), &mut effects).await?;
            Ok::<_, DbErr>((gone, effects))
        })
        .await?;
    if departed { tell_store(lifecycle, worker).await } else { Ok(()) }
}

/// Removes the row of a worker and leaves a note that it was there. `false`: it shall stay after all.
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
    tracing::info!(worker.name = row.name, worker.id = %worker, how = ?how, "a worker has gone");
    effects.workers.push(WorkerId::from_uuid(worker));
    effects.registry = true;
    Ok(true)
}

/// Lets the store forget a worker that has gone. If it does not answer, it is told later.
async fn tell_store(lifecycle: &Lifecycle, worker: Uuid) -> Result<(), DbErr> {
    let id = WorkerId::from_uuid(worker);
    if let Err(error) = lifecycle.store.forget_worker(id, Forget::Now).await {
        tracing::debug!(worker.id = %id, error = %error, "the artifact store has not forgotten a worker yet");
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

/// Looks once at all workers that shall be cordoned or removed. Answers whether there are any that may soon.
pub(crate) async fn depart_all(lifecycle: &Lifecycle, asked: &mut LastAsked) -> Result<bool, DbErr> {
    let rows = going(lifecycle.context.db.read()).await?;
    asked.retain(|worker, _| rows.iter().any(|row| row.id == *worker));
    let mut all = HashMap::new();
    for some in rows.chunks(lease_counts::COUNTED_AT_ONCE) {
        let ids: Vec<_> = some.iter().map(|row| row.id).collect();
        all.extend(lease_counts::loads(lifecycle.context.db.read(), &ids).await?);
    }
    for row in &rows {
        let load = all.get(&row.id).copied().unwrap_or_default();
        match depart_if_due(lifecycle, row, load, asked).await {
            Ok(()) => {}
            Err(RegistryError::Database(error)) => return Err(error),
            Err(error) => {
                tracing::warn!(
                    worker.name = row.name,
                    error = domain::error_chain(&error),
                    "cannot see a worker off"
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
        tell_store(lifecycle, *worker).await?;
    }
    quarantine::try_again(&lifecycle.context, Timestamp::now()).await?;
    // What a lost one may run still can take for ever.
    let waits =
        |row: &Model| row.state == State::Lost && all.get(&row.id).is_some_and(|load| load.leases > 0);
    Ok(rows.iter().any(|row| !waits(row)))
}

/// Sees workers off, until the service stops.
pub(crate) async fn depart_forever(lifecycle: Lifecycle) {
    let mut asked = LastAsked::new();
    loop {
        let look = tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            look = depart_all(&lifecycle, &mut asked) => look,
        };
        match look {
            Ok(any) => lifecycle.context.notify.local.any_leaving(any),
            Err(error) => {
                tracing::warn!(error = %error, "cannot look for workers that shall be cordoned or removed")
            }
        }
        tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            () = lifecycle.context.notify.local.registry().notified() => {}
            () = tokio::time::sleep(lifecycle.context.config.poll) => {}
        }
    }
}

/// Whether the artifact store refuses to forget a worker as it is.
pub(crate) fn is_kept(refusal: &rpc::Refusal) -> bool {
    refusal.is(Reason::LastReplica) || refusal.is(Reason::HoldsOrphans)
}
