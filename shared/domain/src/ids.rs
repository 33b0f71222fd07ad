//! Typed ids: a volume's handle cannot be passed where a worker is meant.
//!
//! Ids are parsed once, where they enter, and never travel as `String` or `Uuid` again.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The text is no UUID. Only its beginning is kept, for it may be of any length and is answered to whoever sent it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a UUID")]
pub struct ParseIdError(pub String);

/// How many characters of what is no UUID are kept: more than any UUID has.
const BEGINNING: usize = 64;

macro_rules! typed_id {
    ($($(#[$doc:meta])* $name:ident,)+) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// A new id that sorts after those made earlier.
            #[must_use]
            #[expect(clippy::new_without_default, reason = "each call makes another id")]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }

            /// The id with these 128 bits.
            #[must_use]
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The 128 bits.
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
                Uuid::try_parse(text).map(Self).map_err(|_| ParseIdError(text.chars().take(BEGINNING).collect()))
            }
        }
    )+};
}

typed_id! {
    /// A worker that has registered with the scheduler.
    WorkerId,
    /// A workload, chosen by its caller.
    WorkloadId,
    /// One try at a workload; also the id of its process.
    AttemptId,
    /// The right to use one slot of one worker's incarnation.
    LeaseId,
    /// An artifact.
    ArtifactId,
    /// A build, which owns artifacts.
    BuildId,
    /// A cache, which owns an artifact.
    CacheId,
    /// The right to make a resource cache, chosen by who asks for it.
    ClaimId,
    /// A volume on one worker, minted by the artifact store.
    VolumeHandle,
    /// A container on one worker, minted by the artifact store.
    ContainerHandle,
    /// One transfer of bytes.
    TransferId,
    /// One start of a gateway process.
    GatewayInstance,
    /// One life of what a worker holds, as the worker itself remembers it.
    MarkerId,
    /// One life of the artifact store's database.
    StoreLife,
}

impl WorkloadId {
    /// The artifact that the output `name` becomes. The same for every attempt: only one is settled.
    #[must_use]
    pub fn output_artifact(self, name: &str) -> ArtifactId {
        ArtifactId(Uuid::new_v5(&self.0, name.as_bytes()))
    }

    /// The artifact that what it leaves in a task cache becomes. The same for every attempt.
    #[must_use]
    pub fn cache_artifact(self, cache: CacheId) -> ArtifactId {
        // No output has a slash in its name.
        self.output_artifact(&format!("cache/{cache}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_age_and_come_back_from_text() {
        let (first, second) = (WorkerId::new(), WorkerId::new());
        assert!(first < second);
        assert_eq!(first.to_string().parse(), Ok(first));
        assert_eq!("x".parse::<WorkerId>(), Err(ParseIdError("x".to_owned())));
        assert_eq!("ü".repeat(100_000).parse::<WorkerId>(), Err(ParseIdError("ü".repeat(64))));
    }

    #[test]
    fn an_output_has_one_artifact_however_often_it_is_tried() {
        let workload = WorkloadId::new();
        assert_eq!(workload.output_artifact("a"), workload.output_artifact("a"));
        assert_ne!(workload.output_artifact("a"), workload.output_artifact("b"));
    }
}
