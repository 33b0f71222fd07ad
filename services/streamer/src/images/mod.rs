//! Images: a container image in a registry becomes an artifact.
//!
//! ```text
//! resolve ──▶ find the resource cache ──ready──▶ pulled
//!                 │  ▲ claimed elsewhere: wait
//!                 └─claimed─▶ fetch layers ─▶ assemble ─▶ upload ─▶ put ─▶ pulled
//! ```
//!
//! The claim on the resource cache makes one streamer the puller. Its callers share one task, which
//! ends when all of them have left. Fetched layers stay in the cache of this streamer.
//!
//! Invariant: the key of a cache has the digest, the platform and the visibility of the image. An
//! image that was pulled with credentials is never found by another team.

mod write;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::{ArtifactId, Digest};
use images::{
    Credentials, DockerConfig, ImageError, ImageSource, LayerStore, Platform, Progress, Reference, Registry,
};
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use uuid::Uuid;

use crate::config::ImageArgs;
use crate::peers::{CacheState, FoundCache, ImageKey, ImageUser, PeerError, Peers};
use crate::upload::{self, UploadError, UploadEvent, UploadRequest};
use write::WriteError;

/// Pause before the next look at an image that another streamer pulls.
const OTHER_STREAMER_PAUSE: Duration = Duration::from_millis(250);
/// Pause between two reports of the progress of the layers.
const PROGRESS_PAUSE: Duration = Duration::from_millis(100);

/// Pulls of images. Clones share them.
#[derive(Clone)]
pub(crate) struct Images(Arc<Inner>);

struct Inner {
    default_registry: String,
    credentials: Option<PathBuf>,
    registry: Registry,
    layers: LayerStore,
    peers: Peers,
    tasks: TaskTracker,
    /// Pulls of this streamer, by the key of their cache.
    pulling: Mutex<HashMap<Digest, watch::Sender<PullState>>>,
}

/// A request for an image.
#[derive(Debug, Clone)]
pub(crate) struct ImageRequest {
    pub(crate) team: String,
    pub(crate) reference: String,
    /// `None`: the platform of this machine.
    pub(crate) platform: Option<Platform>,
    pub(crate) credentials: Option<Credentials>,
    pub(crate) user: Option<ImageUser>,
}

/// What a reference names now.
#[derive(Debug, Clone)]
pub(crate) struct ResolvedImage {
    /// The complete reference.
    pub(crate) reference: String,
    pub(crate) digest: String,
}

/// An image that is an artifact.
#[derive(Debug, Clone)]
pub(crate) struct PulledImage {
    pub(crate) image: ResolvedImage,
    pub(crate) artifact: String,
    pub(crate) cache: String,
    pub(crate) existed: bool,
}

/// The progress of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PullProgress {
    pub(crate) phase: PullPhase,
    pub(crate) done: u64,
    /// 0: not known yet.
    pub(crate) total: u64,
    pub(crate) saved: u64,
}

/// What happens to an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PullPhase {
    Resolving,
    Fetching,
    Writing,
    OtherStreamer,
}

impl PullProgress {
    fn of(phase: PullPhase) -> Self {
        Self { phase, done: 0, total: 0, saved: 0 }
    }
}

/// The state of a pull, for its callers.
#[derive(Debug, Clone)]
enum PullState {
    Running(PullProgress),
    /// The artifact, or the error.
    Ended(Result<String, PullError>),
}

/// An image cannot be pulled.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PullError {
    /// The registry, or the image.
    #[error("{0}")]
    Image(Arc<ImageError>),
    /// The credentials of the team.
    #[error("{0}")]
    Credentials(String),
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The tree could not be written to a worker.
    #[error("{0}")]
    Upload(String),
}

impl From<ImageError> for PullError {
    fn from(error: ImageError) -> Self {
        Self::Image(Arc::new(error))
    }
}

/// A pull with everything that its task needs.
struct Pull {
    key: ImageKey,
    reference: Reference,
    platform: Platform,
    credentials: Option<Credentials>,
    claim: Uuid,
    term: Duration,
    cache: String,
}

impl Images {
    pub(crate) fn new(args: &ImageArgs, peers: Peers, tasks: TaskTracker) -> Result<Self, ImageError> {
        Ok(Self(Arc::new(Inner {
            default_registry: args.default_registry.clone(),
            credentials: args.registry_credentials.clone(),
            registry: Registry::new(args.registry())?,
            layers: LayerStore::new(args.image_cache(), args.image_cache_bytes),
            peers,
            tasks,
            pulling: Mutex::default(),
        })))
    }

    /// Parses a reference.
    pub(crate) fn parse(&self, reference: &str) -> Result<Reference, ImageError> {
        images::parse_reference(reference, &self.0.default_registry)
    }

