//! Write transactions.

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

/// How often a transaction is tried again before its failure is told.
const MAX_ATTEMPTS: u32 = 12;

/// No transaction is tried again after this long: whoever asked has given up by then, and will ask again.
const RETRY_WINDOW: Duration = Duration::from_secs(10);

impl Database {
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
        let write_pool = self.write_pool.clone();
        let begins = async move { write_pool.begin_with_options(options).await };
        self.begin_tasks.spawn(begins.in_current_span()).await.unwrap_or_else(|error| {
            match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(DbErr::Custom(error.to_string())),
            }
        })
    }
}

/// Does what may be tried again for as long as the database gives it up in favour of another, for a while.
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
async fn acquire_write_permit(semaphore: &Semaphore) -> Result<SemaphorePermit<'_>, DbErr> {
    match tokio::time::timeout(ACQUIRE_TIMEOUT, semaphore.acquire()).await {
        Ok(Ok(permit)) => Ok(permit),
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
}
