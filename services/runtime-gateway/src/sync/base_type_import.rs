//! The import of base resource types: a worker's images and certificates become artifacts.
//!
//! ```text
//! prepare (store) → volume, which the worker copies → scan → complete (store)
//! ```
//!
//! [`crate::worker_set`] starts the loop, which imports one item after the other. The artifact
//! store decides whether an import is needed. It is not if version and path are unchanged and the
//! replica exists. So each gateway of the worker may ask repeatedly. A failed import is tried again
//! after a growing pause. It delays only attempts that need it
//! ([`BaseTypeImports::wait_until_imported`]), and these start a try at once.
//!
//! Invariant: an import runs to its end in any session, because a runtime that makes a volume is
//! not interrupted. The store rejects a volume from a session that has ended.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use domain::{ArtifactId, VolumeHandle, error_chain};
use rpc::{Reason, Refusal};
use runtime::{RuntimeError, VolumeSource, WorkerProvidedPath};
use tokio::time::Instant;

use crate::transfer::Transfers;
use crate::util::retry::{is_superseded, until_answered};
use crate::worker::Worker;
use crate::worker::base_types::BaseTypeImports;

/// The team of worker-provided images and certificates: none.
const NO_TEAM: &str = "";
/// Pause after the first failure. It doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Most bytes of a failure's cause that the artifact store keeps.
const MAX_CAUSE_BYTES: usize = 1000;

/// A worker-provided item, and the time of its next check.
struct ScheduledImport {
    provided: WorkerProvidedPath,
    at: Instant,
    /// Pause after the next failure.
    pause: Duration,
}

/// The reason why an item is not imported.
#[derive(Debug, thiserror::Error)]
enum ImportError {
    /// The worker cannot copy it, or it cannot be read.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The store rejected the call, or does not answer now.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl ImportError {
    /// Whether the error is temporary and does not concern the item.
    fn is_passing(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                refusal.is_transient() || is_superseded(refusal) || refusal.is(Reason::ClaimLost)
            }
            Self::Worker(_) => false,
        }
    }
}

/// Imports all worker-provided items, until the gateway stops.
pub(crate) async fn import_forever(transfers: Arc<Transfers>, imports: Arc<BaseTypeImports>) {
    let worker = &transfers.worker;
    let now = Instant::now();
    let provided = worker.runtime.capabilities().worker_provided.iter().cloned();
    let mut due: Vec<_> =
        provided.map(|provided| ScheduledImport { provided, at: now, pause: FIRST_PAUSE }).collect();
    if due.is_empty() {
        return;
    }
    let mut session = None;
    loop {
        let open = tokio::select! {
            open = worker.session.opened() => open,
            () = worker.stopping.cancelled() => return,
        };
        // Another gateway may have imported items, and a new incarnation may have lost some. The
        // store knows.
        if session.replace(open.session) != Some(open.session) {
            due.iter_mut().for_each(|due| due.at = Instant::now());
        }
        let is_requested = |due: &&mut ScheduledImport| imports.is_requested(&due.provided.what);
        let next = due.iter_mut().find(is_requested);
        let Some(next) = (match next {
            Some(next) => Some(next),
            None => due.iter_mut().min_by_key(|due| due.at),
        }) else {
            return;
        };
        if !imports.is_requested(&next.provided.what) && next.at > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(next.at) => {}
                () = imports.wake.notified() => {}
                () = worker.session.changed(&open) => {}
                () = worker.stopping.cancelled() => return,
            }
            continue;
        }
        tokio::select! {
            () = check_import(&transfers, &imports, next) => {}
            () = worker.stopping.cancelled() => return,
        }
    }
}

