//! The registration of a Concourse worker and its effects: certificates, proxies, images of
//! resource types.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use domain::VolumeHandle;
use domain::workload::EnvironmentVariable;
use runtime::{ContainerSpec, ProcessSpec, Root, Runtime, RuntimeError, VolumeSource, WorkerProvided};
use runtime_gateway::Config;
use runtime_gateway::garden::{GardenArgs, GardenConfig, GardenWorker};
use serde_json::{Value, json};
use testing::conformance::{ProcessOutput, RuntimeExt, container, mount, process};
use testing::garden::Manner;

use super::faults::Bench;

/// The configuration for a worker with this registration.
fn registered(directory: &Path, worker: &Value) -> GardenConfig {
    let path = directory.join("workers.json");
    std::fs::write(&path, worker.to_string()).expect("write");
    let args = GardenArgs { workers_file: Some(path), ..GardenArgs::default() };
    let workers = args.workers(GardenWorker::default()).expect("a worker");
    let unused = "http://127.0.0.1:9";
    let common = Config::for_worker("", unused, unused, unused, unused, directory.to_owned());
    workers[0].config(&common, directory).1
}

/// A gateway for the bench's worker. `own` has the registration without addresses.
async fn gateway(bench: &Bench, directory: &Path, mut own: Value) -> Result<Arc<dyn Runtime>, RuntimeError> {
    let runtime = bench.subject.another(|config| {
        own["name"] = "w1".into();
        own["addr"] = config.garden.clone().into();
        own["baggageclaim_url"] = format!("http://{}", config.baggageclaim).into();
        let output = registered(directory, &own);
        let GardenConfig { environment, certs_path, resource_types, .. } = output;
        GardenConfig { environment, certs_path, resource_types, ..config }
    });
    Ok(runtime.await?)
}

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/sh", "-c", script].map(str::to_owned))
}

fn lines(output: &ProcessOutput) -> Vec<&str> {
    output.text().lines().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_proxies_are_in_process_environment() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let directory = tempfile::tempdir().expect("a directory");
        let own = json!({ "http_proxy_url": "http://proxy:3128", "https_proxy_url": "http://proxy:3129", "no_proxy": "localhost" });
        let runtime = gateway(&bench, directory.path(), own).await.expect("a gateway");
        let spec = ProcessSpec {
            environment: vec![EnvironmentVariable { name: b"http_proxy".to_vec(), value: b"ours".to_vec() }],
            ..shell("echo $http_proxy; echo $https_proxy; echo $no_proxy")
        };
        let output = runtime.run(bench.spec.clone(), spec).await;
        assert_eq!(lines(&output), ["http://proxy:3128", "http://proxy:3129", "localhost"], "{manner:?}");
    }
}

/// Creates a volume with provided contents.
async fn imported(runtime: &Arc<dyn Runtime>, what: WorkerProvided) -> Result<VolumeHandle, RuntimeError> {
    let volume = VolumeHandle::new();
    runtime.create_volume(volume, VolumeSource::WorkerProvided(what)).await?;
    Ok(volume)
}

