//! The queue of requests that wait for a worker.
//!
//! Requests with the same requirements wait in one *line*. If the first of a line finds no worker,
//! the others would not either, so a pass checks one request for each distinct demand. The heads of
//! lines are ordered by priority, then by the team's slots in use relative to its weight, then by
//! age. Waiting raises the priority by one for each [`Queue::aging`], so that no request starves
//! among equal ones. For a larger request, a worker is reserved ([`crate::scheduling`]).
//!
//! For workloads, the queue is a cache of the database. An outdated entry is detected when it is
//! placed. Calls for leases wait at one replica, and the entries of other replicas are what these
//! report ([`crate::scheduling`]).

pub(crate) mod limits;
pub(crate) mod unschedulable;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use domain::{Timestamp, WorkerId};
use uuid::Uuid;

use crate::placement::{Demand, Location, OnlyWorker, Shape};
use crate::queue::limits::Load;

/// A waiting request: a workload, or a call for leases.
#[derive(Debug, Clone)]
pub(crate) struct WaitingRequest {
    /// The id of the workload, or of the call.
    pub(crate) id: Uuid,
    /// Whether the call waits at another replica, which answers it.
    pub(crate) is_elsewhere: bool,
    /// Further leases of the same call. Such a call has its own line.
    pub(crate) others: Vec<Arc<Demand>>,
    /// Sort key: the order of arrival.
    pub(crate) sequence: Uuid,
    pub(crate) priority: i64,
    pub(crate) since: Timestamp,
    pub(crate) demand: Arc<Demand>,
    pub(crate) locations: Arc<[Location]>,
    /// Whether a start timeout applies once the request is placed.
    pub(crate) must_start: bool,
    /// The reasons for waiting that its watchers have received.
    pub(crate) reported: Arc<[String]>,
    pub(crate) traceparent: String,
    /// Size of the spec in bytes. `None` for a call for leases.
    pub(crate) spec_bytes: Option<u64>,
}

impl WaitingRequest {
    /// Returns all demands of the request.
    pub(crate) fn demands(&self) -> Vec<Arc<Demand>> {
        std::iter::once(&self.demand).chain(&self.others).cloned().collect()
    }
}

/// The requirements that the requests of a line share. A group has its own line.
type LineKey = (Arc<Shape>, Option<OnlyWorker>, BTreeSet<WorkerId>, Option<Uuid>);

/// A position in a line: the time at which the request arrived, or would have arrived with priority
/// 0, then its sort key.
type Position = (i64, Uuid);

/// The waiting requests.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    lines: BTreeMap<usize, Line>,
    by_key: HashMap<LineKey, usize>,
    places: HashMap<Uuid, (usize, Position)>,
    next: usize,
    /// Waiting time that counts as one priority. Zero: never.
    aging: Duration,
    /// Weights of teams. Other teams have weight 1.
    weights: HashMap<String, u32>,
    /// Number of slots that each team uses.
    held: HashMap<String, u32>,
    /// Waiting workloads of each team.
    loads: HashMap<String, Load>,
}

#[derive(Debug)]
struct Line {
    key: LineKey,
    waiting: BTreeMap<Position, WaitingRequest>,
}

/// The rank of a line's head. Lower is earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    priority: Reverse<i64>,
    /// Slots of the team relative to its weight, in millionths.
    share: u64,
    sequence: Uuid,
}

