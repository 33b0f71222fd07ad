//! Placement: which worker, or why none.
//!
//! Nothing else filters or compares workers. What speaks against a worker is said by [`refusals`], how those that would do compare by a
//! [`Chain`] of strategies, and [`Index::choose`] picks one of the best, by lot where several are equal. All of it is pure: whoever grants
//! the lease asks [`refusals`] again of the worker's row, which it has locked ([`crate::commit`]).
//!
//! The [`Index`] answers without a look at each worker: workers that differ in nothing but their load are a class, which is judged once,
//! and lie in it sorted by what they cost. Its tests compare it with a plain restatement that looks at everyone.

mod feasibility;
mod index;
mod scoring;
#[cfg(test)]
pub(crate) mod tests;
mod throughput;
mod types;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use domain::WorkerId;
use domain::worker::{Capacity, Incarnation, Labels};
use domain::workload::{Failure, Image, Limits, Network, ResourceRequests, WorkloadSpec};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub(crate) use feasibility::{CODES, Refusal, Refusals, Resource, Shortage};
pub(crate) use index::explain::{Group, Opinion, Outlook, Says, Standing, Tell};
pub(crate) use index::reservations::Part;
pub(crate) use index::{Choice, DecidedBy, Index, Placement, WAITS_FOR};
pub(crate) use scoring::Purpose;
pub use scoring::{Chain, Chains, ParseChainError, Strategy};
pub(crate) use throughput::Pace;
pub(crate) use types::{Desired, Kind, State};

/// A worker, as placement sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) endpoint: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) desired: Desired,
    pub(crate) state: State,
    /// It was not in contact since a scheduler started, and has the TTL to come back.
    pub(crate) awaited: bool,
    /// It was lost only minutes ago.
    pub(crate) just_lost: bool,
    /// It was, and there is none any more that could come back: it was removed, or is on its way out, or counts as gone once it is lost.
    pub(crate) gone: bool,
    /// The versions of the protocol that its gateway speaks, where none of them is spoken here.
    pub(crate) unsupported_versions: Vec<u32>,
    pub(crate) trust: Trust,
    pub(crate) labels: Arc<Labels>,
    pub(crate) capacity: Capacity,
    pub(crate) load: Load,
    /// Who waits for it to have room, and gets what could be elsewhere there, but nobody else until then. Only an [`Index`] knows.
    pub(crate) reserved_for: Option<Uuid>,
}

impl Worker {
    /// Whether it is the same in all but what is on it, and for whom it is reserved.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        let Self {
            id,
            name,
            endpoint,
            incarnation,
            desired,
            state,
            awaited,
            just_lost,
            gone,
            unsupported_versions,
            trust,
            labels,
            capacity,
            load: _,
            reserved_for: _,
        } = self;
        (id, name, endpoint, incarnation, desired, state)
            == (&other.id, &other.name, &other.endpoint, &other.incarnation, &other.desired, &other.state)
            && (awaited, just_lost, gone) == (&other.awaited, &other.just_lost, &other.gone)
            && (unsupported_versions, trust) == (&other.unsupported_versions, &other.trust)
            && (Arc::ptr_eq(labels, &other.labels) || labels == &other.labels)
            && capacity == &other.capacity
    }
}

/// Whether a worker is trusted to start what is given to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Trust {
    Full,
    /// It is tried with one task at a time.
    OnProbation(Failing),
    /// It is not tried for now.
    Quarantined(Failing),
}

/// Attempts that failed on a worker one after the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Failing {
    /// What the last one said.
    pub(crate) why: String,
    /// The team of all of them. `None`: they were of several, so that they count for every team.
    pub(crate) team: Option<String>,
}

impl Failing {
    /// Whether they count for `team`. `None`: for every team.
    pub(crate) fn counts_for(&self, team: Option<&str>) -> bool {
        self.team.is_none() || self.team.as_deref() == team
    }
}

/// An attempt that a worker could not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedThere {
    pub(crate) worker: WorkerId,
    pub(crate) failure: Failure,
}

