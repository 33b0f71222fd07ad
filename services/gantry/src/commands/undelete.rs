//! `gantry undelete`: restores a deleted artifact while its bytes exist.

use rpc::pb::artifacts::{Artifact, UndeleteRequest, undelete_request};

use crate::cli::args::UndeleteArgs;
use crate::client::connect::{Connection, Service};
use crate::client::references::artifact_id;
use crate::render::stdout::{print, print_json};
use crate::render::table::{bytes, count, duration};
use crate::render::{json, labels};

/// Executes `gantry undelete`.
pub(crate) async fn undelete(
    connection: &Connection,
    args: &UndeleteArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let artifact = artifact_id(connection, "undelete", &args.artifact).await?;
    let request = UndeleteRequest {
        team: connection.team.clone(),
        artifact_id: artifact.to_string(),
        kept_by: Some(undelete_request::KeptBy::Keep(rpc::duration(args.keep))),
    };
    let client = connection.artifacts();
    let doing = format!("cannot undelete artifact {artifact}");
    let response = connection
        .repeat(Service::ArtifactStore, &doing, async || client.clone().undelete(request.clone()).await)
        .await?;
    let artifact = response.artifact.unwrap_or_default();
    if as_json {
        return print_json(&json::artifact(&artifact));
    }
    print(&restored(&artifact, args))
}

fn restored(artifact: &Artifact, args: &UndeleteArgs) -> String {
    let replicas = u64::try_from(artifact.replicas.len()).unwrap_or(u64::MAX);
    let location = match (artifact.in_store, replicas) {
        (true, 0) => labels::IN_STORE.to_owned(),
        (true, replicas) => format!("{} and on {}", labels::IN_STORE, count(replicas, "worker")),
        (false, replicas) => format!("on {}", count(replicas, "worker")),
    };
    format!(
        "artifact {} is restored: {} {location}, kept for at least {}\n",
        artifact.artifact_id,
        bytes(artifact.size_bytes),
        duration(args.keep)
    )
}
