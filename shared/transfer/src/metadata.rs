//! Metadata of written entries: owner, mode, times and extended attributes.
//!
//! The writer and the merge call [`Metadata::apply`] for each file and directory.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{Gid, Mode, Stat, Timespec, Timestamps, Uid, fchmod, fchown, fstat, futimens};
use rustix::io::Errno;

use crate::entry::Entry;
use crate::xattrs;

/// Owner of written entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrittenOwnership {
    /// The owner in the manifest. This requires permission to change owners.
    Manifest,
    /// The caller. Setuid and setgid bits are dropped, except for entries that belong to the caller
    /// in the manifest.
    Caller,
}

/// A part of an entry that was not written.
#[derive(Debug)]
pub struct SkippedPart {
    /// Path of the entry.
    pub path: PathBuf,
    /// The missing part.
    pub what: SkippedPartKind,
}

/// The part of an entry that was not written.
#[derive(Debug)]
pub enum SkippedPartKind {
    /// The whole entry, a device node.
    Device,
    /// The extended attribute with this name.
    Xattr(Vec<u8>),
}

/// Settings for the metadata of written entries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metadata {
    pub(crate) ownership: WrittenOwnership,
    pub(crate) strict: bool,
    /// User and group of the caller.
    pub(crate) caller: (Uid, Gid),
    /// Whether new entries surely belong to the caller, so that entries of the caller need no
    /// change of owner.
    pub(crate) is_callers: bool,
}

impl Metadata {
    /// Applies the metadata of an entry to an open file or directory.
    pub(crate) fn apply(
        &self,
        entry: &Entry,
        file: &OwnedFd,
        skipped: &mut Vec<SkippedPart>,
    ) -> Result<(), Errno> {
        // The order matters: a change of owner clears setuid and capabilities, and a mode may
        // forbid attributes.
        if let Some((uid, gid)) = self.owner(entry) {
            fchown(file, Some(uid), Some(gid))?;
        }
        for xattr in &entry.xattrs {
            match xattrs::set(file, xattr) {
                Ok(()) => {}
                Err(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP) if !self.strict => {
                    let what = SkippedPartKind::Xattr(xattr.name.clone());
                    skipped.push(SkippedPart { path: entry.path().to_owned(), what });
                }
                Err(error) => return Err(error),
            }
        }
        fchmod(file, self.mode(entry))?;
        futimens(file, &times(entry))
    }

    /// Whether a file has the owner, mode and times of its entry.
    pub(crate) fn matches(&self, entry: &Entry, stat: &Stat) -> bool {
        let owner = match self.ownership {
            WrittenOwnership::Manifest => stat.st_uid == entry.uid && stat.st_gid == entry.gid,
            WrittenOwnership::Caller => stat.st_uid == self.caller.0.as_raw(),
        };
        owner && Mode::from_raw_mode(stat.st_mode) == self.mode(entry) && has_times(stat, entry)
    }

    /// Makes the caller the owner of a kept file, if entries must belong to the caller.
    pub(crate) fn claim(&self, file: &OwnedFd) -> Result<(), Errno> {
        if self.ownership == WrittenOwnership::Caller && fstat(file)?.st_uid != self.caller.0.as_raw() {
            fchown(file, Some(self.caller.0), Some(self.caller.1))?;
        }
        Ok(())
    }

    /// Returns the new owner of an entry, if a change is necessary.
    pub(crate) fn owner(&self, entry: &Entry) -> Option<(Uid, Gid)> {
        let owner = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        let stays = self.is_callers && owner == self.caller;
        (self.ownership == WrittenOwnership::Manifest && !stays).then_some(owner)
    }

    /// Returns the mode of a written entry.
    pub(crate) fn mode(&self, entry: &Entry) -> Mode {
        let mode = Mode::from_raw_mode(entry.mode);
        let is_callers = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid)) == self.caller;
        if self.ownership == WrittenOwnership::Manifest || is_callers {
            mode
        } else {
            mode - Mode::SUID - Mode::SGID
        }
    }
}

/// Returns the effective user and group of the process.
pub(crate) fn caller() -> (Uid, Gid) {
    (rustix::process::geteuid(), rustix::process::getegid())
}

/// Whether a file has the modification time of an entry.
pub(crate) fn has_times(stat: &Stat, entry: &Entry) -> bool {
    let Timespec { tv_sec, tv_nsec } = times(entry).last_modification;
    stat.st_mtime == tv_sec && i64::try_from(stat.st_mtime_nsec) == Ok(tv_nsec)
}

/// Returns the times of a written entry. Its access time is its modification time.
pub(crate) fn times(entry: &Entry) -> Timestamps {
    let time = Timespec { tv_sec: entry.mtime_seconds, tv_nsec: entry.mtime_nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}
