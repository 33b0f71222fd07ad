//! Calls for leases that wait at other replicas.
//!
//! A waiting call is held by its own replica ([`super::waiters`]), which alone can answer it. With
//! every poll, each replica writes its waiting calls to a row of the table `peer_waiters`, and
//! reads the rows of the others. Those calls enter the queue here. When one of them is next, the
//! pass leaves its workers free ([`Dispatcher::leave_alone`]). Its own replica is notified of freed
//! slots and takes them. A request behind it therefore cannot overtake it.
//!
//! The knowledge about peers is up to two polls old, and only the order of requests depends on it.
//! A call that has ended, or whose replica does not take what is left to it, is skipped after one
//! poll. A replica that is silent for [`SILENT`] has ended.

use std::collections::{HashMap, HashSet};
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
use crate::placement::{Choice, Demand, Index, OnlyWorker, Resources, Shape};
use crate::queue::{LineHead, QueuePass, WaitingRequest};

/// Time without a beat after which a replica has ended, but at least five polls.
const SILENT: Duration = Duration::from_secs(10);

/// Time without a beat after which the row of a replica is deleted.
const DELETE_AFTER: Duration = Duration::from_secs(300);

/// The published calls of this replica, and the known calls of others.
#[derive(Debug)]
pub(super) struct PeerWaiters {
    replica: Uuid,
    /// Number of beats of this replica.
    beat: i64,
    /// The content of its row. `None`: no row.
    published: Option<String>,
    others: HashMap<Uuid, Peer>,
    /// Calls for which workers were left free, with the time since when.
    left_to: HashMap<Uuid, Timestamp>,
}

/// Another replica.
#[derive(Debug)]
struct Peer {
    beat: i64,
    changed: i64,
    /// When its beat last changed.
    seen_at: Timestamp,
    /// Whether its calls were removed after a long silence.
    is_dropped: bool,
    calls: HashSet<Uuid>,
}

/// Calls with the same requirements.
#[derive(Debug, Serialize, Deserialize)]
struct PeerLine {
    /// All demands of one of the calls.
    asks: Vec<PeerDemand>,
    calls: Vec<PeerWaiter>,
}

/// The part of a [`Demand`] that other replicas need.
#[derive(Debug, Serialize, Deserialize)]
struct PeerDemand {
    shape: Shape,
    only: Option<OnlyWorker>,
    avoid: Vec<WorkerId>,
}

/// A waiting call.
#[derive(Debug, Serialize, Deserialize)]
struct PeerWaiter {
    /// The id in the queue, which sorts by age.
    id: Uuid,
    priority: i64,
    since: Timestamp,
}

/// Planned load that is left free for calls of other replicas during a pass.
#[derive(Debug, Default)]
pub(super) struct LeftForPeers(Vec<(WorkerId, Kind, Resources)>);

impl PeerWaiters {
    pub(super) fn new() -> Self {
        Self {
            replica: Uuid::now_v7(),
            beat: 0,
            published: None,
            others: HashMap::new(),
            left_to: HashMap::new(),
        }
    }
}

impl PeerDemand {
    /// Converts a demand of a line. Each call sets its own id.
    fn demand(self) -> Demand {
        Demand {
            only: self.only,
            avoid: self.avoid.into_iter().collect(),
            ..self.shape.requested_by(Uuid::nil())
        }
    }
}

impl PeerWaiter {
    /// Converts a call to a queue entry. Returns `None` if the call has no demand.
    fn waiting(self, asks: &[Demand]) -> Option<WaitingRequest> {
        let own =
            |demand: &Demand| Arc::new(Demand { requester: self.id, waits_as: self.id, ..demand.clone() });
        let mut demands = asks.iter().map(own);
        Some(WaitingRequest {
            id: self.id,
            is_elsewhere: true,
            demand: demands.next()?,
            others: demands.collect(),
            sequence: self.id,
            priority: self.priority,
            since: self.since,
            locations: Arc::default(),
            must_start: false,
            reported: Arc::default(),
            traceparent: String::new(),
            spec_bytes: None,
        })
    }
}

impl Dispatcher {
    /// Publishes the waiting calls of this replica, and reads those of others.
    pub(super) async fn exchange_calls(&mut self, now: Timestamp) -> Result<(), DbErr> {
        self.publish_calls().await?;
        // Workers left free may become available soon.
        self.pass_needed |= !self.peers.left_to.is_empty();
        self.read_calls(now).await
    }

    async fn publish_calls(&mut self) -> Result<(), DbErr> {
        if self.waiters.is_empty() {
            return self.withdraw_calls().await;
        }
        let calls = self.calls_here()?;
        let PeerWaiters { replica, beat, published, .. } = &mut self.peers;
        *beat += 1;
        let row =
            peer_waiters::Model { replica: *replica, beat: *beat, changed: *beat, calls: calls.clone() };
        // Until the write is confirmed, the content of the row is unknown.
        let is_known = published.replace(String::new()).as_ref() == Some(&calls);
        self.db.write(async |txn| write_row(&txn, row.clone(), is_known).await).await?;
        *published = Some(calls);
        self.waiters.mark_published();
        Ok(())
    }

