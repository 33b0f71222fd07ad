//! What a worker brings along, images of resource types and certs, becomes artifacts: one after the other, in the background, for as long as
//! the gateway runs.
//!
//! ```text
//! prepare (store) → volume, copied by the worker from where it has it → read back → complete (store)
//! ```
//!
//! The store says what is to be done: nothing, as long as version and path are what they were and the replica is there. So it is asked again and
//! again, and every gateway of the worker may ask: one that starts again, and one that takes over. What fails is tried again after a pause, longer each
//! time, and holds up nothing but attempts that want it ([`Imports::wanted`]), which have it tried at once.
//!
//! Invariant: an import that has begun is carried on to its end, whatever becomes of the session: a runtime that makes a volume is not
//! interrupted. The store refuses what was made in a session that is over.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::{ArtifactId, VolumeHandle, chain};
use rpc::pb::artifacts as pb;
use rpc::{Reason, Refusal};
use runtime::{Brought, BroughtAlong, RuntimeError, VolumeSource};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::attempt::is_superseded;
use crate::util::retry::until_answered;
use crate::worker::Worker;

/// What is brought along is no team's.
const NO_TEAM: &str = "";
/// How long is waited after the first failure, and after many.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How long a reason may be that the artifact store keeps, in bytes.
const LONGEST_WHY: usize = 1000;

/// How far the imports of a worker are.
#[derive(Debug, Default)]
pub(crate) struct Imports {
    standings: watch::Sender<BTreeMap<Brought, Standing>>,
    tries: Mutex<BTreeMap<Brought, Tries>>,
    /// Wakes the importing task.
    wake: Notify,
}

/// How far an import is. One that was not tried yet has none.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Standing {
    Imported(ArtifactId),
    /// The try of this number failed.
    Failed(u64, String),
}

/// How often something was tried.
#[derive(Debug, Clone, Copy, Default)]
struct Tries {
    begun: u64,
    /// Whether somebody waits for another one.
    is_wanted: bool,
}

impl Imports {
    /// What something is that the worker brings along, as soon as it is imported. Where it is not, it is tried at once.
    ///
    /// Errors: why a try failed that began after this call.
    pub(crate) async fn wanted(&self, what: &Brought) -> Result<ArtifactId, String> {
        let mut standings = self.standings.subscribe();
        if let Some(artifact) = self.known(what) {
            return Ok(artifact);
        }
        let begun = self.want(what);
        let is_told = |now: &BTreeMap<Brought, Standing>| match now.get(what) {
            Some(Standing::Imported(_)) => true,
            Some(Standing::Failed(number, _)) => *number > begun,
            None => false,
        };
        let told = standings.wait_for(is_told).await.map(|now| now.get(what).cloned());
        match told {
            Ok(Some(Standing::Imported(artifact))) => Ok(artifact),
            Ok(Some(Standing::Failed(_, why))) => Err(why),
            // The sender lives as long as this.
            Ok(None) | Err(_) => Err("it is not imported".to_owned()),
        }
    }

    /// What something is, if it was imported, without a wait.
    pub(crate) fn known(&self, what: &Brought) -> Option<ArtifactId> {
        match self.standings.borrow().get(what) {
            Some(Standing::Imported(artifact)) => Some(*artifact),
            Some(Standing::Failed(..)) | None => None,
        }
    }

    /// An artifact is not on the worker any more, or not every team's. Answers whether it was imported.
    pub(crate) fn lost(&self, artifact: ArtifactId) -> bool {
        let mut lost = None;
        self.standings.send_if_modified(|standings| {
            lost = standings
                .iter()
                .find_map(|(what, known)| (*known == Standing::Imported(artifact)).then(|| what.clone()));
            lost.as_ref().is_some_and(|what| standings.remove(what).is_some())
        });
        lost.is_some_and(|what| {
            self.want(&what);
            true
        })
    }

