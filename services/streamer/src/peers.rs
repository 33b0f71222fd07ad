//! The calls to the scheduler and to the artifact store.
//!
//! Their results are types of this crate. Right after the start of a cluster, some calls are
//! rejected because no worker has registered yet. These calls are repeated for a moment.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use domain::{ArtifactId, BuildId, Digest, LeaseId, TransferId, VolumeHandle, WorkerId, WorkloadId};
use rpc::client::{AddressError, Outgoing};
use rpc::pb::artifacts as store;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::artifacts::find_or_create_resource_cache_response::Outcome as CacheOutcome;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::replicas_client::ReplicasClient;
use rpc::pb::scheduler;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::small_tree::SmallTree;
use rpc::token::Keys;
use rpc::{Peer, Reason, Refusal};
use tonic::{Response, Status};
use uuid::Uuid;

use crate::config::Config;
use crate::sources::Replica;

/// Time for which calls are repeated right after the start of a cluster.
pub(crate) const START_PATIENCE: Duration = Duration::from_secs(3);
/// Pause between two such calls.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Shortest term of a claim or a lease that is accepted.
const MIN_TERM: Duration = Duration::from_secs(1);
/// Number of items in a page of a list.
const PAGE_SIZE: u32 = 1000;
/// Type of the resource caches of images.
const IMAGE_CACHE_TYPE: &str = "image";
/// Term if another service returns none.
const DEFAULT_TERM: Duration = Duration::from_secs(60);

/// The services that the streamer calls. Clones share connections.
#[derive(Clone)]
pub(crate) struct Peers {
    artifacts: ArtifactsClient<Peer>,
    caches: CachesClient<Peer>,
    inventory: InventoryClient<Peer>,
    replicas: ReplicasClient<Peer>,
    placements: PlacementsClient<Peer>,
    workers: WorkersClient<Peer>,
    /// The public keys of the scheduler.
    pub(crate) keys: Arc<Keys>,
}

/// The error of a call to another service.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PeerError {
    /// The service rejected the call.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The answer violates the protocol.
    #[error("cannot parse the answer of a service: malformed {0}")]
    Malformed(&'static str),
}

impl From<Status> for PeerError {
    fn from(status: Status) -> Self {
        Self::Refused(status.into())
    }
}

/// The lease of a worker for a transfer.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) token: String,
    pub(crate) worker: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) term: Duration,
}

/// The operation that a ticket permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
}

/// The permission to read or write one volume at the gateway of its worker.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    pub(crate) ticket: String,
    pub(crate) gateway_endpoint: String,
    /// Zone of the worker. Empty: no zone, or an earlier version of the scheduler.
    pub(crate) zone: String,
}

/// A replica that is planned, or already exists.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) outcome: PlanOutcome,
    volume: Option<VolumeHandle>,
    /// The digest of the sealed artifact. Empty: it is not sealed.
    pub(crate) digest: Bytes,
    pub(crate) size_bytes: u64,
    pub(crate) term: Duration,
}

/// The transfer that makes a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlanOutcome {
    /// This transfer makes it.
    Ours,
    /// Another transfer makes it.
    BeingMade,
    /// The replica already exists.
    Complete,
}

/// The places that have the bytes of an artifact.
#[derive(Debug, Clone)]
pub(crate) struct Location {
    pub(crate) is_sealed: bool,
    /// Whether the artifact store has the bytes in its database.
    pub(crate) is_in_store: bool,
    pub(crate) digest: Bytes,
    pub(crate) size_bytes: u64,
    pub(crate) replicas: Vec<Replica>,
}

/// An artifact that already has the bytes of an upload.
#[derive(Debug, Clone)]
pub(crate) struct KnownArtifact {
    pub(crate) artifact_id: String,
    /// Whether the artifact store has the bytes in its database.
    pub(crate) is_in_store: bool,
    /// Workers with a replica, as the store knows them.
    pub(crate) workers: Vec<String>,
}

/// The resource cache of an image, as it is requested.
#[derive(Debug, Clone)]
pub(crate) struct ImageKey {
    pub(crate) team: String,
    pub(crate) digest: Digest,
    /// Whether the image is visible to all teams.
    pub(crate) is_shared: bool,
    /// Reference and platform, for people.
    pub(crate) reference: String,
    pub(crate) platform: String,
}

/// The user that keeps an image.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ImageUser {
    Build(BuildId),
    Workload(WorkloadId),
}

