//! A server for the services of a test.

use server::{Host, Listener};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::within;

/// A running server on its own port.
pub(crate) struct TestServer {
    pub(crate) endpoint: String,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl TestServer {
    /// Starts a server of `services` without a token.
    pub(crate) async fn start(services: impl FnOnce(&mut Host)) -> Self {
        Self::on(Host::new(), services).await
    }

    /// Starts a server of `services` with `host`.
    #[expect(clippy::disallowed_methods, reason = "the test waits for it in `end`")]
    pub(crate) async fn on(mut host: Host, services: impl FnOnce(&mut Host)) -> Self {
        let listener = Listener::InsecureTcp(TcpListener::bind("127.0.0.1:0").await.expect("a port"));
        let endpoint = listener.endpoint().expect("its address");
        services(&mut host);
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(host.serve([listener], async {
            stopped.await.ok();
        }));
        Self { endpoint, stop, served }
    }

    /// Stops the server, and checks that it ends without an error.
    pub(crate) async fn end(self) {
        self.stop.send(()).expect("the server runs");
        within("the end of a server", self.served).await.expect("no panic").expect("it ends well");
    }
}
