//! Copies between workers of which one cannot reach the other. The link of the source breaks the
//! connection of the destination's gateway, and accepts that of the streamer, which comes next.

use domain::WorkerId;
use rpc::Reason;
use rpc::pb::artifacts as store;
use rpc::pb::streamer as pb;

use super::suite::{CopyResult, Suite, may_be_a_worker, until};
use super::{TREE_BYTES, on_disk, tree};

/// Uploads a tree to worker `one`, and adds worker `two`.
async fn start() -> (Suite, domain::ArtifactId, domain::Digest, [WorkerId; 2]) {
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, TREE_BYTES);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    (suite, artifact, digest, [one, two])
}

/// Returns the route of a copy and the number of bytes that were sent.
fn route(copied: &CopyResult) -> (pb::Route, u64) {
    let progress = copied.progress.as_ref().expect("there was a copy");
    assert_eq!(progress.bytes_done, progress.bytes_total);
    (progress.route(), progress.bytes_done - progress.bytes_saved)
}

#[tokio::test(flavor = "multi_thread")]
async fn streamer_carries_bytes_of_unreachable_source() {
    if !may_be_a_worker() {
        return;
    }
    let (suite, artifact, digest, [one, two]) = start().await;

    suite.link(one).refuse_next(1);
    let copied = suite.materialize(artifact, two).await.expect("copied");
    assert_eq!(on_disk(&suite.volume(two, &copied.volume)), digest, "the tree is equal");
    let (carried, bytes) = route(&copied);
    assert_eq!(carried, pb::Route::Relay);
    assert!(bytes >= TREE_BYTES, "{bytes}");
    assert_eq!(copied.progress.expect("there was a copy").from_worker_id, one.to_string());
    assert!(copied.updates.iter().any(|update| update.route() == pb::Route::Relay), "progress is reported");
    let replicas = suite.replicas(artifact).await;
    assert!(replicas.iter().all(|replica| replica.verification() == store::Verification::Verified));

    let [pair] = &suite.relayed_pairs().await[..] else { panic!("one pair") };
    assert_eq!((&pair.from_worker_id, &pair.to_worker_id), (&one.to_string(), &two.to_string()));
    assert_eq!(pair.gateway_endpoint, suite.link(one).endpoint);
    assert!(pair.error.contains("cannot reach"), "{pair:?}");
    let remaining = pair.remaining.expect("a time").seconds;
    assert!((1..=300).contains(&remaining), "{remaining}");

    // Of a similar tree, only the extents that differ pass through the streamer. The next copy of
    // the pair does not try the direct way, although it works now.
    let nearly = suite.path("nearly");
    tree::write(&nearly, TREE_BYTES);
    std::fs::write(nearly.join("new"), [7; 1000]).expect("write");
    let nearly = suite.upload_avoiding(&nearly, &[two]).await;
    let copied = suite.materialize(nearly, two).await.expect("copied");
    assert_eq!(route(&copied), (pb::Route::Relay, 1000));
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reachable_source_is_preferred_to_relay() {
    if !may_be_a_worker() {
        return;
    }
    let (mut suite, artifact, _, [one, two]) = start().await;
    let three = suite.add_worker("three").await;
    suite.link(one).refuse_next(1);
    let copied = suite.materialize(artifact, three).await.expect("copied");
    assert_eq!(route(&copied).0, pb::Route::Relay);

    let root = suite.path("other");
    tree::write(&root, 1 << 20);
    std::fs::write(root.join("new"), [7; 1000]).expect("write");
    let other = suite.upload_avoiding(&root, &[two, three]).await;
    suite.materialize(other, two).await.expect("copied");
    let copied = suite.materialize(other, three).await.expect("copied");
    assert_eq!(route(&copied).0, pb::Route::Peer);
    assert_eq!(copied.progress.expect("there was a copy").from_worker_id, two.to_string());
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_copy_stops_its_relay() {
    if !may_be_a_worker() {
        return;
    }
    let (suite, artifact, digest, [one, two]) = start().await;

    suite.link(one).refuse_next(1);
    suite.link(one).stall_after(TREE_BYTES / 2);
    let asked = suite.begin(artifact, two).await;
    let waits = suite.copy_result(asked);
    let cancel = async {
        let is_relayed =
            |progress: &pb::TransferProgress| progress.route() == pb::Route::Relay && progress.bytes_done > 0;
        let listed = until("a relay in the list", async || {
            suite.transfers().await.pop().filter(|listed| listed.progress.as_ref().is_some_and(is_relayed))
        })
        .await;
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
async fn relay_continues_with_next_source() {
    if !may_be_a_worker() {
        return;
    }
    let (mut suite, artifact, digest, [one, two]) = start().await;
    suite.materialize(artifact, two).await.expect("copied");
    let three = suite.add_worker("three").await;

    // The gateway can reach no source, and the first source of the relay loses its replica.
    let replicas = suite.replicas(artifact).await;
    for worker in [one, two] {
        suite.link(worker).refuse_next(1);
    }
    let lost = replicas.iter().find(|replica| replica.worker_id == one.to_string()).expect("a replica");
    suite.delete_volume(one, &lost.volume_handle);
    let copied = suite.materialize(artifact, three).await.expect("copied");
    assert_eq!(on_disk(&suite.volume(three, &copied.volume)), digest);
    assert_eq!(route(&copied).0, pb::Route::Relay);
    assert_eq!(copied.progress.expect("there was a copy").from_worker_id, two.to_string());
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_relay_reports_both_errors() {
    if !may_be_a_worker() {
        return;
    }
    let (suite, artifact, _, [one, two]) = start().await;

    // The source answers the streamer, and then breaks off.
    suite.link(one).refuse_next(1);
    suite.link(one).cut_after(TREE_BYTES / 2);
    let failed = suite.materialize(artifact, two).await.expect_err("the source breaks off");
    let source = format!("worker one at {}: ", suite.link(one).endpoint);
    assert!(failed.is(Reason::SourceFailed) && failed.message.contains(&source), "{failed}");
    assert!(failed.message.contains("; the streamer cannot read the source either: "), "{failed}");
    assert_eq!(failed.about.get("source_0").map(String::as_str), Some("UNAVAILABLE"), "{failed:?}");
    suite.wait_until_empty(two).await;
    assert_eq!(suite.relayed_pairs().await, [], "the next copy is tried directly");
    suite.stop().await;
}
