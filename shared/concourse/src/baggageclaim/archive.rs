//! An archive that comes out of a volume.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};
use transfer::ArchiveEnd;

use super::encoding::{Decoder, Encoding};

/// Why an archive cannot be trusted. Comes inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The worker says, behind the archive, that it could not make all of it.
    #[error("the worker failed while it made the archive: {0}")]
    Failed(String),
    /// It breaks off.
    #[error("the archive is cut off")]
    Truncated,
    /// It is no archive of this encoding, or something follows it.
    #[error("the archive is broken: {0}")]
    Broken(String),
}

/// Reads the tar archive out of an encoded one, and answers an error at its end unless it was complete and the last there was.
///
/// What it reads is to be trusted only once it has said that it is at its end: do not stop at the blocks that end a tar archive. Decoding is done
/// where it is read, some tens of KiB at a time.
pub struct Archive<R> {
    source: R,
    decoder: Decoder,
    end: ArchiveEnd,
    state: State,
    buffer: Box<[u8]>,
    /// What of the buffer was not decoded yet.
    encoded: Range<usize>,
    /// Whether the decoder puts out nothing more before more is pushed.
    is_drained: bool,
    decoded: Vec<u8>,
    taken: usize,
    tail: Vec<u8>,
}

enum State {
    Reading,
    /// It is broken, but the reason may yet follow.
    Draining {
        error: ArchiveError,
        left: usize,
    },
    Ended,
}

/// How much of the end is looked at for a message.
const TAIL: usize = 4 * 1024;
const MOST_DRAINED: usize = 256 * 1024;

impl<R> Archive<R> {
    /// Reads `source`, which is in this encoding.
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

    /// Decodes some of what came; `at_end`: the end of the stream, once everything was decoded.
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

    /// What the worker wrote behind the archive, if that is why it is broken.
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
                    this.state = State::Draining { error, left: MOST_DRAINED };
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

    /// Zeroes, which are an archive without entries.
    const BYTES: u64 = 64 << 20;

    #[tokio::test]
    async fn small_archive_that_decodes_to_much_takes_little_memory() {
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
