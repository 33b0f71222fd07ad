//! The service `Streamer`.
//!
//! Each handler parses the request, calls a function of another module, and converts the result.

mod convert;
pub(crate) mod images;

use std::time::Duration;

use domain::worker::LeaseClaims;
use domain::{ArtifactId, Digest};
use futures::StreamExt;
use futures::stream::BoxStream;
use rpc::pb::streamer as pb;
use rpc::pb::streamer::streamer_server::{Streamer, StreamerServer};
use rpc::pb::streamer::upload_request::Message as UploadMessage;
use rpc::token::VerifyError;
use rpc::{Reason, invalid_field, parse_digest, parse_duration, parse_id, parse_name, parse_team};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

use crate::copy;
use crate::download::{self, DownloadRequest};
use crate::evacuation;
use crate::in_flight::{CopyRequest, CopyState, InFlight, Waiter};
use crate::peers::Peers;
use crate::routes::Routes;
use crate::upload::{self, Caller, UploadError};

/// The domain of the errors that this service returns.
const SERVICE: &str = "gantry.streamer";
/// Number of messages of an evacuation that wait for a slow reader.
const EVACUATION_MESSAGES: usize = 64;

pub(crate) fn service(
    peers: Peers,
    tasks: TaskTracker,
    stopping: CancellationToken,
) -> StreamerServer<Handler> {
    metrics::describe_gauge!(
        "gantry_streamer_uploads_in_flight",
        "Uploads that are neither sealed nor abandoned."
    );
    metrics::gauge!("gantry_streamer_uploads_in_flight").set(0.0);
    metrics::describe_counter!(
        "gantry_streamer_relayed_bytes_total",
        "Bytes of content that passed through the streamer, between gateways that cannot reach each other."
    );
    metrics::counter!("gantry_streamer_relayed_bytes_total").absolute(0);
    let (in_flight, routes) = (InFlight::default(), Routes::default());
    StreamerServer::new(Handler { peers, in_flight, routes, tasks, stopping })
}

#[derive(Clone)]
pub(crate) struct Handler {
    peers: Peers,
    in_flight: InFlight,
    routes: Routes,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

#[tonic::async_trait]
impl Streamer for Handler {
    type UploadStream = BoxStream<'static, Result<pb::UploadResponse, Status>>;

    async fn upload(
        &self,
        request: Request<Streaming<pb::UploadRequest>>,
    ) -> Result<Response<Self::UploadStream>, Status> {
        let messages = request.into_inner();
        let (answers, stream) = mpsc::channel(4);
        let handler = self.clone();
        // A separate task, because the upload must be abandoned even if the caller drops this
        // future.
        let task = async move {
            let _in_flight = UploadGauge::begin();
            if let Err(status) = handler.carry_upload(messages, &answers).await {
                // If sending fails, the caller is gone.
                answers.send(Err(status)).await.ok();
            }
        };
        self.tasks.spawn(task.in_current_span());
        let stream = ReceiverStream::new(stream).map(|event| event.map(convert::upload_event));
        Ok(Response::new(stream.boxed()))
    }

    async fn download(
        &self,
        request: Request<pb::DownloadRequest>,
    ) -> Result<Response<pb::DownloadResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let artifact: ArtifactId = parse_id("artifact_id", &request.artifact_id)?;
        let request = DownloadRequest { team, artifact, avoid: request.avoid_gateway_endpoints };
        let handler = self.clone();
        // A separate task, because the lease must be released even if the caller drops this future.
        let located = self.tasks.spawn(
            async move {
                let copy = |request| handler.copy(request);
                download::locate(&mut handler.peers.clone(), request, copy).await
            }
            .in_current_span(),
        );
        let located =
            located.await.map_err(|error| rpc::unavailable(SERVICE, "locate an artifact", &error))?;
        Ok(Response::new(convert::readable(located?)))
    }

    type MaterializeStream = ReceiverStream<Result<pb::MaterializeResponse, Status>>;

