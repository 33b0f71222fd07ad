//! Tests of `Placements.Explain`.

use std::collections::BTreeMap;
use std::time::Duration;

use domain::WorkloadId;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use super::support::{Gateway, Running, config, finish, registration, spec, start};

pub(crate) async fn explain(scheduler: &Running, subject: Subject) -> Result<pb::ExplainResponse, Refusal> {
    let request = pb::ExplainRequest { subject: Some(subject), ..Default::default() };
    Ok(scheduler.placements().explain(request).await?.into_inner())
}

pub(crate) async fn explain_spec(scheduler: &Running, spec: pb::WorkloadSpec) -> pb::ExplainResponse {
    explain(scheduler, Subject::Spec(spec)).await.expect("explained")
}

pub(crate) fn waiting(team: &str, id: WorkloadId) -> Subject {
    Subject::Workload(pb::WaitingWorkload { team: team.to_owned(), workload_id: id.to_string() })
}

fn reasons(worker: &pb::WorkerExplanation) -> Vec<(&str, pb::RefusalDuration)> {
    worker.refusals.iter().map(|refusal| (refusal.reason.as_str(), refusal.duration())).collect()
}

fn score(strategy: &str, value: u64) -> pb::StrategyScore {
    pb::StrategyScore { strategy: strategy.to_owned(), value }
}

pub(crate) async fn spec_is_explained_without_side_effects(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let no_worker = explain_spec(&scheduler, spec()).await;
    assert_eq!((no_worker.verdict(), no_worker.queue_position), (pb::Verdict::NotNow, 1));
    assert!(no_worker.workers.is_empty());
    assert_eq!(
        no_worker.unblocked_by,
        ["a worker registers that can do it (platform linux, capabilities network-private)"]
    );

    let _gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let mut tagged = registration("other");
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
    assert_eq!(one.scores, [score("limit-active-tasks", 0)]);
    assert_eq!(other.refusals[0].labels, ["gpu"]);
    assert_eq!(placed.unblocked_by, [""; 0]);
    assert_eq!((placed.workers_known, placed.workers_eligible), (2, 1));
    assert_eq!(placed.summary, "1 of 2 workers would take it now");
    assert_eq!((placed.expected_wait, placed.expected_wait_basis.as_str()), (None, ""));

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
        assert_eq!(reasons(worker), both, "all reasons are reported together");
    }
    assert_eq!(
        never.unblocked_by,
        [
            "one: it has the tag big, and its runtime has privileged",
            "other: it has the tag big, and its runtime has privileged",
            "a worker registers that can do it (platform linux, tags big, capabilities privileged, network-private)",
        ]
    );

    let [group] = never.groups.as_slice() else { panic!("{never:?}") };
    assert_eq!((group.count, group.names.as_slice()), (2, ["one".to_owned(), "other".to_owned()].as_slice()));
    assert_eq!(group.refusals[0].message, "lack the tag big");

    let malformed = pb::WorkloadSpec { team: String::new(), ..spec() };
    let refused = explain(&scheduler, Subject::Spec(malformed)).await.expect_err("no team");
    assert!(refused.is(Reason::InvalidField), "{refused}");
    let listed = scheduler.workloads().list(pb::ListRequest::default()).await.expect("a page").into_inner();
    assert!(listed.workloads.is_empty(), "no workload was submitted");
    assert_eq!(scheduler.worker("one").await.active_tasks, 0, "no slot is used");
    scheduler.stop().await;
}

pub(crate) async fn explanation_shows_queue_position_and_reasons(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
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
    let waits = explain(&scheduler, waiting("main", ids[2])).await.expect("explained");
    assert_eq!(waits.summary, "the only worker that could take it, one, is full (2 of 2 tasks)");
    let limit = waits.workers[0].refusals[0].limit.clone().expect("a limit");
    assert_eq!((limit.resource.as_str(), limit.limit, limit.amount), ("tasks", 2, 2));
    let later = explain_spec(&scheduler, spec()).await;
    assert_eq!((later.verdict(), later.queue_position), (pb::Verdict::NotNow, 3));

    let placed = explain(&scheduler, waiting("main", ids[0])).await.expect_err("the workload is placed");
    assert!(placed.is(Reason::WorkloadNotQueued), "{placed}");
    assert_eq!(placed.about.get("state").map(String::as_str), Some("WORKLOAD_STATE_ASSIGNED"));
    let foreign =
        explain(&scheduler, waiting("other", ids[2])).await.expect_err("a workload of another team");
    assert!(foreign.is(Reason::WorkloadNotFound), "{foreign}");
    scheduler.stop().await;
}

