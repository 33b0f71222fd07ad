//! Tests of output, input and broken calls, with a fake gateway.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use rpc::pb::runtime::containers_server::{Containers, ContainersServer};
use rpc::pb::runtime::{
    CreateContainerRequest, CreateContainerResponse, DestroyContainerRequest, DestroyContainerResponse, Done,
    Exited, GetAttendanceRequest, GetAttendanceResponse, GetContainerRequest, GetContainerResponse,
    GetProcessRequest, GetProcessResponse, GetUsageRequest, GetUsageResponse, ListContainersRequest,
    ListContainersResponse, PublishRequest, PublishResponse, Started, StdinAck, StopContainerRequest,
    StopContainerResponse, Truncated,
};
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::*;

const PIECE: usize = 10_000;
const PIECES: usize = 100;

/// Fake gateway with a process that writes `output` and takes all input. Its calls break after some
/// pieces.
#[derive(Clone)]
struct Gateway {
    output: Bytes,
    /// Number of pieces after which each of the next calls breaks. The last element is the first
    /// call.
    breaks: Arc<Mutex<Vec<usize>>>,
    /// Offset before which output is lost.
    kept_from: usize,
    input: Arc<Mutex<Vec<u8>>>,
    input_closed: CancellationToken,
    acknowledged: Arc<Mutex<u64>>,
    /// Names of the first messages of all calls.
    first_messages: Arc<Mutex<Vec<&'static str>>>,
}

/// Number of pieces for a call that breaks before it is confirmed.
const UNCONFIRMED: usize = usize::MAX;

type Answers = Pin<Box<dyn futures::Stream<Item = Result<AttachResponse, Status>> + Send>>;

type Unused<T> = tokio_stream::Empty<Result<T, Status>>;

fn say(message: ResponseMessage) -> Result<AttachResponse, Status> {
    Ok(AttachResponse { message: Some(message) })
}

#[tonic::async_trait]
impl Containers for Gateway {
    type AttachStream = Answers;
    type CreateContainerStream = Unused<CreateContainerResponse>;
    type PublishStream = Unused<PublishResponse>;

    async fn create_container(
        &self,
        _: Request<CreateContainerRequest>,
    ) -> Result<Response<Self::CreateContainerStream>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn publish(&self, _: Request<PublishRequest>) -> Result<Response<Self::PublishStream>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn get_container(
        &self,
        _: Request<GetContainerRequest>,
    ) -> Result<Response<GetContainerResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn list_containers(
        &self,
        _: Request<ListContainersRequest>,
    ) -> Result<Response<ListContainersResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn get_usage(&self, _: Request<GetUsageRequest>) -> Result<Response<GetUsageResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn get_process(
        &self,
        _: Request<GetProcessRequest>,
    ) -> Result<Response<GetProcessResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn stop_container(
        &self,
        _: Request<StopContainerRequest>,
    ) -> Result<Response<StopContainerResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn destroy_container(
        &self,
        _: Request<DestroyContainerRequest>,
    ) -> Result<Response<DestroyContainerResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn get_attendance(
        &self,
        _: Request<GetAttendanceRequest>,
    ) -> Result<Response<GetAttendanceResponse>, Status> {
        Err(Status::unimplemented("no test requests"))
    }

    async fn attach(&self, request: Request<Streaming<AttachRequest>>) -> Result<Response<Answers>, Status> {
        let (answers, queue) = mpsc::channel(4);
        let gateway = self.clone();
        let mut requests = request.into_inner();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let (name, resume) = match requests.message().await {
                Ok(Some(AttachRequest { message: Some(RequestMessage::Resume(resume)) })) => {
                    ("resume", resume)
                }
                Ok(Some(AttachRequest { message: Some(RequestMessage::Start(_)) })) => {
                    ("start", Resume::default())
                }
                _ => return,
            };
            gateway.first_messages.lock().expect("held").push(name);
            let breaks_after = gateway.breaks.lock().expect("held").pop();
            if breaks_after == Some(UNCONFIRMED) {
                return;
            }
            let taken = gateway.input.lock().expect("held").len() as u64;
            _ = answers
                .send(say(ResponseMessage::Started(Started { stdin_offset: taken, ..Started::default() })))
                .await;
            tokio::join!(
                gateway.speak(resume, breaks_after, &answers),
                gateway.listen(&mut requests, breaks_after, &answers)
            );
        });
        let answers = futures::stream::unfold((queue, tasks), async |(mut queue, tasks)| {
            queue.recv().await.map(|answer| (answer, (queue, tasks)))
        });
        Ok(Response::new(Box::pin(answers)))
    }
}

