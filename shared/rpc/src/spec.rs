//! Validation and conversion of workload specs.
//!
//! The scheduler validates a spec at its submission ([`parse`]), stores its encoding ([`encode`]),
//! and returns it without secrets ([`without_secrets`]). A stored spec is decoded without checking
//! limits that may have changed since ([`parse_accepted`]).

pub mod name;
mod services;

use std::collections::HashSet;

use domain::workload::{
    Bytes, CacheMount, EnvironmentVariable, Image, InlineStdin, Input, Limits, Network, Output, OutputMode,
    OutputOwner, ResourceRequests, Stdin, TerminalSize, WorkloadKind, WorkloadSpec,
};
use prost::Message;
use tonic::Status;

use crate::pb::scheduler as pb;
use crate::{
    check_label, check_labels, check_tags, duration, invalid_field, owner, parse_duration, parse_enum,
    parse_id, parse_optional_id, parse_team, required,
};

/// Default working directory of processes.
pub const DEFAULT_DIRECTORY: &[u8] = b"/workspace";

/// Minimum memory limit of a container, in bytes. The limit includes the container's init and the
/// start of the process, which a smaller limit would kill.
pub const MIN_MEMORY_BYTES: u64 = 6 << 20;
/// Maximum memory limit of a container, in bytes. Every kernel accepts it, and no worker has more.
pub const MAX_MEMORY_BYTES: u64 = 1 << 60;
/// Smallest limit of the disk of a container, in bytes.
pub const MIN_DISK_BYTES: u64 = 1 << 20;
/// Largest limit of the disk of a container, in bytes.
pub const MAX_DISK_BYTES: u64 = 1 << 60;
/// Maximum processor limit of a container, in thousandths of a core. Every kernel accepts it, and
/// no worker has more.
pub const MAX_CPU_MILLIS: u64 = 10_000_000;
/// Maximum number of retries of a workload.
pub const MAX_RETRIES: u32 = 100;
const READ_ONCE: &str = "not allowed with attached standard input, which can be read only once";
/// Maximum process limit of a container. The kernel accepts one more, which is the container's
/// init.
pub const MAX_PIDS: u64 = (1 << 22) - 1;

/// Maximum size of an encoded spec without its standard input, in bytes.
const MAX_BYTES: usize = 1 << 20;
/// Maximum size of the standard input in a spec, in bytes.
pub const MAX_STDIN_BYTES: usize = 1 << 20;
/// Maximum length of the reference of an image, in bytes.
const MAX_REFERENCE_BYTES: usize = 1024;
const MAX_RESOURCE_TYPE_BYTES: usize = 255;
/// Maximum number of task caches in a spec.
const MAX_CACHES: usize = 100;
/// Maximum number of inputs, outputs and caches in a spec, together. An attempt then needs fewer
/// than 1000 volumes and pins fewer than 1000 artifacts, which are the limits of the artifact store
/// for one call.
const MAX_MOUNTS: usize = 900;

/// Validates a submitted spec, fills in its defaults and makes its paths absolute.
pub fn parse(mut spec: pb::WorkloadSpec) -> Result<WorkloadSpec, Status> {
    let inline_stdin = std::mem::take(&mut spec.inline_stdin);
    if inline_stdin.len() > MAX_STDIN_BYTES {
        return Err(invalid_field("spec.inline_stdin", format!("is larger than {MAX_STDIN_BYTES} bytes")));
    }
    if spec.encoded_len() > MAX_BYTES {
        return Err(invalid_field("spec", format!("is larger than {MAX_BYTES} bytes")));
    }
    spec.inline_stdin = inline_stdin;
    check_limits("spec.limits", &spec.limits.unwrap_or_default())?;
    services::check(&spec.services)?;
    check_texts(&spec)?;
    check_mounts(&spec)?;
    parse_accepted(spec)
}

