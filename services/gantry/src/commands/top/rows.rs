//! Running containers of a snapshot, one row each.

use std::cmp::Reverse;
use std::collections::HashMap;

use prost_types::Timestamp;
use rpc::pb::scheduler::{Lease, Limits, StopReason, Workload, WorkloadState};
use serde_json::{Value, json};

use super::look::{Measured, Snapshot, container_of};
use crate::render::json::some;
use crate::render::labels;

/// Container of a workload, of a service, or of a driven lease.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Row {
    /// Empty: a driven container.
    pub(super) workload_id: String,
    /// Name of the workload, or key of the driven container. Empty: the workload has no name.
    pub(super) name: String,
    pub(super) team: String,
    /// Empty: the container is not that of a service.
    pub(super) service: String,
    container_id: String,
    worker_id: String,
    pub(super) worker: String,
    pub(super) state: String,
    /// Start of the process, or what came before it.
    pub(super) since: Option<Timestamp>,
    /// Used processors.
    pub(super) cpu: Option<f64>,
    cpu_ms: Option<u64>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) memory_limit_bytes: Option<u64>,
    pub(super) processes: Option<u32>,
    pub(super) command: String,
}

impl Row {
    /// Makes the JSON document.
    pub(super) fn document(&self) -> Value {
        json!({
            "workload_id": some(&self.workload_id),
            "name": some(&self.name),
            "team": self.team,
            "service": some(&self.service),
            "container_id": self.container_id,
            "worker_id": self.worker_id,
            "worker_name": self.worker,
            "state": self.state,
            "since": self.since.as_ref().map(labels::instant),
            "cpu_percent": self.cpu.map(|used| (used * 1000.0).round() / 10.0),
            "cpu_ms": self.cpu_ms,
            "memory_bytes": self.memory_bytes,
            "memory_limit_bytes": self.memory_limit_bytes,
            "processes": self.processes,
            "command": self.command,
        })
    }

    /// Adds the measured usage.
    fn measured(self, measured: Option<&Measured>) -> Self {
        let Some(Measured { usage, cpu, .. }) = measured else { return self };
        let cpu_time = usage.cpu_time.and_then(|time| std::time::Duration::try_from(time).ok());
        Self {
            cpu: *cpu,
            cpu_ms: cpu_time.and_then(|time| u64::try_from(time.as_millis()).ok()),
            memory_bytes: usage.memory_bytes,
            processes: usage.processes,
            ..self
        }
    }
}

/// Makes documents without and with optional fields, for the test of the schema.
#[cfg(test)]
pub(super) fn samples() -> Vec<Value> {
    let text = || "text".to_owned();
    let filled = Row {
        workload_id: text(),
        name: text(),
        service: text(),
        since: Some(Timestamp::default()),
        cpu: Some(0.5),
        cpu_ms: Some(1),
        memory_bytes: Some(1),
        memory_limit_bytes: Some(1),
        processes: Some(1),
        ..Row::default()
    };
    vec![Row::default().document(), filled.document()]
}

/// Lists the containers, those that use most first.
pub(super) fn rows(snapshot: &Snapshot) -> Vec<Row> {
    let mut rows: Vec<_> = snapshot.placed.iter().flat_map(|placed| of_workload(placed, snapshot)).collect();
    let leases: HashMap<_, _> =
        snapshot.leases.iter().map(|lease| (lease.lease_id.as_str(), lease)).collect();
    let driven = snapshot.usage.values().filter(|measured| !measured.usage.key.is_empty());
    rows.extend(driven.map(|measured| of_lease(measured, &leases, snapshot)));
    let share = |row: &Row| row.cpu.map_or(0, |used| (used * 1000.0) as u64);
    rows.sort_by_cached_key(|row| {
        (Reverse((share(row), row.memory_bytes)), row.workload_id.clone(), row.service.clone())
    });
    rows
}

fn of_workload(workload: &Workload, snapshot: &Snapshot) -> Vec<Row> {
    let (spec, there) =
        (workload.spec.clone().unwrap_or_default(), workload.location.clone().unwrap_or_default());
    let mut state = labels::workload_state(workload.state()).to_owned();
    if workload.stopping() != StopReason::Unspecified {
        state += ", stopping";
    }
    let limit = |limits: Option<&Limits>| limits.map(|limits| limits.memory_bytes).filter(|bytes| *bytes > 0);
    let measured = snapshot.usage.get(&there.attempt_id);
    let main = Row {
        workload_id: workload.workload_id.clone(),
        name: spec.name.clone(),
        team: spec.team.clone(),
        container_id: there.attempt_id.clone(),
        worker_id: there.worker_id,
        worker: there.worker_name,
        state,
        since: workload.started_at.or(workload.submitted_at),
        memory_limit_bytes: limit(spec.limits.as_ref()),
        command: labels::command(Some(&spec)),
        ..Row::default()
    };
    let mut rows = vec![main.clone().measured(measured)];
    for service in &spec.services {
        let container_id = container_of(&there.attempt_id, &service.name).unwrap_or_default();
        let of_service = snapshot.usage.get(&container_id);
        let state = match (of_service, measured) {
            (Some(_), _) => "running",
            // The worker measures containers, and this one does not run.
            (None, Some(_)) if workload.state() == WorkloadState::Running => "ended",
            (None, _) => "",
        };
        let command = service.command.iter().map(|part| String::from_utf8_lossy(part).into_owned());
        let row = Row {
            service: service.name.clone(),
            container_id,
            state: state.to_owned(),
            memory_limit_bytes: limit(service.limits.as_ref()),
            command: command.collect::<Vec<_>>().join(" "),
            ..main.clone()
        };
        rows.push(row.measured(of_service));
    }
    rows
}

/// Makes the row of a driven container.
fn of_lease(measured: &Measured, leases: &HashMap<&str, &Lease>, snapshot: &Snapshot) -> Row {
    let Measured { usage, worker_id, .. } = measured;
    let lease = leases.get(usage.lease_id.as_str());
    let worker = snapshot.workers.iter().find(|worker| worker.worker_id == *worker_id);
    let row = Row {
        name: usage.key.clone(),
        team: lease.map(|lease| lease.team.clone()).unwrap_or_default(),
        container_id: usage.container_id.clone(),
        worker_id: worker_id.clone(),
        worker: worker.map(|worker| worker.name.clone()).unwrap_or_default(),
        state: "driven".to_owned(),
        since: lease.and_then(|lease| lease.granted_at),
        command: format!("lease {}", usage.lease_id),
        ..Row::default()
    };
    row.measured(Some(measured))
}
