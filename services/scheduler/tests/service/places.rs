//! Tests of `Placements.Place`: waiting requests, pins in the artifact store and affinity of
//! owners.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use domain::{ArtifactId, LeaseId, WorkerId};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::place_result::Result as Placed;
use rpc::{Reason, Refusal};
use scheduler::Config;
use sea_orm::{ConnectionTrait, Statement};
use testing::databases::TestDatabase;

use crate::explain::explain_spec;
use crate::leases::{grouped, place_many, refused, task, with_slots};
use crate::store::Place;
use crate::support::{Gateway, Running, config, finish, registration, spec, until, within};

pub(crate) fn waiting(request: pb::PlaceRequest) -> pb::PlaceRequest {
    pb::PlaceRequest { wait: Some(rpc::duration(Duration::from_secs(60))), ..request }
}

fn transfer() -> pb::PlaceRequest {
    pb::PlaceRequest { kind: pb::PlacementKind::Transfer.into(), ..task() }
}

fn of_owner(owner: &str) -> pb::PlaceRequest {
    pb::PlaceRequest { owner: owner.to_owned(), ..task() }
}

pub(crate) async fn place(
    scheduler: &Running,
    request: pb::PlaceRequest,
) -> Result<pb::PlaceResponse, Refusal> {
    let placed = within("an answer", scheduler.placements().place(request)).await;
    Ok(placed?.into_inner())
}

pub(crate) async fn release(scheduler: &Running, lease_token: &str) {
    let release = pb::ReleaseRequest { lease_token: lease_token.to_owned(), settlement: None };
    scheduler.placements().release(release).await.expect("released");
}

/// Waits until `count` requests wait that are comparable to a task.
pub(crate) async fn wait_for_waiting_requests(scheduler: &Running, count: u64) {
    until("the requests wait", async || {
        let subject = Some(pb::explain_request::Subject::Spec(spec()));
        let explained =
            scheduler.placements().explain(pb::ExplainRequest { subject, ..Default::default() }).await;
        (explained.expect("explained").into_inner().queue_position == count + 1).then_some(())
    })
    .await;
}

pub(crate) async fn waiting_lease_request_has_queue_position(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 1).await;
    let first = place(&scheduler, task()).await.expect("granted");
    let busy = refused(&scheduler, task()).await;
    assert!(busy.is(Reason::AllWorkersBusy), "a request without a wait fails immediately: {busy}");

    let second = task();
    let second = async || place(&scheduler, waiting(second.clone())).await.expect("granted");
    let then = async {
        wait_for_waiting_requests(&scheduler, 1).await;
        let workload = scheduler.submit(spec()).await.expect("accepted");
        wait_for_waiting_requests(&scheduler, 2).await;
        let urgent = waiting(pb::PlaceRequest { priority: 5, ..task() });
        let urgent = async || place(&scheduler, urgent.clone()).await.expect("granted");
        let then = async {
            wait_for_waiting_requests(&scheduler, 3).await;
            release(&scheduler, &first.lease_token).await;
        };
        let (urgent, ()) = futures::join!(urgent(), then);
        assert_eq!(scheduler.worker("one").await.active_tasks, 1, "the other requests still wait");
        release(&scheduler, &urgent.lease_token).await;
        workload
    };
    let (second, workload) = futures::join!(second(), then);
    assert_eq!(
        scheduler.get(workload).await.state(),
        pb::WorkloadState::Pending,
        "the workload was submitted later"
    );
    release(&scheduler, &second.lease_token).await;
    let (_, run) = gateway.run(workload).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    wait_for_empty_queue(&scheduler).await;
    scheduler.stop().await;
}

async fn wait_for_empty_queue(scheduler: &Running) {
    until("the queue is empty", async || {
        let subject = Some(pb::explain_request::Subject::Spec(spec()));
        let explained =
            scheduler.placements().explain(pb::ExplainRequest { subject, ..Default::default() }).await;
        (explained.expect("explained").into_inner().queue_position == 0).then_some(())
    })
    .await;
}

