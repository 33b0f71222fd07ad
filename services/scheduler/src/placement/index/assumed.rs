//! What this replica has planned for workers and their rows do not say yet. It counts on top of what they said last, until it is written, or
//! known not to be. While it is planned who gets what is being given back, that counts as free ([`Index::expect_slots`]).

use domain::WorkerId;

use super::Index;
use crate::placement::Kind;
use crate::placement::{Load, Resources};

impl Index {
    /// Plans a lease that is for `kind` and asks for `requests`.
    pub(crate) fn plan(&mut self, id: WorkerId, kind: Kind, requests: &Resources) {
        if kind.takes_a_slot() {
            let planned = self.planned.entry(id).or_default();
            *planned = planned.with(kind, requests);
            self.load(id, self.seen(id));
        }
    }

    /// It is planned no more.
    pub(crate) fn unplan(&mut self, id: WorkerId, kind: Kind, requests: &Resources) {
        let Some(planned) = self.planned.get_mut(&id).filter(|_| kind.takes_a_slot()) else { return };
        *planned = planned.without(kind, requests);
        if *planned == Load::default() {
            self.planned.remove(&id);
        }
        self.load(id, self.seen(id));
    }

    /// From now on a slot of each of these counts as free that its row does not say yet. Answers what was seen before. Nothing is expected where
    /// amounts are reserved: with the slot more comes free than can be known here, and who is first may have waited for that.
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

    /// What was seen before counts again.
    pub(crate) fn is_as_seen(&mut self, before: Vec<(WorkerId, Load)>) {
        // One that is named twice was seen first as it is.
        before.into_iter().rev().for_each(|(id, seen)| self.load(id, seen));
    }

    /// What is on a worker without what is planned for it, and less what is expected to come free. Nothing, where it is not known.
    pub(crate) fn seen(&self, id: WorkerId) -> Load {
        let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_ref());
        place.map(|place| place.seen).unwrap_or_default()
    }

    pub(super) fn with_planned(&self, id: WorkerId, seen: Load) -> Load {
        self.planned.get(&id).map_or(seen, |planned| seen.and(planned))
    }
}
