//! The attempts of a gateway by lease, with the progress that the scheduler receives.
//!
//! The stream to the scheduler adds and removes entries. The task of an attempt reports its
//! progress.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use domain::LeaseId;
use domain::workload::FailureReason;
use tokio::sync::{Notify, watch};

use crate::clients::scheduler_messages::{AttemptPhase, InputProgress};
use crate::util::keyed_locks::lock;

/// A request to stop an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StopRequest {
    pub(crate) grace: Duration,
    pub(crate) reason: FailureReason,
}

/// An attempt that this gateway runs, or that ended while the scheduler still names its lease.
pub(crate) struct AttemptEntry {
    pub(crate) phase: AttemptPhase,
    /// Progress of the inputs that are copied to the worker. Empty outside of `Materializing`.
    pub(crate) inputs: Vec<InputProgress>,
    /// Set when the attempt must stop.
    pub(crate) stop: watch::Sender<Option<StopRequest>>,
}

/// The attempts of one worker, by lease.
#[derive(Default)]
pub(crate) struct AttemptTable {
    entries: Mutex<HashMap<LeaseId, AttemptEntry>>,
    changed: Notify,
}

impl AttemptTable {
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<LeaseId, AttemptEntry>> {
        lock(&self.entries)
    }

    /// Waits for a change that the scheduler must receive.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Removes a lease whose task has died.
    pub(crate) fn remove(&self, lease: LeaseId) {
        self.lock().remove(&lease);
        self.changed.notify_one();
    }

    /// Sets the phase of an attempt.
    pub(crate) fn set_phase(&self, lease: LeaseId, phase: AttemptPhase) {
        if let Some(attempt) = self.lock().get_mut(&lease) {
            attempt.phase = phase;
            attempt.inputs.clear();
        }
        self.changed.notify_one();
    }

    /// Sets the progress of the inputs that are copied to the worker.
    pub(crate) fn set_inputs(&self, lease: LeaseId, inputs: Vec<InputProgress>) {
        let mut is_reported = false;
        if let Some(attempt) = self.lock().get_mut(&lease) {
            is_reported = attempt.phase != AttemptPhase::Materializing
                || rough_progress(&attempt.inputs) != rough_progress(&inputs);
            attempt.phase = AttemptPhase::Materializing;
            attempt.inputs = inputs;
        }
        if is_reported {
            self.changed.notify_one();
        }
    }
}

/// Returns the progress of all inputs in tenths, and what each input waits for.
fn rough_progress(inputs: &[InputProgress]) -> (u64, Vec<&str>) {
    let of = |bytes: fn(&InputProgress) -> u64| inputs.iter().map(bytes).sum::<u64>();
    let tenths = of(|input| input.bytes_done).saturating_mul(10) / of(|input| input.bytes_total).max(1);
    (tenths, inputs.iter().map(|input| input.waits_for.as_str()).collect())
}
