//! Following a workload to its end: progress lines, attachment to its process, and signals.
//!
//! `run`, `attach` and `logs` use [`Follow`]. [`exec`] follows a further process.

mod answers;
pub(crate) mod attach;
pub(crate) mod end;
pub(crate) mod exec;
mod inputs;
mod keys;
pub(crate) mod narrate;
pub(crate) mod stdin;
pub(crate) mod streams;
pub(crate) mod watch;
pub(crate) mod window;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rpc::Reason;
use rpc::pb::scheduler::{
    AttemptLocation, CancelRequest, Finished, GetRequest, Materializing, WorkloadState, watch_response::Event,
};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::cli::detach_keys::DetachKeys;
use crate::client::connect::Connection;
use crate::ending::error::{Interrupted, Refused, refused};
use crate::ending::exit_code;
use crate::ending::signals::Signals;
use crate::follow::attach::{AttachEnd, Target, attach, detach};
use crate::follow::inputs::InputBars;
use crate::follow::narrate::{WaitReasons, describe_event};
use crate::follow::streams::{Streams, TerminalMode};
use crate::follow::watch::Watch;
use crate::follow::window::Window;
use crate::render::ui::Ui;

/// Time between SIGTERM and SIGKILL for a cancelled workload.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// Time between SIGINT and SIGTERM, and between SIGTERM and SIGKILL, for an interrupted process.
const INTERRUPT_GRACE: Duration = Duration::from_secs(5);

/// Meaning of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSignal {
    /// The workload is cancelled. After Ctrl-C its process is interrupted first. A second signal
    /// ends the command without waiting.
    Cancel,
    /// The workload runs on.
    Leave,
}

/// Workload to follow, and options.
pub(crate) struct Follow<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    pub(crate) workload: String,
    pub(crate) on_signal: OnSignal,
    /// Whether events before the start of the process are printed.
    pub(crate) narrate: bool,
    /// Whether standard input is forwarded.
    pub(crate) stdin: bool,
    /// Whether written output is acknowledged.
    pub(crate) acknowledge: bool,
    /// Detach keys if the process has a terminal.
    pub(crate) terminal: Option<&'a DetachKeys>,
    /// Number of last lines of the output that exists already. `None`: all of that output.
    pub(crate) tail: Option<usize>,
    /// Time from which on output is wanted. `None`: all of it.
    pub(crate) since: Option<SystemTime>,
}

/// End of a followed workload.
pub(crate) struct FollowResult {
    pub(crate) finished: Finished,
    /// Exit code of the event because of which the workload was cancelled.
    pub(crate) cancel_code: Option<u8>,
    /// Exit code if standard output was closed before all output was written, even if the workload
    /// had ended.
    pub(crate) closed_code: Option<u8>,
    /// Some of the output is missing.
    pub(crate) output_lost: bool,
}

/// Events of the workload so far, and signals that were received.
#[derive(Default)]
struct State {
    running: Option<AttemptLocation>,
    finished: Option<Finished>,
    /// Exit code of the event because of which the workload was cancelled.
    cancel_code: Option<u8>,
    closed_code: Option<u8>,
    cancelling: JoinSet<anyhow::Result<()>>,
    /// Interrupts the attached process.
    interrupt: Arc<Notify>,
    /// The process was interrupted, and the workload will be cancelled if the process goes on.
    interrupted: bool,
    /// Reason why the workload waits.
    waiting: WaitReasons,
    /// Bars of the inputs that arrive on the worker.
    inputs: Option<InputBars>,
}

