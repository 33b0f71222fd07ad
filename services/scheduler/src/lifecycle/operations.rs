//! What operators ask of workers: to take no more work, to take work again, to be forgotten.

use std::time::Duration;

use domain::{Timestamp, WorkerId};

use crate::lifecycle::Lifecycle;
use crate::lifecycle::departure::{self, OpenLeases, RegistryError, Withdrawal};
use crate::notify::changes::Effects;
use crate::store_client::Forget;
use crate::workers::{self, Registration, SessionError, Worker};

impl Lifecycle {
    /// Lists the worker of a gateway with which we cannot speak.
    pub(crate) async fn list_incompatible(
        &self,
        hello: &Registration,
        versions: &[u32],
    ) -> Result<(), SessionError> {
        self.context
            .change(async |txn| {
                let (now, mut effects) = (Timestamp::now(), Effects::default());
                workers::list_incompatible(&txn, hello, versions, &self.context.config, now, &mut effects)
                    .await?;
                Ok::<_, SessionError>(((), effects))
            })
            .await
    }

    /// Cordons or retires a worker. Answers it as it is then. `None`: it has gone.
    pub(crate) async fn withdraw_worker(
        &self,
        worker: &str,
        down: Withdrawal,
        interrupt_after: Option<Duration>,
    ) -> Result<Option<Worker>, RegistryError> {
        if down == (Withdrawal::Retire { force: false })
            && let Some(known) = workers::get(self.context.db.read(), &self.context.config, worker).await?
        {
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

    /// Lets a worker take work again. `None`: it was retired, and may register again.
    pub(crate) async fn run_worker(&self, worker: &str) -> Result<Option<Worker>, RegistryError> {
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

    /// Forgets a worker that is not in contact. It has gone, but for what is left of its leases, once this answers: with what ended because of it.
    pub(crate) async fn prune(&self, worker: &str, force: bool) -> Result<OpenLeases, RegistryError> {
        let id = self.context.db.write(async |txn| departure::prunable(&txn, worker).await).await?;
        let mut unended = OpenLeases::default();
        if let Some(id) = id {
            if !force {
                self.store.forget_worker(id, Forget::Check).await.map_err(RegistryError::Kept)?;
            }
            unended = self
                .context
                .change(async |txn| {
                    let mut effects = Effects::default();
                    departure::prune(&txn, worker, &mut effects).await?;
                    Ok::<_, RegistryError>((departure::unended(&*txn, id).await?, effects))
                })
                .await?;
        }
        // It is pruned, and the answer is told once: what of this fails is done by the loops.
        let done = async {
            self.end_orphans().await?;
            departure::depart_all(self, &mut departure::LastAsked::new()).await
        };
        if let Err(error) = done.await {
            tracing::warn!(%error, worker.name = worker, "what is left of a pruned worker is cleared away later");
        }
        Ok(unended)
    }
}
