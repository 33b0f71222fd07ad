//! Complete lifecycles of artifacts and workloads.

use std::time::Duration;

use artifact_store::Clock;
use domain::{ArtifactId, AttemptId, BuildId, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun, InventoryState};
use testing::databases::TestDatabase;

use crate::{Suite, TEAM, assert_refused, digest, input, on_both_databases, output, settled_output};

on_both_databases! {
    workload_leaves_outputs_and_finally_nothing,
    repeated_calls_return_first_answer,
    input_is_missing_until_it_is_copied,
    expired_or_abandoned_upload_leaves_nothing,
    given_up_upload_of_live_build_is_collected,
    bytes_are_adopted_within_team_with_live_replica,
    artifact_lifetime_is_unaffected_by_equal_bytes,
    artifact_on_excluded_workers_is_not_adopted,
    ended_attempt_prepares_and_settles_nothing,
    settled_workload_stays_settled,
    holder_is_settled_with_outputs_of_several_attempts,
    lease_with_containers_is_settled_without_pins,
    unbound_build_ends_by_its_term,
    store_downtime_expires_no_terms,
}

async fn workload_leaves_outputs_and_finally_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (workload, attempt, build) = (WorkloadId::new(), AttemptId::new(), BuildId::new());
    suite.put_build(build, workload, None).await.expect("put");
    let (source, source_volume) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let located = suite.pin(workload, &[source], Some(build)).await.expect("pinned");
    assert_eq!(located[0].replicas[0].worker_id, gateway.worker.to_string());

    let out = workload.output_artifact("out");
    let needs = [input("in", source), output("out", out)];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    let [made_in, made_out] = &planned.volumes[..] else { panic!("two volumes") };
    assert_eq!(made_in.parent_handle, source_volume);
    assert_eq!(made_out.parent_handle, "");
    gateway.prepared(attempt).await.expect("recorded");
    gateway.complete(&made_out.volume_handle, digest(2)).await.expect("complete");

    assert_refused(suite.get(out).await, Reason::ArtifactNotFound);
    assert_eq!(suite.get(source).await.expect("it is there").kept_by.len(), 3, "build, pin and volume");
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.settle(workload, Some(attempt), &[(out, digest(2))], Some(build)).await.expect("settled");

    let settled = suite.get(out).await.expect("it is there");
    assert_eq!(settled.state(), ArtifactState::Sealed);
    assert_eq!(settled.label, "out");
    assert_eq!(settled.digest, digest(2).as_bytes());
    assert_eq!(settled.replicas[0].volume_handle, made_out.volume_handle);

    // The build has ended and everything is garbage. A dry run reports that and changes nothing.
    let would_go = suite.collect(DryRun::Only).await;
    assert_eq!(would_go.len(), 1 + 2 + 3, "a container, two artifacts, three volumes: {would_go:?}");
    assert_eq!(suite.get(out).await.expect("it is there").state(), ArtifactState::Sealed);
    let mut went = suite.collect(DryRun::Off).await;
    let key = |collected: &pb::Collected| (collected.kind, collected.id.clone());
    went.sort_by_key(key);
    let mut would_go = would_go;
    would_go.sort_by_key(key);
    assert_eq!(went, would_go);

    let volumes = [made_in.volume_handle.as_str(), &source_volume, &made_out.volume_handle];
    let order = gateway.swept(&[&planned.container_handle], &volumes).await;
    let place = |handle: &str| order.iter().position(|other| other == handle);
    assert!(place(&made_in.volume_handle) < place(&source_volume), "children first");
    let reported = gateway.report(&[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (4, 0));
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.volumes().await, []);
    assert_eq!(suite.containers().await, []);
    assert_eq!(suite.all_artifacts().await, []);
    suite.stop().await;
}

