//! Callers attached to processes, and processes that wait for a caller.
//!
//! A process waits for its caller when it reads its standard input, and when its output buffer is
//! full. A dead caller never returns. So the term of a caller starts when its last call ends. After
//! the term the gateway abandons the process: it closes the input, and the output no longer waits
//! for a reader.
//!
//! [`crate::attempt`] enforces the term of its process. Each `Attach` call counts for as long as it
//! lasts.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use domain::workload::{OutputMode, Stdin};
use domain::{ProcessId, Timestamp, error_chain};
use runtime::{Attachment, Offsets, ProcessState, Runtime, RuntimeError};
use server::Caller;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::util::keyed_locks::lock;
use crate::worker::Worker;

/// Longest term of a caller that closed its connection. A live caller attaches again within
/// seconds. A caller that just does not answer may be suspended, and keeps the whole term.
const AFTER_HANG_UP: Duration = Duration::from_secs(30);

/// Term of a person who left a process on purpose, and may return.
const AFTER_DETACH: Duration = Duration::from_secs(3600);

/// Pause before the gateway tries again to abandon a process.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The callers of one process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttendanceState {
    /// Whether an attempt enforces the term.
    is_enforced: bool,
    /// Callers that are attached.
    pub(crate) attached: u32,
    /// Time of the last change, or since when no caller is attached.
    since: (Instant, Timestamp),
    term: Duration,
    /// Whether the process was abandoned.
    pub(crate) is_abandoned: bool,
}

impl AttendanceState {
    fn new(term: Duration) -> Self {
        Self {
            is_enforced: false,
            attached: 0,
            since: (Instant::now(), Timestamp::now()),
            term,
            is_abandoned: false,
        }
    }

    /// Since when no caller is attached, and when the term ends. `None`: a caller is attached.
    pub(crate) fn unattended(&self) -> Option<(Timestamp, Timestamp)> {
        (self.attached == 0).then_some((self.since.1, self.since.1 + self.term))
    }
}

/// The processes of one worker that may wait for a caller.
pub(crate) struct Attendance {
    /// Time that a process waits for a caller while none is attached.
    term: Duration,
    processes: Mutex<HashMap<ProcessId, watch::Sender<AttendanceState>>>,
}

impl Attendance {
    pub(crate) fn new(term: Duration) -> Self {
        Self { term, processes: Mutex::default() }
    }

    fn processes(&self) -> MutexGuard<'_, HashMap<ProcessId, watch::Sender<AttendanceState>>> {
        lock(&self.processes)
    }

    /// The callers of a process. `None`: the process does not run, or never waits for a caller.
    pub(crate) fn state(&self, process: ProcessId) -> Option<AttendanceState> {
        self.processes().get(&process).map(|state| *state.borrow()).filter(|state| state.is_enforced)
    }

    /// Changes the entry of a process. An entry without attempt and callers is removed.
    ///
    /// After a restart of the gateway, a caller may attach before the attempt is resumed. So a
    /// caller can create the entry too.
    fn change(
        &self,
        process: ProcessId,
        change: impl FnOnce(&mut AttendanceState),
    ) -> watch::Receiver<AttendanceState> {
        let mut processes = self.processes();
        let state =
            processes.entry(process).or_insert_with(|| watch::Sender::new(AttendanceState::new(self.term)));
        state.send_modify(change);
        let (changes, now) = (state.subscribe(), *state.borrow());
        if !now.is_enforced && now.attached == 0 {
            processes.remove(&process);
        }
        changes
    }
}

/// An `Attach` call, for as long as it lasts.
pub(crate) struct AttachGuard {
    attendance: Arc<Attendance>,
    process: ProcessId,
    caller: Option<Caller>,
    keeps_input: AtomicBool,
}

impl AttachGuard {
    pub(crate) fn new(attendance: Arc<Attendance>, process: ProcessId, caller: Option<Caller>) -> Self {
        attendance.change(process, |state| state.attached += 1);
        Self { attendance, process, caller, keeps_input: AtomicBool::new(false) }
    }

    /// Keeps the input of the process open for long after this call.
    pub(crate) fn keep_input(&self) {
        self.keeps_input.store(true, Ordering::Relaxed);
    }
}

impl Drop for AttachGuard {
    fn drop(&mut self) {
        let has_hung_up = self.caller.as_ref().is_some_and(Caller::has_hung_up);
        let keeps_input = self.keeps_input.load(Ordering::Relaxed);
        let term = self.attendance.term;
        self.attendance.change(self.process, |state| {
            state.attached = state.attached.saturating_sub(1);
            state.since = (Instant::now(), Timestamp::now());
            state.term = match has_hung_up {
                _ if keeps_input => AFTER_DETACH,
                true => term.min(AFTER_HANG_UP),
                false => term,
            };
        });
    }
}

