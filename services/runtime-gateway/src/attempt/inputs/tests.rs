//! Tests of inputs on other workers, with a fake artifact store and a fake streamer.

use std::sync::Arc;

use domain::workload::{
    CacheMount, FailureReason, Image, Input, Limits, Network, OutputMode, Stdin, WorkloadKind, WorkloadSpec,
};
use domain::{AttemptId, CacheId, LeaseId, WorkloadId};
use rpc::pb::streamer::streamer_server::{Streamer, StreamerServer};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::attempt::{carry_out, failure};
use crate::clients::scheduler_messages::AttemptPhase;
use crate::test_support::served::TestServer;
use crate::test_support::store::{Store, StoreCall, session};
use crate::test_support::{FakeGateways, TestWorker, UNREACHABLE, within};
use crate::worker::attempts::AttemptEntry;
use rpc::pb::artifacts as store;
use rpc::pb::streamer;
use rpc::pb::streamer::materialize_response::Message as CopyMessage;
use testing::fake::FakeWorker;

type AnswerSender = mpsc::Sender<Result<streamer::MaterializeResponse, Status>>;

/// A call to the streamer, with the channel for its answers.
struct CopyCall(streamer::MaterializeRequest, AnswerSender);

impl CopyCall {
    async fn send(&self, message: CopyMessage) {
        let answer = streamer::MaterializeResponse { message: Some(message) };
        self.1.send(Ok(answer)).await.expect("the gateway listens");
    }

    async fn refuse(self, reason: Reason) {
        self.1
            .send(Err(reason.status("gantry.test", "as the test asked for")))
            .await
            .expect("the gateway listens");
    }
}

struct Script(mpsc::Sender<CopyCall>);

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not used in this test"))
}

#[tonic::async_trait]
impl Streamer for Script {
    type UploadStream = ReceiverStream<Result<streamer::UploadResponse, Status>>;
    type MaterializeStream = ReceiverStream<Result<streamer::MaterializeResponse, Status>>;
    type EvacuateWorkerStream = ReceiverStream<Result<streamer::EvacuateWorkerResponse, Status>>;

    async fn upload(
        &self,
        _: Request<Streaming<streamer::UploadRequest>>,
    ) -> Result<Response<Self::UploadStream>, Status> {
        unused()
    }

    async fn download(
        &self,
        _: Request<streamer::DownloadRequest>,
    ) -> Result<Response<streamer::DownloadResponse>, Status> {
        unused()
    }

    async fn materialize(
        &self,
        request: Request<streamer::MaterializeRequest>,
    ) -> Result<Response<Self::MaterializeStream>, Status> {
        let (report, answers) = mpsc::channel(4);
        let call = CopyCall(request.into_inner(), report);
        self.0.send(call).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(answers)))
    }

    async fn evacuate_worker(
        &self,
        _: Request<streamer::EvacuateWorkerRequest>,
    ) -> Result<Response<Self::EvacuateWorkerStream>, Status> {
        unused()
    }

    async fn list_transfers(
        &self,
        _: Request<streamer::ListTransfersRequest>,
    ) -> Result<Response<streamer::ListTransfersResponse>, Status> {
        unused()
    }

    async fn cancel_transfer(
        &self,
        _: Request<streamer::CancelTransferRequest>,
    ) -> Result<Response<streamer::CancelTransferResponse>, Status> {
        unused()
    }
}

/// A gateway with an attempt that has two inputs, and the services that it calls.
struct Suite {
    worker: TestWorker,
    task: AttemptTask,
    store: Store,
    calls: mpsc::Receiver<CopyCall>,
    streamer: TestServer,
}

impl Suite {
    async fn start() -> Self {
        Self::with(FakeWorker::near(), task()).await
    }

    async fn with(machine: Arc<FakeWorker>, task: AttemptTask) -> Self {
        let store = Store::start().await;
        let (call, calls) = mpsc::channel(4);
        let streamer = TestServer::start(|host| host.add_service(StreamerServer::new(Script(call)))).await;

        let worker = machine.with_streamer(UNREACHABLE, &store.endpoint, &streamer.endpoint);
        worker.session.set(Some(session("credential")));
        let (stop, _) = watch::channel(None);
        let attempt = AttemptEntry::new(stop);
        worker.attempts.lock().insert(task.lease, attempt);
        Self { worker, task, store, calls, streamer }
    }

