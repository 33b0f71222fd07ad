//! Compression of archives in transit.

use std::io::{self, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};
use zstd::stream::raw::Operation;

/// The compression of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// No compression. Supported since worker version 7.10.
    Raw,
    /// gzip, which every worker supports.
    Gzip,
    /// zstd, much faster than gzip.
    Zstd,
    /// S2, faster than zstd. Supported since worker version 8.0.
    S2,
}

impl Encoding {
    /// All encodings.
    pub const ALL: [Self; 4] = [Self::Raw, Self::Gzip, Self::Zstd, Self::S2];

    /// The name in the protocol.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::S2 => "s2",
        }
    }
}

/// The name of an unknown encoding.
#[derive(Debug, thiserror::Error)]
#[error("unknown encoding {0:?}: use `raw`, `gzip`, `zstd` or `s2`")]
pub struct UnknownEncoding(String);

impl std::str::FromStr for Encoding {
    type Err = UnknownEncoding;

    fn from_str(word: &str) -> Result<Self, UnknownEncoding> {
        let known = Self::ALL.into_iter().find(|encoding| encoding.as_str() == word);
        known.ok_or_else(|| UnknownEncoding(word.to_owned()))
    }
}

/// Encodes the plain tar archive of `R`.
pub struct Encoded<R> {
    source: R,
    /// `None` once the end has been written.
    encoder: Option<Encoder>,
    buffer: Box<[u8]>,
    encoded: Vec<u8>,
    taken: usize,
}

enum Encoder {
    Raw(Vec<u8>),
    Gzip(flate2::write::GzEncoder<Vec<u8>>),
    Zstd(zstd::stream::write::Encoder<'static, Vec<u8>>),
    S2(minlz::Writer<Vec<u8>>),
}

impl<R> Encoded<R> {
    /// Encodes `source`.
    pub fn new(encoding: Encoding, source: R) -> io::Result<Self> {
        let encoder = match encoding {
            Encoding::Raw => Encoder::Raw(Vec::new()),
            Encoding::Gzip => {
                Encoder::Gzip(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()))
            }
            Encoding::Zstd => Encoder::Zstd(zstd::stream::write::Encoder::new(Vec::new(), 0)?),
            Encoding::S2 => Encoder::S2(minlz::Writer::new(Vec::new())),
        };
        let buffer = vec![0; 64 * 1024].into();
        Ok(Self { source, encoder: Some(encoder), buffer, encoded: Vec::new(), taken: 0 })
    }
}

impl Encoder {
    fn push(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Raw(out) => out.write_all(bytes)?,
            Self::Gzip(encoder) => encoder.write_all(bytes)?,
            Self::Zstd(encoder) => encoder.write_all(bytes)?,
            Self::S2(encoder) => encoder.write_all(bytes)?,
        }
        Ok(std::mem::take(match self {
            Self::Raw(out) => out,
            Self::Gzip(encoder) => encoder.get_mut(),
            Self::Zstd(encoder) => encoder.get_mut(),
            Self::S2(encoder) => encoder.get_mut(),
        }))
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Raw(out) => Ok(out),
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
            Self::S2(mut encoder) => {
                encoder.flush()?;
                Ok(std::mem::take(encoder.get_mut()))
            }
        }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Encoded<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.taken < this.encoded.len() {
                let size = (this.encoded.len() - this.taken).min(buf.remaining());
                buf.put_slice(&this.encoded[this.taken..this.taken + size]);
                this.taken += size;
                return Poll::Ready(Ok(()));
            }
            let Some(encoder) = &mut this.encoder else { return Poll::Ready(Ok(())) };
            let mut incoming = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.source).poll_read(cx, &mut incoming))?;
            this.taken = 0;
            this.encoded = match incoming.filled() {
                [] => this.encoder.take().map(Encoder::finish).transpose()?.unwrap_or_default(),
                bytes => encoder.push(bytes)?,
            };
        }
    }
}

/// Decoded bytes after which a decoder waits for its reader. One step adds at most one block.
///
/// A few KiB can decode to GiB, so a limit of the input is not enough.
const MAX_DECODED: usize = 1 << 20;

/// Largest window of zstd, as a power of two: 32 MiB, which is the maximum of the encoders of
/// workers.
const ZSTD_WINDOW_LOG: u32 = 25;

/// The result of one decoding step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecodeProgress {
    /// Bytes of input that were consumed.
    pub(super) taken: usize,
    /// Whether the decoder needs more input for more output.
    pub(super) is_drained: bool,
}

