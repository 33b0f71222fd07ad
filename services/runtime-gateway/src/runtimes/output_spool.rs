//! Output spools on disk: one ring file per stream.
//!
//! The file has a page with the marks, then the spare, then the ring. `head` counts every byte that
//! the process ever wrote. `tail` is the offset of the oldest stored byte. There is one writer.
//! Readers need no lock:
//!
//! - The writer raises `tail` *before* it overwrites bytes below it, and `head` after it has
//!   written bytes below it.
//! - A reader reads the marks, the data, and `tail` again. So it knows which of the data is valid.
//!
//! The blocks of the spare are allocated at creation. On a full disk, the spare takes the output
//! that the ring cannot. So the error messages of a program about a full disk are not lost, and a
//! reader that keeps up loses nothing. The ring then has a hole in this place.
//!
//! The page of the marks also has a table of times and of the offsets that were next at those
//! times, at most one per second. A full table drops entries so that it covers the whole life of a
//! process, and recent times best.
//!
//! The file is not mapped into memory, so that a full disk or a truncated file is an error and not
//! a signal.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use rustix::pipe::SpliceFlags;

/// Offset of the spare in the file, in bytes.
const SPARE: u64 = 4096;
/// Size of the spare, in bytes.
const SPARE_BYTES: u64 = 64 << 10;
/// Offset of the ring in the file, in bytes.
const RING: u64 = SPARE + SPARE_BYTES;
const MAGIC: u64 = u64::from_le_bytes(*b"gantryS2");
/// Largest result of one read, in bytes.
pub(crate) const CHUNK: u64 = 1 << 20;
/// Extra size of the ring, in bytes. The contents of the pipe at the end of a process must fit even
/// if the process was never read.
pub(crate) const PIPE: u64 = 1 << 20;

/// Positions of a stream, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Total bytes that were written.
    pub(crate) head: u64,
    /// Offset of the oldest stored byte.
    pub(crate) tail: u64,
}

/// Creates an empty spool that holds `limit` bytes.
pub(crate) fn create(path: &Path, limit: u64) -> io::Result<()> {
    create_at(path, limit, 0)
}

/// Creates an empty spool that holds `limit` bytes and starts at the offset `base`. Earlier bytes
/// are not stored.
pub(crate) fn create_at(path: &Path, limit: u64, base: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    // The blocks are written, because not every file system can only allocate them.
    file.write_all_at(&vec![0; usize::try_from(RING).unwrap_or_default()], 0)?;
    file.write_all_at(&fields([MAGIC, limit + PIPE, limit, base, base, base, base]), 0)
}

