//! Rows of holders: the workloads that pin artifacts and use caches until they are settled.

use std::collections::{BTreeSet, HashMap};

use domain::{Timestamp, WorkloadId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, Statement};

use crate::db::entity::holder;
use crate::db::ids;

/// A holder belongs to a team other than the caller's.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HolderError {
    #[error("workload {0} belongs to another team")]
    OtherTeam(WorkloadId),
    #[error("database failed while locking a workload")]
    Database(#[from] DbErr),
}

/// Finds or creates a holder, and locks it.
pub(crate) async fn lock(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    team: &str,
    now: Timestamp,
) -> Result<holder::Model, HolderError> {
    let row = lock_all(txn, [id], team, now).await?.remove(&id);
    row.ok_or_else(|| DbErr::RecordNotFound("holder".to_owned()).into())
}

/// Finds or creates holders, and locks them in the order of their ids.
pub(crate) async fn lock_all(
    txn: &DatabaseTransaction,
    ids: impl IntoIterator<Item = WorkloadId>,
    team: &str,
    now: Timestamp,
) -> Result<HashMap<WorkloadId, holder::Model>, HolderError> {
    let ids: BTreeSet<_> = ids.into_iter().map(WorkloadId::uuid).collect();
    let backend = txn.get_database_backend();
    // The update without effect locks an existing row and returns it like a new one.
    let sql = format!(
        "INSERT INTO holders (holder_id, team, created_at, due_at) SELECT id, $2, $3, $3 FROM ({}) AS given WHERE TRUE ORDER BY id
         ON CONFLICT (holder_id) DO UPDATE SET holder_id = excluded.holder_id
         RETURNING holder_id, team, created_at, settled_at, settlement, due_at",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, ids), team.into(), now.0.into()];
    let statement = Statement::from_sql_and_values(backend, sql, values);
    let rows = holder::Entity::find().from_raw_sql(statement).all(txn).await?;
    match rows.iter().find(|row| row.team != team) {
        Some(other) => Err(HolderError::OtherTeam(WorkloadId::from_uuid(other.holder_id))),
        None => Ok(rows.into_iter().map(|row| (WorkloadId::from_uuid(row.holder_id), row)).collect()),
    }
}
