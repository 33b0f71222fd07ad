//! Errors of databases and their classification.
//!
//! Three questions decide what happens after an error: whether the database is unavailable, whether
//! a transaction conflicted with another one, and whether a SQLite file is damaged.

use std::error::Error;
use std::io;

use sea_orm::sqlx;
use sea_orm::{DbErr, RuntimeErr};

use crate::Settings;

/// An error of opening or migrating a database.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The URL has a scheme other than `postgres:`, `postgresql:` or `sqlite:`.
    #[error("cannot open a database with a URL of scheme {0:?}: use postgres://… or sqlite:///path")]
    UnknownScheme(String),
    /// The lock file beside a SQLite database cannot be opened or locked.
    #[error("cannot lock {path}")]
    Lock {
        /// The lock file.
        path: String,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The settings name a schema, and the database is SQLite.
    #[error("cannot use a schema, because SQLite has no schemas: leave out --database-schema")]
    SchemaUnsupported,
    /// The database lacks migrations of this program, and the settings forbid to apply them.
    #[error(
        "cannot use the database: it lacks the migrations {}; run `migrate`, or leave out --no-migrate",
        missing.join(", ")
    )]
    SchemaTooOld {
        /// The migrations that have not been applied.
        missing: Vec<String>,
    },
    /// The database was migrated by a newer program.
    #[error(
        "cannot use the database: it has the migrations {} of a newer version; start that version",
        unknown.join(", ")
    )]
    SchemaTooNew {
        /// The applied migrations that this program does not know.
        unknown: Vec<String>,
    },
    /// Migrations with the names of this program's migrations have created another schema.
    #[error(
        "cannot use {place}: another build of this program created it ({what}). The database is unchanged. Start that build, or \
         use an empty database"
    )]
    OtherSchema {
        /// The database.
        place: String,
        /// The difference between the two schemas.
        what: String,
    },
    /// The file of a SQLite database is damaged.
    #[error(
        "cannot use {place}: it is damaged, or the files beside it (-wal, -shm) belong to another database. If {place} is a copy, \
         remove the -wal and -shm files that were not copied with it"
    )]
    Malformed {
        /// The database.
        place: String,
        /// The error of SQLite.
        #[source]
        source: DbErr,
    },
    /// The database is unavailable, or rejected the connection or a statement.
    #[error("cannot open the database")]
    Database(#[from] DbErr),
}

impl ConnectError {
    /// Turns an error of a damaged file into [`ConnectError::Malformed`], which names the database
    /// of `settings`.
    pub(crate) fn with_place(self, settings: &Settings) -> Self {
        match self {
            Self::Database(source) if is_malformed(&source) => {
                Self::Malformed { place: settings.place(), source }
            }
            other => other,
        }
    }

    /// Whether the database is unavailable: it does not answer, starts up, shuts down, or has too
    /// many connections. Opening it may succeed later.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Database(error) if is_unavailable(error))
    }
}

pub(crate) fn is_unavailable(error: &DbErr) -> bool {
    match error {
        DbErr::ConnectionAcquire(_) => true,
        DbErr::Conn(RuntimeErr::SqlxError(cause))
        | DbErr::Exec(RuntimeErr::SqlxError(cause))
        | DbErr::Query(RuntimeErr::SqlxError(cause)) => is_unavailable_cause(cause),
        _ => false,
    }
}

pub(crate) fn is_unavailable_cause(cause: &sqlx::Error) -> bool {
    match cause {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut => true,
        sqlx::Error::Database(error) => {
            // cannot_connect_now, admin_shutdown, crash_shutdown, too_many_connections.
            matches!(error.code().as_deref(), Some("57P03" | "57P01" | "57P02" | "53300"))
        }
        _ => false,
    }
}

/// PostgreSQL has reached its limit of connections.
#[derive(Debug, thiserror::Error)]
#[error(
    "PostgreSQL has no free connection: this service uses at most {connections} connections. Lower --database-connections of the services, or \
     raise max_connections of PostgreSQL"
)]
pub(crate) struct NoFreeConnection {
    connections: u32,
    #[source]
    source: sqlx::Error,
}

impl NoFreeConnection {
    /// Returns the error of a service that uses at most `connections` connections, in place of the
    /// error of PostgreSQL.
    pub(crate) fn of(connections: u32, source: sqlx::Error) -> sqlx::Error {
        sqlx::Error::Io(io::Error::other(Self { connections, source }))
    }
}

/// Whether PostgreSQL rejected a connection because of its limit (too_many_connections).
pub(crate) fn is_no_free_connection(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("53300"))
}

/// Whether a failed call may succeed later without a change: the database was unavailable, or each
/// try of the transaction conflicted with other transactions.
#[must_use]
pub fn is_retryable(error: &DbErr) -> bool {
    is_unavailable(error) || is_conflict(error)
}

/// Whether a file is damaged, or is not a SQLite database.
fn is_malformed(error: &DbErr) -> bool {
    let (DbErr::Conn(cause) | DbErr::Exec(cause) | DbErr::Query(cause)) = error else { return false };
    let RuntimeErr::SqlxError(cause) = cause else { return false };
    // SQLITE_CORRUPT, SQLITE_NOTADB.
    let matches = |code: &str| code.parse().is_ok_and(|code: i32| matches!(code & 0xff, 11 | 26));
    cause.as_database_error().and_then(|error| error.code()).is_some_and(|code| matches(&code))
}

/// Whether a transaction conflicted with another one, so that a retry may succeed. A timeout while
/// waiting for a connection is not a conflict: the caller has waited long enough.
pub(crate) fn is_conflict(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<DbErr>() {
            return match error {
                DbErr::Conn(cause) | DbErr::Exec(cause) | DbErr::Query(cause) => is_conflict_cause(cause),
                _ => false,
            };
        }
        cause = error.source();
    }
    false
}

fn is_conflict_cause(cause: &RuntimeErr) -> bool {
    let RuntimeErr::SqlxError(error) = cause else { return false };
    let Some(code) = error.as_database_error().and_then(|error| error.code()) else { return false };
    // PostgreSQL: serialization failure, deadlock. SQLite: busy, busy snapshot, locked.
    matches!(code.as_ref(), "40001" | "40P01" | "5" | "517" | "261" | "6" | "262")
}

#[cfg(test)]
mod tests {
    use sea_orm::ConnAcquireErr;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("counting failed")]
    struct CountError(#[from] DbErr);

    #[test]
    fn connection_timeout_is_no_conflict() {
        assert!(!is_conflict(&CountError(DbErr::ConnectionAcquire(ConnAcquireErr::Timeout))));
        assert!(!is_conflict(&CountError(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed))));
        assert!(!is_conflict(&CountError(DbErr::RecordNotFound(String::new()))));
    }
}
