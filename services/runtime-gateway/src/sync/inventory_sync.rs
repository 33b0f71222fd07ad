//! Sweeping and reporting: what the artifact store has marked is destroyed, and what the worker holds is told.
//!
//! Invariant: nothing is destroyed that the store did not hand out under our session, or that it does not know at all. A row comes before
//! the thing it stands for, so a handle that the store does not know is garbage, as long as it is the same store. One that came out of a
//! backup has another life than the one that is kept beside the worker's marker: then it sets aside what it does not know, nothing unknown is touched,
//! and only after that is the new life kept. Where the operator holds destruction, nothing is destroyed at all, and
//! nobody asks what should be; it goes with the first gateway that does not hold it. Nor is anything destroyed while another
//! gateway may have been let in.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use domain::worker::{Receipt, StoreMark};
use domain::{ContainerHandle, VolumeHandle, chain};
use futures::StreamExt;
use rpc::Refusal;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::report_request::Message as Part;
use runtime::{Holdings, RuntimeError};

use crate::transfer::Transfers;
use crate::transfer::manifests::Kept;
use crate::worker::Worker;
use crate::worker::session::OpenSession;

/// Handles in one message of a report.
const BATCH: usize = 5_000;

/// Volumes that the store is asked for in one message: its largest page.
const LISTED_AT_ONCE: usize = 1_000;

/// Volumes that are set aside, in one message.
const DESCRIBED_AT_ONCE: usize = 500;

/// Sweeping or reporting went wrong. It is tried again.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    #[error("the artifact store answered a malformed handle")]
    Malformed(#[from] domain::ParseIdError),
    #[error("the artifact store ended the stream")]
    Closed,
    #[error("some of what is marked could not be destroyed")]
    Incomplete,
}

