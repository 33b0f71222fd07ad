//! Settings of the streamer.

/// Settings of the streamer.
#[derive(Debug, Clone, clap::Args)]
pub struct Config {
    /// Where the scheduler listens: `unix:///path` or `http://host:port`.
    #[arg(long, env = "GANTRY_SCHEDULER")]
    pub scheduler: String,
    /// Where the artifact store listens: `unix:///path` or `http://host:port`.
    #[arg(long, env = "GANTRY_ARTIFACT_STORE")]
    pub artifact_store: String,
    /// The token of the cluster, which its services ask of each other over TCP. `None`: none.
    #[arg(skip)]
    pub token: Option<String>,
}
