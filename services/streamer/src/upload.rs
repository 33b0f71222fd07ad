//! Uploads: a caller's directory becomes an artifact.
//!
//! ```text
//! open ──a worker in contact has these bytes of the team──▶ uploaded     (a caller who has no digest yet has them sent)
//!   └──place, create, plan, ticket──▶ go_to ──commit──▶ seal ──▶ uploaded
//!                                        └──anything else──▶ abandon
//! ```
//!
//! Invariant: nothing partial becomes visible. An artifact is sealed only after `commit`, and only with bytes that the worker's gateway
//! reported complete under the same digest; the artifact store checks. Whatever ends an upload before that abandons it: by a call
//! here, or, when this process dies, by the claim running out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::{ArtifactId, BuildId, Digest, LeaseId, TransferId};
use rpc::client::{AddressError, Outgoing};
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::replicas_client::ReplicasClient;
use rpc::pb::artifacts::{self as store};
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::{self as scheduler};
use rpc::token::Keys;
use rpc::{Peer, Reason, Refusal};
use tonic::{Response, Status};

use crate::{Config, SERVICE};

/// How long a cluster may take to be ready for uploads.
const SETTLE_DOWN: Duration = Duration::from_secs(3);
/// After so many workers that should have the bytes and are silent, they are sent.
const MOST_SILENT: usize = 100;
/// How often it is looked whether a cluster is ready.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The services that the streamer calls.
#[derive(Clone)]
pub(crate) struct Peers {
    pub(crate) artifacts: ArtifactsClient<Peer>,
    pub(crate) replicas: ReplicasClient<Peer>,
    pub(crate) placements: PlacementsClient<Peer>,
    pub(crate) workers: WorkersClient<Peer>,
    /// The scheduler's keys.
    pub(crate) keys: Arc<Keys>,
}

impl Peers {
    pub(crate) fn new(config: &Config) -> Result<Self, AddressError> {
        let outgoing = || Outgoing::internal().with_token(config.token.as_deref());
        let store = rpc::client::peer(&config.artifact_store, outgoing())?;
        let scheduler = rpc::client::peer(&config.scheduler, outgoing())?;
        Ok(Self {
            artifacts: ArtifactsClient::new(store.clone()),
            replicas: ReplicasClient::new(store),
            placements: PlacementsClient::new(scheduler.clone()),
            workers: WorkersClient::new(scheduler.clone()),
            keys: Arc::new(Keys::new(scheduler)),
        })
    }
}

/// What a caller wants to upload.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// `None`: not known yet.
    pub(crate) digest: Option<Digest>,
    pub(crate) build: Option<BuildId>,
    pub(crate) label: String,
}

impl Wanted {
    fn build_id(&self) -> String {
        self.build.map(|build| build.to_string()).unwrap_or_default()
    }
}

/// The artifact of this team that has the wanted bytes already, on a worker that is in contact; now with the wanted owner. `None`: they have
/// to be sent.
///
/// The store knows where the bytes should be, the scheduler knows who is there. What only a silent worker has cannot be used before that one
/// returns, if it ever does; one that the scheduler awaits since it started is given a moment.
pub(crate) async fn adopt(peers: &mut Peers, wanted: &Wanted) -> Result<Option<String>, Refusal> {
    let Some(digest) = wanted.digest else { return Ok(None) };
    let deadline = Instant::now() + SETTLE_DOWN;
    let mut silent: Vec<String> = Vec::new();
    loop {
        let request = store::AdoptByDigestRequest {
            team: wanted.team.clone(),
            digest: digest.as_bytes().to_vec().into(),
            build_id: wanted.build_id(),
            without_worker_ids: silent.clone(),
        };
        let answer = peers.artifacts.adopt_by_digest(request).await?.into_inner();
        let Some(artifact) = answer.artifact else { return Ok(None) };
        let mut holders: Vec<_> = artifact.replicas.into_iter().map(|replica| replica.worker_id).collect();
        holders.retain(|worker| !silent.contains(worker));
        if artifact.in_store || any_there(peers, &holders, deadline).await? {
            return Ok(Some(artifact.artifact_id));
        }
        silent.extend(holders.iter().cloned());
        if holders.is_empty() || silent.len() > MOST_SILENT {
            return Ok(None);
        }
    }
}

