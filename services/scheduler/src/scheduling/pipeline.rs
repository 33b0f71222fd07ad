//! The pipeline: one round of requests is decided while the previous one is being written, so that
//! neither the database nor this replica waits for the other.
//!
//! A decision ahead counts the planned load of earlier rounds on top of the last rows
//! ([`Index::plan`]), without their results. The commit checks everything on the rows. Waiting
//! requests and changes of other replicas precede new requests, so nothing is decided ahead of
//! them. A transaction that ends a lease grants its slot to a waiting request of this replica, as
//! far as that can be predicted. The next transaction begins when the previous one has locked its
//! workers or has ended. At most two are in progress.
//!
//! Invariant: rows read by the transactions of a dispatcher are noted in the order of their locks,
//! and no other read of workers happens until all are noted ([`Dispatcher::rounds`]). If a
//! transaction is retried and overtaken by another, the cache may hold an older state of a worker
//! until the next poll.
//!
//! [`Index::plan`]: crate::placement::Index::plan

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use domain::{LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::DbErr;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use super::batch::{OpenRequests, Unit, UnplacedUnit};
use super::queue_pass::PlannedPass;
use super::waiters::LeaseGroup;
use super::{BATCH, DECISIONS, Dispatcher, Request, write_plan};
use crate::commit::{CommitResult, Plan};
use crate::counters;
use crate::db::entity::is_duplicate;
use crate::notify::changes::Effects;
use crate::queue::LineHead;

/// The context of the caller of rounds.
pub(crate) struct RoundContext<'c> {
    pub(crate) now: &'c (dyn Fn() -> Timestamp + Sync),
    /// Returns whether nothing that only the caller knows precedes new requests.
    pub(crate) nothing_is_before: &'c (dyn Fn() -> bool + Sync),
    /// Announces effects to other tasks and replicas.
    pub(crate) announce: &'c (dyn Fn(Effects) + Sync),
}

/// The requests of a round, until all of them are decided.
#[derive(Debug)]
struct Round {
    began: Instant,
    /// Number of requests in the round.
    requests: usize,
    open: OpenRequests,
    /// Units with an id that another unit of the same step has.
    repeats: VecDeque<Unit>,
    /// Units that found no worker in the cache, which may be outdated.
    doubted: VecDeque<Unit>,
    /// Units that found no worker in a current cache.
    refused: Vec<(Unit, UnplacedUnit)>,
    /// Workers of owners that were missing from the cache.
    affine_workers: HashSet<WorkerId>,
    /// Ids of completed units, so that several units with one id are decided one after the other.
    concluded: HashSet<Uuid>,
    /// Waiting workloads with failures on more workers than known when they were planned.
    outdated: HashSet<WorkloadId>,
    leases_may_exist: bool,
    caught_up: bool,
    /// Number of decisions of this round.
    decisions: usize,
}

/// The part of a round that one transaction writes.
#[derive(Debug, Default)]
struct Step {
    plan: Plan,
    planned: Vec<Unit>,
    ids: HashSet<Uuid>,
    /// Grants for workloads that waited in the queue.
    turns: HashMap<LeaseId, LineHead>,
    /// Calls that waited in the queue.
    calls: Vec<LeaseGroup>,
    /// Spans that end with the commit.
    spans: Vec<tracing::Span>,
}

/// A round with a step that is being written.
#[derive(Debug)]
struct BatchCommit {
    round: Round,
    plan: Arc<Plan>,
    planned: Vec<Unit>,
    ids: HashSet<Uuid>,
    turns: HashMap<LeaseId, LineHead>,
    calls: Vec<LeaseGroup>,
    _spans: Vec<tracing::Span>,
    /// Signals that the workers are locked.
    locked: Arc<Notify>,
    is_locked: bool,
    /// The writing task, which is aborted when this is dropped. Empty if there is nothing to write.
    task: JoinSet<Result<CommitResult, DbErr>>,
}

