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

use std::collections::{HashMap, HashSet};

use domain::worker::{Receipt, SessionClaims};
use domain::{ContainerHandle, StoreLife, Timestamp, VolumeHandle};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};
use uuid::Uuid;

use crate::app::Store;
use crate::db::entity::{OrphanKind, State, container, orphan, volume, worker};
use crate::inventory::orphans;
use crate::inventory::report_removals::{LogTerms, forget};
use crate::marks::Sweepable;
use crate::marks::deletion_log;
use crate::marks::sweep_queue;
use crate::policy::garbage;
use crate::sessions::{self, SessionError};
use crate::store_life;
use crate::store_life::receipts::{self, Token};

/// How many handles one report may have: 16 bytes of memory each.
pub(crate) const MOST_HANDLES: usize = 2_000_000;

/// How many handles of each kind that are not known one answer names, so that it fits into a message. The next report names the others.
const MOST_UNKNOWN: usize = 40_000;

/// How many volumes that were not described yet one answer names.
const MOST_UNDESCRIBED: usize = 1000;

/// How many rows are read by one statement, and changed in one transaction. SQLite binds 32,766 values at most.
const PAGE: usize = 5_000;

/// How many rows are written by one statement.
const ROWS: usize = 1_000;

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

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("the report's token is of another store life, or older than a report that was judged")]
    Stale,
    #[error("database failed while judging a report")]
    Database(#[from] DbErr),
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
            "a worker holds what this store does not know: it is set aside, for its volumes are of another store life"
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

/// Refuses to go on when a newer report has taken over.
fn goes_on(row: &worker::Model, token: Token) -> Result<(), ReportError> {
    if row.reported == token.sequence { Ok(()) } else { Err(ReportError::Stale) }
}

/// What a report says about one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Change {
    Nothing,
    /// It is there.
    Found,
    /// It should be there and is not.
    Lose,
    /// It was marked and is gone.
    Forget,
    /// Its gateway was told to destroy it, and it is there: it was made after that, or could not be destroyed.
    TellAgain,
}

fn judge(state: State, judged_after: i64, reported: bool, token: i64) -> Change {
    if token <= judged_after {
        return Change::Nothing;
    }
    match (state, reported) {
        (State::Unconfirmed | State::Lost, true) => Change::Found,
        (State::Created | State::Unconfirmed, false) => Change::Lose,
        (State::Destroying | State::Sweeping, false) => Change::Forget,
        (State::Sweeping, true) => Change::TellAgain,
        (State::Creating | State::Created | State::Destroying, true)
        | (State::Creating | State::Lost, false) => Change::Nothing,
    }
}

/// What a report brought about among things of one kind.
#[derive(Debug, Default)]
struct PageOutcome {
    forgotten: u64,
    lost: u64,
    /// Reported, and no row has it.
    unknown: Vec<Uuid>,
    /// To be told again.
    again: Vec<Uuid>,
}

/// Judges all rows of one kind against the handles that were reported.
///
/// Walks both in order, a page at a time, so neither a statement nor a transaction grows with the report.
async fn judge_all<E: Sweepable>(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    mut reported: Vec<Uuid>,
) -> Result<PageOutcome, ReportError> {
    reported.sort_unstable();
    reported.dedup();
    let mut reported = reported.into_iter().peekable();
    let mut all = PageOutcome::default();
    let mut after = Some(Uuid::nil());
    while let Some(from) = after {
        let page = page::<E>(store.db.read(), claims, from).await?;
        let marked = marked_beside::<E>(store.db.read(), claims, from, &page).await?;
        after = page.last().filter(|_| page.len() == PAGE).map(|(handle, ..)| *handle);
        let mut judged: HashMap<Change, Vec<Uuid>> = HashMap::new();
        for (handle, state, judged_after) in page {
            while let Some(unknown) = reported.next_if(|reported| *reported < handle) {
                all.unknown.push(unknown);
            }
            let is_reported = reported.next_if_eq(&handle).is_some();
            let state = if marked.contains(&handle) { State::Destroying } else { state };
            match judge(state, judged_after, is_reported, token.sequence) {
                Change::Nothing => {}
                judgement => judged.entry(judgement).or_default().push(handle),
            }
        }
        all.again.append(&mut judged.remove(&Change::TellAgain).unwrap_or_default());
        if !judged.is_empty() {
            let (lost, forgotten) = carry_out::<E>(store, claims, token, &judged).await?;
            all.lost += lost;
            all.forgotten += forgotten;
        }
    }
    all.unknown.extend(reported);
    Ok(all)
}

/// The next rows of a worker behind `after`, by handle: their states, and behind which token they are judged.
async fn page<E: Sweepable>(
    conn: &impl ConnectionTrait,
    claims: &SessionClaims,
    after: Uuid,
) -> Result<Vec<(Uuid, State, i64)>, DbErr> {
    E::find()
        .select_only()
        .column(E::HANDLE)
        .column(E::STATE)
        .column(E::JUDGED_AFTER)
        .filter(E::WORKER_ID.eq(claims.worker.uuid()))
        .filter(E::HANDLE.gt(after))
        .order_by_asc(E::HANDLE)
        .limit(u64::try_from(PAGE).unwrap_or(u64::MAX))
        .into_tuple()
        .all(conn)
        .await
}

