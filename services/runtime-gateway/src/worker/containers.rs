//! The containers of a worker, with the facts that a gateway stores with them.
//!
//! Callers name a container by the id of the attempt that it was made for. The index finds it by
//! this id, also after a restart of the gateway.

use std::collections::BTreeMap;

use domain::{AttemptId, ContainerHandle, error_chain};
use futures::{StreamExt, TryStreamExt};
use runtime::{ContainerDescription, Runtime, RuntimeError};
use tokio::sync::Mutex;

use super::session::{OpenSession, SessionState};
use crate::clients::scheduler_messages::AttemptTask;
use crate::runtimes::container_note::ContainerNote;

/// Number of containers that are described at a time.
pub(crate) const CONCURRENT_DESCRIPTIONS: usize = 16;

/// A container of this worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownContainer {
    pub(crate) handle: ContainerHandle,
    pub(crate) team: String,
    pub(crate) note: ContainerNote,
}

impl KnownContainer {
    /// Creates the entry for the container of an attempt.
    pub(crate) fn of(task: &AttemptTask, handle: ContainerHandle) -> Self {
        let note = ContainerNote {
            lease: task.lease,
            container: task.attempt,
            driven: task.driven.clone(),
            service: task.service,
        };
        Self { handle, team: task.spec.team.clone(), note }
    }

    /// The text that the worker stores with the container.
    pub(crate) fn note_text(&self) -> String {
        // Cannot fail, because the keys of all maps are texts.
        serde_json::to_string(&self.note).unwrap_or_default()
    }
}

/// The containers of one worker, by id. It is loaded once per session.
#[derive(Default)]
pub(crate) struct ContainerIndex(Mutex<Loaded>);

#[derive(Default)]
struct Loaded {
    /// The session in which the entries are valid. `None`: they were never loaded.
    session: Option<OpenSession>,
    entries: BTreeMap<AttemptId, KnownContainer>,
}

impl ContainerIndex {
    /// Adds a container that was created.
    pub(crate) async fn add(&self, container: KnownContainer) {
        self.0.lock().await.entries.insert(container.note.container, container);
    }

    /// Removes a container that is destroyed.
    pub(crate) async fn remove(&self, handle: ContainerHandle) {
        self.0.lock().await.entries.retain(|_, container| container.handle != handle);
    }

    /// Returns the containers that `select` selects, ordered by id.
    pub(crate) async fn select(
        &self,
        runtime: &dyn Runtime,
        session: &SessionState,
        select: impl Fn(&KnownContainer) -> bool,
    ) -> Result<Vec<KnownContainer>, RuntimeError> {
        let mut loaded = self.0.lock().await;
        let now = session.current();
        if now.is_some() && loaded.session != now {
            loaded.entries = load(runtime).await?;
            loaded.session = now;
        }
        Ok(loaded.entries.values().filter(|container| select(container)).cloned().collect())
    }
}

/// Lists the containers on the worker. Those without a note are of an older version.
async fn load(runtime: &dyn Runtime) -> Result<BTreeMap<AttemptId, KnownContainer>, RuntimeError> {
    let describe = async |handle: ContainerHandle| match runtime.describe_container(handle).await {
        Ok(ContainerDescription { note, .. }) if note.is_empty() => Ok(None),
        Ok(ContainerDescription { team, note, .. }) => match serde_json::from_str(&note) {
            Ok(note) => Ok(Some(KnownContainer { handle, team, note })),
            Err(error) => {
                tracing::warn!(container.handle = %handle, error = error_chain(&error), "cannot read the note of a container");
                Ok(None)
            }
        },
        // It is incomplete, or was destroyed meanwhile.
        Err(RuntimeError::ContainerNotFound(_)) => Ok(None),
        // Its record is damaged, so its processes cannot be found either.
        Err(RuntimeError::Other(error)) => {
            tracing::warn!(container.handle = %handle, error, "cannot describe a container");
            Ok(None)
        }
        Err(error) => Err(error),
    };
    let handles = runtime.list().await?.containers;
    futures::stream::iter(handles.into_iter().map(describe))
        .buffer_unordered(CONCURRENT_DESCRIPTIONS)
        .try_filter_map(|found: Option<KnownContainer>| async { Ok(found) })
        .try_fold(BTreeMap::new(), async |mut entries: BTreeMap<_, KnownContainer>, container| {
            // A container that was made again has a later handle than its garbage.
            let is_later = |other: &KnownContainer| other.handle < container.handle;
            if entries.get(&container.note.container).is_none_or(is_later) {
                entries.insert(container.note.container, container);
            }
            Ok(entries)
        })
        .await
}
