//! A cluster with any number of workers, each behind a separate link.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::{ArtifactId, Digest, WorkerId};
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts as store;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::replicas_client::ReplicasClient;
use rpc::pb::runtime as runtime_pb;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_request::Message as Write;
use rpc::pb::runtime::write_response::Message as Wrote;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::{
    Access, ExplainRequest, GetWorkerRequest, HostImage, Image, Input, IssueTicketRequest,
    IssueTicketResponse, Network, OutputMode, Privilege, StdinMode, TicketOperation, WorkloadKind,
    WorkloadSpec, explain_request, image,
};
use rpc::pb::streamer as pb;
use rpc::pb::streamer::evacuate_worker_response::Message as EvacuateMessage;
use rpc::pb::streamer::materialize_response::Message as CopyMessage;
use rpc::pb::streamer::streamer_client::StreamerClient;
use rpc::pb::streamer::upload_request::Message as UploadMessage;
use rpc::pb::streamer::upload_response::Message as Answer;
use rpc::{Peer, Refusal};
use runtime_gateway::host::{HostConfig, HostRuntime, Permission, Policy};
use server::{Host, Listener};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::TIMEOUT;
use super::proxy::Link;

pub(crate) const TEAM: &str = "main";
/// The cluster token, which all callers present.
pub(crate) const TOKEN: &str = "of-the-cluster";

pub(crate) fn may_be_a_worker() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not applicable: this process is not root");
    }
    root
}

