//! Tests of the checks: each detects a wrong answer.

use rpc::pb::artifacts as pb;

use super::*;
use crate::model::operations::{Delivery, Make, Operation, Outputs, Remains, Status, Trespass, User};
use crate::model::state::{
    CacheOutcome, GC_GRACE, Outcome, RESOURCE_CACHE_TTL, ReportValidity, stray_id, worker_id,
};

const REPLICA: Uuid = Uuid::from_u128(1);
const COPY: Uuid = Uuid::from_u128(20);
const INPUT: Uuid = Uuid::from_u128(2);
const OUTPUT: Uuid = Uuid::from_u128(3);
const CONTAINER: Uuid = Uuid::from_u128(4);
const ARTIFACT: Artifact = Artifact::Upload(0);

fn accepted(state: &mut State, operation: Operation, outcome: Outcome) {
    state.accept(&operation, &outcome).expect("it may be");
}

fn refused(reason: rpc::Reason) -> Outcome {
    let refusal = rpc::Refusal {
        code: reason.code(),
        reason: Some(reason.as_str().to_owned()),
        message: String::new(),
        about: Default::default(),
    };
    Outcome::Refused(refusal)
}

/// Returns a build that owns an artifact with one replica, and a workload that pins it and has
/// prepared an attempt.
fn in_use() -> (State, View) {
    let mut state = State::new(2);
    let build = Operation::PutBuild { build: 0, ends_with: 9, keep: 0, term: 600, job: None };
    accepted(&mut state, build, Outcome::Done);
    accepted(&mut state, Operation::Create { upload: 0, owner: Some(0) }, Outcome::Done);
    let plan = Operation::Plan { transfer: 0, artifact: ARTIFACT, worker: 0, make: Make::Now };
    let planned = Outcome::Planned { handle: REPLICA, outcome: pb::PlanOutcome::Created };
    accepted(&mut state, plan, planned);
    accepted(&mut state, Operation::Arrive { transfer: 0, content: 7 }, Outcome::Done);
    accepted(&mut state, Operation::Seal { upload: 0, content: 7 }, Outcome::Done);
    let accept = Operation::Accept { workload: 1, pins: vec![ARTIFACT], build: None };
    accepted(&mut state, accept, Outcome::Done);
    let prepare = Operation::Prepare { workload: 1, attempt: 0, worker: 0, make: Make::Now };
    accepted(&mut state, prepare, prepared());
    accepted(&mut state, Operation::Prepared { workload: 1, attempt: 0 }, Outcome::Done);

    let mut view = View::default();
    let artifact = SeenArtifact {
        state: ArtifactState::Sealed,
        digest: digest_of(7).as_bytes().to_vec(),
        size_bytes: SIZE,
        replicas: vec![REPLICA],
        kept_by: vec![format!("build {}", build_id(0))],
    };
    view.artifacts.insert(artifact_id(ARTIFACT), artifact);
    let created = |parent| SeenVolume { state: InventoryState::Created, parent, artifact: None };
    view.volumes.insert(REPLICA, created(None));
    view.volumes.insert(INPUT, created(Some(REPLICA)));
    view.volumes.insert(OUTPUT, created(Some(REPLICA)));
    view.containers.insert(CONTAINER, InventoryState::Created);
    (state, view)
}

fn let_the_grace_pass(state: &mut State) {
    let seconds = u32::try_from(GC_GRACE).expect("few");
    accepted(state, Operation::Advance { seconds }, Outcome::Done);
}

/// Settles the workload as failed.
fn settle(state: &mut State) {
    let (status, outputs) = (Status::Failed, Outputs::NoOutput);
    let settle = Operation::Settle { workload: 1, attempt: 0, status, outputs, build: None };
    accepted(state, settle, Outcome::Settled { missing: vec![], differs: false });
}

