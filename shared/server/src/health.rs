//! The subcommand `health` of services, which checks whether a service is ready.
//!
//! Container images without a shell use it for their health checks.

use std::error::Error;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::settings::term;

/// Check whether a service is ready. Exits with 0 if so, otherwise prints the reason and exits with
/// 1
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct HealthArgs {
    /// Address of the service: http://host:port or unix:///path. Default: the address in
    /// GANTRY_LISTEN, on this machine
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) server: Option<String>,
    /// File with the token to present. Default: the default token file of services, if it exists
    #[arg(long, env = "GANTRY_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<std::path::PathBuf>,
    /// Subject of the check: a gRPC service, "" for the whole process, or "liveness"
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) service: String,
    /// Maximum time to wait for the response
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = term)]
    pub(crate) timeout: Duration,
}

/// Checks the health of `service` at `endpoint`. Returns a message for operators in both cases.
pub(crate) async fn check(
    endpoint: &str,
    token: Option<&str>,
    service: &str,
    timeout: Duration,
) -> Result<String, String> {
    let outgoing = Outgoing::internal().with_token(token);
    let peer = peer(endpoint, outgoing).map_err(|error| error.to_string())?;
    let request = HealthCheckRequest { service: service.to_owned() };
    let mut health = HealthClient::new(peer.clone());
    let about = if service.is_empty() { endpoint.to_owned() } else { format!("{service} at {endpoint}") };
    match tokio::time::timeout(timeout, health.check(request)).await {
        Err(_) => Err(format!("{about}: no response within {timeout:?}")),
        Ok(Err(status)) => {
            let cause = status.source().map(|cause| format!(": {}", domain::error_chain(cause)));
            Err(format!("{about}: {}{}", status.message(), cause.unwrap_or_default()))
        }
        Ok(Ok(answer)) => match answer.into_inner().status() {
            ServingStatus::Serving => Ok(format!("{about}: serving")),
            _ => {
                let why = tokio::time::timeout(timeout, not_ready_reasons(peer)).await.unwrap_or_default();
                Err(format!(
                    "{about}: not serving: {}",
                    why.unwrap_or_else(|| "the reason is unknown".to_owned())
                ))
            }
        },
    }
}

async fn not_ready_reasons(peer: rpc::Peer) -> Option<String> {
    use rpc::pb::capabilities::GetCapabilitiesRequest;
    use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
    let answer = CapabilitiesClient::new(peer).get_capabilities(GetCapabilitiesRequest {}).await;
    let why = answer.ok()?.into_inner().not_ready;
    (!why.is_empty()).then(|| why.join("; "))
}
