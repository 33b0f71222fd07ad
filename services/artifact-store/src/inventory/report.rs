//! Reports: judging a worker's rows by the list of its containers and volumes.
//!
//! A gateway takes a token ([`begin`]) *before* it lists the contents of its worker, and then
//! reports the list. [`apply`] judges each row of the worker:
//!
//! - An item that is missing from the list is lost. If it was marked, its row is deleted.
//! - An unknown item is garbage, or an orphan if the database was restored from a backup
//!   ([`crate::inventory::orphans`]).
//! - An item that is still listed after it was handed out for deletion is handed out again.
//!
//! Two invariants hold for late, repeated and concurrent reports:
//!
//! - A report never judges a newer row. A row's `judged_after` is the worker's sequence when the
//!   row was created, marked or handed out, read behind the worker's lock. A token is minted by
//!   raising that sequence under the same lock. Only a higher token judges.
//! - A report never reverts the result of a newer one. Before a report judges, [`take_over`] makes
//!   its token the worker's `reported`. Each transaction that judges locks the worker's row and
//!   continues only while it has that token. An older report therefore stops in the middle.
//!
//! Each row is judged separately, so that an interrupted report is harmless. The next one completes
//! it.

use std::collections::HashSet;

use domain::worker::{Receipt, SessionClaims};
use domain::{ContainerHandle, StoreLife, VolumeHandle};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};
use uuid::Uuid;

use crate::app::Store;
use crate::db::entity::{OrphanKind, container, orphan, volume, worker};
use crate::inventory::orphans;
pub(crate) use crate::inventory::report_rows::ReportError;
use crate::inventory::report_rows::{PAGE, ROWS, hand_out_again, judge_all, require_current_report};
use crate::marks::deletion_log;
use crate::sessions::{self, SessionError};
use crate::store_life;
use crate::store_life::receipts::{self, Token};

/// Maximum number of handles in one report, at 16 bytes of memory each.
pub(crate) const MAX_HANDLES: usize = 2_000_000;

/// Maximum number of unknown handles of each kind in one answer, so that it fits into a message.
/// The next report returns the others.
const MAX_UNKNOWN: usize = 40_000;

/// Maximum number of undescribed volumes in one answer.
const MAX_UNDESCRIBED: usize = 1000;

/// Result of [`begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportStart {
    pub(crate) token: Token,
    /// Store life that this report ended, because the worker's receipt proves that this database
    /// was restored from a backup.
    pub(crate) ended: Option<StoreLife>,
    /// Whether the worker claims a newer report than this database has, without a valid receipt.
    pub(crate) unproven: bool,
}

/// Opens a report. `last`: token and receipt of the last answered report of the worker.
///
/// Without a receipt that token proves nothing. Otherwise any worker could present one and begin
/// new store lives.
///
/// The result of a report is durable before the report is answered. Therefore, within one life, no
/// report that a worker remembers is newer than the last recorded one.
pub(crate) async fn begin(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    last: Option<(Token, Option<Receipt>)>,
) -> Result<ReportStart, SessionError> {
    let worker::Model { sequence, reported, .. } = sessions::advance(txn, claims).await?;
    let current = store_life::current(txn).await?;
    let unknown = last.filter(|(last, _)| last.life == current && last.sequence > reported);
    let went_back = match unknown {
        Some((last, Some(receipt))) => receipts::is_genuine(txn, claims.worker, last, receipt).await?,
        Some((_, None)) | None => false,
    };
    let (life, ended) = if went_back {
        (store_life::begin_after(txn, current).await?, Some(current))
    } else {
        (current, None)
    };
    Ok(ReportStart { token: Token { sequence, life }, ended, unproven: unknown.is_some() && !went_back })
}

/// All containers and volumes of a worker, listed after the token was taken.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    volumes: Vec<Uuid>,
    containers: Vec<Uuid>,
}

impl Holdings {
    pub(crate) fn add_volume(&mut self, handle: VolumeHandle) {
        self.volumes.push(handle.uuid());
    }

    pub(crate) fn add_container(&mut self, handle: ContainerHandle) {
        self.containers.push(handle.uuid());
    }

    /// Returns the number of handles.
    pub(crate) fn len(&self) -> usize {
        self.volumes.len() + self.containers.len()
    }
}

/// Result of a report.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) forgotten: u64,
    pub(crate) lost: u64,
    pub(crate) unknown_volumes: Vec<VolumeHandle>,
    pub(crate) unknown_containers: Vec<ContainerHandle>,
    /// Number of reported items that are orphans.
    pub(crate) orphans: u64,
    /// Orphaned volumes that are not described yet.
    pub(crate) undescribed: Vec<VolumeHandle>,
    /// Receipt for the worker.
    pub(crate) receipt: Option<Receipt>,
}

/// Checks that a report with `token` may be judged.
pub(crate) async fn check(
    conn: &impl ConnectionTrait,
    claims: &SessionClaims,
    token: Token,
) -> Result<(), ReportError> {
    let row = worker::Entity::find_by_id(claims.worker.uuid()).one(conn).await?;
    may_judge(&sessions::judge(claims, row)?, token, store_life::current(conn).await?)
}

fn may_judge(row: &worker::Model, token: Token, life: StoreLife) -> Result<(), ReportError> {
    let may = token.life == life && token.sequence >= row.reported && token.sequence <= row.sequence;
    if may { Ok(()) } else { Err(ReportError::Stale) }
}

