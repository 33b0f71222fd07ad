//! Recorded lists of operations, found by seeds or written by hand. A list that a seed prints can
//! be added as it is.

use testing::databases::TestDatabase;

use super::operations::Artifact::{Output, Upload};
use super::operations::Delivery::{Cut, Once, Repeatedly};
use super::operations::Make::{Later, Now};
use super::operations::Operation::{self, *};
use super::operations::Outputs::{NoOutput, With};
use super::operations::Remains::{Everything, Nothing};
use super::operations::Status::{Aborted, Failed, Succeeded};
use super::operations::TREES;
use super::operations::Trespass as T;
use super::run;
use crate::on_both_databases;

on_both_databases! {
    pin_and_mark_at_once,
    adoption_while_last_owner_lets_go,
    copy_while_last_owner_lets_go,
    child_outlives_artifact_of_its_parent,
    workload_settles_while_both_replicas_are_killed,
    report_arrives_after_new_incarnation,
    reports_arrive_in_another_order,
    item_is_created_after_it_was_forgotten,
    dropped_replica_is_restored_as_last_resort,
    forgotten_worker_returns,
    orphans_of_a_backup_are_adopted_or_purged,
    candidate_is_deleted_and_created_again,
    parent_is_purged_before_child_is_described,
    another_team_tries_foreign_items,
    mounted_version_outlives_its_cache,
    worker_owners_let_go_when_forgotten_or_replaced,
    owners_change_while_others_let_go,
    artifact_of_tree_is_not_created_open,
    dropped_replica_stays_dropped_beside_another,
    worker_is_forgotten_repeatedly_without_advancing_time,
    attempt_items_are_deleted_on_request,
    orphans_alone_prevent_forgetting_their_worker,
    hand_out_before_forgetting_is_not_deleted_after,
}

/// Number of repetitions of cases that depend on timing.
const ROUNDS: u16 = 15;

/// Applies operations to a fresh store, and lets everything end. All of them must be possible.
async fn replay(database: TestDatabase, operations: &[Operation]) {
    replay_but(database, 0, operations).await;
}

/// Applies operations to a fresh store. Up to `at_most` of them may be impossible.
async fn replay_but(database: TestDatabase, at_most: u16, operations: &[Operation]) {
    match run(database, operations).await {
        Err(failure) => panic!("{failure}"),
        Ok(skipped) => {
            assert!(skipped.len() <= at_most.into(), "these could not happen: {skipped:#?}");
        }
    }
}

/// A build that ends only with its workload.
fn build(number: u16, ends_with: u16) -> [Operation; 2] {
    [
        PutBuild { build: number, ends_with, keep: 0, term: 60, job: None },
        Accept { workload: ends_with, pins: vec![], build: Some(number) },
    ]
}

/// An upload to a worker, with a transfer of the same number.
fn upload(number: u16, content: u8, worker: u8, owner: Option<u16>) -> [Operation; 4] {
    [
        Create { upload: number, owner },
        Plan { transfer: number, artifact: Upload(number), worker, make: Now },
        Arrive { transfer: number, content },
        Seal { upload: number, content },
    ]
}

/// An attempt that completes an output.
fn attempt(workload: u16, worker: u8, content: u8) -> [Operation; 3] {
    [
        Prepare { workload, attempt: 0, worker, make: Now },
        Prepared { workload, attempt: 0 },
        Finish { workload, attempt: 0, content },
    ]
}

fn settle(workload: u16, content: u8, build: u16) -> Operation {
    let (status, outputs) = (Succeeded, With(content));
    Settle { workload, attempt: 0, status, outputs, build: Some(build) }
}

async fn pin_and_mark_at_once(database: TestDatabase) {
    let mut operations = Vec::new();
    for round in 0..ROUNDS {
        operations.extend(build(round, 100 + round));
        operations.extend(upload(round, 1, 0, Some(round)));
        let pin = |workload| Accept { workload, pins: vec![Upload(round)], build: None };
        operations.extend([
            DeleteBuild { build: round },
            Together(vec![Collect, pin(200 + round), Collect, pin(300 + round)]),
            Prepare { workload: 200 + round, attempt: 0, worker: 0, make: Now },
        ]);
    }
    replay(database, &operations).await;
}

