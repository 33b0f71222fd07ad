//! Compressed messages of transfers, and the choice between raw and compressed ones.
//!
//! The gateways and the command line use it. A sender compresses only if its receiver accepts that,
//! and only if the link between them is slower than compression: see [`choice`]. A compressed
//! message is the encoded raw message as one zstd frame.
//!
//! Invariant: a receiver allocates no more for a compressed message than a raw one may have. Each
//! frame states its content size, which is checked first.

mod choice;

use std::ops::AddAssign;
use std::time::Instant;

use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::get_frame_content_size;

use crate::pb::runtime::{Chunk, ManifestPart, read_response, write_request};
use choice::Choice;

/// Metadata of a response of `Volumes.Write` that accepts compressed messages.
pub const ACCEPT_HEADER: &str = "gantry-accept-zstd";

/// Level of zstd: the fastest one of those that shrink text to a third.
const LEVEL: i32 = 1;
/// Bytes below which a message is not compressed. It fits into a few packets.
const MIN_BYTES: usize = 4 << 10;
/// Most bytes of the content of a frame: as many as a raw message may have.
const MAX_BYTES: u64 = 4 << 20;

/// A message that is ready to be sent.
#[derive(Debug, Clone, PartialEq)]
pub enum RawOrZstd<M> {
    /// The message itself.
    Raw(M),
    /// The message as a zstd frame.
    Zstd(Bytes),
}

impl From<RawOrZstd<Chunk>> for write_request::Message {
    fn from(packed: RawOrZstd<Chunk>) -> Self {
        match packed {
            RawOrZstd::Raw(chunk) => Self::Chunk(chunk),
            RawOrZstd::Zstd(frame) => Self::ZstdChunk(frame),
        }
    }
}

impl From<RawOrZstd<ManifestPart>> for write_request::Message {
    fn from(packed: RawOrZstd<ManifestPart>) -> Self {
        match packed {
            RawOrZstd::Raw(part) => Self::Manifest(part),
            RawOrZstd::Zstd(frame) => Self::ZstdManifest(frame),
        }
    }
}

impl From<RawOrZstd<Chunk>> for read_response::Message {
    fn from(packed: RawOrZstd<Chunk>) -> Self {
        match packed {
            RawOrZstd::Raw(chunk) => Self::Chunk(chunk),
            RawOrZstd::Zstd(frame) => Self::ZstdChunk(frame),
        }
    }
}

impl From<RawOrZstd<ManifestPart>> for read_response::Message {
    fn from(packed: RawOrZstd<ManifestPart>) -> Self {
        match packed {
            RawOrZstd::Raw(part) => Self::Manifest(part),
            RawOrZstd::Zstd(frame) => Self::ZstdManifest(frame),
        }
    }
}

/// A compressed message is malformed.
#[derive(Debug, thiserror::Error)]
pub enum InvalidFrame {
    /// The bytes are not a zstd frame that states its content size.
    #[error("the message is not a zstd frame that states its content size")]
    Header,
    /// The content is larger than a message may be.
    #[error("the zstd frame has more than {MAX_BYTES} bytes of content")]
    TooLarge,
    /// The frame is damaged, or has another content size than it states.
    #[error("the zstd frame is damaged")]
    Content,
    /// The content is not an encoded message.
    #[error("the zstd frame does not contain a message of its type")]
    Message(#[from] prost::DecodeError),
}

/// Decodes a compressed message on a blocking thread.
///
/// # Errors
///
/// The frame is malformed, or its content is not an encoded `M`.
pub async fn decode<M: Message + Default + 'static>(frame: Bytes) -> Result<M, InvalidFrame> {
    let decoded = tokio::task::spawn_blocking(move || decode_now(&frame)).await;
    decoded.unwrap_or(Err(InvalidFrame::Content))
}

fn decode_now<M: Message + Default>(frame: &[u8]) -> Result<M, InvalidFrame> {
    let size = get_frame_content_size(frame).ok().flatten().ok_or(InvalidFrame::Header)?;
    let size = Some(size).filter(|size| *size <= MAX_BYTES).ok_or(InvalidFrame::TooLarge)?;
    let capacity = usize::try_from(size).map_err(|_| InvalidFrame::TooLarge)?;
    // More content than stated does not fit, and is an error.
    let content = Decompressor::new().and_then(|mut zstd| zstd.decompress(frame, capacity));
    Ok(M::decode(Bytes::from(content.map_err(|_| InvalidFrame::Content)?))?)
}

