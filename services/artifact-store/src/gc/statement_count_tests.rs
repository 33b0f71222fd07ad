//! Tests that the statements of a round do not depend on the number of rows.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use db::Database;
use domain::{BuildId, CacheId, Timestamp, VolumeHandle, WorkerId, WorkloadId};
use sea_orm::{ActiveModelTrait, DatabaseConnection, EntityTrait, IntoActiveModel, TransactionTrait};
use testing::databases::{self, TestDatabase};
use uuid::Uuid;

use crate::db::entity::{
    ArtifactState, BuildStatus, DeletionKind, Purpose, State, UserKind, artifact, attempt, build, cache_use,
    container, deletion, holder, owner, resource_cache, task_cache, tombstone, volume, worker,
};
use crate::db::migrations::Schema;
use crate::db::volumes::new_volume;
use crate::gc::{Settings, Step};
use crate::policy::garbage::Policy;
use crate::store_life;

const NOW: Timestamp = Timestamp(1_000_000_000_000_000);
const TEAM: &str = "main";

/// Number of rows of each kind of garbage.
const FEW: usize = 4;
const MANY: usize = 10 * FEW;

/// Log of the statements on a connection.
#[derive(Debug, Clone, Default)]
struct StatementLog(Arc<Mutex<Vec<String>>>);

impl StatementLog {
    /// Opens a connection whose statements are logged.
    async fn connect(&self, url: &str) -> DatabaseConnection {
        let mut connection = sea_orm::Database::connect(url).await.expect("the database");
        let asked = self.clone();
        connection.set_metric_callback(move |info| asked.lock().push(info.statement.sql.clone()));
        connection
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lock())
    }
}

fn settings() -> Settings {
    Settings {
        now: NOW,
        policy: Policy { unowned_ttl: Duration::ZERO, gc_grace: Duration::ZERO, needs_space: false },
        tombstone: Duration::ZERO,
        remember: Duration::ZERO,
        resource_cache_ttl: Duration::ZERO,
        lost_grace: Duration::ZERO,
        // One batch for all rows.
        batch: 100_000,
    }
}

async fn add<M>(db: &Database, rows: Vec<M>)
where
    M: IntoActiveModel<<M::Entity as EntityTrait>::ActiveModel> + sea_orm::ModelTrait + Clone + Send + Sync,
    <M::Entity as EntityTrait>::ActiveModel: ActiveModelTrait<Entity = M::Entity> + Send,
{
    db.write(|txn| {
        let rows: Vec<_> = rows.iter().cloned().map(|row| row.into_active_model().reset_all()).collect();
        async move { M::Entity::insert_many(rows).exec_without_returning(&*txn).await.map(drop) }
    })
    .await
    .expect("added");
}

fn artifact(state: ArtifactState, due_at: Option<i64>) -> artifact::Model {
    let is_deleting = state == ArtifactState::Deleting;
    artifact::Model {
        artifact_id: Uuid::new_v4(),
        ordinal: Uuid::now_v7(),
        team: TEAM.to_owned(),
        label: String::new(),
        state,
        digest: Some(vec![1; 32]),
        size_bytes: 1,
        had_owner: true,
        created_at: 1,
        marked_at: is_deleting.then_some(1),
        mark_reason: is_deleting.then(|| "it was in the way".to_owned()),
        kept_until: None,
        due_at,
        in_store: false,
    }
}

/// Returns a complete replica of an artifact.
fn replica(of: &artifact::Model, worker: WorkerId) -> volume::Model {
    volume::Model {
        state: State::Created,
        artifact_id: Some(of.artifact_id),
        complete: true,
        digest: of.digest.clone(),
        size_bytes: 1,
        ..new_volume(VolumeHandle::new(), worker, Purpose::Replica, 1, Timestamp(1))
    }
}

fn container(attempt: Uuid, workload: Uuid, worker: WorkerId) -> container::Model {
    container::Model {
        handle: Uuid::now_v7(),
        worker_id: worker.uuid(),
        state: State::Created,
        attempt_id: attempt,
        holder_id: workload,
        created_at: 1,
        judged_after: 1,
        mark_reason: None,
        marked_at: None,
        touched_at: None,
        lost_at: None,
        loss_noticed: false,
    }
}