async fn adoption_while_last_owner_lets_go(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(100, 100));
    for round in 0..ROUNDS {
        let content = u8::try_from(round).expect("few");
        operations.extend(build(round, round));
        operations.extend(upload(round, content, 1, Some(round)));
        let adopt = Adopt { content, owner: Some(100) };
        operations.push(Together(vec![DeleteBuild { build: round }, Collect, adopt, Collect]));
    }
    replay(database, &operations).await;
}

async fn copy_while_last_owner_lets_go(database: TestDatabase) {
    let mut operations = Vec::new();
    for round in 0..ROUNDS {
        operations.extend(build(round, round));
        operations.extend(upload(round, 1, 0, Some(round)));
        let (transfer, artifact) = (100 + round, Upload(round));
        let plan = Plan { transfer, artifact, worker: 1, make: Now };
        operations.push(Together(vec![Collect, DeleteBuild { build: round }, plan, Collect]));
        operations.extend([Arrive { transfer, content: 1 }, Sweep { worker: 1, destroy: true }]);
    }
    // Late copies do not complete.
    replay_but(database, ROUNDS, &operations).await;
}

/// Found by seed 64524062108118.
async fn child_outlives_artifact_of_its_parent(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(build(1, 1));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(Accept { workload: 2, pins: vec![Upload(0)], build: Some(1) });
    // The output is a copy-on-write child of the input's replica.
    operations.extend(attempt(2, 0, 2));
    operations.extend([
        settle(2, 2, 1),
        DeleteBuild { build: 0 },
        Collect,
        Accept { workload: 3, pins: vec![Output(2)], build: None },
    ]);
    operations.extend(attempt(3, 0, 3));
    operations.extend([Collect, Sweep { worker: 0, destroy: true }]);
    replay(database, &operations).await;
}

async fn workload_settles_while_both_replicas_are_killed(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(100, 100));
    operations.extend(upload(100, 1, 0, Some(100)));
    for workload in 0..ROUNDS / 3 {
        operations.push(Accept { workload, pins: vec![Upload(100)], build: Some(100) });
        operations.extend(attempt(workload, 0, 2));
        let settled = settle(workload, 2, 100);
        operations.push(Together(vec![Kill { replica: 0 }, settled.clone(), Kill { replica: 1 }, Collect]));
        // A caller without an answer repeats its call.
        operations.push(settled);
        operations.push(Accept { workload: 200 + workload, pins: vec![Output(workload)], build: None });
    }
    replay(database, &operations).await;
}

async fn report_arrives_after_new_incarnation(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.extend([
        BeginReport { worker: 0 },
        NewIncarnation { worker: 0, left: Everything },
        // The report names everything, and is of an ended incarnation, so that it confirms nothing.
        Report { worker: 0, which: 0, way: Repeatedly },
        Former { worker: 0 },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 1, way: Once },
        Accept { workload: 1, pins: vec![Upload(0)], build: None },
        NewIncarnation { worker: 0, left: Nothing },
        Report { worker: 0, which: 0, way: Once },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 0, way: Once },
        Plan { transfer: 1, artifact: Upload(0), worker: 0, make: Now },
        Arrive { transfer: 1, content: 1 },
    ]);
    operations.extend(attempt(1, 0, 2));
    replay(database, &operations).await;
}

