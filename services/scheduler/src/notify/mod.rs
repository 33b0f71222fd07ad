//! Notifications of changes, for tasks of this replica and for other replicas.
//!
//! A transaction collects its effects ([`changes`]). After the commit, [`Notifier::announce`] wakes
//! the waiting tasks of this replica ([`local`], [`desired_state`]), hands over parcels for
//! delivery, and notifies other replicas ([`cluster`]). Any notification may be lost, so each task
//! that waits for one also polls the database.

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

/// Maximum number of parcels that wait for delivery.
const MAX_PARCELS: usize = 4096;

/// The announcer of committed changes. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Notifier {
    pub(crate) local: LocalNotifier,
    pub(crate) desired: DesiredStates,
    /// `None`: replicas do not notify each other.
    pub(crate) cluster: Option<ClusterNotifier>,
    parcels: mpsc::Sender<Parcel>,
}

impl Notifier {
    /// Creates the notifier of a replica, and the channel of parcels to deliver.
    pub(crate) fn new(
        desired: DesiredStates,
        cluster: Option<ClusterNotifier>,
    ) -> (Self, mpsc::Receiver<Parcel>) {
        let (parcels, to_deliver) = mpsc::channel(MAX_PARCELS);
        (Self { local: LocalNotifier::default(), desired, cluster, parcels }, to_deliver)
    }

    /// Announces committed effects.
    pub(crate) fn announce(&self, effects: Effects) {
        self.desired.request_read(effects.workers.iter().copied());
        self.local.request_read(effects.workers.iter().copied(), effects.queued.iter().copied());
        self.announce_granted(effects);
    }

    /// Announces effects of the scheduling task, which knows them already.
    pub(crate) fn announce_granted(&self, effects: Effects) {
        if let Some(cluster) = &self.cluster {
            cluster.enqueue(&effects);
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
        // A parcel that finds no room is delivered after its claim has run out.
        parcels.into_iter().for_each(|parcel| _ = self.parcels.try_send(parcel));
    }
}
