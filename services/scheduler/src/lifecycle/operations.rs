//! Operations of operators on workers: cordon, retire, return to service and prune.

use std::time::Duration;

use domain::{Timestamp, WorkerId};

use crate::db::entity::worker::Desired;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::departure::{self, OpenLeases, RegistryError, Withdrawal};
use crate::notify::changes::Effects;
use crate::store_client::Forget;
use crate::workers::{self, Registration, SessionError, Worker};

impl Lifecycle {
    /// Lists a worker whose gateway supports no protocol version of this scheduler.
    pub(crate) async fn list_incompatible(
        &self,
        registration: &Registration,
        versions: &[u32],
    ) -> Result<(), SessionError> {
        self.context
            .change(async |txn| {
                let (now, mut effects) = (Timestamp::now(), Effects::default());
                workers::list_incompatible(
                    &txn,
                    registration,
                    versions,
                    &self.context.config,
                    now,
                    &mut effects,
                )
                .await?;
                Ok::<_, SessionError>(((), effects))
            })
            .await
    }

    /// Cordons or retires a worker, and returns it. Returns `None` if the worker was removed.
    pub(crate) async fn withdraw_worker(
        &self,
        worker: &str,
        down: Withdrawal,
        interrupt_after: Option<Duration>,
    ) -> Result<Option<Worker>, RegistryError> {
        if down == (Withdrawal::Retire { force: false })
            && let Some(known) = workers::get(self.context.db.read(), &self.context.config, worker).await?
            && known.placed.desired != Desired::Retire
        {
            // A retiring worker is checked before its removal. Here it may get another deadline.
            self.store.forget_worker(known.placed.id, Forget::Check).await.map_err(RegistryError::Kept)?;
        }
        let id = self
            .context
            .change(async |txn| {
                let (now, mut effects) = (Timestamp::now(), Effects::default());
                let id = departure::withdraw_worker(&txn, worker, down, interrupt_after, now, &mut effects)
                    .await?;
                Ok::<_, RegistryError>((id, effects))
            })
            .await?;
        self.worker_now(id).await
    }

    /// Lets a worker take work again. Returns `None` if the worker was retired, and may register
    /// again.
    pub(crate) async fn uncordon_worker(&self, worker: &str) -> Result<Option<Worker>, RegistryError> {
        let id = self
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                let id = departure::run(&txn, worker, &mut effects).await?;
                Ok::<_, RegistryError>((id, effects))
            })
            .await?;
        self.worker_now(id).await
    }

    async fn worker_now(&self, worker: Option<WorkerId>) -> Result<Option<Worker>, RegistryError> {
        let Some(id) = worker else { return Ok(None) };
        Ok(workers::get(self.context.db.read(), &self.context.config, &id.to_string()).await?)
    }

    /// Prunes a worker that is not in contact, and returns its live leases. The worker is removed
    /// except for these leases.
    pub(crate) async fn prune(&self, worker: &str, force: bool) -> Result<OpenLeases, RegistryError> {
        let id = self.context.db.write(async |txn| departure::prunable(&txn, worker).await).await?;
        let mut live = OpenLeases::default();
        if let Some(id) = id {
            if !force {
                self.store.forget_worker(id, Forget::Check).await.map_err(RegistryError::Kept)?;
            }
            live = self
                .context
                .change(async |txn| {
                    let mut effects = Effects::default();
                    departure::prune(&txn, worker, &mut effects).await?;
                    Ok::<_, RegistryError>((departure::live_leases(&*txn, id).await?, effects))
                })
                .await?;
        }
        // The prune is committed. The loops repeat these steps if they fail here.
        let cleanup = async {
            self.end_stranded_leases().await?;
            departure::depart_all(self, &mut departure::LastChecks::new()).await
        };
        if let Err(error) = cleanup.await {
            tracing::warn!(%error, worker.name = worker, "cannot clean up a pruned worker now; the cleanup is retried");
        }
        Ok(live)
    }
}
