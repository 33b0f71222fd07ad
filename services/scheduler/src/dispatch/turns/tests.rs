use db::Database;
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, QueryFilter};
use testing::databases::{self, TestDatabase};

use super::*;
use crate::config::Config;
use crate::workloads::Submission;
use crate::workloads::for_tests::spec;

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
