//! The calls that write and read a volume as a tree.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::Digest;
use domain::worker::{TicketClaims, TicketOperation};
use futures::{Stream, StreamExt};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::read_request::Message as ReadMessage;
use rpc::pb::runtime::read_response::Message as ReadAnswer;
use rpc::pb::runtime::write_request::Message as WriteMessage;
use rpc::pb::runtime::write_response::Message as WriteAnswer;
use rpc::{Reason, invalid_field};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};
use transfer::{Limits, Manifest, ManifestBuilder, OrdinalRanges};

use super::errors::truncated;
use super::{ANSWER_QUEUE, Answers};
use crate::SERVICE;
use crate::transfer::error::ReadVolumeError;
use crate::transfer::write::VolumeWriter;
use crate::transfer::{Transfers, read as volume_read};
use crate::worker_set::WorkerSet;

/// Longest pause of a caller between two messages of an upload. An upload without progress keeps
/// its reservations no longer than that. The pause is long because a caller may compute the bytes
/// that it sends.
pub(super) const UPLOAD_PAUSE: Duration = Duration::from_secs(15 * 60);

/// Longest pause of the caller or the source of a download. Each may first have to scan a large
/// volume.
pub(super) const DOWNLOAD_PAUSE: Duration = Duration::from_secs(60 * 60);

/// Receives the next message of the caller within `pause`.
///
/// Errors: `TRANSFER_TRUNCATED`.
pub(super) async fn next_message<T>(
    requests: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
    pause: Duration,
) -> Result<T, Status> {
    let next = tokio::time::timeout(pause, requests.next()).await.map_err(|_| paused("sent", pause))?;
    next.ok_or_else(truncated)?
}

/// The error of a transfer whose caller made no progress.
fn paused(did: &str, pause: Duration) -> Status {
    let minutes = pause.as_secs() / 60;
    Reason::TransferTruncated.status(SERVICE, format!("the caller {did} nothing for {minutes} minutes"))
}

pub(super) async fn send<T>(answers: &Answers<T>, answer: T) -> Result<(), Status> {
    let sent = tokio::time::timeout(DOWNLOAD_PAUSE, answers.send(Ok(answer))).await;
    sent.map_err(|_| paused("took", DOWNLOAD_PAUSE))?.map_err(|_| truncated())
}

pub(super) async fn write(
    gateway: WorkerSet,
    mut requests: Streaming<pb::WriteRequest>,
    answers: Answers<pb::WriteResponse>,
) -> Result<(), Status> {
    let answer = async |message| {
        let sent = send(&answers, pb::WriteResponse { message: Some(message) });
        tokio::time::timeout(UPLOAD_PAUSE, sent).await.map_err(|_| paused("took", UPLOAD_PAUSE))?
    };
    let WriteMessage::Open(open) = next(&mut requests).await? else {
        return Err(invalid_field("message", "the first message must be `open`"));
    };
    let (attended, ticket) = gateway.admit(&open.ticket, TicketOperation::Write).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Write).await?;
    let manifest = receive_manifest(&mut requests).await?;

    let mut filling = VolumeWriter::begin(&attended.transfers, ticket, Arc::new(manifest)).await?;
    for runs in rpc::tree::runs(&filling.missing) {
        answer(WriteAnswer::Missing(runs)).await?;
    }
    answer(WriteAnswer::MissingEnd(pb::ExtentRunsEnd { bytes: filling.missing_bytes() })).await?;

    let mut bytes = 0;
    loop {
        match next(&mut requests).await? {
            WriteMessage::Chunk(chunk) => {
                let extents: Vec<_> =
                    chunk.extents.into_iter().map(|extent| (extent.ordinal, extent.data)).collect();
                if extents.iter().all(|(_, data)| data.is_empty()) {
                    return Err(invalid_field("chunk", "must have content"));
                }
                bytes += extents.iter().map(|(_, data)| length(data)).sum::<u64>();
                filling.put(&attended.transfers, extents).await?;
                // Progress is only informative, so it is dropped if the caller does not read it.
                let progress = WriteAnswer::Progress(pb::WriteProgress { bytes });
                answers.try_send(Ok(pb::WriteResponse { message: Some(progress) })).ok();
            }
            WriteMessage::Commit(_) => break,
            _ => return Err(invalid_field("message", "only `chunk` and `commit` may follow the manifest")),
        }
    }
    let manifest = filling.commit(&attended.transfers).await?;
    let digest = manifest.tree_digest().as_bytes().to_vec().into();
    answer(WriteAnswer::Committed(pb::Committed { digest, size_bytes: manifest.size_bytes() })).await
}

