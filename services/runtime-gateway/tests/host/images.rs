//! What containers find in images that lack something: names without a server.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;

use domain::VolumeHandle;
use domain::workload::Network;
use runtime::{ContainerSpec, Root, Runtime};
use testing::conformance::{RuntimeExt, Subject, container, directory, process};

use super::subject::HostSubject;
use super::user_namespaces::copy_program;

/// An image with a shell and `cat`, and its root file system.
async fn image(runtime: &Arc<dyn Runtime>) -> (VolumeHandle, PathBuf) {
    let image = runtime.volume().await;
    let rootfs = directory(&**runtime, image).await.join("rootfs");
    ["/bin/sh", "/bin/cat"].iter().for_each(|program| copy_program(program, &rootfs));
    (image, rootfs)
}

#[tokio::test]
async fn names_resolve_whatever_the_image_has() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let own = "10.0.0.7 own\n";
    for kind in
        ["no /etc", "no file", "empty", "read-only", "link to nowhere", "link out", "link to own", "pipe"]
    {
        let (image, rootfs) = image(&runtime).await;
        let etc = rootfs.join("etc");
        let hosts = etc.join("hosts");
        if kind != "no /etc" {
            fs::create_dir_all(&etc).expect("make");
        }
        match kind {
            "empty" => fs::write(&hosts, "").expect("write"),
            "read-only" => {
                fs::write(&hosts, own).expect("write");
                fs::set_permissions(&hosts, fs::Permissions::from_mode(0o444)).expect("set");
                fs::set_permissions(&etc, fs::Permissions::from_mode(0o555)).expect("set");
            }
            "link to nowhere" => symlink("/run/hosts", &hosts).expect("link"),
            "link out" => symlink("../../../../../../../etc/passwd", &hosts).expect("link"),
            "link to own" => {
                fs::write(etc.join("own"), own).expect("write");
                symlink("/etc/own", &hosts).expect("link");
            }
            "pipe" => {
                let made = std::process::Command::new("mkfifo").arg(&hosts).status();
                assert!(made.expect("run mkfifo").success());
            }
            _ => {}
        }
        for network in [Network::None, Network::Private] {
            let spec = ContainerSpec { root: Root::Volume(image), network, ..container() };
            let script = "cat /proc/sys/kernel/hostname /etc/hosts; echo more >> /etc/hosts";
            let said = runtime.ran(spec, process(&["/bin/sh", "-c", script].map(str::to_owned))).await;
            assert_eq!(said.stderr, b"", "{kind}");
            let (name, lines) = said.text().split_once('\n').expect("lines");
            assert!(lines.contains("127.0.0.1\tlocalhost\n"), "{kind}: {lines}");
            assert!(lines.contains(&format!("127.0.1.1\t{name}\n")), "{kind}: {lines}");
            let kept = matches!(kind, "read-only" | "link to own");
            assert_eq!(lines.starts_with(own), kept, "{kind}: {lines}");
            assert!(!lines.contains("root:"), "{kind}: {lines}");
        }
    }
}
