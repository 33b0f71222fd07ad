//! The stat cache: what the content of files was when they were last read.
//!
//! An entry says that a file with this device, inode, size, mtime and ctime has these extents. As every change of
//! content changes ctime, a file whose stat is the same need not be read again.
//!
//! Invariant: an entry is kept only if the file's mtime and ctime were at least the *settling time* older than the
//! start of the scan that read it. A younger file could be changed once more without a change of its timestamps,
//! which have some granularity (git calls such files racily clean); it is read again until it has settled. The clock
//! of the file system is trusted to agree with this machine's to within the settling time. Of files that we wrote
//! ourselves and gave an older mtime afterwards, only that must have settled: see [`remember`](crate::remember).
//!
//! The file is a magic line, BLAKE3 of the rest, and length-delimited records. It may be lost or damaged at any time:
//! what does not match its digest is ignored as a whole.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use rustix::fs::Stat;

use crate::encoding::WireExtent;
use crate::entry::{Extent, Xattr};

/// Names the format and its version.
const MAGIC: &[u8] = b"gantry stat cache 3\n";
const DIGEST_BYTES: usize = 32;

/// What is known of the files of one tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatCache {
    files: HashMap<Vec<u8>, CachedFile>,
    /// Of files that have extended attributes which a manifest does not take: the name of one of these.
    skipped_xattrs: HashMap<Vec<u8>, Vec<u8>>,
}

/// A cache that was loaded.
#[derive(Debug)]
pub struct LoadedCache {
    /// The cache; empty if there was none, or none to be trusted.
    pub cache: StatCache,
    /// Why what was there was ignored.
    pub ignored: Option<CacheFault>,
}

/// Why a cache was ignored. Nothing is lost but time.
#[derive(Debug, thiserror::Error)]
pub enum CacheFault {
    /// It is damaged, or of another version.
    #[error("the stat cache is damaged or of another version")]
    Corrupt,
    /// It could not be read.
    #[error("the stat cache cannot be read")]
    Unreadable(#[source] io::Error),
}

/// A cache could not be saved.
#[derive(Debug, thiserror::Error)]
#[error("the stat cache cannot be saved")]
pub struct SaveError(#[from] io::Error);

/// A file's state, as far as the file system tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    device: u64,
    inode: u64,
    links: u64,
    size: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
}

/// What reading a file gave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) xattrs: Vec<Xattr>,
    pub(crate) extents: Vec<Extent>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct CachedFile {
    fingerprint: Fingerprint,
    content: Content,
}

impl Fingerprint {
    #[allow(clippy::unnecessary_cast, clippy::cast_lossless)] // The fields differ from architecture to architecture.
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            links: stat.st_nlink as u64,
            size: stat.st_size as u64,
            mtime: (stat.st_mtime as i64, stat.st_mtime_nsec as u32),
            ctime: (stat.st_ctime as i64, stat.st_ctime_nsec as u32),
        }
    }

    /// Whether it is what `earlier` was. A file with several names may have been renamed over by another of its names meanwhile.
    pub(crate) fn is_still(&self, earlier: &Self) -> bool {
        self == earlier
            || (earlier.links > 1 && *self == Self { links: self.links, ctime: self.ctime, ..*earlier })
    }

    /// Whether the file has no other name.
    pub(crate) fn has_one_name(&self) -> bool {
        self.links == 1
    }

    /// Whether the file was last changed at least `settle` before `at`.
    pub(crate) fn settled(&self, at: SystemTime, settle: Duration) -> bool {
        before(at, settle).is_some_and(|limit| self.mtime <= limit && self.ctime <= limit)
    }

    /// Whether it is the file of `earlier`, and nobody has written to it since.
    pub(crate) fn was_not_written_since(&self, earlier: &Self) -> bool {
        *self == Self { ctime: self.ctime, ..*earlier }
    }

    /// Whether its content was, by its mtime, last changed at least `settle` before `at`.
    pub(crate) fn was_written_before(&self, at: SystemTime, settle: Duration) -> bool {
        before(at, settle).is_some_and(|limit| self.mtime <= limit)
    }
}

/// The time of a file that lies `settle` before `at`.
fn before(at: SystemTime, settle: Duration) -> Option<(i64, u32)> {
    let limit = at.duration_since(UNIX_EPOCH).ok()?.checked_sub(settle)?;
    Some((i64::try_from(limit.as_secs()).unwrap_or(i64::MAX), limit.subsec_nanos()))
}

