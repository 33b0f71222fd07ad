//! JSON documents of the objects in a cluster, for `--json`.
//!
//! Keys are the names of the protos. States are words, instants are text in UTC, digests are
//! hexadecimal, other bytes are base64, and absent values are null.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rpc::pb::{artifacts, scheduler};
use serde_json::{Value, json};

use crate::render::labels;

pub(crate) fn location(location: &scheduler::AttemptLocation) -> Value {
    json!({
        "worker_id": location.worker_id,
        "worker_name": location.worker_name,
        "gateway_endpoint": location.gateway_endpoint,
        "attempt_id": location.attempt_id,
    })
}

pub(crate) fn exit(exit: &scheduler::Exit) -> Value {
    use scheduler::exit::Status;
    match &exit.status {
        Some(Status::Code(code)) => json!({ "code": code }),
        Some(Status::Signal(signal)) => json!({ "signal": signal }),
        Some(Status::OutOfMemory(_)) => json!({ "out_of_memory": true }),
        None => Value::Null,
    }
}

pub(crate) fn failure(failure: &scheduler::Failure) -> Value {
    json!({ "reason": failure.reason, "message": failure.message })
}

pub(crate) fn output(output: &scheduler::PublishedOutput) -> Value {
    json!({
        "name": output.name,
        "artifact_id": output.artifact_id,
        "size_bytes": output.size_bytes,
        "digest": hex::encode(&output.digest),
        "entries": output.entries,
    })
}

/// Makes the last event of a run, with the exit code of `gantry` as `status`.
pub(crate) fn finished(finished: &scheduler::Finished, status: u8) -> Value {
    json!({
        "outcome": labels::outcome(finished.outcome()),
        "exit": finished.exit.as_ref().map(exit),
        "failure": finished.failure.as_ref().map(failure),
        "outputs": finished.outputs.iter().map(output).collect::<Vec<_>>(),
        "notes": finished.notes,
        "result": finished.result.as_ref().map(|result| STANDARD.encode(result)),
        "status": status,
    })
}

pub(crate) fn worker(worker: &scheduler::Worker) -> Value {
    let labels = worker.labels.clone().unwrap_or_default();
    let capacity = worker.capacity.unwrap_or_default();
    json!({
        "worker_id": worker.worker_id,
        "name": worker.name,
        "state": labels::worker_state(worker.state()),
        "incarnation": worker.incarnation,
        "session": worker.session,
        "gateway_endpoint": worker.gateway_endpoint,
        "labels": {
            "platform": labels.platform,
            "tags": labels.tags,
            "team": labels.team,
            "image_kinds": labels.image_kinds,
            "capabilities": labels.capabilities,
            "resource_types": resource_types(&labels),
            "ephemeral": labels.ephemeral,
            "zone": labels.zone,
        },
        "capacity": {
            "max_tasks": capacity.max_tasks,
            "max_containers": capacity.max_containers,
            "max_volumes": capacity.max_volumes,
            "cpu_millis": capacity.cpu_millis,
            "memory_bytes": capacity.memory_bytes,
            "disk_bytes": capacity.disk_bytes,
            "min_free_disk_bytes": capacity.min_free_disk_bytes,
        },
        "reserved": requests(&worker.reserved.unwrap_or_default()),
        "active_tasks": worker.active_tasks,
        "containers": worker.containers,
        "volumes": worker.volumes,
        "disk_free_bytes": worker.disk_free_bytes,
        "last_contact_at": worker.last_contact_at.as_ref().map(labels::instant),
        "desired": labels::desire(worker.desired()),
        "drained_at": worker.drained_at.as_ref().map(labels::instant),
        "interrupt_at": worker.interrupt_at.as_ref().map(labels::instant),
        "leases": worker.leases,
        "uninterruptible_leases": worker.uninterruptible_leases,
        "blocked_by": some(&worker.blocked_by),
        "refusals": worker.refusals.iter().map(refusal).collect::<Vec<_>>(),
        "failures": worker.failures,
        "last_failure": some(&worker.last_failure),
        "failed_team": some(&worker.failed_team),
        "quarantined_until": worker.quarantined_until.as_ref().map(labels::instant),
        "unsupported_versions": worker.unsupported_versions,
    })
}

fn resource_types(labels: &scheduler::WorkerLabels) -> Vec<Value> {
    let types = labels.resource_types.iter();
    types.map(|known| json!({ "name": known.name, "version": known.version })).collect()
}

