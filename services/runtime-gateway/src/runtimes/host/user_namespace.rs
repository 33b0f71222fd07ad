//! User namespaces: mapped ids for users of containers and owners of their files.
//!
//! An unprivileged container has a [`Range`] of the machine's ids. Its root is the first id of the
//! range: an ordinary user without rights outside of the container. Files on disk have unmapped
//! owners such as 0 or 1000. A container sees them through mounts that map owners into its range.
//!
//! Supervisors use this module. The gateway uses it once, to test whether user namespaces work.
//!
//! Sources: user_namespaces(7); mount_setattr(2), "ID-mapped mounts"; `capable_wrt_inode_uidgid` of
//! the kernel; for free ids, "Users, Groups, UIDs and GIDs on systemd Systems".

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use domain::ContainerHandle;
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::{CapabilitySet, CapabilitySets};
use serde::{Deserialize, Serialize};

/// Number of user ids, and of group ids, of a container. Images need 65,536. Archives that are
/// unpacked in a container may have larger ids, such as those of a company's directory.
pub(super) const IDS: u32 = 1 << 20;

/// The first id above those that distributions assign to people, services and containers.
const FIRST: u32 = 0x7000_0000;
const RANGES: u32 = 255;

/// A mapping of an id that owns no file. Rights of root cover only files whose owner is mapped.
/// Through this mapping, root has the rights of an unrelated user.
const NO_OWNERS: &str = "4294967294 4294967294 1";

/// The ids of the machine for the users and groups of a container, starting with its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Range {
    first: u32,
}

impl Range {
    /// The range of a container. Two containers may have the same range. They share no files or
    /// processes, and no user of a container has rights over a network. So they have no rights over
    /// each other. They share the kernel's per-user limits.
    pub(super) fn of(container: ContainerHandle) -> Self {
        let ranges = u128::from(RANGES);
        let number = u32::try_from(container.uuid().as_u128() % ranges).unwrap_or_default();
        Self { first: FIRST + number * IDS }
    }

    /// The machine's id for a user or a group of the container.
    pub(super) fn id(self, inside: u32) -> io::Result<u32> {
        let known = (inside < IDS).then_some(self.first + inside);
        known.ok_or_else(|| {
            io::Error::other(format!("cannot map the id {inside}: ids of a container are smaller"))
        })
    }

    /// Creates a user namespace of these ids, owned by its root.
    pub(super) fn namespace(self) -> io::Result<OwnedFd> {
        // The kernel charges the usage of a namespace to its owner.
        namespace(&format!("0 {} {IDS}", self.first), Some(self.first))
    }

    /// Creates files as root of the container from now on. In a mapped mount, only mapped users can
    /// create files.
    pub(super) fn act_as_root(self) -> io::Result<ContainerRootGuard> {
        let acting = ContainerRootGuard;
        set_file_ids(self.first)?;
        // The change of user has dropped the capabilities for files, which are still needed.
        use_all_capabilities()?;
        Ok(acting)
    }
}

/// Lets this thread create files as root of a container until it is dropped.
pub(super) struct ContainerRootGuard;

impl Drop for ContainerRootGuard {
    fn drop(&mut self) {
        if set_file_ids(0).is_err() {
            // Cannot fail for root. Continuing would give files of the worker to a container.
            std::process::abort();
        }
    }
}

fn set_file_ids(id: u32) -> io::Result<()> {
    // SAFETY: the calls take no pointers.
    let (user, group) = unsafe {
        libc::setfsgid(id);
        libc::setfsuid(id);
        // Both return the previous id, also after a failure. `u32::MAX` changes nothing.
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

/// Creates a user namespace whose mapping contains no owner of a file.
pub(super) fn without_owners() -> io::Result<OwnedFd> {
    namespace(NO_OWNERS, None)
}

/// Creates a user namespace. It exists as long as the descriptor.
fn namespace(mapping: &str, owner: Option<u32>) -> io::Result<OwnedFd> {
    let (made, tell_made) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the child makes only system calls, which is safe even if this process has other
    // threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Otherwise the child would keep file locks of this process while it lives.
        let alone = super::filesystem::close_all_but(tell_made.as_raw_fd()).is_ok();
        let became = owner.is_none_or(|owner| become_user(owner).is_ok());
        // SAFETY: the call takes no pointers.
        let entered = became && unsafe { libc::unshare(libc::CLONE_NEWUSER) } == 0;
        // Must follow the last change of credentials, which resets it.
        let tied = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).is_ok();
        if alone && tied && entered && rustix::io::write(&tell_made, &[1]).is_ok() {
            // SAFETY: the call takes no pointers. The child is killed when the namespace is open,
            // or when the parent dies.
            while unsafe { libc::pause() } < 0 {}
        }
        // SAFETY: ends this process without running destructors or handlers of its parent.
        unsafe { libc::_exit(1) };
    }
    let Some(child) = Pid::from_raw(child) else { return Err(io::Error::last_os_error()) };
    drop(tell_made);
    let opened = (|| {
        if rustix::io::read(&made, &mut [0])? != 1 {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "cannot create a user namespace"));
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

/// Changes to another user of the machine and keeps all capabilities. Some machines require this
/// for a process that creates user namespaces.
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
    /// Whether the kernel may forbid to change the groups, as it does to an ordinary user.
    pub(super) keeps_groups: bool,
    /// The bounding set of capabilities.
    pub(super) capabilities: CapabilitySet,
}

impl Identity {
    /// Assumes the identity. The process must have just entered the container's user namespace, or
    /// be root of the machine.
    pub(super) fn assume(&self) -> io::Result<()> {
        // So that the permitted capabilities survive the change of the user.
        rustix::thread::set_keep_capabilities(true)?;
        let groups: Vec<_> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        match rustix::thread::set_thread_groups(&groups) {
            // An ordinary user with a single group keeps the groups that the kernel shows as 65534.
            Err(rustix::io::Errno::PERM) if groups.is_empty() && self.keeps_groups => {}
            result => result?,
        }
        let (user, group) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::thread::set_thread_res_gid(group, group, group)?;
        // A process that enters a namespace has all capabilities in it.
        for bit in 0..64 {
            let one = CapabilitySet::from_bits_retain(1 << bit);
            if self.capabilities.contains(one) {
                continue;
            }
            match rustix::thread::remove_capability_from_bounding_set(one) {
                // The previous bit was the last capability of this kernel.
                Err(rustix::io::Errno::INVAL) => break,
                result => result?,
            }
        }
        // Root of the machine loses its effective capabilities with its user id.
        rustix::thread::set_thread_res_uid(user, user, user)?;
        let (effective, none) = (self.capabilities, CapabilitySet::empty());
        let sets = CapabilitySets { effective, permitted: effective, inheritable: none };
        Ok(rustix::thread::set_capabilities(None, sets)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_reserved_ids() {
        for _ in 0..10_000 {
            let range = Range::of(ContainerHandle::new());
            assert_eq!(range.first % IDS, 0);
            assert!((0x7000_0000..=0x7FFE_0000 - IDS).contains(&range.first));
            assert_eq!(range.id(1000).ok(), Some(range.first + 1000));
            assert!(range.id(IDS).is_err(), "the id is in the next range");
        }
    }
}
