//! Tests of volumes that are filled, with a fake artifact store.

use std::time::Duration;

use rpc::pb::artifacts as pb;
use tokio::time::timeout;

use super::*;
use crate::test_support::store::{Store, StoreCall, session};
use crate::test_support::{FakeGateways, TIMEOUT, TestWorker, UNREACHABLE, within};
use testing::fake::FakeWorker;

/// Creates a gateway of this machine, as after a start.
fn gateway(machine: &Arc<FakeWorker>, store: &Store) -> TestWorker {
    let worker = machine.gateway(UNREACHABLE, &store.endpoint);
    worker.session.set(Some(session("credential")));
    worker
}

fn ticket(volume: VolumeHandle) -> TicketClaims {
    TicketClaims {
        worker: domain::WorkerId::new(),
        volume,
        team: "main".to_owned(),
        operation: domain::worker::TicketOperation::Write,
        expires_at: domain::Timestamp::now(),
        endpoint: String::new(),
    }
}

/// Makes the manifest of a tree with one file.
fn tree(text: &str) -> Arc<Manifest> {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("file"), text).expect("write");
    Arc::new(crate::transfer::scan::scan(directory.path()).expect("it can be read").manifest)
}

async fn begin(
    worker: &TestWorker,
    volume: VolumeHandle,
    tree: &Arc<Manifest>,
) -> Result<VolumeWriter, WriteVolumeError> {
    within("the start of a transfer", VolumeWriter::begin(&worker.transfers, ticket(volume), tree.clone()))
        .await
}

/// Begins a volume, and sends all extents.
async fn fill(
    worker: &TestWorker,
    volume: VolumeHandle,
    tree: &Arc<Manifest>,
    text: &'static str,
) -> VolumeWriter {
    let mut filling = begin(worker, volume, tree).await.expect("the volume can be filled");
    assert_eq!(filling.missing_bytes(), text.len() as u64);
    filling.put(&worker.transfers, vec![(0, Bytes::from_static(text.as_bytes()))]).await.expect("it fits");
    filling
}

