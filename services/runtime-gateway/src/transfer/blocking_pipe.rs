//! Bytes between tasks and threads that block, bounded on the way.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use runtime::Archive;
use tokio::io::AsyncReadExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::io::StreamReader;
use transfer::{Manifest, Nameless};

/// Bytes, or the end. A sender that goes away before the end is an error to who reads.
pub(crate) type Piece = Option<Bytes>;

/// Bytes of one message.
const CHUNK: usize = 256 << 10;

/// What comes from a task, for a thread that reads.
pub(crate) struct Inlet {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    ended: bool,
}

impl Inlet {
    /// Reads what comes as `pieces`.
    pub(crate) fn new(pieces: mpsc::Receiver<Piece>) -> Self {
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

/// What a thread writes, for a task. It is whole only after [`Outlet::end`].
pub(crate) struct Outlet {
    pieces: mpsc::Sender<Piece>,
    buffer: BytesMut,
}

impl Outlet {
    /// Sends what is written as `pieces`.
    pub(crate) fn new(pieces: mpsc::Sender<Piece>) -> Self {
        Self { pieces, buffer: BytesMut::new() }
    }

    /// Sends what is left, and the end.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.flush()?;
        self.pieces.blocking_send(None).map_err(|_| io::ErrorKind::BrokenPipe.into())
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
        self.pieces.blocking_send(Some(self.buffer.split().freeze())).map_err(gone)
    }
}

/// What comes as `pieces`, as an archive for a worker.
pub(crate) fn archive(pieces: mpsc::Receiver<Piece>) -> Archive {
    let stream = futures::stream::unfold(Some(pieces), async |pieces| {
        let mut pieces = pieces?;
        match pieces.recv().await {
            Some(Some(piece)) => Some((Ok(piece), Some(pieces))),
            Some(None) => None,
            None => Some((Err(io::Error::from(io::ErrorKind::ConnectionAborted)), None)),
        }
    });
    Box::pin(StreamReader::new(Box::pin(stream)))
}

/// An archive of a worker, for a thread that reads.
pub(crate) struct Arriving {
    archive: Archive,
    runtime: Handle,
    /// Bytes that may still come.
    left: u64,
}

/// Bytes of headers, in an archive, of an entry without long names and attributes; and more than that.
const HEADERS: u64 = 16 << 10;
/// Bytes that an archive may have besides its entries.
const PADDING: u64 = 1 << 20;

impl Arriving {
    /// Reads `archive`, of which nothing is known. Called where tasks run.
    pub(crate) fn new(archive: Archive) -> Self {
        Self { archive, runtime: Handle::current(), left: u64::MAX }
    }

    /// Reads `archive`, which is one of this tree. A few KiB may decode to more than anybody ever reads, so a longer one is refused.
    pub(crate) fn of(manifest: &Manifest, archive: Archive) -> Self {
        let entries = u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX);
        let headers =
            entries.saturating_mul(HEADERS).saturating_add(manifest.encoded_bytes().saturating_mul(4));
        let left = manifest.size_bytes().saturating_add(headers).saturating_add(PADDING);
        Self { left, ..Self::new(archive) }
    }
}

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.runtime.block_on(self.archive.read(buffer))?;
        let left = self.left.checked_sub(length as u64);
        self.left = left.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "the archive is larger than one of its tree can be")
        })?;
        Ok(length)
    }
}

/// Passes on what is read through it, each piece only when the next is asked for: by then whoever reads has judged it. Names of users and
/// groups stay behind: another machine would take them for its own.
pub(crate) struct Tee<R> {
    source: R,
    out: Nameless<Outlet>,
    held: Vec<u8>,
}

impl<R> Tee<R> {
    /// Passes what `source` yields on to `out`.
    pub(crate) fn new(source: R, out: Outlet) -> Self {
        Self { source, out: Nameless::new(out), held: Vec::new() }
    }

    /// Passes on what is left, and the end.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.out.write_all(&self.held)?;
        self.out.finish()?.end()
    }
}

impl<R: Read> Read for Tee<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.out.write_all(&self.held)?;
        self.held.clear();
        let length = self.source.read(buffer)?;
        self.held.extend_from_slice(&buffer[..length]);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use transfer::{Entry, EntryKind, Limits};

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn archive_longer_than_its_tree_is_refused() {
        let root = Entry {
            path: Vec::new(),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind: EntryKind::Directory,
        };
        let manifest = Manifest::new([root], Limits::default()).expect("valid");
        let archive = |bytes| -> Archive { Box::pin(tokio::io::repeat(0).take(bytes)) };
        let mut whole = Arriving::of(&manifest, archive(PADDING));
        let mut endless = Arriving::of(&manifest, archive(u64::MAX));
        let read = tokio::task::spawn_blocking(move || {
            let whole = io::copy(&mut whole, &mut io::sink()).expect("it is small enough");
            (whole, io::copy(&mut endless, &mut io::sink()).expect_err("it never ends").kind())
        });
        assert_eq!(read.await.expect("no panic"), (PADDING, io::ErrorKind::InvalidData));
    }
}
