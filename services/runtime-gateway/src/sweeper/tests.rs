//! Reports to an artifact store whose answers each test gives.

use super::*;
use crate::for_tests::store::{Asked, Store, session};
use crate::for_tests::{Attended, NOBODY, within};
use testing::fake::FakeWorker;

/// A worker with a volume that does not hold what the store says.
async fn with_a_damaged_volume(store: &Store) -> (Arc<FakeWorker>, Arc<Worker>, VolumeHandle) {
    let machine = FakeWorker::near();
    let worker = machine.attended(NOBODY, &store.endpoint);
    let damaged = machine.volume("not what it should be").await;
    worker
        .trees
        .verify(&*machine.runtime(), damaged, "main", domain::Digest([7; 32]))
        .await
        .expect_err("it has another digest");
    (machine, worker, damaged)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_volume_is_reported_as_missing_and_goes_once_the_store_has_forgotten_it() {
    let mut store = Store::start().await;
    let (machine, worker, damaged) = with_a_damaged_volume(&store).await;
    let whole = machine.volume("as it should be").await;
    let session = session("credential");

    for known in [true, false] {
        let (reported, ()) = tokio::join!(report(&worker, &session), async {
            let Asked::Report(_, volumes, answer) = store.asked().await else { panic!("no report") };
            assert_eq!(volumes, [whole], "to the store the damaged one is lost");
            answer.send(Ok(pb::ReportResponse::default())).expect("it waits");
            let Asked::ListVolumes(answer) = store.asked().await else { panic!("no list") };
            let listed = [Some(whole), known.then_some(damaged)].into_iter().flatten();
            let volumes = listed
                .map(|handle| pb::Volume { volume_handle: handle.to_string(), ..pb::Volume::default() })
                .collect();
            let page = pb::ListVolumesResponse { volumes, ..pb::ListVolumesResponse::default() };
            answer.send(Ok(page)).expect("it waits");
        });
        reported.expect("reported");
        assert_eq!(machine.has(damaged), known);
        assert_eq!(worker.trees.damaged().contains(&damaged), known);
    }
    assert!(machine.has(whole));
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_stays_though_the_store_does_not_know_it() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let (held, free) = (machine.holding(NOBODY, &store.endpoint), machine.attended(NOBODY, &store.endpoint));
    let unknown = machine.volume("unknown").await;
    for (worker, stays) in [(held, true), (free, false)] {
        let session = session("credential");
        let (reported, ()) = tokio::join!(report(&worker, &session), async {
            let Asked::Report(_, volumes, answer) = store.asked().await else { panic!("no report") };
            assert_eq!(volumes, [unknown], "what is held is there");
            let unknown_volume_handles = vec![unknown.to_string()];
            let response = pb::ReportResponse { unknown_volume_handles, ..pb::ReportResponse::default() };
            answer.send(Ok(response)).expect("it waits");
        });
        reported.expect("reported");
        assert_eq!(machine.has(unknown), stays);
    }
    store.end().await;
}

#[tokio::test]
async fn nothing_is_destroyed_while_another_gateway_may_have_been_let_in() {
    let machine = FakeWorker::near();
    let worker = machine.attended(NOBODY, NOBODY);
    let (first, second) = (machine.volume("marked").await, machine.volume("marked").await);
    // As a process that was frozen finds it.
    worker.alone_until(crate::clock::since_boot());
    assert!(!destroy(&worker, Vec::new(), vec![first, second]).await, "it is to be told again");
    assert!(machine.has(first) && machine.has(second));
    worker.alone_until(crate::clock::since_boot() + Duration::from_secs(60));
    assert!(destroy(&worker, Vec::new(), vec![first]).await);
    assert!(!machine.has(first) && machine.has(second));
    worker.set_session(None);
    assert!(!destroy(&worker, Vec::new(), vec![second]).await, "another has been");
    assert!(machine.has(second));
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the test waits for it")]
async fn a_report_is_dropped_when_the_session_is_another() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = machine.attended(NOBODY, &store.endpoint);
    let volume = machine.volume("contents").await;
    worker.set_session(Some(session("first")));
    let reporting = tokio::spawn(report_forever(worker.clone()));

    let Asked::Report(credential, _, mut first) = store.asked().await else { panic!("no report") };
    assert_eq!(credential, "first");
    worker.set_session(Some(session("second")));
    // The first is not answered before the second is made.
    let Asked::Report(credential, volumes, second) = store.asked().await else { panic!("no report") };
    assert_eq!((credential.as_str(), &volumes[..]), ("second", &[volume][..]));
    within("the end of the first call", first.closed()).await;
    let unknown_volume_handles = vec![volume.to_string()];
    let response = pb::ReportResponse { unknown_volume_handles, ..pb::ReportResponse::default() };
    assert!(first.send(Ok(response)).is_err(), "nobody waits for it any more");
    second.send(Ok(pb::ReportResponse::default())).expect("it waits");

    worker.report_due.notify_one();
    let Asked::Report(_, volumes, third) = store.asked().await else { panic!("no report") };
    assert_eq!(volumes, [volume], "nothing was destroyed for an answer in an old session");
    third.send(Ok(pb::ReportResponse::default())).expect("it waits");
    worker.stopping.cancel();
    reporting.await.expect("no panic");
    store.end().await;
}