async fn repeated_calls_return_first_answer(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (workload, attempt, build) = (WorkloadId::new(), AttemptId::new(), BuildId::new());
    suite.put_build(build, workload, None).await.expect("put");
    suite.put_build(build, workload, None).await.expect("put again");
    assert_refused(suite.put_build(build, WorkloadId::new(), None).await, Reason::BuildExists);

    let (artifact, transfer) = (ArtifactId::new(), TransferId::new());
    for _ in 0..2 {
        suite.create(artifact, Some(build)).await.expect("created");
    }
    assert_refused(suite.create(artifact, None).await, Reason::ArtifactExists);
    let handle = suite.plan(artifact, gateway.worker, transfer).await.expect("planned");
    assert_eq!(suite.plan(artifact, gateway.worker, transfer).await.expect("planned again"), handle);
    assert_refused(suite.plan(artifact, WorkerId::new(), transfer).await, Reason::NotAttended);
    assert_refused(suite.seal(artifact, digest(1)).await, Reason::CandidateMissing);
    for _ in 0..2 {
        gateway.complete(&handle, digest(1)).await.expect("complete");
    }
    assert_refused(gateway.complete(&handle, digest(2)).await, Reason::InvalidField);
    for _ in 0..2 {
        suite.seal(artifact, digest(1)).await.expect("sealed");
    }
    assert_refused(suite.seal(artifact, digest(2)).await, Reason::ArtifactSealed);
    let planned = suite.plan(artifact, gateway.worker, TransferId::new()).await.expect("it is there");
    assert_eq!(planned, handle);
    gateway.complete(&handle, digest(1)).await.expect("complete");

    let out = workload.output_artifact("out");
    let needs = [input("in", artifact), output("out", out)];
    for _ in 0..2 {
        suite.pin(workload, &[artifact, artifact], Some(build)).await.expect("pinned");
    }
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(gateway.prepare(workload, attempt, &needs).await.expect("prepared again"), planned);
    for _ in 0..2 {
        gateway.prepared(attempt).await.expect("recorded");
    }
    assert_eq!(gateway.prepare(workload, attempt, &needs).await.expect("prepared again"), planned);
    for _ in 0..2 {
        gateway.complete(&planned.volumes[1].volume_handle, digest(3)).await.expect("complete");
    }
    for _ in 0..2 {
        suite.settle(workload, Some(attempt), &[(out, digest(3))], Some(build)).await.expect("settled");
    }
    assert_refused(suite.put_build(build, workload, None).await, Reason::BuildEnded);
    assert_eq!(suite.containers().await.len(), 1);
    assert_eq!(suite.volumes().await.len(), 3);
    suite.stop().await;
}

async fn input_is_missing_until_it_is_copied(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (here, there) = (suite.gateway().await, suite.gateway().await);
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let (artifact, _) = suite.upload(&there, None, 1).await.expect("uploaded");

    let planned = here.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
    assert_eq!(planned.volumes[0].missing_artifact_id, artifact.to_string());
    assert_eq!(planned.volumes[0].parent_handle, "");
    assert_ne!(planned.volumes[0].volume_handle, "");

    let unknown = ArtifactId::new();
    let refused = here.prepare(workload, AttemptId::new(), &[input("in", unknown)]).await;
    assert_refused(refused, Reason::InputUnavailable);
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    let refused = here.prepare(workload, AttemptId::new(), &[input("in", open)]).await;
    assert_refused(refused, Reason::InputUnavailable);
    assert_refused(suite.pin(workload, &[artifact, open], None).await, Reason::InputUnavailable);
    let kept_by = suite.get(artifact).await.expect("it is there").kept_by;
    assert!(!kept_by.iter().any(|line| line.starts_with("pinned")), "{kept_by:?}");
    suite.stop().await;
}

