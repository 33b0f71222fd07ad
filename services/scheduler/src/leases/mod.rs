//! Leases: the right to use one slot of one incarnation of a worker.
//!
//! ```text
//! granted ──must stop──▶ ending ──its gateway reports the stop────────────▶ ended
//!    │                      └──as below───────────────────────────────────▶ ended
//!    ├──its gateway reports the end, or does not know the lease───────────▶ ended
//!    ├──its worker is stalled and has not started it──────────────────────▶ ended
//!    ├──its worker is lost, or a new incarnation──────────────────────────▶ ended
//!    └──not in use, and released, not renewed or interrupted──────────────▶ ended
//! ```
//!
//! A lease of an attempt is in use from its grant on, and a driven lease from [`use_lease`] on.
//! Only leases in use are part of the desired state of their worker. A driven lease in use that is
//! released, not renewed or interrupted must stop, like an attempt.
//!
//! If the worker is lost and may still run the attempt, the lease is given up instead of ended. The
//! workload ends without it. The lease stays `ending` until its gateway reports the stop, the
//! worker has a new incarnation, or the worker is pruned.
//!
//! Invariants:
//! - The counter `active_tasks` of a worker is the number of its live leases that use a slot. A
//!   grant never raises it above the worker's slots. Requested resources are counted in the same
//!   way. [`crate::commit`] raises the counters under the lock of the worker, in the transaction
//!   that writes the lease. The transaction of the one guarded update that ends a lease lowers
//!   them.
//! - A workload has at most one live lease. A unique index enforces it.
//!
//! The row of a workload is locked before its lease, so a lease that was read after that lock does
//! not change.

pub(crate) mod drift;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use db::rows;
use domain::worker::{Incarnation, LeaseClaims};
use domain::{AttemptId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, ExprTrait, QueryFilter,
    QueryOrder, QuerySelect, Select, Statement,
};
use uuid::Uuid;

use crate::db::entity::lease::{self, EndedBy, EndedLease, Kind, State, StopReason};
use crate::db::entity::{STATE_OF_NAMED, owner_affinity, worker, workload};
use crate::notify::changes::Effects;
use crate::outbox::{self, Message, Parcel, Settlement};
use crate::placement::{Placement, Resources};
use crate::workers;
use crate::workers::load_counters::LoadChanges;

/// Returns the condition that a lease selected by id has not ended.
fn named_is_live() -> Expr {
    Expr::cust(format!("{STATE_OF_NAMED} <> 'ended'"))
}

/// Reason why a driven lease cannot be renewed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RenewError {
    /// The lease was released, has expired, or its worker was lost.
    #[error("cannot renew the lease: it has ended")]
    Lost,
    /// The database failed.
    #[error("cannot access the lease in the database")]
    Database(#[from] DbErr),
}

/// Reason why a driven lease cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UseError {
    /// The lease must stop or has ended, or its worker is lost or has a new incarnation.
    #[error("cannot use the lease: it has ended or is ending")]
    Lost,
    /// The lease takes no slot, so no process may run under it.
    #[error("must be of a lease of another kind than transfer")]
    Transfer,
    /// The artifact store identifies holders by id, so a workload must not have the same id.
    #[error("cannot use the lease: a workload has its id")]
    WorkloadId,
    /// The database failed.
    #[error("cannot access the lease in the database")]
    Database(#[from] DbErr),
}

/// A lease, as callers see it.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) claims: LeaseClaims,
    pub(crate) worker_name: String,
    pub(crate) kind: Kind,
    pub(crate) owner: String,
    pub(crate) reserved: Resources,
    pub(crate) granted_at: Timestamp,
    /// Expiry unless renewed. `None`: the lease is not driven.
    pub(crate) expires_at: Option<Timestamp>,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) state: LeaseState,
}

/// The state of a lease, as callers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseState {
    Granted,
    Ending,
    Ended(Timestamp, LeaseEnd),
}

/// Reason why a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseEnd {
    /// The holder released the lease.
    Released,
    /// The gateway reported the end of the attempt.
    Reported,
    /// The lease was not renewed in time.
    Expired,
    /// The worker was lost.
    Lost,
    /// The lease had to stop, and nothing had started or its worker was lost meanwhile.
    Stopped,
}

