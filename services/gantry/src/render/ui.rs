//! What is said while a command runs: lines on standard error, and events on standard output with `--json`.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};

use crate::render::output::Events;
use crate::render::progress::Progress;
use crate::render::screen::Screen;
use crate::render::table::changes_terminal;

/// Says what happens.
pub(crate) struct Ui {
    quiet: bool,
    color: bool,
    screen: Arc<Screen>,
    events: Option<Events>,
}

impl Ui {
    /// For a command that has answers, and no events.
    pub(crate) fn new(quiet: bool) -> Self {
        let color =
            io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
        Self { quiet, color, screen: Arc::new(Screen::stderr()), events: None }
    }

    /// For a command whose `--json` are events.
    pub(crate) fn with_events(quiet: bool, json: bool) -> Self {
        Self { events: json.then(Events::start), ..Self::new(quiet) }
    }

    /// Where events go, and output with them.
    pub(crate) fn events(&self) -> Option<&Events> {
        self.events.as_ref()
    }

    /// Something that a person likes to know.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            self.line("2", text);
        }
    }

    /// Something that a person must know.
    pub(crate) fn warn(&self, text: &str) {
        self.line("33", text);
    }

    /// Why the command failed.
    pub(crate) fn error(&self, text: &str) {
        self.line("31", text);
    }

    /// Something that a program likes to know. `details` is an object.
    pub(crate) fn event(&self, name: &str, details: Value) {
        let Some(events) = &self.events else { return };
        let mut event = json!({ "event": name });
        if let (Value::Object(event), Value::Object(details)) = (&mut event, details) {
            event.extend(details);
        }
        events.say(&event);
    }

    /// Where it is said whether the output of a process ends in the midst of a line.
    pub(crate) fn unfinished(&self) -> &Arc<AtomicBool> {
        self.screen.unfinished()
    }

    /// A bar, or lines, for a transfer.
    pub(crate) fn progress(&self, what: &str) -> Progress {
        Progress::start(what, &self.screen, self.quiet)
    }

    /// Waits until all events are written.
    pub(crate) fn finish(self) {
        if let Some(events) = self.events {
            events.finish();
        }
    }

    fn line(&self, color: &str, text: &str) {
        // It may quote names of files and messages of processes.
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
