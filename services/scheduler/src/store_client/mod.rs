//! The client of the artifact store: pins, locations of artifacts, and settlements.

pub(crate) mod delivery;
pub(crate) mod reconcile;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use domain::worker::{LeaseClaims, TicketOperation};
use domain::workload::{Image, Outcome, OutputOwner};
use domain::{ArtifactId, AttemptId, BuildId, CacheId, Digest, LeaseId, Timestamp, VolumeHandle, WorkerId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::pins_client::PinsClient;
use rpc::pb::artifacts::replicas_client::ReplicasClient;
use rpc::{Peer, Refusal};
use tonic::Request;
use uuid::Uuid;

use crate::outbox::Settlement;
use crate::placement::Location;
use crate::workloads::Submission;

/// Deadline of a call.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// Deadline of the removal of a worker, which may have held many volumes.
const FORGET_DEADLINE: Duration = Duration::from_secs(60);

/// How the artifact store handles the removal of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forget {
    /// Only check whether data would be lost.
    Check,
    /// Remove the worker, even if data is lost.
    Now,
}

/// The client of the artifact store. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pins: PinsClient<Peer>,
    artifacts: ArtifactsClient<Peer>,
    caches: CachesClient<Peer>,
    inventory: InventoryClient<Peer>,
    replicas: ReplicasClient<Peer>,
}

/// A workload or a driven lease with pins in the store.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) id: Uuid,
    pub(crate) team: String,
    pub(crate) pinned_at: Timestamp,
}

/// The artifacts and task caches of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Inputs {
    pub(crate) artifacts: BTreeSet<ArtifactId>,
    pub(crate) caches: BTreeSet<CacheId>,
}

impl Inputs {
    /// Returns whether there are no inputs.
    pub(crate) fn is_empty(&self) -> bool {
        self.artifacts.is_empty() && self.caches.is_empty()
    }
}

/// What the holder of a driven lease keeps.
#[derive(Debug, Clone)]
pub(crate) struct LeaseSettlement {
    pub(crate) artifacts: Vec<SettledArtifact>,
    /// The build that owns all artifacts.
    pub(crate) build: Option<BuildId>,
    pub(crate) outcome: Outcome,
}

/// A candidate to seal.
#[derive(Debug, Clone)]
pub(crate) struct SettledArtifact {
    pub(crate) id: ArtifactId,
    pub(crate) digest: Digest,
    pub(crate) label: String,
    pub(crate) owners: Vec<OutputOwner>,
    pub(crate) for_owners_only: bool,
}

/// Result of the settlement of a driven lease.
#[derive(Debug)]
pub(crate) struct SettledLease {
    /// Owners that artifacts did not get.
    pub(crate) missing: Vec<(ArtifactId, OutputOwner)>,
    /// Whether another settlement came first, so that the artifacts are not sealed.
    pub(crate) differs: bool,
}

/// The locations of inputs.
#[derive(Debug)]
pub(crate) enum Located {
    /// The locations of all artifacts, and of the latest versions of caches that have one.
    All(Vec<Location>),
    /// This artifact is unknown to the team, not sealed, or has no replica.
    Missing(ArtifactId),
    /// This task cache is unknown to the team.
    MissingCache(CacheId),
}

fn with_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

impl Store {
    /// Resolves a resource type: the cluster-wide artifact if there is one, otherwise the image
    /// that workers provide.
    pub(crate) async fn image(&self, resource_type: &str) -> Result<Image, Refusal> {
        let cluster_wide = self.cluster_wide_base_type(resource_type).await?;
        Ok(cluster_wide.map_or_else(|| Image::ResourceType(resource_type.to_owned()), Image::Artifact))
    }

    /// Creates a client for the store behind `peer`.
    pub(crate) fn new(peer: Peer) -> Self {
        Self {
            pins: PinsClient::new(peer.clone()),
            artifacts: ArtifactsClient::new(peer.clone()),
            caches: CachesClient::new(peer.clone()),
            inventory: InventoryClient::new(peer.clone()),
            replicas: ReplicasClient::new(peer),
        }
    }

    /// Pins the inputs of a driven lease.
    pub(crate) async fn pin_for_lease(
        &self,
        lease: LeaseId,
        team: &str,
        inputs: &Inputs,
    ) -> Result<(), Refusal> {
        let request = pb::PinRequest {
            holder_id: lease.to_string(),
            team: team.to_owned(),
            artifact_ids: inputs.artifacts.iter().map(ToString::to_string).collect(),
            build_id: String::new(),
            task_cache_ids: inputs.caches.iter().map(ToString::to_string).collect(),
        };
        self.pins.clone().pin(with_deadline(request)).await.map(drop).map_err(Refusal::from)
    }

