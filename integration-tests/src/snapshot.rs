//! What a cluster occupies on the machine: mounts, cgroups, processes, files, rows.

use std::collections::BTreeSet;
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
    /// Command lines of the processes of this build.
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
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let mounts =
            mounts.lines().map(|line| line.split(' ').skip(2).collect::<Vec<_>>().join(" ")).collect();
        let mut cgroups = BTreeSet::new();
        directories(Path::new("/sys/fs/cgroup"), &mut cgroups);
        let mut files = BTreeSet::new();
        all_files(&cluster.state(), &cluster.state(), &mut files);
        let mut rows = BTreeSet::new();
        for kind in ["volumes", "containers", "artifacts"] {
            // A tombstone lets people ask what became of an artifact; it goes by itself.
            let live = |row: &&serde_json::Value| row["state"] != "deleting";
            rows.extend(cluster.list(kind).iter().filter(live).map(|row| format!("{kind} {row}")));
        }
        Self { mounts, cgroups, processes: processes(cluster), files, rows }
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

/// Processes whose environment or command line names this cluster's directories.
fn processes(cluster: &Cluster) -> BTreeSet<String> {
    let home = cluster.path("").display().to_string();
    let home = home.trim_end_matches('/').as_bytes().to_vec();
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let path = entry.path();
        let names = |file: &str| {
            fs::read(path.join(file))
                .is_ok_and(|content| content.windows(home.len()).any(|window| window == home))
        };
        if names("cmdline") || names("environ") {
            let command = fs::read(path.join("cmdline")).unwrap_or_default();
            let pid = entry.file_name();
            found.insert(format!(
                "{} {}",
                pid.display(),
                String::from_utf8_lossy(&command).replace('\0', " ")
            ));
        }
    }
    found
}