/// Compresses a part of a manifest if that shrinks it. Blocks for some milliseconds.
///
/// It does not depend on the link, which is not measured before a manifest is sent.
#[must_use]
pub fn pack_part(part: ManifestPart) -> RawOrZstd<ManifestPart> {
    let frame = Compressor::new(LEVEL).ok().and_then(|mut zstd| compress(&mut zstd, &part));
    frame.map_or(RawOrZstd::Raw(part), RawOrZstd::Zstd)
}

/// Compresses a message. `None`: it does not shrink to 90 %, or is too small.
fn compress(zstd: &mut Compressor<'_>, message: &impl Message) -> Option<Bytes> {
    let plain = message.encode_to_vec();
    if plain.len() < MIN_BYTES {
        return None;
    }
    // A larger frame does not fit, and is an error.
    let mut frame = Vec::with_capacity(plain.len() / 10 * 9);
    zstd.compress_to_buffer(&plain, &mut frame).ok()?;
    Some(frame.into())
}

/// Sizes of contents that were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SentBytes {
    /// Size in bytes.
    pub content: u64,
    /// Bytes that were sent: fewer than [`Self::content`] if some were compressed.
    pub wire: u64,
}

impl AddAssign for SentBytes {
    fn add_assign(&mut self, other: Self) {
        self.content += other.content;
        self.wire += other.wire;
    }
}

/// Sender of the content of one transfer, which compresses if the link is slow. Blocks.
pub struct Packer {
    /// `None`: the receiver accepts no compressed messages.
    compressing: Option<(Compressor<'static>, Choice)>,
    last_sent: Instant,
}

impl Packer {
    /// Creates a sender. Without `may_compress`, all messages are raw.
    #[must_use]
    pub fn new(may_compress: bool) -> Self {
        let zstd = may_compress.then(|| Compressor::new(LEVEL).ok()).flatten();
        Self { compressing: zstd.map(|zstd| (zstd, Choice::new())), last_sent: Instant::now() }
    }

    /// Adds a chunk to `queue`, and waits while it is full. `wrap` makes the message. `None`: the
    /// receiver is gone.
    pub fn send<T>(
        &mut self,
        queue: &mpsc::Sender<T>,
        chunk: Chunk,
        wrap: impl FnOnce(RawOrZstd<Chunk>) -> T,
    ) -> Option<SentBytes> {
        let content: usize = chunk.extents.iter().map(|extent| extent.data.len()).sum();
        let packed = self.pack(chunk, content);
        let wire = match &packed {
            RawOrZstd::Raw(_) => content,
            RawOrZstd::Zstd(frame) => frame.len(),
        };
        let was_full = match queue.try_send(wrap(packed)) {
            Ok(()) => false,
            Err(TrySendError::Full(message)) => {
                queue.blocking_send(message).ok()?;
                true
            }
            Err(TrySendError::Closed(_)) => return None,
        };
        let now = Instant::now();
        if let Some((_, choice)) = &mut self.compressing {
            choice.record_sent(wire, now - self.last_sent, queue.max_capacity(), was_full);
        }
        self.last_sent = now;
        Some(SentBytes { content: content as u64, wire: wire as u64 })
    }

    fn pack(&mut self, chunk: Chunk, content: usize) -> RawOrZstd<Chunk> {
        let Some((zstd, choice)) = &mut self.compressing else { return RawOrZstd::Raw(chunk) };
        if content < MIN_BYTES || !choice.compresses_next() {
            return RawOrZstd::Raw(chunk);
        }
        let begin = Instant::now();
        let frame = compress(zstd, &chunk);
        choice.record_compression(content, begin.elapsed(), frame.is_some());
        frame.map_or(RawOrZstd::Raw(chunk), RawOrZstd::Zstd)
    }
}

#[cfg(test)]
mod tests;
