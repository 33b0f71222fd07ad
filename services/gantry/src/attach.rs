//! Attached to a process: its output comes, our standard input goes, and a broken call is taken up where it broke.
//!
//! Both directions are counted in bytes: output that has been written is acknowledged, input that was taken is forgotten. What lies between
//! is bounded, so that a slow reader holds the process back, and a slow process its input.

use std::time::Duration;

use rpc::pb::runtime::{
    Ack, AttachRequest, AttachResponse, CloseStdin, Detach, Output, Resume, StdinData, Stream,
    attach_request::Message as Ask, attach_response::Message as Say,
};
use rpc::pb::scheduler::{GetRequest, Whereabouts};
use rpc::{Peer, Reason, pb::runtime::containers_client::ContainersClient};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::connect::{Connection, Pause};
use crate::error::Refused;
use crate::output::{CLOSED, Closed, Sink, Which};
use crate::stdin::Stdin;
use crate::ui::Ui;

/// How much input may be on its way; the gateway asks for no more.
const INPUT_IN_FLIGHT: u64 = 1 << 20;
/// Output is acknowledged when this much more was written, or everything.
const ACK_EVERY: u64 = 512 << 10;
/// How long nobody may answer before we give up.
const PATIENCE: Duration = Duration::from_secs(60);

/// The ends of a process's output and input on our side.
pub(crate) struct Streams {
    pub(crate) stdout: Sink,
    pub(crate) stderr: Sink,
    pub(crate) stdin: Option<Stdin>,
    /// Whether what was written is acknowledged: the process waits for us, and nobody else needs what we have had.
    pub(crate) acknowledge: bool,
    /// The process that speaks.
    pub(crate) process: Option<String>,
}

/// How an attachment ended.
#[derive(Debug)]
pub(crate) enum Attached {
    /// All output came and was written.
    Done,
    /// Our standard output was closed.
    StdoutClosed,
    /// The rest of the output cannot be had.
    Lost(Refused),
}

/// Copies until the process has ended and all its output was written.
pub(crate) async fn attach(
    connection: &Connection,
    ui: &Ui,
    workload: &str,
    mut whereabouts: Whereabouts,
    streams: &mut Streams,
) -> Attached {
    let mut pause = Pause::default();
    let mut give_up = Instant::now() + PATIENCE;
    loop {
        if streams.process.as_ref() != Some(&whereabouts.attempt_id) {
            if streams.process.is_some() {
                // Another attempt is another process, with output of its own.
                match restart(streams).await {
                    Ok(()) => {}
                    Err(Closed) => return Attached::StdoutClosed,
                }
            }
            streams.process = Some(whereabouts.attempt_id.clone());
        }
        let before = progress(streams);
        let refused = match once(connection, ui, &whereabouts, streams).await {
            Ok(end) => return end,
            Err(refused) => refused,
        };
        let elsewhere = refused.is(Reason::NotAttended);
        if !refused.is_transient() && !elsewhere {
            return Attached::Lost(refused);
        }
        if progress(streams) != before {
            (pause, give_up) = (Pause::default(), Instant::now() + PATIENCE);
        }
        if Instant::now() >= give_up {
            return Attached::Lost(refused);
        }
        pause.wait().await;
        // Whether that helps shows in the next try.
        _ = connection.revive(ui).await;
        let request = GetRequest { team: connection.team.clone(), workload_id: workload.to_owned() };
        if let Ok(response) = connection.workloads().get(request).await
            && let Some(now) = response.into_inner().workload.and_then(|workload| workload.whereabouts)
        {
            whereabouts = now;
        }
    }
}

async fn restart(streams: &mut Streams) -> Result<(), Closed> {
    streams.stdout.restart().await?;
    streams.stderr.restart().await
}

fn progress(streams: &Streams) -> (u64, u64) {
    (streams.stdout.received(), streams.stderr.received())
}

