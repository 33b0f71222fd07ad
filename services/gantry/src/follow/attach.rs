//! Attachment to a process: its output, and our standard input. A broken call is resumed where it
//! broke.
//!
//! Both directions are counted in bytes. Output is acknowledged once it is written, and input is
//! dropped once the process has taken it. The bytes in between are bounded, so a slow reader slows
//! down the process, and a slow process slows down its input.

mod send;

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc::pb::runtime::{
    AttachRequest, AttachResponse, Detach, Output, ProcessSpec, Resume, Signal, StartProcess, Started,
    Stream, attach_request::Message as RequestMessage, attach_response::Message as ResponseMessage,
};
use rpc::pb::scheduler::{
    AttemptLocation, GetRequest, GetWorkerRequest, Worker, WorkerState, Workload, WorkloadState,
};
use rpc::{Peer, Reason, pb::runtime::containers_client::ContainersClient};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use self::send::{InputPosition, Sender, request};
use crate::client::connect::Connection;
use crate::ending::error::Refused;
use crate::follow::stdin::Stdin;
use crate::follow::streams::{AttachState, Streams, TerminalMode};
use crate::follow::window::Window;
use crate::render::labels;
use crate::render::output::{Closed, OutputStream, Sink};
use crate::render::table::duration;
use crate::render::ui::Ui;

/// Number of the signal that Ctrl-C sends.
const SIGINT: u32 = 2;

/// Time without an answer of the gateway before the scheduler is asked whether the worker exists.
const WORKER_CHECK_AFTER: Duration = Duration::from_millis(500);

/// Extra time for a lost worker to answer about a workload that has ended.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// Time in which the local terminal answers queries in output.
const ANSWER_TIME: Duration = Duration::from_secs(1);

/// Process to attach to.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    pub(crate) workload: &'a str,
    /// Further process. `None`: the main process of the current attempt.
    pub(crate) further: Option<&'a FurtherProcess>,
}

/// Further process in the container of a workload.
pub(crate) struct FurtherProcess {
    pub(crate) process_id: String,
    /// Attempt of the workload to which the container belongs.
    pub(crate) attempt_id: String,
    /// Container that has the process: that of the attempt, or that of a service.
    pub(crate) container_id: String,
    /// Specification if this caller starts the process.
    pub(crate) spec: Option<ProcessSpec>,
    /// Time without input and output after which a process with a terminal is ended. `None`: the
    /// default of the gateway.
    pub(crate) idle_timeout: Option<Duration>,
}

impl Target<'_> {
    /// Returns the id of the process.
    fn process_id(&self, location: &AttemptLocation) -> String {
        self.further.map_or_else(|| location.attempt_id.clone(), |further| further.process_id.clone())
    }

    /// Returns whether the process may still exist while the workload is in this state.
    fn may_exist(&self, now: &Workload) -> bool {
        let Some(further) = self.further else { return true };
        let attempt = now.location.as_ref().map(|location| &location.attempt_id);
        attempt == Some(&further.attempt_id)
    }
}

/// End of an attachment.
#[derive(Debug)]
pub(crate) enum AttachEnd {
    /// All output was received and written.
    Done,
    /// The person at the terminal typed the detach keys.
    Detached,
    /// Standard output of `gantry` was closed.
    StdoutClosed,
    /// The worker cannot interrupt the process.
    InterruptRefused,
    /// The worker cannot take standard input. The next attachment sends none.
    InputRefused(Refused),
    /// The rest of the output cannot be read.
    Lost(Refused),
    /// The rest of the output cannot be read, because the workload has ended and its worker is
    /// missing.
    WorkerMissing(MissingWorker),
}

/// Worker that does not answer and is not waited for.
#[derive(Debug)]
pub(crate) enum MissingWorker {
    /// The worker with this name was removed from the cluster.
    Removed(String),
    /// The worker is lost, and may come back.
    Lost(Box<Worker>),
}

impl fmt::Display for MissingWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Removed(name) => write!(f, "its worker {name} was removed from the cluster"),
            Self::Lost(worker) => {
                let (name, how) = (&worker.name, labels::silent(worker));
                write!(f, "its worker {name} is {how}; try again when the worker is back")
            }
        }
    }
}

