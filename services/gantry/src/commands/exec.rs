//! `gantry exec`: runs a command in the container of a workload.

use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use anyhow::{anyhow, bail};
use bytes::Bytes;
use domain::ProcessId;
use rpc::Reason;
use rpc::pb::runtime::ProcessSpec;
use rpc::pb::scheduler::EnvironmentVariable;
use rpc::pb::scheduler::{AttemptLocation, Workload, WorkloadState, watch_response::Event};
use serde_json::json;

use crate::cli::args::ExecArgs;
use crate::cli::environment;
use crate::client::connect::Connection;
use crate::client::queries::{container_of_service, workload};
use crate::ending::error::{Interrupted, Refused};
use crate::ending::signals::Signals;
use crate::follow::attach::{FurtherProcess, Target};
use crate::follow::streams::Streams;
use crate::follow::watch::Watch;
use crate::follow::window::Window;
use crate::follow::{exec, stdin};
use crate::render::ui::Ui;
use crate::render::{labels, terminal};

/// Time after which the command says that it waits.
const NOTICE_AFTER: Duration = Duration::from_secs(1);

/// Executes `gantry exec`, and returns the exit code.
pub(crate) async fn exec(args: &ExecArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let mut workload = workload(connection, "run a command in", &args.workload).await?;
    let id = workload.workload_id.clone();
    if !has_location(&workload) && !has_ended(&workload) {
        tokio::select! {
            waited = wait_for_location(connection, ui, &workload) => workload = waited?,
            code = signals.next() => return Err(Interrupted(code).into()),
        }
    }
    let location = location(&workload)?;

    let mut streams = Streams::open(ui, true)?;
    let reads_stdin = args.stdin && stdin::is_readable();
    let size = args.tty.then(terminal::size);
    streams.window = args.tty.then(|| Window::watch(size)).transpose()?;
    if reads_stdin {
        streams.read_stdin(ui, args.tty.then_some(&args.detach.keys), false);
    }
    let variables = environment::of_process(&args.environment, args.tty, ui)?.into_iter();
    let spec = ProcessSpec {
        command: args.command.iter().map(|argument| Bytes::copy_from_slice(argument.as_bytes())).collect(),
        environment: variables.map(|(name, value)| EnvironmentVariable { name, value }).collect(),
        directory: args
            .directory
            .as_ref()
            .map(|path| Bytes::copy_from_slice(path.as_bytes()))
            .unwrap_or_default(),
        user: args.user.clone().unwrap_or_default(),
        stdin: reads_stdin,
        terminal: size,
        ..ProcessSpec::default()
    };
    let attempt_id = location.attempt_id.clone();
    let container_id = match &args.service {
        Some(service) => container_of_service(&workload, &attempt_id, service)?.to_string(),
        None => attempt_id.clone(),
    };
    let process = FurtherProcess {
        process_id: ProcessId::new().to_string(),
        attempt_id,
        container_id,
        spec: Some(spec),
        idle_timeout: args.idle_timeout,
    };
    let has_ended = has_ended(&workload);
    if has_ended && std::io::stderr().is_terminal() {
        ui.note("the workload has ended: the command sees a copy of its files without /tmp, /run and /dev/shm; the copy is lost at its end");
    }
    let services = workload.spec.iter().flat_map(|spec| &spec.services).map(|service| service.name.as_str());
    let services: Vec<_> = services.collect();
    if workload.state() == WorkloadState::Starting && args.service.is_none() && !services.is_empty() {
        ui.note(&format!(
            "the container runs when its services are ready ({}); look into a service with --service NAME",
            services.join(", ")
        ));
    }
    ui.event("starting", json!({ "process_id": process.process_id }));
    let target = Target { connection, ui, workload: &id, further: None };
    let ended = exec::follow(target, &process, &location, streams, &mut signals).await;
    let ended = ended.map_err(|error| explain_missing(error, &workload))?;
    if !has_ended && ended.was_killed() && has_ended_meanwhile(connection, &id).await {
        ui.warn(&format!(
            "the workload ended, and the command with it; `gantry exec {id}` still shows the files on a host worker"
        ));
    }
    Ok(exec::end(ui, &process, ended))
}

/// Returns whether the process of a workload has ended.
fn has_ended(workload: &Workload) -> bool {
    matches!(workload.state(), WorkloadState::Settling | WorkloadState::Finished)
}

