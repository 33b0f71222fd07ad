//! The thread that lists a tree in the order of manifests, and queues its files for hashing.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use std::vec;

use rustix::fs::{AtFlags, FileType, Stat, fstat, readlinkat, statat};
use rustix::io::Errno;

use super::layer::{Upper, join};
use super::read::{FileTask, Outcome, ReadResult, Task};
use super::{
    OtherFileSystems, PIECE_BYTES, Problem, ProblemKind, Scan, ScanError, ScanOptions, ScannedOwnership,
    Shared,
};
use crate::cache::{Content, Fingerprint, StatCache};
use crate::dirs::Cursor;
use crate::entry::{DeviceKind, Entry, EntryKind, MAX_PATH_BYTES, as_path};
use crate::manifest::{InvalidManifest, Limits, Manifest};
use crate::xattrs;

/// Maximum number of small files in a batch.
const BATCH_FILES: usize = 32;

/// Maximum number of directories that stay open for the files of a batch. With all batches of the
/// queue and of the threads, a scan keeps about a hundred directories open.
const BATCH_DIRECTORIES: usize = 2;

/// A directory on the current path of the walk, with its remaining names.
struct Level {
    path: Vec<u8>,
    names: vec::IntoIter<Vec<u8>>,
    /// Its path in the tree below, if this tree is an overlay and the directory is there.
    below: Option<Vec<u8>>,
}

pub(super) struct Walk<'a> {
    cursor: Cursor,
    upper: Option<Upper<'a>>,
    options: &'a ScanOptions<'a>,
    cache: Option<&'a StatCache>,
    shared: &'a Shared<'a>,
    device: u64,
    /// Reliability of file sizes, by device.
    sizes: HashMap<u64, SizeTrust>,
    /// Entry of the first path of each file with several links, by device and inode.
    linked: HashMap<(u64, u64), usize>,
    batch: Vec<Task>,
    batch_bytes: u64,
    /// The directory of the last file of the batch, and the number of directories in the batch.
    batch_directories: (Option<Arc<OwnedFd>>, usize),
    listing: Vec<u8>,
    /// Number of remaining names of all levels.
    held: u64,
    walked: WalkResult,
}