/// Parses a spec that was accepted before, without checking sizes and limits.
///
/// A stored spec may exceed them for two reasons: its defaults and absolute paths make it larger
/// than the submitted spec, and limits may be stricter now than at its submission. Such a spec must
/// not block other workloads.
pub fn parse_accepted(spec: pb::WorkloadSpec) -> Result<WorkloadSpec, Status> {
    let kind = match parse_enum("spec.kind", spec.kind)? {
        pb::WorkloadKind::Task | pb::WorkloadKind::Unspecified => WorkloadKind::Task,
        pb::WorkloadKind::Get => WorkloadKind::Get,
        pb::WorkloadKind::Put => WorkloadKind::Put,
        pb::WorkloadKind::Check => WorkloadKind::Check,
    };
    let (image, entrypoint) = parse_image("spec.image", spec.image)?;
    let command = parse_command("spec.command", spec.command, (&image, &entrypoint))?;
    let mounts_nothing = spec.inputs.is_empty() && spec.outputs.is_empty() && spec.caches.is_empty();
    let prefers_image_directory = spec.directory.is_empty() && mounts_nothing && has_defaults(&image);

    let directory = parse_directory("spec.directory", &spec.directory)?;
    if spec.interruptible && spec.stdin == i32::from(pb::StdinMode::Attached) {
        return Err(invalid_field("spec.interruptible", READ_ONCE));
    }
    if spec.retries > MAX_RETRIES {
        return Err(invalid_field("spec.retries", format!("must be at most {MAX_RETRIES}")));
    }
    if spec.retries > 0 && spec.stdin == i32::from(pb::StdinMode::Attached) {
        return Err(invalid_field("spec.retries", READ_ONCE));
    }
    let stdin = parse_stdin(spec.stdin, spec.inline_stdin, spec.terminal.is_some())?;
    if spec.keep_result && spec.terminal.is_some() {
        let why = "not allowed with a terminal, which mixes standard output and standard error";
        return Err(invalid_field("spec.keep_result", why));
    }
    let inputs = parse_inputs(spec.inputs, &directory)?;
    // A spec may name each cache once, either as a mount or as an owner of an output.
    let mut owners = HashSet::new();
    let caches = parse_caches(spec.caches, &mut owners)?;
    let outputs = parse_outputs(spec.outputs, &directory, &mut owners)?;
    check_paths(&inputs, &outputs, &caches)?;

    Ok(WorkloadSpec {
        team: parse_team("spec.team", spec.team)?,
        kind,
        image,
        entrypoint,
        command,
        environment: parse_environment("spec.environment", spec.environment)?,
        directory,
        prefers_image_directory,
        user: Some(spec.user).filter(|user| !user.is_empty()),
        stdin,
        output: match parse_enum("spec.output", spec.output)? {
            pb::OutputMode::Attached => OutputMode::Attached,
            pb::OutputMode::Spooled | pb::OutputMode::Unspecified => OutputMode::Spooled,
        },
        inputs,
        outputs,
        limits: parse_limits(spec.limits.unwrap_or_default()),
        privileged: match parse_enum("spec.privilege", spec.privilege)? {
            pb::Privilege::Privileged => true,
            pb::Privilege::Confined | pb::Privilege::Unspecified => false,
        },
        network: match parse_enum("spec.network", spec.network)? {
            pb::Network::Host => Network::Host,
            pb::Network::Private => Network::Private,
            pb::Network::None | pb::Network::Unspecified => Network::None,
        },
        tags: spec.tags,
        platform: if spec.platform.is_empty() { "linux".to_owned() } else { spec.platform },
        queue_timeout: parse_duration("spec.queue_timeout", spec.queue_timeout)?,
        run_timeout: parse_duration("spec.run_timeout", spec.run_timeout)?,
        build: parse_optional_id("spec.build_id", &spec.build_id)?,
        caches,
        interruptible: spec.interruptible,
        priority: parse_priority("spec.priority", spec.priority)?,
        requests: parse_requests("spec.requests", spec.requests)?,
        start_timeout: parse_duration("spec.start_timeout", spec.start_timeout)?,
        retries: spec.retries,
        capabilities: spec.capabilities,
        worker: spec.worker,
        terminal: spec.terminal.map(parse_terminal).transpose()?,
        keep_result: spec.keep_result,
        services: services::parse(spec.services)?,
        name: spec.name,
    })
}

/// Converts a spec to its protobuf form.
#[must_use]
pub fn to_proto(spec: &WorkloadSpec) -> pb::WorkloadSpec {
    let bytes = |bytes: &Bytes| bytes::Bytes::copy_from_slice(bytes);
    pb::WorkloadSpec {
        team: spec.team.clone(),
        kind: match spec.kind {
            WorkloadKind::Task => pb::WorkloadKind::Task,
            WorkloadKind::Get => pb::WorkloadKind::Get,
            WorkloadKind::Put => pb::WorkloadKind::Put,
            WorkloadKind::Check => pb::WorkloadKind::Check,
        }
        .into(),
        image: Some(image_to_proto(&spec.image, spec.entrypoint.as_deref())),
        command: spec.command.iter().map(bytes).collect(),
        environment: environment_to_proto(&spec.environment),
        directory: directory_to_proto(&spec.directory, spec.prefers_image_directory),
        user: spec.user.clone().unwrap_or_default(),
        stdin: match spec.stdin {
            Stdin::None => pb::StdinMode::None,
            Stdin::Attached => pb::StdinMode::Attached,
            Stdin::Inline(_) => pb::StdinMode::Inline,
        }
        .into(),
        output: match spec.output {
            OutputMode::Attached => pb::OutputMode::Attached,
            OutputMode::Spooled => pb::OutputMode::Spooled,
        }
        .into(),
        inputs: spec
            .inputs
            .iter()
            .map(|input| pb::Input {
                name: input.name.clone(),
                artifact_id: input.artifact.to_string(),
                path: bytes(&input.path),
                access: if input.read_only { pb::Access::ReadOnly } else { pb::Access::CopyOnWrite }.into(),
            })
            .collect(),
        outputs: spec
            .outputs
            .iter()
            .map(|output| pb::Output {
                name: output.name.clone(),
                path: bytes(&output.path),
                owners: output.owners.iter().copied().map(owner::submitted).collect(),
            })
            .collect(),
        limits: Some(limits_to_proto(&spec.limits)),
        privilege: if spec.privileged { pb::Privilege::Privileged } else { pb::Privilege::Confined }.into(),
        network: match spec.network {
            Network::Host => pb::Network::Host,
            Network::Private => pb::Network::Private,
            Network::None => pb::Network::None,
        }
        .into(),
        tags: spec.tags.clone(),
        platform: spec.platform.clone(),
        queue_timeout: spec.queue_timeout.map(duration),
        run_timeout: spec.run_timeout.map(duration),
        build_id: spec.build.map(|build| build.to_string()).unwrap_or_default(),
        caches: spec
            .caches
            .iter()
            .map(|mount| pb::CacheMount { task_cache_id: mount.cache.to_string(), path: bytes(&mount.path) })
            .collect(),
        interruptible: spec.interruptible,
        priority: spec.priority,
        requests: (spec.requests != ResourceRequests::default()).then_some(pb::ResourceRequests {
            cpu_millis: spec.requests.cpu_millis,
            memory_bytes: spec.requests.memory_bytes,
            disk_bytes: spec.requests.disk_bytes,
        }),
        start_timeout: spec.start_timeout.map(duration),
        retries: spec.retries,
        capabilities: spec.capabilities.clone(),
        worker: spec.worker.clone(),
        terminal: spec
            .terminal
            .map(|size| pb::Terminal { rows: size.rows.into(), columns: size.columns.into() }),
        inline_stdin: match &spec.stdin {
            Stdin::Inline(InlineStdin(input)) => bytes(input),
            Stdin::None | Stdin::Attached => bytes::Bytes::new(),
        },
        keep_result: spec.keep_result,
        services: spec.services.iter().map(services::to_proto).collect(),
        name: spec.name.clone(),
    }
}

