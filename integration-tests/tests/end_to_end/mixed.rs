//! Host workers and Concourse workers in one cluster. The output of one is an unchanged input on
//! the other.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, may_run_containers, tree, wait_for, write};
use serde_json::Value;
use testing::baggageclaim::Driver;
use testing::garden::Manner;

/// Command that copies everything unchanged.
const COPY: &str = "cp -a in/. made/";

/// Services and workers. Each worker has its own gateway, and its name as its tag.
struct Scene {
    suite: Suite,
    pairs: Vec<ConcourseWorker>,
}

impl Scene {
    fn start() -> Self {
        Self { suite: Suite::start(Shape::NO_WORKER, SHORT_TERMS), pairs: Vec::new() }
    }

    /// Adds a worker. A worker without a tag takes uploads.
    fn attend(&mut self, worker: &str, settings: &[(&str, &str)]) {
        self.suite.attend(worker, worker, settings);
        self.suite.attended(worker, worker);
    }

    fn host(&mut self, worker: &str) {
        self.attend(worker, &[("GANTRY_WORKER_TAGS", worker)]);
    }

    fn concourse(&mut self, worker: &str, kind: (Manner, Driver)) {
        self.concourse_with(worker, kind, &[]);
    }

    fn concourse_with(&mut self, worker: &str, (manner, driver): (Manner, Driver), more: &[(&str, &str)]) {
        let pair = ConcourseWorker::start(manner, driver);
        let (garden, volumes) = (pair.garden_address(), pair.volumes_address());
        self.pairs.push(pair);
        let own =
            [("GANTRY_WORKER_TAGS", worker), ("GANTRY_GARDEN", &garden), ("GANTRY_BAGGAGECLAIM", &volumes)];
        self.attend(worker, &[&own[..], more].concat());
    }

    /// Kills the gateway of a worker, so that its bytes are unavailable.
    fn kill(&mut self, worker: &str) {
        self.suite.kill(worker);
        wait_for("the silence of a worker", || {
            let shown = self.suite.succeed(&["show", "worker", worker, "--json"]);
            let shown: Value = serde_json::from_str(&shown).expect("JSON");
            (shown["state"] != "running").then_some(())
        });
    }

    fn upload(&self, path: &Path) -> String {
        format!("artifact:{}", self.suite.upload(path))
    }

    /// Runs `script` on a worker with `artifact` as its input `in`. Returns its output `made`, and
    /// its standard output.
    fn run(&self, worker: &str, image: &str, artifact: &str, script: &str) -> String {
        let input = format!("in={artifact}");
        let run = ["run", "--json", "--tag", worker, "--image", image, "-i", &input, "-o", "made"];
        let output = self.suite.gantry(&[&run[..], &["--", "sh", "-c", script]].concat()).output();
        let output = output.expect("gantry runs");
        assert!(output.status.success(), "{worker}: {}", describe(&output));
        let last = output.stdout.trim_ascii().rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
        let last: Value = serde_json::from_slice(last).expect("JSON");
        let id = last["outputs"][0]["artifact_id"].as_str();
        format!("artifact:{}", id.unwrap_or_else(|| panic!("no output in {last}")))
    }

    /// Downloads an artifact into a new directory.
    fn download(&self, artifact: &str, into: &str) -> PathBuf {
        let path = self.suite.path(into);
        let id = artifact.strip_prefix("artifact:").expect("an artifact");
        self.suite.succeed(&["download", "--preserve-special", id, path.to_str().expect("UTF-8")]);
        path
    }
}

