//! The copy of a sealed artifact to a worker.
//!
//! ```text
//! plan ──a replica exists──▶ complete
//!   │ ◀──after a pause── another transfer makes the replica
//!   └──this transfer makes it
//!         ├──replicas──▶ sources, tickets ──▶ Volumes.Fetch at the gateway ──▶ complete
//!         ├──small tree──▶ Artifacts.ReadTree ──▶ Volumes.WriteArchive at the gateway ──▶ complete
//!         └──failed──▶ abandon
//! ```
//!
//! [`crate::api`] starts a task with [`run`] for each copy. The artifact store decides which
//! transfer makes a replica, and this task renews the claim meanwhile. A small tree always comes
//! from the store, so that the copy depends on no other worker.
//!
//! Invariant: a copy counts only after the worker's gateway has reported to the store that the
//! volume has the sealed bytes. A copy that ends earlier is abandoned by a call, or, if this
//! process dies, when the claim expires.

use std::time::{Duration, Instant};

use bytes::Bytes;
use domain::WorkerId;
use rpc::client::Outgoing;
use rpc::pb::runtime as gateway;
use rpc::pb::runtime::fetch_response::Message as Fetched;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_archive_request::Message as Archive;
use rpc::{Peer, Reason, Refusal};
use tokio_util::sync::CancellationToken;

use crate::in_flight::{CompleteCopy, CopyError, CopyTask, Intent, Progress, Route};
use crate::peers::{Location, Operation, PeerError, Peers, Plan, PlanOutcome, Ticket};
use crate::rate::Rate;
use crate::sources;

/// Shortest and longest pause before the next query about another transfer.
const PLAN_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Most bytes of an archive in one message.
const ARCHIVE_PIECE: usize = 1 << 20;

/// Makes a copy, and publishes its result.
pub(crate) async fn run(mut peers: Peers, mut task: CopyTask, stopping: CancellationToken) {
    let (mut intent, mut calls) = (task.intent.clone(), peers.clone());
    let copied = tokio::select! {
        copied = copy(&mut calls, &mut task) => copied,
        error = stopped(&mut intent) => Err(error),
        () = stopping.cancelled() => Err(CopyError::Stopping),
    };
    if let Err(error) = &copied {
        tracing::info!(
            artifact.id = %task.request.artifact,
            worker.id = %task.request.worker,
            transfer.id = %task.transfer,
            error = domain::error_chain(error),
            "cannot copy an artifact"
        );
        peers.abandon(&task.request.team, task.transfer).await;
    }
    task.end(copied);
}

/// Resolves when the copy must stop.
async fn stopped(intent: &mut tokio::sync::watch::Receiver<Intent>) -> CopyError {
    match intent.wait_for(|intent| *intent != Intent::Continue).await.as_deref() {
        Ok(Intent::Cancel) => CopyError::Cancelled,
        Ok(Intent::Abandon | Intent::Continue) | Err(_) => CopyError::Abandoned,
    }
}

async fn copy(peers: &mut Peers, task: &mut CopyTask) -> Result<CompleteCopy, CopyError> {
    let request = task.request.clone();
    let mut pause = PLAN_PAUSE.0;
    let plan = loop {
        let plan = peers.plan_replica(&request.team, request.artifact, request.worker, task.transfer).await?;
        match plan.outcome {
            PlanOutcome::Ours => break plan,
            PlanOutcome::Complete => return Ok(CompleteCopy { volume: plan.volume()?, progress: None }),
            PlanOutcome::BeingMade => {
                let route = Route::Elsewhere;
                task.publish(Progress { total: plan.size_bytes, route, ..Progress::default() });
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PLAN_PAUSE.1);
            }
        }
    };
    if plan.digest.is_empty() {
        return Err(CopyError::NotFound(request.artifact));
    }
    task.publish(Progress { total: plan.size_bytes, ..Progress::default() });
    let renewing = renew_claim(peers.clone(), task, plan.term);
    tokio::select! {
        copied = fill(peers, task, &plan) => copied,
        lost = renewing => Err(lost.into()),
    }
}

