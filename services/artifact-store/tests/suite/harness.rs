//! A store on a loopback port, with clients that act as scheduler, streamer and gateways.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::ops::Deref;
use std::time::Duration;

use artifact_store::{Clock, Config, KeySource};
use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{
    ArtifactId, AttemptId, BuildId, Digest, GatewayInstance, Timestamp, TransferId, WorkerId, WorkloadId,
};
use rpc::client::Outgoing;
use rpc::pb::artifacts as pb;
use rpc::token::TokenSigner;
use rpc::{Peer, Reason, Refusal};
use sea_orm::{ConnectionTrait, Statement};
use testing::databases::TestDatabase;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Streaming;

pub(crate) const TEAM: &str = "main";

/// Maximum time for which a test waits for a condition.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) type Answer<T> = Result<T, Refusal>;

/// A running store.
pub(crate) struct Suite {
    pub(crate) clock: Clock,
    callers: Callers,
    database: TestDatabase,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Deref for Suite {
    type Target = Callers;

    fn deref(&self) -> &Callers {
        &self.callers
    }
}

/// Output of a settlement without owners of its own.
pub(crate) fn settled_output((artifact, digest): &(ArtifactId, Digest)) -> pb::SettledOutput {
    pb::SettledOutput {
        artifact_id: artifact.to_string(),
        digest: digest.as_bytes().to_vec().into(),
        label: "out".to_owned(),
        ..Default::default()
    }
}

impl Suite {
    /// Starts a store that deletes garbage at once, and collects only on request.
    pub(crate) async fn start(database: TestDatabase) -> Self {
        Self::start_with(database, |_| {}).await
    }

    pub(crate) async fn start_with(database: TestDatabase, adjust: impl FnOnce(&mut Config)) -> Self {
        let mut config = config(&database.url);
        adjust(&mut config);
        let clock = config.clock.clone();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let listener = server::Listener::InsecureTcp(listener);
        let endpoint = listener.endpoint().expect("its address");
        let (stop, stopped) = oneshot::channel();
        let shutdown = async { stopped.await.unwrap_or(()) };
        #[expect(clippy::disallowed_methods, reason = "the harness waits for it when it stops")]
        let served = tokio::spawn(artifact_store::serve(config, listener, shutdown));
        Self { clock, callers: Callers::at(&endpoint), database, stop, served }
    }

    /// Stops the store, and returns its database.
    pub(crate) async fn stop(self) -> TestDatabase {
        self.stop.send(()).expect("the store runs");
        self.served.await.expect("no panic").expect("the store served");
        queues_are_true(&self.database.url).await;
        self.database
    }

