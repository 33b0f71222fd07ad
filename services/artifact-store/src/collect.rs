//! The collector: finds candidates, gathers the facts, lets [`crate::mark`] judge them, and carries that out.
//!
//! A round is a sequence of steps, each in batches, each batch in one transaction: look for candidates, lock them (what others have locked is
//! in use, and skipped), gather the facts in a later statement, judge, write. Any number of replicas may run rounds at once; a round may
//! stop anywhere and be run again. A dry run is the same round in one transaction that is not committed.
//!
//! The order of the steps lets one round do all that can be done: what an attempt made goes before the artifacts it was made from, and
//! artifacts before their replicas.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use domain::{BuildId, Timestamp, VolumeHandle, WorkerId, WorkloadId};
use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, JoinType,
    QueryFilter, QuerySelect, QueryTrait, Statement, Value,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::entity::{ArtifactState, Purpose, State, artifact, attempt, build, container, owner, pin, volume};
use crate::mark::{
    self, ArtifactFacts, Belongs, ContainerFacts, OwnerFacts, Policy, Verdict, VolumeFacts, Why,
};
use crate::store::{Store, be_patient, micros, size};
use crate::{owners, sweep};

/// How many candidates are judged in one transaction.
const BATCH: i64 = 500;

/// One thing that was marked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Collected {
    pub(crate) kind: Kind,
    pub(crate) id: Uuid,
    pub(crate) why: Why,
    pub(crate) size_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Artifact,
    Volume,
    Container,
}

/// The settings of a round.
#[derive(Debug, Clone, Copy)]
struct Settings {
    policy: Policy,
    tombstone_micros: i64,
    remember_micros: i64,
}

/// Runs rounds until the store stops.
pub(crate) async fn collect_forever(store: Arc<Store>, stopping: CancellationToken) {
    // When the last round began that came to its end, and after how long nobody's silence proves anything.
    let mut looked = store.now();
    let blindness = Ord::max(store.config.claim_term, store.config.collect_interval * 3);
    loop {
        let pause = sweep::jittered(store.config.collect_interval);
        tokio::select! {
            () = stopping.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let now = store.now();
        let collected = async {
            if now.since(looked) > blindness {
                tracing::warn!("could not look for a while: transfers and builds get a full term");
                be_patient(&store.db, now, store.config.claim_term).await?;
            }
            round(&store, &stopping).await
        };
        let collected = collected.await;
        if collected.is_ok() {
            looked = now;
        }
        match collected {
            Ok(collected) if collected.is_empty() => {}
            Ok(collected) => {
                let size_bytes: u64 = collected.iter().map(|collected| collected.size_bytes).sum();
                tracing::info!(collected = collected.len(), size_bytes, "garbage marked");
            }
            Err(error) => tracing::warn!(error = %error, "cannot collect garbage just now"),
        }
    }
}

/// Marks what is garbage now, and tells the streams.
///
/// A round that is told to stop ends after the batch it is at.
pub(crate) async fn round(store: &Store, stopping: &CancellationToken) -> Result<Vec<Collected>, DbErr> {
    let (now, settings) = (store.now(), settings(store));
    let mut collected = Vec::new();
    for step in Step::ALL {
        let mut cursor = Uuid::nil();
        loop {
            let batch =
                store.db.write(|txn| async move { step.run(&txn, &settings, now, cursor).await }).await?;
            store.marks.wake(batch.workers);
            collected.extend(batch.collected);
            if stopping.is_cancelled() {
                return Ok(collected);
            }
            let Some(next) = batch.next else { break };
            cursor = next;
        }
    }
    Ok(collected)
}

/// What [`round`] would mark.
pub(crate) async fn dry_round(store: &Store) -> Result<Vec<Collected>, DbErr> {
    /// Carries the answer out of a transaction that must not be committed.
    #[derive(Debug, thiserror::Error)]
    enum Undone {
        #[error("a dry run is not committed")]
        Dry(Vec<Collected>),
        #[error("database failed while collecting garbage")]
        Database(#[from] DbErr),
    }

    let (now, settings) = (store.now(), settings(store));
    let undone = store
        .db
        .write(|txn| async move {
            let mut collected = Vec::new();
            for step in Step::ALL {
                let mut cursor = Uuid::nil();
                loop {
                    let batch = step.run(&txn, &settings, now, cursor).await?;
                    collected.extend(batch.collected);
                    let Some(next) = batch.next else { break };
                    cursor = next;
                }
            }
            Err::<(), _>(Undone::Dry(collected))
        })
        .await;
    match undone {
        Ok(()) => Ok(Vec::new()),
        Err(Undone::Dry(collected)) => Ok(collected),
        Err(Undone::Database(error)) => Err(error),
    }
}

fn settings(store: &Store) -> Settings {
    Settings {
        policy: Policy { unowned_ttl: store.config.unowned_ttl, gc_grace: store.config.gc_grace },
        tombstone_micros: micros(store.config.tombstone),
        remember_micros: micros(store.config.remember),
    }
}

/// The steps of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    EndBuilds,
    Containers,
    Volumes(Candidates),
    Artifacts(Candidates),
    Tombstones,
    Forget,
}

/// Which rows may be garbage. Broader than what is: [`mark`] decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Candidates {
    OfEndedAttempts,
    OfLostClaims,
    OfDeletedArtifacts,
    LetGo,
    NeverOwned,
}

