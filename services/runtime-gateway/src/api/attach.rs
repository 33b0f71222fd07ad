//! The `Attach` call, which sends input and signals to a process and receives its output.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use domain::workload::Exit;
use domain::{AttemptId, ProcessId};
use futures::StreamExt;
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as AttachMessage;
use rpc::pb::runtime::attach_response::Message as AttachAnswer;
use rpc::{invalid_field, parse_duration, parse_id, parse_team};
use runtime::{Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessState};
use server::Caller;
use tokio::sync::{Semaphore, mpsc};
use tonic::{Status, Streaming};

use super::errors::status;
use super::idle::{self, Activity};
use super::{Answers, audit, check_team, exec, worker_of};
use crate::worker::Worker;
use crate::worker::attached_callers::AttachGuard;
use crate::worker_set::{AttendedWorker, NotAttended, WorkerSet};

/// Most messages of input that wait for a process. A caller may have 1 MiB in flight. That fits if
/// each message has 4 KiB or more.
const STDIN_QUEUE: usize = 257;

/// Most bytes of one message of standard input.
pub(super) const STDIN_MESSAGE_BYTES: usize = 1 << 20;

/// Most bytes of standard input that wait for a process: the bytes that may be in flight, plus one
/// message.
const STDIN_BYTES: usize = 2 * STDIN_MESSAGE_BYTES;

