//! Attachment to a process: its output, and our standard input. A broken call is resumed where it
//! broke.
//!
//! Both directions are counted in bytes. Output is acknowledged once it is written, and input is
//! dropped once the process has taken it. The bytes in between are bounded, so a slow reader slows
//! down the process, and a slow process slows down its input.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc::pb::runtime::{
    Ack, AttachRequest, AttachResponse, CloseStdin, Detach, Output, Resume, Signal, StdinData, Stream,
    attach_request::Message as RequestMessage, attach_response::Message as ResponseMessage,
};
use rpc::pb::scheduler::{
    AttemptLocation, GetRequest, GetWorkerRequest, Worker, WorkerState, Workload, WorkloadState,
};
use rpc::{Peer, Reason, pb::runtime::containers_client::ContainersClient};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::client::connect::Connection;
use crate::ending::error::Refused;
use crate::follow::outage::{Outage, PATIENCE};
use crate::follow::stdin::Stdin;
use crate::render::labels;
use crate::render::output::{CLOSED, Closed, OutputStream, Sink};
use crate::render::table::duration;
use crate::render::ui::Ui;

/// Number of the signal that Ctrl-C sends.
const SIGINT: u32 = 2;

/// Maximum input in flight, in bytes. The gateway accepts no more.
const INPUT_IN_FLIGHT: u64 = 1 << 20;
/// Bytes of output after which an acknowledgement is sent.
const ACK_EVERY: u64 = 512 << 10;
/// Time without an answer of the gateway before the scheduler is asked whether the worker exists.
const WORKER_CHECK_AFTER: Duration = Duration::from_millis(500);

/// Extra time for a lost worker to answer about a workload that has ended.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// Local ends of the output and input of a process.
pub(crate) struct Streams {
    pub(crate) stdout: Sink,
    pub(crate) stderr: Sink,
    pub(crate) stdin: Option<Stdin>,
    /// Whether written output is acknowledged. The process then waits for this reader, and
    /// acknowledged output may be dropped.
    pub(crate) acknowledge: bool,
    /// Id of the process whose output is read.
    pub(crate) process: Option<String>,
    /// Requests that the process is interrupted (SIGINT).
    pub(crate) interrupt: Arc<Notify>,
    /// Time at which the gateway accepted the current or last call.
    pub(crate) opened: Option<Instant>,
}

/// End of an attachment.
#[derive(Debug)]
pub(crate) enum AttachEnd {
    /// All output was received and written.
    Done,
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

/// Copies input and output until the process has ended and all its output is written.
pub(crate) async fn attach(
    connection: &Connection,
    ui: &Ui,
    workload: &str,
    mut location: AttemptLocation,
    streams: &mut Streams,
) -> AttachEnd {
    let mut outage = Outage::default();
    let interrupted = AtomicBool::new(false);
    loop {
        if streams.process.as_ref() != Some(&location.attempt_id) {
            if streams.process.is_some() {
                // Another attempt is another process, with separate output.
                match restart(streams).await {
                    Ok(()) => {}
                    Err(Closed) => return AttachEnd::StdoutClosed,
                }
            }
            streams.process = Some(location.attempt_id.clone());
        }
        let before = progress(streams);
        let refused = match attach_once(connection, ui, workload, &location, streams, &interrupted).await {
            Ok(end) => return end,
            Err(refused) => refused,
        };
        if refused.is(Reason::Unsupported) && interrupted.load(Ordering::Relaxed) {
            return AttachEnd::InterruptRefused;
        }
        if refused.is(Reason::Unsupported) && streams.stdin.take().is_some() {
            return AttachEnd::InputRefused(refused);
        }
        let elsewhere = refused.is(Reason::NotAttended);
        if !refused.is_transient() && !elsewhere {
            return AttachEnd::Lost(refused);
        }
        if progress(streams) != before {
            outage.over();
        }
        if !outage.goes_on(streams.opened.take()) {
            return AttachEnd::Lost(refused);
        }
        if outage.is_news() {
            let (worker, why, patience) = (&location.worker_name, refused.cause(), duration(PATIENCE));
            let hint = connection.hint_at_proxies();
            ui.note(&format!("worker {worker} does not answer ({why}); retrying for {patience}{hint}"));
        }
        outage.pause().await;
        // The next attempt shows whether the cluster runs again.
        _ = connection.revive(ui).await;
        let Some(now) = current(connection, workload).await else { continue };
        if let Some(missing) = MissingWorker::of(connection, &now).await {
            return AttachEnd::WorkerMissing(missing);
        }
        location = now.location.unwrap_or(location);
    }
}

/// Reads the current state of the workload. `None`: the scheduler does not answer.
async fn current(connection: &Connection, workload: &str) -> Option<Workload> {
    let request = GetRequest { team: connection.team.clone(), workload_id: workload.to_owned() };
    connection.workloads().get(request).await.ok()?.into_inner().workload
}

async fn restart(streams: &mut Streams) -> Result<(), Closed> {
    streams.stdout.restart().await?;
    streams.stderr.restart().await
}

fn progress(streams: &Streams) -> (u64, u64) {
    (streams.stdout.received(), streams.stderr.received())
}

/// Makes one call. An error means that the call broke.
async fn attach_once(
    connection: &Connection,
    ui: &Ui,
    workload: &str,
    location: &AttemptLocation,
    streams: &mut Streams,
    interrupted: &AtomicBool,
) -> Result<AttachEnd, Refused> {
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
        opened = open(containers, &connection.team, location, streams) => opened?,
        Some(missing) = doubt => return Ok(AttachEnd::WorkerMissing(missing)),
    };

