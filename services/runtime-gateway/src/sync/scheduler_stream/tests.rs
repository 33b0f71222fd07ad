//! Tests of a gateway with a fake scheduler.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use domain::{ContainerHandle, VolumeHandle, WorkloadId};
use rpc::pb::artifacts;
use rpc::pb::scheduler::workers_server::{Workers, WorkersServer};
use rpc::pb::scheduler::workloads_server::{Workloads, WorkloadsServer};
use server::{Host, Listener};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::test_support::store::{Store, StoreCall};
use crate::test_support::{FakeGateways, TIMEOUT, TestWorker, UNREACHABLE, within};
use domain::WorkerId;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::desired_lease::Action;
use rpc::pb::scheduler::synchronize_request::Message as Up;
use rpc::pb::scheduler::synchronize_response::Message as Down;
use testing::conformance::{lines, programs, until_lines};
use testing::fake::FakeWorker;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

type ResponseSender = mpsc::Sender<Result<pb::SynchronizeResponse, Status>>;

/// A fake scheduler, which forwards all calls to the test.
#[derive(Clone)]
struct Script {
    streams: mpsc::Sender<(Streaming<pb::SynchronizeRequest>, ResponseSender)>,
    finished: mpsc::Sender<pb::FinishAttemptRequest>,
}

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not used in this test"))
}

#[tonic::async_trait]
impl Workers for Script {
    type SynchronizeStream = ReceiverStream<Result<pb::SynchronizeResponse, Status>>;

    async fn synchronize(
        &self,
        request: Request<Streaming<pb::SynchronizeRequest>>,
    ) -> Result<Response<Self::SynchronizeStream>, Status> {
        let (responses, stream) = mpsc::channel(64);
        self.streams.send((request.into_inner(), responses)).await.ok();
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn keys(&self, _: Request<pb::KeysRequest>) -> Result<Response<pb::KeysResponse>, Status> {
        unused()
    }

    async fn issue_ticket(
        &self,
        _: Request<pb::IssueTicketRequest>,
    ) -> Result<Response<pb::IssueTicketResponse>, Status> {
        unused()
    }

    async fn issue_proxy_ticket(
        &self,
        _: Request<pb::IssueProxyTicketRequest>,
    ) -> Result<Response<pb::IssueProxyTicketResponse>, Status> {
        unused()
    }

    async fn list_workers(
        &self,
        _: Request<pb::ListWorkersRequest>,
    ) -> Result<Response<pb::ListWorkersResponse>, Status> {
        unused()
    }

    async fn get_worker(
        &self,
        _: Request<pb::GetWorkerRequest>,
    ) -> Result<Response<pb::GetWorkerResponse>, Status> {
        unused()
    }

    type WatchWorkersStream = ReceiverStream<Result<pb::WatchWorkersResponse, Status>>;

    async fn watch_workers(
        &self,
        _: Request<pb::WatchWorkersRequest>,
    ) -> Result<Response<Self::WatchWorkersStream>, Status> {
        unused()
    }

    async fn cordon_worker(
        &self,
        _: Request<pb::CordonWorkerRequest>,
    ) -> Result<Response<pb::CordonWorkerResponse>, Status> {
        unused()
    }

    async fn uncordon_worker(
        &self,
        _: Request<pb::UncordonWorkerRequest>,
    ) -> Result<Response<pb::UncordonWorkerResponse>, Status> {
        unused()
    }

    async fn retire_worker(
        &self,
        _: Request<pb::RetireWorkerRequest>,
    ) -> Result<Response<pb::RetireWorkerResponse>, Status> {
        unused()
    }

    async fn prune_worker(
        &self,
        _: Request<pb::PruneWorkerRequest>,
    ) -> Result<Response<pb::PruneWorkerResponse>, Status> {
        unused()
    }
}

#[tonic::async_trait]
impl Workloads for Script {
    type WatchStream = ReceiverStream<Result<pb::WatchResponse, Status>>;

    async fn submit(&self, _: Request<pb::SubmitRequest>) -> Result<Response<pb::SubmitResponse>, Status> {
        unused()
    }

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        unused()
    }

    async fn get(&self, _: Request<pb::GetRequest>) -> Result<Response<pb::GetResponse>, Status> {
        unused()
    }

