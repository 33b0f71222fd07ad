//! Control groups of containers.
//!
//! libcontainer creates the groups. This module inspects, empties and removes them, also for a
//! supervisor that has died. A container has a group of the same name directly below the root of
//! each hierarchy. No state is kept between containers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use domain::workload::Limits;

use super::mounts::{self, MountEntry};
use super::unprivileged;

/// Time for the kernel to release an empty group.
const REMOVAL: Duration = Duration::from_secs(5);

/// The group of this process and its supervisors, used if their group must have groups of
/// containers below it.
const OWN: &str = "gantry-worker";

/// The hierarchies of this worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cgroups {
    /// Mount points of version 1, each with its controllers.
    v1: Vec<(PathBuf, Vec<String>)>,
    /// The mount point of version 2, if it is the only version, and its controllers. For an
    /// ordinary user, the group that is delegated to that user.
    v2: Option<(PathBuf, Vec<String>)>,
    /// All hierarchies, also those in which this process may create no groups.
    all: Vec<(PathBuf, Vec<String>)>,
}

impl Cgroups {
    pub(super) fn find(mounted: &[MountEntry]) -> Self {
        let v1: Vec<_> = mounted
            .iter()
            .filter(|mount| mount.kind == "cgroup")
            .map(|mount| (mount.at.clone(), mount.options.split(',').map(str::to_owned).collect()))
            .collect();
        let v2 = mounted.iter().find(|mount| mount.kind == "cgroup2").filter(|_| v1.is_empty());
        let v2 = v2.map(|mount| {
            let controllers = fs::read_to_string(mount.at.join("cgroup.controllers")).unwrap_or_default();
            (mount.at.clone(), controllers.split_whitespace().map(str::to_owned).collect())
        });
        let all = v1.iter().chain(&v2).cloned().collect();
        if unprivileged::is_active() {
            let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            let delegated = v2.and_then(|(root, _)| delegated(&root, &own));
            return Self { v1: Vec::new(), v2: delegated, all };
        }
        Self { v1, v2, all }
    }

    /// Makes the hierarchies writable, also inside a container of a container engine. There all
    /// hierarchies are read-only, and the topmost visible group is that of the container, with this
    /// process in it.
    ///
    /// Failures are logged. A container that needs the missing hierarchy is rejected later.
    pub(super) fn prepare(&self, mounted: &[MountEntry]) {
        for mount in mounted.iter().filter(|mount| mount.read_only) {
            let ours = self.v1.iter().chain(&self.v2).any(|(root, _)| *root == mount.at);
            if ours && let Err(error) = mounts::make_writable(&mount.at) {
                tracing::warn!(path = %mount.at.display(), %error, "cannot make control groups writable");
            }
        }
        if let Some((root, _)) = &self.v2
            && let Err(error) = leave(root)
        {
            tracing::warn!(path = %root.display(), %error, "cannot leave the topmost control group");
        }
    }

    fn controller(&self, name: &str) -> Option<&Path> {
        with_controller(self.v1.iter().chain(&self.v2), name)
    }

    /// The first of these limits that the machine cannot enforce.
    pub(super) fn first_missing(&self, limits: &Limits) -> Option<&'static str> {
        let needed = [
            ("memory", limits.memory_bytes.is_some()),
            ("cpu", limits.cpu_millis.is_some()),
            ("pids", limits.pids.is_some()),
        ];
        let missing = |(name, needed): &(&'static str, bool)| *needed && self.controller(name).is_none();
        needed.into_iter().find(missing).map(|(name, _)| name)
    }