    /// Returns what a reference names now.
    pub(crate) async fn resolve(&self, request: &ImageRequest) -> Result<ResolvedImage, PullError> {
        let reference = self.parse(&request.reference)?;
        let credentials = self.credentials(request, &reference).await?;
        let digest = self.0.registry.digest(&reference, credentials.as_ref()).await?;
        Ok(resolved(&reference, digest))
    }

    /// Makes an artifact of an image, unless there is one. Sends the progress to `observer`.
    pub(crate) async fn pull(
        &self,
        request: ImageRequest,
        observer: &mpsc::Sender<PullProgress>,
    ) -> Result<PulledImage, PullError> {
        // If sending fails, the caller is gone, and this future is about to be dropped.
        _ = observer.send(PullProgress::of(PullPhase::Resolving)).await;
        let reference = self.parse(&request.reference)?;
        let credentials = self.credentials(&request, &reference).await?;
        let digest = self.0.registry.digest(&reference, credentials.as_ref()).await?;
        let image = resolved(&reference, digest);
        let platform = request.platform.clone().unwrap_or_else(Platform::of_this_machine);
        let key = image_key(&request.team, &image, &platform, credentials.is_none());
        let peers = &self.0.peers;
        let mut existed = true;
        let (cache, artifact) = loop {
            let claim = Uuid::now_v7();
            let FoundCache { cache, state } = peers.find_image(&key, claim).await?;
            let joined = self.joined(key.digest);
            match (state, joined) {
                (CacheState::Ready { artifact }, _) => break (cache, artifact),
                (CacheState::Ours { term }, _) => {
                    existed = false;
                    let pull = Pull {
                        key: key.clone(),
                        reference: reference.clone_with_digest(image.digest.clone()),
                        platform: platform.clone(),
                        credentials: credentials.clone(),
                        claim,
                        term,
                        cache: cache.clone(),
                    };
                    if let Some(ended) = follow(self.start(pull), observer).await {
                        break (cache, ended?);
                    }
                }
                (CacheState::BeingMade, Some(joined)) => {
                    existed = false;
                    if let Some(ended) = follow(joined, observer).await {
                        break (cache, ended?);
                    }
                }
                (CacheState::BeingMade, None) => {
                    existed = false;
                    _ = observer.send(PullProgress::of(PullPhase::OtherStreamer)).await;
                    tokio::time::sleep(OTHER_STREAMER_PAUSE).await;
                }
            }
        };
        if let Some(user) = request.user {
            peers.use_image(&request.team, &cache, user).await?;
        }
        Ok(PulledImage { image, artifact, cache, existed })
    }

    /// Returns the credentials of a request, or else those of its team.
    async fn credentials(
        &self,
        request: &ImageRequest,
        reference: &Reference,
    ) -> Result<Option<Credentials>, PullError> {
        if request.credentials.is_some() {
            return Ok(request.credentials.clone());
        }
        let Some(directory) = &self.0.credentials else { return Ok(None) };
        let (file, registry) =
            (directory.join(format!("{}.json", request.team)), reference.registry().to_owned());
        let read =
            tokio::task::spawn_blocking(move || DockerConfig::File(&file).credentials(&registry)).await;
        let read = read.map_err(|error| PullError::Credentials(error.to_string()))?;
        read.map_err(|error| PullError::Credentials(error.to_string()))
    }

    fn joined(&self, key: Digest) -> Option<watch::Receiver<PullState>> {
        self.pulling().get(&key).map(watch::Sender::subscribe)
    }

    fn pulling(&self) -> MutexGuard<'_, HashMap<Digest, watch::Sender<PullState>>> {
        self.0.pulling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the task of a pull.
    fn start(&self, pull: Pull) -> watch::Receiver<PullState> {
        let (states, observed) = watch::channel(PullState::Running(PullProgress::of(PullPhase::Fetching)));
        self.pulling().insert(pull.key.digest, states.clone());
        let images = self.clone();
        let task = async move {
            let entry = TableEntry { images: &images, key: pull.key.digest };
            let ended = tokio::select! {
                ended = images.run(&pull, &states) => Some(ended),
                () = states.closed() => None,
            };
            drop(entry);
            if !matches!(ended, Some(Ok(_))) {
                images.0.peers.abandon_image(&pull.key.team, &pull.cache).await;
            }
            if let Some(ended) = ended {
                states.send_replace(PullState::Ended(ended));
            }
        };
        self.0.tasks.spawn(task.in_current_span());
        observed
    }

