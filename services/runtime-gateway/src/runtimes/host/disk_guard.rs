//! Disk guard: ends containers that exceed their limit of the disk, and the container that has
//! written the most when the worker's disk is nearly full.
//!
//! Containers with a limit are measured one after another, with pauses: about once per second, and
//! at least a minute after the last time if that took long. Each is measured again at its end,
//! before its outputs are published. So a container may exceed its limit only while it runs, by
//! what it writes between two measurements.
//!
//! On a full disk, all containers and transfers of the worker fail. The guard polls the free space.
//! It walks the trees of containers only when less is free than transfers leave
//! ([`crate::util::disk_reserve::reserve`]). First it deletes the root layers of containers whose
//! process has ended. Then it ends the container that has written the most, and deletes its data.
//! The data is not published, and would fill the disk until it is collected.
//!
//! Unlinked files count if a process has them open or mapped. A file whose only descriptor is in
//! the queue of a socket does not count.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::workload::{Failure, FailureReason};
use domain::{ContainerHandle, ProcessId, VolumeHandle, error_chain};
use futures::future::join_all;
use runtime::{Ended, RuntimeError};
use rustix::fs::{AtFlags, FileType, Stat, statat};
use transfer::TreeWalk;

use super::filesystem::{self, at};
use super::processes::{Process, Status};
use super::supervisor_protocol::Request;
use super::{Host, HostRuntime, volumes};
use crate::util::blocking::blocking;
use crate::util::disk_reserve;
use crate::util::keyed_locks::lock;

/// Poll interval of the free space while a process runs.
const INTERVAL: Duration = Duration::from_secs(1);
/// Poll interval of the free space while no process runs. Only root layers of ended containers can
/// be deleted then.
const IDLE_INTERVAL: Duration = Duration::from_secs(30);
/// The shortest pause between two measurements of a container with a limit, as a multiple of the
/// time that the first one took.
const MEASURE_PAUSE_FACTOR: u32 = 20;
/// Maximum of that pause.
const MAX_MEASURE_PAUSE: Duration = Duration::from_secs(60);
/// Reserved inodes of the file system, as a fraction: 1/100.
const FREE_INODES: u64 = 100;

/// Limit of open files and of mapped files that the guard checks per container. A container with
/// more open files counts as the one that has written the most.
const MAX_LOOKED_AT: u64 = 1_000_000;

/// Free space and free inodes of the disk.
struct Disk {
    free: u64,
    missing: u64,
    free_inodes: u64,
    missing_inodes: u64,
}

impl Disk {
    fn is_short(&self) -> bool {
        self.missing > 0 || self.missing_inodes > 0
    }
}

/// A process to end.
struct GuardDecision {
    process: ProcessId,
    /// The request to its supervisor, with the reason.
    request: Request,
}

/// The limit of a container, and when it is measured next.
struct Watch {
    limit: Option<u64>,
    due: Instant,
}

/// Disk usage of a container.
#[derive(Default)]
struct DiskUsage {
    bytes: u64,
    inodes: u64,
    /// The device of the state directory.
    device: u64,
    /// Number of open files that were checked.
    open: u64,
    /// Number of mapped files that were checked.
    mapped: u64,
    /// Files with several names that were counted.
    seen: HashSet<(u64, u64)>,
}

impl HostRuntime {
    /// Runs the disk guard. The future never completes.
    pub async fn guard_disk(self: Arc<Self>) {
        let free = async {
            loop {
                if let Err(error) = self.free_disk().await {
                    tracing::warn!(error = error_chain(&error), "cannot keep the disk free");
                }
                tokio::time::sleep(INTERVAL).await;
                _ = tokio::time::timeout(IDLE_INTERVAL, self.host.until_any_runs()).await;
            }
        };
        // Containers with a limit must not delay the protection of the disk.
        let limit = async {
            let mut watched = HashMap::new();
            loop {
                if let Err(error) = self.keep_limits(&mut watched).await {
                    tracing::warn!(error = error_chain(&error), "cannot check limits of the disk");
                }
                tokio::time::sleep(INTERVAL).await;
                self.host.until_any_runs().await;
            }
        };
        tokio::join!(free, limit);
    }

