//! Tests of the scheduler with a real artifact store.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use artifact_store::KeySource;
use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{ArtifactId, BuildId, ClaimId, GatewayInstance, TransferId, WorkerId, WorkloadId};
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts as store;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::owners_client::OwnersClient;
use rpc::pb::artifacts::pins_client::PinsClient;
use rpc::pb::artifacts::replicas_client::ReplicasClient;
use rpc::pb::capabilities::GetCapabilitiesRequest;
use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
use rpc::pb::scheduler as pb;
use rpc::token::TokenSigner;
use rpc::{Peer, Reason, Refusal};
use scheduler::Config;
use server::Listener;
use server::telemetry::RecentSpans;
use tempfile::TempDir;
use testing::databases::TestDatabase;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tracing::Instrument;

use crate::support::{Gateway, Running, config, finish, registration, spec, start, until};

/// Directory of an artifact store, which a test can start later.
pub(crate) struct Place {
    directory: TempDir,
}

pub(crate) struct Store {
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().expect("a temporary directory") }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("store.sock")
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix://{}", self.socket().display())
    }

    /// Starts an artifact store and waits until it is ready.
    #[expect(clippy::disallowed_methods, reason = "a test waits for it in `stop`")]
    pub(crate) async fn start(&self) -> Store {
        let url = format!("sqlite://{}/store.db", self.directory.path().display());
        let config = artifact_store::Config::new(url, KeySource::Fixed(vec![signer().public()]));
        let listener = Listener::Unix(UnixListener::bind(self.socket()).expect("a socket"));
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(artifact_store::serve(config, listener, async move {
            stopped.await.ok();
        }));
        until("the store answers", async || {
            let answer =
                CapabilitiesClient::new(self.peer()).get_capabilities(GetCapabilitiesRequest {}).await;
            answer.ok()?.into_inner().not_ready.is_empty().then_some(())
        })
        .await;
        Store { stop, served }
    }

    /// Removes the socket, so that the store can be started again.
    pub(crate) fn remove_socket(&self) {
        std::fs::remove_file(self.socket()).ok();
    }

    pub(crate) fn peer(&self) -> Peer {
        peer(&self.endpoint(), Outgoing::internal()).expect("an address")
    }

    /// Uploads an artifact to a worker that the scheduler does not know.
    async fn upload(&self) -> Result<ArtifactId, Refusal> {
        self.upload_to(WorkerId::new()).await
    }

    /// Returns the replicas of an artifact.
    pub(crate) async fn replicas(&self, artifact: ArtifactId) -> Result<Vec<store::Replica>, Refusal> {
        let request =
            store::GetArtifactRequest { team: "main".to_owned(), artifact_id: artifact.to_string() };
        let answer = ArtifactsClient::new(self.peer()).get_artifact(request).await?.into_inner();
        Ok(answer.artifact.expect("an artifact").replicas)
    }

    /// Uploads an artifact to a worker.
    pub(crate) async fn upload_to(&self, worker: WorkerId) -> Result<ArtifactId, Refusal> {
        self.upload_of("main", worker).await
    }

    /// Uploads an artifact of a team to a worker.
    pub(crate) async fn upload_of(&self, team: &str, worker: WorkerId) -> Result<ArtifactId, Refusal> {
        let session_credential = credential(worker);
        let (mut replicas, mut inventory) =
            (ReplicasClient::new(self.peer()), InventoryClient::new(self.peer()));
        let begin = store::BeginReportRequest {
            session_credential: session_credential.clone(),
            ..Default::default()
        };
        inventory.begin_report(begin).await?;
        let (artifact, digest, team) = (ArtifactId::new(), vec![7; 32], team.to_owned());
        let create = store::CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: team.clone(),
            ..store::CreateArtifactRequest::default()
        };
        ArtifactsClient::new(self.peer()).create_artifact(create).await?;
        let plan = store::PlanReplicaRequest {
            team: team.clone(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            transfer_id: TransferId::new().to_string(),
        };
        let complete = store::CompleteVolumeRequest {
            session_credential,
            volume_handle: replicas.plan_replica(plan).await?.into_inner().volume_handle,
            size_bytes: 1,
            digest: digest.clone().into(),
            verification: store::Verification::Verified.into(),
        };
        inventory.complete_volume(complete).await?;
        let artifact_id = artifact.to_string();
        replicas.seal_upload(store::SealUploadRequest { team, artifact_id, digest: digest.into() }).await?;
        Ok(artifact)
    }

    /// Creates the replica of an output as a gateway does. Returns its digest.
    pub(crate) async fn candidate(
        &self,
        workload: WorkloadId,
        attempt: &str,
        artifact: ArtifactId,
    ) -> Result<Vec<u8>, Refusal> {
        let session_credential = credential(WorkerId::new());
        let mut inventory = InventoryClient::new(self.peer());
        let volume = store::PrepareVolume {
            name: "out".to_owned(),
            purpose: store::VolumePurpose::Output.into(),
            from_artifact_id: String::new(),
            output_artifact_id: artifact.to_string(),
            from_task_cache_id: String::new(),
        };
        let prepare = store::PrepareRequest {
            session_credential: session_credential.clone(),
            holder_id: workload.to_string(),
            attempt_id: attempt.to_owned(),
            team: "main".to_owned(),
            volumes: vec![volume],
            unreachable_artifact_ids: Vec::new(),
        };
        let prepared = inventory.prepare(prepare).await?.into_inner();
        let attempt_id = attempt.to_owned();
        let made =
            store::CompletePrepareRequest { session_credential: session_credential.clone(), attempt_id };
        inventory.complete_prepare(made).await?;
        let digest = vec![9; 32];
        let complete = store::CompleteVolumeRequest {
            session_credential,
            volume_handle: prepared.volumes[0].volume_handle.clone(),
            size_bytes: 1,
            digest: digest.clone().into(),
            verification: store::Verification::Verified.into(),
        };
        inventory.complete_volume(complete).await?;
        Ok(digest)
    }

    /// Pins an artifact for a workload, as the scheduler does.
    pub(crate) async fn pin(&self, artifact: ArtifactId, holder: WorkloadId) -> Result<(), Refusal> {
        let request = store::PinRequest {
            holder_id: holder.to_string(),
            team: "main".to_owned(),
            artifact_ids: vec![artifact.to_string()],
            build_id: String::new(),
            task_cache_ids: Vec::new(),
        };
        PinsClient::new(self.peer()).pin(request).await?;
        Ok(())
    }

    /// Returns the owners and pins of an artifact.
    pub(crate) async fn kept_by(&self, artifact: ArtifactId) -> Vec<String> {
        let request =
            store::GetArtifactRequest { team: "main".to_owned(), artifact_id: artifact.to_string() };
        let answer = ArtifactsClient::new(self.peer()).get_artifact(request).await.expect("a known artifact");
        answer.into_inner().artifact.expect("the artifact").kept_by
    }

    pub(crate) fn config(&self, database: &TestDatabase) -> Config {
        Config { artifact_store: self.endpoint(), ..config(database) }
    }

    pub(crate) async fn put_build(&self, build: BuildId, workload: WorkloadId) -> Result<(), Refusal> {
        self.put_build_of("main", build, workload).await
    }

    /// Creates a build of a team.
    pub(crate) async fn put_build_of(
        &self,
        team: &str,
        build: BuildId,
        workload: WorkloadId,
    ) -> Result<(), Refusal> {
        let request = store::PutBuildRequest {
            build_id: build.to_string(),
            team: team.to_owned(),
            ends_with_workload_id: workload.to_string(),
            ..Default::default()
        };
        OwnersClient::new(self.peer()).put_build(request).await?;
        Ok(())
    }
}

