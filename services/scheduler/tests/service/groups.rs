//! Groups of leases that wait for the same slots, each at a replica of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::leases::{granted, grouped, place_many, task, with_slots};
use crate::places::{place, release, so_many_wait, waiting};
use crate::support::{Running, config, within};

/// Two that need two slots each, and the worker has `slots` of them, which come free one by one. Each gets both in the end, and never one of them.
async fn two_groups_at_two_replicas(database: &TestDatabase, slots: u32) {
    let config = scheduler::Config { poll: Duration::from_millis(50), ..config(database) };
    let replicas = [Running::start(config.clone()).await, Running::start(config).await];
    let _gateway = with_slots(&replicas[0], "one", slots).await;
    for turn in 0..6 {
        let mut held = Vec::new();
        for number in 0..slots {
            held.push(place(&replicas[number as usize % 2], task()).await.expect("granted"));
        }
        let asked = [[task(), task()], [task(), task()]];
        let answered = [AtomicBool::new(false), AtomicBool::new(false)];
        let waits = async |which: usize| {
            let replica = &replicas[which];
            let both = grouped(asked[which].clone().map(waiting), 1);
            let results = within("it is granted", place_many(replica, both)).await;
            let granted = granted(&results);
            assert_eq!(granted.len(), 2, "{results:?}");
            answered[which].store(true, Ordering::Relaxed);
            let lease_tokens = granted.into_iter().map(|placed| placed.lease_token).collect();
            let release = pb::ReleaseManyRequest { lease_tokens };
            replica.placements().release_many(release).await.expect("released");
        };
        let gives_back = async {
            for replica in &replicas {
                so_many_wait(replica, 2).await;
            }
            // At this one or the other first.
            for (number, held) in held.iter().enumerate() {
                release(&replicas[(number + turn) % 2], &held.lease_token).await;
            }
        };
        let looks = async {
            while !answered.iter().all(|answered| answered.load(Ordering::Relaxed)) {
                let request = pb::ListLeasesRequest { team: "main".to_owned(), ..Default::default() };
                let listed = replicas[0].placements().list_leases(request).await.expect("listed");
                let live = listed.into_inner().leases;
                for (asked, answered) in asked.iter().zip(&answered) {
                    let is_live =
                        |ask: &&pb::PlaceRequest| live.iter().any(|one| one.lease_id == ask.lease_id);
                    let has = asked.iter().filter(is_live).count();
                    let may_be_given_back = answered.load(Ordering::Relaxed);
                    assert!(has != 1 || may_be_given_back, "it has one of two: {live:?}");
                }
            }
        };
        futures::join!(waits(0), waits(1), gives_back, looks);
    }
    assert_eq!(replicas[1].worker("one").await.active_tasks, 0);
    for replica in replicas {
        replica.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_groups_at_two_replicas_get_all_they_need_one_after_the_other() {
    two_groups_at_two_replicas(&testing::databases::postgres().await, 2).await;
}

/// Where there is one more, it helps neither.
#[tokio::test(flavor = "multi_thread")]
async fn two_groups_at_two_replicas_do_not_share_three_slots() {
    two_groups_at_two_replicas(&testing::databases::postgres().await, 3).await;
}