fn git() -> WorkerProvided {
    WorkerProvided::ResourceType("git".to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_certificates_follow_links() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let (kept, certs) = (directory.path().join("kept"), directory.path().join("certs"));
    for path in [&kept, &certs] {
        std::fs::create_dir(path).expect("make");
    }
    std::fs::write(kept.join("ca.crt"), "trusted\n").expect("write");
    std::os::unix::fs::symlink(kept.join("ca.crt"), certs.join("ca.crt")).expect("a link");
    let runtime = gateway(&bench, directory.path(), json!({ "certs_path": certs })).await.expect("a gateway");
    let [along] = &runtime.capabilities().worker_provided[..] else { panic!("{:?}", runtime.capabilities()) };
    assert_eq!((&along.what, along.path.as_str()), (&WorkerProvided::Certs, certs.to_str().expect("text")));
    assert!(!runtime.capabilities().image_kinds.contains(&"resource-type".to_owned()));
    let volume = imported(&runtime, WorkerProvided::Certs).await.expect("imported");
    assert!(runtime.list().await.expect("list").volumes.contains(&volume), "the volume is listed");
    let script = "cat /etc/ssl/certs/ca.crt; touch /etc/ssl/certs/mine 2>/dev/null || echo refused";
    let spec = ContainerSpec { mounts: vec![mount(volume, "/etc/ssl/certs", true)], ..bench.spec.clone() };
    let output = runtime.run(spec, shell(script)).await;
    assert_eq!(lines(&output), ["trusted", "refused"], "the target of the link is visible and read-only");

    // A missing directory is an error at its use, but the gateway still serves the worker.
    let before = bench.subject.volumes.handles();
    let missing = gateway(&bench, directory.path(), json!({ "certs_path": "/nonexistent" })).await;
    let missing = imported(&missing.expect("a gateway"), WorkerProvided::Certs).await;
    assert!(matches!(missing, Err(RuntimeError::Other(_))), "{missing:?}");
    assert_eq!(bench.subject.volumes.handles(), before, "no volume remains");
}

/// An image in the format of workers: a gzip'ed archive with a root file system, and this text in
/// `/etc/release`.
fn image(path: &Path, release: &str) {
    let root = tempfile::tempdir().expect("a directory");
    for name in ["usr", "bin", "sbin", "lib", "lib64", "dev", "proc", "tmp", "etc"] {
        std::fs::create_dir(root.path().join(name)).expect("make");
    }
    std::fs::write(
        root.path().join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/home/nobody:/bin/sh\n",
    )
    .expect("write");
    std::fs::write(root.path().join("etc/release"), release).expect("write");
    // Otherwise only root could enter the directory.
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o755)).expect("permit");
    let tar = Command::new("tar").arg("-czf").arg(path).arg("-C").arg(root.path()).arg(".").status();
    assert!(tar.expect("tar is installed").success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resource_type_images_are_container_roots() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("rootfs.tgz");
        image(&path, "first");
        let advertised = |version: &str| {
            json!({ "resource_types": [
                { "type": "git", "image": path, "version": version, "privileged": false, "unique_version_history": false },
            ] })
        };
        let runtime = gateway(&bench, directory.path(), advertised("1")).await.expect("a gateway");
        let capabilities = runtime.capabilities().clone();
        assert!(capabilities.image_kinds.contains(&"resource-type".to_owned()));
        let [known] = &capabilities.resource_types()[..] else { panic!("{capabilities:?}") };
        assert_eq!((known.name.as_str(), known.version.as_str()), ("git", "1"));
        let unknown = imported(&runtime, WorkerProvided::ResourceType("s3".to_owned())).await;
        assert!(matches!(unknown, Err(RuntimeError::Unsupported(_))), "{unknown:?}");
        let parent = imported(&runtime, git()).await.expect("an image");
        let made = async |runtime: &Arc<dyn Runtime>, parent| {
            let root = VolumeHandle::new();
            runtime.create_volume(root, VolumeSource::CopyOnWrite { parent }).await.expect("a root");
            root
        };
        // The script does not write as a user without permission.
        let release =
            "cat /etc/release; echo; [ ! -w /etc/release ] || echo changed > /etc/release; echo $HOME";
        for user in [None, Some("nobody".to_owned())] {
            let root = made(&runtime, parent).await;
            let spec = ContainerSpec { root: Root::WholeVolume(root), user, ..container() };
            let home = if spec.user.is_some() { "/home/nobody" } else { "/root" };
            let output = runtime.run(spec, shell(release)).await;
            assert_eq!(lines(&output), ["first", home], "{manner:?}: each container has a separate layer");
        }

        // The worker was replaced by a newer one with the same volumes.
        image(&path, "second");
        drop(runtime);
        let runtime = gateway(&bench, directory.path(), advertised("2")).await.expect("a gateway");
        runtime.create_volume(parent, VolumeSource::WorkerProvided(git())).await.expect("it is there");
        for (parent, expected) in
            [(parent, "first"), (imported(&runtime, git()).await.expect("it"), "second")]
        {
            let root = made(&runtime, parent).await;
            let spec = ContainerSpec { root: Root::WholeVolume(root), ..container() };
            assert_eq!(lines(&runtime.run(spec, shell(release)).await), [expected, "/root"], "{manner:?}");
        }

        // A missing image is reported as an error.
        std::fs::remove_file(&path).expect("remove");
        let before = bench.subject.volumes.handles();
        let missing = imported(&runtime, git()).await;
        assert!(matches!(missing, Err(RuntimeError::Other(_))), "{missing:?}");
        assert_eq!(bench.subject.volumes.handles(), before, "no volume remains");
    }
}
