//! The gateway's calls, and the only code of it that makes a `Status`.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::worker::{TicketClaims, TicketOperation};
use domain::workload::Exit;
use domain::{AttemptId, Digest, chain};
use futures::{Stream, StreamExt};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::attach_response::Message as Heard;
use rpc::pb::runtime::containers_server::{Containers, ContainersServer};
use rpc::pb::runtime::read_request::Message as ReadSaid;
use rpc::pb::runtime::read_response::Message as ReadAnswer;
use rpc::pb::runtime::volumes_server::{Volumes, VolumesServer};
use rpc::pb::runtime::write_request::Message as WriteSaid;
use rpc::pb::runtime::write_response::Message as WriteAnswer;
use rpc::{Reason, Refusal, invalid_field, parse_id, parse_optional_id, parse_team};
use runtime::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessState, RuntimeError,
};
use server::Caller;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;
use transfer::{
    ArchiveError, ArchiveWriteError, InvalidManifest, Limits, Manifest, ManifestBuilder, Runs, WriteError,
};

use crate::SERVICE;
use crate::transfer::error::{ReadVolumeError, WriteVolumeError};
use crate::transfer::write::Filling;
use crate::transfer::{Transfers, read};
use crate::worker::Worker;
use crate::worker::attendance::Attached;
use crate::worker_set::{AdmitError, AttendedWorker, NotAttended, WorkerSet};

mod archives;
pub(crate) mod auth;
mod fetch;

/// Messages that wait for a caller.
const ANSWERS: usize = 4;
/// Pieces of input that wait for a process. What a caller may have in flight, 1 MiB, fits when it is sent in pieces of 4 KiB or more.
const STDIN_MESSAGES: usize = 257;
/// Most bytes of one message of standard input.
const STDIN_MESSAGE_BYTES: usize = 1 << 20;
/// Most bytes of standard input that wait for a process: what a caller may have in flight, and one message more.
const STDIN_BYTES: usize = 2 * STDIN_MESSAGE_BYTES;

/// How often the artifact store is told that somebody is attached to a process.
const TOUCH: Duration = if cfg!(test) { Duration::from_millis(10) } else { Duration::from_secs(60) };

/// Longest pause of a caller between two messages of an upload. An upload that makes no progress keeps its reservations, such as memory for its
/// manifest, no longer than that. The pause is long because a caller may compute the bytes that it sends.
const UPLOAD_PAUSE: Duration = Duration::from_secs(15 * 60);

/// Longest pause of a caller of a download, and of a source. Each may have to scan a large volume before it goes on.
pub(crate) const DOWNLOAD_PAUSE: Duration = Duration::from_secs(60 * 60);
type Answers<T> = mpsc::Sender<Result<T, Status>>;

pub(crate) fn containers(gateway: WorkerSet) -> ContainersServer<Handler> {
    ContainersServer::new(Handler { gateway })
}

pub(crate) fn volumes(gateway: WorkerSet) -> VolumesServer<Handler> {
    VolumesServer::new(Handler { gateway })
}

pub(crate) struct Handler {
    gateway: WorkerSet,
}

impl Handler {
    /// Runs a call in a task of its own, which answers through a bounded channel.
    fn answer<T, F>(
        &self,
        extensions: &http::Extensions,
        call: impl FnOnce(WorkerSet, Answers<T>) -> F,
    ) -> Response<ReceiverStream<Result<T, Status>>>
    where
        T: Send + 'static,
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let (answers, stream) = mpsc::channel(ANSWERS);
        let call = call(self.gateway.for_call(extensions), answers.clone());
        let stopping = self.gateway.stopping().clone();
        let task = async move {
            let result = tokio::select! {
                result = call => result,
                () = answers.closed() => return,
                () = stopping.cancelled() => Err(Reason::Unavailable.status(SERVICE, "the gateway is stopping")),
            };
            if let Err(status) = result {
                // Failing to answer means that nobody listens any more.
                answers.send(Err(status)).await.ok();
            }
        };
        self.gateway.tasks().spawn(task.in_current_span());
        Response::new(ReceiverStream::new(stream))
    }
}

