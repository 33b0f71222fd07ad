//! Expiry: what time alone changes. Workers fall silent, workloads wait or run for too long, driven leases are not renewed.
//!
//! The loop sleeps until the next deadline that the database knows, and hears of new ones ([`crate::hints`]); so a deadline is
//! kept to a few milliseconds without looking often. Driven leases are only tidied up here: a renewal that comes too late is
//! refused by its own guard.

use std::time::Duration;

use domain::Timestamp;
use sea_orm::DbErr;

use crate::effects::Effects;
use crate::leases;
use crate::service::Scheduler;
use crate::workers;
use crate::workloads;

/// Looks at all that time changes, once.
pub(crate) async fn expire(scheduler: &Scheduler) -> Result<(), DbErr> {
    let now = Timestamp::now();
    for id in workloads::overdue(scheduler.db.read(), now).await? {
        scheduler
            .change(async |txn| {
                let mut effects = Effects::default();
                workloads::time_out(&txn, id, scheduler.config.timeout_grace, now, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    if leases::any_expired(scheduler.db.read(), now).await? {
        scheduler.db.write(async |txn| leases::expire(&txn, now).await).await?;
    }
    if workers::any_silent(scheduler.db.read(), &scheduler.config, now).await? {
        scheduler.db.write(async |txn| workers::notice_silence(&txn, &scheduler.config, now).await).await?;
    }
    scheduler.take_back_unheard().await?;
    scheduler.end_orphans().await
}

/// How long nothing is due.
async fn pause(scheduler: &Scheduler) -> Duration {
    let poll = scheduler.config.poll;
    match workloads::next_deadline(scheduler.db.read()).await {
        Ok(Some(deadline)) => deadline.since(Timestamp::now()).min(poll),
        Ok(None) | Err(_) => poll,
    }
}

/// Notices what time changes, until the service stops.
pub(crate) async fn expire_forever(scheduler: Scheduler) {
    loop {
        let result = tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            result = expire(&scheduler) => result,
        };
        let pause = match result {
            Ok(()) => pause(&scheduler).await,
            Err(error) => {
                tracing::warn!(error = %error, "cannot look for what has expired");
                scheduler.config.poll
            }
        };
        tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            () = scheduler.hints.timer().notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
