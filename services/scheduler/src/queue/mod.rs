//! The queue: who waits for a worker, and whose turn it is.
//!
//! Those that ask for the same wait in one *line*: where the first of a line finds no worker, nobody behind it would. So as many lines are
//! looked at as there are different demands, however many wait. Between the heads of lines the higher priority is first, then the team that
//! holds the fewest slots for its weight, then who came first. Waiting raises the priority, by one for each [`Queue::aging`], so nobody is
//! passed over for ever by others that ask for as much; for one that asks for more a worker is reserved ([`crate::scheduling`]).
//!
//! Of workloads it is a memory of what the database says: one that does not wait any more, or must not be where it was decided, is found out when it
//! is placed. Who waits for leases waits at one replica; of others it is what they say ([`crate::scheduling`]).

pub(crate) mod limits;
pub(crate) mod unschedulable;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use domain::{Timestamp, WorkerId};
use uuid::Uuid;

use crate::placement::{Demand, Location, Shape};
use crate::queue::limits::Load;

/// Somebody who waits: a workload, or who asks for leases.
#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    /// The workload, or what a call for leases is called.
    pub(crate) id: Uuid,
    /// Whether it is a call that waits at another replica, and is answered there.
    pub(crate) is_elsewhere: bool,
    /// What else it asks for at once. Who asks for several leases has a line of its own.
    pub(crate) others: Vec<Arc<Demand>>,
    /// Sorts by age.
    pub(crate) sequence: Uuid,
    pub(crate) priority: i64,
    pub(crate) since: Timestamp,
    pub(crate) demand: Arc<Demand>,
    pub(crate) locations: Arc<[Location]>,
    /// Whether it must start in some time once it is placed.
    pub(crate) must_start: bool,
    /// Why it waits, as whoever watches it was told.
    pub(crate) told: Arc<[String]>,
    pub(crate) traceparent: String,
    /// Bytes of its spec. `None`: it is a call for leases.
    pub(crate) spec_bytes: Option<u64>,
}

impl Waiting {
    /// All that it asks for.
    pub(crate) fn demands(&self) -> Vec<Arc<Demand>> {
        std::iter::once(&self.demand).chain(&self.others).cloned().collect()
    }
}

/// What all in a line ask for. Nobody asks for the same as a group.
type LineKey = (Arc<Shape>, Option<WorkerId>, BTreeSet<WorkerId>, Option<Uuid>);

/// A place in a line: when it came, or would have come to wait here now with priority 0; then by age.
type Position = (i64, Uuid);

/// Who waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    lines: BTreeMap<usize, Line>,
    by_key: HashMap<LineKey, usize>,
    places: HashMap<Uuid, (usize, Position)>,
    next: usize,
    /// After how long somebody who waits counts as one priority higher.
    aging: Duration,
    /// Of how much more than others teams get. Others: 1.
    weights: HashMap<String, u32>,
    /// The slots that each team holds.
    held: HashMap<String, u32>,
    /// The workloads of each team that wait.
    loads: HashMap<String, Load>,
}

#[derive(Debug)]
struct Line {
    key: LineKey,
    waiting: BTreeMap<Position, Waiting>,
}

