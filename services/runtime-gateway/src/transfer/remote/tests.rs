//! Tests of volumes on another machine, whose bytes pass through GNU tar, with a fake artifact
//! store.

use std::os::unix::fs::{FileExt, symlink};

use domain::VolumeHandle;
use domain::worker::{TicketClaims, TicketOperation};
use rpc::pb::artifacts as pb;
use rustix::fs::{XattrFlags, setxattr};
use transfer::{ReadOptions, TreeReader, TreeWriter, WriteOptions};

use super::*;
use crate::test_support::store::{Store, StoreCall, session};
use crate::test_support::{FakeGateways, TestWorker, UNREACHABLE, within};
use crate::transfer::archives::{self, ArchiveUpload};
use crate::transfer::error::ManifestError;
use crate::transfer::read;
use crate::transfer::write::VolumeWriter;
use testing::fake::FakeWorker;

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
        operation: TicketOperation::Write,
        expires_at: domain::Timestamp::now(),
        endpoint: String::new(),
    }
}

/// Makes a tree that plain tar does not preserve, in an order that differs from its archives.
fn tree(root: &Path) -> Arc<Manifest> {
    std::fs::create_dir_all(root.join("directory/empty")).expect("make");
    let large: Vec<u8> = (0..2_500_000_u32).map(|at| (at % 251) as u8).collect();
    for name in ["z", "directory/b", "a"] {
        std::fs::write(root.join(name), &large[name.len()..]).expect("write");
    }
    std::fs::write(root.join("directory/nothing"), "").expect("write");
    std::fs::hard_link(root.join("a"), root.join("directory/link")).expect("link");
    symlink("/etc/passwd", root.join("symbolic")).expect("link");
    let holes = std::fs::File::create(root.join("holes")).expect("make");
    holes.set_len(5 << 20).expect("resize");
    holes.write_all_at(b"in the middle", 2 << 20).expect("write");
    if let Err(error) = setxattr(root.join("z"), "user.gantry", b"value", XattrFlags::empty()) {
        eprintln!("without extended attributes: {error}");
    }
    Arc::new(crate::transfer::scan::scan(root).expect("it can be read").manifest)
}

/// Answers the next call, which must report that `volume` is complete.
async fn acknowledge(store: &mut Store, volume: VolumeHandle) {
    let StoreCall::CompleteVolume(request, answer) = store.next_call().await else {
        panic!("an unexpected call")
    };
    assert_eq!(request.volume_handle, volume.to_string());
    answer.send(Ok(pb::CompleteVolumeResponse::default())).expect("the gateway waits");
}

async fn fill(worker: &TestWorker, volume: VolumeHandle, root: &Path, tree: &Arc<Manifest>) -> VolumeWriter {
    let mut filling = VolumeWriter::begin(&worker.transfers, ticket(volume), tree.clone())
        .await
        .expect("the volume can be filled");
    assert_eq!(filling.missing_bytes(), tree.extent_bytes(), "everything is sent");
    let mut reader = TreeReader::new(root, tree.clone(), ReadOptions::default()).expect("a reader");
    for ordinal in 0..tree.extent_count() {
        let data = reader.read(ordinal).expect("content");
        filling.put(&worker.transfers, vec![(ordinal, data)]).await.expect("the extents are accepted");
    }
    filling
}

/// Reads a volume into a directory.
async fn read_into(worker: &TestWorker, volume: VolumeHandle, to: &Path) -> Result<(), ReadVolumeError> {
    let manifest = worker.transfers.manifest(&ticket(volume)).await?;
    let (batches, mut ready) = mpsc::channel::<Vec<ExtentData>>(4);
    let expected_tree = OrdinalRanges::all(manifest.extent_count());
    let send = move |batch| batches.blocking_send(batch).is_ok();
    let reading = read::read(&worker.transfers, volume, manifest.clone(), expected_tree, send);
    let writing = async {
        let options = WriteOptions { devices: true, ..WriteOptions::default() };
        let mut writer = TreeWriter::new(to, manifest.clone(), options).expect("a writer");
        while let Some(batch) = ready.recv().await {
            batch.iter().try_for_each(|extent| writer.put(extent.ordinal, &extent.data)).expect("verified");
        }
        writer
    };
    let (read, writer) = tokio::join!(reading, writing);
    read?;
    writer.finish().expect("everything came");
    Ok(())
}

