//! Transfers in progress, for `gantry status` and `gantry top`.

use std::collections::BTreeSet;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler::Worker;
use rpc::pb::streamer::streamer_client::StreamerClient;
use rpc::pb::streamer::{ListTransfersRequest, Route, Transfer, TransferProgress};
use serde_json::{Value, json};
use tokio::time::timeout;
use tonic::Status;

use crate::cli::addresses::Addresses;
use crate::render::labels;
use crate::render::table::{bytes, render};

/// Lists the transfers in progress of all streamers that answer within `limit`. Returns the failure
/// of a streamer that does not answer beside them.
pub(crate) async fn transfers(
    addresses: &Addresses,
    outgoing: &Outgoing,
    limit: Duration,
) -> (Vec<Transfer>, Option<Status>) {
    let asking = addresses.streamer.split(',').map(|address| async move {
        let unusable = |error: rpc::client::AddressError| Status::invalid_argument(error.to_string());
        let mut streamer = StreamerClient::new(peer(address.trim(), outgoing.clone()).map_err(unusable)?);
        let listed = timeout(limit, streamer.list_transfers(ListTransfersRequest {})).await;
        let listed = listed.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
        Ok(listed?.into_inner().transfers)
    });
    let (mut transfers, mut failure) = (Vec::new(), None);
    for listed in futures::future::join_all(asking).await {
        match listed {
            Ok(listed) => transfers.extend(listed),
            Err(status) => failure = Some(status),
        }
    }
    // A streamer that waits for the copy of another streamer lists it, too, but without details.
    let going = |transfer: &Transfer| (transfer.artifact_id.clone(), transfer.to_worker_id.clone());
    let elsewhere = |transfer: &Transfer| {
        transfer.progress.as_ref().is_some_and(|progress| progress.route() == Route::OtherStreamer)
    };
    let made: BTreeSet<_> = transfers.iter().filter(|transfer| !elsewhere(transfer)).map(going).collect();
    transfers.retain(|transfer| !elsewhere(transfer) || !made.contains(&going(transfer)));
    transfers.sort_by_key(|transfer| transfer.started_at.map(|at| (at.seconds, at.nanos)));
    (transfers, failure)
}

pub(crate) fn transfer_document(transfer: &Transfer) -> Value {
    let progress = transfer.progress.clone().unwrap_or_default();
    json!({
        "transfer_id": transfer.transfer_id,
        "team": transfer.team,
        "artifact_id": transfer.artifact_id,
        "route": route(&progress),
        "from_worker_id": progress.from_worker_id,
        "to_worker_id": transfer.to_worker_id,
        "bytes_done": progress.bytes_done,
        "bytes_total": progress.bytes_total,
        "bytes_saved": progress.bytes_saved,
        "bytes_per_second": progress.bytes_per_second,
        "started_at": transfer.started_at.as_ref().map(labels::instant),
    })
}

/// Returns the word for the route of a transfer. Empty: the route is not known yet.
fn route(progress: &TransferProgress) -> &'static str {
    match progress.route() {
        Route::Unspecified => "",
        Route::Peer => "gateways",
        Route::Workers => "workers",
        Route::OtherStreamer => "elsewhere",
        Route::Store => "store",
    }
}

pub(crate) fn transfers_text(transfers: &[Transfer], workers: &[Worker]) -> String {
    if transfers.is_empty() {
        return String::new();
    }
    let name = |id: &str| match workers.iter().find(|worker| worker.worker_id == id) {
        Some(worker) => worker.name.clone(),
        None if id.is_empty() => "not known yet".to_owned(),
        None => id.to_owned(),
    };
    let row = |transfer: &Transfer| {
        let progress = transfer.progress.clone().unwrap_or_default();
        vec![
            name(&progress.from_worker_id),
            name(&transfer.to_worker_id),
            format!("{} of {}", bytes(progress.bytes_done), bytes(progress.bytes_total)),
            format!("{}/s", bytes(progress.bytes_per_second)),
            transfer.artifact_id.clone(),
        ]
    };
    let rows: Vec<_> = transfers.iter().map(row).collect();
    format!("\n{}", render(&["TRANSFER FROM", "TO", "DONE", "SPEED", "ARTIFACT"], &rows))
}
