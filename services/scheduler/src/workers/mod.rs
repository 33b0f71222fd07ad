//! Workers: registration, sessions, and whether a worker is in contact.
//!
//! ```text
//! running ─silent for the TTL, or its gateway disconnected─▶ stalled ─silent for `lost_after`─▶ lost
//!    ▲────────────────registration or heartbeat───────────────┴──────────────────────────────────┘
//! ```
//!
//! Invariants:
//! - The incarnation and the session of a worker only rise. [`register`] mints them as max(last +
//!   1, now in µs) under the lock of the row.
//! - A message of an older session changes nothing ([`record_heartbeats`]).
//! - No message of a worker changes its desired state.

use std::collections::HashMap;
use std::time::Duration;

use db::rows::{self, Column};
use domain::worker::{Capacity, Incarnation, Labels, Marker, Session, SessionClaims};
use domain::{GatewayInstance, Timestamp, WorkerId};
use sea_orm::sea_query::{Expr, OnConflict, Query};
use sea_orm::{
    ColumnTrait, Condition, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, ExprTrait, QueryFilter,
    QueryOrder, QuerySelect, Set, Statement,
};
use serde::Serialize;
use uuid::Uuid;

use crate::config::Config;
use crate::db::entity::removed_worker::WorkerEnd;
use crate::db::entity::worker::{self, Desired, Model, State};
use crate::db::entity::{from_json, heartbeat, lease, reservation, to_json};
use crate::notify::changes::Effects;
use crate::notify::desired_state::DesiredState;
use crate::placement;
use crate::workers::cache::Facts;
use crate::workers::lease_counts::Load;

pub(crate) mod cache;
pub(crate) mod desired_state;
mod heartbeats;
pub(crate) mod lease_counts;
pub(crate) mod load_counters;
pub(crate) mod quarantine;
pub(crate) mod removed;
pub(crate) mod revisions;
#[cfg(test)]
pub(crate) mod test_support;

pub(crate) use heartbeats::{Heartbeat, mark_running, record_heartbeats};

/// Least time between two writes of a heartbeat that changes nothing else.
pub(crate) const CONTACT_EVERY: Duration = Duration::from_secs(1);

/// Maximum number of leases that are ended in one pass after their worker was lost.
pub(crate) const STRANDED_BATCH: usize = 500;

/// The registration of a worker by its gateway.
#[derive(Debug, Clone)]
pub(crate) struct Registration {
    pub(crate) name: String,
    pub(crate) instance: GatewayInstance,
    /// A gateway instance that has certainly ended.
    pub(crate) ended: Option<GatewayInstance>,
    /// The previous session of this gateway instance, if this scheduler signed it.
    pub(crate) last: Option<SessionClaims>,
    pub(crate) marker: Marker,
    pub(crate) endpoint: String,
    pub(crate) labels: Labels,
    pub(crate) capacity: Capacity,
    /// Whether the worker is removed once it is lost.
    pub(crate) ephemeral: bool,
}

/// Reason why a gateway may not be responsible for a worker.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    /// Another gateway has taken over.
    #[error("another gateway has taken over this worker")]
    Stale,
    /// Another gateway attends the worker and is in contact.
    #[error("cannot register the worker: another gateway is connected for it")]
    AlreadyAttended,
    /// The name belongs to a worker of another team, or of all teams.
    #[error("cannot register the worker: its name belongs to a worker of another team")]
    OtherTeam,
    /// The worker was retired.
    #[error("this worker was retired")]
    Retired,
    /// The worker was removed.
    #[error("the worker was removed")]
    Forgotten,
    /// The worker is being removed.
    #[error("the worker is being removed; retry later")]
    Leaving,
    /// The database failed.
    #[error("cannot access the worker in the database")]
    Database(#[from] DbErr),
}

/// Resource usage of a worker, as its gateway reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) containers: u64,
    pub(crate) volumes: u64,
    pub(crate) disk_free_bytes: u64,
    /// Number of containers that no lease uses any more.
    pub(crate) kept_containers: u64,
}

