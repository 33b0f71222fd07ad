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

/// Returns the replicas on other workers, verified ones first, then those with the fewest copies.
pub(crate) fn rank(
    mut replicas: Vec<Replica>,
    destination: WorkerId,
    readers: &HashMap<WorkerId, usize>,
) -> Vec<Replica> {
    replicas.retain(|replica| replica.worker != destination);
    replicas.sort_by_key(|replica| {
        (!replica.is_verified, readers.get(&replica.worker).copied().unwrap_or_default())
    });
    replicas.truncate(MAX_SOURCES);
    replicas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verified_and_idle_sources_come_first() {
        let workers: [WorkerId; 4] = std::array::from_fn(|_| WorkerId::new());
        let [busy, idle, reported, destination] = workers;
        let replica = |worker, is_verified| Replica { worker, volume: VolumeHandle::new(), is_verified };
        let replicas = vec![
            replica(destination, true),
            replica(reported, false),
            replica(busy, true),
            replica(idle, true),
        ];
        let ranked = rank(replicas, destination, &HashMap::from([(busy, 2)]));
        let ranked: Vec<_> = ranked.into_iter().map(|replica| replica.worker).collect();
        assert_eq!(ranked, [idle, busy, reported]);
    }
}
