//! Disk space: while the disk has too little room, the gateway asks the artifact store to delete
//! copies and unused caches.

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
const AFTER_FAILURE: Duration = Duration::from_secs(300);

/// Keeps space on the disk free, until the gateway stops.
pub(crate) async fn keep_disk_free_forever(worker: Arc<Worker>) {
    let work = async {
        loop {
            let session = worker.session.opened().await;
            tokio::time::sleep(make_room(&worker, &worker.config.amounts, &session.credential).await).await;
        }
    };
    tokio::select! {
        () = work => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// Measures the disk, and has something deleted if it has too little space. Returns the pause until
/// the next measurement.
async fn make_room(worker: &Worker, amounts: &Amounts, credential: &str) -> Duration {
    let wanted = match worker.runtime.disk().await {
        Ok(disk) => disk.map_or(0, |disk| amounts.bytes_to_free(disk)),
        Err(error) => {
            tracing::debug!(error = error_chain(&error), "cannot measure the disk");
            0
        }
    };
    if wanted == 0 {
        return INTERVAL;
    }
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
        assert_eq!(make_room(&worker, &none, "credential").await, INTERVAL, "there is room");
        let all = Amounts { low_disk: Some(DiskSpace::Bytes(u64::MAX)), ..Amounts::default() };
        for (deleted, pause) in [(5, AFTER_DELETION), (0, AFTER_FAILURE)] {
            let answered = async {
                let StoreCall::MakeRoom(request, answer) = store.next_call().await else {
                    panic!("no request")
                };
                assert!(request.size_bytes > 0);
                let response =
                    pb::MakeRoomResponse { pending_bytes: deleted, ..pb::MakeRoomResponse::default() };
                answer.send(Ok(response)).expect("the gateway waits");
            };
            let (next, ()) = tokio::join!(make_room(&worker, &all, "credential"), answered);
            assert_eq!(next, pause);
        }
        store.end().await;
    }
}
