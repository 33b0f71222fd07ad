//! The image `host`: the worker's own root file system, and what of it no container may see.
//!
//! Decided here, carried out by the supervisor. Secrets are hidden by *whiteouts* in a layer of memory between the
//! worker's root and the container's own layer. So they are absent rather than empty, they stay absent when they come to be
//! only later, and a container may put something of its own in their place. Whiteouts reach only as far as the root's own
//! file system; below another one that is bound into the container, what exists is covered by a mount instead.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::mounts::Mounted;
use super::users::Users;

/// File systems of the kernel's own, or of memory: they hold nothing that a container should share.
const PSEUDO: &[&str] = &[
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "overlay",
    "proc",
    "pstore",
    "ramfs",
    "rpc_pipefs",
    "securityfs",
    "selinuxfs",
    "sysfs",
    "tmpfs",
    "tracefs",
];

/// Places that a container gets of its own.
const FRESH: &[&str] = &["/proc", "/sys", "/dev", "/run", "/tmp"];

/// Secrets of the machine, and the stores of container engines, whose contents are other people's containers.
const HIDDEN: &[&str] = &[
    "/var/lib/gantry-services",
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/sudoers",
    "/etc/sudoers.d",
    "/etc/ssh/ssh_host_rsa_key",
    "/etc/ssh/ssh_host_dsa_key",
    "/etc/ssh/ssh_host_ecdsa_key",
    "/etc/ssh/ssh_host_ed25519_key",
    "/etc/ssl/private",
    "/etc/kubernetes",
    "/etc/rancher",
    "/etc/krb5.keytab",
    "/etc/docker",
    "/var/lib/docker",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/kubelet",
    "/var/lib/rancher",
    "/var/lib/etcd",
    "/var/lib/cni",
    "/var/run/secrets",
];

/// Secrets of people, below the home of each.
const HIDDEN_IN_HOMES: &[&str] = &[
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".docker",
    ".netrc",
    ".npmrc",
    ".pypirc",
    ".git-credentials",
    ".cargo/credentials",
    ".cargo/credentials.toml",
    ".config/gcloud",
    ".config/gh",
    ".config/git/credentials",
    ".config/containers",
    ".config/rclone",
    ".config/doctl",
    ".config/op",
    ".m2/settings.xml",
    ".m2/settings-security.xml",
    ".gradle/gradle.properties",
    ".gem/credentials",
    ".terraform.d/credentials.tfrc.json",
    ".terraformrc",
    ".vault-token",
    ".pgpass",
    ".my.cnf",
    ".boto",
    ".s3cfg",
    ".oci",
    ".password-store",
    ".local/share/keyrings",
    ".local/share/containers",
    ".bash_history",
    ".zsh_history",
    ".python_history",
];

/// Where people's homes are: secrets may come to be there at any time. Those of services have them from the beginning or never.
const PEOPLE: &[&str] = &["/root", "/home"];

/// Homes that are nobody's: nothing is looked for in them.
const NO_HOMES: &[&str] = &["/", "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/games", "/nonexistent"];

/// What containers see of the file systems mounted below the worker's root.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Below {
    /// Bound read-only, parents first.
    pub(super) bound: Vec<PathBuf>,
    /// Left out.
    pub(super) absent: Vec<PathBuf>,
}

/// Sorts what is `mounted` below the root; nothing below one of `own` is anybody's but ours.
pub(super) fn below_root(mounted: &[Mounted], own: &[PathBuf]) -> Below {
    let mut below = Below::default();
    for mount in mounted {
        let ours = own.iter().any(|path| mount.at.starts_with(path));
        let fresh = FRESH.iter().any(|path| mount.at.starts_with(path));
        if mount.at == Path::new("/") || ours || fresh {
            continue;
        }
        let hidden = HIDDEN.iter().any(|path| mount.at.starts_with(path));
        // A file of an engine's own making, such as a container's resolv.conf, may well come from memory.
        let file = fs::metadata(&mount.at).is_ok_and(|found| found.is_file());
        let pseudo = PSEUDO.contains(&mount.kind.as_str()) && !file;
        let list = if hidden || pseudo { &mut below.absent } else { &mut below.bound };
        if !list.contains(&mount.at) {
            list.push(mount.at.clone());
        }
    }
    below
}