/// One call. An error means that it broke.
async fn once(
    connection: &Connection,
    ui: &Ui,
    whereabouts: &Whereabouts,
    streams: &mut Streams,
) -> Result<Attached, Refused> {
    let unusable = |error: anyhow::Error| Refused::from(Status::internal(error.to_string()));
    let containers = connection.containers_at(&whereabouts.gateway_endpoint).map_err(unusable)?;
    let (asks, responses) = open(containers, &connection.team, whereabouts, streams).await?;

    let Streams { stdout, stderr, stdin, acknowledge, .. } = streams;
    let (taken, taken_by_process) = watch::channel(None);
    let sender = Sender {
        written: acknowledge.then(|| [stdout.written(), stderr.written()]),
        closed: stdout.written(),
        taken: taken_by_process,
        asks,
    };
    tokio::select! {
        end = receive(responses, ui, stdout, stderr, &taken) => end,
        Closed = sender.run(stdin.as_mut()) => Ok(Attached::StdoutClosed),
    }
}

async fn open(
    mut containers: ContainersClient<Peer>,
    team: &str,
    whereabouts: &Whereabouts,
    streams: &Streams,
) -> Result<(mpsc::Sender<AttachRequest>, Streaming<AttachResponse>), Refused> {
    let (asks, queue) = mpsc::channel(4);
    let resume = Resume {
        team: team.to_owned(),
        process_id: whereabouts.attempt_id.clone(),
        stdout_offset: streams.stdout.received(),
        stderr_offset: streams.stderr.received(),
    };
    // The queue is empty and its other end is there.
    _ = asks.send(ask(Ask::Resume(resume))).await;
    let responses = containers.attach(ReceiverStream::new(queue)).await?.into_inner();
    Ok((asks, responses))
}

/// Says to a process that nobody is meant to be attached from now on, so that it is not held back.
pub(crate) async fn detach(connection: &Connection, whereabouts: &Whereabouts, streams: &Streams) {
    let Ok(containers) = connection.containers_at(&whereabouts.gateway_endpoint) else { return };
    let said = async {
        let (asks, mut responses) = open(containers, &connection.team, whereabouts, streams).await?;
        _ = asks.send(ask(Ask::Detach(Detach {}))).await;
        drop(asks);
        while responses.message().await?.is_some() {}
        Ok::<_, Refused>(())
    };
    // Nothing says that it arrived. We are leaving, and give it a moment.
    _ = tokio::time::timeout(Duration::from_millis(300), said).await;
}

async fn receive(
    mut responses: Streaming<AttachResponse>,
    ui: &Ui,
    stdout: &mut Sink,
    stderr: &mut Sink,
    taken: &watch::Sender<Option<Taken>>,
) -> Result<Attached, Refused> {
    while let Some(AttachResponse { message }) = responses.message().await? {
        let written = match message {
            Some(Say::Started(started)) => {
                taken.send_replace(Some(Taken { offset: started.stdin_offset, ended: false }));
                Ok(())
            }
            Some(Say::StdinAck(ack)) => {
                taken.send_replace(Some(Taken { offset: ack.offset, ended: false }));
                Ok(())
            }
            Some(Say::Exited(_)) => {
                taken.send_modify(|taken| taken.get_or_insert_default().ended = true);
                Ok(())
            }
            Some(Say::Output(output)) => match Stream::try_from(output.stream) {
                Ok(Stream::Stderr) => write(ui, stderr, Which::Stderr, output).await,
                _ => write(ui, stdout, Which::Stdout, output).await,
            },
            Some(Say::Truncated(truncated)) => match Stream::try_from(truncated.stream) {
                Ok(Stream::Stderr) => skip(ui, stderr, Which::Stderr, truncated.to).await,
                _ => skip(ui, stdout, Which::Stdout, truncated.to).await,
            },
            Some(Say::Done(_)) => {
                let flushed = match stdout.flush().await {
                    Ok(()) => stderr.flush().await,
                    closed => closed,
                };
                return Ok(if flushed.is_ok() { Attached::Done } else { Attached::StdoutClosed });
            }
            None => Ok(()),
        };
        if let Err(Closed) = written {
            return Ok(Attached::StdoutClosed);
        }
    }
    Err(Refused::cut())
}

async fn write(ui: &Ui, sink: &mut Sink, which: Which, output: Output) -> Result<(), Closed> {
    let missed = sink.push(output.offset, output.data).await?;
    missing(ui, which, missed);
    Ok(())
}

