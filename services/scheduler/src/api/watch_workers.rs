//! `Workers.WatchWorkers`: each worker as it is, whenever it has changed.
//!
//! Nothing is kept for those who watch: whoever is behind is sent the latest state of what has a later revision than the last one he has seen.
//! Revisions become visible in their order ([`crate::workers::revisions::changed`]), so none is missed. Several workers may share one, which is
//! named only with the last of them: whoever resumes has seen all that its revision stands for.

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

/// How many changes are read at a time, and how many wait for a slow watcher.
pub(super) const BATCH: usize = 100;

type Changes = Sender<Result<pb::WatchWorkersResponse, Status>>;

/// Sends what has changed since `after`, and then what changes.
pub(super) async fn follow(scheduler: &App, after: u64, changes: &Changes) -> Result<(), Status> {
    let failed = |error: sea_orm::DbErr| database("watch workers", &error);
    // Subscribed before the first look, so that nothing falls in between.
    let mut hints = scheduler.context.notify.local.subscribe(ALL_WORKERS);
    let revisions = revisions::revisions(scheduler.context.db.read()).await.map_err(failed)?;
    let mut seen = i64::try_from(after).unwrap_or(i64::MAX);
    if seen > revisions.last {
        return Err(compacted("that revision was never reached"));
    }
    // Who begins does not want to hear of those that have gone before.
    let mut seen_gone = if seen == 0 { revisions.last } else { seen };
    let mut synced = false;
    loop {
        let db = scheduler.context.db.read();
        let revisions = revisions::revisions(db).await.map_err(failed)?;
        if seen_gone < revisions.forgotten {
            return Err(compacted("which workers have gone since is forgotten"));
        }
        let changed = workers::changed_since(db, &scheduler.context.config, seen, revisions.last)
            .await
            .map_err(failed)?;
        let gone = removed::gone_since(db, seen_gone, revisions.last).await.map_err(failed)?;
        let mut found: Vec<_> = changed
            .into_iter()
            .map(|worker| (worker.revision, Change::Worker(shown(scheduler, worker))))
            .chain(gone.into_iter().map(|gone| (gone.revision, Change::Gone(convert::gone_worker(gone)))))
            .collect();
        found.sort_by_key(|(revision, _)| *revision);
        let mut found = found.into_iter().peekable();
        while let Some((revision, change)) = found.next() {
            let last_of_it = found.peek().is_none_or(|(next, _)| *next > revision);
            if !send(changes, if last_of_it { revision } else { revision - 1 }, change).await {
                return Ok(());
            }
        }
        (seen, seen_gone) = (revisions.last, revisions.last);
        if !std::mem::replace(&mut synced, true)
            && !send(changes, seen, Change::Synced(pb::WorkersSynced {})).await
        {
            return Ok(());
        }
        hints.changed().await;
    }
}

async fn send(changes: &Changes, revision: i64, change: Change) -> bool {
    let revision = u64::try_from(revision).unwrap_or(0);
    changes.send(Ok(pb::WatchWorkersResponse { revision, change: Some(change) })).await.is_ok()
}

fn shown(scheduler: &App, worker: workers::Worker) -> pb::Worker {
    convert::worker(worker, scheduler.context.config.worker_ttl, Timestamp::now())
}

fn compacted(message: &str) -> Status {
    Reason::Compacted.status(SERVICE, message)
}
