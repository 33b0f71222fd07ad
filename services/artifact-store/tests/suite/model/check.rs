//! What the store shows, compared with the model: what must be there is, and what went stays away.

use std::collections::{BTreeMap, BTreeSet};

use domain::ArtifactId;
use rpc::pb::artifacts::{ArtifactState, InventoryState};
use uuid::Uuid;

use super::operations::{Artifact, TREES};
use super::state::{Accepted, Restored, State, Violation, artifact_id, build_id, digest_of, must};

/// What the store answers to lists. They are asked for one after the other, while collections may run.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    pub(crate) artifacts: BTreeMap<ArtifactId, SeenArtifact>,
    pub(crate) volumes: BTreeMap<Uuid, SeenVolume>,
    pub(crate) containers: BTreeMap<Uuid, InventoryState>,
    /// What is set aside.
    pub(crate) aside: BTreeSet<Uuid>,
}

#[derive(Debug, Clone)]
pub(crate) struct SeenArtifact {
    pub(crate) state: ArtifactState,
    pub(crate) digest: Vec<u8>,
    pub(crate) size_bytes: u64,
    pub(crate) replicas: Vec<Uuid>,
    /// What the store says keeps it.
    pub(crate) kept_by: Vec<String>,
}

#[derive(Debug, Clone)]
pub(crate) struct SeenVolume {
    pub(crate) state: InventoryState,
    pub(crate) parent: Option<Uuid>,
    /// What it is a replica of, or shall be.
    pub(crate) artifact: Option<ArtifactId>,
}

/// What was seen before, and never changes back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Past {
    /// Volumes and containers that were there.
    known: BTreeSet<Uuid>,
    /// Those that were marked.
    marked: BTreeSet<Uuid>,
    /// Those that were forgotten.
    forgotten: BTreeSet<Uuid>,
}

/// How many bytes everything has that is completed in these tests.
pub(crate) const SIZE: u64 = 10;

fn is_marked(state: InventoryState) -> bool {
    matches!(state, InventoryState::Destroying | InventoryState::Sweeping)
}

/// Judges what the store shows, and notes in the model what has gone that was free to.
pub(crate) fn check(state: &mut State, past: &mut Past, view: &View) -> Accepted {
    forgotten(state, view)?;
    aside(state, past, view)?;
    restored(state, past, view)?;
    artifacts(state, view)?;
    owners(state, view)?;
    volumes(state, view)?;
    containers(state, view)?;
    past.look(view)?;
    // What is neither known nor there any more is of no interest.
    let is_aside = |id: &Uuid| view.aside.contains(id);
    state.volumes.retain(|id, volume| volume.on_disk || view.volumes.contains_key(id) || is_aside(id));
    state
        .containers
        .retain(|id, container| container.on_disk || view.containers.contains_key(id) || is_aside(id));
    Ok(())
}

/// Nothing is left of a worker that was forgotten. That it does not come again is looked at with all that was.
fn forgotten(state: &mut State, view: &View) -> Accepted {
    for id in std::mem::take(&mut state.forgotten) {
        let is_there = view.volumes.contains_key(&id) || view.containers.contains_key(&id);
        must!(!is_there, "{id} was on a worker that was forgotten, and is there");
    }
    Ok(())
}

/// What is set aside stays that until somebody decides, and is nothing that the store knows.
fn aside(state: &mut State, past: &mut Past, view: &View) -> Accepted {
    let is_known = |id: &Uuid| view.volumes.contains_key(id) || view.containers.contains_key(id);
    for id in &view.aside {
        must!(!is_known(id), "{id} is set aside, and known");
        let was_made = state.volumes.contains_key(id) || state.containers.contains_key(id);
        must!(was_made, "{id} is set aside, and nobody made it");
        // It may come again, by whoever decides about it.
        past.forgotten.remove(id);
    }
    state.look_aside(&view.aside, is_known)
}

