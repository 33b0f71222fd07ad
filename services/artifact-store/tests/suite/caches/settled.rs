//! Outputs that caches and builds own from the moment in which they are sealed.

use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, AttemptId, BuildId, CacheId, ClaimId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::find_or_create_resource_cache_response::Outcome;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;

use super::{Caller, OTHER};
use crate::{Answer, Gateway, Suite, TEAM, assert_refused, digest, on_both_databases, output};

on_both_databases! {
    output_gets_all_owners_when_sealed,
    missing_owner_does_not_affect_other_owners,
    owner_of_another_team_gets_no_output,
    cache_is_named_once_per_settlement,
    one_of_concurrent_settlements_is_latest_version,
    maker_with_expired_claim_publishes_no_cache,
    claim_expiring_during_settlement_has_one_winner,
    settlements_do_not_deadlock_on_cache_order,
}

/// A workload whose attempt has completed its outputs.
struct Made {
    workload: WorkloadId,
    attempt: AttemptId,
    outputs: Vec<(ArtifactId, u64)>,
}

impl Made {
    async fn on(gateway: &Gateway, contents: &[u64]) -> Self {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let name = |content: &u64| format!("out-{content}");
        let outputs: Vec<_> =
            contents.iter().map(|content| (workload.output_artifact(&name(content)), *content)).collect();
        let needs: Vec<_> =
            outputs.iter().map(|(artifact, content)| output(&name(content), *artifact)).collect();
        let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        for (volume, content) in planned.volumes.iter().zip(contents) {
            gateway.complete(&volume.volume_handle, digest(*content)).await.expect("complete");
        }
        Self { workload, attempt, outputs }
    }

    fn artifact(&self) -> ArtifactId {
        self.outputs[0].0
    }

    /// Settles the workload with the owners of each output. Returns the missing owners.
    async fn settle(
        &self,
        suite: &Suite,
        build: Option<BuildId>,
        owners: &[&[OutputOwner]],
    ) -> Answer<Vec<(String, OutputOwner)>> {
        let outputs =
            self.outputs.iter().zip(owners).map(|((artifact, content), owners)| pb::SettledOutput {
                artifact_id: artifact.to_string(),
                digest: digest(*content).as_bytes().to_vec().into(),
                label: "out".to_owned(),
                owners: owners.iter().copied().map(rpc::owner::settled).collect(),
                for_owners_only: false,
            });
        let request = pb::SettleRequest {
            holder_id: self.workload.to_string(),
            team: TEAM.to_owned(),
            attempt_id: self.attempt.to_string(),
            outputs: outputs.collect(),
            build_id: build.map(|build| build.to_string()).unwrap_or_default(),
            status: pb::BuildStatus::Succeeded.into(),
        };
        let answer = suite.pins().settle(request).await?.into_inner();
        let missing = answer.missing.into_iter().map(|missing| {
            let owner = vec![missing.owner.expect("an owner")];
            let owner = rpc::owner::parse_settled("owner", owner, &mut Default::default());
            (missing.artifact_id, owner.expect("one of ours")[0])
        });
        Ok(missing.collect())
    }
}

impl Caller<'_> {
    /// Creates a task cache.
    async fn cache(&self, path: &str) -> CacheId {
        self.task("job", path, None).await.expect("asked").0.parse().expect("an id")
    }

    /// Returns the number of artifacts that a collection marks.
    async fn marked(&self) -> usize {
        let collected = self.suite.collect(DryRun::Off).await;
        collected.iter().filter(|thing| thing.kind() == pb::ObjectKind::Artifact).count()
    }

    /// Returns the latest version of a task cache.
    async fn latest(&self, path: &str) -> Option<String> {
        self.task("job", path, None).await.expect("asked").1.map(|location| location.artifact_id)
    }

    /// Claims a missing resource cache.
    async fn claim(&self, content: u64) -> (String, ClaimId) {
        let claim = ClaimId::new();
        let (cache, outcome) = self.ask(content, claim, None).await.expect("asked");
        assert!(matches!(outcome, Outcome::Claimed(_)), "{outcome:?}");
        (cache, claim)
    }
}

