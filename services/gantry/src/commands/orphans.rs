//! `gantry adopt` and `gantry purge`: decisions of an operator about orphans.

use anyhow::bail;
use futures::TryStreamExt;
use futures::future::try_join_all;
use rpc::Reason;
use rpc::pb::artifacts::{
    AdoptRequest, Artifact, Orphan, PurgeRequest, PurgeResponse, adopt_request::KeptBy,
};
use rpc::spec::name::id_range;

use crate::cli::args::{AdoptArgs, PurgeArgs};
use crate::cli::values;
use crate::client::connect::{Connection, Service};
use crate::client::queries::{orphan_handle, orphans, worker};
use crate::client::references::Wanted;
use crate::client::why;
use crate::ending::error::{refusal, with_advice};
use crate::render::json;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{bytes, count, duration};

/// Maximum number of handles in one call.
const CALL_LIMIT: usize = 1000;

/// Executes `gantry adopt`.
pub(crate) async fn adopt(connection: &Connection, args: &AdoptArgs, as_json: bool) -> anyhow::Result<()> {
    let volume = &handle_of(connection, "adopt", &args.volume).await?;
    let request = AdoptRequest {
        team: connection.team.clone(),
        volume_handle: volume.clone(),
        worker_id: String::new(),
        artifact_id: args.artifact.map(|artifact| artifact.to_string()).unwrap_or_default(),
        kept_by: Some(match args.build {
            Some(build) => KeptBy::BuildId(build.to_string()),
            None => KeptBy::Keep(rpc::duration(args.keep)),
        }),
    };
    let client = connection.inventory();
    let doing = format!("cannot adopt volume {volume}");
    let answered = connection
        .repeat(Service::ArtifactStore, &doing, async || client.clone().adopt(request.clone()).await)
        .await;
    let response = listed(connection, volume, Reason::VolumeNotFound, answered).await?;
    let artifact = response.artifact.unwrap_or_default();
    if as_json {
        return print_json(&json::artifact(&artifact));
    }
    print(&adopted(volume, &artifact, args))
}

/// Returns the handle of the orphan whose handle begins with `reference`. A whole handle needs no
/// call. `doing` is the verb for the error text.
async fn handle_of(connection: &Connection, doing: &str, reference: &str) -> anyhow::Result<String> {
    if let Ok(handle) = values::any_id(reference) {
        return Ok(handle);
    }
    let ids = id_range(reference).map(|(first, last)| [first, last].map(|id| id.to_string()));
    let is_wanted = |one: &Orphan| {
        let handle = orphan_handle(one);
        let is_among = ids.as_ref().is_some_and(|[first, last]| (&**first..=&**last).contains(&handle));
        std::future::ready(is_among)
    };
    let row = |one: &Orphan| vec![orphan_handle(one).to_owned(), labels::ago(one.first_seen_at.as_ref())];
    let wanted = Wanted { doing, kind: "orphan", reference };
    let handle = wanted.only(["HANDLE", "FIRST SEEN"], row, async |_| {
        let found = orphans(connection, String::new()).try_filter(is_wanted).try_collect();
        Ok((found.await?, String::new()))
    });
    handle.await
}

fn adopted(volume: &str, artifact: &Artifact, args: &AdoptArgs) -> String {
    let kept = match args.build {
        Some(build) => format!("kept by build {build}"),
        None => format!("kept for at least {}", duration(args.keep)),
    };
    let id = &artifact.artifact_id;
    format!("volume {volume} is a replica of artifact {id}: {}, {kept}\n", bytes(artifact.size_bytes))
}

/// Returns `answered`. If the object is not an orphan, the error gets advice about finding orphans.
async fn listed<T>(
    connection: &Connection,
    id: &str,
    unknown: Reason,
    answered: anyhow::Result<T>,
) -> anyhow::Result<T> {
    match answered {
        Err(error) if refusal(&error).is_some_and(|refused| refused.is(unknown)) => {
            let list = "see `gantry list volumes --orphans` and `gantry list containers --orphans`";
            let known = why::orphan_advice(connection, id).await;
            Err(with_advice(error, known.unwrap_or_else(|| list.to_owned())))
        }
        answered => answered,
    }
}

/// Executes `gantry purge`.
pub(crate) async fn purge(connection: &Connection, args: &PurgeArgs, as_json: bool) -> anyhow::Result<()> {
    let worker_id = match &args.worker {
        Some(name) => worker(connection, "purge orphans on", name).await?.worker_id,
        None => String::new(),
    };
    let handles = if args.all {
        let all = orphans(connection, worker_id.clone()).map_ok(|one| orphan_handle(&one).to_owned());
        all.try_collect().await?
    } else {
        let handles = args.handles.iter();
        try_join_all(handles.map(|handle| handle_of(connection, "purge", handle))).await?
    };
    if handles.is_empty() && !args.all {
        bail!("give the handles to purge, or --all; see `gantry list volumes --orphans`");
    }
    let mut purged = PurgeResponse::default();
    for some in handles.chunks(CALL_LIMIT) {
        let request = PurgeRequest { handles: some.to_vec(), worker_id: worker_id.clone() };
        let client = connection.inventory();
        let doing = "cannot purge orphans";
        let answered = connection
            .repeat(Service::ArtifactStore, doing, async || client.clone().purge(request.clone()).await)
            .await;
        let named = |error: &anyhow::Error| {
            refusal(error).and_then(|refused| some.iter().find(|handle| refused.names(handle)).cloned())
        };
        let id = answered.as_ref().err().and_then(named).unwrap_or_default();
        let response = listed(connection, &id, Reason::UnknownId, answered).await?;
        purged.volumes += response.volumes;
        purged.containers += response.containers;
    }
    if as_json {
        return print_json(
            &serde_json::json!({ "volumes": purged.volumes, "containers": purged.containers }),
        );
    }
    print(&format!("{}\n", summary(&purged)))
}

fn summary(purged: &PurgeResponse) -> String {
    let PurgeResponse { volumes, containers } = *purged;
    format!("{} and {} marked as garbage", count(volumes, "volume"), count(containers, "container"))
}

#[cfg(test)]
mod tests {
    use domain::{ArtifactId, VolumeHandle};

    use std::time::Duration;

    use super::*;

    #[test]
    fn adopted_and_purged_orphans_are_described() {
        let purged = PurgeResponse { volumes: 1, containers: 2 };
        assert_eq!(summary(&purged), "1 volume and 2 containers marked as garbage");
        let volume = VolumeHandle::new().to_string();
        let artifact = Artifact { artifact_id: ArtifactId::new().to_string(), ..Artifact::default() };
        let args = AdoptArgs {
            volume: volume.clone(),
            artifact: None,
            build: None,
            keep: Duration::from_secs(5400),
        };
        let id = &artifact.artifact_id;
        let expected =
            format!("volume {volume} is a replica of artifact {id}: 0 B, kept for at least 90 min\n");
        assert_eq!(adopted(&volume, &artifact, &args), expected);
    }
}
