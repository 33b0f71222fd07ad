//! Volumes of a Garden worker: transfer, creation, destruction, and owners of files.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use concourse::baggageclaim::{Client, Encoding, Handle, Timeouts};
use domain::{ContainerHandle, VolumeHandle};
use runtime::{ContainerSpec, Contents, Runtime, RuntimeError, VolumeSource};
use runtime_gateway::garden::GardenConfig;
use testing::baggageclaim::{Faults, Server};
use testing::conformance::{RuntimeExt, get, in_time, mount, put};
use testing::garden::Manner;
use tokio::io::AsyncReadExt;
use transfer::{ArchiveReader, Limits};

use super::faults::Bench;
use super::subject::GardenSubject;

fn knowing(encodings: &[Encoding]) -> Faults {
    let words = encodings.iter().map(|encoding| encoding.as_str().to_owned());
    Faults { encodings: Some(words.collect()), ..Faults::default() }
}

/// Number of requests since `before` that start with this text.
fn count_requests(volumes: &Server, before: usize, prefix: &str) -> usize {
    volumes.requests()[before..].iter().filter(|request| request.starts_with(prefix)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn archives_use_the_configured_encoding() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let volumes = &bench.subject.volumes;
    for encoding in Encoding::ALL {
        // Archives in another encoding are rejected.
        let faults = knowing(&[encoding]);
        volumes.set_faults(faults.clone());
        let chosen = |config| GardenConfig { encoding: Some(encoding), ..config };
        let runtime = bench.subject.another(chosen).await.expect("a gateway");
        let volume = VolumeHandle::new();
        runtime.create_volume(volume, VolumeSource::Empty).await.expect("make a volume");
        runtime.make_directories(volume, &[PathBuf::from("a/b")]).await.expect("directories");
        let contents = "all that is in it ".repeat(10_000);
        put(&*runtime, volume, "a/b/file", &contents).await;
        assert_eq!(get(&*runtime, volume, "a/b/file").await.as_deref(), Some(&*contents), "{encoding:?}");
        let Contents::Remote(remote) = runtime.contents(volume).await.expect("the contents") else {
            panic!("the volume is local")
        };
        remote.store_manifest(b"manifest".to_vec()).await.expect("keep");
        assert_eq!(remote.read_manifest().await.expect("a manifest").as_deref(), Some(&b"manifest"[..]));

        for fault in
            [Faults { cut_archives: true, ..faults.clone() }, Faults { fail_archives: true, ..faults }]
        {
            volumes.set_faults(fault.clone());
            let mut bytes = Vec::new();
            let read = match remote.read(Path::new("a/b")).await {
                Ok(mut archive) => archive.read_to_end(&mut bytes).await.map(|_| ()),
                Err(error) => Err(std::io::Error::other(error)),
            };
            assert!(read.is_err(), "{encoding:?} {fault:?}: the archive was accepted");
            remote.read_manifest().await.expect_err("the manifest is not readable");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway_uses_only_supported_encodings() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let volumes = &bench.subject.volumes;
    // Workers before 7.10, and older ones.
    for known in [&[Encoding::Gzip, Encoding::Zstd][..], &[Encoding::Gzip]] {
        volumes.set_faults(knowing(known));
        let runtime = bench.subject.another(|config| config).await.expect("a gateway");
        put(&*runtime, bench.volume, "file", "contents").await;
        assert_eq!(get(&*runtime, bench.volume, "file").await.as_deref(), Some("contents"), "{known:?}");
        let chosen = |config| GardenConfig { encoding: Some(Encoding::S2), ..config };
        let refused = bench.subject.another(chosen).await.err();
        let Some(RuntimeError::Unsupported(message)) = refused else { panic!("{refused:?}") };
        assert_eq!(message, "the worker supports no archives in s2");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_are_destroyed_together_but_after_children() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let (runtime, volumes) = (&bench.runtime, &bench.subject.volumes);
    assert!(runtime.destroy_batch_size() > 1);
    let family = async || {
        let parent = runtime.volume().await;
        put(&**runtime, parent, "file", "kept").await;
        let Contents::Remote(remote) = runtime.contents(parent).await.expect("the contents") else {
            panic!("the volume is local")
        };
        remote.store_manifest(b"manifest".to_vec()).await.expect("keep");
        (parent, runtime.child(parent).await, runtime.volume().await)
    };
    let is_there =
        |volume: VolumeHandle| volumes.handles().iter().any(|handle| handle.starts_with(&volume.to_string()));
    let gone = |all: &[VolumeHandle]| !all.iter().any(|volume| is_there(*volume));

    let (parent, child, other) = family().await;
    let before = volumes.requests().len();
    assert!(runtime.destroy_volumes(&[child, other, parent]).await.is_empty());
    assert!(gone(&[parent, child, other]), "including the manifest: {:?}", volumes.handles());
    assert_eq!(
        count_requests(volumes, before, "DELETE /volumes/destroy"),
        2,
        "the parent is destroyed after its child"
    );
    assert_eq!(count_requests(volumes, before, "DELETE /volumes/"), 2, "no volume is destroyed separately");

    // Otherwise the worker would destroy the parent, and empty its child.
    let (parent, child, other) = family().await;
    let left = runtime.destroy_volumes(&[other, parent]).await;
    assert!(matches!(left[..], [(volume, RuntimeError::HasChildren(_))] if volume == parent), "{left:?}");
    assert_eq!(get(&**runtime, child, "file").await.as_deref(), Some("kept"));
    assert!(gone(&[other]));

    // After a failed call, the gateway finds out which volumes remain.
    let (one, two) = (runtime.volume().await, runtime.volume().await);
    volumes.set_faults(Faults { stuck: vec![one.to_string()], ..Faults::default() });
    let left = runtime.destroy_volumes(&[one, two]).await;
    assert!(matches!(left[..], [(volume, RuntimeError::Other(_))] if volume == one), "{left:?}");
    assert!(is_there(one) && gone(&[two]));
    let left = runtime.destroy_volumes(&[child, parent]).await;
    assert!(left.is_empty(), "{left:?}");

    for fault in [
        Faults { no_destroy_many: true, ..Faults::default() },
        Faults { lose_answers: Some(("DELETE /volumes/destroy".to_owned(), 1)), ..Faults::default() },
        Faults { half_destroyed: 2, ..Faults::default() },
        Faults { no_destroy_many: true, half_destroyed: 2, ..Faults::default() },
    ] {
        let (parent, child, other) = family().await;
        volumes.set_faults(fault.clone());
        let left = runtime.destroy_volumes(&[child, other, one, parent]).await;
        assert!(left.is_empty(), "{fault:?}: {left:?}");
        assert!(gone(&[parent, child, other, one]), "{fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn creation_continues_until_outcome_is_known() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let (runtime, volumes) = (&bench.runtime, &bench.subject.volumes);
    let before = volumes.requests().len();
    volumes.set_faults(Faults { slow_creations: 4, ..Faults::default() });
    let slow = runtime.volume().await;
    assert_eq!(count_requests(volumes, before, "POST /volumes-async"), 1);
    assert!(count_requests(volumes, before, &format!("GET /volumes-async/{slow}")) > 4);
    let forgotten = format!("DELETE /volumes-async/{slow}");
    in_time("the deletion of the outcome", async {
        while count_requests(volumes, before, &forgotten) == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;

    // A volume in creation is listed, and protects its parent.
    volumes.set_faults(Faults { slow_creations: usize::MAX, ..Faults::default() });
    let before = volumes.requests().len();
    let (parent, child) = (bench.volume, VolumeHandle::new());
    let mut creating = Box::pin(runtime.create_volume(child, VolumeSource::CopyOnWrite { parent }));
    in_time("a question", async {
        while count_requests(volumes, before, &format!("GET /volumes-async/{child}")) < 2 {
            assert!(futures::poll!(&mut creating).is_pending());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    assert!(runtime.list().await.expect("list").volumes.contains(&child));
    let refused = runtime.destroy_volume(parent).await;
    assert!(matches!(refused, Err(RuntimeError::HasChildren(_))), "{refused:?}");

    // A gateway that ends leaves the creation, and the next gateway adopts it. A second creation
    // would empty the volume.
    drop(creating);
    volumes.set_faults(Faults::default());
    let next = bench.subject.another(|config| config).await.expect("the next gateway");
    next.create_volume(child, VolumeSource::CopyOnWrite { parent }).await.expect("take it over");
    assert_eq!(count_requests(volumes, before, "POST /volumes-async"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_get_the_ids_of_their_container() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let (runtime, volumes) = (&bench.runtime, &bench.subject.volumes);
    let client = Client::new(&volumes.address().to_string(), Timeouts::default());
    let is_privileged = async |volume: VolumeHandle| {
        let handle = Handle::new(volume.to_string()).expect("a handle");
        client.privileged(&handle).await.expect("its privilege")
    };
    let (read, written) = (runtime.volume().await, bench.volume);
    let mounts = vec![mount(written, "/out", false), mount(read, "/in", true)];
    for privileged in [true, false] {
        let spec = ContainerSpec { privileged, mounts: mounts.clone(), ..bench.spec.clone() };
        let before = volumes.requests().len();
        let handle = ContainerHandle::new();
        // The worker changes the whole volume, and reports no files that it cannot change.
        let switch = format!("PUT /volumes/{written}/privileged");
        volumes.set_faults(Faults { lose_answers: Some((switch.clone(), 1)), ..Faults::default() });
        runtime.create_container(handle, spec.clone()).await.expect_err("the owners are unknown");
        assert!(runtime.list().await.expect("list").containers.is_empty());
        runtime.create_container(handle, spec).await.expect("make it again");
        assert_eq!(is_privileged(written).await, privileged);
        assert_eq!(bench.subject.server().is_privileged(&handle.to_string()), privileged);
        assert!(!is_privileged(read).await, "a shared volume is unchanged");
        assert_eq!(
            count_requests(volumes, before, &switch),
            1,
            "a volume with the right owners is unchanged"
        );
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

/// User, group and mode of each file.
type Owners = BTreeMap<PathBuf, (u32, u32, u32)>;

/// The owners in a manifest of an archive.
fn owners_in(archive: &[u8]) -> Owners {
    let manifest = ArchiveReader::new(archive).read(Limits::default(), |_| Ok(())).expect("an archive");
    manifest
        .entries()
        .iter()
        .map(|entry| (entry.path().to_owned(), (entry.uid, entry.gid, entry.mode)))
        .collect()
}

async fn owners_of(runtime: &dyn Runtime, volume: VolumeHandle) -> Owners {
    let Contents::Remote(remote) = runtime.contents(volume).await.expect("the contents") else {
        panic!("the volume is local")
    };
    let mut archive = Vec::new();
    let mut read = remote.read(Path::new("")).await.expect("an archive");
    read.read_to_end(&mut archive).await.expect("a whole archive");
    owners_in(&archive)
}

/// Id of an unprivileged container's root on the machine.
const MAPPED_ROOT: u32 = 4_294_967_294;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn archive_owners_match_owners_in_containers() {
    let Some(subject) = GardenSubject::with_ids().await else { return };
    let bench = Bench::of(subject).await;
    let (runtime, volumes, volume) = (&bench.runtime, &bench.subject.volumes, bench.volume);
    let tree = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(tree.path().join("below")).expect("make");
    symlink("root", tree.path().join("link")).expect("a link");
    let files = [("root", (0, 0), 0o4755), ("mixed", (0, 50), 0o640), ("below/user", (1000, 2000), 0o600)];
    for (name, (uid, gid), mode) in files {
        let path = tree.path().join(name);
        std::fs::write(&path, name).expect("write");
        lchown(&path, Some(uid), Some(gid)).expect("change the owner");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("permit");
    }
    let tar = std::process::Command::new("tar").arg("-c").arg("-C").arg(tree.path()).arg(".").output();
    let archive = tar.expect("tar is installed").stdout;
    let mut expected = owners_in(&archive);
    assert_eq!(expected[Path::new("below/user")], (1000, 2000, 0o600));
    let Contents::Remote(remote) = runtime.contents(volume).await.expect("the contents") else {
        panic!("the volume is local")
    };
    remote.write(Path::new(""), Box::pin(std::io::Cursor::new(archive))).await.expect("unpack");

    // Copies and children look the same to a container, independent of their owners on the worker.
    let (child, copy) = (runtime.child(volume).await, VolumeHandle::new());
    runtime.create_volume(copy, VolumeSource::Copy { original: child }).await.expect("copy");
    let on_disk = |volume: VolumeHandle, name: &str| {
        let metadata = volumes.path(&volume.to_string()).join(name).symlink_metadata().expect("it is there");
        (metadata.uid(), metadata.gid())
    };
    for volume in [volume, child, copy] {
        assert_eq!(owners_of(&**runtime, volume).await, expected);
        let root = [on_disk(volume, "root"), on_disk(volume, "link"), on_disk(volume, "")];
        assert_eq!(root, [(MAPPED_ROOT, MAPPED_ROOT); 3]);
        assert_eq!(on_disk(volume, "mixed"), (MAPPED_ROOT, 50));
        assert_eq!(on_disk(volume, "below/user"), (1000, 2000));
    }
    for privileged in [true, false] {
        let spec = ContainerSpec { privileged, ..bench.spec.clone() };
        let handle = runtime.made(spec).await;
        assert_eq!(on_disk(volume, "root").0, if privileged { 0 } else { MAPPED_ROOT });
        assert_eq!(owners_of(&**runtime, volume).await, expected, "privileged: {privileged}");
        runtime.destroy_container(handle).await.expect("destroy");
    }

    // Writes a file as root of a container does.
    let path = volumes.path(&volume.to_string()).join("made");
    std::fs::write(&path, "").expect("write");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).expect("permit");
    lchown(&path, Some(MAPPED_ROOT), Some(MAPPED_ROOT)).expect("change the owner");
    expected.insert("made".into(), (0, 0, 0o644));
    assert_eq!(owners_of(&**runtime, volume).await, expected);

    // No request sets an owner, which would change the owner of all files.
    let asked = volumes.creations();
    let given = |asked: &serde_json::Value| asked.get("uid").is_some() || asked.get("gid").is_some();
    assert!(!asked.is_empty() && !asked.iter().any(given), "{asked:?}");
}
