//! State of the cluster before the invalid requests.

use domain::{ArtifactId, AttemptId, BuildId, LeaseId, VolumeHandle, WorkerId, WorkloadId};
use rpc::pb::artifacts as store;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::owners_client::OwnersClient;
use rpc::pb::artifacts::pins_client::PinsClient;
use rpc::pb::scheduler as pb;
use rpc::{Reason, Refusal};

use super::{OTHER, TEAM};
use crate::store::{Place, credential};
use crate::support::{Gateway, Running, finish, registration, spec, start, until};

/// Workers, workloads and leases in every state that a request may refer to.
pub(super) struct World<'a> {
    pub(super) scheduler: &'a Running,
    /// Connected worker for all teams. Most test data is on this worker, including a last replica.
    pub(super) one: Gateway,
    /// First message of the last gateway of a worker, which has disconnected, and of the gateway
    /// before.
    pub(super) two: pb::Registration,
    pub(super) two_before: pb::Registration,
    /// Worker of another team.
    pub(super) theirs: pb::Registration,
    /// Worker without a protocol version that the scheduler supports.
    pub(super) old: pb::Registration,
    pub(super) retired: pb::Registration,
    /// Id of a pruned worker.
    pub(super) pruned: String,
    /// Worker that is out of contact and has a last replica.
    pub(super) away: pb::Welcome,
    /// Connected worker with a driven lease.
    _three: Gateway,

    pub(super) sealed: ArtifactId,
    /// Volume handle of the replica of `sealed`.
    pub(super) replica: String,
    pub(super) open: ArtifactId,
    pub(super) foreign_artifact: ArtifactId,
    pub(super) build: BuildId,
    pub(super) ended_build: BuildId,
    pub(super) foreign_build: BuildId,
    pub(super) cache: String,
    pub(super) foreign_cache: String,

    pub(super) finished: WorkloadId,
    pub(super) running: WorkloadId,
    pub(super) running_token: String,
    pub(super) running_lease: String,
    /// Waiting workload.
    pub(super) pending: WorkloadId,
    /// Workload of another team that uses an artifact.
    pub(super) foreign_workload: WorkloadId,
    /// Workload that only the artifact store remembers.
    pub(super) forgotten: WorkloadId,
    /// Tokens of attempts that were placed and have not started.
    pub(super) attempts: Vec<String>,
    /// Tokens of attempts: one has ended, one was lost with its worker, and one must stop.
    pub(super) reported_token: String,
    pub(super) lost_token: String,
    pub(super) stopping_token: String,

    /// Request of a live driven lease.
    pub(super) driven: pb::PlaceRequest,
    pub(super) driven_token: String,
    /// Artifact with a candidate under the driven lease.
    pub(super) candidate: ArtifactId,
    /// Digest of the candidate.
    pub(super) digest: Vec<u8>,
    /// Token of a lease for a transfer.
    pub(super) transfer_token: String,
    pub(super) released: LeaseId,
    pub(super) released_token: String,
    /// Token of a lease on a pruned worker.
    pub(super) pruned_token: String,
    /// Lease of another team that uses an artifact.
    pub(super) foreign_lease: LeaseId,
}

/// Worker with every capability.
fn able(name: &str) -> pb::Registration {
    let capabilities = [
        "privileged",
        "limits-memory",
        "limits-cpu",
        "limits-pids",
        "limits-disk",
        "network-none",
        "network-private",
        "services",
        "network-container",
        "stop-after",
        "terminal",
        "owned-mounts",
        "replaceable-outputs",
        "durable-output",
        "held-output",
        "complete-output",
        "durable-input",
        "binary-input",
        "signals",
        "exit-signals",
        "ends-whole",
        "image-checks",
        "exact-environment",
        "peer-to-peer",
    ];
    let git = pb::ResourceType { name: "git".to_owned(), version: "1".to_owned() };
    let labels = pb::WorkerLabels {
        platform: "linux".to_owned(),
        image_kinds: ["host", "artifact", "resource-type"].map(str::to_owned).into(),
        capabilities: capabilities.map(str::to_owned).into(),
        resource_types: vec![git],
        ..pb::WorkerLabels::default()
    };
    pb::Registration { labels: Some(labels), capacity: Some(pb::Capacity::default()), ..registration(name) }
}

