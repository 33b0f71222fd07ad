//! Main job on a Concourse worker. Its servers are fakes, and everything else is the real suite.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::registry::{Access, Registry};
use integration_tests::{Cluster, code, describe, may_run_containers, send, started, wait_for, write};
use testing::baggageclaim::{self, Driver};
use testing::garden::{Fault, Manner, Server};

const EVERY: [(Manner, Driver); 3] = [
    (Manner::Containerd, Driver::Overlay),
    (Manner::Guardian, Driver::Overlay),
    (Manner::Houdini, Driver::Naive),
];

/// Cluster with this machine and a Concourse worker, which has the tag `garden`.
struct Suite {
    cluster: Cluster,
    garden: Server,
    volumes: baggageclaim::Server,
    /// State directory of the volume server.
    _tokio: tokio::runtime::Runtime,
    image: String,
    /// Network of the containers.
    network: &'static str,
}

/// Houdini isolates nothing, so its containers have the network of the worker.
fn network(manner: Manner) -> &'static str {
    if manner == Manner::Houdini { "host" } else { "private" }
}

impl Suite {
    fn new(kind: (Manner, Driver)) -> Self {
        Self::with(kind, &[])
    }

    fn with((manner, driver): (Manner, Driver), settings: &[(&str, &str)]) -> Self {
        let tokio = tokio::runtime::Runtime::new().expect("a tokio runtime");
        let garden = Server::start(manner);
        let volumes = tokio.block_on(baggageclaim::Server::start(driver));
        let mut cluster = Cluster::new();
        // Document with which such a worker registers, with a tag.
        let worker = serde_json::json!([{
            "name": "concourse", "addr": garden.address(), "baggageclaim_url": format!("http://{}", volumes.address()),
            "platform": "linux", "tags": ["garden"], "team": "", "resource_types": null, "start_time": 1,
        }]);
        fs::write(cluster.path("workers.json"), worker.to_string()).expect("write");
        let file = cluster.path("workers.json").display().to_string();
        cluster.set("GANTRY_WORKERS_FILE", &file);
        for (name, value) in settings {
            cluster.set(name, value);
        }
        make_image(&cluster.path("image"));
        attended(&cluster);
        let image = format!("artifact:{}", cluster.upload("image"));
        Self { cluster, garden, volumes, _tokio: tokio, image, network: network(manner) }
    }

    /// Returns the arguments of a run on the Concourse worker.
    fn job<'a>(&'a self, more: &[&'a str], script: &'a str) -> Vec<&'a str> {
        let run = ["run", "--tag", "garden", "--network", self.network, "--image", &self.image];
        [&run[..], more, &["--", "sh", "-c", script]].concat()
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.cluster.path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }
}

/// Waits until the Concourse worker has joined the cluster, which starts without it.
fn attended(cluster: &Cluster) {
    cluster.succeed(["list", "workers"]);
    wait_for("the Concourse worker", || {
        let workers = cluster.list("workers");
        let joined =
            |worker: &serde_json::Value| worker["name"] == "concourse" && worker["state"] == "running";
        workers.iter().any(joined).then_some(())
    });
}

#[test]
fn concourse_worker_runs_with_input_and_output() {
    if !may_run_containers() {
        return;
    }
    for kind in EVERY {
        let suite = Suite::new(kind);
        let cluster = &suite.cluster;
        for name in ["a", "b", "sub/c"] {
            write(&cluster.path("src").join(name), name);
        }
        let script = "find src -type f | wc -l > report/files; echo changed > src/a; cat src/a > report/a; echo $OF; exit 3";
        for _ in 0..2 {
            // The second run finds its input unchanged, because the first wrote into a copy.
            let output = cluster.output(suite.job(&["-i", "src=src", "-o", "report=./out"], script));
            assert_eq!(code(&output), 3, "{kind:?}: {}", describe(&output));
            // Houdini may lose the last output of a process.
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(printed == "the image\n" || kind.0 == Manner::Houdini, "{kind:?}: {printed:?}");
            assert_eq!(suite.read("out/files").trim(), "3");
            assert_eq!(suite.read("out/a").trim(), "changed");
        }
        assert_eq!(suite.read("src/a"), "a");
        let runs = suite.garden.requests().iter().filter(|line| line.ends_with("/processes")).count();
        assert_eq!(runs, 2, "each once, on the Concourse worker");
        let missing = cluster.output([&suite.job(&[], "")[..7], &["--", "gantry-no-such"]].concat());
        assert_eq!(code(&missing), 127, "{kind:?}: {}", describe(&missing));
    }
}

