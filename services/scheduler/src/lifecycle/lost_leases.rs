//! Leases whose workers can no longer be counted on: they are ended, or given up.

use std::sync::atomic::Ordering;

use domain::{LeaseId, Timestamp};
use sea_orm::DbErr;

use crate::db::entity::lease::EndedBy;
use crate::leases;
use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::outcome::AttemptEnd;
use crate::workers::{self, revisions};
use crate::workloads;

impl Lifecycle {
    /// Ends the leases of workers that are lost, pruned or have begun anew; gives up those under which something may run still.
    pub(crate) async fn end_orphans(&self) -> Result<(), DbErr> {
        let before = self.orphans_ended.load(Ordering::Relaxed);
        let last = revisions::revisions(self.context.db.read()).await?.last;
        if last == before {
            return Ok(());
        }
        // A database that was restored has fewer.
        let after = if before < last { before } else { 0 };
        let orphans = workers::orphans(self.context.db.read(), after).await?;
        let are_all = orphans.len() < workers::ORPHANS;
        for lease in orphans {
            tracing::info!(lease.id = %lease.id, worker.id = %lease.worker_id, "ending or giving up the lease of a worker that is gone");
            match lease.is_driven() {
                false => {
                    self.context
                        .change(async |txn| {
                            let mut effects = Effects::default();
                            // It may have come back in the meantime.
                            if workers::is_orphan(&*txn, &lease).await? {
                                let (end, now) = (AttemptEnd::WorkerLost, Timestamp::now());
                                workloads::lose_attempt(&txn, &lease, end, now, &mut effects).await?;
                            }
                            Ok::<_, DbErr>(((), effects))
                        })
                        .await?;
                }
                true => {
                    self.end_lease(LeaseId::from_uuid(lease.id), EndedBy::Lost).await?;
                }
            }
        }
        if are_all {
            self.orphans_ended.store(last, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Ends the leases of silent workers under which nothing was started, so that others can do the work.
    pub(crate) async fn end_leases_of_stalled(&self) -> Result<(), DbErr> {
        for lease in
            workers::leases_of_stalled(self.context.db.read(), &self.context.config, Timestamp::now()).await?
        {
            tracing::info!(lease.id = %lease.id, worker.id = %lease.worker_id, "taking back what a silent worker has not started");
            self.context
                .change(async |txn| {
                    let mut effects = Effects::default();
                    workloads::take_back(&txn, &lease, Timestamp::now(), &mut effects).await?;
                    Ok::<_, DbErr>(((), effects))
                })
                .await?;
        }
        Ok(())
    }

    pub(crate) async fn end_lease(&self, lease: LeaseId, by: EndedBy) -> Result<(), DbErr> {
        self.context
            .change(async |txn| {
                let mut effects = Effects::default();
                leases::end(&txn, lease, by, Timestamp::now(), &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await
    }
}
