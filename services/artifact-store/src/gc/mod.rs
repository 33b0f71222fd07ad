//! The garbage collector: checks rows that are due, and marks or forgets them.
//!
//! It gathers facts, lets [`crate::policy::garbage`] judge them, and applies the verdicts.
//!
//! The column `due_at` of a row says when it must be checked next. A round reads only the rows
//! that are due. It is a sequence of steps. Each step runs in batches, and each batch is one
//! transaction:
//!
//! ```text
//! builds     ends overdue builds; removes and judges artifacts of builds that let go
//! caches     deletes unused and unfinished caches, whose artifacts become due
//! attempts   marks containers and volumes of ended attempts
//! claims     marks volumes of transfers whose claims have expired
//! artifacts  marks artifacts without references, and their replicas without children
//! deleted    marks the other replicas of deleted artifacts, children first, and removes tombstones
//! holders    forgets settled workloads
//! deletions  forgets entries of the deletion log
//! losses     records new losses, and forgets old ones
//! ```
//!
//! A batch locks its rows and skips rows that others have locked. Therefore any number of replicas
//! may run rounds at once. If a replica dies in a batch, the next round repeats it. Facts are
//! gathered in a later statement, behind the locks.
//!
//! The batch size adapts to a target duration. The number of statements does not depend on it, and
//! each marked row is written once. On PostgreSQL, two batches of a step run side by side if their
//! rows do not overlap.
//!
//! Invariant: an item without references is checked eventually. The transaction that judges a row
//! also sets its next check. If a row is kept until an event ([`NextCheck::OnEvent`]), it has no
//! next check, and the transaction of that event sets one ([`crate::marks::schedule`]). If it is
//! kept by something that may end without an event, it is checked again after a fixed time. An
//! extra check costs only time.

mod batch_size;
pub(crate) mod dry_run;
#[cfg(test)]
mod race_tests;
#[cfg(test)]
mod statement_count_tests;
pub(crate) mod steps;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::{LockBehavior, LockType};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, EntityTrait, IdenStatic,
    QueryFilter, QueryOrder, QuerySelect, Statement,
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::app::Store;
use crate::artifacts::replicas;
use crate::db::ids;
use crate::policy::garbage::{CollectedItem, Kind, MarkReason, NextCheck, Policy};
use crate::{builds, caches as cache_rows, clock};
use batch_size::BatchSize;

/// Time after which a row is checked again whose references may end without an event.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Time and settings of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) now: Timestamp,
    pub(crate) policy: Policy,
    pub(crate) tombstone: Duration,
    pub(crate) remember: Duration,
    pub(crate) resource_cache_ttl: Duration,
    pub(crate) lost_grace: Duration,
    /// Number of rows checked in one transaction.
    pub(crate) batch: u64,
}

impl Settings {
    fn of(store: &Store) -> Self {
        let config = &store.config;
        Self {
            batch: BatchSize::of(store).rows,
            now: store.now(),
            policy: Policy { unowned_ttl: config.unowned_ttl, gc_grace: config.gc_grace, needs_space: false },
            tombstone: config.tombstone,
            remember: config.remember,
            resource_cache_ttl: config.resource_cache_ttl,
            lost_grace: config.lost_grace,
        }
    }

    /// Returns the value of the column `due_at`.
    fn column(&self, look: NextCheck) -> Option<i64> {
        match look {
            NextCheck::OnEvent => None,
            NextCheck::At(at) => Some(at.0),
            NextCheck::Later => Some((self.now + RECHECK_INTERVAL).0),
        }
    }
}

