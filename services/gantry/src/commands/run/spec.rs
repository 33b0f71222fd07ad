//! Conversion of the options of `gantry run` into the spec of a workload.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, bail};
use bytes::Bytes;
use domain::ArtifactId;
use rpc::pb::scheduler::Terminal as TerminalSize;
use rpc::pb::scheduler::{
    Access, Entrypoint, EnvironmentVariable, HostImage, Image, Input, Limits, Network, Output, OutputMode,
    Privilege, Readiness, ReadinessCommand, ResourceRequests, Service, StdinMode, Terminal, WorkloadKind,
    WorkloadSpec, image::Source as ImageSource, readiness::Check,
};

use crate::cli::args::{KindArg, NetworkArg, RunArgs};
use crate::cli::environment;
use crate::cli::values::{ImageArg, InputArg, ServiceArg, ServiceCheck, Source};
use crate::follow::stdin;
use crate::render::terminal;
use crate::render::ui::Ui;

/// Makes the spec without its inputs and its build.
pub(super) fn spec(args: &RunArgs, team: &str, ui: &Ui) -> anyhow::Result<WorkloadSpec> {
    let attached = !args.detach;
    let mut variables = environment::of_files(&args.environment_files)?;
    variables.extend(args.environment.iter().cloned());
    Ok(WorkloadSpec {
        team: team.to_owned(),
        kind: match args.kind {
            KindArg::Task => WorkloadKind::Task,
            KindArg::Get => WorkloadKind::Get,
            KindArg::Put => WorkloadKind::Put,
            KindArg::Check => WorkloadKind::Check,
        }
        .into(),
        image: Some(image(&args.image, args.entrypoint.as_deref())),
        command: args.command.iter().map(|argument| Bytes::copy_from_slice(argument.as_bytes())).collect(),
        environment: environment::of_process(&variables, args.tty, ui)?
            .into_iter()
            .map(|(name, value)| EnvironmentVariable { name, value })
            .collect(),
        directory: Bytes::copy_from_slice(args.directory.as_bytes()),
        user: args.user.clone().unwrap_or_default(),
        stdin: match &args.stdin_file {
            Some(_) => StdinMode::Inline,
            None if forwards_stdin(args) => StdinMode::Attached,
            None => StdinMode::None,
        }
        .into(),
        inline_stdin: args.stdin_file.as_deref().map(read_stdin).transpose()?.unwrap_or_default(),
        keep_result: args.keep_result,
        output: if attached { OutputMode::Attached } else { OutputMode::Spooled }.into(),
        inputs: Vec::new(),
        outputs: args
            .outputs
            .iter()
            .map(|output| Output { name: output.name.clone(), ..Output::default() })
            .collect(),
        limits: Some(Limits {
            cpu_millis: args.cpu.unwrap_or(0),
            memory_bytes: args.memory.unwrap_or(0),
            pids: 0,
            disk_bytes: args.disk.unwrap_or(0),
        }),
        privilege: if args.privileged { Privilege::Privileged } else { Privilege::Confined }.into(),
        network: match args.network {
            _ if args.hermetic => Network::None,
            Some(NetworkArg::Private) | None => Network::Private,
            Some(NetworkArg::None) => Network::None,
            Some(NetworkArg::Host) => Network::Host,
        }
        .into(),
        tags: args.tags.clone(),
        capabilities: args.capabilities.clone(),
        platform: String::new(),
        queue_timeout: args.queue_timeout.map(rpc::duration),
        run_timeout: args.timeout.map(rpc::duration),
        build_id: String::new(),
        caches: Vec::new(),
        interruptible: args.interruptible,
        priority: args.priority,
        requests: Some(ResourceRequests {
            cpu_millis: args.reserve_cpu.unwrap_or(0),
            memory_bytes: args.reserve_memory.unwrap_or(0),
            disk_bytes: args.reserve_disk.unwrap_or(0),
        }),
        start_timeout: args.start_timeout.map(rpc::duration),
        retries: args.retries,
        worker: args.worker.clone().unwrap_or_default(),
        terminal: args.tty.then(|| {
            let TerminalSize { rows, columns } = terminal::size();
            Terminal { rows, columns }
        }),
        services: args.services.iter().map(service).collect(),
        name: args.name.clone().unwrap_or_default(),
    })
}

