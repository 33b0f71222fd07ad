//! Desired states of the workers whose gateways are connected to this replica.
//!
//! The stream of a gateway does not poll. Every reader of worker rows notes the desired states
//! here. The readers are the scheduling task, which sees changes of other replicas
//! ([`crate::workers::cache`]), and the task that reads rows named by notifications
//! ([`crate::workers::desired_state`]). A new state wakes the stream. A lost notification delays a
//! stream until the next poll, regardless of the number of streams.
//!
//! Invariant: a known state never gets older, because generations only rise. Every change that a
//! gateway must receive raises the generation of its worker: its session, its desired state, and
//! each lease of an attempt that is granted, must stop, or ends.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use domain::WorkerId;
use domain::worker::SessionClaims;
use tokio::sync::{Notify, watch};

use crate::db::entity::worker::{Desired, Model};

/// Desired states of the workers that this replica attends. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct DesiredStates(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    workers: Mutex<HashMap<WorkerId, watch::Sender<Option<StateUpdate>>>>,
    /// Workers whose rows must be read, with the time of the request.
    requested: Mutex<HashMap<WorkerId, Instant>>,
    some: Notify,
}

/// Name of the histogram of the delay until a gateway receives a change.
const LAG: &str = "gantry_scheduler_synchronize_lag_seconds";

/// Describes the metric.
pub(crate) fn describe() {
    metrics::describe_histogram!(
        LAG,
        "Delay from a replica's knowledge of a changed desired state until the gateway received it."
    );
    drop(metrics::histogram!(LAG));
}

/// Records the delay since `since` of a state that a gateway received.
pub(crate) fn record_lag(since: Instant) {
    metrics::histogram!(LAG).record(since.elapsed());
}

/// The columns of a worker's row that its gateway depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DesiredState {
    pub(crate) generation: i64,
    pub(crate) desired: Desired,
    incarnation: i64,
    session: i64,
    /// Whether the worker exists and is not leaving.
    stays: bool,
}

/// A desired state, and the earliest time at which this replica could have known it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateUpdate {
    pub(crate) known: DesiredState,
    pub(crate) since: Instant,
}

impl DesiredState {
    pub(crate) fn of(row: &Model) -> Self {
        Self {
            generation: row.generation,
            desired: row.desired,
            incarnation: row.incarnation,
            session: row.session,
            stays: row.leaving.is_none(),
        }
    }

    /// Returns whether `session` is the current session of the worker.
    pub(crate) fn is_spoken_for_by(&self, session: &SessionClaims) -> bool {
        let is = |number: i64, claimed: u64| u64::try_from(number) == Ok(claimed);
        self.stays && is(self.session, session.session.0) && is(self.incarnation, session.incarnation.0)
    }
}

impl DesiredStates {
    /// Subscribes to the desired state of `worker`.
    pub(crate) fn subscribe(&self, worker: WorkerId) -> Subscription {
        let mut workers = self.workers();
        let receiver = workers.entry(worker).or_insert_with(|| watch::Sender::new(None)).subscribe();
        Subscription { worker, receiver, states: self.clone() }
    }

    /// Notes the states of rows that were read after `since`.
    pub(crate) fn note(&self, rows: &[Model], since: Instant) {
        let workers = self.workers();
        if workers.is_empty() {
            return;
        }
        for row in rows {
            if let Some(sender) = workers.get(&WorkerId::from_uuid(row.id)) {
                publish(sender, StateUpdate { known: DesiredState::of(row), since });
            }
        }
    }

    /// Notes that these workers were removed.
    pub(crate) fn forget(&self, gone: impl IntoIterator<Item = WorkerId>) {
        let workers = self.workers();
        for sender in gone.into_iter().filter_map(|id| workers.get(&id)) {
            // Without a known state, the stream reads the row itself.
            let known = sender.borrow().map(|news| DesiredState { stays: false, ..news.known });
            if let Some(known) = known {
                publish(sender, StateUpdate { known, since: Instant::now() });
            }
        }
    }

