//! Local ends of the output and input of a process.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use rpc::pb::runtime::Exited;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::cli::detach_keys::DetachKeys;
use crate::follow::stdin::Stdin;
use crate::follow::window::Window;
use crate::render::output::{Closed, OutputStream, Sink};
use crate::render::terminal::RawMode;
use crate::render::ui::Ui;

/// Local ends of the output and input of a process.
pub(crate) struct Streams {
    pub(crate) stdout: Sink,
    pub(crate) stderr: Sink,
    pub(crate) stdin: Option<Stdin>,
    /// Whether written output is acknowledged. The process then waits for this reader, and
    /// acknowledged output may be dropped.
    pub(crate) acknowledge: bool,
    /// Id of the process whose output is read.
    pub(crate) process: Option<String>,
    /// Requests that the process is interrupted (SIGINT).
    pub(crate) interrupt: Arc<Notify>,
    /// Size of the local terminal, if the process has a terminal.
    pub(crate) window: Option<Window>,
    pub(crate) state: AttachState,
}

/// What the gateway has said about the process.
#[derive(Default)]
pub(crate) struct AttachState {
    /// Time at which the gateway accepted the current or last call.
    pub(crate) opened: Option<Instant>,
    /// Whether the gateway has ever accepted a call.
    pub(crate) is_started: bool,
    /// End of the process.
    pub(crate) exited: Option<Exited>,
    /// Mode of the local terminal.
    pub(crate) mode: TerminalMode,
    /// Time from which on output is wanted. `None`: all of it.
    pub(crate) since: Option<SystemTime>,
    /// Whether only the output that existed before the first call is wanted.
    pub(crate) only_old: bool,
    /// Bytes of standard output and of standard error that existed before the first call.
    pub(crate) old: Option<(u64, u64)>,
}

/// Mode of the local terminal.
#[derive(Default)]
pub(crate) enum TerminalMode {
    /// The mode is not changed.
    #[default]
    Unchanged,
    /// Raw mode begins when the gateway accepts a call. Until then Ctrl-C interrupts `gantry`.
    RawWhenAttached,
    /// The terminal is in raw mode until this value is dropped.
    Raw(RawMode),
}

impl AttachState {
    /// Returns whether all wanted output was received.
    pub(crate) fn is_complete(&self, stdout: &Sink, stderr: &Sink) -> bool {
        let old = self.old.filter(|_| self.only_old);
        old.is_some_and(|old| stdout.received() >= old.0 && stderr.received() >= old.1)
    }

    /// Records that the gateway accepted a call.
    pub(crate) fn record_start(&mut self, ui: &Ui) {
        self.opened = Some(Instant::now());
        self.is_started = true;
        if let TerminalMode::RawWhenAttached = self.mode {
            self.mode = match RawMode::enter(io::stdin()) {
                Ok(raw) => TerminalMode::Raw(raw),
                Err(error) => {
                    ui.warn(&format!("cannot pass single keys to the command: {error}"));
                    TerminalMode::Unchanged
                }
            };
        }
    }
}

impl Streams {
    /// Opens the local ends without input.
    pub(crate) fn open(ui: &Ui, acknowledge: bool) -> anyhow::Result<Self> {
        let sink = |which: OutputStream| match ui.events() {
            Some(events) => Ok(Sink::events(which, events)),
            None => Sink::raw(which, ui.unfinished())
                .with_context(|| format!("cannot use {}: it is closed", which.name())),
        };
        Ok(Self {
            stdout: sink(OutputStream::Stdout)?,
            stderr: sink(OutputStream::Stderr)?,
            stdin: None,
            acknowledge,
            process: None,
            interrupt: Arc::default(),
            window: None,
            state: AttachState::default(),
        })
    }

    /// Writes only the last lines of the output that exists already.
    pub(crate) fn keep_tails(&mut self, lines: usize) {
        self.stdout.keep_tail(lines);
        self.stderr.keep_tail(lines);
    }

    /// Writes the last lines that were received, if they are not written yet.
    pub(crate) async fn write_tails(&mut self) -> Result<(), Closed> {
        self.stdout.write_tail().await?;
        self.stderr.write_tail().await.map(|_| ())
    }

    /// Reads standard input. `keys` are given if the process has a terminal: a person at the local
    /// terminal then types each key for that terminal, except `keys`, which detach. `shows_again`:
    /// the process may have written output that was shown before.
    pub(crate) fn read_stdin(&mut self, ui: &Ui, keys: Option<&DetachKeys>, shows_again: bool) {
        match keys {
            // Events are no screen.
            Some(keys) if io::stdin().is_terminal() && ui.events().is_none() => {
                self.stdin = Some(Stdin::read_keyboard(keys, shows_again));
                self.state.mode = TerminalMode::RawWhenAttached;
            }
            _ => self.stdin = Some(Stdin::read()),
        }
    }

    /// Prepares the output for another process.
    pub(crate) async fn restart(&mut self) -> Result<(), Closed> {
        self.state.old = None;
        self.stdout.restart().await?;
        self.stderr.restart().await
    }

    /// Returns the number of received bytes of each output.
    pub(crate) fn received(&self) -> (u64, u64) {
        (self.stdout.received(), self.stderr.received())
    }

    /// Returns whether some output is lost.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.stdout.missing() > 0 || self.stderr.missing() > 0
    }
}
