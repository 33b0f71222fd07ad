//! Follows a workload to its end: says what happens, attaches to its process, and passes on what we are asked.

pub(crate) mod attach;
pub(crate) mod end;
pub(crate) mod narrate;
pub(crate) mod outage;
pub(crate) mod stdin;
pub(crate) mod watch;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rpc::Reason;
use rpc::pb::scheduler::{
    CancelRequest, Finished, GetRequest, Whereabouts, WorkloadState, watch_response::Event,
};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::client::connect::{Connection, Pause};
use crate::ending::error::{Interrupted, Refused, refused};
use crate::ending::exit_code;
use crate::ending::signals::Signals;
use crate::follow::attach::{AttachEnd, Streams, attach, detach};
use crate::follow::narrate::{Waiting, said};
use crate::follow::stdin::Stdin;
use crate::follow::watch::Watch;
use crate::render::output::{Sink, Which};
use crate::render::ui::Ui;

/// What the process of a cancelled workload has between TERM and KILL.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// What an interrupted process has between INT and TERM, and as much between TERM and KILL.
const INTERRUPT_GRACE: Duration = Duration::from_secs(5);

/// How often cancelling is tried while nobody answers.
const CANCEL_TRIES: usize = 8;

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSignal {
    /// The workload is cancelled, after Ctrl-C once its process was interrupted; a second one does not wait for its end.
    Cancel,
    /// The workload is left to itself.
    Leave,
}

/// How to follow.
pub(crate) struct Follow<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    pub(crate) workload: String,
    pub(crate) on_signal: OnSignal,
    /// Whether what happens before the process runs is said.
    pub(crate) narrate: bool,
    /// Whether our standard input is forwarded.
    pub(crate) stdin: bool,
    /// Whether output that was written is acknowledged.
    pub(crate) acknowledge: bool,
}

/// A workload that was followed to its end.
pub(crate) struct FollowResult {
    pub(crate) finished: Finished,
    /// The exit code of whatever made us cancel it.
    pub(crate) asked: Option<u8>,
    /// The exit code if standard output was closed before all output was written, even if the workload had ended.
    pub(crate) unread: Option<u8>,
    /// Some of its output is missing.
    pub(crate) output_lost: bool,
}

/// What was seen of a workload so far, and what we were asked.
#[derive(Default)]
struct State {
    running: Option<Whereabouts>,
    finished: Option<Finished>,
    /// The exit code of whatever made us cancel it.
    asked: Option<u8>,
    unread: Option<u8>,
    cancelling: JoinSet<anyhow::Result<()>>,
    /// Interrupts the process that is attached.
    interrupt: Arc<Notify>,
    /// The process was interrupted, and the workload is to be cancelled if that does not end it.
    interrupted: bool,
    /// Why it waits.
    waiting: Waiting,
}

