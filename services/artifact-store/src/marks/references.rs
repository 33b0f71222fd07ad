//! References to artifacts and volumes, as facts for the garbage rules.
//!
//! The collector calls it, and so does all code that shows what keeps an artifact. The number of
//! statements does not depend on the number of rows.
//!
//! The query `holds!` lists all references to artifacts, each with its end if its row has it. The
//! rules of caches and volumes add the other ends ([`crate::explain`]).

use std::collections::{HashMap, HashSet};

use domain::{BuildId, CacheId, Timestamp, TransferId, VolumeHandle, WorkerId, WorkloadId};
use sea_orm::{ConnectionTrait, DbErr, FromQueryResult, Statement};
use uuid::Uuid;

use crate::db::entity::{ArtifactState, Purpose, artifact, volume};
use crate::db::ids;
use crate::marks::sweep_queue;
use crate::policy::garbage::{ArtifactFacts, HoldFlags, Keeper, KeeperKind, VolumeFacts, VolumeLifetime};

/// Condition that the build `b` keeps its artifacts and used caches at the instant `$1`. A build
/// whose term has expired keeps them until the collector ends it, because its caller may renew it
/// until then.
macro_rules! build_keeps {
    () => {
        "(b.kept_until IS NULL OR b.kept_until > $1)"
    };
}

pub(crate) use build_keeps;

/// Query of all references to the artifacts `ids` at the instant `$1`: artifact, kind, id, and end
/// if the row has it.
macro_rules! holds {
    () => {
        concat!(
            "
    SELECT o.artifact_id AS artifact_id, 'build' AS kind, b.build_id AS id, b.kept_until AS until
        FROM owners o JOIN builds b ON b.build_id = o.build_id
        WHERE o.artifact_id IN (SELECT id FROM ids) AND ",
            build_keeps!(),
            "
    UNION ALL
    SELECT c.artifact_id, 'resource cache', c.cache_id, CAST(NULL AS BIGINT)
        FROM resource_caches c WHERE c.artifact_id IN (SELECT id FROM ids)
    UNION ALL
    SELECT c.artifact_id, 'task cache', c.cache_id, CAST(NULL AS BIGINT)
        FROM task_caches c WHERE c.artifact_id IN (SELECT id FROM ids)
    UNION ALL
    SELECT t.artifact_id, 'base resource type', t.base_type_id, CAST(NULL AS BIGINT)
        FROM base_resource_types t WHERE t.artifact_id IN (SELECT id FROM ids)
    UNION ALL
    SELECT c.artifact_id, 'resource certs', c.worker_id, CAST(NULL AS BIGINT)
        FROM resource_certs c WHERE c.artifact_id IN (SELECT id FROM ids)
    UNION ALL
    SELECT p.artifact_id, 'pin', p.holder_id, CAST(NULL AS BIGINT)
        FROM pins p WHERE p.artifact_id IN (SELECT id FROM ids)
    UNION ALL
    SELECT v.from_artifact_id, 'volume', v.handle, CAST(NULL AS BIGINT)
        FROM volumes v
        WHERE v.from_artifact_id IN (SELECT id FROM ids) AND v.purpose <> 'replica'
          AND v.state NOT IN ('destroying', 'sweeping')
    UNION ALL
    SELECT v.artifact_id, CASE WHEN v.transfer_id IS NULL THEN 'import' ELSE 'transfer' END,
           COALESCE(v.transfer_id, v.handle), v.claimed_until
        FROM volumes v
        WHERE v.artifact_id IN (SELECT id FROM ids) AND v.complete = FALSE AND v.claimed_until > $1
          AND v.state NOT IN ('destroying', 'sweeping')"
        )
    };
}

/// Returns a statement about `ids`, which is value `$2`, at the instant `$1`.
pub(super) fn statement(
    conn: &impl ConnectionTrait,
    sql: &str,
    now: Timestamp,
    ids: impl IntoIterator<Item = Uuid>,
) -> Statement {
    let backend = conn.get_database_backend();
    let sql = format!("WITH ids AS ({}) {sql}", ids::query(backend, 2));
    Statement::from_sql_and_values(backend, sql, [now.0.into(), ids::value(backend, ids)])
}

/// Columns of an artifact that the rules need.
#[derive(Debug, Clone, Copy, FromQueryResult)]
pub(crate) struct ArtifactRow {
    pub(crate) artifact_id: Uuid,
    created_at: i64,
    had_owner: bool,
    kept_until: Option<i64>,
    pub(crate) due_at: Option<i64>,
    pub(crate) size_bytes: i64,
    pub(crate) state: ArtifactState,
}

impl ArtifactRow {
    /// List of the columns.
    pub(crate) const COLUMNS: &str =
        "artifact_id, created_at, had_owner, kept_until, due_at, size_bytes, state";
}

