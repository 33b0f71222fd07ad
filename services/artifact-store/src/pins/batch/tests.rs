//! Tests that batched calls have the same results as single calls, in order, on a second database.

use std::collections::BTreeSet;

use domain::{ArtifactId, AttemptId, BuildId, CacheId, Digest, Timestamp, WorkloadId};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use sea_orm::{ConnectionTrait, EntityTrait, Statement, Value};
use testing::databases::{self, TestDatabase};
use testing::seeds;
use uuid::Uuid;

use super::*;
use crate::clock::Clock;
use crate::config::{Config, KeySource};
use crate::db::entity::{BuildStatus, artifact, attempt, build, holder, pin, task_cache_use};

const NOW: Timestamp = Timestamp(1_000_000);
const TEAMS: [&str; 2] = ["main", "other"];
const ROUNDS: usize = 40;

/// Creates a store with artifacts, builds, task caches and attempts, the same for the same seed.
/// One artifact is open, and one has no bytes.
async fn store(database: &TestDatabase, cast: &Cast) -> Arc<Store> {
    let config = Config {
        clock: Clock::movable(NOW),
        ..Config::new(database.url.as_str(), KeySource::Fixed(Vec::new()))
    };
    let store = Arc::new(Store::open(config).await.expect("it opens"));
    let write = async |sql: &'static str, values: Vec<Value>| {
        let backend = store.db.read().get_database_backend();
        let statement = &Statement::from_sql_and_values(backend, sql, values);
        let written = store.db.write(|txn| async move { txn.execute_raw(statement.clone()).await.map(drop) });
        written.await.expect("it is written");
    };
    for (number, id) in cast.artifacts.iter().enumerate() {
        let team = team_of(number);
        let state = if number == 1 { "open" } else { "sealed" };
        let values = vec![
            id.uuid().into(),
            team.into(),
            state.into(),
            id.uuid().as_bytes().repeat(2).into(),
            (number != 2).into(),
        ];
        write(
            "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, digest, size_bytes, had_owner, created_at, due_at, in_store)
             VALUES ($1, $1, $2, '', $3, $4, 0, TRUE, 0, 9000000, $5)",
            values,
        )
        .await;
    }
    for (number, build) in cast.builds.iter().enumerate() {
        let values = vec![build.uuid().into(), cast.holders[number].uuid().into()];
        write(
            "INSERT INTO builds (build_id, team, ends_with, keep, bound, created_at) VALUES ($1, 'main', $2, 0, FALSE, 0)",
            values,
        )
        .await;
    }
    write(
        "INSERT INTO task_caches (cache_id, team, job, step, path, ttl, last_used, created_at, due_at)
         VALUES ($1, 'main', 'job', 'step', 'path', 0, 0, 0, 0)",
        vec![cast.cache.uuid().into()],
    )
    .await;
    for (number, holder) in cast.holders.iter().enumerate().filter(|(number, _)| number % 3 == 0) {
        // Most holders are unknown before they are pinned.
        let values = vec![holder.uuid().into(), team_of(number).into()];
        write("INSERT INTO holders (holder_id, team, created_at, due_at) VALUES ($1, $2, 0, 0)", values)
            .await;
        let values = vec![AttemptId::from_uuid(holder.uuid()).uuid().into(), holder.uuid().into()];
        write("INSERT INTO attempts (attempt_id, holder_id) VALUES ($1, $2)", values).await;
    }
    store
}

/// Returns the team of the artifact or holder with this number.
fn team_of(number: usize) -> &'static str {
    TEAMS[usize::from(number % 8 == 7)]
}

struct Cast {
    artifacts: Vec<ArtifactId>,
    holders: Vec<WorkloadId>,
    builds: Vec<BuildId>,
    cache: CacheId,
}

impl Cast {
    fn draw(random: &mut SmallRng) -> Self {
        let id = |random: &mut SmallRng| Uuid::from_u128(random.random());
        Self {
            artifacts: (0..40).map(|_| ArtifactId::from_uuid(id(random))).collect(),
            holders: (0..200).map(|_| WorkloadId::from_uuid(id(random))).collect(),
            builds: (0..4).map(|_| BuildId::from_uuid(id(random))).collect(),
            cache: CacheId::from_uuid(id(random)),
        }
    }

    /// Draws a request. A holder has one team per round, because the order of two teams would
    /// matter.
    fn used(&self, team: &str, holder: WorkloadId, random: &mut SmallRng) -> PinRequest {
        let count = random.random_range(0..4);
        // Mostly artifacts that can be pinned.
        let from = if random.random_ratio(1, 30) { 0 } else { 8 };
        let its_own = |number: &usize| team_of(*number) == team || random.random_ratio(1, 200);
        let artifacts: Vec<_> =
            (from..self.artifacts.len()).filter(its_own).map(|number| self.artifacts[number]).collect();
        let artifacts = (0..count).filter_map(|_| artifacts.choose(random)).copied().collect();
        let builds = self.builds.iter().zip(&self.holders);
        let ends = builds.filter(|(_, ends_with)| **ends_with == holder).map(|(build, _)| *build).next();
        PinRequest {
            holder,
            team: team.to_owned(),
            artifacts,
            build: ends.filter(|_| random.random_ratio(3, 4)),
            task_caches: if random.random_ratio(1, 10) { vec![self.cache] } else { Vec::new() },
        }
    }
}

