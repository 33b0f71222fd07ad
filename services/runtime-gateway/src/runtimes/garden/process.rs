//! State, output and input of a process on a Garden worker.
//!
//! The gateway reads output from the worker without pause, because a Garden server drops output
//! that is not fetched, and never blocks a process. Offsets count the bytes that this gateway has
//! received. If it may have missed some bytes (it was not attached, or the connection broke), the
//! output has a *gap* of unknown size. Readers receive a gap as [`ProcessEvent::Truncated`] with
//! equal `from` and `to`.
//!
//! ```text
//! <state directory>/processes/<id>/stdout stderr   spools
//!                                 /gaps            a line for each gap: the output and the offset
//!                                 /reader          the owner of the spools, see `output_offsets`
//! ```

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use concourse::garden::{Control, Signal, WindowSize};
use domain::workload::FailureReason;
use domain::{ContainerHandle, ProcessId};
use futures::stream;
use runtime::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessState, RuntimeError,
    TerminalSize,
};
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::runtimes::output_spool::{self, ReadResult, Reader};
use crate::util::blocking::blocking;

use super::{Backend, Worker, properties};

const NAMES: [&str; 2] = ["stdout", "stderr"];
const GAPS: &str = "gaps";
/// Largest message of standard input, in bytes.
const MAX_STDIN: usize = 32 << 10;

/// The phase of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// No request was sent yet.
    Intended,
    /// `Run` was sent, or the process of an earlier gateway is being queried.
    Starting,
    Started,
    Ended(Ended),
    /// The container was destroyed.
    Gone,
}

/// State whose changes readers wait for.
#[derive(Debug, Clone)]
pub(super) struct Progress {
    pub(super) phase: Phase,
    /// Bytes that were received of each output.
    pub(super) heads: [u64; 2],
    /// Offsets of the gaps of each output.
    pub(super) gaps: [Vec<u64>; 2],
    pub(super) stdin_taken: u64,
}

/// State of the connection for standard input.
#[derive(Debug)]
pub(super) enum InputLink {
    /// No attachment is open. The writer must wait.
    Down,
    /// Input is sent to the worker.
    Up(Control),
    /// The process has no input, or its input is closed.
    Closed,
    /// The connection broke while the process ran, and input in transit is lost.
    Broken,
}

#[derive(Debug)]
pub(super) struct Stdin {
    pub(super) line: InputLink,
    /// The start of a character whose remaining bytes have not arrived.
    partial: Vec<u8>,
}

/// A process of a container.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) id: ProcessId,
    pub(super) container: ContainerHandle,
    pub(super) team: String,
    dir: PathBuf,
    /// First offset of this gateway. Earlier bytes were read by another gateway, or are lost.
    base: u64,
    pub(super) spools: [Arc<Reader>; 2],
    pub(super) seen: watch::Sender<Progress>,
    pub(super) stdin: Arc<tokio::sync::Mutex<Stdin>>,
    /// Wakes tasks that wait for the connection.
    pub(super) line_changed: watch::Sender<()>,
    pub(super) terminal: bool,
    /// Whether the gateway itself sends the input, and discards that of attached clients.
    pub(super) is_inline: bool,
    /// Whether this is a further process, beside the main process.
    pub(super) is_further: bool,
    /// Whether a stop was requested.
    pub(super) stopped: AtomicBool,
    /// When the process will be killed, after a stop was requested.
    pub(super) kill_at: watch::Sender<Option<Instant>>,
    /// Cancelled when another gateway reads the process. All state here is then invalid.
    pub(super) term: CancellationToken,
}

/// State of a process when this gateway begins to follow it.
pub(super) struct InitialState {
    pub(super) id: ProcessId,
    pub(super) container: ContainerHandle,
    pub(super) team: String,
    pub(super) terminal: bool,
    pub(super) is_inline: bool,
    pub(super) is_further: bool,
    /// Whether standard input is closed.
    pub(super) closed: bool,
    pub(super) stopped: bool,
    pub(super) phase: Phase,
    /// Spool size, in bytes.
    pub(super) spool_bytes: u64,
    /// First offset of the output.
    pub(super) base: u64,
    /// The term in which the state is valid, which began before the query.
    pub(super) term: CancellationToken,
}

