//! The gateway of each worker, as the scheduler reports it, with the proxy ticket for that gateway.
//!
//! Each call looks its gateway up here. Entries are cached for some seconds.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use domain::WorkerId;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::{Peer, Reason, Refusal};

use crate::util::keyed_locks::lock;

/// Time for which an answer of the scheduler is used.
const CACHE_TIME: Duration = Duration::from_secs(10);
/// Timeout of a query to the scheduler.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// The gateway of a worker, and the proxy ticket for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) endpoint: String,
    pub(super) ticket: String,
}

struct CachedDestination {
    destination: Destination,
    queried: Instant,
    /// Time until which the ticket is certainly valid.
    valid_until: Instant,
}

pub(super) struct Directory {
    scheduler: WorkersClient<Peer>,
    cached: Mutex<HashMap<WorkerId, CachedDestination>>,
}

impl Directory {
    pub(super) fn new(scheduler: WorkersClient<Peer>) -> Self {
        Self { scheduler, cached: Mutex::default() }
    }

    /// Returns the gateway of `worker`. With `refresh`, the scheduler is asked even if an entry is
    /// cached.
    pub(super) async fn find(&self, worker: WorkerId, refresh: bool) -> Result<Destination, Refusal> {
        let now = Instant::now();
        if !refresh && let Some(cached) = self.cached(worker, |cached| now < cached.queried + CACHE_TIME) {
            return Ok(cached);
        }
        match self.query(worker, now).await {
            // The scheduler does not answer. The last known gateway may still attend the worker.
            Err(refusal) if refusal.is_transient() => {
                self.cached(worker, |cached| now < cached.valid_until).ok_or(refusal)
            }
            answer => answer,
        }
    }

    fn cached(
        &self,
        worker: WorkerId,
        usable: impl FnOnce(&CachedDestination) -> bool,
    ) -> Option<Destination> {
        let cached = lock(&self.cached);
        cached.get(&worker).filter(|cached| usable(cached)).map(|cached| cached.destination.clone())
    }

    async fn query(&self, worker: WorkerId, now: Instant) -> Result<Destination, Refusal> {
        let mut scheduler = self.scheduler.clone();
        let request = pb::IssueProxyTicketRequest { worker_id: worker.to_string() };
        let queried = tokio::time::timeout(LOOKUP_TIMEOUT, scheduler.issue_proxy_ticket(request)).await;
        let slow = || {
            Refusal::from(
                Reason::Unavailable
                    .status(crate::SERVICE, "cannot look up the gateway: the scheduler does not answer"),
            )
        };
        let answer = queried.map_err(|_| slow())??.into_inner();
        let destination = Destination { endpoint: answer.gateway_endpoint, ticket: answer.ticket };
        let valid_for = answer.valid_for.and_then(|term| Duration::try_from(term).ok()).unwrap_or(CACHE_TIME);
        // Halved, because clocks differ and a call takes time to arrive.
        let valid_until = now + valid_for / 2;
        let cached = CachedDestination { destination: destination.clone(), queried: now, valid_until };
        let mut all = lock(&self.cached);
        all.retain(|_, cached| now < cached.valid_until);
        all.insert(worker, cached);
        Ok(destination)
    }
}