#[test]
fn output_is_input_on_other_kind_of_worker() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start();
    let path = |name: &str| scene.suite.path(name);
    let (data, image) = (path("data"), path("image"));
    tree::make_difficult(&data);
    make_image(&image);

    // All artifacts are on the host worker, because there is no other.
    scene.host("host");
    let (data_there, image) = (scene.upload(&data), scene.upload(&image));
    let by_host = scene.run("host", "host", &data_there, COPY);
    tree::assert_same(&data, &scene.download(&by_host, "by-host"));

    scene.concourse("overlay", (Manner::Containerd, Driver::Overlay));
    scene.concourse("naive", (Manner::Guardian, Driver::Naive));
    // A process there sees the tree that tar can represent, and makes such a tree.
    let by_overlay = scene.run("overlay", &image, &by_host, COPY);
    let first = scene.download(&by_overlay, "by-overlay");
    tree::assert_same_through_tar(&data, &first);
    // From here on nothing is lost, in either direction and between two Concourse workers.
    let back = scene.run("host", "host", &by_overlay, COPY);
    tree::assert_same_through_tar(&first, &scene.download(&back, "back"));
    let by_naive = scene.run("naive", &image, &by_overlay, COPY);
    tree::assert_same_through_tar(&first, &scene.download(&by_naive, "by-naive"));
    let again = scene.run("host", "host", &by_naive, COPY);
    tree::assert_same_through_tar(&first, &scene.download(&again, "again"));
    let runs: Vec<_> = scene.pairs.iter().map(ConcourseWorker::runs).collect();
    assert_eq!(runs, [1, 1], "each ran where it was meant to, once");

    // A requirement that only one kind of worker meets is explained.
    let whole = |worker, image| {
        let run = ["run", "--require", "ends-whole", "--tag", worker, "--image", image, "--", "true"];
        scene.suite.gantry(&run).output().expect("gantry runs")
    };
    let on_host = whole("host", "host");
    assert!(on_host.status.success(), "{}", describe(&on_host));
    let refused = whole("overlay", &image);
    assert_eq!(refused.status.code(), Some(125), "{}", describe(&refused));
    let printed = String::from_utf8_lossy(&refused.stderr);
    assert!(printed.contains("overlay: its runtime lacks ends-whole"), "{printed}");

    // A copy on a Concourse worker is exact, including nanoseconds and holes, although the original
    // worker is gone.
    scene.kill("host");
    tree::assert_same(&data, &scene.download(&by_host, "kept"));
}

#[test]
fn inline_artifact_reaches_all_kinds_of_workers() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start();
    let (data, image) = (scene.suite.path("data"), scene.suite.path("image"));
    write(&data.join("sub/file"), "handed over\n");
    fs::set_permissions(data.join("sub/file"), PermissionsExt::from_mode(0o751)).expect("permitted");
    fs::write(data.join("some"), vec![b'x'; 700_000]).expect("write");
    symlink("sub/file", data.join("link")).expect("linked");
    make_image(&image);

    let hand_over =
        |path: &Path| scene.suite.gantry(&["upload", "--inline", path.to_str().expect("UTF-8")]).output();
    let handed = hand_over(&data).expect("gantry runs");
    assert!(handed.status.success(), "{}", describe(&handed));
    let handed = String::from_utf8(handed.stdout).expect("text").trim().to_owned();
    let artifact = format!("artifact:{handed}");
    let explained = scene.suite.succeed(&["explain", &handed]);
    assert!(explained.contains("in the artifact store itself"), "{explained}");
    let listed = scene.suite.succeed(&["list", "artifacts", "--at-risk", "--json"]);
    assert_eq!(listed, "");

    // A large tree, or one with unsupported entries, is rejected.
    let large = scene.suite.path("large");
    write(&large.join("file"), "x".repeat(1 << 20));
    let refused = hand_over(&large).expect("gantry runs");
    assert!(!refused.status.success(), "{}", describe(&refused));
    assert!(describe(&refused).contains("--inline"), "{}", describe(&refused));

    scene.host("host");
    let image = scene.upload(&image);
    let by_host = scene.run("host", "host", &artifact, COPY);
    tree::assert_same(&data, &scene.download(&by_host, "by-host"));
    scene.concourse("garden", (Manner::Containerd, Driver::Overlay));
    let by_garden = scene.run("garden", &image, &artifact, COPY);
    tree::assert_same_through_tar(&data, &scene.download(&by_garden, "by-garden"));

    // The store has the bytes even if all workers that had them are gone.
    scene.kill("host");
    scene.kill("garden");
    scene.host("late");
    let by_late = scene.run("late", "host", &artifact, COPY);
    tree::assert_same(&data, &scene.download(&by_late, "by-late"));
    tree::assert_same(&data, &scene.download(&artifact, "itself"));
}

