//! Scheduling: every request for a worker, from a submission or a call to its grant.
//!
//! One task of each replica does it ([`dispatch_forever`]), in batches ([`pipeline`], `batch.rs`).
//! It decides a batch on its view of the workers ([`crate::workers::cache`]) while the batch before
//! is written, and commits it in one transaction ([`crate::commit`]). A grant that the transaction
//! refuses is decided again.
//!
//! Requests that wait have their turns before and after each batch (`queue_pass.rs`,
//! [`crate::queue`]). Calls for leases wait in the same queue ([`waiters`]), and those of other
//! replicas are known there ([`peer_waiters`]). A worker is reserved for a request that has waited
//! long and asks for more than comes free at a time ([`reservations`]).
//!
//! Invariant: two replicas never both place a workload. The transaction that places it holds its
//! row, and finds it waiting.

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
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::commit::{self, CommitResult, Grant, Plan};
use crate::config::Config;
use crate::context::Context;
use crate::counters;
use crate::db::entity::lease::Kind;
use crate::notify::changes::Effects;
use crate::notify::request::call;
use crate::placement::{Choice, DecidedBy, Demand, Location, Refusals, Shape};
use crate::queue::Queue;
use crate::queue::limits::TooManyWaiting;
use crate::queue::unschedulable::RefusedShapes;
use crate::scheduling::peer_waiters::PeerWaiters;
pub(crate) use crate::scheduling::pipeline::Caller;
use crate::scheduling::reservations::Reservations;
use crate::scheduling::waiters::Waiters;
use crate::store_client::Inputs;
use crate::workers::cache::{SharedFacts, WorkerCache, Workers};
use crate::workloads::{OtherSpec, Submission};

/// How often something is decided anew because what was decided on had changed in the meantime.
const DECISIONS: usize = 8;

/// How many requests are taken into a round, and how many of the queue are placed by one transaction.
const BATCH: usize = 512;

/// How many requests may wait for a round. Further callers wait until there is room.
const REQUESTS: usize = 4096;