/// Signer of the session credentials that the store accepts.
fn signer() -> TokenSigner {
    TokenSigner::from_seed(&[7; 32])
}

/// Session credential of the gateway of a worker.
pub(crate) fn credential(worker: WorkerId) -> String {
    signer().sign(&SessionClaims {
        worker,
        incarnation: Incarnation(1),
        session: Session(1),
        instance: GatewayInstance::new(),
    })
}

impl Store {
    pub(crate) async fn stop(self) {
        self.stop.send(()).expect("the store runs");
        self.served.await.expect("no panic").expect("the store stops without an error");
    }
}

pub(crate) async fn build_ends_with_its_workload(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let (id, build) = (WorkloadId::new(), BuildId::new());
    let spec = pb::WorkloadSpec { build_id: build.to_string(), ..spec() };

    let refused = scheduler.submit_as(id, spec.clone()).await.expect_err("there is no such build");
    assert!(refused.is(Reason::OwnerEnded), "{refused}");
    place.put_build(build, id).await.expect("a build");
    scheduler.submit_as(id, spec).await.expect("the rejected submission left no data");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    let ended = place.put_build(build, id).await.expect_err("the build ended with its workload");
    assert!(ended.is(Reason::BuildEnded), "{ended}");
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn unpinnable_inputs_are_rejected(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let artifact = ArtifactId::new().to_string();
    let input = pb::Input {
        name: "src".to_owned(),
        artifact_id: artifact.clone(),
        path: bytes::Bytes::new(),
        access: pb::Access::ReadOnly.into(),
    };
    let id = WorkloadId::new();
    let reading = pb::WorkloadSpec { inputs: vec![input.clone()], ..spec() };
    let subject = Some(pb::explain_request::Subject::Spec(reading.clone()));
    let explained =
        scheduler.placements().explain(pb::ExplainRequest { subject, ..Default::default() }).await;
    let explained = Refusal::from(explained.expect_err("Explain rejects what Submit rejects"));
    let refused = scheduler.submit_as(id, reading).await.expect_err("there is no such artifact");
    for refused in [explained, refused] {
        assert!(refused.is(Reason::InputUnavailable), "{refused}");
        assert_eq!(refused.about.get("artifact_id"), Some(&artifact));
    }
    let own = place.upload().await.expect("uploaded").to_string();
    let inputs = vec![pb::Input { artifact_id: own.clone(), ..input }];
    let of_another_team = pb::WorkloadSpec { team: "other".to_owned(), inputs: inputs.clone(), ..spec() };
    let refused = scheduler.submit_as(id, of_another_team).await.expect_err("an artifact of another team");
    assert!(refused.is(Reason::InputUnavailable), "{refused}");
    assert_eq!(refused.about.get("artifact_id"), Some(&own));
    scheduler
        .submit_as(id, pb::WorkloadSpec { inputs, ..spec() })
        .await
        .expect("the id is free, and the artifact belongs to the team");
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn pins_of_unknown_workloads_are_released(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let artifact = until("the store answers", async || place.upload().await.ok()).await;
    let input = pb::Input {
        name: "src".to_owned(),
        artifact_id: artifact.to_string(),
        path: bytes::Bytes::new(),
        access: pb::Access::ReadOnly.into(),
    };
    let known = scheduler.submit(pb::WorkloadSpec { inputs: vec![input], ..spec() }).await.expect("accepted");
    scheduler.stop().await;

    let frequently = Config {
        reconcile_every: Duration::from_millis(20),
        reconcile_grace: Duration::ZERO,
        ..place.config(&database)
    };
    let scheduler = Running::start(frequently).await;
    // The second unknown workload is checked after the known one.
    for _ in 0..2 {
        let unknown = WorkloadId::new();
        place.pin(artifact, unknown).await.expect("pinned");
        let settled = async || place.pin(artifact, unknown).await.err();
        let refused = until("the pin is settled", settled).await;
        assert!(refused.is(Reason::HolderSettled), "{refused}");
        assert_eq!(place.kept_by(artifact).await, [format!("pinned by {known}")]);
    }
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn missing_outputs_fail_workload(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let output = pb::Output { name: "out".to_owned(), ..pb::Output::default() };
    let id = scheduler.submit(pb::WorkloadSpec { outputs: vec![output], ..spec() }).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let published = |name: &str| pb::PublishedOutput {
        name: name.to_owned(),
        artifact_id: id.output_artifact(name).to_string(),
        size_bytes: 1,
        digest: vec![7; 32].into(),
        entries: 1,
    };
    let request = pb::FinishAttemptRequest {
        lease_token: run.lease_token,
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(0)) }),
        outputs: vec![published("out"), published("unknown")],
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("finished");
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Errored);
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("SETTLE_FAILED".to_owned()));
    assert_eq!(finished.exit.and_then(|exit| exit.status), Some(pb::exit::Status::Code(0)));
    assert!(finished.outputs.is_empty());
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn output_is_stored_in_named_caches(database: TestDatabase) {
    use pb::output_owner::Owner;

    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let mut caches = store::caches_client::CachesClient::new(place.peer());
    let task = store::FindOrCreateTaskCacheRequest {
        team: "main".to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: "/cache".to_owned(),
        ttl: None,
    };
    let task = caches.find_or_create_task_cache(task).await.expect("asked").into_inner().cache_id;
    let claim = ClaimId::new().to_string();
    let resource = store::FindOrCreateResourceCacheRequest {
        team: "main".to_owned(),
        key_digest: vec![1; 32].into(),
        claim_id: claim.clone(),
        r#type: "git".to_owned(),
        version: "1".to_owned(),
        ..Default::default()
    };
    let resource = caches.find_or_create_resource_cache(resource).await.expect("asked").into_inner().cache_id;
    let owner = |owner| pb::OutputOwner { owner: Some(owner) };
    let output = pb::Output {
        name: "out".to_owned(),
        owners: vec![owner(Owner::TaskCacheId(task.clone())), owner(Owner::ResourceCacheClaimId(claim))],
        ..pb::Output::default()
    };
    let twice = pb::WorkloadSpec {
        outputs: vec![output.clone(), pb::Output { name: "another".to_owned(), ..output.clone() }],
        ..spec()
    };
    let refused = scheduler.submit(twice).await.expect_err("a cache is named twice");
    assert!(refused.is(Reason::InvalidField), "{refused}");

    let spec = pb::WorkloadSpec { outputs: vec![output], ..spec() };
    let id = scheduler.submit(spec.clone()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let artifact = id.output_artifact("out");
    let digest = place.candidate(id, &run.attempt_id, artifact).await.expect("a candidate");
    let published = pb::PublishedOutput {
        name: "out".to_owned(),
        artifact_id: artifact.to_string(),
        size_bytes: 1,
        digest: digest.into(),
        entries: 1,
    };
    let request = pb::FinishAttemptRequest {
        lease_token: run.lease_token,
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(0)) }),
        outputs: vec![published],
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    let kept_by = [format!("resource cache {resource}"), format!("task cache {task}")];
    assert_eq!(place.kept_by(artifact).await, kept_by);
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn base_resource_type_provides_image_on_all_workers(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let labels = pb::WorkerLabels {
        platform: "linux".to_owned(),
        image_kinds: vec!["artifact".to_owned()],
        capabilities: vec!["network-private".to_owned()],
        ..pb::WorkerLabels::default()
    };
    let registration = pb::Registration { labels: Some(labels), ..registration("one") };
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let git = || pb::image::Source::ResourceType("git".to_owned());
    let spec =
        pb::WorkloadSpec { image: Some(pb::Image { source: Some(git()), entrypoint: None }), ..spec() };
    let explained = async || {
        let subject = pb::explain_request::Subject::Spec(spec.clone());
        let request = pb::ExplainRequest { subject: Some(subject), ..Default::default() };
        scheduler.placements().explain(request).await.expect("explained").into_inner().verdict()
    };
    let put = async |artifact: ArtifactId| {
        let request = store::PutBaseResourceTypeRequest {
            team: "main".to_owned(),
            r#type: "git".to_owned(),
            artifact_id: artifact.to_string(),
            ..Default::default()
        };
        let mut caches = store::caches_client::CachesClient::new(place.peer());
        caches.put_base_resource_type(request).await.expect("put");
    };
    let (first, second) = (place.upload().await.expect("sealed"), place.upload().await.expect("sealed"));

    let refused = scheduler.submit(spec.clone()).await.expect_err("no worker has the resource type");
    assert!(refused.is(Reason::NoCompatibleWorker), "{refused}");
    assert_eq!(explained().await, pb::Verdict::Never);
    put(first).await;
    assert_eq!(explained().await, pb::Verdict::Placed);

    let (old, new) = (WorkloadId::new(), WorkloadId::new());
    scheduler.submit_as(old, spec.clone()).await.expect("accepted");
    put(second).await;
    // A repeat is the same workload, even if the name has a new image.
    scheduler.submit_as(old, spec.clone()).await.expect("accepted before");
    let host = pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})), entrypoint: None };
    let another = pb::WorkloadSpec { image: Some(host), ..spec.clone() };
    let refused = scheduler.submit_as(old, another).await.expect_err("another spec");
    assert!(refused.is(Reason::WorkloadExists), "{refused}");
    scheduler.submit_as(new, spec).await.expect("accepted");
    for (workload, artifact) in [(old, first), (new, second)] {
        let (_, run) = gateway.run(workload).await;
        let image = run.spec.and_then(|spec| spec.image?.source);
        assert_eq!(image, Some(pb::image::Source::ArtifactId(artifact.to_string())));
        assert!(place.kept_by(artifact).await.contains(&format!("pinned by {workload}")), "{artifact}");
    }
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn cache_content_becomes_next_version(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let mut caches = store::caches_client::CachesClient::new(place.peer());
    let mut cache = async |team: &str| {
        let request = store::FindOrCreateTaskCacheRequest {
            team: team.to_owned(),
            job: "job".to_owned(),
            step: "step".to_owned(),
            path: "/cache".to_owned(),
            ttl: None,
        };
        let found = caches.find_or_create_task_cache(request).await.expect("asked").into_inner();
        (found.cache_id, found.location.map(|location| location.artifact_id))
    };
    let mount = |cache: &str, path: &'static str| pb::CacheMount {
        task_cache_id: cache.to_owned(),
        path: path.as_bytes().into(),
    };
    let ((ours, nothing), (foreign, _)) = (cache("main").await, cache("other").await);
    assert_eq!(nothing, None);
    for (unknown, path, reason) in [
        (&*foreign, "/cache", Reason::InputUnavailable),
        (&*WorkloadId::new().to_string(), "/cache", Reason::InputUnavailable),
        (&*ours, "cache", Reason::InvalidField),
        ("x", "/cache", Reason::InvalidField),
    ] {
        let spec = pb::WorkloadSpec { caches: vec![mount(unknown, path)], ..spec() };
        let refused = scheduler.submit(spec).await.expect_err("an unavailable cache");
        assert!(refused.is(reason), "{refused}");
    }

    let spec = pb::WorkloadSpec { caches: vec![mount(&ours, "/cache")], ..spec() };
    let to_move = async || {
        let subject = pb::explain_request::Subject::Spec(spec.clone());
        let request = pb::ExplainRequest { subject: Some(subject), ..Default::default() };
        let explained = scheduler.placements().explain(request).await.expect("explained").into_inner();
        explained.workers[0].standing.clone()
    };
    assert!(to_move().await.starts_with("0 bytes to move"));
    let id = scheduler.submit(spec.clone()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let artifact = id.cache_artifact(ours.parse().expect("an id"));
    let digest = place.candidate(id, &run.attempt_id, artifact).await.expect("a candidate");
    let left = |cache: &str, artifact: ArtifactId| pb::PublishedCache {
        task_cache_id: cache.to_owned(),
        artifact_id: artifact.to_string(),
        digest: digest.clone().into(),
    };
    let request = pb::FinishAttemptRequest {
        lease_token: run.lease_token,
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(3)) }),
        // A cache that the workload does not use is ignored.
        caches: vec![left(&ours, artifact), left(&foreign, artifact)],
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Failed);
    // The new version is visible before the end of the workload.
    assert_eq!(cache("main").await, (ours.clone(), Some(artifact.to_string())));
    assert_eq!(cache("other").await, (foreign.clone(), None));
    assert_eq!(place.kept_by(artifact).await, [format!("task cache {ours}")]);
    let standing = to_move().await;
    assert!(standing.starts_with("1 byte to move"), "caches count like inputs: {standing}");

    // A cancelled workload leaves no version in a cache.
    let id = scheduler.submit(spec.clone()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let cancel = pb::CancelRequest {
        team: "main".to_owned(),
        workload_id: id.to_string(),
        grace: Some(rpc::duration(Duration::ZERO)),
    };
    scheduler.workloads().cancel(cancel).await.expect("cancelled");
    let other = id.cache_artifact(ours.parse().expect("an id"));
    place.candidate(id, &run.attempt_id, other).await.expect("a candidate");
    let request = pb::FinishAttemptRequest {
        lease_token: run.lease_token,
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(0)) }),
        caches: vec![left(&ours, other)],
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Aborted);
    assert_eq!(cache("main").await, (ours, Some(artifact.to_string())));
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn unavailable_store_delays_only_the_end(database: TestDatabase) {
    let place = Place::new();
    let scheduler = Running::start(place.config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let output = pb::Output { name: "out".to_owned(), ..pb::Output::default() };
    let spec = pb::WorkloadSpec { outputs: vec![output], ..spec() };
    let id = scheduler.submit(spec).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    finish(&scheduler, &run.lease_token, 3).await.expect("acknowledged without the store");
    scheduler.wait_for(id, pb::WorkloadState::Settling).await;
    scheduler.cancel(id, Duration::ZERO).await;
    let settling = scheduler.get(id).await;
    assert_eq!(settling.state(), pb::WorkloadState::Settling, "the workload ended before the cancellation");
    assert_eq!(settling.outcome(), pb::Outcome::Unspecified);
    until("the slot is free", async || (scheduler.worker("one").await.active_tasks == 0).then_some(())).await;
    scheduler.stop().await;

    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Failed);
    scheduler.stop().await;
    store.stop().await;
}