pub(super) async fn attach(
    gateway: WorkerSet,
    caller: Option<Caller>,
    mut requests: Streaming<pb::AttachRequest>,
    answers: Answers<pb::AttachResponse>,
) -> Result<(), Status> {
    let (attended, main, idle_timeout);
    // The team, if the call did not start the process.
    let mut resumed = None;
    let mut since = None;
    let (process, mut from, observer) = match requests.message().await?.and_then(|request| request.message) {
        Some(AttachMessage::Resume(resume)) => {
            let process: ProcessId = parse_id("resume.process_id", &resume.process_id)?;
            let team = parse_team("resume.team", resume.team)?;
            attended = worker_of(&gateway, "resume.worker_id", &resume.worker_id).await?;
            main = check_team(&attended.worker, process, &team).await?;
            let timeout = parse_duration("resume.idle_timeout", resume.idle_timeout)?;
            idle_timeout = idle::check_timeout("resume.idle_timeout", timeout)?;
            resumed = Some(team);
            let parse =
                |at| SystemTime::try_from(at).map_err(|_| invalid_field("resume.since", "must be a time"));
            since = resume.since.map(parse).transpose()?;
            let from = Offsets { stdout: resume.stdout_offset, stderr: resume.stderr_offset };
            (process, from, resume.observer)
        }
        Some(AttachMessage::Start(start)) => {
            attended = worker_of(&gateway, "start.worker_id", &start.worker_id).await?;
            let timeout = parse_duration("start.idle_timeout", start.idle_timeout)?;
            idle_timeout = idle::check_timeout("start.idle_timeout", timeout)?;
            let process;
            (process, main) = exec::start(&gateway, &attended, caller.as_ref(), start).await?;
            (process, Offsets::default(), false)
        }
        _ => return Err(invalid_field("message", "the first message must be `resume` or `start`")),
    };
    let AttendedWorker { worker, attendance, .. } = &*attended;
    // Without durable output, the worker sends each part of the output to one gateway only. So only
    // the gateway with the session may forward output, and above all claim that the output is
    // complete.
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
    if let Some(since) = since {
        let at = worker.runtime.offsets_at(process, since).await.map_err(status)?;
        from = Offsets { stdout: from.stdout.max(at.stdout), stderr: from.stderr.max(at.stderr) };
    }
    let Attachment { stdin_offset, stdout_offset, stderr_offset, has_terminal, mut events, input } =
        worker.runtime.attach(process, from).await.map_err(status)?;

    let attached = (!observer).then(|| AttachGuard::new(attendance.clone(), process, caller.clone()));
    let started = AttachAnswer::Started(pb::Started {
        stdin_offset,
        stdout_offset,
        stderr_offset: Some(stderr_offset),
        stdout_start: since.map_or(0, |_| from.stdout),
        stderr_start: since.map_or(0, |_| from.stderr),
    });
    if answers.send(Ok(pb::AttachResponse { message: Some(started) })).await.is_err() {
        return Ok(());
    }
    let activity = Activity::new();
    // A process that does not read its input must not delay its output.
    let forward_output = async {
        while let Some(event) = events.next().await {
            let (message, last) = attach_answer(event.map_err(status)?);
            activity.record();
            if open.is_some() {
                worker.session.wait_until_exclusive().await;
            }
            if answers.send(Ok(pb::AttachResponse { message: Some(message) })).await.is_err() || last {
                break;
            }
        }
        Ok::<_, Status>(())
    };
    // Input has its own queue. A process that does not read its input must not delay
    // acknowledgements, which it may need before it can write and then read.
    let (queue, mut queued) = mpsc::channel(STDIN_QUEUE);
    let room = Arc::new(Semaphore::new(STDIN_BYTES));
    let forward_input = async {
        while let Some((stdin, _room)) = queued.recv().await {
            match stdin {
                Some(pb::StdinData { offset, data }) => input.stdin(offset, data).await.map_err(status)?,
                None => input.close_stdin().await.map_err(status)?,
            }
        }
        std::future::pending::<Result<(), Status>>().await
    };
    let receive = async {
        while let Some(request) = requests.message().await? {
            let stdin = match request.message {
                Some(AttachMessage::Stdin(stdin)) => Some(stdin),
                Some(AttachMessage::CloseStdin(_)) => None,
                other => {
                    if let (Some(AttachMessage::Detach(detach)), Some(attached)) = (&other, &attached)
                        && detach.keep_input
                    {
                        attached.keep_input();
                    }
                    apply_message(input.as_ref(), other).await?;
                    continue;
                }
            };
            if let Some(team) = resumed.take_if(|_| stdin.is_some()) {
                audit::log_input(
                    caller.as_ref(),
                    worker,
                    (&team, AttemptId::from_uuid(main.uuid()), process),
                );
            }
            activity.record();
            let length = stdin.as_ref().map_or(0, |stdin: &pb::StdinData| stdin.data.len());
            if length > STDIN_MESSAGE_BYTES {
                return Err(invalid_field("stdin.data", "must be at most 1 MiB"));
            }
            let overflow = || invalid_field("stdin", "runs too far ahead of `stdin_ack`");
            let permit = room.clone().try_acquire_many_owned(u32::try_from(length).unwrap_or(u32::MAX));
            queue.try_send((stdin, permit.map_err(|_| overflow())?)).map_err(|_| overflow())?;
        }
        // The caller has sent everything, but still receives output.
        std::future::pending::<Result<(), Status>>().await
    };
    let end_idle = async {
        if process == main || !has_terminal || observer {
            std::future::pending::<()>().await;
        }
        activity.stopped_for(idle_timeout).await;
        tracing::info!(process.id = %process, "ending an idle process");
        worker.tasks.spawn(idle::hang_up(input.clone()));
        let idle = AttachAnswer::Idle(pb::Idle { after: Some(rpc::duration(idle_timeout)) });
        // An error means that the caller is gone.
        answers.send(Ok(pb::AttachResponse { message: Some(idle) })).await.ok();
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        // Biased: a message that arrives with the end of a session is discarded.
        biased;
        ended = superseded => ended,
        output = forward_output => output,
        received = receive => received,
        input = forward_input => input,
        never = end_idle => match never {},
        never = touch(worker, main, worker.config.intervals.touch) => match never {},
    }
}

