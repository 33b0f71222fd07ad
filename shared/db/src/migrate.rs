//! Migrations are commented SQL files that run alike on PostgreSQL and SQLite. A released one is never edited. A line that begins with
//! `-- postgres: ` is a comment to SQLite, and run by PostgreSQL: what says how a table is stored, and not what is in it.
//!
//! Invariant: no service works on a schema that is not what its migrations make. The digest of each applied migration is kept beside it, and
//! compared at each start. Of a database from before digests were kept the tables and columns are compared, with those that the same SQL makes
//! in a SQLite of its own; one that has them all is adopted.
//!
//! Invariant: one process migrates at a time. PostgreSQL: an advisory lock held by a transaction of its own. SQLite: a lock
//! file beside the database, taken before the first connection, for turning a fresh file to WAL from two processes fails as well.

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

/// Any number will do that nobody else locks in the same database.
const ADVISORY_LOCK: i64 = 0x6761_6e74_7279;

/// One migration: a name that sorts after those before it, and its SQL.
#[derive(Debug, Clone, Copy)]
pub struct SqlMigration {
    /// Such as `0001_workers`.
    pub name: &'static str,
    /// Statements for both databases.
    pub sql: &'static str,
}

/// A schema.
pub trait Migrations: 'static {
    /// What makes it, the oldest first.
    const ALL: &'static [SqlMigration];

    /// Whether PostgreSQL shall look rows up by indexes, one after the other, wherever it can, even where it believes a table to be small. It
    /// plans a statement for what a table was when it was looked at last; one that grows by thousands of rows a second is another by then,
    /// and would be read as a whole to find one. For schemas whose statements name rows by what is indexed, and few at a time. Plans are then
    /// made without looking at values: what the condition of a partial index says, a statement must say in the same words, not by a parameter.
    const BY_INDEX: bool = false;
}

/// What the library wants of us to apply migrations.
struct Migrator<M>(PhantomData<fn() -> M>);

impl<M: Migrations> MigratorTrait for Migrator<M> {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        M::ALL.iter().map(|migration| Box::new(*migration) as Box<dyn MigrationTrait>).collect()
    }
}

/// Where the digests of applied migrations are.
const CREATE_DIGESTS: &str =
    "CREATE TABLE IF NOT EXISTS migration_digests (name TEXT PRIMARY KEY, blake3 TEXT NOT NULL)";

/// Of the SQL of a migration.
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

/// Locks the file beside a SQLite database, until the answer is dropped. `None` for PostgreSQL.
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
        // SQLite gives the files beside it the same mode.
        private_file(&database)?;
        Ok(file)
    })
    .await
    .map_err(std::io::Error::other)
    .flatten();
    locked.map(Some).map_err(|source| ConnectError::Lock { path: name, source })
}

/// Opens a file that only its owner reads, whatever the umask and whatever it was before.
fn private_file(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    if file.metadata()?.permissions().mode() & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Brings the database to the schema of `M`, one process at a time.
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
    let unknown = reject_other_schema::<M>(connection, place, &applied).await?;
    if !unknown.is_empty() {
        connection.execute_unprepared(CREATE_DIGESTS).await?;
        for migration in unknown {
            insert_digest(connection, migration.name, &digest(migration.sql)).await?;
        }
    }
    Ok(Migrator::<M>::up(connection, None).await?)
}

/// Refuses a database that has another schema than that of `M`.
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

/// Refuses a database whose schema is not what the migrations that were applied make now. Answers those of which no digest was kept.
async fn reject_other_schema<M: Migrations>(
    connection: &DatabaseConnection,
    place: &str,
    applied: &[String],
) -> Result<Vec<SqlMigration>, ConnectError> {
    let other = |what: String| Err(ConnectError::OtherSchema { place: place.to_owned(), what });
    let kept = digests(connection).await?;
    let applied: Vec<_> =
        M::ALL.iter().filter(|migration| applied.iter().any(|name| name == migration.name)).collect();
    let mut unknown = Vec::new();
    for migration in &applied {
        match kept.get(migration.name) {
            Some(kept) if *kept == digest(migration.sql) => {}
            Some(_) => return other(format!("{} was another one then", migration.name)),
            None => unknown.push(**migration),
        }
    }
    if unknown.is_empty() {
        return Ok(unknown);
    }
    let (there, made) = (columns(connection).await?, columns(&scratch_database(&applied).await?).await?);
    for (table, made) in made {
        let Some(there) = there.get(&table) else { return other(format!("it has no table {table}")) };
        if let Some(column) = made.difference(there).next() {
            return other(format!("the table {table} has no column {column}"));
        }
        if let Some(column) = there.difference(&made).next() {
            return other(format!("the table {table} has a column {column}"));
        }
    }
    Ok(unknown)
}

/// The digest that was kept of each applied migration.
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

/// The tables, each with its columns.
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

/// A database in memory that has what these migrations make.
async fn scratch_database(migrations: &[&SqlMigration]) -> Result<DatabaseConnection, DbErr> {
    let mut options = ConnectOptions::new("sqlite::memory:");
    // Each connection would have a database of its own.
    options.sqlx_logging(false).max_connections(1).min_connections(1);
    let scratch = sea_orm::Database::connect(options).await?;
    for migration in migrations {
        scratch.execute_unprepared(migration.sql).await?;
    }
    Ok(scratch)
}

/// The migrations that were applied to this database. Changes nothing.
async fn applied_migrations(connection: &DatabaseConnection) -> Result<Vec<String>, DbErr> {
    let backend = connection.get_database_backend();
    let is_there = match backend {
        DbBackend::Postgres => "SELECT 1 AS one WHERE to_regclass('seaql_migrations') IS NOT NULL",
        _ => "SELECT 1 AS one FROM sqlite_master WHERE name = 'seaql_migrations'",
    };
    if connection.query_one_raw(Statement::from_string(backend, is_there)).await?.is_none() {
        return Ok(Vec::new());
    }
    let all = Statement::from_string(backend, "SELECT version FROM seaql_migrations ORDER BY version");
    connection.query_all_raw(all).await?.iter().map(|row| row.try_get("", "version")).collect()
}

/// Makes sure that a schema is there. Only where it is missing is the right to make one needed.
pub(crate) async fn create_schema(
    connection: &DatabaseConnection,
    schema: &str,
    may_create: bool,
) -> Result<(), ConnectError> {
    let backend = connection.get_database_backend();
    if backend != DbBackend::Postgres {
        return Err(ConnectError::SchemaUnsupported);
    }
    let named = Statement::from_sql_and_values(
        backend,
        "SELECT 1 AS one FROM pg_namespace WHERE nspname = $1",
        [schema.into()],
    );
    if may_create && connection.query_one_raw(named).await?.is_none() {
        let lock = connection.begin().await?;
        lock.execute_unprepared(&format!("SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")).await?;
        lock.execute_unprepared(&format!("CREATE SCHEMA IF NOT EXISTS {schema}")).await?;
        lock.commit().await?;
    }
    Ok(())
}
