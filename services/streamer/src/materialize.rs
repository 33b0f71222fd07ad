//! Copies from worker to worker: the bytes of a sealed artifact come to a worker that needs them.
//!
//! ```text
//! plan ──the bytes are there──▶ done
//!   │ ◀──a while later── another transfer makes it
//!   └──mine──▶ sources, tickets ──▶ Volumes.Fetch on the worker's gateway ──committed──▶ done
//!         │                              └──anything else──▶ abandon
//!         └──made from a small tree──▶ Artifacts.ReadTree, Volumes.WriteArchive there ──▶ done
//! ```
//!
//! What the store has itself always comes from there, so that it depends on no other worker. The artifact store decides who makes a copy; this streamer keeps the claim alive while it does. Invariant: nothing counts before the
//! gateway of the worker has told the store that the volume holds what the artifact was sealed with. Whatever ends a copy before that
//! abandons it: by a call here, or, when this process dies, by the claim running out.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use domain::{VolumeHandle, WorkerId};
use rpc::client::Outgoing;
use rpc::pb::artifacts as store;
use rpc::pb::runtime as gateway;
use rpc::pb::runtime::fetch_response::Message as Fetched;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_archive_request::Message as Archive;
use rpc::pb::scheduler;
use rpc::{Peer, Reason, Refusal};
use tokio_util::sync::CancellationToken;

use crate::transfers::{Progress, Route, Task, Wish};
use crate::upload::{Peers, settle_down, shortest};

/// How soon, and how late, it is asked again whether another transfer has ended.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// The time over which the rate of a copy is measured.
const WINDOW: Duration = Duration::from_secs(5);
/// How much of an archive goes in one message.
const PIECE: usize = 1 << 20;
/// Most sources that are tried.
const MOST_SOURCES: usize = 100;

/// The bytes are there.
#[derive(Debug, Clone)]
pub(crate) struct Copied {
    pub(crate) volume: VolumeHandle,
    /// How far the copy was. `None`: there was none.
    pub(crate) progress: Option<Progress>,
}

/// The bytes cannot be brought there. Everybody who waits is told the same.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum CopyError {
    /// The team has no such artifact, or its bytes are not final.
    #[error("no sealed artifact {0} in this team")]
    NotFound(domain::ArtifactId),
    /// Every replica is gone.
    #[error("no replica of artifact {0} is left")]
    NoReplica(domain::ArtifactId),
    /// A peer refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The gateway of the worker left the call without an answer.
    #[error("the gateway of worker {0} broke off")]
    Cut(WorkerId),
    /// A peer's answer makes no sense.
    #[error("the artifact store answered a malformed {0}")]
    Nonsense(&'static str),
    /// The worker has written something else than it was sent.
    #[error("worker {0} has unpacked something else than it was sent")]
    OtherBytes(WorkerId),
    /// Somebody said so.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// Nobody waits for it.
    #[error("nobody waits for the transfer any more")]
    Left,
    /// This process stops.
    #[error("the streamer is stopping")]
    Stopping,
}

/// Brings the bytes, and tells those who wait.
pub(crate) async fn carry_out(mut peers: Peers, mut task: Task, stopping: CancellationToken) {
    let (mut wish, mut asked) = (task.wish.clone(), peers.clone());
    let copied = tokio::select! {
        copied = copy(&mut asked, &mut task) => copied,
        error = ended_early(&mut wish) => Err(error),
        () = stopping.cancelled() => Err(CopyError::Stopping),
    };
    if let Err(error) = &copied {
        tracing::info!(
            artifact.id = %task.wanted.artifact,
            worker.id = %task.wanted.worker,
            transfer.id = %task.transfer,
            error = domain::chain(error),
            "a copy ended without its end"
        );
        let abandon = store::AbandonUploadRequest {
            transfer_id: task.transfer.to_string(),
            team: task.wanted.team.clone(),
        };
        if let Err(status) = peers.replicas.abandon_upload(abandon).await {
            tracing::debug!(error = %Refusal::from(status), "the claim of a copy is left to run out");
        }
    }
    task.end(copied);
}

/// Resolves when the copy shall end before its end.
async fn ended_early(wish: &mut tokio::sync::watch::Receiver<Wish>) -> CopyError {
    match wish.wait_for(|wish| *wish != Wish::GoOn).await.as_deref() {
        Ok(Wish::Cancelled) => CopyError::Cancelled,
        Ok(Wish::Left | Wish::GoOn) | Err(_) => CopyError::Left,
    }
}