/// Imports one item if necessary, and schedules its next check.
async fn check_import(transfers: &Transfers, imports: &BaseTypeImports, due: &mut ScheduledImport) {
    let worker = &transfers.worker;
    let base_type = &due.provided.what;
    let number = imports.begin_try(base_type);
    let outcome = match import(transfers, &due.provided).await {
        Ok(artifact) => {
            imports.set_imported(base_type, artifact);
            due.pause = FIRST_PAUSE;
            due.at = Instant::now() + worker.config.report_interval;
            return;
        }
        Err(error) => error,
    };
    due.at = Instant::now() + due.pause;
    if outcome.is_passing() {
        tracing::debug!(
            ?base_type,
            error = error_chain(&outcome),
            "cannot import a worker-provided image or certificates: trying again"
        );
        // Waiting attempts continue to wait.
        return;
    }
    metrics::counter!("gantry_gateway_imports_total", "outcome" => "failed").increment(1);
    tracing::warn!(
        worker.name = worker.config.worker_name,
        ?base_type,
        path = due.provided.path,
        error = error_chain(&outcome),
        again_in = ?due.pause,
        "cannot import a worker-provided image or certificates"
    );
    due.pause = LONGEST_PAUSE.min(due.pause * 2);
    imports.set_failed(base_type, number, error_chain(&outcome));
}

/// Imports one item, unless it is imported, and returns its artifact.
async fn import(transfers: &Transfers, provided: &WorkerProvidedPath) -> Result<ArtifactId, ImportError> {
    let worker = &transfers.worker;
    let session = worker.session.opened().await;
    let (store, credential) = (&worker.clients.store, &session.credential);
    let prepared = store.prepare_import(credential, provided).await?;
    let (artifact, volume) = (prepared.artifact, prepared.volume);
    let Some(term) = prepared.term else {
        return Ok(artifact);
    };
    tracing::info!(
        worker.name = worker.config.worker_name,
        base_type = ?provided.what,
        version = provided.version,
        path = provided.path,
        "importing a worker-provided image or certificates"
    );
    let filling = async {
        let source = VolumeSource::WorkerProvided(provided.what.clone());
        worker.runtime.create_volume(volume, source).await?;
        transfers.manifests.scan(&*worker.runtime, volume, NO_TEAM).await
    };
    let filled = tokio::select! {
        filled = filling => filled,
        never = renew(worker, credential, provided, term) => match never {},
    };
    let manifest = match filled {
        Ok(manifest) => manifest,
        Err(error) => {
            report_failure(worker, credential, volume, &error).await;
            return Err(error.into());
        }
    };
    let (size_bytes, digest) = (manifest.size_bytes(), manifest.tree_digest());
    let call = || store.complete_import(credential, volume, size_bytes, digest);
    until_answered("complete an import", call).await?;
    metrics::counter!("gantry_gateway_imports_total", "outcome" => "imported").increment(1);
    if let Err(error) = worker.runtime.note_artifact(volume, artifact).await {
        tracing::debug!(volume.handle = %volume, error = error_chain(&error), "cannot note the artifact of a volume");
    }
    Ok(artifact)
}

/// Renews the claim on an import until dropped. A lost claim shows when the import completes.
async fn renew(
    worker: &Worker,
    credential: &str,
    provided: &WorkerProvidedPath,
    term: Duration,
) -> Infallible {
    loop {
        tokio::time::sleep(term / 3).await;
        if let Err(error) = worker.clients.store.prepare_import(credential, provided).await {
            tracing::debug!(%error, "cannot renew the claim on an import");
        }
    }
}

/// Reports a failed import to the store. If the report is lost, the volume is collected when the
/// claim expires.
async fn report_failure(worker: &Worker, credential: &str, volume: VolumeHandle, error: &RuntimeError) {
    let mut cause = error_chain(error);
    cause.truncate(cause.floor_char_boundary(MAX_CAUSE_BYTES));
    let cause = cause.replace('\0', " ");
    if let Err(error) = worker.clients.store.fail_import(credential, volume, cause).await {
        tracing::debug!(%error, "cannot report a failed import");
    }
}

#[cfg(test)]
mod tests;
