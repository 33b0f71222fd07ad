//! The application: one struct for each feature that the API calls.

mod leasing;
mod submissions;
mod tickets;

use rpc::token::TokenSigner;

pub(crate) use self::leasing::{Leasing, SettleLeaseError};
pub(crate) use self::submissions::Submissions;
pub(crate) use self::tickets::{TicketError, Tickets};
use crate::context::Context;
use crate::image_references::ImageReferences;
use crate::leases::drift::Drift;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::heartbeat_batches::Heartbeats;
use crate::lifecycle::registration::Registrations;
use crate::scheduling::Dispatch;
use crate::store_client::Store;

/// All features of the scheduler. Cheap to clone.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) context: Context,
    pub(crate) signer: TokenSigner,
    pub(crate) store: Store,
    pub(crate) dispatch: Dispatch,
    pub(crate) submissions: Submissions,
    pub(crate) leasing: Leasing,
    pub(crate) tickets: Tickets,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) heartbeats: Heartbeats,
    pub(crate) registrations: Registrations,
    pub(crate) drift: Drift,
}

impl App {
    pub(crate) fn new(
        lifecycle: Lifecycle,
        signer: TokenSigner,
        references: ImageReferences,
        dispatch: Dispatch,
        heartbeats: Heartbeats,
        registrations: Registrations,
    ) -> Self {
        let Lifecycle { context, store, .. } = lifecycle.clone();
        Self {
            submissions: Submissions::new(context.clone(), store.clone(), references, dispatch.clone()),
            leasing: Leasing::new(context.clone(), store.clone(), dispatch.clone()),
            tickets: Tickets::new(context.clone(), store.clone(), signer.clone()),
            drift: Drift::default(),
            context,
            signer,
            store,
            dispatch,
            lifecycle,
            heartbeats,
            registrations,
        }
    }
}
