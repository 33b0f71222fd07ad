//! Scanning: from a directory to its manifest.
//!
//! One thread walks the tree in canonical order; others read and hash what the [`StatCache`] does not know. Symbolic
//! links are never followed. Content is cut at multiples of 1 MiB; holes become gaps.
//!
//! Problems with single paths are collected, and the caller decides: an unreadable file is left out, an unreadable
//! directory is kept without what it holds, a file that changed while it was read is kept as it was read, and what
//! vanished is left out.
//!
//! Files of which the file system does not know the size (`/proc`, FUSE) are read to their end. Their size is what was read.
//!
//! Invariants: the order of entries does not depend on how many threads there are. Neither the depth nor the width of the
//! tree decides how many directories are open, and memory is bounded by the [`Limits`]: what is kept of a path is reserved before.

mod queue;
mod read;
mod walk;

use std::io;
use std::num::NonZero;
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use crate::budget::{ENTRY_MEMORY_BYTES, SharedReservation};
use crate::cache::StatCache;
use crate::dirs::Cursor;
use crate::entry::{MAX_PATH_BYTES, Xattr};
use crate::manifest::{InvalidManifest, Limits, Manifest};
use queue::{CloseOnDrop, Queue};
use read::Reader;
use walk::Walk;

/// Bytes that one thread reads before another may take over.
const PIECE_BYTES: u64 = 4 << 20;

/// Most bytes of a file that does not say how large it is. Some such files have no end.
const MAX_UNSIZED_BYTES: u64 = 1 << 30;

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
    /// Its path is longer than a manifest takes: it was left out, with all that is in it.
    #[error("has a path of more than {MAX_PATH_BYTES} bytes, which cannot travel")]
    PathTooLong,
    /// It changed or vanished while it was read.
    #[error("changed while it was read")]
    ChangedWhileRead,
    /// It is a socket, which was left out.
    #[error("is a socket")]
    SkippedSocket,
    /// It has this extended attribute, without which it was taken in.
    #[error("has the extended attribute {0:?}, which does not travel")]
    SkippedXattr(String),
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
        limits: options.limits,
        bytes: AtomicU64::new(0),
        reserved: SharedReservation::of(options.limits.budget),
        full: OnceLock::new(),
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
    shared.check()?;

    walked.add_results(read);
    if let Some(cache) = cache {
        *cache = walked.cache(started, options.settle);
    }
    // The manifest makes its own reservation.
    drop(shared);
    walked.finish(options.limits)
}

/// What walker and readers share.
struct Shared<'a> {
    queue: Queue,
    progress: Option<&'a Progress>,
    stop: Option<&'a AtomicBool>,
    after_read: Option<&'a (dyn Fn(&Path) + Sync)>,
    limits: Limits,
    /// Bytes of all that is kept: paths, targets, extended attributes.
    bytes: AtomicU64,
    reserved: SharedReservation,
    /// Why nothing more can be kept.
    full: OnceLock<InvalidManifest>,
}

impl Shared<'_> {
    /// Counts a path that is kept.
    fn reserve_path(&self, bytes: usize) {
        self.reserve(bytes as u64, ENTRY_MEMORY_BYTES);
    }

    /// Counts something else that is kept for a path.
    fn reserve_bytes(&self, bytes: usize) {
        if bytes > 0 {
            self.reserve(bytes as u64, 0);
        }
    }

    fn reserve_xattrs(&self, xattrs: &[Xattr]) {
        let memory = |xattr: &Xattr| xattr.name.len() + xattr.value.len() + size_of::<Xattr>();
        self.reserve_bytes(xattrs.iter().map(memory).sum());
    }

    fn reserve(&self, bytes: u64, besides: u64) {
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let kept = if all > self.limits.encoded_bytes {
            Err(InvalidManifest::TooLarge(self.limits.encoded_bytes))
        } else {
            self.reserved.grow(bytes + besides).map_err(InvalidManifest::from)
        };
        if let Err(error) = kept {
            // Only the first error is kept.
            _ = self.full.set(error);
        }
    }

    /// Whether all that was found can be kept.
    fn check(&self) -> Result<(), InvalidManifest> {
        self.full.get().map_or(Ok(()), |full| Err(full.clone()))
    }

    fn stopped(&self) -> bool {
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    fn count(&self, files: u64, bytes: u64) {
        if let Some(progress) = self.progress {
            progress.add(files, bytes);
        }
    }
}
