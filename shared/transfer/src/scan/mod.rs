//! Scan of a directory into a manifest.
//!
//! One thread walks the tree in canonical order. Other threads read and hash the files that the
//! [`StatCache`] does not contain. Symbolic links are never followed. Content is divided at
//! multiples of 1 MiB. Holes become gaps between extents.
//!
//! The scan collects problems with single paths for its caller:
//!
//! - An unreadable file and a vanished entry are left out.
//! - An unreadable directory is kept without its contents.
//! - A file that changed during the scan is kept as it was read.
//!
//! Files without a reliable size (`/proc`, FUSE) are read to their end, which determines their
//! size.
//!
//! Invariants: the order of entries does not depend on the number of threads. The number of open
//! directories does not depend on the depth or width of the tree. The [`Limits`] bound the memory:
//! the scan reserves it before it stores a path.

mod layer;
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
pub use layer::Layer;
use layer::Upper;
use queue::{CloseOnDrop, Queue};
use read::Reader;
use walk::Walk;

/// Bytes of a file that one thread reads. Other threads may read the rest.
const PIECE_BYTES: u64 = 4 << 20;

/// Maximum bytes of a file without a reliable size. Some of these files have no end.
const MAX_UNSIZED_BYTES: u64 = 1 << 30;

/// Decides whether a path, relative to the root, is left out. The flag tells whether the path is a
/// directory.
pub type Exclude<'a> = &'a dyn Fn(&Path, bool) -> bool;

/// Options of a scan.
#[derive(Clone, Copy)]
pub struct ScanOptions<'a> {
    /// Handling of owners and groups.
    pub ownership: ScannedOwnership,
    /// Filter of paths that are left out. The scan does not enter such directories, and does not
    /// filter the root.
    pub exclude: Option<Exclude<'a>>,
    /// Handling of mount points.
    pub other_file_systems: OtherFileSystems,
    /// Number of threads that read and hash. 0 means one per core, at least 2 and at most 8.
    pub threads: usize,
    /// Counters that the scan updates.
    pub progress: Option<&'a Progress>,
    /// Flag that ends the scan with [`ScanError::Stopped`].
    pub stop: Option<&'a AtomicBool>,
    /// Limits of the manifest.
    pub limits: Limits,
    /// Settling time: minimum age of a file's times for the stat cache. See [`StatCache`].
    pub settle: Duration,
    /// Whether files may get and lose names in other trees during the scan, as
    /// [`TreeWriter::link_file`](crate::TreeWriter::link_file) gives them. The number of names and
    /// the time of the last status change then do not count as changes of a file.
    pub shared_files: bool,
    /// The upper layer, if the root is the root of an overlay. Unchanged entries are then not read,
    /// and neither listed nor filtered if their directory is unchanged.
    pub layer: Option<Layer<'a>>,
    /// Hook for tests. It is called after a file was read, before the check for changes.
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
            shared_files: false,
            layer: None,
            after_read: None,
        }
    }
}

/// Handling of owners and groups in a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScannedOwnership {
    /// The manifest has the owners of the file system.
    Keep,
    /// All entries belong to user and group 0, so that the digest does not depend on the user.
    /// Files of other users lose setuid and setgid bits, which would otherwise grant the rights of
    /// user and group 0.
    Root,
}

/// Handling of mount points in a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherFileSystems {
    /// Mount points are scanned.
    Enter,
    /// Mount points become empty directories.
    Leave,
}

/// The progress of a scan. Other threads may read it.
#[derive(Debug, Default)]
pub struct Progress {
    files: AtomicU64,
    bytes: AtomicU64,
}

impl Progress {
    /// Returns the number of completed files.
    #[must_use]
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Returns the bytes of completed content, read or cached.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn add(&self, files: u64, bytes: u64) {
        self.files.fetch_add(files, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The result of a scan.
#[derive(Debug)]
pub struct Scan {
    /// The manifest of the tree.
    pub manifest: Manifest,
    /// Problems with single paths, in the order of paths.
    pub problems: Vec<Problem>,
    /// Number of files that were not read, because the stat cache or the tree below contained them.
    pub files_known: u64,
    /// Number of files that were read.
    pub files_read: u64,
}

/// A problem with a path.
#[derive(Debug, thiserror::Error)]
#[error("{path:?} {what}")]
pub struct Problem {
    /// The path, relative to the root.
    pub path: PathBuf,
    /// The kind of the problem.
    #[source]
    pub what: ProblemKind,
}

/// The kind of a problem with a path. The text continues the path.
#[derive(Debug, thiserror::Error)]
pub enum ProblemKind {
    /// The entry cannot be read. A file is left out. A directory is kept without its contents.
    #[error("cannot be read")]
    Unreadable(#[source] io::Error),
    /// The path is too long for a manifest. The entry is left out with its contents.
    #[error("has a path of more than {MAX_PATH_BYTES} bytes, which is not supported")]
    PathTooLong,
    /// The entry changed or vanished during the scan.
    #[error("changed while it was read")]
    ChangedWhileRead,
    /// The entry is a socket, and is left out.
    #[error("is a socket")]
    SkippedSocket,
    /// The entry is kept without this extended attribute.
    #[error("has the extended attribute {0:?}, which is not supported")]
    SkippedXattr(String),
}

/// A tree cannot be scanned.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The root is missing, is not a directory, or cannot be read.
    #[error("cannot open the directory")]
    Root(#[source] io::Error),
    /// The entries of the tree do not form a manifest.
    #[error("cannot make a manifest of the tree")]
    Manifest(#[from] InvalidManifest),
    /// The caller stopped the scan.
    #[error("the scan was stopped")]
    Stopped,
}

/// Scans the tree below `root`.
///
/// The scan does not read files that `cache` contains. Afterwards the cache contains only the files
/// of this scan, so each root needs a separate cache.
///
/// # Errors
///
/// Fails if the root cannot be read, the tree exceeds the limits, or the scan was stopped. Problems
/// with single paths are not errors.
pub fn scan(
    root: &Path,
    options: &ScanOptions<'_>,
    cache: Option<&mut StatCache>,
) -> Result<Scan, ScanError> {
    let started = SystemTime::now();
    let cursor = Cursor::new(root).map_err(ScanError::Root)?;
    let upper = options.layer.map(Upper::open).transpose().map_err(ScanError::Root)?;
    let shared = Shared {
        queue: Queue::default(),
        progress: options.progress,
        stop: options.stop,
        shared_files: options.shared_files,
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
        let walked = Walk::new(cursor, upper, options, cache.as_deref(), &shared).run();
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
    // The manifest makes a separate reservation.
    drop(shared);
    walked.finish(options.limits)
}

/// The state that the walk and the readers share.
struct Shared<'a> {
    queue: Queue,
    progress: Option<&'a Progress>,
    stop: Option<&'a AtomicBool>,
    shared_files: bool,
    after_read: Option<&'a (dyn Fn(&Path) + Sync)>,
    limits: Limits,
    /// Bytes of all stored paths, targets and extended attributes.
    bytes: AtomicU64,
    reserved: SharedReservation,
    /// The first exceeded limit.
    full: OnceLock<InvalidManifest>,
}

impl Shared<'_> {
    /// Reserves memory for a path.
    fn reserve_path(&self, bytes: usize) {
        self.reserve(bytes as u64, ENTRY_MEMORY_BYTES);
    }

    /// Reserves memory for other data of a path.
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

    /// Fails if a limit was exceeded.
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
