//! `Placements.Place` in full: who waits for a worker, what a lease holds in the artifact store, and where the containers of an owner are.

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

use crate::leases::{grouped, place_many, refused, task, with_slots};
use crate::store::Place;
use crate::support::{Gateway, Running, config, finish, hello, spec, until, within};

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
    let placed = within("it is decided", scheduler.placements().place(request)).await;
    Ok(placed?.into_inner())
}

pub(crate) async fn release(scheduler: &Running, lease_token: &str) {
    let release = pb::ReleaseRequest { lease_token: lease_token.to_owned() };
    scheduler.placements().release(release).await.expect("released");
}

/// So many wait for something like a task.
pub(crate) async fn so_many_wait(scheduler: &Running, count: u64) {
    until("they wait", async || {
        let subject = Some(pb::explain_request::Subject::Spec(spec()));
        let explained =
            scheduler.placements().explain(pb::ExplainRequest { subject, ..Default::default() }).await;
        (explained.expect("explained").into_inner().queue_position == count + 1).then_some(())
    })
    .await;
}

pub(crate) async fn who_waits_for_a_lease_has_a_place_in_the_queue(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 1).await;
    let first = place(&scheduler, task()).await.expect("granted");
    let busy = refused(&scheduler, task()).await;
    assert!(busy.is(Reason::AllWorkersBusy), "who does not wait hears at once: {busy}");

    let second = task();
    let second = async || place(&scheduler, waiting(second.clone())).await.expect("granted");
    let then = async {
        so_many_wait(&scheduler, 1).await;
        let workload = scheduler.submit(spec()).await.expect("accepted");
        so_many_wait(&scheduler, 2).await;
        let urgent = waiting(pb::PlaceRequest { priority: 5, ..task() });
        let urgent = async || place(&scheduler, urgent.clone()).await.expect("granted");
        let then = async {
            so_many_wait(&scheduler, 3).await;
            release(&scheduler, &first.lease_token).await;
        };
        let (urgent, ()) = futures::join!(urgent(), then);
        assert_eq!(scheduler.worker("one").await.active_tasks, 1, "the others wait still");
        release(&scheduler, &urgent.lease_token).await;
        workload
    };
    let (second, workload) = futures::join!(second(), then);
    assert_eq!(scheduler.get(workload).await.state(), pb::WorkloadState::Pending, "it came later");
    release(&scheduler, &second.lease_token).await;
    let (_, run) = gateway.run(workload).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    so_many_wait_no_more(&scheduler).await;
    scheduler.stop().await;
}

async fn so_many_wait_no_more(scheduler: &Running) {
    until("nobody waits", async || {
        let subject = Some(pb::explain_request::Subject::Spec(spec()));
        let explained =
            scheduler.placements().explain(pb::ExplainRequest { subject, ..Default::default() }).await;
        (explained.expect("explained").into_inner().queue_position == 0).then_some(())
    })
    .await;
}

/// Its caller goes away once it waits.
async fn waits_and_goes_away(scheduler: &Running, request: pb::PlaceRequest) {
    tokio::select! {
        placed = place(scheduler, request) => panic!("it does not wait: {placed:?}"),
        () = so_many_wait(scheduler, 1) => {}
    }
}

pub(crate) async fn who_has_waited_long_enough_or_has_gone_waits_no_more(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 1).await;
    let held = place(&scheduler, task()).await.expect("granted");
    let brief = pb::PlaceRequest { wait: Some(rpc::duration(Duration::from_millis(50))), ..task() };
    let busy = place(&scheduler, brief).await.expect_err("nobody made room");
    assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
    assert_eq!(busy.about.get("one").map(String::as_str), Some("is full (1 of 1 tasks)"), "{busy:?}");

    let impatient = waiting(task());
    waits_and_goes_away(&scheduler, impatient.clone()).await;
    // Whoever comes again has the place of the first call, and there is only one of it.
    let again = async || place(&scheduler, impatient.clone()).await;
    let then = async {
        so_many_wait(&scheduler, 1).await;
        release(&scheduler, &held.lease_token).await;
    };
    let (granted, ()) = futures::join!(again(), then);
    let granted = granted.expect("granted");
    assert_eq!(place(&scheduler, impatient).await.expect("a repeat"), granted);
    waits_and_goes_away(&scheduler, waiting(task())).await;
    // Nobody has to ask again, nor to make room, for that to be seen.
    so_many_wait(&scheduler, 0).await;
    release(&scheduler, &granted.lease_token).await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 0, "nothing is granted to who has gone");

    let never = pb::PlaceRequest { platform: "darwin".to_owned(), ..task() };
    let never = place(&scheduler, waiting(never)).await.expect_err("waiting does not help");
    assert!(never.is(Reason::NoCompatibleWorker), "{never}");
    let long = pb::PlaceRequest { wait: Some(rpc::duration(Duration::from_secs(3601))), ..task() };
    let refusal = refused(&scheduler, long).await;
    assert!(refusal.is(Reason::InvalidField) && refusal.message.contains("wait"), "{refusal}");
    scheduler.stop().await;
}

