use db::Database;
use domain::workload::{Failure, FailureReason};
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, QueryFilter};
use testing::databases::{self, TestDatabase};
use tokio::sync::Semaphore;

use super::*;
use crate::config::Config;
use crate::db::entity::lease::Kind;
use crate::db::entity::to_json;
use crate::placement::{FailedWorker, Resources};
use crate::workers;
use crate::workers::test_support::registration;
use crate::workloads::Submission;
use crate::workloads::test_support::spec;

/// Changes the state of a workload without a notification.
async fn becomes(db: &Database, workload: &Submission, state: State) {
    let written = db.write(async |txn| {
        let one = workload::Entity::update_many().filter(workload::Column::Id.eq(workload.id.uuid()));
        one.col_expr(workload::Column::State, Expr::value(state)).exec(&*txn).await
    });
    assert_eq!(written.await.expect("written").rows_affected, 1);
}

/// A workload that was accepted long before another is pinned by a replica that sends no
/// notification.
async fn late_pinned_workload_is_found_by_next_poll(database: TestDatabase) {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let [early, late] = [(); 2].map(|()| Submission::new(WorkloadId::new(), spec(), None));
    let now = Timestamp::now();
    let mut accepted = early.row(State::Accepted, now);
    accepted.sequence = just_before(just_before(accepted.sequence));
    let pending = late.row(State::Pending, now);
    let insert = db.write(async |txn| {
        let mut effects = Effects::default();
        workloads::save(&txn, accepted.clone(), Write::Insert, None, now, &mut effects).await?;
        workloads::save(&txn, pending.clone(), Write::Insert, None, now, &mut effects).await
    });
    insert.await.expect("written");
    let (dispatch, mut dispatcher) = Dispatcher::new(db.clone(), Arc::new(Config::new("", "")));
    let mut poll = async || {
        dispatcher.catch_up(false, &mut Effects::default()).await.expect("a poll");
        let mut ids: Vec<_> = dispatch.queue().ids().collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(poll().await, [late.id.uuid()]);

    becomes(&db, &early, State::Pending).await;
    let mut both = [early.id.uuid(), late.id.uuid()];
    both.sort_unstable();
    assert_eq!(poll().await, both);

    // A workload that no longer waits is found as soon.
    becomes(&db, &late, State::Finished).await;
    assert_eq!(poll().await, [early.id.uuid()]);
}

#[tokio::test]
async fn late_pinned_workload_is_found_by_next_poll_sqlite() {
    late_pinned_workload_is_found_by_next_poll(databases::sqlite()).await;
}

#[tokio::test]
async fn late_pinned_workload_is_found_by_next_poll_postgres() {
    late_pinned_workload_is_found_by_next_poll(databases::postgres().await).await;
}

/// An attempt at a waiting workload failed on a worker, and the replica that recorded this sent no
/// notification.
async fn failed_worker_is_not_chosen_again(database: TestDatabase) {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let config = Arc::new(Config::new("", ""));
    let one = Submission::new(WorkloadId::new(), spec(), None);
    let now = Timestamp::now();
    let (dispatch, mut dispatcher) = Dispatcher::new(db.clone(), config.clone());
    let insert = db.write(async |txn| {
        let row = one.row(State::Pending, now);
        workloads::save(&txn, row, Write::Insert, None, now, &mut Effects::default()).await
    });
    insert.await.expect("written");
    dispatcher.catch_up(false, &mut Effects::default()).await.expect("a poll");

    let gateways = ["there", "elsewhere"].map(|name| {
        let mut registration = registration(name);
        registration.labels.image_kinds.push("host".to_owned());
        registration
    });
    let registrations: Vec<_> = gateways.iter().collect();
    let registered = db.write(async |txn| {
        workers::register(&txn, &registrations, &config, now, &mut Effects::default()).await
    });
    let registered =
        registered.await.expect("a poll").into_iter().map(|session| session.expect("registered").worker);
    let [there, elsewhere] = registered.collect::<Vec<_>>()[..] else { panic!("both registered") };
    let failure = Failure { reason: FailureReason::StartFailed, message: "no".to_owned() };
    let failed_on = to_json(&[FailedWorker { worker: there, failure }]).expect("failures");
    let written = db.write(async |txn| {
        let one = workload::Entity::update_many().filter(workload::Column::Id.eq(one.id.uuid()));
        one.col_expr(workload::Column::FailedOn, Expr::value(&*failed_on)).exec(&*txn).await
    });
    assert_eq!(written.await.expect("written").rows_affected, 1);

    // The dispatcher reads only the workers. By its outdated knowledge, it prefers the worker with
    // the failure.
    dispatcher.pass_needed |= dispatcher.cache.catch_up(&db).await.expect("a poll");
    let busy = Resources::default();
    dispatch.workers.lock().plan(elsewhere, Kind::Task, &busy);
    dispatcher.run_queue_pass(now, &mut Effects::default()).await.expect("placed");
    let row = workloads::find(db.read(), one.id).await.expect("the database answers").expect("a workload");
    let placed = workloads::location(&row).expect("location").map(|placed| placed.worker);
    assert_eq!(placed, Some(elsewhere));
}

#[tokio::test]
async fn failed_worker_is_not_chosen_again_sqlite() {
    failed_worker_is_not_chosen_again(databases::sqlite()).await;
}

#[tokio::test]
async fn failed_worker_is_not_chosen_again_postgres() {
    failed_worker_is_not_chosen_again(databases::postgres().await).await;
}

/// A worker registers during a poll, in a transaction that commits after it.
#[tokio::test]
async fn open_transaction_is_seen_by_next_poll() {
    let database = databases::postgres().await;
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let config = Arc::new(Config::new("", ""));
    let (dispatch, mut dispatcher) = Dispatcher::new(db.clone(), config.clone());
    let submitted = Submission::new(WorkloadId::new(), spec(), None);
    let row = submitted.row(State::Pending, Timestamp::now());
    let queued = db.write(async |txn| {
        workloads::save(&txn, row.clone(), Write::Insert, None, Timestamp::now(), &mut Effects::default())
            .await
    });
    queued.await.expect("written");
    let mut gateway = registration("one");
    gateway.labels.image_kinds = vec!["host".to_owned()];
    let (written, polled) = (Semaphore::new(0), Semaphore::new(0));
    let comes = db.write(async |txn| {
        workers::register(&txn, &[&gateway], &config, Timestamp::now(), &mut Effects::default()).await?;
        written.add_permits(1);
        _ = polled.acquire().await;
        Ok::<_, DbErr>(())
    });
    let poll = async |dispatcher: &mut Dispatcher| {
        let mut effects = Effects::default();
        dispatcher.catch_up(true, &mut effects).await.expect("a poll");
        dispatcher.run_queue_pass(Timestamp::now(), &mut effects).await.expect("turns");
        dispatch.queue().len()
    };
    let polls = async {
        _ = written.acquire().await;
        // The first poll reads everything, and each further one reads changes.
        for _ in 0..3 {
            assert_eq!(poll(&mut dispatcher).await, 1, "no worker is visible yet");
        }
        polled.add_permits(1);
    };
    let (come, ()) = tokio::join!(comes, polls);
    come.expect("written");
    assert_eq!(poll(&mut dispatcher).await, 0, "the workload is placed");
}

#[tokio::test]
async fn full_reads_are_rarer_for_long_queues() {
    let database = databases::sqlite();
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let config = Config { poll: Duration::from_secs(1), ..Config::new("", "") };
    let (dispatch, dispatcher) = Dispatcher::new(db, Arc::new(config));
    let row = Submission::new(WorkloadId::new(), spec(), None).row(State::Pending, Timestamp::now());
    let mut every = Vec::new();
    for number in 1..=70_000_u128 {
        let row = Model { id: Uuid::from_u128(number), sequence: Uuid::from_u128(number), ..row.clone() };
        dispatch.queue().put(waiting(row).expect("a workload"));
        if [999, 3000, 70_000].contains(&number) {
            every.push(dispatcher.full_read_interval().as_secs());
        }
    }
    assert_eq!(every, [0, 3, 60]);
}
