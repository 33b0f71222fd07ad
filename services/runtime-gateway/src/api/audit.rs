//! Audit events: log lines that name the caller who ran a process in a container, or typed into
//! one.
//!
//! Operators search logs for these lines, so the fields are stable. `docs/security.md` describes
//! them. Environment and input of a process are never logged.

use std::time::Duration;

use domain::workload::Exit;
use domain::{AttemptId, ProcessId};
use rpc::Refusal;
use runtime::{Ended, ProcessSpec, ProcessState, RuntimeError};
use server::Caller;
use tonic::Status;

use crate::worker::Worker;

/// Most bytes of a command in a log line.
const MAX_COMMAND: usize = 1024;

/// A further process, and the caller that starts it.
#[derive(Clone)]
pub(super) struct ExecEvent {
    caller: String,
    team: String,
    worker: String,
    container: AttemptId,
    process: ProcessId,
    command: String,
    has_terminal: bool,
}

/// Fields of the end of a process, or of its refusal.
#[derive(Default)]
struct Outcome {
    reason: Option<String>,
    exit_code: Option<u8>,
    signal: Option<u8>,
    duration: Option<Duration>,
}

impl ExecEvent {
    pub(super) fn new(
        caller: Option<&Caller>,
        worker: &Worker,
        (team, container, process): (&str, AttemptId, ProcessId),
        spec: &ProcessSpec,
    ) -> Self {
        Self {
            caller: peer(caller),
            team: team.to_owned(),
            worker: worker.config.worker_name.clone(),
            container,
            process,
            command: shown(&spec.command),
            has_terminal: spec.terminal.is_some(),
        }
    }

    pub(super) fn started(&self) {
        self.log("started", Outcome::default());
    }

    pub(super) fn refused(&self, status: &Status) {
        let reason = Refusal::from(status.clone()).reason.unwrap_or_else(|| status.code().to_string());
        self.log("refused", Outcome { reason: Some(reason), ..Outcome::default() });
    }

    /// Logs the end of the process. `state`: its last state, which is missing if its container was
    /// deleted.
    pub(super) fn ended(&self, state: Result<ProcessState, RuntimeError>, duration: Duration) {
        let mut outcome = Outcome { duration: Some(duration), ..Outcome::default() };
        match state {
            Ok(ProcessState::Ended(Ended::Exited { exit, .. })) => match exit {
                Exit::Code(code) => outcome.exit_code = Some(code),
                Exit::Signal(signal) => outcome.signal = Some(signal),
                Exit::OutOfMemory => outcome.reason = Some("OUT_OF_MEMORY".to_owned()),
            },
            Ok(ProcessState::Ended(Ended::NotStarted(failure) | Ended::Unknown(failure))) => {
                outcome.reason = Some(failure.reason.as_str().to_owned());
            }
            Err(RuntimeError::ProcessNotFound(_)) => outcome.reason = Some("CONTAINER_DELETED".to_owned()),
            Err(error) => outcome.reason = Some(error.failure().reason.as_str().to_owned()),
            Ok(ProcessState::Starting | ProcessState::Started | ProcessState::StartUnknown) => {
                outcome.reason = Some("EXIT_UNKNOWN".to_owned());
            }
        }
        self.log("ended", outcome);
    }

    fn log(&self, outcome: &str, Outcome { reason, exit_code, signal, duration }: Outcome) {
        tracing::info!(
            target: "audit",
            event = "exec",
            outcome,
            caller = self.caller,
            team = self.team,
            worker.name = self.worker,
            container.id = %self.container,
            process.id = %self.process,
            terminal = self.has_terminal,
            command = self.command,
            reason,
            exit_code,
            signal,
            duration_ms = duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
            "further process {outcome}"
        );
    }
}

/// Logs that a caller sends input to a process that another call has started.
pub(super) fn log_input(
    caller: Option<&Caller>,
    worker: &Worker,
    (team, container, process): (&str, AttemptId, ProcessId),
) {
    tracing::info!(
        target: "audit",
        event = "attach",
        caller = peer(caller),
        team,
        worker.name = worker.config.worker_name,
        container.id = %container,
        process.id = %process,
        "caller sends input to a process"
    );
}

fn peer(caller: Option<&Caller>) -> String {
    caller.map(|caller| caller.peer().to_owned()).unwrap_or_default()
}

/// Returns the beginning of a command, with a space between two arguments. The log escapes control
/// characters.
fn shown(command: &[Vec<u8>]) -> String {
    let mut text = command.join(&b' ');
    if text.len() > MAX_COMMAND {
        text.truncate(MAX_COMMAND);
        text.extend("…".as_bytes());
    }
    String::from_utf8_lossy(&text).into_owned()
}
