//! The workers, so that one of the best is found without a look at each.
//!
//! Workers that differ in nothing but their load are a *class*. What speaks against a class is judged once for each shape of demand,
//! and remembered. In its class a worker lies in a *line*: among those that have room, or among those that are full, sorted by what the
//! strategies count, those that are equal by id. So who asks gets the head of the cheapest line, or whoever of several that are equally
//! good the lot falls on, and what many hold in common costs nothing. Only where bytes are differs from one demand to the next: those that
//! hold some of them are looked at one by one, and all others are equal in that.
//!
//! Invariant: every worker is in exactly one class, and there in one line of every chain. [`Index::put`] and [`Index::load`] keep it.

mod assumed;
mod bucket;
pub(super) mod explain;
pub(super) mod reservations;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::sync::Arc;

use domain::worker::{Incarnation, Labels};
use domain::{Timestamp, WorkerId};
use uuid::Uuid;

use self::bucket::Line;
use super::feasibility::{has_room, of_class, of_load, of_place};
use super::scoring::Cost;
use super::throughput::Turnover;
use super::{Chain, Chains, Demand, Load, Location, Refusal, Refusals, Shape, Strategy, Trust, Worker};

use crate::placement::{Desired, State};

/// No worker has registered yet.
const NOBODY: &str = "NOBODY";

/// No worker that is known could ever take it.
const NEVER: &str = "NEVER";

/// Everything that [`Index::waits_for`] answers.
pub(crate) const WAITS_FOR: [&str; 14] = [
    PENDING,
    NOBODY,
    NEVER,
    "JUST_LOST",
    "GONE",
    "CORDONED",
    "STALLED",
    "QUARANTINED",
    "TEAM_KEEPS_TO_ITS_OWN",
    "RESERVED",
    "FULL",
    "FULL_OF_CONTAINERS",
    "FULL_OF_VOLUMES",
    "SHORT",
];

/// A worker would take it.
const PENDING: &str = "PENDING";

/// How many shapes of demand are remembered with what was judged for them.
const REMEMBERED: usize = 4096;

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// This one.
    Placed(Placement),
    /// Everyone that could is busy or out of contact, or nobody has registered yet.
    NotNow,
    /// No worker that is known could ever.
    Never,
}

/// A worker was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    /// Why it and no other, for people.
    pub(crate) reason: String,
    /// What made the difference.
    pub(crate) decided_by: DecidedBy,
}

/// What made the difference between the worker that was chosen and the next best.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecidedBy {
    /// No other would do.
    Only,
    /// It was asked for.
    AskedFor,
    /// It was preferred.
    Preference,
    /// Others were not heard since the scheduler started.
    Contact,
    /// The first strategy that compares them differently.
    Strategy(Strategy),
    /// Nothing: they are all equal.
    Lot,
}

impl DecidedBy {
    /// All that there are.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let strategies = Strategy::all().filter(|strategy| *strategy != Strategy::Random);
        let others = [Self::Only, Self::AskedFor, Self::Preference, Self::Contact, Self::Lot];
        others.into_iter().chain(strategies.map(Self::Strategy))
    }

    /// For programs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::AskedFor => "asked-for",
            Self::Preference => "preference",
            Self::Contact => "contact",
            Self::Strategy(strategy) => strategy.name(),
            Self::Lot => "lot",
        }
    }

    /// `next`: the best of those that are not as good. `equal`: how many are as good.
    fn of(chain: &Chain, best: Score, next: Option<Score>, equal: usize) -> Self {
        let Some(next) = next else { return if equal > 1 { Self::Lot } else { Self::Only } };
        if best.0 != next.0 {
            return Self::Contact;
        }
        if best.1 != next.1 {
            return Self::Preference;
        }
        chain.difference(best.2, next.2).map_or(Self::Lot, Self::Strategy)
    }
}

