//! Tests of uploads and downloads, with the real services.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::{ArtifactId, Digest};
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts as store;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::runtime as runtime_pb;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_request::Message as Write;
use rpc::pb::runtime::write_response::Message as Wrote;
use rpc::pb::streamer as pb;
use rpc::pb::streamer::streamer_client::StreamerClient;
use rpc::pb::streamer::upload_request::Message as UploadMessage;
use rpc::pb::streamer::upload_response::Message as Answer;
use rpc::{Peer, Reason, Refusal};
use runtime_gateway::host::{HostConfig, HostRuntime};
use server::{Host, Listener};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

mod archives;

/// Longest wait for an expected event.
const TIMEOUT: Duration = Duration::from_secs(30);

/// All services in one process, with an optional worker.
struct Suite {
    directory: TempDir,
    peer: Peer,
    machine: Option<Arc<HostRuntime>>,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Suite {
    async fn start(with_worker: bool) -> Self {
        Self::start_in(tempfile::tempdir().expect("a temporary directory"), with_worker, None).await
    }

    /// Starts the services on the data in `directory`. They require `token` from each other and
    /// from callers.
    async fn start_in(directory: TempDir, with_worker: bool, token: Option<&str>) -> Self {
        let token = token.map(str::to_owned);
        let listener = Listener::InsecureTcp(TcpListener::bind("127.0.0.1:0").await.expect("a port"));
        let endpoint = listener.endpoint().expect("its address");
        let database = |name: &str| format!("sqlite://{}/{name}.db", directory.path().display());
        let mut host = Host::new().with_token(token.clone());

        let scheduler = scheduler::Config {
            token: token.clone(),
            ..scheduler::Config::new(database("scheduler"), endpoint.clone())
        };
        scheduler::start(scheduler, &mut host).await.expect("a scheduler");
        let keys = artifact_store::KeySource::Scheduler(endpoint.clone());
        let store = artifact_store::Config {
            token: token.clone(),
            ..artifact_store::Config::new(database("store"), keys)
        };
        artifact_store::start(store, &mut host).await.expect("an artifact store");
        let streamer = streamer::Config {
            scheduler: endpoint.clone(),
            artifact_store: endpoint.clone(),
            token: token.clone(),
            images: streamer::ImageArgs::default(),
        };
        streamer::start(&streamer, &mut host).expect("a streamer");
        let machine = with_worker.then(|| {
            let config = HostConfig::new(directory.path().join("worker"), directory.path().join("run"));
            HostRuntime::open(config.expect("the path of this test")).expect("this machine as a worker")
        });
        if let Some(machine) = &machine {
            let config = runtime_gateway::Config {
                worker_name: "one".to_owned(),
                platform: "linux".to_owned(),
                tags: Vec::new(),
                team: None,
                amounts: runtime_gateway::Amounts::default(),
                zone: String::new(),
                ephemeral: false,
                endpoint: endpoint.clone(),
                scheduler: endpoint.clone(),
                artifact_store: endpoint.clone(),
                streamer: endpoint.clone(),
                token: token.clone(),
                manifest_dir: directory.path().join("manifests"),
                report_interval: Duration::from_secs(60),
                scrub_bytes_per_second: 0,
                destroy_concurrency: 4,
                intervals: runtime_gateway::Intervals::default(),
                hold_destruction: false,
            };
            runtime_gateway::start([(config, machine.clone() as _)], &mut host).await.expect("a gateway");
        }

        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            stopped.await.ok();
        };
        #[expect(clippy::disallowed_methods, reason = "the suite waits for it when it stops")]
        let served = tokio::spawn(host.serve([listener], shutdown));
        let peer = peer(&endpoint, Outgoing::default().with_token(token.as_deref())).expect("an address");
        Self { directory, peer, machine, stop, served }
    }

