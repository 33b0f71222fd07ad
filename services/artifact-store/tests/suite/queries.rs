//! Lists, rejected requests, and automatic deletion.

use std::collections::BTreeSet;
use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, VolumeHandle, WorkerId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun, InventoryState};
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use crate::{PATIENCE, Suite, TEAM, assert_refused, input, on_both_databases, output};

on_both_databases! {
    lists_are_paged_newest_first,
    malformed_requests_are_rejected,
    collector_runs_automatically,
    ended_items_are_forgotten_after_a_day,
}

async fn lists_are_paged_newest_first(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let mut uploaded = Vec::new();
    for content in 0..5 {
        uploaded.push(suite.upload(&gateway, None, content).await.expect("uploaded"));
    }
    suite.create(ArtifactId::new(), None).await.expect("created");
    uploaded.reverse();

    let mut listed = Vec::new();
    let mut request = pb::ListArtifactsRequest {
        team: TEAM.to_owned(),
        state: ArtifactState::Sealed.into(),
        page_size: 2,
        page_token: String::new(),
        id_prefix: String::new(),
    };
    loop {
        let page = suite.artifacts().list_artifacts(request.clone()).await.expect("listed").into_inner();
        listed.extend(page.artifacts);
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    let ids: Vec<_> = listed.iter().map(|artifact| artifact.artifact_id.clone()).collect();
    assert_eq!(ids, uploaded.iter().map(|(id, _)| id.to_string()).collect::<Vec<_>>());
    assert_eq!(listed[0].kept_by, ["no owner: deleted when it is old"]);
    assert_eq!(listed[0].replicas[0].volume_handle, uploaded[0].1);

    let by_prefix = async |id_prefix: &str| {
        let request = pb::ListArtifactsRequest {
            team: TEAM.to_owned(),
            id_prefix: id_prefix.to_owned(),
            ..Default::default()
        };
        let page = suite.artifacts().list_artifacts(request).await.expect("listed").into_inner();
        page.artifacts.into_iter().map(|artifact| artifact.artifact_id).collect::<Vec<_>>()
    };
    assert_eq!(by_prefix(&ids[1]).await, ids[1..2], "a whole id is its own beginning");
    assert_eq!(
        by_prefix(&ids[1][..35]).await,
        ids.iter().filter(|id| id[..35] == ids[1][..35]).cloned().collect::<Vec<_>>()
    );
    assert_eq!(by_prefix("ffff").await, [] as [String; 0]);

    let mut listed = Vec::new();
    let mut request = pb::ListVolumesRequest {
        worker_id: gateway.worker.to_string(),
        state: InventoryState::Created.into(),
        page_size: 2,
        ..Default::default()
    };
    loop {
        let page = suite.inventory().list_volumes(request.clone()).await.expect("listed").into_inner();
        listed.extend(page.volumes.into_iter().map(|volume| volume.volume_handle));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!(listed, uploaded.iter().map(|(_, handle)| handle.clone()).collect::<Vec<_>>());

    let missing = VolumeHandle::new().to_string();
    request.volume_handles = vec![uploaded[1].1.clone(), missing, uploaded[0].1.clone()];
    request.page_token.clear();
    let page = suite.inventory().list_volumes(request.clone()).await.expect("listed").into_inner();
    let listed: Vec<_> = page.volumes.into_iter().map(|volume| volume.volume_handle).collect();
    assert_eq!(listed, [uploaded[0].1.clone(), uploaded[1].1.clone()]);
    request.worker_id = WorkerId::new().to_string();
    let page = suite.inventory().list_volumes(request).await.expect("listed").into_inner();
    assert_eq!(page.volumes, [], "of these, those on that worker");

    gateway.prepare(WorkloadId::new(), AttemptId::new(), &[]).await.expect("prepared");
    let container = suite.containers().await.remove(0).container_handle;
    for id_prefix in [&container, &container[..13], "ffff"] {
        let expected: &[_] = if id_prefix == "ffff" { &[] } else { std::slice::from_ref(&container) };
        let request = pb::ListContainersRequest { id_prefix: id_prefix.to_owned(), ..Default::default() };
        let page = suite.inventory().list_containers(request).await.expect("listed").into_inner();
        let listed: Vec<_> =
            page.containers.into_iter().map(|container| container.container_handle).collect();
        assert_eq!(listed, expected, "{id_prefix}");
    }
    let volume = &uploaded[1].1;
    let request = pb::ListVolumesRequest { id_prefix: volume.replace('-', ""), ..Default::default() };
    let page = suite.inventory().list_volumes(request).await.expect("listed").into_inner();
    assert_eq!(page.volumes.len(), 1);
    assert_eq!(&page.volumes[0].volume_handle, volume);
    suite.stop().await;
}

async fn malformed_requests_are_rejected(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let team = || TEAM.to_owned();
    let list = pb::ListArtifactsRequest { team: team(), page_token: "?".to_owned(), ..Default::default() };
    let refused = suite.artifacts().list_artifacts(list).await.map_err(Refusal::from);
    assert_refused(refused, Reason::InvalidPageToken);
    let list = pb::ListArtifactsRequest { team: team(), page_size: 1001, ..Default::default() };
    let refused = suite.artifacts().list_artifacts(list).await.map_err(Refusal::from);
    assert_refused(refused, Reason::InvalidField);
    let get =
        pb::GetArtifactRequest { team: "No Team".to_owned(), artifact_id: ArtifactId::new().to_string() };
    let refused = suite.artifacts().get_artifact(get).await.map_err(Refusal::from);
    assert_refused(refused, Reason::InvalidField);
    let settle = pb::SettleRequest {
        holder_id: WorkloadId::new().to_string(),
        team: team(),
        status: pb::BuildStatus::Unspecified.into(),
        ..Default::default()
    };
    assert_refused(suite.pins().settle(settle).await.map_err(Refusal::from), Reason::InvalidField);
    let put = pb::PutBuildRequest {
        build_id: BuildId::new().to_string(),
        team: team(),
        ends_with_workload_id: WorkloadId::new().to_string(),
        keep: None,
        term: Some(rpc::duration(Duration::from_secs(24 * 3600 + 1))),
        ..Default::default()
    };
    let mut owners = suite.owners();
    assert_refused(owners.put_build(put).await.map_err(Refusal::from), Reason::InvalidField);

    let (workload, artifact) = (WorkloadId::new(), ArtifactId::new());
    let mut no_artifact = output("out", artifact);
    no_artifact.output_artifact_id = String::new();
    let mut no_purpose = output("out", artifact);
    no_purpose.purpose = 0;
    let twice = [output("out", artifact), output("out", artifact)];
    for volumes in [&[no_artifact][..], &[no_purpose], &twice] {
        let refused = gateway.prepare(workload, AttemptId::new(), volumes).await;
        assert_refused(refused, Reason::InvalidField);
    }
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    let mut request = pb::PinRequest {
        holder_id: workload.to_string(),
        team: "other".to_owned(),
        artifact_ids: Vec::new(),
        build_id: String::new(),
        task_cache_ids: Vec::new(),
    };
    suite.pins().pin(request.clone()).await.expect("pinned");
    request.team = team();
    // A workload has one team for good.
    assert_refused(suite.pins().pin(request).await.map_err(Refusal::from), Reason::InvalidField);
    suite.stop().await;
}

async fn collector_runs_automatically(database: TestDatabase) {
    let adjust = |config: &mut artifact_store::Config| {
        config.collect_interval = Duration::from_millis(20);
        config.sweep_interval = Duration::from_millis(20);
    };
    let suite = Suite::start_with(database, adjust).await;
    let gateway = suite.gateway().await;
    let (workload, attempt, build) = (WorkloadId::new(), AttemptId::new(), BuildId::new());
    suite.put_build(build, workload, None).await.expect("put");
    let (source, replica) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    suite.pin(workload, &[source], Some(build)).await.expect("pinned");
    let planned = gateway.prepare(workload, attempt, &[input("in", source)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    suite.settle(workload, Some(attempt), &[], Some(build)).await.expect("settled");

    gateway.swept(&[&planned.container_handle], &[&planned.volumes[0].volume_handle, &replica]).await;
    gateway.report(&[], &[]).await.expect("reported");
    let nothing_left = async {
        while !suite.all_artifacts().await.is_empty() {
            suite.clock.advance(Duration::from_secs(1));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, nothing_left).await.expect("nothing is left in the end");
    assert_eq!(suite.volumes().await, []);
    suite.stop().await;
}

async fn ended_items_are_forgotten_after_a_day(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (workload, attempt, build) = (WorkloadId::new(), AttemptId::new(), BuildId::new());
    suite.put_build(build, workload, Some(Duration::from_secs(48 * 3600))).await.expect("put");
    let (artifact, _) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    suite.pin(workload, &[artifact], Some(build)).await.expect("pinned");
    let planned = gateway.prepare(workload, attempt, &[]).await.expect("prepared");
    suite.settle(workload, Some(attempt), &[], None).await.expect("settled");

    // It is remembered while some of its items are left.
    suite.clock.advance(Duration::from_secs(25 * 3600));
    suite.collect(DryRun::Off).await;
    assert_refused(suite.pin(workload, &[], None).await, Reason::HolderSettled);
    assert_refused(suite.put_build(build, workload, None).await, Reason::BuildEnded);
    gateway.swept(&[&planned.container_handle], &[]).await;
    gateway.report(&handles(&suite).await, &[]).await.expect("reported");
    suite.collect(DryRun::Off).await;
    suite.pin(workload, &[], None).await.expect("it is forgotten");
    assert_refused(suite.put_build(build, workload, None).await, Reason::BuildEnded);

    suite.clock.advance(Duration::from_secs(25 * 3600));
    suite.collect(DryRun::Off).await;
    gateway.report(&[], &[]).await.expect("reported");
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.all_artifacts().await, []);
    suite.collect(DryRun::Off).await;
    suite.put_build(build, workload, None).await.expect("it is forgotten");
    suite.stop().await;
}

/// Returns all volumes that are not garbage.
async fn handles(suite: &Suite) -> Vec<String> {
    let live: BTreeSet<_> = [InventoryState::Creating, InventoryState::Created].into();
    let volumes = suite.volumes().await.into_iter();
    volumes.filter(|volume| live.contains(&volume.state())).map(|volume| volume.volume_handle).collect()
}
