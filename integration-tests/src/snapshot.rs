//! What a cluster occupies on the machine: mounts, cgroups, processes, files, rows.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::Cluster;

/// Everything of a cluster that could leak. Two that are equal mean that nothing did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Mount points of the machine, with what is mounted there.
    pub mounts: BTreeSet<String>,
    /// Control groups of every hierarchy.
    pub cgroups: BTreeSet<String>,
    /// The cluster's processes, by number and command line.
    pub processes: BTreeSet<String>,
    /// Files below the state directory, but for databases and logs, which may grow.
    pub files: BTreeSet<String>,
    /// Volumes, containers and artifacts that the artifact store knows.
    pub rows: BTreeSet<String>,
}

impl Snapshot {
    /// As things are now.
    #[must_use]
    pub fn of(cluster: &Cluster) -> Self {
        // A cluster may have a table of mounts of its own.
        let table =
            cluster.pid().map_or("/proc/self/mountinfo".to_owned(), |pid| format!("/proc/{pid}/mountinfo"));
        let mounts = fs::read_to_string(table).expect("mountinfo");
        let mounts =
            mounts.lines().map(|line| line.split(' ').skip(2).collect::<Vec<_>>().join(" ")).collect();
        let cgroups = cgroups();
        let mut files = BTreeSet::new();
        all_files(&cluster.state(), &cluster.state(), &mut files);
        let mut rows = BTreeSet::new();
        for kind in ["volumes", "containers", "artifacts"] {
            // A tombstone lets people ask what became of an artifact; it goes by itself.
            let live = |row: &&serde_json::Value| row["state"] != "deleting";
            rows.extend(cluster.list(kind).iter().filter(live).map(|row| format!("{kind} {row}")));
        }
        Self { mounts, cgroups, processes: processes(cluster).into_values().collect(), files, rows }
    }

    /// What is here and not there.
    #[must_use]
    pub fn beyond(&self, other: &Self) -> Vec<String> {
        let sets = [
            ("mount", &self.mounts, &other.mounts),
            ("cgroup", &self.cgroups, &other.cgroups),
            ("process", &self.processes, &other.processes),
            ("file", &self.files, &other.files),
            ("row", &self.rows, &other.rows),
        ];
        let difference = |(name, ours, theirs): (&str, &BTreeSet<String>, &BTreeSet<String>)| {
            ours.difference(theirs).map(|item| format!("{name} {item}")).collect::<Vec<_>>()
        };
        sets.into_iter().flat_map(difference).collect()
    }
}

/// Control groups of every hierarchy.
#[must_use]
pub fn cgroups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    directories(Path::new("/sys/fs/cgroup"), &mut found);
    found
}

fn directories(root: &Path, found: &mut BTreeSet<String>) {
    let Ok(entries) = fs::read_dir(root) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.insert(entry.path().display().to_string());
            directories(&entry.path(), found);
        }
    }
}

fn all_files(root: &Path, below: &Path, found: &mut BTreeSet<String>) {
    let Ok(entries) = fs::read_dir(below) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        if name.contains(".db") || name.ends_with(".log") {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all_files(root, &path, found);
        }
        found.insert(name);
    }
}

/// The processes of a cluster: those whose command line, environment or open files name its directories, as those of supervisors do, and
/// those in a container, whose root is made of them.
#[must_use]
pub fn processes(cluster: &Cluster) -> BTreeMap<i32, String> {
    processes_of(&cluster.path(""))
}

/// The same, for whatever lives in the directory `home`.
#[must_use]
pub fn processes_of(home: &Path) -> BTreeMap<i32, String> {
    let home = home.display().to_string();
    let home = home.trim_end_matches('/');
    let ours = fs::read_link("/proc/self/ns/mnt").expect("our mounts");
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let path = entry.path();
        let names = |file: &str| {
            fs::read(path.join(file))
                .is_ok_and(|content| content.windows(home.len()).any(|window| window == home.as_bytes()))
        };
        let has_open = || {
            let open = fs::read_dir(path.join("fd")).into_iter().flatten().flatten();
            open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|target| target.starts_with(home))
        };
        // Whose root is made of what is there. Mounts elsewhere in its table say nothing: a supervisor of another cluster took over all that
        // there were on the machine when it started.
        let is_inside = || {
            let mounts = fs::read_to_string(path.join("mountinfo")).unwrap_or_default();
            let root = |line: &str| line.split(' ').nth(4) == Some("/") && line.contains(home);
            fs::read_link(path.join("ns/mnt")).is_ok_and(|theirs| theirs != ours) && mounts.lines().any(root)
        };
        let ours = i64::from(pid) == i64::from(std::process::id());
        if !ours && (names("cmdline") || names("environ") || has_open() || is_inside()) {
            let command = fs::read(path.join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            found.insert(pid, format!("{pid} {command}"));
        }
    }
    found
}