async fn output_gets_all_owners_when_sealed(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (build, other_build) = (BuildId::new(), BuildId::new());
    for build in [build, other_build] {
        suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    }
    let (task, (cache, claim)) = (main.cache("/cache").await, main.claim(1).await);
    let made = Made::on(&gateway, &[1, 2]).await;
    let of_first =
        [OutputOwner::TaskCache(task), OutputOwner::ResourceCache(claim), OutputOwner::Build(other_build)];
    for _ in 0..2 {
        let missing = made.settle(&suite, Some(build), &[&of_first, &[]]).await.expect("settled");
        assert_eq!(missing, []);
    }
    let (first, second) = (made.artifact(), made.outputs[1].0);
    let mut builds = [format!("build {build}"), format!("build {other_build}")];
    builds.sort();
    let caches = [format!("resource cache {cache}"), format!("task cache {task}")];
    assert_eq!(suite.kept_by(first).await, [builds, caches].concat());
    assert_eq!(suite.kept_by(second).await, [format!("build {build}")]);
    assert_eq!(main.ready(1, None).await.expect("it was made").artifact_id, first.to_string());
    assert_eq!(main.latest("/cache").await, Some(first.to_string()));
    assert_refused(main.put(claim, second).await, Reason::ClaimLost);

    // It is deleted only after all owners have let go.
    suite.clock.advance(13 * super::HOUR);
    for build in [build, other_build] {
        suite.delete_build(build).await.expect("deleted");
    }
    assert_eq!(main.marked().await, 1, "the second");
    main.delete(&cache).await.expect("deleted");
    assert_eq!(main.marked().await, 0);
    let by_id = pb::DeleteTaskCachesRequest { cache_id: task.to_string(), ..Default::default() };
    main.delete_tasks(by_id).await.expect("deleted");
    assert_eq!(main.marked().await, 1);
    suite.stop().await;
}

async fn missing_owner_does_not_affect_other_owners(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (task, (_, claim)) = (main.cache("/cache").await, main.claim(1).await);
    let gone = [
        OutputOwner::Build(BuildId::new()),
        OutputOwner::TaskCache(CacheId::new()),
        OutputOwner::ResourceCache(ClaimId::new()),
    ];
    let made = Made::on(&gateway, &[1, 2]).await;
    let with_cache = [&gone[..], &[OutputOwner::TaskCache(task)]].concat();
    let there = [OutputOwner::ResourceCache(claim)];
    let mut missing = made.settle(&suite, None, &[&with_cache, &there]).await.expect("settled");
    missing.sort();
    let artifact = made.artifact();
    assert_eq!(missing, gone.map(|owner| (artifact.to_string(), owner)));
    assert_eq!(suite.kept_by(artifact).await, [format!("task cache {task}")]);
    assert!(main.ready(1, None).await.is_some());

    // An output without owners is treated like an artifact that never had one.
    let made = Made::on(&gateway, &[3]).await;
    assert_eq!(made.settle(&suite, None, &[&gone]).await.expect("settled").len(), 3);
    assert_eq!(main.marked().await, 0);
    suite.clock.advance(13 * super::HOUR);
    assert_eq!(main.marked().await, 1);
    assert_eq!(suite.state(made.artifact()).await, ArtifactState::Deleting);
    suite.stop().await;
}

async fn owner_of_another_team_gets_no_output(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let other = Caller::of(&suite, OTHER);
    let (task, (_, claim)) = (other.cache("/cache").await, other.claim(1).await);
    let build = BuildId::new();
    let put = pb::PutBuildRequest {
        build_id: build.to_string(),
        team: OTHER.to_owned(),
        ends_with_workload_id: WorkloadId::new().to_string(),
        ..Default::default()
    };
    suite.owners().put_build(put).await.expect("put");
    let made = Made::on(&gateway, &[1]).await;
    let owners = [OutputOwner::Build(build), OutputOwner::TaskCache(task), OutputOwner::ResourceCache(claim)];
    assert_eq!(made.settle(&suite, None, &[&owners]).await.expect("settled").len(), 3);
    assert_eq!(suite.kept_by(made.artifact()).await, ["no owner: deleted when it is old"]);
    assert_eq!(other.latest("/cache").await, None);
    assert_eq!(other.located(&[&task.to_string()]).await, []);
    other.renew(claim).await.expect("it is still theirs to make");
    suite.stop().await;
}

async fn cache_is_named_once_per_settlement(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let task = [OutputOwner::TaskCache(main.cache("/cache").await)];
    let made = Made::on(&gateway, &[1, 2]).await;
    assert_refused(made.settle(&suite, None, &[&task, &task]).await, Reason::InvalidField);
    assert_refused(made.settle(&suite, None, &[&[task, task].concat(), &[]]).await, Reason::InvalidField);
    assert_eq!(made.settle(&suite, None, &[&task, &[]]).await.expect("settled"), []);
    suite.stop().await;
}

