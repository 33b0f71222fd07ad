//! Deleted artifacts: their replicas go, children first, and when no volume is left and the tombstone's time is over, their rows.

use std::collections::{HashMap, HashSet};

use domain::Timestamp;
use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, QueryTrait,
};
use uuid::Uuid;

use super::attempts::VOLUMES;
use super::{Batch, Collected, Kind, Look, Settings, by_reason, lock_due, look_next};
use crate::due::make_due;
use crate::entity::{Purpose, State, artifact, owner, volume};
use crate::facts;
use crate::mark::{self, Verdict};
use crate::sweep;
use crate::trees;
use crate::units::size;

pub(super) async fn look(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let query = artifact::Entity::find().filter(Expr::cust("state = 'deleting'"));
    let rows = lock_due(txn, query, settings).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    let mut batch = Batch { looked: true, ..Batch::default() };
    let ids: Vec<_> = rows.iter().map(|row| row.artifact_id).collect();
    let progress = replicas(txn, settings, &ids, &mut batch).await?;

    let left: Vec<(Uuid, State)> = volume::Entity::find()
        .select_only()
        .column(volume::Column::ArtifactId)
        .column(volume::Column::State)
        .distinct()
        .filter(volume::Column::ArtifactId.is_in(ids))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .into_tuple()
        .all(txn)
        .await?;
    let mut states: HashMap<_, HashSet<_>> = HashMap::new();
    for (artifact, state) in left {
        states.entry(artifact).or_default().insert(state.is_garbage());
    }
    let mut looks = Vec::new();
    let mut gone = Vec::new();
    for row in &rows {
        let over_at = Timestamp(row.marked_at.unwrap_or_default()) + settings.tombstone;
        let left = states.get(&row.artifact_id);
        let unmarked = left.is_some_and(|garbage| garbage.contains(&false));
        let look = match left {
            // Parents may have become free.
            _ if unmarked && progress => Look::At(settings.now),
            _ if unmarked => Look::Later,
            _ if over_at > settings.now => Look::At(over_at),
            Some(_) => Look::Later,
            None => {
                gone.push(row.artifact_id);
                continue;
            }
        };
        looks.push((row.artifact_id, look));
    }
    if !gone.is_empty() {
        let owned = owner::Column::ArtifactId.is_in(gone.iter().copied());
        owner::Entity::delete_many().filter(owned).exec(txn).await?;
        trees::forget(txn, &gone).await?;
        artifact::Entity::delete_many().filter(artifact::Column::ArtifactId.is_in(gone)).exec(txn).await?;
    }
    look_next::<artifact::Entity>(txn, settings, &looks).await?;
    Ok(batch)
}

/// Marks the replicas of deleted artifacts whose children are garbage. Answers whether any was.
async fn replicas(
    txn: &DatabaseTransaction,
    settings: &Settings,
    artifacts: &[Uuid],
    batch: &mut Batch,
) -> Result<bool, DbErr> {
    let of_artifacts = || {
        volume::Entity::find()
            .filter(volume::Column::ArtifactId.is_in(artifacts.iter().copied()))
            .filter(volume::Column::Purpose.eq(Purpose::Replica))
            .filter(volume::Column::State.is_not_in(State::GARBAGE))
    };
    sweep::lock_workers(txn, of_artifacts().select_only().column(volume::Column::WorkerId).into_query())
        .await?;
    let locked = of_artifacts()
        .order_by_asc(volume::Column::Handle)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let mut let_go = HashSet::new();
    let mut progress = false;
    for rows in locked.rchunks(VOLUMES) {
        let facts = facts::volumes(txn, rows).await?;
        let mut collected = Vec::new();
        for (row, facts) in rows.iter().zip(facts) {
            if let Verdict::Mark(why) = mark::volume(&facts, settings.now, &settings.policy) {
                let size_bytes = size(row.size_bytes);
                collected.push(Collected { kind: Kind::Volume, id: row.handle, why, size_bytes });
                let_go.extend(row.from_artifact_id);
            }
        }
        progress |= !collected.is_empty();
        for (why, handles) in by_reason(&collected) {
            batch.workers.extend(sweep::mark_volumes(txn, &handles, why, settings.now).await?);
        }
        batch.collected.extend(collected);
    }
    make_due(txn, let_go, settings.now).await?;
    Ok(progress)
}
