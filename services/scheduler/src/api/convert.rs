//! Conversions between domain types and protobuf types.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::worker::{Capacity, Labels, ResourceType};
use domain::{Timestamp, WorkloadId};
use rpc::pb::scheduler as pb;
use rpc::{Message, invalid_field, timestamp};
use tonic::Status;

use crate::db::entity::lease::{Kind, StopReason};
use crate::db::entity::removed_worker::{self, WorkerEnd};
use crate::db::entity::{worker, workload};
use crate::insight::capacity;
use crate::insight::explain::{Explanation, Verdict};
use crate::leases::{Lease, LeaseEnd, LeaseState};
use crate::lifecycle::departure::OpenLeases;
use crate::outcome::Ending;
use crate::placement::{
    self, Answer, DetailFilter, Group, Opinion, Outlook, Ranking, Refusal, Resources, Strategy,
};
use crate::workers::Worker;
use crate::workloads::Workload;
use crate::workloads::events::{AttemptLocation, Event, InputProgress, Revision};

pub(super) fn location(location: AttemptLocation) -> pb::AttemptLocation {
    pb::AttemptLocation {
        worker_id: location.worker.to_string(),
        worker_name: location.worker_name,
        gateway_endpoint: location.gateway_endpoint,
        attempt_id: location.attempt.to_string(),
    }
}

/// `result`: the result of the workload, for the event `finished`.
pub(super) fn revision(revision: Revision, result: Option<Bytes>) -> pb::WatchResponse {
    use pb::watch_response::Event as Pb;
    let event = match revision.event {
        Event::Queued { reasons } => Pb::Queued(pb::Queued { reasons }),
        Event::Placed { location: at, reason } => {
            Pb::Placed(pb::Placed { location: Some(location(at)), reason })
        }
        Event::Preparing => Pb::Preparing(pb::Preparing {}),
        Event::Materializing { inputs } => {
            let inputs = inputs.into_iter().map(|input| {
                let InputProgress { name, bytes_done, bytes_total, waits_for, relayed } = input;
                pb::InputProgress { name, bytes_done, bytes_total, waits_for, relayed }
            });
            Pb::Materializing(pb::Materializing { inputs: inputs.collect() })
        }
        Event::Running { location: at } => Pb::Running(pb::Running { location: Some(location(at)) }),
        Event::Publishing => Pb::Publishing(pb::Publishing {}),
        Event::Finished { ending, location: at } => {
            let Ending { outcome, exit, failure, outputs, caches: _, usage, notes, has_result: _ } = ending;
            Pb::Finished(pb::Finished {
                outcome: rpc::outcome(outcome).into(),
                exit: exit.map(rpc::exit),
                failure: failure.as_ref().map(rpc::failure),
                outputs: outputs.iter().map(rpc::published_output).collect(),
                location: at.map(location),
                usage: usage.as_ref().map(rpc::usage),
                notes,
                result,
            })
        }
    };
    pb::WatchResponse { revision: revision.revision, at: Some(timestamp(revision.at)), event: Some(event) }
}

pub(super) fn workload_state(state: workload::State) -> pb::WorkloadState {
    match state {
        workload::State::Accepted => pb::WorkloadState::Accepted,
        workload::State::Pending => pb::WorkloadState::Pending,
        workload::State::Assigned => pb::WorkloadState::Assigned,
        workload::State::Starting => pb::WorkloadState::Starting,
        workload::State::Running => pb::WorkloadState::Running,
        workload::State::Settling => pb::WorkloadState::Settling,
        workload::State::Finished => pb::WorkloadState::Finished,
    }
}

/// Parses a filter. 0 matches any state.
pub(super) fn parse_workload_state(field: &str, state: i32) -> Result<Option<workload::State>, Status> {
    let state = pb::WorkloadState::try_from(state)
        .map_err(|_| invalid_field(field, format!("{state} is not a value of this enum")))?;
    Ok(match state {
        pb::WorkloadState::Unspecified => None,
        pb::WorkloadState::Accepted => Some(workload::State::Accepted),
        pb::WorkloadState::Pending => Some(workload::State::Pending),
        pb::WorkloadState::Assigned => Some(workload::State::Assigned),
        pb::WorkloadState::Starting => Some(workload::State::Starting),
        pb::WorkloadState::Running => Some(workload::State::Running),
        pb::WorkloadState::Settling => Some(workload::State::Settling),
        pb::WorkloadState::Finished => Some(workload::State::Finished),
    })
}