impl MissingWorker {
    /// Asks the scheduler about the worker of a workload that has ended. `None`: the worker may
    /// answer, or the scheduler did not say.
    async fn of(connection: &Connection, ended: &Workload) -> Option<Self> {
        let there = ended.location.as_ref().filter(|_| ended.state() == WorkloadState::Finished)?;
        let request = GetWorkerRequest { worker: there.worker_id.clone() };
        match connection.workers().get_worker(request).await {
            Ok(response) => {
                let is_lost = |worker: &Worker| worker.state() == WorkerState::Lost;
                let lost = response.into_inner().worker.filter(is_lost);
                lost.map(|worker| Self::Lost(Box::new(worker)))
            }
            Err(status) => {
                let is_gone = Refused::from(status).is(Reason::WorkerNotFound);
                is_gone.then(|| Self::Removed(there.worker_name.clone()))
            }
        }
    }
}

/// Copies input and output until the process has ended and all its output is written, or the person
/// at the terminal detaches.
pub(crate) async fn attach(
    target: Target<'_>,
    location: AttemptLocation,
    streams: &mut Streams,
) -> AttachEnd {
    let request = streams.stdin.as_ref().and_then(Stdin::detach_request);
    let detached = async {
        match request {
            Some(request) => request.wait().await,
            None => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        end = attach_to_end(target, location, streams) => end,
        () = detached => AttachEnd::Detached,
    };
    // The call may have broken before all old output had arrived.
    match streams.write_tails().await {
        Ok(()) => end,
        Err(Closed) => AttachEnd::StdoutClosed,
    }
}

async fn attach_to_end(
    target: Target<'_>,
    mut location: AttemptLocation,
    streams: &mut Streams,
) -> AttachEnd {
    let Target { connection, ui, workload, .. } = target;
    let mut outage = connection.patience.of_stream();
    let interrupted = AtomicBool::new(false);
    loop {
        let process = target.process_id(&location);
        if streams.process.as_ref() != Some(&process) {
            if streams.process.is_some() {
                // Another attempt is another process, with separate output.
                match streams.restart().await {
                    Ok(()) => {}
                    Err(Closed) => return AttachEnd::StdoutClosed,
                }
            }
            streams.process = Some(process);
        }
        let before = streams.received();
        let refused = match attach_once(target, &location, streams, &interrupted).await {
            Ok(end) => return end,
            Err(refused) => refused,
        };
        if refused.is(Reason::Unsupported) && streams.state.is_started {
            if interrupted.load(Ordering::Relaxed) {
                return AttachEnd::InterruptRefused;
            }
            if streams.window.as_ref().is_some_and(Window::is_guess) {
                // The process has no terminal.
                streams.window = None;
                streams.state.mode = TerminalMode::Unchanged;
                continue;
            }
            if streams.stdin.take().is_some() {
                return AttachEnd::InputRefused(refused);
            }
        }
        let elsewhere = refused.is(Reason::NotAttended);
        // The main process is about to start, or has just ended.
        let has_no_main = target.further.is_some() && !streams.state.is_started;
        let is_early =
            refused.is(Reason::ContainerNotRunning) || has_no_main && refused.is(Reason::ProcessNotFound);
        if !refused.is_transient() && !elsewhere && !is_early {
            return AttachEnd::Lost(refused);
        }
        if streams.received() != before {
            outage.over();
        }
        if !outage.goes_on(streams.state.opened.take()) {
            return AttachEnd::Lost(refused);
        }
        if !is_early && let Some(patience) = outage.news() {
            let (worker, why) = (&location.worker_name, refused.cause());
            let proxies = connection.hint_at_proxies();
            let leave = streams.stdin.as_ref().map(Stdin::hint_at_keys).unwrap_or_default();
            ui.note(&format!(
                "worker {worker} does not answer ({why}); retrying for {patience}{leave}{proxies}"
            ));
        }
        outage.pause().await;
        // The next attempt shows whether the cluster runs again.
        _ = connection.revive(ui).await;
        let Some(now) = current(connection, workload).await else { continue };
        if let Some(missing) = MissingWorker::of(connection, &now).await {
            return AttachEnd::WorkerMissing(missing);
        }
        if !target.may_exist(&now) || is_early && !may_start(now.state()) {
            return AttachEnd::Lost(refused);
        }
        location = now.location.unwrap_or(location);
    }
}

/// Returns whether the main process of a workload in this state runs, or is about to.
fn may_start(state: WorkloadState) -> bool {
    matches!(state, WorkloadState::Starting | WorkloadState::Running)
}

/// Reads the current state of the workload. `None`: the scheduler does not answer.
async fn current(connection: &Connection, workload: &str) -> Option<Workload> {
    let request = GetRequest { team: connection.team.clone(), workload_id: workload.to_owned() };
    connection.workloads().get(request).await.ok()?.into_inner().workload
}

/// Makes one call. An error means that the call broke.
async fn attach_once(
    target: Target<'_>,
    location: &AttemptLocation,
    streams: &mut Streams,
    interrupted: &AtomicBool,
) -> Result<AttachEnd, Refused> {
    let Target { connection, ui, workload, .. } = target;
    let unusable = |error: anyhow::Error| {
        Refused::from(Reason::WorkerUnreachable.status("gantry", crate::ending::error::describe(&error)))
    };
    let containers = connection.containers_at(&location.gateway_endpoint).await.map_err(unusable)?;
    // A connection to a machine that is off fails only after some seconds.
    let doubt = async {
        tokio::time::sleep(WORKER_CHECK_AFTER).await;
        match current(connection, workload).await {
            Some(now) => match MissingWorker::of(connection, &now).await {
                // A lost worker may still answer, but late.
                Some(lost @ MissingWorker::Lost(_)) => {
                    tokio::time::sleep(LOST_AFTER).await;
                    Some(lost)
                }
                missing => missing,
            },
            None => None,
        }
    };
    let (requests, responses) = tokio::select! {
        opened = open(containers, target, location, streams) => opened?,
        Some(missing) = doubt => return Ok(AttachEnd::WorkerMissing(missing)),
    };

    let Streams { stdout, stderr, stdin, acknowledge, interrupt, window, state, .. } = streams;
    let (taken, taken_by_process) = watch::channel(None);
    let sender = Sender {
        written: acknowledge.then(|| [stdout.written(), stderr.written()]),
        closed: stdout.written(),
        taken: taken_by_process.clone(),
        requests: requests.clone(),
    };
    let answering = end_of_old_output(
        stdin.as_ref().and_then(Stdin::drops_answers),
        taken_by_process.clone(),
        stdout.written(),
    );
    let resizing = resize(window.as_mut(), taken_by_process, &requests);
    let interrupting = async {
        loop {
            interrupt.notified().await;
            interrupted.store(true, Ordering::Relaxed);
            if requests.send(request(RequestMessage::Signal(Signal { number: SIGINT }))).await.is_err() {
                // The next call sends the signal.
                interrupt.notify_one();
                return std::future::pending::<Infallible>().await;
            }
        }
    };
    tokio::select! {
        never = interrupting => match never {},
        never = resizing => match never {},
        never = answering => match never {},
        end = receive(responses, ui, [stdout, stderr], &taken, state) => end,
        Closed = sender.run(stdin.as_mut()) => Ok(AttachEnd::StdoutClosed),
    }
}

/// Sends the size of the local terminal once the process exists, and each time that it changes.
async fn resize(
    window: Option<&mut Window>,
    mut taken: watch::Receiver<Option<InputPosition>>,
    requests: &mpsc::Sender<AttachRequest>,
) -> Infallible {
    if let Some(window) = window
        && taken.wait_for(Option::is_some).await.is_ok()
    {
        // An error means that the call broke.
        while requests.send(request(RequestMessage::Resize(window.next().await))).await.is_ok() {}
    }
    std::future::pending().await
}

/// Passes answers of the local terminal on when all output before this call was shown.
async fn end_of_old_output(
    drops_answers: Option<Arc<AtomicBool>>,
    mut taken: watch::Receiver<Option<InputPosition>>,
    mut written: watch::Receiver<u64>,
) -> Infallible {
    if let Some(drops_answers) = drops_answers
        && let Ok(at) = taken.wait_for(Option::is_some).await.map(|at| at.unwrap_or_default())
        && written.wait_for(|written| *written >= at.shown_before).await.is_ok()
    {
        tokio::time::sleep(ANSWER_TIME).await;
        drops_answers.store(false, Ordering::Relaxed);
    }
    std::future::pending().await
}

async fn open(
    mut containers: ContainersClient<Peer>,
    target: Target<'_>,
    location: &AttemptLocation,
    streams: &mut Streams,
) -> Result<(mpsc::Sender<AttachRequest>, Streaming<AttachResponse>), Refused> {
    let (requests, queue) = mpsc::channel(4);
    let (team, worker_id) = (target.connection.team.clone(), location.worker_id.clone());
    let idle_timeout = target.further.and_then(|further| further.idle_timeout).map(rpc::duration);
    let first = match target.further {
        // A repeat does not start the process again.
        Some(FurtherProcess { process_id, container_id, spec: spec @ Some(_), .. })
            if !streams.state.is_started =>
        {
            RequestMessage::Start(StartProcess {
                team,
                worker_id,
                container_id: container_id.clone(),
                process_id: process_id.clone(),
                spec: spec.clone(),
                lease_token: String::new(),
                idle_timeout,
            })
        }
        _ => {
            // It is unknown which size arrived.
            if let Some(window) = &mut streams.window {
                window.forget();
            }
            RequestMessage::Resume(Resume {
                team,
                process_id: target.process_id(location),
                stdout_offset: streams.stdout.received(),
                stderr_offset: streams.stderr.received(),
                worker_id,
                observer: !streams.acknowledge,
                idle_timeout,
                since: streams.state.since.map(Into::into),
            })
        }
    };
    // This cannot fail: the queue is empty and its receiver exists.
    _ = requests.send(request(first)).await;
    let responses = containers.attach(ReceiverStream::new(queue)).await?.into_inner();
    Ok((requests, responses))
}

/// Sends the gateway a Detach message, so that the process is not slowed down for long. `signal` is
/// sent to the process before. With `keep_input`, a person may return to the process.
pub(crate) async fn detach(
    target: Target<'_>,
    location: &AttemptLocation,
    streams: &mut Streams,
    signal: Option<u32>,
    keep_input: bool,
) {
    let Ok(containers) = target.connection.containers_at(&location.gateway_endpoint).await else { return };
    let sending = async {
        let (requests, mut responses) = open(containers, target, location, streams).await?;
        let signal = signal.map(|number| RequestMessage::Signal(Signal { number }));
        for message in signal.into_iter().chain([RequestMessage::Detach(Detach { keep_input })]) {
            _ = requests.send(request(message)).await;
        }
        drop(requests);
        while responses.message().await?.is_some() {}
        Ok::<_, Refused>(())
    };
    // Nothing confirms the message. It gets a moment before the command ends.
    _ = tokio::time::timeout(Duration::from_millis(300), sending).await;
}

async fn receive(
    mut responses: Streaming<AttachResponse>,
    ui: &Ui,
    [stdout, stderr]: [&mut Sink; 2],
    taken: &watch::Sender<Option<InputPosition>>,
    state: &mut AttachState,
) -> Result<AttachEnd, Refused> {
    while let Some(AttachResponse { message }) = responses.message().await? {
        let written = match message {
            Some(ResponseMessage::Started(started)) => {
                state.record_start(ui);
                let old = (started.stdout_offset, started.stderr_offset.unwrap_or_default());
                state.old.get_or_insert(old);
                if let Err(Closed) = end_of_old_outputs(ui, stdout, stderr, &started).await {
                    return Ok(AttachEnd::StdoutClosed);
                }
                taken.send_replace(Some(InputPosition {
                    offset: started.stdin_offset,
                    ended: false,
                    shown_before: started.stdout_offset,
                }));
                Ok(())
            }
            Some(ResponseMessage::StdinAck(ack)) => {
                taken.send_modify(|taken| taken.get_or_insert_default().offset = ack.offset);
                Ok(())
            }
            Some(ResponseMessage::Exited(exited)) => {
                state.exited = Some(exited);
                taken.send_modify(|taken| taken.get_or_insert_default().ended = true);
                Ok(())
            }
            Some(ResponseMessage::Output(output)) => match Stream::try_from(output.stream) {
                Ok(Stream::Stderr) => write(ui, stderr, OutputStream::Stderr, output).await,
                _ => write(ui, stdout, OutputStream::Stdout, output).await,
            },
            // The connection between the gateway and the worker was down for a while.
            Some(ResponseMessage::Truncated(truncated)) if truncated.from == truncated.to => {
                let (which, sink) = match Stream::try_from(truncated.stream) {
                    Ok(Stream::Stderr) => (OutputStream::Stderr, &mut *stderr),
                    _ => (OutputStream::Stdout, &mut *stdout),
                };
                let name = which.name();
                ui.warn(&format!(
                    "some of {name} may be missing here, because the connection to the worker was down"
                ));
                ui.event("truncated", serde_json::json!({ "stream": name }));
                // Another gateway reads the output now, and counts from another offset.
                sink.skip(truncated.from).await.map(|_| ())
            }
            Some(ResponseMessage::Truncated(truncated)) => match Stream::try_from(truncated.stream) {
                Ok(Stream::Stderr) => skip(ui, stderr, OutputStream::Stderr, truncated.to).await,
                _ => skip(ui, stdout, OutputStream::Stdout, truncated.to).await,
            },
            Some(ResponseMessage::Idle(idle)) => {
                let after = idle.after.and_then(|after| Duration::try_from(after).ok()).unwrap_or_default();
                ui.warn(&format!(
                    "nothing was typed or printed for {}, so the command is ended (--idle-timeout of `gantry exec`)",
                    duration(after)
                ));
                Ok(())
            }
            Some(ResponseMessage::Done(_)) => return Ok(done(stdout, stderr).await),
            None => Ok(()),
        };
        if let Err(Closed) = written {
            return Ok(AttachEnd::StdoutClosed);
        }
        if state.is_complete(stdout, stderr) {
            return Ok(done(stdout, stderr).await);
        }
    }
    Err(Refused::cut())
}

/// Writes what was received.
async fn done(stdout: &mut Sink, stderr: &mut Sink) -> AttachEnd {
    let flushed = match stdout.flush().await {
        Ok(()) => stderr.flush().await,
        closed => closed,
    };
    if flushed.is_ok() { AttachEnd::Done } else { AttachEnd::StdoutClosed }
}

/// Tells both sinks where their output begins, and how much of it existed before this call.
async fn end_of_old_outputs(
    ui: &Ui,
    stdout: &mut Sink,
    stderr: &mut Sink,
    started: &Started,
) -> Result<(), Closed> {
    stdout.start_at(started.stdout_start).await?;
    stderr.start_at(started.stderr_start).await?;
    let missed = stdout.old_output_ends(started.stdout_offset).await?;
    report_missing(ui, stdout, OutputStream::Stdout, missed);
    let missed = stderr.old_output_ends(started.stderr_offset.unwrap_or(u64::MAX)).await?;
    report_missing(ui, stderr, OutputStream::Stderr, missed);
    Ok(())
}

async fn write(ui: &Ui, sink: &mut Sink, which: OutputStream, output: Output) -> Result<(), Closed> {
    let missed = sink.push(output.offset, output.data).await?;
    report_missing(ui, sink, which, missed);
    Ok(())
}

async fn skip(ui: &Ui, sink: &mut Sink, which: OutputStream, to: u64) -> Result<(), Closed> {
    let missed = sink.skip(to).await?;
    report_missing(ui, sink, which, missed);
    Ok(())
}

fn report_missing(ui: &Ui, sink: &mut Sink, which: OutputStream, bytes: u64) {
    if bytes > 0 {
        sink.miss(bytes);
        ui.warn(&format!(
            "{bytes} bytes of {} are lost, because they were not read in time or the disk of the worker is full",
            which.name()
        ));
        ui.event("truncated", serde_json::json!({ "stream": which.name(), "bytes": bytes }));
    }
}

#[cfg(test)]
mod tests;
