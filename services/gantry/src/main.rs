//! The command line, and the cluster on this machine.
//!
//! ```text
//! args ─▶ main ─▶ connect ─▶ run ── upload ─▶ follow ── watch, attach ─▶ download
//!            │        └────▶ list · logs · …     └ output, stdin, signals
//!            └──▶ cluster: start · up · down · status
//! ```
//!
//! Answers go to standard output, everything else to standard error. Whatever fails is said once, here, in one sentence.

mod addresses;
mod args;
mod attach;
mod caches;
mod cat;
mod check;
mod cluster;
mod connect;
mod delete;
mod demand;
mod directories;
mod download;
mod error;
mod exit;
mod explain;
mod follow;
mod hint;
mod imports;
mod json;
mod landing;
mod lease;
mod list;
mod logs;
mod names;
mod narrate;
mod outage;
mod output;
mod progress;
mod queries;
mod rules;
mod run;
mod screen;
mod set_aside;
mod signals;
mod status;
mod stdin;
mod stdout;
mod table;
mod target;
mod token;
mod trace;
mod tree;
mod ui;
mod upload;
mod values;
mod watch;
mod why;
mod words;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};
use serde_json::json;
use server::inherited::{self, NotSet};
use server::settings;
use server::telemetry::{self, RecentSpans, Telemetry};
use tokio::runtime::{Builder, Runtime};
use tracing::{Instrument, info_span};

use crate::args::{Cli, Command, Global, RunArgs};
use crate::connect::Connection;
use crate::error::{Interrupted, Told};
use crate::signals::Signals;
use crate::ui::Ui;

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
            if let Some(renamed) = settings::renamed_flag(&error) {
                eprintln!("gantry: {renamed}");
                return ExitCode::from(exit::OURS);
            }
            // When that cannot be written, nobody reads it.
            _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit::OURS } else { 0 });
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
        Command::Run(_) | Command::Attach(_) | Command::Logs(_) => Ui::with_events(&cli.global),
        _ => Ui::new(&cli.global),
    };
    not_set.iter().for_each(|not_set| ui.warn(&not_set.to_string()));
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let variables: Vec<_> = variables.collect();
    settings::misspelt(variables.clone()).iter().for_each(|what| ui.warn(what));
    let renamed = settings::renamed_variable(variables);
    let allowed = renamed.map_or(Ok(()), |renamed| Err(anyhow::Error::from(renamed)));
    let result = allowed.and_then(|()| runtime(&cli.command)).and_then(|runtime| {
        let result = runtime.block_on(execute(&cli.command, &cli.global, &ui));
        // What was interrupted tidies up. What reads our standard input is a thread of its own, and may never end.
        runtime.shutdown_timeout(TIDY_UP);
        result
    });
    let code = result.unwrap_or_else(|error| fail(&ui, &cli.global, &error));
    ui.finish();
    ExitCode::from(code)
}

fn parse() -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches()?;
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
            let message = error::describe_told(Told { server, token_file }, error);
            ui.error(&message);
            let failure = json!({ "reason": error::reason(error), "message": message });
            (exit::OURS, json!({ "outcome": "errored", "failure": failure, "status": exit::OURS }))
        }
    };
    if global.json && ui.events().is_none() && code != exit::PIPE {
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
        _ if exports_spans() => Builder::new_multi_thread(),
        _ => Builder::new_current_thread(),
    };
    builder.enable_all().build().context("cannot start")
}

fn exports_spans() -> bool {
    std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some_and(|endpoint| !endpoint.is_empty())
}

async fn execute(command: &Command, global: &Global, ui: &Ui) -> anyhow::Result<u8> {
    match command {
        Command::Up(_) => check::here("up", global, ui)?,
        Command::Down(_) => check::here("down", global, ui)?,
        Command::List(args) => check::list(args)?,
        Command::Show(args) => check::id(args)?,
        _ => {}
    }
    match command {
        Command::Up(args) => return cluster::up(args, ui, global.json).await,
        Command::Down(args) => return cluster::down(args, ui, global.json).await.map(|()| 0),
        Command::Status(args) => return status::status(args, global).await,
        Command::Version => return version(global).map(|()| 0),
        Command::Run(args) => return run(args, global, ui).await,
        _ => {}
    }
    match command {
        Command::Upload(args) => {
            check::upload(args).with_context(|| format!("cannot upload {:?}", args.directory))?;
        }
        Command::Download(args) => check::target(&args.directory, args.replace, args.take.follow_links)
            .with_context(|| format!("cannot download into {:?}", args.directory))?,
        _ => {}
    }
    let _telemetry = exports_spans().then(|| telemetry::init("gantry", "warn", None)).transpose()?;
    let connection = Connection::open(global, ui).await?;
    match command {
        Command::Attach(args) => return logs::attach_to(args, &connection, ui).await,
        Command::Logs(args) => return logs::logs(args, &connection, ui).await.map(|()| 0),
        Command::Watch(args) => return logs::watch(args, &connection, ui, global.json).await,
        _ => {}
    }
    let mut signals = Signals::catch()?;
    tokio::select! {
        answered = answer(command, &connection, ui, global.json) => answered.map(|()| 0),
        code = signals.next() => Err(Interrupted(code).into()),
    }
}

