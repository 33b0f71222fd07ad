//! `gantry exec`: runs a command in the container of a running workload.

use std::os::unix::ffi::OsStrExt;

use anyhow::bail;
use bytes::Bytes;
use domain::ProcessId;
use rpc::pb::runtime::{ProcessSpec, ProcessVariable};
use rpc::pb::scheduler::{AttemptLocation, Workload, WorkloadState};
use serde_json::json;

use crate::cli::args::ExecArgs;
use crate::cli::environment;
use crate::client::connect::Connection;
use crate::client::queries::workload;
use crate::ending::signals::Signals;
use crate::follow::attach::{FurtherProcess, Target};
use crate::follow::streams::Streams;
use crate::follow::window::Window;
use crate::follow::{exec, stdin};
use crate::render::ui::Ui;
use crate::render::{labels, terminal};

/// Executes `gantry exec`, and returns the exit code.
pub(crate) async fn exec(args: &ExecArgs, connection: &Connection, ui: &Ui) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let id = args.workload.to_string();
    let location = location(&workload(connection, "run a command in", &id).await?)?;

    let mut streams = Streams::open(ui, true)?;
    let reads_stdin = args.stdin && stdin::is_readable();
    let size = args.tty.then(terminal::size);
    streams.window = args.tty.then(|| Window::watch(size)).transpose()?;
    if reads_stdin {
        streams.read_stdin(ui, args.tty.then_some(&args.detach.keys));
    }
    let variables = environment::of_process(&args.environment, args.tty, ui)?.into_iter();
    let spec = ProcessSpec {
        command: args.command.iter().map(|argument| Bytes::copy_from_slice(argument.as_bytes())).collect(),
        environment: variables.map(|(name, value)| ProcessVariable { name, value }).collect(),
        directory: args
            .directory
            .as_ref()
            .map(|path| Bytes::copy_from_slice(path.as_bytes()))
            .unwrap_or_default(),
        user: args.user.clone().unwrap_or_default(),
        stdin: reads_stdin,
        terminal: size,
    };
    let process = FurtherProcess {
        process_id: ProcessId::new().to_string(),
        attempt_id: location.attempt_id.clone(),
        spec: Some(spec),
    };
    ui.event("starting", json!({ "process_id": process.process_id }));
    let target = Target { connection, ui, workload: &id, further: None };
    let ended = exec::follow(target, &process, &location, streams, &mut signals).await?;
    Ok(exec::end(ui, &process, ended))
}

/// Returns the location of a workload whose process runs.
fn location(workload: &Workload) -> anyhow::Result<AttemptLocation> {
    let id = &workload.workload_id;
    match (workload.state(), &workload.location) {
        (WorkloadState::Starting | WorkloadState::Running, Some(location)) => Ok(location.clone()),
        (WorkloadState::Finished, _) => {
            let outcome = labels::outcome(workload.outcome()).unwrap_or("ended");
            let end = Some(labels::end(workload)).filter(|end| !end.is_empty());
            let end = end.map_or_else(String::new, |end| format!(" ({end})"));
            bail!("workload {id} has ended: {outcome}{end}; a command can only run beside a running one")
        }
        (WorkloadState::Settling, _) => {
            bail!("workload {id} has ended; a command can only run beside a running one")
        }
        (WorkloadState::Assigned | WorkloadState::Starting | WorkloadState::Running, _) => {
            bail!("workload {id} is being prepared; wait until it runs: `gantry watch {id}`")
        }
        (WorkloadState::Accepted | WorkloadState::Pending | WorkloadState::Unspecified, _) => {
            bail!("workload {id} is queued; `gantry explain {id}` says why")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_running_workload_has_location() {
        let at = Some(AttemptLocation::default());
        let found = |state: WorkloadState| {
            let workload = Workload { state: state.into(), location: at.clone(), ..Workload::default() };
            location(&workload).map_or_else(|error| error.to_string(), |_| "found".to_owned())
        };
        assert_eq!(found(WorkloadState::Running), "found");
        for (state, text) in [
            (WorkloadState::Accepted, "is queued"),
            (WorkloadState::Pending, "is queued"),
            (WorkloadState::Assigned, "is being prepared"),
            (WorkloadState::Settling, "has ended"),
            (WorkloadState::Finished, "has ended"),
        ] {
            assert!(found(state).contains(text), "{state:?}");
        }
    }
}