    /// Reports the progress as an attempt does.
    fn report(&self) -> impl Fn(Option<Vec<InputProgress>>) + Sync + use<> {
        let (worker, lease) = (self.worker.clone(), self.task.lease);
        move |inputs| worker.attempts.report_inputs(lease, inputs)
    }

    /// Answers a call of `Prepare` in which the artifacts in `missing` are not on the worker.
    /// Returns the answer.
    async fn prepared(store: &mut Store, missing: &[ArtifactId]) -> store::PrepareResponse {
        let StoreCall::Prepare(request, answer) = store.next_call().await else {
            panic!("an unexpected call")
        };
        let volumes = request.volumes.into_iter().map(|volume| {
            let from = volume.from_artifact_id.parse::<ArtifactId>().ok();
            let missing = from.filter(|from| missing.contains(from));
            let here = from.is_some() && missing.is_none();
            store::PreparedVolume {
                name: volume.name,
                volume_handle: VolumeHandle::new().to_string(),
                parent_handle: if here { VolumeHandle::new().to_string() } else { String::new() },
                missing_artifact_id: missing.map(|missing| missing.to_string()).unwrap_or_default(),
                parent_digest: if here { vec![1; 32].into() } else { Vec::new().into() },
            }
        });
        let response = store::PrepareResponse {
            container_handle: ContainerHandle::new().to_string(),
            volumes: volumes.collect(),
        };
        answer.send(Ok(response.clone())).expect("the gateway waits");
        response
    }

    async fn end(self) {
        self.store.end().await;
        drop(self.worker);
        self.streamer.end().await;
    }
}