/// A worker with its session, load and health.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) placed: placement::Worker,
    pub(crate) session: Session,
    pub(crate) kept: Usage,
    pub(crate) last_contact_at: Timestamp,
    /// Since when the worker has the TTL to return, if it was not in contact since.
    pub(crate) awaited_since: Option<Timestamp>,
    pub(crate) load: Load,
    pub(crate) ephemeral: bool,
    pub(crate) landed_at: Option<Timestamp>,
    pub(crate) interrupt_at: Option<Timestamp>,
    pub(crate) blocked_by: String,
    pub(crate) failures: u32,
    pub(crate) last_failure: String,
    pub(crate) quarantined_until: Option<Timestamp>,
    /// The team of all failures. `None`: no failures, or failures of several teams.
    pub(crate) failed_team: Option<String>,
    pub(crate) unsupported_versions: Vec<u32>,
    pub(crate) revision: i64,
}

/// Returns the next incarnation or session. The time keeps numbers unique after the loss of a
/// database.
fn mint(last: i64, now: Timestamp) -> i64 {
    Ord::max(now.0, last.saturating_add(1))
}

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Opens or continues the session of each gateway. All registrations must name different workers.
/// Returns a session or an error for each.
///
/// Registrations share one transaction, because each one changes the revision of workers, and
/// transactions that do so wait for each other.
pub(crate) async fn register(
    txn: &DatabaseTransaction,
    registrations: &[&Registration],
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<Vec<Result<SessionClaims, SessionError>>, DbErr> {
    let known = lock_named(txn, registrations.iter().map(|registration| &*registration.name)).await?;
    let known: HashMap<_, _> = known.iter().map(|row| (&*row.name, row)).collect();
    let (mut sessions, mut changed) =
        (Vec::with_capacity(registrations.len()), Vec::with_capacity(registrations.len()));
    for registration in registrations {
        let session =
            register_one(txn, registration, known.get(&*registration.name).copied(), config, now).await;
        match &session {
            Ok(session) => changed.push(session.worker.uuid()),
            Err(SessionError::Database(error)) => return Err(error.clone()),
            Err(_) => {}
        }
        sessions.push(session);
    }
    revisions::changed(txn, &changed, effects).await?;
    Ok(sessions)
}

/// Locks the rows of the workers with these names in the order of their ids, and returns them.
async fn lock_named(
    txn: &DatabaseTransaction,
    names: impl Iterator<Item = &str>,
) -> Result<Vec<Model>, DbErr> {
    #[derive(Serialize)]
    struct Name<'n> {
        name: &'n str,
    }
    let given: Vec<_> = names.map(|name| Name { name }).collect();
    let backend = txn.get_database_backend();
    let query = format!(
        "SELECT * FROM workers WHERE name IN ({}) ORDER BY id {}",
        rows::query(backend, 1, &[("name", Column::Text)]),
        rows::lock(backend, "FOR UPDATE")
    );
    let statement = Statement::from_sql_and_values(backend, query, [rows::value(&given)?]);
    worker::Entity::find().from_raw_sql(statement).all(txn).await
}

