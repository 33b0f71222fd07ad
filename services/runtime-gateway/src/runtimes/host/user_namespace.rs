//! User namespaces: the machine's ids for users of a container, and for owners of its files.
//!
//! A container that is not privileged has a [`Range`] of the machine's ids. Its root is the first of them: an ordinary user without
//! any right outside of the container. The disk does not know of ranges: files of a volume belong to 0, 1000 and so on. A container
//! sees them through mounts that map their owners into its range.
//!
//! Supervisors call this. The gateway calls it once, to try whether it works.
//!
//! Facts: user_namespaces(7); mount_setattr(2), "ID-mapped mounts"; `capable_wrt_inode_uidgid` of the kernel. Ids that are not in use:
//! "Users, Groups, UIDs and GIDs on systemd Systems".

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use domain::ContainerHandle;
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

/// How many ids of users, and as many of groups, a container has. Images need 65,536; archives that are unpacked in a container name
/// users of companies, too.
pub(super) const IDS: u32 = 1 << 20;

/// The first id above those that distributions give to people, services and containers.
const FIRST: u32 = 0x7000_0000;
const RANGES: u32 = 255;

/// A mapping of an id that owns no file. The rights of root reach only files whose owner is in the mapping. Through this mapping, root
/// has the rights of a stranger.
const NOBODY: &str = "4294967294 4294967294 1";

/// The ids of the machine that the users and groups of a container are, its root first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Range {
    first: u32,
}

impl Range {
    /// The range of a container. Two containers may have the same range. They share no file, process or network, and so have no rights
    /// over each other; they share what the kernel counts for each user.
    pub(super) fn of(container: ContainerHandle) -> Self {
        let ranges = u128::from(RANGES);
        let number = u32::try_from(container.uuid().as_u128() % ranges).unwrap_or_default();
        Self { first: FIRST + number * IDS }
    }

    /// The machine's id for a user or a group of the container.
    pub(super) fn id(self, inside: u32) -> io::Result<u32> {
        let known = (inside < IDS).then_some(self.first + inside);
        known.ok_or_else(|| io::Error::other(format!("a container has no user and no group {inside}")))
    }

    /// A user namespace of these ids, which its root owns.
    pub(super) fn namespace(self) -> io::Result<OwnedFd> {
        // The kernel counts what a namespace uses against its owner's limits.
        namespace(&format!("0 {} {IDS}", self.first), Some(self.first))
    }

    /// Makes files as root of the container from now on. In a mapped mount only users of the mapping can make files.
    pub(super) fn act(self) -> io::Result<Acting> {
        let acting = Acting;
        set_file_ids(self.first)?;
        // The change took the rights over files away, which are needed as before.
        use_all_capabilities()?;
        Ok(acting)
    }
}

/// Lets this thread make files as root of a container until it is dropped.
pub(super) struct Acting;

impl Drop for Acting {
    fn drop(&mut self) {
        if set_file_ids(0).is_err() {
            // Cannot happen to root. Files of the worker would belong to a container from here on.
            std::process::abort();
        }
    }
}

fn set_file_ids(id: u32) -> io::Result<()> {
    // SAFETY: take no pointers.
    let (user, group) = unsafe {
        libc::setfsgid(id);
        libc::setfsuid(id);
        // Both return the id from before, also after a failure. `u32::MAX` changes nothing.
        (libc::setfsuid(u32::MAX), libc::setfsgid(u32::MAX))
    };
    if [user, group].map(i32::cast_unsigned) == [id, id] {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

fn use_all_capabilities() -> rustix::io::Result<()> {
    let held = rustix::thread::capabilities(None)?;
    rustix::thread::set_capabilities(None, CapabilitySets { effective: held.permitted, ..held })
}

/// A user namespace in whose mapping no file has a known owner.
pub(super) fn of_nobody() -> io::Result<OwnedFd> {
    namespace(NOBODY, None)
}

/// Makes a user namespace. It exists as long as the descriptor.
fn namespace(mapping: &str, owner: Option<u32>) -> io::Result<OwnedFd> {
    let (made, tell_made) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the child does nothing but system calls, which is safe also if this process has other threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // A lock on a file that this process holds would otherwise be held as long as the child lives.
        let alone = super::filesystem::close_all_but(tell_made.as_raw_fd()).is_ok();
        let became = owner.is_none_or(|owner| become_user(owner).is_ok());
        // SAFETY: takes no pointers.
        let entered = became && unsafe { libc::unshare(libc::CLONE_NEWUSER) } == 0;
        // After the last change of credentials, which takes it back.
        let tied = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
        if alone && tied && entered && rustix::io::write(&tell_made, &[1]).is_ok() {
            // SAFETY: takes no pointers. It is killed when the namespace is open, or when the parent dies.
            while unsafe { libc::pause() } < 0 {}
        }
        // SAFETY: ends this process without running anything of what it is a copy of.
        unsafe { libc::_exit(1) };
    }
    let Some(child) = Pid::from_raw(child) else { return Err(io::Error::last_os_error()) };
    drop(tell_made);
    let opened = (|| {
        if rustix::io::read(&made, &mut [0])? != 1 {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "no user namespace can be made"));
        }
        let process = format!("/proc/{}", child.as_raw_nonzero());
        for map in ["uid_map", "gid_map"] {
            fs::write(format!("{process}/{map}"), mapping)?;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(CWD, format!("{process}/ns/user"), flags, Mode::empty())?)
    })();
    rustix::process::kill_process(child, Signal::KILL)?;
    while let Err(rustix::io::Errno::INTR) = rustix::process::waitpid(Some(child), WaitOptions::empty()) {}
    opened
}

/// Becomes another user of the machine and keeps all capabilities, which some machines ask of a process that makes user namespaces.
fn become_user(id: u32) -> rustix::io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    let (user, group) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    use_all_capabilities()
}

/// User, groups and capabilities of a process in a container.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
    /// The most that the process and its children can have.
    pub(super) capabilities: CapabilitySet,
}

impl Identity {
    /// Gives this process the identity. The process has just entered the container's user namespace.
    pub(super) fn assume(&self) -> io::Result<()> {
        let groups: Vec<_> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        rustix::thread::set_thread_groups(&groups)?;
        let (user, group) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::thread::set_thread_res_gid(group, group, group)?;
        rustix::thread::set_thread_res_uid(user, user, user)?;
        // A process that enters a namespace has every capability in it.
        for bit in 0..64 {
            let one = CapabilitySet::from_bits_retain(1 << bit);
            if self.capabilities.contains(one) {
                continue;
            }
            match rustix::thread::remove_capability_from_bounding_set(one) {
                // The last capability that the kernel knows is the one before.
                Err(rustix::io::Errno::INVAL) => break,
                result => result?,
            }
        }
        let (effective, none) = (self.capabilities, CapabilitySet::empty());
        let sets = CapabilitySets { effective, permitted: effective, inheritable: none };
        Ok(rustix::thread::set_capabilities(None, sets)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_that_nobody_else_has() {
        for _ in 0..10_000 {
            let range = Range::of(ContainerHandle::new());
            assert_eq!(range.first % IDS, 0);
            assert!((0x7000_0000..=0x7FFE_0000 - IDS).contains(&range.first));
            assert_eq!(range.id(1000).ok(), Some(range.first + 1000));
            assert!(range.id(IDS).is_err(), "the next range is another's");
        }
    }
}
