//! The streamer: volumes from worker to worker, in and out.
//!
//! It plans transfers and watches them. Bytes take one hop, between the caller and the worker's gateway, or between two gateways, under
//! tickets that the scheduler signs. The streamer holds nothing durable: what it planned stands in the artifact store, under a claim that runs out
//! when nobody renews it.

mod config;
mod download;
mod grpc;
mod materialize;
mod transfers;
mod upload;

use std::future::Future;

use server::{Host, Listener};

pub use config::Config;

/// The domain of the errors that this service answers.
pub(crate) const SERVICE: &str = "gantry.streamer";

/// Adds the streamer to `host`.
pub fn start(config: &Config, host: &mut Host) -> anyhow::Result<()> {
    let peers = upload::Peers::new(config)?;
    host.add_service(grpc::service(peers, host.tasks(), host.stopping()));
    Ok(())
}

/// Serves on `listener` until `shutdown` resolves, then lets transfers in flight end.
pub async fn serve(
    config: Config,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(config.token.clone());
    start(&config, &mut host)?;
    host.serve([listener], shutdown).await
}
