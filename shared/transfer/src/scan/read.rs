//! Threads that read and hash the files that the walk found.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use domain::Digest;
use rustix::fs::{Mode, OFlags, SeekFrom, fstat, openat, seek};
use rustix::io::Errno;

use super::queue::DoneOnDrop;
use super::{MAX_UNSIZED_BYTES, PIECE_BYTES, Shared};
use crate::cache::{Content, Fingerprint};
use crate::entry::{Extent, MAX_EXTENT_BYTES};
use crate::xattrs;

/// A file that must be read.
pub(super) struct FileTask {
    pub(super) entry: usize,
    pub(super) directory: Arc<OwnedFd>,
    pub(super) name: Vec<u8>,
    pub(super) path: Vec<u8>,
    pub(super) fingerprint: Fingerprint,
    pub(super) size_bytes: u64,
    pub(super) may_have_holes: bool,
    /// Whether the size of the file is unreliable, so that it must be read to its end.
    pub(super) is_unsized: bool,
}

/// A file that several threads read.
pub(super) struct SharedFile {
    task: FileTask,
    file: OwnedFd,
    pieces_left: AtomicUsize,
}

pub(super) enum Task {
    File(FileTask),
    Piece { of: Arc<SharedFile>, extents: Vec<(u64, u32)> },
}

pub(super) struct ReadResult {
    pub(super) entry: usize,
    pub(super) outcome: Outcome,
}

pub(super) enum Outcome {
    /// A part of the content.
    Content(Content),
    /// The size of a file that was read to its end.
    Size(u64),
    /// The name of an extended attribute that manifests do not include.
    SkippedXattr(Vec<u8>),
    Changed,
    Unreadable(Errno),
}