impl From<&artifact::Model> for ArtifactRow {
    fn from(row: &artifact::Model) -> Self {
        let artifact::Model { artifact_id, created_at, had_owner, kept_until, .. } = *row;
        let artifact::Model { due_at, size_bytes, state, .. } = *row;
        Self { artifact_id, created_at, had_owner, kept_until, due_at, size_bytes, state }
    }
}

/// A reference to an artifact, by kind.
#[derive(FromQueryResult)]
struct Hold {
    artifact_id: Uuid,
    kind: String,
}

/// Returns the facts about artifacts, in the order of `rows`.
pub(crate) async fn artifacts(
    conn: &impl ConnectionTrait,
    rows: &[ArtifactRow],
    now: Timestamp,
) -> Result<Vec<ArtifactFacts>, DbErr> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let ids = rows.iter().map(|row| row.artifact_id);
    let sql = concat!("SELECT DISTINCT h.artifact_id AS artifact_id, h.kind AS kind FROM (", holds!(), ") h");
    let holds = Hold::find_by_statement(statement(conn, sql, now, ids)).all(conn).await?;
    let mut facts = with_references(rows, holds.iter().map(|hold| (hold.artifact_id, hold.kind.as_str())));
    let given_up = given_up(conn, rows, now).await?;
    for (row, facts) in rows.iter().zip(&mut facts) {
        facts.given_up = given_up.contains(&row.artifact_id);
    }
    Ok(facts)
}

/// Returns the open artifacts that nothing can seal any more: the claim of a transfer that filled
/// them has expired, and no other volume has their bytes or may get them.
async fn given_up(
    conn: &impl ConnectionTrait,
    rows: &[ArtifactRow],
    now: Timestamp,
) -> Result<HashSet<Uuid>, DbErr> {
    let open: Vec<_> =
        rows.iter().filter(|row| row.state == ArtifactState::Open).map(|row| row.artifact_id).collect();
    if open.is_empty() {
        return Ok(HashSet::new());
    }
    let sql = "SELECT DISTINCT v.artifact_id AS id FROM volumes v
        WHERE v.artifact_id IN (SELECT id FROM ids) AND v.purpose = 'replica' AND v.transfer_id IS NOT NULL
          AND v.complete = FALSE AND v.claimed_until <= $1
          AND NOT EXISTS (
            SELECT 1 FROM volumes o
                WHERE o.artifact_id = v.artifact_id AND o.state NOT IN ('destroying', 'sweeping')
                  AND (o.purpose <> 'replica' OR o.complete = TRUE OR o.claimed_until > $1))";
    query_ids(conn, statement(conn, sql, now, open)).await
}

/// Returns the facts about artifacts with the given references.
fn with_references<'a>(
    rows: &[ArtifactRow],
    holds: impl Iterator<Item = (Uuid, &'a str)>,
) -> Vec<ArtifactFacts> {
    let mut held: HashMap<Uuid, HoldFlags> = HashMap::new();
    for (artifact, kind) in holds {
        let held = held.entry(artifact).or_default();
        match kind {
            "pin" => held.pinned = true,
            "volume" => held.used = true,
            "transfer" | "import" => held.transferred = true,
            _ => held.owned = true,
        }
    }
    let facts = rows.iter().map(|row| ArtifactFacts {
        held: held.get(&row.artifact_id).copied().unwrap_or_default(),
        ..without_references(row)
    });
    facts.collect()
}

/// Returns the facts about an artifact without its references.
pub(crate) fn without_references(row: &ArtifactRow) -> ArtifactFacts {
    ArtifactFacts {
        created_at: Timestamp(row.created_at),
        had_owner: row.had_owner,
        kept_until: row.kept_until.map(Timestamp),
        given_up: false,
        held: HoldFlags::default(),
    }
}

/// References that keep an artifact: the first few, and their number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keepers {
    pub(crate) first: Vec<Keeper>,
    pub(crate) total: u64,
}

