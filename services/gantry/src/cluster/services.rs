//! Start of the four services of a local cluster, all on one socket.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use artifact_store::KeySource;
use runtime::RuntimeError;
use runtime_gateway::garden::GardenWorker;
use runtime_gateway::host::{HostConfig, HostRuntime, Permission};
use server::Host;

use super::Paths;
use crate::cli::args::UpArgs;

/// Longest time between two heartbeats of a gateway. All services end together, so a silent gateway
/// is rare.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Name of the worker on this machine. It differs from the name of the machine, which may change.
const WORKER: &str = "local";

/// Starts the services on `host`, and returns the runtime of their worker. The services reach each
/// other over the socket, which is bound but not served yet. `callers` is the address of the
/// gateway for callers.
pub(super) async fn start(
    args: &UpArgs,
    paths: &Paths,
    callers: &str,
    host: &mut Host,
) -> anyhow::Result<Arc<HostRuntime>> {
    let mut machine = HostConfig::new(paths.worker(), paths.runtime.join("worker"))?;
    // The user of this machine starts the cluster, so the host image is allowed.
    machine.policy = args.policy.clone().or([Permission::HostImage]);
    machine.masked = vec![paths.state.clone(), paths.runtime.clone()];
    // The default token file belongs to other services on this machine.
    machine.masked.extend(server::token::default_file());
    // This takes about as long as opening the databases.
    let opening = tokio::task::spawn_blocking(move || HostRuntime::open(machine));

    let endpoint = paths.endpoint();
    let scheduler = scheduler::Config {
        streamer: Some(endpoint.clone()),
        heartbeat: HEARTBEAT,
        ..scheduler::Config::new(paths.database("scheduler"), endpoint.clone())
    };
    scheduler::start(scheduler, host).await.map_err(|error| of_other_build(error, paths))?;
    let keys = KeySource::Scheduler(endpoint.clone());
    let store = artifact_store::Config {
        gc_grace: args.gc_grace,
        ..artifact_store::Config::new(paths.database("artifact-store"), keys)
    };
    if args.restored {
        let begun = artifact_store::restored(&store.database).await;
        let life = begun.map_err(|error| of_other_build(error, paths))?;
        tracing::info!(store.life = %life, "artifact store starts a new store life");
    }
    artifact_store::start(store, host).await.map_err(|error| of_other_build(error, paths))?;
    let mut images = args.images.clone();
    images.image_cache.get_or_insert_with(|| paths.images());
    let streamer = streamer::Config {
        scheduler: endpoint.clone(),
        artifact_store: endpoint.clone(),
        token: None,
        images,
    };
    streamer::start(&streamer, host)?;

    let runtime = opening.await.context("cannot open the worker on this machine")?;
    let runtime = match runtime {
        // The message already says that the machine is unsuitable.
        Err(RuntimeError::Unsupported(what)) => bail!("this machine cannot be a worker: {what}"),
        runtime => runtime.context("this machine cannot be a worker")?,
    };
    let looking_after = Arc::clone(&runtime);
    host.spawn_vital(async move {
        looking_after.look_after_containers().await;
        Ok(())
    });
    let manifests = paths.worker().join("manifests");
    let gateway = runtime_gateway::Config {
        hold_destruction: args.hold_destruction,
        scrub_bytes_per_second: args.scrub_rate,
        amounts: args.amounts.clone().checked()?,
        ..runtime_gateway::Config::for_worker(WORKER, callers, &endpoint, &endpoint, &endpoint, manifests)
    };
    let given = GardenWorker {
        name: args.garden_name.clone(),
        platform: args.garden_platform.clone().unwrap_or_default(),
        tags: args.garden_tags.clone(),
        team: args.garden_team.clone().unwrap_or_default(),
        ..GardenWorker::default()
    };
    let concourse = args.concourse.workers(given)?;
    let common = gateway.clone();
    let gateway = runtime_gateway::Config { amounts: gateway.amounts.within_open_files(), ..gateway };
    let attending = runtime_gateway::start([(gateway, runtime.clone() as _)], host).await?;
    for worker in concourse {
        let (config, garden) = worker.config(&common, &paths.state.join("workers"));
        host.spawn(runtime_gateway::attend_concourse_worker(attending.clone(), config, garden));
    }
    Ok(runtime)
}

/// Adds a remedy to an error about a database of another build. All files of the state directory
/// belong together.
fn of_other_build(error: anyhow::Error, paths: &Paths) -> anyhow::Error {
    let cause = error.chain().find_map(|cause| cause.downcast_ref());
    if !matches!(cause, Some(db::ConnectError::OtherSchema { .. })) {
        return error;
    }
    let state = paths.state.display();
    error.context(format!(
        "cannot use the state directory {state}: another build of gantry made it; move the directory away, and the next start makes a new one"
    ))
}