/// Worker that accepts only requests with its tag.
fn tagged(name: &str) -> pb::Registration {
    let labels = able(name).labels.expect("labels");
    pb::Registration {
        labels: Some(pb::WorkerLabels { tags: vec![name.to_owned()], ..labels }),
        ..able(name)
    }
}

/// Request for a task on the worker with this tag.
fn lease_on(tag: &str) -> pb::PlaceRequest {
    pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: TEAM.to_owned(),
        kind: pb::PlacementKind::Task.into(),
        tags: Some(tag).filter(|tag| !tag.is_empty()).map(str::to_owned).into_iter().collect(),
        ..pb::PlaceRequest::default()
    }
}

async fn place(scheduler: &Running, request: &pb::PlaceRequest) -> String {
    let placed = scheduler.placements().place(request.clone()).await.expect("granted");
    placed.into_inner().lease_token
}

/// Connects and disconnects a gateway.
async fn connect_and_leave(scheduler: &Running, registration: pb::Registration) -> pb::Welcome {
    let gateway = Gateway::connect(scheduler, registration).await.expect("welcome");
    let welcome = gateway.welcome.clone();
    gateway.leave().await;
    welcome
}

/// Reports an orphan: a volume that the artifact store does not know.
async fn orphan(place: &Place, worker: WorkerId) -> Result<(), Refusal> {
    use store::report_request::Message;
    let (mut inventory, session_credential) = (InventoryClient::new(place.peer()), credential(worker));
    let begin =
        store::BeginReportRequest { session_credential: session_credential.clone(), ..Default::default() };
    let token = inventory.begin_report(begin).await?.into_inner().token;
    let holdings = store::Holdings {
        volume_handles: vec![VolumeHandle::new().to_string()],
        container_handles: Vec::new(),
    };
    let messages = [
        Message::Open(store::ReportOpen { session_credential, token, worker_life: String::new() }),
        Message::Holdings(holdings),
        Message::Commit(store::ReportCommit { count: 1 }),
    ];
    let messages = messages.map(|message| store::ReportRequest { message: Some(message) });
    inventory.report(tokio_stream::iter(messages)).await?;
    Ok(())
}

/// Creates a workload that has ended and is unknown to the scheduler.
async fn settled(place: &Place) -> WorkloadId {
    let holder = WorkloadId::new();
    let request = store::SettleRequest {
        holder_id: holder.to_string(),
        team: TEAM.to_owned(),
        status: store::BuildStatus::Succeeded.into(),
        ..store::SettleRequest::default()
    };
    PinsClient::new(place.peer()).settle(request).await.expect("settled");
    holder
}

async fn task_cache(place: &Place, team: &str) -> String {
    let request = store::FindOrCreateTaskCacheRequest {
        team: team.to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: "/cache".to_owned(),
        ttl: None,
    };
    let answer = CachesClient::new(place.peer()).find_or_create_task_cache(request).await.expect("asked");
    answer.into_inner().cache_id
}

