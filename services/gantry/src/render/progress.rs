//! Progress of transfers: one bar each on a terminal, or one line each every 10 s elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rpc::pb::scheduler::Terminal as TerminalSize;
use tokio::task::JoinSet;

use crate::render::screen::Screen;
use crate::render::table::{bytes, duration, plain, width};
use crate::render::terminal;

/// Interval between two updates of the bars.
const REPAINT: Duration = Duration::from_millis(100);
/// Interval between two lines.
const LINE: Duration = Duration::from_secs(10);
/// Maximum number of lines for bars.
const MAX_BARS: usize = 8;
/// Maximum length of a description, in columns.
const MAX_DESCRIPTION: usize = 60;
/// Time before which the remaining time is a guess.
const MEASURED: Duration = Duration::from_secs(1);

/// Bars of the transfers in progress. Clones share them.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Painter>);

/// Reference to [`Progress`] that does not keep it.
#[derive(Default)]
pub(crate) struct WeakProgress(Weak<Painter>);

struct Painter {
    bars: Arc<Bars>,
    screen: Arc<Screen>,
    /// Task that paints. It ends with the last clone.
    task: JoinSet<()>,
}

#[derive(Default)]
struct Bars(Mutex<BarList>);

#[derive(Default)]
struct BarList {
    /// In the order in which they started.
    bars: Vec<Arc<BarState>>,
    /// Nothing is painted once it is true.
    ended: bool,
}

/// Bar of one transfer. Clones share it. It is removed when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Bar(Arc<RunningBar>);

struct RunningBar {
    state: Arc<BarState>,
    bars: Arc<Bars>,
}

struct BarState {
    name: String,
    /// Current activity, and when it started.
    doing: Mutex<(&'static str, Instant)>,
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Starts without bars.
    pub(crate) fn start(screen: &Arc<Screen>, quiet: bool) -> Self {
        let bars = Arc::<Bars>::default();
        let mut task = JoinSet::new();
        if !quiet {
            task.spawn(paint(bars.clone(), screen.clone()));
        }
        Self(Arc::new(Painter { bars, screen: screen.clone(), task }))
    }

    pub(crate) fn downgrade(&self) -> WeakProgress {
        WeakProgress(Arc::downgrade(&self.0))
    }

    /// Starts a bar with 0 of 0 bytes.
    pub(crate) fn bar(&self, verb: &'static str, name: &str) -> Bar {
        let state = Arc::new(BarState {
            name: name.to_owned(),
            doing: Mutex::new((verb, Instant::now())),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
        });
        self.0.bars.held().bars.push(state.clone());
        Bar(Arc::new(RunningBar { state, bars: self.0.bars.clone() }))
    }
}

impl WeakProgress {
    pub(crate) fn upgrade(&self) -> Option<Progress> {
        self.0.upgrade().map(Progress)
    }
}

impl Bar {
    /// Sets the current activity, and starts again with 0 of 0 bytes.
    pub(crate) fn doing(&self, verb: &'static str) {
        let state = &self.0.state;
        *state.doing() = (verb, Instant::now());
        state.done.store(0, Ordering::Relaxed);
        state.total.store(0, Ordering::Relaxed);
    }

    /// Sets the total of the current activity.
    pub(crate) fn expect(&self, bytes: u64) {
        self.0.state.total.store(bytes, Ordering::Relaxed);
    }