    async fn list(&self, _: Request<pb::ListRequest>) -> Result<Response<pb::ListResponse>, Status> {
        unused()
    }

    async fn find(&self, _: Request<pb::FindRequest>) -> Result<Response<pb::FindResponse>, Status> {
        unused()
    }

    async fn cancel(&self, _: Request<pb::CancelRequest>) -> Result<Response<pb::CancelResponse>, Status> {
        unused()
    }

    async fn start_attempt(
        &self,
        _: Request<pb::StartAttemptRequest>,
    ) -> Result<Response<pb::StartAttemptResponse>, Status> {
        Ok(Response::new(pb::StartAttemptResponse::default()))
    }

    async fn finish_attempt(
        &self,
        request: Request<pb::FinishAttemptRequest>,
    ) -> Result<Response<pb::FinishAttemptResponse>, Status> {
        self.finished.send(request.into_inner()).await.ok();
        Ok(Response::new(pb::FinishAttemptResponse {}))
    }
}

/// A gateway that is connected to the fake scheduler.
struct Scene {
    machine: Arc<FakeWorker>,
    worker: TestWorker,
    requests: Streaming<pb::SynchronizeRequest>,
    responses: ResponseSender,
    finished: mpsc::Receiver<pb::FinishAttemptRequest>,
    generation: u64,
    /// The last state that the gateway sent, and the time of its arrival.
    observed: (pb::Observed, Duration),
    /// Later streams of the gateway.
    streams: mpsc::Receiver<(Streaming<pb::SynchronizeRequest>, ResponseSender)>,
    synchronizing: JoinHandle<()>,
    served: JoinHandle<anyhow::Result<()>>,
    stop: oneshot::Sender<()>,
}

impl Scene {
    async fn start() -> Self {
        Self::of(&FakeWorker::near(), UNREACHABLE).await
    }

    /// Starts a gateway of this worker, with an artifact store at this address.
    #[expect(clippy::disallowed_methods, reason = "the test waits for both in `end`")]
    async fn of(machine: &Arc<FakeWorker>, artifact_store: &str) -> Self {
        let listener = Listener::InsecureTcp(TcpListener::bind("127.0.0.1:0").await.expect("a port"));
        let endpoint = listener.endpoint().expect("its address");
        let ((streams, mut opened), (finish, finished)) = (mpsc::channel(1), mpsc::channel(64));
        let script = Script { streams, finished: finish };
        let mut host = Host::new();
        host.add_service(WorkersServer::new(script.clone()));
        host.add_service(WorkloadsServer::new(script));
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(host.serve([listener], async {
            stopped.await.ok();
        }));
        let worker = machine.gateway(&endpoint, artifact_store);
        let synchronizing = tokio::spawn(synchronize_forever(worker.context.clone(), GatewayInstance::new()));
        let (mut requests, responses) = within("a stream", opened.recv()).await.expect("a stream");
        receive_registration(&mut requests).await;
        let welcome = pb::Welcome {
            session_credential: "credential".to_owned(),
            worker_id: WorkerId::new().to_string(),
            incarnation: 1,
            session: 1,
            heartbeat: Some(rpc::duration(Duration::from_millis(40))),
            stop_after: Some(rpc::duration(Duration::from_secs(600))),
            protocol_version: 1,
            worker_ttl: Some(rpc::duration(Duration::from_secs(60))),
        };
        let response = pb::SynchronizeResponse { message: Some(Down::Welcome(welcome)) };
        responses.send(Ok(response)).await.expect("a stream");
        let observed = (pb::Observed::default(), Duration::ZERO);
        let machine = machine.clone();
        let streams = opened;
        Self {
            machine,
            worker,
            requests,
            responses,
            finished,
            generation: 0,
            observed,
            streams,
            synchronizing,
            served,
            stop,
        }
    }

    /// Waits for another stream, and returns its registration.
    async fn another_stream(&mut self) -> pb::Registration {
        (self.requests, self.responses) =
            within("another stream", self.streams.recv()).await.expect("a stream");
        receive_registration(&mut self.requests).await
    }