/// A found resource cache.
#[derive(Debug, Clone)]
pub(crate) struct FoundCache {
    pub(crate) cache: String,
    pub(crate) state: CacheState,
}

/// Whether a resource cache has its artifact.
#[derive(Debug, Clone)]
pub(crate) enum CacheState {
    Ready {
        artifact: String,
    },
    /// The caller must make it, and renew its claim within this time.
    Ours {
        term: Duration,
    },
    /// Another caller makes it.
    BeingMade,
}

/// A worker as a possible destination of copies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerSpace {
    pub(crate) worker: WorkerId,
    /// Whether the worker is in contact, and neither cordoned nor retiring.
    pub(crate) is_reliable: bool,
    /// Free disk space above the reserve of the worker, in bytes. `None`: not reported.
    pub(crate) room: Option<u64>,
}

/// Whether a worker is in contact with the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contact {
    Present,
    /// The scheduler started after the last contact, and gives the worker its TTL to return.
    Awaited,
    Silent,
}

impl Peers {
    pub(crate) fn new(config: &Config) -> Result<Self, AddressError> {
        let outgoing = || Outgoing::internal().with_token(config.token.as_deref());
        let store = rpc::client::peer(&config.artifact_store, outgoing())?;
        let scheduler = rpc::client::peer(&config.scheduler, outgoing())?;
        Ok(Self {
            artifacts: ArtifactsClient::new(store.clone()),
            caches: CachesClient::new(store.clone()),
            inventory: InventoryClient::new(store.clone()),
            replicas: ReplicasClient::new(store),
            placements: PlacementsClient::new(scheduler.clone()),
            workers: WorkersClient::new(scheduler.clone()),
            keys: Arc::new(Keys::new(scheduler)),
        })
    }

    /// Leases a worker for a transfer, but none of `avoid`.
    pub(crate) async fn place(&self, team: &str, avoid: &[WorkerId]) -> Result<Lease, PeerError> {
        let place = scheduler::PlaceRequest {
            lease_id: LeaseId::new().to_string(),
            team: team.to_owned(),
            kind: scheduler::PlacementKind::Transfer.into(),
            avoid_workers: avoid.iter().map(ToString::to_string).collect(),
            ..scheduler::PlaceRequest::default()
        };
        let placed = retry_at_start(|| {
            let (mut placements, place) = (self.placements.clone(), place.clone());
            async move { placements.place(place).await }
        })
        .await?;
        Ok(Lease {
            worker: placed.worker_id.parse().map_err(|_| PeerError::Malformed("worker"))?,
            token: placed.lease_token,
            worker_name: placed.worker_name,
            term: term(placed.term),
        })
    }

    /// Renews a lease, and returns its new term.
    pub(crate) async fn renew_lease(&mut self, lease_token: &str) -> Result<Duration, PeerError> {
        let renew = scheduler::RenewRequest { lease_token: lease_token.to_owned() };
        Ok(term(self.placements.renew(renew).await?.into_inner().term))
    }

    /// Releases the worker of a transfer. If that fails, the lease expires.
    pub(crate) async fn release_lease(&mut self, lease_token: String) {
        if let Err(status) =
            self.placements.release(scheduler::ReleaseRequest { lease_token, settlement: None }).await
        {
            tracing::debug!(error = %Refusal::from(status), "cannot release the lease of a transfer: it will expire");
        }
    }

    pub(crate) async fn issue_ticket(
        &mut self,
        team: &str,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: Operation,
    ) -> Result<Ticket, PeerError> {
        let operation = match operation {
            Operation::Read => scheduler::TicketOperation::Read,
            Operation::Write => scheduler::TicketOperation::Write,
        };
        let issue = scheduler::IssueTicketRequest {
            team: team.to_owned(),
            worker_id: worker.to_string(),
            volume_handle: volume.to_string(),
            operation: operation.into(),
        };
        let issued = self.workers.issue_ticket(issue).await?.into_inner();
        let scheduler::IssueTicketResponse { ticket, gateway_endpoint, zone, .. } = issued;
        Ok(Ticket { ticket, gateway_endpoint, zone })
    }

    /// Returns whether a worker is in contact with the scheduler.
    pub(crate) async fn contact(&self, worker: &str) -> Result<Contact, PeerError> {
        let worker_state = match self.get_worker(worker).await {
            Err(PeerError::Refused(refusal)) if refusal.is(Reason::WorkerNotFound) => {
                return Ok(Contact::Silent);
            }
            found => found?,
        };
        Ok(match worker_state.awaited {
            true => Contact::Awaited,
            false if worker_state.state() == scheduler::WorkerState::Running => Contact::Present,
            false => Contact::Silent,
        })
    }

