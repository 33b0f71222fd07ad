//! The calls of one attached caller: input and signals to a process, output from it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use domain::AttemptId;
use domain::workload::Exit;
use futures::StreamExt;
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::attach_response::Message as Heard;
use rpc::{invalid_field, parse_id, parse_team};
use runtime::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessState, RuntimeError,
};
use server::Caller;
use tokio::sync::{Semaphore, mpsc};
use tonic::{Status, Streaming};

use super::errors::status;
use super::{Answers, worker_of};
use crate::worker::Worker;
use crate::worker::attached_callers::AttachGuard;
use crate::worker_set::{AttendedWorker, NotAttended, WorkerSet};

/// Pieces of input that wait for a process. What a caller may have in flight, 1 MiB, fits when it is sent in pieces of 4 KiB or more.
const STDIN_MESSAGES: usize = 257;

/// Most bytes of one message of standard input.
pub(super) const STDIN_MESSAGE_BYTES: usize = 1 << 20;

/// Most bytes of standard input that wait for a process: what a caller may have in flight, and one message more.
const STDIN_BYTES: usize = 2 * STDIN_MESSAGE_BYTES;

pub(super) async fn attach(
    gateway: WorkerSet,
    caller: Option<Caller>,
    mut said: Streaming<pb::AttachRequest>,
    answers: Answers<pb::AttachResponse>,
) -> Result<(), Status> {
    let resume = match said.message().await?.and_then(|request| request.message) {
        Some(Say::Resume(resume)) => resume,
        _ => return Err(invalid_field("message", "the first message must be `resume`")),
    };
    let team = parse_team("resume.team", resume.team)?;
    let process: AttemptId = parse_id("resume.process_id", &resume.process_id)?;
    let AttendedWorker { worker, attendance, .. } =
        &*worker_of(&gateway, "resume.worker_id", &resume.worker_id).await?;
    if worker.runtime.team(process).await.map_err(status)? != team {
        return Err(status(RuntimeError::ProcessNotFound(process)));
    }
    // Where a worker keeps no output, what it told to another gateway is not told to this one, and never comes: so only who surely speaks
    // for it says anything, and that all was said most of all.
    let features = &worker.runtime.capabilities().features;
    let durable = features.iter().any(|feature| feature == "durable-output");
    let open = worker.session.current().filter(|_| !durable);
    let superseded = async {
        match &open {
            Some(open) => {
                worker.session.superseded(open).await;
                Err(Status::from(NotAttended { worker: open.worker, endpoint: None }))
            }
            None => std::future::pending().await,
        }
    };
    let from = Offsets { stdout: resume.stdout_offset, stderr: resume.stderr_offset };
    let Attachment { stdin_offset, mut events, input } =
        worker.runtime.attach(process, from).await.map_err(status)?;

    let _attached = (!resume.observes).then(|| AttachGuard::new(attendance.clone(), process, caller));
    let started = Heard::Started(pb::Started { stdin_offset });
    if answers.send(Ok(pb::AttachResponse { message: Some(started) })).await.is_err() {
        return Ok(());
    }
    // Each direction holds back only itself: a process that does not read must not keep its output from being heard.
    let hear = async {
        while let Some(event) = events.next().await {
            let (message, last) = heard(event.map_err(status)?);
            if open.is_some() {
                worker.session.wait_until_exclusive().await;
            }
            if answers.send(Ok(pb::AttachResponse { message: Some(message) })).await.is_err() || last {
                break;
            }
        }
        Ok::<_, Status>(())
    };
    // Input waits in a queue of its own: a process that does not read it must not keep acknowledgements from arriving, for without those it
    // may be unable to write, and so never come to read.
    let (queue, mut queued) = mpsc::channel(STDIN_MESSAGES);
    let room = Arc::new(Semaphore::new(STDIN_BYTES));
    let feed = async {
        while let Some((stdin, _room)) = queued.recv().await {
            match stdin {
                Some(pb::StdinData { offset, data }) => input.stdin(offset, data).await.map_err(status)?,
                None => input.close_stdin().await.map_err(status)?,
            }
        }
        std::future::pending::<Result<(), Status>>().await
    };
    let say = async {
        while let Some(request) = said.message().await? {
            let stdin = match request.message {
                Some(Say::Stdin(stdin)) => Some(stdin),
                Some(Say::CloseStdin(_)) => None,
                other => {
                    say(input.as_ref(), other).await?;
                    continue;
                }
            };
            let length = stdin.as_ref().map_or(0, |stdin: &pb::StdinData| stdin.data.len());
            if length > STDIN_MESSAGE_BYTES {
                return Err(invalid_field("stdin.data", "must be at most 1 MiB"));
            }
            let full = || invalid_field("stdin", "runs further ahead of `stdin_ack` than it may");
            let taken = room.clone().try_acquire_many_owned(u32::try_from(length).unwrap_or(u32::MAX));
            queue.try_send((stdin, taken.map_err(|_| full())?)).map_err(|_| full())?;
        }
        // The caller says no more. What the process says is still wanted.
        std::future::pending::<Result<(), Status>>().await
    };
    tokio::select! {
        // First: a turn that came with the end of a session is not used.
        biased;
        elsewhere = superseded => elsewhere,
        heard = hear => heard,
        said = say => said,
        fed = feed => fed,
        never = touch(worker, process, worker.config.intervals.touch) => match never {},
    }
}