async fn reports_arrive_in_another_order(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.push(BeginReport { worker: 0 });
    // None of this is in the first report.
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(Accept { workload: 1, pins: vec![Upload(0)], build: Some(0) });
    operations.extend(attempt(1, 0, 2));
    operations.extend([
        Report { worker: 0, which: 0, way: Cut },
        Report { worker: 0, which: 0, way: Repeatedly },
        BeginReport { worker: 0 },
        settle(1, 2, 0),
        Advance { seconds: 20 },
        Together(vec![Collect, Report { worker: 0, which: 1, way: Repeatedly }, Collect]),
        Sweep { worker: 0, destroy: true },
        // The first report is overtaken. The second names items that are deleted by now.
        Report { worker: 0, which: 0, way: Once },
        Report { worker: 0, which: 0, way: Repeatedly },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 1, way: Once },
        Report { worker: 0, which: 0, way: Once },
        Accept { workload: 2, pins: vec![Upload(0), Output(1)], build: None },
    ]);
    operations.extend(attempt(2, 0, 3));
    replay(database, &operations).await;
}

async fn item_is_created_after_it_was_forgotten(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.extend([
        Accept { workload: 1, pins: vec![Upload(0)], build: Some(0) },
        Prepare { workload: 1, attempt: 0, worker: 0, make: Later },
        EndAttempt { workload: 1, attempt: 0 },
        Advance { seconds: 20 },
        Collect,
        Sweep { worker: 0, destroy: true },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 0, way: Once },
        // Its gateway was suspended, and creates the item now.
        Make { worker: 0 },
        Prepared { workload: 1, attempt: 0 },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 0, way: Once },
        Settle { workload: 1, attempt: 0, status: Aborted, outputs: NoOutput, build: None },
    ]);
    replay(database, &operations).await;
}

/// Found by seed 196401969570472.
async fn dropped_replica_is_restored_as_last_resort(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    let drop = |worker, force| Drop { artifact: Upload(0), worker, force };
    let undelete = Undelete { artifact: Upload(0), owner: None, keep: 20 };
    operations.extend([drop(0, true), undelete.clone(), Collect]);
    // If two replicas exist, the one that was not dropped is enough.
    operations.extend([
        Plan { transfer: 1, artifact: Upload(0), worker: 1, make: Now },
        Arrive { transfer: 1, content: 1 },
        drop(0, false),
        undelete.clone(),
        Collect,
        Sweep { worker: 0, destroy: true },
    ]);
    // The artifact was deleted as well, and is restored with the dropped replica.
    operations.extend([
        drop(1, true),
        DeleteBuild { build: 0 },
        Advance { seconds: 30 },
        Collect,
        undelete,
        Collect,
    ]);
    replay(database, &operations).await;
}

async fn forgotten_worker_returns(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(Accept { workload: 1, pins: vec![Upload(0)], build: Some(0) });
    operations.extend(attempt(1, 0, 2));
    operations.extend([
        BeginReport { worker: 0 },
        // The worker has the last replica of a pinned artifact.
        ForgetWorker { worker: 0, force: false },
        Plan { transfer: 1, artifact: Upload(0), worker: 1, make: Now },
        Arrive { transfer: 1, content: 1 },
        Together(vec![
            ForgetWorker { worker: 0, force: false },
            Prepare { workload: 1, attempt: 0, worker: 0, make: Now },
            Report { worker: 0, which: 0, way: Repeatedly },
            Collect,
        ]),
        ForgetWorker { worker: 0, force: true },
        // All of its earlier contents are unknown now.
        settle(1, 2, 0),
        Prepare { workload: 1, attempt: 0, worker: 0, make: Now },
        NewIncarnation { worker: 0, left: Everything },
        Former { worker: 0 },
        Report { worker: 0, which: 0, way: Once },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 0, way: Once },
        Accept { workload: 2, pins: vec![Upload(0)], build: None },
        Plan { transfer: 2, artifact: Upload(0), worker: 0, make: Now },
        Arrive { transfer: 2, content: 1 },
    ]);
    operations.extend(attempt(2, 0, 3));
    replay(database, &operations).await;
}