    async fn run(&self, pull: &Pull, states: &watch::Sender<PullState>) -> Result<String, PullError> {
        let renewed = async {
            loop {
                tokio::time::sleep(pull.term / 3).await;
                match self.0.peers.renew_image(&pull.key.team, pull.claim).await {
                    Ok(()) => {}
                    Err(error) if error.is_transient() => {
                        tracing::debug!(%error, "cannot renew the claim on an image");
                    }
                    Err(error) => return error,
                }
            }
        };
        tokio::select! {
            made = self.make(pull, states) => made,
            error = renewed => Err(error.into()),
        }
    }

    /// Fetches an image, writes its tree to a worker, and puts the artifact into the cache.
    async fn make(&self, pull: &Pull, states: &watch::Sender<PullState>) -> Result<String, PullError> {
        let Inner { registry, layers, peers, .. } = &*self.0;
        let source =
            ImageSource::in_registry(registry, &pull.reference, pull.credentials.as_ref(), &pull.platform)
                .await?;
        let progress = Progress::default();
        let publish = || {
            let now = PullProgress {
                phase: PullPhase::Fetching,
                done: progress.done_bytes(),
                total: progress.total_bytes(),
                saved: progress.saved_bytes(),
            };
            states.send_if_modified(|state| {
                !matches!(std::mem::replace(state, PullState::Running(now)), PullState::Running(was) if was == now)
            });
        };
        let observed = async {
            loop {
                publish();
                tokio::time::sleep(PROGRESS_PAUSE).await;
            }
        };
        let tree = tokio::select! {
            tree = images::pull(&source, &pull.platform, layers, &progress) => tree?,
            () = observed => unreachable!("the progress is observed until the pull ends"),
        };
        publish();
        let tree = Arc::new(tree);
        let request = UploadRequest {
            team: pull.key.team.clone(),
            artifact: ArtifactId::new(),
            digest: Some(tree.manifest().tree_digest()),
            build: None,
            label: pull.key.reference.clone(),
            avoid: Vec::new(),
        };
        let (caller, mut events) = mpsc::channel(4);
        let written = async {
            let Some(Ok(UploadEvent::Write { ticket, .. })) = events.recv().await else {
                return Err(UploadError::CallerGone.into());
            };
            write::write(ticket, tree.clone(), |done, total| {
                let progress = PullProgress { phase: PullPhase::Writing, done, total, saved: 0 };
                states.send_replace(PullState::Running(progress));
            })
            .await
        };
        upload::run(&mut peers.clone(), request, &caller, written).await.map_err(|error: WriteError| {
            match error {
                WriteError::Upload(UploadError::Peer(error)) | WriteError::Peer(error) => {
                    PullError::Peer(error)
                }
                error => PullError::Upload(domain::error_chain(&error)),
            }
        })?;
        let Some(Ok(UploadEvent::Uploaded { artifact_id })) = events.recv().await else {
            return Err(PullError::Upload(WriteError::Truncated.to_string()));
        };
        peers.put_image(&pull.key.team, pull.claim, &artifact_id).await?;
        Ok(artifact_id)
    }
}

/// A pull in the table, until it is dropped.
struct TableEntry<'a> {
    images: &'a Images,
    key: Digest,
}

impl Drop for TableEntry<'_> {
    fn drop(&mut self) {
        self.images.pulling().remove(&self.key);
    }
}

/// Sends the progress of a pull until it ends. `None`: the task of the pull ended because all
/// callers had left, or it died.
async fn follow(
    mut states: watch::Receiver<PullState>,
    observer: &mpsc::Sender<PullProgress>,
) -> Option<Result<String, PullError>> {
    loop {
        let state = states.borrow_and_update().clone();
        match state {
            PullState::Running(progress) => _ = observer.send(progress).await,
            PullState::Ended(ended) => return Some(ended),
        }
        states.changed().await.ok()?;
    }
}

fn resolved(reference: &Reference, digest: String) -> ResolvedImage {
    let (registry, repository) = (reference.registry(), reference.repository());
    let tag = reference.tag().map(|tag| format!(":{tag}")).unwrap_or_default();
    ResolvedImage { reference: format!("{registry}/{repository}{tag}@{digest}"), digest }
}

/// Returns the key of the resource cache of an image.
fn image_key(team: &str, image: &ResolvedImage, platform: &Platform, is_shared: bool) -> ImageKey {
    let mut hasher = blake3::Hasher::new_derive_key("gantry image cache");
    let scope = if is_shared { "" } else { team };
    for part in [image.digest.as_str(), &platform.to_string(), scope] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    ImageKey {
        team: team.to_owned(),
        digest: Digest(*hasher.finalize().as_bytes()),
        is_shared,
        reference: image.reference.clone(),
        platform: platform.to_string(),
    }
}