    async fn free_disk(&self) -> Result<(), RuntimeError> {
        let host = Arc::clone(&self.host);
        if !blocking(move || host.measure().map(|disk| disk.is_short())).await? {
            return Ok(());
        }
        self.delete_roots_of_ended().await?;
        let host = Arc::clone(&self.host);
        match blocking(move || host.choose_to_end()).await? {
            Some(chosen) => self.end_for_disk(chosen).await,
            None => Ok(()),
        }
    }

    /// Ends containers that have written more than their limit.
    async fn keep_limits(&self, watched: &mut HashMap<ContainerHandle, Watch>) -> Result<(), RuntimeError> {
        let (host, mut taken) = (Arc::clone(&self.host), std::mem::take(watched));
        let (returned, exceeding) = blocking(move || {
            let exceeding = host.find_exceeding(&mut taken);
            Ok::<_, RuntimeError>((taken, exceeding))
        })
        .await?;
        *watched = returned;
        let ends = exceeding.into_iter().map(|decision| self.end_for_disk(decision));
        join_all(ends).await.into_iter().collect()
    }

    /// Deletes the root layers of containers whose process has ended.
    async fn delete_roots_of_ended(&self) -> Result<(), RuntimeError> {
        let containers: HashSet<_> = lock(&self.host.processes).values().copied().collect();
        for container in containers {
            let (lock, host) = (self.host.locks.lock(container.uuid()).await, Arc::clone(&self.host));
            blocking(move || {
                let _lock = lock;
                host.delete_root_of_ended(container)
            })
            .await?;
        }
        Ok(())
    }

