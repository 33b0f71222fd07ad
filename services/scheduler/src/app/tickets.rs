//! Tickets: signed permissions for one transfer with a worker, or for forwarding calls to it.

use domain::worker::{ProxyClaims, TicketClaims, TicketOperation};
use domain::{Timestamp, VolumeHandle, WorkerId};
use rpc::Refusal;
use rpc::token::TokenSigner;
use sea_orm::DbErr;

use crate::context::Context;
use crate::db::entity::worker;
use crate::store_client::Store;
use crate::workers::{self, Reach};

/// Reason why a ticket cannot be issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TicketError {
    /// The worker is unknown.
    #[error("worker {0} is unknown")]
    NotFound(WorkerId),
    /// No gateway is in contact for the worker.
    #[error("worker {0} is out of contact")]
    Unreachable(WorkerId),
    /// The artifact store has not planned the transfer, or does not answer.
    #[error(transparent)]
    Store(#[from] Refusal),
    /// The database failed.
    #[error("cannot read the worker from the database")]
    Database(#[from] DbErr),
}

/// A signed permission for one transfer or for a proxy, and the address of its gateway.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) token: String,
    pub(crate) gateway_endpoint: String,
    /// Zone of the worker. Empty: no zone.
    pub(crate) zone: String,
}

/// Issues tickets. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Tickets {
    context: Context,
    store: Store,
    signer: TokenSigner,
}

impl Tickets {
    pub(crate) fn new(context: Context, store: Store, signer: TokenSigner) -> Self {
        Self { context, store, signer }
    }

    /// Signs a permission for one transfer with a worker, if the artifact store has planned that
    /// transfer for `team`.
    pub(crate) async fn issue_ticket(
        &self,
        team: String,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: TicketOperation,
        now: Timestamp,
    ) -> Result<Ticket, TicketError> {
        let reach = workers::reach(self.context.db.read(), worker).await?;
        let Reach { state, endpoint, zone } = reach.ok_or(TicketError::NotFound(worker))?;
        if state != worker::State::Running {
            return Err(TicketError::Unreachable(worker));
        }
        self.store.authorize_transfer(&team, worker, volume, operation).await?;
        let expires_at = now + self.context.config.ticket_validity;
        let gateway_endpoint = endpoint.clone();
        let claims = TicketClaims { worker, volume, team, operation, expires_at, endpoint };
        Ok(Ticket { token: self.signer.sign(&claims), gateway_endpoint, zone })
    }

    /// Signs a permission to forward calls to a worker.
    pub(crate) async fn issue_proxy_ticket(
        &self,
        worker: WorkerId,
        now: Timestamp,
    ) -> Result<Ticket, TicketError> {
        // A worker that is out of contact with the scheduler may still be reachable for callers.
        let reach = workers::reach(self.context.db.read(), worker).await?;
        let Reach { endpoint: gateway_endpoint, zone, .. } = reach.ok_or(TicketError::NotFound(worker))?;
        let claims = ProxyClaims { worker, expires_at: now + self.context.config.ticket_validity };
        Ok(Ticket { token: self.signer.sign(&claims), gateway_endpoint, zone })
    }
}