/// Returns the image of a spec. An image on this machine is replaced once it is an artifact.
fn image(image: &ImageArg, entrypoint: Option<&OsStr>) -> Image {
    let source = match image {
        ImageArg::Known(domain::workload::Image::Artifact(artifact)) => {
            ImageSource::ArtifactId(artifact.to_string())
        }
        ImageArg::Known(domain::workload::Image::ResourceType(name)) => {
            ImageSource::ResourceType(name.clone())
        }
        ImageArg::Known(domain::workload::Image::Reference(reference)) | ImageArg::Registry(reference) => {
            ImageSource::Reference(reference.clone())
        }
        ImageArg::Known(domain::workload::Image::Host) | ImageArg::File(_) => ImageSource::Host(HostImage {}),
    };
    let words = |entrypoint: &OsStr| {
        let word = (!entrypoint.is_empty()).then(|| Bytes::copy_from_slice(entrypoint.as_bytes()));
        Entrypoint { words: word.into_iter().collect() }
    };
    Image { source: Some(source), entrypoint: entrypoint.map(words) }
}

fn service(service: &ServiceArg) -> Service {
    let shell = |command: &str| {
        ["sh", "-c", command].map(|argument| Bytes::copy_from_slice(argument.as_bytes())).to_vec()
    };
    let check = service.check.as_ref().map(|check| match check {
        ServiceCheck::Port(port) => Check::TcpPort((*port).into()),
        ServiceCheck::Command(command) => Check::Command(ReadinessCommand { arguments: shell(command) }),
    });
    Service {
        name: service.name.clone(),
        image: Some(image(&service.image, service.command.is_some().then_some(OsStr::new("")))),
        command: service.command.as_deref().map(shell).unwrap_or_default(),
        readiness: Some(Readiness { check, timeout: service.timeout.map(rpc::duration) }),
        essential: service.essential,
        ..Service::default()
    }
}

pub(super) fn spec_inputs(args: &RunArgs, artifacts: &[ArtifactId]) -> Vec<Input> {
    args.inputs.iter().zip(artifacts.iter().copied()).map(spec_input).collect()
}

pub(super) fn spec_input((input, artifact): (&InputArg, ArtifactId)) -> Input {
    Input {
        name: input.name.clone(),
        artifact_id: artifact.to_string(),
        path: Bytes::new(),
        access: if input.read_only { Access::ReadOnly } else { Access::CopyOnWrite }.into(),
    }
}

pub(super) fn artifact_of(source: &Source) -> Option<ArtifactId> {
    match source {
        Source::Artifact(artifact) => Some(*artifact),
        Source::Directory(_) => None,
    }
}

/// Returns whether a caller sends standard input.
pub(super) fn forwards_stdin(args: &RunArgs) -> bool {
    let may_forward = match args.detach {
        // A person attaches later. A workload that may run twice cannot take input.
        true => args.tty && !args.interruptible && args.retries == 0,
        false => stdin::is_readable(),
    };
    !args.no_stdin && args.stdin_file.is_none() && may_forward
}

/// Reads the standard input of the command. `-` is the standard input of `gantry`.
fn read_stdin(path: &Path) -> anyhow::Result<Bytes> {
    let what = || format!("cannot read the standard input of the command from {}", path.display());
    let file: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin())
    } else {
        Box::new(std::fs::File::open(path).with_context(what)?)
    };
    let mut input = Vec::new();
    file.take(rpc::spec::MAX_STDIN_BYTES as u64 + 1).read_to_end(&mut input).with_context(what)?;
    if input.len() > rpc::spec::MAX_STDIN_BYTES {
        bail!("{} is larger than 1 MiB; give it to the command as an input", path.display());
    }
    Ok(input.into())
}
