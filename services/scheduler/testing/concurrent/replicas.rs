//! Replicas that may be killed at any await point. The operation ends there, and the replica's
//! memory is lost.

use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use db::Database;

use crate::config::Config;
use crate::notify::changes::Effects;
use crate::scheduling::{Dispatch, Dispatcher};

/// Runs `operation` until its `moment`th await that is pending, and kills it there. Returns `None`
/// if it was killed.
pub(crate) async fn killed_at<T>(moment: usize, operation: impl Future<Output = T>) -> Option<T> {
    let mut operation = pin!(operation);
    let mut waited = 0;
    std::future::poll_fn(move |context| {
        let polled = operation.as_mut().poll(context).map(Some);
        waited += usize::from(polled.is_pending());
        if waited == moment { Poll::Ready(None) } else { polled }
    })
    .await
}

/// A replica of the scheduler.
pub(super) struct Replica {
    db: Database,
    config: Arc<Config>,
    dispatch: Mutex<Dispatch>,
    dispatcher: tokio::sync::Mutex<Dispatcher>,
    was_killed: AtomicBool,
}

impl Replica {
    pub(super) fn new(db: Database, config: Arc<Config>) -> Self {
        let (dispatch, dispatcher) = Dispatcher::new(db.clone(), config.clone());
        Self {
            db,
            config,
            dispatch: Mutex::new(dispatch),
            dispatcher: tokio::sync::Mutex::new(dispatcher),
            was_killed: AtomicBool::new(false),
        }
    }

    /// Returns the handle of the dispatcher. A killed replica does not answer.
    pub(super) fn dispatch(&self) -> Dispatch {
        self.dispatch.lock().expect("no panic").clone()
    }

    /// Locks the dispatcher. If the replica was killed, it is restarted first.
    pub(super) async fn lock(&self) -> DispatcherGuard<'_> {
        let mut dispatcher = self.dispatcher.lock().await;
        if self.was_killed.load(Ordering::Relaxed) {
            let (dispatch, restarted) = Dispatcher::new(self.db.clone(), self.config.clone());
            (*self.dispatch.lock().expect("no panic"), *dispatcher) = (dispatch, restarted);
            dispatcher.catch_up(false, &mut Effects::default()).await.expect("the database answers");
            self.was_killed.store(false, Ordering::Relaxed);
        }
        DispatcherGuard { was_killed: &self.was_killed, dispatcher, is_done: false }
    }
}

/// A locked dispatcher. Dropping it without [`DispatcherGuard::done`] kills the replica.
pub(super) struct DispatcherGuard<'a> {
    was_killed: &'a AtomicBool,
    dispatcher: tokio::sync::MutexGuard<'a, Dispatcher>,
    is_done: bool,
}

impl DispatcherGuard<'_> {
    pub(super) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for DispatcherGuard<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.was_killed.store(true, Ordering::Relaxed);
        }
    }
}

impl Deref for DispatcherGuard<'_> {
    type Target = Dispatcher;

    fn deref(&self) -> &Dispatcher {
        &self.dispatcher
    }
}

impl DerefMut for DispatcherGuard<'_> {
    fn deref_mut(&mut self) -> &mut Dispatcher {
        &mut self.dispatcher
    }
}
