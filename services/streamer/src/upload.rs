//! Uploads: a caller's tree becomes an artifact.
//!
//! ```text
//! open ──a worker in contact has these bytes──▶ uploaded
//!   └──place, create, plan, ticket──▶ write ──commit──▶ seal ──▶ uploaded
//!                                        └──failed──▶ abandon
//! ```
//!
//! [`crate::api`] runs each upload in a task. A caller without a digest always sends the bytes.
//!
//! Invariant: a partial upload never becomes visible. An artifact is sealed only after the caller's
//! commit. The artifact store checks that the gateway has reported the volume complete with the
//! same digest. An upload that ends earlier is abandoned by a call, or, if this process dies, when
//! the claim expires.

use std::time::{Duration, Instant};

use domain::{ArtifactId, BuildId, Digest, TransferId, WorkerId};
use tokio::sync::mpsc;

use crate::peers::{Contact, Lease, Operation, PeerError, Peers, RETRY_PAUSE, START_PATIENCE, Ticket};

/// Most silent workers with a replica before the caller must send the bytes.
const MAX_SILENT_WORKERS: usize = 100;

/// The artifact that a caller uploads.
#[derive(Debug, Clone)]
pub(crate) struct UploadRequest {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// Digest of the tree. `None`: not known yet.
    pub(crate) digest: Option<Digest>,
    pub(crate) build: Option<BuildId>,
    pub(crate) label: String,
    /// Workers that do not receive the bytes.
    pub(crate) avoid: Vec<WorkerId>,
}

/// An event of an upload, for its caller.
#[derive(Debug, Clone)]
pub(crate) enum UploadEvent {
    /// The caller must write the bytes to this gateway.
    Write { ticket: Ticket, worker_name: String, worker: WorkerId },
    /// The bytes are in this artifact.
    Uploaded { artifact_id: String },
}

/// The reason why an upload failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UploadError {
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The artifact is already sealed.
    #[error("artifact {0} is already uploaded")]
    Exists(ArtifactId),
    /// The caller is gone.
    #[error("cannot complete the upload: the caller is gone")]
    CallerGone,
}

/// The channel to the caller of an upload.
pub(crate) type Caller<E> = mpsc::Sender<Result<UploadEvent, E>>;

/// Makes an artifact of the bytes that a caller writes.
///
/// `commit` resolves to the digest when the caller has written all bytes. If it fails, the upload
/// is abandoned.
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
        tell(caller, UploadEvent::Write { ticket, worker_name, worker: upload.lease.worker }).await?;
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

/// Finds an artifact of the team that already has the bytes, and adds the owner of the request.
/// `None`: the caller must send the bytes.
///
/// The artifact store knows the replicas, and the scheduler knows which workers are in contact. A
/// replica on a silent worker cannot be used. A worker that the scheduler still awaits after its
/// own start gets some time.
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

/// Whether one of `workers` is in contact. Waits until `deadline` for awaited workers.
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

/// An upload that its caller may write.
struct Upload {
    request: UploadRequest,
    transfer: TransferId,
    lease: Lease,
    ticket: Ticket,
    /// Term of the claim and of the lease.
    term: Duration,
}

impl Upload {
    /// Leases a worker, makes the artifact and plans its first replica. If a step fails, the
    /// earlier ones are undone.
    async fn plan(peers: &mut Peers, request: UploadRequest) -> Result<Self, UploadError> {
        let (lease, transfer) = (peers.place(&request.team, &request.avoid).await?, TransferId::new());
        match plan_on(peers, &request, transfer, &lease).await {
            Ok((ticket, term)) => Ok(Self { request, transfer, lease, ticket, term }),
            Err(error) => {
                peers.abandon(&request.team, transfer).await;
                peers.release_lease(lease.token).await;
                Err(error)
            }
        }
    }

    /// Renews the upload until the caller commits it.
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

    /// Renews the claim and the lease. A permanent error means that the upload was ended elsewhere.
    async fn renew(&mut self, peers: &mut Peers) -> Result<(), PeerError> {
        let claim = peers.renew_claim(&self.request.team, self.transfer).await?;
        self.term = claim.min(peers.renew_lease(&self.lease.token).await?);
        Ok(())
    }

    /// Deletes the partial volume, and releases the worker.
    async fn abandon(self, peers: &mut Peers) {
        peers.abandon(&self.request.team, self.transfer).await;
        peers.release_lease(self.lease.token).await;
    }
}

/// Plans the first replica of a new artifact. Returns the ticket to write it, and the term of the
/// upload.
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
