//! Promises to callers: an accepted workload exists, and a granted lease lives until it is ended
//! for a valid reason.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use domain::worker::LeaseClaims;
use domain::{LeaseId, Timestamp, WorkloadId};

use super::SKEW;
use crate::db::entity::{lease, worker};

/// The answers that callers received.
#[derive(Debug, Default)]
pub(super) struct Promises {
    accepted: HashSet<WorkloadId>,
    granted: HashMap<LeaseId, GrantedLease>,
    /// Leases whose release was requested, whether or not the call was answered.
    released: HashSet<LeaseId>,
    /// Whether all workers were silent until they were lost, since the last check.
    silence: bool,
    /// Number of ended leases whose end was checked.
    pub(super) ended: usize,
}

#[derive(Debug)]
struct GrantedLease {
    claims: LeaseClaims,
    /// Whether the worker was lost, so that the end may be recorded later.
    was_lost: bool,
    /// Earliest expiry, as the last renewal returned it.
    until: Timestamp,
}

impl Promises {
    pub(super) fn accepted(&mut self, workload: WorkloadId) {
        self.accepted.insert(workload);
    }

    pub(super) fn granted(&mut self, claims: LeaseClaims) {
        self.granted.entry(claims.lease).or_insert(GrantedLease {
            claims,
            was_lost: false,
            until: Timestamp(0),
        });
    }

    pub(super) fn renewed(&mut self, lease: LeaseId, until: Timestamp) {
        if let Some(granted) = self.granted.get_mut(&lease) {
            granted.until = granted.until.max(until);
        }
    }

    /// Records that a release is about to be requested.
    pub(super) fn expect_release(&mut self, lease: LeaseId) {
        self.released.insert(lease);
    }

    /// Records that all workers are about to be lost.
    pub(super) fn silence(&mut self) {
        self.silence = true;
    }

    /// Checks all promises while no operation is in progress.
    pub(super) fn check(
        &mut self,
        leases: &[lease::Model],
        workers: &[worker::Model],
        workloads: &HashSet<WorkloadId>,
        term: Duration,
        now: Timestamp,
    ) {
        let lost: Vec<_> = self.accepted.difference(workloads).collect();
        assert!(lost.is_empty(), "accepted workloads are unknown: {lost:?}");
        let leases: HashMap<_, _> = leases.iter().map(|row| (row.id, row)).collect();
        let workers: HashMap<_, _> = workers.iter().map(|row| (row.id, row)).collect();
        let mut over = Vec::new();
        for (lease, GrantedLease { claims, was_lost, until }) in &mut self.granted {
            let Some(worker) = workers.get(&claims.worker.uuid()) else {
                over.push(*lease);
                continue;
            };
            let row = leases.get(&lease.uuid()).unwrap_or_else(|| panic!("granted lease {lease} is unknown"));
            assert_eq!(crate::leases::claims(row), *claims, "the lease differs from the granted one");
            let until = (Timestamp(row.granted_at) + term).max(*until);
            let expiry = row.expires_at.map(Timestamp);
            assert!(expiry >= Some(until), "{lease} must live until {until:?}: {row:?}");
            let may_be_lost = worker.incarnation > row.incarnation
                || self.silence
                || *was_lost
                || until.0 <= now.0.saturating_add(SKEW);
            *was_lost |= worker.state == worker::State::Lost;
            match row.ended_by {
                None => assert_ne!(row.state, lease::State::Ended),
                Some(lease::EndedBy::Reported) => {
                    assert!(self.released.contains(lease), "{lease} ended without a release: {row:?}");
                }
                Some(lease::EndedBy::Lost) => {
                    assert!(may_be_lost, "{lease} was lost without a reason: {row:?}")
                }
            }
            if row.state == lease::State::Ended {
                over.push(*lease);
                self.ended += 1;
            }
        }
        over.iter().for_each(|lease| _ = self.granted.remove(lease));
        self.silence = false;
    }
}
