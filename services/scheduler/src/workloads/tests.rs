use db::Database;
use domain::ArtifactId;
use domain::workload::{Image, Limits, Outcome, Output, Readiness, ReadinessCheck, Service};
use testing::databases::TestDatabase;

use super::*;
use crate::db::entity::{event, outbox as parcels};

/// Returns a spec whose image is an artifact, so that the store must pin something.
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
async fn only_workload_with_outputs_or_build_waits_for_settling() {
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
                let row = lock(&txn, id).await?.expect("a row that was just written");
                let ending = Ending {
                    outcome: Outcome::Succeeded,
                    exit: None,
                    failure: None,
                    outputs: vec![],
                    caches: vec![],
                    usage: None,
                    notes: vec![],
                    has_result: false,
                };
                conclude(&txn, row, ending, Some(AttemptId::new()), now, &mut effects).await?;
                Ok::<_, DbErr>(effects)
            })
            .await
            .expect("concluded");

        let row = find(db.read(), id).await.expect("a row").expect("a row");
        assert_eq!(row.state, expected);
        assert_eq!(row.finished_at.is_some(), expected == State::Finished);
        let messages: Vec<_> = effects.parcels.iter().map(|parcel| &parcel.message).collect();
        assert!(
            matches!(messages[..], [Message::Settle(_)]),
            "the store receives the settlement: {messages:?}"
        );

        // A late answer of the store changes nothing.
        let now = Timestamp::now();
        let settled = db.write(async |txn| settled(&txn, id, now, &mut Effects::default()).await).await;
        settled.expect("settled");
        assert_eq!(find(db.read(), id).await.expect("a row").expect("a row").state, State::Finished);
    }
}

#[tokio::test]
async fn retry_ends_attempts_of_services() {
    let database = testing::databases::sqlite();
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let service = |name: &str| Service {
        name: name.to_owned(),
        image: Image::Host,
        entrypoint: None,
        prefers_image_directory: false,
        command: vec![b"serve".to_vec()],
        environment: Vec::new(),
        directory: b"/".to_vec(),
        user: None,
        limits: Limits::default(),
        readiness: Readiness { check: ReadinessCheck::Started, timeout: Duration::from_secs(60) },
        essential: false,
    };
    let spec = WorkloadSpec { services: vec![service("db"), service("cache")], ..test_support::spec() };
    let submission = Submission::new(WorkloadId::new(), spec, None);
    let (id, attempt, now) = (submission.id, AttemptId::new(), Timestamp::now());
    let effects = db
        .write(async |txn| {
            let mut effects = Effects::default();
            save(&txn, submission.row(State::Starting, now), Write::Insert, None, now, &mut effects).await?;
            let row = lock(&txn, id).await?.expect("a row that was just written");
            retry::requeue(&txn, row, Some(attempt.uuid()), vec![], now, &mut effects).await?;
            Ok::<_, DbErr>(effects)
        })
        .await
        .expect("requeued");
    let ended: Vec<_> = effects.parcels.iter().map(|parcel| &parcel.message).collect();
    let [
        Message::EndAttempt { attempt: db },
        Message::EndAttempt { attempt: cache },
        Message::EndAttempt { attempt: main },
    ] = ended[..]
    else {
        panic!("{ended:?}");
    };
    assert_eq!([*db, *cache, *main], [attempt.service("db"), attempt.service("cache"), attempt]);
}

/// More workloads than one pass deletes wait for the store. They must not block others.
async fn finished_workload_is_deleted_after_store_acknowledges(database: TestDatabase) {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let (long_ago, now) = (Timestamp(1_000_000), Timestamp::now());
    let finish = async |count: usize, at: Timestamp| {
        let all = (0..count).map(|_| Submission::new(WorkloadId::new(), of_an_image(&[]), None));
        let all: Vec<_> = all.collect();
        let written = db.write(async |txn| {
            let mut effects = Effects::default();
            for submission in &all {
                save(&txn, submission.row(State::Pending, at), Write::Insert, None, at, &mut effects).await?;
                let row = lock(&txn, submission.id).await?.expect("a row that was just written");
                conclude(&txn, row, Ending::aborted(), None, at, &mut effects).await?;
                results::insert(&*txn, submission.id, &"{}".into()).await?;
            }
            Ok::<_, DbErr>(())
        });
        written.await.expect("finished");
        all.into_iter().map(|submission| submission.id.uuid()).collect::<Vec<_>>()
    };
    let acknowledge = async |id: Uuid| {
        let delete = parcels::Entity::delete_many().filter(parcels::Column::HolderId.eq(id));
        db.write(async |txn| delete.clone().exec(&*txn).await).await.expect("delivered").rows_affected
    };
    let remaining = async || {
        while db.write(async |txn| forget(&txn, Timestamp(2_000_000)).await).await.expect("forgotten") > 0 {}
        let rows = workload::Entity::find().all(db.read()).await.expect("rows");
        rows.into_iter().map(|row| row.id).collect::<std::collections::HashSet<_>>()
    };
    let waiting_for_store = finish(150, long_ago).await;
    let (old, young) = (finish(1, long_ago).await[0], finish(1, now).await[0]);
    assert_eq!((acknowledge(old).await, acknowledge(young).await), (1, 1));
    let expected = waiting_for_store.iter().copied().chain([young]).collect();
    assert_eq!(remaining().await, expected);
    for id in waiting_for_store {
        assert_eq!(acknowledge(id).await, 1);
    }
    assert_eq!(remaining().await, [young].into());
    let events = event::Entity::find().all(db.read()).await.expect("events");
    assert!(!events.is_empty() && events.iter().all(|event| event.workload_id == young), "{events:?}");
    assert_eq!(results::find(db.read(), WorkloadId::from_uuid(old)).await.expect("read"), None);
    assert_eq!(
        results::find(db.read(), WorkloadId::from_uuid(young)).await.expect("read"),
        Some("{}".into())
    );
}

#[tokio::test]
async fn finished_workload_is_deleted_after_store_acknowledges_sqlite() {
    finished_workload_is_deleted_after_store_acknowledges(testing::databases::sqlite()).await;
}

#[tokio::test]
async fn finished_workload_is_deleted_after_store_acknowledges_postgres() {
    finished_workload_is_deleted_after_store_acknowledges(testing::databases::postgres().await).await;
}
