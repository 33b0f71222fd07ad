//! The context of all features and loops: database, settings, notifier, tasks and shutdown.

use std::future::Future;
use std::sync::Arc;

use db::{Database, Transaction};
use sea_orm::DbErr;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::notify::Notifier;
use crate::notify::changes::Effects;
use crate::poll::PollTicks;

/// Shared handles of the service. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) db: Database,
    pub(crate) config: Arc<Config>,
    /// Ticks of the loops that poll the database.
    pub(crate) ticks: PollTicks,
    pub(crate) notify: Notifier,
    /// Tasks that the service completes before it ends.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the service begins to stop.
    pub(crate) stopping: CancellationToken,
}

impl Context {
    /// Runs one change in one transaction, and announces its effects after the commit.
    pub(crate) async fn change<T, E, F>(
        &self,
        change: impl Fn(Transaction) -> F + Send + Sync,
    ) -> Result<T, E>
    where
        F: Future<Output = Result<(T, Effects), E>> + Send,
        T: Send,
        E: std::error::Error + From<DbErr> + Send + 'static,
    {
        let (answer, effects) = self.db.write(change).await?;
        self.notify.announce(effects);
        Ok(answer)
    }
}
