//! Helpers for transfers of trees: amounts in messages, and the stat cache of scanned directories.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use domain::Digest;
use rpc::compression::SentBytes;
use transfer::StatCache;

use crate::cluster::Paths;
use crate::render::table::bytes;

/// Formats the size of contents that were `sent` or `fetched`, with their compressed size if they
/// were compressed.
pub(crate) fn describe_moved(amount: SentBytes, verb: &str) -> String {
    let content = bytes(amount.content);
    if amount.wire < amount.content {
        format!("{content} {verb} as {}", bytes(amount.wire))
    } else {
        format!("{content} {verb}")
    }
}

/// Parses a received digest.
pub(crate) fn digest(bytes: &[u8]) -> anyhow::Result<Digest> {
    Digest::try_from(bytes).context("the cluster sent an invalid digest")
}

/// Stat cache of one directory on this machine, kept between scans.
pub(crate) struct DirectoryCache {
    file: Option<PathBuf>,
    pub(crate) cache: StatCache,
}

impl DirectoryCache {
    /// Loads the cache of the directory at `path` for the purpose `what`.
    pub(crate) fn load(what: &str, path: &Path) -> Self {
        // Without a state directory, every scan reads all files.
        let Some(file) = remembered_at(what, path) else {
            return Self { file: None, cache: StatCache::new() };
        };
        Self { cache: StatCache::load(&file).cache, file: Some(file) }
    }

    /// Saves the cache.
    pub(crate) fn save(self) {
        if let Some(file) = &self.file
            && let Err(error) = self.cache.save(file)
        {
            tracing::debug!(error = %error, "cannot save the stat cache");
        }
    }
}

/// Returns the file in the state directory for the directory at `path` and the purpose `what`.
/// `None`: there is no state directory.
pub(crate) fn remembered_at(what: &str, path: &Path) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let directory = Paths::find().and_then(|paths| paths.stat_caches()).ok()?;
    let mut key = blake3_of(what.as_bytes(), path.as_os_str().as_bytes());
    key.truncate(32);
    Some(directory.join(key))
}

fn blake3_of(what: &[u8], path: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(what).update(&[0]).update(path);
    hasher.finalize().to_hex().to_string()
}

/// Guard that stops a scan when its caller drops it.
pub(crate) struct StopOnDrop(pub(crate) Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
