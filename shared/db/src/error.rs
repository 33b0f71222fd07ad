//! Errors of databases, and their classification.

use std::error::Error;

use sea_orm::sqlx;
use sea_orm::{DbErr, RuntimeErr};

use crate::Settings;

/// A database could not be opened or brought to the present schema.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is of no database that we know.
    #[error("{0:?} is neither postgres://… nor sqlite://…")]
    UnknownScheme(String),
    /// The lock file beside a SQLite database cannot be had.
    #[error("cannot lock {path}")]
    Lock {
        /// The lock file.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A schema was named for a database that has none.
    #[error("SQLite has no schemas: leave out --database-schema")]
    SchemaUnsupported,
    /// It was asked not to migrate, and the database is that of an older program.
    #[error("the schema is older than this program, it lacks {}: run `migrate`, or leave out --no-migrate", missing.join(", "))]
    SchemaTooOld {
        /// What has not been applied.
        missing: Vec<String>,
    },
    /// The database was migrated by a newer program.
    #[error("the schema is newer than this program, it has {}: start a newer program", unknown.join(", "))]
    SchemaTooNew {
        /// What was applied that this program does not know.
        unknown: Vec<String>,
    },
    /// What its migrations are called is what ours are called, and they made something else.
    #[error(
        "{place} was made by another build of this program ({what}). Nothing in it was changed: start that build, or begin with an empty \
         database"
    )]
    OtherSchema {
        /// The database.
        place: String,
        /// What is different.
        what: String,
    },
    /// The database is damaged.
    #[error(
        "{place} is damaged, or the files beside it (-wal, -shm) are not its own: where it was copied from elsewhere, remove those that \
         did not come with it"
    )]
    Malformed {
        /// The database.
        place: String,
        /// What it said.
        #[source]
        source: DbErr,
    },
    /// The database does not answer, or refused.
    #[error("cannot open the database")]
    Database(#[from] DbErr),
}

impl ConnectError {
    /// The same, as what it is for the database of `settings`.
    pub(crate) fn with_place(self, settings: &Settings) -> Self {
        match self {
            Self::Database(source) if is_malformed(&source) => {
                Self::Malformed { place: settings.place(), source }
            }
            other => other,
        }
    }

    /// Whether nobody answered, or only to say that it is too early, or too many called: later it may be another.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Database(error) if is_unavailable(error))
    }
}

fn is_unavailable(error: &DbErr) -> bool {
    let cause = match error {
        DbErr::ConnectionAcquire(_) => return true,
        DbErr::Conn(RuntimeErr::SqlxError(cause))
        | DbErr::Exec(RuntimeErr::SqlxError(cause))
        | DbErr::Query(RuntimeErr::SqlxError(cause)) => cause,
        _ => return false,
    };
    match &**cause {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut => true,
        sqlx::Error::Database(error) => {
            // Starting up, shutting down (by an operator, or after a crash), too many connections.
            matches!(error.code().as_deref(), Some("57P03" | "57P01" | "57P02" | "53300"))
        }
        _ => false,
    }
}

/// Whether what was asked of a database failed for no fault of its own: nobody answered, or it was given up in favour of others as often as it
/// was tried. It may be another later.
#[must_use]
pub fn is_retryable(error: &DbErr) -> bool {
    is_unavailable(error) || is_conflict(error)
}

/// Whether a file is no SQLite database, or a broken one.
fn is_malformed(error: &DbErr) -> bool {
    let (DbErr::Conn(cause) | DbErr::Exec(cause) | DbErr::Query(cause)) = error else { return false };
    let RuntimeErr::SqlxError(cause) = cause else { return false };
    // SQLITE_CORRUPT, SQLITE_NOTADB.
    let is_one = |code: &str| code.parse().is_ok_and(|code: i32| matches!(code & 0xff, 11 | 26));
    cause.as_database_error().and_then(|error| error.code()).is_some_and(|code| is_one(&code))
}

/// Whether the database gave a transaction up in favour of another, so that trying again may succeed. Whoever has waited for a connection
/// in vain has waited for long enough.
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
    fn whoever_waited_for_a_connection_in_vain_is_told_so() {
        assert!(!is_conflict(&CountError(DbErr::ConnectionAcquire(ConnAcquireErr::Timeout))));
        assert!(!is_conflict(&CountError(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed))));
        assert!(!is_conflict(&CountError(DbErr::RecordNotFound(String::new()))));
    }
}
