//! Comparison of an archive with a known tree.

use std::io::Read;
use std::ops::Range;

use domain::Digest;

use super::members::{MemberKind, Members};
use super::read::{ArchiveError, ArchiveReader, file_at};
use super::tree::Tree;
use crate::entry::{Entry, EntryKind, Extent, MAX_EXTENT_BYTES, as_path};
use crate::manifest::{Limits, Manifest};

impl<R: Read> ArchiveReader<R> {
    /// Checks that the archive contains exactly the tree of `manifest`, within the precision of
    /// plain tar. Fractions of seconds and extended attributes are ignored, and holes are zeroes.
    /// Calls `sink` with the length of each verified extent.
    ///
    /// # Errors
    ///
    /// Fails if the archive cannot be read, is rejected or is truncated. If it contains another
    /// tree, the error is [`ArchiveError::Changed`].
    pub fn compare(mut self, manifest: &Manifest, mut sink: impl FnMut(u64)) -> Result<(), ArchiveError> {
        let mut tree = Tree::new(Limits::of_process());
        let mut buffer = vec![0; MAX_EXTENT_BYTES as usize];
        while let Some(member) = self.members.next()? {
            let mut extents = Vec::new();
            if let MemberKind::File { size_bytes } = member.kind {
                let changed = || ArchiveError::Changed { path: as_path(&member.path).to_owned() };
                let wanted = file_at(manifest, &member.path).ok_or_else(changed)?;
                let wanted = &manifest.entries()[wanted];
                if !matches!(wanted.kind, EntryKind::File { size_bytes: expected, .. } if expected == size_bytes)
                {
                    return Err(changed());
                }
                let (regions, mut at) = (self.members.data(), 0);
                for Extent { offset, length, digest } in wanted.extents() {
                    let data = &mut buffer[..*length as usize];
                    if !zeroes(&mut self.members, &regions, at..*offset)? {
                        return Err(changed());
                    }
                    self.members.read(*offset, data)?;
                    if Digest(*blake3::hash(data).as_bytes()) != *digest {
                        return Err(changed());
                    }
                    at = offset + u64::from(*length);
                    sink(u64::from(*length));
                }
                if !zeroes(&mut self.members, &regions, at..size_bytes)? {
                    return Err(changed());
                }
                tree.count(size_of_val(wanted.extents()))?;
                extents = wanted.extents().to_vec();
            }
            tree.add(member, extents)?;
        }
        let (found, _) = tree.finish()?;
        match differs(manifest.entries(), found.entries()) {
            Some(entry) => Err(ArchiveError::Changed { path: entry.path().to_owned() }),
            None => Ok(()),
        }
    }
}

/// Whether a part of a file with these data regions consists of zeroes.
fn zeroes<R: Read>(
    members: &mut Members<R>,
    regions: &[Range<u64>],
    part: Range<u64>,
) -> Result<bool, ArchiveError> {
    let mut buffer = [0; 16 << 10];
    for region in regions {
        let (mut at, end) = (region.start.max(part.start), region.end.min(part.end));
        while at < end {
            let length = (end - at).min(buffer.len() as u64);
            let data = &mut buffer[..length as usize];
            members.read(at, data)?;
            if data.iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            at += length;
        }
    }
    Ok(true)
}

/// Returns the first entry that differs between the trees.
fn differs<'e>(wanted: &'e [Entry], found: &'e [Entry]) -> Option<&'e Entry> {
    let same = |(wanted, found): &(&Entry, &Entry)| {
        (&wanted.path, wanted.mode, wanted.uid, wanted.gid, wanted.mtime_seconds, &wanted.kind)
            == (&found.path, found.mode, found.uid, found.gid, found.mtime_seconds, &found.kind)
    };
    let other = wanted.iter().zip(found).find(|pair| !same(pair)).map(|(wanted, _)| wanted);
    let rest = wanted.len().min(found.len());
    other.or_else(|| wanted.get(rest)).or_else(|| found.get(rest))
}
