//! Sessions of gateways, deletions handed to them, and effects of reports.

use std::time::Duration;

use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{ArtifactId, AttemptId, GatewayInstance, StoreLife, TransferId, WorkerId, WorkloadId};
use rpc::pb::artifacts::{DryRun, InventoryState};
use rpc::token::TokenSigner;
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use crate::{PATIENCE, Suite, assert_refused, digest, input, on_both_databases, output};

on_both_databases! {
    only_signed_credentials_are_accepted,
    lower_session_or_incarnation_changes_nothing,
    new_session_gets_new_handles_for_creating_items,
    new_incarnation_ends_containers_and_unconfirms_volumes,
    report_ignores_items_newer_than_its_token,
    uncommitted_report_changes_nothing,
    handed_out_item_is_resent_until_gone,
    mark_is_streamed_at_once,
    reported_item_is_streamed_again_after_hand_out,
    restarted_store_keeps_its_state,
}

async fn only_signed_credentials_are_accepted(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let claims = SessionClaims {
        worker: WorkerId::new(),
        incarnation: Incarnation(1),
        session: Session(1),
        instance: GatewayInstance::new(),
    };
    let mut gateway = suite.silent_gateway(claims.worker, 1, 1);
    gateway.credential = TokenSigner::from_seed(&[8; 32]).sign(&claims);
    assert_refused(gateway.begin_report().await, Reason::InvalidToken);
    gateway.credential = "nonsense".to_owned();
    assert_refused(gateway.watch().await, Reason::InvalidToken);
    let refused = suite.plan(ArtifactId::new(), claims.worker, TransferId::new()).await;
    assert_refused(refused, Reason::NotAttended);
    suite.stop().await;
}

async fn lower_session_or_incarnation_changes_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    let [old, new, newest] = [(1, 1), (1, 2), (2, 1)]
        .map(|(incarnation, session)| suite.silent_gateway(worker, incarnation, session));
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let token = old.begin_report().await.expect("begun");
    let mut stream = old.watch().await.expect("a stream");

    new.begin_report().await.expect("it may speak");
    assert_refused(old.prepare(workload, attempt, &[]).await, Reason::StaleSession);
    assert_refused(old.prepared(attempt).await, Reason::StaleSession);
    assert_refused(old.report_with(token, &[], &[]).await, Reason::StaleSession);
    assert_refused(old.watch().await, Reason::StaleSession);
    let ended = tokio::time::timeout(PATIENCE, stream.message()).await.expect("the stream ends");
    assert_refused(ended.map_err(Refusal::from), Reason::StaleSession);

    newest.prepare(workload, attempt, &[]).await.expect("prepared");
    assert_refused(new.prepared(attempt).await, Reason::StaleIncarnation);
    assert_refused(old.begin_report().await, Reason::StaleIncarnation);
    newest.prepared(attempt).await.expect("recorded");
    suite.stop().await;
}

