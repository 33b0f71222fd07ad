//! The image `host`: what a container sees of this machine's own root file system.
//!
//! It is a list of what is shown. Programs and libraries are bound read-only, a part of `/etc` is copied or bound, other paths are
//! shown if the operator names them, and everything else is empty and the container's own. What is mounted below a path that is
//! shown is not shown with it.
//!
//! Decided here, carried out by the supervisor.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

/// Programs and libraries. Links to others of them on most machines.
const PROGRAMS: [&str; 7] = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Directories of a container's own, with their modes. Parents come first.
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

/// Files of `/etc`, which a container may change for itself.
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

/// Directories of `/etc`, read-only, whose names are these or start with one of these and `-` or a digit.
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

/// Where a path of the image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In what is the container's own: whatever is missing can be made.
    Own,
    /// In what is shown of this machine, where nothing can be made.
    Shown,
}

/// What the operator shows beside what every container sees.
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

    /// Whether a container finds a directory there before anything is made for it.
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

    /// Why no directory can be made at `path`.
    pub(super) fn not_a_place(self, path: &Path) -> Option<&'static str> {
        let is_file = |name: &&str| path.starts_with(Path::new("/etc").join(name));
        match self.place(path) {
            Place::Shown if !self.has_directory(path) => {
                Some("nothing can be made in this part of the image")
            }
            Place::Own if ETC_FILES.iter().any(is_file) => {
                Some("something that is no directory is in the way")
            }
            Place::Shown | Place::Own => None,
        }
    }

    /// The directories and files of this machine that are bound read-only, parents first.
    pub(super) fn bound(self) -> io::Result<Vec<PathBuf>> {
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

    /// Makes everything that is not bound in the empty directory `at`.
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
        for path in self.bound()? {
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

/// What other users of the machine may not read below a directory of `/etc` that is shown.
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

/// Where in `tree` something of ours is, if it is there, under whatever name: paths relative to `tree`.
///
/// A directory may be reached by several paths, through mounts of the same file system. So it is looked up from the inside: `tree`
/// is known by its device and inode among the parents of `ours`.
pub(super) fn within(tree: &Path, ours: &Path) -> Option<PathBuf> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let wanted = identity(tree)?;
    let real = fs::canonicalize(ours).ok()?;
    let parent = real.ancestors().find(|parent| identity(parent) == Some(wanted))?;
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

/// Whether there is a directory, and not a link to one.
fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

/// Whether every user of the machine may read it. Of a link, what it leads to decides.
fn others_read(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| {
        let needed = if found.is_dir() { 0o005 } else { 0o004 };
        found.is_symlink() || found.mode() & needed == needed
    })
}

/// Copies a file or a link, unless there is none or others may not read it.
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
    fn path_is_own_or_shown() {
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
        assert!(image.not_a_place(Path::new("/usr/none")).is_some(), "it cannot be made");
        assert!(image.not_a_place(Path::new("/etc/passwd/x")).is_some());
        assert!(image.not_a_place(Path::new("/srv/data")).is_none());
    }

    #[test]
    fn own_part_has_no_secrets() -> io::Result<()> {
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
    fn what_is_ours_is_known_by_identity() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (tree, other) = (directory.path().join("tree"), directory.path().join("other"));
        fs::create_dir_all(tree.join("a/state"))?;
        fs::create_dir(&other)?;
        symlink(tree.join("a/state"), directory.path().join("link"))?;
        assert_eq!(within(&tree, &directory.path().join("link")), Some("a/state".into()));
        assert_eq!(within(&tree, &tree), Some(PathBuf::new()));
        assert_eq!(within(&other, &tree.join("a/state")), None);
        Ok(())
    }
}
