//! Artifacts of a worker that is gone for good.

use std::io::Read;
use std::process::Stdio;

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{code, describe, may_run_containers, wait_for, write};

/// Returns the state of a worker.
fn state(suite: &Suite, worker: &str) -> Option<String> {
    let shown = suite.gantry(&["show", "worker", worker, "--json"]).output().expect("gantry runs");
    let shown: serde_json::Value = serde_json::from_slice(shown.stdout.trim_ascii()).ok()?;
    Some(shown["state"].as_str()?.to_owned())
}

#[test]
fn lost_input_is_uploaded_again() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
    suite.attend("gone", "gone", &[]);
    suite.attended("gone", "gone");
    let fresh = suite.path("fresh");
    write(&fresh.join("f"), "from the caller\n");
    let input = format!("src={}", fresh.display());
    let run = |suite: &Suite| {
        let arguments = ["run", "-i", &input, "--", "cat", "src/f"];
        let ran = suite.gantry(&arguments).output().expect("gantry runs");
        assert_eq!(code(&ran), 0, "{}", describe(&ran));
        assert_eq!(ran.stdout, b"from the caller\n");
        String::from_utf8(ran.stderr).expect("UTF-8")
    };
    run(&suite);
    let printed = run(&suite);
    assert!(printed.contains("already in the cluster as artifact"), "{printed}");
    let artifact = suite.upload(&fresh);

    suite.kill("gone");
    wait_for("it is silent", || (state(&suite, "gone")? == "stalled").then_some(()));
    suite.attend("next", "next", &[]);
    suite.attended("next", "next");

    // A run with the artifact waits for its worker, and reports that.
    let named = format!("src=artifact:{artifact}");
    let mut waits = suite.gantry(&["run", "-i", &named, "--", "cat", "src/f"]);
    let mut waits = waits.stderr(Stdio::piped()).spawn().expect("gantry");
    let (mut stderr, mut printed) = (waits.stderr.take().expect("stderr"), Vec::<u8>::new());
    while !String::from_utf8_lossy(&printed).contains("input src is not on the worker yet") {
        let mut some = [0; 1024];
        let read = stderr.read(&mut some).expect("read");
        assert_ne!(read, 0, "{}", String::from_utf8_lossy(&printed));
        printed.extend_from_slice(&some[..read]);
    }
    waits.kill().expect("killed");
    waits.wait().expect("it ends");

    // A caller with the directory uploads it again.
    let printed = run(&suite);
    assert!(!printed.contains("already in the cluster"), "{printed}");
    let printed = run(&suite);
    assert!(printed.contains("already in the cluster as artifact"), "{printed}");
}
