//! The databases of the services: PostgreSQL in a cluster, SQLite (one file, one writer) when embedded.
//!
//! [`Database::connect`] migrates under a lock, so that any number of replicas may start at once. [`Database::write`] is the
//! only way to change something: one transaction, begun as a writer, and tried again when the database had to give it up in
//! favour of another; [`Batcher`] has many calls share one. [`Database::read`] is for what changes nothing.
//!
//! Invariant: what [`Database::write`] answered is durable. SQLite runs with `synchronous=FULL`, PostgreSQL with its default.

mod batch;
mod error;
mod migrate;
pub mod notify;
mod open;
pub mod rows;
mod settings;
mod transaction;

use std::sync::Arc;

use sea_orm::{ConnectOptions, ConnectionTrait, DatabaseConnection};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

pub use batch::{BatchLost, BatchedCall, Batcher, ReplySenders, group_calls};
pub use error::{ConnectError, is_retryable};
pub use migrate::{Migrations, SqlMigration};
pub use settings::{DatabaseArgs, Settings, sqlite_url};
pub use transaction::Transaction;

/// A service's own database. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Database {
    /// For transactions. Of SQLite: one connection, always the same, which so knows all that is in the file and reads nothing twice.
    write_pool: DatabaseConnection,
    /// For everything else. Of PostgreSQL: the same connections.
    read_pool: DatabaseConnection,
    /// Of SQLite: whose turn it is to write. Those who wait do so in line instead of failing as busy.
    write_permit: Option<Arc<Semaphore>>,
    /// Of PostgreSQL: where our tables are, unless that is the default.
    schema: Option<String>,
    /// Of PostgreSQL: how it is connected to.
    options: Option<ConnectOptions>,
    /// Transactions that are begin_tasks.
    begin_tasks: TaskTracker,
}

impl Database {
    /// Whether the database answers, as somebody whom it matters to would have it said.
    pub async fn ping(&self) -> Result<(), String> {
        let asked = self.read_pool.execute_unprepared("SELECT 1").await;
        asked.map(drop).map_err(|error| domain::error_chain(&error))
    }

    /// Closes it once nobody uses it any more. Of SQLite, what was written is in the file then, and none is beside it.
    pub async fn close(self) {
        self.begin_tasks.close();
        self.begin_tasks.wait().await;
        // The last one that is closed writes the log back.
        for connection in [self.read_pool, self.write_pool] {
            if let Err(error) = connection.close().await {
                tracing::warn!(%error, "the database cannot be closed");
            }
        }
    }

    /// For what changes nothing: each statement sees what was committed before it.
    #[must_use]
    pub fn read(&self) -> &DatabaseConnection {
        &self.read_pool
    }

    /// Whether this is SQLite, which takes one writer at a time.
    #[must_use]
    pub fn is_sqlite(&self) -> bool {
        self.write_permit.is_some()
    }
}
