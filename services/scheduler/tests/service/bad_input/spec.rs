//! Invalid variants of a workload spec.

use bytes::Bytes;
use domain::{ArtifactId, BuildId, CacheId, ClaimId, WorkloadId};
use prost_reflect::{DynamicMessage, Kind, ReflectMessage, Value};
use rpc::Reason::*;
use rpc::pb::scheduler as pb;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Expected};

use super::world::World;
use super::wrong::worker_or_any;
use super::{OTHER, TEAM};

/// RPC that receives the spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Submit,
    Explain,
}

/// Valid spec that sets every field.
pub(super) fn valid(world: &World<'_>) -> pb::WorkloadSpec {
    let seconds = |seconds| Some(rpc::duration(std::time::Duration::from_secs(seconds)));
    let owner = pb::output_owner::Owner::BuildId(world.build.to_string());
    let artifact_id = world.sealed.to_string();
    pb::WorkloadSpec {
        team: TEAM.to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image {
            source: Some(pb::image::Source::ArtifactId(artifact_id.clone())),
            entrypoint: None,
        }),
        command: vec![Bytes::from_static(b"true")],
        environment: vec![pb::EnvironmentVariable { name: "A".into(), value: "b".into() }],
        directory: "somewhere".into(),
        user: "x".repeat(1024),
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        inputs: vec![pb::Input {
            name: "in".to_owned(),
            artifact_id,
            path: "in".into(),
            access: pb::Access::ReadOnly.into(),
        }],
        outputs: vec![pb::Output {
            name: "out".to_owned(),
            path: "out".into(),
            owners: vec![pb::OutputOwner { owner: Some(owner) }],
        }],
        limits: Some(pb::Limits {
            cpu_millis: 10_000_000,
            memory_bytes: 1 << 60,
            pids: 4_194_303,
            disk_bytes: 1 << 60,
        }),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        worker: "one".to_owned(),
        tags: Vec::new(),
        platform: "linux".to_owned(),
        queue_timeout: seconds(100),
        run_timeout: seconds(100_000),
        build_id: world.build.to_string(),
        caches: vec![pb::CacheMount { task_cache_id: world.cache.clone(), path: "/cache".into() }],
        interruptible: true,
        priority: -100,
        requests: Some(pb::ResourceRequests {
            cpu_millis: 1 << 42,
            memory_bytes: 1 << 42,
            disk_bytes: 1 << 42,
        }),
        start_timeout: seconds(100_000),
        retries: 100,
        capabilities: vec!["signals".to_owned()],
        terminal: Some(pb::Terminal { rows: 24, columns: 80 }),
        inline_stdin: Bytes::new(),
        keep_result: false,
        services: vec![service(world.sealed)],
        name: "build-3".to_owned(),
    }
}

/// Invalid names of a workload. An empty name is none.
fn name_of_workload() -> Vec<Bad> {
    let id = ArtifactId::new().to_string();
    let names = [".a", "a b", "a/b", "a\0b", "last", &id, &"x".repeat(64)];
    names.into_iter().flat_map(|name| invalid("name", "malformed", text(name), "name")).collect()
}

/// Valid service that sets every field.
fn service(image: ArtifactId) -> pb::Service {
    let arguments = vec![Bytes::from_static(b"true")];
    let check = pb::readiness::Check::Command(pb::ReadinessCommand { arguments: arguments.clone() });
    pb::Service {
        name: "x".repeat(63),
        image: Some(pb::Image {
            source: Some(pb::image::Source::ArtifactId(image.to_string())),
            entrypoint: None,
        }),
        command: arguments,
        environment: vec![pb::EnvironmentVariable { name: "A".into(), value: "b".into() }],
        directory: "somewhere".into(),
        user: "x".repeat(1024),
        limits: Some(pb::Limits {
            cpu_millis: 10_000_000,
            memory_bytes: 1 << 60,
            pids: 4_194_303,
            disk_bytes: 1 << 60,
        }),
        readiness: Some(pb::Readiness {
            check: Some(check),
            timeout: Some(rpc::duration(std::time::Duration::from_secs(100))),
        }),
        essential: true,
    }
}

fn bytes(value: impl Into<Vec<u8>>) -> Value {
    Value::Bytes(value.into().into())
}

