//! A process of the fake worker: its input, its output, its stop and its end.
//!
//! ```text
//! starting ──▶ started ──▶ ended
//!    ├─ stop ─────────────▶ ended (never started)
//!    └─ reboot ───────────▶ start unknown
//! ```
//!
//! The program runs as a task. Only that task reports the end of a started process, after it has
//! dropped the program. So no code of the program runs after the reported end.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use domain::ProcessId;
use domain::workload::{Exit, Failure, FailureReason, InlineStdin, OutputMode, Stdin};
use runtime::{Ended, OutputStream, ProcessSpec, ProcessState, RuntimeError, TerminalSize};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::faults::Gate;
use super::programs::{Program, System};

const KILL: u8 = 9;
pub(super) const TERM: u8 = 15;
/// Signals that have no effect: 0, CHLD, CONT, URG, WINCH and those that suspend a process.
const HARMLESS: [u8; 9] = [0, 17, 18, 19, 20, 21, 22, 23, 28];
/// Capacity of standard input for a process that does not read, in bytes.
const PIPE: usize = 64 * 1024;

/// The last contact of the gateway, by `CLOCK_BOOTTIME`, and for how long processes may continue
/// from then on.
pub(super) type Contact = Option<(Duration, Duration)>;

/// The time since boot.
pub(super) fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// The stored part of one output.
#[derive(Default)]
pub(super) struct Output {
    kept: VecDeque<u8>,
    /// Total bytes that were written.
    pub(super) head: u64,
    acknowledged: u64,
    /// When bytes were written, and the offset of the first of them.
    times: Vec<(SystemTime, u64)>,
}

impl Output {
    /// Offset of the first byte that was written at this time or later.
    pub(super) fn offset_at(&self, since: SystemTime) -> u64 {
        self.times.iter().find(|(at, _)| *at >= since).map_or(self.head, |(_, offset)| *offset)
    }

    /// Offset of the oldest stored byte.
    pub(super) fn tail(&self) -> u64 {
        self.head - self.kept.len() as u64
    }

    pub(super) fn acknowledge(&mut self, up_to: u64) {
        self.acknowledged = self.acknowledged.max(up_to.min(self.head));
    }

    /// Returns up to `most` stored bytes from `offset` on.
    pub(super) fn from(&self, offset: u64, most: usize) -> Vec<u8> {
        let from = usize::try_from(offset - self.tail()).unwrap_or(usize::MAX);
        let to = self.kept.len().min(from.saturating_add(most));
        let (first, second) = self.kept.as_slices();
        let of_second = from.saturating_sub(first.len())..to.saturating_sub(first.len());
        [&first[from.min(first.len())..to.min(first.len())], &second[of_second]].concat()
    }

    fn push(&mut self, bytes: &[u8], limit: u64) {
        self.times.push((SystemTime::now(), self.head));
        self.kept.extend(bytes);
        self.head += bytes.len() as u64;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        self.kept.drain(..self.kept.len().saturating_sub(limit));
    }
}

/// Pending standard input.
struct Input {
    waiting: VecDeque<u8>,
    taken: u64,
    /// The writer has closed standard input.
    closed: bool,
    /// The process has closed standard input.
    unread: bool,
}

pub(super) struct Inner {
    pub(super) state: ProcessState,
    pub(super) outputs: [Output; 2],
    input: Input,
    /// Whether the process blocks rather than lose unacknowledged output.
    held_back: bool,
    window: Option<TerminalSize>,
    ignored: BTreeSet<u8>,
    /// Signals that the program handles, and pending signals.
    caught: BTreeSet<u8>,
    pending: VecDeque<u8>,
    /// The signal that ends the process.
    fatal: Option<u8>,
    kill_at: Option<Instant>,
    stopped: bool,
    /// Whether the machine went down while the process existed.
    lost: bool,
}

impl Inner {
    pub(super) fn stdin_taken(&self) -> u64 {
        self.input.taken
    }

    /// How the process ended, if it has ended.
    pub(super) fn ended(&self) -> Option<Ended> {
        match &self.state {
            ProcessState::Starting | ProcessState::Started => None,
            ProcessState::Ended(ended) => Some(ended.clone()),
            ProcessState::StartUnknown => {
                let message = "the machine went down after the intent to start the process and before a proof of the start";
                let reason = FailureReason::StartUnknown;
                Some(Ended::Unknown(Failure { reason, message: message.to_owned() }))
            }
        }
    }

    fn signal(&mut self, number: u8) {
        if self.caught.contains(&number) {
            self.pending.push_back(number);
            return;
        }
        let harmless = HARMLESS.contains(&number) || (number != KILL && self.ignored.contains(&number));
        if !harmless {
            self.fatal.get_or_insert(number);
        }
    }

    fn end(&mut self, reason: FailureReason, message: &str) {
        self.state = ProcessState::Ended(Ended::NotStarted(Failure { reason, message: message.to_owned() }));
    }
}

