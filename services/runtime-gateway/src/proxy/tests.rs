//! Tests of a proxy between a caller and fake gateways.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use domain::worker::ProxyClaims;
use domain::{Timestamp, WorkerId};
use rpc::client::{PROXY_TICKET_HEADER, TICKET_HEADER};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as AttachMessage;
use rpc::pb::runtime::attach_response::Message as AttachAnswer;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::containers_server::ContainersServer;
use rpc::pb::scheduler;
use rpc::token::TokenSigner;
use rpc::{Reason, Refusal};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataMap;
use tonic::{Response, Status, Streaming};

use super::*;
use crate::test_support::served::TestServer;
use crate::test_support::within;

const TOKEN: &str = "of-the-cluster";

/// Starts a server that requires the cluster token.
async fn serve(services: impl FnOnce(&mut Host)) -> TestServer {
    TestServer::on(Host::new().with_token(Some(TOKEN.to_owned())), services).await
}

/// A fake scheduler that knows the gateway of one worker.
#[derive(Clone)]
struct Schedule {
    signer: TokenSigner,
    endpoint: watch::Sender<String>,
    lookups: Arc<AtomicUsize>,
}

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not used in this test"))
}

#[tonic::async_trait]
impl scheduler::workers_server::Workers for Schedule {
    type SynchronizeStream = ReceiverStream<Result<scheduler::SynchronizeResponse, Status>>;

    async fn synchronize(
        &self,
        _: tonic::Request<Streaming<scheduler::SynchronizeRequest>>,
    ) -> Result<Response<Self::SynchronizeStream>, Status> {
        unused()
    }

    async fn issue_ticket(
        &self,
        _: tonic::Request<scheduler::IssueTicketRequest>,
    ) -> Result<Response<scheduler::IssueTicketResponse>, Status> {
        unused()
    }

    async fn list_workers(
        &self,
        _: tonic::Request<scheduler::ListWorkersRequest>,
    ) -> Result<Response<scheduler::ListWorkersResponse>, Status> {
        unused()
    }

    async fn get_worker(
        &self,
        _: tonic::Request<scheduler::GetWorkerRequest>,
    ) -> Result<Response<scheduler::GetWorkerResponse>, Status> {
        unused()
    }

    async fn keys(
        &self,
        _: tonic::Request<scheduler::KeysRequest>,
    ) -> Result<Response<scheduler::KeysResponse>, Status> {
        Ok(Response::new(scheduler::KeysResponse { keys: vec![self.signer.public()] }))
    }

    async fn issue_proxy_ticket(
        &self,
        request: tonic::Request<scheduler::IssueProxyTicketRequest>,
    ) -> Result<Response<scheduler::IssueProxyTicketResponse>, Status> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        let worker = request.into_inner().worker_id.parse().expect("a worker");
        let claims = ProxyClaims { worker, expires_at: Timestamp::now() + Duration::from_secs(60) };
        Ok(Response::new(scheduler::IssueProxyTicketResponse {
            ticket: self.signer.sign(&claims),
            gateway_endpoint: self.endpoint.borrow().clone(),
            valid_for: Some(rpc::duration(Duration::from_secs(60))),
        }))
    }

    type WatchWorkersStream = ReceiverStream<Result<scheduler::WatchWorkersResponse, Status>>;

    async fn watch_workers(
        &self,
        _: tonic::Request<scheduler::WatchWorkersRequest>,
    ) -> Result<Response<Self::WatchWorkersStream>, Status> {
        unused()
    }

    async fn cordon_worker(
        &self,
        _: tonic::Request<scheduler::CordonWorkerRequest>,
    ) -> Result<Response<scheduler::CordonWorkerResponse>, Status> {
        unused()
    }

    async fn uncordon_worker(
        &self,
        _: tonic::Request<scheduler::UncordonWorkerRequest>,
    ) -> Result<Response<scheduler::UncordonWorkerResponse>, Status> {
        unused()
    }

    async fn retire_worker(
        &self,
        _: tonic::Request<scheduler::RetireWorkerRequest>,
    ) -> Result<Response<scheduler::RetireWorkerResponse>, Status> {
        unused()
    }

    async fn prune_worker(
        &self,
        _: tonic::Request<scheduler::PruneWorkerRequest>,
    ) -> Result<Response<scheduler::PruneWorkerResponse>, Status> {
        unused()
    }
}

