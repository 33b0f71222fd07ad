//! Calls that wait at other replicas.
//!
//! Who asks for leases and waits is held by its own replica ([`super::waiters`]), which alone can answer. So that others count it, and do not give
//! to who is behind it what comes free, each replica says with every poll which calls wait there, in a row of its own (table `peer_waiters`),
//! and reads the rows of the others. Their calls stand in the queue here beside all that waits, and have their turns: what one of them would get
//! is left alone ([`Dispatcher::leave_alone`]), and its replica, which hears of whatever comes free, takes it.
//!
//! What is known of others is late by up to two polls, and nothing but the order rests on it: a call that waits no more, or whose replica does not
//! take what is left to it, is passed over after one poll. A replica that says nothing for [`SILENT`] has ended, and nobody waits there.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::{Expr, OnConflict};
use sea_orm::{
    ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel, QueryFilter, QuerySelect,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Dispatcher;
use crate::db::entity::lease::Kind;
use crate::db::entity::{from_json, peer_waiters, to_json};
use crate::placement::{Choice, Demand, Index, Resources, Shape};
use crate::queue::{Round, Turn, Waiting};

/// After how long without a word a replica has ended, and after five polls at least.
const SILENT: Duration = Duration::from_secs(10);

/// After how long its row is deleted.
const FORGOTTEN: Duration = Duration::from_secs(300);

/// What this replica says of its calls, and knows of those of others.
#[derive(Debug)]
pub(super) struct PeerWaiters {
    replica: Uuid,
    /// How often this replica has said something.
    beat: i64,
    /// What its row says. `None`: it has none.
    said: Option<String>,
    others: HashMap<Uuid, Peer>,
    /// The calls for which something has been left alone, and since when.
    left_to: HashMap<Uuid, Timestamp>,
}

/// Another replica.
#[derive(Debug)]
struct Peer {
    beat: i64,
    changed: i64,
    /// When it had another beat than before.
    seen_at: Timestamp,
    /// It has been silent for long.
    is_forgotten: bool,
    calls: HashSet<Uuid>,
}

/// Calls that ask for the same.
#[derive(Debug, Serialize, Deserialize)]
struct PeerLine {
    /// All that one of them asks for at once.
    asks: Vec<PeerDemand>,
    calls: Vec<PeerWaiter>,
}

/// What of a [`Demand`] others need to know.
#[derive(Debug, Serialize, Deserialize)]
struct PeerDemand {
    shape: Shape,
    only: Option<WorkerId>,
    avoid: Vec<WorkerId>,
}

/// A call that waits.
#[derive(Debug, Serialize, Deserialize)]
struct PeerWaiter {
    /// What it is called in the queue, which sorts by age.
    id: Uuid,
    priority: i64,
    since: Timestamp,
}

/// What is left alone for calls that wait elsewhere, while others have their turns.
#[derive(Debug, Default)]
pub(super) struct LeftForPeers(Vec<(WorkerId, Kind, Resources)>);

impl PeerWaiters {
    pub(super) fn new() -> Self {
        Self { replica: Uuid::now_v7(), beat: 0, said: None, others: HashMap::new(), left_to: HashMap::new() }
    }
}

impl PeerDemand {
    /// What one of a line asks for. Whose it is, each of them says.
    fn demand(self) -> Demand {
        Demand {
            shape: Arc::new(self.shape),
            only: self.only,
            avoid: self.avoid.into_iter().collect(),
            failed_on: Vec::new(),
            prefer: BTreeSet::new(),
            asked_by: Uuid::nil(),
            waits_as: Uuid::nil(),
        }
    }
}

impl PeerWaiter {
    /// As it stands in the queue. `None`: it asks for nothing.
    fn waiting(self, asks: &[Demand]) -> Option<Waiting> {
        let own =
            |demand: &Demand| Arc::new(Demand { asked_by: self.id, waits_as: self.id, ..demand.clone() });
        let mut demands = asks.iter().map(own);
        Some(Waiting {
            id: self.id,
            is_elsewhere: true,
            demand: demands.next()?,
            others: demands.collect(),
            sequence: self.id,
            priority: self.priority,
            since: self.since,
            locations: Arc::default(),
            must_start: false,
            told: Arc::default(),
            traceparent: String::new(),
            spec_bytes: None,
        })
    }
}

impl Dispatcher {
    /// Tells other replicas which calls wait here, and hears which wait there.
    pub(super) async fn tend_elsewhere(&mut self, now: Timestamp) -> Result<(), DbErr> {
        self.tell_calls().await?;
        // What was left alone may not be for much longer.
        self.look |= !self.elsewhere.left_to.is_empty();
        self.hear_calls(now).await
    }

    async fn tell_calls(&mut self) -> Result<(), DbErr> {
        if self.asking.is_empty() {
            return self.tell_none().await;
        }
        let calls = self.calls_here()?;
        let PeerWaiters { replica, beat, said, .. } = &mut self.elsewhere;
        *beat += 1;
        let row =
            peer_waiters::Model { replica: *replica, beat: *beat, changed: *beat, calls: calls.clone() };
        // Until it is answered something is there, and it is not known what.
        let is_known = said.replace(String::new()).as_ref() == Some(&calls);
        self.db.write(async |txn| tell(&txn, row.clone(), is_known).await).await?;
        *said = Some(calls);
        self.asking.are_told();
        Ok(())
    }

    /// Tells other replicas that no call waits here, or will when this one ends.
    pub(super) async fn tell_none(&mut self) -> Result<(), DbErr> {
        if self.elsewhere.said.is_some() {
            let over = peer_waiters::Entity::delete_by_id(self.elsewhere.replica);
            self.db.write(async |txn| over.clone().exec(&*txn).await).await?;
            self.elsewhere.said = None;
        }
        Ok(())
    }

    /// The calls that wait here, as others read them.
    fn calls_here(&self) -> Result<String, DbErr> {
        let queue = self.queue();
        let lines = queue.by_line(self.asking.ids()).into_iter().map(|waiting| {
            let asked = |demand: Arc<Demand>| PeerDemand {
                shape: (*demand.shape).clone(),
                only: demand.only,
                avoid: demand.avoid.iter().copied().collect(),
            };
            let asks = waiting.first().map(|first| first.demands()).unwrap_or_default();
            let told = |one: &&Waiting| PeerWaiter { id: one.id, priority: one.priority, since: one.since };
            PeerLine {
                asks: asks.into_iter().map(asked).collect(),
                calls: waiting.iter().map(told).collect(),
            }
        });
        to_json(&lines.collect::<Vec<_>>())
    }

    async fn hear_calls(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let beats: Vec<(Uuid, i64, i64)> = peer_waiters::Entity::find()
            .select_only()
            .columns([
                peer_waiters::Column::Replica,
                peer_waiters::Column::Beat,
                peer_waiters::Column::Changed,
            ])
            .filter(peer_waiters::Column::Replica.ne(self.elsewhere.replica))
            .into_tuple()
            .all(self.db.read())
            .await?;
        let mut news = Vec::new();
        let there: HashSet<_> = beats.iter().map(|(replica, ..)| *replica).collect();
        let gone: Vec<_> = self.elsewhere.others.keys().filter(|id| !there.contains(id)).copied().collect();
        for replica in gone {
            self.forget(replica);
            self.elsewhere.others.remove(&replica);
        }
        for (replica, beat, changed) in beats {
            match self.elsewhere.others.get_mut(&replica) {
                Some(known) if known.beat == beat => {
                    let silent_for = now.since(known.seen_at);
                    if silent_for >= SILENT.max(self.config.poll * 5) {
                        self.forget(replica);
                    }
                    if silent_for >= FORGOTTEN {
                        let ended = peer_waiters::Entity::delete_by_id(replica)
                            .filter(peer_waiters::Column::Beat.eq(beat));
                        self.db.write(async |txn| ended.clone().exec(&*txn).await).await?;
                    }
                }
                Some(known) if known.changed == changed && !known.is_forgotten => {
                    (known.beat, known.seen_at) = (beat, now);
                }
                Some(_) | None => news.push(replica),
            }
        }
        if news.is_empty() {
            return Ok(());
        }
        let rows = peer_waiters::Entity::find().filter(peer_waiters::Column::Replica.is_in(news));
        for row in rows.all(self.db.read()).await? {
            self.hear_of(&row, now).unwrap_or_else(|error| {
                tracing::debug!(replica = %row.replica, error = %domain::error_chain(&error), "cannot read which calls wait there");
            });
        }
        Ok(())
    }

    /// Another replica has said which calls wait there.
    fn hear_of(&mut self, row: &peer_waiters::Model, now: Timestamp) -> Result<(), DbErr> {
        let lines: Vec<PeerLine> = from_json(&row.calls)?;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut calls = HashSet::new();
        for PeerLine { asks, calls: told } in lines {
            let asks: Vec<_> = asks.into_iter().map(PeerDemand::demand).collect();
            for waiting in told.into_iter().filter_map(|told| told.waiting(&asks)) {
                calls.insert(waiting.id);
                let was_left_alone = |since: &Timestamp| now.since(*since) >= self.config.poll;
                if !queue.contains(waiting.id)
                    && !self.elsewhere.left_to.get(&waiting.id).is_some_and(was_left_alone)
                {
                    queue.put(waiting);
                }
            }
        }
        let other = Peer { beat: row.beat, changed: row.changed, seen_at: now, is_forgotten: false, calls };
        let others = &mut self.elsewhere.others;
        let before = others.insert(row.replica, other).map(|before| before.calls).unwrap_or_default();
        let calls = others.get(&row.replica).map(|other| &other.calls);
        let over = before.iter().filter(|id| calls.is_none_or(|calls| !calls.contains(id)));
        let over: Vec<_> = over.copied().collect();
        drop(queue);
        over.into_iter().for_each(|id| self.waits_no_more(id));
        Ok(())
    }

    /// Somebody does not wait any more.
    pub(super) fn waits_no_more(&mut self, id: Uuid) {
        let was_elsewhere = self.queue().remove(id).is_some_and(|waiting| waiting.is_elsewhere);
        self.elsewhere.left_to.remove(&id);
        // What he would have got others may have.
        self.look |= was_elsewhere;
    }

    /// Nobody waits there any more.
    fn forget(&mut self, replica: Uuid) {
        let Some(other) = self.elsewhere.others.get_mut(&replica) else { return };
        other.is_forgotten = true;
        let calls = std::mem::take(&mut other.calls);
        calls.into_iter().for_each(|id| self.waits_no_more(id));
    }

    /// Somebody who waits elsewhere has his turn: what he would get is left alone, for one poll at most.
    pub(super) fn leave_alone(
        &mut self,
        turn: &Turn,
        round: &mut Round,
        left: &mut LeftForPeers,
        now: Timestamp,
    ) {
        let id = turn.waiting.id;
        let mut workers = self.memory.workers.lock();
        let before = left.0.len();
        for demand in turn.waiting.demands() {
            let Choice::Placed(placement) = workers.choose(&demand, &[]) else {
                left.undo(before, &mut workers);
                self.elsewhere.left_to.remove(&id);
                self.reservations.apply_to_turn(id, &mut workers);
                return;
            };
            let kind = if demand.shape.process.is_some() { Kind::Task } else { Kind::Transfer };
            workers.plan(placement.worker, kind, &demand.shape.requests);
            left.0.push((placement.worker, kind, demand.shape.requests));
        }
        let since = *self.elsewhere.left_to.entry(id).or_insert(now);
        let is_over = now.since(since) >= self.config.poll;
        if is_over {
            left.undo(before, &mut workers);
        }
        drop(workers);
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        round.placed(&queue, turn);
        if is_over {
            queue.remove(id);
        }
    }
}

impl LeftForPeers {
    /// Nothing is left alone any more.
    pub(super) fn end(mut self, workers: &mut Index) {
        self.undo(0, workers);
    }

    fn undo(&mut self, down_to: usize, workers: &mut Index) {
        for (worker, kind, requests) in self.0.drain(down_to..) {
            workers.unplan(worker, kind, &requests);
        }
    }
}

/// Says that these calls wait at a replica. `is_known`: its row says so already, unless somebody thought that it had ended.
async fn tell(txn: &DatabaseTransaction, row: peer_waiters::Model, is_known: bool) -> Result<(), DbErr> {
    use peer_waiters::Column;
    if is_known {
        let beaten = peer_waiters::Entity::update_many()
            .col_expr(Column::Beat, Expr::value(row.beat))
            .filter(Column::Replica.eq(row.replica))
            .exec(txn)
            .await?;
        if beaten.rows_affected > 0 {
            return Ok(());
        }
    }
    let columns = [Column::Beat, Column::Changed, Column::Calls];
    let known = OnConflict::column(Column::Replica).update_columns(columns).to_owned();
    let told = peer_waiters::Entity::insert(row.into_active_model()).on_conflict(known);
    told.exec_without_returning(txn).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use db::Database;
    use domain::LeaseId;
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::config::Config;
    use crate::scheduling::pipeline::tests::place_within;
    use crate::scheduling::{Caller, Dispatch};

    /// No time passes but what is said, and nobody hears of anything but by looking.
    async fn what_a_silent_replica_said_counts_no_more_and_is_deleted(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let replica = || Dispatcher::new(db.clone(), Arc::new(Config::new("", "")));
        let ((_, mut one), (seen, mut other)) = (replica(), replica());
        let waits_there = |seen: &Dispatch| seen.queue().len();
        let rows = async || peer_waiters::Entity::find().all(db.read()).await.expect("rows").len();
        let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
        let (asks, answer) = place_within(LeaseId::new(), Duration::from_secs(3600));
        one.rounds(vec![asks], &caller).await;

        let now = Timestamp::now();
        one.tend_elsewhere(now).await.expect("told");
        other.tend_elsewhere(now).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (1, 1));
        // It says so again, and is there.
        one.tend_elsewhere(now + SILENT).await.expect("told");
        other.tend_elsewhere(now + SILENT).await.expect("heard");
        assert_eq!(waits_there(&seen), 1);
        other.tend_elsewhere(now + SILENT * 2).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (0, 1), "it is silent");
        one.tend_elsewhere(now + SILENT * 3).await.expect("told");
        other.tend_elsewhere(now + SILENT * 3).await.expect("heard");
        assert_eq!(waits_there(&seen), 1, "it was not over");
        other.tend_elsewhere(now + SILENT * 3 + FORGOTTEN).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (0, 0));
        one.tend_elsewhere(now + FORGOTTEN * 2).await.expect("told");
        other.tend_elsewhere(now + FORGOTTEN * 2).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (1, 1), "its row is written again");

        one.tell_none().await.expect("told");
        other.tend_elsewhere(now + FORGOTTEN * 2).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (0, 0), "it ends");
        one.tend_elsewhere(now + FORGOTTEN * 2).await.expect("told");
        other.tend_elsewhere(now + FORGOTTEN * 2).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (1, 1));

        drop(answer);
        one.end_patience(tokio::time::Instant::now(), true);
        one.tend_elsewhere(now + FORGOTTEN * 2).await.expect("told");
        other.tend_elsewhere(now + FORGOTTEN * 2).await.expect("heard");
        assert_eq!((waits_there(&seen), rows().await), (0, 0), "nobody waits");
    }

    #[tokio::test]
    async fn what_a_silent_replica_said_counts_no_more_and_is_deleted_sqlite() {
        what_a_silent_replica_said_counts_no_more_and_is_deleted(databases::sqlite()).await;
    }

    #[tokio::test]
    async fn what_a_silent_replica_said_counts_no_more_and_is_deleted_postgres() {
        what_a_silent_replica_said_counts_no_more_and_is_deleted(databases::postgres().await).await;
    }
}
