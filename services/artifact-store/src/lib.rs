//! The artifact store: artifacts, their owners, and the inventory of all workers.
//!
//! It decides which artifacts, volumes and containers are garbage. The modules, each above the
//! modules that it uses:
//!
//! ```text
//! api         gRPC handlers: parse, call, answer. The only code with protobuf types and Status
//! metrics     gauges of the rows in the database
//! gc          the collector: checks rows that are due, and marks or forgets them
//! explain     why an artifact, cache, volume or container is kept or was deleted
//! inventory   contents of workers: reports, orphans, imports, losses, and deletions by gateways
//! pins        pins of workloads, and settling of workloads
//! caches      owners beside builds: resource caches, task caches, base resource types, certificates
//! artifacts   artifacts and their replicas, and restoring of deleted artifacts
//! builds      owners that keep artifacts until some time after their end
//! holders     rows of workloads, and their locks
//! app         state that all parts of one process share
//! sessions    which gateway session may speak for a worker
//! store_life  the store life of the database, and receipts
//! marks       references to artifacts and volumes, marks, tombstones and the deletion log
//! db          tables, schema, and lists of ids in statements
//! policy      pure rules: when owners let go, and what is garbage
//! ```
//!
//! Domain functions run in a transaction that their caller begins and commits, and get `now` as an
//! argument.
//!
//! Two rules protect artifacts and volumes in use from collection:
//!
//! - A transaction that adds a reference (a pin, an owner, a use of a cache, a child volume) first
//!   takes a shared lock on the live target row.
//! - A transaction that marks takes an exclusive lock on the target row, skips rows that are
//!   locked, and checks for references again in a later statement.
//!
//! SQLite has one writer at a time and needs neither rule. sea-query omits the locks there.

mod clock;
mod config;

mod policy;

mod db;

mod marks;
mod sessions;
mod store_life;

mod app;

mod artifacts;
mod builds;
mod caches;
mod holders;
mod inventory;
mod pins;

mod explain;
mod gc;

mod api;
mod metrics;

use std::future::Future;
use std::sync::Arc;

use anyhow::Context;

pub use clock::Clock;
pub use config::{Config, ConfigError, KeySource};
pub use store_life::restored;

use app::Store;

/// Opens the database, starts the background tasks, and adds the services to `host`.
pub async fn start(config: Config, host: &mut server::Host) -> anyhow::Result<()> {
    config.check()?;
    let store = Arc::new(Store::open(config).await.context("cannot open the artifact store")?);
    gc::extend_terms(&store).await.context("cannot extend the terms of builds, transfers and claims")?;
    host.spawn(gc::collect_forever(store.clone(), host.stopping()));
    api::add_services(&store, host);
    host.describe(server::Service {
        name: "artifact-store",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: Vec::new(),
    });
    host.add_cleanup(store.db.clone().close());
    let db = store.db.clone();
    host.add_check("database", move || {
        let db = db.clone();
        async move { db.ping().await }
    });
    metrics::add(&store, host);
    Ok(())
}

/// Migrates a database to the schema of this version.
pub async fn migrate(database: &::db::Settings) -> Result<(), ::db::ConnectError> {
    ::db::Database::open::<db::migrations::Schema>(database).await.map(drop)
}

/// Serves on `listener` until `shutdown` resolves, then finishes the calls in flight.
pub async fn serve(
    config: Config,
    listener: server::Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = server::Host::new().with_token(config.token.clone());
    start(config, &mut host).await?;
    host.serve([listener], shutdown).await
}
