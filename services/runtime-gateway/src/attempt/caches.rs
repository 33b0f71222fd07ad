//! Publishing the task caches of an attempt.
//!
//! A changed cache becomes a candidate with its own volume. If the cache started empty, that is the
//! mounted volume. If it started with a version, the volume is a copy of the mounted child, so that
//! no older version must be kept. A cache that cannot be published does not fail the workload. It
//! stays at its last version, and a note tells the caller.
//!
//! A tree counts as unchanged if only the modification time of its root differs, because each child
//! has its own root. Archives from a Concourse worker have no fractions of seconds and no extended
//! attributes, so these are not compared there. An unchanged tree that is published wastes space
//! but does no harm.

use domain::workload::{CacheMount, PublishedCache};
use domain::{CacheId, VolumeHandle, error_chain};
use runtime::{Contents, VolumeSource};
use transfer::{Entry, Manifest};

use super::context::AttemptContext;
use super::error::AttemptError;
use super::inputs::{self, AttemptHandles};
use super::spec_plan::{Plan, PlannedCache, PlannedVolume};
use crate::clients::scheduler_messages::AttemptTask;
use crate::clients::store::VolumePurpose;
use crate::transfer::completion::report_complete;
use crate::transfer::manifests::ScanResult;
use crate::worker::Worker;

/// The published caches of an attempt.
#[derive(Default)]
pub(super) struct CacheResult {
    pub(super) published: Vec<PublishedCache>,
    /// Notes for the caller about caches that were not published completely.
    pub(super) notes: Vec<String>,
}

/// Publishes the changed caches as candidates of this attempt.
pub(super) async fn publish(
    context: &AttemptContext,
    task: &AttemptTask,
    plan: &Plan,
    prepared: &AttemptHandles,
) -> Result<CacheResult, AttemptError> {
    let mut result = CacheResult::default();
    for cache in &plan.caches {
        let mount = task.spec.caches.iter().find(|mount| mount.cache == cache.cache);
        let name = mount.map_or_else(|| format!("cache {}", cache.cache), CacheMount::name);
        match publish_one(context, task, cache, prepared).await {
            Ok(None) => {}
            Ok(Some((candidate, omitted))) => {
                result.published.push(candidate);
                result.notes.extend(omitted.map(|entries| format!("{name}: left out: {entries}")));
            }
            Err(stopped) if stopped.is_superseded() => return Err(stopped),
            Err(stopped) => {
                let error = error_chain(&stopped);
                tracing::warn!(
                    workload.id = %task.workload,
                    cache.id = %cache.cache,
                    error,
                    "cannot publish a task cache: it stays at its last version"
                );
                result.notes.push(format!("{name} stays as it was before this run: {error}"));
            }
        }
    }
    Ok(result)
}

/// Publishes one cache. Returns the candidate, and a note about omitted entries. `None`: the cache
/// is unchanged.
pub(crate) async fn publish_one(
    context: &AttemptContext,
    task: &AttemptTask,
    planned: &PlannedCache,
    prepared: &AttemptHandles,
) -> Result<Option<(PublishedCache, Option<String>)>, AttemptError> {
    let PlannedCache { cache, artifact, volume } = *planned;
    let AttemptContext { worker, transfers, .. } = context;
    let (mounted, parent) = prepared.volumes[volume];
    let (runtime, team) = (worker.runtime.as_ref(), &*task.spec.team);
    let scanned = transfers.manifests.scan_all(runtime, mounted, team).await?;
    let (volume, ScanResult { manifest, omitted }) = match parent {
        // The cache is still empty.
        None if scanned.manifest.entries().len() <= 1 => return Ok(None),
        None => (mounted, scanned),
        Some((parent, digest)) => {
            let before = super::make::verify(transfers, parent, team, digest).await?;
            let exact = matches!(runtime.contents(mounted).await?, Contents::Directory(_));
            if is_same(&before, &scanned.manifest, exact) {
                return Ok(None);
            }
            let copy = request_copy_volume(worker, task, planned).await?;
            runtime.create_volume(copy, VolumeSource::Copy { original: mounted }).await?;
            // The copy itself is scanned, because the original may have changed meanwhile.
            (copy, transfers.manifests.scan_all(runtime, copy, team).await?)
        }
    };
    report_complete(transfers, volume, &manifest).await?;
    Ok(Some((PublishedCache { cache, artifact, digest: manifest.tree_digest() }, omitted)))
}

