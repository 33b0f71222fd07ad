//! Columns of `gantry list artifacts`, and fields of each listed object.

use rpc::pb::artifacts::{Artifact, ArtifactState, Replica};

use crate::render::labels::{self, BYTES_LOST};
use crate::render::table::{bytes, plain};

pub(super) const ARTIFACTS: &[&str] = &["ID", "STATE", "SIZE", "AGE", "REPLICAS", "LABEL", "KEPT BY"];

pub(super) fn artifact_row(artifact: &Artifact) -> Vec<String> {
    vec![
        artifact.artifact_id.clone(),
        labels::artifact_state(artifact.state()).to_owned(),
        bytes(artifact.size_bytes),
        labels::ago(artifact.created_at.as_ref()),
        if artifact.in_store {
            format!("{} + store", artifact.replicas.len())
        } else {
            artifact.replicas.len().to_string()
        },
        plain(&artifact.label, 30),
        match artifact.marked_at {
            Some(at) => {
                format!("deleted {} ago: {}", labels::ago(Some(&at)), plain(&artifact.mark_reason, 80))
            }
            None => plain(&artifact.kept_by.join(", "), 80),
        },
    ]
}

pub(super) fn artifact_fields(artifact: &Artifact) -> Vec<(&'static str, String)> {
    let of_replica =
        |replica: &Replica| format!("volume {} on worker {}", replica.volume_handle, replica.worker_id);
    let in_store = artifact.in_store.then(|| labels::IN_STORE.to_owned());
    let mut bytes_are: Vec<_> =
        in_store.into_iter().chain(artifact.replicas.iter().map(of_replica)).collect();
    let is_lost = bytes_are.is_empty() && artifact.state() == ArtifactState::Sealed;
    if is_lost {
        bytes_are
            .push(format!("lost: produce the artifact again; see `gantry explain {}`", artifact.artifact_id));
    }
    let state = labels::artifact_state(artifact.state());
    vec![
        ("id", artifact.artifact_id.clone()),
        ("label", plain(&artifact.label, 255)),
        ("state", if is_lost { format!("{state} ({BYTES_LOST})") } else { state.to_owned() }),
        ("size", bytes(artifact.size_bytes)),
        ("digest", hex::encode(&artifact.digest)),
        ("created", artifact.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("kept by", artifact.kept_by.join("\n")),
        ("deleted", artifact.marked_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("reason", plain(&artifact.mark_reason, 255)),
        ("bytes", bytes_are.join("\n")),
    ]
}
