//! Conformance tests of volumes.

use std::path::{Path, PathBuf};

use domain::worker::{Receipt, StoreMark};
use domain::{ArtifactId, StoreLife, VolumeHandle};
use runtime::{Contents, Notes, RuntimeError, VolumeSource, WorkerProvided, WorkerProvidedPath};

use super::{RuntimeExt, Subject, get, is_directory, put, volumes};

/// Creation and destruction can be repeated.
pub async fn volume_creation_and_destruction_are_idempotent(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    put(&*runtime, volume, "file", "kept").await;
    runtime.create_volume(volume, VolumeSource::Empty).await.expect("create it again");
    assert_eq!(
        get(&*runtime, volume, "file").await.as_deref(),
        Some("kept"),
        "a repeated creation changes nothing"
    );
    assert_eq!(volumes(&subject).await, [volume]);

    runtime.destroy_volume(volume).await.expect("destroy");
    runtime.destroy_volume(volume).await.expect("destroy again");
    assert_eq!(volumes(&subject).await, []);
    let gone = runtime.contents(volume).await.err();
    assert!(matches!(gone, Some(RuntimeError::VolumeNotFound(handle)) if handle == volume), "{gone:?}");
}

/// A child needs an existing parent.
pub async fn child_of_missing_parent_is_rejected(subject: impl Subject) {
    let (runtime, parent) = (subject.runtime(), VolumeHandle::new());
    let refused = runtime.create_volume(VolumeHandle::new(), VolumeSource::CopyOnWrite { parent }).await;
    assert!(matches!(refused, Err(RuntimeError::VolumeNotFound(handle)) if handle == parent), "{refused:?}");
    assert_eq!(volumes(&subject).await, [], "no volume remains");
}

/// Contents that a worker provides are copied into a volume, which does not change with the
/// original. Contents that the worker does not provide are rejected. Unreadable contents leave no
/// volume.
pub async fn worker_provided_contents_are_copied(subject: impl Subject) {
    let runtime = subject.runtime();
    let unknown = WorkerProvided::ResourceType("not-provided".to_owned());
    let refused = runtime.create_volume(VolumeHandle::new(), VolumeSource::WorkerProvided(unknown)).await;
    assert!(matches!(refused, Err(RuntimeError::Unsupported(_))), "{refused:?}");
    assert_eq!(volumes(&subject).await, []);
    let provided = runtime.capabilities().worker_provided.clone();
    if provided.is_empty() {
        eprintln!("not applicable: this worker provides no contents");
        return;
    }
    for WorkerProvidedPath { what, path, .. } in provided {
        let original = Path::new(&path).join(PROVIDED_FILE);
        let volume = VolumeHandle::new();
        let make = || runtime.create_volume(volume, VolumeSource::WorkerProvided(what.clone()));
        if what == WorkerProvided::ResourceType(MISSING.to_owned()) {
            make().await.expect_err("the original does not exist");
            assert_eq!(volumes(&subject).await, [], "no volume remains");
            continue;
        }
        let text = std::fs::read_to_string(&original).expect("the original");
        make().await.expect("create a volume");
        assert_eq!(volumes(&subject).await, [volume]);
        std::fs::write(&original, "changed since").expect("write");
        make().await.expect("create it again");
        assert_eq!(get(&*runtime, volume, PROVIDED_FILE).await.as_deref(), Some(text.as_str()), "{what:?}");
        std::fs::write(&original, text).expect("write");
        let child = runtime.child(volume).await;
        put(&*runtime, child, PROVIDED_FILE, "of the child").await;
        assert_eq!(std::fs::read_to_string(&original).expect("the original").len(), 8);
        for volume in [child, volume] {
            runtime.destroy_volume(volume).await.expect("destroy");
        }
        assert_eq!(volumes(&subject).await, []);
    }
}

/// The file in the provided contents of a subject.
const PROVIDED_FILE: &str = "provided";
/// The resource type whose image does not exist at its path.
const MISSING: &str = "missing";

/// Creates the provided contents of a subject in `directory`: an image, certificates, and an image
/// that does not exist.
#[must_use]
pub fn worker_provided(directory: &Path) -> Vec<WorkerProvidedPath> {
    let along = |what, name: &str| {
        let path = directory.join(name).display().to_string();
        WorkerProvidedPath { what, version: "1".to_owned(), path }
    };
    let image = |name: &str| along(WorkerProvided::ResourceType(name.to_owned()), name);
    let provided = vec![image("provided"), along(WorkerProvided::Certs, "certs"), image(MISSING)];
    for along in &provided[..2] {
        std::fs::create_dir_all(&along.path).expect("make a directory");
        std::fs::write(Path::new(&along.path).join(PROVIDED_FILE), "original").expect("write");
    }
    provided
}

