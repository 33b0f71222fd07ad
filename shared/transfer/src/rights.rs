//! Rights of a file that a result in place takes the place of: neither its owner nor its access list is ever sent.

use std::os::fd::OwnedFd;

use rustix::fs::{
    FileType, Gid, Mode, OFlags, Uid, XattrFlags, fchmod, fchown, fgetxattr, fremovexattr, fsetxattr, fstat,
    openat,
};
use rustix::io::Errno;

/// The attribute that holds the access list.
const ACCESS_LIST: &str = "system.posix_acl_access";
/// Most bytes of one.
const ACCESS_LIST_BYTES: usize = 64 << 10;

/// Gives a staged file the owner and the access list of the file that it takes the place of, as far as we may: neither is sent.
pub(crate) fn copy_rights(directory: &OwnedFd, staged: &OwnedFd, name: &[u8]) {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = |at: &OwnedFd| {
        let file = openat(at, name, flags, Mode::empty()).ok()?;
        let stat = fstat(&file).ok()?;
        (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some((file, stat))
    };
    let (Some((old, before)), Some((new, now))) = (open(directory), open(staged)) else { return };
    let mode = Mode::from_raw_mode(now.st_mode);
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid) {
        let (uid, gid) = (Uid::from_raw(before.st_uid), Gid::from_raw(before.st_gid));
        // Only root may, and it clears bits of the mode.
        if fchown(&new, Some(uid), Some(gid)).is_ok() {
            _ = fchmod(&new, mode);
        }
    }
    let mut list = vec![0; ACCESS_LIST_BYTES];
    let length = match fgetxattr(&old, ACCESS_LIST, list.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::NODATA) => {
            // It may have the default one of the directory.
            if fremovexattr(&new, ACCESS_LIST).is_ok() {
                _ = fchmod(&new, mode);
            }
            return;
        }
        Err(_) => return,
    };
    if fsetxattr(&new, ACCESS_LIST, &list[..length], XattrFlags::empty()).is_ok()
        && mode != Mode::from_raw_mode(before.st_mode)
    {
        // The command changed the mode: it counts within the list.
        _ = fchmod(&new, mode);
    }
}
