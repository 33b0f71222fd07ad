//! The ranking of replicas as sources of a copy.

use std::collections::HashMap;

use domain::{VolumeHandle, WorkerId};

/// Most sources of one copy.
const MAX_SOURCES: usize = 100;

/// A replica that may be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Replica {
    pub(crate) worker: WorkerId,
    pub(crate) volume: VolumeHandle,
    /// Whether its bytes were hashed after they were written.
    pub(crate) is_verified: bool,
}

/// The rank of a source. The least one is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    is_unverified: bool,
    is_in_other_zone: bool,
    /// Copies that are read from the worker now.
    copies: usize,
}

/// Returns the rank of a replica. `is_near`: its worker is in the zone of the destination.
pub(crate) fn rank(replica: &Replica, is_near: bool, readers: &HashMap<WorkerId, usize>) -> Rank {
    Rank {
        is_unverified: !replica.is_verified,
        is_in_other_zone: !is_near,
        copies: readers.get(&replica.worker).copied().unwrap_or_default(),
    }
}

/// Returns the replicas on other workers. If there are too many, the best ones are kept, as far as
/// that is known without their zones.
pub(crate) fn candidates(
    mut replicas: Vec<Replica>,
    destination: WorkerId,
    readers: &HashMap<WorkerId, usize>,
) -> Vec<Replica> {
    replicas.retain(|replica| replica.worker != destination);
    replicas.sort_by_key(|replica| rank(replica, false, readers));
    replicas.truncate(MAX_SOURCES);
    replicas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verified_then_near_then_idle_sources_come_first() {
        let workers: [WorkerId; 5] = std::array::from_fn(|_| WorkerId::new());
        let [near, busy, idle, reported, destination] = workers;
        let replica = |worker, is_verified| Replica { worker, volume: VolumeHandle::new(), is_verified };
        let replicas = vec![
            replica(destination, true),
            replica(reported, false),
            replica(near, true),
            replica(busy, true),
            replica(idle, true),
        ];
        let readers = HashMap::from([(busy, 2), (near, 3)]);
        let mut candidates = candidates(replicas, destination, &readers);
        let order = |ranked: &[Replica]| ranked.iter().map(|replica| replica.worker).collect::<Vec<_>>();
        assert_eq!(order(&candidates), [idle, busy, near, reported]);
        candidates.sort_by_key(|replica| rank(replica, [near, reported].contains(&replica.worker), &readers));
        assert_eq!(order(&candidates), [near, idle, busy, reported]);
    }
}
