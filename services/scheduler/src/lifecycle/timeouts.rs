//! Expiry: what time alone changes. Workers fall silent, workloads wait or run for too long, driven leases are not renewed.
//!
//! The loop sleeps until the next deadline that the database knows, and hears of new ones ([`crate::notify::local`]); so a deadline is
//! kept to a few milliseconds without looking often. Driven leases end here and nowhere else: a renewal that comes before that
//! is in time.
//!
//! Only time in which we could be reached counts against anybody: after a start, and after a while in which the loop did not get at the
//! database (which was away, or we were frozen), every worker has the TTL, and every driven lease a full term, before it ([`extend_terms`]).
//! A worker is lost when it has been silent for `lost_after` in all, however often a scheduler was started meanwhile.

use std::time::Duration;

use db::Database;
use domain::Timestamp;
use sea_orm::DbErr;

use crate::config::Config;
use crate::leases;
use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::workers;
use crate::workloads;

/// Gives everybody who must stay in contact time from now on, in one transaction. `alone`: no other replica can have a stream
/// open, so no worker is attended.
pub(crate) async fn extend_terms(db: &Database, config: &Config, alone: bool) -> Result<(), DbErr> {
    db.write(async |txn| {
        let now = Timestamp::now();
        workers::extend_terms(&txn, alone, now).await?;
        leases::extend_terms(&txn, now, config.lease_term).await
    })
    .await
}

/// After how long without a look nobody's silence proves anything.
fn blindness(config: &Config) -> Duration {
    Ord::max(config.worker_ttl.min(config.lease_term) / 2, config.poll * 5)
}

/// Looks at all that time changes, once.
pub(crate) async fn expire(lifecycle: &Lifecycle) -> Result<(), DbErr> {
    let now = Timestamp::now();
    for id in workloads::overdue(lifecycle.context.db.read(), now).await? {
        lifecycle
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                workloads::time_out(&txn, id, lifecycle.context.config.timeout_grace, now, &mut effects)
                    .await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    while leases::any_expired(lifecycle.context.db.read(), now).await? {
        lifecycle
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                leases::expire(&txn, now, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    if workers::any_silent(lifecycle.context.db.read(), &lifecycle.context.config, now).await? {
        lifecycle
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                workers::notice_silence(&txn, &lifecycle.context.config, now, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    lifecycle.end_leases_of_stalled().await?;
    lifecycle.end_orphans().await
}

/// How long nothing is due.
async fn pause(lifecycle: &Lifecycle) -> Duration {
    let poll = lifecycle.context.config.poll;
    match workloads::next_deadline(lifecycle.context.db.read()).await {
        Ok(Some(deadline)) => deadline.since(Timestamp::now()).min(poll),
        Ok(None) | Err(_) => poll,
    }
}

/// Notices what time changes, until the service stops.
pub(crate) async fn expire_forever(lifecycle: Lifecycle) {
    // When the last look began that came to its end.
    let mut looked = Timestamp::now();
    loop {
        let now = Timestamp::now();
        let was_blind = now.since(looked) > blindness(&lifecycle.context.config);
        let look = async {
            if was_blind {
                tracing::warn!("could not look for a while: workers and leases get a full term");
                extend_terms(&lifecycle.context.db, &lifecycle.context.config, false).await?;
            }
            expire(&lifecycle).await
        };
        let result = tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            result = look => result,
        };
        let pause = match result {
            Ok(()) => {
                looked = now;
                pause(&lifecycle).await
            }
            Err(error) => {
                tracing::warn!(error = %error, "cannot look for what has expired");
                lifecycle.context.config.poll
            }
        };
        tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            () = lifecycle.context.notify.local.timer().notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