pub(crate) async fn explanation_groups_workers_and_limits_details(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateways = Vec::new();
    for n in 0..15 {
        let mut one = registration(&format!("full-{n:02}"));
        one.capacity = one.capacity.map(|capacity| pb::Capacity { max_tasks: 1, ..capacity });
        gateways.push(Gateway::connect(&scheduler, one).await.expect("welcome"));
        let mut other = registration(&format!("other-{n:02}"));
        other.labels.as_mut().expect("labels").platform = "darwin".to_owned();
        gateways.push(Gateway::connect(&scheduler, other).await.expect("welcome"));
    }
    for _ in 0..15 {
        scheduler.submit(spec()).await.expect("placed");
    }
    let queued = scheduler.submit(spec()).await.expect("accepted");
    let explain_queued = async |max_workers: u32, workers: &[&str]| {
        let request = pb::ExplainRequest {
            subject: Some(waiting("main", queued)),
            max_workers,
            workers: workers.iter().map(|&worker| worker.to_owned()).collect(),
        };
        Ok::<_, Refusal>(scheduler.placements().explain(request).await?.into_inner())
    };
    let explained = explain_queued(0, &[]).await.expect("explained");
    assert_eq!((explained.workers_known, explained.workers_eligible, explained.queue_position), (30, 0, 1));
    assert_eq!(explained.workers.len(), 20);
    assert_eq!(reasons(&explained.workers[14]), [("FULL", pb::RefusalDuration::Passing)]);
    assert_eq!(reasons(&explained.workers[15]), [("PLATFORM", pb::RefusalDuration::Lasting)]);
    assert_eq!(explained.summary, "all 15 workers that could take it are full");
    assert_eq!(explained.unblocked_by, ["one of 15 workers (full-00, full-01, full-02, …): a task ends"]);
    let groups: Vec<_> =
        explained.groups.iter().map(|group| (group.refusals[0].message.as_str(), group.count)).collect();
    assert_eq!(groups, [("are full", 15), ("are of platform darwin", 15)]);
    assert_eq!(explained.groups[0].names, ["full-00", "full-01", "full-02", "full-03", "full-04"]);
    assert!(
        explained.expected_wait.is_none() && explained.expected_wait_basis.starts_with("unknown: "),
        "{explained:?}"
    );

    let one = explain_queued(1, &[]).await.expect("explained");
    assert_eq!(one.workers, explained.workers[..1]);
    assert_eq!(one.groups, explained.groups);
    assert_eq!(explain_queued(30, &[]).await.expect("explained").workers.len(), 30);
    let id = scheduler.worker("other-07").await.worker_id;
    let named = explain_queued(0, &["full-03", &id, "unknown"]).await.expect("explained");
    let names: Vec<_> = named.workers.iter().map(|worker| worker.worker_name.as_str()).collect();
    assert_eq!(names, ["full-03", "other-07"]);
    for (max_workers, workers) in [(10_001, vec![]), (0, vec!["w"; 1001])] {
        let refused = explain_queued(max_workers, &workers).await.expect_err("too many");
        assert!(refused.is(Reason::InvalidField), "{refused}");
    }
    scheduler.stop().await;
}

pub(crate) async fn expected_wait_follows_released_slots(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    for _ in 0..3 {
        let id = scheduler.submit(spec()).await.expect("accepted");
        let (_, run) = gateway.run(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        scheduler.wait_for(id, pb::WorkloadState::Finished).await;
    }
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(scheduler.submit(spec()).await.expect("accepted"));
    }
    let mut expected = Vec::new();
    for id in ids.split_off(2) {
        let waits = explain(&scheduler, waiting("main", id)).await.expect("explained");
        assert!(waits.expected_wait_basis.contains("the worker that could take it"), "{waits:?}");
        let wait = waits.expected_wait.expect("known");
        expected.push(Duration::try_from(wait).expect("positive"));
    }
    assert!(expected[0] < expected[1], "later workloads wait longer: {expected:?}");
    scheduler.stop().await;
}

