//! The step of claims: marks volumes of transfers whose claims have expired. The step of artifacts
//! then checks the open artifacts that they filled.

use std::collections::HashSet;

use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QueryOrder, QuerySelect, Statement,
};
use uuid::Uuid;

use crate::db::entity::volume;
use crate::db::ids;
use crate::db::units::size;
use crate::gc::{Batch, CollectedItem, Kind, Settings, by_reason};
use crate::marks::references::{self, VolumeRow};
use crate::marks::schedule::{make_due, make_open_due};
use crate::marks::{self, LockWait};
use crate::policy::garbage::{self, Verdict};

pub(in crate::gc) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let candidates: Vec<Uuid> = volume::Entity::find()
        .select_only()
        .column(volume::Column::Handle)
        .filter(volume::Column::ClaimedUntil.lte(settings.now.0))
        // The condition of the partial index.
        .filter(Expr::cust(
            "complete = FALSE AND given_up = FALSE AND state NOT IN ('destroying', 'sweeping')",
        ))
        .order_by_asc(volume::Column::ClaimedUntil)
        .limit(settings.batch)
        .into_tuple()
        .all(txn)
        .await?;
    if candidates.is_empty() {
        return Ok(Batch::default());
    }
    let backend = txn.get_database_backend();
    let of_candidates = format!("FROM volumes WHERE handle IN ({})", ids::query(backend, 1));
    let values = [ids::value(backend, candidates)];
    let workers = format!("SELECT worker_id {of_candidates}");
    marks::lock_workers(txn, &workers, values.clone(), LockWait::Block).await?;
    let sql = format!(
        "SELECT {} {of_candidates} AND complete = FALSE AND state NOT IN ('destroying', 'sweeping'){}",
        VolumeRow::COLUMNS,
        ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
    );
    let locked = Statement::from_sql_and_values(backend, sql, values);
    let locked = VolumeRow::find_by_statement(locked).all(txn).await?;
    let facts = references::volumes(txn, &locked).await?;
    let mut batch = Batch::default();
    let mut released = HashSet::new();
    for (row, facts) in locked.iter().zip(facts) {
        if let Verdict::Mark(why) = garbage::volume(&facts, settings.now, &settings.policy) {
            let size_bytes = size(row.size_bytes);
            batch.collected.push(CollectedItem { kind: Kind::Volume, id: row.handle, why, size_bytes });
            released.extend(row.artifact_id);
        }
    }
    for (why, handles) in by_reason(&batch.collected) {
        batch.workers.extend(marks::mark_volumes(txn, &handles, why, settings.now).await?);
    }
    make_open_due(txn, released.iter().copied(), settings.now).await?;
    make_due(txn, released, settings.now).await?;
    // A kept volume would be checked endlessly, so that the loop ends with a batch that marks
    // nothing.
    batch.checked = !batch.collected.is_empty();
    Ok(batch)
}
