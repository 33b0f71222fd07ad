//! The streamer: it plans and watches transfers of artifacts.
//!
//! Bytes take one hop under a ticket of the scheduler: between a caller and a worker's gateway, or
//! between two gateways. If one gateway cannot reach the other, their bytes pass through the
//! streamer. The streamer stores nothing. A planned transfer is a row in the artifact store, with a
//! claim that expires unless it is renewed.
//!
//! The modules, each above those that it uses:
//!
//! - [`api`] serves `Streamer`. Only it knows protobuf types and `Status`.
//! - [`evacuation`] copies the artifacts that would be lost with a worker.
//! - [`upload`], [`download`] and [`copy`] run the transfers.
//! - [`relay`] carries the bytes between two gateways that cannot reach each other, and [`routes`]
//!   has the pairs of such workers.
//! - [`in_flight`] has the table of copies, [`sources`] ranks replicas, and [`rate`] measures
//!   throughput.
//! - [`images`] makes artifacts of images in registries. Their bytes pass through the streamer.
//! - [`peers`] calls the scheduler and the artifact store.
//! - [`config`] has the settings.

mod config;

mod peers;

mod in_flight;
mod rate;
mod routes;
mod sources;

mod relay;

mod copy;
mod download;
mod upload;

mod evacuation;

mod images;

mod api;

use std::future::Future;

use server::{Host, Listener};

pub use config::{Config, ImageArgs};

/// Adds the streamer to `host`.
pub fn start(config: &Config, host: &mut Host) -> anyhow::Result<()> {
    let peers = peers::Peers::new(config)?;
    let images = images::Images::new(&config.images, peers.clone(), host.tasks())?;
    host.add_service(api::images::service(images, host.tasks()));
    host.add_service(api::service(peers, host.tasks(), host.stopping()));
    host.describe(server::Service {
        name: "streamer",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: Vec::new(),
    });
    Ok(())
}

/// Serves on `listener` until `shutdown` resolves, then waits for transfers in flight.
pub async fn serve(
    config: Config,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(config.token.clone());
    start(&config, &mut host)?;
    host.serve([listener], shutdown).await
}