/// What of a page is garbage, though its row does not say so.
async fn marked_beside<E: Sweepable>(
    conn: &impl ConnectionTrait,
    claims: &SessionClaims,
    after: Uuid,
    page: &[(Uuid, State, i64)],
) -> Result<HashSet<Uuid>, DbErr> {
    match page.last() {
        Some((last, ..)) if E::HAS_QUEUE => sweep_queue::beside_rows(conn, claims.worker, after, *last).await,
        _ => Ok(HashSet::new()),
    }
}

/// Does what was found about one page of rows, as far as it still holds. Answers how many were lost and how many forgotten.
async fn carry_out<E: Sweepable>(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    judged: &HashMap<Change, Vec<Uuid>>,
) -> Result<(u64, u64), ReportError> {
    let of = |judgement| judged.get(&judgement).map(Vec::as_slice).unwrap_or_default();
    let now = store.now();
    let (found, lost, forgotten) = (of(Change::Found), of(Change::Lose), of(Change::Forget));
    store
        .db
        .write(|txn| async move {
            goes_on(&sessions::fence(&txn, claims).await?, token)?;
            let missing = [State::Unconfirmed, State::Lost];
            set::<E>(&txn, found, &missing, (State::Created, None), token).await?;
            let lost = set::<E>(&txn, lost, &State::PRESENT, (State::Lost, Some(now)), token).await?;
            let memory = LogTerms { now, tombstone: store.config.tombstone };
            let forgotten = forget::<E>(&txn, claims.worker, forgotten, token, memory).await?;
            Ok((lost, forgotten))
        })
        .await
}

/// Moves rows that are in one of `from` and were made or marked before the token, and says since when they are lost.
async fn set<E: Sweepable>(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    from: &[State],
    (to, lost_at): (State, Option<Timestamp>),
    token: Token,
) -> Result<u64, DbErr> {
    if handles.is_empty() {
        return Ok(0);
    }
    let moved = E::update_many()
        .col_expr(E::STATE, Expr::value(to))
        .col_expr(E::LOST_AT, Expr::value(lost_at.map(|at| at.0)))
        .col_expr(E::LOSS_NOTICED, Expr::value(false))
        .filter(E::HANDLE.is_in(handles.iter().copied()))
        .filter(E::STATE.is_in(from.iter().copied()))
        .filter(E::JUDGED_AFTER.lt(token.sequence))
        .exec(txn)
        .await?;
    Ok(moved.rows_affected)
}

/// Makes what was handed out before the token, and is there, news again for [`crate::marks`]: containers, and then children before their
/// parents.
async fn tell_again(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    containers: Vec<Uuid>,
    volumes: Vec<Uuid>,
) -> Result<(), ReportError> {
    if containers.is_empty() && volumes.is_empty() {
        return Ok(());
    }
    let mut parents = Vec::with_capacity(volumes.len());
    for some in volumes.chunks(PAGE) {
        let some: Vec<(Uuid, Option<Uuid>)> = volume::Entity::find()
            .select_only()
            .column(volume::Column::Handle)
            .column(volume::Column::Parent)
            .filter(volume::Column::Handle.is_in(some.iter().copied()))
            .into_tuple()
            .all(store.db.read())
            .await?;
        parents.extend(some);
    }
    for some in containers.chunks(PAGE) {
        store
            .db
            .write(|txn| async move { renew::<container::Entity>(&txn, claims, some, token).await })
            .await?;
    }
    for some in garbage::children_first(&parents).chunks(PAGE) {
        store.db.write(|txn| async move { renew::<volume::Entity>(&txn, claims, some, token).await }).await?;
    }
    store.sweep_wakers.wake([claims.worker]);
    Ok(())
}

/// Gives rows that are sweeping and were handed out before the token a new number.
async fn renew<E: Sweepable>(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    handles: &[Uuid],
    token: Token,
) -> Result<(), ReportError> {
    let row = sessions::advance(txn, claims).await?;
    goes_on(&row, token)?;
    let renewed = E::update_many()
        .col_expr(E::JUDGED_AFTER, Expr::value(row.sequence))
        .filter(E::HANDLE.is_in(handles.iter().copied()))
        .filter(E::STATE.eq(State::Sweeping))
        .filter(E::JUDGED_AFTER.lt(token.sequence))
        .exec_with_returning(txn)
        .await?;
    if E::HAS_QUEUE {
        let handles = renewed.iter().map(E::handle);
        sweep_queue::tell(txn, claims.worker, handles, row.sequence).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_judges_only_what_is_older_than_its_token() {
        for state in [State::Created, State::Unconfirmed, State::Lost, State::Destroying, State::Sweeping] {
            for reported in [false, true] {
                assert_eq!(judge(state, 7, reported, 7), Change::Nothing, "{state:?}");
            }
        }
        assert_eq!(judge(State::Created, 6, false, 7), Change::Lose);
        assert_eq!(judge(State::Sweeping, 6, false, 7), Change::Forget);
    }

    #[test]
    fn what_is_being_made_is_never_judged_and_what_is_named_never_forgotten() {
        assert_eq!(judge(State::Creating, 0, false, 7), Change::Nothing);
        for state in [State::Creating, State::Created, State::Destroying] {
            assert_eq!(judge(state, 0, true, 7), Change::Nothing);
        }
        assert_eq!(judge(State::Sweeping, 0, true, 7), Change::TellAgain);
        assert_eq!(judge(State::Unconfirmed, 0, true, 7), Change::Found);
        assert_eq!(judge(State::Lost, 0, true, 7), Change::Found);
        assert_eq!(judge(State::Lost, 0, false, 7), Change::Nothing);
    }
}
