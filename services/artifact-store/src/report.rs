//! Reports: what workers say they hold, and what follows from it.
//!
//! The gateway takes a token ([`begin`]) *before* it lists what its worker holds, and reports the list with it. [`apply`] judges the
//! worker's rows one by one: what was not reported is lost or, if it was marked, forgotten; what nobody knows is garbage; and what is still
//! there although its gateway was told to destroy it, is told again.
//!
//! Invariant: a report never judges what is newer than itself. A row's `judged_after` is the worker's sequence when it was made or
//! marked, read behind the worker's lock, and a token is minted by raising that sequence under the same lock; only a higher token judges.
//! Since every row is judged on its own, a report that is cut short by a crash of the store has done nothing wrong.

use std::collections::HashMap;

use domain::worker::SessionClaims;
use domain::{ContainerHandle, StoreLife, VolumeHandle};
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};
use uuid::Uuid;

use crate::entity::{State, container, volume, worker};
use crate::sessions::{self, SessionError};
use crate::store::Store;

/// How many handles one report may have: 16 bytes of memory each.
pub(crate) const MOST_HANDLES: usize = 2_000_000;

/// How many rows are judged in one transaction.
const BATCH: u64 = 1000;

/// Names a report, and when it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) sequence: i64,
    pub(crate) life: StoreLife,
}

/// Opens a report.
pub(crate) async fn begin(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    life: StoreLife,
) -> Result<Token, SessionError> {
    // As a writer from the start: two that share the row and both want to raise it would wait for each other.
    let row = worker::Entity::find_by_id(claims.worker.uuid()).lock_exclusive().one(txn).await?;
    let row = sessions::judge(claims, row)?;
    let sequence = row.sequence + 1;
    worker::Entity::update_many()
        .col_expr(worker::Column::Sequence, Expr::value(sequence))
        .filter(worker::Column::WorkerId.eq(row.worker_id))
        .exec(txn)
        .await?;
    Ok(Token { sequence, life })
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
    life: StoreLife,
) -> Result<(), ReportError> {
    let row = worker::Entity::find_by_id(claims.worker.uuid()).one(conn).await.map_err(SessionError::from)?;
    let row = sessions::judge(claims, row)?;
    let may = token.life == life && token.sequence >= row.reported && token.sequence <= row.sequence;
    if may { Ok(()) } else { Err(ReportError::Stale) }
}

/// Judges every row of the worker by a complete report.
pub(crate) async fn apply(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    holdings: Holdings,
) -> Result<Outcome, ReportError> {
    check(store.db.read(), claims, token, store.life).await?;
    let Holdings { volumes, containers } = holdings;
    let mut outcome = Outcome::default();
    // Containers first: volumes are what they stand on.
    let unknown = judge_all::<Containers>(store, claims, token, containers, &mut outcome).await?;
    outcome.unknown_containers = unknown.into_iter().map(ContainerHandle::from_uuid).collect();
    let unknown = judge_all::<Volumes>(store, claims, token, volumes, &mut outcome).await?;
    outcome.unknown_volumes = unknown.into_iter().map(VolumeHandle::from_uuid).collect();

    store
        .db
        .write(|txn| async move {
            worker::Entity::update_many()
                .col_expr(worker::Column::Reported, Expr::value(token.sequence))
                .filter(worker::Column::WorkerId.eq(claims.worker.uuid()))
                .filter(worker::Column::Reported.lt(token.sequence))
                .exec(&*txn)
                .await
        })
        .await?;
    Ok(outcome)
}

/// What a report says about one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Judgement {
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

fn judge(state: State, judged_after: i64, reported: bool, token: i64) -> Judgement {
    if token <= judged_after {
        return Judgement::Nothing;
    }
    match (state, reported) {
        (State::Unconfirmed | State::Lost, true) => Judgement::Found,
        (State::Created | State::Unconfirmed, false) => Judgement::Lose,
        (State::Destroying | State::Sweeping, false) => Judgement::Forget,
        (State::Sweeping, true) => Judgement::TellAgain,
        (State::Creating | State::Created | State::Destroying, true)
        | (State::Creating | State::Lost, false) => Judgement::Nothing,
    }
}

