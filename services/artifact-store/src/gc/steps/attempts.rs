//! The step of attempts: marks containers and volumes of ended attempts, and forgets the attempts.

use std::collections::{BTreeMap, HashSet};

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::{LockBehavior, LockType};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QuerySelect, Statement, Value,
};
use uuid::Uuid;

use crate::db::entity::{Purpose, attempt, container, volume};
use crate::db::ids;
use crate::db::units::size;
use crate::gc::{Batch, CollectedItem, Kind, NextCheck, Settings, by_reason, lock_due, schedule_next};
use crate::marks::references::{self, VolumeRow};
use crate::marks::schedule::make_due;
use crate::marks::{self, LockWait};
use crate::policy::garbage::{self, ContainerFacts, Policy, Verdict};
use crate::policy::retention::REMAINS_RECHECK_INTERVAL;

/// Number of volumes judged at a time. An attempt may have thousands.
const VOLUMES: usize = 1000;

pub(in crate::gc) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    // Smaller batches, because the volumes of the attempts take the time.
    let some = Settings { batch: Ord::max(settings.batch / 8, 1), ..*settings };
    let rows = lock_due(txn, attempt::Entity::find(), &some).await?;
    judge(txn, settings, &rows).await
}

/// Most attempts that lose their grace period in one transaction.
const GIVEN_UP: usize = 500;

/// Marks what is left on a worker of ended attempts, because the worker needs disk space.
pub(in crate::gc) async fn give_up_ended(
    txn: &DatabaseTransaction,
    settings: &Settings,
    worker: WorkerId,
) -> Result<Batch, DbErr> {
    let settings = Settings { policy: Policy { needs_space: true, ..settings.policy }, ..*settings };
    let backend = txn.get_database_backend();
    let sql = format!(
        "SELECT a.attempt_id AS attempt_id FROM attempts a
         WHERE a.ended_at IS NOT NULL AND a.attempt_id IN (
             SELECT c.attempt_id FROM containers c
                 WHERE c.worker_id = $1 AND c.state NOT IN ('destroying', 'sweeping')
             UNION
             SELECT v.attempt_id FROM volumes v
                 WHERE v.worker_id = $1 AND v.purpose <> 'replica' AND v.state NOT IN ('destroying', 'sweeping'))
         ORDER BY a.ended_at LIMIT {GIVEN_UP}"
    );
    let ended = Statement::from_sql_and_values(backend, sql, [worker.uuid().into()]);
    let ended = txn.query_all_raw(ended).await?;
    let ended: Vec<Uuid> = ended.iter().map(|row| row.try_get("", "attempt_id")).collect::<Result<_, _>>()?;
    let rows = attempt::Entity::find()
        .filter(ids::among(backend, "attempt_id", ended))
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    judge(txn, &settings, &rows).await
}

/// Judges the containers and volumes of locked attempts. Marks them, or sets the next checks of the
/// attempts.
async fn judge(
    txn: &DatabaseTransaction,
    settings: &Settings,
    rows: &[attempt::Model],
) -> Result<Batch, DbErr> {
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    let mut batch = Batch { checked: true, ..Batch::default() };
    let ids: Vec<_> = rows.iter().map(|row| row.attempt_id).collect();
    let mut checks = NextChecks::default();
    containers(txn, settings, &ids, &mut batch, &mut checks).await?;
    volumes(txn, settings, &ids, &mut batch, &mut checks).await?;

    let mut forgettable = Vec::new();
    let mut next = Vec::new();
    for row in rows {
        let forget_at = Timestamp(row.ended_at.unwrap_or_default()) + settings.remember;
        match checks.0.get(&row.attempt_id) {
            Some(look) => next.push((row.attempt_id, *look)),
            None if row.ended_at.is_none() => next.push((row.attempt_id, NextCheck::OnEvent)),
            None if forget_at > settings.now => next.push((row.attempt_id, NextCheck::At(forget_at))),
            None => forgettable.push(row.attempt_id),
        }
    }
    next.extend(forget(txn, settings, &forgettable).await?);
    schedule_next::<attempt::Entity>(txn, settings, &next).await?;
    Ok(batch)
}