impl BatchCommit {
    /// Returns the result of the commit. `None`: nothing was written.
    async fn done(&mut self) -> Option<Result<CommitResult, DbErr>> {
        let done = self.task.join_next().await?;
        Some(done.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => Err(DbErr::Custom(error.to_string())),
        }))
    }

    /// Returns whether `step` may be committed before this one. Two changes of one lease must stay
    /// in order.
    fn may_be_overtaken_by(&self, step: &Step) -> bool {
        let of = |plan: &Plan, ids: &HashSet<Uuid>| {
            plan.releases
                .iter()
                .map(|(lease, _)| lease.uuid())
                .chain(ids.iter().copied())
                .collect::<HashSet<_>>()
        };
        of(&self.plan, &self.ids).is_disjoint(&of(&step.plan, &step.ids))
    }
}

impl Dispatcher {
    /// Serves requests, and those that arrive meanwhile. Returns requests that something else
    /// precedes.
    pub(crate) async fn rounds(&mut self, requests: Vec<Request>, caller: &RoundContext<'_>) -> Vec<Request> {
        let (mut received, mut held, mut unfinished) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = (Round::new(), Step::default());
        let freed = freed_workers(&requests);
        self.add(&mut first, requests, caller);
        self.reuse_released(&mut first, &freed, (caller.now)());
        // Waiting requests that are not granted precede new requests.
        let mut is_open = first.1.turns.is_empty() && first.1.calls.is_empty();
        let mut ahead = None;
        let mut writing = VecDeque::from([self.write(first, caller)]);
        while let Some(front) = writing.front_mut() {
            let is_full = ahead.as_ref().is_some_and(|(round, _): &(Round, Step)| round.requests >= BATCH);
            let (locked, is_locked, mut begins) = (front.locked.clone(), front.is_locked, None);
            tokio::select! {
                biased;
                done = front.done() => {
                    let written = writing.pop_front();
                    let noted = written.as_ref().zip(done).map(|(written, done)| self.note(&written.plan, done));
                    // The result is processed while the next step is written.
                    if writing.is_empty() {
                        writing.extend(ahead.take().map(|ahead| self.write(ahead, caller)));
                    }
                    unfinished.extend(written.and_then(|written| self.finish(written, noted, caller)));
                }
                () = locked.notified(), if !is_locked => {
                    writing[0].is_locked = true;
                    let may_begin = writing.len() == 1;
                    begins = ahead.take_if(|(_, step)| {
                        may_begin && writing[0].may_be_overtaken_by(step)
                    });
                }
                count = self.requests.recv_many(&mut received, BATCH), if is_open && !is_full => {
                    is_open = count > 0 && unfinished.is_empty() && self.may_go_ahead(&received, caller);
                    if is_open {
                        let ahead = ahead.get_or_insert_with(|| (Round::new(), Step::default()));
                        self.add(ahead, std::mem::take(&mut received), caller);
                    } else {
                        held.append(&mut received);
                    }
                }
            }
            writing.extend(begins.map(|begins| self.write(begins, caller)));
        }
        for round in unfinished {
            self.complete(round, caller).await;
        }
        held
    }

    /// Plans the slots of released leases for waiting requests, as if they were free. The rows
    /// decide whether they are.
    fn reuse_released(&mut self, (round, step): &mut (Round, Step), freed: &[WorkerId], now: Timestamp) {
        // A waiting request that is repeated is decided on its own, in its order.
        let some_ask_again = round.leases_may_exist || step.ids.iter().any(|id| self.queue().contains(*id));
        if freed.is_empty() || some_ask_again || self.queue().len() == 0 {
            return;
        }
        let seen = self.cache.workers.lock().expect_slots(freed);
        // Unschedulable requests stay in the queue until the next pass.
        let planned = self.plan_queue_pass(std::mem::take(&mut step.plan), now);
        self.cache.workers.lock().restore_seen(seen);
        step.spans.extend(planned.spans());
        let PlannedPass { plan, turns, calls, unschedulable: _ } = planned;
        step.ids.extend(turns.values().map(|turn| turn.workload().uuid()));
        step.ids.extend(calls.iter().flat_map(LeaseGroup::leases).map(|lease| lease.uuid()));
        (step.plan, step.turns, step.calls) = (plan, turns, calls);
    }

