//! Copies from worker to worker: streamers, scheduler, artifact store, and gateways with workers of their own, over gRPC.

use std::path::Path;
use std::time::{Duration, Instant};

use domain::{ArtifactId, WorkerId};
use rpc::pb::artifacts as store;
use rpc::pb::streamer as pb;
use rpc::{Reason, Refusal};

mod proxy;
mod suite;
mod tickets;
mod tree;
mod trees;

use suite::{Suite, WorkerProvided, may_be_a_worker, until};

/// Long enough for anything that happens at all.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of the tree that is copied.
const SIZE: u64 = 24 << 20;

/// What a worker's disk has under a volume, by the digest of the tree.
fn on_disk(volume: &Path) -> domain::Digest {
    let scan = transfer::scan(volume, &transfer::ScanOptions::default(), None).expect("a tree");
    scan.manifest.tree_digest()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_worker_has_comes_to_another_to_the_last_bit() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, SIZE);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    let brought = suite.materialize(artifact, two).await.expect("brought");
    let volume = suite.volume(two, &brought.volume);
    assert_eq!(on_disk(&volume), digest, "modes, times, links, holes and attributes are in it");
    assert_eq!(tree::blocks(&volume.join("sparse")), tree::blocks(&root.join("sparse")), "holes stay holes");
    let progress = brought.progress.expect("there was a copy");
    assert_eq!((progress.bytes_done, progress.bytes_saved), (progress.bytes_total, 0));
    assert_eq!(progress.from_worker_id, one.to_string());
    assert!(brought.told.iter().any(|told| told.route() == pb::Route::Peer), "it is said how far it is");

    let replicas = suite.replicas(artifact).await;
    assert_eq!(replicas.len(), 2);
    assert!(replicas.iter().all(|replica| replica.verification() == store::Verification::Verified));
    let again = suite.materialize(artifact, two).await.expect("it is there");
    assert_eq!((again.volume, again.progress), (brought.volume, None));

    // Who could not read at one is sent to the other; who could read at neither, to one of them again.
    let first = suite.read_at(artifact, &[]).await;
    let second = suite.read_at(artifact, std::slice::from_ref(&first)).await;
    assert_ne!(first, second);
    assert!([&first, &second].contains(&&suite.read_at(artifact, &[first.clone(), second.clone()]).await));

    // Nearly the same once more: only what differs moves.
    let nearly = suite.path("nearly");
    tree::write(&nearly, SIZE);
    std::fs::write(nearly.join("new"), [7; 1000]).expect("write");
    let (nearly, _) = suite.upload(&nearly).await;
    let replicas = suite.replicas(nearly).await;
    let destination = if replicas[0].worker_id == one.to_string() { two } else { one };
    let brought = suite.materialize(nearly, destination).await.expect("brought");
    let progress = brought.progress.expect("there was a copy");
    assert_eq!(progress.bytes_done - progress.bytes_saved, 1000);
    assert!(progress.bytes_saved >= SIZE);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spec_is_explained_by_where_its_inputs_are_now() {
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
    suite.materialize(artifact, two).await.expect("brought");
    let explained = suite.explain_reading(artifact).await;
    assert!(explained.iter().all(|(_, says)| says.starts_with("0 bytes to move")), "{explained:?}");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_who_ask_share_one_copy_whichever_streamer_they_ask() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, SIZE);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    let other = suite.another_streamer().await;

    suite.link(one).stall_after(SIZE / 4);
    let first = suite.begin(artifact, two).await;
    let first = suite.brought(first);
    let second = suite.begin(artifact, two).await;
    let listed = until("the copy is under way", async || {
        let listed = suite.transfers().await;
        listed
            .first()
            .filter(|listed| listed.progress.as_ref().is_some_and(|told| told.bytes_done > 0))
            .cloned()
    })
    .await;
    assert_eq!(suite.transfers().await.len(), 1);
    assert_eq!((listed.artifact_id, listed.to_worker_id), (artifact.to_string(), two.to_string()));
    assert_eq!(listed.progress.expect("it is told").from_worker_id, one.to_string());
    let mut third = other.begin(artifact, two).await;
    while let Some(told) = third.message().await.expect("no error") {
        let Some(pb::materialize_response::Message::Progress(told)) = told.message else {
            panic!("{told:?}")
        };
        if told.route() == pb::Route::Elsewhere {
            break;
        }
    }

    suite.link(one).open();
    let (first, second, third) = tokio::join!(first, suite.brought(second), suite.brought(third));
    let volumes = [first, second, third]
        .map(|brought: Result<WorkerProvided, Refusal>| brought.expect("brought").volume);
    assert!(volumes.iter().all(|volume| *volume == volumes[0]), "{volumes:?}");
    assert_eq!(on_disk(&suite.volume(two, &volumes[0])), digest);
    assert_eq!(suite.volumes_on(two).await, 1);
    assert!(suite.link(one).sent() < SIZE * 3 / 2, "the bytes came once");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_source_dies_another_goes_on_where_it_broke_off() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, SIZE);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    suite.materialize(artifact, two).await.expect("brought");
    let three = suite.add_worker("three").await;

    let before = suite.link(two).sent();
    suite.link(one).cut_after(SIZE / 2);
    let brought = suite.materialize(artifact, three).await.expect("brought");
    assert_eq!(on_disk(&suite.volume(three, &brought.volume)), digest);
    assert_eq!(brought.progress.expect("a copy").from_worker_id, two.to_string());
    let sent = suite.link(two).sent() - before;
    assert!(sent < SIZE * 3 / 4, "what had come before did not come again: {sent} of {SIZE} bytes");
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_breaks_off_is_seen_by_nobody_and_leaves_nothing() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, SIZE);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    // Its only source breaks off.
    suite.link(one).cut_after(SIZE / 2);
    let refused = suite.materialize(artifact, two).await.expect_err("it was cut");
    assert!(refused.is(Reason::SourceFailed), "{refused}");
    assert_eq!(refused.about.get("source_0").map(String::as_str), Some("UNAVAILABLE"), "{refused:?}");
    assert_eq!(suite.replicas(artifact).await.len(), 1);
    suite.wait_until_empty(two).await;

    // Who asked leaves.
    suite.link(one).stall_after(SIZE / 2);
    let mut asked = suite.begin(artifact, two).await;
    while let Some(told) = asked.message().await.expect("no error") {
        let Some(pb::materialize_response::Message::Progress(told)) = told.message else {
            panic!("{told:?}")
        };
        if told.bytes_done > 0 {
            break;
        }
    }
    drop(asked);
    suite.wait_until_empty(two).await;
    assert_eq!(suite.transfers().await, []);

    // Somebody cancels it.
    suite.link(one).stall_after(SIZE / 2);
    let asked = suite.begin(artifact, two).await;
    let waits = suite.brought(asked);
    let cancel = async {
        let listed = until("it is listed", async || suite.transfers().await.pop()).await;
        suite.cancel(&listed.transfer_id).await;
    };
    let (refused, ()) = tokio::join!(waits, cancel);
    let refused = refused.expect_err("it was cancelled");
    assert!(refused.is(Reason::TransferCancelled), "{refused}");
    suite.wait_until_empty(two).await;

    suite.link(one).open();
    let brought = suite.materialize(artifact, two).await.expect("brought in the end");
    assert_eq!(on_disk(&suite.volume(two, &brought.volume)), digest);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_streamer_holds_a_copy_up_only_until_its_claim_runs_out() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start_with_claims_of(Duration::from_secs(4)).await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, SIZE);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    let killed = suite.another_streamer().await;

    suite.link(one).stall_after(SIZE / 2);
    let mut asked = killed.begin(artifact, two).await;
    while let Some(told) = asked.message().await.expect("no error") {
        let Some(pb::materialize_response::Message::Progress(told)) = told.message else {
            panic!("{told:?}")
        };
        if told.bytes_done > 0 {
            break;
        }
    }
    let begun = Instant::now();
    killed.kill();
    suite.link(one).open();
    let brought = suite.materialize(artifact, two).await.expect("brought");
    assert!(brought.told.iter().any(|told| told.route() == pb::Route::Elsewhere), "it was waited for");
    assert!(begun.elapsed() < PATIENCE);
    assert_eq!(on_disk(&suite.volume(two, &brought.volume)), digest);
    until("what the killed one had begun is gone", async || (suite.volumes_on(two).await == 1).then_some(()))
        .await;
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_brought_is_refused_with_the_reason() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, _) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;

    let unknown = suite.materialize(ArtifactId::new(), two).await.expect_err("there is none");
    assert!(unknown.is(Reason::ArtifactNotFound), "{unknown}");
    let nowhere = suite.materialize(artifact, WorkerId::new()).await.expect_err("no such worker");
    assert!(nowhere.is(Reason::NotAttended), "{nowhere}");
    let forged = suite.materialize_under(artifact, two, "forged").await.expect_err("no lease of ours");
    assert!(forged.is(Reason::InvalidToken), "{forged}");

    // The replica did not survive: its worker finds that out when it is read, and the store hears of it.
    let replica = suite.replicas(artifact).await.remove(0);
    suite.destroy_behind_its_back(one, &replica.volume_handle);
    let lost = suite.materialize(artifact, two).await.expect_err("nobody has it");
    assert!(lost.is(Reason::SourceFailed), "{lost}");
    assert_eq!(lost.about.get("source_0").map(String::as_str), Some("VOLUME_NOT_FOUND"), "{lost:?}");
    suite.wait_until_empty(two).await;
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_silent_worker_has_is_sent_anew_and_counts_again_when_that_one_returns() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, digest) = suite.upload(&root).await;
    assert_eq!(suite.known(digest).await, Some(artifact));

    suite.remove_worker(one).await;
    let two = suite.add_worker("two").await;
    assert_eq!(suite.known(digest).await, None, "nobody who is there has it");
    let (anew, _) = suite.upload(&root).await;
    let replicas = suite.replicas(anew).await;
    assert_eq!(replicas.len(), 1);
    assert_eq!(replicas[0].worker_id, two.to_string());
    assert_eq!(suite.known(digest).await, Some(anew));

    // Now the newer one is on the silent worker.
    suite.remove_worker(two).await;
    assert_eq!(suite.add_worker("one").await, one);
    let known = until("its replica counts again", async || suite.known(digest).await).await;
    assert_eq!(known, artifact);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_lost_on_one_worker_is_brought_there_again_from_another() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, digest) = suite.upload(&root).await;
    let two = suite.add_worker("two").await;
    suite.materialize(artifact, two).await.expect("brought");
    let replicas = suite.replicas(artifact).await;
    let lost = replicas.iter().find(|replica| replica.worker_id == one.to_string()).expect("it is there");

    // The gateway that follows reports what is left.
    suite.destroy_behind_its_back(one, &lost.volume_handle);
    suite.remove_worker(one).await;
    assert_eq!(suite.add_worker("one").await, one);
    let left = until("the loss is known", async || {
        let replicas = suite.replicas(artifact).await;
        (replicas.len() == 1).then_some(replicas)
    })
    .await;
    assert_eq!(left[0].worker_id, two.to_string());

    let brought = suite.materialize(artifact, one).await.expect("brought");
    assert_ne!(brought.volume, lost.volume_handle, "a handle is never used twice");
    assert_eq!(brought.progress.expect("there was a copy").from_worker_id, two.to_string());
    assert_eq!(on_disk(&suite.volume(one, &brought.volume)), digest);
    assert_eq!(suite.replicas(artifact).await.len(), 2);
    suite.stop().await;
}