/// Next checks of attempts with remains: the earliest of all remains.
#[derive(Default)]
struct NextChecks(BTreeMap<Uuid, NextCheck>);

impl NextChecks {
    fn add(&mut self, attempt: Uuid, look: NextCheck) {
        let sooner = |one, other| match (one, other) {
            (NextCheck::At(one), NextCheck::At(other)) => NextCheck::At(Ord::min(one, other)),
            (NextCheck::At(at), _) | (_, NextCheck::At(at)) => NextCheck::At(at),
            _ => NextCheck::Later,
        };
        self.0.entry(attempt).and_modify(|known| *known = sooner(*known, look)).or_insert(look);
    }
}

/// Containers of the attempts `IDS` that are not garbage.
const CONTAINERS_OF: &str =
    "FROM containers WHERE attempt_id IN (IDS) AND state NOT IN ('destroying', 'sweeping')";

/// Volumes of the attempts `IDS` that are not garbage.
const VOLUMES_OF: &str = "FROM volumes WHERE attempt_id IN (IDS) AND purpose <> 'replica' AND state NOT IN ('destroying', 'sweeping')";

/// Columns of a container that is judged.
#[derive(FromQueryResult)]
struct Container {
    handle: Uuid,
    attempt_id: Uuid,
    touched_at: Option<i64>,
}

async fn containers(
    txn: &DatabaseTransaction,
    settings: &Settings,
    attempts: &[Uuid],
    batch: &mut Batch,
    checks: &mut NextChecks,
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let of_attempts = CONTAINERS_OF.replace("IDS", &ids::query(backend, 1));
    let values = || [ids::value(backend, attempts.iter().copied())];
    marks::lock_workers(txn, &format!("SELECT worker_id {of_attempts}"), values(), LockWait::Block).await?;
    let lock = ids::lock(backend, " FOR UPDATE SKIP LOCKED");
    let sql = format!("SELECT handle, attempt_id, touched_at {of_attempts}{lock}");
    let locked = Statement::from_sql_and_values(backend, sql, values());
    let locked = Container::find_by_statement(locked).all(txn).await?;
    let ended = references::ended_attempts(txn, attempts.iter().copied()).await?;
    let mut collected = Vec::new();
    for row in &locked {
        let facts = ContainerFacts {
            attempt_ended_at: ended.get(&row.attempt_id).copied(),
            touched_at: row.touched_at.map(Timestamp),
        };
        match garbage::container(&facts, settings.now, &settings.policy) {
            Verdict::Mark(why) => {
                collected.push(CollectedItem { kind: Kind::Container, id: row.handle, why, size_bytes: 0 });
            }
            Verdict::Keep(look) => checks.add(row.attempt_id, look),
        }
    }
    for (why, handles) in by_reason(&collected) {
        batch
            .workers
            .extend(marks::mark_containers_of_locked_workers(txn, &handles, why, settings.now).await?);
    }
    batch.collected.extend(collected);
    // Containers that other transactions have locked are checked again.
    for attempt in attempts_of(txn, &of_attempts, values()).await? {
        if !checks.0.contains_key(&attempt) {
            checks.add(attempt, NextCheck::Later);
        }
    }
    Ok(())
}

/// Returns the attempts of rows.
async fn attempts_of(
    txn: &DatabaseTransaction,
    rows: &str,
    values: [Value; 1],
) -> Result<HashSet<Uuid>, DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!("SELECT DISTINCT attempt_id {rows}");
    let rows = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    rows.iter().map(|row| row.try_get("", "attempt_id")).collect()
}