/// Commands that may be interrupted at any point.
async fn answer(command: &Command, connection: &Connection, ui: &Ui, as_json: bool) -> anyhow::Result<()> {
    match command {
        Command::Explain(args) => explain::whatever(connection, args, as_json).await?,
        Command::Cancel(args) => logs::cancel(args, connection, ui, as_json).await?,
        Command::Upload(args) => {
            let artifact = upload::command(connection, ui, args).await?;
            if let Some(name) = &args.resource_type {
                imports::put_type(connection, name, &args.type_version, artifact).await?;
            }
            if as_json {
                stdout::print_json(&json!({ "artifact_id": artifact.to_string() }))?;
            } else {
                stdout::print(&format!("{artifact}\n"))?;
            }
        }
        Command::Download(args) => {
            let progress = ui.progress("downloading");
            let downloader =
                download::Downloader { connection, ui, replace: args.replace, take: args.take, progress };
            let name = args.artifact.to_string();
            let downloaded = downloader.download(args.artifact, &name, &args.directory, None).await?;
            if as_json {
                stdout::print_json(&downloaded.details)?;
            }
        }
        Command::Cat(args) => cat::cat(args, connection, as_json).await?,
        Command::List(args) => list::list(connection, args, as_json).await?,
        Command::Show(args) => list::show(connection, args, as_json).await?,
        Command::ClearCache(args) => caches::clear(connection, args, as_json).await?,
        Command::Gc(args) => delete::gc(connection, args, as_json).await?,
        Command::Adopt(args) => set_aside::adopt(connection, args, as_json).await?,
        Command::Purge(args) => set_aside::purge(connection, args, as_json).await?,
        Command::Land(args) => landing::land(connection, ui, args, as_json).await?,
        Command::Unland(args) => landing::unland(connection, args, as_json).await?,
        Command::Retire(args) => landing::retire(connection, ui, args, as_json).await?,
        Command::Prune(args) => landing::prune(connection, args, as_json).await?,
        Command::Demand => demand::demand(connection, as_json).await?,
        Command::Delete(args) => delete::delete(connection, ui, args, as_json).await?,
        Command::Undelete(args) => why::undelete(connection, args, as_json).await?,
        Command::Attach(_) | Command::Logs(_) | Command::Watch(_) | Command::Run(_) => {}
        Command::Up(_) | Command::Down(_) | Command::Status(_) | Command::Version => {}
    }
    Ok(())
}

/// `gantry run`, traced when that is asked for.
async fn run(args: &RunArgs, global: &Global, ui: &Ui) -> anyhow::Result<u8> {
    check::run(args)?;
    let spans = args.trace.is_some().then(RecentSpans::default);
    let telemetry: Option<Telemetry> = (spans.is_some() || exports_spans())
        .then(|| telemetry::init("gantry", "warn", spans.clone()))
        .transpose()?;
    let connection = Connection::open(global, ui).await?;

    let root = info_span!(target: "gantry", "gantry run", service = "gantry");
    let (trace_id, result) = async {
        let result = run::run(args, &connection, ui, global.json).await;
        (trace::current_id(), result)
    }
    .instrument(root)
    .await;

    if let (Some(file), Some(spans), Some(trace_id)) = (&args.trace, &spans, trace_id)
        && let Err(error) =
            trace::write((file, args.take.follow_links), &trace_id, spans, &connection, ui).await
    {
        ui.warn(&error::describe(&error));
    }
    drop(telemetry);
    result
}

fn version(global: &Global) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    if global.json {
        stdout::print_json(&json!({ "version": version }))
    } else {
        stdout::print(&format!("gantry {version}\n"))
    }
}

/// Makes this process independent of the command that started it: a session of its own, no file of the command but the log, and none
/// of its limits. Answers what could not be set.
fn detach() -> Vec<NotSet> {
    // It fails only for the leader of a process group, which is independent enough.
    _ = rustix::process::setsid();
    // SAFETY: nothing in this process has opened a file yet, so whatever is open beyond standard error belongs to nobody here.
    unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    inherited::prepare_cluster()
}