fn refusal(refusal: &scheduler::PlacementRefusal) -> Value {
    json!({
        "reason": refusal.reason,
        "message": refusal.message,
        "passing": refusal.duration() == scheduler::RefusalDuration::Passing,
        "ended_by": refusal.ended_by,
        "limit": refusal.limit.as_ref().map(|limit| {
            json!({ "of": limit.resource, "limit": limit.limit, "amount": limit.amount })
        }),
        "labels": refusal.labels,
    })
}

fn score(score: &scheduler::StrategyScore) -> Value {
    json!({ "strategy": score.strategy, "value": score.value })
}

pub(crate) fn explanation(explanation: &scheduler::ExplainResponse) -> Value {
    let worker = |worker: &scheduler::WorkerExplanation| {
        json!({
            "worker_id": worker.worker_id,
            "worker_name": worker.worker_name,
            "refusals": worker.refusals.iter().map(refusal).collect::<Vec<_>>(),
            "standing": worker.standing,
            "scores": worker.scores.iter().map(score).collect::<Vec<_>>(),
        })
    };
    let group = |group: &scheduler::RefusingWorkers| {
        json!({
            "refusals": group.refusals.iter().map(refusal).collect::<Vec<_>>(),
            "count": group.count,
            "names": group.names,
        })
    };
    json!({
        "verdict": labels::verdict(explanation.verdict()),
        "queue_position": (explanation.queue_position > 0).then_some(explanation.queue_position),
        "workers": explanation.workers.iter().map(worker).collect::<Vec<_>>(),
        "unblocked_by": explanation.unblocked_by,
        "summary": explanation.summary,
        "expected_wait_seconds": labels::expected_wait(explanation).map(|wait| wait.as_secs_f64()),
        "expected_wait_basis": some(&explanation.expected_wait_basis),
        "workers_known": explanation.workers_known,
        "workers_eligible": explanation.workers_eligible,
        "workers_gone": explanation.workers_gone,
        "groups": explanation.groups.iter().map(group).collect::<Vec<_>>(),
    })
}

pub(crate) fn workload(workload: &scheduler::Workload) -> Value {
    json!({
        "workload_id": workload.workload_id,
        "spec": workload.spec.as_ref().map(spec),
        "abridged": workload.abridged,
        "state": labels::workload_state(workload.state()),
        "submitted_at": workload.submitted_at.as_ref().map(labels::instant),
        "started_at": workload.started_at.as_ref().map(labels::instant),
        "finished_at": workload.finished_at.as_ref().map(labels::instant),
        "location": workload.location.as_ref().map(location),
        "outcome": labels::outcome(workload.outcome()),
        "exit": workload.exit.as_ref().map(exit),
        "failure": workload.failure.as_ref().map(failure),
        "outputs": workload.outputs.iter().map(output).collect::<Vec<_>>(),
        "notes": workload.notes,
        "waiting_for": workload.waiting_for,
        "usage": workload.usage.as_ref().map(usage),
        "retried": workload.retried,
        "result": workload.result.as_ref().map(|result| STANDARD.encode(result)),
        "stopping": labels::stop_reason(workload.stopping()),
    })
}

/// Makes the document of resource usage. Unknown values are null.
fn usage(usage: &scheduler::Usage) -> Value {
    let millis = |time: Option<prost_types::Duration>| time.map(millis);
    json!({
        "queued_ms": millis(usage.queued),
        "preparing_ms": millis(usage.preparing),
        "running_ms": millis(usage.running),
        "cpu_ms": millis(usage.cpu_time),
        "peak_memory_bytes": usage.peak_memory_bytes,
        "bytes_in": usage.bytes_in,
        "bytes_out": usage.bytes_out,
    })
}