    /// Returns the URL of the database, for changes that no call can make.
    pub(crate) fn url(&self) -> String {
        self.database.url.clone()
    }
}

/// Checks that the queue contains exactly the marked volumes.
async fn queues_are_true(url: &str) {
    const FALSE: &str = "
        SELECT 'volume' AS what FROM volumes v LEFT JOIN sweep_queue m ON m.worker_id = v.worker_id AND m.handle = v.handle
            LEFT JOIN artifacts a ON a.artifact_id = v.artifact_id AND a.state = 'deleting'
            WHERE (v.state = 'destroying') <> (m.handle IS NOT NULL AND m.number IS NULL AND m.marked_at IS NULL)
               OR (v.state = 'sweeping') <> (m.number IS NOT NULL) OR m.number <> v.judged_after
               OR (v.given_up = TRUE AND v.state NOT IN ('destroying', 'sweeping'))
               OR (m.marked_at IS NOT NULL AND (v.purpose <> 'replica' OR v.complete = FALSE))
               OR (m.marked_at IS NOT NULL AND m.number IS NULL AND a.artifact_id IS NULL)
        UNION ALL
        SELECT 'mark' FROM sweep_queue m WHERE NOT EXISTS (SELECT 1 FROM volumes v WHERE v.handle = m.handle)
        UNION ALL
        SELECT 'artifact' FROM artifacts a LEFT JOIN tombstones t ON t.artifact_id = a.artifact_id
            WHERE (a.state = 'deleting') <> (t.artifact_id IS NOT NULL) OR (a.state = 'deleting' AND a.due_at IS NOT NULL)
        UNION ALL
        SELECT 'tombstone' FROM tombstones t WHERE NOT EXISTS (SELECT 1 FROM artifacts a WHERE a.artifact_id = t.artifact_id)";
    let connection = sea_orm::Database::connect(url).await.expect("the database");
    let found = Statement::from_string(connection.get_database_backend(), FALSE);
    let found = connection.query_all_raw(found).await.expect("asked");
    let found: Vec<String> = found.iter().map(|row| row.try_get("", "what").expect("a text")).collect();
    connection.close().await.expect("closed");
    assert!(found.is_empty(), "{} rows and queues do not agree: {:?}", found.len(), found.first());
}

/// Returns a signer of gateway credentials, in place of the scheduler.
fn signer() -> TokenSigner {
    TokenSigner::from_seed(&[7; 32])
}

/// Returns the receipt key of a store.
pub(crate) async fn receipt_key(url: &str) -> [u8; 32] {
    let connection = sea_orm::Database::connect(url).await.expect("the database");
    let asked = Statement::from_string(connection.get_database_backend(), "SELECT receipt_key FROM store");
    let row = connection.query_one_raw(asked).await.expect("asked").expect("a store");
    let key: Vec<u8> = row.try_get("", "receipt_key").expect("a key");
    key.try_into().expect("32 bytes")
}

/// Makes a receipt for a report, as only the store can.
pub(crate) fn receipt(key: &[u8; 32], worker: WorkerId, token: &pb::ReportToken) -> Vec<u8> {
    let life: domain::StoreLife = token.store_life.parse().expect("a life");
    let sequence = token.sequence.to_be_bytes();
    let text = [&worker.uuid().as_bytes()[..], &life.uuid().as_bytes()[..], &sequence].concat();
    blake3::keyed_hash(key, &text).as_bytes().to_vec()
}

pub(crate) fn config(url: &str) -> Config {
    Config {
        // Fixed for the tests, independent of the default.
        claim_term: Duration::from_secs(60),
        gc_grace: Duration::ZERO,
        default_keep: Duration::ZERO,
        tombstone: Duration::ZERO,
        collect_interval: Duration::from_secs(24 * 3600),
        clock: Clock::movable(Timestamp::now()),
        ..Config::new(url, KeySource::Fixed(vec![signer().public()]))
    }
}

/// Clients of a store.
#[derive(Clone)]
pub(crate) struct Callers {
    pub(crate) peer: Peer,
}

impl Callers {
    /// Connects to the store at `endpoint`.
    pub(crate) fn at(endpoint: &str) -> Self {
        Self { peer: rpc::client::peer(endpoint, Outgoing::default()).expect("an address") }
    }

    pub(crate) fn artifacts(&self) -> pb::artifacts_client::ArtifactsClient<Peer> {
        pb::artifacts_client::ArtifactsClient::new(self.peer.clone())
    }

    pub(crate) fn owners(&self) -> pb::owners_client::OwnersClient<Peer> {
        pb::owners_client::OwnersClient::new(self.peer.clone())
    }

    pub(crate) fn pins(&self) -> pb::pins_client::PinsClient<Peer> {
        pb::pins_client::PinsClient::new(self.peer.clone())
    }

    pub(crate) fn replicas(&self) -> pb::replicas_client::ReplicasClient<Peer> {
        pb::replicas_client::ReplicasClient::new(self.peer.clone())
    }

    pub(crate) fn caches(&self) -> pb::caches_client::CachesClient<Peer> {
        pb::caches_client::CachesClient::new(self.peer.clone())
    }

    pub(crate) fn inventory(&self) -> pb::inventory_client::InventoryClient<Peer> {
        pb::inventory_client::InventoryClient::new(self.peer.clone())
    }

