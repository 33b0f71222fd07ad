//! Whoever watches a workload goes on where he was, at whichever replica: nothing is missed or told twice.

use std::sync::atomic::{AtomicU64, Ordering};

use domain::WorkloadId;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::names;
use crate::support::{Gateway, Running, config, finish, hello, spec, start, until, within};

const WATCHERS: u64 = 4;
/// How often it is said that inputs come.
const EVENTS: u64 = 40;

fn inputs_in(events: &[pb::WatchResponse]) -> u64 {
    names(events).iter().map(|name| u64::from(*name == "materializing")).sum()
}

/// Watches until the end, some events at a time, each time at one of the replicas. `seen`: how often inputs came.
async fn watch_in_pieces(
    replicas: &[Running],
    id: WorkloadId,
    seen: &AtomicU64,
    seed: u64,
) -> Vec<pb::WatchResponse> {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut all = Vec::<pb::WatchResponse>::new();
    loop {
        let replica = &replicas[dice.random_range(0..replicas.len())];
        let after_revision = all.last().map_or(0, |event| event.revision);
        let request =
            pb::WatchRequest { team: "main".to_owned(), workload_id: id.to_string(), after_revision };
        let mut events = replica.workloads().watch(request).await.expect("watched").into_inner();
        for _ in 0..dice.random_range(1..6) {
            let event = within("the next event", events.message()).await.expect("it goes on");
            let event = event.expect("it has not finished");
            let is_last = matches!(event.event, Some(pb::watch_response::Event::Finished(_)));
            all.push(event);
            seen.store(inputs_in(&all), Ordering::Relaxed);
            if is_last {
                return all;
            }
        }
    }
}

pub(crate) async fn a_watch_that_goes_on_elsewhere_misses_nothing_and_hears_nothing_twice(
    database: TestDatabase,
) {
    let seed = testing::seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let mut replicas = vec![Running::start(config(&database)).await];
    // On SQLite there is one.
    if database.url.starts_with("postgres://") {
        replicas.push(Running::start(config(&database)).await);
    }
    let mut gateway = Gateway::connect(&replicas[0], hello("one")).await.expect("welcome");
    let id = replicas[replicas.len() - 1].submit(spec()).await.expect("accepted");
    let seen: Vec<_> = (0..WATCHERS).map(|_| AtomicU64::new(0)).collect();
    let happens = async {
        let (lease, run) = gateway.run(id).await;
        for number in 0..EVENTS {
            let waits_for = number.to_string();
            let input = pb::InputProgress { name: "src".to_owned(), waits_for, ..Default::default() };
            gateway.observe_inputs(&lease, vec![input]).await;
            // It goes on happening while each goes from one to another.
            until("all of them follow", async || {
                seen.iter().all(|seen| seen.load(Ordering::Relaxed) + 3 > number).then_some(())
            })
            .await;
        }
        // Once it has started, it is too late for more.
        until("all of it was heard", async || {
            seen.iter().any(|seen| seen.load(Ordering::Relaxed) == EVENTS).then_some(())
        })
        .await;
        start(&replicas[0], &run.lease_token).await.expect("started");
        finish(&replicas[0], &run.lease_token, 0).await.expect("finished");
    };
    let watched = seen.iter().zip(0..).map(|(seen, number)| {
        let seed = seed.wrapping_add(number);
        watch_in_pieces(&replicas, id, seen, seed)
    });
    let (watched, ()) = futures::join!(futures::future::join_all(watched), happens);
    let all = replicas[0].watch(id, 0).await;
    let revisions: Vec<_> = all.iter().map(|event| event.revision).collect();
    assert_eq!(revisions, (1..=all.len() as u64).collect::<Vec<_>>());
    assert_eq!(inputs_in(&all), EVENTS);
    for events in watched {
        assert_eq!(events, all);
    }
    for replica in replicas {
        replica.stop().await;
    }
}
