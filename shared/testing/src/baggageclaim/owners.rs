//! Whose the files of volumes are, where containers have ids of their own.
//!
//! Root of an unprivileged container is the highest id of the machine outside of it; all other ids are the same. So what belongs to root in an
//! unprivileged volume belongs to that one on the disk, and in archives of the volume, which have the ids of the container, to root again.

use std::io;
use std::os::unix::fs::{MetadataExt, lchown};
use std::path::Path;

/// Who is root in an unprivileged container.
const MAPPED_ROOT: u32 = 4_294_967_294;
/// What `tar` reads of that, for users as for groups.
pub(super) const MAP: &str = "+4294967294 root:0\n";

/// Gives every file below `path`, and itself, to whom `of` answers for its user and group.
fn change(path: &Path, of: &impl Fn(u32, u32) -> (u32, u32)) -> io::Result<()> {
    let metadata = path.symlink_metadata()?;
    let (uid, gid) = of(metadata.uid(), metadata.gid());
    if (uid, gid) != (metadata.uid(), metadata.gid()) {
        lchown(path, Some(uid), Some(gid))?;
        if !metadata.is_symlink() {
            // The kernel took away the bits by which others become who owns it.
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

/// Brings the owners in a volume in line with its privilege.
pub(super) fn align(path: &Path, privileged: bool) -> io::Result<()> {
    let (from, to) = if privileged { (MAPPED_ROOT, 0) } else { (0, MAPPED_ROOT) };
    let of = |id| if id == from { to } else { id };
    change(path, &|uid, gid| (of(uid), of(gid)))
}

/// Gives all of a volume to a user and a group.
pub(super) fn give(path: &Path, owner: (u32, u32)) -> io::Result<()> {
    change(path, &|_, _| owner)
}
