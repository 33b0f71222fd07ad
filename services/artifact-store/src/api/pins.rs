//! Handlers of `gantry.artifacts.v1.Pins`.

use std::collections::HashSet;

use domain::{Digest, Timestamp};
use rpc::Message;
use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};

use crate::api::{
    Handlers, MAX_ARTIFACTS, MAX_TASK_CACHES, SERVICE, errors, location, parse_artifacts, parse_build_status,
};
use crate::pins::{self, PinRequest, SettledOutput, Settlement};

#[tonic::async_trait]
impl pb::pins_server::Pins for Handlers {
    async fn pin(&self, request: Request<pb::PinRequest>) -> Result<Response<pb::PinResponse>, Status> {
        let request = request.into_inner();
        let used = PinRequest {
            holder: rpc::parse_id("holder_id", &request.holder_id)?,
            team: rpc::parse_team("team", request.team)?,
            artifacts: distinct(parse_artifacts("artifact_ids", &request.artifact_ids)?),
            build: rpc::parse_optional_id("build_id", &request.build_id)?,
            task_caches: parse_task_caches(&request.task_cache_ids)?,
        };

        let pinned = self.pins.pin(used).await?;

        Ok(Response::new(pb::PinResponse {
            locations: pinned.artifacts.into_iter().map(location).collect(),
            task_cache_locations: pinned.task_caches.into_iter().map(location).collect(),
        }))
    }

    async fn settle(
        &self,
        request: Request<pb::SettleRequest>,
    ) -> Result<Response<pb::SettleResponse>, Status> {
        let mut request = request.into_inner();
        let attempt = std::mem::take(&mut request.attempt_id);
        let digest = Digest(*blake3::hash(&request.encode_to_vec()).as_bytes());
        let settlement = Settlement {
            holder: rpc::parse_id("holder_id", &request.holder_id)?,
            team: rpc::parse_team("team", request.team)?,
            attempt: rpc::parse_optional_id("attempt_id", &attempt)?,
            digest,
            outputs: parse_outputs(request.outputs)?,
            build: rpc::parse_optional_id("build_id", &request.build_id)?,
            status: parse_build_status("status", request.status)?,
        };

        let settled = self.pins.settle(settlement).await?;

        let missing = settled.missing.into_iter().map(|(owner, artifact)| pb::OwnerMissing {
            artifact_id: artifact.to_string(),
            owner: Some(rpc::owner::settled(owner)),
        });
        Ok(Response::new(pb::SettleResponse { missing: missing.collect(), differs: settled.differs }))
    }

    async fn end_attempt(
        &self,
        request: Request<pb::EndAttemptRequest>,
    ) -> Result<Response<pb::EndAttemptResponse>, Status> {
        let request = request.into_inner();
        let holder = rpc::parse_id("holder_id", &request.holder_id)?;
        let attempt = rpc::parse_id("attempt_id", &request.attempt_id)?;
        let now = self.store.now();

        self.store.db.write(|txn| async move { pins::end_attempt(&txn, holder, attempt, now).await }).await?;

        Ok(Response::new(pb::EndAttemptResponse {}))
    }

    async fn list_pins(
        &self,
        request: Request<pb::ListPinsRequest>,
    ) -> Result<Response<pb::ListPinsResponse>, Status> {
        let request = request.into_inner();
        let page = Page::of(SERVICE, &request)?;

        let holders = pins::list(self.store.db.read(), page)
            .await
            .map_err(|error| errors::database("list pins", &error))?;

        let holders = holders.into_iter().map(|holder| {
            let shown = pb::PinHolder {
                holder_id: holder.holder_id.to_string(),
                pinned_at: Some(rpc::timestamp(Timestamp(holder.pinned_at))),
                team: holder.team,
            };
            (holder.holder_id, shown)
        });
        let (holders, next_page_token) = super::end_page(page, holders.collect());
        Ok(Response::new(pb::ListPinsResponse { holders, next_page_token }))
    }
}

fn parse_outputs(outputs: Vec<pb::SettledOutput>) -> Result<Vec<SettledOutput>, Status> {
    if outputs.len() > MAX_ARTIFACTS {
        return Err(rpc::invalid_field("outputs", format!("must have at most {MAX_ARTIFACTS} items")));
    }
    let (mut seen, mut caches) = (HashSet::new(), HashSet::new());
    outputs
        .into_iter()
        .map(|output| {
            let artifact = rpc::parse_id("outputs.artifact_id", &output.artifact_id)?;
            if !seen.insert(artifact) {
                return Err(rpc::invalid_field("outputs.artifact_id", "must be unique"));
            }
            let digest = rpc::parse_digest("outputs.digest", &output.digest)?;
            let label = rpc::parse_label("outputs.label", output.label)?;
            let owners = rpc::owner::parse_settled("outputs.owners", output.owners, &mut caches)?;
            let for_owners_only = output.for_owners_only;
            if for_owners_only && owners.is_empty() {
                return Err(rpc::invalid_field("outputs.for_owners_only", "requires owners"));
            }
            Ok(SettledOutput { artifact, digest, label, owners, for_owners_only })
        })
        .collect()
}

fn parse_task_caches(caches: &[String]) -> Result<Vec<domain::CacheId>, Status> {
    if caches.len() > MAX_TASK_CACHES {
        return Err(rpc::invalid_field("task_cache_ids", format!("must be at most {MAX_TASK_CACHES}")));
    }
    caches.iter().map(|cache| rpc::parse_id("task_cache_ids", cache)).collect()
}

/// Removes duplicates, and keeps the order.
fn distinct(ids: Vec<domain::ArtifactId>) -> Vec<domain::ArtifactId> {
    let mut seen = HashSet::new();
    ids.into_iter().filter(|id| seen.insert(*id)).collect()
}
