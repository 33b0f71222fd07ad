//! Tests of compressed messages, with a fake worker and a fake artifact store.

use std::path::Path;

use domain::{VolumeHandle, WorkerId};
use rpc::client::{Outgoing, peer};
use rpc::compression::{ACCEPT_HEADER, pack_part};
use rpc::pb::artifacts;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::{Peer, Refusal};
use testing::fake::FakeWorker;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::test_support::scheduler::Schedule;
use crate::test_support::served::TestServer;
use crate::test_support::store::{Store, StoreCall, session};
use crate::test_support::{FakeGateways, gateway_of, within};

/// A gateway with a worker.
struct Scene {
    schedule: Schedule,
    scheduler: TestServer,
    store: Store,
    machine: Arc<FakeWorker>,
    id: WorkerId,
    gateway: TestServer,
}

/// Writes a file that shrinks, and entries that make a manifest of several KiB.
fn make_tree(root: &Path) -> Arc<Manifest> {
    std::fs::write(root.join("text"), "some text ".repeat(50_000)).expect("write");
    for number in 0..300 {
        std::fs::create_dir(root.join(format!("directory-{number}"))).expect("make");
    }
    Arc::new(crate::transfer::scan::scan(root).expect("it can be read").manifest)
}

fn text() -> Bytes {
    "some text ".repeat(50_000).into()
}

/// Packs a chunk with the only extent of the tree.
async fn packed(data: Bytes) -> RawOrZstd<pb::Chunk> {
    let (queue, mut messages) = mpsc::channel(1);
    let chunk = pb::Chunk { extents: vec![pb::ExtentData { ordinal: 0, data }] };
    let sending = move || Packer::new(true).send(&queue, chunk, |packed| packed);
    tokio::task::spawn_blocking(sending).await.expect("no panic").expect("sent");
    messages.recv().await.expect("a message")
}

impl Scene {
    async fn new() -> Self {
        let schedule = Schedule::new();
        let service = schedule.service();
        let scheduler = TestServer::start(|host| host.add_service(service)).await;
        let store = Store::start().await;
        let machine = FakeWorker::near();
        let worker = machine.gateway(&scheduler.endpoint, &store.endpoint);
        let open = session("credential");
        let id = open.worker;
        worker.session.set(Some(open));
        let gateway = gateway_of(&[worker], &scheduler.endpoint);
        let gateway = TestServer::start(|host| host.add_service(crate::api::volumes(gateway))).await;
        Self { schedule, scheduler, store, machine, id, gateway }
    }

    fn client(&self) -> VolumesClient<Peer> {
        VolumesClient::new(peer(&self.gateway.endpoint, Outgoing::internal()).expect("an address"))
    }

    fn ticket(&self, volume: VolumeHandle, operation: TicketOperation) -> String {
        self.schedule.ticket(self.id, volume, operation).0
    }

    /// Sends all messages of a write, and returns its last answer.
    async fn write(
        &mut self,
        volume: VolumeHandle,
        messages: Vec<WriteMessage>,
    ) -> Result<WriteAnswer, Refusal> {
        let open = WriteMessage::Open(pb::WriteOpen { ticket: self.ticket(volume, TicketOperation::Write) });
        let (requests, queue) = mpsc::channel(messages.len() + 1);
        for message in [open].into_iter().chain(messages) {
            let request = pb::WriteRequest { message: Some(message) };
            requests.send(request).await.expect("the queue has room");
        }
        let mut client = self.client();
        let writing = async {
            let response = client.write(ReceiverStream::new(queue)).await?;
            let accepts = response.metadata().get(ACCEPT_HEADER);
            assert_eq!(accepts.map(|value| value.as_bytes()), Some(&b"true"[..]));
            let (mut answers, mut last) = (response.into_inner(), None);
            while let Some(answer) = answers.message().await? {
                last = answer.message;
            }
            Ok(last.expect("an answer"))
        };
        let acknowledging = async {
            let call = self.store.next_call().await;
            let StoreCall::CompleteVolume(_, answer) = call else { panic!("an unexpected call") };
            answer.send(Ok(artifacts::CompleteVolumeResponse::default())).expect("the gateway waits");
            std::future::pending().await
        };
        let written = async {
            tokio::select! {
                written = writing => written,
                () = acknowledging => unreachable!("it is pending"),
            }
        };
        within("a write", written).await
    }

    /// Reads all of a volume, and returns the answers.
    async fn read(&self, volume: VolumeHandle, accept_zstd: bool, extents: u64) -> Vec<ReadAnswer> {
        let ticket = self.ticket(volume, TicketOperation::Read);
        let want = pb::ExtentRuns { runs: vec![pb::ExtentRun { first: 0, count: extents }] };
        let messages = [
            ReadMessage::Open(pb::ReadOpen { ticket, accept_zstd }),
            ReadMessage::Want(want),
            ReadMessage::WantEnd(pb::ExtentRunsEnd { bytes: 0 }),
        ];
        let requests = messages.map(|message| pb::ReadRequest { message: Some(message) });
        let answers = self.client().read(tokio_stream::iter(requests)).await.expect("accepted").into_inner();
        let answers = answers.map(|answer| answer.expect("an answer").message.expect("a message"));
        within("a tree", answers.collect()).await
    }

