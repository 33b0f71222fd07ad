//! Small trees: artifacts made from bytes of a caller, without a worker.
//!
//! The store keeps the tree as long as the artifact, including its tombstone. Replicas are made
//! from it.
//!
//! Invariant: an artifact has a row here exactly if it is `in_store`. One transaction writes or
//! deletes both. Such an artifact is sealed from its creation.

use domain::ArtifactId;
use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter,
};
use uuid::Uuid;

use crate::artifacts::access;
use crate::db::entity::{ArtifactState, artifact, tree};

/// Tree of a new artifact.
#[derive(Debug, Clone)]
pub(crate) struct NewTree {
    pub(crate) digest: domain::Digest,
    pub(crate) size_bytes: u64,
    /// Encoded form, as stored.
    pub(crate) encoded: Vec<u8>,
}

/// Stores the tree of an artifact whose row was just created.
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

/// Returns the tree of an artifact that `team` may use. `None` if the artifact was not made from a
/// tree.
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
