//! The protocol between a gateway and a supervisor, over a Unix socket.
//!
//! Every message of a gateway is a request with exactly one answer, and a connection carries one
//! request at a time. So the supervisor sends nothing unrequested, and a disconnected gateway
//! leaves nothing behind. A gateway waits for changes with [`Request::Watch`], which is answered as
//! soon as the progress differs from a given one.
//!
//! Both programs run on the same machine, but may have different versions. New kinds of messages
//! may be added, and old ones must stay.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use runtime::TerminalSize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Largest input in one request, in bytes.
pub(super) const MAX_STDIN: usize = 1 << 20;
/// Largest request, in bytes.
pub(super) const MAX_FRAME: usize = MAX_STDIN + 64;
/// Size of an answer, in bytes.
pub(super) const ANSWER: usize = 26;

/// Progress of a process, as seen by its supervisor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) stdout: u64,
    pub(super) stderr: u64,
    pub(super) stdin_taken: u64,
    pub(super) phase: Phase,
}

/// The phase of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Starting,
    Started,
    /// Ended. The exit record has the details.
    Ended,
}

/// A request of a gateway to a supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    /// Answered when the progress differs from this one.
    Watch(Progress),
    /// Answered when all of the input was accepted.
    Stdin {
        offset: u64,
        data: bytes::Bytes,
    },
    CloseStdin,
    Signal(u8),
    Acknowledge {
        stdout: u64,
        stderr: u64,
    },
    Detach,
    /// Sends TERM, and kills all processes after this time.
    Stop(Duration),
    /// Records the time of a contact, by `CLOCK_BOOTTIME`, and for how long the process may
    /// continue from then on.
    Contact {
        sent: Duration,
        stop_after: Duration,
    },
    /// Answered at once.
    GetProgress,
    /// Answered when the process has ended.
    AwaitEnd,
    /// Kills all processes, with this reason: the disk must stay usable.
    EndForDisk(String),
    /// Kills all processes, with this reason: the container has exceeded its limit of the disk.
    EndForDiskLimit(String),
    /// Kills all processes, and reports that the container ran out of memory.
    EndForMemory,
    /// Changes the size of the terminal. Ignored if the process has none.
    Resize(TerminalSize),
}

/// An answer of a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Progress(Progress),
    /// The input leaves a gap after this offset.
    StdinGap(u64),
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Reads fixed-size fields from the front of a message.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn short(&mut self) -> Option<u16> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_le_bytes(*first))
    }

    fn number(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*first))
    }

    fn progress(&mut self) -> Option<Progress> {
        let (stdout, stderr, stdin_taken) = (self.number()?, self.number()?, self.number()?);
        let phase = match self.byte()? {
            0 => Phase::Starting,
            1 => Phase::Started,
            _ => Phase::Ended,
        };
        Some(Progress { stdout, stderr, stdin_taken, phase })
    }
}

fn put_progress(out: &mut Vec<u8>, progress: &Progress) {
    for number in [progress.stdout, progress.stderr, progress.stdin_taken] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.push(match progress.phase {
        Phase::Starting => 0,
        Phase::Started => 1,
        Phase::Ended => 2,
    });
}

impl Request {
    /// Encodes the request with its length in front.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; 4];
        match self {
            Self::Watch(seen) => {
                out.push(1);
                put_progress(&mut out, seen);
            }
            Self::Stdin { offset, data } => {
                out.push(2);
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(data);
            }
            Self::CloseStdin => out.push(3),
            Self::Signal(number) => out.extend_from_slice(&[4, *number]),
            Self::Acknowledge { stdout, stderr } => {
                out.push(5);
                out.extend_from_slice(&stdout.to_le_bytes());
                out.extend_from_slice(&stderr.to_le_bytes());
            }
            Self::Detach => out.push(6),
            Self::Stop(grace) => {
                out.push(7);
                out.extend_from_slice(&nanoseconds(*grace).to_le_bytes());
            }
            Self::Contact { sent, stop_after } => {
                out.push(8);
                out.extend_from_slice(&nanoseconds(*sent).to_le_bytes());
                out.extend_from_slice(&nanoseconds(*stop_after).to_le_bytes());
            }
            Self::GetProgress => out.push(9),
            Self::AwaitEnd => out.push(10),
            Self::EndForDisk(why) => {
                out.push(11);
                out.extend_from_slice(why.as_bytes());
            }
            Self::EndForMemory => out.push(12),
            Self::EndForDiskLimit(why) => {
                out.push(14);
                out.extend_from_slice(why.as_bytes());
            }
            Self::Resize(TerminalSize { columns, rows }) => {
                out.push(13);
                out.extend_from_slice(&columns.to_le_bytes());
                out.extend_from_slice(&rows.to_le_bytes());
            }
        }
        let length = u32::try_from(out.len() - 4).unwrap_or(u32::MAX);
        out[..4].copy_from_slice(&length.to_le_bytes());
        out
    }

    /// Decodes a message without its length. `None`: the message is invalid.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let mut fields = Fields(message);
        Some(match fields.byte()? {
            1 => Self::Watch(fields.progress()?),
            2 => {
                let offset = fields.number()?;
                Self::Stdin { offset, data: bytes::Bytes::copy_from_slice(fields.0) }
            }
            3 => Self::CloseStdin,
            4 => Self::Signal(fields.byte()?),
            5 => Self::Acknowledge { stdout: fields.number()?, stderr: fields.number()? },
            6 => Self::Detach,
            7 => Self::Stop(Duration::from_nanos(fields.number()?)),
            8 => {
                let sent = Duration::from_nanos(fields.number()?);
                Self::Contact { sent, stop_after: Duration::from_nanos(fields.number()?) }
            }
            9 => Self::GetProgress,
            10 => Self::AwaitEnd,
            11 => Self::EndForDisk(String::from_utf8_lossy(fields.0).into_owned()),
            14 => Self::EndForDiskLimit(String::from_utf8_lossy(fields.0).into_owned()),
            12 => Self::EndForMemory,
            13 => Self::Resize(TerminalSize { columns: fields.short()?, rows: fields.short()? }),
            _ => return None,
        })
    }
}

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(ANSWER);
        match self {
            Self::Progress(progress) => {
                out.push(0);
                put_progress(&mut out, progress);
            }
            Self::StdinGap(limit) => {
                out.push(1);
                put_progress(&mut out, &Progress { stdin_taken: *limit, ..Progress::default() });
            }
        }
        out
    }

    fn decode(message: &[u8]) -> Option<Self> {
        let mut fields = Fields(message);
        Some(match fields.byte()? {
            0 => Self::Progress(fields.progress()?),
            1 => Self::StdinGap(fields.progress()?.stdin_taken),
            _ => return None,
        })
    }
}