/// The directory for the output of a process.
pub(super) fn directory(state_dir: &Path, process: ProcessId) -> PathBuf {
    state_dir.join("processes").join(process.to_string())
}

impl Process {
    /// Opens or creates the spools. Blocks on the disk.
    pub(super) fn open(state_dir: &Path, known: InitialState) -> Result<Arc<Self>, RuntimeError> {
        let dir = directory(state_dir, known.id);
        let failed = |error| RuntimeError::io(format!("open {}", dir.display()), error);
        std::fs::create_dir_all(&dir).map_err(failed)?;
        let open = |name: &str| {
            let path = dir.join(name);
            let opened = Reader::open(&path).and_then(|reader| Ok((reader.marks()?, reader)));
            match opened {
                Ok((marks, reader)) => Ok((reader, marks.head)),
                // The spool does not exist, or its creation was interrupted.
                Err(_) => {
                    output_spool::create_at(&path, known.spool_bytes, known.base)?;
                    Ok((Reader::open(&path)?, known.base))
                }
            }
        };
        let [(stdout, out), (stderr, err)] =
            [open(NAMES[0]).map_err(failed)?, open(NAMES[1]).map_err(failed)?];
        let line = if known.closed { InputLink::Closed } else { InputLink::Down };
        let seen = Progress { phase: known.phase, heads: [out, err], gaps: read_gaps(&dir), stdin_taken: 0 };
        Ok(Arc::new(Self {
            id: known.id,
            container: known.container,
            team: known.team,
            spools: [Arc::new(stdout), Arc::new(stderr)],
            seen: watch::Sender::new(seen),
            stdin: Arc::new(tokio::sync::Mutex::new(Stdin { line, partial: Vec::new() })),
            line_changed: watch::Sender::new(()),
            terminal: known.terminal,
            is_inline: known.is_inline,
            is_further: known.is_further,
            stopped: AtomicBool::new(known.stopped),
            kill_at: watch::Sender::new(None),
            base: known.base,
            term: known.term,
            dir,
        }))
    }

    pub(super) fn writer(&self, which: usize) -> io::Result<output_spool::Writer> {
        output_spool::Writer::open(&self.dir.join(NAMES[which]))
    }

    pub(super) fn phase(&self) -> Phase {
        self.seen.borrow().phase.clone()
    }

    /// Changes the phase, but never from an end to another phase.
    pub(super) fn enter(&self, phase: Phase) {
        self.seen.send_if_modified(|seen| {
            let on = !matches!(seen.phase, Phase::Ended(_) | Phase::Gone) && seen.phase != phase;
            if on {
                seen.phase = phase;
            }
            on
        });
    }

    /// Records that the container was destroyed.
    pub(super) fn gone(&self) {
        self.seen.send_modify(|seen| seen.phase = Phase::Gone);
        self.line_changed.send_replace(());
    }

    /// Records a gap of unknown size in both outputs.
    pub(super) fn add_gaps(&self) {
        self.seen.send_modify(|seen| {
            let Progress { heads, gaps, .. } = seen;
            for (gaps, head) in gaps.iter_mut().zip(&*heads) {
                if gaps.last() != Some(head) {
                    gaps.push(*head);
                }
            }
        });
        let seen = self.seen.borrow().clone();
        // A gap that is not stored is reported only by this gateway. The next gateway adds its own
        // gap.
        if let Err(error) = write_gaps(&self.dir, &seen.gaps) {
            tracing::warn!(process.id = %self.id, error = domain::error_chain(&error), "cannot store a gap in the output of a process");
        }
    }

    /// Removes the stored output. Blocks on the disk.
    pub(super) fn remove_spools(&self) -> Result<(), RuntimeError> {
        match std::fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RuntimeError::io(format!("remove {}", self.dir.display()), error))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn state(&self) -> Result<ProcessState, RuntimeError> {
        match self.phase() {
            Phase::Intended | Phase::Starting => Ok(ProcessState::Starting),
            Phase::Started => Ok(ProcessState::Started),
            Phase::Ended(Ended::Unknown(failure)) if failure.reason == FailureReason::StartUnknown => {
                Ok(ProcessState::StartUnknown)
            }
            Phase::Ended(ended) => Ok(ProcessState::Ended(ended)),
            Phase::Gone => Err(RuntimeError::ProcessNotFound(self.id)),
        }
    }

