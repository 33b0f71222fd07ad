//! `gantry attach`, `gantry logs`, `gantry watch` and `gantry cancel`: commands about submitted
//! workloads.

use anyhow::bail;
use prost_types::Timestamp;
use rpc::pb::scheduler::watch_response::Event;
use rpc::pb::scheduler::{Finished, Outcome, StdinMode, Workload, WorkloadState};
use serde_json::{Value, json};

use crate::cli::args::{AttachArgs, CancelArgs, WatchArgs, WorkloadArgs};
use crate::client::connect::Connection;
use crate::client::queries::workload;
use crate::ending::error::Interrupted;
use crate::ending::exit_code;
use crate::ending::signals::Signals;
use crate::follow::end::{Delivery, end};
use crate::follow::narrate::{WaitReasons, describe_event};
use crate::follow::stdin;
use crate::follow::watch::Watch;
use crate::follow::{self, Follow, OnSignal};
use crate::render::json as shown;
use crate::render::labels::{self, now};
use crate::render::stdout::{print, print_json};
use crate::render::ui::Ui;

/// Executes `gantry attach`, and returns the exit code.
pub(crate) async fn attach_to(args: &AttachArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let id = args.workload.to_string();
    let Workload { spec, state, .. } = workload(connection, "attach to", &id).await?;
    let takes_input = spec.is_some_and(|spec| spec.stdin() == StdinMode::Attached);
    let lives = state != i32::from(WorkloadState::Finished);
    let follow = Follow {
        connection,
        ui,
        workload: id,
        on_signal: OnSignal::Leave,
        narrate: lives,
        stdin: takes_input && lives && !args.no_stdin && stdin::is_readable(),
        acknowledge: true,
    };
    let followed = follow.run(&mut signals).await?;
    let code = end(ui, &followed, &Ok(Delivery::Whole));
    ui.event("finished", shown::finished(&followed.finished, code));
    Ok(code)
}

/// Executes `gantry logs`: prints the kept output, and follows it to its end.
pub(crate) async fn logs(args: &WorkloadArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    let follow = Follow {
        connection,
        ui,
        workload: args.workload.to_string(),
        on_signal: OnSignal::Leave,
        narrate: false,
        stdin: false,
        // Only attached callers acknowledge output. Reading logs does not affect the process.
        acknowledge: false,
    };
    let followed = follow.run(&mut signals).await?;
    if let (None, Some(failure)) = (&followed.finished.exit, &followed.finished.failure) {
        ui.note(&format!(
            "the workload ended without an exit code: {} ({})",
            failure.message, failure.reason
        ));
    } else if followed.finished.outcome() == Outcome::Aborted {
        ui.note("the workload was cancelled; this is all of its output");
    }
    if followed.output_lost {
        let Finished { exit, failure, .. } = &followed.finished;
        let ended = Workload { exit: *exit, failure: failure.clone(), ..Workload::default() };
        let outcome = labels::outcome(followed.finished.outcome()).unwrap_or("ended");
        let end = Some(labels::end(&ended)).filter(|end| !end.is_empty());
        let end = end.map_or_else(String::new, |end| format!(" ({end})"));
        let workload = args.workload;
        bail!("some output is missing; the workload {outcome}{end}; see `gantry show workload {workload}`");
    }
    ui.event("finished", shown::finished(&followed.finished, 0));
    Ok(())
}

/// Executes `gantry watch`: prints the events of a workload, and returns the exit code.
pub(crate) async fn watch(
    args: &WatchArgs,
    connection: &Connection,
    ui: &Ui,
    as_json: bool,
) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let id = args.workload.to_string();
    let (mut watch, mut waiting) = (Watch::new(connection, ui, id.clone()), WaitReasons::default());
    loop {
        let (at, event) = tokio::select! {
            event = watch.next_at() => event?,
            Some(why) = waiting.next() => {
                print_event(&now(), "waiting", why.details, &why.text, as_json)?;
                continue;
            }
            code = signals.next() => return Err(Interrupted(code).into()),
        };
        waiting.over();
        let description = describe_event(&event);
        print_event(&at, description.name, description.details.clone(), &description.text, as_json)?;
        match event {
            Event::Queued(_) => waiting.changed(connection, &id, description),
            Event::Finished(finished) => return Ok(exit_code::end(&finished, None).code),
            _ => {}
        }
    }
}

/// Prints an event of a workload. `details` is an object.
fn print_event(at: &Timestamp, name: &str, details: Value, text: &str, as_json: bool) -> anyhow::Result<()> {
    let at = labels::instant(at);
    if !as_json {
        return print(&format!("{at}  {}\n", text.replace('\n', "\n    ")));
    }
    let mut event = json!({ "event": name, "at": at });
    if let (Value::Object(event), Value::Object(details)) = (&mut event, details) {
        event.extend(details);
    }
    print_json(&event)
}

/// Executes `gantry cancel`. A workload that has ended does not change.
pub(crate) async fn cancel(
    args: &CancelArgs,
    connection: &Connection,
    ui: &Ui,
    as_json: bool,
) -> anyhow::Result<()> {
    let id = args.workload.to_string();
    let known = workload(connection, "cancel", &id).await?;
    let ended = known.state() == WorkloadState::Finished;
    if ended {
        let outcome = labels::outcome(known.outcome()).unwrap_or("ended");
        let end = Some(labels::end(&known)).filter(|end| !end.is_empty());
        let end = end.map_or_else(String::new, |end| format!(" ({end})"));
        ui.note(&format!("the workload has already ended: {outcome}{end}"));
    } else {
        follow::cancel(connection, id.clone(), args.grace).await?;
        ui.note("the workload is being stopped");
    }
    if as_json {
        let state = labels::workload_state(known.state());
        let outcome = labels::outcome(known.outcome());
        print_json(&json!({ "workload_id": id, "asked": !ended, "state": state, "outcome": outcome }))?;
    }
    Ok(())
}
