//! Notifications between replicas, over the database's own channel (`LISTEN` and `NOTIFY`).
//!
//! What is announced in one replica ([`Notifier::announce`]) is told to the others, many changes in
//! one message, and announced there. A message may be lost, as any notification.

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

/// Of how many changes at a time each is told. Of more it is said that there are many.
const MOST: usize = 2000;

/// How long leases that were given back are collected: there may be thousands in a second, and often nobody waits for them.
const COLLECTED: Duration = Duration::from_millis(2);

/// How long to wait with the next attempt to listen.
const PAUSE: Duration = Duration::from_secs(1);

/// What a replica has to tell. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct ClusterNotifier {
    /// Who says it: hints come back to who sent them.
    replica: Uuid,
    news: Arc<Mutex<HashSet<Notification>>>,
    some: Arc<Wake>,
    /// Something that may be collected for a moment.
    later: Arc<Wake>,
}

/// Something that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Notification {
    /// What a worker shall do, or what placement knows of it.
    Worker(WorkerId),
    /// Leases of a worker were given back.
    Freed(WorkerId),
    /// Whether a workload waits for a worker.
    Queued(WorkloadId),
    /// Something happened to a workload.
    Workload(WorkloadId),
    /// A deadline was set.
    Deadline,
    /// Who watches workers should look.
    Registry,
    /// More than can be told.
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
        Self { replica: Uuid::now_v7(), news: Arc::default(), some: Arc::default(), later: Arc::default() }
    }

    /// The others shall hear of these.
    pub(crate) fn tell(&self, effects: &Effects) {
        let Effects { workloads, workers, freed, parcels: _, queued, deadline, registry } = effects;
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        news.extend(workers.iter().copied().map(Notification::Worker));
        news.extend(queued.iter().copied().map(Notification::Queued));
        news.extend(workloads.iter().copied().map(Notification::Workload));
        news.extend(deadline.then_some(Notification::Deadline));
        news.extend(registry.then_some(Notification::Registry));
        let is_urgent =
            !(workers.is_empty() && queued.is_empty() && workloads.is_empty()) || *deadline || *registry;
        // Of one that something was placed on already, they hear that.
        let is_news = |worker: &WorkerId| !news.contains(&Notification::Worker(*worker));
        let freed: Vec<_> = freed.iter().copied().filter(is_news).map(Notification::Freed).collect();
        let is_some_freed = !freed.is_empty();
        news.extend(freed);
        if news.len() > MOST {
            *news = HashSet::from([Notification::Much]);
        }
        if is_urgent {
            self.some.notify_one();
        } else if is_some_freed {
            self.later.notify_one();
        }
    }

    /// Resolves when there is something to tell.
    async fn there_is_some(&self) {
        tokio::select! {
            () = self.some.notified() => return,
            () = self.later.notified() => {}
        }
        tokio::select! {
            () = self.some.notified() => {}
            () = tokio::time::sleep(COLLECTED) => {}
        }
    }

    /// What is to be told, as hints.
    fn hints(&self) -> Vec<String> {
        let news = std::mem::take(&mut *self.news.lock().unwrap_or_else(PoisonError::into_inner));
        let from = self.replica.simple().to_string();
        let mut hints = Vec::new();
        // Workers together: a replica that knew of some of them would give the others too much.
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

/// Tells the others what changed here, until the service stops.
pub(crate) async fn tell_forever(db: Database, gossip: ClusterNotifier, stopping: CancellationToken) {
    let some = async {
        loop {
            gossip.there_is_some().await;
            for hint in gossip.hints() {
                if let Err(error) = db.notify(CHANNEL, &hint).await {
                    tracing::debug!(error = %error, "cannot tell other replicas what changed");
                }
            }
        }
    };
    tokio::select! {
        () = stopping.cancelled() => {}
        () = some => {}
    }
}

/// Hears what changed in other replicas, until the service stops.
pub(crate) async fn receive_forever(db: Database, notify: Notifier, stopping: CancellationToken) {
    let heard = async {
        loop {
            match db.listen(CHANNEL).await {
                Ok(None) => return,
                Ok(Some(listener)) => hear(&notify, listener).await,
                Err(error) => tracing::debug!(error = %error, "cannot listen to other replicas"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = stopping.cancelled() => {}
        () = heard => {}
    }
}

/// Hears until the connection is lost.
async fn hear(notify: &Notifier, mut listener: Listener) {
    // What was said before.
    notify.local.much_changed();
    loop {
        match listener.receive().await {
            Ok(Received::Payload(hint)) => heard(notify, &hint),
            Ok(Received::Gap) => notify.local.much_changed(),
            Err(error) => {
                tracing::debug!(error = %error, "cannot hear other replicas");
                return;
            }
        }
    }
}

fn heard(notify: &Notifier, hint: &str) {
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
            // What another version has to tell is not known here.
            Some(Notification::Much) | None => much = true,
        }
    }
    notify.desired.look_at(workers.iter().copied());
    notify.local.look_at(workers, queued);
    notify.local.freed(freed);
    if much {
        notify.local.much_changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_what_is_heard() {
        let gossip = ClusterNotifier::new();
        let workloads: Vec<_> = (0..500).map(|_| WorkloadId::new()).collect();
        let (worker, freed) = (WorkerId::new(), WorkerId::new());
        gossip.tell(&Effects {
            workers: vec![worker, worker],
            queued: workloads[..1].to_vec(),
            workloads: workloads.clone(),
            deadline: true,
            freed: vec![worker, freed],
            ..Effects::default()
        });
        let hints = gossip.hints();
        assert!(hints.len() > 1 && hints.iter().all(|hint| hint.len() <= MAX_PAYLOAD_BYTES));
        let words = hints.iter().flat_map(|hint| hint.split(' ').skip(1));
        let heard: HashSet<_> = words.map(|word| Notification::parse(word).expect("news")).collect();
        assert_eq!(heard.len(), 504);
        assert!(heard.contains(&Notification::Freed(freed)));
        assert!(!heard.contains(&Notification::Freed(worker)), "that it changed is told already");
        assert!(heard.contains(&Notification::Worker(worker)) && heard.contains(&Notification::Deadline));
        assert_eq!(gossip.hints(), [""; 0], "it was told");

        let many: Vec<_> = (0..=MOST).map(|_| WorkloadId::new()).collect();
        gossip.tell(&Effects { workloads: many, ..Effects::default() });
        let [hint] = <[String; 1]>::try_from(gossip.hints()).expect("one hint");
        assert!(hint.ends_with(" *"));
        assert_eq!(Notification::parse("x"), None);
    }
}
