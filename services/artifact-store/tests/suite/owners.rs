//! Owners of artifacts, and how they let go.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use sea_orm::{ConnectionTrait, DbBackend};
use testing::databases::TestDatabase;
use tokio::task::JoinSet;

use crate::{Suite, TEAM, assert_refused, digest, on_both_databases, output};

on_both_databases! {
    deleted_build_lets_go_at_once,
    deleted_artifacts_stay_while_used,
    reused_artifact_does_not_accumulate_owners,
    #[ignore = "slow: make full"]
    artifact_with_very_many_owners_is_collected,
    batch_is_created_all_or_none,
    batch_changes_owner_all_or_none,
    batches_in_any_order_do_not_deadlock,
    holder_is_listed_while_it_keeps_something,
}

async fn deleted_artifacts_stay_while_used(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, workload, Some(Duration::from_secs(3600))).await.expect("put");
    let (owned, _) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let (young, _) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let (pinned, _) = suite.upload(&gateway, None, 3).await.expect("uploaded");
    suite.pin(workload, &[pinned], Some(build)).await.expect("pinned");
    let delete = async |team: &str, artifacts: &[ArtifactId]| {
        let artifact_ids = artifacts.iter().map(ToString::to_string).collect();
        let request = pb::DeleteArtifactsRequest { team: team.to_owned(), artifact_ids };
        suite.artifacts().delete_artifacts(request).await.map_err(rpc::Refusal::from)
    };
    let states = async || {
        suite.collect(DryRun::Off).await;
        let state = async |id| suite.get(id).await.expect("it is known").state();
        [state(owned).await, state(young).await, state(pinned).await]
    };
    use ArtifactState::{Deleting, Sealed};
    assert_refused(delete("other", &[young]).await, Reason::ArtifactNotFound);
    assert_refused(delete(TEAM, &[young, ArtifactId::new()]).await, Reason::ArtifactNotFound);
    assert_eq!(states().await, [Sealed; 3], "all or none");

    delete(TEAM, &[owned, young, pinned]).await.expect("deleted");
    assert_eq!(states().await, [Sealed, Deleting, Sealed], "the build and its workload go on");
    // The build's keep time of an hour starts with its end.
    suite.settle(workload, None, &[], Some(build)).await.expect("settled");
    for _ in 0..2 {
        delete(TEAM, &[owned, young, pinned]).await.expect("deleted");
    }
    assert_eq!(states().await, [Deleting; 3]);
}

async fn deleted_build_lets_go_at_once(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (build, other) = (BuildId::new(), BuildId::new());
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let month = Some(Duration::from_secs(30 * 24 * 3600));
    suite.put_build(build, workload, month).await.expect("put");
    suite.put_build(other, WorkloadId::new(), month).await.expect("put");
    let (artifact, _) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let (shared, _) = suite.upload(&gateway, Some(build), 2).await.expect("uploaded");
    suite.adopt(digest(2), Some(other)).await.expect("asked").expect("adopted");
    suite.pin(workload, &[artifact], Some(build)).await.expect("pinned");

    let of_another = pb::DeleteBuildRequest { team: "other".to_owned(), build_id: build.to_string() };
    let mut owners = suite.owners();
    let refused = owners.delete_build(of_another).await.map_err(rpc::Refusal::from);
    assert_refused(refused, Reason::BuildNotFound);
    for _ in 0..2 {
        suite.delete_build(build).await.expect("deleted");
    }
    assert_refused(suite.put_build(build, workload, month).await, Reason::BuildEnded);
    assert_eq!(suite.collect(DryRun::Off).await, [], "one is pinned, one has another owner");

    // The workload ends later, and its output has no owner.
    let out = workload.output_artifact("out");
    let planned = gateway.prepare(workload, attempt, &[output("out", out)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    gateway.complete(&planned.volumes[0].volume_handle, digest(3)).await.expect("complete");
    suite.settle(workload, Some(attempt), &[(out, digest(3))], Some(build)).await.expect("settled");
    assert_eq!(suite.get(out).await.expect("it is there").kept_by, ["no owner: deleted when it is old"]);
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.get(artifact).await.expect("its tombstone").state(), ArtifactState::Deleting);
    assert_eq!(suite.get(shared).await.expect("it is there").kept_by, [format!("build {other}")]);

    // An ended build that keeps for a month lets go as well.
    let (ended, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(ended, workload, month).await.expect("put");
    let (artifact, _) = suite.upload(&gateway, Some(ended), 4).await.expect("uploaded");
    suite.settle(workload, None, &[], Some(ended)).await.expect("settled");
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.get(artifact).await.expect("it is kept").state(), ArtifactState::Sealed);
    suite.delete_build(ended).await.expect("deleted");
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.get(artifact).await.expect("its tombstone").state(), ArtifactState::Deleting);
    assert_refused(suite.delete_build(BuildId::new()).await, Reason::BuildNotFound);
    suite.stop().await;
}