/// Deletes a volume at the volume server, as an operator could.
fn delete_volume(volumes: &baggageclaim::Server, handle: &str) {
    let mut stream = TcpStream::connect(volumes.address()).expect("a connection");
    let request = format!("DELETE /volumes/{handle} HTTP/1.1\r\nHost: volumes\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("text");
    assert!(response.starts_with("HTTP/1.1 204"), "{response}");
}

#[test]
fn volumes_deleted_on_concourse_worker_cost_no_run() {
    if !may_run_containers() {
        return;
    }
    for kind in [EVERY[0], EVERY[1]] {
        let suite = Suite::new(kind);
        let cluster = &suite.cluster;
        write(&cluster.path("src").join("file"), "contents");
        let source = format!("src=artifact:{}", cluster.upload("src"));
        // The host worker has replicas of the image and the input, too.
        let image = format!("image={}", suite.image);
        cluster.succeed(["run", "--quiet", "-i", &source, "-i", &image, "--", "true"]);
        let script = "cat src/file; echo x >> /tmp/cache/runs; wc -l < /tmp/cache/runs";
        let run = || {
            let output =
                cluster.output(suite.job(&["--quiet", "-i", &source, "--cache", "kept=/tmp/cache"], script));
            assert_eq!(code(&output), 0, "{kind:?}: {}", describe(&output));
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        assert_eq!((run(), run()), ("contents1\n".to_owned(), "contents2\n".to_owned()));

        let held = suite.volumes.handles();
        let mut replicas = cluster.list("volumes");
        replicas.retain(|volume| volume["purpose"] == "replica" || volume["purpose"] == "cache");
        let mut deleted = 0;
        for handle in replicas.iter().filter_map(|volume| volume["volume_handle"].as_str()) {
            if held.iter().any(|known| known.as_str() == handle) {
                delete_volume(&suite.volumes, handle);
                deleted += 1;
            }
        }
        assert!(deleted >= 3, "image, input and cache: {replicas:?}");
        assert_eq!(run(), "contents1\n", "the only replica of the cache is gone, so it starts empty");
        assert_eq!(suite.garden.requests().iter().filter(|line| line.ends_with("/processes")).count(), 3);
    }
}

#[test]
fn image_of_registry_runs_on_concourse_worker() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), crate::registries::app());
    registry.push(&layout, "app", "app:1");
    let image = registry.reference("app:1");
    for kind in EVERY {
        let suite = Suite::new(kind);
        let run = ["run", "--tag", "garden", "--network", suite.network, "--image", &image, "--user", "root"];
        let output =
            suite.cluster.output([&run[..], &["--", "cat /first /second; ls /old; exit 7"]].concat());
        assert_eq!(code(&output), 7, "{kind:?}: {}", describe(&output));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(printed == "replacedlinkedupper\n" || kind.0 == Manner::Houdini, "{kind:?}: {printed:?}");
    }
}

#[test]
fn concourse_worker_receives_no_repeated_requests() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::new(EVERY[0]);
    // The first run reads the metadata of the image.
    suite.cluster.succeed(suite.job(&[], "[ \"$OF\" = 'the image' ]"));
    let before = suite.volumes.requests();
    assert!(before.iter().any(|line| line.contains("stream-out?path=metadata.json")), "{before:?}");

    suite.cluster.succeed(suite.job(&[], "[ \"$OF\" = 'the image' ]"));
    let asked = suite.volumes.requests().split_off(before.len());
    assert!(!asked.iter().any(|line| line.contains("/stream-out")), "{asked:?}");
    let looks = asked.iter().filter(|line| line.starts_with("GET /volumes/")).count();
    assert_eq!(looks, 1, "for its root, before that is made: {asked:?}");
}

