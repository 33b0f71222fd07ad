//! Replicas that are killed at any moment, and whatever else is: an operation ends where it waits, and what it had in memory is gone.

use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use db::Database;

use crate::config::Config;
use crate::notify::changes::Effects;
use crate::scheduling::{Dispatch, Dispatcher};

/// Carries out `operation` until it waits for the `moment`th time: there its process is killed. `None`: it was.
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

    /// Whom to ask. Nobody answers once the replica is killed.
    pub(super) fn dispatch(&self) -> Dispatch {
        self.dispatch.lock().expect("no panic").clone()
    }

    /// Its dispatcher. Where it was killed, one that was started again.
    pub(super) async fn hold(&self) -> Held<'_> {
        let mut dispatcher = self.dispatcher.lock().await;
        if self.was_killed.load(Ordering::Relaxed) {
            let (dispatch, anew) = Dispatcher::new(self.db.clone(), self.config.clone());
            (*self.dispatch.lock().expect("no panic"), *dispatcher) = (dispatch, anew);
            dispatcher.catch_up(false, &mut Effects::default()).await.expect("the database answers");
            self.was_killed.store(false, Ordering::Relaxed);
        }
        Held { was_killed: &self.was_killed, dispatcher, is_done: false }
    }
}

/// A dispatcher that does something. Whoever lets go of it before that is [`Held::done`] was killed, and it with him.
pub(super) struct Held<'a> {
    was_killed: &'a AtomicBool,
    dispatcher: tokio::sync::MutexGuard<'a, Dispatcher>,
    is_done: bool,
}

impl Held<'_> {
    pub(super) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.was_killed.store(true, Ordering::Relaxed);
        }
    }
}

impl Deref for Held<'_> {
    type Target = Dispatcher;

    fn deref(&self) -> &Dispatcher {
        &self.dispatcher
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Dispatcher {
        &mut self.dispatcher
    }
}
