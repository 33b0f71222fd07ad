//! Copies between workers as `gantry status` shows them, and reads that continue on another worker
//! when one fails.

mod clean;
mod link;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use integration_tests::{Cluster, code, describe, gantry_binary, may_run_containers, send, wait_for};
use serde_json::Value;

use clean::clean;
use link::Link;

/// Size of the copied file.
const SIZE: u64 = 64 << 20;

/// Returns a free port.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("its address").to_string()
}

/// Cluster that listens on TCP, and another worker, which is reached over a link.
struct Scene {
    // Dropped before the cluster, whose directories they use.
    far: Child,
    up: Child,
    link: Link,
    server: String,
    token_file: String,
    cluster: Cluster,
}

impl Scene {
    fn start() -> Self {
        let cluster = Cluster::new();
        let mut up = cluster.gantry(["--json", "up", "--listen", "127.0.0.1:0"]);
        let log = File::create(cluster.path("up.log")).expect("a log");
        let mut up = up.stdout(Stdio::piped()).stderr(log).spawn().expect("gantry");
        let mut line = String::new();
        BufReader::new(up.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        let says: Value = serde_json::from_str(&line).expect("one JSON document");
        let server = says["endpoints"][1].as_str().expect("the address").to_owned();
        let token_file = says["token_file"].as_str().expect("the file").to_owned();

        let address = free_port();
        let link = Link::to(&address);
        let at = |what: &str| cluster.path(what).display().to_string();
        let far = Command::new(gantry_binary().with_file_name("runtime-gateway"))
            .args(["--listen", &address, "--endpoint", &link.endpoint, "--name", "far", "--tag", "far"])
            .args(["--scheduler", &server, "--artifact-store", &server, "--streamer", &server])
            .args(["--token-file", &token_file, "--allow", "host-image"])
            .args(["--state-dir", &at("far-state"), "--runtime-dir", &at("far-run")])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(cluster.path("far.log")).expect("a log"))
            .spawn()
            .expect("a gateway");
        let scene = Self { far, up, link, server, token_file, cluster };
        wait_for("both workers", || {
            let workers = scene.status()["workers"].as_array()?.clone();
            let running = workers.iter().filter(|worker| worker["state"] == "running");
            (running.count() == 2).then_some(())
        });
        scene
    }

    fn status(&self) -> Value {
        serde_json::from_slice(&self.cluster.output(["status", "--json"]).stdout).expect("one JSON document")
    }

    /// Makes a command of a caller that uses TCP.
    fn seen_from_outside(&self) -> Value {
        let line = ["--json", "--server", &self.server, "--token-file", &self.token_file, "status"];
        serde_json::from_slice(&self.cluster.output(line).stdout).expect("one JSON document")
    }

    fn end(mut self) {
        self.cluster.succeed(["down"]);
        self.up.wait().expect("it ends");
        self.kill_far();
        let (state, run) = (self.cluster.path("far-state"), self.cluster.path("far-run"));
        tokio::runtime::Runtime::new().expect("a runtime").block_on(clean(state, run));
    }

    fn kill_far(&mut self) {
        self.far.kill().ok();
        self.far.wait().expect("it ends");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for log in ["up.log", "far.log"] {
            if std::thread::panicking() {
                eprintln!(
                    "--- {log} ---\n{}",
                    fs::read_to_string(self.cluster.path(log)).unwrap_or_default()
                );
            }
        }
        self.kill_far();
    }
}

/// Returns the artifact that a run kept of its output.
fn kept(stderr: &[u8]) -> String {
    let printed = String::from_utf8_lossy(stderr).into_owned();
    let (_, kept) = printed.split_once("kept as artifact ").expect(&printed);
    kept.split_whitespace().next().expect("an id").to_owned()
}

#[test]
fn transfer_in_progress_is_shown() {
    if !may_run_containers() {
        return;
    }
    let scene = Scene::start();
    let cluster = &scene.cluster;
    let make = format!("head -c {SIZE} /dev/urandom > made/file; cksum < made/file");
    let made = cluster.output(["run", "--tag", "far", "-o", "made", "--", "sh", "-c", &make]);
    assert_eq!(code(&made), 0, "{}", describe(&made));
    let artifact = kept(&made.stderr);
    assert_eq!(scene.status()["transfers"], Value::Array(Vec::new()));
    let watched = cluster.path("watched");
    let mut watch = cluster.gantry(["--json", "status", "--watch"]);
    let mut watch = watch.stdout(File::create(&watched).expect("a file")).spawn().expect("gantry");

    // Only a worker without tags may run the workload, and its input is on the other worker.
    scene.link.stall_after(SIZE / 4);
    let read = ["run", "-i", &format!("in=artifact:{artifact}"), "--", "sh", "-c", "cksum < in/file"];
    let read = cluster.gantry(read).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
    let worker = |name: &str, seen: &Value| {
        let workers = seen["workers"].as_array().expect("workers").iter();
        let ids: Vec<_> =
            workers.filter(|worker| worker["name"] == name).map(|w| w["worker_id"].clone()).collect();
        ids[0].clone()
    };
    for look in [Scene::status, Scene::seen_from_outside] {
        let seen = wait_for("a copy under way", || {
            let seen = look(&scene);
            seen["transfers"][0]["bytes_done"].as_u64().is_some_and(|done| done > 0).then_some(seen)
        });
        let [transfer] = seen["transfers"].as_array().expect("transfers").as_slice() else {
            panic!("{seen}")
        };
        assert_eq!(transfer["artifact_id"], *artifact);
        assert_eq!(transfer["bytes_total"], SIZE);
        assert!(transfer["bytes_done"].as_u64().is_some_and(|done| done <= SIZE / 4), "{transfer}");
        assert_eq!(transfer["from_worker_id"], worker("far", &seen));
        assert_eq!(transfer["to_worker_id"], worker("local", &seen));
    }
    let text = String::from_utf8(cluster.succeed(["status"])).expect("text");
    let row = text.lines().find(|line| line.contains(&artifact)).expect(&text);
    let words: Vec<_> = row.split_whitespace().collect();
    let [from, to, _, _, "of", total, "MiB", .., id] = words.as_slice() else { panic!("{row}") };
    assert_eq!((*from, *to, *total, *id), ("far", "local", "64.0", artifact.as_str()), "{text}");

    scene.link.open();
    let read = read.wait_with_output().expect("it ends");
    assert_eq!(code(&read), 0, "{}", describe(&read));
    assert_eq!(read.stdout, made.stdout, "the same bytes");
    wait_for("the end of the copy, as it is watched", || {
        let told = fs::read_to_string(&watched).expect("the watched status");
        let told: Vec<Value> = told.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let copies = |seen: &Value| seen["transfers"].as_array().map_or(0, Vec::len);
        let began = told.iter().position(|seen| copies(seen) == 1)?;
        told[began..].iter().any(|seen| copies(seen) == 0).then_some(())
    });
    send(&watch, libc::SIGINT);
    assert_eq!(watch.wait().expect("it ends").code(), Some(130));
    scene.end();
}