/// The result of the walk.
#[derive(Default)]
pub(super) struct WalkResult {
    entries: Vec<Entry>,
    /// Fingerprints of files.
    fingerprints: HashMap<usize, Fingerprint>,
    /// Unreadable entries, which are left out.
    left_out: HashMap<usize, Errno>,
    problems: Vec<Problem>,
    /// Files that changed while they were read. The cache must not contain them.
    changed: HashSet<usize>,
    /// Names of extended attributes that manifests do not include, one per file.
    attributes: HashMap<usize, Vec<u8>>,
    /// Files that the cache contained.
    known: HashSet<usize>,
    files_read: u64,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        cursor: Cursor,
        upper: Option<Upper<'a>>,
        options: &'a ScanOptions<'a>,
        cache: Option<&'a StatCache>,
        shared: &'a Shared<'a>,
    ) -> Self {
        Self {
            cursor,
            upper,
            options,
            cache,
            shared,
            device: 0,
            sizes: HashMap::new(),
            linked: HashMap::new(),
            batch: Vec::new(),
            batch_bytes: 0,
            batch_directories: (None, 0),
            listing: Vec::with_capacity(64 << 10),
            held: 0,
            walked: WalkResult::default(),
        }
    }

    pub(super) fn run(mut self) -> Result<WalkResult, ScanError> {
        let root = self.cursor.root().clone();
        let stat = fstat(&root).map_err(|error| ScanError::Root(error.into()))?;
        self.device = stat.st_dev;
        let found = xattrs::find(&root, false).map_err(|error| ScanError::Root(error.into()))?;
        self.note_skipped_xattr(b"", &found.skipped);
        self.walked.entries.push(self.entry(Vec::new(), &stat, found.portable, EntryKind::Directory));
        let names = self.list(&[], &root).map_err(|error| ScanError::Root(error.into()))?;
        self.check_limits()?;

        let below = self.upper.as_ref().map(|_| Vec::new());
        let mut levels = vec![Level { path: Vec::new(), names, below }];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.next() else {
                levels.pop();
                continue;
            };
            if self.shared.stopped() {
                return Err(ScanError::Stopped);
            }
            self.held -= 1;
            let path = join(&level.path, &name);
            match self.visit(&level.path, &name, &path, level.below.as_deref()) {
                Ok(Some(names)) => {
                    let below = level.below.as_deref().zip(self.upper.as_mut());
                    let below = below.and_then(|(below, upper)| upper.below(&level.path, &name, below));
                    levels.push(Level { path, names, below });
                }
                Ok(None) => {}
                Err(error) => self.walked.problem(&path, error),
            }
            self.check_limits()?;
        }
        self.send_batch();
        Ok(self.walked)
    }

    /// Ends the walk when its memory exceeds the limits of a manifest.
    fn check_limits(&self) -> Result<(), InvalidManifest> {
        let limits = self.options.limits;
        if self.walked.entries.len() as u64 > limits.entries || self.held > limits.entries {
            return Err(InvalidManifest::TooManyEntries(limits.entries));
        }
        self.shared.check()
    }

    /// Adds the entry at a path. Returns the names in a directory. `below` is the path of `parent`
    /// below.
    fn visit(
        &mut self,
        parent: &[u8],
        name: &[u8],
        path: &[u8],
        below: Option<&[u8]>,
    ) -> Result<Option<vec::IntoIter<Vec<u8>>>, Errno> {
        let directory = self.cursor.go(parent).map_err(errno)?;
        let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        let is_directory = file_type == FileType::Directory;
        if self.options.exclude.is_some_and(|exclude| exclude(as_path(path), is_directory)) {
            return Ok(None);
        }
        if path.len() > MAX_PATH_BYTES {
            let what = ProblemKind::PathTooLong;
            self.walked.problems.push(Problem { path: as_path(path).to_owned(), what });
            return Ok(None);
        }
        if below.is_some_and(|below| self.add_unchanged(parent, name, path, below)) {
            return Ok(None);
        }
        if is_directory {
            return self.enter(path);
        }
        if self.add_hard_link(path, &stat) {
            return Ok(None);
        }

        let kind = match file_type {
            FileType::RegularFile => {
                self.add_file(directory, name, path, &stat);
                return Ok(None);
            }
            FileType::Symlink => {
                let target = readlinkat(&directory, name, Vec::new())?.into_bytes();
                self.shared.reserve_bytes(target.len());
                EntryKind::Symlink { target }
            }
            FileType::Fifo => EntryKind::Fifo,
            FileType::CharacterDevice => device(DeviceKind::Character, &stat),
            FileType::BlockDevice => device(DeviceKind::Block, &stat),
            _ => {
                let what = ProblemKind::SkippedSocket;
                self.walked.problems.push(Problem { path: as_path(path).to_owned(), what });
                return Ok(None);
            }
        };
        let entry = self.entry(path.to_vec(), &stat, Vec::new(), kind);
        self.walked.entries.push(entry);
        Ok(None)
    }

    fn enter(&mut self, path: &[u8]) -> Result<Option<vec::IntoIter<Vec<u8>>>, Errno> {
        let opened = self.cursor.go(path).map_err(errno);
        let (stat, found) = match &opened {
            Ok(directory) => (fstat(directory)?, xattrs::find(directory, false)?),
            Err(error) => {
                // A directory that cannot be opened becomes an entry without contents.
                let (parent, name) = crate::entry::split(path);
                let parent = self.cursor.go(parent).map_err(errno)?;
                let stat = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                    return Err(*error);
                }
                (stat, xattrs::FileXattrs::default())
            }
        };
        let elsewhere =
            stat.st_dev != self.device && self.options.other_file_systems == OtherFileSystems::Leave;
        self.note_skipped_xattr(path, &found.skipped);
        self.shared.reserve_xattrs(&found.portable);
        let entry = self.entry(path.to_vec(), &stat, found.portable, EntryKind::Directory);
        self.walked.entries.push(entry);
        if elsewhere {
            return Ok(None);
        }
        let directory = opened?;
        self.list(path, &directory).map(Some)
    }

    /// Records the name of an extended attribute that manifests do not include. `xattr` is empty if
    /// there is none.
    fn note_skipped_xattr(&mut self, path: &[u8], xattr: &[u8]) {
        if !xattr.is_empty() {
            self.shared.reserve_path(path.len() + xattr.len());
            self.walked.skipped_xattr(path, xattr);
        }
    }

    /// Returns the names in a directory, in order. Each name becomes an entry or a problem.
    fn list(&mut self, path: &[u8], directory: &OwnedFd) -> Result<vec::IntoIter<Vec<u8>>, Errno> {
        let (held, shared, most) = (&mut self.held, self.shared, self.options.limits.entries);
        let keep = |name: &[u8]| {
            shared.reserve_path(path.len() + 1 + name.len());
            *held += 1;
            // One name above the limit suffices to detect that the limit is exceeded.
            *held <= most.saturating_add(1) && shared.check().is_ok()
        };
        let mut names = crate::dirs::list(directory, &mut self.listing, keep)?;
        names.sort_unstable();
        Ok(names.into_iter())
    }

    /// Adds an entry and its contents if they are those of the tree below. Returns whether they
    /// are.
    fn add_unchanged(&mut self, parent: &[u8], name: &[u8], path: &[u8], below: &[u8]) -> bool {
        let Some(upper) = &mut self.upper else { return false };
        let Some(found) = upper.unchanged(parent, name, below) else { return false };
        for entry in upper.entries(found, path) {
            self.shared.reserve_path(entry.path.len());
            self.shared.reserve_xattrs(&entry.xattrs);
            match &entry.kind {
                EntryKind::File { size_bytes, .. } => {
                    self.walked.known.insert(self.walked.entries.len());
                    self.shared.count(1, *size_bytes);
                }
                EntryKind::Symlink { target } => self.shared.reserve_bytes(target.len()),
                _ => {}
            }
            self.walked.entries.push(entry);
        }
        true
    }

    /// Adds a hard link if the file was found before at another path. Returns whether it was.
    fn add_hard_link(&mut self, path: &[u8], stat: &Stat) -> bool {
        if stat.st_nlink < 2 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return false;
        }
        let index = self.walked.entries.len();
        let first = *self.linked.entry((stat.st_dev, stat.st_ino)).or_insert(index);
        if first == index {
            return false;
        }
        let to = self.walked.entries[first].path.clone();
        self.shared.reserve_bytes(to.len());
        self.walked.entries.push(Entry {
            path: path.to_vec(),
            mode: 0,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind: EntryKind::HardLink { to },
        });
        true
    }

    /// Adds a file with its cached content, or queues it for the readers.
    fn add_file(&mut self, directory: Arc<OwnedFd>, name: &[u8], path: &[u8], stat: &Stat) {
        let index = self.walked.entries.len();
        let fingerprint = Fingerprint::of(stat);
        let size_bytes = stat.st_size.cast_unsigned();
        let is_unsized = self.sizes(&directory, stat.st_dev).are_unknown(size_bytes);
        let known =
            self.cache.filter(|_| !is_unsized).and_then(|cache| cache.get(path, &fingerprint)).cloned();
        let is_known = known.is_some();
        let Content { xattrs, extents } = known.unwrap_or_default();
        let entry = self.entry(path.to_vec(), stat, xattrs, EntryKind::File { size_bytes, extents });
        self.walked.entries.push(entry);
        if !is_unsized {
            self.walked.fingerprints.insert(index, fingerprint);
        }
        if is_known {
            if let Some(xattr) = self.cache.and_then(|cache| cache.skipped_xattr(path)) {
                self.note_skipped_xattr(path, xattr);
                self.walked.attributes.insert(index, xattr.to_vec());
            }
            self.walked.known.insert(index);
            self.shared.count(1, size_bytes);
            return;
        }
        self.walked.files_read += 1;
        // A file with fewer blocks than its size has holes or is compressed.
        let may_have_holes = stat.st_blocks.cast_unsigned().saturating_mul(512) < size_bytes;
        let (last, directories) = &self.batch_directories;
        if last.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &directory)) {
            if *directories >= BATCH_DIRECTORIES {
                self.send_batch();
            }
            self.batch_directories = (Some(directory.clone()), self.batch_directories.1 + 1);
        }
        let file = FileTask {
            entry: index,
            directory,
            name: name.to_vec(),
            path: path.to_vec(),
            fingerprint,
            size_bytes,
            may_have_holes,
            is_unsized,
        };
        self.batch.push(Task::File(file));
        self.batch_bytes += size_bytes;
        if self.batch.len() >= BATCH_FILES || self.batch_bytes >= PIECE_BYTES / 2 {
            self.send_batch();
        }
    }

    /// Returns the reliability of file sizes on `device`, the device of `directory`.
    fn sizes(&mut self, directory: &OwnedFd, device: u64) -> SizeTrust {
        *self.sizes.entry(device).or_insert_with(|| SizeTrust::of(directory))
    }

    fn send_batch(&mut self) {
        (self.batch_bytes, self.batch_directories) = (0, (None, 0));
        let batch = std::mem::take(&mut self.batch);
        if !batch.is_empty() {
            self.shared.queue.push(batch);
        }
    }

    #[allow(clippy::unnecessary_cast)] // The fields differ from architecture to architecture.
    fn entry(&self, path: Vec<u8>, stat: &Stat, xattrs: Vec<crate::Xattr>, kind: EntryKind) -> Entry {
        let (uid, gid) = match self.options.ownership {
            ScannedOwnership::Keep => (stat.st_uid, stat.st_gid),
            ScannedOwnership::Root => (0, 0),
        };
        let mut mode = if matches!(kind, EntryKind::Symlink { .. }) { 0 } else { stat.st_mode & 0o7777 };
        // With another owner, these bits would grant rights that no user has granted.
        if uid != stat.st_uid {
            mode &= !0o4000;
        }
        if gid != stat.st_gid && !matches!(kind, EntryKind::Directory) {
            mode &= !0o2000;
        }
        Entry {
            path,
            mode,
            uid,
            gid,
            mtime_seconds: stat.st_mtime as i64,
            mtime_nanos: stat.st_mtime_nsec as u32,
            xattrs,
            kind,
        }
    }
}

