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
    /// Such as `linux`.
    pub platform: String,
    /// Its tags: with some, it takes only workloads with tags.
    pub tags: Vec<String>,
    /// The only team that may use it. `None`: every team.
    pub team: Option<String>,
    /// How much it takes, and has to give.
    pub amounts: Amounts,
    /// Whether the worker is gone for good once it is lost.
    pub ephemeral: bool,
    /// Where callers reach this gateway: `unix:///path` or `http://host:port`.
    pub endpoint: String,
    /// Where the scheduler listens.
    pub scheduler: String,
    /// Where the artifact store listens.
    pub artifact_store: String,
    /// Where the streamer listens, which brings inputs that are on other workers.
    pub streamer: String,
    /// The token of the cluster, which its services ask of each other over TCP. `None`: none.
    pub token: Option<String>,
    /// Where manifests of volumes are kept, so that they need not be made again, and what was found to be damaged. It may be lost.
    pub manifest_dir: PathBuf,
    /// How often everything that the worker holds is reported.
    pub report_interval: Duration,
    /// How many containers are destroyed at a time. Volumes go one after the other, or as many at once as their worker destroys by one call,
    /// children before their parents.
    pub destroy_concurrency: usize,
    /// Terms and pauses, which tests shorten.
    pub intervals: Intervals,
    /// Whether what is marked or unknown is left where it is, so that it can be looked at. The worker only fills up.
    pub hold_destruction: bool,
}

/// Terms and pauses of a gateway that no operator sets.
#[derive(Debug, Clone, Copy)]
pub struct Intervals {
    /// Time that another worker may take at least to send a volume here; more for a large one. By default as
    /// long as Concourse gives it.
    pub peer_transfer: Duration,
    /// Time after which no worker connects any more that was asked to send a volume: it gives up connecting
    /// after half of it.
    pub peer_quiet: Duration,
    /// Pause between two tries to empty a volume.
    pub clear_retry: Duration,
    /// Time that a process which may wait for a caller waits while none is attached. The command line gives up
    /// as late.
    pub caller_term: Duration,
    /// Pause between two reports to the artifact store that a caller is attached to a process.
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
    /// The defaults for a worker that every team may use.
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
            amounts: Amounts::default(),
            ephemeral: false,
            endpoint: endpoint.to_owned(),
            scheduler: scheduler.to_owned(),
            artifact_store: artifact_store.to_owned(),
            streamer: streamer.to_owned(),
            token: None,
            manifest_dir,
            report_interval: Duration::from_secs(60),
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
        }
    }
}
