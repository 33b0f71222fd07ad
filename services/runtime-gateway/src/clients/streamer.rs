//! The client of the streamer, which copies artifacts to a worker.

use domain::{ArtifactId, WorkerId};
use rpc::pb::streamer as pb;
use rpc::pb::streamer::materialize_response::Message;
use rpc::{Peer, Refusal};
use tonic::{Code, Streaming};

/// The client of the streamer.
#[derive(Clone)]
pub(crate) struct StreamerClient(pb::streamer_client::StreamerClient<Peer>);

/// An event of a copy.
pub(crate) enum CopyEvent {
    /// Bytes that exist on the worker, and bytes in total.
    Progress(u64, u64),
    /// The copy is complete. Bytes that were transferred.
    Done(u64),
}

/// The stream of events of a copy.
pub(crate) struct Copy(Streaming<pb::MaterializeResponse>);

impl StreamerClient {
    pub(crate) fn new(peer: Peer) -> Self {
        Self(pb::streamer_client::StreamerClient::new(peer))
    }

    /// Copies an artifact to a worker under the lease of a workload.
    pub(crate) async fn materialize(
        &self,
        team: &str,
        artifact: ArtifactId,
        worker: WorkerId,
        lease_token: &str,
    ) -> Result<Copy, Refusal> {
        let request = pb::MaterializeRequest {
            team: team.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            lease_token: lease_token.to_owned(),
        };
        Ok(Copy(self.0.clone().materialize(request).await?.into_inner()))
    }
}

impl Copy {
    /// Receives the next event.
    pub(crate) async fn next(&mut self) -> Result<CopyEvent, Refusal> {
        match self.0.message().await?.and_then(|answer| answer.message) {
            Some(Message::Progress(progress)) => {
                Ok(CopyEvent::Progress(progress.bytes_done, progress.bytes_total))
            }
            Some(Message::Materialized(materialized)) => {
                let moved =
                    |progress: pb::TransferProgress| progress.bytes_done.saturating_sub(progress.bytes_saved);
                Ok(CopyEvent::Done(materialized.progress.map_or(0, moved)))
            }
            None => Err(Refusal {
                code: Code::Unavailable,
                reason: None,
                message: "the streamer ended the stream before the copy was complete".to_owned(),
                about: std::collections::HashMap::new(),
            }),
        }
    }
}