/// Opens or continues one session. `known`: the locked row of the worker.
async fn register_one(
    txn: &DatabaseTransaction,
    registration: &Registration,
    known: Option<&Model>,
    config: &Config,
    now: Timestamp,
) -> Result<SessionClaims, SessionError> {
    may_register(txn, registration, known).await?;
    let (id, incarnation, session, generation) = match known {
        None => (Uuid::now_v7(), now.0, now.0, 1),
        Some(known) => {
            let session = continue_session(txn, registration, known, config, now).await?;
            let same_life =
                known.marker_id == registration.marker.id.uuid() && known.boot_id == registration.marker.boot;
            let incarnation = if same_life { known.incarnation } else { mint(known.incarnation, now) };
            (known.id, incarnation, session, known.generation + 1)
        }
    };
    let row = worker::ActiveModel {
        id: Set(id),
        name: Set(registration.name.clone()),
        desired: Set(known.map_or(Desired::Run, |known| known.desired)),
        state: Set(State::Running),
        generation: Set(generation),
        active_tasks: known.map_or(Set(0), |_| sea_orm::NotSet),
        active_checks: known.map_or(Set(0), |_| sea_orm::NotSet),
        reserved_cpu_millis: known.map_or(Set(0), |_| sea_orm::NotSet),
        reserved_memory_bytes: known.map_or(Set(0), |_| sea_orm::NotSet),
        reserved_disk_bytes: known.map_or(Set(0), |_| sea_orm::NotSet),
        ended_tasks: known.map_or(Set(0), |_| sea_orm::NotSet),
        max_tasks: Set(registration.capacity.max_tasks.map(i64::from)),
        max_containers: Set(registration.capacity.max_containers.map(i64::from)),
        max_volumes: Set(registration.capacity.max_volumes.map(i64::from)),
        cpu_millis: Set(registration.capacity.cpu_millis.map(number)),
        memory_bytes: Set(registration.capacity.memory_bytes.map(number)),
        incarnation: Set(incarnation),
        session: Set(session),
        gateway_instance: Set(registration.instance.uuid()),
        marker_id: Set(registration.marker.id.uuid()),
        boot_id: Set(registration.marker.boot.clone()),
        endpoint: Set(registration.endpoint.clone()),
        labels: Set(to_json(&registration.labels)?),
        disk_bytes: Set(number(registration.capacity.disk_bytes)),
        min_free_disk_bytes: Set(number(registration.capacity.min_free_disk_bytes)),
        registered_at: known.map_or(Set(now.0), |_| sea_orm::NotSet),
        ephemeral: Set(registration.ephemeral),
        unsupported_versions: Set("[]".to_owned()),
        ..match known {
            // A new incarnation may not have the fault of the previous one.
            Some(known) if known.incarnation == incarnation => Default::default(),
            _ => quarantine::no_failures(),
        }
    };
    match known {
        None => _ = worker::Entity::insert(row).exec_without_returning(txn).await?,
        Some(_) => {
            _ = worker::Entity::update_many().set(row).filter(worker::Column::Id.eq(id)).exec(txn).await?;
        }
    }
    let contact = heartbeat::ActiveModel {
        worker_id: Set(id),
        last_contact_at: Set(now.0),
        patient_since: Set(now.0),
        attended: Set(true),
        containers: Set(0),
        volumes: Set(0),
        disk_free_bytes: Set(heartbeat::UNKNOWN_DISK),
        kept_containers: Set(0),
    };
    let again = OnConflict::column(heartbeat::Column::WorkerId)
        .update_columns([heartbeat::Column::LastContactAt, heartbeat::Column::Attended])
        .to_owned();
    heartbeat::Entity::insert(contact).on_conflict(again).exec_without_returning(txn).await?;

    Ok(SessionClaims {
        worker: WorkerId::from_uuid(id),
        incarnation: Incarnation(unsigned(incarnation)),
        session: Session(unsigned(session)),
        instance: registration.instance,
    })
}

/// Checks that the registration may use the worker that is known by its name.
async fn may_register(
    txn: &DatabaseTransaction,
    registration: &Registration,
    known: Option<&Model>,
) -> Result<(), SessionError> {
    match known {
        Some(known) if known.leaving.is_some() => Err(SessionError::Leaving),
        Some(known) if from_json::<Labels>(&known.labels)?.team != registration.labels.team => {
            Err(SessionError::OtherTeam)
        }
        Some(_) => Ok(()),
        None if removed::is_retired(txn, &registration.name, registration.marker.id.uuid()).await? => {
            Err(SessionError::Retired)
        }
        None => Ok(()),
    }
}