async fn add_worker(db: &Database) -> WorkerId {
    let id = WorkerId::new();
    let (incarnation, session, sequence, reported) = (1, 1, 1, 0);
    add(db, vec![worker::Model { worker_id: id.uuid(), incarnation, session, sequence, reported }]).await;
    id
}

/// Adds `count` rows of each kind of garbage:
///
/// - artifacts of ended and overdue builds, of caches, and without owners
/// - deleted artifacts
/// - volumes of attempts and transfers
/// - workloads, log entries and losses that can be forgotten
async fn fill(db: &Database, count: usize) {
    db.write(|txn| async move { store_life::mint(&txn).await }).await.expect("minted");
    let worker = add_worker(db).await;
    let (mut artifacts, mut volumes, mut owners, mut tombstones) = (vec![], vec![], vec![], vec![]);
    let (mut builds, mut holders, mut attempts, mut containers) = (vec![], vec![], vec![], vec![]);
    let (mut resource_caches, mut task_caches, mut uses, mut deletions) = (vec![], vec![], vec![], vec![]);
    for number in 0..count {
        let workload = WorkloadId::new().uuid();
        holders.push(holder::Model {
            holder_id: workload,
            team: TEAM.to_owned(),
            created_at: 1,
            settled_at: Some(2),
            settlement: None,
            due_at: 3,
        });
        // Every other row of a batch gets another next check.
        let own = artifact(ArtifactState::Sealed, None);
        let build = build::Model {
            build_id: BuildId::new().uuid(),
            team: TEAM.to_owned(),
            job: None,
            number: None,
            ends_with: None,
            keep: 0,
            term: Some(1),
            term_ends_at: Some(2),
            bound: false,
            status: (number % 2 == 0).then_some(BuildStatus::Succeeded),
            ended_at: (number % 2 == 0).then_some(2),
            kept_until: (number % 2 == 0).then_some(2),
            created_at: 1,
            due_at: Some(3),
        };
        owners.push(owner::Model { artifact_id: own.artifact_id, build_id: build.build_id });
        volumes.push(replica(&own, worker));
        builds.push(build);
        artifacts.push(own);

        let cached = artifact(ArtifactState::Sealed, None);
        let cache = CacheId::new().uuid();
        resource_caches.push(resource_cache::Model {
            cache_id: cache,
            scope: TEAM.to_owned(),
            key_digest: cache.as_bytes().to_vec(),
            resource_type: "type".to_owned(),
            version: "1".to_owned(),
            params: String::new(),
            team: TEAM.to_owned(),
            claim_id: Uuid::new_v4(),
            claimed_until: None,
            artifact_id: Some(cached.artifact_id),
            last_used: 1,
            created_at: 1,
            due_at: 3,
        });
        uses.push(cache_use::Model { cache_id: cache, user_kind: UserKind::Workload, user_id: workload });
        artifacts.push(cached);
        let cached = artifact(ArtifactState::Sealed, None);
        task_caches.push(task_cache::Model {
            cache_id: CacheId::new().uuid(),
            team: TEAM.to_owned(),
            job: "job".to_owned(),
            step: "step".to_owned(),
            path: format!("path {number}"),
            artifact_id: Some(cached.artifact_id),
            ttl: 0,
            last_used: 1,
            created_at: 1,
            due_at: 3,
        });
        artifacts.push(cached);

        let old = artifact(ArtifactState::Open, Some(3));
        volumes.push(volume::Model {
            state: State::Creating,
            complete: false,
            claimed_until: Some(2),
            transfer_id: Some(Uuid::new_v4()),
            ..replica(&old, worker)
        });
        artifacts.push(artifact::Model { had_owner: false, ..old });
        let deleted = artifact(ArtifactState::Deleting, None);
        tombstones.push(tombstone::Model { artifact_id: deleted.artifact_id, due_at: 3 });
        // Some replicas are left.
        volumes.extend((number % 2 == 0).then(|| replica(&deleted, worker)));
        artifacts.push(deleted);
        let lost = artifact(ArtifactState::Sealed, None);
        volumes.push(volume::Model { state: State::Lost, lost_at: Some(2), ..replica(&lost, worker) });
        artifacts.push(lost);

        let attempt = Uuid::now_v7();
        attempts.push(attempt::Model {
            attempt_id: attempt,
            holder_id: workload,
            worker_id: Some(worker.uuid()),
            ended_at: Some(2),
            due_at: Some(3),
        });
        volumes.push(volume::Model {
            state: State::Created,
            attempt_id: Some(attempt),
            ..new_volume(VolumeHandle::new(), worker, Purpose::Input, 1, Timestamp(1))
        });
        let made = container(attempt, workload, worker);
        // An attempt without remains, and an active one whose container is lost.
        let (empty, going_on) = (Uuid::now_v7(), Uuid::now_v7());
        let other = |attempt_id, ended_at: Option<i64>| attempt::Model {
            attempt_id,
            holder_id: workload,
            worker_id: Some(worker.uuid()),
            ended_at,
            due_at: ended_at.map(|_| 3),
        };
        attempts.extend([other(empty, Some(2)), other(going_on, None)]);
        containers.push(container::Model {
            handle: Uuid::now_v7(),
            attempt_id: going_on,
            state: State::Lost,
            lost_at: Some(2),
            ..made.clone()
        });
        containers.push(made);
        deletions.push(deletion::Model {
            id: Uuid::new_v4(),
            kind: DeletionKind::Volume,
            team: None,
            label: String::new(),
            mark_reason: None,
            marked_at: None,
            gone_at: 1,
            due_at: 3,
        });
    }
    add(db, holders).await;
    add(db, builds).await;
    add(db, artifacts).await;
    add(db, owners).await;
    add(db, tombstones).await;
    add(db, attempts).await;
    add(db, volumes).await;
    add(db, containers).await;
    add(db, resource_caches).await;
    add(db, task_caches).await;
    add(db, uses).await;
    add(db, deletions).await;
}

