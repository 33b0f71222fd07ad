//! Images from registries, OCI layouts and archives.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use integration_tests::registry::{Access, Layout, PASSWORD, Registry};
use integration_tests::{Cluster, code, describe, id, may_run_containers, wait_for};
use rpc::pb::scheduler as pb;

use crate::images::root_file_system;

/// Bytes after which the proxy of a test breaks each connection.
const CUT_BYTES: u64 = 2 << 20;

/// Makes the image `app` of two layers. The second one replaces a directory, removes a file and
/// changes one of two hard links.
pub(crate) fn app() -> Layout {
    let layout = Layout::new();
    layout.layer("base", "lower", |root| {
        root_file_system(root);
        for directory in ["srv", "old/deep", "tmp", "run", "proc", "sys", "dev"] {
            fs::create_dir_all(root.join(directory)).expect("directories");
        }
        fs::write(root.join("old/deep/lower"), "lower").expect("written");
        fs::write(root.join("gone"), "lower").expect("written");
        fs::write(root.join("first"), "linked").expect("written");
        fs::hard_link(root.join("first"), root.join("second")).expect("a link");
    });
    layout.layer("lower", "app", |root| {
        fs::remove_dir_all(root.join("old")).expect("removed");
        fs::create_dir(root.join("old")).expect("a directory");
        fs::write(root.join("old/upper"), "upper").expect("written");
        fs::remove_file(root.join("gone")).expect("removed");
        fs::remove_file(root.join("first")).expect("removed");
        fs::write(root.join("first"), "replaced").expect("written");
    });
    let script = r#"echo "$0 $A $(id -u) $PWD"; cat /first /second; ls /old /gone; exit 7"#;
    let words = ["--config.entrypoint", "/bin/sh", "--config.entrypoint", "-c", "--config.cmd", script];
    layout.configure("app", &words);
    let more = ["--config.env", "A=of the image", "--config.user", "ann", "--config.workingdir", "/srv"];
    layout.configure("app", &[&more[..], &["--config.env", "PATH=/bin"]].concat());
    layout
}

fn run(cluster: &Cluster, arguments: &[&str]) -> Output {
    cluster.output([&["run", "--no-stdin"][..], arguments].concat())
}

#[track_caller]
fn assert_runs_as_configured(output: &Output) {
    assert_eq!(code(output), 7, "{}", describe(output));
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(
        printed,
        "/bin/sh of the image 4242 /srv\nreplacedlinked/old:\nupper\n",
        "{}",
        describe(output)
    );
}

#[test]
fn image_of_registry_runs_with_its_defaults() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Guarded), app());
    registry.push(&layout, "app", "team/app:1");
    let image = registry.reference("team/app:1");
    let mut cluster = Cluster::new().with("GANTRY_REGISTRY_CA", registry.ca().to_str().expect("text"));
    let docker = cluster.path("docker");
    fs::create_dir(&docker).expect("a directory");
    cluster.set("DOCKER_CONFIG", docker.to_str().expect("text"));

    for config in [None, Some("wrong")] {
        if let Some(password) = config {
            fs::write(docker.join("config.json"), registry.docker_config(password)).expect("written");
        }
        let refused = run(&cluster, &["--image", &image]);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        assert!(
            String::from_utf8_lossy(&refused.stderr).contains("REGISTRY_DENIED"),
            "{}",
            describe(&refused)
        );
    }
    fs::write(docker.join("config.json"), registry.docker_config(PASSWORD)).expect("written");
    assert_runs_as_configured(&run(&cluster, &["--image", &image]));
    // What is given takes precedence.
    let given = ["--env", "A=given", "-u", "root", "-w", "/old", "--image", &image];
    let script = "echo $A; id -u; ls";
    let output = run(&cluster, &[&given[..], &["--", script]].concat());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "given\n0\nupper\n", "{}", describe(&output));
    let output = run(&cluster, &[&given[..], &["--entrypoint", "/bin/cat", "--", "upper"]].concat());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "upper", "{}", describe(&output));
    // Without the command of the image, nothing is left to run.
    let output = run(&cluster, &["--image", &image, "--entrypoint", ""]);
    assert_eq!(code(&output), 125, "{}", describe(&output));
    let blobs = registry.requests("GET /v2/team/app/blobs/sha256");
    assert_eq!(blobs, 3, "the configuration and both layers were fetched once");

    // Another team cannot use what was pulled with credentials, unless it has them, too.
    fs::remove_file(docker.join("config.json")).expect("removed");
    let refused = run(&cluster, &["--team", "other", "--image", &image]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("REGISTRY_DENIED"), "{}", describe(&refused));

    let listed = cluster.list("images");
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!((&listed[0]["image"], &listed[0]["shared"]), (&image.as_str().into(), &false.into()));
    let shown = String::from_utf8(cluster.succeed(["show", "image", &image])).expect("text");
    assert!(shown.contains("linux/amd64") || shown.contains("linux/arm64"), "{shown}");
    assert!(shown.contains("ann") && shown.contains("/bin/sh -c"), "{shown}");
}