async fn packed(worker: &TestWorker, volume: VolumeHandle, path: &str) -> Result<Vec<u8>, ReadVolumeError> {
    let (pieces, mut ready) = mpsc::channel(4);
    let ticket = ticket(volume);
    let packing = archives::pack(&worker.transfers, &ticket, path.as_bytes(), pieces);
    let receiving = async {
        let mut archive = Vec::new();
        while let Some(Some(piece)) = ready.recv().await {
            archive.extend_from_slice(&piece);
        }
        archive
    };
    let (packed, archive) = tokio::join!(packing, receiving);
    packed.map(|_| archive)
}

async fn file_of(worker: &TestWorker, volume: VolumeHandle, path: &str) -> Result<Vec<u8>, ReadVolumeError> {
    let manifest = worker.transfers.manifest(&ticket(volume)).await?;
    let (chunks, mut ready) = mpsc::channel(4);
    let reading = read::read_file(&worker.transfers, volume, manifest, path.into(), chunks);
    let receiving = async {
        let (mut bytes, mut size_received) = (Vec::new(), None);
        while let Some((size, data)) = ready.recv().await {
            bytes.extend_from_slice(&data);
            size_received = Some(size);
        }
        (bytes, size_received)
    };
    let (read, (bytes, size_received)) = tokio::join!(reading, receiving);
    read?;
    assert_eq!(size_received, Some(bytes.len() as u64), "{path}");
    Ok(bytes)
}