/// The reliability of file sizes on a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SizeTrust {
    /// All sizes are exact.
    Exact,
    /// Sizes are exact, but a file of size 0 may have content.
    ExactUnlessZero,
    /// No size is exact, because the kernel generates the content when a process reads it.
    Unreliable,
}

impl SizeTrust {
    fn of(directory: &OwnedFd) -> Self {
        /// Magic numbers in `linux/magic.h` of proc, sysfs, debugfs, tracefs, securityfs, both
        /// kinds of cgroups, resctrl, bpf, configfs, binfmt_misc, selinuxfs, smackfs and xenfs.
        const GENERATED: [i64; 14] = [
            0x9fa0,
            0x6265_6572,
            0x6462_6720,
            0x7472_6163,
            0x7363_6673,
            0x0027_e0eb,
            0x6367_7270,
            0x0765_5821,
            0xcafe_4a11,
            0x6265_6570,
            0x4249_4e4d,
            0xf97c_ff8c,
            0x4341_5d53,
            0xabba_1974,
        ];
        const FUSE: i64 = 0x6573_5546;
        #[allow(clippy::unnecessary_cast, clippy::cast_lossless)]
        // The field differs from architecture to architecture.
        match rustix::fs::fstatfs(directory).map(|found| found.f_type as i64 & 0xffff_ffff) {
            Ok(FUSE) => Self::ExactUnlessZero,
            Ok(kind) if GENERATED.contains(&kind) => Self::Unreliable,
            _ => Self::Exact,
        }
    }

