//! Pseudo-terminals for tests.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Opens a pseudo-terminal of this size. Returns the end of the test and the end of the program.
/// Programs that are started inherit neither.
pub fn open(rows: u16, columns: u16) -> io::Result<(OwnedFd, OwnedFd)> {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the descriptors and the size outlive the call. Name and settings may be null.
    let opened =
        unsafe { libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null(), &size) };
    if opened != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: openpty returned both descriptors, and no other value owns them.
    let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    // Otherwise a program that starts at the same time would keep the terminal open.
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC)?;
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::CLOEXEC)?;
    Ok((ours, theirs))
}
