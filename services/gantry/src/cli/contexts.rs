//! Contexts: clusters with names, in a file of the user.
//!
//! A context has the values of `--server`, `--proxy`, `--token-file` and `--team`. `main` applies
//! one to the options of a command before the command starts. The file never holds a token.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use serde::{Deserialize, Serialize};

use crate::cli::addresses::Addresses;
use crate::cli::args::Global;

/// Name of the cluster on this machine. It is no entry of the file.
pub(crate) const LOCAL: &str = "local";

/// Contexts of the user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Contexts {
    /// Context of commands that name none. `None`: the cluster on this machine.
    pub(crate) current: Option<String>,
    pub(crate) contexts: BTreeMap<String, Context>,
}

/// A cluster, as the options that select it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Context {
    pub(crate) server: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) proxy: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) token_file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) team: Option<String>,
}

impl Contexts {
    /// Returns the path of the file: `$XDG_CONFIG_HOME/gantry/contexts.json`.
    pub(crate) fn path() -> anyhow::Result<PathBuf> {
        let absolute = |path: &PathBuf| path.is_absolute();
        let configured = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(absolute);
        let home = || std::env::home_dir().filter(absolute).map(|home| home.join(".config"));
        match configured.or_else(home) {
            Some(directory) => Ok(directory.join("gantry/contexts.json")),
            None => bail!("cannot find a place for contexts; set XDG_CONFIG_HOME or HOME"),
        }
    }

    /// Reads the file. A missing file has no contexts.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let contexts: Self = serde_json::from_slice(&text)
            .with_context(|| format!("cannot parse {}; correct or remove it", path.display()))?;
        for (name, context) in &contexts.contexts {
            if let Err(why) = Addresses::parse(&context.server) {
                bail!("context {name:?} in {}: {why}", path.display());
            }
        }
        Ok(contexts)
    }

    /// Replaces the file.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let written = || {
            let directory = path.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(directory)?;
            let temporary = path.with_extension(format!("json.{}", std::process::id()));
            std::fs::write(&temporary, format!("{:#}\n", serde_json::to_value(self)?))?;
            std::fs::rename(&temporary, path)
        };
        written().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Returns the context with this name. `None`: the cluster on this machine.
    pub(crate) fn get(&self, name: &str) -> anyhow::Result<Option<&Context>> {
        if name == LOCAL {
            return Ok(None);
        }
        match self.contexts.get(name) {
            Some(context) => Ok(Some(context)),
            None => {
                let names: Vec<_> = self.contexts.keys().map(String::as_str).chain([LOCAL]).collect();
                bail!("there is no context {name:?}; the contexts are {}", names.join(", "))
            }
        }
    }
}

/// Sources of the options that select a cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sources {
    server: Option<ValueSource>,
    proxy: Option<ValueSource>,
    token_file: Option<ValueSource>,
    team: Option<ValueSource>,
}

impl Sources {
    /// Reads the sources of parsed arguments.
    pub(crate) fn of(matches: &ArgMatches) -> Self {
        let source = |id| matches.value_source(id);
        Self {
            server: source("server"),
            proxy: source("proxy"),
            token_file: source("token_file"),
            team: source("team"),
        }
    }
}

/// Fills in the options of a command from its context.
///
/// A context that the command names replaces variables of the environment, but not options of the
/// command line. The current context of the file replaces neither, and `--server` or its variable
/// turns it off.
pub(crate) fn apply(global: &mut Global, sources: Sources, contexts: &Contexts) -> anyhow::Result<()> {
    let is_named = global.context.is_some();
    if is_named && sources.server == Some(ValueSource::CommandLine) {
        bail!("--context and --server both select a cluster; leave out one of them");
    }
    let name = match (&global.context, &contexts.current) {
        (Some(name), _) => name.clone(),
        (None, Some(current)) if global.server.is_none() => current.clone(),
        _ => return Ok(()),
    };
    let is_free = |source: Option<ValueSource>| match source {
        Some(ValueSource::CommandLine) => false,
        Some(ValueSource::EnvVariable) => is_named,
        _ => true,
    };
    let Some(context) = contexts.get(&name)? else {
        if is_named {
            global.server = None;
        }
        return Ok(());
    };
    global.server = Some(context.server.clone());
    if is_free(sources.proxy) {
        global.proxy.clone_from(&context.proxy);
    }
    if is_free(sources.token_file) {
        global.token_file.clone_from(&context.token_file);
    }
    if let Some(team) = context.team.as_ref().filter(|_| is_free(sources.team)) {
        global.team.clone_from(team);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;
    use crate::cli::args::Cli;

    fn contexts(current: Option<&str>) -> Contexts {
        let context = Context {
            server: "http://there:1".to_owned(),
            proxy: None,
            token_file: Some("/token".into()),
            team: Some("builds".to_owned()),
        };
        let contexts = BTreeMap::from([("there".to_owned(), context)]);
        Contexts { current: current.map(str::to_owned), contexts }
    }

    /// Applies contexts to a command line. The variables of the environment are not set in tests.
    fn applied(
        line: &str,
        current: Option<&str>,
    ) -> anyhow::Result<(Option<String>, Option<PathBuf>, String)> {
        let matches = Cli::command().try_get_matches_from(line.split(' ')).expect("parsed");
        let mut cli = Cli::from_arg_matches(&matches).expect("parsed");
        apply(&mut cli.global, Sources::of(&matches), &contexts(current))?;
        let Global { server, token_file, team, .. } = cli.global;
        Ok((server, token_file, team))
    }

    fn there(team: &str) -> (Option<String>, Option<PathBuf>, String) {
        (Some("http://there:1".to_owned()), Some("/token".into()), team.to_owned())
    }

    #[test]
    fn context_fills_in_options_that_are_not_given() {
        let here = (None, None, "main".to_owned());
        assert_eq!(applied("gantry ps", None).expect("applied"), here);
        assert_eq!(applied("gantry ps", Some("there")).expect("applied"), there("builds"));
        assert_eq!(applied("gantry ps --context there", None).expect("applied"), there("builds"));
        assert_eq!(applied("gantry ps --context there --team x", None).expect("applied"), there("x"));
        assert_eq!(applied("gantry ps --context local", Some("there")).expect("applied"), here);
        let other = applied("gantry ps --server http://b:1", Some("there")).expect("applied");
        assert_eq!(other, (Some("http://b:1".to_owned()), None, "main".to_owned()));
        let both = applied("gantry ps --context there --server http://b:1", None).expect_err("refused");
        assert!(both.to_string().contains("leave out one of them"), "{both}");
        let unknown = applied("gantry ps --context here", None).expect_err("refused");
        assert_eq!(unknown.to_string(), "there is no context \"here\"; the contexts are there, local");
    }

    #[test]
    fn file_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("gantry/contexts.json");
        assert_eq!(Contexts::read(&path).expect("no file"), Contexts::default());
        let written = contexts(Some("there"));
        written.write(&path).expect("written");
        assert_eq!(Contexts::read(&path).expect("read"), written);
        std::fs::write(&path, r#"{"contexts": {"a": {"server": "x"}}}"#).expect("written");
        let refused = Contexts::read(&path).expect_err("an invalid address");
        assert!(refused.to_string().starts_with("context \"a\" in "), "{refused}");
        std::fs::write(&path, r#"{"contexts": {}, "curent": "a"}"#).expect("written");
        assert!(format!("{:#}", Contexts::read(&path).expect_err("misspelled")).contains("curent"));
    }
}