#[test]
fn gateway_has_reachable_address_over_tcp() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let address = free_port();
    let (_, port) = address.split_once(':').expect("a port");
    let named = format!("http://localhost:{port}");
    let mut up = cluster.gantry(["--json", "up", "--listen", &address, "--endpoint", &named]);
    let mut up = up.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("gantry");
    let mut line = String::new();
    BufReader::new(up.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
    let says: Value = serde_json::from_str(&line).expect("one JSON document");
    assert_eq!(says["endpoints"][1], *named);
    let token_file = says["token_file"].as_str().expect("the file").to_owned();
    let worker = wait_for("a worker", || {
        let shown = cluster.output(["show", "worker", "local", "--json"]);
        serde_json::from_slice::<Value>(&shown.stdout).ok().filter(|shown| shown["state"] == "running")
    });
    assert_eq!(worker["gateway_endpoint"], *named);

    // The cluster is called by name, by address, through a forwarded port, and over its socket.
    let tunnel = Link::to(&address);
    let over = |server: &str| {
        vec!["--server".to_owned(), server.to_owned(), "--token-file".to_owned(), token_file.clone()]
    };
    fs::create_dir(cluster.path("src")).expect("a directory");
    fs::write(cluster.path("src/file"), "content\n").expect("a file");
    for way in [over(&named), over(&format!("http://{address}")), over(&tunnel.endpoint), Vec::new()] {
        let command = ["run", "-i", "src=src", "--", "cat", "src/file"].map(str::to_owned);
        let ran = cluster.output(way.iter().cloned().chain(command));
        assert_eq!(
            (code(&ran), ran.stdout.as_slice()),
            (0, b"content\n".as_slice()),
            "{way:?}: {}",
            describe(&ran)
        );
        // Readiness is polled at intervals.
        wait_for("a cluster that is seen as ready", || {
            let status =
                cluster.output(way.iter().cloned().chain(["status".to_owned(), "--json".to_owned()]));
            (code(&status) == 0).then_some(())
        });
    }
    cluster.succeed(["down"]);
    assert_eq!(up.wait().expect("it ends").code(), Some(0));
}

#[test]
fn cat_continues_on_another_worker() {
    if !may_run_containers() {
        return;
    }
    let scene = Scene::start();
    let cluster = &scene.cluster;
    fs::create_dir(cluster.path("tree")).expect("a directory");
    let content: Vec<u8> =
        (0..4 << 20_u32).flat_map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    fs::write(cluster.path("tree/file"), &content).expect("a file");
    let artifact = String::from_utf8(cluster.succeed(["upload", "tree"])).expect("an id").trim().to_owned();
    let input = format!("in=artifact:{artifact}");
    // Runs with the artifact as an input on both workers, so that each has a replica.
    cluster.succeed(["run", "--keep", "0s", "--tag", "far", "-i", &input, "--", "true"]);
    cluster.succeed(["run", "--keep", "0s", "-i", &input, "--", "true"]);

    let near = Link::to(scene.server.trim_start_matches("http://"));
    let links = [&near, &scene.link];
    for json in [false, true] {
        // Either worker may be the first one. Each fails once.
        let before = links.map(Link::sent);
        links.iter().for_each(|link| link.cut_once_after(3 << 20));
        let mut line = vec!["--server", &near.endpoint, "--token-file", &scene.token_file];
        line.extend(if json { &["--json", "cat"][..] } else { &["cat"] });
        line.extend([artifact.as_str(), "file"]);
        let read = cluster.output(line);
        assert_eq!(code(&read), 0, "{}", String::from_utf8_lossy(&read.stderr));
        if json {
            let document: Value = serde_json::from_slice(&read.stdout).expect("one JSON document");
            assert_eq!(document["size_bytes"], content.len());
            let data = document["data"].as_str().expect("base64");
            assert_eq!(data.len(), content.len().div_ceil(3) * 4, "everything once");
        } else {
            assert!(read.stdout == content, "every byte once, in its place");
        }
        for (link, before) in links.iter().zip(before) {
            assert!(link.sent() - before >= 3 << 20, "it was read at both");
            link.open();
        }
    }
    scene.end();
}