fn artifacts(state: &mut State, view: &View) -> Accepted {
    for (artifact, record) in &mut state.artifacts {
        // Whoever abandons a transfer marks its artifact at once, unless another transfer fills it: then it goes on as before.
        let seen = view.artifacts.get(&artifact_id(*artifact));
        record.abandoned &= seen.is_none_or(|seen| seen.state == ArtifactState::Deleting);
    }
    let kept = state.kept();
    let all: Vec<Artifact> = state.artifacts.keys().copied().collect();
    for artifact in all {
        let seen = view.artifacts.get(&artifact_id(artifact));
        let seen = seen.filter(|seen| seen.state != ArtifactState::Deleting);
        let keeper = kept.get(&artifact);
        let Some(seen) = seen else {
            must!(keeper.is_none(), "{artifact:?} is kept by {keeper:?}, and marked or gone");
            if let Some(record) = state.artifacts.get_mut(&artifact) {
                record.gone = true;
            }
            continue;
        };
        let Some(record) = state.artifacts.get_mut(&artifact) else { continue };
        if std::mem::take(&mut record.doubtful)
            && seen.state == ArtifactState::Open
            && record.sealed.is_some()
        {
            state.reopen(artifact);
            continue;
        }
        must!(!record.gone, "{artifact:?} was marked or gone, and is there again");
        let says_so = keeper.is_none() || !seen.kept_by.is_empty();
        must!(says_so, "{artifact:?} is kept by {keeper:?}, and by nothing as far as the store says");
        match record.sealed {
            None => must!(seen.state == ArtifactState::Open, "{artifact:?} is sealed, and nobody did"),
            Some(content) => {
                must!(seen.state == ArtifactState::Sealed, "{artifact:?} was sealed, and is open");
                let same = seen.digest == digest_of(content).as_bytes() && seen.size_bytes == SIZE;
                must!(same, "{artifact:?} was sealed with {content}, and is {seen:?}");
                if let Some(keeper) = keeper {
                    let there: Vec<_> = state.replicas(artifact, content).map(|(id, _)| id).collect();
                    let found = there.is_empty() || there.iter().any(|id| seen.replicas.contains(id));
                    must!(
                        found,
                        "{artifact:?}, kept by {keeper}, is held by {there:?}, and found at {:?}",
                        seen.replicas
                    );
                }
            }
        }
    }
    let known: BTreeSet<_> = state.artifacts.keys().map(|artifact| artifact_id(*artifact)).collect();
    let unknown = view.artifacts.keys().find(|id| !known.contains(*id));
    must!(unknown.is_none(), "artifact {unknown:?} is there, and nobody made it");
    Ok(())
}

/// Of an artifact that came back, what is marked still stays so, and the rest is as if it had never been.
fn restored(state: &mut State, past: &mut Past, view: &View) -> Accepted {
    let back = state.artifacts.iter_mut();
    let back = back.filter_map(|(artifact, record)| Some((*artifact, record.restored.take()?)));
    for (artifact, restored) in back.collect::<Vec<_>>() {
        let of_artifact =
            state.volumes.iter_mut().filter(|(_, volume)| volume.is_replica() && volume.is_of(artifact));
        let mut there = false;
        for (id, volume) in of_artifact {
            let goes_on = view.volumes.get(id).is_some_and(|seen| !is_marked(seen.state));
            // One that was dropped may be the last resort.
            volume.revoked = !goes_on || (volume.revoked && !volume.dropped);
            volume.dropped &= !goes_on;
            // The transfer that made it is over.
            volume.claimed_until = volume.claimed_until.map(|_| i64::MIN);
            if goes_on {
                past.marked.remove(id);
                there = true;
            }
        }
        let in_store = state.sealed(artifact).is_some_and(|content| content >= TREES);
        let has_bytes = there || in_store;
        must!(has_bytes || restored == Restored::Perhaps, "{artifact:?} came back, and none of its replicas");
    }
    Ok(())
}

