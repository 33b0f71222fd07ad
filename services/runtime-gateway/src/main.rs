//! The runtime gateway as a process of its own: it attends this machine, or Concourse workers, or is a proxy.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use runtime_gateway::garden::{GardenArgs, GardenWorker};
use runtime_gateway::host::{HostConfig, Policy};
use runtime_gateway::{Amounts, Config};
use server::settings::term;
use server::{Host, ListenArgs, StartContext};

/// The runtime gateway of Gantry: attends this machine as a worker, or Concourse workers, or lets callers in as a proxy.
///
/// Several may be given the same state directory on one machine: one attends it, the others stand by, and one of them takes over when that
/// one dies or freezes. One that was taken over from ends, with an error. Gateways of one Concourse worker stand by for each other in the
/// same way, each with a state directory of its own.
#[derive(Debug, Parser)]
#[command(name = "runtime-gateway", version)]
struct Arguments {
    #[command(flatten)]
    listen: ListenArgs,
    /// Attend no worker: pass calls of containers and volumes on to the gateway that attends the worker. Needs --scheduler only
    #[arg(long, env = "GANTRY_GATEWAY_PROXY", value_parser = clap::builder::BoolishValueParser::new())]
    proxy: bool,
    /// Where callers reach this gateway, if not at the address that it listens on: http://host:port or unix:///path
    #[arg(long, env = "GANTRY_ENDPOINT", value_name = "ADDRESS", value_parser = rpc::client::addresses)]
    endpoint: Option<String>,
    /// Where the scheduler listens: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    scheduler: String,
    /// Where the artifact store listens: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(
        long,
        env = "GANTRY_ARTIFACT_STORE",
        value_name = "ADDRESSES",
        value_parser = rpc::client::addresses,
        required_unless_present = "proxy"
    )]
    artifact_store: Option<String>,
    /// Where the streamer listens: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(
        long,
        env = "GANTRY_STREAMER",
        value_name = "ADDRESSES",
        value_parser = rpc::client::addresses,
        required_unless_present = "proxy"
    )]
    streamer: Option<String>,
    #[command(flatten)]
    concourse: GardenArgs,
    /// The worker's name, unique in the cluster. Default: the host name of this machine when it first had this state directory
    #[arg(long, env = "GANTRY_WORKER_NAME", value_name = "NAME")]
    name: Option<String>,
    /// The platform of a Concourse worker. This machine's is `linux`
    #[arg(long, env = "GANTRY_WORKER_PLATFORM", value_name = "NAME", default_value = "linux")]
    platform: String,
    /// A tag of the worker, may be repeated. With some, it takes only workloads with tags
    #[arg(long = "tag", env = "GANTRY_WORKER_TAGS", value_name = "TAG", value_delimiter = ',')]
    tags: Vec<String>,
    /// The only team that may use the worker. Default: every team
    #[arg(long, env = "GANTRY_WORKER_TEAM", value_name = "TEAM")]
    team: Option<String>,
    #[command(flatten)]
    amounts: Amounts,
    #[command(flatten)]
    policy: Policy,
    /// The worker is gone for good once it is lost: the cluster forgets it then, with all that it holds
    #[arg(long, env = "GANTRY_WORKER_EPHEMERAL", value_parser = clap::builder::BoolishValueParser::new())]
    ephemeral: bool,
    /// Where volumes and containers are kept
    #[arg(long, env = "GANTRY_STATE_DIR", value_name = "DIR", default_value = "/var/lib/gantry")]
    state_dir: PathBuf,
    /// Where sockets of supervisors are
    #[arg(long, env = "GANTRY_RUNTIME_DIR", value_name = "DIR", default_value = "/run/gantry")]
    runtime_dir: PathBuf,
    /// How often everything that the worker holds is reported, give or take a fifth
    #[arg(long, env = "GANTRY_REPORT_INTERVAL", value_name = "DURATION", default_value = "60s", value_parser = term)]
    report_interval: Duration,
    /// How many containers are destroyed at a time
    #[arg(
        long,
        env = "GANTRY_DESTROY_CONCURRENCY",
        value_name = "COUNT",
        default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    destroy_concurrency: u16,
    /// Report what the worker holds and destroy nothing of it, so that what should go can be looked at. The disk only fills up
    #[arg(long, env = "GANTRY_HOLD_DESTRUCTION", value_parser = clap::builder::BoolishValueParser::new())]
    hold_destruction: bool,
}