/// What a batch did.
#[derive(Debug, Default)]
struct Batch {
    collected: Vec<Collected>,
    workers: Vec<WorkerId>,
    /// Where the next batch begins. `None`: that was the last.
    next: Option<Uuid>,
}

impl Step {
    const ALL: [Self; 9] = [
        Self::EndBuilds,
        Self::Containers,
        Self::Volumes(Candidates::OfEndedAttempts),
        Self::Volumes(Candidates::OfLostClaims),
        Self::Artifacts(Candidates::LetGo),
        Self::Artifacts(Candidates::NeverOwned),
        Self::Volumes(Candidates::OfDeletedArtifacts),
        Self::Tombstones,
        Self::Forget,
    ];

    async fn run(
        self,
        txn: &DatabaseTransaction,
        settings: &Settings,
        now: Timestamp,
        cursor: Uuid,
    ) -> Result<Batch, DbErr> {
        match self {
            Self::EndBuilds => {
                owners::end_overdue(txn, now).await?;
                Ok(Batch::default())
            }
            Self::Containers => containers(txn, settings, now, cursor).await,
            Self::Volumes(candidates) => volumes(txn, candidates, settings, now, cursor).await,
            Self::Artifacts(candidates) => artifacts(txn, candidates, settings, now, cursor).await,
            Self::Tombstones => tombstones(txn, settings, now).await,
            Self::Forget => forget(txn, settings, now).await,
        }
    }
}

#[derive(FromQueryResult)]
struct Id {
    id: Uuid,
}

/// The ids that `sql` selects as `id`.
async fn ids(
    conn: &impl ConnectionTrait,
    sql: &str,
    values: impl IntoIterator<Item = Value>,
) -> Result<Vec<Uuid>, DbErr> {
    let statement = Statement::from_sql_and_values(conn.get_database_backend(), sql, values);
    let ids = Id::find_by_statement(statement).all(conn).await?;
    Ok(ids.into_iter().map(|row| row.id).collect())
}

/// Where the next batch begins, if this one was full.
fn next(candidates: &[Uuid]) -> Option<Uuid> {
    let full = i64::try_from(candidates.len()).is_ok_and(|len| len >= BATCH);
    candidates.last().copied().filter(|_| full)
}

