//! Uses of caches, and when they end.
//!
//! The collector, explanations and the caches call it. A use ends with its build or workload.

use std::collections::HashMap;

use domain::{BuildId, Timestamp, WorkloadId};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, FromQueryResult, PaginatorTrait, QueryFilter,
    QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::db::entity::task_cache_use;
use crate::marks::references::{Keepers, build_keeps, statement};
use crate::policy::garbage::{Keeper, KeeperKind};
use crate::policy::retention::Uses;

/// Returns the uses of resource caches, by cache id. Caches without uses, ended or not, are
/// omitted.
///
/// No call ends a use: it ends with its user. A user without a row ended at an unknown time, which
/// counts as `now`.
pub(crate) async fn uses(
    conn: &impl ConnectionTrait,
    caches: &[Uuid],
    now: Timestamp,
) -> Result<HashMap<Uuid, Uses>, DbErr> {
    #[derive(FromQueryResult)]
    struct Row {
        cache_id: Uuid,
        used: i64,
        endless: i64,
        ended: Option<i64>,
        last_end: Option<i64>,
    }

    if caches.is_empty() {
        return Ok(HashMap::new());
    }
    let sql = concat!(
        "
        SELECT n.cache_id AS cache_id, CAST(SUM(n.live) AS BIGINT) AS used,
               CAST(SUM(CASE WHEN n.live = 1 AND n.until IS NULL THEN 1 ELSE 0 END) AS BIGINT) AS endless,
               MAX(CASE WHEN n.live = 0 THEN COALESCE(n.until, $1) END) AS ended, MAX(n.until) AS last_end
        FROM (SELECT u.cache_id AS cache_id, COALESCE(b.kept_until, h.settled_at) AS until,
                     CASE WHEN (b.build_id IS NOT NULL AND ",
        build_keeps!(),
        ")
                               OR (h.holder_id IS NOT NULL AND h.settled_at IS NULL) THEN 1 ELSE 0 END AS live
              FROM cache_uses u
              LEFT JOIN builds b ON u.user_kind = 'build' AND b.build_id = u.user_id
              LEFT JOIN holders h ON u.user_kind = 'workload' AND h.holder_id = u.user_id
              WHERE u.cache_id IN (SELECT id FROM ids)) n
        GROUP BY n.cache_id"
    );
    let rows = statement(conn, sql, now, caches.iter().copied());
    let uses = Row::find_by_statement(rows).all(conn).await?.into_iter().map(|row| {
        let uses = Uses {
            used: row.used > 0,
            ended: row.ended.map(Timestamp),
            endless: row.endless > 0,
            last_end: row.last_end.map(Timestamp),
        };
        (row.cache_id, uses)
    });
    Ok(uses.collect())
}

/// Returns the first `most` users of a resource cache, and their number. Workloads are returned as
/// [`KeeperKind::Pin`].
pub(crate) async fn users(
    conn: &impl ConnectionTrait,
    cache: Uuid,
    now: Timestamp,
    most: u64,
) -> Result<Keepers, DbErr> {
    #[derive(FromQueryResult)]
    struct Use {
        kind: String,
        id: Uuid,
        until: Option<i64>,
        total: i64,
    }

    let build_keeps = build_keeps!();
    let sql = format!(
        "SELECT u.user_kind AS kind, u.user_id AS id, b.kept_until AS until, COUNT(*) OVER () AS total
         FROM cache_uses u
         LEFT JOIN builds b ON u.user_kind = 'build' AND b.build_id = u.user_id
         LEFT JOIN holders h ON u.user_kind = 'workload' AND h.holder_id = u.user_id
         WHERE u.cache_id IN (SELECT id FROM ids)
           AND ((b.build_id IS NOT NULL AND {build_keeps}) OR (h.holder_id IS NOT NULL AND h.settled_at IS NULL))
         ORDER BY u.user_kind, u.user_id LIMIT {most}"
    );
    let mut users = Keepers::default();
    let statement = statement(conn, &sql, now, std::iter::once(cache));
    for row in Use::find_by_statement(statement).all(conn).await? {
        users.total = u64::try_from(row.total).unwrap_or(0);
        let kind = match row.kind.as_str() {
            "workload" => KeeperKind::Pin(WorkloadId::from_uuid(row.id)),
            _ => KeeperKind::Build(BuildId::from_uuid(row.id)),
        };
        users.first.push(Keeper { kind, until: row.until.map(Timestamp) });
    }
    Ok(users)
}

/// Returns the first `most` workloads that use a task cache, and their number, as
/// [`KeeperKind::Pin`].
pub(crate) async fn users_of_task_cache(
    conn: &impl ConnectionTrait,
    cache: Uuid,
    most: u64,
) -> Result<Keepers, DbErr> {
    let of_cache = || {
        task_cache_use::Entity::find()
            .select_only()
            .column(task_cache_use::Column::HolderId)
            .filter(task_cache_use::Column::CacheId.eq(cache))
    };
    let first = of_cache().order_by_asc(task_cache_use::Column::HolderId).limit(most);
    let first: Vec<Uuid> = first.into_tuple().all(conn).await?;
    let keeper = |id| Keeper { kind: KeeperKind::Pin(WorkloadId::from_uuid(id)), until: None };
    let total = of_cache().count(conn).await?;
    Ok(Keepers { first: first.into_iter().map(keeper).collect(), total })
}

/// Deletes the ended uses of resource caches.
pub(crate) async fn forget_ended_uses(
    txn: &impl ConnectionTrait,
    caches: &[Uuid],
    now: Timestamp,
) -> Result<(), DbErr> {
    if caches.is_empty() {
        return Ok(());
    }
    let sql = concat!(
        "DELETE FROM cache_uses WHERE cache_id IN (SELECT id FROM ids)
          AND NOT EXISTS (SELECT 1 FROM builds b
                          WHERE cache_uses.user_kind = 'build' AND b.build_id = cache_uses.user_id AND ",
        build_keeps!(),
        ")
          AND NOT EXISTS (SELECT 1 FROM holders h
                          WHERE cache_uses.user_kind = 'workload' AND h.holder_id = cache_uses.user_id
                            AND h.settled_at IS NULL)"
    );
    txn.execute_raw(statement(txn, sql, now, caches.iter().copied())).await.map(drop)
}