/// All workers that are known.
#[derive(Debug)]
pub(crate) struct Index {
    chains: Chains,
    /// Teams that never use workers for all while they have some of their own.
    keep_to_their_own: BTreeSet<String>,
    places: Vec<Option<Place>>,
    free: Vec<usize>,
    /// For whom workers are reserved that may be among these.
    reserved: BTreeMap<WorkerId, Uuid>,
    by_id: HashMap<WorkerId, usize>,
    /// How many of them have gone, and are remembered for a while.
    gone: usize,
    /// What is planned for workers, and not in their rows yet.
    planned: HashMap<WorkerId, Load>,
    classes: Vec<Class>,
    by_key: HashMap<Key, usize>,
    unused: Vec<usize>,
    judged: HashMap<Arc<Shape>, Arc<Judged>>,
    /// Counts what workers, and what is on them, changed.
    changes: u64,
    /// What all say to a shape, after so many changes.
    refusals: HashMap<Arc<Shape>, (u64, Refusals)>,
}

#[derive(Debug)]
struct Place {
    /// With what is planned for it.
    worker: Worker,
    /// What is on it without that, as its row said last.
    seen: Load,
    class: usize,
    /// `None`: nobody said when what was seen.
    turnover: Option<Turnover>,
}

/// All that a class has in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    labels: Arc<Labels>,
    desired: Desired,
    state: State,
    awaited: bool,
    just_lost: bool,
    gone: bool,
    unsupported_versions: Vec<u32>,
    trust: Trust,
}

#[derive(Debug)]
struct Class {
    key: Key,
    /// One of them, or who was the last.
    like: Worker,
    count: usize,
    with_room: usize,
    /// One for each chain.
    lines: [Lines; 3],
}

/// Workers by what they cost, and by id where that is equal.
#[derive(Debug, Default)]
struct Lines {
    with_room: BTreeMap<Cost, Line>,
    full: BTreeMap<Cost, Line>,
}

impl Lines {
    /// The places of all of them.
    fn places(&self) -> impl Iterator<Item = &usize> {
        self.with_room.values().chain(self.full.values()).flat_map(Line::places)
    }
}

/// What classes say to a shape.
#[derive(Debug, Default)]
struct Judged {
    /// That would do: those that are the team's alone, and those that are for all.
    own: Vec<usize>,
    global: Vec<usize>,
    /// That would do some other time.
    passing: Vec<usize>,
    /// Whether the team has workers of its own that would do, now or some other time, and keeps to them.
    keeps_to_its_own: bool,
}

/// So many that are equally good are each looked at.
const FEW: usize = 16;
/// How often one of more is drawn before each of them is looked at.
const LOTS: u64 = 32;

/// How good a worker is. Lower is better.
type Score = (bool, bool, Cost);

/// A worker that would do, and those that are as good.
struct Best {
    score: Score,
    place: usize,
    /// Of more than [`FEW`], some may be among them that would not do.
    equal: usize,
    /// In what it is better than the next best that is not as good.
    decided_by: DecidedBy,
}