async fn containers(
    txn: &DatabaseTransaction,
    settings: &Settings,
    now: Timestamp,
    cursor: Uuid,
) -> Result<Batch, DbErr> {
    let candidates = ids(
        txn,
        "SELECT c.handle AS id FROM containers c JOIN attempts a ON a.attempt_id = c.attempt_id
         WHERE c.state NOT IN ('destroying', 'sweeping') AND c.handle > $1 AND a.ended_at <= $2
         ORDER BY c.handle LIMIT $3",
        [cursor.into(), (now - settings.policy.gc_grace).0.into(), BATCH.into()],
    )
    .await?;
    let of_candidates =
        || container::Entity::find().filter(container::Column::Handle.is_in(candidates.iter().copied()));
    if candidates.is_empty() {
        return Ok(Batch::default());
    }
    let workers = of_candidates().select_only().column(container::Column::WorkerId);
    sweep::lock_workers(txn, workers.into_query()).await?;
    let locked = of_candidates()
        .filter(container::Column::State.is_not_in(State::GARBAGE))
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let ended = ended_attempts(txn, locked.iter().map(|row| row.attempt_id)).await?;
    let mut batch = Batch { next: next(&candidates), ..Batch::default() };
    for row in &locked {
        let facts = ContainerFacts { attempt_ended_at: ended.get(&row.attempt_id).copied() };
        if let Verdict::Mark(why) = mark::container(&facts, now, &settings.policy) {
            batch.collected.push(Collected { kind: Kind::Container, id: row.handle, why, size_bytes: 0 });
        }
    }
    for (why, handles) in by_reason(&batch.collected) {
        batch.workers.extend(sweep::mark_containers(txn, &handles, why).await?);
    }
    Ok(batch)
}

/// When attempts ended, of those that have.
async fn ended_attempts(
    txn: &DatabaseTransaction,
    attempts: impl Iterator<Item = Uuid>,
) -> Result<HashMap<Uuid, Timestamp>, DbErr> {
    let attempts: HashSet<_> = attempts.collect();
    if attempts.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = attempt::Entity::find().filter(attempt::Column::AttemptId.is_in(attempts)).all(txn).await?;
    Ok(rows.into_iter().filter_map(|row| Some((row.attempt_id, Timestamp(row.ended_at?)))).collect())
}

fn by_reason(collected: &[Collected]) -> HashMap<Why, Vec<Uuid>> {
    let mut by_reason: HashMap<_, Vec<_>> = HashMap::new();
    for collected in collected {
        by_reason.entry(collected.why).or_default().push(collected.id);
    }
    by_reason
}

async fn volumes(
    txn: &DatabaseTransaction,
    candidates: Candidates,
    settings: &Settings,
    now: Timestamp,
    cursor: Uuid,
) -> Result<Batch, DbErr> {
    let candidates = match candidates {
        Candidates::OfEndedAttempts => {
            let sql = "SELECT v.handle AS id FROM volumes v JOIN attempts a ON a.attempt_id = v.attempt_id
                 WHERE v.purpose <> 'replica' AND v.state NOT IN ('destroying', 'sweeping')
                   AND v.handle > $1 AND a.ended_at <= $2
                 ORDER BY v.handle LIMIT $3";
            let ended_by = now - settings.policy.gc_grace;
            ids(txn, sql, [cursor.into(), ended_by.0.into(), BATCH.into()]).await?
        }
        Candidates::OfLostClaims => {
            let sql = "SELECT v.handle AS id FROM volumes v
                 WHERE v.complete = FALSE AND v.claimed_until IS NOT NULL AND v.claimed_until <= $2
                   AND v.state NOT IN ('destroying', 'sweeping') AND v.handle > $1
                 ORDER BY v.handle LIMIT $3";
            ids(txn, sql, [cursor.into(), now.0.into(), BATCH.into()]).await?
        }
        _ => {
            // Each batch takes the children whose own children are gone, and so makes its parents candidates: no cursor.
            let sql = "SELECT v.handle AS id FROM volumes v JOIN artifacts a ON a.artifact_id = v.artifact_id
                 WHERE a.state = 'deleting' AND v.purpose = 'replica'
                   AND v.state NOT IN ('destroying', 'sweeping')
                   AND NOT EXISTS (SELECT 1 FROM volumes c
                                   WHERE c.parent = v.handle AND c.state NOT IN ('destroying', 'sweeping'))
                 ORDER BY v.handle LIMIT $1";
            let candidates = ids(txn, sql, [BATCH.into()]).await?;
            let mut batch = mark_volumes(txn, &candidates, settings, now).await?;
            // As long as something is marked there may be more; what others have locked is left for the next round.
            batch.next = (!batch.collected.is_empty()).then_some(Uuid::nil());
            return Ok(batch);
        }
    };
    let mut batch = mark_volumes(txn, &candidates, settings, now).await?;
    batch.next = next(&candidates);
    Ok(batch)
}

