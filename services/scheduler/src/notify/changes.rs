//! Effects of a transaction that other tasks and replicas must be notified of.
//!
//! Domain functions collect effects, and [`crate::notify::Notifier`] announces them after the
//! commit.

use domain::{WorkerId, WorkloadId};

use crate::outbox::Parcel;

/// Changes that are announced after the commit.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Workloads with a new event.
    pub(crate) workloads: Vec<WorkloadId>,
    /// Workers whose desired state or placement facts changed.
    pub(crate) workers: Vec<WorkerId>,
    /// Workers on which driven leases were released, so that waiting requests may fit.
    pub(crate) freed: Vec<WorkerId>,
    /// Parcels written to the outbox.
    pub(crate) parcels: Vec<Parcel>,
    /// Workloads that joined or left the queue.
    pub(crate) queued: Vec<WorkloadId>,
    /// Whether a deadline was set.
    pub(crate) deadline: bool,
    /// Whether watchers of workers and the departure loop must run.
    pub(crate) registry: bool,
}

impl Effects {
    /// Returns the effects of both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.append(other);
        self
    }

    /// Appends the effects of another change.
    pub(crate) fn append(&mut self, mut other: Self) {
        self.workloads.append(&mut other.workloads);
        self.workers.append(&mut other.workers);
        self.freed.append(&mut other.freed);
        self.parcels.append(&mut other.parcels);
        self.queued.append(&mut other.queued);
        self.deadline |= other.deadline;
        self.registry |= other.registry;
    }
}
