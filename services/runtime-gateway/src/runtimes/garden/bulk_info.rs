//! Containers that were there before, asked about all at once.
//!
//! Whoever takes a worker on is asked about every process that may run there. A guardian worker says what it knows of many containers in one
//! answer, so it is asked once for each term, when the first process is looked for. A containerd worker does not implement that call, and houdini
//! has no properties in it: there each process is asked about by itself.
//!
//! Invariant: an answer is used once, and by the gateway that asked, so nobody else has changed the container since.

use std::collections::{BTreeMap, HashMap};

use domain::{AttemptId, ContainerHandle};
use runtime::RuntimeError;
use tokio_util::sync::CancellationToken;

use super::containers::Made;
use super::{Backend, Worker, errors};

/// Most containers that are asked about by one call, which names them all.
const AT_ONCE: usize = 100;

/// A container and its properties.
type Container = (ContainerHandle, BTreeMap<String, String>);

/// Containers with a process, by that, which nobody has looked for yet.
#[derive(Default)]
pub(super) struct Found {
    /// Until when this holds. `None`: nobody has asked.
    term: Option<CancellationToken>,
    containers: HashMap<AttemptId, Container>,
}

impl Worker {
    /// The container of a process, as the worker told of it together with others. `None`: it is to be asked about by itself.
    pub(super) async fn found(&self, process: AttemptId) -> Option<Container> {
        if self.backend != Backend::Guardian {
            return None;
        }
        let mut found = self.found.lock().await;
        if found.term.as_ref().is_none_or(CancellationToken::is_cancelled) {
            let term = self.term();
            let containers = self.survey().await.unwrap_or_else(|error| {
                tracing::debug!(error = domain::error_chain(&error), "containers are asked about one by one");
                HashMap::new()
            });
            *found = Found { term: Some(term), containers };
        }
        found.containers.remove(&process)
    }

    /// Forgets what was found of a container that is gone.
    pub(super) async fn forget_found(&self, handle: ContainerHandle) {
        self.found.lock().await.containers.retain(|_, (other, _)| *other != handle);
    }

    async fn survey(&self) -> Result<HashMap<AttemptId, Container>, RuntimeError> {
        let mut containers = HashMap::new();
        for handles in self.list_containers().await?.chunks(AT_ONCE) {
            let names: Vec<_> = handles.iter().map(ToString::to_string).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let told = self.garden.bulk_info(&names).await;
            let mut told = told.map_err(|error| errors::garden("tell about its containers", error))?;
            for handle in handles {
                // One that it does not tell about is asked about by itself.
                let Some(Ok(info)) = told.remove(&handle.to_string()) else { continue };
                let made = Made::read(*handle, &info.properties);
                if let Some(process) = made.and_then(|made| made.process) {
                    containers.insert(process, (*handle, info.properties));
                }
            }
        }
        Ok(containers)
    }
}