    let Streams { stdout, stderr, stdin, acknowledge, interrupt, opened, .. } = streams;
    let (taken, taken_by_process) = watch::channel(None);
    let sender = Sender {
        written: acknowledge.then(|| [stdout.written(), stderr.written()]),
        closed: stdout.written(),
        taken: taken_by_process,
        requests: requests.clone(),
    };
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
        end = receive(responses, ui, [stdout, stderr], &taken, opened) => end,
        Closed = sender.run(stdin.as_mut()) => Ok(AttachEnd::StdoutClosed),
    }
}

async fn open(
    mut containers: ContainersClient<Peer>,
    team: &str,
    location: &AttemptLocation,
    streams: &Streams,
) -> Result<(mpsc::Sender<AttachRequest>, Streaming<AttachResponse>), Refused> {
    let (requests, queue) = mpsc::channel(4);
    let resume = Resume {
        team: team.to_owned(),
        process_id: location.attempt_id.clone(),
        stdout_offset: streams.stdout.received(),
        stderr_offset: streams.stderr.received(),
        worker_id: location.worker_id.clone(),
        observer: !streams.acknowledge,
    };
    // This cannot fail: the queue is empty and its receiver exists.
    _ = requests.send(request(RequestMessage::Resume(resume))).await;
    let responses = containers.attach(ReceiverStream::new(queue)).await?.into_inner();
    Ok((requests, responses))
}