/// Counts the requests to send volumes to other workers and to hand them out, without volumes of
/// manifests.
fn sent(pair: &ConcourseWorker) -> (usize, usize) {
    let requests = pair.volumes.requests();
    let count = |what: &str| {
        let asked = |line: &&String| line.contains(what) && !line.contains(".manifest/");
        requests.iter().filter(asked).count()
    };
    (count("/stream-p2p-out?"), count("/stream-out?"))
}

#[test]
fn concourse_workers_copy_directly_when_allowed() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start();
    let (image, data) = (scene.suite.path("image"), scene.suite.path("data"));
    make_image(&image);
    write(&data.join("file"), "kept\n");
    fs::write(data.join("large"), vec![b'x'; 3_000_000]).expect("write");

    scene.concourse_with("one", (Manner::Containerd, Driver::Overlay), &[("GANTRY_PEER_TO_PEER", "true")]);
    let (image, uploaded) = (scene.upload(&image), scene.upload(&data));
    let made = scene.run("one", &image, &uploaded, COPY);
    let (none, handed_out) = sent(&scene.pairs[0]);
    assert_eq!(none, 0);

    scene.concourse_with("two", (Manner::Guardian, Driver::Naive), &[("GANTRY_PEER_TO_PEER", "true")]);
    let again = scene.run("two", &image, &made, COPY);
    assert_eq!(
        sent(&scene.pairs[0]),
        (2, handed_out),
        "the image and the input, and nothing through the gateways"
    );
    tree::assert_same_through_tar(&data, &scene.download(&again, "again"));

    // The operator has not allowed direct copies.
    scene.concourse("three", (Manner::Guardian, Driver::Naive));
    let third = scene.run("three", &image, &made, COPY);
    assert_eq!(scene.pairs.iter().map(|pair| sent(pair).0).collect::<Vec<_>>(), [2, 0, 0]);
    tree::assert_same_through_tar(&data, &scene.download(&third, "third"));
}

#[test]
fn image_works_wherever_it_was_uploaded() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start();
    let (image, data) = (scene.suite.path("image"), scene.suite.path("data"));
    make_image(&image);
    write(&data.join("file"), "kept\n");

    scene.concourse("concourse", (Manner::Containerd, Driver::Overlay));
    let (by_concourse, data) = (scene.upload(&image), scene.upload(&data));
    scene.host("host");
    let script = r#"printf '%s\n' "$OF" > made/of; cat in/file > made/file; test -d /etc && cat /etc/passwd > made/passwd"#;
    let made = scene.run("concourse", &by_concourse, &data, script);
    let made = scene.download(&made, "made");
    let read = |name: &str| fs::read_to_string(made.join(name)).expect("it was made");
    assert_eq!((&*read("of"), &*read("file")), ("the image\n", "kept\n"));
    assert_eq!(read("passwd"), "root:x:0:0::/root:/bin/sh\n");

    // On the host the directories of the image are empty, so the program must bring all that it
    // needs.
    let cat =
        scene.suite.gantry(&["run", "--tag", "host", "--image", &by_concourse, "--", "/bin/sh"]).output();
    let cat = cat.expect("gantry runs");
    assert_eq!(
        cat.status.code(),
        Some(127),
        "its root is the image, in which no program is: {}",
        describe(&cat)
    );
}