pub(in crate::attempt) fn task() -> AttemptTask {
    let input = |name: &str| Input {
        name: name.to_owned(),
        artifact: ArtifactId::new(),
        path: format!("/inputs/{name}").into(),
        read_only: false,
    };
    let spec = WorkloadSpec {
        team: "main".to_owned(),
        kind: WorkloadKind::Task,
        image: Image::Host,
        entrypoint: None,
        prefers_image_directory: false,
        command: vec![b"true".to_vec()],
        environment: Vec::new(),
        directory: rpc::spec::DEFAULT_DIRECTORY.to_vec(),
        user: None,
        stdin: Stdin::None,
        output: OutputMode::Spooled,
        inputs: vec![input("far"), input("near")],
        outputs: Vec::new(),
        limits: Limits::default(),
        privileged: false,
        network: Network::Private,
        tags: Vec::new(),
        platform: "linux".to_owned(),
        queue_timeout: None,
        run_timeout: None,
        build: None,
        caches: Vec::new(),
        interruptible: false,
        priority: 0,
        requests: Default::default(),
        start_timeout: None,
        retries: 0,
        worker: String::new(),
        capabilities: vec![],
        terminal: None,
        keep_result: false,
        services: Vec::new(),
        name: String::new(),
    };
    AttemptTask {
        lease: LeaseId::new(),
        attempt: AttemptId::new(),
        spec,
        token: "token".to_owned(),
        workload: WorkloadId::new(),
        traceparent: String::new(),
        service: None,
        driven: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_input_is_copied_under_the_lease() {
    let mut suite = Suite::start().await;
    let report = suite.report();
    let far = suite.task.spec.inputs[0].artifact;
    let phase = |suite: &Worker, lease| {
        let attempts = suite.attempts.lock();
        let attempt = attempts.get(&lease).expect("the lease is in the table");
        (attempt.phase, attempt.inputs.clone())
    };
    let (worker, lease) = (suite.worker.clone(), suite.task.lease);
    let script = async {
        Suite::prepared(&mut suite.store, &[far]).await;
        let call = within("a call to the streamer", suite.calls.recv()).await.expect("the server runs");
        let worker_id = worker.session.current().expect("a session").worker.to_string();
        let expected = streamer::MaterializeRequest {
            team: "main".to_owned(),
            artifact_id: far.to_string(),
            worker_id,
            lease_token: "token".to_owned(),
        };
        assert_eq!(call.0, expected);
        let progress = streamer::TransferProgress { bytes_done: 5, bytes_total: 9, ..Default::default() };
        call.send(CopyMessage::Progress(progress)).await;
        let report = async |bytes_done, waits_for: &str, relayed| {
            let (name, waits_for) = ("far".to_owned(), waits_for.to_owned());
            let input = InputProgress { name, bytes_done, bytes_total: 9, waits_for, relayed };
            within("the reported progress", async {
                while phase(&worker, lease) != (AttemptPhase::Materializing, vec![input.clone()]) {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        };
        report(5, "", false).await;

        // The reason to wait is reported until more bytes exist than before.
        call.refuse(Reason::WorkerUnreachable).await;
        report(5, "as the test asked for", false).await;
        let call = within("another call", suite.calls.recv()).await.expect("the server runs");
        for bytes_done in [0, 5, 6] {
            let route = streamer::Route::Relay.into();
            let progress =
                streamer::TransferProgress { bytes_done, bytes_total: 9, route, ..Default::default() };
            call.send(CopyMessage::Progress(progress)).await;
        }
        report(6, "", true).await;
        call.send(CopyMessage::Materialized(streamer::Materialized::default())).await;
        Suite::prepared(&mut suite.store, &[]).await;
    };
    let (prepared, ()) = tokio::join!(prepare(&suite.worker.context, &suite.task, &report), script);
    let (_, prepared) = prepared.expect("all inputs exist");
    assert_eq!(prepared.volumes.len(), 2);
    assert!(prepared.volumes.iter().all(|(_, parent)| parent.is_some()));
    assert_eq!(phase(&worker, lease), (AttemptPhase::Preparing, Vec::new()));
    drop(worker);
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_fails_when_input_is_permanently_lost() {
    let cases = [
        (Reason::NoReplica, FailureReason::InputUnavailable),
        (Reason::InvalidToken, FailureReason::InputUnavailable),
        (Reason::DiskFull, FailureReason::DiskFull),
    ];
    for (last, expected) in cases {
        let mut suite = Suite::start().await;
        let report = suite.report();
        let far = suite.task.spec.inputs[0].artifact;
        let script = async {
            Suite::prepared(&mut suite.store, &[far]).await;
            for reason in [Reason::Unavailable, Reason::SourceFailed, Reason::WorkerUnreachable, last] {
                let call = within("a call to the streamer", suite.calls.recv()).await.expect("served");
                call.refuse(reason).await;
            }
        };
        let (prepared, ()) = tokio::join!(prepare(&suite.worker.context, &suite.task, &report), script);
        let failure = failure(&prepared.map(|_| ()).expect_err("the input is lost"));
        assert_eq!(failure.reason, expected);
        for part in ["\"far\"", &far.to_string(), "as the test asked for", last.as_str()] {
            assert!(failure.message.contains(part), "{part} in {}", failure.message);
        }
        suite.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_starts_empty_when_it_cannot_be_copied() {
    let mut suite = Suite::start().await;
    let report = suite.report();
    let (cache, version) = (CacheId::new(), ArtifactId::new());
    suite.task.spec.inputs.clear();
    suite.task.spec.caches.push(CacheMount { cache, path: b"/cache".to_vec() });
    let script = async {
        for unreachable in [vec![], vec![version.to_string()]] {
            let StoreCall::Prepare(request, answer) = suite.store.next_call().await else {
                panic!("an unexpected call")
            };
            assert_eq!(request.unreachable_artifact_ids, unreachable);
            let [volume] = &request.volumes[..] else { panic!("{request:?}") };
            assert_eq!(volume.from_task_cache_id, cache.to_string());
            let first = unreachable.is_empty();
            let volume = store::PreparedVolume {
                volume_handle: VolumeHandle::new().to_string(),
                missing_artifact_id: if first { version.to_string() } else { String::new() },
                ..store::PreparedVolume::default()
            };
            let container_handle = ContainerHandle::new().to_string();
            let response = store::PrepareResponse { container_handle, volumes: vec![volume] };
            answer.send(Ok(response)).expect("the gateway waits");
            if first {
                let call = within("a call to the streamer", suite.calls.recv()).await.expect("served");
                assert_eq!(call.0.artifact_id, version.to_string());
                let report = suite.worker.attempts.lock()[&suite.task.lease].inputs.clone();
                assert!(report.is_empty() || report[0].name == "cache /cache", "{report:?}");
                call.refuse(Reason::NoReplica).await;
            }
        }
    };
    let (prepared, ()) = tokio::join!(prepare(&suite.worker.context, &suite.task, &report), script);
    let (_, prepared) = prepared.expect("the attempt continues");
    assert_eq!(prepared.volumes.iter().filter(|(_, parent)| parent.is_some()).count(), 0);
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn container_failure_is_reported_with_its_cause() {
    let mut suite = Suite::start().await;
    suite.task.spec.inputs.clear();
    suite.task.spec.user = Some("stranger".to_owned());
    let (_stop, mut stop) = watch::channel(None);
    let script = async {
        let planned = Suite::prepared(&mut suite.store, &[]).await;
        let StoreCall::Failed(report, answer) = suite.store.next_call().await else {
            panic!("an unexpected call")
        };
        answer.send(Ok(store::FailPrepareResponse {})).expect("the gateway waits");
        (planned, report)
    };
    let both = async { tokio::join!(carry_out(&suite.worker.context, &suite.task, &mut stop), script) };
    let (carried, (planned, report)) = within("the end", both).await;
    let Err(stopped) = carried else { panic!("the container cannot be made") };
    assert_eq!(report.session_credential, "credential");
    assert_eq!(report.container_handle, planned.container_handle);
    let handles: Vec<_> = planned.volumes.iter().map(|volume| &volume.volume_handle).collect();
    assert_eq!(report.volume_handles.iter().collect::<Vec<_>>(), handles);
    assert_eq!(report.reason, format!("cannot make the container or its volumes: {stopped}"));
    suite.end().await;
}

/// Makes the container of an attempt with the inputs `far` and `near`, after `damage` of the
/// replica of `far`. Answers the calls until the streamer is asked for another replica, and answers
/// that call with `copied`. Returns the lost replica, the reported reason, and the result.
async fn made_after(
    machine: Arc<FakeWorker>,
    damage: impl AsyncFnOnce(&Arc<FakeWorker>, VolumeHandle),
    copied: Result<(), Reason>,
) -> (VolumeHandle, String, Result<Vec<String>, AttemptError>) {
    let [near, lost, other] =
        [machine.volume("near").await, machine.volume("far").await, machine.volume("far").await];
    let mut suite = Suite::with(machine.clone(), task()).await;
    let manifests = &suite.worker.transfers.manifests;
    let mut digests = BTreeMap::new();
    for volume in [near, lost, other] {
        let manifest = manifests.load_verified(suite.worker.runtime.as_ref(), volume, "main").await;
        digests.insert(volume, manifest.expect("a manifest").tree_digest());
    }
    damage(&machine, lost).await;
    let report = suite.report();
    let (_stop, mut stop) = watch::channel(None);
    let far = suite.task.spec.inputs[0].artifact;
    let prepared = async |store: &mut Store, from_far: Option<VolumeHandle>| {
        let StoreCall::Prepare(request, answer) = store.next_call().await else {
            panic!("an unexpected call")
        };
        let parents = [from_far, Some(near)];
        let volumes =
            request.volumes.into_iter().zip(parents).map(|(volume, parent)| store::PreparedVolume {
                name: volume.name,
                volume_handle: VolumeHandle::new().to_string(),
                parent_handle: parent.map(|parent| parent.to_string()).unwrap_or_default(),
                parent_digest: parent
                    .map(|parent| digests[&parent].as_bytes().to_vec().into())
                    .unwrap_or_default(),
                missing_artifact_id: if parent.is_none() { far.to_string() } else { String::new() },
            });
        let container_handle = ContainerHandle::new().to_string();
        let response = store::PrepareResponse { container_handle, volumes: volumes.collect() };
        answer.send(Ok(response.clone())).expect("the gateway waits");
        response
    };
    let script = async {
        let first = prepared(&mut suite.store, Some(lost)).await;
        let StoreCall::Lost(request, answer) = suite.store.next_call().await else {
            panic!("an unexpected call")
        };
        let [replica] = &request.replicas[..] else { panic!("{request:?}") };
        assert_eq!(
            (&*request.session_credential, &*replica.volume_handle),
            ("credential", &*lost.to_string())
        );
        answer.send(Ok(store::LoseReplicasResponse {})).expect("the gateway waits");
        let StoreCall::Failed(failed, answer) = suite.store.next_call().await else {
            panic!("an unexpected call")
        };
        assert_eq!((failed.container_handle, failed.volume_handles.len()), (first.container_handle, 2));
        answer.send(Ok(store::FailPrepareResponse {})).expect("the gateway waits");
        prepared(&mut suite.store, None).await;
        let call = within("a call to the streamer", suite.calls.recv()).await.expect("served");
        assert_eq!(call.0.artifact_id, far.to_string());
        match copied {
            Err(reason) => call.refuse(reason).await,
            Ok(()) => {
                call.send(CopyMessage::Materialized(streamer::Materialized::default())).await;
                prepared(&mut suite.store, Some(other)).await;
            }
        }
        replica.reason.clone()
    };
    let making = async {
        let prepared = prepare(&suite.worker.context, &suite.task, &report).await?;
        let made = crate::attempt::make::make(
            &suite.worker.context,
            &suite.task,
            None,
            prepared,
            &report,
            &mut stop,
        );
        Ok::<_, AttemptError>(made.await?.prepared)
    };
    let (made, reason) = within("the container", async { tokio::join!(making, script) }).await;
    let texts = made.map(|made| made.volumes.iter().map(|(volume, _)| machine.read(*volume)).collect());
    suite.end().await;
    (lost, reason, texts)
}

async fn destroy(machine: &Arc<FakeWorker>, volume: VolumeHandle) {
    machine.runtime().destroy_volume(volume).await.expect("destroyed");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_replica_is_replaced_before_the_start() {
    for machine in [FakeWorker::near(), FakeWorker::far()] {
        let (_, reason, made) = made_after(machine, destroy, Ok(())).await;
        assert_eq!(reason, "is missing on the worker");
        assert_eq!(made.expect("another replica is used"), ["far", "near"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_replica_is_replaced_before_the_start() {
    let change = async |machine: &Arc<FakeWorker>, lost| {
        std::fs::write(machine.path(lost).join("file"), "FAR").expect("written");
    };
    let (_, reason, made) = made_after(FakeWorker::near(), change, Ok(())).await;
    assert_eq!(reason, "is damaged: \"file\" was changed after it was written");
    assert_eq!(made.expect("another replica is used"), ["far", "near"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn attempt_fails_with_the_loss_of_the_last_replica() {
    let (lost, _, made) = made_after(FakeWorker::near(), destroy, Err(Reason::NoReplica)).await;
    let failure = failure(&made.expect_err("no replica is left"));
    assert_eq!(failure.reason, FailureReason::InputUnavailable);
    let loss = format!("volume {lost} is missing on the worker");
    for part in [&*loss, "cannot copy input \"far\"", "as the test asked for"] {
        assert!(failure.message.contains(part), "{part} in {}", failure.message);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_gives_up_after_a_time_without_progress() {
    let suite = Suite::start().await;
    let artifact = suite.task.spec.inputs[0].artifact;
    let (waits, mut calls) = (Mutex::new(Vec::new()), suite.calls);
    let report = |event: InputEvent<'_>| {
        if let InputEvent::Waiting(why) = event {
            lock(&waits).push(why.to_owned());
        }
    };
    let patience = Duration::from_millis(1);
    let copying = materialize(&suite.worker, &suite.task, artifact, patience, report);
    let script = async {
        // An outage of the store or the streamer is waited out, and progress begins the time again.
        for reason in [Reason::Unavailable, Reason::WorkerUnreachable] {
            let call = within("a call to the streamer", calls.recv()).await.expect("served");
            call.refuse(reason).await;
        }
        let call = within("a call to the streamer", calls.recv()).await.expect("served");
        let progress = streamer::TransferProgress { bytes_done: 5, bytes_total: 9, ..Default::default() };
        call.send(CopyMessage::Progress(progress)).await;
        call.refuse(Reason::SourceFailed).await;
        let call = within("a call to the streamer", calls.recv()).await.expect("served");
        call.refuse(Reason::SourceFailed).await;
    };
    let (copied, ()) = tokio::join!(copying, script);
    let refusal = copied.expect_err("no gateway can be reached");
    assert!(refusal.is(Reason::SourceFailed), "{refusal}");
    assert_eq!(lock(&waits).len(), 3, "each failure that is tried again is reported");
    let reason = |refusal| failure(&AttemptError::InputMissing("far".to_owned(), artifact, refusal)).reason;
    assert_eq!(reason(refusal), FailureReason::InputUnreachable);
    let of_sources = Reason::WorkerUnreachable.status("gantry.streamer", "all sources are silent");
    assert_eq!(reason(Refusal::from(of_sources)), FailureReason::InputUnreachable);
    let about = [("worker", suite.worker.session.opened().await.worker.to_string())];
    let of_this = Reason::WorkerUnreachable.status_about("gantry.streamer", "cannot be reached", about);
    assert_eq!(reason(Refusal::from(of_this)), FailureReason::WorkerUnreachable);
    drop(suite.worker);
    suite.store.end().await;
    suite.streamer.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_import_is_imported_again_and_not_copied() {
    let what = WorkerProvided::ResourceType("git".to_owned());
    let provided_path =
        |what| runtime::WorkerProvidedPath { what, version: "1".to_owned(), path: "/opt".to_owned() };
    let machine =
        FakeWorker::providing(vec![provided_path(what.clone()), provided_path(WorkerProvided::Certs)], false);
    let mut git = task();
    git.spec.image = Image::ResourceType("git".to_owned());
    git.spec.inputs.clear();
    let mut suite = Suite::with(machine, git).await;
    let report = suite.report();
    suite.worker.tasks.spawn(crate::sync::base_type_import::import_forever(
        suite.worker.transfers.clone(),
        suite.worker.imports.clone(),
    ));
    let [first, second, certs] = [(); 3].map(|()| ArtifactId::new());
    let imported = async |store: &mut Store, resource_type: &str, artifact: ArtifactId| {
        let StoreCall::PrepareImport(request, answer) = store.next_call().await else {
            panic!("an unexpected call")
        };
        assert_eq!(request.provided.expect("something").resource_type, resource_type);
        let response = store::PrepareImportResponse {
            artifact_id: artifact.to_string(),
            volume_handle: VolumeHandle::new().to_string(),
            term: None,
        };
        answer.send(Ok(response)).expect("the gateway waits");
    };
    let script = async {
        imported(&mut suite.store, "git", first).await;
        imported(&mut suite.store, "", certs).await;
        // The first import was lost meanwhile.
        Suite::prepared(&mut suite.store, &[first]).await;
        imported(&mut suite.store, "git", second).await;
        // The resource type was replaced.
        let StoreCall::Prepare(request, answer) = suite.store.next_call().await else {
            panic!("an unexpected call")
        };
        let about = [("artifact_id", second.to_string())];
        let refusal =
            Reason::InputUnavailable.status_about("gantry.test", "not every team's".to_owned(), about);
        answer.send(Err(refusal)).expect("the gateway waits");
        let from: Vec<_> = request.volumes.iter().map(|volume| volume.from_artifact_id.clone()).collect();
        assert_eq!(from, [second.to_string(), certs.to_string()]);
        imported(&mut suite.store, "git", first).await;
        Suite::prepared(&mut suite.store, &[]).await
    };
    let both = async { tokio::join!(prepare(&suite.worker.context, &suite.task, &report), script) };
    let (prepared, answer) = within("the prepared attempt", both).await;
    let (plan, prepared) = prepared.expect("all inputs exist");
    assert_eq!(plan.image, crate::attempt::spec_plan::PlannedImage::WorkerProvided(0));
    assert_eq!((plan.volumes[0].from, plan.volumes[1].from), (Some(first), Some(certs)));
    assert_eq!(prepared.volumes[0].0.to_string(), answer.volumes[0].volume_handle);
    assert!(suite.calls.try_recv().is_err(), "the streamer is not called");

    // A resource type that the worker does not provide is rejected at once.
    suite.task.spec.image = Image::ResourceType("s3".to_owned());
    let refused = failure(
        &prepare(&suite.worker.context, &suite.task, &report)
            .await
            .map(drop)
            .expect_err("the worker does not provide it"),
    );
    assert_eq!(refused.reason, FailureReason::Unsupported);
    suite.worker.stopping.cancel();
    suite.end().await;
}
