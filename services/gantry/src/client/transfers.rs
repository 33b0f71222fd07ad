//! Transfers in progress and the routes between workers, for `gantry status` and `gantry top`.

use std::collections::BTreeSet;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler::Worker;
use rpc::pb::streamer::streamer_client::StreamerClient;
use rpc::pb::streamer::{ListTransfersRequest, RelayedPair, Route, Transfer, TransferProgress};
use serde_json::{Value, json};
use tokio::time::timeout;
use tonic::Status;

use crate::cli::addresses::Addresses;
use crate::render::labels;
use crate::render::table::{bytes, duration, plain, render};

/// Transfers of all streamers that answer.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    /// Transfers in progress, oldest first.
    pub(crate) running: Vec<Transfer>,
    /// Pairs of workers whose copies pass through a streamer.
    pub(crate) relayed_pairs: Vec<RelayedPair>,
    /// Failure of a streamer that does not answer.
    pub(crate) failure: Option<Status>,
}

/// Lists the transfers of all streamers that answer within `limit`.
pub(crate) async fn transfers(addresses: &Addresses, outgoing: &Outgoing, limit: Duration) -> Transfers {
    let asking = addresses.streamer.split(',').map(|address| async move {
        let unusable = |error: rpc::client::AddressError| Status::invalid_argument(error.to_string());
        let mut streamer = StreamerClient::new(peer(address.trim(), outgoing.clone()).map_err(unusable)?);
        let listed = timeout(limit, streamer.list_transfers(ListTransfersRequest {})).await;
        let listed = listed.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
        Ok(listed?.into_inner())
    });
    let (mut transfers, mut relayed_pairs, mut failure) = (Vec::new(), Vec::new(), None);
    for listed in futures::future::join_all(asking).await {
        match listed {
            Ok(listed) => {
                transfers.extend(listed.transfers);
                relayed_pairs.extend(listed.relayed_pairs);
            }
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
    // Several streamers may have found the same pair.
    let pair = |pair: &RelayedPair| (pair.from_worker_id.clone(), pair.to_worker_id.clone());
    relayed_pairs.sort_by_key(pair);
    relayed_pairs.dedup_by_key(|relayed| pair(relayed));
    Transfers { running: transfers, relayed_pairs, failure }
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
        Route::Relay => "relay",
    }
}

pub(crate) fn relayed_pair_document(pair: &RelayedPair) -> Value {
    json!({
        "from_worker_id": pair.from_worker_id,
        "to_worker_id": pair.to_worker_id,
        "gateway_endpoint": pair.gateway_endpoint,
        "error": pair.error,
        "remaining_seconds": pair.remaining.unwrap_or_default().seconds,
    })
}

/// Describes the pairs of workers whose copies pass through a streamer.
pub(crate) fn relayed_pairs_text(pairs: &[RelayedPair], workers: &[Worker]) -> String {
    let line = |pair: &RelayedPair| {
        let (from, to) = (name(&pair.from_worker_id, workers), name(&pair.to_worker_id, workers));
        let remaining = Duration::try_from(pair.remaining.unwrap_or_default()).unwrap_or_default();
        format!(
            "{from} → {to}: bytes go through the streamer for {} more, because {to} cannot reach {from} at {}: {}\n",
            duration(remaining),
            pair.gateway_endpoint,
            plain(&pair.error, 200),
        )
    };
    let lines: String = pairs.iter().map(line).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

fn name(id: &str, workers: &[Worker]) -> String {
    match workers.iter().find(|worker| worker.worker_id == id) {
        Some(worker) => worker.name.clone(),
        None if id.is_empty() => "not known yet".to_owned(),
        None => id.to_owned(),
    }
}

pub(crate) fn transfers_text(transfers: &[Transfer], workers: &[Worker]) -> String {
    if transfers.is_empty() {
        return String::new();
    }
    let row = |transfer: &Transfer| {
        let progress = transfer.progress.clone().unwrap_or_default();
        let from = name(&progress.from_worker_id, workers);
        let is_relayed = progress.route() == Route::Relay;
        vec![
            if is_relayed { format!("{from} (relayed)") } else { from },
            name(&transfer.to_worker_id, workers),
            format!("{} of {}", bytes(progress.bytes_done), bytes(progress.bytes_total)),
            format!("{}/s", bytes(progress.bytes_per_second)),
            transfer.artifact_id.clone(),
        ]
    };
    let rows: Vec<_> = transfers.iter().map(row).collect();
    format!("\n{}", render(&["TRANSFER FROM", "TO", "DONE", "SPEED", "ARTIFACT"], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relayed_pair_names_workers_address_and_time() {
        let worker =
            |id: &str, name: &str| Worker { worker_id: id.into(), name: name.into(), ..Worker::default() };
        let pair = RelayedPair {
            from_worker_id: "1".to_owned(),
            to_worker_id: "2".to_owned(),
            gateway_endpoint: "http://a:7404".to_owned(),
            error: "no route".to_owned(),
            remaining: Some(prost_types::Duration { seconds: 240, nanos: 0 }),
        };
        assert_eq!(
            relayed_pairs_text(&[pair], &[worker("1", "one"), worker("2", "two")]),
            "\none → two: bytes go through the streamer for 4 min more, because two cannot reach one at http://a:7404: no route\n"
        );
        assert_eq!(relayed_pairs_text(&[], &[]), "");
    }
}