/// Parses a filter. 0 matches any outcome.
pub(super) fn parse_outcome(field: &str, outcome: i32) -> Result<Option<workload::Outcome>, Status> {
    let outcome = pb::Outcome::try_from(outcome)
        .map_err(|_| invalid_field(field, format!("{outcome} is not a value of this enum")))?;
    Ok(match outcome {
        pb::Outcome::Unspecified => None,
        pb::Outcome::Succeeded => Some(workload::Outcome::Succeeded),
        pb::Outcome::Failed => Some(workload::Outcome::Failed),
        pb::Outcome::Errored => Some(workload::Outcome::Errored),
        pb::Outcome::Aborted => Some(workload::Outcome::Aborted),
    })
}

pub(super) fn workload(workload: Workload) -> pb::Workload {
    let ending = workload.ending;
    let outcome = ending.as_ref().map_or(pb::Outcome::Unspecified, |ending| rpc::outcome(ending.outcome));
    pb::Workload {
        workload_id: workload.id.to_string(),
        spec: Some(rpc::spec::without_secrets(rpc::spec::to_proto(&workload.spec))),
        state: workload_state(workload.state).into(),
        submitted_at: Some(timestamp(workload.submitted_at)),
        started_at: workload.started_at.map(timestamp),
        finished_at: workload.finished_at.map(timestamp),
        location: workload.location.map(location),
        outcome: outcome.into(),
        exit: ending.as_ref().and_then(|ending| ending.exit).map(rpc::exit),
        failure: ending.as_ref().and_then(|ending| ending.failure.as_ref()).map(rpc::failure),
        outputs: ending.iter().flat_map(|ending| &ending.outputs).map(rpc::published_output).collect(),
        waiting_for: workload.waiting_for,
        usage: ending.as_ref().and_then(|ending| ending.usage.as_ref()).map(rpc::usage),
        retried: workload.retried,
        stopping: workload.stopping.map(stop_reason).unwrap_or_default().into(),
        abridged: workload.abridged,
        result: workload.result,
        notes: ending.map(|ending| ending.notes).unwrap_or_default(),
    }
}

fn labels(labels: Labels, ephemeral: bool) -> pb::WorkerLabels {
    pb::WorkerLabels {
        platform: labels.platform,
        tags: labels.tags,
        team: labels.team.unwrap_or_default(),
        image_kinds: labels.image_kinds,
        capabilities: labels.capabilities,
        resource_types: labels.resource_types.into_iter().map(resource_type).collect(),
        ephemeral,
        zone: labels.zone,
    }
}