fn spec(spec: &scheduler::WorkloadSpec) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let limits = spec.limits.unwrap_or_default();
    json!({
        "team": spec.team,
        "name": spec.name,
        "kind": labels::kind(spec.kind()),
        "command": spec.command.iter().map(|argument| text(argument)).collect::<Vec<_>>(),
        "environment": spec.environment.iter().map(|variable| text(&variable.name)).collect::<Vec<_>>(),
        "directory": text(&spec.directory),
        "image": labels::image(spec.image.as_ref()),
        "user": spec.user,
        "inputs": spec.inputs.iter().map(|input| json!({
            "name": input.name,
            "artifact_id": input.artifact_id,
            "path": text(&input.path),
            "read_only": input.access() == scheduler::Access::ReadOnly,
        })).collect::<Vec<_>>(),
        "outputs": spec.outputs.iter().map(|output| json!({
            "name": output.name,
            "path": text(&output.path),
        })).collect::<Vec<_>>(),
        "caches": spec.caches.iter().map(|mount| json!({
            "cache_id": mount.task_cache_id,
            "path": text(&mount.path),
        })).collect::<Vec<_>>(),
        "limits": {
            "cpu_millis": limits.cpu_millis,
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "disk_bytes": limits.disk_bytes,
        },
        "privileged": spec.privilege() == scheduler::Privilege::Privileged,
        "network": match spec.network() {
            scheduler::Network::Private => "private",
            scheduler::Network::None => "none",
            scheduler::Network::Host => "host",
            scheduler::Network::Unspecified => "unspecified",
        },
        "worker": spec.worker,
        "tags": spec.tags,
        "platform": spec.platform,
        "requests": requests(&spec.requests.unwrap_or_default()),
        "priority": spec.priority,
        "queue_timeout_ms": spec.queue_timeout.map(millis),
        "start_timeout_ms": spec.start_timeout.map(millis),
        "run_timeout_ms": spec.run_timeout.map(millis),
        "retries": spec.retries,
        "interruptible": spec.interruptible,
        "capabilities": spec.capabilities,
        "keep_result": spec.keep_result,
        "build_id": spec.build_id,
        "services": spec.services.iter().map(|service| json!({
            "name": service.name,
            "image": labels::image(service.image.as_ref()),
            "command": service.command.iter().map(|argument| text(argument)).collect::<Vec<_>>(),
            "essential": service.essential,
        })).collect::<Vec<_>>(),
    })
}

pub(crate) fn requests(requests: &scheduler::ResourceRequests) -> Value {
    json!({
        "cpu_millis": requests.cpu_millis,
        "memory_bytes": requests.memory_bytes,
        "disk_bytes": requests.disk_bytes,
    })
}

fn millis(time: prost_types::Duration) -> i64 {
    time.seconds * 1000 + i64::from(time.nanos) / 1_000_000
}

pub(crate) fn artifact(artifact: &artifacts::Artifact) -> Value {
    json!({
        "artifact_id": artifact.artifact_id,
        "team": artifact.team,
        "label": artifact.label,
        "state": labels::artifact_state(artifact.state()),
        "size_bytes": artifact.size_bytes,
        "digest": hex::encode(&artifact.digest),
        "created_at": artifact.created_at.as_ref().map(labels::instant),
        "kept_by": artifact.kept_by,
        "marked_at": artifact.marked_at.as_ref().map(labels::instant),
        "mark_reason": some(&artifact.mark_reason),
        "in_store": artifact.in_store,
        "replicas": artifact.replicas.iter().map(|replica| json!({
            "volume_handle": replica.volume_handle,
            "worker_id": replica.worker_id,
            "size_bytes": replica.size_bytes,
            "verified": replica.verification() == artifacts::Verification::Verified,
        })).collect::<Vec<_>>(),
    })
}

/// Returns `None` for an empty text.
pub(crate) fn some(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

fn thing(thing: artifacts::ObjectKind) -> Option<&'static str> {
    (thing != artifacts::ObjectKind::Unspecified).then(|| labels::thing(thing))
}

pub(crate) fn relation(relation: &artifacts::Relation) -> Value {
    json!({
        "relation": relation.relation,
        "kind": thing(relation.kind()),
        "ids": relation.ids,
        "total": relation.total,
    })
}

pub(crate) fn explained(explained: &artifacts::ExplainResponse) -> Value {
    let instant = |at: &Option<prost_types::Timestamp>| at.as_ref().map(labels::instant);
    let keeper = |keeper: &artifacts::Keeper| {
        json!({
            "kind": thing(keeper.kind()),
            "id": some(&keeper.id),
            "text": keeper.text,
            "until": instant(&keeper.until),
        })
    };
    json!({
        "kind": thing(explained.kind()),
        "id": explained.id,
        "state": labels::explained_state(explained.state()),
        "label": explained.label,
        "size_bytes": explained.size_bytes,
        "created_at": instant(&explained.created_at),
        "kept_by": explained.kept_by.iter().map(keeper).collect::<Vec<_>>(),
        "kept_by_total": explained.kept_by_total,
        "relations": explained.relations.iter().map(relation).collect::<Vec<_>>(),
        "marked_at": instant(&explained.marked_at),
        "gone_at": instant(&explained.gone_at),
        "expires_at": instant(&explained.expires_at),
        "in_store": explained.in_store,
        "reason": some(&explained.reason),
        "remembered_until": instant(&explained.remembered_until),
        "can_be_undeleted": explained.can_be_undeleted,
        "bytes_lost": explained.bytes_lost,
        "loss_reason": some(&explained.loss_reason),
        "lost_at": instant(&explained.lost_at),
        "team": some(&explained.team),
        "can_be_adopted": explained.can_be_adopted,
    })
}