    /// Sets the transferred bytes, unless more were transferred before.
    pub(crate) fn reach(&self, bytes: u64) {
        self.0.state.done.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Adds to the transferred bytes.
    pub(crate) fn advance(&self, bytes: u64) {
        self.0.state.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Painter {
    fn drop(&mut self) {
        self.bars.held().ended = true;
        self.task.abort_all();
        self.screen.wipe();
    }
}

impl Drop for RunningBar {
    fn drop(&mut self) {
        self.bars.held().bars.retain(|bar| !Arc::ptr_eq(bar, &self.state));
    }
}

async fn paint(bars: Arc<Bars>, screen: Arc<Screen>) {
    let mut ticks = tokio::time::interval(if screen.is_terminal() { REPAINT } else { LINE });
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await; // The first tick comes at once. A very short transfer gets no bar.
    loop {
        ticks.tick().await;
        bars.paint(&screen, terminal::size());
    }
}

impl Bars {
    fn held(&self) -> MutexGuard<'_, BarList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Paints the bars so that they fit into a terminal.
    fn paint(&self, screen: &Screen, size: TerminalSize) {
        let (columns, rows) = (size.columns as usize, size.rows as usize);
        let held = self.held();
        if held.ended {
            return;
        }
        let room = MAX_BARS.min(rows.saturating_sub(1)).max(1);
        let shown = if held.bars.len() > room { room - 1 } else { held.bars.len() };
        let (shown, others) = held.bars.split_at(shown);
        let others = (!others.is_empty()).then(|| format!("… and {} more", others.len()));
        if screen.is_terminal() {
            let bars = shown.iter().map(|bar| bar.read().fit(columns));
            screen.paint(&bars.chain(others).collect::<Vec<_>>());
        } else {
            let lines = shown.iter().map(|bar| bar.read().line(false)).chain(others);
            lines.for_each(|line| screen.line(&format!("gantry: {line}\n")));
        }
    }
}

impl BarState {
    fn doing(&self) -> MutexGuard<'_, (&'static str, Instant)> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> Amount {
        let (verb, since) = *self.doing();
        Amount {
            what: plain(&format!("{verb} {}", self.name), MAX_DESCRIPTION),
            done: self.done.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
            elapsed: since.elapsed(),
        }
    }
}

/// What a bar shows.
struct Amount {
    what: String,
    done: u64,
    total: u64,
    /// Time since the activity started.
    elapsed: Duration,
}

impl Amount {
    /// Formats the bar so that it fits on one line. A bar that wraps could not be replaced.
    fn fit(&self, columns: usize) -> String {
        let room = columns.saturating_sub(1);
        let whole = [true, false].map(|bar| self.line(bar));
        if let Some(line) = whole.into_iter().find(|line| width(line) <= room) {
            return line;
        }
        let end = if self.total == 0 { " …".to_owned() } else { format!(" {} %", self.percent()) };
        let left = room.saturating_sub(width(&end));
        let short = if left == 0 { String::new() } else { plain(&self.what, left) };
        format!("{short}{end}").chars().take(room).collect()
    }

    fn percent(&self) -> u128 {
        u128::from(self.done.min(self.total)) * 100 / u128::from(self.total)
    }

    /// Formats the bar, such as
    /// `uploading src [=====>    ]  52 %  1.2 MiB of 2.3 MiB, 12.0 MiB/s, 3 s left`.
    fn line(&self, bar: bool) -> String {
        let Self { what, total, elapsed, .. } = self;
        if *total == 0 {
            return format!("{what} …");
        }
        let (done, percent) = (self.done.min(*total), self.percent());
        let per_second = |amount: u64| u128::from(amount) * 1000 / elapsed.as_millis().max(1);
        let rate = u64::try_from(per_second(done)).unwrap_or(u64::MAX);
        let painted = if bar {
            let filled = usize::try_from(percent / 5).unwrap_or(0);
            let head = if filled < 20 { ">" } else { "" };
            format!("[{}{head}{}] ", "=".repeat(filled), " ".repeat(20 - filled - head.len()))
        } else {
            String::new()
        };
        let left = total - done;
        let left = if *elapsed < MEASURED || rate == 0 || left == 0 {
            String::new()
        } else {
            format!(", {} left", whole(left.div_ceil(rate)))
        };
        format!(
            "{what} {painted}{percent:3} %  {} of {}, {}/s{left}",
            bytes(done),
            bytes(*total),
            bytes(rate)
        )
    }
}

/// Formats a number of seconds without fractions.
fn whole(seconds: u64) -> String {
    if seconds < 10 { format!("{seconds} s") } else { duration(Duration::from_secs(seconds)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::screen::tests::Written;

    const SIZE: TerminalSize = TerminalSize { rows: 24, columns: 80 };

    fn amount(what: &str, done: u64, total: u64) -> Amount {
        Amount { what: what.to_owned(), done, total, elapsed: Duration::from_secs(1) }
    }

    #[test]
    fn line_has_amount_speed_and_remaining_time() {
        assert_eq!(
            amount("uploading src", 1 << 20, 3 << 20).line(true),
            "uploading src [======>             ]  33 %  1.0 MiB of 3.0 MiB, 1.0 MiB/s, 2 s left"
        );
        assert_eq!(
            amount("uploading", 5, 4).line(true),
            "uploading [====================] 100 %  4 B of 4 B, 4 B/s"
        );
        assert_eq!(amount("uploading", 0, 4).line(false), "uploading   0 %  0 B of 4 B, 0 B/s");
        assert_eq!(amount("scanning", 0, 0).line(true), "scanning …");
        let short = Amount { elapsed: Duration::from_millis(500), ..amount("uploading", 1, 2) };
        assert_eq!(short.line(false), "uploading  50 %  1 B of 2 B, 2 B/s");
    }

    #[test]
    fn bar_never_wraps() {
        let at = |columns| amount("uploading src", 1 << 20, 2 << 20).fit(columns);
        assert!(at(90).contains("[=====") && at(90).ends_with("1.0 MiB/s, 1 s left"), "{}", at(90));
        assert_eq!(at(70), "uploading src  50 %  1.0 MiB of 2.0 MiB, 1.0 MiB/s, 1 s left");
        assert_eq!(at(40), "uploading src 50 %");
        assert_eq!(at(15), "uploadin… 50 %");
        for columns in 0..100 {
            assert!(width(&at(columns)) < columns.max(1), "{columns}: {:?}", at(columns));
            for (what, total) in [("scanning src", 0), ("uploading 資料資料資料資料 🚀", 4)] {
                let line = amount(what, 1, total).fit(columns);
                assert!(width(&line) < columns.max(1), "{columns}: {line:?}");
            }
        }
    }

    #[tokio::test]
    async fn each_transfer_has_a_bar_while_it_lasts() {
        let written = Written::default();
        let screen = Arc::new(written.screen(true));
        let progress = Progress::start(&screen, true);
        let first = progress.bar("scanning", "a");
        let second = progress.bar("uploading", "b");
        let paint = || {
            let before = written.text().len();
            progress.0.bars.paint(&screen, SIZE);
            written.text()[before..].to_owned()
        };
        assert_eq!(paint(), "\rscanning a …\x1b[K\nuploading b …\x1b[K\x1b[J");
        first.doing("uploading");
        drop(second.clone());
        drop(second);
        assert_eq!(paint(), "\r\x1b[1Auploading a …\x1b[K\x1b[J");
        let more: Vec<_> = (0..MAX_BARS).map(|n| progress.bar("uploading", &n.to_string())).collect();
        let painted = paint();
        assert_eq!(painted.lines().count(), MAX_BARS);
        assert!(painted.contains("\n… and 2 more"), "{painted:?}");
        drop((first, more));
        assert_eq!(paint(), format!("\r\x1b[{}A\x1b[J", MAX_BARS - 1));
    }

    #[tokio::test]
    async fn nothing_is_painted_after_end() {
        let written = Written::default();
        let screen = Arc::new(written.screen(true));
        let progress = Progress::start(&screen, false);
        let bars = progress.0.bars.clone();
        let bar = progress.bar("uploading", "d");
        bars.paint(&screen, SIZE);
        screen.line("d: uploaded\n");
        bars.paint(&screen, SIZE);
        drop(progress);
        bars.paint(&screen, SIZE);
        drop(bar);
        let bar = "\ruploading d …\x1b[K\x1b[J";
        assert_eq!(written.text(), format!("{bar}\r\x1b[Jd: uploaded\n{bar}\r\x1b[J"));
    }

    #[tokio::test]
    async fn progress_is_plain_lines_without_terminal() {
        let written = Written::default();
        let screen = Arc::new(written.screen(false));
        let progress = Progress::start(&screen, false);
        let bar = progress.bar("uploading", "a\nb");
        bar.expect(4);
        progress.0.bars.paint(&screen, SIZE);
        assert_eq!(written.text(), "gantry: uploading a?b   0 %  0 B of 4 B, 0 B/s\n");
    }
}
