//! Databases of the services: PostgreSQL in a cluster, SQLite (one file, one writer) when embedded.
//!
//! - [`Database::connect`] opens a database and migrates it under a lock. Any number of replicas
//!   may start at once.
//! - [`Database::write`] runs a write transaction, and retries it if it conflicts with another
//!   transaction. Nothing else changes rows.
//! - [`Database::read`] returns the connections for queries.
//! - [`Batcher`] runs the calls of many callers in one transaction.
//!
//! Invariant: a change is durable when [`Database::write`] returns. SQLite runs with
//! `synchronous=FULL`, PostgreSQL with its default.

mod availability;
mod batch;
mod error;
mod migrate;
pub mod notify;
mod open;
mod reads;
pub mod rows;
mod settings;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use sea_orm::{ConnectOptions, ConnectionTrait, DatabaseConnection};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

pub use batch::{BatchLost, BatchedCall, Batcher, ReplySenders, group_calls};
pub use error::{ConnectError, is_retryable};
pub use migrate::{Migrations, SqlMigration};
pub use reads::Reads;
pub use settings::{DatabaseArgs, Settings, sqlite_url};
pub use transaction::Transaction;

use crate::availability::Availability;

/// Maximum time of [`Database::ping`]. It is less than the time of a readiness check, so that the
/// check shows the cause.
const PING_TIMEOUT: Duration = Duration::from_millis(2500);

/// The database of one service. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Database {
    /// Connections for write transactions. On SQLite, one connection, whose page cache stays valid
    /// because no other connection writes.
    write_pool: DatabaseConnection,
    /// Connections for queries. On PostgreSQL, the connections of `write_pool`.
    read_pool: Reads,
    /// On PostgreSQL, whether the server accepts connections.
    availability: Option<Arc<Availability>>,
    /// On SQLite, a semaphore with one permit. Writers queue for it instead of failing with
    /// `SQLITE_BUSY`.
    write_permit: Option<Arc<Semaphore>>,
    /// On PostgreSQL, the schema of the tables. `None` means the default of the server.
    schema: Option<String>,
    /// On PostgreSQL, the options for further connections.
    options: Option<ConnectOptions>,
    /// Tasks that begin a transaction.
    begin_tasks: TaskTracker,
}

impl Database {
    /// Checks that the database answers a query. The error is the error chain, for operators.
    pub async fn ping(&self) -> Result<(), String> {
        let reply = tokio::time::timeout(PING_TIMEOUT, self.read_pool.execute_unprepared("SELECT 1")).await;
        match reply {
            Ok(reply) => reply.map(drop).map_err(|error| domain::error_chain(&error)),
            Err(_) => Err(match self.availability.as_ref().and_then(|found| found.last_failure()) {
                Some(cause) => domain::error_chain(&cause),
                None => format!("no reply within {PING_TIMEOUT:?}"),
            }),
        }
    }

    /// Closes all connections, after the last call that uses them. On SQLite this also writes the
    /// write-ahead log back to the database file and deletes the log.
    pub async fn close(self) {
        self.begin_tasks.close();
        self.begin_tasks.wait().await;
        if let Some(availability) = &self.availability {
            availability.close().await;
        }
        // The last connection that SQLite closes writes the log back.
        for connection in [self.read_pool.into_pool(), self.write_pool] {
            if let Err(error) = connection.close().await {
                tracing::warn!(%error, "cannot close the database");
            }
        }
    }

    /// Returns the connections for queries. Each statement sees all transactions that were
    /// committed before it. Statements fail at once while PostgreSQL is unreachable.
    #[must_use]
    pub fn read(&self) -> &Reads {
        &self.read_pool
    }

    /// Whether this database is SQLite, which admits one writer at a time.
    #[must_use]
    pub fn is_sqlite(&self) -> bool {
        self.write_permit.is_some()
    }
}
