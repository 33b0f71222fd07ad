//! The scheduler as a program.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Args, FromArgMatches, Parser};
use scheduler::{Chain, Chains, Config, Limits};
use server::settings::{duration, term};
use server::{Host, ListenArgs, StartContext};

/// The scheduler of Gantry: workers, leases, workloads and their queue
#[derive(Debug, Parser)]
#[command(name = "scheduler", version)]
struct Arguments {
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    database: db::DatabaseArgs,
    /// Refuse to start on a database with an older schema, instead of migrating it
    #[arg(
        long,
        env = "GANTRY_NO_MIGRATE",
        value_parser = clap::builder::BoolishValueParser::new(),
        help_heading = "Database"
    )]
    no_migrate: bool,
    /// Addresses of the artifact store's replicas, separated by commas: http://host:port or
    /// unix:///path
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    artifact_store: String,
    /// Addresses of the streamer's replicas, separated by commas. The streamer resolves references
    /// of images. Without it, specs with such references are rejected
    #[arg(long, env = "GANTRY_STREAMER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    streamer: Option<String>,
    /// Longest time between two heartbeats of a gateway
    #[arg(long, env = "GANTRY_HEARTBEAT", value_name = "DURATION", default_value = "5s", value_parser = term)]
    heartbeat: Duration,
    /// Longest time without a heartbeat before a worker is stalled: it gets no work, and another
    /// gateway may take over
    #[arg(long, env = "GANTRY_WORKER_TTL", value_name = "DURATION", default_value = "30s", value_parser = term)]
    worker_ttl: Duration,
    /// Longest time without contact before a worker ends its processes. Must be longer than
    /// --worker-ttl
    #[arg(long, env = "GANTRY_STOP_AFTER", value_name = "DURATION", default_value = "10m", value_parser = term)]
    stop_after: Duration,
    /// Longest time without a heartbeat before a worker is lost and its attempts are given up. Must
    /// be longer than --stop-after
    #[arg(long, env = "GANTRY_LOST_AFTER", value_name = "DURATION", default_value = "15m", value_parser = term)]
    lost_after: Duration,
    /// Term of a driven lease; each renewal starts a new term
    #[arg(long, env = "GANTRY_LEASE_TERM", value_name = "DURATION", default_value = "60s", value_parser = term)]
    lease_term: Duration,
    /// Validity of a ticket: the time within which its transfer must be opened
    #[arg(long, env = "GANTRY_TICKET_VALIDITY", value_name = "DURATION", default_value = "5m", value_parser = term)]
    ticket_validity: Duration,
    /// Grace period of a process that exceeded its run timeout, before it is killed
    #[arg(long, env = "GANTRY_TIMEOUT_GRACE", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    timeout_grace: Duration,
    /// Time for which the scheduler keeps finished workloads and the records of removed workers
    #[arg(long, env = "GANTRY_KEEP_FINISHED", value_name = "DURATION", default_value = "7d", value_parser = duration)]
    keep_finished: Duration,
    /// Number of consecutive attempts that fail before the process starts, through the fault of the
    /// worker, after which the worker is quarantined
    #[arg(long, env = "GANTRY_QUARANTINE_AFTER", value_name = "COUNT", default_value = "5")]
    quarantine_after: u32,
    /// Length of the first quarantine of a worker. Each consecutive quarantine is twice as long
    #[arg(long, env = "GANTRY_QUARANTINE_FOR", value_name = "DURATION", default_value = "10s", value_parser = term)]
    quarantine_for: Duration,
    /// Longest quarantine of a worker
    #[arg(
        long,
        env = "GANTRY_QUARANTINE_FOR_AT_MOST",
        value_name = "DURATION",
        default_value = "10m",
        value_parser = term
    )]
    quarantine_for_at_most: Duration,
    /// Interval between comparisons of the artifact store's holders with the workloads of the
    /// scheduler
    #[arg(
        long,
        env = "GANTRY_RECONCILE_INTERVAL",
        value_name = "DURATION",
        default_value = "60s",
        value_parser = term
    )]
    reconcile_interval: Duration,
    /// Time for which the artifact store may keep pins for a workload that the scheduler does not
    /// know or that has finished
    #[arg(long, env = "GANTRY_RECONCILE_GRACE", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    reconcile_grace: Duration,
    /// Ranking of workers for workloads and leases with inputs. The first strategy that differs
    /// decides: volume-locality, fewest-build-containers, limit-active-tasks,
    /// limit-active-containers, limit-active-volumes, random
    #[arg(
        long,
        env = "GANTRY_PLACEMENT_STRATEGY",
        value_name = "STRATEGIES",
        default_value = "volume-locality,limit-active-tasks",
        help_heading = "Placement"
    )]
    placement_strategy: Chain,
    /// Ranking of workers for workloads without inputs: neither artifacts nor task caches
    #[arg(
        long,
        env = "GANTRY_PLACEMENT_STRATEGY_WITHOUT_INPUTS",
        value_name = "STRATEGIES",
        default_value = "limit-active-tasks",
        help_heading = "Placement"
    )]
    placement_strategy_without_inputs: Chain,
    /// Ranking of workers for checks, with or without inputs
    #[arg(
        long,
        env = "GANTRY_PLACEMENT_STRATEGY_CHECKS",
        value_name = "STRATEGIES",
        default_value = "limit-active-tasks",
        help_heading = "Placement"
    )]
    placement_strategy_checks: Chain,
    /// Maximum number of concurrent tasks on a worker that declares no limit. Default: no limit
    #[arg(
        long,
        env = "GANTRY_MAX_TASKS_PER_WORKER",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Placement"
    )]
    max_tasks_per_worker: Option<u32>,
    /// Maximum number of containers on a worker that declares no limit, including kept containers.
    /// Default: no limit
    #[arg(
        long,
        env = "GANTRY_MAX_CONTAINERS_PER_WORKER",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Placement"
    )]
    max_containers_per_worker: Option<u32>,
    /// Maximum number of volumes on a worker that declares no limit. Default: no limit
    #[arg(
        long,
        env = "GANTRY_MAX_VOLUMES_PER_WORKER",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..),
        help_heading = "Placement"
    )]
    max_volumes_per_worker: Option<u32>,
    /// A team that uses only its own workers, even while all of them are full. May be repeated
    #[arg(
        long = "team-keeps-to-its-own",
        env = "GANTRY_TEAMS_KEEP_TO_THEIR_OWN",
        value_name = "TEAM",
        value_delimiter = ',',
        help_heading = "Placement"
    )]
    exclusive_teams: Vec<String>,
    /// Maximum number of workloads of one team that may wait for a worker. The scheduler rejects
    /// further workloads. With several replicas, the total may exceed the limit by the workloads
    /// that other replicas accept within one poll interval
    #[arg(
        long,
        env = "GANTRY_MAX_WAITING_PER_TEAM",
        value_name = "COUNT",
        default_value_t = 200_000,
        value_parser = clap::value_parser!(u64).range(1..),
        help_heading = "Placement"
    )]
    max_waiting_per_team: u64,
    /// Maximum number of bytes of specs of one team's workloads that may wait for a worker. The
    /// scheduler rejects further workloads
    #[arg(
        long,
        env = "GANTRY_MAX_WAITING_BYTES_PER_TEAM",
        value_name = "BYTES",
        default_value_t = 256 << 20,
        value_parser = clap::value_parser!(u64).range(1..),
        help_heading = "Placement"
    )]
    max_waiting_bytes_per_team: u64,
    /// Share of slots of a team relative to other teams, which have weight 1, while all of them
    /// wait: TEAM=WEIGHT. May be repeated
    #[arg(
        long = "team-weight",
        env = "GANTRY_TEAM_WEIGHTS",
        value_name = "TEAM=WEIGHT",
        value_delimiter = ',',
        value_parser = weight,
        help_heading = "Placement"
    )]
    team_weights: Vec<(String, u32)>,
    /// Waiting time after which a request counts as one priority higher. 0s: never, so a request
    /// with a low priority may wait forever
    #[arg(
        long,
        env = "GANTRY_QUEUE_AGING",
        value_name = "DURATION",
        default_value = "10m",
        value_parser = duration,
        help_heading = "Placement"
    )]
    queue_aging: Duration,
    /// Time for which a lost or removed worker still counts as one that may return. Requests that
    /// only this worker could run wait for that time
    #[arg(
        long,
        env = "GANTRY_REMEMBER_LOST",
        value_name = "DURATION",
        default_value = "5m",
        value_parser = duration,
        help_heading = "Placement"
    )]
    remember_lost: Duration,
    /// Interval of the poll that finds the changes of other replicas if a notification is missed
    #[arg(long, env = "GANTRY_POLL_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = term)]
    poll_interval: Duration,
}

