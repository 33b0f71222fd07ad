//! The settings that every service binary has: where it listens, who may call, where it logs, and how it ends.

use std::convert::Infallible;
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};

use crate::settings::{duration, term};
use crate::telemetry::{self, Telemetry};
use crate::{Drain, Listener, listener, token};

/// The database layer warns of each transaction that SQLite needs no mode for it, and tells of each connection that broke.
const LOGGED: &str = "info,sea_orm=error,sea_orm_migration=warn,sqlx=error";

/// Settings that every service's own binary has.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Settings of every service")]
pub struct ListenArgs {
    /// Where to listen: host:port, or the path of a Unix socket, over which only this user and root may call
    #[arg(long, env = "GANTRY_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: Address,
    /// The file with the token of this cluster, which callers over TCP present, and this service to others. Default: one that is made when it is
    /// missing, $XDG_STATE_HOME/gantry-services/token, or else /var/lib/gantry-services/token for root and
    /// ~/.local/state/gantry-services/token for others
    #[arg(long, env = "GANTRY_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Without --token-file: ask callers over TCP for no token, so that every process that reaches the port may do everything
    #[arg(long, env = "GANTRY_INSECURE", value_parser = clap::builder::BoolishValueParser::new())]
    insecure: bool,
    /// Where to serve /metrics, /healthz and /readyz over plain HTTP: host:port. /metrics wants the token, where the service has one. Default:
    /// nowhere
    #[arg(long, env = "GANTRY_METRICS_LISTEN", value_name = "ADDRESS")]
    metrics_listen: Option<String>,
    /// What is logged: a level (error, warn, info, debug, trace), or target=level pairs with commas between them
    #[arg(long, env = "GANTRY_LOG", value_name = "FILTER", default_value = LOGGED)]
    log: String,
    /// How often what the service needs is checked, such as its database; see docs/operations.md
    #[arg(long, env = "GANTRY_PROBE_INTERVAL", value_name = "DURATION", default_value = "2s", value_parser = term)]
    probe_interval: Duration,
    /// How long the service goes on when it was told to end, not ready any more, so that callers find another one first
    #[arg(long, env = "GANTRY_DRAIN_DELAY", value_name = "DURATION", default_value = "0s", value_parser = duration)]
    drain_delay: Duration,
    /// How long open calls may take to end after that, before they are cut
    #[arg(long, env = "GANTRY_DRAIN_TIMEOUT", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    drain_timeout: Duration,
    /// Print every setting with its value and where it comes from, without secrets, and exit
    #[arg(long)]
    pub(crate) print_config: bool,
}

/// Where to listen.
#[derive(Debug, Clone)]
enum Address {
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(if text.starts_with('/') { Self::Unix(text.into()) } else { Self::Tcp(text.to_owned()) })
    }
}

/// What a service's own binary starts with.
pub(crate) struct ServerSetup {
    /// Where it listens.
    pub(crate) listener: Listener,
    /// The token of the cluster: callers over TCP present it to this service, and this service to others.
    pub(crate) token: Option<String>,
    /// Where tokens are kept on this machine: no container may see these paths.
    pub(crate) secret_paths: Vec<PathBuf>,
    /// Where operators read metrics, if anywhere.
    pub(crate) metrics: Option<TcpListener>,
    pub(crate) drain: Drain,
    pub(crate) probe_interval: Duration,
}

impl ListenArgs {
    /// Sets up logs and traces for `service`. To be kept until the end.
    pub(crate) fn telemetry(&self, service: &'static str) -> anyhow::Result<Telemetry> {
        telemetry::init_filtered(service, &self.log, None)
    }

