//! The runtime gateway: containers, volumes and processes of the workers it attends.
//!
//! It speaks for a worker to the scheduler ([`sync::scheduler_stream`]), carries out what it is told ([`attempt`]), moves bytes in and out of the
//! worker's volumes ([`transfer`]), lets callers attach to processes, and destroys what the artifact store has marked ([`sync::inventory_sync`]), and makes
//! artifacts of what the worker brings along ([`sync::base_type_import`]). It
//! holds nothing durable that its worker does not hold itself: a gateway that starts again carries on every step, for each of them may be
//! repeated.
//!
//! [`garden`] is the runtime for a Concourse worker, [`host`] for this machine. Every binary that may open it checks for its supervisor first:
//! see [`host::supervise_if_asked`].

mod api;
mod attempt;
mod attend;
mod capacity;
mod clients;
mod config;
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

/// The domain of the errors that this service answers.
pub(crate) const SERVICE: &str = "gantry.runtime";

/// Makes a directory that only its owner enters, whatever the umask; one that is there and ours is closed to others.
///
/// What is in it may be as open as containers make it.
pub fn make_private_directory(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let found = std::fs::metadata(path)?;
    if found.mode() & 0o077 != 0 && found.uid() == rustix::process::geteuid().as_raw() {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// A gateway that attends no worker yet. Its services are added to `host`.
///
/// # Errors
///
/// The address of the scheduler is malformed.
pub fn open(scheduler: &str, token: Option<&str>, host: &mut Host) -> anyhow::Result<WorkerSet> {
    let gateway = WorkerSet::of(Vec::new(), scheduler, token, host.tasks(), host.stopping())?;
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
    // Whoever has not been let in speaks for no worker, and answers nothing but that.
    let asked = gateway.clone();
    host.add_check("scheduler", move || {
        let workers = asked.workers();
        let ready = if workers.iter().any(|attended| attended.worker.session.current().is_some()) {
            Ok(())
        } else if workers.is_empty() {
            Err("this gateway attends no worker yet".to_owned())
        } else {
            Err("it has not let this gateway in".to_owned())
        };
        std::future::ready(ready)
    });
    metrics::add(gateway.clone(), host);
    Ok(gateway)
}

/// Adds a gateway to `host` that attends each of these workers, of which there is at least one.
///
/// # Errors
///
/// There is no worker, one cannot say who it is, or an address is malformed.
pub async fn start(
    workers: impl IntoIterator<Item = (Config, Arc<dyn Runtime>)>,
    host: &mut Host,
) -> anyhow::Result<WorkerSet> {
    let mut workers = workers.into_iter().peekable();
    let (first, _) = workers.peek().context("a gateway attends at least one worker")?;
    let gateway = open(&first.scheduler, first.token.as_deref(), host)?;
    for (config, runtime) in workers {
        gateway.attend(config, runtime).await?;
    }
    Ok(gateway)
}

/// Serves on `listener` until `shutdown` resolves. Processes go on: their supervisors keep them. Callers over TCP present `token`.
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
