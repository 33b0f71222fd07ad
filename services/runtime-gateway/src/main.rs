//! The runtime gateway as a separate process, for this machine, for Concourse workers, or as a
//! proxy.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use runtime_gateway::garden::{GardenArgs, GardenWorker};
use runtime_gateway::host::{HostConfig, Policy};
use runtime_gateway::{Amounts, Config};
use server::settings::{size_or_zero, term};
use server::{Host, ListenArgs, StartContext};

/// The runtime gateway of Gantry: attends this machine or Concourse workers, or serves as a proxy.
///
/// Several gateways on one machine may share a state directory. One of them attends the worker, the
/// others stand by. When that gateway dies or freezes, a standby takes over. The replaced gateway
/// exits with an error. Gateways of one Concourse worker stand by for each other in the same way,
/// each with its own state directory.
#[derive(Debug, Parser)]
#[command(name = "runtime-gateway", version)]
struct Arguments {
    #[command(flatten)]
    listen: ListenArgs,
    /// Forward calls of containers and volumes to the gateway that attends the worker, and attend
    /// no worker. Needs only --scheduler
    #[arg(long, env = "GANTRY_GATEWAY_PROXY", value_parser = clap::builder::BoolishValueParser::new())]
    proxy: bool,
    /// Address of this gateway for callers, if not the one that it listens on: http://host:port or
    /// unix:///path
    #[arg(long, env = "GANTRY_ENDPOINT", value_name = "ADDRESS", value_parser = rpc::client::addresses)]
    endpoint: Option<String>,
    /// Addresses of the scheduler's replicas, separated by commas: http://host:port or unix:///path
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    scheduler: String,
    /// Addresses of the artifact store's replicas, separated by commas: http://host:port or
    /// unix:///path
    #[arg(
        long,
        env = "GANTRY_ARTIFACT_STORE",
        value_name = "ADDRESSES",
        value_parser = rpc::client::addresses,
        required_unless_present = "proxy"
    )]
    artifact_store: Option<String>,
    /// Addresses of the streamer's replicas, separated by commas: http://host:port or unix:///path
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
    /// Name of the worker, unique in the cluster. Default: the host name at the first start with
    /// this state directory
    #[arg(long, env = "GANTRY_WORKER_NAME", value_name = "NAME")]
    name: Option<String>,
    /// Platform of a Concourse worker. The platform of this machine is always `linux`
    #[arg(long, env = "GANTRY_WORKER_PLATFORM", value_name = "NAME", default_value = "linux")]
    platform: String,
    /// Tag of the worker, may be repeated. A worker with tags takes only workloads with tags
    #[arg(long = "tag", env = "GANTRY_WORKER_TAGS", value_name = "TAG", value_delimiter = ',')]
    tags: Vec<String>,
    /// Only team that may use the worker. Default: every team
    #[arg(long, env = "GANTRY_WORKER_TEAM", value_name = "TEAM")]
    team: Option<String>,
    /// Zone of the worker, such as a site or a rack: a part of the network with fast connections.
    /// Copies come from a worker of the same zone if there is one. Default: no zone
    #[arg(
        long,
        env = "GANTRY_WORKER_ZONE",
        value_name = "ZONE",
        default_value = "",
        hide_default_value = true
    )]
    zone: String,
    #[command(flatten)]
    amounts: Amounts,
    #[command(flatten)]
    policy: Policy,
    /// Prune the worker, with everything on it, once it is lost
    #[arg(long, env = "GANTRY_WORKER_EPHEMERAL", value_parser = clap::builder::BoolishValueParser::new())]
    ephemeral: bool,
    /// Directory of volumes and containers
    #[arg(long, env = "GANTRY_STATE_DIR", value_name = "DIR", default_value = "/var/lib/gantry")]
    state_dir: PathBuf,
    /// Directory of the supervisors' sockets. Several workers of one machine may share it
    #[arg(long, env = "GANTRY_RUNTIME_DIR", value_name = "DIR", default_value = "/run/gantry")]
    runtime_dir: PathBuf,
    /// Interval between two reports of all containers and volumes, varied by a fifth
    #[arg(long, env = "GANTRY_REPORT_INTERVAL", value_name = "DURATION", default_value = "60s", value_parser = term)]
    report_interval: Duration,
    /// Bytes of volumes on this machine that are hashed in one second while no work runs, so that
    /// damage is found. 0: none are hashed
    #[arg(long, env = "GANTRY_SCRUB_RATE", value_name = "SIZE", default_value = "8MiB", value_parser = size_or_zero)]
    scrub_rate: u64,
    /// Number of containers that are destroyed at a time
    #[arg(
        long,
        env = "GANTRY_DESTROY_CONCURRENCY",
        value_name = "COUNT",
        default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=1000)
    )]
    destroy_concurrency: u16,
    /// Destroy nothing, so that an operator can inspect what is marked. Reports continue, and the
    /// disk fills up
    #[arg(long, env = "GANTRY_HOLD_DESTRUCTION", value_parser = clap::builder::BoolishValueParser::new())]
    hold_destruction: bool,
}

