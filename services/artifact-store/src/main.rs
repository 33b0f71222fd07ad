//! The artifact store as a service of its own.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use artifact_store::{Clock, Config, KeySource};
use clap::{ArgMatches, Args, FromArgMatches, Parser};
use server::settings::{duration, term};
use server::{Host, ListenArgs, StartContext};

/// The artifact store of Gantry: artifacts, their owners, the inventory of every worker, garbage.
#[derive(Debug, Parser)]
#[command(name = "artifact-store", version)]
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
    /// The scheduler, whose keys verify the session of a worker: http://host:port or unix:///path, of each replica, with commas between them
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    scheduler: String,
    /// How long after it was made an artifact goes that never had an owner
    #[arg(long, env = "GANTRY_UNOWNED_TTL", value_name = "DURATION", default_value = "12h", value_parser = duration)]
    unowned_ttl: Duration,
    /// How long containers and volumes stay after their attempt ended
    #[arg(long, env = "GANTRY_GC_GRACE", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    gc_grace: Duration,
    /// How long a build keeps its artifacts after its end, unless its caller says otherwise
    #[arg(long, env = "GANTRY_DEFAULT_KEEP", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    default_keep: Duration,
    /// How long after it was last put a build ends to which no workload was bound, unless its caller says otherwise
    #[arg(long, env = "GANTRY_DEFAULT_TERM", value_name = "DURATION", default_value = "10m", value_parser = term)]
    default_term: Duration,
    /// How long a resource cache stays that is not used
    #[arg(long, env = "GANTRY_RESOURCE_CACHE_TTL", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    resource_cache_ttl: Duration,
    /// How long a task cache stays that is not used, unless its caller says otherwise
    #[arg(long, env = "GANTRY_TASK_CACHE_TTL", value_name = "DURATION", default_value = "7d", value_parser = term)]
    task_cache_ttl: Duration,
    /// How often garbage is collected, give or take a fifth
    #[arg(long, env = "GANTRY_COLLECT_INTERVAL", value_name = "DURATION", default_value = "30s", value_parser = term)]
    collect_interval: Duration,
    /// How long a transfer, or the maker of a resource cache, may take before it says that it goes on
    #[arg(long, env = "GANTRY_CLAIM_TERM", value_name = "DURATION", default_value = "20s", value_parser = term)]
    claim_term: Duration,
    /// For how long a volume or container must be missing from reports before it counts as lost
    #[arg(long, env = "GANTRY_LOST_GRACE", value_name = "DURATION", default_value = "1m", value_parser = duration)]
    lost_grace: Duration,
    /// How long a deleted artifact, and a volume or container that is gone, can still be asked about
    #[arg(long, env = "GANTRY_TOMBSTONE", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    tombstone: Duration,
    /// How long what has ended is remembered, so that late calls for it are refused. Longer than any call can be delayed
    #[arg(long, env = "GANTRY_REMEMBER", value_name = "DURATION", default_value = "24h", value_parser = term)]
    remember: Duration,
    /// How often a gateway's stream looks for marks by itself: what another replica marked is swept after that at the latest
    #[arg(long, env = "GANTRY_SWEEP_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = term)]
    sweep_interval: Duration,
}

/// The command that says that the database came out of a backup.
const RESTORED: &str = "restored";

fn main() -> ExitCode {
    server::run::<Arguments>()
}

impl server::Program for Arguments {
    const NAME: &'static str = "artifact-store";

    fn listen(&self) -> &ListenArgs {
        &self.listen
    }

    fn check(&self) -> anyhow::Result<()> {
        self.database.check()?;
        Ok(self.config(None).check()?)
    }

    fn migrate_command(command: clap::Command) -> Option<clap::Command> {
        Some(db::DatabaseArgs::augment_args(command))
    }

    async fn migrate(matches: &ArgMatches) -> anyhow::Result<String> {
        let args = db::DatabaseArgs::from_arg_matches(matches)?;
        args.check()?;
        artifact_store::migrate(&args.settings(true, false))
            .await
            .context("cannot migrate the store's database")?;
        Ok("the artifact store's database has the schema of this version".to_owned())
    }

    fn commands() -> Vec<clap::Command> {
        // What is said of a group of settings would be said of the command that has them.
        let restored = db::DatabaseArgs::augment_args(clap::Command::new(RESTORED));
        let about = "Say that the database was restored from a backup, before it is started: what workers made since are orphans, and not swept";
        vec![restored.about(about)]
    }

    async fn run_command(_: &str, matches: &ArgMatches) -> anyhow::Result<String> {
        let args = db::DatabaseArgs::from_arg_matches(matches)?;
        args.check()?;
        let life = artifact_store::restored(&args.settings(true, false))
            .await
            .context("cannot begin a new life of the store's database")?;
        Ok(format!(
            "the artifact store's database has begun the life {life}: what workers hold and it does not know are orphans when they report"
        ))
    }

    async fn start(self, context: StartContext, host: &mut Host) -> anyhow::Result<()> {
        artifact_store::start(self.config(context.token), host).await
    }
}

impl Arguments {
    fn config(&self, token: Option<String>) -> Config {
        Config {
            database: self.database.settings(!self.no_migrate, true),
            keys: KeySource::Scheduler(self.scheduler.clone()),
            token,
            unowned_ttl: self.unowned_ttl,
            gc_grace: self.gc_grace,
            default_keep: self.default_keep,
            default_term: self.default_term,
            resource_cache_ttl: self.resource_cache_ttl,
            task_cache_ttl: self.task_cache_ttl,
            collect_interval: self.collect_interval,
            claim_term: self.claim_term,
            lost_grace: self.lost_grace,
            tombstone: self.tombstone,
            remember: self.remember,
            sweep_interval: self.sweep_interval,
            clock: Clock::system(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_known_to_the_other_programs() {
        assert_eq!(server::settings::unlisted_variables(&server::command::<Arguments>()), [] as [String; 0]);
    }

    #[test]
    fn the_defaults_are_those_of_the_library() {
        let line = ["artifact-store", "--database-url", "sqlite:///x", "--scheduler", "http://s:1"];
        let config = Config { clock: Clock::system(), ..Arguments::parse_from(line).config(None) };
        let keys = KeySource::Scheduler("http://s:1".to_owned());
        let expected = Config::new(db::Settings { wait: true, .."sqlite:///x".into() }, keys);
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }
}
