//! The disk guard: ends the container that wrote the most when the worker's disk is nearly full.
//!
//! On a full disk every container of the worker fails, and transfers too. The guard looks at the free space all the time, and at what
//! containers wrote only when less is free than transfers leave ([`room::reserve`]), because that means to walk their trees.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use domain::AttemptId;
use domain::chain;
use runtime::RuntimeError;
use rustix::fs::{AtFlags, FileType, statat};
use transfer::TreeWalk;

use super::control::Request;
use super::processes::{Process, Status};
use super::{Host, HostRuntime, disk, volumes};
use crate::blocking::blocking;
use crate::locks::held;
use crate::room;

/// Pause between two looks at the free space.
const INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a container was ended, in which the gateway removes what it wrote.
const RECOVERY: Duration = Duration::from_secs(10);

impl HostRuntime {
    /// Keeps some of the disk free. Ends only by being dropped.
    pub async fn guard_disk(self: Arc<Self>) {
        loop {
            let host = Arc::clone(&self.host);
            let ended = match blocking(move || host.choose_to_end()).await {
                Ok(None) => false,
                Ok(Some((process, message))) => {
                    tracing::warn!(process.id = %process, reason = message, "ending a container to keep the disk usable");
                    self.end_for_disk(process, message).await
                }
                Err(error) => {
                    tracing::warn!(error = chain(&error), "cannot look at the free space of the disk");
                    false
                }
            };
            tokio::time::sleep(if ended { RECOVERY } else { INTERVAL }).await;
        }
    }

    /// Whether it was ended, or had ended.
    async fn end_for_disk(&self, id: AttemptId, message: String) -> bool {
        let told = match self.host.find(id) {
            // Nothing is written here: the disk is full.
            Ok(process) => self.host.tell(&process, &Request::EndForDisk(message)).await.map(|_| ()),
            Err(error) => Err(error),
        };
        if let Err(error) = &told {
            tracing::warn!(process.id = %id, error = chain(error), "cannot end a container that filled the disk");
        }
        told.is_ok()
    }
}

impl Host {
    /// The process to end because the disk is nearly full, and why.
    fn choose_to_end(&self) -> Result<Option<(AttemptId, String)>, RuntimeError> {
        let state = disk(&self.config.state_dir)?;
        let wanted = room::reserve(state.total_bytes);
        let missing = wanted.saturating_sub(state.free_bytes);
        if missing == 0 {
            return Ok(None);
        }
        let processes: Vec<_> =
            held(&self.processes).iter().map(|(id, container)| (*id, *container)).collect();
        let mut most = None;
        for (id, container) in processes {
            let process = Process::new(self, container, id);
            if !matches!(self.status(&process), Ok(Status::Started)) {
                continue;
            }
            let written = self.layers_of(&process)?.iter().map(|path| allocated(path)).sum::<u64>();
            most = most.max(Some((written, id)));
        }
        // A container that wrote less than is missing is not the cause.
        let chosen = most.filter(|(written, _)| *written >= missing);
        Ok(chosen.map(|(written, id)| {
            let [written, free] = [written, state.free_bytes].map(|bytes| bytes >> 20);
            let message = format!(
                "the worker's disk is nearly full ({free} MiB free); this container wrote the most, {written} MiB"
            );
            (id, message)
        }))
    }

    /// Where the container of a process writes on the disk.
    fn layers_of(&self, process: &Process) -> Result<Vec<PathBuf>, RuntimeError> {
        let mut found = vec![self.container(process.container).join("upper")];
        let Some(container) = self.read_container(process.container)? else { return Ok(found) };
        let directory = self.config.state_dir.join("volumes");
        for volume in container.written() {
            found.extend(volumes::layers(&directory, volume)?.into_iter().next());
        }
        Ok(found)
    }
}

/// The space that a tree takes on the disk, in bytes. Counts what can be read: the tree changes while it is walked.
fn allocated(root: &Path) -> u64 {
    let mut total = 0;
    let mut count = || {
        let mut walk = TreeWalk::open(root)?;
        loop {
            let Some(name) = walk.next_name()? else {
                if walk.leave()?.is_none() {
                    return Ok::<_, io::Error>(());
                }
                continue;
            };
            let Ok(found) = statat(walk.directory(), &*name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            total += u64::try_from(found.st_blocks).unwrap_or(0) * 512;
            if FileType::from_raw_mode(found.st_mode).is_dir() {
                // A directory that was removed meanwhile.
                let _ = walk.enter(&name);
            }
        }
    };
    if let Err(error) = count() {
        tracing::debug!(path = %root.display(), %error, "cannot walk all of a tree");
    }
    total
}
