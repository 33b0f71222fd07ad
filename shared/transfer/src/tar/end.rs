//! Detection of the end of an archive while it is forwarded.

use super::header::{self, Block};
use super::pax::{self, Records};
use super::{BLOCK_BYTES, MAX_EXTENSION_BYTES};

/// A parser that detects the end of an archive. The archive may come in pieces of any size.
///
/// The parser distinguishes the two zero blocks at the end from zero blocks in a file. It parses
/// only what this requires, unlike [`ArchiveReader`](crate::ArchiveReader).
#[derive(Debug)]
pub struct ArchiveEnd {
    state: State,
    /// The received part of the current block.
    block: Block,
    filled: usize,
    /// The received records for the next entry or for all entries.
    extended: Vec<u8>,
    /// Whether the records are for all entries.
    for_all: bool,
    /// The size of the next entry according to its records.
    next_size: Option<u64>,
}

#[derive(Debug)]
enum State {
    Header,
    /// After the first zero block.
    MaybeEnd,
    /// In the map of a file with holes, followed by this many bytes of data.
    Map(u64),
    /// In the padded content of an entry. The first `records` bytes are records.
    Data {
        records: usize,
        left: u64,
    },
    Ended,
}

/// The bytes are not a tar archive, or the archive is followed by other bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotAnArchive(&'static str);

impl Default for ArchiveEnd {
    fn default() -> Self {
        Self {
            state: State::Header,
            block: [0; BLOCK_BYTES],
            filled: 0,
            extended: Vec::new(),
            for_all: false,
            next_size: None,
        }
    }
}

impl ArchiveEnd {
    /// Whether the end of the archive was received. Padding may follow.
    #[must_use]
    pub fn is_there(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Parses more bytes of the archive.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not an archive, or if other bytes follow the archive.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), NotAnArchive> {
        self.pass(bytes, None)
    }

    /// Parses more bytes of the archive. Appends them to `nameless` without the names of users and
    /// groups, as soon as their meaning is known.
    pub(super) fn pass(
        &mut self,
        mut bytes: &[u8],
        mut nameless: Option<&mut Vec<u8>>,
    ) -> Result<(), NotAnArchive> {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Ended => {
                    if bytes.iter().any(|byte| *byte != 0) {
                        return Err(NotAnArchive("cannot forward the archive: other bytes follow its end"));
                    }
                    if let Some(nameless) = nameless {
                        nameless.extend_from_slice(bytes);
                    }
                    return Ok(());
                }
                State::Data { records, left } => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    let kept = taken.min(*records);
                    self.extended.extend_from_slice(&bytes[..kept]);
                    *records -= kept;
                    *left -= taken as u64;
                    if let Some(nameless) = nameless.as_deref_mut() {
                        if kept > 0 && *records == 0 {
                            let from = nameless.len();
                            nameless.extend_from_slice(&self.extended);
                            pax::blank_names(&mut nameless[from..]);
                        }
                        nameless.extend_from_slice(&bytes[kept..taken]);
                    }
                    bytes = &bytes[taken..];
                    if *left == 0 {
                        self.end_entry()?;
                    }
                }
                State::Header | State::MaybeEnd | State::Map(_) => {
                    let taken = (BLOCK_BYTES - self.filled).min(bytes.len());
                    self.block[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
                    self.filled += taken;
                    bytes = &bytes[taken..];
                    if self.filled == BLOCK_BYTES {
                        self.filled = 0;
                        let is_header = !matches!(self.state, State::Map(_));
                        self.read_block()?;
                        if let Some(nameless) = nameless.as_deref_mut() {
                            if is_header {
                                header::blank_names(&mut self.block);
                            }
                            nameless.extend_from_slice(&self.block);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the received part of an incomplete block.
    pub(super) fn unfinished(&self) -> &[u8] {
        &self.block[..self.filled]
    }

    fn read_block(&mut self) -> Result<(), NotAnArchive> {
        if let State::Map(size) = self.state {
            let (_, continues) = header::old_regions(&self.block, false);
            if !continues {
                self.data(size, false);
            }
            return Ok(());
        }
        if self.block == [0; BLOCK_BYTES] {
            self.state = if matches!(self.state, State::MaybeEnd) { State::Ended } else { State::MaybeEnd };
            return Ok(());
        }
        // GNU tar tolerates a single zero block, but no sender of Gantry writes one.
        if matches!(self.state, State::MaybeEnd) {
            return Err(NotAnArchive(
                "cannot forward the archive: there is a single zero block between entries",
            ));
        }
        if !header::is_sealed(&self.block) {
            return Err(NotAnArchive("cannot forward the archive: a header has a wrong checksum"));
        }
        let size = header::number(&self.block[header::SIZE]).and_then(|size| u64::try_from(size).ok());
        let size = size.ok_or(NotAnArchive("cannot forward the archive: a header has no valid size"))?;
        match header::kind(&self.block) {
            b'x' | b'g' if size > MAX_EXTENSION_BYTES as u64 => {
                return Err(NotAnArchive("cannot forward the archive: an extended header is too large"));
            }
            kind @ (b'x' | b'g') => {
                self.for_all = kind == b'g';
                self.data(size, true);
            }
            b'L' | b'K' => self.data(size, false),
            // Links, devices, directories and pipes have no contents, even if their headers have a
            // size.
            b'1'..=b'6' => {
                self.next_size = None;
                self.state = State::Header;
            }
            b'S' if header::old_regions(&self.block, true).1 => self.state = State::Map(size),
            _ => {
                let size = self.next_size.take().unwrap_or(size);
                self.data(size, false);
            }
        }
        Ok(())
    }

    fn data(&mut self, size: u64, has_records: bool) {
        self.extended.clear();
        let records = if has_records { usize::try_from(size).unwrap_or(usize::MAX) } else { 0 };
        match size.checked_next_multiple_of(BLOCK_BYTES as u64).unwrap_or(u64::MAX) {
            0 => self.state = State::Header,
            left => self.state = State::Data { records, left },
        }
    }

    fn end_entry(&mut self) -> Result<(), NotAnArchive> {
        self.state = State::Header;
        if self.extended.is_empty() || self.for_all {
            self.extended.clear();
            self.for_all = false;
            return Ok(());
        }
        let mut records = Records::default();
        records.add(&std::mem::take(&mut self.extended)).map_err(NotAnArchive)?;
        self.next_size = records.size.or(self.next_size);
        Ok(())
    }
}