/// The store is unavailable during the submission and starts after the cancellation.
pub(crate) async fn workload_cancelled_before_pinning_never_runs(database: TestDatabase) {
    let place = Place::new();
    let scheduler = Running::start(place.config(&database)).await;
    let _gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = WorkloadId::new();
    let input = pb::Input {
        name: "src".to_owned(),
        artifact_id: ArtifactId::new().to_string(),
        path: bytes::Bytes::new(),
        access: pb::Access::ReadOnly.into(),
    };
    let cancel = async {
        until("the workload is accepted", async || {
            let get = pb::GetRequest { team: "main".to_owned(), workload_id: id.to_string() };
            let known = scheduler.workloads().get(get).await.ok()?.into_inner().workload?;
            (known.state() == pb::WorkloadState::Accepted).then_some(())
        })
        .await;
        scheduler.cancel(id, Duration::ZERO).await;
        assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Aborted);
        place.start().await
    };
    let reading = pb::WorkloadSpec { inputs: vec![input], ..spec() };
    let submit = scheduler.submit_as(id, reading.clone());
    let (submitted, store) = futures::join!(submit, cancel);
    // The caller receives the cancellation or the failure of the store, whichever is first, and may
    // retry.
    assert!(submitted.as_ref().err().is_none_or(Refusal::is_transient), "{submitted:?}");
    scheduler.submit_as(id, reading).await.expect("a repeat");
    let artifact = until("the store answers", async || place.upload().await.ok()).await;
    until("the store has settled the workload", async || place.pin(artifact, id).await.err()).await;
    let kept_by = place.kept_by(artifact).await;
    assert!(!kept_by.iter().any(|why| why.starts_with("pinned by")), "{kept_by:?}");
    assert_eq!(scheduler.get(id).await.outcome(), pb::Outcome::Aborted);
    let events = scheduler.watch(id, 0).await;
    let placed =
        |event: &pb::WatchResponse| matches!(event.event, Some(pb::watch_response::Event::Placed(_)));
    assert!(!events.iter().any(placed), "the workload was never placed: {events:?}");
    scheduler.stop().await;
    store.stop().await;
}