async fn orphans_of_a_backup_are_adopted_or_purged(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(Accept { workload: 1, pins: vec![Upload(0)], build: Some(0) });
    operations.extend(attempt(1, 0, 2));
    let strays = (0..4).map(|upload| Stray { worker: 0, upload, content: 1 });
    operations.extend(strays);
    operations.extend([
        BeginReport { worker: 0 },
        NewLife { worker: 0 },
        // A report of the ended life.
        Report { worker: 0, which: 0, way: Repeatedly },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 1, way: Repeatedly },
        AdoptOrphan { which: 0, owner: Some(0), keep: 0 },
        Describe { worker: 0 },
        AdoptOrphan { which: 0, owner: Some(0), keep: 0 },
        AdoptOrphan { which: 0, owner: None, keep: 30 },
        Together(vec![PurgeOrphan { which: 0 }, Report { worker: 0, which: 1, way: Repeatedly }, Collect]),
        ForgetWorker { worker: 0, force: false },
        NewIncarnation { worker: 0, left: Everything },
        AdoptOrphan { which: 0, owner: None, keep: 30 },
        Accept { workload: 2, pins: vec![Upload(0), Upload(1)], build: None },
        ForgetWorker { worker: 0, force: true },
        // The contents of a forgotten worker are orphans in the next life.
        NewLife { worker: 1 },
        BeginReport { worker: 0 },
        Report { worker: 0, which: u8::MAX, way: Once },
        Describe { worker: 0 },
        AdoptOrphan { which: 3, owner: Some(0), keep: 0 },
    ]);
    replay(database, &operations).await;
}

async fn candidate_is_deleted_and_created_again(database: TestDatabase) {
    let prepare = Prepare { workload: 1, attempt: 0, worker: 0, make: Now };
    let operations = [
        prepare.clone(),
        Finish { workload: 1, attempt: 0, content: 0 },
        NewIncarnation { worker: 0, left: Nothing },
        BeginReport { worker: 0 },
        prepare,
        // A report with the token from its beginning.
        Report { worker: 0, which: u8::MAX, way: Once },
        Settle { workload: 1, attempt: 0, status: Failed, outputs: With(0), build: None },
    ];
    replay(database, &operations).await;
}

async fn parent_is_purged_before_child_is_described(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(Accept { workload: 1, pins: vec![Upload(0)], build: Some(0) });
    operations.extend(attempt(1, 0, 2));
    operations.extend([
        ForgetWorker { worker: 0, force: true },
        NewLife { worker: 1 },
        BeginReport { worker: 0 },
        Report { worker: 0, which: u8::MAX, way: Once },
        // The oldest first: the replica, and then its child. The gateway cannot delete the replica
        // before the child.
        PurgeOrphan { which: 0 },
        Sweep { worker: 0, destroy: false },
        PurgeOrphan { which: 0 },
        Sweep { worker: 0, destroy: true },
        // It still exists, and is handed out again.
        BeginReport { worker: 0 },
        Report { worker: 0, which: u8::MAX, way: Once },
        Sweep { worker: 0, destroy: true },
    ]);
    replay(database, &operations).await;
}

async fn another_team_tries_foreign_items(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    for number in 0..2 {
        operations.extend(upload(number, 1, 0, Some(0)));
    }
    // The second artifact is deleted, and the third is open.
    operations.extend(build(1, 1));
    operations.extend(upload(2, 2, 0, Some(1)));
    operations.extend([DeleteBuild { build: 1 }, Collect]);
    operations.extend(upload(3, 3, 0, Some(0)).into_iter().take(3));
    operations.extend([
        AskTask { task: 0 },
        PublishTask { task: 0, artifact: Upload(0) },
        AskCache { cache: 0, claim: 0, user: None },
        Trespass(T::RenewClaim(0)),
        Trespass(T::PutCache(0, Upload(0))),
        PutCache { claim: 0, artifact: Upload(1) },
    ]);
    let tried = [
        T::Get(Upload(0)),
        T::Locate(Upload(0)),
        T::AdoptBytes(1),
        T::Undelete(Upload(0)),
        T::Undelete(Upload(2)),
        T::Pin(Upload(0)),
        T::Plan(Upload(0), 1),
        T::Plan(Upload(3), 1),
        T::Prepare(Upload(0), 0),
        T::Drop(Upload(0), 0),
        T::Seal(Upload(3), 3),
        T::PutType(Upload(0)),
        T::EndBuild(0),
        T::DeleteBuild(0),
        T::AskCache(0),
        T::UseCache(0),
        T::DeleteCache(0),
        T::AskTask(0),
        T::PublishTask(0, Upload(0)),
        T::DeleteTask(0),
    ];
    operations.extend(tried.map(Trespass));
    replay(database, &operations).await;
}

