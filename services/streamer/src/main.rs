//! The streamer as a process of its own.

use clap::Parser;
use server::Started;
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
    let Started { listener, token, telemetry: _telemetry } = args.listen.start("streamer").await?;
    streamer::serve(Config { token, ..args.config }, listener, server::shutdown_signal()).await
}