    async fn get_worker(&self, worker: &str) -> Result<scheduler::Worker, PeerError> {
        let request = scheduler::GetWorkerRequest { worker: worker.to_owned() };
        Ok(self.workers.clone().get_worker(request).await?.into_inner().worker.unwrap_or_default())
    }

    /// Returns the id of a worker by its name or id.
    pub(crate) async fn find_worker(&self, worker: &str) -> Result<WorkerId, PeerError> {
        self.get_worker(worker).await?.worker_id.parse().map_err(|_| PeerError::Malformed("worker"))
    }

    /// Lists all workers.
    pub(crate) async fn list_workers(&self) -> Result<Vec<WorkerSpace>, PeerError> {
        let (mut listed, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = scheduler::ListWorkersRequest { page_size: PAGE_SIZE, page_token };
            let page = self.workers.clone().list_workers(request).await?.into_inner();
            listed.extend(page.workers.iter().filter_map(worker_space));
            if page.next_page_token.is_empty() {
                return Ok(listed);
            }
            page_token = page.next_page_token;
        }
    }

    /// Lists the kept artifacts of all teams that would be lost together with `workers`, and that
    /// meet `wanted`.
    pub(crate) async fn list_at_risk(
        &self,
        workers: &[WorkerId],
        wanted: impl Fn(&store::Artifact) -> bool,
    ) -> Result<Vec<store::Artifact>, PeerError> {
        let worker_ids: Vec<_> = workers.iter().map(ToString::to_string).collect();
        let mut request = store::ListAtRiskRequest {
            worker_ids,
            all_teams: true,
            page_size: PAGE_SIZE,
            ..store::ListAtRiskRequest::default()
        };
        let mut listed = Vec::new();
        loop {
            let page = self.inventory.clone().list_at_risk(request.clone()).await?.into_inner();
            listed.extend(page.artifacts.into_iter().filter(&wanted));
            if page.next_page_token.is_empty() {
                return Ok(listed);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// Returns the name of a worker, or its id if the name is not known now.
    pub(crate) async fn worker_name(&self, worker: WorkerId) -> String {
        let id = worker.to_string();
        self.get_worker(&id).await.map_or(id, |worker| worker.name)
    }

    pub(crate) async fn create_artifact(
        &mut self,
        artifact: ArtifactId,
        team: &str,
        build: Option<BuildId>,
        label: &str,
    ) -> Result<(), PeerError> {
        let create = store::CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: team.to_owned(),
            build_id: build_id(build),
            label: label.to_owned(),
            tree: None,
        };
        self.artifacts.create_artifact(create).await?;
        Ok(())
    }

    /// Plans a replica on a worker, under the claim of `transfer`.
    pub(crate) async fn plan_replica(
        &self,
        team: &str,
        artifact: ArtifactId,
        worker: WorkerId,
        transfer: TransferId,
    ) -> Result<Plan, PeerError> {
        let plan = store::PlanReplicaRequest {
            team: team.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            transfer_id: transfer.to_string(),
        };
        let planned = retry_at_start(|| {
            let (mut replicas, plan) = (self.replicas.clone(), plan.clone());
            async move { replicas.plan_replica(plan).await }
        })
        .await?;
        let outcome = match planned.outcome() {
            store::PlanOutcome::Created => PlanOutcome::Ours,
            store::PlanOutcome::InProgress => PlanOutcome::BeingMade,
            store::PlanOutcome::Complete => PlanOutcome::Complete,
            store::PlanOutcome::Unspecified => return Err(PeerError::Malformed("outcome")),
        };
        let volume = planned.volume_handle.parse().ok();
        let (size_bytes, term) = (planned.size_bytes, term(planned.term));
        Ok(Plan { outcome, volume, digest: planned.digest, size_bytes, term })
    }

    /// Renews the claim of a transfer, and returns its new term.
    pub(crate) async fn renew_claim(
        &mut self,
        team: &str,
        transfer: TransferId,
    ) -> Result<Duration, PeerError> {
        let progress = store::ProgressRequest { transfer_id: transfer.to_string(), team: team.to_owned() };
        Ok(term(self.replicas.progress(progress).await?.into_inner().term))
    }

    /// Abandons a transfer, so that its volume is deleted. If that fails, its claim expires.
    pub(crate) async fn abandon(&mut self, team: &str, transfer: TransferId) {
        let abandon =
            store::AbandonUploadRequest { transfer_id: transfer.to_string(), team: team.to_owned() };
        if let Err(status) = self.replicas.abandon_upload(abandon).await {
            tracing::debug!(error = %Refusal::from(status), "cannot abandon a transfer: its claim will expire");
        }
    }

    /// Seals an artifact with the bytes that its worker has under `digest`.
    pub(crate) async fn seal(
        &mut self,
        team: &str,
        artifact: ArtifactId,
        digest: Digest,
    ) -> Result<(), PeerError> {
        let request = store::SealUploadRequest {
            team: team.to_owned(),
            artifact_id: artifact.to_string(),
            digest: digest.as_bytes().to_vec().into(),
        };
        self.replicas.seal_upload(request).await?;
        Ok(())
    }

    /// Finds an artifact of the team with these bytes, and adds an owner. `None`: there is none on
    /// workers outside of `without`.
    pub(crate) async fn adopt(
        &mut self,
        team: &str,
        digest: Digest,
        build: Option<BuildId>,
        without: &[String],
    ) -> Result<Option<KnownArtifact>, PeerError> {
        let request = store::AdoptByDigestRequest {
            team: team.to_owned(),
            digest: digest.as_bytes().to_vec().into(),
            build_id: build_id(build),
            without_worker_ids: without.to_vec(),
        };
        let answer = self.artifacts.adopt_by_digest(request).await?.into_inner();
        Ok(answer.artifact.map(|artifact| KnownArtifact {
            artifact_id: artifact.artifact_id,
            is_in_store: artifact.in_store,
            workers: artifact.replicas.into_iter().map(|replica| replica.worker_id).collect(),
        }))
    }

    /// Finds the resource cache of an image, or claims it under `claim`.
    pub(crate) async fn find_image(&self, key: &ImageKey, claim: Uuid) -> Result<FoundCache, PeerError> {
        let request = store::FindOrCreateResourceCacheRequest {
            team: key.team.clone(),
            key_digest: key.digest.as_bytes().to_vec().into(),
            sharing: if key.is_shared { store::Sharing::AllTeams } else { store::Sharing::Unspecified }
                .into(),
            claim_id: claim.to_string(),
            r#type: IMAGE_CACHE_TYPE.to_owned(),
            version: key.reference.clone(),
            params: key.platform.clone(),
            user: None,
        };
        let mut caches = self.caches.clone();
        let answer = caches.find_or_create_resource_cache(request).await?.into_inner();
        let state = match answer.outcome.ok_or(PeerError::Malformed("outcome"))? {
            CacheOutcome::Ready(location) => CacheState::Ready { artifact: location.artifact_id },
            CacheOutcome::Claimed(claim) => CacheState::Ours { term: term(claim.term) },
            CacheOutcome::InProgress(_) => CacheState::BeingMade,
        };
        Ok(FoundCache { cache: answer.cache_id, state })
    }

    pub(crate) async fn renew_image(&self, team: &str, claim: Uuid) -> Result<(), PeerError> {
        let renew = store::RenewResourceCacheRequest { team: team.to_owned(), claim_id: claim.to_string() };
        self.caches.clone().renew_resource_cache(renew).await?;
        Ok(())
    }

    /// Gives the resource cache of an image its artifact.
    pub(crate) async fn put_image(&self, team: &str, claim: Uuid, artifact: &str) -> Result<(), PeerError> {
        let (team, claim_id, artifact_id) = (team.to_owned(), claim.to_string(), artifact.to_owned());
        let put = store::PutResourceCacheRequest { team, claim_id, artifact_id };
        self.caches.clone().put_resource_cache(put).await?;
        Ok(())
    }

    /// Gives up the claim on the resource cache of an image. If that fails, the claim expires.
    pub(crate) async fn abandon_image(&self, team: &str, cache: &str) {
        let delete = store::DeleteResourceCacheRequest { team: team.to_owned(), cache_id: cache.to_owned() };
        if let Err(status) = self.caches.clone().delete_resource_cache(delete).await {
            tracing::debug!(error = %Refusal::from(status), "cannot give up the claim on an image: it will expire");
        }
    }

    /// Records the user of an image.
    pub(crate) async fn use_image(&self, team: &str, cache: &str, user: ImageUser) -> Result<(), PeerError> {
        let user = match user {
            ImageUser::Build(build) => store::cache_user::User::BuildId(build.to_string()),
            ImageUser::Workload(workload) => store::cache_user::User::WorkloadId(workload.to_string()),
        };
        let user = Some(store::CacheUser { user: Some(user) });
        let (team, cache_id) = (team.to_owned(), cache.to_owned());
        self.caches
            .clone()
            .use_resource_cache(store::UseResourceCacheRequest { team, cache_id, user })
            .await?;
        Ok(())
    }

    /// Returns the places of an artifact's bytes. `None`: the team has no such artifact.
    pub(crate) async fn locate(
        &mut self,
        team: &str,
        artifact: ArtifactId,
    ) -> Result<Option<Location>, PeerError> {
        let locate = store::LocateRequest { team: team.to_owned(), artifact_ids: vec![artifact.to_string()] };
        let located = self.artifacts.locate(locate).await?.into_inner();
        Ok(located.locations.into_iter().next().map(|location| Location {
            is_sealed: location.state() == store::ArtifactState::Sealed,
            is_in_store: location.in_store,
            digest: location.digest.clone(),
            size_bytes: location.size_bytes,
            replicas: location.replicas.iter().filter_map(replica).collect(),
        }))
    }

    /// Reads a small tree from the store. `None`: the artifact has none.
    pub(crate) async fn read_tree(
        &mut self,
        team: &str,
        artifact: ArtifactId,
    ) -> Result<Option<SmallTree>, PeerError> {
        let read = store::ReadTreeRequest { team: team.to_owned(), artifact_id: artifact.to_string() };
        let Some(tree) = self.artifacts.read_tree(read).await?.into_inner().tree else { return Ok(None) };
        rpc::small_tree::parse("tree", &tree).map(Some).map_err(|_| PeerError::Malformed("tree"))
    }
}

impl Plan {
    /// Returns the volume of the replica.
    pub(crate) fn volume(&self) -> Result<VolumeHandle, PeerError> {
        self.volume.ok_or(PeerError::Malformed("volume handle"))
    }
}

impl PeerError {
    /// Whether another replica must be used. The store may have lost this one since it was located.
    pub(crate) fn is_unreadable_replica(&self) -> bool {
        let reasons = [Reason::WorkerUnreachable, Reason::WorkerNotFound, Reason::TransferNotPlanned];
        matches!(self, Self::Refused(refusal) if reasons.into_iter().any(|reason| refusal.is(reason)))
    }

    /// Returns the reason of a rejection, for programs. Empty: the error has none.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Refused(refusal) => refusal.reason.as_deref().unwrap_or_default(),
            Self::Malformed(_) => "",
        }
    }

