//! The lock on a target directory of a download, and the temporary directory beside the target.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use domain::ArtifactId;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::render::ui::Ui;
use crate::transfer::tree;

/// Prefix of the names of staging directories and of other files of a download.
const STAGING: &str = ".gantry-";
/// Interval between two attempts to lock a target.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Directory that an artifact is downloaded into.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) path: PathBuf,
    /// Parent of the staging directory: the parent of the target, or the target itself if a file
    /// system is mounted there.
    pub(crate) staging: PathBuf,
}

impl Target {
    /// Resolves a target, and creates its parent directories.
    pub(crate) fn find(directory: &Path, replace: bool) -> anyhow::Result<Self> {
        let metadata = match directory.metadata() {
            Ok(metadata) if !metadata.is_dir() => bail!("not a directory"),
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let Some(metadata) = metadata else {
            let path = std::path::absolute(directory)?;
            let parent = path.parent().ok_or_else(|| anyhow!("the path has no parent directory"))?;
            std::fs::create_dir_all(parent).with_context(|| format!("cannot create {parent:?}"))?;
            let parent = parent.canonicalize()?;
            let name = path.file_name().ok_or_else(|| anyhow!("the path has no name"))?;
            return Ok(Self { path: parent.join(name), staging: parent });
        };
        let path = directory.canonicalize()?;
        if replace {
            check_replace(&path, &metadata)?;
        }
        let beside = beside(&path, &metadata);
        let staging = beside.unwrap_or(&path).to_owned();
        Ok(Self { path, staging })
    }
}

/// Returns the parent of `path` if an entry of it can be renamed to `path`. A rename cannot cross a
/// mount, even within one file system.
fn beside<'a>(path: &'a Path, metadata: &std::fs::Metadata) -> Option<&'a Path> {
    use std::os::unix::fs::MetadataExt;
    path.parent().filter(|parent| {
        parent.metadata().is_ok_and(|parent| parent.dev() == metadata.dev())
            && !mounts().iter().any(|place| place == path)
            && rustix::fs::access(*parent, rustix::fs::Access::WRITE_OK).is_ok()
    })
}

/// Returns the first mount point below a directory.
fn mounted_below(directory: &Path) -> Option<PathBuf> {
    mounts().into_iter().find(|place| place.starts_with(directory) && place != directory)
}

/// Lists the mount points. Empty: the kernel does not list them.
fn mounts() -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let places =
        table.split(|byte| *byte == b'\n').filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    // The kernel escapes a space, tab, line feed or backslash as three octal digits.
    let plain = |escaped: &[u8]| {
        let mut path = Vec::with_capacity(escaped.len());
        let mut rest = escaped;
        while let Some((first, after)) = rest.split_first() {
            let digits = after.get(..3).filter(|_| *first == b'\\');
            let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
            match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
                Some(byte) => {
                    path.push(byte);
                    rest = &after[3..];
                }
                None => {
                    path.push(*first);
                    rest = after;
                }
            }
        }
        PathBuf::from(std::ffi::OsString::from_vec(path))
    };
    places.map(plain).collect()
}

/// Checks that the directory `path`, which has no symbolic links, can be replaced.
pub(crate) fn check_replace(path: &Path, metadata: &std::fs::Metadata) -> anyhow::Result<()> {
    let here = std::env::current_dir()?;
    if here.starts_with(path) {
        bail!(
            "the current directory is inside, so it cannot be replaced; run gantry elsewhere, or leave out --replace"
        );
    }
    if let Some(mounted) = mounted_below(path) {
        bail!("a file system is mounted at {mounted:?}, which cannot be replaced; leave out --replace");
    }
    if beside(path, metadata).is_none() {
        bail!("a file system is mounted there, or the parent directory is not writable; leave out --replace");
    }
    Ok(())
}

/// Lock of a target. A second download into it waits.
pub(crate) struct TargetLock {
    path: PathBuf,
    file: File,
}

impl TargetLock {
    /// Waits for the lock. `None`: there is no state directory for the lock file, and downloads are
    /// not serialized.
    pub(crate) async fn take(target: &Path, ui: &Ui) -> Option<Self> {
        Self::take_at(tree::remembered_at("lock", target)?, target, ui).await
    }

