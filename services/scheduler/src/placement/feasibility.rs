//! Feasibility: the refusals of a worker for a request.

use std::borrow::Cow;

use domain::worker::Capacity;
use uuid::Uuid;

use super::refusal::{Refusal, Resource, Shortage};
use super::types::{Demand, Desired, Load, Process, Purpose, Resources, Shape, State, Trust, Worker};

/// Returns all refusals of `worker`. Lasting refusals come first, because the caller must act on
/// them.
pub(crate) fn refusals(demand: &Demand, worker: &Worker) -> Vec<Refusal> {
    let mut refusals = of_class(&demand.shape, worker);
    refusals.extend(of_place(demand, worker));
    refusals.extend(of_load(&demand.shape, worker));
    // The sort is stable, so refusals keep their order of checks.
    refusals.sort_by_key(Refusal::order);
    refusals
}

/// Returns the refusals shared by all workers that differ from `worker` only in load.
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

/// Returns the refusals that concern this particular worker.
pub(super) fn of_place(demand: &Demand, worker: &Worker) -> impl Iterator<Item = Refusal> + use<> {
    let other = demand.only.filter(|only| only.id != worker.id);
    let failed = demand.failed_on.iter().find(|failed| failed.worker == worker.id);
    let is_avoided = demand.avoid.contains(&worker.id);
    // A request that is tied to a worker belongs to something on that worker, and would block it.
    let is_tied = demand.only.is_some_and(|only| !only.is_named);
    let may_wait = !is_tied && demand.shape.process.is_some();
    let is_for_another = worker.reserved_for.is_some_and(|request| request != demand.waits_as);
    let refusals = [
        other.map(|only| if only.is_named { Refusal::NotNamed } else { Refusal::NotSame }),
        failed.map(|failed| Refusal::FailedWorker(failed.failure.clone())),
        is_avoided.then_some(Refusal::Avoided),
        (is_for_another && may_wait).then_some(Refusal::Reserved),
    ];
    refusals.into_iter().flatten()
}

/// Returns the refusals because of load. The last known load of a lost worker does not count.
pub(super) fn of_load(shape: &Shape, worker: &Worker) -> Vec<Refusal> {
    let mut refusals = of_load_with(shape, worker, &worker.load);
    if worker.state == State::Lost {
        refusals.retain(|refusal| !refusal.passes());
    }
    refusals
}

/// Returns the refusals if the worker had this `load`.
pub(super) fn of_load_with(shape: &Shape, worker: &Worker, load: &Load) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    if load.short_of_disk {
        refusals.push(Refusal::DiskPressure(worker.capacity.min_free_disk_bytes));
    }
    if shape.process.is_some() {
        refusals.extend(full_with(Some(&shape.team), worker, load));
    }
    for Amount { of, requested, has, reserved } in amounts(shape, worker, load) {
        let left = has.saturating_sub(reserved);
        if requested > has {
            refusals.push(Refusal::TooSmall(Shortage { of, requested, left: has }));
        } else if requested > left {
            refusals.push(Refusal::Short(Shortage { of, requested, left }));
        }
    }
    refusals
}

/// A requested amount, with the capacity of the worker.
pub(super) struct Amount {
    pub(super) of: Resource,
    pub(super) requested: u64,
    pub(super) has: u64,
    pub(super) reserved: u64,
}

/// Returns the requested amounts that the worker declares.
pub(super) fn amounts(shape: &Shape, worker: &Worker, load: &Load) -> impl Iterator<Item = Amount> {
    let (capacity, requested, reserved) = (&worker.capacity, shape.requests, load.reserved);
    let disk_bytes = Some(capacity.disk_bytes).filter(|bytes| *bytes > 0);
    let amounts = [
        (Resource::Cpu, requested.cpu_millis, capacity.cpu_millis, reserved.cpu_millis),
        (Resource::Memory, requested.memory_bytes, capacity.memory_bytes, reserved.memory_bytes),
        (Resource::Disk, requested.disk_bytes, disk_bytes, reserved.disk_bytes),
    ];
    // Amounts that the worker does not declare are not limited.
    amounts
        .into_iter()
        .filter(|(_, requested, ..)| *requested > 0)
        .filter_map(|(of, requested, has, reserved)| has.map(|has| Amount { of, requested, has, reserved }))
}

/// Returns whether `worker` has a free slot for some team.
pub(super) fn has_room(worker: &Worker) -> bool {
    full_with(None, worker, &worker.load).next().is_none()
}

/// Returns why `worker` has no free slot for `team` with this `load`. `None`: for any team.
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

/// Returns the refusals of `worker` that apply to any work.
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
    let refusals = refusals(&anything.requested_by(Uuid::nil()), worker).into_iter();
    refusals.filter(|refusal| !matches!(refusal, Refusal::ImageKind(_))).collect()
}
