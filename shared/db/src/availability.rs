//! Availability of PostgreSQL, so that calls do not wait for a connection during an outage.
//!
//! [`Availability::watch`] runs an operation that waits for a connection. The driver retries a
//! failed connect without a message until its timeout. If the operation is slow or finds a lost
//! connection, a probe therefore connects once beside the pool, and shows the cause.
//!
//! ```text
//! available ⇄ full         PostgreSQL has no free connection: operations wait for the pool
//!     └──────⇄ unreachable  operations fail at once with the cause
//! ```
//!
//! Only probes change the state. Each operation of an unreachable database starts the next probe,
//! unless a probe runs or has just ended. An idle process therefore sends nothing.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sea_orm::sqlx::postgres::PgConnectOptions;
use sea_orm::sqlx::{self, ConnectOptions, Connection};
use sea_orm::{ConnAcquireErr, DbErr, RuntimeErr};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::error::{NoFreeConnection, is_no_free_connection, is_unavailable, is_unavailable_cause};

/// Duration of an operation after which a probe starts.
const SLOW_AFTER: Duration = Duration::from_millis(250);

/// Minimum interval of probes while PostgreSQL is unreachable, or after a lost connection.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// Minimum interval of probes of slow operations. A slow operation is no sign of an outage.
const SLOW_PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// Maximum time for PostgreSQL to accept the connection of a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// What the latest probe found.
#[derive(Debug, Clone)]
enum State {
    Available,
    Full(Arc<sqlx::Error>),
    Unreachable(Arc<sqlx::Error>),
}

/// The availability of one PostgreSQL database. All pools of a service share it.
#[derive(Debug)]
pub(crate) struct Availability {
    options: PgConnectOptions,
    /// Maximum number of connections of the service, for messages.
    connections: u32,
    state: watch::Sender<State>,
    /// Number of operations that succeeded.
    succeeded: AtomicU64,
    /// End of the latest probe. `None` while a probe runs.
    last_probe: Mutex<Option<Instant>>,
    tasks: TaskTracker,
    closing: CancellationToken,
}

impl Availability {
    pub(crate) fn new(options: PgConnectOptions, connections: u32) -> Self {
        Self {
            options,
            connections,
            state: watch::Sender::new(State::Available),
            succeeded: AtomicU64::new(0),
            last_probe: Mutex::new(Some(Instant::now())),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
        }
    }

    /// Ends the probe that runs.
    pub(crate) async fn close(&self) {
        self.closing.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Runs `operation`. Fails at once while PostgreSQL is unreachable, and drops `operation` when
    /// a probe finds that.
    pub(crate) async fn watch<T>(
        self: &Arc<Self>,
        operation: impl Future<Output = Result<T, DbErr>>,
    ) -> Result<T, DbErr> {
        if let Some(error) = self.outage() {
            self.start_probe(PROBE_INTERVAL);
            return Err(error);
        }
        let mut operation = pin!(operation);
        let result = tokio::select! {
            biased;
            result = &mut operation => result,
            error = self.wait_for_outage() => return Err(error),
        };
        if result.is_ok() {
            self.succeeded.fetch_add(1, Ordering::Relaxed);
        }
        result.map_err(|error| {
            if is_unavailable(&error) {
                self.start_probe(PROBE_INTERVAL);
            }
            match (&*self.state.borrow(), error) {
                (State::Full(cause), DbErr::ConnectionAcquire(ConnAcquireErr::Timeout)) => failure(cause),
                (_, error) => error,
            }
        })
    }

    /// Waits until a probe finds that PostgreSQL is unreachable. Starts probes meanwhile.
    async fn wait_for_outage(self: &Arc<Self>) -> DbErr {
        tokio::time::sleep(SLOW_AFTER).await;
        let mut state = self.state.subscribe();
        loop {
            if let State::Unreachable(cause) = &*state.borrow_and_update() {
                return failure(cause);
            }
            self.start_probe(SLOW_PROBE_INTERVAL);
            // The sender lives as long as `self`.
            tokio::time::timeout(SLOW_PROBE_INTERVAL, state.changed()).await.ok();
        }
    }

    fn outage(&self) -> Option<DbErr> {
        match &*self.state.borrow() {
            State::Unreachable(cause) => Some(failure(cause)),
            State::Available | State::Full(_) => None,
        }
    }

    /// Returns the error of the latest probe, if it failed.
    pub(crate) fn last_failure(&self) -> Option<DbErr> {
        match &*self.state.borrow() {
            State::Available => None,
            State::Full(cause) | State::Unreachable(cause) => Some(failure(cause)),
        }
    }

    /// Starts a probe, unless one runs or has ended within `interval`.
    fn start_probe(self: &Arc<Self>, interval: Duration) {
        let mut last_probe = self.last_probe.lock().unwrap_or_else(PoisonError::into_inner);
        if last_probe.is_none_or(|ended| ended.elapsed() < interval) {
            return;
        }
        *last_probe = None;
        let probe = self.clone();
        self.tasks.spawn(
            async move {
                tokio::select! {
                    () = probe.closing.cancelled() => {}
                    () = probe.probe() => {}
                }
                *probe.last_probe.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            }
            .in_current_span(),
        );
    }

    /// Connects once, and stores and logs the result.
    async fn probe(&self) {
        let found = self.connect_once().await;
        let before = self.state.send_replace(found.clone());
        match (before, found) {
            (State::Available, State::Full(cause) | State::Unreachable(cause)) => {
                tracing::warn!(error = domain::error_chain(&*cause), "cannot connect to the database");
            }
            (State::Full(_) | State::Unreachable(_), State::Available) => {
                tracing::info!("the database accepts connections again");
            }
            _ => {}
        }
    }

    async fn connect_once(&self) -> State {
        let succeeded = self.succeeded.load(Ordering::Relaxed);
        let connecting = tokio::time::timeout(PROBE_TIMEOUT, self.options.connect()).await;
        // PostgreSQL has too much to do for a new connection, but answers on the others.
        if connecting.is_err() && self.succeeded.load(Ordering::Relaxed) > succeeded {
            return State::Available;
        }
        let timeout = || {
            let message = format!("PostgreSQL did not answer within {PROBE_TIMEOUT:?}");
            sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, message))
        };
        match connecting.unwrap_or_else(|_| Err(timeout())) {
            Ok(connection) => {
                connection.close().await.ok();
                State::Available
            }
            Err(error) if is_no_free_connection(&error) => {
                State::Full(NoFreeConnection::of(self.connections, error).into())
            }
            Err(error) if is_unavailable_cause(&error) => State::Unreachable(error.into()),
            // PostgreSQL rejects the user or the database. The operations receive the same error.
            Err(_) => State::Available,
        }
    }
}

/// Returns why PostgreSQL cannot be reached with `options`, or `None` if it can.
pub(crate) async fn diagnose(options: PgConnectOptions, connections: u32) -> Option<DbErr> {
    match Availability::new(options, connections).connect_once().await {
        State::Available => None,
        State::Full(cause) | State::Unreachable(cause) => Some(failure(&cause)),
    }
}

fn failure(cause: &Arc<sqlx::Error>) -> DbErr {
    DbErr::Conn(RuntimeErr::SqlxError(cause.clone()))
}