impl<'a> World<'a> {
    pub(super) async fn new(scheduler: &'a Running, at: &Place) -> Self {
        let one = Gateway::connect(scheduler, able("one")).await.expect("welcome");
        let here: WorkerId = one.welcome.worker_id.parse().expect("an id");
        let sealed = at.upload_of(TEAM, here).await.expect("uploaded");
        let replica = at.replicas(sealed).await.expect("located").remove(0).volume_handle;
        let foreign_artifact = at.upload_of(OTHER, WorkerId::new()).await.expect("uploaded");
        let open = ArtifactId::new();
        let create = store::CreateArtifactRequest {
            artifact_id: open.to_string(),
            team: TEAM.to_owned(),
            ..store::CreateArtifactRequest::default()
        };
        ArtifactsClient::new(at.peer()).create_artifact(create).await.expect("created");
        let (build, ended_build, foreign_build) = (BuildId::new(), BuildId::new(), BuildId::new());
        for (team, build) in [(TEAM, build), (TEAM, ended_build), (OTHER, foreign_build)] {
            at.put_build_of(team, build, WorkloadId::new()).await.expect("put");
        }
        let end = store::DeleteBuildRequest { build_id: ended_build.to_string(), team: TEAM.to_owned() };
        OwnersClient::new(at.peer()).delete_build(end).await.expect("ended");
        let (cache, foreign_cache) = (task_cache(at, TEAM).await, task_cache(at, OTHER).await);

        let workers = Workers::new(scheduler, at).await;
        let mut world = Self {
            scheduler,
            one,
            two: workers.two,
            two_before: workers.two_before,
            theirs: workers.theirs,
            old: workers.old,
            retired: workers.retired,
            pruned: workers.pruned,
            away: workers.away,
            _three: workers.three,
            sealed,
            replica,
            open,
            foreign_artifact,
            build,
            ended_build,
            foreign_build,
            cache,
            foreign_cache,
            finished: WorkloadId::new(),
            running: WorkloadId::new(),
            running_token: String::new(),
            running_lease: String::new(),
            pending: workers.pending,
            foreign_workload: WorkloadId::new(),
            forgotten: settled(at).await,
            attempts: Vec::new(),
            reported_token: String::new(),
            lost_token: workers.lost_token,
            stopping_token: String::new(),
            driven: lease_on(""),
            driven_token: String::new(),
            candidate: ArtifactId::new(),
            digest: Vec::new(),
            transfer_token: String::new(),
            released: LeaseId::new(),
            released_token: String::new(),
            pruned_token: workers.pruned_token,
            foreign_lease: LeaseId::new(),
        };
        world.submit().await;
        world.place(at).await;
        world
    }

    async fn attempt(&mut self, id: WorkloadId, spec: pb::WorkloadSpec) -> (String, pb::RunAttempt) {
        self.scheduler.submit_as(id, spec).await.expect("accepted");
        self.one.run(id).await
    }

    async fn submit(&mut self) {
        let scheduler = self.scheduler;
        let (_, run) = self.attempt(self.finished, spec()).await;
        start(scheduler, &run.lease_token).await.expect("started");
        finish(scheduler, &run.lease_token, 0).await.expect("finished");
        scheduler.finished(self.finished).await;
        self.reported_token = run.lease_token;
        let (lease, run) = self.attempt(self.running, spec()).await;
        start(scheduler, &run.lease_token).await.expect("started");
        (self.running_lease, self.running_token) = (lease, run.lease_token);
        let input = pb::Input {
            name: "in".to_owned(),
            artifact_id: self.foreign_artifact.to_string(),
            path: bytes::Bytes::new(),
            access: pb::Access::ReadOnly.into(),
        };
        let theirs = pb::WorkloadSpec { team: OTHER.to_owned(), inputs: vec![input], ..spec() };
        self.attempt(self.foreign_workload, theirs).await;
        let stopping = WorkloadId::new();
        let (_, run) = self.attempt(stopping, spec()).await;
        scheduler.cancel(stopping, std::time::Duration::from_secs(10)).await;
        self.stopping_token = run.lease_token;
        for _ in 0..20 {
            let (_, run) = self.attempt(WorkloadId::new(), spec()).await;
            self.attempts.push(run.lease_token);
        }
    }

