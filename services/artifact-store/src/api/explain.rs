//! Conversion of explanations to protobuf messages.

use domain::Timestamp;
use rpc::pb::artifacts as pb;
use uuid::Uuid;

use crate::explain::{Explanation, ItemKind, Keeper, Relation, Stage};

pub(super) fn explanation(explanation: Explanation) -> pb::ExplainResponse {
    let instant = |at: Option<Timestamp>| at.map(rpc::timestamp);
    pb::ExplainResponse {
        thing: item_kind(explanation.thing).into(),
        id: explanation.id.to_string(),
        state: state(explanation.state).into(),
        size_bytes: explanation.size_bytes,
        created_at: instant(explanation.created_at),
        kept_by: explanation.kept_by.first.iter().map(keeper).collect(),
        kept_by_total: explanation.kept_by.total,
        relations: explanation.relations.iter().map(relation).collect(),
        marked_at: instant(explanation.marked_at),
        gone_at: instant(explanation.gone_at),
        goes_at: instant(explanation.goes_at),
        remembered_until: instant(explanation.remembered_until),
        can_be_undeleted: explanation.can_be_undeleted,
        bytes_lost: explanation.bytes_lost,
        lost_at: instant(explanation.lost_at),
        team: explanation.team,
        can_be_adopted: explanation.can_be_adopted,
        in_store: explanation.in_store,
        label: explanation.label,
        why: explanation.why,
    }
}

fn keeper(keeper: &Keeper) -> pb::Keeper {
    let (kind, id) = match keeper.thing {
        Some((kind, id)) => (item_kind(kind), id.to_string()),
        None => (pb::Thing::Unspecified, String::new()),
    };
    pb::Keeper { thing: kind.into(), id, text: keeper.text.clone(), until: keeper.until.map(rpc::timestamp) }
}

fn relation(relation: &Relation) -> pb::Relation {
    pb::Relation {
        relation: relation.relation.to_owned(),
        thing: item_kind(relation.thing).into(),
        ids: relation.ids.iter().map(Uuid::to_string).collect(),
        total: relation.total,
    }
}

fn state(stage: Stage) -> pb::ExplainedState {
    match stage {
        Stage::Open => pb::ExplainedState::Open,
        Stage::Sealed => pb::ExplainedState::Sealed,
        Stage::Deleting => pb::ExplainedState::Deleting,
        Stage::Creating => pb::ExplainedState::Creating,
        Stage::Created => pb::ExplainedState::Created,
        Stage::Unconfirmed => pb::ExplainedState::Unconfirmed,
        Stage::Lost => pb::ExplainedState::Lost,
        Stage::Destroying => pb::ExplainedState::Destroying,
        Stage::Sweeping => pb::ExplainedState::Sweeping,
        Stage::Gone => pb::ExplainedState::Gone,
        Stage::GoingOn => pb::ExplainedState::GoingOn,
        Stage::Succeeded => pb::ExplainedState::Succeeded,
        Stage::Failed => pb::ExplainedState::Failed,
        Stage::Errored => pb::ExplainedState::Errored,
        Stage::Aborted => pb::ExplainedState::Aborted,
        Stage::Settled => pb::ExplainedState::Settled,
        Stage::Ended => pb::ExplainedState::Ended,
        Stage::Known => pb::ExplainedState::Known,
        Stage::BeingMade => pb::ExplainedState::BeingMade,
        Stage::Ready => pb::ExplainedState::Ready,
        Stage::Empty => pb::ExplainedState::Empty,
        Stage::Published => pb::ExplainedState::Published,
        Stage::InPlace => pb::ExplainedState::InPlace,
        Stage::Orphaned => pb::ExplainedState::Orphaned,
    }
}

fn item_kind(kind: ItemKind) -> pb::Thing {
    match kind {
        ItemKind::Artifact => pb::Thing::Artifact,
        ItemKind::Volume => pb::Thing::Volume,
        ItemKind::Container => pb::Thing::Container,
        ItemKind::Build => pb::Thing::Build,
        ItemKind::Workload => pb::Thing::Workload,
        ItemKind::Attempt => pb::Thing::Attempt,
        ItemKind::Worker => pb::Thing::Worker,
        ItemKind::Transfer => pb::Thing::Transfer,
        ItemKind::ResourceCache => pb::Thing::ResourceCache,
        ItemKind::TaskCache => pb::Thing::TaskCache,
        ItemKind::BaseResourceType => pb::Thing::BaseResourceType,
    }
}
