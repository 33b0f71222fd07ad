//! The streamer's calls, and the only code of it that makes a `Status`.

use domain::ArtifactId;
use domain::worker::LeaseClaims;
use rpc::pb::streamer as pb;
use rpc::pb::streamer::materialize_response::Message as Materializing;
use rpc::pb::streamer::streamer_server::{Streamer, StreamerServer};
use rpc::pb::streamer::upload_request::Message as Said;
use rpc::pb::streamer::upload_response::Message as Answer;
use rpc::token::VerifyError;
use rpc::{Reason, Refusal, parse_digest, parse_id, parse_optional_id, parse_team};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

use crate::SERVICE;
use crate::download::{self, DownloadError};
use crate::materialize::{self, CopyError};
use crate::transfers::{self, State, Transfers};
use crate::upload::{Peers, Upload, Wanted, adopt};

pub(crate) fn service(
    peers: Peers,
    tasks: TaskTracker,
    stopping: CancellationToken,
) -> StreamerServer<Handler> {
    metrics::describe_gauge!(
        "gantry_streamer_uploads_in_flight",
        "Uploads that have neither been sealed nor abandoned."
    );
    metrics::gauge!("gantry_streamer_uploads_in_flight").set(0.0);
    StreamerServer::new(Handler { peers, transfers: Transfers::default(), tasks, stopping })
}

#[derive(Clone)]
pub(crate) struct Handler {
    peers: Peers,
    transfers: Transfers,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

#[tonic::async_trait]
impl Streamer for Handler {
    type UploadStream = ReceiverStream<Result<pb::UploadResponse, Status>>;

    async fn upload(
        &self,
        request: Request<Streaming<pb::UploadRequest>>,
    ) -> Result<Response<Self::UploadStream>, Status> {
        let said = request.into_inner();
        let (answers, stream) = mpsc::channel(4);
        let (peers, stopping) = (self.peers.clone(), self.stopping.clone());
        // A task of its own: what was planned has to be abandoned even when the caller is gone and this future dropped.
        let task = async move {
            let _under_way = UnderWay::begin();
            if let Err(status) = upload(peers, said, &answers, stopping).await {
                // Failing to answer means that nobody listens any more.
                answers.send(Err(status)).await.ok();
            }
        };
        self.tasks.spawn(task.in_current_span());
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn download(
        &self,
        request: Request<pb::DownloadRequest>,
    ) -> Result<Response<pb::DownloadResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let artifact: ArtifactId = parse_id("artifact_id", &request.artifact_id)?;
        let wanted = download::Wanted { team, artifact, avoid: request.avoid_gateway_endpoints };
        let handler = self.clone();
        // A task of its own: what is placed has to be released even when the caller is gone and this future dropped.
        let located = self.tasks.spawn(
            async move {
                download::locate(&mut handler.peers.clone(), wanted, |wanted| handler.bring(wanted)).await
            }
            .in_current_span(),
        );
        let located =
            located.await.map_err(|error| rpc::unavailable(SERVICE, "locate an artifact", &error))?;
        Ok(Response::new(located?))
    }

    type MaterializeStream = ReceiverStream<Result<pb::MaterializeResponse, Status>>;

