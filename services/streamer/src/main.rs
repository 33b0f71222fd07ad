//! The streamer as a process of its own.

use clap::Parser;
use streamer::Config;

/// Volumes in and out.
#[derive(Debug, Parser)]
#[command(name = "streamer", version)]
struct Args {
    #[command(flatten)]
    listen: server::ListenArgs,
    #[command(flatten)]
    config: Config,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let _telemetry = server::telemetry::init("streamer", "info", None)?;
    let listener = args.listen.bind().await?;
    streamer::serve(args.config, listener, server::shutdown_signal()).await
}
