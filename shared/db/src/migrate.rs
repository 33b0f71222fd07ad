//! Migrations of databases.
//!
//! A migration is a commented SQL file that runs on PostgreSQL and on SQLite. A released migration
//! is never edited. A line that begins with `-- postgres: ` is a comment for SQLite and a statement
//! for PostgreSQL. Such a line may only say how a table is stored.
//!
//! Invariant: a service never uses a schema other than that of its migrations. The database keeps
//! the digest of each applied migration, and each start compares the digests. If a database has no
//! digests, its tables and columns are compared with those that the migrations create in a scratch
//! SQLite database. If they are equal, the digests are added.
//!
//! Invariant: one process migrates at a time. On PostgreSQL, a separate transaction holds an
//! advisory lock. On SQLite, the process locks a lock file before its first connection. Two
//! processes cannot switch a new file to WAL at the same time.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use sea_orm::{
    ConnectOptions, ConnectionTrait, DatabaseConnection, DbBackend, DbErr, Statement, TransactionTrait,
};
use sea_orm_migration::{MigrationName, MigrationTrait, MigratorTrait, SchemaManager};

use crate::ConnectError;
use crate::settings::sqlite_path;

/// Key of the advisory lock. Any number works that no other program locks in the same database.
const ADVISORY_LOCK: i64 = 0x6761_6e74_7279;

/// A migration: its name and its SQL.
#[derive(Debug, Clone, Copy)]
pub struct SqlMigration {
    /// Name, for example `0001_workers`. It sorts after the names of earlier migrations.
    pub name: &'static str,
    /// Statements for PostgreSQL and SQLite.
    pub sql: &'static str,
}

/// The migrations of one service.
pub trait Migrations: 'static {
    /// All migrations, the oldest first.
    const ALL: &'static [SqlMigration];

    /// Whether PostgreSQL must use indexes wherever it can, even for tables that it considers
    /// small.
    ///
    /// PostgreSQL plans a statement for the size that a table had when it was last analyzed. If the
    /// table grows by thousands of rows per second, such a plan scans the whole table to find one
    /// row.
    ///
    /// This suits schemas whose statements select few rows by indexed columns. Plans are then made
    /// without the values of parameters. A statement must therefore repeat the condition of a
    /// partial index literally, not through a parameter.
    const BY_INDEX: bool = false;
}

/// Adapter to the migration library.
struct Migrator<M>(PhantomData<fn() -> M>);

impl<M: Migrations> MigratorTrait for Migrator<M> {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        M::ALL.iter().map(|migration| Box::new(*migration) as Box<dyn MigrationTrait>).collect()
    }
}

/// Statement that creates the table with the digests of applied migrations.
const CREATE_DIGESTS: &str =
    "CREATE TABLE IF NOT EXISTS migration_digests (name TEXT PRIMARY KEY, blake3 TEXT NOT NULL)";

/// Returns the BLAKE3 digest of a migration's SQL, in hexadecimal.
fn digest(sql: &str) -> String {
    blake3::hash(sql.as_bytes()).to_hex().to_string()
}

async fn insert_digest(connection: &impl ConnectionTrait, name: &str, digest: &str) -> Result<(), DbErr> {
    let insert = "INSERT INTO migration_digests (name, blake3) VALUES ($1, $2)";
    let values = [name.into(), digest.into()];
    let insert = Statement::from_sql_and_values(connection.get_database_backend(), insert, values);
    connection.execute_raw(insert).await.map(drop)
}

impl MigrationName for SqlMigration {
    fn name(&self) -> &str {
        self.name
    }
}

#[async_trait]
impl MigrationTrait for SqlMigration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        let connection = manager.get_connection();
        let sql = match connection.get_database_backend() {
            DbBackend::Postgres => self.sql.replace("\n-- postgres: ", "\n").into(),
            _ => Cow::Borrowed(self.sql),
        };
        connection.execute_unprepared(&sql).await?;
        connection.execute_unprepared(CREATE_DIGESTS).await?;
        insert_digest(connection, self.name, &digest(self.sql)).await
    }

    fn use_transaction(&self) -> Option<bool> {
        Some(true)
    }
}

