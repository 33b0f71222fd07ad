//! The copy of a volume from other workers to this one.
//!
//! `api` calls it for `Volumes.Fetch`. The manifest comes first. Contents that this worker has
//! are linked or copied locally. The other extents are read from the sources in turn. A source
//! continues where the previous one failed. A worker on another machine accepts only whole
//! files, so there the next source starts from the beginning.
//!
//! If both workers are on other machines and can reach each other, the worker of the source sends
//! the volume directly ([`crate::transfer::peer_copy`]). A failure of that costs only time.
//!
//! Invariant: the volume counts only if it holds the requested tree. [`super::write`] verifies the
//! digest of the manifest and of each extent.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use domain::worker::TicketClaims;
use domain::{Digest, error_chain};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use transfer::{ExtentData, Manifest, OrdinalRanges, PendingExtents, Verified};

use super::Transfers;
use super::error::WriteVolumeError;
use super::write::VolumeWriter;
use crate::clients::gateway::{Source, SourceError, VolumeReader};
use crate::transfer::peer_copy::PeerSource;

/// Longest pause of a source, which may have to scan a large volume.
const SOURCE_PAUSE: Duration = Duration::from_secs(60 * 60);

/// The progress of a copy, in bytes of content.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// Bytes that this worker already had.
    pub(crate) saved: u64,
    /// Index of the source that is read.
    pub(crate) source: usize,
    /// Whether the worker of that source sends the volume directly.
    pub(crate) by_peer: bool,
    /// Whether other workers can read the volume already.
    pub(crate) readable: bool,
}

/// The reason why a volume cannot be copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// The worker of this gateway failed, or the store rejected a call.
    #[error(transparent)]
    Local(#[from] WriteVolumeError),
    /// All sources failed. The errors are in the order of the sources.
    #[error("cannot copy the volume from any source: {}", join_errors(.0))]
    Sources(Vec<SourceError>),
}

/// Joins the errors of sources to a message.
fn join_errors(errors: &[SourceError]) -> String {
    let mut text = String::new();
    for (index, error) in errors.iter().enumerate() {
        let separator = if index == 0 { "" } else { "; " };
        // Writing to a string cannot fail.
        _ = write!(text, "{separator}{}", error_chain(error));
    }
    text
}

/// The reason why a source was given up.
enum SourceFailure {
    Source(SourceError),
    Local(WriteVolumeError),
}

impl From<SourceError> for SourceFailure {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

/// Longest pause of a source while there are others to try.
const SOURCE_PAUSE_WITH_OTHERS: Duration = Duration::from_secs(120);

/// The volume that is filled.
pub(crate) struct Destination {
    /// Claims of its ticket.
    pub(crate) ticket: TicketClaims,
    /// The signed ticket.
    pub(crate) signed: String,
}

/// Fills the volume of `to` with the tree of `digest`, from the first of `sources` that works.
/// Reports to `progress`.
///
/// Cancel safe: if it is dropped, the volume stays incomplete, and the artifact store collects it.
pub(crate) async fn fetch(
    transfers: &Arc<Transfers>,
    to: Destination,
    digest: Digest,
    sources: Vec<Source>,
    progress: impl Fn(Progress),
) -> Result<Arc<Manifest>, FetchError> {
    let mut fetch = Fetch { transfers, to, digest, partial: None, progress };
    let mut failed = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let pause = if index + 1 < sources.len() { SOURCE_PAUSE_WITH_OTHERS } else { SOURCE_PAUSE };
        match fetch.fetch_from(index, source, pause).await {
            Ok(filling) => return Ok(filling.commit(transfers).await?),
            Err(SourceFailure::Local(error)) => return Err(error.into()),
            Err(SourceFailure::Source(error)) => {
                tracing::info!(volume.handle = %fetch.to.ticket.volume, source = ?source.endpoint, error = error_chain(&error), "cannot copy from a source: trying the next one");
                if matches!(error, SourceError::OtherBytes) {
                    request_verification(transfers, source.clone());
                }
                failed.push(error);
            }
        }
    }
    // The caller may fill the volume in another way, and a volume has one writer at a time.
    if let Some(partial) = fetch.partial.take() {
        partial.filling.abandon().await;
    }
    Err(FetchError::Sources(failed))
}

