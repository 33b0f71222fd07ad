//! Volumes that other workers read while they are being filled.
//!
//! With many destinations at once, each copy serves the next one. [`super::write`] publishes a
//! volume on this machine as soon as its manifest is known, and `api` reads it for `Volumes.Read`.
//!
//! Invariant: an extent is read only after it was verified and written. A reader of a volume whose
//! writer gives up receives an error, and not an end.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use transfer::{ExtentData, Manifest, OrdinalRanges, PendingExtents, ReadOptions, TreeReader, Verified};

use super::error::ReadVolumeError;
use crate::util::blocking::blocking;

/// Most extents that are read in one step. An extent has at most 1 MiB.
const STEP: usize = 16;

/// A volume that is being filled. Clones share it.
#[derive(Clone)]
pub(crate) struct GrowingVolume {
    root: PathBuf,
    pub(crate) manifest: Arc<Manifest>,
    /// Extents that are not written yet. The channel closes when the writer has ended.
    missing: watch::Receiver<PendingExtents>,
}

/// The writer's side of a volume that is being filled.
pub(crate) struct Growth(watch::Sender<PendingExtents>);

impl Growth {
    /// Publishes that extents were written.
    pub(crate) fn add<T>(&self, written: &[Verified<T>]) {
        self.0.send_modify(|missing| {
            for extent in written {
                missing.remove(extent.ordinal());
            }
        });
    }
}

impl GrowingVolume {
    /// Creates a volume at `root` that lacks the extents of `missing`.
    pub(crate) fn new(root: PathBuf, manifest: Arc<Manifest>, missing: &OrdinalRanges) -> (Self, Growth) {
        let (growth, missing) = watch::channel(PendingExtents::new(missing));
        (Self { root, manifest, missing }, Growth(growth))
    }

    /// Reads extents in ascending order, each as soon as it is written. Passes them to `send` on a
    /// blocking thread until it returns false, because the caller is gone.
    pub(crate) async fn read(
        mut self,
        wanted: OrdinalRanges,
        mut send: impl FnMut(Vec<ExtentData>) -> bool + Send + 'static,
    ) -> Result<(), ReadVolumeError> {
        let (root, manifest) = (self.root.clone(), self.manifest.clone());
        let open =
            move || Ok::<_, ReadVolumeError>(TreeReader::new(&root, manifest, ReadOptions::default())?);
        let mut reader = blocking(open).await?;
        let mut wanted = wanted.ordinals().peekable();
        while let Some(&next) = wanted.peek() {
            let mut step = OrdinalRanges::new();
            {
                let missing = self.missing.wait_for(|missing| !missing.contains(next)).await;
                let missing = missing.map_err(|_| ReadVolumeError::Incomplete)?;
                let is_ready = |ordinal: &u64| !missing.contains(*ordinal);
                for _ in 0..STEP {
                    let Some(ordinal) = wanted.next_if(is_ready) else { break };
                    // Ordinals ascend, so this cannot fail.
                    _ = step.insert(ordinal);
                }
            }
            let read = move || {
                for batch in reader.batches(&step) {
                    if !send(batch?) {
                        return Err(ReadVolumeError::CallerGone);
                    }
                }
                Ok((reader, send))
            };
            (reader, send) = blocking(read).await?;
        }
        Ok(())
    }
}
