//! Choice of workers to reserve for one waiting request.
//!
//! A large request would wait forever behind smaller ones. A reserved worker takes no other request
//! that could run elsewhere, so it has room once its present leases have ended. This module chooses
//! the workers. The dispatcher decides when and for how long.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use domain::WorkerId;
use uuid::Uuid;

use super::{Index, Worker};
use crate::placement::feasibility::{amounts, full_with, of_load_with, of_place};
use crate::placement::{Demand, Load, Resources, Shape};

/// Share of the workers of one kind that may be reserved: one in this many, but at least one.
/// Workers of a kind differ only in capacity and load.
const ONE_IN: usize = 10;

/// One of several leases of one request.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) demand: Arc<Demand>,
    /// All parts of one owner of a team run on one worker. Empty: no owner.
    pub(crate) owner: String,
}

/// The load that must end on a worker: thousandths of its capacity, then number of tasks.
type MissingRoom = (u64, u32, WorkerId);

impl Index {
    /// Returns the reserved workers with their requests.
    pub(crate) fn reserved(&self) -> impl Iterator<Item = (WorkerId, Uuid)> {
        self.reserved.iter().map(|(worker, request)| (*worker, *request))
    }

    /// Reserves a worker for a request, or ends its reservation.
    pub(crate) fn reserve(&mut self, id: WorkerId, request: Option<Uuid>) {
        match request {
            Some(request) => self.reserved.insert(id, request),
            None => self.reserved.remove(&id),
        };
        let place = self.by_id.get(&id).and_then(|place| self.places[*place].as_mut());
        if let Some(place) = place
            && place.worker.reserved_for != request
        {
            place.worker.reserved_for = request;
            self.changes += 1;
        }
    }

    /// Returns the names of the workers reserved for a request.
    pub(crate) fn reserved_for(&self, request: Uuid) -> Vec<String> {
        let kept = self.reserved.iter().filter(|(_, of)| **of == request);
        kept.filter_map(|(id, _)| Some(self.get(*id)?.name.clone())).collect()
    }

    /// Chooses the workers to reserve for all `parts` of a request, none of which has room now.
    /// Prefers `kept` workers, then all workers that are not `taken`. Without `taken`, only `kept`
    /// workers count. Returns an empty set if the request is for a single slot, which becomes free
    /// anyway, or if the parts cannot all fit.
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
            *load = load.with(demand.kind, &demand.shape.requests);
            homes.extend(home.map(|home| (home, worker)));
            chosen.insert(worker);
        }
        chosen
    }

    /// Returns whether enough workers of a kind that `parts` need are reserved already.
    pub(crate) fn are_enough_reserved(&mut self, parts: &[Part], kept: &HashSet<WorkerId>) -> bool {
        with_slots(parts).any(|part| {
            let classes = self.ready(&part.demand);
            let all: usize = classes.iter().map(|class| self.classes[*class].count).sum();
            let places = kept.iter().filter_map(|id| self.by_id.get(id));
            let places = places.filter_map(|place| self.places[*place].as_ref());
            places.filter(|place| classes.contains(&place.class)).count() >= (all / ONE_IN).max(1)
        })
    }

    /// Returns the classes whose workers take the demand when they have room.
    fn ready(&mut self, demand: &Demand) -> Vec<usize> {
        let verdicts = self.class_verdicts(&demand.shape);
        let global = (!verdicts.uses_own_workers_only).then_some(&verdicts.global);
        verdicts.own.iter().chain(global.into_iter().flatten()).copied().collect()
    }

    /// Returns the worker that likely has room for `demand` first, beside what is `planned` there:
    /// among `kept` workers, otherwise among all that are not `taken`, the one on which the least
    /// load must end.
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
            missing_room(demand, worker, &planned)
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

/// Returns the parts that use a slot.
fn with_slots(parts: &[Part]) -> impl Iterator<Item = &Part> {
    parts.iter().filter(|part| part.demand.shape.process.is_some())
}

/// Returns the load that must end on `worker` until it has room beside `planned`. Returns `None` if
/// it never will, or refuses `demand`.
fn missing_room(demand: &Demand, worker: &Worker, planned: &Load) -> Option<MissingRoom> {
    let shape: &Shape = &demand.shape;
    let Load { kept_containers, kept_volumes, short_of_disk, .. } = worker.load;
    let without_tasks = Load { kept_containers, kept_volumes, short_of_disk, ..*planned };
    if of_place(demand, worker).next().is_some() || !of_load_with(shape, worker, &without_tasks).is_empty() {
        return None;
    }
    let mut load = worker.load;
    load.tasks += planned.tasks;
    load.reserved = load.reserved.and(&planned.reserved);
    let short = amounts(shape, worker, &load).map(|amount| {
        let missing = amount.requested.saturating_add(amount.reserved).saturating_sub(amount.has);
        missing.saturating_mul(1000) / amount.has.max(1)
    });
    let slot = full_with(Some(&shape.team), worker, &load)
        .next()
        .map(|_| 1000 / u64::from(worker.capacity.max_tasks.unwrap_or(1).max(1)));
    Some((short.chain(slot).max().unwrap_or(0), load.tasks, worker.id))
}