#[test]
fn run_on_concourse_worker_survives_gateway() {
    if !may_run_containers() {
        return;
    }
    for kind in [EVERY[0], EVERY[1]] {
        let suite = Suite::new(kind);
        let script = "echo ready; until [ -e /tmp/go ]; do sleep 0.05; done; echo over; exit 7";
        let (mut run, mut stdout) = started(suite.cluster.gantry(suite.job(&[], script)));
        suite.cluster.kill();
        // The next command starts another cluster with the same state.
        suite.cluster.succeed(["list", "workers"]);
        let attached = |line: &String| {
            line.starts_with("GET ") && line.contains("/processes/") && !line.contains("/attaches/")
        };
        wait_for("an attachment by the next gateway", || {
            suite.garden.requests().iter().any(attached).then_some(())
        });
        let root = suite.garden.handles();
        assert_eq!(root.len(), 1, "{root:?}");
        // A container with a separate root finds the file in it.
        for volume in
            fs::read_dir(suite.volumes.path("x").ancestors().nth(2).expect("the volumes")).expect("list")
        {
            let tmp = volume.expect("an entry").path().join("volume/rootfs/tmp");
            if tmp.is_dir() {
                fs::write(tmp.join("go"), "").expect("write");
            }
        }
        let mut printed = String::new();
        stdout.read_to_string(&mut printed).expect("text");
        let status = run.wait().expect("wait");
        let mut log = String::new();
        run.stderr.take().expect("stderr").read_to_string(&mut log).expect("text");
        assert_eq!(status.code(), Some(7), "{kind:?}: {printed:?} {log}");
        assert_eq!(printed, "over\n", "{kind:?}: {log}");
        let gap = "some of stdout may be missing here, because the connection to the worker was down";
        assert!(log.contains(gap), "{kind:?}: {log}");
        let runs = suite.garden.requests().iter().filter(|line| line.ends_with("/processes")).count();
        assert_eq!(runs, 1, "{kind:?}: it ran twice");
    }
}

#[test]
fn run_on_concourse_worker_can_be_cancelled() {
    if !may_run_containers() {
        return;
    }
    for kind in EVERY {
        let suite = Suite::new(kind);
        let ended = |script: &str| {
            let (run, mut stdout) = started(suite.cluster.gantry(suite.job(&[], script)));
            send(&run, libc::SIGTERM);
            let mut rest = String::new();
            stdout.read_to_string(&mut rest).expect("text");
            let output = run.wait_with_output().expect("gantry ends");
            assert_eq!(code(&output), 143, "{kind:?}: {}", describe(&output));
            let workload = wait_for("the end of what ran", || {
                let list = suite.cluster.list("workloads");
                let over = list.iter().all(|workload| workload["state"] == "finished");
                list.into_iter().max_by_key(|one| one["submitted_at"].to_string()).filter(|_| over)
            });
            assert_eq!(workload["outcome"], "aborted", "{kind:?}: {workload}");
            (rest, workload["exit"]["code"].clone())
        };
        let houdini = kind.0 == Manner::Houdini;
        // A process that handles the signal ends with its own exit code and output.
        let (printed, exit) =
            ended("trap 'echo stopping; exit 5' TERM; echo ready; while :; do sleep 0.05; done");
        assert!(printed == "stopping\n" || (houdini && printed.is_empty()), "{kind:?}: {printed:?}");
        assert_eq!(exit, 5, "{kind:?}: it was asked, not killed");
        // For other processes, the worker reports the signal if it can.
        let (printed, exit) = ended("echo ready; exec sleep 1000");
        assert_eq!((printed.as_str(), exit), ("", if houdini { 255 } else { 143 }.into()), "{kind:?}");
    }
}