    /// Returns a gateway of a new worker that has registered with the store.
    pub(crate) async fn gateway(&self) -> Gateway {
        let gateway = self.silent_gateway(WorkerId::new(), 1, 1);
        gateway.begin_report().await.expect("a new worker may speak");
        gateway
    }

    /// Returns a gateway that has not called the store yet.
    pub(crate) fn silent_gateway(&self, worker: WorkerId, incarnation: u64, session: u64) -> Gateway {
        let claims = SessionClaims {
            worker,
            incarnation: Incarnation(incarnation),
            session: Session(session),
            instance: GatewayInstance::new(),
        };
        let credential = signer().sign(&claims);
        Gateway { worker, credential, life: None, inventory: self.inventory() }
    }

    pub(crate) async fn put_build(
        &self,
        build: BuildId,
        workload: WorkloadId,
        keep: Option<Duration>,
    ) -> Answer<()> {
        let request = pb::PutBuildRequest {
            build_id: build.to_string(),
            team: TEAM.to_owned(),
            ends_with_workload_id: workload.to_string(),
            keep: keep.map(rpc::duration),
            ..Default::default()
        };
        self.owners().put_build(request).await?;
        Ok(())
    }

    pub(crate) async fn delete_build(&self, build: BuildId) -> Answer<()> {
        let request = pb::DeleteBuildRequest { team: TEAM.to_owned(), build_id: build.to_string() };
        self.owners().delete_build(request).await?;
        Ok(())
    }

    pub(crate) async fn create(&self, artifact: ArtifactId, build: Option<BuildId>) -> Answer<()> {
        let request = pb::CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: TEAM.to_owned(),
            build_id: text(build),
            ..Default::default()
        };
        self.artifacts().create_artifact(request).await?;
        Ok(())
    }

