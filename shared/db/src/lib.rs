//! The databases of the services: PostgreSQL in a cluster, SQLite (one file, one writer) when embedded.
//!
//! [`Database::connect`] migrates under a lock, so that any number of replicas may start at once. [`Database::write`] is the
//! only way to change something: one transaction, begun as a writer, and tried again when the database had to give it up in
//! favour of another; [`Batcher`] has many calls share one. [`Database::read`] is for what changes nothing.
//!
//! Invariant: what [`Database::write`] answered is durable. SQLite runs with `synchronous=FULL`, PostgreSQL with its default.

mod batch;
mod migrate;
pub mod notify;
pub mod rows;
mod settings;

use std::error::Error;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;
use sea_orm::sqlx::{self, Connection, Executor, PgConnection, SqliteConnection};
use sea_orm::{
    ConnAcquireErr, ConnectOptions, ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend,
    DbErr, RuntimeErr, SqliteTransactionMode, TransactionOptions, TransactionTrait,
};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::task::TaskTracker;
use tracing::Instrument;

pub use batch::{BatchLost, BatchedCall, Batcher, ReplySenders, group_calls};
pub use migrate::{Migrations, SqlMigration};
pub use settings::{DatabaseArgs, Settings, sqlite_url};

/// How often a transaction is tried again before its failure is told.
const ATTEMPTS: u32 = 12;

/// No transaction is tried again after this long: whoever asked has given up by then, and will ask again.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a connection, or the turn to write, is waited for.
const ACQUIRE: Duration = Duration::from_secs(10);

/// How long a connection to PostgreSQL was idle that is tried before it is used. One that was used since then fails who comes next where the
/// server has gone in this second, as it fails those who use one at that moment.
const TRIED_AFTER: Duration = Duration::from_secs(1);

/// How many statements each connection keeps prepared: more than a service has. One that is not kept is parsed and planned each time.
const STATEMENTS: usize = 500;

/// For how many uses of a connection PostgreSQL plans a statement, on average. To plan all statements of a transaction takes about as long as to
/// carry them out once.
const PLANNED_FOR: u32 = 200;

/// What a page costs PostgreSQL by an index, beside one of a whole table: what we look for is mostly in memory, and nothing turns.
const RANDOM_PAGE_COST: &str = "1.1";

/// What keeps PostgreSQL to indexes ([`Migrations::BY_INDEX`]). What there is no index for it reads as a whole all the same, and believes that to be so dear that
/// it would compile such a statement. With one way to do it a plan is the same for all values, and is made once: by itself PostgreSQL plans some of our
/// statements at each use, for it believes that it knows more of these values than of others.
const BY_INDEX: [(&str, &str); 5] = [
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
    ("plan_cache_mode", "force_generic_plan"),
];

/// How many read from SQLite at a time. They do not wait for the one that writes.
const SQLITE_READERS: u32 = 2;

/// How much room SQLite takes beforehand, in bytes: as much as its log grows to before it is written back.
const RESERVE: u32 = 4 << 20;

/// A service's own database. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Database {
    /// For transactions. Of SQLite: one connection, always the same, which so knows all that is in the file and reads nothing twice.
    writing: DatabaseConnection,
    /// For everything else. Of PostgreSQL: the same connections.
    reading: DatabaseConnection,
    /// Of SQLite: whose turn it is to write. Those who wait do so in line instead of failing as busy.
    turn: Option<Arc<Semaphore>>,
    /// Of PostgreSQL: where our tables are, unless that is the default.
    schema: Option<String>,
    /// Of PostgreSQL: how it is connected to.
    options: Option<ConnectOptions>,
    /// Transactions that are beginning.
    beginning: TaskTracker,
}

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
    NoSchemas,
    /// It was asked not to migrate, and the database is that of an older program.
    #[error("the schema is older than this program, it lacks {}: run `migrate`, or leave out --no-migrate", missing.join(", "))]
    Older {
        /// What has not been applied.
        missing: Vec<String>,
    },
    /// The database was migrated by a newer program.
    #[error("the schema is newer than this program, it has {}: start a newer program", unknown.join(", "))]
    Newer {
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
    fn of(self, settings: &Settings) -> Self {
        match self {
            Self::Database(source) if is_malformed(&source) => {
                Self::Malformed { place: settings.place(), source }
            }
            other => other,
        }
    }

    /// Whether nobody answered, or only to say that it is too early, or too many called: later it may be another.
    #[must_use]
    pub fn is_no_answer(&self) -> bool {
        matches!(self, Self::Database(error) if is_no_answer(error))
    }
}

