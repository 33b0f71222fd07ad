//! Write transactions, with retries of conflicts.
//!
//! [`Database::write`] is the only entry. On SQLite a semaphore admits one writer at a time.

use std::error::Error;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;
use sea_orm::{
    ConnAcquireErr, DatabaseTransaction, DbErr, SqliteTransactionMode, TransactionOptions, TransactionTrait,
};
use tokio::sync::{Semaphore, SemaphorePermit};
use tracing::Instrument;

use crate::Database;
use crate::error::is_conflict;
use crate::open::ACQUIRE_TIMEOUT;

/// Maximum number of tries of a transaction.
const MAX_ATTEMPTS: u32 = 12;

/// Time after which a transaction is not retried. Its caller has timed out by then, and repeats the
/// call.
const RETRY_WINDOW: Duration = Duration::from_secs(10);

impl Database {
    /// Runs `change` in one transaction, and commits the transaction if `change` succeeds. A
    /// transaction that conflicts with another one is retried, up to [`MAX_ATTEMPTS`] tries within
    /// [`RETRY_WINDOW`].
    ///
    /// `change` may run several times. It must have no effects outside of the transaction, and must
    /// not make network calls. It must not keep the transaction. It receives the transaction by
    /// value, because the compiler cannot prove `Send` for a future that borrows it for any
    /// lifetime.
    pub async fn write<T, E, F>(&self, change: impl Fn(Transaction) -> F + Send + Sync) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>> + Send,
        T: Send,
        E: Error + From<DbErr> + Send + 'static,
    {
        retry_conflicts(|| self.write_once(&change)).await
    }

    async fn write_once<T, E, F>(&self, change: &(impl Fn(Transaction) -> F + Send + Sync)) -> Result<T, E>
    where
        F: Future<Output = Result<T, E>> + Send,
        T: Send,
        E: From<DbErr> + Send,
    {
        let _permit = match &self.write_permit {
            Some(permit) => Some(acquire_write_permit(permit).await?),
            None => None,
        };
        let transaction = Arc::new(self.begin().await?);
        let result = change(Transaction(transaction.clone())).await;
        let transaction = Arc::into_inner(transaction).ok_or_else(|| {
            DbErr::Custom("cannot commit the transaction: its user has kept a reference".to_owned())
        })?;
        match result {
            Ok(value) => {
                transaction.commit().await?;
                Ok(value)
            }
            Err(error) => {
                // The caller needs the first error. The pool closes a connection that cannot roll
                // back.
                if let Err(rollback) = transaction.rollback().await {
                    tracing::debug!(error = %rollback, "cannot roll back a transaction");
                }
                Err(error)
            }
        }
    }

    /// Begins a transaction in a separate task. If the caller is dropped meanwhile, the task still
    /// completes the begin, and the drop of its result rolls the transaction back.
    ///
    /// The driver records a transaction only after the reply of PostgreSQL. If the begin were
    /// cancelled before, the pool would reuse the connection inside of the transaction.
    async fn begin(&self) -> Result<DatabaseTransaction, DbErr> {
        let options = TransactionOptions {
            // A deferred transaction that starts with a read fails at once if another one writes.
            // The busy timeout does not apply to it.
            sqlite_transaction_mode: Some(SqliteTransactionMode::Immediate),
            ..TransactionOptions::default()
        };
        let write_pool = self.write_pool.clone();
        let begin = async move { write_pool.begin_with_options(options).await };
        // The future spawns the task when it is first polled.
        let begun = async {
            self.begin_tasks.spawn(begin.in_current_span()).await.unwrap_or_else(|error| {
                match error.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(error) => Err(DbErr::Custom(error.to_string())),
                }
            })
        };
        match &self.availability {
            Some(availability) => availability.watch(begun).await,
            None => begun.await,
        }
    }
}

/// Runs `once`, and repeats it after each conflict until a limit is reached.
async fn retry_conflicts<T, E, F>(once: impl Fn() -> F) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
    E: Error + 'static,
{
    let (mut attempt, begun) = (0, Instant::now());
    loop {
        attempt += 1;
        match once().await {
            Err(error) if attempt < MAX_ATTEMPTS && begun.elapsed() < RETRY_WINDOW && is_conflict(&error) => {
                let max_millis = 2_u64.pow(attempt.min(8));
                let pause = Duration::from_millis(rand::rng().random_range(0..=max_millis));
                tracing::debug!(attempt, error = %error, "retrying a transaction after a conflict");
                tokio::time::sleep(pause).await;
            }
            done => return done,
        }
    }
}

/// Waits for the write permit of SQLite, for at most [`ACQUIRE_TIMEOUT`].
async fn acquire_write_permit(semaphore: &Semaphore) -> Result<SemaphorePermit<'_>, DbErr> {
    match tokio::time::timeout(ACQUIRE_TIMEOUT, semaphore.acquire()).await {
        Ok(Ok(permit)) => Ok(permit),
        Err(_) => Err(DbErr::ConnectionAcquire(ConnAcquireErr::Timeout)),
        Ok(Err(_)) => Err(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed)),
    }
}

/// A transaction that [`Database::write`] begins, and commits or rolls back.
#[derive(Debug)]
pub struct Transaction(Arc<DatabaseTransaction>);

impl Deref for Transaction {
    type Target = DatabaseTransaction;

    fn deref(&self) -> &DatabaseTransaction {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use sea_orm::{ConnectionTrait, DbBackend, Statement};

    use super::*;
    use crate::{Migrations, SqlMigration};

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
    async fn concurrent_writers_lose_no_update() {
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
    async fn waiting_writers_do_not_block_readers() {
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
        // Long enough for a waiting writer to take a reading connection, if it could.
        for _ in 0..200 {
            database.read().execute_unprepared("SELECT n FROM counter").await.expect("read at once");
        }
        written.add_permits(1);
        while let Some(done) = tasks.join_next().await {
            done.expect("task");
        }
    }
}
