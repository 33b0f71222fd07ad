//! Heartbeats of gateways, written to their table.

use std::collections::HashMap;

use db::rows::{self, Column};
use domain::worker::SessionClaims;
use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, Statement,
};
use serde::Serialize;
use uuid::Uuid;

use super::{SessionError, Usage, check_session, find_all, number};
use crate::db::entity::worker::{self, Model, State};
use crate::notify::changes::Effects;
use crate::notify::desired_state::DesiredState;
use crate::workers::load_counters::lock_workers;
use crate::workers::revisions;

/// One heartbeat of a gateway.
#[derive(Debug, Clone)]
pub(crate) struct Heartbeat {
    pub(crate) session: SessionClaims,
    pub(crate) kept: Usage,
    pub(crate) at: Timestamp,
}

#[derive(Serialize)]
struct HeartbeatRow {
    worker_id: Uuid,
    session: i64,
    incarnation: i64,
    last_contact_at: i64,
    containers: i64,
    volumes: i64,
    disk_free_bytes: i64,
    kept_containers: i64,
}

const HEARTBEAT_COLUMNS: [(&str, Column); 8] = [
    ("worker_id", Column::Uuid),
    ("session", Column::Integer),
    ("incarnation", Column::Integer),
    ("last_contact_at", Column::Integer),
    ("containers", Column::Integer),
    ("volumes", Column::Integer),
    ("disk_free_bytes", Column::Integer),
    ("kept_containers", Column::Integer),
];

impl Heartbeat {
    fn row(&self) -> HeartbeatRow {
        HeartbeatRow {
            worker_id: self.session.worker.uuid(),
            session: number(self.session.session.0),
            incarnation: number(self.session.incarnation.0),
            last_contact_at: self.at.0,
            containers: number(self.kept.containers),
            volumes: number(self.kept.volumes),
            disk_free_bytes: number(self.kept.disk_free_bytes),
            kept_containers: number(self.kept.kept_containers),
        }
    }
}

/// Records heartbeats in order. Returns for each the state of its worker, or why its session no
/// longer is responsible for the worker. Rejected heartbeats change nothing.
///
/// Heartbeats write and lock no row of `workers`. A takeover is still excluded, because
/// [`super::register`] locks the heartbeat before it decides. One of the two waits for the other,
/// and the sessions are read after that wait.
pub(crate) async fn record_heartbeats(
    txn: &DatabaseTransaction,
    heartbeats: &[Heartbeat],
) -> Result<Vec<Result<State, SessionError>>, DbErr> {
    // If two streams of one session report, the last heartbeat counts. The statement must contain
    // no row twice.
    let last: HashMap<_, _> = heartbeats
        .iter()
        .map(|heartbeat| {
            (
                (heartbeat.session.worker, heartbeat.session.session, heartbeat.session.incarnation),
                heartbeat.row(),
            )
        })
        .collect();
    let backend = txn.get_database_backend();
    // Rows are locked in a fixed order. The lock is a separate statement, so that the next
    // statement sees the sessions after the wait.
    let workers = rows::ids(heartbeats.iter().map(|heartbeat| heartbeat.session.worker.uuid()))?;
    let locked = format!(
        "SELECT worker_id FROM heartbeats WHERE worker_id {} ORDER BY worker_id {}",
        rows::among(backend, 1),
        rows::lock(backend, "FOR UPDATE")
    );
    txn.query_all_raw(Statement::from_sql_and_values(backend, locked, [workers])).await?;
    let query = format!(
        "UPDATE heartbeats SET last_contact_at = given.last_contact_at, attended = TRUE, containers = given.containers,
             volumes = given.volumes, disk_free_bytes = given.disk_free_bytes, kept_containers = given.kept_containers
         FROM ({}) AS given JOIN workers ON workers.id = given.worker_id
         WHERE heartbeats.worker_id = given.worker_id AND workers.session = given.session
             AND workers.incarnation = given.incarnation AND workers.leaving IS NULL",
        rows::query(backend, 1, &HEARTBEAT_COLUMNS)
    );
    let given = rows::value(&last.into_values().collect::<Vec<_>>())?;
    txn.execute_raw(Statement::from_sql_and_values(backend, query, [given])).await?;

    let rows = find_all(txn, heartbeats.iter().map(|heartbeat| heartbeat.session.worker)).await?;
    let rows: HashMap<_, _> = rows.into_iter().map(|row| (WorkerId::from_uuid(row.id), row)).collect();
    let mut results = Vec::with_capacity(heartbeats.len());
    for Heartbeat { session, .. } in heartbeats {
        let row = rows.get(&session.worker);
        results.push(match check_session(txn, row, session).await {
            Ok(()) => Ok(row.map_or(State::Running, |row| row.state)),
            Err(SessionError::Database(error)) => return Err(error),
            Err(refused) => Err(refused),
        });
    }
    Ok(results)
}

/// Marks workers as running again after heartbeats of these sessions.
pub(crate) async fn mark_running(
    txn: &DatabaseTransaction,
    sessions: &[SessionClaims],
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let sessions: HashMap<_, _> = sessions.iter().map(|session| (session.worker.uuid(), session)).collect();
    let rows = lock_workers(txn, sessions.keys().copied()).await?;
    let is_spoken_for = |row: &Model| {
        sessions.get(&row.id).is_some_and(|session| DesiredState::of(row).is_spoken_for_by(session))
    };
    let back = rows.iter().filter(|row| row.state != State::Running && is_spoken_for(row));
    let back: Vec<_> = back.map(|row| row.id).collect();
    if back.is_empty() {
        return Ok(());
    }
    worker::Entity::update_many()
        .col_expr(worker::Column::State, Expr::value(State::Running))
        .filter(worker::Column::Id.is_in(back.iter().copied()))
        .exec(txn)
        .await?;
    revisions::changed(txn, &back, effects).await
}
