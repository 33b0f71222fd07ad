//! Notifications within this replica: tasks that wait for a change wake at once.
//!
//! A hint is given after the commit, and nothing depends on it: the database is also looked at now and then, for those who watch by
//! [`crate::workloads::watch_poll`]. What other replicas changed is told by [`crate::notify::cluster`]. What the workers shall do whose gateways speak with this replica has a place of its own
//! ([`crate::workers::desired_state`]).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{WorkerId, WorkloadId};
use tokio::sync::{Notify, watch};
use uuid::Uuid;

/// Who waits for what. Cheap to clone; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct LocalNotifier(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// By workload, or [`ALL_WORKERS`].
    subscribers: Mutex<HashMap<Uuid, watch::Sender<()>>>,
    changed: Mutex<Changed>,
    dispatch: Notify,
    timer: Notify,
    registry: Notify,
    /// Whether a worker shall be cordoned or removed, as far as is known here.
    any_leaving: AtomicBool,
}

/// What stands for all workers where somebody hears of changes of any.
pub(crate) const ALL_WORKERS: Uuid = Uuid::nil();
/// What was changed, here or by who told us, and the dispatcher has not seen yet.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    pub(crate) workers: HashSet<WorkerId>,
    /// These wait for a worker, or do not any more.
    pub(crate) queued: HashSet<WorkloadId>,
    /// Another replica has given back leases of these: it concerns who waits here.
    pub(crate) freed: HashSet<WorkerId>,
    /// More than was told, or something that was lost: all of it is to be looked at.
    pub(crate) much: bool,
}

impl LocalNotifier {
    /// Something about the workload `id` changed, or about [`ALL_WORKERS`].
    pub(crate) fn changed(&self, id: Uuid) {
        if let Some(sender) = self.subscribers().get(&id) {
            sender.send_replace(());
        }
    }

    /// Hears of changes of the workload `id`, or of [`ALL_WORKERS`], from now on.
    pub(crate) fn subscribe(&self, id: Uuid) -> Subscription {
        let mut subscribers = self.subscribers();
        let receiver = subscribers.entry(id).or_insert_with(|| watch::Sender::new(())).subscribe();
        Subscription { id, receiver, hints: self.clone() }
    }

    /// All that somebody hears of changes of.
    pub(crate) fn watched(&self) -> Vec<Uuid> {
        self.subscribers().keys().copied().collect()
    }

    /// The dispatcher shall look at these.
    pub(crate) fn look_at(
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

    /// The dispatcher shall look at everything.
    pub(crate) fn much_changed(&self) {
        self.0.changed.lock().unwrap_or_else(PoisonError::into_inner).much = true;
        self.0.dispatch.notify_one();
    }

    /// The dispatcher shall look at these if anybody waits.
    pub(crate) fn freed(&self, workers: Vec<WorkerId>) {
        if !workers.is_empty() {
            self.0.changed.lock().unwrap_or_else(PoisonError::into_inner).freed.extend(workers);
            self.0.dispatch.notify_one();
            self.leases_changed();
        }
    }

    /// What the dispatcher shall look at. Resolved: there is something.
    pub(crate) fn dispatch(&self) -> &Notify {
        &self.0.dispatch
    }

    /// Whether there is something that the dispatcher shall look at.
    pub(crate) fn has_changed(&self) -> bool {
        let changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.much || !changed.workers.is_empty() || !changed.queued.is_empty()
    }

    /// Whether the dispatcher shall look at everything. It is told once.
    pub(crate) fn take_much(&self) -> bool {
        std::mem::take(&mut self.0.changed.lock().unwrap_or_else(PoisonError::into_inner).much)
    }

    /// Takes what the dispatcher shall look at.
    pub(crate) fn take_changed(&self) -> Changed {
        let mut changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        // What is told by `take_much` stays.
        let much = changed.much;
        std::mem::replace(&mut *changed, Changed { much, ..Changed::default() })
    }

    /// It could not be looked at; it is with the next look, which nobody hurries.
    pub(crate) fn give_back(&self, unseen: Changed) {
        let mut changed = self.0.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.workers.extend(unseen.workers);
        changed.queued.extend(unseen.queued);
    }

    /// A deadline was set.
    pub(crate) fn timer(&self) -> &Notify {
        &self.0.timer
    }

    /// Something is to be done about workers that shall be cordoned or removed.
    pub(crate) fn registry(&self) -> &Notify {
        &self.0.registry
    }

    /// Whether a worker shall be cordoned or removed: then whatever changes about a worker's leases may be what that waits for.
    pub(crate) fn any_leaving(&self, someone: bool) {
        self.0.any_leaving.store(someone, Ordering::Relaxed);
    }

    /// Leases of a worker have changed.
    pub(crate) fn leases_changed(&self) {
        if self.0.any_leaving.load(Ordering::Relaxed) {
            self.0.registry.notify_one();
        }
    }

    fn subscribers(&self) -> MutexGuard<'_, HashMap<Uuid, watch::Sender<()>>> {
        self.0.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hears of changes until it is dropped.
#[derive(Debug)]
pub(crate) struct Subscription {
    id: Uuid,
    receiver: watch::Receiver<()>,
    hints: LocalNotifier,
}

impl Subscription {
    /// Resolves when something changed since the last time, or since it was subscribed. Cancel safe.
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
        // This one still counts.
        if subscribers.get(&self.id).is_some_and(|sender| sender.receiver_count() <= 1) {
            subscribers.remove(&self.id);
        }
    }
}
