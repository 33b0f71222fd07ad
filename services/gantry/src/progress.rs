//! How far a transfer is: a bar on a terminal, now and then a line elsewhere.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::table::bytes;

const REPAINT: Duration = Duration::from_millis(100);
const LINE: Duration = Duration::from_secs(10);

/// Counts what is done and paints it. Cheap to clone; clones count together. The last one that is dropped wipes the bar away.
#[derive(Debug, Clone)]
pub(crate) struct Progress(Arc<Painted>);

#[derive(Debug)]
struct Painted {
    counts: Arc<Counts>,
    /// Ends with it.
    painter: JoinSet<()>,
    terminal: bool,
}

#[derive(Debug, Default)]
struct Counts {
    what: Mutex<String>,
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Starts at nothing of nothing.
    pub(crate) fn start(what: &str, quiet: bool) -> Self {
        let counts = Arc::new(Counts { what: Mutex::new(what.to_owned()), ..Counts::default() });
        let terminal = io::stderr().is_terminal();
        let mut painter = JoinSet::new();
        if !quiet {
            painter.spawn(paint(counts.clone(), terminal));
        }
        Self(Arc::new(Painted { counts, painter, terminal: terminal && !quiet }))
    }

    /// What is being done from now on.
    pub(crate) fn doing(&self, what: &str) {
        what.clone_into(&mut self.0.counts.what.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// There is this much more to do.
    pub(crate) fn expect(&self, bytes: u64) {
        self.0.counts.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// This much more is done.
    pub(crate) fn advance(&self, bytes: u64) {
        self.0.counts.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Painted {
    fn drop(&mut self) {
        self.painter.abort_all();
        if self.terminal {
            write_out("\r\x1b[K");
        }
    }
}

async fn paint(counts: Arc<Counts>, terminal: bool) {
    let started = Instant::now();
    let mut ticks = tokio::time::interval(if terminal { REPAINT } else { LINE });
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await; // Comes at once, and what takes no time is not worth a bar.
    loop {
        ticks.tick().await;
        let what = counts.what.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (done, total) = (counts.done.load(Ordering::Relaxed), counts.total.load(Ordering::Relaxed));
        let line = line(&what, done, total, started.elapsed(), terminal);
        if terminal {
            let columns =
                rustix::termios::tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
            // Some terminals do not know.
            let width = if columns == 0 { 80 } else { columns };
            let line: String = line.chars().take(width.saturating_sub(1).max(20)).collect();
            write_out(&format!("\r{line}\x1b[K"));
        } else {
            write_out(&format!("gantry: {line}\n"));
        }
    }
}

/// `uploading src [=====>    ]  52 %  1.2 MiB of 2.3 MiB, 12.0 MiB/s`
fn line(what: &str, done: u64, total: u64, elapsed: Duration, bar: bool) -> String {
    if total == 0 {
        return format!("{what} …");
    }
    let done = done.min(total);
    let percent = u128::from(done) * 100 / u128::from(total);
    let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).max(1);
    let rate = u64::try_from(u128::from(done) * 1000 / u128::from(millis)).unwrap_or(u64::MAX);
    let painted = if bar {
        let filled = usize::try_from(percent / 5).unwrap_or(0);
        let head = if filled < 20 { ">" } else { "" };
        format!("[{}{head}{}] ", "=".repeat(filled), " ".repeat(20 - filled - head.len()))
    } else {
        String::new()
    };
    format!("{what} {painted}{percent:3} %  {} of {}, {}/s", bytes(done), bytes(total), bytes(rate))
}

/// To standard error; nobody can be told when that fails.
fn write_out(text: &str) {
    _ = io::stderr().lock().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_and_how_fast() {
        let second = Duration::from_secs(1);
        assert_eq!(
            line("uploading src", 1 << 20, 2 << 20, second, true),
            "uploading src [==========>         ]  50 %  1.0 MiB of 2.0 MiB, 1.0 MiB/s"
        );
        assert_eq!(
            line("uploading", 5, 4, second, true),
            "uploading [====================] 100 %  4 B of 4 B, 4 B/s"
        );
        assert_eq!(line("uploading", 0, 4, second, false), "uploading   0 %  0 B of 4 B, 0 B/s");
        assert_eq!(line("scanning", 0, 0, second, true), "scanning …");
    }
}