/// Fills the volume of a plan, from the store or from other workers.
async fn fill(peers: &mut Peers, task: &CopyTask, plan: &Plan) -> Result<CompleteCopy, CopyError> {
    let (team, artifact) = (&task.request.team, task.request.artifact);
    let location = peers.locate(team, artifact).await?.ok_or(CopyError::NotFound(artifact))?;
    if location.is_in_store {
        return unpack(peers, task, plan).await;
    }
    let sources = open_sources(peers, task, location).await?;
    fetch(peers, task, plan, &sources).await
}

/// Returns the gateway of the volume that is filled, and the ticket for it.
async fn open_destination(
    peers: &mut Peers,
    task: &CopyTask,
    plan: &Plan,
) -> Result<(VolumesClient<Peer>, Ticket), CopyError> {
    let (team, worker) = (&task.request.team, task.request.worker);
    let ticket = peers.issue_ticket(team, worker, plan.volume()?, Operation::Write).await?;
    let outgoing = Outgoing::internal().with_ticket(&ticket.ticket);
    let malformed = |_| PeerError::Malformed("address of a gateway");
    let gateway = rpc::client::peer(&ticket.gateway_endpoint, outgoing).map_err(malformed)?;
    Ok((VolumesClient::new(gateway), ticket))
}

/// Sends the small tree of the store to the worker, which unpacks it.
async fn unpack(peers: &mut Peers, task: &CopyTask, plan: &Plan) -> Result<CompleteCopy, CopyError> {
    let tree = peers.read_tree(&task.request.team, task.request.artifact).await?;
    let tree = tree.ok_or(CopyError::NoReplica(task.request.artifact))?;
    let archive = Bytes::from(tree.archive().map_err(|_| PeerError::Malformed("tree"))?);

    let total = tree.size_bytes();
    let progress = Progress { total, route: Route::Store, ..Progress::default() };
    task.publish(progress);
    let (mut gateway, Ticket { ticket, gateway_endpoint: endpoint }) =
        open_destination(peers, task, plan).await?;
    let open = Archive::Open(gateway::WriteOpen { ticket });
    let pieces = (0..archive.len()).step_by(ARCHIVE_PIECE);
    let piece = |at: usize| Archive::Data(archive.slice(at..archive.len().min(at + ARCHIVE_PIECE)));
    let data = pieces.map(piece).collect::<Vec<_>>();
    let messages = std::iter::once(open).chain(data).chain([Archive::Commit(gateway::WriteCommit {})]);
    let messages = messages.map(|message| gateway::WriteArchiveRequest { message: Some(message) });
    let written = match gateway.write_archive(tokio_stream::iter(messages)).await {
        Ok(written) => written,
        Err(status) => return Err(describe_failure(peers, task, &endpoint, &[], status.into()).await),
    };
    if written.into_inner().digest != plan.digest {
        return Err(CopyError::OtherBytes(task.request.worker));
    }
    Ok(CompleteCopy { volume: plan.volume()?, progress: Some(Progress { done: total, ..progress }) })
}

/// Renews the claim of a copy while it is polled. Returns when the claim is lost.
async fn renew_claim(mut peers: Peers, task: &CopyTask, mut term: Duration) -> PeerError {
    let (team, transfer) = (task.request.team.clone(), task.transfer);
    loop {
        tokio::time::sleep(term / 3).await;
        match peers.renew_claim(&team, transfer).await {
            Ok(renewed) => term = renewed,
            Err(error) if error.is_transient() => {
                tracing::debug!(%error, "cannot renew the claim of a copy");
            }
            Err(error) => return error,
        }
    }
}

/// A replica on another worker, with the ticket to read it.
struct Source {
    worker: WorkerId,
    fetch: gateway::FetchSource,
}

