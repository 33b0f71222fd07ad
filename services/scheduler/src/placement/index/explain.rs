//! The outlook of a demand: which workers would take it, and why the others refuse.
//!
//! Some workers are described individually, and all of them in groups with equal refusals. Every
//! worker is checked, but texts are made only for described workers and groups.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

use domain::{Timestamp, WorkerId};

use super::{Demand, Index, Location, Refusal, Score, Worker, team_refusal};
use crate::placement::feasibility::{of_class, of_load, of_place};
use crate::placement::{Pace, Strategy, refusals};

/// Maximum number of groups.
const GROUPS: usize = 50;

/// Number of groups from which on groups with the same refusals but different details are merged.
const MERGE_THRESHOLD: usize = 20;

/// Maximum number of names of a group.
const NAMED: usize = 5;

/// The workers that are described individually.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DetailFilter {
    pub(crate) most: usize,
    /// Only these workers, by id or name. `None`: any.
    pub(crate) only: Option<(BTreeSet<WorkerId>, BTreeSet<String>)>,
}

/// The outlook of a demand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outlook {
    /// Number of registered workers.
    pub(crate) known: usize,
    /// Number of removed workers that still count as ones that may return.
    pub(crate) gone: usize,
    /// Number of workers that would take the demand now.
    pub(crate) willing: usize,
    /// Workers that would take the demand, best first, then refusing workers. Among those, passing
    /// refusals come first, then names.
    pub(crate) opinions: Vec<Opinion>,
    /// All refusing workers. Groups with passing refusals come first, then larger groups.
    pub(crate) groups: Vec<Group>,
    /// Turnover of the workers that would take the demand, or refuse only because of load.
    pub(crate) pace: Pace,
}

/// The answer of one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Opinion {
    pub(crate) worker: WorkerId,
    pub(crate) name: String,
    pub(crate) answer: Answer,
}

/// Whether a worker would take the demand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The worker would take the demand, with this rank.
    Would(Ranking),
    /// The worker refuses for all of these reasons.
    WouldNot(Vec<Refusal>),
}

/// The rank of a feasible worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranking {
    /// Description for people.
    pub(crate) words: String,
    pub(crate) scores: Vec<(Strategy, u64)>,
}

/// Workers with equal refusals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// The refusals of one of them. Lasting refusals come first.
    pub(crate) refusals: Vec<Refusal>,
    pub(crate) count: usize,
    /// The first names in alphabetical order.
    pub(crate) names: Vec<String>,
}

impl Group {
    /// Returns whether waiting may help.
    pub(crate) fn passes(&self) -> bool {
        self.refusals.iter().all(Refusal::passes)
    }

    /// Returns whether the workers were removed.
    pub(crate) fn are_removed(&self) -> bool {
        self.refusals.contains(&Refusal::Gone)
    }

    /// Describes the refusals, for example `are cordoned and are full`.
    pub(crate) fn words(&self) -> String {
        let words: Vec<_> = self.refusals.iter().map(Refusal::of_many).collect();
        words.join(" and ")
    }

    fn add(&mut self, mut other: Self) {
        self.count += other.count;
        self.names.append(&mut other.names);
    }
}

/// A feasible worker: whether it serves all teams, and its score.
struct FeasibleWorker<'i> {
    for_all: bool,
    score: Score,
    worker: &'i Worker,
}

impl FeasibleWorker<'_> {
    fn compare(&self, other: &Self) -> Ordering {
        let key = |one: &Self| (one.for_all, one.score);
        key(self).cmp(&key(other)).then_with(|| self.worker.name.cmp(&other.worker.name))
    }
}

/// A refusing worker.
struct RefusingWorker<'i> {
    is_lasting: bool,
    worker: &'i Worker,
}

impl RefusingWorker<'_> {
    fn compare(&self, other: &Self) -> Ordering {
        self.is_lasting.cmp(&other.is_lasting).then_with(|| self.worker.name.cmp(&other.worker.name))
    }
}

/// Workers of one class with equal refusals.
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
    /// Computes the outlook of `demand`, whose inputs are at `locations`.
    pub(crate) fn outlook(
        &mut self,
        demand: &Demand,
        locations: &[Location],
        filter: &DetailFilter,
        now: Timestamp,
    ) -> Outlook {
        let uses_own_workers_only = self.class_verdicts(&demand.shape).uses_own_workers_only;
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
                let kept_out = team_refusal(worker, uses_own_workers_only);
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
                    willing.push(FeasibleWorker { for_all: worker.labels.team.is_none(), score, worker });
                    continue;
                }
                let is_lasting =
                    is_lasting || !of_place.iter().chain(&kept_out).chain(&of_load).all(Refusal::passes);
                unwilling.push(RefusingWorker { is_lasting, worker });
                let tally = tallies.entry((number, others));
                tally
                    .or_insert_with(|| Tally { like: worker, count: 0, names: Vec::new() })
                    .add(&worker.name);
            }
        }
        let all = |worker: &Worker| {
            let mut refusals = refusals(demand, worker);
            refusals.extend(team_refusal(worker, uses_own_workers_only));
            refusals
        };
        let groups = tallies.into_values().map(|tally| {
            let names = tally.names.into_iter().map(str::to_owned).collect();
            Group { refusals: all(tally.like), count: tally.count, names }
        });
        let groups = grouped(groups.collect());
        let count = willing.len();
        willing.retain(|one| filter.is_about(one.worker));
        unwilling.retain(|one| filter.is_about(one.worker));
        let would = first(willing, filter.most, FeasibleWorker::compare).into_iter().map(|one| {
            let words = self.words(demand, one.score);
            let scores = chain.counts(one.score.2).collect();
            (one.worker, Answer::Would(Ranking { words, scores }))
        });
        let would: Vec<_> = would.collect();
        let left = filter.most.saturating_sub(would.len());
        let would_not = first(unwilling, left, RefusingWorker::compare).into_iter();
        let would_not = would_not.map(|one| (one.worker, Answer::WouldNot(all(one.worker))));
        let opinions = would.into_iter().chain(would_not);
        let opinions =
            opinions.map(|(worker, answer)| Opinion { worker: worker.id, name: worker.name.clone(), answer });
        Outlook {
            known: self.registered(),
            gone: self.gone,
            willing: count,
            opinions: opinions.collect(),
            groups,
            pace,
        }
    }
}

impl DetailFilter {
    /// Describes the first `most` workers.
    #[cfg(test)]
    pub(crate) fn first(most: usize) -> Self {
        Self { most, only: None }
    }

    fn is_about(&self, worker: &Worker) -> bool {
        let Some((ids, names)) = &self.only else { return true };
        ids.contains(&worker.id) || names.contains(&worker.name)
    }
}

/// Returns the total size of the inputs, and the bytes that each worker has.
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

/// Returns the first `most` elements in order.
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

/// Merges groups with equal descriptions.
fn grouped(groups: Vec<Group>) -> Vec<Group> {
    let mut groups = together(groups, |group| group.words());
    if groups.len() > MERGE_THRESHOLD {
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
