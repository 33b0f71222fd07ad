//! The copy of a sealed artifact to a worker.
//!
//! ```text
//! plan ──a replica exists──▶ complete
//!   │ ◀──after a pause── another transfer makes the replica
//!   └──this transfer makes it
//!         ├──replicas──▶ sources, tickets ──▶ Volumes.Fetch at the gateway ──▶ complete
//!         │                └──cannot be reached──▶ relay through this process ──▶ complete
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

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use domain::error_chain;
use rpc::client::Outgoing;
use rpc::pb::runtime as gateway;
use rpc::pb::runtime::fetch_response::Message as Fetched;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_archive_request::Message as Archive;
use rpc::{Peer, Reason, Refusal};
use tokio_util::sync::CancellationToken;

use crate::in_flight::{CompleteCopy, CopyError, CopyState, CopyTask, Intent, Progress, ReadableCopy, Route};
use crate::peers::{Location, Operation, PeerError, Peers, Plan, PlanOutcome, Ticket};
use crate::rate::Rate;
use crate::relay::{RelayError, RelayedBytes, relay};
use crate::routes::Routes;
use crate::sources::{self, Replica};

/// Shortest and longest pause before the next query about another transfer.
const PLAN_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Most bytes of an archive in one message.
const ARCHIVE_PIECE: usize = 1 << 20;
/// Most sources that a gateway tries before the next ones. A source whose address does not answer
/// costs 5 s.
const DIRECT_SOURCES: usize = 3;
/// Longest time that the source of a relay may send nothing, if there are other sources, and if
/// there are none. The source may have to scan a large volume.
const SOURCE_PAUSE: (Duration, Duration) = (Duration::from_secs(120), Duration::from_secs(60 * 60));
/// Least size of an artifact that is read from a copy in flight, in bytes. A smaller one is copied
/// in the time that it takes to wait for the other copy.
const MIN_CHAINED_BYTES: u64 = 16 << 20;
/// Longest wait for a copy in flight to become readable. Its source may have to scan a volume.
const CHAIN_WAIT: Duration = Duration::from_secs(60);
/// Age from which a ticket is requested again before its first use.
const MAX_TICKET_AGE: Duration = Duration::from_secs(5);
/// Maximum time for a gateway to hash a volume.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// Most failed sources that an error describes.
const MAX_DESCRIBED: usize = 5;

