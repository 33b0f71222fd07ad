//! Builds that callers report: jobs, numbers and ends.

use std::time::Duration;

use domain::{ArtifactId, BuildId, Timestamp, WorkloadId};
use rpc::pb::artifacts::{self as pb, ArtifactState, BuildStatus, DryRun};
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use crate::{Answer, Suite, TEAM, assert_refused, on_both_databases};

on_both_databases! {
    artifact_lifetime_follows_retention_table,
    latest_build_does_not_depend_on_report_order,
    build_stays_ended_after_caller_ends_it,
    build_end_is_never_in_the_future,
    build_without_job_keeps_for_default_time,
    failed_build_keeps_until_next_of_job,
    artifact_stays_until_last_build_lets_go,
}

const STATUSES: [BuildStatus; 5] = [
    BuildStatus::Unspecified,
    BuildStatus::Succeeded,
    BuildStatus::Failed,
    BuildStatus::Errored,
    BuildStatus::Aborted,
];

fn of_job(build: BuildId, job: &str, number: u64, status: BuildStatus) -> pb::PutBuildRequest {
    pb::PutBuildRequest {
        build_id: build.to_string(),
        team: TEAM.to_owned(),
        job: job.to_owned(),
        number,
        status: status.into(),
        ..Default::default()
    }
}

async fn put(suite: &Suite, request: pb::PutBuildRequest) -> Answer<()> {
    suite.owners().put_build(request).await.map(drop).map_err(Refusal::from)
}

/// Returns whether an artifact exists and is not garbage after a round.
async fn lives(suite: &Suite, artifact: ArtifactId) -> bool {
    suite.collect(DryRun::Off).await;
    suite.get(artifact).await.is_ok_and(|artifact| artifact.state() != ArtifactState::Deleting)
}

/// Covers every case that the retention rules distinguish, for an artifact with one owner.
async fn artifact_lifetime_follows_retention_table(database: TestDatabase) {
    const KEEP: Duration = Duration::from_secs(100);
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let mut cases = Vec::new();
    for status in STATUSES {
        for has_job in [false, true] {
            for superseded in [false, true] {
                for pinned in [false, true] {
                    for keep in [Duration::ZERO, KEEP] {
                        cases.push((status, has_job, superseded && has_job, pinned, keep));
                    }
                }
            }
        }
    }
    let mut made = Vec::new();
    for (n, (status, has_job, superseded, pinned, keep)) in cases.iter().copied().enumerate() {
        let (build, workload) = (BuildId::new(), WorkloadId::new());
        let job = format!("job {n}");
        let mut request = of_job(build, &job, 1, BuildStatus::Unspecified);
        if !has_job {
            (request.job, request.number) = (String::new(), 0);
        }
        request.keep = Some(rpc::duration(keep));
        put(&suite, request.clone()).await.expect("put");
        let content = u64::try_from(n).expect("few");
        let (artifact, _) = suite.upload(&gateway, Some(build), content).await.expect("uploaded");
        if pinned {
            suite.pin(workload, &[artifact], None).await.expect("pinned");
        }
        if status != BuildStatus::Unspecified {
            request.status = status.into();
            put(&suite, request).await.expect("ended");
        }
        if superseded {
            put(&suite, of_job(BuildId::new(), &job, 2, BuildStatus::Unspecified))
                .await
                .expect("a later one");
        }
        made.push((artifact, workload));
    }

    for (after, over) in [(Duration::ZERO, false), (KEEP, true)] {
        suite.clock.advance(after);
        suite.collect(DryRun::Off).await;
        for ((status, has_job, superseded, pinned, keep), (artifact, _)) in cases.iter().zip(&made) {
            let lets_go = match status {
                BuildStatus::Unspecified => false,
                BuildStatus::Succeeded | BuildStatus::Aborted => true,
                BuildStatus::Failed | BuildStatus::Errored => !has_job || *superseded,
            };
            let expected = *pinned || !lets_go || (!over && !keep.is_zero());
            let found = suite.get(*artifact).await;
            let lives = found.is_ok_and(|artifact| artifact.state() != ArtifactState::Deleting);
            let case = format!(
                "{status:?}, job: {has_job}, superseded: {superseded}, pinned: {pinned}, kept for {keep:?}, over: {over}"
            );
            assert_eq!(lives, expected, "{case}");
        }
    }

    // A pin keeps an artifact without owners, and nothing keeps it afterwards.
    for ((status, has_job, superseded, pinned, _), (artifact, workload)) in cases.into_iter().zip(made) {
        if !pinned {
            continue;
        }
        suite.settle(workload, None, &[], None).await.expect("settled");
        let held = match status {
            BuildStatus::Unspecified => true,
            BuildStatus::Succeeded | BuildStatus::Aborted => false,
            BuildStatus::Failed | BuildStatus::Errored => has_job && !superseded,
        };
        assert_eq!(
            lives(&suite, artifact).await,
            held,
            "{status:?}, job: {has_job}, superseded: {superseded}"
        );
    }
    suite.stop().await;
}

