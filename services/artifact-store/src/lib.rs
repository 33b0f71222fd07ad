//! The artifact store: what exists, who keeps it alive, where its bytes are, and what is garbage.
//!
//! ```text
//! grpc          parses, calls, answers; the only code that knows protobuf and makes a Status
//! artifacts     names for bytes: made, found, located
//! owners        builds, which keep artifacts
//! caches        and what else keeps them: resource caches, task caches, base resource types, certs
//! pins          what workloads use; settling them
//! holders       the rows of those workloads, and their locks
//! access        which artifacts a team may use
//! replicas      copies that transfers make
//! life          whether this database is what it was, or came out of a backup
//! sessions      who may speak for a worker
//! imports       what workers bring along, and how it comes to be artifacts
//! inventory     the rows of what workers hold, from before it is made until it is there
//! sweep         handing out what gateways shall destroy
//! report        what workers say they hold: confirmed, lost, forgotten
//! set_aside     what a database out of a backup does not know
//! trees         bytes that callers handed over, of which artifacts were made without a worker
//! graves        when and why what is forgotten went
//! losses        what was lost, noticed after a grace, and told in order
//! dispose       what gateways and operators want to be destroyed
//! gone          workers that are gone for good
//! rules         when owners let go: pure
//! mark          what is garbage, and why: pure
//! facts         what is known of things before they are judged
//! marks         the volumes that are garbage, by their workers
//! tombstones    the artifacts that are deleted, by when they are looked at
//! ids           many ids as one value of a statement
//! collect       carries out what `mark` decides
//! collections   tells who looks on what was marked
//! undelete      brings deleted artifacts back while their bytes are there
//! explain       why something is there, or went
//! ```
//!
//! Domain functions work on a transaction that their caller begins and commits, and `now` is an argument. Two rules keep what is in
//! use from being collected. Who adds a reference (a pin, an owner, a use of a cache, a child volume) locks the live target row first, shared; who
//! marks locks the target row, skips what others have locked, and looks for references again in a later statement. SQLite has one
//! writer at a time and needs neither; sea-query leaves the locks out there.

mod access;
mod artifacts;
mod caches;
mod clock;
mod collect;
mod collections;
mod config;
mod dispose;
mod due;
mod entity;
mod explain;
mod facts;
mod gauges;
mod gone;
mod graves;
mod grpc;
mod holders;
mod ids;
mod imports;
#[cfg(test)]
mod interleavings;
mod inventory;
mod life;
mod losses;
mod mark;
mod marks;
mod migrations;
mod owners;
mod pins;
mod receipts;
mod replicas;
mod report;
mod rules;
mod sessions;
mod set_aside;
mod store;
mod sweep;
mod tombstones;
mod trees;
mod undelete;
mod units;
mod volumes;

use std::future::Future;
use std::sync::Arc;

use anyhow::Context;

pub use clock::Clock;
pub use config::{Config, ConfigError, KeySource};
pub use life::restored;

use store::Store;

/// Opens the database, begins the background tasks, and adds the services to `host`.
pub async fn start(config: Config, host: &mut server::Host) -> anyhow::Result<()> {
    config.check()?;
    let store = Arc::new(Store::open(config).await.context("cannot open the artifact store")?);
    collect::be_patient(&store).await.context("cannot give those who went on without us a full term")?;
    host.spawn(collect::collect_forever(store.clone(), host.stopping()));
    grpc::add_services(&store, host);
    host.describe(server::Service {
        name: "artifact-store",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: Vec::new(),
    });
    host.at_last(store.db.clone().close());
    let db = store.db.clone();
    host.add_check("database", move || {
        let db = db.clone();
        async move { db.answers().await }
    });
    gauges::add(&store, host);
    Ok(())
}

/// Brings a database to the schema of this version.
pub async fn migrate(database: &db::Settings) -> Result<(), db::ConnectError> {
    db::Database::open::<migrations::Schema>(database).await.map(drop)
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
