//! Reader of an archive from a volume.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};
use transfer::ArchiveEnd;

use super::encoding::{Decoder, Encoding};

/// The reason why an archive is invalid. Wrapped in an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The worker reports, after the archive, that the archive is incomplete.
    #[error("the worker cannot create the archive: {0}")]
    Failed(String),
    /// The archive ends too early.
    #[error("the archive is truncated")]
    Truncated,
    /// The archive is not in this encoding, or is followed by other bytes.
    #[error("the archive is invalid: {0}")]
    Broken(String),
}

/// Decodes a compressed tar archive. Returns an error at its end unless the archive is complete and
/// no bytes follow it.
///
/// The decoded bytes are valid only once the reader has returned its end. A caller must not stop at
/// the blocks that end a tar archive. Decoding happens in the reading task, some tens of KiB at a
/// time.
pub struct Archive<R> {
    source: R,
    decoder: Decoder,
    end: ArchiveEnd,
    state: State,
    buffer: Box<[u8]>,
    /// The part of the buffer that is not decoded yet.
    encoded: Range<usize>,
    /// Whether the decoder needs more input for more output.
    is_drained: bool,
    decoded: Vec<u8>,
    taken: usize,
    tail: Vec<u8>,
}

enum State {
    Reading,
    /// The archive is invalid, and the message of the worker may follow.
    Draining {
        error: ArchiveError,
        left: usize,
    },
    Ended,
}

/// Size of the end of the stream that may hold a message, in bytes.
const TAIL: usize = 4 * 1024;
const MAX_DRAINED: usize = 256 * 1024;

impl<R> Archive<R> {
    /// Reads `source`, which has this encoding.
    pub fn new(encoding: Encoding, source: R) -> Self {
        Self {
            source,
            decoder: Decoder::new(encoding),
            end: ArchiveEnd::default(),
            state: State::Reading,
            buffer: vec![0; 64 * 1024].into(),
            encoded: 0..0,
            is_drained: true,
            decoded: Vec::new(),
            taken: 0,
            tail: Vec::new(),
        }
    }

    fn keep_tail(&mut self, size: usize) {
        self.tail.extend_from_slice(&self.buffer[size.saturating_sub(TAIL)..size]);
        let surplus = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..surplus);
    }

    /// Decodes a part of the input. `at_end`: the input has ended.
    fn decode(&mut self, at_end: bool) -> Result<(), ArchiveError> {
        let broken = |error: io::Error| ArchiveError::Broken(error.to_string());
        self.decoded.clear();
        self.taken = 0;
        let finished = if !at_end {
            let pushed = self.decoder.push(&self.buffer[self.encoded.clone()], &mut self.decoded);
            pushed.map_err(broken).map(|pushed| {
                self.encoded.start += pushed.taken;
                self.is_drained = pushed.is_drained;
            })
        } else {
            self.decoder.finish(&mut self.decoded).map_err(|_| ArchiveError::Truncated)
        };
        let checked = finished.and_then(|()| {
            self.end.push(&self.decoded).map_err(|error| ArchiveError::Broken(error.to_string()))?;
            if at_end && !self.end.is_there() { Err(ArchiveError::Truncated) } else { Ok(()) }
        });
        if checked.is_err() {
            self.decoded.clear();
            (self.encoded, self.is_drained) = (0..0, true);
        }
        checked
    }

    /// Replaces `error` with the message of the worker after the archive, if there is one.
    fn explain(&self, error: ArchiveError) -> io::Error {
        #[derive(serde::Deserialize)]
        struct Message {
            error: String,
        }
        let start = self.tail.windows(9).rposition(|window| window == b"{\"error\":");
        let message = start.and_then(|start| serde_json::from_slice::<Message>(&self.tail[start..]).ok());
        io::Error::other(message.map(|message| ArchiveError::Failed(message.error)).unwrap_or(error))
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Archive<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.taken < this.decoded.len() {
                let size = (this.decoded.len() - this.taken).min(buf.remaining());
                buf.put_slice(&this.decoded[this.taken..this.taken + size]);
                this.taken += size;
                return Poll::Ready(Ok(()));
            }
            if matches!(this.state, State::Ended) {
                return Poll::Ready(Ok(()));
            }
            if !this.encoded.is_empty() || !this.is_drained {
                if let Err(error) = this.decode(false) {
                    this.state = State::Draining { error, left: MAX_DRAINED };
                }
                continue;
            }
            let mut incoming = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.source).poll_read(cx, &mut incoming))?;
            let size = incoming.filled().len();
            this.keep_tail(size);
            this.state = match std::mem::replace(&mut this.state, State::Ended) {
                State::Draining { error, left } if size == 0 || left <= size => {
                    return Poll::Ready(Err(this.explain(error)));
                }
                State::Draining { error, left } => State::Draining { error, left: left - size },
                State::Reading | State::Ended if size == 0 => match this.decode(true) {
                    Ok(()) => State::Ended,
                    Err(error) => return Poll::Ready(Err(this.explain(error))),
                },
                State::Reading | State::Ended => {
                    (this.encoded, this.is_drained) = (0..size, false);
                    State::Reading
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::baggageclaim::encoding::Encoded;

    /// Size of the test archive, in bytes. It consists of zeros, which are an archive without
    /// entries.
    const BYTES: u64 = 64 << 20;

    #[tokio::test]
    async fn small_archive_bomb_takes_little_memory() {
        for encoding in Encoding::ALL {
            let mut encoded = Vec::new();
            let zeroes = tokio::io::repeat(0).take(BYTES);
            Encoded::new(encoding, zeroes)
                .expect("an encoder")
                .read_to_end(&mut encoded)
                .await
                .expect("encoded");
            let mut archive = Archive::new(encoding, &encoded[..]);
            let (mut bytes, mut buffer) = (0, vec![0; 64 << 10]);
            loop {
                let read = archive.read(&mut buffer).await.expect("it is whole");
                bytes += read as u64;
                let held = archive.decoded.capacity();
                assert!(held <= 16 << 20, "{encoding:?}: {held} bytes of {} encoded", encoded.len());
                if read == 0 {
                    break;
                }
            }
            assert_eq!(bytes, BYTES, "{encoding:?}");
        }
    }
}
