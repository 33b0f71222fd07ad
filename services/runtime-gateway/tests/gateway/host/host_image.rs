//! The view of this machine in the image `host`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::{ContainerSpec, ProcessSpec, Runtime, RuntimeError};
use runtime_gateway::host::{HostConfig, HostRuntime, Permission, Policy};
use testing::conformance::{RuntimeExt, Subject, container, mount, process};

use super::subject::{HostSubject, config};

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/sh", "-c", script].map(str::to_owned))
}

async fn script_output(runtime: &Arc<dyn Runtime>, spec: ContainerSpec, script: &str) -> String {
    let handle = runtime.made(spec).await;
    let id = runtime.started(handle, shell(script)).await;
    let said = runtime.read_output(id).await;
    runtime.destroy_container(handle).await.expect("destroy");
    format!("{}{}", said.text(), String::from_utf8_lossy(&said.stderr))
}

/// Opens a runtime with these additional paths.
fn showing(dir: &Path, paths: &[&Path]) -> Arc<dyn Runtime> {
    let policy = Policy::allowing([Permission::HostImage]).showing(paths.iter().map(PathBuf::from));
    let masked = vec![dir.join("token")];
    HostRuntime::open(HostConfig { policy, masked, ..config(dir) }).expect("open")
}

#[tokio::test]
async fn image_shows_programs_but_no_user_files() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime: Arc<dyn Runtime> = subject.runtime();
    // On the root file system, which an image with a deny-list would show.
    let secret = tempfile::tempdir_in("/var/tmp").expect("a directory");
    fs::write(secret.path().join("file"), "secret").expect("write");
    let script = format!(
        "cat {secret}/file /etc/shadow /etc/shadow- /etc/gshadow /etc/sudoers /etc/fstab /etc/machine-id /proc/1/root/etc/shadow; \
         ls -A /home /root /opt /srv /mnt /var/lib /var/log /var/tmp /etc/ssl/private | grep -v : ; \
         ls -d /etc/ssh /etc/postgresql /etc/docker /etc/apt /boot /lost+found {state}; echo over",
        secret = secret.path().display(),
        state = subject.dir.path().display(),
    );
    let found = script_output(&runtime, container(), &script).await;
    let (text, errors) = found.split_once("over\n").expect("the end");
    assert_eq!(text.trim(), "", "the directories are empty: {errors}");
    let known = "test -x /usr/bin/env && /bin/sh -c 'grep -q root /etc/passwd && cd /etc/ssl/certs && id -un'; \
        touch /usr/file; touch /etc/ssl/file; echo changed > /etc/hostname && cat /etc/hostname";
    let found = script_output(&runtime, container(), known).await;
    assert!(found.starts_with("root\nchanged\n"), "{found}");
    assert_eq!(found.matches("Read-only file system").count(), 2, "{found}");
}

/// Lists all files outside of the parts that every container has.
#[tokio::test]
async fn unlisted_files_do_not_exist() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime: Arc<dyn Runtime> = subject.runtime();
    let script = "find / -xdev ! -type d ! -path '/etc/*' | sort; find /etc -maxdepth 1 -name passwd";
    let found = script_output(&runtime, container(), script).await;
    let links = ["/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/var/lock", "/var/run"];
    for line in found.lines().filter(|line| *line != "/etc/passwd") {
        assert!(links.contains(&line), "{line} is shown");
    }
    assert!(found.contains("/etc/passwd"), "{found}");
}

