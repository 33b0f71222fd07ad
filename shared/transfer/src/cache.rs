//! The stat cache: the extents of files, by their stat at the last read.
//!
//! An entry of the cache maps a file with a certain device, inode, size, mtime and ctime to its
//! extents. Every change of content changes the ctime, so a file with an unchanged stat need not be
//! read again.
//!
//! Invariant: the cache has a file only if its mtime and ctime were at least the *settling time*
//! older than the start of the scan. Timestamps have a granularity, so a younger file could change
//! again without a change of its timestamps (git calls such files racily clean). Such a file is
//! read again until it has settled. The clocks of the file system and of the machine must agree
//! within the settling time. For files that this crate has written, only the mtime must have
//! settled, see [`remember`](crate::remember).
//!
//! The cache file consists of a magic line, the BLAKE3 digest of the rest, and length-delimited
//! records. The file may be lost or damaged at any time. A file that does not match its digest is
//! ignored.

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

/// Magic line with the version of the format.
const MAGIC: &[u8] = b"gantry stat cache 3\n";
const DIGEST_BYTES: usize = 32;

/// The cached files of one tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatCache {
    files: HashMap<Vec<u8>, CachedFile>,
    /// Names of extended attributes that manifests do not include, by path of the file. One name
    /// per file.
    skipped_xattrs: HashMap<Vec<u8>, Vec<u8>>,
}

/// A loaded cache.
#[derive(Debug)]
pub struct LoadedCache {
    /// The cache. Empty if the file is missing or was ignored.
    pub cache: StatCache,
    /// Why the file was ignored.
    pub ignored: Option<CacheFault>,
}

/// Why a cache file was ignored. The only consequence is a slower scan.
#[derive(Debug, thiserror::Error)]
pub enum CacheFault {
    /// The file is damaged, or has another version of the format.
    #[error("cannot use the stat cache: it is damaged or has another version")]
    Corrupt,
    /// The file could not be read.
    #[error("cannot read the stat cache")]
    Unreadable(#[source] io::Error),
}

/// A cache could not be saved.
#[derive(Debug, thiserror::Error)]
#[error("cannot save the stat cache")]
pub struct SaveError(#[from] io::Error);

/// The stat of a file, which identifies a state of its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    device: u64,
    inode: u64,
    links: u64,
    size: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
}

/// The result of reading a file.
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

    /// Whether the file is unchanged since `earlier`. The number of links of a file with several
    /// links may have changed.
    pub(crate) fn is_still(&self, earlier: &Self) -> bool {
        self == earlier || (earlier.links > 1 && self.has_content_of(earlier))
    }

    /// Whether the file is unchanged since `earlier`, except for its names.
    pub(crate) fn has_content_of(&self, earlier: &Self) -> bool {
        *self == Self { links: self.links, ctime: self.ctime, ..*earlier }
    }

    /// Whether the file has a single link.
    pub(crate) fn has_one_name(&self) -> bool {
        self.links == 1
    }

    /// Whether the file was last changed at least `settle` before `at`.
    pub(crate) fn settled(&self, at: SystemTime, settle: Duration) -> bool {
        before(at, settle).is_some_and(|limit| self.mtime <= limit && self.ctime <= limit)
    }

    /// Whether this is the file of `earlier`, and its content was not written since.
    pub(crate) fn was_not_written_since(&self, earlier: &Self) -> bool {
        *self == Self { ctime: self.ctime, ..*earlier }
    }

    /// Whether the content, by its mtime, was last changed at least `settle` before `at`.
    pub(crate) fn was_written_before(&self, at: SystemTime, settle: Duration) -> bool {
        before(at, settle).is_some_and(|limit| self.mtime <= limit)
    }
}

/// Returns the file time that is `settle` before `at`.
fn before(at: SystemTime, settle: Duration) -> Option<(i64, u32)> {
    let limit = at.duration_since(UNIX_EPOCH).ok()?.checked_sub(settle)?;
    Some((i64::try_from(limit.as_secs()).unwrap_or(i64::MAX), limit.subsec_nanos()))
}

impl StatCache {
    /// Creates an empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of cached files.
    #[must_use]
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether the cache is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Reads a cache file. A missing file gives an empty cache. A damaged or unreadable file gives
    /// an empty cache, too, and the reason.
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

    /// Writes the cache file atomically.
    ///
    /// # Errors
    ///
    /// Fails if the directory is missing or cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), SaveError> {
        static SAVES: AtomicU64 = AtomicU64::new(0);
        let mut name =
            path.file_name().ok_or(io::ErrorKind::InvalidInput).map_err(io::Error::from)?.to_owned();
        name.push(format!(".{}-{}.new", std::process::id(), SAVES.fetch_add(1, Ordering::Relaxed)));
        let new = path.with_file_name(name);

        let write = || {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&new)?;
            file.write_all(&self.encode())?;
            // The file is not flushed: a file that is torn by a crash does not match its digest.
            fs::rename(&new, path)
        };
        write().map_err(|error| {
            // A failure to remove the partial file does no more harm.
            _ = fs::remove_file(&new);
            SaveError(error)
        })
    }

    pub(crate) fn get(&self, path: &[u8], fingerprint: &Fingerprint) -> Option<&Content> {
        let known = self.files.get(path)?;
        (known.fingerprint == *fingerprint).then_some(&known.content)
    }

    /// Returns the last fingerprint of the file at a path.
    pub(crate) fn fingerprint(&self, path: &[u8]) -> Option<Fingerprint> {
        self.files.get(path).map(|known| known.fingerprint)
    }

    /// Returns the name of an extended attribute of the file at `path` that manifests do not
    /// include.
    pub(crate) fn skipped_xattr(&self, path: &[u8]) -> Option<&[u8]> {
        self.skipped_xattrs.get(path).map(Vec::as_slice)
    }

    /// Stores the name of an extended attribute that manifests do not include.
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
    fn saved_cache_loads_unchanged() {
        let dir = tempdir().unwrap();
        let path = dir.path().join("cache");
        cache().save(&path).unwrap();

        let loaded = StatCache::load(&path);

        assert!(loaded.ignored.is_none());
        assert_eq!(loaded.cache, cache());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn missing_cache_is_empty_without_fault() {
        let loaded = StatCache::load(Path::new("/nonexistent/cache"));
        assert!(loaded.cache.is_empty());
        assert!(loaded.ignored.is_none());
    }

    #[test]
    fn damaged_cache_is_ignored_with_fault() {
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
    fn save_fails_without_writable_directory() {
        let dir = tempdir().unwrap();
        assert!(cache().save(&dir.path().join("missing/cache")).is_err());
        assert!(cache().save(Path::new("/")).is_err());
    }

    #[test]
    fn file_settles_when_both_times_are_old() {
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
