//! Where a download writes: the target, the right to write into it, and the staging directory.

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

/// How names of staging directories and of other files of a download begin.
const STAGING: &str = ".gantry-";
/// How long a download waits before it asks again for a target that another one holds.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Where an artifact goes.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) path: PathBuf,
    /// Where the staging directory is made: beside the target, or within it when something is mounted there.
    pub(crate) staging: PathBuf,
}

impl Target {
    pub(crate) fn find(directory: &Path, replace: bool) -> anyhow::Result<Self> {
        let metadata = match directory.metadata() {
            Ok(metadata) if !metadata.is_dir() => bail!("it is no directory"),
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let Some(metadata) = metadata else {
            let path = std::path::absolute(directory)?;
            let parent = path.parent().ok_or_else(|| anyhow!("it has no parent"))?;
            std::fs::create_dir_all(parent).with_context(|| format!("cannot make {parent:?}"))?;
            let parent = parent.canonicalize()?;
            let name = path.file_name().ok_or_else(|| anyhow!("it has no name"))?;
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

/// The directory around `path`, when something that is made there can be put in its place. No rename crosses a mount, not even
/// within one file system.
fn beside<'a>(path: &'a Path, metadata: &std::fs::Metadata) -> Option<&'a Path> {
    use std::os::unix::fs::MetadataExt;
    path.parent().filter(|parent| {
        parent.metadata().is_ok_and(|parent| parent.dev() == metadata.dev())
            && !mounts().iter().any(|place| place == path)
            && rustix::fs::access(*parent, rustix::fs::Access::WRITE_OK).is_ok()
    })
}

/// The first place below a directory at which something is mounted.
fn mounted_below(directory: &Path) -> Option<PathBuf> {
    mounts().into_iter().find(|place| place.starts_with(directory) && place != directory)
}

/// Where something is mounted. Nowhere, if the kernel does not say.
fn mounts() -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let places =
        table.split(|byte| *byte == b'\n').filter_map(|line| line.split(|byte| *byte == b' ').nth(4));
    // A space, tab, line end or backslash in a path is written as three octal digits.
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

/// Whether something else can be put in the place of the directory `path`, which has no links in it.
pub(crate) fn check_replace(path: &Path, metadata: &std::fs::Metadata) -> anyhow::Result<()> {
    let here = std::env::current_dir()?;
    if here.starts_with(path) {
        bail!("we are in it, it cannot be replaced; run this elsewhere, or without --replace");
    }
    if let Some(mounted) = mounted_below(path) {
        bail!("something is mounted at {mounted:?}, which cannot be replaced; leave out --replace");
    }
    if beside(path, metadata).is_none() {
        bail!("something is mounted there, or its parent cannot be written; leave out --replace");
    }
    Ok(())
}

/// The right to write into a target. A second download into it waits.
pub(crate) struct TargetLock {
    path: PathBuf,
    file: File,
}

impl TargetLock {
    /// Waits for the right. `None`: there is no place for the lock, and downloads into one target may meet.
    pub(crate) async fn take(target: &Path, ui: &Ui) -> Option<Self> {
        Self::take_at(tree::remembered_at("lock", target)?, target, ui).await
    }

    async fn take_at(path: PathBuf, target: &Path, ui: &Ui) -> Option<Self> {
        let mut is_told = false;
        loop {
            let file =
                File::options().write(true).create(true).truncate(false).mode(0o600).open(&path).ok()?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_at(&path, &file) => return Some(Self { path, file }),
                // Its holder has removed it.
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    if !is_told {
                        is_told = true;
                        ui.note(&format!("{}: waits for another download into it", target.display()));
                    }
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                Err(_) => return None,
            }
        }
    }
}

impl Drop for TargetLock {
    fn drop(&mut self) {
        if is_at(&self.path, &self.file) {
            // One that stays is taken the next time.
            _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Whether a path still leads to an open file.
fn is_at(path: &Path, file: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let (Ok(there), Ok(open)) = (path.symlink_metadata(), file.metadata()) else { return false };
    id(there) == id(open)
}

/// Whether a file of this name is one that a download works with, and no part of the caller's directory.
pub(crate) fn is_staging(name: &OsStr) -> bool {
    let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(STAGING)) else { return false };
    is_own(rest)
        || rest.split_once('-').is_some_and(|(process, number)| is_number(process) && is_number(number))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether the rest of a name is that of a staging directory: an id of version 7.
fn is_own(rest: &str) -> bool {
    rest.len() == 36 && rest.as_bytes()[14] == b'7' && rest.parse::<ArtifactId>().is_ok()
}

/// A staging directory, which is removed when it is dropped. Its process holds a lock on it.
pub(crate) struct Staging {
    pub(crate) path: PathBuf,
    _lock: File,
}

impl Staging {
    pub(crate) fn make(parent: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        remove_abandoned(parent);
        let failed = || format!("cannot make a directory in {parent:?}");
        loop {
            let path = parent.join(format!("{STAGING}{}", ArtifactId::new()));
            std::fs::DirBuilder::new().mode(0o700).create(&path).with_context(failed)?;
            let lock = match File::open(&path) {
                // Another download took it for an abandoned one.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                opened => opened.with_context(failed)?,
            };
            // Where directories cannot be locked, those that are abandoned stay.
            _ = rustix::fs::flock(&lock, FlockOperation::LockExclusive);
            // Another download may have taken it for an abandoned one.
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
        // A directory that is being replaced stands under another name for a moment.
        let is_ours = name.to_str().and_then(|name| name.strip_prefix(STAGING)).is_some_and(is_own)
            && entry.file_type().is_ok_and(|kind| kind.is_dir());
        let Ok(directory) = is_ours.then(|| File::open(entry.path())).transpose() else { continue };
        let Some(directory) = directory else { continue };
        if rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // What cannot be removed is left out of uploads all the same.
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
        assert!(tokio::time::timeout(LOOK_AGAIN * 2, &mut second).await.is_err());
        drop(first);
        assert!(second.await.is_some_and(|second| is_at(&path, &second.file)));
        assert!(!path.exists());
    }

    #[test]
    fn names_of_staging_are_known() {
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
    fn we_are_never_replaced_from_within() {
        let here = std::env::current_dir().expect("somewhere");
        assert!(Target::find(&here, true).is_err());
        assert!(Target::find(Path::new("/"), true).is_err());
    }
}
