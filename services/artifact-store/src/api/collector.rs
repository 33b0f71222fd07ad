//! Handlers of `gantry.artifacts.v1.Collector`.

use std::pin::Pin;
use std::sync::Arc;

use domain::WorkerId;
use rpc::pb::artifacts as pb;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::api::inventory_messages::MAX_AT_RISK;
use crate::api::{Handlers, errors};
use crate::gc;
use crate::gc::dry_run::{self, DryRunResult};
use crate::policy::garbage::{CollectedItem, Kind};

/// Number of messages buffered for a slow reader.
const BUFFERED_MESSAGES: usize = 1;

/// Maximum number of marks in one answer, so that it fits into a message.
const MAX_NAMED: usize = 10_000;

#[tonic::async_trait]
impl pb::collector_server::Collector for Handlers {
    async fn collect(
        &self,
        request: Request<pb::CollectRequest>,
    ) -> Result<Response<pb::CollectResponse>, Status> {
        let request = request.into_inner();
        let dry_run = rpc::parse_enum("dry_run", request.dry_run)?;
        if request.short_worker_ids.len() > MAX_AT_RISK {
            let message = format!("must be at most {MAX_AT_RISK}");
            return Err(rpc::invalid_field("short_worker_ids", message));
        }
        let short = request.short_worker_ids.iter().map(|id| rpc::parse_id("short_worker_ids", id));
        let short = short.collect::<Result<Vec<WorkerId>, _>>()?;
        let failed = |error| errors::database("collect garbage", &error);
        let DryRunResult { collected, is_cut_off } = match dry_run {
            pb::DryRun::Unspecified => return Err(rpc::invalid_field("dry_run", "is required")),
            pb::DryRun::Only => dry_run::round(&self.store, &short, MAX_NAMED + 1).await.map_err(failed)?,
            pb::DryRun::Off => {
                let mut collected = Vec::new();
                for worker in short {
                    collected.extend(gc::give_up_ended(&self.store, worker).await.map_err(failed)?);
                }
                collected.extend(gc::full_round(&self.store, &self.stopping).await.map_err(failed)?);
                DryRunResult { collected, is_cut_off: false }
            }
        };
        let kept = gc::steps::attempts::kept_containers(self.store.db.read(), &self.policy()).await;
        let kept_containers = kept.map_err(failed)?.map(|kept| pb::KeptContainers {
            containers: kept.number,
            until: Some(rpc::timestamp(kept.until)),
        });

        let truncated = is_cut_off || collected.len() > MAX_NAMED;
        let collected = collected.iter().take(MAX_NAMED).map(collected_message).collect();
        Ok(Response::new(pb::CollectResponse { collected, truncated, kept_containers }))
    }

    type WatchCollectionsStream =
        Pin<Box<dyn Stream<Item = Result<pb::WatchCollectionsResponse, Status>> + Send>>;

    async fn watch_collections(
        &self,
        _: Request<pb::WatchCollectionsRequest>,
    ) -> Result<Response<Self::WatchCollectionsStream>, Status> {
        let collections = self.store.feed.subscribe();
        let (messages, stream) = mpsc::channel(BUFFERED_MESSAGES);
        let stopping = self.stopping.clone();
        self.tasks.spawn(async move { forward_marks(collections, &messages, &stopping).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream).map(Ok))))
    }
}

/// Sends marks until the reader leaves or the store stops.
async fn forward_marks(
    mut collections: broadcast::Receiver<Arc<[CollectedItem]>>,
    messages: &mpsc::Sender<pb::WatchCollectionsResponse>,
    stopping: &CancellationToken,
) {
    let mut missed = 0;
    loop {
        let collected = tokio::select! {
            () = stopping.cancelled() => return,
            () = messages.closed() => return,
            collected = collections.recv() => collected,
        };
        let collected = match collected {
            Ok(collected) => collected.iter().map(collected_message).collect(),
            Err(RecvError::Lagged(some)) => {
                missed += some;
                continue;
            }
            Err(RecvError::Closed) => return,
        };
        let message = pb::WatchCollectionsResponse { collected, missed };
        missed = 0;
        tokio::select! {
            () = stopping.cancelled() => return,
            taken = messages.send(message) => if taken.is_err() { return },
        }
    }
}

fn collected_message(collected: &CollectedItem) -> pb::Collected {
    let thing = match collected.kind {
        Kind::Artifact => pb::ObjectKind::Artifact,
        Kind::Volume => pb::ObjectKind::Volume,
        Kind::Container => pb::ObjectKind::Container,
    };
    pb::Collected {
        kind: thing.into(),
        id: collected.id.to_string(),
        reason: collected.why.to_string(),
        size_bytes: collected.size_bytes,
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::app::feed::CollectionFeed;
    use crate::policy::garbage::MarkReason;

    #[tokio::test]
    async fn slow_watcher_receives_number_of_missed_messages() {
        const SENT: u64 = 1000;
        let collections = CollectionFeed::default();
        let watching = collections.subscribe();
        for _ in 0..SENT {
            collections.publish(&[CollectedItem {
                kind: Kind::Artifact,
                id: Uuid::now_v7(),
                why: MarkReason::NeverOwned,
                size_bytes: 1,
            }]);
        }
        drop(collections);
        let (messages, mut stream) = mpsc::channel::<pb::WatchCollectionsResponse>(BUFFERED_MESSAGES);
        let stopping = CancellationToken::new();
        let read = async {
            let (mut read, mut missed) = (0, 0);
            while let Some(message) = stream.recv().await {
                read += u64::try_from(message.collected.len()).expect("few");
                missed += message.missed;
            }
            (read, missed)
        };
        let send = async {
            forward_marks(watching, &messages, &stopping).await;
            drop(messages);
        };
        let ((), (read, missed)) = tokio::join!(send, read);
        assert!(read > 0 && missed > 0);
        assert_eq!(read + missed, SENT);
    }
}