/// What certainly owns an artifact is among what the store says keeps it.
fn owners(state: &State, view: &View) -> Accepted {
    let of_builds = state.artifacts.keys().flat_map(|artifact| {
        state.owners(*artifact).map(|build| (*artifact, format!("build {}", build_id(build))))
    });
    let of_workers = state.held_by_workers().filter_map(|(artifact, words)| Some((artifact, words?)));
    for (artifact, owner) in of_builds.chain(state.held_by_caches()).chain(of_workers) {
        // Whether it is there was looked at before.
        let seen = view.artifacts.get(&artifact_id(artifact));
        let Some(seen) = seen.filter(|seen| seen.state != ArtifactState::Deleting) else { continue };
        let says_so = seen.kept_by.contains(&owner) || seen.kept_by.len() > 50;
        must!(says_so, "{artifact:?} is owned by {owner}, and the store says {:?}", seen.kept_by);
    }
    Ok(())
}

fn volumes(state: &State, view: &View) -> Accepted {
    let kept = state.kept();
    for (id, volume) in &state.volumes {
        let seen = view.volumes.get(id);
        if let Some(need) = state.need_of_volume(*id, &kept) {
            let is_there = seen.is_some_and(|seen| !is_marked(seen.state));
            must!(is_there, "volume {id} is needed by {need}, and is {seen:?}");
        }
        must!(
            seen.is_some() || !volume.on_disk || volume.late,
            "volume {id} was forgotten although it is there: {volume:?}"
        );
        // Whatever makes a volume garbage marks it at once, unless its artifact was marked before and takes it along.
        let artifact = seen.and_then(|seen| view.artifacts.get(&seen.artifact?));
        let goes_on = artifact.is_some_and(|artifact| artifact.state != ArtifactState::Deleting);
        let is_garbage = seen.is_none_or(|seen| is_marked(seen.state));
        must!(
            is_garbage || !volume.revoked || !goes_on,
            "volume {id} is garbage, and not marked: {volume:?}"
        );
    }
    for (id, seen) in view.volumes.iter().filter(|(_, seen)| !is_marked(seen.state)) {
        let Some(parent) = seen.parent else { continue };
        let of_parent = view.volumes.get(&parent);
        let is_dropped = |parent: &Uuid| state.volumes.get(parent).is_some_and(|parent| parent.revoked);
        let is_there = of_parent.is_some_and(|seen| match seen.state {
            // It waits for its children.
            InventoryState::Destroying => is_dropped(&parent) || state.came_back(*id),
            state => !is_marked(state),
        });
        must!(is_there, "volume {id} is no garbage, and its parent {parent} is {of_parent:?}");
    }
    Ok(())
}

fn containers(state: &State, view: &View) -> Accepted {
    for (id, container) in &state.containers {
        let seen = view.containers.get(id);
        if let Some(need) = state.need_of_container(*id) {
            let is_there = seen.is_some_and(|seen| !is_marked(*seen));
            must!(is_there, "container {id} is needed by {need}, and is {seen:?}");
        }
        must!(
            seen.is_some() || !container.on_disk || container.late,
            "container {id} was forgotten although it is there: {container:?}"
        );
    }
    Ok(())
}

impl Past {
    fn look(&mut self, view: &View) -> Accepted {
        let volumes = view.volumes.iter().map(|(id, seen)| (*id, seen.state));
        let seen: BTreeMap<Uuid, _> =
            volumes.chain(view.containers.iter().map(|(id, seen)| (*id, *seen))).collect();
        for (id, state) in &seen {
            must!(!self.forgotten.contains(id), "{id} was forgotten, and is there again");
            must!(is_marked(*state) || !self.marked.contains(id), "{id} was marked, and is {state:?} again");
        }
        let gone: Vec<_> = self.known.iter().filter(|id| !seen.contains_key(*id)).copied().collect();
        for id in gone {
            self.known.remove(&id);
            self.marked.remove(&id);
            self.forgotten.insert(id);
        }
        self.known.extend(seen.keys());
        self.marked.extend(seen.iter().filter(|(_, state)| is_marked(**state)).map(|(id, _)| *id));
        Ok(())
    }
}