pub(super) struct Reader<'a> {
    shared: &'a Shared<'a>,
    buffer: Vec<u8>,
    read: Vec<ReadResult>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(shared: &'a Shared<'a>) -> Self {
        Self { shared, buffer: vec![0; MAX_EXTENT_BYTES as usize], read: Vec::new() }
    }

    pub(super) fn run(mut self) -> Vec<ReadResult> {
        while let Some(batch) = self.shared.queue.pop() {
            let _done = DoneOnDrop(&self.shared.queue);
            for task in batch {
                if self.shared.stopped() {
                    continue; // The walk would wait forever if the queue stayed full.
                }
                match task {
                    Task::File(file) => self.file(file),
                    Task::Piece { of, extents } => self.piece(&of, &extents),
                }
            }
        }
        self.read
    }

    fn file(&mut self, task: FileTask) {
        let entry = task.entry;
        if let Err(error) = self.try_file(task) {
            self.read.push(ReadResult { entry, outcome: Outcome::Unreadable(error) });
        }
    }

    fn try_file(&mut self, task: FileTask) -> Result<(), Errno> {
        // Without blocking, because the file may have become a named pipe.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = openat(&task.directory, &task.name[..], flags, Mode::empty())?;
        let xattrs::FileXattrs { portable: xattrs, skipped } = xattrs::find(&file, true)?;
        self.shared.reserve_xattrs(&xattrs);
        if !skipped.is_empty() {
            self.shared.reserve_path(task.path.len() + skipped.len());
            self.read.push(ReadResult { entry: task.entry, outcome: Outcome::SkippedXattr(skipped) });
        }
        if task.is_unsized {
            let (size_bytes, extents) = self.read_to_end(&file)?;
            self.shared.count(1, 0);
            let outcomes = [Outcome::Size(size_bytes), Outcome::Content(Content { xattrs, extents })];
            self.read.extend(outcomes.map(|outcome| ReadResult { entry: task.entry, outcome }));
            return Ok(());
        }
        let extents = layout(&file, task.size_bytes, task.may_have_holes)?;
        let pieces = extents.len().div_ceil((PIECE_BYTES / u64::from(MAX_EXTENT_BYTES)) as usize);
        if pieces <= 1 {
            let wanted = extents;
            let extents = self.hash(&file, &wanted)?;
            let is_short = ends_early(&wanted, &extents);
            self.check(&task, &file)?;
            self.read.push(ReadResult {
                entry: task.entry,
                outcome: Outcome::Content(Content { xattrs, extents }),
            });
            if is_short {
                self.read.push(ReadResult { entry: task.entry, outcome: Outcome::Changed });
            }
            return Ok(());
        }

        let content = Content { xattrs, extents: Vec::new() };
        self.read.push(ReadResult { entry: task.entry, outcome: Outcome::Content(content) });
        let of = Arc::new(SharedFile { task, file, pieces_left: AtomicUsize::new(pieces) });
        for extents in extents.chunks(extents.len().div_ceil(pieces)) {
            self.shared.queue.push_urgent(vec![Task::Piece { of: of.clone(), extents: extents.to_vec() }]);
        }
        Ok(())
    }

    fn piece(&mut self, of: &SharedFile, extents: &[(u64, u32)]) {
        let entry = of.task.entry;
        match self.hash(&of.file, extents) {
            Ok(hashed) => {
                let changed = ends_early(extents, &hashed).then_some(Outcome::Changed);
                let content = Outcome::Content(Content { xattrs: Vec::new(), extents: hashed });
                self.read.extend(
                    [content].into_iter().chain(changed).map(|outcome| ReadResult { entry, outcome }),
                );
            }
            Err(error) => self.read.push(ReadResult { entry, outcome: Outcome::Unreadable(error) }),
        }
        // The last reader sees every change that any reader could have seen.
        if of.pieces_left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Err(error) = self.check(&of.task, &of.file)
        {
            self.read.push(ReadResult { entry, outcome: Outcome::Unreadable(error) });
        }
    }

    /// Hashes a file up to its end. Returns the size and the extents.
    fn read_to_end(&mut self, file: &OwnedFd) -> Result<(u64, Vec<Extent>), Errno> {
        let (mut extents, mut size_bytes) = (Vec::new(), 0);
        loop {
            let hashed = self.hash(file, &[(size_bytes, MAX_EXTENT_BYTES)])?;
            let Some(extent) = hashed.first() else { return Ok((size_bytes, extents)) };
            size_bytes += u64::from(extent.length);
            if size_bytes > MAX_UNSIZED_BYTES {
                return Err(Errno::FBIG);
            }
            extents.push(*extent);
            if extent.length < MAX_EXTENT_BYTES {
                return Ok((size_bytes, extents));
            }
        }
    }

    /// Hashes extents. Extents at the end of a truncated file are shorter than requested.
    fn hash(&mut self, file: &OwnedFd, extents: &[(u64, u32)]) -> Result<Vec<Extent>, Errno> {
        let mut hashed = Vec::with_capacity(extents.len());
        for (offset, length) in extents {
            if self.shared.stopped() {
                break;
            }
            let buffer = &mut self.buffer[..*length as usize];
            let length = crate::read::fill(file, buffer, *offset)?;
            if length == 0 {
                break;
            }
            let digest = Digest(*blake3::hash(&buffer[..length]).as_bytes());
            // At most the requested length, which fits into 32 bits.
            hashed.push(Extent { offset: *offset, length: length as u32, digest });
            self.shared.count(0, length as u64);
        }
        Ok(hashed)
    }

    fn check(&mut self, task: &FileTask, file: &OwnedFd) -> Result<(), Errno> {
        if let Some(after_read) = self.shared.after_read {
            after_read(Path::new(OsStr::from_bytes(&task.path)));
        }
        let (now, before) = (Fingerprint::of(&fstat(file)?), &task.fingerprint);
        let same = if self.shared.shared_files { now.has_content_of(before) } else { now == *before };
        if !same {
            self.read.push(ReadResult { entry: task.entry, outcome: Outcome::Changed });
        }
        self.shared.count(1, 0);
        Ok(())
    }
}

/// Whether a file ended before the end of its last extent.
fn ends_early(wanted: &[(u64, u32)], hashed: &[Extent]) -> bool {
    wanted.last().map(|(offset, length)| (*offset, *length))
        != hashed.last().map(|extent| (extent.offset, extent.length))
}

/// Returns the offsets and lengths of a file's extents: its data between holes, divided at
/// multiples of 1 MiB.
fn layout(file: &OwnedFd, size_bytes: u64, may_have_holes: bool) -> Result<Vec<(u64, u32)>, Errno> {
    let mut extents = Vec::new();
    let mut cut = |mut offset: u64, end: u64| {
        let step = u64::from(MAX_EXTENT_BYTES);
        while offset < end {
            let next = end.min((offset / step + 1) * step);
            extents.push((offset, (next - offset) as u32));
            offset = next;
        }
    };
    if !may_have_holes {
        cut(0, size_bytes);
        return Ok(extents);
    }
    let mut offset = 0;
    while offset < size_bytes {
        let data = match seek(file, SeekFrom::Data(offset)) {
            Ok(data) => data,
            Err(Errno::NXIO) => break,
            // The file system does not support holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => offset,
            Err(error) => return Err(error),
        };
        let hole = match seek(file, SeekFrom::Hole(data)) {
            Ok(hole) => hole,
            Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => size_bytes,
            Err(error) => return Err(error),
        };
        cut(data.min(size_bytes), hole.min(size_bytes));
        offset = hole.max(offset + 1);
    }
    Ok(extents)
}