    /// Reads or makes the token, binds the addresses, and says where they are.
    ///
    /// # Errors
    ///
    /// The token cannot be read or made, or an address cannot be bound.
    pub(crate) async fn start(&self) -> anyhow::Result<ServerSetup> {
        let (listener, token) = self.open().await?;
        let metrics = match &self.metrics_listen {
            Some(address) => {
                let bound = TcpListener::bind(address).await;
                let bound = bound.with_context(|| format!("cannot serve metrics on {address}"))?;
                let address = bound.local_addr()?;
                tracing::info!(endpoint = %address, "metrics");
                if token.is_none() {
                    tracing::warn!("INSECURE: every process that reaches {address} can read the metrics");
                } else {
                    warn_of_dangers(address, true);
                }
                Some(bound)
            }
            None => None,
        };
        let drain = Drain { delay: self.drain_delay, timeout: self.drain_timeout };
        let secret_paths = self.secret_paths();
        Ok(ServerSetup { listener, token, secret_paths, metrics, drain, probe_interval: self.probe_interval })
    }

    fn secret_paths(&self) -> Vec<PathBuf> {
        let default = token::default_file().and_then(|file| Some(file.parent()?.to_owned()));
        let named = self.token_file.as_deref().and_then(|file| std::path::absolute(file).ok());
        default.into_iter().chain(named).collect()
    }

    /// Where this service is reached from the machine that it runs on, and with which token. Makes none.
    pub(crate) fn own_endpoint(&self) -> anyhow::Result<(String, Option<String>)> {
        let token = match &self.token_file {
            Some(file) => Some(token::read(file)?),
            None if self.insecure => None,
            None => token::read_default()?.map(|(_, token)| token),
        };
        let endpoint = match &self.listen {
            Address::Unix(path) => format!("unix://{}", path.display()),
            Address::Tcp(address) => {
                let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
                anyhow::ensure!(
                    port != "0",
                    "the service listens on any free port: name its address with --server, or set GANTRY_LISTEN as for the service"
                );
                let host = match host {
                    "" | "0.0.0.0" => "127.0.0.1",
                    "[::]" => "[::1]",
                    host => host,
                };
                format!("http://{host}:{port}")
            }
        };
        Ok((endpoint, token))
    }

    async fn open(&self) -> anyhow::Result<(Listener, Option<String>)> {
        let token = self.token()?;
        let listener = match &self.listen {
            Address::Unix(path) => Listener::Unix(bind_socket(path).await?),
            Address::Tcp(address) => {
                let listening = format!("cannot listen on {address}");
                let mut found = tokio::net::lookup_host(address).await.with_context(|| listening.clone())?;
                let address = found.next().with_context(|| listening.clone())?;
                let bound = listener::bind(address).context(listening)?;
                warn_of_dangers(bound.local_addr()?, token.is_some());
                if token.is_some() { Listener::Tcp(bound) } else { Listener::InsecureTcp(bound) }
            }
        };
        tracing::info!(endpoint = listener.endpoint()?, "listening");
        Ok((listener, token))
    }

    /// Returns the token of the cluster. Makes the default file if this service needs a token for its callers. `None` over TCP: with
    /// `--insecure` only.
    fn token(&self) -> anyhow::Result<Option<String>> {
        let (file, token) = match (&self.token_file, &self.listen) {
            // A file that was named and is missing may be on a volume that is not mounted: another token would only hide that.
            (Some(file), _) => (file.clone(), token::read(file).map_err(|error| explain(error, file))?),
            (None, _) if self.insecure => return Ok(None),
            (None, Address::Tcp(_)) => {
                let file = token::default_file().context(
                    "there is no place for the default token file: name a file with --token-file, or set XDG_STATE_HOME or HOME",
                )?;
                let token = token::read_or_make_private(&file).context(
                    "cannot use the default token file: name another one with --token-file, or ask for no token with --insecure",
                )?;
                (file, token)
            }
            (None, Address::Unix(_)) => match token::read_default()? {
                Some(found) => found,
                None => return Ok(None),
            },
        };
        tracing::info!(token.file = %file.display(), "callers over TCP must present the token of this file");
        Ok(Some(token))
    }
}

