//! Where an archive ends, for whoever passes one on.

use super::header::{self, Block};
use super::pax::{self, Records};
use super::{BLOCK_BYTES, MAX_EXTENSION_BYTES};

/// Follows an archive as its bytes pass by, in pieces of any size, to know its end from two blocks of zeroes in a file. It takes no more of an
/// archive apart than that needs; [`ArchiveReader`](crate::ArchiveReader) does.
#[derive(Debug)]
pub struct ArchiveEnd {
    state: State,
    /// A block, as far as it has come.
    block: Block,
    filled: usize,
    /// Records for the next entry, or for all, as they come.
    extended: Vec<u8>,
    /// Whether they are for all.
    for_all: bool,
    /// The size that they give it.
    next_size: Option<u64>,
}

#[derive(Debug)]
enum State {
    Header,
    /// One block of zeroes has been seen.
    MaybeEnd,
    /// More of the map of a file with holes, then so much data.
    Map(u64),
    /// Bytes of an entry with their padding; the first so many of them are records.
    Data {
        records: usize,
        left: u64,
    },
    Ended,
}

/// What passes by is no tar archive, or one that something follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoArchive(&'static str);

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
    /// Whether the archive is complete. Padding may follow.
    #[must_use]
    pub fn is_there(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    /// Some more of the archive passes by.
    ///
    /// # Errors
    ///
    /// This is no archive, or something comes after it.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), NoArchive> {
        self.pass(bytes, None)
    }

    /// The same. What passes by is added to `nameless`, as soon as it is known what it is, without the names of users and groups.
    pub(super) fn pass(
        &mut self,
        mut bytes: &[u8],
        mut nameless: Option<&mut Vec<u8>>,
    ) -> Result<(), NoArchive> {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Ended => {
                    if bytes.iter().any(|byte| *byte != 0) {
                        return Err(NoArchive("something follows the end of the archive"));
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

    /// What has come of a block that is not whole.
    pub(super) fn unfinished(&self) -> &[u8] {
        &self.block[..self.filled]
    }

    fn read_block(&mut self) -> Result<(), NoArchive> {
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
        // GNU tar, too, takes a lone block of zeroes for a mistake, but no sender of ours makes one.
        if matches!(self.state, State::MaybeEnd) {
            return Err(NoArchive("a single block of zeroes between entries"));
        }
        if !header::is_sealed(&self.block) {
            return Err(NoArchive("a header with a wrong sum"));
        }
        let size = header::number(&self.block[header::SIZE]).and_then(|size| u64::try_from(size).ok());
        let size = size.ok_or(NoArchive("a header without a size"))?;
        match header::kind(&self.block) {
            b'x' | b'g' if size > MAX_EXTENSION_BYTES as u64 => {
                return Err(NoArchive("an extended header that is too large"));
            }
            kind @ (b'x' | b'g') => {
                self.for_all = kind == b'g';
                self.data(size, true);
            }
            b'L' | b'K' => self.data(size, false),
            // Links, devices, directories and pipes have no contents, whatever they say.
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

    fn end_entry(&mut self) -> Result<(), NoArchive> {
        self.state = State::Header;
        if self.extended.is_empty() || self.for_all {
            self.extended.clear();
            self.for_all = false;
            return Ok(());
        }
        let mut records = Records::default();
        records.add(&std::mem::take(&mut self.extended)).map_err(NoArchive)?;
        self.next_size = records.size.or(self.next_size);
        Ok(())
    }
}