impl Queue {
    pub(crate) fn new(aging: Duration, weights: HashMap<String, u32>) -> Self {
        Self { aging, weights, ..Self::default() }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn contains(&self, id: Uuid) -> bool {
        self.places.contains_key(&id)
    }

    /// Returns the waiting workloads of a team.
    pub(crate) fn load(&self, team: &str) -> Load {
        self.loads.get(team).copied().unwrap_or_default()
    }

    /// Returns the request with this id.
    pub(crate) fn get(&self, id: Uuid) -> Option<&WaitingRequest> {
        let (line, position) = self.places.get(&id)?;
        self.lines.get(line)?.waiting.get(position)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.places.keys().copied()
    }

    /// Adds or replaces a request.
    pub(crate) fn put(&mut self, waiting: WaitingRequest) {
        self.remove(waiting.id);
        let key = key(&waiting.demand, (!waiting.others.is_empty()).then_some(waiting.id));
        let line = *self.by_key.entry(key.clone()).or_insert_with(|| {
            self.next += 1;
            self.lines.insert(self.next, Line { key, waiting: BTreeMap::new() });
            self.next
        });
        if let Some(bytes) = waiting.spec_bytes {
            self.loads.entry(waiting.demand.shape.team.clone()).or_default().add(Load { count: 1, bytes });
        }
        let position = self.position(waiting.priority, waiting.since, waiting.sequence);
        self.places.insert(waiting.id, (line, position));
        if let Some(line) = self.lines.get_mut(&line) {
            line.waiting.insert(position, waiting);
        }
    }

    /// Removes a request.
    pub(crate) fn remove(&mut self, id: Uuid) -> Option<WaitingRequest> {
        let (number, position) = self.places.remove(&id)?;
        let line = self.lines.get_mut(&number)?;
        let waiting = line.waiting.remove(&position);
        if line.waiting.is_empty()
            && let Some(line) = self.lines.remove(&number)
        {
            self.by_key.remove(&line.key);
        }
        if let Some(waiting) = &waiting
            && let Some(bytes) = waiting.spec_bytes
        {
            Load::take_from(&mut self.loads, &waiting.demand.shape.team, Load { count: 1, bytes });
        }
        waiting
    }

    /// Returns whether a request with the same requirements is ahead of a new one with this
    /// priority.
    pub(crate) fn is_before(&self, demand: &Demand, priority: i64, now: Timestamp) -> bool {
        self.is_behind(demand, priority, now, Uuid::max())
    }

    /// Returns whether a request with the same requirements is ahead of one that waits `since`
    /// then.
    pub(crate) fn is_behind(&self, demand: &Demand, priority: i64, since: Timestamp, sequence: Uuid) -> bool {
        if self.places.is_empty() {
            return false;
        }
        let line = self.by_key.get(&key(demand, None)).and_then(|line| self.lines.get(line));
        let first = line.and_then(|line| line.waiting.first_key_value());
        first.is_some_and(|(first, _)| *first < self.position(priority, since, sequence))
    }

    /// Waiting for [`Queue::aging`] equals one priority, so the order of two requests never
    /// changes.
    fn position(&self, priority: i64, since: Timestamp, sequence: Uuid) -> Position {
        let worth = i64::try_from(self.aging.as_micros()).unwrap_or(i64::MAX);
        match worth {
            0 => (priority.saturating_neg(), sequence),
            _ => (since.0.saturating_sub(priority.saturating_mul(worth)), sequence),
        }
    }

    /// Sets the number of slots that teams use.
    pub(crate) fn set_slots(&mut self, held: HashMap<String, u32>) {
        self.held = held;
    }

    /// Counts one more slot for a team.
    pub(crate) fn add_slot(&mut self, team: &str) {
        match self.held.get_mut(team) {
            Some(held) => *held += 1,
            None => _ = self.held.insert(team.to_owned(), 1),
        }
    }

    fn rank(&self, waiting: &WaitingRequest, now: Timestamp) -> Rank {
        let team = &waiting.demand.shape.team;
        let held = self.held.get(team).copied().unwrap_or(0);
        let weight = self.weights.get(team).copied().unwrap_or(1).max(1);
        // Whole steps, so that requests that arrived at about the same time are equal.
        let waited = now.since(waiting.since).as_micros();
        let aged = waited.checked_div(self.aging.as_micros()).unwrap_or(0);
        let aged = i64::try_from(aged).unwrap_or(i64::MAX);
        Rank {
            priority: Reverse(waiting.priority.saturating_add(aged)),
            share: u64::from(held) * 1_000_000 / u64::from(weight),
            sequence: waiting.sequence,
        }
    }

    /// Starts a pass over the heads of lines.
    pub(crate) fn start_pass(&self, now: Timestamp) -> QueuePass {
        let heads = self.lines.iter().filter_map(|(number, line)| {
            let (position, waiting) = line.waiting.first_key_value()?;
            Some(Reverse((self.rank(waiting, now), *number, *position)))
        });
        QueuePass { heads: heads.collect(), now }
    }

    /// Returns the number of requests ahead of one with this priority that waits `since` then.
    /// Ignores the shares of teams, which change with each placement.
    pub(crate) fn ahead(&self, priority: i64, since: Timestamp, sequence: Uuid) -> u64 {
        let position = self.position(priority, since, sequence);
        let before = self.lines.values().map(|line| line.waiting.range(..position).count() as u64);
        before.sum()
    }

    /// Returns the number of requests ahead with the same platform and tags as `demand`.
    pub(crate) fn rivals(&self, demand: &Demand, priority: i64, since: Timestamp, sequence: Uuid) -> u64 {
        let position = self.position(priority, since, sequence);
        let is_alike = |line: &&Line| {
            let (shape, only, ..) = &line.key;
            shape.platform == demand.shape.platform && shape.tags == demand.shape.tags && *only == demand.only
        };
        let before = self.lines.values().filter(is_alike);
        before.map(|line| line.waiting.range(..position).count() as u64).sum()
    }

    /// Returns whether a request that waits `since` then has gained a priority.
    pub(crate) fn has_aged(&self, since: Timestamp, now: Timestamp) -> bool {
        !self.aging.is_zero() && now.since(since) >= self.aging
    }

    /// Returns whether the head of any line gained a priority between these times.
    pub(crate) fn some_aged(&self, after: Timestamp, now: Timestamp) -> bool {
        self.lines().any(|(first, _)| !self.has_aged(first.since, after) && self.has_aged(first.since, now))
    }

    /// Returns the head of each line, with the length of the line.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (&WaitingRequest, usize)> {
        self.lines.values().filter_map(|line| Some((line.waiting.values().next()?, line.waiting.len())))
    }

