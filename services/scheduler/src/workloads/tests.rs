use db::Database;
use domain::ArtifactId;
use domain::workload::{Image, Outcome, Output};

use super::*;

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
        ..for_tests::spec()
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