/// Whose turn it is before others. Lower is earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    priority: Reverse<i64>,
    /// Slots that its team holds for its weight, in millionths.
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

    /// The workloads of a team that wait.
    pub(crate) fn load(&self, team: &str) -> Load {
        self.loads.get(team).copied().unwrap_or_default()
    }

    /// Who waits by this id.
    pub(crate) fn get(&self, id: Uuid) -> Option<&Waiting> {
        let (line, position) = self.places.get(&id)?;
        self.lines.get(line)?.waiting.get(position)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.places.keys().copied()
    }

    /// Somebody waits, or waits for something else than before.
    pub(crate) fn put(&mut self, waiting: Waiting) {
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

    /// Somebody does not wait any more.
    pub(crate) fn remove(&mut self, id: Uuid) -> Option<Waiting> {
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

    /// Whether somebody waits who asks for the same, and would be placed before one of `priority` that comes `now`.
    pub(crate) fn is_before(&self, demand: &Demand, priority: i64, now: Timestamp) -> bool {
        self.is_behind(demand, priority, now, Uuid::max())
    }

    /// The same for one that has waited `since` then.
    pub(crate) fn is_behind(&self, demand: &Demand, priority: i64, since: Timestamp, sequence: Uuid) -> bool {
        if self.places.is_empty() {
            return false;
        }
        let line = self.by_key.get(&key(demand, None)).and_then(|line| self.lines.get(line));
        let first = line.and_then(|line| line.waiting.first_key_value());
        first.is_some_and(|(first, _)| *first < self.position(priority, since, sequence))
    }

    /// Waiting for [`Queue::aging`] is worth as much as one of priority, so whoever is before another stays so.
    fn position(&self, priority: i64, since: Timestamp, sequence: Uuid) -> Position {
        let worth = i64::try_from(self.aging.as_micros()).unwrap_or(i64::MAX);
        match worth {
            0 => (priority.saturating_neg(), sequence),
            _ => (since.0.saturating_sub(priority.saturating_mul(worth)), sequence),
        }
    }

    /// The slots that teams hold.
    pub(crate) fn hold(&mut self, held: HashMap<String, u32>) {
        self.held = held;
    }

    /// A team holds a slot more.
    pub(crate) fn took(&mut self, team: &str) {
        match self.held.get_mut(team) {
            Some(held) => *held += 1,
            None => _ = self.held.insert(team.to_owned(), 1),
        }
    }

    fn rank(&self, waiting: &Waiting, now: Timestamp) -> Rank {
        let team = &waiting.demand.shape.team;
        let held = self.held.get(team).copied().unwrap_or(0);
        let weight = self.weights.get(team).copied().unwrap_or(1).max(1);
        // Whole steps, so that two that came at about the same time are equal.
        let waited = now.since(waiting.since).as_micros();
        let aged = waited.checked_div(self.aging.as_micros()).unwrap_or(0);
        let aged = i64::try_from(aged).unwrap_or(i64::MAX);
        Rank {
            priority: Reverse(waiting.priority.saturating_add(aged)),
            share: u64::from(held) * 1_000_000 / u64::from(weight),
            sequence: waiting.sequence,
        }
    }

    /// Begins a round, in which each line is asked until its first finds nothing.
    pub(crate) fn round(&self, now: Timestamp) -> Round {
        let heads = self.lines.iter().filter_map(|(number, line)| {
            let (position, waiting) = line.waiting.first_key_value()?;
            Some(Reverse((self.rank(waiting, now), *number, *position)))
        });
        Round { heads: heads.collect(), now }
    }

    /// How many wait before one of `priority` that has waited `since` then. Whose team holds how much is left out: that changes with each
    /// that is placed.
    pub(crate) fn ahead(&self, priority: i64, since: Timestamp, sequence: Uuid) -> u64 {
        let position = self.position(priority, since, sequence);
        let before = self.lines.values().map(|line| line.waiting.range(..position).count() as u64);
        before.sum()
    }

    /// How many of those before it ask for the same platform and tags as `demand`, and so for the same workers.
    pub(crate) fn rivals(&self, demand: &Demand, priority: i64, since: Timestamp, sequence: Uuid) -> u64 {
        let position = self.position(priority, since, sequence);
        let asks_alike = |line: &&Line| {
            let (shape, only, ..) = &line.key;
            shape.platform == demand.shape.platform && shape.tags == demand.shape.tags && *only == demand.only
        };
        let before = self.lines.values().filter(asks_alike);
        before.map(|line| line.waiting.range(..position).count() as u64).sum()
    }

    /// Whether one that has waited `since` then has waited for so long that it counts as one priority higher.
    pub(crate) fn has_aged(&self, since: Timestamp, now: Timestamp) -> bool {
        !self.aging.is_zero() && now.since(since) >= self.aging
    }

    /// Whether the first of any line has come to that between these times.
    pub(crate) fn some_aged(&self, after: Timestamp, now: Timestamp) -> bool {
        self.lines().any(|(first, _)| !self.has_aged(first.since, after) && self.has_aged(first.since, now))
    }

    /// The first of each line, with how many wait in it.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (&Waiting, usize)> {
        self.lines.values().filter_map(|line| Some((line.waiting.values().next()?, line.waiting.len())))
    }

    /// These, those of each line together and in its order.
    pub(crate) fn by_line(&self, ids: impl Iterator<Item = Uuid>) -> Vec<Vec<&Waiting>> {
        let mut by_line = BTreeMap::<usize, BTreeMap<Position, &Waiting>>::new();
        for id in ids {
            let Some((line, position)) = self.places.get(&id) else { continue };
            let waiting = self.lines.get(line).and_then(|line| line.waiting.get(position));
            by_line.entry(*line).or_default().extend(waiting.map(|waiting| (*position, waiting)));
        }
        by_line.into_values().map(|line| line.into_values().collect()).collect()
    }

    /// Those that wait in the line of one of them.
    pub(crate) fn line_of(&self, id: Uuid) -> impl Iterator<Item = Uuid> {
        let line = self.places.get(&id).and_then(|(line, _)| self.lines.get(line));
        line.into_iter().flat_map(|line| line.waiting.values().map(|waiting| waiting.id))
    }

    /// Whether these two wait in one line.
    pub(crate) fn are_in_one_line(&self, one: Uuid, other: Uuid) -> bool {
        let line = |id| self.places.get(&id).map(|(line, _)| *line);
        line(one).is_some_and(|of_one| line(other) == Some(of_one))
    }

    /// What those of each line ask for, how many they are, and since when the oldest waits. Each of several that are asked for at once
    /// counts by itself.
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

    /// Of the first `count` in the line of one, those that were told other reasons.
    pub(crate) fn untold(&self, id: Uuid, reasons: &[String], count: usize) -> Vec<Uuid> {
        let line = self.places.get(&id).and_then(|(line, _)| self.lines.get(line));
        let first = line.into_iter().flat_map(|line| line.waiting.values().take(count));
        first.filter(|waiting| *waiting.told != *reasons).map(|waiting| waiting.id).collect()
    }

    /// Somebody was told why it waits.
    pub(crate) fn tell(&mut self, id: Uuid, reasons: &Arc<[String]>) {
        let Some((line, position)) = self.places.get(&id) else { return };
        let line = self.lines.get_mut(line).and_then(|line| line.waiting.get_mut(position));
        if let Some(waiting) = line {
            waiting.told = reasons.clone();
        }
    }

    /// The sequence of who came last, of those that wait.
    pub(crate) fn newest(&self) -> Option<Uuid> {
        self.places.values().map(|(_, (_, sequence))| *sequence).max()
    }
}