fn directory_to_proto(directory: &Bytes, prefers_image_directory: bool) -> bytes::Bytes {
    if prefers_image_directory { bytes::Bytes::new() } else { bytes::Bytes::copy_from_slice(directory) }
}

fn image_to_proto(image: &Image, entrypoint: Option<&[Bytes]>) -> pb::Image {
    let source = match image {
        Image::Host => pb::image::Source::Host(pb::HostImage {}),
        Image::Artifact(id) => pb::image::Source::ArtifactId(id.to_string()),
        Image::ResourceType(name) => pb::image::Source::ResourceType(name.clone()),
        Image::Reference(reference) => pb::image::Source::Reference(reference.clone()),
    };
    let words = |words: &[Bytes]| words.iter().map(|word| bytes::Bytes::copy_from_slice(word)).collect();
    let entrypoint = entrypoint.map(|entrypoint| pb::Entrypoint { words: words(entrypoint) });
    pb::Image { source: Some(source), entrypoint }
}

fn environment_to_proto(variables: &[EnvironmentVariable]) -> Vec<pb::EnvironmentVariable> {
    let bytes = |bytes: &Bytes| bytes::Bytes::copy_from_slice(bytes);
    let variables = variables.iter();
    variables.map(|v| pb::EnvironmentVariable { name: bytes(&v.name), value: bytes(&v.value) }).collect()
}

fn limits_to_proto(limits: &Limits) -> pb::Limits {
    pb::Limits {
        cpu_millis: limits.cpu_millis.unwrap_or(0),
        memory_bytes: limits.memory_bytes.unwrap_or(0),
        pids: limits.pids.unwrap_or(0),
        disk_bytes: limits.disk_bytes.unwrap_or(0),
    }
}

/// Removes the values of environment variables and the standard input, which no call returns.
#[must_use]
pub fn without_secrets(mut spec: pb::WorkloadSpec) -> pb::WorkloadSpec {
    spec.inline_stdin.clear();
    let of_services = spec.services.iter_mut().flat_map(|service| &mut service.environment);
    for variable in spec.environment.iter_mut().chain(of_services) {
        variable.value.clear();
    }
    spec
}

/// Encodes a validated spec for storage.
#[must_use]
pub fn encode(spec: &WorkloadSpec) -> Vec<u8> {
    to_proto(spec).encode_to_vec()
}

/// Decodes a stored spec. Fails only if the bytes do not come from [`encode`].
pub fn decode(bytes: &[u8]) -> Result<WorkloadSpec, Status> {
    let spec = pb::WorkloadSpec::decode(bytes).map_err(|error| invalid_field("spec", error.to_string()))?;
    parse_accepted(spec)
}

/// Maximum size of the complete spec of a finished workload, in bytes. A larger spec is abridged.
pub const MAX_FINISHED_BYTES: usize = 8 << 10;

/// Removes the large parts of the spec of a finished workload.
#[must_use]
pub fn abridged(mut spec: WorkloadSpec) -> WorkloadSpec {
    const MAX_PATH_BYTES: usize = 1 << 10;
    spec.command.truncate(1);
    spec.command.iter_mut().for_each(|program| program.truncate(MAX_PATH_BYTES));
    spec.directory.truncate(MAX_PATH_BYTES);
    if let Stdin::Inline(InlineStdin(input)) = &mut spec.stdin {
        input.clear();
    }
    WorkloadSpec {
        environment: vec![],
        inputs: vec![],
        outputs: vec![],
        caches: vec![],
        tags: vec![],
        capabilities: vec![],
        services: vec![],
        ..spec
    }
}

fn parse_stdin(mode: i32, inline: bytes::Bytes, has_terminal: bool) -> Result<Stdin, Status> {
    let mode = parse_enum("spec.stdin", mode)?;
    match mode {
        pb::StdinMode::Inline if has_terminal => {
            let why = "a terminal has no inline standard input, because it interprets what it receives";
            Err(invalid_field("spec.stdin", why))
        }
        pb::StdinMode::Inline => Ok(Stdin::Inline(InlineStdin(inline.into()))),
        _ if !inline.is_empty() => {
            Err(invalid_field("spec.inline_stdin", "is allowed only with `STDIN_MODE_INLINE`"))
        }
        pb::StdinMode::Attached => Ok(Stdin::Attached),
        pb::StdinMode::None | pb::StdinMode::Unspecified => Ok(Stdin::None),
    }
}

fn parse_terminal(size: pb::Terminal) -> Result<TerminalSize, Status> {
    let length = |field: &str, length: u32| match u16::try_from(length) {
        Ok(length @ 1..) => Ok(length),
        _ => Err(invalid_field(format!("spec.terminal.{field}"), "must be 1 to 65535")),
    };
    Ok(TerminalSize { rows: length("rows", size.rows)?, columns: length("columns", size.columns)? })
}

/// Whether an image may have a command and a working directory of its own.
fn has_defaults(image: &Image) -> bool {
    matches!(image, Image::Artifact(_) | Image::Reference(_))
}