    async fn place(&mut self, at: &Place) {
        let scheduler = self.scheduler;
        self.driven.owner = "owner".to_owned();
        self.driven_token = place(scheduler, &self.driven).await;
        let holder = self.driven.lease_id.parse().expect("an id");
        let candidate = at.candidate(holder, &AttemptId::new().to_string(), self.candidate).await;
        self.digest = candidate.expect("a candidate");
        let kind = pb::PlacementKind::Transfer.into();
        self.transfer_token = place(scheduler, &pb::PlaceRequest { kind, ..lease_on("") }).await;
        let released = pb::PlaceRequest { lease_id: self.released.to_string(), ..lease_on("") };
        self.released_token = place(scheduler, &released).await;
        let release = pb::ReleaseRequest { lease_token: self.released_token.clone(), settlement: None };
        scheduler.placements().release(release).await.expect("released");
        let theirs = pb::PlaceRequest {
            lease_id: self.foreign_lease.to_string(),
            team: OTHER.to_owned(),
            artifact_ids: vec![self.foreign_artifact.to_string()],
            ..lease_on("")
        };
        place(scheduler, &theirs).await;
    }
}

/// Workers of the test and data of removed workers.
struct Workers {
    two: pb::Registration,
    two_before: pb::Registration,
    theirs: pb::Registration,
    old: pb::Registration,
    retired: pb::Registration,
    pruned: String,
    away: pb::Welcome,
    three: Gateway,
    pending: WorkloadId,
    lost_token: String,
    pruned_token: String,
}

impl Workers {
    async fn new(scheduler: &Running, at: &Place) -> Self {
        let mut two_before = tagged("two");
        two_before.session_credential =
            connect_and_leave(scheduler, two_before.clone()).await.session_credential;
        let mut two = pb::Registration { marker: two_before.marker.clone(), ..tagged("two") };
        two.session_credential = connect_and_leave(scheduler, two.clone()).await.session_credential;

        let labels = tagged("theirs").labels.expect("labels");
        let labels = Some(pb::WorkerLabels { team: OTHER.to_owned(), ..labels });
        let theirs = pb::Registration { labels, ..tagged("theirs") };
        connect_and_leave(scheduler, theirs.clone()).await;
        let old = pb::Registration { protocol_versions: vec![2], ..tagged("old") };
        let refused = Gateway::connect(scheduler, old.clone()).await.err().expect("an unsupported protocol");
        assert!(refused.is(Reason::UnsupportedProtocol), "{refused}");
        let retired = tagged("retired");
        connect_and_leave(scheduler, retired.clone()).await;
        let retire = pb::RetireWorkerRequest { worker: "retired".to_owned(), ..Default::default() };
        scheduler.workers().retire_worker(retire).await.expect("retired");
        let away = connect_and_leave(scheduler, tagged("away")).await;
        at.upload_of(TEAM, away.worker_id.parse().expect("an id")).await.expect("uploaded");
        let aside = connect_and_leave(scheduler, tagged("aside")).await;
        orphan(at, aside.worker_id.parse().expect("an id")).await.expect("reported");
        connect_and_leave(scheduler, tagged("doomed")).await;
        let three = Gateway::connect(scheduler, tagged("three")).await.expect("welcome");
        place(scheduler, &lease_on("three")).await;

        // The pruned worker has a lease and an attempt, which is queued again.
        let mut gateway = Gateway::connect(scheduler, tagged("pruned")).await.expect("welcome");
        let pruned = gateway.welcome.worker_id.clone();
        let pruned_token = place(scheduler, &lease_on("pruned")).await;
        let pending = WorkloadId::new();
        let waits = pb::WorkloadSpec { tags: vec!["pruned".to_owned()], ..spec() };
        scheduler.submit_as(pending, waits).await.expect("accepted");
        let (_, run) = gateway.run(pending).await;
        gateway.leave().await;
        let prune = pb::PruneWorkerRequest { worker: "pruned".to_owned(), force: false };
        scheduler.workers().prune_worker(prune).await.expect("pruned");
        scheduler.wait_for(pending, pb::WorkloadState::Pending).await;
        for worker in ["retired", "pruned"] {
            until("the worker has been removed", async || {
                let request = pb::GetWorkerRequest { worker: worker.to_owned() };
                scheduler.workers().get_worker(request).await.err()
            })
            .await;
        }
        Self {
            two,
            two_before,
            theirs,
            old,
            retired,
            pruned,
            away,
            three,
            pending,
            lost_token: run.lease_token,
            pruned_token,
        }
    }
}
