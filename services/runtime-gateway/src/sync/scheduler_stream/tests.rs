//! A gateway whose scheduler says what each test wants said.

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
use crate::test_support::store::{Asked, Store};
use crate::test_support::{Attended, NOBODY, PATIENCE, TestWorker, within};
use domain::WorkerId;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::desired_lease::Wish;
use rpc::pb::scheduler::synchronize_request::Message as Up;
use rpc::pb::scheduler::synchronize_response::Message as Down;
use testing::conformance::{lines, programs, until_lines};
use testing::fake::FakeWorker;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

type Told = mpsc::Sender<Result<pb::SynchronizeResponse, Status>>;

/// A scheduler that leaves everything to the test.
#[derive(Clone)]
struct Script {
    streams: mpsc::Sender<(Streaming<pb::SynchronizeRequest>, Told)>,
    finished: mpsc::Sender<pb::FinishAttemptRequest>,
}

fn no_part<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no part of this test"))
}

#[tonic::async_trait]
impl Workers for Script {
    type SynchronizeStream = ReceiverStream<Result<pb::SynchronizeResponse, Status>>;

    async fn synchronize(
        &self,
        request: Request<Streaming<pb::SynchronizeRequest>>,
    ) -> Result<Response<Self::SynchronizeStream>, Status> {
        let (told, stream) = mpsc::channel(64);
        self.streams.send((request.into_inner(), told)).await.ok();
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn keys(&self, _: Request<pb::KeysRequest>) -> Result<Response<pb::KeysResponse>, Status> {
        no_part()
    }

    async fn issue_ticket(
        &self,
        _: Request<pb::IssueTicketRequest>,
    ) -> Result<Response<pb::IssueTicketResponse>, Status> {
        no_part()
    }

    async fn issue_proxy_ticket(
        &self,
        _: Request<pb::IssueProxyTicketRequest>,
    ) -> Result<Response<pb::IssueProxyTicketResponse>, Status> {
        no_part()
    }

    async fn list_workers(
        &self,
        _: Request<pb::ListWorkersRequest>,
    ) -> Result<Response<pb::ListWorkersResponse>, Status> {
        no_part()
    }

    async fn get_worker(
        &self,
        _: Request<pb::GetWorkerRequest>,
    ) -> Result<Response<pb::GetWorkerResponse>, Status> {
        no_part()
    }

    type WatchWorkersStream = ReceiverStream<Result<pb::WatchWorkersResponse, Status>>;

    async fn watch_workers(
        &self,
        _: Request<pb::WatchWorkersRequest>,
    ) -> Result<Response<Self::WatchWorkersStream>, Status> {
        no_part()
    }

    async fn cordon_worker(
        &self,
        _: Request<pb::CordonWorkerRequest>,
    ) -> Result<Response<pb::CordonWorkerResponse>, Status> {
        no_part()
    }

    async fn run_worker(
        &self,
        _: Request<pb::RunWorkerRequest>,
    ) -> Result<Response<pb::RunWorkerResponse>, Status> {
        no_part()
    }

    async fn retire_worker(
        &self,
        _: Request<pb::RetireWorkerRequest>,
    ) -> Result<Response<pb::RetireWorkerResponse>, Status> {
        no_part()
    }

    async fn prune_worker(
        &self,
        _: Request<pb::PruneWorkerRequest>,
    ) -> Result<Response<pb::PruneWorkerResponse>, Status> {
        no_part()
    }
}

#[tonic::async_trait]
impl Workloads for Script {
    type WatchStream = ReceiverStream<Result<pb::WatchResponse, Status>>;

    async fn submit(&self, _: Request<pb::SubmitRequest>) -> Result<Response<pb::SubmitResponse>, Status> {
        no_part()
    }

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        no_part()
    }

    async fn get(&self, _: Request<pb::GetRequest>) -> Result<Response<pb::GetResponse>, Status> {
        no_part()
    }

    async fn list(&self, _: Request<pb::ListRequest>) -> Result<Response<pb::ListResponse>, Status> {
        no_part()
    }

