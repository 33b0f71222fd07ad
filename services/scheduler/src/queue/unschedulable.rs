//! Rejected demands that no known worker could ever take, for autoscalers. Such demands never wait,
//! so the queue does not show them.
//!
//! Kept in memory by the replica that rejected them, for [`KEPT`] after the last rejection, and for
//! at most [`MOST`] shapes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use domain::Timestamp;

use crate::placement::{Demand, Shape};

/// Time for which a rejected demand is listed after its last rejection.
const KEPT: Duration = Duration::from_secs(10 * 60);
/// Maximum number of shapes. The one with the oldest rejection is replaced.
const MOST: usize = 1000;

/// Rejected demands of one shape.
#[derive(Debug, Clone)]
pub(crate) struct RejectedDemand {
    pub(crate) demand: Demand,
    pub(crate) count: usize,
    pub(crate) first: Timestamp,
    last: Timestamp,
}

/// All rejected demands.
#[derive(Debug, Default)]
pub(crate) struct RejectedShapes(HashMap<Arc<Shape>, RejectedDemand>);

impl RejectedShapes {
    /// Records a rejection.
    pub(crate) fn note(&mut self, demand: &Demand, now: Timestamp) {
        if let Some(known) = self.0.get_mut(&demand.shape) {
            known.reset_if_expired(now);
            (known.count, known.last) = (known.count + 1, now);
            return;
        }
        if self.0.len() >= MOST {
            let oldest = self.0.iter().min_by_key(|(_, refused)| refused.last);
            if let Some(oldest) = oldest.map(|(shape, _)| shape.clone()) {
                self.0.remove(&oldest);
            }
        }
        let refused = RejectedDemand { demand: demand.clone(), count: 1, first: now, last: now };
        self.0.insert(demand.shape.clone(), refused);
    }

    /// Returns recent rejections.
    pub(crate) fn lately(&mut self, now: Timestamp) -> Vec<RejectedDemand> {
        self.forget(now);
        self.0.values().cloned().collect()
    }

    fn forget(&mut self, now: Timestamp) {
        self.0.retain(|_, refused| !refused.is_expired(now));
    }
}

impl RejectedDemand {
    fn is_expired(&self, now: Timestamp) -> bool {
        now.since(self.last) > KEPT
    }

    fn reset_if_expired(&mut self, now: Timestamp) {
        if self.is_expired(now) {
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
        shape.requested_by(Uuid::now_v7())
    }

    #[test]
    fn rejections_are_counted_by_shape_until_expired() {
        let (mut refused, began) = (RejectedShapes::default(), Timestamp(0));
        refused.note(&demand(1), began);
        refused.note(&demand(1), began + KEPT);
        refused.note(&demand(2), began + KEPT);
        let mut rejected = refused.lately(began + KEPT * 2);
        rejected.sort_by_key(|one| one.count);
        let counts = |rejected: &[RejectedDemand]| {
            rejected.iter().map(|one| (one.count, one.first)).collect::<Vec<_>>()
        };
        assert_eq!(counts(&rejected), [(1, began + KEPT), (2, began)]);
        let later = began + KEPT * 2 + Duration::from_secs(1);
        // An expired entry is not listed, and starts again from one.
        refused.note(&demand(1), later);
        assert_eq!(counts(&refused.lately(later)), [(1, later)]);
    }

    #[test]
    fn oldest_rejection_is_replaced_when_full() {
        let mut refused = RejectedShapes::default();
        for number in 0..=MOST {
            refused.note(&demand(number), Timestamp(0) + Duration::from_millis(number as u64));
        }
        let rejected = refused.lately(Timestamp(0));
        assert_eq!(rejected.len(), MOST);
        assert!(rejected.iter().all(|one| one.demand.shape.tags != ["0"]), "the first was replaced");
    }
}