    async fn materialize(
        &self,
        request: Request<pb::MaterializeRequest>,
    ) -> Result<Response<Self::MaterializeStream>, Status> {
        let message = request.into_inner();
        let request = CopyRequest {
            team: parse_team("team", message.team)?,
            artifact: parse_id("artifact_id", &message.artifact_id)?,
            worker: parse_id("worker_id", &message.worker_id)?,
        };
        if !message.lease_token.is_empty() {
            self.check_lease(&message.lease_token, &request).await?;
        }
        let waiter = self.copy(request);
        let (answers, stream) = mpsc::channel(4);
        // A separate task, which ends when the caller is gone.
        self.tasks.spawn(async move {
            tokio::select! {
                () = report_progress(waiter, &answers) => {}
                () = answers.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    type EvacuateWorkerStream = ReceiverStream<Result<pb::EvacuateWorkerResponse, Status>>;

    async fn evacuate_worker(
        &self,
        request: Request<pb::EvacuateWorkerRequest>,
    ) -> Result<Response<Self::EvacuateWorkerStream>, Status> {
        let request = request.into_inner();
        let name = parse_name("worker", request.worker)?;
        let limit = parse_duration("deadline", request.deadline)?.unwrap_or(Duration::MAX);
        if limit.is_zero() {
            return Err(invalid_field("deadline", "must be more than 0"));
        }
        let worker = self.peers.find_worker(&name).await?;
        let (answers, stream) = mpsc::channel(EVACUATION_MESSAGES);
        let handler = self.clone();
        // A separate task, which ends when the caller is gone.
        let task = async move {
            // A slow reader misses some progress.
            let report = |now: &evacuation::Progress| drop(answers.try_send(Ok(convert::evacuation(now))));
            let copy = |request| handler.copy(request);
            let last = tokio::select! {
                ended = evacuation::run(&handler.peers, worker, limit, copy, report) => {
                    ended.map(convert::evacuated).map_err(Status::from)
                }
                () = answers.closed() => return,
                () = handler.stopping.cancelled() => {
                    Err(Reason::Unavailable.status(SERVICE, "the streamer is stopping"))
                }
            };
            // If sending fails, the caller is gone.
            answers.send(last).await.ok();
        };
        self.tasks.spawn(task.in_current_span());
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn list_transfers(
        &self,
        _: Request<pb::ListTransfersRequest>,
    ) -> Result<Response<pb::ListTransfersResponse>, Status> {
        let transfers = self.in_flight.list().into_iter().map(convert::transfer);
        let relayed_pairs = self.routes.list().into_iter().map(convert::relayed_pair);
        Ok(Response::new(pb::ListTransfersResponse {
            transfers: transfers.collect(),
            relayed_pairs: relayed_pairs.collect(),
        }))
    }

    async fn cancel_transfer(
        &self,
        request: Request<pb::CancelTransferRequest>,
    ) -> Result<Response<pb::CancelTransferResponse>, Status> {
        self.in_flight.cancel(parse_id("transfer_id", &request.into_inner().transfer_id)?);
        Ok(Response::new(pb::CancelTransferResponse {}))
    }
}

impl Handler {
    /// Starts a copy, or joins the one in flight.
    fn copy(&self, request: CopyRequest) -> Waiter {
        self.in_flight.join(request, |task| {
            let (peers, routes) = (self.peers.clone(), self.routes.clone());
            let copying = copy::run(peers, routes, task, self.stopping.clone());
            self.tasks.spawn(copying.in_current_span());
        })
    }

    /// Checks that a lease token is for the worker and the team of `request`.
    async fn check_lease(&self, token: &str, request: &CopyRequest) -> Result<(), Status> {
        let claims: LeaseClaims = self.peers.keys.verify(token).await.map_err(|error| match &error {
            VerifyError::Invalid(_) => Reason::InvalidToken.status(SERVICE, error.to_string()),
            VerifyError::KeysUnavailable(_) => rpc::unavailable(SERVICE, "verify a lease token", &error),
        })?;
        if claims.worker != request.worker || claims.team != request.team {
            let message = "the lease is for another worker or team";
            return Err(Reason::InvalidToken.status(SERVICE, message));
        }
        Ok(())
    }

    async fn carry_upload(
        &self,
        mut messages: Streaming<pb::UploadRequest>,
        caller: &Caller<Status>,
    ) -> Result<(), Status> {
        let open = match messages.message().await?.and_then(|request| request.message) {
            Some(UploadMessage::Open(open)) => open,
            Some(UploadMessage::Commit(_)) | None => {
                return Err(rpc::invalid_field("message", "the first message must be `open`"));
            }
        };
        let request = convert::parse_open(open)?;
        let commit = async {
            tokio::select! {
                digest = read_commit(&mut messages) => digest,
                () = caller.closed() => Err(UploadError::CallerGone.into()),
                () = self.stopping.cancelled() => {
                    Err(Reason::Unavailable.status(SERVICE, "the streamer is stopping"))
                }
            }
        };
        upload::run(&mut self.peers.clone(), request, caller, commit).await
    }
}

/// Returns the digest of the upload when the caller commits it.
async fn read_commit(messages: &mut Streaming<pb::UploadRequest>) -> Result<Digest, Status> {
    match messages.message().await?.and_then(|request| request.message) {
        Some(UploadMessage::Commit(commit)) => parse_digest("commit.digest", &commit.digest),
        Some(UploadMessage::Open(_)) => Err(rpc::invalid_field("message", "`open` must be sent only once")),
        // An aborted call ends the stream in the same way, so the commit must be explicit.
        None => Err(Reason::TransferTruncated.status(
            SERVICE,
            "cannot seal the upload: the stream ended without `commit`; upload again and send `commit` last",
        )),
    }
}

/// Sends the progress of a copy until it ends.
async fn report_progress(
    mut waiter: Waiter,
    answers: &mpsc::Sender<Result<pb::MaterializeResponse, Status>>,
) {
    loop {
        let state = waiter.states.borrow_and_update().clone();
        let is_last = matches!(state, CopyState::Ended(_));
        let answer = convert::copy_state(state);
        // Ends when the caller is gone, or when the task of the copy has died.
        if answers.send(answer).await.is_err() || is_last || waiter.states.changed().await.is_err() {
            return;
        }
    }
}

/// Counts an upload in the gauge until it is dropped.
struct UploadGauge;

impl UploadGauge {
    fn begin() -> Self {
        metrics::gauge!("gantry_streamer_uploads_in_flight").increment(1.0);
        Self
    }
}

impl Drop for UploadGauge {
    fn drop(&mut self) {
        metrics::gauge!("gantry_streamer_uploads_in_flight").decrement(1.0);
    }
}