async fn expired_or_abandoned_upload_leaves_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(artifact, None).await.expect("created");
    let lost = suite.plan(artifact, gateway.worker, transfer).await.expect("planned");
    let progress = || async {
        let request = pb::ProgressRequest { transfer_id: transfer.to_string(), team: TEAM.to_owned() };
        suite.replicas().progress(request).await.map(|_| ()).map_err(rpc::Refusal::from)
    };

    suite.clock.advance(Duration::from_secs(50));
    progress().await.expect("renewed");
    suite.clock.advance(Duration::from_secs(50));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_secs(10));
    assert_refused(progress().await, Reason::ClaimLost);
    assert_refused(gateway.complete(&lost, digest(1)).await, Reason::ClaimLost);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "the artifact, too");
    assert_refused(gateway.complete(&lost, digest(1)).await, Reason::ClaimLost);
    let again = suite.plan(artifact, gateway.worker, TransferId::new()).await;
    assert_refused(again, Reason::ArtifactNotFound);

    let (artifact, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(artifact, None).await.expect("created");
    let abandoned = suite.plan(artifact, gateway.worker, transfer).await.expect("planned");
    gateway.complete(&abandoned, digest(1)).await.expect("complete");
    for _ in 0..2 {
        suite.abandon(transfer).await.expect("abandoned");
    }
    assert_refused(suite.seal(artifact, digest(1)).await, Reason::ArtifactNotFound);
    gateway.swept(&[], &[&lost, &abandoned]).await;
    gateway.report(&[], &[]).await.expect("reported");
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.volumes().await, []);
    assert_eq!(suite.all_artifacts().await, []);

    // A sealed artifact is not deleted with its transfer.
    let (kept, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(kept, None).await.expect("created");
    let handle = suite.plan(kept, gateway.worker, transfer).await.expect("planned");
    gateway.complete(&handle, digest(1)).await.expect("complete");
    suite.seal(kept, digest(1)).await.expect("sealed");
    suite.abandon(transfer).await.expect("abandoned");
    assert_eq!(suite.get(kept).await.expect("it is there").replicas.len(), 1);
    suite.stop().await;
}

async fn given_up_upload_of_live_build_is_collected(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    // Of four open artifacts, one is being uploaded, one was, one waits for the commit, and one is
    // a planned output without an upload.
    let [going_on, given_up, complete, planned] = [(); 4].map(|()| ArtifactId::new());
    for artifact in [going_on, given_up, complete, planned] {
        suite.create(artifact, Some(build)).await.expect("created");
    }
    let transfer = TransferId::new();
    suite.plan(going_on, gateway.worker, transfer).await.expect("planned");
    suite.plan(given_up, gateway.worker, TransferId::new()).await.expect("planned");
    let whole = suite.plan(complete, gateway.worker, TransferId::new()).await.expect("planned");
    gateway.complete(&whole, digest(1)).await.expect("complete");
    suite.clock.advance(Duration::from_secs(50));
    let request = pb::ProgressRequest { transfer_id: transfer.to_string(), team: TEAM.to_owned() };
    suite.replicas().progress(request).await.expect("renewed");
    suite.clock.advance(Duration::from_secs(10));
    let collected = suite.collect(DryRun::Off).await;
    assert_eq!(collected.len(), 2, "an artifact and its volume: {collected:?}");
    assert_eq!(suite.explain(given_up).await.expect("explained").reason, "the claim of its transfer expired");
    for artifact in [going_on, complete, planned] {
        assert_eq!(suite.state(artifact).await, ArtifactState::Open);
    }
    suite.seal(complete, digest(1)).await.expect("it waits for the commit");
    suite.stop().await;
}

