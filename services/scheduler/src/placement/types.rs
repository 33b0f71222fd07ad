//! What placement knows: workers, their load, and what is asked of them. No database.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use domain::WorkerId;
use domain::worker::{Capacity, Incarnation, Labels};
use domain::workload::{Failure, Image, Limits, Network, ResourceRequests, WorkloadSpec};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A task: as any but `Transfer`, it takes a slot.
    Task,
    /// Getting a version of a resource.
    Get,
    /// Making a version of a resource.
    Put,
    /// Looking for versions of a resource.
    Check,
    /// What others use while they run.
    Service,
    /// Moving bytes: takes no slot.
    Transfer,
}

impl Kind {
    /// Every one.
    pub(crate) const ALL: [Self; 6] =
        [Self::Task, Self::Get, Self::Put, Self::Check, Self::Service, Self::Transfer];

    /// Whether something runs under it.
    pub(crate) fn takes_a_slot(self) -> bool {
        self != Self::Transfer
    }
}

/// What a worker shall do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Desired {
    /// Take work.
    Run,
    /// Take no more work, and come back later.
    Cordon,
    /// Take no more work, for good.
    Retire,
}

/// Whether a worker is in contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Its gateway is in contact.
    Running,
    /// It has been silent for the TTL, or its gateway said goodbye.
    Stalled,
    /// It has been silent for so long that nothing of it can be running.
    Lost,
}

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
    /// Who waits for it to have room, and gets what could be elsewhere there, but nobody else until then. Only an [`crate::placement::Index`] knows.
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
    pub(super) fn and(self, other: &Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_add(other.disk_bytes),
        }
    }

    pub(super) fn less(self, other: &Self) -> Self {
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

/// Which chain compares workers for something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Purpose {
    Build,
    WithoutInputs,
    Check,
}

impl Purpose {
    /// The one rule for all that is placed, by Submit and by Place. Checks have a chain of their own, whatever they use. Of all else, transfers
    /// included, what has inputs goes by that for builds: it names an artifact, be it its image, or a task cache. What names none goes by the other.
    pub(crate) fn of(kind: Kind, has_inputs: bool) -> Self {
        if kind == Kind::Check {
            Self::Check
        } else if has_inputs {
            Self::Build
        } else {
            Self::WithoutInputs
        }
    }
}
