//! Demand and supply for autoscalers: waiting requests, workers, and the workers that are safe to
//! remove.
//!
//! The worker cache of this replica is the source. Leases are counted in the database, because the
//! cache does not contain leases without a slot.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use domain::worker::Labels;
use domain::{Timestamp, WorkerId};
use futures::{StreamExt, stream};
use sea_orm::{ColumnTrait, DbErr, EntityTrait, QueryFilter, QuerySelect};
use uuid::Uuid;

use crate::app::App;
use crate::db::entity::lease;
use crate::db::entity::worker::{Desired, State};
use crate::placement::{Demand, Shape, Trust, Worker};
use crate::store_client::Forget;

/// Maximum number of refusal lines in one demand entry.
const REASONS: usize = 10;

/// Maximum number of workers for which the artifact store is queried at a time.
const CHECKS: usize = 16;

/// Maximum number of removable workers that are checked with the artifact store, as a multiple of
/// the requested number.
const CANDIDATES: usize = 4;

/// Limits of a capacity query.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CapacityQuery {
    pub(crate) shapes: usize,
    pub(crate) removable: usize,
    /// Whether the artifact store is queried for last replicas.
    pub(crate) replicas: bool,
}

/// The answer to a capacity query.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    pub(crate) waiting: usize,
    /// Number of waiting requests that no known worker could ever take.
    pub(crate) for_none: usize,
    pub(crate) oldest: Option<Timestamp>,
    pub(crate) demand: Vec<WaitingDemand>,
    pub(crate) supply: Vec<Supply>,
    pub(crate) removable: Vec<Removable>,
    /// Requests that were rejected lately as unschedulable.
    pub(crate) refused: Vec<WaitingDemand>,
}

/// Waiting requests of the same shape.
#[derive(Debug, Clone)]
pub(crate) struct WaitingDemand {
    pub(crate) shape: Arc<Shape>,
    pub(crate) uses_own_workers_only: bool,
    pub(crate) count: usize,
    pub(crate) for_none: usize,
    pub(crate) oldest: Timestamp,
    pub(crate) waits_for: &'static str,
    pub(crate) never_for: Vec<String>,
}

/// Workers with the same labels, without lost and removed workers.
#[derive(Debug, Clone)]
pub(crate) struct Supply {
    pub(crate) labels: Arc<Labels>,
    pub(crate) workers: usize,
    pub(crate) in_service: usize,
    pub(crate) idle: usize,
    pub(crate) slots_in_use: u64,
    pub(crate) slots_free: u64,
    pub(crate) without_limit: usize,
}

/// A worker that may be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Removable {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) leases: u64,
    pub(crate) kept_containers: u64,
    pub(crate) kept_volumes: u64,
    pub(crate) idle_since: Option<Timestamp>,
    /// Whether data would be lost. `None`: not queried, or the artifact store did not answer.
    pub(crate) would_lose: Option<bool>,
}

impl Removable {
    /// Returns the sort key of the removal order: the least harmful removal first.
    fn harm(&self) -> impl Ord + use<> {
        let idle_since = self.idle_since.unwrap_or(Timestamp(i64::MAX));
        (self.leases, self.kept_containers, idle_since, self.kept_volumes, self.name.clone())
    }

    /// Describes the worker in one line, for people.
    pub(crate) fn words(&self, now: Timestamp) -> String {
        let idle = match self.idle_since {
            Some(since) => format!("idle for at least {} s", now.since(since).as_secs()),
            None => "busy".to_owned(),
        };
        let would_lose = match self.would_lose {
            Some(true) => "; the worker has the last replica of a kept artifact, or orphans",
            Some(false) => "; no kept artifact would be lost",
            None => "",
        };
        let Self { leases, kept_containers, kept_volumes, .. } = self;
        let counted = |number: u64, noun: &str| match number {
            1 => format!("1 {noun}"),
            _ => format!("{number} {noun}s"),
        };
        format!(
            "{idle}: has {}, and keeps {} and {}{would_lose}",
            counted(*leases, "lease"),
            counted(*kept_containers, "container"),
            counted(*kept_volumes, "volume")
        )
    }
}