#[test]
fn image_sets_user_on_concourse_worker() {
    if !may_run_containers() {
        return;
    }
    for kind in [EVERY[0], EVERY[1]] {
        let suite = Suite::new(kind);
        let cluster = &suite.cluster;
        let image = |name: &str, user: &str| {
            make_image(&cluster.path(name));
            let users = "root:x:0:0::/root:/bin/sh\nann:x:4242:4243::/home/ann:/bin/sh\n";
            write(&cluster.path(name).join("rootfs/etc/passwd"), users);
            let metadata = serde_json::json!({ "env": ["OF=the image"], "user": user });
            write(&cluster.path(name).join("metadata.json"), metadata.to_string());
            format!("artifact:{}", cluster.upload(name))
        };
        let run = |image: &str, more: &[&str]| {
            let run = ["run", "--tag", "garden", "--image", image];
            let script = "id -u; id -g; echo $HOME, $USER, $OF";
            cluster.output([&run[..], more, &["--", "sh", "-c", script]].concat())
        };
        let of_ann = image("of-ann", "ann");
        for (more, expected) in [
            (&[][..], "4242\n4243\n/home/ann, ann, the image\n"),
            (&["--user", "root"], "0\n0\n/root, root, the image\n"),
            (&["--user", "7:8"], "7\n8\n/, 7:8, the image\n"),
        ] {
            let output = run(&of_ann, more);
            assert_eq!(code(&output), 0, "{kind:?} {more:?}: {}", describe(&output));
            assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{kind:?} {more:?}");
        }
        let output = run(&image("of-nobody", "gantry-nobody"), &[]);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            code(&output) == 125 && printed.contains("USER_NOT_FOUND"),
            "{kind:?}: {}",
            describe(&output)
        );
    }
}

#[test]
fn only_marker_is_left_on_concourse_worker() {
    if !may_run_containers() {
        return;
    }
    for (manner, driver) in EVERY {
        let pair = ConcourseWorker::start(manner, driver);
        let mut cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s");
        let worker = serde_json::json!([{
            "name": "concourse", "garden": pair.garden_address(), "baggageclaim": pair.volumes_address(), "tags": ["garden"],
        }]);
        fs::write(cluster.path("workers.json"), worker.to_string()).expect("write");
        let file = cluster.path("workers.json").display().to_string();
        cluster.set("GANTRY_WORKERS_FILE", &file);
        make_image(&cluster.path("image"));
        write(&cluster.path("src/a"), "a");
        attended(&cluster);
        let kept = cluster.upload("image");
        let image = format!("artifact:{kept}");
        let run = ["run", "--keep", "1s", "--tag", "garden", "--network", network(manner), "--image", &image];
        let job =
            [&run[..], &["-i", "src=src", "-o", "out=./out", "--", "sh", "-c", "cp src/a out/x"]].concat();
        let done = cluster.output(&job);
        assert_eq!(code(&done), 0, "{}", describe(&done));
        let sidecars = pair.volumes.handles().iter().filter(|handle| handle.ends_with(".manifest")).count();
        assert!(sidecars > 0, "{:?}", pair.volumes.handles());
        pair.restart();
        let done = cluster.output(&job);
        assert_eq!(code(&done), 0, "{}", describe(&done));
        assert_eq!(fs::read_to_string(cluster.path("out/x")).expect("the output"), "a");
        pair.restart();
        wait_for("an empty worker", || {
            cluster.succeed(["gc"]);
            // The image is still kept, because it was uploaded separately.
            let volumes = cluster.list("volumes");
            let of_image: Vec<_> = volumes
                .iter()
                .filter(|volume| volume["artifact_id"] == kept)
                .filter_map(|volume| volume["volume_handle"].as_str())
                .collect();
            let wanted = |handle: &String| {
                handle == "gantry-marker"
                    || of_image.contains(&handle.strip_suffix(".manifest").unwrap_or(handle))
            };
            let left = pair.volumes.handles();
            (pair.garden.handles().is_empty() && left.iter().all(wanted) && left.len() == 3).then_some(())
        });
    }
}