async fn one_of_concurrent_settlements_is_latest_version(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let task = [OutputOwner::TaskCache(main.cache("/cache").await)];
    for round in 0..10 {
        let mut all = Vec::new();
        for content in 0..4 {
            all.push(Made::on(&gateway, &[round * 4 + content]).await);
        }
        let owners = [&task[..]];
        let settling = all.iter().map(|made| made.settle(&suite, None, &owners));
        for missing in futures::future::join_all(settling).await {
            assert_eq!(missing.expect("settled"), []);
        }
        suite.collect(DryRun::Off).await;
        let latest = main.latest("/cache").await.expect("one is");
        let mut kept = 0;
        for made in &all {
            let state = suite.state(made.artifact()).await;
            let is_latest = made.artifact().to_string() == latest;
            assert_eq!(state == ArtifactState::Sealed, is_latest, "{}: {state:?}", made.artifact());
            kept += usize::from(is_latest);
        }
        assert_eq!(kept, 1);
    }
    suite.stop().await;
}

async fn maker_with_expired_claim_publishes_no_cache(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (cache, late) = main.claim(1).await;
    let made = Made::on(&gateway, &[1]).await;
    suite.clock.advance(Duration::from_secs(60));
    let owners = [OutputOwner::ResourceCache(late)];
    let missing = made.settle(&suite, None, &[&owners]).await.expect("settled");
    assert_eq!(missing, [(made.artifact().to_string(), owners[0])]);
    assert_eq!(main.located(&[&cache]).await, []);

    // A late maker does not affect the next claim.
    let (_, next) = main.claim(1).await;
    let later = Made::on(&gateway, &[2]).await;
    assert_eq!(later.settle(&suite, None, &[&owners]).await.expect("settled").len(), 1);
    let made = Made::on(&gateway, &[3]).await;
    let owners = [OutputOwner::ResourceCache(next)];
    assert_eq!(made.settle(&suite, None, &[&owners]).await.expect("settled"), []);
    assert_eq!(main.located(&[&cache]).await, [(cache, made.artifact().to_string())]);
    suite.stop().await;
}

async fn claim_expiring_during_settlement_has_one_winner(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (mut made_in_time, mut too_late) = (0, 0);
    for round in 0..20 {
        let (cache, claim) = main.claim(round).await;
        let made = Made::on(&gateway, &[round]).await;
        let owners = [OutputOwner::ResourceCache(claim)];
        let next = ClaimId::new();
        let of_outputs = [&owners[..]];
        let settling = made.settle(&suite, None, &of_outputs);
        let asking = async {
            for _ in 0..round % 4 {
                suite.get(made.artifact()).await.ok();
            }
            suite.clock.advance(Duration::from_secs(60));
            main.ask(round, next, None).await.expect("asked").1
        };
        let (missing, asked) = tokio::join!(settling, asking);
        match (missing.expect("settled").as_slice(), asked) {
            ([], Outcome::Ready(location)) => {
                made_in_time += 1;
                assert_eq!(location.artifact_id, made.artifact().to_string());
            }
            ([_], Outcome::Claimed(_)) => {
                too_late += 1;
                assert_eq!(main.located(&[&cache]).await, []);
                let put = suite.uploaded(&gateway, 1000 + round).await;
                assert_eq!(main.put(next, put).await.expect("it is theirs to make"), cache);
            }
            other => panic!("{other:?}"),
        }
    }
    eprintln!("{made_in_time} were in time, {too_late} too late");
    suite.stop().await;
}

async fn settlements_do_not_deadlock_on_cache_order(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let mut caches = Vec::new();
    for path in ["/a", "/b", "/c"] {
        caches.push(OutputOwner::TaskCache(main.cache(path).await));
    }
    for round in 0..10 {
        let (mut all, mut owners) = (Vec::new(), Vec::new());
        for n in 0..3 {
            let first = (round * 3 + n) * 3;
            let turned: Vec<_> = (0..3).map(|at| [caches[(at + n as usize) % 3]]).collect();
            all.push(Made::on(&gateway, &[first, first + 1, first + 2]).await);
            owners.push(turned);
        }
        let owners: Vec<Vec<&[OutputOwner]>> =
            owners.iter().map(|owners| owners.iter().map(|owners| &owners[..]).collect()).collect();
        let settling = all.iter().zip(&owners).map(|(made, owners)| made.settle(&suite, None, owners));
        for missing in futures::future::join_all(settling).await {
            assert_eq!(missing.expect("settled"), []);
        }
        // All three versions are of the same workload, because the last one was last for each
        // cache.
        let mut latest = Vec::new();
        for path in ["/a", "/b", "/c"] {
            latest.push(main.latest(path).await.expect("published"));
        }
        let of_one = |made: &Made| {
            let outputs: Vec<_> = made.outputs.iter().map(|(artifact, _)| artifact.to_string()).collect();
            latest.iter().all(|latest| outputs.contains(latest))
        };
        assert!(all.iter().any(of_one), "{latest:?}");
    }
    suite.stop().await;
}
