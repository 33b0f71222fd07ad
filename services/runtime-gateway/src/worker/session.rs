//! The session of a worker, and the time until which it is exclusive.
//!
//! The stream to the scheduler opens and ends sessions. All other tasks of the worker wait for a
//! session. They check that it is exclusive before they start or destroy something.

use std::sync::Mutex;
use std::time::Duration;

use domain::WorkerId;
use domain::worker::{Incarnation, Session};
use tokio::sync::watch;

use crate::util::clock::since_boot;
use crate::util::keyed_locks::lock;

/// The open session of a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenSession {
    pub(crate) credential: String,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) session: Session,
}

/// The current session of a worker.
pub(crate) struct SessionState {
    session: watch::Sender<Option<OpenSession>>,
    /// Time by `CLOCK_BOOTTIME` until which the scheduler admits no other gateway. `None`: there
    /// was no session yet.
    exclusive_until: Mutex<Option<Duration>>,
}

impl SessionState {
    pub(crate) fn new() -> Self {
        Self { session: watch::Sender::new(None), exclusive_until: Mutex::default() }
    }

    /// The open session. `None`: the gateway has none.
    pub(crate) fn current(&self) -> Option<OpenSession> {
        self.session.borrow().clone()
    }

    /// Waits until a session is open.
    pub(crate) async fn opened(&self) -> OpenSession {
        let mut session = self.session.subscribe();
        loop {
            if let Some(open) = session.borrow_and_update().clone() {
                return open;
            }
            if session.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until the session differs from `open`.
    pub(crate) async fn changed(&self, open: &OpenSession) {
        let mut session = self.session.subscribe();
        // Fails only if the sender is dropped, and then no task waits.
        session.wait_for(|now| now.as_ref() != Some(open)).await.ok();
    }

    /// Waits until another gateway may have a session that is newer than `open`.
    pub(crate) async fn superseded(&self, open: &OpenSession) {
        let mut session = self.session.subscribe();
        let other = |now: &Option<OpenSession>| now.as_ref().is_none_or(|now| now.session != open.session);
        // Fails only if the sender is dropped, and then no task waits.
        session.wait_for(other).await.ok();
    }

    /// Opens or ends a session.
    pub(crate) fn set(&self, open: Option<OpenSession>) {
        if open.is_none() {
            self.end_exclusive();
        }
        self.session.send_if_modified(|now| {
            let modified = *now != open;
            *now = open;
            modified
        });
    }

    /// Extends the time in which the scheduler admits no other gateway.
    pub(crate) fn extend_exclusive(&self, until: Duration) {
        let mut current = lock(&self.exclusive_until);
        *current = Some(current.map_or(until, |current| current.max(until)));
    }

    /// Ends the time in which the scheduler admits no other gateway.
    pub(crate) fn end_exclusive(&self) {
        *lock(&self.exclusive_until) = Some(Duration::ZERO);
    }

    /// Whether no other gateway can speak for the worker. Only then may this gateway start or
    /// destroy processes, containers and volumes.
    ///
    /// A process that was frozen, or a machine that was suspended, detects here that the time has
    /// passed.
    pub(crate) fn is_exclusive(&self) -> bool {
        let until = *lock(&self.exclusive_until);
        until.is_none_or(|until| since_boot() < until)
    }

    /// Waits until no other gateway can speak for the worker.
    pub(crate) async fn wait_until_exclusive(&self) {
        while !self.is_exclusive() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
