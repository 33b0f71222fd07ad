//! The sweep and the report: volumes and containers that the artifact store has marked are destroyed, and those
//! that the worker has are reported.
//!
//! Invariant: the gateway destroys only what the store handed out under its session, or does not know. A row
//! comes before its volume, so a handle without a row is garbage, if the store is the same as before. A store out
//! of a backup has another life than the one beside the worker's marker. It counts what it does not know as
//! orphans, nothing unknown is destroyed, and only then is the new life kept.
//!
//! If the operator holds destruction, the gateway destroys nothing and does not ask what it should destroy. It
//! destroys nothing either while another gateway may speak for the worker.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use domain::worker::StoreMark;
use domain::{ContainerHandle, VolumeHandle, error_chain};
use futures::StreamExt;
use rpc::Refusal;
use runtime::RuntimeError;

use crate::clients::store::{DestroyOrder, VolumeDescription};
use crate::transfer::Transfers;
use crate::transfer::manifests::StoredManifest;
use crate::worker::Worker;
use crate::worker::session::OpenSession;

/// Volumes that the store is asked for in one message: its largest page.
const LISTED_AT_ONCE: usize = 1_000;

/// Orphans, in one message.
const DESCRIBED_AT_ONCE: usize = 500;

/// Sweeping or reporting went wrong. It is tried again.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Worker(#[from] RuntimeError),
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
        Err(error) => tracing::warn!(%error, "cannot {doing}"),
    }
}

async fn sweep(transfers: &Transfers, session: &OpenSession) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    let mut orders = worker.clients.store.watch_destroying(&session.credential).await?;
    loop {
        let DestroyOrder { containers, volumes } = orders.next().await?;
        let destroyed = destroy(transfers, containers, volumes).await;
        worker.report_due.notify_one();
        if !destroyed {
            // A new call answers again what was handed out and is still there.
            return Err(SweepError::Incomplete);
        }
    }
}

/// Whether the operator wants to keep what would be destroyed now.
fn holds_destruction(worker: &Worker, containers: usize, volumes: usize) -> bool {
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
                tracing::warn!(container.handle = %container, error = error_chain(&error), "cannot destroy a container");
                all.store(false, Ordering::Relaxed);
            } else {
                metrics::counter!("gantry_gateway_destroyed_total", "kind" => "container").increment(1);
            }
        })
        .await;
    // Children come before their parents, so in this order. A worker refuses to destroy the parent of what could not be destroyed.
    for volumes in volumes.chunks(worker.runtime.destroy_batch_size().max(1)) {
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
            tracing::warn!(volume.handle = %volume, error = error_chain(error), "cannot destroy a volume");
            all.store(false, Ordering::Relaxed);
        }
        let gone = length(volumes) - length(&left);
        metrics::counter!("gantry_gateway_destroyed_total", "kind" => "volume").increment(gone);
    }
    all.into_inner()
}

async fn report(transfers: &Transfers, session: &OpenSession) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    let (store, credential) = (&worker.clients.store, &session.credential);
    let mark = worker.runtime.store_mark().await?;
    // The token comes before the listing: what is made in between is younger than the report, and not judged by it.
    let now = store.begin_report(credential, mark).await?;
    let is_same = mark.is_some_and(|mark| mark.life == now.life);
    let before = worker.usage.begin();
    let mut holdings = worker.runtime.list().await?;
    worker.usage.listed(&holdings, &before);

    // What is damaged is lost to a store that counts on it: it looks for other replicas of what that held, and has nothing made from it. One that
    // does not is told of it as of anything else.
    let counted_on = listed(worker, session, &transfers.manifests.damaged()).await?;
    holdings.volumes.retain(|volume| !counted_on.contains(volume));
    let answer = store.report(credential, mark, now, &holdings).await?;
    if answer.lost > 0 {
        tracing::warn!(volumes.lost = answer.lost, "things are missing on the worker");
    }
    let (containers, volumes) = (answer.unknown_containers, answer.unknown_volumes);
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
            orphans = answer.orphans,
            "the artifact store came out of a backup: from now on the worker belongs to its new life"
        );
    }
    worker.runtime.set_store_mark(StoreMark { receipt: answer.receipt, ..now }).await?;
    describe(transfers, session, &answer.undescribed_volumes).await?;
    if volumes.is_empty() && containers.is_empty() {
        return Ok(());
    }
    if holds_destruction(worker, containers.len(), volumes.len()) {
        return Ok(());
    }
    tracing::info!(
        containers = containers.len(),
        volumes = volumes.len(),
        "destroying what the store does not know"
    );
    if destroy(transfers, containers, volumes).await { Ok(()) } else { Err(SweepError::Incomplete) }
}

/// Tells the store what the worker knows of orphans. There may be more: then the next report comes at once.
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
                // It went meanwhile, and so will its orphans.
                Err(RuntimeError::VolumeNotFound(_)) => {}
                Err(error) => {
                    tracing::warn!(volume.handle = %volume, error = error_chain(&error), "cannot tell what a volume holds");
                    // It can be purged, and is in nobody's way.
                    volumes.push(VolumeDescription::unknown(*volume));
                }
            }
        }
        worker.clients.store.describe_orphans(&session.credential, volumes).await?;
    }
    if !undescribed.is_empty() {
        worker.report_due.notify_one();
    }
    Ok(())
}

/// What the worker knows of a volume: what is kept with it, and of one that is complete, its manifest.
async fn description(transfers: &Transfers, volume: VolumeHandle) -> Result<VolumeDescription, RuntimeError> {
    let worker = &transfers.worker;
    let notes = worker.runtime.notes(volume).await?;
    let kept = transfers.manifests.kept_of(&*worker.runtime, volume).await?;
    Ok(VolumeDescription {
        volume,
        parent: notes.parent,
        team: kept.as_ref().map(|kept| kept.team().to_owned()).unwrap_or_default(),
        artifact: notes.artifact,
        digest: kept.as_ref().map(StoredManifest::tree_digest),
        size_bytes: kept.as_ref().map(StoredManifest::size_bytes).unwrap_or_default(),
    })
}

/// Which of `volumes` the store knows to be on the worker.
async fn listed(
    worker: &Worker,
    session: &OpenSession,
    volumes: &BTreeSet<VolumeHandle>,
) -> Result<BTreeSet<VolumeHandle>, SweepError> {
    let all: Vec<_> = volumes.iter().copied().collect();
    let mut listed = BTreeSet::new();
    for some in all.chunks(LISTED_AT_ONCE) {
        listed.extend(worker.clients.store.list_volumes(session.worker, some).await?);
    }
    Ok(listed)
}

fn length<T>(items: &[T]) -> u64 {
    u64::try_from(items.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
