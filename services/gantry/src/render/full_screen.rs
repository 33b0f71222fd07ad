//! A whole terminal that is painted again and again, and restored at the end.

use std::io::{self, IsTerminal};

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::render::stdout::print;
use crate::render::terminal::{self, RawMode};

/// Switches to the other screen of the terminal, hides the cursor, and cuts long lines.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// Undoes [`ENTER`].
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// Byte that a terminal in raw mode sends for Ctrl-C.
const CTRL_C: u8 = 3;

/// What a person did at the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Pressed `q` or Ctrl-C.
    End,
    /// Changed the size of the terminal.
    Resize,
}

/// The terminal at standard output. It is restored when this value is dropped.
pub(crate) struct FullScreen {
    resized: Signal,
    /// Reports a key that ends the command. `None`: standard input is no terminal.
    end_key: Option<mpsc::Receiver<()>>,
    _mode: Option<RawMode>,
}

impl FullScreen {
    /// Returns whether standard output can be painted.
    pub(crate) fn is_possible() -> bool {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        io::stdout().is_terminal() && !is_dumb
    }

    /// Takes the terminal.
    pub(crate) fn enter() -> anyhow::Result<Self> {
        let resized = signal(SignalKind::window_change()).context("cannot catch signals")?;
        let has_keys = terminal::is_foreground(io::stdin());
        let mode = has_keys.then(|| RawMode::enter(io::stdin())).transpose();
        let mode = mode.context("cannot set the mode of the terminal")?;
        let screen = Self { resized, end_key: has_keys.then(read_keys), _mode: mode };
        print(ENTER)?;
        Ok(screen)
    }

    /// Returns the number of columns and rows.
    pub(crate) fn size(&self) -> (usize, usize) {
        let size = terminal::size();
        let number = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        (number(size.columns), number(size.rows))
    }

    /// Replaces everything on the screen.
    pub(crate) fn paint(&self, lines: &[String]) -> anyhow::Result<()> {
        // The rest of each old line is cleared, and then the old lines below.
        let lines: Vec<_> = lines.iter().map(|line| format!("{line}\x1b[K")).collect();
        print(&format!("\x1b[H{}\x1b[J", lines.join("\r\n")))
    }

    /// Waits for the next action. Cancel safe.
    pub(crate) async fn action(&mut self) -> Action {
        tokio::select! {
            Some(()) = self.resized.recv() => Action::Resize,
            () = pressed(self.end_key.as_mut()) => Action::End,
        }
    }
}

impl Drop for FullScreen {
    fn drop(&mut self) {
        // An error means that the terminal is gone.
        _ = print(LEAVE);
    }
}

async fn pressed(end_key: Option<&mut mpsc::Receiver<()>>) {
    match end_key {
        Some(end_key) => _ = end_key.recv().await,
        None => std::future::pending().await,
    }
}

/// Reads keys until one ends the command, or until the terminal is gone.
///
/// A separate thread reads them, because a read from a terminal cannot be interrupted. The command
/// never waits for that thread.
fn read_keys() -> mpsc::Receiver<()> {
    let (sender, end_key) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut pressed = [0; 64];
        loop {
            match rustix::io::read(io::stdin(), &mut pressed) {
                Ok(length @ 1..) if !pressed[..length].iter().any(is_end) => {}
                Err(rustix::io::Errno::INTR) => {}
                // The end of the channel reports the end of the terminal, too.
                Ok(_) | Err(_) => return drop(sender),
            }
        }
    });
    end_key
}

fn is_end(key: &u8) -> bool {
    matches!(*key, b'q' | b'Q' | CTRL_C)
}
