//! Error reasons: the closed list of what can go wrong, as programs see it.
//!
//! Every `Status` that a service makes comes from a [`Reason`] and carries exactly one `ErrorInfo`. `docs/errors.md` says of each
//! who is at fault, what may have happened, and what to do; a test holds the two together.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

macro_rules! reasons {
    ($($variant:ident = $text:literal, $code:ident;)+) => {
        /// Why a call was refused or failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "docs/errors.md describes each")]
        pub enum Reason { $($variant,)+ }

        impl Reason {
            /// All of them.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant,)+];

            /// Its text on the wire.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }

            /// The canonical code that it comes with.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Self::$variant => Code::$code,)+ }
            }
        }
    };
}

reasons! {
    InvalidField = "INVALID_FIELD", InvalidArgument;
    InvalidPageToken = "INVALID_PAGE_TOKEN", InvalidArgument;
    InvalidToken = "INVALID_TOKEN", Unauthenticated;
    Unauthenticated = "UNAUTHENTICATED", Unauthenticated;
    Unavailable = "UNAVAILABLE", Unavailable;
    DeadlineExceeded = "DEADLINE_EXCEEDED", DeadlineExceeded;

    WorkloadExists = "WORKLOAD_EXISTS", AlreadyExists;
    WorkloadNotFound = "WORKLOAD_NOT_FOUND", NotFound;
    WorkloadNotQueued = "WORKLOAD_NOT_QUEUED", FailedPrecondition;
    InputUnavailable = "INPUT_UNAVAILABLE", FailedPrecondition;
    NoCompatibleWorker = "NO_COMPATIBLE_WORKER", FailedPrecondition;
    AllWorkersBusy = "ALL_WORKERS_BUSY", ResourceExhausted;
    TeamQueueFull = "TEAM_QUEUE_FULL", ResourceExhausted;
    LeaseLost = "LEASE_LOST", FailedPrecondition;
    LeaseExists = "LEASE_EXISTS", AlreadyExists;
    LeaseNotFound = "LEASE_NOT_FOUND", NotFound;
    StaleSession = "STALE_SESSION", FailedPrecondition;
    StaleIncarnation = "STALE_INCARNATION", FailedPrecondition;
    AlreadyAttended = "ALREADY_ATTENDED", FailedPrecondition;
    UnsupportedProtocol = "UNSUPPORTED_PROTOCOL", FailedPrecondition;
    WorkerNotFound = "WORKER_NOT_FOUND", NotFound;
    WorkerUnreachable = "WORKER_UNREACHABLE", FailedPrecondition;
    WorkerInContact = "WORKER_IN_CONTACT", FailedPrecondition;
    WorkerRetired = "WORKER_RETIRED", FailedPrecondition;
    WorkerOfAnotherTeam = "WORKER_OF_ANOTHER_TEAM", FailedPrecondition;

    ArtifactExists = "ARTIFACT_EXISTS", AlreadyExists;
    ArtifactNotFound = "ARTIFACT_NOT_FOUND", NotFound;
    ArtifactSealed = "ARTIFACT_SEALED", FailedPrecondition;
    OwnerEnded = "OWNER_ENDED", FailedPrecondition;
    BuildEnded = "BUILD_ENDED", FailedPrecondition;
    BuildExists = "BUILD_EXISTS", AlreadyExists;
    BuildNotFound = "BUILD_NOT_FOUND", NotFound;
    CacheNotFound = "CACHE_NOT_FOUND", NotFound;
    CacheInUse = "CACHE_IN_USE", FailedPrecondition;
    HolderSettled = "HOLDER_SETTLED", FailedPrecondition;
    CandidateMissing = "CANDIDATE_MISSING", FailedPrecondition;
    ClaimLost = "CLAIM_LOST", FailedPrecondition;
    AttemptEnded = "ATTEMPT_ENDED", FailedPrecondition;
    VolumeNotFound = "VOLUME_NOT_FOUND", NotFound;
    VolumeInUse = "VOLUME_IN_USE", FailedPrecondition;
    ContainerNotFound = "CONTAINER_NOT_FOUND", NotFound;
    LastReplica = "LAST_REPLICA", FailedPrecondition;
    HoldsOrphans = "HOLDS_ORPHANS", FailedPrecondition;
    Compacted = "COMPACTED", OutOfRange;
    StaleReport = "STALE_REPORT", FailedPrecondition;
    ReportTruncated = "REPORT_TRUNCATED", InvalidArgument;
    NoReplica = "NO_REPLICA", DataLoss;
    BytesGone = "BYTES_GONE", FailedPrecondition;
    UnknownId = "UNKNOWN_ID", NotFound;
    NotOrphaned = "NOT_ORPHANED", FailedPrecondition;
    NotAdoptable = "NOT_ADOPTABLE", FailedPrecondition;

    NotAttended = "NOT_ATTENDED", FailedPrecondition;
    ProcessNotFound = "PROCESS_NOT_FOUND", NotFound;
    OffsetOutOfRange = "OFFSET_OUT_OF_RANGE", OutOfRange;
    InvalidArchive = "INVALID_ARCHIVE", InvalidArgument;
    InvalidManifest = "INVALID_MANIFEST", InvalidArgument;
    DigestMismatch = "DIGEST_MISMATCH", DataLoss;
    TransferNotPlanned = "TRANSFER_NOT_PLANNED", FailedPrecondition;
    TransferTruncated = "TRANSFER_TRUNCATED", InvalidArgument;
    TransferCancelled = "TRANSFER_CANCELLED", Aborted;
    SourceFailed = "SOURCE_FAILED", FailedPrecondition;
    NoPeers = "NO_PEERS", FailedPrecondition;
    PeerFailed = "PEER_FAILED", Aborted;
    DiskFull = "DISK_FULL", ResourceExhausted;
    PathNotFound = "PATH_NOT_FOUND", NotFound;
    NotAFile = "NOT_A_FILE", FailedPrecondition;
    Unsupported = "UNSUPPORTED", FailedPrecondition;
    WorkerFailed = "WORKER_FAILED", Internal;
}

