//! Opening of databases, with the options of their connections.
//!
//! [`Database::open`] takes the lock of a SQLite file, connects, migrates, and returns the
//! database.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use sea_orm::sqlx::{self, Connection, Executor, PgConnection, SqliteConnection};
use sea_orm::{ConnectOptions, ConnectionTrait, DatabaseConnection, DbBackend, DbErr};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::availability::Availability;
use crate::error::is_unavailable;
use crate::{ConnectError, Database, Migrations, Reads, Settings, availability, migrate, settings};

/// Longest wait for a connection of the pool, or for the write permit of SQLite.
pub(crate) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// Idle time after which a connection to PostgreSQL is tested before its next use. If the server
/// closes a connection within that time, the next statement fails, like statements that run at that
/// moment.
const TEST_IDLE_AFTER: Duration = Duration::from_secs(1);

/// Number of prepared statements that each connection caches. It exceeds the number of statements
/// of any service. A statement outside of the cache is parsed and planned at each use.
const STATEMENT_CACHE_SIZE: usize = 500;

/// Average number of uses of a PostgreSQL connection between two planning runs. Planning all
/// statements of a transaction takes about as long as running them once.
const USES_PER_PLAN: u32 = 200;

/// Cost of a page read through an index, relative to a sequential read (`random_page_cost` of
/// PostgreSQL). The value suits data that is mostly in memory or on disks without seek times.
const RANDOM_PAGE_COST: &str = "1.1";

/// Options of PostgreSQL that make it use indexes ([`Migrations::BY_INDEX`]).
///
/// PostgreSQL still scans a table without a suitable index. It then estimates a high cost, for
/// which it would compile the statement. `jit=off` prevents that. `force_generic_plan` makes one
/// plan for all values. Without it, PostgreSQL plans some statements at each use, because it
/// expects a better plan for the values at hand.
const INDEX_OPTIONS: [(&str, &str); 5] = [
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    ("plan_cache_mode", "force_generic_plan"),
];

/// Number of connections that read from SQLite. Readers do not wait for the writer.
const SQLITE_READERS: u32 = 2;

/// Bytes of disk space that SQLite reserves: the size at which its write-ahead log is written back.
const RESERVED_BYTES: u32 = 4 << 20;

impl Database {
    /// Opens the database at `url` (`postgres://…` or `sqlite:///path`) and migrates it to the
    /// schema of `M`. A missing SQLite file is created.
    pub async fn connect<M: Migrations>(url: &str) -> Result<Self, ConnectError> {
        Self::open::<M>(&url.into()).await
    }

    /// Opens the database of `settings`, and migrates it to the schema of `M` unless the settings
    /// forbid that.
    pub async fn open<M: Migrations>(settings: &Settings) -> Result<Self, ConnectError> {
        let mut logged = None;
        loop {
            let opened = Self::open_once::<M>(settings).await;
            match opened.map_err(|error| error.with_place(settings)) {
                Err(error) if settings.wait && error.is_unavailable() => {
                    let error = domain::error_chain(&error);
                    // The log has each distinct error once.
                    if logged.as_ref() != Some(&error) {
                        tracing::warn!(error, "waiting for the database");
                        logged = Some(error);
                    }
                    tokio::time::sleep(settings::RETRY_INTERVAL).await;
                }
                opened => return opened,
            }
        }
    }

