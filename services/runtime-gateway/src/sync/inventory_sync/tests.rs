//! Tests of the sweep and the report, with a fake artifact store.

use super::*;
use crate::test_support::store::{LIFE, Store, StoreCall, session};
use crate::test_support::{DESTROYED_AT_ONCE, FakeGateways, TestWorker, UNREACHABLE, within};
use domain::AttemptId;
use domain::worker::Receipt;
use domain::workload::{Limits, Network};
use rpc::pb::artifacts as pb;
use runtime::Holdings;
use runtime::{ContainerSpec, Ended, Root};
use testing::fake::FakeWorker;

#[test]
fn reports_are_spread_by_a_fifth() {
    let drawn: Vec<_> = (0..10_000).map(|_| jittered(Duration::from_secs(10))).collect();
    assert!(drawn.iter().all(|drawn| (Duration::from_secs(8)..Duration::from_secs(12)).contains(drawn)));
    // With 10,000 samples, it is practically impossible that none falls into a given twentieth of
    // the range.
    assert!(drawn.iter().any(|drawn| *drawn < Duration::from_millis(8_200)));
    assert!(drawn.iter().any(|drawn| *drawn > Duration::from_millis(11_800)));
}

/// Creates an empty container.
async fn container(machine: &Arc<FakeWorker>) -> ContainerHandle {
    let handle = ContainerHandle::new();
    let spec = ContainerSpec {
        environment: Vec::new(),
        team: "main".to_owned(),
        root: Root::Host,
        mounts: Vec::new(),
        directory: b"/workspace".to_vec(),
        user: None,
        limits: Limits::default(),
        privileged: false,
        network_of: None,
        network: Network::Private,
        local_names: Vec::new(),
        stop_signal: None,
        note: String::new(),
    };
    machine.runtime().create_container(handle, spec).await.expect("made");
    handle
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the test waits for it")]
async fn destruction_respects_concurrency_of_containers_and_volumes() {
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    let (mut containers, mut volumes) = (Vec::new(), Vec::new());
    for _ in 0..4 * DESTROYED_AT_ONCE {
        containers.push(container(&machine).await);
        volumes.push(machine.volume("marked").await);
    }
    let mut destroys = machine.faults.destroys();
    let held = machine.faults.hold_destroys();
    let destroying = {
        let (worker, containers) = (worker.clone(), containers.clone());
        tokio::spawn(async move { destroy(&worker.transfers, containers, Vec::new()).await })
    };
    let full = destroys.wait_for(|destroys| destroys.under_way >= DESTROYED_AT_ONCE);
    within("the most concurrent destructions", full).await.expect("it is there");
    drop(held);
    assert!(within("the end", destroying).await.expect("no panic"));
    assert_eq!(destroys.borrow().most, DESTROYED_AT_ONCE);
    assert_eq!(machine.runtime().list().await.expect("listed").containers, []);

    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    let (parent, child) = (volumes[0], volumes[1]);
    for volume in [parent, child] {
        machine.runtime().create_volume(volume, runtime::VolumeSource::Empty).await.expect("made");
    }
    assert!(destroy(&worker.transfers, Vec::new(), vec![child, parent]).await);
    assert_eq!(machine.faults.destroys().borrow().most, 1, "children are destroyed before their parents");
}

/// Answers the next report, which must contain all volumes.
async fn answer_report(
    store: &mut Store,
    machine: &Arc<FakeWorker>,
    response: pb::ReportResponse,
) -> pb::ReportOpen {
    let StoreCall::Report(_, volumes, answer) = store.next_call().await else { panic!("no report") };
    assert_eq!(volumes, machine.runtime().list().await.expect("listed").volumes);
    answer.send(Ok(response)).expect("the gateway waits");
    store.opened().expect("it was opened")
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_store_does_not_destroy_unknown_volumes() {
    const OTHER: &str = "0197c1a2-0000-7000-8000-000000000002";
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, &store.endpoint);
    let volume = machine.volume("made before the backup was restored").await;
    let container = container(&machine).await;
    let unknown = pb::ReportResponse {
        unknown_volume_handles: vec![volume.to_string()],
        unknown_container_handles: vec![container.to_string()],
        ..pb::ReportResponse::default()
    };
    let receipt = Receipt([9; 32]);
    let aside = pb::ReportResponse {
        orphans: 2,
        receipt: receipt.0.to_vec().into(),
        ..pb::ReportResponse::default()
    };
    // First the store of the worker. Then a restored store, which first reports unknown handles
    // although a store must not do that. Then the restored store as it should answer, twice.
    for (life, response, before, after, kept) in [
        (LIFE, pb::ReportResponse::default(), "", LIFE, None),
        (OTHER, unknown.clone(), LIFE, LIFE, None),
        (OTHER, aside.clone(), LIFE, OTHER, Some(receipt)),
        (OTHER, aside, OTHER, OTHER, Some(receipt)),
    ] {
        let had = machine.runtime().store_mark().await.expect("looked for").and_then(|mark| mark.receipt);
        store.begin_life(life);
        let session = session("credential");
        let (reported, opened) =
            tokio::join!(report(&worker.transfers, &session), answer_report(&mut store, &machine, response));
        reported.expect("reported");
        assert_eq!(opened.worker_life, before, "{life}");
        let begun = store.begun().expect("it was begun");
        assert_eq!(begun.receipt, had.map(|receipt| receipt.0.to_vec()).unwrap_or_default());
        assert_eq!(
            begun.last.map(|last| last.store_life).unwrap_or_default(),
            before,
            "the last token is sent"
        );
        let mark = machine.runtime().store_mark().await.expect("a mark").expect("kept");
        assert_eq!((mark.life.to_string(), mark.receipt), (after.to_owned(), kept), "{life}");
        let left = machine.runtime().list().await.expect("listed");
        assert_eq!((&left.volumes[..], &left.containers[..]), (&[volume][..], &[container][..]));
    }
    // From now on, unknown handles are garbage again.
    let session = session("credential");
    let (reported, _) =
        tokio::join!(report(&worker.transfers, &session), answer_report(&mut store, &machine, unknown));
    reported.expect("reported");
    assert_eq!(machine.runtime().list().await.expect("listed"), Holdings::default());
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_described_by_their_notes_and_manifests() {
    for machine in [FakeWorker::near(), FakeWorker::far()] {
        let mut store = Store::start().await;
        let worker = machine.gateway(UNREACHABLE, &store.endpoint);
        let (complete, artifact) = (machine.volume("complete").await, domain::ArtifactId::new());
        let runtime = machine.runtime();
        let manifest = worker.transfers.manifests.scan(&*runtime, complete, "main").await.expect("scanned");
        runtime.note_artifact(complete, artifact).await.expect("noted");
        let child = VolumeHandle::new();
        let source = runtime::VolumeSource::CopyOnWrite { parent: complete };
        runtime.create_volume(child, source).await.expect("made");
        let (gone, illegible) = (VolumeHandle::new(), machine.volume("illegible").await);
        machine.faults.set_notes_unreadable(illegible);
        let undescribed = [complete, gone, illegible, child];
        let response = pb::ReportResponse {
            orphans: 3,
            undescribed_volume_handles: undescribed.map(|volume| volume.to_string()).to_vec(),
            ..pb::ReportResponse::default()
        };
        let session = session("credential");
        let (reported, described) = tokio::join!(report(&worker.transfers, &session), async {
            answer_report(&mut store, &machine, response).await;
            let StoreCall::DescribeOrphans(described, answer) = store.next_call().await else {
                panic!("nothing said")
            };
            answer.send(Ok(pb::DescribeOrphansResponse {})).expect("the gateway waits");
            described
        });
        reported.expect("reported");
        let complete = pb::VolumeDescription {
            volume_handle: complete.to_string(),
            parent_handle: String::new(),
            team: "main".to_owned(),
            artifact_id: artifact.to_string(),
            digest: manifest.tree_digest().as_bytes().to_vec().into(),
            size_bytes: manifest.size_bytes(),
        };
        let child = pb::VolumeDescription {
            volume_handle: child.to_string(),
            parent_handle: complete.volume_handle.clone(),
            ..pb::VolumeDescription::default()
        };
        assert_eq!(described.session_credential, "credential");
        let illegible = pb::VolumeDescription {
            volume_handle: illegible.to_string(),
            ..pb::VolumeDescription::default()
        };
        assert_eq!(
            described.volumes,
            [complete, illegible, child],
            "an unreadable volume has an empty description"
        );
        store.end().await;
    }
}

/// Gives the worker the first store life.
async fn belongs_to_the_store(machine: &Arc<FakeWorker>) {
    let mark = StoreMark { life: LIFE.parse().expect("a life"), sequence: 1, receipt: None };
    machine.runtime().set_store_mark(mark).await.expect("kept");
}

/// Creates a worker with a damaged volume.
async fn with_a_damaged_volume(store: &Store) -> (Arc<FakeWorker>, TestWorker, VolumeHandle) {
    let machine = FakeWorker::near();
    belongs_to_the_store(&machine).await;
    let worker = machine.gateway(UNREACHABLE, &store.endpoint);
    let damaged = machine.volume("not what it should be").await;
    worker
        .transfers
        .manifests
        .verify(&*machine.runtime(), damaged, "main", domain::Digest([7; 32]))
        .await
        .expect_err("the digest differs");
    (machine, worker, damaged)
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_volume_is_omitted_and_then_destroyed() {
    let mut store = Store::start().await;
    let (machine, worker, damaged) = with_a_damaged_volume(&store).await;
    let whole = machine.volume("as it should be").await;
    let session = session("credential");

    for known in [true, false] {
        let (reported, ()) = tokio::join!(report(&worker.transfers, &session), async {
            let StoreCall::ListVolumes(asked, answer) = store.next_call().await else { panic!("no list") };
            assert_eq!(asked.volume_handles, [damaged.to_string()], "only damaged volumes are queried");
            let volume = pb::Volume { volume_handle: damaged.to_string(), ..pb::Volume::default() };
            let volumes = known.then_some(volume).into_iter().collect();
            let page = pb::ListVolumesResponse { volumes, ..pb::ListVolumesResponse::default() };
            answer.send(Ok(page)).expect("the gateway waits");
            let StoreCall::Report(_, volumes, answer) = store.next_call().await else { panic!("no report") };
            let mut reported = pb::ReportResponse::default();
            if known {
                assert_eq!(volumes, [whole], "the damaged volume is omitted");
            } else {
                assert!(volumes.contains(&damaged), "a volume without a row is reported");
                reported.unknown_volume_handles = vec![damaged.to_string()];
            }
            answer.send(Ok(reported)).expect("the gateway waits");
        });
        reported.expect("reported");
        assert_eq!(machine.has(damaged), known);
        assert_eq!(worker.transfers.manifests.damaged().contains(&damaged), known);
    }
    assert!(machine.has(whole));
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_volume_stays_while_destruction_is_held() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    belongs_to_the_store(&machine).await;
    let (held, free) = (
        machine.gateway_holding_destruction(UNREACHABLE, &store.endpoint),
        machine.gateway(UNREACHABLE, &store.endpoint),
    );
    let unknown = machine.volume("unknown").await;
    for (worker, stays) in [(held, true), (free, false)] {
        let session = session("credential");
        let (reported, ()) = tokio::join!(report(&worker.transfers, &session), async {
            let StoreCall::Report(_, volumes, answer) = store.next_call().await else { panic!("no report") };
            assert_eq!(volumes, [unknown], "the volume is reported");
            let unknown_volume_handles = vec![unknown.to_string()];
            let response = pb::ReportResponse { unknown_volume_handles, ..pb::ReportResponse::default() };
            answer.send(Ok(response)).expect("the gateway waits");
        });
        reported.expect("reported");
        assert_eq!(machine.has(unknown), stays);
    }
    store.end().await;
}

#[tokio::test]
async fn nothing_is_destroyed_without_an_exclusive_session() {
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    let (first, second) = (machine.volume("marked").await, machine.volume("marked").await);
    // The state after a process was frozen.
    worker.session.extend_exclusive(crate::util::clock::since_boot());
    assert!(!destroy(&worker.transfers, Vec::new(), vec![first, second]).await, "the order must be repeated");
    assert!(machine.has(first) && machine.has(second));
    worker.session.extend_exclusive(crate::util::clock::since_boot() + Duration::from_secs(60));
    assert!(destroy(&worker.transfers, Vec::new(), vec![first]).await);
    assert!(!machine.has(first) && machine.has(second));
    worker.session.set(None);
    assert!(!destroy(&worker.transfers, Vec::new(), vec![second]).await, "the session has ended");
    assert!(machine.has(second));
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the test waits for it")]
async fn report_is_dropped_when_the_session_changes() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, &store.endpoint);
    let volume = machine.volume("contents").await;
    worker.session.set(Some(session("first")));
    let reporting = tokio::spawn(report_forever(worker.transfers.clone()));

    let StoreCall::Report(credential, _, mut first) = store.next_call().await else { panic!("no report") };
    assert_eq!(credential, "first");
    worker.session.set(Some(session("second")));
    // The second report starts before the first is answered.
    let StoreCall::Report(credential, volumes, second) = store.next_call().await else { panic!("no report") };
    assert_eq!((credential.as_str(), &volumes[..]), ("second", &[volume][..]));
    within("the end of the first call", first.closed()).await;
    let unknown_volume_handles = vec![volume.to_string()];
    let response = pb::ReportResponse { unknown_volume_handles, ..pb::ReportResponse::default() };
    assert!(first.send(Ok(response)).is_err(), "the call was dropped");
    second.send(Ok(pb::ReportResponse::default())).expect("the gateway waits");

    worker.report_due.notify_one();
    let StoreCall::Report(_, volumes, third) = store.next_call().await else { panic!("no report") };
    assert_eq!(volumes, [volume], "an answer in an old session destroys nothing");
    third.send(Ok(pb::ReportResponse::default())).expect("the gateway waits");
    worker.stopping.cancel();
    reporting.await.expect("no panic");
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn destroyed_process_differs_from_stopped_process() {
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    for destroyed in [true, false] {
        let (handle, attempt) = (container(&machine).await, AttemptId::new());
        let sleeping = testing::conformance::process(&["sleep", "3600"].map(str::to_owned));
        machine.runtime().start(handle, attempt.into(), sleeping).await.expect("started");
        let ended = async {
            let ended = worker.runtime.wait(attempt.into()).await.expect("it ends");
            (ended, worker.was_destroyed(attempt.into()).await.expect("it is known"))
        };
        let end = async {
            if destroyed {
                assert!(destroy(&worker.transfers, vec![handle], Vec::new()).await);
            } else {
                worker.runtime.stop(attempt.into(), Duration::ZERO).await.expect("it is told");
            }
        };
        let ((ended, known), ()) = within("its end", async { tokio::join!(ended, end) }).await;
        assert!(!matches!(ended, Ended::Exited { stopped: false, .. }), "{ended:?}");
        assert_eq!(known, destroyed);
    }
}