async fn reused_artifact_does_not_accumulate_owners(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (going_on, of_going_on) = (BuildId::new(), WorkloadId::new());
    suite.put_build(going_on, of_going_on, None).await.expect("put");
    suite.pin(of_going_on, &[], Some(going_on)).await.expect("bound");
    let (artifact, _) = suite.upload(&gateway, Some(going_on), 1).await.expect("uploaded");
    let mut ended = Vec::new();
    for _ in 0..3 {
        let (build, workload) = (BuildId::new(), WorkloadId::new());
        suite.put_build(build, workload, None).await.expect("put");
        suite.adopt(digest(1), Some(build)).await.expect("asked").expect("adopted");
        suite.settle(workload, None, &[], Some(build)).await.expect("settled");
        ended.push((build, workload));
    }
    suite.clock.advance(Duration::from_secs(25 * 3600));
    for _ in 0..2 {
        assert_eq!(suite.collect(DryRun::Off).await, []);
    }
    for (build, workload) in ended {
        suite.put_build(build, workload, None).await.expect("it is forgotten");
    }
    let found = suite.get(artifact).await.expect("it is there");
    assert_eq!(found.kept_by, [format!("build {going_on}")]);

    // It is deleted with its last owner all the same.
    suite.settle(of_going_on, None, &[], None).await.expect("settled");
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "the artifact and its replica");
    suite.stop().await;
}

async fn artifact_with_very_many_owners_is_collected(database: TestDatabase) {
    // More than a statement takes values.
    const OWNERS: u32 = 70_000;
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, _) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (other, _) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let connection = sea_orm::Database::connect(&suite.url()).await.expect("the database");
    let (uuid, artifact_id) = match connection.get_database_backend() {
        DbBackend::Sqlite => ("randomblob(16)", format!("x'{}'", artifact.uuid().simple())),
        _ => ("gen_random_uuid()", format!("'{artifact}'")),
    };
    let builds = format!(
        "INSERT INTO builds (build_id, team, ends_with, keep, term, term_ends_at, bound, status, ended_at, kept_until, created_at, due_at)
         WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {OWNERS})
         SELECT {uuid}, 'main', {uuid}, 0, 0, 0, TRUE,
                CASE WHEN i % 2 = 1 THEN NULL ELSE 'succeeded' END,
                CASE WHEN i % 2 = 1 THEN NULL ELSE 1 END, CASE WHEN i % 2 = 1 THEN NULL ELSE 1 END, 1,
                CASE WHEN i % 2 = 1 THEN NULL ELSE 1 END FROM n"
    );
    let owners =
        format!("INSERT INTO owners (artifact_id, build_id) SELECT {artifact_id}, build_id FROM builds");
    let had_owner = format!("UPDATE artifacts SET had_owner = TRUE WHERE artifact_id = {artifact_id}");
    for statement in [builds, owners, had_owner] {
        connection.execute_unprepared(&statement).await.expect("written");
    }
    connection.close().await.expect("closed");

    let half = usize::try_from(OWNERS / 2).expect("fits");
    for _ in 0..2 {
        let found = suite.get(artifact).await.expect("it is there");
        assert_eq!(found.kept_by.len(), 51);
        assert_eq!(found.kept_by.last(), Some(&format!("and {} more", half - 50)));
        assert_eq!(suite.collect(DryRun::Off).await, []);
    }
    assert_eq!(suite.get(other).await.expect("it is there").kept_by, ["no owner: deleted when it is old"]);
    suite.stop().await;
}

