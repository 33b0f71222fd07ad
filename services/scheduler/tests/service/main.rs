//! The scheduler over real gRPC, on both databases, with gateways that say what each test wants said.

mod support;

use rpc::pb::scheduler as pb;
use support::{Gateway, Running, config, finish, hello, spec, start};
use testing::databases::{self, TestDatabase};

/// Runs a test on both databases.
macro_rules! on_both {
    ($($(#[$doc:meta])* async fn $name:ident($database:ident) $body:block)+) => {$(
        mod $name {
            use super::*;

            async fn test($database: TestDatabase) $body

            #[tokio::test(flavor = "multi_thread")]
            async fn sqlite() {
                test(databases::sqlite()).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn postgres() {
                test(databases::postgres().await).await;
            }
        }
    )+};
}

fn names(events: &[pb::WatchResponse]) -> Vec<&'static str> {
    use pb::watch_response::Event;
    events
        .iter()
        .map(|event| match event.event {
            Some(Event::Queued(_)) => "queued",
            Some(Event::Placed(_)) => "placed",
            Some(Event::Preparing(_)) => "preparing",
            Some(Event::Running(_)) => "running",
            Some(Event::Publishing(_)) => "publishing",
            Some(Event::Finished(_)) => "finished",
            None => "nothing",
        })
        .collect()
}

on_both! {
    async fn a_workload_goes_from_its_submission_to_its_end(database) {
        let scheduler = Running::start(config(&database)).await;
        let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
        assert_eq!(gateway.welcome.protocol_version, 1);

        let id = scheduler.submit(spec()).await.expect("accepted");
        let (lease, run) = gateway.run(id).await;
        assert_eq!(run.spec.as_ref().map(|spec| spec.command.clone()), Some(spec().command));
        gateway.observe(&[(&lease, pb::LeasePhase::Preparing)]).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        start(&scheduler, &run.lease_token).await.expect("a repeat");
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        let running = scheduler.wait_for(id, pb::WorkloadState::Running).await;
        let whereabouts = running.whereabouts.expect("it is somewhere");
        assert_eq!(whereabouts.worker_name, "one");
        assert_eq!(whereabouts.attempt_id, run.attempt_id);
        assert_eq!(scheduler.worker("one").await.active_tasks, 1);

        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        finish(&scheduler, &run.lease_token, 1).await.expect("the first report counts");
        let events = scheduler.watch(id, 0).await;
        assert_eq!(names(&events), ["placed", "preparing", "running", "finished"]);
        let revisions: Vec<_> = events.iter().map(|event| event.revision).collect();
        assert_eq!(revisions, [1, 2, 3, 4]);
        assert_eq!(names(&scheduler.watch(id, 2).await), ["running", "finished"]);
        assert_eq!(names(&scheduler.watch(id, 4).await), [""; 0]);
        let finished = scheduler.finished(id).await;
        assert_eq!(finished.outcome(), pb::Outcome::Succeeded);
        gateway.holds_nothing().await;
        assert_eq!(scheduler.worker("one").await.active_tasks, 0);
        scheduler.stop().await;
    }
}
