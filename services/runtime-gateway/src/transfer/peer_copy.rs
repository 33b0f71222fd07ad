//! The copy of a volume that one Concourse worker sends straight to another, past both gateways.
//!
//! ```text
//! nothing sent ──▶ the way through the gateways
//! sent ──▶ read again and compared ──▶ the volume holds the tree
//!   └──anything else──▶ emptied ──▶ the way through the gateways
//! ```
//!
//! No gateway has seen these bytes. Invariant: the volume counts only after all of it was read at its own worker
//! and compared with the manifest that was asked for ([`transfer::ArchiveReader::compare`]). Nothing of it stays
//! in a volume that is filled in another way afterwards. See
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
use crate::transfer::blocking_pipe::Arriving;
use crate::transfer::remote::SharedRemoteVolume;
use crate::util::blocking::blocking;

/// How it ends that another worker is asked to send, as metrics call it.
pub(crate) const OUTCOMES: [&str; 5] = ["done", "refused", "cancelled", "corrupted", "failed"];
/// How long a worker may take to say where it is reached.
const ASK: Duration = Duration::from_secs(5);
/// What a worker sends in a second, if it is a large volume.
const SLOWEST: u64 = 2 << 20;
/// Longest time in which emptying a volume is tried again.
const CLEARING: Duration = Duration::from_secs(180);

/// A volume elsewhere whose worker is asked to send it.
pub(crate) struct Sender {
    pub(crate) source: Source,
    /// Permits to write the volume that is to be filled.
    pub(crate) ticket: String,
    /// Is told how many bytes were compared.
    pub(crate) compared: watch::Sender<u64>,
    /// Nobody wants the volume any more.
    pub(crate) left: CancellationToken,
}

/// A worker could not send a volume to this one.
#[derive(Debug, thiserror::Error)]
enum PeerError {
    /// Its gateway cannot be called.
    #[error(transparent)]
    Source(SourceError),
    /// It has not begun.
    #[error("the other worker does not send: {0}")]
    NotBegun(Refusal),
    /// It said that it could not.
    #[error("the other worker could not send: {0}")]
    Failed(Refusal),
    /// It may be sending still.
    #[error("whether the other worker still sends is not known: {0}")]
    Lost(Refusal),
    /// So may it here.
    #[error("the other worker took too long")]
    Late,
    /// So may it here.
    #[error("nobody wants it any more")]
    Left,
    /// What arrived cannot be read.
    #[error("what arrived cannot be read")]
    Worker(#[from] RuntimeError),
    /// It is not what was asked for.
    #[error("what arrived is not what was asked for")]
    Arrived(#[source] ArchiveError),
}

impl From<SourceError> for PeerError {
    fn from(error: SourceError) -> Self {
        let refusal = match error {
            SourceError::Refused(refusal) => refusal,
            error => return Self::Source(error),
        };
        let not_begun = [
            Reason::NoPeers,
            Reason::InvalidField,
            Reason::InvalidToken,
            Reason::Unauthenticated,
            Reason::NotAttended,
            Reason::VolumeNotFound,
            Reason::DigestMismatch,
        ];
        if refusal.code == Code::Unimplemented || not_begun.into_iter().any(|reason| refusal.is(reason)) {
            Self::NotBegun(refusal)
        } else if refusal.is(Reason::PeerFailed) {
            Self::Failed(refusal)
        } else {
            Self::Lost(refusal)
        }
    }
}

impl PeerError {
    /// Whether the volume is as empty as it was.
    fn is_untouched(&self) -> bool {
        matches!(self, Self::Source(_) | Self::NotBegun(_))
    }

    /// Whether more may come.
    fn may_go_on(&self) -> bool {
        matches!(self, Self::Lost(_) | Self::Late | Self::Left)
    }

    /// As metrics call it.
    fn outcome(&self) -> &'static str {
        match self {
            error if error.is_untouched() => "refused",
            Self::Left => "cancelled",
            Self::Arrived(_) => "corrupted",
            _ => "failed",
        }
    }
}

fn count(outcome: &'static str) {
    metrics::counter!("gantry_gateway_peer_transfers_total", "outcome" => outcome).increment(1);
}

impl Sender {
    /// Has the worker of the source fill the empty volume `remote`, if both workers do such things. Answers whether it holds the tree of
    /// `manifest`; if not, it is empty, and stays so.
    pub(crate) async fn fill(
        &self,
        transfers: &Transfers,
        volume: VolumeHandle,
        remote: &SharedRemoteVolume,
        manifest: &Arc<Manifest>,
    ) -> Result<bool, WriteVolumeError> {
        // Plain tar would make all holes full.
        if manifest.extent_bytes() == 0 || manifest.extent_bytes() != manifest.size_bytes() {
            return Ok(false);
        }
        let inlet = match timeout(ASK, remote.inlet()).await {
            Ok(Ok(Some(inlet))) => inlet,
            Ok(Ok(None)) => return Ok(false),
            Ok(Err(error)) => return Ok(self.without(volume, &error_chain(&error))),
            Err(late) => return Ok(self.without(volume, &error_chain(&late))),
        };
        let brought = tokio::select! {
            brought = self.bring(transfers, remote, manifest, inlet) => brought,
            () = self.left.cancelled() => Err(PeerError::Left),
        };
        let Err(error) = brought else {
            count("done");
            return Ok(true);
        };
        count(error.outcome());
        if error.is_untouched() {
            return Ok(self.without(volume, &error_chain(&error)));
        }
        self.without(volume, &error_chain(&error));
        clear(transfers, volume, remote, error.may_go_on(), !matches!(error, PeerError::Left)).await?;
        if matches!(error, PeerError::Left) { Err(WriteVolumeError::CallerGone) } else { Ok(false) }
    }