/// Has a damaged source hashed in the background, so that it is used no longer.
fn request_verification(transfers: &Transfers, source: Source) {
    let worker = transfers.worker.clone();
    transfers.worker.tasks.spawn(async move {
        let verified = tokio::select! {
            verified = source.verify() => verified,
            () = worker.stopping.cancelled() => return,
        };
        let error = verified.err().map(|error| error_chain(&error));
        tracing::info!(source = ?source.endpoint, error, "a source that sent other bytes was verified");
    });
}

/// The state of a copy across sources.
struct Fetch<'w, P> {
    transfers: &'w Arc<Transfers>,
    to: Destination,
    digest: Digest,
    partial: Option<PartialVolume>,
    progress: P,
}

/// A volume that is partially filled.
struct PartialVolume {
    filling: VolumeWriter,
    manifest: Arc<Manifest>,
    /// Extents that no source has sent yet.
    missing: OrdinalRanges,
    progress: Progress,
}

impl<P: Fn(Progress)> Fetch<'_, P> {
    /// Copies all missing extents from `source`. Returns the volume, ready to commit.
    async fn fetch_from(
        &mut self,
        index: usize,
        source: &Source,
        pause: Duration,
    ) -> Result<VolumeWriter, SourceFailure> {
        let mut reader = source.read(pause).await?;
        let manifest = reader.manifest().await?;
        if manifest.tree_digest() != self.digest {
            return Err(SourceError::OtherBytes.into());
        }
        let mut partial = match self.partial.take() {
            Some(partial) => partial,
            None => self.begin(index, source, Arc::new(manifest)).await.map_err(SourceFailure::Local)?,
        };
        partial.progress.source = index;
        (self.progress)(partial.progress);

        match self.receive(&mut partial, &mut reader).await {
            Ok(()) => {
                debug_assert!(partial.missing.is_empty(), "everything was received");
                Ok(partial.filling)
            }
            // The next source may send files in another order.
            Err(failed) if partial.filling.takes_whole_files() => {
                partial.filling.abandon().await;
                Err(failed)
            }
            Err(failed) => {
                self.partial = Some(partial);
                Err(failed)
            }
        }
    }

    /// Makes the volume. If possible, the worker of `source` fills it directly.
    async fn begin(
        &self,
        index: usize,
        source: &Source,
        manifest: Arc<Manifest>,
    ) -> Result<PartialVolume, WriteVolumeError> {
        let total = manifest.extent_bytes();
        let (compared, mut updates) = watch::channel(0);
        let caller_gone = CancellationToken::new();
        let _guard = caller_gone.clone().drop_guard();
        let peer =
            PeerSource { source: source.clone(), ticket: self.to.signed.clone(), compared, caller_gone };
        let begin_result =
            VolumeWriter::begin_with(self.transfers, self.to.ticket.clone(), manifest.clone(), Some(peer));
        let forwarding = async {
            while updates.changed().await.is_ok() {
                let done = *updates.borrow_and_update();
                let by_peer = Progress { done, total, source: index, by_peer: true, ..Progress::default() };
                (self.progress)(by_peer);
            }
            std::future::pending::<()>().await;
        };
        let filling = tokio::select! {
            begin_result = begin_result => begin_result?,
            () = forwarding => return Err(WriteVolumeError::BrokenOff),
        };
        let (missing, by_peer) = (filling.missing_bytes(), filling.by_peer);
        let done = total.saturating_sub(missing);
        let saved = if by_peer { 0 } else { done };
        let readable = filling.is_readable();
        let progress = Progress { done, total, saved, source: index, by_peer, readable };
        Ok(PartialVolume { missing: filling.missing.clone(), filling, manifest, progress })
    }

    async fn receive(
        &self,
        partial: &mut PartialVolume,
        reader: &mut VolumeReader,
    ) -> Result<(), SourceFailure> {
        if partial.missing.is_empty() {
            return Ok(());
        }
        let bytes = partial.manifest.bytes_of(&partial.missing);
        reader.request(&partial.missing, bytes).await?;
        let wanted = partial.missing.clone();
        let (mut expected, mut missing) = (PendingExtents::new(&wanted), PendingExtents::new(&wanted));
        let received = loop {
            match reader.extents().await {
                Ok(Some(extents)) => {
                    let verified = verify(&partial.manifest, extents, &mut expected);
                    let verified = match verified {
                        Ok(verified) => verified,
                        Err(error) => break Err(error.into()),
                    };
                    let ordinals: Vec<_> = verified.iter().map(|(ordinal, _, _)| *ordinal).collect();
                    partial.progress.done += verified.iter().map(|(_, length, _)| length).sum::<u64>();
                    let extents = verified.into_iter().map(|(_, _, extent)| extent).collect();
                    partial
                        .filling
                        .put_verified(self.transfers, extents)
                        .await
                        .map_err(SourceFailure::Local)?;
                    for ordinal in ordinals {
                        missing.remove(ordinal);
                    }
                    (self.progress)(partial.progress);
                }
                Ok(None) if expected.is_empty() => break Ok(()),
                Ok(None) => break Err(SourceError::Truncated.into()),
                Err(error) => break Err(error.into()),
            }
        };
        partial.missing = missing.runs();
        received
    }
}