    pub(crate) async fn plan(
        &self,
        artifact: ArtifactId,
        worker: WorkerId,
        transfer: TransferId,
    ) -> Answer<String> {
        let request = pb::PlanReplicaRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            transfer_id: transfer.to_string(),
        };
        Ok(self.replicas().plan_replica(request).await?.into_inner().volume_handle)
    }

    pub(crate) async fn seal(&self, artifact: ArtifactId, digest: Digest) -> Answer<pb::Artifact> {
        let request = pb::SealUploadRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            digest: digest.as_bytes().to_vec().into(),
        };
        let answer = self.replicas().seal_upload(request).await?.into_inner();
        Ok(answer.artifact.expect("the artifact"))
    }

    pub(crate) async fn abandon(&self, transfer: TransferId) -> Answer<()> {
        let request = pb::AbandonUploadRequest { transfer_id: transfer.to_string(), team: TEAM.to_owned() };
        self.replicas().abandon_upload(request).await?;
        Ok(())
    }

    /// Uploads an artifact to the gateway's worker. Returns the artifact and its replica.
    pub(crate) async fn upload(
        &self,
        gateway: &Gateway,
        build: Option<BuildId>,
        content: u64,
    ) -> Answer<(ArtifactId, String)> {
        let artifact = ArtifactId::new();
        self.create(artifact, build).await?;
        let handle = self.plan(artifact, gateway.worker, TransferId::new()).await?;
        gateway.complete(&handle, digest(content)).await?;
        self.seal(artifact, digest(content)).await?;
        Ok((artifact, handle))
    }

    pub(crate) async fn adopt(&self, digest: Digest, build: Option<BuildId>) -> Answer<Option<pb::Artifact>> {
        self.adopt_without(digest, build, &[]).await
    }

    /// Adopts by digest, without counting replicas on `without`.
    pub(crate) async fn adopt_without(
        &self,
        digest: Digest,
        build: Option<BuildId>,
        without: &[WorkerId],
    ) -> Answer<Option<pb::Artifact>> {
        let request = pb::AdoptByDigestRequest {
            team: TEAM.to_owned(),
            digest: digest.as_bytes().to_vec().into(),
            build_id: text(build),
            without_worker_ids: without.iter().map(ToString::to_string).collect(),
        };
        Ok(self.artifacts().adopt_by_digest(request).await?.into_inner().artifact)
    }

    pub(crate) async fn get(&self, artifact: ArtifactId) -> Answer<pb::Artifact> {
        let request = pb::GetArtifactRequest { team: TEAM.to_owned(), artifact_id: artifact.to_string() };
        let answer = self.artifacts().get_artifact(request).await?.into_inner();
        Ok(answer.artifact.expect("the artifact"))
    }

    pub(crate) async fn pin(
        &self,
        workload: WorkloadId,
        artifacts: &[ArtifactId],
        build: Option<BuildId>,
    ) -> Answer<Vec<pb::Location>> {
        let request = pb::PinRequest {
            holder_id: workload.to_string(),
            team: TEAM.to_owned(),
            artifact_ids: artifacts.iter().map(ToString::to_string).collect(),
            build_id: text(build),
            task_cache_ids: Vec::new(),
        };
        Ok(self.pins().pin(request).await?.into_inner().locations)
    }

    /// Settles a workload, and returns the owners that were missing.
    pub(crate) async fn settle(
        &self,
        workload: WorkloadId,
        attempt: Option<AttemptId>,
        outputs: &[(ArtifactId, Digest)],
        build: Option<BuildId>,
    ) -> Answer<Vec<pb::OwnerMissing>> {
        self.settle_with(workload, attempt, outputs, build, pb::BuildStatus::Succeeded).await
    }

    /// Settles a workload without outputs.
    pub(crate) async fn settle_as(&self, workload: WorkloadId, status: pb::BuildStatus) -> Answer<()> {
        self.settle_with(workload, None, &[], None, status).await.map(drop)
    }

    async fn settle_with(
        &self,
        workload: WorkloadId,
        attempt: Option<AttemptId>,
        outputs: &[(ArtifactId, Digest)],
        build: Option<BuildId>,
        status: pb::BuildStatus,
    ) -> Answer<Vec<pb::OwnerMissing>> {
        let request = pb::SettleRequest {
            holder_id: workload.to_string(),
            team: TEAM.to_owned(),
            attempt_id: text(attempt),
            outputs: outputs.iter().map(settled_output).collect(),
            build_id: text(build),
            status: status.into(),
        };
        Ok(self.pins().settle(request).await?.into_inner().missing)
    }

    pub(crate) async fn end_attempt(&self, workload: WorkloadId, attempt: AttemptId) -> Answer<()> {
        let request =
            pb::EndAttemptRequest { holder_id: workload.to_string(), attempt_id: attempt.to_string() };
        self.pins().end_attempt(request).await?;
        Ok(())
    }

    /// Collects, or runs a dry run. Before a collection, checks that a dry run reports the same.
    pub(crate) async fn collect(&self, dry_run: pb::DryRun) -> Vec<pb::Collected> {
        let would_go = self.collect_once(pb::DryRun::Only).await;
        if dry_run == pb::DryRun::Only {
            return would_go.collected;
        }
        let went = self.collect_once(dry_run).await;
        let sorted = |collected: &[pb::Collected]| {
            let mut sorted = collected.to_vec();
            sorted.sort_by(|one, other| one.id.cmp(&other.id));
            sorted
        };
        assert_eq!(went.truncated, would_go.truncated);
        if !went.truncated {
            assert_eq!(
                sorted(&went.collected),
                sorted(&would_go.collected),
                "a dry run lists what a collection marks"
            );
        }
        went.collected
    }

    /// Collects while other calls run, without a dry run.
    pub(crate) async fn collect_beside_others(&self) -> Vec<pb::Collected> {
        self.collect_once(pb::DryRun::Off).await.collected
    }

    async fn collect_once(&self, dry_run: pb::DryRun) -> pb::CollectResponse {
        self.collect_short(dry_run, &[]).await
    }

    /// Collects, or runs a dry run. The workers of the gateways `short` need disk space.
    pub(crate) async fn collect_short(&self, dry_run: pb::DryRun, short: &[&Gateway]) -> pb::CollectResponse {
        let mut collector = pb::collector_client::CollectorClient::new(self.peer.clone());
        let short_worker_ids = short.iter().map(|gateway| gateway.worker.to_string()).collect();
        let request = pb::CollectRequest { dry_run: dry_run.into(), short_worker_ids };
        collector.collect(request).await.expect("collected").into_inner()
    }

    pub(crate) async fn volumes(&self) -> Vec<pb::Volume> {
        let request = pb::ListVolumesRequest { page_size: 1000, ..Default::default() };
        self.inventory().list_volumes(request).await.expect("listed").into_inner().volumes
    }

    pub(crate) async fn containers(&self) -> Vec<pb::Container> {
        let request = pb::ListContainersRequest { page_size: 1000, ..Default::default() };
        self.inventory().list_containers(request).await.expect("listed").into_inner().containers
    }

    pub(crate) async fn all_artifacts(&self) -> Vec<pb::Artifact> {
        let request =
            pb::ListArtifactsRequest { team: TEAM.to_owned(), page_size: 1000, ..Default::default() };
        self.artifacts().list_artifacts(request).await.expect("listed").into_inner().artifacts
    }

    /// Returns the state of a volume. `None` if it has no row.
    pub(crate) async fn volume_state(&self, handle: &str) -> Option<pb::InventoryState> {
        let volumes = self.volumes().await;
        volumes.iter().find(|volume| volume.volume_handle == handle).map(pb::Volume::state)
    }
}

