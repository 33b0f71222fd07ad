//! What callers were told, which stays true: a workload that was accepted is there, and a lease that was granted lives until something ended it
//! that may.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use domain::worker::LeaseClaims;
use domain::{LeaseId, Timestamp, WorkloadId};

use super::SKEW;
use crate::db::entity::{lease, worker};

/// What callers have heard.
#[derive(Debug, Default)]
pub(super) struct Promises {
    accepted: HashSet<WorkloadId>,
    granted: HashMap<LeaseId, GrantedLease>,
    /// Whoever had them asked for their end, and heard of that or not.
    given_back: HashSet<LeaseId>,
    /// Whether all workers were silent until they were lost, since everything was at rest last.
    silence: bool,
    /// Of how many leases that ended it was looked for what ended them.
    pub(super) ended: usize,
}

#[derive(Debug)]
struct GrantedLease {
    claims: LeaseClaims,
    /// Whether its worker was lost once: then its end may only have to be noticed.
    was_lost: bool,
    /// Until when it lives at least, as who renewed it was told.
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

    /// Somebody is about to give it back.
    pub(super) fn gives_back(&mut self, lease: LeaseId) {
        self.given_back.insert(lease);
    }

    /// All workers are about to be lost.
    pub(super) fn silence(&mut self) {
        self.silence = true;
    }

    /// Everything is at rest.
    pub(super) fn check(
        &mut self,
        leases: &[lease::Model],
        workers: &[worker::Model],
        workloads: &HashSet<WorkloadId>,
        term: Duration,
        now: Timestamp,
    ) {
        let lost: Vec<_> = self.accepted.difference(workloads).collect();
        assert!(lost.is_empty(), "{lost:?} were accepted, and are unknown");
        let leases: HashMap<_, _> = leases.iter().map(|row| (row.id, row)).collect();
        let workers: HashMap<_, _> = workers.iter().map(|row| (row.id, row)).collect();
        let mut over = Vec::new();
        for (lease, GrantedLease { claims, was_lost, until }) in &mut self.granted {
            let Some(worker) = workers.get(&claims.worker.uuid()) else {
                over.push(*lease);
                continue;
            };
            let row =
                leases.get(&lease.uuid()).unwrap_or_else(|| panic!("{lease} was granted, and is unknown"));
            assert_eq!(crate::leases::claims(row), *claims, "it is another than was granted");
            let until = (Timestamp(row.granted_at) + term).max(*until);
            let said = row.expires_at.map(Timestamp);
            assert!(said >= Some(until), "{lease} shall live until {until:?}: {row:?}");
            let may_be_lost = worker.incarnation > row.incarnation
                || self.silence
                || *was_lost
                || until.0 <= now.0.saturating_add(SKEW);
            *was_lost |= worker.state == worker::State::Lost;
            match row.ended_by {
                None => assert_ne!(row.state, lease::State::Ended),
                Some(lease::EndedBy::Reported) => {
                    assert!(self.given_back.contains(lease), "nobody gave {lease} back: {row:?}");
                }
                Some(lease::EndedBy::Lost) => assert!(may_be_lost, "nothing ended {lease}: {row:?}"),
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