/// Reason why a lease cannot be returned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeaseError {
    /// The team has no such lease.
    #[error("lease {0} is unknown to this team")]
    NotFound(LeaseId),
    /// The database failed.
    #[error("cannot access the lease in the database")]
    Database(#[from] DbErr),
}

/// Returns the claims of the token of `lease`.
pub(crate) fn claims(lease: &lease::Model) -> LeaseClaims {
    let attempt = lease.workload_id.zip(lease.attempt_id);
    LeaseClaims {
        lease: LeaseId::from_uuid(lease.id),
        worker: WorkerId::from_uuid(lease.worker_id),
        incarnation: Incarnation(u64::try_from(lease.incarnation).unwrap_or(0)),
        team: lease.team.clone(),
        attempt: attempt
            .map(|(workload, attempt)| (WorkloadId::from_uuid(workload), AttemptId::from_uuid(attempt))),
    }
}

/// Returns the claims of the token of a driven lease on the worker of `placement`.
pub(crate) fn driven_claims(lease: LeaseId, placement: &Placement, team: &str) -> LeaseClaims {
    LeaseClaims {
        lease,
        worker: placement.worker,
        incarnation: placement.incarnation,
        team: team.to_owned(),
        attempt: None,
    }
}

/// Reads one lease.
pub(crate) async fn find(db: &impl ConnectionTrait, lease: LeaseId) -> Result<Option<lease::Model>, DbErr> {
    lease::Entity::find_by_id(lease.uuid()).one(db).await
}

/// Reads and locks one lease until the end of the transaction.
pub(crate) async fn lock(txn: &DatabaseTransaction, id: LeaseId) -> Result<Option<lease::Model>, DbErr> {
    lease::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await
}

/// Returns the workloads, of these, whose attempt must stop and has not, with the reason.
pub(crate) async fn stopping(
    db: &impl ConnectionTrait,
    workloads: impl IntoIterator<Item = Uuid>,
) -> Result<Vec<(Uuid, StopReason)>, DbErr> {
    let backend = db.get_database_backend();
    let among = rows::among(backend, 1);
    // The text equals that of the partial index, like in `is_live`.
    let query = format!(
        "SELECT workload_id, stop_reason FROM leases
         WHERE workload_id {among} AND state <> 'ended' AND stop_reason IS NOT NULL"
    );
    let query = Statement::from_sql_and_values(backend, query, [rows::ids(workloads)?]);
    let found = db.query_all_raw(query).await?;
    found.iter().map(|row| Ok((row.try_get("", "workload_id")?, row.try_get("", "stop_reason")?))).collect()
}

/// Returns a lease of this team, as callers see it.
pub(crate) async fn get(db: &impl ConnectionTrait, team: &str, id: LeaseId) -> Result<Lease, LeaseError> {
    let row = lease::Entity::find_by_id(id.uuid()).filter(lease::Column::Team.eq(team)).one(db).await?;
    let row = row.ok_or(LeaseError::NotFound(id))?;
    let worker = worker::Entity::find_by_id(row.worker_id).one(db).await?;
    Ok(describe(row, worker.map(|worker| worker.name).unwrap_or_default()))
}

/// Lists live leases in the order of their ids, optionally of one team or worker.
pub(crate) async fn list(
    db: &impl ConnectionTrait,
    team: Option<&str>,
    worker: Option<WorkerId>,
    after: Option<LeaseId>,
    limit: u64,
) -> Result<Vec<Lease>, DbErr> {
    let mut query = lease::Entity::find().filter(lease::is_live());
    if let Some(team) = team {
        query = query.filter(lease::Column::Team.eq(team));
    }
    if let Some(worker) = worker {
        query = query.filter(lease::Column::WorkerId.eq(worker.uuid()));
    }
    if let Some(after) = after {
        query = query.filter(lease::Column::Id.gt(after.uuid()));
    }
    let rows = query.order_by_asc(lease::Column::Id).limit(limit).all(db).await?;
    let concerned: HashSet<_> = rows.iter().map(|row| WorkerId::from_uuid(row.worker_id)).collect();
    let names = workers::find_all(db, concerned).await?.into_iter().map(|worker| (worker.id, worker.name));
    let names: HashMap<_, _> = names.collect();
    let name_of = |row: &lease::Model| names.get(&row.worker_id).cloned().unwrap_or_default();
    Ok(rows.into_iter().map(|row| (name_of(&row), row)).map(|(name, row)| describe(row, name)).collect())
}