async fn copy(peers: &mut Peers, task: &mut Task) -> Result<Copied, CopyError> {
    let mut pause = ASK_AGAIN.0;
    let planned = loop {
        let planned = plan(peers, task).await?;
        match planned.outcome() {
            store::PlanOutcome::Yours => break planned,
            store::PlanOutcome::Complete => {
                return Ok(Copied { volume: volume(&planned)?, progress: None });
            }
            store::PlanOutcome::BeingMade => {
                let route = Route::Elsewhere;
                task.tell(Progress { total: planned.size_bytes, route, ..Progress::default() });
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(ASK_AGAIN.1);
            }
            store::PlanOutcome::Unspecified => return Err(CopyError::Nonsense("outcome")),
        }
    };
    if planned.digest.is_empty() {
        return Err(CopyError::NotFound(task.wanted.artifact));
    }
    task.tell(Progress { total: planned.size_bytes, ..Progress::default() });
    let renewed = keep_claim(peers.clone(), claim_of(task), shortest(planned.term, planned.term));
    tokio::select! {
        copied = fill(peers, task, &planned) => copied,
        lost = renewed => Err(lost.into()),
    }
}

/// Fills the volume that is planned, from wherever the bytes are.
async fn fill(
    peers: &mut Peers,
    task: &Task,
    planned: &store::PlanReplicaResponse,
) -> Result<Copied, CopyError> {
    let (team, artifact) = (&task.wanted.team, task.wanted.artifact);
    let locate = store::LocateRequest { team: team.clone(), artifact_ids: vec![artifact.to_string()] };
    let located = peers.artifacts.locate(locate).await.map_err(Refusal::from)?.into_inner();
    let location = located.locations.into_iter().next().ok_or(CopyError::NotFound(artifact))?;
    if location.in_store {
        return unpack(peers, task, planned).await;
    }
    let sources = sources(peers, task, location).await?;
    fetch(peers, task, planned, &sources).await
}

/// The way to the volume that is planned.
async fn destination(
    peers: &mut Peers,
    task: &Task,
    planned: &store::PlanReplicaResponse,
) -> Result<(VolumesClient<Peer>, String), CopyError> {
    let write = scheduler::IssueTicketRequest {
        team: task.wanted.team.clone(),
        worker_id: task.wanted.worker.to_string(),
        volume_handle: planned.volume_handle.clone(),
        operation: scheduler::TicketOperation::Write.into(),
    };
    let ticket = peers.workers.issue_ticket(write).await.map_err(Refusal::from)?.into_inner();
    let outgoing = Outgoing::internal().with_ticket(&ticket.ticket);
    let nowhere = |_| CopyError::Nonsense("address of a gateway");
    let destination = rpc::client::peer(&ticket.gateway_endpoint, outgoing).map_err(nowhere)?;
    Ok((VolumesClient::new(destination), ticket.ticket))
}

/// Has the worker unpack the small tree that the store has.
async fn unpack(
    peers: &mut Peers,
    task: &Task,
    planned: &store::PlanReplicaResponse,
) -> Result<Copied, CopyError> {
    let volume = volume(planned)?;
    let read = store::ReadTreeRequest {
        team: task.wanted.team.clone(),
        artifact_id: task.wanted.artifact.to_string(),
    };
    let answer = peers.artifacts.read_tree(read).await.map_err(Refusal::from)?.into_inner();
    let tree = answer.tree.ok_or(CopyError::NoReplica(task.wanted.artifact))?;
    let tree = rpc::small_tree::parse("tree", &tree).map_err(|_| CopyError::Nonsense("tree"))?;
    let archive = Bytes::from(tree.archive().map_err(|_| CopyError::Nonsense("tree"))?);

    let total = tree.size_bytes();
    let progress = Progress { total, route: Route::Store, ..Progress::default() };
    task.tell(progress);
    let (mut gateway, ticket) = destination(peers, task, planned).await?;
    let open = Archive::Open(gateway::WriteOpen { ticket });
    let pieces = (0..archive.len()).step_by(PIECE);
    let data =
        pieces.map(|at| Archive::Data(archive.slice(at..archive.len().min(at + PIECE)))).collect::<Vec<_>>();
    let said = std::iter::once(open).chain(data).chain([Archive::Commit(gateway::WriteCommit {})]);
    let said = said.map(|message| gateway::WriteArchiveRequest { message: Some(message) });
    let written = gateway.write_archive(tokio_stream::iter(said)).await.map_err(Refusal::from)?.into_inner();
    if written.digest != planned.digest {
        return Err(CopyError::OtherBytes(task.wanted.worker));
    }
    Ok(Copied { volume, progress: Some(Progress { done: total, ..progress }) })
}

