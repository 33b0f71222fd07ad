//! Volumes.

use domain::VolumeHandle;
use runtime::{RuntimeError, VolumeSource};

use super::{RuntimeExt, Subject, directory};

/// Making and destroying may be repeated.
pub async fn volumes_are_made_and_destroyed_once(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    std::fs::write(directory(&*runtime, volume).await.join("file"), "kept").expect("write");
    runtime.create_volume(volume, VolumeSource::Empty).await.expect("make it again");
    let path = directory(&*runtime, volume).await;
    assert_eq!(std::fs::read(path.join("file")).expect("read"), b"kept", "making it again changes nothing");
    assert_eq!(runtime.list().await.expect("list").volumes, [volume]);

    runtime.destroy_volume(volume).await.expect("destroy");
    runtime.destroy_volume(volume).await.expect("destroy again");
    assert_eq!(runtime.list().await.expect("list").volumes, []);
    let gone = runtime.contents(volume).await.err();
    assert!(matches!(gone, Some(RuntimeError::VolumeNotFound(handle)) if handle == volume), "{gone:?}");
}

/// A child needs its parent.
pub async fn a_child_of_nothing_is_refused(subject: impl Subject) {
    let (runtime, parent) = (subject.runtime(), VolumeHandle::new());
    let refused = runtime.create_volume(VolumeHandle::new(), VolumeSource::CopyOnWrite { parent }).await;
    assert!(matches!(refused, Err(RuntimeError::VolumeNotFound(handle)) if handle == parent), "{refused:?}");
    assert_eq!(runtime.list().await.expect("list").volumes, [], "and leaves nothing behind");
}

/// A child, and a child of a child, see what was there before them and change nothing of it.
pub async fn children_leave_their_parents_alone(mut subject: impl Subject) {
    use std::os::unix::fs::PermissionsExt;
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    let top = directory(&*runtime, parent).await;
    std::fs::create_dir_all(top.join("dir/below")).expect("make");
    std::fs::write(top.join("dir/file"), "parent").expect("write");
    std::fs::write(top.join("doomed"), "parent").expect("write");
    std::fs::set_permissions(&top, std::fs::Permissions::from_mode(0o700)).expect("set the mode");

    let child = runtime.child(parent).await;
    let middle = directory(&*runtime, child).await;
    assert_eq!(std::fs::metadata(&middle).expect("look").permissions().mode() & 0o777, 0o700);
    std::fs::write(middle.join("dir/file"), "child").expect("write");
    std::fs::remove_file(middle.join("doomed")).expect("remove");
    std::fs::rename(middle.join("dir"), middle.join("renamed")).expect("rename");

    let grandchild = runtime.child(child).await;
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    let bottom = directory(&*runtime, grandchild).await;
    assert_eq!(std::fs::read(bottom.join("renamed/file")).expect("read"), b"child");
    assert!(bottom.join("renamed/below").is_dir());
    assert!(!bottom.join("doomed").exists() && !bottom.join("dir").exists());
    std::fs::write(bottom.join("renamed/file"), "grandchild").expect("write");

    assert_eq!(std::fs::read(directory(&*runtime, parent).await.join("dir/file")).expect("read"), b"parent");
    assert_eq!(std::fs::read(directory(&*runtime, parent).await.join("doomed")).expect("read"), b"parent");
    assert_eq!(
        std::fs::read(directory(&*runtime, child).await.join("renamed/file")).expect("read"),
        b"child"
    );
    for volume in [grandchild, child, parent] {
        runtime.destroy_volume(volume).await.expect("destroy");
    }
    assert_eq!(runtime.list().await.expect("list").volumes, []);
}

/// A parent is refused as long as a child needs its bytes, and loses none of them; also by another runtime.
pub async fn parents_outlive_their_children(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    std::fs::write(directory(&*runtime, parent).await.join("file"), "parent").expect("write");
    let child = runtime.child(parent).await;
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    // A runtime that copies what it makes children of needs no parent for them.
    match runtime.destroy_volume(parent).await {
        Ok(()) => {}
        Err(RuntimeError::HasChildren(refused)) => assert_eq!(refused, parent),
        Err(error) => panic!("{error:?}"),
    }
    assert_eq!(std::fs::read(directory(&*runtime, child).await.join("file")).expect("read"), b"parent");
    for volume in [child, parent] {
        runtime.destroy_volume(volume).await.expect("destroy");
    }
    assert_eq!(runtime.list().await.expect("list").volumes, []);
}

/// The marker is of the worker, not of the runtime.
pub async fn the_marker_stays(mut subject: impl Subject) {
    let before = subject.runtime().marker().await.expect("the marker");
    subject.reopen().await;
    assert_eq!(subject.runtime().marker().await.expect("the marker"), before);
    let Some(disk) = subject.runtime().disk().await.expect("the disk") else { return };
    assert!(0 < disk.free_bytes && disk.free_bytes <= disk.total_bytes, "{disk:?}");
}
