//! Following a further process in the container of a workload: `gantry exec`, and `gantry attach
//! --process`.
//!
//! The process runs on when the command line ends. Only the end of the container ends it.

use anyhow::{Context, bail};
use rpc::pb::runtime::{Exited, exited};
use rpc::pb::scheduler::{AttemptLocation, Exit, Failure, OutOfMemory, exit::Status};
use serde_json::json;

use crate::ending::error::Interrupted;
use crate::ending::exit_code::{self, End};
use crate::ending::signals::Signals;
use crate::follow::attach::{AttachEnd, FurtherProcess, Target, attach, detach};
use crate::follow::streams::{Streams, TerminalMode};
use crate::render::json as shown;
use crate::render::ui::Ui;

/// Number of the signal that a process receives when it writes into a closed pipe.
const SIGPIPE: u32 = 13;

const SIGKILL: u32 = 9;

/// End of a process.
pub(crate) struct ProcessEnd {
    exited: Exited,
    /// Whether some of its output is lost.
    is_output_lost: bool,
}

impl ProcessEnd {
    /// Returns whether SIGKILL ended the process, as at the end of its container.
    pub(crate) fn was_killed(&self) -> bool {
        matches!(self.exited.status, Some(exited::Status::Signal(SIGKILL)))
    }
}

/// Prints how the process ended, and returns the exit code.
pub(crate) fn end(ui: &Ui, process: &FurtherProcess, ended: ProcessEnd) -> u8 {
    let Exited { status, reason, message } = ended.exited;
    let exit = Exit {
        status: status.map(|status| match status {
            exited::Status::Code(code) => Status::Code(code),
            exited::Status::Signal(signal) => Status::Signal(signal),
            exited::Status::OutOfMemory(_) => Status::OutOfMemory(OutOfMemory {}),
        }),
    };
    let failure = (!reason.is_empty()).then_some(Failure { reason, message });
    let End { mut code, message } = exit_code::process_end(&exit, failure.as_ref());
    if let Some(message) = message {
        ui.warn(&message);
    }
    if ended.is_output_lost && code == 0 {
        ui.warn("the command succeeded, but some of its output is missing");
        code = exit_code::GANTRY_FAILED;
    }
    let id = &process.process_id;
    let failure = failure.as_ref().map(shown::failure);
    let details = json!({ "process_id": id, "exit": shown::exit(&exit), "failure": failure, "status": code });
    ui.event("finished", details);
    code
}

/// Copies output and input of a process to their end. [`Interrupted`]: the caller left before.
pub(crate) async fn follow(
    target: Target<'_>,
    process: &FurtherProcess,
    location: &AttemptLocation,
    mut streams: Streams,
    signals: &mut Signals,
) -> anyhow::Result<ProcessEnd> {
    let target = Target { further: Some(process), ..target };
    let (ui, workload, id) = (target.ui, target.workload, &process.process_id);
    let interrupt = streams.interrupt.clone();
    let mut is_interrupted = false;
    let end = loop {
        let attaching = attach(target, location.clone(), &mut streams);
        tokio::pin!(attaching);
        let end = loop {
            tokio::select! {
                end = &mut attaching => break Ok(end),
                code = signals.next() => {
                    if code != exit_code::INTERRUPTED || is_interrupted {
                        break Err(code);
                    }
                    is_interrupted = true;
                    interrupt.notify_one();
                    ui.note("interrupting the command; press Ctrl-C again to leave");
                }
            }
        };
        match end {
            Ok(AttachEnd::InterruptRefused) => {
                ui.warn("the worker cannot interrupt the command; press Ctrl-C again to leave");
            }
            end => break end,
        }
    };
    // Messages follow.
    streams.state.mode = TerminalMode::Unchanged;
    let doing = || match (&process.spec, streams.state.is_started) {
        (Some(_), false) => format!("cannot run the command in workload {workload}"),
        _ => format!("cannot follow process {id} of workload {workload}"),
    };
    match end {
        Ok(AttachEnd::Done | AttachEnd::InterruptRefused) => {
            let is_output_lost = process.spec.is_some() && streams.is_incomplete();
            Ok(ProcessEnd { exited: streams.state.exited.unwrap_or_default(), is_output_lost })
        }
        Ok(AttachEnd::Lost(refused)) => Err(refused).with_context(doing),
        Ok(AttachEnd::WorkerMissing(missing)) => bail!("{}: {missing}", doing()),
        Ok(AttachEnd::InputRefused(refused)) => {
            let error = Err(refused).context("cannot send standard input to the command");
            detach(target, location, &mut streams, None, false).await;
            error
        }
        Ok(AttachEnd::Detached) => {
            detach(target, location, &mut streams, None, true).await;
            let team = target.connection.team_option();
            ui.warn(&format!(
                "detached from process {id}; attach again with \"gantry{team} attach --process {id} {workload}\""
            ));
            Err(Interrupted(0).into())
        }
        Ok(AttachEnd::StdoutClosed) => {
            let failure =
                streams.stdout.failure().map(|error| format!("cannot write to standard output: {error}"));
            detach(target, location, &mut streams, Some(SIGPIPE), false).await;
            match failure {
                Some(failure) => bail!(failure),
                None => Err(Interrupted(exit_code::PIPE).into()),
            }
        }
        Err(code) => {
            if streams.state.is_started {
                detach(target, location, &mut streams, None, false).await;
            }
            Err(Interrupted(code).into())
        }
    }
}
