//! The state that all parts of one process share: database, settings, keys and wakers of streams.

pub(crate) mod feed;

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use db::Database;
use domain::worker::SessionClaims;
use domain::{Timestamp, WorkerId};
use rpc::token::{Keys, VerifyError};
use tokio::sync::watch;

use crate::app::feed::CollectionFeed;
use crate::config::{Config, KeySource};
use crate::db::migrations::Schema;
use crate::sessions::{self, SessionError};
use crate::store_life;

/// State of one store process. Everything that must survive a restart is in the database.
pub(crate) struct Store {
    pub(crate) db: Database,
    pub(crate) config: Config,
    pub(crate) sweep_wakers: SweepWakers,
    pub(crate) feed: CollectionFeed,
    keys: Keys,
    recorded: Mutex<HashMap<WorkerId, SessionClaims>>,
}

impl Store {
    pub(crate) async fn open(config: Config) -> anyhow::Result<Self> {
        let db = Database::open::<Schema>(&config.database).await?;
        db.write(|txn| async move { store_life::mint(&txn).await }).await?;
        let keys = match &config.keys {
            KeySource::Fixed(keys) => Keys::fixed(keys),
            KeySource::Scheduler(endpoint) => {
                let outgoing = rpc::client::Outgoing::internal().with_token(config.token.as_deref());
                Keys::new(rpc::client::peer(endpoint, outgoing)?)
            }
        };
        Ok(Self {
            db,
            config,
            sweep_wakers: SweepWakers::default(),
            feed: CollectionFeed::default(),
            keys,
            recorded: Mutex::default(),
        })
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.config.clock.now()
    }

    /// Verifies a session credential and returns its claims.
    pub(crate) async fn verify(&self, credential: &str) -> Result<SessionClaims, VerifyError> {
        self.keys.verify(credential).await
    }

    /// Records the session of `claims`, so that [`sessions::fence`] need not write.
    ///
    /// A session that this process has recorded before is not written again. The row in the
    /// database alone decides which session is current.
    pub(crate) async fn record(&self, claims: &SessionClaims) -> Result<(), SessionError> {
        let recorded =
            self.recorded.lock().unwrap_or_else(PoisonError::into_inner).get(&claims.worker).cloned();
        if recorded.as_ref() == Some(claims) {
            return Ok(());
        }
        let now = self.now();
        let marked = self.db.write(|txn| async move { sessions::record(&txn, claims, now).await }).await?;
        if marked {
            self.sweep_wakers.wake([claims.worker]);
        }
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).insert(claims.worker, claims.clone());
        Ok(())
    }

    /// Forgets that this process recorded a session, because the database does not know it any
    /// more.
    pub(crate) fn unrecord(&self, worker: WorkerId) {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }
}

/// Wakers of this process's sweep streams, by worker. A wake is only a hint, because streams also
/// poll.
#[derive(Debug, Default)]
pub(crate) struct SweepWakers(Mutex<HashMap<WorkerId, watch::Sender<()>>>);

impl SweepWakers {
    /// Returns a receiver that changes whenever a volume or container of `worker` is marked.
    pub(crate) fn subscribe(&self, worker: WorkerId) -> watch::Receiver<()> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.entry(worker).or_default().subscribe()
    }

    /// Wakes the streams of `workers` after a mark is committed.
    pub(crate) fn wake(&self, workers: impl IntoIterator<Item = WorkerId>) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for worker in workers {
            if let Some(sender) = waiting.get(&worker)
                && sender.send(()).is_err()
            {
                waiting.remove(&worker);
            }
        }
    }
}
