//! The handler of `Workers.WatchWorkers`, which streams each changed worker in its present state.
//!
//! There is no queue of changes. A slow watcher receives the latest state of every worker with a
//! later revision than the last one it received. Revisions become visible in order
//! ([`crate::workers::revisions::changed`]), so none is missed. Several workers may share a
//! revision. Only the last of them carries it, so that a resumed watch has seen all workers of its
//! revision.

use domain::Timestamp;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::watch_workers_response::Change;
use tokio::sync::mpsc::Sender;
use tonic::Status;

use super::{SERVICE, convert, database};
use crate::app::App;
use crate::notify::local::ALL_WORKERS;
use crate::workers;
use crate::workers::removed;
use crate::workers::revisions;

/// Maximum number of changes in one read, and in the buffer of a slow watcher.
pub(super) const BATCH: usize = 100;

type Changes = Sender<Result<pb::WatchWorkersResponse, Status>>;

/// Sends the changes after revision `after`, and then further changes.
pub(super) async fn follow(scheduler: &App, after: u64, changes: &Changes) -> Result<(), Status> {
    let to_status = |error: sea_orm::DbErr| database("watch workers", &error);
    // The subscription precedes the first read, so that no change is missed.
    let mut changes_here = scheduler.context.notify.local.subscribe(ALL_WORKERS);
    let revisions = revisions::revisions(scheduler.context.db.read()).await.map_err(to_status)?;
    let mut seen = i64::try_from(after).unwrap_or(i64::MAX);
    if seen > revisions.last {
        return Err(compacted("cannot resume the watch: the revision does not exist; start a new watch"));
    }
    // A new watch does not report workers that were removed before.
    let mut seen_removed = if seen == 0 { revisions.last } else { seen };
    let mut synced = false;
    loop {
        let db = scheduler.context.db.read();
        let revisions = revisions::revisions(db).await.map_err(to_status)?;
        if seen_removed < revisions.forgotten {
            return Err(compacted(
                "cannot resume the watch: the records of removed workers were deleted; start a new watch",
            ));
        }
        let changed = workers::changed_since(db, &scheduler.context.config, seen, revisions.last)
            .await
            .map_err(to_status)?;
        let gone = removed::removed_since(db, seen_removed, revisions.last).await.map_err(to_status)?;
        let mut found: Vec<_> = changed
            .into_iter()
            .map(|worker| (worker.revision, Change::Worker(to_proto(scheduler, worker))))
            .chain(
                gone.into_iter().map(|gone| (gone.revision, Change::Removed(convert::to_gone_worker(gone)))),
            )
            .collect();
        found.sort_by_key(|(revision, _)| *revision);
        let mut found = found.into_iter().peekable();
        while let Some((revision, change)) = found.next() {
            let last_of_it = found.peek().is_none_or(|(next, _)| *next > revision);
            if !send(changes, if last_of_it { revision } else { revision - 1 }, change).await {
                return Ok(());
            }
        }
        (seen, seen_removed) = (revisions.last, revisions.last);
        if !std::mem::replace(&mut synced, true)
            && !send(changes, seen, Change::Synced(pb::WorkersSynced {})).await
        {
            return Ok(());
        }
        changes_here.changed().await;
    }
}

async fn send(changes: &Changes, revision: i64, change: Change) -> bool {
    let revision = u64::try_from(revision).unwrap_or(0);
    changes.send(Ok(pb::WatchWorkersResponse { revision, change: Some(change) })).await.is_ok()
}

fn to_proto(scheduler: &App, worker: workers::Worker) -> pb::Worker {
    convert::worker(worker, scheduler.context.config.worker_ttl, Timestamp::now())
}

fn compacted(message: &str) -> Status {
    Reason::Compacted.status(SERVICE, message)
}
