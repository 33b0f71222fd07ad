//! Messages of a running command: lines on standard error, and with `--json` events on standard
//! output.

use std::io::{self, IsTerminal};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::render::output::Events;
use crate::render::progress::{Progress, WeakProgress};
use crate::render::screen::Screen;
use crate::render::table::changes_terminal;

/// Time for which a terminal shows no completed steps.
const UNEVENTFUL: Duration = Duration::from_secs(1);

/// Printer of messages, events and progress.
pub(crate) struct Ui {
    started: Instant,
    quiet: bool,
    color: bool,
    screen: Arc<Screen>,
    /// Bars of all transfers in progress, while there are any.
    progress: Mutex<WeakProgress>,
    events: Option<Events>,
}

impl Ui {
    /// Makes a printer for a command that has answers but no events.
    pub(crate) fn new(quiet: bool) -> Self {
        let color =
            io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
        Self {
            started: Instant::now(),
            quiet,
            color,
            screen: Arc::new(Screen::stderr()),
            progress: Mutex::default(),
            events: None,
        }
    }

    /// Makes a printer for a command that prints events with `--json`.
    pub(crate) fn with_events(quiet: bool, json: bool) -> Self {
        Self { events: json.then(Events::start), ..Self::new(quiet) }
    }

    /// Returns a printer of the same messages, without events.
    pub(crate) fn without_events(&self) -> Self {
        Self {
            started: self.started,
            quiet: self.quiet,
            color: self.color,
            screen: self.screen.clone(),
            progress: Mutex::default(),
            events: None,
        }
    }

    /// Returns the writer of events, if events are printed.
    pub(crate) fn events(&self) -> Option<&Events> {
        self.events.as_ref()
    }

    /// Prints information, unless --quiet is given.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            self.line("2", text);
        }
    }

    /// Prints that a step towards the answer is complete. On a terminal, steps within the first
    /// second are not printed, because a short command has only its answer to show.
    pub(crate) fn step(&self, text: &str) {
        if !self.screen.is_terminal() || self.started.elapsed() >= UNEVENTFUL {
            self.note(text);
        }
    }

    /// Prints a warning.
    pub(crate) fn warn(&self, text: &str) {
        self.line("33", text);
    }

    /// Prints an error.
    pub(crate) fn error(&self, text: &str) {
        self.line("31", text);
    }

    /// Prints an event. `details` is an object.
    pub(crate) fn event(&self, name: &str, details: Value) {
        let Some(events) = &self.events else { return };
        let mut event = json!({ "event": name });
        if let (Value::Object(event), Value::Object(details)) = (&mut event, details) {
            event.extend(details);
        }
        events.say(&event);
    }

    /// Returns the flag that is set while the output of a process ends in the middle of a line.
    pub(crate) fn unfinished(&self) -> &Arc<AtomicBool> {
        self.screen.unfinished()
    }

    /// Starts to show the progress of transfers.
    pub(crate) fn progress(&self) -> Progress {
        let mut shared = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = shared.upgrade().unwrap_or_else(|| Progress::start(&self.screen, self.quiet));
        *shared = progress.downgrade();
        progress
    }

    /// Waits until all events are written.
    pub(crate) fn finish(self) {
        if let Some(events) = self.events {
            events.finish();
        }
    }

    fn line(&self, color: &str, text: &str) {
        // The text may contain names of files and messages of processes.
        let harmless = |c| if changes_terminal(c) && !matches!(c, '\n' | '\t') { '?' } else { c };
        let text: String = text.chars().map(harmless).collect();
        let line = if self.color {
            format!("\x1b[{color}mgantry: {text}\x1b[0m\n")
        } else {
            format!("gantry: {text}\n")
        };
        self.screen.line(&line);
    }
}
