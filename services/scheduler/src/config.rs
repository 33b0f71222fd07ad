//! Settings of the scheduler.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use anyhow::ensure;

use crate::placement::Chains;

/// Settings of the scheduler. [`Config::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct Config {
    /// Connection to the scheduler's database.
    pub database: db::Settings,
    /// Addresses of the artifact store's replicas, separated by commas: `unix:///path` or
    /// `http://host:port`.
    pub artifact_store: String,
    /// Addresses of the streamer's replicas, as for the artifact store. The streamer resolves
    /// references of images. `None`: specs with such references are rejected.
    pub streamer: Option<String>,
    /// The cluster token. TCP callers of [`crate::serve`] must present it, and the scheduler
    /// presents it to the artifact store.
    pub token: Option<String>,
    /// Longest time between two heartbeats of a gateway.
    pub heartbeat: Duration,
    /// Longest time without a heartbeat before a worker is stalled. A stalled worker gets no work,
    /// and another gateway may take over.
    pub worker_ttl: Duration,
    /// Longest time without a heartbeat before a worker is lost and its attempts are given up. Must
    /// be longer than `stop_after`. After a start of the scheduler, a worker has at most the TTL to
    /// return.
    pub lost_after: Duration,
    /// Longest time without contact before a worker ends its processes.
    pub stop_after: Duration,
    /// Term of a driven lease. Each renewal starts a new term.
    pub lease_term: Duration,
    /// Validity of a ticket: the time within which its transfer must be opened.
    pub ticket_validity: Duration,
    /// Grace period of a process that exceeded its run timeout, before it is killed.
    pub timeout_grace: Duration,
    /// Time for which the scheduler keeps finished workloads and the records of removed workers.
    pub keep_finished: Duration,
    /// Number of consecutive attempts that fail before the process starts, through the fault of the
    /// worker, after which the worker is quarantined.
    pub quarantine_after: u32,
    /// Length of the first quarantine. Each consecutive quarantine is twice as long.
    pub quarantine_for: Duration,
    /// Longest quarantine.
    pub quarantine_for_at_most: Duration,
    /// Interval between comparisons of the artifact store's holders with the workloads of this
    /// database.
    pub reconcile_every: Duration,
    /// Time for which a holder of pins may be unknown or finished here before the scheduler settles
    /// it.
    pub reconcile_grace: Duration,
    /// Ranking strategies of workers.
    pub chains: Chains,
    /// Default limits of workers that declare none.
    pub limits: Limits,
    /// Teams that use only their own workers while they have some.
    pub exclusive_teams: BTreeSet<String>,
    /// Maximum number of workloads of one team that may wait for a worker.
    pub max_waiting_per_team: u64,
    /// Maximum number of bytes of specs of one team's workloads that may wait for a worker.
    pub max_waiting_bytes_per_team: u64,
    /// Weights of teams in the fair queue. Other teams have weight 1.
    pub team_weights: HashMap<String, u32>,
    /// Waiting time after which a request counts as one priority higher. Zero: never.
    pub queue_aging: Duration,
    /// Time for which a lost worker counts as one that may return, and a removed worker as one that
    /// may be replaced.
    pub remember_lost: Duration,
    /// Whether replicas notify each other of changes. Without notifications, each replica finds
    /// changes with its next poll.
    pub share_notifications: bool,
    /// Interval at which loops poll the database without a notification.
    pub poll: Duration,
}

/// Default limits of workers that declare none. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of concurrent tasks: the number of slots.
    pub tasks: Option<u32>,
    /// Maximum number of containers.
    pub containers: Option<u32>,
    /// Maximum number of volumes.
    pub volumes: Option<u32>,
}

impl Config {
    /// Returns the defaults, with the two addresses that have none.
    #[must_use]
    pub fn new(database: impl Into<db::Settings>, artifact_store: impl Into<String>) -> Self {
        Self {
            database: database.into(),
            artifact_store: artifact_store.into(),
            streamer: None,
            token: None,
            heartbeat: Duration::from_secs(5),
            worker_ttl: Duration::from_secs(30),
            lost_after: Duration::from_secs(15 * 60),
            stop_after: Duration::from_secs(10 * 60),
            lease_term: Duration::from_secs(60),
            ticket_validity: Duration::from_secs(5 * 60),
            timeout_grace: Duration::from_secs(10),
            keep_finished: Duration::from_secs(7 * 24 * 3600),
            quarantine_after: 5,
            quarantine_for: Duration::from_secs(10),
            quarantine_for_at_most: Duration::from_secs(10 * 60),
            reconcile_every: Duration::from_secs(60),
            reconcile_grace: Duration::from_secs(5 * 60),
            chains: Chains::default(),
            limits: Limits::default(),
            exclusive_teams: BTreeSet::new(),
            max_waiting_per_team: 200_000,
            max_waiting_bytes_per_team: 256 << 20,
            team_weights: HashMap::new(),
            queue_aging: Duration::from_secs(10 * 60),
            remember_lost: Duration::from_secs(5 * 60),
            share_notifications: true,
            poll: Duration::from_secs(1),
        }
    }

    /// Rejects settings with which a worker could still run an attempt that the scheduler has given
    /// up.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.heartbeat.is_zero(), "--heartbeat must not be zero");
        ensure!(!self.poll.is_zero(), "--poll-interval must not be zero");
        ensure!(self.worker_ttl > self.heartbeat, "--worker-ttl must be longer than --heartbeat");
        ensure!(self.stop_after > self.worker_ttl, "--stop-after must be longer than --worker-ttl");
        ensure!(self.lost_after > self.stop_after, "--lost-after must be longer than --stop-after");
        ensure!(!self.lease_term.is_zero(), "--lease-term must not be zero");
        ensure!(!self.ticket_validity.is_zero(), "--ticket-validity must not be zero");
        ensure!(self.quarantine_after > 0, "--quarantine-after must not be 0");
        ensure!(!self.quarantine_for.is_zero(), "--quarantine-for must not be zero");
        ensure!(
            self.quarantine_for_at_most >= self.quarantine_for,
            "--quarantine-for-at-most must not be shorter than --quarantine-for"
        );
        ensure!(self.max_waiting_per_team > 0, "--max-waiting-per-team must not be 0");
        ensure!(self.max_waiting_bytes_per_team > 0, "--max-waiting-bytes-per-team must not be 0");
        ensure!(!self.reconcile_every.is_zero(), "--reconcile-interval must not be zero");
        Ok(())
    }
}
