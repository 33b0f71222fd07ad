//! Explanations why objects are kept or were deleted, and undeletion while bytes exist.

use std::fs;

use integration_tests::suite::{Shape, Suite};
use integration_tests::{Cluster, code, describe, may_run_containers, wait_for};
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::{PlaceRequest, PlacementKind, ReleaseRequest};
use sea_orm::prelude::Uuid;
use sea_orm::{ConnectionTrait, DbBackend, Statement};
use serde_json::Value;

fn cluster() -> Cluster {
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s");
    fs::create_dir(cluster.path("src")).expect("a directory");
    fs::write(cluster.path("src/file"), "content").expect("written");
    cluster
}

fn json<const N: usize>(cluster: &Cluster, line: [&str; N]) -> Value {
    let printed = cluster.succeed(line.iter().chain(&["--json"]));
    serde_json::from_slice(printed.trim_ascii()).expect("JSON")
}

fn text<const N: usize>(cluster: &Cluster, line: [&str; N]) -> String {
    String::from_utf8(cluster.succeed(line)).expect("text")
}

fn id(thing: &Value, name: &str) -> String {
    thing[name].as_str().unwrap_or_else(|| panic!("no {name} in {thing}")).to_owned()
}

/// Runs a command that leaves the output `out`, kept for `keep`, and returns the id of its
/// artifact.
fn make(cluster: &Cluster, keep: &str) -> String {
    let script = "cat src/file > out/made";
    cluster.succeed(["run", "--keep", keep, "-i", "src=src", "-o", "out", "--", "sh", "-c", script]);
    let artifacts = cluster.list("artifacts");
    let out = artifacts.iter().find(|artifact| artifact["label"] == "out").expect("the output");
    id(out, "artifact_id")
}

/// Returns the volumes and containers of the worker, each with its kind.
fn held(cluster: &Cluster) -> Vec<(&'static str, String)> {
    let volumes = cluster.list("volumes");
    let containers = cluster.list("containers");
    let volumes = volumes.iter().map(|volume| ("volume", id(volume, "volume_handle")));
    volumes
        .chain(containers.iter().map(|container| ("container", id(container, "container_handle"))))
        .collect()
}