/// Directories are created with their parents, and existing files stay.
pub async fn make_directories_creates_parents(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    put(&*runtime, volume, "a/file", "kept").await;
    for _ in 0..2 {
        let directories = ["a/b/c", "a", "d", "a/b"].map(PathBuf::from);
        runtime.make_directories(volume, &directories).await.expect("make directories");
        for path in ["a/b/c", "d"] {
            assert!(is_directory(&*runtime, volume, path).await, "{path}");
        }
        assert_eq!(get(&*runtime, volume, "a/file").await.as_deref(), Some("kept"));
    }
    let unknown = VolumeHandle::new();
    let refused = runtime.make_directories(unknown, &[PathBuf::from("a")]).await;
    assert!(matches!(refused, Err(RuntimeError::VolumeNotFound(handle)) if handle == unknown), "{refused:?}");
}

/// A remote volume keeps its complete manifest, separate from its contents, until the volume is
/// destroyed.
pub async fn manifest_is_stored_with_remote_volume(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let Contents::Remote(remote) = runtime.contents(volume).await.expect("the contents") else { return };
    assert_eq!(remote.read_manifest().await.expect("none"), None);
    remote.store_manifest(b"first, and longer".to_vec()).await.expect("keep");
    remote.store_manifest(b"second".to_vec()).await.expect("keep another");
    drop(remote);
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    let Contents::Remote(remote) = runtime.contents(volume).await.expect("the contents") else {
        panic!("the volume was remote")
    };
    assert_eq!(remote.read_manifest().await.expect("a manifest").as_deref(), Some(&b"second"[..]));
    assert_eq!(volumes(&subject).await, [volume], "the manifest is not listed as a volume");
    let missing = remote.read(Path::new("second")).await.err();
    assert!(matches!(missing, Some(RuntimeError::PathNotFound(_))), "{missing:?}");
    runtime.destroy_volume(volume).await.expect("destroy");
    runtime.create_volume(volume, VolumeSource::Empty).await.expect("create a new volume of this name");
    assert_eq!(remote.read_manifest().await.expect("none"), None);
}

/// The mark of the artifact store and the notes of volumes survive the gateway.
pub async fn store_mark_and_notes_survive_reopening(mut subject: impl Subject) {
    let runtime = subject.runtime();
    assert_eq!(runtime.store_mark().await.expect("none yet"), None);
    let mut mark = StoreMark { life: StoreLife::new(), sequence: 1, receipt: None };
    runtime.set_store_mark(mark).await.expect("keep");
    let marker = runtime.marker().await.expect("a marker");
    let (parent, artifact) = (runtime.volume().await, ArtifactId::new());
    let child = runtime.child(parent).await;
    runtime.note_artifact(parent, ArtifactId::new()).await.expect("note");
    runtime.note_artifact(parent, artifact).await.expect("note another");
    mark = StoreMark { life: StoreLife::new(), sequence: u64::MAX, receipt: Some(Receipt([7; 32])) };
    runtime.set_store_mark(mark).await.expect("keep another");
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    assert_eq!(runtime.store_mark().await.expect("kept"), Some(mark));
    assert_eq!(runtime.marker().await.expect("a marker").id, marker.id);
    let notes = runtime.notes(parent).await.expect("notes");
    assert_eq!(notes, Notes { parent: None, artifact: Some(artifact) });
    // The child of a parent names it. A new child has no artifact, because its contents may change.
    let notes = runtime.notes(child).await.expect("notes");
    assert!(notes.artifact.is_none() && notes.parent.is_none_or(|found| found == parent), "{notes:?}");
    let kept = runtime.destroy_volume(parent).await;
    assert_eq!(matches!(kept, Err(RuntimeError::HasChildren(_))), notes.parent.is_some(), "{kept:?}");
    let missing = VolumeHandle::new();
    for missed in [runtime.note_artifact(missing, artifact).await, runtime.notes(missing).await.map(|_| ())] {
        assert!(
            matches!(missed, Err(RuntimeError::VolumeNotFound(handle)) if handle == missing),
            "{missed:?}"
        );
    }
}

/// A child and a grandchild see the contents of their ancestors, and their writes do not change
/// these.
pub async fn writes_to_child_do_not_change_parent(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    put(&*runtime, parent, "dir/below/deep", "parent").await;
    put(&*runtime, parent, "dir/file", "parent").await;

    let child = runtime.child(parent).await;
    put(&*runtime, child, "dir/file", "child").await;
    put(&*runtime, child, "new", "child").await;

    let grandchild = runtime.child(child).await;
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    put(&*runtime, grandchild, "dir/file", "grandchild").await;

    let cases = [
        (parent, "parent", None),
        (child, "child", Some("child")),
        (grandchild, "grandchild", Some("child")),
    ];
    for (volume, file, new) in cases {
        assert_eq!(get(&*runtime, volume, "dir/file").await.as_deref(), Some(file));
        assert_eq!(get(&*runtime, volume, "new").await.as_deref(), new);
        assert_eq!(get(&*runtime, volume, "dir/below/deep").await.as_deref(), Some("parent"));
    }
    for volume in [grandchild, child, parent] {
        runtime.destroy_volume(volume).await.expect("destroy");
    }
    assert_eq!(volumes(&subject).await, []);
}