    async fn materialize(
        &self,
        request: Request<pb::MaterializeRequest>,
    ) -> Result<Response<Self::MaterializeStream>, Status> {
        let request = request.into_inner();
        let wanted = transfers::Wanted {
            team: parse_team("team", request.team)?,
            artifact: parse_id("artifact_id", &request.artifact_id)?,
            worker: parse_id("worker_id", &request.worker_id)?,
        };
        if !request.lease_token.is_empty() {
            self.check_lease(&request.lease_token, &wanted).await?;
        }
        let waiting = self.bring(wanted);
        let (answers, stream) = mpsc::channel(4);
        // A task of its own, which leaves as soon as the caller does.
        self.tasks.spawn(async move {
            tokio::select! {
                () = tell(waiting, &answers) => {}
                () = answers.closed() => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn list_transfers(
        &self,
        _: Request<pb::ListTransfersRequest>,
    ) -> Result<Response<pb::ListTransfersResponse>, Status> {
        let transfers = self.transfers.list().into_iter().map(|listed| pb::Transfer {
            transfer_id: listed.transfer.to_string(),
            team: listed.wanted.team,
            artifact_id: listed.wanted.artifact.to_string(),
            to_worker_id: listed.wanted.worker.to_string(),
            progress: Some(progress(listed.progress)),
            started_at: Some(rpc::timestamp(listed.since)),
        });
        Ok(Response::new(pb::ListTransfersResponse { transfers: transfers.collect() }))
    }

    async fn cancel_transfer(
        &self,
        request: Request<pb::CancelTransferRequest>,
    ) -> Result<Response<pb::CancelTransferResponse>, Status> {
        self.transfers.cancel(parse_id("transfer_id", &request.into_inner().transfer_id)?);
        Ok(Response::new(pb::CancelTransferResponse {}))
    }
}

impl Handler {
    /// Begins a copy, or joins the one that is under way.
    fn bring(&self, wanted: transfers::Wanted) -> transfers::Waiting {
        self.transfers.join(wanted, |task| {
            let work = materialize::carry_out(self.peers.clone(), task, self.stopping.clone());
            self.tasks.spawn(work.in_current_span());
        })
    }

    /// Whether a lease token is one for the worker and the team.
    async fn check_lease(&self, token: &str, wanted: &transfers::Wanted) -> Result<(), Status> {
        let claims: LeaseClaims = self.peers.keys.verify(token).await.map_err(|error| match &error {
            VerifyError::Invalid(_) => Reason::InvalidToken.status(SERVICE, error.to_string()),
            VerifyError::KeysUnavailable(_) => rpc::unavailable(SERVICE, "verify a lease token", &error),
        })?;
        if claims.worker != wanted.worker || claims.team != wanted.team {
            let message = "the lease is of another worker or team";
            return Err(Reason::InvalidToken.status(SERVICE, message));
        }
        Ok(())
    }
}

/// Tells somebody who waits for a copy how far it is, until it has ended.
async fn tell(
    mut waiting: transfers::Waiting,
    answers: &mpsc::Sender<Result<pb::MaterializeResponse, Status>>,
) {
    loop {
        let state = waiting.states.borrow_and_update().clone();
        let (answer, last) = match state {
            State::Going(now) => (Ok(Materializing::Progress(progress(now))), false),
            State::Done(Ok(copied)) => {
                let materialized = pb::Materialized {
                    volume_handle: copied.volume.to_string(),
                    progress: copied.progress.map(progress),
                };
                (Ok(Materializing::Materialized(materialized)), true)
            }
            State::Done(Err(error)) => (Err(error.into()), true),
        };
        let answer = answer.map(|message| pb::MaterializeResponse { message: Some(message) });
        // Failing to answer means that nobody listens any more; the task that fails to tell has died.
        if answers.send(answer).await.is_err() || last || waiting.states.changed().await.is_err() {
            return;
        }
    }
}

fn progress(now: transfers::Progress) -> pb::TransferProgress {
    let route = match now.route {
        transfers::Route::Unknown => pb::Route::Unspecified,
        transfers::Route::Peer => pb::Route::Peer,
        transfers::Route::Workers => pb::Route::Workers,
        transfers::Route::Store => pb::Route::Store,
        transfers::Route::Elsewhere => pb::Route::Elsewhere,
    };
    pb::TransferProgress {
        bytes_done: now.done,
        bytes_total: now.total,
        bytes_saved: now.saved,
        bytes_per_second: now.per_second,
        route: route.into(),
        from_worker_id: now.from.map(|worker| worker.to_string()).unwrap_or_default(),
    }
}

impl From<CopyError> for Status {
    fn from(error: CopyError) -> Self {
        let reason = match &error {
            CopyError::NotFound(_) => Reason::ArtifactNotFound,
            CopyError::NoReplica(_) => Reason::NoReplica,
            CopyError::Refused(refusal) => return Refusal::pass_on(refusal, SERVICE),
            CopyError::Cancelled => Reason::TransferCancelled,
            CopyError::Cut(_)
            | CopyError::Nonsense(_)
            | CopyError::OtherBytes(_)
            | CopyError::Left
            | CopyError::Stopping => Reason::Unavailable,
        };
        reason.status(SERVICE, error.to_string())
    }
}

/// An upload that has not ended, as operators count them.
struct UnderWay;

impl UnderWay {
    fn begin() -> Self {
        metrics::gauge!("gantry_streamer_uploads_in_flight").increment(1.0);
        Self
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        metrics::gauge!("gantry_streamer_uploads_in_flight").decrement(1.0);
    }
}

async fn upload(
    mut peers: Peers,
    mut said: Streaming<pb::UploadRequest>,
    answers: &mpsc::Sender<Result<pb::UploadResponse, Status>>,
    stopping: CancellationToken,
) -> Result<(), Status> {
    let open = match said.message().await?.and_then(|request| request.message) {
        Some(Said::Open(open)) => open,
        Some(Said::Commit(_)) | None => {
            return Err(rpc::invalid_field("message", "the first message must be `open`"));
        }
    };
    let wanted = parse_open(open)?;
    let answer = |answer| async {
        let gone = |_| Reason::TransferTruncated.status(SERVICE, "the caller is gone");
        answers.send(Ok(pb::UploadResponse { message: Some(answer) })).await.map_err(gone)
    };
    if let Some(artifact_id) = adopt(&mut peers, &wanted).await.map_err(|refusal| refusal.pass_on(SERVICE))? {
        return answer(Answer::Uploaded(pb::Uploaded { artifact_id })).await;
    }

    let mut upload = Upload::plan(&mut peers, wanted).await.map_err(|refusal| refusal.pass_on(SERVICE))?;
    let sealed = async {
        answer(Answer::GoTo(upload.go_to.clone())).await?;
        let digest = wait_for_commit(&mut upload, &mut peers, &mut said, answers, &stopping).await?;
        upload.seal(&mut peers, digest).await.map_err(|refusal| refusal.pass_on(SERVICE))
    }
    .await;
    match sealed {
        Ok(artifact_id) => {
            let answered = answer(Answer::Uploaded(pb::Uploaded { artifact_id })).await;
            upload.release(&mut peers).await;
            answered
        }
        Err(status) => {
            upload.abandon(&mut peers).await;
            Err(status)
        }
    }
}

/// Keeps the upload alive until the caller says that the worker has everything.
async fn wait_for_commit(
    upload: &mut Upload,
    peers: &mut Peers,
    said: &mut Streaming<pb::UploadRequest>,
    answers: &mpsc::Sender<Result<pb::UploadResponse, Status>>,
    stopping: &CancellationToken,
) -> Result<domain::Digest, Status> {
    loop {
        tokio::select! {
            message = said.message() => return match message?.and_then(|request| request.message) {
                Some(Said::Commit(commit)) => parse_digest("commit.digest", &commit.digest),
                Some(Said::Open(_)) => Err(rpc::invalid_field("message", "`open` was said before")),
                // An aborted call looks just like this: only `commit` counts.
                None => Err(Reason::TransferTruncated.status(SERVICE, "the stream ended without a commit")),
            },
            () = answers.closed() => {
                return Err(Reason::TransferTruncated.status(SERVICE, "the caller is gone"));
            }
            () = stopping.cancelled() => {
                return Err(Reason::Unavailable.status(SERVICE, "the streamer is stopping"));
            }
            () = tokio::time::sleep(upload.renew_after()) => match upload.renew(peers).await {
                Ok(()) => {}
                Err(refusal) if refusal.is_transient() => tracing::debug!(error = %refusal, "cannot renew an upload"),
                Err(refusal) => return Err(refusal.pass_on(SERVICE)),
            },
        }
    }
}

fn parse_open(open: pb::UploadOpen) -> Result<Wanted, Status> {
    Ok(Wanted {
        team: parse_team("open.team", open.team)?,
        artifact: parse_id("open.artifact_id", &open.artifact_id)?,
        digest: match open.digest.as_ref() {
            [] => None,
            digest => Some(parse_digest("open.digest", digest)?),
        },
        build: parse_optional_id("open.build_id", &open.build_id)?,
        label: rpc::parse_label("open.label", open.label)?,
    })
}

impl From<DownloadError> for Status {
    fn from(error: DownloadError) -> Self {
        let reason = match &error {
            DownloadError::NotFound(_) => Reason::ArtifactNotFound,
            DownloadError::NoReplica(_) => Reason::NoReplica,
            DownloadError::Refused(refusal) => return Refusal::pass_on(refusal, SERVICE),
            DownloadError::NotBrought(error) => return error.clone().into(),
            DownloadError::Nonsense(_) => Reason::Unavailable,
        };
        reason.status(SERVICE, error.to_string())
    }
}
