//! Tests that batched lookups return what separate lookups would.

use std::sync::Arc;

use domain::{ArtifactId, Timestamp, WorkerId};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use sea_orm::{ConnectionTrait, Statement, Value};
use testing::databases::{self, TestDatabase};
use testing::seeds;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::*;
use crate::app::Store;
use crate::clock::Clock;
use crate::config::{Config, KeySource};

const TEAMS: [&str; 2] = ["main", "other"];

/// A generated artifact.
struct TestArtifact {
    id: ArtifactId,
    team: &'static str,
    is_deleting: bool,
    /// Teams that may use it although it belongs to another team.
    for_others: Vec<&'static str>,
    /// Workers with a replica of it.
    workers: BTreeSet<WorkerId>,
}

/// Creates artifacts: usable by their team, by every team, by a team that has pinned them, and by
/// no team.
async fn artifacts(store: &Store, random: &mut SmallRng) -> Vec<TestArtifact> {
    let write = async |sql: &'static str, values: Vec<Value>| {
        let backend = store.db.read().get_database_backend();
        let statement = &Statement::from_sql_and_values(backend, sql, values);
        let written = store.db.write(|txn| async move { txn.execute_raw(statement.clone()).await.map(drop) });
        written.await.expect("it is written");
    };
    let holder = Uuid::from_u128(random.random());
    write(
        "INSERT INTO holders (holder_id, team, created_at, due_at) VALUES ($1, 'main', 0, 0)",
        vec![holder.into()],
    )
    .await;
    let workers = [(); 3].map(|()| WorkerId::from_uuid(Uuid::from_u128(random.random())));
    for worker in &workers {
        let sql = "INSERT INTO workers (worker_id, incarnation, session, sequence, reported) VALUES ($1, 1, 1, 0, 0)";
        write(sql, vec![worker.uuid().into()]).await;
    }
    let mut all = Vec::new();
    for number in 0..40_usize {
        let id = Uuid::from_u128(random.random());
        let (team, state) =
            (TEAMS[number % 2], ["sealed", "sealed", "open", "deleting", "sealed"][number % 5]);
        write(
            "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, digest, size_bytes, had_owner, created_at, marked_at, due_at, in_store)
             VALUES ($1, $1, $2, '', $3, $4, 0, TRUE, 0, 0, 9000000, FALSE)",
            vec![id.into(), team.into(), state.into(), id.as_bytes().repeat(2).into()],
        )
        .await;
        let mut for_others = Vec::new();
        match number {
            11 | 12 => {
                for_others.extend(TEAMS);
                let worker = Uuid::from_u128(random.random());
                let sql = "INSERT INTO resource_certs (worker_id, artifact_id) VALUES ($1, $2)";
                write(sql, vec![worker.into(), id.into()]).await;
            }
            // Pinned while it was available to every team.
            21 | 22 => {
                for_others.push("main");
                let sql = "INSERT INTO pins (holder_id, artifact_id, pinned_at) VALUES ($1, $2, 0)";
                write(sql, vec![holder.into(), id.into()]).await;
            }
            _ => {}
        }
        let mut has_it = BTreeSet::new();
        for worker in &workers[..if state == "sealed" { number % 4 } else { 0 }] {
            let handle = Uuid::from_u128(random.random());
            let sql = "INSERT INTO volumes (handle, worker_id, state, purpose, artifact_id, complete, digest, size_bytes, verified, created_at, judged_after)
                       VALUES ($1, $2, 'created', 'replica', $3, TRUE, $4, 7, TRUE, 0, 0)";
            let digest = id.as_bytes().repeat(2);
            write(sql, vec![handle.into(), worker.uuid().into(), id.into(), digest.into()]).await;
            has_it.insert(*worker);
        }
        let (id, is_deleting) = (ArtifactId::from_uuid(id), state == "deleting");
        all.push(TestArtifact { id, team, is_deleting, for_others, workers: has_it });
    }
    all
}

async fn lookups_return_usable_artifacts_of_the_team(database: TestDatabase) {
    let seed = seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let random = &mut SmallRng::seed_from_u64(seed);
    let config = Config {
        clock: Clock::movable(Timestamp(1_000_000)),
        ..Config::new(database.url.as_str(), KeySource::Fixed(Vec::new()))
    };
    let store = Arc::new(Store::open(config).await.expect("it opens"));
    let known = artifacts(&store, random).await;
    let locator = ArtifactLocator::new(store.db.clone(), TaskTracker::new());
    let (mut returned, mut left_out) = (0, 0);
    for _ in 0..40 {
        let team = *TEAMS.choose(random).expect("two");
        let mut calls = Vec::new();
        for _ in 0..random.random_range(1..20) {
            let mut artifacts = Vec::new();
            for _ in 0..random.random_range(0..8) {
                artifacts.push(known.choose(random).expect("there are some").id);
            }
            if random.random_ratio(1, 8) {
                artifacts.push(ArtifactId::new());
            }
            calls.push(artifacts);
        }
        // All calls in one lookup.
        let (answers, answered): (Vec<_>, Vec<_>) = calls.iter().map(|_| oneshot::channel()).unzip();
        let wanted =
            calls.iter().map(|artifacts| LookupCall { team: team.to_owned(), artifacts: artifacts.clone() });
        locate_group(&store.db, (wanted.collect(), answers)).await;
        for (artifacts, answered) in calls.iter().zip(answered) {
            let mut expected: Vec<&TestArtifact> = Vec::new();
            for id in artifacts {
                let one = known.iter().find(|one| one.id == *id && !one.is_deleting);
                let one = one.filter(|one| one.team == team || one.for_others.contains(&team));
                expected.extend(one.filter(|one| expected.iter().all(|other| other.id != one.id)));
            }
            let answer = answered.await.expect("each is answered").expect("it is looked up");
            let found = answer.iter().map(|one| {
                let workers = one.replicas.iter().map(|replica| replica.worker).collect::<BTreeSet<_>>();
                (ArtifactId::from_uuid(one.artifact.artifact_id), workers)
            });
            let expected: Vec<_> = expected.iter().map(|one| (one.id, one.workers.clone())).collect();
            assert_eq!(found.collect::<Vec<_>>(), expected, "{team}: {artifacts:?}, with {calls:?}");
            returned += expected.len();
            left_out += artifacts.len() - expected.len();
        }
    }

    // Small calls, which are batched, and large ones, which are not.
    let all: Vec<_> = known.iter().map(|one| one.id).collect();
    let many: Vec<_> = all.iter().copied().chain((0..FEW).map(|_| ArtifactId::new())).collect();
    let asked = [&all, &many, &Vec::new()];
    let calls = asked.map(|artifacts| TEAMS.map(|team| locator.locate(team.to_owned(), artifacts.clone())));
    let answers = join_all(calls.into_iter().flatten()).await.into_iter();
    let counts: Vec<_> = answers.map(|answer| answer.expect("it is looked up").len()).collect();
    let usable = TEAMS.map(|team| {
        let may =
            |one: &&TestArtifact| !one.is_deleting && (one.team == team || one.for_others.contains(&team));
        known.iter().filter(may).count()
    });
    assert_eq!(counts, [usable, usable, [0, 0]].concat());
    assert!(returned > 100 && left_out > 100, "too little happened: {returned}, {left_out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_return_usable_artifacts_of_the_team_on_sqlite() {
    lookups_return_usable_artifacts_of_the_team(databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_return_usable_artifacts_of_the_team_on_postgres() {
    lookups_return_usable_artifacts_of_the_team(databases::postgres().await).await;
}
