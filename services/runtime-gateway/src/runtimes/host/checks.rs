//! Checks of what this machine allows, for people who prepare a machine.
//!
//! `gantry doctor` calls [`checks`]. Each check is the test that the runtime makes when it opens,
//! so a passed check and a capability of the worker mean the same. For an ordinary user, all other
//! checks run in a user namespace, as the worker of that user does.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use domain::{ContainerHandle, error_chain};

use super::capabilities::ALL_LIMITS;
use super::cgroups::Cgroups;
use super::mounts::{self, MountEntry};
use super::network::{self, Pool};
use super::state::disk;
use super::unprivileged;
use super::volumes::Volumes;

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The machine has the feature.
    Passed,
    /// Containers run, but without the feature.
    Limited,
    /// No container can run.
    Failed,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Name of the feature, for people.
    pub name: &'static str,
    /// Whether the machine has the feature.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to change. Empty: nothing.
    pub remedy: String,
}

impl Check {
    fn passed(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Passed, found: found.into(), remedy: String::new() }
    }

    fn limited(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Limited, found: found.into(), remedy: remedy.into() }
    }

    fn failed(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Failed, found: found.into(), remedy: remedy.into() }
    }
}

/// Space that a worker needs for its first containers, in bytes.
const MIN_FREE_BYTES: u64 = 1 << 30;

/// Checks this machine for a worker whose state directory is `state_dir`, which need not exist.
///
/// Creates a directory beside the state, and removes it. As root, sets up forwarding and the packet
/// filter of private networks, as a worker does. As an ordinary user, enters a user namespace.
/// Blocks on the disk and the kernel.
///
/// Must be called before any thread exists.
#[must_use]
pub fn checks(state_dir: &Path) -> Vec<Check> {
    let user = user();
    let may_run = user.verdict == Verdict::Passed;
    let mut checks = vec![user, space(existing(state_dir))];
    // The other tests need the rights of root.
    if may_run {
        match mounts::mount_table() {
            Ok(mounted) => {
                checks.extend(files(existing(state_dir), &mounted));
                checks.push(limits(&mounted));
            }
            Err(error) => {
                checks.push(Check::failed("mounts", error.to_string(), "mount /proc"));
            }
        }
        checks.push(private_network());
    }
    checks
}

fn user() -> Check {
    let id = rustix::process::geteuid();
    match unprivileged::enter_new() {
        Ok(()) if unprivileged::is_active() && !id.is_root() => {
            Check::passed("user", format!("user {id}, who is root in a user namespace"))
        }
        Ok(()) => Check::passed("user", "root"),
        Err(error) => Check::failed("user", error.found(), error.remedy().unwrap_or("run gantry as root")),
    }
}

/// Returns the nearest directory that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"))
}

fn space(directory: &Path) -> Check {
    let at = directory.display();
    match disk(directory) {
        Ok(disk) if disk.free_bytes >= MIN_FREE_BYTES => {
            Check::passed("disk", format!("{} MiB free at {at}", disk.free_bytes >> 20))
        }
        Ok(disk) => Check::limited(
            "disk",
            format!("{} MiB free at {at}", disk.free_bytes >> 20),
            "free at least 1 GiB, or set XDG_STATE_HOME to another disk",
        ),
        Err(error) => Check::failed("disk", error_chain(&error), "set XDG_STATE_HOME to a local disk"),
    }
}

/// Tests overlays and mapped owners in a new directory.
fn files(within: &Path, mounted: &[MountEntry]) -> Vec<Check> {
    let opened = TestDirectory::create(within)
        .map_err(|error| error.to_string())
        .and_then(|directory| Volumes::open(&directory.0, mounted).map_err(|error| error_chain(&error)));
    let volumes = match opened {
        Ok(volumes) => volumes,
        Err(error) => {
            return vec![Check::failed(
                "volumes",
                error,
                "set XDG_STATE_HOME to a local disk that is writable",
            )];
        }
    };
    let copies = if volumes.overlays() {
        Check::passed("copy-on-write", volumes.copy_on_write())
    } else {
        Check::limited(
            "copy-on-write",
            volumes.copy_on_write(),
            "inputs are copied as a whole: set XDG_STATE_HOME to an ext4, xfs or btrfs file system that is no overlay",
        )
    };
    let owners = match volumes.fixed_owners_reason() {
        _ if unprivileged::is_active() => further_users(),
        None => Check::passed("user namespaces", "root of a container is an ordinary user of this machine"),
        Some(why) => Check::limited(
            "user namespaces",
            format!("root of a container is root of this machine: {why}"),
            "use Linux 5.19 or later, a file system with ID-mapped mounts, and user.max_user_namespaces above 0",
        ),
    };
    vec![copies, owners]
}

/// Checks whether containers of an ordinary user can have files and processes of several users.
fn further_users() -> Check {
    if unprivileged::has_several_ids() {
        return Check::passed("further users", "containers have the ids that /etc/subuid grants");
    }
    Check::limited(
        "further users",
        "every file and process of a container belongs to its root",
        "install newuidmap (package uidmap or shadow-utils); as root, grant ids by `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`",
    )
}

fn limits(mounted: &[MountEntry]) -> Check {
    let remedy = if unprivileged::is_active() {
        "start the cluster with a delegated control group: `systemd-run --user --scope -p Delegate=yes gantry up`"
    } else {
        "mount cgroup2 at /sys/fs/cgroup with the controllers cpu, memory and pids"
    };
    match Cgroups::find(mounted).first_missing(&ALL_LIMITS) {
        None => Check::passed("control groups", "limits of processors, memory and processes"),
        Some(missing) => Check::limited(
            "control groups",
            format!("the controller {missing} is missing, so its limit cannot be enforced"),
            remedy,
        ),
    }
}

fn private_network() -> Check {
    match network::prepare(Pool::default()) {
        Ok(()) if unprivileged::is_active() => Check::passed("private networks", "slirp4netns and nf_tables"),
        Ok(()) => Check::passed("private networks", "veth, nf_tables and forwarding"),
        Err(error) if unprivileged::is_active() => Check::limited(
            "private networks",
            error_chain(&error),
            "a worker without root needs the package slirp4netns, the kernel modules tun and nf_tables, and the right to open /dev/net/tun; restart the cluster after a change (`gantry down`)",
        ),
        Err(error) => Check::limited(
            "private networks",
            error_chain(&error),
            "allow CAP_NET_ADMIN, and load veth and nf_tables; until then use `gantry run --network none` or `--network host`",
        ),
    }
}

/// Directory for tests that is removed when it is dropped.
struct TestDirectory(PathBuf);

impl TestDirectory {
    fn create(within: &Path) -> io::Result<Self> {
        let directory = within.join(format!(".gantry-doctor-{}", ContainerHandle::new()));
        crate::make_private_directory(&directory)?;
        Ok(Self(directory))
    }
}

impl Drop for TestDirectory {
    fn drop(&mut self) {
        // A directory that cannot be removed is empty.
        _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_directory_is_checked() {
        let directory = tempfile::tempdir().expect("a directory");
        assert_eq!(existing(&directory.path().join("a/b")), directory.path());
        assert_eq!(existing(Path::new("/proc/none")), Path::new("/proc"));
    }

    #[test]
    fn test_directory_is_removed() {
        let within = tempfile::tempdir().expect("a directory");
        let made = TestDirectory::create(within.path()).expect("made");
        assert!(made.0.is_dir());
        drop(made);
        assert_eq!(fs::read_dir(within.path()).expect("listed").count(), 0);
    }
}