async fn bytes_are_adopted_within_team_with_live_replica(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    assert_eq!(suite.adopt(digest(1), None).await.expect("asked"), None);
    let (artifact, handle) = suite.upload(&gateway, None, 1).await.expect("uploaded");

    let (workload, build) = (WorkloadId::new(), BuildId::new());
    assert_refused(suite.adopt(digest(1), Some(build)).await, Reason::OwnerEnded);
    suite.put_build(build, workload, None).await.expect("put");
    for _ in 0..2 {
        let adopted = suite.adopt(digest(1), Some(build)).await.expect("asked").expect("adopted");
        assert_eq!(adopted.artifact_id, artifact.to_string());
    }
    assert_eq!(suite.get(artifact).await.expect("it is there").kept_by, [format!("build {build}")]);
    let other_team = pb::AdoptByDigestRequest {
        team: "other".to_owned(),
        digest: digest(1).as_bytes().to_vec().into(),
        ..pb::AdoptByDigestRequest::default()
    };
    let other_team = suite.artifacts().adopt_by_digest(other_team).await.expect("asked").into_inner();
    assert_eq!(other_team.artifact, None);
    let other_team = pb::LocateRequest { team: "other".to_owned(), artifact_ids: vec![artifact.to_string()] };
    let other_team = suite.artifacts().locate(other_team).await.expect("located").into_inner();
    assert_eq!(other_team.locations, []);

    let reported = gateway.report(&[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (0, 1));
    assert_eq!(suite.adopt(digest(1), None).await.expect("asked"), None);
    assert_refused(suite.pin(workload, &[artifact], None).await, Reason::InputUnavailable);
    let ids = vec![ArtifactId::new().to_string(), artifact.to_string()];
    let request = pb::LocateRequest { team: TEAM.to_owned(), artifact_ids: ids };
    let located = suite.artifacts().locate(request).await.expect("located").into_inner().locations;
    assert_eq!((located.len(), located[0].replicas.len()), (1, 0));

    // The replica was only lost for a while.
    gateway.report(std::slice::from_ref(&handle), &[]).await.expect("reported");
    assert_eq!(suite.volume_state(&handle).await, Some(InventoryState::Created));
    assert!(suite.adopt(digest(1), None).await.expect("asked").is_some());
    suite.stop().await;
}

async fn artifact_lifetime_is_unaffected_by_equal_bytes(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, workload, None).await.expect("put");
    suite.pin(workload, &[], Some(build)).await.expect("bound");
    let (unowned, _) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    suite.adopt(digest(1), Some(build)).await.expect("asked").expect("adopted");
    let (of_build, _) = suite.upload(&gateway, Some(build), 2).await.expect("uploaded");
    let (gone, _) = suite.upload(&gateway, Some(build), 3).await.expect("uploaded");
    suite.settle(workload, None, &[], Some(build)).await.expect("settled");
    suite.adopt(digest(2), None).await.expect("asked").expect("found");

    let hour = Duration::from_secs(3600);
    suite.clock.advance(11 * hour);
    suite.collect(DryRun::Off).await;
    for kept in [unowned, of_build] {
        assert_eq!(suite.get(kept).await.expect("kept").state(), ArtifactState::Sealed);
    }
    assert_eq!(suite.get(gone).await.expect("its tombstone").state(), ArtifactState::Deleting);
    suite.clock.advance(2 * hour);
    suite.collect(DryRun::Off).await;
    for gone in [unowned, of_build] {
        assert_eq!(suite.get(gone).await.expect("its tombstone").state(), ArtifactState::Deleting);
    }
    suite.stop().await;
}

async fn artifact_on_excluded_workers_is_not_adopted(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (one, two) = (suite.gateway().await, suite.gateway().await);
    let (older, _) = suite.upload(&one, None, 1).await.expect("uploaded");
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    let adopted = suite.adopt_without(digest(1), Some(build), &[one.worker]).await.expect("asked");
    assert_eq!(adopted, None);
    assert_eq!(suite.get(older).await.expect("it is there").kept_by.len(), 1, "no owner yet");
    assert!(suite.adopt_without(digest(1), None, &[two.worker]).await.expect("asked").is_some());

    let (newer, handle) = suite.upload(&two, None, 1).await.expect("uploaded");
    let of = async |without: &[WorkerId]| {
        let adopted = suite.adopt_without(digest(1), Some(build), without).await.expect("asked");
        adopted.map(|artifact| (artifact.artifact_id, artifact.replicas.len()))
    };
    assert_eq!(of(&[one.worker]).await, Some((newer.to_string(), 1)));
    assert_eq!(of(&[two.worker]).await, Some((older.to_string(), 1)));
    assert_eq!(of(&[one.worker, two.worker]).await, None);

    // The older artifact is copied to the worker of the newer one.
    let copy = suite.plan(older, two.worker, TransferId::new()).await.expect("planned");
    two.complete(&copy, digest(1)).await.expect("complete");
    two.report(std::slice::from_ref(&copy), &[]).await.expect("reported");
    assert_eq!(suite.volume_state(&handle).await, Some(InventoryState::Lost));
    assert_eq!(of(&[one.worker]).await, Some((older.to_string(), 1)), "only what counts is answered");
    suite.stop().await;
}