async fn holder_is_listed_while_it_keeps_something(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (builds, makes, nothing) = (WorkloadId::new(), WorkloadId::new(), WorkloadId::new());
    let (build, attempt) = (BuildId::new(), AttemptId::new());
    suite.put_build(build, builds, None).await.expect("put");
    suite.pin(builds, &[], Some(build)).await.expect("bound");
    gateway.prepare(makes, attempt, &[]).await.expect("prepared");
    suite.pin(nothing, &[], None).await.expect("pinned");

    let listed = async || {
        let page = suite.pins().list_pins(pb::ListPinsRequest::default()).await.expect("listed");
        let holders = page.into_inner().holders.into_iter();
        holders.map(|holder| holder.holder_id).collect::<std::collections::BTreeSet<_>>()
    };
    let both = || [builds.to_string(), makes.to_string()].into();
    assert_eq!(listed().await, both());
    // However late: no other call would end them.
    suite.clock.advance(Duration::from_secs(30 * 24 * 3600));
    suite.collect(DryRun::Off).await;
    assert_eq!(listed().await, both());
    suite.end_attempt(makes, attempt).await.expect("ended");
    assert_eq!(listed().await, [builds.to_string()].into());
    suite.settle(builds, None, &[], None).await.expect("settled");
    assert_eq!(listed().await, [].into());
    assert_refused(suite.put_build(build, builds, None).await, Reason::BuildEnded);
    suite.stop().await;
}

fn batch(build: Option<BuildId>, artifacts: &[ArtifactId]) -> pb::BatchCreateArtifactsRequest {
    let new = |artifact: &ArtifactId| pb::NewArtifact {
        artifact_id: artifact.to_string(),
        label: format!("the label of {artifact}"),
    };
    pb::BatchCreateArtifactsRequest {
        team: TEAM.to_owned(),
        build_id: build.map(|build| build.to_string()).unwrap_or_default(),
        artifacts: artifacts.iter().map(new).collect(),
    }
}

async fn batch_is_created_all_or_none(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let mut artifacts = suite.artifacts();
    let (build, other) = (BuildId::new(), BuildId::new());
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    suite.put_build(other, WorkloadId::new(), None).await.expect("put");
    let ids: Vec<_> = (0..1000).map(|_| ArtifactId::new()).collect();
    suite.create(ids[3], Some(build)).await.expect("created");

    // An existing, equal artifact is accepted, and a repeat changes nothing.
    for _ in 0..2 {
        artifacts.batch_create_artifacts(batch(Some(build), &ids)).await.expect("created");
    }
    for (number, id) in [(3, ids[3]), (0, ids[0]), (999, ids[999])] {
        let made = suite.get(id).await.expect("it is there");
        assert_eq!((made.state(), &made.kept_by), (ArtifactState::Open, &vec![format!("build {build}")]));
        let label = if number == 3 { String::new() } else { format!("the label of {id}") };
        assert_eq!(made.label, label);
    }

    // An id of another artifact: none of the others is created.
    let fresh = ArtifactId::new();
    let taken = [fresh, ids[5]];
    for owner in [Some(other), None] {
        let refused = artifacts.batch_create_artifacts(batch(owner, &taken)).await;
        assert_refused(refused.map_err(rpc::Refusal::from), Reason::ArtifactExists);
        assert_refused(suite.get(fresh).await, Reason::ArtifactNotFound);
    }
    let refused = artifacts.batch_create_artifacts(batch(Some(BuildId::new()), &[fresh])).await;
    assert_refused(refused.map_err(rpc::Refusal::from), Reason::OwnerEnded);
    assert_refused(suite.get(fresh).await, Reason::ArtifactNotFound);

    // All are deleted with their owner. Artifacts without an owner stay for a while.
    artifacts.batch_create_artifacts(batch(None, &[fresh])).await.expect("created");
    suite.delete_build(build).await.expect("deleted");
    let collected = suite.collect(DryRun::Off).await;
    assert_eq!(collected.len(), ids.len());
    assert_eq!(suite.get(fresh).await.expect("it is there").kept_by, ["no owner: deleted when it is old"]);
    suite.stop().await;
}