/// Answers a capacity query.
pub(crate) async fn feed(app: &App, query: CapacityQuery) -> Result<Feed, DbErr> {
    app.dispatch.catch_up().await;
    let mut feed = Feed::default();
    add_demand(app, &mut feed);
    add_refused(app, &mut feed);
    for entries in [&mut feed.demand, &mut feed.refused] {
        entries.sort_by_cached_key(|one| (Reverse(one.count), one.oldest, one.shape.team.clone()));
        entries.truncate(query.shapes);
    }
    let leases = live_leases(app).await?;
    add_supply(app, &leases, &mut feed);
    feed.supply.sort_by_cached_key(|one| (Reverse(one.workers), key(&one.labels)));
    feed.supply.truncate(query.shapes);
    feed.removable.sort_by_cached_key(Removable::harm);
    if query.replicas {
        move_lossy_workers_last(app, &mut feed.removable, query.removable).await;
    }
    feed.removable.truncate(query.removable);
    Ok(feed)
}

/// Moves workers whose removal loses data to the end. Queries the artifact store until `count`
/// safe workers are found.
async fn move_lossy_workers_last(app: &App, removable: &mut Vec<Removable>, count: usize) {
    removable.truncate(count.saturating_mul(CANDIDATES));
    let mut safe = 0;
    for some in removable.chunks_mut(count.max(1)) {
        query_losses(app, some).await;
        safe += some.iter().filter(|one| one.would_lose == Some(false)).count();
        if safe >= count || some.iter().all(|one| one.would_lose.is_none()) {
            break;
        }
    }
    removable.sort_by_key(|one| match one.would_lose {
        Some(false) => 0,
        None => 1,
        Some(true) => 2,
    });
}

/// Queries the artifact store for data that the removal of each worker would lose. Stops after the
/// first transient failure.
async fn query_losses(app: &App, removable: &mut [Removable]) {
    let store_is_unavailable = AtomicBool::new(false);
    let ids: Vec<_> = removable.iter().map(|one| one.id).collect();
    let checks = ids.into_iter().map(async |id| {
        if store_is_unavailable.load(Ordering::Relaxed) {
            return None;
        }
        match app.store.forget_worker(id, Forget::Check).await {
            Ok(()) => Some(false),
            Err(refusal) if refusal.is(rpc::Reason::LastReplica) || refusal.is(rpc::Reason::HoldsOrphans) => {
                Some(true)
            }
            Err(refusal) => {
                store_is_unavailable.fetch_or(refusal.is_transient(), Ordering::Relaxed);
                None
            }
        }
    });
    let answers: Vec<_> = stream::iter(checks).buffered(CHECKS).collect().await;
    for (one, would_lose) in removable.iter_mut().zip(answers) {
        one.would_lose = would_lose;
    }
}

fn add_demand(app: &App, feed: &mut Feed) {
    let lines: Vec<_> = {
        let queue = app.dispatch.queue();
        queue.demand().map(|(demand, count, oldest)| (demand.clone(), count, oldest)).collect()
    };
    let mut by_shape = HashMap::<_, WaitingDemand>::new();
    for (demand, count, oldest) in lines {
        let waiting = WaitingDemand::of(app, &demand, count, oldest);
        feed.waiting += count;
        feed.for_none += waiting.for_none;
        feed.oldest = Some(feed.oldest.map_or(oldest, |known| known.min(oldest)));
        match by_shape.get_mut(&waiting.shape) {
            Some(known) => known.join(waiting),
            None => _ = by_shape.insert(waiting.shape.clone(), waiting),
        }
    }
    feed.demand = by_shape.into_values().collect();
}

/// Adds the requests that were rejected lately and are still unschedulable.
fn add_refused(app: &App, feed: &mut Feed) {
    let refused = app.dispatch.refused().lately(Timestamp::now());
    let refused = refused.iter().map(|one| WaitingDemand::of(app, &one.demand, one.count, one.first));
    feed.refused = refused.filter(|one| one.for_none > 0).collect();
}

impl WaitingDemand {
    /// Describes `count` requests for `demand`. Takes the lock on the workers for each demand, so
    /// that placement is not blocked for long.
    fn of(app: &App, demand: &Demand, count: usize, oldest: Timestamp) -> Self {
        let mut workers = app.dispatch.workers.lock();
        let is_hopeless = workers.is_hopeless(demand);
        let never_for = match is_hopeless {
            true => workers.refusals(demand).lines().into_iter().take(REASONS).collect(),
            false => Vec::new(),
        };
        Self {
            shape: demand.shape.clone(),
            uses_own_workers_only: workers.uses_own_workers_only(demand),
            count,
            for_none: if is_hopeless { count } else { 0 },
            oldest,
            waits_for: workers.waits_for(demand),
            never_for,
        }
    }

