//! The session in which a gateway speaks for its worker, and until when no other gateway can.
//!
//! The stream to the scheduler opens and ends sessions. All other tasks of the worker wait for one, and ask
//! before they start or destroy something whether this gateway is exclusive.

use std::sync::Mutex;
use std::time::Duration;

use domain::WorkerId;
use domain::worker::{Incarnation, Session};
use tokio::sync::watch;

use crate::util::clock::since_boot;
use crate::util::keyed_locks::lock;

/// The session in which this gateway speaks.
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
    /// Until when the scheduler lets in no other gateway, by `CLOCK_BOOTTIME`. `None`: there was no
    /// session yet.
    exclusive_until: Mutex<Option<Duration>>,
}

impl SessionState {
    pub(crate) fn new() -> Self {
        Self { session: watch::Sender::new(None), exclusive_until: Mutex::default() }
    }

    /// The open session. `None`: the scheduler has not let this gateway in.
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

    /// Waits until the session is another than `open`.
    pub(crate) async fn changed(&self, open: &OpenSession) {
        let mut session = self.session.subscribe();
        // Fails only when the sender is gone, and then no task waits.
        session.wait_for(|now| now.as_ref() != Some(open)).await.ok();
    }

    /// Waits until another gateway may speak for the worker than did in `open`.
    pub(crate) async fn superseded(&self, open: &OpenSession) {
        let mut session = self.session.subscribe();
        let other = |now: &Option<OpenSession>| now.as_ref().is_none_or(|now| now.session != open.session);
        // Fails only when the sender is gone, and then no task waits.
        session.wait_for(other).await.ok();
    }

    /// Opens or ends a session.
    pub(crate) fn set(&self, open: Option<OpenSession>) {
        if open.is_none() {
            *lock(&self.exclusive_until) = Some(Duration::ZERO);
        }
        self.session.send_if_modified(|now| {
            let modified = *now != open;
            *now = open;
            modified
        });
    }

    /// The scheduler received a message of this gateway, so that it lets in no other one before `until`.
    pub(crate) fn extend_exclusive(&self, until: Duration) {
        let mut known = lock(&self.exclusive_until);
        *known = Some(known.map_or(until, |known| known.max(until)));
    }

    /// Whether no other gateway can speak for the worker, so that this one may start and destroy things.
    ///
    /// A process that was frozen, or a machine that was asleep, learns here that this has ended.
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