/// Runs rounds until nothing is due. Returns their statements, and the number of marked items.
async fn rounds(connection: &DatabaseConnection, asked: &StatementLog) -> (Vec<String>, usize) {
    let mut marked = 0;
    // Several rounds, because steps leave work to the next round, and new losses are forgotten
    // later.
    for _ in 0..3 {
        for step in Step::ALL {
            while step.is_due(connection, &settings()).await.expect("asked") {
                let txn = connection.begin().await.expect("a transaction");
                let batch = step.run(&txn, &settings()).await.expect("run");
                txn.commit().await.expect("committed");
                marked += batch.collected.len();
                if !batch.checked {
                    break;
                }
            }
        }
    }
    (asked.take(), marked)
}

#[tokio::test(flavor = "multi_thread")]
async fn round_statements_do_not_depend_on_rows_on_sqlite() {
    round_statements_do_not_depend_on_rows(databases::sqlite(), databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn round_statements_do_not_depend_on_rows_on_postgres() {
    let (few, many) = (databases::postgres().await, databases::postgres().await);
    round_statements_do_not_depend_on_rows(few, many).await;
}

async fn round_statements_do_not_depend_on_rows(few: TestDatabase, many: TestDatabase) {
    let mut runs = Vec::new();
    for (database, count) in [(few, FEW), (many, MANY)] {
        let db = Database::connect::<Schema>(&database.url).await.expect("a database");
        fill(&db, count).await;
        let asked = StatementLog::default();
        let connection = asked.connect(&database.url).await;
        let (by_rounds, marked) = rounds(&connection, &asked).await;
        connection.close().await.expect("closed");
        assert!(marked >= 8 * count, "{marked} of {count} of each were marked");
        runs.push(by_rounds);
    }
    let [few, many]: [Vec<String>; 2] = runs.try_into().expect("two");
    let texts = |asked: &[String]| asked.iter().cloned().collect::<BTreeSet<_>>();
    let (of_few, of_many) = (texts(&few), texts(&many));
    let other: Vec<_> = of_few.symmetric_difference(&of_many).collect();
    assert!(other.is_empty(), "the statements of a round depend on the number of rows: {other:#?}");
    assert_eq!(few.len(), many.len(), "a round takes more statements for more rows");
    assert!(!few.is_empty());
    eprintln!("{} statements, {} texts, of {FEW} and {MANY} of each", few.len(), of_few.len());
}
