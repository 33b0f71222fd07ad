//! Rows of a worker, judged by a report: confirmed, lost, or forgotten.
//!
//! Called by [`crate::inventory::report`]. Invariant: a row is judged only by a report whose token
//! is higher than its `judged_after`, in a transaction that holds the worker's row and finds the
//! report's token there.

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

/// How many rows are read by one statement, and changed in one transaction. SQLite binds 32,766
/// values at most.
pub(super) const PAGE: usize = 5_000;

/// How many rows are written by one statement.
pub(super) const ROWS: usize = 1_000;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("the report's token is of another store life, or older than a report that was judged")]
    Stale,
    #[error("database failed while judging a report")]
    Database(#[from] DbErr),
}

/// Refuses to go on when a newer report has taken over.
pub(super) fn goes_on(row: &worker::Model, token: Token) -> Result<(), ReportError> {
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
    /// Its gateway was told to destroy it, and it is there: it was made after that, or could not be
    /// destroyed.
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
pub(super) struct PageOutcome {
    pub(super) forgotten: u64,
    pub(super) lost: u64,
    /// Reported, and no row has it.
    pub(super) unknown: Vec<Uuid>,
    /// To be told again.
    pub(super) again: Vec<Uuid>,
}

/// Judges all rows of one kind against the handles that were reported.
///
/// Walks both in order, a page at a time, so neither a statement nor a transaction grows with the
/// report.
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

/// The next rows of a worker behind `after`, by handle: their states, and behind which token they
/// are judged.
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

/// Does what was found about one page of rows, as far as it still holds. Answers how many were lost
/// and how many forgotten.
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

/// Moves rows that are in one of `from` and were made or marked before the token, and says since
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

/// Makes what was handed out before the token, and is there, news again for [`crate::marks`]:
/// containers, and then children before their parents.
pub(super) async fn tell_again(
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