/// Returns the references that keep artifacts, by artifact id. Each list has at most `most`
/// elements.
pub(crate) async fn keepers(
    conn: &impl ConnectionTrait,
    artifacts: &[Uuid],
    now: Timestamp,
    most: u64,
) -> Result<HashMap<Uuid, Keepers>, DbErr> {
    #[derive(FromQueryResult)]
    struct Hold {
        artifact_id: Uuid,
        kind: String,
        id: Uuid,
        until: Option<i64>,
        total: i64,
    }

    if artifacts.is_empty() {
        return Ok(HashMap::new());
    }
    let holds = holds!();
    let sql = format!(
        "SELECT n.artifact_id AS artifact_id, n.kind AS kind, n.id AS id, n.until AS until, n.total AS total
         FROM (SELECT h.artifact_id AS artifact_id, h.kind AS kind, h.id AS id, h.until AS until,
                      COUNT(*) OVER (PARTITION BY h.artifact_id) AS total,
                      ROW_NUMBER() OVER (PARTITION BY h.artifact_id ORDER BY h.kind, h.id) AS place
               FROM ({holds}) h) n
         WHERE n.place <= {most} ORDER BY n.artifact_id, n.place"
    );
    let statement = statement(conn, &sql, now, artifacts.iter().copied());
    let mut keepers: HashMap<_, Keepers> = HashMap::new();
    for hold in Hold::find_by_statement(statement).all(conn).await? {
        let of_artifact = keepers.entry(hold.artifact_id).or_default();
        of_artifact.total = u64::try_from(hold.total).unwrap_or(0);
        let kind = match hold.kind.as_str() {
            "pin" => KeeperKind::Pin(WorkloadId::from_uuid(hold.id)),
            "volume" => KeeperKind::Volume(VolumeHandle::from_uuid(hold.id)),
            "transfer" => KeeperKind::Transfer(TransferId::from_uuid(hold.id)),
            "import" => KeeperKind::Import(VolumeHandle::from_uuid(hold.id)),
            "resource cache" => KeeperKind::ResourceCache(CacheId::from_uuid(hold.id)),
            "task cache" => KeeperKind::TaskCache(CacheId::from_uuid(hold.id)),
            "base resource type" => KeeperKind::BaseResourceType(hold.id),
            "resource certs" => KeeperKind::ResourceCerts(WorkerId::from_uuid(hold.id)),
            _ => KeeperKind::Build(BuildId::from_uuid(hold.id)),
        };
        of_artifact.first.push(Keeper { kind, until: hold.until.map(Timestamp) });
    }
    Ok(keepers)
}

/// Returns the first `most` volumes that are children of a volume and not garbage, and their
/// number.
pub(crate) async fn children(conn: &impl ConnectionTrait, parent: Uuid, most: u64) -> Result<Keepers, DbErr> {
    #[derive(FromQueryResult)]
    struct Child {
        handle: Uuid,
        total: i64,
    }

    let sql = format!(
        "SELECT v.handle AS handle, COUNT(*) OVER () AS total FROM volumes v
         WHERE v.parent = $1 AND {} ORDER BY v.handle LIMIT {most}",
        sweep_queue::unmarked("v")
    );
    let of_parent = Statement::from_sql_and_values(conn.get_database_backend(), sql, [parent.into()]);
    let mut children = Keepers::default();
    for row in Child::find_by_statement(of_parent).all(conn).await? {
        children.total = u64::try_from(row.total).unwrap_or(0);
        let kind = KeeperKind::Volume(VolumeHandle::from_uuid(row.handle));
        children.first.push(Keeper { kind, until: None });
    }
    Ok(children)
}

/// A volume of an ended attempt.
#[derive(Debug, Clone, Copy, FromQueryResult)]
pub(crate) struct VolumeOfEndedAttempt {
    pub(crate) handle: Uuid,
    pub(crate) ended_at: i64,
    /// Last interactive use of the attempt's container, if that container is not garbage.
    pub(crate) touched_at: Option<i64>,
    pub(crate) has_live_child: bool,
}

