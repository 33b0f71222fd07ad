//! Queue passes, which serve waiting requests when something has changed for them.

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
use crate::queue::{LineHead, WaitingRequest};
use crate::workloads::{self, Write};

/// Maximum number of requests of a line whose reasons for waiting are kept current in the database.
const MAX_REPORTED: usize = 20;

/// Maximum number of lines whose reasons for waiting are kept current.
const MAX_REPORTED_LINES: usize = 100;

/// Maximum number of requests whose reasons are updated in one poll. Each costs a transaction,
/// during which nothing is placed.
const MAX_UPDATES: usize = 30;

/// Number of waiting workloads up to which every poll reads all of them. With more, the full read
/// is proportionally rarer, but at least once per [`MAX_FULL_READ_INTERVAL`].
const FULL_READ_SIZE: u32 = 1000;

/// Longest time between two full reads of waiting workloads.
const MAX_FULL_READ_INTERVAL: Duration = Duration::from_secs(60);

/// Largest expected difference between the clocks of replicas.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(10);

/// Number of waiting workloads that one statement reads.
const PAGE: u64 = 5000;

/// The result of planning a pass. All requests in it except `unschedulable` were taken out of the
/// queue.
#[derive(Debug)]
pub(super) struct PlannedPass {
    pub(super) plan: Plan,
    pub(super) turns: HashMap<LeaseId, LineHead>,
    /// Calls for leases.
    pub(super) calls: Vec<LeaseGroup>,
    /// Workloads that no worker could ever take any more.
    pub(super) unschedulable: Vec<WaitingRequest>,
}

impl PlannedPass {
    /// Returns the spans of the placed workloads.
    pub(super) fn spans(&self) -> Vec<tracing::Span> {
        let span = |turn: &LineHead| super::span(turn.workload(), &turn.waiting.traceparent);
        self.turns.values().map(span).collect()
    }
}