/// Tells the artifact store now and again that the container of a process is used. Nobody waits for that, and a call that fails is made up for by
/// the next. Of a process that has not ended it is not told at once: what is kept for a grace after the end is kept for longer than that.
pub(super) async fn touch(worker: &Worker, process: AttemptId, every: Duration) -> Infallible {
    let goes_on = worker.runtime.process(process).await;
    if matches!(goes_on, Ok(ProcessState::Starting | ProcessState::Started)) {
        tokio::time::sleep(every).await;
    }
    loop {
        if let Some(session) = worker.session.current()
            && let Err(refusal) = worker.clients.store.touch(&session.credential, process).await
        {
            tracing::debug!(attempt.id = %process, error = %refusal, "cannot say that a container is used");
        }
        tokio::time::sleep(every).await;
    }
}

async fn say(input: &dyn ProcessInput, said: Option<Say>) -> Result<(), Status> {
    let said = match said {
        Some(Say::Signal(signal)) => {
            let number = u8::try_from(signal.number).ok().filter(|number| (1..=64).contains(number));
            let number = number.ok_or_else(|| invalid_field("signal.number", "must be 1 to 64"))?;
            input.signal(number).await
        }
        Some(Say::Ack(ack)) => {
            input.acknowledge(Offsets { stdout: ack.stdout_offset, stderr: ack.stderr_offset }).await
        }
        Some(Say::Detach(_)) => input.detach().await,
        Some(Say::Resume(_)) => return Err(invalid_field("message", "`resume` was said before")),
        Some(Say::Stdin(_) | Say::CloseStdin(_)) | None => {
            return Err(invalid_field("message", "is required"));
        }
    };
    said.map_err(status)
}

/// What a caller hears, and whether it is the last.
fn heard(event: ProcessEvent) -> (Heard, bool) {
    let wire = |stream| match stream {
        OutputStream::Stdout => pb::Stream::Stdout.into(),
        OutputStream::Stderr => pb::Stream::Stderr.into(),
    };
    match event {
        ProcessEvent::StdinAccepted(offset) => (Heard::StdinAck(pb::StdinAck { offset }), false),
        ProcessEvent::Output { stream, offset, data } => {
            (Heard::Output(pb::Output { stream: wire(stream), offset, data }), false)
        }
        ProcessEvent::Truncated { stream, from, to } => {
            (Heard::Truncated(pb::Truncated { stream: wire(stream), from, to }), false)
        }
        ProcessEvent::Ended(ended) => {
            let how = match ended {
                Ended::Exited { exit: Exit::Code(code), .. } => Some(pb::exited::How::Code(code.into())),
                Ended::Exited { exit: Exit::Signal(signal), .. } => {
                    Some(pb::exited::How::Signal(signal.into()))
                }
                Ended::Exited { exit: Exit::OutOfMemory, .. } => {
                    Some(pb::exited::How::OutOfMemory(pb::KilledForMemory {}))
                }
                Ended::NotStarted(_) | Ended::Unknown(_) => None,
            };
            (Heard::Exited(pb::Exited { how }), false)
        }
        ProcessEvent::Done(offsets) => {
            (Heard::Done(pb::Done { stdout_offset: offsets.stdout, stderr_offset: offsets.stderr }), true)
        }
    }
}