async fn latest_build_does_not_depend_on_report_order(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    // Four builds, whose ends are reported in every order.
    let ends = [BuildStatus::Failed, BuildStatus::Errored, BuildStatus::Succeeded, BuildStatus::Failed];
    let mut content = 0;
    for order in permutations(4) {
        let job = format!("{order:?}");
        let mut artifacts = Vec::new();
        for (n, at) in order.iter().enumerate() {
            let (build, number) = (BuildId::new(), u64::try_from(*at).expect("few") + 1);
            put(&suite, of_job(build, &job, number, BuildStatus::Unspecified)).await.expect("put");
            content += 1;
            let (artifact, _) = suite.upload(&gateway, Some(build), content).await.expect("uploaded");
            put(&suite, of_job(build, &job, number, ends[*at])).await.expect("ended");
            artifacts.push((*at, artifact));
            if n == 0 {
                // A job with the same name in another team is a different job.
                let mut other = of_job(BuildId::new(), &job, 9, BuildStatus::Unspecified);
                other.team = "other".to_owned();
                put(&suite, other).await.expect("put");
            }
        }
        suite.collect(DryRun::Off).await;
        for (at, artifact) in artifacts {
            assert_eq!(lives(&suite, artifact).await, at == 3, "build {} of {job}", at + 1);
        }
    }
    suite.stop().await;
}

fn permutations(of: usize) -> Vec<Vec<usize>> {
    if of == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(of - 1);
    shorter
        .iter()
        .flat_map(|order| {
            (0..of).map(move |at| {
                let mut order = order.clone();
                order.insert(at, of - 1);
                order
            })
        })
        .collect()
}

async fn build_stays_ended_after_caller_ends_it(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let build = BuildId::new();
    put(&suite, of_job(build, "job", 7, BuildStatus::Unspecified)).await.expect("put");
    put(&suite, of_job(build, "job", 7, BuildStatus::Failed)).await.expect("ended");
    put(&suite, of_job(build, "job", 7, BuildStatus::Failed)).await.expect("repeated");
    for other in [BuildStatus::Unspecified, BuildStatus::Succeeded] {
        assert_refused(put(&suite, of_job(build, "job", 7, other)).await, Reason::BuildEnded);
    }
    for other in
        [of_job(build, "job", 8, BuildStatus::Failed), of_job(build, "other", 7, BuildStatus::Failed)]
    {
        assert_refused(put(&suite, other).await, Reason::BuildExists);
    }
    assert_refused(
        put(&suite, of_job(BuildId::new(), "job", 7, BuildStatus::Failed)).await,
        Reason::BuildExists,
    );
    let mut without_job = of_job(BuildId::new(), "", 7, BuildStatus::Unspecified);
    assert_refused(put(&suite, without_job.clone()).await, Reason::InvalidField);
    without_job.number = 0;
    without_job.ended_at = Some(rpc::timestamp(suite.clock.now()));
    assert_refused(put(&suite, without_job).await, Reason::InvalidField);
    assert_refused(
        put(&suite, of_job(BuildId::new(), "job", 0, BuildStatus::Failed)).await,
        Reason::InvalidField,
    );
    suite.stop().await;
}

async fn build_end_is_never_in_the_future(database: TestDatabase) {
    const KEEP: Duration = Duration::from_secs(100);
    const SECOND: Duration = Duration::from_secs(1);
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let said_at: [fn(Timestamp) -> Timestamp; 3] = [|now| now + 1000 * KEEP, |now| now, |now| now - KEEP / 2];
    for ((number, said_at), left) in (1..).zip(said_at).zip([KEEP, KEEP, KEEP / 2]) {
        let build = BuildId::new();
        let mut request = of_job(build, "job", number, BuildStatus::Unspecified);
        request.keep = Some(rpc::duration(KEEP));
        put(&suite, request.clone()).await.expect("put");
        let (artifact, _) = suite.upload(&gateway, Some(build), number).await.expect("uploaded");
        request.status = BuildStatus::Succeeded.into();
        request.ended_at = Some(rpc::timestamp(said_at(suite.clock.now())));
        put(&suite, request).await.expect("ended");
        suite.clock.advance(left - SECOND);
        assert!(lives(&suite, artifact).await, "build {number} keeps for a second more");
        suite.clock.advance(SECOND);
        assert!(!lives(&suite, artifact).await, "build {number} has let go");
    }
    suite.stop().await;
}

