//! The pipeline: all that was asked for meanwhile is decided together and written in one transaction. And while it is written, what is asked for
//! then is decided already, so that neither the database nor this replica waits for the other.
//!
//! What is decided ahead rests on what the rounds before planned, which counts on top of what rows said last ([`Index::plan`]), and not on
//! what becomes of that: the rows judge all of it. Who waits in the queue, and what others have changed, is before whoever comes: nothing is
//! decided ahead of that. The transaction that ends a lease gives its slot to whoever waits for it here, as far as that can be known before. The
//! next one begins when the last has locked its workers, or when it is over; no more than two are under way.
//!
//! Invariant: what the transactions of a dispatcher read of workers is noted in the order in which they locked them, and no workers are read
//! in any other way until all is noted ([`Dispatcher::rounds`]). Where one is tried again, and another has passed it, a worker is remembered as
//! it was before, until others' changes are looked at.
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

use super::batch::{Open, Unit, Unplaceable};
use super::queue_pass::Planned;
use super::waiters::LeaseGroup;
use super::{BATCH, DECISIONS, Dispatcher, Request, granted};
use crate::commit::{CommitResult, Plan};
use crate::counters;
use crate::db::entity::is_duplicate;
use crate::notify::changes::Effects;
use crate::queue::Turn;

/// Who has rounds done.
pub(crate) struct Caller<'c> {
    pub(crate) now: &'c (dyn Fn() -> Timestamp + Sync),
    /// Whether nothing is before those who come now that only the caller knows of.
    pub(crate) nothing_is_before: &'c (dyn Fn() -> bool + Sync),
    /// Hears what others shall be told.
    pub(crate) tell: &'c (dyn Fn(Effects) + Sync),
}

/// What was asked for together, until all of it is decided.
#[derive(Debug)]
struct Round {
    began: Instant,
    /// How many requests are in it.
    requests: usize,
    open: Open,
    /// What has an id that another has which is decided with it.
    repeats: VecDeque<Unit>,
    /// What found nothing among what is remembered, which may be out of date.
    doubted: VecDeque<Unit>,
    /// What found nothing when that was true.
    refused: Vec<(Unit, Unplaceable)>,
    /// Where containers of owners are that was not known.
    kept_to: HashSet<WorkerId>,
    /// What was done in this round, so that several with one id come after each other.
    concluded: HashSet<Uuid>,
    /// Those that waited, and could not be started on more workers than was known when they were planned.
    outdated: HashSet<WorkloadId>,
    leases_may_exist: bool,
    caught_up: bool,
    /// How often something of it was decided.
    decisions: usize,
}

/// What of a round is written by one transaction.
#[derive(Debug, Default)]
struct Step {
    plan: Plan,
    planned: Vec<Unit>,
    ids: HashSet<Uuid>,
    /// Those of its grants that are for workloads which waited.
    turns: HashMap<LeaseId, Turn>,
    /// And for calls that waited.
    asked: Vec<LeaseGroup>,
    /// They last until it is written.
    spans: Vec<tracing::Span>,
}

/// A round of which a step is being written.
#[derive(Debug)]
struct BatchCommit {
    round: Round,
    plan: Arc<Plan>,
    planned: Vec<Unit>,
    ids: HashSet<Uuid>,
    turns: HashMap<LeaseId, Turn>,
    asked: Vec<LeaseGroup>,
    _spans: Vec<tracing::Span>,
    /// Told once its workers are locked.
    locked: Arc<Notify>,
    is_locked: bool,
    /// One task, which ends with this. None, where there is nothing to write.
    task: JoinSet<Result<CommitResult, DbErr>>,
}

