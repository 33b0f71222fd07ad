use db::Database;
use domain::ArtifactId;
use domain::workload::{Image, Outcome, Output};
use testing::databases::TestDatabase;

use super::*;
use crate::db::entity::{event, outbox as parcels};

/// A workload from an image that is an artifact, so that something is pinned for it.
fn of_an_image(outputs: &[&str]) -> WorkloadSpec {
    let outputs = outputs.iter().map(|name| Output {
        name: (*name).to_owned(),
        path: format!("/workspace/{name}").into(),
        owners: Vec::new(),
    });
    WorkloadSpec {
        image: Image::Artifact(ArtifactId::new()),
        outputs: outputs.collect(),
        ..test_support::spec()
    }
}

#[tokio::test]
async fn only_what_may_have_outputs_or_ends_a_build_waits_until_it_is_settled() {
    let database = testing::databases::sqlite();
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let build = Some(domain::BuildId::new());
    let specs = [
        (of_an_image(&[]), State::Finished),
        (of_an_image(&["out"]), State::Settling),
        (WorkloadSpec { build, ..of_an_image(&[]) }, State::Settling),
    ];
    for (spec, expected) in specs {
        let submission = Submission::new(WorkloadId::new(), spec, None);
        let (id, now) = (submission.id, Timestamp::now());
        let effects = db
            .write(async |txn| {
                let mut effects = Effects::default();
                let row = submission.row(State::Running, now);
                save(&txn, row, Write::Insert, None, now, &mut effects).await?;
                let row = lock(&txn, id).await?.expect("it was just written");
                let ending = Ending {
                    outcome: Outcome::Succeeded,
                    exit: None,
                    failure: None,
                    outputs: vec![],
                    caches: vec![],
                    usage: None,
                    notes: vec![],
                };
                conclude(&txn, row, ending, Some(AttemptId::new()), now, &mut effects).await?;
                Ok::<_, DbErr>(effects)
            })
            .await
            .expect("concluded");

        let row = find(db.read(), id).await.expect("a row").expect("a row");
        assert_eq!(row.state, expected);
        assert_eq!(row.finished_at.is_some(), expected == State::Finished);
        let told: Vec<_> = effects.parcels.iter().map(|parcel| &parcel.message).collect();
        assert!(matches!(told[..], [Message::Settle(_)]), "the store hears of it all the same: {told:?}");

        // However late the store answers.
        let now = Timestamp::now();
        let settled = db.write(async |txn| settled(&txn, id, now, &mut Effects::default()).await).await;
        settled.expect("settled");
        assert_eq!(find(db.read(), id).await.expect("a row").expect("a row").state, State::Finished);
    }
}

/// More than are forgotten at a time wait for the store, and others do not.
async fn what_finished_long_ago_is_forgotten_once_the_store_knows(database: TestDatabase) {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let (long_ago, now) = (Timestamp(1_000_000), Timestamp::now());
    let finish = async |count: usize, at: Timestamp| {
        let all = (0..count).map(|_| Submission::new(WorkloadId::new(), of_an_image(&[]), None));
        let all: Vec<_> = all.collect();
        let written = db.write(async |txn| {
            let mut effects = Effects::default();
            for submission in &all {
                save(&txn, submission.row(State::Pending, at), Write::Insert, None, at, &mut effects).await?;
                let row = lock(&txn, submission.id).await?.expect("it was just written");
                conclude(&txn, row, Ending::aborted(), None, at, &mut effects).await?;
            }
            Ok::<_, DbErr>(())
        });
        written.await.expect("finished");
        all.into_iter().map(|submission| submission.id.uuid()).collect::<Vec<_>>()
    };
    let heard = async |id: Uuid| {
        let told = parcels::Entity::delete_many().filter(parcels::Column::HolderId.eq(id));
        db.write(async |txn| told.clone().exec(&*txn).await).await.expect("delivered").rows_affected
    };
    let left = async || {
        while db.write(async |txn| forget(&txn, Timestamp(2_000_000)).await).await.expect("forgotten") > 0 {}
        let rows = workload::Entity::find().all(db.read()).await.expect("rows");
        rows.into_iter().map(|row| row.id).collect::<std::collections::HashSet<_>>()
    };
    let leases_of_stalled = finish(150, long_ago).await;
    let (old, young) = (finish(1, long_ago).await[0], finish(1, now).await[0]);
    assert_eq!((heard(old).await, heard(young).await), (1, 1));
    let expected = leases_of_stalled.iter().copied().chain([young]).collect();
    assert_eq!(left().await, expected);
    for id in leases_of_stalled {
        assert_eq!(heard(id).await, 1);
    }
    assert_eq!(left().await, [young].into());
    let events = event::Entity::find().all(db.read()).await.expect("events");
    assert!(!events.is_empty() && events.iter().all(|event| event.workload_id == young), "{events:?}");
}

#[tokio::test]
async fn what_finished_long_ago_is_forgotten_on_sqlite() {
    what_finished_long_ago_is_forgotten_once_the_store_knows(testing::databases::sqlite()).await;
}

#[tokio::test]
async fn what_finished_long_ago_is_forgotten_on_postgresql() {
    what_finished_long_ago_is_forgotten_once_the_store_knows(testing::databases::postgres().await).await;
}
