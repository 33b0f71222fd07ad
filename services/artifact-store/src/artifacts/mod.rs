//! Artifacts: worker-independent names for bytes.
//!
//! ```text
//! open ──bytes are final──▶ sealed
//!   └───────marked─────────▶ deleting ◀──marked── sealed
//!                               └──volumes forgotten, tombstone over──▶ (gone)
//! ```
//!
//! A settled output begins sealed, and so does what is made from a small tree ([`crate::artifacts::inline`]). What is uploaded is sealed by its
//! commit ([`crate::artifacts::replicas`]), what a worker brings along by its gateway ([`crate::inventory::imports`]). Invariant: a sealed artifact's digest and size
//! never change; every UPDATE that seals is guarded by `state = 'open'`.

pub(crate) mod access;
pub(crate) mod inline;
mod lookup;
pub(crate) mod replicas;
pub(crate) mod restore;

use std::collections::{HashMap, HashSet};

use domain::{ArtifactId, BuildId, Digest, Timestamp, VolumeHandle, WorkerId};
use sea_orm::sea_query::{Condition, Expr, ExprTrait};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult,
    IntoActiveModel, PaginatorTrait, QueryFilter, QueryOrder, QuerySelect, QueryTrait, Select, Statement,
};
use uuid::Uuid;

pub(crate) use self::lookup::Locating;
use crate::artifacts::access::usable_by;
use crate::artifacts::inline::NewTree;
use crate::builds::{self, OwnerEnded};
use crate::db::entity::{ALL_TEAMS, ArtifactState, Purpose, artifact, owner, volume};
use crate::db::{ids, units, volumes};
use crate::marks::references::{self, Keepers};
use crate::marks::sweep_queue;
use crate::policy::garbage::{self, Policy};

/// How many of the things that keep an artifact are named.
const MOST_KEEPERS: u64 = 50;

/// Where an artifact's bytes are.
#[derive(Debug, Clone)]
pub(crate) struct Located {
    pub(crate) artifact: artifact::Model,
    /// The complete replicas, the oldest first.
    pub(crate) replicas: Vec<Replica>,
}

impl Located {
    /// Whether its bytes are somewhere, as far as we know.
    pub(crate) fn has_bytes(&self) -> bool {
        !self.replicas.is_empty() || self.artifact.in_store
    }
}

/// A volume that holds an artifact's bytes.
#[derive(Debug, Clone)]
pub(crate) struct Replica {
    pub(crate) handle: VolumeHandle,
    pub(crate) worker: WorkerId,
    pub(crate) size_bytes: u64,
    pub(crate) verified: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    #[error("artifact {0} exists already and is another")]
    Exists(ArtifactId),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while making an artifact")]
    Database(#[from] DbErr),
}

/// What an artifact shall be.
#[derive(Debug, Clone)]
pub(crate) struct NewArtifact {
    pub(crate) id: ArtifactId,
    pub(crate) team: String,
    pub(crate) label: String,
    pub(crate) owner: Option<BuildId>,
    /// What it is. `None`: not known yet.
    pub(crate) tree: Option<NewTree>,
}

/// Makes an artifact: open, or sealed with its tree. The same again changes nothing.
pub(crate) async fn create(
    txn: &DatabaseTransaction,
    new: &NewArtifact,
    now: Timestamp,
) -> Result<(), CreateError> {
    if let Some(row) = artifact::Entity::find_by_id(new.id.uuid()).one(txn).await? {
        return repeated(new, &row, is_owned(txn, new).await?);
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
        // Another transaction made it since we looked.
        let row = artifact::Entity::find_by_id(new.id.uuid()).one(txn).await?;
        return match row {
            Some(row) => repeated(new, &row, is_owned(txn, new).await?),
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

/// Makes artifacts of a team with one owner or none, all or none of them: each with its label, open and without bytes. The same again changes
/// nothing.
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
        // In one order, so that no two transactions wait for each other.
        rows.sort_unstable_by_key(|row| row.artifact_id);
        let made = rows.iter().map(|row| row.clone().into_active_model().reset_all());
        artifact::Entity::insert_many(made)
            .on_conflict_do_nothing_on([artifact::Column::ArtifactId])
            .exec_without_returning(txn)
            .await?;
    }
    // As they are now: some may have been there before, or have been made by others since we looked.
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
            repeated(new, row, owned.contains(&row.artifact_id))?;
        }
    }
    if let Some(build) = first.owner {
        builds::add(txn, build, made.iter().map(|row| row.artifact_id)).await?;
    }
    Ok(())
}

async fn with_ids(
    txn: &DatabaseTransaction,
    ids: impl IntoIterator<Item = Uuid>,
) -> Result<Vec<artifact::Model>, DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!("SELECT * FROM artifacts WHERE artifact_id IN ({})", ids::query(backend, 1));
    let statement = Statement::from_sql_and_values(backend, sql, [ids::value(backend, ids)]);
    artifact::Model::find_by_statement(statement).all(txn).await
}

