//! Tests of races between a transaction that adds a reference and one that marks its target.
//!
//! One transaction waits in its middle while the other runs. Each kind of reference is tried in
//! both orders on PostgreSQL.
//!
//! A second run removes the locks: a proxy between the store and its database blanks every `FOR
//! SHARE` and `FOR UPDATE`. It must fail. Otherwise the tests would prove nothing about the locks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use db::Database;
use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{
    ArtifactId, AttemptId, BuildId, CacheId, ClaimId, Digest, GatewayInstance, Timestamp, TransferId,
    VolumeHandle, WorkerId, WorkloadId,
};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement, Value};
use testing::databases::{self, TestDatabase};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::artifacts::replicas::{self, Plan};
use crate::artifacts::restore::{self, KeptBy};
use crate::builds::NewBuild;
use crate::caches::resource_caches::{self, CacheOutcome, CacheRequest, CacheUser};
use crate::caches::task_caches::{self, TaskCacheKey};
use crate::db::entity::{BuildStatus, Purpose};
use crate::db::migrations::Schema;
use crate::gc::{self, Settings};
use crate::inventory::sweep;
use crate::inventory::{self, orphans};
use crate::inventory::{AttemptNeeds, NeededVolume, VolumeSource};
use crate::pins::{self, PinRequest, Settlement};
use crate::policy::garbage::Policy;
use crate::{artifacts, builds};

const TEAM: &str = "main";
const PATIENCE: Duration = Duration::from_secs(60);
/// Long after all rows were created.
const NOW: Timestamp = Timestamp(1_000_000_000_000_000);

/// Kind of a reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reference {
    Pin,
    Owner,
    Adoption,
    ChildVolume,
    ResourceCache,
    TaskCache,
    /// A transfer that copies the artifact to another worker.
    Copy,
    Undeletion,
    /// The adoption of an orphan as a replica.
    ReplicaOrphaned,
    ResourceCacheUse,
    TaskCacheUse,
}

/// References to artifacts.
const OF_ARTIFACTS: [Reference; 9] = [
    Reference::Pin,
    Reference::Owner,
    Reference::Adoption,
    Reference::ChildVolume,
    Reference::ResourceCache,
    Reference::TaskCache,
    Reference::Copy,
    Reference::Undeletion,
    Reference::ReplicaOrphaned,
];

impl Reference {
    /// Returns whether the reference removes an earlier mark.
    fn takes_back(self) -> bool {
        matches!(self, Self::Undeletion | Self::ReplicaOrphaned)
    }
}

/// Step that marks or deletes the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marker {
    /// Step of artifacts that are due.
    Artifacts,
    /// Step of builds that have let go.
    Builds,
    /// Step of resource caches that are due.
    ResourceCaches,
    /// Step of task caches that are due.
    TaskCaches,
}

/// Returns every reference with each step that may mark its target.
fn pairs() -> impl Iterator<Item = (Reference, Marker)> {
    const OF_CACHES: [(Reference, Marker); 2] = [
        (Reference::ResourceCacheUse, Marker::ResourceCaches),
        (Reference::TaskCacheUse, Marker::TaskCaches),
    ];
    let of_artifacts = OF_ARTIFACTS
        .into_iter()
        .flat_map(|reference| [Marker::Artifacts, Marker::Builds].map(|marker| (reference, marker)));
    of_artifacts.chain(OF_CACHES)
}

/// An artifact without references, with its replica, and a build that may own it. If the step
/// checks caches, an unused cache owns it.
struct Target {
    marker: Marker,
    artifact: ArtifactId,
    digest: Digest,
    build: BuildId,
    claims: SessionClaims,
    /// A worker without a replica, with an orphaned volume of the artifact's bytes.
    elsewhere: WorkerId,
    orphan: VolumeHandle,
}

