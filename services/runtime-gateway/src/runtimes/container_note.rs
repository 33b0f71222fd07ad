//! The note that a gateway stores with a container, so that callers find it after a restart.

use std::collections::BTreeMap;

use domain::{ArtifactId, AttemptId, CacheId, LeaseId};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Facts that are stored with a container. Only this format outlives a version of the program. New
/// fields must have a default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContainerNote {
    pub(crate) lease: LeaseId,
    /// The attempt, which is the id of the container and of its main process.
    pub(crate) container: AttemptId,
    /// The part of a container that a caller drives.
    #[serde(default)]
    pub(crate) driven: Option<DrivenNote>,
    /// Position in the start order, if the container is that of a service.
    #[serde(default)]
    pub(crate) service: Option<usize>,
}

/// Facts about a container that a caller drives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DrivenNote {
    /// Name of the container within its lease.
    pub(crate) key: String,
    pub(crate) labels: BTreeMap<String, String>,
    /// Digest of the spec.
    pub(crate) spec: Uuid,
    pub(crate) outputs: Vec<NotedOutput>,
    pub(crate) caches: Vec<NotedCache>,
}

/// An output that can be published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NotedOutput {
    pub(crate) name: String,
    pub(crate) path: String,
    /// The input at the same path.
    pub(crate) from: Option<ArtifactId>,
}

/// A task cache that can be published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NotedCache {
    pub(crate) cache: CacheId,
    pub(crate) path: String,
}
