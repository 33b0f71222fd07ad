//! Tests of direct copies between two Concourse workers, with a gateway for each and a fake
//! artifact store.

use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::PathBuf;
use std::sync::Mutex;

use domain::WorkerId;
use domain::worker::TicketOperation;
use rpc::pb::artifacts;
use runtime::Runtime;
use tempfile::TempDir;
use testing::baggageclaim::{self, Driver, Faults};
use testing::fake::FakeWorker;
use testing::garden::{self, Manner};
use transfer::{OrdinalRanges, ReadOptions, TreeReader};

use super::*;
use domain::worker::TicketClaims;
use rpc::client::Outgoing;
use rpc::pb::runtime as pb;
use rpc::pb::runtime::volumes_client::VolumesClient;

use crate::Config;
use crate::Intervals;
use crate::runtimes::garden::{GardenConfig, GardenRuntime};
use crate::test_support::scheduler::Schedule;
use crate::test_support::served::TestServer;
use crate::test_support::store::{Store, StoreCall, session};
use crate::test_support::{
    FakeGateways as _, INTERVALS, TestWorker, UNREACHABLE, gateway_of, read_lock, within,
};
use crate::transfer::pull::{self, Destination, FetchError, Progress};
use crate::transfer::write::VolumeWriter;

/// A Concourse worker with its gateway.
struct Side {
    volumes: baggageclaim::Server,
    _garden: garden::Server,
    worker: TestWorker,
    id: WorkerId,
    _dir: TempDir,
}

impl Side {
    async fn new(peer_to_peer: bool, patience: Option<Duration>, scheduler: &str, store: &str) -> Self {
        let volumes = baggageclaim::Server::start(Driver::Overlay).await;
        let garden = garden::Server::start(Manner::Containerd);
        let dir = tempfile::tempdir().expect("a directory");
        let config = GardenConfig::new(garden.address(), volumes.address().to_string(), dir.path().join("g"));
        let runtime = GardenRuntime::open(GardenConfig { peer_to_peer, ..config }).await.expect("a worker");
        let says = runtime.capabilities().features.iter().any(|feature| feature == "peer-to-peer");
        assert_eq!(says, peer_to_peer);
        let config = Config::for_worker(
            "test",
            UNREACHABLE,
            scheduler,
            store,
            UNREACHABLE,
            dir.path().join("manifests"),
        );
        let config = Config {
            intervals: Intervals { peer_transfer: patience.unwrap_or(INTERVALS.peer_transfer), ..INTERVALS },
            ..config
        };
        let worker = TestWorker::new(config, runtime);
        let open = session("credential");
        let id = open.worker;
        worker.session.set(Some(open));
        Self { volumes, _garden: garden, worker, id, _dir: dir }
    }

    /// Returns the number of requests of this kind for a volume.
    fn request_count(&self, volume: VolumeHandle, what: &str) -> usize {
        let line = format!("PUT /volumes/{volume}/{what}?");
        self.volumes.requests().iter().filter(|request| request.starts_with(&line)).count()
    }
}

struct Scene {
    schedule: Schedule,
    scheduler: TestServer,
    store: tokio::sync::Mutex<Store>,
    from: Side,
    to: Side,
    gateway: TestServer,
    /// The gateway of the destination.
    destination: TestServer,
    manifest: Arc<Manifest>,
    /// The volume of the source, and the volume that is filled.
    volumes: (VolumeHandle, VolumeHandle),
    updates: Mutex<Vec<Progress>>,
}

/// Makes a tree that plain tar preserves, except for fractions of seconds.
fn make_tree(root: &Path) {
    std::fs::create_dir_all(root.join("directory/empty")).expect("make");
    let large: Vec<u8> = (0..2_500_000_u32).map(|at| (at % 251) as u8 + 1).collect();
    for name in ["z", "directory/b", "a"] {
        std::fs::write(root.join(name), &large[name.len()..]).expect("write");
    }
    std::fs::write(root.join("directory/nothing"), "").expect("write");
    std::fs::hard_link(root.join("a"), root.join("directory/link")).expect("link");
    symlink("/etc/passwd", root.join("symbolic")).expect("link");
}

impl Scene {
    async fn new(both: (bool, bool), make: impl FnOnce(&Path)) -> Self {
        Self::with_patience(both, None, make).await
    }

