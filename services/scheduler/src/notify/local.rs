//! Notifications within this replica, which wake waiting tasks immediately.
//!
//! A notification follows the commit, and no invariant depends on it, because the database is also
//! polled. [`crate::workloads::watch_poll`] polls for watchers. [`crate::notify::cluster`] delivers
//! the changes of other replicas. Desired states of connected workers have their own channel
//! ([`crate::workers::desired_state`]).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{WorkerId, WorkloadId};
use tokio::sync::{Notify, watch};
use uuid::Uuid;

/// Subscribers and pending changes of this replica. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct LocalNotifier(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// By workload, or [`ALL_WORKERS`].
    subscribers: Mutex<HashMap<Uuid, watch::Sender<()>>>,
    changed: Mutex<PendingChanges>,
    dispatch: Notify,
    timer: Notify,
    registry: Notify,
    /// Whether a worker is cordoned or leaving, as far as this replica knows.
    any_leaving: AtomicBool,
}

/// The subscription key for changes of any worker.
pub(crate) const ALL_WORKERS: Uuid = Uuid::nil();
/// Changes, here or on other replicas, that the dispatcher has not processed yet.
#[derive(Debug, Default)]
pub(crate) struct PendingChanges {
    pub(crate) workers: HashSet<WorkerId>,
    /// Workloads that joined or left the queue.
    pub(crate) queued: HashSet<WorkloadId>,
    /// Workers on which another replica released leases. Relevant while requests wait here.
    pub(crate) freed: HashSet<WorkerId>,
    /// Whether notifications were lost or incomplete, so that everything must be read.
    pub(crate) much: bool,
}

impl LocalNotifier {
    /// Wakes the subscribers of the workload `id`, or of [`ALL_WORKERS`].
    pub(crate) fn changed(&self, id: Uuid) {
        if let Some(sender) = self.subscribers().get(&id) {
            sender.send_replace(());
        }
    }

    /// Subscribes to changes of the workload `id`, or of [`ALL_WORKERS`].
    pub(crate) fn subscribe(&self, id: Uuid) -> Subscription {
        let mut subscribers = self.subscribers();
        let receiver = subscribers.entry(id).or_insert_with(|| watch::Sender::new(())).subscribe();
        Subscription { id, receiver, hints: self.clone() }
    }

    /// Returns all ids with subscribers.
    pub(crate) fn watched(&self) -> Vec<Uuid> {
        self.subscribers().keys().copied().collect()
    }

    /// Requests that the dispatcher reads these workers and workloads.
    pub(crate) fn request_read(
        &self,
        workers: impl IntoIterator<Item = WorkerId>,
        queued: impl IntoIterator<Item = WorkloadId>,
    ) {
        let mut changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.workers.extend(workers);
        changed.queued.extend(queued);
        if !changed.workers.is_empty() || !changed.queued.is_empty() {
            self.0.dispatch.notify_one();
        }
    }

    /// Requests that the dispatcher reads everything.
    pub(crate) fn much_changed(&self) {
        self.0.changed.lock().unwrap_or_else(PoisonError::into_inner).much = true;
        self.0.dispatch.notify_one();
    }

    /// Requests that the dispatcher reads these workers if requests wait.
    pub(crate) fn freed(&self, workers: Vec<WorkerId>) {
        if !workers.is_empty() {
            self.0.changed.lock().unwrap_or_else(PoisonError::into_inner).freed.extend(workers);
            self.0.dispatch.notify_one();
            self.leases_changed();
        }
    }

    /// Returns the signal of pending changes for the dispatcher.
    pub(crate) fn dispatch(&self) -> &Notify {
        &self.0.dispatch
    }

    /// Returns whether changes are pending for the dispatcher.
    pub(crate) fn has_changed(&self) -> bool {
        let changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.much || !changed.workers.is_empty() || !changed.queued.is_empty()
    }

    /// Takes the request to read everything.
    pub(crate) fn take_much(&self) -> bool {
        std::mem::take(&mut self.0.changed.lock().unwrap_or_else(PoisonError::into_inner).much)
    }

    /// Takes the pending changes.
    pub(crate) fn take_changed(&self) -> PendingChanges {
        let mut changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        // `much` stays until `take_much`.
        let much = changed.much;
        std::mem::replace(&mut *changed, PendingChanges { much, ..PendingChanges::default() })
    }

    /// Returns changes that could not be read, without waking the dispatcher.
    pub(crate) fn restore_changed(&self, unread: PendingChanges) {
        let mut changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.workers.extend(unread.workers);
        changed.queued.extend(unread.queued);
    }

    /// Returns the signal of new deadlines.
    pub(crate) fn timer(&self) -> &Notify {
        &self.0.timer
    }

    /// Returns the signal of the departure loop.
    pub(crate) fn registry(&self) -> &Notify {
        &self.0.registry
    }

    /// Sets whether a worker is cordoned or leaving. Its departure may wait for any change of
    /// leases.
    pub(crate) fn any_leaving(&self, any: bool) {
        self.0.any_leaving.store(any, Ordering::Relaxed);
    }

    /// Wakes the departure loop after a change of leases.
    pub(crate) fn leases_changed(&self) {
        if self.0.any_leaving.load(Ordering::Relaxed) {
            self.0.registry.notify_one();
        }
    }

    fn subscribers(&self) -> MutexGuard<'_, HashMap<Uuid, watch::Sender<()>>> {
        self.0.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A subscription to changes.
#[derive(Debug)]
pub(crate) struct Subscription {
    id: Uuid,
    receiver: watch::Receiver<()>,
    hints: LocalNotifier,
}

impl Subscription {
    /// Resolves when something changed since the last call or the subscription. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        // The sender lives as long as it has a subscriber.
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut subscribers = self.hints.subscribers();
        // This subscription still counts.
        if subscribers.get(&self.id).is_some_and(|sender| sender.receiver_count() <= 1) {
            subscribers.remove(&self.id);
        }
    }
}
