//! Desired state of workers: what those workers shall do whose gateways speak with this replica.
//!
//! A gateway's stream polls nothing. Whatever reads rows of workers notes here what they say: the
//! scheduling task, which sees what other replicas change ([`crate::workers::cache`]), and a task
//! that reads the rows that a notification named ([`crate::workers::desired_state`]). A stream wakes
//! when that is news. A lost notification costs the time until the next poll, however many streams
//! there are.
//!
//! Invariant: what is known of a worker is what its row said once, and never gets older.
//! Generations only rise. Whatever a gateway shall be told raises the generation of its worker: its
//! session, what it shall do, and each lease of an attempt that is granted, shall stop, or ends.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use domain::WorkerId;
use domain::worker::SessionClaims;
use tokio::sync::{Notify, watch};

use crate::db::entity::worker::{Desired, Model};

/// The workers that are attended here. Cheap to clone; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct DesiredStates(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    workers: Mutex<HashMap<WorkerId, watch::Sender<Option<StateUpdate>>>>,
    /// Those to look at, and since when.
    asked: Mutex<HashMap<WorkerId, Instant>>,
    some: Notify,
}

/// How long it takes until a gateway is told that something changed.
const LAG: &str = "gantry_scheduler_synchronize_lag_seconds";

/// Exports it from now on.
pub(crate) fn describe() {
    metrics::describe_histogram!(
        LAG,
        "From when a replica knew that what a worker shall do had changed until it was told."
    );
    drop(metrics::histogram!(LAG));
}

/// A gateway was told what is known here since `since`.
pub(crate) fn told(since: Instant) {
    metrics::histogram!(LAG).record(since.elapsed());
}

/// What the row of a worker says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DesiredState {
    pub(crate) generation: i64,
    pub(crate) desired: Desired,
    incarnation: i64,
    session: i64,
    /// It is there, and stays.
    stays: bool,
}

/// What is known, and since when this replica might have known it.
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

    /// Whether `session` is the one that speaks for it.
    pub(crate) fn is_spoken_for_by(&self, session: &SessionClaims) -> bool {
        let is = |number: i64, claimed: u64| u64::try_from(number) == Ok(claimed);
        self.stays && is(self.session, session.session.0) && is(self.incarnation, session.incarnation.0)
    }
}

impl DesiredStates {
    /// Hears from now on of what `worker` shall do.
    pub(crate) fn subscribe(&self, worker: WorkerId) -> Subscription {
        let mut workers = self.workers();
        let receiver = workers.entry(worker).or_insert_with(|| watch::Sender::new(None)).subscribe();
        Subscription { worker, receiver, states: self.clone() }
    }

    /// Notes what rows said that were read after `since`.
    pub(crate) fn note(&self, rows: &[Model], since: Instant) {
        let workers = self.workers();
        if workers.is_empty() {
            return;
        }
        for row in rows {
            if let Some(sender) = workers.get(&WorkerId::from_uuid(row.id)) {
                tell(sender, StateUpdate { known: DesiredState::of(row), since });
            }
        }
    }

    /// These have no row any more.
    pub(crate) fn forget(&self, gone: impl IntoIterator<Item = WorkerId>) {
        let workers = self.workers();
        for sender in gone.into_iter().filter_map(|id| workers.get(&id)) {
            // Of one of which nothing is known its stream looks by itself.
            let known = sender.borrow().map(|news| DesiredState { stays: false, ..news.known });
            if let Some(known) = known {
                tell(sender, StateUpdate { known, since: Instant::now() });
            }
        }
    }

    /// Something of these was changed.
    pub(crate) fn look_at(&self, changed: impl IntoIterator<Item = WorkerId>) {
        let workers = self.workers();
        let changed: Vec<_> = changed.into_iter().filter(|id| workers.contains_key(id)).collect();
        drop(workers);
        if changed.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut asked = self.asked();
        changed.into_iter().for_each(|id| _ = asked.entry(id).or_insert(now));
        drop(asked);
        self.0.some.notify_one();
    }

    /// Takes the workers whose rows are to be read, and since when, as soon as there are some.
    pub(crate) async fn next_asked(&self) -> HashMap<WorkerId, Instant> {
        self.0.some.notified().await;
        std::mem::take(&mut *self.asked())
    }

    fn workers(&self) -> MutexGuard<'_, HashMap<WorkerId, watch::Sender<Option<StateUpdate>>>> {
        self.0.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) -> MutexGuard<'_, HashMap<WorkerId, Instant>> {
        self.0.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells who listens, if it is news.
fn tell(sender: &watch::Sender<Option<StateUpdate>>, news: StateUpdate) {
    let age = |known: &DesiredState| (known.generation, !known.stays);
    sender.send_if_modified(|now| {
        let is_news = now.is_none_or(|now| age(&now.known) < age(&news.known));
        if is_news {
            *now = Some(news);
        }
        is_news
    });
}

/// Hears of what a worker shall do until it is dropped.
#[derive(Debug)]
pub(crate) struct Subscription {
    worker: WorkerId,
    receiver: watch::Receiver<Option<StateUpdate>>,
    states: DesiredStates,
}

impl Subscription {
    /// What is known. `None`: nothing yet.
    pub(crate) fn news(&self) -> Option<StateUpdate> {
        *self.receiver.borrow()
    }

    /// Resolves when there is news since the last time, or since it was subscribed. Cancel safe.
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
            // This one still counts.
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
    fn what_is_known_never_gets_older() {
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
        let said = |known| {
            let sender = sender(&states).expect("somebody listens");
            tell(&sender, StateUpdate { known, since: Instant::now() });
        };
        let mut hears = || {
            let news = subscription.receiver.has_changed().expect("it is open");
            subscription.receiver.mark_unchanged();
            (news, subscription.news().map(|news| news.known))
        };
        states.forget([worker]);
        assert_eq!(hears(), (false, None), "its stream looks by itself");
        let landing = known(7, Desired::Cordon);
        said(landing);
        assert_eq!(hears(), (true, Some(landing)));
        for old in [known(6, Desired::Run), landing] {
            said(old);
            assert_eq!(hears(), (false, Some(landing)));
        }
        said(known(9, Desired::Run));
        assert_eq!(hears(), (true, Some(known(9, Desired::Run))));

        states.forget([worker, WorkerId::new()]);
        let gone = DesiredState { stays: false, ..known(9, Desired::Run) };
        assert_eq!(hears(), (true, Some(gone)));
        said(known(9, Desired::Run));
        assert_eq!(hears(), (false, Some(gone)), "it was there before");

        states.look_at([worker, WorkerId::new()]);
        assert_eq!(states.asked().keys().collect::<Vec<_>>(), [&worker], "nobody here speaks for the other");
        let second = states.subscribe(worker);
        drop(subscription);
        assert_eq!(second.news().map(|news| news.known), Some(gone));
        drop(second);
        assert!(sender(&states).is_none(), "nobody listens");
    }
}