#[test]
fn kept_and_deleted_objects_are_explained() {
    if !may_run_containers() {
        return;
    }
    let cluster = cluster();
    let made = make(&cluster, "1h");
    let kept = json(&cluster, ["explain", &made]);
    assert_eq!((&kept["kind"], &kept["state"]), (&"artifact".into(), &"sealed".into()), "{kept}");
    assert_eq!(kept["kept_by"][0]["kind"], "build", "{kept}");
    assert_eq!(kept["expires_at"], kept["kept_by"][0]["until"], "{kept}");
    assert_eq!(kept["reason"], "every owner of it has let go");
    let build = id(&kept["kept_by"][0], "id");
    let owner = json(&cluster, ["explain", &build]);
    assert_eq!(
        (&owner["state"], &owner["expires_at"]),
        (&"succeeded".into(), &kept["expires_at"]),
        "{owner}"
    );
    let printed = text(&cluster, ["explain", &made]);
    assert!(printed.contains(&format!("build {build}, which has succeeded, until ")), "{printed}");
    for (kind, handle) in held(&cluster) {
        let explained = json(&cluster, ["explain", &handle]);
        assert_eq!(explained["kind"], kind, "{explained}");
        assert!(text(&cluster, ["explain", &handle]).starts_with(&format!("{kind}:")));
    }
    let worker = json(&cluster, ["explain", "local"]);
    assert_eq!((&worker["kind"], &worker["worker"]["name"]), (&"worker".into(), &"local".into()), "{worker}");
    assert_eq!(json(&cluster, ["explain", &id(&worker, "id")])["kind"], "worker");

    // An object that nothing keeps is announced as garbage, deleted, and explained afterwards.
    let (gone, held, dry) = wait_for("garbage that the collector has not marked", || {
        let gone = make(&cluster, "0s");
        let held = held(&cluster);
        let dry = text(&cluster, ["gc", "--dry-run"]);
        dry.contains(&gone).then_some((gone, held, dry))
    });
    assert!(!dry.contains(&made), "{dry}");
    assert!(dry.contains(" would be marked, ") && dry.ends_with(" on workers\n"), "{dry}");
    let would = json(&cluster, ["gc", "--dry-run"]);
    assert_eq!((&would["dry_run"], &would["truncated"]), (&true.into(), &false.into()), "{would}");
    assert!(would["size_bytes"].is_u64(), "{would}");
    cluster.succeed(["gc"]);
    let explained = json(&cluster, ["explain", &gone]);
    assert_eq!(explained["state"], "deleting", "{explained}");
    assert!(explained["marked_at"].is_string() && explained["remembered_until"].is_string(), "{explained}");
    assert_eq!(explained["reason"], "every owner of it has let go");
    let deleted = text(&cluster, ["list", "artifacts", "--wide", "--state", "deleting"]);
    assert!(deleted.contains(&gone) && !deleted.contains(&made), "{deleted}");
    assert!(deleted.contains(" ago: every owner of it has let go"), "{deleted}");
    let shown = text(&cluster, ["show", "artifact", &gone]);
    assert!(shown.contains("deleted:") && shown.contains("every owner of it has let go"), "{shown}");
    let went = wait_for("the end of what the worker had", || {
        let explained: Vec<_> = held.iter().map(|(_, handle)| json(&cluster, ["explain", handle])).collect();
        let went: Vec<_> = explained.into_iter().filter(|thing| thing["state"] == "gone").collect();
        let all = ["volume", "container"].iter().all(|kind| went.iter().any(|thing| thing["kind"] == *kind));
        all.then_some(went)
    });
    for thing in went {
        assert!(thing["marked_at"].is_string() && thing["gone_at"].is_string(), "{thing}");
        let why = thing["reason"].as_str().expect("a rule");
        assert!(["its attempt has ended", "its artifact is deleted"].contains(&why), "{thing}");
    }
    wait_for("the end of its bytes", || {
        (json(&cluster, ["explain", &gone])["relations"] == Value::Array(Vec::new())).then_some(())
    });
    let refused = cluster.output(["undelete", &gone]);
    assert_eq!(code(&refused), 125, "{}", describe(&refused));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("BYTES_GONE"), "{}", describe(&refused));
    let unknown = cluster.output(["explain", "01980000-0000-7000-8000-00000000002a"]);
    assert_eq!(code(&unknown), 125, "{}", describe(&unknown));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("UNKNOWN_ID"), "{}", describe(&unknown));
}

#[test]
fn undelete_works_with_separate_services() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, &[("GANTRY_HOLD_DESTRUCTION", "true"), ("GANTRY_GC_GRACE", "0s")]);
    let script = "echo content > out/made";
    suite.succeed(&["run", "--keep", "0s", "-o", "out", "--", "sh", "-c", script]);
    suite.succeed(&["gc"]);
    let explain = |id: &str| -> Value {
        serde_json::from_str(suite.succeed(&["explain", id, "--json"]).trim()).expect("JSON")
    };
    let deleted = suite.succeed(&["list", "artifacts", "--state", "deleting", "--json"]);
    let deleted: Value = serde_json::from_str(deleted.lines().next().expect("it was deleted")).expect("JSON");
    let made = id(&deleted, "artifact_id");
    assert_eq!(explain(&made)["can_be_undeleted"], true);
    suite.succeed(&["undelete", &made]);
    suite.succeed(&["gc"]);
    assert_eq!(explain(&made)["state"], "sealed");
    suite.succeed(&["download", &made, "back"]);
    assert_eq!(fs::read_to_string(suite.path("back/made")).expect("brought back"), "content\n");
}

