//! Marking volumes and containers, and handing the marks out to gateways.
//!
//! A mark makes a row `destroying`, or is all that says so ([`marks`]); handing it out makes the row `sweeping`, which is final. A gateway's
//! stream sends everything of its worker that is sweeping and that it has not sent yet: first what earlier streams handed out and nobody
//! destroyed, then each mark as it comes.
//! So a mark that went into a stream whose reader was gone already comes again, from the stream that followed. What a report still names
//! ([`crate::inventory::report`]) is sent again by the same stream.
//!
//! What is news has a number in `judged_after` that was minted for it ([`sessions::advance`]), so numbers come in order, whoever hands out:
//! a stream remembers the last that it has read, and reads on behind it.
//!
//! Invariant: children come before their parents. A parent is handed out only when every child is, and what is sent together is in order.

pub(crate) mod deletion_log;
pub(crate) mod references;
pub(crate) mod schedule;
pub(crate) mod sweep_queue;
pub(crate) mod tombstones;

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use domain::worker::SessionClaims;
use domain::{ContainerHandle, Timestamp, VolumeHandle, WorkerId};
use rand::RngExt;
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QuerySelect, QueryTrait, Statement, Value,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::app::Store;
use crate::db::entity::{GraveKind, State, container, volume, worker};
use crate::db::ids;
use crate::marks::sweep_queue::Marked;
use crate::policy::garbage;
use crate::policy::garbage::Why;
use crate::sessions;
use crate::sessions::SessionError;

/// How many rows are handed out in one transaction, and sent in one message.
const BATCH: u64 = 1000;

/// The sequence of the worker that a volume belongs to, read behind a lock on the worker's row.
const SEQUENCE: &str = "(SELECT workers.sequence FROM workers WHERE workers.worker_id = volumes.worker_id)";

/// Marks volumes that are not marked yet, and answers their workers. Others may be made in their places.
pub(crate) async fn mark_volumes(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    Ok(workers_of(&mark_those_volumes(txn, handles, why, now).await?))
}