pub(super) async fn next(
    requests: &mut (impl Stream<Item = Result<pb::WriteRequest, Status>> + Unpin),
) -> Result<WriteMessage, Status> {
    rpc::required("message", next_message(requests, UPLOAD_PAUSE).await?.message)
}

pub(super) async fn receive_manifest(
    requests: &mut (impl Stream<Item = Result<pb::WriteRequest, Status>> + Unpin),
) -> Result<Manifest, Status> {
    let mut builder = ManifestBuilder::new(Limits::of_process());
    let invalid = |error| rpc::tree::invalid_manifest(SERVICE, &error);
    let end = loop {
        match next(requests).await? {
            WriteMessage::Manifest(part) => rpc::tree::push_part(&mut builder, &part).map_err(invalid)?,
            WriteMessage::ManifestEnd(end) => break end,
            _ => return Err(invalid_field("message", "the whole manifest must come first")),
        }
    };
    let manifest = builder.finish().map_err(invalid)?;
    let expected = Digest::try_from(end.digest.as_ref());
    if expected != Ok(manifest.tree_digest()) {
        return Err(
            Reason::DigestMismatch.status(SERVICE, "the manifest does not have the digest in `manifest_end`")
        );
    }
    Ok(manifest)
}

fn length(data: &Bytes) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

pub(super) async fn read(
    gateway: WorkerSet,
    mut requests: Streaming<pb::ReadRequest>,
    answers: Answers<pb::ReadResponse>,
) -> Result<(), Status> {
    let answer = |message| send(&answers, pb::ReadResponse { message: Some(message) });
    let open = match next_message(&mut requests, DOWNLOAD_PAUSE).await?.message {
        Some(ReadMessage::Open(open)) => open,
        _ => return Err(invalid_field("message", "the first message must be `open`")),
    };
    let (attended, ticket) = gateway.admit(&open.ticket, TicketOperation::Read).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Read).await?;
    let manifest = attended.transfers.manifest(&ticket).await.map_err(ReadVolumeError::from)?;
    for part in rpc::tree::manifest_parts(&manifest) {
        answer(ReadAnswer::Manifest(part)).await?;
    }
    answer(ReadAnswer::ManifestEnd(rpc::tree::manifest_end(&manifest))).await?;

    let mut extents_requested = OrdinalRanges::new();
    loop {
        match next_message(&mut requests, DOWNLOAD_PAUSE).await?.message {
            Some(ReadMessage::Want(runs)) => rpc::tree::push_runs(&mut extents_requested, &runs)
                .map_err(|error| invalid_field("want.runs", error.to_string()))?,
            Some(ReadMessage::WantEnd(_)) => break,
            Some(ReadMessage::Open(_)) | None => {
                return Err(invalid_field("message", "must be `want` or `want_end`"));
            }
        }
    }
    if extents_requested.last().is_some_and(|last| last >= manifest.extent_count()) {
        return Err(invalid_field("want.runs", "names an extent that the manifest does not have"));
    }

    let (batches, mut ready) = mpsc::channel::<Vec<transfer::ExtentData>>(ANSWER_QUEUE);
    let reading = async {
        volume_read::read(&attended.transfers, ticket.volume, manifest, extents_requested, batches)
            .await
            .map_err(Status::from)
    };
    let sending = async {
        while let Some(batch) = ready.recv().await {
            let extents =
                batch.into_iter().map(|extent| pb::ExtentData { ordinal: extent.ordinal, data: extent.data });
            answer(ReadAnswer::Chunk(pb::Chunk { extents: extents.collect() })).await?;
        }
        Ok(())
    };
    tokio::try_join!(reading, sending)?;
    answer(ReadAnswer::Done(pb::ReadDone {})).await
}

pub(super) async fn read_file(
    transfers: Arc<Transfers>,
    ticket: TicketClaims,
    path: PathBuf,
    answers: Answers<pb::ReadFileResponse>,
) -> Result<(), Status> {
    // The manifest is checked first, so that bytes damaged by a machine crash are never read.
    let manifest = transfers.manifest(&ticket).await.map_err(ReadVolumeError::from)?;
    let (chunks, mut ready) = mpsc::channel(ANSWER_QUEUE);
    let reading = async {
        volume_read::read_file(&transfers, ticket.volume, manifest, path, chunks).await.map_err(Status::from)
    };
    let sending = async {
        let mut first = true;
        while let Some((size, data)) = ready.recv().await {
            let size_bytes = if std::mem::take(&mut first) { size } else { 0 };
            send(&answers, pb::ReadFileResponse { size_bytes, data }).await?;
        }
        Ok(())
    };
    tokio::try_join!(reading, sending).map(|_| ())
}
