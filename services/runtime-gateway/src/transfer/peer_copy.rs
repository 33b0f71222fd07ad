//! The direct copy of a volume from one Concourse worker to another.
//!
//! ```text
//! not sent ──▶ copy through the gateways
//! sent ──▶ read back and compared ──▶ complete
//!   └──failed or different──▶ emptied ──▶ copy through the gateways
//! ```
//!
//! [`super::write`] tries it before a copy through the gateways.
//!
//! Invariant: the volume counts only after all of it was read back and compared with the requested
//! manifest ([`transfer::ArchiveReader::compare`]). The gateways have not seen these bytes before.
//! If the copy fails, the volume is emptied before it is filled in another way. See
//! `docs/decisions/0008-let-concourse-workers-send-volumes-directly.md`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use domain::{VolumeHandle, error_chain};
use rpc::{Reason, Refusal};
use runtime::{Inlet, RuntimeError, VolumeSource};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Code;
use transfer::{ArchiveError, ArchiveReader, Limits, Manifest};

use super::Transfers;
use super::error::WriteVolumeError;
use crate::clients::gateway::{Source, SourceError};
use crate::transfer::blocking_pipe::ArchiveSource;
use crate::transfer::remote::SharedRemoteVolume;
use crate::util::blocking::blocking;

/// Outcomes of direct copies, as labels of the metric.
pub(crate) const OUTCOMES: [&str; 5] = ["done", "refused", "cancelled", "corrupted", "failed"];
/// Timeout of the query for a worker's peer address.
const INLET_TIMEOUT: Duration = Duration::from_secs(5);
/// Slowest transfer rate of a large volume, in bytes per second.
const MIN_BYTES_PER_SECOND: u64 = 2 << 20;
/// Longest time for which emptying a volume is tried again.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(180);

/// A volume on another worker, which is asked to send it.
pub(crate) struct PeerSource {
    pub(crate) source: Source,
    /// Ticket that permits to write the destination.
    pub(crate) ticket: String,
    /// Number of bytes that were compared.
    pub(crate) compared: watch::Sender<u64>,
    /// Cancelled when the caller is gone.
    pub(crate) caller_gone: CancellationToken,
}

/// The reason why a direct copy failed.
#[derive(Debug, thiserror::Error)]
enum PeerError {
    /// The gateway of the source cannot be called.
    #[error(transparent)]
    Source(SourceError),
    /// The other worker has not started to send.
    #[error("the other worker rejected the copy: {0}")]
    Rejected(Refusal),
    /// The other worker failed, and sends no more.
    #[error("cannot copy directly: the other worker failed to send: {0}")]
    Failed(Refusal),
    /// The other worker may still send.
    #[error("the other worker may still be sending: {0}")]
    Unknown(Refusal),
    /// The other worker took too long, and may still send.
    #[error("the other worker took too long")]
    TimedOut,
    /// The caller is gone. The other worker may still send.
    #[error("the caller is gone")]
    CallerGone,
    /// The received volume cannot be read.
    #[error("cannot read the received volume")]
    Worker(#[from] RuntimeError),
    /// The received tree differs from the requested one.
    #[error("the received volume has another tree")]
    Differs(#[source] ArchiveError),
}

impl From<SourceError> for PeerError {
    fn from(error: SourceError) -> Self {
        let refusal = match error {
            SourceError::Refused(refusal) => refusal,
            error => return Self::Source(error),
        };
        let rejections = [
            Reason::NoPeers,
            Reason::InvalidField,
            Reason::InvalidToken,
            Reason::Unauthenticated,
            Reason::NotAttended,
            Reason::VolumeNotFound,
            Reason::DigestMismatch,
        ];
        if refusal.code == Code::Unimplemented || rejections.into_iter().any(|reason| refusal.is(reason)) {
            Self::Rejected(refusal)
        } else if refusal.is(Reason::PeerFailed) {
            Self::Failed(refusal)
        } else {
            Self::Unknown(refusal)
        }
    }
}

impl PeerError {
    /// Whether the volume is certainly still empty.
    fn is_untouched(&self) -> bool {
        matches!(self, Self::Source(_) | Self::Rejected(_))
    }

    /// Whether the other worker may still send.
    fn may_still_send(&self) -> bool {
        matches!(self, Self::Unknown(_) | Self::TimedOut | Self::CallerGone)
    }

    /// Returns the label of the metric.
    fn outcome(&self) -> &'static str {
        match self {
            error if error.is_untouched() => "refused",
            Self::CallerGone => "cancelled",
            Self::Differs(_) => "corrupted",
            _ => "failed",
        }
    }
}

fn count(outcome: &'static str) {
    metrics::counter!("gantry_gateway_peer_transfers_total", "outcome" => outcome).increment(1);
}

impl PeerSource {
    /// Requests the worker of the source to fill the empty volume `remote`. Returns true if the
    /// volume holds the tree of `manifest`. Otherwise the volume is empty.
    pub(crate) async fn fill(
        &self,
        transfers: &Transfers,
        volume: VolumeHandle,
        remote: &SharedRemoteVolume,
        manifest: &Arc<Manifest>,
    ) -> Result<bool, WriteVolumeError> {
        // Plain tar fills holes with zeroes, so trees with holes are not copied this way.
        if manifest.extent_bytes() == 0 || manifest.extent_bytes() != manifest.size_bytes() {
            return Ok(false);
        }
        let inlet = match timeout(INLET_TIMEOUT, remote.inlet()).await {
            Ok(Ok(Some(inlet))) => inlet,
            Ok(Ok(None)) => return Ok(false),
            Ok(Err(error)) => return Ok(self.log_fallback(volume, &error_chain(&error))),
            Err(late) => return Ok(self.log_fallback(volume, &error_chain(&late))),
        };
        let result = tokio::select! {
            result = self.transfer(transfers, remote, manifest, inlet) => result,
            () = self.caller_gone.cancelled() => Err(PeerError::CallerGone),
        };
        let Err(error) = result else {
            count("done");
            return Ok(true);
        };
        count(error.outcome());
        if error.is_untouched() {
            return Ok(self.log_fallback(volume, &error_chain(&error)));
        }
        self.log_fallback(volume, &error_chain(&error));
        empty_volume(
            transfers,
            volume,
            remote,
            error.may_still_send(),
            !matches!(error, PeerError::CallerGone),
        )
        .await?;
        if matches!(error, PeerError::CallerGone) { Err(WriteVolumeError::CallerGone) } else { Ok(false) }
    }