    async fn end_for_disk(
        &self,
        GuardDecision { process: id, request }: GuardDecision,
    ) -> Result<(), RuntimeError> {
        tracing::warn!(process.id = %id, ?request, "ending a container because of what it has written");
        let process = self.host.find(id)?;
        // No file is written here, because the disk may be full.
        self.host.send_request(&process, &request).await?;
        let reasons = [FailureReason::DiskFull, FailureReason::DiskLimitExceeded];
        match Host::wait(&self.host, id).await? {
            Ended::Unknown(failure) if reasons.contains(&failure.reason) => {}
            // The process ended before the request arrived. Its outputs are published.
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
    fn measure(&self) -> Result<Disk, RuntimeError> {
        let state = &self.config.state_dir;
        let disk = rustix::fs::statvfs(state).map_err(|error| at("measure", state)(error.into()))?;
        let [total, free] = [disk.f_blocks, disk.f_bavail].map(|blocks| blocks.saturating_mul(disk.f_frsize));
        Ok(Disk {
            free,
            missing: disk_reserve::reserve(total).saturating_sub(free),
            free_inodes: disk.f_favail,
            missing_inodes: (disk.f_files / FREE_INODES).saturating_sub(disk.f_favail),
        })
    }

    /// Selects the process to end because the disk is nearly full.
    fn choose_to_end(&self) -> Result<Option<GuardDecision>, RuntimeError> {
        let disk = self.measure()?;
        let Disk { free, missing, missing_inodes, .. } = disk;
        if !disk.is_short() {
            return Ok(None);
        }
        let mut most = None;
        for process in self.running_main_processes() {
            let taken = self.disk_usage(&process)?;
            most = most.max(Some((if missing > 0 { taken.bytes } else { taken.inodes }, process.id)));
        }
        // A container that has written less than the missing space is not the cause.
        let chosen = most.filter(|(taken, _)| *taken >= if missing > 0 { missing } else { missing_inodes });
        Ok(chosen.map(|(taken, process)| {
            let wrote = if missing > 0 {
                format!("{} MiB; {} MiB are free", taken >> 20, free >> 20)
            } else {
                format!("{taken} files; {} inodes are free", disk.free_inodes)
            };
            let message =
                format!("the worker's disk is nearly full, and this container has written the most: {wrote}");
            GuardDecision { process, request: Request::EndForDisk(message) }
        }))
    }

    /// Measures the containers with a limit that are due. Returns those that exceed it.
    fn find_exceeding(&self, watched: &mut HashMap<ContainerHandle, Watch>) -> Vec<GuardDecision> {
        let containers: HashSet<_> = lock(&self.processes).values().copied().collect();
        watched.retain(|container, _| containers.contains(container));
        for container in containers {
            if !watched.contains_key(&container)
                && let Ok(Some(spec)) = self.read_container(container)
            {
                watched.insert(container, Watch { limit: spec.limits().disk_bytes, due: Instant::now() });
            }
        }
        let is_due = |watch: &Watch| watch.limit.is_some() && watch.due <= Instant::now();
        if !watched.values().any(is_due) {
            return Vec::new();
        }
        let mut exceeding = Vec::new();
        for process in self.running_main_processes() {
            let Some(watch) = watched.get_mut(&process.container).filter(|watch| is_due(watch)) else {
                continue;
            };
            let began = Instant::now();
            // A container that ends now is measured at its end.
            let usage = self.disk_usage(&process);
            let pause = began.elapsed() * MEASURE_PAUSE_FACTOR;
            watch.due = Instant::now() + pause.min(MAX_MEASURE_PAUSE);
            match usage {
                Ok(usage) => {
                    let message = watch.limit.and_then(|limit| describe_excess(usage.bytes, limit));
                    let request = message.map(Request::EndForDiskLimit);
                    exceeding.extend(request.map(|request| GuardDecision { process: process.id, request }));
                }
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::debug!(process.id = %process.id, error, "cannot measure a container");
                }
            }
        }
        exceeding
    }

    /// Returns the failure of a process that has exited, if its container has exceeded its limit.
    pub(super) fn exceeded_limit(&self, id: ProcessId) -> Result<Option<Failure>, RuntimeError> {
        let process = self.find(id)?;
        let container = self.read_container(process.container)?;
        let Some(limit) = container.and_then(|spec| spec.limits().disk_bytes) else { return Ok(None) };
        if Self::taken_intent(&process)?.is_some_and(|intent| intent.joins.is_some()) {
            return Ok(None);
        }
        let message = describe_excess(self.disk_usage(&process)?.bytes, limit);
        Ok(message.map(|message| Failure { reason: FailureReason::DiskLimitExceeded, message }))
    }

    /// Lists the running main processes. A process that joined a container ends with it.
    pub(super) fn running_main_processes(&self) -> Vec<Process> {
        let all = lock(&self.processes).clone();
        let all = all.into_iter().map(|(id, container)| Process::new(self, container, id));
        // A process that looks into an ended container takes memory of its own.
        let is_main = |process: &Process| {
            let intent = Self::taken_intent(process).ok().flatten();
            intent.is_none_or(|intent| intent.joins.is_none())
        };
        all.filter(|process| matches!(self.status(process), Ok(Status::Started)) && is_main(process))
            .collect()
    }

    fn disk_usage(&self, process: &Process) -> Result<DiskUsage, RuntimeError> {
        let state = &self.config.state_dir;
        let device = rustix::fs::stat(state).map_err(|error| at("check", state)(error.into()))?.st_dev;
        let mut taken = DiskUsage { device, ..DiskUsage::default() };
        let mut copied = 0;
        for (volume, layer) in self.layers_of(process)? {
            if let Err(error) = taken.add_tree(&layer) {
                tracing::debug!(path = %layer.display(), %error, "cannot walk the whole tree of a container");
            }
            if let Some(volume) = volume {
                copied += self.volumes.copied(volume)?;
            }
        }
        for pid in self.cgroups.processes(&process.cgroup()) {
            // The process may have ended.
            taken.add_unlinked(pid).unwrap_or_default();
        }
        // The container did not write what was there before.
        taken.bytes = taken.bytes.saturating_sub(copied);
        if taken.open > MAX_LOOKED_AT {
            (taken.bytes, taken.inodes) = (u64::MAX, u64::MAX);
        }
        Ok(taken)
    }

    /// Deletes the root layer of a container if its processes have ended. The caller holds the lock
    /// of the container, so that no process starts meanwhile.
    fn delete_root_of_ended(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        let mut its = lock(&self.processes).clone();
        its.retain(|_, other| *other == container);
        let has_ended =
            |id: &ProcessId| matches!(self.status(&Process::new(self, container, *id)), Ok(Status::Ended(_)));
        if its.is_empty() || !its.keys().all(has_ended) {
            return Ok(());
        }
        self.hold.check()?;
        let root = self.container(container).join("upper");
        if let Err(error) = empty(&root) {
            tracing::debug!(path = %root.display(), %error, "cannot delete the root layer of an ended container");
        }
        Ok(())
    }

    /// The directories that the container of a process writes to: the top layers of its volumes,
    /// and its root layer.
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

    /// Deletes the data that an ended container has written.
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

/// Says by how much a container has exceeded its limit. `None`: it has not.
fn describe_excess(bytes: u64, limit: u64) -> Option<String> {
    let wrote = match bytes {
        u64::MAX => "has more open files than can be measured".to_owned(),
        _ => format!("has written {:.1} MiB", mebibytes(bytes)),
    };
    (bytes > limit).then(|| format!("the container {wrote}, and its limit is {:.1} MiB", mebibytes(limit)))
}

#[expect(clippy::cast_precision_loss, reason = "the result is rounded")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Deletes the contents of a directory.
fn empty(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        filesystem::remove_tree(&entry?.path())?;
    }
    Ok(())
}

impl DiskUsage {
    fn add(&mut self, found: &Stat) {
        if found.st_nlink < 2 || self.seen.insert((found.st_dev, found.st_ino)) {
            self.bytes += u64::try_from(found.st_blocks).unwrap_or(0) * 512;
            self.inodes += 1;
        }
    }

