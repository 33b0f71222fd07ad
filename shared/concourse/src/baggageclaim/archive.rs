//! An archive that comes out of a volume.

use std::io;
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

    fn decode(&mut self, size: usize) -> Result<(), ArchiveError> {
        let broken = |error: io::Error| ArchiveError::Broken(error.to_string());
        self.decoded.clear();
        self.taken = 0;
        let finished = if size > 0 {
            self.decoder.push(&self.buffer[..size], &mut self.decoded).map_err(broken)
        } else {
            self.decoder.finish(&mut self.decoded).map_err(|_| ArchiveError::Truncated)
        };
        let checked = finished.and_then(|()| {
            self.end.push(&self.decoded).map_err(|error| ArchiveError::Broken(error.to_string()))?;
            if size == 0 && !self.end.is_there() { Err(ArchiveError::Truncated) } else { Ok(()) }
        });
        if checked.is_err() {
            self.decoded.clear();
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
            let mut incoming = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.source).poll_read(cx, &mut incoming))?;
            let size = incoming.filled().len();
            this.keep_tail(size);
            this.state = match std::mem::replace(&mut this.state, State::Ended) {
                State::Draining { error, left } if size == 0 || left <= size => {
                    return Poll::Ready(Err(this.explain(error)));
                }
                State::Draining { error, left } => State::Draining { error, left: left - size },
                State::Reading | State::Ended => match this.decode(size) {
                    Ok(()) if size == 0 => State::Ended,
                    Ok(()) => State::Reading,
                    Err(error) if size == 0 => return Poll::Ready(Err(this.explain(error))),
                    Err(error) => State::Draining { error, left: MOST_DRAINED },
                },
            };
        }
    }
}
