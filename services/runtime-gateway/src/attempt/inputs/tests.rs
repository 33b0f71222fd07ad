//! Inputs that are elsewhere, with an artifact store and a streamer whose answers each test gives.

use std::sync::Arc;

use domain::workload::{
    CacheMount, FailureReason, Image, Input, Limits, Network, OutputMode, Stdin, WorkloadSpec,
};
use domain::{AttemptId, CacheId, LeaseId, WorkloadId};
use rpc::pb::streamer::streamer_server::{Streamer, StreamerServer};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::attempt::{carry_out, failure};
use crate::test_support::served::Served;
use crate::test_support::store::{Asked, Store, session};
use crate::test_support::{Attended, NOBODY, TestWorker, within};
use crate::worker::attempts::AttemptEntry;
use rpc::pb::artifacts as store;
use rpc::pb::streamer;
use rpc::pb::streamer::materialize_response::Message as Said;
use testing::fake::FakeWorker;

type Told = mpsc::Sender<Result<streamer::MaterializeResponse, Status>>;

/// What is asked of the streamer, and how it is answered.
struct Bring(streamer::MaterializeRequest, Told);

impl Bring {
    async fn say(&self, message: Said) {
        let answer = streamer::MaterializeResponse { message: Some(message) };
        self.1.send(Ok(answer)).await.expect("somebody listens");
    }

    async fn refuse(self, reason: Reason) {
        self.1.send(Err(reason.status("gantry.test", "as the test asked for"))).await.expect("listens");
    }
}

struct Script(mpsc::Sender<Bring>);

fn no_part<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("no part of this test"))
}

#[tonic::async_trait]
impl Streamer for Script {
    type UploadStream = ReceiverStream<Result<streamer::UploadResponse, Status>>;
    type MaterializeStream = ReceiverStream<Result<streamer::MaterializeResponse, Status>>;

    async fn upload(
        &self,
        _: Request<Streaming<streamer::UploadRequest>>,
    ) -> Result<Response<Self::UploadStream>, Status> {
        no_part()
    }

    async fn download(
        &self,
        _: Request<streamer::DownloadRequest>,
    ) -> Result<Response<streamer::DownloadResponse>, Status> {
        no_part()
    }

    async fn materialize(
        &self,
        request: Request<streamer::MaterializeRequest>,
    ) -> Result<Response<Self::MaterializeStream>, Status> {
        let (told, answers) = mpsc::channel(4);
        let bring = Bring(request.into_inner(), told);
        self.0.send(bring).await.map_err(|_| Status::unavailable("the test is over"))?;
        Ok(Response::new(ReceiverStream::new(answers)))
    }

    async fn list_transfers(
        &self,
        _: Request<streamer::ListTransfersRequest>,
    ) -> Result<Response<streamer::ListTransfersResponse>, Status> {
        no_part()
    }

    async fn cancel_transfer(
        &self,
        _: Request<streamer::CancelTransferRequest>,
    ) -> Result<Response<streamer::CancelTransferResponse>, Status> {
        no_part()
    }
}

/// A gateway with an attempt at a workload that has two inputs, and those whom it asks.
struct Suite {
    worker: TestWorker,
    task: AttemptTask,
    store: Store,
    brought: mpsc::Receiver<Bring>,
    streamer: Served,
}

impl Suite {
    async fn start() -> Self {
        Self::with(FakeWorker::near(), task()).await
    }

    async fn with(machine: Arc<FakeWorker>, task: AttemptTask) -> Self {
        let store = Store::start().await;
        let (bring, brought) = mpsc::channel(4);
        let streamer = Served::start(|host| host.add_service(StreamerServer::new(Script(bring)))).await;

        let worker = machine.brought_to(NOBODY, &store.endpoint, &streamer.endpoint);
        worker.session.set(Some(session("credential")));
        let (stop_wish, _) = watch::channel(None);
        let attempt = AttemptEntry { phase: AttemptPhase::Preparing, inputs: Vec::new(), stop: stop_wish };
        worker.attempts.lock().insert(task.lease, attempt);
        Self { worker, task, store, brought, streamer }
    }

