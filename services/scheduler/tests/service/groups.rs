//! Tests of groups of lease requests that wait for the same slots at different replicas.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::leases::{granted, grouped, place_many, task, with_slots};
use crate::places::{place, release, wait_for_waiting_requests, waiting};
use crate::support::{Running, config, within};

/// Lets two groups wait for two slots each. The `slots` slots of the worker are released one after
/// another. Each group must get both slots together.
async fn check_groups_at_two_replicas(database: &TestDatabase, slots: u32) {
    let config = scheduler::Config { poll: Duration::from_millis(50), ..config(database) };
    let replicas = [Running::start(config.clone()).await, Running::start(config).await];
    let _gateway = with_slots(&replicas[0], "one", slots).await;
    for turn in 0..6 {
        let mut held = Vec::new();
        for number in 0..slots {
            held.push(place(&replicas[number as usize % 2], task()).await.expect("granted"));
        }
        let requests = [[task(), task()], [task(), task()]];
        let answered = [AtomicBool::new(false), AtomicBool::new(false)];
        let wait = async |which: usize| {
            let replica = &replicas[which];
            let both = grouped(requests[which].clone().map(waiting), 1);
            let results = within("the group is granted", place_many(replica, both)).await;
            let granted = granted(&results);
            assert_eq!(granted.len(), 2, "{results:?}");
            answered[which].store(true, Ordering::Relaxed);
            let lease_tokens = granted.into_iter().map(|placed| placed.lease_token).collect();
            let release = pb::ReleaseManyRequest { lease_tokens };
            replica.placements().release_many(release).await.expect("released");
        };
        let release_slots = async {
            for replica in &replicas {
                wait_for_waiting_requests(replica, 2).await;
            }
            // The order of the replicas alternates.
            for (number, held) in held.iter().enumerate() {
                release(&replicas[(number + turn) % 2], &held.lease_token).await;
            }
        };
        let check_leases = async {
            while !answered.iter().all(|answered| answered.load(Ordering::Relaxed)) {
                let request = pb::ListLeasesRequest { team: "main".to_owned(), ..Default::default() };
                let listed = replicas[0].placements().list_leases(request).await.expect("listed");
                let live = listed.into_inner().leases;
                for (group, answered) in requests.iter().zip(&answered) {
                    let is_live =
                        |request: &&pb::PlaceRequest| live.iter().any(|one| one.lease_id == request.lease_id);
                    let has = group.iter().filter(is_live).count();
                    let may_be_released = answered.load(Ordering::Relaxed);
                    assert!(has != 1 || may_be_released, "only one lease of the group is live: {live:?}");
                }
            }
        };
        futures::join!(wait(0), wait(1), release_slots, check_leases);
    }
    assert_eq!(replicas[1].worker("one").await.active_tasks, 0);
    for replica in replicas {
        replica.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_at_two_replicas_are_granted_in_turn() {
    check_groups_at_two_replicas(&testing::databases::postgres().await, 2).await;
}

/// A third slot must not be granted to either group alone.
#[tokio::test(flavor = "multi_thread")]
async fn groups_at_two_replicas_do_not_split_slots() {
    check_groups_at_two_replicas(&testing::databases::postgres().await, 3).await;
}
