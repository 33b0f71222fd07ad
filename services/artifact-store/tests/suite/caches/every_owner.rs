//! The table of owners: every owner in every state, alone and with every other owner.

use std::time::Duration;

use domain::{ArtifactId, BuildId, ClaimId, Timestamp, WorkerId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, BuildStatus, DryRun};
use testing::databases::TestDatabase;

use super::{Caller, by_workload};
use crate::{Suite, TEAM, on_both_databases};

on_both_databases! { artifact_stays_until_last_owner_lets_go }

/// Duration of all terms in these tests.
const TERM: Duration = Duration::from_secs(100);

/// An owner in a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    BuildThatGoesOn,
    BuildThatSucceeded,
    BuildThatWasAborted,
    BuildThatSucceededAndKeeps,
    LatestBuildOfItsJobThatFailed,
    LatestBuildOfItsJobThatErrored,
    EarlierBuildThatFailed,
    BuildWithoutAJobThatFailed,
    BuildThatWasDeleted,
    ResourceCacheInUse,
    ResourceCache,
    ResourceCacheThatWasDeleted,
    TaskCache,
    TaskCacheWithANextVersion,
    TaskCacheThatWasDeleted,
    BaseResourceType,
    BaseResourceTypeWithANextVersion,
    ResourceCerts,
    ResourceCertsThatWereReplaced,
}

/// Until when an owner keeps an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Keeps {
    NoLonger,
    ForItsTerm,
    Still,
}

/// The table of owners and lifetimes.
const TABLE: [(Owner, Keeps); 19] = [
    (Owner::BuildThatGoesOn, Keeps::Still),
    (Owner::BuildThatSucceeded, Keeps::NoLonger),
    (Owner::BuildThatWasAborted, Keeps::NoLonger),
    (Owner::BuildThatSucceededAndKeeps, Keeps::ForItsTerm),
    (Owner::LatestBuildOfItsJobThatFailed, Keeps::Still),
    (Owner::LatestBuildOfItsJobThatErrored, Keeps::Still),
    (Owner::EarlierBuildThatFailed, Keeps::NoLonger),
    (Owner::BuildWithoutAJobThatFailed, Keeps::NoLonger),
    (Owner::BuildThatWasDeleted, Keeps::NoLonger),
    (Owner::ResourceCacheInUse, Keeps::Still),
    (Owner::ResourceCache, Keeps::ForItsTerm),
    (Owner::ResourceCacheThatWasDeleted, Keeps::NoLonger),
    (Owner::TaskCache, Keeps::ForItsTerm),
    (Owner::TaskCacheWithANextVersion, Keeps::NoLonger),
    (Owner::TaskCacheThatWasDeleted, Keeps::NoLonger),
    (Owner::BaseResourceType, Keeps::Still),
    (Owner::BaseResourceTypeWithANextVersion, Keeps::NoLonger),
    (Owner::ResourceCerts, Keeps::Still),
    (Owner::ResourceCertsThatWereReplaced, Keeps::NoLonger),
];

/// Gives artifacts their owners.
struct Giver<'a> {
    caller: Caller<'a>,
    /// Artifact that replaces another one.
    next: ArtifactId,
    /// Number of owners so far, for unique names.
    given: u64,
}