    /// Whether the real size of a file with this size is unknown.
    fn are_unknown(self, size_bytes: u64) -> bool {
        match self {
            Self::Exact => false,
            Self::ExactUnlessZero => size_bytes == 0,
            Self::Unreliable => true,
        }
    }
}

fn device(kind: DeviceKind, stat: &Stat) -> EntryKind {
    EntryKind::Device { kind, major: rustix::fs::major(stat.st_rdev), minor: rustix::fs::minor(stat.st_rdev) }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

impl WalkResult {
    fn skipped_xattr(&mut self, path: &[u8], xattr: &[u8]) {
        let what = ProblemKind::SkippedXattr(String::from_utf8_lossy(xattr).into_owned());
        self.problems.push(Problem { path: as_path(path).to_owned(), what });
    }

    fn problem(&mut self, path: &[u8], error: Errno) {
        let what = match error {
            // The entry existed, with another type, when its name was listed.
            Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::STALE => ProblemKind::ChangedWhileRead,
            error => ProblemKind::Unreadable(error.into()),
        };
        self.problems.push(Problem { path: as_path(path).to_owned(), what });
    }

    /// Adds the results of the readers.
    pub(super) fn add_results(&mut self, read: Vec<ReadResult>) {
        for ReadResult { entry: index, outcome } in read {
            let path = self.entries[index].path.clone();
            match outcome {
                Outcome::Content(content) => {
                    let entry = &mut self.entries[index];
                    if let EntryKind::File { extents, .. } = &mut entry.kind {
                        extents.extend(content.extents);
                        extents.sort_unstable_by_key(|extent| extent.offset);
                    }
                    entry.xattrs.extend(content.xattrs);
                }
                Outcome::Size(read) => {
                    if let EntryKind::File { size_bytes, .. } = &mut self.entries[index].kind {
                        *size_bytes = read;
                    }
                }
                Outcome::SkippedXattr(xattr) => {
                    self.skipped_xattr(&path, &xattr);
                    self.attributes.insert(index, xattr);
                }
                Outcome::Changed => {
                    if self.changed.insert(index) {
                        let what = ProblemKind::ChangedWhileRead;
                        self.problems.push(Problem { path: as_path(&path).to_owned(), what });
                    }
                }
                Outcome::Unreadable(error) => {
                    if self.left_out.insert(index, error).is_none() {
                        self.problem(&path, error);
                    }
                }
            }
        }
        if self.left_out.is_empty() {
            return;
        }
        // Further links to an unreadable file are unreadable, too.
        let unreadable: HashMap<&[u8], Errno> =
            self.left_out.iter().map(|(index, error)| (&self.entries[*index].path[..], *error)).collect();
        let links: Vec<_> = (0..)
            .zip(&self.entries)
            .filter_map(|(index, entry)| match &entry.kind {
                EntryKind::HardLink { to } => Some((index, *unreadable.get(&to[..])?)),
                _ => None,
            })
            .collect();
        for (index, error) in links {
            self.left_out.insert(index, error);
            let path = self.entries[index].path.clone();
            self.problem(&path, error);
        }
    }

    /// Returns the cache for the next scan.
    pub(super) fn cache(&self, started: SystemTime, settle: Duration) -> StatCache {
        let mut cache = StatCache::new();
        for (index, fingerprint) in &self.fingerprints {
            // A cached file has settled before.
            if !(self.known.contains(index) || fingerprint.settled(started, settle))
                || self.left_out.contains_key(index)
                || self.changed.contains(index)
            {
                continue;
            }
            let entry = &self.entries[*index];
            let content = Content { xattrs: entry.xattrs.clone(), extents: entry.extents().to_vec() };
            cache.insert(entry.path.clone(), *fingerprint, content);
            if let Some(xattr) = self.attributes.get(index) {
                cache.insert_skipped_xattr(entry.path.clone(), xattr.clone());
            }
        }
        cache
    }

    pub(super) fn finish(mut self, limits: Limits) -> Result<Scan, ScanError> {
        let left_out = self.left_out;
        let entries = (0..).zip(self.entries).filter(|(index, _)| !left_out.contains_key(index));
        let manifest = Manifest::new(entries.map(|(_, entry)| entry), limits)?;
        self.problems.sort_by(|a, b| {
            crate::entry::compare_paths(a.path.as_os_str().as_bytes(), b.path.as_os_str().as_bytes())
        });
        Ok(Scan {
            manifest,
            problems: self.problems,
            files_known: self.known.len() as u64,
            files_read: self.files_read,
        })
    }
}