/// The same, and answers which it marked.
pub(crate) async fn mark_those_volumes(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<Marked>, DbErr> {
    lock_workers_of::<volume::Entity>(txn, handles).await?;
    let besides = ", marked_from = volumes.state, given_up = TRUE";
    mark_rows::<volume::Entity>(txn, handles, why, now, besides).await
}

fn workers_of(marked: &[Marked]) -> Vec<WorkerId> {
    let workers: HashSet<_> = marked.iter().map(|row| row.worker_id).collect();
    workers.into_iter().map(WorkerId::from_uuid).collect()
}

/// The same of volumes of attempts that have ended, whose workers are held already: nobody makes another in the place of one.
pub(crate) async fn mark_volumes_of_ended(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    let besides = ", marked_from = volumes.state";
    Ok(workers_of(&mark_rows::<volume::Entity>(txn, handles, why, now, besides).await?))
}

/// Marks containers that are not marked yet, and answers their workers.
pub(crate) async fn mark_containers(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    lock_workers_of::<container::Entity>(txn, handles).await?;
    mark_containers_of_held(txn, handles, why, now).await
}

/// The same, where their workers are held already.
pub(crate) async fn mark_containers_of_held(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    Ok(workers_of(&mark_rows::<container::Entity>(txn, handles, why, now, "").await?))
}

/// Holds the sequences of the workers of some rows still.
async fn lock_workers_of<E: Sweepable>(txn: &DatabaseTransaction, handles: &[Uuid]) -> Result<(), DbErr> {
    if handles.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let of_rows = format!("SELECT worker_id FROM {} WHERE handle IN ({})", E::TABLE, ids::query(backend, 1));
    lock_workers(txn, &of_rows, [ids::value(backend, handles.iter().copied())], Wait::Long).await.map(drop)
}

/// Marks rows of one of the two tables whose workers are held, and sets `besides`.
async fn mark_rows<E: Sweepable>(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
    besides: &str,
) -> Result<Vec<Marked>, DbErr> {
    if handles.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let table = E::TABLE;
    let of_handles = format!("{table}.handle IN ({})", ids::query(backend, 1));
    let handles = ids::value(backend, handles.iter().copied());
    // Joined, and not looked up for each of them.
    let update = format!(
        "UPDATE {table} SET state = 'destroying', judged_after = workers.sequence,
                            marked_why = $2, marked_at = $3{besides}
         FROM workers
         WHERE workers.worker_id = {table}.worker_id AND {of_handles}
           AND {table}.state NOT IN ('destroying', 'sweeping')"
    );
    let values = [handles, why.to_string().into(), now.0.into()];
    if E::HAS_QUEUE {
        sweep_queue::mark(txn, &update, values).await
    } else {
        let update = format!("{update} RETURNING {table}.worker_id, {table}.handle");
        Marked::find_by_statement(Statement::from_sql_and_values(backend, update, values)).all(txn).await
    }
}

/// Takes back marks of volumes that no gateway was told of. No report that began before now judges them. The transfer that made one is
/// over. What is lost is noticed from now on, as if it had not been before.
pub(crate) async fn unmark_volumes(txn: &DatabaseTransaction, handles: &[Uuid]) -> Result<(), DbErr> {
    if handles.is_empty() {
        return Ok(());
    }
    sweep_queue::take_back(txn, handles.iter().copied()).await?;
    // What went with its artifact has its state still.
    let before = "CASE WHEN state = 'destroying' THEN marked_from ELSE state END";
    volume::Entity::update_many()
        .col_expr(volume::Column::State, Expr::cust(before))
        .col_expr(volume::Column::GivenUp, Expr::value(false))
        .col_expr(volume::Column::JudgedAfter, Expr::cust(SEQUENCE))
        .col_expr(volume::Column::MarkedWhy, Expr::value(None::<String>))
        .col_expr(volume::Column::MarkedAt, Expr::value(None::<i64>))
        .col_expr(volume::Column::MarkedFrom, Expr::value(None::<String>))
        .col_expr(volume::Column::TransferId, Expr::value(None::<Uuid>))
        .col_expr(volume::Column::ClaimedUntil, Expr::value(None::<i64>))
        .col_expr(volume::Column::LossNoticed, Expr::value(false))
        .filter(ids::among(txn.get_database_backend(), "handle", handles.iter().copied()))
        .filter(volume::Column::State.ne(State::Sweeping))
        .exec(txn)
        .await
        .map(|_| ())
}

/// A table of things that workers hold, and gateways destroy.
pub(crate) trait Sweepable: EntityTrait {
    const HANDLE: Self::Column;
    const WORKER_ID: Self::Column;
    const STATE: Self::Column;
    const JUDGED_AFTER: Self::Column;
    /// Whether what is marked is in a queue, too: [`marks`].
    const HAS_QUEUE: bool;
    const LOST_AT: Self::Column;
    const LOSS_NOTICED: Self::Column;

    const TABLE: &str;
    const KIND: GraveKind;

    fn handle(row: &Self::Model) -> Uuid;
}

macro_rules! sweepable {
    ($($table:ident: $name:literal, $kind:ident, $has_queue:literal;)+) => {$(
        impl Sweepable for $table::Entity {
            const HANDLE: Self::Column = $table::Column::Handle;
            const WORKER_ID: Self::Column = $table::Column::WorkerId;
            const STATE: Self::Column = $table::Column::State;
            const JUDGED_AFTER: Self::Column = $table::Column::JudgedAfter;
            const HAS_QUEUE: bool = $has_queue;
            const LOST_AT: Self::Column = $table::Column::LostAt;
            const LOSS_NOTICED: Self::Column = $table::Column::LossNoticed;

            const TABLE: &str = $name;
            const KIND: GraveKind = GraveKind::$kind;

            fn handle(row: &Self::Model) -> Uuid {
                row.handle
            }
        }
    )+};
}

sweepable! {
    volume: "volumes", Volume, true;
    container: "containers", Container, false;
}

/// Whether rows that somebody has locked are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Long,
    Not,
}

/// Holds the sequences of workers still, so that no report begins between a mark and its commit. `workers` is a query of their ids. Answers which
/// it holds.
pub(crate) async fn lock_workers(
    txn: &DatabaseTransaction,
    workers: &str,
    values: impl IntoIterator<Item = Value>,
    wait: Wait,
) -> Result<HashSet<Uuid>, DbErr> {
    let backend = txn.get_database_backend();
    let lock = match wait {
        Wait::Long => " FOR SHARE",
        Wait::Not => " FOR SHARE SKIP LOCKED",
    };
    let lock = ids::lock(backend, lock);
    let sql = format!("SELECT worker_id FROM workers WHERE worker_id IN ({workers}){lock}");
    let locked = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    locked.iter().map(|row| row.try_get("", "worker_id")).collect()
}

/// What a gateway shall destroy: first the containers, then the volumes in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) containers: Vec<ContainerHandle>,
    pub(crate) volumes: Vec<VolumeHandle>,
}

