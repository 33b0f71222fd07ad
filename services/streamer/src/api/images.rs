//! The service `Images`.

use images::{Credentials, ImageError, Platform};
use rpc::pb::streamer as pb;
use rpc::pb::streamer::images_server::{Images as ImagesApi, ImagesServer};
use rpc::pb::streamer::pull_request::User;
use rpc::pb::streamer::pull_response::Message as PullMessage;
use rpc::{Reason, invalid_field, parse_id, parse_team};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use super::SERVICE;
use crate::images::{ImageRequest, Images, PullError, PullPhase, PullProgress, PulledImage};
use crate::peers::ImageUser;

/// Most bytes of a reference.
const MAX_REFERENCE_BYTES: usize = 1024;
/// Most bytes of a user name or a password.
const MAX_CREDENTIAL_BYTES: usize = 64 << 10;

pub(crate) fn service(images: Images, tasks: TaskTracker) -> ImagesServer<Handler> {
    ImagesServer::new(Handler { images, tasks })
}

#[derive(Clone)]
pub(crate) struct Handler {
    images: Images,
    tasks: TaskTracker,
}

#[tonic::async_trait]
impl ImagesApi for Handler {
    async fn resolve(
        &self,
        request: Request<pb::ResolveRequest>,
    ) -> Result<Response<pb::ResolveResponse>, Status> {
        let pb::ResolveRequest { team, reference, platform, credentials } = request.into_inner();
        let request = self.parse(team, reference, &platform, credentials, None)?;
        let image = self.images.resolve(&request).await?;
        Ok(Response::new(pb::ResolveResponse { reference: image.reference, digest: image.digest }))
    }

    type PullStream = ReceiverStream<Result<pb::PullResponse, Status>>;

    async fn pull(&self, request: Request<pb::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let pb::PullRequest { team, reference, platform, credentials, user } = request.into_inner();
        let request = self.parse(team, reference, &platform, credentials, user)?;
        let (answers, stream) = mpsc::channel(4);
        let images = self.images.clone();
        // A separate task, which ends when the caller is gone.
        let task = async move {
            tokio::select! {
                () = answer(&images, request, &answers) => {}
                () = answers.closed() => {}
            }
        };
        self.tasks.spawn(task.in_current_span());
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl Handler {
    fn parse(
        &self,
        team: String,
        reference: String,
        platform: &str,
        credentials: Option<pb::RegistryCredentials>,
        user: Option<User>,
    ) -> Result<ImageRequest, Status> {
        if reference.len() > MAX_REFERENCE_BYTES {
            return Err(invalid_field("reference", format!("has more than {MAX_REFERENCE_BYTES} bytes")));
        }
        let parsed = self.images.parse(&reference);
        parsed.map_err(|error| invalid_field("reference", error.to_string()))?;
        let platform = match platform {
            "" => None,
            text => Some(text.parse::<Platform>().map_err(|error| invalid_field("platform", error))?),
        };
        Ok(ImageRequest {
            team: parse_team("team", team)?,
            reference,
            platform,
            credentials: credentials.map(parse_credentials).transpose()?,
            user: match user {
                None => None,
                Some(User::BuildId(build)) => Some(ImageUser::Build(parse_id("build_id", &build)?)),
                Some(User::WorkloadId(workload)) => {
                    Some(ImageUser::Workload(parse_id("workload_id", &workload)?))
                }
            },
        })
    }
}

fn parse_credentials(credentials: pb::RegistryCredentials) -> Result<Credentials, Status> {
    let pb::RegistryCredentials { username, password } = credentials;
    for (field, value) in [("credentials.username", &username), ("credentials.password", &password)] {
        if value.is_empty() || value.len() > MAX_CREDENTIAL_BYTES || value.contains(['\0', '\n', '\r']) {
            return Err(invalid_field(
                field,
                format!("must have 1 to {MAX_CREDENTIAL_BYTES} bytes in one line"),
            ));
        }
    }
    Ok(Credentials { username, password })
}

/// Pulls an image, and sends the progress and the result.
async fn answer(
    images: &Images,
    request: ImageRequest,
    answers: &mpsc::Sender<Result<pb::PullResponse, Status>>,
) {
    let message = |message| Ok(pb::PullResponse { message: Some(message) });
    let (observer, mut observed) = mpsc::channel(1);
    let pull = async move { images.pull(request, &observer).await };
    let forward = async {
        while let Some(now) = observed.recv().await {
            // If sending fails, the caller is gone.
            _ = answers.send(message(PullMessage::Progress(progress(now)))).await;
        }
    };
    let (pulled, ()) = tokio::join!(pull, forward);
    let last = match pulled {
        Ok(PulledImage { image, artifact, cache, existed }) => message(PullMessage::Pulled(pb::Pulled {
            reference: image.reference,
            digest: image.digest,
            artifact_id: artifact,
            existed,
            cache_id: cache,
        })),
        Err(error) => Err(error.into()),
    };
    // If sending fails, the caller is gone.
    _ = answers.send(last).await;
}

fn progress(now: PullProgress) -> pb::PullProgress {
    let phase = match now.phase {
        PullPhase::Resolving => pb::PullPhase::Resolving,
        PullPhase::Fetching => pb::PullPhase::Fetching,
        PullPhase::Writing => pb::PullPhase::Writing,
        PullPhase::OtherStreamer => pb::PullPhase::OtherStreamer,
    };
    pb::PullProgress {
        phase: phase.into(),
        bytes_done: now.done,
        bytes_total: now.total,
        bytes_saved: now.saved,
    }
}

impl From<PullError> for Status {
    fn from(error: PullError) -> Self {
        let reason = match &error {
            PullError::Peer(error) => return error.clone().into(),
            PullError::Image(image) => reason(image),
            PullError::Credentials(_) => Reason::RegistryDenied,
            PullError::Upload(_) => Reason::Unavailable,
        };
        let message = match &error {
            PullError::Image(image) => domain::error_chain(&**image),
            error => error.to_string(),
        };
        reason.status(SERVICE, message)
    }
}

fn reason(error: &ImageError) -> Reason {
    match error {
        ImageError::Reference { .. } => Reason::InvalidField,
        ImageError::NotFound(_) => Reason::ImageNotFound,
        ImageError::Unauthorized { .. } => Reason::RegistryDenied,
        ImageError::Platform { .. } => Reason::PlatformNotFound,
        ImageError::Registry { .. } => Reason::RegistryUnavailable,
        ImageError::Invalid { .. } => Reason::InvalidImage,
        ImageError::Store(error) if error.kind() == std::io::ErrorKind::StorageFull => Reason::DiskFull,
        ImageError::Store(_) | ImageError::File { .. } => Reason::Unavailable,
    }
}