/// Locks the lock file of a SQLite database until the returned file is dropped. Returns `None` for
/// PostgreSQL.
pub(crate) async fn lock_file(url: &str) -> Result<Option<File>, ConnectError> {
    if url.starts_with("postgres:") || url.starts_with("postgresql:") {
        return Ok(None);
    }
    let Some(path) = sqlite_path(url) else {
        return Err(ConnectError::UnknownScheme(url.split(':').next().unwrap_or_default().to_owned()));
    };
    let (database, path) = (PathBuf::from(&path), PathBuf::from(format!("{path}.lock")));
    let name = path.display().to_string();
    let locked = tokio::task::spawn_blocking(move || {
        let file = private_file(&path)?;
        file.lock()?;
        // SQLite creates the -wal and -shm files with the mode of the database.
        private_file(&database)?;
        Ok(file)
    })
    .await
    .map_err(std::io::Error::other)
    .flatten();
    locked.map(Some).map_err(|source| ConnectError::Lock { path: name, source })
}

/// Opens or creates a file, and restricts its mode to 0600.
fn private_file(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Migrates the database to the schema of `M`. One process migrates at a time.
pub(crate) async fn up<M: Migrations>(
    connection: &DatabaseConnection,
    place: &str,
) -> Result<(), ConnectError> {
    if connection.get_database_backend() != DbBackend::Postgres {
        return migrate::<M>(connection, place).await;
    }
    let lock = connection.begin().await?;
    lock.execute_unprepared(&format!("SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")).await?;
    migrate::<M>(connection, place).await?;
    Ok(lock.commit().await?)
}

async fn migrate<M: Migrations>(connection: &DatabaseConnection, place: &str) -> Result<(), ConnectError> {
    let applied = applied_migrations(connection).await?;
    reject_newer_schema::<M>(&applied)?;
    let without_digest = reject_other_schema::<M>(connection, place, &applied).await?;
    if !without_digest.is_empty() {
        connection.execute_unprepared(CREATE_DIGESTS).await?;
        for migration in without_digest {
            insert_digest(connection, migration.name, &digest(migration.sql)).await?;
        }
    }
    Ok(Migrator::<M>::up(connection, None).await?)
}

/// Checks that the database has the schema of `M`.
pub(crate) async fn check<M: Migrations>(
    connection: &DatabaseConnection,
    place: &str,
) -> Result<(), ConnectError> {
    let applied = applied_migrations(connection).await?;
    reject_newer_schema::<M>(&applied)?;
    reject_other_schema::<M>(connection, place, &applied).await?;
    let missing: Vec<_> = known_names::<M>().into_iter().filter(|name| !applied.contains(name)).collect();
    if missing.is_empty() { Ok(()) } else { Err(ConnectError::SchemaTooOld { missing }) }
}

fn reject_newer_schema<M: Migrations>(applied: &[String]) -> Result<(), ConnectError> {
    let known = known_names::<M>();
    let unknown: Vec<_> = applied.iter().filter(|name| !known.contains(name)).cloned().collect();
    if unknown.is_empty() { Ok(()) } else { Err(ConnectError::SchemaTooNew { unknown }) }
}

fn known_names<M: Migrations>() -> Vec<String> {
    M::ALL.iter().map(|migration| migration.name.to_owned()).collect()
}

/// Checks that the applied migrations are equal to those of this program. Returns the applied
/// migrations without a stored digest.
async fn reject_other_schema<M: Migrations>(
    connection: &DatabaseConnection,
    place: &str,
    applied: &[String],
) -> Result<Vec<SqlMigration>, ConnectError> {
    let other = |what: String| Err(ConnectError::OtherSchema { place: place.to_owned(), what });
    let stored = digests(connection).await?;
    let applied: Vec<_> =
        M::ALL.iter().filter(|migration| applied.iter().any(|name| name == migration.name)).collect();
    let mut without_digest = Vec::new();
    for migration in &applied {
        match stored.get(migration.name) {
            Some(stored) if *stored == digest(migration.sql) => {}
            Some(_) => return other(format!("the migration {} differs", migration.name)),
            None => without_digest.push(**migration),
        }
    }
    if without_digest.is_empty() {
        return Ok(without_digest);
    }
    let (actual, expected) = (columns(connection).await?, columns(&scratch_database(&applied).await?).await?);
    for (table, expected) in expected {
        let Some(actual) = actual.get(&table) else { return other(format!("there is no table {table}")) };
        if let Some(column) = expected.difference(actual).next() {
            return other(format!("the table {table} has no column {column}"));
        }
        if let Some(column) = actual.difference(&expected).next() {
            return other(format!("the table {table} has a column {column}"));
        }
    }
    Ok(without_digest)
}

/// Returns the stored digests, by the names of migrations.
async fn digests(connection: &DatabaseConnection) -> Result<BTreeMap<String, String>, DbErr> {
    if !columns(connection).await?.contains_key("migration_digests") {
        return Ok(BTreeMap::new());
    }
    let all = Statement::from_string(
        connection.get_database_backend(),
        "SELECT name, blake3 FROM migration_digests",
    );
    let rows = connection.query_all_raw(all).await?;
    rows.iter().map(|row| Ok((row.try_get("", "name")?, row.try_get("", "blake3")?))).collect()
}

/// Returns the columns of each table.
async fn columns(connection: &DatabaseConnection) -> Result<BTreeMap<String, BTreeSet<String>>, DbErr> {
    let backend = connection.get_database_backend();
    let all = match backend {
        DbBackend::Postgres => {
            "SELECT table_name::text AS of_table, column_name::text AS of_column FROM information_schema.columns
                WHERE table_schema = current_schema()"
        }
        _ => {
            "SELECT made.name AS of_table, its.name AS of_column
                FROM sqlite_master AS made JOIN pragma_table_info(made.name) AS its WHERE made.type = 'table'"
        }
    };
    let mut columns: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in connection.query_all_raw(Statement::from_string(backend, all)).await? {
        columns.entry(row.try_get("", "of_table")?).or_default().insert(row.try_get("", "of_column")?);
    }
    Ok(columns)
}

/// Creates a SQLite database in memory, and applies `migrations` to it.
async fn scratch_database(migrations: &[&SqlMigration]) -> Result<DatabaseConnection, DbErr> {
    let mut options = ConnectOptions::new("sqlite::memory:");
    // Each connection has a separate database, so there must be only one.
    options.sqlx_logging(false).max_connections(1).min_connections(1);
    let scratch = sea_orm::Database::connect(options).await?;
    for migration in migrations {
        scratch.execute_unprepared(migration.sql).await?;
    }
    Ok(scratch)
}

/// Returns the names of the migrations that were applied to this database.
async fn applied_migrations(connection: &DatabaseConnection) -> Result<Vec<String>, DbErr> {
    let backend = connection.get_database_backend();
    let table_exists = match backend {
        DbBackend::Postgres => "SELECT 1 AS one WHERE to_regclass('seaql_migrations') IS NOT NULL",
        _ => "SELECT 1 AS one FROM sqlite_master WHERE name = 'seaql_migrations'",
    };
    if connection.query_one_raw(Statement::from_string(backend, table_exists)).await?.is_none() {
        return Ok(Vec::new());
    }
    let all = Statement::from_string(backend, "SELECT version FROM seaql_migrations ORDER BY version");
    connection.query_all_raw(all).await?.iter().map(|row| row.try_get("", "version")).collect()
}

/// Creates a schema of PostgreSQL if it is missing and `may_create` is set. An existing schema
/// needs no permission to create one.
pub(crate) async fn create_schema(
    connection: &DatabaseConnection,
    schema: &str,
    may_create: bool,
) -> Result<(), ConnectError> {
    let backend = connection.get_database_backend();
    if backend != DbBackend::Postgres {
        return Err(ConnectError::SchemaUnsupported);
    }
    let find = Statement::from_sql_and_values(
        backend,
        "SELECT 1 AS one FROM pg_namespace WHERE nspname = $1",
        [schema.into()],
    );
    if may_create && connection.query_one_raw(find).await?.is_none() {
        let lock = connection.begin().await?;
        lock.execute_unprepared(&format!("SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")).await?;
        lock.execute_unprepared(&format!("CREATE SCHEMA IF NOT EXISTS {schema}")).await?;
        lock.commit().await?;
    }
    Ok(())
}
