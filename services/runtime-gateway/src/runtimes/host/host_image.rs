//! The image `host`: a view of this machine's root file system for containers.
//!
//! The image is an allow-list. Programs and libraries are bound read-only. A part of `/etc` is
//! copied or bound. The operator may add paths. All other directories are empty and belong to the
//! container. Mounts below a visible path are not visible.
//!
//! This module decides what is visible, and the supervisor mounts it.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

/// Directories of programs and libraries. On most machines some are links to others.
const PROGRAMS: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Directories that belong to the container, with their modes. Parents come first.
const DIRECTORIES: [(&str, u32); 17] = [
    ("/dev", 0o755),
    ("/etc", 0o755),
    ("/home", 0o755),
    ("/media", 0o755),
    ("/mnt", 0o755),
    ("/opt", 0o755),
    ("/proc", 0o555),
    ("/root", 0o700),
    ("/run", 0o755),
    ("/srv", 0o755),
    ("/sys", 0o555),
    ("/tmp", 0o1777),
    ("/var", 0o755),
    ("/var/cache", 0o755),
    ("/var/lib", 0o755),
    ("/var/log", 0o755),
    ("/var/tmp", 0o1777),
];

const LINKS: [(&str, &str); 2] = [("/var/run", "/run"), ("/var/lock", "/run/lock")];

/// Files of `/etc` that are copied. A container may change its copy.
const ETC_FILES: &[&str] = &[
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "ethertypes",
    "gai.conf",
    "group",
    "host.conf",
    "hostname",
    "hosts",
    "inputrc",
    "issue",
    "ld.so.cache",
    "ld.so.conf",
    "locale.alias",
    "locale.conf",
    "locale.gen",
    "localtime",
    "login.defs",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "mtab",
    "networks",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "profile",
    "protocols",
    "redhat-release",
    "rpc",
    "services",
    "shells",
    "timezone",
    "wgetrc",
];

/// Directories of `/etc` that are bound read-only. Names match exactly, or up to a `-` or a digit.
const ETC_TREES: &[&str] = &[
    "ImageMagick",
    "OpenCL",
    "R",
    "alternatives",
    "bash_completion.d",
    "ca-certificates",
    "crypto-policies",
    "dotnet",
    "emacs",
    "fonts",
    "ghc",
    "gnutls",
    "groff",
    "gtk",
    "java",
    "ld.so.conf.d",
    "maven",
    "mono",
    "openmpi",
    "perl",
    "php",
    "pki",
    "profile.d",
    "python",
    "ruby",
    "sgml",
    "skel",
    "ssl",
    "terminfo",
    "texmf",
    "vim",
    "xdg",
    "xml",
];

/// The origin of a path of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The path belongs to the container. Missing directories can be created.
    Own,
    /// The path is a view of the machine, where nothing can be created.
    Shown,
}

/// The image with the paths that the operator adds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Image<'a> {
    pub(super) named: &'a [PathBuf],
}

impl Image<'_> {
    pub(super) fn place(self, path: &Path) -> Place {
        let programs = PROGRAMS.map(Path::new);
        let shown = programs.iter().any(|tree| path.starts_with(tree))
            || self.named.iter().any(|tree| path.starts_with(tree))
            || path.strip_prefix("/etc").is_ok_and(|inside| match inside.components().next() {
                Some(Component::Normal(name)) => is_etc_tree(&name.to_string_lossy()),
                _ => false,
            });
        if shown { Place::Shown } else { Place::Own }
    }

    /// Whether the image has a directory at `path` before any is created.
    pub(super) fn has_directory(self, path: &Path) -> bool {
        match self.place(path) {
            Place::Shown => fs::metadata(path).is_ok_and(|found| found.is_dir()),
            Place::Own => {
                path == Path::new("/")
                    || DIRECTORIES.iter().any(|(known, _)| path == Path::new(known))
                    || self.named.iter().any(|named| named.starts_with(path))
            }
        }
    }

    /// The reason why no directory can be created at `path`.
    pub(super) fn find_obstacle(self, path: &Path) -> Option<&'static str> {
        let is_file = |name: &&str| path.starts_with(Path::new("/etc").join(name));
        match self.place(path) {
            Place::Shown if !self.has_directory(path) => Some("this part of the image is read-only"),
            Place::Own if ETC_FILES.iter().any(is_file) => Some("a parent of the path is not a directory"),
            Place::Shown | Place::Own => None,
        }
    }

    /// The directories and files of this machine that are bound read-only, parents first.
    pub(super) fn bound_paths(self) -> io::Result<Vec<PathBuf>> {
        let mut bound: Vec<_> =
            PROGRAMS.iter().map(PathBuf::from).filter(|tree| is_directory(tree)).collect();
        for entry in fs::read_dir("/etc")? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if is_etc_tree(&name) && is_directory(&path) && others_read(&path) {
                bound.push(path);
            }
        }
        bound.extend(self.named.iter().filter(|path| path.exists()).cloned());
        bound.sort_unstable();
        bound.dedup();
        Ok(bound)
    }

    /// Creates all parts of the image that are not bound, in the empty directory `at`.
    pub(super) fn make_own(self, at: &Path) -> io::Result<()> {
        let below = |path: &str| at.join(path.trim_start_matches('/'));
        for (path, mode) in DIRECTORIES {
            fs::create_dir(below(path))?;
            fs::set_permissions(below(path), fs::Permissions::from_mode(mode))?;
        }
        for (path, target) in LINKS {
            symlink(target, below(path))?;
        }
        for path in PROGRAMS {
            if let Ok(target) = fs::read_link(path) {
                symlink(target, below(path))?;
            }
        }
        for name in ETC_FILES {
            copy(&Path::new("/etc").join(name), &below("/etc").join(name))?;
        }
        for path in self.bound_paths()? {
            let place = at.join(path.strip_prefix("/").unwrap_or(&path));
            fs::DirBuilder::new().recursive(true).mode(0o755).create(place.parent().unwrap_or(at))?;
            if is_directory(&path) {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(&place)?;
            } else if fs::symlink_metadata(&place).is_err() {
                fs::write(&place, "")?;
            }
        }
        Ok(())
    }
}