/// Destroys what is marked, for as long as the gateway runs.
pub(crate) async fn sweep_forever(transfers: Arc<Transfers>) {
    let worker = &transfers.worker;
    if worker.config.hold_destruction {
        // What it is told to destroy nobody can bring back any more, so it does not ask.
        return;
    }
    let work = async {
        loop {
            let session = worker.session.opened().await;
            let ended = tokio::select! {
                ended = sweep(&transfers, &session) => ended,
                () = worker.session.changed(&session) => continue,
            };
            log(&ended, "sweep");
            let incomplete = matches!(ended, Err(SweepError::Incomplete));
            tokio::time::sleep(Duration::from_millis(if incomplete { 5_000 } else { 200 })).await;
        }
    };
    tokio::select! {
        () = work => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// Reports everything that the worker holds: when a session opens, when something was destroyed, and now and then.
pub(crate) async fn report_forever(transfers: Arc<Transfers>) {
    let worker = &transfers.worker;
    let work = async {
        loop {
            let session = worker.session.opened().await;
            // What is reported is said in the session, and so is what is destroyed because of the answer.
            let reported = tokio::select! {
                reported = report(&transfers, &session) => reported,
                () = worker.session.changed(&session) => continue,
            };
            let failed = reported.is_err();
            log(&reported, "report");
            let pause = if failed { Duration::from_secs(1) } else { jittered(worker.config.report_interval) };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = worker.report_due.notified(), if !failed => {}
                () = worker.session.changed(&session) => {}
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// `interval`, give or take a fifth, so that workers do not report in step.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.8..1.2))
}

fn log(result: &Result<(), SweepError>, doing: &str) {
    match result {
        Ok(()) => {}
        Err(SweepError::Refused(refusal)) if refusal.is_transient() => {
            tracing::debug!(error = %refusal, "cannot {doing} just now");
        }
        Err(SweepError::Closed) => tracing::debug!("cannot {doing} just now"),
        Err(error) => tracing::warn!(%error, "cannot {doing}"),
    }
}

async fn sweep(transfers: &Transfers, session: &OpenSession) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    let request = pb::WatchDestroyingRequest { session_credential: session.credential.clone() };
    let mut client = worker.inventory.clone();
    let mut marked = client.watch_destroying(request).await.map_err(Refusal::from)?.into_inner();
    loop {
        let message = marked.message().await.map_err(Refusal::from)?.ok_or(SweepError::Closed)?;
        let containers = parse(&message.container_handles)?;
        let volumes = parse(&message.volume_handles)?;
        let destroyed = destroy(transfers, containers, volumes).await;
        worker.report_due.notify_one();
        if !destroyed {
            // A new call answers again what was handed out and is still there.
            return Err(SweepError::Incomplete);
        }
    }
}

fn parse<T: std::str::FromStr>(handles: &[String]) -> Result<Vec<T>, T::Err> {
    handles.iter().map(|handle| handle.parse()).collect()
}

/// Whether the operator wants to keep what would be destroyed now.
fn held(worker: &Worker, containers: usize, volumes: usize) -> bool {
    if worker.config.hold_destruction {
        tracing::warn!(containers, volumes, "destruction is held: these stay");
    }
    worker.config.hold_destruction
}

/// Destroys containers, then volumes in the order given. Answers whether all of them are gone.
async fn destroy(
    transfers: &Transfers,
    containers: Vec<ContainerHandle>,
    volumes: Vec<VolumeHandle>,
) -> bool {
    let worker = &transfers.worker;
    let all = AtomicBool::new(true);
    let concurrency = worker.config.destroy_concurrency;
    futures::stream::iter(containers)
        .for_each_concurrent(concurrency, async |container| {
            if !worker.session.is_exclusive() {
                all.store(false, Ordering::Relaxed);
            } else if let Err(error) = worker.destroy_container(container).await {
                tracing::warn!(container.handle = %container, error = chain(&error), "cannot destroy a container");
                all.store(false, Ordering::Relaxed);
            } else {
                metrics::counter!("gantry_gateway_destroyed_total", "kind" => "container").increment(1);
            }
        })
        .await;
    // Children come before their parents, so in this order. A worker refuses to destroy the parent of what could not be destroyed.
    for volumes in volumes.chunks(worker.runtime.destroyed_at_once().max(1)) {
        // Whoever speaks for the worker now is told to destroy them.
        if !worker.session.is_exclusive() {
            all.store(false, Ordering::Relaxed);
            break;
        }
        for volume in volumes {
            transfers.manifests.forget(*volume).await;
        }
        let left = worker.runtime.destroy_volumes(volumes).await;
        for volume in volumes {
            transfers.manifests.forget(*volume).await;
        }
        for (volume, error) in &left {
            tracing::warn!(volume.handle = %volume, error = chain(error), "cannot destroy a volume");
            all.store(false, Ordering::Relaxed);
        }
        let gone = length(volumes) - length(&left);
        metrics::counter!("gantry_gateway_destroyed_total", "kind" => "volume").increment(gone);
    }
    all.into_inner()
}

async fn report(transfers: &Transfers, session: &OpenSession) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    let mut client = worker.inventory.clone();
    let mark = worker.runtime.store_mark().await?;
    let last =
        mark.map(|mark| pb::ReportToken { sequence: mark.sequence, store_life: mark.life.to_string() });
    let receipt = mark.and_then(|mark| mark.receipt).map(|receipt| receipt.0.to_vec().into());
    let begin = pb::BeginReportRequest {
        session_credential: session.credential.clone(),
        last,
        receipt: receipt.unwrap_or_default(),
    };
    // The token comes before the listing: what is made in between is younger than the report, and not judged by it.
    let token =
        client.begin_report(begin).await.map_err(Refusal::from)?.into_inner().token.unwrap_or_default();
    let now = StoreMark { life: token.store_life.parse()?, sequence: token.sequence, receipt: None };
    let is_same = mark.is_some_and(|mark| mark.life == now.life);
    let before = worker.usage.begin();
    let mut holdings = worker.runtime.list().await?;
    worker.usage.listed(&holdings, &before);

    // What is damaged is lost to a store that counts on it: it looks for other replicas of what that held, and has nothing made from it. One that
    // does not is told of it as of anything else.
    let counted_on = listed(worker, session, &transfers.manifests.damaged()).await?;
    holdings.volumes.retain(|volume| !counted_on.contains(volume));
    let parts = parts(session, token, mark, &holdings);
    let answer = client.report(tokio_stream::iter(parts)).await.map_err(Refusal::from)?.into_inner();
    if answer.lost > 0 {
        tracing::warn!(volumes.lost = answer.lost, "things are missing on the worker");
    }
    let containers = parse(&answer.unknown_container_handles)?;
    let volumes = parse(&answer.unknown_volume_handles)?;
    let names_unknown = !volumes.is_empty() || !containers.is_empty();
    if names_unknown && !is_same {
        tracing::error!(
            store.life = %now.life,
            "the artifact store is another one than before: what it does not know is left alone"
        );
        return Ok(());
    }
    if let Some(before) = mark.filter(|_| !is_same) {
        tracing::warn!(
            store.life = %now.life,
            store.ended_life = %before.life,
            set_aside = answer.set_aside,
            "the artifact store came out of a backup: from now on the worker belongs to its new life"
        );
    }
    let receipt = <[u8; 32]>::try_from(&answer.receipt[..]).ok().map(Receipt);
    worker.runtime.set_store_mark(StoreMark { receipt, ..now }).await?;
    describe(transfers, session, &parse(&answer.undescribed_volume_handles)?).await?;
    if volumes.is_empty() && containers.is_empty() {
        return Ok(());
    }
    if held(worker, containers.len(), volumes.len()) {
        return Ok(());
    }
    tracing::info!(
        containers = containers.len(),
        volumes = volumes.len(),
        "destroying what the store does not know"
    );
    if destroy(transfers, containers, volumes).await { Ok(()) } else { Err(SweepError::Incomplete) }
}

/// Tells the store what the worker knows of volumes that are set aside. There may be more: then the next report comes at once.
async fn describe(
    transfers: &Transfers,
    session: &OpenSession,
    undescribed: &[VolumeHandle],
) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    for some in undescribed.chunks(DESCRIBED_AT_ONCE) {
        let mut volumes = Vec::with_capacity(some.len());
        for volume in some {
            match description(transfers, *volume).await {
                Ok(description) => volumes.push(description),
                // It went meanwhile, and so will be what is set aside.
                Err(RuntimeError::VolumeNotFound(_)) => {}
                Err(error) => {
                    tracing::warn!(volume.handle = %volume, error = chain(&error), "cannot tell what a volume holds");
                    // It can be purged, and is in nobody's way.
                    let volume_handle = volume.to_string();
                    volumes.push(pb::VolumeDescription { volume_handle, ..Default::default() });
                }
            }
        }
        let session_credential = session.credential.clone();
        let request = pb::DescribeSetAsideRequest { session_credential, volumes };
        worker.inventory.clone().describe_set_aside(request).await.map_err(Refusal::from)?;
    }
    if !undescribed.is_empty() {
        worker.report_due.notify_one();
    }
    Ok(())
}

/// What the worker knows of a volume: what is kept with it, and of one that is complete, its manifest.
async fn description(
    transfers: &Transfers,
    volume: VolumeHandle,
) -> Result<pb::VolumeDescription, RuntimeError> {
    let worker = &transfers.worker;
    let notes = worker.runtime.notes(volume).await?;
    let kept = transfers.manifests.kept_of(&*worker.runtime, volume).await?;
    Ok(pb::VolumeDescription {
        volume_handle: volume.to_string(),
        parent_handle: notes.parent.map(|parent| parent.to_string()).unwrap_or_default(),
        team: kept.as_ref().map(|kept| kept.team().to_owned()).unwrap_or_default(),
        artifact_id: notes.artifact.map(|artifact| artifact.to_string()).unwrap_or_default(),
        digest: kept.as_ref().map(|kept| kept.tree_digest().as_bytes().to_vec()).unwrap_or_default().into(),
        size_bytes: kept.as_ref().map(Kept::size_bytes).unwrap_or_default(),
    })
}

/// Which of `volumes` the store counts among those that it knows to be here.
async fn listed(
    worker: &Worker,
    session: &OpenSession,
    volumes: &BTreeSet<VolumeHandle>,
) -> Result<BTreeSet<VolumeHandle>, SweepError> {
    let all: Vec<_> = volumes.iter().map(ToString::to_string).collect();
    let mut listed = BTreeSet::new();
    for some in all.chunks(LISTED_AT_ONCE) {
        let request = pb::ListVolumesRequest {
            worker_id: session.worker.to_string(),
            volume_handles: some.to_vec(),
            page_size: 1_000,
            ..pb::ListVolumesRequest::default()
        };
        // As many as a page has.
        let page = worker.inventory.clone().list_volumes(request).await.map_err(Refusal::from)?.into_inner();
        for volume in &page.volumes {
            listed.insert(volume.volume_handle.parse()?);
        }
    }
    Ok(listed)
}

fn parts(
    session: &OpenSession,
    token: pb::ReportToken,
    mark: Option<StoreMark>,
    holdings: &Holdings,
) -> Vec<pb::ReportRequest> {
    let open = pb::ReportOpen {
        session_credential: session.credential.clone(),
        token: Some(token),
        worker_life: mark.map(|mark| mark.life.to_string()).unwrap_or_default(),
    };
    let mut parts = vec![Part::Open(open)];
    for batch in holdings.volumes.chunks(BATCH) {
        let volume_handles = batch.iter().map(ToString::to_string).collect();
        parts.push(Part::Holdings(pb::Holdings { volume_handles, container_handles: Vec::new() }));
    }
    for batch in holdings.containers.chunks(BATCH) {
        let container_handles = batch.iter().map(ToString::to_string).collect();
        parts.push(Part::Holdings(pb::Holdings { volume_handles: Vec::new(), container_handles }));
    }
    let count = length(&holdings.volumes) + length(&holdings.containers);
    parts.push(Part::Commit(pb::ReportCommit { count }));
    parts.into_iter().map(|part| pb::ReportRequest { message: Some(part) }).collect()
}

fn length<T>(items: &[T]) -> u64 {
    u64::try_from(items.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