    /// CPU capacity of all groups together, in thousandths of a processor: the processors of this
    /// process, limited by the quota of its container.
    pub(super) fn cpu_millis(&self) -> Option<u64> {
        let processors =
            rustix::thread::sched_getaffinity(None).ok().map(|set| u64::from(set.count()) * 1000);
        let quota = with_controller(&self.all, "cpu").and_then(|root| {
            let read = |name: &str| fs::read_to_string(root.join(name)).ok();
            let (quota, period) = match read("cpu.max") {
                Some(both) => {
                    let (quota, period) = both.split_once(' ')?;
                    (quota.to_owned(), period.to_owned())
                }
                None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
            };
            // `max` and -1 mean no quota.
            let (quota, period): (u64, u64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
            quota.checked_mul(1000)?.checked_div(period)
        });
        processors.into_iter().chain(quota).min().filter(|millis| *millis > 0)
    }

    /// Memory capacity of all groups together, in bytes: the memory of the machine, limited by that
    /// of the surrounding container.
    pub(super) fn memory_bytes(&self) -> Option<u64> {
        let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let kilobytes = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
            kilobytes.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        });
        let limit = with_controller(&self.all, "memory").and_then(|root| {
            let read = |name: &str| fs::read_to_string(root.join(name)).ok();
            read("memory.max").or_else(|| read("memory.limit_in_bytes"))?.trim().parse().ok()
        });
        machine.into_iter().chain(limit).min()
    }

    /// Whether the memory limit includes swap.
    pub(super) fn limits_swap(&self) -> bool {
        self.controller("memory").is_some_and(|memory| memory.join("memory.memsw.limit_in_bytes").exists())
    }

    /// The processes in the groups of this name.
    pub(super) fn processes(&self, name: &str) -> Vec<u32> {
        let listed = self.groups(name).find_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
        listed.unwrap_or_default().lines().filter_map(|pid| pid.parse().ok()).collect()
    }

    /// Whether socket buffers count against a memory limit only if this is requested.
    pub(super) fn limits_sockets(&self) -> bool {
        self.controller("memory").is_some_and(|memory| memory.join("memory.kmem.tcp.limit_in_bytes").exists())
    }

    fn groups<'a>(&'a self, name: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
        self.v1.iter().chain(&self.v2).map(move |(path, _)| path.join(name))
    }

    /// Creates the groups of this name whose limits programs usually read. Returns them with their
    /// paths in the container.
    pub(super) fn create_visible(&self, name: &str) -> io::Result<Vec<(PathBuf, String)>> {
        if let Some((root, controllers)) = &self.v2 {
            enable(root, controllers);
        }
        let seen = self.visible(name);
        for (group, _) in &seen {
            super::filesystem::make_directory(group)?;
        }
        Ok(seen)
    }

    /// The groups of this name whose limits programs usually read, with their paths in the
    /// container.
    pub(super) fn visible(&self, name: &str) -> Vec<(PathBuf, String)> {
        let mut seen = Vec::new();
        if let Some((root, _)) = &self.v2 {
            seen.push((root.join(name), "/sys/fs/cgroup".to_owned()));
        }
        for (root, _) in &self.v1 {
            let hierarchy = root.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if hierarchy
                .split(',')
                .any(|controller| ["cpu", "cpuacct", "memory", "pids"].contains(&controller))
            {
                seen.push((root.join(name), format!("/sys/fs/cgroup/{hierarchy}")));
            }
        }
        seen
    }

    /// Sets limits of the existing group of this name on version 2. Elsewhere libcontainer does
    /// this.
    pub(super) fn set_limits(&self, name: &str, limits: &Limits) -> io::Result<()> {
        let Some((root, _)) = &self.v2 else { return Ok(()) };
        let write = |file: &str, value: String| fs::write(root.join(name).join(file), value);
        if let Some(bytes) = limits.memory_bytes {
            write("memory.max", bytes.to_string())?;
            // The limit includes swap. A kernel without swap has no such file.
            if root.join(name).join("memory.swap.max").exists() {
                write("memory.swap.max", "0".to_owned())?;
            }
        }
        if let Some(millis) = limits.cpu_millis {
            let (quota, period) = cpu_quota(millis);
            write("cpu.max", format!("{quota} {period}"))?;
        }
        if let Some(pids) = limits.pids {
            // One more, for init.
            write("pids.max", pids.saturating_add(1).to_string())?;
        }
        Ok(())
    }

    /// Whether the machine can restrict the devices of containers.
    pub(super) fn restricts_devices(&self) -> bool {
        self.v2.is_some() || self.controller("devices").is_some()
    }

    /// Forbids all devices except those of a container's `/dev` to the existing groups of this
    /// name. On version 1, libcontainer does this, and [`Self::are_devices_restricted`] verifies
    /// it.
    pub(super) fn restrict_devices(&self, name: &str) -> io::Result<()> {
        match &self.v2 {
            Some((root, _)) => super::devices::restrict(&root.join(name)),
            None if self.restricts_devices() => Ok(()),
            None => Err(io::Error::new(io::ErrorKind::Unsupported, "no control group has a device policy")),
        }
    }

    /// Whether the group of this name has a device policy. On version 2 it has one unless
    /// [`Self::restrict_devices`] has failed.
    pub(super) fn are_devices_restricted(&self, name: &str) -> io::Result<bool> {
        match self.controller("devices") {
            Some(root) => {
                let list = fs::read_to_string(root.join(name).join("devices.list"))?;
                // A line is `<kind> <major>:<minor> <access>`. `a` is every kind. Creating a node
                // without opening it is harmless.
                let opens = |line: &str| line.rsplit(' ').next().is_some_and(|access| access != "m");
                Ok(!list.lines().any(|line| line.starts_with(['a', 'b']) && opens(line)))
            }
            None => Ok(self.v2.is_some()),
        }
    }

    /// Number of processes that the kernel killed in the group for its memory limit.
    pub(super) fn out_of_memory_kills(&self, name: &str) -> u64 {
        let Some(memory) = self.controller("memory") else { return 0 };
        let file = if self.v2.is_some() { "memory.events" } else { "memory.oom_control" };
        let Ok(events) = fs::read_to_string(memory.join(name).join(file)) else { return 0 };
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// Processor time used in the groups of this name. `None`: it is not accounted.
    pub(super) fn cpu_time(&self, name: &str) -> Option<Duration> {
        if let Some((root, _)) = &self.v2 {
            let stat = fs::read_to_string(root.join(name).join("cpu.stat")).ok()?;
            let used = stat.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
            return used.trim().parse().ok().map(Duration::from_micros);
        }
        let used = fs::read_to_string(self.controller("cpuacct")?.join(name).join("cpuacct.usage")).ok()?;
        used.trim().parse().ok().map(Duration::from_nanos)
    }

    /// Peak memory of the group of this name, in bytes. `None`: it is not accounted.
    pub(super) fn peak_memory(&self, name: &str) -> Option<u64> {
        let file = if self.v2.is_some() { "memory.peak" } else { "memory.max_usage_in_bytes" };
        fs::read_to_string(self.controller("memory")?.join(name).join(file)).ok()?.trim().parse().ok()
    }

    /// Memory of the group of this name that the kernel cannot reclaim, in bytes. `None`: it is not
    /// accounted.
    pub(super) fn kept_memory(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.controller("memory")?.join(name).join("memory.stat")).ok()?;
        let value = |key: &str| {
            let mut rows = text.lines().filter_map(|line| line.split_once(' '));
            let value = rows.find(|(name, _)| *name == key).map(|(_, value)| value);
            value.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        Some(if self.v2.is_some() {
            let kernel = value("kernel").saturating_sub(value("slab_reclaimable"));
            value("anon") + value("shmem") + kernel
        } else {
            value("total_rss") + value("total_shmem")
        })
    }

    /// Removes the CPU quota of the group of this name, so that killed processes can end.
    pub(super) fn lift_quota(&self, name: &str) {
        let (file, none) = if self.v2.is_some() { ("cpu.max", "max") } else { ("cpu.cfs_quota_us", "-1") };
        if let Some(group) = self.controller("cpu").map(|root| root.join(name))
            && let Err(error) = fs::write(group.join(file), none)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %group.display(), %error, "cannot remove the CPU quota of a control group");
        }
    }

    /// Kills all processes in the groups of this name.
    pub(super) fn kill(&self, name: &str) -> io::Result<()> {
        self.lift_quota(name);
        self.groups(name).try_for_each(|group| kill_all(&group))
    }

    /// Adds a process to the groups of this name.
    pub(super) fn add(&self, name: &str, pid: rustix::process::Pid) -> io::Result<()> {
        let pid = pid.as_raw_nonzero().to_string();
        self.groups(name).try_for_each(|group| match fs::write(group.join("cgroup.procs"), &pid) {
            // A hierarchy in which the container has no group.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            written => written,
        })
    }

    /// Kills all processes in the groups of this name, and waits until they are dead.
    pub(super) fn kill_and_wait(&self, name: &str) -> io::Result<()> {
        let deadline = Instant::now() + REMOVAL;
        while !self.processes(name).is_empty() {
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.kill(name)?;
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Kills all processes in the groups, and removes the groups.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        let deadline = Instant::now() + REMOVAL;
        self.groups(name).try_for_each(|group| remove_group(&group, deadline))
    }
}

