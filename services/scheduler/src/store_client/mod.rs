//! The artifact store, as the scheduler calls it: pins, where bytes are, and how workloads ended.

pub(crate) mod delivery;
pub(crate) mod reconcile;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use domain::worker::TicketOperation;
use domain::workload::{Image, Outcome, OutputOwner};
use domain::{ArtifactId, AttemptId, CacheId, LeaseId, Timestamp, VolumeHandle, WorkerId};
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

/// How long a call may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long it may take to forget a worker, which may have held a lot.
const FORGETTING: Duration = Duration::from_secs(60);

/// What the artifact store is asked about a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Forget {
    /// Whether it would lose something by that.
    Check,
    /// To forget it, whatever that loses.
    Now,
}

/// Calls the store. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pins: PinsClient<Peer>,
    artifacts: ArtifactsClient<Peer>,
    caches: CachesClient<Peer>,
    inventory: InventoryClient<Peer>,
    replicas: ReplicasClient<Peer>,
}

/// A workload or a driven lease that the store keeps something for.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) id: Uuid,
    pub(crate) team: String,
    pub(crate) pinned_at: Timestamp,
}

/// What is used by somebody.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Inputs {
    pub(crate) artifacts: BTreeSet<ArtifactId>,
    pub(crate) caches: BTreeSet<CacheId>,
}

impl Inputs {
    /// Whether nothing is used.
    pub(crate) fn is_empty(&self) -> bool {
        self.artifacts.is_empty() && self.caches.is_empty()
    }
}

/// Where inputs are.
#[derive(Debug)]
pub(crate) enum Found {
    /// All of them, and the latest versions of those caches that have some.
    All(Vec<Location>),
    /// This one is unknown to the team, not sealed, or nowhere.
    Missing(ArtifactId),
    /// This one is unknown to the team.
    MissingCache(CacheId),
}

fn within<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(DEADLINE);
    request
}

impl Store {
    /// What a resource type stands for: what the cluster has of it, before what workers bring along.
    pub(crate) async fn image(&self, resource_type: &str) -> Result<Image, Refusal> {
        let cluster_wide = self.cluster_wide_base_type(resource_type).await?;
        Ok(cluster_wide.map_or_else(|| Image::ResourceType(resource_type.to_owned()), Image::Artifact))
    }

    /// The store behind `peer`.
    pub(crate) fn new(peer: Peer) -> Self {
        Self {
            pins: PinsClient::new(peer.clone()),
            artifacts: ArtifactsClient::new(peer.clone()),
            caches: CachesClient::new(peer.clone()),
            inventory: InventoryClient::new(peer.clone()),
            replicas: ReplicasClient::new(peer),
        }
    }