/// `ttl`: the time within which a worker that is out of contact since a start may return.
pub(super) fn worker(worker: Worker, ttl: Duration, now: Timestamp) -> pb::Worker {
    let refusals = placement::standing_refusals(&worker.placed).iter().map(refusal).collect();
    let Worker { placed, session, kept, last_contact_at, awaited_since, .. } = worker;
    let desired = match placed.desired {
        worker::Desired::Run => pb::DesiredWorkerState::Run,
        worker::Desired::Cordon => pb::DesiredWorkerState::Cordon,
        worker::Desired::Retire => pb::DesiredWorkerState::Retire,
    };
    let state = match placed.state {
        worker::State::Running => pb::WorkerState::Running,
        worker::State::Stalled => pb::WorkerState::Stalled,
        worker::State::Lost => pb::WorkerState::Lost,
    };
    pb::Worker {
        worker_id: placed.id.to_string(),
        name: placed.name,
        state: state.into(),
        incarnation: placed.incarnation.0,
        session: session.0,
        gateway_endpoint: placed.endpoint,
        labels: Some(labels(Arc::unwrap_or_clone(placed.labels), worker.ephemeral)),
        capacity: Some(pb::Capacity {
            max_tasks: placed.capacity.max_tasks.unwrap_or(0),
            disk_bytes: placed.capacity.disk_bytes,
            max_containers: placed.capacity.max_containers.unwrap_or(0),
            max_volumes: placed.capacity.max_volumes.unwrap_or(0),
            cpu_millis: placed.capacity.cpu_millis.unwrap_or(0),
            memory_bytes: placed.capacity.memory_bytes.unwrap_or(0),
            min_free_disk_bytes: placed.capacity.min_free_disk_bytes,
        }),
        active_tasks: placed.load.tasks,
        containers: kept.containers,
        volumes: kept.volumes,
        disk_free_bytes: kept.disk_free_bytes,
        last_contact_at: Some(timestamp(last_contact_at)),
        awaited: awaited_since.is_some_and(|since| now.since(since) < ttl),
        desired: desired.into(),
        drained_at: worker.landed_at.map(timestamp),
        interrupt_at: worker.interrupt_at.map(timestamp),
        leases: worker.load.leases,
        uninterruptible_leases: worker.load.uninterruptible,
        blocked_by: worker.blocked_by,
        refusals,
        failures: worker.failures,
        last_failure: worker.last_failure,
        quarantined_until: worker.quarantined_until.map(timestamp),
        failed_team: worker.failed_team.unwrap_or_default(),
        unsupported_versions: worker.unsupported_versions,
        reserved: requests(placed.load.reserved),
    }
}

pub(super) fn to_gone_worker(gone: removed_worker::Model) -> pb::RemovedWorker {
    let how = match gone.how {
        WorkerEnd::Retired => pb::WorkerEnd::Retired,
        WorkerEnd::Pruned => pb::WorkerEnd::Pruned,
        WorkerEnd::Expired => pb::WorkerEnd::Expired,
    };
    pb::RemovedWorker {
        worker_id: gone.id.to_string(),
        name: gone.name,
        end: how.into(),
        at: Some(timestamp(Timestamp(gone.removed_at))),
    }
}

/// Default number of workers that an explanation describes individually.
const DEFAULT_EXPLAINED: usize = 20;

/// Maximum number of workers that an explanation describes individually.
const MAX_EXPLAINED: u32 = 10_000;

/// Maximum number of workers that a request may name.
const MAX_NAMED: usize = 1000;

pub(super) fn parse_detail_filter(max_workers: u32, workers: Vec<String>) -> Result<DetailFilter, Status> {
    if max_workers > MAX_EXPLAINED {
        return Err(invalid_field("max_workers", format!("must be 0 to {MAX_EXPLAINED}")));
    }
    if workers.len() > MAX_NAMED {
        return Err(invalid_field("workers", format!("must be at most {MAX_NAMED}")));
    }
    let most = match (usize::try_from(max_workers).unwrap_or(0), workers.len()) {
        (0, named) => named.max(DEFAULT_EXPLAINED),
        (most, _) => most,
    };
    let only = (!workers.is_empty()).then(|| {
        let ids = workers.iter().filter_map(|worker| worker.parse().ok()).collect();
        (ids, workers.into_iter().collect())
    });
    Ok(DetailFilter { most, only })
}

pub(super) fn explanation(explanation: Explanation) -> pb::ExplainResponse {
    let verdict = match explanation.verdict {
        Verdict::Placed => pb::Verdict::Placed,
        Verdict::NotNow => pb::Verdict::NotNow,
        Verdict::Never => pb::Verdict::Never,
    };
    let Outlook { known, gone, willing, opinions, groups, pace: _ } = explanation.outlook;
    pb::ExplainResponse {
        verdict: verdict.into(),
        queue_position: explanation.position,
        workers: opinions.into_iter().map(opinion).collect(),
        unblocked_by: explanation.unblocked_by,
        summary: explanation.summary,
        expected_wait: explanation.expected_wait.map(rpc::duration),
        expected_wait_basis: explanation.expected_wait_basis,
        workers_known: known as u64,
        workers_eligible: willing as u64,
        groups: groups.into_iter().map(group).collect(),
        workers_gone: gone as u64,
    }
}

