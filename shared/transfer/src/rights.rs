//! Owner and access control list of a file that a result in place replaces. Neither of them is ever
//! sent.

use std::os::fd::OwnedFd;

use rustix::fs::{
    FileType, Gid, Mode, OFlags, Uid, XattrFlags, fchmod, fchown, fgetxattr, fremovexattr, fsetxattr, fstat,
    openat,
};
use rustix::io::Errno;

/// The extended attribute of the access control list.
const ACCESS_LIST: &str = "system.posix_acl_access";
/// Maximum bytes of an access control list.
const ACCESS_LIST_BYTES: usize = 64 << 10;

/// Copies the owner and the access control list of the replaced file to the staged file, as far as
/// that is permitted.
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
        // Only root may change the owner. The change clears bits of the mode.
        if fchown(&new, Some(uid), Some(gid)).is_ok() {
            _ = fchmod(&new, mode);
        }
    }
    let mut list = vec![0; ACCESS_LIST_BYTES];
    let length = match fgetxattr(&old, ACCESS_LIST, list.as_mut_slice()) {
        Ok(length) => length,
        Err(Errno::NODATA) => {
            // The staged file may have inherited the default list of its directory.
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
        // The command changed the mode, which is a part of the list.
        _ = fchmod(&new, mode);
    }
}
