//! The garbage collector: looks at what is due, gathers the facts, lets [`crate::policy::garbage`] judge them, and carries that out.
//!
//! Every row that may become garbage, or may be forgotten, says in `look_at` when it is to be looked at, so a round reads what is due and
//! nothing else. It is a sequence of steps, each in batches, each batch in one transaction:
//!
//! ```text
//! builds     ended by their terms; those that let go lose their artifacts, which are judged with them
//! caches     that were unused for long, or not made; what they owned is due then
//! attempts   that ended: their containers, their volumes
//! claims     that ran out: the volumes of their transfers
//! artifacts  that nothing keeps, and their replicas that have no children
//! deleted    artifacts: replicas that are left, children first; and in the end their tombstones
//! holders    that can be forgotten
//! deletions  in the log, that can be forgotten
//! losses     that are noticed, and those that are forgotten
//! ```
//!
//! A batch locks the rows that are due and skips what others have locked, so it is a slice of the work that belongs to the holder of its
//! locks: any number of replicas may run rounds at once, and one that dies in a batch leaves it to the next. Facts are gathered in a later
//! statement, behind the locks. A batch is as large as can be done in a time that others may wait for it, and takes as many statements however
//! large it is; what is marked is written once, with its next look. Where there is more than one of a step whose batches do not meet, two are done
//! side by side on PostgreSQL, as two replicas would.
//!
//! Invariant: what nothing keeps is due some time. A row is given its next look in the transaction that judged it; only what is kept by
//! something that says when it ends ([`NextLook::WhenTold`]) gets none, and the call that ends that gives it one ([`crate::marks::schedule`]). What is kept by something
//! that may end unseen is looked at again after a while, so a look that no call asked for costs time and no more.

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
use crate::policy::garbage::{Collected, Kind, MarkReason, NextLook, Policy};
use crate::{builds, caches as cache_rows, clock};
use batch_size::BatchSize;

/// After how long something is looked at again that may change unseen.
const LATER: Duration = Duration::from_secs(60);

/// What a round goes by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) now: Timestamp,
    pub(crate) policy: Policy,
    pub(crate) tombstone: Duration,
    pub(crate) remember: Duration,
    pub(crate) resource_cache_ttl: Duration,
    pub(crate) lost_grace: Duration,
    /// How many rows are looked at in one transaction.
    pub(crate) batch: u64,
}

impl Settings {
    fn of(store: &Store) -> Self {
        let config = &store.config;
        Self {
            batch: BatchSize::of(store).rows,
            now: store.now(),
            policy: Policy { unowned_ttl: config.unowned_ttl, gc_grace: config.gc_grace },
            tombstone: config.tombstone,
            remember: config.remember,
            resource_cache_ttl: config.resource_cache_ttl,
            lost_grace: config.lost_grace,
        }
    }

    /// As the column `look_at` has it.
    fn column(&self, look: NextLook) -> Option<i64> {
        match look {
            NextLook::WhenTold => None,
            NextLook::At(at) => Some(at.0),
            NextLook::Later => Some((self.now + LATER).0),
        }
    }
}