fn key(demand: &Demand, group: Option<Uuid>) -> LineKey {
    let failed_on = demand.failed_on.iter().map(|failed| failed.worker);
    (demand.shape.clone(), demand.only, demand.avoid.iter().copied().chain(failed_on).collect(), group)
}

/// Asks those that wait in their turn.
#[derive(Debug)]
pub(crate) struct Round {
    heads: BinaryHeap<Reverse<(Rank, usize, Position)>>,
    now: Timestamp,
}

impl Round {
    /// Whose turn it is. Whoever found a worker is told by [`Round::placed`]; a line whose first found none is not asked again.
    pub(crate) fn next(&mut self, queue: &Queue) -> Option<Turn> {
        while let Some(Reverse((rank, number, position))) = self.heads.pop() {
            let Some(waiting) = queue.lines.get(&number).and_then(|line| line.waiting.get(&position)) else {
                continue;
            };
            // Its team may hold more than when the round began.
            let present = queue.rank(waiting, self.now);
            if present > rank && self.heads.peek().is_some_and(|Reverse((next, ..))| *next < present) {
                self.heads.push(Reverse((present, number, position)));
                continue;
            }
            return Some(Turn { waiting: waiting.clone(), line: number, position });
        }
        None
    }

    /// The one whose turn it was found a worker: the one behind it is next in its line.
    pub(crate) fn placed(&mut self, queue: &Queue, turn: &Turn) {
        let Some(line) = queue.lines.get(&turn.line) else { return };
        let behind = (std::ops::Bound::Excluded(turn.position), std::ops::Bound::Unbounded);
        if let Some((position, waiting)) = line.waiting.range(behind).next() {
            self.heads.push(Reverse((queue.rank(waiting, self.now), turn.line, *position)));
        }
    }
}

