//! A network link that can be slow, stall, or break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// A link to one server. It counts the bytes of the server, and limits them.
pub(crate) struct Link {
    pub(crate) endpoint: String,
    flow: Arc<Flow>,
    served: JoinHandle<()>,
}

struct Flow {
    /// Bytes that the server may still send.
    left: AtomicI64,
    /// Whether connections break at the limit. Otherwise they stall.
    breaks: AtomicBool,
    changed: Notify,
    sent: AtomicU64,
    /// Number of further connections that break at once.
    refused: AtomicU64,
}

impl Link {
    /// Creates a link to the server at `target`, in the form `host:port`.
    pub(crate) async fn to(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
        let flow = Arc::new(Flow {
            left: AtomicI64::new(i64::MAX),
            breaks: AtomicBool::new(false),
            changed: Notify::new(),
            sent: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        });
        let shared = flow.clone();
        #[expect(clippy::disallowed_methods, reason = "it ends with the link")]
        let served = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let less = |left: u64| left.checked_sub(1);
                if shared.refused.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                    continue;
                }
                connections.spawn(shared.clone().carry(client, target.clone()));
            }
        });
        Self { endpoint, flow, served }
    }

    /// Removes the limit.
    pub(crate) fn open(&self) {
        self.flow.set(i64::MAX, false);
    }

    /// Stalls connections after this number of bytes.
    pub(crate) fn stall_after(&self, bytes: u64) {
        self.flow.set(i64::try_from(bytes).expect("few"), false);
    }

    /// Breaks old and new connections after this number of bytes.
    pub(crate) fn cut_after(&self, bytes: u64) {
        self.flow.set(i64::try_from(bytes).expect("few"), true);
    }

    /// Breaks the next connections at once. A caller that tries once cannot reach the server, and
    /// the next one can.
    pub(crate) fn refuse_next(&self, connections: u64) {
        self.flow.refused.store(connections, Ordering::SeqCst);
    }

    /// Returns the number of bytes that the server has sent.
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
                    // The timeout covers a change just before the wait.
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