    /// Opens an upload, and returns the first answer.
    async fn open(
        &self,
        artifact: ArtifactId,
        digest: impl Into<Option<Digest>>,
    ) -> Result<(Upload, Answer), Refusal> {
        let (sender, requests) = mpsc::channel(4);
        let open = pb::UploadOpen {
            team: "main".to_owned(),
            artifact_id: artifact.to_string(),
            digest: digest.into().map(|digest| digest.as_bytes().to_vec().into()).unwrap_or_default(),
            build_id: String::new(),
            label: "tree".to_owned(),
            avoid_worker_ids: Vec::new(),
        };
        sender.send(pb::UploadRequest { message: Some(UploadMessage::Open(open)) }).await.expect("a stream");
        let mut streamer = StreamerClient::new(self.peer.clone());
        let answers = streamer.upload(ReceiverStream::new(requests)).await?.into_inner();
        let mut upload = Upload { sender, answers };
        let answer = upload.next().await?;
        Ok((upload, answer))
    }

    /// Opens an upload as soon as a worker is in contact.
    async fn open_when_possible(
        &self,
        artifact: ArtifactId,
        digest: impl Into<Option<Digest>>,
    ) -> (Upload, Answer) {
        let digest = digest.into();
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.open(artifact, digest).await {
                Ok(opened) => return opened,
                Err(refusal) => assert!(Instant::now() < deadline, "{refusal}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn artifact(&self, artifact: ArtifactId) -> Option<store::Artifact> {
        let request =
            store::GetArtifactRequest { team: "main".to_owned(), artifact_id: artifact.to_string() };
        let answer = ArtifactsClient::new(self.peer.clone()).get_artifact(request).await;
        answer.ok().and_then(|answer| answer.into_inner().artifact)
    }

    async fn stop(self) {
        self.stop_and_keep().await.close().expect("everything can be removed");
    }

    /// Stops the services, and keeps their data.
    async fn stop_and_keep(self) -> TempDir {
        self.stop.send(()).expect("it serves");
        self.served.await.expect("no panic").expect("an orderly end");
        if let Some(machine) = self.machine {
            machine.unmount_idle().expect("unmount");
        }
        self.directory
    }
}

struct Upload {
    sender: mpsc::Sender<pb::UploadRequest>,
    answers: Streaming<pb::UploadResponse>,
}

impl Upload {
    async fn next(&mut self) -> Result<Answer, Refusal> {
        let answer =
            tokio::time::timeout(TIMEOUT, self.answers.message()).await.expect("an answer in time")?;
        Ok(answer.and_then(|answer| answer.message).expect("an answer"))
    }

    async fn commit(&mut self, digest: Digest) -> Result<Answer, Refusal> {
        let commit = pb::UploadCommit { digest: digest.as_bytes().to_vec().into() };
        self.sender
            .send(pb::UploadRequest { message: Some(UploadMessage::Commit(commit)) })
            .await
            .expect("a stream");
        self.next().await
    }
}

fn tree(root: &Path) -> transfer::Manifest {
    std::fs::create_dir_all(root.join("directory")).expect("directories");
    std::fs::write(root.join("directory/file"), "content").expect("write");
    let options = transfer::ScanOptions {
        ownership: transfer::ScannedOwnership::Root,
        ..transfer::ScanOptions::default()
    };
    transfer::scan(root, &options, None).expect("a manifest").manifest
}

/// Writes a whole tree to the gateway that the streamer named.
async fn write(
    endpoint: &pb::TransferEndpoint,
    root: &Path,
    manifest: transfer::Manifest,
) -> Result<(), Refusal> {
    write_with(endpoint, root, manifest, Outgoing::default()).await
}

async fn write_with(
    endpoint: &pb::TransferEndpoint,
    root: &Path,
    manifest: transfer::Manifest,
    outgoing: Outgoing,
) -> Result<(), Refusal> {
    let manifest = Arc::new(manifest);
    let (sender, requests) = mpsc::channel(16);
    let send = |message| sender.send(runtime_pb::WriteRequest { message: Some(message) });
    send(Write::Open(runtime_pb::WriteOpen { ticket: endpoint.ticket.clone() })).await.expect("a stream");
    for part in rpc::tree::manifest_parts(&manifest) {
        send(Write::Manifest(part)).await.expect("a stream");
    }
    send(Write::ManifestEnd(rpc::tree::manifest_end(&manifest))).await.expect("a stream");
    let gateway = peer(&endpoint.gateway_endpoint, outgoing).expect("an address");
    let mut answers = VolumesClient::new(gateway).write(ReceiverStream::new(requests)).await?.into_inner();
    let mut missing = transfer::OrdinalRanges::new();
    loop {
        match answers.message().await?.and_then(|answer| answer.message) {
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
    while let Some(answer) = answers.message().await? {
        if let Some(Wrote::Committed(_)) = answer.message {
            return Ok(());
        }
    }
    panic!("the stream ended without `committed`");
}

fn may_be_a_worker() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not applicable: this process is not root");
    }
    root
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_without_worker_creates_nothing() {
    let suite = Suite::start(false).await;
    let artifact = ArtifactId::new();
    let refused = suite.open(artifact, Digest([1; 32])).await.map(|(_, answer)| answer);
    let refused = refused.expect_err("there is no worker");
    assert!(refused.is(Reason::AllWorkersBusy) || refused.is(Reason::NoCompatibleWorker), "{refused}");
    assert!(suite.artifact(artifact).await.is_none());

    let request = pb::DownloadRequest {
        team: "main".to_owned(),
        artifact_id: artifact.to_string(),
        ..pb::DownloadRequest::default()
    };
    let refused = StreamerClient::new(suite.peer.clone())
        .download(request)
        .await
        .expect_err("the artifact does not exist");
    assert!(Refusal::from(refused).is(Reason::ArtifactNotFound));
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tree_is_sent_only_once() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let root = suite.directory.path().join("tree");
    let manifest = tree(&root);
    let (artifact, digest) = (ArtifactId::new(), manifest.tree_digest());
    let (mut upload, answer) = suite.open_when_possible(artifact, digest).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    write(&endpoint, &root, manifest).await.expect("written");
    assert_eq!(suite.artifact(artifact).await.expect("it was made").state(), store::ArtifactState::Open);
    let uploaded = upload.commit(digest).await.expect("sealed");
    assert_eq!(uploaded, Answer::Uploaded(pb::Uploaded { artifact_id: artifact.to_string() }));
    assert_eq!(
        suite.artifact(artifact).await.expect("the artifact exists").state(),
        store::ArtifactState::Sealed
    );

    let (_, again) = suite.open(ArtifactId::new(), digest).await.expect("known");
    assert_eq!(again, Answer::Uploaded(pb::Uploaded { artifact_id: artifact.to_string() }));
    let request = pb::DownloadRequest {
        team: "main".to_owned(),
        artifact_id: artifact.to_string(),
        ..pb::DownloadRequest::default()
    };
    let found = StreamerClient::new(suite.peer.clone()).download(request).await.expect("found").into_inner();
    assert_eq!((found.size_bytes, found.digest.as_ref()), (7, digest.as_bytes()));
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn services_present_the_cluster_token() {
    if !may_be_a_worker() {
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let suite = Suite::start_in(directory, true, Some("secret")).await;
    let root = suite.directory.path().join("tree");
    let manifest = tree(&root);
    let (artifact, digest) = (ArtifactId::new(), manifest.tree_digest());
    let (mut upload, answer) = suite.open_when_possible(artifact, digest).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    let refused =
        write(&endpoint, &root, manifest.clone()).await.expect_err("the gateway requires the token");
    assert!(refused.is(Reason::Unauthenticated), "{refused}");
    let outgoing = Outgoing::default().with_token(Some("secret"));
    write_with(&endpoint, &root, manifest, outgoing).await.expect("written");
    upload.commit(digest).await.expect("sealed");
    suite.stop().await;
}

/// Simulates a crash: changes the boot id in each manifest file, and the file in each volume.
fn crash(directory: &Path) {
    for entry in std::fs::read_dir(directory.join("manifests")).expect("list").flatten() {
        let file = std::fs::read(entry.path()).expect("read");
        // The directory also has the state of the scrub.
        if let Ok(mut kept) = zstd::decode_all(&file[..]) {
            // The boot id follows the digest and its own length.
            kept[33] ^= 1;
            std::fs::write(entry.path(), zstd::bulk::compress(&kept, 1).expect("compressed")).expect("write");
        }
    }
    for entry in std::fs::read_dir(directory.join("worker/volumes")).expect("list").flatten() {
        let path = entry.path().join("contents/directory/file");
        if let Ok(modified) = std::fs::metadata(&path).and_then(|metadata| metadata.modified()) {
            std::fs::write(&path, "CONTENT").expect("write");
            let file = std::fs::File::options().write(true).open(&path).expect("open");
            file.set_modified(modified).expect("set the time");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_damaged_by_a_crash_is_not_used() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let root = suite.directory.path().join("tree");
    let manifest = tree(&root);
    let (artifact, digest) = (ArtifactId::new(), manifest.tree_digest());
    let (mut upload, answer) = suite.open_when_possible(artifact, digest).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    write(&endpoint, &root, manifest.clone()).await.expect("written");
    upload.commit(digest).await.expect("sealed");
    let directory = suite.stop_and_keep().await;
    crash(directory.path());
    let suite = Suite::start_in(directory, true, None).await;

    let deadline = Instant::now() + TIMEOUT;
    let read = async || {
        let request = pb::DownloadRequest {
            team: "main".to_owned(),
            artifact_id: artifact.to_string(),
            ..pb::DownloadRequest::default()
        };
        let found = StreamerClient::new(suite.peer.clone()).download(request).await?.into_inner();
        let endpoint = found.endpoint.expect("where to read");
        let gateway = peer(&endpoint.gateway_endpoint, Outgoing::default()).expect("an address");
        let request = runtime_pb::ReadFileRequest { ticket: endpoint.ticket, path: "directory/file".into() };
        VolumesClient::new(gateway).read_file(request).await?.into_inner().message().await
    };
    // The new gateway may not have a session yet, while the scheduler still has the old address.
    let refused = loop {
        let refused = Refusal::from(read().await.expect_err("the replica is not read"));
        if !refused.is_transient() && !refused.is(Reason::WorkerUnreachable) {
            break refused;
        }
        assert!(Instant::now() < deadline, "{refused}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(refused.is(Reason::DigestMismatch), "{refused}");

    let (mut upload, endpoint) = loop {
        let (upload, answer) = suite.open_when_possible(ArtifactId::new(), digest).await;
        if let Answer::Endpoint(endpoint) = answer {
            break (upload, endpoint);
        }
        assert!(Instant::now() < deadline, "the store still returns the lost replica");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    write(&endpoint, &root, manifest).await.expect("written");
    upload.commit(digest).await.expect("sealed");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn uncommitted_upload_is_deleted() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let root = suite.directory.path().join("tree");
    let manifest = tree(&root);
    let digest = manifest.tree_digest();

    // A commit without bytes on the worker is rejected.
    let artifact = ArtifactId::new();
    let (mut upload, _) = suite.open_when_possible(artifact, digest).await;
    let refused = upload.commit(digest).await.expect_err("nothing was sent");
    assert!(refused.is(Reason::CandidateMissing), "{refused}");
    let gone = async |artifact| {
        let deadline = Instant::now() + TIMEOUT;
        while suite
            .artifact(artifact)
            .await
            .is_some_and(|found| found.state() != store::ArtifactState::Deleting)
        {
            assert!(Instant::now() < deadline, "the artifact stays");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    gone(artifact).await;

    // All bytes are sent, but the caller leaves before the commit.
    let artifact = ArtifactId::new();
    let (upload, answer) = suite.open_when_possible(artifact, digest).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    write(&endpoint, &root, manifest).await.expect("written");
    drop(upload);
    gone(artifact).await;
    suite.stop().await;
}