fn prepared() -> Outcome {
    let volume = |handle: Uuid| pb::PreparedVolume {
        volume_handle: handle.to_string(),
        parent_handle: REPLICA.to_string(),
        ..Default::default()
    };
    let planned = pb::PrepareResponse {
        container_handle: CONTAINER.to_string(),
        volumes: vec![volume(INPUT), volume(OUTPUT)],
    };
    Outcome::Prepared { inputs: vec![ARTIFACT], caches: vec![], planned }
}

fn judge(spoil: impl FnOnce(&mut State, &mut View)) -> Accepted {
    let (mut state, mut view) = in_use();
    let mut history = History::default();
    check(&mut state, &mut history, &view).expect("nothing is wrong yet");
    spoil(&mut state, &mut view);
    check(&mut state, &mut history, &view)
}

#[track_caller]
fn assert_found(judged: Accepted, what: &str) {
    let Violation(found) = judged.expect_err("it must not be");
    assert!(found.contains(what), "{found}");
}

fn artifact_in(view: &mut View) -> &mut SeenArtifact {
    view.artifacts.get_mut(&artifact_id(ARTIFACT)).expect("it is there")
}

#[test]
fn check_finds_marked_kept_artifact() {
    let marked = judge(|_, view| artifact_in(view).state = ArtifactState::Deleting);
    assert_found(marked, "marked or gone");
    let gone = judge(|_, view| view.artifacts.clear());
    assert_found(gone, "marked or gone");
    for id in [REPLICA, INPUT, OUTPUT] {
        let mark = |_: &mut State, view: &mut View| {
            view.volumes.get_mut(&id).expect("it is there").state = InventoryState::Destroying;
        };
        assert_found(judge(mark), "is needed by");
    }
    let container =
        judge(|_, view| *view.containers.get_mut(&CONTAINER).expect("there") = InventoryState::Sweeping);
    assert_found(container, "is needed by attempt");
}

#[test]
fn check_finds_marked_artifact_of_cache() {
    let (mut state, mut view) = in_use();
    let cache = Uuid::from_u128(5);
    let ask = Operation::AskCache { cache: 0, claim: 0, user: Some(User::OfWorkload(2)) };
    accepted(&mut state, ask.clone(), Outcome::Asked { cache, found: CacheOutcome::Claimed });
    accepted(&mut state, Operation::PutCache { claim: 0, artifact: ARTIFACT }, Outcome::Done);
    assert_found(check(&mut state, &mut History::default(), &view), "is owned by resource cache");
    artifact_in(&mut view).kept_by.push(format!("resource cache {cache}"));
    check(&mut state, &mut History::default(), &view).expect("it says so now");

    settle(&mut state);
    accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
    accepted(&mut state, Operation::Advance { seconds: 1000 }, Outcome::Done);
    check(&mut state.clone(), &mut History::default(), &view).expect("the cache is used");
    artifact_in(&mut view).state = ArtifactState::Deleting;
    assert_found(check(&mut state.clone(), &mut History::default(), &view), "marked or gone");
    assert_found(state.accept(&Operation::DeleteCache { cache: 0 }, &Outcome::Done), "it is used");
    let (user, now) = (User::OfWorkload(2), Outcome::Done);
    accepted(&mut state, Operation::ReleaseCache { cache: 0, user }, now);
    let seconds = u32::try_from(RESOURCE_CACHE_TTL).expect("few");
    accepted(&mut state, Operation::Advance { seconds }, Outcome::Done);
    check(&mut state, &mut History::default(), &view).expect("its TTL passed without a use");
    let other = Uuid::from_u128(6);
    accepted(&mut state, ask, Outcome::Asked { cache: other, found: CacheOutcome::Claimed });
    let ask = Operation::AskCache { cache: 0, claim: 1, user: None };
    let twice = Outcome::Asked { cache: other, found: CacheOutcome::Claimed };
    assert_found(state.accept(&ask, &twice), "another claim makes it");
}

