//! One worker, as its gateway knows it: its runtime, the session in which the gateway speaks for it, and the
//! attempts under way.
//!
//! All chapters above share a [`Worker`]. It knows nothing of what they keep.

pub(crate) mod attached_callers;
pub(crate) mod attempts;
pub(crate) mod base_types;
pub(crate) mod heartbeat;
pub(crate) mod session;
pub(crate) mod usage;

use std::collections::BTreeSet;
use std::sync::Arc;

use domain::{AttemptId, ContainerHandle};
use runtime::{Runtime, RuntimeError};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Config;
use crate::clients::Clients;
use attempts::AttemptTable;
use session::SessionState;
use usage::UsageCounter;

/// A worker that this gateway attends.
pub(crate) struct Worker {
    pub(crate) config: Config,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) clients: Clients,
    pub(crate) session: SessionState,
    pub(crate) attempts: AttemptTable,
    /// Containers and volumes on the worker.
    pub(crate) usage: UsageCounter,
    /// Containers that are being destroyed.
    destroying: watch::Sender<BTreeSet<ContainerHandle>>,
    /// Wakes the task that reports: something was destroyed, or found to be damaged.
    pub(crate) report_due: Notify,
    pub(crate) tasks: TaskTracker,
    pub(crate) stopping: CancellationToken,
}

impl Worker {
    /// # Errors
    ///
    /// An address in `config` is malformed.
    pub(crate) fn new(
        config: Config,
        runtime: Arc<dyn Runtime>,
        tasks: TaskTracker,
        stopping: CancellationToken,
    ) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            clients: Clients::new(&config)?,
            session: SessionState::new(),
            attempts: AttemptTable::default(),
            usage: UsageCounter::default(),
            destroying: watch::Sender::default(),
            report_due: Notify::new(),
            config,
            runtime,
            tasks,
            stopping,
        }))
    }

    /// Destroys a container, with all that runs in it.
    pub(crate) async fn destroy_container(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        self.destroying.send_modify(|destroying| _ = destroying.insert(container));
        let _destruction = Destruction { worker: self, container };
        self.runtime.destroy_container(container).await
    }

    /// Whether a process that has ended did so because its container was destroyed.
    pub(crate) async fn was_destroyed(&self, process: AttemptId) -> Result<bool, RuntimeError> {
        let mut destroying = self.destroying.subscribe();
        // A process whose container is destroyed from now on had ended before.
        let under_way = destroying.borrow_and_update().clone();
        // Fails only when the sender is gone, and `self` has it.
        destroying.wait_for(|now| now.is_disjoint(&under_way)).await.ok();
        match self.runtime.process(process).await {
            Ok(_) => Ok(false),
            Err(RuntimeError::ProcessNotFound(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// The destruction of a container, until it has ended, whether or not it succeeded.
struct Destruction<'w> {
    worker: &'w Worker,
    container: ContainerHandle,
}

impl Drop for Destruction<'_> {
    fn drop(&mut self) {
        self.worker.destroying.send_modify(|destroying| _ = destroying.remove(&self.container));
    }
}