    /// Locates inputs without pinning them.
    pub(crate) async fn find(&self, team: &str, inputs: &Inputs) -> Result<Located, Refusal> {
        let mut locations = Vec::with_capacity(inputs.artifacts.len());
        if !inputs.artifacts.is_empty() {
            let mut located = self.locate(team, &inputs.artifacts).await?;
            for artifact in &inputs.artifacts {
                match located.remove(artifact) {
                    Some(location) => locations.push(location),
                    None => return Ok(Located::Missing(*artifact)),
                }
            }
        }
        if !inputs.caches.is_empty() {
            match self.locate_caches(team, inputs.caches.iter().copied()).await? {
                Ok(located) => locations.extend(located),
                Err(cache) => return Ok(Located::MissingCache(cache)),
            }
        }
        Ok(Located::All(locations))
    }

    /// Pins the inputs of a workload, and returns their locations and those of the latest cache
    /// versions.
    pub(crate) async fn pin(&self, submission: &Submission) -> Result<Vec<Location>, Refusal> {
        let spec = &submission.spec;
        let request = pb::PinRequest {
            holder_id: submission.id.to_string(),
            team: spec.team.clone(),
            artifact_ids: spec.artifacts().iter().map(ToString::to_string).collect(),
            build_id: spec.build.map(|build| build.to_string()).unwrap_or_default(),
            task_cache_ids: spec.caches.iter().map(|mount| mount.cache.to_string()).collect(),
        };
        let answer = self.pins.clone().pin(with_deadline(request)).await?.into_inner();
        Ok(answer.locations.iter().chain(&answer.task_cache_locations).map(location).collect())
    }

    /// Locates artifacts without pinning them. Artifacts that could not be pinned are omitted.
    pub(crate) async fn locate(
        &self,
        team: &str,
        artifacts: &BTreeSet<ArtifactId>,
    ) -> Result<BTreeMap<ArtifactId, Location>, Refusal> {
        let request = pb::LocateRequest {
            team: team.to_owned(),
            artifact_ids: artifacts.iter().map(ToString::to_string).collect(),
        };
        let answer = self.artifacts.clone().locate(with_deadline(request)).await?.into_inner();
        let usable = |found: &&pb::Location| {
            found.state() == pb::ArtifactState::Sealed && (found.in_store || !found.replicas.is_empty())
        };
        let located = answer.locations.iter().filter(usable);
        Ok(located.filter_map(|found| Some((found.artifact_id.parse().ok()?, location(found)))).collect())
    }

    /// Locates the latest versions of caches. The inner error names a cache that the team does not
    /// have.
    async fn locate_caches(
        &self,
        team: &str,
        caches: impl Iterator<Item = CacheId>,
    ) -> Result<Result<Vec<Location>, CacheId>, Refusal> {
        let request = pb::LocateCachesRequest {
            team: team.to_owned(),
            cache_ids: caches.map(|cache| cache.to_string()).collect(),
        };
        let answer = self.caches.clone().locate_caches(with_deadline(request)).await?.into_inner();
        if let Some(unknown) = answer.unknown_cache_ids.iter().find_map(|cache| cache.parse().ok()) {
            return Ok(Err(unknown));
        }
        Ok(Ok(answer.locations.iter().filter_map(|found| Some(location(found.location.as_ref()?))).collect()))
    }

    /// Returns the cluster-wide artifact of a resource type.
    pub(crate) async fn cluster_wide_base_type(&self, name: &str) -> Result<Option<ArtifactId>, Refusal> {
        let request = pb::ListBaseResourceTypesRequest {
            r#type: name.to_owned(),
            cluster_wide: true,
            ..Default::default()
        };
        let answer = self.caches.clone().list_base_resource_types(with_deadline(request)).await?.into_inner();
        // An older store also lists the types of workers and of other names.
        let is_asked_for = |known: &&pb::BaseResourceType| known.worker_id.is_empty() && known.r#type == name;
        Ok(answer.types.iter().find(is_asked_for).and_then(|known| known.artifact_id.parse().ok()))
    }

    /// Settles a workload, or a driven lease without outputs.
    pub(crate) async fn settle(&self, holder: Uuid, settlement: &Settlement) -> Result<(), Refusal> {
        let outputs = settlement.outputs.iter().map(|output| pb::SettledOutput {
            artifact_id: output.artifact.to_string(),
            digest: output.digest.as_bytes().to_vec().into(),
            label: output.name.clone(),
            owners: settlement
                .owners
                .iter()
                .filter(|(artifact, _)| *artifact == output.artifact)
                .map(|(_, owner)| rpc::owner::settled(*owner))
                .collect(),
            for_owners_only: false,
        });
        let caches = settlement.caches.iter().map(|left| pb::SettledOutput {
            artifact_id: left.artifact.to_string(),
            digest: left.digest.as_bytes().to_vec().into(),
            label: "task cache".to_owned(),
            owners: vec![rpc::owner::settled(OutputOwner::TaskCache(left.cache))],
            for_owners_only: true,
        });
        let request = pb::SettleRequest {
            holder_id: holder.to_string(),
            team: settlement.team.clone(),
            attempt_id: settlement.attempt.map(|attempt| attempt.to_string()).unwrap_or_default(),
            outputs: outputs.chain(caches).collect(),
            build_id: settlement.build.map(|build| build.to_string()).unwrap_or_default(),
            status: build_status(settlement.outcome).into(),
        };
        let answer = self.pins.clone().settle(with_deadline(request)).await?.into_inner();
        for missing in answer.missing {
            tracing::warn!(
                holder.id = %holder,
                artifact.id = missing.artifact_id,
                owner = ?missing.owner,
                "output settled without one of its owners, which no longer exists"
            );
        }
        if answer.differs {
            tracing::warn!(
                holder.id = %holder,
                attempt.id = settlement.attempt.map(tracing::field::display),
                "cannot seal the outputs of a holder: another settlement of it counts"
            );
        }
        Ok(())
    }

