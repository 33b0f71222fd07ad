//! The state of the imports of a worker: images of resource types, and certificates.
//!
//! Attempts wait here for the imports that they need. The import loop
//! ([`crate::sync::base_type_import`]) runs the imports.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use domain::ArtifactId;
use runtime::WorkerProvided;
use tokio::sync::{Notify, watch};

use crate::util::keyed_locks::lock;

/// The states of all imports of a worker.
#[derive(Debug, Default)]
pub(crate) struct BaseTypeImports {
    states: watch::Sender<BTreeMap<WorkerProvided, ImportState>>,
    tries: Mutex<BTreeMap<WorkerProvided, ImportTries>>,
    /// Wakes the import loop.
    pub(crate) wake: Notify,
}

/// The outcome of an import. An import that was not tried has none.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ImportState {
    Imported(ArtifactId),
    /// The try of this number failed, with its cause.
    Failed(u64, String),
}

/// The tries of one import.
#[derive(Debug, Clone, Copy, Default)]
struct ImportTries {
    begun: u64,
    /// Whether an attempt waits for another try.
    is_requested: bool,
}

impl BaseTypeImports {
    /// Waits until `base_type` is imported, and returns its artifact. If it is not imported, a try
    /// starts at once.
    ///
    /// Errors: the cause of a failed try that began after this call.
    pub(crate) async fn wait_until_imported(&self, base_type: &WorkerProvided) -> Result<ArtifactId, String> {
        let mut states = self.states.subscribe();
        if let Some(artifact) = self.artifact_of(base_type) {
            return Ok(artifact);
        }
        let begun = self.request_try(base_type);
        let has_outcome = |now: &BTreeMap<WorkerProvided, ImportState>| match now.get(base_type) {
            Some(ImportState::Imported(_)) => true,
            Some(ImportState::Failed(number, _)) => *number > begun,
            None => false,
        };
        let outcome = states.wait_for(has_outcome).await.map(|now| now.get(base_type).cloned());
        match outcome {
            Ok(Some(ImportState::Imported(artifact))) => Ok(artifact),
            Ok(Some(ImportState::Failed(_, why))) => Err(why),
            // Cannot fail, because `self` owns the sender.
            Ok(None) | Err(_) => Err("cannot import a base resource type: it was not tried".to_owned()),
        }
    }

    /// Returns the artifact of `base_type`, if it is imported.
    pub(crate) fn artifact_of(&self, base_type: &WorkerProvided) -> Option<ArtifactId> {
        match self.states.borrow().get(base_type) {
            Some(ImportState::Imported(artifact)) => Some(*artifact),
            Some(ImportState::Failed(..)) | None => None,
        }
    }

    /// Forgets an artifact that is no longer usable on the worker, and requests a new import.
    /// Returns whether it was an import.
    pub(crate) fn forget(&self, artifact: ArtifactId) -> bool {
        let mut removed = None;
        self.states.send_if_modified(|states| {
            removed = states.iter().find_map(|(base_type, state)| {
                (*state == ImportState::Imported(artifact)).then(|| base_type.clone())
            });
            removed.as_ref().is_some_and(|base_type| states.remove(base_type).is_some())
        });
        removed.is_some_and(|base_type| {
            self.request_try(&base_type);
            true
        })
    }

    fn tries(&self) -> MutexGuard<'_, BTreeMap<WorkerProvided, ImportTries>> {
        lock(&self.tries)
    }

    /// Requests a try, and returns the number of tries that have begun.
    fn request_try(&self, base_type: &WorkerProvided) -> u64 {
        let begun = {
            let mut tries = self.tries();
            let tries = tries.entry(base_type.clone()).or_default();
            tries.is_requested = true;
            tries.begun
        };
        self.wake.notify_one();
        begun
    }

    pub(crate) fn is_requested(&self, base_type: &WorkerProvided) -> bool {
        self.tries().get(base_type).is_some_and(|tries| tries.is_requested)
    }

    /// Begins a try, and returns its number.
    pub(crate) fn begin_try(&self, base_type: &WorkerProvided) -> u64 {
        let mut tries = self.tries();
        let tries = tries.entry(base_type.clone()).or_default();
        *tries = ImportTries { begun: tries.begun + 1, is_requested: false };
        tries.begun
    }

    pub(crate) fn set_imported(&self, base_type: &WorkerProvided, artifact: ArtifactId) {
        self.tries().entry(base_type.clone()).or_default().is_requested = false;
        self.states.send_modify(|states| {
            states.insert(base_type.clone(), ImportState::Imported(artifact));
        });
    }

    pub(crate) fn set_failed(&self, base_type: &WorkerProvided, number: u64, why: String) {
        self.states.send_modify(|states| {
            states.insert(base_type.clone(), ImportState::Failed(number, why));
        });
    }
}