    async fn end(self) {
        self.gateway.end().await;
        self.scheduler.end().await;
        self.store.end().await;
    }
}

fn raw_parts(manifest: &Manifest) -> Vec<WriteMessage> {
    let parts = rpc::tree::manifest_parts(manifest).map(WriteMessage::Manifest);
    parts.chain([WriteMessage::ManifestEnd(rpc::tree::manifest_end(manifest))]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_messages_are_written_and_read() {
    let (mut scene, volume) = (Scene::new().await, VolumeHandle::new());
    let directory = tempfile::tempdir().expect("a directory");
    let manifest = make_tree(directory.path());
    let parts = rpc::tree::manifest_parts(&manifest).map(|part| WriteMessage::from(pack_part(part)));
    let mut messages: Vec<_> = parts.collect();
    messages.push(WriteMessage::ManifestEnd(rpc::tree::manifest_end(&manifest)));
    messages.push(packed(text()).await.into());
    messages.push(WriteMessage::Commit(pb::WriteCommit {}));
    let is_compressed =
        |message: &&_| matches!(message, WriteMessage::ZstdManifest(_) | WriteMessage::ZstdChunk(_));
    assert_eq!(messages.iter().filter(is_compressed).count(), 2);
    let committed = scene.write(volume, messages).await.expect("written");
    assert!(matches!(committed, WriteAnswer::Committed(_)), "{committed:?}");
    let written = std::fs::read(scene.machine.path(volume).join("text")).expect("read");
    assert!(written == text());

    let raw = scene.read(volume, false, manifest.extent_count()).await;
    let [ReadAnswer::Manifest(_), ReadAnswer::ManifestEnd(_), ReadAnswer::Chunk(chunk), ReadAnswer::Done(_)] =
        &raw[..]
    else {
        panic!("not raw: {} answers", raw.len())
    };
    assert!(chunk.extents[0].data == text());
    let compressed = scene.read(volume, true, manifest.extent_count()).await;
    let [
        ReadAnswer::ZstdManifest(part),
        ReadAnswer::ManifestEnd(_),
        ReadAnswer::ZstdChunk(frame),
        ReadAnswer::Done(_),
    ] = &compressed[..]
    else {
        panic!("not compressed: {} answers", compressed.len())
    };
    let part: pb::ManifestPart = compression::decode(part.clone()).await.expect("a part");
    assert_eq!(part.entries.len(), manifest.entries().len());
    assert_eq!(&compression::decode::<pb::Chunk>(frame.clone()).await.expect("a chunk"), chunk);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_compressed_message_ends_the_write() {
    let (mut scene, volume) = (Scene::new().await, VolumeHandle::new());
    let directory = tempfile::tempdir().expect("a directory");
    let manifest = make_tree(directory.path());
    let RawOrZstd::Zstd(whole) = packed(text()).await else { panic!("it shrinks") };
    // A header that states 1 GiB of content.
    let bomb = Bytes::from_static(&[0x28, 0xb5, 0x2f, 0xfd, 0xa0, 0, 0, 0, 0x40, 3, 0, 0, 0]);
    let cut = whole.slice(..whole.len() / 2);
    for frame in [Bytes::new(), Bytes::from_static(b"garbage"), bomb, cut] {
        let refused = scene.write(volume, vec![WriteMessage::ZstdManifest(frame.clone())]).await;
        let refused = refused.expect_err("the manifest is malformed");
        assert!(refused.is(Reason::InvalidField) && refused.message.contains("zstd_manifest"), "{refused}");
        let messages = raw_parts(&manifest).into_iter().chain([WriteMessage::ZstdChunk(frame)]);
        let refused = scene.write(volume, messages.collect()).await.expect_err("the chunk is malformed");
        assert!(refused.is(Reason::InvalidField) && refused.message.contains("zstd_chunk"), "{refused}");
    }
    let RawOrZstd::Zstd(other) = packed("OTHER TEXT".repeat(50_000).into()).await else {
        panic!("it shrinks")
    };
    let messages = raw_parts(&manifest).into_iter().chain([WriteMessage::ZstdChunk(other)]);
    let refused = scene.write(volume, messages.collect()).await.expect_err("the digest differs");
    assert!(refused.is(Reason::DigestMismatch), "{refused}");

    // The failed writes leave nothing behind.
    let messages = raw_parts(&manifest).into_iter();
    let rest = [WriteMessage::ZstdChunk(whole), WriteMessage::Commit(pb::WriteCommit {})];
    let committed = scene.write(volume, messages.chain(rest).collect()).await.expect("written");
    assert!(matches!(committed, WriteAnswer::Committed(_)), "{committed:?}");
    scene.end().await;
}
