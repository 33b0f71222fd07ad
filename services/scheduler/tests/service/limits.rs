//! How much may be on a worker: what it says itself, or what holds for workers that do not say.

use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::{Config, Limits};
use testing::databases::TestDatabase;

use crate::explain::explain_spec;
use crate::leases::{refused, task};
use crate::places::{place, release};
use crate::support::{Gateway, Running, config, hello, spec, until};

/// Tasks, containers and volumes.
type Most = [u32; 3];

/// One that takes only what asks for it by its name.
fn worker(name: &str, [max_tasks, max_containers, max_volumes]: Most) -> pb::Hello {
    let mut hello = hello(name);
    hello.labels.as_mut().expect("labels").tags = vec![name.to_owned()];
    hello.capacity = Some(pb::Capacity { max_tasks, max_containers, max_volumes, ..pb::Capacity::default() });
    hello
}

/// What speaks against a worker now, with the limit that is reached.
async fn refusals(scheduler: &Running, name: &str) -> Vec<(String, u64)> {
    let asked = pb::WorkloadSpec { tags: vec![name.to_owned()], ..spec() };
    let explained = explain_spec(scheduler, asked).await;
    let mut workers = explained.workers.into_iter();
    let worker = workers.find(|worker| worker.worker_name == name).expect("it is known");
    let limit = |refusal: &pb::PlacementRefusal| refusal.limit.as_ref().map_or(0, |limit| limit.limit);
    worker.refusals.iter().map(|refusal| (refusal.reason.clone(), limit(refusal))).collect()
}

pub(crate) async fn what_a_worker_says_of_its_limits_holds_and_else_what_holds_for_all(
    database: TestDatabase,
) {
    let limits = Limits { tasks: Some(3), containers: Some(5), volumes: Some(7) };
    let scheduler = Running::start(Config { limits, ..config(&database) }).await;
    let cases = [
        ("silent", [0, 0, 0], [3, 5, 7]),
        ("smaller", [2, 4, 6], [2, 4, 6]),
        ("larger", [4, 6, 8], [4, 6, 8]),
        ("says-tasks", [4, 0, 0], [4, 5, 7]),
        ("says-containers", [0, 6, 0], [3, 6, 7]),
        ("says-volumes", [0, 0, 8], [3, 5, 8]),
    ];
    for (name, says, holds) in cases {
        let gateway = Gateway::connect(&scheduler, worker(name, says)).await.expect("welcome");
        let told = scheduler.worker(name).await.capacity.expect("its capacity");
        assert_eq!([told.max_tasks, told.max_containers, told.max_volumes], holds, "{name}");

        let [tasks, containers, volumes] = holds;
        let asking = || pb::PlaceRequest { tags: vec![name.to_owned()], ..task() };
        let is_refused_for = async |why: String| {
            let busy = refused(&scheduler, asking()).await;
            assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
            assert_eq!(busy.about.get(name), Some(&why), "{busy:?}");
        };
        let mut held = Vec::new();
        for _ in 0..tasks {
            held.push(place(&scheduler, asking()).await.expect("granted").lease_token);
        }
        is_refused_for(format!("is full ({tasks} of {tasks} tasks)")).await;
        for token in held {
            release(&scheduler, &token).await;
        }

        // Where it keeps one less than it may there is room for one, and no more where it keeps that.
        for (code, most, kept, of) in [
            ("FULL_OF_CONTAINERS", containers, [1, 0], "containers"),
            ("FULL_OF_VOLUMES", volumes, [0, 1], "volumes"),
        ] {
            // It says so again and again: what comes soon after something else is not noted.
            let keeps = async |count: u32, expected: &[(String, u64)]| {
                until(&format!("{name} has {count} {of}"), async || {
                    let [containers, volumes] = kept.map(|times: u64| times * u64::from(count));
                    gateway.observe_kept(containers, volumes).await;
                    (refusals(&scheduler, name).await == expected).then_some(())
                })
                .await;
            };
            keeps(most, &[(code.to_owned(), u64::from(most))]).await;
            is_refused_for(format!("has {most} of {most} {of}")).await;
            keeps(most - 1, &[]).await;
            let last = place(&scheduler, asking()).await.expect("granted").lease_token;
            is_refused_for(format!("has {most} of {most} {of}")).await;
            release(&scheduler, &last).await;
        }
    }
    scheduler.stop().await;
}