impl Reason {
    /// A status with this reason, as `service` (such as `gantry.scheduler`) answers it.
    #[must_use]
    pub fn status(self, service: &str, message: impl Into<String>) -> Status {
        self.status_about::<&str>(service, message, [])
    }

    /// A status with this reason, and with what it is about.
    #[must_use]
    pub fn status_about<S: Into<String>>(
        self,
        service: &str,
        message: impl Into<String>,
        about: impl IntoIterator<Item = (S, String)>,
    ) -> Status {
        let message = message.into();
        let message = crate::clipped(&message, MOST_MESSAGE_BYTES);
        let about = about.into_iter();
        let metadata: HashMap<_, _> = about
            .map(|(name, value)| (name.into(), crate::clipped(&value, MOST_DESCRIPTION_BYTES).into_owned()))
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

/// Most bytes of a message. It may repeat what somebody sent, and errors travel in headers, of which clients read 16 KiB at most by default.
const MOST_MESSAGE_BYTES: usize = 2000;

/// Most bytes of what is said about a field, or of one thing that an error is about.
const MOST_DESCRIPTION_BYTES: usize = 500;

/// A field is missing or malformed.
#[must_use]
pub fn invalid_field(field: impl Into<String>, description: impl Into<String>) -> Status {
    let (field, description) = (field.into(), description.into());
    let description = crate::clipped(&description, MOST_DESCRIPTION_BYTES).into_owned();
    let message = format!("{field}: {description}");
    let mut details = ErrorDetails::with_bad_request_violation(field, description);
    details.set_error_info(Reason::InvalidField.as_str(), "gantry", HashMap::new());
    Status::with_error_details(Reason::InvalidField.code(), message, details)
}

/// Something that this service needs does not answer. The cause is logged here and stays here.
#[must_use]
pub fn unavailable(service: &str, doing: &str, cause: &(dyn Error + 'static)) -> Status {
    tracing::warn!(error = domain::error_chain(cause), "cannot {doing}");
    Reason::Unavailable.status(service, format!("cannot {doing} just now"))
}

/// What a service answered instead of what was asked for, as callers of ours see it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({})", reason.as_deref().unwrap_or(code.description()))]
pub struct Refusal {
    /// The canonical code.
    pub code: Code,
    /// The reason, when the other side is one of ours and got far enough to give one.
    pub reason: Option<String>,
    /// For people.
    pub message: String,
    /// What it is about.
    pub about: HashMap<String, String>,
}

impl Refusal {
    /// Whether it was refused for `reason`.
    #[must_use]
    pub fn is(&self, reason: Reason) -> bool {
        self.reason.as_deref() == Some(reason.as_str())
    }

    /// The same refusal, as `service` answers it to its own caller. One that the caller can do nothing about becomes `UNAVAILABLE`.
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

    /// Whether the same call may succeed later and may be repeated blindly.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        // Everything that a service of ours refuses has a reason. What has none comes from below: an expired time-out, a connection that
        // broke or was told to go away, a stream that was reset; tonic gives each of them one of these codes.
        let from_below = matches!(self.code, Code::Unknown | Code::Internal | Code::ResourceExhausted);
        matches!(self.code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled)
            || (from_below && self.reason.is_none())
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let info = status.get_details_error_info();
        let (reason, about) = info.map_or((None, HashMap::new()), |info| (Some(info.reason), info.metadata));
        Self { code: status.code(), reason, message: status.message().to_owned(), about }
    }
}