#[tonic::async_trait]
impl Containers for Handler {
    type AttachStream = ReceiverStream<Result<pb::AttachResponse, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<pb::AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let (_, extensions, said) = request.into_parts();
        let caller = extensions.get::<Caller>().cloned();
        Ok(self.answer(&extensions, |gateway, answers| attach(gateway, caller, said, answers)))
    }

    async fn get_attendance(
        &self,
        request: Request<pb::GetAttendanceRequest>,
    ) -> Result<Response<pb::GetAttendanceResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        let team = parse_team("team", request.team)?;
        let process: AttemptId = parse_id("process_id", &request.process_id)?;
        let AttendedWorker { worker, attendance, .. } =
            &*worker_of(&gateway, "worker_id", &request.worker_id).await?;
        if worker.runtime.team(process).await.map_err(status)? != team {
            return Err(status(RuntimeError::ProcessNotFound(process)));
        }
        let standing = attendance.of(process);
        let unattended = standing.and_then(|standing| standing.unattended());
        Ok(Response::new(pb::GetAttendanceResponse {
            attached: standing.map_or(0, |standing| standing.attached),
            unattended_since: unattended.map(|(since, _)| rpc::timestamp(since)),
            left_at: unattended.map(|(_, left_at)| rpc::timestamp(left_at)),
            is_left: standing.is_some_and(|standing| standing.is_left),
        }))
    }
}

/// The worker that a call names. It need not name the only one.
async fn worker_of(gateway: &WorkerSet, field: &str, id: &str) -> Result<Arc<AttendedWorker>, Status> {
    match parse_optional_id(field, id)? {
        Some(worker) => Ok(gateway.worker(worker).await?),
        None => gateway
            .only_worker()
            .ok_or_else(|| invalid_field(field, "is required: this gateway does not attend just one worker")),
    }
}

async fn attach(
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

    let _attached = (!resume.observes).then(|| Attached::new(attendance.clone(), process, caller));
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
        never = touch(worker, process, TOUCH) => match never {},
    }
}

/// Tells the artifact store now and again that the container of a process is used. Nobody waits for that, and a call that fails is made up for by
/// the next. Of a process that has not ended it is not told at once: what is kept for a grace after the end is kept for longer than that.
async fn touch(worker: &Worker, process: AttemptId, every: Duration) -> Infallible {
    let goes_on = worker.runtime.process(process).await;
    if matches!(goes_on, Ok(ProcessState::Starting | ProcessState::Started)) {
        tokio::time::sleep(every).await;
    }
    loop {
        if let Some(session) = worker.session.current() {
            if let Err(refusal) = worker.clients.store.touch(&session.credential, process).await {
                tracing::debug!(attempt.id = %process, error = %refusal, "cannot say that a container is used");
            }
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
        ProcessEvent::StdinTaken(offset) => (Heard::StdinAck(pb::StdinAck { offset }), false),
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

#[tonic::async_trait]
impl Volumes for Handler {
    type WriteStream = ReceiverStream<Result<pb::WriteResponse, Status>>;
    type ReadStream = ReceiverStream<Result<pb::ReadResponse, Status>>;
    type ReadFileStream = ReceiverStream<Result<pb::ReadFileResponse, Status>>;
    type FetchStream = ReceiverStream<Result<pb::FetchResponse, Status>>;

    async fn fetch(&self, request: Request<pb::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| fetch::fetch(gateway, request, answers)))
    }

    async fn get_peer_address(
        &self,
        request: Request<pb::GetPeerAddressRequest>,
    ) -> Result<Response<pb::GetPeerAddressResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        fetch::peer_address(gateway, request).await.map(Response::new)
    }

    async fn stream_to_peer(
        &self,
        request: Request<pb::StreamToPeerRequest>,
    ) -> Result<Response<pb::StreamToPeerResponse>, Status> {
        let stopping = self.gateway.stopping().clone();
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        tokio::select! {
            sent = fetch::stream_to_peer(gateway, request) => sent.map(Response::new),
            () = stopping.cancelled() => Err(Reason::Unavailable.status(SERVICE, "the gateway is stopping")),
        }
    }

    async fn write(
        &self,
        request: Request<Streaming<pb::WriteRequest>>,
    ) -> Result<Response<Self::WriteStream>, Status> {
        let (_, extensions, said) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| write(gateway, said, answers)))
    }

    async fn read(
        &self,
        request: Request<Streaming<pb::ReadRequest>>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let (_, extensions, said) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| read(gateway, said, answers)))
    }

    type ReadArchiveStream = ReceiverStream<Result<pb::ReadArchiveResponse, Status>>;

    async fn write_archive(
        &self,
        request: Request<Streaming<pb::WriteArchiveRequest>>,
    ) -> Result<Response<pb::WriteArchiveResponse>, Status> {
        let stopping = self.gateway.stopping().clone();
        let (_, extensions, said) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        tokio::select! {
            written = archives::write(gateway, said) => written.map(Response::new),
            () = stopping.cancelled() => Err(Reason::Unavailable.status(SERVICE, "the gateway is stopping")),
        }
    }

    async fn read_archive(
        &self,
        request: Request<pb::ReadArchiveRequest>,
    ) -> Result<Response<Self::ReadArchiveStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| archives::read(gateway, request, answers)))
    }

    async fn read_file(
        &self,
        request: Request<pb::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        let (attended, ticket) = gateway.admit(&request.ticket, TicketOperation::Read).await?;
        let path = PathBuf::from(OsString::from_vec(request.path.to_vec()));
        let transfers = attended.transfers.clone();
        Ok(self.answer(&extensions, async |gateway, answers| {
            let _permit = gateway.acquire_transfer(TicketOperation::Read).await?;
            read_file(transfers, ticket, path, answers).await
        }))
    }
}