async fn mark_volumes(
    txn: &DatabaseTransaction,
    candidates: &[Uuid],
    settings: &Settings,
    now: Timestamp,
) -> Result<Batch, DbErr> {
    if candidates.is_empty() {
        return Ok(Batch::default());
    }
    let of_candidates =
        || volume::Entity::find().filter(volume::Column::Handle.is_in(candidates.iter().copied()));
    let workers = of_candidates().select_only().column(volume::Column::WorkerId);
    sweep::lock_workers(txn, workers.into_query()).await?;
    let locked = of_candidates()
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let facts = volume_facts(txn, &locked).await?;
    let mut batch = Batch::default();
    for (row, facts) in locked.iter().zip(facts) {
        if let Verdict::Mark(why) = mark::volume(&facts, now, &settings.policy) {
            let size_bytes = size(row.size_bytes);
            batch.collected.push(Collected { kind: Kind::Volume, id: row.handle, why, size_bytes });
        }
    }
    for (why, handles) in by_reason(&batch.collected) {
        batch.workers.extend(sweep::mark_volumes(txn, &handles, why).await?);
    }
    Ok(batch)
}

/// What is known of volumes, in their order.
async fn volume_facts(txn: &DatabaseTransaction, rows: &[volume::Model]) -> Result<Vec<VolumeFacts>, DbErr> {
    // A replica may have very many children: one row for each parent.
    let with_children: Vec<Uuid> = volume::Entity::find()
        .select_only()
        .column(volume::Column::Parent)
        .distinct()
        .filter(volume::Column::Parent.is_in(rows.iter().map(|row| row.handle)))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .into_tuple()
        .all(txn)
        .await?;
    let with_children: HashSet<_> = with_children.into_iter().collect();
    let ended = ended_attempts(txn, rows.iter().filter_map(|row| row.attempt_id)).await?;
    let containers = container::Entity::find()
        .filter(container::Column::AttemptId.is_in(ended.keys().copied()))
        .filter(container::Column::State.is_not_in(State::GARBAGE))
        .all(txn)
        .await?;
    let with_container: HashSet<_> = containers.into_iter().map(|row| row.attempt_id).collect();
    let live_artifacts = artifact::Entity::find()
        .filter(artifact::Column::ArtifactId.is_in(rows.iter().filter_map(|row| row.artifact_id)))
        .filter(artifact::Column::State.ne(ArtifactState::Deleting))
        .all(txn)
        .await?;
    let live_artifacts: HashSet<_> = live_artifacts.into_iter().map(|row| row.artifact_id).collect();

    let facts = rows.iter().map(|row| VolumeFacts {
        has_live_child: with_children.contains(&row.handle),
        belongs: match row.purpose {
            Purpose::Replica => Belongs::ToArtifact {
                artifact_marked: row.artifact_id.is_none_or(|id| !live_artifacts.contains(&id)),
                claimed_until: row.claimed_until.filter(|_| !row.complete).map(Timestamp),
            },
            Purpose::Input | Purpose::Output | Purpose::Scratch => Belongs::ToAttempt {
                ended_at: row.attempt_id.and_then(|id| ended.get(&id).copied()),
                has_live_container: row.attempt_id.is_some_and(|id| with_container.contains(&id)),
            },
        },
    });
    Ok(facts.collect())
}

