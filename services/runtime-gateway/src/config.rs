//! Settings of a gateway.

use std::path::PathBuf;
use std::time::Duration;

use domain::worker::Labels;

use crate::Amounts;

/// Settings of a gateway that attends one worker.
#[derive(Debug, Clone)]
pub struct Config {
    /// The worker's name, unique in the cluster.
    pub worker_name: String,
    /// Platform of the worker, such as `linux`.
    pub platform: String,
    /// Tags of the worker. A worker with tags takes only workloads with tags.
    pub tags: Vec<String>,
    /// Only team that may use the worker. `None`: every team.
    pub team: Option<String>,
    /// Zone of the worker, a part of the network with fast connections. Empty: no zone.
    pub zone: String,
    /// Limits and capacity of the worker.
    pub amounts: Amounts,
    /// Whether the worker is pruned once it is lost.
    pub ephemeral: bool,
    /// Address of this gateway for callers: `unix:///path` or `http://host:port`.
    pub endpoint: String,
    /// Addresses of the scheduler.
    pub scheduler: String,
    /// Addresses of the artifact store.
    pub artifact_store: String,
    /// Addresses of the streamer, which copies inputs to the worker.
    pub streamer: String,
    /// Cluster token for calls over TCP. `None`: calls carry no token.
    pub token: Option<String>,
    /// Directory of the manifests of volumes and of the list of damaged volumes. Both can be
    /// recreated, so the directory may be lost.
    pub manifest_dir: PathBuf,
    /// Interval between two reports of all containers and volumes.
    pub report_interval: Duration,
    /// Bytes of volumes that are hashed in one second while no work runs. 0: none are hashed.
    pub scrub_bytes_per_second: u64,
    /// Most containers that are destroyed at a time. Volumes are destroyed in batches of the size
    /// that the worker takes in one call, children before parents.
    pub destroy_concurrency: usize,
    /// Timeouts and intervals, which tests shorten.
    pub intervals: Intervals,
    /// Whether the gateway destroys nothing, so that an operator can inspect what is marked. The
    /// disk fills up meanwhile.
    pub hold_destruction: bool,
}

/// Default of [`Config::scrub_bytes_per_second`].
const DEFAULT_SCRUB_RATE: u64 = 8 << 20;

/// Timeouts and intervals of a gateway that no operator sets.
#[derive(Debug, Clone, Copy)]
pub struct Intervals {
    /// Shortest timeout of a transfer by another worker. A large volume gets more. The default is
    /// that of Concourse.
    pub peer_transfer: Duration,
    /// Time after which a worker that was asked to send a volume no longer connects. That worker
    /// gives up connecting after half of this time.
    pub peer_quiet: Duration,
    /// Pause between two tries to empty a volume.
    pub clear_retry: Duration,
    /// Time that a process waits for a caller while none is attached. The command line gives up
    /// after the same time.
    pub caller_term: Duration,
    /// Interval between two reports to the artifact store that a caller is attached.
    pub touch: Duration,
}

impl Default for Intervals {
    fn default() -> Self {
        Self {
            peer_transfer: Duration::from_secs(15 * 60),
            peer_quiet: Duration::from_secs(60),
            clear_retry: Duration::from_secs(1),
            caller_term: Duration::from_secs(5 * 60),
            touch: Duration::from_secs(60),
        }
    }
}

impl Config {
    /// Returns the default settings of a worker that every team may use.
    #[must_use]
    pub fn for_worker(
        name: &str,
        endpoint: &str,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
        manifest_dir: PathBuf,
    ) -> Self {
        Self {
            worker_name: name.to_owned(),
            platform: "linux".to_owned(),
            tags: Vec::new(),
            team: None,
            zone: String::new(),
            amounts: Amounts::default(),
            ephemeral: false,
            endpoint: endpoint.to_owned(),
            scheduler: scheduler.to_owned(),
            artifact_store: artifact_store.to_owned(),
            streamer: streamer.to_owned(),
            token: None,
            manifest_dir,
            report_interval: Duration::from_secs(60),
            scrub_bytes_per_second: DEFAULT_SCRUB_RATE,
            destroy_concurrency: 8,
            intervals: Intervals::default(),
            hold_destruction: false,
        }
    }

    pub(crate) fn labels(&self, capabilities: &runtime::Capabilities) -> Labels {
        Labels {
            platform: self.platform.clone(),
            tags: self.tags.clone(),
            team: self.team.clone(),
            image_kinds: capabilities.image_kinds.clone(),
            capabilities: capabilities.features.clone(),
            resource_types: capabilities.resource_types(),
            zone: self.zone.clone(),
        }
    }
}
