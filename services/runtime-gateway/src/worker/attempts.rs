//! The attempts of a gateway by lease, with the progress that the scheduler receives.
//!
//! The stream to the scheduler adds and removes entries. The task of an attempt reports its
//! progress. A driven lease has an entry, too. Its callers add it before their first operation.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use domain::LeaseId;
use domain::workload::FailureReason;
use tokio::sync::{Notify, OwnedRwLockReadGuard, RwLock, watch};

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
    /// Generation of the desired state from which on it names the lease.
    pub(crate) named_from: u64,
    /// Each operation of a driven lease holds it for reading, and the end of the lease for writing.
    pub(crate) operations: Arc<RwLock<()>>,
}

impl AttemptEntry {
    pub(crate) fn new(stop: watch::Sender<Option<StopRequest>>) -> Self {
        Self {
            phase: AttemptPhase::Preparing,
            inputs: Vec::new(),
            stop,
            named_from: 0,
            operations: Arc::default(),
        }
    }
}

/// The generation of a lease that may not be in use yet.
const NOT_NAMED: u64 = u64::MAX;

/// An operation under a driven lease. The lease does not end before it is dropped.
pub(crate) struct Operation {
    _running: OwnedRwLockReadGuard<()>,
    /// Set when the operation must end.
    pub(crate) stop: watch::Receiver<Option<StopRequest>>,
    /// Whether the scheduler has confirmed that the lease is in use.
    pub(crate) is_confirmed: bool,
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

    /// Begins an operation under a driven lease. If the lease has no entry, one is made, and `true`
    /// is returned with it. `None`: the lease is ending.
    pub(crate) fn begin_operation(&self, lease: LeaseId) -> Option<(Operation, bool)> {
        let mut entries = self.lock();
        let is_new = !entries.contains_key(&lease);
        let entry = entries.entry(lease).or_insert_with(|| AttemptEntry {
            phase: AttemptPhase::Running,
            named_from: NOT_NAMED,
            ..AttemptEntry::new(watch::Sender::new(None))
        });
        if entry.phase == AttemptPhase::Ended || entry.stop.borrow().is_some() {
            return None;
        }
        let running = Arc::clone(&entry.operations).try_read_owned().ok()?;
        let is_confirmed = entry.named_from != NOT_NAMED;
        Some((Operation { _running: running, stop: entry.stop.subscribe(), is_confirmed }, is_new))
    }

    /// Adds a driven lease that the scheduler names, unless it has an entry. A request to stop is
    /// passed on to an existing entry. Returns whether the entry is new, and whether it changed.
    pub(crate) fn add_held(&self, lease: LeaseId, request: Option<StopRequest>) -> (bool, bool) {
        match self.lock().entry(lease) {
            Entry::Occupied(entry) => {
                let Some(request) = request else { return (false, false) };
                let stop = &entry.get().stop;
                (false, stop.send_if_modified(|now| now.replace(request.clone()) != Some(request)))
            }
            Entry::Vacant(entry) => {
                let held = AttemptEntry::new(watch::Sender::new(request));
                entry.insert(AttemptEntry { phase: AttemptPhase::Running, ..held });
                (true, true)
            }
        }
    }

    /// Expects each lease in use in every desired state of a new stream.
    pub(crate) fn expect_all_named(&self) {
        for entry in self.lock().values_mut().filter(|entry| entry.named_from != NOT_NAMED) {
            entry.named_from = 0;
        }
    }

    /// Records that the scheduler has confirmed that a driven lease is in use.
    pub(crate) fn confirm_use(&self, lease: LeaseId, named_from: u64) {
        if let Some(entry) = self.lock().get_mut(&lease) {
            entry.named_from = entry.named_from.min(named_from);
        }
        self.changed.notify_one();
    }

    /// Removes a driven lease whose use was never confirmed.
    pub(crate) fn forget_unused(&self, lease: LeaseId) {
        self.lock().retain(|id, entry| *id != lease || entry.named_from != NOT_NAMED);
    }

    /// Sets the phase of an attempt.
    pub(crate) fn set_phase(&self, lease: LeaseId, phase: AttemptPhase) {
        if let Some(attempt) = self.lock().get_mut(&lease) {
            attempt.phase = phase;
            attempt.inputs.clear();
        }
        self.changed.notify_one();
    }

    /// Sets the progress of the inputs that are copied to the worker. `None`: they have arrived.
    pub(crate) fn report_inputs(&self, lease: LeaseId, inputs: Option<Vec<InputProgress>>) {
        match inputs {
            Some(inputs) => self.set_inputs(lease, inputs),
            None => self.set_phase(lease, AttemptPhase::Preparing),
        }
    }

    fn set_inputs(&self, lease: LeaseId, inputs: Vec<InputProgress>) {
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

/// Returns the progress of all inputs in tenths, and what each input waits for and whether it is
/// relayed.
fn rough_progress(inputs: &[InputProgress]) -> (u64, Vec<(&str, bool)>) {
    let of = |bytes: fn(&InputProgress) -> u64| inputs.iter().map(bytes).sum::<u64>();
    let tenths = of(|input| input.bytes_done).saturating_mul(10) / of(|input| input.bytes_total).max(1);
    (tenths, inputs.iter().map(|input| (input.waits_for.as_str(), input.relayed)).collect())
}
