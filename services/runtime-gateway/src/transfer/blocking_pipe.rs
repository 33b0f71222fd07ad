//! Bounded pipes between async tasks and blocking threads.

use std::io::{self, Read, Write};

use bytes::{Buf, Bytes, BytesMut};
use runtime::Archive;
use tokio::io::AsyncReadExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::io::StreamReader;
use transfer::{Manifest, Nameless};

/// Some bytes, or `None` for the end. If the sender is dropped before the end, the reader fails.
pub(crate) type Piece = Option<Bytes>;

/// Most bytes of one message.
const CHUNK: usize = 256 << 10;

/// The blocking reader of a pipe.
pub(crate) struct Inlet {
    pieces: mpsc::Receiver<Piece>,
    current: Bytes,
    ended: bool,
}

impl Inlet {
    /// Creates a reader of `pieces`.
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

/// The blocking writer of a pipe. The pipe is complete only after [`Outlet::end`].
pub(crate) struct Outlet {
    pieces: mpsc::Sender<Piece>,
    buffer: BytesMut,
}

impl Outlet {
    /// Creates a writer to `pieces`.
    pub(crate) fn new(pieces: mpsc::Sender<Piece>) -> Self {
        Self { pieces, buffer: BytesMut::new() }
    }

    /// Sends the remaining bytes and the end.
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

/// Converts `pieces` to an archive for a worker.
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

/// A blocking reader of an archive from a worker.
pub(crate) struct ArchiveSource {
    archive: Archive,
    runtime: Handle,
    /// Bytes that may still arrive.
    remaining: u64,
}

/// Most bytes of the headers of an archive entry without long names and attributes, with a margin.
const HEADERS: u64 = 16 << 10;
/// Most bytes of an archive besides its entries.
const PADDING: u64 = 1 << 20;

impl ArchiveSource {
    /// Creates a reader without a limit. It must be called in a Tokio runtime.
    pub(crate) fn new(archive: Archive) -> Self {
        Self { archive, runtime: Handle::current(), remaining: u64::MAX }
    }

    /// Creates a reader of an archive with the tree of `manifest`. A longer archive is rejected,
    /// because a few compressed KiB may expand without end.
    pub(crate) fn of(manifest: &Manifest, archive: Archive) -> Self {
        let entries = u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX);
        let headers =
            entries.saturating_mul(HEADERS).saturating_add(manifest.encoded_bytes().saturating_mul(4));
        let remaining = manifest.size_bytes().saturating_add(headers).saturating_add(PADDING);
        Self { remaining, ..Self::new(archive) }
    }
}

impl Read for ArchiveSource {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.runtime.block_on(self.archive.read(buffer))?;
        let remaining = self.remaining.checked_sub(length as u64);
        self.remaining = remaining.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "the archive is larger than its tree")
        })?;
        Ok(length)
    }
}

/// A reader that forwards what is read. Each piece is forwarded only with the next read, after the
/// caller has checked it.
///
/// Names of users and groups are removed, because another machine maps them to other ids.
pub(crate) struct Tee<R> {
    source: R,
    out: Nameless<Outlet>,
    pending: Vec<u8>,
}

impl<R> Tee<R> {
    /// Creates a reader of `source` that forwards to `out`.
    pub(crate) fn new(source: R, out: Outlet) -> Self {
        Self { source, out: Nameless::new(out), pending: Vec::new() }
    }

    /// Forwards the remaining bytes and the end.
    pub(crate) fn end(mut self) -> io::Result<()> {
        self.out.write_all(&self.pending)?;
        self.out.finish()?.end()
    }
}

impl<R: Read> Read for Tee<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.out.write_all(&self.pending)?;
        self.pending.clear();
        let length = self.source.read(buffer)?;
        self.pending.extend_from_slice(&buffer[..length]);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use transfer::{Entry, EntryKind, Limits};

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn archive_longer_than_its_tree_is_rejected() {
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
        let mut whole = ArchiveSource::of(&manifest, archive(PADDING));
        let mut endless = ArchiveSource::of(&manifest, archive(u64::MAX));
        let read = tokio::task::spawn_blocking(move || {
            let whole = io::copy(&mut whole, &mut io::sink()).expect("it is small enough");
            (whole, io::copy(&mut endless, &mut io::sink()).expect_err("it never ends").kind())
        });
        assert_eq!(read.await.expect("no panic"), (PADDING, io::ErrorKind::InvalidData));
    }
}
