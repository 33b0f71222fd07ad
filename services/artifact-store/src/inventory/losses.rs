//! Losses: volumes and containers that should be on a worker and are not, as an ordered feed.
//!
//! A report that lacks a volume or container makes it lost ([`crate::inventory::report`]). So does
//! a gateway that finds a replica missing or damaged when it is used ([`lose_replicas`]). After a
//! grace period without it, the collector records the loss, once. So does the call that forgets a
//! worker ([`crate::inventory::worker_removal`]). [`append`] gives the loss a revision.
//!
//! The store calls no other service. Callers watch the feed. A lost replica is copied from another
//! worker when it is needed.
//!
//! Invariant: revisions rise by one and become visible in order. An update of the only row of
//! `store` assigns them, and its lock is held until the commit.

use std::collections::{HashMap, HashSet};

use db::rows::Column;
use domain::worker::SessionClaims;
use domain::{BuildId, ContainerHandle, Timestamp, VolumeHandle, WorkloadId};
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect, Statement,
};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::app::Store;
use crate::artifacts::{self, Replica};
use crate::clock::jittered;
use crate::db::entity::{Purpose, State, attempt, container, loss, store, volume};
use crate::marks::references::Keepers;
use crate::marks::sweep_queue;
use crate::policy::garbage::{KeeperKind, Policy};
use crate::sessions::{self, SessionError};

/// Maximum number of losses read by one query.
const PAGE: u64 = 100;

/// A loss to record.
#[derive(Debug, Clone)]
pub(crate) struct NewLoss {
    worker: Uuid,
    volume: Option<Uuid>,
    container: Option<Uuid>,
    artifact: Option<Uuid>,
    attempt: Option<Uuid>,
    lost_at: Option<i64>,
}

impl From<&volume::Model> for NewLoss {
    fn from(row: &volume::Model) -> Self {
        Self {
            worker: row.worker_id,
            volume: Some(row.handle),
            container: None,
            artifact: row.artifact_id,
            attempt: row.attempt_id,
            lost_at: row.lost_at,
        }
    }
}

impl From<&container::Model> for NewLoss {
    fn from(row: &container::Model) -> Self {
        Self {
            worker: row.worker_id,
            volume: None,
            container: Some(row.handle),
            artifact: None,
            attempt: Some(row.attempt_id),
            lost_at: row.lost_at,
        }
    }
}

/// Records losses under the next revisions.
pub(crate) async fn append(txn: &DatabaseTransaction, lost: &[NewLoss], now: Timestamp) -> Result<(), DbErr> {
    let Some(count) = i64::try_from(lost.len()).ok().filter(|count| *count > 0) else { return Ok(()) };
    let raised = store::Entity::update_many()
        .col_expr(store::Column::Losses, Expr::col(store::Column::Losses).add(count))
        .exec_with_returning(txn)
        .await?;
    let newest = raised.first().map(|row| row.losses);
    let newest = newest.ok_or_else(|| DbErr::RecordNotFound("row of the store".to_owned()))?;
    let rows = lost.iter().zip(newest - count + 1..).map(|(lost, revision)| Row {
        revision,
        worker: lost.worker,
        volume: lost.volume,
        container: lost.container,
        artifact: lost.artifact,
        attempt: lost.attempt,
        lost_at: lost.lost_at.unwrap_or(now.0),
    });
    let rows = db::rows::value(&rows.collect::<Vec<_>>())?;
    let backend = txn.get_database_backend();
    let sql = format!(
        "INSERT INTO losses (revision, worker_id, volume, container, artifact_id, attempt_id, lost_at, noticed_at)
         SELECT revision, worker, volume, container, artifact, attempt, lost_at, $2 FROM ({}) AS lost",
        db::rows::query(backend, 1, &ROW)
    );
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, [rows, now.0.into()])).await.map(drop)
}

/// A row of `losses` to insert.
#[derive(Serialize)]
struct Row {
    revision: i64,
    worker: Uuid,
    volume: Option<Uuid>,
    container: Option<Uuid>,
    artifact: Option<Uuid>,
    attempt: Option<Uuid>,
    lost_at: i64,
}

const ROW: [(&str, Column); 7] = [
    ("revision", Column::Integer),
    ("worker", Column::Uuid),
    ("volume", Column::Uuid),
    ("container", Column::Uuid),
    ("artifact", Column::Uuid),
    ("attempt", Column::Uuid),
    ("lost_at", Column::Integer),
];

/// A replica that its gateway reports as missing or damaged.
#[derive(Debug, Clone)]
pub(crate) struct LostReplica {
    pub(crate) handle: VolumeHandle,
    /// For people.
    pub(crate) reason: String,
}

