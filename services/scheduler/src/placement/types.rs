//! The types of placement: workers, load and demands. No database.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use domain::WorkerId;
use domain::worker::{Capacity, Incarnation, Labels};
use domain::workload::{
    Failure, Image, InlineStdin, Limits, Network, ResourceRequests, Stdin, WorkloadKind, WorkloadSpec,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The kind of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A task. Uses a slot, like every kind except `Transfer`.
    Task,
    /// Getting a version of a resource.
    Get,
    /// Putting a version of a resource.
    Put,
    /// Checking for versions of a resource.
    Check,
    /// A service that other containers use.
    Service,
    /// Moving bytes. Uses no slot.
    Transfer,
}

impl Kind {
    /// All kinds.
    pub(crate) const ALL: [Self; 6] =
        [Self::Task, Self::Get, Self::Put, Self::Check, Self::Service, Self::Transfer];

    /// Returns the kind of the leases of a workload.
    fn of(kind: WorkloadKind) -> Self {
        match kind {
            WorkloadKind::Task => Self::Task,
            WorkloadKind::Get => Self::Get,
            WorkloadKind::Put => Self::Put,
            WorkloadKind::Check => Self::Check,
        }
    }

    /// Returns whether a lease of this kind uses a slot.
    pub(crate) fn takes_a_slot(self) -> bool {
        self != Self::Transfer
    }
}

/// The desired state of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Desired {
    /// Take work.
    Run,
    /// Take no new work, possibly for a while.
    Cordon,
    /// Take no new work, and leave permanently.
    Retire,
}

/// The contact state of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// The gateway is in contact.
    Running,
    /// The worker was silent for the TTL, or its gateway disconnected.
    Stalled,
    /// The worker was silent for so long that its attempts are given up.
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
    /// Whether the worker was not in contact since a scheduler started, and has the TTL to return.
    pub(crate) awaited: bool,
    /// Whether the worker was lost minutes ago.
    pub(crate) just_lost: bool,
    /// Whether the worker was lost minutes ago and will not return itself: it was removed, is
    /// leaving, or is ephemeral.
    pub(crate) gone: bool,
    /// Protocol versions of the gateway, if this scheduler supports none of them.
    pub(crate) unsupported_versions: Vec<u32>,
    pub(crate) trust: Trust,
    pub(crate) labels: Arc<Labels>,
    pub(crate) capacity: Capacity,
    pub(crate) load: Load,
    /// The request for which the worker is reserved. Requests that could run elsewhere are refused
    /// until it is placed. Only [`crate::placement::Index`] sets this field.
    pub(crate) reserved_for: Option<Uuid>,
}

impl Worker {
    /// Returns whether both are equal except for load and reservation.
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

/// Whether a worker is trusted to start workloads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Trust {
    Full,
    /// The worker gets one task at a time.
    OnProbation(Failing),
    /// The worker gets no workload.
    Quarantined(Failing),
}

/// Consecutive failures on a worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Failing {
    /// The last failure.
    pub(crate) why: String,
    /// The team of all failures. `None`: several teams, so that the failures count for every team.
    pub(crate) team: Option<String>,
}

impl Failing {
    /// Returns whether the failures count for `team`. `None`: for every team.
    pub(crate) fn counts_for(&self, team: Option<&str>) -> bool {
        self.team.is_none() || self.team.as_deref() == team
    }
}

/// A worker on which an attempt could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedWorker {
    pub(crate) worker: WorkerId,
    pub(crate) failure: Failure,
}

/// The load of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Number of slots in use.
    pub(crate) tasks: u32,
    /// Number of these slots used by checks.
    pub(crate) checks: u32,
    /// Sum of the requested resources.
    pub(crate) reserved: Resources,
    /// Number of kept containers besides those of leases, as last reported.
    pub(crate) kept_containers: u64,
    /// Number of kept volumes, as last reported.
    pub(crate) kept_volumes: u64,
    /// Whether too little of the disk is free, as last reported.
    pub(crate) short_of_disk: bool,
}

impl Load {
    /// Returns the load with one more lease.
    pub(crate) fn with(mut self, kind: Kind, requests: &Resources) -> Self {
        if kind.takes_a_slot() {
            self.tasks += 1;
            self.checks += u32::from(kind == Kind::Check);
            self.reserved = self.reserved.and(requests);
        }
        self
    }

