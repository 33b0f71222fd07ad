//! Creation of artifacts, and reuse of artifacts with the same bytes.
//!
//! Clients, the streamer, settling and imports call it. Invariant: repeating a call changes
//! nothing.

use std::collections::{HashMap, HashSet};

use domain::{ArtifactId, BuildId, Digest, Timestamp, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel, QueryFilter,
    QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::inline::{self, NewTree};
use crate::artifacts::{LocatedArtifact, replicas_of, with_ids};
use crate::builds::{self, OwnerEnded};
use crate::db::entity::{ArtifactState, artifact, owner};
use crate::db::units;
use crate::policy::garbage::Policy;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    #[error("artifact {0} already exists with another team, owner or tree")]
    Exists(ArtifactId),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while creating an artifact")]
    Database(#[from] DbErr),
}

/// Properties of an artifact to create.
#[derive(Debug, Clone)]
pub(crate) struct NewArtifact {
    pub(crate) id: ArtifactId,
    pub(crate) team: String,
    pub(crate) label: String,
    pub(crate) owner: Option<BuildId>,
    /// Its tree. `None` if it is not known yet.
    pub(crate) tree: Option<NewTree>,
}

/// Creates an artifact, open or sealed with its tree. Repeating the call changes nothing.
pub(crate) async fn create(
    txn: &DatabaseTransaction,
    new: &NewArtifact,
    now: Timestamp,
) -> Result<(), CreateError> {
    if let Some(row) = artifact::Entity::find_by_id(new.id.uuid()).one(txn).await? {
        return check_repeat(new, &row, is_owned(txn, new).await?);
    }
    if let Some(build) = new.owner {
        builds::lock_live(txn, build, &new.team).await?;
    }
    let row = first_row(new, now);
    let inserted = artifact::Entity::insert(row.clone().into_active_model().reset_all())
        .on_conflict_do_nothing_on([artifact::Column::ArtifactId])
        .exec_without_returning(txn)
        .await?;
    if !matches!(inserted, sea_orm::TryInsertResult::Inserted(1)) {
        // Another transaction created it meanwhile.
        let row = artifact::Entity::find_by_id(new.id.uuid()).one(txn).await?;
        return match row {
            Some(row) => check_repeat(new, &row, is_owned(txn, new).await?),
            None => Err(CreateError::Exists(new.id)),
        };
    }
    if let Some(tree) = &new.tree {
        inline::keep(txn, new.id.uuid(), tree).await?;
    }
    if let Some(build) = new.owner {
        builds::add(txn, build, [new.id.uuid()]).await?;
    }
    Ok(())
}

/// Creates open artifacts of one team with the same owner or none, all or none. Repeating the call
/// changes nothing.
pub(crate) async fn create_all(
    txn: &DatabaseTransaction,
    new: &[NewArtifact],
    now: Timestamp,
) -> Result<(), CreateError> {
    let Some(first) = new.first() else { return Ok(()) };
    let all = new.iter().map(|new| new.id.uuid());
    let known: HashSet<_> =
        with_ids(txn, all.clone()).await?.into_iter().map(|row| row.artifact_id).collect();
    let mut rows: Vec<_> =
        new.iter().filter(|new| !known.contains(&new.id.uuid())).map(|new| first_row(new, now)).collect();
    if !rows.is_empty() {
        if let Some(build) = first.owner {
            builds::lock_live(txn, build, &first.team).await?;
        }
        // A fixed order prevents a deadlock of two transactions.
        rows.sort_unstable_by_key(|row| row.artifact_id);
        let made = rows.iter().map(|row| row.clone().into_active_model().reset_all());
        artifact::Entity::insert_many(made)
            .on_conflict_do_nothing_on([artifact::Column::ArtifactId])
            .exec_without_returning(txn)
            .await?;
    }
    // Read again: some rows existed before, or other transactions created them meanwhile.
    let ours: HashSet<_> = rows.iter().map(|row| row.ordinal).collect();
    let (made, known): (Vec<_>, Vec<_>) =
        with_ids(txn, all).await?.into_iter().partition(|row| ours.contains(&row.ordinal));
    let by_id: HashMap<_, _> = new.iter().map(|new| (new.id.uuid(), new)).collect();
    let owned = match first.owner {
        Some(build) => owned_by(txn, build, &known).await?,
        None => HashSet::new(),
    };
    for row in &known {
        if let Some(new) = by_id.get(&row.artifact_id) {
            check_repeat(new, row, owned.contains(&row.artifact_id))?;
        }
    }
    if let Some(build) = first.owner {
        builds::add(txn, build, made.iter().map(|row| row.artifact_id)).await?;
    }
    Ok(())
}

/// Returns the artifacts that a build owns, among `rows`.
async fn owned_by(
    txn: &DatabaseTransaction,
    build: BuildId,
    rows: &[artifact::Model],
) -> Result<HashSet<Uuid>, DbErr> {
    let owned: Vec<Uuid> = owner::Entity::find()
        .select_only()
        .column(owner::Column::ArtifactId)
        .filter(owner::Column::BuildId.eq(build.uuid()))
        .filter(owner::Column::ArtifactId.is_in(rows.iter().map(|row| row.artifact_id)))
        .into_tuple()
        .all(txn)
        .await?;
    Ok(owned.into_iter().collect())
}

/// Returns whether the build named by `new` owns the artifact.
async fn is_owned(txn: &DatabaseTransaction, new: &NewArtifact) -> Result<bool, DbErr> {
    let Some(build) = new.owner else { return Ok(false) };
    Ok(owner::Entity::find_by_id((new.id.uuid(), build.uuid())).one(txn).await?.is_some())
}

/// Checks that a repeated call has the same properties as the first one. `is_owned`: whether the
/// named build owns the artifact.
fn check_repeat(new: &NewArtifact, row: &artifact::Model, is_owned: bool) -> Result<(), CreateError> {
    let owned = match new.owner {
        None => !row.had_owner,
        Some(_) => is_owned,
    };
    // An artifact that was created open may have been sealed with any bytes.
    let of_same_tree = match &new.tree {
        None => !row.in_store,
        Some(tree) => row.in_store && row.digest.as_deref() == Some(tree.digest.as_bytes()),
    };
    let same = row.team == new.team && row.state != ArtifactState::Deleting && owned && of_same_tree;
    if same { Ok(()) } else { Err(CreateError::Exists(new.id)) }
}

/// Returns the row of an open artifact without an owner.
pub(crate) fn unowned(id: ArtifactId, team: &str, now: Timestamp) -> artifact::Model {
    let new = NewArtifact { id, team: team.to_owned(), label: String::new(), owner: None, tree: None };
    first_row(&new, now)
}

fn first_row(new: &NewArtifact, now: Timestamp) -> artifact::Model {
    let tree = new.tree.as_ref();
    artifact::Model {
        artifact_id: new.id.uuid(),
        ordinal: Uuid::now_v7(),
        team: new.team.clone(),
        label: new.label.clone(),
        state: if tree.is_some() { ArtifactState::Sealed } else { ArtifactState::Open },
        digest: tree.map(|tree| tree.digest.as_bytes().to_vec()),
        size_bytes: tree.map_or(0, |tree| units::size_column(tree.size_bytes)),
        had_owner: new.owner.is_some(),
        created_at: now.0,
        marked_at: None,
        mark_reason: None,
        kept_until: None,
        // An owner schedules the check when it lets go.
        due_at: new.owner.is_none().then_some(now.0),
        in_store: tree.is_some(),
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdoptError {
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while finding an artifact by its digest")]
    Database(#[from] DbErr),
}

/// Finds a sealed artifact of `team` with these bytes, and gives it `owner`.
///
/// Its bytes must be in the store, or in a confirmed replica on a worker that is not in `without`.
///
/// Other users of the artifact lose nothing. An artifact that never had an owner stays as long as
/// before. Without an `owner` it stays as long as a new artifact.
pub(crate) async fn adopt_by_digest(
    txn: &DatabaseTransaction,
    team: &str,
    digest: Digest,
    owner: Option<BuildId>,
    without: &[WorkerId],
    now: Timestamp,
    policy: &Policy,
) -> Result<Option<LocatedArtifact>, AdoptError> {
    if let Some(build) = owner {
        builds::lock_live(txn, build, team).await?;
    }
    // The newest artifacts are the likeliest to have a replica.
    let candidates = artifact::Entity::find()
        .filter(artifact::Column::Team.eq(team))
        .filter(artifact::Column::Digest.eq(digest.as_bytes()))
        .filter(artifact::Column::State.eq(ArtifactState::Sealed))
        .order_by_desc(artifact::Column::Ordinal)
        .limit(10)
        .lock_exclusive()
        .all(txn)
        .await?;
    let mut replicas = replicas_of(txn, &candidates, "state = 'created'").await?;
    for row in candidates {
        let mut replicas = replicas.remove(&row.artifact_id).unwrap_or_default();
        replicas.retain(|replica| !without.contains(&replica.worker));
        let located = LocatedArtifact { artifact: row, replicas };
        if !located.has_bytes() {
            continue;
        }
        let row = &located.artifact;
        let stays = match owner {
            None => Some(now + policy.unowned_ttl),
            Some(_) if row.had_owner => None,
            Some(_) => Some(Timestamp(row.created_at) + policy.unowned_ttl),
        };
        if let Some(until) = stays.filter(|until| row.kept_until.is_none_or(|kept| kept < until.0)) {
            artifact::Entity::update_many()
                .col_expr(artifact::Column::KeptUntil, Expr::value(until.0))
                .filter(artifact::Column::ArtifactId.eq(row.artifact_id))
                .exec(txn)
                .await?;
        }
        if let Some(build) = owner {
            builds::add(txn, build, [row.artifact_id]).await?;
        }
        return Ok(Some(located));
    }
    Ok(None)
}
