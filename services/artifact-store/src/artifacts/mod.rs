//! Artifacts: file trees with an id that does not depend on a worker.
//!
//! ```text
//! open ──bytes are final──▶ sealed
//!   └───────marked─────────▶ deleting ◀──marked── sealed
//!                               └──volumes forgotten, tombstone expired──▶ (gone)
//! ```
//!
//! The output of a settled workload is sealed from its creation, and so is an artifact of a small
//! tree ([`crate::artifacts::inline`]). The commit of an upload seals its artifact
//! ([`crate::artifacts::replicas`]). A gateway seals the artifact of an import
//! ([`crate::inventory::imports`]).
//!
//! Invariant: the digest and size of a sealed artifact never change. Every UPDATE that seals is
//! guarded by `state = 'open'`.

pub(crate) mod access;
mod create;
pub(crate) mod inline;
mod lookup;
pub(crate) mod replicas;
pub(crate) mod restore;

use std::collections::{HashMap, HashSet};

use domain::{ArtifactId, Timestamp, VolumeHandle, WorkerId};
use sea_orm::sea_query::{Condition, Expr, ExprTrait};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, PaginatorTrait,
    QueryFilter, QueryOrder, QuerySelect, QueryTrait, Select, Statement,
};
use uuid::Uuid;

pub(crate) use self::lookup::ArtifactLocator;
use crate::artifacts::access::usable_by;
pub(crate) use crate::artifacts::create::{
    AdoptError, CreateError, NewArtifact, adopt_by_digest, create, create_all, unowned,
};
use crate::db::entity::{ALL_TEAMS, ArtifactState, Purpose, artifact, volume};
use crate::db::{ids, units, volumes};
use crate::marks::references::{self, Keepers};
use crate::marks::sweep_queue;
use crate::policy::garbage::{self, Policy};

/// Maximum number of references listed per artifact.
const MAX_KEEPERS: u64 = 50;

/// An artifact with the locations of its bytes.
#[derive(Debug, Clone)]
pub(crate) struct LocatedArtifact {
    pub(crate) artifact: artifact::Model,
    /// The complete replicas, oldest first.
    pub(crate) replicas: Vec<Replica>,
}

impl LocatedArtifact {
    /// Returns whether its bytes exist, as far as the store knows.
    pub(crate) fn has_bytes(&self) -> bool {
        !self.replicas.is_empty() || self.artifact.in_store
    }
}

/// A complete volume with an artifact's bytes.
#[derive(Debug, Clone)]
pub(crate) struct Replica {
    pub(crate) handle: VolumeHandle,
    pub(crate) worker: WorkerId,
    pub(crate) size_bytes: u64,
    pub(crate) verified: bool,
}

pub(super) async fn with_ids(
    txn: &DatabaseTransaction,
    ids: impl IntoIterator<Item = Uuid>,
) -> Result<Vec<artifact::Model>, DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!("SELECT * FROM artifacts WHERE artifact_id IN ({})", ids::query(backend, 1));
    let statement = Statement::from_sql_and_values(backend, sql, [ids::value(backend, ids)]);
    artifact::Model::find_by_statement(statement).all(txn).await
}

/// Returns an artifact of `team` or of all teams, with its locations and the references that keep
/// it.
pub(crate) async fn get(
    conn: &impl ConnectionTrait,
    team: &str,
    id: ArtifactId,
    now: Timestamp,
    policy: &Policy,
) -> Result<Option<(LocatedArtifact, Keepers)>, DbErr> {
    let rows = artifact::Entity::find_by_id(id.uuid())
        .filter(artifact::Column::Team.is_in([team, ALL_TEAMS]))
        .all(conn)
        .await?;
    Ok(describe(conn, rows, now, policy).await?.pop())
}

/// Returns a page of the artifacts of `team`, newest first.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    team: &str,
    state: Option<ArtifactState>,
    ids: Option<(Uuid, Uuid)>,
    page: rpc::page::Page,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<(LocatedArtifact, Keepers)>, DbErr> {
    let mut query = of_team(team).order_by_desc(artifact::Column::Ordinal).limit(page.size);
    if let Some((first, last)) = ids {
        query = query.filter(artifact::Column::ArtifactId.between(first, last));
    }
    if let Some(state) = state {
        query = query.filter(artifact::Column::State.eq(state));
    }
    if let Some(after) = page.after {
        query = query.filter(artifact::Column::Ordinal.lt(after));
    }
    let rows = query.all(conn).await?;
    describe(conn, rows, now, policy).await
}

