//! Metadata of entries that are written.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{Gid, Mode, Stat, Timespec, Timestamps, Uid, fchmod, fchown, fstat, futimens};
use rustix::io::Errno;

use crate::entry::Entry;
use crate::xattrs;

/// To whom what is written belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrittenOwnership {
    /// To whom the manifest says. Takes the right to change owners.
    Manifest,
    /// To the caller. Setuid and setgid are dropped unless the manifest says that it is the caller's anyway.
    Caller,
}

/// Something that was not written.
#[derive(Debug)]
pub struct LeftOut {
    /// The entry.
    pub path: PathBuf,
    /// What of it.
    pub what: LeftOutKind,
}

/// What was not written.
#[derive(Debug)]
pub enum LeftOutKind {
    /// The device node.
    Device,
    /// The extended attribute with this name.
    Xattr(Vec<u8>),
}

/// How entries get their metadata.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Metadata {
    pub(crate) ownership: WrittenOwnership,
    pub(crate) strict: bool,
    /// The user and group that things belong to unless they are given away.
    pub(crate) caller: (Uid, Gid),
    /// Whether everything is known to belong to the caller as yet: then what is to stay so need not be given away.
    pub(crate) is_callers: bool,
}

impl Metadata {
    /// Gives an open file or directory what its entry says.
    pub(crate) fn apply(
        &self,
        entry: &Entry,
        file: &OwnedFd,
        left_out: &mut Vec<LeftOut>,
    ) -> Result<(), Errno> {
        // In this order: a change of owner clears setuid and capabilities, and a mode may forbid attributes.
        if let Some((uid, gid)) = self.owner(entry) {
            fchown(file, Some(uid), Some(gid))?;
        }
        for xattr in &entry.xattrs {
            match xattrs::set(file, xattr) {
                Ok(()) => {}
                Err(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP) if !self.strict => {
                    let what = LeftOutKind::Xattr(xattr.name.clone());
                    left_out.push(LeftOut { path: entry.path().to_owned(), what });
                }
                Err(error) => return Err(error),
            }
        }
        fchmod(file, self.mode(entry))?;
        futimens(file, &times(entry))
    }

    /// Whether a file has the owner, mode and times that its entry says.
    pub(crate) fn matches(&self, entry: &Entry, stat: &Stat) -> bool {
        let owner = match self.ownership {
            WrittenOwnership::Manifest => stat.st_uid == entry.uid && stat.st_gid == entry.gid,
            WrittenOwnership::Caller => stat.st_uid == self.caller.0.as_raw(),
        };
        owner && Mode::from_raw_mode(stat.st_mode) == self.mode(entry) && has_times(stat, entry)
    }

    /// Makes a file the caller's that was not made by the caller, if that is whose everything is to be.
    pub(crate) fn claim(&self, file: &OwnedFd) -> Result<(), Errno> {
        if self.ownership == WrittenOwnership::Caller && fstat(file)?.st_uid != self.caller.0.as_raw() {
            fchown(file, Some(self.caller.0), Some(self.caller.1))?;
        }
        Ok(())
    }

    /// To whom an entry is to be given.
    pub(crate) fn owner(&self, entry: &Entry) -> Option<(Uid, Gid)> {
        let owner = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        let stays = self.is_callers && owner == self.caller;
        (self.ownership == WrittenOwnership::Manifest && !stays).then_some(owner)
    }

    /// The mode that an entry gets.
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

/// The user and group that what the caller makes belongs to.
pub(crate) fn caller() -> (Uid, Gid) {
    (rustix::process::geteuid(), rustix::process::getegid())
}

/// Whether a file was last modified when an entry says.
pub(crate) fn has_times(stat: &Stat, entry: &Entry) -> bool {
    let Timespec { tv_sec, tv_nsec } = times(entry).last_modification;
    stat.st_mtime == tv_sec && i64::try_from(stat.st_mtime_nsec) == Ok(tv_nsec)
}

/// The times that an entry gets: both are that of its last modification.
pub(crate) fn times(entry: &Entry) -> Timestamps {
    let time = Timespec { tv_sec: entry.mtime_seconds, tv_nsec: entry.mtime_nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}