/// Deleting and moving files in a child does not change its parent. Only local volumes can be
/// tested in this way.
pub async fn deletions_in_child_do_not_change_parent(mut subject: impl Subject) {
    use std::os::unix::fs::PermissionsExt;
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    let Contents::Directory(top) = runtime.contents(parent).await.expect("the contents") else { return };
    std::fs::create_dir_all(top.join("dir/below")).expect("make");
    std::fs::write(top.join("dir/file"), "parent").expect("write");
    std::fs::write(top.join("doomed"), "parent").expect("write");
    std::fs::set_permissions(&top, std::fs::Permissions::from_mode(0o700)).expect("set the mode");

    let child = runtime.child(parent).await;
    let middle = super::directory(&*runtime, child).await;
    assert_eq!(std::fs::metadata(&middle).expect("look").permissions().mode() & 0o777, 0o700);
    std::fs::write(middle.join("dir/file"), "child").expect("write");
    std::fs::remove_file(middle.join("doomed")).expect("remove");
    // An overlay of an ordinary user cannot rename a directory of the parent. Then `mv` copies it.
    let moved = std::process::Command::new("mv").args([middle.join("dir"), middle.join("renamed")]).status();
    assert!(moved.expect("mv").success());

    let grandchild = runtime.child(child).await;
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    let bottom = super::directory(&*runtime, grandchild).await;
    assert_eq!(std::fs::read(bottom.join("renamed/file")).expect("read"), b"child");
    assert!(bottom.join("renamed/below").is_dir());
    assert!(!bottom.join("doomed").exists() && !bottom.join("dir").exists());
    assert_eq!(get(&*runtime, parent, "dir/file").await.as_deref(), Some("parent"));
    assert_eq!(get(&*runtime, parent, "doomed").await.as_deref(), Some("parent"));
}

/// A parent with children is not destroyed and loses no bytes, also with another runtime.
pub async fn parent_is_not_destroyed_before_children(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    put(&*runtime, parent, "file", "parent").await;
    let child = runtime.child(parent).await;
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    // A runtime that copies parents can destroy them before their children.
    match runtime.destroy_volume(parent).await {
        Ok(()) => {}
        Err(RuntimeError::HasChildren(refused)) => assert_eq!(refused, parent),
        Err(error) => panic!("{error:?}"),
    }
    assert_eq!(get(&*runtime, child, "file").await.as_deref(), Some("parent"));
    for volume in [child, parent] {
        runtime.destroy_volume(volume).await.expect("destroy");
    }
    assert_eq!(volumes(&subject).await, []);
}

/// A copy has the contents of all layers of its original, and needs none of them. A copy of a
/// missing volume is rejected.
pub async fn copy_does_not_depend_on_original(mut subject: impl Subject) {
    let (runtime, missing) = (subject.runtime(), VolumeHandle::new());
    let copy = VolumeHandle::new();
    let refused = runtime.create_volume(copy, VolumeSource::Copy { original: missing }).await;
    assert!(matches!(refused, Err(RuntimeError::VolumeNotFound(handle)) if handle == missing), "{refused:?}");
    assert_eq!(volumes(&subject).await, [], "no volume remains");

    let parent = runtime.volume().await;
    for path in ["dir/below/deep", "dir/file", "gone"] {
        put(&*runtime, parent, path, "parent").await;
    }
    let child = runtime.child(parent).await;
    put(&*runtime, child, "dir/file", "child").await;
    put(&*runtime, child, "new/file", "child").await;
    let removed = match runtime.contents(child).await.expect("the contents") {
        Contents::Directory(top) => {
            std::fs::remove_file(top.join("gone")).expect("remove");
            std::fs::rename(top.join("new"), top.join("renamed")).expect("rename");
            true
        }
        Contents::Remote(_) => false,
    };
    let source = || VolumeSource::Copy { original: child };
    runtime.create_volume(copy, source()).await.expect("copy");
    assert_eq!(runtime.notes(copy).await.expect("notes"), Notes::default(), "the copy has no parent");
    put(&*runtime, copy, "own", "copy").await;
    runtime.create_volume(copy, source()).await.expect("copy again");
    // Destroy the layers, the topmost first.
    for volume in [child, parent] {
        runtime.destroy_volume(volume).await.expect("no volume needs it");
    }
    assert_eq!(volumes(&subject).await, [copy]);
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    let new = if removed { "renamed/file" } else { "new/file" };
    let cases = [("dir/below/deep", "parent"), ("dir/file", "child"), (new, "child"), ("own", "copy")];
    for (path, contents) in cases {
        assert_eq!(get(&*runtime, copy, path).await.as_deref(), Some(contents), "{path}");
    }
    assert_eq!(get(&*runtime, copy, "gone").await.is_none(), removed);
    runtime.destroy_volume(copy).await.expect("destroy");
    assert_eq!(volumes(&subject).await, []);
}

/// The marker belongs to the worker, not to the runtime.
pub async fn marker_survives_reopening(mut subject: impl Subject) {
    let before = subject.runtime().marker().await.expect("the marker");
    subject.reopen().await;
    assert_eq!(subject.runtime().marker().await.expect("the marker"), before);
    let Some(disk) = subject.runtime().disk().await.expect("the disk") else { return };
    assert!(0 < disk.free_bytes && disk.free_bytes <= disk.total_bytes, "{disk:?}");
}
