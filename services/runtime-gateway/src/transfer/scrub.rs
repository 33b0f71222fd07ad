//! The scrub: hashing of complete volumes in the background, so that damage is found before the
//! last intact replica is lost.
//!
//! A pass hashes the volumes of this machine one by one, in the order of their handles, while no
//! attempt and no transfer runs. It continues after a restart of the gateway. A volume whose
//! manifest was stored within the term of a pass is skipped, because its contents were hashed then.
//! The next pass begins a term after this one.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use domain::{VolumeHandle, error_chain};
use runtime::{Contents, RuntimeError};
use transfer::Manifest;
use uuid::Uuid;

use super::Transfers;
use super::error::ManifestError;
use super::verify::{self, Comparison};
use crate::clients::scheduler_messages::AttemptPhase;
use crate::util::blocking::blocking;
use crate::util::keyed_locks::lock;

/// Time in which each volume is hashed once.
const TERM: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// Pause between two volumes, and before the first one.
const PAUSE: Duration = Duration::from_secs(3 * 60);
/// Longest pause between two passes, after which the clock is read again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60 * 60);
/// Number of interrupted tries after which a volume is left to the next pass.
const MAX_INTERRUPTIONS: usize = 3;
/// Pause of the hashing thread, in which it checks whether work has begun.
const STEP: Duration = Duration::from_secs(1);

/// The state of a pass, which is stored beside the manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pass {
    /// Seconds since the epoch.
    began_at: u64,
    /// The last volume that was hashed.
    last: VolumeHandle,
}

impl Pass {
    fn new() -> Self {
        Self { began_at: seconds(SystemTime::now()), last: VolumeHandle::from_uuid(Uuid::nil()) }
    }

    /// Reads the state. A file that is missing or invalid is replaced by a new pass.
    fn read(path: &Path) -> Self {
        let parsed = std::fs::read_to_string(path).ok().and_then(|text| {
            let (began_at, last) = text.trim().split_once(' ')?;
            Some(Self { began_at: began_at.parse().ok()?, last: last.parse().ok()? })
        });
        parsed.unwrap_or_else(Self::new)
    }

    fn write(self, path: &Path) {
        if let Err(error) = std::fs::write(path, format!("{} {}\n", self.began_at, self.last)) {
            tracing::debug!(%error, "cannot store the state of the scrub: it begins again after a restart");
        }
    }

