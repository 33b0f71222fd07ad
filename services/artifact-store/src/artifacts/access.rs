//! Access of teams to artifacts.

use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{ColumnTrait, Condition, EntityTrait, QueryFilter, QuerySelect, QueryTrait};

use crate::db::entity::{
    ALL_TEAMS, artifact, base_resource_type, holder, pin, resource_cache, resource_certs,
};

/// Returns the condition that `team` may use an artifact whose id it knows.
///
/// A team may use its own artifacts, artifacts of owners that are available to every team, and
/// artifacts that a workload of the team has pinned.
pub(crate) fn usable_by(team: &str) -> Condition {
    fn among<E: EntityTrait>(column: E::Column, those: Condition) -> Expr {
        let of_this =
            Expr::col((E::default(), column)).equals((artifact::Entity, artifact::Column::ArtifactId));
        let rows = E::find().select_only().expr(Expr::value(1)).filter(of_this).filter(those);
        Expr::exists(rows.into_query())
    }

    let holders = holder::Entity::find()
        .select_only()
        .column(holder::Column::HolderId)
        .filter(holder::Column::Team.eq(team))
        .into_query();
    let shared = resource_cache::Column::Scope.eq(ALL_TEAMS);
    let pinned = pin::Column::HolderId.in_subquery(holders);
    Condition::any()
        .add(artifact::Column::Team.eq(team))
        .add(among::<resource_cache::Entity>(
            resource_cache::Column::ArtifactId,
            Condition::all().add(shared),
        ))
        .add(among::<base_resource_type::Entity>(base_resource_type::Column::ArtifactId, Condition::all()))
        .add(among::<resource_certs::Entity>(resource_certs::Column::ArtifactId, Condition::all()))
        .add(among::<pin::Entity>(pin::Column::ArtifactId, Condition::all().add(pinned)))
}