    /// Returns the load with one lease less.
    pub(crate) fn without(mut self, kind: Kind, requests: &Resources) -> Self {
        if kind.takes_a_slot() {
            self.tasks = self.tasks.saturating_sub(1);
            self.checks = self.checks.saturating_sub(u32::from(kind == Kind::Check));
            self.reserved = self.reserved.less(requests);
        }
        self
    }

    /// Returns the sum of two loads.
    pub(crate) fn and(self, other: &Self) -> Self {
        Self {
            tasks: self.tasks.saturating_add(other.tasks),
            checks: self.checks.saturating_add(other.checks),
            reserved: self.reserved.and(&other.reserved),
            kept_containers: self.kept_containers.saturating_add(other.kept_containers),
            kept_volumes: self.kept_volumes.saturating_add(other.kept_volumes),
            short_of_disk: self.short_of_disk || other.short_of_disk,
        }
    }

    /// Returns the number of containers: one for each slot, and the kept ones.
    pub(crate) fn containers(&self) -> u64 {
        self.kept_containers.saturating_add(u64::from(self.tasks))
    }

    /// Returns the number of containers without those of checks.
    pub(crate) fn build_containers(&self) -> u64 {
        self.containers().saturating_sub(u64::from(self.checks))
    }

    /// Returns the number of volumes: at least one for each slot, and the kept ones.
    pub(crate) fn volumes(&self) -> u64 {
        self.kept_volumes.saturating_add(u64::from(self.tasks))
    }
}

/// Amounts of resources. 0 requests nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Resources {
    /// Thousandths of a processor.
    pub(crate) cpu_millis: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) disk_bytes: u64,
}

impl Resources {
    /// Returns the sum of two amounts.
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
    fn from(requests: ResourceRequests) -> Self {
        let ResourceRequests { cpu_millis, memory_bytes, disk_bytes } = requests;
        Self { cpu_millis, memory_bytes, disk_bytes }
    }
}

/// The requirements of a request.
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    /// The kind of the lease.
    pub(crate) kind: Kind,
    pub(crate) shape: Arc<Shape>,
    /// The only worker that may take the request.
    pub(crate) only: Option<OnlyWorker>,
    /// Workers that must not take the request.
    pub(crate) avoid: BTreeSet<WorkerId>,
    /// Workers on which attempts failed, which are excluded.
    pub(crate) failed_on: Vec<FailedWorker>,
    /// Preferred workers, ranked before all strategies.
    pub(crate) prefer: BTreeSet<WorkerId>,
    /// The id of the workload or lease. Seeds the draw between equal workers, so that requests
    /// spread evenly.
    pub(crate) requester: Uuid,
    /// The id of the request in the queue, for which workers may be reserved.
    pub(crate) waits_as: Uuid,
}

/// The only worker that may take a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct OnlyWorker {
    pub(crate) id: WorkerId,
    /// Whether the request names the worker. Otherwise it is tied to a lease or containers there.
    pub(crate) is_named: bool,
}

impl OnlyWorker {
    /// The worker that the request names.
    pub(crate) fn named(id: WorkerId) -> Self {
        Self { id, is_named: true }
    }

    /// The worker of another lease, or of the owner of containers.
    pub(crate) fn tied(id: WorkerId) -> Self {
        Self { id, is_named: false }
    }
}

/// The part of a demand that many requests share. The order among these requests is the queue's
/// concern.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub(crate) team: String,
    pub(crate) platform: String,
    pub(crate) tags: Vec<String>,
    /// Requirements of the process. `None`: no process, only bytes are moved.
    pub(crate) process: Option<Process>,
    pub(crate) requests: Resources,
    pub(crate) purpose: Purpose,
}

/// Requirements of a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) image_kind: Cow<'static, str>,
    /// The resource type whose image the worker must provide.
    pub(crate) resource_type: Option<String>,
    pub(crate) capabilities: Vec<Cow<'static, str>>,
}

impl Default for Process {
    /// A process in the root file system of its worker.
    fn default() -> Self {
        Self { image_kind: "host".into(), resource_type: None, capabilities: vec![] }
    }
}

/// The location of one input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Location {
    pub(crate) size_bytes: u64,
    pub(crate) workers: HashSet<WorkerId>,
}

