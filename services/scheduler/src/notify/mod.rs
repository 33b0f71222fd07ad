//! Notifications: a hint that something changed, for tasks of this replica and for other replicas.
//!
//! A transaction collects what it changed ([`changes`]). After the commit [`Notifier::announce`] wakes
//! the tasks of this replica that wait for it ([`local`], [`desired_state`]), hands over parcels for
//! delivery, and tells other replicas ([`cluster`]). Any notification may be lost: each task that
//! waits for one also polls the database.

pub(crate) mod changes;
pub(crate) mod cluster;
pub(crate) mod desired_state;
pub(crate) mod local;
pub(crate) mod request;

use tokio::sync::mpsc;

use self::changes::Effects;
use self::cluster::ClusterNotifier;
use self::desired_state::DesiredStates;
use self::local::{ALL_WORKERS, LocalNotifier};
use crate::outbox::Parcel;

/// How many parcels may wait for the delivery.
const PARCELS: usize = 4096;

/// Where changes are announced. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Notifier {
    pub(crate) local: LocalNotifier,
    pub(crate) desired: DesiredStates,
    /// `None`: replicas do not tell each other.
    pub(crate) cluster: Option<ClusterNotifier>,
    parcels: mpsc::Sender<Parcel>,
}

impl Notifier {
    /// Notifications of a replica, and the parcels that it shall deliver.
    pub(crate) fn new(
        desired: DesiredStates,
        cluster: Option<ClusterNotifier>,
    ) -> (Self, mpsc::Receiver<Parcel>) {
        let (parcels, to_deliver) = mpsc::channel(PARCELS);
        (Self { local: LocalNotifier::default(), desired, cluster, parcels }, to_deliver)
    }

    /// Announces what was committed.
    pub(crate) fn announce(&self, effects: Effects) {
        self.desired.look_at(effects.workers.iter().copied());
        self.local.look_at(effects.workers.iter().copied(), effects.queued.iter().copied());
        self.announce_granted(effects);
    }

    /// Announces what the scheduling task committed, which knows it already.
    pub(crate) fn announce_granted(&self, effects: Effects) {
        if let Some(cluster) = &self.cluster {
            cluster.tell(&effects);
        }
        let Effects { workloads, workers, freed, parcels, queued: _, deadline, registry } = effects;
        if !workers.is_empty() || !freed.is_empty() {
            self.local.leases_changed();
        }
        if registry {
            self.local.changed(ALL_WORKERS);
            self.local.registry().notify_one();
        }
        workloads.iter().for_each(|workload| self.local.changed(workload.uuid()));
        if deadline {
            self.local.timer().notify_one();
        }
        // One that finds no room, or whose service stops, is delivered once its claim is over.
        parcels.into_iter().for_each(|parcel| _ = self.parcels.try_send(parcel));
    }
}