/// The caller's stream ended before it was done: an aborted call looks just like a clean end.
fn truncated() -> Status {
    Reason::TransferTruncated.status(SERVICE, "the stream ended before the transfer was complete")
}

/// Receives the caller's next message within `pause`. Errors: `TRANSFER_TRUNCATED`.
async fn next_message<T>(
    said: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
    pause: Duration,
) -> Result<T, Status> {
    let next = tokio::time::timeout(pause, said.next()).await.map_err(|_| paused("sent", pause))?;
    next.ok_or_else(truncated)?
}

/// A transfer made no progress, for its caller `did` nothing.
fn paused(did: &str, pause: Duration) -> Status {
    let minutes = pause.as_secs() / 60;
    Reason::TransferTruncated.status(SERVICE, format!("the caller {did} nothing for {minutes} minutes"))
}

async fn send<T>(answers: &Answers<T>, answer: T) -> Result<(), Status> {
    let sent = tokio::time::timeout(DOWNLOAD_PAUSE, answers.send(Ok(answer))).await;
    sent.map_err(|_| paused("took", DOWNLOAD_PAUSE))?.map_err(|_| truncated())
}

async fn write(
    gateway: WorkerSet,
    mut said: Streaming<pb::WriteRequest>,
    answers: Answers<pb::WriteResponse>,
) -> Result<(), Status> {
    let answer = async |message| {
        let sent = send(&answers, pb::WriteResponse { message: Some(message) });
        tokio::time::timeout(UPLOAD_PAUSE, sent).await.map_err(|_| paused("took", UPLOAD_PAUSE))?
    };
    let WriteSaid::Open(open) = next(&mut said).await? else {
        return Err(invalid_field("message", "the first message must be `open`"));
    };
    let (attended, ticket) = gateway.admit(&open.ticket, TicketOperation::Write).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Write).await?;
    let manifest = receive_manifest(&mut said).await?;

    let mut filling = Filling::begin(&attended.transfers, ticket, Arc::new(manifest)).await?;
    for runs in rpc::tree::runs(&filling.missing) {
        answer(WriteAnswer::Missing(runs)).await?;
    }
    answer(WriteAnswer::MissingEnd(pb::ExtentRunsEnd { bytes: filling.missing_bytes() })).await?;

    let mut bytes = 0;
    loop {
        match next(&mut said).await? {
            WriteSaid::Chunk(chunk) => {
                let extents: Vec<_> =
                    chunk.extents.into_iter().map(|extent| (extent.ordinal, extent.data)).collect();
                if extents.iter().all(|(_, data)| data.is_empty()) {
                    return Err(invalid_field("chunk", "a chunk has content"));
                }
                bytes += extents.iter().map(|(_, data)| length(data)).sum::<u64>();
                filling.put(&attended.transfers, extents).await?;
                // Progress is for people: when the caller does not read it, it is left out.
                let progress = WriteAnswer::Progress(pb::WriteProgress { bytes });
                answers.try_send(Ok(pb::WriteResponse { message: Some(progress) })).ok();
            }
            WriteSaid::Commit(_) => break,
            _ => return Err(invalid_field("message", "only `chunk` and `commit` may follow the manifest")),
        }
    }
    let manifest = filling.commit(&attended.transfers).await?;
    let digest = manifest.tree_digest().as_bytes().to_vec().into();
    answer(WriteAnswer::Committed(pb::Committed { digest, size_bytes: manifest.size_bytes() })).await
}

async fn next(
    said: &mut (impl Stream<Item = Result<pb::WriteRequest, Status>> + Unpin),
) -> Result<WriteSaid, Status> {
    rpc::required("message", next_message(said, UPLOAD_PAUSE).await?.message)
}