/// Sends a request and drops the call while the request waits.
async fn wait_and_drop_call(scheduler: &Running, request: pb::PlaceRequest) {
    tokio::select! {
        placed = place(scheduler, request) => panic!("the request does not wait: {placed:?}"),
        () = wait_for_waiting_requests(scheduler, 1) => {}
    }
}

pub(crate) async fn wait_ends_by_timeout_or_dropped_call(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 1).await;
    let held = place(&scheduler, task()).await.expect("granted");
    let brief = pb::PlaceRequest { wait: Some(rpc::duration(Duration::from_millis(50))), ..task() };
    let busy = place(&scheduler, brief).await.expect_err("no slot was released");
    assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
    assert_eq!(busy.about.get("one").map(String::as_str), Some("is full (1 of 1 tasks)"), "{busy:?}");

    let dropped = waiting(task());
    wait_and_drop_call(&scheduler, dropped.clone()).await;
    // A repeated call keeps the queue position of the first call. The request is queued once.
    let again = async || place(&scheduler, dropped.clone()).await;
    let then = async {
        wait_for_waiting_requests(&scheduler, 1).await;
        release(&scheduler, &held.lease_token).await;
    };
    let (granted, ()) = futures::join!(again(), then);
    let granted = granted.expect("granted");
    assert_eq!(place(&scheduler, dropped).await.expect("a repeat"), granted);
    wait_and_drop_call(&scheduler, waiting(task())).await;
    // The scheduler notices the dropped call without another request or release.
    wait_for_waiting_requests(&scheduler, 0).await;
    release(&scheduler, &granted.lease_token).await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 0, "no lease is granted to a dropped call");

    let never = pb::PlaceRequest { platform: "darwin".to_owned(), ..task() };
    let never = place(&scheduler, waiting(never)).await.expect_err("no worker could ever take the request");
    assert!(never.is(Reason::NoCompatibleWorker), "{never}");
    let long = pb::PlaceRequest { wait: Some(rpc::duration(Duration::from_secs(3601))), ..task() };
    let refusal = refused(&scheduler, long).await;
    assert!(refusal.is(Reason::InvalidField) && refusal.message.contains("wait"), "{refusal}");
    scheduler.stop().await;
}

/// A request ends before its deadline if no worker could ever take it.
pub(crate) async fn wait_ends_when_no_worker_is_compatible(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let registration = pb::Registration { capacity, ..registration("one") };
    let _gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
    place(&scheduler, task()).await.expect("granted");
    let workload = scheduler.submit(spec()).await.expect("queued");
    let alone =
        async || place(&scheduler, waiting(task())).await.expect_err("no worker could ever take the request");
    let check = pb::PlaceRequest { kind: pb::PlacementKind::Check.into(), ..task() };
    let group = grouped([waiting(check), waiting(task())], 1);
    let then = async {
        wait_for_waiting_requests(&scheduler, 3).await;
        // A worker with tags accepts only requests with tags.
        let labels = registration
            .labels
            .clone()
            .map(|labels| pb::WorkerLabels { tags: vec!["gpu".to_owned()], ..labels });
        Gateway::connect(&scheduler, pb::Registration { labels, ..registration.clone() })
            .await
            .expect("welcome")
    };
    let (alone, group, _gateway) = futures::join!(alone(), place_many(&scheduler, group), then);
    assert!(alone.is(Reason::NoCompatibleWorker), "{alone}");
    for result in group {
        let Placed::Failure(failure) = result else { panic!("{result:?}") };
        assert_eq!(failure.reason, Reason::NoCompatibleWorker.to_string());
    }
    // A workload that was accepted continues to wait for a compatible worker.
    assert_eq!(scheduler.get(workload).await.state(), pb::WorkloadState::Pending);
    scheduler.stop().await;
}

/// A waiting request of a stopped replica would otherwise block the queue.
pub(crate) async fn stopped_replica_leaves_no_waiting_request(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    let waiting_rows = async || {
        let sql = "SELECT replica FROM peer_waiters";
        let statement = Statement::from_string(connection.get_database_backend(), sql);
        connection.query_all_raw(statement).await.expect("read").len()
    };
    let _gateway = with_slots(&scheduler, "one", 1).await;
    place(&scheduler, task()).await.expect("granted");
    let mut placements = scheduler.placements();
    let mut stopped = pin!(async {
        until("the waiting call is stored", async || (waiting_rows().await == 1).then_some(())).await;
        scheduler.stop().await;
    });
    tokio::select! {
        () = &mut stopped => {}
        answer = placements.place(waiting(task())) => {
            answer.expect_err("no slot is free");
            stopped.await;
        }
    }
    assert_eq!(waiting_rows().await, 0);
}

