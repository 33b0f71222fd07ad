//! Error reasons: the closed list of errors that services return to programs.
//!
//! Every `Status` of a service comes from a [`Reason`] and carries exactly one `ErrorInfo`.
//! `docs/errors.md` also states the cause and the effects of each reason. A test compares the names
//! and codes of both lists.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

macro_rules! reasons {
    ($($(#[$doc:meta])+ $variant:ident = $text:literal, $code:ident;)+) => {
        /// Reason why a call was rejected or failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[$doc])+ $variant,)+ }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant,)+];

            /// Name of the reason in `ErrorInfo`.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }

            /// Canonical gRPC code of the reason.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Self::$variant => Code::$code,)+ }
            }
        }
    };
}

reasons! {
    /// A field is missing or malformed. Correct the field that `BadRequest` names.
    InvalidField = "INVALID_FIELD", InvalidArgument;
    /// The page token comes from another call or from a request with other fields. List from the
    /// start, without a token.
    InvalidPageToken = "INVALID_PAGE_TOKEN", InvalidArgument;
    /// A lease token, session credential or ticket is malformed, forged, expired or for another
    /// purpose. Request a new token.
    InvalidToken = "INVALID_TOKEN", Unauthenticated;
    /// The call arrived over TCP without the cluster token. Send the content of the token file as a
    /// bearer token. Each service logs the path of its token file as `token.file`.
    Unauthenticated = "UNAUTHENTICATED", Unauthenticated;
    /// The service, its database or another service does not answer or is stopping. Or the service
    /// has reached its limit for transfers or unfinished messages. Repeat the call after the delay
    /// in `RetryInfo`.
    Unavailable = "UNAVAILABLE", Unavailable;
    /// The call was not answered before its deadline. Or no more bytes of a message arrived for 60
    /// s. Query the state, or repeat an idempotent call with a longer deadline.
    DeadlineExceeded = "DEADLINE_EXCEEDED", DeadlineExceeded;

    /// The id belongs to a workload with another spec, or to another object. Choose another id.
    WorkloadExists = "WORKLOAD_EXISTS", AlreadyExists;
    /// The team has no such workload. Check the id and the team.
    WorkloadNotFound = "WORKLOAD_NOT_FOUND", NotFound;
    /// The workload does not wait for a worker, because it was placed or has ended. Metadata
    /// `state` has its state. Get the workload.
    WorkloadNotQueued = "WORKLOAD_NOT_QUEUED", FailedPrecondition;
    /// An input is unknown to the team, is not sealed, or has lost its bytes (metadata
    /// `artifact_id`). Or a task cache is unknown to the team (metadata `cache_id`). Upload the
    /// input again, or request the cache again.
    InputUnavailable = "INPUT_UNAVAILABLE", FailedPrecondition;
    /// No known worker could ever run the request. The metadata has the refusal of each worker.
    /// Change the request, or add a worker.
    NoCompatibleWorker = "NO_COMPATIBLE_WORKER", FailedPrecondition;
    /// All workers that could take the request are full or out of contact. Repeat the call after
    /// the delay in `RetryInfo`.
    AllWorkersBusy = "ALL_WORKERS_BUSY", ResourceExhausted;
    /// The queued workloads of the team have reached the limit for their number or for the size of
    /// their specs. Submit the workload again after the delay in `RetryInfo`, and increase the
    /// delay while the error persists.
    TeamQueueFull = "TEAM_QUEUE_FULL", ResourceExhausted;
    /// The lease has ended or is ending. Stop all work under the lease, and publish nothing.
    LeaseLost = "LEASE_LOST", FailedPrecondition;
    /// The id belongs to another request, to a lease that has ended, or to a workload. Choose
    /// another id.
    LeaseExists = "LEASE_EXISTS", AlreadyExists;
    /// The team has no such lease, or the lease ended long ago. Check the id and the team.
    LeaseNotFound = "LEASE_NOT_FOUND", NotFound;
    /// A newer gateway speaks for the worker. Start and destroy nothing more on the worker.
    StaleSession = "STALE_SESSION", FailedPrecondition;
    /// The worker has a newer incarnation. Start and destroy nothing more for the old incarnation.
    StaleIncarnation = "STALE_INCARNATION", FailedPrecondition;
    /// Another gateway speaks for the worker and is in contact. Wait until that gateway has ended,
    /// or give this worker another name.
    AlreadyAttended = "ALREADY_ATTENDED", FailedPrecondition;
    /// Gateway and scheduler have no protocol version in common. Upgrade the older program.
    UnsupportedProtocol = "UNSUPPORTED_PROTOCOL", FailedPrecondition;
    /// The worker does not exist. Metadata `worker` has the requested name or id. List the workers.
    WorkerNotFound = "WORKER_NOT_FOUND", NotFound;
    /// The worker is out of contact. Retry later, or use another replica.
    WorkerUnreachable = "WORKER_UNREACHABLE", FailedPrecondition;
    /// The worker is in contact. Only a worker without contact can be pruned. Retire the worker. Or
    /// stop its gateway, and wait until the worker is stalled.
    WorkerInContact = "WORKER_IN_CONTACT", FailedPrecondition;
    /// The worker was retired, and its contents were forgotten. Start and destroy nothing on the
    /// worker. To bring it back, call `UncordonWorker`, or start it with empty storage.
    WorkerRetired = "WORKER_RETIRED", FailedPrecondition;
    /// The worker of this name belongs to another team or to all teams. Give this worker another
    /// name, or retire the other worker first.
    WorkerOfAnotherTeam = "WORKER_OF_ANOTHER_TEAM", FailedPrecondition;

    /// The artifact id is in use. Choose another id.
    ArtifactExists = "ARTIFACT_EXISTS", AlreadyExists;
    /// The team has no such artifact. If the call needs bytes, the artifact may also be not sealed.
    /// Check the id and the team. The artifact may have been collected.
    ArtifactNotFound = "ARTIFACT_NOT_FOUND", NotFound;
    /// The artifact already has its final bytes. Use the artifact, or create another one.
    ArtifactSealed = "ARTIFACT_SEALED", FailedPrecondition;
    /// The build is unknown to the team or has ended. Put a new build.
    OwnerEnded = "OWNER_ENDED", FailedPrecondition;
    /// The build has ended. Put a new build.
    BuildEnded = "BUILD_ENDED", FailedPrecondition;
    /// The build id is in use by another build. Choose another id.
    BuildExists = "BUILD_EXISTS", AlreadyExists;
    /// The team has no such build, or the build let go of all its artifacts long ago. Check the id
    /// and the team.
    BuildNotFound = "BUILD_NOT_FOUND", NotFound;
    /// The team has no such cache. It was deleted, or has expired because it was unused. Request
    /// the cache by its key.
    CacheNotFound = "CACHE_NOT_FOUND", NotFound;
    /// A build or a workload uses the cache. Delete the cache after they have ended.
    CacheInUse = "CACHE_IN_USE", FailedPrecondition;
    /// The workload was already settled. Choose another workload id.
    HolderSettled = "HOLDER_SETTLED", FailedPrecondition;
    /// No complete volume holds the declared digest. Transfer again, or settle without this output.
    CandidateMissing = "CANDIDATE_MISSING", FailedPrecondition;
    /// The claim on a transfer or on a cache was not renewed in time, or was abandoned. Start the
    /// transfer or the cache again.
    ClaimLost = "CLAIM_LOST", FailedPrecondition;
    /// The attempt has ended. Delete everything that is left of the attempt.
    AttemptEnded = "ATTEMPT_ENDED", FailedPrecondition;
    /// The worker has no such volume. Locate the artifact again.
    VolumeNotFound = "VOLUME_NOT_FOUND", NotFound;
    /// A container that is not garbage may use the volume. Or a ticket to write names an existing
    /// volume that no transfer fills. Mark the container first, or plan a new transfer.
    VolumeInUse = "VOLUME_IN_USE", FailedPrecondition;
    /// The container does not exist, is on another worker, or may be garbage. Do nothing. The
    /// container is deleted or will be.
    ContainerNotFound = "CONTAINER_NOT_FOUND", NotFound;
    /// The main process of the container does not run yet. Or it has ended, and the worker lacks
    /// `exec-ended`. Wait until it runs.
    ContainerNotRunning = "CONTAINER_NOT_RUNNING", FailedPrecondition;
    /// The lease has a container with this key and another spec. Use another key.
    ContainerExists = "CONTAINER_EXISTS", AlreadyExists;
    /// The container cannot be created, because of its spec or its image (metadata
    /// `failure_reason`). Correct the spec.
    ContainerFailed = "CONTAINER_FAILED", FailedPrecondition;
    /// The main process of the container still runs. Wait for its end.
    ProcessRunning = "PROCESS_RUNNING", FailedPrecondition;
    /// The directory of an output or a cache is missing or cannot be stored (metadata
    /// `failure_reason`). Correct the process.
    PublishFailed = "PUBLISH_FAILED", FailedPrecondition;
    /// A kept artifact would lose its last replica (metadata `artifact_id`). For a worker, metadata
    /// `artifacts` has the number of such artifacts (1000 means 1000 or more), and `artifact_id_2`
    /// and so on name more of them. Copy the artifact to another worker first, or set `force`.
    LastReplica = "LAST_REPLICA", FailedPrecondition;
    /// The worker holds orphans that no operator has adopted or purged. Adopt or purge the orphans
    /// first, or set `force`.
    HoldsOrphans = "HOLDS_ORPHANS", FailedPrecondition;
    /// Changes after the revision are forgotten, or the revision was never reached. Query the
    /// current state of all relevant objects, and watch from revision 0.
    Compacted = "COMPACTED", OutOfRange;
    /// The report is older than another report, or belongs to another store. Begin a new report.
    StaleReport = "STALE_REPORT", FailedPrecondition;
    /// The report ended without a commit, or its count is wrong. Report again.
    ReportTruncated = "REPORT_TRUNCATED", InvalidArgument;
    /// Every copy of the artifact's bytes is gone. Create or upload the artifact again.
    NoReplica = "NO_REPLICA", DataLoss;
    /// The artifact was deleted, and every copy of its bytes is deleted or being deleted. Create or
    /// upload the artifact again.
    BytesGone = "BYTES_GONE", FailedPrecondition;
    /// The store has no object with this id in the team, or no longer remembers it. Check the id
    /// and the team.
    UnknownId = "UNKNOWN_ID", NotFound;
    /// The volume or container is not an orphan. It was adopted or purged, or the store always knew
    /// it. Check its state with `Explain`.
    NotOrphaned = "NOT_ORPHANED", FailedPrecondition;
    /// The orphan is a container, or a volume whose bytes are not final or not known. Purge the
    /// orphan.
    NotAdoptable = "NOT_ADOPTABLE", FailedPrecondition;

    /// The gateway does not attend the worker, or the store knows no session of it. Call the
    /// gateway in metadata `gateway_endpoint`. If it is missing, ask the scheduler for the address
    /// of the worker.
    NotAttended = "NOT_ATTENDED", FailedPrecondition;
    /// The worker has no such process. Its container may have been collected. Do nothing. The
    /// output is no longer available. The scheduler knows how the process ended.
    ProcessNotFound = "PROCESS_NOT_FOUND", NotFound;
    /// An offset is beyond the output of the process, or input leaves a gap. Attach again with the
    /// received offsets.
    OffsetOutOfRange = "OFFSET_OUT_OF_RANGE", OutOfRange;
    /// The data is not a tar archive, is cut off, or has unsafe or inconsistent entries. The
    /// message has the details. Create the archive again.
    InvalidArchive = "INVALID_ARCHIVE", InvalidArgument;
    /// The manifest has unsafe, repeated or unordered paths, or a malformed entry. Create the
    /// manifest again.
    InvalidManifest = "INVALID_MANIFEST", InvalidArgument;
    /// The content has another digest than declared, or a volume did not survive a crash of its
    /// machine. Transfer again, or locate the artifact again.
    DigestMismatch = "DIGEST_MISMATCH", DataLoss;
    /// The artifact store has planned no such transfer for the team, so the scheduler signs no
    /// ticket. Plan the transfer, or locate the artifact again.
    TransferNotPlanned = "TRANSFER_NOT_PLANNED", FailedPrecondition;
    /// The stream ended before the transfer was complete. Or its caller paused for too long (15
    /// minutes in an upload, an hour in a download). Transfer again.
    TransferTruncated = "TRANSFER_TRUNCATED", InvalidArgument;
    /// The transfer was cancelled. Start the transfer again if it is still needed.
    TransferCancelled = "TRANSFER_CANCELLED", Aborted;
    /// The registry has no such repository, tag or digest. Correct the reference.
    ImageNotFound = "IMAGE_NOT_FOUND", NotFound;
    /// The registry requires other credentials. Many registries answer so for images that do not
    /// exist, too. Check the reference, or send credentials.
    RegistryDenied = "REGISTRY_DENIED", PermissionDenied;
    /// The registry does not answer, or fails. The message has its answer. Repeat the call later.
    RegistryUnavailable = "REGISTRY_UNAVAILABLE", Unavailable;
    /// The image exists, but not for the platform. The message lists its platforms. Use another
    /// image or another platform.
    PlatformNotFound = "PLATFORM_NOT_FOUND", FailedPrecondition;
    /// The manifest, the configuration or a layer of an image is malformed or has another digest
    /// than declared. Push the image again.
    InvalidImage = "INVALID_IMAGE", FailedPrecondition;
    /// No replica could be read. The message has the answer of each gateway, and metadata
    /// `source_N` has the reason. `VOLUME_NOT_FOUND` and `DIGEST_MISMATCH` mean that the replica is
    /// lost. `INVALID_TOKEN` and `UNAUTHENTICATED` mean that the gateway rejected the reader.
    /// `UNAVAILABLE` means that the gateway does not answer or broke off. Repeat the call for some
    /// time, or locate the artifact again.
    SourceFailed = "SOURCE_FAILED", FailedPrecondition;
    /// The worker does not send volumes directly to other workers. It is not a Concourse worker, or
    /// its operator has not declared that workers can reach each other. Read the volume through its
    /// gateway.
    NoPeers = "NO_PEERS", FailedPrecondition;
    /// The worker sent a volume directly to another worker, and not all bytes arrived. The message
    /// has the answer of the worker. Empty the destination volume, and read the source volume
    /// through its gateway.
    PeerFailed = "PEER_FAILED", Aborted;
    /// The worker's disk is full, or has too little room for the declared size of a transfer. Or
    /// the disk of the streamer has no room for the layers of an image. Free space, or use another
    /// worker.
    DiskFull = "DISK_FULL", ResourceExhausted;
    /// The volume has no such path. List the contents of the volume.
    PathNotFound = "PATH_NOT_FOUND", NotFound;
    /// The path is not a regular file, or leads through a symbolic link. Name a regular file.
    NotAFile = "NOT_A_FILE", FailedPrecondition;
    /// The worker does not support the request. Examples are a signal other than TERM and KILL (no
    /// capability `signals`), or input that is not UTF-8 text (no `binary-input`). Avoid the
    /// request, or use another worker.
    Unsupported = "UNSUPPORTED", FailedPrecondition;
    /// The worker did not behave as expected. The message has the error of its system. Check the
    /// log of the gateway.
    WorkerFailed = "WORKER_FAILED", Internal;
}

