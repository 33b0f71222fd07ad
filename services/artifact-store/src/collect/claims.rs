//! Transfers that stopped without an end: the volumes that they claimed.

use std::collections::HashSet;

use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, QueryTrait,
};
use uuid::Uuid;

use super::{BATCH, Batch, Collected, Kind, Settings, by_reason};
use crate::due::make_due;
use crate::entity::{State, volume};
use crate::facts;
use crate::mark::{self, Verdict};
use crate::sweep;
use crate::units::size;

pub(super) async fn look(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let candidates: Vec<Uuid> = volume::Entity::find()
        .select_only()
        .column(volume::Column::Handle)
        .filter(volume::Column::ClaimedUntil.lte(settings.now.0))
        // As its index says.
        .filter(Expr::cust("complete = FALSE AND state NOT IN ('destroying', 'sweeping')"))
        .order_by_asc(volume::Column::ClaimedUntil)
        .limit(BATCH)
        .into_tuple()
        .all(txn)
        .await?;
    if candidates.is_empty() {
        return Ok(Batch::default());
    }
    let of_candidates =
        || volume::Entity::find().filter(volume::Column::Handle.is_in(candidates.iter().copied()));
    sweep::lock_workers(txn, of_candidates().select_only().column(volume::Column::WorkerId).into_query())
        .await?;
    let locked = of_candidates()
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let facts = facts::volumes(txn, &locked).await?;
    let mut batch = Batch::default();
    let mut let_go = HashSet::new();
    for (row, facts) in locked.iter().zip(facts) {
        if let Verdict::Mark(why) = mark::volume(&facts, settings.now, &settings.policy) {
            let size_bytes = size(row.size_bytes);
            batch.collected.push(Collected { kind: Kind::Volume, id: row.handle, why, size_bytes });
            let_go.extend(row.artifact_id);
        }
    }
    for (why, handles) in by_reason(&batch.collected) {
        batch.workers.extend(sweep::mark_volumes(txn, &handles, why, settings.now).await?);
    }
    make_due(txn, let_go, settings.now).await?;
    // What is kept would be looked at again and again: this ends with a batch that marks nothing.
    batch.looked = !batch.collected.is_empty();
    Ok(batch)
}