pub(crate) async fn waiting_group_is_granted_as_a_whole(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    for _ in 0..10 {
        let held = [place(&scheduler, task()).await, place(&scheduler, task()).await];
        let group = async || {
            let both = grouped([waiting(task()), waiting(task())], 1);
            let results = place_many(&scheduler, both).await;
            let granted = crate::leases::granted(&results);
            assert_eq!(granted.len(), 2, "{results:?}");
            assert_eq!(scheduler.worker("one").await.active_tasks, 2);
            let lease_tokens = granted.into_iter().map(|placed| placed.lease_token).collect();
            let release = pb::ReleaseManyRequest { lease_tokens };
            scheduler.placements().release_many(release).await.expect("released");
        };
        let then = async {
            wait_for_waiting_requests(&scheduler, 2).await;
            // One slot is not enough for either group.
            for held in held {
                release(&scheduler, &held.expect("granted").lease_token).await;
            }
        };
        futures::join!(group(), group(), then);
    }
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);

    // Separate requests with one wait could hold leases without an answer, so they are rejected.
    let several = [grouped([waiting(task())], 1), grouped([task()], 2)].concat();
    let refused = scheduler.placements().place_many(pb::PlaceManyRequest { items: several }).await;
    let refused = Refusal::from(refused.expect_err("refused"));
    assert!(
        refused.is(Reason::InvalidField) && refused.message.contains("items[0].request.wait"),
        "{refused}"
    );
    scheduler.stop().await;
}

/// While a group waits, another request tries to use an id of the group.
pub(crate) async fn waiting_lease_id_cannot_be_reused(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    let held = [place(&scheduler, task()).await, place(&scheduler, task()).await];
    let (first, second) = (waiting(task()), waiting(task()));
    let group = async { place_many(&scheduler, grouped([first.clone(), second.clone()], 1)).await };
    let then = async {
        wait_for_waiting_requests(&scheduler, 1).await;
        for request in [first.clone(), pb::PlaceRequest { team: "other".to_owned(), ..second.clone() }] {
            let refused = refused(&scheduler, request).await;
            assert!(refused.is(Reason::LeaseExists), "{refused}");
        }
        // A workload may have the same id.
        let workload = first.lease_id.parse().expect("an id");
        scheduler.submit_as(workload, spec()).await.expect("queued");
        wait_for_waiting_requests(&scheduler, 2).await;
        // Both slots are released together. Otherwise the workload would take the first one.
        let lease_tokens = held.into_iter().map(|held| held.expect("granted").lease_token).collect();
        scheduler.placements().release_many(pb::ReleaseManyRequest { lease_tokens }).await.expect("released");
        workload
    };
    let (results, workload) = futures::join!(group, then);
    let granted = crate::leases::granted(&results);
    assert_eq!(granted.len(), 2, "{results:?}");
    release(&scheduler, &granted[0].lease_token).await;
    scheduler.wait_for(workload, pb::WorkloadState::Assigned).await;
    scheduler.stop().await;
}

/// Requests fail with UNAVAILABLE while the database is unavailable, regardless of the duration of
/// each read.
#[tokio::test(flavor = "multi_thread")]
async fn request_fails_while_database_is_unavailable() {
    let mut server = testing::databases::Server::new();
    let database = server.database();
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    place(&scheduler, task()).await.expect("granted");
    server.stop();
    for request in [task(), waiting(task()), task()] {
        let away = refused(&scheduler, request).await;
        assert!(away.is(Reason::Unavailable), "{away}");
    }
    server.start();
    until("the lease is granted", async || place(&scheduler, task()).await.ok()).await;
    scheduler.stop().await;
}

