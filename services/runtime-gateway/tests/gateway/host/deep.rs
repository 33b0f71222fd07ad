//! Trees that are deeper than any path, created by a container.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use domain::workload::{Exit, FailureReason};
use domain::{ContainerHandle, VolumeHandle};
use runtime::{ContainerSpec, Ended, Root, VolumeSource};
use rustix::fs::IFlags;
use testing::conformance::{RuntimeExt, Subject, container, directory, mount, process};

use super::subject::HostSubject;

/// Creates a chain of directories, with a file at its end.
fn chain(at: &str, depth: u32) -> Vec<String> {
    let script = "chdir $ARGV[0] or die; for (1..$ARGV[1]) { mkdir 'd' or die; chdir 'd' or die } open(F, '>', 'file') or die";
    ["perl", "-e", script, at, &depth.to_string()].map(str::to_owned).to_vec()
}

async fn run(subject: &HostSubject, spec: ContainerSpec, command: &[String]) -> ContainerHandle {
    let runtime = subject.runtime();
    let handle = runtime.made(spec).await;
    let id = domain::ProcessId::new();
    runtime.start(handle, id, process(command)).await.expect("start");
    // Creating many directories takes longer than the usual timeout.
    let ended = tokio::time::timeout(Duration::from_secs(300), runtime.wait(id)).await.expect("an end");
    let ended = ended.expect("an end");
    assert!(matches!(ended, Ended::Exited { exit: Exit::Code(0), .. }), "{ended:?}");
    handle
}

/// The unfinished entries of the state directory.
fn unfinished(subject: &HostSubject) -> Vec<String> {
    ["volumes", "containers"]
        .iter()
        .flat_map(|kind| fs::read_dir(subject.dir.path().join("state").join(kind)).expect("listed").flatten())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with('.'))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_trees_of_a_container_are_destroyed() {
    let Some(mut subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let spec = ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..container() };
    let in_volume = run(&subject, spec, &chain("/out", 20_000)).await;
    let in_root = run(&subject, container(), &chain("/mnt", 5_000)).await;
    drop(runtime);

    // Both exist after a restart. Objects that a crash left half-destroyed are removed.
    let volumes = subject.dir.path().join("state/volumes");
    let left = VolumeHandle::new();
    fs::rename(volumes.join(volume.to_string()), volumes.join(format!(".gone-{left}"))).expect("renamed");
    subject.reopen().await;
    let runtime = subject.runtime();
    let held = runtime.list().await.expect("list");
    assert_eq!((held.containers.len(), held.volumes), (2, vec![]));
    for handle in [in_volume, in_root] {
        runtime.destroy_container(handle).await.expect("destroyed");
    }
    assert_eq!(unfinished(&subject), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_volume_is_copied_and_changes_owner() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let original = runtime.volume().await;
    let spec = ContainerSpec { mounts: vec![mount(original, "/out", false)], ..container() };
    run(&subject, spec, &chain("/out", 3_000)).await;
    let copy = VolumeHandle::new();
    runtime.create_volume(copy, VolumeSource::Copy { original }).await.expect("copied");
    for volume in [copy, runtime.child(original).await] {
        let spec = ContainerSpec {
            mounts: vec![mount(volume, "/out", false)],
            user: Some("1234:2345".to_owned()),
            ..container()
        };
        let script = "chdir '/out' or die; while (chdir 'd') {} open(F, '>>', 'file') or die; exit((stat 'file')[4] == 1234 ? 0 : 1)";
        run(&subject, spec, &["perl", "-e", script].map(str::to_owned)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_is_invalid_when_file_replaces_directory() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let refused = async |make: &dyn Fn(&Path)| {
        let image = runtime.volume().await;
        let root = directory(&*runtime, image).await.join("rootfs");
        fs::create_dir_all(root.join("etc")).expect("made");
        make(&root);
        let spec = ContainerSpec { root: Root::Volume(image), ..container() };
        let made = runtime.create_container(ContainerHandle::new(), spec).await;
        made.map_or_else(|error| Some(error.reason()), |()| None)
    };
    for place in ["proc", "sys", "dev", "tmp", "run"] {
        let file = refused(&|root| fs::write(root.join(place), "").expect("written")).await;
        assert_eq!(file, Some(FailureReason::InvalidImage), "{place}");
    }
    for place in ["proc", "sys", "dev"] {
        let link = refused(&|root| {
            fs::create_dir(root.join("other")).expect("made");
            symlink("other", root.join(place)).expect("linked");
        })
        .await;
        assert_eq!(link, Some(FailureReason::InvalidImage), "{place}");
    }
    let links = refused(&|root| symlink("tmp", root.join("tmp")).expect("linked")).await;
    assert_eq!(links, Some(FailureReason::InvalidImage));
    let accounts = refused(&|root| symlink("passwd", root.join("etc/passwd")).expect("linked")).await;
    assert_eq!(accounts, Some(FailureReason::InvalidImage));
    let resolver = refused(&|root| fs::create_dir(root.join("etc/resolv.conf")).expect("made")).await;
    assert_eq!(resolver, Some(FailureReason::InvalidImage));
    assert_eq!(refused(&|_| ()).await, None);
}

fn set_flags(path: &Path, flags: IFlags) {
    let directory = fs::File::open(path).expect("opened");
    rustix::fs::ioctl_setflags(directory, flags).expect("flags set");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runtime_starts_with_unremovable_leftovers() {
    let Some(mut subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let kept = runtime.volume().await;
    let state = subject.dir.path().join("state");
    let left =
        [("volumes", VolumeHandle::new().to_string()), ("containers", ContainerHandle::new().to_string())];
    let places = left.map(|(kind, handle)| state.join(kind).join(format!(".gone-{handle}/upper")));
    for place in &places {
        fs::create_dir_all(place).expect("made");
        set_flags(place, IFlags::IMMUTABLE);
    }
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    directory(&*runtime, kept).await;
    let held = runtime.list().await.expect("list");
    assert_eq!((held.containers.len(), held.volumes.len()), (1, 2), "the other objects still exist");
    let stuck = held.volumes.iter().copied().find(|volume| *volume != kept).expect("the rest of a volume");
    runtime.destroy_volume(stuck).await.expect_err("the volume cannot be removed");
    runtime.destroy_volume(kept).await.expect("destroyed");

    for place in &places {
        set_flags(place, IFlags::empty());
    }
    runtime.destroy_volume(stuck).await.expect("destroyed");
}
