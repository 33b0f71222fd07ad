//! The golden corpus: encoded messages beside their canonical JSON, which the clients in all
//! languages decode and compare.
//!
//! `TYPE.CASE.binpb` has the encoding, and `TYPE.CASE.json` the canonical JSON. The test compares
//! the committed files with the current encoding, so that a change of the encoding is noticed.
//! `GANTRY_BLESS=1 cargo test -p gantry-rpc --test rpc golden` writes the files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use gantry_rpc::pb::{artifacts, runtime, scheduler, streamer};
use gantry_rpc::{DESCRIPTORS, Reason};
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, SerializeOptions};
use serde_json::{Value, json};

/// Bytes that are not UTF-8: a lone continuation byte, an invalid byte, and NUL.
const NOT_UTF8: &[u8] = b"\x80\xff\x00/\xc3";
/// A number that JavaScript cannot represent exactly.
const LARGE: u64 = (1 << 53) + 1;
const ID: &str = "01980000-0000-7000-8000-00000000002a";

struct Corpus {
    pool: DescriptorPool,
    files: BTreeMap<String, Vec<u8>>,
}

impl Corpus {
    fn add<M: Message>(&mut self, case: &str, message: &M) {
        // `gantry_rpc::pb::scheduler::Exit` is `gantry.scheduler.v1.Exit`.
        let path: Vec<_> = std::any::type_name::<M>().split("::").collect();
        let [_, "pb", package, name] = path[..] else { panic!("{path:?} is not a Gantry message") };
        let name = format!("gantry.{package}.v1.{name}");
        let encoded = message.encode_to_vec();
        let descriptor = self.pool.get_message_by_name(&name).expect("a known message");
        let dynamic = DynamicMessage::decode(descriptor, encoded.as_slice()).expect("it decodes");
        let json = dynamic
            .serialize_with_options(serde_json::value::Serializer, &SerializeOptions::new())
            .expect("it has JSON");
        self.put(&name, case, encoded, &json);
    }

    fn put(&mut self, name: &str, case: &str, encoded: Vec<u8>, json: &Value) {
        let text = serde_json::to_string_pretty(json).expect("text") + "\n";
        let repeated = self.files.insert(format!("{name}.{case}.binpb"), encoded);
        assert!(repeated.is_none(), "{name}.{case} twice");
        self.files.insert(format!("{name}.{case}.json"), text.into_bytes());
    }
}

