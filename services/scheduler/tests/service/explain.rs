//! `Placements.Explain`.

use domain::WorkloadId;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use super::support::{Gateway, Running, config, hello, spec};

async fn explain(scheduler: &Running, subject: Subject) -> Result<pb::ExplainResponse, Refusal> {
    let request = pb::ExplainRequest { subject: Some(subject) };
    Ok(scheduler.placements().explain(request).await?.into_inner())
}

async fn explain_spec(scheduler: &Running, spec: pb::WorkloadSpec) -> pb::ExplainResponse {
    explain(scheduler, Subject::Spec(spec)).await.expect("explained")
}

fn waiting(team: &str, id: WorkloadId) -> Subject {
    Subject::Workload(pb::WaitingWorkload { team: team.to_owned(), workload_id: id.to_string() })
}

fn reasons(worker: &pb::WorkerExplanation) -> Vec<(&str, pb::RefusalDuration)> {
    worker.refusals.iter().map(|refusal| (refusal.reason.as_str(), refusal.duration())).collect()
}

pub(crate) async fn a_spec_is_explained_and_nothing_comes_of_it(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let nobody = explain_spec(&scheduler, spec()).await;
    assert_eq!((nobody.verdict(), nobody.queue_position), (pb::Verdict::NotNow, 1));
    assert!(nobody.workers.is_empty());
    assert_eq!(nobody.unblocked_by, ["a worker registers that can do it (platform linux)"]);

    let _gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let mut tagged = hello("other");
    tagged.labels.as_mut().expect("labels").tags = vec!["gpu".to_owned()];
    let _other = Gateway::connect(&scheduler, tagged).await.expect("welcome");

    let placed = explain_spec(&scheduler, spec()).await;
    assert_eq!((placed.verdict(), placed.queue_position), (pb::Verdict::Placed, 0));
    let [one, other] = placed.workers.as_slice() else { panic!("{placed:?}") };
    assert_eq!((one.worker_name.as_str(), one.standing.as_str()), ("one", "0 active tasks"));
    assert_eq!(one.worker_id, scheduler.worker("one").await.worker_id);
    assert_eq!(reasons(one), []);
    assert_eq!(reasons(other), [("ONLY_TAGGED", pb::RefusalDuration::Lasting)]);
    assert_eq!(other.standing, "");
    assert_eq!(placed.unblocked_by, [""; 0]);

    let hopeless = pb::WorkloadSpec {
        tags: vec!["big".to_owned()],
        privilege: pb::Privilege::Privileged.into(),
        ..spec()
    };
    let never = explain_spec(&scheduler, hopeless).await;
    assert_eq!((never.verdict(), never.queue_position), (pb::Verdict::Never, 0));
    for worker in &never.workers {
        let both =
            [("MISSING_TAGS", pb::RefusalDuration::Lasting), ("CAPABILITY", pb::RefusalDuration::Lasting)];
        assert_eq!(reasons(worker), both, "everything at once, so that nobody corrects one after the other");
    }
    assert_eq!(
        never.unblocked_by,
        [
            "one: it has the tags big, and its runtime has privileged",
            "other: it has the tags big, and its runtime has privileged",
            "a worker registers that can do it (platform linux, tags big)",
        ]
    );

    let malformed = pb::WorkloadSpec { team: String::new(), ..spec() };
    let refused = explain(&scheduler, Subject::Spec(malformed)).await.expect_err("no team");
    assert!(refused.is(Reason::InvalidField), "{refused}");
    let listed = scheduler.workloads().list(pb::ListRequest::default()).await.expect("a page").into_inner();
    assert!(listed.workloads.is_empty(), "nothing was submitted");
    assert_eq!(scheduler.worker("one").await.active_tasks, 0, "no slot was taken");
    scheduler.stop().await;
}

pub(crate) async fn a_queued_workload_is_told_its_place_and_what_it_waits_for(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(scheduler.submit(spec()).await.expect("accepted"));
    }
    gateway.run(ids[1]).await;
    for (id, position) in [(ids[2], 1), (ids[3], 2)] {
        let waits = explain(&scheduler, waiting("main", id)).await.expect("explained");
        assert_eq!((waits.verdict(), waits.queue_position), (pb::Verdict::NotNow, position));
        assert_eq!(reasons(&waits.workers[0]), [("FULL", pb::RefusalDuration::Passing)]);
        assert_eq!(waits.unblocked_by, ["one: one of its tasks ends"]);
    }
    let later = explain_spec(&scheduler, spec()).await;
    assert_eq!((later.verdict(), later.queue_position), (pb::Verdict::NotNow, 3));

    let placed = explain(&scheduler, waiting("main", ids[0])).await.expect_err("it does not wait");
    assert!(placed.is(Reason::WorkloadNotQueued), "{placed}");
    assert_eq!(placed.about.get("state").map(String::as_str), Some("WORKLOAD_STATE_ASSIGNED"));
    let foreign = explain(&scheduler, waiting("other", ids[2])).await.expect_err("not theirs");
    assert!(foreign.is(Reason::WorkloadNotFound), "{foreign}");
    scheduler.stop().await;
}
