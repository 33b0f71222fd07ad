//! What this replica has planned for workers and their rows do not say yet. It counts on top of what they said last, until it is written, or
//! known not to be.

use domain::WorkerId;

use super::Index;
use crate::entity::lease::Kind;
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

    /// What is on a worker without what is planned for it. Nothing, where it is not known.
    pub(crate) fn seen(&self, id: WorkerId) -> Load {
        let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_ref());
        place.map(|place| place.seen).unwrap_or_default()
    }

    pub(super) fn with_planned(&self, id: WorkerId, seen: Load) -> Load {
        self.planned.get(&id).map_or(seen, |planned| seen.and(planned))
    }
}