/// Makes present replicas on the worker of `claims` lost. Returns their number.
///
/// The sequence is raised, so that a report with an older token, whose list may have them, does not
/// judge them.
pub(crate) async fn lose_replicas(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    replicas: &[LostReplica],
    now: Timestamp,
) -> Result<u64, SessionError> {
    let mut present = volume::Entity::find()
        .filter(volume::Column::Handle.is_in(replicas.iter().map(|replica| replica.handle.uuid())))
        .filter(volume::Column::WorkerId.eq(claims.worker.uuid()))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(volume::Column::State.is_in(State::PRESENT))
        .all(txn)
        .await?;
    if present.is_empty() {
        sessions::fence(txn, claims).await?;
        return Ok(0);
    }
    let sequence = sessions::advance(txn, claims).await?.sequence;
    sweep_queue::merge_marks(txn, &mut present).await?;
    let mut lost = 0;
    for row in present.iter().filter(|row| !row.state.is_garbage()) {
        let reason = replicas.iter().find(|replica| replica.handle.uuid() == row.handle);
        let moved = volume::Entity::update_many()
            .col_expr(volume::Column::State, Expr::value(State::Lost))
            .col_expr(volume::Column::LostAt, Expr::value(now.0))
            .col_expr(volume::Column::LossNoticed, Expr::value(false))
            .col_expr(volume::Column::LossReason, Expr::value(reason.map(|replica| replica.reason.as_str())))
            .col_expr(volume::Column::JudgedAfter, Expr::value(sequence))
            .filter(volume::Column::Handle.eq(row.handle))
            .filter(volume::Column::State.is_in(State::PRESENT))
            .exec(txn)
            .await?;
        lost += moved.rows_affected;
    }
    Ok(lost)
}

/// A loss, with its dependents at the time of the notice.
#[derive(Debug, Clone)]
pub(crate) struct LossNotice {
    pub(crate) revision: u64,
    pub(crate) worker: Uuid,
    pub(crate) volume: Option<VolumeHandle>,
    pub(crate) container: Option<ContainerHandle>,
    pub(crate) artifact: Option<Uuid>,
    pub(crate) attempt: Option<Uuid>,
    pub(crate) lost_at: Timestamp,
    /// References that keep the artifact.
    pub(crate) keepers: Keepers,
    /// Workloads that pin the artifact, and the workload of the attempt if the attempt is active.
    pub(crate) workloads: Vec<WorkloadId>,
    pub(crate) builds: Vec<BuildId>,
    /// Remaining replicas of the artifact.
    pub(crate) replicas: Vec<Replica>,
    /// Whether the store itself has the artifact's bytes.
    pub(crate) in_store: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum WatchError {
    #[error(
        "cannot watch losses after revision {after}: revisions up to {forgotten} are forgotten, and {newest} is the newest"
    )]
    Compacted { after: u64, forgotten: u64, newest: u64 },
    #[error("database failed while reading losses")]
    Database(#[from] DbErr),
}

/// Sends the losses after a revision, and then new ones, until the watcher leaves or the store
/// stops.
pub(crate) async fn watch(
    store: &Store,
    mut revision: u64,
    policy: &Policy,
    losses: &mpsc::Sender<Result<LossNotice, WatchError>>,
    stopping: &CancellationToken,
) -> Result<(), WatchError> {
    loop {
        let page = after(store, revision, policy).await?;
        let is_last = u64::try_from(page.len()).unwrap_or(u64::MAX) < PAGE;
        for notice in page {
            revision = notice.revision;
            tokio::select! {
                () = stopping.cancelled() => return Ok(()),
                taken = losses.send(Ok(notice)) => if taken.is_err() { return Ok(()) },
            }
        }
        if is_last {
            tokio::select! {
                () = stopping.cancelled() => return Ok(()),
                () = losses.closed() => return Ok(()),
                () = tokio::time::sleep(jittered(store.config.sweep_interval)) => {}
            }
        }
    }
}

/// Returns the next losses after a revision.
async fn after(store: &Store, revision: u64, policy: &Policy) -> Result<Vec<LossNotice>, WatchError> {
    let conn = store.db.read();
    let rows = loss::Entity::find()
        .filter(loss::Column::Revision.gt(column(revision)))
        .order_by_asc(loss::Column::Revision)
        .limit(PAGE)
        .all(conn)
        .await?;
    // Read after the losses: if no revision is forgotten by now, the page is complete.
    let known = store::Entity::find().one(conn).await?;
    let (newest, forgotten) = known.map_or((0, 0), |row| (row.losses, row.losses_forgotten));
    let (newest, forgotten) = (newest.unsigned_abs(), forgotten.unsigned_abs());
    if revision > 0 && (revision < forgotten || revision > newest) {
        return Err(WatchError::Compacted { after: revision, forgotten, newest });
    }
    Ok(describe(conn, rows, store.now(), policy).await?)
}

