//! The disk guard: ends the container that wrote the most when the worker's disk is nearly full.
//!
//! On a full disk every container of the worker fails, and transfers too. The guard looks at the free space all the time, and at what
//! containers wrote only when less is free than transfers leave ([`room::reserve`]), because that means to walk their trees. What an
//! ended container wrote is deleted at once: nothing of it is published, and the disk would stay full until it is collected.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use domain::workload::FailureReason;
use domain::{AttemptId, VolumeHandle, chain};
use runtime::{Ended, RuntimeError};
use rustix::fs::{AtFlags, FileType, Stat, statat};
use transfer::TreeWalk;

use super::control::Request;
use super::files::{self, at};
use super::processes::{Process, Status};
use super::{Host, HostRuntime, volumes};
use crate::blocking::blocking;
use crate::locks::held;
use crate::room;

/// Pause between two looks at the free space.
const INTERVAL: Duration = Duration::from_secs(1);
/// The part of the file system's inodes that is kept free: one in so many.
const FREE_INODES: u64 = 100;

/// A process to end, and why.
struct Chosen {
    process: AttemptId,
    message: String,
}

/// What a container takes on the disk.
#[derive(Default)]
struct Taken {
    bytes: u64,
    inodes: u64,
    /// Files with several names that were counted.
    seen: HashSet<(u64, u64)>,
}

impl HostRuntime {
    /// Keeps some of the disk free. Ends only by being dropped.
    pub async fn guard_disk(self: Arc<Self>) {
        loop {
            let host = Arc::clone(&self.host);
            let done = match blocking(move || host.choose_to_end()).await {
                Ok(None) => Ok(()),
                Ok(Some(chosen)) => self.end_for_disk(chosen).await,
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                tracing::warn!(error = chain(&error), "cannot keep the disk free");
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn end_for_disk(&self, Chosen { process: id, message }: Chosen) -> Result<(), RuntimeError> {
        tracing::warn!(process.id = %id, reason = message, "ending a container to keep the disk usable");
        let process = self.host.find(id)?;
        // Nothing is written down here: the disk is full.
        self.host.tell(&process, &Request::EndForDisk(message)).await?;
        match Host::wait(&self.host, id).await? {
            Ended::Unknown(failure) if failure.reason == FailureReason::DiskFull => {}
            // The process ended by itself before it was told to. Its outputs are published.
            _ => return Ok(()),
        }
        let host = Arc::clone(&self.host);
        blocking(move || {
            host.hold.check()?;
            host.delete_written(&process)
        })
        .await
    }
}

impl Host {
    /// The process to end because the disk is nearly full.
    fn choose_to_end(&self) -> Result<Option<Chosen>, RuntimeError> {
        let state = &self.config.state_dir;
        let disk = rustix::fs::statvfs(state).map_err(|error| at("measure", state)(error.into()))?;
        let [total, free] = [disk.f_blocks, disk.f_bavail].map(|blocks| blocks.saturating_mul(disk.f_frsize));
        let missing = room::reserve(total).saturating_sub(free);
        let missing_inodes = (disk.f_files / FREE_INODES).saturating_sub(disk.f_favail);
        if missing == 0 && missing_inodes == 0 {
            return Ok(None);
        }
        let processes: Vec<_> =
            held(&self.processes).iter().map(|(id, container)| (*id, *container)).collect();
        let mut most = None;
        for (id, container) in processes {
            let process = Process::new(self, container, id);
            if matches!(self.status(&process), Ok(Status::Started)) {
                let taken = self.taken(&process)?;
                most = most.max(Some((if missing > 0 { taken.bytes } else { taken.inodes }, id)));
            }
        }
        // A container that wrote less than is missing is not the cause.
        let chosen = most.filter(|(taken, _)| *taken >= if missing > 0 { missing } else { missing_inodes });
        Ok(chosen.map(|(taken, process)| {
            let wrote = if missing > 0 {
                format!("{} MiB; {} MiB are free", taken >> 20, free >> 20)
            } else {
                format!("{taken} files; {} more can be made", disk.f_favail)
            };
            let message =
                format!("the worker's disk is nearly full, and this container wrote the most: {wrote}");
            Chosen { process, message }
        }))
    }

    fn taken(&self, process: &Process) -> Result<Taken, RuntimeError> {
        let mut taken = Taken::default();
        for (_, layer) in self.layers_of(process)? {
            if let Err(error) = taken.add_tree(&layer) {
                tracing::debug!(path = %layer.display(), %error, "cannot walk all of a tree");
            }
        }
        for pid in self.cgroups.processes(&process.cgroup()) {
            // It may have ended.
            taken.add_unlinked(pid).unwrap_or_default();
        }
        Ok(taken)
    }

    /// Where the container of a process writes on the disk: the volumes with their top layers, and its own layer.
    fn layers_of(&self, process: &Process) -> Result<Vec<(Option<VolumeHandle>, PathBuf)>, RuntimeError> {
        let mut found = vec![(None, self.container(process.container).join("upper"))];
        let Some(container) = self.read_container(process.container)? else { return Ok(found) };
        let directory = self.config.state_dir.join("volumes");
        for volume in container.written() {
            let top = volumes::layers(&directory, volume)?.into_iter().next();
            found.extend(top.map(|top| (Some(volume), top)));
        }
        Ok(found)
    }

    /// Deletes what an ended container wrote.
    fn delete_written(&self, process: &Process) -> Result<(), RuntimeError> {
        for (volume, layer) in self.layers_of(process)? {
            if let Some(volume) = volume {
                self.volumes.unmount(volume)?;
            }
            for entry in fs::read_dir(&layer).map_err(at("list", &layer))? {
                let path = entry.map_err(at("list", &layer))?.path();
                files::remove_tree(&path).map_err(at("remove", &path))?;
            }
        }
        Ok(())
    }
}

impl Taken {
    fn add(&mut self, found: &Stat) {
        if found.st_nlink < 2 || self.seen.insert((found.st_dev, found.st_ino)) {
            self.bytes += u64::try_from(found.st_blocks).unwrap_or(0) * 512;
            self.inodes += 1;
        }
    }

    /// Adds what can be read of a tree, which may change meanwhile.
    fn add_tree(&mut self, root: &Path) -> io::Result<()> {
        let mut walk = TreeWalk::open(root)?;
        loop {
            let Some(name) = walk.next_name()? else {
                if walk.leave()?.is_none() {
                    return Ok(());
                }
                continue;
            };
            let Ok(found) = statat(walk.directory(), &*name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if !FileType::from_raw_mode(found.st_mode).is_dir() {
                self.add(&found);
            } else if walk.enter(&name).is_ok() {
                self.inodes += 1;
            }
        }
    }

    /// Adds files without a name that a process has open.
    fn add_unlinked(&mut self, pid: u32) -> io::Result<()> {
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let path = entry?.path();
            let Ok(found) = rustix::fs::stat(&path) else { continue };
            let is_file = FileType::from_raw_mode(found.st_mode).is_file();
            let in_memory = || rustix::fs::statfs(&path).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC);
            if is_file
                && found.st_nlink == 0
                && !in_memory()
                && self.seen.insert((found.st_dev, found.st_ino))
            {
                self.add(&found);
            }
        }
        Ok(())
    }
}