/// A gateway that speaks for one worker.
#[derive(Clone)]
pub(crate) struct Gateway {
    pub(crate) worker: WorkerId,
    pub(crate) credential: String,
    /// Store life of the worker's volumes. `None`: the current one.
    pub(crate) life: Option<String>,
    inventory: pb::inventory_client::InventoryClient<Peer>,
}

impl Gateway {
    /// Returns the same gateway, connected to another replica of the store.
    pub(crate) fn by_way_of(&self, callers: &Callers) -> Self {
        Self { inventory: callers.inventory(), ..self.clone() }
    }

    fn inventory(&self) -> pb::inventory_client::InventoryClient<Peer> {
        self.inventory.clone()
    }

    pub(crate) async fn prepare(
        &self,
        workload: WorkloadId,
        attempt: AttemptId,
        volumes: &[pb::PrepareVolume],
    ) -> Answer<pb::PrepareResponse> {
        let request = pb::PrepareRequest {
            session_credential: self.credential.clone(),
            holder_id: workload.to_string(),
            attempt_id: attempt.to_string(),
            team: TEAM.to_owned(),
            volumes: volumes.to_vec(),
            unreachable_artifact_ids: Vec::new(),
        };
        Ok(self.inventory().prepare(request).await?.into_inner())
    }

    pub(crate) async fn prepared(&self, attempt: AttemptId) -> Answer<()> {
        let request = pb::CompletePrepareRequest {
            session_credential: self.credential.clone(),
            attempt_id: attempt.to_string(),
        };
        self.inventory().complete_prepare(request).await?;
        Ok(())
    }

    pub(crate) async fn touch(&self, attempt: AttemptId) -> Answer<()> {
        let request =
            pb::TouchRequest { session_credential: self.credential.clone(), attempt_id: attempt.to_string() };
        self.inventory().touch(request).await?;
        Ok(())
    }

    /// Reports a replica as lost.
    pub(crate) async fn lose(&self, handle: &str, reason: &str) -> Answer<()> {
        let replica = pb::LostReplica { volume_handle: handle.to_owned(), reason: reason.to_owned() };
        let request =
            pb::LoseReplicasRequest { session_credential: self.credential.clone(), replicas: vec![replica] };
        self.inventory().lose_replicas(request).await?;
        Ok(())
    }

    /// Records the exclusive bytes and the bytes on the disk of volumes.
    pub(crate) async fn record_disk_usage(&self, measured: &[(&str, u64, u64)]) -> Answer<()> {
        let volumes = measured.iter().map(|(handle, exclusive_bytes, disk_bytes)| pb::VolumeDiskUsage {
            volume_handle: (*handle).to_owned(),
            exclusive_bytes: *exclusive_bytes,
            disk_bytes: *disk_bytes,
        });
        let request = pb::RecordDiskUsageRequest {
            session_credential: self.credential.clone(),
            volumes: volumes.collect(),
        };
        self.inventory().record_disk_usage(request).await?;
        Ok(())
    }

