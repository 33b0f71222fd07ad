//! Uploads: a caller's directory becomes an artifact.
//!
//! ```text
//! open ──a worker in contact has these bytes of the team──▶ uploaded     (a caller without a digest sends them)
//!   └──place, create, plan, ticket──▶ write ──commit──▶ seal ──▶ uploaded
//!                                        └──anything else──▶ abandon
//! ```
//!
//! Invariant: nothing partial becomes visible. An artifact is sealed only after the caller's commit, and only with bytes that the worker's
//! gateway reported complete under the same digest; the artifact store checks. Whatever ends an upload before that abandons it: by a call
//! here, or, if this process dies, when the claim expires.

use std::time::{Duration, Instant};

use domain::{ArtifactId, BuildId, Digest, TransferId};
use tokio::sync::mpsc;

use crate::peers::{Contact, Lease, Operation, PeerError, Peers, RETRY_PAUSE, START_PATIENCE, Ticket};

/// Most workers that should have the bytes and are silent; after that, the caller sends them.
const MAX_SILENT_WORKERS: usize = 100;

/// What a caller wants to upload.
#[derive(Debug, Clone)]
pub(crate) struct UploadRequest {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// `None`: not known yet.
    pub(crate) digest: Option<Digest>,
    pub(crate) build: Option<BuildId>,
    pub(crate) label: String,
}

/// What a caller learns during an upload.
#[derive(Debug, Clone)]
pub(crate) enum UploadEvent {
    /// Write the bytes there.
    Write { ticket: Ticket, worker_name: String },
    /// This artifact has them.
    Uploaded { artifact_id: String },
}

/// An upload failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The artifact has its bytes already.
    #[error("artifact {0} has its bytes already")]
    Exists(ArtifactId),
    /// The caller listens no more.
    #[error("the caller is gone")]
    CallerGone,
}

/// Where the caller of an upload hears of it.
pub(crate) type Caller<E> = mpsc::Sender<Result<UploadEvent, E>>;

/// Makes an artifact of what a caller writes.
///
/// `commit` resolves when the caller has written everything, and has the digest of it. An error of it abandons the upload.
pub(crate) async fn run<E: From<UploadError>>(
    peers: &mut Peers,
    request: UploadRequest,
    caller: &Caller<E>,
    commit: impl Future<Output = Result<Digest, E>>,
) -> Result<(), E> {
    if let Some(artifact_id) = adopt(peers, &request).await.map_err(UploadError::from)? {
        return tell(caller, UploadEvent::Uploaded { artifact_id }).await;
    }
    let mut upload = Upload::plan(peers, request).await?;
    let sealed = async {
        let (ticket, worker_name) = (upload.ticket.clone(), upload.lease.worker_name.clone());
        tell(caller, UploadEvent::Write { ticket, worker_name }).await?;
        let digest = upload.renew_until(peers, commit).await?;
        let Upload { request, .. } = &upload;
        peers.seal(&request.team, request.artifact, digest).await.map_err(UploadError::from)?;
        Ok(request.artifact.to_string())
    }
    .await;
    match sealed {
        Ok(artifact_id) => {
            let answered = tell(caller, UploadEvent::Uploaded { artifact_id }).await;
            peers.release_lease(upload.lease.token).await;
            answered
        }
        Err(error) => {
            upload.abandon(peers).await;
            Err(error)
        }
    }
}

async fn tell<E: From<UploadError>>(caller: &Caller<E>, event: UploadEvent) -> Result<(), E> {
    caller.send(Ok(event)).await.map_err(|_| UploadError::CallerGone.into())
}