    fn tries(&self) -> MutexGuard<'_, BTreeMap<Brought, Tries>> {
        self.tries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a try, and answers how many have begun.
    fn want(&self, what: &Brought) -> u64 {
        let begun = {
            let mut tries = self.tries();
            let tries = tries.entry(what.clone()).or_default();
            tries.is_wanted = true;
            tries.begun
        };
        self.wake.notify_one();
        begun
    }

    fn is_wanted(&self, what: &Brought) -> bool {
        self.tries().get(what).is_some_and(|tries| tries.is_wanted)
    }

    /// A try begins. Answers its number.
    fn begin(&self, what: &Brought) -> u64 {
        let mut tries = self.tries();
        let tries = tries.entry(what.clone()).or_default();
        *tries = Tries { begun: tries.begun + 1, is_wanted: false };
        tries.begun
    }

    fn imported(&self, what: &Brought, artifact: ArtifactId) {
        self.tries().entry(what.clone()).or_default().is_wanted = false;
        self.standings.send_modify(|standings| {
            standings.insert(what.clone(), Standing::Imported(artifact));
        });
    }

    fn failed(&self, what: &Brought, number: u64, why: String) {
        self.standings.send_modify(|standings| {
            standings.insert(what.clone(), Standing::Failed(number, why));
        });
    }
}

/// Something that is brought along, and when it is looked at next.
struct Due {
    brought: BroughtAlong,
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
    /// An answer makes no sense.
    #[error("the artifact store answered a malformed {0}")]
    Malformed(&'static str),
}

impl ImportError {
    /// Whether it says nothing about what is brought along: it is merely tried again.
    fn is_passing(&self) -> bool {
        match self {
            Self::Refused(refusal) => {
                refusal.is_transient() || is_superseded(refusal) || refusal.is(Reason::ClaimLost)
            }
            Self::Worker(_) | Self::Malformed(_) => false,
        }
    }
}

/// Imports what the worker brings along, for as long as the gateway runs.
pub(crate) async fn import_forever(worker: Arc<Worker>) {
    let now = Instant::now();
    let brought = worker.runtime.capabilities().brought.iter().cloned();
    let mut due: Vec<_> = brought.map(|brought| Due { brought, at: now, pause: FIRST_PAUSE }).collect();
    if due.is_empty() {
        return;
    }
    let mut session = None;
    loop {
        let open = tokio::select! {
            open = worker.wait_for_session() => open,
            () = worker.stopping.cancelled() => return,
        };
        // What another gateway did meanwhile, and what a new life of the worker lost, the store knows.
        if session.replace(open.session) != Some(open.session) {
            due.iter_mut().for_each(|due| due.at = Instant::now());
        }
        let is_wanted = |due: &&mut Due| worker.imports.is_wanted(&due.brought.what);
        let next = due.iter_mut().find(is_wanted);
        let Some(next) = (match next {
            Some(next) => Some(next),
            None => due.iter_mut().min_by_key(|due| due.at),
        }) else {
            return;
        };
        if !worker.imports.is_wanted(&next.brought.what) && next.at > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(next.at) => {}
                () = worker.imports.wake.notified() => {}
                () = worker.session_changed(&open) => {}
                () = worker.stopping.cancelled() => return,
            }
            continue;
        }
        tokio::select! {
            () = look(&worker, next) => {}
            () = worker.stopping.cancelled() => return,
        }
    }
}

/// Has one thing imported, if it is not, and says when it is looked at again.
async fn look(worker: &Worker, due: &mut Due) {
    let what = &due.brought.what;
    let number = worker.imports.begin(what);
    let outcome = match import(worker, &due.brought).await {
        Ok(artifact) => {
            worker.imports.imported(what, artifact);
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
            error = chain(&outcome),
            "cannot import just now what the worker brings along"
        );
        // Who wants it goes on waiting.
        return;
    }
    metrics::counter!("gantry_gateway_imports_total", "outcome" => "failed").increment(1);
    tracing::warn!(
        worker.name = worker.config.worker_name,
        ?what,
        path = due.brought.path,
        error = chain(&outcome),
        again_in = ?due.pause,
        "cannot import what the worker brings along"
    );
    due.pause = LONGEST_PAUSE.min(due.pause * 2);
    worker.imports.failed(what, number, chain(&outcome));
}