impl Reason {
    /// Returns a status with this reason in the domain `service`, such as `gantry.scheduler`.
    #[must_use]
    pub fn status(self, service: &str, message: impl Into<String>) -> Status {
        self.status_about::<&str>(service, message, [])
    }

    /// Returns a status with this reason and the metadata `about`.
    #[must_use]
    pub fn status_about<S: Into<String>>(
        self,
        service: &str,
        message: impl Into<String>,
        about: impl IntoIterator<Item = (S, String)>,
    ) -> Status {
        let message = message.into();
        let message = crate::clipped(&message, MAX_MESSAGE_BYTES);
        let about = about.into_iter();
        let metadata: HashMap<_, _> = about
            .map(|(name, value)| (name.into(), crate::clipped(&value, MAX_DESCRIPTION_BYTES).into_owned()))
            .collect();
        let mut details = ErrorDetails::with_error_info(self.as_str(), service, metadata);
        if matches!(self, Self::AllWorkersBusy | Self::TeamQueueFull | Self::Unavailable) {
            details.set_retry_info(Some(Duration::from_secs(1)));
        }
        Status::with_error_details(self.code(), message, details)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Maximum size of a message in bytes. Messages may quote request fields, and errors travel in
/// headers, of which clients read at most 16 KiB by default.
const MAX_MESSAGE_BYTES: usize = 2000;

/// Maximum size of a field description or of one metadata value, in bytes.
const MAX_DESCRIPTION_BYTES: usize = 500;

/// Returns the status for a missing or malformed field.
#[must_use]
pub fn invalid_field(field: impl Into<String>, description: impl Into<String>) -> Status {
    let (field, description) = (field.into(), description.into());
    let description = crate::clipped(&description, MAX_DESCRIPTION_BYTES).into_owned();
    let message = format!("{field}: {description}");
    let mut details = ErrorDetails::with_bad_request_violation(field, description);
    details.set_error_info(Reason::InvalidField.as_str(), "gantry", HashMap::new());
    Status::with_error_details(Reason::InvalidField.code(), message, details)
}

/// Returns `UNAVAILABLE` for a database or service that does not answer. The cause is only logged
/// and not sent.
#[must_use]
pub fn unavailable(service: &str, doing: &str, cause: &(dyn Error + 'static)) -> Status {
    tracing::warn!(error = domain::error_chain(cause), "cannot {doing}");
    Reason::Unavailable.status(service, format!("cannot {doing} just now"))
}

/// Error that a service returned, as its client reads it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({})", reason.as_deref().unwrap_or(code.description()))]
pub struct Refusal {
    /// Canonical gRPC code.
    pub code: Code,
    /// Reason of the error. `None`: the error does not come from a Gantry service.
    pub reason: Option<String>,
    /// Explanation, for people.
    pub message: String,
    /// Metadata of the error.
    pub about: HashMap<String, String>,
}

impl Refusal {
    /// Whether the error has this reason.
    #[must_use]
    pub fn is(&self, reason: Reason) -> bool {
        self.reason.as_deref() == Some(reason.as_str())
    }

    /// Returns the error as `service` returns it to its own caller. An error without a known reason
    /// becomes `UNAVAILABLE`.
    #[must_use]
    pub fn pass_on(&self, service: &str) -> Status {
        let known = Reason::ALL.iter().find(|reason| self.is(**reason) && reason.code() == self.code);
        let Some(reason) = known else { return unavailable(service, "reach a service it depends on", self) };
        let mut status = reason.status(service, self.message.clone());
        if !self.about.is_empty() {
            let mut details = status.get_error_details();
            details.set_error_info(reason.as_str(), service, self.about.clone());
            status = Status::with_error_details(reason.code(), self.message.clone(), details);
        }
        status
    }

    /// Whether the error is temporary, so that a repeat of the call may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        // Errors of Gantry services have a reason. Errors without a reason come from the transport:
        // an expired deadline, a broken or closed connection, or a reset stream. tonic maps them to
        // these codes.
        let from_transport = matches!(self.code, Code::Unknown | Code::Internal | Code::ResourceExhausted);
        matches!(self.code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
            || (from_transport && self.reason.is_none())
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let info = status.get_details_error_info();
        let (reason, about) = info.map_or((None, HashMap::new()), |info| (Some(info.reason), info.metadata));
        Self { code: status.code(), reason, message: status.message().to_owned(), about }
    }
}
