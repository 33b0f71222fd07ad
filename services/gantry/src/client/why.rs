//! What the artifact store says of an id, and the advice that follows from it for a command that was refused.
//!
//! Commands and transfers call it. It reads only.

use rpc::Reason;
use rpc::pb::artifacts::{ExplainRequest, ExplainResponse, ExplainedState, Thing};

use crate::client::connect::{Connection, repeat};
use crate::ending::error::{advised, refusal};

/// What the store knows of an id.
pub(crate) async fn explain(connection: &Connection, id: &str) -> anyhow::Result<ExplainResponse> {
    let request = ExplainRequest { team: connection.team.clone(), id: id.to_owned() };
    let client = connection.artifacts();
    repeat("cannot explain it", async || client.clone().explain(request.clone()).await).await
}

/// What was answered about something, and of a refusal for which the store may know why, that.
pub(crate) async fn or_why<T>(
    connection: &Connection,
    id: &str,
    answered: anyhow::Result<T>,
) -> anyhow::Result<T> {
    const KNOWS: [Reason; 6] = [
        Reason::ArtifactNotFound,
        Reason::VolumeNotFound,
        Reason::ContainerNotFound,
        Reason::InputUnavailable,
        Reason::NoReplica,
        Reason::UnknownId,
    ];
    match answered {
        Err(error)
            if refusal(&error).is_some_and(|refused| KNOWS.iter().any(|reason| refused.is(*reason))) =>
        {
            match explain(connection, id).await {
                Ok(explained) => Err(advised(error, advice(&explained))),
                Err(_) => Err(error),
            }
        }
        answered => answered,
    }
}

/// What to do about the orphan with this id, or the orphan that held this artifact. `None`: there is none.
pub(crate) async fn orphan_advice(connection: &Connection, id: &str) -> Option<String> {
    let explained = explain(connection, id).await.ok()?;
    (explained.state() == ExplainedState::Orphaned).then(|| decide(&explained))
}

/// What to do about something that is not there as it should be.
pub(crate) fn advice(explained: &ExplainResponse) -> String {
    let id = &explained.id;
    match (explained.thing(), explained.state()) {
        (_, ExplainedState::Orphaned) => decide(explained),
        (Thing::Artifact, ExplainedState::Deleting) if explained.can_be_undeleted => {
            format!("it was deleted: `gantry undelete {id}` brings it back")
        }
        (Thing::Artifact, ExplainedState::Deleting) => {
            format!("it was deleted, `gantry explain {id}` says why; make it again")
        }
        _ if explained.bytes_lost => format!("its bytes are lost: {AGAIN}"),
        (Thing::Artifact, ExplainedState::Sealed) => format!(
            "its bytes may just have been lost there, or be on a worker that is away; see `gantry explain {id}`"
        ),
        _ => format!("see `gantry explain {id}`"),
    }
}

/// What to do about an orphan.
pub(crate) fn decide(explained: &ExplainResponse) -> String {
    let id = &explained.id;
    match (explained.thing(), explained.relations.iter().find(|relation| relation.relation == "volumes")) {
        (Thing::Artifact, Some(volumes)) => {
            let volume = volumes.ids.first().map(String::as_str).unwrap_or_default();
            if explained.can_be_adopted {
                format!("orphaned volume {volume} held it: `gantry adopt {volume}` brings it back")
            } else {
                format!("orphaned volume {volume} was to hold it: see `gantry explain {volume}`")
            }
        }
        _ if explained.can_be_adopted => format!(
            "it is an orphan: `gantry adopt {id}` makes it a replica of its artifact again, `gantry purge {id}` makes it garbage"
        ),
        _ => format!("it is an orphan that cannot be adopted: `gantry purge {id}` makes it garbage"),
    }
}

/// What to do about bytes that are lost.
pub(crate) const AGAIN: &str = "no worker has them any more, nor the artifact store; make it again";