fn column(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

/// Adds dependents and remaining replicas to losses.
async fn describe(
    conn: &impl ConnectionTrait,
    rows: Vec<loss::Model>,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<LossNotice>, DbErr> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let ids: HashSet<Uuid> = rows.iter().filter_map(|row| row.artifact_id).collect();
    let artifacts = artifacts::of_ids(conn, ids, now, policy).await?;
    let artifacts: HashMap<_, _> = artifacts
        .into_iter()
        .map(|(located, keepers)| (located.artifact.artifact_id, (located, keepers)))
        .collect();
    let going_on: HashMap<Uuid, Uuid> = attempt::Entity::find()
        .select_only()
        .column(attempt::Column::AttemptId)
        .column(attempt::Column::HolderId)
        .filter(attempt::Column::AttemptId.is_in(rows.iter().filter_map(|row| row.attempt_id)))
        .filter(attempt::Column::EndedAt.is_null())
        .into_tuple::<(Uuid, Uuid)>()
        .all(conn)
        .await?
        .into_iter()
        .collect();
    let notices = rows.into_iter().map(|row| {
        let known = row.artifact_id.and_then(|id| artifacts.get(&id));
        let located = known.map(|(located, _)| located);
        let keepers = known.map(|(_, keepers)| keepers.clone()).unwrap_or_default();
        let of_attempt = row.attempt_id.and_then(|id| going_on.get(&id));
        let mut workloads: Vec<_> = of_attempt.copied().map(WorkloadId::from_uuid).into_iter().collect();
        let mut builds = Vec::new();
        for keeper in &keepers.first {
            match keeper.kind {
                KeeperKind::Pin(workload) if !workloads.contains(&workload) => workloads.push(workload),
                KeeperKind::Build(build) => builds.push(build),
                _ => {}
            }
        }
        LossNotice {
            revision: row.revision.unsigned_abs(),
            worker: row.worker_id,
            volume: row.volume.map(VolumeHandle::from_uuid),
            container: row.container.map(ContainerHandle::from_uuid),
            artifact: row.artifact_id,
            attempt: row.attempt_id,
            lost_at: Timestamp(row.lost_at),
            keepers,
            workloads,
            builds,
            replicas: located.map(|located| located.replicas.clone()).unwrap_or_default(),
            in_store: located.is_some_and(|located| located.artifact.in_store),
        }
    });
    Ok(notices.collect())
}

#[cfg(test)]
mod tests {
    use db::Database;
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::db::migrations::Schema;
    use crate::store_life;

    #[tokio::test(flavor = "multi_thread")]
    async fn append_records_any_number_of_losses_on_sqlite() {
        append_records_any_number_of_losses(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn append_records_any_number_of_losses_on_postgres() {
        append_records_any_number_of_losses(databases::postgres().await).await;
    }

    /// Appends more losses than a statement takes values.
    async fn append_records_any_number_of_losses(database: TestDatabase) {
        let db = Database::connect::<Schema>(&database.url).await.expect("a database");
        db.write(|txn| async move { store_life::mint(&txn).await }).await.expect("a store");
        let volumes: Vec<_> = (0..10_001).map(|_| Uuid::now_v7()).collect();
        let of_volume = |volume: &Uuid| NewLoss {
            worker: Uuid::nil(),
            volume: Some(*volume),
            container: None,
            artifact: None,
            attempt: None,
            lost_at: Some(1),
        };
        let lost = &volumes.iter().map(of_volume).collect::<Vec<_>>();
        for _ in 0..2 {
            db.write(|txn| async move { append(&txn, lost, Timestamp(2)).await }).await.expect("noted");
        }
        let noted: Vec<(i64, Option<Uuid>)> = loss::Entity::find()
            .select_only()
            .column(loss::Column::Revision)
            .column(loss::Column::Volume)
            .order_by_asc(loss::Column::Revision)
            .into_tuple()
            .all(db.read())
            .await
            .expect("asked");
        let expected: Vec<_> =
            (1_i64..).zip([&volumes[..], &volumes].concat().into_iter().map(Some)).collect();
        assert!(noted == expected, "{} of {} losses are recorded", noted.len(), expected.len());
    }
}