fn is_no_answer(error: &DbErr) -> bool {
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
pub fn is_away(error: &DbErr) -> bool {
    is_no_answer(error) || is_transient(error)
}

/// Whether a file is no SQLite database, or a broken one.
fn is_malformed(error: &DbErr) -> bool {
    let (DbErr::Conn(cause) | DbErr::Exec(cause) | DbErr::Query(cause)) = error else { return false };
    let RuntimeErr::SqlxError(cause) = cause else { return false };
    // SQLITE_CORRUPT, SQLITE_NOTADB.
    let is_one = |code: &str| code.parse().is_ok_and(|code: i32| matches!(code & 0xff, 11 | 26));
    cause.as_database_error().and_then(|error| error.code()).is_some_and(|code| is_one(&code))
}

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
            match opened.map_err(|error| error.of(settings)) {
                Err(error) if settings.wait && error.is_no_answer() => {
                    let error = domain::error_chain(&error);
                    // Once for each thing that is wrong.
                    if said.as_ref() != Some(&error) {
                        tracing::warn!(error, "waits for the database");
                        said = Some(error);
                    }
                    tokio::time::sleep(settings::PAUSE).await;
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
        options.sqlx_logging(false).acquire_timeout(ACQUIRE);
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
                    .statement_cache_capacity(STATEMENTS)
                    .foreign_keys(true)
            });
            options.map_sqlx_sqlite_pool_opts(|pool| {
                pool.after_release(|connection, _| Box::pin(is_outside_of_transactions(connection)))
            });
        } else {
            options.max_connections(settings.connections).min_connections(2);
            options.map_sqlx_postgres_opts(|options| {
                let by_index = if M::BY_INDEX { BY_INDEX.as_slice() } else { &[] };
                options
                    .statement_cache_capacity(STATEMENTS)
                    .options([("random_page_cost", RANDOM_PAGE_COST)])
                    .options(by_index.iter().copied())
            });
            // Tried only after a while: to ask and wait for an answer before each use takes as long as most statements.
            options.test_before_acquire_if_idle_for(TRIED_AFTER);
            options.map_sqlx_postgres_pool_opts(|pool| {
                pool.after_release(|connection, _| Box::pin(forgets_plans_now_and_then(connection)))
            });
            if let Some(schema) = &settings.schema {
                options.set_schema_search_path(schema.as_str());
            }
        }
        let writing = sea_orm::Database::connect(options.clone()).await?;
        if let Some(schema) = &settings.schema {
            migrate::make_schema(&writing, schema, settings.migrate).await?;
        }
        if settings.migrate {
            migrate::up::<M>(&writing, &settings.place()).await?;
        } else {
            migrate::check::<M>(&writing, &settings.place()).await?;
        }
        let beginning = TaskTracker::new();
        if writing.get_database_backend() != DbBackend::Sqlite {
            let schema = settings.schema.clone();
            let (reading, options) = (writing.clone(), Some(options));
            return Ok(Self { writing, reading, turn: None, schema, options, beginning });
        }
        if let Err(error) = reserve_room(&writing).await {
            tracing::warn!(%error, "there is no room on the disk for a reserve of the database");
        }
        options.max_connections(SQLITE_READERS).min_connections(SQLITE_READERS);
        let reading = sea_orm::Database::connect(options).await?;
        let turn = Some(Arc::new(Semaphore::new(1)));
        Ok(Self { writing, reading, turn, schema: None, options: None, beginning })
    }

    /// The same database by so many connections of its own, for who asks it all the time: a connection that is used again and again has its plans and what
    /// they read at hand, and those of a pool are used in turns. None, or SQLite, which has one that writes: this very one.
    pub async fn apart(&self, connections: u32) -> Result<Self, DbErr> {
        let Some(mut options) = self.options.clone().filter(|_| connections > 0) else {
            return Ok(self.clone());
        };
        options.max_connections(connections).min_connections(connections);
        let writing = sea_orm::Database::connect(options.clone()).await?;
        let (reading, options) = (writing.clone(), Some(options));
        let schema = self.schema.clone();
        Ok(Self { writing, reading, turn: None, schema, options, beginning: TaskTracker::new() })
    }

    /// Whether the database answers, as somebody whom it matters to would have it said.
    pub async fn answers(&self) -> Result<(), String> {
        let asked = self.reading.execute_unprepared("SELECT 1").await;
        asked.map(drop).map_err(|error| domain::error_chain(&error))
    }

    /// Closes it once nobody uses it any more. Of SQLite, what was written is in the file then, and none is beside it.
    pub async fn close(self) {
        self.beginning.close();
        self.beginning.wait().await;
        // The last one that is closed writes the log back.
        for connection in [self.reading, self.writing] {
            if let Err(error) = connection.close().await {
                tracing::warn!(%error, "the database cannot be closed");
            }
        }
    }

    /// For what changes nothing: each statement sees what was committed before it.
    #[must_use]
    pub fn read(&self) -> &DatabaseConnection {
        &self.reading
    }

    /// Whether this is SQLite, which takes one writer at a time.
    #[must_use]
    pub fn is_sqlite(&self) -> bool {
        self.turn.is_some()
    }

    /// Runs `change` in one transaction and commits it, unless it fails. What the database gave up in favour of another is tried again
    /// for a while.
    ///
    /// `change` may run several times, and must have no other effect than on the transaction; no network call happens in it. It gets
    /// the transaction itself and not a reference, for the compiler cannot see that a future may go to another thread when
    /// it holds for every lifetime; it must not keep it.
    pub async fn write<T, E, F>(&self, change: impl Fn(Transaction) -> F + Send + Sync) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>> + Send,
        T: Send,
        E: Error + From<DbErr> + Send + 'static,
    {
        again(|| self.write_once(&change)).await
    }

    async fn write_once<T, E, F>(&self, change: &(impl Fn(Transaction) -> F + Send + Sync)) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>> + Send,
        T: Send,
        E: From<DbErr> + Send,
    {
        let _turn = match &self.turn {
            Some(turn) => Some(take_turn(turn).await?),
            None => None,
        };
        let transaction = Arc::new(self.begin().await?);
        let answer = change(Transaction(transaction.clone())).await;
        let transaction = Arc::into_inner(transaction)
            .ok_or_else(|| DbErr::Custom("a transaction was kept beyond its end".to_owned()))?;
        match answer {
            Ok(answer) => {
                transaction.commit().await?;
                Ok(answer)
            }
            Err(error) => {
                // The error that matters is the first; a connection that cannot roll back is closed.
                if let Err(rollback) = transaction.rollback().await {
                    tracing::debug!(error = %rollback, "rollback failed");
                }
                Err(error)
            }
        }
    }

    /// Begins a transaction. It is a task of its own that does, which sees it through and rolls it back where whoever asked is gone by then: the
    /// driver knows of no transaction before PostgreSQL has answered, and would have the connection used again within it.
    async fn begin(&self) -> Result<DatabaseTransaction, DbErr> {
        let options = TransactionOptions {
            // A deferred transaction that reads first fails at once when another writes: the busy timeout does not apply.
            sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
            ..TransactionOptions::default()
        };
        let writing = self.writing.clone();
        let begins = async move { writing.begin_with_options(options).await };
        self.beginning.spawn(begins.in_current_span()).await.unwrap_or_else(|error| {
            match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(DbErr::Custom(error.to_string())),
            }
        })
    }
}

