//! Tests of manifests across restarts and boots.

use transfer::{Entry, EntryKind, Limits};

use super::*;

fn manifest() -> Manifest {
    let root = Entry {
        path: Vec::new(),
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime_seconds: 0,
        mtime_nanos: 0,
        xattrs: Vec::new(),
        kind: EntryKind::Directory,
    };
    Manifest::new([root], Limits::default()).expect("a valid manifest")
}

#[tokio::test]
async fn manifest_is_proof_only_in_its_boot() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let volume = machine.volume("contents").await;
    let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
    open("first").store(&*worker, volume, "main", Arc::new(manifest())).await.expect("room");

    let again = open("first").stored_here(volume).await.expect("read").expect("the manifest");
    assert_eq!((again.tree_digest(), again.this_boot), (manifest().tree_digest(), true));
    assert!(
        !open("second").stored_here(volume).await.expect("read").expect("the manifest").this_boot,
        "the volume must be hashed again"
    );

    let trees = open("first");
    trees.forget(volume).await;
    assert!(trees.stored_here(volume).await.expect("read").is_none());
}

#[tokio::test]
async fn manifests_of_earlier_gateways_are_found() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (here, gone) = (machine.volume("contents").await, machine.volume("others").await);
    let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
    let trees = open("first");
    let digest = async |volume| {
        let manifest = trees.load_verified(&*worker, volume, "main").await.expect("a manifest");
        manifest.extents().next().expect("content").extent.digest
    };
    let (content, others) = (digest(here).await, digest(gone).await);
    trees.forget(gone).await;

    let again = open("first");
    assert!(again.find("main", &content).is_none());
    again.load_earlier().await;
    assert_eq!(again.find("main", &content).expect("found").volume, here);
    assert!(again.find("other", &content).is_none(), "other teams do not find it");
    assert!(again.find("main", &others).is_none());

    let later = open("second");
    later.load_earlier().await;
    assert!(later.find("main", &content).is_none(), "it was not compared in this boot");
}

#[tokio::test]
async fn truncated_manifest_file_counts_as_missing() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (volume, trees) = (machine.volume("contents").await, || {
        Manifests::open(directory.path(), "boot".to_owned()).expect("open")
    });
    trees().store(&*worker, volume, "main", Arc::new(manifest())).await.expect("room");
    let path = directory.path().join(volume.to_string());
    let whole = std::fs::read(&path).expect("the file");
    for cut in 0..whole.len() {
        std::fs::write(&path, &whole[..cut]).expect("write");
        assert!(trees().stored_here(volume).await.expect("read").is_none(), "cut after {cut} bytes");
    }
}

#[tokio::test]
async fn partial_manifest_files_are_removed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (half, whole) = (VolumeHandle::new(), machine.volume("contents").await);
    let open = || Manifests::open(directory.path(), "boot".to_owned()).expect("open");
    open().store(&*worker, whole, "main", Arc::new(manifest())).await.expect("room");
    std::fs::write(directory.path().join(format!("{half}.tmp")), "half").expect("write");
    assert!(open().stored_here(whole).await.expect("read").is_some());
    let left: Vec<_> = std::fs::read_dir(directory.path()).expect("list").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[tokio::test]
async fn changed_volume_is_found_before_its_use() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let trees = Manifests::open(directory.path(), "boot".to_owned()).expect("open");
    let (small, large) = (machine.volume("contents").await, machine.volume("contents").await);
    for number in 0..MAX_ALWAYS_INSPECTED {
        std::fs::write(machine.path(large).join(number.to_string()), "").expect("write");
    }
    let load = async |volume| trees.load_verified(&*worker, volume, "main").await;
    for volume in [small, large] {
        load(volume).await.expect("a manifest");
        std::fs::write(machine.path(volume).join("file"), "Contents").expect("write");
    }
    load(large).await.expect("a large tree was inspected a moment ago");
    let Err(ManifestError::Damaged(loss)) = load(small).await else { panic!("it has changed") };
    assert_eq!(loss.cause, "is damaged: \"file\" was changed after it was written");
    // Trees may share files, so all are inspected again.
    assert!(matches!(load(large).await, Err(ManifestError::Damaged(_))));
    std::fs::remove_dir_all(machine.path(small)).expect("remove");
}

#[tokio::test]
async fn volume_stays_damaged_until_it_is_destroyed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (whole, lost) = (machine.volume("contents").await, machine.volume("contents").await);
    let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
    let trees = open("first");
    for volume in [whole, lost] {
        trees.load_verified(&*worker, volume, "main").await.expect("a manifest");
    }
    machine.overwrite(lost, "contentS");
    trees.load_verified(&*worker, lost, "main").await.expect("contents are not compared in their boot");

    let trees = open("second");
    let digest =
        trees.load_verified(&*worker, whole, "main").await.expect("the volume is unchanged").tree_digest();
    trees.verify(&*worker, whole, "main", digest).await.expect("the volume is unchanged");
    let damaged = trees.verify(&*worker, lost, "main", digest).await;
    assert!(matches!(damaged, Err(ManifestError::Damaged(ref loss)) if loss.volume == lost), "{damaged:?}");
    assert_eq!(trees.damaged(), BTreeSet::from([lost]));

    let trees = open("third");
    assert_eq!(trees.damaged(), BTreeSet::from([lost]), "the damage is remembered");
    assert!(matches!(trees.load_verified(&*worker, lost, "main").await, Err(ManifestError::Damaged(_))));
    trees.forget(lost).await;
    assert_eq!(trees.damaged(), BTreeSet::new());
    assert_eq!(open("third").damaged(), BTreeSet::new());
}
