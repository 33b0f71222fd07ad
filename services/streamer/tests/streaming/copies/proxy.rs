//! What lies between two machines: it can be slow, stand still, or break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// The way to one server. Counts what that says, and lets so much of it through.
pub(crate) struct Link {
    pub(crate) endpoint: String,
    flow: Arc<Flow>,
    served: JoinHandle<()>,
}

struct Flow {
    /// Bytes that the server may still say.
    left: AtomicI64,
    /// Whether connections break then. Otherwise they stand still.
    breaks: AtomicBool,
    changed: Notify,
    sent: AtomicU64,
}

impl Link {
    /// A way to the server at `target`, `host:port`.
    pub(crate) async fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
        let flow = Arc::new(Flow {
            left: AtomicI64::new(i64::MAX),
            breaks: AtomicBool::new(false),
            changed: Notify::new(),
            sent: AtomicU64::new(0),
        });
        let shared = flow.clone();
        #[expect(clippy::disallowed_methods, reason = "it ends with the link")]
        let served = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(shared.clone().carry(client, target.clone()));
            }
        });
        Self { endpoint, flow, served }
    }

    /// Everything goes through.
    pub(crate) fn open(&self) {
        self.flow.set(i64::MAX, false);
    }

    /// After so many bytes nothing more goes through, for now.
    pub(crate) fn stall_after(&self, bytes: u64) {
        self.flow.set(i64::try_from(bytes).expect("few"), false);
    }

    /// After so many bytes connections break, and so do new ones.
    pub(crate) fn cut_after(&self, bytes: u64) {
        self.flow.set(i64::try_from(bytes).expect("few"), true);
    }

    /// Bytes that the server has said.
    pub(crate) fn sent(&self) -> u64 {
        self.flow.sent.load(Ordering::SeqCst)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.served.abort();
    }
}

impl Flow {
    fn set(&self, left: i64, breaks: bool) {
        self.breaks.store(breaks, Ordering::SeqCst);
        self.left.store(left, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    async fn carry(self: Arc<Self>, client: TcpStream, target: String) {
        let Ok(server) = TcpStream::connect(target).await else { return };
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        let up = tokio::io::copy(&mut from_client, &mut to_server);
        let down = async {
            let mut piece = vec![0; 16 << 10];
            loop {
                let Ok(read @ 1..) = from_server.read(&mut piece).await else { return };
                let length = i64::try_from(read).expect("a piece");
                loop {
                    let changed = self.changed.notified();
                    if self.left.load(Ordering::SeqCst) > 0 {
                        break;
                    }
                    if self.breaks.load(Ordering::SeqCst) {
                        return;
                    }
                    // It may have changed just before.
                    tokio::time::timeout(std::time::Duration::from_millis(50), changed).await.ok();
                }
                self.left.fetch_sub(length, Ordering::SeqCst);
                self.sent.fetch_add(read as u64, Ordering::SeqCst);
                if to_client.write_all(&piece[..read]).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            _ = up => {}
            () = down => {}
        }
    }
}
