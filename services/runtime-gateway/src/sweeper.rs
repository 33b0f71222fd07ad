//! Sweeping and reporting: what the artifact store has marked is destroyed, and what the worker holds is told.
//!
//! Invariant: nothing is destroyed that the store did not hand out under our session, or that it does not know at all. A row comes before
//! the thing it stands for, so a handle that the store does not know is garbage, as long as it is the same store: a store that came out of a
//! backup has another life, and then nothing unknown is touched. Where the operator holds destruction, nothing is destroyed at all; the
//! store goes on to count it as there, and it goes with the first gateway that does not hold it. Nor is anything destroyed while another
//! gateway may have been let in.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use domain::{ContainerHandle, VolumeHandle, chain};
use futures::StreamExt;
use rpc::Refusal;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::report_request::Message as Part;
use runtime::{Holdings, RuntimeError};

use crate::worker::{OpenSession, Worker};

/// Handles in one message of a report.
const BATCH: usize = 5_000;

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
    #[error("cannot remember the life of the artifact store")]
    StoreLife(#[source] std::io::Error),
}

/// Destroys what is marked, for as long as the gateway runs.
pub(crate) async fn sweep_forever(worker: Arc<Worker>) {
    let work = async {
        loop {
            let session = worker.wait_for_session().await;
            let ended = tokio::select! {
                ended = sweep(&worker, &session) => ended,
                () = worker.session_changed(&session) => continue,
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
pub(crate) async fn report_forever(worker: Arc<Worker>) {
    let work = async {
        loop {
            let session = worker.wait_for_session().await;
            // What is reported is said in the session, and so is what is destroyed because of the answer.
            let reported = tokio::select! {
                reported = report(&worker, &session) => reported,
                () = worker.session_changed(&session) => continue,
            };
            let failed = reported.is_err();
            log(&reported, "report");
            let pause = if failed { Duration::from_secs(1) } else { jittered(worker.config.report_interval) };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = worker.report_due.notified(), if !failed => {}
                () = worker.session_changed(&session) => {}
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

async fn sweep(worker: &Arc<Worker>, session: &OpenSession) -> Result<(), SweepError> {
    let request = pb::WatchDestroyingRequest { session_credential: session.credential.clone() };
    let mut client = worker.inventory.clone();
    let mut marked = client.watch_destroying(request).await.map_err(Refusal::from)?.into_inner();
    loop {
        let message = marked.message().await.map_err(Refusal::from)?.ok_or(SweepError::Closed)?;
        let containers = parse(&message.container_handles)?;
        let volumes = parse(&message.volume_handles)?;
        if held(worker, containers.len(), volumes.len()) {
            continue;
        }
        let destroyed = destroy(worker, containers, volumes).await;
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
async fn destroy(worker: &Worker, containers: Vec<ContainerHandle>, volumes: Vec<VolumeHandle>) -> bool {
    let all = AtomicBool::new(true);
    let concurrency = worker.config.destroy_concurrency;
    futures::stream::iter(containers)
        .for_each_concurrent(concurrency, async |container| {
            if !worker.is_alone() {
                all.store(false, Ordering::Relaxed);
            } else if let Err(error) = worker.runtime.destroy_container(container).await {
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
        if !worker.is_alone() {
            all.store(false, Ordering::Relaxed);
            break;
        }
        for volume in volumes {
            worker.trees.forget(*volume).await;
        }
        let left = worker.runtime.destroy_volumes(volumes).await;
        for volume in volumes {
            worker.trees.forget(*volume).await;
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

async fn report(worker: &Arc<Worker>, session: &OpenSession) -> Result<(), SweepError> {
    let mut client = worker.inventory.clone();
    let begin = pb::BeginReportRequest { session_credential: session.credential.clone() };
    // The token comes before the listing: what is made in between is younger than the report, and not judged by it.
    let token =
        client.begin_report(begin).await.map_err(Refusal::from)?.into_inner().token.unwrap_or_default();
    let store_life = token.store_life.clone();
    let mut holdings = worker.runtime.list().await?;
    *worker.kept.lock().unwrap_or_else(PoisonError::into_inner) =
        (length(&holdings.containers), length(&holdings.volumes));

    // To the store they are lost: it looks for other replicas of what they held, and has nothing made from them.
    let damaged = worker.trees.damaged();
    holdings.volumes.retain(|volume| !damaged.contains(volume));
    let parts = parts(session, token, &holdings);
    let answer = client.report(tokio_stream::iter(parts)).await.map_err(Refusal::from)?.into_inner();
    if answer.lost > 0 {
        tracing::warn!(volumes.lost = answer.lost, "things are missing on the worker");
    }
    let containers = parse(&answer.unknown_container_handles)?;
    let mut volumes = parse(&answer.unknown_volume_handles)?;
    volumes.extend(unlisted(worker, session, damaged).await?);
    if volumes.is_empty() && containers.is_empty() {
        return remember_store_life(worker, &store_life).await.map(|_| ());
    }
    if !remember_store_life(worker, &store_life).await? {
        tracing::error!(
            store.life = store_life,
            "the artifact store is another one than before: what it does not know is left alone"
        );
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
    if destroy(worker, containers, volumes).await { Ok(()) } else { Err(SweepError::Incomplete) }
}

/// Which of `volumes`, that are left out of reports, the store has forgotten.
async fn unlisted(
    worker: &Worker,
    session: &OpenSession,
    mut volumes: BTreeSet<VolumeHandle>,
) -> Result<BTreeSet<VolumeHandle>, SweepError> {
    let mut request =
        pb::ListVolumesRequest { worker_id: session.worker.to_string(), ..pb::ListVolumesRequest::default() };
    request.page_size = 1_000;
    while !volumes.is_empty() {
        let mut client = worker.inventory.clone();
        let page = client.list_volumes(request.clone()).await.map_err(Refusal::from)?.into_inner();
        for listed in &page.volumes {
            volumes.remove(&listed.volume_handle.parse()?);
        }
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    Ok(volumes)
}

fn parts(session: &OpenSession, token: pb::ReportToken, holdings: &Holdings) -> Vec<pb::ReportRequest> {
    let open = pb::ReportOpen { session_credential: session.credential.clone(), token: Some(token) };
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

/// Keeps, beside the worker's manifests, which store this worker belongs to. Answers whether it is the one that it belonged to before.
async fn remember_store_life(worker: &Worker, life: &str) -> Result<bool, SweepError> {
    let path: PathBuf = worker.config.manifest_dir.join("store-life");
    match tokio::fs::read_to_string(&path).await {
        Ok(known) => Ok(known == life),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let whole = path.with_extension("new");
            tokio::fs::write(&whole, life).await.map_err(SweepError::StoreLife)?;
            tokio::fs::rename(&whole, &path).await.map_err(SweepError::StoreLife)?;
            Ok(true)
        }
        Err(error) => Err(SweepError::StoreLife(error)),
    }
}

#[cfg(test)]
mod tests;