    pub(super) async fn wait(&self) -> Result<Ended, RuntimeError> {
        let mut seen = self.seen.subscribe();
        let over = |seen: &Progress| matches!(seen.phase, Phase::Ended(_) | Phase::Gone);
        let over = tokio::select! {
            // A known end stays valid.
            biased;
            over = seen.wait_for(over) => over.map(|seen| seen.phase.clone()),
            () = self.term.cancelled() => return Err(self.takeover_error()),
        };
        match over {
            Ok(Phase::Ended(ended)) => Ok(ended),
            _ => Err(RuntimeError::ProcessNotFound(self.id)),
        }
    }

    fn takeover_error(&self) -> RuntimeError {
        RuntimeError::TakenOver(format!("the worker of process {}", self.id))
    }

    pub(super) async fn set_line(&self, line: InputLink) {
        let mut stdin = self.stdin.lock().await;
        stdin.line = line;
        drop(stdin);
        self.line_changed.send_replace(());
    }
}

fn read_gaps(dir: &Path) -> [Vec<u64>; 2] {
    let text = std::fs::read_to_string(dir.join(GAPS)).unwrap_or_default();
    let of = |name: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.filter(|(which, _)| *which == name).filter_map(|(_, at)| at.parse().ok()).collect()
    };
    NAMES.map(of)
}

fn write_gaps(dir: &Path, gaps: &[Vec<u64>; 2]) -> io::Result<()> {
    let mut file = std::fs::File::create(dir.join(GAPS))?;
    for (name, gaps) in NAMES.iter().zip(gaps) {
        for at in gaps {
            writeln!(file, "{name} {at}")?;
        }
    }
    Ok(())
}

/// Attaches a reader.
pub(super) fn attach(
    worker: &Arc<Worker>,
    process: Arc<Process>,
    from: Offsets,
) -> Result<Attachment, RuntimeError> {
    let seen = process.seen.subscribe();
    let (heads, stdin_offset) = {
        let seen = seen.borrow();
        (seen.heads, seen.stdin_taken)
    };
    let [stdout_offset, stderr_offset] = heads;
    let at = [from.stdout, from.stderr];
    for (offset, limit) in at.into_iter().zip(heads) {
        if offset > limit {
            return Err(RuntimeError::OffsetOutOfRange { offset, limit });
        }
    }
    let has_terminal = process.terminal;
    let input = Input { worker: Arc::clone(worker), process: Arc::clone(&process) };
    let events = Events {
        process,
        seen,
        at,
        passed_gaps: [0, 0],
        reported_stdin: stdin_offset,
        next_output: 0,
        phase: EventPhase::Output,
    };
    let events = stream::unfold(Some(events), |events| async move {
        let mut events = events?;
        match events.next().await {
            Ok(Some(event)) => Some((Ok(event), Some(events))),
            Ok(None) => None,
            Err(error) => Some((Err(error), None)),
        }
    });
    Ok(Attachment {
        stdin_offset,
        stdout_offset,
        stderr_offset,
        has_terminal,
        events: Box::pin(events),
        input: Arc::new(input),
    })
}

/// Event stream of a reader.
struct Events {
    process: Arc<Process>,
    seen: watch::Receiver<Progress>,
    /// Offset of the reader in each output.
    at: [u64; 2],
    /// Number of gaps that the reader has passed in each output.
    passed_gaps: [usize; 2],
    reported_stdin: u64,
    /// Index of the output to read first. It alternates, so that neither output starves.
    next_output: usize,
    phase: EventPhase,
}

#[derive(PartialEq, Eq)]
enum EventPhase {
    Output,
    Ended,
    Done,
}

