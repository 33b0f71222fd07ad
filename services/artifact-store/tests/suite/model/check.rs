//! Comparison of the store's lists with the model: kept items exist, and deleted items do not
//! return.

use std::collections::{BTreeMap, BTreeSet};

use domain::ArtifactId;
use rpc::pb::artifacts::{ArtifactState, InventoryState};
use uuid::Uuid;

use super::operations::{Artifact, TREES};
use super::state::{Accepted, Restored, State, Violation, artifact_id, build_id, digest_of, must};

/// Lists of the store. They are requested one after the other, while collections may run.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    pub(crate) artifacts: BTreeMap<ArtifactId, SeenArtifact>,
    pub(crate) volumes: BTreeMap<Uuid, SeenVolume>,
    pub(crate) containers: BTreeMap<Uuid, InventoryState>,
    /// Orphans.
    pub(crate) orphans: BTreeSet<Uuid>,
}

#[derive(Debug, Clone)]
pub(crate) struct SeenArtifact {
    pub(crate) state: ArtifactState,
    pub(crate) digest: Vec<u8>,
    pub(crate) size_bytes: u64,
    pub(crate) replicas: Vec<Uuid>,
    /// References that keep it, from the store.
    pub(crate) kept_by: Vec<String>,
}

#[derive(Debug, Clone)]
pub(crate) struct SeenVolume {
    pub(crate) state: InventoryState,
    pub(crate) parent: Option<Uuid>,
    /// Artifact of which it is or will be a replica.
    pub(crate) artifact: Option<ArtifactId>,
}

/// Observations that never revert.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// Volumes and containers that existed.
    known: BTreeSet<Uuid>,
    /// Volumes and containers that were marked.
    marked: BTreeSet<Uuid>,
    /// Volumes and containers that were forgotten.
    forgotten: BTreeSet<Uuid>,
}

/// Bytes of every complete item in these tests.
pub(crate) const SIZE: u64 = 10;

fn is_marked(state: InventoryState) -> bool {
    matches!(state, InventoryState::Destroying | InventoryState::Sweeping)
}

/// Checks the store's lists, and records permitted deletions in the model.
pub(crate) fn check(state: &mut State, history: &mut History, view: &View) -> Accepted {
    forgotten(state, view)?;
    orphans(state, history, view)?;
    restored(state, history, view)?;
    artifacts(state, view)?;
    owners(state, view)?;
    volumes(state, view)?;
    containers(state, view)?;
    history.look(view)?;
    note_sure(state, view);
    // Unknown items that do not exist and will not be created are irrelevant.
    let mut may_be = state.to_be_made();
    may_be.extend(&view.orphans);
    state.volumes.retain(|id, it| it.on_disk || view.volumes.contains_key(id) || may_be.contains(id));
    state.containers.retain(|id, it| it.on_disk || view.containers.contains_key(id) || may_be.contains(id));
    Ok(())
}

/// Checks that nothing is left of a forgotten worker. The check of past items covers its return.
fn forgotten(state: &mut State, view: &View) -> Accepted {
    for id in std::mem::take(&mut state.forgotten) {
        let is_there = view.volumes.contains_key(&id) || view.containers.contains_key(&id);
        must!(!is_there, "{id} was on a worker that was forgotten, and is there");
    }
    Ok(())
}

/// Checks that orphans stay orphans until a decision, and are unknown to the inventory.
fn orphans(state: &mut State, history: &mut History, view: &View) -> Accepted {
    let is_known = |id: &Uuid| view.volumes.contains_key(id) || view.containers.contains_key(id);
    for id in &view.orphans {
        must!(!is_known(id), "{id} is an orphan, and known");
        let was_made = state.volumes.contains_key(id) || state.containers.contains_key(id);
        must!(was_made, "{id} is an orphan, and was never made");
        // An adopted or purged orphan may appear again.
        history.forgotten.remove(id);
    }
    state.update_orphans(&view.orphans, is_known)
}

