//! File owners of volumes when containers have mapped ids.
//!
//! Root of an unprivileged container is the highest id of the machine. All other ids are unchanged.
//! Files of root in an unprivileged volume belong to the highest id on disk. Archives have the ids
//! of the container, so there they belong to root.

use std::io;
use std::os::unix::fs::{MetadataExt, lchown};
use std::path::Path;

/// Id of an unprivileged container's root on the machine.
const MAPPED_ROOT: u32 = 4_294_967_294;
/// The id map for `tar`, for users and for groups.
pub(super) const MAP: &str = "+4294967294 root:0\n";

/// Changes the owner of `path` and of every file below it. `of` maps the old user and group to the
/// new ones.
fn change(path: &Path, of: &impl Fn(u32, u32) -> (u32, u32)) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    let (uid, gid) = of(metadata.uid(), metadata.gid());
    if (uid, gid) != (metadata.uid(), metadata.gid()) {
        lchown(path, Some(uid), Some(gid))?;
        if !metadata.is_symlink() {
            // The kernel has cleared the set-user-ID and set-group-ID bits.
            std::fs::set_permissions(path, metadata.permissions())?;
        }
    }
    if metadata.is_dir() {
        for entry in std::fs::read_dir(path)? {
            change(&entry?.path(), of)?;
        }
    }
    Ok(())
}

/// Adapts the owners of a volume to its privilege.
pub(super) fn align(path: &Path, privileged: bool) -> io::Result<()> {
    let (from, to) = if privileged { (MAPPED_ROOT, 0) } else { (0, MAPPED_ROOT) };
    let of = |id| if id == from { to } else { id };
    change(path, &|uid, gid| (of(uid), of(gid)))
}

/// Sets the owner of all files of a volume.
pub(super) fn give(path: &Path, owner: (u32, u32)) -> io::Result<()> {
    change(path, &|_, _| owner)
}
