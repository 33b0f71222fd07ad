//! Faults between a gateway and its worker, at the level of the runtime.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::workload::{FailureReason, Stdin};
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use futures::StreamExt;
use runtime::{
    ContainerSpec, Contents, Ended, Offsets, OutputStream, ProcessEvent, ProcessSpec, ProcessState, Runtime,
    RuntimeError, VolumeSource,
};
use testing::baggageclaim::{Driver, Faults};
use testing::conformance::{
    RuntimeExt, Subject, get, in_time, lines, mount, on_root, process, programs, put, read_all, read_until,
    until_lines,
};
use testing::garden::{Break, Fault, Manner};

use super::subject::GardenSubject;

const EVERY: [Manner; 3] = [Manner::Containerd, Manner::Guardian, Manner::Houdini];

/// A worker of each kind, with a container that mounts a volume at `/out`.
pub(crate) struct Bench {
    pub(crate) subject: GardenSubject,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) volume: VolumeHandle,
    pub(crate) spec: ContainerSpec,
}

impl Bench {
    pub(crate) async fn new(manner: Manner) -> Option<Self> {
        Some(Self::of(GardenSubject::new(manner, Driver::Overlay).await?).await)
    }

    pub(crate) async fn of(subject: GardenSubject) -> Self {
        let runtime = subject.runtime();
        let volume = runtime.volume().await;
        let spec = ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..on_root(&subject).await };
        Self { subject, runtime, volume, spec }
    }

    pub(crate) fn inject(&self, pattern: &str, fault: Fault) {
        self.subject.server().inject(pattern, fault);
    }

    pub(crate) fn runs(&self) -> usize {
        let requests = self.subject.server().requests();
        requests.iter().filter(|line| line.starts_with("POST") && line.ends_with("/processes")).count()
    }

    pub(crate) async fn lines(&self) -> usize {
        lines(&*self.runtime, self.volume, "file").await
    }
}