fn artifacts(state: &mut State, view: &View) -> Accepted {
    let given_up = state.given_up();
    for (artifact, record) in &mut state.artifacts {
        // Abandoning a transfer marks its artifact at once, unless another transfer fills the
        // artifact. A collection marks the artifact of a transfer whose claim has expired.
        let seen = view.artifacts.get(&artifact_id(*artifact));
        record.abandoned |= given_up.contains(artifact);
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
            None => must!(seen.state == ArtifactState::Open, "{artifact:?} is sealed, and was never sealed"),
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
    must!(unknown.is_none(), "artifact {unknown:?} is there, and was never made");
    Ok(())
}

/// Checks a restored artifact: its marked replicas stay marked, and the others are as before.
fn restored(state: &mut State, history: &mut History, view: &View) -> Accepted {
    let back = state.artifacts.iter_mut();
    let back = back.filter_map(|(artifact, record)| Some((*artifact, record.restored.take()?)));
    for (artifact, restored) in back.collect::<Vec<_>>() {
        let in_store = state.sealed(artifact).is_some_and(|content| content >= TREES);
        // A replica that was deleted or lost in this step may not have existed.
        let goes_on = |id: &Uuid| view.volumes.get(id).is_some_and(|it| it.state == InventoryState::Created);
        let is_other =
            |id: &&Uuid| state.volumes.get(*id).is_some_and(|it| it.is_of(artifact)) && goes_on(id);
        let sure = state.sure.iter().find(is_other).copied();
        let of_artifact =
            state.volumes.iter_mut().filter(|(_, volume)| volume.is_replica() && volume.is_of(artifact));
        let mut there = false;
        for (id, volume) in of_artifact {
            let goes_on = view.volumes.get(id).is_some_and(|seen| !is_marked(seen.state));
            let is_last_resort = sure.is_none() && !in_store;
            let was_dropped = volume.dropped && history.marked.contains(id);
            must!(
                !(goes_on && was_dropped) || is_last_resort,
                "{id} was dropped, and came back with {artifact:?}, of which {sure:?} or the store has the bytes"
            );
            volume.revoked = !goes_on || (volume.revoked && !volume.dropped);
            volume.dropped &= !goes_on;
            // The transfer that made it is over.
            volume.claimed_until = volume.claimed_until.map(|_| i64::MIN);
            if goes_on {
                history.marked.remove(id);
                there = true;
            }
        }
        let has_bytes = there || in_store;
        must!(has_bytes || restored == Restored::Perhaps, "{artifact:?} came back, and none of its replicas");
    }
    Ok(())
}

/// Records which replicas certainly count if their artifacts are restored: existing ones, and those
/// deleted with their artifacts.
fn note_sure(state: &mut State, view: &View) {
    let is_sure = |id: &Uuid| match view.volumes.get(id).map(|seen| seen.state) {
        Some(InventoryState::Created) => true,
        Some(InventoryState::Destroying) => state.sure.contains(id),
        _ => false,
    };
    let all = state.volumes.iter().filter(|(id, volume)| is_sure(id) && state.is_sure(volume));
    state.sure = all.map(|(id, _)| *id).collect();
}

/// Checks that the store lists every certain owner of an artifact, and no removed one.
fn owners(state: &State, view: &View) -> Accepted {
    for (artifact, record) in &state.artifacts {
        let Some(seen) = view.artifacts.get(&artifact_id(*artifact)) else { continue };
        let owns = |build: &&u16| seen.kept_by.contains(&format!("build {}", build_id(**build)));
        let owner = record.taken_from.iter().find(owns);
        must!(
            owner.is_none(),
            "{artifact:?} was taken from {owner:?}, and the store says {:?}",
            seen.kept_by
        );
    }
    let of_builds = state.artifacts.keys().flat_map(|artifact| {
        state.owners(*artifact).map(|build| (*artifact, format!("build {}", build_id(build))))
    });
    let of_workers = state.held_by_workers().filter_map(|(artifact, words)| Some((artifact, words?)));
    for (artifact, owner) in of_builds.chain(state.held_by_caches()).chain(of_workers) {
        // The existence of the artifact was checked before.
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
        // A mark of a volume is immediate, unless the artifact was marked before, with which the
        // volume is deleted.
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
        let is_there = match of_parent.map(|seen| seen.state) {
            // It waits for its children.
            Some(InventoryState::Destroying) => is_dropped(&parent) || state.came_back(*id),
            Some(state) => !is_marked(state),
            // Its worker has lost it, but not its children.
            None => state.volumes.get(&parent).is_some_and(|parent| !parent.on_disk),
        };
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

impl History {
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

/// Checks the final state: exactly the artifacts of remaining builds, with their replicas, are
/// left.
pub(crate) fn settled(state: &State, view: &View) -> Accepted {
    let kept = state.kept();
    // Kept artifacts, and the parents of their replicas. Lost replicas count, because they may
    // return with their worker.
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
    // A deleted artifact stays as long as one of its volumes is the parent of a kept volume.
    let parents: BTreeSet<_> = of_kept.iter().filter_map(|id| view.volumes.get(id)?.artifact).collect();
    let is_tombstone =
        |id: &ArtifactId, seen: &SeenArtifact| seen.state == ArtifactState::Deleting && parents.contains(id);
    let left = view.artifacts.iter().filter(|(id, seen)| !kept_ids.contains(id) && !is_tombstone(id, seen));
    let left: Vec<_> = left.collect();
    must!(left.is_empty(), "these artifacts are left and not kept: {left:?}");

    must!(view.containers.is_empty(), "containers are left: {:?}", view.containers);
    let on_disk = state.volumes.iter().filter(|(id, volume)| volume.on_disk && !of_kept.contains(id));
    let on_disk: Vec<_> = on_disk.collect();
    must!(on_disk.is_empty(), "these are on a disk still: {on_disk:?}");
    let on_disk: Vec<_> = state.containers.iter().filter(|(_, container)| container.on_disk).collect();
    must!(on_disk.is_empty(), "these are on a disk still: {on_disk:?}");
    Ok(())
}

#[cfg(test)]
mod tests;