async fn new_session_gets_new_handles_for_creating_items(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    let (old, new) = (suite.silent_gateway(worker, 1, 1), suite.silent_gateway(worker, 1, 2));
    let (workload, making, made) = (WorkloadId::new(), AttemptId::new(), AttemptId::new());
    let needs = [output("out", workload.output_artifact("out"))];
    let of_making = old.prepare(workload, making, &needs).await.expect("prepared");
    let of_made = old.prepare(workload, made, &needs).await.expect("prepared");
    old.prepared(made).await.expect("recorded");
    let (artifact, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(artifact, None).await.expect("created");
    let planned = suite.plan(artifact, worker, transfer).await.expect("planned");

    new.begin_report().await.expect("it may speak");
    assert_refused(new.prepared(making).await, Reason::AttemptEnded);
    let again = new.prepare(workload, making, &needs).await.expect("prepared");
    assert_ne!(again.container_handle, of_making.container_handle);
    assert_ne!(again.volumes[0].volume_handle, of_making.volumes[0].volume_handle);
    assert_eq!(new.prepare(workload, made, &needs).await.expect("prepared"), of_made);
    new.swept(&[&of_making.container_handle], &[&of_making.volumes[0].volume_handle]).await;

    // A transfer is kept until its claim expires.
    new.complete(&planned, digest(1)).await.expect("complete");
    suite.seal(artifact, digest(1)).await.expect("sealed");
    suite.stop().await;
}

async fn new_incarnation_ends_containers_and_unconfirms_volumes(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    let old = suite.silent_gateway(worker, 1, 1);
    old.begin_report().await.expect("it may speak");
    let (kept, kept_volume) = suite.upload(&old, None, 1).await.expect("uploaded");
    let (gone, gone_volume) = suite.upload(&old, None, 2).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let planned = old.prepare(workload, attempt, &[input("in", kept)]).await.expect("prepared");
    old.prepared(attempt).await.expect("recorded");
    let in_flight = ArtifactId::new();
    suite.create(in_flight, None).await.expect("created");
    let in_flight = suite.plan(in_flight, worker, TransferId::new()).await.expect("planned");
    let old_token = old.begin_report().await.expect("begun");

    let new = suite.silent_gateway(worker, 2, 1);
    new.begin_report().await.expect("it may speak");
    for handle in [&kept_volume, &gone_volume, &planned.volumes[0].volume_handle] {
        assert_eq!(suite.volume_state(handle).await, Some(InventoryState::Unconfirmed));
    }
    assert_refused(new.complete(&in_flight, digest(3)).await, Reason::ClaimLost);
    new.swept(&[&planned.container_handle], &[&in_flight]).await;
    assert_eq!(suite.adopt(digest(1), None).await.expect("asked"), None, "the replica is unconfirmed");
    assert_eq!(suite.get(kept).await.expect("it is there").replicas.len(), 1, "but it may be");

    // A token of the old incarnation judges nothing of the new one.
    let reported = new.report_with(old_token, &[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (0, 0));
    let holds = [kept_volume.clone(), planned.volumes[0].volume_handle.clone()];
    let reported = new.report(&holds, &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (2, 1));
    assert_eq!(suite.volume_state(&kept_volume).await, Some(InventoryState::Created));
    assert_eq!(suite.volume_state(&gone_volume).await, Some(InventoryState::Lost));
    assert_eq!(suite.get(gone).await.expect("its name is there").replicas, []);
    assert!(suite.adopt(digest(1), None).await.expect("asked").is_some());
    suite.stop().await;
}

async fn report_ignores_items_newer_than_its_token(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [output("out", workload.output_artifact("out"))];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    let [volume, container] = [&planned.volumes[0].volume_handle, &planned.container_handle];

    // A report does not miss items that are being created, or were created after its token.
    let early = gateway.begin_report().await.expect("begun");
    let reported = gateway.report(&[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (0, 0));
    let early_and_late = gateway.begin_report().await.expect("begun");
    gateway.prepared(attempt).await.expect("recorded");
    let reported = gateway.report_with(early_and_late.clone(), &[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (0, 0));
    assert_refused(gateway.report_with(early, &[], &[]).await, Reason::StaleReport);
    gateway.report_with(early_and_late, &[], &[]).await.expect("a repeat is no harm");

    // An item that was marked after the token is not forgotten, although it is missing.
    let before_mark = gateway.begin_report().await.expect("begun");
    suite.settle(workload, None, &[], None).await.expect("settled");
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    let reported = gateway.report_with(before_mark, &[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (0, 0));
    // A named item is not forgotten, however old its mark is.
    let reported = gateway.report(std::slice::from_ref(volume), std::slice::from_ref(container)).await;
    assert_eq!(reported.expect("reported").forgotten, 0);
    let reported = gateway.report(std::slice::from_ref(volume), &[]).await.expect("reported");
    assert_eq!((reported.forgotten, suite.containers().await.len()), (1, 0));
    let reported = gateway.report(&[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, suite.volumes().await.len()), (1, 0));

    // A forgotten item that still exists is garbage.
    let reported = gateway.report(std::slice::from_ref(volume), std::slice::from_ref(container)).await;
    let reported = reported.expect("reported");
    assert_eq!(reported.unknown_volume_handles, std::slice::from_ref(volume));
    assert_eq!(reported.unknown_container_handles, std::slice::from_ref(container));
    suite.stop().await;
}

async fn uncommitted_report_changes_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (_, volume) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let token = gateway.begin_report().await.expect("begun");
    let stranger = WorkerId::new().to_string();
    for count in [None, Some(0), Some(2)] {
        let holdings = std::slice::from_ref(&stranger);
        let refused = gateway.report_counted(token.clone(), holdings, &[], count).await;
        assert_refused(refused, Reason::ReportTruncated);
    }
    let mut other_life = token.clone();
    other_life.store_life = StoreLife::new().to_string();
    assert_refused(gateway.report_with(other_life, &[], &[]).await, Reason::StaleReport);
    let mut from_the_future = token.clone();
    from_the_future.sequence += 1;
    assert_refused(gateway.report_with(from_the_future, &[], &[]).await, Reason::StaleReport);
    assert_eq!(suite.volume_state(&volume).await, Some(InventoryState::Created));

    let reported = gateway.report_with(token, std::slice::from_ref(&stranger), &[]).await.expect("reported");
    assert_eq!(reported.unknown_volume_handles, [stranger]);
    assert_eq!(suite.volume_state(&volume).await, Some(InventoryState::Lost));
    suite.stop().await;
}

async fn handed_out_item_is_resent_until_gone(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let planned = gateway.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    suite.clock.advance(Duration::from_secs(13 * 3600));
    assert_eq!(suite.collect(DryRun::Off).await, [], "a volume is made from it");

    suite.settle(workload, None, &[], None).await.expect("settled");
    suite.collect(DryRun::Off).await;
    let child = planned.volumes[0].volume_handle.as_str();
    for _ in 0..2 {
        let order = gateway.swept(&[&planned.container_handle], &[child, &replica]).await;
        assert_eq!(order, [child, replica.as_str()]);
    }
    assert_eq!(suite.volume_state(child).await, Some(InventoryState::Sweeping));
    gateway.report(std::slice::from_ref(&replica), &[]).await.expect("reported");
    let order = gateway.swept(&[], &[&replica]).await;
    assert_eq!(order, [replica]);
    suite.stop().await;
}

async fn mark_is_streamed_at_once(database: TestDatabase) {
    let adjust = |config: &mut artifact_store::Config| config.sweep_interval = Duration::from_secs(24 * 3600);
    let suite = Suite::start_with(database, adjust).await;
    let gateway = suite.gateway().await;
    let mut stream = gateway.watch().await.expect("a stream");
    for _ in 0..3 {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let planned = gateway.prepare(workload, attempt, &[]).await.expect("prepared");
        suite.settle(workload, None, &[], None).await.expect("settled");
        suite.collect(DryRun::Off).await;
        let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("in time");
        let sweep = message.expect("no error").expect("the stream is open");
        assert_eq!(sweep.container_handles, [planned.container_handle]);
    }
    suite.stop().await;
    assert_eq!(stream.message().await.expect("no error"), None, "the stream ends with the store");
}

async fn reported_item_is_streamed_again_after_hand_out(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let mut stream = gateway.watch().await.expect("a stream");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let planned = gateway.prepare(workload, attempt, &[]).await.expect("prepared");
    suite.settle(workload, None, &[], None).await.expect("settled");
    suite.collect(DryRun::Off).await;
    for _ in 0..3 {
        let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("in time");
        let sweep = message.expect("no error").expect("the stream is open");
        assert_eq!(sweep.container_handles, std::slice::from_ref(&planned.container_handle));
        // The container was created late: a gateway may be told to delete an item that it is about
        // to create.
        let reported = gateway.report(&[], std::slice::from_ref(&planned.container_handle)).await;
        assert_eq!(reported.expect("reported").forgotten, 0);
    }
    assert_eq!(gateway.report(&[], &[]).await.expect("reported").forgotten, 1);
    suite.stop().await;
}

async fn restarted_store_keeps_its_state(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let transfer = TransferId::new();
    suite.create(ArtifactId::new(), None).await.expect("created");
    let abandoned = ArtifactId::new();
    suite.create(abandoned, None).await.expect("created");
    let abandoned = suite.plan(abandoned, gateway.worker, transfer).await.expect("planned");
    suite.abandon(transfer).await.expect("abandoned");
    gateway.swept(&[], &[&abandoned]).await;
    let token = gateway.begin_report().await.expect("begun");

    let suite = Suite::start(suite.stop().await).await;
    let again = suite.silent_gateway(gateway.worker, 1, 1);
    again.swept(&[], &[&abandoned]).await;
    let reported =
        again.report_with(token, std::slice::from_ref(&replica), &[]).await.expect("the same life");
    assert_eq!((reported.forgotten, reported.lost), (1, 0));
    assert_eq!(suite.get(artifact).await.expect("it is there").replicas.len(), 1);
    suite.stop().await;
}
