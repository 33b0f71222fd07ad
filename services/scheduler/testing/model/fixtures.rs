//! The workers of the model, and the requirements of its workloads and leases, derived from their
//! ids.

use std::time::Duration;

use domain::worker::{Capacity, Labels, Marker, SessionClaims};
use domain::workload::{Input, Output, ResourceRequests, WorkloadSpec};
use domain::{ArtifactId, BuildId, GatewayInstance, LeaseId, MarkerId, WorkerId, WorkloadId};
use rpc::pb::scheduler as pb;
use rpc::token::TokenSigner;
use uuid::Uuid;

use super::MINUTE;
use crate::config::Config;
use crate::db::entity::lease::Kind;
use crate::workers::Registration;
use crate::workloads::test_support;

/// The names of the workers.
pub(super) const WORKERS: [&str; 6] = ["narrow", "small", "blue", "tagged", "darwin", "fleeting"];

/// The team of the artifact that some workloads use. Pins of other teams are rejected.
pub(super) const TEAM: &str = "main";

/// Weight of that team. Others have weight 1.
const HEAVY: u32 = 3;

/// Settings with which deadlines fall on odd multiples of five minutes. The clock moves by
/// multiples of ten.
pub(super) fn config(database: &str, store: &str) -> Config {
    Config {
        worker_ttl: 35 * MINUTE,
        stop_after: 65 * MINUTE,
        lost_after: 95 * MINUTE,
        lease_term: 45 * MINUTE,
        keep_finished: 995 * MINUTE,
        quarantine_after: 2,
        quarantine_for: 25 * MINUTE,
        quarantine_for_at_most: 105 * MINUTE,
        reconcile_grace: Duration::ZERO,
        remember_lost: Duration::ZERO,
        // The model has no reservations.
        queue_aging: Duration::ZERO,
        team_weights: [(TEAM.to_owned(), HEAVY)].into(),
        share_notifications: false,
        ..Config::new(database, store)
    }
}

/// Amounts of resources.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Amounts<T = u64> {
    pub(super) cpu_millis: T,
    pub(super) memory_bytes: T,
    pub(super) disk_bytes: T,
}

impl<T> Amounts<T> {
    pub(super) fn all(self) -> [T; 3] {
        [self.cpu_millis, self.memory_bytes, self.disk_bytes]
    }
}

impl Amounts {
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis + other.cpu_millis,
            memory_bytes: self.memory_bytes + other.memory_bytes,
            disk_bytes: self.disk_bytes + other.disk_bytes,
        }
    }

    /// Returns whether the capacity suffices.
    pub(super) fn fit(self, has: Amounts<Option<u64>>) -> bool {
        self.all().into_iter().zip(has.all()).all(|(amount, has)| has.is_none_or(|has| amount <= has))
    }

    /// Returns whether the capacity suffices beside `others`. A request for nothing always fits.
    pub(super) fn fit_beside(self, others: Self, has: Amounts<Option<u64>>) -> bool {
        let amounts = self.all().into_iter().zip(others.and(self).all()).zip(has.all());
        let short = |((amount, together), has): ((u64, u64), Option<u64>)| {
            amount > 0 && has.is_some_and(|has| together > has)
        };
        !amounts.into_iter().any(short)
    }
}

/// The attributes of a worker, by its name.
pub(super) struct Traits {
    pub(super) platform: &'static str,
    pub(super) team: Option<&'static str>,
    pub(super) tags: &'static [&'static str],
    pub(super) capabilities: &'static [&'static str],
    pub(super) max_tasks: Option<u32>,
    /// Capacity. `None`: not declared.
    pub(super) has: Amounts<Option<u64>>,
    /// Whether the worker is removed once it is lost.
    pub(super) ephemeral: bool,
}

pub(super) fn traits(name: &str) -> Traits {
    let plain = Traits {
        platform: "linux",
        team: None,
        tags: &[],
        capabilities: &["stop-after"],
        max_tasks: Some(2),
        has: Amounts::default(),
        ephemeral: false,
    };
    let has = Amounts::default();
    match name {
        "narrow" => Traits { max_tasks: Some(1), ..plain },
        "small" => {
            let has = Amounts { memory_bytes: Some(25), disk_bytes: Some(30), ..has };
            Traits { max_tasks: Some(3), has, ..plain }
        }
        "blue" => Traits { team: Some("blue"), has: Amounts { cpu_millis: Some(30), ..has }, ..plain },
        "tagged" => {
            let has = Amounts { disk_bytes: Some(20), ..has };
            Traits { tags: &["gpu"], has, ephemeral: true, ..plain }
        }
        // A worker that does not enforce `stop_after`, so attempts continue when it is lost.
        "fleeting" => Traits { max_tasks: Some(1), capabilities: &[], ephemeral: true, ..plain },
        "darwin" => {
            let has = Amounts { cpu_millis: Some(30), ..has };
            Traits { platform: "darwin", capabilities: &[], max_tasks: None, has, ..plain }
        }
        other => panic!("no worker {other}"),
    }
}

