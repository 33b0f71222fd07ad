//! Tests of lease terms: time in which a lease cannot be renewed does not count.

use std::time::Duration;

use domain::{LeaseId, Timestamp};
use rpc::pb::scheduler as pb;
use sea_orm::{ConnectionTrait, Statement, TransactionTrait};
use testing::databases::TestDatabase;

use crate::support::{Gateway, Running, config, registration, spec, start, until};

fn transfer() -> pb::PlaceRequest {
    pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Transfer.into(),
        ..pb::PlaceRequest::default()
    }
}

/// Reads the expiry and the state of the only lease from the database.
async fn only_lease(database: &TestDatabase) -> (i64, String) {
    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    let statement =
        Statement::from_string(connection.get_database_backend(), "SELECT expires_at, state FROM leases");
    let row = connection.query_one_raw(statement).await.expect("read").expect("a lease");
    connection.close().await.expect("closed");
    (row.try_get("", "expires_at").expect("a driven lease"), row.try_get("", "state").expect("a state"))
}

pub(crate) async fn driven_lease_has_full_term_after_restart(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let request = transfer();
    let granted = scheduler.placements().place(request.clone()).await.expect("granted").into_inner();
    scheduler.stop().await;

    // The scheduler was stopped for longer than the term.
    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    connection.execute_unprepared("UPDATE leases SET expires_at = 1").await.expect("the time is changed");
    connection.close().await.expect("closed");

    let (before, term) = (Timestamp::now(), config(&database).lease_term);
    let scheduler = Running::start(config(&database)).await;
    let again = scheduler.placements().place(request).await.expect("a repeat").into_inner();
    assert_eq!(again, granted);
    let renew = pb::RenewRequest { lease_token: granted.lease_token };
    scheduler.placements().renew(renew.clone()).await.expect("kept");

    // Another replica starts. The lease is extended to at most one full term.
    let other = Running::start(config(&database)).await;
    let (expires_at, state) = only_lease(&database).await;
    assert_eq!(state, "granted");
    assert!(Timestamp(expires_at) >= before + term, "at least a term");
    assert!(Timestamp(expires_at) <= Timestamp::now() + term, "at most one term");
    other.placements().renew(renew).await.expect("kept");
    other.stop().await;
    scheduler.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_survives_database_outage() {
    let database = testing::databases::postgres().await;
    let term = Duration::from_secs(2);
    let scheduler = Running::start(scheduler::Config { lease_term: term, ..config(&database) }).await;
    let _gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let request = transfer();
    let granted = scheduler.placements().place(request).await.expect("granted").into_inner();

    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    let away = connection.begin().await.expect("begun");
    away.execute_unprepared("LOCK TABLE leases").await.expect("an exclusive lock");
    let statement = Statement::from_string(away.get_database_backend(), "SELECT expires_at FROM leases");
    let row = away.query_one_raw(statement).await.expect("read").expect("a lease");
    let would_end = Timestamp(row.try_get("", "expires_at").expect("a driven lease"));
    until("the term is over", async || (Timestamp::now() > would_end).then_some(())).await;
    away.rollback().await.expect("the lock is released");
    let renew = pb::RenewRequest { lease_token: granted.lease_token };
    scheduler.placements().renew(renew).await.expect("the lease can be renewed");
    connection.close().await.expect("closed");

    let (expires_at, _) = until("the lease has a full term again, or has ended", async || {
        let (expires_at, state) = only_lease(&database).await;
        (expires_at > would_end.0 || state == "ended").then_some((expires_at, state))
    })
    .await;
    assert!(Timestamp(expires_at) >= would_end + term, "the lease expired while it could not be renewed");
    scheduler.stop().await;
}

async fn advance_time(database: &TestDatabase, statement: &str) {
    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    connection.execute_unprepared(statement).await.expect("the time is changed");
    connection.close().await.expect("closed");
}

pub(crate) async fn restart_keeps_time_of_last_contact(database: TestDatabase) {
    let hour = Duration::from_secs(3600);
    let ttl = Duration::from_secs(1);
    let config = || scheduler::Config {
        worker_ttl: ttl,
        stop_after: hour - ttl,
        lost_after: hour,
        ..config(&database)
    };
    let scheduler = Running::start(config()).await;
    let mut gateway = Gateway::connect(&scheduler, registration("gone")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    scheduler.stop().await;
    drop(gateway);

    // Most of the hour passes. The worker keeps the rest of it.
    let almost = (Timestamp::now() - (hour - Duration::from_secs(600))).0;
    advance_time(&database, &format!("UPDATE heartbeats SET last_contact_at = {almost}")).await;
    let scheduler = Running::start(config()).await;
    until("the worker is stalled", async || {
        (scheduler.worker("gone").await.state() == pb::WorkerState::Stalled).then_some(())
    })
    .await;
    scheduler.stop().await;
    let scheduler = Running::start(config()).await;
    until("the time to reconnect has passed", async || {
        (!scheduler.worker("gone").await.awaited).then_some(())
    })
    .await;
    assert_eq!(scheduler.worker("gone").await.state(), pb::WorkerState::Stalled);
    assert_eq!(scheduler.get(id).await.state(), pb::WorkloadState::Starting);
    scheduler.stop().await;

    // The hour has passed. A restart of the scheduler adds only the time to reconnect.
    let over = (Timestamp::now() - hour).0;
    advance_time(&database, &format!("UPDATE heartbeats SET last_contact_at = {over}")).await;
    let scheduler = Running::start(config()).await;
    let lost = scheduler.finished(id).await;
    assert_eq!(lost.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));
    assert_eq!(scheduler.worker("gone").await.state(), pb::WorkerState::Lost);
    scheduler.stop().await;
}

pub(crate) async fn restart_places_work_on_reconnected_workers(database: TestDatabase) {
    // No worker stalls during the test.
    let config = || scheduler::Config { worker_ttl: Duration::from_secs(500), ..config(&database) };
    let scheduler = Running::start(config()).await;
    let (gone, back) = (registration("gone"), registration("back"));
    let first = Gateway::connect(&scheduler, gone).await.expect("welcome");
    let second = Gateway::connect(&scheduler, back.clone()).await.expect("welcome");
    assert!(!scheduler.worker("gone").await.awaited);
    scheduler.stop().await;
    drop((first, second));

    let scheduler = Running::start(config()).await;
    assert!(scheduler.worker("gone").await.awaited && scheduler.worker("back").await.awaited);
    let mut gateway = Gateway::connect(&scheduler, back).await.expect("welcome");
    assert!(!scheduler.worker("back").await.awaited);
    let gone = scheduler.worker("gone").await;
    assert!(gone.awaited && gone.state() == pb::WorkerState::Running, "{gone:?}");
    // Both workers have two slots.
    for _ in 0..2 {
        let id = scheduler.submit(spec()).await.expect("accepted");
        gateway.run(id).await;
    }
    let id = scheduler.submit(spec()).await.expect("accepted");
    let location = scheduler.get(id).await.location.expect("the workload is placed");
    assert_eq!(location.worker_name, "gone", "the worker may reconnect, and the other one is full");
    scheduler.stop().await;
}
