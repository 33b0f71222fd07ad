//! Extended attributes of open files.

use std::os::fd::AsFd;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, flistxattr_query, fremovexattr, fsetxattr};
use rustix::io::Errno;

use crate::entry::{MAX_XATTR_VALUE_BYTES, MAX_XATTRS_BYTES, Xattr, is_portable_xattr};

/// The extended attributes of one file or directory.
#[derive(Debug, Default)]
pub(crate) struct FileXattrs {
    /// Those that belong into a manifest, in order.
    pub(crate) portable: Vec<Xattr>,
    /// The name of one that a manifest does not take. Empty: there is none.
    pub(crate) skipped: Vec<u8>,
}

/// The attributes that belong into a manifest, in order.
pub(crate) fn read(file: impl AsFd, is_file: bool) -> Result<Vec<Xattr>, Errno> {
    find(file, is_file).map(|found| found.portable)
}

/// All attributes, as far as they say something of the file and not of the machine that it is on.
pub(crate) fn find(file: impl AsFd, is_file: bool) -> Result<FileXattrs, Errno> {
    let mut names = vec![0; 1024];
    let length = loop {
        match flistxattr(&file, &mut names[..]) {
            Ok(length) => break length,
            Err(Errno::RANGE) => names.resize(flistxattr_query(&file)?.max(names.len() * 2), 0),
            // The file system knows no attributes.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(FileXattrs::default()),
            Err(error) => return Err(error),
        }
    };
    let mut xattrs = Vec::new();
    let mut skipped = Vec::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if !is_portable_xattr(name, is_file) {
            if skipped.is_empty() && is_significant(name) {
                skipped = name.to_vec();
            }
            continue;
        }
        let mut value = vec![0; MAX_XATTR_VALUE_BYTES];
        match fgetxattr(&file, name, &mut value[..]) {
            Ok(length) => value.truncate(length),
            Err(Errno::NODATA) => continue, // It was removed meanwhile.
            Err(error) => return Err(error),
        }
        value.shrink_to_fit();
        xattrs.push(Xattr { name: name.to_vec(), value });
    }
    if xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len()).sum::<usize>() > MAX_XATTRS_BYTES {
        return Err(Errno::TOOBIG);
    }
    xattrs.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(FileXattrs { portable: xattrs, skipped })
}

/// Whether a copy without this attribute is another file to its users: access control lists, and what root keeps beside
/// files. Labels and signatures (`security.…`) are each machine's own.
fn is_significant(name: &[u8]) -> bool {
    name.starts_with(b"system.posix_acl_") || name.starts_with(b"trusted.")
}

/// Sets one attribute.
pub(crate) fn set(file: impl AsFd, xattr: &Xattr) -> Result<(), Errno> {
    fsetxattr(file, &xattr.name[..], &xattr.value, XattrFlags::empty())
}

/// Removes the attributes that belong into a manifest, except those that are `kept`.
pub(crate) fn remove_others(file: impl AsFd, is_file: bool, kept: &[Xattr]) -> Result<(), Errno> {
    let there = read(&file, is_file)?;
    let mut others = there.iter().filter(|xattr| kept.iter().all(|kept| kept.name != xattr.name));
    others.try_for_each(|xattr| fremovexattr(&file, &xattr.name[..]))
}