impl Follow<'_> {
    /// Follows the workload until it has ended and all its output is written. [`Interrupted`]: the
    /// command ends before that.
    pub(crate) async fn run(&self, signals: &mut Signals) -> anyhow::Result<FollowResult> {
        let mut watch = Watch::new(self.connection, self.workload.clone());
        let mut state = State::default();
        let mut output_lost = false;

        let finished = loop {
            // There is no output before the process runs. An interrupted workload runs again.
            if let Some(location) = state.running.take() {
                output_lost |= self.copy(location, &mut watch, signals, &mut state).await?;
            }
            if state.running.is_some() {
                continue;
            }
            if let Some(finished) = state.finished.take() {
                break finished;
            }
            tokio::select! {
                event = watch.next() => self.handle_event(event?, &mut state),
                Some(why) = state.waiting.next() => {
                    self.ui.event("waiting", why.details);
                    self.ui.note(&why.text);
                }
                code = signals.next() => self.handle_signal(code, &mut state).await?,
            }
        };
        Ok(FollowResult {
            finished,
            cancel_code: state.cancel_code,
            closed_code: state.closed_code,
            output_lost,
        })
    }

    /// Copies output and input to their end. Returns whether some output is lost.
    async fn copy(
        &self,
        location: AttemptLocation,
        watch: &mut Watch<'_>,
        signals: &mut Signals,
        state: &mut State,
    ) -> anyhow::Result<bool> {
        let ui = self.ui;
        let target = self.target();
        let mut streams = Streams::open(ui, self.acknowledge)?;
        streams.state.since = self.since;
        streams.interrupt = state.interrupt.clone();
        if let Some(lines) = self.tail {
            streams.keep_tails(lines);
        }
        streams.window = self.terminal.map(|_| Window::watch(None)).transpose()?;
        if self.stdin {
            streams.read_stdin(ui, self.terminal, self.on_signal == OnSignal::Leave);
        }
        let attached = loop {
            let copying = attach(target, location.clone(), &mut streams)
                .instrument(tracing::info_span!(target: "gantry", "copy output", service = "gantry"));
            tokio::pin!(copying);
            let attached = loop {
                tokio::select! {
                    end = &mut copying => break Ok(end),
                    event = watch.next(), if state.finished.is_none() => self.handle_event(event?, state),
                    code = signals.next() => match self.on_signal {
                        OnSignal::Cancel if code == exit_code::INTERRUPTED && state.cancel_code.is_none() => {
                            self.interrupt(state);
                        }
                        OnSignal::Cancel => self.cancel_or_leave(code, state).await?,
                        OnSignal::Leave => break Err(code),
                    },
                }
            };
            if let Ok(AttachEnd::InterruptRefused) = &attached {
                self.cancel(state);
                continue;
            }
            let Ok(AttachEnd::InputRefused(refused)) = &attached else { break attached };
            // The command would wait for the rest of its input forever.
            ui.error(&format!(
                "cannot send standard input to the command: {refused}; the command is stopped"
            ));
            if state.cancel_code.is_none() && state.finished.is_none() {
                self.cancel(state);
            }
            state.cancel_code.get_or_insert(exit_code::GANTRY_FAILED);
        };
        // Messages follow.
        streams.state.mode = TerminalMode::Unchanged;
        let failure = match (&attached, streams.stdout.failure()) {
            (Ok(AttachEnd::StdoutClosed), Some(error)) => {
                Some(format!("cannot write to standard output: {error}"))
            }
            _ => None,
        };
        if let Some(failure) = &failure {
            ui.error(failure);
        }
        let code = if failure.is_some() { exit_code::GANTRY_FAILED } else { exit_code::PIPE };
        match (attached, self.on_signal) {
            // An attachment that starts late may miss the first output.
            (Ok(AttachEnd::Done | AttachEnd::InterruptRefused), OnSignal::Leave) => Ok(false),
            (Ok(AttachEnd::Done | AttachEnd::InterruptRefused), OnSignal::Cancel) => {
                Ok(streams.is_incomplete())
            }
            (Ok(AttachEnd::Lost(refused) | AttachEnd::InputRefused(refused)), _) => {
                ui.warn(&describe_lost_output(&self.workload, streams.received(), &refused));
                Ok(true)
            }
            (Ok(AttachEnd::WorkerMissing(missing)), _) => {
                ui.warn(&format!("cannot read {}: {missing}", output_of(&self.workload, streams.received())));
                Ok(true)
            }
            (Ok(AttachEnd::Detached), _) => {
                detach(target, &location, &mut streams, None, true).await;
                let workload = &self.workload;
                let team = target.connection.team_option();
                ui.warn(&format!(
                    "detached from workload {workload}; attach again with \"gantry{team} attach {workload}\"; \
                     its input ends if no caller attaches within an hour"
                ));
                Err(Interrupted(0).into())
            }
            (Ok(AttachEnd::StdoutClosed), OnSignal::Leave) => {
                self.leave(&location, &mut streams, state).await;
                Err(Interrupted(code).into())
            }
            (Err(code), _) => {
                self.leave(&location, &mut streams, state).await;
                Err(Interrupted(code).into())
            }
            (Ok(AttachEnd::StdoutClosed), OnSignal::Cancel) => {
                if state.finished.is_none() {
                    if state.cancel_code.is_none() {
                        self.cancel(state);
                    }
                    state.cancel_code.get_or_insert(code);
                }
                state.closed_code = Some(code);
                Ok(failure.is_some())
            }
        }
    }

    /// Prints an event, and updates the state.
    fn handle_event(&self, event: Event, state: &mut State) {
        state.waiting.over();
        if !matches!(event, Event::Materializing(_)) {
            state.inputs = None;
        }
        if self.narrate {
            self.print_event(&event, state);
        }
        match event {
            Event::Running(event) => state.running = event.location,
            Event::Finished(event) => state.finished = Some(event),
            // The process ended before it was cancelled, so its outputs are kept.
            Event::Publishing(_) if state.interrupted => state.cancelling = JoinSet::new(),
            Event::Queued(_)
            | Event::Placed(_)
            | Event::Preparing(_)
            | Event::Materializing(_)
            | Event::Publishing(_) => {}
        }
    }

    fn print_event(&self, event: &Event, state: &mut State) {
        // The caller prints this event last, with the exit code.
        if matches!(event, Event::Finished(_)) {
            return;
        }
        let description = describe_event(event);
        self.ui.event(description.name, description.details.clone());
        if !description.is_news {
            return;
        }
        match event {
            Event::Queued(_) => state.waiting.changed(self.connection, &self.workload, description),
            Event::Materializing(Materializing { inputs })
                if inputs.iter().all(|input| input.waits_for.is_empty()) =>
            {
                state.inputs.get_or_insert_with(|| InputBars::start(self.ui)).show(inputs);
            }
            _ => description.text.lines().for_each(|line| self.ui.step(line)),
        }
    }

    /// Handles a signal while no process is attached.
    async fn handle_signal(&self, code: u8, state: &mut State) -> anyhow::Result<()> {
        match self.on_signal {
            OnSignal::Cancel => self.cancel_or_leave(code, state).await,
            OnSignal::Leave => {
                self.print_if_running(state).await;
                Err(Interrupted(code).into())
            }
        }
    }

    /// Cancels the workload at the first signal. At the second signal, ends the command once the
    /// scheduler has the cancellation.
    async fn cancel_or_leave(&self, code: u8, state: &mut State) -> anyhow::Result<()> {
        if state.cancel_code.is_some() {
            // The first signal may have interrupted the process only.
            self.cancel(state);
            // The caller wants to leave, so the scheduler has two seconds to answer.
            let cancelled = tokio::time::timeout(Duration::from_secs(2), state.cancelling.join_next()).await;
            let workload = &self.workload;
            if matches!(cancelled, Ok(Some(Ok(Ok(()))))) {
                self.ui.note(&format!("leaving; workload {workload} is cancelled"));
            } else {
                self.ui.warn(&format!(
                    "workload {workload} may run on; stop it with `gantry cancel {workload}`"
                ));
            }
            return Err(Interrupted(code).into());
        }
        state.cancel_code = Some(code);
        self.ui.note("stopping the command; it is killed after 10 s; repeat the signal to leave at once");
        self.cancel(state);
        Ok(())
    }

    /// Interrupts the process, and cancels the workload if the process goes on.
    fn interrupt(&self, state: &mut State) {
        state.cancel_code = Some(exit_code::INTERRUPTED);
        state.interrupted = true;
        self.ui
            .note("interrupting the command; it is killed after 10 s; press Ctrl-C again to leave at once");
        state.interrupt.notify_one();
        let cancelled = cancel(self.connection, self.workload.clone(), INTERRUPT_GRACE);
        state.cancelling.spawn(async {
            tokio::time::sleep(INTERRUPT_GRACE).await;
            cancelled.await
        });
    }

    fn cancel(&self, state: &mut State) {
        state.interrupted = false;
        // This replaces a cancellation that waits for the effect of the interrupt.
        state.cancelling = JoinSet::new();
        state.cancelling.spawn(cancel(self.connection, self.workload.clone(), GRACE));
    }

    fn target(&self) -> Target<'_> {
        Target { connection: self.connection, ui: self.ui, workload: &self.workload, further: None }
    }

    async fn leave(&self, location: &AttemptLocation, streams: &mut Streams, state: &State) {
        if self.acknowledge {
            detach(self.target(), location, streams, None, false).await;
        }
        self.print_if_running(state).await;
    }

    /// Prints that the workload runs on, if it does. `gantry logs` never stops a workload, so it
    /// prints nothing.
    async fn print_if_running(&self, state: &State) {
        if !self.acknowledge || state.finished.is_some() {
            return;
        }
        let workload = &self.workload;
        let request = GetRequest { team: self.connection.team.clone(), workload_id: workload.clone() };
        let mut workloads = self.connection.workloads();
        let answer = tokio::time::timeout(Duration::from_secs(2), workloads.get(request)).await;
        let Ok(Ok(response)) = answer else { return };
        if response.into_inner().workload.is_some_and(|now| now.state() != WorkloadState::Finished) {
            self.ui.note(&format!("workload {workload} runs on; stop it with `gantry cancel {workload}`"));
        }
    }
}