    /// Settles a driven lease with candidates of all its containers.
    pub(crate) async fn settle_lease(
        &self,
        claims: &LeaseClaims,
        settlement: LeaseSettlement,
    ) -> Result<SettledLease, Refusal> {
        let output = |artifact: SettledArtifact| pb::SettledOutput {
            artifact_id: artifact.id.to_string(),
            digest: artifact.digest.as_bytes().to_vec().into(),
            label: artifact.label,
            owners: artifact.owners.into_iter().map(rpc::owner::settled).collect(),
            for_owners_only: artifact.for_owners_only,
        };
        let request = pb::SettleRequest {
            holder_id: claims.lease.to_string(),
            team: claims.team.clone(),
            attempt_id: String::new(),
            outputs: settlement.artifacts.into_iter().map(output).collect(),
            build_id: settlement.build.map(|build| build.to_string()).unwrap_or_default(),
            status: build_status(settlement.outcome).into(),
        };
        let answer = self.pins.clone().settle(with_deadline(request)).await?.into_inner();
        let missing = answer.missing.into_iter().filter_map(|missing| {
            let owner = rpc::owner::parse_settled("missing", vec![missing.owner?], &mut HashSet::new());
            Some((missing.artifact_id.parse().ok()?, owner.ok()?.pop()?))
        });
        Ok(SettledLease { missing: missing.collect(), differs: answer.differs })
    }

    /// Ends one attempt at a workload.
    pub(crate) async fn end_attempt(&self, holder: Uuid, attempt: AttemptId) -> Result<(), Refusal> {
        let request =
            pb::EndAttemptRequest { holder_id: holder.to_string(), attempt_id: attempt.to_string() };
        self.pins.clone().end_attempt(with_deadline(request)).await?;
        Ok(())
    }

    /// Removes a worker with its contents, or checks whether that would lose kept data.
    pub(crate) async fn forget_worker(&self, worker: WorkerId, forget: Forget) -> Result<(), Refusal> {
        let request = pb::ForgetWorkerRequest {
            worker_id: worker.to_string(),
            force: forget == Forget::Now,
            dry_run: forget == Forget::Check,
        };
        let mut request = Request::new(request);
        request.set_timeout(FORGET_DEADLINE);
        self.inventory.clone().forget_worker(request).await?;
        Ok(())
    }

    /// Checks that the store has planned a transfer of a volume for a team.
    pub(crate) async fn authorize_transfer(
        &self,
        team: &str,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: TicketOperation,
    ) -> Result<(), Refusal> {
        let direction = match operation {
            TicketOperation::Write => pb::TransferDirection::Write,
            TicketOperation::Read => pb::TransferDirection::Read,
        };
        let request = pb::AuthorizeTransferRequest {
            team: team.to_owned(),
            worker_id: worker.to_string(),
            volume_handle: volume.to_string(),
            direction: direction.into(),
        };
        self.replicas.clone().authorize_transfer(with_deadline(request)).await?;
        Ok(())
    }

    /// Returns a page of holders, and the token of the next page.
    pub(crate) async fn holders(&self, page_token: String) -> Result<(Vec<Holder>, String), Refusal> {
        let request = pb::ListPinsRequest { page_size: 1000, page_token };
        let answer = self.pins.clone().list_pins(with_deadline(request)).await?.into_inner();
        let holders = answer.holders.into_iter().filter_map(|holder| {
            let pinned_at = holder.pinned_at.as_ref().map_or(Timestamp::now(), rpc::from_timestamp);
            Some(Holder { id: holder.holder_id.parse().ok()?, team: holder.team, pinned_at })
        });
        Ok((holders.collect(), answer.next_page_token))
    }
}

fn build_status(outcome: Outcome) -> pb::BuildStatus {
    match outcome {
        Outcome::Succeeded => pb::BuildStatus::Succeeded,
        Outcome::Failed => pb::BuildStatus::Failed,
        Outcome::Errored => pb::BuildStatus::Errored,
        Outcome::Aborted => pb::BuildStatus::Aborted,
    }
}

fn location(found: &pb::Location) -> Location {
    Location {
        size_bytes: found.size_bytes,
        workers: found.replicas.iter().filter_map(|replica| replica.worker_id.parse().ok()).collect(),
    }
}
