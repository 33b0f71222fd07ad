//! How a service's own binary starts: where it listens, who may call, where it logs, and how it ends.

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
use crate::{Drain, Listener, listener};

/// The database layer warns of each transaction that SQLite needs no mode for it, and tells of each connection that broke.
const LOGGED: &str = "info,sea_orm=error,sea_orm_migration=warn,sqlx=error";

/// Settings that every service's own binary has.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Settings of every service")]
pub struct ListenArgs {
    /// Where to listen: host:port, or the path of a Unix socket. Beyond the loopback, a port needs `--token-file` or `--insecure`
    #[arg(long, env = "GANTRY_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: Address,
    /// A file with the token of this cluster, which callers over TCP present, and this service to others
    #[arg(long, env = "GANTRY_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Listen beyond the loopback without a token: whoever reaches the port may do everything
    #[arg(long, env = "GANTRY_INSECURE", value_parser = clap::builder::BoolishValueParser::new())]
    insecure: bool,
    /// Where to serve /metrics, /healthz and /readyz over plain HTTP, to everybody: host:port. Default: nowhere
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
pub(crate) struct Started {
    /// Where it listens.
    pub(crate) listener: Listener,
    /// The token of the cluster: callers over TCP present it to this service, and this service to others.
    pub(crate) token: Option<String>,
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

    /// Reads the token and binds the addresses, and says where they are.
    ///
    /// # Errors
    ///
    /// The token cannot be read, an address cannot be bound, or it is a port beyond the loopback and neither a token was given nor
    /// `--insecure` said.
    pub(crate) async fn start(&self) -> anyhow::Result<Started> {
        let (listener, token) = self.open().await?;
        let metrics = match &self.metrics_listen {
            Some(address) => {
                let bound = TcpListener::bind(address).await;
                let bound = bound.with_context(|| format!("cannot serve metrics on {address}"))?;
                let address = bound.local_addr()?;
                tracing::info!(endpoint = %address, "metrics");
                if !address.ip().is_loopback() {
                    tracing::warn!("INSECURE: whoever reaches {address} reads the metrics");
                }
                Some(bound)
            }
            None => None,
        };
        let drain = Drain { delay: self.drain_delay, timeout: self.drain_timeout };
        Ok(Started { listener, token, metrics, drain, probe_interval: self.probe_interval })
    }

    /// Where this service is reached from the machine that it runs on, and with which token.
    pub(crate) fn own_endpoint(&self) -> anyhow::Result<(String, Option<String>)> {
        let token = self.token_file.as_deref().map(read_token).transpose()?;
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
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        let listener = match &self.listen {
            Address::Unix(path) => Listener::Unix(bind_socket(path).await?),
            Address::Tcp(address) => {
                let listening = format!("cannot listen on {address}");
                let mut found = tokio::net::lookup_host(address).await.with_context(|| listening.clone())?;
                let address = found.next().with_context(|| listening.clone())?;
                self.check(address, token.is_some())?;
                Listener::Tcp(listener::bind(address).context(listening)?)
            }
        };
        tracing::info!(endpoint = listener.endpoint()?, "listening");
        Ok((listener, token))
    }

    /// Whether to listen on `address`.
    fn check(&self, address: SocketAddr, token: bool) -> anyhow::Result<()> {
        if address.ip().is_loopback() {
            return Ok(());
        }
        anyhow::ensure!(
            token || self.insecure,
            "{address} is not the loopback: name the cluster's token with --token-file, or say --insecure to let everybody in who reaches it"
        );
        if token {
            tracing::warn!(
                "INSECURE: nothing is encrypted on {address}, and who listens on the way learns the token"
            );
        } else {
            tracing::warn!("INSECURE: whoever reaches {address} may do everything");
        }
        Ok(())
    }
}

pub(crate) fn read_token(path: &Path) -> anyhow::Result<String> {
    let token = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let token = token.trim();
    anyhow::ensure!(!token.is_empty(), "{} holds no token", path.display());
    // It has to stand in a header.
    anyhow::ensure!(
        token.bytes().all(|byte| byte.is_ascii_graphic()),
        "{} holds more than a token",
        path.display()
    );
    Ok(token.to_owned())
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
    // Whoever may open it may do everything, and is asked for no token.
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
    async fn beyond_the_loopback_it_takes_a_token_or_a_word() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("token");
        std::fs::write(&file, "secret\n").expect("write");
        let file = file.to_str().expect("a path");

        let refused = open(&["--listen", "0.0.0.0:0"]).await.expect_err("it must not");
        assert!(refused.contains("--insecure") && refused.contains("--token-file"), "{refused}");
        let (_, token) = open(&["--listen", "0.0.0.0:0", "--token-file", file]).await.expect("a listener");
        assert_eq!(token.as_deref(), Some("secret"));
        let (_, token) = open(&["--listen", "0.0.0.0:0", "--insecure"]).await.expect("a listener");
        assert_eq!(token, None);
        for loopback in ["127.0.0.1:0", "localhost:0"] {
            open(&["--listen", loopback]).await.expect("a listener");
        }
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
