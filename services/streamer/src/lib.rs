//! The streamer: volumes from worker to worker, in and out.
//!
//! It plans transfers and watches them. Bytes take one hop, between the caller and a worker's gateway, or between two gateways, under
//! tickets that the scheduler signs. The streamer stores nothing: what it planned stands in the artifact store, under a claim that expires
//! unless it is renewed.
//!
//! Chapters, each using those above it: [`config`]; [`peers`], the calls to the other services; [`in_flight`], [`sources`] and [`rate`]
//! (no calls); [`copy`], [`upload`] and [`download`]; [`api`], which alone has types of the contract and makes a `Status`.

mod config;

mod peers;

mod in_flight;
mod rate;
mod sources;

mod copy;
mod download;
mod upload;

mod api;

use std::future::Future;

use server::{Host, Listener};

pub use config::Config;

/// Adds the streamer to `host`.
pub fn start(config: &Config, host: &mut Host) -> anyhow::Result<()> {
    let peers = peers::Peers::new(config)?;
    host.add_service(api::service(peers, host.tasks(), host.stopping()));
    host.describe(server::Service {
        name: "streamer",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: Vec::new(),
    });
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
