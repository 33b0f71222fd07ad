//! Judging of the rows of a worker by a report: confirmed, lost, or deleted.
//!
//! [`crate::inventory::report`] calls it.
//!
//! Invariant: a report judges a row only if its token is higher than the row's `judged_after`. The
//! transaction has locked the worker's row, and has found the report's token there.

use std::collections::{HashMap, HashSet};

use domain::Timestamp;
use domain::worker::SessionClaims;
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};
use uuid::Uuid;

use crate::app::Store;
use crate::db::entity::{State, container, volume, worker};
use crate::inventory::report_removals::{LogTerms, forget};
use crate::marks::Sweepable;
use crate::marks::sweep_queue;
use crate::policy::garbage;
use crate::sessions::{self, SessionError};
use crate::store_life::receipts::Token;

/// Maximum number of rows that one query reads and one transaction changes. SQLite binds at most
/// 32,766 values.
pub(super) const PAGE: usize = 5_000;

/// Maximum number of rows that one statement inserts.
pub(super) const ROWS: usize = 1_000;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(
        "cannot judge the report: its token is of another store life, or older than a judged report. Take a new token"
    )]
    Stale,
    #[error("database failed while judging a report")]
    Database(#[from] DbErr),
}

/// Rejects a report after a newer one has taken over.
pub(super) fn require_current_report(row: &worker::Model, token: Token) -> Result<(), ReportError> {
    if row.reported == token.sequence { Ok(()) } else { Err(ReportError::Stale) }
}

/// Effect of a report on one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Change {
    Nothing,
    /// It exists.
    Confirm,
    /// It is missing.
    Lose,
    /// It was marked and is gone.
    Forget,
    /// It was handed out for deletion and still exists: it was created later, or could not be
    /// deleted.
    HandOutAgain,
}

fn judge(state: State, judged_after: i64, reported: bool, token: i64) -> Change {
    if token <= judged_after {
        return Change::Nothing;
    }
    match (state, reported) {
        (State::Unconfirmed | State::Lost, true) => Change::Confirm,
        (State::Created | State::Unconfirmed, false) => Change::Lose,
        (State::Destroying | State::Sweeping, false) => Change::Forget,
        (State::Sweeping, true) => Change::HandOutAgain,
        (State::Creating | State::Created | State::Destroying, true)
        | (State::Creating | State::Lost, false) => Change::Nothing,
    }
}

/// Result of a report for one kind of items.
#[derive(Debug, Default)]
pub(super) struct PageOutcome {
    pub(super) forgotten: u64,
    pub(super) lost: u64,
    /// Reported handles without a row.
    pub(super) unknown: Vec<Uuid>,
    /// Handles to hand out again.
    pub(super) again: Vec<Uuid>,
}

/// Judges all rows of one kind by the reported handles.
///
/// Walks rows and handles in the same order, a page at a time, so that statements and transactions
/// do not grow with the report.
pub(super) async fn judge_all<E: Sweepable>(
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
        all.again.append(&mut judged.remove(&Change::HandOutAgain).unwrap_or_default());
        if !judged.is_empty() {
            let (lost, forgotten) = carry_out::<E>(store, claims, token, &judged).await?;
            all.lost += lost;
            all.forgotten += forgotten;
        }
    }
    all.unknown.extend(reported);
    Ok(all)
}

/// Returns the next rows of a worker after `after`, by handle: handle, state and `judged_after`.
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

/// Returns the handles of a page whose marks are only in the queue.
async fn marked_beside<E: Sweepable>(
    conn: &impl ConnectionTrait,
    claims: &SessionClaims,
    after: Uuid,
    page: &[(Uuid, State, i64)],
) -> Result<HashSet<Uuid>, DbErr> {
    match page.last() {
        Some((last, ..)) if E::HAS_QUEUE => {
            sweep_queue::queue_only_marks(conn, claims.worker, after, *last).await
        }
        _ => Ok(HashSet::new()),
    }
}