async fn artifacts(
    txn: &DatabaseTransaction,
    candidates: Candidates,
    settings: &Settings,
    now: Timestamp,
    cursor: Uuid,
) -> Result<Batch, DbErr> {
    let candidates = if candidates == Candidates::LetGo {
        let sql = "SELECT DISTINCT o.artifact_id AS id
             FROM builds b JOIN owners o ON o.build_id = b.build_id
             JOIN artifacts a ON a.artifact_id = o.artifact_id
             WHERE b.kept_until <= $2 AND a.state <> 'deleting' AND o.artifact_id > $1
             ORDER BY o.artifact_id LIMIT $3";
        ids(txn, sql, [cursor.into(), now.0.into(), BATCH.into()]).await?
    } else {
        let sql = "SELECT a.artifact_id AS id FROM artifacts a
             WHERE a.had_owner = FALSE AND a.state <> 'deleting' AND a.created_at <= $2 AND a.artifact_id > $1
             ORDER BY a.artifact_id LIMIT $3";
        let made_by = now - settings.policy.unowned_ttl;
        ids(txn, sql, [cursor.into(), made_by.0.into(), BATCH.into()]).await?
    };
    if candidates.is_empty() {
        return Ok(Batch::default());
    }
    let locked = artifact::Entity::find()
        .filter(artifact::Column::ArtifactId.is_in(candidates.iter().copied()))
        .filter(artifact::Column::State.ne(ArtifactState::Deleting))
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let facts = artifact_facts(txn, &locked).await?;
    let mut batch = Batch { next: next(&candidates), ..Batch::default() };
    for row in &locked {
        let Some(facts) = facts.get(&row.artifact_id) else { continue };
        if let Verdict::Mark(why) = mark::artifact(facts, now, &settings.policy) {
            let size_bytes = size(row.size_bytes);
            batch.collected.push(Collected { kind: Kind::Artifact, id: row.artifact_id, why, size_bytes });
        }
    }
    let kept: Vec<_> =
        facts.iter().filter(|(_, facts)| mark::has_live_owner(facts, now)).map(|(id, _)| *id).collect();
    forget_owners(txn, &kept, now).await?;
    for (why, ids) in by_reason(&batch.collected) {
        artifact::Entity::update_many()
            .col_expr(artifact::Column::State, Expr::value(ArtifactState::Deleting))
            .col_expr(artifact::Column::MarkedAt, Expr::value(now.0))
            .col_expr(artifact::Column::MarkedWhy, Expr::value(why.to_string()))
            .filter(artifact::Column::ArtifactId.is_in(ids))
            .filter(artifact::Column::State.ne(ArtifactState::Deleting))
            .exec(txn)
            .await?;
    }
    Ok(batch)
}

/// Forgets the owners that have let go of artifacts that others still own and that were locked. What is used again and again would
/// gather owners for ever. Who has lost its last owner keeps it: by that it is found.
async fn forget_owners(txn: &DatabaseTransaction, artifacts: &[Uuid], now: Timestamp) -> Result<(), DbErr> {
    if artifacts.is_empty() {
        return Ok(());
    }
    let let_go = build::Entity::find()
        .select_only()
        .column(build::Column::BuildId)
        .filter(build::Column::KeptUntil.lte(now.0));
    owner::Entity::delete_many()
        .filter(owner::Column::ArtifactId.is_in(artifacts.iter().copied()))
        .filter(owner::Column::BuildId.in_subquery(let_go.into_query()))
        .exec(txn)
        .await
        .map(|_| ())
}

/// What is known of artifacts, by their id.
pub(crate) async fn artifact_facts(
    conn: &impl ConnectionTrait,
    rows: &[artifact::Model],
) -> Result<HashMap<Uuid, ArtifactFacts>, DbErr> {
    if rows.is_empty() {
        return Ok(HashMap::new());
    }
    let ids = || rows.iter().map(|row| row.artifact_id);
    let mut facts: HashMap<_, _> = rows
        .iter()
        .map(|row| {
            let facts = ArtifactFacts {
                created_at: Timestamp(row.created_at),
                had_owner: row.had_owner,
                owners: Vec::new(),
                pinned_by: Vec::new(),
                used_by: Vec::new(),
            };
            (row.artifact_id, facts)
        })
        .collect();

    // Joined, for there may be more owners than a statement takes values.
    let owners: Vec<(Uuid, Uuid, Option<i64>)> = owner::Entity::find()
        .select_only()
        .column(owner::Column::ArtifactId)
        .column(owner::Column::BuildId)
        .column(build::Column::KeptUntil)
        .join(
            JoinType::InnerJoin,
            owner::Entity::belongs_to(build::Entity)
                .from(owner::Column::BuildId)
                .to(build::Column::BuildId)
                .into(),
        )
        .filter(owner::Column::ArtifactId.is_in(ids()))
        .into_tuple()
        .all(conn)
        .await?;
    for (artifact, build, kept_until) in owners {
        let Some(facts) = facts.get_mut(&artifact) else { continue };
        let kept_until = kept_until.map(Timestamp);
        facts.owners.push(OwnerFacts { build: BuildId::from_uuid(build), kept_until });
    }
    for pin in pin::Entity::find().filter(pin::Column::ArtifactId.is_in(ids())).all(conn).await? {
        if let Some(facts) = facts.get_mut(&pin.artifact_id) {
            facts.pinned_by.push(WorkloadId::from_uuid(pin.holder_id));
        }
    }
    let used = volume::Entity::find()
        .filter(volume::Column::FromArtifactId.is_in(ids()))
        .filter(volume::Column::Purpose.ne(Purpose::Replica))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .all(conn)
        .await?;
    for volume in used {
        if let Some(facts) = volume.from_artifact_id.and_then(|id| facts.get_mut(&id)) {
            facts.used_by.push(VolumeHandle::from_uuid(volume.handle));
        }
    }
    Ok(facts)
}

