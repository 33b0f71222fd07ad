//! Resources of a cluster on the machine: mounts, cgroups, processes, files and rows.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::Cluster;

/// Resources of a cluster that could leak. Equal snapshots mean that nothing leaked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Mount points of the machine, with the mounted file systems.
    pub mounts: BTreeSet<String>,
    /// Control groups of every hierarchy.
    pub cgroups: BTreeSet<String>,
    /// Processes of the cluster, with number and command line.
    pub processes: BTreeSet<String>,
    /// Files below the state directory, except databases and logs, which may grow.
    pub files: BTreeSet<String>,
    /// Volumes, containers and artifacts that the artifact store knows.
    pub rows: BTreeSet<String>,
}

impl Snapshot {
    /// Takes a snapshot of a cluster.
    #[must_use]
    pub fn of(cluster: &Cluster) -> Self {
        // A cluster may have a separate mount namespace.
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
            // A tombstone records why an artifact was deleted, and expires later.
            let live = |row: &&serde_json::Value| row["state"] != "deleting";
            rows.extend(cluster.list(kind).iter().filter(live).map(|row| format!("{kind} {row}")));
        }
        Self { mounts, cgroups, processes: processes(cluster).into_values().collect(), files, rows }
    }

    /// Lists the resources of this snapshot that `other` does not have.
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

/// Lists the control groups of every hierarchy.
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

/// Finds the processes of a cluster. Their command line, environment, open files or root file
/// system name its directories.
#[must_use]
pub fn processes(cluster: &Cluster) -> BTreeMap<i32, String> {
    processes_of(&cluster.path(""))
}

/// Finds the processes whose command line, environment, open files or root file system name the
/// directory `home`.
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
        // Only the root mount counts. A supervisor of another cluster inherited all mounts of the
        // machine at its start.
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
