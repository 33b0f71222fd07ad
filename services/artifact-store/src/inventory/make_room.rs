//! Choosing what is deleted from a worker whose disk has too little free space.
//!
//! Only copies and caches are chosen, because both can be made again. Each is deleted by the code
//! that deletes it at the request of a caller, which checks again whether it is used.

use std::collections::HashSet;

use domain::{ArtifactId, CacheId, Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DbErr, FromQueryResult, Statement};
use uuid::Uuid;

use crate::db::{ids, units};
use crate::marks::references::build_keeps;

/// How much longer a cache is kept than a copy that was used at the same time. A copy is only
/// transferred again.
const CACHE_WEIGHT: i64 = 4;

/// Something on a worker that may be deleted for its space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) kind: CandidateKind,
    pub(crate) team: String,
    /// Size of the replica on the worker, in bytes.
    pub(crate) size_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CandidateKind {
    /// A replica whose bytes a reliable worker or the store has, too.
    Copy(ArtifactId),
    ResourceCache(CacheId),
    TaskCache(CacheId),
}

#[derive(FromQueryResult)]
struct Row {
    artifact_id: Uuid,
    team: String,
    size_bytes: i64,
    created_at: i64,
    is_copy: bool,
    resource_cache: Option<Uuid>,
    resource_cache_team: Option<String>,
    resource_cache_used: Option<i64>,
    task_cache: Option<Uuid>,
    task_cache_team: Option<String>,
    task_cache_used: Option<i64>,
}

/// Replicas on the worker `$2` that nothing uses at the instant `$1`, and that can be made again.
/// Only replicas on the workers `reliable` count as copies.
const REPLICAS: &str = concat!(
    "here AS (
        SELECT v.artifact_id, a.team, v.size_bytes, v.created_at, a.kept_until, (a.in_store OR EXISTS (
            SELECT 1 FROM volumes o
                WHERE o.artifact_id = v.artifact_id AND o.worker_id IN (SELECT id FROM reliable) AND o.worker_id <> v.worker_id
                  AND o.purpose = 'replica'
                  AND o.complete = TRUE AND o.state = 'created'
        )) AS is_copy
        FROM volumes v JOIN artifacts a ON a.artifact_id = v.artifact_id
        WHERE v.worker_id = $2 AND v.purpose = 'replica' AND v.complete = TRUE AND v.state = 'created'
          AND a.state = 'sealed'
          AND NOT EXISTS (SELECT 1 FROM pins p WHERE p.artifact_id = v.artifact_id)
          AND NOT EXISTS (
            SELECT 1 FROM volumes c WHERE c.parent = v.handle AND c.state NOT IN ('destroying', 'sweeping'))
          AND NOT EXISTS (
            SELECT 1 FROM volumes t
                WHERE t.artifact_id = v.artifact_id AND t.complete = FALSE AND t.claimed_until > $1
                  AND t.state NOT IN ('destroying', 'sweeping'))
    )
    SELECT h.artifact_id, h.team, h.size_bytes, h.created_at, h.is_copy,
           r.cache_id AS resource_cache, r.team AS resource_cache_team, r.last_used AS resource_cache_used,
           t.cache_id AS task_cache, t.team AS task_cache_team, t.last_used AS task_cache_used
        FROM here h
        LEFT JOIN resource_caches r ON r.artifact_id = h.artifact_id
        LEFT JOIN task_caches t ON t.artifact_id = h.artifact_id
        WHERE h.is_copy OR (
            (r.cache_id IS NULL) <> (t.cache_id IS NULL)
            AND (h.kept_until IS NULL OR h.kept_until <= $1)
            AND NOT EXISTS (
                SELECT 1 FROM owners o JOIN builds b ON b.build_id = o.build_id
                    WHERE o.artifact_id = h.artifact_id AND ",
    build_keeps!(),
    "))"
);

/// Returns what may be deleted from a worker, the oldest first. The age of a cache is divided by
/// [`CACHE_WEIGHT`].
pub(crate) async fn candidates(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    reliable: &[WorkerId],
    now: Timestamp,
) -> Result<Vec<Candidate>, DbErr> {
    let backend = conn.get_database_backend();
    let reliable = ids::value(backend, reliable.iter().map(|worker| worker.uuid()));
    let sql = format!("WITH reliable AS ({}), {REPLICAS}", ids::query(backend, 3));
    let values = [now.0.into(), worker.uuid().into(), reliable];
    let rows = Row::find_by_statement(Statement::from_sql_and_values(backend, sql, values)).all(conn).await?;
    // An artifact of several caches has several rows.
    let mut seen = HashSet::new();
    let rows = rows.into_iter().filter(|row| seen.insert(row.artifact_id));
    let mut candidates: Vec<_> = rows.filter_map(|row| candidate(row, now)).collect();
    candidates.sort_by_key(|(worthless, _)| std::cmp::Reverse(*worthless));
    Ok(candidates.into_iter().map(|(_, candidate)| candidate).collect())
}

/// Returns the size of the replicas on a worker that are deleted and not yet destroyed.
pub(crate) async fn pending_bytes(conn: &impl ConnectionTrait, worker: WorkerId) -> Result<u64, DbErr> {
    let sql = "SELECT CAST(COALESCE(SUM(v.size_bytes), 0) AS BIGINT) AS size_bytes
               FROM volumes v LEFT JOIN artifacts a ON a.artifact_id = v.artifact_id
               WHERE v.worker_id = $1 AND v.purpose = 'replica'
                 AND (v.state IN ('destroying', 'sweeping') OR a.state = 'deleting')";
    let values = [worker.uuid().into()];
    let statement = Statement::from_sql_and_values(conn.get_database_backend(), sql, values);
    let row = conn.query_one_raw(statement).await?;
    row.map_or(Ok(0), |row| row.try_get("", "size_bytes").map(units::size))
}

/// Returns a candidate, and the age by which candidates are sorted.
fn candidate(row: Row, now: Timestamp) -> Option<(i64, Candidate)> {
    let cache = |id: Uuid| CacheId::from_uuid(id);
    let (kind, team, used, weight) = if row.is_copy {
        let artifact = ArtifactId::from_uuid(row.artifact_id);
        let used = [row.resource_cache_used, row.task_cache_used].into_iter().flatten().max();
        (CandidateKind::Copy(artifact), row.team, used.unwrap_or(0), 1)
    } else if let (Some(id), Some(team), Some(used)) =
        (row.resource_cache, row.resource_cache_team, row.resource_cache_used)
    {
        (CandidateKind::ResourceCache(cache(id)), team, used, CACHE_WEIGHT)
    } else {
        (
            CandidateKind::TaskCache(cache(row.task_cache?)),
            row.task_cache_team?,
            row.task_cache_used?,
            CACHE_WEIGHT,
        )
    };
    let unused = now.0.saturating_sub(used.max(row.created_at)).max(0);
    let size_bytes = units::size(row.size_bytes);
    Some((unused / weight, Candidate { kind, team, size_bytes }))
}