fn with_controller<'a>(
    hierarchies: impl IntoIterator<Item = &'a (PathBuf, Vec<String>)>,
    name: &str,
) -> Option<&'a Path> {
    let mut hierarchies = hierarchies.into_iter();
    hierarchies
        .find(|(_, controllers)| controllers.iter().any(|known| known == name))
        .map(|(path, _)| path.as_path())
}

/// Quota and period of a CPU limit, in microseconds.
pub(super) fn cpu_quota(millis: u64) -> (u64, u64) {
    // The kernel accepts no quota below a millisecond.
    let period: u64 = if millis < 10 { 1_000_000 } else { 100_000 };
    (millis.max(1).saturating_mul(period / 1000), period)
}

/// The group of this process with its controllers, if the process may create groups in it. `own` is
/// the contents of `/proc/self/cgroup`.
fn delegated(root: &Path, own: &str) -> Option<(PathBuf, Vec<String>)> {
    let group = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // The gateway has moved itself and its supervisors into a group below.
    let group = group.strip_suffix(OWN).map_or(group, |above| above.trim_end_matches('/'));
    let group = root.join(group);
    let may_write = |path: &Path| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
    if !may_write(&group) || !may_write(&group.join("cgroup.procs")) {
        return None;
    }
    let controllers = fs::read_to_string(group.join("cgroup.controllers")).ok()?;
    Some((group, controllers.split_whitespace().map(str::to_owned).collect()))
}

