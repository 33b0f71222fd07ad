//! The client of the streamer, which copies artifacts to a worker and pulls images.

use domain::{ArtifactId, WorkerId, WorkloadId};
use rpc::pb::streamer as pb;
use rpc::pb::streamer::images_client::ImagesClient;
use rpc::pb::streamer::materialize_response::Message;
use rpc::pb::streamer::pull_response::Message as PullMessage;
use rpc::pb::streamer::streamer_client::StreamerClient as Client;
use rpc::{Peer, Refusal};
use tonic::{Code, Streaming};

/// The client of the streamer.
#[derive(Clone)]
pub(crate) struct StreamerClient {
    streamer: Client<Peer>,
    images: ImagesClient<Peer>,
}

/// The progress of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyProgress {
    /// Bytes that exist on the worker.
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// Whether the streamer carries the bytes.
    pub(crate) relayed: bool,
}

/// An event of a copy.
pub(crate) enum CopyEvent {
    Progress(CopyProgress),
    /// The copy is complete. Bytes that were transferred.
    Done(u64),
}

/// The stream of events of a copy.
pub(crate) struct Copy(Streaming<pb::MaterializeResponse>);

impl StreamerClient {
    pub(crate) fn new(peer: Peer) -> Self {
        Self { streamer: Client::new(peer.clone()), images: ImagesClient::new(peer) }
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
        Ok(Copy(self.streamer.clone().materialize(request).await?.into_inner()))
    }

    /// Has an image pulled, which the workload uses from then on. Passes the bytes that are done
    /// and their total to `progress`.
    pub(crate) async fn pull(
        &self,
        team: &str,
        reference: &str,
        workload: WorkloadId,
        progress: impl Fn(u64, u64),
    ) -> Result<ArtifactId, Refusal> {
        let request = pb::PullRequest {
            team: team.to_owned(),
            reference: reference.to_owned(),
            platform: String::new(),
            credentials: None,
            user: Some(pb::pull_request::User::WorkloadId(workload.to_string())),
        };
        let mut answers = self.images.clone().pull(request).await?.into_inner();
        loop {
            match answers.message().await?.and_then(|answer| answer.message) {
                Some(PullMessage::Progress(now)) => progress(now.bytes_done, now.bytes_total),
                Some(PullMessage::Pulled(pulled)) => {
                    return pulled.artifact_id.parse().map_err(|_| cut("named an invalid artifact"));
                }
                None => return Err(cut("ended the stream before the image was pulled")),
            }
        }
    }
}

impl Copy {
    /// Receives the next event.
    pub(crate) async fn next(&mut self) -> Result<CopyEvent, Refusal> {
        match self.0.message().await?.and_then(|answer| answer.message) {
            Some(Message::Progress(progress)) => {
                let relayed = progress.route() == pb::Route::Relay;
                let pb::TransferProgress { bytes_done: done, bytes_total: total, .. } = progress;
                Ok(CopyEvent::Progress(CopyProgress { done, total, relayed }))
            }
            Some(Message::Materialized(materialized)) => {
                let moved =
                    |progress: pb::TransferProgress| progress.bytes_done.saturating_sub(progress.bytes_saved);
                Ok(CopyEvent::Done(materialized.progress.map_or(0, moved)))
            }
            None => Err(cut("ended the stream before the copy was complete")),
        }
    }
}

/// Returns the refusal for an answer that is not complete.
fn cut(what: &str) -> Refusal {
    Refusal {
        code: Code::Unavailable,
        reason: None,
        message: format!("the streamer {what}"),
        about: std::collections::HashMap::new(),
    }
}
