//! Conversion of explanations to protobuf messages.

use domain::Timestamp;
use rpc::pb::artifacts as pb;
use uuid::Uuid;

use crate::explain::{Explanation, ItemKind, Keeper, Relation, Stage};

pub(super) fn explanation(explanation: Explanation) -> pb::ExplainResponse {
    let instant = |at: Option<Timestamp>| at.map(rpc::timestamp);
    pb::ExplainResponse {
        kind: item_kind(explanation.thing).into(),
        id: explanation.id.to_string(),
        state: state(explanation.state).into(),
        size_bytes: explanation.size_bytes,
        created_at: instant(explanation.created_at),
        kept_by: explanation.kept_by.first.iter().map(keeper).collect(),
        kept_by_total: explanation.kept_by.total,
        relations: explanation.relations.iter().map(relation).collect(),
        marked_at: instant(explanation.marked_at),
        gone_at: instant(explanation.gone_at),
        expires_at: instant(explanation.expires_at),
        remembered_until: instant(explanation.remembered_until),
        can_be_undeleted: explanation.can_be_undeleted,
        bytes_lost: explanation.bytes_lost,
        lost_at: instant(explanation.lost_at),
        loss_reason: explanation.loss_reason,
        team: explanation.team,
        can_be_adopted: explanation.can_be_adopted,
        in_store: explanation.in_store,
        label: explanation.label,
        reason: explanation.why,
    }
}

fn keeper(keeper: &Keeper) -> pb::Keeper {
    let (kind, id) = match keeper.thing {
        Some((kind, id)) => (item_kind(kind), id.to_string()),
        None => (pb::ObjectKind::Unspecified, String::new()),
    };
    pb::Keeper { kind: kind.into(), id, text: keeper.text.clone(), until: keeper.until.map(rpc::timestamp) }
}

fn relation(relation: &Relation) -> pb::Relation {
    pb::Relation {
        relation: relation.relation.to_owned(),
        kind: item_kind(relation.thing).into(),
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
        Stage::Running => pb::ExplainedState::Running,
        Stage::Succeeded => pb::ExplainedState::Succeeded,
        Stage::Failed => pb::ExplainedState::Failed,
        Stage::Errored => pb::ExplainedState::Errored,
        Stage::Aborted => pb::ExplainedState::Aborted,
        Stage::Settled => pb::ExplainedState::Settled,
        Stage::Ended => pb::ExplainedState::Ended,
        Stage::Known => pb::ExplainedState::Registered,
        Stage::Populating => pb::ExplainedState::Populating,
        Stage::Ready => pb::ExplainedState::Ready,
        Stage::Empty => pb::ExplainedState::Empty,
        Stage::Published => pb::ExplainedState::Published,
        Stage::Available => pb::ExplainedState::Available,
        Stage::Orphaned => pb::ExplainedState::Orphaned,
    }
}

fn item_kind(kind: ItemKind) -> pb::ObjectKind {
    match kind {
        ItemKind::Artifact => pb::ObjectKind::Artifact,
        ItemKind::Volume => pb::ObjectKind::Volume,
        ItemKind::Container => pb::ObjectKind::Container,
        ItemKind::Build => pb::ObjectKind::Build,
        ItemKind::Workload => pb::ObjectKind::Workload,
        ItemKind::Attempt => pb::ObjectKind::Attempt,
        ItemKind::Worker => pb::ObjectKind::Worker,
        ItemKind::Transfer => pb::ObjectKind::Transfer,
        ItemKind::ResourceCache => pb::ObjectKind::ResourceCache,
        ItemKind::TaskCache => pb::ObjectKind::TaskCache,
        ItemKind::BaseResourceType => pb::ObjectKind::BaseResourceType,
    }
}