impl Index {
    pub(crate) fn new(chains: Chains, keep_to_their_own: BTreeSet<String>) -> Self {
        Self {
            chains,
            keep_to_their_own,
            places: Vec::new(),
            free: Vec::new(),
            reserved: BTreeMap::new(),
            by_id: HashMap::new(),
            gone: 0,
            planned: HashMap::new(),
            classes: Vec::new(),
            by_key: HashMap::new(),
            unused: Vec::new(),
            judged: HashMap::new(),
            changes: 0,
            refusals: HashMap::new(),
        }
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Worker> {
        self.by_id.get(&id).and_then(|place| self.worker(*place))
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.places.iter().flatten().map(|place| &place.worker)
    }

    /// Each worker, with since when none of its slots was taken, as far as was seen. `None`: one is, or nobody looked.
    pub(crate) fn workers_and_idleness(&self) -> impl Iterator<Item = (&Worker, Option<Timestamp>)> {
        self.places.iter().flatten().map(|Place { worker, turnover, .. }| {
            (worker, turnover.filter(|_| worker.load.tasks == 0).map(Turnover::at))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// How many of them there are still.
    fn there(&self) -> usize {
        self.len().saturating_sub(self.gone)
    }

    /// The same, as was read `now`. `ended_tasks`: how many slots came free there so far.
    pub(crate) fn observe(&mut self, worker: Worker, ended_tasks: u64, now: Timestamp) {
        let (id, tasks, before) = (worker.id, worker.load.tasks, self.seen(worker.id).tasks);
        let known = self.by_id.get(&id).and_then(|place| self.places[*place].as_ref());
        let turnover = match known.and_then(|known| known.turnover) {
            Some(turnover) => turnover.observed(before, tasks, ended_tasks, now),
            None => Turnover::new(ended_tasks, now),
        };
        self.put(worker);
        if let Some(place) = self.by_id.get(&id).and_then(|place| self.places[*place].as_mut()) {
            place.turnover = Some(turnover);
        }
    }

    /// This is how a worker is from now on, but for what is planned for it.
    pub(crate) fn put(&mut self, worker: Worker) {
        let reserved_for = self.reserved.get(&worker.id).copied();
        let (seen, load) = (worker.load, self.with_planned(worker.id, worker.load));
        let worker = Worker { reserved_for, load, ..worker };
        let (known, mut turnover) = (self.by_id.get(&worker.id).copied(), None);
        if let Some(place) = known {
            if self.worker(place).is_some_and(|known| known.is_as(&worker)) {
                return self.load(worker.id, seen);
            }
            self.take_out(place);
            if let Some(was) = self.places[place].take() {
                turnover = was.turnover;
                self.left(was.class);
            }
        }
        let place = known.or_else(|| self.free.pop()).unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.by_id.insert(worker.id, place);
        let class = self.class_of(&worker);
        self.places[place] = Some(Place { worker, seen, class, turnover });
        self.put_in(place);
    }

    /// This is what is on a worker from now on, but for what is planned for it. Does nothing where it is not known.
    pub(crate) fn load(&mut self, id: WorkerId, seen: Load) {
        let Some(at) = self.by_id.get(&id).copied() else { return };
        let load = self.with_planned(id, seen);
        let Some(place) = &mut self.places[at] else { return };
        place.seen = seen;
        if place.worker.load == load {
            return;
        }
        self.take_out(at);
        if let Some(place) = &mut self.places[at] {
            place.worker.load = load;
        }
        self.put_in(at);
    }

    /// A worker is not known any more.
    pub(crate) fn remove(&mut self, id: WorkerId) {
        let Some(place) = self.by_id.remove(&id) else { return };
        self.take_out(place);
        if let Some(Place { class, .. }) = self.places[place].take() {
            self.left(class);
        }
        self.free.push(place);
    }

    fn worker(&self, place: usize) -> Option<&Worker> {
        self.places[place].as_ref().map(|place| &place.worker)
    }

    fn class_of(&mut self, worker: &Worker) -> usize {
        let key = Key {
            labels: worker.labels.clone(),
            desired: worker.desired,
            state: worker.state,
            awaited: worker.awaited,
            just_lost: worker.just_lost,
            gone: worker.gone,
            unsupported_versions: worker.unsupported_versions.clone(),
            trust: worker.trust.clone(),
        };
        if let Some(class) = self.by_key.get(&key) {
            return *class;
        }
        self.judged.clear();
        let fresh = Class {
            key: key.clone(),
            like: worker.clone(),
            count: 0,
            with_room: 0,
            lines: Default::default(),
        };
        let class = match self.unused.pop() {
            Some(class) => {
                self.classes[class] = fresh;
                class
            }
            None => {
                self.classes.push(fresh);
                self.classes.len() - 1
            }
        };
        self.by_key.insert(key, class);
        class
    }

    fn put_in(&mut self, place: usize) {
        self.change_lines(place, true);
    }

    fn take_out(&mut self, place: usize) {
        self.change_lines(place, false);
    }

    fn change_lines(&mut self, place: usize, put: bool) {
        self.changes += 1;
        let Self { places, classes, chains, gone, .. } = self;
        let Some(Place { worker, class, .. }) = &places[place] else { return };
        let has_room = has_room(worker);
        let class = &mut classes[*class];
        for (lines, chain) in class.lines.iter_mut().zip(chains.all()) {
            let lines = if has_room { &mut lines.with_room } else { &mut lines.full };
            let cost = chain.cost(&worker.load, 0);
            let line = lines.entry(cost).or_default();
            if put {
                line.put(worker.id, place);
            } else {
                line.take(worker.id);
            }
            if line.is_empty() {
                lines.remove(&cost);
            }
        }
        let change = |count: &mut usize| *count = if put { *count + 1 } else { count.saturating_sub(1) };
        change(&mut class.count);
        if worker.gone {
            change(gone);
        }
        if has_room {
            change(&mut class.with_room);
        }
    }

    /// A worker has left this class for good.
    fn left(&mut self, class: usize) {
        if self.classes[class].count == 0 {
            self.by_key.remove(&self.classes[class].key);
            self.unused.push(class);
            self.judged.clear();
        }
    }

    fn judged(&mut self, shape: &Arc<Shape>) -> Arc<Judged> {
        if let Some(judged) = self.judged.get(&**shape) {
            return judged.clone();
        }
        let (mut judged, mut has_its_own) = (Judged::default(), false);
        for (number, class) in self.classes.iter().enumerate().filter(|(_, class)| class.count > 0) {
            let refusals = of_class(shape, &class.like);
            if !refusals.iter().all(Refusal::passes) {
                continue;
            }
            let is_its_own = class.like.labels.team.is_some();
            has_its_own |= is_its_own;
            match (refusals.is_empty(), is_its_own) {
                (false, _) => judged.passing.push(number),
                (true, true) => judged.own.push(number),
                (true, false) => judged.global.push(number),
            }
        }
        judged.keeps_to_its_own = has_its_own && self.keep_to_their_own.contains(&shape.team);
        let judged = Arc::new(judged);
        if self.judged.len() >= REMEMBERED {
            self.judged.clear();
        }
        self.judged.insert(shape.clone(), judged.clone());
        judged
    }

    /// Picks the worker that `demand` gets, whose inputs are at `locations`.
    pub(crate) fn choose(&mut self, demand: &Demand, locations: &[Location]) -> Choice {
        let judged = self.judged(&demand.shape);
        let global: &[usize] = if judged.keeps_to_its_own { &[] } else { &judged.global };
        for classes in [&*judged.own, global] {
            if let Some(best) = self.best(demand, locations, classes)
                && let Some(worker) = self.worker(best.place)
            {
                let willing = classes.iter().map(|class| self.classes[*class].with_room).sum();
                let reason = self.reason(demand, &best, willing);
                let Worker { id, incarnation, .. } = *worker;
                let decided_by = if demand.only.is_some() { DecidedBy::AskedFor } else { best.decided_by };
                return Choice::Placed(Placement { worker: id, incarnation, reason, decided_by });
            }
        }
        if self.is_hopeless(demand) { Choice::Never } else { Choice::NotNow }
    }

    /// Whether no worker that is known could ever take `demand`. One that its team does not use cannot.
    pub(crate) fn is_hopeless(&mut self, demand: &Demand) -> bool {
        let judged = self.judged(&demand.shape);
        let classes = judged.own.iter().chain(&judged.global).chain(&judged.passing);
        let mut could = classes.flat_map(|class| self.members(*class)).filter(|worker| {
            let by_load = of_load(&demand.shape, worker);
            let is_kept_out = keeps_out(worker, judged.keeps_to_its_own).is_some();
            !is_kept_out && of_place(demand, worker).chain(by_load).all(|refusal| refusal.passes())
        });
        !self.by_id.is_empty() && could.next().is_none()
    }

    /// Whether the team of `demand` uses none but its own workers.
    pub(crate) fn keeps_to_its_own(&mut self, demand: &Demand) -> bool {
        self.judged(&demand.shape).keeps_to_its_own
    }

    /// Why nobody, or not everybody, would do.
    pub(crate) fn refusals(&mut self, demand: &Demand) -> Refusals {
        // Many ask alike while nothing changes.
        let is_alike = demand.only.is_none() && demand.avoid.is_empty() && demand.failed_on.is_empty();
        let has_its_own = self.reserved.values().any(|whom| *whom == demand.waits_as);
        if !is_alike || has_its_own {
            return self.refusals_now(demand);
        }
        if let Some((changes, refusals)) = self.refusals.get(&*demand.shape)
            && *changes == self.changes
        {
            return refusals.clone();
        }
        let refusals = self.refusals_now(demand);
        if self.refusals.len() >= REMEMBERED {
            self.refusals.clear();
        }
        self.refusals.insert(demand.shape.clone(), (self.changes, refusals.clone()));
        refusals
    }

    fn refusals_now(&mut self, demand: &Demand) -> Refusals {
        let judged = self.judged(&demand.shape);
        let mut refusals = Refusals::default();
        for class in self.classes.iter().filter(|class| class.count > 0) {
            let of_class = of_class(&demand.shape, &class.like).into_iter().min_by_key(Refusal::passes);
            let members = class.lines[0].places().filter_map(|place| self.worker(*place));
            let of_class = match of_class {
                Some(lasting) if !lasting.passes() => {
                    refusals.add(lasting, class.count, || members.map(|worker| worker.name.clone()));
                    continue;
                }
                passing => passing,
            };
            for worker in members {
                let first = first_refusal(demand, worker, of_class.as_ref(), judged.keeps_to_its_own);
                if let Some(refusal) = first {
                    refusals.add(refusal, 1, || std::iter::once(worker.name.clone()));
                }
            }
        }
        refusals.sorted()
    }

    /// Why the first of those that could take `demand` does not, as a code: `PENDING` where one would, `NOBODY` where no worker has
    /// registered yet, and `NEVER` where none that is known could.
    pub(crate) fn waits_for(&mut self, demand: &Demand) -> &'static str {
        let judged = self.judged(&demand.shape);
        if judged.keeps_to_its_own && self.is_hopeless(demand) {
            return NEVER;
        }
        let by_load = judged.own.iter().chain(&judged.global).flat_map(|class| {
            let is_for_all = |worker: &&Worker| worker.reserved_for.is_none();
            self.members(*class).find(is_for_all).or_else(|| self.members(*class).next())
        });
        let mut codes = by_load.filter_map(|worker| {
            let first = first_refusal(demand, worker, None, judged.keeps_to_its_own);
            first.map_or(Some(PENDING), |refusal| refusal.passes().then(|| refusal.code()))
        });
        let by_class = judged.passing.iter().filter_map(|class| {
            of_class(&demand.shape, &self.classes[*class].like).first().map(Refusal::code)
        });
        let nobody = if self.by_id.is_empty() { NOBODY } else { NEVER };
        codes.next().or_else(|| by_class.min()).unwrap_or(nobody)
    }

    fn members(&self, class: usize) -> impl Iterator<Item = &Worker> {
        self.classes[class].lines[0].places().filter_map(|place| self.worker(*place))
    }

    /// The best of `classes`.
    fn best(&self, demand: &Demand, locations: &[Location], classes: &[usize]) -> Option<Best> {
        let chain = self.chains.of(demand.shape.purpose);
        let locations = if chain.is_by_locality() { locations } else { &[] };
        let named = self.named(demand, locations, classes);
        let scores: Vec<_> = named
            .iter()
            .filter_map(|place| Some((self.score(demand, chain, locations, *place)?, *place)))
            .collect();
        let least = scores.iter().map(|(score, _)| *score).min();
        let singled_out = least.map(|least| {
            let equal: Vec<_> =
                scores.iter().filter(|(score, _)| *score == least).map(|(_, place)| *place).collect();
            let drawn = draw(demand.asked_by, 0, equal.len());
            let next = scores.iter().map(|(score, _)| *score).filter(|score| *score != least).min();
            let decided_by = DecidedBy::of(chain, least, next, equal.len());
            Best { score: least, place: equal[drawn], equal: equal.len(), decided_by }
        });
        if demand.only.is_some() {
            return singled_out;
        }
        let rest = self.cheapest(demand, chain, locations, classes, &named);
        match (singled_out, rest) {
            (Some(one), Some(rest)) if one.score == rest.score => {
                let equal = one.equal + rest.equal;
                let is_one = draw(demand.asked_by, 1, equal) < one.equal;
                Some(Best { equal, ..if is_one { one } else { rest } })
            }
            (Some(one), Some(rest)) => {
                let (better, worse) = if one.score < rest.score { (one, rest) } else { (rest, one) };
                let decided_by = DecidedBy::of(chain, better.score, Some(worse.score), better.equal);
                Some(Best { decided_by, ..better })
            }
            (one, rest) => one.or(rest),
        }
    }

    /// Those of `classes` that are looked at one by one, by id: who holds some of the bytes, and who is asked for.
    fn named(&self, demand: &Demand, locations: &[Location], classes: &[usize]) -> Vec<usize> {
        let holders = locations.iter().flat_map(|location| &location.workers);
        let ids: BTreeSet<_> = holders.chain(&demand.prefer).chain(&demand.only).collect();
        let places = ids.into_iter().filter_map(|id| self.by_id.get(id).copied());
        let of_these =
            |place: &usize| self.places[*place].as_ref().is_some_and(|place| classes.contains(&place.class));
        places.filter(of_these).collect()
    }

    /// How good one worker of a class that would do is. `None`: it would not.
    fn score(&self, demand: &Demand, chain: &Chain, locations: &[Location], place: usize) -> Option<Score> {
        let worker = self.worker(place)?;
        if of_place(demand, worker).next().is_some() || !of_load(&demand.shape, worker).is_empty() {
            return None;
        }
        let elsewhere = locations.iter().filter(|location| !location.workers.contains(&worker.id));
        let cost = chain.cost(&worker.load, bytes(elsewhere));
        Some((worker.awaited, !demand.prefer.contains(&worker.id), cost))
    }

    /// The best of those that hold nothing.
    fn cheapest(
        &self,
        demand: &Demand,
        chain: &Chain,
        locations: &[Location],
        classes: &[usize],
        named: &[usize],
    ) -> Option<Best> {
        let number = demand.shape.purpose as usize;
        let lines = || {
            classes.iter().map(|class| &self.classes[*class]).flat_map(|class| {
                let lines = &class.lines[number];
                let full = demand.shape.process.is_none().then_some(&lines.full);
                [Some(&lines.with_room), full].into_iter().flatten().map(|lines| (class.key.awaited, lines))
            })
        };
        let mut passed: Option<(bool, Cost)> = None;
        loop {
            let next = lines().filter_map(|(awaited, lines)| {
                let from = match passed {
                    Some((true, _)) if !awaited => return None,
                    Some((before, cost)) if before == awaited => Bound::Excluded(cost),
                    _ => Bound::Unbounded,
                };
                lines.range((from, Bound::Unbounded)).next().map(|(cost, _)| (awaited, *cost))
            });
            let (awaited, cost) = next.min()?;
            let equal = lines().filter(|(of, _)| *of == awaited);
            let mut equal: Vec<_> = equal.filter_map(|(_, lines)| lines.get(&cost)).collect();
            // Classes have no order of their own.
            equal.sort_by_key(|line| line.first());
            if let Some((place, equal)) = self.drawn(demand, &equal, named) {
                let behind = lines().filter_map(|(of, lines)| {
                    let from = match of == awaited {
                        true => Bound::Excluded(&cost),
                        false if of => Bound::Unbounded,
                        false => return None,
                    };
                    lines.range((from, Bound::Unbounded)).next().map(|(next, _)| (of, true, *next))
                });
                let decided_by = DecidedBy::of(chain, (awaited, true, cost), behind.min(), equal);
                let cost = chain.cost(&self.worker(place)?.load, bytes(locations.iter()));
                return Some(Best { score: (awaited, true, cost), place, equal, decided_by });
            }
            passed = Some((awaited, cost));
        }
    }

    /// One of those in `lines` that would do and are none of `named`, each as likely as any other, and how many those are.
    fn drawn(&self, demand: &Demand, lines: &[&Line], named: &[usize]) -> Option<(usize, usize)> {
        let places = || lines.iter().flat_map(|line| line.places()).copied();
        let would_do = |place: &usize| {
            let worker = self.worker(*place).filter(|_| !named.contains(place));
            worker.is_some_and(|worker| {
                of_place(demand, worker).next().is_none() && of_load(&demand.shape, worker).is_empty()
            })
        };
        let count = lines.iter().map(|line| line.len()).sum();
        // Most would do: who would not is drawn in vain, and so changes nothing for the others. Few are looked at one by one.
        if count > FEW {
            let nth = |mut number: usize| {
                lines.iter().find_map(|line| {
                    let here = line.nth(number);
                    number = number.saturating_sub(line.len());
                    here
                })
            };
            let lots = (2..2 + LOTS).map(|lot| nth(draw(demand.asked_by, lot, count)));
            if let Some(place) = lots.flatten().find(would_do) {
                return Some((place, count));
            }
        }
        let willing: Vec<_> = places().filter(would_do).collect();
        let place = willing.get(draw(demand.asked_by, 0, willing.len()))?;
        Some((*place, willing.len()))
    }

    /// Why the `best` and no other of those that are `willing`.
    fn reason(&self, demand: &Demand, best: &Best, willing: usize) -> String {
        let score = self.words(demand, best.score);
        match (best.equal, willing, self.there()) {
            (_, _, 1) => "it is the only worker".to_owned(),
            _ if demand.only.is_some() => "it is the worker that was asked for".to_owned(),
            (_, 1, all) => format!("the only one of {all} workers that can take it now: {score}"),
            (1, ..) => format!("best of {willing} workers that can take it now: {score}"),
            (equal, ..) => format!("drawn from {equal} workers that are equally good: {score}"),
        }
    }

    fn words(&self, demand: &Demand, (awaited, not_preferred, cost): Score) -> String {
        let words = self.chains.of(demand.shape.purpose).words(cost);
        let awaited = if awaited { "awaited since the scheduler started, " } else { "" };
        let preferred = if not_preferred { "" } else { "preferred, " };
        format!("{awaited}{preferred}{words}")
    }
}

fn keeps_out(worker: &Worker, keeps_to_its_own: bool) -> Option<Refusal> {
    (keeps_to_its_own && worker.labels.team.is_none()).then_some(Refusal::TeamKeepsToItsOwn)
}

/// What [`super::refusals`] says first of a worker, or that its team keeps to its own. `of_class`: what speaks against all of its class, and passes.
fn first_refusal(
    demand: &Demand,
    worker: &Worker,
    of_class: Option<&Refusal>,
    keeps_to_its_own: bool,
) -> Option<Refusal> {
    let others = of_place(demand, worker).chain(of_load(&demand.shape, worker));
    let first = of_class.cloned().into_iter().chain(others).min_by_key(Refusal::order);
    first.or_else(|| keeps_out(worker, keeps_to_its_own))
}

fn bytes<'l>(locations: impl Iterator<Item = &'l Location>) -> u64 {
    locations.map(|location| location.size_bytes).fold(0, u64::saturating_add)
}

/// One of `count`, evenly over those who ask, and the same whenever one asks again. `again`: tells several lots of one who asks apart.
fn draw(asked_by: Uuid, again: u64, count: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    (asked_by, again).hash(&mut hasher);
    let lot = u128::from(hasher.finish()) * count as u128;
    usize::try_from(lot >> 64).unwrap_or(0)
}