/// Everything that no container may see; `own` is ours and what the operator adds, and `more_homes` are homes of people that are not in
/// the list of users. What a link leads to is hidden with it.
pub(super) fn hidden(own: &[PathBuf], more_homes: &[PathBuf], users: &Users<'_>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let of_users = users.homes().filter(|home| !NO_HOMES.contains(home)).map(Path::new);
    let homes = of_users.chain([Path::new("/root")]).chain(more_homes.iter().map(PathBuf::as_path));
    let homes: BTreeSet<_> =
        homes.filter(|home| home.is_absolute()).filter_map(|home| fs::canonicalize(home).ok()).collect();
    let more_homes: Vec<_> = more_homes.iter().filter_map(|home| fs::canonicalize(home).ok()).collect();
    for home in homes {
        let fresh = FRESH.iter().any(|path| home.starts_with(path));
        if NO_HOMES.iter().any(|path| home == Path::new(path)) || fresh || !home.is_dir() {
            continue;
        }
        let people = PEOPLE.iter().any(|path| home.starts_with(path)) || more_homes.contains(&home);
        for name in HIDDEN_IN_HOMES {
            if people || home.join(name).exists() {
                hide(&mut found, &home, Path::new(name));
            }
        }
    }
    for path in own.iter().map(PathBuf::as_path).chain(HIDDEN.iter().map(Path::new)) {
        if let Ok(relative) = path.strip_prefix("/") {
            hide(&mut found, Path::new("/"), relative);
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Adds `path` below the directory `base`: itself, or the first of its parents that is missing.
fn hide(found: &mut Vec<PathBuf>, base: &Path, path: &Path) {
    let mut at = base.to_owned();
    for name in path.components() {
        at.push(name);
        match fs::symlink_metadata(&at) {
            Err(_) => break,
            Ok(metadata) if metadata.is_symlink() => match fs::canonicalize(&at) {
                Ok(target) if at != base.join(path) => at = target,
                Ok(target) => found.push(target),
                Err(_) => break,
            },
            Ok(_) => {}
        }
    }
    if at != Path::new("/") {
        found.push(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(at: &str, kind: &str) -> Mounted {
        Mounted { at: at.into(), kind: kind.into(), options: String::new(), read_only: false }
    }

    #[test]
    fn only_real_file_systems_are_bound() {
        let mounted = [
            mount("/", "ext4"),
            mount("/proc", "proc"),
            mount("/home", "xfs"),
            mount("/srv/cache", "tmpfs"),
            mount("/dev/shm", "tmpfs"),
            mount("/run/user/0", "ext4"),
            mount("/var/lib/gantry/volumes/1/contents", "ext4"),
            mount("/var/lib/docker", "ext4"),
        ];
        let below = below_root(&mounted, &["/var/lib/gantry".into()]);
        assert_eq!(below.bound, [PathBuf::from("/home")]);
        assert_eq!(below.absent, [PathBuf::from("/srv/cache"), PathBuf::from("/var/lib/docker")]);
    }

    #[test]
    fn the_first_missing_directory_is_hidden_and_links_do_not_help() -> std::io::Result<()> {
        let directory = tempfile::tempdir()?;
        let home = fs::canonicalize(directory.path())?;
        fs::create_dir(home.join("elsewhere"))?;
        std::os::unix::fs::symlink("elsewhere", home.join(".aws"))?;
        fs::create_dir(home.join(".cargo"))?;
        let mut found = Vec::new();
        for name in [".aws", ".cargo/credentials", ".config/gcloud"] {
            hide(&mut found, &home, Path::new(name));
        }
        let expected = ["elsewhere", ".aws", ".cargo/credentials", ".config"].map(|name| home.join(name));
        assert_eq!(found, expected);
        Ok(())
    }
}