#[derive(Debug, thiserror::Error)]
enum PartyError {
    #[error("refused")]
    Refused,
    #[error(transparent)]
    Database(#[from] DbErr),
}

/// Runs a statement with the values `$1` and following.
async fn execute(db: &Database, sql: &str, values: Vec<Value>) {
    db.write(|txn| {
        let statement = Statement::from_sql_and_values(txn.get_database_backend(), sql, values.clone());
        async move { txn.execute_raw(statement).await.map(drop) }
    })
    .await
    .expect("written");
}

async fn count(db: &Database, sql: &str, values: Vec<Value>) -> i64 {
    let statement = Statement::from_sql_and_values(db.read().get_database_backend(), sql, values);
    let row = db.read().query_one_raw(statement).await.expect("asked").expect("a row");
    row.try_get("", "n").expect("a number")
}

impl Target {
    async fn new(db: &Database, marker: Marker) -> Self {
        let (artifact, build, worker) = (ArtifactId::new(), BuildId::new(), WorkerId::new());
        let digest = artifact.uuid().as_bytes().repeat(2);
        let digest = Digest::try_from(&digest[..]).expect("32 bytes");
        let (elsewhere, orphan) = (WorkerId::new(), VolumeHandle::new());
        for worker in [worker, elsewhere] {
            execute(db, "INSERT INTO workers VALUES ($1, 1, 1, 1, 0)", vec![worker.uuid().into()]).await;
        }
        execute(
            db,
            "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, digest, size_bytes, had_owner, created_at, due_at)
             VALUES ($1, $1, 'main', '', 'sealed', $2, 0, FALSE, 0, 0)",
            vec![artifact.uuid().into(), digest.as_bytes().to_vec().into()],
        )
        .await;
        execute(
            db,
            "INSERT INTO volumes (handle, worker_id, state, purpose, artifact_id, complete, digest, size_bytes, verified, created_at, judged_after)
             VALUES ($1, $2, 'created', 'replica', $3, TRUE, $4, 0, TRUE, 0, 0)",
            vec![VolumeHandle::new().uuid().into(), worker.uuid().into(), artifact.uuid().into(), digest.as_bytes().to_vec().into()],
        )
        .await;
        execute(
            db,
            "INSERT INTO orphans (handle, kind, worker_id, first_seen_at, judged_after, described, team, artifact_id, digest, size_bytes)
             VALUES ($1, 'volume', $2, 0, 0, TRUE, 'main', $3, $4, 0)",
            vec![orphan.uuid().into(), elsewhere.uuid().into(), artifact.uuid().into(), digest.as_bytes().to_vec().into()],
        )
        .await;
        execute(
            db,
            "INSERT INTO builds (build_id, team, keep, bound, created_at) VALUES ($1, 'main', 0, FALSE, 0)",
            vec![build.uuid().into()],
        )
        .await;
        match marker {
            Marker::Artifacts => {}
            Marker::Builds => {
                // The artifact is due only through its build.
                let ended = BuildId::new();
                execute(
                    db,
                    "INSERT INTO builds (build_id, team, keep, bound, status, ended_at, kept_until, created_at, due_at)
                     VALUES ($1, 'main', 0, FALSE, 'succeeded', 0, 0, 0, 0)",
                    vec![ended.uuid().into()],
                )
                .await;
                let owned = vec![artifact.uuid().into(), ended.uuid().into()];
                execute(db, "INSERT INTO owners (artifact_id, build_id) VALUES ($1, $2)", owned).await;
                let told = "UPDATE artifacts SET had_owner = TRUE, due_at = NULL WHERE artifact_id = $1";
                execute(db, told, vec![artifact.uuid().into()]).await;
            }
            Marker::ResourceCaches => {
                execute(
                    db,
                    "INSERT INTO resource_caches (cache_id, scope, key_digest, resource_type, version, params, team, claim_id, artifact_id, last_used, created_at, due_at)
                     VALUES ($1, 'main', $2, '', '', '', 'main', $1, $1, 0, 0, 0)",
                    vec![artifact.uuid().into(), digest.as_bytes().to_vec().into()],
                )
                .await;
            }
            Marker::TaskCaches => {
                execute(
                    db,
                    "INSERT INTO task_caches (cache_id, team, job, step, path, artifact_id, ttl, last_used, created_at, due_at)
                     VALUES ($1, 'main', $2, 'step', 'path', $1, 0, 0, 0, 0)",
                    vec![artifact.uuid().into(), artifact.to_string().into()],
                )
                .await;
            }
        }
        let claims = SessionClaims {
            worker,
            incarnation: Incarnation(1),
            session: Session(1),
            instance: GatewayInstance::new(),
        };
        Self { marker, artifact, digest, build, claims, elsewhere, orphan }
    }

