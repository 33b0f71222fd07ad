//! `gantry attach`, `logs`, `watch`, `wait`, `cancel` and `kill`: commands about submitted
//! workloads.

use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::{Context, bail};
use domain::ProcessId;
use prost_types::Timestamp;
use rpc::pb::scheduler::watch_response::Event;
use rpc::pb::scheduler::{
    AttemptLocation, Finished, Outcome, PublishedOutput, StdinMode, Workload, WorkloadState,
};
use serde_json::{Value, json};

use crate::cli::args::{AttachArgs, CancelArgs, KillArgs, LogsArgs, WaitArgs, WatchArgs};
use crate::cli::values::StopSignal;
use crate::client::connect::Connection;
use crate::client::queries::{container_of_service, workload};
use crate::client::references::workload_id;
use crate::ending::error::{Interrupted, describe};
use crate::ending::exit_code;
use crate::ending::signals::Signals;
use crate::follow::attach::{AttachEnd, FurtherProcess, Target, attach};
use crate::follow::end::{Delivery, end};
use crate::follow::narrate::{WaitReasons, describe_event};
use crate::follow::streams::Streams;
use crate::follow::watch::Watch;
use crate::follow::window::Window;
use crate::follow::{self, Follow, OnSignal, exec, stdin};
use crate::render::json as shown;
use crate::render::labels::{self, now};
use crate::render::stdout::{print, print_json};
use crate::render::ui::Ui;

/// Executes `gantry attach`, and returns the exit code.
pub(crate) async fn attach_to(args: &AttachArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let Workload { workload_id: id, spec, state, location, .. } =
        workload(connection, "attach to", &args.workload).await?;
    if let Some(process) = args.process {
        let Some(location) = location else {
            bail!("workload {id} has no process {process}: the workload was never placed on a worker");
        };
        let target = Target { connection, ui, workload: &id, further: None };
        return attach_to_process(args, process, &location, target, &mut signals).await;
    }
    let has_terminal = spec.as_ref().is_some_and(|spec| spec.terminal.is_some());
    let takes_input = spec.is_some_and(|spec| spec.stdin() == StdinMode::Attached);
    let lives = state != i32::from(WorkloadState::Finished);
    let has_input = takes_input && lives && !args.no_stdin && stdin::is_readable();
    // The end of a pipe would end the shell of another caller.
    let is_piped = has_input && has_terminal && !io::stdin().is_terminal();
    if is_piped {
        ui.note("standard input is not a terminal, so the command does not receive it");
    }
    let follow = Follow {
        connection,
        ui,
        workload: id,
        on_signal: OnSignal::Leave,
        narrate: lives,
        stdin: has_input && !is_piped,
        acknowledge: true,
        terminal: has_terminal.then_some(&args.detach.keys),
        tail: None,
        since: None,
    };
    let followed = follow.run(&mut signals).await?;
    let code = end(ui, &followed, &Ok(Delivery::Whole));
    for PublishedOutput { name, artifact_id, .. } in &followed.finished.outputs {
        ui.note(&format!(
            "{name}: kept as artifact {artifact_id}; download it with `gantry download {artifact_id} DIR`"
        ));
    }
    ui.event("finished", shown::finished(&followed.finished, code));
    Ok(code)
}

/// Attaches to a process that `gantry exec` started, and returns the exit code.
async fn attach_to_process(
    args: &AttachArgs,
    process: ProcessId,
    location: &AttemptLocation,
    target: Target<'_>,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let ui = target.ui;
    let mut streams = Streams::open(ui, true)?;
    if !args.no_stdin && stdin::is_readable() {
        // The first message tells whether the process has a terminal.
        streams.window = io::stdin().is_terminal().then(Window::guess).transpose()?;
        streams.read_stdin(ui, Some(&args.detach.keys), true);
    }
    let process = FurtherProcess {
        process_id: process.to_string(),
        attempt_id: location.attempt_id.clone(),
        container_id: location.attempt_id.clone(),
        spec: None,
        idle_timeout: None,
    };
    let ended = exec::follow(target, &process, location, streams, signals).await?;
    Ok(exec::end(ui, &process, ended))
}

