//! The index of workers, which finds a best worker without checking each one.
//!
//! Workers that differ only in load form a *class*. The refusals of a class are computed once for
//! each shape of demand, and cached. Within a class, workers are sorted by cost in *lines*,
//! separately for workers with and without room. Equal workers share a line, sorted by id. A demand
//! gets a worker of the cheapest line, drawn at random if several are equal. The location of bytes
//! differs between demands: workers that hold some of the inputs are scored individually, and all
//! others are equal in that respect.
//!
//! Invariant: every worker is in exactly one class, and there in one line of each chain.
//! [`Index::put`] and [`Index::load`] maintain it.

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
const NO_WORKER: &str = "NO_WORKER";

/// No known worker could ever take the demand.
const NEVER: &str = "NEVER";

/// All codes that [`Index::waits_for`] returns.
pub(crate) const WAITS_FOR: [&str; 15] = [
    PENDING,
    NO_WORKER,
    NEVER,
    "JUST_LOST",
    "GONE",
    "CORDONED",
    "STALLED",
    "QUARANTINED",
    "TEAM_KEEPS_TO_ITS_OWN",
    "RESERVED",
    "DISK_PRESSURE",
    "FULL",
    "FULL_OF_CONTAINERS",
    "FULL_OF_VOLUMES",
    "SHORT",
];

/// A worker would take the demand.
const PENDING: &str = "PENDING";

/// Maximum number of shapes of demand with cached results.
const MAX_CACHED_SHAPES: usize = 4096;

/// The result of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// A worker was chosen.
    Placed(Placement),
    /// All workers that could take the demand are busy or out of contact, or no worker has
    /// registered yet.
    NotNow,
    /// No known worker could ever take the demand.
    Never,
}

/// A chosen worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    /// Reason why this worker was chosen, for people.
    pub(crate) reason: String,
    /// Criterion that ranked the worker above the next one.
    pub(crate) decided_by: DecidedBy,
}

/// Criterion that ranked the chosen worker above the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecidedBy {
    /// No other worker was feasible.
    Only,
    /// The request named the worker.
    Requested,
    /// The request preferred the worker.
    Preference,
    /// Other workers were not in contact since the scheduler started.
    Contact,
    /// The first strategy with a difference.
    Strategy(Strategy),
    /// No difference: the worker was drawn at random.
    Lot,
}

impl DecidedBy {
    /// Returns all values.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let strategies = Strategy::all().filter(|strategy| *strategy != Strategy::Random);
        let others = [Self::Only, Self::Requested, Self::Preference, Self::Contact, Self::Lot];
        others.into_iter().chain(strategies.map(Self::Strategy))
    }

    /// Returns the label value of metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Requested => "asked-for",
            Self::Preference => "preference",
            Self::Contact => "contact",
            Self::Strategy(strategy) => strategy.name(),
            Self::Lot => "lot",
        }
    }

    /// Compares the best score with the next one. `next`: the best lower score. `equal`: the number
    /// of workers with the best score.
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

/// All known workers.
#[derive(Debug)]
pub(crate) struct Index {
    chains: Chains,
    /// Teams that use only their own workers while they have some.
    exclusive_teams: BTreeSet<String>,
    places: Vec<Option<Place>>,
    free: Vec<usize>,
    /// Reserved workers, which need not be in the index, with their requests.
    reserved: BTreeMap<WorkerId, Uuid>,
    by_id: HashMap<WorkerId, usize>,
    /// Number of removed workers that still count as ones that may return.
    gone: usize,
    /// Planned load that is not in the rows yet.
    planned: HashMap<WorkerId, Load>,
    classes: Vec<Class>,
    by_key: HashMap<Key, usize>,
    unused: Vec<usize>,
    verdicts: HashMap<Arc<Shape>, Arc<ClassVerdicts>>,
    /// Counts changes of workers and their load.
    changes: u64,
    /// Cached refusals of a shape, valid for this count of changes.
    refusals: HashMap<Arc<Shape>, (u64, Refusals)>,
}

