//! The program `artifact-store`, which serves the artifact store alone.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use artifact_store::{Clock, Config, KeySource};
use clap::{ArgMatches, Args, FromArgMatches, Parser};
use server::settings::{duration, term};
use server::{Host, ListenArgs, StartContext};

/// The artifact store of Gantry: artifacts, their owners, the inventory of all workers, and garbage
/// collection.
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
    /// Addresses of the scheduler replicas, whose keys verify worker sessions: http://host:port or
    /// unix:///path, separated by commas
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    scheduler: String,
    /// Time after creation after which an artifact that never had an owner is deleted
    #[arg(long, env = "GANTRY_UNOWNED_TTL", value_name = "DURATION", default_value = "12h", value_parser = duration)]
    unowned_ttl: Duration,
    /// Time after the end of an attempt for which its containers and volumes are kept
    #[arg(long, env = "GANTRY_GC_GRACE", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    gc_grace: Duration,
    /// Time for which a build keeps its artifacts after its end, if the caller sets none
    #[arg(long, env = "GANTRY_DEFAULT_KEEP", value_name = "DURATION", default_value = "5m", value_parser = duration)]
    default_keep: Duration,
    /// Time after its last PutBuild after which a build without a bound workload ends, if the
    /// caller sets none
    #[arg(long, env = "GANTRY_DEFAULT_TERM", value_name = "DURATION", default_value = "10m", value_parser = term)]
    default_term: Duration,
    /// Time after the last use after which a resource cache is deleted
    #[arg(long, env = "GANTRY_RESOURCE_CACHE_TTL", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    resource_cache_ttl: Duration,
    /// Time after the last use after which a task cache is deleted, if the caller sets none
    #[arg(long, env = "GANTRY_TASK_CACHE_TTL", value_name = "DURATION", default_value = "7d", value_parser = term)]
    task_cache_ttl: Duration,
    /// Time between two garbage collections, varied at random by up to a fifth
    #[arg(long, env = "GANTRY_COLLECT_INTERVAL", value_name = "DURATION", default_value = "30s", value_parser = term)]
    collect_interval: Duration,
    /// Time after which the claim of a transfer or of the maker of a resource cache expires, unless
    /// renewed
    #[arg(long, env = "GANTRY_CLAIM_TERM", value_name = "DURATION", default_value = "20s", value_parser = term)]
    claim_term: Duration,
    /// Time for which a volume or container must be missing from reports before it counts as lost
    #[arg(long, env = "GANTRY_LOST_GRACE", value_name = "DURATION", default_value = "1m", value_parser = duration)]
    lost_grace: Duration,
    /// Time for which a deleted artifact can be restored, and a deletion explained
    #[arg(long, env = "GANTRY_TOMBSTONE", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    tombstone: Duration,
    /// Time for which ended workloads, attempts and builds are remembered, so that late calls are
    /// rejected. Must exceed the delay of any call
    #[arg(long, env = "GANTRY_REMEMBER", value_name = "DURATION", default_value = "24h", value_parser = term)]
    remember: Duration,
    /// Time between two polls of a gateway's stream for marks of other replicas
    #[arg(long, env = "GANTRY_SWEEP_INTERVAL", value_name = "DURATION", default_value = "1s", value_parser = term)]
    sweep_interval: Duration,
}

/// Name of the command that begins a new store life after a restore from a backup.
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
        // Clap would show the doc comment of a flattened group of settings as the description of
        // the command.
        let restored = db::DatabaseArgs::augment_args(clap::Command::new(RESTORED));
        let about = "Begin a new store life after a restore from a backup, before the store starts. Volumes and containers newer than the backup become orphans and are not swept";
        vec![restored.about(about)]
    }

    async fn run_command(_: &str, matches: &ArgMatches) -> anyhow::Result<String> {
        let args = db::DatabaseArgs::from_arg_matches(matches)?;
        args.check()?;
        let life = artifact_store::restored(&args.settings(true, false))
            .await
            .context("cannot begin a new store life")?;
        Ok(format!(
            "the database has begun store life {life}. Volumes and containers that it does not know become orphans when workers report them"
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
    fn other_programs_know_every_setting() {
        assert_eq!(server::settings::unlisted_variables(&server::command::<Arguments>()), [] as [String; 0]);
    }

    #[test]
    fn defaults_equal_those_of_the_library() {
        let line = ["artifact-store", "--database-url", "sqlite:///x", "--scheduler", "http://s:1"];
        let config = Config { clock: Clock::system(), ..Arguments::parse_from(line).config(None) };
        let keys = KeySource::Scheduler("http://s:1".to_owned());
        let expected = Config::new(db::Settings { wait: true, .."sqlite:///x".into() }, keys);
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }
}