/// Somebody whose turn it is.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    pub(crate) waiting: Waiting,
    line: usize,
    position: Position,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Purpose, Resources};

    fn waiting(team: &str, platform: &str, priority: i64, since: i64) -> Waiting {
        let shape = Shape {
            team: team.to_owned(),
            platform: platform.to_owned(),
            tags: vec![],
            process: None,
            requests: Resources::default(),
            purpose: Purpose::Build,
        };
        let id = Uuid::now_v7();
        Waiting {
            id,
            is_elsewhere: false,
            others: vec![],
            sequence: Uuid::now_v7(),
            priority,
            since: Timestamp(since),
            demand: Arc::new(shape.asked_by(id)),
            locations: Arc::new([]),
            must_start: false,
            told: Arc::new([]),
            traceparent: String::new(),
            spec_bytes: Some(10),
        }
    }

    /// Places as many as `slots` are for a platform, and answers who got them, by team.
    fn place(queue: &mut Queue, slots: &mut HashMap<&str, u32>, now: i64) -> Vec<String> {
        let (mut round, mut got) = (queue.round(Timestamp(now)), Vec::new());
        while let Some(turn) = round.next(queue) {
            let demand = turn.waiting.demand.clone();
            let left = slots.get_mut(demand.shape.platform.as_str()).expect("a platform");
            if *left > 0 {
                *left -= 1;
                round.placed(queue, &turn);
                queue.took(&demand.shape.team);
                queue.remove(turn.waiting.id);
                got.push(demand.shape.team.clone());
            }
        }
        got
    }

    #[test]
    fn teams_take_turns_by_their_weights() {
        let mut queue = Queue::new(Duration::from_secs(600), HashMap::from([("heavy".to_owned(), 3)]));
        (0..100).for_each(|_| queue.put(waiting("light", "linux", 0, 0)));
        (0..100).for_each(|_| queue.put(waiting("heavy", "linux", 0, 0)));
        let got = place(&mut queue, &mut HashMap::from([("linux", 40)]), 0);
        assert_eq!(got.iter().filter(|team| *team == "heavy").count(), 30, "{got:?}");
        assert_eq!(queue.len(), 160);
        // Who holds little catches up, even with one that holds as many as it gave back.
        queue.hold(HashMap::from([("light".to_owned(), 1), ("heavy".to_owned(), 30)]));
        let got = place(&mut queue, &mut HashMap::from([("linux", 9)]), 0);
        assert_eq!(got, vec!["light".to_owned(); 9]);
    }

    #[test]
    fn priority_is_first_and_waiting_raises_it() {
        let mut queue = Queue::new(Duration::from_secs(60), HashMap::new());
        let old = waiting("a", "linux", 0, 0);
        queue.put(old.clone());
        (0..3).for_each(|_| queue.put(waiting("b", "linux", 2, 100_000_000)));
        assert_eq!(place(&mut queue, &mut HashMap::from([("linux", 1)]), 100_000_000), ["b"]);
        assert_eq!(queue.ahead(0, Timestamp(0), old.sequence), 2);
        // After three minutes it counts as of priority 3.
        assert_eq!(place(&mut queue, &mut HashMap::from([("linux", 2)]), 180_000_000), ["a", "b"]);
        assert!(!queue.contains(old.id));
    }

    #[test]
    fn load_of_team_counts_its_workloads_that_wait() {
        let mut queue = Queue::new(Duration::ZERO, HashMap::new());
        let (one, other) = (waiting("a", "linux", 0, 0), waiting("b", "linux", 0, 0));
        let call = Waiting { spec_bytes: None, ..waiting("a", "linux", 0, 0) };
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
    fn what_is_asked_for_at_once_is_told_one_by_one() {
        let mut queue = Queue::new(Duration::ZERO, HashMap::new());
        let [first, second, third] = ["linux", "darwin", "linux"].map(|of| waiting("a", of, 0, 7).demand);
        queue.put(Waiting {
            demand: first.clone(),
            others: vec![second.clone(), third.clone()],
            ..waiting("a", "linux", 0, 7)
        });
        (0..2).for_each(|_| queue.put(waiting("a", "linux", 0, 5)));
        let told = queue.demand().map(|(demand, count, oldest)| (&*demand.shape.platform, count, oldest.0));
        assert_eq!(
            told.collect::<Vec<_>>(),
            [("linux", 1, 7), ("darwin", 1, 7), ("linux", 1, 7), ("linux", 2, 5)]
        );
        assert_eq!(queue.len(), 3, "it has one turn");
    }

    #[test]
    fn a_line_that_finds_nothing_holds_nobody_else_up() {
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
