//! How many containers and volumes a worker has.
//!
//! Each report lists them. Those that are made before the next report are counted on top, because the scheduler
//! counts them against the limits of the worker at once. A destruction brings a report of its own.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard};

use domain::{ContainerHandle, VolumeHandle};
use runtime::Holdings;

use crate::util::keyed_locks::lock;

/// Containers and volumes on a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) containers: u64,
    pub(crate) volumes: u64,
}

/// Keeps [`Usage`] up to date.
#[derive(Debug, Default)]
pub(crate) struct UsageCounter(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    listed: Usage,
    /// Those that were not among them.
    made: CreatedSince,
}

/// What was made.
#[derive(Debug, Clone, Default)]
pub(crate) struct CreatedSince {
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

impl UsageCounter {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }

    /// What is there, as far as it is known.
    pub(crate) fn now(&self) -> Usage {
        let Inner { listed, made } = &*self.lock();
        Usage {
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

    /// All of them are about to be listed. Answers what [`UsageCounter::listed`] wants to know.
    pub(crate) fn begin(&self) -> CreatedSince {
        self.lock().made.clone()
    }

    /// These are there. `before`: what [`UsageCounter::begin`] answered before they were listed.
    pub(crate) fn listed(&self, there: &Holdings, before: &CreatedSince) {
        let Inner { listed, made } = &mut *self.lock();
        *listed = Usage { containers: count(there.containers.len()), volumes: count(there.volumes.len()) };
        forget(&mut made.containers, &before.containers, &there.containers);
        forget(&mut made.volumes, &before.volumes, &there.volumes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_counts_once_from_then_on() {
        let counts = UsageCounter::default();
        let [one, other, third] = [(); 3].map(|()| ContainerHandle::new());
        let volume = VolumeHandle::new();
        let list = |containers: &[ContainerHandle], volumes: &[VolumeHandle]| Holdings {
            containers: containers.to_vec(),
            volumes: volumes.to_vec(),
        };
        let usage = |containers, volumes| Usage { containers, volumes };
        counts.made_container(one);
        counts.made_volume(volume);
        assert_eq!(counts.now(), usage(1, 1));
        let before = counts.begin();
        // Both come while they are listed, and one of them is listed.
        counts.made_container(other);
        counts.made_container(third);
        counts.listed(&list(&[one, other], &[volume]), &before);
        assert_eq!(counts.now(), usage(3, 1));
        // What is not listed any more has been destroyed.
        let before = counts.begin();
        counts.listed(&list(&[other], &[]), &before);
        assert_eq!(counts.now(), usage(1, 0));
    }
}
