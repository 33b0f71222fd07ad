//! Gateways of fake workers, for unit tests.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use runtime::Runtime;
use testing::fake::FakeWorker;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attempt::context::AttemptContext;
use crate::transfer::Transfers;
use crate::worker::Worker;
use crate::worker::attached_callers::Attendance;
use crate::worker::base_types::BaseTypeImports;
use crate::worker_set::AttendedWorker;
use crate::{Config, Intervals, WorkerSet};

pub(crate) mod scheduler;
pub(crate) mod served;
pub(crate) mod store;

/// Longest wait for an expected event.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Most containers that a gateway destroys at a time in tests.
pub(crate) const DESTROYED_AT_ONCE: usize = 3;
/// Intervals of tests: short pauses, and timeouts that never pass.
pub(crate) const INTERVALS: Intervals = Intervals {
    peer_transfer: Duration::from_secs(15 * 60),
    peer_quiet: Duration::from_millis(100),
    clear_retry: Duration::from_millis(20),
    caller_term: Duration::from_secs(5 * 60),
    touch: Duration::from_millis(10),
};
/// An address without a listener.
pub(crate) const UNREACHABLE: &str = "http://127.0.0.1:9";

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.unwrap_or_else(|_| panic!("{what} did not come"))
}

/// Returns a copy of the value in `mutex`.
pub(crate) fn read_lock<T: Clone>(mutex: &Mutex<T>) -> T {
    mutex.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// A fake worker that a gateway attends, with its features.
#[derive(Clone)]
pub(crate) struct TestWorker {
    pub(crate) worker: Arc<Worker>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) attendance: Arc<Attendance>,
    pub(crate) imports: Arc<BaseTypeImports>,
    pub(crate) context: Arc<AttemptContext>,
    attended: Arc<AttendedWorker>,
}

impl TestWorker {
    pub(crate) fn new(config: Config, runtime: Arc<dyn Runtime>) -> Self {
        let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
        let worker = Worker::new(config, runtime, tasks, stopping).expect("a worker");
        let attended = AttendedWorker::open(worker, "boot".to_owned()).expect("a directory");
        Self {
            worker: attended.worker.clone(),
            transfers: attended.transfers.clone(),
            attendance: attended.attendance.clone(),
            imports: attended.imports.clone(),
            context: attended.attempts.clone(),
            attended,
        }
    }
}

impl Deref for TestWorker {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        &self.worker
    }
}

/// Creates gateways of a fake worker.
pub(crate) trait FakeGateways {
    /// Returns a gateway of the worker, with services at these addresses.
    fn gateway(&self, scheduler: &str, artifact_store: &str) -> TestWorker {
        self.with_streamer(scheduler, artifact_store, UNREACHABLE)
    }

    /// Returns a gateway whose operator holds destruction.
    fn gateway_holding_destruction(&self, scheduler: &str, artifact_store: &str) -> TestWorker {
        self.configured(scheduler, artifact_store, UNREACHABLE, true)
    }

    /// Returns a gateway with another term of callers.
    fn with_caller_term(&self, term: Duration) -> TestWorker {
        TestWorker::new(
            Config {
                intervals: Intervals { caller_term: term, ..INTERVALS },
                ..self.config(UNREACHABLE, UNREACHABLE, UNREACHABLE, false)
            },
            self.machine().runtime(),
        )
    }

    /// Returns a gateway with a streamer that copies inputs.
    fn with_streamer(&self, scheduler: &str, artifact_store: &str, streamer: &str) -> TestWorker {
        self.configured(scheduler, artifact_store, streamer, false)
    }

    fn configured(
        &self,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
        hold_destruction: bool,
    ) -> TestWorker {
        TestWorker::new(
            self.config(scheduler, artifact_store, streamer, hold_destruction),
            self.machine().runtime(),
        )
    }

    fn machine(&self) -> &Arc<FakeWorker>;

    fn config(&self, scheduler: &str, artifact_store: &str, streamer: &str, hold_destruction: bool)
    -> Config;
}

impl FakeGateways for Arc<FakeWorker> {
    fn machine(&self) -> &Arc<FakeWorker> {
        self
    }

    fn config(
        &self,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
        hold_destruction: bool,
    ) -> Config {
        Config {
            worker_name: "test".to_owned(),
            platform: "linux".to_owned(),
            tags: Vec::new(),
            team: None,
            amounts: crate::Amounts::default(),
            zone: String::new(),
            ephemeral: false,
            endpoint: UNREACHABLE.to_owned(),
            scheduler: scheduler.to_owned(),
            artifact_store: artifact_store.to_owned(),
            streamer: streamer.to_owned(),
            token: None,
            manifest_dir: self.gateway_directory().join("manifests"),
            report_interval: Duration::from_secs(60),
            scrub_bytes_per_second: 0,
            destroy_concurrency: DESTROYED_AT_ONCE,
            intervals: INTERVALS,
            hold_destruction,
        }
    }
}

/// Creates a gateway that attends these workers.
pub(crate) fn gateway_of(workers: &[TestWorker], scheduler: &str) -> WorkerSet {
    let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
    let workers = workers.iter().map(|worker| worker.attended.clone()).collect();
    WorkerSet::new(workers, scheduler, None, tasks, stopping).expect("an address")
}