/// Parses an image and its entrypoint.
fn parse_image(field: &str, image: Option<pb::Image>) -> Result<(Image, Option<Vec<Bytes>>), Status> {
    let pb::Image { source, entrypoint } = required(field, image)?;
    let entrypoint = entrypoint.map(|entrypoint| entrypoint.words);
    for (index, word) in entrypoint.iter().flatten().enumerate() {
        no_nul(&format!("{field}.entrypoint.words[{index}]"), word)?;
    }
    let entrypoint = entrypoint.map(|words| words.into_iter().map(Into::into).collect());
    let source = match required(&format!("{field}.source"), source)? {
        pb::image::Source::Host(_) => Image::Host,
        pb::image::Source::ArtifactId(id) => Image::Artifact(parse_id(&format!("{field}.artifact_id"), &id)?),
        pb::image::Source::ResourceType(name) if name.is_empty() || name.len() > MAX_RESOURCE_TYPE_BYTES => {
            let message = format!("has 1 to {MAX_RESOURCE_TYPE_BYTES} bytes");
            return Err(invalid_field(format!("{field}.resource_type"), message));
        }
        pb::image::Source::ResourceType(name) => Image::ResourceType(name),
        pb::image::Source::Reference(reference) => {
            let is_text =
                !reference.is_empty() && !reference.contains(|c: char| c.is_whitespace() || c.is_control());
            if !is_text || reference.len() > MAX_REFERENCE_BYTES {
                let message = format!("has 1 to {MAX_REFERENCE_BYTES} bytes without spaces");
                return Err(invalid_field(format!("{field}.reference"), message));
            }
            Image::Reference(reference)
        }
    };
    Ok((source, entrypoint))
}

fn parse_command(
    field: &str,
    command: Vec<bytes::Bytes>,
    (image, entrypoint): (&Image, &Option<Vec<Bytes>>),
) -> Result<Vec<Bytes>, Status> {
    // The image, which is not known here, may name the program.
    let may_be_named = has_defaults(image) && entrypoint.as_ref().is_none_or(|words| !words.is_empty());
    let is_named = entrypoint.as_ref().and_then(|words| words.first()).is_some_and(|word| !word.is_empty());
    let program = command.first();
    if !is_named && (!may_be_named && program.is_none() || program.is_some_and(|program| program.is_empty()))
    {
        return Err(invalid_field(field, "must name a program"));
    }
    for (index, argument) in command.iter().enumerate() {
        no_nul(&format!("{field}[{index}]"), argument)?;
    }
    Ok(command.into_iter().map(Into::into).collect())
}

fn parse_directory(field: &str, directory: &[u8]) -> Result<Bytes, Status> {
    match directory {
        b"" => Ok(DEFAULT_DIRECTORY.to_vec()),
        directory => absolute(field, directory, DEFAULT_DIRECTORY),
    }
}

fn parse_environment(
    field: &str,
    variables: Vec<pb::EnvironmentVariable>,
) -> Result<Vec<EnvironmentVariable>, Status> {
    let variables = variables.into_iter().map(|variable| (variable.name.into(), variable.value.into()));
    parse_variables(field, variables)
}

/// Parses variables. Each name occurs once.
pub fn parse_variables(
    field: &str,
    variables: impl IntoIterator<Item = (Bytes, Bytes)>,
) -> Result<Vec<EnvironmentVariable>, Status> {
    let mut names = HashSet::new();
    let mut parsed = Vec::new();
    for (index, (name, value)) in variables.into_iter().enumerate() {
        let field = format!("{field}[{index}]");
        if name.is_empty() || name.contains(&b'=') {
            return Err(invalid_field(format!("{field}.name"), "must not be empty or contain ="));
        }
        no_nul(&format!("{field}.name"), &name)?;
        no_nul(&format!("{field}.value"), &value)?;
        if !names.insert(name.clone()) {
            return Err(invalid_field(format!("{field}.name"), "is given twice"));
        }
        parsed.push(EnvironmentVariable { name, value });
    }
    Ok(parsed)
}

fn parse_inputs(inputs: Vec<pb::Input>, directory: &[u8]) -> Result<Vec<Input>, Status> {
    let mut names = HashSet::new();
    let mut parsed = Vec::with_capacity(inputs.len());
    for (index, input) in inputs.into_iter().enumerate() {
        let field = format!("spec.inputs[{index}]");
        check_name(&field, &input.name, &mut names)?;
        let access: pb::Access = parse_enum(&format!("{field}.access"), input.access)?;
        parsed.push(Input {
            artifact: parse_id(&format!("{field}.artifact_id"), &input.artifact_id)?,
            path: mount_path(&field, &input.path, &input.name, directory)?,
            read_only: access == pb::Access::ReadOnly,
            name: input.name,
        });
    }
    Ok(parsed)
}

/// Parses outputs. `named` collects the caches of the spec, each of which may occur only once.
fn parse_outputs(
    outputs: Vec<pb::Output>,
    directory: &[u8],
    named: &mut HashSet<OutputOwner>,
) -> Result<Vec<Output>, Status> {
    let mut names = HashSet::new();
    let mut parsed = Vec::with_capacity(outputs.len());
    for (index, output) in outputs.into_iter().enumerate() {
        let field = format!("spec.outputs[{index}]");
        check_name(&field, &output.name, &mut names)?;
        parsed.push(Output {
            path: mount_path(&field, &output.path, &output.name, directory)?,
            owners: owner::parse_submitted(&format!("{field}.owners"), output.owners, named)?,
            name: output.name,
        });
    }
    Ok(parsed)
}

