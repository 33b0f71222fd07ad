//! Counts: how many containers and volumes the worker has.
//!
//! They are listed for each report, and what is made until the next one is counted on top, so that the scheduler, which counts them against the worker's
//! limits, does not wait for the next report to learn of them. What is destroyed brings a report of its own.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use domain::{ContainerHandle, VolumeHandle};
use runtime::Holdings;

/// Containers and volumes on a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) containers: u64,
    pub(crate) volumes: u64,
}

/// Keeps [`Held`] up to date.
#[derive(Debug, Default)]
pub(crate) struct Counts(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    listed: Held,
    /// Those that were not among them.
    made: Made,
}

/// What was made.
#[derive(Debug, Clone, Default)]
pub(crate) struct Made {
    containers: HashSet<ContainerHandle>,
    volumes: HashSet<VolumeHandle>,
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// Forgets of `made` what is listed, and what was made before and is not there any more.
fn forget<H: Eq + Hash>(made: &mut HashSet<H>, before: &HashSet<H>, listed: &[H]) {
    let listed: HashSet<_> = listed.iter().collect();
    made.retain(|handle| !before.contains(handle) && !listed.contains(handle));
}

impl Counts {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is there, as far as it is known.
    pub(crate) fn now(&self) -> Held {
        let Inner { listed, made } = &*self.lock();
        Held {
            containers: listed.containers.saturating_add(count(made.containers.len())),
            volumes: listed.volumes.saturating_add(count(made.volumes.len())),
        }
    }

    /// This one was made.
    pub(crate) fn made_container(&self, container: ContainerHandle) {
        self.lock().made.containers.insert(container);
    }

    /// This one was made.
    pub(crate) fn made_volume(&self, volume: VolumeHandle) {
        self.lock().made.volumes.insert(volume);
    }

    /// All of them are about to be listed. Answers what [`Counts::listed`] wants to know.
    pub(crate) fn begin(&self) -> Made {
        self.lock().made.clone()
    }

    /// These are there. `before`: what [`Counts::begin`] answered before they were listed.
    pub(crate) fn listed(&self, there: &Holdings, before: &Made) {
        let Inner { listed, made } = &mut *self.lock();
        *listed = Held { containers: count(there.containers.len()), volumes: count(there.volumes.len()) };
        forget(&mut made.containers, &before.containers, &there.containers);
        forget(&mut made.volumes, &before.volumes, &there.volumes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_counts_once_from_then_on() {
        let counts = Counts::default();
        let [one, other, third] = [(); 3].map(|()| ContainerHandle::new());
        let volume = VolumeHandle::new();
        let list = |containers: &[ContainerHandle], volumes: &[VolumeHandle]| Holdings {
            containers: containers.to_vec(),
            volumes: volumes.to_vec(),
        };
        let held = |containers, volumes| Held { containers, volumes };
        counts.made_container(one);
        counts.made_volume(volume);
        assert_eq!(counts.now(), held(1, 1));
        let before = counts.begin();
        // Both come while they are listed, and one of them is listed.
        counts.made_container(other);
        counts.made_container(third);
        counts.listed(&list(&[one, other], &[volume]), &before);
        assert_eq!(counts.now(), held(3, 1));
        // What is not listed any more has been destroyed.
        let before = counts.begin();
        counts.listed(&list(&[other], &[]), &before);
        assert_eq!(counts.now(), held(1, 0));
    }
}