async fn volumes(
    txn: &DatabaseTransaction,
    settings: &Settings,
    attempts: &[Uuid],
    batch: &mut Batch,
    checks: &mut NextChecks,
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let of_attempts = VOLUMES_OF.replace("IDS", &ids::query(backend, 1));
    let values = || [ids::value(backend, attempts.iter().copied())];
    marks::lock_workers(txn, &format!("SELECT worker_id {of_attempts}"), values(), LockWait::Block).await?;
    let lock = ids::lock(backend, " FOR UPDATE SKIP LOCKED");
    let sql = format!("SELECT {} {of_attempts} ORDER BY handle{lock}", VolumeRow::COLUMNS);
    let locked = Statement::from_sql_and_values(backend, sql, values());
    let locked = VolumeRow::find_by_statement(locked).all(txn).await?;
    let mut released = HashSet::new();
    let mut parents_free = false;
    // Children are younger than their parents. From the youngest on, parents are judged after them.
    for rows in locked.rchunks(VOLUMES) {
        let facts = references::volumes(txn, rows).await?;
        let mut collected = Vec::new();
        for (row, facts) in rows.iter().zip(facts) {
            match garbage::volume(&facts, settings.now, &settings.policy) {
                Verdict::Mark(why) => {
                    let size_bytes = size(row.size_bytes);
                    collected.push(CollectedItem { kind: Kind::Volume, id: row.handle, why, size_bytes });
                    released.extend(row.from_artifact_id);
                    parents_free |= row.parent.is_some();
                }
                Verdict::Keep(look) => checks.add(row.attempt_id.unwrap_or_default(), look),
            }
        }
        for (why, handles) in by_reason(&collected) {
            batch
                .workers
                .extend(marks::mark_volumes_of_ended_attempts(txn, &handles, why, settings.now).await?);
        }
        batch.collected.extend(collected);
    }
    for attempt in attempts_of(txn, &of_attempts, values()).await? {
        if parents_free {
            // The volume may be a parent of a volume that was just marked.
            checks.add(attempt, NextCheck::At(settings.now));
        } else if !checks.0.contains_key(&attempt) {
            checks.add(attempt, NextCheck::Later);
        }
    }
    make_due(txn, released, settings.now).await
}

/// Deletes attempts without remains. Returns the next checks of the others, whose volumes and
/// containers are all marked.
async fn forget(
    txn: &DatabaseTransaction,
    settings: &Settings,
    attempts: &[Uuid],
) -> Result<Vec<(Uuid, NextCheck)>, DbErr> {
    if attempts.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let of_attempts = || ids::among(backend, "attempt_id", attempts.iter().copied());
    let of_containers: Vec<Uuid> = container::Entity::find()
        .select_only()
        .column(container::Column::AttemptId)
        .filter(of_attempts())
        .into_tuple()
        .all(txn)
        .await?;
    let of_volumes: Vec<Uuid> = volume::Entity::find()
        .select_only()
        .column(volume::Column::AttemptId)
        .filter(of_attempts())
        .filter(volume::Column::Purpose.ne(Purpose::Replica))
        .into_tuple()
        .all(txn)
        .await?;
    let left: HashSet<_> = of_containers.into_iter().chain(of_volumes).collect();
    let gone = attempts.iter().copied().filter(|attempt| !left.contains(attempt));
    attempt::Entity::delete_many().filter(ids::among(backend, "attempt_id", gone)).exec(txn).await?;
    let look = NextCheck::At(settings.now + REMAINS_RECHECK_INTERVAL);
    Ok(left.into_iter().map(|attempt| (attempt, look)).collect())
}

/// Containers of ended attempts that their grace period keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptContainers {
    pub(crate) number: u64,
    /// When the last grace period ends.
    pub(crate) until: Timestamp,
}

/// Returns the kept containers of ended attempts on all workers. `None`: there are none.
pub(crate) async fn kept_containers(
    conn: &impl ConnectionTrait,
    policy: &Policy,
) -> Result<Option<KeptContainers>, DbErr> {
    let sql = "SELECT COUNT(*) AS number,
            MAX(CASE WHEN c.touched_at > a.ended_at THEN c.touched_at ELSE a.ended_at END) AS since
        FROM containers c JOIN attempts a ON a.attempt_id = c.attempt_id
        WHERE c.state IN ('creating', 'created') AND a.ended_at IS NOT NULL";
    let statement = Statement::from_string(conn.get_database_backend(), sql);
    let Some(row) = conn.query_one_raw(statement).await? else { return Ok(None) };
    let (number, since): (i64, Option<i64>) = (row.try_get("", "number")?, row.try_get("", "since")?);
    Ok(since.map(|since| KeptContainers {
        number: u64::try_from(number).unwrap_or(0),
        until: garbage::grace_ends(Timestamp(since), None, policy),
    }))
}