    async fn cancel(&self, _: Request<pb::CancelRequest>) -> Result<Response<pb::CancelResponse>, Status> {
        no_part()
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

/// A gateway that speaks to a script.
struct Scene {
    machine: Arc<FakeWorker>,
    worker: TestWorker,
    said: Streaming<pb::SynchronizeRequest>,
    told: Told,
    finished: mpsc::Receiver<pb::FinishAttemptRequest>,
    generation: u64,
    /// The last that it said, and when.
    observed: (pb::Observed, Duration),
    /// The streams that it opens after the first.
    streams: mpsc::Receiver<(Streaming<pb::SynchronizeRequest>, Told)>,
    speaking: JoinHandle<()>,
    served: JoinHandle<anyhow::Result<()>>,
    stop: oneshot::Sender<()>,
}

impl Scene {
    async fn start() -> Self {
        Self::of(&FakeWorker::near(), NOBODY).await
    }

    /// Of this worker, with an artifact store at this address.
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
        let worker = machine.attended(&endpoint, artifact_store);
        let speaking = tokio::spawn(forever(worker.context.clone(), GatewayInstance::new()));
        let (mut said, told) = within("a stream", opened.recv()).await.expect("a stream");
        hello_of(&mut said).await;
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
        told.send(Ok(response)).await.expect("a stream");
        let observed = (pb::Observed::default(), Duration::ZERO);
        let machine = machine.clone();
        let streams = opened;
        Self {
            machine,
            worker,
            said,
            told,
            finished,
            generation: 0,
            observed,
            streams,
            speaking,
            served,
            stop,
        }
    }

    /// Waits for another stream, and for the first word on it.
    async fn another_stream(&mut self) -> pb::Hello {
        (self.said, self.told) = within("another stream", self.streams.recv()).await.expect("a stream");
        hello_of(&mut self.said).await
    }

    /// Says what is wanted, and waits until the gateway has taken it up.
    async fn desire(&mut self, heard: u64, leases: Vec<pb::DesiredLease>) {
        self.generation += 1;
        let desired =
            pb::Desired { generation: self.generation, leases, heard, directive: pb::Directive::Run.into() };
        let response = pb::SynchronizeResponse { message: Some(Down::Desired(desired)) };
        self.told.send(Ok(response)).await.expect("a stream");
        self.observe("what it has taken up", |observed, generation| {
            observed.applied_generation == generation
        })
        .await;
    }

    /// Waits until the gateway says what is looked for.
    async fn observe(&mut self, what: &str, looked_for: impl Fn(&pb::Observed, u64) -> bool) {
        let before = Instant::now();
        loop {
            let message = within(what, self.said.message()).await.expect("the stream is open");
            let message = message.and_then(|said| said.message);
            let Some(Up::Observed(observed)) = message else { panic!("{message:?}") };
            assert!(observed.number > self.observed.0.number, "each has a number of its own");
            self.observed = (observed, since_boot());
            if looked_for(&self.observed.0, self.generation) {
                return;
            }
            assert!(before.elapsed() < PATIENCE, "{what} did not come: {:?}", self.observed.0);
        }
    }

    /// Waits until every one of these leases has ended.
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
        self.speaking.await.expect("no panic");
        self.worker.tasks.close();
        self.worker.tasks.wait().await;
        drop((self.said, self.told, self.streams));
        self.stop.send(()).expect("it is served");
        self.served.await.expect("no panic").expect("it ends well");
    }
}