/// Nobody could take it any more: it hears so long before its time is over.
pub(crate) async fn who_waits_in_vain_hears_so(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let hello = pb::Hello { capacity, ..hello("one") };
    let _gateway = Gateway::connect(&scheduler, hello.clone()).await.expect("welcome");
    place(&scheduler, task()).await.expect("granted");
    let workload = scheduler.submit(spec()).await.expect("queued");
    let alone = async || place(&scheduler, waiting(task())).await.expect_err("nobody could");
    let check = pb::PlaceRequest { kind: pb::PlacementKind::Check.into(), ..task() };
    let group = grouped([waiting(check), waiting(task())], 1);
    let then = async {
        so_many_wait(&scheduler, 3).await;
        // With tags it takes only what asks for them.
        let labels =
            hello.labels.clone().map(|labels| pb::WorkerLabels { tags: vec!["gpu".to_owned()], ..labels });
        Gateway::connect(&scheduler, pb::Hello { labels, ..hello.clone() }).await.expect("welcome")
    };
    let (alone, group, _gateway) = futures::join!(alone(), place_many(&scheduler, group), then);
    assert!(alone.is(Reason::NoCompatibleWorker), "{alone}");
    for result in group {
        let Placed::Failure(failure) = result else { panic!("{result:?}") };
        assert_eq!(failure.reason, Reason::NoCompatibleWorker.to_string());
    }
    // A workload was accepted when somebody could, and waits for somebody like that.
    assert_eq!(scheduler.get(workload).await.state(), pb::WorkloadState::Pending);
    scheduler.stop().await;
}

/// Else what comes free elsewhere would be left to him.
pub(crate) async fn who_waited_at_a_replica_that_is_stopped_is_behind_nothing(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    let told = async || {
        let sql = "SELECT replica FROM peer_waiters";
        let statement = Statement::from_string(connection.get_database_backend(), sql);
        connection.query_all_raw(statement).await.expect("read").len()
    };
    let _gateway = with_slots(&scheduler, "one", 1).await;
    place(&scheduler, task()).await.expect("granted");
    let mut placements = scheduler.placements();
    let mut stopped = pin!(async {
        until("others are told of the call", async || (told().await == 1).then_some(())).await;
        scheduler.stop().await;
    });
    tokio::select! {
        () = &mut stopped => {}
        answer = placements.place(waiting(task())) => {
            answer.expect_err("there is no room");
            stopped.await;
        }
    }
    assert_eq!(told().await, 0);
}

pub(crate) async fn groups_that_wait_get_all_at_once(database: TestDatabase) {
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
            so_many_wait(&scheduler, 2).await;
            // One slot is not enough for any of them.
            for held in held {
                release(&scheduler, &held.expect("granted").lease_token).await;
            }
        };
        futures::join!(group(), group(), then);
    }
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);

    // Who waits for one of several would hold leases of which nobody hears.
    let several = [grouped([waiting(task())], 1), grouped([task()], 2)].concat();
    let refused = scheduler.placements().place_many(pb::PlaceManyRequest { items: several }).await;
    let refused = Refusal::from(refused.expect_err("refused"));
    assert!(
        refused.is(Reason::InvalidField) && refused.message.contains("items[0].request.wait"),
        "{refused}"
    );
    scheduler.stop().await;
}

