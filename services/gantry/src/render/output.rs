//! Destination of the output of a process: standard output and standard error, or events on
//! standard output.
//!
//! One thread per file writes, so a stalled reader delays only its own output. [`IN_FLIGHT`] bounds
//! the bytes that are received but not written. Beyond that, [`Sink::push`] waits, the call is not
//! read, and the process is slowed down.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TrySendError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::render::stdout::write_all;
use crate::render::tail::Tail;

/// Maximum of one output that waits to be written, in bytes.
const IN_FLIGHT: u64 = 4 << 20;
/// Maximum number of pieces of output that wait.
const QUEUE: usize = 1024;
/// Pause before a full queue is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Output stream of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputStream {
    Stdout,
    Stderr,
}

impl OutputStream {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// Standard output of `gantry` has no reader any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

enum Item {
    Output { which: OutputStream, offset: u64, data: Bytes, written: watch::Sender<u64> },
    Event(String),
}

/// Writer of events: one JSON object per line, in order.
pub(crate) struct Events {
    items: mpsc::SyncSender<Item>,
    failure: Failure,
    thread: JoinHandle<()>,
}

/// Error of writing to standard output, unless the cause is a missing reader.
type Failure = Arc<OnceLock<io::Error>>;

impl Events {
    pub(crate) fn start() -> Self {
        let (items, queue) = mpsc::sync_channel(QUEUE);
        let failure = Failure::default();
        let thread = std::thread::spawn({
            let failure = failure.clone();
            move || write_events(queue, &failure)
        });
        Self { items, failure, thread }
    }

    pub(crate) fn say(&self, event: &Value) {
        // This waits only while the reader stalls. It fails if standard output is closed, which the
        // sinks report.
        _ = self.items.send(Item::Event(event.to_string()));
    }

    pub(crate) fn finish(self) {
        drop(self.items);
        // A thread that panicked cannot write more.
        _ = self.thread.join();
    }
}

/// Sink for one output stream of a process.
pub(crate) struct Sink {
    which: OutputStream,
    items: mpsc::SyncSender<Item>,
    /// Offset of the next byte in the output.
    received: u64,
    missing: u64,
    /// Offset up to which the output was written, or [`CLOSED`].
    written: watch::Receiver<u64>,
    writing: watch::Sender<u64>,
    failure: Failure,
    /// Old output of which only the last lines are written.
    old: Option<OldOutput>,
}

/// Output that was written before this reader came.
struct OldOutput {
    tail: Tail,
    /// Offset at which it ends. `None`: not known yet.
    end: Option<u64>,
}

impl Sink {
    /// Makes a sink that copies to standard output or standard error. `unfinished` is set while the
    /// last line that goes to the same place as standard error has no end.
    pub(crate) fn raw(which: OutputStream, unfinished: &Arc<AtomicBool>) -> io::Result<Self> {
        let file = match which {
            OutputStream::Stdout => io::stdout().as_fd().try_clone_to_owned(),
            OutputStream::Stderr => io::stderr().as_fd().try_clone_to_owned(),
        }?;
        let unfinished = (which == OutputStream::Stderr || is_one_file()).then(|| unfinished.clone());
        Ok(Self::to_file(file, which, unfinished))
    }

    /// Makes a sink that writes events.
    pub(crate) fn events(which: OutputStream, events: &Events) -> Self {
        Self::new(which, events.items.clone(), events.failure.clone())
    }

    /// Makes a sink that copies to a file.
    pub(crate) fn to_file(file: OwnedFd, which: OutputStream, unfinished: Option<Arc<AtomicBool>>) -> Self {
        let (items, queue) = mpsc::sync_channel(QUEUE);
        let failure = Failure::default();
        std::thread::spawn({
            let failure = failure.clone();
            move || write_raw(file, which, queue, unfinished.as_deref(), &failure)
        });
        Self::new(which, items, failure)
    }

    fn new(which: OutputStream, items: mpsc::SyncSender<Item>, failure: Failure) -> Self {
        let (writing, written) = watch::channel(0);
        Self { which, items, received: 0, missing: 0, written, writing, failure, old: None }
    }