/// Moves all processes of a group into a group below it, because a group with processes cannot give
/// controllers to its subgroups. The topmost group of the machine is an exception, and stays
/// unchanged.
fn leave(root: &Path) -> io::Result<()> {
    if !super::filesystem::exists(&root.join("cgroup.type"))? {
        return Ok(());
    }
    let own = root.join(OWN);
    super::filesystem::make_directory(&own)?;
    for process in fs::read_to_string(root.join("cgroup.procs"))?.lines() {
        match fs::write(own.join("cgroup.procs"), process) {
            // The process has ended.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Enables controllers for the groups below `root`. A missing controller is reported when a limit
/// needs it.
fn enable(root: &Path, controllers: &[String]) {
    let file = root.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&file).unwrap_or_default();
    for controller in controllers {
        if !enabled.split_whitespace().any(|name| name == controller)
            && let Err(error) = fs::write(&file, format!("+{controller}"))
        {
            eprintln!("supervisor: cannot enable {controller} below {}: {error}", root.display());
        }
    }
}

fn remove_group(group: &Path, deadline: Instant) -> io::Result<()> {
    let mut pause = Duration::from_micros(100);
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                kill_all(group)?;
                remove_children(group, deadline)?;
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
            Err(error) => return Err(error),
        }
    }
}

fn kill_all(group: &Path) -> io::Result<()> {
    let processes = match fs::read_to_string(group.join("cgroup.procs")) {
        Ok(processes) => processes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let pids = processes.lines().filter_map(|line| line.parse().ok());
    for pid in pids.filter_map(rustix::process::Pid::from_raw) {
        match rustix::process::kill_process(pid, rustix::process::Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A privileged container may have created subgroups.
fn remove_children(group: &Path, deadline: Instant) -> io::Result<()> {
    let entries = match fs::read_dir(group) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_group(&entry.path(), deadline)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_hierarchy_matters_only_for_its_limit() {
        let mount = |at: &str, options: &str| MountEntry {
            at: at.into(),
            kind: "cgroup".into(),
            options: options.into(),
            read_only: false,
        };
        let found = Cgroups::find(&[mount("/c/cpu", "rw,cpu,cpuacct"), mount("/c/pids", "rw,pids")]);
        assert_eq!(found.first_missing(&Limits::default()), None);
        let limits = Limits { cpu_millis: Some(1), pids: Some(1), ..Limits::default() };
        assert_eq!(found.first_missing(&limits), None);
        assert_eq!(found.first_missing(&Limits { memory_bytes: Some(1), ..limits }), Some("memory"));
        assert_eq!(Cgroups::default().first_missing(&limits), Some("cpu"));
    }

    #[test]
    fn capacity_respects_limits_of_surrounding_group() -> io::Result<()> {
        let machine = Cgroups::default();
        let (cores, memory) = (machine.cpu_millis(), machine.memory_bytes());
        assert!(cores.is_some_and(|cores| cores >= 1000) && memory.is_some(), "{cores:?} {memory:?}");

        let directory = tempfile::tempdir()?;
        let at = directory.path();
        let write = |name: &str, text: &str| fs::write(at.join(name), text);
        let controllers = || vec!["cpu".to_owned(), "memory".to_owned()];
        let hierarchy = (at.to_owned(), controllers());
        let second = Cgroups { v2: Some(hierarchy.clone()), all: vec![hierarchy], ..Cgroups::default() };
        // The root group has no such files.
        assert_eq!((second.cpu_millis(), second.memory_bytes()), (cores, memory));
        write("cpu.max", "50000 100000\n")?;
        write("memory.max", "1048576\n")?;
        assert_eq!((second.cpu_millis(), second.memory_bytes()), (Some(500), Some(1 << 20)));
        write("cpu.max", "max 100000\n")?;
        write("memory.max", "max\n")?;
        assert_eq!((second.cpu_millis(), second.memory_bytes()), (cores, memory));

        let directory = tempfile::tempdir()?;
        let at = directory.path();
        let write = |name: &str, text: &str| fs::write(at.join(name), text);
        let hierarchy = (at.to_owned(), controllers());
        let first = Cgroups { v1: vec![hierarchy.clone()], all: vec![hierarchy], ..Cgroups::default() };
        write("cpu.cfs_quota_us", "-1\n")?;
        write("cpu.cfs_period_us", "100000\n")?;
        write("memory.limit_in_bytes", "9223372036854771712\n")?;
        assert_eq!((first.cpu_millis(), first.memory_bytes()), (cores, memory));
        write("cpu.cfs_quota_us", "25000\n")?;
        write("memory.limit_in_bytes", "4096\n")?;
        assert_eq!((first.cpu_millis(), first.memory_bytes()), (Some(250), Some(4096)));
        Ok(())
    }
}
