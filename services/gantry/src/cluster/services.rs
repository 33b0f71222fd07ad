//! The four services of a local cluster, each with a database or directory of its own, all on one socket.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use artifact_store::KeySource;
use runtime::RuntimeError;
use runtime_gateway::garden::GardenWorker;
use runtime_gateway::host::{HostConfig, HostRuntime};
use server::Host;

use super::Paths;
use crate::args::UpArgs;

/// The worker on this machine. Not the machine's name, which may change while what the worker holds stays the same.
const WORKER: &str = "local";
/// How often everything that the worker holds is reported.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// How many containers or volumes are destroyed at a time.
const DESTROY_CONCURRENCY: usize = 8;

/// Starts the services on `host`, and answers this machine as their worker. They reach each other over the socket, which is bound and
/// not yet served.
pub(super) async fn start(args: &UpArgs, paths: &Paths, host: &mut Host) -> anyhow::Result<Arc<HostRuntime>> {
    let mut machine = HostConfig::new(paths.worker(), paths.runtime.join("worker"))?;
    machine.masked = vec![paths.state.clone(), paths.runtime.clone()];
    // Takes about as long as the databases do.
    let opening = tokio::task::spawn_blocking(move || HostRuntime::open(machine));

    let endpoint = paths.endpoint();
    let scheduler = scheduler::Config::new(paths.database("scheduler"), endpoint.clone());
    scheduler::start(scheduler, host).await?;
    let keys = KeySource::Scheduler(endpoint.clone());
    let store = artifact_store::Config {
        gc_grace: args.gc_grace,
        ..artifact_store::Config::new(paths.database("artifact-store"), keys)
    };
    artifact_store::start(store, host).await?;
    let streamer =
        streamer::Config { scheduler: endpoint.clone(), artifact_store: endpoint.clone(), token: None };
    streamer::start(&streamer, host)?;

    let runtime = opening.await.context("the worker on this machine cannot be opened")?;
    let runtime = match runtime {
        // That it cannot do it is what we say.
        Err(RuntimeError::Unsupported(what)) => bail!("this machine cannot be a worker: {what}"),
        runtime => runtime.context("this machine cannot be a worker")?,
    };
    let gateway = runtime_gateway::Config {
        worker_name: WORKER.to_owned(),
        platform: "linux".to_owned(),
        tags: Vec::new(),
        team: None,
        max_tasks: None,
        endpoint: endpoint.clone(),
        scheduler: endpoint.clone(),
        artifact_store: endpoint.clone(),
        streamer: endpoint,
        token: None,
        manifest_dir: paths.worker().join("manifests"),
        report_interval: REPORT_INTERVAL,
        destroy_concurrency: DESTROY_CONCURRENCY,
        hold_destruction: args.hold_destruction,
    };
    let given = GardenWorker { name: "garden".to_owned(), ..GardenWorker::default() };
    let concourse = args.concourse.workers(given)?;
    let common = gateway.clone();
    let attending = runtime_gateway::start([(gateway, runtime.clone() as _)], host).await?;
    for worker in concourse {
        let (config, garden) = worker.config(&common, &paths.state.join("workers"));
        host.spawn(runtime_gateway::garden::attend(attending.clone(), config, garden));
    }
    Ok(runtime)
}