/// Does what may be tried again for as long as the database gives it up in favour of another, for a while.
async fn again<T, E, F>(once: impl Fn() -> F) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
    E: Error + 'static,
{
    let (mut attempt, begun) = (0, Instant::now());
    loop {
        attempt += 1;
        match once().await {
            Err(error) if attempt < ATTEMPTS && begun.elapsed() < PATIENCE && is_transient(&error) => {
                let most = 2_u64.pow(attempt.min(8));
                let pause = Duration::from_millis(rand::rng().random_range(0..=most));
                tracing::debug!(attempt, error = %error, "transaction given up in favour of another");
                tokio::time::sleep(pause).await;
            }
            done => return done,
        }
    }
}

/// Waits for the turn to write, no longer than for a connection.
async fn take_turn(turn: &Semaphore) -> Result<SemaphorePermit<'_>, DbErr> {
    match tokio::time::timeout(ACQUIRE, turn.acquire()).await {
        Ok(Ok(turn)) => Ok(turn),
        Err(_) => Err(DbErr::ConnectionAcquire(ConnAcquireErr::Timeout)),
        Ok(Err(_)) => Err(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed)),
    }
}

/// A transaction that [`Database::write`] runs, commits and rolls back.
#[derive(Debug)]
pub struct Transaction(Arc<DatabaseTransaction>);

impl Deref for Transaction {
    type Target = DatabaseTransaction;

    fn deref(&self) -> &DatabaseTransaction {
        &self.0
    }
}

/// Has SQLite take room on the disk before it needs it, so that it goes on when somebody else fills the disk: how else would
/// be written down what ends, and what may be deleted to make room again?
///
/// What is written once stays: as unused pages of the database, and in the file of the write-ahead log for as long as the database is open.
async fn reserve_room(connection: &DatabaseConnection) -> Result<(), DbErr> {
    let fill = format!("CREATE TABLE reserve AS SELECT zeroblob({RESERVE}) AS room");
    for statement in ["DROP TABLE IF EXISTS reserve", &fill, "DROP TABLE reserve"] {
        connection.execute_unprepared(statement).await?;
    }
    Ok(())
}

/// Whether a connection may be used again.
///
/// When a disk is full SQLite may roll a transaction back by itself. The driver, which does not notice, would go on counting it, and make
/// every later transaction a part of one that is never committed. A connection like that is closed.
async fn is_outside_of_transactions(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    if connection.is_in_transaction() {
        // A rollback that was asked for when the transaction was dropped may still be under way.
        connection.ping().await?;
    }
    Ok(!connection.is_in_transaction())
}

