//! Explanations of the artifact store, and the advice for a rejected command that follows from
//! them.
//!
//! Commands and transfers call it. It only reads.

use rpc::Reason;
use rpc::pb::artifacts::{ExplainRequest, ExplainResponse, ExplainedState, ObjectKind};

use crate::client::connect::{Connection, Service};
use crate::ending::error::{refusal, with_advice};

/// Asks the store to explain an object.
pub(crate) async fn explain(connection: &Connection, id: &str) -> anyhow::Result<ExplainResponse> {
    let request = ExplainRequest { team: connection.team.clone(), id: id.to_owned() };
    let client = connection.artifacts();
    connection
        .repeat(Service::ArtifactStore, &format!("cannot explain {id}"), async || {
            client.clone().explain(request.clone()).await
        })
        .await
}

/// Returns `answered`. If the call was rejected for a reason that the store may explain, the error
/// gets its advice.
pub(crate) async fn or_why<T>(
    connection: &Connection,
    id: &str,
    answered: anyhow::Result<T>,
) -> anyhow::Result<T> {
    const EXPLAINED_REASONS: [Reason; 6] = [
        Reason::ArtifactNotFound,
        Reason::VolumeNotFound,
        Reason::ContainerNotFound,
        Reason::InputUnavailable,
        Reason::NoReplica,
        Reason::UnknownId,
    ];
    match answered {
        Err(error)
            if refusal(&error)
                .is_some_and(|refused| EXPLAINED_REASONS.iter().any(|reason| refused.is(*reason))) =>
        {
            match explain(connection, id).await {
                Ok(explained) => Err(with_advice(error, advice(&explained))),
                Err(_) => Err(error),
            }
        }
        answered => answered,
    }
}

/// Returns the remedy for the orphan with this id, or for the orphan of this artifact. `None`: the
/// object is not an orphan.
pub(crate) async fn orphan_advice(connection: &Connection, id: &str) -> Option<String> {
    let explained = explain(connection, id).await.ok()?;
    (explained.state() == ExplainedState::Orphaned).then(|| decide(&explained))
}

/// Returns the remedy for an object that is missing or deleted.
pub(crate) fn advice(explained: &ExplainResponse) -> String {
    let id = &explained.id;
    match (explained.kind(), explained.state()) {
        (_, ExplainedState::Orphaned) => decide(explained),
        (ObjectKind::Artifact, ExplainedState::Deleting) if explained.can_be_undeleted => {
            format!("the artifact was deleted; `gantry undelete {id}` restores it")
        }
        (ObjectKind::Artifact, ExplainedState::Deleting) => {
            format!("the artifact was deleted; `gantry explain {id}` says why; produce it again")
        }
        _ if explained.bytes_lost => format!("its bytes are lost; {LOST_BYTES_REMEDY}"),
        (ObjectKind::Artifact, ExplainedState::Sealed) => format!(
            "its bytes may have been lost, or may be on a worker that is not in contact; see `gantry explain {id}`"
        ),
        _ => format!("see `gantry explain {id}`"),
    }
}

/// Returns the remedy for an orphan.
pub(crate) fn decide(explained: &ExplainResponse) -> String {
    let id = &explained.id;
    match (explained.kind(), explained.relations.iter().find(|relation| relation.relation == "volumes")) {
        (ObjectKind::Artifact, Some(volumes)) => {
            let volume = volumes.ids.first().map(String::as_str).unwrap_or_default();
            if explained.can_be_adopted {
                format!("the orphaned volume {volume} has its bytes; `gantry adopt {volume}` restores it")
            } else {
                format!("the orphaned volume {volume} may have had its bytes; see `gantry explain {volume}`")
            }
        }
        _ if explained.can_be_adopted => format!(
            "the volume is an orphan; `gantry adopt {id}` makes it a replica of its artifact again, and `gantry purge {id}` deletes it"
        ),
        _ => format!("the orphan cannot be adopted; `gantry purge {id}` deletes it"),
    }
}

/// Remedy for lost bytes.
pub(crate) const LOST_BYTES_REMEDY: &str =
    "neither a worker nor the artifact store has them; produce the artifact again";
