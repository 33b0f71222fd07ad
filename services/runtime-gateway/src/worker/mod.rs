//! One worker: its runtime, its session, and its attempts.
//!
//! The modules above this one share a [`Worker`]. It does not know their state.

pub(crate) mod attached_callers;
pub(crate) mod attempts;
pub(crate) mod base_types;
pub(crate) mod containers;
pub(crate) mod heartbeat;
pub(crate) mod session;
pub(crate) mod usage;

use std::collections::BTreeSet;
use std::sync::Arc;

use domain::{ContainerHandle, ProcessId};
use runtime::{Runtime, RuntimeError};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Config;
use crate::clients::Clients;
use attempts::AttemptTable;
use containers::{ContainerIndex, KnownContainer};
use session::SessionState;
use usage::UsageCounter;

/// A worker that this gateway attends.
pub(crate) struct Worker {
    pub(crate) config: Config,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) clients: Clients,
    pub(crate) session: SessionState,
    pub(crate) attempts: AttemptTable,
    pub(crate) index: ContainerIndex,
    /// Number of containers and volumes on the worker.
    pub(crate) usage: UsageCounter,
    /// Containers whose destruction has begun.
    destroying: watch::Sender<BTreeSet<ContainerHandle>>,
    /// Wakes the report loop after a destruction, or when a volume is found to be damaged.
    pub(crate) report_due: Notify,
    pub(crate) tasks: TaskTracker,
    pub(crate) stopping: CancellationToken,
}

impl Worker {
    /// Creates the worker, and the clients for the addresses in `config`.
    ///
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
            index: ContainerIndex::default(),
            usage: UsageCounter::default(),
            destroying: watch::Sender::default(),
            report_due: Notify::new(),
            config,
            runtime,
            tasks,
            stopping,
        }))
    }

    /// Destroys a container with all of its processes.
    pub(crate) async fn destroy_container(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        self.destroying.send_modify(|destroying| _ = destroying.insert(container));
        let _destruction = Destruction { worker: self, container };
        self.runtime.destroy_container(container).await?;
        self.index.remove(container).await;
        Ok(())
    }

    /// Returns the containers that `select` selects, ordered by id.
    pub(crate) async fn containers(
        &self,
        select: impl Fn(&KnownContainer) -> bool,
    ) -> Result<Vec<KnownContainer>, RuntimeError> {
        self.index.select(self.runtime.as_ref(), &self.session, select).await
    }

    /// Whether a process ended because its container was destroyed.
    pub(crate) async fn was_destroyed(&self, process: ProcessId) -> Result<bool, RuntimeError> {
        let mut destroying = self.destroying.subscribe();
        // A destruction that begins later cannot be the cause.
        let under_way = destroying.borrow_and_update().clone();
        // Cannot fail, because `self` owns the sender.
        destroying.wait_for(|now| now.is_disjoint(&under_way)).await.ok();
        match self.runtime.process(process).await {
            Ok(_) => Ok(false),
            Err(RuntimeError::ProcessNotFound(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// The destruction of a container until it succeeds or fails.
struct Destruction<'w> {
    worker: &'w Worker,
    container: ContainerHandle,
}

impl Drop for Destruction<'_> {
    fn drop(&mut self) {
        self.worker.destroying.send_modify(|destroying| _ = destroying.remove(&self.container));
    }
}
