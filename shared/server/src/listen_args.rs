//! Settings that every service binary has: its address, the token, the log and the shutdown.

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

/// Default log filter. The database libraries log noise below these levels: a warning for each
/// SQLite transaction with a mode, and each lost connection.
const DEFAULT_LOG_FILTER: &str = "info,sea_orm=error,sea_orm_migration=warn,sqlx=error";

/// Settings that every service binary has.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Settings of every service")]
pub struct ListenArgs {
    /// Address to listen on: host:port, or the path of a Unix socket that admits only this user and
    /// root
    #[arg(long, env = "GANTRY_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: Address,
    /// File with the token of the cluster. Callers over TCP must present the token, and this
    /// service presents it to other services. Default: $XDG_STATE_HOME/gantry-services/token; if
    /// the variable is not set, /var/lib/gantry-services/token for root, and
    /// ~/.local/state/gantry-services/token for other users. A missing default file is created
    #[arg(long, env = "GANTRY_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Without --token-file: require no token over TCP. Every process that can connect then has
    /// full access
    #[arg(long, env = "GANTRY_INSECURE", value_parser = clap::builder::BoolishValueParser::new())]
    insecure: bool,
    /// Address of /metrics, /healthz and /readyz over plain HTTP: host:port. /metrics requires the
    /// token if the service has one. Default: they are not served
    #[arg(long, env = "GANTRY_METRICS_LISTEN", value_name = "ADDRESS")]
    metrics_listen: Option<String>,
    /// Log filter: a level (error, warn, info, debug, trace), or target=level pairs separated by
    /// commas
    #[arg(long, env = "GANTRY_LOG", value_name = "FILTER", default_value = DEFAULT_LOG_FILTER)]
    log: String,
    /// Interval of readiness checks, for example of the database; see docs/operations/monitoring.md
    #[arg(long, env = "GANTRY_PROBE_INTERVAL", value_name = "DURATION", default_value = "2s", value_parser = term)]
    probe_interval: Duration,
    /// At shutdown, time for which the service still serves calls but is not ready, so that callers
    /// can find another replica
    #[arg(long, env = "GANTRY_DRAIN_DELAY", value_name = "DURATION", default_value = "0s", value_parser = duration)]
    drain_delay: Duration,
    /// At shutdown, time for open calls to end after the drain delay. Remaining calls are then cut
    #[arg(long, env = "GANTRY_DRAIN_TIMEOUT", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    drain_timeout: Duration,
    /// Print every setting with its value and source, without secrets, and exit
    #[arg(long)]
    pub(crate) print_config: bool,
}

/// An address to listen on.
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

/// The bound addresses and tokens of a service.
pub(crate) struct ServerSetup {
    /// Listener for calls.
    pub(crate) listener: Listener,
    /// Token of the cluster. Callers over TCP present it to this service, and this service presents
    /// it to other services.
    pub(crate) token: Option<String>,
    /// Paths of token files on this machine. No container may see them.
    pub(crate) secret_paths: Vec<PathBuf>,
    /// Listener of the operator endpoints.
    pub(crate) metrics: Option<TcpListener>,
    pub(crate) drain: Drain,
    pub(crate) probe_interval: Duration,
}

impl ListenArgs {
    /// Sets up logs and traces for `service`. The caller must keep the result until the end of the
    /// process.
    pub(crate) fn telemetry(&self, service: &'static str) -> anyhow::Result<Telemetry> {
        telemetry::init_filtered(service, &self.log, None)
    }

