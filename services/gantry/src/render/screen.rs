//! Standard error on a screen: lines, and on a terminal progress bars below them.
//!
//! [`Screen::line`] removes the bars first, and the next tick paints them again. If a process left
//! an unfinished line in the same place, that line is ended first.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::render::terminal;

/// Escape sequence that clears everything from the cursor on.
const CLEAR: &str = "\x1b[J";

/// Destination of lines and of bars.
pub(crate) struct Screen {
    terminal: bool,
    /// Whether a process has left an unfinished line.
    unfinished: Arc<AtomicBool>,
    state: Mutex<State>,
}

struct State {
    out: Box<dyn Write + Send>,
    /// Number of bars at the place where the next line would start. The cursor is in the last one.
    painted: usize,
}

impl Screen {
    /// Makes a screen for standard error.
    pub(crate) fn stderr() -> Self {
        // A dumb terminal cannot move back to the start of a line.
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self::new(Box::new(io::stderr()), io::stderr().is_terminal() && !dumb)
    }

    pub(crate) fn new(out: Box<dyn Write + Send>, terminal: bool) -> Self {
        Self { terminal, unfinished: Arc::default(), state: Mutex::new(State { out, painted: 0 }) }
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
        let clear =
            if state.painted > 0 { format!("{}{CLEAR}", state.to_first_bar()) } else { String::new() };
        let end = self.end_of_line();
        state.painted = 0;
        state.write(&format!("{clear}{end}{line}"));
    }

    /// Paints bars, and replaces the previous ones.
    pub(crate) fn paint(&self, bars: &[String]) {
        let mut state = self.state();
        if bars.is_empty() && state.painted == 0 {
            return;
        }
        let start = format!("{}{}", self.end_of_line(), state.to_first_bar());
        // Nothing is cleared before it is replaced, because that would flicker.
        let bars_text: Vec<_> = bars.iter().map(|bar| format!("{bar}\x1b[K")).collect();
        state.write(&format!("{start}{}{CLEAR}", bars_text.join("\n")));
        state.painted = bars.len();
    }

    /// Removes the bars.
    pub(crate) fn wipe(&self) {
        self.paint(&[]);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns the text that moves to the start of the first bar, or of the line if there is none.
    fn to_first_bar(&self) -> String {
        match self.painted {
            0 | 1 => "\r".to_owned(),
            bars => format!("\r\x1b[{}A", bars - 1),
        }
    }

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
        screen.paint(&["50 %".to_owned()]);
        screen.line("more\n");
        assert_eq!(written.text(), "\ntext\n\n\r50 %\x1b[K\x1b[J\r\x1b[Jmore\n");
    }

    #[test]
    fn line_replaces_bars() {
        let written = Written::default();
        let screen = written.screen(true);
        let bars = |bars: &[&str]| bars.iter().map(|&bar| bar.to_owned()).collect::<Vec<_>>();
        screen.line("before\n");
        screen.paint(&bars(&["50 %", "10 %"]));
        screen.line("text\n");
        screen.line("more\n");
        screen.paint(&bars(&["60 %"]));
        screen.wipe();
        screen.wipe();
        assert_eq!(
            written.text(),
            "before\n\r50 %\x1b[K\n10 %\x1b[K\x1b[J\r\x1b[1A\x1b[Jtext\nmore\n\r60 %\x1b[K\x1b[J\r\x1b[J",
            "bars are removed once, before the text that follows them"
        );
    }
}
