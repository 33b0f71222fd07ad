//! The outlook of a demand: what the workers say to it. Some are told one by one, and all by what they have in common.
//!
//! Every worker is looked at, but words are made only for what is told: of ten thousand that refuse for the same reasons, once.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

use domain::{Timestamp, WorkerId};

use super::{Demand, Index, Location, Refusal, Score, Worker, keeps_out};
use crate::placement::feasibility::{of_class, of_load, of_place};
use crate::placement::{Pace, Strategy, refusals};

/// How many groups are told.
const GROUPS: usize = 50;

/// From how many groups on those that refuse for the same, but with other tags, versions or failures, are told together.
const MANY: usize = 20;

/// How many of a group are named.
const NAMED: usize = 5;

/// Who is told one by one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tell {
    pub(crate) most: usize,
    /// Only these, by id or name. `None`: any.
    pub(crate) only: Option<(BTreeSet<WorkerId>, BTreeSet<String>)>,
}

/// What the workers say to a demand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outlook {
    /// How many there are.
    pub(crate) known: usize,
    /// How many have gone, and are remembered for a while.
    pub(crate) gone: usize,
    /// How many would do.
    pub(crate) willing: usize,
    /// Those that would do, best first; then those that refuse, first those for which waiting may help, each by name.
    pub(crate) opinions: Vec<Opinion>,
    /// All that refuse: first those for which waiting may help, then by their number.
    pub(crate) groups: Vec<Group>,
    /// Of those that would do, or refuse for nothing but what is on them.
    pub(crate) pace: Pace,
}

/// What one worker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Opinion {
    pub(crate) worker: WorkerId,
    pub(crate) name: String,
    pub(crate) says: Says,
}

/// Whether a worker would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Says {
    /// It would, and compares like this with others.
    Would(Standing),
    /// It would not, for all of this.
    WouldNot(Vec<Refusal>),
}

/// How a worker that would do compares with others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    /// For people.
    pub(crate) words: String,
    pub(crate) scores: Vec<(Strategy, u64)>,
}

/// Workers that refuse for the same reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// Those of one of them. First what will not pass by itself.
    pub(crate) refusals: Vec<Refusal>,
    pub(crate) count: usize,
    /// The first of them by name.
    pub(crate) names: Vec<String>,
}

impl Group {
    /// Whether waiting may help.
    pub(crate) fn passes(&self) -> bool {
        self.refusals.iter().all(Refusal::passes)
    }

    /// Whether they are not there any more.
    pub(crate) fn has_gone(&self) -> bool {
        self.refusals.contains(&Refusal::Gone)
    }

    /// What they say, for people: `are cordoned and are full`.
    pub(crate) fn words(&self) -> String {
        let words: Vec<_> = self.refusals.iter().map(Refusal::of_many).collect();
        words.join(" and ")
    }

    fn add(&mut self, mut other: Self) {
        self.count += other.count;
        self.names.append(&mut other.names);
    }
}

/// A worker that would do: whether it is for all teams, and how good it is.
struct Willing<'i> {
    for_all: bool,
    score: Score,
    worker: &'i Worker,
}

impl Willing<'_> {
    fn compare(&self, other: &Self) -> Ordering {
        let key = |one: &Self| (one.for_all, one.score);
        key(self).cmp(&key(other)).then_with(|| self.worker.name.cmp(&other.worker.name))
    }
}

/// A worker that would not do.
struct Unwilling<'i> {
    is_lasting: bool,
    worker: &'i Worker,
}

impl Unwilling<'_> {
    fn compare(&self, other: &Self) -> Ordering {
        self.is_lasting.cmp(&other.is_lasting).then_with(|| self.worker.name.cmp(&other.worker.name))
    }
}

/// Workers of one class that refuse for the same.
struct Tally<'i> {
    like: &'i Worker,
    count: usize,
    names: Vec<&'i str>,
}

impl<'i> Tally<'i> {
    fn add(&mut self, name: &'i str) {
        self.count += 1;
        if self.names.len() == NAMED && self.names.last().is_some_and(|last| *last <= name) {
            return;
        }
        let at = self.names.partition_point(|known| *known < name);
        self.names.insert(at, name);
        self.names.truncate(NAMED);
    }
}