/// Executes `gantry logs`: prints the kept output, and follows it to its end if the caller wants
/// that or the workload has ended.
pub(crate) async fn logs(args: &LogsArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    if let Some(service) = &args.service {
        return logs_of_service(args, service, connection, ui, &mut signals).await;
    }
    let id = if args.follow {
        workload_id(connection, "read the output of", &args.workload).await?
    } else {
        let workload = workload(connection, "read the output of", &args.workload).await?;
        match (workload.state(), &workload.location) {
            (WorkloadState::Finished, _) => {}
            (WorkloadState::Running | WorkloadState::Settling, Some(location)) => {
                let target = Target { connection, ui, workload: &workload.workload_id, further: None };
                let what = format!("the output of workload {}", workload.workload_id);
                return print_kept(args, target, location, &what, &mut signals).await;
            }
            (state, _) => {
                let state = labels::workload_state(state);
                ui.note(&format!(
                    "the command has not started: the workload is {state}; `-f` waits for its output"
                ));
                return Ok(());
            }
        }
        workload.workload_id
    };
    let follow = Follow {
        connection,
        ui,
        workload: id.clone(),
        on_signal: OnSignal::Leave,
        narrate: false,
        stdin: false,
        // Only attached callers acknowledge output. Reading logs does not affect the process.
        acknowledge: false,
        terminal: None,
        tail: args.tail,
        since: args.since,
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
        bail!("some output is missing; the workload {outcome}{end}; see `gantry show workload {id}`");
    }
    ui.event("finished", shown::finished(&followed.finished, 0));
    Ok(())
}

/// Prints the kept output of a service of the current or last attempt.
async fn logs_of_service(
    args: &LogsArgs,
    service: &str,
    connection: &Connection,
    ui: &Ui,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    let workload = workload(connection, "read a service of", &args.workload).await?;
    let id = workload.workload_id.clone();
    let Some(location) = &workload.location else {
        bail!("service {service} of workload {id} has no output: the workload was not placed on a worker");
    };
    let container = container_of_service(&workload, &location.attempt_id, service)?;
    let process = FurtherProcess {
        process_id: container.to_string(),
        attempt_id: location.attempt_id.clone(),
        container_id: container.to_string(),
        spec: None,
        idle_timeout: None,
    };
    let target = Target { connection, ui, workload: &id, further: Some(&process) };
    let what = format!("the output of service {service} of workload {id}");
    print_kept(args, target, location, &what, signals).await
}

/// Prints the kept output of a process, and follows it to its end if the caller wants that. `what`
/// describes the output.
async fn print_kept(
    args: &LogsArgs,
    target: Target<'_>,
    location: &AttemptLocation,
    what: &str,
    signals: &mut Signals,
) -> anyhow::Result<()> {
    // Only attached callers acknowledge output. Reading logs does not affect the process.
    let mut streams = Streams::open(target.ui, false)?;
    streams.state.since = args.since;
    streams.state.only_old = !args.follow;
    if let Some(lines) = args.tail {
        streams.keep_tails(lines);
    }
    let end = tokio::select! {
        end = attach(target, location.clone(), &mut streams) => end,
        code = signals.next() => return Err(Interrupted(code).into()),
    };
    match end {
        AttachEnd::Lost(refused) => return Err(refused).with_context(|| format!("cannot read {what}")),
        AttachEnd::WorkerMissing(missing) => bail!("cannot read {what}: {missing}"),
        AttachEnd::StdoutClosed => return Err(Interrupted(exit_code::PIPE).into()),
        AttachEnd::Done | AttachEnd::InterruptRefused | AttachEnd::InputRefused(_) | AttachEnd::Detached => {}
    }
    if streams.is_incomplete() {
        bail!("some of {what} is missing");
    }
    Ok(())
}

