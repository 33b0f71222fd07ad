//! Scanning: from a directory to its manifest.
//!
//! One thread walks the tree in canonical order; others read and hash what the [`StatCache`] does not know. Symbolic
//! links are never followed. Content is cut at multiples of 1 MiB; holes become gaps.
//!
//! Problems with single paths are collected, and the caller decides: an unreadable file is left out, an unreadable
//! directory is kept without what it holds, a file that changed while it was read is kept as it was read, and what
//! vanished is left out.
//!
//! Invariant: the order of entries does not depend on how many threads there are.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};
use std::vec;

use domain::Digest;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, readlinkat, seek, statat};
use rustix::io::Errno;

use crate::cache::{Content, Fingerprint, StatCache};
use crate::dirs::Cursor;
use crate::manifest::{
    DeviceKind, Entry, EntryKind, Extent, InvalidManifest, Limits, MAX_EXTENT_BYTES, MAX_PATH_BYTES,
    Manifest, as_path,
};
use crate::xattrs;

/// Bytes that one thread reads before another may take over.
const PIECE_BYTES: u64 = 4 << 20;
/// Files that are handed to a thread together, if they are small.
const BATCH_FILES: usize = 32;
/// Batches that wait for a thread.
const QUEUE_BATCHES: usize = 16;

/// Says whether a path, relative to the root, is to be left out; the flag says whether it is a directory.
pub type Exclude<'a> = &'a dyn Fn(&Path, bool) -> bool;

/// How to scan.
#[derive(Clone, Copy)]
pub struct ScanOptions<'a> {
    /// What becomes of owners and groups.
    pub ownership: ScannedOwnership,
    /// What is left out. Directories that are left out are not entered. Never asked about the root.
    pub exclude: Option<Exclude<'a>>,
    /// What becomes of directories on which another file system is mounted.
    pub other_file_systems: OtherFileSystems,
    /// How many threads read and hash; 0 for one per core, up to 8.
    pub threads: usize,
    /// Counts along.
    pub progress: Option<&'a Progress>,
    /// Ends the scan with [`ScanError::Stopped`] once true.
    pub stop: Option<&'a AtomicBool>,
    /// How much the manifest may hold.
    pub limits: Limits,
    /// How much older than this scan a file's times must be for the stat cache to remember it. See
    /// [`StatCache`].
    pub settle: Duration,
    /// Called after the content of a file was read, before it is checked whether it changed meanwhile.
    #[doc(hidden)]
    pub after_read: Option<&'a (dyn Fn(&Path) + Sync)>,
}

impl Default for ScanOptions<'_> {
    fn default() -> Self {
        Self {
            ownership: ScannedOwnership::Keep,
            exclude: None,
            other_file_systems: OtherFileSystems::Enter,
            threads: 0,
            progress: None,
            stop: None,
            limits: Limits::default(),
            settle: Duration::from_secs(2),
            after_read: None,
        }
    }
}

/// What becomes of owners and groups in a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScannedOwnership {
    /// They are kept.
    Keep,
    /// Everything belongs to user and group 0, so that the digest does not depend on who scans. Files that belong to others lose setuid and
    /// setgid: they would become those of user and group 0.
    Root,
}

/// What becomes of directories on which another file system is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherFileSystems {
    /// They are scanned like others.
    Enter,
    /// They stay empty.
    Leave,
}

/// How far a scan is. May be read by other threads while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    files: AtomicU64,
    bytes: AtomicU64,
}