/// Lists a worker whose gateway supports only protocol versions that this scheduler does not
/// support. Changes nothing while another gateway attends the worker.
pub(crate) async fn list_incompatible(
    txn: &DatabaseTransaction,
    registration: &Registration,
    versions: &[u32],
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), SessionError> {
    let known = worker::Entity::find()
        .filter(worker::Column::Name.eq(&*registration.name))
        .lock_exclusive()
        .one(txn)
        .await?;
    may_register(txn, registration, known.as_ref()).await?;
    let versions = to_json(&versions)?;
    let id = match known {
        Some(known) => {
            continue_session(txn, registration, &known, config, now).await?;
            // The time without a heartbeat continues, because the attempts of the worker must end
            // some time.
            if known.unsupported_versions == versions {
                return Ok(());
            }
            worker::Entity::update_many()
                .col_expr(worker::Column::UnsupportedVersions, Expr::value(versions))
                .filter(worker::Column::Id.eq(known.id))
                .exec(txn)
                .await?;
            known.id
        }
        None => {
            let id = Uuid::now_v7();
            let row = worker::ActiveModel {
                id: Set(id),
                name: Set(registration.name.clone()),
                desired: Set(Desired::Run),
                state: Set(State::Stalled),
                generation: Set(1),
                active_tasks: Set(0),
                max_tasks: Set(registration.capacity.max_tasks.map(i64::from)),
                incarnation: Set(now.0),
                session: Set(now.0),
                gateway_instance: Set(registration.instance.uuid()),
                marker_id: Set(registration.marker.id.uuid()),
                boot_id: Set(registration.marker.boot.clone()),
                endpoint: Set(registration.endpoint.clone()),
                labels: Set(to_json(&registration.labels)?),
                disk_bytes: Set(number(registration.capacity.disk_bytes)),
                min_free_disk_bytes: Set(number(registration.capacity.min_free_disk_bytes)),
                registered_at: Set(now.0),
                ephemeral: Set(registration.ephemeral),
                unsupported_versions: Set(versions),
                ..Default::default()
            };
            worker::Entity::insert(row).exec_without_returning(txn).await?;
            let contact = heartbeat::ActiveModel {
                worker_id: Set(id),
                last_contact_at: Set(now.0),
                patient_since: Set(now.0),
                attended: Set(false),
                containers: Set(0),
                volumes: Set(0),
                disk_free_bytes: Set(heartbeat::UNKNOWN_DISK),
                kept_containers: Set(0),
            };
            heartbeat::Entity::insert(contact).exec_without_returning(txn).await?;
            id
        }
    };
    Ok(revisions::changed(txn, &[id], effects).await?)
}

/// Returns the session in which the gateway is responsible for `known`.
async fn continue_session(
    txn: &DatabaseTransaction,
    registration: &Registration,
    known: &Model,
    config: &Config,
    now: Timestamp,
) -> Result<i64, SessionError> {
    if known.gateway_instance == registration.instance.uuid() {
        return Ok(known.session);
    }
    let superseded = |last: &SessionClaims| {
        last.instance == registration.instance
            && last.worker.uuid() == known.id
            && number(last.session.0) < known.session
    };
    if registration.last.as_ref().is_some_and(superseded) {
        return Err(SessionError::Stale);
    }
    // The lock orders this decision after any heartbeat that is being written
    // ([`record_heartbeats`]).
    let contact = heartbeat::Entity::find_by_id(known.id).lock_exclusive().one(txn).await?;
    let attended = contact.is_some_and(|contact| {
        contact.attended && now.since(Timestamp(contact.last_contact_at)) < config.worker_ttl
    });
    let has_ended = registration.ended.is_some_and(|ended| ended.uuid() == known.gateway_instance);
    if attended && !has_ended { Err(SessionError::AlreadyAttended) } else { Ok(mint(known.session, now)) }
}

/// Returns the row of the worker of `session`. Fails if a newer session or incarnation exists, or
/// if the worker was removed.
pub(crate) async fn require_session(
    db: &impl ConnectionTrait,
    session: &SessionClaims,
) -> Result<Model, SessionError> {
    let row = worker::Entity::find_by_id(session.worker.uuid()).one(db).await?;
    check_session(db, row.as_ref(), session).await?;
    row.ok_or(SessionError::Forgotten)
}

/// Checks that `session` is the current session of the worker of `row`.
async fn check_session(
    db: &impl ConnectionTrait,
    row: Option<&Model>,
    session: &SessionClaims,
) -> Result<(), SessionError> {
    match row {
        Some(row) if DesiredState::of(row).is_spoken_for_by(session) => Ok(()),
        Some(row) if row.leaving.is_none() => Err(SessionError::Stale),
        Some(_) => Err(SessionError::Forgotten),
        None if removed::end_of(db, session.worker).await? == Some(WorkerEnd::Retired) => {
            Err(SessionError::Retired)
        }
        None => Err(SessionError::Forgotten),
    }
}