    /// Says why a volume goes through the gateways.
    fn without(&self, volume: VolumeHandle, why: &str) -> bool {
        tracing::info!(
            volume.handle = %volume,
            source = ?self.source.endpoint,
            error = why,
            "a volume is not sent from worker to worker"
        );
        false
    }

    async fn bring(
        &self,
        transfers: &Transfers,
        remote: &SharedRemoteVolume,
        manifest: &Arc<Manifest>,
        inlet: Inlet,
    ) -> Result<(), PeerError> {
        self.compared.send_replace(0);
        let patience = transfers
            .worker
            .config
            .intervals
            .peer_transfer
            .max(Duration::from_secs(manifest.extent_bytes() / SLOWEST));
        let sent = timeout(patience, self.source.stream_to_peer(&self.ticket, inlet)).await;
        sent.map_err(|_| PeerError::Late)??;

        let archive = Arriving::of(manifest, remote.read(Path::new("")).await?);
        let (manifest, compared) = (manifest.clone(), self.compared.clone());
        let mut done = 0;
        blocking(move || {
            let compared = ArchiveReader::new(archive).compare(&manifest, |bytes| {
                done += bytes;
                compared.send_replace(done);
            });
            compared.map_err(PeerError::Arrived)
        })
        .await
    }
}

/// Empties a volume, so that nothing comes any more: where something `may_come`, only after it was gone for so long that nothing does. Makes
/// it `again`, empty.
///
/// To a worker whose volume is gone nothing can be sent, and what writes into a directory that is gone writes nowhere. But one that unpacks
/// at this moment may keep the directory, and have it found again by the volume that comes after it; so that one is looked into.
async fn clear(
    transfers: &Transfers,
    volume: VolumeHandle,
    remote: &SharedRemoteVolume,
    mut may_come: bool,
    again: bool,
) -> Result<(), RuntimeError> {
    let intervals = &transfers.worker.config.intervals;
    let until = Instant::now() + CLEARING + if may_come { intervals.peer_quiet } else { Duration::ZERO };
    loop {
        let cleared = async {
            transfers.worker.runtime.destroy_volume(volume).await?;
            if std::mem::take(&mut may_come) {
                tokio::select! {
                    () = tokio::time::sleep(intervals.peer_quiet) => {}
                    () = transfers.worker.stopping.cancelled() => {}
                }
            }
            if !again {
                return Ok(());
            }
            transfers.worker.runtime.create_volume(volume, VolumeSource::Empty).await?;
            if is_empty(remote).await? {
                return Ok(());
            }
            Err(RuntimeError::Other("something is left in a volume that was made anew".to_owned()))
        };
        match cleared.await {
            Err(error) if Instant::now() < until && !transfers.worker.stopping.is_cancelled() => {
                tracing::debug!(volume.handle = %volume, error = error_chain(&error), "a volume is not empty yet");
                may_come = true;
                tokio::time::sleep(intervals.clear_retry).await;
            }
            cleared => return cleared,
        }
    }
}

async fn is_empty(remote: &SharedRemoteVolume) -> Result<bool, RuntimeError> {
    let archive = Arriving::new(remote.read(Path::new("")).await?);
    blocking(move || {
        let read = ArchiveReader::new(archive).read(Limits::of_process(), |_| Ok(()));
        // What is left of an archive that is being unpacked may change while it is read.
        Ok::<_, RuntimeError>(read.is_ok_and(|manifest| manifest.entries().len() == 1))
    })
    .await
}

#[cfg(test)]
mod tests;
