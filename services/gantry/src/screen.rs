//! Standard error, as a person sees it: lines, and on a terminal at most one bar below them.
//!
//! Whoever says a line wipes the bar away first; it is painted again with its next tick. So they never run together.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Moves to the beginning of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Where lines and the bar go.
pub(crate) struct Screen {
    terminal: bool,
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
        Self { terminal, state: Mutex::new(State { out, painted: false }) }
    }

    /// Whether bars can be painted.
    pub(crate) fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Says a line, which ends with a newline.
    pub(crate) fn line(&self, line: &str) {
        let mut state = self.state();
        let clear = if std::mem::take(&mut state.painted) { CLEAR } else { "" };
        state.write(&format!("{clear}{line}"));
    }

    /// Paints the bar in the place of the one before.
    pub(crate) fn paint(&self, bar: &str) {
        let mut state = self.state();
        state.write(&format!("\r{bar}\x1b[K"));
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
    use std::sync::Arc;

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