impl StatCache {
    /// A cache that knows nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many files it knows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether it knows nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads a cache. One that is missing is empty; one that is damaged or cannot be read is empty too, and says so.
    #[must_use]
    pub fn load(path: &Path) -> LoadedCache {
        let decoded = match fs::read(path) {
            Ok(bytes) => decode(&bytes).ok_or(CacheFault::Corrupt),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::new()),
            Err(error) => Err(CacheFault::Unreadable(error)),
        };
        match decoded {
            Ok(cache) => LoadedCache { cache, ignored: None },
            Err(fault) => LoadedCache { cache: Self::new(), ignored: Some(fault) },
        }
    }

    /// Writes it: at any time there is the old file or the new one.
    ///
    /// # Errors
    ///
    /// The directory is missing or cannot be written to.
    pub fn save(&self, path: &Path) -> Result<(), SaveError> {
        static SAVES: AtomicU64 = AtomicU64::new(0);
        let mut name =
            path.file_name().ok_or(io::ErrorKind::InvalidInput).map_err(io::Error::from)?.to_owned();
        name.push(format!(".{}-{}.new", std::process::id(), SAVES.fetch_add(1, Ordering::Relaxed)));
        let new = path.with_file_name(name);

        let write = || {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&new)?;
            file.write_all(&self.encode())?;
            // Not synced: a file that was torn by a crash does not match its digest.
            fs::rename(&new, path)
        };
        write().map_err(|error| {
            // What is left of the new file is of no use; that it is there is not worse than the failure.
            _ = fs::remove_file(&new);
            SaveError(error)
        })
    }

    pub(crate) fn get(&self, path: &[u8], fingerprint: &Fingerprint) -> Option<&Content> {
        let known = self.files.get(path)?;
        (known.fingerprint == *fingerprint).then_some(&known.content)
    }

    /// The file at a path, as it was found last.
    pub(crate) fn fingerprint(&self, path: &[u8]) -> Option<Fingerprint> {
        self.files.get(path).map(|known| known.fingerprint)
    }

    /// The name of an extended attribute of the file at a path that a manifest does not take.
    pub(crate) fn skipped_xattr(&self, path: &[u8]) -> Option<&[u8]> {
        self.skipped_xattrs.get(path).map(Vec::as_slice)
    }

    /// Remembers an extended attribute of a file that a manifest does not take.
    pub(crate) fn insert_skipped_xattr(&mut self, path: Vec<u8>, name: Vec<u8>) {
        self.skipped_xattrs.insert(path, name);
    }

    pub(crate) fn insert(&mut self, path: Vec<u8>, fingerprint: Fingerprint, content: Content) {
        self.files.insert(path, CachedFile { fingerprint, content });
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = [MAGIC, &[0; DIGEST_BYTES]].concat();
        for (path, known) in &self.files {
            let skipped_xattr = self.skipped_xattr(path).unwrap_or_default().to_vec();
            let known = WireCachedFile { skipped_xattr, ..WireCachedFile::new(path, known) };
            bytes.extend_from_slice(&known.encode_length_delimited_to_vec());
        }
        let (head, body) = bytes.split_at_mut(MAGIC.len() + DIGEST_BYTES);
        head[MAGIC.len()..].copy_from_slice(blake3::hash(body).as_bytes());
        bytes
    }
}

fn decode(bytes: &[u8]) -> Option<StatCache> {
    let (digest, mut body) = bytes.strip_prefix(MAGIC)?.split_at_checked(DIGEST_BYTES)?;
    if blake3::hash(body) != *<&[u8; DIGEST_BYTES]>::try_from(digest).ok()? {
        return None;
    }
    let mut cache = StatCache::new();
    while !body.is_empty() {
        let mut wire = WireCachedFile::decode_length_delimited(&mut body).ok()?;
        let skipped_xattr = std::mem::take(&mut wire.skipped_xattr);
        let (path, known) = wire.known()?;
        if !skipped_xattr.is_empty() {
            cache.skipped_xattrs.insert(path.clone(), skipped_xattr);
        }
        cache.files.insert(path, known);
    }
    Some(cache)
}

#[derive(Clone, PartialEq, Message)]
struct WireCachedFile {
    #[prost(bytes = "vec", tag = "1")]
    path: Vec<u8>,
    #[prost(fixed64, tag = "2")]
    device: u64,
    #[prost(fixed64, tag = "3")]
    inode: u64,
    #[prost(uint64, tag = "4")]
    size: u64,
    #[prost(sint64, tag = "5")]
    mtime_seconds: i64,
    #[prost(uint32, tag = "6")]
    mtime_nanos: u32,
    #[prost(sint64, tag = "7")]
    ctime_seconds: i64,
    #[prost(uint32, tag = "8")]
    ctime_nanos: u32,
    #[prost(message, repeated, tag = "9")]
    extents: Vec<WireExtent>,
    #[prost(bytes = "vec", repeated, tag = "10")]
    xattr_names: Vec<Vec<u8>>,
    #[prost(bytes = "vec", repeated, tag = "11")]
    xattr_values: Vec<Vec<u8>>,
    #[prost(uint64, tag = "12")]
    links: u64,
    #[prost(bytes = "vec", tag = "13")]
    skipped_xattr: Vec<u8>,
}