/// Reports to the artifact store at intervals that the container of a process is in use. Failed
/// calls are not repeated, because the next one follows.
///
/// If the main process runs, the first report waits for one interval. The grace that the store
/// gives a container after the end is longer than that.
pub(super) async fn touch(worker: &Worker, main: ProcessId, every: Duration) -> Infallible {
    let state = worker.runtime.process(main).await;
    if matches!(state, Ok(ProcessState::Starting | ProcessState::Started)) {
        tokio::time::sleep(every).await;
    }
    // The main process of a container has the id of the attempt.
    let attempt = AttemptId::from_uuid(main.uuid());
    loop {
        if let Some(session) = worker.session.current()
            && let Err(refusal) = worker.clients.store.touch(&session.credential, attempt).await
        {
            tracing::debug!(attempt.id = %attempt, error = %refusal, "cannot report that a container is used");
        }
        tokio::time::sleep(every).await;
    }
}

async fn apply_message(input: &dyn ProcessInput, message: Option<AttachMessage>) -> Result<(), Status> {
    let result = match message {
        Some(AttachMessage::Signal(signal)) => {
            let number = u8::try_from(signal.number).ok().filter(|number| (1..=64).contains(number));
            let number = number.ok_or_else(|| invalid_field("signal.number", "must be 1 to 64"))?;
            input.signal(number).await
        }
        Some(AttachMessage::Ack(ack)) => {
            input.acknowledge(Offsets { stdout: ack.stdout_offset, stderr: ack.stderr_offset }).await
        }
        Some(AttachMessage::Detach(_)) => input.detach().await,
        Some(AttachMessage::Resize(size)) => input.resize(exec::parse_size("resize", &size)?).await,
        Some(AttachMessage::Resume(_) | AttachMessage::Start(_)) => {
            return Err(invalid_field(
                "message",
                "`resume` and `start` must be sent only as the first message",
            ));
        }
        Some(AttachMessage::Stdin(_) | AttachMessage::CloseStdin(_)) | None => {
            return Err(invalid_field("message", "is required"));
        }
    };
    result.map_err(status)
}

/// Converts an event to a message. Returns whether it is the last one.
pub(super) fn attach_answer(event: ProcessEvent) -> (AttachAnswer, bool) {
    let wire = |stream| match stream {
        OutputStream::Stdout => pb::Stream::Stdout.into(),
        OutputStream::Stderr => pb::Stream::Stderr.into(),
    };
    match event {
        ProcessEvent::StdinAccepted(offset) => (AttachAnswer::StdinAck(pb::StdinAck { offset }), false),
        ProcessEvent::Output { stream, offset, data } => {
            (AttachAnswer::Output(pb::Output { stream: wire(stream), offset, data }), false)
        }
        ProcessEvent::Truncated { stream, from, to } => {
            (AttachAnswer::Truncated(pb::Truncated { stream: wire(stream), from, to }), false)
        }
        ProcessEvent::Ended(ended) => {
            let (mut reason, mut message) = (String::new(), String::new());
            let exit = match ended {
                Ended::Exited { exit: Exit::Code(code), .. } => Some(pb::exited::Status::Code(code.into())),
                Ended::Exited { exit: Exit::Signal(signal), .. } => {
                    Some(pb::exited::Status::Signal(signal.into()))
                }
                Ended::Exited { exit: Exit::OutOfMemory, .. } => {
                    Some(pb::exited::Status::OutOfMemory(pb::OutOfMemory {}))
                }
                Ended::NotStarted(failure) | Ended::Unknown(failure) => {
                    (reason, message) = (failure.reason.as_str().to_owned(), failure.message);
                    None
                }
            };
            (AttachAnswer::Exited(pb::Exited { status: exit, reason, message }), false)
        }
        ProcessEvent::Done(offsets) => (
            AttachAnswer::Done(pb::Done { stdout_offset: offsets.stdout, stderr_offset: offsets.stderr }),
            true,
        ),
    }
}