/// The slots are fewer than the requests of the call.
pub(crate) async fn requests_are_granted_by_priority_then_order(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 3).await;
    let items = [(0, 0), (0, 0), (50, 0), (0, 7), (100, 7), (0, 0)].map(|(priority, group)| {
        let request = Some(pb::PlaceRequest { priority, ..task() });
        pb::PlaceItem { request, group }
    });
    let results = place_many(&scheduler, items.into()).await;
    let granted = results.iter().map(|result| matches!(result, pb::place_result::Result::Placed(_)));
    assert_eq!(granted.collect::<Vec<_>>(), [false, false, true, true, true, false], "{results:?}");
    scheduler.stop().await;
}

/// One worker has room for the whole group. Another one has room for only part of it.
pub(crate) async fn owner_group_is_placed_on_one_worker(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let (_small, _large) =
        (with_slots(&scheduler, "small", 1).await, with_slots(&scheduler, "large", 3).await);
    for turn in 0..10 {
        let owner = format!("check {turn}");
        let results = place_many(&scheduler, grouped((0..3).map(|_| of_owner(&owner)), 1)).await;
        let granted = crate::leases::granted(&results);
        assert_eq!(granted.len(), 3, "{results:?}");
        assert!(granted.iter().all(|placed| placed.worker_name == "large"));
        let lease_tokens = granted.into_iter().map(|placed| placed.lease_token).collect();
        scheduler.placements().release_many(pb::ReleaseManyRequest { lease_tokens }).await.expect("released");
    }
    scheduler.stop().await;
}

/// The worker that has room for the first request can never take the second.
pub(crate) async fn owner_group_waits_for_fitting_worker(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let of_memory = |name: &str, memory_bytes: u64| {
        let mut registration = registration(name);
        registration.capacity = Some(pb::Capacity { max_tasks: 2, memory_bytes, ..pb::Capacity::default() });
        registration
    };
    let small = Gateway::connect(&scheduler, of_memory("small", 50)).await.expect("welcome");
    let large = Gateway::connect(&scheduler, of_memory("large", 100)).await.expect("welcome");
    let on_large = || pb::PlaceRequest { avoid_workers: vec![small.welcome.worker_id.clone()], ..task() };
    let held = [place(&scheduler, on_large()).await, place(&scheduler, on_large()).await];
    let requesting = |memory_bytes: u64| {
        let requests = Some(pb::ResourceRequests { memory_bytes, ..pb::ResourceRequests::default() });
        pb::PlaceRequest { requests, ..of_owner("check") }
    };
    let all_are = |results: &[Placed], reason: Reason| {
        results.iter().all(|result| match result {
            Placed::Placed(_) => false,
            Placed::Failure(failure) => failure.reason == reason.to_string(),
        })
    };
    let busy = place_many(&scheduler, grouped([requesting(10), requesting(80)], 1)).await;
    assert!(all_are(&busy, Reason::AllWorkersBusy), "{busy:?}");

    let group = async {
        place_many(&scheduler, grouped([waiting(requesting(10)), waiting(requesting(80))], 1)).await
    };
    let then = async {
        until("the group waits", async || {
            let demand = scheduler.placements().get_demand(pb::GetDemandRequest::default()).await;
            (demand.expect("a response").into_inner().waiting == 2).then_some(())
        })
        .await;
        for held in held {
            release(&scheduler, &held.expect("granted").lease_token).await;
        }
    };
    let (results, ()) = futures::join!(group, then);
    let granted = crate::leases::granted(&results);
    assert_eq!(granted.len(), 2, "{results:?}");
    assert!(granted.iter().all(|placed| placed.worker_id == large.welcome.worker_id));

    // A group that no worker could ever take is rejected with that reason, regardless of the
    // failing member.
    let never = place_many(&scheduler, grouped([requesting(80), requesting(101)], 1)).await;
    assert!(all_are(&never, Reason::NoCompatibleWorker), "{never:?}");
    scheduler.stop().await;
}

