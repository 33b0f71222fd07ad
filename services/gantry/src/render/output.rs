//! Where the output of a process goes: our standard output and standard error, or events on standard output.
//!
//! One thread for each file writes, so that a reader that stalls holds up nothing but its own output. What was received and is not
//! written yet is bounded by [`IN_FLIGHT`]; beyond it [`Sink::push`] waits, the call is not read, and the process is held back.

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

/// How much of one output may wait to be written.
const IN_FLIGHT: u64 = 4 << 20;
/// How many pieces of output may wait, however small.
const QUEUE: usize = 1024;
/// How long a full queue is left to its thread before it is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Which output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Stdout,
    Stderr,
}

impl Which {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// Whoever read our standard output has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Closed;

enum Item {
    Output { which: Which, offset: u64, data: Bytes, written: watch::Sender<u64> },
    Event(String),
}

/// Writes events, one JSON object a line, in the order in which they are said.
pub(crate) struct Events {
    items: mpsc::SyncSender<Item>,
    failure: Failure,
    thread: JoinHandle<()>,
}

/// Why standard output cannot be written, once it cannot, unless its reader has gone.
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
        // Waits only when the reader stalls. When it fails, standard output is closed; whoever follows the output learns it there.
        _ = self.items.send(Item::Event(event.to_string()));
    }

    pub(crate) fn finish(self) {
        drop(self.items);
        // A thread that panicked has written what it could.
        _ = self.thread.join();
    }
}

/// One output of a process.
pub(crate) struct Sink {
    which: Which,
    items: mpsc::SyncSender<Item>,
    /// Where the next byte stands in the whole of the output.
    received: u64,
    missing: u64,
    /// Up to where it has been written. Closed once nobody can read any more.
    written: watch::Receiver<u64>,
    writing: watch::Sender<u64>,
    failure: Failure,
}

impl Sink {
    /// Copies to our own standard output or standard error. `unfinished` is told whether the last line of what goes to the same place as
    /// standard error has no end yet.
    pub(crate) fn raw(which: Which, unfinished: &Arc<AtomicBool>) -> io::Result<Self> {
        let file = match which {
            Which::Stdout => io::stdout().as_fd().try_clone_to_owned(),
            Which::Stderr => io::stderr().as_fd().try_clone_to_owned(),
        }?;
        let unfinished = (which == Which::Stderr || is_one_file()).then(|| unfinished.clone());
        Ok(Self::to_file(file, which, unfinished))
    }

    /// Copies to events.
    pub(crate) fn events(which: Which, events: &Events) -> Self {
        Self::new(which, events.items.clone(), events.failure.clone())
    }

    /// Copies to a file.
    pub(crate) fn to_file(file: OwnedFd, which: Which, unfinished: Option<Arc<AtomicBool>>) -> Self {
        let (items, queue) = mpsc::sync_channel(QUEUE);
        let failure = Failure::default();
        std::thread::spawn({
            let failure = failure.clone();
            move || write_raw(file, which, queue, unfinished.as_deref(), &failure)
        });
        Self::new(which, items, failure)
    }

    fn new(which: Which, items: mpsc::SyncSender<Item>, failure: Failure) -> Self {
        let (writing, written) = watch::channel(0);
        Self { which, items, received: 0, missing: 0, written, writing, failure }
    }

    /// Why it cannot be written, if it is for something else than that its reader has gone.
    pub(crate) fn failure(&self) -> Option<&io::Error> {
        self.failure.get()
    }

    /// How many bytes of this process's output were lost before they came.
    pub(crate) fn missing(&self) -> u64 {
        self.missing
    }

    /// Counts bytes as lost.
    pub(crate) fn miss(&mut self, bytes: u64) {
        self.missing += bytes;
    }

    /// Where the next byte stands in the whole of the output.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// Up to where it has been written.
    pub(crate) fn written(&self) -> watch::Receiver<u64> {
        self.written.clone()
    }

    /// Takes bytes that stand at `offset`; those that were taken before are skipped. Answers how many were missed before them.
    pub(crate) async fn push(&mut self, offset: u64, mut data: Bytes) -> Result<u64, Closed> {
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
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        self.reach(room).await?;
        Ok(missed)
    }

    /// Skips to `offset`.
    pub(crate) async fn skip(&mut self, offset: u64) -> Result<u64, Closed> {
        self.push(offset.max(self.received), Bytes::new()).await
    }

    /// Starts over: another process speaks.
    pub(crate) async fn restart(&mut self) -> Result<(), Closed> {
        self.flush().await?;
        (self.received, self.missing) = (0, 0);
        self.writing.send_replace(0);
        Ok(())
    }

    /// Waits until everything is written.
    pub(crate) async fn flush(&mut self) -> Result<(), Closed> {
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

/// Said instead of an offset once nobody can read any more. No output is that long.
pub(crate) const CLOSED: u64 = u64::MAX;

/// Whether standard output and standard error go to the same place.
fn is_one_file() -> bool {
    let (Ok(stdout), Ok(stderr)) = (rustix::fs::fstat(io::stdout()), rustix::fs::fstat(io::stderr())) else {
        return false;
    };
    (stdout.st_dev, stdout.st_ino) == (stderr.st_dev, stderr.st_ino)
}

fn note_failure(failure: &Failure, error: io::Error) {
    if error.kind() != io::ErrorKind::BrokenPipe {
        // The first one is the reason.
        _ = failure.set(error);
    }
}

fn write_raw(
    file: OwnedFd,
    which: Which,
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
            if which == Which::Stdout {
                note_failure(failure, error);
                written.send_replace(CLOSED);
                return;
            }
            // Without standard error the process goes on, as it would in a shell that closed it.
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
    async fn a_full_disk_is_told_from_a_reader_that_has_gone() {
        let full = File::options().write(true).open("/dev/full").expect("there");
        let mut sink = Sink::to_file(full.into(), Which::Stdout, None);
        let pushed = sink.push(0, Bytes::from_static(b"x")).await;
        assert!(pushed.is_err() || sink.flush().await.is_err());
        assert_eq!(sink.failure().map(io::Error::kind), Some(io::ErrorKind::StorageFull));

        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let mut sink = Sink::to_file(writer.into(), Which::Stdout, None);
        let pushed = sink.push(0, Bytes::from_static(b"x")).await;
        assert!(pushed.is_err() || sink.flush().await.is_err());
        assert!(sink.failure().is_none());
    }

    #[tokio::test]
    async fn it_is_known_whether_the_last_line_has_an_end() {
        let null = || File::create("/dev/null").expect("there").into();
        let unfinished = Arc::new(AtomicBool::new(false));
        let mut sink = Sink::to_file(null(), Which::Stdout, Some(unfinished.clone()));
        for (offset, data, expected) in [(0, "a", true), (1, "b\n", false), (3, "c", true)] {
            sink.push(offset, Bytes::from_static(data.as_bytes())).await.expect("open");
            sink.flush().await.expect("open");
            assert_eq!(unfinished.load(Ordering::Relaxed), expected, "{data:?}");
        }
    }

    #[tokio::test]
    async fn bytes_that_come_twice_are_written_once_and_gaps_are_told() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), Which::Stdout, None);
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
    async fn a_reader_that_stalls_holds_the_output_back() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), Which::Stdout, None);
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
    async fn a_closed_standard_output_is_told_and_a_closed_standard_error_is_not() {
        let (reader, writer) = io::pipe().expect("a pipe");
        drop(reader);
        let mut stdout = Sink::to_file(writer.try_clone().expect("another").into(), Which::Stdout, None);
        let mut stderr = Sink::to_file(writer.into(), Which::Stderr, None);
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