impl Events {
    async fn next(&mut self) -> Result<Option<ProcessEvent>, RuntimeError> {
        loop {
            if self.phase == EventPhase::Done {
                return Ok(None);
            }
            let seen = self.seen.borrow_and_update().clone();
            if seen.stdin_taken != self.reported_stdin {
                self.reported_stdin = seen.stdin_taken;
                return Ok(Some(ProcessEvent::StdinAccepted(self.reported_stdin)));
            }
            if let Some(event) = self.output(&seen).await? {
                return Ok(Some(event));
            }
            match seen.phase {
                Phase::Ended(ended) if self.phase == EventPhase::Output => {
                    self.phase = EventPhase::Ended;
                    return Ok(Some(ProcessEvent::Ended(ended)));
                }
                Phase::Ended(_) => {
                    self.phase = EventPhase::Done;
                    let [stdout, stderr] = self.at;
                    return Ok(Some(ProcessEvent::Done(Offsets { stdout, stderr })));
                }
                Phase::Gone => return Err(RuntimeError::ProcessNotFound(self.process.id)),
                Phase::Intended | Phase::Starting | Phase::Started => {
                    tokio::select! {
                        changed = self.seen.changed() => if changed.is_err() {
                            return Err(RuntimeError::ProcessNotFound(self.process.id));
                        },
                        () = self.process.term.cancelled() => return Err(self.process.takeover_error()),
                    }
                }
            }
        }
    }

    /// Returns the next part of the output.
    async fn output(&mut self, seen: &Progress) -> Result<Option<ProcessEvent>, RuntimeError> {
        for which in [self.next_output, 1 - self.next_output] {
            let stream = [OutputStream::Stdout, OutputStream::Stderr][which];
            let base = self.process.base;
            let gaps = &seen.gaps[which];
            if self.at[which] < base {
                self.at[which] = base;
                self.passed_gaps[which] = gaps.iter().take_while(|gap| **gap <= base).count();
                return Ok(Some(ProcessEvent::Truncated { stream, from: base, to: base }));
            }
            let offset = self.at[which];
            while gaps.get(self.passed_gaps[which]).is_some_and(|gap| *gap < offset) {
                self.passed_gaps[which] += 1;
            }
            let gap = gaps.get(self.passed_gaps[which]).copied();
            if gap == Some(offset) {
                self.passed_gaps[which] += 1;
                return Ok(Some(ProcessEvent::Truncated { stream, from: offset, to: offset }));
            }
            if offset >= seen.heads[which] {
                continue;
            }
            let spool = Arc::clone(&self.process.spools[which]);
            let read = move || spool.read(offset).map_err(|error| RuntimeError::io("read a spool", error));
            let found = blocking(read).await?;
            self.next_output = 1 - which;
            match found {
                ReadResult::Data(mut data) => {
                    if let Some(before) = gap.and_then(|gap| usize::try_from(gap - offset).ok()) {
                        data.truncate(before);
                    }
                    self.at[which] += data.len() as u64;
                    return Ok(Some(ProcessEvent::Output { stream, offset, data }));
                }
                ReadResult::Lost(to) => {
                    self.at[which] = to;
                    return Ok(Some(ProcessEvent::Truncated { stream, from: offset, to }));
                }
                ReadResult::Nothing => {
                    return Err(RuntimeError::Other(
                        "the spool has fewer bytes than were written".to_owned(),
                    ));
                }
            }
        }
        Ok(None)
    }
}

/// The input side of an attachment.
struct Input {
    worker: Arc<Worker>,
    process: Arc<Process>,
}

/// Sends the inline input of a process, and then its end.
pub(super) fn send_inline(worker: &Arc<Worker>, process: &Arc<Process>, data: Bytes) {
    let input = Input { worker: Arc::clone(worker), process: Arc::clone(process) };
    worker.tasks.spawn(async move {
        let sent = async {
            input.send(0, data).await?;
            input.close().await
        };
        tokio::select! {
            sent = sent => {
                // The task that follows the process ends it.
                if let Err(error) = sent {
                    tracing::info!(process.id = %input.process.id, error = domain::error_chain(&error), "cannot send the input of a process");
                }
            }
            () = input.worker.follow_ends(&input.process) => {}
        }
    });
}

