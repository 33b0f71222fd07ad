//! Conditions on volumes, and new rows of volumes.

use domain::{Timestamp, VolumeHandle, WorkerId};

use crate::db::entity::{Purpose, State, volume};

/// Condition that a volume is complete. It is a literal because partial indexes exclude complete
/// volumes. With a parameter, SQLite would plan the statement on each execution.
pub(crate) const COMPLETE: &str = "complete = TRUE";

/// Condition that a volume is present ([`State::PRESENT`]). A literal, so that SQLite plans the
/// statement once.
pub(crate) const PRESENT: &str = "state IN ('created', 'unconfirmed')";

/// Returns a new row of a volume that may not exist yet, with defaults for all optional columns.
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
        mark_reason: None,
        marked_at: None,
        marked_from: None,
        lost_at: None,
        loss_noticed: false,
        adopted_at: None,
        given_up: false,
        loss_reason: None,
        exclusive_bytes: None,
        disk_bytes: None,
    }
}
