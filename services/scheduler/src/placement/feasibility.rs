//! Feasibility: what speaks against a worker for a request.

use std::borrow::Cow;

use domain::worker::Capacity;
use uuid::Uuid;

use super::refusal::{Refusal, Resource, Shortage};
use super::types::{Demand, Desired, Load, Process, Purpose, Resources, Shape, State, Trust, Worker};

/// Everything that speaks against `worker`: first what will not change, for that is what a caller must act on.
pub(crate) fn refusals(demand: &Demand, worker: &Worker) -> Vec<Refusal> {
    let mut refusals = of_class(&demand.shape, worker);
    refusals.extend(of_place(demand, worker));
    refusals.extend(of_load(&demand.shape, worker));
    // Stable: in the order in which they are told.
    refusals.sort_by_key(Refusal::order);
    refusals
}

/// What speaks against all workers that differ from `worker` in nothing but their load.
pub(super) fn of_class(shape: &Shape, worker: &Worker) -> Vec<Refusal> {
    let labels = &worker.labels;
    let mut refusals = Vec::new();
    if worker.state == State::Lost {
        refusals.push(match (worker.just_lost, worker.gone) {
            (true, false) => Refusal::JustLost,
            (true, true) => Refusal::Gone,
            (false, _) => Refusal::Lost,
        });
    }
    if worker.desired == Desired::Retire {
        refusals.push(Refusal::Retiring);
    }
    if !worker.unsupported_versions.is_empty() {
        refusals.push(Refusal::Incompatible(worker.unsupported_versions.clone()));
    }
    if labels.platform != shape.platform {
        refusals.push(Refusal::Platform(labels.platform.clone()));
    }
    if labels.team.as_ref().is_some_and(|team| *team != shape.team) {
        refusals.push(Refusal::Team);
    }
    if shape.process.is_some() && shape.tags.is_empty() && !labels.tags.is_empty() {
        refusals.push(Refusal::OnlyTagged(labels.tags.clone()));
    }
    let missing: Vec<_> = shape.tags.iter().filter(|tag| !labels.tags.contains(tag)).cloned().collect();
    if !missing.is_empty() {
        refusals.push(Refusal::MissingTags(missing));
    }
    if let Some(process) = &shape.process {
        let has = |list: &[String], name: &str| list.iter().any(|item| item == name);
        if let Some(name) = &process.resource_type
            && !labels.resource_types.iter().any(|known| known.name == *name)
        {
            refusals.push(Refusal::ResourceType(name.clone()));
        } else if !has(&labels.image_kinds, &process.image_kind) {
            refusals.push(Refusal::ImageKind(process.image_kind.clone()));
        }
        let lacking = process.capabilities.iter().filter(|name| !has(&labels.capabilities, name));
        refusals.extend(lacking.map(|name| Refusal::Capability(name.clone())));
    }
    if worker.desired == Desired::Cordon {
        refusals.push(Refusal::Cordoned);
    }
    if worker.state == State::Stalled {
        refusals.push(Refusal::Stalled);
    }
    if let Trust::Quarantined(failing) = &worker.trust
        && shape.process.is_some()
        && failing.counts_for(Some(&shape.team))
    {
        refusals.push(Refusal::Quarantined(failing.why.clone()));
    }
    refusals
}

/// What speaks against `worker` because of who it is.
pub(super) fn of_place(demand: &Demand, worker: &Worker) -> impl Iterator<Item = Refusal> + use<> {
    let is_other = demand.only.is_some_and(|only| only != worker.id);
    let failed = demand.failed_on.iter().find(|failed| failed.worker == worker.id);
    let is_avoided = demand.avoid.contains(&worker.id);
    // What has to be there and nowhere else belongs to something that is there, and would hold it up.
    let may_be_elsewhere = demand.only.is_none() && demand.shape.process.is_some();
    let is_for_another = worker.reserved_for.is_some_and(|whom| whom != demand.waits_as);
    let refusals = [
        is_other.then_some(Refusal::NotSame),
        failed.map(|failed| Refusal::FailedThere(failed.failure.clone())),
        is_avoided.then_some(Refusal::Avoided),
        (is_for_another && may_be_elsewhere).then_some(Refusal::Reserved),
    ];
    refusals.into_iter().flatten()
}

