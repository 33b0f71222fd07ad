//! Forwarding of archives without the names of users and groups.

use std::io::{self, Write};

use super::end::ArchiveEnd;

/// A writer that forwards an archive without the names of users and groups.
///
/// GNU tar as root prefers names of existing users and groups over numbers. Without names, it uses
/// the numbers, which are all that a manifest contains.
///
/// The writer forwards a block when the block is complete, and records when all of them have
/// arrived.
#[derive(Debug)]
pub struct Nameless<W> {
    archive: ArchiveEnd,
    out: W,
    passed: Vec<u8>,
}

impl<W: Write> Nameless<W> {
    /// Creates a writer that forwards to `out`.
    pub fn new(out: W) -> Self {
        Self { archive: ArchiveEnd::default(), out, passed: Vec::new() }
    }

    /// Forwards the remaining bytes, and returns `out`.
    ///
    /// # Errors
    ///
    /// Fails if `out` fails.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(self.archive.unfinished())?;
        Ok(self.out)
    }
}

impl<W: Write> Write for Nameless<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.passed.clear();
        let passed = self.archive.pass(bytes, Some(&mut self.passed));
        passed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        self.out.write_all(&self.passed)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
