//! Output on disk: one ring file per stream.
//!
//! A page with the marks, then the ring. `head` counts every byte that the process ever wrote; `tail` is the oldest byte
//! that is still there. There is one writer; readers need no lock:
//!
//! - `tail` is raised *before* what lies below it is overwritten, and `head` after what lies below it is written.
//! - So a reader that reads marks, data, and `tail` again knows which of the data it may believe.
//!
//! Nothing is mapped: a full disk, or a file that was cut, is an error and not a signal.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use bytes::{Bytes, BytesMut};
use rustix::pipe::SpliceFlags;

/// Where the ring begins.
const HEADER: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"gantryS1");
/// Most that one read returns.
pub(crate) const CHUNK: u64 = 1 << 20;
/// Room in the ring beyond what an unread process may fill: what is still in its pipe when it ends must fit.
pub(crate) const PIPE: u64 = 1 << 20;

/// How far a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Bytes in all.
    pub(crate) head: u64,
    /// The oldest that is there.
    pub(crate) tail: u64,
}

/// Makes an empty spool that holds `limit` bytes.
pub(crate) fn create(path: &Path, limit: u64) -> io::Result<()> {
    create_at(path, limit, 0)
}

/// The same, whose first byte stands at `base`: what was before is not here.
pub(crate) fn create_at(path: &Path, limit: u64, base: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    let mut header = [0; 40];
    for (field, value) in header.chunks_exact_mut(8).zip([MAGIC, base, base, limit + PIPE, limit]) {
        field.copy_from_slice(&value.to_le_bytes());
    }
    file.write_all_at(&header, 0)
}

struct Header {
    marks: Marks,
    ring: u64,
    limit: u64,
}

fn header(file: &File) -> io::Result<Header> {
    let mut bytes = [0; 40];
    file.read_exact_at(&mut bytes, 0)?;
    let mut fields = [0; 5];
    for (value, field) in fields.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *value = u64::from_le_bytes(*field);
    }
    let [magic, head, tail, ring, limit] = fields;
    if magic != MAGIC || ring == 0 || tail > head || head - tail > ring || limit > ring {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a spool"));
    }
    Ok(Header { marks: Marks { head, tail }, ring, limit })
}

/// The writing end.
pub(crate) struct Writer {
    file: File,
    ring: u64,
    limit: u64,
    marks: Marks,
    acknowledged: u64,
}

