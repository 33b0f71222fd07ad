//! Standard error on a screen: lines, and on a terminal at most one progress bar below them.
//!
//! [`Screen::line`] removes the bar first, and the next tick paints it again. If a process left an
//! unfinished line in the same place, that line is ended first.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::render::terminal;

/// Escape sequence that moves to the start of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Destination of lines and of the bar.
pub(crate) struct Screen {
    terminal: bool,
    /// Whether a process has left an unfinished line.
    unfinished: Arc<AtomicBool>,
    state: Mutex<State>,
}

struct State {
    out: Box<dyn Write + Send>,
    /// Whether a bar is at the place where the next line would start.
    painted: bool,
}

impl Screen {
    /// Makes a screen for standard error.
    pub(crate) fn stderr() -> Self {
        // A dumb terminal cannot move back to the start of a line.
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self::new(Box::new(io::stderr()), io::stderr().is_terminal() && !dumb)
    }

    pub(crate) fn new(out: Box<dyn Write + Send>, terminal: bool) -> Self {
        Self { terminal, unfinished: Arc::default(), state: Mutex::new(State { out, painted: false }) }
    }

    /// Returns the flag that a writer of process output sets while its last line is unfinished.
    pub(crate) fn unfinished(&self) -> &Arc<AtomicBool> {
        &self.unfinished
    }

    /// Returns the text that must precede a new line.
    fn end_of_line(&self) -> &'static str {
        if self.unfinished.swap(false, Ordering::Relaxed) { "\n" } else { "" }
    }

    /// Returns whether bars can be painted.
    pub(crate) fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Prints a line, which must end with a newline.
    pub(crate) fn line(&self, line: &str) {
        let mut state = self.state();
        let clear = if std::mem::take(&mut state.painted) { CLEAR } else { "" };
        let end = self.end_of_line();
        state.write(&format!("{clear}{end}{line}"));
    }

    /// Paints the bar, and replaces the previous one.
    pub(crate) fn paint(&self, bar: &str) {
        let mut state = self.state();
        let end = self.end_of_line();
        state.write(&format!("{end}\r{bar}\x1b[K"));
        state.painted = true;
    }

    /// Removes the bar.
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
    /// Writes text. Errors are ignored, because they cannot be reported.
    fn write(&mut self, text: &str) {
        let text = if terminal::is_raw() { &text.replace('\n', "\r\n") } else { text };
        _ = self.out.write_all(text.as_bytes());
        _ = self.out.flush();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Text that was written to a screen.
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
    fn unfinished_line_is_ended_first() {
        let written = Written::default();
        let screen = written.screen(true);
        screen.unfinished().store(true, Ordering::Relaxed);
        screen.line("text\n");
        screen.unfinished().store(true, Ordering::Relaxed);
        screen.paint("50 %");
        screen.line("more\n");
        assert_eq!(written.text(), "\ntext\n\n\r50 %\x1b[K\r\x1b[Kmore\n");
    }

    #[test]
    fn line_replaces_bar() {
        let written = Written::default();
        let screen = written.screen(true);
        screen.line("before\n");
        screen.paint("50 %");
        screen.line("text\n");
        screen.line("more\n");
        screen.paint("60 %");
        screen.wipe();
        screen.wipe();
        assert_eq!(
            written.text(),
            "before\n\r50 %\x1b[K\r\x1b[Ktext\nmore\n\r60 %\x1b[K\r\x1b[K",
            "each bar is removed once, before the text that follows it"
        );
    }
}