pub(crate) fn is_exit(ended: &Ended, code: u8) -> bool {
    *ended == Ended::Exited { exit: domain::workload::Exit::Code(code), stopped: false }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_with_lost_answer_is_not_repeated() {
    for manner in EVERY {
        let Some(bench) = Bench::new(manner).await else { return };
        bench.inject("/processes", Fault::LoseAnswer);
        let handle = bench.runtime.made(bench.spec.clone()).await;
        let command = programs::append_and_wait_for_another("/out/file");
        let id = bench.runtime.started(handle, process(&command)).await;
        until_lines(&*bench.runtime, bench.volume, "file", 1).await;
        put(&*bench.runtime, bench.volume, "file", "line\nline\n").await;
        let ended = bench.runtime.ended(id).await;
        // Houdini may have forgotten the process before the query.
        let forgotten = matches!(&ended, Ended::Unknown(_)) && manner == Manner::Houdini;
        assert!(is_exit(&ended, 7) || forgotten, "{manner:?}: {ended:?}");
        assert_eq!(bench.runs(), 1, "{manner:?}");
        assert_eq!(bench.lines().await, 2, "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_lost_in_transit_stays_unknown() {
    for manner in EVERY {
        let Some(mut bench) = Bench::new(manner).await else { return };
        bench.inject("/processes", Fault::Reset);
        let handle = bench.runtime.made(bench.spec.clone()).await;
        let id = bench.runtime.started(handle, process(&programs::append("/out/file"))).await;
        let Ended::Unknown(failure) = bench.runtime.ended(id).await else { panic!("{manner:?}") };
        assert_eq!(failure.reason, FailureReason::StartUnknown, "{manner:?}");
        assert_eq!(bench.runtime.process(id).await.expect("a state"), ProcessState::StartUnknown);
        let again = bench.runtime.start(handle, id, process(&programs::append("/out/file"))).await;
        again.expect("starting again does nothing");

        drop(std::mem::replace(&mut bench.runtime, bench.subject.runtime()));
        let Bench { mut subject, runtime, volume, .. } = bench;
        drop(runtime);
        subject.reopen().await;
        let runtime = subject.runtime();
        assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::StartUnknown, "{manner:?}");
        runtime.start(handle, id, process(&programs::append("/out/file"))).await.expect("nothing");
        assert_eq!(lines(&*runtime, volume, "file").await, 0, "{manner:?}: the process ran");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_attachment_is_restored_with_a_gap() {
    for manner in EVERY {
        for how in [Break::End, Break::Reset] {
            let Some(bench) = Bench::new(manner).await else { return };
            let handle = bench.runtime.made(bench.spec.clone()).await;
            let command = programs::append_and_wait_for_another("/out/file");
            let id = bench.runtime.started(handle, process(&command)).await;
            until_lines(&*bench.runtime, bench.volume, "file", 1).await;
            in_time("a start that is known", async {
                while bench.runtime.process(id).await.expect("a state") != ProcessState::Started {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
            .await;
            let mut attachment = bench.runtime.attach(id, Offsets::default()).await.expect("attach");
            bench.subject.server().break_attachments(how);
            // The process exists all the time, and its end comes from the second attachment.
            let gap = in_time("a gap", async {
                loop {
                    match attachment.events.next().await.expect("more to come").expect("an event") {
                        ProcessEvent::Truncated { stream: OutputStream::Stdout, from, to } => {
                            break (from, to);
                        }
                        ProcessEvent::Ended(ended) => panic!("{manner:?} {how:?}: {ended:?}"),
                        _ => {}
                    }
                }
            })
            .await;
            assert_eq!(gap, (0, 0), "the size of the gap is unknown");
            in_time("another attachment", async {
                let attached =
                    |line: &String| line.starts_with("GET") && line.ends_with(&format!("/processes/{id}"));
                while !bench.subject.server().requests().iter().any(attached) {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            })
            .await;
            put(&*bench.runtime, bench.volume, "file", "line\nline\n").await;
            let ended = bench.runtime.ended(id).await;
            assert!(is_exit(&ended, 7), "{manner:?} {how:?}: {ended:?}");
            assert_eq!(bench.runs(), 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_is_rejected_after_possible_loss() {
    let Some(bench) = Bench::new(Manner::Guardian).await else { return };
    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::cat()) };
    let handle = bench.runtime.made(bench.spec.clone()).await;
    let id = bench.runtime.started(handle, spec).await;
    let mut attachment = bench.runtime.attach(id, Offsets::default()).await.expect("attach");
    attachment.input.stdin(0, Bytes::from_static(b"one")).await.expect("input");
    read_until(&mut attachment.events, "one").await;
    let binary = attachment.input.stdin(3, Bytes::from_static(b"\xff\xfe")).await;
    assert!(matches!(binary, Err(RuntimeError::Unsupported(_))), "{binary:?}");
    // A character that arrives in two parts.
    let euro = "\u{20ac}".as_bytes();
    attachment.input.stdin(3, Bytes::copy_from_slice(&euro[..1])).await.expect("input");
    attachment.input.stdin(4, Bytes::copy_from_slice(&euro[1..])).await.expect("input");
    read_until(&mut attachment.events, "\u{20ac}").await;

    bench.subject.server().break_attachments(Break::End);
    let output = in_time("the end", read_all(attachment)).await;
    assert_eq!(
        output.ended.as_ref().map(|ended| is_exit(ended, 0)),
        Some(true),
        "cat sees the end of its input"
    );
    let attachment = bench.runtime.attach(id, Offsets::default()).await.expect("attach");
    attachment.input.stdin(6, Bytes::from_static(b"x")).await.expect("it has ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn creation_is_not_repeated_over_existing_container() {
    for manner in EVERY {
        let Some(bench) = Bench::new(manner).await else { return };
        // The container was created and the answer was lost, the container was created with an
        // error as the answer, or the request was lost.
        for fault in [Fault::LoseAnswer, Fault::FailAfter("no room".to_owned()), Fault::Reset] {
            bench.inject("POST /containers", fault.clone());
            let handle = ContainerHandle::new();
            let made = bench.runtime.create_container(handle, bench.spec.clone()).await;
            let held = bench.runtime.list().await.expect("list").containers;
            match made {
                Ok(()) => assert_eq!(held, [handle], "{manner:?} {fault:?}"),
                Err(_) => assert!(held.is_empty(), "{manner:?} {fault:?}: {held:?}"),
            }
            bench.runtime.create_container(handle, bench.spec.clone()).await.expect("make it again");
            let id = bench.runtime.started(handle, process(&programs::append("/out/file"))).await;
            assert!(is_exit(&bench.runtime.ended(id).await, 0), "{manner:?} {fault:?}");
            bench.runtime.create_container(handle, bench.spec.clone()).await.expect("nothing");
            assert!(
                is_exit(&bench.runtime.ended(id).await, 0),
                "the container still exists: {manner:?} {fault:?}"
            );
            bench.runtime.destroy_container(handle).await.expect("destroy");
        }
        assert_eq!(bench.lines().await, 3, "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_survive_lost_answers() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let lose = |what: &str| Faults { lose_answers: Some((what.to_owned(), 1)), ..Faults::default() };
    bench.subject.volumes.set_faults(lose("POST /volumes-async"));
    let volume = bench.runtime.volume().await;
    put(&*bench.runtime, volume, "file", "kept").await;
    // The worker would empty the volume.
    bench.runtime.create_volume(volume, VolumeSource::Empty).await.expect("nothing");
    assert_eq!(get(&*bench.runtime, volume, "file").await.as_deref(), Some("kept"));
    let child = bench.runtime.child(volume).await;
    let refused = bench.runtime.destroy_volume(volume).await;
    assert!(matches!(refused, Err(RuntimeError::HasChildren(_))), "{refused:?}");
    bench.subject.volumes.set_faults(lose("DELETE /volumes/"));
    bench.runtime.destroy_volume(child).await.expect("destroy");
    bench.runtime.destroy_volume(volume).await.expect("destroy");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_or_failed_archives_are_rejected() {
    use tokio::io::AsyncReadExt;
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    put(&*bench.runtime, bench.volume, "file", "contents").await;
    let faults = [
        Faults { cut_archives: true, ..Faults::default() },
        Faults { fail_archives: true, ..Faults::default() },
    ];
    for fault in faults {
        let Contents::Remote(remote) = bench.runtime.contents(bench.volume).await.expect("the contents")
        else {
            panic!("the volume is local")
        };
        remote.store_manifest(b"manifest".to_vec()).await.expect("keep");
        bench.subject.volumes.set_faults(fault.clone());
        let mut bytes = Vec::new();
        let read = match remote.read(std::path::Path::new("")).await {
            Ok(mut archive) => archive.read_to_end(&mut bytes).await.map(|_| ()),
            Err(error) => Err(std::io::Error::other(error)),
        };
        assert!(read.is_err(), "{fault:?}: the archive was accepted");
        let kept = remote.read_manifest().await;
        assert!(kept.is_err(), "{fault:?}: {kept:?}");
        bench.subject.volumes.set_faults(Faults::default());
        assert_eq!(remote.read_manifest().await.expect("a manifest").as_deref(), Some(&b"manifest"[..]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_is_not_rerun_when_containers_are_lost() {
    for manner in EVERY {
        let Some(mut bench) = Bench::new(manner).await else { return };
        let handle = bench.runtime.made(bench.spec.clone()).await;
        let id = bench.runtime.started(handle, process(&programs::sleep())).await;
        in_time("the start", async {
            while bench.runtime.process(id).await.expect("a state") != ProcessState::Started {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
        bench.subject.lose_containers(manner);
        drop(bench.runtime);
        bench.subject.reopen().await;
        let runtime = bench.subject.runtime();
        let ended = runtime.ended(id).await;
        let Ended::Unknown(failure) = ended else { panic!("{manner:?}: {ended:?}") };
        assert_eq!(failure.reason, FailureReason::ExitUnknown);
        let unknown = runtime.process(ProcessId::new()).await;
        assert!(matches!(unknown, Err(RuntimeError::ProcessNotFound(_))), "{unknown:?}");
    }
}