    /// Deletes the row of this replica, because no call waits or because it stops.
    pub(super) async fn withdraw_calls(&mut self) -> Result<(), DbErr> {
        if self.peers.published.is_some() {
            let over = peer_waiters::Entity::delete_by_id(self.peers.replica);
            self.db.write(async |txn| over.clone().exec(&*txn).await).await?;
            self.peers.published = None;
        }
        Ok(())
    }

    /// Encodes the waiting calls of this replica.
    fn calls_here(&self) -> Result<String, DbErr> {
        let queue = self.queue();
        let lines = queue.by_line(self.waiters.ids()).into_iter().map(|waiting| {
            let peer_demand = |demand: Arc<Demand>| PeerDemand {
                shape: (*demand.shape).clone(),
                only: demand.only,
                avoid: demand.avoid.iter().copied().collect(),
            };
            let asks = waiting.first().map(|first| first.demands()).unwrap_or_default();
            let waiter =
                |one: &&WaitingRequest| PeerWaiter { id: one.id, priority: one.priority, since: one.since };
            PeerLine {
                asks: asks.into_iter().map(peer_demand).collect(),
                calls: waiting.iter().map(waiter).collect(),
            }
        });
        to_json(&lines.collect::<Vec<_>>())
    }

    async fn read_calls(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let beats: Vec<(Uuid, i64, i64)> = peer_waiters::Entity::find()
            .select_only()
            .columns([
                peer_waiters::Column::Replica,
                peer_waiters::Column::Beat,
                peer_waiters::Column::Changed,
            ])
            .filter(peer_waiters::Column::Replica.ne(self.peers.replica))
            .into_tuple()
            .all(self.db.read())
            .await?;
        let mut news = Vec::new();
        let there: HashSet<_> = beats.iter().map(|(replica, ..)| *replica).collect();
        let gone: Vec<_> = self.peers.others.keys().filter(|id| !there.contains(id)).copied().collect();
        for replica in gone {
            self.forget(replica);
            self.peers.others.remove(&replica);
        }
        for (replica, beat, changed) in beats {
            match self.peers.others.get_mut(&replica) {
                Some(known) if known.beat == beat => {
                    let silent_for = now.since(known.seen_at);
                    if silent_for >= SILENT.max(self.config.poll * 5) {
                        self.forget(replica);
                    }
                    if silent_for >= DELETE_AFTER {
                        let ended = peer_waiters::Entity::delete_by_id(replica)
                            .filter(peer_waiters::Column::Beat.eq(beat));
                        self.db.write(async |txn| ended.clone().exec(&*txn).await).await?;
                    }
                }
                Some(known) if known.changed == changed && !known.is_dropped => {
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
            self.update_peer(&row, now).unwrap_or_else(|error| {
                tracing::debug!(replica = %row.replica, error = %domain::error_chain(&error), "cannot read the waiting calls of another replica");
            });
        }
        Ok(())
    }

    /// Updates the calls of another replica from its row.
    fn update_peer(&mut self, row: &peer_waiters::Model, now: Timestamp) -> Result<(), DbErr> {
        let lines: Vec<PeerLine> = from_json(&row.calls)?;
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut calls = HashSet::new();
        for PeerLine { asks, calls: waiters } in lines {
            let demands: Vec<_> = asks.into_iter().map(PeerDemand::demand).collect();
            for waiting in waiters.into_iter().filter_map(|waiter| waiter.waiting(&demands)) {
                calls.insert(waiting.id);
                let was_left_alone = |since: &Timestamp| now.since(*since) >= self.config.poll;
                if !queue.contains(waiting.id)
                    && !self.peers.left_to.get(&waiting.id).is_some_and(was_left_alone)
                {
                    queue.put(waiting);
                }
            }
        }
        let other = Peer { beat: row.beat, changed: row.changed, seen_at: now, is_dropped: false, calls };
        let others = &mut self.peers.others;
        let before = others.insert(row.replica, other).map(|before| before.calls).unwrap_or_default();
        let calls = others.get(&row.replica).map(|other| &other.calls);
        let over = before.iter().filter(|id| calls.is_none_or(|calls| !calls.contains(id)));
        let over: Vec<_> = over.copied().collect();
        drop(queue);
        over.into_iter().for_each(|id| self.remove_waiting(id));
        Ok(())
    }

    /// Removes a request from the queue.
    pub(super) fn remove_waiting(&mut self, id: Uuid) {
        let was_elsewhere = self.queue().remove(id).is_some_and(|waiting| waiting.is_elsewhere);
        self.peers.left_to.remove(&id);
        // Other requests may use the workers that were left free.
        self.pass_needed |= was_elsewhere;
    }

    /// Removes the calls of a replica that has ended.
    fn forget(&mut self, replica: Uuid) {
        let Some(other) = self.peers.others.get_mut(&replica) else { return };
        other.is_dropped = true;
        let calls = std::mem::take(&mut other.calls);
        calls.into_iter().for_each(|id| self.remove_waiting(id));
    }

    /// Handles a call of another replica at the head of its line: its workers are left free, for
    /// one poll at most.
    pub(super) fn leave_alone(
        &mut self,
        turn: &LineHead,
        round: &mut QueuePass,
        left: &mut LeftForPeers,
        now: Timestamp,
    ) {
        let id = turn.waiting.id;
        let mut workers = self.cache.workers.lock();
        let before = left.0.len();
        for demand in turn.waiting.demands() {
            let Choice::Placed(placement) = workers.choose(&demand, &[]) else {
                left.undo(before, &mut workers);
                self.peers.left_to.remove(&id);
                self.reservations.apply_to_turn(id, &mut workers);
                return;
            };
            workers.plan(placement.worker, demand.kind, &demand.shape.requests);
            left.0.push((placement.worker, demand.kind, demand.shape.requests));
        }
        let since = *self.peers.left_to.entry(id).or_insert(now);
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
    /// Ends the pass: no worker is left free any more.
    pub(super) fn end(mut self, workers: &mut Index) {
        self.undo(0, workers);
    }

    fn undo(&mut self, down_to: usize, workers: &mut Index) {
        for (worker, kind, requests) in self.0.drain(down_to..) {
            workers.unplan(worker, kind, &requests);
        }
    }
}

/// Writes the row of a replica. `is_known`: the row has these calls already, unless another replica
/// deleted it.
async fn write_row(txn: &DatabaseTransaction, row: peer_waiters::Model, is_known: bool) -> Result<(), DbErr> {
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
    let insert = peer_waiters::Entity::insert(row.into_active_model()).on_conflict(known);
    insert.exec_without_returning(txn).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use db::Database;
    use domain::LeaseId;
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::config::Config;
    use crate::scheduling::pipeline::tests::place_within;
    use crate::scheduling::{Dispatch, RoundContext};

    /// The test controls the time, and replicas see each other only through the table.
    async fn calls_of_silent_replica_are_dropped_and_deleted(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let replica = || Dispatcher::new(db.clone(), Arc::new(Config::new("", "")));
        let ((_, mut one), (seen, mut other)) = (replica(), replica());
        let waits_there = |seen: &Dispatch| seen.queue().len();
        let rows = async || peer_waiters::Entity::find().all(db.read()).await.expect("rows").len();
        let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
        let (asks, answer) = place_within(LeaseId::new(), Duration::from_secs(3600));
        one.rounds(vec![asks], &caller).await;

        let now = Timestamp::now();
        one.exchange_calls(now).await.expect("published");
        other.exchange_calls(now).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (1, 1));
        // A new beat: the replica is alive.
        one.exchange_calls(now + SILENT).await.expect("published");
        other.exchange_calls(now + SILENT).await.expect("read");
        assert_eq!(waits_there(&seen), 1);
        other.exchange_calls(now + SILENT * 2).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (0, 1), "a silent replica");
        one.exchange_calls(now + SILENT * 3).await.expect("published");
        other.exchange_calls(now + SILENT * 3).await.expect("read");
        assert_eq!(waits_there(&seen), 1, "the replica was alive");
        other.exchange_calls(now + SILENT * 3 + DELETE_AFTER).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (0, 0));
        one.exchange_calls(now + DELETE_AFTER * 2).await.expect("published");
        other.exchange_calls(now + DELETE_AFTER * 2).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (1, 1), "the row is written again");

        one.withdraw_calls().await.expect("published");
        other.exchange_calls(now + DELETE_AFTER * 2).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (0, 0), "the replica ends");
        one.exchange_calls(now + DELETE_AFTER * 2).await.expect("published");
        other.exchange_calls(now + DELETE_AFTER * 2).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (1, 1));

        drop(answer);
        one.end_waits(tokio::time::Instant::now(), true);
        one.exchange_calls(now + DELETE_AFTER * 2).await.expect("published");
        other.exchange_calls(now + DELETE_AFTER * 2).await.expect("read");
        assert_eq!((waits_there(&seen), rows().await), (0, 0), "the caller disconnected");
    }

    #[tokio::test]
    async fn calls_of_silent_replica_are_dropped_and_deleted_sqlite() {
        calls_of_silent_replica_are_dropped_and_deleted(databases::sqlite()).await;
    }

    #[tokio::test]
    async fn calls_of_silent_replica_are_dropped_and_deleted_postgres() {
        calls_of_silent_replica_are_dropped_and_deleted(databases::postgres().await).await;
    }
}
