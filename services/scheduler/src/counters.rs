//! Counters and histograms that this replica's decisions feed.

use std::time::Duration;

use crate::placement::DecidedBy;

/// A lease was granted.
pub(crate) fn placed(decided_by: DecidedBy) {
    metrics::counter!("gantry_scheduler_placements_total", "decided_by" => decided_by.name()).increment(1);
}

/// Something was not placed at once, for these reasons.
pub(crate) fn refused(codes: impl IntoIterator<Item = &'static str>) {
    for code in codes {
        metrics::counter!("gantry_scheduler_refusals_total", "reason" => code).increment(1);
    }
}

/// What was asked for together was answered after this time.
pub(crate) fn decided_in(time: Duration) {
    metrics::histogram!("gantry_scheduler_decision_seconds").record(time);
}
