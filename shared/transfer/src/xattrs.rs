//! Extended attributes of open files.

use std::os::fd::AsFd;

use rustix::fs::{XattrFlags, fgetxattr, flistxattr, flistxattr_query, fremovexattr, fsetxattr};
use rustix::io::Errno;

use crate::entry::{MAX_XATTR_VALUE_BYTES, MAX_XATTRS_BYTES, Xattr, is_portable_xattr};

/// The extended attributes of one file or directory.
#[derive(Debug, Default)]
pub(crate) struct FileXattrs {
    /// Attributes that manifests include, in order.
    pub(crate) portable: Vec<Xattr>,
    /// Name of a significant attribute that manifests do not include. Empty if there is none.
    pub(crate) skipped: Vec<u8>,
}

/// Returns the attributes that manifests include, in order.
pub(crate) fn read(file: impl AsFd, is_file: bool) -> Result<Vec<Xattr>, Errno> {
    find(file, is_file).map(|found| found.portable)
}

/// Reads all attributes of a file. Ignores attributes that describe the machine instead of the
/// file.
pub(crate) fn find(file: impl AsFd, is_file: bool) -> Result<FileXattrs, Errno> {
    let mut names = vec![0; 1024];
    let length = loop {
        match flistxattr(&file, &mut names[..]) {
            Ok(length) => break length,
            Err(Errno::RANGE) => names.resize(flistxattr_query(&file)?.max(names.len() * 2), 0),
            // The file system does not support attributes.
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
            Err(Errno::NODATA) => continue, // The attribute was removed meanwhile.
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

/// Whether users would notice the absence of an attribute: access control lists, and attributes of
/// root. Labels and signatures (`security.…`) are specific to a machine.
fn is_significant(name: &[u8]) -> bool {
    name.starts_with(b"system.posix_acl_") || name.starts_with(b"trusted.")
}

/// Sets an attribute.
pub(crate) fn set(file: impl AsFd, xattr: &Xattr) -> Result<(), Errno> {
    fsetxattr(file, &xattr.name[..], &xattr.value, XattrFlags::empty())
}

/// Removes all attributes that manifests include, except those in `kept`.
pub(crate) fn remove_others(file: impl AsFd, is_file: bool, kept: &[Xattr]) -> Result<(), Errno> {
    let current = read(&file, is_file)?;
    let mut others = current.iter().filter(|xattr| kept.iter().all(|kept| kept.name != xattr.name));
    others.try_for_each(|xattr| fremovexattr(&file, &xattr.name[..]))
}
