//! Calls about several artifacts, and about their owners.

use std::sync::atomic::{AtomicUsize, Ordering};

use rpc::pb::artifacts as pb;

use super::{World, done};
use crate::model::operations::{Artifact, Operation};
use crate::model::state::{Outcome, artifact_id, build_id};
use crate::{Answer, Callers, TEAM};

impl World {
    /// Applies one operation on several artifacts or owners.
    pub(super) async fn perform_on_owners(&self, operation: &Operation) -> Outcome {
        use Operation as O;
        let ids = |artifacts: &[Artifact]| -> Vec<String> {
            artifacts.iter().map(|artifact| artifact_id(*artifact).to_string()).collect()
        };
        match *operation {
            O::CreateAll { ref uploads, owner } => {
                let artifacts = uploads.iter().map(|upload| pb::NewArtifact {
                    artifact_id: artifact_id(Artifact::Upload(*upload)).to_string(),
                    label: String::new(),
                });
                let request = pb::BatchCreateArtifactsRequest {
                    team: TEAM.to_owned(),
                    build_id: owner.map(|build| build_id(build).to_string()).unwrap_or_default(),
                    artifacts: artifacts.collect(),
                };
                let create = |callers: Callers| {
                    let request = request.clone();
                    async move { Ok(callers.artifacts().batch_create_artifacts(request).await.map(drop)?) }
                };
                done(self.ask(create).await)
            }
            O::AddOwner { ref artifacts, build } => {
                let (ids, build) = (ids(artifacts), build_id(build).to_string());
                self.change_owner(|callers| add(callers, ids.clone(), build.clone())).await
            }
            O::RemoveOwner { ref artifacts, build } => {
                let (ids, build) = (ids(artifacts), build_id(build).to_string());
                self.change_owner(|callers| remove(callers, ids.clone(), build.clone())).await
            }
            _ => Outcome::Skipped,
        }
    }

    async fn change_owner<F>(&self, change: impl Fn(Callers) -> F) -> Outcome
    where
        F: Future<Output = Answer<()>>,
    {
        let asked = AtomicUsize::new(0);
        let change = |callers| {
            asked.fetch_add(1, Ordering::Relaxed);
            change(callers)
        };
        let answer = self.ask(change).await;
        Outcome::Owned { answer, again: asked.load(Ordering::Relaxed) > 1 }
    }
}

/// Adds an owner, with the call for one artifact or for several.
async fn add(callers: Callers, artifact_ids: Vec<String>, build_id: String) -> Answer<()> {
    let team = TEAM.to_owned();
    if let [artifact_id] = artifact_ids.as_slice() {
        let request = pb::AddOwnerRequest { team, artifact_id: artifact_id.clone(), build_id };
        callers.artifacts().add_owner(request).await?;
    } else {
        let request = pb::BatchAddOwnerRequest { team, artifact_ids, build_id };
        callers.artifacts().batch_add_owner(request).await?;
    }
    Ok(())
}

/// Removes an owner, with the call for one artifact or for several.
async fn remove(callers: Callers, artifact_ids: Vec<String>, build_id: String) -> Answer<()> {
    let team = TEAM.to_owned();
    if let [artifact_id] = artifact_ids.as_slice() {
        let request = pb::RemoveOwnerRequest { team, artifact_id: artifact_id.clone(), build_id };
        callers.artifacts().remove_owner(request).await?;
    } else {
        let request = pb::BatchRemoveOwnerRequest { team, artifact_ids, build_id };
        callers.artifacts().batch_remove_owner(request).await?;
    }
    Ok(())
}