/// What of a worker is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Slots: leases under which something runs, and which have not ended.
    pub(crate) tasks: u32,
    /// Those of them that are for checks.
    pub(crate) checks: u32,
    /// What was asked for by those leases.
    pub(crate) reserved: Resources,
    /// Containers that are kept beside those of leases, as the worker last said.
    pub(crate) kept_containers: u64,
    /// Volumes that are kept, as the worker last said.
    pub(crate) kept_volumes: u64,
}

impl Load {
    /// With one lease more that is for `kind` and asked for `requests`.
    pub(crate) fn with(mut self, kind: Kind, requests: &Resources) -> Self {
        if kind.takes_a_slot() {
            self.tasks += 1;
            self.checks += u32::from(kind == Kind::Check);
            self.reserved = self.reserved.and(requests);
        }
        self
    }

    /// With one lease less.
    pub(crate) fn without(mut self, kind: Kind, requests: &Resources) -> Self {
        if kind.takes_a_slot() {
            self.tasks = self.tasks.saturating_sub(1);
            self.checks = self.checks.saturating_sub(u32::from(kind == Kind::Check));
            self.reserved = self.reserved.less(requests);
        }
        self
    }

    /// Both together.
    pub(crate) fn and(self, other: &Self) -> Self {
        Self {
            tasks: self.tasks.saturating_add(other.tasks),
            checks: self.checks.saturating_add(other.checks),
            reserved: self.reserved.and(&other.reserved),
            kept_containers: self.kept_containers.saturating_add(other.kept_containers),
            kept_volumes: self.kept_volumes.saturating_add(other.kept_volumes),
        }
    }

    /// Containers: one of each lease, and those that are kept.
    pub(crate) fn containers(&self) -> u64 {
        self.kept_containers.saturating_add(u64::from(self.tasks))
    }

    /// Containers that are not for checks.
    pub(crate) fn build_containers(&self) -> u64 {
        self.containers().saturating_sub(u64::from(self.checks))
    }

    /// Volumes: at least one of each lease, and those that are kept.
    pub(crate) fn volumes(&self) -> u64 {
        self.kept_volumes.saturating_add(u64::from(self.tasks))
    }
}

/// Amounts of what a worker has. 0 asks for nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Resources {
    /// Thousandths of a processor.
    pub(crate) cpu_millis: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) disk_bytes: u64,
}

impl Resources {
    /// Both together.
    fn and(self, other: &Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_add(other.disk_bytes),
        }
    }

    fn less(self, other: &Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_sub(other.cpu_millis),
            memory_bytes: self.memory_bytes.saturating_sub(other.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_sub(other.disk_bytes),
        }
    }
}

impl From<ResourceRequests> for Resources {
    fn from(asked: ResourceRequests) -> Self {
        let ResourceRequests { cpu_millis, memory_bytes, disk_bytes } = asked;
        Self { cpu_millis, memory_bytes, disk_bytes }
    }
}

/// What is asked of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    pub(crate) shape: Arc<Shape>,
    /// Where alone it may be.
    pub(crate) only: Option<WorkerId>,
    /// Where it must not be.
    pub(crate) avoid: BTreeSet<WorkerId>,
    /// Where it could not be started: not there again.
    pub(crate) failed_on: Vec<FailedThere>,
    /// Where it shall be if that is possible, whatever the strategies say.
    pub(crate) prefer: BTreeSet<WorkerId>,
    /// Who asks: a workload, or a lease. Draws between equal workers, so that many who ask are spread evenly.
    pub(crate) asked_by: Uuid,
    /// What it is called while it waits: workers may be reserved for it by that.
    pub(crate) waits_as: Uuid,
}

/// What many may ask alike. Who of them is placed first is a matter of the queue alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) team: String,
    pub(crate) platform: String,
    pub(crate) tags: Vec<String>,
    /// What shall run there. `None`: nothing, bytes are moved.
    pub(crate) process: Option<Process>,
    pub(crate) requests: Resources,
    pub(crate) purpose: Purpose,
}

/// What a process asks of its worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) image_kind: Cow<'static, str>,
    /// Whose image the worker has to bring along.
    pub(crate) resource_type: Option<String>,
    pub(crate) capabilities: Vec<Cow<'static, str>>,
}

