//! A server of whatever a test serves.

use server::{Host, Listener};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::within;

/// Services on a port of their own.
pub(crate) struct Served {
    pub(crate) endpoint: String,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Served {
    /// What `services` adds to a host that asks for no token.
    pub(crate) async fn start(services: impl FnOnce(&mut Host)) -> Self {
        Self::on(Host::new(), services).await
    }

    /// What `services` adds to `host`.
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

    /// Ends it, which must go well.
    pub(crate) async fn end(self) {
        self.stop.send(()).expect("it is served");
        within("the end of a server", self.served).await.expect("no panic").expect("it ends well");
    }
}
