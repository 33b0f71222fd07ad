//! What all parts of one process share: database, settings, keys, and the streams that wait for
//! marks.

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

/// The store, as one process has it. Everything that must last is in the database.
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

    /// What a session credential claims, once it was verified.
    pub(crate) async fn verify(&self, credential: &str) -> Result<SessionClaims, VerifyError> {
        self.keys.verify(credential).await
    }

    /// Makes sure that the session of `claims` is recorded, so that [`sessions::fence`] need not
    /// write.
    ///
    /// What this process recorded before is not recorded again; the row alone decides which session
    /// may go on.
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

    /// Forgets that a session was recorded: the database does not know it any more.
    pub(crate) fn unrecord(&self, worker: WorkerId) {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }
}

/// Tells the streams of this process that something of a worker was marked. A hint only: streams
/// look by themselves, too.
#[derive(Debug, Default)]
pub(crate) struct SweepWakers(Mutex<HashMap<WorkerId, watch::Sender<()>>>);

impl SweepWakers {
    /// Changes whenever something of `worker` was marked.
    pub(crate) fn subscribe(&self, worker: WorkerId) -> watch::Receiver<()> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.entry(worker).or_default().subscribe()
    }

    /// Something of `workers` was marked, and committed.
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
