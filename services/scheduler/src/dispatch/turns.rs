//! Turns: those that wait are asked again, when there is something new for them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use db::rows::{self, Column};
use domain::{LeaseId, Timestamp, WorkloadId};
use sea_orm::{ConnectionTrait, DbErr, EntityTrait, Statement};
use uuid::Uuid;

use super::{BATCH, Dispatcher, Taken, Why};
use crate::effects::Effects;
use crate::entity::workload::{self, Model, State};
use crate::grants::Plan;
use crate::hints::Hints;
use crate::placement::Choice;
use crate::queue::{Turn, Waiting};
use crate::workloads::{self, Write};

/// Of how many in each line it is kept true in the database why they wait.
const TOLD: usize = 20;

/// Of how many lines.
const LINES_TOLD: usize = 100;

/// How many are told with one look: each costs a transaction, and meanwhile nothing is placed.
const TOLD_AT_ONCE: usize = 30;

/// How often all that waits is read anew.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// How far apart the clocks of replicas may be.
const CLOCKS: Duration = Duration::from_secs(10);

/// How many rows of those that wait are read at a time.
const PAGE: u64 = 5000;

impl Dispatcher {
    /// Places those that wait, in their turn, as far as there is room.
    pub(crate) async fn take_turns(&mut self, now: Timestamp, effects: &mut Effects) -> Result<(), DbErr> {
        let is_counted = self.held_at.is_some_and(|at| now.since(at) < self.config.poll);
        if self.look && !is_counted && self.queue().len() > 0 {
            self.count_held(now).await?;
        }
        while std::mem::take(&mut self.look) && self.queue().len() > 0 {
            let (plan, taken, turns, hopeless) = self.plan_turns(now);
            if let Err(error) = self.give_up(hopeless, now, effects).await {
                taken.give_back(&self.memory.workers);
                let mut queue = self.queue();
                turns.into_values().for_each(|turn| queue.put(turn.waiting));
                drop(queue);
                self.look = true;
                return Err(error);
            }
            if plan.grants.is_empty() {
                continue;
            }
            // There may be more of them than one transaction places.
            self.look = true;
            let spans: Vec<_> =
                turns.values().map(|turn| super::span(turn.workload(), &turn.waiting.traceparent)).collect();
            let done = match self.carry_out(&plan, taken, now).await {
                Ok(done) => done,
                Err(error) => {
                    // They wait still, and somebody looks again.
                    let mut queue = self.queue();
                    turns.into_values().for_each(|turn| queue.put(turn.waiting));
                    drop(queue);
                    self.look = true;
                    return Err(error);
                }
            };
            drop(spans);
            for (lease, turn) in turns {
                let id = turn.workload();
                if done.refused.contains(&lease) {
                    self.queue().put(turn.waiting);
                } else if !done.settled.contains_key(&id) {
                    effects.workloads.push(id);
                    effects.workers.extend(done.worker_of(Some(lease)));
                }
            }
        }
        Ok(())
    }