fn describe(row: lease::Model, worker_name: String) -> Lease {
    let amount = |amount: i64| u64::try_from(amount).unwrap_or(0);
    Lease {
        claims: claims(&row),
        worker_name,
        kind: row.kind,
        reserved: Resources {
            cpu_millis: amount(row.cpu_millis),
            memory_bytes: amount(row.memory_bytes),
            disk_bytes: amount(row.disk_bytes),
        },
        granted_at: Timestamp(row.granted_at),
        expires_at: row.expires_at.map(Timestamp),
        stop_reason: row.stop_reason,
        state: state(&row),
        owner: row.owner,
    }
}

fn state(row: &lease::Model) -> LeaseState {
    let ended_at = row.ended_at.unwrap_or_default();
    let end = match (row.ended_by, row.stop_reason) {
        (_, Some(StopReason::Released)) => LeaseEnd::Released,
        (_, Some(StopReason::Expired)) => LeaseEnd::Expired,
        (Some(EndedBy::Reported), _) if row.is_driven() => LeaseEnd::Released,
        (Some(EndedBy::Reported), _) => LeaseEnd::Reported,
        (_, Some(StopReason::WorkerLost)) => LeaseEnd::Lost,
        (_, Some(_)) => LeaseEnd::Stopped,
        // Only an expiry leaves an end at or after `expires_at`.
        (_, None) if row.expires_at.is_some_and(|at| at <= ended_at) => LeaseEnd::Expired,
        (_, None) => LeaseEnd::Lost,
    };
    match row.state {
        State::Granted => LeaseState::Granted,
        State::Ending => LeaseState::Ending,
        State::Ended => LeaseState::Ended(Timestamp(ended_at), end),
    }
}

/// Reads the existing leases of these ids.
pub(crate) async fn find_all(
    db: &impl ConnectionTrait,
    leases: &[LeaseId],
) -> Result<HashMap<LeaseId, lease::Model>, DbErr> {
    if leases.is_empty() {
        return Ok(HashMap::new());
    }
    let backend = db.get_database_backend();
    let query = format!("SELECT * FROM leases WHERE id {}", rows::among(backend, 1));
    let values = [rows::ids(leases.iter().map(|lease| lease.uuid()))?];
    let found = lease::Entity::find().from_raw_sql(Statement::from_sql_and_values(backend, query, values));
    let found = found.all(db).await?.into_iter().map(|lease| (LeaseId::from_uuid(lease.id), lease));
    Ok(found.collect())
}

/// Returns the live leases in use in the incarnation `incarnation` of `worker`.
pub(crate) async fn live_in_use(
    db: &impl ConnectionTrait,
    worker: WorkerId,
    incarnation: Incarnation,
) -> Result<Vec<lease::Model>, DbErr> {
    live_in_use_of(worker, incarnation).all(db).await
}

fn live_in_use_of(worker: WorkerId, incarnation: Incarnation) -> Select<lease::Entity> {
    lease::Entity::find()
        .filter(lease::Column::WorkerId.eq(worker.uuid()))
        .filter(lease::is_live())
        .filter(lease::Column::InUse.eq(true))
        .filter(lease::Column::Incarnation.eq(i64::try_from(incarnation.0).unwrap_or(i64::MAX)))
}

