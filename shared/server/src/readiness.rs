//! Readiness of a process, with the reasons if it is not ready.
//!
//! ```text
//! starting ──started, every check succeeds──▶ ready ⇄ not ready (a check fails)
//!     └───────────────shutdown───────────────────────┴──▶ draining
//! ```
//!
//! `grpc.health.v1` reports the readiness of the process (``) and of each of its services.
//! `/readyz` reports it over HTTP.
//!
//! Liveness is separate: the health service `liveness` is serving from the start of the process to
//! its end. An orchestrator must not restart a process because of a failure that a restart does not
//! fix.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::set_status;

/// The name of the health service that reports that the process is alive.
pub const LIVENESS: &str = "liveness";

/// Maximum interval of checks while the process is not ready.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Time after which a check counts as failed.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3);

type CheckFuture = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;
type Check = Arc<dyn Fn() -> CheckFuture + Send + Sync>;

/// The checks of a process and its current state. Cheap to clone; all clones share the state.
#[derive(Clone)]
pub(crate) struct Readiness {
    checks: Arc<Mutex<Vec<(&'static str, Check)>>>,
    state: Arc<watch::Sender<State>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Starting,
    Started(Vec<String>),
    Draining,
}

impl Readiness {
    pub(crate) fn new() -> Self {
        Self { checks: Arc::default(), state: Arc::new(watch::Sender::new(State::Starting)) }
    }

    pub(crate) fn add<F>(&self, name: &'static str, check: impl Fn() -> F + Send + Sync + 'static)
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let check: Check = Arc::new(move || Box::pin(check()));
        self.checks.lock().unwrap_or_else(PoisonError::into_inner).push((name, check));
    }

    /// Returns the reasons why the process is not ready, one line each. Returns nothing if it is
    /// ready.
    pub(crate) fn not_ready_reasons(&self) -> Vec<String> {
        match &*self.state.borrow() {
            State::Starting => vec!["the process is starting".to_owned()],
            State::Started(failed) => failed.clone(),
            State::Draining => vec!["the process is shutting down".to_owned()],
        }
    }

    pub(crate) fn drain(&self) {
        metrics::gauge!("gantry_ready").set(0.0);
        self.state.send_replace(State::Draining);
    }

    /// Runs all checks once. A draining process stays draining.
    async fn check(&self) {
        let checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let checking = checks.into_iter().map(|(name, check)| async move {
            let result = tokio::time::timeout(CHECK_TIMEOUT, check()).await;
            let result = result.unwrap_or_else(|_| Err("the check timed out".to_owned()));
            metrics::gauge!("gantry_check", "check" => name).set(if result.is_ok() { 1.0 } else { 0.0 });
            result.err().map(|reason| format!("{name}: {reason}"))
        });
        let failed: Vec<_> = join_all(checking).await.into_iter().flatten().collect();
        self.state.send_if_modified(|state| {
            let checked = State::Started(failed);
            if *state == State::Draining || *state == checked {
                return false;
            }
            match &checked {
                State::Started(failed) if !failed.is_empty() => {
                    tracing::warn!(reasons = failed.join("; "), "the process is not ready");
                }
                _ => tracing::info!("the process is ready"),
            }
            *state = checked;
            true
        });
    }

    /// Runs all checks at an interval of `every`, until `stopping` is cancelled.
    pub(crate) async fn run_checks(self, every: Duration, stopping: CancellationToken) {
        let checking = async {
            loop {
                self.check().await;
                let ready = self.not_ready_reasons().is_empty();
                tokio::time::sleep(if ready { every } else { every.min(RETRY_INTERVAL) }).await;
            }
        };
        tokio::select! {
            () = checking => {}
            () = stopping.cancelled() => {}
        }
    }

    /// Reports every change as the health status of the process and its `services`.
    pub(crate) async fn report_changes(self, health: HealthReporter, services: Vec<&'static str>) {
        let mut state = self.state.subscribe();
        loop {
            let ready = *state.borrow_and_update() == State::Started(Vec::new());
            let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
            metrics::gauge!("gantry_ready").set(if ready { 1.0 } else { 0.0 });
            set_status(&health, &services, status).await;
            if state.changed().await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn draining_process_is_never_ready_again() {
        let readiness = Readiness::new();
        let available = Arc::new(AtomicBool::new(false));
        let checked = available.clone();
        readiness.add("database", move || {
            let available = checked.load(Ordering::Relaxed);
            async move { if available { Ok(()) } else { Err("unavailable".to_owned()) } }
        });
        readiness.add("disk", || async { Ok(()) });
        assert_eq!(readiness.not_ready_reasons(), ["the process is starting"]);
        readiness.check().await;
        assert_eq!(readiness.not_ready_reasons(), ["database: unavailable"]);
        available.store(true, Ordering::Relaxed);
        readiness.check().await;
        assert!(readiness.not_ready_reasons().is_empty());
        readiness.drain();
        readiness.check().await;
        assert_eq!(readiness.not_ready_reasons(), ["the process is shutting down"]);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_check_is_repeated_soon() {
        let readiness = Readiness::new();
        let tries = Arc::new(AtomicUsize::new(0));
        let counter = tries.clone();
        readiness.add("database", move || {
            let ready = counter.fetch_add(1, Ordering::Relaxed) >= 2;
            async move { if ready { Ok(()) } else { Err("unavailable".to_owned()) } }
        });
        let hour = Duration::from_secs(3600);
        let checking = readiness.clone().run_checks(hour, CancellationToken::new());
        assert!(tokio::time::timeout(hour / 2, checking).await.is_err(), "the checks do not end");
        assert!(readiness.not_ready_reasons().is_empty());
        assert_eq!(tries.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn pending_check_fails_after_timeout() {
        let readiness = Readiness::new();
        readiness.add("database", std::future::pending);
        readiness.check().await;
        assert_eq!(readiness.not_ready_reasons(), ["database: the check timed out"]);
    }
}