#[test]
fn check_finds_cache_with_impossible_use() {
    let mut state = State::new(2);
    let build = Operation::PutBuild { build: 0, ends_with: 9, keep: 50, term: 600, job: None };
    accepted(&mut state, build, Outcome::Done);
    let ask = Operation::AskCache { cache: 0, claim: 0, user: Some(User::OfBuild(0)) };
    accepted(&mut state, ask, Outcome::Asked { cache: Uuid::from_u128(5), found: CacheOutcome::Claimed });
    accepted(&mut state, Operation::Advance { seconds: 620 }, Outcome::Done);
    // Its term may have ended it before.
    let status = Status::Aborted;
    accepted(&mut state, Operation::EndBuild { build: 0, status }, Outcome::Done);
    let (delete, used) = (Operation::DeleteCache { cache: 0 }, refused(rpc::Reason::CacheInUse));
    accepted(&mut state, Operation::Advance { seconds: 50 }, Outcome::Done);
    state.clone().accept(&delete, &used).expect("the clock of the store may be a little ahead");
    state.clone().accept(&delete, &Outcome::Done).expect("it may have ended with its term");
    accepted(&mut state, Operation::Advance { seconds: 1 }, Outcome::Done);
    assert_found(state.accept(&delete, &used), "no user uses it");
}

#[test]
fn check_finds_deleted_restored_artifact() {
    let (mut state, mut view) = in_use();
    settle(&mut state);
    accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
    let_the_grace_pass(&mut state);
    let before = view.clone();
    artifact_in(&mut view).state = ArtifactState::Deleting;
    for volume in view.volumes.values_mut() {
        volume.state = InventoryState::Destroying;
    }
    let mut history = History::default();
    check(&mut state, &mut history, &view).expect("nothing keeps it");
    let undelete = Operation::Undelete { artifact: ARTIFACT, owner: None, keep: 50 };
    accepted(&mut state, undelete, Outcome::Done);
    assert_found(check(&mut state.clone(), &mut history.clone(), &view), "none of its replicas");
    view.volumes.get_mut(&REPLICA).expect("there").state = InventoryState::Created;
    assert_found(check(&mut state.clone(), &mut history.clone(), &view), "marked or gone");
    view.artifacts = before.artifacts;
    check(&mut state, &mut history, &view).expect("its replica came back");
    view.volumes.get_mut(&REPLICA).expect("there").state = InventoryState::Destroying;
    assert_found(check(&mut state, &mut history, &view), "is needed by");
}

/// Adds a copy of the artifact on another worker.
fn copied(state: &mut State, view: &mut View) {
    let plan = Operation::Plan { transfer: 1, artifact: ARTIFACT, worker: 1, make: Make::Now };
    accepted(state, plan, Outcome::Planned { handle: COPY, outcome: pb::PlanOutcome::Created });
    accepted(state, Operation::Arrive { transfer: 1, content: 7 }, Outcome::Done);
    let seen = SeenVolume { artifact: Some(artifact_id(ARTIFACT)), ..view.volumes[&REPLICA].clone() };
    view.volumes.insert(COPY, seen);
    artifact_in(view).replicas.push(COPY);
}

#[test]
fn check_finds_restored_dropped_replica() {
    let (mut state, mut view) = in_use();
    copied(&mut state, &mut view);
    let mut history = History::default();
    check(&mut state, &mut history, &view).expect("nothing is wrong yet");
    let set = |view: &mut View, id, state| view.volumes.get_mut(&id).expect("there").state = state;
    let drop = |worker| Operation::Drop { artifact: ARTIFACT, worker, force: true };
    let undelete = Operation::Undelete { artifact: ARTIFACT, owner: None, keep: 0 };
    accepted(&mut state, drop(1), Outcome::Done);
    set(&mut view, COPY, InventoryState::Destroying);
    check(&mut state, &mut history, &view).expect("it was dropped");
    accepted(&mut state, undelete.clone(), Outcome::Done);
    check(&mut state.clone(), &mut history.clone(), &view).expect("the other one is enough");
    set(&mut view, COPY, InventoryState::Created);
    assert_found(check(&mut state, &mut history.clone(), &view), "was dropped, and came back");

    // It is unknown whether the other replica exists.
    set(&mut view, COPY, InventoryState::Destroying);
    let (worker, left) = (0, Remains::Everything);
    accepted(&mut state, Operation::NewIncarnation { worker, left }, Outcome::Done);
    set(&mut view, REPLICA, InventoryState::Unconfirmed);
    check(&mut state, &mut history, &view).expect("nothing is wrong");
    accepted(&mut state, undelete, Outcome::Done);
    set(&mut view, COPY, InventoryState::Created);
    check(&mut state, &mut history, &view).expect("it is the last resort");
}