    pub(crate) async fn complete(&self, handle: &str, digest: Digest) -> Answer<()> {
        self.complete_as(handle, digest, pb::Verification::Verified).await
    }

    pub(crate) async fn complete_as(
        &self,
        handle: &str,
        digest: Digest,
        verification: pb::Verification,
    ) -> Answer<()> {
        let request = pb::CompleteVolumeRequest {
            session_credential: self.credential.clone(),
            volume_handle: handle.to_owned(),
            size_bytes: 10,
            digest: digest.as_bytes().to_vec().into(),
            verification: verification.into(),
        };
        self.inventory().complete_volume(request).await?;
        Ok(())
    }

    pub(crate) async fn begin_report(&self) -> Answer<pb::ReportToken> {
        self.begin_report_after(None, &[]).await
    }

    /// Begins a report of a worker that presents `last` as the token of its last judged report, and
    /// `receipt` as the proof.
    pub(crate) async fn begin_report_after(
        &self,
        last: Option<pb::ReportToken>,
        receipt: &[u8],
    ) -> Answer<pb::ReportToken> {
        let receipt = receipt.to_vec().into();
        let request = pb::BeginReportRequest { session_credential: self.credential.clone(), last, receipt };
        let answer = self.inventory().begin_report(request).await?.into_inner();
        Ok(answer.token.expect("a token"))
    }

    /// Reports `volumes` and `containers`, with a commit that counts `count`, or without a commit.
    pub(crate) async fn report_counted(
        &self,
        token: pb::ReportToken,
        volumes: &[String],
        containers: &[String],
        count: Option<u64>,
    ) -> Answer<pb::ReportResponse> {
        use pb::report_request::Message;
        let mut messages = vec![Message::Open(self.opened(token))];
        for chunk in volumes.chunks(10_000) {
            let holdings = pb::Holdings { volume_handles: chunk.to_vec(), container_handles: Vec::new() };
            messages.push(Message::Holdings(holdings));
        }
        for chunk in containers.chunks(10_000) {
            let holdings = pb::Holdings { volume_handles: Vec::new(), container_handles: chunk.to_vec() };
            messages.push(Message::Holdings(holdings));
        }
        messages.extend(count.map(|count| Message::Commit(pb::ReportCommit { count })));
        let messages = messages.into_iter().map(|message| pb::ReportRequest { message: Some(message) });
        Ok(self.inventory().report(tokio_stream::iter(messages.collect::<Vec<_>>())).await?.into_inner())
    }

    /// Opens a report that the test ends later.
    pub(crate) async fn open_report(&self, token: pb::ReportToken) -> OpenReport {
        use pb::report_request::Message;
        let (messages, sent) = tokio::sync::mpsc::channel(4);
        let sent = tokio_stream::wrappers::ReceiverStream::new(sent);
        let mut inventory = self.inventory();
        #[expect(clippy::disallowed_methods, reason = "the report's end waits for it")]
        let answer = tokio::spawn(async move { Ok(inventory.report(sent).await?.into_inner()) });
        let report = OpenReport { messages, answer };
        report.say(Message::Open(self.opened(token))).await;
        report
    }

    /// Returns the first message of a report with this token.
    fn opened(&self, token: pb::ReportToken) -> pb::ReportOpen {
        let worker_life = self.life.clone().unwrap_or_else(|| token.store_life.clone());
        pb::ReportOpen { session_credential: self.credential.clone(), token: Some(token), worker_life }
    }

    pub(crate) async fn report_with(
        &self,
        token: pb::ReportToken,
        volumes: &[String],
        containers: &[String],
    ) -> Answer<pb::ReportResponse> {
        let count = u64::try_from(volumes.len() + containers.len()).expect("few");
        self.report_counted(token, volumes, containers, Some(count)).await
    }