    /// Plans who of those that wait gets what, and takes them out of the queue.
    fn plan_turns(&mut self, now: Timestamp) -> (Plan, Taken, HashMap<LeaseId, Turn>, Vec<Waiting>) {
        let (mut plan, mut taken, mut turns) = (Plan::default(), Taken::default(), HashMap::new());
        let mut hopeless = Vec::new();
        let mut round = self.queue().round(now);
        while plan.grants.len() < BATCH {
            let Some(turn) = round.next(&self.queue()) else { break };
            let Waiting { demand, locations, .. } = &turn.waiting;
            let choice = self.memory.workers.lock().choose(demand, locations);
            let placement = match choice {
                Choice::Placed(placement) => placement,
                Choice::Never if !demand.failed_on.is_empty() => {
                    round.placed(&self.queue(), &turn);
                    hopeless.push(turn.waiting);
                    continue;
                }
                Choice::NotNow | Choice::Never => continue,
            };
            let Some(grant) = self.grant_to_workload(turn.workload(), demand, placement, &mut taken) else {
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
        (plan, taken, turns, hopeless)
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
        self.look |= self.memory.catch_up(&self.db).await?;
        for waiting in hopeless {
            if self.memory.workers.lock().choose(&waiting.demand, &waiting.locations) != Choice::Never {
                self.look = true;
                continue;
            }
            let given_up = self.db.write(async |txn| {
                let mut effects = Effects::default();
                let row = workloads::lock(&txn, WorkloadId::from_uuid(waiting.id)).await?;
                if let Some(row) = row.filter(|row| row.state == State::Pending)
                    && let Some(ending) = workloads::last_failure(&row)?
                {
                    workloads::conclude(&txn, row, ending, None, now, &mut effects).await?;
                }
                Ok::<_, DbErr>(effects)
            });
            effects.append(given_up.await?);
            self.queue().remove(waiting.id);
        }
        Ok(())
    }

    /// Notes what was changed in this process, or in another that said so.
    pub(crate) async fn hear(&mut self, hints: &Hints) {
        let changed = hints.take_changed();
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
        self.look |= self.memory.catch_up(&self.db).await?;
        let now = Timestamp::now();
        let is_due = self.whole_at.is_none_or(|at| now.since(at) >= WHOLE_EVERY);
        self.read_queue(is_due).await?;
        if is_due {
            self.whole_at = Some(now);
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

    /// Reads those of these workloads that wait; the others wait no more.
    async fn read_waiting(&mut self, ids: &HashSet<WorkloadId>) -> Result<(), DbErr> {
        if ids.is_empty() {
            return Ok(());
        }
        #[derive(serde::Serialize)]
        struct Id {
            id: Uuid,
        }
        let given: Vec<_> = ids.iter().map(|id| Id { id: id.uuid() }).collect();
        let (db, backend) = (self.db.read(), self.db.read().get_database_backend());
        let among = rows::query(backend, 1, &[("id", Column::Uuid)]);
        let query = format!("SELECT * FROM workloads WHERE id IN ({among}) AND state = 'pending'");
        let found = Statement::from_sql_and_values(backend, query, [rows::value(&given)?]);
        let found = workload::Entity::find().from_raw_sql(found).all(db).await?;
        let waiting: HashSet<_> = found.iter().map(|row| WorkloadId::from_uuid(row.id)).collect();
        for id in ids.difference(&waiting) {
            self.queue().remove(id.uuid());
        }
        self.wait(found)
    }

    fn wait(&mut self, rows: Vec<Model>) -> Result<(), DbErr> {
        self.look |= !rows.is_empty();
        for row in rows {
            let waiting = waiting(row)?;
            self.queue().put(waiting);
        }
        Ok(())
    }

    /// Reads those that wait and are not known to; of `all`, also who waits no more is noticed.
    async fn read_queue(&mut self, all: bool) -> Result<(), DbErr> {
        let mut after = if all { None } else { self.queue().newest().map(a_little_before) };
        let mut found = HashSet::new();
        loop {
            let ids = workloads::pending_ids(self.db.read(), after, PAGE).await?;
            let Some((_, last)) = ids.last().copied() else { break };
            after = Some(last);
            let unknown: HashSet<_> = {
                let queue = self.queue();
                found.extend(ids.iter().map(|(id, _)| id.uuid()));
                ids.iter().map(|(id, _)| *id).filter(|id| !queue.contains(id.uuid())).collect()
            };
            self.read_waiting(&unknown).await?;
            if ids.len() < PAGE as usize {
                break;
            }
        }
        if all {
            let gone: Vec<_> = self.queue().ids().filter(|id| !found.contains(id)).collect();
            gone.into_iter().for_each(|id| _ = self.queue().remove(id));
        }
        Ok(())
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
        let lines: Vec<_> =
            self.queue().lines().map(|(first, _)| first.demand.clone()).take(LINES_TOLD).collect();
        let mut left = TOLD_AT_ONCE;
        for demand in lines {
            let why = Why::of(&self.memory.workers.lock().refusals(&demand));
            let reasons = why.lines.clone();
            self.reasons.insert(demand.shape.clone(), why);
            let untold = self.queue().untold(&demand, &reasons, TOLD);
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
        sequence: row.sequence,
        priority: row.priority,
        since: Timestamp(row.submitted_at),
        demand: Arc::new(workloads::demand(&row)?),
        locations: workloads::locations(&row)?.into(),
        told: crate::entity::from_json::<Vec<String>>(&row.waiting_for)?.into(),
        traceparent: row.traceparent,
    })
}

impl Turn {
    fn workload(&self) -> WorkloadId {
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