impl Progress {
    /// Regular files done.
    #[must_use]
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Bytes of content done, whether read or known.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn add(&self, files: u64, bytes: u64) {
        self.files.fetch_add(files, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A tree that was scanned.
#[derive(Debug)]
pub struct Scan {
    /// What it holds.
    pub manifest: Manifest,
    /// What went wrong with single paths, in the order of paths.
    pub problems: Vec<Problem>,
    /// How many files were not read, because the stat cache knew them.
    pub files_known: u64,
    /// How many files were read.
    pub files_read: u64,
}

/// Something is wrong with one path.
#[derive(Debug, thiserror::Error)]
#[error("{path:?} {what}")]
pub struct Problem {
    /// The path, relative to the root.
    pub path: PathBuf,
    /// What is wrong.
    #[source]
    pub what: ProblemKind,
}

/// What is wrong with a path.
#[derive(Debug, thiserror::Error)]
pub enum ProblemKind {
    /// It cannot be read, or cannot travel. A file was left out; a directory is there without what it holds.
    #[error("cannot be read")]
    Unreadable(#[source] io::Error),
    /// It changed or vanished while it was read.
    #[error("changed while it was read")]
    ChangedWhileRead,
    /// It is a socket, which was left out.
    #[error("is a socket")]
    SkippedSocket,
}

/// A tree cannot be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The root is missing, is no directory, or cannot be read.
    #[error("cannot open the directory")]
    Root(#[source] io::Error),
    /// It holds more than a manifest may.
    #[error("the tree makes no manifest")]
    Manifest(#[from] InvalidManifest),
    /// The scan was told to stop.
    #[error("the scan was stopped")]
    Stopped,
}

/// Scans the tree below `root`.
///
/// With a cache, files that it knows are not read; afterwards it knows the files of this scan and no others, so a
/// cache belongs to one root.
///
/// # Errors
///
/// The root cannot be read, the tree is too large, or the scan was stopped. Problems with single paths are no errors.
pub fn scan(
    root: &Path,
    options: &ScanOptions<'_>,
    cache: Option<&mut StatCache>,
) -> Result<Scan, ScanError> {
    let started = SystemTime::now();
    let cursor = Cursor::new(root).map_err(ScanError::Root)?;
    let shared = Shared {
        queue: Queue::default(),
        progress: options.progress,
        stop: options.stop,
        after_read: options.after_read,
    };
    let threads = match options.threads {
        0 => thread::available_parallelism().map_or(2, NonZero::get).clamp(2, 8),
        threads => threads,
    };

    let (walked, read) = thread::scope(|scope| {
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(|| Reader::new(&shared).run())).collect();
        let close = CloseOnDrop(&shared.queue);
        let walked = Walk::new(cursor, options, cache.as_deref(), &shared).run();
        drop(close);
        let joined = readers.into_iter().map(|reader| reader.join());
        let read = joined.map(|read| read.unwrap_or_else(|panic| panic::resume_unwind(panic)));
        (walked, read.flatten().collect::<Vec<_>>())
    });
    let mut walked = walked?;
    if shared.stopped() {
        return Err(ScanError::Stopped);
    }

    walked.take_in(read);
    if let Some(cache) = cache {
        *cache = walked.cache(started, options.settle);
    }
    walked.finish(options.limits)
}

/// What walker and readers share.
struct Shared<'a> {
    queue: Queue,
    progress: Option<&'a Progress>,
    stop: Option<&'a AtomicBool>,
    after_read: Option<&'a (dyn Fn(&Path) + Sync)>,
}

impl Shared<'_> {
    fn stopped(&self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    fn count(&self, files: u64, bytes: u64) {
        if let Some(progress) = self.progress {
            progress.add(files, bytes);
        }
    }
}

// The walk.

/// A directory whose names are being gone through.
struct Level {
    path: Vec<u8>,
    names: vec::IntoIter<Vec<u8>>,
}

struct Walk<'a> {
    cursor: Cursor,
    options: &'a ScanOptions<'a>,
    cache: Option<&'a StatCache>,
    shared: &'a Shared<'a>,
    device: u64,
    /// The first path of each file that has several.
    linked: HashMap<(u64, u64), usize>,
    batch: Vec<Task>,
    batch_bytes: u64,
    listing: Vec<u8>,
    walked: Walked,
}

/// What the walk found.
#[derive(Default)]
struct Walked {
    entries: Vec<Entry>,
    /// For each entry that is a file, what it was found to be.
    fingerprints: HashMap<usize, Fingerprint>,
    /// Entries that turned out to be unreadable.
    left_out: HashMap<usize, Errno>,
    problems: Vec<Problem>,
    /// Files that changed while they were read: nothing to remember.
    changed: HashSet<usize>,
    files_known: u64,
    files_read: u64,
}

impl<'a> Walk<'a> {
    fn new(
        cursor: Cursor,
        options: &'a ScanOptions<'a>,
        cache: Option<&'a StatCache>,
        shared: &'a Shared<'a>,
    ) -> Self {
        Self {
            cursor,
            options,
            cache,
            shared,
            device: 0,
            linked: HashMap::new(),
            batch: Vec::new(),
            batch_bytes: 0,
            listing: Vec::with_capacity(64 << 10),
            walked: Walked::default(),
        }
    }

    fn run(mut self) -> Result<Walked, ScanError> {
        let root = self.cursor.root().clone();
        let stat = fstat(&root).map_err(|error| ScanError::Root(error.into()))?;
        self.device = stat.st_dev;
        let xattrs = xattrs::read(&root, false).map_err(|error| ScanError::Root(error.into()))?;
        self.walked.entries.push(self.entry(Vec::new(), &stat, xattrs, EntryKind::Directory));
        let names = self.list(&root).map_err(|error| ScanError::Root(error.into()))?;

        let mut levels = vec![Level { path: Vec::new(), names }];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.names.next() else {
                levels.pop();
                continue;
            };
            if self.shared.stopped() {
                return Err(ScanError::Stopped);
            }
            if self.walked.entries.len() as u64 > self.options.limits.entries {
                return Err(InvalidManifest::TooManyEntries(self.options.limits.entries).into());
            }
            let mut path = level.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            match self.visit(&level.path, &name, &path) {
                Ok(Some(names)) => levels.push(Level { path, names }),
                Ok(None) => {}
                Err(error) => self.walked.problem(&path, error),
            }
        }
        self.send_batch();
        Ok(self.walked)
    }

    /// Takes in what stands at a path; if that is a directory, the names in it.
    fn visit(
        &mut self,
        parent: &[u8],
        name: &[u8],
        path: &[u8],
    ) -> Result<Option<vec::IntoIter<Vec<u8>>>, Errno> {
        if path.len() > MAX_PATH_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
        let directory = self.cursor.go(parent).map_err(errno)?;
        let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let file_type = FileType::from_raw_mode(stat.st_mode);
        let is_directory = file_type == FileType::Directory;
        if self.options.exclude.is_some_and(|exclude| exclude(as_path(path), is_directory)) {
            return Ok(None);
        }
        if is_directory {
            return self.enter(path);
        }
        if self.is_another_link(path, &stat) {
            return Ok(None);
        }

        let kind = match file_type {
            FileType::RegularFile => {
                self.file(directory, name, path, &stat);
                return Ok(None);
            }
            FileType::Symlink => {
                EntryKind::Symlink { target: readlinkat(&directory, name, Vec::new())?.into_bytes() }
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
        let (stat, xattrs) = match &opened {
            Ok(directory) => (fstat(directory)?, xattrs::read(directory, false)?),
            Err(error) => {
                // It is there, but may not be opened: an entry without what it holds.
                let (parent, name) = crate::manifest::split(path);
                let parent = self.cursor.go(parent).map_err(errno)?;
                let stat = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                    return Err(*error);
                }
                (stat, Vec::new())
            }
        };
        let elsewhere =
            stat.st_dev != self.device && self.options.other_file_systems == OtherFileSystems::Leave;
        let entry = self.entry(path.to_vec(), &stat, xattrs, EntryKind::Directory);
        self.walked.entries.push(entry);
        if elsewhere {
            return Ok(None);
        }
        let directory = opened?;
        self.list(&directory).map(Some)
    }

    /// The names in a directory, in order.
    fn list(&mut self, directory: &OwnedFd) -> Result<vec::IntoIter<Vec<u8>>, Errno> {
        let mut names = crate::dirs::list(directory, &mut self.listing)?;
        names.sort_unstable();
        Ok(names.into_iter())
    }

    /// Whether this is a file that was found before at another path; then it is taken in as a link to that.
    fn is_another_link(&mut self, path: &[u8], stat: &Stat) -> bool {
        if stat.st_nlink < 2 || FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return false;
        }
        let index = self.walked.entries.len();
        let first = *self.linked.entry((stat.st_dev, stat.st_ino)).or_insert(index);
        if first == index {
            return false;
        }
        let to = self.walked.entries[first].path.clone();
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

    /// Takes in a file: as it is known, or to be read.
    fn file(&mut self, directory: Arc<OwnedFd>, name: &[u8], path: &[u8], stat: &Stat) {
        let index = self.walked.entries.len();
        let fingerprint = Fingerprint::of(stat);
        let size_bytes = stat.st_size.cast_unsigned();
        let known = self.cache.and_then(|cache| cache.get(path, &fingerprint)).cloned();
        let is_known = known.is_some();
        let Content { xattrs, extents } = known.unwrap_or_default();
        let entry = self.entry(path.to_vec(), stat, xattrs, EntryKind::File { size_bytes, extents });
        self.walked.entries.push(entry);
        self.walked.fingerprints.insert(index, fingerprint);
        if is_known {
            self.walked.files_known += 1;
            self.shared.count(1, size_bytes);
            return;
        }
        self.walked.files_read += 1;
        // Files whose blocks cannot hold all of their bytes have holes, or are compressed: that takes a closer look.
        let may_have_holes = stat.st_blocks.cast_unsigned().saturating_mul(512) < size_bytes;
        let file = Unread {
            entry: index,
            directory,
            name: name.to_vec(),
            path: path.to_vec(),
            fingerprint,
            size_bytes,
            may_have_holes,
        };
        self.batch.push(Task::File(file));
        self.batch_bytes += size_bytes;
        if self.batch.len() >= BATCH_FILES || self.batch_bytes >= PIECE_BYTES / 2 {
            self.send_batch();
        }
    }

    fn send_batch(&mut self) {
        self.batch_bytes = 0;
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
        // Under another owner these would give away rights that nobody gave.
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

fn device(kind: DeviceKind, stat: &Stat) -> EntryKind {
    EntryKind::Device { kind, major: rustix::fs::major(stat.st_rdev), minor: rustix::fs::minor(stat.st_rdev) }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

impl Walked {
    fn problem(&mut self, path: &[u8], error: Errno) {
        let what = match error {
            // It was there when its name was listed, and was what its entry said.
            Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::STALE => ProblemKind::ChangedWhileRead,
            error => ProblemKind::Unreadable(error.into()),
        };
        self.problems.push(Problem { path: as_path(path).to_owned(), what });
    }

    /// Takes in what the readers read.
    fn take_in(&mut self, read: Vec<Read>) {
        for Read { entry: index, outcome } in read {
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
                Outcome::Changed => {
                    self.changed.insert(index);
                    let what = ProblemKind::ChangedWhileRead;
                    self.problems.push(Problem { path: as_path(&path).to_owned(), what });
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
        // What is another link to a file that cannot be read cannot be read either.
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

    /// What the next scan need not read.
    fn cache(&self, started: SystemTime, settle: Duration) -> StatCache {
        let mut cache = StatCache::new();
        for (index, fingerprint) in &self.fingerprints {
            if !fingerprint.settled(started, settle)
                || self.left_out.contains_key(index)
                || self.changed.contains(index)
            {
                continue;
            }
            let entry = &self.entries[*index];
            let content = Content { xattrs: entry.xattrs.clone(), extents: entry.extents().to_vec() };
            cache.insert(entry.path.clone(), *fingerprint, content);
        }
        cache
    }

    fn finish(mut self, limits: Limits) -> Result<Scan, ScanError> {
        let left_out = self.left_out;
        let entries = (0..).zip(self.entries).filter(|(index, _)| !left_out.contains_key(index));
        let manifest = Manifest::new(entries.map(|(_, entry)| entry), limits)?;
        self.problems.sort_by(|a, b| {
            crate::manifest::compare_paths(a.path.as_os_str().as_bytes(), b.path.as_os_str().as_bytes())
        });
        Ok(Scan {
            manifest,
            problems: self.problems,
            files_known: self.files_known,
            files_read: self.files_read,
        })
    }
}

// Reading.

/// A file that is to be read.
struct Unread {
    entry: usize,
    directory: Arc<OwnedFd>,
    name: Vec<u8>,
    path: Vec<u8>,
    fingerprint: Fingerprint,
    size_bytes: u64,
    may_have_holes: bool,
}

/// A file that several threads read.
struct Shareable {
    unread: Unread,
    file: OwnedFd,
    pieces_left: AtomicUsize,
}

enum Task {
    File(Unread),
    Piece { of: Arc<Shareable>, extents: Vec<(u64, u32)> },
}

struct Read {
    entry: usize,
    outcome: Outcome,
}

enum Outcome {
    /// Some of its content.
    Content(Content),
    Changed,
    Unreadable(Errno),
}

struct Reader<'a> {
    shared: &'a Shared<'a>,
    buffer: Vec<u8>,
    read: Vec<Read>,
}

impl<'a> Reader<'a> {
    fn new(shared: &'a Shared<'a>) -> Self {
        Self { shared, buffer: vec![0; MAX_EXTENT_BYTES as usize], read: Vec::new() }
    }

    fn run(mut self) -> Vec<Read> {
        while let Some(batch) = self.shared.queue.pop() {
            let _done = DoneOnDrop(&self.shared.queue);
            for task in batch {
                if self.shared.stopped() {
                    continue; // The queue must be emptied, or the walker would wait for ever.
                }
                match task {
                    Task::File(file) => self.file(file),
                    Task::Piece { of, extents } => self.piece(&of, &extents),
                }
            }
        }
        self.read
    }

    fn file(&mut self, unread: Unread) {
        let entry = unread.entry;
        if let Err(error) = self.try_file(unread) {
            self.read.push(Read { entry, outcome: Outcome::Unreadable(error) });
        }
    }

    fn try_file(&mut self, unread: Unread) -> Result<(), Errno> {
        // Not blocking: by now it may be a fifo.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = openat(&unread.directory, &unread.name[..], flags, Mode::empty())?;
        let xattrs = xattrs::read(&file, true)?;
        let extents = layout(&file, unread.size_bytes, unread.may_have_holes)?;
        let pieces = extents.len().div_ceil((PIECE_BYTES / u64::from(MAX_EXTENT_BYTES)) as usize);
        if pieces <= 1 {
            let extents = self.hash(&file, &extents)?;
            self.check(&unread, &file)?;
            self.read
                .push(Read { entry: unread.entry, outcome: Outcome::Content(Content { xattrs, extents }) });
            return Ok(());
        }

        let content = Content { xattrs, extents: Vec::new() };
        self.read.push(Read { entry: unread.entry, outcome: Outcome::Content(content) });
        let of = Arc::new(Shareable { unread, file, pieces_left: AtomicUsize::new(pieces) });
        for extents in extents.chunks(extents.len().div_ceil(pieces)) {
            self.shared.queue.push_urgent(vec![Task::Piece { of: of.clone(), extents: extents.to_vec() }]);
        }
        Ok(())
    }

    fn piece(&mut self, of: &Shareable, extents: &[(u64, u32)]) {
        let entry = of.unread.entry;
        let outcome = match self.hash(&of.file, extents) {
            Ok(extents) => Outcome::Content(Content { xattrs: Vec::new(), extents }),
            Err(error) => Outcome::Unreadable(error),
        };
        self.read.push(Read { entry, outcome });
        // The last one to read sees every change that any of them could have seen.
        if of.pieces_left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Err(error) = self.check(&of.unread, &of.file)
        {
            self.read.push(Read { entry, outcome: Outcome::Unreadable(error) });
        }
    }

    /// Hashes extents; those that end before they should are cut short, as the file has shrunk.
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
            // At most the length asked for, which is one of an extent.
            hashed.push(Extent { offset: *offset, length: length as u32, digest });
            self.shared.count(0, length as u64);
        }
        Ok(hashed)
    }

    fn check(&mut self, unread: &Unread, file: &OwnedFd) -> Result<(), Errno> {
        if let Some(after_read) = self.shared.after_read {
            after_read(Path::new(OsStr::from_bytes(&unread.path)));
        }
        if Fingerprint::of(&fstat(file)?) != unread.fingerprint {
            self.read.push(Read { entry: unread.entry, outcome: Outcome::Changed });
        }
        self.shared.count(1, 0);
        Ok(())
    }
}

/// Where extents of a file are to stand: data between holes, cut at multiples of 1 MiB.
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
            // The file system knows nothing of holes.
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

// The queue between them.

/// A bounded queue. Batches wait in it for readers, and it ends when it was closed, is empty, and nobody works on
/// what could add to it.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    room: Condvar,
}

#[derive(Default)]
struct QueueState {
    batches: VecDeque<Vec<Task>>,
    /// Batches that were taken and are not done.
    taken: usize,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        // Nothing panics while it is locked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a batch, once there is room or nobody makes any.
    fn push(&self, batch: Vec<Task>) {
        let mut state = self.lock();
        while state.batches.len() >= QUEUE_BATCHES && !state.closed {
            state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.batches.push_back(batch);
        drop(state);
        self.changed.notify_one();
    }

    /// Adds a batch before all others, whether there is room or not: readers do this, and must not wait for readers.
    fn push_urgent(&self, batch: Vec<Task>) {
        self.lock().batches.push_front(batch);
        self.changed.notify_one();
    }

    fn pop(&self) -> Option<Vec<Task>> {
        let mut state = self.lock();
        loop {
            if let Some(batch) = state.batches.pop_front() {
                state.taken += 1;
                drop(state);
                self.room.notify_one();
                return Some(batch);
            }
            if state.closed && state.taken == 0 {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn done(&self) {
        let mut state = self.lock();
        state.taken -= 1;
        let over = state.closed && state.taken == 0;
        drop(state);
        if over {
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
        self.room.notify_all();
    }
}

/// Lets the readers go, however the walk ends.
struct CloseOnDrop<'a>(&'a Queue);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Says that a batch is done. A reader that panics closes the queue, so that nobody waits for it.
struct DoneOnDrop<'a>(&'a Queue);

impl Drop for DoneOnDrop<'_> {
    fn drop(&mut self) {
        self.0.done();
        if thread::panicking() {
            self.0.close();
        }
    }
}