async fn mounted_version_outlives_its_cache(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.extend(upload(1, 2, 0, Some(0)));
    operations.extend([
        AskTask { task: 0 },
        PublishTask { task: 0, artifact: Upload(0) },
        UseTasks { workload: 1, tasks: vec![0] },
        // Longer than the TTL of the cache.
        Advance { seconds: 200 },
        Collect,
        Prepare { workload: 1, attempt: 0, worker: 0, make: Now },
        DeleteBuild { build: 0 },
        Together(vec![
            PublishTask { task: 0, artifact: Upload(1) },
            Prepare { workload: 1, attempt: 1, worker: 0, make: Now },
            Collect,
        ]),
        // A repeated call finds the same version.
        Prepare { workload: 1, attempt: 0, worker: 0, make: Now },
        Prepared { workload: 1, attempt: 0 },
        DeleteTask { task: 0 },
        Collect,
        Sweep { worker: 0, destroy: true },
        Prepare { workload: 1, attempt: 2, worker: 0, make: Now },
    ]);
    replay(database, &operations).await;
}

async fn worker_owners_let_go_when_forgotten_or_replaced(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    for number in 0..4 {
        operations.extend(upload(number, 1, 0, Some(0)));
    }
    let put = |resource, number| PutBase { worker: 1, resource, artifact: Upload(number) };
    operations.extend([
        put(Some(0), 0),
        put(Some(1), 1),
        put(None, 2),
        DeleteBuild { build: 0 },
        Advance { seconds: 1000 },
        Collect,
        Together(vec![put(Some(0), 3), put(Some(0), 2), Collect, Collect]),
        put(None, 1),
        Collect,
        // The worker's owners let go, because nothing is on its disk.
        ForgetWorker { worker: 1, force: false },
        Collect,
    ]);
    replay(database, &operations).await;
}

async fn owners_change_while_others_let_go(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(100, 100));
    for round in 0..ROUNDS {
        let (one, other) = (2 * round, 2 * round + 1);
        operations.extend(build(round, round));
        operations.push(CreateAll { uploads: vec![one, other], owner: Some(round) });
        operations.extend(upload(one, 1, 0, Some(round)).into_iter().skip(1));
        operations.extend(upload(other, 2, 1, Some(round)).into_iter().skip(1));
        let both = vec![Upload(one), Upload(other)];
        let add = AddOwner { artifacts: both.clone(), build: 100 };
        operations.extend([
            Together(vec![DeleteBuild { build: round }, add.clone(), Collect, Collect]),
            Together(vec![add, RemoveOwner { artifacts: vec![Upload(one)], build: 100 }, Collect]),
            // Neither of them belonged to another owner.
            RemoveOwner { artifacts: both, build: round },
            RemoveOwner { artifacts: vec![Upload(other)], build: 100 },
            Collect,
        ]);
    }
    replay(database, &operations).await;
}

async fn artifact_of_tree_is_not_created_open(database: TestDatabase) {
    let again = |upload| CreateAll { uploads: vec![upload, 0], owner: None };
    let operations = [
        HandOver { upload: 0, owner: None, content: TREES },
        // All or none: the other artifact is not created either.
        again(1),
        // If both were deleted meanwhile, both are created.
        Advance { seconds: 1_000_000 },
        Together(vec![again(2), Collect, Collect]),
        Collect,
        again(3),
    ];
    replay(database, &operations).await;
}

