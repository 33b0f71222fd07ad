//! Gateways for tests, of a worker that is a fake.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use testing::fake::FakeWorker;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::worker::Worker;
use crate::{Config, Gateway};

pub(crate) mod scheduler;
pub(crate) mod served;
pub(crate) mod store;

/// How long is waited for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// How many containers gateways in tests destroy at once.
pub(crate) const DESTROYED_AT_ONCE: usize = 3;
/// An address where nobody listens.
pub(crate) const NOBODY: &str = "http://127.0.0.1:9";

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what} did not come"))
}

/// What was put into `mutex`.
pub(crate) fn noted<T: Clone>(mutex: &Mutex<T>) -> T {
    mutex.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// How gateways attend a fake worker.
pub(crate) trait Attended {
    /// A gateway's view of it, with peers at these addresses.
    fn attended(&self, scheduler: &str, artifact_store: &str) -> Arc<Worker> {
        self.brought_to(scheduler, artifact_store, NOBODY)
    }

    /// The view of a gateway whose operator holds destruction.
    fn holding(&self, scheduler: &str, artifact_store: &str) -> Arc<Worker> {
        self.configured(scheduler, artifact_store, NOBODY, true)
    }

    /// The view of a gateway whose callers have another term.
    fn with_caller_term(&self, term: Duration) -> Arc<Worker> {
        let mut worker = self.attended(NOBODY, NOBODY);
        Arc::get_mut(&mut worker).expect("no other has it").config.caller_term = term;
        worker
    }

    /// The view of a gateway to which a streamer brings inputs.
    fn brought_to(&self, scheduler: &str, artifact_store: &str, streamer: &str) -> Arc<Worker> {
        self.configured(scheduler, artifact_store, streamer, false)
    }

    fn configured(
        &self,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
        hold_destruction: bool,
    ) -> Arc<Worker>;
}

impl Attended for Arc<FakeWorker> {
    fn configured(
        &self,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
        hold_destruction: bool,
    ) -> Arc<Worker> {
        let config = Config {
            worker_name: "test".to_owned(),
            platform: "linux".to_owned(),
            tags: Vec::new(),
            team: None,
            amounts: crate::Amounts::default(),
            ephemeral: false,
            endpoint: NOBODY.to_owned(),
            scheduler: scheduler.to_owned(),
            artifact_store: artifact_store.to_owned(),
            streamer: streamer.to_owned(),
            token: None,
            manifest_dir: self.gateway_directory().join("manifests"),
            report_interval: Duration::from_secs(60),
            destroy_concurrency: DESTROYED_AT_ONCE,
            peer_patience: Config::PEER_PATIENCE,
            caller_term: Config::CALLER_TERM,
            hold_destruction,
        };
        let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
        Worker::new(config, self.runtime(), "boot".to_owned(), tasks, stopping).expect("a worker")
    }
}

/// A gateway that attends these workers.
pub(crate) fn gateway_of(workers: &[Arc<Worker>], scheduler: &str) -> Gateway {
    let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
    Gateway::of(workers.to_vec(), scheduler, None, tasks, stopping).expect("an address")
}
