//! A driven lease for as long as the scheduler keeps it, and its end.

use std::sync::Arc;
use std::time::Duration;

use domain::workload::{OutputMode, Stdin};
use domain::{AttemptId, LeaseId, error_chain};
use futures::future::join_all;
use tokio::sync::watch;

use crate::attempt::context::AttemptContext;
use crate::attempt::process::end;
use crate::clients::scheduler_messages::AttemptPhase;
use crate::worker::Worker;
use crate::worker::attached_callers;
use crate::worker::attempts::StopRequest;

/// Pause before a failed stop is tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Waits for the end of a driven lease. Then stops all its processes, and reports the end.
pub(crate) async fn hold(context: Arc<AttemptContext>, lease: LeaseId) {
    let worker = &*context.worker;
    let entry =
        worker.attempts.lock().get(&lease).map(|entry| (entry.stop.subscribe(), entry.operations.clone()));
    let Some((mut stop, operations)) = entry else { return };
    let end = async {
        if stop.wait_for(Option::is_some).await.is_err() {
            return;
        }
        tracing::info!(lease.id = %lease, "stopping the processes of a driven lease");
        // An operation under way may take long, and may make one more container.
        let (_ended, _) = tokio::join!(operations.write(), stop_until_ended(worker, lease, &stop));
        if stop_until_ended(worker, lease, &stop).await {
            worker.attempts.set_phase(lease, AttemptPhase::Ended);
        }
    };
    tokio::select! {
        () = end => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// Stops all processes of a lease. Returns `false` if the lease is no longer that of this gateway.
async fn stop_until_ended(
    worker: &Worker,
    lease: LeaseId,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> bool {
    while !stop_all(worker, lease, stop).await {
        tokio::time::sleep(RETRY_PAUSE).await;
        // The scheduler has forgotten the lease, or another gateway speaks for the worker.
        if stop.has_changed().is_err() {
            return false;
        }
    }
    true
}

/// Stops all processes of a lease, and waits for their ends. Returns whether nothing runs.
async fn stop_all(worker: &Worker, lease: LeaseId, stop: &watch::Receiver<Option<StopRequest>>) -> bool {
    // A process that another gateway handles must not be stopped.
    worker.session.wait_until_exclusive().await;
    let containers = match worker.containers(|container| container.note.lease == lease).await {
        Ok(containers) => containers,
        Err(error) => {
            tracing::warn!(lease.id = %lease, error = error_chain(&error), "cannot list the containers of a lease: trying again");
            return false;
        }
    };
    let ends = containers.iter().map(|container| end(worker, container.note.container, stop));
    join_all(ends).await.into_iter().all(|is_ended| is_ended)
}

/// Continues to hold a lease that an earlier gateway held.
pub(crate) async fn resume(context: Arc<AttemptContext>, lease: LeaseId) {
    let worker = &context.worker;
    match worker.containers(|container| container.note.lease == lease).await {
        Ok(containers) => {
            for container in containers {
                // It is not known whether the process waits for a caller. If it does not, nothing
                // changes at the end of the term.
                let modes = (Stdin::Attached, OutputMode::Attached);
                worker.tasks.spawn(attend(context.clone(), container.note.container, modes));
            }
        }
        Err(error) => {
            tracing::warn!(lease.id = %lease, error = error_chain(&error), "cannot find the processes of a lease: they wait for their callers without a term");
        }
    }
    hold(context, lease).await;
}

/// Enforces the term of the callers of a main process until it ends.
pub(super) async fn attend(context: Arc<AttemptContext>, process: AttemptId, modes: (Stdin, OutputMode)) {
    let AttemptContext { worker, attendance, .. } = &*context;
    tokio::select! {
        () = attached_callers::attend(attendance, worker.runtime.as_ref(), process.into(), modes) => {}
        () = worker.stopping.cancelled() => {}
    }
}
