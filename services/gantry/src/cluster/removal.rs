//! Removal of the state directory of a running cluster.
//!
//! The kernel reports changes of the directory and of its lock file (inotify). A change of a parent
//! directory is not reported, so the path is also checked at intervals.

use std::path::Path;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

use super::Paths;
use super::lock::Lock;

/// Interval between two checks that the state directory exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between two checks if the kernel reports changes.
const WATCHED_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Resolves when the state directory was removed or renamed.
pub(super) async fn state_is_lost(paths: &Paths, lock: &Lock) {
    let path = paths.lock();
    let changes = watch(&[&paths.state, &path]);
    if let Err(error) = &changes {
        tracing::debug!(%error, "cannot watch the state directory; checking it more often");
    }
    while lock.is_at(&path) {
        match &changes {
            Ok(changes) => _ = tokio::time::timeout(WATCHED_CHECK_INTERVAL, next(changes)).await,
            Err(_) => tokio::time::sleep(CHECK_INTERVAL).await,
        }
    }
}

/// Watches the removal and renaming of files.
fn watch(files: &[&Path]) -> std::io::Result<AsyncFd<rustix::fd::OwnedFd>> {
    let watched = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    // The removal of a file that is open changes only its number of links.
    let flags = WatchFlags::ATTRIB | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
    for file in files {
        inotify::add_watch(&watched, *file, flags)?;
    }
    // SAFETY: the descriptor is open until the value is dropped, because the value owns it.
    unsafe { AsyncFd::register(watched) }.map_err(Into::into)
}

/// Resolves after the next changes.
async fn next(changes: &AsyncFd<rustix::fd::OwnedFd>) {
    // Readiness fails only when the runtime ends.
    let Ok(mut ready) = changes.readable().await else { return std::future::pending().await };
    let mut events = [0; 4096];
    while rustix::io::read(changes.get_ref(), &mut events).is_ok_and(|length| length > 0) {}
    ready.clear_ready();
}