/// What must be there when everything that was to end has ended, and all that was free to go has gone: what builds still own, its replicas,
/// and nothing else.
pub(crate) fn settled(state: &State, view: &View) -> Accepted {
    let kept = state.kept();
    // What is kept, and what that is a copy-on-write child of. One that is lost is kept in mind: it may come back with its worker.
    let holds_kept =
        |id: &&Uuid| state.holds_replica(**id).is_some_and(|artifact| kept.contains_key(&artifact));
    let mut of_kept: BTreeSet<Uuid> = state.volumes.keys().filter(holds_kept).copied().collect();
    let mut next: Vec<_> = of_kept.iter().copied().collect();
    while let Some(id) = next.pop() {
        let parent = view.volumes.get(&id).and_then(|seen| seen.parent);
        next.extend(parent.filter(|parent| of_kept.insert(*parent)));
    }
    let left: Vec<_> = view.volumes.iter().filter(|(id, _)| !of_kept.contains(id)).collect();
    must!(left.is_empty(), "these volumes are of nothing that is kept, and left: {left:?}");

    let kept_ids: BTreeSet<_> = kept.keys().map(|artifact| artifact_id(*artifact)).collect();
    let missing: Vec<_> = kept_ids.iter().filter(|id| !view.artifacts.contains_key(id)).collect();
    must!(missing.is_empty(), "these artifacts are kept, and gone: {missing:?}");
    // One that went stays behind as long as a volume of it, which is the parent of something that is kept.
    let parents: BTreeSet<_> = of_kept.iter().filter_map(|id| view.volumes.get(id)?.artifact).collect();
    let is_tombstone =
        |id: &ArtifactId, seen: &SeenArtifact| seen.state == ArtifactState::Deleting && parents.contains(id);
    let left = view.artifacts.iter().filter(|(id, seen)| !kept_ids.contains(id) && !is_tombstone(id, seen));
    let left: Vec<_> = left.collect();
    must!(left.is_empty(), "nobody keeps these artifacts, and they are left: {left:?}");

    must!(view.containers.is_empty(), "containers are left: {:?}", view.containers);
    let on_disk = state.volumes.iter().filter(|(id, volume)| volume.on_disk && !of_kept.contains(id));
    let on_disk: Vec<_> = on_disk.collect();
    must!(on_disk.is_empty(), "these are on a disk still: {on_disk:?}");
    let on_disk: Vec<_> = state.containers.iter().filter(|(_, container)| container.on_disk).collect();
    must!(on_disk.is_empty(), "these are on a disk still: {on_disk:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    //! The checks can fail: each is shown an answer that must not be.

    use rpc::pb::artifacts as pb;

    use super::super::operations::{Make, Operation, Outputs, Status, Trespass, User, Way};
    use super::super::state::{Found, GC_GRACE, Outcome, RESOURCE_CACHE_TTL, Standing, stray_id, worker_id};
    use super::*;

    const REPLICA: Uuid = Uuid::from_u128(1);
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

    /// A build owns an artifact with one replica, and a workload that pins it has prepared an attempt.
    fn in_use() -> (State, View) {
        let mut state = State::new(1);
        let build = Operation::PutBuild { build: 0, ends_with: 9, keep: 0, term: 600, job: None };
        accepted(&mut state, build, Outcome::Done);
        accepted(&mut state, Operation::Create { upload: 0, owner: Some(0) }, Outcome::Done);
        let plan = Operation::Plan { transfer: 0, artifact: ARTIFACT, worker: 0, make: Make::Now };
        let planned = Outcome::Planned { handle: REPLICA, outcome: pb::PlanOutcome::Yours };
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
        let mut past = Past::default();
        check(&mut state, &mut past, &view).expect("nothing is wrong yet");
        spoil(&mut state, &mut view);
        check(&mut state, &mut past, &view)
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
    fn what_is_kept_and_marked_is_found() {
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
    fn what_a_cache_owns_and_is_marked_is_found() {
        let (mut state, mut view) = in_use();
        let cache = Uuid::from_u128(5);
        let ask = Operation::AskCache { cache: 0, claim: 0, user: Some(User::OfWorkload(2)) };
        accepted(&mut state, ask.clone(), Outcome::Asked { cache, found: Found::Yours });
        accepted(&mut state, Operation::PutCache { claim: 0, artifact: ARTIFACT }, Outcome::Done);
        assert_found(check(&mut state, &mut Past::default(), &view), "is owned by resource cache");
        artifact_in(&mut view).kept_by.push(format!("resource cache {cache}"));
        check(&mut state, &mut Past::default(), &view).expect("it says so now");

        let settle = Operation::Settle {
            workload: 1,
            attempt: 0,
            status: Status::Failed,
            outputs: Outputs::NoOutput,
            build: None,
        };
        accepted(&mut state, settle, Outcome::Settled { missing: vec![] });
        accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
        accepted(&mut state, Operation::Advance { seconds: 1000 }, Outcome::Done);
        check(&mut state.clone(), &mut Past::default(), &view).expect("the cache is used");
        artifact_in(&mut view).state = ArtifactState::Deleting;
        assert_found(check(&mut state.clone(), &mut Past::default(), &view), "marked or gone");
        assert_found(state.accept(&Operation::DeleteCache { cache: 0 }, &Outcome::Done), "it is used");
        let (user, now) = (User::OfWorkload(2), Outcome::Done);
        accepted(&mut state, Operation::ReleaseCache { cache: 0, user }, now);
        let seconds = u32::try_from(RESOURCE_CACHE_TTL).expect("few");
        accepted(&mut state, Operation::Advance { seconds }, Outcome::Done);
        check(&mut state, &mut Past::default(), &view).expect("nobody used it for long");
        let other = Uuid::from_u128(6);
        accepted(&mut state, ask, Outcome::Asked { cache: other, found: Found::Yours });
        let ask = Operation::AskCache { cache: 0, claim: 1, user: None };
        let twice = Outcome::Asked { cache: other, found: Found::Yours };
        assert_found(state.accept(&ask, &twice), "somebody else makes it");
    }

    #[test]
    fn what_went_although_it_came_back_is_found() {
        let (mut state, mut view) = in_use();
        let settle = Operation::Settle {
            workload: 1,
            attempt: 0,
            status: Status::Aborted,
            outputs: Outputs::NoOutput,
            build: None,
        };
        accepted(&mut state, settle, Outcome::Settled { missing: vec![] });
        accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
        let_the_grace_pass(&mut state);
        let before = view.clone();
        artifact_in(&mut view).state = ArtifactState::Deleting;
        for volume in view.volumes.values_mut() {
            volume.state = InventoryState::Destroying;
        }
        let mut past = Past::default();
        check(&mut state, &mut past, &view).expect("nothing keeps it");
        let undelete = Operation::Undelete { artifact: ARTIFACT, owner: None, keep: 50 };
        accepted(&mut state, undelete, Outcome::Done);
        assert_found(check(&mut state.clone(), &mut past.clone(), &view), "none of its replicas");
        view.volumes.get_mut(&REPLICA).expect("there").state = InventoryState::Created;
        assert_found(check(&mut state.clone(), &mut past.clone(), &view), "marked or gone");
        view.artifacts = before.artifacts;
        check(&mut state, &mut past, &view).expect("its replica came back");
        view.volumes.get_mut(&REPLICA).expect("there").state = InventoryState::Destroying;
        assert_found(check(&mut state, &mut past, &view), "is needed by");
    }

    #[test]
    fn what_was_sealed_and_changed_is_found() {
        assert_found(judge(|_, view| artifact_in(view).size_bytes += 1), "was sealed with 7");
        assert_found(judge(|_, view| artifact_in(view).digest[0] ^= 1), "was sealed with 7");
        assert_found(judge(|_, view| artifact_in(view).state = ArtifactState::Open), "and is open");
        assert_found(judge(|_, view| artifact_in(view).replicas.clear()), "found at");
        assert_found(judge(|_, view| artifact_in(view).kept_by.clear()), "by nothing");
    }

    #[test]
    fn what_went_and_came_again_is_found() {
        let (mut state, mut view) = in_use();
        let settle = Operation::Settle {
            workload: 1,
            attempt: 0,
            status: Status::Aborted,
            outputs: Outputs::NoOutput,
            build: None,
        };
        accepted(&mut state, settle, Outcome::Settled { missing: vec![] });
        accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
        let_the_grace_pass(&mut state);
        let mut past = Past::default();
        check(&mut state, &mut past, &view).expect("it may be there still");
        let before = view.clone();
        artifact_in(&mut view).state = ArtifactState::Deleting;
        for volume in view.volumes.values_mut() {
            volume.state = InventoryState::Sweeping;
        }
        check(&mut state, &mut past, &view).expect("nothing keeps it");
        assert_found(past.clone().look(&before), "was marked, and is Created again");
        assert_found(check(&mut state, &mut past, &before), "is there again");
        past.look(&View::default()).expect("it may go");
        assert_found(past.look(&view), "was forgotten, and is there again");
    }

    #[test]
    fn what_is_left_of_a_forgotten_worker_is_found() {
        let (mut state, mut view) = in_use();
        let forget = |force| Operation::ForgetWorker { worker: 0, force };
        let forgotten = state.clone().accept(&forget(false), &Outcome::Done);
        assert_found(forgotten, "it has the last replica");
        accepted(&mut state.clone(), forget(false), refused(rpc::Reason::LastReplica));
        let refusal = refused(rpc::Reason::LastReplica);
        assert_found(state.accept(&forget(true), &refusal), "nothing in its way");
        let mut past = Past::default();
        check(&mut state, &mut past, &view).expect("nothing is wrong yet");
        let before = view.clone();
        accepted(&mut state, forget(true), Outcome::Done);
        assert_found(check(&mut state.clone(), &mut past.clone(), &view), "that was forgotten, and is there");
        view.volumes.clear();
        view.containers.clear();
        artifact_in(&mut view).replicas.clear();
        check(&mut state, &mut past, &view).expect("all of it went");
        assert_found(check(&mut state, &mut past, &before), "was forgotten, and is there again");
        let response =
            pb::ReportResponse { unknown_volume_handles: vec![INPUT.to_string()], ..Default::default() };
        let report = Operation::Report { worker: 0, which: 0, way: Way::Once };
        let reported = |standing| Outcome::Reported { response: response.clone(), standing, listed: vec![] };
        assert_found(state.accept(&report, &reported(Standing::OfForgotten)), "too late");
        accepted(&mut state, report, reported(Standing::Good));
        assert!(!state.is_on_disk(INPUT), "it was told to destroy it");
    }

    #[test]
    fn a_task_cache_that_starts_with_another_version_is_found() {
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
    fn what_is_a_workers_and_marked_is_found() {
        let (mut state, mut view) = in_use();
        let put = |resource| Operation::PutBase { worker: 0, resource, artifact: ARTIFACT };
        let refusal = refused(rpc::Reason::ArtifactNotFound);
        assert_found(state.accept(&put(None), &refusal), "nothing in its way");
        accepted(&mut state, put(None), Outcome::Done);
        assert_found(check(&mut state.clone(), &mut Past::default(), &view), "owned by resource certs");
        artifact_in(&mut view).kept_by.push(format!("resource certs of worker {}", worker_id(0)));
        check(&mut state, &mut Past::default(), &view).expect("it says so now");
        accepted(&mut state, put(Some(0)), Outcome::Done);
        accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
        let settle = Operation::Settle {
            workload: 1,
            attempt: 0,
            status: Status::Failed,
            outputs: Outputs::NoOutput,
            build: None,
        };
        accepted(&mut state, settle, Outcome::Settled { missing: vec![] });
        let_the_grace_pass(&mut state);
        artifact_in(&mut view).state = ArtifactState::Deleting;
        assert_found(check(&mut state.clone(), &mut Past::default(), &view), "marked or gone");
        // It goes with its worker.
        let forget = Operation::ForgetWorker { worker: 0, force: false };
        accepted(&mut state, forget, Outcome::Done);
        view.volumes.clear();
        view.containers.clear();
        check(&mut state, &mut Past::default(), &view).expect("nothing keeps it");
    }

    #[test]
    fn what_another_team_may_is_found() {
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
    fn what_was_set_aside_and_went_undecided_is_found() {
        let (mut state, mut view) = in_use();
        let mut past = Past::default();
        let stray = stray_id(0, 5);
        accepted(&mut state, Operation::Stray { worker: 0, upload: 5, content: 3 }, Outcome::Done);
        accepted(&mut state, Operation::NewLife { worker: 0 }, Outcome::Done);
        let report = Operation::Report { worker: 0, which: 0, way: Way::Once };
        let reported = |unknown: &[Uuid]| {
            let unknown_volume_handles = unknown.iter().map(Uuid::to_string).collect();
            let response = pb::ReportResponse { unknown_volume_handles, ..Default::default() };
            Outcome::Reported { response, standing: Standing::Good, listed: vec![stray] }
        };
        assert_found(state.clone().accept(&report, &reported(&[stray])), "in another life");
        accepted(&mut state, report.clone(), reported(&[]));
        assert_found(check(&mut state.clone(), &mut past.clone(), &view), "is not set aside");
        view.aside.insert(stray);
        check(&mut state, &mut past, &view).expect("it is set aside");
        assert_found(state.clone().accept(&report, &reported(&[stray])), "and to be destroyed");
        let sweep = Operation::Sweep { worker: 0, destroy: true };
        assert_found(state.clone().accept(&sweep, &Outcome::Swept(vec![stray])), "and set aside");
        let forget = Operation::ForgetWorker { worker: 0, force: false };
        assert_found(state.clone().accept(&forget, &Outcome::Done), "the last replica");
        let mut known = view.clone();
        known.volumes.insert(stray, view.volumes[&REPLICA].clone());
        assert_found(check(&mut state.clone(), &mut past.clone(), &known), "set aside, and known");
        view.aside.clear();
        assert_found(check(&mut state.clone(), &mut past.clone(), &view), "nobody had decided");

        let adopt = Operation::AdoptAside { which: 0, owner: Some(0), keep: 0 };
        let artifact = Some(artifact_id(Artifact::Upload(5)));
        let decided = |answer| Outcome::Decided { about: stray, answer };
        let Outcome::Refused(refusal) = refused(rpc::Reason::NotAdoptable) else { unreachable!() };
        accepted(&mut state.clone(), adopt.clone(), decided(Err(refusal.clone())));
        accepted(&mut state, Operation::Describe { worker: 0 }, Outcome::Done);
        assert_found(state.accept(&adopt, &decided(Err(refusal))), "nothing in its way");
        accepted(&mut state, adopt, decided(Ok(artifact)));
        assert_found(check(&mut state, &mut past, &view), "is kept by");
    }

    #[test]
    fn what_is_on_a_disk_and_forgotten_is_found() {
        let (mut state, mut view) = in_use();
        accepted(&mut state, Operation::EndAttempt { workload: 1, attempt: 0 }, Outcome::Done);
        let_the_grace_pass(&mut state);
        view.volumes.remove(&INPUT);
        assert_found(check(&mut state, &mut Past::default(), &view), "forgotten although it is there");
        let response =
            pb::ReportResponse { unknown_volume_handles: vec![INPUT.to_string()], ..Default::default() };
        let report = Operation::Report { worker: 0, which: 0, way: Way::Once };
        let reported =
            Outcome::Reported { response: response.clone(), standing: Standing::Good, listed: vec![] };
        assert_found(state.accept(&report, &reported), "forgotten although it was there");
        let reported = Outcome::Reported { response, standing: Standing::Overtaken, listed: vec![] };
        assert_found(state.accept(&report, &reported), "too late");
    }

    #[test]
    fn answers_that_must_not_be_are_found() {
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
        let settle = Operation::Settle {
            workload: 1,
            attempt: 0,
            status: Status::Failed,
            outputs: Outputs::NoOutput,
            build: None,
        };
        accepted(&mut state, settle, Outcome::Settled { missing: vec![] });
        accepted(&mut state, Operation::DeleteBuild { build: 0 }, Outcome::Done);
        assert_found(state.clone().accept(&sweep, &parent_first), "before its child");
        let with_build = Operation::Accept { workload: 2, pins: Vec::new(), build: Some(0) };
        assert_found(state.accept(&with_build, &Outcome::Done), "its build has ended");
    }

    #[test]
    fn what_is_left_or_missing_in_the_end_is_found() {
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
        assert_found(settled(&state, &view), "nobody keeps these");
    }
}