async fn build_without_job_keeps_for_default_time(database: TestDatabase) {
    const KEEP: Duration = Duration::from_secs(300);
    const SECOND: Duration = Duration::from_secs(1);
    let suite = Suite::start_with(database, |config| config.default_keep = KEEP).await;
    let gateway = suite.gateway().await;
    let mut made = Vec::new();
    for (content, (job, keep)) in (1..).zip([("", None), ("job", None), ("", Some(Duration::ZERO))]) {
        let build = BuildId::new();
        let mut request = of_job(build, job, u64::from(!job.is_empty()), BuildStatus::Unspecified);
        request.keep = keep.map(rpc::duration);
        put(&suite, request.clone()).await.expect("put");
        let (artifact, _) = suite.upload(&gateway, Some(build), content).await.expect("uploaded");
        request.status = BuildStatus::Succeeded.into();
        put(&suite, request).await.expect("ended");
        made.push(artifact);
    }
    let [without_job, of_job, says_so] = made[..] else { panic!("three were made") };
    assert!(!lives(&suite, of_job).await, "the default keep time of a job is zero");
    assert!(!lives(&suite, says_so).await, "its keep time is zero");
    suite.clock.advance(KEEP - SECOND);
    assert!(lives(&suite, without_job).await, "it keeps for a second more");
    suite.clock.advance(SECOND);
    assert!(!lives(&suite, without_job).await, "it has let go");
    suite.stop().await;
}

async fn failed_build_keeps_until_next_of_job(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    let mut request = of_job(build, "job", 1, BuildStatus::Unspecified);
    request.ends_with_workload_id = workload.to_string();
    put(&suite, request).await.expect("put");
    let (artifact, _) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    suite.pin(workload, &[artifact], Some(build)).await.expect("bound");
    suite.settle_as(workload, BuildStatus::Failed).await.expect("settled");
    suite.clock.advance(Duration::from_secs(1_000_000));
    assert!(lives(&suite, artifact).await, "it is the latest, and failed");
    put(&suite, of_job(BuildId::new(), "job", 2, BuildStatus::Unspecified)).await.expect("the next");
    assert!(!lives(&suite, artifact).await, "there is a later one");
    suite.stop().await;
}

async fn artifact_stays_until_last_build_lets_go(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let builds = [BuildId::new(), BuildId::new(), BuildId::new()];
    for (number, build) in (1..).zip(builds) {
        put(&suite, of_job(build, "job", number, BuildStatus::Unspecified)).await.expect("put");
    }
    let (artifact, _) = suite.upload(&gateway, Some(builds[0]), 1).await.expect("uploaded");
    let own = async |artifact: ArtifactId, build: BuildId, team: String| {
        let request =
            pb::AddOwnerRequest { team, artifact_id: artifact.to_string(), build_id: build.to_string() };
        suite.artifacts().add_owner(request).await.map(drop).map_err(Refusal::from)
    };
    let disown = async |artifact: ArtifactId, build: BuildId, team: String| {
        let request =
            pb::RemoveOwnerRequest { team, artifact_id: artifact.to_string(), build_id: build.to_string() };
        suite.artifacts().remove_owner(request).await.map(drop).map_err(Refusal::from)
    };
    for build in [builds[1], builds[1], builds[2]] {
        own(artifact, build, TEAM.to_owned()).await.expect("owned");
    }
    assert_refused(own(artifact, builds[1], "other".to_owned()).await, Reason::OwnerEnded);
    assert_refused(own(artifact, BuildId::new(), TEAM.to_owned()).await, Reason::OwnerEnded);
    assert_refused(own(ArtifactId::new(), builds[1], TEAM.to_owned()).await, Reason::ArtifactNotFound);
    assert_refused(disown(artifact, builds[1], "other".to_owned()).await, Reason::ArtifactNotFound);
    assert_eq!(suite.get(artifact).await.expect("it is there").kept_by.len(), 3);

    disown(artifact, builds[0], TEAM.to_owned()).await.expect("let go");
    disown(artifact, builds[0], TEAM.to_owned()).await.expect("repeated");
    assert!(lives(&suite, artifact).await);
    put(&suite, of_job(builds[1], "job", 2, BuildStatus::Succeeded)).await.expect("ended");
    assert!(lives(&suite, artifact).await);
    assert_refused(own(artifact, builds[1], TEAM.to_owned()).await, Reason::OwnerEnded);
    disown(artifact, builds[2], TEAM.to_owned()).await.expect("let go");
    assert!(!lives(&suite, artifact).await, "it has no owner left");
    assert_refused(own(artifact, builds[2], TEAM.to_owned()).await, Reason::ArtifactNotFound);
    suite.stop().await;
}
