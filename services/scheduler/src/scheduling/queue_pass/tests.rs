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
use crate::placement::{FailedThere, Resources};
use crate::workers;
use crate::workers::test_support::hello;
use crate::workloads::Submission;
use crate::workloads::test_support::spec;

/// A replica that says nothing of it writes this.
async fn becomes(db: &Database, workload: &Submission, state: State) {
    let written = db.write(async |txn| {
        let one = workload::Entity::update_many().filter(workload::Column::Id.eq(workload.id.uuid()));
        one.col_expr(workload::Column::State, Expr::value(state)).exec(&*txn).await
    });
    assert_eq!(written.await.expect("written").rows_affected, 1);
}

/// One that was accepted long before another is pinned, by a replica that has no time to tell.
async fn what_is_pinned_late_is_found_with_the_next_look(database: TestDatabase) {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let [early, late] = [(); 2].map(|()| Submission::new(WorkloadId::new(), spec(), None));
    let now = Timestamp::now();
    let mut accepted = early.row(State::Accepted, now);
    accepted.sequence = a_little_before(a_little_before(accepted.sequence));
    let pending = late.row(State::Pending, now);
    let insert = db.write(async |txn| {
        let mut effects = Effects::default();
        workloads::save(&txn, accepted.clone(), Write::Insert, None, now, &mut effects).await?;
        workloads::save(&txn, pending.clone(), Write::Insert, None, now, &mut effects).await
    });
    insert.await.expect("written");
    let (dispatch, mut dispatcher) = Dispatcher::new(db.clone(), Arc::new(Config::new("", "")));
    let mut look = async || {
        dispatcher.catch_up(false, &mut Effects::default()).await.expect("a look");
        let mut ids: Vec<_> = dispatch.queue().ids().collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(look().await, [late.id.uuid()]);

    becomes(&db, &early, State::Pending).await;
    let mut both = [early.id.uuid(), late.id.uuid()];
    both.sort_unstable();
    assert_eq!(look().await, both);

    // And what waits no more is noticed as soon.
    becomes(&db, &late, State::Finished).await;
    assert_eq!(look().await, [early.id.uuid()]);
}

#[tokio::test]
async fn what_is_pinned_late_is_found_on_sqlite() {
    what_is_pinned_late_is_found_with_the_next_look(databases::sqlite()).await;
}

#[tokio::test]
async fn what_is_pinned_late_is_found_on_postgresql() {
    what_is_pinned_late_is_found_with_the_next_look(databases::postgres().await).await;
}

/// What waits at a replica could not be started on a worker, and whoever has written that had no time to tell.
async fn what_could_not_be_started_there_is_not_placed_there_again(database: TestDatabase) {
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
    dispatcher.catch_up(false, &mut Effects::default()).await.expect("a look");

    let gateways = ["there", "elsewhere"].map(|name| {
        let mut hello = hello(name);
        hello.labels.image_kinds.push("host".to_owned());
        hello
    });
    let hellos: Vec<_> = gateways.iter().collect();
    let let_in =
        db.write(async |txn| workers::register(&txn, &hellos, &config, now, &mut Effects::default()).await);
    let let_in = let_in.await.expect("a look").into_iter().map(|session| session.expect("let in").worker);
    let [there, elsewhere] = let_in.collect::<Vec<_>>()[..] else { panic!("both are let in") };
    let failure = Failure { reason: FailureReason::StartFailed, message: "no".to_owned() };
    let failed_on = to_json(&[FailedThere { worker: there, failure }]).expect("failures");
    let written = db.write(async |txn| {
        let one = workload::Entity::update_many().filter(workload::Column::Id.eq(one.id.uuid()));
        one.col_expr(workload::Column::FailedOn, Expr::value(&*failed_on)).exec(&*txn).await
    });
    assert_eq!(written.await.expect("written").rows_affected, 1);

    // It hears of the workers, and of nothing else. Of the two the one where it failed is preferred by what it knows.
    dispatcher.look |= dispatcher.memory.catch_up(&db).await.expect("a look");
    let busy = Resources::default();
    dispatch.workers.lock().plan(elsewhere, Kind::Task, &busy);
    dispatcher.take_turns(now, &mut Effects::default()).await.expect("placed");
    let row = workloads::find(db.read(), one.id).await.expect("the database answers").expect("it is there");
    let placed = workloads::whereabouts(&row).expect("whereabouts").map(|placed| placed.worker);
    assert_eq!(placed, Some(elsewhere));
}

#[tokio::test]
async fn what_could_not_be_started_there_is_not_placed_there_again_on_sqlite() {
    what_could_not_be_started_there_is_not_placed_there_again(databases::sqlite()).await;
}

#[tokio::test]
async fn what_could_not_be_started_there_is_not_placed_there_again_on_postgresql() {
    what_could_not_be_started_there_is_not_placed_there_again(databases::postgres().await).await;
}

/// A worker that comes while somebody looks, by a transaction that is written after that.
#[tokio::test]
async fn what_is_under_way_during_a_look_is_found_by_the_next() {
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
    let mut gateway = hello("one");
    gateway.labels.image_kinds = vec!["host".to_owned()];
    let (written, looked) = (Semaphore::new(0), Semaphore::new(0));
    let comes = db.write(async |txn| {
        workers::register(&txn, &[&gateway], &config, Timestamp::now(), &mut Effects::default()).await?;
        written.add_permits(1);
        _ = looked.acquire().await;
        Ok::<_, DbErr>(())
    });
    let look = async |dispatcher: &mut Dispatcher| {
        let mut effects = Effects::default();
        dispatcher.catch_up(true, &mut effects).await.expect("a look");
        dispatcher.take_turns(Timestamp::now(), &mut effects).await.expect("turns");
        dispatch.queue().len()
    };
    let looks = async {
        _ = written.acquire().await;
        // The first look reads everything, and each further one what is new.
        for _ in 0..3 {
            assert_eq!(look(&mut dispatcher).await, 1, "nobody is there yet");
        }
        looked.add_permits(1);
    };
    let (come, ()) = tokio::join!(comes, looks);
    come.expect("written");
    assert_eq!(look(&mut dispatcher).await, 0, "it is placed");
}

#[tokio::test]
async fn the_more_wait_the_more_seldom_all_are_read() {
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
            every.push(dispatcher.whole_every().as_secs());
        }
    }
    assert_eq!(every, [0, 3, 60]);
}
