//! Whether a process may be sent calls, and why not.
//!
//! ```text
//! starting ──started, every check succeeds──▶ ready ⇄ not ready (a check fails)
//!     └───────────────told to stop───────────────────┴──▶ draining
//! ```
//!
//! `grpc.health.v1` tells it for the process (``) and for each of its services, and `/readyz` over HTTP. That a process is alive is
//! another question: `liveness` is serving from the first to the last moment, whatever else is missing, so that nobody restarts a
//! process for what a restart does not mend.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::set_status;

/// The name under which `grpc.health.v1` tells that the process is alive.
pub const LIVENESS: &str = "liveness";

/// How soon is looked again at what is not ready, at the latest.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// A check that takes longer has failed.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3);

type CheckFuture = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;
type Check = Arc<dyn Fn() -> CheckFuture + Send + Sync>;

/// Shared by who checks, who tells, and who is asked. Cheap to clone.
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

    /// Why calls should not be sent, a line for each reason. None: they may.
    pub(crate) fn not_ready_reasons(&self) -> Vec<String> {
        match &*self.state.borrow() {
            State::Starting => vec!["it is starting".to_owned()],
            State::Started(failed) => failed.clone(),
            State::Draining => vec!["it is ending".to_owned()],
        }
    }

    pub(crate) fn drain(&self) {
        metrics::gauge!("gantry_ready").set(0.0);
        self.state.send_replace(State::Draining);
    }

    /// Checks once. What was told to stop stays so.
    async fn check(&self) {
        let checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let checking = checks.into_iter().map(|(name, check)| async move {
            let answer = tokio::time::timeout(CHECK_TIMEOUT, check()).await;
            let answer = answer.unwrap_or_else(|_| Err("no answer in time".to_owned()));
            metrics::gauge!("gantry_check", "check" => name).set(if answer.is_ok() { 1.0 } else { 0.0 });
            answer.err().map(|why| format!("{name}: {why}"))
        });
        let failed: Vec<_> = join_all(checking).await.into_iter().flatten().collect();
        self.state.send_if_modified(|state| {
            let checked = State::Started(failed);
            if *state == State::Draining || *state == checked {
                return false;
            }
            match &checked {
                State::Started(failed) if !failed.is_empty() => {
                    tracing::warn!(why = failed.join("; "), "not ready");
                }
                _ => tracing::info!("ready"),
            }
            *state = checked;
            true
        });
    }

    /// Checks from now on, until the process is told to stop.
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

    /// Tells every change to whoever asks or watches, for the process and its `services`.
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
    async fn it_is_ready_when_every_check_succeeds_and_never_again_once_it_drains() {
        let readiness = Readiness::new();
        let answers = Arc::new(AtomicBool::new(false));
        let asked = answers.clone();
        readiness.add("database", move || {
            let answers = asked.load(Ordering::Relaxed);
            async move { if answers { Ok(()) } else { Err("it does not answer".to_owned()) } }
        });
        readiness.add("disk", || async { Ok(()) });
        assert_eq!(readiness.not_ready_reasons(), ["it is starting"]);
        readiness.check().await;
        assert_eq!(readiness.not_ready_reasons(), ["database: it does not answer"]);
        answers.store(true, Ordering::Relaxed);
        readiness.check().await;
        assert!(readiness.not_ready_reasons().is_empty());
        readiness.drain();
        readiness.check().await;
        assert_eq!(readiness.not_ready_reasons(), ["it is ending"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_ready_is_looked_at_again_soon() {
        let readiness = Readiness::new();
        let tries = Arc::new(AtomicUsize::new(0));
        let counted = tries.clone();
        readiness.add("database", move || {
            let ready = counted.fetch_add(1, Ordering::Relaxed) >= 2;
            async move { if ready { Ok(()) } else { Err("it does not answer".to_owned()) } }
        });
        let hour = Duration::from_secs(3600);
        let checking = readiness.clone().run_checks(hour, CancellationToken::new());
        assert!(tokio::time::timeout(hour / 2, checking).await.is_err(), "it goes on");
        assert!(readiness.not_ready_reasons().is_empty());
        assert_eq!(tries.load(Ordering::Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_does_not_answer_has_failed() {
        let readiness = Readiness::new();
        readiness.add("database", std::future::pending);
        readiness.check().await;
        assert_eq!(readiness.not_ready_reasons(), ["database: no answer in time"]);
    }
}
