//! Bytes between tasks and threads that block, bounded on the way.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use tokio::sync::mpsc;

/// Bytes of one message.
const CHUNK: usize = 256 << 10;

/// What comes from a task, for a thread that reads.
///
/// The task says when it is done: a sender that goes away before that is an error, not an end.
pub(crate) struct Inlet {
    pieces: mpsc::Receiver<Option<Bytes>>,
    current: Bytes,
    ended: bool,
}

impl Inlet {
    /// Reads what comes as `pieces`, of which `None` is the end.
    pub(crate) fn new(pieces: mpsc::Receiver<Option<Bytes>>) -> Self {
        Self { pieces, current: Bytes::new(), ended: false }
    }
}

impl Read for Inlet {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Some(piece)) => self.current = piece,
                Some(None) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = self.current.len().min(buffer.len());
        self.current.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

/// What a thread writes, for a task. What is not flushed is not sent.
pub(crate) struct Outlet {
    pieces: mpsc::Sender<Bytes>,
    buffer: BytesMut,
}

impl Outlet {
    /// Sends what is written as `pieces`.
    pub(crate) fn new(pieces: mpsc::Sender<Bytes>) -> Self {
        Self { pieces, buffer: BytesMut::new() }
    }
}

impl Write for Outlet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let gone = |_| io::ErrorKind::BrokenPipe.into();
        self.pieces.blocking_send(self.buffer.split().freeze()).map_err(gone)
    }
}