/// Waits for a condition, and returns its value.
pub(crate) async fn until<T>(what: &str, condition: impl AsyncFn() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = condition().await {
            return found;
        }
        assert!(Instant::now() < deadline, "timeout: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Some services at one address.
pub(crate) struct TestServer {
    pub(crate) endpoint: String,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl TestServer {
    #[expect(clippy::disallowed_methods, reason = "the suite waits for it when it stops")]
    pub(crate) fn start(host: Host, listener: Listener) -> Self {
        let endpoint = listener.endpoint().expect("its address");
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(host.serve([listener], async {
            stopped.await.ok();
        }));
        Self { endpoint, stop, served }
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).expect("it serves");
        self.served.await.expect("no panic").expect("an orderly end");
    }
}

pub(crate) async fn listen() -> Listener {
    Listener::Tcp(TcpListener::bind("127.0.0.1:0").await.expect("a port"))
}

fn client(endpoint: &str) -> Peer {
    peer(endpoint, Outgoing::default().with_token(Some(TOKEN))).expect("an address")
}

fn host() -> Host {
    Host::new().with_token(Some(TOKEN.to_owned()))
}

struct Worker {
    name: String,
    machine: Arc<HostRuntime>,
    link: Link,
    served: TestServer,
}

pub(crate) struct Suite {
    directory: TempDir,
    core: TestServer,
    workers: HashMap<WorkerId, Worker>,
}

/// The result of a copy to a worker.
#[derive(Debug)]
pub(crate) struct CopyResult {
    pub(crate) volume: String,
    pub(crate) progress: Option<pb::TransferProgress>,
    /// Progress messages before the result.
    pub(crate) updates: Vec<pb::TransferProgress>,
}

impl Suite {
    pub(crate) async fn start() -> Self {
        Self::start_with_claims_of(Duration::from_secs(60)).await
    }

    pub(crate) async fn start_with_claims_of(claim_term: Duration) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let listener = listen().await;
        let endpoint = listener.endpoint().expect("its address");
        let database = |name: &str| format!("sqlite://{}/{name}.db", directory.path().display());
        let (mut host, token) = (host(), Some(TOKEN.to_owned()));
        let scheduler = scheduler::Config::new(database("scheduler"), endpoint.clone());
        let scheduler = scheduler::Config { token: token.clone(), ..scheduler };
        scheduler::start(scheduler, &mut host).await.expect("a scheduler");
        let keys = artifact_store::KeySource::Scheduler(endpoint.clone());
        let store = artifact_store::Config::new(database("store"), keys);
        let store = artifact_store::Config { claim_term, token, ..store };
        artifact_store::start(store, &mut host).await.expect("an artifact store");
        streamer::start(&streamer_config(&endpoint), &mut host).expect("a streamer");
        Self { directory, core: TestServer::start(host, listener), workers: HashMap::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Adds a worker with its own gateway.
    pub(crate) async fn add_worker(&mut self, name: &str) -> WorkerId {
        self.add_worker_in("", name).await
    }

    /// Adds a worker of a zone.
    pub(crate) async fn add_worker_in(&mut self, zone: &str, name: &str) -> WorkerId {
        let at = |what: &str| self.path(&format!("{name}-{what}"));
        let config = HostConfig {
            policy: Policy::allowing([Permission::HostImage]),
            ..HostConfig::new(at("state"), at("run")).expect("the path of this test")
        };
        let machine = HostRuntime::open(config).expect("this machine as a worker");
        let listener = listen().await;
        let address = listener.endpoint().expect("its address");
        let link = Link::to(address.trim_start_matches("http://").to_owned()).await;
        let config = runtime_gateway::Config {
            platform: "linux".to_owned(),
            worker_name: name.to_owned(),
            tags: Vec::new(),
            team: None,
            amounts: runtime_gateway::Amounts::default(),
            zone: zone.to_owned(),
            ephemeral: false,
            endpoint: link.endpoint.clone(),
            scheduler: self.core.endpoint.clone(),
            artifact_store: self.core.endpoint.clone(),
            streamer: self.core.endpoint.clone(),
            token: Some(TOKEN.to_owned()),
            manifest_dir: at("manifests"),
            report_interval: Duration::from_secs(60),
            scrub_bytes_per_second: 0,
            destroy_concurrency: 4,
            intervals: runtime_gateway::Intervals::default(),
            hold_destruction: false,
        };
        let mut host = host();
        runtime_gateway::start([(config, machine.clone() as _)], &mut host).await.expect("a gateway");
        let served = TestServer::start(host, listener);
        let scheduler = WorkersClient::new(client(&self.core.endpoint));
        let id = until("the worker is in contact", async || {
            let request = GetWorkerRequest { worker: name.to_owned() };
            let found = scheduler.clone().get_worker(request).await.ok()?.into_inner().worker?;
            found.worker_id.parse::<WorkerId>().ok()
        })
        .await;
        self.workers.insert(id, Worker { name: name.to_owned(), machine, link, served });
        id
    }

    /// Returns the link to the gateway of a worker.
    pub(crate) fn link(&self, worker: WorkerId) -> &Link {
        &self.workers[&worker].link
    }

    /// Returns the directory of a volume on a worker.
    pub(crate) fn volume(&self, worker: WorkerId, volume: &str) -> PathBuf {
        self.volumes_of(worker).join(volume).join("contents")
    }

    fn volumes_of(&self, worker: WorkerId) -> PathBuf {
        self.path(&format!("{}-state", self.workers[&worker].name)).join("volumes")
    }

    pub(crate) fn delete_volume(&self, worker: WorkerId, volume: &str) {
        std::fs::remove_dir_all(self.volumes_of(worker).join(volume)).expect("remove");
        let manifests = self.path(&format!("{}-manifests", self.workers[&worker].name));
        std::fs::remove_file(manifests.join(volume)).expect("remove");
    }

    /// Plans a transfer to a worker, and returns a ticket to write its volume.
    pub(crate) async fn planned(&self, worker: WorkerId) -> IssueTicketResponse {
        let artifact = ArtifactId::new();
        let create = store::CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: TEAM.to_owned(),
            ..store::CreateArtifactRequest::default()
        };
        let created = ArtifactsClient::new(client(&self.core.endpoint)).create_artifact(create).await;
        created.expect("created");
        let plan = store::PlanReplicaRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            transfer_id: domain::TransferId::new().to_string(),
        };
        let planned = ReplicasClient::new(client(&self.core.endpoint)).plan_replica(plan).await;
        let volume = planned.expect("planned").into_inner().volume_handle;
        self.ticket(worker, &volume, TicketOperation::Write).await
    }

    /// Returns a ticket for one transfer with the gateway of a worker.
    pub(crate) async fn ticket(
        &self,
        worker: WorkerId,
        volume: &str,
        operation: TicketOperation,
    ) -> IssueTicketResponse {
        self.try_ticket(worker, volume, operation).await.expect("a ticket")
    }

    pub(crate) async fn try_ticket(
        &self,
        worker: WorkerId,
        volume: &str,
        operation: TicketOperation,
    ) -> Result<IssueTicketResponse, Refusal> {
        let request = IssueTicketRequest {
            team: TEAM.to_owned(),
            worker_id: worker.to_string(),
            volume_handle: volume.to_owned(),
            operation: operation.into(),
        };
        let issued = WorkersClient::new(client(&self.core.endpoint)).issue_ticket(request).await;
        Ok(issued?.into_inner())
    }

    /// Explains the placement of a workload that reads `artifact`. Returns the feasible workers in
    /// ranking order, with their ranking.
    pub(crate) async fn explain_reading(&self, artifact: ArtifactId) -> Vec<(String, String)> {
        let spec = WorkloadSpec {
            team: TEAM.to_owned(),
            kind: WorkloadKind::Task.into(),
            image: Some(Image { source: Some(image::Source::Host(HostImage {})), entrypoint: None }),
            command: vec!["true".into()],
            stdin: StdinMode::None.into(),
            output: OutputMode::Spooled.into(),
            inputs: vec![Input {
                name: "in".to_owned(),
                artifact_id: artifact.to_string(),
                path: "".into(),
                access: Access::ReadOnly.into(),
            }],
            privilege: Privilege::Confined.into(),
            network: Network::Private.into(),
            ..WorkloadSpec::default()
        };
        let request =
            ExplainRequest { subject: Some(explain_request::Subject::Spec(spec)), ..Default::default() };
        let explained = PlacementsClient::new(client(&self.core.endpoint)).explain(request).await;
        let workers = explained.expect("explained").into_inner().workers.into_iter();
        workers.map(|worker| (worker.worker_name, worker.standing)).collect()
    }

    fn streamer(&self) -> StreamerClient<Peer> {
        StreamerClient::new(client(&self.core.endpoint))
    }

    /// Uploads a directory to a worker that the scheduler chooses.
    pub(crate) async fn upload(&self, root: &Path) -> (ArtifactId, Digest) {
        self.upload_to(root, &[]).await
    }

    /// Uploads a directory to a worker that is not in `avoid`.
    pub(crate) async fn upload_avoiding(&self, root: &Path, avoid: &[WorkerId]) -> ArtifactId {
        let avoid: Vec<_> = avoid.iter().map(ToString::to_string).collect();
        self.upload_to(root, &avoid).await.0
    }

    async fn upload_to(&self, root: &Path, avoid: &[String]) -> (ArtifactId, Digest) {
        let scanned = transfer::scan(root, &transfer::ScanOptions::default(), None).expect("a manifest");
        let (manifest, artifact) = (Arc::new(scanned.manifest), ArtifactId::new());
        let digest = manifest.tree_digest();
        let (sender, mut answers, answer) = self.open(artifact, digest, avoid).await;
        let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
        write(&endpoint, root, manifest).await;
        let commit = pb::UploadCommit { digest: digest.as_bytes().to_vec().into() };
        sender
            .send(pb::UploadRequest { message: Some(UploadMessage::Commit(commit)) })
            .await
            .expect("a stream");
        let answer = answers.message().await.expect("no error").and_then(|answer| answer.message);
        assert!(matches!(answer, Some(Answer::Uploaded(_))), "{answer:?}");
        (artifact, digest)
    }

    /// Creates an artifact of a small tree, which needs no worker.
    pub(crate) async fn create_small_tree(&self, tree: store::SmallTree) -> (ArtifactId, Digest) {
        let artifact = ArtifactId::new();
        let request = store::CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: TEAM.to_owned(),
            tree: Some(tree),
            ..Default::default()
        };
        let created = ArtifactsClient::new(client(&self.core.endpoint)).create_artifact(request).await;
        let digest = created.expect("created").into_inner().digest;
        (artifact, digest.as_ref().try_into().expect("a digest"))
    }

    /// Opens an upload, and returns the first answer.
    async fn open(
        &self,
        artifact: ArtifactId,
        digest: Digest,
        avoid: &[String],
    ) -> (mpsc::Sender<pb::UploadRequest>, Streaming<pb::UploadResponse>, Answer) {
        let (sender, requests) = mpsc::channel(4);
        let open = pb::UploadOpen {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            digest: digest.as_bytes().to_vec().into(),
            build_id: String::new(),
            label: "tree".to_owned(),
            avoid_worker_ids: avoid.to_vec(),
        };
        sender.send(pb::UploadRequest { message: Some(UploadMessage::Open(open)) }).await.expect("a stream");
        let mut answers =
            self.streamer().upload(ReceiverStream::new(requests)).await.expect("opened").into_inner();
        let answer = answers.message().await.expect("no error").and_then(|answer| answer.message);
        (sender, answers, answer.expect("an answer"))
    }

    /// Returns the artifact that already has these bytes, if an upload need not send them.
    pub(crate) async fn uploaded_artifact(&self, digest: Digest) -> Option<ArtifactId> {
        match self.open(ArtifactId::new(), digest, &[]).await.2 {
            Answer::Uploaded(uploaded) => Some(uploaded.artifact_id.parse().expect("an id")),
            Answer::Endpoint(_) => None,
        }
    }

    /// Returns the worker that receives a new tree.
    pub(crate) async fn worker_for_upload(&self, avoid: WorkerId) -> WorkerId {
        let digest = Digest([9; 32]);
        match self.open(ArtifactId::new(), digest, &[avoid.to_string()]).await.2 {
            Answer::Endpoint(endpoint) => endpoint.worker_id.parse().expect("an id"),
            Answer::Uploaded(uploaded) => panic!("an unexpected artifact: {uploaded:?}"),
        }
    }

    /// Stops the gateway of a worker. The worker's disk is kept.
    pub(crate) async fn remove_worker(&mut self, worker: WorkerId) {
        let worker = self.workers.remove(&worker).expect("the worker exists");
        worker.served.stop().await;
        worker.machine.unmount_idle().expect("unmount");
    }

    pub(crate) async fn begin(
        &self,
        artifact: ArtifactId,
        worker: WorkerId,
    ) -> Streaming<pb::MaterializeResponse> {
        begin(self.streamer(), artifact, worker).await
    }

    /// Waits for the result of a copy.
    pub(crate) fn copy_result(
        &self,
        answers: Streaming<pb::MaterializeResponse>,
    ) -> impl Future<Output = Result<CopyResult, Refusal>> + use<> {
        copy_result(answers)
    }

    pub(crate) async fn materialize(
        &self,
        artifact: ArtifactId,
        worker: WorkerId,
    ) -> Result<CopyResult, Refusal> {
        copy_result(self.begin(artifact, worker).await).await
    }

    pub(crate) async fn materialize_under(
        &self,
        artifact: ArtifactId,
        worker: WorkerId,
        lease_token: &str,
    ) -> Result<CopyResult, Refusal> {
        let request = pb::MaterializeRequest {
            lease_token: lease_token.to_owned(),
            ..materialize_request(artifact, worker)
        };
        copy_result(self.streamer().materialize(request).await?.into_inner()).await
    }

    pub(crate) async fn begin_evacuation(
        &self,
        worker: &str,
        deadline: Option<prost_types::Duration>,
    ) -> Result<Streaming<pb::EvacuateWorkerResponse>, Refusal> {
        let request = pb::EvacuateWorkerRequest { worker: worker.to_owned(), deadline };
        Ok(self.streamer().evacuate_worker(request).await?.into_inner())
    }

    /// Evacuates a worker. Returns the progress and the result.
    pub(crate) async fn evacuate(
        &self,
        worker: &str,
        deadline: Option<Duration>,
    ) -> Result<(Vec<pb::EvacuationProgress>, pb::Evacuated), Refusal> {
        let mut answers = self.begin_evacuation(worker, deadline.map(rpc::duration)).await?;
        let mut progress = Vec::new();
        while let Some(answer) = answers.message().await? {
            match answer.message.expect("a message") {
                EvacuateMessage::Progress(now) => progress.push(now),
                EvacuateMessage::Evacuated(evacuated) => return Ok((progress, evacuated)),
            }
        }
        panic!("the stream ended without `evacuated`");
    }

    pub(crate) async fn transfers(&self) -> Vec<pb::Transfer> {
        let listed = self.streamer().list_transfers(pb::ListTransfersRequest {}).await;
        listed.expect("listed").into_inner().transfers
    }

    /// Returns the pairs of workers whose copies pass through the streamer.
    pub(crate) async fn relayed_pairs(&self) -> Vec<pb::RelayedPair> {
        let listed = self.streamer().list_transfers(pb::ListTransfersRequest {}).await;
        listed.expect("listed").into_inner().relayed_pairs
    }

    /// Returns the gateway for a download that avoids these gateways.
    pub(crate) async fn read_at(&self, artifact: ArtifactId, avoid: &[String]) -> String {
        let request = pb::DownloadRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            avoid_gateway_endpoints: avoid.to_vec(),
        };
        let found = self.streamer().download(request).await.expect("found").into_inner();
        found.endpoint.expect("where to read").gateway_endpoint
    }

    pub(crate) async fn cancel(&self, transfer: &str) {
        let request = pb::CancelTransferRequest { transfer_id: transfer.to_owned() };
        self.streamer().cancel_transfer(request).await.expect("cancelled");
    }

    pub(crate) async fn replicas(&self, artifact: ArtifactId) -> Vec<store::Replica> {
        let request =
            store::LocateRequest { team: TEAM.to_owned(), artifact_ids: vec![artifact.to_string()] };
        let located = ArtifactsClient::new(client(&self.core.endpoint)).locate(request).await;
        located.expect("located").into_inner().locations.remove(0).replicas
    }

    /// Returns the number of volumes of a worker in the inventory.
    pub(crate) async fn volumes_on(&self, worker: WorkerId) -> usize {
        self.volume_handles(worker).await.len()
    }

    /// Returns the handles of the volumes of a worker in the inventory.
    pub(crate) async fn volume_handles(&self, worker: WorkerId) -> Vec<String> {
        let request = store::ListVolumesRequest {
            worker_id: worker.to_string(),
            ..store::ListVolumesRequest::default()
        };
        let listed = InventoryClient::new(client(&self.core.endpoint)).list_volumes(request).await;
        let listed = listed.expect("listed").into_inner().volumes.into_iter();
        listed.map(|volume| volume.volume_handle).collect()
    }

    /// Waits until a worker has no volume in the inventory and on its disk.
    pub(crate) async fn wait_until_empty(&self, worker: WorkerId) {
        until("nothing is left", async || {
            let known = self.volumes_on(worker).await;
            let there = std::fs::read_dir(self.volumes_of(worker)).map(|names| names.flatten().count());
            (known == 0 && there.unwrap_or(0) == 0).then_some(())
        })
        .await;
    }

    /// Starts a second streamer, which can be killed.
    pub(crate) async fn another_streamer(&self) -> OtherStreamer {
        OtherStreamer::start(&self.core.endpoint).await
    }

    pub(crate) async fn stop(self) {
        for (_, worker) in self.workers {
            worker.link.open();
            worker.served.stop().await;
            worker.machine.unmount_idle().expect("unmount");
        }
        self.core.stop().await;
        self.directory.close().expect("everything can be removed");
    }
}