type VerifiedExtent = (u64, u64, Verified<bytes::Bytes>);

/// Verifies received extents. Each must be expected, and may arrive once. Returns them with their
/// ordinals and lengths.
fn verify(
    manifest: &Manifest,
    extents: Vec<ExtentData>,
    expected: &mut PendingExtents,
) -> Result<Vec<VerifiedExtent>, SourceError> {
    let verified = extents.into_iter().map(|extent| {
        if !expected.take(manifest, extent.ordinal) {
            return Err(SourceError::Protocol);
        }
        let length = u64::try_from(extent.data.len()).unwrap_or(u64::MAX);
        let verified = manifest.verify(extent.ordinal, extent.data).map_err(|_| SourceError::OtherBytes)?;
        Ok((extent.ordinal, length, verified))
    });
    verified.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(extents: &[(u64, &'static str)]) -> Vec<ExtentData> {
        let extents = extents.iter().map(|(ordinal, text)| ExtentData {
            ordinal: *ordinal,
            data: bytes::Bytes::from_static(text.as_bytes()),
        });
        extents.collect()
    }

    #[test]
    fn only_expected_extents_are_accepted_once() {
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["a", "b", "c"] {
            std::fs::write(directory.path().join(name), name.repeat(3)).expect("write");
        }
        let manifest = crate::transfer::scan::scan(directory.path()).expect("it can be read").manifest;
        let mut wanted = OrdinalRanges::new();
        for ordinal in [0, 2] {
            wanted.insert(ordinal).expect("ascending");
        }
        let refused = [
            ("not asked for", chunk(&[(2, "ccc"), (1, "bbb")])),
            ("twice", chunk(&[(2, "ccc"), (2, "ccc")])),
            ("nowhere", chunk(&[(7, "ccc")])),
            ("something else", chunk(&[(2, "ccc"), (0, "aaA")])),
        ];
        for (what, chunk) in refused {
            let verified = verify(&manifest, chunk, &mut PendingExtents::new(&wanted));
            verified.map(|_| ()).expect_err(what);
        }
        let mut expected = PendingExtents::new(&wanted);
        let verified =
            verify(&manifest, chunk(&[(2, "ccc"), (0, "aaa")]), &mut expected).expect("it is right");
        let accepted: Vec<_> = verified.iter().map(|(ordinal, length, _)| (*ordinal, *length)).collect();
        assert_eq!((accepted, expected.is_empty()), (vec![(2, 3), (0, 3)], true));
        verify(&manifest, chunk(&[(2, "ccc")]), &mut expected).map(|_| ()).expect_err("again");
    }

    #[tokio::test]
    async fn silent_source_times_out() {
        // The kernel accepts connections, but no process reads from them.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", silent.local_addr().expect("an address"));
        let source = Source { endpoint: Some(endpoint), ticket: "ticket".to_owned() };
        let result = source.read(Duration::from_millis(50)).await;
        assert!(matches!(result, Err(SourceError::Truncated)));
    }
}
