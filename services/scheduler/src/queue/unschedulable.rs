//! What was refused for good: demands that no worker that was known could ever take. It never waits, so nothing else tells whoever adds workers of it.
//!
//! In the memory of the replica that refused it, for [`KEPT`] after the last time, and of [`MOST`] shapes at most.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use domain::Timestamp;

use crate::placement::{Demand, Shape};

/// How long it is told after the last time.
const KEPT: Duration = Duration::from_secs(10 * 60);
/// Of more shapes than this the one that was refused longest ago is forgotten.
const MOST: usize = 1000;

/// What was refused that asks for the same.
#[derive(Debug, Clone)]
pub(crate) struct Unplaceable {
    pub(crate) demand: Demand,
    pub(crate) count: usize,
    pub(crate) first: Timestamp,
    last: Timestamp,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct RefusedShapes(HashMap<Arc<Shape>, Unplaceable>);

impl RefusedShapes {
    /// This was refused now.
    pub(crate) fn note(&mut self, demand: &Demand, now: Timestamp) {
        if let Some(known) = self.0.get_mut(&demand.shape) {
            known.begin_anew_if_old(now);
            (known.count, known.last) = (known.count + 1, now);
            return;
        }
        if self.0.len() >= MOST {
            let oldest = self.0.iter().min_by_key(|(_, refused)| refused.last);
            if let Some(oldest) = oldest.map(|(shape, _)| shape.clone()) {
                self.0.remove(&oldest);
            }
        }
        let refused = Unplaceable { demand: demand.clone(), count: 1, first: now, last: now };
        self.0.insert(demand.shape.clone(), refused);
    }

    /// What was refused lately.
    pub(crate) fn lately(&mut self, now: Timestamp) -> Vec<Unplaceable> {
        self.forget(now);
        self.0.values().cloned().collect()
    }

    fn forget(&mut self, now: Timestamp) {
        self.0.retain(|_, refused| !refused.is_old(now));
    }
}

impl Unplaceable {
    fn is_old(&self, now: Timestamp) -> bool {
        now.since(self.last) > KEPT
    }

    fn begin_anew_if_old(&mut self, now: Timestamp) {
        if self.is_old(now) {
            (self.count, self.first) = (0, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::placement::{Process, Purpose, Resources};

    fn demand(tag: usize) -> Demand {
        let shape = Shape {
            team: "main".to_owned(),
            platform: "linux".to_owned(),
            tags: vec![tag.to_string()],
            process: Some(Process::default()),
            requests: Resources::default(),
            purpose: Purpose::WithoutInputs,
        };
        shape.asked_by(Uuid::now_v7())
    }

    #[test]
    fn what_was_refused_is_counted_by_shape_and_forgotten_in_the_end() {
        let (mut refused, began) = (RefusedShapes::default(), Timestamp(0));
        refused.note(&demand(1), began);
        refused.note(&demand(1), began + KEPT);
        refused.note(&demand(2), began + KEPT);
        let mut told = refused.lately(began + KEPT * 2);
        told.sort_by_key(|one| one.count);
        let counts = |told: &[Unplaceable]| told.iter().map(|one| (one.count, one.first)).collect::<Vec<_>>();
        assert_eq!(counts(&told), [(1, began + KEPT), (2, began)]);
        let later = began + KEPT * 2 + Duration::from_secs(1);
        // It is told no more, and counted from one when it comes again.
        refused.note(&demand(1), later);
        assert_eq!(counts(&refused.lately(later)), [(1, later)]);
    }

    #[test]
    fn of_too_many_the_oldest_is_forgotten() {
        let mut refused = RefusedShapes::default();
        for number in 0..=MOST {
            refused.note(&demand(number), Timestamp(0) + Duration::from_millis(number as u64));
        }
        let told = refused.lately(Timestamp(0));
        assert_eq!(told.len(), MOST);
        assert!(told.iter().all(|one| one.demand.shape.tags != ["0"]), "the first is gone");
    }
}
