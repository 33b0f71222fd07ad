//! Leases of lost and stalled workers: ended or given up.

use std::sync::atomic::Ordering;

use domain::Timestamp;
use sea_orm::DbErr;

use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::outcome::AttemptEnd;
use crate::workers::{self, revisions};
use crate::workloads;

impl Lifecycle {
    /// Ends the leases of workers that are lost, pruned or have a new incarnation. A lease under
    /// which something may still run is given up instead.
    pub(crate) async fn end_stranded_leases(&self) -> Result<(), DbErr> {
        let before = self.stranded_ended.load(Ordering::Relaxed);
        let last = revisions::revisions(self.context.db.read()).await?.last;
        if last == before {
            return Ok(());
        }
        // A restored database may have a lower revision. Then all workers are checked.
        let after = if before < last { before } else { 0 };
        let orphans = workers::stranded_leases(self.context.db.read(), after).await?;
        let are_all = orphans.len() < workers::STRANDED_BATCH;
        for lease in orphans {
            tracing::info!(lease.id = %lease.id, worker.id = %lease.worker_id, "ending or giving up the lease of a lost worker");
            self.context
                .change(async |txn| {
                    let mut effects = Effects::default();
                    // The worker may have returned in the meantime.
                    if workers::is_stranded(&*txn, &lease).await? {
                        let (end, now) = (AttemptEnd::WorkerLost, Timestamp::now());
                        workloads::lose_attempt(&txn, &lease, end, now, &mut effects).await?;
                    }
                    Ok::<_, DbErr>(((), effects))
                })
                .await?;
        }
        if are_all {
            self.stranded_ended.store(last, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Ends the leases of stalled workers without a started process, so that other workers can take
    /// the work.
    pub(crate) async fn end_leases_of_stalled(&self) -> Result<(), DbErr> {
        for lease in
            workers::leases_of_stalled(self.context.db.read(), &self.context.config, Timestamp::now()).await?
        {
            tracing::info!(lease.id = %lease.id, worker.id = %lease.worker_id, "withdrawing an attempt that a stalled worker has not started");
            self.context
                .change(async |txn| {
                    let mut effects = Effects::default();
                    workloads::withdraw_attempt(&txn, &lease, Timestamp::now(), &mut effects).await?;
                    Ok::<_, DbErr>(((), effects))
                })
                .await?;
        }
        Ok(())
    }
}
