//! Workers that are kept free for one that waits: for what asks for more than comes free at a time, and would be passed over by smaller ones
//! for ever.
//!
//! What is kept free takes nothing else, so it comes to have the room, when what is on it has ended. Who is kept free for what is chosen here, and
//! when by the dispatcher.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use domain::WorkerId;
use uuid::Uuid;

use super::{Index, Worker, of_place};
use crate::entity::lease::Kind;
use crate::placement::{Demand, Load, Resources, Shape, amounts, full_with, of_load_with};

/// Of the workers that could take something one in so many may be kept free at a time; one in any case.
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
    /// For whom workers are kept free.
    pub(crate) fn kept_free(&self) -> impl Iterator<Item = (WorkerId, Uuid)> {
        self.kept_free.iter().map(|(worker, whom)| (*worker, *whom))
    }

    /// A worker is kept free for this one from now on, and for no other. `None`: for nobody.
    pub(crate) fn keep_free(&mut self, id: WorkerId, whom: Option<Uuid>) {
        match whom {
            Some(whom) => self.kept_free.insert(id, whom),
            None => self.kept_free.remove(&id),
        };
        let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_mut());
        if let Some(place) = place
            && place.worker.kept_free_for != whom
        {
            place.worker.kept_free_for = whom;
            self.changes += 1;
        }
    }

    /// The names of those that are kept free for this one.
    pub(crate) fn kept_free_for(&self, whom: Uuid) -> Vec<String> {
        let kept = self.kept_free.iter().filter(|(_, of)| **of == whom);
        kept.filter_map(|(id, _)| Some(self.get(*id)?.name.clone())).collect()
    }

    /// The workers to keep free for what is asked for in these `parts` at once, of which none has room for all now; where that is possible
    /// those that were kept until now. None: each part asks for a slot alone, and so gets the next that comes free; or enough are kept free
    /// for others; or they could never all be had.
    pub(crate) fn choose_to_keep_free(
        &mut self,
        parts: &[Part],
        kept: &BTreeSet<WorkerId>,
    ) -> BTreeSet<WorkerId> {
        let parts: Vec<_> = parts.iter().filter(|part| part.demand.shape.process.is_some()).collect();
        let is_large = match parts.as_slice() {
            [] => false,
            [one] => one.demand.shape.requests != Resources::default(),
            _ => true,
        };
        let mut chosen = BTreeSet::new();
        if !is_large || parts.first().is_none_or(|first| self.are_enough_kept_free(&first.demand)) {
            return chosen;
        }
        let (mut planned, mut homes) = (HashMap::<_, Load>::new(), HashMap::new());
        for Part { demand, owner } in parts {
            let home = (!owner.is_empty()).then_some((&demand.shape.team, owner));
            let near = home.and_then(|home| homes.get(&home).copied());
            let Some(worker) = self.soonest(demand, near, &planned, kept) else { return BTreeSet::new() };
            let load = planned.entry(worker).or_default();
            *load = load.with(Kind::Task, &demand.shape.requests);
            homes.extend(home.map(|home| (home, worker)));
            chosen.insert(worker);
        }
        chosen
    }

    /// Whether of the workers that could take `demand` as many are kept free as may be.
    fn are_enough_kept_free(&mut self, demand: &Demand) -> bool {
        let classes = self.ready(demand);
        let all: usize = classes.iter().map(|class| self.classes[*class].count).sum();
        let places = self.kept_free.keys().filter_map(|id| self.by_id.get(id));
        let kept = places.filter_map(|place| self.places[*place].as_ref());
        kept.filter(|place| classes.contains(&place.class)).count() >= (all / ONE_IN).max(1)
    }

    /// The classes of those that take what is asked for when they have room.
    fn ready(&mut self, demand: &Demand) -> Vec<usize> {
        let judged = self.judged(&demand.shape);
        let global = (!judged.keeps_to_its_own).then_some(&judged.global);
        judged.own.iter().chain(global.into_iter().flatten()).copied().collect()
    }

    /// Where there is room for `demand` soonest, as far as one can see, beside what is `planned` there: of those that are `kept` the first, or
    /// of all the one on which least has to end.
    fn soonest(
        &mut self,
        demand: &Demand,
        near: Option<WorkerId>,
        planned: &HashMap<WorkerId, Load>,
        kept: &BTreeSet<WorkerId>,
    ) -> Option<WorkerId> {
        let classes = self.ready(demand);
        let lacking = |id: WorkerId| {
            let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_ref())?;
            let is_there = near.is_none_or(|near| near == id) && classes.contains(&place.class);
            let planned = planned.get(&id).copied().unwrap_or_default();
            if is_there { lacking(demand, &place.worker, &planned) } else { None }
        };
        if let Some(id) = near {
            return lacking(id).map(|_| id);
        }
        // Not by what is on them, so that all replicas keep the same one.
        if let Some(id) = kept.iter().find(|id| lacking(**id).is_some()) {
            return Some(*id);
        }
        let members = classes.iter().flat_map(|class| self.members(*class));
        members.filter_map(|worker| lacking(worker.id)).min().map(|(.., id)| id)
    }
}

/// What has to end on `worker` until there is room beside what is `planned`. `None`: there never would be, or not for `demand`.
fn lacking(demand: &Demand, worker: &Worker, planned: &Load) -> Option<Lacking> {
    let shape: &Shape = &demand.shape;
    let Load { kept_containers, kept_volumes, .. } = worker.load;
    let without_tasks = Load { kept_containers, kept_volumes, ..*planned };
    if of_place(demand, worker).is_some() || !of_load_with(shape, worker, &without_tasks).is_empty() {
        return None;
    }
    let mut load = worker.load;
    load.tasks += planned.tasks;
    load.reserved = load.reserved.and(&planned.reserved);
    let short = amounts(shape, worker, &load).map(|amount| {
        let missing = amount.asked.saturating_add(amount.reserved).saturating_sub(amount.has);
        missing.saturating_mul(1000) / amount.has.max(1)
    });
    let slot =
        full_with(worker, &load).map(|_| 1000 / u64::from(worker.capacity.max_tasks.unwrap_or(1).max(1)));
    Some((short.chain(slot).max().unwrap_or(0), load.tasks, worker.id))
}
