//! Evacuations of workers.

use std::time::Duration;

use domain::{ArtifactId, WorkerId};
use rpc::pb::streamer as pb;
use rpc::{Reason, Refusal};
use tonic::Code;

use super::suite::{Suite, may_be_a_worker, until};
use super::{TREE_BYTES, tree};

/// Uploads trees of these sizes to worker `one`. Their files differ.
async fn start(sizes: &[u64]) -> (Suite, WorkerId, Vec<ArtifactId>) {
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let mut artifacts = Vec::new();
    for size in sizes {
        let root = suite.path(&format!("tree-{size}"));
        tree::write(&root, *size);
        artifacts.push(suite.upload(&root).await.0);
    }
    (suite, one, artifacts)
}

/// Returns whether the artifact has a replica on the worker.
async fn is_on(suite: &Suite, artifact: ArtifactId, worker: WorkerId) -> bool {
    let worker = worker.to_string();
    suite.replicas(artifact).await.iter().any(|replica| replica.worker_id == worker)
}

fn totals(progress: &pb::EvacuationProgress) -> [u64; 2] {
    [progress.artifacts_copied, progress.artifacts_at_risk]
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuation_copies_what_only_the_worker_has() {
    if !may_be_a_worker() {
        return;
    }
    let (mut suite, one, artifacts) = start(&[1 << 20, 2 << 20]).await;
    let two = suite.add_worker("two").await;
    suite.materialize(artifacts[0], two).await.expect("copied");

    let (progress, evacuated) = suite.evacuate("one", None).await.expect("evacuated");
    assert_eq!(totals(&progress[0]), [0, 1], "an artifact with another replica is not at risk");
    assert!(evacuated.nothing_at_risk && evacuated.at_risk.is_empty(), "{evacuated:?}");
    let last = evacuated.progress.expect("totals");
    assert_eq!((totals(&last), last.bytes_at_risk), ([1, 0], 0));
    assert_eq!(last.bytes_copied, progress[0].bytes_at_risk);
    assert!(is_on(&suite, artifacts[1], two).await);

    let (_, again) = suite.evacuate(&one.to_string(), None).await.expect("evacuated");
    assert!(again.nothing_at_risk, "{again:?}");
    assert_eq!(totals(&again.progress.expect("totals")), [0, 0]);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuation_lists_what_no_worker_takes() {
    if !may_be_a_worker() {
        return;
    }
    let (mut suite, one, artifacts) = start(&[2 << 20, 1 << 20]).await;
    let check = |evacuated: pb::Evacuated, reason: Reason| {
        assert!(!evacuated.nothing_at_risk);
        let at_risk: Vec<_> = evacuated.at_risk.iter().map(|artifact| artifact.artifact_id.clone()).collect();
        assert_eq!(at_risk, [artifacts[1].to_string(), artifacts[0].to_string()], "small artifacts first");
        let last = evacuated.progress.expect("totals");
        assert_eq!(totals(&last), [0, 2]);
        assert_eq!(last.failures.len(), 2, "{last:?}");
        assert!(last.failures.iter().all(|failure| failure.reason == reason.as_str()), "{last:?}");
    };
    let (_, evacuated) = suite.evacuate("one", None).await.expect("an end");
    check(evacuated, Reason::AllWorkersBusy);

    // A worker takes copies, and the source breaks off.
    suite.add_worker("two").await;
    suite.link(one).cut_after(0);
    let (_, evacuated) = suite.evacuate("one", None).await.expect("an end");
    check(evacuated, Reason::SourceFailed);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deadline_ends_copies_of_evacuation() {
    if !may_be_a_worker() {
        return;
    }
    let (mut suite, one, artifacts) = start(&[TREE_BYTES]).await;
    let two = suite.add_worker("two").await;
    suite.link(one).stall_after(TREE_BYTES / 2);
    let (_, evacuated) = suite.evacuate("one", Some(Duration::from_secs(1))).await.expect("an end");
    assert!(!evacuated.nothing_at_risk);
    assert_eq!(evacuated.at_risk[0].artifact_id, artifacts[0].to_string());
    assert_eq!(totals(&evacuated.progress.expect("totals")), [0, 1]);
    suite.wait_until_empty(two).await;

    suite.link(one).open();
    let (_, evacuated) = suite.evacuate("one", None).await.expect("evacuated");
    assert!(evacuated.nothing_at_risk && is_on(&suite, artifacts[0], two).await);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evacuation_ends_when_its_caller_leaves() {
    if !may_be_a_worker() {
        return;
    }
    let (mut suite, one, _) = start(&[TREE_BYTES]).await;
    let two = suite.add_worker("two").await;
    suite.link(one).stall_after(TREE_BYTES / 2);
    let answers = suite.begin_evacuation("one", None).await.expect("begun");
    until("a copy", async || suite.transfers().await.pop()).await;
    drop(answers);
    suite.wait_until_empty(two).await;
    assert_eq!(suite.transfers().await, []);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_evacuation_is_rejected() {
    let suite = Suite::start().await;
    for (worker, deadline, field) in [
        ("", None, "worker"),
        ("a\nb", None, "worker"),
        (&*"a".repeat(256), None, "worker"),
        ("one", Some(prost_types::Duration::default()), "deadline"),
        ("one", Some(prost_types::Duration { seconds: -1, nanos: 0 }), "deadline"),
        ("one", Some(prost_types::Duration { seconds: 1, nanos: 1_000_000_000 }), "deadline"),
    ] {
        let refused: Refusal = suite.begin_evacuation(worker, deadline).await.expect_err(field);
        assert!(refused.is(Reason::InvalidField) && refused.message.starts_with(field), "{refused}");
    }
    let longest = prost_types::Duration { seconds: i64::MAX, nanos: 999_999_999 };
    for worker in ["one", &WorkerId::new().to_string()] {
        let refused = suite.begin_evacuation(worker, Some(longest)).await.expect_err("no such worker");
        assert!(refused.is(Reason::WorkerNotFound) && refused.code == Code::NotFound, "{refused}");
    }
    suite.stop().await;
}