/// Says how to make a token file that was named and is missing.
fn explain(error: anyhow::Error, file: &Path) -> anyhow::Error {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    if cause.is_none_or(|cause| cause.kind() != std::io::ErrorKind::NotFound) {
        return error;
    }
    error.context(format!(
        "there is no token file {}: mount or copy it there, or make one with the subcommand `token --token-file {0}`",
        file.display()
    ))
}

fn warn_of_dangers(address: SocketAddr, token: bool) {
    if !token {
        tracing::warn!(
            "INSECURE: {address} asks for no token, so every process that reaches it may do everything"
        );
    } else if !address.ip().is_loopback() {
        tracing::warn!(
            "INSECURE: nothing is encrypted on {address}, so a listener on the way learns the token"
        );
    }
}

async fn bind_socket(path: &Path) -> anyhow::Result<UnixListener> {
    // One that nobody listens on any more is left from an earlier start.
    if UnixStream::connect(path)
        .await
        .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    let failed = || format!("cannot listen on {}", path.display());
    let listener = UnixListener::bind(path).with_context(failed)?;
    // A caller needs no token here. The listener checks its user, too.
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).with_context(failed)?;
    Ok(listener)
}

/// Resolves when the process is asked to end, by TERM or by INT.
pub async fn shutdown_signal() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("signals cannot be caught: this process will not drain");
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        listen: ListenArgs,
    }

    async fn open(arguments: &[&str]) -> Result<(Listener, Option<String>), String> {
        let program = Program::parse_from(["program"].iter().chain(arguments));
        program.listen.open().await.map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn only_insecure_serves_without_token() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("token");
        std::fs::write(&file, "secret\n").expect("write");
        let file = file.to_str().expect("a path");

        for address in ["127.0.0.1:0", "localhost:0", "0.0.0.0:0"] {
            let (listener, token) =
                open(&["--listen", address, "--token-file", file]).await.expect("a listener");
            assert!(listener.needs_token() && token.as_deref() == Some("secret"), "{address}");
            let (listener, token) = open(&["--listen", address, "--insecure"]).await.expect("a listener");
            assert!(!listener.needs_token() && token.is_none(), "{address}");
            let both = ["--listen", address, "--insecure", "--token-file", file];
            let (listener, token) = open(&both).await.expect("a listener");
            assert!(listener.needs_token() && token.as_deref() == Some("secret"), "{address}");
        }
    }

    #[tokio::test]
    async fn token_file_that_was_named_is_not_made() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("token");
        let refused = open(&["--token-file", file.to_str().expect("a path")]).await.expect_err("refused");
        assert!(refused.contains("`token --token-file "), "{refused}");
        assert!(!file.exists());
    }

    #[test]
    fn token_files_are_secret_paths() {
        let paths = Program::parse_from(["program", "--token-file", "relative/token"]).listen.secret_paths();
        let here = std::env::current_dir().expect("a directory");
        assert!(paths.contains(&here.join("relative/token")), "{paths:?}");
        let default = token::default_file().expect("a default file");
        assert!(paths.iter().any(|path| default.starts_with(path)), "{paths:?}");
    }

    #[tokio::test]
    async fn a_token_that_is_none_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("token");
        for text in ["", " \n", "two words", "gr\u{fc}n"] {
            std::fs::write(&file, text).expect("write");
            let refused = open(&["--token-file", file.to_str().expect("a path")]).await;
            assert!(refused.is_err_and(|error| error.contains("token")), "{text:?}");
        }
    }

    #[tokio::test]
    async fn a_socket_that_was_left_is_replaced_and_one_in_use_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let path = path.to_str().expect("a path");
        let (first, _) = open(&["--listen", path]).await.expect("a listener");
        let mode = std::fs::metadata(path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "whoever may open it may do everything");
        let used = open(&["--listen", path]).await;
        assert!(used.is_err_and(|error| error.contains("cannot listen")));
        drop(first);
        let (again, _) = open(&["--listen", path]).await.expect("a listener");
        assert_eq!(again.endpoint().expect("its address"), format!("unix://{path}"));
    }
}
