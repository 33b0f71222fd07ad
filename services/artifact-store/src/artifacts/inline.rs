//! Small trees: artifacts that were made from bytes which a caller handed over, without a worker.
//!
//! The tree stays here for as long as its artifact does, also while that is a tombstone, and is where replicas come from. Invariant: an artifact
//! has its row here if and only if it is `in_store`; both are written in one transaction, and go in one. Such an artifact is sealed from its start.

use domain::ArtifactId;
use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter,
};
use uuid::Uuid;

use crate::artifacts::access;
use crate::db::entity::{ArtifactState, artifact, tree};

/// Bytes that a caller handed over, and what they are.
#[derive(Debug, Clone)]
pub(crate) struct NewTree {
    pub(crate) digest: domain::Digest,
    pub(crate) size_bytes: u64,
    /// As it is kept.
    pub(crate) encoded: Vec<u8>,
}

/// Keeps the tree of an artifact whose row the caller has just made.
pub(crate) async fn keep(txn: &DatabaseTransaction, artifact: Uuid, tree: &NewTree) -> Result<(), DbErr> {
    let row = tree::ActiveModel { artifact_id: Set(artifact), tree: Set(tree.encoded.clone()) };
    tree::Entity::insert(row).exec_without_returning(txn).await.map(drop)
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error("no artifact {0} in this team")]
    NotFound(ArtifactId),
    #[error("database failed while reading a tree")]
    Database(#[from] DbErr),
}

/// The tree from which an artifact was made that `team` may use. `None`: it was made from none.
pub(crate) async fn read(
    conn: &impl ConnectionTrait,
    team: &str,
    id: ArtifactId,
) -> Result<Option<Vec<u8>>, ReadError> {
    let row = artifact::Entity::find_by_id(id.uuid())
        .filter(artifact::Column::State.ne(ArtifactState::Deleting))
        .filter(access::usable_by(team))
        .one(conn)
        .await?
        .ok_or(ReadError::NotFound(id))?;
    if !row.in_store {
        return Ok(None);
    }
    Ok(tree::Entity::find_by_id(id.uuid()).one(conn).await?.map(|row| row.tree))
}