impl BatchCommit {
    /// What became of it. `None`: there was nothing to write.
    async fn done(&mut self) -> Option<Result<CommitResult, DbErr>> {
        let done = self.task.join_next().await?;
        Some(done.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(error) => Err(DbErr::Custom(error.to_string())),
        }))
    }

    /// Whether `step` may be written before this one is. What is done to a lease must be seen by whoever does something to it later.
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
    /// Does all that is asked for, and what is asked for meanwhile, and answers. Given back are requests that something else is before.
    pub(crate) async fn rounds(&mut self, requests: Vec<Request>, caller: &Caller<'_>) -> Vec<Request> {
        let (mut asked, mut held, mut unfinished) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = (Round::new(), Step::default());
        let freed = freed(&requests);
        self.add(&mut first, requests, caller);
        self.hand_on(&mut first, &freed, (caller.now)());
        // Those that waited may not get it, and are before whoever comes then.
        let mut is_open = first.1.turns.is_empty() && first.1.asked.is_empty();
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
                    // Of this one is told while the next is written.
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
                count = self.requests.recv_many(&mut asked, BATCH), if is_open && !is_full => {
                    is_open = count > 0 && unfinished.is_empty() && self.may_go_ahead(&asked, caller);
                    if is_open {
                        let ahead = ahead.get_or_insert_with(|| (Round::new(), Step::default()));
                        self.add(ahead, std::mem::take(&mut asked), caller);
                    } else {
                        held.append(&mut asked);
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

    /// Plans who of those that wait gets what is given back, as if it were free already. Whether it was held, and is free then, its row says.
    fn hand_on(&mut self, (round, step): &mut (Round, Step), freed: &[WorkerId], now: Timestamp) {
        // Who waits and asks again is decided by himself, and in his turn.
        let some_ask_again = round.leases_may_exist || step.ids.iter().any(|id| self.queue().contains(*id));
        if freed.is_empty() || some_ask_again || self.queue().len() == 0 {
            return;
        }
        let seen = self.memory.workers.lock().expect_slots(freed);
        // Those that are hopeless still wait, and have their turns after this.
        let planned = self.plan_turns(std::mem::take(&mut step.plan), now);
        self.memory.workers.lock().is_as_seen(seen);
        step.spans.extend(planned.spans());
        let Planned { plan, turns, asked, hopeless: _ } = planned;
        step.ids.extend(turns.values().map(|turn| turn.workload().uuid()));
        step.ids.extend(asked.iter().flat_map(LeaseGroup::leases).map(|lease| lease.uuid()));
        (step.plan, step.turns, step.asked) = (plan, turns, asked);
    }

    /// Whether nothing is before these.
    fn may_go_ahead(&self, requests: &[Request], caller: &Caller<'_>) -> bool {
        let catches_up = requests.iter().any(|request| matches!(request, Request::CatchUp(_)));
        !catches_up && self.queue().len() == 0 && (caller.nothing_is_before)()
    }

    /// Decides what is asked for, as far as what is remembered is enough.
    fn add(&mut self, (round, step): &mut (Round, Step), requests: Vec<Request>, caller: &Caller<'_>) {
        let now = (caller.now)();
        round.requests += requests.len();
        round.open.add(requests, now);
        round.leases_may_exist |= self.replace_waiting(&mut round.open.units);
        self.decide_step(round, step, now);
    }

    /// Decides what is open.
    fn decide_step(&mut self, round: &mut Round, step: &mut Step, now: Timestamp) {
        let is_last = round.decisions == DECISIONS;
        step.plan.releases.append(&mut round.open.releases);
        while let Some(mut unit) = round.open.units.pop_front() {
            if unit.ids().any(|id| step.ids.contains(&id) && !round.concluded.contains(&id)) {
                round.repeats.push_back(unit);
                continue;
            }
            if unit.has_gone() {
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

    /// Begins to write what was decided.
    fn write(&self, (round, step): (Round, Step), caller: &Caller<'_>) -> BatchCommit {
        let Step { plan, planned, ids, turns, asked, spans } = step;
        let (plan, locked, mut task) = (Arc::new(plan), Arc::new(Notify::new()), JoinSet::new());
        if !plan.is_empty() {
            let (db, plan, facts) = (self.db.clone(), plan.clone(), self.memory.facts());
            let (locked, now) = (locked.clone(), (caller.now)());
            task.spawn(async move { granted(&db, &plan, &facts, now, &|| locked.notify_one()).await });
        }
        BatchCommit { round, plan, planned, ids, turns, asked, _spans: spans, locked, is_locked: false, task }
    }

    /// Notes and answers what was written. Given back is a round of which something is open still.
    fn finish(
        &mut self,
        written: BatchCommit,
        done: Option<Result<CommitResult, DbErr>>,
        caller: &Caller<'_>,
    ) -> Option<Round> {
        let BatchCommit { mut round, plan, planned, turns, asked, .. } = written;
        round.decisions += 1;
        match done {
            None => {}
            Some(Ok(done)) => {
                if !plan.grants.iter().all(|grant| done.holds(grant)) {
                    round.ask_again();
                }
                let mut effects = Effects::default();
                round.kept_to.extend(done.kept_to.values());
                for mut unit in planned {
                    let is_refused = unit.leases().any(|lease| done.refused.contains(&lease));
                    let exists = unit.leases().any(|lease| done.exists(lease));
                    if is_refused && !exists {
                        unit.keep_to(&done.kept_to);
                        round.open.units.push_back(unit);
                    } else {
                        round.concluded.extend(unit.ids());
                        self.conclude(unit, &done, &mut effects);
                    }
                }
                self.conclude_turns(turns, asked, &done, &mut effects);
                round.outdated.extend(&done.outdated);
                self.hand_out(&done.freed, &mut effects);
                effects.parcels.extend(done.parcels);
                (caller.tell)(effects);
            }
            // Another call with the same id was faster. It is known now.
            Some(Err(error)) if is_duplicate(&error) && round.decisions <= DECISIONS => {
                round.leases_may_exist = true;
                round.ask_again();
                self.wait_on(turns, asked);
                round.open.releases.extend(&plan.releases);
                round.open.units.extend(planned);
            }
            Some(Err(error)) => {
                self.wait_on(turns, asked);
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

    /// Has whoever waits hear of slots that came free.
    fn hand_out(&mut self, freed: &HashSet<WorkerId>, effects: &mut Effects) {
        if self.queue().len() > 0 {
            // Who waits here has his turn next, and others need not try to be faster.
            self.freed.extend(freed);
        } else {
            effects.freed.extend(freed);
        }
    }

    /// Does what is left of a round, one step after the other.
    async fn complete(&mut self, mut round: Round, caller: &Caller<'_>) {
        loop {
            if let Err(error) = self.look_again(&mut round).await {
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

    /// Makes true what is remembered, for what could not be decided on that or did not hold.
    async fn look_again(&mut self, round: &mut Round) -> Result<(), DbErr> {
        self.refuse(std::mem::take(&mut round.refused)).await;
        self.see(&std::mem::take(&mut round.kept_to)).await?;
        self.read_waiting(&std::mem::take(&mut round.outdated)).await?;
        round.leases_may_exist |= !round.repeats.is_empty();
        round.open.units.append(&mut round.repeats);
        // What did not hold twice is decided on what is true.
        if !round.doubted.is_empty() || round.decisions > 1 {
            round.caught_up = true;
            self.look_at_workers().await?;
            round.open.units.append(&mut round.doubted);
        }
        Ok(())
    }
}

/// Whose slots are given back.
fn freed(requests: &[Request]) -> Vec<WorkerId> {
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
            open: Open::default(),
            repeats: VecDeque::new(),
            doubted: VecDeque::new(),
            refused: Vec::new(),
            kept_to: HashSet::new(),
            concluded: HashSet::new(),
            outdated: HashSet::new(),
            leases_may_exist: false,
            caught_up: false,
            decisions: 0,
        }
    }

    /// Whether nothing is left to decide.
    fn is_over(&self) -> bool {
        let Self { open, repeats, doubted, refused, kept_to, outdated, .. } = self;
        let units_are =
            open.units.is_empty() && repeats.is_empty() && doubted.is_empty() && refused.is_empty();
        units_are && open.releases.is_empty() && kept_to.is_empty() && outdated.is_empty()
    }

    /// What found nothing beside others is decided again, for what was planned for those came to nothing.
    fn ask_again(&mut self) {
        // Whoever is decided for the last time hears what was so.
        if self.decisions < DECISIONS {
            self.open.units.extend(self.refused.drain(..).map(|(unit, _)| unit));
        }
    }

    /// The database does not answer.
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