    /// Returns the time until the next pass.
    fn until_next(self) -> Duration {
        let next = self.began_at.saturating_add(TERM.as_secs());
        Duration::from_secs(next.saturating_sub(seconds(SystemTime::now())))
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Hashes volumes until the gateway stops.
pub(crate) async fn scrub_forever(transfers: Arc<Transfers>) {
    let worker = &transfers.worker;
    let rate = worker.config.scrub_bytes_per_second;
    if rate == 0 {
        return;
    }
    let path = worker.config.manifest_dir.join("scrub");
    let work = async {
        let mut pass = Pass::read(&path);
        let (mut pause, mut interruptions) = (PAUSE, 0);
        loop {
            tokio::time::sleep(pause).await;
            pause = PAUSE;
            if worker.session.current().is_none() || transfers.is_busy() {
                continue;
            }
            match transfers.manifests.next_to_scrub(pass.last, TERM).await {
                Ok(Some(volume)) => {
                    interruptions += 1;
                    // A large volume must not prevent that the others are hashed.
                    if scrub(&transfers, volume, rate).await || interruptions >= MAX_INTERRUPTIONS {
                        interruptions = 0;
                        pass.last = volume;
                        pass.write(&path);
                    }
                }
                Ok(None) if pass.until_next().is_zero() => {
                    pass = Pass::new();
                    pass.write(&path);
                }
                Ok(None) => pause = pass.until_next().clamp(PAUSE, LONGEST_PAUSE),
                Err(error) => tracing::warn!(error = error_chain(&error), "cannot list manifests to scrub"),
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// Hashes one volume. Returns false if work has begun meanwhile, so that it must be hashed again.
pub(super) async fn scrub(transfers: &Arc<Transfers>, volume: VolumeHandle, rate: u64) -> bool {
    let began = Instant::now();
    let (mut hashed, busy) = (0, transfers.clone());
    let may_go_on = move |bytes| {
        hashed += bytes;
        let due = Duration::from_secs_f64(hashed as f64 / rate as f64);
        loop {
            if busy.is_busy() {
                return false;
            }
            // Pauses are long, so that the thread wakes up rarely.
            if due.saturating_sub(began.elapsed()) < STEP {
                return true;
            }
            std::thread::sleep(STEP);
        }
    };
    match hash(transfers, volume, may_go_on).await {
        Ok(is_complete) => is_complete,
        Err(ManifestError::Damaged(loss)) => {
            transfers.announce_loss(loss);
            true
        }
        // It is being destroyed, or was not complete.
        Err(ManifestError::Worker(RuntimeError::VolumeNotFound(_))) => true,
        Err(ManifestError::Worker(error)) => {
            tracing::warn!(volume.handle = %volume, error = error_chain(&error), "cannot scrub a volume");
            true
        }
    }
}

/// Compares the contents of a volume on this machine with its manifest. Calls `may_go_on` with the
/// number of bytes after each step. Returns false if that returned false.
pub(super) async fn hash(
    transfers: &Transfers,
    volume: VolumeHandle,
    mut may_go_on: impl FnMut(u64) -> bool + Send + 'static,
) -> Result<bool, ManifestError> {
    let (runtime, manifests) = (transfers.worker.runtime.as_ref(), &transfers.manifests);
    let Contents::Directory(root) = runtime.contents(volume).await? else { return Ok(true) };
    let Some(stored) = manifests.stored_here(volume).await? else { return Ok(true) };
    let manifest = stored.manifest();
    let is_dropped = Arc::new(AtomicBool::new(false));
    let _guard = DropFlag(is_dropped.clone());
    let expected = manifest.clone();
    let compared = blocking(move || {
        verify::hash(&root, &expected, |bytes| !is_dropped.load(Ordering::Relaxed) && may_go_on(bytes))
    });
    match compared.await? {
        None => Ok(false),
        Some(Comparison::Same) => Ok(true),
        Some(Comparison::Differs(path)) => {
            // It may have been destroyed meanwhile.
            runtime.contents(volume).await?;
            for other in manifests.sharing(runtime, volume, &manifest, &path).await {
                let how = format!("it shares {path:?} of volume {volume}, which differs from its manifest");
                if let ManifestError::Damaged(loss) = manifests.mark_damaged(other, &how).await {
                    transfers.announce_loss(loss);
                }
            }
            Err(manifests.mark_damaged(volume, &format!("{path:?} differs from its manifest")).await)
        }
    }
}

/// Sets a flag when it is dropped.
struct DropFlag(Arc<AtomicBool>);

impl Drop for DropFlag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Transfers {
    /// Whether an attempt or a transfer runs.
    fn is_busy(&self) -> bool {
        let is_active = self.worker.attempts.lock().values().any(|entry| entry.phase != AttemptPhase::Ended);
        is_active || !lock(&self.filling).is_empty()
    }
}

/// Returns the volumes with a manifest in `directory` that was stored before `before`, ascending.
pub(super) fn volumes_stored_before(directory: &Path, before: SystemTime) -> io::Result<Vec<VolumeHandle>> {
    let mut volumes = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let Some(volume) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A file that was removed meanwhile is skipped.
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        if modified.is_ok_and(|modified| modified < before) {
            volumes.push(volume);
        }
    }
    volumes.sort_unstable();
    Ok(volumes)
}

/// Whether two paths lead to one file.
pub(super) fn is_one_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |path: &Path| std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()));
    id(a).is_some_and(|found| Some(found) == id(b))
}

/// Returns the index of the entry of `other` that may be the same file as the entry of `manifest`.
pub(super) fn same_file_in(other: &Manifest, manifest: &Manifest, index: usize) -> Option<usize> {
    other.entries().iter().position(|entry| entry.is_same_file(&manifest.entries()[index]))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rpc::pb::artifacts as store;
    use testing::fake::FakeWorker;

    use super::*;
    use crate::test_support::store::{Store, StoreCall, session};
    use crate::test_support::{FakeGateways, UNREACHABLE, within};

    #[tokio::test(flavor = "multi_thread")]
    async fn scrub_finds_changed_contents_in_all_trees() {
        let machine = FakeWorker::near();
        let [damaged, sharing, whole] =
            [machine.volume("contents").await, machine.volume("").await, machine.volume("contents").await];
        let file = |volume| machine.path(volume).join("file");
        std::fs::remove_file(file(sharing)).expect("removed");
        std::fs::hard_link(file(damaged), file(sharing)).expect("linked");
        let mut store = Store::start().await;
        let worker = machine.gateway(UNREACHABLE, &store.endpoint);
        worker.session.set(Some(session("credential")));
        for volume in [damaged, sharing, whole] {
            let loaded = worker.transfers.manifests.load_verified(worker.runtime.as_ref(), volume, "main");
            loaded.await.expect("a manifest");
        }
        machine.overwrite(damaged, "Contents");
        for volume in [whole, damaged] {
            assert!(scrub(&worker.transfers, volume, u64::MAX).await, "it is hashed");
        }
        let expected = BTreeSet::from([damaged, sharing]);
        assert_eq!(worker.transfers.manifests.damaged(), expected);
        let mut lost = BTreeSet::new();
        while lost.len() < expected.len() {
            let call = within("a report of the loss", store.next_call()).await;
            let StoreCall::Lost(request, answer) = call else { panic!("an unexpected call") };
            lost.extend(
                request
                    .replicas
                    .iter()
                    .map(|replica| replica.volume_handle.parse::<VolumeHandle>().expect("a handle")),
            );
            answer.send(Ok(store::LoseReplicasResponse {})).expect("the gateway waits");
        }
        assert_eq!(lost, expected);
        store.end().await;
    }

    #[tokio::test]
    async fn pass_continues_after_a_restart_and_skips_new_volumes() {
        let machine = FakeWorker::near();
        let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
        let manifests = &worker.transfers.manifests;
        let path = worker.config.manifest_dir.join("scrub");
        let mut volumes = [machine.volume("a").await, machine.volume("b").await, machine.volume("c").await];
        volumes.sort_unstable();
        for volume in volumes {
            manifests.load_verified(worker.runtime.as_ref(), volume, "main").await.expect("a manifest");
        }
        let next = async |last, age| manifests.next_to_scrub(last, age).await.expect("listed");
        let pass = Pass::new();
        assert_eq!(next(pass.last, TERM).await, None, "they were hashed when they were made");
        std::fs::File::open(worker.config.manifest_dir.join(volumes[1].to_string()))
            .and_then(|file| file.set_modified(SystemTime::now() - 2 * TERM))
            .expect("set the time");
        assert_eq!(next(pass.last, TERM).await, Some(volumes[1]));
        Pass { last: volumes[1], ..pass }.write(&path);
        let continued = Pass::read(&path);
        assert_eq!(continued, Pass { last: volumes[1], ..pass });
        assert_eq!(next(continued.last, TERM).await, None);
        assert!(continued.until_next() > TERM - Duration::from_secs(60));
    }
}