/// Returns the existing rows of these workers.
pub(crate) async fn find_all(
    db: &impl ConnectionTrait,
    ids: impl IntoIterator<Item = WorkerId>,
) -> Result<Vec<Model>, DbErr> {
    let ids: Vec<_> = ids.into_iter().map(|id| id.uuid()).collect();
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let backend = db.get_database_backend();
    let query = format!("SELECT * FROM workers WHERE id {}", rows::among(backend, 1));
    let statement = Statement::from_sql_and_values(backend, query, [rows::ids(ids)?]);
    worker::Entity::find().from_raw_sql(statement).all(db).await
}

/// Ends the contact of a disconnected gateway, so that another may take over immediately. Does
/// nothing if another gateway has taken over, or if this one was in contact after `contact` on
/// another stream.
pub(crate) async fn sign_off(
    txn: &DatabaseTransaction,
    session: &SessionClaims,
    contact: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    // Locked before the heartbeat, in the order of a registration.
    load_counters::lock_workers(txn, [session.worker.uuid()].into_iter()).await?;
    let left = heartbeat::Entity::update_many()
        .col_expr(heartbeat::Column::Attended, Expr::value(false))
        .filter(heartbeat::Column::WorkerId.eq(session.worker.uuid()))
        .filter(heartbeat::Column::LastContactAt.eq(contact.0))
        .exec(txn)
        .await?;
    if left.rows_affected > 0 {
        set_state(txn, session, State::Stalled, effects).await?;
    }
    Ok(())
}

async fn set_state(
    txn: &DatabaseTransaction,
    session: &SessionClaims,
    state: State,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let set = worker::Entity::update_many()
        .col_expr(worker::Column::State, Expr::value(state))
        .filter(worker::Column::Id.eq(session.worker.uuid()))
        .filter(worker::Column::Session.eq(number(session.session.0)))
        .exec(txn)
        .await?;
    if set.rows_affected > 0 {
        revisions::changed(txn, &[session.worker.uuid()], effects).await?;
    }
    Ok(())
}

/// Gives every worker the TTL to return, from `now` on, because the scheduler itself may have been
/// away. `alone`: no other replica can have open streams, so no worker is attended.
pub(crate) async fn extend_terms(
    txn: &DatabaseTransaction,
    alone: bool,
    now: Timestamp,
) -> Result<(), DbErr> {
    let mut update =
        heartbeat::Entity::update_many().col_expr(heartbeat::Column::PatientSince, Expr::value(now.0));
    if alone {
        update = update.col_expr(heartbeat::Column::Attended, Expr::value(false));
    }
    update.exec(txn).await.map(|_| ())
}

/// Selects the workers that were silent for `term` and have had the TTL to return.
///
/// A start of the scheduler does not reset the time of silence. A gateway counts `stop_after` from
/// the last heartbeat that the scheduler acknowledged, and only recorded heartbeats are
/// acknowledged.
fn silent_for(term: Duration, config: &Config, now: Timestamp) -> sea_orm::sea_query::SelectStatement {
    Query::select()
        .column(heartbeat::Column::WorkerId)
        .from(heartbeat::Entity)
        .and_where(Expr::col(heartbeat::Column::LastContactAt).lt((now - term).0))
        .and_where(Expr::col(heartbeat::Column::PatientSince).lt((now - config.worker_ttl).0))
        .to_owned()
}

/// Returns the transitions of silent workers, with the required time of silence.
fn silences(config: &Config) -> [(State, State, Duration); 2] {
    [(State::Running, State::Stalled, config.worker_ttl), (State::Stalled, State::Lost, config.lost_after)]
}

/// Returns the workers in `state` that were silent for `term`. The query reads heartbeats first,
/// because few are old. Otherwise PostgreSQL would scan all workers in that state.
async fn silent(
    db: &impl ConnectionTrait,
    (state, term): (State, Duration),
    limit: &str,
    config: &Config,
    now: Timestamp,
) -> Result<Vec<Uuid>, DbErr> {
    let query = format!(
        "WITH silent AS MATERIALIZED
           (SELECT worker_id FROM heartbeats WHERE last_contact_at < $1 AND patient_since < $2)
         SELECT workers.id FROM silent JOIN workers ON workers.id = silent.worker_id WHERE workers.state = $3 {limit}"
    );
    let values = [(now - term).0.into(), (now - config.worker_ttl).0.into(), state.into()];
    let rows =
        db.query_all_raw(Statement::from_sql_and_values(db.get_database_backend(), query, values)).await?;
    rows.iter().map(|row| row.try_get("", "id")).collect()
}