impl Giver<'_> {
    /// Makes `owner` own an artifact, and brings the owner into its state.
    async fn give(&mut self, artifact: ArtifactId, owner: Owner) {
        self.given += 1;
        let name = format!("job {}", self.given);
        match owner {
            Owner::BuildThatGoesOn => self.build(artifact, &name, BuildStatus::Unspecified, None).await,
            Owner::BuildThatSucceeded => self.build(artifact, &name, BuildStatus::Succeeded, None).await,
            Owner::BuildThatWasAborted => self.build(artifact, &name, BuildStatus::Aborted, None).await,
            Owner::BuildThatSucceededAndKeeps => {
                self.build(artifact, &name, BuildStatus::Succeeded, Some(TERM)).await;
            }
            Owner::LatestBuildOfItsJobThatFailed => {
                self.build(artifact, &name, BuildStatus::Failed, None).await;
            }
            Owner::LatestBuildOfItsJobThatErrored => {
                self.build(artifact, &name, BuildStatus::Errored, None).await;
            }
            Owner::EarlierBuildThatFailed => {
                self.build(artifact, &name, BuildStatus::Failed, None).await;
                self.put_build(BuildId::new(), &name, 2, BuildStatus::Unspecified, None).await;
            }
            Owner::BuildWithoutAJobThatFailed => {
                self.build(artifact, "", BuildStatus::Failed, None).await;
            }
            Owner::BuildThatWasDeleted => {
                let build = BuildId::new();
                self.put_build(build, &name, 1, BuildStatus::Unspecified, None).await;
                self.add(artifact, build).await;
                self.caller.suite.delete_build(build).await.expect("deleted");
            }
            Owner::ResourceCacheInUse | Owner::ResourceCache | Owner::ResourceCacheThatWasDeleted => {
                let claim = ClaimId::new();
                let (cache, _) = self.caller.ask(self.given, claim, None).await.expect("asked");
                self.caller.put(claim, artifact).await.expect("put");
                match owner {
                    Owner::ResourceCacheInUse => {
                        self.caller.use_it(&cache, by_workload(WorkloadId::new())).await.expect("used");
                    }
                    Owner::ResourceCacheThatWasDeleted => self.caller.delete(&cache).await.expect("deleted"),
                    _ => {}
                }
            }
            Owner::TaskCache | Owner::TaskCacheWithANextVersion | Owner::TaskCacheThatWasDeleted => {
                let (cache, _) = self.caller.task(&name, "/cache", Some(TERM)).await.expect("asked");
                self.caller.publish(&cache, artifact).await.expect("published");
                match owner {
                    Owner::TaskCacheWithANextVersion => {
                        self.caller.publish(&cache, self.next).await.expect("published");
                    }
                    Owner::TaskCacheThatWasDeleted => {
                        let which = pb::DeleteTaskCachesRequest { job: name, ..Default::default() };
                        assert_eq!(self.caller.delete_tasks(which).await.expect("deleted"), 1);
                    }
                    _ => {}
                }
            }
            Owner::BaseResourceType | Owner::BaseResourceTypeWithANextVersion => {
                let worker = Some(WorkerId::new());
                self.caller.put_type("1", worker, artifact).await.expect("put");
                if owner == Owner::BaseResourceTypeWithANextVersion {
                    self.caller.put_type("2", worker, self.next).await.expect("put");
                }
            }
            Owner::ResourceCerts | Owner::ResourceCertsThatWereReplaced => {
                let worker = WorkerId::new();
                self.caller.put_certs(worker, artifact).await.expect("put");
                if owner == Owner::ResourceCertsThatWereReplaced {
                    self.caller.put_certs(worker, self.next).await.expect("put");
                }
            }
        }
    }

    /// Creates a build that owns an artifact, and ends the build.
    async fn build(&self, artifact: ArtifactId, job: &str, status: BuildStatus, keep: Option<Duration>) {
        let build = BuildId::new();
        self.put_build(build, job, 1, BuildStatus::Unspecified, keep).await;
        self.add(artifact, build).await;
        if status != BuildStatus::Unspecified {
            self.put_build(build, job, 1, status, keep).await;
        }
    }

    async fn put_build(
        &self,
        build: BuildId,
        job: &str,
        number: u64,
        status: BuildStatus,
        keep: Option<Duration>,
    ) {
        let request = pb::PutBuildRequest {
            build_id: build.to_string(),
            team: TEAM.to_owned(),
            job: job.to_owned(),
            number: if job.is_empty() { 0 } else { number },
            status: status.into(),
            keep: keep.map(rpc::duration),
            ..Default::default()
        };
        self.caller.suite.owners().put_build(request).await.expect("put");
    }

    async fn add(&self, artifact: ArtifactId, build: BuildId) {
        let request = pb::AddOwnerRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            build_id: build.to_string(),
        };
        self.caller.suite.artifacts().add_owner(request).await.expect("added");
    }
}

async fn artifact_stays_until_last_owner_lets_go(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| {
        (config.unowned_ttl, config.resource_cache_ttl) = (TERM, TERM);
    })
    .await;
    let gateway = suite.gateway().await;
    let next = suite.uploaded(&gateway, 0).await;
    suite.pin(WorkloadId::new(), &[next], None).await.expect("pinned");
    let mut giver = Giver { caller: Caller::of(&suite, TEAM), next, given: 0 };

    // No owner, each owner alone, and each pair.
    let mut cases = vec![(Vec::new(), Keeps::ForItsTerm)];
    for (n, (one, keeps)) in TABLE.into_iter().enumerate() {
        cases.push((vec![one], keeps));
        cases.extend(TABLE[..n].iter().map(|(other, also)| (vec![one, *other], keeps.max(*also))));
    }
    let mut made = Vec::new();
    for (owners, keeps) in cases {
        // A pin must work with any number of owners.
        let holders = [None, Some(WorkloadId::new())];
        for holder in holders.into_iter().take(if owners.len() > 1 { 1 } else { 2 }) {
            let artifact = suite.uploaded(&gateway, u64::try_from(made.len()).expect("few") + 1).await;
            if let Some(holder) = holder {
                suite.pin(holder, &[artifact], None).await.expect("pinned");
            }
            for owner in &owners {
                giver.give(artifact, *owner).await;
            }
            made.push((artifact, owners.clone(), keeps, holder));
        }
    }

    let begun = suite.clock.now();
    // Just before the end of every term, and at it.
    for (at, is_over) in
        [(begun, false), (begun + TERM - Duration::from_secs(1), false), (begun + TERM, true)]
    {
        advance_to(&suite, at);
        suite.collect(DryRun::Off).await;
        for (artifact, owners, keeps, holder) in &made {
            let kept = *keeps == Keeps::Still || (*keeps == Keeps::ForItsTerm && !is_over);
            let pinned = holder.is_some();
            let case = format!("{owners:?}, pinned: {pinned}, terms over: {is_over}");
            assert_eq!(lives(&suite, *artifact).await, kept || pinned, "{case}");
        }
    }
    for holder in made.iter().filter_map(|(.., holder)| *holder) {
        suite.settle(holder, None, &[], None).await.expect("settled");
    }
    suite.collect(DryRun::Off).await;
    for (artifact, owners, keeps, _) in made {
        assert_eq!(lives(&suite, artifact).await, keeps == Keeps::Still, "{owners:?}, pinned no longer");
    }
    suite.stop().await;
}

fn advance_to(suite: &Suite, at: Timestamp) {
    suite.clock.advance(at.since(suite.clock.now()));
}

async fn lives(suite: &Suite, artifact: ArtifactId) -> bool {
    suite.get(artifact).await.is_ok_and(|artifact| artifact.state() != ArtifactState::Deleting)
}
