//! Notifications between replicas, with `LISTEN` and `NOTIFY` of PostgreSQL.
//!
//! Changes that one replica announces ([`Notifier::announce`]) are sent to the others, many in one
//! message, and announced there. A message may be lost, like any notification.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use db::Database;
use db::notify::{Listener, MAX_PAYLOAD_BYTES, Received};
use domain::{WorkerId, WorkloadId};
use tokio::sync::Notify as Wake;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::notify::Notifier;
use crate::notify::changes::Effects;
use crate::notify::local::ALL_WORKERS;

const CHANNEL: &str = "gantry_scheduler";

/// Maximum number of changes in one notification. More are replaced by [`Notification::Much`].
const MAX_PENDING: usize = 2000;

/// Delay of notifications about released leases, which collects them. Thousands may occur in a
/// second, and often no request waits.
const RELEASE_DELAY: Duration = Duration::from_millis(2);

/// Delay before the next attempt to listen.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The pending notifications of this replica. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ClusterNotifier {
    /// Identifies the sender, because PostgreSQL also delivers notifications to their sender.
    replica: Uuid,
    news: Arc<Mutex<HashSet<Notification>>>,
    urgent: Arc<Wake>,
    /// Wakes the sender for notifications that may be delayed.
    delayed: Arc<Wake>,
}

/// A change, as sent to other replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Notification {
    /// The desired state or the placement facts of a worker changed.
    Worker(WorkerId),
    /// Leases of a worker were released.
    Freed(WorkerId),
    /// A workload joined or left the queue.
    Queued(WorkloadId),
    /// A workload has a new event.
    Workload(WorkloadId),
    /// A deadline was set.
    Deadline,
    /// Watchers of workers must check for changes.
    Registry,
    /// More changes than one notification holds.
    Much,
}

impl Notification {
    fn word(self) -> String {
        match self {
            Self::Worker(id) => format!("w{}", id.uuid().simple()),
            Self::Freed(id) => format!("f{}", id.uuid().simple()),
            Self::Queued(id) => format!("q{}", id.uuid().simple()),
            Self::Workload(id) => format!("e{}", id.uuid().simple()),
            Self::Deadline => "t".to_owned(),
            Self::Registry => "r".to_owned(),
            Self::Much => "*".to_owned(),
        }
    }

    fn parse(word: &str) -> Option<Self> {
        let (kind, id) = word.split_at_checked(1)?;
        let id = || Uuid::try_parse(id).ok();
        match kind {
            "w" => id().map(WorkerId::from_uuid).map(Self::Worker),
            "f" => id().map(WorkerId::from_uuid).map(Self::Freed),
            "q" => id().map(WorkloadId::from_uuid).map(Self::Queued),
            "e" => id().map(WorkloadId::from_uuid).map(Self::Workload),
            "t" => Some(Self::Deadline),
            "r" => Some(Self::Registry),
            "*" => Some(Self::Much),
            _ => None,
        }
    }
}

impl ClusterNotifier {
    pub(crate) fn new() -> Self {
        Self {
            replica: Uuid::now_v7(),
            news: Arc::default(),
            urgent: Arc::default(),
            delayed: Arc::default(),
        }
    }

    /// Adds these effects to the pending notifications.
    pub(crate) fn enqueue(&self, effects: &Effects) {
        let Effects { workloads, workers, freed, parcels: _, queued, deadline, registry } = effects;
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        news.extend(workers.iter().copied().map(Notification::Worker));
        news.extend(queued.iter().copied().map(Notification::Queued));
        news.extend(workloads.iter().copied().map(Notification::Workload));
        news.extend(deadline.then_some(Notification::Deadline));
        news.extend(registry.then_some(Notification::Registry));
        let is_urgent =
            !(workers.is_empty() && queued.is_empty() && workloads.is_empty()) || *deadline || *registry;
        // A notification about the worker itself covers its released leases.
        let is_news = |worker: &WorkerId| !news.contains(&Notification::Worker(*worker));
        let freed: Vec<_> = freed.iter().copied().filter(is_news).map(Notification::Freed).collect();
        let is_some_freed = !freed.is_empty();
        news.extend(freed);
        if news.len() > MAX_PENDING {
            *news = HashSet::from([Notification::Much]);
        }
        if is_urgent {
            self.urgent.notify_one();
        } else if is_some_freed {
            self.delayed.notify_one();
        }
    }

    /// Resolves when notifications are pending.
    async fn pending(&self) {
        tokio::select! {
            () = self.urgent.notified() => return,
            () = self.delayed.notified() => {}
        }
        tokio::select! {
            () = self.urgent.notified() => {}
            () = tokio::time::sleep(RELEASE_DELAY) => {}
        }
    }

