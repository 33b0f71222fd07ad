//! What lies between two machines: it can stand still, or break.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// The way to one server. Counts what that says, and lets so much of it through.
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
    /// What the server may still say. `None`: everything.
    left: Option<u64>,
    /// Whether the connection breaks then, and others do not. Otherwise it stands still.
    cuts: bool,
    sent: u64,
}

impl Link {
    /// A way to the server at `target`, `host:port`. Its threads end with the process.
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

    /// Everything goes through.
    pub(crate) fn open(&self) {
        self.set(None, false);
    }

    /// After so many bytes nothing more goes through, for now.
    pub(crate) fn stall_after(&self, bytes: u64) {
        self.set(Some(bytes), false);
    }

    /// After so many bytes the connection breaks that has carried the last of them.
    pub(crate) fn cut_once_after(&self, bytes: u64) {
        self.set(Some(bytes), true);
    }

    /// Bytes that the server has said.
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

    /// Waits until so much may go through. `false`: the connection shall break.
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
            // However it ends, nothing more is said that way.
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
