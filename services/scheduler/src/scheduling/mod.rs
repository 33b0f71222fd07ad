//! Scheduling: from a submission or a call for leases to the grant.
//!
//! One task of each replica ([`dispatch_forever`]) works in batches ([`pipeline`], `batch.rs`). It
//! decides a batch on the worker cache ([`crate::workers::cache`]) while the previous batch is
//! being committed, and commits it in one transaction ([`crate::commit`]). A grant that the
//! transaction rejects is decided again.
//!
//! Before and after each batch, a pass over the queue serves waiting requests (`queue_pass.rs`,
//! [`crate::queue`]). Calls for leases wait in the same queue ([`waiters`]), which also contains
//! those of other replicas ([`peer_waiters`]). A worker is reserved for a large request that has
//! waited for long ([`reservations`]).
//!
//! Invariant: two replicas never both place a workload. The placing transaction locks its row, and
//! checks that it still waits.

mod batch;
mod peer_waiters;
mod pipeline;
mod queue_pass;
mod reservations;
mod waiters;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use db::Database;
use domain::worker::LeaseClaims;
use domain::{ArtifactId, CacheId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::DbErr;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::commit::{self, CommitResult, Grant, Plan};
use crate::config::Config;
use crate::context::Context;
use crate::counters;
use crate::notify::changes::Effects;
use crate::notify::request::call;
use crate::placement::{Choice, DecidedBy, Demand, Location, Refusals, Shape};
use crate::queue::Queue;
use crate::queue::limits::TooManyWaiting;
use crate::queue::unschedulable::RejectedShapes;
use crate::scheduling::peer_waiters::PeerWaiters;
pub(crate) use crate::scheduling::pipeline::RoundContext;
use crate::scheduling::reservations::Reservations;
use crate::scheduling::waiters::Waiters;
use crate::store_client::Inputs;
use crate::workers::cache::{SharedFacts, WorkerCache, Workers};
use crate::workloads::{OtherSpec, Submission};

/// Maximum number of decisions about one request when the facts change in between.
const DECISIONS: usize = 8;

/// Maximum number of requests in one round, and maximum number of grants of one queue pass
/// transaction.
const BATCH: usize = 512;

/// Maximum number of requests that wait for a round. Further callers wait for room.
const REQUESTS: usize = 4096;

/// Reason why a workload cannot be accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    /// The id belongs to another workload.
    #[error(transparent)]
    Exists(#[from] OtherSpec),
    /// The artifact store identifies holders by id, so a lease must not have the same id.
    #[error("cannot accept workload {0}: a lease has its id")]
    LeaseId(WorkloadId),
    /// No worker could ever run the workload.
    #[error("no worker could ever run the workload: {}", .0.lines().join("; "))]
    NoCompatibleWorker(Refusals),
    /// The worker that the spec names is unknown.
    #[error("worker {0:?} is unknown")]
    UnknownWorker(String),
    /// The artifact store rejected the pins, or does not answer.
    #[error("cannot pin the inputs")]
    NotPinned(#[source] rpc::Refusal),
    /// The team has reached its limit of waiting workloads.
    #[error(transparent)]
    TooManyWaiting(#[from] TooManyWaiting),
    /// The facts changed too often.
    #[error("cannot decide the request: the workers changed too often")]
    Undecided,
    /// The service stops.
    #[error("the scheduler is stopping")]
    Stopping,
    /// The database failed.
    #[error("cannot access the scheduler's database")]
    Database(#[from] DbErr),
}

/// Reason why a driven lease cannot be granted.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PlaceError {
    /// No worker could ever take the lease.
    #[error("no worker could ever take the lease: {}", .0.lines().join("; "))]
    NoCompatibleWorker(Refusals),
    /// All workers that could take the lease are busy or out of contact.
    #[error("no worker can take the lease now: {}", .0.lines().join("; "))]
    AllWorkersBusy(Refusals),
    /// The id belongs to another lease, or its lease has ended.
    #[error("the id belongs to another lease, or to one that has ended")]
    Exists,
    /// The lease named by `same_worker_as_lease_id` is unknown or has ended.
    #[error("the lease named by same_worker_as_lease_id is unknown, or has ended")]
    NoSuchLease,
    /// The worker that the request names is unknown.
    #[error("worker {0:?} is unknown")]
    UnknownWorker(String),
    /// An input is unknown to the team, not sealed, or its bytes are lost.
    #[error("artifact {0} cannot be used as an input")]
    InputUnavailable(ArtifactId),
    /// A task cache is unknown to the team.
    #[error("task cache {0} is unknown to this team")]
    CacheUnavailable(CacheId),
    /// The artifact store rejected the pins, or does not answer.
    #[error("cannot pin the inputs")]
    NotPinned(#[source] rpc::Refusal),
    /// The facts changed too often.
    #[error("cannot decide the request: the workers changed too often")]
    Undecided,
    /// The service stops.
    #[error("the scheduler is stopping")]
    Stopping,
    /// The database failed.
    #[error("cannot access the scheduler's database")]
    Database(#[from] DbErr),
}

/// A granted driven lease.
#[derive(Debug, Clone)]
pub(crate) struct GrantedLease {
    pub(crate) claims: LeaseClaims,
    pub(crate) worker_name: String,
    pub(crate) gateway_endpoint: String,
}

/// The result of one lease of a call.
pub(crate) type PlaceResult = Result<GrantedLease, PlaceError>;

/// A request for a driven lease.
#[derive(Debug, Clone)]
pub(crate) struct LeaseRequest {
    pub(crate) lease: LeaseId,
    pub(crate) demand: Arc<Demand>,
    /// The inputs to pin, and their locations.
    pub(crate) inputs: Arc<Inputs>,
    pub(crate) locations: Arc<[Location]>,
    /// The encoded request, which distinguishes a repeat from another request.
    pub(crate) request: String,
    /// Leases of one group are granted together or not at all.
    pub(crate) group: Option<u32>,
    /// The owner of the containers under the lease. Empty: none.
    pub(crate) owner: String,
    /// The worker of the owner. As long as it takes work, the lease is granted only there.
    pub(crate) owner_worker: Option<WorkerId>,
    /// Longest waiting time for a busy worker. For a group, the longest time and the highest
    /// priority of its leases count.
    pub(crate) wait: Duration,
    pub(crate) priority: i64,
}

/// A request to the dispatcher.
#[derive(Debug)]
pub(crate) enum Request {
    /// Submit a workload without pins. When answered, the workload is durable and placed or queued.
    Submit(Arc<Submission>, oneshot::Sender<Result<(), SubmitError>>),
    /// Queue an accepted workload whose inputs are pinned, at these locations.
    Pinned(Arc<Submission>, Arc<[Location]>, oneshot::Sender<Result<(), SubmitError>>),
    /// Place driven leases.
    Place(Vec<LeaseRequest>, oneshot::Sender<Vec<PlaceResult>>),
    /// Release driven leases on these workers.
    Release(Vec<(LeaseId, WorkerId)>, oneshot::Sender<Result<(), DbErr>>),
    /// Read the changes of other replicas.
    CatchUp(oneshot::Sender<()>),
}

/// The handle of the dispatcher, with its shared state. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Dispatch {
    requests: mpsc::Sender<Request>,
    pub(crate) workers: Workers,
    queue: Arc<Mutex<Queue>>,
    refused: Arc<Mutex<RejectedShapes>>,
}

/// The service stops, and the dispatcher no longer answers.
#[derive(Debug)]
pub(crate) struct Stopping;

impl Dispatch {
    /// Locks the queue.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the rejected demands.
    pub(crate) fn refused(&self) -> MutexGuard<'_, RejectedShapes> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the changes of other replicas, if the database answers.
    pub(crate) async fn catch_up(&self) {
        _ = self.call(Request::CatchUp).await;
    }

    /// Sends a request and waits for its result.
    pub(crate) async fn call<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, Stopping> {
        call(&self.requests, request).await.ok_or(Stopping)
    }
}

/// The task that serves the requests to [`Dispatch`].
#[derive(Debug)]
pub(crate) struct Dispatcher {
    db: Database,
    config: Arc<Config>,
    cache: WorkerCache,
    queue: Arc<Mutex<Queue>>,
    requests: mpsc::Receiver<Request>,
    /// The waiting calls for leases, which are also in the queue.
    waiters: Waiters,
    /// The calls that wait at other replicas.
    peers: PeerWaiters,
    /// The workers that are reserved for requests of this replica.
    reservations: Reservations,
    /// Whether a queue pass may place a request that was not placed before.
    pass_needed: bool,
    /// Workers with freed slots. Other replicas are notified after the next pass of this queue.
    freed: HashSet<WorkerId>,
    /// When all waiting workloads were last read.
    queue_read_at: Option<Timestamp>,
    /// When the slots of teams were last counted.
    slots_counted_at: Option<Timestamp>,
    /// The present reasons of waiting, by shape.
    reasons: HashMap<Arc<Shape>, WaitReasons>,
    /// Rejected demands that no worker could ever take.
    refused: Arc<Mutex<RejectedShapes>>,
}

impl Dispatcher {
    /// Creates a dispatcher and its handle.
    pub(crate) fn new(db: Database, config: Arc<Config>) -> (Dispatch, Self) {
        let (sender, requests) = mpsc::channel(REQUESTS);
        let cache = WorkerCache::new(&config);
        let queue = Arc::new(Mutex::new(Queue::new(config.queue_aging, config.team_weights.clone())));
        let refused = Arc::new(Mutex::new(RejectedShapes::default()));
        let dispatch = Dispatch {
            requests: sender,
            workers: cache.workers.clone(),
            queue: queue.clone(),
            refused: refused.clone(),
        };
        let dispatcher = Self {
            db,
            config,
            cache,
            queue,
            requests,
            waiters: Waiters::default(),
            peers: PeerWaiters::new(),
            reservations: Reservations::new(Timestamp::now()),
            pass_needed: true,
            freed: HashSet::new(),
            queue_read_at: None,
            slots_counted_at: None,
            reasons: HashMap::new(),
            refused,
        };
        (dispatch, dispatcher)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the pending requests.
    #[cfg(test)]
    pub(crate) fn pending_requests(&mut self) -> Vec<Request> {
        std::iter::from_fn(|| self.requests.try_recv().ok()).collect()
    }

    /// Waits for pending requests. Cancel safe.
    #[cfg(test)]
    pub(crate) async fn next_requests(&mut self) -> Vec<Request> {
        let mut received = Vec::new();
        self.requests.recv_many(&mut received, BATCH).await;
        received
    }

    /// Returns whether a call for this lease waits.
    #[cfg(test)]
    pub(crate) fn waits(&self, lease: LeaseId) -> bool {
        self.waiters.waits(lease)
    }

    /// Takes pending requests, up to one batch.
    fn take_requests(&mut self, requests: &mut Vec<Request>) {
        while requests.len() < BATCH
            && let Ok(request) = self.requests.try_recv()
        {
            requests.push(request);
        }
    }

    /// Commits a plan and updates the worker cache.
    async fn commit(&mut self, plan: &Plan, now: Timestamp) -> Result<CommitResult, DbErr> {
        let done = write_plan(&self.db, plan, &self.cache.facts(), now, &|| {}).await;
        let done = self.note(plan, done)?;
        self.read_workers(&done.affine_workers.values().copied().collect()).await?;
        Ok(done)
    }

    /// Updates the worker cache after a commit, and removes the planned load. Granted load is in
    /// the rows.
    fn note(&mut self, plan: &Plan, done: Result<CommitResult, DbErr>) -> Result<CommitResult, DbErr> {
        self.unplan(&plan.grants);
        let mut done = done?;
        placed(plan, &done).for_each(counters::placed);
        self.pass_needed |= !done.freed.is_empty();
        self.cache.forget(std::mem::take(&mut done.gone));
        self.pass_needed |= self.cache.note(std::mem::take(&mut done.workers))?;
        self.cache.wrote(done.transaction);
        Ok(done)
    }

    /// Returns whether no request waits, so that only notifications and new requests matter.
    fn is_idle(&self) -> bool {
        self.waiters.is_empty() && self.queue().len() == 0
    }

    /// Reads changed workers into the cache.
    async fn poll_workers(&mut self) -> Result<(), DbErr> {
        self.pass_needed |= self.cache.catch_up(&self.db).await?;
        Ok(())
    }

    /// Reads the workers of owners, which may be missing from the cache.
    async fn read_workers(&mut self, workers: &HashSet<WorkerId>) -> Result<(), DbErr> {
        self.pass_needed |= self.cache.read(&self.db, workers).await?;
        Ok(())
    }

    /// Removes the planned load of these grants.
    fn unplan(&self, grants: &[Grant]) {
        let mut workers = self.cache.workers.lock();
        for Grant { worker, demand, .. } in grants {
            workers.unplan(*worker, demand.kind, &demand.shape.requests);
        }
    }

    /// Returns the reasons why a request with this demand waits.
    fn reasons(&mut self, demand: &Demand) -> Arc<[String]> {
        // Updated when they change: see [`Dispatcher::update_reasons`].
        if !self.reasons.contains_key(&demand.shape) {
            self.reasons_now(demand);
        }
        let Some(why) = self.reasons.get(&demand.shape) else { return Arc::default() };
        counters::refused(why.codes.iter().copied());
        why.lines.clone()
    }

    /// Computes the present reasons.
    fn reasons_now(&mut self, demand: &Demand) -> Arc<[String]> {
        let mut workers = self.cache.workers.lock();
        let why = match workers.choose(demand, &[]) {
            Choice::Placed(_) => WaitReasons::behind_equal_requests(),
            Choice::NotNow | Choice::Never => WaitReasons::of(&workers.refusals(demand)),
        };
        drop(workers);
        let lines = why.lines.clone();
        self.reasons.insert(demand.shape.clone(), why);
        lines
    }
}

/// The reasons why requests of a shape wait.
#[derive(Debug, Clone)]
struct WaitReasons {
    lines: Arc<[String]>,
    codes: BTreeSet<&'static str>,
}

impl WaitReasons {
    fn behind_equal_requests() -> Self {
        let lines = Arc::new(["requests ahead of it have the same requirements".to_owned()]);
        Self { lines, codes: BTreeSet::new() }
    }

    fn of(refusals: &Refusals) -> Self {
        Self { lines: refusals.lines().into(), codes: refusals.codes() }
    }
}

/// Commits `plan` in one transaction. `locked` is called once the workers are locked.
async fn write_plan(
    db: &Database,
    plan: &Plan,
    facts: &SharedFacts,
    now: Timestamp,
    locked: &(dyn Fn() + Sync),
) -> Result<CommitResult, DbErr> {
    let tries = AtomicUsize::new(0);
    let commit_plan = async |txn: db::Transaction| {
        tries.fetch_add(1, Ordering::Relaxed);
        commit::commit_plan(&txn, plan, facts, now, locked).await
    };
    let mut done = db.write(commit_plan).await?;
    if tries.into_inner() > 1 {
        // A retried transaction may have been overtaken, so its rows may be noted too early.
        done.transaction = None;
    }
    Ok(done)
}

/// Returns the deciding strategies of the granted leases.
fn placed(plan: &Plan, done: &CommitResult) -> impl Iterator<Item = DecidedBy> {
    plan.grants.iter().filter(|grant| done.is_committed(grant)).map(|grant| grant.decided_by)
}

/// Serves requests until the service stops.
pub(crate) async fn dispatch_forever(mut dispatcher: Dispatcher, context: Context) {
    let notify = &context.notify;
    let (mut requests, mut is_due, mut polled_at, mut is_current) = (Vec::new(), false, None, false);
    loop {
        let next_poll = match polled_at {
            None => Instant::now(),
            Some(at) if is_current && dispatcher.is_idle() => context.ticks.idle_after(at),
            Some(at) => context.ticks.after(at),
        };
        let (next_end, none_held) = (dispatcher.waiters.next_end(), requests.is_empty());
        tokio::select! {
            biased;
            () = context.stopping.cancelled() => break,
            () = sleep_until(next_poll) => (is_due, polled_at) = (true, Some(Instant::now())),
            // Before notifications, which every pass processes. Requests are answered even if
            // notifications arrive continuously.
            () = std::future::ready(()), if !none_held => {}
            count = dispatcher.requests.recv_many(&mut requests, BATCH), if none_held => if count == 0 { break },
            () = notify.local.dispatch().notified() => {}
            () = wait_until(next_end) => {}
        }
        // A pass may take longer than a poll interval, and the poll precedes pending requests.
        dispatcher.take_requests(&mut requests);
        let mut effects = Effects::default();
        let is_requested =
            notify.local.take_much() || requests.iter().any(|request| matches!(request, Request::CatchUp(_)));
        let is_due = std::mem::take(&mut is_due);
        let (mut caught_up, mut away) = (false, None);
        if is_due || is_requested {
            match dispatcher.catch_up(is_due, &mut effects).await {
                Ok(()) if is_due => {
                    caught_up = true;
                    if let Err(error) = dispatcher.exchange_calls(Timestamp::now()).await {
                        tracing::warn!(error = %error, "cannot exchange waiting calls with other replicas");
                    }
                }
                Ok(()) => caught_up = true,
                Err(error) => {
                    tracing::warn!(error = %error, "cannot read the workers and the queue from the database: trying again");
                    away = is_away(&error).then_some(error);
                }
            }
        }
        is_current = if is_due { caught_up } else { is_current };
        if let Some(error) = away {
            // Nothing can be granted, so pending requests fail immediately.
            dispatcher.take_requests(&mut requests);
            batch::fail(std::mem::take(&mut requests), &error);
            dispatcher.end_waits(Instant::now(), is_due);
            notify.announce_granted(effects);
            continue;
        }
        // Changes before a request are read before it is decided.
        dispatcher.apply_notifications(&notify.local).await;
        // Waiting requests precede new ones.
        if let Err(error) = dispatcher.run_queue_pass(Timestamp::now(), &mut effects).await {
            tracing::warn!(error = %error, "cannot place waiting requests");
        }
        if !requests.is_empty() {
            notify.announce_granted(std::mem::take(&mut effects));
            let nothing_is_before = || {
                let is_due = Instant::now() >= next_poll || context.stopping.is_cancelled();
                !is_due && !notify.local.has_changed()
            };
            let announce = |effects| notify.announce_granted(effects);
            let caller = RoundContext {
                now: &Timestamp::now,
                nothing_is_before: &nothing_is_before,
                announce: &announce,
            };
            requests = dispatcher.rounds(requests, &caller).await;
            if let Err(error) = dispatcher.run_queue_pass(Timestamp::now(), &mut effects).await {
                tracing::warn!(error = %error, "cannot place waiting requests");
            }
            effects.freed.extend(dispatcher.freed.drain());
        }
        dispatcher.end_waits(Instant::now(), is_due);
        if is_due && caught_up {
            dispatcher.refuse_hopeless();
        }
        // Other replicas know these calls as waiting, with ids that no workload has.
        let over = dispatcher.waiters.take_withdrawn();
        effects.queued.extend(over.into_iter().map(WorkloadId::from_uuid));
        notify.announce_granted(effects);
    }
    // Otherwise other replicas would leave freed slots to calls that have ended. The shutdown does
    // not wait longer for this.
    match tokio::time::timeout(dispatcher.config.poll, dispatcher.withdraw_calls()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "cannot withdraw waiting calls from other replicas"),
        Err(_) => {
            tracing::debug!("cannot withdraw waiting calls from other replicas: the database does not answer")
        }
    }
}

/// Returns whether the database is unavailable.
fn is_away(error: &DbErr) -> bool {
    matches!(error, DbErr::ConnectionAcquire(_) | DbErr::Conn(_))
}

/// Resolves at the end of the next waiting time, if there is one.
async fn wait_until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Creates the span of a placement, in the trace of the submission.
fn span(id: WorkloadId, traceparent: &str) -> tracing::Span {
    let span = tracing::info_span!(target: "gantry", "place", service = "scheduler", workload.id = %id);
    rpc::trace::continue_from(&span, traceparent);
    span
}

#[cfg(test)]
mod tests {
    use domain::AttemptId;
    use domain::worker::Incarnation;

    use super::*;
    use crate::commit::Holder;
    use crate::placement::{Purpose, Resources};
    use crate::workloads::events::AttemptLocation;

    #[test]
    fn only_granted_leases_count_as_placed() {
        let shape = Shape {
            team: "main".to_owned(),
            platform: "linux".to_owned(),
            tags: vec![],
            process: None,
            requests: Resources::default(),
            purpose: Purpose::Build,
        };
        let worker = WorkerId::new();
        let grant = |lease: LeaseId, decided_by: DecidedBy, holder: Holder| Grant {
            group: None,
            lease,
            decided_by,
            demand: Arc::new(shape.clone().requested_by(lease.uuid())),
            worker,
            incarnation: Incarnation(1),
            holder,
        };
        let driven = |lease, by| {
            let (request, owner) = (String::new(), String::new());
            grant(lease, by, Holder::Driven { expires_at: Timestamp(0), request, owner, settles: false })
        };
        let of_workload = |lease, by, id| {
            let attempt = AttemptId::new();
            let (worker_name, gateway_endpoint) = (String::new(), String::new());
            let location = AttemptLocation { worker, worker_name, gateway_endpoint, attempt };
            grant(lease, by, Holder::Workload { id, attempt, location, reason: String::new() })
        };
        let [granted, refused, assigned, moot] = [(); 4].map(|()| LeaseId::new());
        let workloads = [WorkloadId::new(), WorkloadId::new()];
        let plan = Plan {
            grants: vec![
                driven(granted, DecidedBy::Only),
                driven(refused, DecidedBy::Lot),
                of_workload(assigned, DecidedBy::Requested, workloads[0]),
                of_workload(moot, DecidedBy::Contact, workloads[1]),
            ],
            ..Plan::default()
        };
        let mut done = CommitResult::default();
        done.refused.insert(refused);
        done.settled.insert(workloads[1], None);
        let counted: Vec<_> = placed(&plan, &done).collect();
        assert_eq!(counted, [DecidedBy::Only, DecidedBy::Requested]);
    }
}