    /// Returns the cache that owns the artifact, which has the same id.
    fn cache(&self) -> CacheId {
        CacheId::from_uuid(self.artifact.uuid())
    }

    /// Adds the reference.
    async fn refer(&self, txn: &DatabaseTransaction, reference: Reference) -> Result<(), PartyError> {
        let refused = match reference {
            Reference::Pin => {
                let used = PinRequest {
                    holder: WorkloadId::new(),
                    team: TEAM.to_owned(),
                    artifacts: vec![self.artifact],
                    build: None,
                    task_caches: Vec::new(),
                };
                pins::pin(txn, &used, NOW).await.is_err()
            }
            Reference::Owner => builds::own(txn, TEAM, &[self.artifact], self.build).await.is_err(),
            Reference::Adoption => {
                let adopted = artifacts::adopt_by_digest(
                    txn,
                    TEAM,
                    self.digest,
                    Some(self.build),
                    &[],
                    NOW,
                    &settings().policy,
                )
                .await;
                adopted.is_ok_and(|adopted| adopted.is_none())
            }
            Reference::ChildVolume => {
                let needs = AttemptNeeds {
                    holder: WorkloadId::new(),
                    attempt: AttemptId::new(),
                    team: TEAM.to_owned(),
                    volumes: vec![NeededVolume {
                        name: "in".to_owned(),
                        purpose: Purpose::Input,
                        from: Some(VolumeSource::Artifact(self.artifact)),
                        output: None,
                    }],
                    unreachable: HashSet::new(),
                };
                inventory::prepare(txn, &self.claims, &needs, NOW).await.is_err()
            }
            Reference::ResourceCache => {
                let cache_request = CacheRequest {
                    team: TEAM.to_owned(),
                    shared: false,
                    key: self.digest,
                    claim: ClaimId::new(),
                    resource_type: String::new(),
                    version: String::new(),
                    params: String::new(),
                    user: None,
                };
                let found = resource_caches::find_or_create(txn, &cache_request, NOW, PATIENCE)
                    .await
                    .expect("it is to be made");
                assert!(matches!(found.1, CacheOutcome::Claimed), "{found:?}");
                resource_caches::put(txn, TEAM, cache_request.claim, self.artifact, NOW, PATIENCE)
                    .await
                    .is_err()
            }
            Reference::TaskCache => {
                let key = TaskCacheKey {
                    team: TEAM.to_owned(),
                    job: self.artifact.to_string(),
                    step: "step".to_owned(),
                    path: "path".to_owned(),
                };
                let (cache, _) = task_caches::find_or_create(txn, &key, PATIENCE, NOW).await?;
                task_caches::publish(txn, TEAM, cache, self.artifact, NOW).await.is_err()
            }
            Reference::Copy => {
                let plan = Plan {
                    team: TEAM.to_owned(),
                    artifact: self.artifact,
                    worker: self.elsewhere,
                    transfer: TransferId::new(),
                };
                replicas::plan(txn, &plan, NOW, PATIENCE).await.is_err()
            }
            Reference::Undeletion => {
                let kept_by = KeptBy::Build(self.build);
                restore::undelete(txn, TEAM, self.artifact, kept_by, NOW).await.is_err()
            }
            Reference::ReplicaOrphaned => {
                let adoption = orphans::Adoption {
                    team: TEAM.to_owned(),
                    volume: self.orphan,
                    worker: Some(self.elsewhere),
                    artifact: None,
                    kept_by: KeptBy::Build(self.build),
                };
                orphans::adopt(txn, &adoption, NOW).await.is_err()
            }
            Reference::ResourceCacheUse => {
                let user = CacheUser::Workload(WorkloadId::new());
                resource_caches::use_cache(txn, TEAM, self.cache(), user, NOW).await.is_err()
            }
            Reference::TaskCacheUse => {
                let holder = WorkloadId::new();
                crate::holders::lock(txn, holder, TEAM, NOW).await.expect("no other has it");
                task_caches::use_caches(txn, TEAM, holder, &[self.cache()], NOW).await.is_err()
            }
        };
        if refused { Err(PartyError::Refused) } else { Ok(()) }
    }

