//! Queue passes: requests that wait are asked again, when there is something new for them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use db::rows;
use domain::{LeaseId, Timestamp, WorkloadId};
use sea_orm::{ConnectionTrait, DbErr, EntityTrait, Statement};
use uuid::Uuid;

use super::peer_waiters::LeftForPeers;
use super::waiters::LeaseGroup;
use super::{BATCH, DECISIONS, Dispatcher};
use crate::commit::{CommitResult, Plan};
use crate::db::entity::STATE_OF_NAMED;
use crate::db::entity::workload::{self, Model, State};
use crate::notify::changes::Effects;
use crate::notify::local::LocalNotifier;
use crate::placement::{Choice, Part};
use crate::queue::{Turn, Waiting};
use crate::workloads::{self, Write};

/// Of how many in each line it is kept true in the database why they wait.
const TOLD: usize = 20;

/// Of how many lines.
const LINES_TOLD: usize = 100;

/// How many are told with one look: each costs a transaction, and meanwhile nothing is placed.
const TOLD_AT_ONCE: usize = 30;

/// Of how many that wait all are read anew with each look. Of more it is done as much more seldom, but after [`WHOLE_EVERY`].
const WHOLE_AT_ONCE: u32 = 1000;

/// How often all that waits is read anew, however many that are.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// How far apart the clocks of replicas may be.
const CLOCKS: Duration = Duration::from_secs(10);

/// How many rows of those that wait are read at a time.
const PAGE: u64 = 5000;

/// Who of those that wait gets what. All of these were taken out of the queue but the last.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) plan: Plan,
    pub(super) turns: HashMap<LeaseId, Turn>,
    /// Calls for leases.
    pub(super) asked: Vec<LeaseGroup>,
    /// Workloads that nobody could ever take any more.
    pub(super) hopeless: Vec<Waiting>,
}

impl Planned {
    /// For the time in which the workloads are placed.
    pub(super) fn spans(&self) -> Vec<tracing::Span> {
        let span = |turn: &Turn| super::span(turn.workload(), &turn.waiting.traceparent);
        self.turns.values().map(span).collect()
    }
}

impl Dispatcher {
    /// Places those that wait, in their turn, as far as there is room.
    pub(crate) async fn take_turns(&mut self, now: Timestamp, effects: &mut Effects) -> Result<(), DbErr> {
        let is_counted = self.held_at.is_some_and(|at| now.since(at) < self.config.poll);
        if self.look && !is_counted && self.queue().len() > 0 {
            self.count_held(now).await?;
        }
        // What did not hold is decided anew, but not for ever: there is another look soon.
        let mut in_vain = 0;
        while in_vain < DECISIONS && std::mem::take(&mut self.look) && self.queue().len() > 0 {
            let planned = self.plan_turns(Plan::default(), now);
            let spans = planned.spans();
            let Planned { plan, turns, asked, hopeless } = planned;
            if let Err(error) = self.give_up(hopeless, now, effects).await {
                self.give_back(&plan.grants);
                self.wait_on(turns, asked);
                return Err(error);
            }
            if plan.grants.is_empty() {
                continue;
            }
            // There may be more of them than one transaction places.
            self.look = true;
            let done = match self.carry_out(&plan, now).await {
                Ok(done) => done,
                Err(error) => {
                    self.wait_on(turns, asked);
                    return Err(error);
                }
            };
            drop(spans);
            in_vain = if plan.grants.iter().all(|grant| done.is_in_vain(grant)) { in_vain + 1 } else { 0 };
            self.conclude_turns(turns, asked, &done, effects);
            effects.parcels.extend(done.parcels);
            self.read_waiting(&done.outdated).await?;
        }
        Ok(())
    }

    /// What was done about those that waited: they were placed, or wait on.
    pub(super) fn conclude_turns(
        &mut self,
        turns: HashMap<LeaseId, Turn>,
        asked: Vec<LeaseGroup>,
        done: &CommitResult,
        effects: &mut Effects,
    ) {
        for (lease, turn) in turns {
            let id = turn.workload();
            if done.refused.contains(&lease) || done.outdated.contains(&id) {
                self.queue().put(turn.waiting);
                // Somebody else may take it.
                self.look = true;
            } else if !done.settled.contains_key(&id) {
                effects.deadline |= turn.waiting.must_start;
                effects.workloads.push(id);
                effects.workers.extend(done.worker_of(Some(lease)));
            }
        }
        for mut leases in asked {
            let is_refused = leases.leases().any(|lease| done.refused.contains(&lease));
            let exists = leases.leases().any(|lease| done.exists(lease));
            if is_refused && !exists {
                leases.keep_to(&done.kept_to);
                self.ask_again(leases);
            } else {
                self.conclude_leases(leases, done);
            }
        }
    }

