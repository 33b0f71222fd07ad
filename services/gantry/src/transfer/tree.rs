//! Trees on their way: what `rpc::tree` leaves to us, and what is remembered of directories from scan to scan.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use domain::Digest;
use rpc::pb::runtime::{Chunk, ExtentData};
use transfer::StatCache;

use crate::cluster::Paths;

/// Content, as a message.
pub(crate) fn chunk(extents: Vec<transfer::ExtentData>) -> Chunk {
    let extent = |extent: transfer::ExtentData| ExtentData { ordinal: extent.ordinal, data: extent.data };
    Chunk { extents: extents.into_iter().map(extent).collect() }
}

/// A digest that came.
pub(crate) fn digest(bytes: &[u8]) -> anyhow::Result<Digest> {
    Digest::try_from(bytes).context("the cluster sent a digest that is none")
}

/// What is remembered of the files of one directory on this machine, from scan to scan.
pub(crate) struct DirectoryCache {
    file: Option<PathBuf>,
    pub(crate) cache: StatCache,
}

impl DirectoryCache {
    /// What is known of the directory at `path`, which was scanned for `what` before.
    pub(crate) fn load(what: &str, path: &Path) -> Self {
        // Without a place for it, everything is read each time.
        let Some(file) = remembered_at(what, path) else {
            return Self { file: None, cache: StatCache::new() };
        };
        Self { cache: StatCache::load(&file).cache, file: Some(file) }
    }

    /// Keeps it for the next time.
    pub(crate) fn save(self) {
        if let Some(file) = &self.file
            && let Err(error) = self.cache.save(file)
        {
            tracing::debug!(error = %error, "cannot remember what was scanned");
        }
    }
}

/// The file for `what` is kept of the directory at `path`. `None`: there is no place for it.
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

/// Stops a scan that nobody waits for any more.
pub(crate) struct StopOnDrop(pub(crate) Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