impl WireCachedFile {
    fn new(path: &[u8], known: &CachedFile) -> Self {
        let CachedFile { fingerprint, content } = known;
        Self {
            path: path.to_vec(),
            device: fingerprint.device,
            inode: fingerprint.inode,
            links: fingerprint.links,
            size: fingerprint.size,
            mtime_seconds: fingerprint.mtime.0,
            mtime_nanos: fingerprint.mtime.1,
            ctime_seconds: fingerprint.ctime.0,
            ctime_nanos: fingerprint.ctime.1,
            extents: content.extents.iter().map(WireExtent::from).collect(),
            xattr_names: content.xattrs.iter().map(|xattr| xattr.name.clone()).collect(),
            xattr_values: content.xattrs.iter().map(|xattr| xattr.value.clone()).collect(),
            skipped_xattr: Vec::new(),
        }
    }

    fn known(self) -> Option<(Vec<u8>, CachedFile)> {
        if self.xattr_names.len() != self.xattr_values.len() {
            return None;
        }
        let pairs = self.xattr_names.into_iter().zip(self.xattr_values);
        let xattrs = pairs.map(|(name, value)| Xattr { name, value }).collect();
        let extents =
            self.extents.into_iter().map(|wire| Extent::try_from(wire).ok()).collect::<Option<_>>()?;
        let fingerprint = Fingerprint {
            device: self.device,
            inode: self.inode,
            links: self.links,
            size: self.size,
            mtime: (self.mtime_seconds, self.mtime_nanos),
            ctime: (self.ctime_seconds, self.ctime_nanos),
        };
        Some((self.path, CachedFile { fingerprint, content: Content { xattrs, extents } }))
    }
}

#[cfg(test)]
mod tests {
    use domain::Digest;
    use tempfile::tempdir;

    use super::*;

    fn cache() -> StatCache {
        let time = (1_700_000_000, 5);
        let fingerprint =
            Fingerprint { device: 1, inode: u64::MAX, links: 1, size: 10, mtime: time, ctime: (-1, 0) };
        let extents = vec![Extent { offset: 0, length: 10, digest: Digest([7; 32]) }];
        let xattrs = vec![Xattr { name: b"user.a".to_vec(), value: vec![] }];
        let mut cache = StatCache::new();
        cache.insert(b"odd \xff\nname".to_vec(), fingerprint, Content { xattrs, extents });
        cache.insert(b"empty".to_vec(), fingerprint, Content { xattrs: vec![], extents: vec![] });
        cache.insert_skipped_xattr(b"empty".to_vec(), b"trusted.a".to_vec());
        cache
    }

    #[test]
    fn a_saved_cache_is_loaded_again() {
        let dir = tempdir().unwrap();
        let path = dir.path().join("cache");
        cache().save(&path).unwrap();

        let loaded = StatCache::load(&path);

        assert!(loaded.ignored.is_none());
        assert_eq!(loaded.cache, cache());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left behind");
    }

    #[test]
    fn a_missing_cache_is_empty_and_no_fault() {
        let loaded = StatCache::load(Path::new("/nonexistent/cache"));
        assert!(loaded.cache.is_empty());
        assert!(loaded.ignored.is_none());
    }

    #[test]
    fn a_cache_damaged_anywhere_is_ignored_and_said_to_be() {
        let dir = tempdir().unwrap();
        let path = dir.path().join("cache");
        let whole = cache().encode();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            let loaded = StatCache::load(&path);
            assert!(matches!(loaded.ignored, Some(CacheFault::Corrupt)), "byte {at}");
            assert!(loaded.cache.is_empty());
            assert!(decode(&whole[..at]).is_none(), "cut at {at}");
        }
    }

    #[test]
    fn a_cache_that_cannot_be_saved_leaves_the_old_one() {
        let dir = tempdir().unwrap();
        assert!(cache().save(&dir.path().join("missing/cache")).is_err());
        assert!(cache().save(Path::new("/")).is_err());
    }

    #[test]
    fn a_file_is_settled_once_both_times_are_old_enough() {
        let at = UNIX_EPOCH + Duration::from_secs(100);
        let settle = Duration::from_secs(2);
        let fingerprint = |mtime, ctime| Fingerprint {
            device: 0,
            inode: 0,
            links: 1,
            size: 0,
            mtime: (mtime, 0),
            ctime: (ctime, 0),
        };
        assert!(fingerprint(98, 98).settled(at, settle));
        assert!(!fingerprint(99, 98).settled(at, settle));
        assert!(!fingerprint(0, 99).settled(at, settle));
        assert!(!fingerprint(0, 200).settled(at, settle));
    }
}
