//! What leases are for, and in which states workers are: words of the domain, without a database.

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A task: as any but `Transfer`, it takes a slot.
    Task,
    /// Getting a version of a resource.
    Get,
    /// Making a version of a resource.
    Put,
    /// Looking for versions of a resource.
    Check,
    /// What others use while they run.
    Service,
    /// Moving bytes: takes no slot.
    Transfer,
}

impl Kind {
    /// Every one.
    pub(crate) const ALL: [Self; 6] =
        [Self::Task, Self::Get, Self::Put, Self::Check, Self::Service, Self::Transfer];

    /// Whether something runs under it.
    pub(crate) fn takes_a_slot(self) -> bool {
        self != Self::Transfer
    }
}

/// What a worker shall do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Desired {
    /// Take work.
    Run,
    /// Take no more work, and come back later.
    Land,
    /// Take no more work, for good.
    Retire,
}

/// Whether a worker is in contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Its gateway is in contact.
    Running,
    /// It has been silent for the TTL, or its gateway said goodbye.
    Stalled,
    /// It has been silent for so long that nothing of it can be running.
    Lost,
}