/// Sends the gateway a Detach message, so that the process is not slowed down for long.
pub(crate) async fn detach(connection: &Connection, location: &AttemptLocation, streams: &Streams) {
    let Ok(containers) = connection.containers_at(&location.gateway_endpoint).await else { return };
    let sending = async {
        let (requests, mut responses) = open(containers, &connection.team, location, streams).await?;
        _ = requests.send(request(RequestMessage::Detach(Detach {}))).await;
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
    opened: &mut Option<Instant>,
) -> Result<AttachEnd, Refused> {
    while let Some(AttachResponse { message }) = responses.message().await? {
        let written = match message {
            Some(ResponseMessage::Started(started)) => {
                *opened = Some(Instant::now());
                taken.send_replace(Some(InputPosition { offset: started.stdin_offset, ended: false }));
                Ok(())
            }
            Some(ResponseMessage::StdinAck(ack)) => {
                taken.send_replace(Some(InputPosition { offset: ack.offset, ended: false }));
                Ok(())
            }
            Some(ResponseMessage::Exited(_)) => {
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
            Some(ResponseMessage::Done(_)) => {
                let flushed = match stdout.flush().await {
                    Ok(()) => stderr.flush().await,
                    closed => closed,
                };
                return Ok(if flushed.is_ok() { AttachEnd::Done } else { AttachEnd::StdoutClosed });
            }
            None => Ok(()),
        };
        if let Err(Closed) = written {
            return Ok(AttachEnd::StdoutClosed);
        }
    }
    Err(Refused::cut())
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

/// Amount of input that the process has taken, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct InputPosition {
    offset: u64,
    /// The process takes no more input.
    ended: bool,
}

/// Sender of input and acknowledgements.
struct Sender {
    /// Offsets up to which stdout and stderr were written. `None`: output is not acknowledged.
    written: Option<[watch::Receiver<u64>; 2]>,
    closed: watch::Receiver<u64>,
    taken: watch::Receiver<Option<InputPosition>>,
    requests: mpsc::Sender<AttachRequest>,
}

impl Sender {
    /// Sends until the call ends. Resolves only when standard output is closed.
    async fn run(self, stdin: Option<&mut Stdin>) -> Closed {
        let Self { written, mut closed, taken, requests } = self;
        let input = async {
            if let Some(stdin) = stdin {
                send_input(stdin, taken, &requests).await;
            }
            std::future::pending::<()>().await
        };
        let acks = async {
            if let Some([stdout, stderr]) = written {
                send_acks(stdout, stderr, &requests).await;
            }
            std::future::pending::<()>().await
        };
        tokio::select! {
            _ = closed.wait_for(|&written| written == CLOSED) => Closed,
            () = input => Closed,
            () = acks => Closed,
        }
    }
}

/// Sends input until all of it was sent, the process takes no more, or the call broke.
async fn send_input(
    stdin: &mut Stdin,
    mut taken: watch::Receiver<Option<InputPosition>>,
    requests: &mpsc::Sender<AttachRequest>,
) {
    let Ok(first) = taken.wait_for(Option::is_some).await.map(|taken| taken.unwrap_or_default()) else {
        return;
    };
    stdin.drop_taken(first.offset);
    for (offset, data) in stdin.kept().collect::<Vec<_>>() {
        if requests.send(input(offset, data)).await.is_err() {
            return;
        }
    }
    while !stdin.ended() {
        let now = taken.borrow_and_update().unwrap_or_default();
        stdin.drop_taken(now.offset);
        if now.ended {
            return;
        }
        let room = stdin.position().saturating_sub(now.offset) < INPUT_IN_FLIGHT;
        tokio::select! {
            changed = taken.changed() => if changed.is_err() { return },
            piece = stdin.next(), if room => if let Some((offset, data)) = piece
                && requests.send(input(offset, data)).await.is_err()
            {
                return;
            },
        }
    }
    // An error here means that the call broke. The next call sends the message again.
    _ = requests.send(request(RequestMessage::CloseStdin(CloseStdin {}))).await;
    while taken.changed().await.is_ok() {
        stdin.drop_taken(taken.borrow_and_update().unwrap_or_default().offset);
    }
}

/// Sends acknowledgements until the call broke.
async fn send_acks(
    mut stdout: watch::Receiver<u64>,
    mut stderr: watch::Receiver<u64>,
    requests: &mpsc::Sender<AttachRequest>,
) {
    let mut acknowledged = (0, 0);
    loop {
        let now = (*stdout.borrow_and_update(), *stderr.borrow_and_update());
        if now.0 == CLOSED || now.1 == CLOSED {
            return;
        }
        if now.0 >= acknowledged.0 + ACK_EVERY || now.1 >= acknowledged.1 + ACK_EVERY {
            let ack = Ack { stdout_offset: now.0, stderr_offset: now.1 };
            if requests.send(request(RequestMessage::Ack(ack))).await.is_err() {
                return;
            }
            acknowledged = now;
        }
        // Small amounts of output are acknowledged with a delay, together with the output that
        // follows.
        let pause = if now == acknowledged { Duration::MAX } else { Duration::from_millis(20) };
        tokio::select! {
            changed = stdout.changed() => if changed.is_err() { return },
            changed = stderr.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {
                let ack = Ack { stdout_offset: now.0, stderr_offset: now.1 };
                if requests.send(request(RequestMessage::Ack(ack))).await.is_err() {
                    return;
                }
                acknowledged = now;
            }
        }
    }
}

fn request(message: RequestMessage) -> AttachRequest {
    AttachRequest { message: Some(message) }
}

fn input(offset: u64, data: bytes::Bytes) -> AttachRequest {
    request(RequestMessage::Stdin(StdinData { offset, data }))
}

#[cfg(test)]
mod tests;