fn opinion(opinion: Opinion) -> pb::WorkerExplanation {
    let (refusals, standing) = match opinion.answer {
        Answer::Would(standing) => (Vec::new(), Some(standing)),
        Answer::WouldNot(refusals) => (refusals.iter().map(refusal).collect(), None),
    };
    let (standing, scores) = standing.map_or_else(Default::default, |Ranking { words, scores }| {
        let score =
            |(strategy, value): (Strategy, u64)| pb::StrategyScore { strategy: strategy.to_string(), value };
        (words, scores.into_iter().map(score).collect())
    });
    pb::WorkerExplanation {
        worker_id: opinion.worker.to_string(),
        worker_name: opinion.name,
        refusals,
        standing,
        scores,
    }
}

fn group(group: Group) -> pb::RefusingWorkers {
    let of_many = |one: &Refusal| match group.count {
        1 => refusal(one),
        _ => pb::PlacementRefusal {
            message: one.of_many(),
            ended_by: one.ended_by_of_many(),
            limit: None,
            ..refusal(one)
        },
    };
    let refusals = group.refusals.iter().map(of_many).collect();
    pb::RefusingWorkers { refusals, count: group.count as u64, names: group.names }
}

fn refusal(refusal: &Refusal) -> pb::PlacementRefusal {
    let duration = if refusal.passes() { pb::RefusalDuration::Passing } else { pb::RefusalDuration::Lasting };
    pb::PlacementRefusal {
        reason: refusal.code().to_owned(),
        message: refusal.to_string(),
        duration: duration.into(),
        ended_by: refusal.ended_by(),
        limit: refusal.limit().map(|(of, limit, amount)| pb::ReachedLimit {
            resource: of.to_owned(),
            limit,
            amount,
        }),
        labels: refusal.labels(),
    }
}

pub(super) fn parse_demand(request: &pb::GetDemandRequest) -> Result<capacity::CapacityQuery, Status> {
    let bounded = |field: &str, count: u32, default: usize| match usize::try_from(count) {
        Ok(0) => Ok(default),
        Ok(count) if count <= MAX_NAMED => Ok(count),
        _ => Err(invalid_field(field, format!("must be at most {MAX_NAMED}"))),
    };
    let replicas = pb::ReplicaCheck::try_from(request.replica_check).map_err(|_| {
        invalid_field("replica_check", format!("{} is not a value of this enum", request.replica_check))
    })?;
    Ok(capacity::CapacityQuery {
        shapes: bounded("max_shapes", request.max_shapes, 100)?,
        removable: bounded("max_removable", request.max_removable, 10)?,
        replicas: replicas == pb::ReplicaCheck::Each,
    })
}

/// Converts the stop reason of a lease.
pub(super) fn stop_reason(reason: StopReason) -> pb::StopReason {
    match reason {
        StopReason::Cancelled => pb::StopReason::Cancelled,
        StopReason::StartTimeout => pb::StopReason::StartTimeout,
        StopReason::RunTimeout => pb::StopReason::RunTimeout,
        StopReason::Interrupted => pb::StopReason::Interrupted,
        StopReason::WorkerLost => pb::StopReason::WorkerLost,
        StopReason::Released => pb::StopReason::Released,
        StopReason::Expired => pb::StopReason::Expired,
    }
}

