//! Manifests of a fake worker, through restarts and boots.

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
async fn a_manifest_proves_only_in_the_boot_in_which_it_was_kept() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let volume = machine.volume("contents").await;
    let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
    open("first").keep(&*worker, volume, "main", Arc::new(manifest())).await.expect("room");

    let again = open("first").kept(volume).await.expect("read").expect("the manifest");
    assert_eq!((again.tree_digest(), again.this_boot), (manifest().tree_digest(), true));
    assert!(
        !open("second").kept(volume).await.expect("read").expect("the manifest").this_boot,
        "it must be hashed again"
    );

    let trees = open("first");
    trees.forget(volume).await;
    assert!(trees.kept(volume).await.expect("read").is_none());
}

#[tokio::test]
async fn what_an_earlier_gateway_kept_in_this_boot_is_found() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (here, gone) = (machine.volume("contents").await, machine.volume("others").await);
    let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
    let trees = open("first");
    let digest = async |volume| {
        let manifest = trees.proven(&*worker, volume, "main").await.expect("a manifest");
        manifest.extents().next().expect("content").extent.digest
    };
    let (content, others) = (digest(here).await, digest(gone).await);
    trees.forget(gone).await;

    let again = open("first");
    assert!(again.find("main", &content).is_none());
    again.recall().await;
    assert_eq!(again.find("main", &content).expect("found").volume, here);
    assert!(again.find("other", &content).is_none(), "it is nobody else's");
    assert!(again.find("main", &others).is_none());

    let later = open("second");
    later.recall().await;
    assert!(later.find("main", &content).is_none(), "it was not compared since");
}

#[tokio::test]
async fn a_kept_manifest_that_was_damaged_counts_for_nothing() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (volume, trees) = (machine.volume("contents").await, || {
        Manifests::open(directory.path(), "boot".to_owned()).expect("open")
    });
    trees().keep(&*worker, volume, "main", Arc::new(manifest())).await.expect("room");
    let path = directory.path().join(volume.to_string());
    let whole = std::fs::read(&path).expect("the file");
    for cut in 0..whole.len() {
        std::fs::write(&path, &whole[..cut]).expect("write");
        assert!(trees().kept(volume).await.expect("read").is_none(), "cut after {cut} bytes");
    }
}

#[tokio::test]
async fn what_a_killed_gateway_was_writing_is_removed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (half, whole) = (VolumeHandle::new(), machine.volume("contents").await);
    let open = || Manifests::open(directory.path(), "boot".to_owned()).expect("open");
    open().keep(&*worker, whole, "main", Arc::new(manifest())).await.expect("room");
    std::fs::write(directory.path().join(format!("{half}.tmp")), "half").expect("write");
    assert!(open().kept(whole).await.expect("read").is_some());
    let left: Vec<_> = std::fs::read_dir(directory.path()).expect("list").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[tokio::test]
async fn a_volume_that_did_not_survive_is_damaged_until_it_is_destroyed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let machine = testing::fake::FakeWorker::near();
    let worker = machine.runtime();
    let (whole, lost) = (machine.volume("contents").await, machine.volume("contents").await);
    let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
    let trees = open("first");
    for volume in [whole, lost] {
        trees.proven(&*worker, volume, "main").await.expect("a manifest");
    }
    machine.overwrite(lost, "contentS");
    trees.proven(&*worker, lost, "main").await.expect("in this boot nothing is lost");

    let trees = open("second");
    let digest = trees.proven(&*worker, whole, "main").await.expect("it is what it was").tree_digest();
    trees.verify(&*worker, whole, "main", digest).await.expect("it is what it was");
    let damaged = trees.verify(&*worker, lost, "main", digest).await;
    assert!(matches!(damaged, Err(ManifestError::Damaged(volume)) if volume == lost), "{damaged:?}");
    assert_eq!(trees.damaged(), BTreeSet::from([lost]));

    let trees = open("third");
    assert_eq!(trees.damaged(), BTreeSet::from([lost]), "it is remembered");
    assert!(matches!(trees.proven(&*worker, lost, "main").await, Err(ManifestError::Damaged(_))));
    trees.forget(lost).await;
    assert_eq!(trees.damaged(), BTreeSet::new());
    assert_eq!(open("third").damaged(), BTreeSet::new());
}
