//! Migrations are commented SQL files that run alike on PostgreSQL and SQLite. A released one is never edited.
//!
//! Invariant: one process migrates at a time. PostgreSQL: an advisory lock held by a transaction of its own. SQLite: a lock
//! file beside the database, taken before the first connection, for turning a fresh file to WAL from two processes fails as well.

use std::fs::File;
use std::path::PathBuf;

use async_trait::async_trait;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, DbErr, Statement, TransactionTrait};
use sea_orm_migration::{MigrationName, MigrationTrait, MigratorTrait, SchemaManager};

use crate::ConnectError;

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

/// What a migrator answers.
#[must_use]
pub fn sql_migrations(migrations: &'static [SqlMigration]) -> Vec<Box<dyn MigrationTrait>> {
    migrations.iter().map(|migration| Box::new(*migration) as Box<dyn MigrationTrait>).collect()
}

impl MigrationName for SqlMigration {
    fn name(&self) -> &str {
        self.name
    }
}

#[async_trait]
impl MigrationTrait for SqlMigration {
    async fn up(&self, manager: &SchemaManager) -> Result<(), DbErr> {
        manager.get_connection().execute_unprepared(self.sql).await.map(|_| ())
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
    let Some(path) = url.strip_prefix("sqlite:") else {
        return Err(ConnectError::UnknownScheme(url.split(':').next().unwrap_or_default().to_owned()));
    };
    let path = path.strip_prefix("//").unwrap_or(path).split('?').next().unwrap_or_default();
    let path = PathBuf::from(format!("{path}.lock"));
    let name = path.display().to_string();
    let locked = tokio::task::spawn_blocking(move || {
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        file.lock()?;
        Ok(file)
    })
    .await
    .map_err(std::io::Error::other)
    .flatten();
    locked.map(Some).map_err(|source| ConnectError::Lock { path: name, source })
}

/// Brings the database to the schema of `M`, one process at a time.
pub(crate) async fn up<M: MigratorTrait>(connection: &DatabaseConnection) -> Result<(), ConnectError> {
    if connection.get_database_backend() != DbBackend::Postgres {
        refuse_newer::<M>(&applied(connection).await?)?;
        return Ok(M::up(connection, None).await?);
    }
    let lock = connection.begin().await?;
    lock.execute_unprepared(&format!("SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")).await?;
    refuse_newer::<M>(&applied(connection).await?)?;
    M::up(connection, None).await?;
    Ok(lock.commit().await?)
}

/// Refuses a database that has another schema than that of `M`.
pub(crate) async fn check<M: MigratorTrait>(connection: &DatabaseConnection) -> Result<(), ConnectError> {
    let applied = applied(connection).await?;
    refuse_newer::<M>(&applied)?;
    let missing: Vec<_> = known::<M>().into_iter().filter(|name| !applied.contains(name)).collect();
    if missing.is_empty() { Ok(()) } else { Err(ConnectError::Older { missing }) }
}

fn refuse_newer<M: MigratorTrait>(applied: &[String]) -> Result<(), ConnectError> {
    let known = known::<M>();
    let unknown: Vec<_> = applied.iter().filter(|name| !known.contains(name)).cloned().collect();
    if unknown.is_empty() { Ok(()) } else { Err(ConnectError::Newer { unknown }) }
}

fn known<M: MigratorTrait>() -> Vec<String> {
    M::migrations().iter().map(|migration| migration.name().to_owned()).collect()
}

/// The migrations that were applied to this database. Changes nothing.
async fn applied(connection: &DatabaseConnection) -> Result<Vec<String>, DbErr> {
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
pub(crate) async fn make_schema(
    connection: &DatabaseConnection,
    schema: &str,
    may_make: bool,
) -> Result<(), ConnectError> {
    let backend = connection.get_database_backend();
    if backend != DbBackend::Postgres {
        return Err(ConnectError::NoSchemas);
    }
    let named = Statement::from_sql_and_values(
        backend,
        "SELECT 1 AS one FROM pg_namespace WHERE nspname = $1",
        [schema.into()],
    );
    if may_make && connection.query_one_raw(named).await?.is_none() {
        let lock = connection.begin().await?;
        lock.execute_unprepared(&format!("SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")).await?;
        lock.execute_unprepared(&format!("CREATE SCHEMA IF NOT EXISTS {schema}")).await?;
        lock.commit().await?;
    }
    Ok(())
}