    /// These wait still, and somebody looks again.
    pub(super) fn wait_on(&mut self, turns: HashMap<LeaseId, Turn>, asked: Vec<LeaseGroup>) {
        turns.into_values().for_each(|turn| self.queue().put(turn.waiting));
        asked.into_iter().for_each(|leases| self.ask_again(leases));
        self.look = true;
    }

    fn ask_again(&mut self, leases: LeaseGroup) {
        let waiting = leases.waiting();
        match (self.asking.put(leases), waiting) {
            (Ok(()), Some(waiting)) => self.queue().put(waiting),
            (Ok(()), None) => {}
            // It has waited for long enough, or its caller has gone.
            (Err(leases), _) => self.asked_in_vain(&leases),
        }
    }

    /// Plans, on top of `plan`, who of those that wait gets what, and takes them out of the queue.
    pub(super) fn plan_turns(&mut self, mut plan: Plan, now: Timestamp) -> Planned {
        let (mut turns, mut asked, mut hopeless) = (HashMap::new(), Vec::new(), Vec::new());
        let mut round = self.queue().round(now);
        self.begin_reservations(now);
        let mut left = LeftForPeers::default();
        while plan.grants.len() < BATCH {
            let Some(turn) = round.next(&self.queue()) else { break };
            if turn.waiting.is_elsewhere {
                self.leave_alone(&turn, &mut round, &mut left, now);
                continue;
            }
            if let Some(mut leases) = self.asking.take(turn.waiting.id) {
                let is_granted =
                    !leases.has_gone() && self.decide_leases(&mut leases, &mut plan, now).is_ok();
                let parts = self.parts(&leases);
                if is_granted {
                    // The same id may have been granted where else it was asked for.
                    plan.leases_may_exist = true;
                    let mut queue = self.queue();
                    round.placed(&queue, &turn);
                    for member in leases.members.iter().filter(|member| member.ask.kind.takes_a_slot()) {
                        queue.took(&member.ask.demand.shape.team);
                    }
                    queue.remove(turn.waiting.id);
                    drop(queue);
                    asked.push(leases);
                } else if let Err(leases) = self.asking.put(leases) {
                    let mut queue = self.queue();
                    round.placed(&queue, &turn);
                    queue.remove(turn.waiting.id);
                    drop(queue);
                    self.asked_in_vain(&leases);
                } else {
                    self.reserve(&turn.waiting, &parts, now);
                }
                continue;
            }
            let Waiting { demand, locations, .. } = &turn.waiting;
            let choice = self.memory.workers.lock().choose(demand, locations);
            let placement = match choice {
                Choice::Placed(placement) => placement,
                Choice::Never if !demand.failed_on.is_empty() => {
                    round.placed(&self.queue(), &turn);
                    hopeless.push(turn.waiting);
                    continue;
                }
                Choice::NotNow => {
                    let part = Part { demand: demand.clone(), owner: String::new() };
                    self.reserve(&turn.waiting, &[part], now);
                    continue;
                }
                Choice::Never => {
                    self.cancel_reservation(&turn.waiting);
                    continue;
                }
            };
            let Some(grant) = self.grant_to_workload(turn.workload(), demand, placement) else {
                continue;
            };
            let mut queue = self.queue();
            round.placed(&queue, &turn);
            queue.took(&demand.shape.team);
            queue.remove(turn.waiting.id);
            drop(queue);
            turns.insert(grant.lease, turn);
            plan.grants.push(grant);
        }
        left.end(&mut self.memory.workers.lock());
        self.end_reservations();
        Planned { plan, turns, asked, hopeless }
    }