/// Imports one thing, unless it is imported, and answers what it is.
async fn import(worker: &Worker, brought: &BroughtAlong) -> Result<ArtifactId, ImportError> {
    let session = worker.wait_for_session().await;
    let request = pb::PrepareImportRequest {
        session_credential: session.credential,
        brought: Some(pb::Brought {
            resource_type: match &brought.what {
                Brought::ResourceType(name) => name.clone(),
                Brought::Certs => String::new(),
            },
            version: brought.version.clone(),
            path: brought.path.clone(),
        }),
    };
    let prepared = worker.inventory.clone().prepare_import(request.clone()).await;
    let prepared = prepared.map_err(Refusal::from)?.into_inner();
    let artifact = prepared.artifact_id.parse().map_err(|_| ImportError::Malformed("artifact"))?;
    let volume = prepared.volume_handle.parse().map_err(|_| ImportError::Malformed("volume handle"))?;
    let Some(term) =
        rpc::parse_duration("term", prepared.term).map_err(|_| ImportError::Malformed("term"))?
    else {
        return Ok(artifact);
    };
    tracing::info!(
        worker.name = worker.config.worker_name,
        what = ?brought.what,
        version = brought.version,
        path = brought.path,
        "importing what the worker brings along"
    );
    let filling = async {
        let source = VolumeSource::Brought(brought.what.clone());
        worker.runtime.create_volume(volume, source).await?;
        worker.trees.scan(&*worker.runtime, volume, NO_TEAM).await
    };
    let filled = tokio::select! {
        filled = filling => filled,
        never = renew(worker, &request, term) => match never {},
    };
    let manifest = match filled {
        Ok(manifest) => manifest,
        Err(error) => {
            tell_failure(worker, &request.session_credential, volume, &error).await;
            return Err(error.into());
        }
    };
    let complete = pb::CompleteImportRequest {
        session_credential: request.session_credential,
        volume_handle: volume.to_string(),
        size_bytes: manifest.size_bytes(),
        digest: manifest.tree_digest().as_bytes().to_vec().into(),
    };
    let call = || {
        let (mut inventory, complete) = (worker.inventory.clone(), complete.clone());
        async move { inventory.complete_import(complete).await }
    };
    until_answered("say that something is imported", call).await?;
    metrics::counter!("gantry_gateway_imports_total", "outcome" => "imported").increment(1);
    if let Err(error) = worker.runtime.note_artifact(volume, artifact).await {
        tracing::debug!(volume.handle = %volume, error = chain(&error), "cannot note whose a volume is");
    }
    Ok(artifact)
}

/// Says again and again that an import goes on. That it lost its claim it hears when it ends.
async fn renew(worker: &Worker, request: &pb::PrepareImportRequest, term: Duration) -> Infallible {
    loop {
        tokio::time::sleep(term / 3).await;
        if let Err(error) = worker.inventory.clone().prepare_import(request.clone()).await {
            tracing::debug!(%error, "cannot say just now that an import goes on");
        }
    }
}

/// Tells the store that something could not be imported, and why. If that is not heard, the volume goes with its claim.
async fn tell_failure(worker: &Worker, credential: &str, volume: VolumeHandle, error: &RuntimeError) {
    let mut why = chain(error);
    why.truncate(why.floor_char_boundary(LONGEST_WHY));
    let request = pb::FailImportRequest {
        session_credential: credential.to_owned(),
        volume_handle: volume.to_string(),
        why: why.replace('\0', " "),
    };
    if let Err(error) = worker.inventory.clone().fail_import(request).await {
        tracing::debug!(%error, "cannot tell that an import failed");
    }
}

#[cfg(test)]
mod tests;