async fn dropped_replica_stays_dropped_beside_another(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(HandOver { upload: 1, owner: Some(0), content: TREES });
    for (transfer, number, content) in [(1, 0, 1), (2, 1, TREES)] {
        let undelete = Undelete { artifact: Upload(number), owner: Some(0), keep: 0 };
        operations.extend([
            Plan { transfer, artifact: Upload(number), worker: 1, make: Now },
            Arrive { transfer, content },
            Drop { artifact: Upload(number), worker: 1, force: false },
            undelete.clone(),
            Collect,
            undelete,
        ]);
    }
    // Both are deleted and restored.
    operations.extend([DeleteBuild { build: 0 }, Collect]);
    operations.extend((0..2).map(|number| Undelete { artifact: Upload(number), owner: None, keep: 20 }));
    replay(database, &operations).await;
}

/// Each round advances the clock a little.
async fn worker_is_forgotten_repeatedly_without_advancing_time(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)).into_iter().take(2));
    operations.push(Advance { seconds: 59 });
    operations.extend((0..120).map(|_| ForgetWorker { worker: 2, force: true }));
    operations.push(Progress { transfer: 0 });
    replay(database, &operations).await;
}

async fn attempt_items_are_deleted_on_request(database: TestDatabase) {
    let mut operations = Vec::new();
    operations.extend(build(0, 0));
    operations.extend(upload(0, 1, 0, Some(0)));
    operations.push(Accept { workload: 1, pins: vec![Upload(0)], build: Some(0) });
    let prepare = Prepare { workload: 1, attempt: 0, worker: 0, make: Now };
    let volume = |which, gateway| MarkVolume { workload: 1, attempt: 0, which, gateway };
    operations.extend([
        prepare.clone(),
        Fail { workload: 1, attempt: 0 },
        Collect,
        prepare.clone(),
        Prepared { workload: 1, attempt: 0 },
        // The container prevents the deletion at first.
        volume(0, true),
        MarkContainer { workload: 1, attempt: 0, gateway: false },
        Prepared { workload: 1, attempt: 0 },
        volume(0, false),
        Sweep { worker: 0, destroy: true },
        prepare,
        Prepared { workload: 1, attempt: 0 },
        Finish { workload: 1, attempt: 0, content: 2 },
        Together(vec![settle(1, 2, 0), Fail { workload: 1, attempt: 0 }, Collect]),
        MarkContainer { workload: 1, attempt: 0, gateway: true },
        Collect,
    ]);
    // A late caller finds nothing. A deleted candidate is not settled.
    replay_but(database, 1, &operations).await;
}

async fn orphans_alone_prevent_forgetting_their_worker(database: TestDatabase) {
    let operations = [
        Stray { worker: 0, upload: 0, content: 1 },
        NewLife { worker: 0 },
        BeginReport { worker: 0 },
        Report { worker: 0, which: 0, way: Once },
        ForgetWorker { worker: 0, force: false },
        PurgeOrphan { which: 0 },
        ForgetWorker { worker: 0, force: false },
    ];
    replay(database, &operations).await;
}

/// The stream of the gateway has already received it, or has not.
async fn hand_out_before_forgetting_is_not_deleted_after(database: TestDatabase) {
    let mut operations = Vec::new();
    for (workload, is_read) in [(1, true), (2, false), (3, true), (4, false)] {
        operations.extend([
            Accept { workload, pins: vec![], build: None },
            Prepare { workload, attempt: 0, worker: 2, make: Now },
            Settle { workload, attempt: 0, status: Failed, outputs: NoOutput, build: None },
            NewLife { worker: 0 },
            Sweep { worker: 2, destroy: true },
            Advance { seconds: 23 },
            Collect,
        ]);
        operations.extend(is_read.then_some(Sweep { worker: 2, destroy: false }));
        operations.extend([
            ForgetWorker { worker: 2, force: true },
            BeginReport { worker: 2 },
            Report { worker: 2, which: 0, way: Once },
            BeginReport { worker: 2 },
            Sweep { worker: 2, destroy: true },
            BeginReport { worker: 2 },
            Report { worker: 2, which: 1, way: Once },
            Report { worker: 2, which: 0, way: Once },
        ]);
    }
    replay(database, &operations).await;
}
