//! Number of containers and volumes on a worker.
//!
//! Each report lists them. Those that are created after a listing are added, because the scheduler
//! immediately counts them against the limits of the worker. A destruction triggers a report.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard};

use domain::{ContainerHandle, VolumeHandle};
use runtime::Holdings;

use crate::util::keyed_locks::lock;

/// Number of containers and volumes on a worker.
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
    /// Containers and volumes that the last listing did not contain.
    created: CreatedSince,
}

/// Containers and volumes that were created.
#[derive(Debug, Clone, Default)]
pub(crate) struct CreatedSince {
    containers: HashSet<ContainerHandle>,
    volumes: HashSet<VolumeHandle>,
}

fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// Removes from `created` the handles that are listed, and those from before the listing that no
/// longer exist.
fn forget<H: Eq + Hash>(created: &mut HashSet<H>, before: &HashSet<H>, listed: &[H]) {
    let listed: HashSet<_> = listed.iter().collect();
    created.retain(|handle| !before.contains(handle) && !listed.contains(handle));
}

impl UsageCounter {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }

    /// Returns the current numbers.
    pub(crate) fn now(&self) -> Usage {
        let Inner { listed, created } = &*self.lock();
        Usage {
            containers: listed.containers.saturating_add(count(created.containers.len())),
            volumes: listed.volumes.saturating_add(count(created.volumes.len())),
        }
    }

    /// Counts a container that was created.
    pub(crate) fn add_container(&self, container: ContainerHandle) {
        self.lock().created.containers.insert(container);
    }

    /// Counts a volume that was created.
    pub(crate) fn add_volume(&self, volume: VolumeHandle) {
        self.lock().created.volumes.insert(volume);
    }

    /// Begins a listing. The result must be passed to [`UsageCounter::finish_listing`].
    pub(crate) fn begin_listing(&self) -> CreatedSince {
        self.lock().created.clone()
    }

    /// Ends a listing with the handles in `holdings`. `before` is the result of
    /// [`UsageCounter::begin_listing`].
    pub(crate) fn finish_listing(&self, holdings: &Holdings, before: &CreatedSince) {
        let Inner { listed, created } = &mut *self.lock();
        *listed =
            Usage { containers: count(holdings.containers.len()), volumes: count(holdings.volumes.len()) };
        forget(&mut created.containers, &before.containers, &holdings.containers);
        forget(&mut created.volumes, &before.volumes, &holdings.volumes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_handles_are_counted_once() {
        let counts = UsageCounter::default();
        let [one, other, third] = [(); 3].map(|()| ContainerHandle::new());
        let volume = VolumeHandle::new();
        let list = |containers: &[ContainerHandle], volumes: &[VolumeHandle]| Holdings {
            containers: containers.to_vec(),
            volumes: volumes.to_vec(),
        };
        let usage = |containers, volumes| Usage { containers, volumes };
        counts.add_container(one);
        counts.add_volume(volume);
        assert_eq!(counts.now(), usage(1, 1));
        let before = counts.begin_listing();
        // Two containers are created during the listing. Only one of them is listed.
        counts.add_container(other);
        counts.add_container(third);
        counts.finish_listing(&list(&[one, other], &[volume]), &before);
        assert_eq!(counts.now(), usage(3, 1));
        // A container that is no longer listed was destroyed.
        let before = counts.begin_listing();
        counts.finish_listing(&list(&[other], &[]), &before);
        assert_eq!(counts.now(), usage(1, 0));
    }
}