/// Paths below a visible directory of `/etc` that other users of the machine cannot read.
pub(super) fn unreadable(tree: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut found, mut left) = (Vec::new(), vec![tree.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            if !others_read(&path) {
                found.push(path);
            } else if is_directory(&path) {
                left.push(path);
            }
        }
    }
    Ok(found)
}

/// Finds paths in `tree` at which the directory `ours` is visible under any name. Paths are
/// relative to `tree`.
///
/// Several mounts of one file system may show a directory at several paths. Therefore the search
/// starts at `ours`, and compares the device and inode of its parents with those of `tree`.
pub(super) fn find_inside(tree: &Path, ours: &Path) -> Option<PathBuf> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let target = identity(tree)?;
    let real = fs::canonicalize(ours).ok()?;
    let parent = real.ancestors().find(|parent| identity(parent) == Some(target))?;
    real.strip_prefix(parent).ok().map(Path::to_owned)
}

fn is_etc_tree(name: &str) -> bool {
    ETC_TREES.iter().any(|known| {
        let rest = name.strip_prefix(known);
        rest.is_some_and(|rest| {
            rest.is_empty() || rest.starts_with(|next: char| next == '-' || next.is_ascii_digit())
        })
    })
}

/// Whether the path is a directory, and not a link to one.
fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

/// Whether every user of the machine can read the path. For a link, its target decides.
fn others_read(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| {
        let needed = if found.is_dir() { 0o005 } else { 0o004 };
        found.is_symlink() || found.mode() & needed == needed
    })
}

/// Copies a file or a link, unless it does not exist or other users cannot read it.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if let Ok(target) = fs::read_link(from) {
        return symlink(target, to);
    }
    if !others_read(from) || !fs::symlink_metadata(from).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    fs::write(to, fs::read(from)?)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_belongs_to_container_or_machine() {
        let named = [PathBuf::from("/opt/tools")];
        let image = Image { named: &named };
        for shown in
            ["/usr", "/usr/bin/env", "/etc/ssl/certs", "/etc/java-17-openjdk/x", "/opt/tools/a", "/lib64"]
        {
            assert_eq!(image.place(Path::new(shown)), Place::Shown, "{shown}");
        }
        for own in
            ["/", "/etc", "/etc/passwd", "/etc/sslx", "/opt", "/opt/toolsx", "/usrx", "/var/lib/postgresql"]
        {
            assert_eq!(image.place(Path::new(own)), Place::Own, "{own}");
        }
        assert!(image.has_directory(Path::new("/usr/bin")) && image.has_directory(Path::new("/root")));
        assert!(
            !image.has_directory(Path::new("/usr/bin/env")) && !image.has_directory(Path::new("/var/spool"))
        );
        assert!(image.find_obstacle(Path::new("/usr/none")).is_some(), "it cannot be created");
        assert!(image.find_obstacle(Path::new("/etc/passwd/x")).is_some());
        assert!(image.find_obstacle(Path::new("/srv/data")).is_none());
    }

    #[test]
    fn container_part_of_image_has_no_secrets() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        Image { named: &[] }.make_own(directory.path())?;
        let names = |path: &str| -> io::Result<Vec<String>> {
            let entries = fs::read_dir(directory.path().join(path))?;
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        };
        for name in names("etc")? {
            assert!(ETC_FILES.contains(&name.as_str()) || is_etc_tree(&name), "{name}");
        }
        for empty in ["home", "root", "var/lib", "var/tmp", "srv", "opt"] {
            assert_eq!(names(empty)?, [""; 0], "{empty}");
        }
        let mode = fs::metadata(directory.path().join("var/tmp"))?.mode();
        assert_eq!(mode & 0o7777, 0o1777);
        assert_eq!(fs::read(directory.path().join("etc/passwd"))?, fs::read("/etc/passwd")?);
        Ok(())
    }

    #[test]
    fn unreadable_files_are_found() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let write = |name: &str, mode| {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a directory"))?;
            fs::write(&path, "")?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            Ok::<_, io::Error>(path)
        };
        write("open/file", 0o644)?;
        let closed = write("open/closed", 0o640)?;
        write("private/file", 0o644)?;
        let private = directory.path().join("private");
        fs::set_permissions(&private, fs::Permissions::from_mode(0o710))?;
        let mut found = unreadable(directory.path())?;
        found.sort();
        assert_eq!(found, [closed, private]);
        Ok(())
    }

    #[test]
    fn state_directory_is_found_by_inode() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (tree, other) = (directory.path().join("tree"), directory.path().join("other"));
        fs::create_dir_all(tree.join("a/state"))?;
        fs::create_dir(&other)?;
        symlink(tree.join("a/state"), directory.path().join("link"))?;
        assert_eq!(find_inside(&tree, &directory.path().join("link")), Some("a/state".into()));
        assert_eq!(find_inside(&tree, &tree), Some(PathBuf::new()));
        assert_eq!(find_inside(&other, &tree.join("a/state")), None);
        Ok(())
    }
}