fn parse_caches(
    caches: Vec<pb::CacheMount>,
    named: &mut HashSet<OutputOwner>,
) -> Result<Vec<CacheMount>, Status> {
    if caches.len() > MAX_CACHES {
        return Err(invalid_field("spec.caches", format!("must be at most {MAX_CACHES}")));
    }
    let mut parsed = Vec::with_capacity(caches.len());
    for (index, mount) in caches.into_iter().enumerate() {
        let field = format!("spec.caches[{index}]");
        let cache = parse_id(&format!("{field}.task_cache_id"), &mount.task_cache_id)?;
        if !named.insert(OutputOwner::TaskCache(cache)) {
            return Err(invalid_field(format!("{field}.task_cache_id"), "is given twice"));
        }
        if !mount.path.starts_with(b"/") {
            return Err(invalid_field(format!("{field}.path"), "must be absolute"));
        }
        parsed.push(CacheMount { cache, path: mount_path(&field, &mount.path, "", b"/")? });
    }
    Ok(parsed)
}

/// Checks the lengths and characters of texts. Labels of workers have the same limits.
fn check_texts(spec: &pb::WorkloadSpec) -> Result<(), Status> {
    check_label("spec.user", &spec.user)?;
    check_label("spec.platform", &spec.platform)?;
    check_tags("spec.tags", &spec.tags)?;
    check_labels("spec.capabilities", &spec.capabilities)?;
    if !spec.worker.is_empty() {
        crate::check_name("spec.worker", &spec.worker)?;
    }
    if !spec.name.is_empty() {
        name::check("spec.name", &spec.name)?;
    }
    match spec.image.as_ref().and_then(|image| image.source.as_ref()) {
        Some(pb::image::Source::ResourceType(name)) => crate::check_name("spec.image.resource_type", name),
        _ => Ok(()),
    }
}

/// Checks the number of mounts, because a worker creates a volume for each of them in one call.
fn check_mounts(spec: &pb::WorkloadSpec) -> Result<(), Status> {
    let mut count = 0;
    for (field, more) in [
        ("spec.inputs", spec.inputs.len()),
        ("spec.outputs", spec.outputs.len()),
        ("spec.caches", spec.caches.len()),
    ] {
        count += more;
        if count > MAX_MOUNTS {
            let why = format!("inputs, outputs and caches must be at most {MAX_MOUNTS} together");
            return Err(invalid_field(field, why));
        }
    }
    Ok(())
}

fn check_limits(within: &str, limits: &pb::Limits) -> Result<(), Status> {
    let pb::Limits { cpu_millis, memory_bytes, pids, disk_bytes } = *limits;
    let reject = |field: &str, why: String| Err(invalid_field(format!("{within}.{field}"), why));
    if memory_bytes != 0 && memory_bytes < MIN_MEMORY_BYTES {
        return reject(
            "memory_bytes",
            format!("must be at least {MIN_MEMORY_BYTES}, the memory that a container needs to start"),
        );
    }
    if disk_bytes != 0 && disk_bytes < MIN_DISK_BYTES {
        return reject("disk_bytes", format!("must be at least {MIN_DISK_BYTES}"));
    }
    for (field, value, most) in [
        ("memory_bytes", memory_bytes, MAX_MEMORY_BYTES),
        ("disk_bytes", disk_bytes, MAX_DISK_BYTES),
        ("cpu_millis", cpu_millis, MAX_CPU_MILLIS),
        ("pids", pids, MAX_PIDS),
    ] {
        if value > most {
            return reject(field, format!("must be at most {most}"));
        }
    }
    Ok(())
}

/// Checks a priority: -100 to 100.
pub fn parse_priority(field: &str, priority: i32) -> Result<i32, Status> {
    let allowed = -100..=100;
    if allowed.contains(&priority) { Ok(priority) } else { Err(invalid_field(field, "must be -100 to 100")) }
}

/// Parses the resources to reserve on a worker.
pub fn parse_requests(
    field: &str,
    requests: Option<pb::ResourceRequests>,
) -> Result<ResourceRequests, Status> {
    let pb::ResourceRequests { cpu_millis, memory_bytes, disk_bytes } = requests.unwrap_or_default();
    // The database can store the sum over some millions of leases.
    let most = 1 << 42;
    for (name, amount) in
        [("cpu_millis", cpu_millis), ("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)]
    {
        if amount > most {
            let why = format!("must be at most {most}");
            return Err(invalid_field(format!("{field}.{name}"), why));
        }
    }
    Ok(ResourceRequests { cpu_millis, memory_bytes, disk_bytes })
}

fn parse_limits(limits: pb::Limits) -> Limits {
    let limit = |value: u64| (value != 0).then_some(value);
    Limits {
        cpu_millis: limit(limits.cpu_millis),
        memory_bytes: limit(limits.memory_bytes),
        pids: limit(limits.pids),
        disk_bytes: limit(limits.disk_bytes),
    }
}

fn check_name(field: &str, name: &str, names: &mut HashSet<String>) -> Result<(), Status> {
    let field = format!("{field}.name");
    if name.is_empty() || name.len() > 255 || name.contains(['/', '\0']) || name == "." || name == ".." {
        return Err(invalid_field(field, "must be 1 to 255 bytes, without slash, and not . or .."));
    }
    if !names.insert(name.to_owned()) {
        return Err(invalid_field(field, format!("{name:?} is given twice")));
    }
    Ok(())
}

fn mount_path(field: &str, path: &[u8], name: &str, directory: &[u8]) -> Result<Bytes, Status> {
    let path = if path.is_empty() { name.as_bytes() } else { path };
    let path = absolute(&format!("{field}.path"), path, directory)?;
    if path == b"/" {
        return Err(invalid_field(format!("{field}.path"), "must not be the root"));
    }
    Ok(path)
}

/// Resolves `path` relative to `base` and removes empty and `.` components. `..` is rejected.
fn absolute(field: &str, path: &[u8], base: &[u8]) -> Result<Bytes, Status> {
    no_nul(field, path)?;
    let whole = if path.starts_with(b"/") { path.to_vec() } else { [base, b"/", path].concat() };
    let mut normal = Vec::with_capacity(whole.len());
    for component in whole.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => return Err(invalid_field(field, "must not contain ..")),
            component => {
                normal.push(b'/');
                normal.extend_from_slice(component);
            }
        }
    }
    if normal.is_empty() {
        normal.push(b'/');
    }
    if normal.len() > 4095 {
        return Err(invalid_field(field, "is longer than 4095 bytes"));
    }
    Ok(normal)
}