fn weight(text: &str) -> Result<(String, u32), String> {
    let (team, weight) = text.split_once('=').ok_or("must be TEAM=WEIGHT")?;
    let weight = weight.parse().ok().filter(|weight| *weight > 0);
    Ok((team.to_owned(), weight.ok_or("the weight must be a whole number of at least 1")?))
}

fn main() -> ExitCode {
    server::run::<Arguments>()
}

impl server::Program for Arguments {
    const NAME: &'static str = "scheduler";

    fn listen(&self) -> &ListenArgs {
        &self.listen
    }

    fn check(&self) -> anyhow::Result<()> {
        self.database.check()?;
        self.config(None).check()
    }

    fn migrate_command(command: clap::Command) -> Option<clap::Command> {
        Some(db::DatabaseArgs::augment_args(command))
    }

    async fn migrate(matches: &ArgMatches) -> anyhow::Result<String> {
        let args = db::DatabaseArgs::from_arg_matches(matches)?;
        args.check()?;
        scheduler::migrate(&args.settings(true, false))
            .await
            .context("cannot migrate the scheduler's database")?;
        Ok("the scheduler's database has the schema of this version".to_owned())
    }

    async fn start(self, context: StartContext, host: &mut Host) -> anyhow::Result<()> {
        scheduler::start(self.config(context.token), host).await
    }
}