/// Returns the volumes of ended attempts among `volumes`.
pub(crate) async fn volumes_of_ended_attempts(
    conn: &impl ConnectionTrait,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<Vec<VolumeOfEndedAttempt>, DbErr> {
    let sql = format!(
        "SELECT v.handle AS handle, a.ended_at AS ended_at,
                (SELECT MAX(t.touched_at) FROM containers t
                 WHERE t.attempt_id = v.attempt_id AND t.state NOT IN ('destroying', 'sweeping')) AS touched_at,
                EXISTS (SELECT 1 FROM volumes w WHERE w.parent = v.handle AND {}) AS has_live_child
         FROM volumes v JOIN attempts a ON a.attempt_id = v.attempt_id
         WHERE v.handle IN (IDS) AND v.purpose <> 'replica' AND a.ended_at IS NOT NULL",
        sweep_queue::unmarked("w")
    );
    VolumeOfEndedAttempt::find_by_statement(of_ids(conn, &sql, volumes)).all(conn).await
}

/// Returns a statement whose only value is a list of ids. `IDS` in `sql` stands for the query of
/// them.
fn of_ids(conn: &impl ConnectionTrait, sql: &str, ids: impl IntoIterator<Item = Uuid>) -> Statement {
    let backend = conn.get_database_backend();
    let sql = sql.replace("IDS", &ids::query(backend, 1));
    Statement::from_sql_and_values(backend, sql, [ids::value(backend, ids)])
}

/// Returns the ids that a statement yields, as `id`.
async fn query_ids(conn: &impl ConnectionTrait, statement: Statement) -> Result<HashSet<Uuid>, DbErr> {
    let rows = conn.query_all_raw(statement).await?;
    rows.into_iter().map(|row| row.try_get("", "id")).collect()
}

/// Returns the ends of ended attempts, by attempt.
pub(crate) async fn ended_attempts(
    conn: &impl ConnectionTrait,
    attempts: impl IntoIterator<Item = Uuid>,
) -> Result<HashMap<Uuid, Timestamp>, DbErr> {
    let attempts: HashSet<_> = attempts.into_iter().collect();
    if attempts.is_empty() {
        return Ok(HashMap::new());
    }
    // Without a condition on `ended_at`: if PostgreSQL expects few ended attempts, it would read
    // all of them for each id.
    let sql = "SELECT attempt_id, ended_at FROM attempts WHERE attempt_id IN (IDS)";
    let mut ended = HashMap::new();
    for row in conn.query_all_raw(of_ids(conn, sql, attempts)).await? {
        if let Some(at) = row.try_get("", "ended_at")? {
            ended.insert(row.try_get("", "attempt_id")?, Timestamp(at));
        }
    }
    Ok(ended)
}

/// Columns of a volume that the rules need.
#[derive(Debug, FromQueryResult)]
pub(crate) struct VolumeRow {
    pub(crate) handle: Uuid,
    pub(crate) purpose: Purpose,
    pub(crate) artifact_id: Option<Uuid>,
    pub(crate) from_artifact_id: Option<Uuid>,
    pub(crate) parent: Option<Uuid>,
    pub(crate) attempt_id: Option<Uuid>,
    claimed_until: Option<i64>,
    complete: bool,
    pub(crate) size_bytes: i64,
}

impl VolumeRow {
    /// List of the columns.
    pub(crate) const COLUMNS: &str = "handle, purpose, artifact_id, from_artifact_id, parent, attempt_id, claimed_until, complete, size_bytes";
}

impl From<&volume::Model> for VolumeRow {
    fn from(row: &volume::Model) -> Self {
        let volume::Model { handle, purpose, artifact_id, from_artifact_id, parent, attempt_id, .. } = *row;
        let volume::Model { claimed_until, complete, size_bytes, .. } = *row;
        Self {
            handle,
            purpose,
            artifact_id,
            from_artifact_id,
            parent,
            attempt_id,
            claimed_until,
            complete,
            size_bytes,
        }
    }
}

/// Returns the facts about volumes, in the order of `rows`.
pub(crate) async fn volumes(
    conn: &impl ConnectionTrait,
    rows: &[VolumeRow],
) -> Result<Vec<VolumeFacts>, DbErr> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let handles = rows.iter().map(|row| row.handle);
    // DISTINCT, because a replica may have very many children.
    let with_children = format!(
        "SELECT DISTINCT c.parent AS id FROM volumes c WHERE c.parent IN (IDS) AND {}",
        sweep_queue::unmarked("c")
    );
    let with_children = query_ids(conn, of_ids(conn, &with_children, handles)).await?;
    let ended = ended_attempts(conn, rows.iter().filter_map(|row| row.attempt_id)).await?;
    let with_container = if ended.is_empty() {
        HashSet::new()
    } else {
        let sql = "SELECT attempt_id AS id FROM containers
            WHERE attempt_id IN (IDS) AND state NOT IN ('destroying', 'sweeping')";
        query_ids(conn, of_ids(conn, sql, ended.keys().copied())).await?
    };
    let artifacts: HashSet<_> = rows.iter().filter_map(|row| row.artifact_id).collect();
    let live_artifacts = if artifacts.is_empty() {
        HashSet::new()
    } else {
        let sql =
            "SELECT artifact_id AS id FROM artifacts WHERE artifact_id IN (IDS) AND state <> 'deleting'";
        query_ids(conn, of_ids(conn, sql, artifacts)).await?
    };

    let facts = rows.iter().map(|row| VolumeFacts {
        has_live_child: with_children.contains(&row.handle),
        lifetime: match row.purpose {
            Purpose::Replica => VolumeLifetime::OfArtifact {
                artifact_marked: row.artifact_id.is_none_or(|id| !live_artifacts.contains(&id)),
                claimed_until: row.claimed_until.filter(|_| !row.complete).map(Timestamp),
            },
            Purpose::Input | Purpose::Output | Purpose::Scratch => VolumeLifetime::OfAttempt {
                ended_at: row.attempt_id.and_then(|id| ended.get(&id).copied()),
                has_live_container: row.attempt_id.is_some_and(|id| with_container.contains(&id)),
            },
        },
    });
    Ok(facts.collect())
}