    async fn with_patience(both: (bool, bool), patience: Option<Duration>, make: impl FnOnce(&Path)) -> Self {
        let schedule = Schedule::new();
        let service = schedule.service();
        let scheduler = TestServer::start(|host| host.add_service(service)).await;
        let store = Store::start().await;
        let from = Side::new(both.0, patience, &scheduler.endpoint, &store.endpoint).await;
        let to = Side::new(both.1, patience, &scheduler.endpoint, &store.endpoint).await;
        let gateway = gateway_of(std::slice::from_ref(&from.worker), &scheduler.endpoint);
        let gateway = TestServer::start(|host| host.add_service(crate::api::volumes(gateway))).await;
        let destination = gateway_of(std::slice::from_ref(&to.worker), &scheduler.endpoint);
        let destination = TestServer::start(|host| host.add_service(crate::api::volumes(destination))).await;

        let tree = tempfile::tempdir().expect("a directory");
        make(tree.path());
        let manifest = Arc::new(crate::transfer::scan::scan(tree.path()).expect("it can be read").manifest);
        let volumes = (VolumeHandle::new(), VolumeHandle::new());
        let (_, claims) = schedule.ticket(from.id, volumes.0, TicketOperation::Write);
        let mut filling = VolumeWriter::begin(&from.worker.transfers, claims, manifest.clone())
            .await
            .expect("the volume can be filled");
        let mut reader =
            TreeReader::new(tree.path(), manifest.clone(), ReadOptions::default()).expect("read");
        for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
            let extents = batch.expect("content").into_iter().map(|extent| (extent.ordinal, extent.data));
            filling.put(&from.worker.transfers, extents.collect()).await.expect("room");
        }
        let store = tokio::sync::Mutex::new(store);
        let (filled, ()) =
            tokio::join!(filling.commit(&from.worker.transfers), acknowledge(&store, volumes.0));
        filled.expect("the volume is complete");
        let updates = Mutex::default();
        Self { schedule, scheduler, store, from, to, gateway, destination, manifest, volumes, updates }
    }

    fn request(&self) -> (Destination, Source) {
        let (signed, ticket) = self.to_write();
        let (read, _) = self.schedule.ticket(self.from.id, self.volumes.0, TicketOperation::Read);
        let source = Source { endpoint: Some(self.gateway.endpoint.clone()), ticket: read };
        (Destination { ticket, signed }, source)
    }

    fn to_write(&self) -> (String, TicketClaims) {
        let endpoint = &self.destination.endpoint;
        self.schedule.ticket_at(endpoint, self.to.id, self.volumes.1, TicketOperation::Write)
    }

    /// Fills the volume.
    async fn fetch(&self) -> Result<Arc<Manifest>, FetchError> {
        let (to, source) = self.request();
        let tell = |progress| self.updates.lock().expect("a list").push(progress);
        pull::fetch(&self.to.worker.transfers, to, self.manifest.tree_digest(), vec![source], tell).await
    }

    /// Fills the volume, and checks its tree. Returns whether the worker of the source sent it
    /// directly.
    async fn fetched(&self) -> bool {
        let copy = async { tokio::join!(self.fetch(), acknowledge(&self.store, self.volumes.1)) };
        let (fetched, ()) = within("a copy", copy).await;
        assert_eq!(fetched.expect("a copy").tree_digest(), self.manifest.tree_digest());

        let root = self.to.volumes.path(&self.volumes.1.to_string());
        let there = crate::transfer::scan::scan(&root).expect("it can be read").manifest;
        let plain = |manifest: &Manifest| {
            let entries = manifest.entries().iter();
            let plain = entries
                .map(|entry| (entry.path.clone(), entry.mode, entry.mtime_seconds, entry.kind.clone()));
            plain.collect::<Vec<_>>()
        };
        assert_eq!(plain(&there), plain(&self.manifest));
        let kept =
            self.to.worker.transfers.manifests.stored(self.to.worker.runtime.as_ref(), self.volumes.1).await;
        assert_eq!(kept.expect("read").expect("a manifest").tree_digest(), self.manifest.tree_digest());

        let last = read_lock(&self.updates).pop().expect("progress is reported");
        assert_eq!((last.done, last.total, last.saved), (last.total, self.manifest.extent_bytes(), 0));
        last.by_peer
    }

    async fn end(self) {
        self.gateway.end().await;
        self.destination.end().await;
        self.scheduler.end().await;
        self.store.into_inner().end().await;
    }
}

