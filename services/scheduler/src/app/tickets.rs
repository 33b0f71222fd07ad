//! Tickets: signed permissions for one transfer with a worker, or to pass calls on to it.

use domain::worker::{ProxyClaims, TicketClaims, TicketOperation};
use domain::{Timestamp, VolumeHandle, WorkerId};
use rpc::Refusal;
use rpc::token::TokenSigner;
use sea_orm::DbErr;

use crate::context::Context;
use crate::db::entity::worker;
use crate::store_client::Store;
use crate::workers;

/// A ticket cannot be issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TicketError {
    /// There is no such worker.
    #[error("worker {0} is unknown")]
    NotFound(WorkerId),
    /// No gateway attends it now.
    #[error("worker {0} is out of contact")]
    Unreachable(WorkerId),
    /// The artifact store has planned no such transfer, or does not answer.
    #[error(transparent)]
    Store(#[from] Refusal),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// Permission for one transfer or for a proxy, and where to use it.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) token: String,
    pub(crate) gateway_endpoint: String,
}

/// Issues tickets. Cheap to clone; clones share it.
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

    /// Signs a permission for one transfer with a worker, if the artifact store has planned that transfer for `team`.
    pub(crate) async fn issue_ticket(
        &self,
        team: String,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: TicketOperation,
        now: Timestamp,
    ) -> Result<Ticket, TicketError> {
        let (state, gateway_endpoint) =
            workers::reach(self.context.db.read(), worker).await?.ok_or(TicketError::NotFound(worker))?;
        if state != worker::State::Running {
            return Err(TicketError::Unreachable(worker));
        }
        self.store.authorize_transfer(&team, worker, volume, operation).await?;
        let expires_at = now + self.context.config.ticket_validity;
        let endpoint = gateway_endpoint.clone();
        let claims = TicketClaims { worker, volume, team, operation, expires_at, endpoint };
        Ok(Ticket { token: self.signer.sign(&claims), gateway_endpoint })
    }

    /// Signs a permission to pass calls on to a worker.
    pub(crate) async fn issue_proxy_ticket(
        &self,
        worker: WorkerId,
        now: Timestamp,
    ) -> Result<Ticket, TicketError> {
        // Also of one that is out of contact: what it holds may be there for callers all the same.
        let (_, gateway_endpoint) =
            workers::reach(self.context.db.read(), worker).await?.ok_or(TicketError::NotFound(worker))?;
        let claims = ProxyClaims { worker, expires_at: now + self.context.config.ticket_validity };
        Ok(Ticket { token: self.signer.sign(&claims), gateway_endpoint })
    }
}