/// Executes `gantry watch`: prints the events of a workload, and returns the exit code.
pub(crate) async fn watch(args: &WatchArgs, connection: &Connection, as_json: bool) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let id = workload_id(connection, "watch", &args.workload).await?;
    let (mut watch, mut waiting) = (Watch::new(connection, id.clone()), WaitReasons::default());
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

/// Executes `gantry wait`: prints the exit code of each workload, and returns the first that is not
/// 0.
pub(crate) async fn wait(args: &WaitArgs, connection: &Connection, as_json: bool) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let mut first = 0;
    for reference in &args.workloads {
        let ended = async {
            let id = workload_id(connection, "wait for", reference).await?;
            let mut watch = Watch::new(connection, id.clone());
            loop {
                if let Event::Finished(finished) = watch.next().await? {
                    return Ok::<_, anyhow::Error>((id, finished));
                }
            }
        };
        let (id, finished) = tokio::select! {
            ended = ended => ended?,
            code = signals.next() => return Err(Interrupted(code).into()),
        };
        let code = exit_code::end(&finished, None).code;
        if as_json {
            let mut ended = shown::finished(&finished, code);
            ended["workload_id"] = id.into();
            print_json(&ended)?;
        } else {
            print(&format!("{code}\n"))?;
        }
        if first == 0 {
            first = code;
        }
    }
    Ok(first)
}

/// Executes `gantry cancel`.
pub(crate) async fn cancel(
    args: &CancelArgs,
    connection: &Connection,
    ui: &Ui,
    as_json: bool,
) -> anyhow::Result<()> {
    stop(&args.workloads, args.grace, connection, ui, as_json).await
}

/// Time between TERM and KILL for `gantry kill -s TERM`.
const TERM_GRACE: Duration = Duration::from_secs(10);

/// Executes `gantry kill`.
pub(crate) async fn kill(
    args: &KillArgs,
    connection: &Connection,
    ui: &Ui,
    as_json: bool,
) -> anyhow::Result<()> {
    let grace = match args.signal {
        StopSignal::Kill => Duration::ZERO,
        StopSignal::Terminate => TERM_GRACE,
    };
    stop(&args.workloads, grace, connection, ui, as_json).await
}

/// Cancels workloads. A workload that has ended does not change. Each reference is tried, and the
/// first failure is returned.
async fn stop(
    references: &[String],
    grace: Duration,
    connection: &Connection,
    ui: &Ui,
    as_json: bool,
) -> anyhow::Result<()> {
    let mut result = Ok(());
    for reference in references {
        let stopped = stop_one(reference, grace, connection, ui, as_json).await;
        match (&result, stopped) {
            (Err(_), Err(error)) => ui.error(&describe(&error)),
            (Ok(()), stopped) => result = stopped,
            (Err(_), Ok(())) => {}
        }
    }
    result
}

async fn stop_one(
    reference: &str,
    grace: Duration,
    connection: &Connection,
    ui: &Ui,
    as_json: bool,
) -> anyhow::Result<()> {
    let known = workload(connection, "cancel", reference).await?;
    let id = known.workload_id.clone();
    let ended = known.state() == WorkloadState::Finished;
    // A reference that is not the id says nothing about which workload it is.
    let what = if reference == id { "the workload".to_owned() } else { format!("workload {id}") };
    if ended {
        let outcome = labels::outcome(known.outcome()).unwrap_or("ended");
        let end = Some(labels::end(&known)).filter(|end| !end.is_empty());
        let end = end.map_or_else(String::new, |end| format!(" ({end})"));
        ui.note(&format!("{what} has already ended: {outcome}{end}"));
    } else {
        follow::cancel(connection, id.clone(), grace).await?;
        ui.note(&format!("{what} is being stopped"));
    }
    if as_json {
        let state = labels::workload_state(known.state());
        let outcome = labels::outcome(known.outcome());
        print_json(&json!({ "workload_id": id, "asked": !ended, "state": state, "outcome": outcome }))?;
    }
    Ok(())
}