    /// Returns the error of writing, unless the cause is a missing reader.
    pub(crate) fn failure(&self) -> Option<&io::Error> {
        self.failure.get()
    }

    /// Returns the number of bytes that were lost before they were received.
    pub(crate) fn missing(&self) -> u64 {
        self.missing
    }

    /// Counts bytes as lost.
    pub(crate) fn miss(&mut self, bytes: u64) {
        self.missing += bytes;
    }

    /// Returns the offset of the next byte in the output.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Returns a receiver of the offset up to which the output was written.
    pub(crate) fn written(&self) -> watch::Receiver<u64> {
        self.written.clone()
    }

    /// Writes only the last lines of the output that exists already.
    pub(crate) fn keep_tail(&mut self, lines: usize) {
        self.old = Some(OldOutput { tail: Tail::new(lines), end: None });
    }

    /// Leaves out what comes before `offset`, because the caller does not want it.
    pub(crate) async fn start_at(&mut self, offset: u64) -> Result<(), Closed> {
        let offset = offset.max(self.received);
        if self.old.is_some() {
            self.received = offset;
            return Ok(());
        }
        self.write(offset, Bytes::new()).await.map(|_| ())
    }

    /// Records how much output existed when this reader came. Returns as [`Self::push`] does.
    pub(crate) async fn old_output_ends(&mut self, end: u64) -> Result<u64, Closed> {
        let Some(old) = &mut self.old else { return Ok(0) };
        // After a broken call, the first end counts.
        let end = *old.end.get_or_insert(end);
        if end <= self.received { self.write_tail().await } else { Ok(0) }
    }

    /// Accepts bytes at `offset`, and skips those that were accepted before. Returns the number of
    /// bytes that are missing before `offset`.
    pub(crate) async fn push(&mut self, offset: u64, mut data: Bytes) -> Result<u64, Closed> {
        let Some(old) = &mut self.old else { return self.write(offset, data).await };
        let missed = offset.saturating_sub(self.received);
        let known = usize::try_from(self.received.saturating_sub(offset)).unwrap_or(usize::MAX);
        if known >= data.len() && missed == 0 {
            return Ok(0);
        }
        let mut data = data.split_off(known.min(data.len()));
        let start = offset.max(self.received);
        let is_old = old.end.map_or(u64::MAX, |end| end.saturating_sub(start));
        let is_old = usize::try_from(is_old).unwrap_or(usize::MAX).min(data.len());
        let new = data.split_off(is_old);
        old.tail.push(missed, &data);
        self.received = start + data.len() as u64;
        if old.end.is_none_or(|end| self.received < end) {
            return Ok(0);
        }
        let missed = self.write_tail().await?;
        self.write(self.received, new).await.map(|more| missed + more)
    }

    /// Writes the kept lines of the old output.
    pub(crate) async fn write_tail(&mut self) -> Result<u64, Closed> {
        let Some(old) = self.old.take() else { return Ok(0) };
        let (lines, missed) = old.tail.finish();
        // The lines are the end of what was received.
        self.received -= lines.len() as u64;
        self.write(self.received, lines).await.map(|_| missed)
    }

