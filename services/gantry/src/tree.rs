//! Trees on their way: between `transfer`, which knows directories, and the messages of `Volumes`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use domain::Digest;
use prost::Message;
use rpc::pb::runtime::{Chunk, Entry, ExtentData, ExtentRun, ExtentRuns, ManifestPart};
use transfer::{Runs, StatCache};

use crate::cluster::Paths;

/// About how many bytes of a manifest travel in one message.
pub(crate) const PART_BYTES: usize = 512 << 10;

/// Some of a manifest, as a message.
pub(crate) fn part(entries: &[transfer::Entry]) -> anyhow::Result<ManifestPart> {
    // Both are the same message, written down twice.
    let entry = |entry: &transfer::Entry| Entry::decode(entry.encode().as_slice());
    let entries = entries.iter().map(entry).collect::<Result<_, _>>();
    Ok(ManifestPart { entries: entries.context("an entry does not decode as it was encoded")? })
}

/// Content, as a message.
pub(crate) fn chunk(extents: Vec<transfer::ExtentData>) -> Chunk {
    let extent = |extent: transfer::ExtentData| ExtentData { ordinal: extent.ordinal, data: extent.data };
    Chunk { extents: extents.into_iter().map(extent).collect() }
}

/// Ordinals, as messages that are not too large.
pub(crate) fn runs(runs: &Runs) -> Vec<ExtentRuns> {
    let all: Vec<ExtentRun> =
        runs.runs().map(|run| ExtentRun { first: run.start, count: run.end - run.start }).collect();
    all.chunks(10_000).map(|runs| ExtentRuns { runs: runs.to_vec() }).collect()
}

/// Adds ordinals from a message.
pub(crate) fn add_runs(to: &mut Runs, message: &ExtentRuns) -> anyhow::Result<()> {
    for run in &message.runs {
        to.insert_run(run.first, run.count).context("the worker asks for content that there is not")?;
    }
    Ok(())
}

/// A digest that came.
pub(crate) fn digest(bytes: &[u8]) -> anyhow::Result<Digest> {
    Digest::try_from(bytes).context("the cluster sent a digest that is none")
}

/// What is remembered of the files of one directory on this machine, from scan to scan.
pub(crate) struct Remembered {
    file: Option<PathBuf>,
    pub(crate) cache: StatCache,
}

impl Remembered {
    /// What is known of the directory at `path`, which was scanned for `what` before.
    pub(crate) fn load(what: &str, path: &Path) -> Self {
        use std::os::unix::ffi::OsStrExt;
        // Without a place for it, everything is read each time.
        let Ok(directory) = Paths::find().and_then(|paths| paths.stat_caches()) else {
            return Self { file: None, cache: StatCache::new() };
        };
        let mut key = blake3_of(what.as_bytes(), path.as_os_str().as_bytes());
        key.truncate(32);
        let file = directory.join(key);
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

fn blake3_of(what: &[u8], path: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(what).update(&[0]).update(path);
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(runs: &[(u64, u64)]) -> Runs {
        let mut set = Runs::new();
        for (first, count) in runs {
            set.insert_run(*first, *count).expect("ascending");
        }
        set
    }

    #[test]
    fn runs_come_back_from_their_messages() {
        let runs = set(&[(1, 2), (5, 1)]);
        let mut back = Runs::new();
        for message in super::runs(&runs) {
            add_runs(&mut back, &message).expect("ascending");
        }
        assert_eq!(back, runs);
        assert!(add_runs(&mut back, &ExtentRuns { runs: vec![ExtentRun { first: 0, count: 1 }] }).is_err());
    }

    #[test]
    fn entries_decode_as_the_messages_that_they_are() {
        let entry = transfer::Entry {
            path: b"odd \xff\n".to_vec(),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime_seconds: -5,
            mtime_nanos: 7,
            xattrs: vec![],
            kind: transfer::EntryKind::Symlink { target: b"x".to_vec() },
        };
        let message = part(std::slice::from_ref(&entry)).expect("decodes").entries.remove(0);
        assert_eq!(message.encode_to_vec(), entry.encode());
    }
}