/// Judges every row of the worker by a complete report. `worker_life`: store life of the worker's
/// volumes, from the worker.
pub(crate) async fn apply(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    worker_life: Option<StoreLife>,
    holdings: Holdings,
) -> Result<Outcome, ReportError> {
    store.db.write(|txn| async move { take_over(&txn, claims, token).await }).await?;
    // Read before the inventory tables, into which orphans are adopted and purged, so that a
    // reported item is found in one of them.
    let orphans = orphans::of_worker(store.db.read(), claims.worker).await?;
    let Holdings { volumes, containers } = holdings;
    // Containers first, because they depend on volumes.
    let of_containers = judge_all::<container::Entity>(store, claims, token, containers).await?;
    let of_volumes = judge_all::<volume::Entity>(store, claims, token, volumes).await?;
    hand_out_again(store, claims, token, of_containers.again, of_volumes.again).await?;
    let mut outcome = Outcome {
        forgotten: of_containers.forgotten + of_volumes.forgotten,
        lost: of_containers.lost + of_volumes.lost,
        ..Outcome::default()
    };
    let mut unknown = UnknownItems { volumes: of_volumes.unknown, containers: of_containers.unknown };
    outcome.orphans = keep_orphans(store, claims, token, &orphans, &mut unknown).await?;
    if worker_life != Some(token.life) {
        outcome.orphans += add_orphans(store, claims, token, std::mem::take(&mut unknown)).await?;
    }
    if store_life::current(store.db.read()).await? != token.life {
        // Unknown items may not be garbage in the new life.
        return Err(ReportError::Stale);
    }
    outcome.undescribed = undescribed(store, claims).await?;
    outcome.receipt = Some(receipts::issue(store.db.read(), claims.worker, token).await?);
    let UnknownItems { volumes, containers } = unknown;
    outcome.unknown_volumes = volumes.into_iter().take(MAX_UNKNOWN).map(VolumeHandle::from_uuid).collect();
    outcome.unknown_containers =
        containers.into_iter().take(MAX_UNKNOWN).map(ContainerHandle::from_uuid).collect();
    Ok(outcome)
}

/// Reported items without a row in the inventory.
#[derive(Debug, Default)]
struct UnknownItems {
    volumes: Vec<Uuid>,
    containers: Vec<Uuid>,
}

/// Removes orphans from `unknown`, and returns their number. Deletes the orphans that were not
/// reported.
async fn keep_orphans(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    orphans: &[orphan::Model],
    unknown: &mut UnknownItems,
) -> Result<u64, ReportError> {
    if orphans.is_empty() {
        return Ok(0);
    }
    let known: HashSet<_> = orphans.iter().map(|row| row.handle).collect();
    let reported: HashSet<_> = unknown.volumes.iter().chain(&unknown.containers).copied().collect();
    unknown.volumes.retain(|handle| !known.contains(handle));
    unknown.containers.retain(|handle| !known.contains(handle));
    let (kept, gone): (Vec<_>, Vec<_>) = known.into_iter().partition(|handle| reported.contains(handle));
    let now = store.now();
    for some in gone.chunks(PAGE) {
        let forget = |txn| async move {
            let txn: db::Transaction = txn;
            require_current_report(&sessions::fence(&txn, claims).await?, token)?;
            let gone = orphans::forget(&txn, some, token.sequence, now).await?;
            deletion_log::append(&txn, &gone, now, store.config.tombstone).await?;
            Ok::<_, ReportError>(())
        };
        store.db.write(forget).await?;
    }
    Ok(u64::try_from(kept.len()).unwrap_or(u64::MAX))
}

/// Makes all unknown items orphans, and returns their number.
async fn add_orphans(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    unknown: UnknownItems,
) -> Result<u64, ReportError> {
    let now = store.now();
    let UnknownItems { volumes, containers } = unknown;
    for (kind, handles) in [(OrphanKind::Volume, &volumes), (OrphanKind::Container, &containers)] {
        for some in handles.chunks(ROWS) {
            let put = |txn| async move {
                let txn: db::Transaction = txn;
                let worker = sessions::fence(&txn, claims).await?;
                require_current_report(&worker, token)?;
                orphans::put(&txn, &worker, kind, some, now).await?;
                Ok::<_, ReportError>(())
            };
            store.db.write(put).await?;
        }
    }
    let number = volumes.len() + containers.len();
    if number > 0 {
        tracing::warn!(
            worker.id = %claims.worker,
            volumes = volumes.len(),
            containers = containers.len(),
            "worker has unknown volumes or containers of another store life, which are now orphans"
        );
    }
    Ok(u64::try_from(number).unwrap_or(u64::MAX))
}

/// Returns orphaned volumes of a worker that are not described yet.
async fn undescribed(store: &Store, claims: &SessionClaims) -> Result<Vec<VolumeHandle>, DbErr> {
    let handles: Vec<Uuid> = orphan::Entity::find()
        .select_only()
        .column(orphan::Column::Handle)
        .filter(orphan::Column::WorkerId.eq(claims.worker.uuid()))
        .filter(orphan::Column::Described.eq(false))
        .order_by_asc(orphan::Column::Handle)
        .limit(u64::try_from(MAX_UNDESCRIBED).unwrap_or(u64::MAX))
        .into_tuple()
        .all(store.db.read())
        .await?;
    Ok(handles.into_iter().map(VolumeHandle::from_uuid).collect())
}

/// Prevents older reports from judging rows of the worker. Waits for the commit of an older report
/// in progress.
async fn take_over(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    token: Token,
) -> Result<(), ReportError> {
    let row = worker::Entity::find_by_id(claims.worker.uuid()).lock_exclusive().one(txn).await?;
    let row = sessions::judge(claims, row)?;
    may_judge(&row, token, store_life::current(txn).await?)?;
    worker::Entity::update_many()
        .col_expr(worker::Column::Reported, Expr::value(token.sequence))
        .filter(worker::Column::WorkerId.eq(row.worker_id))
        .exec(txn)
        .await?;
    Ok(())
}
