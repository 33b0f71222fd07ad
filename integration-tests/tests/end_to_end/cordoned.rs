//! Workers that are taken out of service and put back by an operator, and workers that commands
//! name.

use std::process::{Output, Stdio};

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, id, may_run_containers, wait_for};
use serde_json::Value;

/// Services and two host workers.
fn start() -> Suite {
    let settings = [SHORT_TERMS, &[("GANTRY_STOP_AFTER", "6s"), ("GANTRY_LOST_AFTER", "8s")]].concat();
    let mut suite = Suite::start(Shape::NO_WORKER, &settings);
    for worker in ["one", "two"] {
        suite.attend(worker, worker, &[("GANTRY_WORKER_TAGS", &format!("{worker},any"))]);
        suite.attended(worker, worker);
    }
    suite
}

fn detached(suite: &Suite, more: &[&str], script: &str) -> String {
    id(suite.succeed(&[&["run", "--quiet", "-d"][..], more, &["--", "sh", "-c", script]].concat()))
}

fn json(suite: &Suite, arguments: &[&str]) -> Value {
    let shown = suite.succeed(&[arguments, &["--json"]].concat());
    serde_json::from_str(shown.trim()).expect("JSON")
}

fn wait_for_state(suite: &Suite, workload: &str, state: &str) -> Value {
    wait_for(&format!("{workload}, which is {state},"), || {
        let shown = json(suite, &["show", "workload", workload]);
        (shown["state"] == state).then_some(shown)
    })
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn cordoned_worker_drains_and_interruptible_work_moves() {
    if !may_run_containers() {
        return;
    }
    let suite = start();
    let blocks = detached(&suite, &["--tag", "two"], "sleep 600");
    wait_for_state(&suite, &blocks, "running");
    let goes = detached(&suite, &["--tag", "any", "--interruptible"], "sleep 600");
    let first = wait_for_state(&suite, &goes, "running");
    assert_eq!(first["location"]["worker_name"], "one", "the other has more to do");
    let mut stays = suite.gantry(&["run", "--quiet", "--tag", "one", "--", "cat"]);
    let stays = stays.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry runs");
    wait_for("both on the first worker", || {
        (json(&suite, &["show", "worker", "one"])["leases"] == 2).then_some(())
    });

    let cordoning = suite.gantry(&["cordon", "one"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let cordoning = cordoning.expect("gantry runs");
    wait_for("a cordoned worker", || {
        (json(&suite, &["show", "worker", "one"])["desired"] == "cordon").then_some(())
    });
    let listed = suite.succeed(&["list", "workers"]);
    assert!(listed.contains("running, cordoned"), "{listed}");
    let status = suite.succeed(&["status"]);
    assert!(status.contains("running, cordoned"), "{status}");
    let shown = suite.succeed(&["show", "worker", "one"]);
    assert!(shown.contains("gets no work:") && shown.contains("is cordoned"), "{shown}");
    let waiting = detached(&suite, &["--tag", "one"], "true");
    let why = suite.succeed(&["explain", &waiting]);
    assert!(why.contains("is cordoned") && why.contains("it is uncordoned"), "{why}");
    assert_eq!(json(&suite, &["show", "workload", &goes])["state"], "running");

    // The workload reads its standard input to the end.
    let stayed = stays.wait_with_output().expect("gantry ends");
    assert!(stayed.status.success(), "{}", describe(&stayed));
    let output = cordoning.wait_with_output().expect("gantry ends");
    assert!(output.status.success(), "{}", describe(&output));
    let (answer, printed) = text(&output);
    assert_eq!(answer, "worker one: running, cordoned, drained\n");
    assert!(printed.contains("1 of them interruptible") && printed.contains(&goes), "{printed}");
    let moved = wait_for("the interruptible workload on the other worker", || {
        let shown = json(&suite, &["show", "workload", &goes]);
        (shown["state"] == "running" && shown["location"]["worker_name"] == "two").then_some(shown)
    });
    assert_ne!(moved["location"]["attempt_id"], first["location"]["attempt_id"]);
    suite.succeed(&["cancel", &goes, "--grace", "0s"]);

    // The gateway restarts, and the worker is still cordoned.
    let mut suite = suite;
    suite.kill("one");
    suite.spawn("one");
    suite.attended("one", "one");
    assert_eq!(suite.succeed(&["cordon", "one"]), "worker one: running, cordoned, drained\n");
    assert_eq!(json(&suite, &["show", "workload", &waiting])["state"], "pending");
    assert_eq!(suite.succeed(&["uncordon", "one"]), "worker one: running\n");
    assert_eq!(wait_for_state(&suite, &waiting, "finished")["outcome"], "succeeded");

    let long = detached(&suite, &["--tag", "one"], "sleep 600");
    wait_for_state(&suite, &long, "running");
    let cordoned = json(&suite, &["cordon", "one", "--deadline", "1s", "--quiet"]);
    assert_eq!((&cordoned["desired"], &cordoned["leases"]), (&"cordon".into(), &0.into()));
    let ended = wait_for_state(&suite, &long, "finished");
    assert_eq!((&ended["outcome"], &ended["failure"]["reason"]), (&"errored".into(), &"INTERRUPTED".into()));
}

#[test]
fn artifact_on_unreliable_worker_is_at_risk() {
    if !may_run_containers() {
        return;
    }
    let suite = start();
    let made = detached(&suite, &["--tag", "one", "-o", "out"], "echo bytes > out/file");
    let outputs = wait_for_state(&suite, &made, "finished");
    let artifact = outputs["outputs"][0]["artifact_id"].as_str().expect("an artifact");
    let at_risk = || suite.succeed(&["list", "artifacts", "--at-risk", "--wide"]);
    assert!(!at_risk().contains(artifact), "{}", at_risk());
    assert_eq!(suite.succeed(&["cordon", "one"]), "worker one: running, cordoned, drained\n");
    assert!(at_risk().contains(artifact), "{}", at_risk());
    assert_eq!(suite.succeed(&["uncordon", "one"]), "worker one: running\n");
    assert!(!at_risk().contains(artifact), "{}", at_risk());

    let mut suite = suite;
    suite.kill("one");
    for state in ["stalled", "lost"] {
        wait_for(&format!("a worker that is {state}"), || {
            (json(&suite, &["show", "worker", "one"])["state"] == state).then_some(())
        });
        let at_risk = suite.succeed(&["list", "artifacts", "--at-risk", "--wide"]);
        assert!(at_risk.contains(artifact), "{state}: {at_risk}");
    }
    suite.spawn("one");
    suite.attended("one", "one");
    wait_for("nothing at risk", || {
        (!suite.succeed(&["list", "artifacts", "--at-risk", "--wide"]).contains(artifact)).then_some(())
    });
}

#[test]
fn worker_with_last_replica_is_not_removed() {
    if !may_run_containers() {
        return;
    }
    let mut suite = start();
    let made = detached(&suite, &["--tag", "one", "-o", "out"], "echo bytes > out/file");
    let outputs = wait_for_state(&suite, &made, "finished");
    let artifact = outputs["outputs"][0]["artifact_id"].as_str().expect("an artifact").to_owned();
    let refused = suite.gantry(&["retire", "one"]).output().expect("gantry runs");
    let (_, printed) = text(&refused);
    assert!(!refused.status.success());
    assert!(
        printed.contains("LAST_REPLICA")
            && printed.contains(&artifact)
            && printed.contains("retire one --evacuate"),
        "{printed}"
    );
    assert_eq!(json(&suite, &["show", "worker", "one"])["desired"], "run");
    let in_contact = suite.gantry(&["prune", "one", "--force"]).output().expect("gantry runs");
    assert!(text(&in_contact).1.contains("WORKER_IN_CONTACT"), "{}", describe(&in_contact));

    // A run on the other worker copies the artifact there, so nothing is lost.
    let input = format!("in=artifact:{artifact}");
    suite.succeed(&["run", "--quiet", "--tag", "two", "-i", &input, "--", "cat", "in/file"]);
    assert_eq!(suite.succeed(&["retire", "one"]), "worker one: removed\n");
    assert_eq!(suite.succeed(&["retire", "one"]), "worker one: removed\n");
    suite.wait_for_log("one", "this worker was retired");
    suite.succeed(&["run", "--quiet", "--tag", "two", "-i", &input, "--", "cat", "in/file"]);
    // The restarted gateway is still retired until it is uncordoned.
    suite.terminate("one");
    suite.spawn("one");
    wait_for("a gateway that is not let in", || {
        (suite.log("one").matches("this worker was retired").count() > 1).then_some(())
    });
    assert_eq!(suite.succeed(&["uncordon", "one"]), "worker one: may register again\n");
    suite.attended("one", "one");
    suite.succeed(&["run", "--quiet", "--tag", "one", "--", "true"]);

    suite.kill("two");
    wait_for("a worker that is out of contact", || {
        (json(&suite, &["show", "worker", "two"])["state"] != "running").then_some(())
    });
    let refused = suite.gantry(&["prune", "two"]).output().expect("gantry runs");
    assert!(text(&refused).1.contains(&artifact), "{}", describe(&refused));
    assert_eq!(suite.succeed(&["prune", "two", "--force"]), "worker two: removed\n");
    let workers = suite.succeed(&["list", "workers"]);
    assert!(!workers.contains("two"), "{workers}");
    let lost = suite.gantry(&["download", &artifact, "out"]).output().expect("gantry runs");
    assert!(!lost.status.success(), "its bytes went with the worker");
}

#[test]
fn output_of_lost_worker_is_not_awaited() {
    if !may_run_containers() {
        return;
    }
    let mut suite = start();
    let ended = detached(&suite, &["--tag", "one"], "echo there");
    wait_for_state(&suite, &ended, "finished");
    assert_eq!(suite.succeed(&["logs", &ended]), "there\n");
    let containers = suite.succeed(&["list", "containers"]);
    assert!(containers.contains("  one  "), "{containers}");
    suite.kill("one");
    wait_for("a worker that is lost", || {
        (json(&suite, &["show", "worker", "one"])["state"] == "lost").then_some(())
    });
    let logs = || {
        let output = suite.gantry(&["logs", &ended]).output().expect("gantry runs");
        assert!(!output.status.success(), "{}", describe(&output));
        text(&output).1
    };
    let printed = logs();
    assert!(printed.contains(": its worker one is lost, silent for "), "{printed}");
    suite.succeed(&["prune", "one", "--force"]);
    let printed = logs();
    assert!(printed.contains(": its worker one was removed from the cluster"), "{printed}");
}

#[test]
fn command_runs_on_the_worker_that_it_names() {
    if !may_run_containers() {
        return;
    }
    let suite = start();
    for worker in ["one", "two", "two"] {
        let workload = detached(&suite, &["--worker", worker, "--tag", "any"], "true");
        let shown = wait_for_state(&suite, &workload, "finished");
        let places = (&shown["spec"]["worker"], &shown["location"]["worker_name"]);
        assert_eq!(places, (&worker.into(), &worker.into()), "{shown}");
        let table = suite.succeed(&["show", "workload", &workload]);
        assert!(table.contains("only worker"), "{table}");
    }
    let unknown = suite.gantry(&["run", "--worker", "three", "--", "true"]).output().expect("gantry runs");
    let (_, errors) = text(&unknown);
    assert_eq!(unknown.status.code(), Some(125), "{}", describe(&unknown));
    assert!(errors.contains("worker \"three\" is unknown"), "{errors}");
}

#[test]
fn evacuated_worker_is_safe_to_stop() {
    if !may_run_containers() {
        return;
    }
    let suite = start();
    let script = "head -c 3000000 /dev/urandom > out/file";
    suite.succeed(&["run", "--quiet", "--tag", "one", "-o", "out", "--", "sh", "-c", script]);
    let artifact = json(&suite, &["list", "artifacts"])["artifact_id"].clone();
    let artifact = artifact.as_str().expect("an id").to_owned();
    let on = |worker: &str| {
        let id = json(&suite, &["show", "worker", worker])["worker_id"].clone();
        let replicas = json(&suite, &["show", "artifact", &artifact])["replicas"].clone();
        replicas.as_array().expect("replicas").iter().any(|replica| replica["worker_id"] == id)
    };
    assert!(on("one") && !on("two"));

    let (printed, noted) =
        text(&suite.gantry(&["cordon", "one", "--evacuate"]).output().expect("gantry runs"));
    assert!(printed.contains("worker one: safe to stop"), "{printed} {noted}");
    assert!(noted.contains("1 artifact copied to other workers"), "{noted}");
    assert!(on("two"));

    // No worker is left that takes the copies.
    suite.succeed(&["uncordon", "one"]);
    suite.succeed(&["cordon", "two"]);
    let unsafe_output =
        suite.gantry(&["cordon", "one", "--evacuate", "--deadline", "5s"]).output().expect("gantry runs");
    let (printed, noted) = text(&unsafe_output);
    assert_eq!((unsafe_output.status.code(), &*printed), (Some(125), ""), "{noted}");
    assert!(
        noted.contains(
            "worker one is not safe to stop: of the workers in service, it has the only replicas of 1 artifact"
        ),
        "{noted}"
    );
    assert!(noted.contains("No other worker is in service: two is running, cordoned"), "{noted}");
    assert!(noted.contains(&artifact), "{noted}");
}