    /// Sends a desired state, and waits until the gateway has applied it.
    async fn desire(&mut self, heard: u64, leases: Vec<pb::DesiredLease>) {
        self.generation += 1;
        let desired = pb::Desired {
            generation: self.generation,
            leases,
            observed_number: heard,
            directive: pb::Directive::Run.into(),
        };
        let response = pb::SynchronizeResponse { message: Some(Down::Desired(desired)) };
        self.responses.send(Ok(response)).await.expect("a stream");
        self.observe("the applied state", |observed, generation| observed.applied_generation == generation)
            .await;
    }

    /// Waits for a state that `accepts` accepts.
    async fn observe(&mut self, what: &str, accepts: impl Fn(&pb::Observed, u64) -> bool) {
        let before = Instant::now();
        loop {
            let message = within(what, self.requests.message()).await.expect("the stream is open");
            let message = message.and_then(|request| request.message);
            let Some(Up::Observed(observed)) = message else { panic!("{message:?}") };
            assert!(observed.number > self.observed.0.number, "numbers ascend");
            self.observed = (observed, since_boot());
            if accepts(&self.observed.0, self.generation) {
                return;
            }
            assert!(before.elapsed() < TIMEOUT, "{what} did not come: {:?}", self.observed.0);
        }
    }

    /// Waits until all of these leases have ended.
    async fn ended(&mut self, leases: &[LeaseId]) {
        let ended = |observed: &pb::Observed| {
            let ended = observed.leases.iter().filter(|lease| lease.phase() == pb::LeasePhase::Ended);
            let ended: Vec<_> = ended.map(|lease| lease.lease_id.clone()).collect();
            leases.iter().all(|lease| ended.contains(&lease.to_string()))
        };
        self.observe("the end of the leases", |observed, _| ended(observed)).await;
    }

    async fn end(self) {
        self.worker.stopping.cancel();
        self.synchronizing.await.expect("no panic");
        self.worker.tasks.close();
        self.worker.tasks.wait().await;
        drop((self.requests, self.responses, self.streams));
        self.stop.send(()).expect("the server runs");
        self.served.await.expect("no panic").expect("it ends well");
    }
}

/// Receives the registration of a stream.
async fn receive_registration(requests: &mut Streaming<pb::SynchronizeRequest>) -> pb::Registration {
    match within("the registration", requests.message())
        .await
        .expect("a message")
        .and_then(|request| request.message)
    {
        Some(Up::Registration(registration)) => registration,
        other => panic!("{other:?}"),
    }
}

fn stop(lease: LeaseId, token: &str) -> pb::DesiredLease {
    let stop = pb::StopAttempt {
        grace: None,
        reason: pb::StopReason::Cancelled.into(),
        lease_token: token.to_owned(),
        workload_id: WorkloadId::new().to_string(),
        attempt_id: AttemptId::new().to_string(),
    };
    pb::DesiredLease { lease_id: lease.to_string(), action: Some(Action::Stop(stop)) }
}

