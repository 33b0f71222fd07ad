//! Start of further processes in a container.

use domain::workload::{OutputMode, Stdin};
use domain::{AttemptId, ProcessId};
use rpc::pb::runtime as pb;
use rpc::{check_label, invalid_field, parse_id, parse_team, required};
use runtime::{ProcessRole, ProcessSpec, RuntimeError, TerminalSize};
use tonic::Status;

use super::check_team;
use super::errors::status;
use crate::worker::Worker;
use crate::worker_set::NotAttended;

/// Maximum number of arguments of a process.
const MAX_ARGUMENTS: usize = 4096;
/// Maximum number of bytes of all arguments and variables of a process.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// Starts the process, or finds it if it was started before. Returns its id, and that of the main
/// process.
pub(super) async fn start(
    worker: &Worker,
    start: pb::StartProcess,
) -> Result<(ProcessId, ProcessId), Status> {
    let team = parse_team("start.team", start.team)?;
    let pb::start_process::Container::AttemptId(attempt) = required("start.container", start.container)?;
    let attempt: AttemptId = parse_id("start.attempt_id", &attempt)?;
    let process: ProcessId = parse_id("start.process_id", &start.process_id)?;
    let spec = parse_spec(required("start.spec", start.spec)?)?;
    let main = ProcessId::from(attempt);
    if process == main {
        return Err(invalid_field("start.process_id", "must not be the id of the attempt"));
    }
    check_team(worker, main, &team).await?;
    match worker.runtime.container_of(process).await {
        Ok(container) if container.main == main => return Ok((process, main)),
        // The id belongs to a process of another container, which the caller did not name.
        Ok(_) => return Err(status(RuntimeError::ProcessNotFound(process))),
        Err(RuntimeError::ProcessNotFound(_)) => {}
        Err(error) => return Err(status(error)),
    }
    for (feature, is_needed) in [("exec", true), ("terminal", spec.terminal.is_some())] {
        if is_needed && !worker.runtime.capabilities().features.iter().any(|has| has == feature) {
            let message = format!("this worker lacks the capability `{feature}`");
            return Err(status(RuntimeError::Unsupported(message)));
        }
    }
    // Another gateway may attend the worker by now.
    if !worker.session.is_exclusive() {
        let session = worker.session.current().ok_or_else(|| {
            rpc::Reason::Unavailable.status(crate::SERVICE, "the gateway has no session at present")
        })?;
        return Err(NotAttended { worker: session.worker, endpoint: None }.into());
    }
    let container = worker.runtime.container_of(main).await.map_err(status)?.handle;
    // A caller that leaves must not leave half a start behind.
    let runtime = worker.runtime.clone();
    let starting = worker.tasks.spawn(async move { runtime.start(container, process, spec).await });
    let started = starting.await.map_err(|error| {
        rpc::Reason::WorkerFailed.status(crate::SERVICE, format!("cannot start a process: {error}"))
    })?;
    started.map_err(|error| match error {
        // A destroyed container has no processes.
        RuntimeError::ContainerNotFound(_) => status(RuntimeError::ProcessNotFound(main)),
        RuntimeError::DiskFull(_) => {
            rpc::Reason::WorkerFailed.status(crate::SERVICE, domain::error_chain(&error))
        }
        error => status(error),
    })?;
    tracing::info!(process.id = %process, container.handle = %container, team, "process started by a caller");
    Ok((process, main))
}

fn parse_spec(spec: pb::ProcessSpec) -> Result<ProcessSpec, Status> {
    let pb::ProcessSpec { command, environment, directory, user, stdin, terminal } = spec;
    if command.first().is_none_or(bytes::Bytes::is_empty) {
        return Err(invalid_field("start.spec.command", "must name a program"));
    }
    if command.len() > MAX_ARGUMENTS {
        return Err(invalid_field("start.spec.command", format!("must be at most {MAX_ARGUMENTS}")));
    }
    for (index, argument) in command.iter().enumerate() {
        if argument.contains(&0) {
            return Err(invalid_field(format!("start.spec.command[{index}]"), "must not contain NUL"));
        }
    }
    let arguments = command.iter().map(|argument| argument.len());
    let variables = environment.iter().map(|variable| variable.name.len() + variable.value.len());
    if arguments.chain(variables).sum::<usize>() > MAX_TEXT_BYTES {
        let message = format!("must be at most {MAX_TEXT_BYTES} bytes, with the environment");
        return Err(invalid_field("start.spec.command", message));
    }
    let environment = environment.into_iter().map(|variable| (variable.name.into(), variable.value.into()));
    if !directory.is_empty() && (!directory.starts_with(b"/") || directory.contains(&0)) {
        return Err(invalid_field("start.spec.directory", "must be absolute, without NUL"));
    }
    check_label("start.spec.user", &user)?;
    let terminal = terminal.map(|size| parse_size("start.spec.terminal", &size)).transpose()?;
    Ok(ProcessSpec {
        command: command.into_iter().map(Into::into).collect(),
        environment: rpc::spec::parse_variables("start.spec.environment", environment)?,
        directory: Some(directory.to_vec()).filter(|directory| !directory.is_empty()),
        user: Some(user).filter(|user| !user.is_empty()),
        role: ProcessRole::Exec,
        stdin: if stdin || terminal.is_some() { Stdin::Attached } else { Stdin::None },
        output: OutputMode::Attached,
        terminal,
    })
}

/// Parses the size of a terminal.
pub(super) fn parse_size(field: &str, size: &pb::TerminalSize) -> Result<TerminalSize, Status> {
    let parse = |name: &str, number: u32| {
        let number = u16::try_from(number).ok().filter(|number| *number > 0);
        number.ok_or_else(|| invalid_field(format!("{field}.{name}"), "must be 1 to 65535"))
    };
    Ok(TerminalSize { columns: parse("columns", size.columns)?, rows: parse("rows", size.rows)? })
}