/// Runs rounds until the store stops.
pub(crate) async fn collect_forever(store: Arc<Store>, stopping: CancellationToken) {
    // The last time at which a round ended expired terms, and the delay after which missing
    // renewals prove nothing.
    let mut checked = store.now();
    let blindness = Ord::max(store.config.claim_term, store.config.collect_interval * 3);
    loop {
        let pause = clock::jittered(store.config.collect_interval);
        tokio::select! {
            () = stopping.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let collected = async {
            if store.now().since(checked) > blindness {
                tracing::warn!("collector was delayed: extending the terms of transfers, builds and caches");
                extend_terms(&store).await?;
            }
            run_round(&store, &stopping, &mut checked).await
        };
        match collected.await {
            Ok(collected) if collected.is_empty() => {}
            Ok(collected) => {
                let sizes = collected.iter().map(|collected| collected.size_bytes);
                let size_bytes = sizes.fold(0, u64::saturating_add);
                tracing::info!(collected = collected.len(), size_bytes, "collector marked garbage");
            }
            Err(error) => tracing::warn!(error = %error, "cannot collect garbage"),
        }
    }
}

/// Extends all claims and terms to at least a full term from now, in one transaction, because
/// callers may have been unable to renew them.
pub(crate) async fn extend_terms(store: &Store) -> Result<(), DbErr> {
    let (now, claim_term) = (store.now(), store.config.claim_term);
    store
        .db
        .write(|txn| async move {
            builds::extend_terms(&txn, now).await?;
            cache_rows::resource_caches::extend_terms(&txn, now, claim_term).await?;
            replicas::extend_terms(&txn, now, claim_term).await
        })
        .await
}

/// Runs a round for an operator. It also checks rows that would be checked after a fixed time,
/// because their references may have ended.
pub(crate) async fn full_round(
    store: &Store,
    stopping: &CancellationToken,
) -> Result<Vec<CollectedItem>, DbErr> {
    let settings = Settings::of(store);
    store.db.write(|txn| async move { make_all_due(&txn, &settings).await }).await?;
    round(store, stopping).await
}

/// Marks what is left of ended attempts on a worker that needs disk space, before their grace
/// periods end.
pub(crate) async fn give_up_ended(store: &Store, worker: WorkerId) -> Result<Vec<CollectedItem>, DbErr> {
    let mut collected = Vec::new();
    loop {
        let settings = Settings::of(store);
        let marked = store
            .db
            .write(|txn| async move { steps::attempts::give_up_ended(&txn, &settings, worker).await });
        let batch = marked.await?;
        // Parents are judged again after their children.
        if batch.collected.is_empty() {
            return Ok(collected);
        }
        store.sweep_wakers.wake(batch.workers);
        store.feed.publish(&batch.collected);
        collected.extend(batch.collected);
    }
}

/// Makes rows due that would be checked after a fixed time.
async fn make_all_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<(), DbErr> {
    // Tombstones last, because of their lock order (see `crate::marks::tombstones`).
    for table in
        ["attempts", "artifacts", "builds", "holders", "resource_caches", "task_caches", "tombstones"]
    {
        let sql = format!("UPDATE {table} SET due_at = $1 WHERE due_at > $1 AND due_at <= $2");
        let values = [settings.now.0.into(), (settings.now + RECHECK_INTERVAL).0.into()];
        let statement = Statement::from_sql_and_values(txn.get_database_backend(), sql, values);
        txn.execute_raw(statement).await?;
    }
    Ok(())
}

/// Marks current garbage, and wakes the sweep streams. If the store stops, it ends after the
/// current batch.
pub(crate) async fn round(store: &Store, stopping: &CancellationToken) -> Result<Vec<CollectedItem>, DbErr> {
    run_round(store, stopping, &mut store.now()).await
}

/// Runs a round like [`round`], and sets `checked` when all steps that end expired terms are done.
async fn run_round(
    store: &Store,
    stopping: &CancellationToken,
    checked: &mut Timestamp,
) -> Result<Vec<CollectedItem>, DbErr> {
    let settings = Settings::of(store);
    let mut collected = Vec::new();
    for step in Step::ALL {
        if step == Step::AFTER_TERMS {
            *checked = store.now();
        }
        let mut pace = BatchSize::of(store);
        let mut side_by_side = false;
        // Checked rows are no longer due, unless more must be done. The loop therefore ends.
        while step.is_due(store.db.read(), &settings).await? {
            let settings = Settings { batch: pace.rows, ..settings };
            let begun = Instant::now();
            let slice = || store.db.write(|txn| async move { step.run(&txn, &settings).await });
            let slices = match side_by_side {
                true => <[_; 2]>::from(tokio::join!(slice(), slice())).into(),
                false => vec![slice().await],
            };
            pace.adapt(begun.elapsed());
            // There is more than one batch. PostgreSQL executes one while the other reads.
            side_by_side = !store.db.is_sqlite() && step.has_slices_apart();
            let (mut checked, mut failed) = (false, None);
            for slice in slices {
                match slice {
                    Ok(batch) => {
                        checked |= batch.checked;
                        store.sweep_wakers.wake(batch.workers);
                        store.feed.publish(&batch.collected);
                        collected.extend(batch.collected);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            // The other batch was committed and published.
            failed.map_or(Ok(()), Err)?;
            if stopping.is_cancelled() {
                return Ok(collected);
            }
            if !checked {
                // Other transactions have locked the remaining rows.
                break;
            }
        }
    }
    Ok(collected)
}

/// Steps of a round, in an order in which each step finds the work of earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Builds,
    ResourceCaches,
    TaskCaches,
    Attempts,
    Claims,
    Artifacts,
    Deleted,
    Holders,
    DeletionLog,
    Losses,
    OldLosses,
}

/// Result of a batch.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Whether it checked any row.
    checked: bool,
    collected: Vec<CollectedItem>,
    workers: Vec<WorkerId>,
}

impl Step {
    const ALL: [Self; 11] = [
        Self::Builds,
        Self::ResourceCaches,
        Self::TaskCaches,
        Self::Attempts,
        Self::Claims,
        Self::Artifacts,
        Self::Deleted,
        Self::Holders,
        Self::DeletionLog,
        Self::Losses,
        Self::OldLosses,
    ];

    /// The steps that mark.
    const MARKING: [Self; 7] = [
        Self::Builds,
        Self::ResourceCaches,
        Self::TaskCaches,
        Self::Attempts,
        Self::Claims,
        Self::Artifacts,
        Self::Deleted,
    ];

    /// The first step after those that end expired terms.
    const AFTER_TERMS: Self = Self::Artifacts;

    /// Returns whether two batches of the step may run at once. Batches of other steps share rows,
    /// for example parents or artifacts of several caches, so that one would postpone rows that the
    /// other has locked.
    fn has_slices_apart(self) -> bool {
        matches!(self, Self::Builds | Self::Attempts | Self::Artifacts)
    }

    /// Returns whether a row is due. The ORDER BY makes PostgreSQL use the index. Otherwise it may
    /// scan the whole table for a first row.
    async fn is_due(self, conn: &impl ConnectionTrait, settings: &Settings) -> Result<bool, DbErr> {
        let sql = match self {
            Self::Builds => "SELECT 1 AS due FROM builds WHERE due_at <= $1 ORDER BY due_at LIMIT 1",
            Self::ResourceCaches => {
                "SELECT 1 AS due FROM resource_caches WHERE due_at <= $1 ORDER BY due_at LIMIT 1"
            }
            Self::TaskCaches => {
                "SELECT 1 AS due FROM task_caches WHERE due_at <= $1 ORDER BY due_at LIMIT 1"
            }
            Self::Attempts => "SELECT 1 AS due FROM attempts WHERE due_at <= $1 ORDER BY due_at LIMIT 1",
            Self::Claims => {
                "SELECT 1 AS due FROM volumes WHERE claimed_until <= $1 AND complete = FALSE AND given_up = FALSE
                     AND state NOT IN ('destroying', 'sweeping') ORDER BY claimed_until LIMIT 1"
            }
            Self::Artifacts => {
                "SELECT 1 AS due FROM artifacts WHERE due_at <= $1 AND state <> 'deleting' ORDER BY due_at LIMIT 1"
            }
            Self::Deleted => {
                "SELECT 1 AS due FROM tombstones WHERE due_at <= $1 ORDER BY due_at LIMIT 1"
            }
            Self::Holders => "SELECT 1 AS due FROM holders WHERE due_at <= $1 ORDER BY due_at LIMIT 1",
            Self::DeletionLog => "SELECT 1 AS due FROM deletion_log WHERE due_at <= $1 ORDER BY due_at LIMIT 1",
            Self::Losses => steps::losses::NEW,
            Self::OldLosses => steps::losses::OLD,
        };
        let at = match self {
            Self::Losses => settings.now - settings.lost_grace,
            Self::OldLosses => settings.now - settings.remember,
            _ => settings.now,
        };
        let statement = Statement::from_sql_and_values(conn.get_database_backend(), sql, [at.0.into()]);
        Ok(conn.query_one_raw(statement).await?.is_some())
    }

    async fn run(self, txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
        if txn.get_database_backend() == DbBackend::Postgres {
            // Plans do not depend on the values, which are mostly lists of ids. PostgreSQL would
            // plan the first executions on each connection for their values, which takes as long as
            // running them.
            txn.execute_unprepared("SET LOCAL plan_cache_mode = force_generic_plan").await?;
        }
        match self {
            Self::Builds => steps::builds::check_due(txn, settings).await,
            Self::ResourceCaches => steps::caches::check_resource_caches(txn, settings).await,
            Self::TaskCaches => steps::caches::check_task_caches(txn, settings).await,
            Self::Attempts => steps::attempts::check_due(txn, settings).await,
            Self::Claims => steps::claims::check_due(txn, settings).await,
            Self::Artifacts => steps::artifacts::check_due(txn, settings).await,
            Self::Deleted => steps::deleted::check_due(txn, settings).await,
            Self::Holders => steps::holders::check_due(txn, settings).await,
            Self::DeletionLog => steps::deletion_log::check_due(txn, settings).await,
            Self::Losses => steps::losses::notice(txn, settings).await,
            Self::OldLosses => steps::losses::forget(txn, settings).await,
        }
    }
}

/// A table whose rows are checked at scheduled times.
trait Scheduled: EntityTrait {
    const ID: Self::Column;
    const LOOK_AT: Self::Column;
}

macro_rules! scheduled {
    ($($table:ident: $id:ident),+) => {$(
        impl Scheduled for crate::db::entity::$table::Entity {
            const ID: Self::Column = crate::db::entity::$table::Column::$id;
            const LOOK_AT: Self::Column = crate::db::entity::$table::Column::DueAt;
        }
    )+};
}

scheduled!(
    artifact: ArtifactId,
    attempt: AttemptId,
    build: BuildId,
    deletion: Id,
    holder: HolderId,
    resource_cache: CacheId,
    task_cache: CacheId,
    tombstone: ArtifactId
);

/// Locks the rows that are due longest, up to the batch size, and skips locked ones.
async fn lock_due<E: Scheduled>(
    txn: &DatabaseTransaction,
    query: sea_orm::Select<E>,
    settings: &Settings,
) -> Result<Vec<E::Model>, DbErr> {
    query
        .filter(E::LOOK_AT.lte(settings.now.0))
        .order_by_asc(E::LOOK_AT)
        .limit(settings.batch)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await
}

/// Sets the next check of rows.
async fn schedule_next<E: Scheduled>(
    txn: &DatabaseTransaction,
    settings: &Settings,
    checks: &[(Uuid, NextCheck)],
) -> Result<(), DbErr> {
    if checks.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let (table, id) = (E::default(), E::ID);
    let (table, id) = (table.table_name(), id.as_str());
    let next = ids::pairs_query(backend, 1);
    let sql =
        format!("UPDATE {table} SET due_at = next.at FROM ({next}) AS next WHERE {table}.{id} = next.id");
    let pairs = ids::pairs(checks.iter().map(|(id, look)| (*id, settings.column(*look))));
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, [pairs])).await.map(drop)
}

/// Groups marked items by reason.
fn by_reason(collected: &[CollectedItem]) -> HashMap<MarkReason, Vec<Uuid>> {
    let mut by_reason: HashMap<_, Vec<_>> = HashMap::new();
    for collected in collected {
        by_reason.entry(collected.why).or_default().push(collected.id);
    }
    by_reason
}
