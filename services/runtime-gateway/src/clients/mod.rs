//! Clients of the other services, with the conversions from and to protobuf types.
//!
//! The modules above this one call other services only through these clients. Of them, only `api`
//! and `proxy` handle protobuf messages.

pub(crate) mod gateway;
pub(crate) mod scheduler;
pub(crate) mod scheduler_messages;
pub(crate) mod store;
pub(crate) mod streamer;

use std::collections::HashMap;

use rpc::Refusal;
use rpc::client::Outgoing;
use tonic::Code;

use crate::Config;
use scheduler::SchedulerClient;
use store::StoreClient;
use streamer::StreamerClient;

/// The clients that the gateway of one worker uses.
pub(crate) struct Clients {
    pub(crate) scheduler: SchedulerClient,
    pub(crate) store: StoreClient,
    pub(crate) streamer: StreamerClient,
}

impl Clients {
    /// Creates the clients for the addresses in `config`.
    ///
    /// # Errors
    ///
    /// An address in `config` is malformed.
    pub(crate) fn new(config: &Config) -> anyhow::Result<Self> {
        let peer =
            |address| rpc::client::peer(address, Outgoing::internal().with_token(config.token.as_deref()));
        Ok(Self {
            scheduler: SchedulerClient::new(peer(&config.scheduler)?),
            store: StoreClient::new(peer(&config.artifact_store)?),
            streamer: StreamerClient::new(peer(&config.streamer)?),
        })
    }
}

/// The error of an answer that cannot be parsed. It is permanent.
fn malformed(service: &str, part: &str) -> Refusal {
    Refusal {
        code: Code::DataLoss,
        reason: None,
        message: format!("cannot parse the answer of the {service}: malformed {part}"),
        about: HashMap::new(),
    }
}
