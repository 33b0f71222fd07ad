//! The watch poll: one look for all who watch something at this replica.
//!
//! Who watches hears of changes by hints ([`crate::notify::local`]), each of which may be lost. Twice in each poll this replica looks which of what is watched
//! has another revision than with the look before, and hints at that. So what many watchers cost the database grows with what changes, and hardly
//! with how many they are.
//!
//! Invariant: a watcher misses no change for longer than until the next look. He subscribes before he looks himself; what comes after that is
//! either new to the next look as well, or was new to one that hinted at it when he had subscribed. What is watched for the first time is always hinted at.

use std::collections::HashMap;

use db::{Database, rows};
use sea_orm::{ConnectionTrait, DbErr, Statement};
use tokio::time::{MissedTickBehavior, interval};
use uuid::Uuid;

use crate::context::Context;
use crate::notify::local::ALL_WORKERS;
use crate::workers::revisions;

/// Of how many workloads the revisions are read at a time.
const AT_ONCE: usize = 5000;

/// By what is watched, the revision with which it was seen last. `None`: it was not there.
type Seen = HashMap<Uuid, Option<i64>>;

/// Looks for all who watch, until the service stops.
pub(crate) async fn look_forever(context: Context) {
    let mut looks = interval(context.config.poll / 2);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut seen = Seen::new();
    loop {
        tokio::select! {
            () = context.stopping.cancelled() => return,
            _ = looks.tick() => {}
        }
        let now = match revisions(&context.db, &context.notify.local.watched()).await {
            Ok(now) => now,
            Err(error) => {
                tracing::debug!(error = %error, "cannot look at what is watched");
                // Each finds out by himself whether the database answers him, and may go to another replica.
                context.notify.local.watched().into_iter().for_each(|id| context.notify.local.changed(id));
                continue;
            }
        };
        for (id, revision) in &now {
            if seen.get(id) != Some(revision) {
                context.notify.local.changed(*id);
            }
        }
        seen = now;
    }
}

/// With which revision each of these is there.
async fn revisions(db: &Database, watched: &[Uuid]) -> Result<Seen, DbErr> {
    let (db, backend) = (db.read(), db.read().get_database_backend());
    let mut found: Seen = watched.iter().map(|id| (*id, None)).collect();
    if let Some(revision) = found.get_mut(&ALL_WORKERS) {
        *revision = Some(revisions::revisions(db).await?.last);
    }
    let workloads: Vec<_> = watched.iter().filter(|id| **id != ALL_WORKERS).collect();
    for some in workloads.chunks(AT_ONCE) {
        let among = rows::among(backend, 1);
        let query = format!("SELECT id, revision FROM workloads WHERE id {among}");
        let given = rows::ids(some.iter().map(|id| **id))?;
        for row in db.query_all_raw(Statement::from_sql_and_values(backend, query, [given])).await? {
            found.insert(row.try_get("", "id")?, Some(row.try_get("", "revision")?));
        }
    }
    Ok(found)
}
