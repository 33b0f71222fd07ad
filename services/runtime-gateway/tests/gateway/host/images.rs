//! Images with missing parts: host names and interpreters of programs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;

use domain::VolumeHandle;
use domain::workload::{Exit, FailureReason, Network};
use runtime::{ContainerSpec, Ended, Root, Runtime};
use testing::conformance::{RuntimeExt, Subject, container, directory, process};

use super::subject::HostSubject;
use super::user_namespaces::copy_program;

/// Creates an image with a shell and `cat`. Returns its root directory too.
async fn image(runtime: &Arc<dyn Runtime>) -> (VolumeHandle, PathBuf) {
    let image = runtime.volume().await;
    let rootfs = directory(&**runtime, image).await.join("rootfs");
    ["/bin/sh", "/bin/cat"].iter().for_each(|program| copy_program(program, &rootfs));
    (image, rootfs)
}

#[tokio::test]
async fn host_names_resolve_in_any_image() {
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
            let output = runtime.run(spec, process(&["/bin/sh", "-c", script].map(str::to_owned))).await;
            assert_eq!(output.stderr, b"", "{kind}");
            let (name, lines) = output.text().split_once('\n').expect("lines");
            assert!(lines.contains("127.0.0.1\tlocalhost\n"), "{kind}: {lines}");
            assert!(lines.contains(&format!("127.0.1.1\t{name}\n")), "{kind}: {lines}");
            let kept = matches!(kind, "read-only" | "link to own");
            assert_eq!(lines.starts_with(own), kept, "{kind}: {lines}");
            assert!(!lines.contains("root:"), "{kind}: {lines}");
        }
    }
}

#[tokio::test]
async fn program_without_its_interpreter_is_explained() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let (image, rootfs) = image(&runtime).await;
    let write = |name: &str, text: &str| {
        fs::write(rootfs.join(name), text).expect("write");
        fs::set_permissions(rootfs.join(name), fs::Permissions::from_mode(0o755)).expect("set");
    };
    write("bad", "#!/no/such -e\n");
    write("windows", "#!/bin/sh\r\necho\r\n");
    write("good", "#!/bin/sh\nexit 3\n");
    fs::copy("/bin/true", rootfs.join("dynamic")).expect("copy");
    let ran = async |program: &str| {
        let spec = ContainerSpec { root: Root::Volume(image), ..container() };
        runtime.run(spec, process(&[program.to_owned()])).await.ended.expect("an end")
    };
    let mut cases = vec![
        ("/bad", "`/bad` needs the interpreter `/no/such`"),
        ("./bad", "`./bad` needs the interpreter `/no/such`"),
        ("/windows", "`/windows` has Windows line ends"),
    ];
    // The directory of the loader on most 64-bit machines.
    if fs::remove_dir_all(rootfs.join("lib64")).is_ok() {
        cases.push(("/dynamic", "`/dynamic` needs the dynamic loader `/lib64/"));
        cases.push(("/good", "needs the interpreter `/bin/sh`, which needs the dynamic loader"));
    }
    for (program, expected) in cases {
        let Ended::NotStarted(failure) = ran(program).await else { panic!("{program} was started") };
        assert_eq!(failure.reason, FailureReason::ProgramNotExecutable, "{failure:?}");
        assert!(failure.message.contains(expected), "{program}: {failure:?}");
    }
    copy_program("/bin/sh", &rootfs);
    let ended = ran("/good").await;
    assert!(matches!(ended, Ended::Exited { exit: Exit::Code(3), .. }), "{ended:?}");
}