    /// Returns whether nothing precedes these requests.
    fn may_go_ahead(&self, requests: &[Request], caller: &RoundContext<'_>) -> bool {
        let catches_up = requests.iter().any(|request| matches!(request, Request::CatchUp(_)));
        !catches_up && self.queue().len() == 0 && (caller.nothing_is_before)()
    }

    /// Decides requests as far as the worker cache suffices.
    fn add(&mut self, (round, step): &mut (Round, Step), requests: Vec<Request>, caller: &RoundContext<'_>) {
        let now = (caller.now)();
        round.requests += requests.len();
        round.open.add(requests, now);
        round.leases_may_exist |= self.replace_waiting(&mut round.open.units);
        self.decide_step(round, step, now);
    }

    /// Decides the open units.
    fn decide_step(&mut self, round: &mut Round, step: &mut Step, now: Timestamp) {
        let is_last = round.decisions == DECISIONS;
        step.plan.releases.append(&mut round.open.releases);
        while let Some(mut unit) = round.open.units.pop_front() {
            if unit.ids().any(|id| step.ids.contains(&id) && !round.concluded.contains(&id)) {
                round.repeats.push_back(unit);
                continue;
            }
            if unit.is_disconnected() {
                continue;
            }
            step.ids.extend(unit.ids());
            match self.decide(&mut unit, &mut step.plan, is_last, now) {
                Ok(()) => {
                    step.spans.extend(unit.span());
                    step.planned.push(unit);
                }
                Err(_) if !round.caught_up => round.doubted.push_back(unit),
                Err(why) => round.refused.push((unit, why)),
            }
        }
        step.plan.leases_may_exist = round.leases_may_exist;
    }

    /// Starts the commit of a step.
    fn write(&self, (round, step): (Round, Step), caller: &RoundContext<'_>) -> BatchCommit {
        let Step { plan, planned, ids, turns, calls, spans } = step;
        let (plan, locked, mut task) = (Arc::new(plan), Arc::new(Notify::new()), JoinSet::new());
        if !plan.is_empty() {
            let (db, plan, facts) = (self.db.clone(), plan.clone(), self.cache.facts());
            let (locked, now) = (locked.clone(), (caller.now)());
            task.spawn(async move { write_plan(&db, &plan, &facts, now, &|| locked.notify_one()).await });
        }
        BatchCommit { round, plan, planned, ids, turns, calls, _spans: spans, locked, is_locked: false, task }
    }

    /// Processes the result of a commit. Returns the round if units are still open.
    fn finish(
        &mut self,
        written: BatchCommit,
        done: Option<Result<CommitResult, DbErr>>,
        caller: &RoundContext<'_>,
    ) -> Option<Round> {
        let BatchCommit { mut round, plan, planned, turns, calls, .. } = written;
        round.decisions += 1;
        match done {
            None => {}
            Some(Ok(done)) => {
                if !plan.grants.iter().all(|grant| done.is_committed(grant)) {
                    round.reopen_refused();
                }
                let mut effects = Effects::default();
                round.affine_workers.extend(done.affine_workers.values());
                for mut unit in planned {
                    let is_refused = unit.leases().any(|lease| done.refused.contains(&lease));
                    let exists = unit.leases().any(|lease| done.exists(lease));
                    if is_refused && !exists {
                        unit.set_owner_workers(&done.affine_workers);
                        round.open.units.push_back(unit);
                    } else {
                        round.concluded.extend(unit.ids());
                        self.conclude(unit, &done, &mut effects);
                    }
                }
                self.conclude_turns(turns, calls, &done, &mut effects);
                round.outdated.extend(&done.outdated);
                self.announce_freed(&done.freed, &mut effects);
                effects.workers.extend(&done.stopping);
                effects.parcels.extend(done.parcels);
                (caller.announce)(effects);
            }
            // Another call inserted the same id first, so it exists now.
            Some(Err(error)) if is_duplicate(&error) && round.decisions <= DECISIONS => {
                round.leases_may_exist = true;
                round.reopen_refused();
                self.requeue(turns, calls);
                round.open.releases.extend(&plan.releases);
                round.open.units.extend(planned);
            }
            Some(Err(error)) => {
                self.requeue(turns, calls);
                round.open.units.extend(planned);
                round.fail(&error);
                return None;
            }
        }
        if round.is_over() {
            round.answer();
            return None;
        }
        Some(round)
    }

