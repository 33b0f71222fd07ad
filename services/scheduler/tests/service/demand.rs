//! Tests of `Placements.GetDemand`.

use std::collections::HashMap;

use domain::{LeaseId, WorkloadId};
use rpc::Reason;
use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use super::leases::of_kind;
use super::store::Place;
use super::support::{Gateway, Running, config, finish, registration, spec, start, until};

pub(crate) async fn demand(scheduler: &Running) -> pb::GetDemandResponse {
    let request = pb::GetDemandRequest::default();
    scheduler.placements().get_demand(request).await.expect("a response").into_inner()
}

pub(crate) async fn large_shapes_are_omitted(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    for number in 0..100 {
        let tags = (0..120).map(|tag| format!("{number}-{tag}-{}", "x".repeat(100))).collect();
        scheduler.submit(pb::WorkloadSpec { tags, ..spec() }).await.expect("accepted");
    }
    let answer = demand(&scheduler).await;
    assert_eq!(answer.waiting, 100);
    assert!((1..100).contains(&answer.demand.len()), "{}", answer.demand.len());
    assert!(rpc::Message::encoded_len(&answer) < 4 << 20, "the response fits in one message");
    scheduler.stop().await;
}

pub(crate) async fn demand_reports_queue_and_workers(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    assert_eq!(demand(&scheduler).await, pb::GetDemandResponse::default());

    let tagged = |tag: &str| pb::WorkloadSpec { tags: vec![tag.to_owned()], ..spec() };
    let early = scheduler.submit(tagged("gpu")).await.expect("accepted without workers");
    let answer = demand(&scheduler).await;
    assert_eq!((answer.waiting, answer.waiting_unplaceable), (1, 0));
    assert_eq!(answer.demand[0].waits_for, "NO_WORKER");

    let mut one = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let two = pb::Registration {
        capacity: Some(pb::Capacity { max_tasks: 0, disk_bytes: 1 << 30, ..Default::default() }),
        labels: Some(pb::WorkerLabels {
            tags: vec!["arm".to_owned()],
            ..registration("two").labels.expect("labels")
        }),
        ..registration("two")
    };
    let two = Gateway::connect(&scheduler, two).await.expect("welcome");
    two.observe(&[]).await;
    let mut runs = Vec::new();
    for _ in 0..2 {
        runs.push(scheduler.submit(spec()).await.expect("placed"));
    }
    let requests = pb::ResourceRequests { memory_bytes: 7, ..Default::default() };
    for _ in 0..3 {
        let waiting = pb::WorkloadSpec { requests: Some(requests), ..spec() };
        scheduler.submit(waiting).await.expect("accepted");
    }
    let answer = demand(&scheduler).await;
    assert_eq!((answer.waiting, answer.waiting_unplaceable), (4, 1));
    let [full, none] = answer.demand.as_slice() else { panic!("{answer:?}") };
    assert_eq!((full.count, full.count_unplaceable, full.waits_for.as_str()), (3, 0, "FULL"));
    assert_eq!(full.requests, Some(requests));
    assert_eq!(full.process.as_ref().map(|process| process.image_kind.as_str()), Some("host"));
    assert_eq!((full.team.as_str(), full.team_workers()), ("main", pb::TeamWorkers::Any));
    assert!(full.never_for.is_empty());
    assert_eq!((none.count, none.count_unplaceable, none.waits_for.as_str()), (1, 1, "NEVER"));
    assert_eq!(none.tags, ["gpu"]);
    assert_eq!(none.never_for, ["one: lacks the tag gpu", "two: lacks the tag gpu"]);
    assert_eq!(answer.oldest_since, none.oldest_since);
    assert_eq!(none.oldest_since, scheduler.get(early).await.submitted_at);

    // Rejected requests are also reported until a worker registers that could take them.
    assert_eq!(answer.refused, []);
    for _ in 0..2 {
        scheduler.submit(tagged("fpga")).await.expect_err("no worker has the tag");
    }
    let process = pb::ProcessRequirements {
        capabilities: vec!["network-private".to_owned()],
        ..pb::ProcessRequirements::default()
    };
    let (tags, process) = (vec!["fpga".to_owned()], Some(process));
    let request = pb::PlaceRequest { tags, process, ..of_kind(pb::PlacementKind::Task) };
    scheduler.placements().place(request).await.expect_err("no worker has the tag");
    let later = demand(&scheduler).await;
    assert_eq!((later.waiting, later.waiting_unplaceable), (4, 1));
    let [refused] = later.refused.as_slice() else { panic!("{later:?}") };
    assert_eq!((refused.count, refused.count_unplaceable, refused.waits_for.as_str()), (3, 3, "NEVER"));
    assert_eq!(refused.tags, ["fpga"]);
    assert_eq!(refused.never_for, ["one: lacks the tag fpga", "two: lacks the tag fpga"]);

    let [arm, plain] = answer.supply.as_slice() else { panic!("{answer:?}") };
    let (arm, plain) = if arm.tags.is_empty() { (plain, arm) } else { (arm, plain) };
    assert_eq!((arm.workers, arm.workers_in_service, arm.workers_idle), (1, 1, 1));
    assert_eq!((arm.slots_free, arm.workers_without_limit), (0, 1));
    assert_eq!((plain.workers, plain.workers_idle, plain.slots_in_use, plain.slots_free), (1, 0, 2, 0));

    let names = |answer: &pb::GetDemandResponse| {
        answer.removable.iter().map(|worker| worker.worker_name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&answer), ["two", "one"]);
    assert!(
        answer.removable[0].idle_since.is_some() && answer.removable[1].idle_since.is_none(),
        "{answer:?}"
    );
    assert_eq!(answer.removable[1].leases, 2);
    assert_eq!(answer.removable[0].would_lose(), pb::WouldLose::Unspecified);

    // A transfer uses no slot but still prevents the removal of its worker.
    let lease = pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Transfer.into(),
        tags: vec!["arm".to_owned()],
        ..Default::default()
    };
    scheduler.placements().place(lease).await.expect("placed");
    assert_eq!(demand(&scheduler).await.removable[0].leases, 1);

    // A cordoned worker is no longer reported as removable. Its shape remains in the supply.
    let request = pb::CordonWorkerRequest { worker: "two".to_owned(), interrupt_after: None };
    scheduler.workers().cordon_worker(request).await.expect("cordoned");
    let answer = until("the worker is cordoned", async || {
        Some(demand(&scheduler).await).filter(|answer| names(answer) == ["one"])
    })
    .await;
    let arm =
        answer.supply.iter().find(|shape| !shape.tags.is_empty()).expect("the shape of the cordoned worker");
    assert_eq!((arm.workers, arm.workers_in_service), (1, 0));
    for id in runs {
        let (_, run) = one.run(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    }
    let answer = until("two requests wait", async || {
        Some(demand(&scheduler).await).filter(|answer| answer.waiting == 2)
    })
    .await;
    assert_eq!(answer.demand.iter().map(|shape| shape.count).collect::<Vec<_>>(), [1, 1]);

    for request in [
        pb::GetDemandRequest { max_shapes: 1001, ..Default::default() },
        pb::GetDemandRequest { max_removable: 1001, ..Default::default() },
        pb::GetDemandRequest { replica_check: 77, ..Default::default() },
    ] {
        let status = scheduler.placements().get_demand(request).await.expect_err("refused");
        assert!(rpc::Refusal::from(status).is(Reason::InvalidField), "{request:?}");
    }
    scheduler.stop().await;
}

