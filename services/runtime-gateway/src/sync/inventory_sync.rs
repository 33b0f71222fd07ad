//! The sweep and the report: the gateway destroys marked volumes and containers, and reports those
//! that exist.
//!
//! Invariant: the gateway destroys only what the store ordered under its session, and what the
//! store does not know. A row exists before its volume, so a handle without a row is garbage. This
//! holds only if the store is the same as before. A store that was restored from a backup has
//! another store life than the one that the worker keeps. It counts unknown handles as orphans, and
//! the gateway destroys none of them. Only then does the worker keep the new store life.
//!
//! If the operator holds destruction, the gateway destroys nothing, and does not ask for orders. It
//! also destroys nothing while another gateway may speak for the worker.

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

/// Most volumes of one query to the store, which is its largest page.
const LIST_PAGE: usize = 1_000;

/// Most orphans of one message to the store.
const DESCRIBE_BATCH: usize = 500;

/// An error of a sweep or a report, which are tried again.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    #[error("some marked containers or volumes remain")]
    Incomplete,
}

/// Destroys marked containers and volumes, until the gateway stops.
pub(crate) async fn sweep_forever(transfers: Arc<Transfers>) {
    let worker = &transfers.worker;
    if worker.config.hold_destruction {
        // An order to destroy something is final, so the gateway does not ask for orders.
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

/// Reports all containers and volumes: when a session opens, after a destruction, and at intervals.
pub(crate) async fn report_forever(transfers: Arc<Transfers>) {
    let worker = &transfers.worker;
    let work = async {
        loop {
            let session = worker.session.opened().await;
            // The report and the destructions that follow from its answer belong to this session.
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

/// Returns `interval` varied by a fifth, so that workers do not report in step.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.8..1.2))
}

fn log(result: &Result<(), SweepError>, doing: &str) {
    match result {
        Ok(()) => {}
        Err(SweepError::Refused(refusal)) if refusal.is_transient() => {
            tracing::debug!(error = %refusal, "cannot {doing}: trying again");
        }
        Err(error) => tracing::warn!(error = error_chain(error), "cannot {doing}"),
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
            // A new call repeats the orders for what still exists.
            return Err(SweepError::Incomplete);
        }
    }
}

/// Whether the operator holds destruction.
fn holds_destruction(worker: &Worker, containers: usize, volumes: usize) -> bool {
    if worker.config.hold_destruction {
        tracing::warn!(containers, volumes, "destruction is held: these containers and volumes stay");
    }
    worker.config.hold_destruction
}

/// Destroys containers, then volumes in the given order. Returns whether all of them are gone.
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
    // The order has children before parents. A worker rejects the destruction of a parent whose
    // child remains.
    for volumes in volumes.chunks(worker.runtime.destroy_batch_size().max(1)) {
        // The gateway of the new session receives the orders again.
        if !worker.session.is_exclusive() {
            all.store(false, Ordering::Relaxed);
            break;
        }
        for volume in volumes {
            transfers.manifests.forget(*volume).await;
        }
        let remaining = worker.runtime.destroy_volumes(volumes).await;
        for volume in volumes {
            transfers.manifests.forget(*volume).await;
        }
        for (volume, error) in &remaining {
            tracing::warn!(volume.handle = %volume, error = error_chain(error), "cannot destroy a volume");
            all.store(false, Ordering::Relaxed);
        }
        transfers.volumes_changed.notify_one();
        let gone = length(volumes) - length(&remaining);
        metrics::counter!("gantry_gateway_destroyed_total", "kind" => "volume").increment(gone);
    }
    all.into_inner()
}

async fn report(transfers: &Transfers, session: &OpenSession) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    let (store, credential) = (&worker.clients.store, &session.credential);
    let mark = worker.runtime.store_mark().await?;
    // Volumes that are created after the token are younger than the report, which does not judge
    // them.
    let now = store.begin_report(credential, mark).await?;
    let is_same = mark.is_some_and(|mark| mark.life == now.life);
    let before = worker.usage.begin_listing();
    let mut holdings = worker.runtime.list().await?;
    worker.usage.finish_listing(&holdings, &before);

    // The report omits damaged volumes that the store has a row for. So the store counts them as
    // lost and uses other replicas. A damaged volume without a row is reported like any unknown
    // volume.
    let expected = list_known(worker, session, &transfers.manifests.damaged()).await?;
    holdings.volumes.retain(|volume| !expected.contains(volume));
    let answer = store.report(credential, mark, now, &holdings).await?;
    if answer.lost > 0 {
        tracing::warn!(volumes.lost = answer.lost, "containers or volumes are missing on the worker");
    }
    let (containers, volumes) = (answer.unknown_containers, answer.unknown_volumes);
    let names_unknown = !volumes.is_empty() || !containers.is_empty();
    if names_unknown && !is_same {
        tracing::error!(
            store.life = %now.life,
            "the artifact store is not the one before: the gateway keeps what that store does not know"
        );
        return Ok(());
    }
    if let Some(before) = mark.filter(|_| !is_same) {
        tracing::warn!(
            store.life = %now.life,
            store.ended_life = %before.life,
            orphans = answer.orphans,
            "the artifact store was restored from a backup: the worker now belongs to the new store life"
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
        "destroying containers and volumes that the artifact store does not know"
    );
    if destroy(transfers, containers, volumes).await { Ok(()) } else { Err(SweepError::Incomplete) }
}

/// Describes orphans to the store. There may be more, so the next report follows at once.
async fn describe(
    transfers: &Transfers,
    session: &OpenSession,
    undescribed: &[VolumeHandle],
) -> Result<(), SweepError> {
    let worker = &transfers.worker;
    for batch in undescribed.chunks(DESCRIBE_BATCH) {
        let mut volumes = Vec::with_capacity(batch.len());
        for volume in batch {
            match description(transfers, *volume).await {
                Ok(description) => volumes.push(description),
                // The volume was destroyed meanwhile.
                Err(RuntimeError::VolumeNotFound(_)) => {}
                Err(error) => {
                    tracing::warn!(volume.handle = %volume, error = error_chain(&error), "cannot describe an orphan");
                    // An operator can still purge a volume without a description.
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

/// Describes a volume from its notes and, if it is complete, from its manifest.
async fn description(transfers: &Transfers, volume: VolumeHandle) -> Result<VolumeDescription, RuntimeError> {
    let worker = &transfers.worker;
    let notes = worker.runtime.notes(volume).await?;
    let stored = transfers.manifests.stored(&*worker.runtime, volume).await?;
    Ok(VolumeDescription {
        volume,
        parent: notes.parent,
        team: stored.as_ref().map(|stored| stored.team().to_owned()).unwrap_or_default(),
        artifact: notes.artifact,
        digest: stored.as_ref().map(StoredManifest::tree_digest),
        size_bytes: stored.as_ref().map(StoredManifest::size_bytes).unwrap_or_default(),
    })
}

/// Returns those of `volumes` that the store expects on the worker.
async fn list_known(
    worker: &Worker,
    session: &OpenSession,
    volumes: &BTreeSet<VolumeHandle>,
) -> Result<BTreeSet<VolumeHandle>, SweepError> {
    let all: Vec<_> = volumes.iter().copied().collect();
    let mut known = BTreeSet::new();
    for batch in all.chunks(LIST_PAGE) {
        known.extend(worker.clients.store.list_volumes(session.worker, batch).await?);
    }
    Ok(known)
}

fn length<T>(items: &[T]) -> u64 {
    u64::try_from(items.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