pub(super) struct Process {
    pub(super) id: ProcessId,
    inner: Mutex<Inner>,
    changes: watch::Sender<()>,
    spool_bytes: u64,
    /// Held while input is written, so that each write stays contiguous.
    input_lock: tokio::sync::Mutex<()>,
}

impl Process {
    pub(super) fn new(id: ProcessId, spec: &ProcessSpec, spool_bytes: u64) -> Arc<Self> {
        let input = Input {
            waiting: match &spec.stdin {
                Stdin::Inline(InlineStdin(input)) => input.iter().copied().collect(),
                Stdin::None | Stdin::Attached => VecDeque::new(),
            },
            taken: 0,
            closed: spec.stdin != Stdin::Attached,
            unread: spec.stdin == Stdin::None,
        };
        let inner = Inner {
            state: ProcessState::Starting,
            outputs: Default::default(),
            input,
            held_back: spec.output == OutputMode::Attached,
            window: spec.terminal,
            ignored: BTreeSet::new(),
            caught: BTreeSet::new(),
            pending: VecDeque::new(),
            fatal: None,
            kill_at: None,
            stopped: false,
            lost: false,
        };
        let (inner, changes) = (Mutex::new(inner), watch::Sender::new(()));
        Arc::new(Self { id, inner, changes, spool_bytes, input_lock: tokio::sync::Mutex::default() })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let changed = change(&mut self.lock());
        self.changes.send_replace(());
        changed
    }

    /// Waits until `attempt` returns a value. `attempt` may change the process.
    pub(super) async fn until<T>(&self, mut attempt: impl FnMut(&mut Inner) -> Option<T>) -> T {
        let mut changes = self.changes.subscribe();
        loop {
            let done = attempt(&mut self.lock());
            if let Some(done) = done {
                self.changes.send_replace(());
                return done;
            }
            // The sender is alive, because `self` owns it.
            changes.changed().await.ok();
        }
    }

    /// Waits until `attempt` returns a value. `attempt` does not change the process.
    pub(super) async fn wait<T>(&self, mut attempt: impl FnMut(&Inner) -> Option<T>) -> T {
        let mut changes = self.changes.subscribe();
        loop {
            let done = attempt(&self.lock());
            if let Some(done) = done {
                return done;
            }
            changes.changed().await.ok();
        }
    }

    async fn ended(&self) {
        self.wait(|inner| inner.ended()).await;
    }

    /// Runs `program` when starts are permitted, unless the process is stopped before.
    pub(super) async fn run(
        self: Arc<Self>,
        starts: Gate,
        contact: watch::Receiver<Contact>,
        program: Result<Program, Failure>,
        system: System,
    ) {
        tokio::select! {
            () = starts.open() => {}
            () = self.ended() => return,
        }
        let begun = self.change(|inner| {
            if inner.state != ProcessState::Starting {
                return false;
            }
            match &program {
                Ok(_) => inner.state = ProcessState::Started,
                Err(failure) => inner.state = ProcessState::Ended(Ended::NotStarted(failure.clone())),
            }
            true
        });
        let (true, Ok(program)) = (begun, program) else { return };
        let exit = tokio::select! {
            biased;
            signal = self.wait(|inner| inner.fatal) => Exit::Signal(signal),
            () = self.killed() => Exit::Signal(KILL),
            () = lost(contact) => {
                self.change(|inner| inner.stopped = true);
                Exit::Signal(KILL)
            }
            code = program.run(&system) => Exit::Code(code),
        };
        self.change(|inner| {
            inner.state = ProcessState::Ended(if inner.lost {
                let message = "the machine went down while the process ran".to_owned();
                Ended::Unknown(Failure { reason: FailureReason::ExitUnknown, message })
            } else {
                Ended::Exited { exit, stopped: inner.stopped }
            });
        });
    }

    /// Resolves when the grace period is over.
    async fn killed(&self) {
        let mut at = self.wait(|inner| inner.kill_at).await;
        let earlier = |at| self.wait(move |inner| inner.kill_at.filter(|new| *new < at));
        while let Ok(new) = timeout_at(at, earlier(at)).await {
            at = new;
        }
    }

    pub(super) fn stop(&self, grace: Duration, signal: u8) {
        self.change(|inner| match inner.state {
            ProcessState::Starting => {
                inner.end(FailureReason::StoppedBeforeStart, "the process was stopped before it was started");
            }
            ProcessState::Started => {
                inner.stopped = true;
                if inner.kill_at.is_none() {
                    inner.signal(signal);
                }
                let at = Instant::now() + grace;
                inner.kill_at = Some(inner.kill_at.map_or(at, |earlier| earlier.min(at)));
            }
            ProcessState::Ended(_) | ProcessState::StartUnknown => {}
        });
    }

    /// Ends the process at once, or prevents its start.
    pub(super) async fn destroy(&self) {
        self.stop(Duration::ZERO, TERM);
        self.signal(KILL);
        self.ended().await;
    }

