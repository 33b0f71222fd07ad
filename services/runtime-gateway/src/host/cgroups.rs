//! Control groups of containers.
//!
//! libcontainer makes them; here they are looked at, emptied and removed, also for a supervisor that died. A container has a
//! group of the same name directly below the root of each hierarchy. Nothing is kept between containers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use domain::workload::Limits;

use super::mounts::Mounted;

/// How long the kernel may take to let go of an empty group.
const REMOVAL: Duration = Duration::from_secs(5);

/// The hierarchies of this worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Cgroups {
    /// Mount points of version 1, each with its controllers.
    v1: Vec<(PathBuf, Vec<String>)>,
    /// The mount point of version 2, where it is the only one, and its controllers.
    v2: Option<(PathBuf, Vec<String>)>,
}

impl Cgroups {
    pub(super) fn find(mounted: &[Mounted]) -> Self {
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
        Self { v1, v2 }
    }

    fn controller(&self, name: &str) -> Option<&Path> {
        let mut all = self.v1.iter().chain(&self.v2);
        all.find(|(_, controllers)| controllers.iter().any(|known| known == name))
            .map(|(path, _)| path.as_path())
    }

    /// The first of these limits that cannot be kept.
    pub(super) fn missing(&self, limits: &Limits) -> Option<&'static str> {
        let wanted = [
            ("memory", limits.memory_bytes.is_some()),
            ("cpu", limits.cpu_millis.is_some()),
            ("pids", limits.pids.is_some()),
        ];
        let missing = |(name, wanted): &(&'static str, bool)| *wanted && self.controller(name).is_none();
        wanted.into_iter().find(missing).map(|(name, _)| name)
    }

    /// Whether swap counts against the memory limit too.
    pub(super) fn limits_swap(&self) -> bool {
        self.controller("memory").is_some_and(|memory| memory.join("memory.memsw.limit_in_bytes").exists())
    }

    fn groups<'a>(&'a self, name: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
        self.v1.iter().chain(&self.v2).map(move |(path, _)| path.join(name))
    }

    /// Makes the groups of that name whose limits programs like to know, and says where in a container they are to be seen.
    pub(super) fn visible(&self, name: &str) -> io::Result<Vec<(PathBuf, String)>> {
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
        for (group, _) in &seen {
            super::files::make_directory(group)?;
        }
        Ok(seen)
    }

    /// How often the kernel killed something in the group for its memory limit.
    pub(super) fn out_of_memory_kills(&self, name: &str) -> u64 {
        let Some(memory) = self.controller("memory") else { return 0 };
        let file = if self.v2.is_some() { "memory.events" } else { "memory.oom_control" };
        let Ok(events) = fs::read_to_string(memory.join(name).join(file)) else { return 0 };
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    /// Kills what is in the groups, and removes them.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        let deadline = Instant::now() + REMOVAL;
        self.groups(name).try_for_each(|group| remove_group(&group, deadline))
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

/// A privileged container may have made groups of its own.
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
    fn only_a_limit_needs_its_hierarchy() {
        let mount = |at: &str, options: &str| Mounted {
            at: at.into(),
            kind: "cgroup".into(),
            options: options.into(),
        };
        let found = Cgroups::find(&[mount("/c/cpu", "rw,cpu,cpuacct"), mount("/c/pids", "rw,pids")]);
        assert_eq!(found.missing(&Limits::default()), None);
        let limits = Limits { cpu_millis: Some(1), memory_bytes: None, pids: Some(1) };
        assert_eq!(found.missing(&limits), None);
        assert_eq!(found.missing(&Limits { memory_bytes: Some(1), ..limits }), Some("memory"));
        assert_eq!(Cgroups::default().missing(&limits), Some("cpu"));
    }
}