#[test]
fn images_of_files_run_like_those_of_registry() {
    if !may_run_containers() {
        return;
    }
    let (cluster, layout) = (Cluster::new(), app());
    let paths = [
        format!("oci:{}:app", layout.path().display()),
        format!("oci-archive:{}", layout.archive("app", "oci-archive").display()),
        format!("docker-archive:{}", layout.archive("app", "docker-archive").display()),
    ];
    for image in &paths {
        assert_runs_as_configured(&run(&cluster, &["--image", image]));
    }
    // All of them are the same tree.
    let sealed = cluster.list("artifacts").into_iter().filter(|artifact| artifact["state"] == "sealed");
    assert_eq!(sealed.count(), 1);
    for (image, expected) in [
        (format!("oci:{}", layout.path().display()), "it has base, lower, app"),
        (format!("oci:{}:none", layout.path().display()), "it has base, lower, app"),
        ("oci-archive:none.tar".to_owned(), "No such file"),
    ] {
        let output = run(&cluster, &["--image", &image]);
        assert_eq!(code(&output), 125, "{}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains(expected), "{}", describe(&output));
    }
}

#[test]
fn image_of_cluster_is_used_while_registry_is_away() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), app());
    registry.push(&layout, "app", "app:1");
    let (cluster, image) = (Cluster::new(), registry.reference("app:1"));
    assert_runs_as_configured(&run(&cluster, &["--image", &image]));
    let other = registry.reference("app:2");
    drop(registry);
    let output = run(&cluster, &["--image", &image]);
    assert_runs_as_configured(&output);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(printed.contains("using sha256:") && printed.contains("which the cluster has"), "{printed}");
    let output = run(&cluster, &["--image", &other]);
    assert_eq!(code(&output), 125, "{}", describe(&output));
    assert!(describe(&output).contains("Connection refused"), "{}", describe(&output));
    assert!(!describe(&output).contains("https://"), "{}", describe(&output));
}

#[test]
fn image_is_deleted_by_its_name() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), app());
    registry.push(&layout, "app", "team/app:1");
    registry.push(&layout, "lower", "team/app:2");
    let cluster = Cluster::new();
    let [image, other] = ["team/app:1", "team/app:2"].map(|name| registry.reference(name));
    let artifact = id(cluster.succeed(["pull", &image]));
    let unused = id(cluster.succeed(["pull", &other]));
    for line in [&["inspect", &image][..], &["explain", &image], &["show", "image", &image]] {
        let shown = String::from_utf8(cluster.succeed(line)).expect("text");
        assert!(shown.contains(&image) && shown.contains(&artifact), "{line:?}: {shown}");
    }
    // A further tag of the same digest is the same image, which has the name of its first pull.
    let tag = registry.reference("team/app:also");
    registry.push(&layout, "app", "team/app:also");
    assert_eq!(id(cluster.succeed(["pull", &tag])), artifact);
    let elsewhere = image.replace("localhost", "127.0.0.1");
    for line in
        [&["rm", &tag][..], &["rm", &elsewhere], &["inspect", &elsewhere], &["show", "image", &elsewhere]]
    {
        let refused = cluster.output(line);
        let why = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        assert!(why.contains(&format!("similar name are {image}, {other}")), "{}", describe(&refused));
    }

    // A running workload keeps the files.
    cluster.succeed(["run", "-d", "--name", "it", "--image", &image, "--", "while :; do sleep 1; done"]);
    let deleted = cluster.output(["rm", &image]);
    assert_eq!(code(&deleted), 0, "{}", describe(&deleted));
    assert!(
        String::from_utf8_lossy(&deleted.stdout).starts_with("1 image deleted"),
        "{}",
        describe(&deleted)
    );
    assert!(String::from_utf8_lossy(&deleted.stderr).contains("are kept until"), "{}", describe(&deleted));
    cluster.succeed(["kill", "it"]);
    assert_eq!(code(&cluster.output(["wait", "it"])), 143);
    let names = |cluster: &Cluster| {
        let images = cluster.list("images").into_iter();
        images.map(|image| image["image"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&cluster), [&*other]);
    cluster.succeed(["pull", &image]);
    assert_eq!(names(&cluster), [&*other, &*image]);
    cluster.succeed(["rmi", &image, &other]);
    assert_eq!(names(&cluster), [] as [&str; 0]);
    let explained = String::from_utf8(cluster.succeed(["explain", &unused])).expect("text");
    assert!(explained.contains("deleting"), "{explained}");
}