    /// Ends the process as a machine does that goes down.
    pub(super) async fn lose(&self) {
        self.change(|inner| match inner.state {
            ProcessState::Starting => inner.state = ProcessState::StartUnknown,
            _ => inner.lost = true,
        });
        self.signal(KILL);
        self.ended().await;
    }

    /// Ends the process when the worker is dropped.
    pub(super) fn abandon(&self) {
        self.stop(Duration::ZERO, TERM);
        self.signal(KILL);
    }

    // Operations of the attached reader.

    pub(super) fn signal(&self, number: u8) {
        self.change(|inner| inner.signal(number));
    }

    pub(super) fn acknowledge(&self, up_to: [u64; 2]) {
        self.change(|inner| {
            for (output, up_to) in inner.outputs.iter_mut().zip(up_to) {
                output.acknowledge(up_to);
            }
        });
    }

    pub(super) fn detach(&self) {
        self.change(|inner| inner.held_back = false);
    }

    pub(super) fn resize(&self, window: TerminalSize) -> Result<(), RuntimeError> {
        self.change(|inner| {
            inner
                .window
                .as_mut()
                .map(|size| *size = window)
                .ok_or_else(|| RuntimeError::Unsupported(format!("process {} has no terminal", self.id)))
        })
    }

    pub(super) async fn send(&self, offset: u64, data: &[u8]) -> Result<(), RuntimeError> {
        let _guard = self.input_lock.lock().await;
        let end = offset + data.len() as u64;
        loop {
            let done = self.until(|inner| {
                let deaf = inner.ended().is_some();
                let input = &mut inner.input;
                if offset > input.taken {
                    return Some(Err(RuntimeError::OffsetOutOfRange { offset, limit: input.taken }));
                }
                if deaf || input.closed || input.unread {
                    input.taken = input.taken.max(end);
                }
                if input.taken >= end {
                    return Some(Ok(true));
                }
                let room = PIPE - input.waiting.len();
                let rest = &data[usize::try_from(input.taken - offset).unwrap_or(usize::MAX)..];
                let part = &rest[..rest.len().min(room)];
                input.waiting.extend(part);
                input.taken += part.len() as u64;
                (!part.is_empty()).then_some(Ok(false))
            });
            if done.await? {
                return Ok(());
            }
        }
    }

    /// Closes standard input after the writes in progress.
    pub(super) async fn close_stdin(&self) {
        let _guard = self.input_lock.lock().await;
        self.change(|inner| inner.input.closed = true);
    }

    // Operations of the program.

    /// Reads some input. Empty if standard input is closed.
    pub(super) async fn read(&self) -> Vec<u8> {
        let read = self.until(|inner| {
            let input = &mut inner.input;
            let over = input.closed || input.unread;
            (over || !input.waiting.is_empty()).then(|| input.waiting.drain(..).collect())
        });
        read.await
    }

    pub(super) fn stop_reading(&self) {
        self.change(|inner| inner.input.unread = true);
    }

    pub(super) async fn write(&self, stream: OutputStream, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let limit = self.spool_bytes;
            let written = self.until(|inner| {
                // A terminal has only one output.
                let which = usize::from(stream == OutputStream::Stderr && inner.window.is_none());
                let (held, output) = (inner.held_back, &mut inner.outputs[which]);
                let room = if held { limit.saturating_sub(output.head - output.acknowledged) } else { limit };
                let length = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
                output.push(&bytes[..length], limit);
                (length > 0).then_some(length)
            });
            bytes = &bytes[written.await..];
            tokio::task::yield_now().await;
        }
    }

    pub(super) fn ignore(&self, number: u8) {
        self.change(|inner| inner.ignored.insert(number));
    }

    pub(super) fn catch(&self, numbers: &[u8]) {
        self.change(|inner| inner.caught.extend(numbers));
    }

    /// Returns the next handled signal.
    pub(super) async fn caught(&self) -> u8 {
        self.until(|inner| inner.pending.pop_front()).await
    }

    pub(super) fn window(&self) -> Option<TerminalSize> {
        self.lock().window
    }

    /// Whether a signal is about to end the process.
    pub(super) fn is_dying(&self) -> bool {
        self.lock().fatal.is_some()
    }
}

/// Resolves when the gateway was out of contact for too long.
async fn lost(mut contact: watch::Receiver<Contact>) {
    loop {
        let known = *contact.borrow_and_update();
        let changed = match known {
            None => contact.changed().await,
            Some((sent, stop_after)) => {
                let left = sent.saturating_add(stop_after).saturating_sub(since_boot());
                match timeout(left, contact.changed()).await {
                    Ok(changed) => changed,
                    Err(_) => return,
                }
            }
        };
        if changed.is_err() {
            // The worker was dropped, which ends the process separately.
            std::future::pending::<()>().await;
        }
    }
}