fn digest_of(archive: &[u8]) -> domain::Digest {
    let found = ArchiveReader::new(archive).read(Limits::default(), |_| Ok(()));
    found.expect("a whole archive").tree_digest()
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_volume_is_read_unchanged_through_any_gateway() {
    let mut store = Store::start().await;
    let machine = FakeWorker::far();
    let (volume, directory) = (VolumeHandle::new(), tempfile::tempdir().expect("a directory"));
    let root = directory.path().join("tree");
    let expected_tree = tree(&root);
    let worker = gateway(&machine, &store);
    let filling = fill(&worker, volume, &root, &expected_tree).await;
    let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), acknowledge(&mut store, volume));
    committed.expect("the store has the report");
    let lossy = crate::transfer::scan::scan(&machine.path(volume)).expect("it can be read").manifest;
    assert_eq!(
        lossy.find(b"directory/link"),
        expected_tree.find(b"directory/link"),
        "processes see the link"
    );
    let none = std::fs::read_dir(&worker.config.manifest_dir).expect("list").count();
    assert_eq!(none, 0, "the gateway stores no manifest");

    let standby = gateway(&machine, &store);
    let manifest = standby.transfers.manifest(&ticket(volume)).await.expect("kept beside it");
    assert_eq!(manifest.tree_digest(), expected_tree.tree_digest());
    let to = directory.path().join("again");
    std::fs::create_dir(&to).expect("make");
    within("the tree", read_into(&standby, volume, &to)).await.expect("read");
    let again = crate::transfer::scan::scan(&to).expect("it can be read").manifest;
    assert_eq!(again.tree_digest(), expected_tree.tree_digest(), "times, attributes and holes are preserved");

    assert_eq!(digest_of(&packed(&standby, volume, "").await.expect("packed")), expected_tree.tree_digest());
    let inside = expected_tree.subtree(b"directory").expect("valid").expect("a directory");
    let inside = inside.manifest().tree_digest();
    assert_eq!(digest_of(&packed(&standby, volume, "directory").await.expect("packed")), inside);
    let none = packed(&standby, volume, "z").await.err();
    assert!(matches!(none, Some(ReadVolumeError::PathNotFound(_))), "{none:?}");

    for path in ["z", "directory/link", "directory/nothing", "holes"] {
        let bytes = file_of(&standby, volume, path).await.expect(path);
        assert!(bytes == std::fs::read(root.join(path)).expect("read"), "{path}");
    }
    for path in ["symbolic", "directory", "symbolic/x"] {
        let refused = file_of(&standby, volume, path).await.err();
        assert!(matches!(refused, Some(ReadVolumeError::NotAFile { .. })), "{path}: {refused:?}");
    }
    let none = file_of(&standby, volume, "none").await.err();
    assert!(matches!(none, Some(ReadVolumeError::PathNotFound(_))), "{none:?}");

    // If the same tree is written again, it is only reported again. Another tree is rejected.
    let filling = VolumeWriter::begin(&standby.transfers, ticket(volume), expected_tree.clone())
        .await
        .expect("the same");
    assert_eq!(filling.missing_bytes(), 0);
    let (committed, ()) = tokio::join!(filling.commit(&standby.transfers), acknowledge(&mut store, volume));
    committed.expect("the store has the report");
    let other = VolumeWriter::begin(&standby.transfers, ticket(volume), Arc::new(lossy)).await.err();
    assert!(matches!(other, Some(WriteVolumeError::Complete(_))), "{other:?}");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn change_on_the_worker_is_detected_when_read() {
    let mut store = Store::start().await;
    let machine = FakeWorker::far();
    let (volume, directory) = (VolumeHandle::new(), tempfile::tempdir().expect("a directory"));
    let root = directory.path().join("tree");
    let expected_tree = tree(&root);
    let worker = gateway(&machine, &store);
    let filling = fill(&worker, volume, &root, &expected_tree).await;
    let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), acknowledge(&mut store, volume));
    committed.expect("the store has the report");
    let file = std::fs::File::options().write(true).open(machine.path(volume).join("directory/b"));
    file.expect("open").write_all_at(b"X", 2_000_000).expect("write");

    let to = directory.path().join("again");
    std::fs::create_dir(&to).expect("make");
    let is_changed = |error: Option<ReadVolumeError>| {
        assert!(matches!(&error, Some(ReadVolumeError::Archive(ArchiveError::Changed { .. }))), "{error:?}");
    };
    let manifest = worker.transfers.manifest(&ticket(volume)).await.expect("kept");
    let wanted = OrdinalRanges::all(manifest.extent_count());
    is_changed(read::read(&worker.transfers, volume, manifest.clone(), wanted, |_| true).await.err());
    is_changed(packed(&worker, volume, "").await.err());
    is_changed(file_of(&worker, volume, "directory/b").await.err());
    file_of(&worker, volume, "z").await.expect("the file is unchanged");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_volume_is_scanned_once() {
    let store = Store::start().await;
    let machine = FakeWorker::far();
    let worker = gateway(&machine, &store);
    let volume = machine.volume("contents").await;
    let made = worker.transfers.manifests.scan(&*machine.runtime(), volume, "main").await.expect("read");
    assert_eq!(made.entries().len(), 2);
    let standby = gateway(&machine, &store);
    standby
        .transfers
        .manifests
        .verify(&*machine.runtime(), volume, "main", made.tree_digest())
        .await
        .expect("kept");
    assert_eq!(file_of(&standby, volume, "file").await.expect("read"), b"contents");
    // The digest differs from that in the store, so the volume is damaged.
    let other = standby
        .transfers
        .manifests
        .verify(&*machine.runtime(), volume, "main", domain::Digest([7; 32]))
        .await;
    assert!(matches!(other, Err(ManifestError::Damaged(_))), "{other:?}");
    store.end().await;
}