/// A row as far as a report judges it.
struct Row {
    handle: Uuid,
    state: State,
    judged_after: i64,
}

/// The two kinds of things that are reported.
trait Kind {
    /// The rows of a worker after `after`, by handle.
    fn page(
        conn: &impl ConnectionTrait,
        worker: Uuid,
        after: Uuid,
    ) -> impl Future<Output = Result<Vec<Row>, DbErr>> + Send;

    /// Moves rows that are in one of `from` and were made or marked before the token.
    fn set(
        txn: &DatabaseTransaction,
        handles: &[Uuid],
        from: &[State],
        to: State,
        token: i64,
    ) -> impl Future<Output = Result<u64, DbErr>> + Send;

    /// Makes rows that were handed out before the token news again for [`crate::sweep`].
    fn tell_again(
        txn: &DatabaseTransaction,
        handles: &[Uuid],
        token: i64,
    ) -> impl Future<Output = Result<u64, DbErr>> + Send;

    /// Deletes rows that were marked before the token.
    fn forget(
        txn: &DatabaseTransaction,
        handles: &[Uuid],
        token: i64,
    ) -> impl Future<Output = Result<u64, DbErr>> + Send;
}

macro_rules! kind {
    ($name:ident, $module:ident) => {
        struct $name;

        impl Kind for $name {
            async fn page(conn: &impl ConnectionTrait, worker: Uuid, after: Uuid) -> Result<Vec<Row>, DbErr> {
                let rows = $module::Entity::find()
                    .filter($module::Column::WorkerId.eq(worker))
                    .filter($module::Column::Handle.gt(after))
                    .order_by_asc($module::Column::Handle)
                    .limit(BATCH)
                    .all(conn)
                    .await?;
                let row = |row: $module::Model| Row {
                    handle: row.handle,
                    state: row.state,
                    judged_after: row.judged_after,
                };
                Ok(rows.into_iter().map(row).collect())
            }

            async fn set(
                txn: &DatabaseTransaction,
                handles: &[Uuid],
                from: &[State],
                to: State,
                token: i64,
            ) -> Result<u64, DbErr> {
                if handles.is_empty() {
                    return Ok(0);
                }
                let moved = $module::Entity::update_many()
                    .col_expr($module::Column::State, Expr::value(to))
                    .filter($module::Column::Handle.is_in(handles.iter().copied()))
                    .filter($module::Column::State.is_in(from.iter().copied()))
                    .filter(Expr::col($module::Column::JudgedAfter).lt(token))
                    .exec(txn)
                    .await?;
                Ok(moved.rows_affected)
            }

            async fn tell_again(
                txn: &DatabaseTransaction,
                handles: &[Uuid],
                token: i64,
            ) -> Result<u64, DbErr> {
                if handles.is_empty() {
                    return Ok(0);
                }
                let told = $module::Entity::update_many()
                    .col_expr($module::Column::JudgedAfter, Expr::value(token))
                    .filter($module::Column::Handle.is_in(handles.iter().copied()))
                    .filter($module::Column::State.eq(State::Sweeping))
                    .filter(Expr::col($module::Column::JudgedAfter).lt(token))
                    .exec(txn)
                    .await?;
                Ok(told.rows_affected)
            }

            async fn forget(txn: &DatabaseTransaction, handles: &[Uuid], token: i64) -> Result<u64, DbErr> {
                if handles.is_empty() {
                    return Ok(0);
                }
                let forgotten = $module::Entity::delete_many()
                    .filter($module::Column::Handle.is_in(handles.iter().copied()))
                    .filter($module::Column::State.is_in(State::GARBAGE))
                    .filter(Expr::col($module::Column::JudgedAfter).lt(token))
                    .exec(txn)
                    .await?;
                Ok(forgotten.rows_affected)
            }
        }
    };
}