#[test]
fn undelete_restores_bytes() {
    if !may_run_containers() {
        return;
    }
    // Without this setting, the bytes would be destroyed at once.
    let cluster = cluster().with("GANTRY_HOLD_DESTRUCTION", "true");
    let made = make(&cluster, "0s");
    cluster.succeed(["gc"]);
    let used = format!("in=artifact:{made}");
    for line in [vec!["download", &made, "back"], vec!["run", "-i", &used, "--", "true"]] {
        let refused = cluster.output(&line);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(
            stderr.contains(&format!("the artifact was deleted; `gantry undelete {made}` restores it")),
            "{stderr}"
        );
    }
    let printed = text(&cluster, ["explain", &made]);
    assert!(printed.contains("deleting (garbage; its bytes are still on a worker)"), "{printed}");
    assert!(printed.ends_with(&format!("`gantry undelete {made}` restores it.\n")), "{printed}");

    let printed = text(&cluster, ["undelete", &made, "--keep", "90m"]);
    assert_eq!(printed, format!("artifact {made} is restored: 7 B on 1 worker, kept for at least 90 min\n"));
    cluster.succeed(["gc"]);
    let explained = json(&cluster, ["explain", &made]);
    assert_eq!(
        (&explained["state"], &explained["marked_at"]),
        (&"sealed".into(), &Value::Null),
        "{explained}"
    );
    assert_eq!(explained["kept_by"][0]["text"], "no owner: kept for a limited time");
    cluster.succeed(["download", &made, "back"]);
    assert_eq!(fs::read_to_string(cluster.path("back/made")).expect("a file"), "content");
    assert_eq!(cluster.succeed(["run", "-i", &used, "--", "cat", "in/made"]), b"content");
}

#[test]
fn input_expiry_and_lost_bytes_are_explained() {
    if !may_run_containers() {
        return;
    }
    let cluster = cluster().with("GANTRY_GC_GRACE", "1h");
    cluster.succeed(["run", "--keep", "30m", "-i", "src=src", "--", "true"]);
    let artifacts = cluster.list("artifacts");
    let source =
        id(artifacts.iter().find(|artifact| artifact["label"] == "src").expect("the input"), "artifact_id");
    let explained = json(&cluster, ["explain", &source]);
    let until: Vec<_> =
        explained["kept_by"].as_array().expect("keepers").iter().map(|one| &one["until"]).collect();
    assert!(until.len() == 2 && until.iter().all(|until| until.is_string()), "{explained}");
    assert_eq!(
        Some(&explained["expires_at"]),
        until.into_iter().max_by_key(|until| until.to_string()),
        "{explained}"
    );
    let printed = text(&cluster, ["explain", &source]);
    assert!(printed.contains("for an attempt that has ended, until"), "{printed}");

    // Related transfers and workers can be explained, too.
    let replica = id(&json(&cluster, ["show", "artifact", &source])["replicas"][0], "volume_handle");
    let explained = json(&cluster, ["explain", &replica]);
    let relations = explained["relations"].as_array().expect("relations");
    for kind in ["transfer", "worker"] {
        let related = relations
            .iter()
            .find(|one| one["kind"] == kind)
            .unwrap_or_else(|| panic!("no {kind}: {explained}"));
        let printed = text(&cluster, ["explain", related["ids"][0].as_str().expect("an id")]);
        assert!(printed.starts_with(&format!("{kind}:")), "{printed}");
        let what = if kind == "worker" { "volume" } else { source.as_str() };
        assert!(printed.contains(what), "{printed}");
    }

    // The download finds the loss.
    let path = cluster.state().join("worker/volumes").join(&replica);
    fs::remove_dir_all(&path).expect("taken away");
    let refused = cluster.output(["download", &source, "back"]);
    assert_eq!(code(&refused), 125, "{}", describe(&refused));
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(stderr.contains("its bytes are lost"), "{stderr}");
    let printed = text(&cluster, ["explain", &source]);
    assert!(printed.contains("lost because:") && printed.contains("is missing on the worker"), "{printed}");
}

/// Returns the leases of workloads.
async fn leases_of_workloads(cluster: &Cluster) -> Vec<Uuid> {
    let url = format!("sqlite://{}", cluster.state().join("scheduler.db").display());
    let database = sea_orm::Database::connect(url).await.expect("a database");
    let query = "SELECT id FROM leases WHERE workload_id IS NOT NULL".to_owned();
    let rows = database.query_all_raw(Statement::from_string(DbBackend::Sqlite, query)).await.expect("rows");
    database.close().await.expect("closed");
    rows.iter().map(|row| row.try_get("", "id").expect("an id")).collect()
}