#[test]
fn check_finds_removed_owner() {
    let (mut state, view) = in_use();
    let remove = |builds: &[u16]| -> Vec<_> {
        let remove = |build: &u16| Operation::RemoveOwner { artifacts: vec![ARTIFACT], build: *build };
        builds.iter().map(remove).collect()
    };
    let owned = |answer| Outcome::Owned { answer, again: false };
    for remove in remove(&[0, 5]) {
        accepted(&mut state, remove, owned(Ok(())));
    }
    assert_found(check(&mut state, &mut History::default(), &view), "was taken from Some(0)");
    let Outcome::Refused(refusal) = refused(rpc::Reason::ArtifactNotFound) else { unreachable!() };
    let removed = state.accept(&remove(&[0])[0], &owned(Err(refusal.clone())));
    assert_found(removed, "nothing in its way");
    let add = |build| Operation::AddOwner { artifacts: vec![ARTIFACT], build };
    assert_found(state.accept(&add(0), &owned(Err(refusal))), "nothing in its way");
    assert_found(state.accept(&add(5), &owned(Ok(()))), "has ended");
    let other = Operation::AddOwner { artifacts: vec![Artifact::Upload(9)], build: 0 };
    assert_found(state.accept(&other, &owned(Ok(()))), "is not there");
    accepted(&mut state, add(0), owned(Ok(())));
    check(&mut state.clone(), &mut History::default(), &view).expect("it is its again");
    let mut unowned = view.clone();
    artifact_in(&mut unowned).kept_by = vec!["workload".to_owned()];
    assert_found(check(&mut state, &mut History::default(), &unowned), "is owned by build");
}

#[test]
fn check_finds_changed_sealed_artifact() {
    assert_found(judge(|_, view| artifact_in(view).size_bytes += 1), "was sealed with 7");
    assert_found(judge(|_, view| artifact_in(view).digest[0] ^= 1), "was sealed with 7");
    assert_found(judge(|_, view| artifact_in(view).state = ArtifactState::Open), "and is open");
    assert_found(judge(|_, view| artifact_in(view).replicas.clear()), "found at");
    assert_found(judge(|_, view| artifact_in(view).kept_by.clear()), "by nothing");
}

#[test]
fn check_finds_returned_forgotten_item() {
    let (mut state, mut view) = in_use();
    settle(&mut state);
    accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
    let_the_grace_pass(&mut state);
    let mut history = History::default();
    check(&mut state, &mut history, &view).expect("it may be there still");
    let before = view.clone();
    artifact_in(&mut view).state = ArtifactState::Deleting;
    for volume in view.volumes.values_mut() {
        volume.state = InventoryState::Sweeping;
    }
    check(&mut state, &mut history, &view).expect("nothing keeps it");
    assert_found(history.clone().look(&before), "was marked, and is Created again");
    assert_found(check(&mut state, &mut history, &before), "is there again");
    history.look(&View::default()).expect("it may go");
    assert_found(history.look(&view), "was forgotten, and is there again");
}

