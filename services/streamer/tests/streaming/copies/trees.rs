//! Tests of small trees, which the artifact store has in its database and copies to any worker.

use rpc::pb::artifacts as store;
use rpc::pb::artifacts::small_tree_entry::Content;
use rpc::pb::streamer as pb;

use super::on_disk;
use super::suite::{Suite, may_be_a_worker, until};

fn small() -> store::SmallTree {
    let entry = |path: &str, what| store::SmallTreeEntry {
        path: path.as_bytes().to_vec().into(),
        content: Some(what),
        ..Default::default()
    };
    let tool = Content::File(b"#!/bin/sh\n".to_vec().into());
    let entries = vec![
        store::SmallTreeEntry {
            mode: Some(0o4751),
            uid: 1000,
            gid: 100,
            modified_at: Some(prost_types::Timestamp { seconds: -1, nanos: 7 }),
            ..entry("bin/tool", tool)
        },
        entry("bin/link", Content::Symlink(b"../nowhere".to_vec().into())),
        entry("large", Content::File(vec![0xa5; 1_000_000].into())),
        entry("empty", Content::Directory(store::SmallTreeDirectory {})),
    ];
    store::SmallTree { entries }
}

#[tokio::test(flavor = "multi_thread")]
async fn small_tree_is_copied_from_the_store() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let (artifact, digest) = suite.create_small_tree(small()).await;
    let one = suite.add_worker("one").await;
    assert_eq!(
        suite.uploaded_artifact(digest).await,
        Some(artifact),
        "an upload need not send the same bytes"
    );
    assert_eq!(suite.replicas(artifact).await, []);

    let copied = suite.materialize(artifact, one).await.expect("copied");
    assert_eq!(
        on_disk(&suite.volume(one, &copied.volume)),
        digest,
        "modes, owners, times and links are equal"
    );
    let progress = copied.progress.expect("there was a copy");
    assert_eq!((progress.route(), &*progress.from_worker_id), (pb::Route::Store, ""));
    assert_eq!((progress.bytes_done, progress.bytes_total), (1_000_010, 1_000_010));
    let replicas = suite.replicas(artifact).await;
    assert_eq!(replicas[0].verification(), store::Verification::Verified);

    // The only replica is lost.
    suite.delete_volume(one, &copied.volume);
    suite.remove_worker(one).await;
    assert_eq!(suite.add_worker("one").await, one);
    until("the loss is known", async || suite.replicas(artifact).await.is_empty().then_some(())).await;
    let again = suite.materialize(artifact, one).await.expect("copied");
    assert_ne!(again.volume, copied.volume);
    assert_eq!(on_disk(&suite.volume(one, &again.volume)), digest);

    // The copy to another worker does not need the first worker.
    let two = suite.add_worker("two").await;
    suite.link(one).stall_after(0);
    let copied = suite.materialize(artifact, two).await.expect("copied");
    assert_eq!(copied.progress.expect("there was a copy").route(), pb::Route::Store);
    assert_eq!(on_disk(&suite.volume(two, &copied.volume)), digest);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn download_first_copies_small_tree_to_a_worker() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let (artifact, digest) = suite.create_small_tree(small()).await;
    let one = suite.add_worker("one").await;
    let endpoint = suite.read_at(artifact, &[]).await;
    assert_eq!(endpoint, suite.link(one).endpoint);
    let replicas = suite.replicas(artifact).await;
    assert_eq!(replicas.len(), 1);
    assert_eq!(on_disk(&suite.volume(one, &replicas[0].volume_handle)), digest);
    assert_eq!(suite.read_at(artifact, &[]).await, endpoint);
    assert_eq!(suite.replicas(artifact).await.len(), 1, "the tree is copied once");

    // A caller that avoids this gateway receives another, to which the tree is copied.
    let two = suite.add_worker("two").await;
    until("another worker is named", async || {
        (suite.read_at(artifact, std::slice::from_ref(&endpoint)).await == suite.link(two).endpoint)
            .then_some(())
    })
    .await;
    // Without these workers, the tree is copied to a third one.
    suite.remove_worker(one).await;
    suite.remove_worker(two).await;
    let three = suite.add_worker("three").await;
    until("another worker is named", async || {
        (suite.read_at(artifact, &[]).await == suite.link(three).endpoint).then_some(())
    })
    .await;
    suite.stop().await;
}