impl Arguments {
    fn config(&self, token: Option<String>) -> Config {
        Config {
            database: self.database.settings(!self.no_migrate, true),
            artifact_store: self.artifact_store.clone(),
            streamer: self.streamer.clone(),
            token,
            heartbeat: self.heartbeat,
            worker_ttl: self.worker_ttl,
            lost_after: self.lost_after,
            stop_after: self.stop_after,
            lease_term: self.lease_term,
            ticket_validity: self.ticket_validity,
            timeout_grace: self.timeout_grace,
            keep_finished: self.keep_finished,
            quarantine_after: self.quarantine_after,
            quarantine_for: self.quarantine_for,
            quarantine_for_at_most: self.quarantine_for_at_most,
            reconcile_every: self.reconcile_interval,
            reconcile_grace: self.reconcile_grace,
            share_notifications: true,
            poll: self.poll_interval,
            chains: Chains {
                builds: self.placement_strategy.clone(),
                without_inputs: self.placement_strategy_without_inputs.clone(),
                checks: self.placement_strategy_checks.clone(),
            },
            limits: Limits {
                tasks: self.max_tasks_per_worker,
                containers: self.max_containers_per_worker,
                volumes: self.max_volumes_per_worker,
            },
            exclusive_teams: self.exclusive_teams.iter().cloned().collect(),
            max_waiting_per_team: self.max_waiting_per_team,
            max_waiting_bytes_per_team: self.max_waiting_bytes_per_team,
            team_weights: self.team_weights.iter().cloned().collect(),
            queue_aging: self.queue_aging,
            remember_lost: self.remember_lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_listed_for_other_programs() {
        assert_eq!(server::settings::unlisted_variables(&server::command::<Arguments>()), [] as [String; 0]);
    }

    #[test]
    fn defaults_match_those_of_the_library() {
        let line = ["scheduler", "--database-url", "sqlite:///x", "--artifact-store", "http://a:1"];
        let config = Arguments::parse_from(line).config(None);
        let expected = Config::new(db::Settings { wait: true, .."sqlite:///x".into() }, "http://a:1");
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }
}