#[tokio::test]
async fn added_path_hides_state_of_gantry() {
    if HostSubject::new().is_none() {
        return;
    }
    let shown = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let alias = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let below = shown.path().join("below");
    fs::create_dir(&below).expect("make");
    fs::write(shown.path().join("file"), "found").expect("write");
    let dir = shown.path().join("cluster");
    fs::create_dir(&dir).expect("make");
    fs::write(dir.join("token"), "secret").expect("write");
    symlink("cluster/token", shown.path().join("link")).expect("link");
    rustix::mount::mount_bind(shown.path(), alias.path()).expect("mount");
    let unmounted = Unmounted(alias.path());
    rustix::mount::mount_bind("/etc", &below).expect("mount");
    let _below = Unmounted(&below);
    let runtime = showing(&dir, &[shown.path(), alias.path()]);
    for at in [shown.path(), alias.path()] {
        let at = at.display();
        let script = format!(
            "cat {at}/file; ls {at}/cluster/state {at}/below; cat {at}/cluster/token {at}/link; echo x > {at}/file"
        );
        let found = script_output(&runtime, container(), &script).await;
        assert!(found.starts_with("found"), "{found}");
        assert!(
            !found.contains("secret") && !found.contains("marker") && !found.contains("passwd"),
            "{found}"
        );
        assert!(found.contains("Read-only file system"), "{found}");
    }
    drop(runtime);
    drop(unmounted);
}

#[tokio::test]
async fn container_root_reads_only_public_files() {
    if HostSubject::new().is_none() {
        return;
    }
    let shown = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let dir = tempfile::tempdir_in("/var/tmp").expect("a directory");
    fs::set_permissions(shown.path(), fs::Permissions::from_mode(0o755)).expect("a mode");
    let write = |name: &str, mode| {
        let path = shown.path().join(name);
        fs::write(&path, name).expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
    };
    write("open", 0o644);
    write("closed", 0o600);
    let socket = std::os::unix::net::UnixListener::bind(shown.path().join("socket")).expect("listen");
    fs::set_permissions(shown.path().join("socket"), fs::Permissions::from_mode(0o600)).expect("a mode");
    let runtime = showing(dir.path(), &[shown.path()]);
    let at = shown.path().display();
    let connect = format!(
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"{at}/socket\"); print(\"connected\")'"
    );
    let script = format!(
        "echo ready; cat {at}/open; read word; cat {at}/closed {at}/later; {connect}; /usr/bin/env true && echo runs"
    );
    let handle = runtime.made(container()).await;
    let spec = ProcessSpec {
        stdin: domain::workload::Stdin::Attached,
        output: domain::workload::OutputMode::Attached,
        ..shell(&script)
    };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, runtime::Offsets::default()).await.expect("attach");
    testing::conformance::read_until(&mut attachment.events, "open").await;
    // A file that is created later is protected as well.
    write("later", 0o600);
    attachment.input.stdin(0, bytes::Bytes::from_static(b"go\n")).await.expect("input");
    let said = runtime.read_output(id).await;
    let errors = String::from_utf8_lossy(&said.stderr);
    assert!(said.text().ends_with("runs\n") && !said.text().contains("connected"), "{said:?}");
    assert_eq!(errors.matches("ermission denied").count(), 3, "{errors}");
    runtime.destroy_container(handle).await.expect("destroy");
    drop(socket);
}

/// Unmounts a path when dropped.
struct Unmounted<'a>(&'a Path);

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).expect("unmount");
    }
}

#[tokio::test]
async fn mounts_in_read_only_parts_are_rejected() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime: Arc<dyn Runtime> = subject.runtime();
    let volume = runtime.volume().await;
    for (path, possible) in [
        ("/usr/none/here", false),
        ("/etc/passwd/x", false),
        ("/usr/share", true),
        ("/srv/data", true),
        ("/etc/mine", true),
    ] {
        let spec = ContainerSpec { mounts: vec![mount(volume, path, false)], ..container() };
        let handle = domain::ContainerHandle::new();
        match runtime.create_container(handle, spec).await {
            Ok(()) => {
                let id = runtime.started(handle, shell(&format!("touch {path}/x && echo made"))).await;
                assert_eq!(runtime.read_output(id).await.text(), "made\n", "{path}");
                runtime.destroy_container(handle).await.expect("destroy");
                assert!(possible, "{path}");
            }
            Err(RuntimeError::InvalidMount { .. }) => assert!(!possible, "{path}"),
            Err(error) => panic!("{path}: {error}"),
        }
    }
    let mode = fs::metadata("/etc/hostname").expect("there").permissions().mode();
    assert!(mode & 0o400 != 0, "the directory of the machine is unchanged");
}