#[test]
fn check_finds_remains_of_forgotten_worker() {
    let (mut state, mut view) = in_use();
    let forget = |force| Operation::ForgetWorker { worker: 0, force };
    let forgotten = state.clone().accept(&forget(false), &Outcome::Done);
    assert_found(forgotten, "it has the last replica");
    accepted(&mut state.clone(), forget(false), refused(rpc::Reason::LastReplica));
    let refusal = refused(rpc::Reason::LastReplica);
    assert_found(state.accept(&forget(true), &refusal), "nothing in its way");
    let mut history = History::default();
    check(&mut state, &mut history, &view).expect("nothing is wrong yet");
    let before = view.clone();
    accepted(&mut state, forget(true), Outcome::Done);
    assert_found(check(&mut state.clone(), &mut history.clone(), &view), "that was forgotten, and is there");
    view.volumes.clear();
    view.containers.clear();
    artifact_in(&mut view).replicas.clear();
    check(&mut state, &mut history, &view).expect("all of it went");
    assert_found(check(&mut state, &mut history, &before), "was forgotten, and is there again");
    let response =
        pb::ReportResponse { unknown_volume_handles: vec![INPUT.to_string()], ..Default::default() };
    let report = Operation::Report { worker: 0, which: 0, way: Delivery::Once };
    let reported = |validity| Outcome::Reported { response: response.clone(), validity, listed: vec![] };
    assert_found(state.accept(&report, &reported(ReportValidity::OfForgotten)), "too late");
    accepted(&mut state, report, reported(ReportValidity::Good));
    assert!(!state.is_on_disk(INPUT), "it was handed out");
}

#[test]
fn check_finds_wrong_version_of_task_cache() {
    let (mut state, _) = in_use();
    let cache = Uuid::from_u128(7);
    let nothing = Outcome::Task { cache, artifact: None };
    accepted(&mut state, Operation::AskTask { task: 0 }, nothing.clone());
    let publish = Operation::PublishTask { task: 0, artifact: ARTIFACT };
    accepted(&mut state, publish, Outcome::Done);
    let uses = Operation::UseTasks { workload: 2, tasks: vec![0] };
    accepted(&mut state, uses, Outcome::Used { caches: vec![(0, cache)], answer: Ok(()) });
    accepted(&mut state, Operation::Advance { seconds: 1000 }, Outcome::Done);
    let asked = state.clone().accept(&Operation::AskTask { task: 0 }, &nothing);
    assert_found(asked, "it has the bytes");

    let prepare = Operation::Prepare { workload: 2, attempt: 0, worker: 0, make: Make::Now };
    let planned = |parent: &str| {
        let volume = |handle: u128, parent: &str| pb::PreparedVolume {
            volume_handle: Uuid::from_u128(handle).to_string(),
            parent_handle: parent.to_owned(),
            ..Default::default()
        };
        let planned = pb::PrepareResponse {
            container_handle: Uuid::from_u128(10).to_string(),
            volumes: vec![volume(11, ""), volume(12, parent)],
        };
        Outcome::Prepared { inputs: vec![], caches: vec![(0, cache)], planned }
    };
    assert_found(state.clone().accept(&prepare, &planned("")), "is its version");
    assert_found(state.clone().accept(&prepare, &planned(&OUTPUT.to_string())), "its version is");
    accepted(&mut state, prepare.clone(), planned(&REPLICA.to_string()));
    accepted(&mut state, Operation::DeleteTask { task: 0 }, Outcome::Done);
    accepted(&mut state, prepare.clone(), planned(&REPLICA.to_string()));
    assert_found(state.accept(&prepare, &planned(&OUTPUT.to_string())), "it started with");
}

#[test]
fn check_finds_marked_artifact_of_worker() {
    let (mut state, mut view) = in_use();
    let put = |resource| Operation::PutBase { worker: 0, resource, artifact: ARTIFACT };
    let refusal = refused(rpc::Reason::ArtifactNotFound);
    assert_found(state.accept(&put(None), &refusal), "nothing in its way");
    accepted(&mut state, put(None), Outcome::Done);
    assert_found(check(&mut state.clone(), &mut History::default(), &view), "owned by resource certs");
    artifact_in(&mut view).kept_by.push(format!("resource certs of worker {}", worker_id(0)));
    check(&mut state, &mut History::default(), &view).expect("it says so now");
    accepted(&mut state, put(Some(0)), Outcome::Done);
    accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
    settle(&mut state);
    let_the_grace_pass(&mut state);
    artifact_in(&mut view).state = ArtifactState::Deleting;
    assert_found(check(&mut state.clone(), &mut History::default(), &view), "marked or gone");
    // It is deleted with its worker.
    let forget = Operation::ForgetWorker { worker: 0, force: false };
    accepted(&mut state, forget, Outcome::Done);
    view.volumes.clear();
    view.containers.clear();
    check(&mut state, &mut History::default(), &view).expect("nothing keeps it");
}