    /// Answers a call of Prepare, in which these of the inputs are missing. Answers the answer.
    async fn prepared(store: &mut Store, missing: &[ArtifactId]) -> store::PrepareResponse {
        let Asked::Prepare(request, answer) = store.asked().await else { panic!("something else") };
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
        answer.send(Ok(response.clone())).expect("it waits");
        response
    }

    async fn end(self) {
        self.store.end().await;
        drop(self.worker);
        self.streamer.end().await;
    }
}

fn task() -> AttemptTask {
    let input = |name: &str| Input {
        name: name.to_owned(),
        artifact: ArtifactId::new(),
        path: format!("/inputs/{name}").into(),
        read_only: false,
    };
    let spec = WorkloadSpec {
        team: "main".to_owned(),
        image: Image::Host,
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
        capabilities: vec![],
    };
    AttemptTask {
        lease: LeaseId::new(),
        attempt: AttemptId::new(),
        spec,
        token: "token".to_owned(),
        workload: WorkloadId::new(),
        traceparent: String::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_elsewhere_is_brought_under_the_lease_and_then_found_here() {
    let mut suite = Suite::start().await;
    let far = suite.task.spec.inputs[0].artifact;
    let phase = |suite: &Worker, lease| {
        let attempts = suite.attempts.lock();
        let attempt = attempts.get(&lease).expect("it is attended");
        (attempt.phase, attempt.inputs.clone())
    };
    let (worker, lease) = (suite.worker.clone(), suite.task.lease);
    let script = async {
        Suite::prepared(&mut suite.store, &[far]).await;
        let bring = within("a call to the streamer", suite.brought.recv()).await.expect("it is served");
        let worker_id = worker.session.current().expect("a session").worker.to_string();
        let expected = streamer::MaterializeRequest {
            team: "main".to_owned(),
            artifact_id: far.to_string(),
            worker_id,
            lease_token: "token".to_owned(),
        };
        assert_eq!(bring.0, expected);
        let progress = streamer::TransferProgress { bytes_done: 5, bytes_total: 9, ..Default::default() };
        bring.say(Said::Progress(progress)).await;
        let told = async |bytes_done, waits_for: &str| {
            let (name, waits_for) = ("far".to_owned(), waits_for.to_owned());
            let input = InputProgress { name, bytes_done, bytes_total: 9, waits_for };
            within("what is told of it", async {
                while phase(&worker, lease) != (AttemptPhase::Materializing, vec![input.clone()]) {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        };
        told(5, "").await;

        // Why it is not brought is told until more of it is there than before.
        bring.refuse(Reason::WorkerUnreachable).await;
        told(5, "as the test asked for").await;
        let bring = within("another call", suite.brought.recv()).await.expect("it is served");
        for bytes_done in [0, 5, 6] {
            let progress = streamer::TransferProgress { bytes_done, bytes_total: 9, ..Default::default() };
            bring.say(Said::Progress(progress)).await;
        }
        told(6, "").await;
        bring.say(Said::Materialized(streamer::Materialized::default())).await;
        Suite::prepared(&mut suite.store, &[]).await;
    };
    let (prepared, ()) = tokio::join!(prepare(&suite.worker.context, &suite.task), script);
    let (_, prepared) = prepared.expect("everything is here");
    assert_eq!(prepared.volumes.len(), 2);
    assert!(prepared.volumes.iter().all(|(_, parent)| parent.is_some()));
    assert_eq!(phase(&worker, lease), (AttemptPhase::Preparing, Vec::new()));
    drop(worker);
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_may_come_back_and_what_is_lost_for_good_fails_the_attempt_with_all_that_was_said() {
    let cases = [
        (Reason::NoReplica, FailureReason::InputUnavailable),
        (Reason::InvalidToken, FailureReason::InputUnavailable),
        (Reason::DiskFull, FailureReason::DiskFull),
    ];
    for (last, expected) in cases {
        let mut suite = Suite::start().await;
        let far = suite.task.spec.inputs[0].artifact;
        let script = async {
            Suite::prepared(&mut suite.store, &[far]).await;
            for reason in [Reason::Unavailable, Reason::SourceFailed, Reason::WorkerUnreachable, last] {
                let bring = within("a call to the streamer", suite.brought.recv()).await.expect("served");
                bring.refuse(reason).await;
            }
        };
        let (prepared, ()) = tokio::join!(prepare(&suite.worker.context, &suite.task), script);
        let failure = failure(&prepared.map(|_| ()).expect_err("it cannot be had"));
        assert_eq!(failure.reason, expected);
        for part in ["\"far\"", &far.to_string(), "as the test asked for", last.as_str()] {
            assert!(failure.message.contains(part), "{part} in {}", failure.message);
        }
        suite.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_that_cannot_be_brought_is_found_empty() {
    let mut suite = Suite::start().await;
    let (cache, version) = (CacheId::new(), ArtifactId::new());
    suite.task.spec.inputs.clear();
    suite.task.spec.caches.push(CacheMount { cache, path: b"/cache".to_vec() });
    let script = async {
        for unreachable in [vec![], vec![version.to_string()]] {
            let Asked::Prepare(request, answer) = suite.store.asked().await else { panic!("something else") };
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
            answer.send(Ok(response)).expect("it waits");
            if first {
                let bring = within("a call to the streamer", suite.brought.recv()).await.expect("served");
                assert_eq!(bring.0.artifact_id, version.to_string());
                let told = suite.worker.attempts.lock()[&suite.task.lease].inputs.clone();
                assert!(told.is_empty() || told[0].name == "cache /cache", "{told:?}");
                bring.refuse(Reason::NoReplica).await;
            }
        }
    };
    let (prepared, ()) = tokio::join!(prepare(&suite.worker.context, &suite.task), script);
    let (_, prepared) = prepared.expect("it goes without");
    assert_eq!(prepared.volumes.iter().filter(|(_, parent)| parent.is_some()).count(), 0);
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_could_not_be_made_is_told_to_the_store_with_the_reason() {
    let mut suite = Suite::start().await;
    let (_wish, mut stop) = watch::channel(None);
    let script = async {
        // Replicas that are not there: nothing can be made from them.
        let planned = Suite::prepared(&mut suite.store, &[]).await;
        let Asked::Failed(told, answer) = suite.store.asked().await else { panic!("something else") };
        answer.send(Ok(store::FailedResponse {})).expect("it waits");
        (planned, told)
    };
    let both = async { tokio::join!(carry_out(&suite.worker.context, &suite.task, &mut stop), script) };
    let (carried, (planned, told)) = within("the end", both).await;
    let Err(stopped) = carried else { panic!("it could not be made") };
    assert_eq!(told.session_credential, "credential");
    assert_eq!(told.container_handle, planned.container_handle);
    let handles: Vec<_> = planned.volumes.iter().map(|volume| &volume.volume_handle).collect();
    assert_eq!(told.volume_handles.iter().collect::<Vec<_>>(), handles);
    assert_eq!(told.why, format!("it could not be made: {stopped}"));
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_did_not_survive_here_is_a_fault_of_this_worker() {
    let machine = FakeWorker::near();
    let [sound, damaged] = [machine.volume("contents").await, machine.volume("contents").await];
    let mut suite = Suite::with(machine, task()).await;
    let digest = suite.worker.transfers.manifests.proven(suite.worker.runtime.as_ref(), sound, "main").await;
    let digest = digest.expect("a manifest").tree_digest();
    let (_wish, mut stop) = watch::channel(None);
    let script = async {
        let Asked::Prepare(request, answer) = suite.store.asked().await else { panic!("something else") };
        let held = [(sound, digest), (damaged, Digest([1; 32]))];
        let volumes =
            request.volumes.into_iter().zip(held).map(|(volume, (parent, digest))| store::PreparedVolume {
                name: volume.name,
                volume_handle: VolumeHandle::new().to_string(),
                parent_handle: parent.to_string(),
                parent_digest: digest.as_bytes().to_vec().into(),
                ..store::PreparedVolume::default()
            });
        let container_handle = ContainerHandle::new().to_string();
        let response = store::PrepareResponse { container_handle, volumes: volumes.collect() };
        answer.send(Ok(response)).expect("it waits");
        let Asked::Failed(_, answer) = suite.store.asked().await else { panic!("something else") };
        answer.send(Ok(store::FailedResponse {})).expect("it waits");
    };
    let both = async { tokio::join!(carry_out(&suite.worker.context, &suite.task, &mut stop), script) };
    let failure = failure(&within("the end", both).await.0.map(drop).expect_err("it is not what it was"));
    assert_eq!(failure.reason, FailureReason::InputDamaged);
    assert!(failure.message.contains(&damaged.to_string()), "{}", failure.message);
    assert_eq!(
        suite.worker.transfers.manifests.damaged(),
        BTreeSet::from([damaged]),
        "it is not reported any more"
    );
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_worker_brings_along_is_imported_again_when_it_is_lost_and_not_brought_from_elsewhere() {
    let what = WorkerProvided::ResourceType("git".to_owned());
    let along = |what| runtime::WorkerProvidedPath { what, version: "1".to_owned(), path: "/opt".to_owned() };
    let machine = FakeWorker::providing(vec![along(what.clone()), along(WorkerProvided::Certs)], false);
    let mut git = task();
    git.spec.image = Image::ResourceType("git".to_owned());
    git.spec.inputs.clear();
    let mut suite = Suite::with(machine, git).await;
    suite.worker.tasks.spawn(crate::sync::base_type_import::import_forever(
        suite.worker.transfers.clone(),
        suite.worker.imports.clone(),
    ));
    let [first, second, certs] = [(); 3].map(|()| ArtifactId::new());
    let imported = async |store: &mut Store, resource_type: &str, artifact: ArtifactId| {
        let Asked::PrepareImport(asked, answer) = store.asked().await else { panic!("something else") };
        assert_eq!(asked.provided.expect("something").resource_type, resource_type);
        let response = store::PrepareImportResponse {
            artifact_id: artifact.to_string(),
            volume_handle: VolumeHandle::new().to_string(),
            term: None,
        };
        answer.send(Ok(response)).expect("it waits");
    };
    let script = async {
        imported(&mut suite.store, "git", first).await;
        imported(&mut suite.store, "", certs).await;
        // It was lost since.
        Suite::prepared(&mut suite.store, &[first]).await;
        imported(&mut suite.store, "git", second).await;
        // Somebody put something else in its place.
        let Asked::Prepare(request, answer) = suite.store.asked().await else { panic!("something else") };
        let about = [("artifact_id", second.to_string())];
        let refusal =
            Reason::InputUnavailable.status_about("gantry.test", "not every team's".to_owned(), about);
        answer.send(Err(refusal)).expect("it waits");
        let from: Vec<_> = request.volumes.iter().map(|volume| volume.from_artifact_id.clone()).collect();
        assert_eq!(from, [second.to_string(), certs.to_string()]);
        imported(&mut suite.store, "git", first).await;
        Suite::prepared(&mut suite.store, &[]).await
    };
    let both = async { tokio::join!(prepare(&suite.worker.context, &suite.task), script) };
    let (prepared, told) = within("the handles", both).await;
    let (plan, prepared) = prepared.expect("everything is here");
    assert_eq!(plan.image, crate::attempt::spec_plan::PlannedImage::WorkerProvided(0));
    assert_eq!((plan.volumes[0].from, plan.volumes[1].from), (Some(first), Some(certs)));
    assert_eq!(prepared.volumes[0].0.to_string(), told.volumes[0].volume_handle);
    assert!(suite.brought.try_recv().is_err(), "the streamer was not asked");

    // What it does not bring along it says at once.
    suite.task.spec.image = Image::ResourceType("s3".to_owned());
    let refused =
        failure(&prepare(&suite.worker.context, &suite.task).await.map(drop).expect_err("there is none"));
    assert_eq!(refused.reason, FailureReason::Unsupported);
    suite.worker.stopping.cancel();
    suite.end().await;
}
