//! Counters and histograms of the decisions of this replica.

use std::time::Duration;

use crate::placement::DecidedBy;

/// Counts a granted lease.
pub(crate) fn placed(decided_by: DecidedBy) {
    metrics::counter!("gantry_scheduler_placements_total", "decided_by" => decided_by.name()).increment(1);
}

/// Counts a request that was not placed immediately, by each refusal reason.
pub(crate) fn refused(codes: impl IntoIterator<Item = &'static str>) {
    for code in codes {
        metrics::counter!("gantry_scheduler_refusals_total", "reason" => code).increment(1);
    }
}

/// Records the time from a batch's arrival to its answer.
pub(crate) fn decided_in(time: Duration) {
    metrics::histogram!("gantry_scheduler_decision_seconds").record(time);
}