fn fields<const FIELDS: usize>(values: [u64; FIELDS]) -> Vec<u8> {
    values.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Offset of the table of times in the file, in bytes. An entry has the milliseconds since 1970,
/// and an offset of the stream. An entry of 0 ends the table.
const TIMES: u64 = 128;
/// Maximum number of times.
const MAX_TIMES: usize = 240;
/// Minimum time between two entries, in milliseconds.
const TIMES_INTERVAL: u64 = 1000;

/// Reads the table of times.
fn times(file: &File) -> io::Result<Vec<(u64, u64)>> {
    let mut table = [0; MAX_TIMES * 16];
    file.read_exact_at(&mut table, TIMES)?;
    let numbers = table.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let numbers: Vec<_> = numbers.collect();
    let entries = numbers.as_chunks::<2>().0.iter().map(|[at, offset]| (*at, *offset));
    Ok(entries.take_while(|(at, _)| *at > 0).collect())
}

fn milliseconds(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

struct Header {
    marks: Marks,
    spare: Range<u64>,
    ring: u64,
    limit: u64,
}

/// Offset of the marks in the file, in bytes.
const MARKS: u64 = 24;

fn header(file: &File) -> io::Result<Header> {
    let mut bytes = [0; 56];
    file.read_exact_at(&mut bytes, 0)?;
    let mut fields = [0; 7];
    for (value, field) in fields.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *value = u64::from_le_bytes(*field);
    }
    let [magic, ring, limit, head, tail, start, end] = fields;
    let is_spare = start <= end && end <= head && end - start <= SPARE_BYTES;
    if magic != MAGIC || ring == 0 || tail > head || head - tail > ring || limit > ring || !is_spare {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a spool"));
    }
    Ok(Header { marks: Marks { head, tail }, spare: start..end, ring, limit })
}

/// The writer of a spool.
pub(crate) struct Writer {
    file: File,
    ring: u64,
    limit: u64,
    marks: Marks,
    /// The range of offsets that the spare holds.
    spare: Range<u64>,
    /// The table of times: milliseconds since 1970, and the next offset at that time.
    times: Vec<(u64, u64)>,
    acknowledged: u64,
    /// Whether the disk is full and a reader has not read the spare yet.
    waits_for_reader: bool,
}

impl Writer {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let Header { marks, spare, ring, limit } = header(&file)?;
        let times = times(&file)?;
        Ok(Self { file, ring, limit, marks, spare, times, acknowledged: 0, waits_for_reader: false })
    }

    pub(crate) fn head(&self) -> u64 {
        self.marks.head
    }

    /// Bytes that the writer may take. If `held`, the writer keeps all unacknowledged bytes.
    pub(crate) fn room(&self, held: bool) -> u64 {
        let limit = if held { self.limit } else { return self.ring };
        let unread = self.marks.head - self.acknowledged;
        if self.waits_for_reader && unread > 0 { 0 } else { limit.saturating_sub(unread) }
    }

    /// Whether the disk was full. A held process may then have to wait for its reader.
    pub(crate) fn was_disk_full(&self) -> bool {
        !self.spare.is_empty()
    }

    /// Bytes that fit into the spare after its contents. Zero if the ring has continued after them.
    fn spare_room(&self) -> u64 {
        let is_end = self.spare.is_empty() || self.spare.end == self.marks.head;
        if is_end { SPARE_BYTES - (self.spare.end - self.spare.start) } else { 0 }
    }

    pub(crate) fn acknowledge(&mut self, up_to: u64) {
        self.acknowledged = self.acknowledged.max(up_to.min(self.marks.head));
    }

    /// Moves bytes from `pipe` into the ring, at most `room` and at most up to the end of the ring.
    ///
    /// Returns the number of bytes. 0: all writers have closed the pipe. `WouldBlock`: the pipe is
    /// empty and open, or the process is `held` and must wait for its reader.
    ///
    /// On a full disk the bytes go into the spare. If the spare is full too, and the process is not
    /// held, the bytes are lost and readers receive a loss.
    pub(crate) fn fill(&mut self, pipe: BorrowedFd<'_>, room: u64, held: bool) -> io::Result<u64> {
        // Queried first, so that the ring drops no more old bytes than necessary.
        let waiting = rustix::io::ioctl_fionread(pipe)?;
        if waiting == 0 {
            return check_end(pipe);
        }
        let at = self.marks.head % self.ring;
        let want = waiting.min(room).min(self.ring - at);
        self.make_room(want)?;
        let mut offset = RING + at;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let length = usize::try_from(want).unwrap_or(usize::MAX);
        let moved = match rustix::pipe::splice(pipe, None, &self.file, Some(&mut offset), length, flags) {
            Ok(moved) => moved as u64,
            Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT | rustix::io::Errno::FBIG) => {
                return self.fill_spare(pipe, want, held);
            }
            Err(error) => return Err(error.into()),
        };
        self.waits_for_reader = false;
        if moved > 0 {
            self.advance(moved)?;
        }
        Ok(moved)
    }

    /// Moves available bytes from `terminal`, at most `room`. Returns 0 when no process has the
    /// terminal open.
    pub(crate) fn fill_from_terminal(&mut self, terminal: BorrowedFd<'_>, room: u64) -> io::Result<u64> {
        let mut taken = [0; 4096];
        let most = usize::try_from(room).unwrap_or(usize::MAX).min(taken.len());
        match rustix::io::read(terminal, &mut taken[..most]) {
            Ok(read) => {
                self.push(&taken[..read])?;
                Ok(read as u64)
            }
            Err(rustix::io::Errno::IO) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Stores `bytes`, and drops the oldest bytes if necessary.
    ///
    /// On a full disk the bytes go into the spare. If the spare is full too, they are lost and
    /// readers receive a loss.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let at = self.marks.head % self.ring;
            let length = (bytes.len() as u64).min(self.ring - at);
            let (part, rest) = bytes.split_at(usize::try_from(length).unwrap_or(bytes.len()));
            self.make_room(length)?;
            match self.file.write_all_at(part, RING + at) {
                Ok(()) => self.advance(length)?,
                Err(error) if is_full(&error) => self.push_to_spare(part)?,
                Err(error) => return Err(error),
            }
            bytes = rest;
        }
        Ok(())
    }

    /// Raises `tail` above the bytes that the next `length` bytes will overwrite.
    fn make_room(&mut self, length: u64) -> io::Result<()> {
        let oldest = (self.marks.head + length).saturating_sub(self.ring);
        if oldest > self.marks.tail {
            self.marks.tail = oldest;
            self.store_marks()?;
        }
        Ok(())
    }

    /// Moves bytes from `pipe` into the spare, at most `want`.
    fn fill_spare(&mut self, pipe: BorrowedFd<'_>, want: u64, held: bool) -> io::Result<u64> {
        let room = self.spare_room();
        self.waits_for_reader = held && room == 0 && self.acknowledged < self.marks.head;
        if self.waits_for_reader {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut taken = [0; 4096];
        let most = if room == 0 { want } else { want.min(room) };
        let most = usize::try_from(most).unwrap_or(usize::MAX).min(taken.len());
        let read = rustix::io::read(pipe, &mut taken[..most])?;
        self.push_to_spare(&taken[..read])?;
        Ok(read as u64)
    }

    /// Stores `bytes` in the spare, because the ring cannot. A spare that is full, or that does not
    /// hold the newest bytes, is restarted. Its contents and all earlier bytes are then dropped.
    fn push_to_spare(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.spare_room() == 0 {
                if !self.spare.is_empty() {
                    self.marks.tail = self.marks.tail.max(self.spare.end);
                }
                self.spare = self.marks.head..self.marks.head;
                self.store_marks()?;
            }
            if self.spare.is_empty() {
                self.spare = self.marks.head..self.marks.head;
            }
            let room = usize::try_from(self.spare_room()).unwrap_or(usize::MAX);
            let (part, rest) = bytes.split_at(bytes.len().min(room));
            self.file.write_all_at(part, SPARE + (self.spare.end - self.spare.start))?;
            self.spare.end += part.len() as u64;
            self.advance(part.len() as u64)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Counts bytes that were written.
    fn advance(&mut self, bytes: u64) -> io::Result<()> {
        // A missing time only makes an answer less exact.
        self.note_time(milliseconds(SystemTime::now())).ok();
        self.marks.head += bytes;
        self.store_marks()
    }

    /// Notes that the next byte was written at this time, in milliseconds since 1970.
    fn note_time(&mut self, now: u64) -> io::Result<()> {
        if self.times.last().is_some_and(|(last, _)| now < last + TIMES_INTERVAL) {
            return Ok(());
        }
        if self.times.len() == MAX_TIMES {
            // The gap that this leaves is the smallest one for its age.
            let gap = |at: &usize| {
                let [(before, _), (at, _), (after, _)] = [at - 1, *at, at + 1].map(|at| self.times[at]);
                (after - before).saturating_mul(1 << 20) / (now - at)
            };
            let least = (1..MAX_TIMES - 1).min_by_key(gap);
            self.times.remove(least.unwrap_or(0));
        }
        self.times.push((now, self.marks.head));
        let mut table: Vec<_> = self.times.iter().flat_map(|(at, offset)| fields([*at, *offset])).collect();
        table.resize(MAX_TIMES * 16, 0);
        self.file.write_all_at(&table, TIMES)
    }

    fn store_marks(&self) -> io::Result<()> {
        let Self { marks: Marks { head, tail }, spare, .. } = self;
        self.file.write_all_at(&fields([*head, *tail, spare.start, spare.end]), MARKS)
    }
}

fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Distinguishes the end of an empty pipe from a pause.
fn check_end(pipe: BorrowedFd<'_>) -> io::Result<u64> {
    use rustix::event::{PollFd, PollFlags};
    let mut poll = [PollFd::from_borrowed_fd(pipe, PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    let events = poll[0].revents();
    if events.contains(PollFlags::HUP) && !events.contains(PollFlags::IN) {
        return Ok(0);
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// The reader of a spool. It may outlive the writer.
#[derive(Debug)]
pub(crate) struct Reader {
    file: File,
}

/// The result of a read at an offset.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReadResult {
    /// Bytes from the offset on.
    Data(Bytes),
    /// Bytes up to this offset are lost.
    Lost(u64),
    /// No byte was written at the offset yet.
    Nothing,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)? })
    }

    pub(crate) fn marks(&self) -> io::Result<Marks> {
        Ok(header(&self.file)?.marks)
    }

    /// Returns an offset at or below the first byte that was written at this time or later.
    pub(crate) fn offset_at(&self, since: SystemTime) -> io::Result<u64> {
        // Read first, so that all bytes below it were written before the last time.
        let head = self.marks()?.head;
        let times = times(&self.file)?;
        let since = milliseconds(since);
        Ok(match times.iter().rfind(|(at, _)| *at <= since) {
            // Later bytes would have another entry.
            Some(last) if Some(last) == times.last() && since >= last.0 + TIMES_INTERVAL => head,
            Some((_, offset)) => (*offset).min(head),
            None => 0,
        })
    }

    pub(crate) fn read(&self, offset: u64) -> io::Result<ReadResult> {
        loop {
            let header = header(&self.file)?;
            let (spare, found) = (header.spare.clone(), self.read_with(header, offset)?);
            let Header { marks, spare: spare_now, .. } = self::header(&self.file)?;
            if offset < marks.tail {
                return Ok(ReadResult::Lost(marks.tail));
            }
            // The marks are not read atomically: the ring may have a hole there.
            if spare.contains(&offset) == spare_now.contains(&offset) {
                return Ok(found);
            }
        }
    }

    fn read_with(&self, header: Header, offset: u64) -> io::Result<ReadResult> {
        let Header { marks, spare, ring, .. } = header;
        if offset < marks.tail {
            return Ok(ReadResult::Lost(marks.tail));
        }
        if offset >= marks.head {
            return Ok(ReadResult::Nothing);
        }
        // The bytes are in the spare, or in the ring up to the start of the spare.
        let (place, end) = if spare.contains(&offset) {
            (SPARE + (offset - spare.start), spare.end)
        } else if !spare.is_empty() && offset < spare.start {
            (RING + offset % ring, spare.start.min(offset - offset % ring + ring))
        } else {
            (RING + offset % ring, marks.head.min(offset - offset % ring + ring))
        };
        let length = (end - offset).min(CHUNK);
        let mut buffer = BytesMut::with_capacity(usize::try_from(length).unwrap_or(0));
        while (buffer.len() as u64) < length {
            let done = buffer.len() as u64;
            let free = buffer.spare_capacity_mut();
            let room = free.len().min(usize::try_from(length - done).unwrap_or(0));
            let (read, _) = rustix::io::pread(&self.file, &mut free[..room], place + done)?;
            if read.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let filled = read.len();
            // SAFETY: `pread` has just written these bytes of the spare capacity.
            unsafe { buffer.set_len(buffer.len() + filled) };
        }
        Ok(ReadResult::Data(buffer.freeze()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn feed(writer: &mut Writer, bytes: &[u8]) -> io::Result<()> {
        let (read, write) = rustix::pipe::pipe()?;
        rustix::io::write(&write, bytes)?;
        drop(write);
        while writer.fill(read.as_fd(), writer.room(false), false)? > 0 {}
        Ok(())
    }

    #[test]
    fn overwritten_output_is_reported_as_lost() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("stdout");
        create(&path, 4096)?;
        let mut writer = Writer::open(&path)?;
        let reader = Reader::open(&path)?;
        assert_eq!(reader.read(0)?, ReadResult::Nothing);

        feed(&mut writer, b"hello")?;
        assert_eq!(reader.read(1)?, ReadResult::Data(Bytes::from_static(b"ello")));

        let ring = 4096 + PIPE;
        let mut written = 5;
        while written < 2 * ring {
            feed(&mut writer, &[b'x'; 50_000])?;
            written += 50_000;
        }
        let ReadResult::Lost(oldest) = reader.read(1)? else { panic!("not reported as lost") };
        assert_eq!(oldest, written - ring);
        let mut offset = oldest;
        while let ReadResult::Data(bytes) = reader.read(offset)? {
            assert!(bytes.iter().all(|byte| *byte == b'x'));
            offset += bytes.len() as u64;
        }
        assert_eq!(offset, written);
        Ok(())
    }

    #[test]
    fn pushed_output_wraps_around_the_ring() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("stdout");
        create(&path, 10)?;
        let (mut writer, reader) = (Writer::open(&path)?, Reader::open(&path)?);
        let ring = 10 + PIPE;
        let byte = |offset: u64| u8::try_from(offset % 251).unwrap_or(0);
        let all: Vec<u8> = (0..2 * ring + 7).map(byte).collect();
        // More than one ring at once, in parts that end at arbitrary positions.
        writer.push(&all[..1000])?;
        writer.push(&all[1000..usize::try_from(ring).unwrap_or(0) + 5000])?;
        writer.push(&all[usize::try_from(ring).unwrap_or(0) + 5000..])?;
        let ReadResult::Lost(mut offset) = reader.read(0)? else { panic!("not reported as lost") };
        assert_eq!(offset, ring + 7);
        while let ReadResult::Data(bytes) = reader.read(offset)? {
            assert!((offset..).zip(&bytes).all(|(offset, found)| byte(offset) == *found));
            offset += bytes.len() as u64;
        }
        assert_eq!(offset, 2 * ring + 7);
        Ok(())
    }

    /// A small file system, unmounted when dropped.
    struct SmallFileSystem(tempfile::TempDir);

    impl SmallFileSystem {
        /// `None` if this process may not mount.
        fn new() -> io::Result<Option<Self>> {
            use rustix::mount::{MountFlags, mount};
            let directory = tempfile::tempdir()?;
            match mount("tmpfs", directory.path(), "tmpfs", MountFlags::empty(), Some(c"size=256k")) {
                Ok(()) => Ok(Some(Self(directory))),
                Err(rustix::io::Errno::PERM) => {
                    eprintln!("not applicable: this process may not mount");
                    Ok(None)
                }
                Err(error) => Err(error.into()),
            }
        }
    }

    impl Drop for SmallFileSystem {
        fn drop(&mut self) {
            rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).ok();
        }
    }

    /// A spool on a file system that is filled after `before` was written, and the file that fills
    /// it.
    fn on_full_disk(small: &SmallFileSystem) -> io::Result<(Writer, Reader, File)> {
        let (path, filler) = (small.0.path().join("stdout"), small.0.path().join("filler"));
        create(&path, 1 << 20)?;
        let (mut writer, reader) = (Writer::open(&path)?, Reader::open(&path)?);
        feed(&mut writer, b"before")?;
        let mut file = File::create(&filler)?;
        while io::Write::write_all(&mut file, &[0; 512]).is_ok() {}
        Ok((writer, reader, file))
    }

    #[test]
    fn spare_takes_output_on_full_disk() -> io::Result<()> {
        let Some(small) = SmallFileSystem::new()? else { return Ok(()) };
        let (mut writer, reader, filler) = on_full_disk(&small)?;
        // The ring takes bytes up to the end of its page.
        let (page, full) = ([b'x'; 4090], [b'y'; 5000]);
        feed(&mut writer, &page)?;
        feed(&mut writer, &full)?;
        // The file is truncated and not only removed, because a process of another test may have
        // inherited it.
        filler.set_len(0)?;
        feed(&mut writer, b"after")?;
        let all = [&b"before"[..], &page, &full, b"after"].concat();
        let mut read = Vec::new();
        while let ReadResult::Data(bytes) = reader.read(read.len() as u64)? {
            read.extend_from_slice(&bytes);
        }
        assert!(read == all, "{} of {} bytes", read.len(), all.len());
        let ReadResult::Data(bytes) = reader.read(4096 + 4999)? else { panic!("no data") };
        assert_eq!(bytes, b"y"[..], "a read can start inside the spare");
        Ok(())
    }

    #[test]
    fn held_process_waits_for_reader_on_full_disk() -> io::Result<()> {
        let Some(small) = SmallFileSystem::new()? else { return Ok(()) };
        let (mut writer, reader, _filler) = on_full_disk(&small)?;
        writer.acknowledge(6);
        let (pipe, write) = rustix::pipe::pipe()?;
        let mut read = 6;
        for round in 0..100 {
            rustix::io::write(&write, &[b'a' + round % 26; 10_000])?;
            loop {
                let room = writer.room(true);
                let filled = if room == 0 {
                    Err(io::ErrorKind::WouldBlock.into())
                } else {
                    writer.fill(pipe.as_fd(), room, true)
                };
                if filled.is_ok_and(|filled| filled > 0) {
                    continue;
                }
                // No bytes remain to be written, or the spare is full.
                let ReadResult::Data(bytes) = reader.read(read)? else { break };
                let expected = |offset: u64| b'a' + u8::try_from((offset - 6) / 10_000 % 26).unwrap_or(0);
                assert!((read..).zip(&bytes).all(|(offset, found)| expected(offset) == *found));
                read += bytes.len() as u64;
                writer.acknowledge(read);
            }
        }
        assert_eq!(read, 6 + 1_000_000);
        Ok(())
    }

    #[test]
    fn output_beyond_the_spare_is_reported_lost() -> io::Result<()> {
        let Some(small) = SmallFileSystem::new()? else { return Ok(()) };
        let (mut writer, reader, filler) = on_full_disk(&small)?;
        let mut written = 6;
        for _ in 0..8 {
            feed(&mut writer, &[b'x'; 50_000])?;
            written += 50_000;
        }
        assert_eq!(writer.head(), written, "every byte that was written counts");
        let ReadResult::Lost(oldest) = reader.read(0)? else { panic!("the lost bytes were not reported") };
        let ReadResult::Data(bytes) = reader.read(oldest)? else { panic!("no data") };
        assert_eq!(oldest + bytes.len() as u64, written, "the newest bytes are stored");
        assert_eq!(reader.read(written)?, ReadResult::Nothing);
        filler.set_len(0)?;
        feed(&mut writer, b"after")?;
        assert_eq!(reader.read(written)?, ReadResult::Data(Bytes::from_static(b"after")));
        Ok(())
    }

    #[test]
    fn times_of_output_are_found() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("stdout");
        create(&path, 10)?;
        let (mut writer, reader) = (Writer::open(&path)?, Reader::open(&path)?);
        let at = |seconds: u64| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(reader.offset_at(at(0))?, 0);
        // A byte each 2 s, for three hours.
        const BYTES: u64 = 5400;
        for byte in 0..BYTES {
            writer.note_time(2000 * (byte + 1))?;
            writer.marks.head += 1;
            writer.store_marks()?;
        }
        assert_eq!(reader.offset_at(at(0))?, 0);
        assert_eq!(reader.offset_at(at(2 * BYTES + 1))?, BYTES, "nothing was written since");
        assert_eq!(reader.offset_at(at(2 * BYTES))?, BYTES - 1);
        for second in 2..2 * BYTES {
            let (found, exact) = (reader.offset_at(at(second))?, (second - 1) / 2);
            assert!(found <= exact, "{second}: {found} leaves out wanted bytes");
            let age = BYTES - exact;
            assert!(exact - found <= 1 + age / 10, "{second}: {found}, {exact}");
        }
        // A writer that comes later goes on.
        assert_eq!(Writer::open(&path)?.times, writer.times);
        Ok(())
    }

    #[test]
    fn held_writer_keeps_unacknowledged_output() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("stdout");
        create(&path, 10)?;
        let mut writer = Writer::open(&path)?;
        feed(&mut writer, b"0123456789ab")?;
        assert_eq!(writer.room(true), 0);
        writer.acknowledge(5);
        assert_eq!(writer.room(true), 3);
        writer.acknowledge(100);
        assert_eq!(writer.room(true), 10);
        Ok(())
    }
}