/// Marks a driven lease as in use. From the commit on, its gateway receives it, and its slot is
/// freed only when nothing runs under it. Returns the generation of the desired state that names
/// it.
///
/// A lease past its expiry may be used until [`expire`] ends it, as in [`renew`].
pub(crate) async fn use_lease(
    txn: &DatabaseTransaction,
    id: LeaseId,
    effects: &mut Effects,
) -> Result<i64, UseError> {
    let lease = lock(txn, id).await?.filter(|lease| lease.state == State::Granted && lease.is_driven());
    let lease = lease.ok_or(UseError::Lost)?;
    // An incarnation that starts after this check ends the lease, too.
    if workers::is_stranded(txn, &lease).await? {
        return Err(UseError::Lost);
    }
    if lease.in_use {
        return Ok(lease.generation);
    }
    if !lease.kind.takes_a_slot() {
        return Err(UseError::Transfer);
    }
    if workload::Entity::find_by_id(lease.id).one(txn).await?.is_some() {
        return Err(UseError::WorkloadId);
    }
    let generation = raise_generation(txn, lease.worker_id, effects).await?;
    lease::Entity::update_many()
        .col_expr(lease::Column::InUse, Expr::value(true))
        .col_expr(lease::Column::Settles, Expr::value(true))
        .col_expr(lease::Column::Generation, Expr::value(generation))
        .filter(lease::Column::Id.eq(lease.id))
        .exec(txn)
        .await?;
    Ok(generation)
}

/// Stops a driven lease, and ends it at once if it is not in use.
pub(crate) async fn stop_driven(
    txn: &DatabaseTransaction,
    id: LeaseId,
    reason: StopReason,
    grace: Duration,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    match lock(txn, id).await? {
        Some(lease) if lease.in_use => stop(txn, lease, reason, grace, effects).await,
        Some(_) => end(txn, id, EndedBy::Lost, now, effects).await.map(drop),
        None => Ok(()),
    }
}

/// Stops what runs under `lease`. A repeat may only shorten the grace period, and the first
/// reason stays.
pub(crate) async fn stop(
    txn: &DatabaseTransaction,
    lease: lease::Model,
    reason: StopReason,
    grace: Duration,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let grace = i64::try_from(grace.as_micros()).unwrap_or(i64::MAX);
    let shorter = lease.stop_grace_us.is_none_or(|present| grace < present);
    if lease.state == State::Ended || !shorter {
        return Ok(());
    }
    let stopped = lease::Entity::update_many()
        .col_expr(lease::Column::State, Expr::value(State::Ending))
        .col_expr(lease::Column::StopReason, Expr::value(lease.stop_reason.unwrap_or(reason)))
        .col_expr(lease::Column::StopGraceUs, Expr::value(grace))
        .filter(lease::Column::Id.eq(lease.id))
        .filter(named_is_live())
        .exec(txn)
        .await?;
    if stopped.rows_affected > 0 {
        raise_generation(txn, lease.worker_id, effects).await?;
    }
    Ok(())
}

/// Gives up `lease`, whose lost worker may still run something under it. The slot stays in use
/// until that has stopped.
pub(crate) async fn give_up(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    effects: &mut Effects,
) -> Result<bool, DbErr> {
    let given_up = lease::Entity::update_many()
        .col_expr(lease::Column::State, Expr::value(State::Ending))
        .col_expr(lease::Column::StopReason, Expr::value(StopReason::WorkerLost))
        .col_expr(lease::Column::StopGraceUs, Expr::value(0_i64))
        .filter(lease::Column::Id.eq(lease.id))
        .filter(named_is_live())
        .exec(txn)
        .await?;
    if given_up.rows_affected > 0 {
        raise_generation(txn, lease.worker_id, effects).await?;
    }
    Ok(given_up.rows_affected > 0)
}

/// Raises the phase of the attempt under `lease`. Returns `false` if the phase was not raised or
/// the lease has ended.
pub(crate) async fn raise_phase(
    txn: &DatabaseTransaction,
    lease: LeaseId,
    phase: i64,
) -> Result<bool, DbErr> {
    let raised = lease::Entity::update_many()
        .col_expr(lease::Column::Phase, Expr::value(phase))
        .filter(lease::Column::Id.eq(lease.uuid()))
        .filter(named_is_live())
        .filter(lease::Column::Phase.lt(phase))
        .exec(txn)
        .await?;
    Ok(raised.rows_affected > 0)
}

