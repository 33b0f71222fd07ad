//! Timeouts: silent workers, deadlines of workloads, and expiry of driven leases.
//!
//! The loop sleeps until the next deadline in the database, and wakes when a new deadline is set
//! ([`crate::notify::local`]). A deadline is therefore kept to a few milliseconds without frequent
//! polls. Driven leases expire only here, so a renewal that arrives before this loop is in time.
//!
//! Only time in which the scheduler was reachable counts. After a start, or after a pause of the
//! loop (the database was unavailable, or the process was frozen), every worker has the TTL and
//! every driven lease has a full term ([`extend_terms`]). A worker is lost after `lost_after` of
//! silence, regardless of restarts of the scheduler.

use std::time::Duration;

use db::Database;
use domain::Timestamp;
use sea_orm::DbErr;
use tokio::time::Instant;

use crate::config::Config;
use crate::context::Context;
use crate::leases;
use crate::lifecycle::Lifecycle;
use crate::notify::changes::Effects;
use crate::workers;
use crate::workloads;

/// Gives all workers the TTL and all driven leases a full term from now on, in one transaction.
/// `alone`: no other replica can have open streams, so no worker is attended.
pub(crate) async fn extend_terms(db: &Database, config: &Config, alone: bool) -> Result<(), DbErr> {
    db.write(async |txn| {
        let now = Timestamp::now();
        workers::extend_terms(&txn, alone, now).await?;
        leases::extend_terms(&txn, now, config.lease_term).await
    })
    .await
}

/// Returns the longest pause of the loop after which silence still counts.
fn longest_pause(config: &Config) -> Duration {
    Ord::max(config.worker_ttl.min(config.lease_term) / 2, config.poll * 5)
}

/// Handles all expired deadlines once.
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
                let grace = lifecycle.context.config.timeout_grace;
                leases::expire(&txn, grace, now, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    if workers::any_silent(lifecycle.context.db.read(), &lifecycle.context.config, now).await? {
        lifecycle
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                workers::mark_silent(&txn, &lifecycle.context.config, now, &mut effects).await?;
                // A lost worker may be removed.
                effects.registry = true;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    lifecycle.end_leases_of_stalled().await?;
    lifecycle.end_stranded_leases().await
}

/// Returns the time until which no deadline passes. A new deadline of a workload wakes the loop.
/// The terms of leases and workers only grow, and new ones are longer.
async fn quiet_until(lifecycle: &Lifecycle) -> Result<Instant, DbErr> {
    let Context { db, config, ticks, .. } = &lifecycle.context;
    let (now, at) = (Timestamp::now(), Instant::now());
    let after = |deadline: Timestamp| at + deadline.since(now);
    let next = workloads::next_deadline(db.read()).await?.map(after);
    if !ticks.is_alone() {
        // Terms are checked at each tick.
        return Ok(next.into_iter().fold(ticks.after(at), Instant::min));
    }
    let terms = [leases::next_expiry(db.read()).await?, workers::next_silence(db.read(), config).await?];
    let terms = terms.into_iter().flatten().map(after).map(|term| term.max(ticks.after(at)));
    let shortest = config.worker_ttl.min(config.lease_term);
    let idle = ticks.idle_after(at).min(at + shortest / 2).max(ticks.after(at));
    Ok(next.into_iter().chain(terms).fold(idle, Instant::min))
}

/// Handles expired deadlines until the service stops.
pub(crate) async fn expire_forever(lifecycle: Lifecycle) {
    // The start of the last pass that succeeded.
    let mut last_pass = Timestamp::now();
    let mut quiet_until = Instant::now();
    loop {
        let now = Timestamp::now();
        let was_paused = now.since(last_pass) > longest_pause(&lifecycle.context.config);
        let pass = async {
            if was_paused {
                tracing::warn!(
                    "timeouts were not checked for a while, because the database was unavailable or the process was frozen: workers and leases get a full term"
                );
                extend_terms(&lifecycle.context.db, &lifecycle.context.config, false).await?;
            }
            if Instant::now() < quiet_until {
                return lifecycle.end_stranded_leases().await;
            }
            expire(&lifecycle).await?;
            quiet_until = self::quiet_until(&lifecycle).await?;
            Ok(())
        };
        let result = tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            result = pass => result,
        };
        let pause = match result {
            Ok(()) => {
                last_pass = now;
                let at = Instant::now();
                lifecycle.context.ticks.after(at).min(quiet_until.max(at)).duration_since(at)
            }
            Err(error) => {
                tracing::warn!(error = %error, "cannot handle expired deadlines");
                lifecycle.context.config.poll
            }
        };
        tokio::select! {
            () = lifecycle.context.stopping.cancelled() => return,
            () = lifecycle.context.notify.local.timer().notified() => quiet_until = Instant::now(),
            () = tokio::time::sleep(pause) => {}
        }
    }
}
