//! Effects: what a transaction changed that somebody should hear of once it is committed.
//!
//! Domain functions collect them while they work; [`crate::service::Scheduler`] announces them after the commit.

use domain::{WorkerId, WorkloadId};

use crate::outbox::Parcel;

/// What somebody should hear of after the commit.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Something happened to these.
    pub(crate) workloads: Vec<WorkloadId>,
    /// What these shall do changed.
    pub(crate) workers: Vec<WorkerId>,
    /// These were put into the outbox.
    pub(crate) parcels: Vec<Parcel>,
    /// There is something to place, or room to place it.
    pub(crate) dispatch: bool,
    /// A deadline was set.
    pub(crate) deadline: bool,
    /// Somebody who watches workers should look, and so should who sees them off.
    pub(crate) registry: bool,
}
