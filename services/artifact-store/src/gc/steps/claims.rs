//! The step of claims: marks volumes of transfers whose claims have expired.

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
use crate::gc::{Batch, Collected, Kind, Settings, by_reason};
use crate::marks::references::{self, JudgedVolume};
use crate::marks::schedule::make_due;
use crate::marks::{self, Wait};
use crate::policy::garbage::{self, Verdict};

pub(in crate::gc) async fn look(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
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
    marks::lock_workers(txn, &workers, values.clone(), Wait::Long).await?;
    let sql = format!(
        "SELECT {} {of_candidates} AND complete = FALSE AND state NOT IN ('destroying', 'sweeping'){}",
        JudgedVolume::COLUMNS,
        ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
    );
    let locked = Statement::from_sql_and_values(backend, sql, values);
    let locked = JudgedVolume::find_by_statement(locked).all(txn).await?;
    let facts = references::volumes(txn, &locked).await?;
    let mut batch = Batch::default();
    let mut let_go = HashSet::new();
    for (row, facts) in locked.iter().zip(facts) {
        if let Verdict::Mark(why) = garbage::volume(&facts, settings.now, &settings.policy) {
            let size_bytes = size(row.size_bytes);
            batch.collected.push(Collected { kind: Kind::Volume, id: row.handle, why, size_bytes });
            let_go.extend(row.artifact_id);
        }
    }
    for (why, handles) in by_reason(&batch.collected) {
        batch.workers.extend(marks::mark_volumes(txn, &handles, why, settings.now).await?);
    }
    make_due(txn, let_go, settings.now).await?;
    // A kept volume would be checked endlessly, so that the loop ends with a batch that marks
    // nothing.
    batch.looked = !batch.collected.is_empty();
    Ok(batch)
}