    /// Logs why a volume is copied through the gateways.
    fn log_fallback(&self, volume: VolumeHandle, why: &str) -> bool {
        tracing::info!(
            volume.handle = %volume,
            source = ?self.source.endpoint,
            error = why,
            "cannot copy a volume directly: copying through the gateways"
        );
        false
    }

    async fn transfer(
        &self,
        transfers: &Transfers,
        remote: &SharedRemoteVolume,
        manifest: &Arc<Manifest>,
        inlet: Inlet,
    ) -> Result<(), PeerError> {
        self.compared.send_replace(0);
        let time_limit = transfers
            .worker
            .config
            .intervals
            .peer_transfer
            .max(Duration::from_secs(manifest.extent_bytes() / MIN_BYTES_PER_SECOND));
        let sent = timeout(time_limit, self.source.stream_to_peer(&self.ticket, inlet)).await;
        sent.map_err(|_| PeerError::TimedOut)??;

        let archive = ArchiveSource::of(manifest, remote.read(Path::new("")).await?);
        let (manifest, compared) = (manifest.clone(), self.compared.clone());
        let mut done = 0;
        blocking(move || {
            let compared = ArchiveReader::new(archive).compare(&manifest, |bytes| {
                done += bytes;
                compared.send_replace(done);
            });
            compared.map_err(PeerError::Differs)
        })
        .await
    }
}

/// Empties a volume. With `may_receive`, the other worker may still send, so the volume is
/// destroyed for a while first. With `recreate`, the volume is made again, empty.
///
/// A worker rejects bytes for a destroyed volume, and writes to a deleted directory are lost. But a
/// worker that is unpacking may keep the directory, and a new volume may then show its contents. So
/// the new volume is checked.
async fn empty_volume(
    transfers: &Transfers,
    volume: VolumeHandle,
    remote: &SharedRemoteVolume,
    mut may_receive: bool,
    recreate: bool,
) -> Result<(), RuntimeError> {
    let intervals = &transfers.worker.config.intervals;
    let until =
        Instant::now() + CLEAR_TIMEOUT + if may_receive { intervals.peer_quiet } else { Duration::ZERO };
    loop {
        let cleared = async {
            transfers.worker.runtime.destroy_volume(volume).await?;
            if std::mem::take(&mut may_receive) {
                tokio::select! {
                    () = tokio::time::sleep(intervals.peer_quiet) => {}
                    () = transfers.worker.stopping.cancelled() => {}
                }
            }
            if !recreate {
                return Ok(());
            }
            transfers.worker.runtime.create_volume(volume, VolumeSource::Empty).await?;
            if is_empty(remote).await? {
                return Ok(());
            }
            Err(RuntimeError::Other("cannot empty a volume: the new volume is not empty".to_owned()))
        };
        match cleared.await {
            Err(error) if Instant::now() < until && !transfers.worker.stopping.is_cancelled() => {
                tracing::debug!(volume.handle = %volume, error = error_chain(&error), "cannot empty a volume: trying again");
                may_receive = true;
                tokio::time::sleep(intervals.clear_retry).await;
            }
            cleared => return cleared,
        }
    }
}

async fn is_empty(remote: &SharedRemoteVolume) -> Result<bool, RuntimeError> {
    let archive = ArchiveSource::new(remote.read(Path::new("")).await?);
    blocking(move || {
        let read = ArchiveReader::new(archive).read(Limits::of_process(), |_| Ok(()));
        // An archive that is still being unpacked may change while it is read.
        Ok::<_, RuntimeError>(read.is_ok_and(|manifest| manifest.entries().len() == 1))
    })
    .await
}

#[cfg(test)]
mod tests;