async fn batch_changes_owner_all_or_none(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let mut artifacts = suite.artifacts();
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    let ids: Vec<_> = (0..1000).map(|_| ArtifactId::new()).collect();
    artifacts.batch_create_artifacts(batch(None, &ids)).await.expect("created");
    let add = |ids: &[ArtifactId]| pb::BatchAddOwnerRequest {
        team: TEAM.to_owned(),
        artifact_ids: ids.iter().map(ArtifactId::to_string).collect(),
        build_id: build.to_string(),
    };
    let remove = |ids: &[ArtifactId]| pb::BatchRemoveOwnerRequest {
        team: TEAM.to_owned(),
        artifact_ids: ids.iter().map(ArtifactId::to_string).collect(),
        build_id: build.to_string(),
    };

    let refused = artifacts.batch_add_owner(add(&[ids[0], ArtifactId::new()])).await;
    assert_refused(refused.map_err(rpc::Refusal::from), Reason::ArtifactNotFound);
    assert_eq!(suite.get(ids[0]).await.expect("it is there").kept_by, ["no owner: deleted when it is old"]);
    for _ in 0..2 {
        artifacts.batch_add_owner(add(&ids)).await.expect("owned");
    }
    for id in [ids[0], ids[999]] {
        assert_eq!(suite.get(id).await.expect("it is there").kept_by, [format!("build {build}")]);
    }

    let refused = artifacts.batch_remove_owner(remove(&[ids[0], ArtifactId::new()])).await;
    assert_refused(refused.map_err(rpc::Refusal::from), Reason::ArtifactNotFound);
    assert_eq!(suite.get(ids[0]).await.expect("it is there").kept_by, [format!("build {build}")]);
    for _ in 0..2 {
        artifacts.batch_remove_owner(remove(&ids[1..])).await.expect("disowned");
    }
    let collected = suite.collect(DryRun::Off).await;
    assert_eq!(collected.len(), ids.len() - 1, "only artifacts without owners");
    assert_eq!(suite.get(ids[0]).await.expect("it is there").kept_by, [format!("build {build}")]);
    suite.stop().await;
}

async fn batches_in_any_order_do_not_deadlock(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    let ids: Vec<_> = (0..300).map(|_| ArtifactId::new()).collect();
    let mut callers = JoinSet::new();
    for n in 0..8 {
        let mut artifacts = suite.artifacts();
        let mut ids = ids.clone();
        ids.rotate_left(n * 37);
        if n % 2 == 0 {
            ids.reverse();
        }
        callers.spawn(async move {
            artifacts.batch_create_artifacts(batch(Some(build), &ids)).await.expect("created");
            let add = pb::BatchAddOwnerRequest {
                team: TEAM.to_owned(),
                artifact_ids: ids.iter().map(ArtifactId::to_string).collect(),
                build_id: build.to_string(),
            };
            artifacts.batch_add_owner(add).await.expect("owned");
        });
    }
    callers.join_all().await;
    for id in &ids {
        assert_eq!(suite.get(*id).await.expect("it is there").kept_by, [format!("build {build}")]);
    }
    suite.stop().await;
}