/// What speaks against `worker` because of what is on it. What was on one that is lost when it was there is no reason.
pub(super) fn of_load(shape: &Shape, worker: &Worker) -> Vec<Refusal> {
    let mut refusals = of_load_with(shape, worker, &worker.load);
    if worker.state == State::Lost {
        refusals.retain(|refusal| !refusal.passes());
    }
    refusals
}

/// The same, if this `load` were on it.
pub(super) fn of_load_with(shape: &Shape, worker: &Worker, load: &Load) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if shape.process.is_some() {
        refusals.extend(full_with(Some(&shape.team), worker, load));
    }
    for Amount { of, asked, has, reserved } in amounts(shape, worker, load) {
        let left = has.saturating_sub(reserved);
        if asked > has {
            refusals.push(Refusal::TooSmall(Shortage { of, asked, left: has }));
        } else if asked > left {
            refusals.push(Refusal::Short(Shortage { of, asked, left }));
        }
    }
    refusals
}

/// How much is asked for of something, with what a worker has of it.
pub(super) struct Amount {
    pub(super) of: Resource,
    pub(super) asked: u64,
    pub(super) has: u64,
    pub(super) reserved: u64,
}

/// Of what is asked for, and counted.
pub(super) fn amounts(shape: &Shape, worker: &Worker, load: &Load) -> impl Iterator<Item = Amount> {
    let (capacity, asked, reserved) = (&worker.capacity, shape.requests, load.reserved);
    let disk_bytes = Some(capacity.disk_bytes).filter(|bytes| *bytes > 0);
    let amounts = [
        (Resource::Cpu, asked.cpu_millis, capacity.cpu_millis, reserved.cpu_millis),
        (Resource::Memory, asked.memory_bytes, capacity.memory_bytes, reserved.memory_bytes),
        (Resource::Disk, asked.disk_bytes, disk_bytes, reserved.disk_bytes),
    ];
    // What a worker does not say is not counted.
    amounts
        .into_iter()
        .filter(|(_, asked, ..)| *asked > 0)
        .filter_map(|(of, asked, has, reserved)| has.map(|has| Amount { of, asked, has, reserved }))
}

/// Whether anything more may run on `worker`, whatever it asks for, and of some team.
pub(super) fn has_room(worker: &Worker) -> bool {
    full_with(None, worker, &worker.load).next().is_none()
}

/// Why nothing more of `team` may run on `worker` if this `load` were on it, whatever is asked for. `None`: of no team at all.
pub(super) fn full_with(
    team: Option<&str>,
    worker: &Worker,
    load: &Load,
) -> impl Iterator<Item = Refusal> + use<> {
    let Capacity { max_tasks, max_containers, max_volumes, .. } = worker.capacity;
    let (containers, volumes) = (load.containers(), load.volumes());
    let on_trial = match &worker.trust {
        Trust::OnProbation(failing) if load.tasks > 0 && failing.counts_for(team) => {
            Some(Refusal::Quarantined(failing.why.clone()))
        }
        _ => None,
    };
    let refusals = [
        on_trial,
        max_tasks.filter(|max| load.tasks >= *max).map(|max| Refusal::Full { active: load.tasks, max }),
        max_containers
            .filter(|max| containers >= u64::from(*max))
            .map(|max| Refusal::FullOfContainers { count: containers, max }),
        max_volumes
            .filter(|max| volumes >= u64::from(*max))
            .map(|max| Refusal::FullOfVolumes { count: volumes, max }),
    ];
    refusals.into_iter().flatten()
}

/// What speaks against giving any work to `worker`, whatever is asked for.
pub(crate) fn standing_refusals(worker: &Worker) -> Vec<Refusal> {
    let process = Process { image_kind: Cow::Borrowed(""), resource_type: None, capabilities: vec![] };
    let anything = Shape {
        team: worker.labels.team.clone().unwrap_or_default(),
        platform: worker.labels.platform.clone(),
        tags: worker.labels.tags.clone(),
        process: Some(process),
        requests: Resources::default(),
        purpose: Purpose::Build,
    };
    let refusals = refusals(&anything.asked_by(Uuid::nil()), worker).into_iter();
    refusals.filter(|refusal| !matches!(refusal, Refusal::ImageKind(_))).collect()
}