#[test]
fn concourse_worker_is_configured_by_flags() {
    if !may_run_containers() {
        return;
    }
    let pair = ConcourseWorker::start(Manner::Containerd, Driver::Overlay);
    let cluster = Cluster::new();
    let addresses = ["--garden", &pair.garden_address(), "--baggageclaim", &pair.volumes_address()];
    let labels = [
        ["--garden-name", "concourse"],
        ["--garden-platform", "darwin"],
        ["--garden-team", "main"],
        ["--garden-tag", "one"],
        ["--garden-tag", "two"],
    ];
    let labels = labels.as_flattened();
    let mut up = cluster.gantry([&["up"], &addresses[..], labels].concat());
    let mut up = up.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("gantry");
    // Other commands would start a cluster without the worker.
    wait_for("the cluster", || cluster.pid());
    attended(&cluster);
    let workers = cluster.list("workers");
    let worker = workers.iter().find(|worker| worker["name"] == "concourse").expect("it is there");
    let expected = serde_json::json!({ "platform": "darwin", "team": "main", "tags": ["one", "two"] });
    for (label, expected) in expected.as_object().expect("an object") {
        assert_eq!(&worker["labels"][label], expected, "{worker}");
    }
    let capabilities = |worker: &serde_json::Value| worker["labels"]["capabilities"].clone();
    let has = |worker: &serde_json::Value, what: &str| {
        capabilities(worker).as_array().expect("a list").iter().any(|capability| capability == what)
    };
    assert!(
        has(worker, "limits-memory") && !has(worker, "limits-cpu") && !has(worker, "signals"),
        "{worker}"
    );
    let local = workers.iter().find(|worker| worker["name"] == "local").expect("the host worker");
    assert!(has(local, "signals") && has(local, "network-private"), "{local}");
    assert!(!has(local, "privileged"), "only where its operator allows it: {local}");
    cluster.succeed(["down"]);
    assert_eq!(up.wait().expect("it ends").code(), Some(0));
    let without = cluster.output(["up", "--garden-tag", "one"]);
    assert_eq!(code(&without), 125, "{}", describe(&without));
}

/// Makes an archive of the root file system of the cluster's image, with `release` in the file
/// `/release`.
fn archived(cluster: &Cluster, archive: &Path, release: &str) {
    let root = cluster.path("image/rootfs");
    write(&root.join("release"), release);
    let tar = Command::new("tar").arg("-czf").arg(archive).arg("-C").arg(root).arg(".").status();
    assert!(tar.expect("tar is installed").success());
}

/// Returns the artifact of a worker-provided image, once it is imported from `path`.
fn imported(cluster: &Cluster, resource_type: Option<&str>, path: &Path) -> String {
    wait_for("an import", || {
        let imports = cluster.list("imports");
        let is_it = |import: &&serde_json::Value| {
            import["resource_type"].as_str() == resource_type
                && import["path"] == path.display().to_string()
                && import["state"] == "imported"
        };
        imports.iter().find(is_it)?["artifact_id"].as_str().map(str::to_owned)
    })
}