async fn plan(peers: &Peers, task: &Task) -> Result<store::PlanReplicaResponse, Refusal> {
    let plan = store::PlanReplicaRequest {
        team: task.wanted.team.clone(),
        artifact_id: task.wanted.artifact.to_string(),
        worker_id: task.wanted.worker.to_string(),
        transfer_id: task.transfer.to_string(),
    };
    settle_down(|| {
        let (mut replicas, plan) = (peers.replicas.clone(), plan.clone());
        async move { replicas.plan_replica(plan).await }
    })
    .await
}

fn volume(planned: &store::PlanReplicaResponse) -> Result<VolumeHandle, CopyError> {
    planned.volume_handle.parse().map_err(|_| CopyError::Nonsense("volume handle"))
}

/// Says that a copy goes on.
fn claim_of(task: &Task) -> store::ProgressRequest {
    store::ProgressRequest { transfer_id: task.transfer.to_string(), team: task.wanted.team.clone() }
}

/// Renews the claim of a copy for as long as it is polled. Answers when it is lost.
async fn keep_claim(mut peers: Peers, claim: store::ProgressRequest, mut term: Duration) -> Refusal {
    loop {
        tokio::time::sleep(term / 3).await;
        match peers.replicas.progress(claim.clone()).await.map_err(Refusal::from) {
            Ok(claim) => {
                let renewed = claim.into_inner().term;
                term = shortest(renewed, renewed);
            }
            Err(refusal) if refusal.is_transient() => {
                tracing::debug!(error = %refusal, "cannot renew the claim of a copy");
            }
            Err(refusal) => return refusal,
        }
    }
}

/// A replica elsewhere, with what permits to read it.
struct Source {
    worker: WorkerId,
    fetch: gateway::FetchSource,
}

async fn fetch(
    peers: &mut Peers,
    task: &Task,
    planned: &store::PlanReplicaResponse,
    sources: &[Source],
) -> Result<Copied, CopyError> {
    let volume = volume(planned)?;
    let (mut gateway, ticket) = destination(peers, task, planned).await?;
    let request = gateway::FetchRequest {
        ticket,
        digest: planned.digest.clone(),
        sources: sources.iter().map(|source| source.fetch.clone()).collect(),
    };
    let mut answers = gateway.fetch(request).await.map_err(Refusal::from)?.into_inner();
    let mut rate = Rate::default();
    let mut progress = Progress { total: planned.size_bytes, route: Route::Peer, ..Progress::default() };
    while let Some(answer) = answers.message().await.map_err(Refusal::from)? {
        match answer.message {
            Some(Fetched::Progress(now)) => {
                let from = usize::try_from(now.source).ok().and_then(|place| sources.get(place));
                progress = Progress {
                    done: now.bytes_done,
                    total: now.bytes_total,
                    saved: now.bytes_saved,
                    per_second: rate.at(Instant::now(), now.bytes_done.saturating_sub(now.bytes_saved)),
                    route: if now.peer_to_peer { Route::Workers } else { Route::Peer },
                    from: from.map(|source| source.worker),
                };
                task.tell(progress);
            }
            Some(Fetched::Committed(_)) => {
                progress.done = progress.total;
                return Ok(Copied { volume, progress: Some(progress) });
            }
            None => break,
        }
    }
    Err(CopyError::Cut(task.wanted.worker))
}