/// The first word on a stream.
async fn hello_of(said: &mut Streaming<pb::SynchronizeRequest>) -> pb::Hello {
    match within("hello", said.message()).await.expect("a message").and_then(|said| said.message) {
        Some(Up::Hello(hello)) => hello,
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
    pb::DesiredLease { lease_id: lease.to_string(), wish: Some(Wish::Stop(stop)) }
}

/// What runs this command on the worker's own image.
fn spec(command: &[String]) -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})) }),
        command: command.iter().map(|word| word.clone().into()).collect(),
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        ..pb::WorkloadSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_the_scheduler_heard_is_contact() {
    let before = since_boot();
    let mut scene = Scene::start().await;
    let welcomed = since_boot();
    scene.desire(0, vec![]).await;
    let contacts = scene.machine.contacts();
    let [(hello, stop_after)] = contacts[..] else { panic!("{contacts:?}") };
    assert!(before <= hello && hello <= welcomed, "contact counts from when hello was sent");
    assert_eq!(stop_after, Duration::from_secs(600));

    // It is spoken to unasked for longer than a heartbeat, and was heard by nobody.
    while scene.observed.0.number < 20 || scene.observed.1 < hello + Duration::from_millis(400) {
        scene.desire(0, vec![]).await;
    }
    assert_eq!(scene.machine.contacts(), contacts);

    let (number, arrived) = (scene.observed.0.number, scene.observed.1);
    scene.observe("later messages", |observed, _| observed.number > number + 3).await;
    scene.desire(number, vec![]).await;
    let contacts = scene.machine.contacts();
    let [_, (sent, _)] = contacts[..] else { panic!("{contacts:?}") };
    assert!(hello < sent && sent <= arrived, "contact counts from when the message that was heard was sent");
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_cannot_be_read_ends_and_no_other() {
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
        pb::DesiredLease { lease_id: "no UUID".to_owned(), wish: Some(Wish::Run(run.clone())) },
        pb::DesiredLease { lease_id: LeaseId::new().to_string(), wish: None },
        pb::DesiredLease { lease_id: specless.to_string(), wish: Some(Wish::Run(run)) },
        pb::DesiredLease { lease_id: nameless.to_string(), wish: Some(Wish::Run(no_attempt)) },
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
    assert!(scene.worker.attempts.lock().is_empty(), "what is over is forgotten");
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_task_panics_ends_as_a_failure() {
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
async fn an_attempt_that_was_refused_to_an_old_session_goes_on_in_the_next() {
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
    scene.desire(0, vec![pb::DesiredLease { lease_id: lease.to_string(), wish: Some(Wish::Run(run)) }]).await;
    for (credential, reason) in [("credential", Reason::StaleSession), ("new", Reason::DiskFull)] {
        let Asked::Prepare(request, answer) = store.asked().await else { panic!("something else") };
        assert_eq!(request.session_credential, credential);
        let mut session = scene.worker.session.current().expect("it was let in");
        session.credential = "new".to_owned();
        scene.worker.session.set(Some(session));
        answer.send(Err(reason.status("gantry.test", "no"))).expect("it waits");
    }
    let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
    let failure = finish.failure.expect("a failure");
    assert_eq!((finish.lease_token.as_str(), failure.reason.as_str()), ("token", "DISK_FULL"));
    scene.ended(&[lease]).await;
    scene.end().await;
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_does_not_end_before_its_process_could_be_stopped() {
    let mut scene = Scene::start().await;
    scene.machine.faults.fail_to_stop(2);
    let lease = LeaseId::new();
    scene.desire(0, vec![stop(lease, "token")]).await;
    let finish = within("the end of an attempt", scene.finished.recv()).await.expect("a call");
    assert_eq!(scene.machine.faults.remaining_stop_failures(), 0, "it was tried until it could");
    assert_eq!(finish.failure.expect("a failure").reason, "WORKER_FAILED");
    scene.ended(&[lease]).await;
    scene.end().await;
}

/// The answers of a store that prepares and publishes one attempt.
struct OneAttempt {
    container: ContainerHandle,
    volumes: BTreeMap<String, VolumeHandle>,
}

impl OneAttempt {
    /// Answers a call of Prepare: always alike.
    async fn prepared(&mut self, store: &mut Store) {
        let Asked::Prepare(request, answer) = store.asked().await else { panic!("something else") };
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
        answer.send(Ok(response)).expect("it waits");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_gateway_ends_in_the_middle_is_carried_out_once_by_the_next() {
    // Where outputs are taken from a volume, and where they are one.
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
        let wish = pb::DesiredLease { lease_id: lease.to_string(), wish: Some(Wish::Run(run)) };
        let mut attempt = OneAttempt { container: ContainerHandle::new(), volumes: BTreeMap::new() };

        let mut scene = Scene::of(&machine, &store.endpoint).await;
        scene.desire(0, vec![wish.clone()]).await;
        attempt.prepared(&mut store).await;
        let runtime = machine.runtime();
        let volume = attempt.volumes[volume];
        // It is not there yet.
        within("a volume", async {
            while runtime.contents(volume).await.is_err() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        until_lines(&*runtime, volume, file, 1).await;
        scene.end().await;

        let mut scene = Scene::of(&machine, &store.endpoint).await;
        scene.desire(0, vec![wish]).await;
        attempt.prepared(&mut store).await;
        scene
            .observe("a process that runs", |observed, _| {
                observed.leases.iter().any(|lease| lease.phase() == pb::LeasePhase::Running)
            })
            .await;
        assert_eq!(lines(&*runtime, volume, file).await, 1, "it was not started again");
        std::fs::write(machine.path(volume).join(file), "line\nline\n").expect("write");
        let Asked::VolumeComplete(request, answer) = store.asked().await else { panic!("something else") };
        assert_eq!(request.volume_handle, attempt.volumes["output/out"].to_string());
        answer.send(Ok(artifacts::VolumeCompleteResponse::default())).expect("it waits");
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
async fn a_worker_that_was_forgotten_registers_anew_and_one_that_was_retired_keeps_still() {
    let mut scene = Scene::start().await;
    scene.desire(0, vec![]).await;
    let directive = pb::Directive::RegisterAgain.into();
    let again = pb::Desired { generation: 9, directive, ..pb::Desired::default() };
    let again = pb::SynchronizeResponse { message: Some(Down::Desired(again)) };
    scene.told.send(Ok(again)).await.expect("a stream");
    let anew = scene.another_stream().await;
    assert_eq!(anew.session_credential, "", "that session is over");
    assert!(scene.worker.session.current().is_none());

    let retired = Reason::WorkerRetired.status("gantry.scheduler", "it was retired");
    scene.told.send(Err(retired)).await.expect("a stream");
    // It asks now and then whether it may run again, as whom it was.
    let asking = scene.another_stream().await;
    assert_eq!(asking.gateway_instance, anew.gateway_instance);
    assert!(scene.worker.session.current().is_none());
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_was_interrupted_says_so_and_one_that_was_faster_does_not() {
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
        let wish = pb::DesiredLease { lease_id: lease.to_string(), wish: Some(Wish::Run(run)) };
        let mut attempt = OneAttempt { container: ContainerHandle::new(), volumes: BTreeMap::new() };
        scene.desire(0, vec![wish]).await;
        attempt.prepared(&mut store).await;
        if code.is_none() {
            scene
                .observe("a process that runs", |observed, _| {
                    observed.leases.iter().any(|lease| lease.phase() == pb::LeasePhase::Running)
                })
                .await;
        } else {
            // By itself, before anybody wanted it to stop.
            let runtime = scene.machine.runtime();
            let attempt: AttemptId = attempt_id.parse().expect("an id");
            within("its end", async {
                while runtime.wait(attempt).await.is_err() {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
        let mut stopped = stop(lease, "token");
        if let Some(Wish::Stop(stop)) = &mut stopped.wish {
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
async fn attempt_runs_once_its_command_does() {
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
    let wish = pb::DesiredLease { lease_id: lease.to_string(), wish: Some(Wish::Run(run)) };
    let mut attempt = OneAttempt { container: ContainerHandle::new(), volumes: BTreeMap::new() };
    scene.desire(0, vec![wish]).await;
    attempt.prepared(&mut store).await;
    let runtime = scene.machine.runtime();
    within("a process that is started", async {
        while runtime.process(attempt_id).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    // A lease that is named without a wish goes on as before.
    let named = pb::DesiredLease { lease_id: lease.to_string(), wish: None };
    for _ in 0..3 {
        scene.desire(0, vec![named.clone()]).await;
        let [observed] = &scene.observed.0.leases[..] else { panic!("{:?}", scene.observed.0) };
        assert_eq!(observed.phase(), pb::LeasePhase::Preparing, "its command does not run yet");
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