    async fn take_at(path: PathBuf, target: &Path, ui: &Ui) -> Option<Self> {
        let mut is_reported = false;
        loop {
            let file =
                File::options().write(true).create(true).truncate(false).mode(0o600).open(&path).ok()?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_at(&path, &file) => return Some(Self { path, file }),
                // The last holder has removed the file.
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    if !is_reported {
                        is_reported = true;
                        ui.note(&format!("waiting for another download into {}", target.display()));
                    }
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                Err(_) => return None,
            }
        }
    }
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        if is_at(&self.path, &self.file) {
            // A file that cannot be removed is reused.
            _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Returns whether a path still refers to an open file.
fn is_at(path: &Path, file: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let (Ok(there), Ok(open)) = (path.symlink_metadata(), file.metadata()) else { return false };
    id(there) == id(open)
}

/// Returns whether a name is that of a temporary file of a download.
pub(crate) fn is_staging(name: &OsStr) -> bool {
    let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(STAGING)) else { return false };
    is_own(rest)
        || rest.split_once('-').is_some_and(|(process, number)| is_number(process) && is_number(number))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether the rest of a name is that of a staging directory: a UUID of version 7.
fn is_own(rest: &str) -> bool {
    rest.len() == 36 && rest.as_bytes()[14] == b'7' && rest.parse::<ArtifactId>().is_ok()
}

/// Staging directory, which is removed on drop. Its process holds a lock on it.
pub(crate) struct Staging {
    pub(crate) path: PathBuf,
    _lock: File,
}

impl Staging {
    /// Creates a staging directory, and removes abandoned ones.
    pub(crate) fn make(parent: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        remove_abandoned(parent);
        let failed = || format!("cannot create a directory in {parent:?}");
        loop {
            let path = parent.join(format!("{STAGING}{}", ArtifactId::new()));
            std::fs::DirBuilder::new().mode(0o700).create(&path).with_context(failed)?;
            let lock = match File::open(&path) {
                // Another download removed it as abandoned.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                opened => opened.with_context(failed)?,
            };
            // On file systems without locks, abandoned directories stay.
            _ = rustix::fs::flock(&lock, FlockOperation::LockExclusive);
            // Another download may have removed it as abandoned.
            if is_at(&path, &lock) {
                return Ok(Self { path, _lock: lock });
            }
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = transfer::remove_tree(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove a staging directory");
        }
    }
}

/// Removes the staging directories in `parent` whose processes were killed.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        // Directories that are being replaced have other names with the same prefix.
        let is_ours = name.to_str().and_then(|name| name.strip_prefix(STAGING)).is_some_and(is_own)
            && entry.file_type().is_ok_and(|kind| kind.is_dir());
        let Ok(directory) = is_ours.then(|| File::open(entry.path())).transpose() else { continue };
        let Some(directory) = directory else { continue };
        if rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // A directory that cannot be removed is still left out of uploads.
            _ = transfer::remove_tree(&entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::Cli;

    #[test]
    fn staging_is_beside_the_target() {
        let root = tempfile::tempdir().expect("a directory");
        let root = root.path().canonicalize().expect("there");
        let target = Target::find(&root.join("a/new"), false).expect("usable");
        assert_eq!((target.path, target.staging), (root.join("a/new"), root.join("a")));
        std::os::unix::fs::symlink("a", root.join("link")).expect("made");
        let target = Target::find(&root.join("link"), false).expect("usable");
        assert_eq!((target.path, target.staging), (root.join("a"), root.clone()));
        std::fs::write(root.join("file"), "").expect("written");
        assert!(Target::find(&root.join("file"), false).is_err());
    }

    #[tokio::test]
    async fn second_download_into_target_waits() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("lock");
        let cli = Cli::try_parse_from(["gantry", "--quiet", "version"]).expect("parses");
        let ui = Ui::new(cli.global.quiet);
        let first = TargetLock::take_at(path.clone(), root.path(), &ui).await;
        assert!(first.is_some());
        let mut second = std::pin::pin!(TargetLock::take_at(path.clone(), root.path(), &ui));
        assert!(tokio::time::timeout(RETRY_INTERVAL * 2, &mut second).await.is_err());
        drop(first);
        assert!(second.await.is_some_and(|second| is_at(&path, &second.file)));
        assert!(!path.exists());
    }

    #[test]
    fn staging_names_are_recognized() {
        for (name, expected) in [
            (".gantry-0190a3f0-0000-7000-8000-000000000000", true),
            (".gantry-123-4", true),
            (".gantry-", false),
            (".gantry-1", false),
            (".gantry-result", false),
            (".gantryignore", false),
        ] {
            assert_eq!(is_staging(OsStr::new(name)), expected, "{name}");
        }
    }

    #[test]
    fn current_directory_is_never_replaced() {
        let here = std::env::current_dir().expect("somewhere");
        assert!(Target::find(&here, true).is_err());
        assert!(Target::find(Path::new("/"), true).is_err());
    }
}
