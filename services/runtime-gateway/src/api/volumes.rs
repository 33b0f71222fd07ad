//! The calls that write and read a volume as a tree.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::worker::{TicketClaims, TicketOperation};
use domain::{Digest, error_chain};
use futures::{Stream, StreamExt};
use rpc::compression::{self, Packer, RawOrZstd, SentBytes};
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
use crate::util::blocking::blocking;
use crate::util::transferred::{self, Direction};
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
    let WriteMessage::Open(open) = next(&mut requests).await? else {
        return Err(invalid_field("message", "the first message must be `open`"));
    };
    let (attended, ticket) = gateway.admit(&open.ticket, TicketOperation::Write).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Write).await?;
    let manifest = receive_manifest(&mut requests).await?;

    let mut filling = VolumeWriter::begin(&attended.transfers, ticket, Arc::new(manifest)).await?;
    if let Err(failed) = receive_extents(&attended.transfers, &mut filling, &mut requests, &answers).await {
        // The caller may write again, and a volume has one writer at a time.
        filling.abandon().await;
        return Err(failed);
    }
    let manifest = filling.commit(&attended.transfers).await?;
    let digest = manifest.tree_digest().as_bytes().to_vec().into();
    let committed = pb::Committed { digest, size_bytes: manifest.size_bytes() };
    answer_write(&answers, WriteAnswer::Committed(committed)).await
}

/// Says what a volume lacks, and writes the extents that the caller sends, up to its `commit`.
async fn receive_extents(
    transfers: &Transfers,
    filling: &mut VolumeWriter,
    requests: &mut Streaming<pb::WriteRequest>,
    answers: &Answers<pb::WriteResponse>,
) -> Result<(), Status> {
    for runs in rpc::tree::runs(&filling.missing) {
        answer_write(answers, WriteAnswer::Missing(runs)).await?;
    }
    answer_write(answers, WriteAnswer::MissingEnd(pb::ExtentRunsEnd { bytes: filling.missing_bytes() }))
        .await?;

    let mut bytes = 0;
    loop {
        let (chunk, wire) = match next(requests).await? {
            WriteMessage::Chunk(chunk) => (chunk, None),
            WriteMessage::ZstdChunk(frame) => {
                let wire = length(&frame);
                (decode::<pb::Chunk>("zstd_chunk", frame).await?, Some(wire))
            }
            WriteMessage::Commit(_) => return Ok(()),
            _ => return Err(invalid_field("message", "only `chunk` and `commit` may follow the manifest")),
        };
        let content: u64 = chunk.extents.iter().map(|extent| length(&extent.data)).sum();
        if content == 0 {
            return Err(invalid_field("chunk", "must have content"));
        }
        transferred::record(Direction::In, content, wire.unwrap_or(content));
        bytes += content;
        let extents = chunk.extents.into_iter().map(|extent| (extent.ordinal, extent.data)).collect();
        filling.put(transfers, extents).await?;
        // Progress is only informative, so it is dropped if the caller does not read it.
        let progress = WriteAnswer::Progress(pb::WriteProgress { bytes });
        answers.try_send(Ok(pb::WriteResponse { message: Some(progress) })).ok();
    }
}

async fn answer_write(answers: &Answers<pb::WriteResponse>, message: WriteAnswer) -> Result<(), Status> {
    let sent = send(answers, pb::WriteResponse { message: Some(message) });
    tokio::time::timeout(UPLOAD_PAUSE, sent).await.map_err(|_| paused("took", UPLOAD_PAUSE))?
}

pub(super) async fn next(
    requests: &mut (impl Stream<Item = Result<pb::WriteRequest, Status>> + Unpin),
) -> Result<WriteMessage, Status> {
    rpc::required("message", next_message(requests, UPLOAD_PAUSE).await?.message)
}

/// Decodes a compressed message in the field `field`.
async fn decode<M: rpc::Message + Default + 'static>(field: &str, frame: Bytes) -> Result<M, Status> {
    compression::decode(frame).await.map_err(|error| invalid_field(field, error_chain(&error)))
}

pub(super) async fn receive_manifest(
    requests: &mut (impl Stream<Item = Result<pb::WriteRequest, Status>> + Unpin),
) -> Result<Manifest, Status> {
    let mut builder = ManifestBuilder::new(Limits::of_process());
    let invalid = |error| rpc::tree::invalid_manifest(SERVICE, &error);
    let end = loop {
        let part = match next(requests).await? {
            WriteMessage::Manifest(part) => part,
            WriteMessage::ZstdManifest(frame) => decode("zstd_manifest", frame).await?,
            WriteMessage::ManifestEnd(end) => break end,
            _ => return Err(invalid_field("message", "the whole manifest must come first")),
        };
        rpc::tree::push_part(&mut builder, &part).map_err(invalid)?;
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
    let growing = attended.transfers.find_growing(ticket.volume);
    let manifest = match &growing {
        Some(growing) => growing.manifest.clone(),
        None => attended.transfers.read_manifest(&ticket).await?,
    };
    for part in rpc::tree::manifest_parts(&manifest) {
        let part = if open.accept_zstd {
            blocking(move || Ok::<_, ReadVolumeError>(compression::pack_part(part))).await?
        } else {
            RawOrZstd::Raw(part)
        };
        answer(part.into()).await?;
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

    let (chunks, mut ready) = mpsc::channel(ANSWER_QUEUE);
    let mut packer = Packer::new(open.accept_zstd);
    let put = move |extents| {
        let sent = packer.send(&chunks, rpc::tree::chunk(extents), ReadAnswer::from);
        if let Some(SentBytes { content, wire }) = sent {
            transferred::record(Direction::Out, content, wire);
        }
        sent.is_some()
    };
    let reading = async {
        let read = match growing {
            Some(growing) => growing.read(extents_requested, put).await,
            None => {
                let (transfers, volume) = (&attended.transfers, ticket.volume);
                volume_read::read(transfers, volume, manifest, extents_requested, put).await
            }
        };
        read.map_err(Status::from)
    };
    let sending = async {
        while let Some(chunk) = ready.recv().await {
            answer(chunk).await?;
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
    let manifest = transfers.read_manifest(&ticket).await?;
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

#[cfg(test)]
mod tests;
