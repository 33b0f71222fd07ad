//! The operations and their weights.

#[derive(Debug, Clone, Copy)]
pub(super) enum Operation {
    Submit,
    Dispatch,
    Start,
    Finish,
    Cancel,
    Observe,
    Forget,
    Restart,
    Misfit,
    Silence,
    Contact,
    TimeOut,
    Land,
    Run,
    Retire,
    Prune,
    Depart,
    PlaceDriven,
    RenewDriven,
    ReleaseDriven,
}

/// All operations.
pub(super) const OPERATIONS: [(Operation, u32); 20] = [
    (Operation::Submit, 8),
    (Operation::Dispatch, 8),
    (Operation::Start, 8),
    (Operation::Finish, 8),
    (Operation::Cancel, 3),
    (Operation::Observe, 5),
    (Operation::Forget, 2),
    (Operation::Restart, 2),
    (Operation::Misfit, 2),
    (Operation::Silence, 1),
    (Operation::Contact, 5),
    (Operation::TimeOut, 3),
    (Operation::Land, 2),
    (Operation::Run, 4),
    (Operation::Retire, 1),
    (Operation::Prune, 1),
    (Operation::Depart, 5),
    (Operation::PlaceDriven, 2),
    (Operation::RenewDriven, 2),
    (Operation::ReleaseDriven, 2),
];

/// Callers that drive leases, without waiting requests, so that requests are decided ahead of
/// commits.
pub(super) const DRIVEN: [(Operation, u32); 8] = [
    (Operation::PlaceDriven, 12),
    (Operation::ReleaseDriven, 10),
    (Operation::RenewDriven, 2),
    (Operation::Restart, 1),
    (Operation::Contact, 3),
    (Operation::TimeOut, 1),
    (Operation::Land, 1),
    (Operation::Run, 3),
];