/// Returns the volume for a copy of a cache. Each call for the same cache returns the same volume.
async fn request_copy_volume(
    worker: &Worker,
    task: &AttemptTask,
    planned: &PlannedCache,
) -> Result<VolumeHandle, AttemptError> {
    let copy = PlannedVolume {
        becomes: Some(planned.artifact),
        ..PlannedVolume::new(copy_name(planned.cache), VolumePurpose::Output)
    };
    let (prepared, _) = inputs::request_volumes(worker, task, &[copy], &[]).await?;
    let handle = prepared.volumes.first().map(|(handle, _)| *handle);
    handle.ok_or_else(|| {
        AttemptError::InvalidAnswer(
            "cannot prepare a volume: the answer of the artifact store is empty".to_owned(),
        )
    })
}

/// Whether a child of the volume with the tree `before` is unchanged.
fn is_same(before: &Manifest, scanned: &Manifest, exact: bool) -> bool {
    let (before, scanned) = (before.entries(), scanned.entries());
    let same = |(before, scanned): (&Entry, &Entry)| {
        let metadata = |entry: &Entry| (entry.mode, entry.uid, entry.gid);
        let is_root = before.path.is_empty();
        (&before.path, metadata(before), &before.kind) == (&scanned.path, metadata(scanned), &scanned.kind)
            && (is_root || before.mtime_seconds == scanned.mtime_seconds)
            && (is_root || !exact || before.mtime_nanos == scanned.mtime_nanos)
            && (!exact || before.xattrs == scanned.xattrs)
    };
    before.len() == scanned.len() && before.iter().zip(scanned).all(same)
}

fn copy_name(cache: CacheId) -> String {
    format!("cache/{cache}/copy")
}

#[cfg(test)]
mod tests {
    use transfer::{EntryKind, Limits};

    use super::*;

    fn tree(root_seconds: i64, change: impl Fn(&mut Entry)) -> Manifest {
        let entry = |path: &[u8], kind: EntryKind, mtime_seconds| Entry {
            path: path.to_vec(),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime_seconds,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind,
        };
        let mut file = entry(b"file", EntryKind::File { size_bytes: 0, extents: Vec::new() }, 1);
        change(&mut file);
        Manifest::new([entry(b"", EntryKind::Directory, root_seconds), file], Limits::default())
            .expect("a valid manifest")
    }

    #[test]
    fn root_time_is_ignored_when_comparing_trees() {
        let before = tree(1, |_| {});
        for exact in [true, false] {
            assert!(is_same(&before, &tree(2, |_| {}), exact));
            for change in [
                |file: &mut Entry| file.mtime_seconds = 2,
                |file: &mut Entry| file.mode = 0o700,
                |file: &mut Entry| file.uid = 1,
                |file: &mut Entry| file.path = b"other".to_vec(),
                |file: &mut Entry| file.kind = EntryKind::File { size_bytes: 1, extents: Vec::new() },
            ] {
                assert!(!is_same(&before, &tree(1, change), exact));
            }
        }
        // Archives contain no fractions of seconds.
        let finer = tree(1, |file| file.mtime_nanos = 1);
        assert!(!is_same(&before, &finer, true) && is_same(&before, &finer, false));
        let root = Manifest::new(before.entries()[..1].to_vec(), Limits::default()).expect("valid");
        assert!(!is_same(&before, &root, true) && !is_same(&root, &before, true));
    }
}