#[test]
fn image_chooses_stop_signal() {
    if !may_run_containers() {
        return;
    }
    let (cluster, layout) = (Cluster::new(), app());
    layout.configure("app", &["--config.stopsignal", "SIGUSR1"]);
    let image = format!("oci:{}:app", layout.path().display());
    let script = "trap 'echo asked; exit 5' USR1; echo ready; while :; do sleep 0.1; done";
    cluster.succeed(["run", "-d", "--name", "it", "--image", &image, "--", script]);
    let mut logs = cluster.gantry(["logs", "-f", "it"]).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(logs.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    assert_eq!(line(), "ready");
    cluster.succeed(["stop", "it"]);
    assert_eq!(line(), "asked");
    logs.wait().expect("it ends");
}

#[test]
fn unusable_images_are_named_with_their_reason() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), app());
    registry.push(&layout, "app", "app:1");
    let cluster = Cluster::new();
    let unused = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port");
    let (tag, repository) = (registry.reference("app:none"), registry.reference("none"));
    let (image, unreachable) = (registry.reference("app:1"), format!("{unused}/app"));
    let unknown = registry.reference(&format!("app@sha256:{}", "0".repeat(64)));
    for (arguments, expected) in [
        (vec!["--image", &tag], "IMAGE_NOT_FOUND"),
        (vec!["--image", &repository], "IMAGE_NOT_FOUND"),
        (vec!["--image", &unknown], "IMAGE_NOT_FOUND"),
        (vec!["--image", &unreachable], "Connection refused"),
        (vec!["--image", &image, "--platform", "linux/s390x"], "PLATFORM_NOT_FOUND"),
        (vec!["--image", "App"], "names are in lower case"),
        (vec!["--image", &image, "--platform", "linux"], "OS/ARCHITECTURE"),
    ] {
        let output = run(&cluster, &arguments);
        assert_eq!(code(&output), 125, "{}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains(expected), "{}", describe(&output));
    }
    // A layer that is damaged in the registry.
    let blobs = registry.storage().join("docker/registry/v2/blobs/sha256");
    let files = |directory: &std::path::Path| {
        let entries = fs::read_dir(directory).expect("a directory");
        entries.map(|entry| entry.expect("an entry").path()).collect::<Vec<_>>()
    };
    let data =
        files(&blobs).iter().flat_map(|it| files(it)).map(|blob| blob.join("data")).collect::<Vec<_>>();
    let layer = data.iter().max_by_key(|path| fs::metadata(path).expect("a blob").len()).expect("a layer");
    let mut bytes = fs::read(layer).expect("a layer");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(layer, &bytes).expect("written");
    let output = run(&cluster, &["--image", &image]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("INVALID_IMAGE"), "{}", describe(&output));
    // The next attempt fetches it again.
    bytes[middle] ^= 1;
    fs::write(layer, &bytes).expect("written");
    assert_runs_as_configured(&run(&cluster, &["--image", &image]));
}

/// Starts a proxy that breaks each connection after some bytes of answers. Returns its port, and
/// the bytes that it has forwarded.
fn cutting_proxy(to: u16) -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let total = Arc::new(AtomicU64::new(0));
    let counted = total.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (Ok(mut client), Ok(mut server)) = (client, TcpStream::connect(("127.0.0.1", to))) else {
                return;
            };
            let (mut requests, mut sent) =
                (client.try_clone().expect("a socket"), server.try_clone().expect("a socket"));
            // Both directions end with an error when the other side is closed.
            std::thread::spawn(move || _ = std::io::copy(&mut requests, &mut sent));
            let counted = counted.clone();
            std::thread::spawn(move || {
                let (mut buffer, mut forwarded) = ([0; 64 << 10], 0);
                while let Ok(length @ 1..) = server.read(&mut buffer) {
                    if client.write_all(&buffer[..length]).is_err() {
                        break;
                    }
                    forwarded += length as u64;
                    counted.fetch_add(length as u64, Ordering::Relaxed);
                    if forwarded > CUT_BYTES {
                        break;
                    }
                }
                _ = client.shutdown(std::net::Shutdown::Both);
                _ = server.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (port, total)
}

#[test]
fn broken_fetch_continues_where_it_ended() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), Layout::new());
    let size = 10 * CUT_BYTES;
    layout.layer("base", "large", |root| {
        root_file_system(root);
        let mut content = vec![0; size as usize];
        fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut content)).expect("content");
        fs::write(root.join("large"), content).expect("written");
    });
    registry.push(&layout, "large", "large:1");
    let (port, forwarded) = cutting_proxy(registry.port());
    let cluster = Cluster::new();
    let image = format!("localhost:{port}/large:1");
    let output = run(&cluster, &["--image", &image, "--", "/bin/ls", "/large"]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    let forwarded = forwarded.load(Ordering::Relaxed);
    assert!((size..size * 3 / 2).contains(&forwarded), "{forwarded} of {size} bytes");
}