/// Names the missing part of the output if `received` bytes of each output were received.
fn output_of(workload: &str, received: (u64, u64)) -> String {
    let what = if received == (0, 0) { "the output" } else { "the rest of the output" };
    format!("{what} of workload {workload}")
}

/// Describes output that cannot be read after `received` bytes.
fn describe_lost_output(workload: &str, received: (u64, u64), refused: &Refused) -> String {
    let what = output_of(workload, received);
    if refused.is(Reason::ProcessNotFound) {
        return format!(
            "{what} is deleted: output is kept for 5 minutes after the end of a workload, or for the --gc-grace of the \
             cluster, and is lost with its worker"
        );
    }
    if refused.is_transient() {
        let cause = refused.cause();
        return format!("cannot read {what}: its worker does not answer: {cause} (UNAVAILABLE)");
    }
    format!("cannot read {what}: {refused}")
}

/// Cancels a workload. The future does not borrow the connection.
pub(crate) fn cancel(
    connection: &Connection,
    workload_id: String,
    grace: Duration,
) -> impl Future<Output = anyhow::Result<()>> + Send + use<> {
    let (mut workloads, mut outage) = (connection.workloads(), connection.patience.of_call());
    let request =
        CancelRequest { team: connection.team.clone(), workload_id, grace: Some(rpc::duration(grace)) };
    async move {
        loop {
            match workloads.cancel(request.clone()).await {
                Ok(_) => return Ok(()),
                Err(status) if Refused::from(status.clone()).is_transient() && outage.goes_on(None) => {
                    outage.pause().await;
                }
                Err(status) => {
                    let workload = request.workload_id;
                    return Err(refused(format!("cannot cancel workload {workload}"))(status));
                }
            }
        }
    }
}
