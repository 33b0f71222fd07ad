//! Disk space: while the disk has too little room, the gateway asks the artifact store to delete
//! what is left of ended attempts, and then copies and unused caches.

use std::sync::Arc;
use std::time::Duration;

use domain::error_chain;

use crate::Amounts;
use crate::worker::Worker;

/// Pause between two measurements.
const INTERVAL: Duration = Duration::from_secs(15);
/// Pause after a deletion, until the space is free.
const AFTER_DELETION: Duration = Duration::from_secs(30);
/// Pause after nothing could be deleted.
const AFTER_FAILURE: Duration = Duration::from_secs(60);

/// What the next request deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// Containers and volumes of ended attempts. Their sizes are not known.
    Ended,
    /// Copies and unused caches, too.
    Everything,
}

/// Keeps space on the disk free, until the gateway stops.
pub(crate) async fn keep_disk_free_forever(worker: Arc<Worker>) {
    let work = async {
        let mut scope = Scope::Ended;
        loop {
            let session = worker.session.opened().await;
            let pause;
            (pause, scope) = make_room(&worker, &worker.config.amounts, &session.credential, scope).await;
            tokio::time::sleep(pause).await;
        }
    };
    tokio::select! {
        () = work => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// Measures the disk, and has something deleted if it has too little space. Returns the pause until
/// the next measurement, and what is deleted then.
async fn make_room(worker: &Worker, amounts: &Amounts, credential: &str, scope: Scope) -> (Duration, Scope) {
    let wanted = match worker.runtime.disk().await {
        Ok(disk) => disk.map_or(0, |disk| amounts.bytes_to_free(disk)),
        Err(error) => {
            tracing::debug!(error = error_chain(&error), "cannot measure the disk");
            0
        }
    };
    if wanted == 0 {
        return (INTERVAL, Scope::Ended);
    }
    if scope == Scope::Ended {
        match worker.clients.store.give_up_ended(credential, wanted).await {
            Ok(0) => {}
            Ok(given_up) => {
                tracing::info!(
                    wanted_bytes = wanted,
                    given_up,
                    "containers and volumes of ended attempts are deleted, because the disk has too little space"
                );
                return (AFTER_DELETION, Scope::Everything);
            }
            Err(refusal) => {
                tracing::debug!(error = %refusal, "cannot make room on the disk: trying again");
                return (INTERVAL, Scope::Ended);
            }
        }
    }
    let pause = delete_replicas(worker, credential, wanted).await;
    (pause, Scope::Ended)
}

/// Has copies and unused caches deleted. Returns the pause until the next measurement.
async fn delete_replicas(worker: &Worker, credential: &str, wanted: u64) -> Duration {
    // Without the scheduler, no replica counts as a copy.
    let reliable = worker.clients.scheduler.reliable_workers().await.unwrap_or_else(|refusal| {
        tracing::debug!(error = %refusal, "cannot list reliable workers: no copy is deleted");
        Vec::new()
    });
    match worker.clients.store.make_room(credential, wanted, reliable).await {
        Ok(0) => {
            tracing::warn!(
                wanted_bytes = wanted,
                "the disk has too little space, and neither copies nor unused caches are on it: delete artifacts, or lower GANTRY_WORKER_LOW_DISK"
            );
            AFTER_FAILURE
        }
        Ok(deleted) => {
            tracing::info!(
                wanted_bytes = wanted,
                deleted_bytes = deleted,
                "copies and unused caches are deleted, because the disk has too little space"
            );
            AFTER_DELETION
        }
        Err(refusal) => {
            tracing::debug!(error = %refusal, "cannot make room on the disk: trying again");
            INTERVAL
        }
    }
}

#[cfg(test)]
mod tests {
    use rpc::pb::artifacts as pb;
    use testing::fake::FakeWorker;

    use super::*;
    use crate::capacity::DiskSpace;
    use crate::test_support::FakeGateways;
    use crate::test_support::UNREACHABLE;
    use crate::test_support::store::{Store, StoreCall};

    #[tokio::test(flavor = "multi_thread")]
    async fn space_below_limit_is_requested() {
        let mut store = Store::start().await;
        let machine = FakeWorker::near();
        let worker = machine.gateway(UNREACHABLE, &store.endpoint);
        let none = Amounts { low_disk: Some(DiskSpace::Bytes(0)), ..Amounts::default() };
        let made = make_room(&worker, &none, "credential", Scope::Everything).await;
        assert_eq!(made, (INTERVAL, Scope::Ended), "there is room");
        let all = Amounts { low_disk: Some(DiskSpace::Bytes(u64::MAX)), ..Amounts::default() };
        let (ended, everything) = (Scope::Ended, Scope::Everything);
        for (scope, of_ended, deleted, next) in [
            (ended, 2, 0, (AFTER_DELETION, everything)),
            (ended, 0, 5, (AFTER_DELETION, ended)),
            (everything, 2, 5, (AFTER_DELETION, ended)),
            (everything, 0, 0, (AFTER_FAILURE, ended)),
        ] {
            let answered = async {
                loop {
                    let StoreCall::MakeRoom(request, answer) = store.next_call().await else {
                        panic!("no request")
                    };
                    assert!(request.size_bytes > 0);
                    let made =
                        pb::MakeRoomResponse { of_ended, pending_bytes: deleted, ..Default::default() };
                    answer.send(Ok(made)).expect("the gateway waits");
                    if !request.only_ended || of_ended > 0 {
                        return request.only_ended;
                    }
                }
            };
            let (made, only_ended) = tokio::join!(make_room(&worker, &all, "credential", scope), answered);
            assert_eq!((made, only_ended), (next, scope == ended && of_ended > 0), "{scope:?}");
        }
        store.end().await;
    }
}
