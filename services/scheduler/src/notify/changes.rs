//! Effects: what a transaction changed that tasks and replicas are told of after the commit.
//!
//! Domain functions collect them while they work; [`crate::notify::Notifier`] announces them after the commit.

use domain::{WorkerId, WorkloadId};

use crate::outbox::Parcel;

/// What is announced after the commit.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Something happened to these.
    pub(crate) workloads: Vec<WorkloadId>,
    /// What these shall do changed, or what placement knows of them.
    pub(crate) workers: Vec<WorkerId>,
    /// Leases of these that nothing runs under by itself were given back: there may be room for who waits.
    pub(crate) freed: Vec<WorkerId>,
    /// These were put into the outbox.
    pub(crate) parcels: Vec<Parcel>,
    /// These wait for a worker from now on, or do not any more.
    pub(crate) queued: Vec<WorkloadId>,
    /// A deadline was set.
    pub(crate) deadline: bool,
    /// Somebody who watches workers should look, and so should who sees them off.
    pub(crate) registry: bool,
}

impl Effects {
    /// Both.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.append(other);
        self
    }

    /// These as well.
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