/// Runs rounds until the store stops.
pub(crate) async fn collect_forever(store: Arc<Store>, stopping: CancellationToken) {
    // When a round last got to what must be renewed, and after how long silence proves nothing.
    let mut looked = store.now();
    let blindness = Ord::max(store.config.claim_term, store.config.collect_interval * 3);
    loop {
        let pause = clock::jittered(store.config.collect_interval);
        tokio::select! {
            () = stopping.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let collected = async {
            if store.now().since(looked) > blindness {
                tracing::warn!(
                    "could not look for a while: transfers, builds and makers of caches get a full term"
                );
                extend_terms(&store).await?;
            }
            run_round(&store, &stopping, &mut looked).await
        };
        match collected.await {
            Ok(collected) if collected.is_empty() => {}
            Ok(collected) => {
                let sizes = collected.iter().map(|collected| collected.size_bytes);
                let size_bytes = sizes.fold(0, u64::saturating_add);
                tracing::info!(collected = collected.len(), size_bytes, "garbage marked");
            }
            Err(error) => tracing::warn!(error = %error, "cannot collect garbage just now"),
        }
    }
}

/// Gives every claim and build that must be renewed a full term from now on, in one transaction: no caller could renew one while the store was away.
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

/// A round that an operator asked for: it looks also at what would be looked at after a while, for something may have changed unseen.
pub(crate) async fn full_round(store: &Store, stopping: &CancellationToken) -> Result<Vec<Collected>, DbErr> {
    let settings = Settings::of(store);
    store.db.write(|txn| async move { make_all_due(&txn, &settings).await }).await?;
    round(store, stopping).await
}

/// Makes due what is looked at after a while.
async fn make_all_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<(), DbErr> {
    // Tombstones come last: see there.
    for table in
        ["attempts", "artifacts", "builds", "holders", "resource_caches", "task_caches", "tombstones"]
    {
        let sql = format!("UPDATE {table} SET look_at = $1 WHERE look_at > $1 AND look_at <= $2");
        let values = [settings.now.0.into(), (settings.now + LATER).0.into()];
        let statement = Statement::from_sql_and_values(txn.get_database_backend(), sql, values);
        txn.execute_raw(statement).await?;
    }
    Ok(())
}

/// Marks what is garbage now, and tells the streams.
///
/// A round that is told to stop ends after the batch it is at.
pub(crate) async fn round(store: &Store, stopping: &CancellationToken) -> Result<Vec<Collected>, DbErr> {
    run_round(store, stopping, &mut store.now()).await
}

/// The same, and notes when all steps were done that end what was not renewed.
async fn run_round(
    store: &Store,
    stopping: &CancellationToken,
    looked: &mut Timestamp,
) -> Result<Vec<Collected>, DbErr> {
    let settings = Settings::of(store);
    let mut collected = Vec::new();
    for step in Step::ALL {
        if step == Step::AFTER_TERMS {
            *looked = store.now();
        }
        let mut pace = BatchSize::of(store);
        let mut side_by_side = false;
        // Rows that are looked at are not due any more, unless there is more to do about them: this ends.
        while step.is_due(store.db.read(), &settings).await? {
            let settings = Settings { batch: pace.rows, ..settings };
            let begun = Instant::now();
            let slice = || store.db.write(|txn| async move { step.run(&txn, &settings).await });
            let slices = match side_by_side {
                true => <[_; 2]>::from(tokio::join!(slice(), slice())).into(),
                false => vec![slice().await],
            };
            pace.took(begun.elapsed());
            // There was more than one batch of it. PostgreSQL works on one while we read another.
            side_by_side = !store.db.is_sqlite() && step.has_slices_apart();
            let (mut looked, mut failed) = (false, None);
            for slice in slices {
                match slice {
                    Ok(batch) => {
                        looked |= batch.looked;
                        store.sweep_wakers.wake(batch.workers);
                        store.feed.tell(&batch.collected);
                        collected.extend(batch.collected);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            // What the other did is told.
            failed.map_or(Ok(()), Err)?;
            if stopping.is_cancelled() {
                return Ok(collected);
            }
            if !looked {
                // Others have locked what is left.
                break;
            }
        }
    }
    Ok(collected)
}

/// The steps of a round, each after those that give it something to do.
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

/// What a batch did.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Whether there was anything to look at that was not locked.
    looked: bool,
    collected: Vec<Collected>,
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

    /// Those that mark something.
    const MARKING: [Self; 7] = [
        Self::Builds,
        Self::ResourceCaches,
        Self::TaskCaches,
        Self::Attempts,
        Self::Claims,
        Self::Artifacts,
        Self::Deleted,
    ];

    /// The first after those that end what was not renewed.
    const AFTER_TERMS: Self = Self::Artifacts;

    /// Whether two slices of it are done at once. Those of other steps meet in rows that they do not begin with, as parents, or what several caches
    /// own: what one of them has locked the other leaves for a minute.
    fn has_slices_apart(self) -> bool {
        matches!(self, Self::Builds | Self::Attempts | Self::Artifacts)
    }

    /// Whether anything is to be looked at. Reads an index: without an order PostgreSQL may hope to find a first row sooner in the table, and where
    /// there is none reads all of it.
    async fn is_due(self, conn: &impl ConnectionTrait, settings: &Settings) -> Result<bool, DbErr> {
        let sql = match self {
            Self::Builds => "SELECT 1 AS due FROM builds WHERE look_at <= $1 ORDER BY look_at LIMIT 1",
            Self::ResourceCaches => {
                "SELECT 1 AS due FROM resource_caches WHERE look_at <= $1 ORDER BY look_at LIMIT 1"
            }
            Self::TaskCaches => {
                "SELECT 1 AS due FROM task_caches WHERE look_at <= $1 ORDER BY look_at LIMIT 1"
            }
            Self::Attempts => "SELECT 1 AS due FROM attempts WHERE look_at <= $1 ORDER BY look_at LIMIT 1",
            Self::Claims => {
                "SELECT 1 AS due FROM volumes WHERE claimed_until <= $1 AND complete = FALSE AND given_up = FALSE
                     AND state NOT IN ('destroying', 'sweeping') ORDER BY claimed_until LIMIT 1"
            }
            Self::Artifacts => {
                "SELECT 1 AS due FROM artifacts WHERE look_at <= $1 AND state <> 'deleting' ORDER BY look_at LIMIT 1"
            }
            Self::Deleted => {
                "SELECT 1 AS due FROM tombstones WHERE look_at <= $1 ORDER BY look_at LIMIT 1"
            }
            Self::Holders => "SELECT 1 AS due FROM holders WHERE look_at <= $1 ORDER BY look_at LIMIT 1",
            Self::DeletionLog => "SELECT 1 AS due FROM deletion_log WHERE look_at <= $1 ORDER BY look_at LIMIT 1",
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
            // No statement here is planned better for its values, which are lists of ids for the most part. To plan some for each of the first batches
            // of a connection, as PostgreSQL does to find that out, takes as long as to run them.
            txn.execute_unprepared("SET LOCAL plan_cache_mode = force_generic_plan").await?;
        }
        match self {
            Self::Builds => steps::builds::look(txn, settings).await,
            Self::ResourceCaches => steps::caches::look_at_resource_caches(txn, settings).await,
            Self::TaskCaches => steps::caches::look_at_task_caches(txn, settings).await,
            Self::Attempts => steps::attempts::look(txn, settings).await,
            Self::Claims => steps::claims::look(txn, settings).await,
            Self::Artifacts => steps::artifacts::look(txn, settings).await,
            Self::Deleted => steps::deleted::look(txn, settings).await,
            Self::Holders => steps::holders::look(txn, settings).await,
            Self::DeletionLog => steps::deletion_log::look(txn, settings).await,
            Self::Losses => steps::losses::notice(txn, settings).await,
            Self::OldLosses => steps::losses::forget(txn, settings).await,
        }
    }
}

/// A table of things that are looked at.
trait Scheduled: EntityTrait {
    const ID: Self::Column;
    const LOOK_AT: Self::Column;
}

macro_rules! scheduled {
    ($($table:ident: $id:ident),+) => {$(
        impl Scheduled for crate::db::entity::$table::Entity {
            const ID: Self::Column = crate::db::entity::$table::Column::$id;
            const LOOK_AT: Self::Column = crate::db::entity::$table::Column::LookAt;
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

/// Locks the rows that are due longest, as many as a batch has, without those that others have locked.
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

/// Says when each of these rows is looked at next.
async fn look_next<E: Scheduled>(
    txn: &DatabaseTransaction,
    settings: &Settings,
    looks: &[(Uuid, NextLook)],
) -> Result<(), DbErr> {
    if looks.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let (table, id) = (E::default(), E::ID);
    let (table, id) = (table.table_name(), id.as_str());
    let next = ids::pairs_query(backend, 1);
    let sql =
        format!("UPDATE {table} SET look_at = next.at FROM ({next}) AS next WHERE {table}.{id} = next.id");
    let pairs = ids::pairs(looks.iter().map(|(id, look)| (*id, settings.column(*look))));
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, [pairs])).await.map(drop)
}

/// What was marked, by the reason.
fn by_reason(collected: &[Collected]) -> HashMap<MarkReason, Vec<Uuid>> {
    let mut by_reason: HashMap<_, Vec<_>> = HashMap::new();
    for collected in collected {
        by_reason.entry(collected.why).or_default().push(collected.id);
    }
    by_reason
}
