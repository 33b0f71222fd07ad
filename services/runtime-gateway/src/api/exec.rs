//! Start of processes in a container by callers.

use domain::workload::{OutputMode, Stdin};
use domain::{AttemptId, ProcessId};
use rpc::pb::runtime as pb;
use rpc::pb::scheduler as scheduler_pb;
use rpc::{check_label, invalid_field, parse_id, parse_team, required};
use runtime::{ProcessRole, ProcessSpec, RuntimeError, TerminalSize};
use server::Caller;
use tokio::time::Instant;
use tonic::Status;

use super::audit::ExecEvent;
use super::check_team;
use super::errors::status;
use crate::driven::{self, Held};
use crate::worker::attached_callers;
use crate::worker::containers::KnownContainer;
use crate::worker_set::{AttendedWorker, NotAttended, WorkerSet};

/// Maximum number of arguments of a process.
const MAX_ARGUMENTS: usize = 4096;
/// Maximum number of bytes of all arguments and variables of a process.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// Starts the process, or finds it if it was started before. Returns its id, and that of the main
/// process.
pub(super) async fn start(
    gateway: &WorkerSet,
    attended: &AttendedWorker,
    caller: Option<&Caller>,
    start: pb::StartProcess,
) -> Result<(ProcessId, ProcessId), Status> {
    let team = parse_team("start.team", start.team)?;
    let container_id: AttemptId = parse_id("start.container_id", &start.container_id)?;
    let process: ProcessId = parse_id("start.process_id", &start.process_id)?;
    let spec = parse_spec(required("start.spec", start.spec)?)?;
    let main = ProcessId::from(container_id);
    if process == main {
        if start.lease_token.is_empty() {
            let message = "is required: only the holder of a driven lease starts a main process";
            return Err(invalid_field("start.lease_token", message));
        }
        return start_main(gateway, attended, (&team, container_id), &start.lease_token, spec).await;
    }
    if !start.lease_token.is_empty() {
        return Err(invalid_field("start.lease_token", "must be empty unless a main process is started"));
    }
    let event = ExecEvent::new(caller, &attended.worker, (&team, container_id, process), &spec);
    start_further(attended, (&team, container_id, process), spec, &event)
        .await
        .map(|()| (process, main))
        .inspect_err(|refused| event.refused(refused))
}

/// Starts a further process, or finds it if it was started before.
async fn start_further(
    attended: &AttendedWorker,
    (team, container_id, process): (&str, AttemptId, ProcessId),
    spec: ProcessSpec,
    event: &ExecEvent,
) -> Result<(), Status> {
    let worker = &*attended.worker;
    let main = ProcessId::from(container_id);
    match check_team(worker, main, team).await {
        Err(error) if error.code() == tonic::Code::NotFound => {
            let is_it = |known: &KnownContainer| known.note.container == container_id && known.team == team;
            match worker.containers(is_it).await.map_err(status)?.pop() {
                Some(known) => return Err(status(RuntimeError::ContainerNotRunning(known.handle))),
                None => return Err(error),
            }
        }
        checked => _ = checked?,
    }
    match worker.runtime.container_of(process).await {
        Ok(container) if container.main == main => return Ok(()),
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
    let spec = ProcessSpec { output: OutputMode::Attached, ..spec };
    let stdin = spec.stdin.clone();
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
    event.started();
    let (attendance, worker, event) = (attended.attendance.clone(), attended.worker.clone(), event.clone());
    let began = Instant::now();
    attended.worker.tasks.spawn(async move {
        let modes = (stdin, OutputMode::Attached);
        tokio::select! {
            () = attached_callers::attend(&attendance, worker.runtime.as_ref(), process, modes) => {
                event.ended(worker.runtime.process(process).await, began.elapsed());
            }
            () = worker.stopping.cancelled() => {}
        }
    });
    Ok(())
}

/// Starts the main process of a driven container, or finds it if it was started before.
async fn start_main(
    gateway: &WorkerSet,
    named: &AttendedWorker,
    (team, container): (&str, AttemptId),
    token: &str,
    spec: ProcessSpec,
) -> Result<(ProcessId, ProcessId), Status> {
    let (attended, claims) = gateway.admit_lease(token).await?;
    if !std::ptr::eq(&*attended, named) {
        return Err(invalid_field("start.worker_id", "must be the worker of the lease"));
    }
    if claims.team != team {
        return Err(invalid_field("start.team", "must be the team of the lease"));
    }
    let process = ProcessId::from(container);
    // A process that has ended can be attached to after the end of its lease.
    match attended.worker.runtime.container_of(process).await {
        Ok(found) if found.team == team => return Ok((process, process)),
        Ok(_) => return Err(status(RuntimeError::ProcessNotFound(process))),
        Err(RuntimeError::ProcessNotFound(_)) => {}
        Err(error) => return Err(status(error)),
    }
    let context = attended.attempts.clone();
    let held = Held::begin(&context, claims, token, true).await?;
    // A caller that leaves must not leave half a start behind.
    let starting = attended
        .worker
        .tasks
        .spawn(async move { driven::start::start(&context, held, container, spec).await });
    starting.await.map_err(|error| {
        rpc::Reason::WorkerFailed.status(crate::SERVICE, format!("cannot start a process: {error}"))
    })??;
    Ok((process, process))
}

fn parse_spec(spec: pb::ProcessSpec) -> Result<ProcessSpec, Status> {
    let pb::ProcessSpec { command, environment, directory, user, stdin, terminal, output } = spec;
    let output = match output {
        0 => OutputMode::Attached,
        output => match rpc::parse_enum("start.spec.output", output)? {
            scheduler_pb::OutputMode::Spooled => OutputMode::Spooled,
            _ => OutputMode::Attached,
        },
    };
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
        output,
        terminal,
    })
}

/// Parses the size of a terminal.
pub(super) fn parse_size(field: &str, size: &scheduler_pb::Terminal) -> Result<TerminalSize, Status> {
    let parse = |name: &str, number: u32| {
        let number = u16::try_from(number).ok().filter(|number| *number > 0);
        number.ok_or_else(|| invalid_field(format!("{field}.{name}"), "must be 1 to 65535"))
    };
    Ok(TerminalSize { columns: parse("columns", size.columns)?, rows: parse("rows", size.rows)? })
}
