//! The runtime gateway as a process of its own: it attends this machine, or Concourse workers, or is a door.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use runtime_gateway::garden::{GardenArgs, GardenWorker};
use runtime_gateway::host::HostConfig;
use runtime_gateway::{Config, Gateway};
use server::{Host, Started};

/// Attends this machine as a worker, or Concourse workers, or lets callers in as a door.
///
/// Several may be given the same state directory on one machine: one attends it, the others stand by, and one of them takes over when that
/// one dies or freezes. One that was taken over from ends, with an error.
#[derive(Debug, Parser)]
#[command(name = "runtime-gateway", version)]
struct Args {
    #[command(flatten)]
    listen: server::ListenArgs,
    /// Attend no worker: pass calls of containers and volumes on to the gateway that attends the worker. Needs --scheduler only.
    #[arg(long, env = "GANTRY_GATEWAY_DOOR", value_parser = clap::builder::BoolishValueParser::new())]
    door: bool,
    /// Where callers reach this gateway, if not at the address that it listens on.
    #[arg(long, env = "GANTRY_ENDPOINT", value_name = "ADDRESS")]
    endpoint: Option<String>,
    /// Where the scheduler listens: `unix:///path` or `http://host:port`.
    #[arg(long, env = "GANTRY_SCHEDULER")]
    scheduler: String,
    /// Where the artifact store listens: `unix:///path` or `http://host:port`.
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", required_unless_present = "door")]
    artifact_store: Option<String>,
    /// Where the streamer listens: `unix:///path` or `http://host:port`.
    #[arg(long, env = "GANTRY_STREAMER", required_unless_present = "door")]
    streamer: Option<String>,
    #[command(flatten)]
    concourse: GardenArgs,
    /// The worker's name, unique in the cluster.
    #[arg(long, env = "GANTRY_WORKER_NAME", required_unless_present_any = ["door", "workers_file"])]
    name: Option<String>,
    /// The platform of a Concourse worker. This machine's is `linux`.
    #[arg(long, env = "GANTRY_WORKER_PLATFORM", default_value = "linux")]
    platform: String,
    /// A tag of the worker. With some, it takes only workloads with tags.
    #[arg(long = "tag", env = "GANTRY_WORKER_TAGS", value_delimiter = ',')]
    tags: Vec<String>,
    /// The only team that may use the worker.
    #[arg(long, env = "GANTRY_WORKER_TEAM")]
    team: Option<String>,
    /// Workloads at a time. Default: no limit.
    #[arg(long, env = "GANTRY_WORKER_MAX_TASKS")]
    max_tasks: Option<u32>,
    /// Where volumes and containers are kept.
    #[arg(long, env = "GANTRY_STATE_DIR", default_value = "/var/lib/gantry")]
    state_dir: PathBuf,
    /// Where sockets of supervisors are.
    #[arg(long, env = "GANTRY_RUNTIME_DIR", default_value = "/run/gantry")]
    runtime_dir: PathBuf,
    /// Report what the worker holds and destroy nothing of it, so that what should go can be looked at. The disk only fills up.
    #[arg(long, env = "GANTRY_HOLD_DESTRUCTION", value_parser = clap::builder::BoolishValueParser::new())]
    hold_destruction: bool,
}

fn main() -> ExitCode {
    // Before any thread exists: a container is made by a process that has only one.
    if let Some(code) = runtime_gateway::host::supervise_if_asked(std::env::args_os()) {
        return code;
    }
    match attend(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("runtime-gateway: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn attend(args: Args) -> anyhow::Result<()> {
    let Started { listener, token, telemetry: _telemetry } = args.listen.start("runtime-gateway").await?;
    if args.door {
        return runtime_gateway::serve_door(&args.scheduler, token, listener, server::shutdown_signal())
            .await;
    }
    let name = args.name.unwrap_or_default();
    let common = Config {
        worker_name: name.clone(),
        platform: args.platform.clone(),
        tags: args.tags.clone(),
        team: args.team.clone(),
        max_tasks: args.max_tasks,
        endpoint: args.endpoint.map_or_else(|| listener.endpoint(), Ok)?,
        scheduler: args.scheduler.clone(),
        artifact_store: args.artifact_store.unwrap_or_default(),
        streamer: args.streamer.unwrap_or_default(),
        token: token.clone(),
        manifest_dir: args.state_dir.join("manifests"),
        report_interval: Duration::from_secs(60),
        destroy_concurrency: 8,
        hold_destruction: args.hold_destruction,
    };
    let mut host = Host::new().with_token(token.clone());
    let gateway = Gateway::new(&args.scheduler, token.as_deref(), &mut host)?;
    if !args.concourse.any() {
        let machine = HostConfig::new(args.state_dir.clone(), args.runtime_dir)?;
        let config = Config { platform: "linux".to_owned(), ..common };
        return tokio::select! {
            served = host.serve([listener], server::shutdown_signal()) => served,
            // Not drained: what another gateway has taken over is left alone at once.
            over = runtime_gateway::attend_this_machine(&gateway, config, machine) => over.map(|_| ()),
        };
    }
    let given = GardenWorker {
        name,
        platform: args.platform,
        tags: args.tags,
        team: args.team.unwrap_or_default(),
        max_tasks: args.max_tasks,
        ..GardenWorker::default()
    };
    for worker in args.concourse.workers(given)? {
        let (config, garden) = worker.config(&common, &args.state_dir);
        host.spawn(runtime_gateway::garden::attend(gateway.clone(), config, garden));
    }
    host.serve([listener], server::shutdown_signal()).await
}