/// Returns the replicas that can be read now, best first.
async fn open_sources(
    peers: &mut Peers,
    task: &CopyTask,
    location: Location,
) -> Result<Vec<Source>, CopyError> {
    let mut sources = Vec::new();
    let (mut unreadable, mut silent) = (None, Vec::new());
    for replica in sources::rank(location.replicas, task.request.worker, &task.readers()) {
        let ticket =
            peers.issue_ticket(&task.request.team, replica.worker, replica.volume, Operation::Read).await;
        match ticket {
            Ok(Ticket { ticket, gateway_endpoint }) => {
                let fetch = gateway::FetchSource { gateway_endpoint, ticket };
                sources.push(Source { worker: replica.worker, fetch });
            }
            Err(PeerError::Refused(refusal)) if refusal.is(Reason::WorkerUnreachable) => {
                silent.push((replica.worker, refusal.message));
            }
            Err(error) if error.is_unreadable_replica() => unreadable = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    if sources.is_empty() && !silent.is_empty() {
        let mut failures = Vec::new();
        for (worker, error) in silent {
            failures.push(format!("worker {}: {error}", peers.worker_name(worker).await));
        }
        return Err(CopyError::Silent(failures.join("; ")));
    }
    match unreadable {
        Some(error) if sources.is_empty() => Err(error.into()),
        None if sources.is_empty() => Err(CopyError::NoReplica(task.request.artifact)),
        _ => Ok(sources),
    }
}

/// Requests the worker's gateway to fetch the bytes from the gateways of the sources.
async fn fetch(
    peers: &mut Peers,
    task: &CopyTask,
    plan: &Plan,
    sources: &[Source],
) -> Result<CompleteCopy, CopyError> {
    let volume = plan.volume()?;
    let (mut gateway, Ticket { ticket, gateway_endpoint: endpoint }) =
        open_destination(peers, task, plan).await?;
    let request = gateway::FetchRequest {
        ticket,
        digest: plan.digest.clone(),
        sources: sources.iter().map(|source| source.fetch.clone()).collect(),
    };
    match receive(gateway.fetch(request).await, task, plan, sources).await {
        Ok(Some(progress)) => Ok(CompleteCopy { volume, progress: Some(progress) }),
        Ok(None) => Err(CopyError::Truncated(task.request.worker)),
        Err(refusal) => Err(describe_failure(peers, task, &endpoint, sources, refusal).await),
    }
}

/// Publishes the progress of a fetch until its end. `None`: the gateway ended the call too early.
async fn receive(
    answers: Result<tonic::Response<tonic::Streaming<gateway::FetchResponse>>, tonic::Status>,
    task: &CopyTask,
    plan: &Plan,
    sources: &[Source],
) -> Result<Option<Progress>, Refusal> {
    let mut answers = answers?.into_inner();
    let mut rate = Rate::default();
    let mut progress = Progress { total: plan.size_bytes, route: Route::Peer, ..Progress::default() };
    while let Some(answer) = answers.message().await? {
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
                task.publish(progress);
            }
            Some(Fetched::Committed(_)) => {
                progress.done = progress.total;
                return Ok(Some(progress));
            }
            None => break,
        }
    }
    Ok(None)
}

/// Describes the failure of a call to the gateway of the destination, at `endpoint`. Names the
/// workers and addresses that cannot be reached.
async fn describe_failure(
    peers: &mut Peers,
    task: &CopyTask,
    endpoint: &str,
    sources: &[Source],
    refusal: Refusal,
) -> CopyError {
    if refusal.is(Reason::SourceFailed) {
        let mut failures = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            let Some(error) = refusal.about.get(&format!("source_{index}_error")) else { continue };
            let name = peers.worker_name(source.worker).await;
            failures.push(format!("worker {name} at {}: {error}", source.fetch.gateway_endpoint));
        }
        let more = sources.len().saturating_sub(failures.len());
        if more > 0 {
            failures.push(format!("and {more} more"));
        }
        return CopyError::Sources { failures: failures.join("; "), about: refusal.about };
    }
    // An error without a reason does not come from the gateway.
    if refusal.reason.is_none() && refusal.is_transient() {
        let name = peers.worker_name(task.request.worker).await;
        return CopyError::Unreachable { name, endpoint: endpoint.to_owned(), error: refusal.message };
    }
    PeerError::from(refusal).into()
}