/// Decodes the input, and rejects bytes after the end of the stream.
///
/// Invariant: one call produces at most [`MAX_DECODED`] bytes and one block, for any input.
pub(super) enum Decoder {
    Raw,
    Gzip(Box<flate2::write::GzDecoder<Vec<u8>>>),
    Zstd { decoder: Option<zstd::stream::raw::Decoder<'static>>, ended: bool },
    S2 { begun: bool, pending: Vec<u8> },
}

/// The largest block of S2 with the maximum overhead of incompressible data, in bytes.
const S2_BLOCK: usize = 4 << 20;
const S2_CHUNK: usize = S2_BLOCK + S2_BLOCK / 6 + 64;

fn broken(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl Decoder {
    pub(super) fn new(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Raw => Self::Raw,
            Encoding::Gzip => Self::Gzip(Box::new(flate2::write::GzDecoder::new(Vec::new()))),
            Encoding::Zstd => Self::Zstd { decoder: zstd_decoder().ok(), ended: false },
            Encoding::S2 => Self::S2 { begun: false, pending: Vec::new() },
        }
    }

    /// Decodes a part of `bytes`. The caller must call again with the rest, even if the rest is
    /// empty, until the decoder is drained.
    pub(super) fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> io::Result<DecodeProgress> {
        let all = bytes.len();
        let mut bytes = bytes;
        let pushed = |rest: &[u8], is_drained| Ok(DecodeProgress { taken: all - rest.len(), is_drained });
        match self {
            Self::Raw => {
                out.extend_from_slice(bytes);
                pushed(&[], true)
            }
            Self::Gzip(decoder) => {
                while !bytes.is_empty() && out.len() < MAX_DECODED {
                    let taken = decoder.write(bytes)?;
                    if taken == 0 {
                        return Err(broken("extra bytes follow the end of the gzip stream"));
                    }
                    bytes = &bytes[taken..];
                    out.append(decoder.get_mut());
                }
                pushed(bytes, bytes.is_empty())
            }
            Self::Zstd { decoder, ended } => {
                let decoder = decoder.as_mut().ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
                let mut piece = vec![0; 128 * 1024];
                loop {
                    if *ended {
                        let trailing = Err(broken("extra bytes follow the end of the zstd stream"));
                        return if bytes.is_empty() { pushed(bytes, true) } else { trailing };
                    }
                    if out.len() >= MAX_DECODED {
                        return pushed(bytes, false);
                    }
                    let step = decoder.run_on_buffers(bytes, &mut piece)?;
                    bytes = &bytes[step.bytes_read..];
                    out.extend_from_slice(&piece[..step.bytes_written]);
                    *ended = step.remaining == 0;
                    if bytes.is_empty() && step.bytes_written < piece.len() {
                        return pushed(bytes, true);
                    }
                }
            }
            Self::S2 { begun, pending } => {
                pending.extend_from_slice(bytes);
                let (mut read, mut is_drained) = (0, true);
                while let [kind, a, b, c, rest @ ..] = &pending[read..] {
                    if out.len() >= MAX_DECODED {
                        is_drained = false;
                        break;
                    }
                    let size = u32::from_le_bytes([*a, *b, *c, 0]) as usize;
                    if *kind < 0x80 && (*kind > 1 || size > S2_CHUNK) {
                        return Err(broken("not a chunk of S2"));
                    }
                    let Some(chunk) = rest.get(..size) else { break };
                    if *begun != (*kind != 0xff) && !*begun {
                        return Err(broken("not a stream of S2"));
                    }
                    match kind {
                        0xff if chunk != b"S2sTwO" && chunk != b"sNaPpY" => {
                            return Err(broken("not a stream of S2"));
                        }
                        0xff => *begun = true,
                        0 | 1 => s2_block(*kind == 0, chunk, out)?,
                        _ => {} // Padding, an index, or another skippable chunk.
                    }
                    read += 4 + size;
                }
                pending.drain(..read);
                pushed(&[], is_drained)
            }
        }
    }

    pub(super) fn finish(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        let complete = match self {
            Self::Raw => true,
            Self::Gzip(decoder) => {
                decoder.try_finish()?;
                out.append(decoder.get_mut());
                true
            }
            Self::Zstd { ended, .. } => *ended,
            Self::S2 { begun, pending } => *begun && pending.is_empty(),
        };
        if complete { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

fn zstd_decoder() -> io::Result<zstd::stream::raw::Decoder<'static>> {
    let mut decoder = zstd::stream::raw::Decoder::new()?;
    decoder.set_parameter(zstd::stream::raw::DParameter::WindowLogMax(ZSTD_WINDOW_LOG))?;
    Ok(decoder)
}

fn s2_block(compressed: bool, chunk: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    let (sum, block) = chunk.split_first_chunk::<4>().ok_or_else(|| broken("a chunk of S2 without a sum"))?;
    let start = out.len();
    if compressed {
        let (size, _) = minlz::decode_len(block).map_err(|_| broken("a block of S2 without a size"))?;
        if size > S2_BLOCK {
            return Err(broken("a block of S2 that is too large"));
        }
        out.append(&mut minlz::decode(block).map_err(|_| broken("a block of S2 that is damaged"))?);
    } else {
        out.extend_from_slice(block);
    }
    if minlz::crc::crc(&out[start..]) != u32::from_le_bytes(*sum) {
        return Err(broken("a block of S2 with a wrong sum"));
    }
    Ok(())
}