#[derive(Debug)]
struct Place {
    /// The worker, with planned load.
    worker: Worker,
    /// The load without planned load, as last read.
    seen: Load,
    class: usize,
    /// `None`: the time of the last read is unknown.
    turnover: Option<Turnover>,
}

/// The attributes that the workers of a class share.
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
    /// One of the workers, or the last one.
    like: Worker,
    count: usize,
    with_room: usize,
    /// One for each chain.
    lines: [Lines; 3],
}

/// Workers by cost, and by id for equal costs.
#[derive(Debug, Default)]
struct Lines {
    with_room: BTreeMap<Cost, Line>,
    full: BTreeMap<Cost, Line>,
}

impl Lines {
    /// Returns all places.
    fn places(&self) -> impl Iterator<Item = &usize> {
        self.with_room.values().chain(self.full.values()).flat_map(Line::places)
    }
}

/// The classes that matter to a shape.
#[derive(Debug, Default)]
struct ClassVerdicts {
    /// Feasible classes: those of the team's own workers, and those for all teams.
    own: Vec<usize>,
    global: Vec<usize>,
    /// Classes with only passing refusals.
    passing: Vec<usize>,
    /// Whether the team uses only its own workers: it has some without lasting refusals.
    uses_own_workers_only: bool,
}

/// Maximum number of equal workers that are each checked.
const FEW: usize = 16;
/// Maximum number of draws among more workers before each one is checked.
const MAX_DRAWS: u64 = 32;

/// Score of a worker. Lower is better.
type Score = (bool, bool, Cost);

/// A feasible worker with the best score.
struct Best {
    score: Score,
    place: usize,
    /// Number of workers with this score. Above [`FEW`], the number may include infeasible workers.
    equal: usize,
    /// Criterion that ranks the worker above the next score.
    decided_by: DecidedBy,
}

