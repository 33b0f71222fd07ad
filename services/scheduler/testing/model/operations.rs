//! What is done, and what is answered.

use std::collections::{BTreeMap, BTreeSet};

use domain::worker::{LeaseClaims, SessionClaims};
use domain::{LeaseId, WorkerId, WorkloadId};

use super::attempts::Report;
use super::fixtures;
use super::gateways::Observed;
use super::state::Minutes;
use super::stream::Heartbeat;
use crate::db::entity::lease::Kind;
use crate::lifecycle::departure::Withdrawal;
use crate::workers::Registration;
use crate::workloads::Phase;

/// One thing that is done. Whoever is killed while he does it, or does not hear the answer, does it again.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Hello(Box<Registration>),
    Misfit(Box<Registration>),
    /// The same as hello, on a stream, which stays open.
    Attend {
        stream: usize,
        hello: Box<Registration>,
    },
    /// A gateway says on a stream what is, however late. `is_fresh`: to a replica that has just looked.
    Say {
        stream: usize,
        said: Observed,
        is_fresh: bool,
    },
    /// `is_last`: nothing was heard of it since; otherwise it is late.
    Goodbye {
        session: SessionClaims,
        is_last: bool,
    },
    Heard(SessionClaims),
    /// Time passes, and the replicas are started anew.
    Pass(Minutes),
    /// A scheduler was started: whoever has to stay in contact gets time.
    BePatient,
    Expire,
    Down {
        name: &'static str,
        down: Withdrawal,
        interrupt_after: Option<Minutes>,
    },
    Run(&'static str),
    Prune(&'static str),
    SeeOff,
    EndOrphans,
    /// `other`: what was not submitted under that id. `is_fresh`: by a replica that has just looked.
    Submit {
        id: WorkloadId,
        other: bool,
        is_fresh: bool,
    },
    Place {
        call: Call,
        is_fresh: bool,
    },
    /// The caller of a call that waits goes.
    GoAway {
        call: usize,
    },
    /// So much time passes for those who wait. `looks`: their replica looks for those who have gone.
    EndPatience {
        minutes: Minutes,
        looks: bool,
    },
    Renew(LeaseId),
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
    pub(super) asks: Vec<(LeaseId, Kind)>,
    pub(super) together: bool,
    /// On the worker of that lease.
    pub(super) near: Option<LeaseId>,
    /// How long it waits, which it does for one lease, or for those that are granted together.
    pub(super) wait: Minutes,
}

impl Call {
    pub(super) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.asks.iter().map(|(id, _)| *id)
    }

    /// Of those that are granted together the highest counts.
    pub(super) fn priority(&self) -> i64 {
        self.leases().map(fixtures::priority_of_lease).max().unwrap_or_default()
    }

    /// Whether both ask for the same.
    pub(super) fn asks_like(&self, other: &Self) -> bool {
        self.asks == other.asks && self.near == other.near
    }
}

/// What was answered: `Ok`, or the name of the error; `Waits`: nothing yet.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// One for each that was asked for.
    pub(super) said: Vec<String>,
    pub(super) session: Option<SessionClaims>,
    /// What calls that had waited were answered.
    pub(super) others: Vec<(usize, Vec<String>)>,
    /// Calls that wait on.
    pub(super) waiting: BTreeSet<usize>,
    /// Of one lease that was asked for, when it could be told: where alone it may have been granted.
    pub(super) best: Option<BTreeSet<WorkerId>>,
    /// What was told on the streams that are open there, by their numbers.
    pub(super) heard: BTreeMap<usize, Heartbeat>,
}

impl Answer {
    pub(super) fn of<T, E: std::fmt::Debug>(results: impl IntoIterator<Item = Result<T, E>>) -> Self {
        let name = |error: E| {
            let text = format!("{error:?}");
            text.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default().to_owned()
        };
        let said = results.into_iter().map(|result| result.map_or_else(name, |_| "Ok".to_owned())).collect();
        Self::said(said)
    }

    pub(super) fn ok() -> Self {
        Self::said(vec!["Ok".to_owned()])
    }

    pub(super) fn said(said: Vec<String>) -> Self {
        Self {
            said,
            session: None,
            others: vec![],
            waiting: BTreeSet::new(),
            best: None,
            heard: BTreeMap::new(),
        }
    }
}