fn main() -> ExitCode {
    // Before any thread exists: a container is made by a process that has only one.
    if let Some(code) = runtime_gateway::host::supervise_if_asked(std::env::args_os()) {
        return code;
    }
    // A compose file has a place for the worker that there may be.
    let is_empty = |name| std::env::var_os(name).is_some_and(|value| value.is_empty());
    if std::env::args_os().len() == 1 && is_empty("GANTRY_GARDEN") && is_empty("GANTRY_BAGGAGECLAIM") {
        eprintln!(
            "runtime-gateway: GANTRY_GARDEN and GANTRY_BAGGAGECLAIM name no worker: there is nothing to attend"
        );
        return ExitCode::SUCCESS;
    }
    server::run::<Arguments>()
}

impl server::Program for Arguments {
    const NAME: &'static str = "runtime-gateway";

    fn listen(&self) -> &ListenArgs {
        &self.listen
    }

    fn check(&self) -> anyhow::Result<()> {
        for (flag, directory) in [("--state-dir", &self.state_dir), ("--runtime-dir", &self.runtime_dir)] {
            anyhow::ensure!(
                directory.is_absolute(),
                "{flag} must be an absolute path, not {}",
                directory.display()
            );
        }
        Ok(())
    }

    async fn start(mut self, context: StartContext, host: &mut Host) -> anyhow::Result<()> {
        // A list that is empty in the environment has one empty tag.
        self.tags.retain(|tag| !tag.is_empty());
        if self.proxy {
            return runtime_gateway::start_proxy(&self.scheduler, context.token.as_deref(), host);
        }
        runtime_gateway::make_private_directory(&self.state_dir)
            .with_context(|| format!("cannot make the directory {}", self.state_dir.display()))?;
        let common = Config {
            worker_name: String::new(),
            platform: self.platform.clone(),
            tags: self.tags.clone(),
            team: self.team.clone(),
            amounts: self.amounts.clone(),
            ephemeral: self.ephemeral,
            endpoint: self.endpoint.unwrap_or(context.endpoint),
            scheduler: self.scheduler.clone(),
            artifact_store: self.artifact_store.unwrap_or_default(),
            streamer: self.streamer.unwrap_or_default(),
            token: context.token.clone(),
            manifest_dir: self.state_dir.join("manifests"),
            report_interval: self.report_interval,
            destroy_concurrency: self.destroy_concurrency.into(),
            intervals: runtime_gateway::Intervals::default(),
            hold_destruction: self.hold_destruction,
        };
        let gateway = runtime_gateway::open(&self.scheduler, context.token.as_deref(), host)?;
        if !self.concourse.any() {
            let machine = HostConfig {
                policy: self.policy,
                masked: context.secret_paths,
                ..HostConfig::new(self.state_dir, self.runtime_dir)?
            };
            let name = machine.worker_name(self.name)?;
            let amounts = common.amounts.clone().within_open_files();
            let config = Config { worker_name: name, platform: "linux".to_owned(), amounts, ..common };
            host.spawn_vital(async move {
                // Not drained when it fails: what another gateway has taken over is left alone at once.
                runtime_gateway::attend_this_machine(&gateway, config, machine)
                    .await
                    .map(|never| match never {})
            });
            return Ok(());
        }
        let given = GardenWorker {
            name: self.name.unwrap_or_default(),
            platform: self.platform,
            tags: self.tags,
            team: self.team.unwrap_or_default(),
            amounts: self.amounts,
            ..GardenWorker::default()
        };
        for worker in self.concourse.workers(given)? {
            let (config, garden) = worker.config(&common, &self.state_dir);
            host.spawn(runtime_gateway::attend_concourse_worker(gateway.clone(), config, garden));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_known_to_the_other_programs() {
        assert_eq!(server::settings::unlisted_variables(&server::command::<Arguments>()), [] as [String; 0]);
    }
}