    async fn write(&mut self, offset: u64, mut data: Bytes) -> Result<u64, Closed> {
        let missed = offset.saturating_sub(self.received);
        let known = usize::try_from(self.received.saturating_sub(offset)).unwrap_or(usize::MAX);
        if known >= data.len() && !data.is_empty() {
            return Ok(0);
        }
        let data = data.split_off(known.min(data.len()));
        let offset = offset.max(self.received);
        self.received = offset + data.len() as u64;
        let room = self.received.saturating_sub(IN_FLIGHT);
        let mut item = Item::Output { which: self.which, offset, data, written: self.writing.clone() };
        loop {
            item = match self.items.try_send(item) {
                Ok(()) => break,
                Err(TrySendError::Full(item)) => item,
                Err(TrySendError::Disconnected(_)) => return Err(Closed),
            };
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
        self.reach(room).await?;
        Ok(missed)
    }

    /// Skips to `offset`. Returns the number of skipped bytes.
    pub(crate) async fn skip(&mut self, offset: u64) -> Result<u64, Closed> {
        self.push(offset.max(self.received), Bytes::new()).await
    }

    /// Starts again at offset 0, for another process.
    pub(crate) async fn restart(&mut self) -> Result<(), Closed> {
        self.flush().await?;
        (self.received, self.missing) = (0, 0);
        self.writing.send_replace(0);
        Ok(())
    }

    /// Waits until everything is written.
    pub(crate) async fn flush(&mut self) -> Result<(), Closed> {
        self.write_tail().await?;
        self.reach(self.received).await
    }

    async fn reach(&mut self, offset: u64) -> Result<(), Closed> {
        let reached = self.written.wait_for(|&written| written >= offset || written == CLOSED).await;
        match reached.as_deref() {
            Ok(&CLOSED) | Err(_) => Err(Closed),
            Ok(_) => Ok(()),
        }
    }
}

/// Offset that means that standard output has no reader any more. No output is that long.
pub(crate) const CLOSED: u64 = u64::MAX;

/// Returns whether standard output and standard error go to the same file.
fn is_one_file() -> bool {
    let (Ok(stdout), Ok(stderr)) = (rustix::fs::fstat(io::stdout()), rustix::fs::fstat(io::stderr())) else {
        return false;
    };
    (stdout.st_dev, stdout.st_ino) == (stderr.st_dev, stderr.st_ino)
}

fn note_failure(failure: &Failure, error: io::Error) {
    if error.kind() != io::ErrorKind::BrokenPipe {
        // The first error is kept.
        _ = failure.set(error);
    }
}

fn write_raw(
    file: OwnedFd,
    which: OutputStream,
    queue: mpsc::Receiver<Item>,
    unfinished: Option<&AtomicBool>,
    failure: &Failure,
) {
    let mut file = File::from(file);
    let mut lost = false;
    for item in queue {
        let Item::Output { offset, data, written, .. } = item else { continue };
        if let (Some(unfinished), Some(last)) = (unfinished, data.last()) {
            unfinished.store(*last != b'\n', Ordering::Relaxed);
        }
        if !lost && let Err(error) = write_all(&mut file, &data) {
            if which == OutputStream::Stdout {
                note_failure(failure, error);
                written.send_replace(CLOSED);
                return;
            }
            // The process runs on without standard error, as it would in a shell that closed it.
            lost = true;
        }
        written.send_replace(offset + data.len() as u64);
    }
}

fn write_events(queue: mpsc::Receiver<Item>, failure: &Failure) {
    let Ok(stdout) = io::stdout().as_fd().try_clone_to_owned() else { return };
    let mut file = File::from(stdout);
    let mut closed = false;
    for item in queue {
        let (mut line, progress) = match item {
            Item::Event(line) => (line, None),
            Item::Output { which, offset, data, written } => {
                let end = offset + data.len() as u64;
                if data.is_empty() {
                    written.send_replace(end);
                    continue;
                }
                let line = json!({
                    "event": "output",
                    "stream": which.name(),
                    "offset": offset,
                    "data": STANDARD.encode(&data),
                });
                (line.to_string(), Some((written, end)))
            }
        };
        line.push('\n');
        if !closed && let Err(error) = write_all(&mut file, line.as_bytes()) {
            note_failure(failure, error);
            closed = true;
        }
        if let Some((written, end)) = progress {
            written.send_replace(if closed { CLOSED } else { end });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[tokio::test]
    async fn full_disk_differs_from_missing_reader() {
        let full = File::options().write(true).open("/dev/full").expect("there");
        let mut sink = Sink::to_file(full.into(), OutputStream::Stdout, None);
        let pushed = sink.push(0, Bytes::from_static(b"x")).await;
        assert!(pushed.is_err() || sink.flush().await.is_err());
        assert_eq!(sink.failure().map(io::Error::kind), Some(io::ErrorKind::StorageFull));

        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let mut sink = Sink::to_file(writer.into(), OutputStream::Stdout, None);
        let pushed = sink.push(0, Bytes::from_static(b"x")).await;
        assert!(pushed.is_err() || sink.flush().await.is_err());
        assert!(sink.failure().is_none());
    }

    #[tokio::test]
    async fn unfinished_line_is_detected() {
        let null = || File::create("/dev/null").expect("there").into();
        let unfinished = Arc::new(AtomicBool::new(false));
        let mut sink = Sink::to_file(null(), OutputStream::Stdout, Some(unfinished.clone()));
        for (offset, data, expected) in [(0, "a", true), (1, "b\n", false), (3, "c", true)] {
            sink.push(offset, Bytes::from_static(data.as_bytes())).await.expect("open");
            sink.flush().await.expect("open");
            assert_eq!(unfinished.load(Ordering::Relaxed), expected, "{data:?}");
        }
    }

    #[tokio::test]
    async fn repeated_bytes_are_dropped_and_gaps_counted() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), OutputStream::Stdout, None);
        assert_eq!(sink.push(0, Bytes::from_static(b"hello ")).await, Ok(0));
        assert_eq!(sink.push(3, Bytes::from_static(b"lo wor")).await, Ok(0));
        assert_eq!(sink.push(2, Bytes::from_static(b"llo")).await, Ok(0));
        assert_eq!(sink.push(12, Bytes::from_static(b"!")).await, Ok(3));
        assert_eq!(sink.received(), 13);
        sink.flush().await.expect("written");
        drop(sink);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("read");
        assert_eq!(text, "hello wor!");
    }

