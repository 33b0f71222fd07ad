//! The command line, and the cluster on this machine.
//!
//! ```text
//! main ─▶ commands ─▶ follow ─▶ transfer ─▶ client ─▶ cluster ─▶ cli ─▶ render ─▶ ending
//! ```
//!
//! Each chapter uses those to its right only; `make house` checks that. Answers go to standard output, everything else to standard error.
//! A failure is printed once, here, in one sentence.

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
use crate::cli::{environment, renamed};
use crate::client::token::ClusterOptions;
use crate::ending::error::{self, Interrupted};
use crate::ending::exit_code;
use crate::render::stdout;
use crate::render::ui::Ui;

fn main() -> ExitCode {
    // Before any thread exists: a container is made by a process that has only one.
    if let Some(code) = runtime_gateway::host::supervise_if_asked(std::env::args_os()) {
        return code;
    }
    // A write beyond `ulimit -f` is an error like any other, and no end without a word.
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) => {
            // When that cannot be written, nobody reads it.
            _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit_code::OURS } else { 0 });
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
        Command::Run(_) | Command::Attach(_) | Command::Logs(_) => {
            Ui::with_events(cli.global.quiet, cli.global.json)
        }
        _ => Ui::new(cli.global.quiet),
    };
    not_set.iter().for_each(|not_set| ui.warn(&not_set.to_string()));
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let variables: Vec<_> = variables.collect();
    settings::misspelled_variables(variables.clone()).iter().for_each(|what| ui.warn(what));
    let renamed = settings::renamed_variable(variables);
    let allowed = renamed.map_or(Ok(()), |renamed| Err(anyhow::Error::from(renamed)));
    let result = allowed.and_then(|()| runtime(&cli.command)).and_then(|runtime| {
        let result = runtime.block_on(commands::execute(&cli.command, &cli.global, &ui));
        // What was interrupted tidies up. What reads our standard input is a thread of its own, and may never end.
        runtime.shutdown_timeout(TIDY_UP);
        result
    });
    let code = result.unwrap_or_else(|error| fail(&ui, &cli.global, &error));
    ui.finish();
    ExitCode::from(code)
}

fn parse() -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches().map_err(renamed::explain)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.global.server_given = matches.value_source("server") == Some(ValueSource::CommandLine);
    Ok(cli)
}

/// How long what was interrupted may take to remove what it has half made.
const TIDY_UP: Duration = Duration::from_secs(5);

/// Says why the command failed, and answers the exit code. With `--json` a failure is an answer, too.
fn fail(ui: &Ui, global: &Global, error: &anyhow::Error) -> u8 {
    let (code, ended) = match error.downcast_ref() {
        Some(Interrupted(code)) => (*code, json!({ "outcome": "interrupted", "status": code })),
        None => {
            let (server, token_file) = (global.server.as_deref(), global.token_file.as_deref());
            let message =
                error::describe_with(error, |reason| ClusterOptions { server, token_file }.advice(reason));
            ui.error(&message);
            let failure = json!({ "reason": error::reason(error), "message": message });
            (exit_code::OURS, json!({ "outcome": "errored", "failure": failure, "status": exit_code::OURS }))
        }
    };
    if global.json && ui.events().is_none() && code != exit_code::PIPE {
        // When that cannot be written, nobody reads it.
        _ = stdout::print_json(&ended);
    }
    ui.event("finished", ended);
    code
}

/// A cluster has all cores. Whoever calls one needs no more than a thread, and starts sooner with it; but spans are sent to a
/// collector while the main thread waits for that.
fn runtime(command: &Command) -> anyhow::Result<Runtime> {
    let mut builder = match command {
        Command::Up(_) => Builder::new_multi_thread(),
        _ if environment::exports_spans() => Builder::new_multi_thread(),
        _ => Builder::new_current_thread(),
    };
    builder.enable_all().build().context("cannot start")
}

/// Makes this process independent of the command that started it: a session of its own, no file of the command but the log, and none
/// of its limits. Answers what could not be set.
fn detach() -> Vec<AttributeError> {
    // It fails only for the leader of a process group, which is independent enough.
    _ = rustix::process::setsid();
    // SAFETY: nothing in this process has opened a file yet, so whatever is open beyond standard error belongs to nobody here.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    inherited::prepare_cluster()
}