#[test]
fn mirror_is_asked_first_and_registry_afterwards() {
    if !may_run_containers() {
        return;
    }
    let (mirror, registry, layout) = (Registry::start(Access::Open), Registry::start(Access::Open), app());
    mirror.push(&layout, "app", "app:both");
    registry.push(&layout, "app", "app:both");
    registry.push(&layout, "lower", "app:one");
    let names = [&registry, &mirror].map(|registry| format!("localhost:{}", registry.port()));
    let cluster = Cluster::new().with("GANTRY_REGISTRY_MIRROR", &names.join("="));
    assert_runs_as_configured(&run(&cluster, &["--image", &registry.reference("app:both")]));
    assert_eq!(registry.requests("GET /v2/app/"), 0, "the mirror had it");
    let output = run(&cluster, &["--image", &registry.reference("app:one"), "--", "/bin/cat", "/gone"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "lower", "{}", describe(&output));
}

#[test]
fn waiting_callers_share_one_pull() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), app());
    registry.push(&layout, "app", "app:1");
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]);
    let image = registry.reference("app:1");
    let pulls: Vec<_> = (0..6)
        .map(|_| {
            let mut command = cluster.gantry(["pull", &image]);
            command.stdout(std::process::Stdio::piped()).spawn().expect("gantry runs")
        })
        .collect();
    let artifacts: std::collections::BTreeSet<_> = pulls
        .into_iter()
        .map(|pull| {
            let output = pull.wait_with_output().expect("gantry runs");
            assert!(output.status.success(), "{}", describe(&output));
            output.stdout
        })
        .collect();
    assert_eq!(artifacts.len(), 1, "{artifacts:?}");
    assert_eq!(registry.requests("GET /v2/app/blobs/sha256"), 3, "one pull for all");
    let usable = wait_for("the image", || cluster.list("images").pop());
    assert_eq!(usable["shared"], true, "it was pulled without credentials");
}

/// Submits workloads with the image `reference`, and returns their ids.
fn submit(cluster: &Cluster, reference: &str, count: usize) -> Result<Vec<String>, tonic::Status> {
    let endpoint = format!("unix://{}", cluster.path("run/gantry/gantry.sock").display());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let peer = rpc::client::peer(&endpoint, rpc::client::Outgoing::internal()).expect("an address");
        let mut workloads = pb::workloads_client::WorkloadsClient::new(peer);
        let mut ids = Vec::new();
        for _ in 0..count {
            let workload_id = domain::WorkloadId::new().to_string();
            let source = pb::image::Source::Reference(reference.to_owned());
            let spec = pb::WorkloadSpec {
                team: "main".to_owned(),
                kind: pb::WorkloadKind::Task.into(),
                image: Some(pb::Image { source: Some(source), entrypoint: None }),
                stdin: pb::StdinMode::None.into(),
                output: pb::OutputMode::Spooled.into(),
                privilege: pb::Privilege::Confined.into(),
                network: pb::Network::None.into(),
                ..pb::WorkloadSpec::default()
            };
            let request = pb::SubmitRequest { workload_id: workload_id.clone(), spec: Some(spec) };
            workloads.submit(request).await?;
            ids.push(workload_id);
        }
        Ok(ids)
    })
}

#[test]
fn tag_is_resolved_at_submission() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), app());
    registry.push(&layout, "app", "app:1");
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]);
    let image = registry.reference("app:1");
    let workloads = submit(&cluster, &image, 4).expect("accepted");
    for workload in &workloads {
        let output = cluster.output(["attach", workload]);
        assert_runs_as_configured(&output);
        let shown = cluster.succeed(["show", "workload", workload, "--json"]);
        let shown: serde_json::Value = serde_json::from_slice(shown.trim_ascii()).expect("JSON");
        let resolved = shown["spec"]["image"].as_str().expect("an image");
        assert!(resolved.starts_with(&format!("{image}@sha256:")), "{resolved}");
    }
    assert_eq!(registry.requests("GET /v2/app/blobs/sha256"), 3, "one pull for all");

    let refused = submit(&cluster, &registry.reference("app:none"), 1).expect_err("there is no such tag");
    assert_eq!(rpc::Refusal::from(refused).reason.as_deref(), Some("IMAGE_NOT_FOUND"));
    // A digest is looked up by the attempt.
    let unknown = registry.reference(&format!("app@sha256:{}", "0".repeat(64)));
    let workload = &submit(&cluster, &unknown, 1).expect("accepted")[0];
    let output = cluster.output(["attach", workload]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("IMAGE_UNAVAILABLE"), "{}", describe(&output));
}