/// Returns whether a worker is silent for too long for its state.
pub(crate) async fn any_silent(
    db: &impl ConnectionTrait,
    config: &Config,
    now: Timestamp,
) -> Result<bool, DbErr> {
    for (from, _, term) in silences(config) {
        if !silent(db, (from, term), "LIMIT 1", config, now).await?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the time at which the next worker is silent for too long, or a past time if a worker is
/// stalled. A start of the scheduler may give the worker more time.
pub(crate) async fn next_silence(
    db: &impl ConnectionTrait,
    config: &Config,
) -> Result<Option<Timestamp>, DbErr> {
    let query =
        "SELECT MIN(CASE WHEN workers.state = $1 THEN heartbeats.last_contact_at ELSE 0 END) AS contact
         FROM heartbeats JOIN workers ON workers.id = heartbeats.worker_id WHERE workers.state IN ($1, $2)";
    let values = [State::Running.into(), State::Stalled.into()];
    let row =
        db.query_one_raw(Statement::from_sql_and_values(db.get_database_backend(), query, values)).await?;
    let contact: Option<i64> = row.map(|row| row.try_get("", "contact")).transpose()?.flatten();
    Ok(contact.map(|contact| Timestamp(contact) + config.worker_ttl))
}

/// Changes the state of workers that are silent for too long.
pub(crate) async fn mark_silent(
    txn: &DatabaseTransaction,
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let mut silent = Vec::new();
    for (from, to, term) in silences(config) {
        let changed = worker::Entity::update_many()
            .col_expr(worker::Column::State, Expr::value(to))
            .filter(worker::Column::State.eq(from))
            .filter(worker::Column::Id.in_subquery(silent_for(term, config, now)))
            .exec_with_returning(txn)
            .await?;
        for worker in changed {
            tracing::warn!(worker.name = worker.name, worker.state = ?to, "no heartbeat from the gateway of a worker: check the gateway and its network");
            silent.push(worker.id);
        }
    }
    revisions::changed(txn, &silent, effects).await
}

/// Returns live leases of lost or pruned workers and of past incarnations, at most
/// [`STRANDED_BATCH`]. Leases that were given up ([`lease::StopReason::WorkerLost`]) are included
/// only if their worker was pruned or has a new incarnation. Only workers that changed after
/// revision `after` are considered, because each such event raises the revision.
pub(crate) async fn stranded_leases(
    db: &impl ConnectionTrait,
    after: i64,
) -> Result<Vec<lease::Model>, DbErr> {
    let changed = worker::Entity::find().select_only().column(worker::Column::Id);
    let changed: Vec<Uuid> = changed.filter(worker::Column::Revision.gt(after)).into_tuple().all(db).await?;
    if changed.is_empty() {
        return Ok(Vec::new());
    }
    let backend = db.get_database_backend();
    let query = format!(
        "SELECT leases.* FROM workers JOIN leases ON leases.worker_id = workers.id AND leases.state <> 'ended'
         AND (leases.incarnation < workers.incarnation OR workers.leaving = 'pruned'
              OR (workers.state = 'lost' AND (leases.stop_reason IS NULL OR leases.stop_reason <> 'WORKER_LOST')))
         WHERE workers.id {} LIMIT {STRANDED_BATCH}",
        rows::among(backend, 1)
    );
    let query = Statement::from_sql_and_values(backend, query, [rows::ids(changed)?]);
    lease::Entity::find().from_raw_sql(query).all(db).await
}

/// Returns leases of stalled workers without a started process. Nothing runs under them, and
/// nothing may start after they are ended.
pub(crate) async fn leases_of_stalled(
    db: &impl ConnectionTrait,
    config: &Config,
    now: Timestamp,
) -> Result<Vec<lease::Model>, DbErr> {
    let stalled = silent(db, (State::Stalled, config.worker_ttl), "", config, now).await?;
    if stalled.is_empty() {
        return Ok(Vec::new());
    }
    let backend = db.get_database_backend();
    let query = format!(
        "SELECT leases.* FROM leases JOIN workloads ON workloads.id = leases.workload_id AND workloads.lease_id = leases.id
         AND workloads.state || '' = 'assigned'
         WHERE leases.state <> 'ended' AND leases.worker_id {} LIMIT {STRANDED_BATCH}",
        rows::among(backend, 1)
    );
    let query = Statement::from_sql_and_values(backend, query, [rows::ids(stalled)?]);
    lease::Entity::find().from_raw_sql(query).all(db).await
}

/// Returns whether the worker of `lease` is lost, removed or has a new incarnation.
pub(crate) async fn is_stranded(db: &impl ConnectionTrait, lease: &lease::Model) -> Result<bool, DbErr> {
    let worker = worker::Entity::find_by_id(lease.worker_id).one(db).await?;
    Ok(worker.is_none_or(|worker| worker.state == State::Lost || lease.incarnation < worker.incarnation))
}

/// Returns whether nothing runs any more under an ended lease. The worker has a new incarnation, or
/// has stopped its processes after `stop_after`. A pruned worker may have been silent for less.
pub(crate) async fn is_surely_stopped(
    db: &impl ConnectionTrait,
    lease: &lease::Model,
) -> Result<bool, DbErr> {
    let Some(worker) = worker::Entity::find_by_id(lease.worker_id).one(db).await? else { return Ok(false) };
    let was_pruned = worker.leaving == Some(WorkerEnd::Pruned);
    Ok(lease.incarnation < worker.incarnation || (enforces_stop_after(&worker)? && !was_pruned))
}

/// Returns whether an attempt under `lease` may still run although its worker is lost. The worker
/// does not enforce `stop_after`, has no new incarnation and was not pruned.
pub(crate) async fn may_still_run(db: &impl ConnectionTrait, lease: &lease::Model) -> Result<bool, DbErr> {
    let Some(worker) = worker::Entity::find_by_id(lease.worker_id).one(db).await? else { return Ok(false) };
    let is_over = lease.incarnation < worker.incarnation || worker.leaving == Some(WorkerEnd::Pruned);
    Ok(!is_over && !enforces_stop_after(&worker)?)
}

/// Returns whether the worker stops its processes after `stop_after`.
fn enforces_stop_after(worker: &Model) -> Result<bool, DbErr> {
    let labels: Labels = from_json(&worker.labels)?;
    Ok(labels.capabilities.iter().any(|name| name == "stop-after"))
}

/// Returns since when a worker has the TTL to return, if it was not in contact since.
fn awaited_since(contact: &heartbeat::Model) -> Option<Timestamp> {
    (contact.last_contact_at < contact.patient_since).then_some(Timestamp(contact.patient_since))
}

/// Returns workers with their load and reservations.
pub(crate) async fn view_all(
    db: &impl ConnectionTrait,
    config: &Config,
    rows: Vec<(Model, Option<heartbeat::Model>)>,
) -> Result<Vec<Worker>, DbErr> {
    let loads = lease_counts::loads(db, &rows.iter().map(|(row, _)| row.id).collect::<Vec<_>>()).await?;
    let reserved = reservation::all(db, Timestamp::now()).await?;
    let view = |row: (Model, Option<heartbeat::Model>)| {
        let mut worker = view(row, config, &loads)?;
        worker.placed.reserved_for = reserved.get(&worker.placed.id).copied();
        Ok(worker)
    };
    rows.into_iter().map(view).collect()
}

fn view(
    (row, contact): (Model, Option<heartbeat::Model>),
    config: &Config,
    loads: &HashMap<Uuid, Load>,
) -> Result<Worker, DbErr> {
    let kept = contact.as_ref().map(|contact| Usage {
        containers: unsigned(contact.containers),
        volumes: unsigned(contact.volumes),
        disk_free_bytes: unsigned(contact.disk_free_bytes),
        kept_containers: unsigned(contact.kept_containers),
    });
    Ok(Worker {
        placed: Facts::of(config, contact.clone()).as_placed(&row)?,
        session: Session(unsigned(row.session)),
        kept: kept.unwrap_or_default(),
        awaited_since: contact.as_ref().and_then(awaited_since),
        last_contact_at: Timestamp(contact.map_or(row.registered_at, |contact| contact.last_contact_at)),
        load: loads.get(&row.id).copied().unwrap_or_default(),
        ephemeral: row.ephemeral,
        landed_at: row.landed_at.map(Timestamp),
        interrupt_at: row.interrupt_at.map(Timestamp),
        unsupported_versions: from_json(&row.unsupported_versions)?,
        failures: u32::try_from(row.failures).unwrap_or(u32::MAX),
        quarantined_until: row.quarantined_until.map(Timestamp),
        revision: row.revision,
        blocked_by: row.blocked_by,
        last_failure: row.last_failure,
        failed_team: row.failed_team,
    })
}

/// Returns up to `limit` workers, in the order of their names, after the worker `after`.
pub(crate) async fn list(
    db: &impl ConnectionTrait,
    config: &Config,
    after: Option<WorkerId>,
    limit: u64,
) -> Result<Vec<Worker>, DbErr> {
    let mut query = worker::Entity::find().find_also_related(heartbeat::Entity);
    if let Some(after) = after {
        let name = Query::select()
            .column(worker::Column::Name)
            .from(worker::Entity)
            .and_where(Expr::col(worker::Column::Id).eq(after.uuid()))
            .to_owned();
        query = query.filter(
            Expr::col((worker::Entity, worker::Column::Name)).gt(Expr::SubQuery(None, Box::new(name.into()))),
        );
    }
    let rows = query.order_by_asc(worker::Column::Name).limit(limit).all(db).await?;
    view_all(db, config, rows).await
}

/// Returns the workers with a revision in `after..=last`, in the order of revisions.
pub(crate) async fn changed_since(
    db: &impl ConnectionTrait,
    config: &Config,
    after: i64,
    last: i64,
) -> Result<Vec<Worker>, DbErr> {
    let rows = worker::Entity::find()
        .find_also_related(heartbeat::Entity)
        .filter(worker::Column::Revision.gt(after))
        .filter(worker::Column::Revision.lte(last))
        .order_by_asc(worker::Column::Revision)
        .all(db)
        .await?;
    let mut workers = Vec::with_capacity(rows.len());
    let mut rows = rows.into_iter().peekable();
    while rows.peek().is_some() {
        workers
            .extend(view_all(db, config, rows.by_ref().take(lease_counts::COUNTED_AT_ONCE).collect()).await?);
    }
    Ok(workers)
}

/// Returns a worker by its name or id.
pub(crate) async fn get(
    db: &impl ConnectionTrait,
    config: &Config,
    worker: &str,
) -> Result<Option<Worker>, DbErr> {
    let row =
        worker::Entity::find().find_also_related(heartbeat::Entity).filter(is_named(worker)).one(db).await?;
    Ok(view_all(db, config, row.into_iter().collect()).await?.pop())
}

/// Returns the id of the worker with this name or id.
pub(crate) async fn id_of(db: &impl ConnectionTrait, worker: &str) -> Result<Option<WorkerId>, DbErr> {
    let row = worker::Entity::find().filter(is_named(worker)).one(db).await?;
    Ok(row.map(|row| WorkerId::from_uuid(row.id)))
}

/// Returns the condition that a worker has this name or id.
fn is_named(worker: &str) -> Condition {
    let named = Condition::any().add(worker::Column::Name.eq(worker));
    match worker.parse::<WorkerId>() {
        Ok(id) => named.add(worker::Column::Id.eq(id.uuid())),
        Err(_) => named,
    }
}

/// What a caller needs in order to reach a worker.
pub(crate) struct Reach {
    pub(crate) state: State,
    /// Address of the gateway.
    pub(crate) endpoint: String,
    pub(crate) zone: String,
}

/// Returns the state, the address and the zone of a worker. `None`: the worker is unknown.
pub(crate) async fn reach(db: &impl ConnectionTrait, worker: WorkerId) -> Result<Option<Reach>, DbErr> {
    let Some(row) = worker::Entity::find_by_id(worker.uuid()).one(db).await? else { return Ok(None) };
    let labels: Labels = from_json(&row.labels)?;
    Ok(Some(Reach { state: row.state, endpoint: row.endpoint, zone: labels.zone }))
}