impl Default for Process {
    /// One in the root file system of its worker.
    fn default() -> Self {
        Self { image_kind: "host".into(), resource_type: None, capabilities: vec![] }
    }
}

/// Where one input is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Location {
    pub(crate) size_bytes: u64,
    pub(crate) workers: HashSet<WorkerId>,
}

impl Shape {
    /// What a workload asks of its worker.
    pub(crate) fn of(spec: &WorkloadSpec) -> Self {
        let mut capabilities = Vec::new();
        if spec.privileged {
            capabilities.push("privileged".into());
        }
        let Limits { memory_bytes, cpu_millis, pids } = spec.limits;
        let limits =
            [(memory_bytes, "limits-memory"), (cpu_millis, "limits-cpu"), (pids, "limits-pids")].into_iter();
        capabilities.extend(limits.filter(|(limit, _)| limit.is_some()).map(|(_, name)| name.into()));
        let network = match spec.network {
            Network::Private => "network-private",
            Network::None => "network-none",
            Network::Host => "network-host",
        };
        capabilities.push(network.into());
        // Whoever asks for the same waits in the same line, however he says it.
        let named: BTreeSet<&str> = spec.capabilities.iter().map(String::as_str).collect();
        for name in named {
            if !capabilities.iter().any(|known| known == name) {
                capabilities.push(name.to_owned().into());
            }
        }
        let resource_type = match &spec.image {
            Image::ResourceType(name) => Some(name.clone()),
            Image::Host | Image::Artifact(_) => None,
        };
        let has_inputs = !spec.artifacts().is_empty() || !spec.caches.is_empty();
        Self {
            team: spec.team.clone(),
            platform: spec.platform.clone(),
            tags: spec.tags.clone(),
            process: Some(Process { image_kind: spec.image.kind().into(), resource_type, capabilities }),
            requests: spec.requests.into(),
            purpose: Purpose::of(Kind::Task, has_inputs),
        }
    }

    /// The same, asked for by somebody.
    pub(crate) fn asked_by(self, asked_by: Uuid) -> Demand {
        Demand {
            shape: Arc::new(self),
            only: None,
            avoid: BTreeSet::new(),
            failed_on: Vec::new(),
            prefer: BTreeSet::new(),
            asked_by,
            waits_as: asked_by,
        }
    }
}

impl Demand {
    /// What a workload asks of its worker.
    pub(crate) fn of(spec: &WorkloadSpec, asked_by: Uuid) -> Self {
        Shape::of(spec).asked_by(asked_by)
    }

    /// The same, after attempts that could not be started.
    pub(crate) fn failed_on(self, failed_on: Vec<FailedThere>) -> Self {
        Self { failed_on, ..self }
    }
}

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
fn of_class(shape: &Shape, worker: &Worker) -> Vec<Refusal> {
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
    if worker.desired == Desired::Land {
        refusals.push(Refusal::Landing);
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
fn of_place(demand: &Demand, worker: &Worker) -> impl Iterator<Item = Refusal> + use<> {
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
fn of_load(shape: &Shape, worker: &Worker) -> Vec<Refusal> {
    let mut refusals = of_load_with(shape, worker, &worker.load);
    if worker.state == State::Lost {
        refusals.retain(|refusal| !refusal.passes());
    }
    refusals
}

/// The same, if this `load` were on it.
fn of_load_with(shape: &Shape, worker: &Worker, load: &Load) -> Vec<Refusal> {
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
struct Amount {
    of: Resource,
    asked: u64,
    has: u64,
    reserved: u64,
}

/// Of what is asked for, and counted.
fn amounts(shape: &Shape, worker: &Worker, load: &Load) -> impl Iterator<Item = Amount> {
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
fn has_room(worker: &Worker) -> bool {
    full_with(None, worker, &worker.load).next().is_none()
}

/// Why nothing more of `team` may run on `worker` if this `load` were on it, whatever is asked for. `None`: of no team at all.
fn full_with(team: Option<&str>, worker: &Worker, load: &Load) -> impl Iterator<Item = Refusal> + use<> {
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
