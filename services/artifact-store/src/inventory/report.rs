//! Reports: what workers say they hold, and what follows from it.
//!
//! The gateway takes a token ([`begin`]) *before* it lists what its worker holds, and reports the list with it. [`apply`] judges each of the
//! worker's rows by that list: what was not reported is lost or, if it was marked, forgotten; what is not known is garbage, or an orphan if
//! the database came out of a backup ([`crate::inventory::orphans`]); and what is still there although its gateway was told to destroy it, is told again.
//!
//! Two invariants, however late a report comes, how often, and beside which others:
//!
//! - A report never judges what is newer than itself. A row's `judged_after` is the worker's sequence when it was made, marked or handed
//!   out, read behind the worker's lock, and a token is minted by raising that sequence under the same lock; only a higher token judges.
//! - A report never undoes what a newer one found. Before a report judges, [`take_over`] makes its token the worker's `reported`, and each
//!   transaction that judges holds the worker's row still and goes on only while it has that very token. So an older one that is in the
//!   middle of its rows stops there.
//!
//! Since every row is judged on its own, a report that is cut short has done nothing wrong, and the next one does the rest.

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
use crate::inventory::report_rows::{PAGE, ROWS, goes_on, judge_all, tell_again};
use crate::marks::deletion_log;
use crate::sessions::{self, SessionError};
use crate::store_life;
use crate::store_life::receipts::{self, Token};

/// How many handles one report may have: 16 bytes of memory each.
pub(crate) const MOST_HANDLES: usize = 2_000_000;

/// How many handles of each kind that are not known one answer names, so that it fits into a message. The next report names the others.
const MOST_UNKNOWN: usize = 40_000;

/// How many volumes that were not described yet one answer names.
const MOST_UNDESCRIBED: usize = 1000;

/// A report that was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportStart {
    pub(crate) token: Token,
    /// The life that ended with it: the worker remembers more than this database does, which came out of a backup.
    pub(crate) ended: Option<StoreLife>,
    /// The worker says that it remembers more than this database does, and has no receipt for it.
    pub(crate) unproven: bool,
}

/// Opens a report. `last`: the token of the last report of the worker that was answered, with its receipt.
///
/// Without a receipt that token proves nothing: any worker could show one, and begin one life after another.
///
/// Before a report is answered, that it was judged is durable. So in one life no report that a worker remembers is younger than the last that is
/// on record.
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

/// Everything that a worker holds, as it was listed after the token was taken.
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

    /// How many handles were added.
    pub(crate) fn len(&self) -> usize {
        self.volumes.len() + self.containers.len()
    }
}

/// What a report brought about.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) forgotten: u64,
    pub(crate) lost: u64,
    pub(crate) unknown_volumes: Vec<VolumeHandle>,
    pub(crate) unknown_containers: Vec<ContainerHandle>,
    /// How many of the reported things are orphans.
    pub(crate) orphans: u64,
    /// Volumes that are, and were not described yet.
    pub(crate) undescribed: Vec<VolumeHandle>,
    /// For the worker: that this was judged.
    pub(crate) receipt: Option<Receipt>,
}

/// Whether a report with `token` may be judged.
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

