//! Tests of many workers that are connected to one replica, and of the messages that each receives.

use std::time::Duration;

use domain::GatewayInstance;
use futures::future::{join_all, try_join_all};
use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use sea_orm::{ConnectionTrait, TransactionTrait};
use testing::databases::TestDatabase;

use crate::store::Place;
use crate::support::{Gateway, Running, config, finish, registration, spec, start, until, within};

/// Configuration in which only streams cause reads of the database during a test.
fn only_streams(database: &TestDatabase) -> Config {
    let hour = Duration::from_secs(3600);
    Config { poll: hour, worker_ttl: hour, stop_after: 2 * hour, lost_after: 3 * hour, ..config(database) }
}

async fn connect(scheduler: &Running, count: usize) -> Vec<Gateway> {
    let gateways =
        (0..count).map(|number| Gateway::connect(scheduler, registration(&format!("worker-{number}"))));
    try_join_all(gateways).await.expect("welcome")
}

/// Reports until the scheduler acknowledges a report.
async fn wait_for_acknowledgement(gateway: &mut Gateway) {
    let before = gateway.desired.observed_number;
    within("an acknowledgement", async {
        while gateway.desired.observed_number == before {
            gateway.observe(&[]).await;
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
}

async fn wait_for_directive(gateway: &mut Gateway, directive: pb::Directive) {
    within("the directive", async {
        while gateway.desired.directive() != directive {
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
}

/// A stream that reads a locked table would wait for the lock.
#[tokio::test(flavor = "multi_thread")]
async fn streams_read_nothing_while_nothing_changes() {
    let database = testing::databases::postgres().await;
    let scheduler = Running::start(only_streams(&database)).await;
    let mut gateways = connect(&scheduler, 200).await;
    let other = sea_orm::Database::connect(&database.url).await.expect("a connection");

    let locked = other.begin().await.expect("a transaction");
    let all = "LOCK TABLE workers, heartbeats, removed_workers, leases, workloads IN ACCESS EXCLUSIVE MODE";
    locked.execute_unprepared(all).await.expect("locked");
    let receive = async |gateway: &mut Gateway| {
        for _ in 0..3 {
            within("a heartbeat", gateway.next()).await.expect("the stream is open");
        }
    };
    join_all(gateways.iter_mut().map(receive)).await;
    locked.rollback().await.expect("rolled back");

    let locked = other.begin().await.expect("a transaction");
    let leases = "LOCK TABLE leases, workloads IN ACCESS EXCLUSIVE MODE";
    locked.execute_unprepared(leases).await.expect("locked");
    join_all(gateways.iter_mut().map(wait_for_acknowledgement)).await;
    locked.rollback().await.expect("rolled back");

    // All gateways are still connected.
    let id = scheduler.submit(spec()).await.expect("accepted");
    let name = until("the workload is placed", async || scheduler.get(id).await.location).await.worker_name;
    let number: usize = name.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).expect("a number");
    let (_, run) = gateways[number].run(id).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateways[number].wait_until_idle().await;
    other.close().await.expect("closed");
    scheduler.stop().await;
}

pub(crate) async fn desired_state_reaches_every_worker(database: TestDatabase) {
    // The scheduler sends a message only when the desired state changes.
    let scheduler = Running::start(Config { heartbeat: Duration::from_secs(600), ..only_streams(&database) });
    let scheduler = scheduler.await;
    let mut gateways = connect(&scheduler, 50).await;
    for (number, gateway) in gateways.iter_mut().enumerate().filter(|(number, _)| number % 5 == 0) {
        scheduler.cordon(&format!("worker-{number}"), None).await.expect("accepted");
        wait_for_directive(gateway, pb::Directive::Cordon).await;
    }
    let submitted = join_all((0..40).map(|_| scheduler.submit(spec()))).await;
    let mut placed = Vec::new();
    for id in submitted {
        let id = id.expect("accepted");
        let name =
            until("the workload is placed", async || scheduler.get(id).await.location).await.worker_name;
        placed.push((id, name));
    }
    for (id, name) in placed {
        let number: usize =
            name.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).expect("a number");
        assert_ne!(number % 5, 0, "{name} is cordoned");
        let (lease, run) = gateways[number].run(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        gateways[number].observe(&[(&lease, pb::LeasePhase::Running)]).await;
        scheduler.wait_for(id, pb::WorkloadState::Running).await;
        scheduler.cancel(id, Duration::ZERO).await;
        gateways[number].stop(id).await;
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        gateways[number].wait_until_idle().await;
    }
    scheduler.stop().await;
}

/// Configuration in which a stream learns of changes only from the periodic reads of its replica.
/// Heartbeats and hints of other replicas are disabled.
fn only_polls(database: &TestDatabase) -> Config {
    let hour = Duration::from_secs(3600);
    Config {
        share_notifications: false,
        heartbeat: hour / 2,
        poll: Duration::from_millis(100),
        ..only_streams(database)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_receives_changes_of_another_replica_without_hints() {
    let database = testing::databases::postgres().await;
    let one = Running::start(only_polls(&database)).await;
    let other = Running::start(only_polls(&database)).await;
    let first = registration("one");
    let mut gateway = Gateway::connect(&one, first.clone()).await.expect("welcome");
    for _ in 0..3 {
        other.cordon("one", None).await.expect("accepted");
        wait_for_directive(&mut gateway, pb::Directive::Cordon).await;
        other
            .workers()
            .uncordon_worker(pb::UncordonWorkerRequest { worker: "one".to_owned() })
            .await
            .expect("accepted");
        wait_for_directive(&mut gateway, pb::Directive::Run).await;
    }
    let id = other.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    other.cancel(id, Duration::ZERO).await;
    gateway.stop(id).await;
    finish(&other, &run.lease_token, 0).await.expect("finished");
    gateway.wait_until_idle().await;

    // A second stream of the same gateway signs off, so that another gateway may take over. The
    // first stream receives no notice.
    let again =
        pb::Registration { session_credential: gateway.welcome.session_credential.clone(), ..first.clone() };
    Gateway::connect(&one, again).await.expect("reconnected").leave().await;
    let standby = pb::Registration { gateway_instance: GatewayInstance::new().to_string(), ..first };
    let mut next = Gateway::connect(&other, standby).await.expect("the standby takes over");
    assert!(next.welcome.session > gateway.welcome.session);
    let refused = within("the stream ends", async {
        loop {
            if let Err(refused) = gateway.next().await {
                return refused;
            }
        }
    });
    assert!(refused.await.is(Reason::StaleSession));

    check_connected(&mut next, &other).await;
    one.stop().await;
    other.stop().await;
}

/// Checks that the scheduler receives the reports of the new gateway and that the gateway stays
/// connected.
async fn check_connected(gateway: &mut Gateway, scheduler: &Running) {
    gateway.observe(&[]).await;
    scheduler.cordon("one", None).await.expect("accepted");
    wait_for_directive(gateway, pb::Directive::Cordon).await;
    assert_eq!(scheduler.worker("one").await.state(), pb::WorkerState::Running);
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_pruned_by_another_replica_registers_again() {
    let database = testing::databases::postgres().await;
    let place = Place::new();
    let store = place.start().await;
    let config = Config { artifact_store: place.endpoint(), share_notifications: false, ..config(&database) };
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let registration = registration("one");
    let mut gateway = Gateway::connect(&one, registration.clone()).await.expect("welcome");
    // A second stream of the same gateway signs off, so that the worker is out of contact.
    Gateway::connect(&one, registration.clone()).await.expect("a second stream").leave().await;
    other.prune("one", true).await.expect("pruned");
    // The gateway receives the directive no later than after its next report.
    within("the directive", async {
        while gateway.desired.directive() != pb::Directive::RegisterAgain {
            gateway.observe_nothing().await;
            gateway.next().await.expect("the directive before the end of the stream");
        }
    })
    .await;
    let again = Gateway::connect(&one, registration).await.expect("welcome");
    assert_ne!(again.welcome.worker_id, gateway.welcome.worker_id);
    store.stop().await;
    one.stop().await;
    other.stop().await;
}