async fn skip(ui: &Ui, sink: &mut Sink, which: Which, to: u64) -> Result<(), Closed> {
    let missed = sink.skip(to).await?;
    missing(ui, which, missed);
    Ok(())
}

fn missing(ui: &Ui, which: Which, bytes: u64) {
    if bytes > 0 {
        ui.warn(&format!("{bytes} bytes of {} are gone: nobody read them in time", which.name()));
        ui.event("truncated", serde_json::json!({ "stream": which.name(), "bytes": bytes }));
    }
}

/// How much input the process has taken.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    offset: u64,
    /// It takes no more.
    ended: bool,
}

/// What goes to the process: input, and acknowledgements.
struct Sender {
    /// Up to where output was written, unless it is not acknowledged.
    written: Option<[watch::Receiver<u64>; 2]>,
    closed: watch::Receiver<u64>,
    taken: watch::Receiver<Option<Taken>>,
    asks: mpsc::Sender<AttachRequest>,
}

impl Sender {
    /// Sends for as long as the call lives. Resolves only when standard output was closed.
    async fn run(self, stdin: Option<&mut Stdin>) -> Closed {
        let Self { written, mut closed, taken, asks } = self;
        let input = async {
            if let Some(stdin) = stdin {
                send_input(stdin, taken, &asks).await;
            }
            std::future::pending::<()>().await
        };
        let acks = async {
            if let Some([stdout, stderr]) = written {
                send_acks(stdout, stderr, &asks).await;
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

/// Returns when all input was sent, the process takes no more, or the call broke.
async fn send_input(
    stdin: &mut Stdin,
    mut taken: watch::Receiver<Option<Taken>>,
    asks: &mpsc::Sender<AttachRequest>,
) {
    let Ok(first) = taken.wait_for(Option::is_some).await.map(|taken| taken.unwrap_or_default()) else {
        return;
    };
    stdin.taken(first.offset);
    for (offset, data) in stdin.kept().collect::<Vec<_>>() {
        if asks.send(input(offset, data)).await.is_err() {
            return;
        }
    }
    while !stdin.ended() {
        let now = taken.borrow_and_update().unwrap_or_default();
        stdin.taken(now.offset);
        if now.ended {
            return;
        }
        let room = stdin.position().saturating_sub(now.offset) < INPUT_IN_FLIGHT;
        tokio::select! {
            changed = taken.changed() => if changed.is_err() { return },
            piece = stdin.next(), if room => if let Some((offset, data)) = piece
                && asks.send(input(offset, data)).await.is_err()
            {
                return;
            },
        }
    }
    // When that fails the call broke, and the next one says it again.
    _ = asks.send(ask(Ask::CloseStdin(CloseStdin {}))).await;
    while taken.changed().await.is_ok() {
        stdin.taken(taken.borrow_and_update().unwrap_or_default().offset);
    }
}

/// Returns when the call broke.
async fn send_acks(
    mut stdout: watch::Receiver<u64>,
    mut stderr: watch::Receiver<u64>,
    asks: &mpsc::Sender<AttachRequest>,
) {
    let mut said = (0, 0);
    loop {
        let now = (*stdout.borrow_and_update(), *stderr.borrow_and_update());
        if now.0 == CLOSED || now.1 == CLOSED {
            return;
        }
        if now.0 >= said.0 + ACK_EVERY || now.1 >= said.1 + ACK_EVERY {
            let ack = Ack { stdout_offset: now.0, stderr_offset: now.1 };
            if asks.send(ask(Ask::Ack(ack))).await.is_err() {
                return;
            }
            said = now;
        }
        // A little output is acknowledged a little later, together with what follows it.
        let pause = if now == said { Duration::MAX } else { Duration::from_millis(20) };
        tokio::select! {
            changed = stdout.changed() => if changed.is_err() { return },
            changed = stderr.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {
                let ack = Ack { stdout_offset: now.0, stderr_offset: now.1 };
                if asks.send(ask(Ask::Ack(ack))).await.is_err() {
                    return;
                }
                said = now;
            }
        }
    }
}

fn ask(message: Ask) -> AttachRequest {
    AttachRequest { message: Some(message) }
}

fn input(offset: u64, data: bytes::Bytes) -> AttachRequest {
    ask(Ask::Stdin(StdinData { offset, data }))
}