impl Gateway {
    async fn speak(
        &self,
        resume: Resume,
        breaks_after: Option<usize>,
        answers: &mpsc::Sender<Result<AttachResponse, Status>>,
    ) {
        let mut at = usize::try_from(resume.stdout_offset).expect("small");
        if at < self.kept_from {
            let truncated =
                Truncated { stream: Stream::Stdout.into(), from: at as u64, to: self.kept_from as u64 };
            _ = answers.send(say(ResponseMessage::Truncated(truncated))).await;
            at = self.kept_from;
        }
        for _ in 0..breaks_after.unwrap_or(usize::MAX) {
            if at == self.output.len() {
                break;
            }
            let end = self.output.len().min(at + PIECE);
            let data = self.output.slice(at..end);
            let output = Output { stream: Stream::Stdout.into(), offset: at as u64, data };
            _ = answers.send(say(ResponseMessage::Output(output))).await;
            at = end;
        }
        if breaks_after.is_none() {
            self.input_closed.cancelled().await;
            let code = Some(rpc::pb::runtime::exited::Status::Code(7));
            _ = answers
                .send(say(ResponseMessage::Exited(Exited { status: code, ..Exited::default() })))
                .await;
            let done = Done { stdout_offset: at as u64, stderr_offset: 0 };
            _ = answers.send(say(ResponseMessage::Done(done))).await;
        }
    }

    async fn listen(
        &self,
        requests: &mut Streaming<AttachRequest>,
        breaks_after: Option<usize>,
        answers: &mpsc::Sender<Result<AttachResponse, Status>>,
    ) {
        let mut pieces = 0;
        while breaks_after.is_none_or(|breaks_after| pieces < breaks_after) {
            match requests.message().await {
                Ok(Some(AttachRequest { message: Some(RequestMessage::Stdin(stdin)) })) => {
                    pieces += 1;
                    let taken = {
                        let mut input = self.input.lock().expect("held");
                        let known = input.len() - usize::try_from(stdin.offset).expect("small");
                        input.extend_from_slice(stdin.data.get(known..).unwrap_or_default());
                        input.len() as u64
                    };
                    _ = answers.send(say(ResponseMessage::StdinAck(StdinAck { offset: taken }))).await;
                }
                Ok(Some(AttachRequest { message: Some(RequestMessage::CloseStdin(_)) })) => {
                    self.input_closed.cancel();
                    if breaks_after.is_some() {
                        return;
                    }
                }
                Ok(Some(AttachRequest { message: Some(RequestMessage::Ack(ack)) })) => {
                    *self.acknowledged.lock().expect("held") = ack.stdout_offset;
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }
}

/// Attaches, and returns the end, the number of received bytes and the number of missing bytes.
async fn copy(gateway: &Gateway, stdin: Option<Stdin>, stdout: OwnedFd) -> (AttachEnd, u64, u64) {
    let (end, streams) = copy_of(gateway, None, stdin, stdout).await;
    (end, streams.stdout.received(), streams.stdout.missing())
}

/// Attaches to the main process or a further process.
async fn copy_of(
    gateway: &Gateway,
    further: Option<&FurtherProcess>,
    stdin: Option<Stdin>,
    stdout: OwnedFd,
) -> (AttachEnd, Streams) {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("s");
    let listener = server::Listener::Unix(UnixListener::bind(&socket).expect("bound"));
    let mut host = server::Host::new();
    host.add_service(ContainersServer::new(gateway.clone()));
    let mut serving = JoinSet::new();
    serving.spawn(host.serve([listener], std::future::pending()));

    let address = format!("unix://{}", socket.display());
    let connection = Connection::to(&address);
    let ui = Ui::new(true);
    let mut streams = Streams {
        stdout: Sink::to_file(stdout, OutputStream::Stdout, None),
        stderr: Sink::to_file(
            std::fs::File::create("/dev/null").expect("there").into(),
            OutputStream::Stderr,
            None,
        ),
        stdin,
        acknowledge: true,
        process: None,
        interrupt: Arc::default(),
        window: None,
        state: AttachState::default(),
    };
    let location = AttemptLocation {
        gateway_endpoint: address,
        attempt_id: "it".to_owned(),
        ..AttemptLocation::default()
    };
    let target = Target { connection: &connection, ui: &ui, workload: "it", further };
    let end = attach(target, location, &mut streams).await;
    (end, streams)
}

fn gateway(breaks: &[usize]) -> Gateway {
    let output: Vec<u8> = (0..PIECE * PIECES).map(|at| u8::try_from(at % 251).expect("small")).collect();
    Gateway {
        output: output.into(),
        breaks: Arc::new(Mutex::new(breaks.to_vec())),
        kept_from: 0,
        input: Arc::default(),
        input_closed: CancellationToken::new(),
        acknowledged: Arc::default(),
        first_messages: Arc::default(),
    }
}

fn drain(mut reader: std::io::PipeReader) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).expect("read");
        all
    })
}