    /// Takes the pending notifications, encoded as messages.
    fn take_messages(&self) -> Vec<String> {
        let news = std::mem::take(&mut *self.news.lock().unwrap_or_else(PoisonError::into_inner));
        let from = self.replica.simple().to_string();
        let mut hints = Vec::new();
        // Workers are sent first, together. A replica that knew only some of them would place too
        // much on the others.
        let (workers, rest): (Vec<_>, Vec<_>) =
            news.into_iter().partition(|one| matches!(one, Notification::Worker(_)));
        for word in workers.into_iter().chain(rest).map(Notification::word) {
            match hints.last_mut() {
                Some(hint) if String::len(hint) + word.len() < MAX_PAYLOAD_BYTES => {
                    hint.push(' ');
                    hint.push_str(&word);
                }
                _ => hints.push(format!("{from} {word}")),
            }
        }
        hints
    }
}

/// Sends notifications until the service stops.
pub(crate) async fn send_forever(db: Database, notifier: ClusterNotifier, stopping: CancellationToken) {
    let some = async {
        loop {
            notifier.pending().await;
            for hint in notifier.take_messages() {
                if let Err(error) = db.notify(CHANNEL, &hint).await {
                    tracing::debug!(error = %error, "cannot notify other replicas");
                }
            }
        }
    };
    tokio::select! {
        () = stopping.cancelled() => {}
        () = some => {}
    }
}

/// Receives notifications until the service stops.
pub(crate) async fn receive_forever(db: Database, notify: Notifier, stopping: CancellationToken) {
    let receive_all = async {
        loop {
            match db.listen(CHANNEL).await {
                Ok(None) => return,
                Ok(Some(listener)) => receive(&notify, listener).await,
                Err(error) => {
                    tracing::debug!(error = %error, "cannot listen for notifications of other replicas")
                }
            }
            tokio::time::sleep(RETRY_DELAY).await;
        }
    };
    tokio::select! {
        () = stopping.cancelled() => {}
        () = receive_all => {}
    }
}

/// Receives notifications until the connection is lost.
async fn receive(notify: &Notifier, mut listener: Listener) {
    // Earlier notifications were missed.
    notify.local.much_changed();
    loop {
        match listener.receive().await {
            Ok(Received::Payload(hint)) => announce_received(notify, &hint),
            Ok(Received::Gap) => notify.local.much_changed(),
            Err(error) => {
                tracing::debug!(error = %error, "cannot receive notifications of other replicas");
                return;
            }
        }
    }
}

fn announce_received(notify: &Notifier, hint: &str) {
    let mut words = hint.split(' ');
    let own = notify.cluster.as_ref().map(|own| own.replica);
    if words.next().and_then(|from| Uuid::try_parse(from).ok()) == own {
        return;
    }
    let (mut workers, mut freed, mut queued, mut much) = (Vec::new(), Vec::new(), Vec::new(), false);
    for word in words {
        match Notification::parse(word) {
            Some(Notification::Worker(id)) => workers.push(id),
            Some(Notification::Freed(id)) => freed.push(id),
            Some(Notification::Queued(id)) => queued.push(id),
            Some(Notification::Workload(id)) => notify.local.changed(id.uuid()),
            Some(Notification::Deadline) => notify.local.timer().notify_one(),
            Some(Notification::Registry) => notify.local.changed(ALL_WORKERS),
            // Another version may send a kind of notification that this one does not know.
            Some(Notification::Much) | None => much = true,
        }
    }
    notify.desired.request_read(workers.iter().copied());
    notify.local.request_read(workers, queued);
    notify.local.freed(freed);
    if much {
        notify.local.much_changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_survive_encoding() {
        let notifier = ClusterNotifier::new();
        let workloads: Vec<_> = (0..500).map(|_| WorkloadId::new()).collect();
        let (worker, freed) = (WorkerId::new(), WorkerId::new());
        notifier.enqueue(&Effects {
            workers: vec![worker, worker],
            queued: workloads[..1].to_vec(),
            workloads: workloads.clone(),
            deadline: true,
            freed: vec![worker, freed],
            ..Effects::default()
        });
        let hints = notifier.take_messages();
        assert!(hints.len() > 1 && hints.iter().all(|hint| hint.len() <= MAX_PAYLOAD_BYTES));
        let words = hints.iter().flat_map(|hint| hint.split(' ').skip(1));
        let received: HashSet<_> = words.map(|word| Notification::parse(word).expect("news")).collect();
        assert_eq!(received.len(), 504);
        assert!(received.contains(&Notification::Freed(freed)));
        assert!(!received.contains(&Notification::Freed(worker)), "covered by the change of the worker");
        assert!(
            received.contains(&Notification::Worker(worker)) && received.contains(&Notification::Deadline)
        );
        assert_eq!(notifier.take_messages(), [""; 0], "nothing is pending");

        let many: Vec<_> = (0..=MAX_PENDING).map(|_| WorkloadId::new()).collect();
        notifier.enqueue(&Effects { workloads: many, ..Effects::default() });
        let [hint] = <[String; 1]>::try_from(notifier.take_messages()).expect("one hint");
        assert!(hint.ends_with(" *"));
        assert_eq!(Notification::parse("x"), None);
    }
}