/// Uploads an archive to a volume.
async fn unpack(
    worker: &TestWorker,
    volume: VolumeHandle,
    archive: &[u8],
    commit: bool,
) -> Result<Arc<Manifest>, WriteVolumeError> {
    let mut unpacking = ArchiveUpload::begin(&worker.transfers, ticket(volume));
    for piece in archive.chunks(10_000) {
        unpacking.data(Bytes::copy_from_slice(piece)).await?;
    }
    if commit { unpacking.commit().await } else { Err(WriteVolumeError::BrokenOff) }
}

#[tokio::test(flavor = "multi_thread")]
async fn archive_is_forwarded_and_bad_archive_leaves_nothing() {
    let mut store = Store::start().await;
    let machine = FakeWorker::far();
    let (volume, directory) = (VolumeHandle::new(), tempfile::tempdir().expect("a directory"));
    let (root, outside) = (directory.path().join("tree"), directory.path().join("outside"));
    std::fs::create_dir(&outside).expect("make");
    let expected_tree = tree(&root);
    let tar = |arguments: &[&str]| {
        let mut command = std::process::Command::new("tar");
        let output = command.arg("-C").arg(directory.path()).args(arguments).output().expect("tar");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let archive = tar(&["-C", "tree", "--format=posix", "--sparse", "--xattrs", "-c", "."]);
    let worker = gateway(&machine, &store);

    // A path through a link that leads outside. Tar would follow the link if the archive created it
    // first.
    symlink(&outside, directory.path().join("out")).expect("link");
    let mut bad = tar(&["-c", "out"]);
    bad.truncate(512);
    bad.extend(tar(&["--transform", "s,tree,out,", "--no-recursion", "-c", "tree/a"]));
    let refused = within("an answer", unpack(&worker, volume, &bad, true)).await.err();
    assert!(
        matches!(&refused, Some(WriteVolumeError::Archive(ArchiveError::Malformed { .. }))),
        "{refused:?}"
    );
    assert!(!machine.has(volume), "the partial volume is destroyed");
    assert_eq!(std::fs::read_dir(&outside).expect("list").count(), 0);

    for (cut, commit) in [(5_000, true), (1_000_000, true), (1_000_000, false), (archive.len(), false)] {
        let refused = within("an answer", unpack(&worker, volume, &archive[..cut], commit)).await;
        refused.expect_err("the archive is not complete");
        within("the end", async {
            while machine.has(volume) || !worker.transfers.filling.lock().expect("a set").is_empty() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    let unpacking = unpack(&worker, volume, &archive, true);
    let (unpacked, ()) = tokio::join!(unpacking, acknowledge(&mut store, volume));
    assert_eq!(unpacked.expect("the store has the report").tree_digest(), expected_tree.tree_digest());
    let to = directory.path().join("again");
    std::fs::create_dir(&to).expect("make");
    let standby = gateway(&machine, &store);
    within("the tree", read_into(&standby, volume, &to)).await.expect("read");
    assert_eq!(
        crate::transfer::scan::scan(&to).expect("it can be read").manifest.tree_digest(),
        expected_tree.tree_digest()
    );
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_names_in_archives_are_ignored() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    let mut store = Store::start().await;
    let (machine, volume) = (FakeWorker::far(), VolumeHandle::new());
    let worker = gateway(&machine, &store);
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("file"), "contents").expect("write");
    // On the source machine, these names have other ids.
    let mut tar = std::process::Command::new("tar");
    let tar = tar.args(["--owner=root:1234", "--group=root:2345", "-c", "-C"]).arg(directory.path()).arg(".");
    let archive = tar.output().expect("tar").stdout;
    let unpacking = unpack(&worker, volume, &archive, true);
    let (unpacked, ()) = tokio::join!(unpacking, acknowledge(&mut store, volume));
    unpacked.expect("the store has the report");
    let runtime::Contents::Remote(remote) = worker.runtime.contents(volume).await.expect("the contents")
    else {
        panic!("it is near")
    };
    let found = scan(&remote).await.expect("it can be read");
    for entry in found.entries() {
        assert_eq!((entry.uid, entry.gid), (1234, 2345), "{:?}", entry.path());
    }
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_is_copied_in_source_order() {
    let mut store = Store::start().await;
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("tree");
    let expected_tree = tree(&root);
    let one = gateway(&FakeWorker::far(), &store);
    let from = VolumeHandle::new();
    let filling = fill(&one, from, &root, &expected_tree).await;
    let (committed, ()) = tokio::join!(filling.commit(&one.transfers), acknowledge(&mut store, from));
    committed.expect("the store has the report");
    for machine in [FakeWorker::far(), FakeWorker::near()] {
        let (other, to) = (gateway(&machine, &store), VolumeHandle::new());
        let mut filling = VolumeWriter::begin(&other.transfers, ticket(to), expected_tree.clone())
            .await
            .expect("the volume can be filled");
        let (batches, mut ready) = mpsc::channel::<Vec<ExtentData>>(4);
        let mut expected = transfer::PendingExtents::new(&filling.missing);
        let send = move |batch| batches.blocking_send(batch).is_ok();
        let reading = read::read(&one.transfers, from, expected_tree.clone(), filling.missing.clone(), send);
        let writing = async {
            while let Some(batch) = ready.recv().await {
                for extent in &batch {
                    assert!(
                        expected.take(&expected_tree, extent.ordinal),
                        "file by file: {}",
                        extent.ordinal
                    );
                }
                let extents = batch.into_iter().map(|extent| (extent.ordinal, extent.data)).collect();
                filling.put(&other.transfers, extents).await.expect("the extents are accepted");
            }
            filling
        };
        let (read, filling) = tokio::join!(reading, writing);
        read.expect("it is there");
        assert!(expected.is_empty());
        let (committed, ()) = tokio::join!(filling.commit(&other.transfers), acknowledge(&mut store, to));
        assert_eq!(committed.expect("the store has the report").tree_digest(), expected_tree.tree_digest());
        let packed = packed(&other, to, "").await.expect("packed");
        assert_eq!(digest_of(&packed), expected_tree.tree_digest());
    }
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_transfer_can_begin_again() {
    let mut store = Store::start().await;
    let machine = FakeWorker::far();
    let (volume, directory) = (VolumeHandle::new(), tempfile::tempdir().expect("a directory"));
    let root = directory.path().join("tree");
    let expected_tree = tree(&root);
    let worker = gateway(&machine, &store);
    drop(fill(&worker, volume, &root, &expected_tree).await);
    let free = async {
        while !worker.transfers.filling.lock().expect("a set").is_empty() {
            tokio::task::yield_now().await;
        }
    };
    within("the end of the first", free).await;
    let filling = fill(&worker, volume, &root, &expected_tree).await;
    assert!(filling.takes_whole_files());
    filling.abandon().await;
    let filling = fill(&worker, volume, &root, &expected_tree).await;
    let (committed, ()) = tokio::join!(filling.commit(&worker.transfers), acknowledge(&mut store, volume));
    committed.expect("the store has the report");

    // The worker rejects the bytes.
    let volume = VolumeHandle::new();
    let mut filling = VolumeWriter::begin(&worker.transfers, ticket(volume), expected_tree.clone())
        .await
        .expect("the volume can be filled");
    std::fs::create_dir_all(machine.path(volume).join("z/in-the-way")).expect("make");
    let mut reader = TreeReader::new(&root, expected_tree.clone(), ReadOptions::default()).expect("a reader");
    let refused = async {
        for ordinal in 0..expected_tree.extent_count() {
            filling.put(&worker.transfers, vec![(ordinal, reader.read(ordinal).expect("content"))]).await?;
        }
        filling.commit(&worker.transfers).await
    };
    let refused = within("an answer", refused).await.err();
    assert!(matches!(refused, Some(WriteVolumeError::Worker(_))), "{refused:?}");
    store.end().await;
}