/// The directory of the control sockets. It is held open, because the path of a Unix socket is
/// limited to 107 bytes, and that of the directory may be longer.
#[derive(Debug)]
pub(super) struct Sockets {
    path: PathBuf,
    directory: OwnedFd,
}

impl Sockets {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { path: path.to_owned(), directory })
    }

    /// The directory of the sockets. Each state directory has its own.
    pub(super) fn directory(&self) -> &Path {
        &self.path
    }

    /// The real path of a socket.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A short path of a socket, valid in this process.
    fn short_path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.directory.as_raw_fd()))
    }

    /// Listens on a socket. Fails if the socket exists, because it may belong to a runtime that has
    /// taken the state directory over.
    pub(super) fn listen(&self, name: &str) -> io::Result<std::os::unix::net::UnixListener> {
        std::os::unix::net::UnixListener::bind(self.short_path(name))
    }

    /// Connects to a socket. Fails if no process listens on it.
    pub(super) async fn connect(&self, name: &str) -> io::Result<Connection> {
        Ok(Connection { stream: UnixStream::connect(self.short_path(name)).await? })
    }
}

/// A gateway's connection to a supervisor.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Sends a request, and waits for the answer. Not cancel safe: after a cancelled request the
    /// connection must be dropped.
    pub(super) async fn request(&mut self, request: &Request) -> io::Result<Answer> {
        self.stream.write_all(&request.encode()).await?;
        let mut answer = [0; ANSWER];
        self.stream.read_exact(&mut answer).await?;
        Answer::decode(&answer).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sends a request whose answer is the progress.
    pub(super) async fn progress(&mut self, request: &Request) -> io::Result<Progress> {
        match self.request(request).await? {
            Answer::Progress(progress) => Ok(progress),
            Answer::StdinGap(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Waits until the supervisor has closed the connection, which it does by exiting.
    pub(super) async fn closed(mut self) {
        let mut scrap = [0; 64];
        while matches!(self.stream.read(&mut scrap).await, Ok(1..)) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_and_answer_encoding_round_trips() {
        let progress = Progress { stdout: 1, stderr: u64::MAX, stdin_taken: 3, phase: Phase::Ended };
        let requests = [
            Request::Watch(progress),
            Request::Stdin { offset: 7, data: bytes::Bytes::from_static(b"text") },
            Request::CloseStdin,
            Request::Signal(15),
            Request::Acknowledge { stdout: 1, stderr: 2 },
            Request::Detach,
            Request::Stop(Duration::from_millis(1500)),
            Request::Contact { sent: Duration::from_secs(1), stop_after: Duration::from_secs(600) },
            Request::GetProgress,
            Request::AwaitEnd,
            Request::EndForDisk("full".to_owned()),
            Request::EndForDiskLimit("too much".to_owned()),
            Request::EndForMemory,
            Request::Resize(TerminalSize { columns: 80, rows: 24 }),
        ];
        for request in requests {
            assert_eq!(Request::decode(&request.encode()[4..]), Some(request));
        }
        for answer in [Answer::Progress(progress), Answer::StdinGap(9)] {
            assert_eq!(answer.encode().len(), ANSWER);
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(Request::decode(&[]), None);
        assert_eq!(Request::decode(&[1, 2]), None);
        assert_eq!(Request::decode(&[200]), None);
    }
}
