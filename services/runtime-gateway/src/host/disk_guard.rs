//! The disk guard: ends the container that wrote the most when the worker's disk is nearly full.
//!
//! On a full disk every container of the worker fails, and transfers too. The guard looks at the free space all the time, and at what
//! containers wrote only when less is free than transfers leave ([`room::reserve`]), because that means to walk their trees. What containers whose
//! process has ended wrote into their roots goes first: nobody reads it. What a container wrote that is ended here is deleted at once: nothing
//! of it is published, and the disk would stay full until it is collected.
//!
//! Files without a name count if a process has them open or mapped. Those of which the only descriptor is on its way through a socket are not seen.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use domain::workload::FailureReason;
use domain::{AttemptId, ContainerHandle, VolumeHandle, chain};
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

/// Most open files of one container that are looked at. A container with more is taken for the one that wrote the most.
const MOST_OPEN: u64 = 1_000_000;

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
    /// The device of the state directory.
    device: u64,
    /// Open and mapped files that were looked at.
    open: u64,
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
        if self.delete_roots_of_ended(&processes)? {
            return Ok(None);
        }
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
        let state = &self.config.state_dir;
        let device = rustix::fs::stat(state).map_err(|error| at("look at", state)(error.into()))?.st_dev;
        let mut taken = Taken { device, ..Taken::default() };
        for (_, layer) in self.layers_of(process)? {
            if let Err(error) = taken.add_tree(&layer) {
                tracing::debug!(path = %layer.display(), %error, "cannot walk all of a tree");
            }
        }
        for pid in self.cgroups.processes(&process.cgroup()) {
            // It may have ended.
            taken.add_unlinked(pid).unwrap_or_default();
        }
        if taken.open > MOST_OPEN {
            (taken.bytes, taken.inodes) = (u64::MAX, u64::MAX);
        }
        Ok(taken)
    }

    /// Deletes what containers wrote into their roots in which nothing runs. Answers whether there was anything.
    fn delete_roots_of_ended(
        &self,
        processes: &[(AttemptId, ContainerHandle)],
    ) -> Result<bool, RuntimeError> {
        let is_over = |(id, container): &(AttemptId, ContainerHandle)| {
            matches!(self.status(&Process::new(self, *container, *id)), Ok(Status::Ended(_)))
        };
        let (ended, live): (Vec<_>, Vec<_>) = processes.iter().copied().partition(is_over);
        let mut deleted = false;
        for (_, container) in ended {
            if live.iter().any(|(_, other)| *other == container) {
                continue;
            }
            self.hold.check()?;
            let root = self.container(container).join("upper");
            deleted |= empty(&root).unwrap_or_else(|error| {
                tracing::debug!(path = %root.display(), %error, "cannot delete what an ended container wrote");
                false
            });
        }
        Ok(deleted)
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
            empty(&layer).map_err(at("empty", &layer))?;
        }
        Ok(())
    }
}

/// Deletes everything in a directory. Answers whether there was anything.
fn empty(directory: &Path) -> io::Result<bool> {
    let mut deleted = false;
    for entry in fs::read_dir(directory)? {
        files::remove_tree(&entry?.path())?;
        deleted = true;
    }
    Ok(deleted)
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

    /// Adds files without a name that a process has open or mapped.
    fn add_unlinked(&mut self, pid: u32) -> io::Result<()> {
        self.add_unlinked_in(Path::new(&format!("/proc/{pid}/map_files")))?;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?;
            let thread = task.file_name().to_str().and_then(|id| id.parse().ok());
            // Threads mostly have the descriptors of the first one.
            if thread == Some(pid) || thread.is_some_and(|thread| !has_descriptors_of(thread, pid)) {
                // It may have ended.
                self.add_unlinked_in(&task.path().join("fd")).unwrap_or_default();
            }
        }
        Ok(())
    }

    fn add_unlinked_in(&mut self, links: &Path) -> io::Result<()> {
        for entry in fs::read_dir(links)? {
            self.open += 1;
            if self.open > MOST_OPEN {
                return Ok(());
            }
            let path = entry?.path();
            let Ok(found) = rustix::fs::stat(&path) else { continue };
            let is_file = FileType::from_raw_mode(found.st_mode).is_file();
            // What is mapped is told of the layer below.
            let in_memory = || {
                found.st_dev != self.device
                    && rustix::fs::statfs(&path).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC)
            };
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

/// Whether a thread has the very descriptors of another.
fn has_descriptors_of(thread: u32, other: u32) -> bool {
    const FILES: libc::c_long = 2;
    // SAFETY: takes no pointers. KCMP_FILES of kcmp(2).
    let compared = unsafe {
        libc::syscall(libc::SYS_kcmp, libc::c_long::from(thread), libc::c_long::from(other), FILES, 0, 0)
    };
    compared == 0
}
