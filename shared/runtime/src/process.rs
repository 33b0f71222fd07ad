//! Processes: their specification, state, events and input.

use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
pub use domain::workload::TerminalSize;
use domain::workload::{Bytes, EnvironmentVariable, Exit, Failure, OutputMode, Stdin};

use crate::RuntimeError;

/// The specification of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSpec {
    /// Program and arguments, at least one. A program without a slash is looked up in the PATH of
    /// `environment`.
    pub command: Vec<Bytes>,
    /// Variables besides those of the container, which they replace. The runtime adds PATH and HOME
    /// if they are missing (HOME from the passwd file of the image).
    pub environment: Vec<EnvironmentVariable>,
    /// The absolute working directory. `None`: that of the container.
    pub directory: Option<Bytes>,
    /// The user, as in [`crate::ContainerSpec::user`]. `None`: that of the container.
    pub user: Option<String>,
    /// The source of standard input. Not inline for a process with a terminal.
    pub stdin: Stdin,
    /// Whether unacknowledged output blocks the process or is dropped.
    pub output: OutputMode,
    /// Whether the process may be the main process.
    pub role: ProcessRole,
    /// The size of the terminal. `None`: the process has no terminal, and its two outputs are
    /// separate. A terminal needs the capability `terminal`.
    pub terminal: Option<TerminalSize>,
}

/// The relation of a process to the other processes of its container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessRole {
    /// The process is the main process, or joins the container if that one runs.
    Main,
    /// The process looks into a container that has or had a main process.
    Exec,
}

/// The state of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessState {
    /// The start is in progress. No code of the process has run.
    Starting,
    /// The process runs.
    Started,
    /// The process has ended.
    Ended(Ended),
    /// The intent to start exists, but neither a proof nor a disproof of the start.
    StartUnknown,
}

/// The end of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The process ran, and exited with a code or by a signal.
    Exited {
        /// The exit code or signal.
        exit: Exit,
        /// Whether the process was stopped, or was out of contact for too long, before its exit.
        stopped: bool,
    },
    /// The process never ran: `PROGRAM_NOT_FOUND`, `PROGRAM_NOT_EXECUTABLE`, `CGROUP_UNAVAILABLE`,
    /// `STOPPED_BEFORE_START`, `START_FAILED` or another reason.
    NotStarted(Failure),
    /// The process ran or may have run, and its exit was not recorded, because the machine or the
    /// supervisor died (`START_UNKNOWN`, `EXIT_UNKNOWN`).
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

/// Positions of a reader in the two outputs, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Bytes of standard output.
    pub stdout: u64,
    /// Bytes of standard error.
    pub stderr: u64,
}

/// An event of a process for an attached reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// The total number of bytes of standard input that the worker has accepted.
    StdinAccepted(u64),
    /// A part of the output.
    Output {
        /// The output stream.
        stream: OutputStream,
        /// The position of the part in the output stream.
        offset: u64,
        /// The bytes, at most 1 MiB.
        data: bytes::Bytes,
    },
    /// Lost output. If `to` equals `from`, an unknown number of bytes may be missing at this
    /// position. Offsets then count only the bytes that arrived.
    Truncated {
        /// The output stream.
        stream: OutputStream,
        /// The position of the first lost byte.
        from: u64,
        /// The position after the last lost byte.
        to: u64,
    },
    /// The process has ended. More output may follow.
    Ended(Ended),
    /// All output was delivered. No event follows.
    Done(Offsets),
}

/// A live connection to a process. Dropping the attachment does not affect the process.
pub struct Attachment {
    /// Bytes of standard input that the worker had accepted before the attachment.
    pub stdin_offset: u64,
    /// Bytes of standard output that the process had written before the attachment.
    pub stdout_offset: u64,
    /// Bytes of standard error that the process had written before the attachment.
    pub stderr_offset: u64,
    /// Whether the process has a terminal.
    pub has_terminal: bool,
    /// The events of the process. The runtime reads ahead only as far as the stream is polled.
    pub events: Pin<Box<dyn futures_core::Stream<Item = Result<ProcessEvent, RuntimeError>> + Send>>,
    /// The input of the process.
    pub input: Arc<dyn ProcessInput>,
}

/// The input side of an attached process.
#[async_trait]
pub trait ProcessInput: Send + Sync {
    /// Writes standard input at `offset`. The runtime skips bytes that the worker has accepted
    /// before. The call returns when the worker has accepted the bytes, so a process that does not
    /// read blocks its writer. Input for a process that no longer reads, or whose input is inline,
    /// is discarded.
    ///
    /// Errors: [`RuntimeError::OffsetOutOfRange`] if `offset` leaves a gap.
    async fn stdin(&self, offset: u64, data: bytes::Bytes) -> Result<(), RuntimeError>;

    /// Closes standard input.
    async fn close_stdin(&self) -> Result<(), RuntimeError>;

    /// Sends a signal to the process.
    async fn signal(&self, number: u8) -> Result<(), RuntimeError>;

    /// Changes the size of the terminal.
    ///
    /// Errors: [`RuntimeError::Unsupported`] if the process has no terminal.
    async fn resize(&self, window: TerminalSize) -> Result<(), RuntimeError>;

    /// Acknowledges output up to these positions. The worker may discard acknowledged output that
    /// exceeds the size of its spool.
    async fn acknowledge(&self, up_to: Offsets) -> Result<(), RuntimeError>;

    /// Allows the runtime to drop the oldest output rather than block the process, because no
    /// reader is attached any more.
    async fn detach(&self) -> Result<(), RuntimeError>;
}
