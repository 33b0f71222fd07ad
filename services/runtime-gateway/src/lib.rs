//! The runtime gateway: it makes containers, volumes and processes on the workers that it attends.
//!
//! The modules, callers before what they call:
//!
//! - [`attend`] opens the runtime of a worker and adds the worker to the gateway.
//! - [`api`] serves `Containers` and `Volumes`. [`proxy`] forwards these calls to another gateway.
//! - [`sync`] keeps the worker in step with the scheduler and the artifact store. It starts
//!   attempts, sweeps, reports, and imports worker-provided images.
//! - [`driven`] performs the steps of an attempt one by one, for the holder of a driven lease.
//! - [`attempt`] runs one attempt, from its inputs to its result.
//! - [`transfer`] moves bytes in and out of volumes.
//! - [`worker`] holds the session and the attempts of one worker.
//! - [`clients`] calls the other services.
//! - [`runtimes`] has the runtimes: [`host`] for this machine, [`garden`] for a Concourse worker.
//!
//! Invariant: the gateway keeps no durable state outside its worker. Each step can be repeated, so
//! a restarted gateway continues where the last one stopped.
//!
//! Each binary that may open [`host`] must first call [`host::supervise_if_asked`].

mod api;
mod attempt;
mod attend;
mod capacity;
mod clients;
mod config;
mod driven;
mod metrics;
mod proxy;
mod runtimes;
mod sync;
#[cfg(test)]
mod test_support;
mod transfer;
mod util;
mod worker;
mod worker_set;

use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use api::auth::TicketAuth;
use rpc::client::{PROXY_TICKET_HEADER, TICKET_HEADER};
use runtime::Runtime;
use server::{Host, Listener};

pub use attend::concourse::attend_concourse_worker;
pub use attend::machine::attend_this_machine;
pub use capacity::Amounts;
pub use config::{Config, Intervals};
pub use proxy::{serve_proxy, start_proxy};
pub use runtimes::{garden, host};
pub use worker_set::WorkerSet;

/// The domain of the errors that this service returns.
pub(crate) const SERVICE: &str = "gantry.runtime";

/// Creates a directory with mode 0700 regardless of the umask. An existing directory of this user
/// is closed to other users.
///
/// Files in the directory may have any mode that containers give them.
pub fn make_private_directory(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let metadata = std::fs::metadata(path)?;
    if metadata.mode() & 0o077 != 0 && metadata.uid() == rustix::process::geteuid().as_raw() {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Opens a gateway without workers, and adds its services to `host`.
///
/// # Errors
///
/// The address of the scheduler is malformed.
pub fn open(scheduler: &str, token: Option<&str>, host: &mut Host) -> anyhow::Result<WorkerSet> {
    let gateway = WorkerSet::new(Vec::new(), scheduler, token, host.tasks(), host.stopping())?;
    let containers = api::containers(gateway.clone());
    host.add_ticketed_service(TicketAuth::new(containers, gateway.clone()), &[PROXY_TICKET_HEADER]);
    let volumes = api::volumes(gateway.clone());
    let tickets = &[PROXY_TICKET_HEADER, TICKET_HEADER];
    host.add_ticketed_service(TicketAuth::new(volumes, gateway.clone()), tickets);
    host.describe(server::Service {
        name: "runtime-gateway",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: Vec::new(),
    });
    // A gateway without a session can only reject calls, so it is not ready.
    let checked = gateway.clone();
    host.add_check("scheduler", move || {
        let workers = checked.workers();
        let ready = if workers.iter().any(|attended| attended.worker.session.current().is_some()) {
            Ok(())
        } else if workers.is_empty() {
            Err("this gateway attends no worker yet".to_owned())
        } else {
            Err("the scheduler has not given this gateway a session yet".to_owned())
        };
        std::future::ready(ready)
    });
    metrics::add(gateway.clone(), host);
    Ok(gateway)
}

/// Adds to `host` a gateway that attends each of these workers.
///
/// # Errors
///
/// There is no worker, a worker cannot return its marker, or an address is malformed.
pub async fn start(
    workers: impl IntoIterator<Item = (Config, Arc<dyn Runtime>)>,
    host: &mut Host,
) -> anyhow::Result<WorkerSet> {
    let mut workers = workers.into_iter().peekable();
    let (first, _) = workers.peek().context("a gateway needs at least one worker")?;
    let gateway = open(&first.scheduler, first.token.as_deref(), host)?;
    for (config, runtime) in workers {
        gateway.attend(config, runtime).await?;
    }
    Ok(gateway)
}

/// Serves on `listener` until `shutdown` resolves. Callers over TCP must present `token`.
///
/// Processes outlive the gateway, because their supervisors keep them.
pub async fn serve(
    workers: impl IntoIterator<Item = (Config, Arc<dyn Runtime>)>,
    token: Option<String>,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(token);
    start(workers, &mut host).await?;
    host.serve([listener], shutdown).await
}
