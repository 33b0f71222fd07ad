//! Replicas that a person removes or changes on the disk of a host worker.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, may_run_containers, wait_for};
use serde_json::Value;

fn json(suite: &Suite, arguments: &[&str]) -> Vec<Value> {
    let printed = suite.succeed(&[arguments, &["--json"]].concat());
    printed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Returns the handle of the only present replica on a worker, and its directory.
fn replica(suite: &Suite, name: &str) -> (String, PathBuf) {
    let worker = json(suite, &["show", "worker", name]).remove(0)["worker_id"].clone();
    let mut volumes = json(suite, &["list", "volumes"]);
    volumes.retain(|volume| {
        volume["worker_id"] == worker && volume["purpose"] == "replica" && volume["state"] == "created"
    });
    let [volume] = &volumes[..] else { panic!("{volumes:?}") };
    let handle = volume["volume_handle"].as_str().expect("a handle").to_owned();
    (handle.clone(), suite.path(&format!("state-{name}/volumes")).join(handle))
}

#[test]
fn lost_replica_costs_no_run_while_another_lives() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
    for worker in ["one", "two"] {
        suite.attend(worker, worker, &[("GANTRY_WORKER_TAGS", worker)]);
        suite.attended(worker, worker);
    }
    let script = "printf 'more than eight bytes' > out/file";
    suite.succeed(&["run", "--quiet", "--tag", "two", "-o", "out", "--", "sh", "-c", script]);
    let artifact = json(&suite, &["list", "artifacts"]).remove(0)["artifact_id"].clone();
    let artifact = artifact.as_str().expect("an id");
    let input = format!("in=artifact:{artifact}");
    let run = || {
        let printed =
            suite.succeed(&["run", "--quiet", "--tag", "one", "-i", &input, "--", "cat", "in/file"]);
        assert_eq!(printed, "more than eight bytes");
    };
    run();
    type Damage = fn(&Path);
    let remove: Damage = |volume| fs::remove_dir_all(volume).expect("remove");
    let overwrite: Damage = |volume| {
        let file = File::options().write(true).open(volume.join("contents/file")).expect("open");
        file.write_all_at(b"XXXX", 6).expect("write");
    };
    let delete: Damage = |volume| fs::remove_file(volume.join("contents/file")).expect("remove");
    let cases = [
        (remove, "is missing on the worker"),
        (overwrite, "is damaged: \"file\" was changed after it was written"),
        (delete, "is damaged: its root directory was changed after it was written"),
    ];
    for (damage, reason) in cases {
        let (handle, directory) = replica(&suite, "one");
        damage(&directory);
        assert_eq!(suite.succeed(&["cat", artifact, "file"]), "more than eight bytes");
        run();
        for id in [&handle, artifact] {
            assert_eq!(json(&suite, &["explain", id])[0]["loss_reason"], reason);
        }
    }
}

#[test]
fn damage_that_only_a_reader_finds_loses_the_replica() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
    for worker in ["one", "two"] {
        suite.attend(worker, worker, &[("GANTRY_WORKER_TAGS", worker)]);
        suite.attended(worker, worker);
    }
    let make = |contents: &str| {
        let script = format!("printf {contents} > out/file");
        suite.succeed(&["run", "--quiet", "--tag", "two", "-o", "out", "--", "sh", "-c", &script]);
        let artifact =
            json(&suite, &["list", "artifacts", "--state", "sealed"]).remove(0)["artifact_id"].clone();
        let artifact = artifact.as_str().expect("an id").to_owned();
        // Size and times stay as they are, as with damage by the disk.
        let file = replica(&suite, "two").1.join("contents/file");
        let modified = fs::metadata(&file).and_then(|found| found.modified()).expect("times");
        let file = File::options().write(true).open(file).expect("open");
        file.write_all_at(b"X", 0).expect("write");
        file.set_modified(modified).expect("set");
        artifact
    };
    let is_lost = |artifact: &str| {
        wait_for("the loss of the replica", || {
            let explained = json(&suite, &["explain", artifact]).remove(0);
            (explained["loss_reason"] == "is damaged: \"file\" differs from its manifest").then_some(())
        });
    };

    let artifact = make("first");
    let target = suite.path("target").display().to_string();
    let failed = suite.gantry(&["download", &artifact, &target]).output().expect("gantry runs");
    let printed = describe(&failed);
    assert!(!failed.status.success() && printed.contains("every replica is lost"), "{printed}");
    is_lost(&artifact);

    let artifact = make("second");
    let input = format!("in=artifact:{artifact}");
    let run = ["run", "--quiet", "--tag", "one", "-i", &input, "--", "cat", "in/file"];
    let failed = suite.gantry(&run).output().expect("gantry runs");
    let printed = describe(&failed);
    assert!(!failed.status.success() && printed.contains("INPUT_UNAVAILABLE"), "{printed}");
    is_lost(&artifact);
}

#[test]
fn directory_whose_earlier_upload_is_lost_is_uploaded_again() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
    suite.attend("one", "one", &[]);
    suite.attended("one", "one");
    let directory = suite.path("directory");
    fs::create_dir(&directory).expect("a directory");
    fs::write(directory.join("file"), "more than eight bytes").expect("write");
    let input = format!("in={}", directory.display());
    let run = || {
        let ran = suite.gantry(&["run", "-i", &input, "--", "cat", "in/file"]).output().expect("gantry runs");
        let printed = describe(&ran);
        assert!(ran.status.success(), "{printed}");
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "more than eight bytes");
        printed
    };
    let note = "in: the cluster has lost the earlier upload; uploading again";
    run();
    let printed = run();
    assert!(printed.contains("already in the cluster") && !printed.contains(note), "{printed}");
    let file = replica(&suite, "one").1.join("contents/file");
    let file = File::options().write(true).open(file).expect("open");
    file.write_all_at(b"XXXX", 6).expect("write");
    let printed = run();
    assert!(printed.contains("already in the cluster") && printed.contains(note), "{printed}");
    // The new upload is whole.
    let printed = run();
    assert!(!printed.contains(note), "{printed}");
}