    /// Groups these requests by line, in the order of each line.
    pub(crate) fn by_line(&self, ids: impl Iterator<Item = Uuid>) -> Vec<Vec<&WaitingRequest>> {
        let mut by_line = BTreeMap::<usize, BTreeMap<Position, &WaitingRequest>>::new();
        for id in ids {
            let Some((line, position)) = self.places.get(&id) else { continue };
            let waiting = self.lines.get(line).and_then(|line| line.waiting.get(position));
            by_line.entry(*line).or_default().extend(waiting.map(|waiting| (*position, waiting)));
        }
        by_line.into_values().map(|line| line.into_values().collect()).collect()
    }

    /// Returns the requests in the line of this one.
    pub(crate) fn line_of(&self, id: Uuid) -> impl Iterator<Item = Uuid> {
        let line = self.places.get(&id).and_then(|(line, _)| self.lines.get(line));
        line.into_iter().flat_map(|line| line.waiting.values().map(|waiting| waiting.id))
    }

    /// Returns whether two requests are in one line.
    pub(crate) fn are_in_one_line(&self, one: Uuid, other: Uuid) -> bool {
        let line = |id| self.places.get(&id).map(|(line, _)| *line);
        line(one).is_some_and(|of_one| line(other) == Some(of_one))
    }

    /// Returns the demands of each line, with their number and the arrival of the oldest. Each
    /// lease of a call counts.
    pub(crate) fn demand(&self) -> impl Iterator<Item = (&Arc<Demand>, usize, Timestamp)> {
        self.lines.values().flat_map(|line| {
            let oldest = line.waiting.values().map(|waiting| waiting.since).min();
            let first = line.waiting.values().next().zip(oldest);
            let alike = first.map(|(first, oldest)| (&first.demand, line.waiting.len(), oldest));
            let others = first
                .into_iter()
                .flat_map(|(first, oldest)| first.others.iter().map(move |demand| (demand, 1, oldest)));
            alike.into_iter().chain(others)
        })
    }

    /// Returns those of the first `count` requests in a line whose watchers have received other
    /// reasons.
    pub(crate) fn outdated_reasons(&self, id: Uuid, reasons: &[String], count: usize) -> Vec<Uuid> {
        let line = self.places.get(&id).and_then(|(line, _)| self.lines.get(line));
        let first = line.into_iter().flat_map(|line| line.waiting.values().take(count));
        first.filter(|waiting| *waiting.reported != *reasons).map(|waiting| waiting.id).collect()
    }