pub(super) fn registration(
    name: &str,
    instance: GatewayInstance,
    marker: MarkerId,
    last: Option<SessionClaims>,
) -> Registration {
    let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    let traits = traits(name);
    Registration {
        name: name.to_owned(),
        instance,
        ended: None,
        last,
        marker: Marker { id: marker, boot: String::new() },
        endpoint: "http://127.0.0.1:1".to_owned(),
        labels: Labels {
            platform: traits.platform.to_owned(),
            tags: owned(traits.tags),
            team: traits.team.map(str::to_owned),
            image_kinds: owned(&["host"]),
            capabilities: owned(&[traits.capabilities, &["network-private"]].concat()),
            resource_types: vec![],
            zone: String::new(),
        },
        capacity: Capacity {
            max_tasks: traits.max_tasks,
            cpu_millis: traits.has.cpu_millis,
            memory_bytes: traits.has.memory_bytes,
            disk_bytes: traits.has.disk_bytes.unwrap_or(0),
            ..Capacity::default()
        },
        ephemeral: traits.ephemeral,
    }
}

/// Converts a registration to its message.
pub(super) fn registration_on_stream(registration: &Registration, signer: &TokenSigner) -> pb::Registration {
    let Registration { name, instance, ended, last, marker, endpoint, labels, capacity, ephemeral } =
        registration.clone();
    pb::Registration {
        worker_name: name,
        gateway_instance: instance.to_string(),
        ended_instance: ended.map(|ended| ended.to_string()).unwrap_or_default(),
        session_credential: last.map(|last| signer.sign(&last)).unwrap_or_default(),
        marker: Some(pb::Marker { marker_id: marker.id.to_string(), boot_id: marker.boot }),
        endpoint,
        labels: Some(pb::WorkerLabels {
            platform: labels.platform,
            tags: labels.tags,
            team: labels.team.unwrap_or_default(),
            image_kinds: labels.image_kinds,
            capabilities: labels.capabilities,
            resource_types: vec![],
            ephemeral,
            zone: labels.zone,
        }),
        capacity: Some(pb::Capacity {
            max_tasks: capacity.max_tasks.unwrap_or(0),
            cpu_millis: capacity.cpu_millis.unwrap_or(0),
            memory_bytes: capacity.memory_bytes.unwrap_or(0),
            disk_bytes: capacity.disk_bytes,
            ..pb::Capacity::default()
        }),
        protocol_versions: vec![1],
    }
}

/// The requirements of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Requirements {
    pub(super) team: &'static str,
    pub(super) platform: &'static str,
    pub(super) tags: &'static [&'static str],
    pub(super) capabilities: &'static [&'static str],
    pub(super) takes_a_slot: bool,
    pub(super) amounts: Amounts,
    /// Whether the request names locations of inputs.
    pub(super) has_inputs: bool,
    /// Workers on which attempts failed.
    pub(super) failed_on: Vec<WorkerId>,
    /// The only allowed worker.
    pub(super) only: Option<WorkerId>,
}

/// What the artifact store keeps for a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Uses {
    Nothing,
    Input,
    Build,
    Output,
}

/// Returns a random byte of an id.
fn byte(id: Uuid, number: usize) -> u8 {
    id.as_bytes()[9 + number]
}

fn team(id: Uuid) -> &'static str {
    if byte(id, 0).is_multiple_of(3) { "blue" } else { TEAM }
}

/// Derives the requirements of a workload from its id.
pub(super) fn requirements_of_workload(id: WorkloadId) -> Requirements {
    let id = id.uuid();
    let (platform, tags, capabilities): (_, &[_], &[_]) = match byte(id, 1) % 10 {
        0 => ("darwin", &[], &[]),
        1 => ("darwin", &[], &["stop-after"]),
        2 | 3 => ("linux", &["gpu"], &[]),
        4 => ("linux", &[], &["stop-after"]),
        _ => ("linux", &[], &[]),
    };
    let amount = |by: u8, of: [u64; 4]| of[usize::from(byte(id, 2) / by % 4)];
    let amounts = Amounts {
        memory_bytes: amount(1, [0, 0, 10, 20]),
        cpu_millis: amount(4, [0, 0, 15, 31]),
        disk_bytes: amount(16, [0, 0, 15, 20]),
    };
    Requirements {
        team: team(id),
        platform,
        tags,
        capabilities,
        takes_a_slot: true,
        amounts,
        has_inputs: matches!(uses(WorkloadId::from_uuid(id)), Uses::Input),
        failed_on: vec![],
        only: None,
    }
}

