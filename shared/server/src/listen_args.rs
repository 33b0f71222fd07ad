//! Where a service's own binary listens.

use std::net::SocketAddr;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::Listener;

/// Where a service's own binary listens.
#[derive(Debug, Clone, clap::Args)]
pub struct ListenArgs {
    /// The address to listen on. Anything but the loopback needs `--insecure`.
    #[arg(long, env = "GANTRY_LISTEN", default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Listen beyond the loopback, without TLS and without asking who calls.
    #[arg(long, env = "GANTRY_INSECURE")]
    pub insecure: bool,
}

impl ListenArgs {
    /// Binds the address, and says where.
    pub async fn bind(&self) -> anyhow::Result<Listener> {
        anyhow::ensure!(
            self.listen.ip().is_loopback() || self.insecure,
            "{} is not the loopback: say --insecure to listen there without TLS and authentication",
            self.listen
        );
        let listener = TcpListener::bind(self.listen)
            .await
            .with_context(|| format!("cannot listen on {}", self.listen))?;
        let listener = Listener::Tcp(listener);
        if self.insecure {
            tracing::warn!("INSECURE: whoever reaches this port may do everything");
        }
        tracing::info!(endpoint = listener.endpoint()?, "listening");
        Ok(listener)
    }
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