/// The longest prefix of `bytes` with complete characters. `None`: the bytes are not UTF-8.
fn whole_characters(bytes: &[u8]) -> Option<&str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() => {
            let (whole, _) = bytes.split_at(error.valid_up_to());
            std::str::from_utf8(whole).ok()
        }
        Err(_) => None,
    }
}

impl Input {
    /// Waits for the connection. `None`: the process reads no more input.
    async fn line(&self) -> Result<Option<(OwnedMutexGuard<Stdin>, Control)>, RuntimeError> {
        let mut changed = self.process.line_changed.subscribe();
        loop {
            changed.borrow_and_update();
            let stdin = Arc::clone(&self.process.stdin).lock_owned().await;
            match &stdin.line {
                _ if matches!(self.process.phase(), Phase::Ended(_)) => return Ok(None),
                _ if self.process.phase() == Phase::Gone => {
                    return Err(RuntimeError::ProcessNotFound(self.process.id));
                }
                InputLink::Up(control) => {
                    let control = control.clone();
                    return Ok(Some((stdin, control)));
                }
                InputLink::Closed => return Ok(None),
                InputLink::Broken => {
                    let message = "standard input was lost when the connection to the worker broke";
                    return Err(RuntimeError::Other(message.to_owned()));
                }
                InputLink::Down => {}
            }
            drop(stdin);
            let mut seen = self.process.seen.subscribe();
            tokio::select! {
                _ = changed.changed() => {}
                _ = seen.wait_for(|seen| matches!(seen.phase, Phase::Ended(_) | Phase::Gone)) => {}
                () = self.process.term.cancelled() => return Err(self.process.takeover_error()),
            }
        }
    }
}

impl Process {
    /// Awaits a write, or the end of the process, after which input has no receiver.
    async fn unless_ended<T>(&self, writing: impl Future<Output = T>) -> Option<T> {
        let mut seen = self.seen.subscribe();
        tokio::select! {
            written = writing => Some(written),
            _ = seen.wait_for(|seen| matches!(seen.phase, Phase::Ended(_) | Phase::Gone)) => None,
        }
    }

    /// Sends `data`, which begins at `offset`. The future must not be dropped, because sent bytes
    /// would not be counted.
    async fn write(
        &self,
        mut stdin: OwnedMutexGuard<Stdin>,
        control: Control,
        offset: u64,
        data: Bytes,
    ) -> Result<(), RuntimeError> {
        let taken = self.seen.borrow().stdin_taken;
        if offset > taken {
            return Err(RuntimeError::OffsetOutOfRange { offset, limit: taken });
        }
        let skip = usize::try_from(taken - offset).unwrap_or(usize::MAX).min(data.len());
        let fresh = &data[skip..];
        let bytes = [&stdin.partial[..], fresh].concat();
        let Some(text) = whole_characters(&bytes) else {
            let message = "standard input that is not UTF-8";
            return Err(RuntimeError::Unsupported(message.to_owned()));
        };
        match self.unless_ended(control.write(text)).await {
            None => return Ok(()),
            // The process has ended, or the connection broke. The task that follows the process
            // finds out which.
            Some(Err(_)) => stdin.line = InputLink::Down,
            Some(Ok(())) => stdin.partial = bytes[text.len()..].to_vec(),
        }
        let length = fresh.len() as u64;
        self.seen.send_modify(|seen| seen.stdin_taken += length);
        Ok(())
    }
}

