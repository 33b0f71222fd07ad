//! Attending this machine, together with other gateways on the same state directory.
//!
//! One gateway attends the machine. The others stand by, and do not touch the directory. A gateway
//! that dies loses its lock. The next gateway that gets the lock attends in a new session, once the
//! scheduler admits it.
//!
//! A frozen gateway keeps its lock. So a standby also polls the state of the worker at the
//! scheduler, and asks for a session when the worker is lost. With a session, the standby takes the
//! directory over; see [`crate::host`]. When the frozen gateway wakes up, the scheduler and the
//! artifact store reject its calls. It detects the takeover, does nothing more, and exits.

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

/// Interval at which a standby checks whether the worker is free.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Attends this machine as a worker as soon as no other gateway does.
///
/// # Errors
///
/// This machine cannot be a worker, or another gateway has taken it over. After a takeover this
/// gateway does nothing more, and its process should exit. The function does not return otherwise.
pub async fn attend_this_machine(
    gateway: &WorkerSet,
    config: Config,
    machine: HostConfig,
) -> anyhow::Result<std::convert::Infallible> {
    let name = config.worker_name.clone();
    let (runtime, instance) = acquire_worker(&config, &machine).await?;
    gateway.attend_as(instance, config, runtime.clone()).await?;
    tokio::select! {
        () = runtime.superseded() => {}
        () = runtime.clone().look_after_containers() => {}
    }
    tracing::error!(
        worker.name = name,
        "another gateway has taken over this worker: this gateway starts and destroys nothing more, and exits"
    );
    anyhow::bail!("cannot attend worker {name:?}: another gateway has taken over")
}

async fn acquire_worker(
    config: &Config,
    machine: &HostConfig,
) -> anyhow::Result<(Arc<HostRuntime>, GatewayInstance)> {
    let instance = GatewayInstance::new();
    let outgoing = Outgoing::internal().with_token(config.token.as_deref());
    let scheduler = SchedulerClient::new(rpc::client::peer(&config.scheduler, outgoing)?);
    let mut is_logged = false;
    loop {
        let free = machine.clone();
        if let Some(runtime) = blocking(move || HostRuntime::open_if_free(free)).await? {
            return Ok((runtime, instance));
        }
        if !std::mem::replace(&mut is_logged, true) {
            tracing::info!(
                worker.name = config.worker_name,
                state_dir = %machine.state_dir.display(),
                "another gateway attends this worker: this gateway stands by"
            );
        }
        if is_silent(&scheduler, config).await
            && let Some(session) = open_session(&scheduler, config, machine, instance).await?
        {
            tracing::warn!(
                worker.name = config.worker_name,
                "taking over this worker: its gateway is silent and still holds the state directory"
            );
            let machine = machine.clone();
            let runtime = blocking(move || HostRuntime::take_over(machine)).await?;
            // Dropped only now: the end of a stream ends the session, and another gateway could be
            // admitted.
            drop(session);
            return Ok((runtime, instance));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Whether the scheduler knows the worker, and no gateway speaks for it.
async fn is_silent(scheduler: &SchedulerClient, config: &Config) -> bool {
    scheduler.is_silent(&config.worker_name).await.unwrap_or_else(|refusal| {
        tracing::debug!(error = %refusal, "cannot look up the gateway of this worker");
        false
    })
}

/// Opens a session of a worker that another gateway may have. `None`: the scheduler does not admit
/// this gateway now.
async fn open_session(
    scheduler: &SchedulerClient,
    config: &Config,
    machine: &HostConfig,
    instance: GatewayInstance,
) -> Result<Option<SchedulerStream>, RuntimeError> {
    let probe = machine.clone();
    let Some(Look { marker, disk, capabilities }) = blocking(move || HostRuntime::look(probe)).await? else {
        return Ok(None);
    };
    let registration =
        Registration::new(config, instance, None, marker, Some(disk), &capabilities, String::new());
    match SchedulerStream::open(scheduler, registration).await {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) => {
            tracing::debug!(error = error_chain(&error), "cannot open a session");
            Ok(None)
        }
    }
}
