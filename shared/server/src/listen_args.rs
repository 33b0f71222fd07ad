//! How a service's own binary starts: where it listens, who may call, and where it logs.

use std::convert::Infallible;
use std::fs::Permissions;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Context;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};

use crate::Listener;
use crate::telemetry::{self, Telemetry};

/// Where a service's own binary listens, and who may call it there.
#[derive(Debug, Clone, clap::Args)]
pub struct ListenArgs {
    /// Where to listen: host:port, or the path of a Unix socket. Beyond the loopback, a port needs `--token-file` or `--insecure`.
    #[arg(long, env = "GANTRY_LISTEN", default_value = "127.0.0.1:0")]
    listen: Address,
    /// A file with the token of this cluster, which callers over TCP present, and this service to others.
    #[arg(long, env = "GANTRY_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Listen beyond the loopback without a token: whoever reaches the port may do everything.
    #[arg(long, env = "GANTRY_INSECURE")]
    insecure: bool,
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
pub struct Started {
    /// Where it listens.
    pub listener: Listener,
    /// The token of the cluster: callers over TCP present it to this service, and this service to others.
    pub token: Option<String>,
    /// Logs and traces. To be kept until the end.
    pub telemetry: Telemetry,
}

impl ListenArgs {
    /// Sets up logs and traces for `service`, reads the token and binds the address, and says where that is.
    ///
    /// # Errors
    ///
    /// The token cannot be read, the address cannot be bound, or it is a port beyond the loopback and neither a token was given nor
    /// `--insecure` said.
    pub async fn start(&self, service: &'static str) -> anyhow::Result<Started> {
        let telemetry = telemetry::init(service, "info", None)?;
        let (listener, token) = self.open().await?;
        Ok(Started { listener, token, telemetry })
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
                Listener::Tcp(TcpListener::bind(address).await.context(listening)?)
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
            tracing::warn!("{address}: nothing is encrypted, and who listens on the way learns the token");
        } else {
            tracing::warn!("INSECURE: whoever reaches {address} may do everything");
        }
        Ok(())
    }
}

fn read_token(path: &Path) -> anyhow::Result<String> {
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