/// Returns a page of the artifacts of `team` that would lose their last bytes with `workers`,
/// newest first.
///
/// These are sealed, kept by something, and have bytes neither in the store nor on other workers.
/// Also returns the ordinals of all rows that were checked.
pub(crate) async fn list_at_risk(
    conn: &impl ConnectionTrait,
    team: Option<&str>,
    workers: &[WorkerId],
    page: rpc::page::Page,
    now: Timestamp,
    policy: &Policy,
) -> Result<(Vec<(LocatedArtifact, Keepers)>, Vec<Uuid>), DbErr> {
    let elsewhere = volume::Entity::find()
        .select_only()
        .column(volume::Column::Handle)
        .filter(
            Expr::col((volume::Entity, volume::Column::ArtifactId))
                .equals((artifact::Entity, artifact::Column::ArtifactId)),
        )
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(Expr::cust(volumes::COMPLETE))
        // An unconfirmed replica may be lost.
        .filter(Expr::cust("volumes.state = 'created'"))
        .filter(volume::Column::WorkerId.is_not_in(workers.iter().map(|worker| worker.uuid())))
        .into_query();
    let mut query = team
        .map_or_else(artifact::Entity::find, of_team)
        .filter(artifact::Column::State.eq(ArtifactState::Sealed))
        .filter(artifact::Column::InStore.eq(false))
        .filter(Expr::exists(elsewhere).not())
        .order_by_desc(artifact::Column::Ordinal)
        .limit(page.size);
    if let Some(after) = page.after {
        query = query.filter(artifact::Column::Ordinal.lt(after));
    }
    let rows = query.all(conn).await?;
    let looked_at = rows.iter().map(|row| row.ordinal).collect();
    let mut described = describe(conn, rows, now, policy).await?;
    described.retain(|(_, keepers)| keepers.total > 0);
    Ok((described, looked_at))
}