/// PostgreSQL keeps the plan of a statement until somebody has analyzed its tables, which is a minute or more; one that was made when a table
/// was nearly empty reads all of it, however large it has become since. How large tables are it sees whenever it plans.
async fn forgets_plans_now_and_then(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    if rand::rng().random_ratio(1, PLANNED_FOR) {
        connection.execute("DISCARD PLANS").await?;
    }
    Ok(true)
}

/// Whether the database gave a transaction up in favour of another, so that trying again may succeed. Whoever has waited for a connection
/// in vain has waited for long enough.
fn is_transient(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<DbErr>() {
            return match error {
                DbErr::Conn(cause) | DbErr::Exec(cause) | DbErr::Query(cause) => is_transient_cause(cause),
                _ => false,
            };
        }
        cause = error.source();
    }
    false
}

fn is_transient_cause(cause: &RuntimeErr) -> bool {
    let RuntimeErr::SqlxError(error) = cause else { return false };
    let Some(code) = error.as_database_error().and_then(|error| error.code()) else { return false };
    // PostgreSQL: serialization failure, deadlock. SQLite: busy, busy snapshot, locked.
    matches!(code.as_ref(), "40001" | "40P01" | "5" | "517" | "261" | "6" | "262")
}

#[cfg(test)]
mod tests {
    use sea_orm::Statement;

    use super::*;

    struct Schema;

    impl Migrations for Schema {
        const ALL: &'static [SqlMigration] = &[SqlMigration {
            name: "0001_counter",
            sql: "CREATE TABLE counter (id UUID PRIMARY KEY, n BIGINT NOT NULL, payload BYTEA); INSERT INTO counter (id, n) VALUES (x'00', 0);",
        }];
    }

    #[derive(Debug, thiserror::Error)]
    #[error("counting failed")]
    struct CountError(#[from] DbErr);

    async fn count(database: &Database) -> Result<(), CountError> {
        database
            .write(async |transaction| {
                let backend = transaction.get_database_backend();
                let row = transaction
                    .query_one_raw(Statement::from_string(backend, "SELECT n FROM counter"))
                    .await?
                    .ok_or_else(|| DbErr::RecordNotFound("counter".to_owned()))?;
                let n: i64 = row.try_get("", "n")?;
                let update =
                    Statement::from_sql_and_values(backend, "UPDATE counter SET n = $1", [(n + 1).into()]);
                transaction.execute_raw(update).await?;
                Ok(())
            })
            .await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn writers_that_read_first_lose_nothing_and_any_number_may_open_at_once() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let url = format!("sqlite://{}/counter.db", directory.path().display());
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let url = url.clone();
            tasks.spawn(async move {
                let database = Database::connect::<Schema>(&url).await.expect("open");
                for _ in 0..25 {
                    count(&database).await.expect("count");
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.expect("task");
        }
        let database = Database::connect::<Schema>(&url).await.expect("open");
        let row = database
            .read()
            .query_one_raw(Statement::from_string(DbBackend::Sqlite, "SELECT n FROM counter"))
            .await
            .expect("query")
            .expect("row");
        assert_eq!(row.try_get::<i64>("", "n").expect("n"), 100);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn writers_that_wait_keep_no_connection_from_readers() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let url = format!("sqlite://{}/counter.db", directory.path().display());
        let database = Database::connect::<Schema>(&url).await.expect("open");
        let (writes, written) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let mut tasks = tokio::task::JoinSet::new();
        {
            let (database, writes, written) = (database.clone(), writes.clone(), written.clone());
            tasks.spawn(async move {
                let slow = database.write(async |_| {
                    writes.add_permits(1);
                    written.acquire().await.expect("open").forget();
                    Ok::<_, DbErr>(())
                });
                slow.await.expect("written");
            });
        }
        writes.acquire().await.expect("open").forget();
        for _ in 0..8 {
            let database = database.clone();
            tasks.spawn(async move { count(&database).await.expect("count") });
        }
        // Long enough for one of those who wait to take the other connection, if they could.
        for _ in 0..200 {
            database.read().execute_unprepared("SELECT n FROM counter").await.expect("read at once");
        }
        written.add_permits(1);
        while let Some(done) = tasks.join_next().await {
            done.expect("task");
        }
    }

    #[test]
    fn whoever_waited_for_a_connection_in_vain_is_told_so() {
        assert!(!is_transient(&CountError(DbErr::ConnectionAcquire(ConnAcquireErr::Timeout))));
        assert!(!is_transient(&CountError(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed))));
        assert!(!is_transient(&CountError(DbErr::RecordNotFound(String::new()))));
    }
}
