//! The command line of a service binary: settings, subcommands and the server.
//!
//! ```text
//! SERVICE [settings]         serve until TERM or INT
//! SERVICE --print-config     print the settings and their sources
//! SERVICE migrate            migrate the database, if the service has one
//! SERVICE health             check whether a running service is ready
//! SERVICE token              create the token file of a cluster
//! SERVICE ...                further commands of the service
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

/// A service binary.
pub trait Program: CommandFactory + FromArgMatches + Send + Sync + 'static {
    /// Name of the service in logs and traces.
    const NAME: &'static str;

    /// Returns the settings that every service has.
    fn listen(&self) -> &ListenArgs;

    /// Checks that the settings can be used together. Has no side effects.
    fn check(&self) -> anyhow::Result<()>;

    /// Changes attributes of the process that must be set before any thread exists.
    fn prepare(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// Adds the settings of [`Program::migrate`] to `command`. Returns `None` if the service has no
    /// database.
    fn migrate_command(command: clap::Command) -> Option<clap::Command> {
        drop(command);
        None
    }

    /// Migrates the database. Returns a message for the operator.
    fn migrate(matches: &ArgMatches) -> impl Future<Output = anyhow::Result<String>> + Send {
        let _ = matches;
        async { anyhow::bail!("cannot migrate: the service has no database") }
    }

    /// Returns the further commands of the service, with their settings.
    fn commands() -> Vec<clap::Command> {
        Vec::new()
    }

    /// Runs one of [`Program::commands`]. Returns a message for the operator.
    fn run_command(name: &str, matches: &ArgMatches) -> impl Future<Output = anyhow::Result<String>> + Send {
        let (_, name) = (matches, name.to_owned());
        async move { anyhow::bail!("cannot run {name}: the command is unknown") }
    }

    /// Adds the service to `host`. The host drops the future at shutdown.
    fn start(self, context: StartContext, host: &mut Host)
    -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// Parameters of the start of a service.
#[derive(Debug, Clone)]
pub struct StartContext {
    /// Address of the service: `unix:///path` or `http://host:port`.
    pub endpoint: String,
    /// Token of the cluster. Callers over TCP present it to this service, and this service presents
    /// it to other services.
    pub token: Option<String>,
    /// Paths of token files on this machine. No container may see them.
    pub secret_paths: Vec<PathBuf>,
}

/// Create the token file of a cluster, unless it exists
#[derive(Debug, Clone, clap::Args)]
struct TokenArgs {
    /// File to create. Only this user may read it. Default: the default token file of services
    #[arg(long, env = "GANTRY_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Returns the command line of `P`.
pub fn command<P: Program>() -> clap::Command {
    let health = HealthArgs::augment_args(clap::Command::new("health"));
    let token = TokenArgs::augment_args(clap::Command::new("token"));
    let command = P::command()
        .subcommand_negates_reqs(true)
        .args_conflicts_with_subcommands(true)
        .disable_help_subcommand(true)
        .max_term_width(120)
        .after_help(
            "A DURATION is for example 500ms, 30s, 10m, 12h or 2d; a plain number is seconds. A flag overrides its environment variable. If \
             OTEL_EXPORTER_OTLP_ENDPOINT is set, spans are sent to the collector at that address.",
        )
        .subcommand(
            health.about("Check whether a service is ready: exit with 0 if so, otherwise print the reason and exit with 1"),
        )
        .subcommand(token.about("Create the token file of a cluster, unless it exists, and print its path"));
    // The text replaces the description that the command would take from its group of settings.
    let about = "Migrate the database to the schema of this program, and exit";
    let command = match P::migrate_command(clap::Command::new("migrate")) {
        Some(migrate) => command.subcommand(migrate.about(about)),
        None => command,
    };
    command.subcommands(P::commands())
}

/// Runs the command line of a service, and returns its exit code.
pub fn run<P: Program>() -> ExitCode {
    inherited::prepare_service();
    let command = command::<P>();
    let matches = match command.clone().try_get_matches() {
        // A misspelled variable explains a missing setting better than clap does.
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
    let Some(subcommand) = matches.subcommand() else {
        let program = P::from_arg_matches(matches)?;
        if program.listen().print_config {
            print_line(settings::table(command, matches).trim_end());
            return program.check();
        }
        program.check()?;
        program.prepare()?;
        return runtime()?.block_on(serve(program));
    };
    let runtime = runtime()?;
    match subcommand {
        ("health", matches) => {
            print_line(&runtime.block_on(check_health(HealthArgs::from_arg_matches(matches)?))?)
        }
        ("token", matches) => print_line(&make_token(TokenArgs::from_arg_matches(matches)?)?),
        ("migrate", matches) => print_line(&runtime.block_on(P::migrate(matches))?),
        (name, matches) => print_line(&runtime.block_on(P::run_command(name, matches))?),
    }
    Ok(())
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the async runtime")
}

#[allow(clippy::print_stdout, reason = "the text is the result of the command")]
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
            let file = token::default_file()
                .context("cannot find the default token file: set HOME, or name a file with --token-file")?;
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
            // The health check of a container has the environment of its service.
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