/// Returns artifacts of any team, with their locations and the references that keep them. Unknown
/// ids are omitted.
pub(crate) async fn of_ids(
    conn: &impl ConnectionTrait,
    ids: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<(LocatedArtifact, Keepers)>, DbErr> {
    let rows = artifact::Entity::find().filter(artifact::Column::ArtifactId.is_in(ids)).all(conn).await?;
    describe(conn, rows, now, policy).await
}

fn of_team(team: &str) -> Select<artifact::Entity> {
    artifact::Entity::find().filter(artifact::Column::Team.eq(team))
}

/// Returns the artifacts among `ids` that `team` may use and that pass the filter `narrowed`.
///
/// The first query covers only the team's own artifacts. Planning the query of other usable
/// artifacts ([`usable_by`]) takes longer than running it, and it is seldom needed.
pub(crate) async fn usable(
    conn: &impl ConnectionTrait,
    team: &str,
    ids: &[ArtifactId],
    narrowed: impl Fn(Select<artifact::Entity>) -> Select<artifact::Entity>,
) -> Result<Vec<artifact::Model>, DbErr> {
    let found = async |ids: &[ArtifactId], allowed: Condition| {
        narrowed(artifact::Entity::find().filter(with_ids_condition(conn, ids)).filter(allowed))
            .all(conn)
            .await
    };
    let mut rows = found(ids, own(team)).await?;
    let known: HashSet<_> = rows.iter().map(|row| row.artifact_id).collect();
    let others: Vec<_> = ids.iter().copied().filter(|id| !known.contains(&id.uuid())).collect();
    if !others.is_empty() {
        rows.extend(found(&others, usable_by(team)).await?);
    }
    Ok(rows)
}

/// Returns the artifacts among `ids` that `team` may use, locked by `locked`. One statement locks
/// all rows, so that their order is fixed.
pub(crate) async fn lock_usable(
    txn: &DatabaseTransaction,
    team: &str,
    ids: &[ArtifactId],
    locked: impl Fn(Select<artifact::Entity>) -> Select<artifact::Entity>,
) -> Result<Vec<artifact::Model>, DbErr> {
    let its_own =
        artifact::Entity::find().filter(with_ids_condition(txn, ids)).filter(own(team)).count(txn).await?;
    let distinct = ids.iter().collect::<HashSet<_>>().len();
    let allowed = if its_own == distinct as u64 { own(team) } else { usable_by(team) };
    locked(artifact::Entity::find().filter(with_ids_condition(txn, ids)).filter(allowed)).all(txn).await
}

fn with_ids_condition(conn: &impl ConnectionTrait, ids: &[ArtifactId]) -> Expr {
    ids::among(conn.get_database_backend(), "artifact_id", ids.iter().map(|id| id.uuid()))
}

/// Returns the condition that an artifact belongs to `team`.
fn own(team: &str) -> Condition {
    Condition::all().add(artifact::Column::Team.eq(team))
}

/// Adds locations and references to rows, by the rules that mark artifacts.
async fn describe(
    conn: &impl ConnectionTrait,
    rows: Vec<artifact::Model>,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<(LocatedArtifact, Keepers)>, DbErr> {
    let live = rows.iter().filter(|row| row.state != ArtifactState::Deleting);
    let ids: Vec<_> = live.map(|row| row.artifact_id).collect();
    let mut keepers = references::keepers(conn, &ids, now, MAX_KEEPERS).await?;
    let located = locate_rows(conn, rows).await?;
    let described = located.into_iter().map(|located| {
        let row = &located.artifact;
        let mut keepers = keepers.remove(&row.artifact_id).unwrap_or_default();
        if keepers.total == 0
            && row.state != ArtifactState::Deleting
            && let Some(keeper) =
                garbage::unowned_keeper(&references::without_references(&row.into()), now, policy)
        {
            keepers = Keepers { first: vec![keeper], total: 1 };
        }
        (located, keepers)
    });
    Ok(described.collect())
}

/// Returns the artifacts among `ids` that `team` may use, with their locations, in the order of
/// `ids`. Unknown and deleted ones are omitted.
pub(crate) async fn locate(
    conn: &impl ConnectionTrait,
    team: &str,
    ids: &[ArtifactId],
) -> Result<Vec<LocatedArtifact>, DbErr> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let rows = usable(conn, team, ids, |rows| rows.filter(Expr::cust("state <> 'deleting'"))).await?;
    let located = locate_rows(conn, rows).await?.into_iter();
    Ok(in_order(ids, &located.map(|one| (one.artifact.artifact_id, one)).collect()))
}

/// Returns the artifacts of `asked` that are in `known`, each once, in that order.
fn in_order(asked: &[ArtifactId], known: &HashMap<Uuid, LocatedArtifact>) -> Vec<LocatedArtifact> {
    let mut seen = HashSet::new();
    let each_once = asked.iter().filter(|id| seen.insert(**id));
    each_once.filter_map(|id| known.get(&id.uuid()).cloned()).collect()
}

pub(crate) async fn locate_rows(
    conn: &impl ConnectionTrait,
    rows: Vec<artifact::Model>,
) -> Result<Vec<LocatedArtifact>, DbErr> {
    let (deleted, live): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.state == ArtifactState::Deleting);
    let mut replicas = replicas_of(conn, live, volumes::PRESENT).await?;
    // Replicas that are marked with their artifact do not count.
    let unmarked = format!("{} AND {}", volumes::PRESENT, sweep_queue::unmarked("volumes"));
    replicas.extend(replicas_of(conn, deleted, &unmarked).await?);
    let located = rows.into_iter().map(|row| {
        let replicas = replicas.remove(&row.artifact_id).unwrap_or_default();
        LocatedArtifact { artifact: row, replicas }
    });
    Ok(located.collect())
}

/// Returns the complete replicas of artifacts that satisfy the condition `those`, by artifact.
pub(super) async fn replicas_of(
    conn: &impl ConnectionTrait,
    artifacts: impl IntoIterator<Item = &artifact::Model>,
    those: &str,
) -> Result<HashMap<Uuid, Vec<Replica>>, DbErr> {
    let ids: Vec<_> = artifacts.into_iter().map(|row| row.artifact_id).collect();
    if ids.is_empty() {
        return Ok(HashMap::new());
    }
    let rows: Vec<(Uuid, Uuid, Uuid, i64, bool)> = volume::Entity::find()
        .select_only()
        .columns([
            volume::Column::Handle,
            volume::Column::ArtifactId,
            volume::Column::WorkerId,
            volume::Column::SizeBytes,
            volume::Column::Verified,
        ])
        .filter(ids::among(conn.get_database_backend(), "artifact_id", ids))
        .filter(Expr::cust("purpose = 'replica'"))
        .filter(Expr::cust(volumes::COMPLETE))
        .filter(Expr::cust(those.to_owned()))
        .order_by_asc(volume::Column::Handle)
        .into_tuple()
        .all(conn)
        .await?;
    let mut replicas: HashMap<_, Vec<_>> = HashMap::new();
    for (handle, artifact, worker, size_bytes, verified) in rows {
        replicas.entry(artifact).or_default().push(Replica {
            handle: VolumeHandle::from_uuid(handle),
            worker: WorkerId::from_uuid(worker),
            size_bytes: units::size(size_bytes),
            verified,
        });
    }
    Ok(replicas)
}
