//! Room for a transfer on a disk that is short: before a transfer is refused, the artifact store
//! gives up what is left of ended attempts.
//!
//! [`super::write`] calls it. The rows are marked by the store, and destroyed by [`crate::sync`].

use std::time::Duration;

use super::Transfers;
use super::disk_reservations::{DiskReservation, InsufficientDisk};
use super::error::WriteVolumeError;

/// Longest time for which a transfer waits until what was given up is destroyed.
const LIMIT: Duration = Duration::from_secs(10);
/// Pause between two measurements.
const PAUSE: Duration = Duration::from_millis(100);

/// Reserves disk space for a transfer. If there is too little, it has the containers and volumes of
/// ended attempts deleted, and waits for their space.
pub(crate) async fn reserve(
    transfers: &Transfers,
    required: u64,
) -> Result<DiskReservation, WriteVolumeError> {
    match try_reserve(transfers, required).await {
        Err(WriteVolumeError::InsufficientDisk(refused)) if give_up_ended(transfers, &refused).await => {
            let ready = async {
                loop {
                    tokio::time::sleep(PAUSE).await;
                    match try_reserve(transfers, required).await {
                        Err(WriteVolumeError::InsufficientDisk(_)) => {}
                        decided => return decided,
                    }
                }
            };
            tokio::time::timeout(LIMIT, ready).await.unwrap_or(Err(refused.into()))
        }
        decided => decided,
    }
}

async fn try_reserve(transfers: &Transfers, required: u64) -> Result<DiskReservation, WriteVolumeError> {
    let disk = transfers.worker.runtime.disk().await?;
    Ok(transfers.reservations.reserve(disk, required)?)
}

/// Has the containers and volumes of ended attempts deleted. Returns whether there were any.
async fn give_up_ended(transfers: &Transfers, refused: &InsufficientDisk) -> bool {
    let worker = &transfers.worker;
    let Some(session) = worker.session.current() else { return false };
    match worker.clients.store.give_up_ended(&session.credential, refused.missing_bytes()).await {
        Ok(0) => false,
        Ok(given_up) => {
            tracing::info!(
                given_up,
                "a transfer needs disk space: containers and volumes of ended attempts are deleted"
            );
            true
        }
        Err(refusal) => {
            tracing::debug!(error = %refusal, "cannot delete what is left of ended attempts");
            false
        }
    }
}
