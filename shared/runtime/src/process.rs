//! Processes: what starts them, what they say, how they end.

use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use domain::workload::{Bytes, EnvironmentVariable, Exit, Failure, OutputMode, Stdin};

use crate::RuntimeError;

/// What a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSpec {
    /// Program and arguments, at least one. A program without a slash is looked up in the PATH of `environment`.
    pub command: Vec<Bytes>,
    /// All of its environment but PATH and HOME, which the runtime sets where they are missing (HOME from the image's passwd).
    pub environment: Vec<EnvironmentVariable>,
    /// Where standard input comes from.
    pub stdin: Stdin,
    /// Whether it is held back rather than lose output that nobody has acknowledged.
    pub output: OutputMode,
    /// The size of its terminal. `None`: it has none, and its outputs are two. Needs the capability `terminal`.
    pub terminal: Option<Window>,
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its width.
    pub columns: u16,
    /// Its height.
    pub rows: u16,
}

/// How far a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessState {
    /// It is being started: nothing of it has run yet.
    Starting,
    /// It runs.
    Started,
    /// It has ended.
    Ended(Ended),
    /// The intent to start it is there, and neither proof nor disproof of a start.
    StartUnknown,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// It ran, and ended by itself or by a signal.
    Exited {
        /// How.
        exit: Exit,
        /// Whether it was asked to end, or was out of contact for too long, before it did.
        stopped: bool,
    },
    /// It never ran, and why: `PROGRAM_NOT_FOUND`, `PROGRAM_NOT_EXECUTABLE`, `CGROUP_UNAVAILABLE`, `STOPPED_BEFORE_START`, `START_FAILED` …
    NotStarted(Failure),
    /// It ran, or may have run, and its end was not recorded: the machine or the supervisor died (`START_UNKNOWN`, `EXIT_UNKNOWN`).
    Unknown(Failure),
}

/// Standard output or standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// How far a reader is in each output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Bytes of standard output.
    pub stdout: u64,
    /// Bytes of standard error.
    pub stderr: u64,
}

/// What a process says to whoever is attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// So much standard input has been taken in all.
    StdinTaken(u64),
    /// Some output.
    Output {
        /// Which.
        stream: OutputStream,
        /// Where it stands in the whole of that output.
        offset: u64,
        /// The bytes, at most 1 MiB.
        data: bytes::Bytes,
    },
    /// Output that is gone. Where `to` is `from`, some may be missing there, and nobody knows how much: offsets count what was got.
    Truncated {
        /// Which.
        stream: OutputStream,
        /// The first byte that is gone.
        from: u64,
        /// The first byte after it that is not.
        to: u64,
    },
    /// The process has ended. Output may follow.
    Ended(Ended),
    /// All output was said. Nothing follows.
    Done(Offsets),
}

/// A live connection to a process. Dropping it detaches this reader and changes nothing for the process.
pub struct Attachment {
    /// How much standard input had been taken before.
    pub stdin_offset: u64,
    /// What the process says. Read no further ahead than it is polled.
    pub events: Pin<Box<dyn futures_core::Stream<Item = Result<ProcessEvent, RuntimeError>> + Send>>,
    /// What is said to the process.
    pub input: Arc<dyn ProcessInput>,
}

/// What can be said to a process.
#[async_trait]
pub trait ProcessInput: Send + Sync {
    /// Standard input from `offset` on; bytes that were taken before are skipped. Returns when the worker has taken them, so that
    /// a process that does not read holds its writer back. Input for a process that no longer reads is thrown away.
    ///
    /// Errors: [`RuntimeError::OffsetOutOfRange`] when `offset` leaves a gap.
    async fn stdin(&self, offset: u64, data: bytes::Bytes) -> Result<(), RuntimeError>;

    /// No more input comes.
    async fn close_stdin(&self) -> Result<(), RuntimeError>;

    /// Sends the process a signal.
    async fn signal(&self, number: u8) -> Result<(), RuntimeError>;

    /// Changes the size of its terminal.
    ///
    /// Errors: [`RuntimeError::Unsupported`] where it has none.
    async fn resize(&self, window: Window) -> Result<(), RuntimeError>;

    /// So much output has arrived for good and need not be kept.
    async fn acknowledge(&self, up_to: Offsets) -> Result<(), RuntimeError>;

    /// Nobody is meant to be attached from now on: drop the oldest output rather than hold the process back.
    async fn detach(&self) -> Result<(), RuntimeError>;
}
