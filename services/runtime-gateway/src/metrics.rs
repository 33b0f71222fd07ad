//! Metrics of a gateway.

use crate::clients::scheduler_messages::AttemptPhase;
use crate::util::transferred::{self, Direction};
use crate::worker::Worker;
use crate::worker::usage::Usage;
use crate::worker_set::WorkerSet;

/// Describes all metrics, and sets the gauges whenever they are read.
pub(crate) fn add(workers: WorkerSet, host: &server::Host) {
    metrics::describe_gauge!("gantry_gateway_attempts", "Attempts that have not ended, by worker.");
    metrics::describe_gauge!("gantry_gateway_processes", "Attempts whose process runs, by worker.");
    metrics::describe_gauge!(
        "gantry_gateway_attends",
        "1 if the gateway has a session for the worker, otherwise 0."
    );
    metrics::describe_gauge!(
        "gantry_gateway_containers",
        "Containers on the worker at the last listing, plus those created since."
    );
    metrics::describe_gauge!(
        "gantry_gateway_volumes",
        "Volumes on the worker at the last listing, plus those created since."
    );
    metrics::describe_counter!(
        "gantry_gateway_destroyed_total",
        "Destroyed containers and volumes, by kind."
    );
    metrics::describe_counter!(
        "gantry_gateway_transferred_bytes_total",
        "Bytes of volumes that were transferred, by direction."
    );
    metrics::describe_counter!(
        "gantry_gateway_wire_bytes_total",
        "Bytes that the transferred contents took on the network after compression, by direction."
    );
    metrics::describe_counter!(
        "gantry_gateway_peer_transfers_total",
        "Volumes that another worker was asked to send directly to this worker, by outcome."
    );
    metrics::describe_counter!(
        "gantry_gateway_imports_total",
        "Imports of worker-provided images and certificates, by outcome."
    );
    metrics::describe_counter!(
        "gantry_gateway_lost_replicas_total",
        "Replicas that were found missing or damaged when they were used or hashed."
    );
    metrics::counter!("gantry_gateway_lost_replicas_total").absolute(0);
    // Counters exist from the start, so that a metric without events reads 0.
    for kind in ["container", "volume"] {
        metrics::counter!("gantry_gateway_destroyed_total", "kind" => kind).absolute(0);
    }
    for outcome in crate::transfer::peer_copy::OUTCOMES {
        metrics::counter!("gantry_gateway_peer_transfers_total", "outcome" => outcome).absolute(0);
    }
    for outcome in ["imported", "failed"] {
        metrics::counter!("gantry_gateway_imports_total", "outcome" => outcome).absolute(0);
    }
    for direction in Direction::ALL {
        transferred::record(direction, 0, 0);
    }
    host.add_gauges(move || {
        workers.workers().iter().for_each(|attended| set(&attended.worker));
        std::future::ready(())
    });
}

fn set(worker: &Worker) {
    let name = worker.config.worker_name.clone();
    let (attempts, processes) = {
        let attempts = worker.attempts.lock();
        let count = |matches_phase: fn(AttemptPhase) -> bool| {
            attempts.values().filter(|it| matches_phase(it.phase)).count()
        };
        (count(|phase| phase != AttemptPhase::Ended), count(|phase| phase == AttemptPhase::Running))
    };
    metrics::gauge!("gantry_gateway_attempts", "worker" => name.clone()).set(attempts as f64);
    metrics::gauge!("gantry_gateway_processes", "worker" => name.clone()).set(processes as f64);
    let attends = if worker.session.current().is_some() { 1.0 } else { 0.0 };
    metrics::gauge!("gantry_gateway_attends", "worker" => name.clone()).set(attends);
    let Usage { containers, volumes } = worker.usage.now();
    metrics::gauge!("gantry_gateway_containers", "worker" => name.clone()).set(containers as f64);
    metrics::gauge!("gantry_gateway_volumes", "worker" => name).set(volumes as f64);
}
