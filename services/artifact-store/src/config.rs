//! Settings of the artifact store, with their defaults and checks.

use std::time::Duration;

use rpc::pb::scheduler::PublicKey;

use crate::Clock;

/// The settings of one artifact store process.
#[derive(Debug, Clone)]
pub struct Config {
    /// Location of the store's database. Required.
    pub database: db::Settings,
    /// Source of the keys that verify session credentials. Required.
    pub keys: KeySource,
    /// Cluster token that callers over TCP must present, and that the store presents to the
    /// scheduler. Default: none.
    pub token: Option<String>,
    /// Time after creation after which an artifact that never had an owner is deleted. Default: 12
    /// h.
    pub unowned_ttl: Duration,
    /// Time after the end of an attempt for which its containers and volumes are kept. Default: 5
    /// min.
    pub gc_grace: Duration,
    /// Time for which a build keeps its artifacts after its end, if the caller sets none. Default:
    /// 5 min.
    pub default_keep: Duration,
    /// Time after its last `PutBuild` after which a build without a bound workload ends, if the
    /// caller sets none. Default: 10 min.
    pub default_term: Duration,
    /// Time after the last use after which a resource cache is deleted. Default: 24 h.
    pub resource_cache_ttl: Duration,
    /// Time after the last use after which a task cache is deleted, if the caller sets none.
    /// Default: 7 days.
    pub task_cache_ttl: Duration,
    /// Time between two garbage collections. Each one varies at random by up to a fifth, so that
    /// replicas do not run in step. Default: 30 s.
    pub collect_interval: Duration,
    /// Time after which a claim expires unless it is renewed. Transfers and makers of resource
    /// caches hold claims. Default: 20 s.
    pub claim_term: Duration,
    /// Time for which a volume or container must be missing from reports before its loss is
    /// recorded. Default: 1 min.
    pub lost_grace: Duration,
    /// Time for which a deleted artifact can be restored, and the deletion of a volume, container
    /// or cache explained. Default: 24 h.
    pub tombstone: Duration,
    /// Time for which settled workloads, ended attempts and ended builds are remembered, so that
    /// late calls for them are rejected. Losses are kept as long for callers that watch them. Must
    /// exceed the delay of any call. Default: 24 h.
    pub remember: Duration,
    /// Time between two polls of a gateway's stream for marks of other replicas. Marks of this
    /// process are streamed at once. Default: 1 s.
    pub sweep_interval: Duration,
    /// Source of the current time. Default: the system's clock.
    pub clock: Clock,
}

/// Source of the keys that verify session credentials.
#[derive(Debug, Clone)]
pub enum KeySource {
    /// The scheduler at one or more endpoints, separated by commas. A missing key is fetched on
    /// demand.
    Scheduler(String),
    /// A fixed list of keys.
    Fixed(Vec<PublicKey>),
}

/// A setting has an invalid value.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A duration is zero.
    #[error("{0} must not be zero")]
    Zero(&'static str),
}

impl Config {
    /// Returns the default settings.
    #[must_use]
    pub fn new(database: impl Into<db::Settings>, keys: KeySource) -> Self {
        let (second, minute, hour) =
            (Duration::from_secs(1), Duration::from_secs(60), Duration::from_secs(3600));
        Self {
            database: database.into(),
            keys,
            token: None,
            unowned_ttl: 12 * hour,
            gc_grace: 5 * minute,
            default_keep: 5 * minute,
            default_term: 10 * minute,
            resource_cache_ttl: 24 * hour,
            task_cache_ttl: 7 * 24 * hour,
            collect_interval: 30 * second,
            claim_term: 20 * second,
            lost_grace: minute,
            tombstone: 24 * hour,
            remember: 24 * hour,
            sweep_interval: second,
            clock: Clock::system(),
        }
    }

    /// Rejects durations that would make a loop spin or a transfer impossible.
    pub fn check(&self) -> Result<(), ConfigError> {
        let longer_than_nothing = [
            ("--collect-interval", self.collect_interval),
            ("--claim-term", self.claim_term),
            ("--sweep-interval", self.sweep_interval),
        ];
        match longer_than_nothing.iter().find(|(_, duration)| duration.is_zero()) {
            Some((name, _)) => Err(ConfigError::Zero(name)),
            None => Ok(()),
        }
    }
}