    async fn open_once<M: Migrations>(settings: &Settings) -> Result<Self, ConnectError> {
        let url = settings.url.as_str();
        let _lock = migrate::lock_file(url).await?;
        let mut options = ConnectOptions::new(match url.strip_prefix("sqlite:") {
            Some(path) if !path.contains('?') => format!("sqlite:{path}?mode=rwc"),
            _ => url.to_owned(),
        });
        options.sqlx_logging(false).acquire_timeout(ACQUIRE_TIMEOUT);
        if url.starts_with("sqlite:") {
            use sea_orm::sqlx::sqlite::{SqliteJournalMode, SqliteSynchronous};
            // SQLite is fastest with one writer at a time. A connection to a file cannot be lost,
            // so it is not tested before use.
            options.max_connections(1).min_connections(1).test_before_acquire(false);
            options.map_sqlx_sqlite_opts(|options| {
                options
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal)
                    .synchronous(SqliteSynchronous::Full)
                    .busy_timeout(Duration::from_secs(10))
                    .statement_cache_capacity(STATEMENT_CACHE_SIZE)
                    .foreign_keys(true)
            });
            options.map_sqlx_sqlite_pool_opts(|pool| {
                pool.after_release(|connection, _| Box::pin(is_reusable(connection)))
            });
        } else {
            options.max_connections(settings.pool()).min_connections(2);
            options.map_sqlx_postgres_opts(|options| {
                let index_options = if M::BY_INDEX { INDEX_OPTIONS.as_slice() } else { &[] };
                options
                    .statement_cache_capacity(STATEMENT_CACHE_SIZE)
                    .options([("random_page_cost", RANDOM_PAGE_COST)])
                    .options(index_options.iter().copied())
            });
            // A test before each use takes as long as most statements.
            options.test_before_acquire_if_idle_for(TEST_IDLE_AFTER);
            options.map_sqlx_postgres_pool_opts(|pool| {
                pool.after_release(|connection, _| Box::pin(discard_plans_sometimes(connection)))
            });
            if let Some(schema) = &settings.schema {
                options.set_schema_search_path(schema.as_str());
            }
        }
        let write_pool = match sea_orm::Database::connect(options.clone()).await {
            Ok(pool) => pool,
            Err(error) => return Err(cause_of_timeout(error, settings).await.into()),
        };
        match prepare::<M>(&write_pool, settings).await {
            Err(ConnectError::Database(error)) => return Err(cause_of_timeout(error, settings).await.into()),
            prepared => prepared?,
        }
        let begin_tasks = TaskTracker::new();
        if write_pool.get_database_backend() != DbBackend::Sqlite {
            let schema = settings.schema.clone();
            let to_server = (*write_pool.get_postgres_connection_pool().connect_options()).clone();
            let availability = Some(Arc::new(Availability::new(to_server, settings.connections)));
            let read_pool = Reads::new(write_pool.clone(), availability.clone());
            let options = Some(options);
            return Ok(Self {
                write_pool,
                read_pool,
                availability,
                write_permit: None,
                schema,
                options,
                begin_tasks,
            });
        }
        if let Err(error) = reserve_room(&write_pool).await {
            tracing::warn!(%error, "cannot reserve disk space for the database");
        }
        options.max_connections(SQLITE_READERS).min_connections(SQLITE_READERS);
        let read_pool = Reads::new(sea_orm::Database::connect(options).await?, None);
        let write_permit = Some(Arc::new(Semaphore::new(1)));
        Ok(Self {
            write_pool,
            read_pool,
            availability: None,
            write_permit,
            schema: None,
            options: None,
            begin_tasks,
        })
    }

    /// Returns the same database with a separate pool of `connections` connections, for a component
    /// that queries all the time. A connection in constant use keeps its plans and caches, while a
    /// shared pool rotates its connections.
    ///
    /// Returns a clone of `self` if `connections` is 0 or the database is SQLite.
    pub async fn with_own_connections(&self, connections: u32) -> Result<Self, DbErr> {
        let Some(mut options) = self.options.clone().filter(|_| connections > 0) else {
            return Ok(self.clone());
        };
        options.max_connections(connections).min_connections(connections);
        let write_pool = sea_orm::Database::connect(options.clone()).await?;
        let read_pool = Reads::new(write_pool.clone(), self.availability.clone());
        let (schema, options) = (self.schema.clone(), Some(options));
        Ok(Self {
            write_pool,
            read_pool,
            availability: self.availability.clone(),
            write_permit: None,
            schema,
            options,
            begin_tasks: TaskTracker::new(),
        })
    }
}

/// Creates the schema and migrates the database, or checks that nothing is missing.
async fn prepare<M: Migrations>(
    connection: &DatabaseConnection,
    settings: &Settings,
) -> Result<(), ConnectError> {
    if let Some(schema) = &settings.schema {
        migrate::create_schema(connection, schema, settings.migrate).await?;
    }
    if settings.migrate {
        migrate::up::<M>(connection, &settings.place()).await
    } else {
        migrate::check::<M>(connection, &settings.place()).await
    }
}

/// Returns the cause of a timeout while PostgreSQL was opened. The driver retries without a message
/// until the timeout.
async fn cause_of_timeout(error: DbErr, settings: &Settings) -> DbErr {
    if settings.file().is_some() || !is_unavailable(&error) {
        return error;
    }
    match settings.url.parse() {
        Ok(options) => availability::diagnose(options, settings.connections).await.unwrap_or(error),
        Err(_) => error,
    }
}

/// Reserves disk space for SQLite, so that small writes succeed when another program fills the
/// disk. A service needs them to record what ended, and to delete data.
///
/// The space stays reserved as unused pages of the database, and as the file of the write-ahead log
/// while the database is open.
async fn reserve_room(connection: &DatabaseConnection) -> Result<(), DbErr> {
    let fill = format!("CREATE TABLE reserve AS SELECT zeroblob({RESERVED_BYTES}) AS room");
    for statement in ["DROP TABLE IF EXISTS reserve", &fill, "DROP TABLE reserve"] {
        connection.execute_unprepared(statement).await?;
    }
    Ok(())
}

/// Whether a connection to SQLite is outside of a transaction. If not, the pool closes it.
///
/// SQLite may roll back a transaction without a request when the disk is full. The driver does not
/// notice, and would nest every later transaction in one that is never committed.
async fn is_reusable(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    if connection.is_in_transaction() {
        // Waits for the rollback that the drop of a transaction has requested.
        connection.ping().await?;
    }
    Ok(!connection.is_in_transaction())
}

/// Discards the cached plans of a connection at one of [`USES_PER_PLAN`] uses.
///
/// PostgreSQL keeps a plan until its tables are analyzed, which takes a minute or more. A plan for
/// a nearly empty table scans the whole table, even after it has grown. PostgreSQL reads the
/// current size of a table at each planning.
async fn discard_plans_sometimes(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    if rand::rng().random_ratio(1, USES_PER_PLAN) {
        connection.execute("DISCARD PLANS").await?;
    }
    Ok(true)
}