#[test]
fn check_finds_access_of_another_team() {
    let (mut state, _) = in_use();
    let tries = Operation::Trespass;
    let not_found = || refused(rpc::Reason::ArtifactNotFound);
    accepted(&mut state, tries(Trespass::Get(ARTIFACT)), not_found());
    accepted(&mut state, tries(Trespass::Locate(ARTIFACT)), Outcome::Passed { learnt: false });
    let judge = |tried, outcome| state.clone().accept(&tries(tried), &outcome);
    assert_found(judge(Trespass::Locate(ARTIFACT), Outcome::Passed { learnt: true }), "learnt of it");
    let pinned = judge(Trespass::Pin(ARTIFACT), Outcome::Passed { learnt: false });
    assert_found(pinned, "another team may not");
    assert_found(judge(Trespass::Pin(ARTIFACT), not_found()), "it is no INPUT_UNAVAILABLE");
    let sealed = judge(Trespass::Seal(ARTIFACT, 8), refused(rpc::Reason::ArtifactSealed));
    assert_found(sealed, "it is no ARTIFACT_NOT_FOUND");
}

#[test]
fn check_finds_orphan_lost_without_decision() {
    let (mut state, mut view) = in_use();
    let mut history = History::default();
    let stray = stray_id(0, 5);
    accepted(&mut state, Operation::Stray { worker: 0, upload: 5, content: 3 }, Outcome::Done);
    accepted(&mut state, Operation::NewLife { worker: 0 }, Outcome::Done);
    let report = Operation::Report { worker: 0, which: 0, way: Delivery::Once };
    let reported = |unknown: &[Uuid]| {
        let unknown_volume_handles = unknown.iter().map(Uuid::to_string).collect();
        let response = pb::ReportResponse { unknown_volume_handles, ..Default::default() };
        Outcome::Reported { response, validity: ReportValidity::Good, listed: vec![stray] }
    };
    assert_found(state.clone().accept(&report, &reported(&[stray])), "in another life");
    accepted(&mut state, report.clone(), reported(&[]));
    assert_found(check(&mut state.clone(), &mut history.clone(), &view), "is not orphaned");
    view.orphans.insert(stray);
    check(&mut state, &mut history, &view).expect("it is an orphan");
    assert_found(state.clone().accept(&report, &reported(&[stray])), "and to be destroyed");
    let sweep = Operation::Sweep { worker: 0, destroy: true };
    assert_found(state.clone().accept(&sweep, &Outcome::Swept(vec![stray])), "and orphaned");
    let forget = Operation::ForgetWorker { worker: 0, force: false };
    assert_found(state.clone().accept(&forget, &Outcome::Done), "the last replica");
    let mut known = view.clone();
    known.volumes.insert(stray, view.volumes[&REPLICA].clone());
    assert_found(check(&mut state.clone(), &mut history.clone(), &known), "an orphan, and known");
    view.orphans.clear();
    assert_found(check(&mut state.clone(), &mut history.clone(), &view), "is gone without a decision");

    let adopt = Operation::AdoptOrphan { which: 0, owner: Some(0), keep: 0 };
    let artifact = Some(artifact_id(Artifact::Upload(5)));
    let decided = |answer| Outcome::Decided { about: stray, answer };
    let Outcome::Refused(refusal) = refused(rpc::Reason::NotAdoptable) else { unreachable!() };
    accepted(&mut state.clone(), adopt.clone(), decided(Err(refusal.clone())));
    accepted(&mut state, Operation::Describe { worker: 0 }, Outcome::Done);
    assert_found(state.accept(&adopt, &decided(Err(refusal))), "nothing in its way");
    accepted(&mut state, adopt, decided(Ok(artifact)));
    assert_found(check(&mut state, &mut history, &view), "is kept by");
}