impl Input {
    /// Only text can be sent, because a Garden server replaces every byte that is not UTF-8 by
    /// U+FFFD.
    async fn send(&self, offset: u64, data: Bytes) -> Result<(), RuntimeError> {
        let (mut at, mut rest) = (offset, data);
        loop {
            let part = rest.split_to(rest.len().min(MAX_STDIN));
            let length = part.len() as u64;
            // The lock is held until the data is sent, so that writes stay in order.
            let Some((stdin, control)) = self.line().await? else { return Ok(()) };
            let (process, stopping) = (Arc::clone(&self.process), self.worker.stopping.clone());
            let writing = self.worker.tasks.spawn(async move {
                tokio::select! {
                    sent = process.write(stdin, control, at, part) => sent,
                    () = stopping.cancelled() => Err(RuntimeError::Other("the gateway is stopping".to_owned())),
                }
            });
            writing.await.unwrap_or_else(|error| Err(RuntimeError::Other(error.to_string())))?;
            at += length;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    async fn close(&self) -> Result<(), RuntimeError> {
        // The loss of the connection has already closed standard input.
        if matches!(self.process.stdin.lock().await.line, InputLink::Broken) {
            return Ok(());
        }
        let Some((mut stdin, control)) = self.line().await? else { return Ok(()) };
        if !stdin.partial.is_empty() {
            let message = "standard input that ends within a character";
            return Err(RuntimeError::Unsupported(message.to_owned()));
        }
        // A terminal stays open: the end of input is a character, and the terminal may be resized
        // later.
        if self.process.terminal {
            if let Some(Err(error)) = self.process.unless_ended(control.write("\u{4}")).await {
                return Err(RuntimeError::Other(domain::error_chain(&error)));
            }
            return Ok(());
        }
        // No message may be sent after this one.
        if let Some(Ok(())) = self.process.unless_ended(control.close_stdin()).await {
            stdin.line = InputLink::Closed;
            let handle = self.process.container.to_string();
            // Without this property, another gateway would report the end of input as a broken
            // connection.
            let name = self.process.property(properties::INPUT);
            if let Err(error) = self.worker.garden.set_property(&handle, &name, properties::CLOSED).await {
                tracing::debug!(process.id = %self.process.id, error = domain::error_chain(&error), "cannot store the end of the input of a process");
            }
        }
        Ok(())
    }
}

#[async_trait]
impl ProcessInput for Input {
    async fn stdin(&self, offset: u64, data: Bytes) -> Result<(), RuntimeError> {
        if self.process.is_inline { Ok(()) } else { self.send(offset, data).await }
    }

    async fn close_stdin(&self) -> Result<(), RuntimeError> {
        if self.process.is_inline { Ok(()) } else { self.close().await }
    }

    /// Sends TERM or KILL, the only signals of the protocol. Workers that ignore signals get a stop
    /// of the container instead, which sends TERM, and KILL ten seconds later.
    async fn signal(&self, number: u8) -> Result<(), RuntimeError> {
        let (signal, kill) = match number {
            9 => (Signal::Kill, true),
            15 => (Signal::Terminate, false),
            _ => {
                let message = format!("signal {number}: a Garden worker supports only TERM and KILL");
                return Err(RuntimeError::Unsupported(message));
            }
        };
        if matches!(self.process.phase(), Phase::Ended(_)) {
            return Ok(());
        }
        if self.worker.backend != Backend::Containerd {
            // A process that does not read blocks its writer, and must not block the signal.
            if let Ok(stdin) = self.process.stdin.try_lock()
                && let InputLink::Up(control) = &stdin.line
                && control.signal(signal).await.is_ok()
            {
                return Ok(());
            }
        }
        if self.process.is_further {
            let message = "signals for a process beside the main process";
            return Err(RuntimeError::Unsupported(message.to_owned()));
        }
        self.worker.end_processes(&self.process, kill);
        Ok(())
    }

    async fn resize(&self, window: TerminalSize) -> Result<(), RuntimeError> {
        if !self.process.terminal {
            return Err(RuntimeError::Unsupported("the process has no terminal".to_owned()));
        }
        let Some((_stdin, control)) = self.line().await? else { return Ok(()) };
        let size = WindowSize { columns: window.columns, rows: window.rows };
        match self.process.unless_ended(control.resize(size)).await {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(RuntimeError::Other(domain::error_chain(&error))),
        }
    }

    /// Ignored, because output never blocks a process.
    async fn acknowledge(&self, _up_to: Offsets) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn detach(&self) -> Result<(), RuntimeError> {
        Ok(())
    }
}

impl Process {
    /// The name of a property of this process.
    pub(super) fn property(&self, name: &str) -> String {
        if self.is_further { properties::of_process(name, self.id) } else { name.to_owned() }
    }

    /// Records that a stop was requested.
    pub(super) fn ask_to_end(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    pub(super) fn asked_to_end(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }
}