    /// Adds the readable part of a tree, which may change meanwhile.
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

    /// Adds unlinked files that a process has open or mapped.
    fn add_unlinked(&mut self, pid: u32) -> io::Result<()> {
        // The process and each of its threads may have ended.
        self.add_unlinked_in(Path::new(&format!("/proc/{pid}/map_files")), |taken| &mut taken.mapped)
            .unwrap_or_default();
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?;
            let thread = task.file_name().to_str().and_then(|id| id.parse().ok());
            // Most threads share the descriptor table of the first thread.
            if thread == Some(pid) || thread.is_some_and(|thread| has_other_descriptors(thread, pid)) {
                self.add_unlinked_in(&task.path().join("fd"), |taken| &mut taken.open).unwrap_or_default();
            }
        }
        Ok(())
    }

    fn add_unlinked_in(&mut self, links: &Path, counted: fn(&mut Self) -> &mut u64) -> io::Result<()> {
        for entry in fs::read_dir(links)? {
            let count = counted(self);
            *count += 1;
            if *count > MAX_LOOKED_AT {
                return Ok(());
            }
            let path = entry?.path();
            let Ok(found) = rustix::fs::stat(&path) else { continue };
            let is_file = FileType::from_raw_mode(found.st_mode).is_file();
            // A mapped file may report the device of the underlying layer.
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

/// Whether two threads have different descriptor tables. If the kernel does not tell, they count as
/// shared.
fn has_other_descriptors(thread: u32, other: u32) -> bool {
    const FILES: libc::c_long = 2;
    // SAFETY: the call takes no pointers. KCMP_FILES of kcmp(2).
    let compared = unsafe {
        libc::syscall(libc::SYS_kcmp, libc::c_long::from(thread), libc::c_long::from(other), FILES, 0, 0)
    };
    compared > 0
}