/// The artifact of this team that has the bytes already, on a worker in contact; now with the owner of the request. `None`: the caller has
/// to send them.
///
/// The store knows where the bytes should be, the scheduler knows which workers are in contact. What only a silent worker has cannot be
/// used before that worker returns. A worker that the scheduler awaits since it was started is given a moment.
async fn adopt(peers: &mut Peers, request: &UploadRequest) -> Result<Option<String>, PeerError> {
    let Some(digest) = request.digest else { return Ok(None) };
    let deadline = Instant::now() + START_PATIENCE;
    let mut silent: Vec<String> = Vec::new();
    loop {
        let Some(adopted) = peers.adopt(&request.team, digest, request.build, &silent).await? else {
            return Ok(None);
        };
        let mut workers = adopted.workers;
        workers.retain(|worker| !silent.contains(worker));
        if adopted.is_in_store || is_any_in_contact(peers, &workers, deadline).await? {
            return Ok(Some(adopted.artifact_id));
        }
        silent.extend(workers.iter().cloned());
        if workers.is_empty() || silent.len() > MAX_SILENT_WORKERS {
            return Ok(None);
        }
    }
}

/// Whether one of `workers` is in contact. Those that are awaited may come until `deadline`.
async fn is_any_in_contact(
    peers: &mut Peers,
    workers: &[String],
    deadline: Instant,
) -> Result<bool, PeerError> {
    loop {
        let mut is_any_awaited = false;
        for worker in workers {
            match peers.contact(worker).await? {
                Contact::Present => return Ok(true),
                Contact::Awaited => is_any_awaited = true,
                Contact::Silent => {}
            }
        }
        if !is_any_awaited || Instant::now() >= deadline {
            return Ok(false);
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// An upload that its caller may fill.
struct Upload {
    request: UploadRequest,
    transfer: TransferId,
    lease: Lease,
    ticket: Ticket,
    /// The claim and the lease must be renewed within this.
    term: Duration,
}

impl Upload {
    /// Finds a worker, makes the artifact and plans its first replica. What was done is undone if a later step fails.
    async fn plan(peers: &mut Peers, request: UploadRequest) -> Result<Self, UploadError> {
        let (lease, transfer) = (peers.place(&request.team).await?, TransferId::new());
        match plan_on(peers, &request, transfer, &lease).await {
            Ok((ticket, term)) => Ok(Self { request, transfer, lease, ticket, term }),
            Err(error) => {
                peers.abandon(&request.team, transfer).await;
                peers.release_lease(lease.token).await;
                Err(error)
            }
        }
    }

    /// Renews the upload until the caller has committed it.
    async fn renew_until<E: From<UploadError>>(
        &mut self,
        peers: &mut Peers,
        commit: impl Future<Output = Result<Digest, E>>,
    ) -> Result<Digest, E> {
        let mut commit = std::pin::pin!(commit);
        loop {
            tokio::select! {
                committed = &mut commit => return committed,
                () = tokio::time::sleep(self.term / 3) => match self.renew(peers).await {
                    Ok(()) => {}
                    Err(error) if error.is_transient() => tracing::debug!(%error, "cannot renew an upload"),
                    Err(error) => return Err(UploadError::from(error).into()),
                },
            }
        }
    }

    /// Renews the claim and the lease. Refused: the upload was ended by others.
    async fn renew(&mut self, peers: &mut Peers) -> Result<(), PeerError> {
        let claim = peers.renew_claim(&self.request.team, self.transfer).await?;
        self.term = claim.min(peers.renew_lease(&self.lease.token).await?);
        Ok(())
    }

    /// Deletes what arrived, and releases the worker.
    async fn abandon(self, peers: &mut Peers) {
        peers.abandon(&self.request.team, self.transfer).await;
        peers.release_lease(self.lease.token).await;
    }
}

/// Plans the first replica of a new artifact. Answers the ticket to write it, and the term of the upload.
async fn plan_on(
    peers: &mut Peers,
    request: &UploadRequest,
    transfer: TransferId,
    lease: &Lease,
) -> Result<(Ticket, Duration), UploadError> {
    let UploadRequest { team, artifact, build, label, .. } = request;
    peers.create_artifact(*artifact, team, *build, label).await?;
    let plan = peers.plan_replica(team, *artifact, lease.worker, transfer).await?;
    if !plan.digest.is_empty() {
        return Err(UploadError::Exists(*artifact));
    }
    let ticket = peers.issue_ticket(team, lease.worker, plan.volume()?, Operation::Write).await?;
    Ok((ticket, plan.term.min(lease.term)))
}
