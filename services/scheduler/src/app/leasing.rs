//! Driven leases: a client places, renews and releases them.

use std::collections::HashMap;
use std::sync::Arc;

use domain::worker::LeaseClaims;
use domain::workload::OutputOwner;
use domain::{ArtifactId, Timestamp};
use futures::StreamExt;
use rpc::Reason;
use sea_orm::{ConnAcquireErr, DbErr};

use crate::context::Context;
use crate::leases::{self, RenewError, UseError};
use crate::notify::changes::Effects;
use crate::scheduling::{Dispatch, LeaseRequest, PlaceError, PlaceResult, Request};
use crate::store_client::{Inputs, LeaseSettlement, Store};

/// Maximum number of leases of one call that are pinned for at a time.
const PINS: usize = 16;

/// Reason why a driven lease cannot be settled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SettleLeaseError {
    /// The lease was settled with other artifacts, or without any when it ended.
    #[error("cannot settle the lease: it has ended without this settlement")]
    Lost,
    /// The artifact store rejects the settlement, or does not answer.
    #[error("cannot settle the lease in the artifact store")]
    Store(#[from] rpc::Refusal),
    /// The database failed.
    #[error("cannot release the lease in the database")]
    Database(#[from] DbErr),
}

/// Grants, renews and releases driven leases. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Leasing {
    context: Context,
    store: Store,
    dispatch: Dispatch,
}

impl Leasing {
    pub(crate) fn new(context: Context, store: Store, dispatch: Dispatch) -> Self {
        Self { context, store, dispatch }
    }

    /// Grants driven leases and pins their inputs. A repeat with the same id returns the live
    /// lease.
    pub(crate) async fn place(&self, requests: Vec<LeaseRequest>) -> Vec<PlaceResult> {
        let uses: Vec<_> = requests.iter().map(|request| (request.group, request.inputs.clone())).collect();
        let placed = self.dispatch.call(|answer| Request::Place(requests, answer)).await;
        let mut placed = placed.unwrap_or_else(|_| vec![Err(PlaceError::Stopping); uses.len()]);
        if uses.iter().any(|(_, inputs)| !inputs.is_empty()) {
            self.pin_for(&uses, &mut placed).await;
        }
        placed
    }

    /// Pins the inputs of granted leases. If the store rejects a pin permanently, the lease and its
    /// group are released. If the result is unknown, the lease stays until its term ends, so that a
    /// repeat finds it.
    async fn pin_for(&self, uses: &[(Option<u32>, Arc<Inputs>)], placed: &mut [PlaceResult]) {
        let mut pins = Vec::new();
        for (number, (placed, (_, inputs))) in placed.iter().zip(uses).enumerate() {
            if let Ok(granted) = placed
                && !inputs.is_empty()
            {
                let (store, claims, inputs) = (self.store.clone(), granted.claims.clone(), inputs.clone());
                pins.push(async move {
                    (number, store.pin_for_lease(claims.lease, &claims.team, &inputs).await.err())
                });
            }
        }
        let mut failed = vec![None; placed.len()];
        let mut pinned = futures::stream::iter(pins).buffer_unordered(PINS);
        while let Some((number, refusal)) = pinned.next().await {
            failed[number] = refusal.map(|refusal| match refusal.is(Reason::HolderSettled) {
                // The lease has ended meanwhile.
                true => PlaceError::Exists,
                false => PlaceError::NotPinned(refusal),
            });
        }
        // A failure of one lease fails its whole group. A permanent failure takes precedence.
        let is_permanent =
            |error: &PlaceError| !matches!(error, PlaceError::NotPinned(refusal) if refusal.is_transient());
        let mut of_groups = HashMap::<u32, PlaceError>::new();
        for (error, (group, _)) in failed.iter().zip(uses) {
            let (Some(error), Some(group)) = (error, group) else { continue };
            if is_permanent(error) || !of_groups.contains_key(group) {
                of_groups.insert(*group, error.clone());
            }
        }
        let mut released = Vec::new();
        for ((placed, error), (group, _)) in placed.iter_mut().zip(failed).zip(uses) {
            let error = group.and_then(|group| of_groups.get(&group).cloned()).or(error);
            let (Ok(granted), Some(error)) = (&*placed, error) else { continue };
            if is_permanent(&error) {
                released.push(granted.claims.clone());
            }
            *placed = Err(error);
        }
        if let Err(error) = self.release(&released).await {
            tracing::debug!(error = %error, "cannot release leases after a failed pin; they expire with their terms");
        }
    }

    /// Extends a driven lease by another term.
    pub(crate) async fn renew(&self, claims: &LeaseClaims) -> Result<(), RenewError> {
        let term = self.context.config.lease_term;
        self.context
            .db
            .write(async |txn| leases::renew(&txn, claims.lease, Timestamp::now(), term).await)
            .await
    }

    /// Marks a driven lease as in use. Returns the generation of the desired state that names it.
    pub(crate) async fn use_lease(&self, claims: &LeaseClaims) -> Result<i64, UseError> {
        self.context
            .change(async |txn| {
                let mut effects = Effects::default();
                let generation = leases::use_lease(&txn, claims.lease, &mut effects).await?;
                Ok::<_, UseError>((generation, effects))
            })
            .await
    }

    /// Settles a driven lease in the artifact store, and then releases it. Returns the owners that
    /// artifacts did not get.
    ///
    /// A lease that is ending or has ended may be settled, too. The first settlement counts.
    pub(crate) async fn settle_and_release(
        &self,
        claims: &LeaseClaims,
        settlement: LeaseSettlement,
    ) -> Result<Vec<(ArtifactId, OutputOwner)>, SettleLeaseError> {
        let settled = self.store.settle_lease(claims, settlement).await?;
        if settled.differs {
            return Err(SettleLeaseError::Lost);
        }
        self.release(std::slice::from_ref(claims)).await?;
        Ok(settled.missing)
    }

    /// Releases driven leases. The lease of an attempt ends with the attempt and is ignored here.
    pub(crate) async fn release(&self, claims: &[LeaseClaims]) -> Result<(), DbErr> {
        let driven = claims.iter().filter(|claims| claims.attempt.is_none());
        let leases: Vec<_> = driven.map(|claims| (claims.lease, claims.worker)).collect();
        if leases.is_empty() {
            return Ok(());
        }
        let released = self.dispatch.call(|answer| Request::Release(leases, answer)).await;
        released.unwrap_or(Err(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed)))
    }
}