/// Sends what the gateway of `claims` shall destroy until it leaves, its session is over, or the store stops.
pub(crate) async fn watch(
    store: &Store,
    claims: &SessionClaims,
    sweeps: &mpsc::Sender<Result<Sweep, SessionError>>,
    stopping: &CancellationToken,
) -> Result<(), SessionError> {
    let mut marks = store.marks.subscribe(claims.worker);
    let mut sent = Sent::default();
    loop {
        marks.mark_unchanged();
        let sweeps_now = if is_marked(store.db.read(), claims).await? {
            while is_waiting(store.db.read(), claims.worker.uuid()).await? {
                store.db.write(|txn| async move { hand_out(&txn, claims).await }).await?;
            }
            unsent(store.db.read(), claims.worker, &mut sent).await?
        } else {
            Vec::new()
        };
        for sweep in sweeps_now {
            tokio::select! {
                () = stopping.cancelled() => return Ok(()),
                taken = sweeps.send(Ok(sweep)) => if taken.is_err() { return Ok(()) },
            }
        }
        tokio::select! {
            () = stopping.cancelled() => return Ok(()),
            () = sweeps.closed() => return Ok(()),
            // The sender lives as long as the store.
            _ = marks.changed() => {}
            () = tokio::time::sleep(jittered(store.config.sweep_interval)) => {}
        }
    }
}

/// `interval`, give or take a fifth.
pub(crate) fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::rng().random_range(0.8..1.2))
}

/// Whether something of the worker is marked, handed out or not. Refuses a session that is over.
///
/// One statement over empty indexes where nothing is: every stream asks again and again.
async fn is_marked(conn: &impl ConnectionTrait, claims: &SessionClaims) -> Result<bool, SessionError> {
    #[derive(FromQueryResult)]
    struct Row {
        #[sea_orm(nested)]
        worker: worker::Model,
        marked: bool,
    }
    let statement = Statement::from_sql_and_values(
        conn.get_database_backend(),
        "SELECT w.worker_id, w.incarnation, w.session, w.sequence, w.reported,
                EXISTS (SELECT 1 FROM containers c
                        WHERE c.worker_id = w.worker_id AND c.state IN ('destroying', 'sweeping'))
                OR EXISTS (SELECT 1 FROM sweep_queue m WHERE m.worker_id = w.worker_id) AS marked
         FROM workers w WHERE w.worker_id = $1",
        [claims.worker.uuid().into()],
    );
    let row = Row::find_by_statement(statement).one(conn).await?;
    let marked = row.as_ref().is_some_and(|row| row.marked);
    sessions::judge(claims, row.map(|row| row.worker))?;
    Ok(marked)
}

/// Whether something of the worker waits to be handed out.
async fn is_waiting(conn: &impl ConnectionTrait, worker: Uuid) -> Result<bool, DbErr> {
    let container = container::Entity::find()
        .filter(container::Column::WorkerId.eq(worker))
        .filter(container::Column::State.eq(State::Destroying));
    Ok(container.one(conn).await?.is_some() || !ready_volumes(conn, worker, 1).await?.is_empty())
}

/// Hands some marks out.
pub(crate) async fn hand_out(txn: &DatabaseTransaction, claims: &SessionClaims) -> Result<(), SessionError> {
    let sequence = sessions::advance(txn, claims).await?.sequence;
    let worker = claims.worker.uuid();
    let containers = container::Entity::find()
        .select_only()
        .column(container::Column::Handle)
        .filter(container::Column::WorkerId.eq(worker))
        .filter(container::Column::State.eq(State::Destroying))
        .limit(BATCH);
    container::Entity::update_many()
        .col_expr(container::Column::State, Expr::value(State::Sweeping))
        .col_expr(container::Column::JudgedAfter, Expr::value(sequence))
        .filter(container::Column::Handle.in_subquery(containers.into_query()))
        .filter(container::Column::State.eq(State::Destroying))
        .exec(txn)
        .await?;
    let volumes = ready_volumes(txn, worker, BATCH).await?;
    if !volumes.is_empty() {
        tell_volumes(txn, claims.worker, &volumes, sequence).await?;
    }
    Ok(())
}