pub(super) fn lease(lease: Lease) -> pb::Lease {
    let kind = match lease.kind {
        Kind::Transfer => pb::PlacementKind::Transfer,
        Kind::Task => pb::PlacementKind::Task,
        Kind::Get => pb::PlacementKind::Get,
        Kind::Put => pb::PlacementKind::Put,
        Kind::Check => pb::PlacementKind::Check,
        Kind::Service => pb::PlacementKind::Service,
    };
    let (state, ended_at, end) = match lease.state {
        LeaseState::Granted => (pb::LeaseState::Granted, None, pb::LeaseEnd::Unspecified),
        LeaseState::Ending => (pb::LeaseState::Ending, None, pb::LeaseEnd::Unspecified),
        LeaseState::Ended(at, end) => {
            let end = match end {
                LeaseEnd::Released => pb::LeaseEnd::Released,
                LeaseEnd::Reported => pb::LeaseEnd::Reported,
                LeaseEnd::Expired => pb::LeaseEnd::Expired,
                LeaseEnd::Lost => pb::LeaseEnd::Lost,
                LeaseEnd::Stopped => pb::LeaseEnd::Stopped,
            };
            (pb::LeaseState::Ended, Some(at), end)
        }
    };
    let (workload_id, attempt_id) = match lease.claims.attempt {
        Some((workload, attempt)) => (workload.to_string(), attempt.to_string()),
        None => Default::default(),
    };
    pb::Lease {
        lease_id: lease.claims.lease.to_string(),
        team: lease.claims.team,
        kind: kind.into(),
        state: state.into(),
        worker_id: lease.claims.worker.to_string(),
        worker_name: lease.worker_name,
        incarnation: lease.claims.incarnation.0,
        workload_id,
        attempt_id,
        owner: lease.owner,
        requests: requests(lease.reserved),
        granted_at: Some(timestamp(lease.granted_at)),
        expires_at: lease.expires_at.map(timestamp),
        stop_reason: lease.stop_reason.map(stop_reason).unwrap_or_default().into(),
        ended_at: ended_at.map(timestamp),
        end: end.into(),
    }
}

/// Converts reserved amounts. `None` if nothing is reserved.
fn requests(resources: Resources) -> Option<pb::ResourceRequests> {
    let Resources { cpu_millis, memory_bytes, disk_bytes } = resources;
    (resources != Resources::default()).then_some(pb::ResourceRequests {
        cpu_millis,
        memory_bytes,
        disk_bytes,
    })
}

pub(super) fn feed(feed: capacity::Feed, now: Timestamp) -> pb::GetDemandResponse {
    pb::GetDemandResponse {
        waiting: feed.waiting as u64,
        waiting_unplaceable: feed.for_none as u64,
        oldest_since: feed.oldest.map(timestamp),
        demand: first_mebibyte(feed.demand.into_iter().map(waiting_shape)),
        supply: first_mebibyte(feed.supply.into_iter().map(worker_shape)),
        removable: feed.removable.into_iter().map(|worker| removable(worker, now)).collect(),
        refused: first_mebibyte(feed.refused.into_iter().map(waiting_shape)),
    }
}

/// Returns the first shapes, up to 1 MiB in total. Clients decode 4 MiB by default.
fn first_mebibyte<M: rpc::Message>(shapes: impl Iterator<Item = M>) -> Vec<M> {
    let mut bytes = 0;
    let fits = |shape: &M| {
        bytes += shape.encoded_len();
        bytes <= 1 << 20
    };
    shapes.take_while(fits).collect()
}

fn waiting_shape(waiting: capacity::WaitingDemand) -> pb::WaitingShape {
    let shape = &*waiting.shape;
    let process = shape.process.as_ref().map(|process| pb::ProcessRequirements {
        image_kind: process.image_kind.clone().into_owned(),
        resource_type: process.resource_type.clone().unwrap_or_default(),
        capabilities: process.capabilities.iter().map(|name| name.clone().into_owned()).collect(),
    });
    let team_workers = match waiting.uses_own_workers_only {
        true => pb::TeamWorkers::Own,
        false => pb::TeamWorkers::Any,
    };
    pb::WaitingShape {
        team: shape.team.clone(),
        platform: shape.platform.clone(),
        tags: shape.tags.clone(),
        process,
        requests: requests(shape.requests),
        team_workers: team_workers.into(),
        count: waiting.count as u64,
        count_unplaceable: waiting.for_none as u64,
        oldest_since: Some(timestamp(waiting.oldest)),
        waits_for: waiting.waits_for.to_owned(),
        never_for: waiting.never_for,
    }
}

fn worker_shape(supply: capacity::Supply) -> pb::WorkerShape {
    let capacity::Supply { labels, workers, in_service, idle, slots_in_use, slots_free, without_limit } =
        supply;
    let labels = Arc::unwrap_or_clone(labels);
    pb::WorkerShape {
        platform: labels.platform,
        tags: labels.tags,
        team: labels.team.unwrap_or_default(),
        image_kinds: labels.image_kinds,
        capabilities: labels.capabilities,
        workers: workers as u64,
        workers_in_service: in_service as u64,
        workers_idle: idle as u64,
        slots_in_use,
        slots_free,
        workers_without_limit: without_limit as u64,
    }
}

