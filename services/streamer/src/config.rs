//! Settings of the streamer.

/// Settings of the streamer.
#[derive(Debug, Clone, clap::Args)]
pub struct Config {
    /// Addresses of the scheduler's replicas, separated by commas: http://host:port or unix:///path
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    pub scheduler: String,
    /// Addresses of the artifact store's replicas, separated by commas: http://host:port or
    /// unix:///path
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    pub artifact_store: String,
    /// Cluster token for calls over TCP. `None`: calls carry no token.
    #[arg(skip)]
    pub token: Option<String>,
}
