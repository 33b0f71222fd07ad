//! The members of an archive, in order, with their content.

use std::io::{self, BufReader, Read};
use std::ops::Range;

use super::header::{self, Block};
use super::pax::{self, Records};
use super::read::ArchiveError;
use super::{BLOCK_BYTES, padding};
use crate::entry::{DeviceKind, MAX_FILE_BYTES, MAX_PATH_BYTES, Xattr, as_path};

/// Maximum bytes of the extension headers of an entry: PAX records and long names.
pub const MAX_EXTENSION_BYTES: usize = 4 << 20;
/// Maximum number of data regions of a file.
pub const MAX_REGIONS: usize = 1 << 20;

/// Bytes of the read buffer. Archives have many small headers.
const BUFFER_BYTES: usize = 64 << 10;

/// Number of last received bytes that are kept for error messages.
const TAIL_BYTES: usize = 1024;

/// A member of an archive.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) path: Vec<u8>,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: (i64, u32),
    pub(super) xattrs: Vec<Xattr>,
    pub(super) kind: MemberKind,
}

#[derive(Debug)]
pub(super) enum MemberKind {
    Directory,
    /// A file. [`Members`] is positioned at its data.
    File {
        size_bytes: u64,
    },
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Fifo,
    Device {
        kind: DeviceKind,
        major: u32,
        minor: u32,
    },
}

/// A reader of an archive, member by member.
#[derive(Debug)]
pub(super) struct Members<R> {
    source: Source<R>,
    /// Data regions of the current member: ascending, not empty, without overlap. Each region
    /// starts at a block of the archive.
    regions: Vec<Range<u64>>,
    /// Index of the current region.
    region: usize,
    /// Current offset in the file.
    at: u64,
}

impl<R: Read> Members<R> {
    pub(super) fn new(source: R) -> Self {
        let source = BufReader::with_capacity(BUFFER_BYTES, source);
        let source = Source { source, offset: 0, tail: Vec::new(), may_stop: false };
        Self { source, regions: Vec::new(), region: 0, at: 0 }
    }

    /// Accepts an archive without zero blocks at its end.
    pub(super) fn accept_missing_end(&mut self) {
        self.source.may_stop = true;
    }

    /// Reads the next member. Returns `None` at a proper end of the archive.
    pub(super) fn next(&mut self) -> Result<Option<Member>, ArchiveError> {
        self.seek(u64::MAX)?;
        let mut records = Records::default();
        let (mut long_path, mut long_link) = (None, None);
        let mut extension_bytes = 0;
        loop {
            let Some(block) = self.source.header()? else {
                return match (records.is_empty(), long_path.or(long_link)) {
                    (true, None) => Ok(None),
                    _ => Err(self.source.malformed("the archive ends after an extension header")),
                };
            };
            let mut extension = |source: &mut Source<R>| {
                let length = size(&block).ok_or_else(|| source.malformed("a size is malformed"))?;
                extension_bytes += length.saturating_add(BLOCK_BYTES as u64);
                if extension_bytes > MAX_EXTENSION_BYTES as u64 {
                    return Err(source.malformed("the headers of an entry are too large"));
                }
                source.bytes(length)
            };
            match header::kind(&block) {
                b'x' => {
                    let bytes = extension(&mut self.source)?;
                    records.add(&bytes).map_err(|what| self.source.malformed(what))?;
                }
                b'g' => {
                    let mut global = Records::default();
                    let bytes = extension(&mut self.source)?;
                    global.add(&bytes).map_err(|what| self.source.malformed(what))?;
                    if !global.is_empty() {
                        return Err(self
                            .source
                            .malformed("a global PAX header says something about all entries"));
                    }
                }
                b'L' => long_path = Some(header::text(&extension(&mut self.source)?).to_vec()),
                b'K' => long_link = Some(header::text(&extension(&mut self.source)?).to_vec()),
                _ => {
                    records.path = records.path.or(long_path);
                    records.link = records.link.or(long_link);
                    return self.member(&block, records).map(Some);
                }
            }
        }
    }

    /// Returns the data regions of the current member. Adjacent regions are joined.
    pub(super) fn data(&self) -> Vec<Range<u64>> {
        let mut data: Vec<Range<u64>> = Vec::new();
        for region in &self.regions {
            match data.last_mut() {
                Some(last) if last.end == region.start => last.end = region.end,
                _ => data.push(region.clone()),
            }
        }
        data
    }