/// Checks that no path equals another path or lies below it.
///
/// There are two exceptions. An output may have the path of a copy-on-write input. A cache may lie
/// below an output or a copy-on-write input, because build tools keep caches among the sources.
fn check_paths(inputs: &[Input], outputs: &[Output], caches: &[CacheMount]) -> Result<(), Status> {
    let below = |path: &[u8], other: &[u8]| {
        path.strip_prefix(other).is_some_and(|rest| rest.starts_with(b"/")) || other == b"/"
    };
    let path = |mount: &CacheMount| String::from_utf8_lossy(&mount.path).into_owned();
    let all: Vec<_> = inputs
        .iter()
        .map(|input| ("input", input.name.clone(), &input.path, input.read_only))
        .chain(outputs.iter().map(|output| ("output", output.name.clone(), &output.path, false)))
        .chain(caches.iter().map(|mount| ("cache", path(mount), &mount.path, false)))
        .collect();
    for (index, (kind, name, path, _)) in all.iter().enumerate() {
        for (other_kind, other_name, other_path, other_read_only) in &all[..index] {
            let clash = |why: &str| {
                let text = format!("{kind} {name:?} {why} {other_kind} {other_name:?}");
                Err(invalid_field(format!("spec.{kind}s"), text))
            };
            if path == other_path {
                if kind == other_kind || *kind == "cache" {
                    return clash("has the path of");
                }
                if *other_read_only {
                    return clash("has the path of read-only");
                }
            } else if below(path, other_path) {
                if *kind != "cache" || *other_kind == "cache" {
                    return clash("lies below");
                }
                // A mount point cannot be created in a read-only input.
                if *other_read_only {
                    return clash("lies below read-only");
                }
            } else if below(other_path, path) {
                return clash("lies above");
            }
        }
    }
    Ok(())
}