#[tokio::test]
async fn broken_call_loses_and_repeats_no_bytes() {
    let gateway = gateway(&[0, 7, 1, 40]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let output = drain(reader);
    let (input, pieces) = mpsc::channel(2);
    let pieces_sent: Vec<Bytes> = (0..50_u8).map(|piece| Bytes::from(vec![piece; 70_000])).collect();
    let all: Vec<u8> = pieces_sent.concat();
    let mut typing = JoinSet::new();
    typing.spawn(async move {
        for piece in pieces_sent {
            _ = input.send(piece).await;
        }
    });

    let (end, received, missing) = copy(&gateway, Some(Stdin::from(pieces)), writer.into()).await;

    assert!(matches!(end, AttachEnd::Done), "{end:?}");
    assert_eq!((received, missing), (gateway.output.len() as u64, 0));
    assert!(output.join().expect("ended") == gateway.output, "the output arrived as it was");
    assert!(*gateway.input.lock().expect("held") == all, "the input arrived as it was");
    assert_eq!(*gateway.breaks.lock().expect("held"), Vec::<usize>::new());
}

#[tokio::test]
async fn lost_output_is_skipped_and_counted() {
    let gateway = Gateway { kept_from: 2 * PIECE, ..gateway(&[]) };
    gateway.input_closed.cancel();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let output = drain(reader);
    let (end, received, missing) = copy(&gateway, None, writer.into()).await;
    assert!(matches!(end, AttachEnd::Done), "{end:?}");
    assert_eq!((received, missing), (gateway.output.len() as u64, 2 * PIECE as u64));
    assert!(output.join().expect("ended") == gateway.output[2 * PIECE..]);
}

#[tokio::test]
async fn output_is_acknowledged_only_when_written() {
    let gateway = gateway(&[]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut copying = std::pin::pin!(copy(&gateway, None, writer.into()));
    // The pipe has no reader, so at most its capacity can have been written.
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut copying).await.is_err());
    assert!(*gateway.acknowledged.lock().expect("held") <= 64 << 10);
    let output = drain(reader);
    gateway.input_closed.cancel();
    assert!(matches!(copying.await.0, AttachEnd::Done));
    assert_eq!(output.join().expect("ended").len(), gateway.output.len());
}

#[tokio::test]
async fn closed_stdout_ends_attachment() {
    let gateway = gateway(&[]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert!(matches!(copy(&gateway, None, writer.into()).await.0, AttachEnd::StdoutClosed));
}

#[tokio::test]
async fn process_is_started_until_confirmed_and_then_resumed() {
    let gateway = gateway(&[0, 0, UNCONFIRMED]);
    gateway.input_closed.cancel();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let output = drain(reader);
    let further = FurtherProcess {
        process_id: "shell".to_owned(),
        attempt_id: "it".to_owned(),
        container_id: "it".to_owned(),
        spec: Some(ProcessSpec::default()),
        idle_timeout: None,
    };
    let (end, streams) = copy_of(&gateway, Some(&further), None, writer.into()).await;
    assert!(matches!(end, AttachEnd::Done), "{end:?}");
    assert_eq!(*gateway.first_messages.lock().expect("held"), ["start", "start", "resume", "resume"]);
    let code = streams.state.exited.as_ref().and_then(|exited| exited.status);
    assert_eq!(code, Some(rpc::pb::runtime::exited::Status::Code(7)));
    drop(streams);
    assert!(output.join().expect("ended") == gateway.output, "the output arrived as it was");
}

#[tokio::test]
async fn keys_follow_earlier_input_before_detaching() {
    let gateway = gateway(&[]);
    gateway.input.lock().expect("held").extend_from_slice(b"earlier ");
    let (input, pieces) = mpsc::channel(8);
    let (stdin, detach) = Stdin::typed(pieces);
    for key in ["k", "e", "y"] {
        input.send(Bytes::from(key)).await.expect("room");
    }
    detach.send_replace(true);
    let null = std::fs::File::create("/dev/null").expect("there");
    let (end, _, _) = copy(&gateway, Some(stdin), null.into()).await;
    assert!(matches!(end, AttachEnd::Detached), "{end:?}");
    assert_eq!(*gateway.input.lock().expect("held"), b"earlier key");
    assert!(!gateway.input_closed.is_cancelled(), "detaching does not end the input");
}