/// Notes that the gateway of a worker is told of marked volumes. From now on the row of each says that it is garbage, and why.
async fn tell_volumes(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    volumes: &[Uuid],
    sequence: i64,
) -> Result<(), DbErr> {
    sweep_queue::tell(txn, worker, volumes.iter().copied(), sequence).await?;
    let backend = txn.get_database_backend();
    let sql = format!(
        "UPDATE volumes SET state = 'sweeping', given_up = TRUE, judged_after = $2,
                            marked_why = CASE WHEN sweep_queue.marked_at IS NULL THEN volumes.marked_why ELSE $3 END,
                            marked_at = COALESCE(sweep_queue.marked_at, volumes.marked_at)
         FROM sweep_queue
         WHERE sweep_queue.worker_id = volumes.worker_id AND sweep_queue.handle = volumes.handle
           AND volumes.handle IN ({}) AND volumes.state <> 'sweeping'",
        ids::query(backend, 1)
    );
    let volumes = ids::value(backend, volumes.iter().copied());
    let values = [volumes, sequence.into(), Why::ArtifactDeleted.to_string().into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Marked volumes of a worker whose children have all been handed out. What is set aside was not.
async fn ready_volumes(conn: &impl ConnectionTrait, worker: Uuid, limit: u64) -> Result<Vec<Uuid>, DbErr> {
    #[derive(FromQueryResult)]
    struct Ready {
        handle: Uuid,
    }
    let statement = Statement::from_sql_and_values(
        conn.get_database_backend(),
        "SELECT m.handle AS handle FROM sweep_queue m
         WHERE m.worker_id = $1 AND m.number IS NULL
           AND NOT EXISTS (SELECT 1 FROM volumes c WHERE c.parent = m.handle AND c.state <> 'sweeping')
           AND NOT EXISTS (SELECT 1 FROM orphans s WHERE s.parent = m.handle)
         LIMIT $2",
        [worker.into(), i64::try_from(limit).unwrap_or(i64::MAX).into()],
    );
    let ready = Ready::find_by_statement(statement).all(conn).await?;
    Ok(ready.into_iter().map(|ready| ready.handle).collect())
}

/// How far a stream has sent what is sweeping: the last of each kind, by number and handle.
#[derive(Debug, Clone, Copy, Default)]
struct Sent {
    containers: (i64, Uuid),
    volumes: (i64, Uuid),
}

/// What is sweeping on a worker and was not sent yet. `sent` is behind it then.
async fn unsent(conn: &impl ConnectionTrait, worker: WorkerId, sent: &mut Sent) -> Result<Vec<Sweep>, DbErr> {
    // Volumes first: of what is handed out meanwhile, only containers come early.
    let volumes = behind(conn, worker, TOLD_VOLUMES, &mut sent.volumes).await?;
    let containers = behind(conn, worker, TOLD_CONTAINERS, &mut sent.containers).await?;
    let containers: Vec<_> = containers.into_iter().map(|(handle, _)| handle).collect();

    let batch = usize::try_from(BATCH).unwrap_or(usize::MAX);
    let containers = containers.chunks(batch).map(|chunk| Sweep {
        containers: chunk.iter().copied().map(ContainerHandle::from_uuid).collect(),
        volumes: Vec::new(),
    });
    let mut sweeps: Vec<_> = containers.collect();
    for chunk in garbage::children_first(&volumes).chunks(batch) {
        let volumes = chunk.iter().copied().map(VolumeHandle::from_uuid).collect();
        match sweeps.last_mut() {
            // What is little goes in one message.
            Some(last) if last.volumes.is_empty() => last.volumes = volumes,
            _ => sweeps.push(Sweep { containers: Vec::new(), volumes }),
        }
    }
    Ok(sweeps)
}

/// Volumes of worker `$1` of which its gateway was told, behind the number `$2` and the handle `$3`.
const TOLD_VOLUMES: &str = "SELECT m.number AS number, m.handle AS handle, v.parent AS parent
    FROM sweep_queue m JOIN volumes v ON v.handle = m.handle
    WHERE m.worker_id = $1 AND m.number IS NOT NULL AND (m.number, m.handle) > ($2, $3)
    ORDER BY m.number, m.handle";

/// The same of containers.
const TOLD_CONTAINERS: &str = "SELECT judged_after AS number, handle, NULL AS parent FROM containers
    WHERE worker_id = $1 AND state = 'sweeping' AND (judged_after, handle) > ($2, $3)
    ORDER BY judged_after, handle";

/// What of `told` is behind `last`, which is the last of it then: handles, and their parents.
async fn behind(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    told: &str,
    last: &mut (i64, Uuid),
) -> Result<Vec<(Uuid, Option<Uuid>)>, DbErr> {
    #[derive(FromQueryResult)]
    struct Row {
        number: i64,
        handle: Uuid,
        parent: Option<Uuid>,
    }
    let sql = format!("{told} LIMIT {BATCH}");
    let mut found = Vec::new();
    loop {
        let values = [worker.uuid().into(), last.0.into(), last.1.into()];
        let statement = Statement::from_sql_and_values(conn.get_database_backend(), &sql, values);
        let page = Row::find_by_statement(statement).all(conn).await?;
        let is_last = u64::try_from(page.len()).unwrap_or(u64::MAX) < BATCH;
        if let Some(row) = page.last() {
            *last = (row.number, row.handle);
        }
        found.extend(page.into_iter().map(|row| (row.handle, row.parent)));
        if is_last {
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_spread_by_a_fifth_and_no_more() {
        let interval = Duration::from_secs(10);
        let drawn: Vec<_> = (0..10_000).map(|_| jittered(interval)).collect();
        assert!(drawn.iter().all(|drawn| (Duration::from_secs(8)..Duration::from_secs(12)).contains(drawn)));
        // Over the whole of it: that none of 10,000 falls into a twentieth happens to nobody.
        assert!(drawn.iter().any(|drawn| *drawn < Duration::from_millis(8_200)));
        assert!(drawn.iter().any(|drawn| *drawn > Duration::from_millis(11_800)));
    }
}