    /// Reads or creates the token, binds the addresses, and logs them.
    ///
    /// # Errors
    ///
    /// Fails if the token cannot be read or created, or if an address cannot be bound.
    pub(crate) async fn start(&self) -> anyhow::Result<ServerSetup> {
        let (listener, token) = self.open().await?;
        let metrics = match &self.metrics_listen {
            Some(address) => {
                let bound = TcpListener::bind(address).await;
                let bound = bound.with_context(|| format!("cannot serve metrics on {address}"))?;
                let address = bound.local_addr()?;
                tracing::info!(endpoint = %address, "serving metrics");
                if token.is_none() {
                    tracing::warn!(
                        "INSECURE: every process that can connect to {address} can read the metrics"
                    );
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

    /// Returns the address and the token with which the same machine reaches this service. Never
    /// creates a token.
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
                    "cannot find the service, because it listens on any free port: name its address with --server, or set GANTRY_LISTEN as for the service"
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
                let failed = format!("cannot listen on {address}");
                let mut addresses = tokio::net::lookup_host(address).await.with_context(|| failed.clone())?;
                let address = addresses.next().with_context(|| failed.clone())?;
                let bound = listener::bind(address).context(failed)?;
                warn_of_dangers(bound.local_addr()?, token.is_some());
                if token.is_some() { Listener::Tcp(bound) } else { Listener::InsecureTcp(bound) }
            }
        };
        tracing::info!(endpoint = listener.endpoint()?, "listening");
        Ok((listener, token))
    }

    /// Returns the token of the cluster. Creates the default file if this service needs a token for
    /// its callers. Over TCP, returns `None` only with `--insecure`.
    fn token(&self) -> anyhow::Result<Option<String>> {
        let (file, token) = match (&self.token_file, &self.listen) {
            // A missing file may be on a volume that is not mounted. A new token would hide that
            // mistake.
            (Some(file), _) => (file.clone(), token::read(file).map_err(|error| explain(error, file))?),
            (None, _) if self.insecure => return Ok(None),
            (None, Address::Tcp(_)) => {
                let file = token::default_file().context(
                    "cannot find the default token file: name a file with --token-file, or set XDG_STATE_HOME or HOME",
                )?;
                let token = token::read_or_make_private(&file).context(
                    "cannot use the default token file: name another file with --token-file, or require no token with --insecure",
                )?;
                (file, token)
            }
            (None, Address::Unix(_)) => match token::read_default()? {
                Some(default) => default,
                None => return Ok(None),
            },
        };
        tracing::info!(token.file = %file.display(), "callers over TCP must present the token of this file");
        Ok(Some(token))
    }
}

/// Adds advice to the error about a missing token file.
fn explain(error: anyhow::Error, file: &Path) -> anyhow::Error {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    if cause.is_none_or(|cause| cause.kind() != std::io::ErrorKind::NotFound) {
        return error;
    }
    error.context(format!(
        "cannot find the token file {}: mount or copy it there, or create it with the subcommand `token --token-file {0}`",
        file.display()
    ))
}

/// Logs a warning if calls to `address` are not protected by a token, or not by encryption.
fn warn_of_dangers(address: SocketAddr, token: bool) {
    if !token {
        tracing::warn!(
            "INSECURE: {address} requires no token, so every process that can connect has full access"
        );
    } else if !address.ip().is_loopback() {
        tracing::warn!(
            "INSECURE: connections to {address} are not encrypted, so an eavesdropper can read the token"
        );
    }
}

async fn bind_socket(path: &Path) -> anyhow::Result<UnixListener> {
    // A socket that refuses connections is left over from an earlier start.
    if UnixStream::connect(path)
        .await
        .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    let failed = || format!("cannot listen on {}", path.display());
    let listener = UnixListener::bind(path).with_context(failed)?;
    // Callers need no token, so only this user may connect. The listener also checks the user of
    // the peer.
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).with_context(failed)?;
    Ok(listener)
}

/// Resolves when the process receives TERM or INT.
pub async fn shutdown_signal() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("cannot install signal handlers: the process will not drain");
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
    async fn named_token_file_is_not_created() {
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
    async fn invalid_token_is_rejected() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("token");
        for text in ["", " \n", "two words", "gr\u{fc}n"] {
            std::fs::write(&file, text).expect("write");
            let refused = open(&["--token-file", file.to_str().expect("a path")]).await;
            assert!(refused.is_err_and(|error| error.contains("token")), "{text:?}");
        }
    }

    #[tokio::test]
    async fn only_unused_socket_is_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("socket");
        let path = path.to_str().expect("a path");
        let (first, _) = open(&["--listen", path]).await.expect("a listener");
        let mode = std::fs::metadata(path).expect("the socket exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the socket gives full access");
        let used = open(&["--listen", path]).await;
        assert!(used.is_err_and(|error| error.contains("cannot listen")));
        drop(first);
        let (again, _) = open(&["--listen", path]).await.expect("a listener");
        assert_eq!(again.endpoint().expect("its address"), format!("unix://{path}"));
    }
}
