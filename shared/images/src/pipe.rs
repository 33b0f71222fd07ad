//! A pipe from an asynchronous source of bytes to a reader in another thread.

use std::io::{self, Read};

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;

/// Most pieces that wait for the reader.
const QUEUE: usize = 16;

/// The end that is read in another thread. Reading ends with an error if the other end is dropped
/// without [`Inlet::end`].
pub(crate) struct Outlet {
    pieces: mpsc::Receiver<Bytes>,
    rest: Bytes,
    ended: bool,
}

/// The end that receives the bytes.
pub(crate) struct Inlet(mpsc::Sender<Bytes>);

/// Creates a pipe.
pub(crate) fn pipe() -> (Inlet, Outlet) {
    let (sender, pieces) = mpsc::channel(QUEUE);
    (Inlet(sender), Outlet { pieces, rest: Bytes::new(), ended: false })
}

impl Inlet {
    /// Sends bytes. Returns `false` if the reader is gone.
    pub(crate) async fn send(&self, bytes: Bytes) -> bool {
        bytes.is_empty() || self.0.send(bytes).await.is_ok()
    }

    /// Ends the bytes.
    pub(crate) async fn end(self) {
        // If sending fails, the reader has ended before.
        _ = self.0.send(Bytes::new()).await;
    }
}

impl Read for Outlet {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(piece) => {
                    self.rest = piece;
                    self.ended = self.rest.is_empty();
                }
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = buffer.len().min(self.rest.len());
        buffer[..length].copy_from_slice(&self.rest[..length]);
        self.rest.advance(length);
        Ok(length)
    }
}