/// Answers the next call, which must report that `volume` is complete.
async fn acknowledge(store: &tokio::sync::Mutex<Store>, volume: VolumeHandle) {
    let StoreCall::CompleteVolume(request, answer) = store.lock().await.next_call().await else {
        panic!("an unexpected call")
    };
    assert_eq!(request.volume_handle, volume.to_string());
    answer.send(Ok(artifacts::CompleteVolumeResponse::default())).expect("the gateway waits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_sends_volume_directly_to_another_worker() {
    let scene = Scene::new((true, true), make_tree).await;
    assert!(scene.fetched().await, "the worker did not send it");
    let (from, to) = scene.volumes;
    assert_eq!(
        (scene.from.request_count(from, "stream-p2p-out"), scene.from.request_count(from, "stream-out")),
        (1, 0)
    );
    // The destination was read back.
    assert_eq!((scene.to.request_count(to, "stream-in"), scene.to.request_count(to, "stream-out")), (1, 1));
    assert!(
        read_lock(&scene.updates).iter().any(|update| update.by_peer && update.done < update.total),
        "progress is reported"
    );
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_uses_gateways_unless_both_operators_allow_peers() {
    for both in [(false, false), (true, false), (false, true)] {
        let scene = Scene::new(both, make_tree).await;
        assert!(!scene.fetched().await, "{both:?}");
        let (from, to) = scene.volumes;
        assert_eq!(
            (scene.from.request_count(from, "stream-p2p-out"), scene.from.request_count(from, "stream-out")),
            (0, 1)
        );
        assert_eq!(scene.to.request_count(to, "stream-in"), 1);
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_uses_gateways_when_direct_copy_fails() {
    enum At {
        Source(Faults),
        Destination(Faults),
    }
    let none = Faults::default;
    let lost = Some(("PUT /volumes/".to_owned(), 1));
    let faults = [
        (
            "not where it says",
            At::Destination(Faults { p2p_url: Some("http://127.0.0.1:9".to_owned()), ..none() }),
        ),
        ("nowhere", At::Destination(Faults { p2p_url: Some("no interface".to_owned()), ..none() })),
        ("refused", At::Destination(Faults { refuse_archives: 1, ..none() })),
        (
            "changed",
            At::Destination(Faults { spoil_archives: Some(("directory/b".to_owned(), 1)), ..none() }),
        ),
        ("answer lost", At::Source(Faults { lose_answers: lost, ..none() })),
    ];
    for (what, fault) in faults {
        let scene = Scene::new((true, true), make_tree).await;
        match fault {
            At::Source(faults) => scene.from.volumes.set_faults(faults),
            At::Destination(faults) => scene.to.volumes.set_faults(faults),
        }
        assert!(!scene.fetched().await, "{what}");
        let (from, _) = scene.volumes;
        let tried = usize::from(what != "nowhere");
        assert_eq!(
            (scene.from.request_count(from, "stream-p2p-out"), scene.from.request_count(from, "stream-out")),
            (tried, 1),
            "{what}"
        );
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_copy_is_destroyed_before_the_next_begins() {
    let scene = Scene::new((true, true), make_tree).await;
    let (from, to) = scene.volumes;
    scene.from.volumes.set_faults(Faults { hold_transfers: true, ..Faults::default() });
    let begun = async {
        while scene.to.request_count(to, "stream-in") == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        _ = scene.fetch() => panic!("it is held"),
        () = within("the first bytes", begun) => {}
    }
    within("the release of the permit", async {
        while !read_lock(&scene.to.worker.transfers.filling).is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    assert!(!scene.to.volumes.handles().contains(&to.to_string()), "the partial volume is destroyed");

    // Bytes that the worker still sends are lost, and the next copy is correct.
    scene.from.volumes.set_faults(Faults::default());
    assert!(scene.fetched().await, "the worker did not send it");
    assert_eq!(scene.from.request_count(from, "stream-p2p-out"), 2);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_direct_copy_is_replaced_and_leaves_nothing() {
    let scene = Scene::with_patience((true, true), Some(Duration::from_millis(300)), make_tree).await;
    let (from, to) = scene.volumes;
    scene.from.volumes.set_faults(Faults { hold_transfers: true, ..Faults::default() });
    assert!(!scene.fetched().await, "it is held");
    assert_eq!(
        (scene.from.request_count(from, "stream-p2p-out"), scene.from.request_count(from, "stream-out")),
        (1, 1)
    );
    assert_eq!(
        scene.to.request_count(to, "stream-in"),
        2,
        "one request of the other worker and one of the gateway"
    );

    // The other worker now sends to a volume that was destroyed.
    scene.from.volumes.set_faults(Faults::default());
    let root = scene.to.volumes.path(&to.to_string());
    let there = crate::transfer::scan::scan(&root).expect("it can be read").manifest;
    assert_eq!(there.entries().len(), scene.manifest.entries().len());
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holes_are_preserved() {
    let with_holes = |root: &Path| {
        make_tree(root);
        let file = std::fs::File::create(root.join("holes")).expect("make");
        file.set_len(64 << 20).expect("resize");
        file.write_all_at(b"in the middle", 32 << 20).expect("write");
    };
    let scene = Scene::new((true, true), with_holes).await;
    if scene.manifest.extent_bytes() == scene.manifest.size_bytes() {
        eprintln!("not applicable: no holes in files here");
        return scene.end().await;
    }
    assert!(!scene.fetched().await);
    assert_eq!(scene.from.request_count(scene.volumes.0, "stream-p2p-out"), 0);
    let path: PathBuf = scene.to.volumes.path(&scene.volumes.1.to_string()).join("holes");
    let there = std::fs::metadata(path).expect("it is there");
    assert!(there.blocks() * 512 < 1 << 20, "{} blocks", there.blocks());
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn direct_copy_requires_write_ticket_and_confirmed_address() {
    let scene = Scene::new((true, true), make_tree).await;
    let machine = FakeWorker::near();
    let near = machine.volume("contents").await;
    let worker = machine.gateway(&scene.scheduler.endpoint, UNREACHABLE);
    worker.session.set(Some(session("credential")));
    let near_worker = worker.session.current().expect("a session").worker;
    let gateway = gateway_of(&[scene.from.worker.clone(), worker], &scene.scheduler.endpoint);
    let gateway = TestServer::start(|host| host.add_service(crate::api::volumes(gateway))).await;
    let peer = rpc::client::peer(&gateway.endpoint, Outgoing::internal()).expect("an address");

    let (from, to) = scene.volumes;
    let ticket = |worker, volume, operation| scene.schedule.ticket(worker, volume, operation).0;
    let read = ticket(scene.from.id, from, TicketOperation::Read);
    let write = scene.to_write().0;
    let at_unreachable = ticket(scene.to.id, to, TicketOperation::Write);
    let url = format!("http://{}", scene.to.volumes.address());
    let of_near = ticket(near_worker, near, TicketOperation::Read);
    let not_to_write = ticket(scene.to.id, to, TicketOperation::Read);
    /// Index of the first case for which the destination exists.
    const THERE: usize = 6;
    let refused = [
        (&write, &write, &url, Reason::InvalidToken),
        (&read, &not_to_write, &url, Reason::InvalidToken),
        (&read, &"forged".to_owned(), &url, Reason::InvalidToken),
        (&read, &write, &String::new(), Reason::InvalidField),
        // The gateway of the destination does not answer.
        (&read, &at_unreachable, &url, Reason::NoPeers),
        // The destination does not exist yet.
        (&read, &write, &url, Reason::NoPeers),
        (&read, &write, &format!("{url}/volumes/other/stream-in?path=.&"), Reason::InvalidField),
        (&read, &write, &"http://169.254.169.254".to_owned(), Reason::InvalidField),
        (&read, &write, &"file:///etc/passwd".to_owned(), Reason::InvalidField),
        (&of_near, &write, &url, Reason::NoPeers),
    ];
    for (place, (ticket, destination, url, reason)) in refused.into_iter().enumerate() {
        if place == THERE {
            let runtime = &scene.to.worker.runtime;
            runtime.create_volume(to, runtime::VolumeSource::Empty).await.expect("made");
        }
        let request = pb::StreamToPeerRequest {
            ticket: ticket.clone(),
            destination_ticket: destination.clone(),
            peer_url: url.clone(),
            encoding: "raw".to_owned(),
        };
        let answer = within("an answer", VolumesClient::new(peer.clone()).stream_to_peer(request)).await;
        let refusal = Refusal::from(answer.expect_err("it is refused"));
        assert!(refusal.is(reason), "{reason}: {refusal}");
    }
    assert_eq!(scene.from.request_count(from, "stream-p2p-out"), 0, "nothing was sent");
    drop(peer);
    gateway.end().await;
    scene.end().await;
}