async fn ended_attempt_prepares_and_settles_nothing(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.gc_grace = Duration::from_secs(300)).await;
    let gateway = suite.gateway().await;
    let (workload, first, second) = (WorkloadId::new(), AttemptId::new(), AttemptId::new());
    let out = workload.output_artifact("out");
    let needs = [output("out", out)];
    let old = gateway.prepare(workload, first, &needs).await.expect("prepared");
    gateway.prepared(first).await.expect("recorded");
    gateway.complete(&old.volumes[0].volume_handle, digest(1)).await.expect("complete");
    for _ in 0..2 {
        suite.end_attempt(workload, first).await.expect("ended");
    }
    assert_refused(gateway.prepare(workload, first, &needs).await, Reason::AttemptEnded);
    assert_refused(gateway.prepared(first).await, Reason::AttemptEnded);
    let refused = suite.settle(workload, Some(first), &[(out, digest(1))], None).await;
    assert_refused(refused, Reason::CandidateMissing);

    let new = gateway.prepare(workload, second, &needs).await.expect("prepared");
    gateway.prepared(second).await.expect("recorded");
    let refused = suite.settle(workload, Some(second), &[(out, digest(1))], None).await;
    assert_refused(refused, Reason::CandidateMissing);
    gateway.complete(&new.volumes[0].volume_handle, digest(2)).await.expect("complete");
    let refused = suite.settle(workload, Some(second), &[(out, digest(1))], None).await;
    assert_refused(refused, Reason::CandidateMissing);
    suite.settle(workload, Some(second), &[(out, digest(2))], None).await.expect("settled");

    assert_eq!(suite.collect(DryRun::Off).await, [], "the grace has not passed");
    suite.clock.advance(Duration::from_secs(300));
    let went = suite.collect(DryRun::Off).await;
    assert_eq!(went.len(), 3, "two containers and the first attempt's output: {went:?}");
    assert_eq!(suite.get(out).await.expect("it is there").replicas.len(), 1);

    // An end that arrives before its attempt is remembered.
    let late = AttemptId::new();
    let workload = WorkloadId::new();
    suite.end_attempt(workload, late).await.expect("ended");
    assert_refused(gateway.prepare(workload, late, &needs).await, Reason::AttemptEnded);
    suite.stop().await;
}

async fn settled_workload_stays_settled(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, _) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    suite.pin(workload, &[artifact], None).await.expect("pinned");
    let holders = suite.pins().list_pins(pb::ListPinsRequest::default()).await.expect("listed").into_inner();
    assert_eq!(holders.holders[0].holder_id, workload.to_string());

    suite.settle(workload, None, &[], None).await.expect("settled");
    let holders = suite.pins().list_pins(pb::ListPinsRequest::default()).await.expect("listed").into_inner();
    assert_eq!(holders.holders, []);
    assert_refused(suite.pin(workload, &[artifact], None).await, Reason::HolderSettled);
    assert_refused(gateway.prepare(workload, attempt, &[]).await, Reason::AttemptEnded);
    suite.stop().await;
}

async fn store_downtime_expires_no_terms(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, transfer) = (ArtifactId::new(), TransferId::new());
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, workload, None).await.expect("put");
    suite.create(artifact, Some(build)).await.expect("created");
    suite.create(ArtifactId::new(), Some(build)).await.expect("created");
    suite.plan(artifact, gateway.worker, transfer).await.expect("planned");
    let now = suite.clock.now();
    let database = suite.stop().await;

    // Longer than the terms of the claim and the build. Two stores that start at once extend by one
    // term, not two.
    let late = |config: &mut artifact_store::Config| {
        config.clock = Clock::movable(now + Duration::from_secs(3600));
    };
    let suite = Suite::start_with(database, late).await;
    suite.volumes().await;
    let suite = Suite::start_with(suite.stop().await, late).await;
    let request = || pb::ProgressRequest { transfer_id: transfer.to_string(), team: TEAM.to_owned() };
    suite.clock.advance(Duration::from_secs(59));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.replicas().progress(request()).await.expect("it is active");
    suite.clock.advance(Duration::from_secs(60));
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "its second term is over");

    suite.clock.advance(Duration::from_secs(10 * 60 - 120));
    suite.put_build(build, workload, None).await.expect("renewed");
    suite.clock.advance(Duration::from_secs(10 * 60));
    assert_eq!(suite.collect(DryRun::Off).await.len(), 1, "the other artifact goes with its build");
    suite.stop().await;
}