/// Spans of all tests in this process.
fn spans() -> RecentSpans {
    static SPANS: LazyLock<RecentSpans> = LazyLock::new(|| {
        let spans = RecentSpans::default();
        let telemetry = server::telemetry::init("test", "off", Some(spans.clone()))
            .expect("telemetry is initialized once");
        // The telemetry lives until the end of the process.
        std::mem::forget(telemetry);
        spans
    });
    SPANS.clone()
}

pub(crate) async fn settlement_continues_trace_of_workload(database: TestDatabase) {
    let spans = spans();
    let place = Place::new();
    let scheduler = Running::start(place.config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let (id, build) = (WorkloadId::new(), BuildId::new());
    let trace = id.uuid().simple().to_string();

    // The submission and the end of the attempt belong to different traces. The store is
    // unavailable until the scheduler restarts.
    let store = place.start().await;
    place.put_build(build, id).await.expect("a build");
    let span = tracing::info_span!(target: "gantry", "caller");
    rpc::trace::continue_from(&span, &format!("00-{trace}-00f067aa0ba902b7-01"));
    let spec = pb::WorkloadSpec { build_id: build.to_string(), ..spec() };
    scheduler.submit_as(id, spec).instrument(span).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    store.stop().await;
    place.remove_socket();
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    scheduler.wait_for(id, pb::WorkloadState::Settling).await;
    scheduler.stop().await;
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    scheduler.finished(id).await;

    let names = until("the spans of the settlement", async || {
        let names: Vec<_> = spans.of_trace(&trace).into_iter().map(|span| span.name).collect();
        let settled = names.iter().any(|name| name.ends_with("Pins/Settle"));
        (settled && names.iter().any(|name| name == "settle")).then_some(names)
    })
    .await;
    assert!(names.iter().any(|name| name.ends_with("Workloads/Submit")), "{names:?}");
    scheduler.stop().await;
    store.stop().await;
}
