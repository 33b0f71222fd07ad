//! The sweep: streams of deletions for gateways.
//!
//! Each gateway's stream ([`watch`]) hands out marked items and sends them. Handing out makes a row
//! `sweeping`, which is final. A stream sends each sweeping item of its worker once: first the
//! items that earlier streams handed out, then new ones. If a stream broke before its message
//! arrived, the next stream sends it again. An item that a report still names
//! ([`crate::inventory::report`]) is sent again by the same stream.
//!
//! An item that is handed out gets a newly minted number in `judged_after` ([`sessions::advance`]),
//! so that numbers rise whichever stream hands out. A stream remembers the last number that it has
//! read, and continues after it.
//!
//! Invariant: children come before their parents. A parent is handed out only after all of its
//! children, and each message is ordered.

use domain::worker::SessionClaims;
use domain::{ContainerHandle, VolumeHandle, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QuerySelect, QueryTrait, Statement,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::app::Store;
use crate::clock::jittered;
use crate::db::entity::{State, container, worker};
use crate::db::ids;
use crate::marks::sweep_queue;
use crate::policy::garbage::{self, MarkReason};
use crate::sessions::{self, SessionError};

/// Maximum number of rows handed out in one transaction, and sent in one message.
const BATCH: u64 = 1000;

/// Items for a gateway to delete: first the containers, then the volumes in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) containers: Vec<ContainerHandle>,
    pub(crate) volumes: Vec<VolumeHandle>,
}

/// Factor of the poll interval if no other replica uses the database.
const ALONE_FACTOR: u32 = 10;

/// Sends deletions to the gateway of `claims` until it leaves, its session ends, or the store
/// stops.
pub(crate) async fn watch(
    store: &Store,
    claims: &SessionClaims,
    sweeps: &mpsc::Sender<Result<Sweep, SessionError>>,
    stopping: &CancellationToken,
) -> Result<(), SessionError> {
    let mut marks = store.sweep_wakers.subscribe(claims.worker);
    // SQLite allows one replica only, whose marks wake the stream.
    let poll = store.config.sweep_interval * if store.db.is_sqlite() { ALONE_FACTOR } else { 1 };
    let mut sent = StreamPosition::default();
    loop {
        marks.mark_unchanged();
        let sweeps_now = if is_marked(store.db.read(), claims).await? {
            while is_waiting(store.db.read(), claims.worker.uuid()).await? {
                store.db.write(|txn| async move { hand_out(&txn, claims).await }).await?;
            }
            read_unsent(store.db.read(), claims.worker, &mut sent).await?
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
            () = tokio::time::sleep(jittered(poll)) => {}
        }
    }
}

/// Returns whether an item of the worker is marked, handed out or not. Rejects a session that has
/// ended.
///
/// Every stream polls it. If nothing is marked, the one statement reads only empty indexes.
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

/// Returns whether an item of the worker waits to be handed out.
async fn is_waiting(conn: &impl ConnectionTrait, worker: Uuid) -> Result<bool, DbErr> {
    let container = container::Entity::find()
        .filter(container::Column::WorkerId.eq(worker))
        .filter(container::Column::State.eq(State::Destroying));
    Ok(container.one(conn).await?.is_some() || !ready_volumes(conn, worker, 1).await?.is_empty())
}

/// Hands out at most [`BATCH`] containers and [`BATCH`] volumes.
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
        record_handed_out_volumes(txn, claims.worker, &volumes, sequence).await?;
    }
    Ok(())
}

/// Records that marked volumes of a worker are handed out, and copies their marks into their rows.
async fn record_handed_out_volumes(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    volumes: &[Uuid],
    sequence: i64,
) -> Result<(), DbErr> {
    sweep_queue::record_handed_out(txn, worker, volumes.iter().copied(), sequence).await?;
    let backend = txn.get_database_backend();
    let sql = format!(
        "UPDATE volumes SET state = 'sweeping', given_up = TRUE, judged_after = $2,
                            mark_reason = CASE WHEN sweep_queue.marked_at IS NULL THEN volumes.mark_reason ELSE $3 END,
                            marked_at = COALESCE(sweep_queue.marked_at, volumes.marked_at)
         FROM sweep_queue
         WHERE sweep_queue.worker_id = volumes.worker_id AND sweep_queue.handle = volumes.handle
           AND volumes.handle IN ({}) AND volumes.state <> 'sweeping'",
        ids::query(backend, 1)
    );
    let volumes = ids::value(backend, volumes.iter().copied());
    let values = [volumes, sequence.into(), MarkReason::ArtifactDeleted.to_string().into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Returns marked volumes of a worker whose children are all handed out. An orphaned child is not.
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

/// Position of a stream: number and handle of the last sent item of each kind.
#[derive(Debug, Clone, Copy, Default)]
struct StreamPosition {
    containers: (i64, Uuid),
    volumes: (i64, Uuid),
}

/// Returns the sweeping items of a worker that were not sent yet, and advances `sent`.
async fn read_unsent(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    sent: &mut StreamPosition,
) -> Result<Vec<Sweep>, DbErr> {
    // Volumes first: if items are handed out between the queries, only containers may come early.
    let volumes = read_after(conn, worker, HANDED_OUT_VOLUMES, &mut sent.volumes).await?;
    let containers = read_after(conn, worker, HANDED_OUT_CONTAINERS, &mut sent.containers).await?;
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
            // A small batch fits into one message.
            Some(last) if last.volumes.is_empty() => last.volumes = volumes,
            _ => sweeps.push(Sweep { containers: Vec::new(), volumes }),
        }
    }
    Ok(sweeps)
}

/// Query of volumes of worker `$1` that were handed out after the number `$2` and handle `$3`.
const HANDED_OUT_VOLUMES: &str = "SELECT m.number AS number, m.handle AS handle, v.parent AS parent
    FROM sweep_queue m JOIN volumes v ON v.handle = m.handle
    WHERE m.worker_id = $1 AND m.number IS NOT NULL AND (m.number, m.handle) > ($2, $3)
    ORDER BY m.number, m.handle";

/// Query of containers of worker `$1` that were handed out after the number `$2` and handle `$3`.
const HANDED_OUT_CONTAINERS: &str = "SELECT judged_after AS number, handle, NULL AS parent FROM containers
    WHERE worker_id = $1 AND state = 'sweeping' AND (judged_after, handle) > ($2, $3)
    ORDER BY judged_after, handle";

/// Returns all rows of `query` after `last`, as handles with their parents, and advances `last`.
async fn read_after(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    query: &str,
    last: &mut (i64, Uuid),
) -> Result<Vec<(Uuid, Option<Uuid>)>, DbErr> {
    #[derive(FromQueryResult)]
    struct Row {
        number: i64,
        handle: Uuid,
        parent: Option<Uuid>,
    }
    let sql = format!("{query} LIMIT {BATCH}");
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
