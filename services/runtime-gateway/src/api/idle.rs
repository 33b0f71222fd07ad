//! Time-out of further processes with a terminal in which nothing happens.
//!
//! Each `Attach` call counts its own idle time, so a forgotten shell ends although its caller stays
//! connected. [`crate::worker::attached_callers`] ends the input of processes without a caller.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use domain::error_chain;
use rpc::invalid_field;
use runtime::{ProcessInput, RuntimeError};
use tokio::time::Instant;
use tonic::Status;

use crate::util::keyed_locks::lock;

/// Idle time-out if the caller names none.
const DEFAULT: Duration = Duration::from_secs(3600);
/// Longest idle time-out.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Time between HUP and KILL for an idle process.
const GRACE: Duration = Duration::from_secs(10);

const HUP: u8 = 1;
const KILL: u8 = 9;
const TERM: u8 = 15;

/// Returns the idle time-out of a call, which may name one.
pub(super) fn check_timeout(field: &str, timeout: Option<Duration>) -> Result<Duration, Status> {
    let timeout = timeout.unwrap_or(DEFAULT);
    if !(Duration::from_secs(1)..=LONGEST).contains(&timeout) {
        return Err(invalid_field(field, "must be from 1 s to 24 h"));
    }
    Ok(timeout)
}

/// The time of the last input or output of a call.
pub(super) struct Activity(Mutex<Instant>);

impl Activity {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    /// Records input or output.
    pub(super) fn record(&self) {
        *lock(&self.0) = Instant::now();
    }

    /// Waits until nothing has happened for `timeout`.
    pub(super) async fn stopped_for(&self, timeout: Duration) {
        loop {
            let end = *lock(&self.0) + timeout;
            if end <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(end).await;
        }
    }
}

/// Ends a process as a lost terminal does.
pub(super) async fn hang_up(input: Arc<dyn ProcessInput>) {
    let hung_up = match input.signal(HUP).await {
        // The worker lacks the capability `signals`.
        Err(RuntimeError::Unsupported(_)) => input.signal(TERM).await,
        sent => sent,
    };
    if let Err(error) = hung_up {
        tracing::warn!(error = error_chain(&error), "cannot hang up an idle process");
    }
    tokio::time::sleep(GRACE).await;
    // A process that has ended is not affected.
    if let Err(error) = input.signal(KILL).await {
        tracing::warn!(error = error_chain(&error), "cannot kill an idle process");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn activity_postpones_the_timeout() {
        let (began, activity) = (Instant::now(), Activity::new());
        let work = async {
            tokio::time::sleep(DEFAULT / 2).await;
            activity.record();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = activity.stopped_for(DEFAULT) => {}
            () = work => {}
        }
        assert_eq!(began.elapsed(), DEFAULT / 2 + DEFAULT);
    }
}
