//! Attending this machine, beside other gateways that were given the same state directory.
//!
//! One of them attends it. The others stand by, and touch nothing of it. A gateway that dies loses its lock. The
//! gateway that gets the lock attends from then on, in a session of its own, once the scheduler lets it in.
//!
//! A frozen gateway keeps its lock. So each gateway that stands by also asks the scheduler about the worker, and
//! asks for a session when the worker has been silent for too long. With a session it takes the directory over; see
//! [`crate::host`]. When the frozen gateway wakes up, scheduler and artifact store refuse it. It finds the directory
//! taken, does nothing more, and ends.

use std::time::Duration;

use domain::GatewayInstance;
use domain::error_chain;
use rpc::client::Outgoing;
use runtime::RuntimeError;
use std::sync::Arc;

use crate::clients::scheduler::SchedulerClient;
use crate::clients::scheduler_messages::{Registration, SchedulerStream};
use crate::runtimes::host::{HostConfig, HostRuntime, Look};
use crate::util::blocking::blocking;
use crate::{Config, WorkerSet};

/// How often is looked whether the worker is free.
const LOOK: Duration = Duration::from_millis(500);

/// Attends this machine as a worker as soon as no other gateway does.
///
/// # Errors
///
/// This machine cannot be a worker, or another gateway has taken it over: then this one does nothing any more, and its process should
/// end. It never returns otherwise.
pub async fn attend_this_machine(
    gateway: &WorkerSet,
    config: Config,
    machine: HostConfig,
) -> anyhow::Result<std::convert::Infallible> {
    let name = config.worker_name.clone();
    let (runtime, instance) = wait_for_turn(&config, &machine).await?;
    gateway.attend_as(instance, config, runtime.clone()).await?;
    tokio::select! {
        () = runtime.superseded() => {}
        () = runtime.clone().look_after_containers() => {}
    }
    tracing::error!(
        worker.name = name,
        "another gateway has taken over this worker: this one starts and destroys nothing more, and ends"
    );
    anyhow::bail!("another gateway has taken over worker {name:?}")
}

async fn wait_for_turn(
    config: &Config,
    machine: &HostConfig,
) -> anyhow::Result<(Arc<HostRuntime>, GatewayInstance)> {
    let instance = GatewayInstance::new();
    let outgoing = Outgoing::internal().with_token(config.token.as_deref());
    let scheduler = SchedulerClient::new(rpc::client::peer(&config.scheduler, outgoing)?);
    let mut said = false;
    loop {
        let free = machine.clone();
        if let Some(runtime) = blocking(move || HostRuntime::open_if_free(free)).await? {
            return Ok((runtime, instance));
        }
        if !std::mem::replace(&mut said, true) {
            tracing::info!(
                worker.name = config.worker_name,
                state_dir = %machine.state_dir.display(),
                "another gateway attends this worker: this one stands by"
            );
        }
        if is_silent(&scheduler, config).await
            && let Some(session) = open_session(&scheduler, config, machine, instance).await?
        {
            tracing::warn!(
                worker.name = config.worker_name,
                "the gateway that attended this worker is silent and still holds its state directory: it is taken over"
            );
            let taken = machine.clone();
            let runtime = blocking(move || HostRuntime::take_over(taken)).await?;
            // Until now: who ends a stream says goodbye, and somebody else might be let in.
            drop(session);
            return Ok((runtime, instance));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether the scheduler knows the worker, and no gateway speaks for it.
async fn is_silent(scheduler: &SchedulerClient, config: &Config) -> bool {
    scheduler.is_silent(&config.worker_name).await.unwrap_or_else(|refusal| {
        tracing::debug!(error = %refusal, "the scheduler does not say who attends this worker");
        false
    })
}

/// Opens a session of the worker that another gateway may have. `None`: the scheduler does not let this one in, or
/// not now.
async fn open_session(
    scheduler: &SchedulerClient,
    config: &Config,
    machine: &HostConfig,
    instance: GatewayInstance,
) -> Result<Option<SchedulerStream>, RuntimeError> {
    let look = machine.clone();
    let Some(Look { marker, disk, capabilities }) = blocking(move || HostRuntime::look(look)).await? else {
        return Ok(None);
    };
    let registration = Registration::new(config, instance, marker, Some(disk), &capabilities, String::new());
    match SchedulerStream::open(scheduler, registration).await {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) => {
            tracing::debug!(error = error_chain(&error), "this gateway is not let in");
            Ok(None)
        }
    }
}
