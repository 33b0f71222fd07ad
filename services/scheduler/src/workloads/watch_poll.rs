//! The watch poll: one query for all watchers of this replica.
//!
//! Watchers wake on notifications ([`crate::notify::local`]), each of which may be lost. At each
//! tick of the poll, this replica compares the revisions of all watched workloads with those of
//! the previous query, and wakes the watchers of changed ones. The cost for the database therefore
//! depends on the number of changes more than on the number of watchers.
//!
//! Invariant: a watcher misses no change for longer than one interval. A watcher subscribes before
//! its own first read. A later change is new to the next query too, or was new to a query that woke
//! the watcher. A workload that is watched for the first time always wakes its watchers.

use std::collections::HashMap;

use db::{Database, rows};
use sea_orm::{ConnectionTrait, DbErr, Statement};
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use crate::context::Context;
use crate::notify::local::ALL_WORKERS;
use crate::workers::revisions;

/// Maximum number of workloads whose revisions one statement reads.
const MAX_WORKLOADS_PER_QUERY: usize = 5000;

/// The last seen revision of each watched workload. `None`: no row.
type Revisions = HashMap<Uuid, Option<i64>>;

/// Polls for all watchers until the service stops.
pub(crate) async fn poll_forever(context: Context) {
    let mut seen = Revisions::new();
    loop {
        tokio::select! {
            () = context.stopping.cancelled() => return,
            () = sleep_until(context.ticks.after(Instant::now())) => {}
        }
        let now = match revisions(&context.db, &context.notify.local.watched()).await {
            Ok(now) => now,
            Err(error) => {
                tracing::debug!(error = %error, "cannot read the revisions of watched workloads");
                // Each watcher then queries the database and returns its own error, so that its
                // client may try another replica.
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

/// Reads the revisions of watched workloads.
async fn revisions(db: &Database, watched: &[Uuid]) -> Result<Revisions, DbErr> {
    let (db, backend) = (db.read(), db.read().get_database_backend());
    let mut found: Revisions = watched.iter().map(|id| (*id, None)).collect();
    if let Some(revision) = found.get_mut(&ALL_WORKERS) {
        *revision = Some(revisions::revisions(db).await?.last);
    }
    let workloads: Vec<_> = watched.iter().filter(|id| **id != ALL_WORKERS).collect();
    for some in workloads.chunks(MAX_WORKLOADS_PER_QUERY) {
        let among = rows::among(backend, 1);
        let query = format!("SELECT id, revision FROM workloads WHERE id {among}");
        let given = rows::ids(some.iter().map(|id| **id))?;
        for row in db.query_all_raw(Statement::from_sql_and_values(backend, query, [given])).await? {
            found.insert(row.try_get("", "id")?, Some(row.try_get("", "revision")?));
        }
    }
    Ok(found)
}