fn removable(worker: capacity::Removable, now: Timestamp) -> pb::RemovableWorker {
    let would_lose = match worker.would_lose {
        Some(true) => pb::WouldLose::Something,
        Some(false) => pb::WouldLose::Nothing,
        None => pb::WouldLose::Unspecified,
    };
    pb::RemovableWorker {
        worker_id: worker.id.to_string(),
        reason: worker.words(now),
        worker_name: worker.name,
        leases: worker.leases,
        kept_containers: worker.kept_containers,
        kept_volumes: worker.kept_volumes,
        idle_since: worker.idle_since.map(timestamp),
        would_lose: would_lose.into(),
    }
}

/// Converts the leases that ended with a pruned worker.
pub(super) fn pruned(live: OpenLeases) -> pb::PruneWorkerResponse {
    let workloads = live.workloads.into_iter().take(MAX_NAMED);
    let workload =
        |(team, id): (String, WorkloadId)| pb::PrunedWorkload { team, workload_id: id.to_string() };
    pb::PruneWorkerResponse { leases: live.leases as u64, workloads: workloads.map(workload).collect() }
}

/// Largest labels of a worker, in bytes, so that a page of a list holds many workers.
const MAX_LABELS_BYTES: usize = 16 << 10;

pub(super) fn parse_labels(labels: pb::WorkerLabels) -> Result<Labels, Status> {
    if labels.platform.is_empty() {
        return Err(invalid_field("registration.labels.platform", "is required"));
    }
    let bytes = labels.encoded_len();
    let texts = |field: &str, texts: Vec<String>| {
        let field = format!("registration.labels.{field}");
        texts.into_iter().map(|text| rpc::parse_printable(&field, text)).collect::<Result<Vec<_>, _>>()
    };
    let team = Some(labels.team).filter(|team| !team.is_empty());
    let labels = Labels {
        platform: rpc::parse_printable("registration.labels.platform", labels.platform)?,
        tags: texts("tags", labels.tags)?,
        team: team.map(|team| rpc::parse_team("registration.labels.team", team)).transpose()?,
        image_kinds: texts("image_kinds", labels.image_kinds)?,
        capabilities: texts("capabilities", labels.capabilities)?,
        resource_types: parse_resource_types(labels.resource_types)?,
        zone: rpc::parse_printable("registration.labels.zone", labels.zone)?,
    };
    if bytes > MAX_LABELS_BYTES {
        return Err(invalid_field(
            "registration.labels",
            format!("must be at most {MAX_LABELS_BYTES} bytes"),
        ));
    }
    Ok(labels)
}

fn parse_resource_types(types: Vec<pb::ResourceType>) -> Result<Vec<ResourceType>, Status> {
    let mut names = HashSet::new();
    let parse = |pb::ResourceType { name, version }: pb::ResourceType| {
        let name = rpc::parse_name("registration.labels.resource_types.name", name)?;
        if !names.insert(name.clone()) {
            return Err(invalid_field(
                "registration.labels.resource_types.name",
                format!("names {name:?} twice"),
            ));
        }
        Ok(ResourceType {
            name,
            version: rpc::parse_printable("registration.labels.resource_types.version", version)?,
        })
    };
    types.into_iter().map(parse).collect()
}

fn resource_type(ResourceType { name, version }: ResourceType) -> pb::ResourceType {
    pb::ResourceType { name, version }
}

pub(super) fn parse_capacity(capacity: pb::Capacity) -> Capacity {
    Capacity {
        max_tasks: Some(capacity.max_tasks).filter(|max| *max > 0),
        max_containers: Some(capacity.max_containers).filter(|max| *max > 0),
        max_volumes: Some(capacity.max_volumes).filter(|max| *max > 0),
        cpu_millis: Some(capacity.cpu_millis).filter(|amount| *amount > 0),
        memory_bytes: Some(capacity.memory_bytes).filter(|amount| *amount > 0),
        disk_bytes: capacity.disk_bytes,
        min_free_disk_bytes: capacity.min_free_disk_bytes,
    }
}