/// Invalid variants of the field `spec` of a request.
pub(super) fn bad(world: &World<'_>, of: For) -> Vec<Bad> {
    // Unusual but valid values. `Submit` accepts them as another workload, and `Explain` explains
    // them.
    let strange = |bad: Bad| match of {
        For::Submit => given(|sent| put(sent, "workload_id", Some(&text(WorkloadId::new()))), [vec![bad]]),
        For::Explain => vec![bad],
    };
    let fine = match of {
        For::Submit => Expected::Taken,
        For::Explain => Expected::Nothing,
    };
    let value = |field: &str, what: &str, value: Value| {
        let bad = change(field, what, value, fine.clone());
        bad.into_iter().flat_map(strange).collect::<Vec<_>>()
    };
    let long = |field: &str| strange(time(field, i64::MAX, 999_999_999, fine.clone()));
    // `Explain` answers why the workload can never be placed.
    let never = |field: &str, what: &str, name: &str| match of {
        For::Submit => but(field, what, name, NoCompatibleWorker),
        For::Explain => nothing(field, what, text(name)),
    };
    // `Explain` does not check the owners of outputs.
    let build = |what: &str, build: BuildId| match of {
        For::Submit => but("build_id", what, build, OwnerEnded),
        For::Explain => nothing("build_id", what, text(build)),
    };
    // The reasons of the workers exceed the maximum size of an error.
    let tags =
        |count: usize| Value::List((0..count).map(|number| text(format!("{number:0>1000}"))).collect());
    let many_tags = || {
        let mut bad = invalid("tags", "that are too many", tags(17), "tags");
        if matches!(of, For::Submit) {
            let expected = Expected::Refused(NoCompatibleWorker, String::new());
            bad.extend(change("tags", "that are many, of no worker", tags(16), expected));
        }
        bad
    };
    let offered = |field: &str| {
        let mut bad = longest(field, 1024);
        bad.extend(never(field, "of no worker", &"x".repeat(1024)));
        bad
    };
    let fields = [
        team("team"),
        but(
            "team",
            "that does not have its inputs, nor its build",
            OTHER,
            match of {
                For::Submit => OwnerEnded,
                For::Explain => InputUnavailable,
            },
        ),
        choice("kind"),
        vec![cleared("image", "image")],
        vec![cleared("image.artifact_id", "image.source")],
        artifact("image.artifact_id", world),
        longest("image.resource_type", 255),
        invalid("image.resource_type", "missing", text(""), "image.resource_type"),
        never("image.resource_type", "of no worker", "unknown"),
        value("image.resource_type", "of some worker", text("git")),
        reference("image.reference"),
        invalid("image.entrypoint.words", "with NUL", bytes("a\0b"), "image.entrypoint.words[0]"),
        invalid("command", "of nothing", bytes(""), "command"),
        invalid("command", "with NUL", bytes("a\0b"), "command[0]"),
        value("command", "that is no text", bytes([0xff; 4096])),
        environment(),
        path("directory", "directory"),
        longest("user", 1024),
        choice("stdin"),
        invalid("stdin", "that cannot be read again", Value::EnumNumber(2), "interruptible"),
        invalid("stdin", "that a terminal interprets", Value::EnumNumber(3), "stdin"),
        invalid("inline_stdin", "of another mode", bytes("x"), "inline_stdin"),
        given(
            |sent| {
                put(sent, "spec.terminal", None);
                put(sent, "spec.stdin", Some(&Value::EnumNumber(3)));
            },
            [invalid("inline_stdin", "too large", bytes(vec![b'x'; (1 << 20) + 1]), "inline_stdin")],
        ),
        invalid("keep_result", "of a terminal", Value::Bool(true), "keep_result"),
        choice("output"),
        within(
            "inputs",
            "inputs[0]",
            [
                name_of_mount(),
                artifact("artifact_id", world),
                path("path", "path"),
                invalid("path", "of the root", bytes("/"), "path"),
                choice("access"),
            ],
        ),
        twice("inputs", "inputs[1].name"),
        invalid("inputs.path", "of an output", bytes("out"), "outputs"),
        invalid("outputs.path", "of an input that is read-only", bytes("in"), "outputs"),
        invalid("outputs.path", "below an input", bytes("in/out"), "outputs"),
        within("outputs", "outputs[0]", [name_of_mount(), path("path", "path"), owners(&value)]),
        twice("outputs", "outputs[1].name"),
        limits(),
        choice("privilege"),
        choice("network"),
        offered("tags"),
        change("tags", "empty", Value::List(vec![text("")]), refused("tags")),
        many_tags(),
        offered("platform"),
        worker_or_any("worker", world),
        name_of_workload(),
        negative("queue_timeout"),
        long("queue_timeout"),
        negative("run_timeout"),
        long("run_timeout"),
        negative("start_timeout"),
        long("start_timeout"),
        optional_id("build_id"),
        build("unknown", BuildId::new()),
        build("of another team", world.foreign_build),
        build("that has ended", world.ended_build),
        within(
            "caches",
            "caches[0]",
            [
                id("task_cache_id"),
                but("task_cache_id", "unknown", CacheId::new(), InputUnavailable),
                but("task_cache_id", "of another team", &world.foreign_cache, InputUnavailable),
                path("path", "path"),
                invalid("path", "missing", bytes(""), "path"),
                invalid("path", "that is relative", bytes("cache"), "path"),
                invalid("path", "of the root", bytes("/"), "path"),
            ],
        ),
        invalid("caches.path", "above all", bytes("/workspace"), "caches"),
        twice("caches", "caches[1].task_cache_id"),
        many("caches", 101),
        too_many_mounts("inputs", world),
        too_many_mounts("outputs", world),
        // The path is too long to be repeated in the error.
        given(
            |sent| put(sent, "spec.outputs.path", Some(&bytes([&b"/"[..], &[0xff; 4000], b"/a"].concat()))),
            [invalid(
                "caches.path",
                "above a long one",
                bytes([&b"/"[..], &[0xff; 4000]].concat()),
                "caches",
            )],
        ),
        invalid(
            "outputs.owners.task_cache_id",
            "of a cache that it uses",
            text(&world.cache),
            "outputs[0].owners",
        ),
        given(
            |sent| put(sent, "spec.stdin", Some(&Value::EnumNumber(2))),
            [invalid("interruptible", "with standard input", Value::Bool(true), "interruptible")],
        ),
        given(
            |sent| {
                put(sent, "spec.stdin", Some(&Value::EnumNumber(2)));
                put(sent, "spec.interruptible", Some(&Value::Bool(false)));
            },
            [invalid("retries", "with standard input", Value::U32(1), "retries")],
        ),
        invalid("retries", "absurd", Value::U32(101), "retries"),
        invalid("retries", "absurd", Value::U32(u32::MAX), "retries"),
        priority("priority"),
        requests("requests"),
        offered("capabilities"),
        terminal(),
        within("services", "services[0]", services(world, &value)),
        twice("services", "services[1].name"),
        many("services", 17),
    ];
    let mut bad = within("spec", "spec", fields);
    bad.push(cleared("spec", if of == For::Submit { "spec" } else { "subject" }));
    bad.extend(invalid("spec.environment.value", "that is too large", bytes(vec![b'x'; 1 << 20]), "spec"));
    bad
}

