//! Resource limits by control groups, versions 1 and 2, with the limits that containerd and
//! guardian enforce.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use serde_json::Value;

/// The mount point of the hierarchies.
const MOUNTED: &str = "/sys/fs/cgroup";
/// Time for the kernel to release an empty group.
const REMOVAL: Duration = Duration::from_secs(5);

/// Whether limits of memory and processes can be enforced on this machine.
pub(super) fn can_be_made() -> bool {
    geteuid().is_root() && (is_first() || unified().is_ok())
}

fn is_first() -> bool {
    ["memory", "pids"].iter().all(|name| Path::new(MOUNTED).join(name).join("cgroup.procs").exists())
}

/// Enables the controllers for children of the root group of version 2.
fn unified() -> io::Result<()> {
    fs::write(Path::new(MOUNTED).join("cgroup.subtree_control"), "+memory +pids")
}

/// The control groups of a container.
#[derive(Default)]
pub(super) struct Groups {
    paths: Vec<PathBuf>,
    /// The file that counts processes killed for lack of memory.
    events: Option<PathBuf>,
}

impl Groups {
    /// Creates groups for `limits`. Without limits there are none.
    pub(super) fn make(name: &str, limits: &Value) -> io::Result<Self> {
        let limit = |of: &str, what: &str| limits[of][what].as_u64().filter(|limit| *limit > 0);
        let (memory, pids) = (limit("memory_limits", "limit_in_bytes"), limit("pid_limits", "max"));
        let mut groups = Self::default();
        if memory.is_none() && pids.is_none() {
            return Ok(groups);
        }
        let first = is_first();
        if !first {
            unified()?;
        }
        if let Some(bytes) = memory {
            let group = groups.group(first.then_some("memory"), name)?;
            let (limit, events) = match first {
                true => ("memory.limit_in_bytes", "memory.oom_control"),
                false => ("memory.max", "memory.events"),
            };
            fs::write(group.join(limit), bytes.to_string())?;
            // Includes swap in the limit if the kernel accounts for it.
            match first {
                true => _ = fs::write(group.join("memory.memsw.limit_in_bytes"), bytes.to_string()),
                false => _ = fs::write(group.join("memory.swap.max"), "0"),
            }
            groups.events = Some(group.join(events));
        }
        if let Some(most) = pids {
            let group = groups.group(first.then_some("pids"), name)?;
            fs::write(group.join("pids.max"), most.to_string())?;
        }
        Ok(groups)
    }

    fn group(&mut self, hierarchy: Option<&str>, name: &str) -> io::Result<PathBuf> {
        let path = Path::new(MOUNTED).join(hierarchy.unwrap_or_default()).join(name);
        match fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if !self.paths.contains(&path) {
            self.paths.push(path.clone());
        }
        Ok(path)
    }

    /// The files to which a starting process writes `0` to enter the groups.
    pub(super) fn entrances(&self) -> io::Result<Vec<File>> {
        self.paths.iter().map(|path| File::options().write(true).open(path.join("cgroup.procs"))).collect()
    }

    /// Whether the kernel has killed a process of the groups for lack of memory.
    pub(super) fn ran_out_of_memory(&self) -> bool {
        let events = self.events.as_ref().and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills.is_some_and(|kills| kills.trim() != "0")
    }
}

/// Must be called between fork and exec.
pub(super) fn enter(entrances: &[File]) -> io::Result<()> {
    entrances.iter().try_for_each(|mut entrance| entrance.write_all(b"0"))
}

impl Drop for Groups {
    /// Kills the processes of the groups.
    fn drop(&mut self) {
        let until = Instant::now() + REMOVAL;
        for path in &self.paths {
            while let Err(error) = fs::remove_dir(path)
                && error.kind() == io::ErrorKind::ResourceBusy
                && Instant::now() < until
            {
                let processes = fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
                for pid in processes.lines().filter_map(|line| line.parse().ok()).filter_map(Pid::from_raw) {
                    _ = kill_process(pid, Signal::KILL);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