    /// Whether the same call may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.is_transient())
    }
}

fn replica(replica: &store::Replica) -> Option<Replica> {
    Some(Replica {
        worker: replica.worker_id.parse().ok()?,
        volume: replica.volume_handle.parse().ok()?,
        is_verified: replica.verification() == store::Verification::Verified,
    })
}

fn worker_space(worker: &scheduler::Worker) -> Option<WorkerSpace> {
    let scheduler::Capacity { disk_bytes, min_free_disk_bytes, .. } = worker.capacity.unwrap_or_default();
    let room = worker.disk_free_bytes.saturating_sub(min_free_disk_bytes);
    Some(WorkerSpace {
        worker: worker.worker_id.parse().ok()?,
        is_reliable: worker.state() == scheduler::WorkerState::Running
            && worker.desired() == scheduler::DesiredWorkerState::Run,
        room: (disk_bytes > 0).then_some(room),
    })
}

fn build_id(build: Option<BuildId>) -> String {
    build.map(|build| build.to_string()).unwrap_or_default()
}

/// Returns the term of an answer, with a minimum that bounds the rate of renewals.
fn term(answered: Option<impl TryInto<Duration>>) -> Duration {
    let term = answered.and_then(|term| term.try_into().ok()).unwrap_or(DEFAULT_TERM);
    term.max(MIN_TERM)
}

/// Repeats `call` for a moment while no worker is registered, or while the store does not know the
/// worker.
async fn retry_at_start<T, F>(call: impl Fn() -> F) -> Result<T, PeerError>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        match call().await.map(Response::into_inner).map_err(Refusal::from) {
            Err(refusal)
                if (refusal.is(Reason::AllWorkersBusy) || refusal.is(Reason::NotAttended))
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            answered => return Ok(answered?),
        }
    }
}
