//! Progress of a transfer: a bar on a terminal, or a line every 10 s elsewhere.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::render::screen::Screen;
use crate::render::table::{bytes, plain};

/// Interval between two updates of the bar.
const REPAINT: Duration = Duration::from_millis(100);
/// Interval between two lines.
const LINE: Duration = Duration::from_secs(10);
/// Maximum length of the description, in characters.
const MAX_DESCRIPTION: usize = 60;

/// Counter of transferred bytes with a progress bar. Clones share the counter. The bar is removed
/// when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Progress(Arc<ProgressBar>);

struct ProgressBar {
    counts: Arc<Counts>,
    screen: Arc<Screen>,
    /// Task that paints. It ends with the bar.
    painter: JoinSet<()>,
}

#[derive(Default)]
struct Counts {
    /// Current activity for each name.
    doing: Mutex<BTreeMap<String, &'static str>>,
    /// Description while there is no activity.
    otherwise: String,
    done: AtomicU64,
    total: AtomicU64,
    /// Held while the bar is painted. Nothing is painted once it is true.
    ended: Mutex<bool>,
}

impl Progress {
    /// Starts with 0 of 0 bytes.
    pub(crate) fn start(what: &str, screen: &Arc<Screen>, quiet: bool) -> Self {
        let counts = Arc::new(Counts { otherwise: what.to_owned(), ..Counts::default() });
        let mut painter = JoinSet::new();
        if !quiet {
            painter.spawn(paint(counts.clone(), screen.clone()));
        }
        Self(Arc::new(ProgressBar { counts, screen: screen.clone(), painter }))
    }

    /// Sets the current activity for `name`.
    pub(crate) fn doing(&self, verb: &'static str, name: &str) {
        self.0.counts.doing().insert(name.to_owned(), verb);
    }

    /// Removes the activity for `name`.
    pub(crate) fn done(&self, name: &str) {
        self.0.counts.doing().remove(name);
    }

    /// Starts again with 0 of 0 bytes.
    pub(crate) fn restart(&self) {
        self.0.counts.done.store(0, Ordering::Relaxed);
        self.0.counts.total.store(0, Ordering::Relaxed);
    }

    /// Adds to the total.
    pub(crate) fn expect(&self, bytes: u64) {
        self.0.counts.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds to the transferred bytes.
    pub(crate) fn advance(&self, bytes: u64) {
        self.0.counts.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for ProgressBar {
    fn drop(&mut self) {
        *self.counts.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.painter.abort_all();
        self.screen.wipe();
    }
}

async fn paint(counts: Arc<Counts>, screen: Arc<Screen>) {
    let started = Instant::now();
    let mut ticks = tokio::time::interval(if screen.is_terminal() { REPAINT } else { LINE });
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await; // The first tick comes at once. A very short transfer gets no bar.
    loop {
        ticks.tick().await;
        counts.paint(&screen, started.elapsed());
    }
}

impl Counts {
    fn doing(&self) -> MutexGuard<'_, BTreeMap<String, &'static str>> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Describes the current activities, such as `uploading a, scanning b`.
    fn what(&self) -> String {
        let doing = self.doing();
        if doing.is_empty() {
            return self.otherwise.clone();
        }
        plain(
            &doing.iter().map(|(name, verb)| format!("{verb} {name}")).collect::<Vec<_>>().join(", "),
            MAX_DESCRIPTION,
        )
    }

    fn paint(&self, screen: &Screen, elapsed: Duration) {
        let what = self.what();
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended {
            return;
        }
        if screen.is_terminal() {
            screen.paint(&fit(&what, done, total, elapsed, columns()));
        } else {
            screen.line(&format!("gantry: {}\n", line(&what, done, total, elapsed, false)));
        }
    }
}

/// Returns the width of the terminal, or 80 if it is unknown.
fn columns() -> usize {
    let columns = rustix::termios::tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
    if columns == 0 { 80 } else { columns }
}

/// Formats progress so that it fits on one line. A bar that wraps could not be removed.
fn fit(what: &str, done: u64, total: u64, elapsed: Duration, columns: usize) -> String {
    let room = columns.saturating_sub(1);
    let whole = [true, false].map(|bar| line(what, done, total, elapsed, bar));
    if let Some(line) = whole.into_iter().find(|line| line.chars().count() <= room) {
        return line;
    }
    let end = if total == 0 { " …".to_owned() } else { format!(" {} %", percent(done, total)) };
    let left = room.saturating_sub(end.chars().count());
    let short = if left == 0 { String::new() } else { plain(what, left) };
    format!("{short}{end}").chars().take(room).collect()
}

fn percent(done: u64, total: u64) -> u128 {
    u128::from(done.min(total)) * 100 / u128::from(total)
}

/// Formats progress, such as `uploading src [=====>    ]  52 %  1.2 MiB of 2.3 MiB, 12.0 MiB/s`.
fn line(what: &str, done: u64, total: u64, elapsed: Duration, bar: bool) -> String {
    if total == 0 {
        return format!("{what} …");
    }
    let done = done.min(total);
    let percent = percent(done, total);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::screen::tests::Written;

    #[test]
    fn line_has_amount_and_speed() {
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

    #[tokio::test]
    async fn current_activities_are_named() {
        let written = Written::default();
        let progress = Progress::start("uploading", &Arc::new(written.screen(false)), true);
        let what = || progress.0.counts.what();
        assert_eq!(what(), "uploading");
        progress.doing("scanning", "a");
        progress.doing("scanning", "b");
        progress.doing("uploading", "a");
        assert_eq!(what(), "uploading a, scanning b");
        progress.done("a");
        assert_eq!(what(), "scanning b");
        progress.done("b");
        assert_eq!(what(), "uploading");
    }

    #[test]
    fn bar_never_wraps() {
        let at = |columns| fit("uploading src", 1 << 20, 2 << 20, Duration::from_secs(1), columns);
        assert!(at(80).contains("[=====") && at(80).ends_with("1.0 MiB/s"), "{}", at(80));
        assert_eq!(at(70), "uploading src  50 %  1.0 MiB of 2.0 MiB, 1.0 MiB/s");
        assert_eq!(at(40), "uploading src 50 %");
        assert_eq!(at(15), "uploadin… 50 %");
        for columns in 0..100 {
            assert!(at(columns).chars().count() < columns.max(1), "{columns}: {:?}", at(columns));
            assert!(fit("scanning src", 0, 0, Duration::ZERO, columns).chars().count() < columns.max(1));
        }
    }

    #[tokio::test]
    async fn nothing_is_painted_after_end() {
        let written = Written::default();
        let screen = Arc::new(written.screen(true));
        let progress = Progress::start("uploading", &screen, false);
        let counts = progress.0.counts.clone();
        progress.expect(2);
        counts.paint(&screen, REPAINT);
        screen.line("d: uploaded\n");
        counts.paint(&screen, REPAINT);
        drop(progress);
        counts.paint(&screen, REPAINT);
        let bar = format!("\r{}\x1b[K", fit("uploading", 0, 2, REPAINT, columns()));
        assert_eq!(written.text(), format!("{bar}\r\x1b[Kd: uploaded\n{bar}\r\x1b[K"));
    }

    #[tokio::test]
    async fn progress_is_plain_lines_without_terminal() {
        let written = Written::default();
        let screen = Arc::new(written.screen(false));
        let progress = Progress::start("", &screen, false);
        progress.doing("uploading", "a\nb");
        progress.expect(4);
        progress.0.counts.paint(&screen, LINE);
        drop(progress);
        assert_eq!(written.text(), "gantry: uploading a?b   0 %  0 B of 4 B, 0 B/s\n");
    }
}