/// A workload cannot be accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    /// The id names another workload.
    #[error(transparent)]
    Exists(#[from] OtherSpec),
    /// No worker could ever run it.
    #[error("no worker could ever run it: {}", .0.lines().join("; "))]
    NoCompatibleWorker(Refusals),
    /// The artifact store refused to pin its inputs, or could not be asked.
    #[error("its inputs cannot be pinned")]
    NotPinned(#[source] rpc::Refusal),
    /// Its team has as much waiting as it may have.
    #[error(transparent)]
    TooManyWaiting(#[from] TooManyWaiting),
    /// What it was decided on changed again and again.
    #[error("the workers changed too often while it was decided")]
    Undecided,
    /// The service stops.
    #[error("the scheduler is stopping")]
    Stopping,
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// A driven lease cannot be granted.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PlaceError {
    /// No worker could ever do.
    #[error("no worker could ever do: {}", .0.lines().join("; "))]
    NoCompatibleWorker(Refusals),
    /// Those that could are busy or out of contact now.
    #[error("no worker can do now: {}", .0.lines().join("; "))]
    AllWorkersBusy(Refusals),
    /// The id was used for something else, or its lease has ended.
    #[error("the id names another lease, or one that has ended")]
    Exists,
    /// The lease that it shall be near to is unknown, or has ended.
    #[error("the lease whose worker it shall have is unknown, or has ended")]
    NoSuchLease,
    /// An input is unknown to the team, not sealed, or its bytes are lost.
    #[error("artifact {0} cannot be used as an input")]
    InputUnavailable(ArtifactId),
    /// A task cache is unknown to the team.
    #[error("task cache {0} is unknown to this team")]
    CacheUnavailable(CacheId),
    /// The artifact store refused to pin its inputs, or could not be asked.
    #[error("its inputs cannot be pinned")]
    NotPinned(#[source] rpc::Refusal),
    /// What it was decided on changed again and again.
    #[error("the workers changed too often while it was decided")]
    Undecided,
    /// The service stops.
    #[error("the scheduler is stopping")]
    Stopping,
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// A driven lease that was granted.
#[derive(Debug, Clone)]
pub(crate) struct GrantedLease {
    pub(crate) claims: LeaseClaims,
    pub(crate) worker_name: String,
    pub(crate) gateway_endpoint: String,
}

/// What becomes of one of several that were asked for together.
pub(crate) type PlaceResult = Result<GrantedLease, PlaceError>;

/// A driven lease that somebody asks for.
#[derive(Debug, Clone)]
pub(crate) struct LeaseRequest {
    pub(crate) lease: LeaseId,
    pub(crate) kind: Kind,
    pub(crate) demand: Arc<Demand>,
    /// What shall be pinned for it, and where that is.
    pub(crate) inputs: Arc<Inputs>,
    pub(crate) locations: Arc<[Location]>,
    /// To tell a repeat from another request.
    pub(crate) request: String,
    /// Those of one group are granted together, or none.
    pub(crate) group: Option<u32>,
    /// Whose containers run under it. Empty: nobody's in particular.
    pub(crate) owner: String,
    /// Where they are: there alone it is granted, as long as that worker takes work.
    pub(crate) kept_to: Option<WorkerId>,
    /// How long it waits for a worker that could but cannot now. Of a group, the longest counts, and the highest priority.
    pub(crate) wait: Duration,
    pub(crate) priority: i64,
}

/// What is asked of the dispatcher.
#[derive(Debug)]
pub(crate) enum Request {
    /// A workload for which nothing has to be pinned: it is placed or queued, and durable, once this is answered.
    Submit(Arc<Submission>, oneshot::Sender<Result<(), SubmitError>>),
    /// What a workload that was accepted needs is pinned, and is at these locations.
    Pinned(Arc<Submission>, Arc<[Location]>, oneshot::Sender<Result<(), SubmitError>>),
    /// Driven leases.
    Place(Vec<LeaseRequest>, oneshot::Sender<Vec<PlaceResult>>),
    /// Driven leases that are given back, and whose slots they are.
    Release(Vec<(LeaseId, WorkerId)>, oneshot::Sender<Result<(), DbErr>>),
    /// To see what others have changed.
    CatchUp(oneshot::Sender<()>),
}

/// Where requests are brought, and what everyone may look at. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Dispatch {
    requests: mpsc::Sender<Request>,
    pub(crate) workers: Workers,
    queue: Arc<Mutex<Queue>>,
    refused: Arc<Mutex<RefusedShapes>>,
}

/// The service stops, and nobody answers any more.
#[derive(Debug)]
pub(crate) struct Stopping;

impl Dispatch {
    /// A look at those that wait.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was refused for good.
    pub(crate) fn refused(&self) -> MutexGuard<'_, RefusedShapes> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees what others have changed, as far as the database answers.
    pub(crate) async fn catch_up(&self) {
        _ = self.ask(Request::CatchUp).await;
    }

    /// Brings a request, and waits for what becomes of it.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, Stopping> {
        call(&self.requests, request).await.ok_or(Stopping)
    }
}

/// Does what is asked of [`Dispatch`].
#[derive(Debug)]
pub(crate) struct Dispatcher {
    db: Database,
    config: Arc<Config>,
    memory: WorkerCache,
    queue: Arc<Mutex<Queue>>,
    requests: mpsc::Receiver<Request>,
    /// The calls for leases that wait, which are in the queue as well.
    asking: Waiters,
    /// The calls that wait at other replicas.
    elsewhere: PeerWaiters,
    /// The workers that are reserved for those that wait here.
    reservations: Reservations,
    /// Whether those that wait may find something that they did not find before.
    look: bool,
    /// Where slots came free of which others are told once those that wait here have had their turns.
    freed: HashSet<WorkerId>,
    /// When all that waits was read last.
    whole_at: Option<Timestamp>,
    /// When it was counted last how many slots each team holds.
    held_at: Option<Timestamp>,
    /// Why demands of a shape wait, as those who wait for that were told.
    reasons: HashMap<Arc<Shape>, Why>,
    /// What was refused for good.
    refused: Arc<Mutex<RefusedShapes>>,
}

impl Dispatcher {
    /// A dispatcher, and the way to it.
    pub(crate) fn new(db: Database, config: Arc<Config>) -> (Dispatch, Self) {
        let (sender, requests) = mpsc::channel(REQUESTS);
        let memory = WorkerCache::new(&config);
        let queue = Arc::new(Mutex::new(Queue::new(config.queue_aging, config.team_weights.clone())));
        let refused = Arc::new(Mutex::new(RefusedShapes::default()));
        let dispatch = Dispatch {
            requests: sender,
            workers: memory.workers.clone(),
            queue: queue.clone(),
            refused: refused.clone(),
        };
        let dispatcher = Self {
            db,
            config,
            memory,
            queue,
            requests,
            asking: Waiters::default(),
            elsewhere: PeerWaiters::new(),
            reservations: Reservations::new(Timestamp::now()),
            look: true,
            freed: HashSet::new(),
            whole_at: None,
            held_at: None,
            reasons: HashMap::new(),
            refused,
        };
        (dispatch, dispatcher)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is asked for now.
    #[cfg(test)]
    pub(crate) fn asked(&mut self) -> Vec<Request> {
        std::iter::from_fn(|| self.requests.try_recv().ok()).collect()
    }

    /// The same, as soon as it is something. Cancel safe.
    #[cfg(test)]
    pub(crate) async fn next_asked(&mut self) -> Vec<Request> {
        let mut asked = Vec::new();
        self.requests.recv_many(&mut asked, BATCH).await;
        asked
    }

    /// Whether a call waits that asks for this lease.
    #[cfg(test)]
    pub(crate) fn waits(&self, lease: LeaseId) -> bool {
        self.asking.waits(lease)
    }

    /// What was asked for meanwhile, as much as is decided at a time.
    fn take_asked(&mut self, requests: &mut Vec<Request>) {
        while requests.len() < BATCH
            && let Ok(request) = self.requests.try_recv()
        {
            requests.push(request);
        }
    }

    /// Has a plan granted, and notes what is known of the workers then.
    async fn carry_out(&mut self, plan: &Plan, now: Timestamp) -> Result<CommitResult, DbErr> {
        let done = granted(&self.db, plan, &self.memory.facts(), now, &|| {}).await;
        let done = self.note(plan, done)?;
        self.see(&done.kept_to.values().copied().collect()).await?;
        Ok(done)
    }

    /// Notes what became of a plan, and what is known of the workers then. It is planned no more: what was granted, their rows say.
    fn note(&mut self, plan: &Plan, done: Result<CommitResult, DbErr>) -> Result<CommitResult, DbErr> {
        self.give_back(&plan.grants);
        let mut done = done?;
        placed(plan, &done).for_each(counters::placed);
        self.look |= !done.freed.is_empty();
        self.memory.forget(std::mem::take(&mut done.gone));
        self.look |= self.memory.note(std::mem::take(&mut done.workers))?;
        self.memory.wrote(done.transaction);
        Ok(done)
    }

    /// Looks at what others have changed of workers.
    async fn look_at_workers(&mut self) -> Result<(), DbErr> {
        self.look |= self.memory.catch_up(&self.db).await?;
        Ok(())
    }

    /// Looks at workers where the containers of owners are, which may not be known here yet.
    async fn see(&mut self, workers: &HashSet<WorkerId>) -> Result<(), DbErr> {
        self.look |= self.memory.read(&self.db, workers).await?;
        Ok(())
    }

    /// These are planned no more.
    fn give_back(&self, grants: &[Grant]) {
        let mut workers = self.memory.workers.lock();
        for Grant { worker, kind, demand, .. } in grants {
            workers.unplan(*worker, *kind, &demand.shape.requests);
        }
    }

    /// Why nobody takes `demand` now, for those who wait for that.
    fn reasons(&mut self, demand: &Demand) -> Arc<[String]> {
        // Told anew when that changes: see [`Dispatcher::tell_why`].
        if !self.reasons.contains_key(&demand.shape) {
            self.reasons_now(demand);
        }
        let Some(why) = self.reasons.get(&demand.shape) else { return Arc::default() };
        counters::refused(why.codes.iter().copied());
        why.lines.clone()
    }

    /// The same, as it is now.
    fn reasons_now(&mut self, demand: &Demand) -> Arc<[String]> {
        let mut workers = self.memory.workers.lock();
        let why = match workers.choose(demand, &[]) {
            Choice::Placed(_) => Why::others_are_before(),
            Choice::NotNow | Choice::Never => Why::of(&workers.refusals(demand)),
        };
        drop(workers);
        let lines = why.lines.clone();
        self.reasons.insert(demand.shape.clone(), why);
        lines
    }
}

/// Why demands of a shape wait.
#[derive(Debug, Clone)]
struct Why {
    lines: Arc<[String]>,
    codes: BTreeSet<&'static str>,
}

impl Why {
    fn others_are_before() -> Self {
        let lines = Arc::new(["others that ask for the same are before it".to_owned()]);
        Self { lines, codes: BTreeSet::new() }
    }

    fn of(refusals: &Refusals) -> Self {
        Self { lines: refusals.lines().into(), codes: refusals.codes() }
    }
}

/// Has `plan` granted in one transaction. `locked`: is told when its workers are locked.
async fn granted(
    db: &Database,
    plan: &Plan,
    facts: &SharedFacts,
    now: Timestamp,
    locked: &(dyn Fn() + Sync),
) -> Result<CommitResult, DbErr> {
    let tries = AtomicUsize::new(0);
    let carry_out = async |txn: db::Transaction| {
        tries.fetch_add(1, Ordering::Relaxed);
        commit::carry_out(&txn, plan, facts, now, locked).await
    };
    let mut done = db.write(carry_out).await?;
    if tries.into_inner() > 1 {
        // Another may have passed it: what it made of the rows may be noted too early.
        done.transaction = None;
    }
    Ok(done)
}

/// By what each of `plan` was decided that was granted.
fn placed(plan: &Plan, done: &CommitResult) -> impl Iterator<Item = DecidedBy> {
    plan.grants.iter().filter(|grant| done.holds(grant)).map(|grant| grant.decided_by)
}

/// Does what is asked for, until the service stops.
pub(crate) async fn dispatch_forever(mut dispatcher: Dispatcher, context: Context) {
    let notify = &context.notify;
    let mut poll = interval(dispatcher.config.poll);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut requests, mut is_due, mut next_look) = (Vec::new(), false, Instant::now());
    loop {
        let (patience, none_held) = (dispatcher.asking.next_end(), requests.is_empty());
        tokio::select! {
            biased;
            () = context.stopping.cancelled() => break,
            at = poll.tick() => (is_due, next_look) = (true, at + dispatcher.config.poll),
            // Before the hints, which are heard in every pass: however many there are, who asks is answered.
            () = std::future::ready(()), if !none_held => {}
            count = dispatcher.requests.recv_many(&mut requests, BATCH), if none_held => if count == 0 { break },
            () = notify.local.dispatch().notified() => {}
            () = patience_ends(patience) => {}
        }
        // Each look may take for longer than until the next is due, which comes before them.
        dispatcher.take_asked(&mut requests);
        let mut effects = Effects::default();
        let asked =
            notify.local.take_much() || requests.iter().any(|request| matches!(request, Request::CatchUp(_)));
        let is_due = std::mem::take(&mut is_due);
        let (mut caught_up, mut away) = (false, None);
        if is_due || asked {
            match dispatcher.catch_up(is_due, &mut effects).await {
                Ok(()) if is_due => {
                    caught_up = true;
                    if let Err(error) = dispatcher.tend_elsewhere(Timestamp::now()).await {
                        tracing::warn!(error = %error, "cannot tell other replicas who waits, nor hear it");
                    }
                }
                Ok(()) => caught_up = true,
                Err(error) => {
                    tracing::warn!(error = %error, "cannot look at the workers and the queue");
                    away = is_away(&error).then_some(error);
                }
            }
        }
        if let Some(error) = away {
            // Nothing can be granted, and who asks, also since then, need not wait for more than this to hear that.
            dispatcher.take_asked(&mut requests);
            batch::fail(std::mem::take(&mut requests), &error);
            dispatcher.end_patience(Instant::now(), is_due);
            notify.announce_granted(effects);
            continue;
        }
        // What was changed before something was asked for is seen before it is decided.
        dispatcher.hear(&notify.local).await;
        // Who waits is before who comes.
        if let Err(error) = dispatcher.take_turns(Timestamp::now(), &mut effects).await {
            tracing::warn!(error = %error, "cannot place what waits");
        }
        if !requests.is_empty() {
            notify.announce_granted(std::mem::take(&mut effects));
            let nothing_is_before = || {
                let is_due = Instant::now() >= next_look || context.stopping.is_cancelled();
                !is_due && !notify.local.has_changed()
            };
            let tell = |effects| notify.announce_granted(effects);
            let caller = Caller { now: &Timestamp::now, nothing_is_before: &nothing_is_before, tell: &tell };
            requests = dispatcher.rounds(requests, &caller).await;
            if let Err(error) = dispatcher.take_turns(Timestamp::now(), &mut effects).await {
                tracing::warn!(error = %error, "cannot place what waits");
            }
            effects.freed.extend(dispatcher.freed.drain());
        }
        dispatcher.end_patience(Instant::now(), is_due);
        if is_due && caught_up {
            dispatcher.refuse_hopeless();
        }
        // To others they are what waits, and is no workload that does.
        let over = dispatcher.asking.told_in_vain();
        effects.queued.extend(over.into_iter().map(WorkloadId::from_uuid));
        notify.announce_granted(effects);
    }
    // Else what comes free would be left to calls that are over, for a while: it is not worth waiting for longer.
    match tokio::time::timeout(dispatcher.config.poll, dispatcher.tell_none()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "others are not told that no call waits here any more"),
        Err(_) => tracing::debug!(
            "others are not told that no call waits here any more: the database does not answer"
        ),
    }
}

/// Whether the database does not answer.
fn is_away(error: &DbErr) -> bool {
    matches!(error, DbErr::ConnectionAcquire(_) | DbErr::Conn(_))
}

/// Resolves when somebody who waits has waited long enough, if anybody does.
async fn patience_ends(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// For the time in which a workload is placed, in the trace of who submitted it.
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
    use crate::workloads::events::Whereabouts;

    #[test]
    fn only_what_was_granted_counts_as_placed() {
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
            kind: Kind::Task,
            demand: Arc::new(shape.clone().asked_by(lease.uuid())),
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
            let whereabouts = Whereabouts { worker, worker_name, gateway_endpoint, attempt };
            grant(lease, by, Holder::Workload { id, attempt, whereabouts, reason: String::new() })
        };
        let [granted, refused, assigned, moot] = [(); 4].map(|()| LeaseId::new());
        let workloads = [WorkloadId::new(), WorkloadId::new()];
        let plan = Plan {
            grants: vec![
                driven(granted, DecidedBy::Only),
                driven(refused, DecidedBy::Lot),
                of_workload(assigned, DecidedBy::AskedFor, workloads[0]),
                of_workload(moot, DecidedBy::Contact, workloads[1]),
            ],
            ..Plan::default()
        };
        let mut done = CommitResult::default();
        done.refused.insert(refused);
        done.settled.insert(workloads[1], None);
        let counted: Vec<_> = placed(&plan, &done).collect();
        assert_eq!(counted, [DecidedBy::Only, DecidedBy::AskedFor]);
    }
}
