//! Tests of copies between workers, with real services and a gateway for each worker.

use std::path::Path;
use std::time::{Duration, Instant};

use domain::{ArtifactId, WorkerId};
use rpc::pb::artifacts as store;
use rpc::pb::streamer as pb;
use rpc::{Reason, Refusal};

mod chain;
mod evacuation;
mod proxy;
mod relay;
mod suite;
mod tickets;
mod tree;
mod trees;

use suite::{CopyResult, Suite, may_be_a_worker, until};

/// Longest wait for an expected event.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the tree that is copied.
const TREE_BYTES: u64 = 24 << 20;

/// Returns the digest of the tree that a worker's disk has under a volume.
fn on_disk(volume: &Path) -> domain::Digest {
    let scan = transfer::scan(volume, &transfer::ScanOptions::default(), None).expect("a tree");
    scan.manifest.tree_digest()
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_has_exactly_the_tree_of_its_source() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, TREE_BYTES);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    let copied = suite.materialize(artifact, two).await.expect("copied");
    let volume = suite.volume(two, &copied.volume);
    assert_eq!(on_disk(&volume), digest, "modes, times, links, holes and attributes are equal");
    assert_eq!(
        tree::blocks(&volume.join("sparse")),
        tree::blocks(&root.join("sparse")),
        "holes are preserved"
    );
    let progress = copied.progress.expect("there was a copy");
    assert_eq!((progress.bytes_done, progress.bytes_saved), (progress.bytes_total, 0));
    assert_eq!(progress.from_worker_id, one.to_string());
    assert!(copied.updates.iter().any(|update| update.route() == pb::Route::Peer), "progress is reported");

    let replicas = suite.replicas(artifact).await;
    assert_eq!(replicas.len(), 2);
    assert!(replicas.iter().all(|replica| replica.verification() == store::Verification::Verified));
    let again = suite.materialize(artifact, two).await.expect("the replica exists");
    assert_eq!((again.volume, again.progress), (copied.volume, None));

    // With one gateway to avoid, the other is returned. With both to avoid, one of them is
    // returned.
    let first = suite.read_at(artifact, &[]).await;
    let second = suite.read_at(artifact, std::slice::from_ref(&first)).await;
    assert_ne!(first, second);
    assert!([&first, &second].contains(&&suite.read_at(artifact, &[first.clone(), second.clone()]).await));

    // For a similar tree, only the extents that differ are sent.
    let nearly = suite.path("nearly");
    tree::write(&nearly, TREE_BYTES);
    std::fs::write(nearly.join("new"), [7; 1000]).expect("write");
    let (nearly, _) = suite.upload(&nearly).await;
    let replicas = suite.replicas(nearly).await;
    let destination = if replicas[0].worker_id == one.to_string() { two } else { one };
    let copied = suite.materialize(nearly, destination).await.expect("copied");
    let progress = copied.progress.expect("there was a copy");
    assert_eq!(progress.bytes_done - progress.bytes_saved, 1000);
    assert!(progress.bytes_saved >= TREE_BYTES);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upload_avoids_workers_that_it_names() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let (one, two) = (suite.add_worker("one").await, suite.add_worker("two").await);
    for (avoided, other) in [(one, two), (two, one)] {
        assert_eq!(suite.worker_for_upload(avoided).await, other);
    }
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn explanation_shows_bytes_to_move() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    suite.add_worker("one").await;
    let root = suite.path("tree");
    std::fs::create_dir(&root).expect("make");
    std::fs::write(root.join("file"), vec![7; 1 << 20]).expect("write");
    let (artifact, _) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    let [first, second] = &suite.explain_reading(artifact).await[..] else { panic!("two workers") };
    assert_eq!(*first, ("one".to_owned(), "0 bytes to move, 0 active tasks".to_owned()));
    assert_eq!(*second, ("two".to_owned(), "1048576 bytes to move, 0 active tasks".to_owned()));
    suite.materialize(artifact, two).await.expect("copied");
    let explained = suite.explain_reading(artifact).await;
    assert!(explained.iter().all(|(_, says)| says.starts_with("0 bytes to move")), "{explained:?}");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_of_all_streamers_share_one_copy() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, TREE_BYTES);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    let other = suite.another_streamer().await;

    suite.link(one).stall_after(TREE_BYTES / 4);
    let first = suite.begin(artifact, two).await;
    let first = suite.copy_result(first);
    let second = suite.begin(artifact, two).await;
    let listed = until("the copy is under way", async || {
        let listed = suite.transfers().await;
        listed
            .first()
            .filter(|listed| listed.progress.as_ref().is_some_and(|update| update.bytes_done > 0))
            .cloned()
    })
    .await;
    assert_eq!(suite.transfers().await.len(), 1);
    assert_eq!((listed.artifact_id, listed.to_worker_id), (artifact.to_string(), two.to_string()));
    assert_eq!(listed.progress.expect("progress is reported").from_worker_id, one.to_string());
    let mut third = other.begin(artifact, two).await;
    while let Some(update) = third.message().await.expect("no error") {
        let Some(pb::materialize_response::Message::Progress(update)) = update.message else {
            panic!("{update:?}")
        };
        if update.route() == pb::Route::OtherStreamer {
            break;
        }
    }

    suite.link(one).open();
    let (first, second, third) = tokio::join!(first, suite.copy_result(second), suite.copy_result(third));
    let volumes =
        [first, second, third].map(|copied: Result<CopyResult, Refusal>| copied.expect("brought").volume);
    assert!(volumes.iter().all(|volume| *volume == volumes[0]), "{volumes:?}");
    assert_eq!(on_disk(&suite.volume(two, &volumes[0])), digest);
    assert_eq!(suite.volumes_on(two).await, 1);
    assert!(suite.link(one).sent() < TREE_BYTES * 3 / 2, "the bytes are sent once");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_continues_from_another_source_when_one_dies() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, TREE_BYTES);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    suite.materialize(artifact, two).await.expect("copied");
    let three = suite.add_worker("three").await;

    let before = suite.link(two).sent();
    suite.link(one).cut_after(TREE_BYTES / 2);
    let copied = suite.materialize(artifact, three).await.expect("copied");
    assert_eq!(on_disk(&suite.volume(three, &copied.volume)), digest);
    assert_eq!(copied.progress.expect("a copy").from_worker_id, two.to_string());
    let sent = suite.link(two).sent() - before;
    assert!(sent < TREE_BYTES * 3 / 4, "received bytes are not sent again: {sent} of {TREE_BYTES} bytes");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn source_in_zone_of_destination_is_preferred() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker_in("north", "one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, _) = suite.upload(&root).await;
    let two = suite.add_worker_in("south", "two").await;
    suite.materialize(artifact, two).await.expect("copied");
    for (zone, name, source) in [("north", "three", one), ("south", "four", two)] {
        let worker = suite.add_worker_in(zone, name).await;
        let copied = suite.materialize(artifact, worker).await.expect("copied");
        let from = copied.progress.expect("there was a copy").from_worker_id;
        assert_eq!(from, source.to_string(), "{name}");
    }
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_gateways_are_named() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, _) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    suite.link(one).cut_after(0);
    let failed = suite.materialize(artifact, two).await.expect_err("the source cannot be reached");
    let source = format!("worker one at {}: ", suite.link(one).endpoint);
    assert!(failed.is(Reason::SourceFailed) && failed.message.contains(&source), "{failed}");
    suite.link(one).open();
    suite.link(two).cut_after(0);
    let failed = suite.materialize(artifact, two).await.expect_err("the destination cannot be reached");
    let destination = format!("worker two: its gateway at {} cannot be reached: ", suite.link(two).endpoint);
    assert!(failed.is(Reason::WorkerUnreachable) && failed.message.contains(&destination), "{failed}");
    assert_eq!(failed.about.get("worker"), Some(&two.to_string()));
    suite.link(two).open();
    suite.materialize(artifact, two).await.expect("both can be reached");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_copy_is_invisible_and_leaves_nothing() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, TREE_BYTES);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    // The only source fails.
    suite.link(one).cut_after(TREE_BYTES / 2);
    let refused = suite.materialize(artifact, two).await.expect_err("the source fails");
    assert!(refused.is(Reason::SourceFailed), "{refused}");
    assert_eq!(refused.about.get("source_0").map(String::as_str), Some("UNAVAILABLE"), "{refused:?}");
    assert_eq!(suite.replicas(artifact).await.len(), 1);
    suite.wait_until_empty(two).await;

    // The caller leaves.
    suite.link(one).stall_after(TREE_BYTES / 2);
    let mut asked = suite.begin(artifact, two).await;
    while let Some(update) = asked.message().await.expect("no error") {
        let Some(pb::materialize_response::Message::Progress(update)) = update.message else {
            panic!("{update:?}")
        };
        if update.bytes_done > 0 {
            break;
        }
    }
    drop(asked);
    suite.wait_until_empty(two).await;
    assert_eq!(suite.transfers().await, []);

    // Another caller cancels the copy.
    suite.link(one).stall_after(TREE_BYTES / 2);
    let asked = suite.begin(artifact, two).await;
    let waits = suite.copy_result(asked);
    let cancel = async {
        let listed = until("the copy in the list", async || suite.transfers().await.pop()).await;
        suite.cancel(&listed.transfer_id).await;
    };
    let (refused, ()) = tokio::join!(waits, cancel);
    let refused = refused.expect_err("the copy is cancelled");
    assert!(refused.is(Reason::TransferCancelled), "{refused}");
    suite.wait_until_empty(two).await;

    suite.link(one).open();
    let copied = suite.materialize(artifact, two).await.expect("copied in the end");
    assert_eq!(on_disk(&suite.volume(two, &copied.volume)), digest);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_streamer_delays_copy_until_its_claim_expires() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start_with_claims_of(Duration::from_secs(4)).await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, TREE_BYTES);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    let killed = suite.another_streamer().await;

    suite.link(one).stall_after(TREE_BYTES / 2);
    let mut asked = killed.begin(artifact, two).await;
    while let Some(update) = asked.message().await.expect("no error") {
        let Some(pb::materialize_response::Message::Progress(update)) = update.message else {
            panic!("{update:?}")
        };
        if update.bytes_done > 0 {
            break;
        }
    }
    let begun = Instant::now();
    killed.kill();
    suite.link(one).open();
    let copied = suite.materialize(artifact, two).await.expect("copied");
    assert!(
        copied.updates.iter().any(|update| update.route() == pb::Route::OtherStreamer),
        "the copy waits for the other streamer"
    );
    assert!(begun.elapsed() < TIMEOUT);
    assert_eq!(on_disk(&suite.volume(two, &copied.volume)), digest);
    until("the volume of the killed streamer is deleted", async || {
        (suite.volumes_on(two).await == 1).then_some(())
    })
    .await;
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn impossible_copy_is_rejected_with_its_reason() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, _) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    let unknown = suite.materialize(ArtifactId::new(), two).await.expect_err("the artifact does not exist");
    assert!(unknown.is(Reason::ArtifactNotFound), "{unknown}");
    let nowhere = suite.materialize(artifact, WorkerId::new()).await.expect_err("the worker does not exist");
    assert!(nowhere.is(Reason::NotAttended), "{nowhere}");
    let forged = suite.materialize_under(artifact, two, "forged").await.expect_err("the token is forged");
    assert!(forged.is(Reason::InvalidToken), "{forged}");

    // The replica is lost. Its worker detects that on the next read, and reports it to the store.
    let replica = suite.replicas(artifact).await.remove(0);
    suite.delete_volume(one, &replica.volume_handle);
    let lost = suite.materialize(artifact, two).await.expect_err("no worker has the artifact");
    assert!(lost.is(Reason::SourceFailed), "{lost}");
    assert_eq!(lost.about.get("source_0").map(String::as_str), Some("VOLUME_NOT_FOUND"), "{lost:?}");
    suite.wait_until_empty(two).await;
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_on_silent_worker_counts_when_worker_returns() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, digest) = suite.upload(&root).await;
    assert_eq!(suite.uploaded_artifact(digest).await, Some(artifact));

    suite.remove_worker(one).await;
    let two = suite.add_worker("two").await;
    assert_eq!(suite.uploaded_artifact(digest).await, None, "no worker in contact has it");
    let (newer, _) = suite.upload(&root).await;
    let replicas = suite.replicas(newer).await;
    assert_eq!(replicas.len(), 1);
    assert_eq!(replicas[0].worker_id, two.to_string());
    assert_eq!(suite.uploaded_artifact(digest).await, Some(newer));

    // The newer artifact is now on the silent worker.
    suite.remove_worker(two).await;
    assert_eq!(suite.add_worker("one").await, one);
    let known = until("its replica counts again", async || suite.uploaded_artifact(digest).await).await;
    assert_eq!(known, artifact);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_replica_is_copied_again_from_another_worker() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    suite.materialize(artifact, two).await.expect("copied");
    let replicas = suite.replicas(artifact).await;
    let lost =
        replicas.iter().find(|replica| replica.worker_id == one.to_string()).expect("the replica exists");

    // The next gateway reports the volumes that remain.
    suite.delete_volume(one, &lost.volume_handle);
    suite.remove_worker(one).await;
    assert_eq!(suite.add_worker("one").await, one);
    let left = until("the loss is known", async || {
        let replicas = suite.replicas(artifact).await;
        (replicas.len() == 1).then_some(replicas)
    })
    .await;
    assert_eq!(left[0].worker_id, two.to_string());

    let copied = suite.materialize(artifact, one).await.expect("copied");
    assert_ne!(copied.volume, lost.volume_handle, "a handle is never used twice");
    assert_eq!(copied.progress.expect("there was a copy").from_worker_id, two.to_string());
    assert_eq!(on_disk(&suite.volume(one, &copied.volume)), digest);
    assert_eq!(suite.replicas(artifact).await.len(), 2);
    suite.stop().await;
}
