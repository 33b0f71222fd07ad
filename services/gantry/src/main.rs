//! The command line `gantry`, and the cluster on this machine.
//!
//! ```text
//! main ─▶ commands ─▶ follow ─▶ transfer ─▶ client ─▶ cluster ─▶ cli ─▶ render ─▶ ending
//! ```
//!
//! A module may use only the modules to its right; `make house` checks that. Answers go to
//! standard output, everything else to standard error. `main` prints each failure once, in one
//! sentence.

mod commands;

mod follow;

mod transfer;

mod client;

mod cluster;

mod cli;

mod render;

mod ending;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};
use serde_json::json;
use server::inherited::{self, AttributeError};
use server::settings;
use tokio::runtime::{Builder, Runtime};

use crate::cli::args::{Cli, Command, Global};
use crate::cli::contexts::{self, Contexts, Sources};
use crate::cli::{environment, interactive, renamed};
use crate::client::token::ClusterOptions;
use crate::ending::error::{self, Interrupted};
use crate::ending::exit_code;
use crate::render::stdout;
use crate::render::ui::Ui;

fn main() -> ExitCode {
    // This must happen before a thread starts: only a process with a single thread can make a
    // container.
    if let Some(code) = runtime_gateway::host::supervise_if_asked(std::env::args_os()) {
        return code;
    }
    // A write beyond `ulimit -f` becomes an error instead of killing the process.
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let (mut cli, sources) = match parse() {
        Ok(parsed) => parsed,
        Err(error) => {
            // An error here means that the output is closed.
            _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit_code::GANTRY_FAILED } else { 0 });
        }
    };
    let not_set = match &cli.command {
        Command::Up(args) if args.detached => detach(),
        Command::Up(_) => {
            inherited::prepare_service();
            Vec::new()
        }
        _ => Vec::new(),
    };
    let ui = match &cli.command {
        Command::Run(_) | Command::Attach(_) | Command::Exec(_) | Command::Logs(_) => {
            Ui::with_events(cli.global.quiet, cli.global.json)
        }
        _ => Ui::new(cli.global.quiet),
    };
    not_set.iter().for_each(|not_set| ui.warn(&not_set.to_string()));
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let variables: Vec<_> = variables.collect();
    settings::misspelled_variables(variables.clone()).iter().for_each(|warning| ui.warn(warning));
    let renamed = settings::renamed_variable(variables);
    let allowed = renamed.map_or(Ok(()), |renamed| Err(anyhow::Error::from(renamed)));
    let allowed = allowed.and_then(|()| apply_context(&mut cli, sources));
    // This must also happen before a thread starts.
    let entered = allowed.and_then(|()| match &cli.command {
        Command::Up(_) => cluster::enter_user_namespace(),
        _ => Ok(()),
    });
    let execute = |runtime: Runtime| {
        let result = runtime.block_on(commands::execute(&cli.command, &cli.global, &ui));
        // Interrupted tasks remove their temporary files. The thread that reads standard input may
        // never end.
        runtime.shutdown_timeout(CLEANUP_LIMIT);
        result
    };
    let result = entered.and_then(|()| match &cli.command {
        // Its checks enter a user namespace, too.
        Command::Doctor => commands::doctor(cli.global.json),
        command => runtime(command).and_then(execute),
    });
    let code = result.unwrap_or_else(|error| fail(&ui, &cli.global, &error));
    ui.finish();
    ExitCode::from(code)
}

fn parse() -> Result<(Cli, Sources), clap::Error> {
    let arguments: Vec<_> = std::env::args_os().collect();
    let matches = Cli::command().try_get_matches_from(&arguments).or_else(|error| {
        match interactive::with_terminal(&error, &arguments) {
            Some(corrected) => Cli::command().try_get_matches_from(corrected),
            None => Err(error),
        }
    });
    let matches = matches.map_err(renamed::explain)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.global.server_given = matches.value_source("server") == Some(ValueSource::CommandLine);
    Ok((cli, Sources::of(&matches)))
}

/// Fills in the options that select the cluster from the context, if the command uses a cluster
/// other than that on this machine.
fn apply_context(cli: &mut Cli, sources: Sources) -> anyhow::Result<()> {
    match cli.command {
        Command::Up(_) | Command::Down(_) | Command::Config(_) => Ok(()),
        Command::Completion(_) | Command::CompleteWords(_) => Ok(()),
        Command::Man(_) | Command::Doctor | Command::Version => Ok(()),
        _ => {
            let contexts = match Contexts::path() {
                Ok(path) => Contexts::read(&path)?,
                // Without a home directory there are no contexts.
                Err(_) if cli.global.context.is_none() => Contexts::default(),
                Err(error) => return Err(error),
            };
            contexts::apply(&mut cli.global, sources, &contexts)
        }
    }
}

/// Time limit for interrupted tasks to remove their temporary files.
const CLEANUP_LIMIT: Duration = Duration::from_secs(5);

/// Prints why the command failed, and returns the exit code. With `--json`, the failure is also an
/// answer.
fn fail(ui: &Ui, global: &Global, error: &anyhow::Error) -> u8 {
    let (code, ended) = match error.downcast_ref() {
        Some(Interrupted(code)) => (*code, json!({ "outcome": "interrupted", "status": code })),
        None => {
            let (server, token_file) = (global.server.as_deref(), global.token_file.as_deref());
            let message =
                error::describe_with(error, |reason| ClusterOptions { server, token_file }.advice(reason));
            ui.error(&message);
            let failure = json!({ "reason": error::reason(error), "message": message });
            (
                exit_code::GANTRY_FAILED,
                json!({ "outcome": "errored", "failure": failure, "status": exit_code::GANTRY_FAILED }),
            )
        }
    };
    if global.json && ui.events().is_none() && code != exit_code::PIPE {
        // An error here means that standard output is closed.
        _ = stdout::print_json(&ended);
    }
    ui.event("finished", ended);
    code
}

/// Builds the runtime of the command.
///
/// `gantry up` uses all cores. Other commands start faster with a single thread, unless spans are
/// exported: the exporter works while the main thread waits for it.
fn runtime(command: &Command) -> anyhow::Result<Runtime> {
    let mut builder = match command {
        Command::Up(_) => Builder::new_multi_thread(),
        _ if environment::exports_spans() => Builder::new_multi_thread(),
        _ => Builder::new_current_thread(),
    };
    builder.enable_all().build().context("cannot start the async runtime")
}

/// Makes this process independent of the command that started it: a separate session, no inherited
/// file except the log, and no inherited limits. Returns the limits that could not be set.
fn detach() -> Vec<AttributeError> {
    // This fails only for the leader of a process group, which is already independent.
    _ = rustix::process::setsid();
    // SAFETY: this process has not opened a file yet, so no code here owns a descriptor beyond
    // standard error.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    inherited::prepare_cluster()
}
