//! `gantry top`: the running containers with the processor time and memory that they use now.
//!
//! On a terminal, the screen is painted at an interval until a person ends it. The cluster is only
//! observed: the calls do not count as its use, and a part that does not answer is left out.

mod look;
mod rows;
mod text;

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use self::look::{Observer, Snapshot, WORKERS};
use self::rows::{Row, rows};
use self::text::{Size, lines};
use crate::cli::args::{Global, TopArgs};
use crate::client::connect::Connection;
use crate::client::transfers::transfer_document;
use crate::ending::error::Interrupted;
use crate::ending::signals::Signals;
use crate::render::full_screen::{Action, FullScreen};
use crate::render::json as shown;
use crate::render::stdout::{print, print_json};

/// Longest time between the first two measurements, without which there is no CPU usage.
const FIRST_INTERVAL: Duration = Duration::from_millis(500);
/// Exit code if no cluster runs, or its scheduler does not answer.
const NONE_RUNS: u8 = 1;

/// Executes `gantry top`, and returns the exit code.
pub(crate) async fn top(args: &TopArgs, global: &Global) -> anyhow::Result<u8> {
    let Some(connection) = Connection::observe(global)? else {
        if global.json {
            print_json(&json!({ "running": false }))?;
        } else {
            print("no cluster runs on this machine; `gantry run` starts one in the background\n")?;
        }
        return Ok(NONE_RUNS);
    };
    let cluster = global.context.as_deref().or(global.server.as_deref()).unwrap_or("this machine");
    let observer = Observer::new(connection);
    let is_live = !args.once && args.count.is_none() && !global.json && FullScreen::is_possible();
    if is_live {
        live(observer, args.interval, cluster).await
    } else {
        printed(observer, args, global.json, cluster).await
    }
}

/// Paints the screen until a person ends it.
async fn live(mut observer: Observer, interval: Duration, cluster: &str) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let mut screen = FullScreen::enter()?;
    let mut snapshot: Option<Snapshot> = None;
    let mut pause = interval.min(FIRST_INTERVAL);
    loop {
        let next = Instant::now() + pause;
        let mut looking = Box::pin(observer.look());
        loop {
            tokio::select! {
                seen = &mut looking => {
                    snapshot = Some(seen);
                    break;
                }
                action = screen.action() => match action {
                    Action::End => return Ok(0),
                    Action::Resize => paint(&screen, snapshot.as_ref(), cluster)?,
                },
                code = signals.next() => return Err(Interrupted(code).into()),
            }
        }
        drop(looking);
        paint(&screen, snapshot.as_ref(), cluster)?;
        loop {
            tokio::select! {
                () = sleep_until(next) => break,
                action = screen.action() => match action {
                    Action::End => return Ok(0),
                    Action::Resize => paint(&screen, snapshot.as_ref(), cluster)?,
                },
                code = signals.next() => return Err(Interrupted(code).into()),
            }
        }
        pause = interval;
    }
}

fn paint(screen: &FullScreen, snapshot: Option<&Snapshot>, cluster: &str) -> anyhow::Result<()> {
    let Some(snapshot) = snapshot else { return Ok(()) };
    let (columns, rows) = screen.size();
    screen.paint(&lines(snapshot, cluster, Size { columns, rows }))
}

/// Prints snapshots one after another.
async fn printed(mut observer: Observer, args: &TopArgs, as_json: bool, cluster: &str) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let printing = async {
        // A first measurement gives no CPU usage.
        let mut code = 0;
        observer.look().await;
        let mut next = Instant::now() + args.interval.min(FIRST_INTERVAL);
        for number in 0..args.count.unwrap_or(1) {
            sleep_until(next).await;
            next = Instant::now() + args.interval;
            let snapshot = observer.look().await;
            code = if snapshot.lacks(WORKERS) { NONE_RUNS } else { 0 };
            if as_json {
                print_json(&document(&snapshot))?;
                continue;
            }
            let separator = if number == 0 { "" } else { "\n" };
            print(&format!("{separator}{}\n", lines(&snapshot, cluster, Size::default()).join("\n")))?;
        }
        Ok(code)
    };
    tokio::select! {
        printed = printing => printed,
        code = signals.next() => Err(Interrupted(code).into()),
    }
}

/// Makes documents with every field, for the test of the schema.
#[cfg(test)]
pub(crate) fn samples() -> [Value; 2] {
    let unseen = vec![("workers".to_owned(), "no answer in time".to_owned())];
    let mut filled = document(&Snapshot { unseen, ..Snapshot::default() });
    filled["containers"] = rows::samples().into();
    [document(&Snapshot::default()), filled]
}

/// Makes the JSON document of a snapshot.
fn document(snapshot: &Snapshot) -> Value {
    let unseen = snapshot.unseen.iter().map(|(what, why)| json!({ "what": what, "error": why }));
    json!({
        "at": crate::render::labels::instant(&snapshot.at),
        "workers": snapshot.workers.iter().map(shown::worker).collect::<Vec<_>>(),
        "waiting": snapshot.waiting,
        "queue": snapshot.queue.iter().map(shown::workload).collect::<Vec<_>>(),
        "containers": rows(snapshot).iter().map(Row::document).collect::<Vec<_>>(),
        "transfers": snapshot.transfers.iter().map(transfer_document).collect::<Vec<_>>(),
        "unseen": unseen.collect::<Vec<_>>(),
    })
}
