//! Typed ids. A function that takes the id of a worker does not accept the handle of a volume.
//!
//! An API handler parses an id once. All other code uses the typed id instead of a `String` or
//! `Uuid`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A text is not a UUID. The error holds at most the first 64 characters of the text, because it is
/// returned to the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a UUID")]
pub struct ParseIdError(pub String);

/// Maximum number of characters in a [`ParseIdError`]. Every UUID is shorter.
const MAX_ERROR_CHARS: usize = 64;

macro_rules! typed_id {
    ($($(#[$doc:meta])* $name:ident,)+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// Creates an id that sorts after ids that were created earlier.
            #[must_use]
            #[expect(clippy::new_without_default, reason = "each call creates a different id")]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }

            /// Returns the id with the 128 bits of `uuid`.
            #[must_use]
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// Returns the 128 bits.
            #[must_use]
            pub const fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                Uuid::try_parse(text).map(Self).map_err(|_| ParseIdError(text.chars().take(MAX_ERROR_CHARS).collect()))
            }
        }
    )+};
}

typed_id! {
    /// Id of a worker that has registered with the scheduler.
    WorkerId,
    /// Id of a workload. The caller chooses it.
    WorkloadId,
    /// Id of an attempt. Its main process has the same id.
    AttemptId,
    /// Id of a process in a container. The caller chooses it.
    ProcessId,
    /// Id of a lease.
    LeaseId,
    /// Id of an artifact.
    ArtifactId,
    /// Id of a build, which owns artifacts.
    BuildId,
    /// Id of a cache, which owns an artifact.
    CacheId,
    /// Id of a claim: the right to make a resource cache. The claimant chooses it.
    ClaimId,
    /// Handle of a volume on one worker. The artifact store creates it.
    VolumeHandle,
    /// Handle of a container on one worker. The artifact store creates it.
    ContainerHandle,
    /// Id of a transfer of bytes.
    TransferId,
    /// Id of one start of a gateway process.
    GatewayInstance,
    /// Id of an incarnation, as the worker stores it among its volumes.
    MarkerId,
    /// Id of a store life: the life of one database of the artifact store.
    StoreLife,
}

impl WorkloadId {
    /// Creates a random id. The first digits of such ids differ, so people can abbreviate them.
    #[must_use]
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// Returns the id of the artifact for the output `name`. All attempts share the id, because at
    /// most one is settled.
    #[must_use]
    pub fn output_artifact(self, name: &str) -> ArtifactId {
        ArtifactId(Uuid::new_v5(&self.0, name.as_bytes()))
    }

    /// Returns the id of the artifact for the new version of the task cache `cache`. All attempts
    /// share the id.
    #[must_use]
    pub fn cache_artifact(self, cache: CacheId) -> ArtifactId {
        // Names of outputs have no slash, so the two kinds of ids differ.
        self.output_artifact(&format!("cache/{cache}"))
    }
}

impl AttemptId {
    /// Returns the id of the container and of the process of a service of this attempt.
    #[must_use]
    pub fn service(self, name: &str) -> AttemptId {
        AttemptId(Uuid::new_v5(&self.0, format!("service/{name}").as_bytes()))
    }
}

impl From<AttemptId> for ProcessId {
    fn from(attempt: AttemptId) -> Self {
        Self(attempt.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_age_and_parse() {
        let (first, second) = (WorkerId::new(), WorkerId::new());
        assert!(first < second);
        assert_eq!(first.to_string().parse(), Ok(first));
        assert_eq!("x".parse::<WorkerId>(), Err(ParseIdError("x".to_owned())));
        assert_eq!("ü".repeat(100_000).parse::<WorkerId>(), Err(ParseIdError("ü".repeat(64))));
    }

    #[test]
    fn output_artifact_depends_on_name_only() {
        let workload = WorkloadId::new();
        assert_eq!(workload.output_artifact("a"), workload.output_artifact("a"));
        assert_ne!(workload.output_artifact("a"), workload.output_artifact("b"));
    }
}