async fn completed(
    store: &mut Store,
    volume: VolumeHandle,
) -> crate::test_support::store::Answer<pb::CompleteVolumeResponse> {
    let StoreCall::CompleteVolume(request, answer) = store.next_call().await else {
        panic!("an unexpected call")
    };
    assert_eq!(request.volume_handle, volume.to_string());
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn complete_volume_is_reported_again_after_a_restart() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let volume = VolumeHandle::new();
    let killed = gateway(&machine, &store);
    let expected_tree = tree("contents");
    let filling = fill(&killed, volume, &expected_tree, "contents").await;
    tokio::select! {
        _ = filling.commit(&killed.transfers) => panic!("it was not answered"),
        // The manifest is stored, but the report to the store is not answered.
        answer = completed(&mut store, volume) => drop(answer),
    }
    drop(killed);
    machine.overwrite(volume, "CONTENTS");

    let worker = gateway(&machine, &store);
    let other = begin(&worker, volume, &tree("an unexpected call")).await.err();
    assert!(matches!(other, Some(WriteVolumeError::Complete(of)) if of == volume), "{other:?}");
    let filling = begin(&worker, volume, &expected_tree).await.expect("the same again");
    assert_eq!(filling.missing_bytes(), 0);
    let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), async {
        completed(&mut store, volume)
            .await
            .send(Ok(pb::CompleteVolumeResponse::default()))
            .expect("the gateway waits");
    });
    committed.expect("the store has the report");
    assert_eq!(machine.read(volume), "CONTENTS", "the volume is unchanged");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_is_not_reported_without_stored_manifest() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let (volume, worker) = (VolumeHandle::new(), gateway(&machine, &store));
    // A file that is in the way simulates a full disk.
    let in_the_way = worker.config.manifest_dir.join(format!("{volume}.tmp"));
    std::fs::create_dir(&in_the_way).expect("make");
    let expected_tree = tree("contents");
    let refused = fill(&worker, volume, &expected_tree, "contents").await.commit(&worker.transfers).await;
    assert!(matches!(refused, Err(WriteVolumeError::Worker(_))), "{refused:?}");
    assert!(!machine.has(volume), "the partial volume is destroyed");

    std::fs::remove_dir(&in_the_way).expect("remove");
    let filling = fill(&worker, volume, &expected_tree, "contents").await;
    let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), async {
        // The first report to the store.
        completed(&mut store, volume)
            .await
            .send(Ok(pb::CompleteVolumeResponse::default()))
            .expect("the gateway waits");
    });
    committed.expect("the store has the report");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_manifest_does_not_count_as_missing() {
    let store = Store::start().await;
    let machine = FakeWorker::near();
    let (volume, worker) = (machine.volume("contents").await, gateway(&machine, &store));
    // A directory at the path simulates a failing disk.
    std::fs::create_dir(worker.config.manifest_dir.join(volume.to_string())).expect("make");
    let refused = begin(&worker, volume, &tree("contents")).await.err();
    assert!(matches!(refused, Some(WriteVolumeError::Worker(_))), "{refused:?}");
    assert_eq!(machine.read(volume), "contents", "the volume may be complete");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_volume_is_forgotten_unless_session_is_old() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = gateway(&machine, &store);
    let refusals =
        [(rpc::Reason::StaleSession, "one", true), (rpc::Reason::DigestMismatch, "another", false)];
    for (reason, text, kept) in refusals {
        let volume = VolumeHandle::new();
        let filling = fill(&worker, volume, &tree(text), text).await;
        let (refused, ()) = tokio::join!(filling.commit(&worker.transfers), async {
            let refusal = reason.status("gantry.test", "no");
            completed(&mut store, volume).await.send(Err(refusal)).expect("the gateway waits");
        });
        assert!(
            matches!(&refused, Err(WriteVolumeError::Refused(refusal)) if refusal.is(reason)),
            "{refused:?}"
        );
        assert_eq!(
            worker.transfers.manifests.stored_here(volume).await.expect("read").is_some(),
            kept,
            "{reason}"
        );
    }
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn permit_is_held_until_volume_is_made() {
    let store = Store::start().await;
    let machine = FakeWorker::near();
    let (volume, worker) = (VolumeHandle::new(), gateway(&machine, &store));
    let tree = tree("contents");
    let making = machine.faults.hold_volumes();
    let taken = async {
        while worker.transfers.filling.lock().expect("a set").is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        _ = VolumeWriter::begin(&worker.transfers, ticket(volume), tree.clone()) => panic!("it cannot be made"),
        () = within("the permit", taken) => {}
    }
    let other = timeout(TIMEOUT, VolumeWriter::begin(&worker.transfers, ticket(volume), tree.clone()))
        .await
        .expect("an answer");
    assert!(matches!(other.err(), Some(WriteVolumeError::Busy(of)) if of == volume));

    drop(making);
    let filling = within("the end of the first", async {
        loop {
            match VolumeWriter::begin(&worker.transfers, ticket(volume), tree.clone()).await {
                Err(WriteVolumeError::Busy(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                begun => break begun,
            }
        }
    });
    assert_eq!(filling.await.expect("the volume can be filled").missing_bytes(), 8);
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_to_write_is_refused_for_a_volume_in_use() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = gateway(&machine, &store);
    // A volume of an attempt, and a replica whose manifest was lost.
    let used = VolumeHandle::new();
    machine.runtime().create_volume(used, runtime::VolumeSource::Empty).await.expect("made");
    let replica = machine.volume("contents").await;
    for volume in [used, replica] {
        let refused = begin(&worker, volume, &tree("an unexpected call")).await.err();
        assert!(matches!(refused, Some(WriteVolumeError::InUse(of)) if of == volume), "{refused:?}");
        let unpacking = crate::transfer::archives::ArchiveUpload::begin(&worker.transfers, ticket(volume));
        let refused = within("an end", unpacking.commit()).await.err();
        assert!(matches!(refused, Some(WriteVolumeError::InUse(of)) if of == volume), "{refused:?}");
        assert!(machine.has(volume));
    }
    assert_eq!(machine.read(replica), "contents", "nothing was written");

    // A volume that a killed gateway began is filled by the next one. A complete volume is not
    // filled again.
    let volume = VolumeHandle::new();
    let expected_tree = tree("contents");
    drop(fill(&worker, volume, &expected_tree, "contents").await);
    drop(worker);
    let worker = gateway(&machine, &store);
    let filling = fill(&worker, volume, &expected_tree, "contents").await;
    let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), async {
        completed(&mut store, volume)
            .await
            .send(Ok(pb::CompleteVolumeResponse::default()))
            .expect("the gateway waits");
    });
    committed.expect("it is complete");
    assert!(!worker.transfers.manifests.is_filling(volume));
    std::fs::remove_file(worker.config.manifest_dir.join(volume.to_string())).expect("remove");
    drop(worker);
    let worker = gateway(&machine, &store);
    let refused = begin(&worker, volume, &tree("an unexpected call")).await.err();
    assert!(matches!(refused, Some(WriteVolumeError::InUse(of)) if of == volume), "{refused:?}");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unchanged_files_share_disk_space() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = gateway(&machine, &store);
    let version = |edited: &str| {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, text) in [("edited", edited), ("same", "as before")] {
            std::fs::write(directory.path().join(name), text).expect("write");
            let file = File::open(directory.path().join(name)).expect("there");
            file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("set the time");
        }
        Arc::new(crate::transfer::scan::scan(directory.path()).expect("it can be read").manifest)
    };
    let volumes = [VolumeHandle::new(), VolumeHandle::new()];
    for (volume, edited, sent) in [(volumes[0], "one", 12), (volumes[1], "two", 3)] {
        let mut filling = begin(&worker, volume, &version(edited)).await.expect("the volume can be filled");
        assert_eq!(filling.missing_bytes(), sent);
        let texts = [(0, edited), (1, "as before")]
            .map(|(ordinal, text)| (ordinal, Bytes::from_static(text.as_bytes())));
        let missing = filling.missing.clone();
        let texts = texts.into_iter().filter(|(ordinal, _)| missing.contains(*ordinal)).collect();
        filling.put(&worker.transfers, texts).await.expect("it fits");
        let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), async {
            let answer = completed(&mut store, volume).await;
            answer.send(Ok(pb::CompleteVolumeResponse::default())).expect("the gateway waits");
        });
        committed.expect("the store has the report");
    }
    let mut files = Vec::new();
    for volume in volumes {
        let root = local_directory(worker.runtime.as_ref(), volume).await.expect("there");
        files.push(["edited", "same"].map(|name| root.join(name)));
    }
    let inode =
        |path: &PathBuf| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).expect("there"));
    assert_ne!(inode(&files[0][0]), inode(&files[1][0]));
    assert_eq!(inode(&files[0][1]), inode(&files[1][1]));
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_attempts_are_given_up_for_a_transfer() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = gateway(&machine, &store);
    let small = tree("contents");
    for (of_ended, freed_bytes) in [(0, 1 << 30), (2, 50 << 30)] {
        machine.set_free_bytes(1 << 30);
        let answered = async {
            let StoreCall::MakeRoom(request, answer) = store.next_call().await else {
                panic!("an unexpected call")
            };
            assert!(request.only_ended && request.size_bytes > 0, "{request:?}");
            machine.set_free_bytes(freed_bytes);
            let made = pb::MakeRoomResponse { of_ended, ..Default::default() };
            answer.send(Ok(made)).expect("the gateway waits");
        };
        let (begun, ()) = tokio::join!(begin(&worker, VolumeHandle::new(), &small), answered);
        assert_eq!(begun.is_ok(), of_ended > 0);
    }
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn extent_copies_beyond_disk_space_are_refused() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = gateway(&machine, &store);
    // One extent that the worker may have, 100,000 times. It exceeds the free space although few
    // bytes must be sent.
    let digest = domain::Digest([7; 32]);
    let extents = (0..100_000).map(|at| transfer::Extent { offset: at << 20, length: 1 << 20, digest });
    let kind = transfer::EntryKind::File { size_bytes: 100_000 << 20, extents: extents.collect() };
    let small = tree("contents");
    let mut entries = small.entries().to_vec();
    entries[1].kind = kind;
    let large = Arc::new(Manifest::new(entries, transfer::Limits::default()).expect("valid"));
    let volume = VolumeHandle::new();
    let answered = async {
        let StoreCall::MakeRoom(_, answer) = store.next_call().await else { panic!("an unexpected call") };
        answer.send(Ok(pb::MakeRoomResponse::default())).expect("the gateway waits");
    };
    let (refused, ()) = tokio::join!(begin(&worker, volume, &large), answered);
    let refused = refused.err();
    assert!(matches!(refused, Some(WriteVolumeError::InsufficientDisk(_))), "{refused:?}");
    assert!(!machine.has(volume), "nothing was kept");
    // A rejected transfer reserves no space.
    drop(fill(&worker, volume, &small, "contents").await);
    store.end().await;
}