#[test]
fn lease_is_explained() {
    if !may_run_containers() {
        return;
    }
    let cluster = cluster();
    let artifact = cluster.upload("src");
    let socket = format!("unix://{}", cluster.path("run/gantry/gantry.sock").display());
    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    let placements = || PlacementsClient::new(peer(&socket, Outgoing::internal()).expect("an address"));

    // A lease that its holder drives.
    let lease = "01980000-0000-7000-8000-00000000002b";
    let request = PlaceRequest {
        lease_id: lease.to_owned(),
        team: "main".to_owned(),
        kind: PlacementKind::Task.into(),
        owner: "step 7".to_owned(),
        artifact_ids: vec![artifact.clone()],
        ..PlaceRequest::default()
    };
    let granted = tokio.block_on(async { placements().place(request).await.expect("granted").into_inner() });
    let held = json(&cluster, ["explain", lease]);
    let expected = [("kind", "lease"), ("placement_kind", "task"), ("state", "granted"), ("owner", "step 7")];
    for (name, value) in expected {
        assert_eq!(held[name], value, "{held}");
    }
    assert_eq!(
        (&held["worker_name"], &held["worker_id"]),
        (&granted.worker_name.into(), &granted.worker_id.into())
    );
    assert_eq!((&held["workload_id"], &held["ended_at"]), (&Value::Null, &Value::Null), "{held}");
    assert!(held["granted_at"].is_string() && held["expires_at"].is_string(), "{held}");
    assert_eq!(held["relations"][0]["relation"], "pins", "{held}");
    assert_eq!(held["relations"][0]["ids"][0], artifact, "{held}");
    let printed = text(&cluster, ["explain", lease]);
    assert!(printed.starts_with("lease:") && printed.contains("unless the holder renews it"), "{printed}");
    let kept = text(&cluster, ["explain", &artifact]);
    assert!(kept.contains(&format!("workload or lease {lease}, which pins it")), "{kept}");

    let release = ReleaseRequest { lease_token: granted.lease_token, settlement: None };
    tokio.block_on(async { placements().release(release).await.expect("released") });
    let ended = json(&cluster, ["explain", lease]);
    assert_eq!((&ended["state"], &ended["reason"]), (&"ended".into(), &"its holder released it".into()));
    let printed = text(&cluster, ["explain", lease]);
    assert!(printed.contains(" ago): its holder released it\n"), "{printed}");
    let foreign = cluster.output(["--team", "other", "explain", lease]);
    assert_eq!(code(&foreign), 125, "{}", describe(&foreign));

    // A lease of a workload.
    let (workload, id) = {
        cluster.succeed(["run", "--", "true"]);
        let workloads = cluster.list("workloads");
        let leases = tokio.block_on(leases_of_workloads(&cluster));
        assert_eq!((workloads.len(), leases.len()), (1, 1));
        (workloads[0]["workload_id"].clone(), leases[0].to_string())
    };
    let ended = json(&cluster, ["explain", &id]);
    assert_eq!((&ended["kind"], &ended["workload_id"]), (&"lease".into(), &workload), "{ended}");
    assert_eq!((&ended["state"], &ended["expires_at"]), (&"ended".into(), &Value::Null), "{ended}");
    assert_eq!(ended["reason"], "its worker reported the end of the attempt");
    assert!(ended["attempt_id"].is_string(), "{ended}");
}

#[test]
fn inline_upload_reports_its_size() {
    let cluster = cluster();
    let handed_over = cluster.output(["upload", "--inline", "src"]);
    assert_eq!(code(&handed_over), 0, "{}", describe(&handed_over));
    let stderr = String::from_utf8_lossy(&handed_over.stderr).into_owned();
    assert!(stderr.contains("src: 1 entry, 7 B, kept in the artifact store itself"), "{stderr}");
    fs::write(cluster.path("src/file"), vec![b'x'; 2 << 20]).expect("written");
    let refused = cluster.output(["upload", "--inline", "src"]);
    assert_eq!(code(&refused), 125, "{}", describe(&refused));
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(stderr.contains("the directory is too large for --inline (1 entry, 2.0 MiB)"), "{stderr}");
    assert!(stderr.contains("; upload it without --inline"), "{stderr}");
}
