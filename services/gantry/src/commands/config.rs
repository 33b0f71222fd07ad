//! `gantry config`: contexts, which are clusters with names.

use anyhow::bail;
use serde_json::json;

use crate::cli::args::{ConfigArgs, ConfigCommand, Global};
use crate::cli::contexts::{Context, Contexts, LOCAL};
use crate::render::stdout::{print, print_json};
use crate::render::table::{filled, plain};
use crate::render::ui::Ui;

/// Executes `gantry config`.
pub(crate) fn config(args: &ConfigArgs, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    let path = Contexts::path()?;
    let mut contexts = Contexts::read(&path)?;
    match &args.command {
        None | Some(ConfigCommand::List) => return list(&contexts, global.json),
        Some(ConfigCommand::Add { name }) => {
            add(&mut contexts, name, global)?;
            ui.note(&format!("context {name} is written; `gantry config use {name}` selects it"));
        }
        Some(ConfigCommand::Use { name }) => {
            contexts.current = contexts.get(name)?.map(|_| name.clone());
        }
        Some(ConfigCommand::Remove { name }) => {
            if contexts.get(name)?.is_none() {
                bail!("cannot remove context {LOCAL}: it is the cluster on this machine");
            }
            contexts.contexts.remove(name);
            if contexts.current.as_ref() == Some(name) {
                contexts.current = None;
                ui.note("commands use the cluster on this machine from now on");
            }
        }
    }
    contexts.write(&path)
}

fn add(contexts: &mut Contexts, name: &str, global: &Global) -> anyhow::Result<()> {
    if name == LOCAL {
        bail!("cannot add context {LOCAL}: it is the cluster on this machine");
    }
    if let Err(why) = rpc::spec::name::check_text(name) {
        bail!("cannot add context {name:?}: the name {why}");
    }
    let Some(server) = &global.server else {
        bail!("cannot add context {name}: give the address of the cluster with --server");
    };
    let token_file = global.token_file.as_ref().map(std::path::absolute).transpose()?;
    let team = Some(global.team.clone()).filter(|team| team != "main");
    let context = Context { server: server.clone(), proxy: global.proxy.clone(), token_file, team };
    contexts.contexts.insert(name.to_owned(), context);
    Ok(())
}

fn list(contexts: &Contexts, as_json: bool) -> anyhow::Result<()> {
    let current = contexts.current.as_deref().unwrap_or(LOCAL);
    if as_json {
        return print_json(&json!({ "current": current, "contexts": contexts.contexts }));
    }
    let mark = |name: &str| if name == current { "*".to_owned() } else { String::new() };
    let mut rows = vec![vec![LOCAL.to_owned(), mark(LOCAL), "this machine".to_owned()]];
    rows[0].resize(6, String::new());
    rows.extend(contexts.contexts.iter().map(|(name, context)| {
        let path = context.token_file.as_ref().map(|path| path.display().to_string());
        let texts = [context.proxy.as_deref(), path.as_deref(), context.team.as_deref()];
        let mut row = vec![name.clone(), mark(name), plain(&context.server, 200)];
        row.extend(texts.map(|text| plain(text.unwrap_or_default(), 200)));
        row
    }));
    print(&filled(&["NAME", "CURRENT", "SERVER", "PROXY", "TOKEN FILE", "TEAM"], &rows))
}