    /// Lets waiting requests use freed slots.
    fn announce_freed(&mut self, freed: &HashSet<WorkerId>, effects: &mut Effects) {
        if self.queue().len() > 0 {
            // Waiting requests of this replica are served next, so other replicas need not compete.
            self.freed.extend(freed);
        } else {
            effects.freed.extend(freed);
        }
    }

    /// Completes a round, one step after the other.
    async fn complete(&mut self, mut round: Round, caller: &RoundContext<'_>) {
        loop {
            if let Err(error) = self.refresh(&mut round).await {
                return round.fail(&error);
            }
            if round.is_over() || round.decisions > DECISIONS {
                return round.answer();
            }
            let mut step = Step::default();
            self.decide_step(&mut round, &mut step, (caller.now)());
            let mut writing = self.write((round, step), caller);
            let done = writing.done().await.map(|done| self.note(&writing.plan, done));
            match self.finish(writing, done, caller) {
                Some(left) => round = left,
                None => return,
            }
        }
    }

    /// Updates the cache for units that were not decided or were rejected.
    async fn refresh(&mut self, round: &mut Round) -> Result<(), DbErr> {
        self.refuse(std::mem::take(&mut round.refused)).await;
        self.read_workers(&std::mem::take(&mut round.affine_workers)).await?;
        self.read_waiting(&std::mem::take(&mut round.outdated)).await?;
        round.leases_may_exist |= !round.repeats.is_empty();
        round.open.units.append(&mut round.repeats);
        // After a second rejection, the whole cache is updated.
        if !round.doubted.is_empty() || round.decisions > 1 {
            round.caught_up = true;
            self.poll_workers().await?;
            round.open.units.append(&mut round.doubted);
        }
        Ok(())
    }
}

/// Returns the workers of released leases.
fn freed_workers(requests: &[Request]) -> Vec<WorkerId> {
    let freed = requests.iter().filter_map(|request| match request {
        Request::Release(leases, _) => Some(leases.iter().map(|(_, worker)| *worker)),
        Request::Submit(..) | Request::Pinned(..) | Request::Place(..) | Request::CatchUp(_) => None,
    });
    freed.flatten().collect()
}

impl Round {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            requests: 0,
            open: OpenRequests::default(),
            repeats: VecDeque::new(),
            doubted: VecDeque::new(),
            refused: Vec::new(),
            affine_workers: HashSet::new(),
            concluded: HashSet::new(),
            outdated: HashSet::new(),
            leases_may_exist: false,
            caught_up: false,
            decisions: 0,
        }
    }

    /// Returns whether nothing is left to decide.
    fn is_over(&self) -> bool {
        let Self { open, repeats, doubted, refused, affine_workers, outdated, .. } = self;
        let units_are =
            open.units.is_empty() && repeats.is_empty() && doubted.is_empty() && refused.is_empty();
        units_are && open.releases.is_empty() && affine_workers.is_empty() && outdated.is_empty()
    }

    /// Decides units again that found no room beside grants which were then rejected.
    fn reopen_refused(&mut self) {
        // After the last decision, the units keep their answer.
        if self.decisions < DECISIONS {
            self.open.units.extend(self.refused.drain(..).map(|(unit, _)| unit));
        }
    }

    /// Answers all units with a database error.
    fn fail(mut self, error: &DbErr) {
        self.open.units.append(&mut self.repeats);
        self.open.units.append(&mut self.doubted);
        self.open.units.extend(self.refused.into_iter().map(|(unit, _)| unit));
        self.open.fail(error);
        counters::decided_in(self.began.elapsed());
    }

    fn answer(self) {
        self.open.answer();
        counters::decided_in(self.began.elapsed());
    }
}

#[cfg(test)]
pub(super) mod tests;