impl Dispatcher {
    /// Places waiting requests in their order, as far as workers have room.
    pub(crate) async fn run_queue_pass(
        &mut self,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<(), DbErr> {
        let is_counted = self.slots_counted_at.is_some_and(|at| now.since(at) < self.config.poll);
        if self.pass_needed && !is_counted && self.queue().len() > 0 {
            self.count_slots(now).await?;
        }
        // Rejected grants are decided again, but only a limited number of times. The next pass
        // follows soon.
        let mut outdated_rounds = 0;
        while outdated_rounds < DECISIONS && std::mem::take(&mut self.pass_needed) && self.queue().len() > 0 {
            let planned = self.plan_queue_pass(Plan::default(), now);
            let spans = planned.spans();
            let PlannedPass { plan, turns, calls, unschedulable } = planned;
            if let Err(error) = self.end_unschedulable(unschedulable, now, effects).await {
                self.unplan(&plan.grants);
                self.requeue(turns, calls);
                return Err(error);
            }
            if plan.grants.is_empty() {
                continue;
            }
            // One transaction may not suffice for all.
            self.pass_needed = true;
            let done = match self.commit(&plan, now).await {
                Ok(done) => done,
                Err(error) => {
                    self.requeue(turns, calls);
                    return Err(error);
                }
            };
            drop(spans);
            outdated_rounds =
                if plan.grants.iter().all(|grant| done.is_outdated(grant)) { outdated_rounds + 1 } else { 0 };
            self.conclude_turns(turns, calls, &done, effects);
            effects.parcels.extend(done.parcels);
            self.read_waiting(&done.outdated).await?;
        }
        Ok(())
    }

    /// Processes the result of a commit for requests of the queue: they were placed, or they keep
    /// waiting.
    pub(super) fn conclude_turns(
        &mut self,
        turns: HashMap<LeaseId, LineHead>,
        calls: Vec<LeaseGroup>,
        done: &CommitResult,
        effects: &mut Effects,
    ) {
        for (lease, turn) in turns {
            let id = turn.workload();
            if done.refused.contains(&lease) || done.outdated.contains(&id) {
                self.queue().put(turn.waiting);
                // Another worker may take the workload.
                self.pass_needed = true;
            } else if !done.settled.contains_key(&id) {
                effects.deadline |= turn.waiting.must_start;
                effects.workloads.push(id);
                effects.workers.extend(done.worker_of(Some(lease)));
            }
        }
        for mut leases in calls {
            let is_refused = leases.leases().any(|lease| done.refused.contains(&lease));
            let exists = leases.leases().any(|lease| done.exists(lease));
            if is_refused && !exists {
                leases.set_owner_workers(&done.affine_workers);
                self.requeue_call(leases);
            } else {
                self.conclude_leases(leases, done);
            }
        }
    }

    /// Returns requests to the queue, and requests another pass.
    pub(super) fn requeue(&mut self, turns: HashMap<LeaseId, LineHead>, calls: Vec<LeaseGroup>) {
        turns.into_values().for_each(|turn| self.queue().put(turn.waiting));
        calls.into_iter().for_each(|leases| self.requeue_call(leases));
        self.pass_needed = true;
    }

    fn requeue_call(&mut self, leases: LeaseGroup) {
        let waiting = leases.waiting();
        match (self.waiters.put(leases), waiting) {
            (Ok(()), Some(waiting)) => self.queue().put(waiting),
            (Ok(()), None) => {}
            // The waiting time is over, or the caller has disconnected.
            (Err(leases), _) => self.reject_timed_out(&leases),
        }
    }

    /// Plans grants for waiting requests on top of `plan`, and takes these requests out of the
    /// queue.
    pub(super) fn plan_queue_pass(&mut self, mut plan: Plan, now: Timestamp) -> PlannedPass {
        let (mut turns, mut calls, mut unschedulable) = (HashMap::new(), Vec::new(), Vec::new());
        let mut round = self.queue().start_pass(now);
        self.begin_reservations(now);
        let mut left = LeftForPeers::default();
        while plan.grants.len() < BATCH {
            let Some(turn) = round.next(&self.queue()) else { break };
            if turn.waiting.is_elsewhere {
                self.leave_alone(&turn, &mut round, &mut left, now);
                continue;
            }
            if let Some(mut leases) = self.waiters.take(turn.waiting.id) {
                let is_granted =
                    !leases.is_disconnected() && self.decide_leases(&mut leases, &mut plan, now).is_ok();
                let parts = self.parts(&leases);
                if is_granted {
                    // Another replica may have granted the same id.
                    plan.leases_may_exist = true;
                    let mut queue = self.queue();
                    round.placed(&queue, &turn);
                    for member in
                        leases.members.iter().filter(|member| member.request.demand.kind.takes_a_slot())
                    {
                        queue.add_slot(&member.request.demand.shape.team);
                    }
                    queue.remove(turn.waiting.id);
                    drop(queue);
                    calls.push(leases);
                } else if let Err(leases) = self.waiters.put(leases) {
                    let mut queue = self.queue();
                    round.placed(&queue, &turn);
                    queue.remove(turn.waiting.id);
                    drop(queue);
                    self.reject_timed_out(&leases);
                } else {
                    self.reserve(&turn.waiting, &parts, now);
                }
                continue;
            }
            let WaitingRequest { demand, locations, .. } = &turn.waiting;
            let choice = self.cache.workers.lock().choose(demand, locations);
            let placement = match choice {
                Choice::Placed(placement) => placement,
                Choice::Never if !demand.failed_on.is_empty() => {
                    round.placed(&self.queue(), &turn);
                    unschedulable.push(turn.waiting);
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
            queue.add_slot(&demand.shape.team);
            queue.remove(turn.waiting.id);
            drop(queue);
            turns.insert(grant.lease, turn);
            plan.grants.push(grant);
        }
        left.end(&mut self.cache.workers.lock());
        self.end_reservations();
        PlannedPass { plan, turns, calls, unschedulable }
    }

    /// Ends workloads with failed attempts that no other worker could ever take.
    async fn end_unschedulable(
        &mut self,
        unschedulable: Vec<WaitingRequest>,
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<(), DbErr> {
        if unschedulable.is_empty() {
            return Ok(());
        }
        // The worker cache may be outdated.
        self.poll_workers().await?;
        for waiting in unschedulable {
            if self.cache.workers.lock().choose(&waiting.demand, &waiting.locations) != Choice::Never {
                self.pass_needed = true;
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

    /// Reads changes of this process, and those of other replicas that sent notifications.
    pub(crate) async fn apply_notifications(&mut self, hints: &LocalNotifier) {
        let mut changed = hints.take_changed();
        // New requests need no notification about freed workers.
        let freed = std::mem::take(&mut changed.freed);
        if self.queue().len() > 0 {
            changed.workers.extend(freed);
        }
        let applied = async {
            self.pass_needed |= self.cache.read(&self.db, &changed.workers).await?;
            self.read_waiting(&changed.queued).await
        };
        if let Err(error) = applied.await {
            tracing::debug!(error = %error, "cannot read changed workers and workloads");
            hints.restore_changed(changed);
        }
    }

    /// Reads the changes of other replicas since the last poll. `update_reasons`: also updates
    /// outdated reasons for waiting.
    pub(crate) async fn catch_up(
        &mut self,
        update_reasons: bool,
        effects: &mut Effects,
    ) -> Result<(), DbErr> {
        self.poll_workers().await?;
        let now = Timestamp::now();
        let is_due = self.queue_read_at.is_none_or(|at| now.since(at) >= self.full_read_interval());
        self.read_queue(is_due).await?;
        if is_due {
            self.queue_read_at = Some(now);
        }
        if update_reasons {
            self.exchange_reservations(now).await?;
        }
        self.reasons.clear();
        if self.queue().len() > 0 {
            self.count_slots(now).await?;
            if update_reasons {
                self.update_reasons(now, effects).await?;
            }
        }
        Ok(())
    }

    /// Returns the interval of full reads. A full read finds requeued or late-pinned workloads,
    /// which sort before the newest known one, if their notification was lost.
    fn full_read_interval(&self) -> Duration {
        let waiting = u32::try_from(self.queue().len()).unwrap_or(u32::MAX);
        self.config.poll.saturating_mul(waiting / FULL_READ_SIZE).min(MAX_FULL_READ_INTERVAL)
    }

    /// Reads these workloads. Those that no longer wait are removed from the queue.
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
            self.remove_waiting(id.uuid());
        }
        self.wait(found);
        Ok(())
    }

    fn wait(&mut self, rows: Vec<Model>) {
        self.pass_needed |= !rows.is_empty();
        for row in rows {
            let id = row.id;
            match waiting(row) {
                Ok(waiting) => self.queue().put(waiting),
                // An unreadable workload must not block others.
                Err(error) => {
                    tracing::error!(workload.id = %id, error = %domain::error_chain(&error), "cannot read a waiting workload; it gets no worker");
                }
            }
        }
    }

    /// Reads waiting workloads that are unknown or have new failures. `all`: also removes workloads
    /// that no longer wait.
    async fn read_queue(&mut self, all: bool) -> Result<(), DbErr> {
        let mut after = if all { None } else { self.queue().newest().map(just_before) };
        let mut found = HashSet::new();
        loop {
            let pending = workloads::pending(self.db.read(), after, PAGE).await?;
            let Some(last) = pending.last() else { break };
            after = Some(last.sequence);
            let mut unknown = HashSet::new();
            for workloads::PendingWorkload { id, failed_on, sequence: _ } in &pending {
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

    /// Returns whether the request is a call for leases, here or at another replica.
    fn is_call(&self, id: Uuid) -> bool {
        self.waiters.contains(id) || self.queue().get(id).is_some_and(|waiting| waiting.is_elsewhere)
    }

    /// Counts the slots that each team uses.
    async fn count_slots(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let query = "SELECT team, CAST(COUNT(*) AS BIGINT) AS held FROM leases WHERE state <> 'ended' AND kind <> 'transfer' GROUP BY team";
        let (db, backend) = (self.db.read(), self.db.read().get_database_backend());
        let rows = db.query_all_raw(Statement::from_string(backend, query)).await?;
        let held = rows.iter().map(|row| {
            let held: i64 = row.try_get("", "held")?;
            Ok((row.try_get("", "team")?, u32::try_from(held).unwrap_or(u32::MAX)))
        });
        let held = held.collect::<Result<_, DbErr>>()?;
        self.queue().set_slots(held);
        self.slots_counted_at = Some(now);
        Ok(())
    }

    /// Updates the reasons for waiting of the first requests in the first lines.
    async fn update_reasons(&mut self, now: Timestamp, effects: &mut Effects) -> Result<(), DbErr> {
        let lines: Vec<_> = {
            let queue = self.queue();
            let firsts = queue.lines().filter(|(first, _)| first.others.is_empty()).take(MAX_REPORTED_LINES);
            firsts.map(|(first, _)| (first.id, first.demand.clone())).collect()
        };
        let mut left = MAX_UPDATES;
        for (first, demand) in lines {
            let reasons = self.reasons_now(&demand);
            let mut outdated = self.queue().outdated_reasons(first, &reasons, MAX_REPORTED);
            // Calls for leases receive their reasons with the answer.
            outdated.retain(|id| !self.is_call(*id));
            for id in outdated.into_iter().take(left) {
                left -= 1;
                let updated = self.db.write(async |txn| {
                    let mut effects = Effects::default();
                    let row = workloads::lock(&txn, WorkloadId::from_uuid(id)).await?;
                    if let Some(row) = row.filter(|row| row.state == State::Pending) {
                        let reasons = reasons.to_vec();
                        workloads::queue(&txn, row, Write::Update, reasons, now, &mut effects).await?;
                    }
                    Ok::<_, DbErr>(effects)
                });
                effects.append(updated.await?);
                self.queue().set_reported(id, &reasons);
            }
        }
        Ok(())
    }
}

fn waiting(row: Model) -> Result<WaitingRequest, DbErr> {
    Ok(WaitingRequest {
        id: row.id,
        is_elsewhere: false,
        others: vec![],
        sequence: row.sequence,
        priority: row.priority,
        since: Timestamp(row.submitted_at),
        demand: Arc::new(workloads::demand(&row)?),
        locations: workloads::locations(&row)?.into(),
        must_start: row.start_timeout_us.is_some(),
        reported: crate::db::entity::from_json::<Vec<String>>(&row.waiting_for)?.into(),
        traceparent: row.traceparent,
        spec_bytes: Some(row.spec.len() as u64),
    })
}

impl LineHead {
    pub(super) fn workload(&self) -> WorkloadId {
        WorkloadId::from_uuid(self.waiting.id)
    }
}

/// Returns a sort key a little earlier, because the clock of another replica may be behind.
fn just_before(sequence: Uuid) -> Uuid {
    let Some(at) = sequence.get_timestamp() else { return Uuid::nil() };
    let (seconds, _) = at.to_unix();
    let at = uuid::Timestamp::from_unix(uuid::NoContext, seconds.saturating_sub(MAX_CLOCK_SKEW.as_secs()), 0);
    let (high, _) = Uuid::new_v7(at).as_u64_pair();
    Uuid::from_u64_pair(high, 0)
}

#[cfg(test)]
mod tests;
