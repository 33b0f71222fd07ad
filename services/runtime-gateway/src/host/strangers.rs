//! A view of files as a stranger sees them, also for root.
//!
//! A mount may have a mapping of owners, which the kernel takes from a user namespace. In a mapping that knows no owner of any file,
//! every file belongs to nobody, and the rights of root reach only files whose owner is known. So root may do with such a file what
//! its mode lets all others do, and no more.
//!
//! Facts: mount_setattr(2), "ID-mapped mounts"; `capable_wrt_inode_uidgid` of the kernel.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions};

/// The one id that the mapping has, for it must have one. No file belongs to it.
const UNUSED: &str = "4294967294 4294967294 1";

/// Makes a user namespace whose mapping knows no owner. It exists as long as the descriptor.
///
/// Must be called by a process with one thread.
pub(super) fn namespace() -> io::Result<OwnedFd> {
    let (made, tell_made) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (end, tell_end) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: this process has one thread, and the child does nothing but the calls below.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(tell_end);
        // SAFETY: takes no pointers.
        let entered = unsafe { libc::unshare(libc::CLONE_NEWUSER) } == 0;
        let told = entered && rustix::io::write(&tell_made, &[1]).is_ok();
        // Ends when the parent has closed its end, or has died.
        let waited = told && rustix::io::read(&end, &mut [0]).is_ok();
        // SAFETY: ends this process without running anything of what it is a copy of.
        unsafe { libc::_exit(i32::from(!waited)) };
    }
    let Some(child) = Pid::from_raw(child) else { return Err(io::Error::last_os_error()) };
    drop(tell_made);
    let opened = (|| {
        if rustix::io::read(&made, &mut [0])? != 1 {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "no user namespace can be made"));
        }
        let process = format!("/proc/{}", child.as_raw_nonzero());
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("{process}/{map}"), UNUSED)?;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(CWD, format!("{process}/ns/user"), flags, Mode::empty())?)
    })();
    drop(tell_end);
    while let Err(rustix::io::Errno::INTR) = rustix::process::waitpid(Some(child), WaitOptions::empty()) {}
    opened
}
