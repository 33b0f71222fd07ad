//! Tests of the limits of workers: reported limits and defaults of the scheduler.

use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::{Config, Limits};
use testing::databases::TestDatabase;

use crate::explain::explain_spec;
use crate::leases::{refused, task};
use crate::places::{place, release};
use crate::support::{Gateway, Running, config, registration, spec, until};

/// Numbers of tasks, containers and volumes.
type Counts = [u32; 3];

/// Worker that accepts only requests with its name as a tag.
fn worker(name: &str, [max_tasks, max_containers, max_volumes]: Counts) -> pb::Registration {
    let mut registration = registration(name);
    registration.labels.as_mut().expect("labels").tags = vec![name.to_owned()];
    registration.capacity =
        Some(pb::Capacity { max_tasks, max_containers, max_volumes, ..pb::Capacity::default() });
    registration
}

/// Current refusals of a worker and the limits that are reached.
async fn refusals(scheduler: &Running, name: &str) -> Vec<(String, u64)> {
    let spec = pb::WorkloadSpec { tags: vec![name.to_owned()], ..spec() };
    let explained = explain_spec(scheduler, spec).await;
    let mut workers = explained.workers.into_iter();
    let worker = workers.find(|worker| worker.worker_name == name).expect("a known worker");
    let limit = |refusal: &pb::PlacementRefusal| refusal.limit.as_ref().map_or(0, |limit| limit.limit);
    worker.refusals.iter().map(|refusal| (refusal.reason.clone(), limit(refusal))).collect()
}

pub(crate) async fn reported_limits_override_defaults(database: TestDatabase) {
    let limits = Limits { tasks: Some(3), containers: Some(5), volumes: Some(7) };
    let scheduler = Running::start(Config { limits, ..config(&database) }).await;
    let cases = [
        ("silent", [0, 0, 0], [3, 5, 7]),
        ("smaller", [2, 4, 6], [2, 4, 6]),
        ("larger", [4, 6, 8], [4, 6, 8]),
        ("reports-tasks", [4, 0, 0], [4, 5, 7]),
        ("reports-containers", [0, 6, 0], [3, 6, 7]),
        ("reports-volumes", [0, 0, 8], [3, 5, 8]),
    ];
    for (name, reported, effective) in cases {
        let gateway = Gateway::connect(&scheduler, worker(name, reported)).await.expect("welcome");
        let capacity = scheduler.worker(name).await.capacity.expect("a capacity");
        assert_eq!([capacity.max_tasks, capacity.max_containers, capacity.max_volumes], effective, "{name}");

        let [tasks, containers, volumes] = effective;
        let request = || pb::PlaceRequest { tags: vec![name.to_owned()], ..task() };
        let check_refused = async |why: String| {
            let busy = refused(&scheduler, request()).await;
            assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
            assert_eq!(busy.about.get(name), Some(&why), "{busy:?}");
        };
        let mut held = Vec::new();
        for _ in 0..tasks {
            held.push(place(&scheduler, request()).await.expect("granted").lease_token);
        }
        check_refused(format!("is full ({tasks} of {tasks} tasks)")).await;
        for token in held {
            release(&scheduler, &token).await;
        }

        // A worker below its limit accepts one more lease. A worker at its limit accepts none.
        for (code, most, kept, of) in [
            ("FULL_OF_CONTAINERS", containers, [1, 0], "containers"),
            ("FULL_OF_VOLUMES", volumes, [0, 1], "volumes"),
        ] {
            // The report is repeated because the scheduler ignores reports that follow another one
            // too soon.
            let report_kept = async |count: u32, expected: &[(String, u64)]| {
                until(&format!("{name} has {count} {of}"), async || {
                    let [containers, volumes] = kept.map(|times: u64| times * u64::from(count));
                    gateway.observe_kept(containers, volumes).await;
                    (refusals(&scheduler, name).await == expected).then_some(())
                })
                .await;
            };
            report_kept(most, &[(code.to_owned(), u64::from(most))]).await;
            check_refused(format!("has {most} of {most} {of}")).await;
            report_kept(most - 1, &[]).await;
            let last = place(&scheduler, request()).await.expect("granted").lease_token;
            check_refused(format!("has {most} of {most} {of}")).await;
            release(&scheduler, &last).await;
        }
    }
    scheduler.stop().await;
}

pub(crate) async fn worker_with_full_disk_takes_no_work(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let capacity = pb::Capacity { disk_bytes: 1000, min_free_disk_bytes: 20, ..pb::Capacity::default() };
    let registration = pb::Registration { capacity: Some(capacity), ..worker("full", [0; 3]) };
    let gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let task = || pb::PlaceRequest { tags: vec!["full".to_owned()], ..task() };
    let transfer = || pb::PlaceRequest { kind: pb::PlacementKind::Transfer.into(), ..task() };
    // The disk of a new worker is unknown, so it takes work.
    let lease = place(&scheduler, task()).await.expect("granted").lease_token;
    release(&scheduler, &lease).await;

    let expect_refusals = async |free_bytes, expected: &[(String, u64)]| {
        until("the report is known", async || {
            gateway.observe_disk(free_bytes).await;
            (refusals(&scheduler, "full").await == expected).then_some(())
        })
        .await;
    };
    expect_refusals(19, &[("DISK_PRESSURE".to_owned(), 0)]).await;
    for request in [task(), transfer()] {
        let busy = refused(&scheduler, request).await;
        assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
        let why = "has less than 20 bytes of its disk free".to_owned();
        assert_eq!(busy.about.get("full"), Some(&why), "{busy:?}");
    }
    expect_refusals(20, &[]).await;
    for request in [task(), transfer()] {
        let lease = place(&scheduler, request).await.expect("granted").lease_token;
        release(&scheduler, &lease).await;
    }
    scheduler.stop().await;
}
