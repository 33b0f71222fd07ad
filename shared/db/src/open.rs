//! Opening of databases.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use sea_orm::sqlx::{self, Connection, Executor, PgConnection, SqliteConnection};
use sea_orm::{ConnectOptions, ConnectionTrait, DatabaseConnection, DbBackend, DbErr};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::{ConnectError, Database, Migrations, Settings, migrate, settings};

/// How long a connection, or the turn to write, is waited for.
pub(crate) const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection to PostgreSQL was idle that is tried before it is used. One that was used since then fails who comes next where the
/// server has gone in this second, as it fails those who use one at that moment.
const TEST_IDLE_AFTER: Duration = Duration::from_secs(1);

/// How many statements each connection keeps prepared: more than a service has. One that is not kept is parsed and planned each time.
const STATEMENT_CACHE_SIZE: usize = 500;

/// For how many uses of a connection PostgreSQL plans a statement, on average. To plan all statements of a transaction takes about as long as to
/// carry them out once.
const USES_PER_PLAN: u32 = 200;

/// What a page costs PostgreSQL by an index, beside one of a whole table: what we look for is mostly in memory, and nothing turns.
const RANDOM_PAGE_COST: &str = "1.1";

/// What keeps PostgreSQL to indexes ([`Migrations::BY_INDEX`]). What there is no index for it reads as a whole all the same, and believes that to be so dear that
/// it would compile such a statement. With one way to do it a plan is the same for all values, and is made once: by itself PostgreSQL plans some of our
/// statements at each use, for it believes that it knows more of these values than of others.
const INDEX_OPTIONS: [(&str, &str); 5] = [
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    ("plan_cache_mode", "force_generic_plan"),
];

/// How many read from SQLite at a time. They do not wait for the one that writes.
const SQLITE_READERS: u32 = 2;

/// How much room SQLite takes beforehand, in bytes: as much as its log grows to before it is written back.
const RESERVED_BYTES: u32 = 4 << 20;

impl Database {
    /// Opens `url` (`postgres://…`, or `sqlite:///path`, made when it is missing) and brings it to the schema of `M`.
    pub async fn connect<M: Migrations>(url: &str) -> Result<Self, ConnectError> {
        Self::open::<M>(&url.into()).await
    }

    /// Opens the database that `settings` name, and brings it to the schema of `M` unless they forbid that.
    pub async fn open<M: Migrations>(settings: &Settings) -> Result<Self, ConnectError> {
        let mut said = None;
        loop {
            let opened = Self::open_once::<M>(settings).await;
            match opened.map_err(|error| error.with_place(settings)) {
                Err(error) if settings.wait && error.is_unavailable() => {
                    let error = domain::error_chain(&error);
                    // Once for each thing that is wrong.
                    if said.as_ref() != Some(&error) {
                        tracing::warn!(error, "waits for the database");
                        said = Some(error);
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
            // One writer at a time is the fastest that SQLite can be. A file does not hang up: no connection is tried before it is used.
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
            options.max_connections(settings.connections).min_connections(2);
            options.map_sqlx_postgres_opts(|options| {
                let index_options = if M::BY_INDEX { INDEX_OPTIONS.as_slice() } else { &[] };
                options
                    .statement_cache_capacity(STATEMENT_CACHE_SIZE)
                    .options([("random_page_cost", RANDOM_PAGE_COST)])
                    .options(index_options.iter().copied())
            });
            // Tried only after a while: to ask and wait for an answer before each use takes as long as most statements.
            options.test_before_acquire_if_idle_for(TEST_IDLE_AFTER);
            options.map_sqlx_postgres_pool_opts(|pool| {
                pool.after_release(|connection, _| Box::pin(discard_plans_sometimes(connection)))
            });
            if let Some(schema) = &settings.schema {
                options.set_schema_search_path(schema.as_str());
            }
        }
        let write_pool = sea_orm::Database::connect(options.clone()).await?;
        if let Some(schema) = &settings.schema {
            migrate::create_schema(&write_pool, schema, settings.migrate).await?;
        }
        if settings.migrate {
            migrate::up::<M>(&write_pool, &settings.place()).await?;
        } else {
            migrate::check::<M>(&write_pool, &settings.place()).await?;
        }
        let begin_tasks = TaskTracker::new();
        if write_pool.get_database_backend() != DbBackend::Sqlite {
            let schema = settings.schema.clone();
            let (read_pool, options) = (write_pool.clone(), Some(options));
            return Ok(Self { write_pool, read_pool, write_permit: None, schema, options, begin_tasks });
        }
        if let Err(error) = reserve_room(&write_pool).await {
            tracing::warn!(%error, "there is no room on the disk for a reserve of the database");
        }
        options.max_connections(SQLITE_READERS).min_connections(SQLITE_READERS);
        let read_pool = sea_orm::Database::connect(options).await?;
        let write_permit = Some(Arc::new(Semaphore::new(1)));
        Ok(Self { write_pool, read_pool, write_permit, schema: None, options: None, begin_tasks })
    }

    /// The same database by so many connections of its own, for who asks it all the time: a connection that is used again and again has its plans and what
    /// they read at hand, and those of a pool are used in turns. None, or SQLite, which has one that writes: this very one.
    pub async fn with_own_connections(&self, connections: u32) -> Result<Self, DbErr> {
        let Some(mut options) = self.options.clone().filter(|_| connections > 0) else {
            return Ok(self.clone());
        };
        options.max_connections(connections).min_connections(connections);
        let write_pool = sea_orm::Database::connect(options.clone()).await?;
        let (read_pool, options) = (write_pool.clone(), Some(options));
        let schema = self.schema.clone();
        Ok(Self {
            write_pool,
            read_pool,
            write_permit: None,
            schema,
            options,
            begin_tasks: TaskTracker::new(),
        })
    }
}

/// Has SQLite take room on the disk before it needs it, so that it goes on when somebody else fills the disk: how else would
/// be written down what ends, and what may be deleted to make room again?
///
/// What is written once stays: as unused pages of the database, and in the file of the write-ahead log for as long as the database is open.
async fn reserve_room(connection: &DatabaseConnection) -> Result<(), DbErr> {
    let fill = format!("CREATE TABLE reserve AS SELECT zeroblob({RESERVED_BYTES}) AS room");
    for statement in ["DROP TABLE IF EXISTS reserve", &fill, "DROP TABLE reserve"] {
        connection.execute_unprepared(statement).await?;
    }
    Ok(())
}

/// Whether a connection may be used again.
///
/// When a disk is full SQLite may roll a transaction back by itself. The driver, which does not notice, would go on counting it, and make
/// every later transaction a part of one that is never committed. A connection like that is closed.
async fn is_reusable(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    if connection.is_in_transaction() {
        // A rollback that was asked for when the transaction was dropped may still be under way.
        connection.ping().await?;
    }
    Ok(!connection.is_in_transaction())
}

/// PostgreSQL keeps the plan of a statement until somebody has analyzed its tables, which is a minute or more; one that was made when a table
/// was nearly empty reads all of it, however large it has become since. How large tables are it sees whenever it plans.
async fn discard_plans_sometimes(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    if rand::rng().random_ratio(1, USES_PER_PLAN) {
        connection.execute("DISCARD PLANS").await?;
    }
    Ok(true)
}
