//! Hints between replicas that share a database: who waits for a change that another replica made hears of it at once.
//!
//! A hint is sent after the commit, and nothing may depend on it: it may be lost, and whoever waits also looks at the database now and then.
//! PostgreSQL carries them (`NOTIFY`). A `NOTIFY` in the transaction itself would have all that commit wait for each other, so it is sent by
//! itself. SQLite has no replicas.

use sea_orm::sqlx::postgres::PgListener;
use sea_orm::{ConnectionTrait, DbBackend, DbErr, RuntimeErr, Statement};

use crate::Database;

/// The longest hint, in bytes. PostgreSQL takes no more than 8000.
pub const LONGEST: usize = 7900;

/// Hears hints.
#[derive(Debug)]
pub struct Listener(PgListener);

/// What was heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// A hint.
    Hint(String),
    /// The connection was lost for a while: hints may be missing.
    Gap,
}

impl Database {
    /// Hears what is sent to `channel` from now on. `None`: there are no replicas.
    pub async fn listen(&self, channel: &str) -> Result<Option<Listener>, DbErr> {
        if self.is_sqlite() {
            return Ok(None);
        }
        let pool = self.read().get_postgres_connection_pool();
        let options = pool.connect_options();
        // A connection of its own: one of the pool would be missing there for ever.
        let pool = sea_orm::sqlx::postgres::PgPoolOptions::new()
            .max_connections(1)
            .connect_lazy_with((*options).clone());
        let listening = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            // Its own connection is made anew where it breaks, but not for ever in the middle of a call.
            listener.eager_reconnect(false);
            listener.listen(&self.channel(channel)).await?;
            Ok::<_, sea_orm::sqlx::Error>(listener)
        };
        let listener = listening.await.map_err(|error| DbErr::Conn(RuntimeErr::SqlxError(error.into())))?;
        Ok(Some(Listener(listener)))
    }

    /// Sends a hint of up to [`LONGEST`] bytes to who listens on `channel`, this replica included. Does nothing where there are no replicas.
    pub async fn hint(&self, channel: &str, hint: &str) -> Result<(), DbErr> {
        if self.is_sqlite() {
            return Ok(());
        }
        let notify = Statement::from_sql_and_values(
            DbBackend::Postgres,
            "SELECT pg_notify($1, $2)",
            [self.channel(channel).into(), hint.into()],
        );
        self.read().query_one_raw(notify).await.map(|_| ())
    }

    /// Channels are the whole database's, and services share one, each in a schema of its own.
    fn channel(&self, name: &str) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{name}"),
            None => name.to_owned(),
        }
    }
}

impl Listener {
    /// The next hint. Cancel safe.
    pub async fn heard(&mut self) -> Result<Heard, DbErr> {
        let heard = self.0.try_recv().await;
        let heard = heard.map_err(|error| DbErr::Conn(RuntimeErr::SqlxError(error.into())))?;
        Ok(heard.map_or(Heard::Gap, |hint| Heard::Hint(hint.payload().to_owned())))
    }
}