/// Returns whether the process of a workload has ended by now. Only an explanation depends on the
/// answer, so an error counts as no.
async fn has_ended_meanwhile(connection: &Connection, id: &str) -> bool {
    // The end of the process is reported a moment later.
    for _ in 0..20 {
        match workload(connection, "check", id).await {
            Ok(workload) if has_ended(&workload) => return true,
            Ok(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            Err(_) => return false,
        }
    }
    false
}

/// Explains why an ended workload has no container.
fn explain_missing(error: anyhow::Error, workload: &Workload) -> anyhow::Error {
    let refused = error.chain().find_map(|cause| cause.downcast_ref::<Refused>());
    let has_ended = has_ended(workload);
    let is_service_failed =
        workload.failure.as_ref().is_some_and(|failure| failure.reason == "SERVICE_FAILED");
    match refused {
        Some(refused)
            if is_service_failed && workload.exit.is_none() && refused.is(Reason::ContainerNotRunning) =>
        {
            anyhow!(
                "the command of workload {} was never started; look into its service with --service NAME",
                workload.workload_id
            )
        }
        Some(refused) if has_ended && refused.is(Reason::ProcessNotFound) => anyhow!(
            "the container of workload {} is deleted; a container is kept for 5 min after its end \
             (`--gc-grace` of the cluster), and as long as a command runs in it",
            workload.workload_id
        ),
        Some(refused) if has_ended && refused.is(Reason::ContainerNotRunning) => anyhow!(
            "workload {} has ended, and its worker runs commands only in running containers",
            workload.workload_id
        ),
        _ => error,
    }
}

/// Returns whether the container of a workload may exist.
fn has_location(workload: &Workload) -> bool {
    let may_run = matches!(workload.state(), WorkloadState::Starting | WorkloadState::Running);
    workload.location.is_some() && (may_run || has_ended(workload))
}

/// Waits until the container of a workload may exist, or the workload has ended.
async fn wait_for_location(connection: &Connection, ui: &Ui, waiting: &Workload) -> anyhow::Result<Workload> {
    let id = &waiting.workload_id;
    let mut watch = Watch::new(connection, id.clone());
    let mut notice = std::pin::pin!(tokio::time::sleep(NOTICE_AFTER));
    let mut is_told = false;
    loop {
        let event = tokio::select! {
            event = watch.next() => event?,
            () = &mut notice, if !is_told => {
                ui.note(&format!("waiting until workload {id} runs; `gantry explain {id}` says why it does not"));
                is_told = true;
                continue;
            }
        };
        if let Event::Running(_) | Event::Preparing(_) | Event::Finished(_) = event {
            let now = workload(connection, "run a command in", id).await?;
            if has_location(&now) || has_ended(&now) {
                return Ok(now);
            }
        }
    }
}

/// Returns the location of the last attempt at a workload, unless its process cannot have started.
fn location(workload: &Workload) -> anyhow::Result<AttemptLocation> {
    let id = &workload.workload_id;
    match (workload.state(), &workload.location) {
        (
            WorkloadState::Starting
            | WorkloadState::Running
            | WorkloadState::Settling
            | WorkloadState::Finished,
            Some(location),
        ) => Ok(location.clone()),
        (WorkloadState::Settling | WorkloadState::Finished, None) => {
            let outcome = labels::outcome(workload.outcome()).unwrap_or("ended");
            let end = Some(labels::end(workload)).filter(|end| !end.is_empty());
            let end = end.map_or_else(String::new, |end| format!(" ({end})"));
            bail!("workload {id} has no container: it ended before its process was started: {outcome}{end}")
        }
        _ => bail!("workload {id} does not run; `gantry explain {id}` says why"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_without_process_has_no_location() {
        let at = Some(AttemptLocation::default());
        let workload = |state: WorkloadState| Workload {
            state: state.into(),
            location: at.clone(),
            ..Workload::default()
        };
        for (state, has) in [
            (WorkloadState::Accepted, false),
            (WorkloadState::Pending, false),
            (WorkloadState::Assigned, false),
            (WorkloadState::Starting, true),
            (WorkloadState::Running, true),
            (WorkloadState::Finished, true),
        ] {
            assert_eq!(has_location(&workload(state)), has, "{state:?}");
            assert_eq!(location(&workload(state)).is_ok(), has, "{state:?}");
        }
        let unplaced = Workload { state: WorkloadState::Finished.into(), ..Workload::default() };
        let error = location(&unplaced).expect_err("no container").to_string();
        assert!(error.contains("ended before its process was started"), "{error}");
    }
}