    /// Returns whether the artifact is marked, or the cache deleted.
    async fn is_marked(&self, db: &Database) -> bool {
        let sql = match self.marker {
            Marker::Artifacts | Marker::Builds => {
                "SELECT COUNT(*) AS n FROM artifacts WHERE artifact_id = $1 AND state = 'deleting'"
            }
            Marker::ResourceCaches => "SELECT 1 - COUNT(*) AS n FROM resource_caches WHERE cache_id = $1",
            Marker::TaskCaches => "SELECT 1 - COUNT(*) AS n FROM task_caches WHERE cache_id = $1",
        };
        count(db, sql, vec![self.artifact.uuid().into()]).await == 1
    }

    async fn is_used(&self, db: &Database) -> bool {
        let sql = match self.marker {
            Marker::Artifacts | Marker::Builds => {
                "SELECT (SELECT COUNT(*) FROM pins WHERE artifact_id = $1)
                      + (SELECT COUNT(*) FROM owners WHERE artifact_id = $1)
                      + (SELECT COUNT(*) FROM volumes WHERE from_artifact_id = $1)
                      + (SELECT COUNT(*) FROM volumes WHERE artifact_id = $1 AND state = 'creating')
                      + (SELECT COUNT(*) FROM resource_caches WHERE artifact_id = $1)
                      + (SELECT COUNT(*) FROM task_caches WHERE artifact_id = $1) AS n"
            }
            Marker::ResourceCaches => "SELECT COUNT(*) AS n FROM cache_uses WHERE cache_id = $1",
            Marker::TaskCaches => "SELECT COUNT(*) AS n FROM task_cache_uses WHERE cache_id = $1",
        };
        count(db, sql, vec![self.artifact.uuid().into()]).await > 0
    }
}

/// One of two transactions. It runs its part, reports that, and commits after it gets permission.
#[derive(Clone, Default)]
struct Party {
    reached: Arc<Notify>,
    go: Arc<Notify>,
}

impl Party {
    async fn run<F>(
        self,
        db: Database,
        part: impl Fn(db::Transaction) -> F + Send + Sync,
    ) -> Result<(), PartyError>
    where
        F: Future<Output = Result<(), PartyError>> + Send,
    {
        db.write(|txn| {
            let done = part(txn);
            async {
                done.await?;
                self.reached.notify_one();
                self.go.notified().await;
                Ok(())
            }
        })
        .await
    }
}

/// Waits until `party` has run its part, or is blocked by the other one.
async fn reached_or_held_up(party: &Party, watching: &Database) {
    let held_up = async {
        let sql = "SELECT COUNT(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        while count(watching, sql, Vec::new()).await == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let either = async {
        tokio::select! {
            () = party.reached.notified() => {}
            () = held_up => {}
        }
    };
    tokio::time::timeout(PATIENCE, either).await.expect("it goes on, or waits for a lock");
}

/// Settings that mark everything without references at once.
fn settings() -> Settings {
    let forever = Duration::MAX;
    Settings {
        now: NOW,
        policy: Policy { unowned_ttl: Duration::ZERO, gc_grace: Duration::ZERO, needs_space: false },
        tombstone: forever,
        remember: forever,
        resource_cache_ttl: Duration::ZERO,
        lost_grace: forever,
        batch: 500,
    }
}

/// Runs a reference and a mark of its target, so that the first waits in its middle for the second.
/// Returns whether the target is marked, and whether it is used.
async fn interleave(
    watching: &Database,
    working: &Database,
    reference: Reference,
    marker: Marker,
    mark_first: bool,
) -> (bool, bool) {
    let target = Arc::new(Target::new(watching, marker).await);
    let settings = settings();
    let (refers, marks) = (Party::default(), Party::default());
    let mut both = JoinSet::new();
    let refer = |both: &mut JoinSet<_>| {
        let (target, party, db) = (target.clone(), refers.clone(), working.clone());
        both.spawn(async move {
            let part = |txn: db::Transaction| {
                let target = target.clone();
                async move { target.refer(&txn, reference).await }
            };
            // A rejection means that it was too late.
            _ = party.run(db, part).await;
        });
    };
    let mark = |both: &mut JoinSet<_>| {
        let (party, db) = (marks.clone(), working.clone());
        both.spawn(async move {
            let part = |txn: db::Transaction| async move {
                match marker {
                    Marker::Artifacts => gc::steps::artifacts::check_due(&txn, &settings).await?,
                    Marker::Builds => gc::steps::builds::check_due(&txn, &settings).await?,
                    Marker::ResourceCaches => {
                        gc::steps::caches::check_resource_caches(&txn, &settings).await?
                    }
                    Marker::TaskCaches => gc::steps::caches::check_task_caches(&txn, &settings).await?,
                };
                Ok(())
            };
            party.run(db, part).await.expect("marked what it could");
        });
    };
    let (first, second) = if mark_first { (&marks, &refers) } else { (&refers, &marks) };
    if mark_first {
        mark(&mut both)
    } else {
        refer(&mut both)
    }
    tokio::time::timeout(PATIENCE, first.reached.notified()).await.expect("nothing holds the first up");
    if mark_first {
        refer(&mut both)
    } else {
        mark(&mut both)
    }
    reached_or_held_up(second, watching).await;
    first.go.notify_one();
    second.go.notify_one();
    both.join_all().await;
    (target.is_marked(watching).await, target.is_used(watching).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn references_and_marks_exclude_each_other() {
    let database = databases::postgres().await;
    let db = Database::connect::<Schema>(&database.url).await.expect("the database");
    for (reference, marker) in pairs() {
        let kept = interleave(&db, &db, reference, marker, false).await;
        assert_eq!(kept, (false, true), "{reference:?}, and a mark {marker:?} while it goes on");
        let gone = interleave(&db, &db, reference, marker, true).await;
        let expected = if reference.takes_back() { (false, true) } else { (true, false) };
        assert_eq!(gone, expected, "{reference:?} while a mark {marker:?} goes on");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn artifact_of_late_renewed_build_is_not_marked() {
    let database = databases::postgres().await;
    let db = Database::connect::<Schema>(&database.url).await.expect("the database");
    let target = Target::new(&db, Marker::Builds).await;
    let overdue =
        "UPDATE builds SET ends_with = build_id, term = 1, term_ends_at = 1, due_at = 1 WHERE build_id = $1";
    execute(&db, overdue, vec![target.build.uuid().into()]).await;
    let owned = vec![target.artifact.uuid().into(), target.build.uuid().into()];
    execute(&db, "INSERT INTO owners (artifact_id, build_id) VALUES ($1, $2)", owned).await;

    let renews = Party::default();
    let mut renewal = JoinSet::new();
    let (party, renewing, build) = (renews.clone(), db.clone(), target.build);
    renewal.spawn(async move {
        let part = |txn: db::Transaction| async move {
            let sql = "UPDATE builds SET term_ends_at = $1, due_at = $1 WHERE build_id = $2";
            let values = [(NOW + PATIENCE).0.into(), build.uuid().into()];
            txn.execute_raw(Statement::from_sql_and_values(txn.get_database_backend(), sql, values)).await?;
            Ok(())
        };
        party.run(renewing, part).await.expect("renewed");
    });
    tokio::time::timeout(PATIENCE, renews.reached.notified()).await.expect("nothing holds it up");
    let settings = settings();
    db.write(|txn| async move { gc::steps::builds::check_due(&txn, &settings).await.map(drop) })
        .await
        .expect("checked");
    renews.go.notify_one();
    renewal.join_all().await;
    assert!(target.is_used(&db).await && !target.is_marked(&db).await);
}

/// The unknown workload of a new build is settled at the same moment.
#[tokio::test(flavor = "multi_thread")]
async fn build_ends_when_its_workload_settles_concurrently() {
    let database = databases::postgres().await;
    let db = Database::connect::<Schema>(&database.url).await.expect("the database");
    for build_is_first in [true, false] {
        let (build, workload) = (BuildId::new(), WorkloadId::new());
        let new = NewBuild {
            id: build,
            team: TEAM.to_owned(),
            job: None,
            ends_with: Some(workload),
            keep: Duration::ZERO,
            term: Some(PATIENCE),
            ended: None,
        };
        let settlement = Settlement {
            holder: workload,
            team: TEAM.to_owned(),
            attempt: None,
            digest: Digest([0; 32]),
            outputs: vec![],
            build: None,
            status: BuildStatus::Succeeded,
        };
        let (puts, settles) = (Party::default(), Party::default());
        let mut both = JoinSet::new();
        let put = |both: &mut JoinSet<_>| {
            let (new, party, db) = (new.clone(), puts.clone(), db.clone());
            both.spawn(async move {
                let part = |txn: db::Transaction| {
                    let new = new.clone();
                    async move { builds::put_build(&txn, &new, NOW).await.map_err(|_| PartyError::Refused) }
                };
                // A rejection means that it was too late.
                _ = party.run(db, part).await;
            });
        };
        let settle = |both: &mut JoinSet<_>| {
            let (settlement, party, db) = (settlement.clone(), settles.clone(), db.clone());
            both.spawn(async move {
                let part = |txn: db::Transaction| {
                    let settlement = settlement.clone();
                    async move {
                        let settled = pins::settle(&txn, &settlement, NOW, PATIENCE).await;
                        settled.map(drop).map_err(|_| PartyError::Refused)
                    }
                };
                party.run(db, part).await.expect("settled");
            });
        };
        let (first, second) = if build_is_first { (&puts, &settles) } else { (&settles, &puts) };
        if build_is_first {
            put(&mut both)
        } else {
            settle(&mut both)
        }
        tokio::time::timeout(PATIENCE, first.reached.notified()).await.expect("nothing holds it up");
        if build_is_first {
            settle(&mut both)
        } else {
            put(&mut both)
        }
        reached_or_held_up(second, &db).await;
        first.go.notify_one();
        second.go.notify_one();
        both.join_all().await;
        let live = "SELECT COUNT(*) AS n FROM builds WHERE build_id = $1 AND ended_at IS NULL";
        assert_eq!(count(&db, live, vec![build.uuid().into()]).await, 0, "{build_is_first}");
        let known = "SELECT COUNT(*) AS n FROM holders WHERE holder_id = $1 AND settled_at IS NOT NULL";
        assert_eq!(count(&db, known, vec![workload.uuid().into()]).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "slow, and checks the tests rather than the store: make full"]
async fn races_are_lost_without_locks() {
    let database = databases::postgres().await;
    let db = Database::connect::<Schema>(&database.url).await.expect("the database");
    let mut proxy = JoinSet::new();
    let unlocked = blank_locks(&database, &mut proxy).await;
    let unlocked = Database::connect::<Schema>(&unlocked).await.expect("the database, by the proxy");
    // The foreign key of a use also protects its cache, with an error that rolls back the whole
    // batch. This test is about locks only.
    for table in ["cache_uses", "task_cache_uses"] {
        let key = format!("ALTER TABLE {table} DROP CONSTRAINT {table}_cache_id_fkey");
        execute(&db, &key, Vec::new()).await;
    }
    for (reference, marker) in pairs() {
        for mark_first in [false, true] {
            let both = interleave(&db, &unlocked, reference, marker, mark_first).await;
            assert_eq!(
                both,
                (true, true),
                "{reference:?}, the mark {marker:?} first: {mark_first}: the locks do not separate them"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restoring_and_handing_out_exclude_each_other() {
    let database = databases::postgres().await;
    let db = Database::connect::<Schema>(&database.url).await.expect("the database");
    for undelete_first in [false, true] {
        let target = Arc::new(Target::new(&db, Marker::Artifacts).await);
        let id = || vec![target.artifact.uuid().into()];
        let artifact = "UPDATE artifacts SET state = 'deleting', marked_at = 0 WHERE artifact_id = $1";
        execute(&db, artifact, id()).await;
        let tombstone = "INSERT INTO tombstones (artifact_id, due_at) VALUES ($1, 0)";
        execute(&db, tombstone, id()).await;
        let mark = "INSERT INTO sweep_queue (worker_id, handle, marked_at) SELECT worker_id, handle, 0 FROM volumes WHERE artifact_id = $1";
        execute(&db, mark, id()).await;

        let (undeletes, hands_out) = (Party::default(), Party::default());
        let mut both = JoinSet::new();
        let mut begin = |is_undelete: bool| {
            let (target, db) = (target.clone(), db.clone());
            let party = if is_undelete { undeletes.clone() } else { hands_out.clone() };
            both.spawn(async move {
                let part = |txn: db::Transaction| {
                    let target = target.clone();
                    async move {
                        if is_undelete {
                            let kept_by = KeptBy::Reprieve(Duration::from_secs(1));
                            let undeleted =
                                restore::undelete(&txn, TEAM, target.artifact, kept_by, NOW).await;
                            undeleted.map_err(|_| PartyError::Refused)
                        } else {
                            sweep::hand_out(&txn, &target.claims).await.map_err(|_| PartyError::Refused)
                        }
                    }
                };
                // An undeletion that is rejected was too late.
                _ = party.run(db, part).await;
            });
        };
        let (first, second) =
            if undelete_first { (&undeletes, &hands_out) } else { (&hands_out, &undeletes) };
        begin(undelete_first);
        tokio::time::timeout(PATIENCE, first.reached.notified()).await.expect("nothing holds the first up");
        begin(!undelete_first);
        reached_or_held_up(second, &db).await;
        first.go.notify_one();
        second.go.notify_one();
        both.join_all().await;

        let told = "SELECT COUNT(*) AS n FROM volumes WHERE artifact_id = $1 AND state = 'sweeping'";
        let is_told = count(&db, told, id()).await == 1;
        assert_eq!(
            (target.is_marked(&db).await, is_told),
            (!undelete_first, !undelete_first),
            "the undeletion first: {undelete_first}"
        );
    }
}

/// Runs a proxy to a database that blanks the locks in every statement. Returns its URL.
async fn blank_locks(database: &TestDatabase, tasks: &mut JoinSet<()>) -> String {
    let (before, rest) = database.url.split_once('@').expect("a user");
    let (server, name) = rest.split_once('/').expect("a name");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let url = format!("{before}@127.0.0.1:{port}/{name}");
    let server = server.to_owned();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(&server).await.expect("the server answers");
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            connections.spawn(async move {
                // Either side may close the connection.
                tokio::io::copy(&mut from_server, &mut to_client).await.ok();
            });
            connections.spawn(async move {
                forward(&mut from_client, &mut to_server).await.ok();
            });
        }
    });
    url
}

/// Forwards messages of the PostgreSQL protocol. Messages before the start-up message have no type.
async fn forward(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
) -> std::io::Result<()> {
    const SSL_REQUEST: [u8; 4] = 80_877_103_u32.to_be_bytes();
    let mut started = false;
    loop {
        let kind = if started { Some(from.read_u8().await?) } else { None };
        let length = from.read_u32().await?;
        let mut body = vec![0; usize::try_from(length).unwrap_or(4).saturating_sub(4)];
        from.read_exact(&mut body).await?;
        started |= body[..] != SSL_REQUEST;
        if matches!(kind, Some(b'P' | b'Q')) {
            const SKIPPING: [&[u8]; 2] = [b" FOR UPDATE SKIP LOCKED", b" FOR SHARE SKIP LOCKED"];
            for lock in SKIPPING.into_iter().chain([&b" FOR UPDATE"[..], b" FOR SHARE"]) {
                while let Some(at) = body.windows(lock.len()).position(|window| window == lock) {
                    body[at..at + lock.len()].fill(b' ');
                }
            }
        }
        if let Some(kind) = kind {
            to.write_u8(kind).await?;
        }
        to.write_u32(length).await?;
        to.write_all(&body).await?;
        to.flush().await?;
    }
}