    /// Records the reasons that the watchers of a request have received.
    pub(crate) fn set_reported(&mut self, id: Uuid, reasons: &Arc<[String]>) {
        let Some((line, position)) = self.places.get(&id) else { return };
        let line = self.lines.get_mut(line).and_then(|line| line.waiting.get_mut(position));
        if let Some(waiting) = line {
            waiting.reported = reasons.clone();
        }
    }

    /// Returns the highest sort key.
    pub(crate) fn newest(&self) -> Option<Uuid> {
        self.places.values().map(|(_, (_, sequence))| *sequence).max()
    }
}

fn key(demand: &Demand, group: Option<Uuid>) -> LineKey {
    let failed_on = demand.failed_on.iter().map(|failed| failed.worker);
    (demand.shape.clone(), demand.only, demand.avoid.iter().copied().chain(failed_on).collect(), group)
}

/// A pass over the heads of lines, in the order of their ranks.
#[derive(Debug)]
pub(crate) struct QueuePass {
    heads: BinaryHeap<Reverse<(Rank, usize, Position)>>,
    now: Timestamp,
}

impl QueuePass {
    /// Returns the next head. The caller reports a placement with [`QueuePass::placed`]. A line
    /// whose head was not placed is not visited again.
    pub(crate) fn next(&mut self, queue: &Queue) -> Option<LineHead> {
        while let Some(Reverse((rank, number, position))) = self.heads.pop() {
            let Some(waiting) = queue.lines.get(&number).and_then(|line| line.waiting.get(&position)) else {
                continue;
            };
            // The team may use more slots than at the start of the pass.
            let present = queue.rank(waiting, self.now);
            if present > rank && self.heads.peek().is_some_and(|Reverse((next, ..))| *next < present) {
                self.heads.push(Reverse((present, number, position)));
                continue;
            }
            return Some(LineHead { waiting: waiting.clone(), line: number, position });
        }
        None
    }

    /// Continues with the next request of the line after its head was placed.
    pub(crate) fn placed(&mut self, queue: &Queue, turn: &LineHead) {
        let Some(line) = queue.lines.get(&turn.line) else { return };
        let behind = (std::ops::Bound::Excluded(turn.position), std::ops::Bound::Unbounded);
        if let Some((position, waiting)) = line.waiting.range(behind).next() {
            self.heads.push(Reverse((queue.rank(waiting, self.now), turn.line, *position)));
        }
    }
}

