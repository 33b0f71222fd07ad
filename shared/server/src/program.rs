//! A service's own binary: its settings, its subcommands, its life.
//!
//! ```text
//! SERVICE [settings]         serve until TERM or INT
//! SERVICE --print-config     say what the settings are, and where each comes from
//! SERVICE migrate            bring the database to the schema of this program, where there is one
//! SERVICE health             ask one that runs whether it is ready
//! SERVICE token              make the token file of a cluster
//! SERVICE ...                what the service has beside these
//! ```

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches};

use crate::health::{self, HealthArgs};
use crate::inherited;
use crate::listen_args::ServerSetup;
use crate::operator_endpoints::Recorder;
use crate::settings;
use crate::{Host, ListenArgs, shutdown_signal, token};

/// A service's own binary.
pub trait Program: CommandFactory + FromArgMatches + Send + Sync + 'static {
    /// Its name, in logs and traces.
    const NAME: &'static str;

    /// The settings that every service has.
    fn listen(&self) -> &ListenArgs;

    /// Refuses settings that cannot be used together, before anything is done.
    fn check(&self) -> anyhow::Result<()>;

    /// The command that [`Program::migrate`] takes, with the settings that are needed for it, where there is a database.
    fn migrate_command(command: clap::Command) -> Option<clap::Command> {
        drop(command);
        None
    }

    /// Brings the database to the schema of this program, and says how it is.
    fn migrate(matches: &ArgMatches) -> impl Future<Output = anyhow::Result<String>> + Send {
        let _ = matches;
        async { anyhow::bail!("it has no database") }
    }

    /// What else may be asked of it, each with the settings that are needed for it.
    fn commands() -> Vec<clap::Command> {
        Vec::new()
    }

    /// Carries out one of [`Program::commands`], and says how it went.
    fn run_command(name: &str, matches: &ArgMatches) -> impl Future<Output = anyhow::Result<String>> + Send {
        let (_, name) = (matches, name.to_owned());
        async move { anyhow::bail!("there is no command {name}") }
    }

    /// Adds the service to `host`. Dropped when the process is told to end meanwhile.
    fn start(self, context: StartContext, host: &mut Host)
    -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// What a service learns when it starts.
#[derive(Debug, Clone)]
pub struct StartContext {
    /// The address that it listens on: `unix:///path` or `http://host:port`.
    pub endpoint: String,
    /// The token of the cluster: callers over TCP present it to this service, and this service to others.
    pub token: Option<String>,
    /// Where tokens are kept on this machine: no container may see these paths.
    pub secret_paths: Vec<PathBuf>,
}

/// Make the token file of a cluster, unless it exists.
#[derive(Debug, Clone, clap::Args)]
struct TokenArgs {
    /// The file to make, which only this user may read. Default: that of a service without --token-file
    #[arg(long, env = "GANTRY_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// The command line of `P`.
pub fn command<P: Program>() -> clap::Command {
    let health = HealthArgs::augment_args(clap::Command::new("health"));
    let token = TokenArgs::augment_args(clap::Command::new("token"));
    let command = P::command()
        .subcommand_negates_reqs(true)
        .args_conflicts_with_subcommands(true)
        .disable_help_subcommand(true)
        .max_term_width(120)
        .after_help(
            "A DURATION is written 500ms, 30s, 10m, 12h or 2d; a number alone is seconds. A flag counts for more than its variable. Spans are \
             sent to a collector where OTEL_EXPORTER_OTLP_ENDPOINT names one.",
        )
        .subcommand(health.about("Ask a service whether it is ready: exits 0 when it is, else 1, and says why"))
        .subcommand(token.about("Make the token file of a cluster, unless it exists, and print its path"));
    // What is said of a group of settings would be said of the command that has them.
    let about = "Bring the database to the schema of this program, and exit";
    let command = match P::migrate_command(clap::Command::new("migrate")) {
        Some(migrate) => command.subcommand(migrate.about(about)),
        None => command,
    };
    command.subcommands(P::commands())
}

/// Runs a service to its end.
pub fn run<P: Program>() -> ExitCode {
    inherited::prepare_service();
    let command = command::<P>();
    let matches = match command.clone().try_get_matches() {
        // A variable that is misspelled is the better explanation for a setting that is missing.
        Err(error) if error.use_stderr() => {
            if let Some(renamed) = settings::renamed_flag(&error) {
                eprintln!("{}: {renamed}", P::NAME);
                return ExitCode::FAILURE;
            }
            if let Err(unknown) = settings::check_environment(&command, environment()) {
                eprintln!("{}: {unknown}", P::NAME);
                return ExitCode::FAILURE;
            }
            error.exit()
        }
        Err(help) => help.exit(),
        Ok(matches) => matches,
    };
    let done = settings::check_environment(&command, environment())
        .map_err(anyhow::Error::from)
        .and_then(|()| run_subcommand::<P>(&command, &matches));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", P::NAME);
            ExitCode::FAILURE
        }
    }
}

