//! The import of base types: images of resource types and certificates that a worker has become artifacts.
//!
//! ```text
//! prepare (store) → volume, copied by the worker from where it has it → read back → complete (store)
//! ```
//!
//! The loop runs in the background for as long as the gateway does, and imports one base type after the other.
//! The store decides what is to be done: nothing, if version and path are as before and the replica is there.
//! So each gateway of the worker may ask again and again. A failed import is tried again after a pause that
//! grows. It holds up only attempts that need it ([`BaseTypeImports::wanted`]), which have it tried at once.
//!
//! Invariant: an import that has begun is carried on to its end in any session, because a runtime that makes a
//! volume is not interrupted. The store refuses a volume that was made in a session that has ended.

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

/// What is brought along is no team's.
const NO_TEAM: &str = "";
/// How long is waited after the first failure, and after many.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How long a reason may be that the artifact store keeps, in bytes.
const LONGEST_WHY: usize = 1000;

/// Something that is brought along, and when it is looked at next.
struct ScheduledImport {
    provided: WorkerProvidedPath,
    at: Instant,
    /// How long is waited after the next failure.
    pause: Duration,
}

/// Why something is not imported.
#[derive(Debug, thiserror::Error)]
enum ImportError {
    /// The worker could not copy it, or it cannot be read.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The store said no, or says nothing just now.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl ImportError {
    /// Whether it says nothing about what is brought along: it is merely tried again.
    fn is_passing(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                refusal.is_transient() || is_superseded(refusal) || refusal.is(Reason::ClaimLost)
            }
            Self::Worker(_) => false,
        }
    }
}

/// Imports what the worker brings along, for as long as the gateway runs.
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
        // What another gateway did meanwhile, and what a new life of the worker lost, the store knows.
        if session.replace(open.session) != Some(open.session) {
            due.iter_mut().for_each(|due| due.at = Instant::now());
        }
        let is_wanted = |due: &&mut ScheduledImport| imports.is_wanted(&due.provided.what);
        let next = due.iter_mut().find(is_wanted);
        let Some(next) = (match next {
            Some(next) => Some(next),
            None => due.iter_mut().min_by_key(|due| due.at),
        }) else {
            return;
        };
        if !imports.is_wanted(&next.provided.what) && next.at > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(next.at) => {}
                () = imports.wake.notified() => {}
                () = worker.session.changed(&open) => {}
                () = worker.stopping.cancelled() => return,
            }
            continue;
        }
        tokio::select! {
            () = look(&transfers, &imports, next) => {}
            () = worker.stopping.cancelled() => return,
        }
    }
}

/// Has one thing imported, if it is not, and says when it is looked at again.
async fn look(transfers: &Transfers, imports: &BaseTypeImports, due: &mut ScheduledImport) {
    let worker = &transfers.worker;
    let what = &due.provided.what;
    let number = imports.begin(what);
    let outcome = match import(transfers, &due.provided).await {
        Ok(artifact) => {
            imports.imported(what, artifact);
            due.pause = FIRST_PAUSE;
            due.at = Instant::now() + worker.config.report_interval;
            return;
        }
        Err(error) => error,
    };
    due.at = Instant::now() + due.pause;
    if outcome.is_passing() {
        tracing::debug!(
            ?what,
            error = error_chain(&outcome),
            "cannot import just now what the worker brings along"
        );
        // Who wants it goes on waiting.
        return;
    }
    metrics::counter!("gantry_gateway_imports_total", "outcome" => "failed").increment(1);
    tracing::warn!(
        worker.name = worker.config.worker_name,
        ?what,
        path = due.provided.path,
        error = error_chain(&outcome),
        again_in = ?due.pause,
        "cannot import what the worker brings along"
    );
    due.pause = LONGEST_PAUSE.min(due.pause * 2);
    imports.failed(what, number, error_chain(&outcome));
}

/// Imports one thing, unless it is imported, and answers what it is.
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
        what = ?provided.what,
        version = provided.version,
        path = provided.path,
        "importing what the worker brings along"
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
    until_answered("say that something is imported", call).await?;
    metrics::counter!("gantry_gateway_imports_total", "outcome" => "imported").increment(1);
    if let Err(error) = worker.runtime.note_artifact(volume, artifact).await {
        tracing::debug!(volume.handle = %volume, error = error_chain(&error), "cannot note whose a volume is");
    }
    Ok(artifact)
}

/// Says again and again that an import goes on. That it lost its claim it hears when it ends.
async fn renew(
    worker: &Worker,
    credential: &str,
    provided: &WorkerProvidedPath,
    term: Duration,
) -> Infallible {
    loop {
        tokio::time::sleep(term / 3).await;
        if let Err(error) = worker.clients.store.prepare_import(credential, provided).await {
            tracing::debug!(%error, "cannot say just now that an import goes on");
        }
    }
}

/// Tells the store that something could not be imported, and why. If that is not heard, the volume goes with its claim.
async fn report_failure(worker: &Worker, credential: &str, volume: VolumeHandle, error: &RuntimeError) {
    let mut why = error_chain(error);
    why.truncate(why.floor_char_boundary(LONGEST_WHY));
    let why = why.replace('\0', " ");
    if let Err(error) = worker.clients.store.fail_import(credential, volume, why).await {
        tracing::debug!(%error, "cannot tell that an import failed");
    }
}

#[cfg(test)]
mod tests;
