//! Commands of `gantry`, one module each.
//!
//! No command uses another one. Shared code is in the other modules.

mod cat;
mod clear_cache;
mod complete;
mod config;
mod delete;
mod demand;
mod doctor;
mod download;
mod exec;
mod explain;
mod list;
mod logs;
mod manual;
mod orphans;
mod pull;
mod run;
mod schema;
mod status;
mod top;
mod undelete;
mod upload;
mod validate;
mod workers;

pub(crate) use doctor::doctor;

use anyhow::Context;
use serde_json::json;
use server::telemetry;

use crate::cli::args::{Command, Global};
use crate::cli::environment::exports_spans;
use crate::client::connect::Connection;
use crate::cluster;
use crate::ending::error::Interrupted;
use crate::ending::signals::Signals;
use crate::render::stdout;
use crate::render::ui::Ui;

/// Executes a command other than `gantry doctor`, and returns the exit code.
pub(crate) async fn execute(command: &Command, global: &Global, ui: &Ui) -> anyhow::Result<u8> {
    match command {
        Command::Up(_) => validate::here("up", global, ui)?,
        Command::Down(_) => validate::here("down", global, ui)?,
        Command::List(args) => validate::list(args)?,
        Command::Show(args) => validate::id(args)?,
        Command::Exec(args) => validate::exec(args)?,
        _ => {}
    }
    match command {
        Command::Up(args) => return cluster::up(args, ui, global.json).await,
        Command::Down(args) => return cluster::down(args, ui, global.json).await.map(|()| 0),
        Command::Status(args) => return status::status(args, global).await,
        Command::Top(args) => return top::top(args, global).await,
        Command::Config(args) => return config::config(args, global, ui).map(|()| 0),
        Command::Completion(args) => return manual::completion(args).map(|()| 0),
        Command::CompleteWords(args) => return complete::complete(args).await.map(|()| 0),
        Command::Man(args) => return manual::manual(args).map(|()| 0),
        Command::Schema(args) => return schema::schema(args).map(|()| 0),
        Command::Version => return version(global).map(|()| 0),
        Command::Run(args) => {
            validate::run(args)?;
            return run::run(args, global, ui).await;
        }
        _ => {}
    }
    match command {
        Command::Upload(args) => {
            validate::upload(args).with_context(|| format!("cannot upload {:?}", args.directory))?;
        }
        Command::Download(args) => validate::target(&args.directory, args.replace, args.allow.follow_links)
            .with_context(|| format!("cannot download into {:?}", args.directory))?,
        _ => {}
    }
    let _telemetry = exports_spans().then(|| telemetry::init("gantry", "warn", None)).transpose()?;
    let connection = Connection::open(global, ui).await?;
    match command {
        Command::Exec(args) => return exec::exec(args, &connection, ui).await,
        Command::Attach(args) => return logs::attach_to(args, &connection, ui).await,
        Command::Logs(args) => return logs::logs(args, &connection, ui).await.map(|()| 0),
        Command::Watch(args) => return logs::watch(args, &connection, global.json).await,
        Command::Wait(args) => return logs::wait(args, &connection, global.json).await,
        _ => {}
    }
    let mut signals = Signals::catch()?;
    tokio::select! {
        answered = answer(command, &connection, ui, global) => answered.map(|()| 0),
        code = signals.next() => Err(Interrupted(code).into()),
    }
}

/// Executes a command that may be interrupted at any point.
async fn answer(command: &Command, connection: &Connection, ui: &Ui, global: &Global) -> anyhow::Result<()> {
    let as_json = global.json;
    match command {
        Command::Explain(args) => explain::explain(connection, args, as_json).await?,
        Command::Cancel(args) => logs::cancel(args, connection, ui, as_json).await?,
        Command::Pull(args) => pull::pull(connection, ui, args, as_json).await?,
        Command::Images => list::images(connection, as_json).await?,
        Command::Upload(args) => upload::upload(connection, ui, args, as_json).await?,
        Command::Download(args) => download::download(connection, ui, args, as_json).await?,
        Command::Cat(args) => cat::cat(args, connection, as_json).await?,
        Command::Cp(args) => cat::cp(args, connection, ui, as_json).await?,
        Command::Kill(args) => logs::kill(args, connection, ui, as_json).await?,
        Command::Ps(args) => list::ps(connection, args, global.quiet, as_json).await?,
        Command::List(args) => list::list(connection, args, as_json).await?,
        Command::Inspect(args) => list::inspect(connection, ui, args).await?,
        Command::Show(args) => list::show(connection, ui, args, as_json).await?,
        Command::ClearCache(args) => clear_cache::clear(connection, args, as_json).await?,
        Command::Gc(args) => delete::gc(connection, args, as_json).await?,
        Command::Adopt(args) => orphans::adopt(connection, args, as_json).await?,
        Command::Purge(args) => orphans::purge(connection, args, as_json).await?,
        Command::Cordon(args) => workers::cordon(connection, ui, args, as_json).await?,
        Command::Uncordon(args) => workers::uncordon(connection, args, as_json).await?,
        Command::Retire(args) => workers::retire(connection, ui, args, as_json).await?,
        Command::Prune(args) => match &args.worker {
            Some(worker) => workers::prune(connection, worker, args.force, as_json).await?,
            None => delete::prune(connection, ui, args.yes, as_json).await?,
        },
        Command::Demand => demand::demand(connection, as_json).await?,
        Command::Delete(args) => delete::delete(connection, ui, args, as_json).await?,
        Command::Rmi(args) => delete::delete_images(connection, ui, args, as_json).await?,
        Command::Undelete(args) => undelete::undelete(connection, args, as_json).await?,
        Command::Exec(_) | Command::Attach(_) | Command::Logs(_) | Command::Watch(_) => {}
        Command::Wait(_) | Command::Run(_) => {}
        Command::Up(_) | Command::Down(_) | Command::Status(_) | Command::Top(_) | Command::Version => {}
        Command::Config(_) | Command::Completion(_) | Command::CompleteWords(_) => {}
        Command::Man(_) | Command::Schema(_) | Command::Doctor => {}
    }
    Ok(())
}

fn version(global: &Global) -> anyhow::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    if global.json {
        stdout::print_json(&json!({ "version": version }))
    } else {
        stdout::print(&format!("gantry {version}\n"))
    }
}