/// A streamer in its own Tokio runtime, which simulates a separate process.
pub(crate) struct OtherStreamer {
    endpoint: String,
    runtime: Option<tokio::runtime::Runtime>,
}

impl OtherStreamer {
    async fn start(core: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a tokio runtime");
        let (listening, endpoint) = oneshot::channel();
        let config = streamer_config(core);
        runtime.spawn(async move {
            let listener = listen().await;
            listening.send(listener.endpoint().expect("its address")).expect("the test waits");
            streamer::serve(config, listener, std::future::pending()).await
        });
        Self { endpoint: endpoint.await.expect("it listens"), runtime: Some(runtime) }
    }

    pub(crate) async fn begin(
        &self,
        artifact: ArtifactId,
        worker: WorkerId,
    ) -> Streaming<pb::MaterializeResponse> {
        begin(StreamerClient::new(client(&self.endpoint)), artifact, worker).await
    }

    /// Stops all tasks of the streamer at once.
    pub(crate) fn kill(self) {
        drop(self);
    }
}

impl Drop for OtherStreamer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn streamer_config(core: &str) -> streamer::Config {
    let token = Some(TOKEN.to_owned());
    streamer::Config {
        scheduler: core.to_owned(),
        artifact_store: core.to_owned(),
        token,
        images: streamer::ImageArgs::default(),
    }
}

