//! Restoring of deleted artifacts whose bytes still exist.
//!
//! Invariant: a deletion that was handed to a gateway is never cancelled. Handing out
//! ([`crate::marks`]) takes an exclusive lock on the worker's row, and restoring takes a shared
//! one. One of them is first, and the other sees its result.
//!
//! Only a report whose token was minted later judges a restored replica.
//!
//! A replica that was dropped by name is restored only if no other place certainly has the
//! artifact's bytes.
//!
//! The parent of a restored replica may be marked as well. It stays marked, and is not handed out
//! while its child is not sweeping.

use std::collections::HashSet;
use std::time::Duration;

use domain::{ArtifactId, BuildId, Timestamp};
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, Condition, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QuerySelect};

use crate::builds::{self, OwnerEnded};
use crate::db::entity::{ArtifactState, Purpose, State, artifact, volume};
use crate::marks::{self, LockWait};
use crate::marks::{sweep_queue, tombstones};

/// What keeps a restored artifact.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeptBy {
    Build(BuildId),
    /// No owner, for this time.
    Reprieve(Duration),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum UndeleteError {
    #[error("no artifact {0} in this team")]
    NotFound(ArtifactId),
    #[error("cannot restore artifact {0}: it is open")]
    Open(ArtifactId),
    #[error("cannot restore artifact {0}: all of its replicas are deleted or being deleted")]
    BytesGone(ArtifactId),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while restoring an artifact")]
    Database(#[from] DbErr),
}

/// Restores an artifact of `team` if it is deleted, and keeps it.
pub(crate) async fn undelete(
    txn: &DatabaseTransaction,
    team: &str,
    id: ArtifactId,
    kept_by: KeptBy,
    now: Timestamp,
) -> Result<(), UndeleteError> {
    let workers = "SELECT worker_id FROM volumes WHERE artifact_id = $1";
    marks::lock_workers(txn, workers, [id.uuid().into()], LockWait::Block).await?;
    if let KeptBy::Build(build) = kept_by {
        builds::lock_live(txn, build, team).await?;
    }
    let row = artifact::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await?;
    let Some(row) = row.filter(|row| row.team == team) else { return Err(UndeleteError::NotFound(id)) };

    let mut keep = artifact::Entity::update_many()
        .col_expr(artifact::Column::DueAt, Expr::value(now.0))
        .filter(artifact::Column::ArtifactId.eq(id.uuid()));
    if row.state == ArtifactState::Open {
        return Err(UndeleteError::Open(id));
    }
    restore(txn, &row, id).await?;
    if row.state == ArtifactState::Deleting {
        tombstones::remove(txn, row.artifact_id).await?;
        keep = keep
            .col_expr(artifact::Column::State, Expr::value(ArtifactState::Sealed))
            .col_expr(artifact::Column::MarkedAt, Expr::value(None::<i64>))
            .col_expr(artifact::Column::MarkReason, Expr::value(None::<String>));
    }
    if let KeptBy::Reprieve(keep_for) = kept_by {
        let until = Ord::max(row.kept_until, Some((now + keep_for).0));
        keep = keep.col_expr(artifact::Column::KeptUntil, Expr::value(until));
    }
    keep.exec(txn).await?;
    if let KeptBy::Build(build) = kept_by {
        builds::add(txn, build, [id.uuid()]).await?;
    }
    Ok(())
}

/// Removes the marks of an artifact's replicas that exist, or are lost and may be found again.
///
/// Dropped replicas stay marked if the bytes certainly exist elsewhere.
async fn restore(
    txn: &DatabaseTransaction,
    row: &artifact::Model,
    id: ArtifactId,
) -> Result<(), UndeleteError> {
    // One statement, because a report may find a lost replica between two.
    let any = Condition::any().add(is_restorable(row)).add(volume::Column::State.eq(State::Lost));
    let mut replicas = complete_replicas(row).filter(any).lock_exclusive().all(txn).await?;
    let dropped: HashSet<_> = replicas.iter().filter(|it| is_dropped(it)).map(|it| it.handle).collect();
    let are_lost = replicas.iter().all(|it| it.state == State::Lost);
    if are_lost && !row.in_store {
        return Err(UndeleteError::BytesGone(id));
    }
    // An unconfirmed replica may be lost.
    let bytes_are_certain = row.in_store || replicas.iter().any(|it| it.state == State::Created);
    sweep_queue::merge_marks(txn, &mut replicas).await?;
    let marked = replicas.iter().filter(|it| it.state == State::Destroying);
    let marked = marked.filter(|it| !bytes_are_certain || !dropped.contains(&it.handle));
    let marked: Vec<_> = marked.map(|replica| replica.handle).collect();
    Ok(marks::unmark_volumes(txn, &marked).await?)
}

/// Returns whether a replica is marked for a reason of its own, which its row shows.
fn is_dropped(replica: &volume::Model) -> bool {
    replica.state == State::Destroying
}

/// Returns the replicas from which an artifact can be restored. They have its bytes, existed when
/// they were marked, and were not handed out.
pub(crate) fn restorable(row: &artifact::Model) -> sea_orm::Select<volume::Entity> {
    complete_replicas(row).filter(is_restorable(row))
}

fn is_restorable(row: &artifact::Model) -> Condition {
    let there = Condition::any().add(volume::Column::State.is_in(State::PRESENT)).add(
        Condition::all()
            .add(volume::Column::State.eq(State::Destroying))
            .add(volume::Column::MarkedFrom.is_in(State::PRESENT)),
    );
    Condition::all().add(volume::Column::Digest.eq(row.digest.clone())).add(there)
}

fn complete_replicas(row: &artifact::Model) -> sea_orm::Select<volume::Entity> {
    volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(row.artifact_id))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(volume::Column::Complete.eq(true))
}