impl Index {
    /// What the workers say to `demand`, whose inputs are at `locations`.
    pub(crate) fn outlook(
        &mut self,
        demand: &Demand,
        locations: &[Location],
        tell: &Tell,
        now: Timestamp,
    ) -> Outlook {
        let keeps_to_its_own = self.judged(&demand.shape).keeps_to_its_own;
        let chain = self.chains.of(demand.shape.purpose);
        let locations = if chain.is_by_locality() { locations } else { &[] };
        let (bytes, held) = held(locations);
        let (mut willing, mut unwilling) = (Vec::new(), Vec::new());
        let (mut tallies, mut pace) = (HashMap::<_, Tally<'_>>::new(), Pace::default());
        for (number, class) in self.classes.iter().enumerate().filter(|(_, class)| class.count > 0) {
            let of_class = of_class(&demand.shape, &class.like);
            let is_lasting = !of_class.iter().all(Refusal::passes);
            for place in class.lines[0].places().filter_map(|place| self.places[*place].as_ref()) {
                let worker = &place.worker;
                let of_place: Vec<_> = of_place(demand, worker).collect();
                let kept_out = keeps_out(worker, keeps_to_its_own);
                let of_load = of_load(&demand.shape, worker);
                let mut others = of_place.iter().chain(&kept_out).peekable();
                if of_class.is_empty()
                    && others.peek().is_none()
                    && of_load.iter().all(Refusal::is_for_load)
                    && let Some(turnover) = place.turnover
                {
                    pace.add(turnover.passed(worker.load.tasks, now), worker.load.tasks);
                }
                let others: u32 =
                    others.chain(&of_load).map(Refusal::mark).fold(0, |marks, mark| marks | mark);
                if of_class.is_empty() && others == 0 {
                    let held = held.get(&worker.id).copied().unwrap_or(0);
                    let cost = chain.cost(&worker.load, bytes.saturating_sub(held));
                    let score = (worker.awaited, !demand.prefer.contains(&worker.id), cost);
                    willing.push(Willing { for_all: worker.labels.team.is_none(), score, worker });
                    continue;
                }
                let is_lasting =
                    is_lasting || !of_place.iter().chain(&kept_out).chain(&of_load).all(Refusal::passes);
                unwilling.push(Unwilling { is_lasting, worker });
                let tally = tallies.entry((number, others));
                tally
                    .or_insert_with(|| Tally { like: worker, count: 0, names: Vec::new() })
                    .add(&worker.name);
            }
        }
        let all = |worker: &Worker| {
            let mut refusals = refusals(demand, worker);
            refusals.extend(keeps_out(worker, keeps_to_its_own));
            refusals
        };
        let groups = tallies.into_values().map(|tally| {
            let names = tally.names.into_iter().map(str::to_owned).collect();
            Group { refusals: all(tally.like), count: tally.count, names }
        });
        let groups = grouped(groups.collect());
        let count = willing.len();
        willing.retain(|one| tell.is_about(one.worker));
        unwilling.retain(|one| tell.is_about(one.worker));
        let would = first(willing, tell.most, Willing::compare).into_iter().map(|one| {
            let words = self.words(demand, one.score);
            let scores = chain.counts(one.score.2).collect();
            (one.worker, Says::Would(Standing { words, scores }))
        });
        let would: Vec<_> = would.collect();
        let left = tell.most.saturating_sub(would.len());
        let would_not = first(unwilling, left, Unwilling::compare).into_iter();
        let would_not = would_not.map(|one| (one.worker, Says::WouldNot(all(one.worker))));
        let opinions = would.into_iter().chain(would_not);
        let opinions =
            opinions.map(|(worker, says)| Opinion { worker: worker.id, name: worker.name.clone(), says });
        Outlook {
            known: self.there(),
            gone: self.gone,
            willing: count,
            opinions: opinions.collect(),
            groups,
            pace,
        }
    }
}

impl Tell {
    /// These many, of all.
    #[cfg(test)]
    pub(crate) fn first(most: usize) -> Self {
        Self { most, only: None }
    }

    fn is_about(&self, worker: &Worker) -> bool {
        let Some((ids, names)) = &self.only else { return true };
        ids.contains(&worker.id) || names.contains(&worker.name)
    }
}

/// How many bytes there are in all, and how many of them workers hold.
fn held(locations: &[Location]) -> (u64, HashMap<WorkerId, u64>) {
    let mut held = HashMap::<_, u64>::new();
    for location in locations {
        for worker in &location.workers {
            let held = held.entry(*worker).or_default();
            *held = held.saturating_add(location.size_bytes);
        }
    }
    (super::bytes(locations.iter()), held)
}

/// The first `most` in their order.
fn first<T>(mut of: Vec<T>, most: usize, compare: fn(&T, &T) -> Ordering) -> Vec<T> {
    if most < of.len() {
        if most > 0 {
            of.select_nth_unstable_by(most, compare);
        }
        of.truncate(most);
    }
    of.sort_unstable_by(compare);
    of
}

/// Brings those together that say the same.
fn grouped(groups: Vec<Group>) -> Vec<Group> {
    let mut groups = together(groups, |group| group.words());
    if groups.len() > MANY {
        for group in &mut groups {
            group.refusals =
                std::mem::take(&mut group.refusals).into_iter().map(Refusal::in_common).collect();
        }
        groups = together(groups, |group| group.words());
    }
    groups.sort_by_cached_key(|group| (!group.passes(), std::cmp::Reverse(group.count), group.words()));
    groups.truncate(GROUPS);
    groups
}

fn together(groups: Vec<Group>, key: impl Fn(&Group) -> String) -> Vec<Group> {
    let mut by_key = HashMap::<_, Group>::new();
    for group in groups {
        match by_key.entry(key(&group)) {
            std::collections::hash_map::Entry::Occupied(mut known) => known.get_mut().add(group),
            std::collections::hash_map::Entry::Vacant(free) => _ = free.insert(group),
        }
    }
    let mut groups: Vec<_> = by_key.into_values().collect();
    for group in &mut groups {
        group.names.sort();
        group.names.truncate(NAMED);
    }
    groups
}
