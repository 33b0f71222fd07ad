//! How much of the disk of a worker its volumes use, as its gateway measures it.
//!
//! Volumes may share files, so sizes of volumes say neither what they take together nor what the
//! deletion of one frees.

use std::collections::BTreeMap;

use db::rows::Column;
use domain::VolumeHandle;
use domain::worker::SessionClaims;
use sea_orm::{ConnectionTrait, DatabaseTransaction, Statement};
use serde::Serialize;
use uuid::Uuid;

use crate::sessions::{self, SessionError};

/// The measured use of the disk by a volume, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DiskUsage {
    pub(crate) handle: VolumeHandle,
    /// Bytes that only this volume uses.
    pub(crate) exclusive: i64,
    /// Its part of all bytes. Volumes that share a file have equal parts of it.
    pub(crate) part: i64,
}

#[derive(Serialize)]
struct Row {
    handle: Uuid,
    exclusive: i64,
    part: i64,
}

const ROW: [(&str, Column); 3] =
    [("handle", Column::Uuid), ("exclusive", Column::Integer), ("part", Column::Integer)];

/// Records the use of the disk by volumes on the worker of `claims`. Other volumes are ignored.
pub(crate) async fn record(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    measured: &[DiskUsage],
) -> Result<(), SessionError> {
    sessions::fence(txn, claims).await?;
    // With two rows for a volume, the statement below would choose one at random.
    let rows: BTreeMap<_, _> = measured.iter().map(|usage| (usage.handle.uuid(), usage)).collect();
    let rows =
        rows.into_iter().map(|(handle, usage)| Row { handle, exclusive: usage.exclusive, part: usage.part });
    let rows: Vec<_> = rows.collect();
    let backend = txn.get_database_backend();
    let sql = format!(
        "UPDATE volumes SET exclusive_bytes = measured.exclusive, disk_bytes = measured.part
         FROM ({}) AS measured WHERE volumes.handle = measured.handle AND volumes.worker_id = $2",
        db::rows::query(backend, 1, &ROW)
    );
    let values = [db::rows::value(&rows)?, claims.worker.uuid().into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    Ok(())
}
