//! Conformance tests of containers.

use std::path::Path;

use domain::workload::{EnvironmentVariable, FailureReason};
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use runtime::{ContainerSpec, Mount, ProcessSpec, Root, RuntimeError};

use super::{
    RuntimeExt, Subject, claims, directory, exited, has, lines, mount, on_root, process, programs, put,
};

/// Creation and destruction can be repeated. A process cannot start in a container that does not
/// exist.
pub async fn container_creation_and_destruction_are_idempotent(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(on_root(&subject).await).await;
    runtime.create_container(handle, on_root(&subject).await).await.expect("create it again");
    assert_eq!(runtime.list().await.expect("list").containers, [handle]);
    runtime.destroy_container(handle).await.expect("destroy");
    runtime.destroy_container(handle).await.expect("destroy again");
    assert_eq!(runtime.list().await.expect("list").containers, []);
    let refused = runtime.start(handle, ProcessId::new(), process(&programs::exit(0))).await;
    assert!(matches!(refused, Err(RuntimeError::ContainerNotFound(_))), "{refused:?}");
}

/// A container with an invalid specification is rejected at its creation, and leaves nothing
/// behind.
pub async fn invalid_containers_are_rejected(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let unknown = VolumeHandle::new();
    let base = on_root(&subject).await;
    let with = |mounts: Vec<Mount>| ContainerSpec { mounts, ..base.clone() };
    let as_user = |user: &str| ContainerSpec { user: Some(user.to_owned()), ..base.clone() };
    let at = |directory: &str| ContainerSpec { directory: directory.into(), ..base.clone() };
    let mut cases = vec![
        (with(vec![mount(unknown, "/in", true)]), FailureReason::WorkerFailed),
        (with(vec![mount(volume, "relative", true)]), FailureReason::InvalidMount),
        (with(vec![mount(volume, "/a/../b", true)]), FailureReason::InvalidMount),
        (with(vec![mount(volume, "/", true)]), FailureReason::InvalidMount),
        (with(vec![mount(volume, "/in", true), mount(volume, "/in", true)]), FailureReason::InvalidMount),
    ];
    if claims(&*runtime, "image-checks") {
        cases.extend([
            (with(vec![mount(volume, "/etc/passwd", true)]), FailureReason::InvalidMount),
            (with(vec![mount(volume, "/etc/passwd/below", true)]), FailureReason::InvalidMount),
            (as_user("gantry-nobody"), FailureReason::UserNotFound),
            (as_user("root:gantry-nobody"), FailureReason::UserNotFound),
            (at("/gantry/nowhere"), FailureReason::WorkingDirectoryMissing),
            (at("/etc/passwd"), FailureReason::WorkingDirectoryMissing),
        ]);
    }
    for (spec, reason) in cases {
        let refused = runtime.create_container(ContainerHandle::new(), spec.clone()).await;
        assert_eq!(refused.as_ref().map_err(RuntimeError::reason), Err(reason), "{spec:?}: {refused:?}");
    }
    assert_eq!(runtime.list().await.expect("list").containers, []);
}

/// A root of a kind that the runtime does not support is rejected.
pub async fn unsupported_root_kinds_are_rejected(subject: impl Subject) {
    let runtime = subject.runtime();
    let kinds = runtime.capabilities().image_kinds.clone();
    if !kinds.iter().any(|kind| kind == "host") {
        let host = ContainerSpec { root: Root::Host, ..on_root(&subject).await };
        let refused = runtime.create_container(ContainerHandle::new(), host).await;
        assert!(matches!(refused, Err(RuntimeError::Unsupported(_))), "{refused:?}");
    }
    assert_eq!(runtime.list().await.expect("list").containers, []);
}

/// Volumes appear at their paths. Read-only volumes cannot be written to.
pub async fn volumes_mount_read_only_and_writable(subject: impl Subject) {
    let runtime = subject.runtime();
    let (written, read) = (runtime.volume().await, runtime.volume().await);
    let mounts = vec![mount(written, "/new/deep/out", false), mount(read, "/in", true)];
    let spec = ContainerSpec { mounts, ..on_root(&subject).await };
    assert_eq!(
        runtime.run(spec.clone(), process(&programs::append("/new/deep/out/file"))).await.ended,
        Some(exited(0))
    );
    assert_eq!(lines(&*runtime, written, "file").await, 1);
    assert_ne!(runtime.run(spec, process(&programs::append("/in/file"))).await.ended, Some(exited(0)));
    assert_eq!(lines(&*runtime, read, "file").await, 0);
}