fn materialize_request(artifact: ArtifactId, worker: WorkerId) -> pb::MaterializeRequest {
    pb::MaterializeRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        worker_id: worker.to_string(),
        lease_token: String::new(),
    }
}

async fn begin(
    mut streamer: StreamerClient<Peer>,
    artifact: ArtifactId,
    worker: WorkerId,
) -> Streaming<pb::MaterializeResponse> {
    streamer.materialize(materialize_request(artifact, worker)).await.expect("it listens").into_inner()
}

async fn copy_result(mut answers: Streaming<pb::MaterializeResponse>) -> Result<CopyResult, Refusal> {
    let mut updates = Vec::new();
    let last = async {
        while let Some(answer) = answers.message().await? {
            match answer.message.expect("a message") {
                CopyMessage::Progress(progress) => updates.push(progress),
                CopyMessage::Materialized(materialized) => return Ok(materialized),
            }
        }
        panic!("the stream ended without `materialized`");
    };
    let materialized: Result<pb::Materialized, Refusal> =
        tokio::time::timeout(TIMEOUT, last).await.expect("an end in time");
    let materialized = materialized?;
    Ok(CopyResult { volume: materialized.volume_handle, progress: materialized.progress, updates })
}

/// Writes the missing extents of a tree to the gateway that the streamer named.
async fn write(endpoint: &pb::TransferEndpoint, root: &Path, manifest: Arc<transfer::Manifest>) {
    let (sender, requests) = mpsc::channel(16);
    let send = |message| sender.send(runtime_pb::WriteRequest { message: Some(message) });
    send(Write::Open(runtime_pb::WriteOpen { ticket: endpoint.ticket.clone() })).await.expect("a stream");
    for part in rpc::tree::manifest_parts(&manifest) {
        send(Write::Manifest(part)).await.expect("a stream");
    }
    send(Write::ManifestEnd(rpc::tree::manifest_end(&manifest))).await.expect("a stream");
    let mut gateway = VolumesClient::new(client(&endpoint.gateway_endpoint));
    let mut answers = gateway.write(ReceiverStream::new(requests)).await.expect("opened").into_inner();
    let mut missing = transfer::OrdinalRanges::new();
    loop {
        match answers.message().await.expect("no error").and_then(|answer| answer.message) {
            Some(Wrote::Missing(runs)) => rpc::tree::push_runs(&mut missing, &runs).expect("ascending"),
            Some(Wrote::MissingEnd(_)) => break,
            other => panic!("unexpected: {other:?}"),
        }
    }
    let options = transfer::ReadOptions::default();
    let mut reader = transfer::TreeReader::new(root, manifest, options).expect("a reader");
    for ordinal in missing.ordinals() {
        let data = reader.read(ordinal).expect("content");
        let extents = vec![runtime_pb::ExtentData { ordinal, data }];
        send(Write::Chunk(runtime_pb::Chunk { extents })).await.expect("a stream");
    }
    send(Write::Commit(runtime_pb::WriteCommit {})).await.expect("a stream");
    while let Some(answer) = answers.message().await.expect("no error") {
        if let Some(Wrote::Committed(_)) = answer.message {
            return;
        }
    }
    panic!("the stream ended without `committed`");
}