    /// Reads content of the current member at `offset`, which must not be before the current
    /// offset. Holes, and bytes after the end, are zeroes.
    pub(super) fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), ArchiveError> {
        let mut filled = 0;
        while filled < buffer.len() {
            let offset = offset + filled as u64;
            let rest = &mut buffer[filled..];
            self.seek(offset)?;
            let until = |end: u64| usize::try_from(end - offset).unwrap_or(usize::MAX).min(rest.len());
            filled += match self.regions.get(self.region) {
                None => {
                    rest.fill(0);
                    rest.len()
                }
                Some(region) if offset < region.start => {
                    let length = until(region.start);
                    rest[..length].fill(0);
                    length
                }
                Some(region) => {
                    let length = until(region.end);
                    self.source.exact(&mut rest[..length])?;
                    self.at += length as u64;
                    length
                }
            };
        }
        Ok(())
    }

    /// Skips the data before `offset`, and the padding of regions before it.
    fn seek(&mut self, offset: u64) -> Result<(), ArchiveError> {
        while let Some(region) = self.regions.get(self.region) {
            self.at = self.at.max(region.start);
            if offset <= self.at && self.at < region.end {
                return Ok(());
            }
            let to = offset.min(region.end);
            if to <= self.at && to < region.end {
                return Ok(());
            }
            self.source.skip(to - self.at)?;
            self.at = to;
            if to < region.end {
                return Ok(());
            }
            self.source.skip(padding(region.end - region.start))?;
            self.region += 1;
        }
        Ok(())
    }

    fn member(&mut self, block: &Block, records: Records) -> Result<Member, ArchiveError> {
        let raw_path = match (&records.sparse.name, &records.path) {
            (Some(path), _) | (None, Some(path)) => path.clone(),
            (None, None) => header::path(block),
        };
        let is_slashed = raw_path.ends_with(b"/");
        let path = normalize_path(&raw_path)?;
        let field = |range, what| header::number(&block[range]).ok_or_else(|| malformed(&path, what));
        let id = |record: Option<u32>, range| match record {
            Some(id) => Ok(id),
            None => field(range, "an owner is malformed")
                .and_then(|id| u32::try_from(id).map_err(|_| malformed(&path, "an owner is out of range"))),
        };
        let uid = id(records.uid, header::UID)?;
        let gid = id(records.gid, header::GID)?;
        let mode = (field(header::MODE, "the mode is malformed")? & 0o7777) as u32;
        let mtime = match records.mtime {
            Some(mtime) => mtime,
            None => (field(header::MTIME, "the modification time is malformed")?, 0),
        };
        let link = || records.link.clone().unwrap_or_else(|| header::text(&block[header::LINK]).to_vec());
        let stored = match records.size {
            Some(size) => size,
            None => size(block).ok_or_else(|| malformed(&path, "the size is malformed"))?,
        };

        let code = header::kind(block);
        let kind = match code {
            // Very old programs write directories as files whose names end with a slash.
            0 | b'0' | b'7' if is_slashed => MemberKind::Directory,
            0 | b'0' | b'7' | b'S' => {
                let size_bytes = self.file(&path, block, stored, &records)?;
                return Ok(Member {
                    path,
                    mode,
                    uid,
                    gid,
                    mtime,
                    xattrs: records.xattrs,
                    kind: MemberKind::File { size_bytes },
                });
            }
            // Some programs write the size of the file, but the data never follows.
            b'1' => {
                return Ok(Member {
                    kind: MemberKind::HardLink(normalize_path(&link())?),
                    path,
                    mode,
                    uid,
                    gid,
                    mtime,
                    xattrs: records.xattrs,
                });
            }
            b'2' => MemberKind::Symlink(link()),
            b'3' | b'4' => {
                let number = |range| {
                    let number = field(range, "a device number is malformed")?;
                    u32::try_from(number).map_err(|_| malformed(&path, "a device number is out of range"))
                };
                MemberKind::Device {
                    kind: if code == b'3' { DeviceKind::Character } else { DeviceKind::Block },
                    major: number(header::MAJOR)?,
                    minor: number(header::MINOR)?,
                }
            }
            b'5' => MemberKind::Directory,
            b'6' => MemberKind::Fifo,
            _ => return Err(ArchiveError::Type { path: as_path(&path).to_owned(), kind: code.into() }),
        };
        if stored != 0 {
            return Err(malformed(&path, "the entry is not a file, but has content"));
        }
        Ok(Member { path, mode, uid, gid, mtime, xattrs: records.xattrs, kind })
    }

    /// Reads the data regions of a file. Returns its size.
    fn file(
        &mut self,
        path: &[u8],
        block: &Block,
        stored: u64,
        records: &Records,
    ) -> Result<u64, ArchiveError> {
        let sparse = &records.sparse;
        let mut regions = Regions { path, regions: Vec::new(), bytes: 0, end: 0 };
        let size_bytes;
        let mut map_bytes = 0;
        if header::kind(block) == b'S' {
            size_bytes = sparse.size.or_else(|| header::old_size(block));
            let (listed, mut continues) = header::old_regions(block, true);
            listed.into_iter().try_for_each(|region| regions.push(region))?;
            while continues {
                let mut more = [0; BLOCK_BYTES];
                self.source.exact(&mut more)?;
                let (listed, again) = header::old_regions(&more, false);
                listed.into_iter().try_for_each(|region| regions.push(region))?;
                continues = again;
            }
        } else {
            match (sparse.major, sparse.minor.unwrap_or(0), &sparse.map) {
                (None | Some(0), _, None) => {
                    regions.push(Some((0, stored)))?;
                    size_bytes = Some(stored);
                }
                (None | Some(0), _, Some(map)) => {
                    size_bytes = sparse.size;
                    let (pairs, []) = map.as_chunks::<2>() else {
                        return Err(malformed(path, "the map of its holes is malformed"));
                    };
                    pairs.iter().try_for_each(|[offset, length]| regions.push(Some((*offset, *length))))?;
                }
                (Some(1), 0, None) => {
                    size_bytes = sparse.size;
                    map_bytes = self.source.map(stored, &mut regions)?;
                }
                _ => return Err(malformed(path, "the format of its holes is not supported")),
            }
        }
        let size_bytes = size_bytes.ok_or_else(|| malformed(path, "its size including holes is missing"))?;
        if size_bytes > MAX_FILE_BYTES || regions.end > size_bytes {
            return Err(malformed(path, "its size is invalid"));
        }
        if regions.bytes != stored - map_bytes {
            return Err(malformed(path, "the map of its holes does not match its content"));
        }
        (self.regions, self.region, self.at) = (regions.regions, 0, 0);
        Ok(size_bytes)
    }
}