#[test]
fn worker_provided_images_become_artifacts() {
    if !may_run_containers() {
        return;
    }
    let mut pair = ConcourseWorker::start(Manner::Containerd, Driver::Overlay);
    let (garden, volumes) = (pair.garden_address(), format!("http://{}", pair.volumes_address()));
    let mut cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s");
    make_image(&cluster.path("image"));
    let [old, new, certs] = ["old.tgz", "new.tgz", "certs"].map(|name| cluster.path(name));
    archived(&cluster, &old, "old");
    archived(&cluster, &new, "new");
    write(&certs.join("ca.crt"), "trusted");
    // Document with which such a worker registers. The path of one image does not exist.
    let file = cluster.path("workers.json");
    let register = |image: &Path, version: &str| {
        let worker = serde_json::json!({
            "name": "concourse", "addr": garden, "baggageclaim_url": volumes,
            "platform": "linux", "tags": ["garden"], "team": "", "certs_path": certs,
            "http_proxy_url": "http://proxy:3128", "start_time": 1,
            "resource_types": [
                { "type": "time", "image": "/nonexistent.tgz", "version": "1" },
                { "type": "git", "image": image, "version": version, "privileged": false },
            ],
        });
        fs::write(&file, worker.to_string()).expect("write");
    };
    register(&old, "4.2");
    cluster.set("GANTRY_WORKERS_FILE", &file.display().to_string());
    write(&cluster.path("src/a"), "a");
    attended(&cluster);
    let workers = cluster.list("workers");
    let listed = workers.iter().find(|worker| worker["name"] == "concourse").expect("the worker");
    let types = serde_json::json!([{ "name": "time", "version": "1" }, { "name": "git", "version": "4.2" }]);
    assert_eq!(listed["labels"]["resource_types"], types, "{listed}");

    // Commands run in an imported image, with its certificates, even if other imports fail.
    let run = ["run", "--tag", "garden", "-i", "src=src", "-o", "out=./out", "--image"];
    let script = "test ! -e /mine && touch /mine && echo $http_proxy > out/proxy && cp src/a out/x \
        && cat /etc/ssl/certs/ca.crt release > out/y && ! touch /etc/ssl/certs/mine 2>/dev/null; exit $?";
    let script = script.replace("release", "/release");
    let ran = |release: &str| {
        let done = cluster.output([&run[..], &["resource-type:git", "--", "sh", "-c", &script]].concat());
        assert_eq!(code(&done), 0, "each has a layer of its own: {}", describe(&done));
        assert_eq!(fs::read_to_string(cluster.path("out/x")).expect("the output"), "a");
        assert_eq!(fs::read_to_string(cluster.path("out/proxy")).expect("it"), "http://proxy:3128\n");
        assert_eq!(fs::read_to_string(cluster.path("out/y")).expect("it"), format!("trusted{release}"));
    };
    ran("old");
    ran("old");
    let first = imported(&cluster, Some("git"), &old);
    let of_certs = imported(&cluster, None, &certs);
    let base_types = || {
        let types = cluster.list("base-types").into_iter();
        types.map(|known| (known["version"].clone(), known["artifact_id"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(base_types(), [("4.2".into(), first.clone().into())]);
    let replicas_of = |artifact: &str| {
        let kept = cluster.list("volumes").into_iter();
        kept.filter(|one| one["artifact_id"] == artifact && one["purpose"] == "replica").count()
    };
    assert_eq!((replicas_of(&first), replicas_of(&of_certs)), (1, 1));
    let text = String::from_utf8_lossy(&cluster.output(["explain", &first]).stdout).into_owned();
    let worker = listed["worker_id"].as_str().expect("its id");
    assert!(text.contains("git 4.2") && text.contains(worker), "{text}");
    let failed = wait_for("the failure", || {
        cluster.list("imports").into_iter().find(|import| import["state"] == "failed")
    });
    assert_eq!((&failed["resource_type"], &failed["path"]), (&"time".into(), &"/nonexistent.tgz".into()));
    assert!(failed["failure_reason"].as_str().is_some_and(|why| !why.is_empty()), "{failed}");
    let refused = cluster.output([&run[..], &["resource-type:time", "--", "true"]].concat());
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(code(&refused) != 0 && printed.contains("cannot import"), "{printed}");
    let refused = cluster.output([&run[..], &["resource-type:s3", "--", "true"]].concat());
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        printed.contains("concourse") && printed.contains("has no image of the resource type s3"),
        "{printed}"
    );

    // The next gateway of the worker finds the import.
    cluster.kill();
    ran("old");
    assert_eq!(imported(&cluster, Some("git"), &old), first);
    assert_eq!(imported(&cluster, None, &certs), of_certs);

    // Another version replaces the import, and the older one is deleted.
    cluster.kill();
    register(&new, "4.3");
    attended(&cluster);
    let second = imported(&cluster, Some("git"), &new);
    assert_eq!(base_types(), [("4.3".into(), second.clone().into())]);
    ran("new");
    wait_for("the end of the older one", || {
        cluster.succeed(["gc"]);
        (replicas_of(&first) == 0).then_some(())
    });
    let handles = pair.volumes.handles();
    assert!(
        !handles.iter().any(|name| name.starts_with("gantry-") && name != "gantry-marker"),
        "{handles:?}"
    );

    // A worker that comes back without its volumes imports again.
    pair.replace();
    wait_for("another import", || (imported(&cluster, Some("git"), &new) != second).then_some(()));
    ran("new");
}

/// Returns the end of the only workload.
fn failure(cluster: &Cluster) -> String {
    let workloads = cluster.list("workloads");
    let [workload] = &workloads[..] else { panic!("{workloads:?}") };
    workload["failure"]["reason"].as_str().unwrap_or_else(|| panic!("{workload}")).to_owned()
}

fn containers_asked_for(suite: &Suite) -> usize {
    suite.garden.requests().iter().filter(|line| *line == "POST /containers").count()
}

#[test]
fn concourse_worker_takes_only_limits_it_supports() {
    if !may_run_containers() {
        return;
    }
    for kind in EVERY {
        let suite = Suite::new(kind);
        let refused = |limit: &[&str], why: &str| {
            let output = suite.cluster.output(suite.job(limit, "true"));
            let printed = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(code(&output), 125, "{kind:?} {limit:?}: {}", describe(&output));
            assert!(printed.contains("NO_COMPATIBLE_WORKER") && printed.contains(why), "{kind:?}: {printed}");
        };
        refused(&["--cpu", "1"], "lacks limits-cpu");
        if kind.0 == Manner::Houdini {
            refused(&["--memory", "64M"], "lacks limits-memory");
            continue;
        }
        if !testing::garden::keeps_limits() {
            eprintln!("not applicable: this worker is simulated and enforces no limits");
            continue;
        }
        let fits = suite.cluster.output(suite.job(&["--memory", "64M"], "true"));
        assert_eq!(code(&fits), 0, "{kind:?}: {}", describe(&fits));
        let greedy = "head -c 200000000 /dev/zero | tail -c 200000000 > /dev/null; exit $?";
        let killed = suite.cluster.output(suite.job(&["--memory", "64M"], greedy));
        assert_eq!(code(&killed), 137, "{kind:?}: {}", describe(&killed));
        let printed = String::from_utf8_lossy(&killed.stderr);
        assert_eq!(printed.contains("memory"), kind.0 == Manner::Guardian, "{kind:?}: {printed}");
    }
}

#[test]
fn unsupported_input_stops_command_on_concourse_worker() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::new(EVERY[0]);
    let mut run = suite.cluster.gantry(suite.job(&[], "cat"));
    let mut run =
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
    let mut stdin = run.stdin.take().expect("stdin");
    // Standard input stays open, so nothing else ends the command.
    stdin.write_all(b"\xff\xfe").expect("it is read");
    let ended = run.wait_with_output().expect("gantry ends");
    let printed = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(code(&ended), 125, "{}", describe(&ended));
    assert!(
        printed.contains("cannot send standard input to the command") && printed.contains("UNSUPPORTED"),
        "{printed}"
    );
    let workload = wait_for("the end of what ran", || {
        suite.cluster.list("workloads").into_iter().find(|one| one["state"] == "finished")
    });
    assert_eq!(workload["outcome"], "aborted", "{workload}");
}

#[test]
fn run_refused_by_concourse_worker_never_starts() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::new(EVERY[1]);
    let unavailable = Fault::AnswerAs("ServiceUnavailableError", "come back later".to_owned());
    suite.garden.inject("/processes", unavailable);
    let output = suite.cluster.output(suite.job(&[], "true"));
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(code(&output), 125, "{}", describe(&output));
    assert!(printed.contains("come back later"), "{printed}");
    // No other worker can take the workload.
    assert_eq!(failure(&suite.cluster), "START_FAILED");
}

#[test]
fn full_concourse_worker_is_not_quarantined() {
    if !may_run_containers() {
        return;
    }
    for kind in [EVERY[0], EVERY[1]] {
        let suite = Suite::with(kind, &[("GANTRY_GC_GRACE", "0s")]);
        let (mut holds, _stdout) =
            started(suite.cluster.gantry(suite.job(&[], "echo ready; exec sleep 1000")));
        suite.garden.limit_containers(1);
        let asked = containers_asked_for(&suite);
        let waits = suite.cluster.gantry(suite.job(&[], "exit 7")).stderr(Stdio::piped()).spawn();
        let waits = waits.expect("gantry");
        // The gateway has given up and was asked again.
        wait_for("a second attempt", || {
            let workloads = suite.cluster.list("workloads");
            let waiting = workloads.iter().find(|one| one["waiting_for"][0].is_string());
            let tells = |one: &serde_json::Value| one["waiting_for"].to_string().contains("WORKER_FULL");
            (waiting.is_some_and(tells) || containers_asked_for(&suite) > asked + 21).then_some(())
        });
        let worker = suite.cluster.list("workers").into_iter().find(|one| one["name"] == "concourse");
        let worker = worker.expect("it is there");
        let set_aside = worker["refusals"].to_string().contains("QUARANTINED");
        assert!(!set_aside && worker["failures"].as_u64().unwrap_or(0) == 0, "{kind:?}: {worker}");
        send(&holds, libc::SIGTERM);
        holds.wait().expect("it ends");
        let ended = waits.wait_with_output().expect("gantry ends");
        assert_eq!(code(&ended), 7, "{kind:?}: {}", describe(&ended));
    }
}