/// Applies the changes of one page, as far as they still hold. Returns the numbers of lost and
/// deleted rows.
async fn carry_out<E: Sweepable>(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    judged: &HashMap<Change, Vec<Uuid>>,
) -> Result<(u64, u64), ReportError> {
    let of = |judgement| judged.get(&judgement).map(Vec::as_slice).unwrap_or_default();
    let now = store.now();
    let (found, lost, forgotten) = (of(Change::Confirm), of(Change::Lose), of(Change::Forget));
    store
        .db
        .write(|txn| async move {
            require_current_report(&sessions::fence(&txn, claims).await?, token)?;
            let missing = [State::Unconfirmed, State::Lost];
            set::<E>(&txn, found, &missing, (State::Created, None), token).await?;
            let lost = set::<E>(&txn, lost, &State::PRESENT, (State::Lost, Some(now)), token).await?;
            let memory = LogTerms { now, tombstone: store.config.tombstone };
            let forgotten = forget::<E>(&txn, claims.worker, forgotten, token, memory).await?;
            Ok((lost, forgotten))
        })
        .await
}

/// Changes the state of rows that are in one of `from` and are older than the token, and sets since
/// when they are lost.
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
    let mut update = E::update_many()
        .col_expr(E::STATE, Expr::value(to))
        .col_expr(E::LOST_AT, Expr::value(lost_at.map(|at| at.0)))
        .col_expr(E::LOSS_NOTICED, Expr::value(false))
        .filter(E::HANDLE.is_in(handles.iter().copied()))
        .filter(E::STATE.is_in(from.iter().copied()))
        .filter(E::JUDGED_AFTER.lt(token.sequence));
    if let Some(reason) = E::LOSS_REASON {
        update = update.col_expr(reason, Expr::value(None::<String>));
    }
    Ok(update.exec(txn).await?.rows_affected)
}

/// Hands out sweeping items again that were handed out before the token and still exist. Containers
/// come first, then children before their parents.
pub(super) async fn hand_out_again(
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

/// Gives sweeping rows that were handed out before the token a new number.
async fn renew<E: Sweepable>(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    handles: &[Uuid],
    token: Token,
) -> Result<(), ReportError> {
    let row = sessions::advance(txn, claims).await?;
    require_current_report(&row, token)?;
    let renewed = E::update_many()
        .col_expr(E::JUDGED_AFTER, Expr::value(row.sequence))
        .filter(E::HANDLE.is_in(handles.iter().copied()))
        .filter(E::STATE.eq(State::Sweeping))
        .filter(E::JUDGED_AFTER.lt(token.sequence))
        .exec_with_returning(txn)
        .await?;
    if E::HAS_QUEUE {
        let handles = renewed.iter().map(E::handle);
        sweep_queue::record_handed_out(txn, claims.worker, handles, row.sequence).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_judges_only_rows_older_than_its_token() {
        for state in [State::Created, State::Unconfirmed, State::Lost, State::Destroying, State::Sweeping] {
            for reported in [false, true] {
                assert_eq!(judge(state, 7, reported, 7), Change::Nothing, "{state:?}");
            }
        }
        assert_eq!(judge(State::Created, 6, false, 7), Change::Lose);
        assert_eq!(judge(State::Sweeping, 6, false, 7), Change::Forget);
    }

    #[test]
    fn report_keeps_creating_rows_and_reported_rows() {
        assert_eq!(judge(State::Creating, 0, false, 7), Change::Nothing);
        for state in [State::Creating, State::Created, State::Destroying] {
            assert_eq!(judge(state, 0, true, 7), Change::Nothing);
        }
        assert_eq!(judge(State::Sweeping, 0, true, 7), Change::HandOutAgain);
        assert_eq!(judge(State::Unconfirmed, 0, true, 7), Change::Confirm);
        assert_eq!(judge(State::Lost, 0, true, 7), Change::Confirm);
        assert_eq!(judge(State::Lost, 0, false, 7), Change::Nothing);
    }
}