/// A mount below the path of another mount appears inside it, in any order of the mounts.
pub async fn nested_mounts_are_visible(subject: impl Subject) {
    let runtime = subject.runtime();
    let (outer, inner) = (runtime.volume().await, runtime.volume().await);
    let mounts = vec![mount(inner, "/outer/inner", false), mount(outer, "/outer", false)];
    let spec = ContainerSpec { mounts, ..on_root(&subject).await };
    for path in ["/outer/file", "/outer/inner/file"] {
        let output = runtime.run(spec.clone(), process(&programs::append(path))).await;
        assert_eq!(output.ended, Some(exited(0)), "{path}");
    }
    assert_eq!(lines(&*runtime, outer, "file").await, 1);
    assert_eq!(lines(&*runtime, inner, "file").await, 1);
    assert_eq!(lines(&*runtime, outer, "inner/file").await, 0);
}

/// A directory of one volume becomes the contents of another volume. A path that is not a directory
/// is rejected.
pub async fn take_directory_moves_a_directory(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "replaceable-outputs") {
        return;
    }
    let (from, into) = (runtime.volume().await, runtime.volume().await);
    let root = directory(&*runtime, from).await;
    std::fs::create_dir_all(root.join("a/b")).expect("directories");
    std::fs::write(root.join("a/b/file"), "line\n").expect("write");
    std::fs::write(root.join("file"), "").expect("write");
    std::os::unix::fs::symlink("a", root.join("link")).expect("link");
    for path in ["missing", "file", "link", "link/b", "a/b/file", "missing/b"] {
        let refused = runtime.take_directory(from, Path::new(path), into).await;
        assert!(matches!(refused, Err(RuntimeError::OutputMissing(_))), "{path}: {refused:?}");
    }
    for _ in 0..2 {
        runtime.take_directory(from, Path::new("a/b"), into).await.expect("take");
        assert_eq!(lines(&*runtime, into, "file").await, 1);
    }
    assert!(!root.join("a/b").exists());
    assert!(root.join("file").exists());
}

/// A container can mount one volume several times.
pub async fn volume_mounts_at_two_paths(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    put(&*runtime, volume, "file", "line\nline\n").await;
    let mounts = vec![mount(volume, "/first", true), mount(volume, "/second", true)];
    let spec = ContainerSpec { mounts, ..on_root(&subject).await };
    for path in ["/first/file", "/second/file"] {
        let waiting = programs::append_and_wait_for_another(path);
        let output = runtime.run(spec.clone(), process(&waiting)).await;
        assert_eq!(output.ended, Some(exited(7)), "{path}");
    }
}

/// The user of a container owns the working directory and the writable volumes.
pub async fn user_owns_writable_mounts(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "owned-mounts") {
        return;
    }
    let (written, read) = (runtime.volume().await, runtime.volume().await);
    put(&*runtime, written, "file", "").await;
    let spec = ContainerSpec {
        mounts: vec![mount(written, "/out", false), mount(read, "/in", true)],
        directory: b"/workspace".to_vec(),
        user: Some("1234:2345".to_owned()),
        ..on_root(&subject).await
    };
    let output = runtime.run(spec.clone(), process(&programs::location())).await;
    assert_eq!(output.text(), "/workspace\n1234\n2345\n1234\n");
    assert_eq!(runtime.run(spec, process(&programs::append("/out/file"))).await.ended, Some(exited(0)));
}

/// A process has exactly the given environment, plus PATH and HOME.
pub async fn process_receives_its_environment(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "complete-output") {
        return;
    }
    let variable = |name: &str, value: &str| EnvironmentVariable { name: name.into(), value: value.into() };
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let cases = [
        (
            vec![variable("NAME", "a value"), variable("HOME", "/elsewhere")],
            vec!["HOME=/elsewhere", "NAME=a value", path],
        ),
        (vec![], vec!["HOME=/root", path]),
    ];
    for (environment, expected) in cases {
        let spec = ProcessSpec { environment, ..process(&programs::environment()) };
        let output = runtime.run(on_root(&subject).await, spec).await;
        let mut found: Vec<_> = output.text().lines().collect();
        found.sort_unstable();
        if has(&*runtime, "exact-environment") {
            assert_eq!(found, expected);
        }
        // Without `exact-environment` the worker may add variables.
        assert!(expected.iter().all(|line| found.contains(line)), "{found:?}");
    }
}