    /// Pins what is used under a driven lease.
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
        self.pins.clone().pin(within(request)).await.map(drop).map_err(Refusal::from)
    }

    /// Where inputs are, as far as they are somewhere, without pinning them.
    pub(crate) async fn find(&self, team: &str, inputs: &Inputs) -> Result<Found, Refusal> {
        let mut locations = Vec::with_capacity(inputs.artifacts.len());
        if !inputs.artifacts.is_empty() {
            let mut located = self.locate(team, &inputs.artifacts).await?;
            for artifact in &inputs.artifacts {
                match located.remove(artifact) {
                    Some(location) => locations.push(location),
                    None => return Ok(Found::Missing(*artifact)),
                }
            }
        }
        if !inputs.caches.is_empty() {
            match self.locate_caches(team, inputs.caches.iter().copied()).await? {
                Ok(located) => locations.extend(located),
                Err(cache) => return Ok(Found::MissingCache(cache)),
            }
        }
        Ok(Found::All(locations))
    }

    /// Pins what a workload uses, and answers where that is, and the latest versions of its caches.
    pub(crate) async fn pin(&self, submission: &Submission) -> Result<Vec<Location>, Refusal> {
        let spec = &submission.spec;
        let request = pb::PinRequest {
            holder_id: submission.id.to_string(),
            team: spec.team.clone(),
            artifact_ids: spec.artifacts().iter().map(ToString::to_string).collect(),
            build_id: spec.build.map(|build| build.to_string()).unwrap_or_default(),
            task_cache_ids: spec.caches.iter().map(|mount| mount.cache.to_string()).collect(),
        };
        let answer = self.pins.clone().pin(within(request)).await?.into_inner();
        Ok(answer.locations.iter().chain(&answer.task_cache_locations).map(location).collect())
    }

    /// Where these artifacts are, without pinning them. Those that could not be pinned are left out.
    pub(crate) async fn locate(
        &self,
        team: &str,
        artifacts: &BTreeSet<ArtifactId>,
    ) -> Result<BTreeMap<ArtifactId, Location>, Refusal> {
        let request = pb::LocateRequest {
            team: team.to_owned(),
            artifact_ids: artifacts.iter().map(ToString::to_string).collect(),
        };
        let answer = self.artifacts.clone().locate(within(request)).await?.into_inner();
        let usable = |found: &&pb::Location| {
            found.state() == pb::ArtifactState::Sealed && (found.in_store || !found.replicas.is_empty())
        };
        let located = answer.locations.iter().filter(usable);
        Ok(located.filter_map(|found| Some((found.artifact_id.parse().ok()?, location(found)))).collect())
    }

    /// Where the latest versions of these caches are, of those that have some. Or a cache that is none of the team's.
    async fn locate_caches(
        &self,
        team: &str,
        caches: impl Iterator<Item = CacheId>,
    ) -> Result<Result<Vec<Location>, CacheId>, Refusal> {
        let request = pb::LocateCachesRequest {
            team: team.to_owned(),
            cache_ids: caches.map(|cache| cache.to_string()).collect(),
        };
        let answer = self.caches.clone().locate_caches(within(request)).await?.into_inner();
        if let Some(unknown) = answer.unknown_cache_ids.iter().find_map(|cache| cache.parse().ok()) {
            return Ok(Err(unknown));
        }
        Ok(Ok(answer.locations.iter().filter_map(|found| Some(location(found.location.as_ref()?))).collect()))
    }

    /// The artifact that the cluster has for a resource type.
    pub(crate) async fn cluster_wide_base_type(&self, name: &str) -> Result<Option<ArtifactId>, Refusal> {
        let request = pb::ListBaseResourceTypesRequest {
            r#type: name.to_owned(),
            cluster_wide: true,
            ..Default::default()
        };
        let answer = self.caches.clone().list_base_resource_types(within(request)).await?.into_inner();
        // A store of an older version lists those of workers and of other names, too.
        let is_asked_for = |known: &&pb::BaseResourceType| known.worker_id.is_empty() && known.r#type == name;
        Ok(answer.types.iter().find(is_asked_for).and_then(|known| known.artifact_id.parse().ok()))
    }

    /// Ends a workload, or a driven lease, for good.
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
        let status = match settlement.outcome {
            Outcome::Succeeded => pb::BuildStatus::Succeeded,
            Outcome::Failed => pb::BuildStatus::Failed,
            Outcome::Errored => pb::BuildStatus::Errored,
            Outcome::Aborted => pb::BuildStatus::Aborted,
        };
        let request = pb::SettleRequest {
            holder_id: holder.to_string(),
            team: settlement.team.clone(),
            attempt_id: settlement.attempt.map(|attempt| attempt.to_string()).unwrap_or_default(),
            outputs: outputs.chain(caches).collect(),
            build_id: settlement.build.map(|build| build.to_string()).unwrap_or_default(),
            status: status.into(),
        };
        let answer = self.pins.clone().settle(within(request)).await?.into_inner();
        for missing in answer.missing {
            tracing::warn!(
                holder.id = %holder,
                artifact.id = missing.artifact_id,
                owner = ?missing.owner,
                "an output has one owner less than it should: that is gone"
            );
        }
        Ok(())
    }

    /// Ends one attempt at a workload.
    pub(crate) async fn end_attempt(&self, holder: Uuid, attempt: AttemptId) -> Result<(), Refusal> {
        let request =
            pb::EndAttemptRequest { holder_id: holder.to_string(), attempt_id: attempt.to_string() };
        self.pins.clone().end_attempt(within(request)).await?;
        Ok(())
    }

    /// Forgets a worker with all that it held, or says whether that would lose something that is kept.
    pub(crate) async fn forget_worker(&self, worker: WorkerId, forget: Forget) -> Result<(), Refusal> {
        let request = pb::ForgetWorkerRequest {
            worker_id: worker.to_string(),
            force: forget == Forget::Now,
            only_check: forget == Forget::Check,
        };
        let mut request = Request::new(request);
        request.set_timeout(FORGETTING);
        self.inventory.clone().forget_worker(request).await?;
        Ok(())
    }

    /// Says whether the store has planned a transfer of a volume for a team.
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
        self.replicas.clone().authorize_transfer(within(request)).await?;
        Ok(())
    }

    /// One page of those that the store keeps something for, and where to go on.
    pub(crate) async fn holders(&self, page_token: String) -> Result<(Vec<Holder>, String), Refusal> {
        let request = pb::ListPinsRequest { page_size: 1000, page_token };
        let answer = self.pins.clone().list_pins(within(request)).await?.into_inner();
        let holders = answer.holders.into_iter().filter_map(|holder| {
            let pinned_at = holder.pinned_at.as_ref().map_or(Timestamp::now(), rpc::from_timestamp);
            Some(Holder { id: holder.holder_id.parse().ok()?, team: holder.team, pinned_at })
        });
        Ok((holders.collect(), answer.next_page_token))
    }
}

fn location(found: &pb::Location) -> Location {
    Location {
        size_bytes: found.size_bytes,
        workers: found.replicas.iter().filter_map(|replica| replica.worker_id.parse().ok()).collect(),
    }
}