async fn unbound_build_ends_by_its_term(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (bound, unbound) = (BuildId::new(), BuildId::new());
    let (workload, other) = (WorkloadId::new(), WorkloadId::new());
    let keep = Some(Duration::from_secs(60));
    suite.put_build(bound, workload, keep).await.expect("put");
    suite.put_build(unbound, other, keep).await.expect("put");
    let (kept, _) = suite.upload(&gateway, Some(bound), 1).await.expect("uploaded");
    let (let_go, _) = suite.upload(&gateway, Some(unbound), 2).await.expect("uploaded");
    suite.pin(workload, &[], Some(bound)).await.expect("bound");

    suite.clock.advance(Duration::from_secs(9 * 60));
    suite.put_build(unbound, other, keep).await.expect("renewed");
    suite.clock.advance(Duration::from_secs(9 * 60));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_secs(60));
    assert_eq!(suite.collect(DryRun::Off).await, [], "its end keeps for a minute");
    assert_refused(suite.put_build(unbound, other, keep).await, Reason::BuildEnded);
    assert_refused(suite.create(ArtifactId::new(), Some(unbound)).await, Reason::OwnerEnded);
    suite.clock.advance(Duration::from_secs(60));
    let went = suite.collect(DryRun::Off).await;
    assert_eq!(went.len(), 2, "an artifact and its replica: {went:?}");
    assert_eq!(suite.get(let_go).await.expect("its tombstone").state(), ArtifactState::Deleting);

    suite.settle(workload, None, &[], Some(bound)).await.expect("settled");
    suite.clock.advance(Duration::from_secs(59));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    assert_eq!(suite.get(kept).await.expect("it is there").state(), ArtifactState::Sealed);
    suite.clock.advance(Duration::from_secs(1));
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    suite.stop().await;
}

async fn holder_is_settled_with_outputs_of_several_attempts(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let lease = WorkloadId::new();
    let (attempts, outputs) = ([(); 3].map(|()| AttemptId::new()), [(); 3].map(|()| ArtifactId::new()));
    for (number, (attempt, out)) in (1..).zip(attempts.into_iter().zip(outputs)) {
        let prepared = gateway.prepare(lease, attempt, &[output("out", out)]).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        gateway.complete(&prepared.volumes[0].volume_handle, digest(number)).await.expect("complete");
    }
    suite.end_attempt(lease, attempts[2]).await.expect("ended");

    let all = [(outputs[0], digest(1)), (outputs[1], digest(2)), (outputs[2], digest(3))];
    assert_refused(suite.settle(lease, None, &all, None).await, Reason::CandidateMissing);
    assert_refused(suite.settle(lease, Some(attempts[0]), &all[..2], None).await, Reason::CandidateMissing);
    suite.settle(lease, None, &all[..2], None).await.expect("settled");
    for (out, digest) in &all[..2] {
        assert_eq!(suite.get(*out).await.expect("it is sealed").digest, digest.as_bytes());
    }
    assert_refused(suite.get(outputs[2]).await, Reason::ArtifactNotFound);
    let needs = [output("out", ArtifactId::new())];
    assert_refused(gateway.prepare(lease, AttemptId::new(), &needs).await, Reason::AttemptEnded);

    // Only a settlement with other outputs differs. A settlement without outputs seals nothing.
    for (outputs, differs) in [(&all[..2], false), (&all[..1], true), (&all[..0], false)] {
        let request = pb::SettleRequest {
            holder_id: lease.to_string(),
            team: TEAM.to_owned(),
            outputs: outputs.iter().map(settled_output).collect(),
            status: pb::BuildStatus::Succeeded.into(),
            ..Default::default()
        };
        let repeated = suite.pins().settle(request).await.expect("a repeat").into_inner();
        assert_eq!(repeated.differs, differs, "{outputs:?}");
    }
    suite.stop().await;
}

async fn lease_with_containers_is_settled_without_pins(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (lease, attempt) = (WorkloadId::new(), AttemptId::new());
    let out = output("out", ArtifactId::new());
    let made = gateway.prepare(lease, attempt, &[out]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    assert_eq!(suite.collect(DryRun::Off).await, [], "the attempt is active");
    suite.settle(lease, None, &[], None).await.expect("settled");
    let went: Vec<_> = suite.collect(DryRun::Off).await.into_iter().map(|collected| collected.id).collect();
    assert!(went.contains(&made.container_handle), "{went:?}");
    assert!(went.contains(&made.volumes[0].volume_handle), "{went:?}");
    suite.stop().await;
}