impl Follow<'_> {
    /// Until the workload has ended and all its output was written. [`Interrupted`]: we do not wait for that.
    pub(crate) async fn run(&self, signals: &mut Signals) -> anyhow::Result<FollowResult> {
        let mut watch = Watch::new(self.connection, self.ui, self.workload.clone());
        let mut state = State::default();
        let mut output_lost = false;

        let finished = loop {
            // Before the process runs there is nothing to copy. What was interrupted runs once more.
            if let Some(whereabouts) = state.running.take() {
                output_lost |= self.copy(whereabouts, &mut watch, signals, &mut state).await?;
            }
            if state.running.is_some() {
                continue;
            }
            if let Some(finished) = state.finished.take() {
                break finished;
            }
            tokio::select! {
                event = watch.next() => self.take(event?, &mut state),
                Some(why) = state.waiting.next() => {
                    self.ui.event("waiting", why.details);
                    self.ui.note(&why.text);
                }
                code = signals.next() => self.signalled(code, &mut state).await?,
            }
        };
        Ok(FollowResult { finished, asked: state.asked, unread: state.unread, output_lost })
    }

    /// Copies output and input until there is no more. Answers whether some of it is lost.
    async fn copy(
        &self,
        whereabouts: Whereabouts,
        watch: &mut Watch<'_>,
        signals: &mut Signals,
        state: &mut State,
    ) -> anyhow::Result<bool> {
        let Self { connection, ui, .. } = *self;
        let mut streams = streams(ui, self.stdin, self.acknowledge)?;
        streams.interrupt = state.interrupt.clone();
        let attached = loop {
            let copying = attach(connection, ui, &self.workload, whereabouts.clone(), &mut streams)
                .instrument(tracing::info_span!(target: "gantry", "copy output", service = "gantry"));
            tokio::pin!(copying);
            let attached = loop {
                tokio::select! {
                    end = &mut copying => break Ok(end),
                    event = watch.next(), if state.finished.is_none() => self.take(event?, state),
                    code = signals.next() => match self.on_signal {
                        OnSignal::Cancel if code == exit_code::INTERRUPTED && state.asked.is_none() => {
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
            // It would wait for the rest for ever.
            ui.error(&format!("standard input cannot be sent to the command, which is ended: {refused}"));
            if state.asked.is_none() && state.finished.is_none() {
                self.cancel(state);
            }
            state.asked.get_or_insert(exit_code::OURS);
        };
        let failure = match (&attached, streams.stdout.failure()) {
            (Ok(AttachEnd::StdoutClosed), Some(error)) => {
                Some(format!("cannot write to standard output: {error}"))
            }
            _ => None,
        };
        if let Some(failure) = &failure {
            ui.error(failure);
        }
        let code = if failure.is_some() { exit_code::OURS } else { exit_code::PIPE };
        match (attached, self.on_signal) {
            // An attach that starts late may miss the first output.
            (Ok(AttachEnd::Done | AttachEnd::InterruptRefused), OnSignal::Leave) => Ok(false),
            (Ok(AttachEnd::Done | AttachEnd::InterruptRefused), OnSignal::Cancel) => {
                Ok(streams.stdout.missing() > 0 || streams.stderr.missing() > 0)
            }
            (Ok(AttachEnd::Lost(refused) | AttachEnd::InputRefused(refused)), _) => {
                ui.warn(&lost(&self.workload, had(&streams), &refused));
                Ok(true)
            }
            (Ok(AttachEnd::Away(away)), _) => {
                ui.warn(&format!("{} cannot be had: {away}", output_of(&self.workload, had(&streams))));
                Ok(true)
            }
            (Ok(AttachEnd::StdoutClosed), OnSignal::Leave) => {
                self.leave(&whereabouts, &streams, state).await;
                Err(Interrupted(code).into())
            }
            (Err(code), _) => {
                self.leave(&whereabouts, &streams, state).await;
                Err(Interrupted(code).into())
            }
            (Ok(AttachEnd::StdoutClosed), OnSignal::Cancel) => {
                if state.finished.is_none() {
                    if state.asked.is_none() {
                        self.cancel(state);
                    }
                    state.asked.get_or_insert(code);
                }
                state.unread = Some(code);
                Ok(failure.is_some())
            }
        }
    }

    /// Says what happened, and keeps what we need of it.
    fn take(&self, event: Event, state: &mut State) {
        state.waiting.over();
        if self.narrate {
            self.say(&event, state);
        }
        match event {
            Event::Running(event) => state.running = event.whereabouts,
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

    fn say(&self, event: &Event, state: &mut State) {
        // Said last, with the exit code.
        if matches!(event, Event::Finished(_)) {
            return;
        }
        let said = said(event);
        self.ui.event(said.name, said.details.clone());
        if !said.is_news {
            return;
        }
        match event {
            Event::Queued(_) => state.waiting.changed(self.connection, &self.workload, said),
            _ => said.text.lines().for_each(|line| self.ui.note(line)),
        }
    }

    /// While there is nothing to detach from.
    async fn signalled(&self, code: u8, state: &mut State) -> anyhow::Result<()> {
        match self.on_signal {
            OnSignal::Cancel => self.cancel_or_leave(code, state).await,
            OnSignal::Leave => {
                self.say_left(state).await;
                Err(Interrupted(code).into())
            }
        }
    }

    /// The first time the workload is cancelled; the second time we go once that was heard.
    async fn cancel_or_leave(&self, code: u8, state: &mut State) -> anyhow::Result<()> {
        if state.asked.is_some() {
            // The first signal may have interrupted the process only.
            self.cancel(state);
            // Two seconds are enough to be heard; we were asked to go.
            let heard = tokio::time::timeout(Duration::from_secs(2), state.cancelling.join_next()).await;
            let workload = &self.workload;
            if matches!(heard, Ok(Some(Ok(Ok(()))))) {
                self.ui.note(&format!("does not wait; workload {workload} is cancelled all the same"));
            } else {
                self.ui.warn(&format!("it may go on; cancel it with `gantry cancel {workload}`"));
            }
            return Err(Interrupted(code).into());
        }
        state.asked = Some(code);
        self.ui.note("asks the command to end and kills it after 10 s; repeat the signal to leave at once");
        self.cancel(state);
        Ok(())
    }

    /// Interrupts the process, and cancels the workload if the process goes on.
    fn interrupt(&self, state: &mut State) {
        state.asked = Some(exit_code::INTERRUPTED);
        state.interrupted = true;
        self.ui.note("interrupts the command and kills it after 10 s; press Ctrl-C again to leave at once");
        state.interrupt.notify_one();
        let cancelled = cancel(self.connection, self.workload.clone(), INTERRUPT_GRACE);
        state.cancelling.spawn(async {
            tokio::time::sleep(INTERRUPT_GRACE).await;
            cancelled.await
        });
    }

    fn cancel(&self, state: &mut State) {
        state.interrupted = false;
        // A cancellation that waits for the process to be interrupted is early now.
        state.cancelling = JoinSet::new();
        state.cancelling.spawn(cancel(self.connection, self.workload.clone(), GRACE));
    }

    async fn leave(&self, whereabouts: &Whereabouts, streams: &Streams, state: &State) {
        if self.acknowledge {
            detach(self.connection, whereabouts, streams).await;
        }
        self.say_left(state).await;
    }

    /// Says that the workload goes on, if it does. Whoever only read along never thought otherwise.
    async fn say_left(&self, state: &State) {
        if !self.acknowledge || state.finished.is_some() {
            return;
        }
        let workload = &self.workload;
        let request = GetRequest { team: self.connection.team.clone(), workload_id: workload.clone() };
        let mut workloads = self.connection.workloads();
        let answer = tokio::time::timeout(Duration::from_secs(2), workloads.get(request)).await;
        let Ok(Ok(response)) = answer else { return };
        if response.into_inner().workload.is_some_and(|now| now.state() != WorkloadState::Finished) {
            self.ui.note(&format!("workload {workload} goes on; stop it with `gantry cancel {workload}`"));
        }
    }
}

/// How many bytes came.
fn had(streams: &Streams) -> u64 {
    streams.stdout.received() + streams.stderr.received()
}

/// What is missing where `had` bytes came.
fn output_of(workload: &str, had: u64) -> String {
    let what = if had == 0 { "the output" } else { "the rest of the output" };
    format!("{what} of workload {workload}")
}

/// What is said when output cannot be had, of which `had` bytes came.
fn lost(workload: &str, had: u64, refused: &Refused) -> String {
    let what = output_of(workload, had);
    if refused.is(Reason::ProcessNotFound) {
        return format!(
            "{what} is gone: logs and containers are kept for five minutes after the end, or for what \
             --gc-grace of its gateway says, and go with their worker"
        );
    }
    if refused.is_transient() {
        let why = refused.why();
        return format!("{what} cannot be had: its worker does not answer: {why} (UNAVAILABLE)");
    }
    format!("{what} cannot be had: {refused}")
}

/// Our ends of a process's output and input.
fn streams(ui: &Ui, stdin: bool, acknowledge: bool) -> anyhow::Result<Streams> {
    let sink = |which: Which| match ui.events() {
        Some(events) => Ok(Sink::events(which, events)),
        None => Sink::raw(which, ui.unfinished()).with_context(|| format!("our {} is closed", which.name())),
    };
    Ok(Streams {
        stdout: sink(Which::Stdout)?,
        stderr: sink(Which::Stderr)?,
        stdin: stdin.then(Stdin::read),
        acknowledge,
        process: None,
        interrupt: Arc::default(),
        opened: None,
    })
}

/// Asks a workload to stop. The future does not borrow the connection.
pub(crate) fn cancel(
    connection: &Connection,
    workload_id: String,
    grace: Duration,
) -> impl Future<Output = anyhow::Result<()>> + Send + use<> {
    let mut workloads = connection.workloads();
    let request =
        CancelRequest { team: connection.team.clone(), workload_id, grace: Some(rpc::duration(grace)) };
    async move {
        let (mut tries, mut pause) = (1, Pause::default());
        loop {
            match workloads.cancel(request.clone()).await {
                Ok(_) => return Ok(()),
                Err(status) if tries < CANCEL_TRIES && Refused::from(status.clone()).is_transient() => {
                    tries += 1;
                    pause.wait().await;
                }
                Err(status) => {
                    let workload = request.workload_id;
                    return Err(refused(format!("cannot cancel workload {workload}"))(status));
                }
            }
        }
    }
}