/// Whether one of `workers` is in contact. Those that are awaited may come until `deadline`.
async fn any_there(peers: &mut Peers, workers: &[String], deadline: Instant) -> Result<bool, Refusal> {
    loop {
        let mut awaited = false;
        for worker in workers {
            let request = scheduler::GetWorkerRequest { worker: worker.clone() };
            let known = match peers.workers.get_worker(request).await.map_err(Refusal::from) {
                Ok(answer) => answer.into_inner().worker.unwrap_or_default(),
                Err(refusal) if refusal.is(Reason::WorkerNotFound) => continue,
                Err(refusal) => return Err(refusal),
            };
            if known.state() == scheduler::WorkerState::Running && !known.awaited {
                return Ok(true);
            }
            awaited |= known.awaited;
        }
        if !awaited || Instant::now() >= deadline {
            return Ok(false);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// An upload that a caller may fill now. End it with [`Upload::seal`] or [`Upload::abandon`].
pub(crate) struct Upload {
    wanted: Wanted,
    transfer: TransferId,
    lease_token: String,
    /// Where the caller goes.
    pub(crate) go_to: rpc::pb::streamer::GoTo,
    /// Renew within this.
    term: Duration,
}

impl Upload {
    /// Finds a worker, makes the artifact and plans its first replica. What was done is undone when a later step is refused.
    pub(crate) async fn plan(peers: &mut Peers, wanted: Wanted) -> Result<Self, Refusal> {
        let lease = place(peers, &wanted.team).await?;
        let mut upload = Self {
            wanted,
            transfer: TransferId::new(),
            lease_token: lease.lease_token.clone(),
            go_to: rpc::pb::streamer::GoTo {
                worker_name: lease.worker_name.clone(),
                ..rpc::pb::streamer::GoTo::default()
            },
            term: Duration::ZERO,
        };
        match upload.plan_on(peers, &lease).await {
            Ok(()) => Ok(upload),
            Err(refusal) => {
                upload.abandon(peers).await;
                Err(refusal)
            }
        }
    }

    async fn plan_on(&mut self, peers: &mut Peers, lease: &scheduler::PlaceResponse) -> Result<(), Refusal> {
        let create = store::CreateArtifactRequest {
            artifact_id: self.wanted.artifact.to_string(),
            team: self.wanted.team.clone(),
            build_id: self.wanted.build_id(),
            label: self.wanted.label.clone(),
            tree: None,
        };
        peers.artifacts.create_artifact(create).await?;
        let plan = store::PlanReplicaRequest {
            team: self.wanted.team.clone(),
            artifact_id: self.wanted.artifact.to_string(),
            worker_id: lease.worker_id.clone(),
            transfer_id: self.transfer.to_string(),
        };
        let planned = settle_down(|| {
            let (mut replicas, plan) = (peers.replicas.clone(), plan.clone());
            async move { replicas.plan_replica(plan).await }
        })
        .await?;
        if !planned.digest.is_empty() {
            let message = format!("artifact {} has its bytes already", self.wanted.artifact);
            return Err(Reason::ArtifactExists.status(SERVICE, message).into());
        }
        let issue = scheduler::IssueTicketRequest {
            team: self.wanted.team.clone(),
            worker_id: lease.worker_id.clone(),
            volume_handle: planned.volume_handle,
            operation: scheduler::TicketOperation::Write.into(),
        };
        let ticket = peers.workers.issue_ticket(issue).await?.into_inner();
        self.go_to.ticket = ticket.ticket;
        self.go_to.gateway_endpoint = ticket.gateway_endpoint;
        self.term = shortest(planned.term, lease.term);
        Ok(())
    }

    /// When to renew next.
    pub(crate) fn renew_after(&self) -> Duration {
        self.term / 3
    }

    /// Says that the transfer goes on. Refused: somebody else decided that it does not.
    pub(crate) async fn renew(&mut self, peers: &mut Peers) -> Result<(), Refusal> {
        let progress =
            store::ProgressRequest { transfer_id: self.transfer.to_string(), team: self.wanted.team.clone() };
        let claim = peers.replicas.progress(progress).await?.into_inner();
        let renew = scheduler::RenewRequest { lease_token: self.lease_token.clone() };
        let lease = peers.placements.renew(renew).await?.into_inner();
        self.term = shortest(claim.term, lease.term);
        Ok(())
    }

    /// Seals the artifact with the bytes that the worker has under `digest`, and answers its id.
    pub(crate) async fn seal(&self, peers: &mut Peers, digest: Digest) -> Result<String, Refusal> {
        let request = store::SealUploadRequest {
            team: self.wanted.team.clone(),
            artifact_id: self.wanted.artifact.to_string(),
            digest: digest.as_bytes().to_vec().into(),
        };
        peers.replicas.seal_upload(request).await?;
        Ok(self.wanted.artifact.to_string())
    }

    /// Gives the worker back.
    pub(crate) async fn release(&self, peers: &mut Peers) {
        release(peers, self.lease_token.clone()).await;
    }

    /// Throws away what arrived.
    pub(crate) async fn abandon(&self, peers: &mut Peers) {
        let abandon = store::AbandonUploadRequest {
            transfer_id: self.transfer.to_string(),
            team: self.wanted.team.clone(),
        };
        if let Err(status) = peers.replicas.abandon_upload(abandon).await {
            tracing::debug!(error = %Refusal::from(status), "an upload's claim is left to run out");
        }
        self.release(peers).await;
    }
}

/// A worker for a transfer.
pub(crate) async fn place(peers: &Peers, team: &str) -> Result<scheduler::PlaceResponse, Refusal> {
    let place = scheduler::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: team.to_owned(),
        kind: scheduler::PlacementKind::Transfer.into(),
        ..scheduler::PlaceRequest::default()
    };
    settle_down(|| {
        let (mut placements, place) = (peers.placements.clone(), place.clone());
        async move { placements.place(place).await }
    })
    .await
}

/// Gives the worker of a transfer back.
pub(crate) async fn release(peers: &mut Peers, lease_token: String) {
    if let Err(status) = peers.placements.release(scheduler::ReleaseRequest { lease_token }).await {
        tracing::debug!(error = %Refusal::from(status), "a transfer's lease is left to run out");
    }
}

/// Repeats `call` for a moment while it is refused only because a cluster has just been started: no worker has come yet, or the store has
/// not heard of it.
pub(crate) async fn settle_down<T, F>(call: impl Fn() -> F) -> Result<T, Refusal>
where
    F: Future<Output = Result<Response<T>, Status>>,
{
    let deadline = Instant::now() + SETTLE_DOWN;
    loop {
        match call().await.map(Response::into_inner).map_err(Refusal::from) {
            Err(refusal)
                if (refusal.is(Reason::AllWorkersBusy) || refusal.is(Reason::NotAttended))
                    && Instant::now() < deadline =>
            {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            done => return done,
        }
    }
}

/// The shorter of two terms that a peer answered; never so short that renewing would keep nobody else busy.
pub(crate) fn shortest(
    one: Option<impl TryInto<Duration>>,
    other: Option<impl TryInto<Duration>>,
) -> Duration {
    let one = one.and_then(|term| term.try_into().ok()).unwrap_or(Duration::from_secs(60));
    let other = other.and_then(|term| term.try_into().ok()).unwrap_or(Duration::from_secs(60));
    one.min(other).max(Duration::from_secs(1))
}