pub(crate) async fn only_stated_limits_require_capabilities(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateways = Vec::new();
    for (name, can) in [
        ("all", &["limits-memory", "limits-cpu", "limits-pids", "limits-disk"][..]),
        ("garden", &["limits-memory", "limits-pids"]),
        ("none", &[]),
    ] {
        let mut registration = registration(name);
        let labels = registration.labels.as_mut().expect("labels");
        labels.capabilities = can.iter().chain(&["network-private"]).map(ToString::to_string).collect();
        gateways.push(Gateway::connect(&scheduler, registration).await.expect("welcome"));
    }
    // Missing capabilities of each worker.
    let lacks_for = async |spec: pb::WorkloadSpec| {
        let explained = explain_spec(&scheduler, spec).await;
        let lacking = |worker: &pb::WorkerExplanation| {
            let named = worker.refusals.iter().filter(|refusal| refusal.reason == "CAPABILITY");
            named.flat_map(|refusal| refusal.labels.clone()).collect::<Vec<_>>().join(" ")
        };
        explained
            .workers
            .iter()
            .map(|worker| (worker.worker_name.clone(), lacking(worker)))
            .collect::<BTreeMap<_, _>>()
    };
    let lacks = async |limits| lacks_for(pb::WorkloadSpec { limits: Some(limits), ..spec() }).await;
    let expected = |garden: &str, none: &str| {
        let all = [("all", ""), ("garden", garden), ("none", none)];
        BTreeMap::from(all.map(|(name, lacks)| (name.to_owned(), lacks.to_owned())))
    };
    let (memory_bytes, cpu_millis, pids, disk_bytes) = (1 << 30, 500, 10, 1 << 30);
    let none = pb::Limits::default();
    assert_eq!(lacks(none).await, expected("", ""));
    assert_eq!(lacks(pb::Limits { memory_bytes, ..none }).await, expected("", "limits-memory"));
    assert_eq!(lacks(pb::Limits { pids, ..none }).await, expected("", "limits-pids"));
    assert_eq!(lacks(pb::Limits { cpu_millis, ..none }).await, expected("limits-cpu", "limits-cpu"));
    let every = lacks(pb::Limits { memory_bytes, cpu_millis, pids, disk_bytes }).await;
    assert_eq!(every, expected("limits-cpu limits-disk", "limits-memory limits-cpu limits-pids limits-disk"));

    // A capability that the spec names is treated the same, and each missing capability is listed
    // once.
    let named = |names: &[&str], limits| pb::WorkloadSpec {
        capabilities: names.iter().map(ToString::to_string).collect(),
        limits: Some(limits),
        ..spec()
    };
    assert_eq!(lacks_for(named(&["limits-pids"], none)).await, expected("", "limits-pids"));
    let both = named(&["limits-memory", "limits-cpu", "limits-cpu"], pb::Limits { memory_bytes, ..none });
    assert_eq!(lacks_for(both).await, expected("limits-cpu", "limits-memory limits-cpu"));
    let terminal = pb::WorkloadSpec { terminal: Some(pb::Terminal { rows: 24, columns: 80 }), ..spec() };
    let lacks_terminal =
        BTreeMap::from(["all", "garden", "none"].map(|name| (name.to_owned(), "terminal".to_owned())));
    assert_eq!(lacks_for(terminal).await, lacks_terminal);
    // A service needs what its limits and its network imply.
    let service = pb::Service {
        name: "db".to_owned(),
        image: spec().image,
        command: spec().command,
        limits: Some(pb::Limits { cpu_millis, ..none }),
        ..pb::Service::default()
    };
    let of_services = lacks_for(pb::WorkloadSpec { services: vec![service], ..spec() }).await;
    assert_eq!(
        of_services,
        BTreeMap::from(
            [
                ("all", "services network-container"),
                ("garden", "limits-cpu services network-container"),
                ("none", "limits-cpu services network-container")
            ]
            .map(|(name, lacks)| (name.to_owned(), lacks.to_owned()))
        )
    );
    // A capability that no worker has makes the workload unplaceable, so the scheduler rejects
    // `Submit` immediately.
    let refused = scheduler.submit(named(&["wings"], none)).await.expect_err("no worker has the capability");
    assert!(refused.is(Reason::NoCompatibleWorker), "{refused:?}");
    assert!(refused.about.values().all(|why| why == "its runtime lacks wings"), "{refused:?}");
    assert_eq!(refused.about.len(), 3, "{refused:?}");
    scheduler.stop().await;
}