impl Shape {
    /// Derives the requirements of a workload.
    pub(crate) fn of(spec: &WorkloadSpec) -> Self {
        let mut capabilities = Vec::new();
        if spec.privileged {
            capabilities.push("privileged".into());
        }
        let limits = || spec.services.iter().map(|service| &service.limits).chain([&spec.limits]);
        let is_limited = |limit: fn(&Limits) -> Option<u64>| limits().any(|limits| limit(limits).is_some());
        let limits = [
            (is_limited(|limits| limits.memory_bytes), "limits-memory"),
            (is_limited(|limits| limits.cpu_millis), "limits-cpu"),
            (is_limited(|limits| limits.pids), "limits-pids"),
            (is_limited(|limits| limits.disk_bytes), "limits-disk"),
        ];
        capabilities
            .extend(limits.into_iter().filter(|(is_limited, _)| *is_limited).map(|(_, name)| name.into()));
        let network = match spec.network {
            Network::Private => "network-private",
            Network::None => "network-none",
            Network::Host => "network-host",
        };
        capabilities.push(network.into());
        if spec.terminal.is_some() {
            capabilities.push("terminal".into());
        }
        if let Stdin::Inline(InlineStdin(input)) = &spec.stdin
            && std::str::from_utf8(input).is_err()
        {
            capabilities.push("binary-input".into());
        }
        if !spec.services.is_empty() {
            capabilities.push("services".into());
            if spec.network != Network::Host {
                capabilities.push("network-container".into());
            }
        }
        // Equal requirements must compare equal, so that their requests share a line.
        let named: BTreeSet<&str> = spec.capabilities.iter().map(String::as_str).collect();
        for name in named {
            if !capabilities.iter().any(|known| known == name) {
                capabilities.push(name.to_owned().into());
            }
        }
        let resource_type = match &spec.image {
            Image::ResourceType(name) => Some(name.clone()),
            Image::Host | Image::Artifact(_) | Image::Reference(_) => None,
        };
        // Every worker with the capability `services` can run artifacts.
        let has_host_service = spec.services.iter().any(|service| service.image == Image::Host);
        let image_kind = match &spec.image {
            Image::Artifact(_) | Image::Reference(_) if has_host_service => Image::Host.kind(),
            image => image.kind(),
        };
        let has_inputs = !spec.artifacts().is_empty() || !spec.caches.is_empty();
        Self {
            team: spec.team.clone(),
            platform: spec.platform.clone(),
            tags: spec.tags.clone(),
            process: Some(Process { image_kind: image_kind.into(), resource_type, capabilities }),
            requests: spec.requests.into(),
            purpose: Purpose::of(Kind::of(spec.kind), has_inputs),
        }
    }

    /// Creates the demand of one request: a task, or a transfer if there is no process.
    pub(crate) fn requested_by(self, requester: Uuid) -> Demand {
        Demand {
            kind: if self.process.is_some() { Kind::Task } else { Kind::Transfer },
            shape: Arc::new(self),
            only: None,
            avoid: BTreeSet::new(),
            failed_on: Vec::new(),
            prefer: BTreeSet::new(),
            requester,
            waits_as: requester,
        }
    }
}

impl Demand {
    /// Derives the demand of a workload.
    pub(crate) fn of(spec: &WorkloadSpec, requester: Uuid) -> Self {
        // A submission resolves the name to an id ([`crate::app`]).
        let id = |text: &str| text.parse().unwrap_or(WorkerId::from_uuid(Uuid::nil()));
        let only = Some(spec.worker.as_str()).filter(|worker| !worker.is_empty());
        let only = only.map(|worker| OnlyWorker::named(id(worker)));
        Demand { kind: Kind::of(spec.kind), only, ..Shape::of(spec).requested_by(requester) }
    }

    /// Sets the workers on which attempts failed.
    pub(crate) fn failed_on(self, failed_on: Vec<FailedWorker>) -> Self {
        Self { failed_on, ..self }
    }
}

/// The purpose of a request, which selects its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Purpose {
    Build,
    WithoutInputs,
    Check,
}

impl Purpose {
    /// Returns the purpose, for Submit and Place alike. Checks have their own chain. Other
    /// requests, including transfers, use the chain for builds if they name an artifact (as input
    /// or image) or a task cache.
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