/// Which of some artifacts a build owns.
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

/// Whether the build that a new artifact names owns it.
async fn is_owned(txn: &DatabaseTransaction, new: &NewArtifact) -> Result<bool, DbErr> {
    let Some(build) = new.owner else { return Ok(false) };
    Ok(owner::Entity::find_by_id((new.id.uuid(), build.uuid())).one(txn).await?.is_some())
}

/// Whether a repeated call says the same as the first. `is_owned`: by the build that it names.
fn repeated(new: &NewArtifact, row: &artifact::Model, is_owned: bool) -> Result<(), CreateError> {
    let owned = match new.owner {
        None => !row.had_owner,
        Some(_) => is_owned,
    };
    // What was made open may have become anything since.
    let of_same_tree = match &new.tree {
        None => !row.in_store,
        Some(tree) => row.in_store && row.digest.as_deref() == Some(tree.digest.as_bytes()),
    };
    let same = row.team == new.team && row.state != ArtifactState::Deleting && owned && of_same_tree;
    if same { Ok(()) } else { Err(CreateError::Exists(new.id)) }
}

/// The row of an artifact that has no owner yet, open and without bytes.
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
        marked_why: None,
        kept_until: None,
        // An owner says when it lets go.
        look_at: new.owner.is_none().then_some(now.0),
        in_store: tree.is_some(),
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdoptError {
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while looking for an artifact by its digest")]
    Database(#[from] DbErr),
}

/// Looks for a sealed artifact of `team` with these bytes, which are in the store or in a replica that was not lost, on none of the workers
/// `without`, and gives it `owner`.
///
/// No holder of its id loses by that: what had no owner stays as long as it would have, and without an owner it stays as long as one that is made now.
pub(crate) async fn adopt_by_digest(
    txn: &DatabaseTransaction,
    team: &str,
    digest: Digest,
    owner: Option<BuildId>,
    without: &[WorkerId],
    now: Timestamp,
    policy: &Policy,
) -> Result<Option<Located>, AdoptError> {
    if let Some(build) = owner {
        builds::lock_live(txn, build, team).await?;
    }
    // The newest few: they are the likeliest to have a replica left.
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
        let located = Located { artifact: row, replicas };
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

/// An artifact of `team`, or of no team, with where it is and what keeps it. `None`: there is none.
pub(crate) async fn get(
    conn: &impl ConnectionTrait,
    team: &str,
    id: ArtifactId,
    now: Timestamp,
    policy: &Policy,
) -> Result<Option<(Located, Keepers)>, DbErr> {
    let rows = artifact::Entity::find_by_id(id.uuid())
        .filter(artifact::Column::Team.is_in([team, ALL_TEAMS]))
        .all(conn)
        .await?;
    Ok(describe(conn, rows, now, policy).await?.pop())
}

/// A page of the artifacts of `team`, the newest first.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    team: &str,
    state: Option<ArtifactState>,
    page: rpc::page::Page,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<(Located, Keepers)>, DbErr> {
    let mut query = of_team(team).order_by_desc(artifact::Column::Ordinal).limit(page.size);
    if let Some(state) = state {
        query = query.filter(artifact::Column::State.eq(state));
    }
    if let Some(after) = page.after {
        query = query.filter(artifact::Column::Ordinal.lt(after));
    }
    let rows = query.all(conn).await?;
    describe(conn, rows, now, policy).await
}

/// A page of the sealed artifacts of `team` that something keeps and that have their bytes neither in the store nor on any other worker than these,
/// the newest first; and the ordinals of all that were looked at.
pub(crate) async fn list_at_risk(
    conn: &impl ConnectionTrait,
    team: &str,
    workers: &[WorkerId],
    page: rpc::page::Page,
    now: Timestamp,
    policy: &Policy,
) -> Result<(Vec<(Located, Keepers)>, Vec<Uuid>), DbErr> {
    let elsewhere = volume::Entity::find()
        .select_only()
        .column(volume::Column::Handle)
        .filter(
            Expr::col((volume::Entity, volume::Column::ArtifactId))
                .equals((artifact::Entity, artifact::Column::ArtifactId)),
        )
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(Expr::cust(volumes::COMPLETE))
        // One that is not confirmed is none to count on.
        .filter(Expr::cust("volumes.state = 'created'"))
        .filter(volume::Column::WorkerId.is_not_in(workers.iter().map(|worker| worker.uuid())))
        .into_query();
    let mut query = of_team(team)
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

/// Artifacts of any team, with where they are and what keeps them. Unknown ones are left out.
pub(crate) async fn of_ids(
    conn: &impl ConnectionTrait,
    ids: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<(Located, Keepers)>, DbErr> {
    let rows = artifact::Entity::find().filter(artifact::Column::ArtifactId.is_in(ids)).all(conn).await?;
    describe(conn, rows, now, policy).await
}

fn of_team(team: &str) -> Select<artifact::Entity> {
    artifact::Entity::find().filter(artifact::Column::Team.eq(team))
}

/// Those of some artifacts that a team may use, and that `narrowed` leaves. Its own are looked for alone: to plan for what else it may use one
/// ([`usable_by`]) takes longer than to find them, and a team uses others seldom.
pub(crate) async fn usable(
    conn: &impl ConnectionTrait,
    team: &str,
    ids: &[ArtifactId],
    narrowed: impl Fn(Select<artifact::Entity>) -> Select<artifact::Entity>,
) -> Result<Vec<artifact::Model>, DbErr> {
    let found = async |ids: &[ArtifactId], allowed: Condition| {
        narrowed(artifact::Entity::find().filter(these(conn, ids)).filter(allowed)).all(conn).await
    };
    let mut rows = found(ids, own(team)).await?;
    let known: HashSet<_> = rows.iter().map(|row| row.artifact_id).collect();
    let others: Vec<_> = ids.iter().copied().filter(|id| !known.contains(&id.uuid())).collect();
    if !others.is_empty() {
        rows.extend(found(&others, usable_by(team)).await?);
    }
    Ok(rows)
}

/// The same, of which `locked` locks the rows: with one statement, so that it does in one order.
pub(crate) async fn lock_usable(
    txn: &DatabaseTransaction,
    team: &str,
    ids: &[ArtifactId],
    locked: impl Fn(Select<artifact::Entity>) -> Select<artifact::Entity>,
) -> Result<Vec<artifact::Model>, DbErr> {
    let its_own = artifact::Entity::find().filter(these(txn, ids)).filter(own(team)).count(txn).await?;
    let distinct = ids.iter().collect::<HashSet<_>>().len();
    let allowed = if its_own == distinct as u64 { own(team) } else { usable_by(team) };
    locked(artifact::Entity::find().filter(these(txn, ids)).filter(allowed)).all(txn).await
}

fn these(conn: &impl ConnectionTrait, ids: &[ArtifactId]) -> Expr {
    ids::among(conn.get_database_backend(), "artifact_id", ids.iter().map(|id| id.uuid()))
}

/// Its own, which never are another team's.
fn own(team: &str) -> Condition {
    Condition::all().add(artifact::Column::Team.eq(team))
}

/// Adds to each row where it is and what keeps it, by the same rules that mark it.
async fn describe(
    conn: &impl ConnectionTrait,
    rows: Vec<artifact::Model>,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<(Located, Keepers)>, DbErr> {
    let live = rows.iter().filter(|row| row.state != ArtifactState::Deleting);
    let ids: Vec<_> = live.map(|row| row.artifact_id).collect();
    let mut keepers = references::keepers(conn, &ids, now, MOST_KEEPERS).await?;
    let located = locate_rows(conn, rows).await?;
    let described = located.into_iter().map(|located| {
        let row = &located.artifact;
        let mut keepers = keepers.remove(&row.artifact_id).unwrap_or_default();
        if keepers.total == 0
            && row.state != ArtifactState::Deleting
            && let Some(keeper) = garbage::unowned_keeper(&references::unheld(&row.into()), now, policy)
        {
            keepers = Keepers { first: vec![keeper], total: 1 };
        }
        (located, keepers)
    });
    Ok(described.collect())
}

/// Where the bytes of artifacts are that `team` may use, in the order asked. Unknown and deleted ones are left out.
pub(crate) async fn locate(
    conn: &impl ConnectionTrait,
    team: &str,
    ids: &[ArtifactId],
) -> Result<Vec<Located>, DbErr> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let rows = usable(conn, team, ids, |rows| rows.filter(Expr::cust("state <> 'deleting'"))).await?;
    let located = locate_rows(conn, rows).await?.into_iter();
    Ok(in_order(ids, &located.map(|one| (one.artifact.artifact_id, one)).collect()))
}

/// Those that are known of `asked`, each once, in that order.
fn in_order(asked: &[ArtifactId], known: &HashMap<Uuid, Located>) -> Vec<Located> {
    let mut seen = HashSet::new();
    let each_once = asked.iter().filter(|id| seen.insert(**id));
    each_once.filter_map(|id| known.get(&id.uuid()).cloned()).collect()
}

pub(crate) async fn locate_rows(
    conn: &impl ConnectionTrait,
    rows: Vec<artifact::Model>,
) -> Result<Vec<Located>, DbErr> {
    let (deleted, live): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.state == ArtifactState::Deleting);
    let mut replicas = replicas_of(conn, live, volumes::PRESENT).await?;
    // Those that go with it are there no more.
    let unmarked = format!("{} AND {}", volumes::PRESENT, sweep_queue::without("volumes"));
    replicas.extend(replicas_of(conn, deleted, &unmarked).await?);
    let located = rows.into_iter().map(|row| {
        let replicas = replicas.remove(&row.artifact_id).unwrap_or_default();
        Located { artifact: row, replicas }
    });
    Ok(located.collect())
}

/// Those of the complete replicas of artifacts of which the condition `those` is true.
async fn replicas_of(
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