    /// Requests a read of changed workers.
    pub(crate) fn request_read(&self, changed: impl IntoIterator<Item = WorkerId>) {
        let workers = self.workers();
        let changed: Vec<_> = changed.into_iter().filter(|id| workers.contains_key(id)).collect();
        drop(workers);
        if changed.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut requested = self.requested();
        changed.into_iter().for_each(|id| _ = requested.entry(id).or_insert(now));
        drop(requested);
        self.0.some.notify_one();
    }

    /// Takes the workers whose rows must be read, as soon as there are some.
    pub(crate) async fn next_requested(&self) -> HashMap<WorkerId, Instant> {
        self.0.some.notified().await;
        std::mem::take(&mut *self.requested())
    }

    fn workers(&self) -> MutexGuard<'_, HashMap<WorkerId, watch::Sender<Option<StateUpdate>>>> {
        self.0.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn requested(&self) -> MutexGuard<'_, HashMap<WorkerId, Instant>> {
        self.0.requested.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishes a state if it is newer.
fn publish(sender: &watch::Sender<Option<StateUpdate>>, news: StateUpdate) {
    let age = |known: &DesiredState| (known.generation, !known.stays);
    sender.send_if_modified(|now| {
        let is_news = now.is_none_or(|now| age(&now.known) < age(&news.known));
        if is_news {
            *now = Some(news);
        }
        is_news
    });
}

/// A subscription to the desired state of a worker.
#[derive(Debug)]
pub(crate) struct Subscription {
    worker: WorkerId,
    receiver: watch::Receiver<Option<StateUpdate>>,
    states: DesiredStates,
}

impl Subscription {
    /// Returns the known state, if there is one.
    pub(crate) fn news(&self) -> Option<StateUpdate> {
        *self.receiver.borrow()
    }

    /// Resolves when the state changed since the last call or the subscription. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        // The sender lives as long as it has a subscriber.
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut workers = self.states.workers();
        if let Entry::Occupied(entry) = workers.entry(self.worker)
            // This subscription still counts.
            && entry.get().receiver_count() <= 1
        {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn desired_state_never_gets_older() {
        let states = DesiredStates::default();
        let worker = WorkerId::new();
        let mut subscription = states.subscribe(worker);
        let sender = |states: &DesiredStates| states.workers().get(&worker).cloned();
        let known = |generation, desired| DesiredState {
            generation,
            desired,
            incarnation: 1,
            session: 1,
            stays: true,
        };
        let publish_state = |known| {
            let sender = sender(&states).expect("a subscriber");
            publish(&sender, StateUpdate { known, since: Instant::now() });
        };
        let mut receive = || {
            let news = subscription.receiver.has_changed().expect("it is open");
            subscription.receiver.mark_unchanged();
            (news, subscription.news().map(|news| news.known))
        };
        states.forget([worker]);
        assert_eq!(receive(), (false, None), "its stream reads the row itself");
        let landing = known(7, Desired::Cordon);
        publish_state(landing);
        assert_eq!(receive(), (true, Some(landing)));
        for old in [known(6, Desired::Run), landing] {
            publish_state(old);
            assert_eq!(receive(), (false, Some(landing)));
        }
        publish_state(known(9, Desired::Run));
        assert_eq!(receive(), (true, Some(known(9, Desired::Run))));

        states.forget([worker, WorkerId::new()]);
        let gone = DesiredState { stays: false, ..known(9, Desired::Run) };
        assert_eq!(receive(), (true, Some(gone)));
        publish_state(known(9, Desired::Run));
        assert_eq!(receive(), (false, Some(gone)), "an older state");

        states.request_read([worker, WorkerId::new()]);
        assert_eq!(
            states.requested().keys().collect::<Vec<_>>(),
            [&worker],
            "the other worker has no stream here"
        );
        let second = states.subscribe(worker);
        drop(subscription);
        assert_eq!(second.news().map(|news| news.known), Some(gone));
        drop(second);
        assert!(sender(&states).is_none(), "no subscriber");
    }
}
