//! Standard error, as a person sees it: lines, and on a terminal at most one bar below them.
//!
//! Whoever says a line wipes the bar away first; it is painted again with its next tick. So they never run together. Where a process left
//! a line without an end at the same place, that line is ended first.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Moves to the beginning of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Where lines and the bar go.
pub(crate) struct Screen {
    terminal: bool,
    /// Whether a process has left a line without an end.
    unfinished: Arc<AtomicBool>,
    state: Mutex<State>,
}

struct State {
    out: Box<dyn Write + Send>,
    /// A bar stands where the next line would begin.
    painted: bool,
}

impl Screen {
    /// Our standard error.
    pub(crate) fn stderr() -> Self {
        // Such a terminal cannot move back to the beginning of a line.
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self::new(Box::new(io::stderr()), io::stderr().is_terminal() && !dumb)
    }

    pub(crate) fn new(out: Box<dyn Write + Send>, terminal: bool) -> Self {
        Self { terminal, unfinished: Arc::default(), state: Mutex::new(State { out, painted: false }) }
    }

    /// Whoever writes the output of a process to the same place says here whether its last line has no end yet.
    pub(crate) fn unfinished(&self) -> &Arc<AtomicBool> {
        &self.unfinished
    }

    /// What must come before anything that begins a line.
    fn end_of_line(&self) -> &'static str {
        if self.unfinished.swap(false, Ordering::Relaxed) { "\n" } else { "" }
    }

    /// Whether bars can be painted.
    pub(crate) fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Says a line, which ends with a newline.
    pub(crate) fn line(&self, line: &str) {
        let mut state = self.state();
        let clear = if std::mem::take(&mut state.painted) { CLEAR } else { "" };
        let end = self.end_of_line();
        state.write(&format!("{clear}{end}{line}"));
    }

    /// Paints the bar in the place of the one before.
    pub(crate) fn paint(&self, bar: &str) {
        let mut state = self.state();
        let end = self.end_of_line();
        state.write(&format!("{end}\r{bar}\x1b[K"));
        state.painted = true;
    }

    /// Wipes the bar away.
    pub(crate) fn wipe(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.painted) {
            state.write(CLEAR);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Nobody can be told when that fails.
    fn write(&mut self, text: &str) {
        _ = self.out.write_all(text.as_bytes());
        _ = self.out.flush();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What was written to a screen.
    #[derive(Clone, Default)]
    pub(crate) struct Written(Arc<Mutex<Vec<u8>>>);

    impl Written {
        pub(crate) fn screen(&self, terminal: bool) -> Screen {
            Screen::new(Box::new(self.clone()), terminal)
        }

        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().expect("held").clone()).expect("text")
        }
    }

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("held").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_without_an_end_is_ended_before_anything_is_said() {
        let written = Written::default();
        let screen = written.screen(true);
        screen.unfinished().store(true, Ordering::Relaxed);
        screen.line("said\n");
        screen.unfinished().store(true, Ordering::Relaxed);
        screen.paint("50 %");
        screen.line("more\n");
        assert_eq!(written.text(), "\nsaid\n\n\r50 %\x1b[K\r\x1b[Kmore\n");
    }

    #[test]
    fn a_line_takes_the_place_of_the_bar() {
        let written = Written::default();
        let screen = written.screen(true);
        screen.line("before\n");
        screen.paint("50 %");
        screen.line("said\n");
        screen.line("more\n");
        screen.paint("60 %");
        screen.wipe();
        screen.wipe();
        assert_eq!(
            written.text(),
            "before\n\r50 %\x1b[K\r\x1b[Ksaid\nmore\n\r60 %\x1b[K\r\x1b[K",
            "each bar is wiped away once, before what follows it"
        );
    }
}
