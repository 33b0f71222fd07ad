//! Tests of resumed watches: a watch may continue at any replica and neither misses nor repeats an
//! event.

use std::sync::atomic::{AtomicU64, Ordering};

use domain::WorkloadId;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::names;
use crate::support::{Gateway, Running, config, finish, registration, spec, start, until, within};

const WATCHERS: u64 = 4;
/// Number of progress events.
const EVENTS: u64 = 40;

fn inputs_in(events: &[pb::WatchResponse]) -> u64 {
    names(events).iter().map(|name| u64::from(*name == "materializing")).sum()
}

/// Watches until the end of the workload in pieces of a few events. Each piece uses a random
/// replica. `seen` counts the progress events.
async fn watch_in_pieces(
    replicas: &[Running],
    id: WorkloadId,
    seen: &AtomicU64,
    seed: u64,
) -> Vec<pb::WatchResponse> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut all = Vec::<pb::WatchResponse>::new();
    loop {
        let replica = &replicas[random.random_range(0..replicas.len())];
        let after_revision = all.last().map_or(0, |event| event.revision);
        let request =
            pb::WatchRequest { team: "main".to_owned(), workload_id: id.to_string(), after_revision };
        let mut events = replica.workloads().watch(request).await.expect("watched").into_inner();
        for _ in 0..random.random_range(1..6) {
            let event = within("the next event", events.message()).await.expect("an open stream");
            let event = event.expect("a further event");
            let is_last = matches!(event.event, Some(pb::watch_response::Event::Finished(_)));
            all.push(event);
            seen.store(inputs_in(&all), Ordering::Relaxed);
            if is_last {
                return all;
            }
        }
    }
}

pub(crate) async fn resumed_watch_neither_misses_nor_repeats_events(database: TestDatabase) {
    let seed = testing::seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let mut replicas = vec![Running::start(config(&database)).await];
    // SQLite supports only one replica.
    if database.url.starts_with("postgres://") {
        replicas.push(Running::start(config(&database)).await);
    }
    let mut gateway = Gateway::connect(&replicas[0], registration("one")).await.expect("welcome");
    let id = replicas[replicas.len() - 1].submit(spec()).await.expect("accepted");
    let seen: Vec<_> = (0..WATCHERS).map(|_| AtomicU64::new(0)).collect();
    let run = async {
        let (lease, run) = gateway.run(id).await;
        for number in 0..EVENTS {
            let waits_for = number.to_string();
            let input = pb::InputProgress { name: "src".to_owned(), waits_for, ..Default::default() };
            gateway.observe_inputs(&lease, vec![input]).await;
            // Events continue while the watchers change replicas.
            until("all watchers have received the event", async || {
                seen.iter().all(|seen| seen.load(Ordering::Relaxed) + 3 > number).then_some(())
            })
            .await;
        }
        // After the start of the process, progress of inputs is no longer stored.
        until("a watcher has received all events", async || {
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
    let (watched, ()) = futures::join!(futures::future::join_all(watched), run);
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