    /// Merges a demand of the same shape that avoids other workers.
    fn join(&mut self, other: Self) {
        self.count += other.count;
        self.for_none += other.for_none;
        self.oldest = self.oldest.min(other.oldest);
        if self.never_for.is_empty() {
            self.never_for = other.never_for;
        }
    }
}

fn add_supply(app: &App, leases: &HashMap<Uuid, i64>, feed: &mut Feed) {
    let mut by_labels = BTreeMap::<_, Supply>::new();
    let workers = app.dispatch.workers.lock();
    // Workers with equal labels share one value, so the pointer is compared.
    let mut known = HashMap::<*const Labels, Supply>::new();
    let is_known = |(worker, _): &(&Worker, _)| worker.state != State::Lost;
    for (worker, idle_since) in workers.workers_and_idleness().filter(is_known) {
        let supply = known.entry(Arc::as_ptr(&worker.labels)).or_insert_with(|| Supply::of(&worker.labels));
        supply.add(worker);
        let is_reserved = worker.reserved_for.is_some();
        if worker.state != State::Running || worker.desired != Desired::Run || is_reserved {
            continue;
        }
        let leases = leases.get(&worker.id.uuid()).copied().unwrap_or(0);
        feed.removable.push(Removable {
            id: worker.id,
            name: worker.name.clone(),
            leases: u64::try_from(leases).unwrap_or(0),
            kept_containers: worker.load.kept_containers,
            kept_volumes: worker.load.kept_volumes,
            idle_since,
            would_lose: None,
        });
    }
    drop(workers);
    for supply in known.into_values() {
        let key = key(&supply.labels);
        match by_labels.get_mut(&key) {
            Some(known) => Supply::join(known, &supply),
            None => _ = by_labels.insert(key, supply),
        }
    }
    feed.supply = by_labels.into_values().collect();
}

/// Returns the reported part of labels, as a sort key.
fn key(labels: &Labels) -> (String, Vec<String>, Option<String>, Vec<String>, Vec<String>) {
    let Labels { platform, tags, team, image_kinds, capabilities, resource_types: _, zone: _ } = labels;
    (platform.clone(), tags.clone(), team.clone(), image_kinds.clone(), capabilities.clone())
}

impl Supply {
    fn of(labels: &Arc<Labels>) -> Self {
        Self {
            labels: labels.clone(),
            workers: 0,
            in_service: 0,
            idle: 0,
            slots_in_use: 0,
            slots_free: 0,
            without_limit: 0,
        }
    }

    fn add(&mut self, worker: &Worker) {
        self.workers += 1;
        self.slots_in_use += u64::from(worker.load.tasks);
        let is_in_service = worker.state == State::Running
            && worker.desired == Desired::Run
            && worker.unsupported_versions.is_empty()
            && !matches!(&worker.trust, Trust::Quarantined(failing) if failing.counts_for(None));
        if is_in_service {
            self.in_service += 1;
            self.idle += usize::from(worker.load.tasks == 0);
            match worker.capacity.max_tasks {
                _ if worker.reserved_for.is_some() => {}
                Some(max) => self.slots_free += u64::from(max.saturating_sub(worker.load.tasks)),
                None => self.without_limit += 1,
            }
        }
    }

    fn join(&mut self, other: &Self) {
        self.workers += other.workers;
        self.in_service += other.in_service;
        self.idle += other.idle;
        self.slots_in_use += other.slots_in_use;
        self.slots_free += other.slots_free;
        self.without_limit += other.without_limit;
    }
}

/// Counts the live leases of each worker.
async fn live_leases(app: &App) -> Result<HashMap<Uuid, i64>, DbErr> {
    let live: Vec<(Uuid, i64)> = lease::Entity::find()
        .select_only()
        .column(lease::Column::WorkerId)
        .column_as(lease::Column::Id.count(), "count")
        .filter(lease::is_live())
        .group_by(lease::Column::WorkerId)
        .into_tuple()
        .all(app.context.db.read())
        .await?;
    Ok(live.into_iter().collect())
}