pub(crate) async fn leases_of_owner_share_worker(database: TestDatabase) {
    let config = Config {
        worker_ttl: Duration::from_millis(800),
        stop_after: Duration::from_millis(900),
        lost_after: Duration::from_millis(1600),
        ..config(&database)
    };
    let scheduler = Running::start(config).await;
    let mut gateways = Vec::new();
    for name in ["a", "b", "c"] {
        gateways.push(with_slots(&scheduler, name, 3).await);
    }
    let silent = Mutex::new(String::new());
    let report = async {
        loop {
            for (gateway, name) in gateways.iter().zip(["a", "b", "c"]) {
                if *silent.lock().expect("no panic") != name {
                    gateway.observe(&[]).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let test = async {
        // Affinity holds for concurrent requests, for groups, and after the release of all leases.
        let answers = futures::future::join_all((0..2).map(|_| place(&scheduler, of_owner("check 1")))).await;
        let granted = answers.into_iter().map(|placed| placed.expect("granted")).collect::<Vec<_>>();
        let workers: BTreeSet<_> = granted.iter().map(|placed| placed.worker_name.clone()).collect();
        assert_eq!(workers.len(), 1, "{workers:?}");
        let home = granted[0].worker_name.clone();
        for placed in &granted {
            release(&scheduler, &placed.lease_token).await;
        }
        for _ in 0..3 {
            assert_eq!(place(&scheduler, of_owner("check 1")).await.expect("granted").worker_name, home);
        }
        let full = refused(&scheduler, of_owner("check 1")).await;
        assert!(full.is(Reason::AllWorkersBusy), "the owner cannot use other workers: {full}");
        let others = pb::PlaceRequest { team: "other".to_owned(), ..of_owner("check 1") };
        assert_ne!(
            place(&scheduler, others).await.expect("granted").worker_name,
            home,
            "owners of another team are independent"
        );
        let both = grouped([of_owner("check 2"), of_owner("check 2")], 1);
        let both = crate::leases::granted(&place_many(&scheduler, both).await);
        assert_eq!(both.len(), 2);
        assert_eq!(both[0].worker_name, both[1].worker_name);
        let near = pb::PlaceRequest { same_worker_as_lease_id: LeaseId::new().to_string(), ..of_owner("x") };
        assert!(refused(&scheduler, near).await.is(Reason::InvalidField));

        // While the worker is silent, requests of the owner wait. After the loss of the worker, all
        // of them move to one other worker.
        silent.lock().expect("no panic").clone_from(&home);
        let next = until("the worker is lost", async || match place(&scheduler, of_owner("check 1")).await {
            Ok(placed) => Some(placed.worker_name),
            Err(busy) => {
                assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
                None
            }
        })
        .await;
        assert_ne!(next, home);
        assert_eq!(scheduler.worker(&home).await.state(), pb::WorkerState::Lost);
        assert_eq!(place(&scheduler, of_owner("check 1")).await.expect("granted").worker_name, next);
        let land = pb::CordonWorkerRequest { worker: next.clone(), ..Default::default() };
        scheduler.workers().cordon_worker(land).await.expect("the worker is cordoned");
        let last = place(&scheduler, of_owner("check 1")).await.expect("granted").worker_name;
        assert!(last != home && last != next, "{last}");
    };
    tokio::select! {
        () = test => {}
        () = report => unreachable!("an endless loop"),
    }
    scheduler.stop().await;
}

/// Each replica decides independently. The first grant counts for both.
#[tokio::test(flavor = "multi_thread")]
async fn owner_has_one_worker_across_replicas() {
    let database = testing::databases::postgres().await;
    let (one, other) = (Running::start(config(&database)).await, Running::start(config(&database)).await);
    let mut gateways = Vec::new();
    for name in ["a", "b", "c", "d"] {
        gateways.push(with_slots(&one, name, 100).await);
    }
    until("the other replica knows the workers", async || {
        let subject = Some(pb::explain_request::Subject::Spec(spec()));
        let explained = other
            .placements()
            .explain(pb::ExplainRequest { subject, ..Default::default() })
            .await
            .expect("explained");
        (explained.into_inner().workers.len() == 4).then_some(())
    })
    .await;
    for turn in 0..30 {
        let owner = format!("check {turn}");
        let (here, there) = futures::join!(place(&one, of_owner(&owner)), place(&other, of_owner(&owner)));
        let (here, there) = (here.expect("granted"), there.expect("granted"));
        assert_eq!(here.worker_name, there.worker_name);
    }
    one.stop().await;
    other.stop().await;
}

pub(crate) async fn lease_pins_artifacts_until_it_ends(database: TestDatabase) {
    let bytes = Place::new();
    let store = bytes.start().await;
    let term = Duration::from_millis(200);
    let scheduler = Running::start(Config { lease_term: term, ..bytes.config(&database) }).await;
    let (one, other) = (with_slots(&scheduler, "one", 9).await, with_slots(&scheduler, "other", 9).await);
    let holder = |gateway: &Gateway| gateway.welcome.worker_id.parse::<WorkerId>().expect("an id");
    for (gateway, name) in [(&one, "one"), (&other, "other")] {
        let artifact = until("the store answers", async || bytes.upload_to(holder(gateway)).await.ok()).await;
        let using = || pb::PlaceRequest { artifact_ids: vec![artifact.to_string()], ..task() };
        let near = place(&scheduler, using()).await.expect("granted");
        assert_eq!(near.worker_name, name, "the artifact is already on the worker");
        let expected = [format!("pinned by {}", lease_of(&scheduler, &near).await)];
        assert_eq!(bytes.kept_by(artifact).await, expected);
        release(&scheduler, &near.lease_token).await;
        until("the pin is released", async || {
            (!bytes.kept_by(artifact).await.contains(&expected[0])).then_some(())
        })
        .await;

        // An expired lease also releases its pins.
        let brief = using();
        place(&scheduler, brief.clone()).await.expect("granted");
        until("the pin is released", async || {
            let pinned = format!("pinned by {}", brief.lease_id);
            (!bytes.kept_by(artifact).await.contains(&pinned)).then_some(())
        })
        .await;

        // A group with one unavailable artifact pins nothing.
        let unknown = ArtifactId::new();
        let lost = pb::PlaceRequest { artifact_ids: vec![unknown.to_string()], ..task() };
        let results = place_many(&scheduler, grouped([using(), lost.clone()], 3)).await;
        assert!(crate::leases::granted(&results).is_empty(), "{results:?}");
        let refusal = refused(&scheduler, lost).await;
        assert!(refusal.is(Reason::InputUnavailable), "{refusal}");
        assert_eq!(refusal.about.get("artifact_id"), Some(&unknown.to_string()));
    }
    until("every slot is free", async || {
        let taken = scheduler.worker("one").await.active_tasks + scheduler.worker("other").await.active_tasks;
        (taken == 0).then_some(())
    })
    .await;
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn artifacts_of_many_leases_are_checked(database: TestDatabase) {
    let bytes = Place::new();
    let store = bytes.start().await;
    let scheduler = Running::start(bytes.config(&database)).await;
    let gateway = with_slots(&scheduler, "one", 1).await;
    let worker = gateway.welcome.worker_id.parse::<WorkerId>().expect("an id");
    let artifact = until("the store answers", async || bytes.upload_to(worker).await.ok()).await;
    let is_there = |number: usize| number % 3 != 1;
    let using = (0..40).map(|number| {
        let artifact = if is_there(number) { artifact } else { ArtifactId::new() };
        pb::PlaceRequest { artifact_ids: vec![artifact.to_string()], ..transfer() }
    });
    let results = place_many(&scheduler, grouped(using, 0)).await;
    for (number, result) in results.iter().enumerate() {
        match result {
            Placed::Placed(_) => assert!(is_there(number), "{number}"),
            Placed::Failure(failure) => {
                assert!(!is_there(number), "{number}: {failure:?}");
                assert_eq!(failure.reason, Reason::InputUnavailable.to_string());
            }
        }
    }
    assert_eq!(results.len(), 40);
    scheduler.stop().await;
    store.stop().await;
}

async fn lease_of(scheduler: &Running, placed: &pb::PlaceResponse) -> LeaseId {
    let keys = rpc::token::Keys::new(scheduler.peer());
    keys.verify::<domain::worker::LeaseClaims>(&placed.lease_token)
        .await
        .expect("a token of this cluster")
        .lease
}

/// Pins of leases that end while the store is unavailable are released later. A live lease keeps
/// its pins.
pub(crate) async fn pins_of_ended_leases_are_released_after_outage(database: TestDatabase) {
    let bytes = Place::new();
    let store = bytes.start().await;
    let frequently = Config {
        reconcile_every: Duration::from_millis(20),
        reconcile_grace: Duration::ZERO,
        ..bytes.config(&database)
    };
    let scheduler = Running::start(frequently).await;
    let _gateway = with_slots(&scheduler, "one", 9).await;
    let worker = Gateway::connect(&scheduler, registration("two")).await.expect("welcome");
    let worker = worker.welcome.worker_id.parse::<WorkerId>().expect("an id");
    let artifact = until("the store answers", async || bytes.upload_to(worker).await.ok()).await;
    let using = || pb::PlaceRequest { artifact_ids: vec![artifact.to_string()], ..task() };
    let live = place(&scheduler, using()).await.expect("granted");
    let ended = place(&scheduler, using()).await.expect("granted");
    store.stop().await;
    bytes.remove_socket();
    release(&scheduler, &ended.lease_token).await;
    let store = bytes.start().await;
    let kept = [format!("pinned by {}", lease_of(&scheduler, &live).await)];
    until("one pin is left", async || (bytes.kept_by(artifact).await == kept).then_some(())).await;
    // Another pin is settled, which proves that the live lease was also checked.
    let unknown = domain::WorkloadId::new();
    bytes.pin(artifact, unknown).await.expect("pinned");
    until("the pin is settled", async || bytes.pin(artifact, unknown).await.err()).await;
    assert_eq!(bytes.kept_by(artifact).await, kept);
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn request_waits_for_worker_that_it_names(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _one = with_slots(&scheduler, "one", 4).await;
    let mut other = with_slots(&scheduler, "other", 1).await;
    let on = |worker: &str| pb::PlaceRequest { worker: worker.to_owned(), ..task() };

    let granted = place(&scheduler, on("other")).await.expect("granted");
    assert_eq!(granted.worker_name, "other");
    let busy = refused(&scheduler, on(&granted.worker_id)).await;
    assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
    assert_eq!(busy.about["one"], "the request names another worker");
    assert_eq!(busy.about["other"], "is full (1 of 1 tasks)");
    let unknown = refused(&scheduler, on("unknown")).await;
    assert!(unknown.is(Reason::WorkerNotFound), "{unknown}");
    assert_eq!(unknown.about["worker"], "unknown");
    let unable = refused(&scheduler, pb::PlaceRequest { platform: "darwin".to_owned(), ..on("other") }).await;
    assert!(unable.is(Reason::NoCompatibleWorker), "{unable}");
    assert_eq!(unable.about["other"], "its platform is linux");

    let named = |worker: &str| pb::WorkloadSpec { worker: worker.to_owned(), ..spec() };
    let unknown = scheduler.submit(named("unknown")).await.expect_err("unknown");
    assert!(unknown.is(Reason::WorkerNotFound), "{unknown}");
    let explained = explain_spec(&scheduler, named("other")).await;
    assert_eq!(explained.verdict(), pb::Verdict::NotNow);
    assert_eq!(explained.unblocked_by, ["other: one of its tasks ends"]);
    let reasons = explained.workers.iter().map(|worker| worker.refusals[0].reason.as_str());
    assert_eq!(reasons.collect::<Vec<_>>(), ["FULL", "NOT_NAMED"]);
    let mut ids = Vec::new();
    for worker in ["other", &granted.worker_id] {
        ids.push(scheduler.submit(named(worker)).await.expect("accepted"));
    }
    let waiting = scheduler.get(ids[0]).await;
    assert_eq!(waiting.state(), pb::WorkloadState::Pending);
    for id in &ids {
        let shown = scheduler.get(*id).await.spec.expect("a spec");
        assert_eq!(shown.worker, "other", "the name of the worker");
    }
    scheduler.submit_as(ids[0], named("other")).await.expect("a repeat");
    release(&scheduler, &granted.lease_token).await;
    for id in ids {
        let (_, run) = other.run(id).await;
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    }
    scheduler.stop().await;
}