/// Removes artifacts that were marked long enough ago and have no volume left.
async fn tombstones(txn: &DatabaseTransaction, settings: &Settings, now: Timestamp) -> Result<Batch, DbErr> {
    let gone = ids(
        txn,
        "SELECT a.artifact_id AS id FROM artifacts a
         WHERE a.state = 'deleting' AND a.marked_at <= $1
           AND NOT EXISTS (SELECT 1 FROM volumes v
                           WHERE v.artifact_id = a.artifact_id AND v.purpose = 'replica')
         LIMIT $2",
        [now.0.saturating_sub(settings.tombstone_micros).into(), BATCH.into()],
    )
    .await?;
    if gone.is_empty() {
        return Ok(Batch::default());
    }
    owner::Entity::delete_many()
        .filter(owner::Column::ArtifactId.is_in(gone.iter().copied()))
        .exec(txn)
        .await?;
    artifact::Entity::delete_many()
        .filter(artifact::Column::ArtifactId.is_in(gone.iter().copied()))
        .filter(artifact::Column::State.eq(ArtifactState::Deleting))
        .exec(txn)
        .await?;
    Ok(Batch { next: next(&gone), ..Batch::default() })
}

/// Forgets builds, attempts and workloads that ended so long ago that no call about them is on its way any more.
async fn forget(txn: &DatabaseTransaction, settings: &Settings, now: Timestamp) -> Result<Batch, DbErr> {
    let long_ago = now.0.saturating_sub(settings.remember_micros);
    let statements = [
        "DELETE FROM builds WHERE build_id IN (
             SELECT b.build_id FROM builds b
             WHERE b.ended_at <= $1 AND b.kept_until <= $2
               AND NOT EXISTS (SELECT 1 FROM owners o WHERE o.build_id = b.build_id)
             LIMIT $3)",
        "DELETE FROM attempts WHERE attempt_id IN (
             SELECT a.attempt_id FROM attempts a
             WHERE a.ended_at <= $1 AND a.ended_at <= $2
               AND NOT EXISTS (SELECT 1 FROM containers c WHERE c.attempt_id = a.attempt_id)
               AND NOT EXISTS (SELECT 1 FROM volumes v
                               WHERE v.attempt_id = a.attempt_id AND v.purpose <> 'replica')
             LIMIT $3)",
        // One that goes on and pins nothing says nothing that its next call would not say again.
        "DELETE FROM holders WHERE holder_id IN (
             SELECT h.holder_id FROM holders h
             WHERE h.created_at <= $1 AND (h.settled_at IS NULL OR h.settled_at <= $1) AND h.created_at <= $2
               AND NOT EXISTS (SELECT 1 FROM pins p WHERE p.holder_id = h.holder_id)
               AND NOT EXISTS (SELECT 1 FROM builds b
                               WHERE b.ends_with = h.holder_id AND b.bound = TRUE AND b.ended_at IS NULL)
               AND NOT EXISTS (SELECT 1 FROM attempts a WHERE a.holder_id = h.holder_id)
             LIMIT $3)",
    ];
    let mut most = 0;
    for sql in statements {
        let values = [long_ago.into(), now.0.into(), BATCH.into()];
        let statement = Statement::from_sql_and_values(txn.get_database_backend(), sql, values);
        most = Ord::max(most, txn.execute_raw(statement).await?.rows_affected());
    }
    let more = i64::try_from(most).is_ok_and(|most| most >= BATCH);
    Ok(Batch { next: more.then_some(Uuid::nil()), ..Batch::default() })
}