/// Ends `lease` and frees its slot. Returns `false` if the lease had ended before.
pub(crate) async fn end(
    txn: &DatabaseTransaction,
    lease: LeaseId,
    by: EndedBy,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<bool, DbErr> {
    let ended = lease::Entity::update_many()
        .col_expr(lease::Column::State, Expr::value(State::Ended))
        .col_expr(lease::Column::EndedAt, Expr::value(now.0))
        .col_expr(lease::Column::EndedBy, Expr::value(by))
        .filter(lease::Column::Id.eq(lease.uuid()))
        .filter(named_is_live())
        .exec_with_returning(txn)
        .await?;
    release_resources(txn, &ended, now, effects).await?;
    Ok(!ended.is_empty())
}

/// Frees the resources and pins of leases that ended in this transaction.
async fn release_resources(
    txn: &DatabaseTransaction,
    ended: &[lease::Model],
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let ended: Vec<_> = ended.iter().map(lease::Model::ended_part).collect();
    let mut changes = LoadChanges::default();
    ended.iter().for_each(|lease| changes.release(lease));
    effects.workers.extend(changes.lock_and_write(txn).await?);
    effects.parcels.extend(release_pins(txn, &ended, now).await?);
    Ok(())
}

/// Writes the release of pins of ended driven leases to the outbox.
pub(crate) async fn release_pins(
    txn: &DatabaseTransaction,
    ended: &[EndedLease],
    now: Timestamp,
) -> Result<Vec<Parcel>, DbErr> {
    let settled = ended.iter().filter(|lease| lease.settles);
    let messages =
        settled.map(|lease| (lease.lease_id, Message::Settle(Settlement::nothing(lease.team.clone()))));
    outbox::put_all(txn, messages, now).await
}

/// Raises the generation of the desired state of `worker`, and returns it.
async fn raise_generation(
    txn: &DatabaseTransaction,
    worker: uuid::Uuid,
    effects: &mut Effects,
) -> Result<i64, DbErr> {
    let raised = worker::Entity::update_many()
        .col_expr(worker::Column::Generation, Expr::col(worker::Column::Generation).add(1))
        .filter(worker::Column::Id.eq(worker))
        .exec_with_returning(txn)
        .await?;
    effects.workers.push(WorkerId::from_uuid(worker));
    Ok(raised.first().map_or(0, |worker| worker.generation))
}

/// Renews a driven lease until `now + term`. A later expiry that another clock set stays. Only a
/// lease that has ended is rejected. A lease past its expiry is renewed, because the renewal may
/// arrive before [`extend_terms`] after an outage.
pub(crate) async fn renew(
    txn: &DatabaseTransaction,
    lease: LeaseId,
    now: Timestamp,
    term: Duration,
) -> Result<(), RenewError> {
    let (until, known) = ((now + term).0, Expr::col(lease::Column::ExpiresAt));
    let longer = Expr::case(known.clone().gt(until), known).finally(until);
    let renewed = lease::Entity::update_many()
        .col_expr(lease::Column::ExpiresAt, longer.into())
        .filter(lease::Column::Id.eq(lease.uuid()))
        .filter(Expr::cust(format!("{STATE_OF_NAMED} = 'granted'")))
        .exec(txn)
        .await?;
    if renewed.rows_affected > 0 { Ok(()) } else { Err(RenewError::Lost) }
}

/// Gives every granted driven lease at least a full term from `now`, because its holder may have
/// been unable to renew it. Repeats at one time have no further effect.
pub(crate) async fn extend_terms(
    txn: &DatabaseTransaction,
    now: Timestamp,
    term: Duration,
) -> Result<(), DbErr> {
    lease::Entity::update_many()
        .col_expr(lease::Column::ExpiresAt, Expr::value((now + term).0))
        .filter(lease::is_granted())
        .filter(lease::Column::ExpiresAt.lt((now + term).0))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Ends up to 1000 driven leases that were not renewed in time, and stops those in use.
pub(crate) async fn expire(
    txn: &DatabaseTransaction,
    grace: Duration,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let mut late = lease::Entity::find()
        .filter(lease::is_granted())
        .filter(lease::Column::ExpiresAt.lte(now.0))
        .order_by_asc(lease::Column::Id)
        .limit(1000)
        .lock_exclusive()
        .all(txn)
        .await?;
    // A lease may have been renewed before the lock was taken.
    late.retain(|lease| lease.state == State::Granted && lease.expires_at.is_some_and(|at| at <= now.0));
    let (used, late): (Vec<_>, Vec<_>) = late.into_iter().partition(|lease| lease.in_use);
    lease::Entity::update_many()
        .col_expr(lease::Column::State, Expr::value(State::Ended))
        .col_expr(lease::Column::EndedAt, Expr::value(now.0))
        .col_expr(lease::Column::EndedBy, Expr::value(EndedBy::Lost))
        .filter(lease::Column::Id.is_in(late.iter().map(|lease| lease.id)))
        .exec(txn)
        .await?;
    for lease in used {
        stop(txn, lease, StopReason::Expired, grace, effects).await?;
    }
    release_resources(txn, &late, now, effects).await
}

/// Returns whether a driven lease was not renewed in time.
pub(crate) async fn any_expired(db: &impl ConnectionTrait, now: Timestamp) -> Result<bool, DbErr> {
    let expired = lease::Entity::find()
        .filter(lease::is_granted())
        .filter(lease::Column::ExpiresAt.is_not_null())
        .filter(lease::Column::ExpiresAt.lte(now.0))
        .one(db)
        .await?;
    Ok(expired.is_some())
}

/// Returns the time at which the next driven lease expires.
pub(crate) async fn next_expiry(db: &impl ConnectionTrait) -> Result<Option<Timestamp>, DbErr> {
    let next = lease::Entity::find()
        .select_only()
        .column_as(lease::Column::ExpiresAt.min(), "expires_at")
        .filter(lease::is_granted())
        .filter(lease::Column::ExpiresAt.is_not_null());
    Ok(next.into_tuple::<Option<i64>>().one(db).await?.flatten().map(Timestamp))
}

/// Returns whether a driven lease is live, so that its pins in the artifact store are in use.
pub(crate) async fn is_live_driven(db: &impl ConnectionTrait, lease: LeaseId) -> Result<bool, DbErr> {
    let lease = find(db, lease).await?;
    Ok(lease.is_some_and(|lease| lease.is_driven() && lease.state != State::Ended))
}

/// Returns the worker on which the containers of `owner` run.
pub(crate) async fn worker_of_owner(
    db: &impl ConnectionTrait,
    team: &str,
    owner: &str,
) -> Result<Option<WorkerId>, DbErr> {
    if owner.is_empty() {
        return Ok(None);
    }
    let key = (team.to_owned(), owner.to_owned());
    let row = owner_affinity::Entity::find_by_id(key).one(db).await?;
    Ok(row.map(|row| WorkerId::from_uuid(row.worker_id)))
}

/// Deletes the affinity of owners that have no live lease and were granted none since `before`.
pub(crate) async fn forget_owners(txn: &DatabaseTransaction, before: Timestamp) -> Result<(), DbErr> {
    let unused = "NOT EXISTS (SELECT 1 FROM leases WHERE leases.team = owner_affinity.team AND leases.owner = owner_affinity.owner \
                  AND leases.state <> 'ended' AND leases.owner <> '')";
    owner_affinity::Entity::delete_many()
        .filter(owner_affinity::Column::GrantedAt.lt(before.0))
        .filter(Expr::cust(unused))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Deletes driven leases that ended before `before`. Other leases are deleted with their workloads.
pub(crate) async fn forget(txn: &DatabaseTransaction, before: Timestamp) -> Result<(), DbErr> {
    lease::Entity::delete_many()
        .filter(Expr::cust("state = 'ended'"))
        .filter(lease::Column::WorkloadId.is_null())
        .filter(lease::Column::EndedAt.lt(before.0))
        .exec(txn)
        .await
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use sea_orm::{DbBackend, QueryTrait};

    use super::*;

    #[tokio::test]
    async fn live_leases_are_found_by_their_index() {
        let database = testing::databases::sqlite();
        let db = db::Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let query = live_in_use_of(WorkerId::new(), Incarnation(1)).build(DbBackend::Sqlite);
        // Parameters have no values here, so the plan is the one that all executions share.
        let explain = format!("EXPLAIN QUERY PLAN {}", query.sql);
        let plan = db.read().query_one_raw(Statement::from_string(DbBackend::Sqlite, explain)).await;
        let step = plan.expect("a valid statement").expect("a plan");
        let step: String = step.try_get("", "detail").expect("a text");
        assert!(step.contains("leases_live_of_worker"), "{step}");
    }
}