/// Data regions of a file, while they are read.
struct Regions<'a> {
    path: &'a [u8],
    regions: Vec<Range<u64>>,
    /// Total length of the regions.
    bytes: u64,
    /// End of the last region, which may be empty.
    end: u64,
}

impl Regions<'_> {
    fn push(&mut self, region: Option<(u64, u64)>) -> Result<(), ArchiveError> {
        let wrong = || malformed(self.path, "the map of its holes is malformed");
        let (offset, length) = region.ok_or_else(wrong)?;
        let end = offset.checked_add(length).filter(|end| *end <= MAX_FILE_BYTES && offset >= self.end);
        self.end = end.ok_or_else(wrong)?;
        self.bytes += length; // Cannot overflow, because the regions are disjoint.
        if length > 0 {
            if self.regions.len() >= MAX_REGIONS {
                return Err(malformed(self.path, "it has too many holes"));
            }
            self.regions.push(offset..self.end);
        }
        Ok(())
    }
}

/// The bytes of the archive, counted.
#[derive(Debug)]
struct Source<R> {
    source: BufReader<R>,
    offset: u64,
    tail: Vec<u8>,
    /// Whether the zero blocks at the end may be missing.
    may_stop: bool,
}

impl<R: Read> Source<R> {
    /// Fills the buffer, or less at the end of the archive.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.source.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(length) => filled += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ArchiveError::Source(error)),
            }
        }
        self.offset += filled as u64;
        let kept = &buffer[filled.saturating_sub(TAIL_BYTES)..filled];
        self.tail.drain(..(self.tail.len() + kept.len()).saturating_sub(TAIL_BYTES));
        self.tail.extend_from_slice(kept);
        Ok(filled)
    }

    fn exact(&mut self, buffer: &mut [u8]) -> Result<(), ArchiveError> {
        if self.fill(buffer)? == buffer.len() { Ok(()) } else { Err(self.truncated()) }
    }

    fn skip(&mut self, mut length: u64) -> Result<(), ArchiveError> {
        let mut buffer = [0; 16 << 10];
        while length > 0 {
            let step = usize::try_from(length).unwrap_or(usize::MAX).min(buffer.len());
            self.exact(&mut buffer[..step])?;
            length -= step as u64;
        }
        Ok(())
    }

    /// Reads the content of an extension header, whose length was checked.
    fn bytes(&mut self, length: u64) -> Result<Vec<u8>, ArchiveError> {
        let mut bytes = Vec::new();
        self.by_ref().take(length).read_to_end(&mut bytes).map_err(ArchiveError::Source)?;
        if (bytes.len() as u64) < length {
            return Err(self.truncated());
        }
        self.skip(padding(length))?;
        Ok(bytes)
    }

    /// Reads the next header. Returns `None` at a proper end of the archive.
    fn header(&mut self) -> Result<Option<Block>, ArchiveError> {
        let mut block = [0; BLOCK_BYTES];
        let at = self.offset;
        let length = self.fill(&mut block)?;
        if length == BLOCK_BYTES && block == [0; BLOCK_BYTES] {
            self.end()?;
            return Ok(None);
        }
        if length == 0 && self.may_stop {
            return Ok(None);
        }
        if length < BLOCK_BYTES {
            return Err(self.truncated());
        }
        if !header::is_sealed(&block) {
            let mut found = block.to_vec();
            let mut more = [0; TAIL_BYTES];
            let length = self.fill(&mut more)?;
            found.extend_from_slice(&more[..length]);
            let text = server_error(&found).unwrap_or_else(|| printable(&block));
            return Err(ArchiveError::NoHeader { offset: at, text });
        }
        Ok(Some(block))
    }

    /// Checks that only zeroes follow the first zero block, including a second block.
    fn end(&mut self) -> Result<(), ArchiveError> {
        let mut buffer = [0; 16 << 10];
        let length = self.fill(&mut buffer[..BLOCK_BYTES])?;
        let mut found = &buffer[..length];
        if length == 0 && self.may_stop {
            return Ok(());
        }
        if length < BLOCK_BYTES && found.iter().all(|byte| *byte == 0) {
            return Err(self.truncated());
        }
        loop {
            if let Some(first) = found.iter().position(|byte| *byte != 0) {
                let mut text = found[first..].to_vec();
                let mut more = [0; TAIL_BYTES];
                let length = self.fill(&mut more)?;
                text.extend_from_slice(&more[..length]);
                return Err(ArchiveError::Trailing { text: printable(&text) });
            }
            let length = self.fill(&mut buffer)?;
            if length == 0 {
                return Ok(());
            }
            found = &buffer[..length];
        }
    }

    /// Reads the map at the start of a file in format 1.0: decimal numbers, one per line. Returns
    /// the length of the map.
    fn map(&mut self, stored: u64, regions: &mut Regions<'_>) -> Result<u64, ArchiveError> {
        let wrong = || malformed(regions.path, "the map of its holes is malformed");
        let mut lines = MapLines { block: [0; BLOCK_BYTES], at: BLOCK_BYTES, taken: 0, stored };
        let count = lines.number(self)?.ok_or_else(wrong)?;
        for _ in 0..count {
            let offset = lines.number(self)?;
            let length = lines.number(self)?;
            regions.push(offset.zip(length))?;
        }
        Ok(lines.taken)
    }

    fn truncated(&self) -> ArchiveError {
        let text = server_error(&self.tail).unwrap_or_default();
        ArchiveError::Truncated { offset: self.offset, text }
    }

    fn malformed(&self, what: &'static str) -> ArchiveError {
        ArchiveError::Extension { offset: self.offset, what }
    }
}