/// Formats the result of a call as callers see it.
fn describe_result<T>(answer: Result<T, impl Into<tonic::Status>>, of: impl Fn(T) -> String) -> String {
    match answer {
        Ok(answer) => of(answer),
        Err(error) => {
            let status: tonic::Status = error.into();
            format!("{:?}: {}", status.code(), status.message())
        }
    }
}

fn pinned(pinned: PinAnswer) -> String {
    let ids = |located: Vec<crate::artifacts::LocatedArtifact>| {
        located.into_iter().map(|located| located.artifact.artifact_id).collect::<Vec<_>>()
    };
    format!("{:?} {:?}", ids(pinned.artifacts), ids(pinned.task_caches))
}

/// Returns all rows that pins and settlements change.
async fn rows(store: &Store) -> [BTreeSet<String>; 6] {
    macro_rules! all {
        ($($entity:ident),+) => {[$({
            let rows = $entity::Entity::find().all(store.db.read()).await.expect("they are read");
            rows.into_iter().map(|row| format!("{row:?}")).collect()
        }),+]};
    }
    all!(holder, pin, attempt, build, task_cache_use, artifact)
}

async fn batched_calls_have_results_of_single_calls(databases: [TestDatabase; 2]) {
    let seed = seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let random = &mut SmallRng::seed_from_u64(seed);
    let cast = Cast::draw(random);
    let [together, alone] = &databases;
    let (together, alone) = (store(together, &cast).await, store(alone, &cast).await);
    let pins = Pins::new(together.clone(), &TaskTracker::new());
    let (mut refused, mut done, mut largest) = (0, 0, 0);
    for _ in 0..ROUNDS {
        let wrong = random.random_range(0..cast.holders.len() * 4);
        let team = |number| if number == wrong { TEAMS[0] } else { team_of(number) };
        let holders: Vec<_> = (0..random.random_range(1..20))
            .filter_map(|_| (0..cast.holders.len()).collect::<Vec<_>>().choose(random).copied())
            .collect();
        if random.random_ratio(2, 3) {
            let uses: Vec<_> =
                holders.iter().map(|at| cast.used(team(*at), cast.holders[*at], random)).collect();
            largest = largest.max(uses.iter().filter(|used| used.team == TEAMS[0]).count());
            let answers = join_all(uses.iter().map(|used| pins.pin(used.clone()))).await;
            for (used, answer) in uses.iter().zip(answers) {
                let beside = alone.db.write(|txn| async move { pin(&txn, used, NOW).await }).await;
                let answer = describe_result(answer, pinned);
                refused += usize::from(beside.is_err());
                done += usize::from(beside.is_ok());
                assert_eq!(answer, describe_result(beside, pinned), "{used:?}, with {uses:?}");
            }
        } else {
            let settlements: Vec<_> = holders
                .iter()
                .map(|at| Settlement {
                    holder: cast.holders[*at],
                    team: team(*at).to_owned(),
                    attempt: None,
                    digest: Digest([0; 32]),
                    outputs: Vec::new(),
                    build: None,
                    status: BuildStatus::Errored,
                })
                .collect();
            let ttl = alone.config.resource_cache_ttl;
            let calls = settlements.iter().map(|settlement| pins.settle(settlement.clone()));
            for (settlement, answer) in settlements.iter().zip(join_all(calls).await) {
                let beside =
                    alone.db.write(|txn| async move { settle(&txn, settlement, NOW, ttl).await }).await;
                let answer = describe_result(answer, |settled| format!("{settled:?}"));
                refused += usize::from(beside.is_err());
                done += usize::from(beside.is_ok());
                assert_eq!(
                    answer,
                    describe_result(beside, |settled| format!("{settled:?}")),
                    "{settlement:?}, with {settlements:?}"
                );
            }
        }
        assert_eq!(rows(&together).await, rows(&alone).await);
    }
    eprintln!("{done} done, {refused} refused, up to {largest} together");
    assert!(refused > 0 && done > refused && largest > 4, "too little happened");
}

#[tokio::test(flavor = "multi_thread")]
async fn batched_calls_have_results_of_single_calls_on_sqlite() {
    batched_calls_have_results_of_single_calls([databases::sqlite(), databases::sqlite()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batched_calls_have_results_of_single_calls_on_postgres() {
    batched_calls_have_results_of_single_calls([databases::postgres().await, databases::postgres().await])
        .await;
}
