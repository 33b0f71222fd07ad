//! Settings of the streamer.

/// Settings of the streamer.
#[derive(Debug, Clone, clap::Args)]
pub struct Config {
    /// Where the scheduler listens: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    pub scheduler: String,
    /// Where the artifact store listens: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    pub artifact_store: String,
    /// The token of the cluster, which its services ask of each other over TCP. `None`: none.
    #[arg(skip)]
    pub token: Option<String>,
}