impl Writer {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let Header { marks, ring, limit } = header(&file)?;
        Ok(Self { file, ring, limit, marks, acknowledged: 0 })
    }

    pub(crate) fn head(&self) -> u64 {
        self.marks.head
    }

    /// Bytes that may be taken in: when `held` back, no more than leaves everything unacknowledged in place.
    pub(crate) fn room(&self, held: bool) -> u64 {
        let limit = if held { self.limit } else { return self.ring };
        limit.saturating_sub(self.marks.head - self.acknowledged)
    }

    pub(crate) fn acknowledge(&mut self, up_to: u64) {
        self.acknowledged = self.acknowledged.max(up_to.min(self.marks.head));
    }

    /// Moves what is in `pipe` into the ring, at most `room` and at most up to the ring's end.
    ///
    /// Returns how much: 0 when all writers have closed it, `WouldBlock` when it is empty and they have not.
    /// What finds no room on the disk is lost, and told as such to readers, rather than stop the process.
    pub(crate) fn fill(&mut self, pipe: BorrowedFd<'_>, room: u64) -> io::Result<u64> {
        // Asked first, so that no more of the old is given up than the new needs.
        let waiting = rustix::io::ioctl_fionread(pipe)?;
        if waiting == 0 {
            return ended(pipe);
        }
        let at = self.marks.head % self.ring;
        let want = waiting.min(room).min(self.ring - at);
        self.make_room(want)?;
        let mut offset = HEADER + at;
        let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
        let length = usize::try_from(want).unwrap_or(usize::MAX);
        let moved = match rustix::pipe::splice(pipe, None, &self.file, Some(&mut offset), length, flags) {
            Ok(moved) => moved as u64,
            Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT | rustix::io::Errno::FBIG) => {
                return self.lose(pipe);
            }
            Err(error) => return Err(error.into()),
        };
        if moved > 0 {
            self.marks.head += moved;
            self.store_marks()?;
        }
        Ok(moved)
    }

    /// Takes in `bytes`, and gives up the oldest where there is no room.
    ///
    /// What finds no room on the disk is lost, and told as such to readers.
    pub(crate) fn push(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let at = self.marks.head % self.ring;
            let length = (bytes.len() as u64).min(self.ring - at);
            let (part, rest) = bytes.split_at(usize::try_from(length).unwrap_or(bytes.len()));
            self.make_room(length)?;
            let written = self.file.write_all_at(part, HEADER + at);
            self.marks.head += length;
            match written {
                Ok(()) => {}
                Err(error) if is_full(&error) => self.marks.tail = self.marks.head,
                Err(error) => return Err(error),
            }
            self.store_marks()?;
            bytes = rest;
        }
        Ok(())
    }

    /// Raises the tail over what the next `length` bytes will overwrite.
    fn make_room(&mut self, length: u64) -> io::Result<()> {
        let oldest = (self.marks.head + length).saturating_sub(self.ring);
        if oldest > self.marks.tail {
            self.marks.tail = oldest;
            self.store_marks()?;
        }
        Ok(())
    }

    /// Throws away what is in `pipe`, and everything before it: a ring has no holes.
    fn lose(&mut self, pipe: BorrowedFd<'_>) -> io::Result<u64> {
        let mut scrap = [0; 65536];
        let lost = rustix::io::read(pipe, &mut scrap)? as u64;
        self.marks.head += lost;
        self.marks.tail = self.marks.head;
        self.store_marks()?;
        Ok(lost)
    }

    fn store_marks(&self) -> io::Result<()> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.marks.head.to_le_bytes());
        bytes[8..].copy_from_slice(&self.marks.tail.to_le_bytes());
        self.file.write_all_at(&bytes, 8)
    }
}

fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Tells the end of an empty pipe from a pause.
fn ended(pipe: BorrowedFd<'_>) -> io::Result<u64> {
    use rustix::event::{PollFd, PollFlags};
    let mut poll = [PollFd::from_borrowed_fd(pipe, PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    let events = poll[0].revents();
    if events.contains(PollFlags::HUP) && !events.contains(PollFlags::IN) {
        return Ok(0);
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// The reading end; outlives the writer.
#[derive(Debug)]
pub(crate) struct Reader {
    file: File,
}

/// What a reader finds at an offset.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Bytes from there on.
    Data(Bytes),
    /// They are gone, up to here.
    Gone(u64),
    /// Nothing was written there yet.
    Nothing,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::open(path)? })
    }

    pub(crate) fn marks(&self) -> io::Result<Marks> {
        Ok(header(&self.file)?.marks)
    }

    pub(crate) fn read(&self, offset: u64) -> io::Result<Found> {
        let Header { marks, ring, .. } = header(&self.file)?;
        if offset < marks.tail {
            return Ok(Found::Gone(marks.tail));
        }
        if offset >= marks.head {
            return Ok(Found::Nothing);
        }
        let at = offset % ring;
        let length = (marks.head - offset).min(ring - at).min(CHUNK);
        let mut buffer = BytesMut::with_capacity(usize::try_from(length).unwrap_or(0));
        while (buffer.len() as u64) < length {
            let done = buffer.len() as u64;
            let spare = buffer.spare_capacity_mut();
            let room = spare.len().min(usize::try_from(length - done).unwrap_or(0));
            let (read, _) = rustix::io::pread(&self.file, &mut spare[..room], HEADER + at + done)?;
            if read.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let filled = read.len();
            // SAFETY: `pread` has just written these bytes of the spare capacity.
            unsafe { buffer.set_len(buffer.len() + filled) };
        }
        let tail = header(&self.file)?.marks.tail;
        Ok(if offset < tail { Found::Gone(tail) } else { Found::Data(buffer.freeze()) })
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
        while writer.fill(read.as_fd(), writer.room(false))? > 0 {}
        Ok(())
    }

    #[test]
    fn what_was_overwritten_is_told_as_gone_and_the_rest_is_read() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("stdout");
        create(&path, 4096)?;
        let mut writer = Writer::open(&path)?;
        let reader = Reader::open(&path)?;
        assert_eq!(reader.read(0)?, Found::Nothing);

        feed(&mut writer, b"hello")?;
        assert_eq!(reader.read(1)?, Found::Data(Bytes::from_static(b"ello")));

        let ring = 4096 + PIPE;
        let mut written = 5;
        while written < 2 * ring {
            feed(&mut writer, &[b'x'; 50_000])?;
            written += 50_000;
        }
        let Found::Gone(oldest) = reader.read(1)? else { panic!("not told as gone") };
        assert_eq!(oldest, written - ring);
        let mut offset = oldest;
        while let Found::Data(bytes) = reader.read(offset)? {
            assert!(bytes.iter().all(|byte| *byte == b'x'));
            offset += bytes.len() as u64;
        }
        assert_eq!(offset, written);
        Ok(())
    }

    #[test]
    fn what_is_pushed_is_read_around_the_end_of_the_ring() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("stdout");
        create(&path, 10)?;
        let (mut writer, reader) = (Writer::open(&path)?, Reader::open(&path)?);
        let ring = 10 + PIPE;
        let byte = |offset: u64| u8::try_from(offset % 251).unwrap_or(0);
        let all: Vec<u8> = (0..2 * ring + 7).map(byte).collect();
        // More than a ring at once, and in parts that end nowhere in particular.
        writer.push(&all[..1000])?;
        writer.push(&all[1000..usize::try_from(ring).unwrap_or(0) + 5000])?;
        writer.push(&all[usize::try_from(ring).unwrap_or(0) + 5000..])?;
        let Found::Gone(mut offset) = reader.read(0)? else { panic!("not told as gone") };
        assert_eq!(offset, ring + 7);
        while let Found::Data(bytes) = reader.read(offset)? {
            assert!((offset..).zip(&bytes).all(|(offset, found)| byte(offset) == *found));
            offset += bytes.len() as u64;
        }
        assert_eq!(offset, 2 * ring + 7);
        Ok(())
    }

    /// A small file system of its own, unmounted when dropped.
    struct Small(tempfile::TempDir);

    impl Small {
        /// `None` where this machine does not let us mount.
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

    impl Drop for Small {
        fn drop(&mut self) {
            rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).ok();
        }
    }

    #[test]
    fn what_finds_no_room_on_the_disk_is_told_as_gone_and_the_process_goes_on() -> io::Result<()> {
        let Some(small) = Small::new()? else { return Ok(()) };
        let (path, filler) = (small.0.path().join("stdout"), small.0.path().join("filler"));
        create(&path, 1 << 20)?;
        let (mut writer, reader) = (Writer::open(&path)?, Reader::open(&path)?);
        feed(&mut writer, b"before")?;
        assert_eq!(reader.read(0)?, Found::Data(Bytes::from_static(b"before")));

        let mut file = File::create(&filler)?;
        while io::Write::write_all(&mut file, &[0; 512]).is_ok() {}
        // More than fits into a pipe at a time, so somebody has to empty it for the process to go on.
        let mut written = 6;
        for _ in 0..8 {
            feed(&mut writer, &[b'x'; 50_000])?;
            written += 50_000;
        }
        assert_eq!(writer.head(), written, "every byte that was written counts");
        assert_eq!(reader.marks()?, Marks { head: written, tail: written });
        assert_eq!(reader.read(0)?, Found::Gone(written), "nothing is told that is not there");
        assert_eq!(reader.read(written)?, Found::Nothing);

        // Cut, not only removed: a process that another test starts at this moment may hold the file open too.
        file.set_len(0)?;
        feed(&mut writer, b"after")?;
        assert_eq!(reader.read(0)?, Found::Gone(written));
        assert_eq!(reader.read(written)?, Found::Data(Bytes::from_static(b"after")));
        Ok(())
    }

    #[test]
    fn a_writer_held_back_leaves_room_only_for_what_is_acknowledged() -> io::Result<()> {
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