async fn receive_manifest(
    said: &mut (impl Stream<Item = Result<pb::WriteRequest, Status>> + Unpin),
) -> Result<Manifest, Status> {
    let mut builder = ManifestBuilder::new(Limits::of_process());
    let invalid = |error| rpc::tree::invalid_manifest(SERVICE, &error);
    let end = loop {
        match next(said).await? {
            WriteSaid::Manifest(part) => rpc::tree::push_part(&mut builder, &part).map_err(invalid)?,
            WriteSaid::ManifestEnd(end) => break end,
            _ => return Err(invalid_field("message", "the manifest must come first, and whole")),
        }
    };
    let manifest = builder.finish().map_err(invalid)?;
    let said = Digest::try_from(end.digest.as_ref());
    if said != Ok(manifest.tree_digest()) {
        return Err(Reason::DigestMismatch.status(SERVICE, "the manifest has another digest than was said"));
    }
    Ok(manifest)
}

fn length(data: &Bytes) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

async fn read(
    gateway: WorkerSet,
    mut said: Streaming<pb::ReadRequest>,
    answers: Answers<pb::ReadResponse>,
) -> Result<(), Status> {
    let answer = |message| send(&answers, pb::ReadResponse { message: Some(message) });
    let open = match next_message(&mut said, DOWNLOAD_PAUSE).await?.message {
        Some(ReadSaid::Open(open)) => open,
        _ => return Err(invalid_field("message", "the first message must be `open`")),
    };
    let (attended, ticket) = gateway.admit(&open.ticket, TicketOperation::Read).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Read).await?;
    let manifest = attended.transfers.manifest(&ticket).await.map_err(ReadVolumeError::from)?;
    for part in rpc::tree::manifest_parts(&manifest) {
        answer(ReadAnswer::Manifest(part)).await?;
    }
    answer(ReadAnswer::ManifestEnd(rpc::tree::manifest_end(&manifest))).await?;

    let mut wanted = Runs::new();
    loop {
        match next_message(&mut said, DOWNLOAD_PAUSE).await?.message {
            Some(ReadSaid::Want(runs)) => rpc::tree::push_runs(&mut wanted, &runs)
                .map_err(|error| invalid_field("want.runs", error.to_string()))?,
            Some(ReadSaid::WantEnd(_)) => break,
            Some(ReadSaid::Open(_)) | None => {
                return Err(invalid_field("message", "must be `want` or `want_end`"));
            }
        }
    }
    if wanted.last().is_some_and(|last| last >= manifest.extent_count()) {
        return Err(invalid_field("want.runs", "names an extent that the manifest does not have"));
    }

    let (batches, mut ready) = mpsc::channel::<Vec<transfer::ExtentData>>(ANSWERS);
    let reading = async {
        read::read(&attended.transfers, ticket.volume, manifest, wanted, batches).await.map_err(Status::from)
    };
    let sending = async {
        while let Some(batch) = ready.recv().await {
            let extents =
                batch.into_iter().map(|extent| pb::ExtentData { ordinal: extent.ordinal, data: extent.data });
            answer(ReadAnswer::Chunk(pb::Chunk { extents: extents.collect() })).await?;
        }
        Ok(())
    };
    tokio::try_join!(reading, sending)?;
    answer(ReadAnswer::Done(pb::ReadDone {})).await
}

async fn read_file(
    transfers: Arc<Transfers>,
    ticket: TicketClaims,
    path: PathBuf,
    answers: Answers<pb::ReadFileResponse>,
) -> Result<(), Status> {
    // Nothing is read that may not have survived a crash of the machine.
    let manifest = transfers.manifest(&ticket).await.map_err(ReadVolumeError::from)?;
    let (chunks, mut ready) = mpsc::channel(ANSWERS);
    let reading = async {
        read::read_file(&transfers, ticket.volume, manifest, path, chunks).await.map_err(Status::from)
    };
    let sending = async {
        let mut first = true;
        while let Some((size, data)) = ready.recv().await {
            let size_bytes = if std::mem::take(&mut first) { size } else { 0 };
            send(&answers, pb::ReadFileResponse { size_bytes, data }).await?;
        }
        Ok(())
    };
    tokio::try_join!(reading, sending).map(|_| ())
}

impl From<AdmitError> for Status {
    fn from(error: AdmitError) -> Self {
        let reason = match &error {
            AdmitError::Ticket => Reason::InvalidToken,
            AdmitError::Keys(refusal) => return rpc::unavailable(SERVICE, "verify a ticket", refusal),
            AdmitError::NotAttended(elsewhere) => return elsewhere.clone().into(),
            AdmitError::TooManyTransfers => Reason::Unavailable,
        };
        reason.status(SERVICE, chain(&error))
    }
}

