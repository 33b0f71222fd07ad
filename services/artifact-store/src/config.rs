//! Every setting of the store, documented, with its default, and checked at start.

use std::time::Duration;

use rpc::pb::scheduler::PublicKey;

use crate::Clock;

/// Every setting.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the store keeps its rows. Required.
    pub database: db::Settings,
    /// What verifies session credentials. Required.
    pub keys: KeySource,
    /// The token that callers over TCP must present, and that the store presents to the scheduler. Default: none.
    pub token: Option<String>,
    /// An artifact that never had an owner goes this long after it was made. Default: 12 h.
    pub unowned_ttl: Duration,
    /// Containers and volumes of an attempt go this long after it ended. Default: 5 min.
    pub gc_grace: Duration,
    /// A build keeps its artifacts this long after its end, unless its caller says otherwise. Default: 5 min.
    pub default_keep: Duration,
    /// A build to which no workload was bound ends this long after it was last put, unless its caller says otherwise.
    /// Default: 10 min.
    pub default_term: Duration,
    /// A resource cache goes when it was unused for this long. Default: 24 h.
    pub resource_cache_ttl: Duration,
    /// A task cache goes when it was unused for this long, unless its caller says otherwise. Default: 7 days.
    pub task_cache_ttl: Duration,
    /// How often garbage is collected, give or take a fifth, so that replicas do not run in step. Default: 30 s.
    pub collect_interval: Duration,
    /// How long a transfer, or the maker of a resource cache, may take before it says that it goes on. Default: 20 s.
    pub claim_term: Duration,
    /// What a report lacks is noticed as lost when no report names it for longer. Default: 1 min.
    pub lost_grace: Duration,
    /// A deleted artifact, and a volume or container that is gone, can still be asked about for this long. Default: 24 h.
    pub tombstone: Duration,
    /// A settled workload, an ended attempt and an ended build are remembered this long, so that late calls for them are
    /// refused; and so is what was lost, for callers that watch. Longer than any call can be delayed. Default: 24 h.
    pub remember: Duration,
    /// How often a gateway's stream looks for marks by itself; marks of this process are streamed at once. Default: 1 s.
    pub sweep_interval: Duration,
    /// Tells the present. Default: the system's clock.
    pub clock: Clock,
}

/// What verifies session credentials.
#[derive(Debug, Clone)]
pub enum KeySource {
    /// The keys of the scheduler at this endpoint, or at one of several with commas between them, asked for when one is missing.
    Scheduler(String),
    /// These keys, and no others.
    Fixed(Vec<PublicKey>),
}

/// A setting cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It must be longer than nothing.
    #[error("{0} must not be zero")]
    Zero(&'static str),
}

impl Config {
    /// The defaults.
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

    /// Refuses what would make a loop spin or a transfer impossible.
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