/// Invalid variants of the id of a used artifact.
fn reference(field: &str) -> Vec<Bad> {
    let references = [String::new(), "a b".to_owned(), "a\nb".to_owned(), "x".repeat(1025)];
    references.into_iter().flat_map(|value| invalid(field, "malformed", text(value), field)).collect()
}

fn artifact(field: &str, world: &World<'_>) -> Vec<Bad> {
    let mut bad = id(field);
    bad.extend(but(field, "unknown", ArtifactId::new(), InputUnavailable));
    bad.extend(but(field, "of another team", world.foreign_artifact, InputUnavailable));
    bad.extend(but(field, "not sealed", world.open, InputUnavailable));
    bad
}

fn name_of_mount() -> Vec<Bad> {
    ["", "a/b", "a\0b", ".", "..", &"x".repeat(256)]
        .into_iter()
        .flat_map(|name| invalid("name", "impossible", text(name), "name"))
        .collect()
}

fn path(field: &str, named: &str) -> Vec<Bad> {
    [&b"a\0b"[..], b"..", b"/a/../b", &[b'x'; 4096]]
        .into_iter()
        .flat_map(|path| invalid(field, "impossible", bytes(path), named))
        .collect()
}

/// Invalid variants of the owners of an output.
fn owners(strange: &dyn Fn(&str, &str, Value) -> Vec<Bad>) -> Vec<Bad> {
    let of = |field: &str, unknown: String| {
        let field = format!("owners.{field}");
        let mut bad = id(&field);
        // An owner that does not exist when the workload ends is ignored.
        bad.extend(strange(&field, "unknown", text(unknown)));
        bad
    };
    [
        vec![cleared("owners.build_id", "owners.owner")],
        of("build_id", BuildId::new().to_string()),
        of("task_cache_id", CacheId::new().to_string()),
        of("resource_cache_claim_id", ClaimId::new().to_string()),
        many("owners", 101),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn limits() -> Vec<Bad> {
    let limit = |field: &str, values: &[u64]| {
        let field = format!("limits.{field}");
        let bad = values.iter().flat_map(|value| invalid(&field, "impossible", Value::U64(*value), &field));
        bad.collect::<Vec<_>>()
    };
    [
        limit("cpu_millis", &[10_000_001, u64::MAX]),
        limit("memory_bytes", &[1, (6 << 20) - 1, (1 << 60) + 1, u64::MAX]),
        limit("pids", &[4_194_304, u64::MAX]),
        limit("disk_bytes", &[1, (1 << 60) + 1, u64::MAX]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn terminal() -> Vec<Bad> {
    let length = |field: &str| {
        let field = format!("terminal.{field}");
        let bad = [0, 65536].into_iter();
        bad.flat_map(|length| invalid(&field, "impossible", Value::U32(length), &field)).collect::<Vec<_>>()
    };
    [length("rows"), length("columns")].into_iter().flatten().collect()
}

fn environment() -> Vec<Bad> {
    let variable = within(
        "environment",
        "environment[0]",
        [
            invalid("name", "missing", bytes(""), "name"),
            invalid("name", "with =", bytes("a=b"), "name"),
            invalid("name", "with NUL", bytes("a\0b"), "name"),
            invalid("value", "with NUL", bytes("a\0b"), "value"),
        ],
    );
    [variable, twice("environment", "environment[1].name")].into_iter().flatten().collect()
}

/// Invalid variants of a service.
fn services(world: &World<'_>, fine: &dyn Fn(&str, &str, Value) -> Vec<Bad>) -> Vec<Vec<Bad>> {
    let names = ["", "Db", "a.b", "-a", "a-", "localhost", &"x".repeat(64)];
    let arguments = "readiness.command.arguments";
    let ports = [0, 65536]
        .map(|port| invalid("readiness.tcp_port", "impossible", Value::U32(port), "readiness.tcp_port"));
    vec![
        names.into_iter().flat_map(|name| invalid("name", "impossible", text(name), "name")).collect(),
        vec![cleared("image", "image"), cleared("image.artifact_id", "image.source")],
        artifact("image.artifact_id", world),
        invalid("image.resource_type", "that is valid elsewhere", text("git"), "image"),
        reference("image.reference"),
        invalid("image.entrypoint.words", "with NUL", bytes("a\0b"), "image.entrypoint.words[0]"),
        invalid("command", "of nothing", bytes(""), "command"),
        invalid("command", "with NUL", bytes("a\0b"), "command[0]"),
        environment(),
        path("directory", "directory"),
        longest("user", 1024),
        limits(),
        ports.into_iter().flatten().collect(),
        vec![cleared(arguments, arguments)],
        invalid(arguments, "of nothing", bytes(""), arguments),
        negative("readiness.timeout"),
        vec![time("readiness.timeout", 0, 0, refused("readiness.timeout"))],
        fine("essential", "unset", Value::Bool(false)),
    ]
}

/// Spec with more mounts than a worker creates for one attempt. Each mount uses a different
/// artifact.
fn too_many_mounts(field: &str, world: &World<'_>) -> Vec<Bad> {
    let path = format!("spec.{field}");
    let one = valid(world);
    let change = move |sent: &mut Vec<DynamicMessage>| {
        let many = 0..901;
        let mut spec = one.clone();
        match path.as_str() {
            "spec.inputs" => {
                let input = spec.inputs.remove(0);
                spec.inputs = many
                    .map(|number| pb::Input {
                        name: format!("{number}"),
                        path: format!("{number}").into(),
                        artifact_id: ArtifactId::new().to_string(),
                        ..input.clone()
                    })
                    .collect();
            }
            _ => {
                let output = |number| pb::Output { name: format!("{number}"), ..pb::Output::default() };
                spec.outputs = many.map(output).collect();
            }
        }
        let field = sent[0].descriptor().get_field_by_name("spec").expect("a field");
        let Kind::Message(descriptor) = field.kind() else { panic!("spec is no message") };
        let mut encoded = DynamicMessage::new(descriptor);
        encoded.transcode_from(&spec).expect("a spec");
        sent[0].set_field(&field, Value::Message(encoded));
    };
    otherwise(field, "901 of them", refused(field), change)
}

/// Invalid priorities.
pub(super) fn priority(field: &str) -> Vec<Bad> {
    [-101, 101, i32::MIN, i32::MAX]
        .into_iter()
        .flat_map(|value| invalid(field, "absurd", Value::I32(value), field))
        .collect()
}

/// Resource requests that exceed the maximum.
pub(super) fn requests(field: &str) -> Vec<Bad> {
    ["cpu_millis", "memory_bytes", "disk_bytes"]
        .into_iter()
        .flat_map(|amount| {
            let field = format!("{field}.{amount}");
            let bad =
                [(1 << 42) + 1, u64::MAX].map(|value| invalid(&field, "absurd", Value::U64(value), &field));
            bad.into_iter().flatten()
        })
        .collect()
}
