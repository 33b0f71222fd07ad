//! Every setting of the scheduler.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use anyhow::ensure;

use crate::placement::Chains;

/// Settings of the scheduler. [`Config::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where everything is kept.
    pub database: db::Settings,
    /// Where the artifact store listens: `unix:///path` or `http://host:port`, of each replica, with commas between them.
    pub artifact_store: String,
    /// The token that callers over TCP must present to [`crate::serve`], and that is presented to the artifact store.
    pub token: Option<String>,
    /// Gateways say at least this often what their workers do.
    pub heartbeat: Duration,
    /// A worker that was silent for longer is stalled: it gets no work, and another gateway may speak for it.
    pub worker_ttl: Duration,
    /// A worker that was silent for longer is lost: what it ran is given up. Longer than `stop_after`. A start of the scheduler gives it no
    /// more than the TTL to come back.
    pub lost_after: Duration,
    /// A worker that was without contact for longer ends its processes by itself.
    pub stop_after: Duration,
    /// How long a driven lease lasts unless it is renewed.
    pub lease_term: Duration,
    /// How long a ticket is good for opening a transfer.
    pub ticket_validity: Duration,
    /// How long a process may take to end when it ran for too long, before it is killed.
    pub timeout_grace: Duration,
    /// How long a finished workload can be asked for, and which workers have gone is remembered.
    pub keep_finished: Duration,
    /// After how many attempts in a row that ended before their process had started, through its fault, a worker is quarantined.
    pub quarantine_after: u32,
    /// For how long, the first time. Each time in a row is twice as long.
    pub quarantine_for: Duration,
    /// For how long at most.
    pub quarantine_for_at_most: Duration,
    /// How often what the artifact store holds for us is compared with what we know.
    pub reconcile_every: Duration,
    /// How long a holder of pins may be unknown or finished here before it is settled.
    pub reconcile_grace: Duration,
    /// By what workers are compared.
    pub chains: Chains,
    /// What limits workers have that do not say.
    pub limits: Limits,
    /// Teams that use no workers for all while they have some of their own.
    pub keep_to_their_own: BTreeSet<String>,
    /// Most workloads of one team that may wait for a worker.
    pub most_waiting: u64,
    /// Most bytes of specs of one team's workloads that may wait for a worker.
    pub most_waiting_bytes: u64,
    /// How much more of the slots teams get than others, which have 1.
    pub team_weights: HashMap<String, u32>,
    /// After how long somebody who waits counts as one priority higher. Zero: never.
    pub queue_aging: Duration,
    /// For how long a worker that was lost counts as one that may come back, and one that has gone as one whose place another may take.
    pub remember_lost: Duration,
    /// Whether replicas tell each other what changed. Without that each finds out by looking, after `poll`.
    pub share_hints: bool,
    /// How often loops look at the database although nobody gave them a hint.
    pub poll: Duration,
}

/// What holds for workers that do not say something else.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Slots.
    pub tasks: Option<u32>,
    /// Containers.
    pub containers: Option<u32>,
    /// Volumes.
    pub volumes: Option<u32>,
}

impl Config {
    /// The defaults, with the two addresses that have none.
    #[must_use]
    pub fn new(database: impl Into<db::Settings>, artifact_store: impl Into<String>) -> Self {
        Self {
            database: database.into(),
            artifact_store: artifact_store.into(),
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
            keep_to_their_own: BTreeSet::new(),
            most_waiting: 200_000,
            most_waiting_bytes: 256 << 20,
            team_weights: HashMap::new(),
            queue_aging: Duration::from_secs(10 * 60),
            remember_lost: Duration::from_secs(5 * 60),
            share_hints: true,
            poll: Duration::from_secs(1),
        }
    }

    /// Refuses settings under which a worker could still run what was given up.
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
        ensure!(self.most_waiting > 0, "--max-waiting-per-team must not be 0");
        ensure!(self.most_waiting_bytes > 0, "--max-waiting-bytes-per-team must not be 0");
        ensure!(!self.reconcile_every.is_zero(), "--reconcile-interval must not be zero");
        Ok(())
    }
}