    #[tokio::test]
    async fn stalled_reader_stops_sink() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), OutputStream::Stdout, None);
        let piece = Bytes::from(vec![7; 1 << 20]);
        let mut pushed = 0_u64;
        while tokio::time::timeout(Duration::from_millis(200), sink.push(pushed, piece.clone())).await.is_ok()
        {
            pushed += 1 << 20;
            assert!(pushed <= IN_FLIGHT + (2 << 20), "nothing holds it back");
        }
        let drained = std::thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).map(|_| all.len())
        });
        sink.flush().await.expect("written");
        let received = sink.received();
        drop(sink);
        assert_eq!(drained.join().expect("ended").expect("read") as u64, received);
    }

    #[tokio::test]
    async fn only_tail_of_old_output_is_written() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), OutputStream::Stdout, None);
        sink.keep_tail(2);
        assert_eq!(sink.old_output_ends(10).await, Ok(0));
        let push = async |sink: &mut Sink, offset, text: &'static str| {
            sink.push(offset, Bytes::from_static(text.as_bytes())).await
        };
        assert_eq!(push(&mut sink, 0, "a\nb\nc\n").await, Ok(0));
        assert_eq!(sink.received(), 6, "a broken call is resumed here");
        assert_eq!(sink.old_output_ends(50).await, Ok(0), "another call changes nothing");
        assert_eq!(push(&mut sink, 4, "c\nd\ne\nf\ng\n").await, Ok(0));
        assert_eq!(push(&mut sink, 14, "h\n").await, Ok(0));
        sink.flush().await.expect("open");
        assert_eq!(sink.received(), 16);
        drop(sink);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("read");
        assert_eq!(text, "d\ne\nf\ng\nh\n");
    }

    #[tokio::test]
    async fn tail_is_written_when_call_breaks() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), OutputStream::Stdout, None);
        sink.keep_tail(1);
        assert_eq!(sink.push(5, Bytes::from_static(b"a\nb")).await, Ok(0), "5 bytes are lost");
        assert_eq!(sink.write_tail().await, Ok(0), "but not from the last line");
        sink.flush().await.expect("open");
        drop(sink);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("read");
        assert_eq!(text, "b");
    }

    #[tokio::test]
    async fn closed_stdout_fails_and_closed_stderr_does_not() {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let mut stdout =
            Sink::to_file(writer.try_clone().expect("another").into(), OutputStream::Stdout, None);
        let mut stderr = Sink::to_file(writer.into(), OutputStream::Stderr, None);
        assert_eq!(
            match stdout.push(0, Bytes::from_static(b"x")).await {
                Ok(_) => stdout.flush().await,
                Err(closed) => Err(closed),
            },
            Err(Closed)
        );
        assert_eq!(stderr.push(0, Bytes::from_static(b"x")).await, Ok(0));
        assert_eq!(stderr.flush().await, Ok(()));
    }
}