/// A lease of a group that waits is granted to somebody else meanwhile, or asked for otherwise.
pub(crate) async fn an_id_that_waits_is_nobody_elses(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    let held = [place(&scheduler, task()).await, place(&scheduler, task()).await];
    let (first, second) = (waiting(task()), waiting(task()));
    let group = async { place_many(&scheduler, grouped([first.clone(), second.clone()], 1)).await };
    let then = async {
        so_many_wait(&scheduler, 1).await;
        for asked in [first.clone(), pb::PlaceRequest { team: "other".to_owned(), ..second.clone() }] {
            let refused = refused(&scheduler, asked).await;
            assert!(refused.is(Reason::LeaseExists), "{refused}");
        }
        // A workload of that id is another thing.
        let workload = first.lease_id.parse().expect("an id");
        scheduler.submit_as(workload, spec()).await.expect("queued");
        so_many_wait(&scheduler, 2).await;
        // Both at once, or the workload would take the first.
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

/// Whoever asks while the database is away hears that, however long each look at it takes.
#[tokio::test(flavor = "multi_thread")]
async fn who_asks_while_the_database_is_away_hears_so() {
    let mut server = testing::databases::Server::new();
    let database = server.database();
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    place(&scheduler, task()).await.expect("granted");
    server.stop();
    for asked in [task(), waiting(task()), task()] {
        let away = refused(&scheduler, asked).await;
        assert!(away.is(Reason::Unavailable), "{away}");
    }
    server.start();
    until("it is granted", async || place(&scheduler, task()).await.ok()).await;
    scheduler.stop().await;
}

/// There is room for fewer than are asked for with one call.
pub(crate) async fn of_many_the_higher_priority_is_granted_and_then_the_first(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 3).await;
    let asked = [(0, 0), (0, 0), (50, 0), (0, 7), (100, 7), (0, 0)].map(|(priority, group)| {
        let request = Some(pb::PlaceRequest { priority, ..task() });
        pb::PlaceItem { request, group }
    });
    let results = place_many(&scheduler, asked.into()).await;
    let granted = results.iter().map(|result| matches!(result, pb::place_result::Result::Placed(_)));
    assert_eq!(granted.collect::<Vec<_>>(), [false, false, true, true, true, false], "{results:?}");
    scheduler.stop().await;
}

/// There is room for all of it on one worker, and for some of it on another.
pub(crate) async fn a_group_of_one_owner_goes_where_there_is_room_for_all(database: TestDatabase) {
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

/// Where there is room for the first of them, there never is for the second.
pub(crate) async fn a_group_of_one_owner_waits_for_the_worker_that_can_have_all(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let of_memory = |name: &str, memory_bytes: u64| {
        let mut hello = hello(name);
        hello.capacity = Some(pb::Capacity { max_tasks: 2, memory_bytes, ..pb::Capacity::default() });
        hello
    };
    let small = Gateway::connect(&scheduler, of_memory("small", 50)).await.expect("welcome");
    let large = Gateway::connect(&scheduler, of_memory("large", 100)).await.expect("welcome");
    let on_large = || pb::PlaceRequest { avoid_workers: vec![small.welcome.worker_id.clone()], ..task() };
    let held = [place(&scheduler, on_large()).await, place(&scheduler, on_large()).await];
    let asking = |memory_bytes: u64| {
        let requests = Some(pb::ResourceRequests { memory_bytes, ..pb::ResourceRequests::default() });
        pb::PlaceRequest { requests, ..of_owner("check") }
    };
    let all_are = |results: &[Placed], reason: Reason| {
        results.iter().all(|result| match result {
            Placed::Placed(_) => false,
            Placed::Failure(failure) => failure.reason == reason.to_string(),
        })
    };
    let busy = place_many(&scheduler, grouped([asking(10), asking(80)], 1)).await;
    assert!(all_are(&busy, Reason::AllWorkersBusy), "{busy:?}");

    let group =
        async { place_many(&scheduler, grouped([waiting(asking(10)), waiting(asking(80))], 1)).await };
    let then = async {
        until("it waits", async || {
            let demand = scheduler.placements().get_demand(pb::GetDemandRequest::default()).await;
            (demand.expect("told").into_inner().waiting == 2).then_some(())
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

    // What nobody could ever have is refused as such, whichever of them finds nothing first.
    let never = place_many(&scheduler, grouped([asking(80), asking(101)], 1)).await;
    assert!(all_are(&never, Reason::NoCompatibleWorker), "{never:?}");
    scheduler.stop().await;
}

pub(crate) async fn the_containers_of_an_owner_keep_to_their_worker(database: TestDatabase) {
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
    let attend = async {
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
        // However many ask at once, together or apart, and after all of them were given back.
        let asked = futures::future::join_all((0..2).map(|_| place(&scheduler, of_owner("check 1")))).await;
        let granted = asked.into_iter().map(|placed| placed.expect("granted")).collect::<Vec<_>>();
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
        assert!(full.is(Reason::AllWorkersBusy), "others have room: {full}");
        let others = pb::PlaceRequest { team: "other".to_owned(), ..of_owner("check 1") };
        assert_ne!(place(&scheduler, others).await.expect("granted").worker_name, home, "another team's");
        let both = grouped([of_owner("check 2"), of_owner("check 2")], 1);
        let both = crate::leases::granted(&place_many(&scheduler, both).await);
        assert_eq!(both.len(), 2);
        assert_eq!(both[0].worker_name, both[1].worker_name);
        let near = pb::PlaceRequest { same_worker_as: LeaseId::new().to_string(), ..of_owner("x") };
        assert!(refused(&scheduler, near).await.is(Reason::InvalidField));

        // Once its worker is lost, they go elsewhere, all to the same one; and while it is only silent, nowhere.
        silent.lock().expect("no panic").clone_from(&home);
        let next = until("it is lost", async || match place(&scheduler, of_owner("check 1")).await {
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
        scheduler.workers().cordon_worker(land).await.expect("it lands");
        let last = place(&scheduler, of_owner("check 1")).await.expect("granted").worker_name;
        assert!(last != home && last != next, "{last}");
    };
    tokio::select! {
        () = test => {}
        () = attend => unreachable!("it goes on for ever"),
    }
    scheduler.stop().await;
}

/// Each replica decides without the other; the first grant counts for both.
#[tokio::test(flavor = "multi_thread")]
async fn an_owner_has_one_worker_whichever_replica_is_asked() {
    let database = testing::databases::postgres().await;
    let (one, other) = (Running::start(config(&database)).await, Running::start(config(&database)).await);
    let mut gateways = Vec::new();
    for name in ["a", "b", "c", "d"] {
        gateways.push(with_slots(&one, name, 100).await);
    }
    until("the other knows them", async || {
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

pub(crate) async fn a_lease_holds_what_it_uses_until_it_ends(database: TestDatabase) {
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
        assert_eq!(near.worker_name, name, "nothing has to be moved there");
        let expected = [format!("pinned by {}", lease_of(&scheduler, &near).await)];
        assert_eq!(bytes.kept_by(artifact).await, expected);
        release(&scheduler, &near.lease_token).await;
        until("it is let go", async || (!bytes.kept_by(artifact).await.contains(&expected[0])).then_some(()))
            .await;

        // One that nobody renews lets go as well.
        let brief = using();
        place(&scheduler, brief.clone()).await.expect("granted");
        until("it is let go", async || {
            let pinned = format!("pinned by {}", brief.lease_id);
            (!bytes.kept_by(artifact).await.contains(&pinned)).then_some(())
        })
        .await;

        // Of a group of which one cannot be had nothing is held.
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

pub(crate) async fn each_of_many_leases_hears_of_what_it_uses(database: TestDatabase) {
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
    keys.verify::<domain::worker::LeaseClaims>(&placed.lease_token).await.expect("ours").lease
}

/// What nobody came to release, of leases that end while the store is away, is released once it is back; a lease that lives keeps what it holds.
pub(crate) async fn pins_of_leases_outlive_neither_them_nor_a_store_that_is_away(database: TestDatabase) {
    let bytes = Place::new();
    let store = bytes.start().await;
    let every_moment = Config {
        reconcile_every: Duration::from_millis(20),
        reconcile_grace: Duration::ZERO,
        ..bytes.config(&database)
    };
    let scheduler = Running::start(every_moment).await;
    let _gateway = with_slots(&scheduler, "one", 9).await;
    let worker = Gateway::connect(&scheduler, hello("two")).await.expect("welcome");
    let worker = worker.welcome.worker_id.parse::<WorkerId>().expect("an id");
    let artifact = until("the store answers", async || bytes.upload_to(worker).await.ok()).await;
    let using = || pb::PlaceRequest { artifact_ids: vec![artifact.to_string()], ..task() };
    let lives = place(&scheduler, using()).await.expect("granted");
    let ends = place(&scheduler, using()).await.expect("granted");
    store.stop().await;
    bytes.gone();
    release(&scheduler, &ends.lease_token).await;
    let store = bytes.start().await;
    let kept = [format!("pinned by {}", lease_of(&scheduler, &lives).await)];
    until("one is left", async || (bytes.kept_by(artifact).await == kept).then_some(())).await;
    // Another is pinned and let go: the living one was looked at meanwhile.
    let unknown = domain::WorkloadId::new();
    bytes.pin(artifact, unknown).await.expect("pinned");
    until("it is settled", async || bytes.pin(artifact, unknown).await.err()).await;
    assert_eq!(bytes.kept_by(artifact).await, kept);
    scheduler.stop().await;
    store.stop().await;
}
