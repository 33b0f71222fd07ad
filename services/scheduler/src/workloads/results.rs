//! Results of workloads: the standard output that callers of `keep_result` receive.
//!
//! Results have their own table, because statements about workloads and events need not read them.
//! A result is deleted with its workload.

use bytes::Bytes;
use domain::WorkloadId;
use sea_orm::{ConnectionTrait, DbErr, EntityTrait, Set};

use crate::db::entity::result;

/// Stores the result of a workload.
pub(super) async fn insert(
    txn: &impl ConnectionTrait,
    workload: WorkloadId,
    result: &Bytes,
) -> Result<(), DbErr> {
    let row = result::ActiveModel { workload_id: Set(workload.uuid()), result: Set(result.to_vec()) };
    result::Entity::insert(row).exec_without_returning(txn).await.map(|_| ())
}

/// Returns the result of a workload, if it has one.
pub(crate) async fn find(db: &impl ConnectionTrait, workload: WorkloadId) -> Result<Option<Bytes>, DbErr> {
    let row = result::Entity::find_by_id(workload.uuid()).one(db).await?;
    Ok(row.map(|row| row.result.into()))
}