fn main() -> ExitCode {
    // Must run before any thread exists: only a process with one thread can make a container.
    if let Some(code) = runtime_gateway::host::supervise_if_asked(std::env::args_os()) {
        return code;
    }
    // A compose file may pass empty values when it has no Concourse worker.
    let is_empty = |name| std::env::var_os(name).is_some_and(|value| value.is_empty());
    if std::env::args_os().len() == 1 && is_empty("GANTRY_GARDEN") && is_empty("GANTRY_BAGGAGECLAIM") {
        eprintln!(
            "runtime-gateway: GANTRY_GARDEN and GANTRY_BAGGAGECLAIM are empty: there is no worker to attend"
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

    fn prepare(&self) -> anyhow::Result<()> {
        // Only containers on this machine need the rights of root.
        if self.proxy || self.concourse.any() {
            return Ok(());
        }
        Ok(runtime_gateway::host::enter_user_namespace(&self.state_dir)?)
    }

    async fn start(mut self, context: StartContext, host: &mut Host) -> anyhow::Result<()> {
        // An empty list in the environment parses as one empty tag.
        self.tags.retain(|tag| !tag.is_empty());
        if self.proxy {
            return runtime_gateway::start_proxy(&self.scheduler, context.token.as_deref(), host);
        }
        runtime_gateway::make_private_directory(&self.state_dir)
            .with_context(|| format!("cannot create the state directory {}", self.state_dir.display()))?;
        let common = Config {
            worker_name: String::new(),
            platform: self.platform.clone(),
            tags: self.tags.clone(),
            team: self.team.clone(),
            zone: self.zone.clone(),
            amounts: self.amounts.clone().checked()?,
            ephemeral: self.ephemeral,
            endpoint: self.endpoint.unwrap_or(context.endpoint),
            scheduler: self.scheduler.clone(),
            artifact_store: self.artifact_store.unwrap_or_default(),
            streamer: self.streamer.unwrap_or_default(),
            token: context.token.clone(),
            manifest_dir: self.state_dir.join("manifests"),
            report_interval: self.report_interval,
            scrub_bytes_per_second: self.scrub_rate,
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
                // A failure here ends the process without draining, because another gateway may
                // already use the state directory.
                runtime_gateway::attend_this_machine(&gateway, config, machine)
                    .await
                    .map(|never| match never {})
            });
            return Ok(());
        }
        let defaults = GardenWorker {
            name: self.name.unwrap_or_default(),
            platform: self.platform,
            tags: self.tags,
            team: self.team.unwrap_or_default(),
            amounts: self.amounts,
            ..GardenWorker::default()
        };
        for worker in self.concourse.workers(defaults)? {
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
    fn every_setting_is_listed() {
        assert_eq!(server::settings::unlisted_variables(&server::command::<Arguments>()), [] as [String; 0]);
    }
}