kind!(Volumes, volume);
kind!(Containers, container);

/// Judges all rows of one kind against the handles that were reported, and answers those that nobody knows.
///
/// Walks both in order, a page at a time, so no statement grows with the report.
async fn judge_all<K: Kind>(
    store: &Store,
    claims: &SessionClaims,
    token: Token,
    mut reported: Vec<Uuid>,
    outcome: &mut Outcome,
) -> Result<Vec<Uuid>, ReportError> {
    reported.sort_unstable();
    reported.dedup();
    let mut reported = reported.into_iter().peekable();
    let mut unknown = Vec::new();
    let mut after = Uuid::nil();
    loop {
        let page = K::page(store.db.read(), claims.worker.uuid(), after).await?;
        let Some(last) = page.last() else { break };
        after = last.handle;
        let mut judged: HashMap<Judgement, Vec<Uuid>> = HashMap::new();
        for row in page {
            while let Some(handle) = reported.next_if(|handle| *handle < row.handle) {
                unknown.push(handle);
            }
            let is_reported = reported.next_if_eq(&row.handle).is_some();
            let judgement = judge(row.state, row.judged_after, is_reported, token.sequence);
            judged.entry(judgement).or_default().push(row.handle);
        }
        judged.remove(&Judgement::Nothing);
        if judged.is_empty() {
            continue;
        }
        let [found, lost, forgotten, again] =
            [Judgement::Found, Judgement::Lose, Judgement::Forget, Judgement::TellAgain]
                .map(|judgement| judged.remove(&judgement).unwrap_or_default());
        let (found, lost, forgotten, again) = (&found, &lost, &forgotten, &again);
        let (lost, forgotten, again) = store
            .db
            .write(|txn| async move {
                sessions::fence(&txn, claims).await?;
                let token = token.sequence;
                K::set(&txn, found, &[State::Unconfirmed, State::Lost], State::Created, token).await?;
                let lost =
                    K::set(&txn, lost, &[State::Created, State::Unconfirmed], State::Lost, token).await?;
                let forgotten = K::forget(&txn, forgotten, token).await?;
                let again = K::tell_again(&txn, again, token).await?;
                Ok::<_, SessionError>((lost, forgotten, again))
            })
            .await?;
        outcome.lost += lost;
        outcome.forgotten += forgotten;
        if again > 0 {
            store.marks.wake([claims.worker]);
        }
    }
    unknown.extend(reported);
    Ok(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_judges_only_what_is_older_than_its_token() {
        for state in [State::Created, State::Unconfirmed, State::Lost, State::Destroying, State::Sweeping] {
            for reported in [false, true] {
                assert_eq!(judge(state, 7, reported, 7), Judgement::Nothing, "{state:?}");
            }
        }
        assert_eq!(judge(State::Created, 6, false, 7), Judgement::Lose);
        assert_eq!(judge(State::Sweeping, 6, false, 7), Judgement::Forget);
    }

    #[test]
    fn what_is_being_made_is_never_judged_and_what_is_named_never_forgotten() {
        assert_eq!(judge(State::Creating, 0, false, 7), Judgement::Nothing);
        for state in [State::Creating, State::Created, State::Destroying] {
            assert_eq!(judge(state, 0, true, 7), Judgement::Nothing);
        }
        assert_eq!(judge(State::Sweeping, 0, true, 7), Judgement::TellAgain);
        assert_eq!(judge(State::Unconfirmed, 0, true, 7), Judgement::Found);
        assert_eq!(judge(State::Lost, 0, true, 7), Judgement::Found);
        assert_eq!(judge(State::Lost, 0, false, 7), Judgement::Nothing);
    }
}
