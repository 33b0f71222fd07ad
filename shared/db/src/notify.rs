//! Notifications between replicas that share a PostgreSQL database (`LISTEN` and `NOTIFY`).
//!
//! A replica sends a notification after it has committed a change. A notification can be lost, so
//! every receiver also polls the database. [`Database::notify`] uses a separate statement, because
//! a `NOTIFY` within the transaction would serialize all commits. SQLite has no replicas and sends
//! nothing.

use sea_orm::sqlx::postgres::PgListener;
use sea_orm::{ConnectionTrait, DbBackend, DbErr, RuntimeErr, Statement};

use crate::Database;

/// The longest payload of a notification, in bytes. PostgreSQL accepts up to 8000.
pub const MAX_PAYLOAD_BYTES: usize = 7900;

/// Receives the notifications of one channel.
#[derive(Debug)]
pub struct Listener(PgListener);

/// A result of [`Listener::receive`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// The payload of a notification.
    Payload(String),
    /// The connection was lost for a while. Notifications may be missing.
    Gap,
}

impl Database {
    /// Subscribes to the notifications of `channel`. Returns `None` on SQLite.
    pub async fn listen(&self, channel: &str) -> Result<Option<Listener>, DbErr> {
        if self.is_sqlite() {
            return Ok(None);
        }
        let pool = self.read().get_postgres_connection_pool();
        let options = pool.connect_options();
        // The listener needs a separate connection: the pool would never get one of its connections
        // back.
        let pool = sea_orm::sqlx::postgres::PgPoolOptions::new()
            .max_connections(1)
            .connect_lazy_with((*options).clone());
        let listening = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            // The listener reconnects in the next `receive`, so that a lost connection shows as a
            // gap.
            listener.eager_reconnect(false);
            listener.listen(&self.channel(channel)).await?;
            Ok::<_, sea_orm::sqlx::Error>(listener)
        };
        let listener = listening.await.map_err(|error| DbErr::Conn(RuntimeErr::SqlxError(error.into())))?;
        Ok(Some(Listener(listener)))
    }

    /// Sends `payload`, at most [`MAX_PAYLOAD_BYTES`] bytes, to all listeners of `channel`, this
    /// replica included. Does nothing on SQLite.
    pub async fn notify(&self, channel: &str, payload: &str) -> Result<(), DbErr> {
        if self.is_sqlite() {
            return Ok(());
        }
        let notify = Statement::from_sql_and_values(
            DbBackend::Postgres,
            "SELECT pg_notify($1, $2)",
            [self.channel(channel).into(), payload.into()],
        );
        self.read().query_one_raw(notify).await.map(|_| ())
    }

    /// The channel's name within the database. Services can share a database, each in its own
    /// schema.
    fn channel(&self, name: &str) -> String {
        match &self.schema {
            Some(schema) => format!("{schema}.{name}"),
            None => name.to_owned(),
        }
    }
}

impl Listener {
    /// Waits for the next notification. Cancel safe.
    pub async fn receive(&mut self) -> Result<Received, DbErr> {
        let received = self.0.try_recv().await;
        let received = received.map_err(|error| DbErr::Conn(RuntimeErr::SqlxError(error.into())))?;
        Ok(received.map_or(Received::Gap, |received| Received::Payload(received.payload().to_owned())))
    }
}