/// An attempt that enforces the term of its process.
struct TermGuard<'a>(&'a Attendance, ProcessId);

impl Drop for TermGuard<'_> {
    fn drop(&mut self) {
        let Self(attendance, process) = *self;
        attendance.change(process, |state| state.is_enforced = false);
    }
}

/// Abandons a process when no caller has been attached for its term.
pub(crate) async fn enforce_term(
    attendance: &Attendance,
    runtime: &dyn Runtime,
    process: ProcessId,
    (stdin, output): (&Stdin, OutputMode),
) -> Infallible {
    if *stdin != Stdin::Attached && output == OutputMode::Spooled {
        return std::future::pending().await;
    }
    let mut changes = attendance.change(process, |state| state.is_enforced = true);
    let _term_guard = TermGuard(attendance, process);
    loop {
        let now = *changes.borrow_and_update();
        let term = async {
            if now.attached > 0 || now.is_abandoned {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep_until(now.since.0 + now.term).await;
        };
        tokio::select! {
            // Cannot fail, because the sender lives for as long as `_term_guard`.
            _ = changes.changed() => continue,
            () = term => {}
        }
        match abandon(runtime, process, (stdin, output)).await {
            Ok(()) => {
                tracing::info!(attempt.id = %process, "process abandoned by its callers: its input is closed, and its output waits for no reader");
                attendance.change(process, |state| state.is_abandoned = true);
            }
            Err(error) => {
                tracing::debug!(attempt.id = %process, error = %domain::error_chain(&error), "cannot abandon a process: trying again");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Enforces the term of a process that a caller has started, until it ends.
pub(crate) async fn attend(
    attendance: &Attendance,
    runtime: &dyn Runtime,
    process: ProcessId,
    modes: (Stdin, OutputMode),
) {
    loop {
        if let Ok(ProcessState::Ended(_)) | Err(RuntimeError::ProcessNotFound(_)) =
            runtime.process(process).await
        {
            return;
        }
        let ended = tokio::select! {
            never = enforce_term(attendance, runtime, process, (&modes.0, modes.1)) => match never {},
            ended = runtime.wait(process) => ended,
        };
        // Another gateway may have taken over, or no file can be opened.
        if ended.is_err() {
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// Enforces the terms of the further processes that an earlier gateway has started.
pub(crate) async fn resume(attendance: Arc<Attendance>, worker: Arc<Worker>) {
    if !worker.runtime.capabilities().features.iter().any(|feature| feature == "exec") {
        return;
    }
    let found = async {
        worker.session.opened().await;
        loop {
            match further_processes(worker.runtime.as_ref()).await {
                Ok(processes) => return processes,
                Err(error) => {
                    tracing::warn!(
                        error = error_chain(&error),
                        "cannot find the commands of callers: trying again"
                    );
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    };
    let processes = tokio::select! {
        processes = found => processes,
        () = worker.stopping.cancelled() => return,
    };
    for process in processes {
        let (attendance, worker) = (attendance.clone(), worker.clone());
        worker.tasks.clone().spawn(async move {
            let modes = (Stdin::Attached, OutputMode::Attached);
            tokio::select! {
                () = attend(&attendance, worker.runtime.as_ref(), process, modes) => {}
                () = worker.stopping.cancelled() => {}
            }
        });
    }
}

/// Returns the further processes of all containers, with those that have ended.
async fn further_processes(runtime: &dyn Runtime) -> Result<Vec<ProcessId>, RuntimeError> {
    let mut processes = Vec::new();
    for container in runtime.list().await?.containers {
        match runtime.describe_container(container).await {
            Ok(description) => processes.extend(description.others),
            // Its processes cannot be found.
            Err(RuntimeError::ContainerNotFound(_) | RuntimeError::Other(_)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(processes)
}

async fn abandon(
    runtime: &dyn Runtime,
    process: ProcessId,
    (stdin, output): (&Stdin, OutputMode),
) -> Result<(), RuntimeError> {
    let Attachment { input, .. } = runtime.attach(process, Offsets { stdout: 0, stderr: 0 }).await?;
    if output == OutputMode::Attached {
        input.detach().await?;
    }
    if *stdin == Stdin::Attached {
        input.close_stdin().await?;
    }
    Ok(())
}
