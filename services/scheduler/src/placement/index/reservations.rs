//! Workers that are reserved for one that waits: for what asks for more than comes free at a time, and would be passed over by smaller ones
//! for ever.
//!
//! What is reserved takes nothing else that could be elsewhere, so it comes to have the room when what is on it has ended. Which is reserved for
//! what is chosen here; when, and for how long, by the dispatcher.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use domain::WorkerId;
use uuid::Uuid;

use super::{Index, Worker};
use crate::placement::Kind;
use crate::placement::feasibility::{amounts, full_with, of_load_with, of_place};
use crate::placement::{Demand, Load, Resources, Shape};

/// No further worker of a kind is reserved while one in so many are, but for the first. A kind: those that are alike in all that a demand can
/// name but how much they have.
const ONE_IN: usize = 10;

/// One of those that are asked for at once.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) demand: Arc<Demand>,
    /// Those of one owner of a team are on one worker. Empty: it has none.
    pub(crate) owner: String,
}

/// How much has to end on a worker: thousandths of what it has, and tasks at most.
type Lacking = (u64, u32, WorkerId);

impl Index {
    /// For whom workers are reserved.
    pub(crate) fn reserved(&self) -> impl Iterator<Item = (WorkerId, Uuid)> {
        self.reserved.iter().map(|(worker, whom)| (*worker, *whom))
    }

    /// A worker is reserved for this one from now on, and for no other. `None`: for nobody.
    pub(crate) fn reserve(&mut self, id: WorkerId, whom: Option<Uuid>) {
        match whom {
            Some(whom) => self.reserved.insert(id, whom),
            None => self.reserved.remove(&id),
        };
        let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_mut());
        if let Some(place) = place
            && place.worker.reserved_for != whom
        {
            place.worker.reserved_for = whom;
            self.changes += 1;
        }
    }

    /// The names of those that are reserved for this one.
    pub(crate) fn reserved_for(&self, whom: Uuid) -> Vec<String> {
        let kept = self.reserved.iter().filter(|(_, of)| **of == whom);
        kept.filter_map(|(id, _)| Some(self.get(*id)?.name.clone())).collect()
    }

    /// The workers to keep free for what is asked for in these `parts` at once, of which none has room for all now: where that is possible
    /// those that were `kept` until now, and else none of those that are `taken`, which is not asked before. Without `taken` none but those that
    /// were kept. None: each part asks for a slot alone, and so gets the next that comes free; or they could never all be had.
    pub(crate) fn choose_to_reserve(
        &mut self,
        parts: &[Part],
        kept: &BTreeSet<WorkerId>,
        taken: Option<&HashSet<WorkerId>>,
    ) -> BTreeSet<WorkerId> {
        let parts: Vec<_> = with_slots(parts).collect();
        let is_large = match parts.as_slice() {
            [] => false,
            [one] => one.demand.shape.requests != Resources::default(),
            _ => true,
        };
        let mut chosen = BTreeSet::new();
        if !is_large {
            return chosen;
        }
        let (mut planned, mut homes) = (HashMap::<_, Load>::new(), HashMap::new());
        for Part { demand, owner } in parts {
            let home = (!owner.is_empty()).then_some((&demand.shape.team, owner));
            let near = home.and_then(|home| homes.get(&home).copied());
            let Some(worker) = self.soonest(demand, near, &planned, kept, taken) else {
                return BTreeSet::new();
            };
            let load = planned.entry(worker).or_default();
            *load = load.with(Kind::Task, &demand.shape.requests);
            homes.extend(home.map(|home| (home, worker)));
            chosen.insert(worker);
        }
        chosen
    }

    /// Whether as many as may be are `kept` free already, of the workers of the kind that any of these `parts` asks for.
    pub(crate) fn are_enough_reserved(&mut self, parts: &[Part], kept: &HashSet<WorkerId>) -> bool {
        with_slots(parts).any(|part| {
            let classes = self.ready(&part.demand);
            let all: usize = classes.iter().map(|class| self.classes[*class].count).sum();
            let places = kept.iter().filter_map(|id| self.by_id.get(id));
            let places = places.filter_map(|place| self.places[*place].as_ref());
            places.filter(|place| classes.contains(&place.class)).count() >= (all / ONE_IN).max(1)
        })
    }

    /// The classes of those that take what is asked for when they have room.
    fn ready(&mut self, demand: &Demand) -> Vec<usize> {
        let judged = self.judged(&demand.shape);
        let global = (!judged.keeps_to_its_own).then_some(&judged.global);
        judged.own.iter().chain(global.into_iter().flatten()).copied().collect()
    }

    /// Where there is room for `demand` soonest, as far as one can see, beside what is `planned` there: of those that are `kept`, or
    /// else of all that are not `taken`, the one on which least has to end.
    fn soonest(
        &mut self,
        demand: &Demand,
        near: Option<WorkerId>,
        planned: &HashMap<WorkerId, Load>,
        kept: &BTreeSet<WorkerId>,
        taken: Option<&HashSet<WorkerId>>,
    ) -> Option<WorkerId> {
        let classes = self.ready(demand);
        let beside = |worker: &Worker| {
            let planned = planned.get(&worker.id).copied().unwrap_or_default();
            lacking(demand, worker, &planned)
        };
        let would_do = |id: &WorkerId| {
            let place = self.by_id.get(id).and_then(|place| self.places[*place].as_ref());
            place.is_some_and(|place| classes.contains(&place.class) && beside(&place.worker).is_some())
        };
        if let Some(near) = near {
            return Some(near).filter(would_do);
        }
        let kept = kept.iter().filter(|id| would_do(id)).filter_map(|id| self.get(*id));
        if let Some((.., kept)) = kept.filter_map(beside).min() {
            return Some(kept);
        }
        let taken = taken?;
        let members = classes.iter().flat_map(|class| self.members(*class));
        let free = members.filter(|worker| !taken.contains(&worker.id));
        free.filter_map(beside).min().map(|(.., id)| id)
    }
}

/// Those that take a slot.
fn with_slots(parts: &[Part]) -> impl Iterator<Item = &Part> {
    parts.iter().filter(|part| part.demand.shape.process.is_some())
}

/// What has to end on `worker` until there is room beside what is `planned`. `None`: there never would be, or not for `demand`.
fn lacking(demand: &Demand, worker: &Worker, planned: &Load) -> Option<Lacking> {
    let shape: &Shape = &demand.shape;
    let Load { kept_containers, kept_volumes, .. } = worker.load;
    let without_tasks = Load { kept_containers, kept_volumes, ..*planned };
    if of_place(demand, worker).next().is_some() || !of_load_with(shape, worker, &without_tasks).is_empty() {
        return None;
    }
    let mut load = worker.load;
    load.tasks += planned.tasks;
    load.reserved = load.reserved.and(&planned.reserved);
    let short = amounts(shape, worker, &load).map(|amount| {
        let missing = amount.asked.saturating_add(amount.reserved).saturating_sub(amount.has);
        missing.saturating_mul(1000) / amount.has.max(1)
    });
    let slot = full_with(Some(&shape.team), worker, &load)
        .next()
        .map(|_| 1000 / u64::from(worker.capacity.max_tasks.unwrap_or(1).max(1)));
    Some((short.chain(slot).max().unwrap_or(0), load.tasks, worker.id))
}