/// The head of a line, visited by a pass.
#[derive(Debug, Clone)]
pub(crate) struct LineHead {
    pub(crate) waiting: WaitingRequest,
    line: usize,
    position: Position,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Purpose, Resources};

    fn waiting(team: &str, platform: &str, priority: i64, since: i64) -> WaitingRequest {
        let shape = Shape {
            team: team.to_owned(),
            platform: platform.to_owned(),
            tags: vec![],
            process: None,
            requests: Resources::default(),
            purpose: Purpose::Build,
        };
        let id = Uuid::now_v7();
        WaitingRequest {
            id,
            is_elsewhere: false,
            others: vec![],
            sequence: Uuid::now_v7(),
            priority,
            since: Timestamp(since),
            demand: Arc::new(shape.requested_by(id)),
            locations: Arc::new([]),
            must_start: false,
            reported: Arc::new([]),
            traceparent: String::new(),
            spec_bytes: Some(10),
        }
    }

    /// Places as many requests as `slots` allow for each platform, and returns their teams.
    fn place(queue: &mut Queue, slots: &mut HashMap<&str, u32>, now: i64) -> Vec<String> {
        let (mut round, mut got) = (queue.start_pass(Timestamp(now)), Vec::new());
        while let Some(turn) = round.next(queue) {
            let demand = turn.waiting.demand.clone();
            let left = slots.get_mut(demand.shape.platform.as_str()).expect("a platform");
            if *left > 0 {
                *left -= 1;
                round.placed(queue, &turn);
                queue.add_slot(&demand.shape.team);
                queue.remove(turn.waiting.id);
                got.push(demand.shape.team.clone());
            }
        }
        got
    }

    #[test]
    fn teams_share_slots_by_weight() {
        let mut queue = Queue::new(Duration::from_secs(600), HashMap::from([("heavy".to_owned(), 3)]));
        (0..100).for_each(|_| queue.put(waiting("light", "linux", 0, 0)));
        (0..100).for_each(|_| queue.put(waiting("heavy", "linux", 0, 0)));
        let got = place(&mut queue, &mut HashMap::from([("linux", 40)]), 0);
        assert_eq!(got.iter().filter(|team| *team == "heavy").count(), 30, "{got:?}");
        assert_eq!(queue.len(), 160);
        // A team with few slots catches up, even with a team that released slots.
        queue.set_slots(HashMap::from([("light".to_owned(), 1), ("heavy".to_owned(), 30)]));
        let got = place(&mut queue, &mut HashMap::from([("linux", 9)]), 0);
        assert_eq!(got, vec!["light".to_owned(); 9]);
    }

    #[test]
    fn waiting_raises_priority() {
        let mut queue = Queue::new(Duration::from_secs(60), HashMap::new());
        let old = waiting("a", "linux", 0, 0);
        queue.put(old.clone());
        (0..3).for_each(|_| queue.put(waiting("b", "linux", 2, 100_000_000)));
        assert_eq!(place(&mut queue, &mut HashMap::from([("linux", 1)]), 100_000_000), ["b"]);
        assert_eq!(queue.ahead(0, Timestamp(0), old.sequence), 2);
        // After three minutes, the request counts as priority 3.
        assert_eq!(place(&mut queue, &mut HashMap::from([("linux", 2)]), 180_000_000), ["a", "b"]);
        assert!(!queue.contains(old.id));
    }

    #[test]
    fn team_load_counts_waiting_workloads() {
        let mut queue = Queue::new(Duration::ZERO, HashMap::new());
        let (one, other) = (waiting("a", "linux", 0, 0), waiting("b", "linux", 0, 0));
        let call = WaitingRequest { spec_bytes: None, ..waiting("a", "linux", 0, 0) };
        for waiting in [&one, &other, &call, &one] {
            queue.put(waiting.clone());
        }
        queue.put(waiting("a", "darwin", 0, 0));
        assert_eq!(queue.load("a"), Load { count: 2, bytes: 20 });
        assert_eq!(queue.load("b"), Load { count: 1, bytes: 10 });
        for id in [one.id, one.id, call.id, other.id] {
            queue.remove(id);
        }
        assert_eq!(queue.load("a"), Load { count: 1, bytes: 10 });
        assert!(!queue.loads.contains_key("b"), "a team without workloads takes no room");
    }

    #[test]
    fn demand_lists_each_lease_of_a_call() {
        let mut queue = Queue::new(Duration::ZERO, HashMap::new());
        let [first, second, third] = ["linux", "darwin", "linux"].map(|of| waiting("a", of, 0, 7).demand);
        queue.put(WaitingRequest {
            demand: first.clone(),
            others: vec![second.clone(), third.clone()],
            ..waiting("a", "linux", 0, 7)
        });
        (0..2).for_each(|_| queue.put(waiting("a", "linux", 0, 5)));
        let demand = queue.demand().map(|(demand, count, oldest)| (&*demand.shape.platform, count, oldest.0));
        assert_eq!(
            demand.collect::<Vec<_>>(),
            [("linux", 1, 7), ("darwin", 1, 7), ("linux", 1, 7), ("linux", 2, 5)]
        );
        assert_eq!(queue.len(), 3, "the call is one request");
    }

    #[test]
    fn unplaced_line_does_not_block_others() {
        let mut queue = Queue::new(Duration::ZERO, HashMap::new());
        (0..1000).for_each(|_| queue.put(waiting("a", "darwin", 9, 0)));
        (0..3).for_each(|_| queue.put(waiting("a", "linux", 0, 0)));
        let got = place(&mut queue, &mut HashMap::from([("linux", 2), ("darwin", 0)]), 0);
        assert_eq!(got.len(), 2);
        assert_eq!(queue.lines().map(|(_, count)| count).collect::<Vec<_>>(), [1000, 1]);
        let is_before = |team: &str, priority: i64| {
            queue.is_before(&waiting(team, "linux", 0, 0).demand, priority, Timestamp(1))
        };
        assert!(is_before("a", 0));
        assert!(!is_before("a", 1));
        assert!(!is_before("b", 0));
    }
}