impl<R: Read> Read for Source<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fill(buffer).map_err(|error| match error {
            ArchiveError::Source(error) => error,
            error => io::Error::other(error),
        })
    }
}

/// A parser of the numbers in a map, block by block.
struct MapLines {
    block: Block,
    at: usize,
    taken: u64,
    stored: u64,
}

impl MapLines {
    fn number<R: Read>(&mut self, source: &mut Source<R>) -> Result<Option<u64>, ArchiveError> {
        let mut digits = Vec::new();
        loop {
            if self.at == BLOCK_BYTES {
                if self.taken + BLOCK_BYTES as u64 > self.stored {
                    return Ok(None);
                }
                source.exact(&mut self.block)?;
                self.taken += BLOCK_BYTES as u64;
                self.at = 0;
            }
            let byte = self.block[self.at];
            self.at += 1;
            if byte == b'\n' {
                return Ok(pax::decimal(&digits));
            }
            if digits.len() >= 20 {
                return Ok(None);
            }
            digits.push(byte);
        }
    }
}

fn size(block: &Block) -> Option<u64> {
    header::number(&block[header::SIZE]).and_then(|size| u64::try_from(size).ok())
}

/// Normalizes a path for manifests: without `.`, and without leading, trailing and repeated
/// slashes.
fn normalize_path(path: &[u8]) -> Result<Vec<u8>, ArchiveError> {
    let names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".");
    let normal = names.collect::<Vec<_>>().join(&b'/');
    let is_safe = !path.is_empty() && crate::entry::is_safe_path(&normal);
    if is_safe {
        return Ok(normal);
    }
    let shown = &path[..path.len().min(MAX_PATH_BYTES)];
    Err(ArchiveError::UnsafePath { path: as_path(shown).to_owned() })
}

pub(super) fn malformed(path: &[u8], what: &'static str) -> ArchiveError {
    ArchiveError::Malformed { path: as_path(path).to_owned(), what }
}

/// Returns the error message that a server appends to an archive that it cannot complete.
fn server_error(bytes: &[u8]) -> Option<String> {
    const START: &[u8] = b"{\"error\":";
    let at = bytes.windows(START.len()).rposition(|window| window == START)?;
    Some(printable(&bytes[at..]))
}

/// Returns the first bytes as printable text.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(TAIL_BYTES)]);
    text.trim_matches(|char: char| char == '\0' || char.is_whitespace())
        .chars()
        .map(|char| if char.is_control() { ' ' } else { char })
        .collect()
}