impl From<ReadVolumeError> for Status {
    fn from(error: ReadVolumeError) -> Self {
        let reason = match error {
            ReadVolumeError::Worker(error) => return status(error),
            ReadVolumeError::CallerGone => return truncated(),
            ReadVolumeError::Archive(ref error) => match archive_reason(error) {
                Some(reason) => reason,
                None => return truncated(),
            },
            ReadVolumeError::Damaged(_) => Reason::DigestMismatch,
            ReadVolumeError::Read(_) => Reason::WorkerFailed,
            ReadVolumeError::Pack(ref error) => pack_reason(error),
            ReadVolumeError::PathNotFound(_) => Reason::PathNotFound,
            ReadVolumeError::NotAFile { .. } => Reason::NotAFile,
        };
        reason.status(SERVICE, chain(&error))
    }
}

impl From<WriteVolumeError> for Status {
    fn from(error: WriteVolumeError) -> Self {
        let reason = match error {
            WriteVolumeError::Worker(error) => return status(error),
            WriteVolumeError::CallerGone | WriteVolumeError::BrokenOff => return truncated(),
            WriteVolumeError::Archive(ref error) => match archive_reason(error) {
                Some(reason) => reason,
                None => return truncated(),
            },
            WriteVolumeError::Damaged(_) => Reason::DigestMismatch,
            WriteVolumeError::Write(WriteError::DiskFull { .. }) => Reason::DiskFull,
            WriteVolumeError::Write(WriteError::DigestMismatch { .. }) => Reason::DigestMismatch,
            WriteVolumeError::Write(WriteError::Missing { .. }) => Reason::TransferTruncated,
            WriteVolumeError::Write(WriteError::Impossible { .. }) => Reason::InvalidManifest,
            WriteVolumeError::Write(
                WriteError::OutOfOrder(_) | WriteError::NoSuchExtent(_) | WriteError::Unsafe { .. },
            ) => {
                return invalid_field("chunk.extents", error.to_string());
            }
            WriteVolumeError::Write(WriteError::Io { .. }) => Reason::WorkerFailed,
            WriteVolumeError::Pack(ref error) => pack_reason(error),
            WriteVolumeError::Refused(ref refusal) => return Refusal::pass_on(refusal, SERVICE),
            WriteVolumeError::Busy(_) => Reason::Unavailable,
            WriteVolumeError::Complete(_) => Reason::ClaimLost,
            WriteVolumeError::InUse(_) => Reason::VolumeInUse,
            WriteVolumeError::NoRoom(_) => Reason::DiskFull,
        };
        reason.status(SERVICE, chain(&error))
    }
}

/// The reason of an archive that cannot be read. `None`: it ended too early.
fn archive_reason(error: &ArchiveError) -> Option<Reason> {
    match error {
        ArchiveError::Source(_) => None,
        ArchiveError::Sink(_) => Some(Reason::WorkerFailed),
        ArchiveError::Changed { .. } => Some(Reason::DigestMismatch),
        ArchiveError::Manifest(InvalidManifest::NoMemory) => Some(Reason::Unavailable),
        _ => Some(Reason::InvalidArchive),
    }
}

fn pack_reason(error: &ArchiveWriteError) -> Reason {
    match error {
        ArchiveWriteError::Content(WriteError::DigestMismatch { .. }) => Reason::DigestMismatch,
        _ => Reason::WorkerFailed,
    }
}

impl From<NotAttended> for Status {
    fn from(error: NotAttended) -> Self {
        let message = error.to_string();
        let mut about = vec![("worker_id", error.worker.to_string())];
        about.extend(error.endpoint.map(|endpoint| ("gateway_endpoint", endpoint)));
        Reason::NotAttended.status_about(SERVICE, message, about)
    }
}

/// A worker's failure, as callers see it.
fn status(error: RuntimeError) -> Status {
    let reason = match &error {
        RuntimeError::VolumeNotFound(_) => Reason::VolumeNotFound,
        RuntimeError::ProcessNotFound(_) => Reason::ProcessNotFound,
        RuntimeError::OffsetOutOfRange { .. } => Reason::OffsetOutOfRange,
        RuntimeError::DiskFull(_) => Reason::DiskFull,
        RuntimeError::Unsupported(_) => Reason::Unsupported,
        // Asked again, who has taken over is found.
        RuntimeError::TakenOver(_) => Reason::Unavailable,
        RuntimeError::NoPeers(_) => Reason::NoPeers,
        RuntimeError::Peer(_) => Reason::PeerFailed,
        _ => {
            tracing::warn!(error = chain(&error), "the worker failed");
            Reason::WorkerFailed
        }
    };
    reason.status(SERVICE, error.to_string())
}

#[cfg(test)]
mod tests;