impl Index {
    pub(crate) fn new(chains: Chains, exclusive_teams: BTreeSet<String>) -> Self {
        Self {
            chains,
            exclusive_teams,
            places: Vec::new(),
            free: Vec::new(),
            reserved: BTreeMap::new(),
            by_id: HashMap::new(),
            gone: 0,
            planned: HashMap::new(),
            classes: Vec::new(),
            by_key: HashMap::new(),
            unused: Vec::new(),
            verdicts: HashMap::new(),
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

    /// Returns each worker with the time since when it is idle. `None`: not idle, or unknown.
    pub(crate) fn workers_and_idleness(&self) -> impl Iterator<Item = (&Worker, Option<Timestamp>)> {
        self.places.iter().flatten().map(|Place { worker, turnover, .. }| {
            (worker, turnover.filter(|_| worker.load.tasks == 0).map(Turnover::at))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Returns the number of workers that were not removed.
    fn registered(&self) -> usize {
        self.len().saturating_sub(self.gone)
    }

    /// Sets a worker as read at `now`. `ended_tasks`: total number of ended leases with a slot.
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

    /// Sets a worker, without its planned load.
    pub(crate) fn put(&mut self, worker: Worker) {
        let reserved_for = self.reserved.get(&worker.id).copied();
        let (seen, load) = (worker.load, self.with_planned(worker.id, worker.load));
        let worker = Worker { reserved_for, load, ..worker };
        let (known, mut turnover) = (self.by_id.get(&worker.id).copied(), None);
        if let Some(place) = known {
            if self.worker(place).is_some_and(|known| known.is_as(&worker)) {
                return self.load(worker.id, seen);
            }
            self.remove_from_lines(place);
            if let Some(was) = self.places[place].take() {
                turnover = was.turnover;
                self.delete_if_empty(was.class);
            }
        }
        let place = known.or_else(|| self.free.pop()).unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.by_id.insert(worker.id, place);
        let class = self.class_of(&worker);
        self.places[place] = Some(Place { worker, seen, class, turnover });
        self.add_to_lines(place);
    }

    /// Sets the load of a worker, without its planned load. Does nothing if the worker is unknown.
    pub(crate) fn load(&mut self, id: WorkerId, seen: Load) {
        let Some(at) = self.by_id.get(&id).copied() else { return };
        let load = self.with_planned(id, seen);
        let Some(place) = &mut self.places[at] else { return };
        place.seen = seen;
        if place.worker.load == load {
            return;
        }
        self.remove_from_lines(at);
        if let Some(place) = &mut self.places[at] {
            place.worker.load = load;
        }
        self.add_to_lines(at);
    }

    /// Removes a worker.
    pub(crate) fn remove(&mut self, id: WorkerId) {
        let Some(place) = self.by_id.remove(&id) else { return };
        self.remove_from_lines(place);
        if let Some(Place { class, .. }) = self.places[place].take() {
            self.delete_if_empty(class);
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
        self.verdicts.clear();
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

    fn add_to_lines(&mut self, place: usize) {
        self.change_lines(place, true);
    }

    fn remove_from_lines(&mut self, place: usize) {
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

    /// Deletes a class without workers.
    fn delete_if_empty(&mut self, class: usize) {
        if self.classes[class].count == 0 {
            self.by_key.remove(&self.classes[class].key);
            self.unused.push(class);
            self.verdicts.clear();
        }
    }

    fn class_verdicts(&mut self, shape: &Arc<Shape>) -> Arc<ClassVerdicts> {
        if let Some(verdicts) = self.verdicts.get(&**shape) {
            return verdicts.clone();
        }
        let (mut verdicts, mut has_its_own) = (ClassVerdicts::default(), false);
        for (number, class) in self.classes.iter().enumerate().filter(|(_, class)| class.count > 0) {
            let refusals = of_class(shape, &class.like);
            if !refusals.iter().all(Refusal::passes) {
                continue;
            }
            let is_its_own = class.like.labels.team.is_some();
            has_its_own |= is_its_own;
            match (refusals.is_empty(), is_its_own) {
                (false, _) => verdicts.passing.push(number),
                (true, true) => verdicts.own.push(number),
                (true, false) => verdicts.global.push(number),
            }
        }
        verdicts.uses_own_workers_only = has_its_own && self.exclusive_teams.contains(&shape.team);
        let verdicts = Arc::new(verdicts);
        if self.verdicts.len() >= MAX_CACHED_SHAPES {
            self.verdicts.clear();
        }
        self.verdicts.insert(shape.clone(), verdicts.clone());
        verdicts
    }

    /// Chooses the worker for `demand`, whose inputs are at `locations`.
    pub(crate) fn choose(&mut self, demand: &Demand, locations: &[Location]) -> Choice {
        let verdicts = self.class_verdicts(&demand.shape);
        let global: &[usize] = if verdicts.uses_own_workers_only { &[] } else { &verdicts.global };
        for classes in [&*verdicts.own, global] {
            if let Some(best) = self.best(demand, locations, classes)
                && let Some(worker) = self.worker(best.place)
            {
                let willing = classes.iter().map(|class| self.classes[*class].with_room).sum();
                let reason = self.reason(demand, &best, willing);
                let Worker { id, incarnation, .. } = *worker;
                let decided_by = if demand.only.is_some() { DecidedBy::Requested } else { best.decided_by };
                return Choice::Placed(Placement { worker: id, incarnation, reason, decided_by });
            }
        }
        if self.is_hopeless(demand) { Choice::Never } else { Choice::NotNow }
    }

    /// Returns whether no known worker could ever take `demand`. Workers that its team does not use
    /// do not count.
    pub(crate) fn is_hopeless(&mut self, demand: &Demand) -> bool {
        let verdicts = self.class_verdicts(&demand.shape);
        let classes = verdicts.own.iter().chain(&verdicts.global).chain(&verdicts.passing);
        let mut could = classes.flat_map(|class| self.members(*class)).filter(|worker| {
            let by_load = of_load(&demand.shape, worker);
            let is_kept_out = team_refusal(worker, verdicts.uses_own_workers_only).is_some();
            !is_kept_out && of_place(demand, worker).chain(by_load).all(|refusal| refusal.passes())
        });
        !self.by_id.is_empty() && could.next().is_none()
    }

    /// Returns whether the team of `demand` uses only its own workers.
    pub(crate) fn uses_own_workers_only(&mut self, demand: &Demand) -> bool {
        self.class_verdicts(&demand.shape).uses_own_workers_only
    }

    /// Returns the refusals of all workers.
    pub(crate) fn refusals(&mut self, demand: &Demand) -> Refusals {
        // Many equal demands are checked between two changes.
        let is_alike = demand.only.is_none() && demand.avoid.is_empty() && demand.failed_on.is_empty();
        let has_its_own = self.reserved.values().any(|request| *request == demand.waits_as);
        if !is_alike || has_its_own {
            return self.refusals_now(demand);
        }
        if let Some((changes, refusals)) = self.refusals.get(&*demand.shape)
            && *changes == self.changes
        {
            return refusals.clone();
        }
        let refusals = self.refusals_now(demand);
        if self.refusals.len() >= MAX_CACHED_SHAPES {
            self.refusals.clear();
        }
        self.refusals.insert(demand.shape.clone(), (self.changes, refusals.clone()));
        refusals
    }

    fn refusals_now(&mut self, demand: &Demand) -> Refusals {
        let verdicts = self.class_verdicts(&demand.shape);
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
                let first = first_refusal(demand, worker, of_class.as_ref(), verdicts.uses_own_workers_only);
                if let Some(refusal) = first {
                    refusals.add(refusal, 1, || std::iter::once(worker.name.clone()));
                }
            }
        }
        refusals.sorted()
    }

    /// Returns the reason code of the first worker that could take `demand`. `PENDING`: a worker
    /// would take it. `NO_WORKER`: no worker has registered yet. `NEVER`: no known worker could
    /// ever take it.
    pub(crate) fn waits_for(&mut self, demand: &Demand) -> &'static str {
        let verdicts = self.class_verdicts(&demand.shape);
        if verdicts.uses_own_workers_only && self.is_hopeless(demand) {
            return NEVER;
        }
        let by_load = verdicts.own.iter().chain(&verdicts.global).flat_map(|class| {
            let is_for_all = |worker: &&Worker| worker.reserved_for.is_none();
            self.members(*class).find(is_for_all).or_else(|| self.members(*class).next())
        });
        let mut codes = by_load.filter_map(|worker| {
            let first = first_refusal(demand, worker, None, verdicts.uses_own_workers_only);
            first.map_or(Some(PENDING), |refusal| refusal.passes().then(|| refusal.code()))
        });
        let by_class = verdicts.passing.iter().filter_map(|class| {
            of_class(&demand.shape, &self.classes[*class].like).first().map(Refusal::code)
        });
        let none = if self.by_id.is_empty() { NO_WORKER } else { NEVER };
        codes.next().or_else(|| by_class.min()).unwrap_or(none)
    }

    fn members(&self, class: usize) -> impl Iterator<Item = &Worker> {
        self.classes[class].lines[0].places().filter_map(|place| self.worker(*place))
    }

    /// Finds the best worker of `classes`.
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
            let drawn = draw(demand.requester, 0, equal.len());
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
                let is_one = draw(demand.requester, 1, equal) < one.equal;
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

    /// Returns the workers of `classes` that are scored individually, by id: those that hold inputs
    /// or that the request names.
    fn named(&self, demand: &Demand, locations: &[Location], classes: &[usize]) -> Vec<usize> {
        let holders = locations.iter().flat_map(|location| &location.workers);
        let only = demand.only.as_ref().map(|only| &only.id);
        let ids: BTreeSet<_> = holders.chain(&demand.prefer).chain(only).collect();
        let places = ids.into_iter().filter_map(|id| self.by_id.get(id).copied());
        let of_these =
            |place: &usize| self.places[*place].as_ref().is_some_and(|place| classes.contains(&place.class));
        places.filter(of_these).collect()
    }

    /// Scores one worker of a feasible class. Returns `None` if the worker refuses.
    fn score(&self, demand: &Demand, chain: &Chain, locations: &[Location], place: usize) -> Option<Score> {
        let worker = self.worker(place)?;
        if of_place(demand, worker).next().is_some() || !of_load(&demand.shape, worker).is_empty() {
            return None;
        }
        let elsewhere = locations.iter().filter(|location| !location.workers.contains(&worker.id));
        let cost = chain.cost(&worker.load, bytes(elsewhere));
        Some((worker.awaited, !demand.prefer.contains(&worker.id), cost))
    }

    /// Finds the best worker that holds no inputs.
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
            // The order of classes is arbitrary, so lines are sorted.
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

    /// Draws a feasible worker from `lines`, except `named`, with equal probability. Returns its
    /// place and the number of candidates.
    fn drawn(&self, demand: &Demand, lines: &[&Line], named: &[usize]) -> Option<(usize, usize)> {
        let places = || lines.iter().flat_map(|line| line.places()).copied();
        let would_do = |place: &usize| {
            let worker = self.worker(*place).filter(|_| !named.contains(place));
            worker.is_some_and(|worker| {
                of_place(demand, worker).next().is_none() && of_load(&demand.shape, worker).is_empty()
            })
        };
        let count = lines.iter().map(|line| line.len()).sum();
        // In a long line, most workers are feasible. Draws are repeated until one is feasible,
        // which keeps the probabilities equal. In a short line, each worker is checked.
        if count > FEW {
            let nth = |mut number: usize| {
                lines.iter().find_map(|line| {
                    let here = line.nth(number);
                    number = number.saturating_sub(line.len());
                    here
                })
            };
            let lots = (2..2 + MAX_DRAWS).map(|lot| nth(draw(demand.requester, lot, count)));
            if let Some(place) = lots.flatten().find(would_do) {
                return Some((place, count));
            }
        }
        let willing: Vec<_> = places().filter(would_do).collect();
        let place = willing.get(draw(demand.requester, 0, willing.len()))?;
        Some((*place, willing.len()))
    }

    /// Describes why the `best` worker was chosen among `willing` feasible ones.
    fn reason(&self, demand: &Demand, best: &Best, willing: usize) -> String {
        let score = self.words(demand, best.score);
        match (best.equal, willing, self.registered()) {
            (_, _, 1) => "the only worker".to_owned(),
            _ if demand.only.is_some() => "the worker that the request names".to_owned(),
            (_, 1, all) => format!("the only one of {all} workers that can take it now: {score}"),
            (1, ..) => format!("best of {willing} workers that can take it now: {score}"),
            (equal, ..) => format!("drawn from {equal} equally good workers: {score}"),
        }
    }

    fn words(&self, demand: &Demand, (awaited, not_preferred, cost): Score) -> String {
        let words = self.chains.of(demand.shape.purpose).words(cost);
        let awaited = if awaited { "not in contact since the scheduler started, " } else { "" };
        let preferred = if not_preferred { "" } else { "preferred, " };
        format!("{awaited}{preferred}{words}")
    }
}

fn team_refusal(worker: &Worker, uses_own_workers_only: bool) -> Option<Refusal> {
    (uses_own_workers_only && worker.labels.team.is_none()).then_some(Refusal::TeamKeepsToItsOwn)
}

/// Returns the first refusal of a worker, including that its team does not use it. `of_class`: the
/// first passing refusal of its class.
fn first_refusal(
    demand: &Demand,
    worker: &Worker,
    of_class: Option<&Refusal>,
    uses_own_workers_only: bool,
) -> Option<Refusal> {
    let others = of_place(demand, worker).chain(of_load(&demand.shape, worker));
    let first = of_class.cloned().into_iter().chain(others).min_by_key(Refusal::order);
    first.or_else(|| team_refusal(worker, uses_own_workers_only))
}

fn bytes<'l>(locations: impl Iterator<Item = &'l Location>) -> u64 {
    locations.map(|location| location.size_bytes).fold(0, u64::saturating_add)
}

/// Draws a number below `count`, evenly over requests and reproducible for each request. `again`
/// distinguishes several draws of one request.
fn draw(requester: Uuid, again: u64, count: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    (requester, again).hash(&mut hasher);
    let lot = u128::from(hasher.finish()) * count as u128;
    usize::try_from(lot >> 64).unwrap_or(0)
}
