//! Where the output of a process goes: our standard output and standard error, or events on standard output.
//!
//! One thread for each file writes, so that a reader that stalls holds up nothing but its own output. What was received and is not
//! written yet is bounded by [`IN_FLIGHT`]; beyond it [`Sink::push`] waits, the call is not read, and the process is held back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{self, TrySendError};
use std::thread::JoinHandle;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::stdout::write_all;

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
    thread: JoinHandle<()>,
}

impl Events {
    pub(crate) fn start() -> Self {
        let (items, queue) = mpsc::sync_channel(QUEUE);
        let thread = std::thread::spawn(move || write_events(queue));
        Self { items, thread }
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
    /// Up to where it has been written. Closed once nobody can read any more.
    written: watch::Receiver<u64>,
    writing: watch::Sender<u64>,
}

impl Sink {
    /// Copies to our own standard output or standard error.
    pub(crate) fn raw(which: Which) -> io::Result<Self> {
        let file = match which {
            Which::Stdout => io::stdout().as_fd().try_clone_to_owned(),
            Which::Stderr => io::stderr().as_fd().try_clone_to_owned(),
        }?;
        let (items, queue) = mpsc::sync_channel(QUEUE);
        std::thread::spawn(move || write_raw(file, which, queue));
        Ok(Self::new(which, items))
    }

    /// Copies to events.
    pub(crate) fn events(which: Which, events: &Events) -> Self {
        Self::new(which, events.items.clone())
    }

    /// Copies to a file.
    #[cfg(test)]
    pub(crate) fn to_file(file: OwnedFd, which: Which) -> Self {
        let (items, queue) = mpsc::sync_channel(QUEUE);
        std::thread::spawn(move || write_raw(file, which, queue));
        Self::new(which, items)
    }

    fn new(which: Which, items: mpsc::SyncSender<Item>) -> Self {
        let (writing, written) = watch::channel(0);
        Self { which, items, received: 0, written, writing }
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
        self.received = 0;
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

fn write_raw(file: OwnedFd, which: Which, queue: mpsc::Receiver<Item>) {
    let mut file = File::from(file);
    let mut lost = false;
    for item in queue {
        let Item::Output { offset, data, written, .. } = item else { continue };
        if !lost && write_all(&mut file, &data).is_err() {
            if which == Which::Stdout {
                written.send_replace(CLOSED);
                return;
            }
            // Without standard error the process goes on, as it would in a shell that closed it.
            lost = true;
        }
        written.send_replace(offset + data.len() as u64);
    }
}

fn write_events(queue: mpsc::Receiver<Item>) {
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
        closed = closed || write_all(&mut file, line.as_bytes()).is_err();
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
    async fn bytes_that_come_twice_are_written_once_and_gaps_are_told() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let mut sink = Sink::to_file(writer.into(), Which::Stdout);
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
        let mut sink = Sink::to_file(writer.into(), Which::Stdout);
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
        let mut stdout = Sink::to_file(writer.try_clone().expect("another").into(), Which::Stdout);
        let mut stderr = Sink::to_file(writer.into(), Which::Stderr);
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