/// Judges every row of the worker by a complete report. `worker_life`: the life of the store that its volumes are of, as it says.
pub(crate) async fn apply(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    worker_life: Option<StoreLife>,
    holdings: Holdings,
) -> Result<Outcome, ReportError> {
    store.db.write(|txn| async move { take_over(&txn, claims, token).await }).await?;
    // Before the tables that it is adopted and purged into, so that what is reported is found in one of them.
    let aside = orphans::of_worker(store.db.read(), claims.worker).await?;
    let Holdings { volumes, containers } = holdings;
    // Containers first: volumes are what they stand on.
    let of_containers = judge_all::<container::Entity>(store, claims, token, containers).await?;
    let of_volumes = judge_all::<volume::Entity>(store, claims, token, volumes).await?;
    tell_again(store, claims, token, of_containers.again, of_volumes.again).await?;
    let mut outcome = Outcome {
        forgotten: of_containers.forgotten + of_volumes.forgotten,
        lost: of_containers.lost + of_volumes.lost,
        ..Outcome::default()
    };
    let mut unknown = Unknown { volumes: of_volumes.unknown, containers: of_containers.unknown };
    outcome.orphans = keep_orphans(store, claims, token, &aside, &mut unknown).await?;
    if worker_life != Some(token.life) {
        outcome.orphans += add_orphans(store, claims, token, std::mem::take(&mut unknown)).await?;
    }
    if store_life::current(store.db.read()).await? != token.life {
        // What is unknown may not be garbage.
        return Err(ReportError::Stale);
    }
    outcome.undescribed = undescribed(store, claims).await?;
    outcome.receipt = Some(receipts::issue(store.db.read(), claims.worker, token).await?);
    let Unknown { volumes, containers } = unknown;
    outcome.unknown_volumes = volumes.into_iter().take(MOST_UNKNOWN).map(VolumeHandle::from_uuid).collect();
    outcome.unknown_containers =
        containers.into_iter().take(MOST_UNKNOWN).map(ContainerHandle::from_uuid).collect();
    Ok(outcome)
}

/// What was reported, and has no row in the inventory.
#[derive(Debug, Default)]
struct Unknown {
    volumes: Vec<Uuid>,
    containers: Vec<Uuid>,
}

/// Takes orphans out of `unknown`, and answers how much that is. An orphan that was not reported is forgotten.
async fn keep_orphans(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    aside: &[orphan::Model],
    unknown: &mut Unknown,
) -> Result<u64, ReportError> {
    if aside.is_empty() {
        return Ok(0);
    }
    let known: HashSet<_> = aside.iter().map(|row| row.handle).collect();
    let reported: HashSet<_> = unknown.volumes.iter().chain(&unknown.containers).copied().collect();
    unknown.volumes.retain(|handle| !known.contains(handle));
    unknown.containers.retain(|handle| !known.contains(handle));
    let (kept, gone): (Vec<_>, Vec<_>) = known.into_iter().partition(|handle| reported.contains(handle));
    let now = store.now();
    for some in gone.chunks(PAGE) {
        let forget = |txn| async move {
            let txn: db::Transaction = txn;
            goes_on(&sessions::fence(&txn, claims).await?, token)?;
            let gone = orphans::forget(&txn, some, token.sequence, now).await?;
            deletion_log::append(&txn, &gone, now, store.config.tombstone).await?;
            Ok::<_, ReportError>(())
        };
        store.db.write(forget).await?;
    }
    Ok(u64::try_from(kept.len()).unwrap_or(u64::MAX))
}

/// Sets everything aside that is unknown, and answers how much that is.
async fn add_orphans(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    unknown: Unknown,
) -> Result<u64, ReportError> {
    let now = store.now();
    let Unknown { volumes, containers } = unknown;
    for (kind, handles) in [(OrphanKind::Volume, &volumes), (OrphanKind::Container, &containers)] {
        for some in handles.chunks(ROWS) {
            let put = |txn| async move {
                let txn: db::Transaction = txn;
                let worker = sessions::fence(&txn, claims).await?;
                goes_on(&worker, token)?;
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
            "a worker holds what this store does not know: it is an orphan, for its volumes are of another store life"
        );
    }
    Ok(u64::try_from(number).unwrap_or(u64::MAX))
}

/// Orphans of a worker of which its gateway has not said what they are.
async fn undescribed(store: &Store, claims: &SessionClaims) -> Result<Vec<VolumeHandle>, DbErr> {
    let handles: Vec<Uuid> = orphan::Entity::find()
        .select_only()
        .column(orphan::Column::Handle)
        .filter(orphan::Column::WorkerId.eq(claims.worker.uuid()))
        .filter(orphan::Column::Described.eq(false))
        .order_by_asc(orphan::Column::Handle)
        .limit(u64::try_from(MOST_UNDESCRIBED).unwrap_or(u64::MAX))
        .into_tuple()
        .all(store.db.read())
        .await?;
    Ok(handles.into_iter().map(VolumeHandle::from_uuid).collect())
}

/// From now on nothing older than `token` judges rows of the worker. Waits for what an older report is about to commit.
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