fn no_nul(field: &str, bytes: &[u8]) -> Result<(), Status> {
    if bytes.contains(&0) {
        return Err(invalid_field(field, "must not contain a NUL byte"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::ArtifactId;

    fn spec() -> pb::WorkloadSpec {
        pb::WorkloadSpec {
            team: "main".to_owned(),
            kind: pb::WorkloadKind::Task.into(),
            image: Some(pb::Image {
                source: Some(pb::image::Source::Host(pb::HostImage {})),
                entrypoint: None,
            }),
            command: vec![b"true".as_slice().into()],
            stdin: pb::StdinMode::None.into(),
            output: pb::OutputMode::Spooled.into(),
            privilege: pb::Privilege::Confined.into(),
            network: pb::Network::Private.into(),
            ..pb::WorkloadSpec::default()
        }
    }

    fn input(name: &str, path: &[u8], access: pb::Access) -> pb::Input {
        pb::Input {
            name: name.to_owned(),
            artifact_id: ArtifactId::new().to_string(),
            path: bytes::Bytes::copy_from_slice(path),
            access: access.into(),
        }
    }

    fn output(name: &str, path: &[u8]) -> pb::Output {
        pb::Output { name: name.to_owned(), path: bytes::Bytes::copy_from_slice(path), owners: Vec::new() }
    }

    fn rejection(spec: pb::WorkloadSpec) -> String {
        parse(spec).expect_err("an invalid spec").message().to_owned()
    }

    #[test]
    fn paths_are_resolved_from_working_directory() {
        let owner = domain::workload::OutputOwner::TaskCache(domain::CacheId::new());
        let given = pb::WorkloadSpec {
            inputs: vec![
                input("src", b"", pb::Access::CopyOnWrite),
                input("lib", b"/opt//lib/.", pb::Access::ReadOnly),
            ],
            outputs: vec![
                output("src", b"src"),
                pb::Output { owners: vec![owner::submitted(owner)], ..output("report", b"") },
            ],
            ..spec()
        };
        let parsed = parse(given).expect("valid");
        assert_eq!(parsed.outputs[1].owners, [owner]);
        assert_eq!(parsed.directory, b"/workspace");
        assert_eq!(parsed.inputs[0].path, b"/workspace/src");
        assert_eq!(parsed.inputs[1].path, b"/opt/lib");
        assert_eq!(parsed.outputs[1].path, b"/workspace/report");
        assert_eq!(decode(&encode(&parsed)).expect("a stored spec"), parsed);
    }

    #[test]
    fn stored_spec_may_exceed_size_limit() {
        let large = |bytes| pb::WorkloadSpec {
            command: vec![b"true".as_slice().into(), vec![b'x'; bytes].into()],
            inputs: vec![input("src", b"", pb::Access::ReadOnly)],
            ..spec()
        };
        let room = MAX_BYTES - large(MAX_BYTES / 2).encoded_len() + MAX_BYTES / 2;
        assert_eq!(large(room).encoded_len(), MAX_BYTES);
        let parsed = parse(large(room)).expect("the largest valid spec");
        assert!(encode(&parsed).len() > MAX_BYTES);
        assert_eq!(decode(&encode(&parsed)).expect("a stored spec"), parsed);
        assert!(rejection(large(room + 1)).contains("larger than"));
    }

    #[test]
    fn invalid_mounts_are_rejected() {
        let nested =
            vec![input("a", b"a", pb::Access::CopyOnWrite), input("b", b"a/b", pb::Access::CopyOnWrite)];
        assert!(rejection(pb::WorkloadSpec { inputs: nested, ..spec() }).contains("lies below"));
        let read_only = vec![input("a", b"a", pb::Access::ReadOnly)];
        let same = pb::WorkloadSpec { inputs: read_only, outputs: vec![output("a", b"")], ..spec() };
        assert!(rejection(same).contains("read-only"));
        let up = pb::WorkloadSpec { outputs: vec![output("a", b"../a")], ..spec() };
        assert!(rejection(up).contains(".."));
        let root = pb::WorkloadSpec { outputs: vec![output("a", b"/")], ..spec() };
        assert!(rejection(root).contains("root"));
        assert!(rejection(pb::WorkloadSpec { command: vec![], ..spec() }).contains("must name a program"));
        assert!(rejection(pb::WorkloadSpec { stdin: 0, ..spec() }).contains("is required"));
        assert!(rejection(pb::WorkloadSpec { stdin: 99, ..spec() }).contains("99"));
    }

    #[test]
    fn interruptible_spec_with_attached_stdin_is_rejected() {
        let with =
            |stdin: pb::StdinMode| pb::WorkloadSpec { interruptible: true, stdin: stdin.into(), ..spec() };
        assert!(parse(with(pb::StdinMode::None)).expect("a spec").interruptible);
        assert!(rejection(with(pb::StdinMode::Attached)).contains("spec.interruptible"));
    }

    #[test]
    fn retries_with_attached_stdin_are_rejected() {
        let with =
            |retries, stdin: pb::StdinMode| pb::WorkloadSpec { retries, stdin: stdin.into(), ..spec() };
        assert_eq!(parse(with(MAX_RETRIES, pb::StdinMode::None)).expect("a spec").retries, MAX_RETRIES);
        assert_eq!(parse(with(0, pb::StdinMode::Attached)).expect("a spec").retries, 0);
        for wrong in [with(1, pb::StdinMode::Attached), with(MAX_RETRIES + 1, pb::StdinMode::None)] {
            assert!(rejection(wrong).contains("spec.retries"));
        }
    }

    #[test]
    fn inline_stdin_is_bounded_and_secret() {
        let with = |bytes: usize| pb::WorkloadSpec {
            stdin: pb::StdinMode::Inline.into(),
            inline_stdin: vec![0xff; bytes].into(),
            interruptible: true,
            retries: 1,
            ..spec()
        };
        for bytes in [0, MAX_STDIN_BYTES] {
            let parsed = parse(with(bytes)).expect("valid");
            assert_eq!(parsed.stdin, Stdin::Inline(InlineStdin(vec![0xff; bytes])));
            assert_eq!(decode(&encode(&parsed)).expect("a stored spec"), parsed);
            let shown = format!("{parsed:?}");
            assert!(shown.len() < 2000 && !shown.contains("255, 255"), "{shown}");
            assert!(without_secrets(to_proto(&parsed)).inline_stdin.is_empty());
            assert_eq!(abridged(parsed).stdin, Stdin::Inline(InlineStdin(vec![])));
        }
        assert!(rejection(with(MAX_STDIN_BYTES + 1)).contains("spec.inline_stdin"));
        // The input does not count towards the size of the spec.
        let command = vec![b"true".as_slice().into(), vec![b'x'; MAX_BYTES].into()];
        assert!(rejection(pb::WorkloadSpec { command, ..with(0) }).contains("larger than"));
        for mode in [pb::StdinMode::None, pb::StdinMode::Attached] {
            let both = pb::WorkloadSpec { stdin: mode.into(), interruptible: false, retries: 0, ..with(1) };
            assert!(rejection(both).contains("spec.inline_stdin"));
        }
        let terminal = Some(pb::Terminal { rows: 24, columns: 80 });
        assert!(rejection(pb::WorkloadSpec { terminal, ..with(1) }).contains("spec.stdin"));
        assert!(
            rejection(pb::WorkloadSpec { terminal, keep_result: true, ..spec() })
                .contains("spec.keep_result")
        );
    }

    #[test]
    fn kind_and_kept_result_survive_storage() {
        for kind in
            [pb::WorkloadKind::Task, pb::WorkloadKind::Get, pb::WorkloadKind::Put, pb::WorkloadKind::Check]
        {
            let parsed = parse(pb::WorkloadSpec { kind: kind.into(), keep_result: true, ..spec() });
            let stored = to_proto(&decode(&encode(&parsed.expect("valid"))).expect("a stored spec"));
            assert_eq!((stored.kind(), stored.keep_result), (kind, true));
        }
        assert!(rejection(pb::WorkloadSpec { kind: 0, ..spec() }).contains("spec.kind"));
    }

    #[test]
    fn cache_paths_are_checked() {
        let cache = |path: &[u8]| pb::CacheMount {
            task_cache_id: domain::CacheId::new().to_string(),
            path: bytes::Bytes::copy_from_slice(path),
        };
        let with = |caches: Vec<pb::CacheMount>| pb::WorkloadSpec {
            inputs: vec![
                input("src", b"", pb::Access::CopyOnWrite),
                input("fixed", b"", pb::Access::ReadOnly),
            ],
            outputs: vec![output("out", b"")],
            caches,
            ..spec()
        };
        let parsed =
            parse(with(vec![cache(b"/root//.cargo/."), cache(b"/workspace/target")])).expect("valid");
        assert_eq!(parsed.caches[0].path, b"/root/.cargo");
        assert_eq!(decode(&encode(&parsed)).expect("a stored spec"), parsed);
        for path in [&b"/workspace/src/target"[..], b"/workspace/out/target"] {
            parse(with(vec![cache(path)])).expect("a cache may lie below an output or a copy-on-write input");
        }
        for (path, why) in [
            (&b""[..], "absolute"),
            (b"target", "absolute"),
            (b"/", "root"),
            (b"/a/../b", ".."),
            (b"/a\0b", "NUL"),
            (b"/workspace/src", "has the path of input"),
            (b"/workspace/out", "has the path of output"),
            (b"/workspace/fixed/target", "lies below read-only input"),
            (b"/workspace", "lies above input"),
        ] {
            let message = rejection(with(vec![cache(path)]));
            assert!(message.contains(why), "{message}");
        }
        assert!(rejection(with(vec![cache(b"/a"), cache(b"/a")])).contains("has the path of cache"));
        assert!(rejection(with(vec![cache(b"/a"), cache(b"/a/b")])).contains("lies below cache"));
        let one = cache(b"/a");
        let again = pb::CacheMount { path: b"/b".as_slice().into(), ..one.clone() };
        assert!(rejection(with(vec![one.clone(), again])).contains("given twice"));
        let owner = domain::workload::OutputOwner::TaskCache(one.task_cache_id.parse().expect("an id"));
        let owned = pb::Output { owners: vec![owner::submitted(owner)], ..output("out", b"") };
        let both = pb::WorkloadSpec { outputs: vec![owned], ..with(vec![one]) };
        assert!(rejection(both).contains("only once"));
        let unnamed = pb::CacheMount { task_cache_id: "x".to_owned(), path: b"/a".as_slice().into() };
        assert!(rejection(with(vec![unnamed])).contains("spec.caches[0].task_cache_id"));
        let many = (0..=MAX_CACHES).map(|index| cache(format!("/{index}").as_bytes()));
        assert!(rejection(with(many.collect())).contains("at most 100"));
    }

    #[test]
    fn working_directory_is_relative_to_workspace() {
        let at = |directory: &'static [u8]| {
            let spec =
                pb::WorkloadSpec { directory: directory.into(), outputs: vec![output("o", b"")], ..spec() };
            parse(spec).map(|spec| (spec.directory, spec.outputs[0].path.clone()))
        };
        let there = |directory: &[u8], output: &[u8]| (directory.to_vec(), output.to_vec());
        assert_eq!(at(b"").expect("valid"), there(b"/workspace", b"/workspace/o"));
        assert_eq!(at(b"sub/./dir/").expect("valid"), there(b"/workspace/sub/dir", b"/workspace/sub/dir/o"));
        assert_eq!(at(b"/srv").expect("valid"), there(b"/srv", b"/srv/o"));
        assert!(at(b"../x").expect_err("an invalid spec").message().contains("spec.directory"));
    }

    #[test]
    fn terminal_has_size() {
        let with =
            |rows, columns| pb::WorkloadSpec { terminal: Some(pb::Terminal { rows, columns }), ..spec() };
        let parsed = parse(with(1, 65535)).expect("valid");
        assert_eq!(parsed.terminal, Some(TerminalSize { rows: 1, columns: 65535 }));
        assert_eq!(decode(&encode(&parsed)).expect("a stored spec"), parsed);
        assert!(rejection(with(0, 80)).contains("spec.terminal.rows"));
        assert!(rejection(with(24, 65536)).contains("spec.terminal.columns"));
    }

    #[test]
    fn stored_spec_may_exceed_resource_limits() {
        let with = |limits: pb::Limits| pb::WorkloadSpec { limits: Some(limits), ..spec() };
        let limits = pb::Limits::default();
        for (wrong, field) in [
            (pb::Limits { memory_bytes: 1, ..limits }, "spec.limits.memory_bytes"),
            (pb::Limits { memory_bytes: MIN_MEMORY_BYTES - 1, ..limits }, "spec.limits.memory_bytes"),
            (pb::Limits { memory_bytes: MAX_MEMORY_BYTES + 1, ..limits }, "spec.limits.memory_bytes"),
            (pb::Limits { disk_bytes: MIN_DISK_BYTES - 1, ..limits }, "spec.limits.disk_bytes"),
            (pb::Limits { disk_bytes: MAX_DISK_BYTES + 1, ..limits }, "spec.limits.disk_bytes"),
            (pb::Limits { cpu_millis: u64::MAX, ..limits }, "spec.limits.cpu_millis"),
            (pb::Limits { pids: 1 << 22, ..limits }, "spec.limits.pids"),
        ] {
            let status = parse(with(wrong)).expect_err("an invalid spec");
            let violations =
                tonic_types::StatusExt::get_details_bad_request(&status).expect("a field is named");
            assert_eq!(violations.field_violations[0].field, field);
            assert!(decode(&with(wrong).encode_to_vec()).is_ok());
        }
        let most =
            pb::Limits { memory_bytes: MIN_MEMORY_BYTES, cpu_millis: 1, pids: 1, disk_bytes: MIN_DISK_BYTES };
        assert!(parse(with(most)).is_ok() && parse(with(limits)).is_ok());
    }
}