    /// Sends a complete report with a new token.
    pub(crate) async fn report(
        &self,
        volumes: &[String],
        containers: &[String],
    ) -> Answer<pb::ReportResponse> {
        let token = self.begin_report().await?;
        self.report_with(token, volumes, containers).await
    }

    pub(crate) async fn watch(&self) -> Answer<Streaming<pb::WatchDestroyingResponse>> {
        let request = pb::WatchDestroyingRequest { session_credential: self.credential.clone() };
        Ok(self.inventory().watch_destroying(request).await?.into_inner())
    }

    /// Waits until the store has handed out `containers` and `volumes`. Returns the volumes in
    /// order.
    pub(crate) async fn swept(&self, containers: &[&str], volumes: &[&str]) -> Vec<String> {
        let mut stream = self.watch().await.expect("a stream");
        let mut missing: BTreeSet<&str> = containers.iter().chain(volumes).copied().collect();
        let mut order = Vec::new();
        while !missing.is_empty() {
            let message = tokio::time::timeout(PATIENCE, stream.message()).await;
            let message = message.unwrap_or_else(|_| panic!("not handed out: {missing:?}"));
            let sweep = message.expect("no error").expect("the stream is open");
            for handle in sweep.container_handles.iter().chain(&sweep.volume_handles) {
                missing.remove(handle.as_str());
            }
            order.extend(sweep.volume_handles);
        }
        order
    }
}

/// A report that was opened and not committed.
pub(crate) struct OpenReport {
    messages: tokio::sync::mpsc::Sender<pb::ReportRequest>,
    answer: JoinHandle<Answer<pb::ReportResponse>>,
}

impl OpenReport {
    async fn say(&self, message: pb::report_request::Message) {
        // Send fails if the store has rejected the report.
        self.messages.send(pb::ReportRequest { message: Some(message) }).await.ok();
    }

    /// Sends a part of the worker's contents.
    pub(crate) async fn send(&self, volumes: &[String], containers: &[String]) {
        let holdings =
            pb::Holdings { volume_handles: volumes.to_vec(), container_handles: containers.to_vec() };
        self.say(pb::report_request::Message::Holdings(holdings)).await;
    }

    /// Commits the report.
    pub(crate) async fn commit(self, count: u64) -> Answer<pb::ReportResponse> {
        self.say(pb::report_request::Message::Commit(pb::ReportCommit { count })).await;
        self.cut().await
    }

    /// Ends the stream without a commit.
    pub(crate) async fn cut(self) -> Answer<pb::ReportResponse> {
        drop(self.messages);
        self.answer.await.expect("no panic")
    }
}

/// Returns a volume that starts with an artifact's bytes.
pub(crate) fn input(name: &str, from: ArtifactId) -> pb::PrepareVolume {
    pb::PrepareVolume {
        name: name.to_owned(),
        purpose: pb::VolumePurpose::Input.into(),
        from_artifact_id: from.to_string(),
        output_artifact_id: String::new(),
        from_task_cache_id: String::new(),
    }
}

/// Returns a volume that may become an artifact.
pub(crate) fn output(name: &str, artifact: ArtifactId) -> pb::PrepareVolume {
    pb::PrepareVolume {
        name: name.to_owned(),
        purpose: pb::VolumePurpose::Output.into(),
        from_artifact_id: String::new(),
        output_artifact_id: artifact.to_string(),
        from_task_cache_id: String::new(),
    }
}

/// Returns a digest that is unique for `content`.
pub(crate) fn digest(content: u64) -> Digest {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&content.to_le_bytes());
    Digest(bytes)
}

fn text(id: Option<impl ToString>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}

/// Asserts that the call was rejected with `reason`.
#[track_caller]
pub(crate) fn assert_refused<T: Debug>(answer: Answer<T>, reason: Reason) {
    match answer {
        Err(refusal) if refusal.is(reason) && refusal.code == reason.code() => {}
        other => panic!("expected {reason}, got {other:?}"),
    }
}
