//! The runtime gateway: containers, volumes and processes of the workers it attends.
//!
//! It speaks for a worker to the scheduler ([`synchronize`]), carries out what it is told ([`attempt`]), moves bytes in and out of the
//! worker's volumes ([`volumes`]), lets callers attach to processes, and destroys what the artifact store has marked ([`sweeper`]). It
//! holds nothing durable that its worker does not hold itself: a gateway that starts again carries on every step, for each of them may be
//! repeated.
//!
//! [`host`] is the runtime for this machine. Every binary that may open it checks for its supervisor first:
//! see [`host::supervise_if_asked`].

mod attempt;
mod blocking;
mod clock;
mod config;
mod contact;
mod contents;
#[cfg(test)]
mod for_tests;
mod gauges;
mod grpc;
pub mod host;
mod rehash;
mod retry;
mod sweeper;
mod synchronize;
mod trees;
mod volumes;
mod worker;

use std::future::Future;
use std::sync::Arc;

use runtime::Runtime;
use server::{Host, Listener};

pub use config::Config;

/// The domain of the errors that this service answers.
pub(crate) const SERVICE: &str = "gantry.runtime";

/// Adds a gateway that attends the worker behind `runtime` to `host`.
pub async fn start(config: Config, runtime: Arc<dyn Runtime>, host: &mut Host) -> anyhow::Result<()> {
    if config.hold_destruction {
        tracing::warn!("destruction is held: no container and no volume is destroyed, and the disk fills up");
    }
    let boot = runtime.marker().await?.boot;
    let worker = worker::Worker::new(config, runtime, boot, host.tasks(), host.stopping())?;
    host.spawn(synchronize::forever(worker.clone()));
    host.spawn(sweeper::sweep_forever(worker.clone()));
    host.spawn(sweeper::report_forever(worker.clone()));
    host.add_service(grpc::containers(worker.clone()));
    host.add_service(grpc::volumes(worker.clone()));
    host.describe(server::Service {
        name: "runtime-gateway",
        version: env!("CARGO_PKG_VERSION"),
        features: worker.runtime.capabilities().features.clone(),
        limits: Vec::new(),
    });
    // Whoever has not been let in speaks for no worker, and answers nothing but that.
    let let_in = worker.clone();
    host.add_check("scheduler", move || {
        let open = let_in.session().is_some();
        async move { if open { Ok(()) } else { Err("it has not let this gateway in".to_owned()) } }
    });
    gauges::add(worker, host);
    Ok(())
}

/// Serves on `listener` until `shutdown` resolves. Processes go on: their supervisors keep them.
pub async fn serve(
    config: Config,
    runtime: Arc<dyn Runtime>,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(config.token.clone());
    start(config, runtime, &mut host).await?;
    host.serve([listener], shutdown).await
}
