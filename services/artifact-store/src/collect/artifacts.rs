//! Artifacts that nothing may keep any more.

use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};

use super::{Batch, Collected, Kind, Settings, by_reason, lock_due, look_next};
use crate::entity::{ArtifactState, artifact};
use crate::facts;
use crate::mark::{self, Verdict};
use crate::units::size;

pub(crate) async fn look(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let query = artifact::Entity::find().filter(artifact::Column::State.ne(ArtifactState::Deleting));
    let rows = lock_due(txn, query, settings).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    let facts = facts::artifacts(txn, &rows, settings.now).await?;
    let mut batch = Batch { looked: true, ..Batch::default() };
    let mut looks = Vec::new();
    for row in &rows {
        let Some(facts) = facts.get(&row.artifact_id) else { continue };
        match mark::artifact(facts, settings.now, &settings.policy) {
            Verdict::Keep(look) => looks.push((row.artifact_id, look)),
            Verdict::Mark(why) => {
                let size_bytes = size(row.size_bytes);
                batch.collected.push(Collected {
                    kind: Kind::Artifact,
                    id: row.artifact_id,
                    why,
                    size_bytes,
                });
            }
        }
    }
    // Those that are marked stay due, for their replicas.
    for (why, ids) in by_reason(&batch.collected) {
        artifact::Entity::update_many()
            .col_expr(artifact::Column::State, Expr::value(ArtifactState::Deleting))
            .col_expr(artifact::Column::MarkedAt, Expr::value(settings.now.0))
            .col_expr(artifact::Column::MarkedWhy, Expr::value(why.to_string()))
            .filter(artifact::Column::ArtifactId.is_in(ids))
            .exec(txn)
            .await?;
    }
    look_next::<artifact::Entity>(txn, settings, &looks).await?;
    Ok(batch)
}