fn bytes(bytes: &'static [u8]) -> Bytes {
    Bytes::from_static(bytes)
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn duration(seconds: i64, nanos: i32) -> Option<prost_types::Duration> {
    Some(prost_types::Duration { seconds, nanos })
}

fn timestamp(seconds: i64, nanos: i32) -> Option<prost_types::Timestamp> {
    Some(prost_types::Timestamp { seconds, nanos })
}

fn spec() -> scheduler::WorkloadSpec {
    use scheduler::*;
    WorkloadSpec {
        team: text("main"),
        kind: WorkloadKind::Task.into(),
        image: Some(Image { source: Some(image::Source::Host(HostImage {})), entrypoint: None }),
        command: vec![bytes(b"sh"), bytes(b"-c"), bytes(NOT_UTF8)],
        environment: vec![EnvironmentVariable { name: bytes(b"NAME"), value: bytes(NOT_UTF8) }],
        directory: bytes(b"/workspace"),
        user: text("1000:1000"),
        stdin: StdinMode::Attached.into(),
        output: OutputMode::Attached.into(),
        inputs: vec![Input {
            name: text("src"),
            artifact_id: text(ID),
            path: bytes(b"sub/\xff"),
            access: Access::CopyOnWrite.into(),
        }],
        outputs: vec![Output {
            name: text("gr\u{fc}n \u{1f7e2}"),
            path: Bytes::new(),
            owners: vec![OutputOwner { owner: Some(output_owner::Owner::TaskCacheId(text(ID))) }],
        }],
        limits: Some(Limits { cpu_millis: 1500, memory_bytes: LARGE, pids: 0, disk_bytes: 0 }),
        privilege: Privilege::Confined.into(),
        network: Network::None.into(),
        tags: vec![text("gpu"), text("")],
        platform: text("linux"),
        queue_timeout: duration(0, 0),
        run_timeout: duration(3600, 500_000_000),
        build_id: text(ID),
        caches: vec![CacheMount { task_cache_id: text(ID), path: bytes(b"/cache/\xff") }],
        interruptible: true,
        priority: -7,
        requests: Some(ResourceRequests { cpu_millis: 500, memory_bytes: LARGE, disk_bytes: 0 }),
        start_timeout: duration(90, 1),
        retries: 3,
        capabilities: vec![text("ends-whole"), text("signals")],
        worker: text("worker-1"),
        terminal: Some(Terminal { rows: 24, columns: 80 }),
        inline_stdin: bytes(NOT_UTF8),
        keep_result: true,
        services: vec![Service {
            name: text("db"),
            image: Some(Image { source: Some(image::Source::Host(HostImage {})), entrypoint: None }),
            command: vec![bytes(b"serve"), bytes(NOT_UTF8)],
            environment: vec![EnvironmentVariable { name: bytes(b"NAME"), value: bytes(NOT_UTF8) }],
            directory: bytes(b"/srv"),
            user: text("db"),
            limits: Some(Limits { cpu_millis: 500, memory_bytes: 1 << 30, pids: 64, disk_bytes: 1 << 32 }),
            readiness: Some(Readiness {
                check: Some(readiness::Check::Command(ReadinessCommand { arguments: vec![bytes(b"true")] })),
                timeout: duration(30, 0),
            }),
            essential: true,
        }],
        name: text("build-3"),
    }
}

fn location() -> scheduler::AttemptLocation {
    scheduler::AttemptLocation {
        worker_id: text(ID),
        worker_name: text("one"),
        gateway_endpoint: text("http://127.0.0.1:7400"),
        attempt_id: text(ID),
    }
}

fn add_scheduler_messages(corpus: &mut Corpus) {
    use scheduler::*;
    corpus.add("full", &spec());
    corpus.add("empty", &WorkloadSpec::default());
    let artifact = Image { source: Some(image::Source::ArtifactId(String::new())), entrypoint: None };
    corpus.add("a_chosen_default", &artifact);
    corpus.add("nothing_chosen", &Image::default());
    // Values that an older reader does not know.
    corpus.add(
        "enums_of_the_future",
        &WorkloadSpec { kind: 99, stdin: -1, network: i32::MAX, ..Default::default() },
    );

    for (case, how) in [
        ("code_0", Some(exit::Status::Code(0))),
        ("signal", Some(exit::Status::Signal(9))),
        ("out_of_memory", Some(exit::Status::OutOfMemory(OutOfMemory {}))),
        ("unset", None),
    ] {
        corpus.add(case, &Exit { status: how });
    }
    let outputs = vec![PublishedOutput {
        name: text("report"),
        artifact_id: text(ID),
        size_bytes: u64::MAX,
        digest: bytes(NOT_UTF8),
        entries: LARGE,
    }];
    let finished = Finished {
        outcome: Outcome::Failed.into(),
        exit: Some(Exit { status: Some(exit::Status::Code(3)) }),
        failure: Some(Failure { reason: text("OUTPUT_LOST"), message: text("why") }),
        outputs,
        location: Some(location()),
        // 0 differs from absent.
        usage: Some(Usage {
            queued: duration(0, 0),
            running: duration(1, 500_000_000),
            peak_memory_bytes: Some(LARGE),
            bytes_in: Some(0),
            ..Default::default()
        }),
        notes: vec![text("a note")],
        // Empty differs from absent.
        result: Some(Bytes::new()),
    };
    let event = |revision, event| WatchResponse { revision, at: timestamp(1_763_683_200, 1), event };
    corpus.add(
        "queued",
        &event(1, Some(watch_response::Event::Queued(Queued { reasons: vec![text("one: is full")] }))),
    );
    let placed = Placed { location: Some(location()), reason: text("it is the only worker") };
    corpus.add("placed", &event(2, Some(watch_response::Event::Placed(placed))));
    corpus.add("preparing", &event(3, Some(watch_response::Event::Preparing(Preparing {}))));
    let running = Running { location: Some(location()) };
    corpus.add("running", &event(LARGE, Some(watch_response::Event::Running(running))));
    corpus.add("finished", &event(u64::MAX, Some(watch_response::Event::Finished(finished))));
    // An unknown event decodes as no event.
    corpus.add("no_event", &WatchResponse { at: timestamp(-1, 999_999_999), ..Default::default() });

    corpus.add(
        "by_id",
        &ExplainRequest {
            subject: Some(explain_request::Subject::Workload(WaitingWorkload {
                team: text("main"),
                workload_id: text(ID),
            })),
            max_workers: 1,
            workers: vec![text("one")],
        },
    );
    let refusal = PlacementRefusal {
        reason: text("FULL"),
        message: text("is full (2 of 2 tasks)"),
        duration: RefusalDuration::Passing.into(),
        ended_by: text("one of its tasks ends"),
        limit: Some(ReachedLimit { resource: text("tasks"), limit: 2, amount: 2 }),
        labels: Vec::new(),
    };
    let of_many = PlacementRefusal {
        reason: text("MISSING_TAGS"),
        message: text("lack the tags gpu"),
        duration: RefusalDuration::Lasting.into(),
        ended_by: text("it has the tags gpu"),
        limit: None,
        labels: vec![text("gpu")],
    };
    corpus.add(
        "full",
        &ExplainResponse {
            verdict: Verdict::NotNow.into(),
            queue_position: LARGE,
            workers: vec![WorkerExplanation {
                worker_id: text(ID),
                worker_name: text("one"),
                refusals: vec![refusal],
                standing: String::new(),
                scores: vec![StrategyScore { strategy: text("limit-active-tasks"), value: LARGE }],
            }],
            unblocked_by: vec![text("one: one of its tasks ends")],
            summary: text("the only worker that could take it, one, is full (2 of 2 tasks)"),
            expected_wait: duration(40, 1),
            expected_wait_basis: text("lately a slot was held for 40 s"),
            workers_known: LARGE,
            workers_eligible: 0,
            workers_gone: 0,
            groups: vec![RefusingWorkers {
                refusals: vec![of_many],
                count: LARGE - 1,
                names: vec![text("other")],
            }],
        },
    );
}

fn add_other_messages(corpus: &mut Corpus) {
    use artifacts::PutBuildRequest;
    use runtime::*;
    corpus.add(
        "full",
        &PutBuildRequest {
            build_id: text(ID),
            team: text("main"),
            ends_with_workload_id: text(ID),
            keep: duration(0, 1),
            term: duration(315_576_000_000, 0),
            ..Default::default()
        },
    );

    let open = streamer::UploadOpen {
        team: text("main"),
        artifact_id: text(ID),
        digest: Bytes::new(),
        build_id: text(ID),
        label: text("src"),
        avoid_worker_ids: vec![text(ID)],
    };
    corpus.add(
        "open",
        &streamer::UploadRequest { message: Some(streamer::upload_request::Message::Open(open)) },
    );
    let endpoint = streamer::TransferEndpoint {
        gateway_endpoint: text("unix:///run/gantry.sock"),
        ticket: text("ticket"),
        worker_name: text("one"),
        worker_id: text(ID),
    };
    let endpoint = streamer::upload_response::Message::Endpoint(endpoint);
    corpus.add("endpoint", &streamer::UploadResponse { message: Some(endpoint) });

    let resume = Resume {
        team: text("main"),
        process_id: text(ID),
        stdout_offset: LARGE,
        stderr_offset: 0,
        worker_id: String::new(),
        observer: false,
        idle_timeout: None,
        since: Some(prost_types::Timestamp { seconds: 1_800_000_000, nanos: 500 }),
    };
    corpus.add("resume", &AttachRequest { message: Some(attach_request::Message::Resume(resume)) });
    corpus.add(
        "close_stdin",
        &AttachRequest { message: Some(attach_request::Message::CloseStdin(CloseStdin {})) },
    );
    let output = runtime::Output { stream: Stream::Stderr.into(), offset: u64::MAX, data: bytes(NOT_UTF8) };
    corpus.add("output", &AttachResponse { message: Some(attach_response::Message::Output(output)) });
    corpus.add(
        "exited_unknown",
        &AttachResponse { message: Some(attach_response::Message::Exited(Exited::default())) },
    );
    let done = Done { stdout_offset: LARGE, stderr_offset: 0 };
    corpus.add("done", &AttachResponse { message: Some(attach_response::Message::Done(done)) });

    let file = FileEntry {
        size_bytes: LARGE,
        extents: vec![Extent { offset: LARGE - 4, length: 4, digest: bytes(NOT_UTF8) }],
    };
    corpus.add(
        "file",
        &Entry {
            path: bytes(b"dir/\xe9t\xe9"),
            mode: 0o644,
            uid: u32::MAX,
            gid: 1000,
            mtime_seconds: -86_400,
            mtime_nanos: 999_999_999,
            xattrs: vec![ExtendedAttribute { name: bytes(b"user.x"), value: bytes(NOT_UTF8) }],
            kind: Some(entry::Kind::File(file)),
        },
    );
    corpus.add(
        "symlink",
        &Entry { path: bytes(b"a"), kind: Some(entry::Kind::Symlink(bytes(b"\xff"))), ..Default::default() },
    );
    corpus.add(
        "root",
        &Entry { mode: 0o755, kind: Some(entry::Kind::Directory(DirectoryEntry {})), ..Default::default() },
    );
    corpus.add(
        "empty_data",
        &WriteArchiveRequest { message: Some(write_archive_request::Message::Data(Bytes::new())) },
    );
    let done = read_archive_response::Message::Done(ReadArchiveDone { digest: bytes(NOT_UTF8) });
    corpus.add("done", &ReadArchiveResponse { message: Some(done) });
}

/// Content of the trailer `grpc-status-details-bin` of an error.
fn add_errors(corpus: &mut Corpus) {
    let about = [("one", text("lacks the tags gpu"))];
    let status =
        Reason::NoCompatibleWorker.status_about("gantry.scheduler", "no worker could ever run it", about);
    let json = json!({
        "code": 9,
        "message": "no worker could ever run it",
        "details": [{
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "NO_COMPATIBLE_WORKER",
            "domain": "gantry.scheduler",
            "metadata": { "one": "lacks the tags gpu" },
        }],
    });
    corpus.put("google.rpc.Status", "no_compatible_worker", status.details().to_vec(), &json);
}

fn corpus() -> BTreeMap<String, Vec<u8>> {
    let pool = DescriptorPool::decode(DESCRIPTORS).expect("descriptors");
    let mut corpus = Corpus { pool, files: BTreeMap::new() };
    add_scheduler_messages(&mut corpus);
    add_other_messages(&mut corpus);
    add_errors(&mut corpus);
    corpus.files
}

#[test]
fn committed_corpus_equals_current_encoding() {
    let directory: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/clients/golden");
    let expected = corpus();
    if std::env::var_os("GANTRY_BLESS").is_some() {
        if directory.exists() {
            std::fs::remove_dir_all(&directory).expect("removed");
        }
        std::fs::create_dir_all(&directory).expect("made");
        for (name, content) in &expected {
            std::fs::write(directory.join(name), content).expect("written");
        }
    }
    let mut committed = BTreeMap::new();
    for entry in std::fs::read_dir(&directory).expect("the corpus") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().into_string().expect("a name");
        committed.insert(name, std::fs::read(entry.path()).expect("a file"));
    }
    assert_eq!(committed.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, content) in &expected {
        assert!(committed[name] == *content, "{name} differs from what this code encodes");
    }
}
