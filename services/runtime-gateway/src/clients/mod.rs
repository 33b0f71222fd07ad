//! Calls to other services, with the conversions between the types of this crate and protobuf.
//!
//! All chapters above call through these clients, and see no protobuf type. Only `api` and `proxy`, which serve
//! calls, decode and encode messages themselves.

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

/// The services that a worker's gateway calls.
pub(crate) struct Clients {
    pub(crate) scheduler: SchedulerClient,
    pub(crate) store: StoreClient,
    pub(crate) streamer: StreamerClient,
}

impl Clients {
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

/// A service gave an answer that cannot be understood. Repeating the call does not help.
fn malformed(service: &str, what: &str) -> Refusal {
    Refusal {
        code: Code::DataLoss,
        reason: None,
        message: format!("the {service} answered a malformed {what}"),
        about: HashMap::new(),
    }
}