/// The replicas that can be read now, the best first.
async fn sources(
    peers: &mut Peers,
    task: &Task,
    location: store::Location,
) -> Result<Vec<Source>, CopyError> {
    let (team, artifact) = (&task.wanted.team, task.wanted.artifact);
    let mut sources = Vec::new();
    let mut unreachable = None;
    for (worker, replica) in in_order(location.replicas, task.wanted.worker, &task.readers()) {
        let read = scheduler::IssueTicketRequest {
            team: team.clone(),
            worker_id: replica.worker_id,
            volume_handle: replica.volume_handle,
            operation: scheduler::TicketOperation::Read.into(),
        };
        match peers.workers.issue_ticket(read).await.map_err(Refusal::from) {
            Ok(ticket) => {
                let scheduler::IssueTicketResponse { ticket, gateway_endpoint, .. } = ticket.into_inner();
                sources.push(Source { worker, fetch: gateway::FetchSource { gateway_endpoint, ticket } });
            }
            Err(refusal) if is_of_no_use(&refusal) => {
                unreachable = Some(refusal);
            }
            Err(refusal) => return Err(refusal.into()),
        }
    }
    match unreachable {
        Some(refusal) if sources.is_empty() => Err(refusal.into()),
        None if sources.is_empty() => Err(CopyError::NoReplica(artifact)),
        _ => Ok(sources),
    }
}

/// Whether a replica cannot be read, so that another one must do. The store may have lost it since it was located.
pub(crate) fn is_of_no_use(refusal: &Refusal) -> bool {
    [Reason::WorkerUnreachable, Reason::WorkerNotFound, Reason::TransferNotPlanned]
        .into_iter()
        .any(|reason| refusal.is(reason))
}

/// The replicas on other workers than `destination`: those that were hashed first, and among them those from which the fewest copies are
/// read.
fn in_order(
    replicas: Vec<store::Replica>,
    destination: WorkerId,
    readers: &HashMap<WorkerId, usize>,
) -> Vec<(WorkerId, store::Replica)> {
    let replicas =
        replicas.into_iter().filter_map(|replica| Some((replica.worker_id.parse().ok()?, replica)));
    let mut replicas: Vec<(WorkerId, store::Replica)> =
        replicas.filter(|(worker, _)| *worker != destination).collect();
    replicas.sort_by_key(|(worker, replica)| {
        let verified = replica.verification() == store::Verification::Verified;
        (!verified, readers.get(worker).copied().unwrap_or(0))
    });
    replicas.truncate(MOST_SOURCES);
    replicas
}

/// How fast bytes come, over the last few seconds.
#[derive(Debug, Default)]
struct Rate(VecDeque<(Instant, u64)>);

impl Rate {
    /// Bytes in a second, now that there are `bytes`.
    fn at(&mut self, now: Instant, bytes: u64) -> u64 {
        while self.0.len() > 1 && self.0.front().is_some_and(|(then, _)| now.duration_since(*then) > WINDOW) {
            self.0.pop_front();
        }
        // A few in a second are enough.
        if self.0.back().is_none_or(|(last, _)| now.duration_since(*last) >= WINDOW / 50) {
            self.0.push_back((now, bytes));
        }
        let Some((then, before)) = self.0.front() else { return 0 };
        let millis = u64::try_from(now.duration_since(*then).as_millis()).unwrap_or(u64::MAX);
        bytes.saturating_sub(*before).saturating_mul(1000) / millis.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_that_were_hashed_and_are_idle_come_first_and_the_destination_not_at_all() {
        let workers: [WorkerId; 4] = std::array::from_fn(|_| WorkerId::new());
        let [busy, idle, reported, destination] = workers;
        let replica = |worker: WorkerId, verification: store::Verification| store::Replica {
            volume_handle: VolumeHandle::new().to_string(),
            worker_id: worker.to_string(),
            size_bytes: 1,
            verification: verification.into(),
        };
        let replicas = vec![
            replica(destination, store::Verification::Verified),
            replica(reported, store::Verification::Reported),
            replica(busy, store::Verification::Verified),
            replica(idle, store::Verification::Verified),
        ];
        let readers = HashMap::from([(busy, 2)]);
        let ordered = in_order(replicas, destination, &readers);
        let ordered: Vec<_> = ordered.into_iter().map(|(worker, _)| worker).collect();
        assert_eq!(ordered, [idle, busy, reported]);
    }

    #[test]
    fn the_rate_is_that_of_the_last_few_seconds() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let mut at = |seconds: u64, bytes| rate.at(start + Duration::from_secs(seconds), bytes);
        assert_eq!(at(0, 0), 0);
        assert_eq!(at(1, 1000), 1000);
        assert_eq!(at(4, 1000), 250);
        assert_eq!(at(60, 1000), 0);
        assert_eq!(at(61, 2000), 1000);
    }
}
