//! Planned load: grants of this replica that are not in the rows of workers yet.
//!
//! Planned load counts on top of the last known load until the grant is committed or rejected.
//! While released slots are reassigned, they count as free ([`Index::expect_slots`]).

use domain::WorkerId;

use super::Index;
use crate::placement::Kind;
use crate::placement::{Load, Resources};

impl Index {
    /// Adds a planned lease.
    pub(crate) fn plan(&mut self, id: WorkerId, kind: Kind, requests: &Resources) {
        if kind.takes_a_slot() {
            let planned = self.planned.entry(id).or_default();
            *planned = planned.with(kind, requests);
            self.load(id, self.seen(id));
        }
    }

    /// Removes a planned lease.
    pub(crate) fn unplan(&mut self, id: WorkerId, kind: Kind, requests: &Resources) {
        let Some(planned) = self.planned.get_mut(&id).filter(|_| kind.takes_a_slot()) else { return };
        *planned = planned.without(kind, requests);
        if *planned == Load::default() {
            self.planned.remove(&id);
        }
        self.load(id, self.seen(id));
    }

    /// Counts one slot of each worker as free before its row shows it, and returns the previous
    /// loads. Workers with reserved amounts are skipped, because the amounts that become free are
    /// unknown, and the first waiting request may need them.
    pub(crate) fn expect_slots(&mut self, ids: &[WorkerId]) -> Vec<(WorkerId, Load)> {
        let mut before = Vec::with_capacity(ids.len());
        for id in ids {
            let seen = self.seen(*id);
            if seen.reserved == Resources::default() {
                before.push((*id, seen));
                self.load(*id, Load { tasks: seen.tasks.saturating_sub(1), ..seen });
            }
        }
        before
    }

    /// Restores the previous loads.
    pub(crate) fn restore_seen(&mut self, before: Vec<(WorkerId, Load)>) {
        // A worker that is named twice has its true load in the first entry.
        before.into_iter().rev().for_each(|(id, seen)| self.load(id, seen));
    }

    /// Returns the load without planned leases and without slots that are expected to become free.
    /// Zero if the worker is unknown.
    pub(crate) fn seen(&self, id: WorkerId) -> Load {
        let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_ref());
        place.map(|place| place.seen).unwrap_or_default()
    }

    pub(super) fn with_planned(&self, id: WorkerId, seen: Load) -> Load {
        self.planned.get(&id).map_or(seen, |planned| seen.and(planned))
    }
}