fn environment() -> impl Iterator<Item = (String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}

fn run_subcommand<P: Program>(command: &clap::Command, matches: &ArgMatches) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
    match matches.subcommand() {
        Some(("health", matches)) => {
            print_line(&runtime.block_on(check_health(HealthArgs::from_arg_matches(matches)?))?)
        }
        Some(("token", matches)) => print_line(&make_token(TokenArgs::from_arg_matches(matches)?)?),
        Some(("migrate", matches)) => print_line(&runtime.block_on(P::migrate(matches))?),
        Some((name, matches)) => print_line(&runtime.block_on(P::run_command(name, matches))?),
        None => {
            let program = P::from_arg_matches(matches)?;
            if program.listen().print_config {
                print_line(settings::table(command, matches).trim_end());
                return program.check();
            }
            program.check()?;
            runtime.block_on(serve(program))?;
        }
    }
    Ok(())
}

#[allow(clippy::print_stdout, reason = "it is what was asked for")]
fn print_line(text: &str) {
    println!("{text}");
}

fn make_token(args: TokenArgs) -> anyhow::Result<String> {
    let file = match args.token_file {
        Some(file) => {
            token::make_if_missing(&file)?;
            token::read(&file)?;
            file
        }
        None => {
            let file = token::default_file().context("name a file with --token-file, or set HOME")?;
            token::read_or_make_private(&file)?;
            file
        }
    };
    Ok(file.display().to_string())
}

async fn check_health(args: HealthArgs) -> anyhow::Result<String> {
    let (endpoint, token) = match args.server {
        Some(server) => {
            let token = match &args.token_file {
                Some(file) => Some(token::read(file)?),
                None => token::read_default()?.map(|(_, token)| token),
            };
            (server, token)
        }
        None => {
            // As the environment says it, which a container's health check shares with its service.
            let listen = ListenArgs::augment_args(clap::Command::new("listen")).get_matches_from(["listen"]);
            ListenArgs::from_arg_matches(&listen)?.own_endpoint()?
        }
    };
    health::check(&endpoint, token.as_deref(), &args.service, args.timeout).await.map_err(anyhow::Error::msg)
}

async fn serve<P: Program>(program: P) -> anyhow::Result<()> {
    let _telemetry = program.listen().telemetry(P::NAME)?;
    inherited::warn_of_few_open_files();
    let ServerSetup { listener, token, secret_paths, metrics, drain, probe_interval } =
        program.listen().start().await?;
    let metrics = match metrics {
        Some(listener) => Some((listener, Recorder::install()?)),
        None => None,
    };
    let context = StartContext { endpoint: listener.endpoint()?, token: token.clone(), secret_paths };
    let host = Host { drain, probe_interval, metrics, ..Host::new().with_token(token) };
    host.serve_from_start([listener], shutdown_signal(), |host| Box::pin(program.start(context, host))).await
}