/// Creates a spec that runs `command` on the host image.
fn spec(command: &[String]) -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})), entrypoint: None }),
        command: command.iter().map(|word| word.clone().into()).collect(),
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        ..pb::WorkloadSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_acknowledged_messages_are_contact() {
    let before = since_boot();
    let mut scene = Scene::start().await;
    let welcomed = since_boot();
    scene.desire(0, vec![]).await;
    let contacts = scene.machine.contacts();
    let [(registered_at, stop_after)] = contacts[..] else { panic!("{contacts:?}") };
    assert!(
        before <= registered_at && registered_at <= welcomed,
        "contact counts from the sending of the registration"
    );
    assert_eq!(stop_after, Duration::from_secs(600));

    // The scheduler sends messages for longer than a heartbeat, but acknowledges none.
    while scene.observed.0.number < 20 || scene.observed.1 < registered_at + Duration::from_millis(400) {
        scene.desire(0, vec![]).await;
    }
    assert_eq!(scene.machine.contacts(), contacts);

    let (number, arrived) = (scene.observed.0.number, scene.observed.1);
    scene.observe("later messages", |observed, _| observed.number > number + 3).await;
    scene.desire(number, vec![]).await;
    let contacts = scene.machine.contacts();
    let [_, (sent, _)] = contacts[..] else { panic!("{contacts:?}") };
    assert!(
        registered_at < sent && sent <= arrived,
        "contact counts from the sending of the acknowledged message"
    );
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_lease_ends_without_affecting_others() {
    let mut scene = Scene::start().await;
    let (good, specless, nameless) = (LeaseId::new(), LeaseId::new(), LeaseId::new());
    let run = pb::RunAttempt {
        lease_token: "specless".to_owned(),
        workload_id: WorkloadId::new().to_string(),
        attempt_id: AttemptId::new().to_string(),
        ..pb::RunAttempt::default()
    };
    let no_attempt = pb::RunAttempt { lease_token: "nameless".to_owned(), ..pb::RunAttempt::default() };
    let leases = vec![
        pb::DesiredLease { lease_id: "no UUID".to_owned(), action: Some(Action::Run(run.clone())) },
        pb::DesiredLease { lease_id: LeaseId::new().to_string(), action: None },
        pb::DesiredLease { lease_id: specless.to_string(), action: Some(Action::Run(run)) },
        pb::DesiredLease { lease_id: nameless.to_string(), action: Some(Action::Run(no_attempt)) },
        stop(good, "good"),
    ];
    scene.desire(0, leases).await;

    let mut reasons = BTreeMap::new();
    while reasons.len() < 3 {
        let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
        let failure = finish.failure.expect("a failure");
        reasons.insert(finish.lease_token, failure.reason);
    }
    let expected = [("good", "CANCELLED"), ("nameless", "UNSUPPORTED"), ("specless", "UNSUPPORTED")];
    assert_eq!(reasons, expected.map(|(token, reason)| (token.to_owned(), reason.to_owned())).into());
    scene.ended(&[good, specless, nameless]).await;
    scene.desire(0, vec![]).await;
    assert!(scene.worker.attempts.lock().is_empty(), "ended leases are removed");
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_fails_when_its_task_panics() {
    let mut scene = Scene::start().await;
    scene.machine.faults.panic_at_stop();
    let lease = LeaseId::new();
    scene.desire(0, vec![stop(lease, "token")]).await;
    let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
    let failure = finish.failure.expect("a failure");
    assert_eq!((finish.lease_token.as_str(), failure.reason.as_str()), ("token", "WORKER_FAILED"));
    assert!(failure.message.contains("injected by the test"), "{}", failure.message);
    scene.ended(&[lease]).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_continues_in_the_next_session() {
    let mut store = Store::start().await;
    let mut scene = Scene::of(&FakeWorker::near(), &store.endpoint).await;
    let lease = LeaseId::new();
    let spec = spec(&["true".to_owned()]);
    let run = pb::RunAttempt {
        lease_token: "token".to_owned(),
        workload_id: WorkloadId::new().to_string(),
        attempt_id: AttemptId::new().to_string(),
        spec: Some(spec),
        ..pb::RunAttempt::default()
    };
    scene
        .desire(0, vec![pb::DesiredLease { lease_id: lease.to_string(), action: Some(Action::Run(run)) }])
        .await;
    for (credential, reason) in [("credential", Reason::StaleSession), ("new", Reason::DiskFull)] {
        let StoreCall::Prepare(request, answer) = store.next_call().await else {
            panic!("an unexpected call")
        };
        assert_eq!(request.session_credential, credential);
        let mut session = scene.worker.session.current().expect("the session is open");
        session.credential = "new".to_owned();
        scene.worker.session.set(Some(session));
        answer.send(Err(reason.status("gantry.test", "no"))).expect("the gateway waits");
    }
    let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
    let failure = finish.failure.expect("a failure");
    assert_eq!((finish.lease_token.as_str(), failure.reason.as_str()), ("token", "DISK_FULL"));
    scene.ended(&[lease]).await;
    scene.end().await;
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_ends_only_after_its_process_is_stopped() {
    let mut scene = Scene::start().await;
    scene.machine.faults.fail_to_stop(2);
    let lease = LeaseId::new();
    scene.desire(0, vec![stop(lease, "token")]).await;
    let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
    assert_eq!(scene.machine.faults.remaining_stop_failures(), 0, "stopping is tried until it succeeds");
    assert_eq!(finish.failure.expect("a failure").reason, "WORKER_FAILED");
    scene.ended(&[lease]).await;
    scene.end().await;
}

/// The answers of a store about one attempt.
struct OneAttempt {
    container: ContainerHandle,
    volumes: BTreeMap<String, VolumeHandle>,
}

impl OneAttempt {
    /// Answers a call of `Prepare`. All answers are equal.
    async fn prepared(&mut self, store: &mut Store) {
        let StoreCall::Prepare(request, answer) = store.next_call().await else {
            panic!("an unexpected call")
        };
        let volumes = request.volumes.into_iter().map(|volume| artifacts::PreparedVolume {
            volume_handle: self
                .volumes
                .entry(volume.name.clone())
                .or_insert_with(VolumeHandle::new)
                .to_string(),
            name: volume.name,
            ..artifacts::PreparedVolume::default()
        });
        let volumes = volumes.collect();
        let response = artifacts::PrepareResponse { container_handle: self.container.to_string(), volumes };
        answer.send(Ok(response)).expect("the gateway waits");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_runs_once_when_its_gateway_restarts() {
    // A near worker takes outputs from a volume. On a far worker each output is a volume.
    for (machine, volume, file) in
        [(FakeWorker::near(), "workspace", "out/file"), (FakeWorker::far(), "output/out", "file")]
    {
        let mut store = Store::start().await;
        let (lease, workload) = (LeaseId::new(), WorkloadId::new());
        let command = programs::append_and_wait_for_another("/workspace/out/file");
        let output = pb::Output { name: "out".to_owned(), path: "out".into(), owners: vec![] };
        let run = pb::RunAttempt {
            lease_token: "token".to_owned(),
            workload_id: workload.to_string(),
            attempt_id: AttemptId::new().to_string(),
            spec: Some(pb::WorkloadSpec { outputs: vec![output], ..spec(&command) }),
            ..pb::RunAttempt::default()
        };
        let request = pb::DesiredLease { lease_id: lease.to_string(), action: Some(Action::Run(run)) };
        let mut attempt = OneAttempt { container: ContainerHandle::new(), volumes: BTreeMap::new() };

        let mut scene = Scene::of(&machine, &store.endpoint).await;
        scene.desire(0, vec![request.clone()]).await;
        attempt.prepared(&mut store).await;
        let runtime = machine.runtime();
        let volume = attempt.volumes[volume];
        // The volume does not exist yet.
        within("a volume", async {
            while runtime.contents(volume).await.is_err() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        until_lines(&*runtime, volume, file, 1).await;
        scene.end().await;

        let mut scene = Scene::of(&machine, &store.endpoint).await;
        scene.desire(0, vec![request]).await;
        attempt.prepared(&mut store).await;
        scene
            .observe("a process that runs", |observed, _| {
                observed.leases.iter().any(|lease| lease.phase() == pb::LeasePhase::Running)
            })
            .await;
        assert_eq!(lines(&*runtime, volume, file).await, 1, "the process is started once");
        std::fs::write(machine.path(volume).join(file), "line\nline\n").expect("write");
        let StoreCall::CompleteVolume(request, answer) = store.next_call().await else {
            panic!("an unexpected call")
        };
        assert_eq!(request.volume_handle, attempt.volumes["output/out"].to_string());
        answer.send(Ok(artifacts::CompleteVolumeResponse::default())).expect("the gateway waits");
        let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
        assert_eq!(finish.failure, None);
        assert_eq!(finish.exit, Some(rpc::exit(domain::workload::Exit::Code(7))));
        let [output] = &finish.outputs[..] else { panic!("{finish:?}") };
        assert_eq!((output.name.as_str(), output.size_bytes, output.entries), ("out", 10, 1));
        assert_eq!(output.artifact_id, workload.output_artifact("out").to_string());
        assert_eq!(machine.read(attempt.volumes["output/out"]), "line\nline\n");
        scene.ended(&[lease]).await;
        scene.end().await;
        store.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_worker_registers_again_and_retired_worker_waits() {
    let mut scene = Scene::start().await;
    scene.desire(0, vec![]).await;
    let directive = pb::Directive::RegisterAgain.into();
    let again = pb::Desired { generation: 9, directive, ..pb::Desired::default() };
    let again = pb::SynchronizeResponse { message: Some(Down::Desired(again)) };
    scene.responses.send(Ok(again)).await.expect("a stream");
    let again = scene.another_stream().await;
    assert_eq!(again.session_credential, "", "the old session has ended");
    assert!(scene.worker.session.current().is_none());

    let retired = Reason::WorkerRetired.status("gantry.scheduler", "it was retired");
    scene.responses.send(Err(retired)).await.expect("a stream");
    // A retired worker asks at intervals whether it may run again, as the same instance.
    let registration = scene.another_stream().await;
    assert_eq!(registration.gateway_instance, again.gateway_instance);
    assert!(scene.worker.session.current().is_none());
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_process_is_distinguished_from_one_that_exited() {
    for (command, reason, code) in
        [(programs::sleep(), Some("INTERRUPTED"), None), (programs::exit(3), None, Some(3))]
    {
        let mut store = Store::start().await;
        let mut scene = Scene::of(&FakeWorker::near(), &store.endpoint).await;
        let (lease, attempt_id) = (LeaseId::new(), AttemptId::new().to_string());
        let run = pb::RunAttempt {
            lease_token: "token".to_owned(),
            workload_id: WorkloadId::new().to_string(),
            attempt_id: attempt_id.clone(),
            spec: Some(spec(&command)),
            ..pb::RunAttempt::default()
        };
        let request = pb::DesiredLease { lease_id: lease.to_string(), action: Some(Action::Run(run)) };
        let mut attempt = OneAttempt { container: ContainerHandle::new(), volumes: BTreeMap::new() };
        scene.desire(0, vec![request]).await;
        attempt.prepared(&mut store).await;
        if code.is_none() {
            scene
                .observe("a process that runs", |observed, _| {
                    observed.leases.iter().any(|lease| lease.phase() == pb::LeasePhase::Running)
                })
                .await;
        } else {
            // The process exits before the request to stop.
            let runtime = scene.machine.runtime();
            let attempt: AttemptId = attempt_id.parse().expect("an id");
            within("its end", async {
                while runtime.wait(attempt.into()).await.is_err() {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
        let mut stopped = stop(lease, "token");
        if let Some(Action::Stop(stop)) = &mut stopped.action {
            (stop.reason, stop.attempt_id) = (pb::StopReason::Interrupted.into(), attempt_id);
        }
        scene.desire(0, vec![stopped]).await;
        let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
        assert_eq!(finish.failure.as_ref().map(|failure| failure.reason.as_str()), reason, "{finish:?}");
        if let Some(code) = code {
            assert_eq!(finish.exit, Some(rpc::exit(domain::workload::Exit::Code(code))));
        }
        scene.ended(&[lease]).await;
        scene.end().await;
        store.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_runs_when_its_command_runs() {
    let mut store = Store::start().await;
    let mut scene = Scene::of(&FakeWorker::near(), &store.endpoint).await;
    let held = scene.machine.faults.hold_starts();
    let (lease, attempt_id) = (LeaseId::new(), AttemptId::new());
    let run = pb::RunAttempt {
        lease_token: "token".to_owned(),
        workload_id: WorkloadId::new().to_string(),
        attempt_id: attempt_id.to_string(),
        spec: Some(spec(&programs::sleep())),
        ..pb::RunAttempt::default()
    };
    let request = pb::DesiredLease { lease_id: lease.to_string(), action: Some(Action::Run(run)) };
    let mut attempt = OneAttempt { container: ContainerHandle::new(), volumes: BTreeMap::new() };
    scene.desire(0, vec![request]).await;
    attempt.prepared(&mut store).await;
    let runtime = scene.machine.runtime();
    within("a process that is started", async {
        while runtime.process(attempt_id.into()).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // A lease without a request continues unchanged.
    let named = pb::DesiredLease { lease_id: lease.to_string(), action: None };
    for _ in 0..3 {
        scene.desire(0, vec![named.clone()]).await;
        let [observed] = &scene.observed.0.leases[..] else { panic!("{:?}", scene.observed.0) };
        assert_eq!(observed.phase(), pb::LeasePhase::Preparing, "the command does not run yet");
    }
    drop(held);
    scene
        .observe("a process that runs", |observed, _| {
            observed.leases.iter().any(|lease| lease.phase() == pb::LeasePhase::Running)
        })
        .await;
    scene.desire(0, vec![stop(lease, "token")]).await;
    scene.ended(&[lease]).await;
    scene.end().await;
    store.end().await;
}