/// The behaviour of a fake gateway.
#[derive(Clone, Copy)]
enum Behavior {
    /// Rejects the call with `NOT_ATTENDED` after this number of messages.
    Rejects(usize),
    /// Answers with endless output.
    Floods,
    /// Answers each input with its offset.
    Echoes,
    /// Sends no answer.
    Waits,
}

/// A fake gateway.
#[derive(Clone)]
struct Gateway {
    behavior: Behavior,
    calls: Arc<Mutex<Vec<MetadataMap>>>,
    /// Bytes of output that were read from the gateway.
    sent: watch::Sender<u64>,
    /// Number of calls that have ended.
    ended: watch::Sender<usize>,
}

impl Gateway {
    fn new(behavior: Behavior) -> Self {
        let (sent, ended) = (watch::Sender::new(0), watch::Sender::new(0));
        Self { behavior, calls: Arc::default(), sent, ended }
    }

    async fn serve(&self) -> TestServer {
        let service = ContainersServer::new(self.clone());
        serve(|host| host.add_ticketed_service(service, &[PROXY_TICKET_HEADER])).await
    }

    fn calls(&self) -> Vec<MetadataMap> {
        self.calls.lock().expect("held").clone()
    }

    async fn attended(
        self,
        mut requests: Streaming<pb::AttachRequest>,
        answers: mpsc::Sender<Result<pb::AttachResponse, Status>>,
    ) {
        let answer = |message| answers.send(Ok(pb::AttachResponse { message: Some(message) }));
        let ack = |offset| AttachAnswer::StdinAck(pb::StdinAck { offset });
        let work = async {
            match self.behavior {
                Behavior::Rejects(after) => {
                    for _ in 0..after {
                        requests.message().await.ok();
                    }
                    let about = [("worker_id", "it".to_owned())];
                    let status = Reason::NotAttended.status_about("gantry.runtime", "not mine", about);
                    answers.send(Err(status)).await.ok();
                }
                Behavior::Floods => loop {
                    let data = bytes::Bytes::from(vec![b'y'; 256 << 10]);
                    let output = pb::Output { stream: 1, offset: *self.sent.borrow(), data };
                    if answer(AttachAnswer::Output(output)).await.is_err() {
                        return;
                    }
                    self.sent.send_modify(|sent| *sent += 256 << 10);
                },
                Behavior::Echoes => {
                    while let Ok(Some(request)) = requests.message().await {
                        let sent = match request.message {
                            Some(AttachMessage::Resume(_)) => answer(ack(u64::MAX)).await,
                            Some(AttachMessage::Stdin(stdin)) => answer(ack(stdin.offset)).await,
                            _ => break,
                        };
                        if sent.is_err() {
                            return;
                        }
                    }
                    answers
                        .send(Err(Reason::OffsetOutOfRange.status("gantry.runtime", "that was all")))
                        .await
                        .ok();
                }
                Behavior::Waits => {
                    // A caller that is gone looks like a caller that sends no more.
                    while let Ok(Some(_)) = requests.message().await {}
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::select! {
            () = work => {}
            () = answers.closed() => {}
        }
        self.ended.send_modify(|ended| *ended += 1);
    }
}

#[tonic::async_trait]
impl pb::containers_server::Containers for Gateway {
    type AttachStream = ReceiverStream<Result<pb::AttachResponse, Status>>;

    type CreateContainerStream = ReceiverStream<Result<pb::CreateContainerResponse, Status>>;
    type PublishStream = ReceiverStream<Result<pb::PublishResponse, Status>>;

    async fn create_container(
        &self,
        _: tonic::Request<pb::CreateContainerRequest>,
    ) -> Result<Response<Self::CreateContainerStream>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn publish(
        &self,
        _: tonic::Request<pb::PublishRequest>,
    ) -> Result<Response<Self::PublishStream>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_container(
        &self,
        _: tonic::Request<pb::GetContainerRequest>,
    ) -> Result<Response<pb::GetContainerResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn list_containers(
        &self,
        _: tonic::Request<pb::ListContainersRequest>,
    ) -> Result<Response<pb::ListContainersResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_usage(
        &self,
        _: tonic::Request<pb::GetUsageRequest>,
    ) -> Result<Response<pb::GetUsageResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_process(
        &self,
        _: tonic::Request<pb::GetProcessRequest>,
    ) -> Result<Response<pb::GetProcessResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn stop_container(
        &self,
        _: tonic::Request<pb::StopContainerRequest>,
    ) -> Result<Response<pb::StopContainerResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn destroy_container(
        &self,
        _: tonic::Request<pb::DestroyContainerRequest>,
    ) -> Result<Response<pb::DestroyContainerResponse>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn get_attendance(
        &self,
        _: tonic::Request<pb::GetAttendanceRequest>,
    ) -> Result<Response<pb::GetAttendanceResponse>, Status> {
        Ok(Response::new(pb::GetAttendanceResponse { attached: 1, ..Default::default() }))
    }

    #[expect(clippy::disallowed_methods, reason = "it ends with the call")]
    async fn attach(
        &self,
        request: tonic::Request<Streaming<pb::AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        self.calls.lock().expect("held").push(request.metadata().clone());
        let (answers, stream) = mpsc::channel(1);
        tokio::spawn(self.clone().attended(request.into_inner(), answers));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// A proxy with one worker, whose gateway the fake scheduler reports.
struct Scene {
    worker: WorkerId,
    schedule: Schedule,
    scheduler: TestServer,
    proxy: TestServer,
}

impl Scene {
    async fn start(gateway: &str) -> Self {
        let schedule = Schedule {
            signer: TokenSigner::from_seed(&[7; 32]),
            endpoint: watch::Sender::new(gateway.to_owned()),
            lookups: Arc::default(),
        };
        let service = scheduler::workers_server::WorkersServer::new(schedule.clone());
        let scheduler = serve(|host| host.add_service(service)).await;
        let proxy = serve(|host| {
            start_proxy(&scheduler.endpoint, Some(TOKEN), host).expect("an address");
        })
        .await;
        Self { worker: WorkerId::new(), schedule, scheduler, proxy }
    }

    fn client(&self) -> ContainersClient<rpc::Peer> {
        let outgoing = Outgoing::default().with_token(Some(TOKEN));
        ContainersClient::new(rpc::client::peer(&self.proxy.endpoint, outgoing).expect("an address"))
    }

    fn resume(&self) -> pb::AttachRequest {
        let resume = pb::Resume {
            worker_id: self.worker.to_string(),
            process_id: domain::AttemptId::new().to_string(),
            team: "main".to_owned(),
            ..pb::Resume::default()
        };
        pb::AttachRequest { message: Some(AttachMessage::Resume(resume)) }
    }

    /// Starts a call. Returns the sender of requests and the response.
    async fn attach(&self) -> (mpsc::Sender<pb::AttachRequest>, Streaming<pb::AttachResponse>) {
        let (sender, requests) = mpsc::channel(4);
        sender.send(self.resume()).await.expect("there is room");
        let answers = within("an answer", self.client().attach(ReceiverStream::new(requests))).await;
        (sender, answers.expect("the call is admitted").into_inner())
    }

    async fn end(self) {
        self.proxy.end().await;
        self.scheduler.end().await;
    }
}

async fn next(answers: &mut Streaming<pb::AttachResponse>) -> Result<Option<AttachAnswer>, Refusal> {
    let message = within("a message", answers.message()).await?;
    Ok(message.and_then(|response| response.message))
}

fn stdin(offset: u64) -> pb::AttachRequest {
    let data = bytes::Bytes::from_static(b"input");
    pb::AttachRequest { message: Some(AttachMessage::Stdin(pb::StdinData { offset, data })) }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_arrive_in_order_and_errors_keep_details() {
    let gateway = Gateway::new(Behavior::Echoes);
    let served = gateway.serve().await;
    let scene = Scene::start(&served.endpoint).await;
    let (sender, mut answers) = scene.attach().await;
    assert_eq!(
        next(&mut answers).await.expect("an answer"),
        Some(AttachAnswer::StdinAck(pb::StdinAck { offset: u64::MAX }))
    );
    for offset in 0..300 {
        sender.send(stdin(offset)).await.expect("the call is open");
        assert_eq!(
            next(&mut answers).await.expect("an answer"),
            Some(AttachAnswer::StdinAck(pb::StdinAck { offset }))
        );
    }
    let close = pb::AttachRequest { message: Some(AttachMessage::CloseStdin(pb::CloseStdin {})) };
    sender.send(close).await.expect("the call is open");
    let refusal = next(&mut answers).await.expect_err("the call ends with an error");
    assert!(refusal.is(Reason::OffsetOutOfRange), "{refusal}");
    assert_eq!(refusal.message, "that was all");
    scene.end().await;
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn proxy_requires_token_and_does_not_forward_it() {
    let gateway = Gateway::new(Behavior::Echoes);
    let served = gateway.serve().await;
    let scene = Scene::start(&served.endpoint).await;
    let peer = rpc::client::peer(&scene.proxy.endpoint, Outgoing::default()).expect("an address");
    let requests = tokio_stream::iter([scene.resume()]);
    let refused = ContainersClient::new(peer).attach(requests).await.expect_err("it has no token");
    assert!(Refusal::from(refused).is(Reason::Unauthenticated));

    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let mut request = tonic::Request::new(tokio_stream::iter([scene.resume()]));
    let metadata = request.metadata_mut();
    metadata.insert("traceparent", traceparent.parse().expect("ASCII"));
    metadata.insert("tracestate", "a=b".parse().expect("ASCII"));
    metadata.insert("cookie", "secret".parse().expect("ASCII"));
    metadata.insert(PROXY_TICKET_HEADER, "the caller's own".parse().expect("ASCII"));
    metadata.insert(TICKET_HEADER, "of a transfer".parse().expect("ASCII"));
    let mut answers = scene.client().attach(request).await.expect("the call is admitted").into_inner();
    while within("a message", answers.message()).await.is_ok_and(|message| message.is_some()) {}
    let calls = gateway.calls();
    let [call] = calls.as_slice() else { panic!("{calls:?}") };
    for ours in ["authorization", "cookie", TICKET_HEADER] {
        assert!(call.get(ours).is_none(), "{ours}: {call:?}");
    }
    assert_eq!(call.get("traceparent").and_then(|value| value.to_str().ok()), Some(traceparent));
    assert_eq!(call.get("tracestate").and_then(|value| value.to_str().ok()), Some("a=b"));
    let tickets: Vec<_> = call.get_all(PROXY_TICKET_HEADER).iter().collect();
    let [ticket] = tickets.as_slice() else { panic!("{tickets:?}") };
    let claims: ProxyClaims =
        scene.schedule.signer.verify(ticket.to_str().expect("ASCII")).expect("the scheduler's");
    assert_eq!(claims.worker, scene.worker);
    scene.end().await;
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_is_replayed_when_the_worker_moved() {
    let (old, new) = (Gateway::new(Behavior::Rejects(3)), Gateway::new(Behavior::Echoes));
    let (old_served, new_served) = (old.serve().await, new.serve().await);
    let scene = Scene::start(&old_served.endpoint).await;
    // The proxy has cached the old gateway.
    let (sender, requests) = mpsc::channel(4);
    sender.send(scene.resume()).await.expect("there is room");
    let answers = within("an answer", scene.client().attach(ReceiverStream::new(requests))).await;
    let mut answers = answers.expect("the call is admitted").into_inner();
    scene.schedule.endpoint.send_replace(new_served.endpoint.clone());
    for offset in [1, 2] {
        sender.send(stdin(offset)).await.expect("the call is open");
    }
    for offset in [u64::MAX, 1, 2] {
        assert_eq!(
            next(&mut answers).await.expect("an answer"),
            Some(AttachAnswer::StdinAck(pb::StdinAck { offset }))
        );
    }
    assert_eq!((old.calls().len(), new.calls().len()), (1, 1));
    assert_eq!(scene.schedule.lookups.load(Ordering::Relaxed), 2);
    // The new gateway is cached.
    let (_sender, mut again) = scene.attach().await;
    next(&mut again).await.expect("an answer");
    assert_eq!(scene.schedule.lookups.load(Ordering::Relaxed), 2);
    drop((answers, again));
    scene.end().await;
    old_served.end().await;
    new_served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_is_tried_at_most_twice() {
    let gateway = Gateway::new(Behavior::Rejects(1));
    let served = gateway.serve().await;
    let scene = Scene::start(&served.endpoint).await;
    let (_sender, mut answers) = scene.attach().await;
    let refusal = next(&mut answers).await.expect_err("no gateway attends it");
    assert!(refusal.is(Reason::NotAttended), "{refusal}");
    assert_eq!(refusal.about.get("worker_id").map(String::as_str), Some("it"), "details are forwarded");
    assert_eq!(gateway.calls().len(), 2);
    served.end().await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_is_looked_up_again_when_unreachable() {
    let gateway = Gateway::new(Behavior::Echoes);
    let served = gateway.serve().await;
    let closed = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let gone = format!("http://{}", closed.local_addr().expect("its address"));
    drop(closed);
    let scene = Scene::start(&gone).await;
    let refused =
        scene.client().attach(tokio_stream::iter([scene.resume()])).await.expect_err("no gateway listens");
    assert!(Refusal::from(refused).is(Reason::Unavailable));
    // The cached gateway is wrong now.
    scene.schedule.endpoint.send_replace(served.endpoint.clone());
    let (_sender, mut answers) = scene.attach().await;
    next(&mut answers).await.expect("an answer");
    drop(answers);
    scene.end().await;
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_reader_slows_the_gateway_down() {
    let gateway = Gateway::new(Behavior::Floods);
    let served = gateway.serve().await;
    let scene = Scene::start(&served.endpoint).await;
    let (_sender, mut answers) = scene.attach().await;
    // Two windows of 8 MiB, plus the bytes in sockets and queues.
    let most = 40 << 20;
    let mut sent = gateway.sent.subscribe();
    loop {
        let before = *sent.borrow_and_update();
        assert!(
            before < most,
            "{before} bytes were taken from the gateway although the caller reads nothing"
        );
        if tokio::time::timeout(Duration::from_secs(2), sent.changed()).await.is_err() {
            break;
        }
    }
    let stalled = *sent.borrow();
    let mut read = 0;
    while read < stalled + (8 << 20) {
        match next(&mut answers).await.expect("an answer") {
            Some(AttachAnswer::Output(output)) => {
                assert_eq!(output.offset, read);
                read += output.data.len() as u64;
            }
            other => panic!("{other:?}"),
        }
    }
    drop(answers);
    scene.end().await;
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_call_is_cancelled_at_the_gateway() {
    for behavior in [Behavior::Waits, Behavior::Floods] {
        let gateway = Gateway::new(behavior);
        let served = gateway.serve().await;
        let scene = Scene::start(&served.endpoint).await;
        let call = scene.attach().await;
        assert_eq!(*gateway.ended.borrow(), 0);
        drop(call);
        let mut ended = gateway.ended.subscribe();
        within("the end of the call", ended.wait_for(|ended| *ended == 1)).await.expect("it lives");
        scene.end().await;
        served.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_connection_is_not_a_clean_end() {
    let gateway = Gateway::new(Behavior::Echoes);
    let served = gateway.serve().await;
    let wire = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let scene = Scene::start(&format!("http://{}", wire.local_addr().expect("its address"))).await;
    let address = served.endpoint.strip_prefix("http://").expect("a port").to_owned();
    let mut relaying = tokio::task::JoinSet::new();
    relaying.spawn(async move {
        let (mut proxy, _) = wire.accept().await.expect("the proxy");
        let mut gateway = tokio::net::TcpStream::connect(address).await.expect("the gateway");
        tokio::io::copy_bidirectional(&mut proxy, &mut gateway).await.ok();
    });
    let (_sender, mut answers) = scene.attach().await;
    next(&mut answers).await.expect("an answer");
    relaying.shutdown().await;
    let refusal = next(&mut answers).await.expect_err("it broke");
    assert!(refusal.is(Reason::Unavailable), "{refusal}");
    scene.end().await;
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_is_forwarded_and_enforced() {
    let gateway = Gateway::new(Behavior::Waits);
    let served = gateway.serve().await;
    let scene = Scene::start(&served.endpoint).await;
    let mut request =
        tonic::Request::new(tokio_stream::iter([scene.resume()]).chain(tokio_stream::pending()));
    request.set_timeout(Duration::from_secs(2));
    let mut answers = scene.client().attach(request).await.expect("the call is admitted").into_inner();
    let status = within("the end", answers.message()).await.expect_err("the deadline has passed");
    assert_eq!(status.code(), tonic::Code::DeadlineExceeded, "{status}");
    let calls = gateway.calls();
    let left = calls[0].get("grpc-timeout").and_then(|value| value.to_str().ok()).expect("a deadline");
    let micros: u64 = left.strip_suffix('u').and_then(|number| number.parse().ok()).expect("microseconds");
    assert!((1..2_000_000).contains(&micros), "{left}");
    let mut ended = gateway.ended.subscribe();
    within("the end of the call", ended.wait_for(|ended| *ended == 1)).await.expect("it lives");
    scene.end().await;
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn call_without_worker_is_rejected() {
    let scene = Scene::start("http://127.0.0.1:9").await;
    let unnamed = pb::AttachRequest { message: Some(AttachMessage::Resume(pb::Resume::default())) };
    for requests in [vec![unnamed], vec![stdin(0)], Vec::new()] {
        let refused =
            scene.client().attach(tokio_stream::iter(requests)).await.expect_err("it names no worker");
        assert!(Refusal::from(refused).is(Reason::InvalidField));
    }
    let mut volumes = {
        let outgoing = Outgoing::default().with_token(Some(TOKEN));
        let peer = rpc::client::peer(&scene.proxy.endpoint, outgoing).expect("an address");
        pb::volumes_client::VolumesClient::new(peer)
    };
    let forged = pb::ReadFileRequest { ticket: "forged".to_owned(), ..pb::ReadFileRequest::default() };
    let refused = volumes.read_file(forged).await.expect_err("it is forged");
    assert!(Refusal::from(refused).is(Reason::InvalidToken));
    let forged = pb::VerifyRequest { ticket: "forged".to_owned() };
    let refused = volumes.verify(forged).await.expect_err("it is forged");
    assert!(Refusal::from(refused).is(Reason::InvalidToken));
    assert_eq!(scene.schedule.lookups.load(Ordering::Relaxed), 0);
    scene.end().await;
}