    /// Ends those that some workers could not start, and that no other could ever take.
    async fn give_up(
        &mut self,
        hopeless: Vec<Waiting>,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<(), DbErr> {
        if hopeless.is_empty() {
            return Ok(());
        }
        // What is remembered may be out of date.
        self.look_at_workers().await?;
        for waiting in hopeless {
            if self.memory.workers.lock().choose(&waiting.demand, &waiting.locations) != Choice::Never {
                self.look = true;
                continue;
            }
            let given_up = self.db.write(async |txn| {
                let mut effects = Effects::default();
                let row = workloads::lock(&txn, WorkloadId::from_uuid(waiting.id)).await?;
                let Some(row) = row.filter(|row| row.state == State::Pending) else {
                    return Ok((effects, true));
                };
                let is_known = workloads::has_failed_on(&waiting.demand, &row.failed_on)?;
                if let Some(ending) = workloads::last_failure(&row)?
                    && is_known
                {
                    workloads::conclude(&txn, row, ending, None, now, &mut effects).await?;
                }
                Ok::<_, DbErr>((effects, is_known))
            });
            let (given_up, is_known) = given_up.await?;
            effects.append(given_up);
            if is_known {
                self.queue().remove(waiting.id);
            } else {
                self.read_waiting(&HashSet::from([WorkloadId::from_uuid(waiting.id)])).await?;
            }
        }
        Ok(())
    }

    /// Notes what was changed in this process, or in another that said so.
    pub(crate) async fn hear(&mut self, hints: &LocalNotifier) {
        let mut changed = hints.take_changed();
        // Who comes finds out by himself.
        let freed = std::mem::take(&mut changed.freed);
        if self.queue().len() > 0 {
            changed.workers.extend(freed);
        }
        let heard = async {
            self.look |= self.memory.read(&self.db, &changed.workers).await?;
            self.read_waiting(&changed.queued).await
        };
        if let Err(error) = heard.await {
            tracing::debug!(error = %error, "cannot read what was changed");
            hints.give_back(changed);
        }
    }

    /// Sees what others changed since the last look. `tell`: those that wait are told why, where that is news.
    pub(crate) async fn catch_up(&mut self, tell: bool, effects: &mut Effects) -> Result<(), DbErr> {
        self.look_at_workers().await?;
        let now = Timestamp::now();
        let is_due = self.whole_at.is_none_or(|at| now.since(at) >= self.whole_every());
        self.read_queue(is_due).await?;
        if is_due {
            self.whole_at = Some(now);
        }
        if tell {
            self.exchange_reservations(now).await?;
        }
        self.reasons.clear();
        if self.queue().len() > 0 {
            self.count_held(now).await?;
            if tell {
                self.tell_why(now, effects).await?;
            }
        }
        Ok(())
    }

    /// How often all that waits is read anew. What waits again, or is pinned long after it was accepted, sorts where it was: if nobody tells
    /// of it, because its replica has gone, it is found by that.
    fn whole_every(&self) -> Duration {
        let waiting = u32::try_from(self.queue().len()).unwrap_or(u32::MAX);
        self.config.poll.saturating_mul(waiting / WHOLE_AT_ONCE).min(WHOLE_EVERY)
    }

    /// Reads those of these workloads that wait; the others wait no more.
    pub(super) async fn read_waiting(&mut self, ids: &HashSet<WorkloadId>) -> Result<(), DbErr> {
        if ids.is_empty() {
            return Ok(());
        }
        let given = rows::ids(ids.iter().map(|id| id.uuid()))?;
        let (db, backend) = (self.db.read(), self.db.read().get_database_backend());
        let among = rows::among(backend, 1);
        let query = format!("SELECT * FROM workloads WHERE id {among} AND {STATE_OF_NAMED} = 'pending'");
        let found = Statement::from_sql_and_values(backend, query, [given]);
        let found = workload::Entity::find().from_raw_sql(found).all(db).await?;
        let waiting: HashSet<_> = found.iter().map(|row| WorkloadId::from_uuid(row.id)).collect();
        for id in ids.difference(&waiting) {
            self.waits_no_more(id.uuid());
        }
        self.wait(found);
        Ok(())
    }

    fn wait(&mut self, rows: Vec<Model>) {
        self.look |= !rows.is_empty();
        for row in rows {
            let id = row.id;
            match waiting(row) {
                Ok(waiting) => self.queue().put(waiting),
                // It must not keep the others from their workers.
                Err(error) => {
                    tracing::error!(workload.id = %id, error = %domain::error_chain(&error), "a workload that waits cannot be read, and gets no worker");
                }
            }
        }
    }

    /// Reads those that wait and are not known to, or could not be started where that is not known; of `all`, also who waits no more is noticed.
    async fn read_queue(&mut self, all: bool) -> Result<(), DbErr> {
        let mut after = if all { None } else { self.queue().newest().map(a_little_before) };
        let mut found = HashSet::new();
        loop {
            let pending = workloads::pending(self.db.read(), after, PAGE).await?;
            let Some(last) = pending.last() else { break };
            after = Some(last.sequence);
            let mut unknown = HashSet::new();
            for workloads::Pending { id, failed_on, sequence: _ } in &pending {
                found.insert(*id);
                let is_known = match self.queue().get(*id) {
                    Some(waiting) => workloads::has_failed_on(&waiting.demand, failed_on)?,
                    None => false,
                };
                if !is_known {
                    unknown.insert(WorkloadId::from_uuid(*id));
                }
            }
            self.read_waiting(&unknown).await?;
            if pending.len() < PAGE as usize {
                break;
            }
        }
        if all {
            let unknown: Vec<_> = self.queue().ids().filter(|id| !found.contains(id)).collect();
            for id in unknown.into_iter().filter(|id| !self.is_call(*id)) {
                self.queue().remove(id);
            }
        }
        Ok(())
    }

    /// Whether this is a call for leases, here or elsewhere.
    fn is_call(&self, id: Uuid) -> bool {
        self.asking.contains(id) || self.queue().get(id).is_some_and(|waiting| waiting.is_elsewhere)
    }

    /// Counts how many slots each team holds.
    async fn count_held(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let query = "SELECT team, CAST(COUNT(*) AS BIGINT) AS held FROM leases WHERE state <> 'ended' AND kind <> 'transfer' GROUP BY team";
        let (db, backend) = (self.db.read(), self.db.read().get_database_backend());
        let rows = db.query_all_raw(Statement::from_string(backend, query)).await?;
        let held = rows.iter().map(|row| {
            let held: i64 = row.try_get("", "held")?;
            Ok((row.try_get("", "team")?, u32::try_from(held).unwrap_or(u32::MAX)))
        });
        let held = held.collect::<Result<_, DbErr>>()?;
        self.queue().hold(held);
        self.held_at = Some(now);
        Ok(())
    }

    /// Keeps true, for the first of the first lines, what those who watch them are told of why they wait.
    async fn tell_why(&mut self, now: Timestamp, effects: &mut Effects) -> Result<(), DbErr> {
        let lines: Vec<_> = {
            let queue = self.queue();
            let firsts = queue.lines().filter(|(first, _)| first.others.is_empty()).take(LINES_TOLD);
            firsts.map(|(first, _)| (first.id, first.demand.clone())).collect()
        };
        let mut left = TOLD_AT_ONCE;
        for (first, demand) in lines {
            let reasons = self.reasons_now(&demand);
            let mut untold = self.queue().untold(first, &reasons, TOLD);
            // Who asks for leases hears in its answer.
            untold.retain(|id| !self.is_call(*id));
            for id in untold.into_iter().take(left) {
                left -= 1;
                let told = self.db.write(async |txn| {
                    let mut effects = Effects::default();
                    let row = workloads::lock(&txn, WorkloadId::from_uuid(id)).await?;
                    if let Some(row) = row.filter(|row| row.state == State::Pending) {
                        let reasons = reasons.to_vec();
                        workloads::queue(&txn, row, Write::Update, reasons, now, &mut effects).await?;
                    }
                    Ok::<_, DbErr>(effects)
                });
                effects.append(told.await?);
                self.queue().tell(id, &reasons);
            }
        }
        Ok(())
    }
}

fn waiting(row: Model) -> Result<Waiting, DbErr> {
    Ok(Waiting {
        id: row.id,
        is_elsewhere: false,
        others: vec![],
        sequence: row.sequence,
        priority: row.priority,
        since: Timestamp(row.submitted_at),
        demand: Arc::new(workloads::demand(&row)?),
        locations: workloads::locations(&row)?.into(),
        must_start: row.start_timeout_us.is_some(),
        told: crate::db::entity::from_json::<Vec<String>>(&row.waiting_for)?.into(),
        traceparent: row.traceparent,
        spec_bytes: Some(row.spec.len() as u64),
    })
}

impl Turn {
    pub(super) fn workload(&self) -> WorkloadId {
        WorkloadId::from_uuid(self.waiting.id)
    }
}

/// What another replica made may be older by its clock than what is known, and yet have come later.
fn a_little_before(sequence: Uuid) -> Uuid {
    let Some(at) = sequence.get_timestamp() else { return Uuid::nil() };
    let (seconds, _) = at.to_unix();
    let at = uuid::Timestamp::from_unix(uuid::NoContext, seconds.saturating_sub(CLOCKS.as_secs()), 0);
    let (high, _) = Uuid::new_v7(at).as_u64_pair();
    Uuid::from_u64_pair(high, 0)
}

#[cfg(test)]
mod tests;