/// Derives the requirements of a lease from its id and kind.
pub(super) fn requirements_of_lease(id: LeaseId, kind: Kind) -> Requirements {
    let id = id.uuid();
    let takes_a_slot = kind.takes_a_slot();
    let tags: &[_] = if byte(id, 1).is_multiple_of(4) { &["gpu"] } else { &[] };
    let amount = |by: u8, of: [u64; 2]| of[usize::from(byte(id, 2) / by % 2)];
    let amounts = Amounts {
        memory_bytes: amount(1, [0, 10]),
        cpu_millis: amount(2, [0, 15]),
        disk_bytes: amount(4, [0, 10]),
    };
    let amounts = if takes_a_slot { amounts } else { Amounts::default() };
    Requirements {
        team: team(id),
        platform: "linux",
        tags,
        capabilities: &[],
        takes_a_slot,
        amounts,
        has_inputs: kind != Kind::Check && !inputs_of_lease(LeaseId::from_uuid(id)).is_empty(),
        failed_on: vec![],
        only: None,
    }
}

/// Derives the locations and sizes of a lease's inputs from its id.
pub(super) fn inputs_of_lease(id: LeaseId) -> Vec<(u64, &'static [&'static str])> {
    match byte(id.uuid(), 1) / 4 % 4 {
        0 => vec![(10, &["narrow", "blue"]), (20, &["small"])],
        1 | 2 => vec![(10, &["fleeting"]), (10, &["tagged", "fleeting"])],
        _ => vec![],
    }
}

/// Derives the preferred workers of a lease from its id.
pub(super) fn preferred_by_lease(id: LeaseId) -> &'static [&'static str] {
    match byte(id.uuid(), 1) / 16 % 4 {
        0 => &["small", "tagged"],
        1 => &["fleeting"],
        _ => &[],
    }
}

/// Mostly equal, so that other criteria decide the order.
const PRIORITIES: [i64; 5] = [0, 0, 0, 1, 2];

pub(super) fn priority_of_workload(id: WorkloadId) -> i64 {
    PRIORITIES[usize::from(byte(id.uuid(), 6) / 2 % 5)]
}

pub(super) fn priority_of_lease(id: LeaseId) -> i64 {
    PRIORITIES[usize::from(byte(id.uuid(), 5) % 5)]
}

/// Returns the weight of a team.
pub(super) fn weight(team: &str) -> u32 {
    if team == TEAM { HEAVY } else { 1 }
}

/// Derives the owner of a lease's containers from its id. Empty: none.
pub(super) fn owner_of_lease(id: LeaseId) -> &'static str {
    match byte(id.uuid(), 4) % 8 {
        0 => "one",
        1 => "other",
        _ => "",
    }
}

/// Returns whether the lease uses the artifact.
pub(super) fn lease_has_input(id: LeaseId) -> bool {
    byte(id.uuid(), 3).is_multiple_of(4)
}

pub(super) fn uses(id: WorkloadId) -> Uses {
    match byte(id.uuid(), 3) % 6 {
        0 => Uses::Input,
        1 => Uses::Build,
        2 => Uses::Output,
        _ => Uses::Nothing,
    }
}

/// Returns the build that ends with a workload.
pub(super) fn build(id: WorkloadId) -> BuildId {
    BuildId::from_uuid(id.uuid())
}

/// Derives the spec of a workload from its id. `other`: a different spec with the same id.
pub(super) fn spec(id: WorkloadId, input: ArtifactId, other: bool) -> WorkloadSpec {
    let requirements = requirements_of_workload(id);
    let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
    let seen = |uses: Uses| self::uses(id) == uses;
    let minutes = |number: u32| Some(number * MINUTE);
    let id_bytes = id.uuid();
    let read =
        Input { name: "in".to_owned(), artifact: input, path: b"/workspace/in".to_vec(), read_only: true };
    let made = Output { name: "out".to_owned(), path: b"/workspace/out".to_vec(), owners: vec![] };
    WorkloadSpec {
        team: requirements.team.to_owned(),
        platform: requirements.platform.to_owned(),
        tags: owned(requirements.tags),
        capabilities: owned(requirements.capabilities),
        requests: {
            let Amounts { cpu_millis, memory_bytes, disk_bytes } = requirements.amounts;
            ResourceRequests { cpu_millis, memory_bytes, disk_bytes }
        },
        interruptible: byte(id_bytes, 4).is_multiple_of(3),
        retries: u32::from(byte(id_bytes, 4) / 3 % 3),
        queue_timeout: byte(id_bytes, 5).is_multiple_of(2).then_some(205 * MINUTE),
        run_timeout: byte(id_bytes, 5).is_multiple_of(3).then_some(55 * MINUTE),
        start_timeout: if byte(id_bytes, 6).is_multiple_of(2) { minutes(25) } else { None },
        priority: i32::try_from(priority_of_workload(id)).expect("low"),
        inputs: if seen(Uses::Input) { vec![read] } else { vec![] },
        outputs: if seen(Uses::Output) { vec![made] } else { vec![] },
        build: seen(Uses::Build).then(|| build(id)),
        command: if other { vec![b"false".to_vec()] } else { vec![b"true".to_vec()] },
        ..test_support::spec()
    }
}
