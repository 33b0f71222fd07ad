//! The steps of a run, and their answers.

use std::collections::{BTreeMap, BTreeSet};

use domain::worker::{LeaseClaims, SessionClaims};
use domain::{LeaseId, WorkerId, WorkloadId};

use super::attempts::Report;
use super::fixtures;
use super::gateways::SentReport;
use super::state::Minutes;
use super::stream::StreamOutput;
use crate::db::entity::lease::Kind;
use crate::lifecycle::departure::Withdrawal;
use crate::workers::Registration;
use crate::workloads::Phase;

/// One step. A caller may repeat a step that was killed or not answered.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Registration(Box<Registration>),
    Misfit(Box<Registration>),
    /// Register on a stream, which stays open.
    Attend {
        stream: usize,
        registration: Box<Registration>,
    },
    /// Send a report on a stream, however late. `is_fresh`: the replica has just polled.
    SendReport {
        stream: usize,
        report: SentReport,
        is_fresh: bool,
    },
    /// `is_last`: no message followed. Otherwise the disconnect is late.
    SignOff {
        session: SessionClaims,
        is_last: bool,
    },
    Heard(SessionClaims),
    /// Move the clock, and restart the replicas.
    Pass(Minutes),
    /// A scheduler starts, which extends all terms.
    ExtendTerms,
    Expire,
    Down {
        name: &'static str,
        down: Withdrawal,
        interrupt_after: Option<Minutes>,
    },
    Run(&'static str),
    Prune(&'static str),
    Depart,
    EndStranded,
    /// `other`: a different spec than before. `is_fresh`: the replica has just polled.
    Submit {
        id: WorkloadId,
        other: bool,
        is_fresh: bool,
    },
    Place {
        call: Call,
        is_fresh: bool,
    },
    /// The caller of a waiting call disconnects.
    Disconnect {
        call: usize,
    },
    /// The waiting time of calls passes. `looks`: the replica checks for disconnected callers.
    EndWaits {
        minutes: Minutes,
        looks: bool,
    },
    Renew(LeaseId),
    /// The gateway is about to run something under a driven lease.
    Use(LeaseId),
    Release {
        lease: LeaseId,
        is_fresh: bool,
    },
    Dispatch,
    Start(LeaseClaims),
    Finish {
        claims: LeaseClaims,
        report: Report,
    },
    Observe {
        claims: LeaseClaims,
        phase: Phase,
    },
    /// The gateway does not know the attempt.
    Absent(LeaseClaims),
    Cancel {
        id: WorkloadId,
        grace: i64,
        team: &'static str,
    },
    Deliver,
    Reconcile,
}

/// A call for leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) number: usize,
    pub(super) items: Vec<(LeaseId, Kind)>,
    pub(super) together: bool,
    /// The lease named by `same_worker_as_lease_id`.
    pub(super) near: Option<LeaseId>,
    /// Waiting time, for calls with one lease or one group.
    pub(super) wait: Minutes,
}

impl Call {
    pub(super) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.items.iter().map(|(id, _)| *id)
    }

    /// Returns the highest priority of the leases.
    pub(super) fn priority(&self) -> i64 {
        self.leases().map(fixtures::priority_of_lease).max().unwrap_or_default()
    }

    /// Returns whether both calls request the same leases.
    pub(super) fn requests_same_leases(&self, other: &Self) -> bool {
        self.items == other.items && self.near == other.near
    }
}

/// The answer to a step: `Ok`, the name of the error, or `Waits`.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// One entry for each requested lease.
    pub(super) results: Vec<String>,
    pub(super) session: Option<SessionClaims>,
    /// The answers to calls that had waited.
    pub(super) others: Vec<(usize, Vec<String>)>,
    /// Calls that still wait.
    pub(super) waiting: BTreeSet<usize>,
    /// The allowed workers of a single requested lease, if they can be predicted.
    pub(super) best: Option<BTreeSet<WorkerId>>,
    /// Messages on the open streams, by stream number.
    pub(super) received_on_streams: BTreeMap<usize, StreamOutput>,
}

impl Answer {
    pub(super) fn of<T, E: std::fmt::Debug>(results: impl IntoIterator<Item = Result<T, E>>) -> Self {
        let name = |error: E| {
            let text = format!("{error:?}");
            text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default().to_owned()
        };
        let results =
            results.into_iter().map(|result| result.map_or_else(name, |_| "Ok".to_owned())).collect();
        Self::new(results)
    }

    pub(super) fn ok() -> Self {
        Self::new(vec!["Ok".to_owned()])
    }

    pub(super) fn new(results: Vec<String>) -> Self {
        Self {
            results,
            session: None,
            others: vec![],
            waiting: BTreeSet::new(),
            best: None,
            received_on_streams: BTreeMap::new(),
        }
    }
}