#[test]
fn check_finds_forgotten_item_on_disk() {
    let (mut state, mut view) = in_use();
    accepted(&mut state, Operation::EndAttempt { workload: 1, attempt: 0 }, Outcome::Done);
    let_the_grace_pass(&mut state);
    view.volumes.remove(&INPUT);
    assert_found(check(&mut state, &mut History::default(), &view), "forgotten although it is there");
    let response =
        pb::ReportResponse { unknown_volume_handles: vec![INPUT.to_string()], ..Default::default() };
    let report = Operation::Report { worker: 0, which: 0, way: Delivery::Once };
    let reported =
        Outcome::Reported { response: response.clone(), validity: ReportValidity::Good, listed: vec![] };
    assert_found(state.accept(&report, &reported), "forgotten although it was there");
    let reported = Outcome::Reported { response, validity: ReportValidity::Overtaken, listed: vec![] };
    assert_found(state.accept(&report, &reported), "too late");
}

#[test]
fn check_finds_wrong_answers() {
    let pin = || Operation::Accept { workload: 2, pins: vec![ARTIFACT], build: None };
    let (mut state, _) = in_use();
    let refusal = refused(rpc::Reason::InputUnavailable);
    assert_found(state.accept(&pin(), &refusal), "nothing in its way");
    let sweep = Operation::Sweep { worker: 0, destroy: true };
    assert_found(state.accept(&sweep, &Outcome::Swept(vec![REPLICA])), "handed out, and needed");
    let seal = Operation::Seal { upload: 0, content: 8 };
    assert_found(state.accept(&seal, &Outcome::Done), "sealed with other bytes");
    let adopt = Operation::Adopt { content: 7, owner: None };
    assert_found(state.accept(&adopt, &Outcome::Adopted { artifact: None, again: false }), "holds it");

    accepted(&mut state, Operation::EndAttempt { workload: 1, attempt: 0 }, Outcome::Done);
    let_the_grace_pass(&mut state);
    let again = Operation::Prepare { workload: 1, attempt: 0, worker: 0, make: Make::Now };
    assert_found(state.accept(&again, &prepared()), "it has ended");
    let parent_first = Outcome::Swept(vec![INPUT, REPLICA, OUTPUT]);
    settle(&mut state);
    accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
    assert_found(state.clone().accept(&sweep, &parent_first), "before its child");
    let with_build = Operation::Accept { workload: 2, pins: Vec::new(), build: Some(0) };
    assert_found(state.accept(&with_build, &Outcome::Done), "its build has ended");
}

#[test]
fn check_finds_wrong_final_state() {
    let (mut state, mut view) = in_use();
    assert_found(settled(&state, &view), "of nothing that is kept");
    accepted(&mut state, Operation::EndAttempt { workload: 1, attempt: 0 }, Outcome::Done);
    let_the_grace_pass(&mut state);
    let swept = Outcome::Swept(vec![CONTAINER, INPUT, OUTPUT]);
    accepted(&mut state, Operation::Sweep { worker: 0, destroy: true }, swept);
    for id in [INPUT, OUTPUT] {
        view.volumes.remove(&id);
    }
    assert_found(settled(&state, &view), "containers are left");
    view.containers.clear();
    settled(&state, &view).expect("what is owned is there, and nothing else");
    assert_found(settled(&state, &View::default()), "and gone");
    assert!(state.holds_on(0), "{}", build_id(0));
    let other = view.artifacts.values().next().expect("one").clone();
    view.artifacts.insert(artifact_id(Artifact::Upload(5)), other);
    assert_found(settled(&state, &view), "are left and not kept");
}
