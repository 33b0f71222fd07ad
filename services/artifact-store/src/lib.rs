//! The artifact store: what exists, what keeps it alive, where its bytes are, and what is garbage.
//!
//! The chapters, each above those that it uses:
//!
//! ```text
//! api         parses, calls, answers; the only code that knows protobuf and makes a Status
//! metrics     gauges of what there is
//! gc          the collector: looks at what is due, and marks or forgets it
//! explain     why something is there, or went
//! inventory   what workers hold: rows, reports, orphans, imports, losses, and what gateways are told to destroy
//! pins        what workloads use, and settling them
//! caches      owners beside builds: resource caches, task caches, base resource types, certs
//! artifacts   names for bytes, their replicas, and bringing them back
//! builds      owners that live until they have ended and let go
//! holders     the rows of workloads, and their locks
//! app         what all parts of one process share
//! sessions    which session may speak for a worker
//! store_life  whether this database is what it was, or came out of a backup
//! marks       what holds things, and the rows that say what is garbage and what went
//! db          tables, the schema, and lists of ids in statements
//! policy      when owners let go, and what is garbage: pure
//! ```
//!
//! Domain functions work on a transaction that their caller begins and commits, and `now` is an argument. Two rules keep what is in
//! use from being collected. A transaction that adds a reference (a pin, an owner, a use of a cache, a child volume) locks the live target row first, shared; one that
//! marks locks the target row, skips what others have locked, and looks for references again in a later statement. SQLite has one
//! writer at a time and needs neither; sea-query leaves the locks out there.

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

/// Opens the database, begins the background tasks, and adds the services to `host`.
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

/// Brings a database to the schema of this version.
pub async fn migrate(database: &::db::Settings) -> Result<(), ::db::ConnectError> {
    ::db::Database::open::<db::migrations::Schema>(database).await.map(drop)
}

/// Serves on `listener` until `shutdown` resolves, then lets work in flight finish.
pub async fn serve(
    config: Config,
    listener: server::Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = server::Host::new().with_token(config.token.clone());
    start(config, &mut host).await?;
    host.serve([listener], shutdown).await
}
