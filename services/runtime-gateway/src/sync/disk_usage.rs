//! Disk usage: the gateway measures how much of the disk each complete volume uses, and tells the
//! artifact store.
//!
//! Trees share files by hard links ([`crate::transfer::write`]), so the use of a volume changes
//! when others are completed or destroyed. After such a change, all volumes of this machine are
//! measured again, one by one and with pauses. New volumes come first, then those whose measurement
//! is oldest.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::{VolumeHandle, error_chain};
use futures::FutureExt;
use runtime::{Contents, Runtime, RuntimeError};
use rustix::fs::{AtFlags, FileType, Stat, fstat, statat};
use transfer::TreeWalk;

use crate::clients::store::DiskUsage;
use crate::transfer::Transfers;
use crate::util::blocking::blocking;

/// Pause after a change, because changes come together.
const AFTER_CHANGE: Duration = Duration::from_secs(1);
/// Longest time for which results are kept before they are sent.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// Pause after the artifact store did not take results.
const AFTER_FAILURE: Duration = Duration::from_secs(60);
/// Most volumes of one call, as the artifact store takes them.
const BATCH: usize = 1000;
/// The pause after each volume, as a multiple of the time in which it was measured.
const PAUSE_FACTOR: u32 = 9;

/// The use of the disk by a volume. `None`: its files are not on this machine.
struct Measurement {
    usage: Option<DiskUsage>,
    at: Instant,
}

/// What was measured in a session, and what the artifact store does not have yet.
#[derive(Default)]
struct Measurements {
    known: HashMap<VolumeHandle, Measurement>,
    unsent: HashMap<VolumeHandle, DiskUsage>,
}

/// Measures volumes until the gateway stops.
pub(crate) async fn measure_forever(transfers: Arc<Transfers>) {
    let worker = &transfers.worker;
    let work = async {
        let (mut measurements, mut of) = (Measurements::default(), None);
        loop {
            let session = worker.session.opened().await;
            // The store may have forgotten what was sent in an earlier session.
            if of.replace(session.session).is_some_and(|of| of != session.session) {
                measurements = Measurements::default();
            }
            if !measure_all(&transfers, &mut measurements, &session.credential).await {
                tokio::time::sleep(AFTER_FAILURE).await;
                continue;
            }
            transfers.volumes_changed.notified().await;
            tokio::time::sleep(AFTER_CHANGE).await;
        }
    };
    tokio::select! {
        () = work => {}
        () = worker.stopping.cancelled() => {}
    }
}

/// Measures all complete volumes once, those of a change meanwhile first. Returns whether the store
/// has all results.
async fn measure_all(transfers: &Transfers, measurements: &mut Measurements, credential: &str) -> bool {
    if !send(transfers, measurements, credential).await {
        return false;
    }
    let mut sent_at = Instant::now();
    let mut queue = list(transfers, &mut measurements.known).await;
    while let Some(volume) = queue.pop_front() {
        let began = Instant::now();
        match measure(&*transfers.worker.runtime, volume).await {
            Ok(usage) => {
                let before = measurements.known.insert(volume, Measurement { usage, at: began });
                let is_new = before.and_then(|before| before.usage) != usage;
                measurements.unsent.extend(usage.filter(|_| is_new).map(|usage| (volume, usage)));
            }
            // It was destroyed meanwhile.
            Err(RuntimeError::VolumeNotFound(_)) => {}
            Err(error) => {
                tracing::debug!(volume.handle = %volume, error = error_chain(&error), "cannot measure a volume");
            }
        }
        let pause = began.elapsed() * PAUSE_FACTOR;
        if measurements.unsent.len() >= BATCH || sent_at.elapsed() + pause >= MAX_DELAY {
            if !send(transfers, measurements, credential).await {
                return false;
            }
            sent_at = Instant::now();
        }
        tokio::time::sleep(pause).await;
        if transfers.volumes_changed.notified().now_or_never().is_some() {
            queue = list(transfers, &mut measurements.known).await;
        }
    }
    send(transfers, measurements, credential).await
}

/// Sends what the store does not have yet. Returns whether the store has it now.
async fn send(transfers: &Transfers, measurements: &mut Measurements, credential: &str) -> bool {
    let unsent: Vec<_> = measurements.unsent.iter().map(|(volume, usage)| (*volume, *usage)).collect();
    for batch in unsent.chunks(BATCH) {
        let store = &transfers.worker.clients.store;
        if let Err(refusal) = store.record_disk_usage(credential, batch).await {
            tracing::debug!(error = %refusal, "cannot report the disk usage of volumes: trying again");
            return false;
        }
        for (volume, _) in batch {
            measurements.unsent.remove(volume);
        }
    }
    true
}

/// Lists complete volumes: new ones, then the others, ascending by the time of their measurement.
async fn list(
    transfers: &Transfers,
    measured: &mut HashMap<VolumeHandle, Measurement>,
) -> VecDeque<VolumeHandle> {
    let mut volumes = transfers.manifests.complete().await.unwrap_or_else(|error| {
        tracing::warn!(error = error_chain(&error), "cannot list complete volumes");
        Vec::new()
    });
    let present: HashSet<_> = volumes.iter().copied().collect();
    measured.retain(|volume, _| present.contains(volume));
    volumes.sort_by_key(|volume| measured.get(volume).map(|known| known.at));
    volumes.into()
}

/// Measures a volume. `None`: its files are not on this machine.
async fn measure(runtime: &dyn Runtime, volume: VolumeHandle) -> Result<Option<DiskUsage>, RuntimeError> {
    let root = match (runtime.layer(volume).await?, runtime.contents(volume).await?) {
        (Some(layer), _) => layer.upper,
        (None, Contents::Directory(root)) => root,
        (None, Contents::Remote(_)) => return Ok(None),
    };
    let measured = blocking(move || {
        measure_tree(&root).map_err(|error| RuntimeError::io(format!("measure {}", root.display()), error))
    });
    measured.await.map(Some)
}

