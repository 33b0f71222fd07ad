//! Rows of volumes.

use domain::{Timestamp, VolumeHandle, WorkerId};

use crate::db::entity::{Purpose, State, volume};

/// Written out, for there are partial indexes of those that are not: for a parameter in its place SQLite would plan the statement each time.
pub(crate) const COMPLETE: &str = "complete = TRUE";

/// The same of what is there, as far as we know ([`State::PRESENT`]).
pub(crate) const PRESENT: &str = "state IN ('created', 'unconfirmed')";

/// The row of a volume that may not be there yet, as far as all volumes are alike.
pub(crate) fn new_volume(
    handle: VolumeHandle,
    worker: WorkerId,
    purpose: Purpose,
    sequence: i64,
    now: Timestamp,
) -> volume::Model {
    volume::Model {
        handle: handle.uuid(),
        worker_id: worker.uuid(),
        state: State::Creating,
        purpose,
        name: None,
        artifact_id: None,
        from_artifact_id: None,
        parent: None,
        attempt_id: None,
        transfer_id: None,
        claimed_until: None,
        is_copy: false,
        complete: false,
        digest: None,
        size_bytes: 0,
        verified: false,
        created_at: now.0,
        judged_after: sequence,
        marked_why: None,
        marked_at: None,
        marked_from: None,
        lost_at: None,
        loss_noticed: false,
        adopted_at: None,
        given_up: false,
    }
}