/// Makes a copy, and publishes its result.
pub(crate) async fn run(mut peers: Peers, routes: Routes, mut task: CopyTask, stopping: CancellationToken) {
    let (mut intent, mut calls) = (task.intent.clone(), peers.clone());
    let copied = tokio::select! {
        copied = copy(&mut calls, &routes, &mut task) => copied,
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

async fn copy(peers: &mut Peers, routes: &Routes, task: &mut CopyTask) -> Result<CompleteCopy, CopyError> {
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
        copied = fill(peers, routes, task, &plan) => copied,
        lost = renewing => Err(lost.into()),
    }
}

/// Fills the volume of a plan, from the store or from other workers.
async fn fill(
    peers: &mut Peers,
    routes: &Routes,
    task: &CopyTask,
    plan: &Plan,
) -> Result<CompleteCopy, CopyError> {
    let (team, artifact) = (&task.request.team, task.request.artifact);
    let location = peers.locate(team, artifact).await?.ok_or(CopyError::NotFound(artifact))?;
    if location.is_in_store {
        return unpack(peers, task, plan).await;
    }
    let issued_at = Instant::now();
    let write = peers.issue_ticket(team, task.request.worker, plan.volume()?, Operation::Write).await?;
    let mut sources = open_sources(peers, task, location, &write.zone).await?;
    if plan.size_bytes >= MIN_CHAINED_BYTES
        && let Some(source) = open_copy_in_flight(peers, routes, task, plan, &write.zone, &sources[0]).await?
    {
        sources.insert(0, source);
    }
    // The ticket may have expired during the wait for the copy in flight.
    let write = Some(write).filter(|_| issued_at.elapsed() < MAX_TICKET_AGE);
    copy_from(peers, routes, task, plan, write, sources).await
}

/// Returns a copy in flight as a source, if the best replica is busy. Waits until it can be read.
async fn open_copy_in_flight(
    peers: &mut Peers,
    routes: &Routes,
    task: &CopyTask,
    plan: &Plan,
    zone: &str,
    best: &Source,
) -> Result<Option<Source>, CopyError> {
    let is_near = is_near(best, zone);
    let is_relayed = |worker| routes.is_relayed(worker, task.request.worker);
    let copy = task.choose_source(best.replica.worker, plan.volume()?, zone, is_near, is_relayed);
    let Some(ReadableCopy { worker, volume, mut states }) = copy else { return Ok(None) };
    let has_begun = |state: &CopyState| match state {
        CopyState::Running(progress) => progress.from.is_some(),
        CopyState::Ended(_) => true,
    };
    let waited = tokio::time::timeout(CHAIN_WAIT, states.wait_for(has_begun));
    let is_readable = match waited.await {
        Ok(Ok(state)) => match &*state {
            CopyState::Running(progress) => progress.is_readable,
            CopyState::Ended(result) => result.is_ok(),
        },
        Ok(Err(_)) | Err(_) => false,
    };
    if !is_readable {
        return Ok(None);
    }
    match peers.issue_ticket(&task.request.team, worker, volume, Operation::Read).await {
        Ok(ticket) => {
            let replica = Replica { worker, volume, is_verified: true };
            Ok(Some(Source { replica, ticket }))
        }
        // The copy has failed meanwhile, or its scheduler or store is older.
        Err(error) if error.is_unreadable_replica() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a source is in the zone of the destination.
fn is_near(source: &Source, zone: &str) -> bool {
    !zone.is_empty() && source.ticket.zone == zone
}

/// Fills a volume from the first source that works. Sources that the destination can probably reach
/// come first. `write` is the ticket of the first try. `None`: a new one is needed.
async fn copy_from(
    peers: &mut Peers,
    routes: &Routes,
    task: &CopyTask,
    plan: &Plan,
    mut write: Option<Ticket>,
    sources: Vec<Source>,
) -> Result<CompleteCopy, CopyError> {
    let is_relayed = |source: &Source| routes.is_relayed(source.replica.worker, task.request.worker);
    let (relayed, mut direct): (Vec<_>, Vec<_>) = sources.into_iter().partition(is_relayed);
    let mut relays: VecDeque<_> = relayed.into_iter().map(|source| (source, None)).collect();
    let mut failed: Vec<FailedSource> = Vec::new();
    // Sources whose ticket had expired in a long copy.
    let mut renewed = HashSet::new();
    loop {
        let rest = direct.split_off(direct.len().min(DIRECT_SOURCES));
        let tried = std::mem::replace(&mut direct, rest);
        if !tried.is_empty() {
            let failures = match fetch(peers, task, plan, write.take(), tried).await? {
                SourceOutcome::Complete(copy) => return Ok(copy),
                SourceOutcome::Failed(failures) => failures,
            };
            let (expired, failures): (Vec<_>, Vec<_>) =
                failures.into_iter().partition(|failure| failure.reason == Reason::InvalidToken.as_str());
            for mut failure in expired {
                let is_again = !renewed.insert(failure.source.replica.volume);
                if is_again || !renew_ticket(peers, task, &mut failure.source).await? {
                    failed.push(failure);
                } else {
                    direct.insert(0, failure.source);
                }
            }
            let (unreachable, others): (Vec<_>, Vec<_>) =
                failures.into_iter().partition(|failure| failure.is_unreachable);
            failed.extend(others);
            for failure in unreachable.into_iter().rev() {
                relays.push_front((failure.source, Some(failure.error)));
            }
        }
        while let Some((source, direct_error)) = relays.pop_front() {
            let is_last = direct.is_empty() && relays.is_empty();
            let pause = if is_last { SOURCE_PAUSE.1 } else { SOURCE_PAUSE.0 };
            match relay_from(peers, routes, task, plan, source, direct_error, pause).await? {
                SourceOutcome::Complete(copy) => return Ok(copy),
                SourceOutcome::Failed(failures) => failed.extend(failures),
            }
        }
        if direct.is_empty() {
            return Err(describe_sources(peers, &failed).await);
        }
    }
}

/// Requests a new ticket for a source. Returns `false` if the replica cannot be read any more.
async fn renew_ticket(peers: &mut Peers, task: &CopyTask, source: &mut Source) -> Result<bool, PeerError> {
    let Replica { worker, volume, .. } = source.replica;
    match peers.issue_ticket(&task.request.team, worker, volume, Operation::Read).await {
        Ok(ticket) => source.ticket = ticket,
        Err(error) if error.is_unreadable_replica() => return Ok(false),
        Err(error) => return Err(error),
    }
    Ok(true)
}

/// Returns the gateway of the volume that is filled, and the ticket for it: `write`, or a new one.
async fn open_destination(
    peers: &mut Peers,
    task: &CopyTask,
    plan: &Plan,
    write: Option<Ticket>,
) -> Result<(VolumesClient<Peer>, Ticket), CopyError> {
    let (team, worker) = (&task.request.team, task.request.worker);
    let ticket = match write {
        Some(ticket) => ticket,
        None => peers.issue_ticket(team, worker, plan.volume()?, Operation::Write).await?,
    };
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
    let (mut gateway, Ticket { ticket, gateway_endpoint: endpoint, .. }) =
        open_destination(peers, task, plan, None).await?;
    let open = Archive::Open(gateway::WriteOpen { ticket });
    let pieces = (0..archive.len()).step_by(ARCHIVE_PIECE);
    let piece = |at: usize| Archive::Data(archive.slice(at..archive.len().min(at + ARCHIVE_PIECE)));
    let data = pieces.map(piece).collect::<Vec<_>>();
    let messages = std::iter::once(open).chain(data).chain([Archive::Commit(gateway::WriteCommit {})]);
    let messages = messages.map(|message| gateway::WriteArchiveRequest { message: Some(message) });
    let written = match gateway.write_archive(tokio_stream::iter(messages)).await {
        Ok(written) => written,
        Err(status) => return Err(describe_failure(peers, task, &endpoint, status.into()).await),
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
    replica: Replica,
    ticket: Ticket,
}

/// A source that did not provide all bytes.
struct FailedSource {
    source: Source,
    /// Reason of the error, for programs.
    reason: String,
    error: String,
    /// Whether the gateway of the destination could not reach it.
    is_unreachable: bool,
}

/// The result of a copy from some sources.
enum SourceOutcome {
    Complete(CompleteCopy),
    /// No source provided all bytes. Another one may work.
    Failed(Vec<FailedSource>),
}

/// Returns the replicas that can be read now, best first. `zone` is that of the destination.
async fn open_sources(
    peers: &mut Peers,
    task: &CopyTask,
    location: Location,
    zone: &str,
) -> Result<Vec<Source>, CopyError> {
    let (mut sources, readers) = (Vec::new(), task.readers());
    let (mut unreadable, mut silent) = (None, Vec::new());
    for replica in sources::candidates(location.replicas, task.request.worker, &readers) {
        let ticket =
            peers.issue_ticket(&task.request.team, replica.worker, replica.volume, Operation::Read).await;
        match ticket {
            Ok(ticket) => sources.push(Source { replica, ticket }),
            Err(PeerError::Refused(refusal)) if refusal.is(Reason::WorkerUnreachable) => {
                silent.push((replica.worker, refusal.message));
            }
            Err(error) if error.is_unreadable_replica() => unreadable = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    sources.sort_by_key(|source: &Source| sources::rank(&source.replica, is_near(source, zone), &readers));
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

/// Requests the worker's gateway to fetch the bytes from the gateways of the sources. `write` is
/// the ticket of the worker. `None`: a new one is needed.
async fn fetch(
    peers: &mut Peers,
    task: &CopyTask,
    plan: &Plan,
    write: Option<Ticket>,
    sources: Vec<Source>,
) -> Result<SourceOutcome, CopyError> {
    let volume = plan.volume()?;
    let (mut gateway, Ticket { ticket, gateway_endpoint: endpoint, .. }) =
        open_destination(peers, task, plan, write).await?;
    let fetch_source = |Source { ticket, .. }: &Source| gateway::FetchSource {
        gateway_endpoint: ticket.gateway_endpoint.clone(),
        ticket: ticket.ticket.clone(),
    };
    let request = gateway::FetchRequest {
        ticket,
        digest: plan.digest.clone(),
        sources: sources.iter().map(fetch_source).collect(),
    };
    let mut reached = HashSet::new();
    match receive(gateway.fetch(request).await, task, plan, &sources, &mut reached).await {
        Ok(Some(progress)) => Ok(SourceOutcome::Complete(CompleteCopy { volume, progress: Some(progress) })),
        Ok(None) => Err(CopyError::Truncated(task.request.worker)),
        Err(refusal) if refusal.is(Reason::SourceFailed) => {
            let sources = sources.into_iter().enumerate();
            let failures = sources.map(|(index, source)| {
                let about = |name: String| refusal.about.get(&name).cloned();
                let reason = about(format!("source_{index}")).unwrap_or_default();
                let error = about(format!("source_{index}_error")).unwrap_or_else(|| reason.clone());
                // A source that has answered and then breaks off is not unreachable.
                let is_unreachable =
                    about(format!("source_{index}_unreachable")).is_some() && !reached.contains(&index);
                FailedSource { source, reason, error, is_unreachable }
            });
            Ok(SourceOutcome::Failed(failures.collect()))
        }
        Err(refusal) => Err(describe_failure(peers, task, &endpoint, refusal).await),
    }
}

/// Publishes the progress of a fetch until its end, and adds the indices of sources that answer to
/// `reached`. `None`: the gateway ended the call too early.
async fn receive(
    answers: Result<tonic::Response<tonic::Streaming<gateway::FetchResponse>>, tonic::Status>,
    task: &CopyTask,
    plan: &Plan,
    sources: &[Source],
    reached: &mut HashSet<usize>,
) -> Result<Option<Progress>, Refusal> {
    let mut answers = answers?.into_inner();
    let mut rate = Rate::default();
    let mut progress = Progress { total: plan.size_bytes, route: Route::Peer, ..Progress::default() };
    while let Some(answer) = answers.message().await? {
        match answer.message {
            Some(Fetched::Progress(now)) => {
                let index = usize::try_from(now.source).unwrap_or(usize::MAX);
                reached.insert(index);
                progress = Progress {
                    done: now.bytes_done,
                    total: now.bytes_total,
                    saved: now.bytes_saved,
                    per_second: rate.at(Instant::now(), now.bytes_done.saturating_sub(now.bytes_saved)),
                    route: if now.peer_to_peer { Route::Workers } else { Route::Peer },
                    from: sources.get(index).map(|source| source.replica.worker),
                    is_readable: now.readable,
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

/// Carries the bytes from the gateway of a source to the gateway of the destination.
/// `direct_error` is the error of the destination, if it could not reach the source just now.
async fn relay_from(
    peers: &mut Peers,
    routes: &Routes,
    task: &CopyTask,
    plan: &Plan,
    source: Source,
    direct_error: Option<String>,
    pause: Duration,
) -> Result<SourceOutcome, CopyError> {
    let (team, volume) = (&task.request.team, plan.volume()?);
    let (from, to) = (source.replica.worker, task.request.worker);
    let _permit = routes.admit_relay().await;
    // The tickets of an earlier try may have expired.
    let read = peers.issue_ticket(team, from, source.replica.volume, Operation::Read).await;
    let read = match read {
        Ok(ticket) => ticket,
        Err(error) if error.is_unreadable_replica() => {
            let reason = error.reason().to_owned();
            return Ok(failed_relay(source, reason, error.to_string(), direct_error));
        }
        Err(error) => return Err(error.into()),
    };
    let write = peers.issue_ticket(team, to, volume, Operation::Write).await?;

    let reached = || {
        if let Some(error) = &direct_error {
            tracing::info!(from.worker.id = %from, to.worker.id = %to, error, "carrying the bytes between two workers that cannot reach each other");
            routes.record(from, to, read.gateway_endpoint.clone(), error.clone());
        }
    };
    let mut rate = Rate::default();
    let mut publish = |RelayedBytes { done, total, saved }| {
        let per_second = rate.at(Instant::now(), done.saturating_sub(saved));
        let (route, from) = (Route::Relay, Some(from));
        let progress = Progress { done, total, saved, per_second, route, from, is_readable: false };
        task.publish(progress);
        progress
    };
    let relayed = relay(&read, &write, &plan.digest, pause, reached, |bytes| _ = publish(bytes)).await;
    match relayed {
        Ok(bytes) => {
            let progress = Some(publish(bytes));
            Ok(SourceOutcome::Complete(CompleteCopy { volume, progress }))
        }
        Err(RelayError::Source(error)) => {
            let reason = error.reason().to_owned();
            if reason == Reason::DigestMismatch.as_str() {
                verify(read).await;
            }
            if reason == Reason::Unavailable.as_str() {
                routes.forget(from, to);
            }
            Ok(failed_relay(source, reason, error_chain(&error), direct_error))
        }
        // The source sent other bytes than it declared.
        Err(RelayError::Destination(refusal)) if refusal.is(Reason::DigestMismatch) => {
            let reason = Reason::DigestMismatch.as_str().to_owned();
            verify(read).await;
            Ok(failed_relay(source, reason, refusal.message, direct_error))
        }
        Err(RelayError::Destination(refusal)) => {
            Err(describe_failure(peers, task, &write.gateway_endpoint, refusal).await)
        }
        Err(RelayError::Truncated) => Err(CopyError::Truncated(to)),
        Err(RelayError::Peer(error)) => Err(error.into()),
    }
}

/// Has a source hashed that sent other bytes than it declared, so that it is used no longer.
async fn verify(source: Ticket) {
    let outgoing = Outgoing::internal().with_ticket(&source.ticket);
    let Ok(gateway) = rpc::client::peer(&source.gateway_endpoint, outgoing) else { return };
    let mut request = tonic::Request::new(gateway::VerifyRequest { ticket: source.ticket });
    request.set_timeout(VERIFY_TIMEOUT);
    let verified = VolumesClient::new(gateway).verify(request).await;
    let error = verified.err().map(|status| Refusal::from(status).to_string());
    let endpoint = source.gateway_endpoint;
    tracing::info!(gateway.endpoint = endpoint, error, "a source that sent other bytes was verified");
}

fn failed_relay(
    source: Source,
    reason: String,
    relay_error: String,
    direct_error: Option<String>,
) -> SourceOutcome {
    let error = match direct_error {
        Some(direct) => format!("{direct}; the streamer cannot read the source either: {relay_error}"),
        None => relay_error,
    };
    SourceOutcome::Failed(vec![FailedSource { source, reason, error, is_unreachable: false }])
}

/// Describes the failures of all sources, with the names and addresses of their workers.
async fn describe_sources(peers: &mut Peers, failed: &[FailedSource]) -> CopyError {
    let (mut failures, mut about) = (Vec::new(), HashMap::new());
    for (index, FailedSource { source, reason, error, .. }) in failed.iter().enumerate() {
        about.insert(format!("source_{index}"), reason.clone());
        if index < MAX_DESCRIBED {
            about.insert(format!("source_{index}_error"), error.clone());
            let name = peers.worker_name(source.replica.worker).await;
            failures.push(format!("worker {name} at {}: {error}", source.ticket.gateway_endpoint));
        }
    }
    if failed.len() > MAX_DESCRIBED {
        failures.push(format!("and {} more", failed.len() - MAX_DESCRIBED));
    }
    CopyError::Sources { failures: failures.join("; "), about }
}

/// Describes the failure of a call to the gateway of the destination, at `endpoint`. Names the
/// worker if it cannot be reached.
async fn describe_failure(peers: &mut Peers, task: &CopyTask, endpoint: &str, refusal: Refusal) -> CopyError {
    // An error without a reason does not come from the gateway.
    if refusal.reason.is_none() && refusal.is_transient() {
        let worker = task.request.worker;
        let (name, endpoint) = (peers.worker_name(worker).await, endpoint.to_owned());
        return CopyError::Unreachable { worker, name, endpoint, error: refusal.message };
    }
    PeerError::from(refusal).into()
}