/// Adds up what the files of a tree take on the disk.
fn measure_tree(root: &Path) -> io::Result<DiskUsage> {
    let mut walk = TreeWalk::open(root)?;
    let mut usage = DiskUsage::default();
    let mut add = |bytes: u64| {
        usage.exclusive += bytes;
        usage.part += bytes;
    };
    // Bytes, number of names in this tree, and number of all names.
    let mut linked: HashMap<(u64, u64), (u64, u64, u64)> = HashMap::new();
    add(bytes_of(&fstat(walk.directory())?));
    loop {
        let Some(name) = walk.next_name()? else {
            if walk.leave()?.is_none() {
                break;
            }
            continue;
        };
        let found = statat(walk.directory(), &*name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(found.st_mode).is_dir() {
            add(bytes_of(&found));
            walk.enter(&name)?;
        } else if names_of(&found) < 2 {
            add(bytes_of(&found));
        } else {
            let file = (found.st_dev, found.st_ino);
            linked.entry(file).or_insert((bytes_of(&found), 0, names_of(&found))).1 += 1;
        }
    }
    for (bytes, here, all) in linked.into_values() {
        if here >= all {
            usage.exclusive += bytes;
        }
        usage.part += (u128::from(bytes) * u128::from(here.min(all)) / u128::from(all)) as u64;
    }
    Ok(usage)
}

/// Returns what a file takes on the disk, in bytes.
fn bytes_of(found: &Stat) -> u64 {
    u64::try_from(found.st_blocks).unwrap_or(0) * 512
}

#[allow(clippy::useless_conversion)] // The type differs from architecture to architecture.
fn names_of(found: &Stat) -> u64 {
    u64::from(found.st_nlink)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use rpc::pb::artifacts as pb;
    use testing::fake::FakeWorker;

    use super::*;
    use crate::test_support::store::{Store, StoreCall, session};
    use crate::test_support::{FakeGateways, UNREACHABLE, within};

    #[test]
    fn shared_files_count_in_equal_parts() {
        let root = tempfile::tempdir().expect("a directory");
        let tree = |name: &str| root.path().join(name);
        ["a", "b"].iter().for_each(|name| fs::create_dir(tree(name)).expect("made"));
        let directory = fs::metadata(tree("a")).expect("there").blocks() * 512;
        let file = |path: &str, pages: usize| {
            fs::write(tree(path), vec![1; pages * 4096]).expect("written");
            fs::File::open(tree(path)).and_then(|file| file.sync_all()).expect("on the disk");
            fs::metadata(tree(path)).expect("there").blocks() * 512
        };
        let link = |from: &str, to: &str| fs::hard_link(tree(from), tree(to)).expect("linked");
        let alone = file("a/alone", 3);
        let twice = file("a/twice", 5);
        link("a/twice", "a/again");
        let shared = file("a/shared", 16);
        link("a/shared", "b/shared");
        link("a/shared", "b/shared too");
        link("a/shared", "b/shared as well");
        std::os::unix::fs::symlink("/", tree("b/root")).expect("linked");

        let a = measure_tree(&tree("a")).expect("measured");
        assert_eq!(a, DiskUsage { exclusive: directory + alone + twice, part: a.exclusive + shared / 4 });
        let b = measure_tree(&tree("b")).expect("measured");
        assert_eq!(b, DiskUsage { exclusive: directory, part: directory + shared / 4 * 3 });
        fs::remove_dir_all(tree("a")).expect("removed");
        let alone = measure_tree(&tree("b")).expect("measured");
        assert_eq!(alone, DiskUsage { exclusive: directory + shared, part: directory + shared });
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn changed_usage_is_reported_once() {
        let machine = FakeWorker::near();
        let mut store = Store::start().await;
        let worker = machine.gateway(UNREACHABLE, &store.endpoint);
        worker.session.set(Some(session("credential")));
        let load = async |volume| {
            let manifests = &worker.transfers.manifests;
            manifests.load_verified(worker.runtime.as_ref(), volume, "main").await.expect("a manifest");
        };
        let mut measurements = Measurements::default();
        let mut reported = async || {
            let answered = async {
                let StoreCall::DiskUsage(request, answer) = store.next_call().await else {
                    panic!("an unexpected call")
                };
                answer.send(Ok(pb::RecordDiskUsageResponse {})).expect("the gateway waits");
                request.volumes
            };
            let measuring = measure_all(&worker.transfers, &mut measurements, "credential");
            let (is_sent, volumes) = tokio::join!(measuring, within("a report", answered));
            assert!(is_sent, "the store took it");
            let repeated = measure_all(&worker.transfers, &mut measurements, "credential").await;
            assert!(repeated, "there is nothing to send");
            let exclusive =
                |volume: pb::VolumeDiskUsage| (volume.volume_handle, volume.exclusive_bytes > 4096);
            volumes.into_iter().map(exclusive).collect::<HashMap<_, _>>()
        };
        let first = machine.volume(&"x".repeat(8192)).await;
        load(first).await;
        assert_eq!(reported().await, HashMap::from([(first.to_string(), true)]));

        let second = machine.volume("").await;
        let file = |volume| machine.path(volume).join("file");
        fs::remove_file(file(second)).expect("removed");
        fs::hard_link(file(first), file(second)).expect("linked");
        load(second).await;
        let expected = HashMap::from([(first.to_string(), false), (second.to_string(), false)]);
        assert_eq!(reported().await, expected);
        store.end().await;
    }
}
