//! Many workers connected to one replica, and what each is told.

use std::time::Duration;

use domain::GatewayInstance;
use futures::future::{join_all, try_join_all};
use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use sea_orm::{ConnectionTrait, TransactionTrait};
use testing::databases::TestDatabase;

use crate::store::Place;
use crate::support::{Gateway, Running, config, finish, hello, spec, start, until, within};

/// Settings under which nobody looks by himself while a test lasts, but for streams.
fn only_streams(database: &TestDatabase) -> Config {
    let hour = Duration::from_secs(3600);
    Config { poll: hour, worker_ttl: hour, stop_after: 2 * hour, lost_after: 3 * hour, ..config(database) }
}

async fn connect(scheduler: &Running, count: usize) -> Vec<Gateway> {
    let gateways = (0..count).map(|number| Gateway::connect(scheduler, hello(&format!("worker-{number}"))));
    try_join_all(gateways).await.expect("welcome")
}

/// Waits until it hears that what it says counts.
async fn is_heard(gateway: &mut Gateway) {
    let before = gateway.desired.heard;
    within("it is heard", async {
        while gateway.desired.heard == before {
            gateway.observe(&[]).await;
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
}

async fn is_told(gateway: &mut Gateway, directive: pb::Directive) {
    within("it is told", async {
        while gateway.desired.directive() != directive {
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
}

/// Whoever read what is locked would wait.
#[tokio::test(flavor = "multi_thread")]
async fn streams_read_nothing_while_nothing_changes() {
    let database = testing::databases::postgres().await;
    let scheduler = Running::start(only_streams(&database)).await;
    let mut gateways = connect(&scheduler, 200).await;
    let other = sea_orm::Database::connect(&database.url).await.expect("a connection");

    let locked = other.begin().await.expect("a transaction");
    let all = "LOCK TABLE workers, heartbeats, removed_workers, leases, workloads IN ACCESS EXCLUSIVE MODE";
    locked.execute_unprepared(all).await.expect("locked");
    let hears = async |gateway: &mut Gateway| {
        for _ in 0..3 {
            within("a heartbeat", gateway.next()).await.expect("the stream is open");
        }
    };
    join_all(gateways.iter_mut().map(hears)).await;
    locked.rollback().await.expect("given back");

    let locked = other.begin().await.expect("a transaction");
    let leases = "LOCK TABLE leases, workloads IN ACCESS EXCLUSIVE MODE";
    locked.execute_unprepared(leases).await.expect("locked");
    join_all(gateways.iter_mut().map(is_heard)).await;
    locked.rollback().await.expect("given back");

    // All are connected still.
    let id = scheduler.submit(spec()).await.expect("accepted");
    let name = until("it is placed", async || scheduler.get(id).await.whereabouts).await.worker_name;
    let number: usize = name.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).expect("a number");
    let (_, run) = gateways[number].run(id).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateways[number].holds_nothing().await;
    other.close().await.expect("closed");
    scheduler.stop().await;
}

pub(crate) async fn each_of_many_workers_hears_what_it_shall_do(database: TestDatabase) {
    // Nobody is told anything unasked but what is new.
    let scheduler = Running::start(Config { heartbeat: Duration::from_secs(600), ..only_streams(&database) });
    let scheduler = scheduler.await;
    let mut gateways = connect(&scheduler, 50).await;
    for (number, gateway) in gateways.iter_mut().enumerate().filter(|(number, _)| number % 5 == 0) {
        scheduler.land(&format!("worker-{number}"), None).await.expect("told");
        is_told(gateway, pb::Directive::Cordon).await;
    }
    let submitted = join_all((0..40).map(|_| scheduler.submit(spec()))).await;
    let mut placed = Vec::new();
    for id in submitted {
        let id = id.expect("accepted");
        let name = until("it is placed", async || scheduler.get(id).await.whereabouts).await.worker_name;
        placed.push((id, name));
    }
    for (id, name) in placed {
        let number: usize =
            name.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).expect("a number");
        assert_ne!(number % 5, 0, "{name} lands");
        let (lease, run) = gateways[number].run(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        gateways[number].observe(&[(&lease, pb::LeasePhase::Running)]).await;
        scheduler.wait_for(id, pb::WorkloadState::Running).await;
        scheduler.cancel(id, Duration::ZERO).await;
        gateways[number].stop(id).await;
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        gateways[number].holds_nothing().await;
    }
    scheduler.stop().await;
}

/// Settings under which a stream hears of nothing but by the look of its replica: it is told nothing unasked, and others give no hints.
fn only_looks(database: &TestDatabase) -> Config {
    let hour = Duration::from_secs(3600);
    Config {
        share_hints: false,
        heartbeat: hour / 2,
        poll: Duration::from_millis(100),
        ..only_streams(database)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_replica_changes_is_heard_without_any_hint() {
    let database = testing::databases::postgres().await;
    let one = Running::start(only_looks(&database)).await;
    let other = Running::start(only_looks(&database)).await;
    let first = hello("one");
    let mut gateway = Gateway::connect(&one, first.clone()).await.expect("welcome");
    for _ in 0..3 {
        other.land("one", None).await.expect("told");
        is_told(&mut gateway, pb::Directive::Cordon).await;
        other.workers().run_worker(pb::RunWorkerRequest { worker: "one".to_owned() }).await.expect("told");
        is_told(&mut gateway, pb::Directive::Run).await;
    }
    let id = other.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    other.cancel(id, Duration::ZERO).await;
    gateway.stop(id).await;
    finish(&other, &run.lease_token, 0).await.expect("finished");
    gateway.holds_nothing().await;

    // Another stream of its gateway says goodbye, so that another gateway may take over. This one says nothing.
    let again = pb::Hello { session_credential: gateway.welcome.session_credential.clone(), ..first.clone() };
    Gateway::connect(&one, again).await.expect("it comes back").leave().await;
    let standby = pb::Hello { gateway_instance: GatewayInstance::new().to_string(), ..first };
    let mut next = Gateway::connect(&other, standby).await.expect("it takes over");
    assert!(next.welcome.session > gateway.welcome.session);
    let refused = within("the stream ends", async {
        loop {
            if let Err(refused) = gateway.next().await {
                return refused;
            }
        }
    });
    assert!(refused.await.is(Reason::StaleSession));

    is_heard_by(&mut next, &other).await;
    one.stop().await;
    other.stop().await;
}

/// Whoever took over is heard, and stays.
async fn is_heard_by(gateway: &mut Gateway, scheduler: &Running) {
    gateway.observe(&[]).await;
    scheduler.land("one", None).await.expect("told");
    is_told(gateway, pb::Directive::Cordon).await;
    assert_eq!(scheduler.worker("one").await.state(), pb::WorkerState::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_another_replica_forgot_registers_again_without_any_hint() {
    let database = testing::databases::postgres().await;
    let place = Place::new();
    let store = place.start().await;
    let config = Config { artifact_store: place.endpoint(), share_hints: false, ..config(&database) };
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let hello = hello("one");
    let mut gateway = Gateway::connect(&one, hello.clone()).await.expect("welcome");
    // Another stream of its gateway says goodbye, so that it is out of contact.
    Gateway::connect(&one, hello.clone()).await.expect("the same again").leave().await;
    other.prune("one", true).await.expect("forgotten");
    // It is told with what it says next, at the latest.
    within("it is told", async {
        while gateway.desired.directive() != pb::Directive::RegisterAgain {
            gateway.observe_nothing().await;
            gateway.next().await.expect("it is told before the stream ends");
        }
    })
    .await;
    let again = Gateway::connect(&one, hello).await.expect("welcome");
    assert_ne!(again.welcome.worker_id, gateway.welcome.worker_id);
    store.stop().await;
    one.stop().await;
    other.stop().await;
}