pub(crate) fn volume(volume: &artifacts::Volume) -> Value {
    json!({
        "volume_handle": volume.volume_handle,
        "worker_id": volume.worker_id,
        "state": labels::inventory_state(volume.state()),
        "purpose": labels::purpose(volume.purpose()),
        "artifact_id": volume.artifact_id,
        "parent_handle": volume.parent_handle,
        "attempt_id": volume.attempt_id,
        "size_bytes": volume.size_bytes,
        "exclusive_bytes": volume.exclusive_bytes,
        "disk_bytes": volume.disk_bytes,
        "created_at": volume.created_at.as_ref().map(labels::instant),
        "lost_at": volume.lost_at.as_ref().map(labels::instant),
        "mark_reason": volume.mark_reason,
    })
}

pub(crate) fn base_type(known: &artifacts::BaseResourceType) -> Value {
    json!({
        "base_type_id": known.base_type_id,
        "type": known.r#type,
        "version": known.version,
        "worker_id": some(&known.worker_id),
        "artifact_id": known.artifact_id,
    })
}

pub(crate) fn import(import: &artifacts::Import) -> Value {
    let brought = import.provided.clone().unwrap_or_default();
    json!({
        "import_id": import.import_id,
        "worker_id": import.worker_id,
        "resource_type": some(&brought.resource_type),
        "version": brought.version,
        "path": brought.path,
        "state": labels::import_state(import.state()),
        "artifact_id": import.artifact_id,
        "failure_reason": some(&import.failure_reason),
        "failed_at": import.failed_at.as_ref().map(labels::instant),
    })
}

pub(crate) fn orphan(orphan: &artifacts::Orphan) -> Value {
    let known = orphan.description.clone().unwrap_or_default();
    json!({
        "volume_handle": some(&orphan.volume_handle),
        "container_handle": some(&orphan.container_handle),
        "worker_id": orphan.worker_id,
        "first_seen_at": orphan.first_seen_at.as_ref().map(labels::instant),
        "described": orphan.description.is_some(),
        "parent_handle": some(&known.parent_handle),
        "team": some(&known.team),
        "artifact_id": some(&known.artifact_id),
        "digest": some(&hex::encode(&known.digest)),
        "size_bytes": known.size_bytes,
    })
}

pub(crate) fn container(container: &artifacts::Container) -> Value {
    json!({
        "container_handle": container.container_handle,
        "worker_id": container.worker_id,
        "state": labels::inventory_state(container.state()),
        "attempt_id": container.attempt_id,
        "workload_id": container.workload_id,
        "created_at": container.created_at.as_ref().map(labels::instant),
        "lost_at": container.lost_at.as_ref().map(labels::instant),
        "touched_at": container.touched_at.as_ref().map(labels::instant),
        "mark_reason": container.mark_reason,
    })
}

pub(crate) fn collected(collected: &artifacts::Collected) -> Value {
    json!({
        "kind": labels::thing(collected.kind()),
        "id": collected.id,
        "reason": collected.reason,
        "size_bytes": collected.size_bytes,
    })
}

pub(crate) fn lease(lease: &scheduler::Lease) -> Value {
    let instant = |at: &Option<prost_types::Timestamp>| at.as_ref().map(labels::instant);
    json!({
        "lease_id": lease.lease_id,
        "kind": labels::lease_kind(lease.kind()),
        "state": labels::lease_state(lease.state()),
        "team": lease.team,
        "owner": some(&lease.owner),
        "workload_id": some(&lease.workload_id),
        "attempt_id": some(&lease.attempt_id),
        "worker_id": lease.worker_id,
        "worker_name": lease.worker_name,
        "incarnation": lease.incarnation,
        "requests": lease.requests.as_ref().map(requests),
        "granted_at": instant(&lease.granted_at),
        "expires_at": instant(&lease.expires_at),
        "stop_reason": some(labels::stop_reason(lease.stop_reason())),
        "ended_at": instant(&lease.ended_at),
        "reason": labels::lease_end(lease.end()),
    })
}
