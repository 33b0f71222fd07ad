//! The scheduler as a service of its own.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Args, FromArgMatches, Parser};
use scheduler::Config;
use server::settings::{duration, term};
use server::{Host, ListenArgs, Starting};

/// The scheduler of Gantry: workers, leases, workloads and their queue.
#[derive(Debug, Parser)]
#[command(name = "scheduler", version)]
struct Arguments {
    #[command(flatten)]
    listen: ListenArgs,
    #[command(flatten)]
    database: db::DatabaseArgs,
    /// Refuse to start on a database of an older version, instead of migrating it
    #[arg(
        long,
        env = "GANTRY_NO_MIGRATE",
        value_parser = clap::builder::BoolishValueParser::new(),
        help_heading = "Database"
    )]
    no_migrate: bool,
    /// Where the artifact store listens: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    artifact_store: String,
    /// In which time a gateway says at least once what its worker does
    #[arg(long, env = "GANTRY_HEARTBEAT", value_name = "DURATION", default_value = "5s", value_parser = term)]
    heartbeat: Duration,
    /// The silence after which a worker is stalled: it gets no work, and another gateway may speak for it
    #[arg(long, env = "GANTRY_WORKER_TTL", value_name = "DURATION", default_value = "30s", value_parser = term)]
    worker_ttl: Duration,
    /// How long a worker is without contact before it ends its processes by itself. More than --worker-ttl
    #[arg(long, env = "GANTRY_STOP_AFTER", value_name = "DURATION", default_value = "10m", value_parser = term)]
    stop_after: Duration,
    /// The silence after which a worker is lost, and what it ran is given up. More than --stop-after
    #[arg(long, env = "GANTRY_LOST_AFTER", value_name = "DURATION", default_value = "15m", value_parser = term)]
    lost_after: Duration,
    /// How long a driven lease lasts unless it is renewed
    #[arg(long, env = "GANTRY_LEASE_TERM", value_name = "DURATION", default_value = "60s", value_parser = term)]
    lease_term: Duration,
    /// How long a ticket is good for opening a transfer
    #[arg(long, env = "GANTRY_TICKET_VALIDITY", value_name = "DURATION", default_value = "5m", value_parser = term)]
    ticket_validity: Duration,
    /// How long a process that ran for too long may take to end, before it is killed
    #[arg(long, env = "GANTRY_TIMEOUT_GRACE", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    timeout_grace: Duration,
    /// How long a finished workload can be asked for, and which workers have gone is remembered
    #[arg(long, env = "GANTRY_KEEP_FINISHED", value_name = "DURATION", default_value = "7d", value_parser = duration)]
    keep_finished: Duration,
    /// After how many attempts in a row that ended before their process had started, through its fault, a worker is set aside
    #[arg(long, env = "GANTRY_SET_ASIDE_AFTER", value_name = "COUNT", default_value = "5")]
    set_aside_after: u32,
    /// How long a worker is set aside the first time. Each time in a row is twice as long
    #[arg(long, env = "GANTRY_SET_ASIDE_FOR", value_name = "DURATION", default_value = "10s", value_parser = term)]
    set_aside_for: Duration,
    /// How long a worker is set aside at most
    #[arg(
        long,
        env = "GANTRY_SET_ASIDE_FOR_AT_MOST",
        value_name = "DURATION",
        default_value = "10m",
        value_parser = term
    )]
    set_aside_for_at_most: Duration,
    /// How often what the artifact store holds for workloads is compared with what the scheduler knows
    #[arg(
        long,
        env = "GANTRY_RECONCILE_INTERVAL",
        value_name = "DURATION",
        default_value = "60s",
        value_parser = term
    )]
    reconcile_interval: Duration,
    /// How long the artifact store may hold something for a workload that is unknown or finished here, before that is ended
    #[arg(long, env = "GANTRY_RECONCILE_GRACE", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    reconcile_grace: Duration,
    /// How often the database is looked at although nobody gave a hint: what another replica did is seen after that at the latest
    #[arg(long, env = "GANTRY_POLL_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = term)]
    poll_interval: Duration,
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

    async fn start(self, starting: Starting, host: &mut Host) -> anyhow::Result<()> {
        scheduler::start(self.config(starting.token), host).await
    }
}

impl Arguments {
    fn config(&self, token: Option<String>) -> Config {
        Config {
            database: self.database.settings(!self.no_migrate, true),
            artifact_store: self.artifact_store.clone(),
            token,
            heartbeat: self.heartbeat,
            worker_ttl: self.worker_ttl,
            lost_after: self.lost_after,
            stop_after: self.stop_after,
            lease_term: self.lease_term,
            ticket_validity: self.ticket_validity,
            timeout_grace: self.timeout_grace,
            keep_finished: self.keep_finished,
            set_aside_after: self.set_aside_after,
            set_aside_for: self.set_aside_for,
            set_aside_for_at_most: self.set_aside_for_at_most,
            reconcile_every: self.reconcile_interval,
            reconcile_grace: self.reconcile_grace,
            poll: self.poll_interval,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_known_to_the_other_programs() {
        assert_eq!(server::settings::unlisted(&server::command::<Arguments>()), [] as [String; 0]);
    }

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let line = ["scheduler", "--database-url", "sqlite:///x", "--artifact-store", "http://a:1"];
        let config = Arguments::parse_from(line).config(None);
        let expected = Config::new(db::Settings { wait: true, .."sqlite:///x".into() }, "http://a:1");
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }
}
