//! Archives without names of users and groups, for whoever passes one on.

use std::io::{self, Write};

use super::end::ArchiveEnd;

/// Passes an archive on without the names of users and groups in it. Who unpacks it gives files to their numbers then, which are all that a
/// manifest knows: GNU tar as root prefers the names, if it has users and groups that are called so.
///
/// A block is passed on when it is whole, and what describes an entry when all of it has come.
#[derive(Debug)]
pub struct Nameless<W> {
    archive: ArchiveEnd,
    out: W,
    passed: Vec<u8>,
}

impl<W: Write> Nameless<W> {
    /// Passes on to `out`.
    pub fn new(out: W) -> Self {
        Self { archive: ArchiveEnd::default(), out, passed: Vec::new() }
    }

    /// Passes on what is left, and answers where it went.
    ///
    /// # Errors
    ///
    /// It cannot be written.
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