pub(crate) async fn demand_reports_replicas_lost_with_worker(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let holder = Gateway::connect(&scheduler, registration("holder")).await.expect("welcome");
    let other = Gateway::connect(&scheduler, registration("other")).await.expect("welcome");
    holder.observe(&[]).await;
    other.observe(&[]).await;
    let worker = holder.welcome.worker_id.parse().expect("an id");
    let artifact = place.upload_to(worker).await.expect("uploaded");
    place.pin(artifact, WorkloadId::new()).await.expect("pinned");
    let would_lose = async |check: pb::ReplicaCheck| {
        let request = pb::GetDemandRequest { replica_check: check.into(), ..Default::default() };
        let answer = scheduler.placements().get_demand(request).await.expect("a response").into_inner();
        let of = |worker: &pb::RemovableWorker| (worker.worker_name.clone(), worker.would_lose());
        answer.removable.iter().map(of).collect::<HashMap<_, _>>()
    };
    let expected =
        |holder, other| HashMap::from([("holder".to_owned(), holder), ("other".to_owned(), other)]);
    use pb::WouldLose::{Nothing, Something, Unspecified};
    assert_eq!(would_lose(pb::ReplicaCheck::None).await, expected(Unspecified, Unspecified));
    assert_eq!(would_lose(pb::ReplicaCheck::Each).await, expected(Something, Nothing));
    // Except for the replica, the other worker would be more costly to remove.
    let transfer = pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Transfer.into(),
        avoid_workers: vec![holder.welcome.worker_id.clone()],
        ..Default::default()
    };
    scheduler.placements().place(transfer).await.expect("placed");
    let safest = async |check: pb::ReplicaCheck| {
        let request =
            pb::GetDemandRequest { replica_check: check.into(), max_removable: 1, ..Default::default() };
        let answer = scheduler.placements().get_demand(request).await.expect("a response").into_inner();
        answer.removable.into_iter().map(|worker| worker.worker_name).collect::<Vec<_>>()
    };
    assert_eq!(safest(pb::ReplicaCheck::None).await, ["holder"]);
    assert_eq!(safest(pb::ReplicaCheck::Each).await, ["other"]);
    // If the artifact store does not answer, the scheduler reports what it knows without the store.
    store.stop().await;
    assert_eq!(would_lose(pb::ReplicaCheck::Each).await, expected(Unspecified, Unspecified));
    scheduler.stop().await;
}
