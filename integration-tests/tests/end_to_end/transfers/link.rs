//! Network link between two machines, which can stall or break.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Link to one server. It counts the bytes of the server, and limits them.
pub(crate) struct Link {
    pub(crate) endpoint: String,
    flow: Arc<Flow>,
}

#[derive(Default)]
struct Flow {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of bytes that the server may still send. `None`: no limit.
    left: Option<u64>,
    /// Whether the connection breaks at the limit. Otherwise it stalls.
    cuts: bool,
    sent: u64,
}

impl Link {
    /// Makes a link to the server at `target`, `host:port`. Its threads end with the process.
    pub(crate) fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
        let flow = Arc::<Flow>::default();
        let (shared, target) = (flow.clone(), target.to_owned());
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(&target) else { continue };
                let flow = shared.clone();
                thread::spawn(move || carry(&flow, &client, &server));
            }
        });
        Self { endpoint, flow }
    }

    /// Removes the limit.
    pub(crate) fn open(&self) {
        self.set(None, false);
    }

    /// Stalls the link after this many bytes.
    pub(crate) fn stall_after(&self, bytes: u64) {
        self.set(Some(bytes), false);
    }

    /// Breaks the connection that carries the last of this many bytes.
    pub(crate) fn cut_once_after(&self, bytes: u64) {
        self.set(Some(bytes), true);
    }

    /// Returns the number of bytes that the server has sent.
    pub(crate) fn sent(&self) -> u64 {
        self.flow.state().sent
    }

    fn set(&self, left: Option<u64>, cuts: bool) {
        let mut state = self.flow.state();
        (state.left, state.cuts) = (left, cuts);
        self.flow.changed.notify_all();
    }
}

impl Flow {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until this many bytes may pass. `false`: the connection must break.
    fn pass(&self, bytes: u64) -> bool {
        let mut state = self.state();
        while state.left == Some(0) {
            if state.cuts {
                (state.left, state.cuts) = (None, false);
                return false;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.left = state.left.map(|left| left.saturating_sub(bytes));
        state.sent += bytes;
        true
    }
}

fn carry(flow: &Flow, client: &TcpStream, server: &TcpStream) {
    thread::scope(|scope| {
        scope.spawn(|| {
            // Nothing more is sent in this direction.
            io::copy(&mut &*client, &mut &*server).ok();
            server.shutdown(Shutdown::Both).ok();
        });
        let mut piece = vec![0; 16 << 10];
        while let Ok(length @ 1..) = (&*server).read(&mut piece) {
            if !flow.pass(length as u64) || (&*client).write_all(&piece[..length]).is_err() {
                break;
            }
        }
        client.shutdown(Shutdown::Both).ok();
        server.shutdown(Shutdown::Both).ok();
    });
}
