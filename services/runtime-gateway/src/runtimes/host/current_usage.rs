//! Present resource usage of running containers, measured on request.
//!
//! The control groups of a container count it. Where they do not, mostly for an ordinary user, the
//! processes in the process namespace of the container are added up from `/proc`.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use domain::ContainerHandle;
use runtime::{CurrentUsage, RuntimeError};

use super::Host;
use super::paths;
use super::processes::{Process, Status};
use crate::util::keyed_locks::lock;

/// Usage and number of all processes in a process namespace, by its inode.
type Namespaces = HashMap<u64, (CurrentUsage, usize)>;

impl Host {
    /// Measures the containers whose main process runs.
    pub(super) fn current_usage(
        &self,
        containers: &[ContainerHandle],
    ) -> Result<HashMap<ContainerHandle, CurrentUsage>, RuntimeError> {
        self.hold.check()?;
        let containers: HashSet<_> = containers.iter().collect();
        let mut known: Vec<_> =
            lock(&self.processes).iter().map(|(id, container)| (*container, *id)).collect();
        known.retain(|(container, _)| containers.contains(container));
        // `/proc` is read once for all containers, and only if a container needs it.
        let (mut usage, mut namespaces) = (HashMap::new(), None);
        let (mut mains, mut inits) = (Vec::new(), HashMap::<_, usize>::new());
        for (container, id) in known {
            let process = Process::new(self, container, id);
            // A process that is being removed has no readable state.
            if matches!(self.status(&process), Ok(Status::Started)) {
                *inits.entry(container).or_default() += 1;
                if Self::is_main(&process)? {
                    mains.push((container, process));
                }
            }
        }
        for (container, main) in mains {
            let inits = inits.get(&container).copied().unwrap_or_default();
            usage.insert(container, self.usage_of(&main, inits, &mut namespaces));
        }
        Ok(usage)
    }

    /// Measures the container of a main process. `inits` of its processes belong to Gantry.
    fn usage_of(&self, main: &Process, inits: usize, namespaces: &mut Option<Namespaces>) -> CurrentUsage {
        let without_inits =
            |processes: usize| u32::try_from(processes.saturating_sub(inits)).unwrap_or(u32::MAX);
        let group = main.cgroup();
        let processes = self.cgroups.processes(&group).len();
        let counted = CurrentUsage {
            cpu_time: self.cgroups.cpu_time(&group),
            memory_bytes: self.cgroups.kept_memory(&group),
            processes: (processes > 0).then(|| without_inits(processes)),
        };
        if let CurrentUsage { cpu_time: Some(_), memory_bytes: Some(_), processes: Some(_) } = counted {
            return counted;
        }
        let Some(namespace) = namespace_of(main) else { return counted };
        let namespaces = namespaces.get_or_insert_with(read_namespaces);
        let (added, processes) = namespaces.get(&namespace).copied().unwrap_or_default();
        CurrentUsage {
            cpu_time: counted.cpu_time.or(added.cpu_time),
            memory_bytes: counted.memory_bytes.or(added.memory_bytes),
            processes: counted.processes.or((processes > 0).then(|| without_inits(processes))),
        }
    }
}

/// Returns the inode of the process namespace of a container. `None`: its init has ended.
fn namespace_of(main: &Process) -> Option<u64> {
    let init = fs::read_to_string(main.file(paths::INIT)).ok()?;
    inode(init.trim())
}

fn inode(pid: &str) -> Option<u64> {
    fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|found| found.ino())
}

/// Adds up the processes of each process namespace. Processes that this process may not inspect
/// belong to no container of this worker, and are left out.
fn read_namespaces() -> Namespaces {
    let mut processes: HashMap<u64, Vec<(Duration, u64)>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
            continue;
        };
        if let Some(namespace) = inode(pid)
            && let Ok(stat) = fs::read(entry.path().join("stat"))
            && let Some(used) = parse_stat(&String::from_utf8_lossy(&stat))
        {
            processes.entry(namespace).or_default().push(used);
        }
    }
    let sum = |used: Vec<(Duration, u64)>| {
        let usage = CurrentUsage {
            cpu_time: Some(used.iter().map(|(time, _)| *time).sum()),
            memory_bytes: Some(used.iter().map(|(_, bytes)| *bytes).sum()),
            processes: None,
        };
        (usage, used.len())
    };
    processes.into_iter().map(|(namespace, used)| (namespace, sum(used))).collect()
}

/// Parses the processor time and the resident memory of a process from its `stat`. The time
/// includes that of children that have ended.
fn parse_stat(stat: &str) -> Option<(Duration, u64)> {
    // The process name may contain any characters. The state follows it, which is field 3.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = field(14)? + field(15)? + field(16)? + field(17)?;
    let milliseconds = ticks.saturating_mul(1000) / configured(libc::_SC_CLK_TCK)?;
    Some((Duration::from_millis(milliseconds), field(24)?.saturating_mul(configured(libc::_SC_PAGESIZE)?)))
}

/// Returns a constant of the machine. `None`: it is unknown.
fn configured(name: libc::c_int) -> Option<u64> {
    // SAFETY: the call only returns a number.
    u64::try_from(unsafe { libc::sysconf(name) }).ok().filter(|value| *value > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_is_parsed_despite_name() {
        let stat =
            "7 (a) b 1) S 1 7 7 0 -1 4194560 100 0 0 0 50 25 20 5 20 0 1 0 100 4096 3 18446744073709551615";
        let (time, bytes) = parse_stat(stat).expect("a process");
        assert_eq!(time, Duration::from_secs(1));
        assert_eq!(bytes, 3 * configured(libc::_SC_PAGESIZE).expect("a size"));
        assert_eq!(parse_stat("7 (a) S 1 2"), None);
    }

    #[test]
    fn own_namespace_is_measured() {
        let own = inode("self").expect("this process");
        let (usage, processes) = read_namespaces()[&own];
        assert!(usage.memory_bytes > Some(1 << 20) && processes > 0, "{usage:?}");
    }
}
