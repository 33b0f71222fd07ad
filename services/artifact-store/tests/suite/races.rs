//! Races between new references and marks.

use std::time::Duration;

use domain::{AttemptId, BuildId, WorkloadId};
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;

use crate::{Suite, digest, input, on_both_databases, output};

on_both_databases! {
    concurrent_reference_and_mark_never_both_win,
    workload_is_settled_once_by_concurrent_calls,
    concurrent_prepares_succeed,
}

async fn concurrent_reference_and_mark_never_both_win(database: TestDatabase) {
    const ROUNDS: u64 = 30;
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (build, of_build) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, of_build, None).await.expect("put");
    suite.pin(of_build, &[], Some(build)).await.expect("bound");
    let (mut kept, mut went) = (0, 0);
    for round in 0..ROUNDS {
        let mut artifacts = Vec::new();
        for content in 0..3 {
            artifacts.push(suite.upload(&gateway, None, round * 3 + content).await.expect("uploaded").0);
        }
        suite.clock.advance(Duration::from_secs(13 * 3600));
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let pinned = [artifacts[0]];
        let needs = [input("in", artifacts[2])];
        // A round takes some time before it marks artifacts. The delay varies.
        let a_while = || async {
            for _ in 0..round % 6 {
                suite.get(artifacts[0]).await.ok();
            }
        };
        let pin = async {
            a_while().await;
            suite.pin(WorkloadId::new(), &pinned, None).await
        };
        let adopt = async {
            a_while().await;
            suite.adopt(digest(round * 3 + 1), Some(build)).await
        };
        let prepare = async {
            a_while().await;
            gateway.prepare(workload, attempt, &needs).await
        };
        let (_, pinned, adopted, prepared) = tokio::join!(suite.collect_beside_others(), pin, adopt, prepare);
        suite.collect(DryRun::Off).await;
        let in_use = [pinned.is_ok(), adopted.expect("asked").is_some(), prepared.is_ok()];
        for (artifact, in_use) in artifacts.into_iter().zip(in_use) {
            let expected = if in_use { ArtifactState::Sealed } else { ArtifactState::Deleting };
            let found = suite.get(artifact).await.map(|artifact| artifact.state());
            if in_use {
                kept += 1;
                assert_eq!(found.expect("it is in use"), expected);
            } else {
                went += 1;
                assert!(found.is_err() || found.is_ok_and(|state| state == expected));
            }
        }
    }
    eprintln!("{kept} were kept, {went} went");
    suite.stop().await;
}

async fn workload_is_settled_once_by_concurrent_calls(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    for content in 0..10 {
        let (workload, attempt, build) = (WorkloadId::new(), AttemptId::new(), BuildId::new());
        suite.put_build(build, workload, Some(Duration::from_secs(60))).await.expect("put");
        let out = workload.output_artifact("out");
        let needs = [output("out", out)];
        let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        gateway.complete(&planned.volumes[0].volume_handle, digest(content)).await.expect("complete");
        let outputs = [(out, digest(content))];
        let settle = || suite.settle(workload, Some(attempt), &outputs, Some(build));
        let again = gateway.prepare(workload, attempt, &needs);
        let (first, second, third, _) = tokio::join!(settle(), settle(), settle(), again);
        for settled in [first, second, third] {
            settled.expect("settled");
        }
        let settled = suite.get(out).await.expect("it is there");
        assert_eq!(settled.kept_by, [format!("build {build}")]);
        assert_eq!(settled.replicas.len(), 1);
    }
    suite.stop().await;
}

async fn concurrent_prepares_succeed(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let mut attempts = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        // The same attempt twice, like a gateway whose first call was cut off.
        for _ in 0..2 {
            let gateway = gateway.clone();
            attempts.spawn(async move {
                let needs = [input("in", artifact), output("out", workload.output_artifact("out"))];
                let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
                gateway.begin_report().await.expect("begun");
                gateway.prepared(attempt).await.expect("recorded");
                (attempt, planned)
            });
        }
    }
    let mut handles = std::collections::HashMap::new();
    while let Some(planned) = attempts.join_next().await {
        let (attempt, planned) = planned.expect("no panic");
        assert_eq!(planned.volumes[0].parent_handle, replica);
        let first = handles.entry(attempt).or_insert_with(|| planned.clone());
        assert_eq!(*first, planned);
    }
    assert_eq!(suite.containers().await.len(), 20);
    assert_eq!(suite.volumes().await.len(), 41);
    suite.stop().await;
}
