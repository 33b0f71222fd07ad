//! RPCs of the service `Placements`.

use domain::{ArtifactId, CacheId, LeaseId, WorkerId};
use prost_reflect::Value;
use rpc::Reason::*;
use rpc::pb::scheduler as pb;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Call, Expected};

use super::spec::{self, For};
use super::workloads::{page, workload};
use super::world::World;
use super::wrong::{id_in_list, token, worker_or_any};
use super::{OTHER, TEAM};

/// RPCs that change nothing if the request is valid.
pub(super) fn read_calls(world: &World<'_>) -> Vec<Call> {
    let list = pb::ListLeasesRequest { worker: "one".to_owned(), ..Default::default() };
    let get = pb::GetLeaseRequest { team: TEAM.to_owned(), lease_id: world.driven.lease_id.clone() };
    let demand = pb::GetDemandRequest {
        max_shapes: 1000,
        max_removable: 1000,
        replica_check: pb::ReplicaCheck::Each.into(),
    };
    let explain = pb::ExplainRequest {
        subject: Some(pb::explain_request::Subject::Spec(spec::valid(world))),
        max_workers: 10_000,
        workers: vec!["one".to_owned()],
    };
    let absurd = |field: &str| {
        let bad = [1001, u32::MAX].map(|value| invalid(field, "absurd", Value::U32(value), field));
        bad.into_iter().flatten().collect::<Vec<_>>()
    };
    vec![
        Call::new(
            "Placements.GetLease",
            [get],
            [
                team("team"),
                but("team", "that does not have it", OTHER, LeaseNotFound),
                id("lease_id"),
                but("lease_id", "unknown", LeaseId::new(), LeaseNotFound),
                but("lease_id", "of another team", world.foreign_lease, LeaseNotFound),
            ],
        ),
        Call::new(
            "Placements.ListLeases",
            [list],
            [
                // An empty team stands for all teams.
                team("team").split_off(1),
                worker_or_any("worker", world),
                page(&[]),
            ],
        ),
        Call::new(
            "Placements.GetDemand",
            [demand],
            [absurd("max_shapes"), absurd("max_removable"), filter("replica_check")],
        ),
        Call::new(
            "Placements.Explain",
            [explain],
            [
                spec::bad(world, For::Explain),
                waiting(world),
                invalid("max_workers", "absurd", Value::U32(10_001), "max_workers"),
                invalid("max_workers", "absurd", Value::U32(u32::MAX), "max_workers"),
                many("workers", 1001),
                nothing("workers", "unknown", text("unknown")),
                nothing("workers", "missing", text("")),
                nothing("workers", "with NUL", text("a\0b")),
                nothing("workers", "overlong", text("x".repeat(100_000))),
            ],
        ),
    ]
}

/// Explanation of a waiting workload instead of a spec.
fn waiting(world: &World<'_>) -> Vec<Bad> {
    let pending = text(world.pending);
    let waits = move |sent: &mut Vec<_>| {
        put(sent, "workload.team", Some(&text(TEAM)));
        put(sent, "workload.workload_id", Some(&pending));
    };
    let of_it = [
        workload(world),
        but("workload_id", "that has ended", world.finished, WorkloadNotQueued),
        but("workload_id", "that was placed", world.running, WorkloadNotQueued),
    ];
    given(waits, [within("workload", "workload", of_it)])
}

/// Valid request that sets every field that can be combined with the others.
fn valid(world: &World<'_>) -> pb::PlaceRequest {
    pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: TEAM.to_owned(),
        kind: pb::PlacementKind::Task.into(),
        tags: Vec::new(),
        platform: "linux".to_owned(),
        process: Some(pb::ProcessRequirements {
            image_kind: "resource-type".to_owned(),
            resource_type: "git".to_owned(),
            capabilities: vec!["signals".to_owned()],
        }),
        requests: Some(pb::ResourceRequests {
            cpu_millis: 1 << 42,
            memory_bytes: 1 << 42,
            disk_bytes: 1 << 42,
        }),
        same_worker_as_lease_id: String::new(),
        avoid_workers: vec![world.away.worker_id.clone()],
        prefer_workers: vec![world.one.welcome.worker_id.clone()],
        artifact_ids: vec![world.sealed.to_string()],
        task_cache_ids: vec![world.cache.clone()],
        owner: "x".repeat(200),
        wait: None,
        priority: 100,
        worker: String::new(),
    }
}

/// Invalid variants of one lease request, which is located at `path` in the sent message.
fn place(world: &World<'_>, path: &'static str) -> Vec<Bad> {
    let at = move |field: &str| if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
    let unowned = move |sent: &mut Vec<_>| put(sent, &at("owner"), None);
    let unowned_too = unowned;
    let offered = |field: &str| {
        let mut bad = longest(field, 1024);
        bad.extend(but(field, "of no worker", "x".repeat(1024), NoCompatibleWorker));
        bad
    };
    let used = |field: &'static str, unknown: String, foreign: String| {
        let mut bad = id_in_list(field);
        bad.extend(but(field, "unknown", unknown, InputUnavailable));
        bad.extend(but(field, "of another team", foreign, InputUnavailable));
        bad
    };
    let fields = [
        id("lease_id"),
        but("lease_id", "of another request", &world.driven.lease_id, LeaseExists),
        but("lease_id", "that was released", world.released, LeaseExists),
        but("lease_id", "of another team", world.foreign_lease, LeaseExists),
        but("lease_id", "of an attempt", &world.running_lease, LeaseExists),
        but("lease_id", "that is a workload's", world.running, LeaseExists),
        but("lease_id", "that is a workload's, of another team", world.foreign_workload, LeaseExists),
        team("team"),
        but("team", "that does not have what is used", OTHER, InputUnavailable),
        choice("kind"),
        offered("tags"),
        change("tags", "empty", Value::List(vec![text("")]), refused("tags")),
        but("tags", "of a worker that is out of contact", "two", AllWorkersBusy),
        offered("platform"),
        within(
            "process",
            "process",
            [
                invalid("image_kind", "unknown", text("x"), "image_kind"),
                invalid("image_kind", "overlong", text("x".repeat(100_000)), "image_kind"),
                invalid("image_kind", "that has no type", text("host"), "resource_type"),
                invalid("resource_type", "missing", text(""), "resource_type"),
                longest("resource_type", 255),
                but("resource_type", "of no worker", "x", NoCompatibleWorker),
                offered("capabilities"),
            ],
        ),
        spec::requests("requests"),
        given(
            unowned,
            [
                malformed("same_worker_as_lease_id"),
                but("same_worker_as_lease_id", "unknown", LeaseId::new(), LeaseLost),
                but("same_worker_as_lease_id", "that has ended", world.released, LeaseLost),
                but("same_worker_as_lease_id", "of another team", world.foreign_lease, LeaseLost),
            ],
        ),
        given(unowned_too, [worker_or_any("worker", world)]),
        invalid("worker", "with an owner", text("one"), "worker"),
        invalid("same_worker_as_lease_id", "with an owner", text(&world.driven.lease_id), "owner"),
        id_in_list("avoid_workers"),
        id_in_list("prefer_workers"),
        used("artifact_ids", ArtifactId::new().to_string(), world.foreign_artifact.to_string()),
        ids_at_most("artifact_ids", 1000),
        but("artifact_ids", "not sealed", world.open, InputUnavailable),
        used("task_cache_ids", CacheId::new().to_string(), world.foreign_cache.clone()),
        ids_at_most("task_cache_ids", 100),
        longest("owner", 200),
        invalid("owner", "with a line break", text("a\nb"), "owner"),
        seconds("wait", 3600),
        spec::priority("priority"),
    ];
    fields.into_iter().flatten().collect()
}

/// RPCs that change state.
pub(super) async fn calls(world: &World<'_>) -> Vec<Call> {
    let renew = pb::RenewRequest { lease_token: world.driven_token.clone() };
    let using = pb::UseLeaseRequest { lease_token: world.driven_token.clone() };
    let release_many = pb::ReleaseManyRequest { lease_tokens: vec![world.driven_token.clone()] };
    let ended = |field: &str| {
        let mut bad = nothing(field, "of a lease that was released", text(&world.released_token));
        bad.extend(nothing(field, "of a worker that was pruned", text(&world.pruned_token)));
        bad.extend(nothing(field, "of an attempt", text(&world.running_token)));
        bad
    };
    vec![
        Call::new(
            "Placements.Place",
            [valid(world)],
            [place(world, ""), taken("prefer_workers", "unknown", text(WorkerId::new()))],
        ),
        place_many(world),
        Call::new(
            "Placements.Renew",
            [renew],
            [
                token("lease_token", world, &world.driven_token).await,
                but("lease_token", "of a lease that was released", &world.released_token, LeaseLost),
                but("lease_token", "of a worker that was pruned", &world.pruned_token, LeaseLost),
                but("lease_token", "of an attempt", &world.running_token, InvalidToken),
            ],
        ),
        Call::new(
            "Placements.UseLease",
            [using],
            [
                token("lease_token", world, &world.driven_token).await,
                but("lease_token", "of a lease that was released", &world.released_token, LeaseLost),
                but("lease_token", "of a worker that was pruned", &world.pruned_token, LeaseLost),
                but("lease_token", "of an attempt", &world.running_token, InvalidToken),
                invalid("lease_token", "of a transfer", text(&world.transfer_token), "lease_token"),
            ],
        ),
        Call::new(
            "Placements.ReleaseMany",
            [release_many],
            [
                vec![cleared("lease_tokens", "lease_tokens")],
                many("lease_tokens", 1001),
                token("lease_tokens", world, &world.driven_token).await,
                beside_another(&world.driven_token),
                ended("lease_tokens"),
            ],
        ),
        Call::new(
            "Placements.Release",
            [release(world)],
            [
                token("lease_token", world, &world.driven_token).await,
                given(|sent| put(sent, "settlement", None), [ended("lease_token")]),
                but("lease_token", "of a lease without candidates", &world.released_token, CandidateMissing),
                but("lease_token", "of an attempt", &world.running_token, InvalidToken),
                within("settlement", "settlement", settlement(world)),
            ],
        ),
    ]
}

/// Valid release with a settlement.
fn release(world: &World<'_>) -> pb::ReleaseRequest {
    let build_id = world.build.to_string();
    let owner = Some(pb::output_owner::Owner::BuildId(build_id.clone()));
    let artifact = pb::SettledArtifact {
        artifact_id: world.candidate.to_string(),
        digest: world.digest.clone().into(),
        label: "out".to_owned(),
        owners: vec![pb::OutputOwner { owner }],
        for_owners_only: false,
    };
    let status = pb::Outcome::Succeeded.into();
    let settlement = Some(pb::Settlement { artifacts: vec![artifact], build_id, status });
    pb::ReleaseRequest { lease_token: world.driven_token.clone(), settlement }
}

/// Invalid variants of a settlement.
fn settlement(world: &World<'_>) -> Vec<Vec<Bad>> {
    let unowned = |sent: &mut Vec<_>| put(sent, "settlement.artifacts.owners", None);
    let only_owners = "artifacts.for_owners_only";
    vec![
        many("artifacts", 1001),
        twice("artifacts", "artifacts.artifact_id"),
        id("artifacts.artifact_id"),
        but("artifacts.artifact_id", "without a candidate", ArtifactId::new(), CandidateMissing),
        but("artifacts.artifact_id", "in use", world.sealed, CandidateMissing),
        digests("artifacts.digest"),
        change(
            "artifacts.digest",
            "that no candidate has",
            Value::Bytes(vec![8; 32].into()),
            Expected::Refused(CandidateMissing, String::new()),
        ),
        label("artifacts.label"),
        id("artifacts.owners.build_id"),
        id("artifacts.owners.task_cache_id"),
        id("artifacts.owners.resource_cache_claim_id"),
        given(unowned, [invalid(only_owners, "without owners", Value::Bool(true), only_owners)]),
        optional_id("build_id"),
        choice("status"),
    ]
}

/// A list with one invalid token releases no lease.
fn beside_another(good: &str) -> Vec<Bad> {
    let tokens = Value::List(vec![text(good), text("x")]);
    change(
        "lease_tokens",
        "malformed, beside another",
        tokens,
        Expected::Refused(InvalidToken, String::new()),
    )
}

fn place_many(world: &World<'_>) -> Call {
    let item = || pb::PlaceItem { request: Some(valid(world)), group: 1 };
    let together = pb::PlaceManyRequest { items: vec![item(), item()] };
    let minute = |sent: &mut Vec<_>| put(sent, "items.request.wait.seconds", Some(&Value::I64(60)));
    // One rejected request of a group rejects the whole group.
    let one = of_several(place(world, "items.request"));
    Call::new(
        "Placements.PlaceMany",
        [together],
        [
            vec![cleared("items", "items")],
            many("items", 1001),
            twice("items", "items[1].request.lease_id"),
            vec![cleared("items.request", "items[0].request")],
            within("items.request", "items[0].request", [one]),
            given(
                minute,
                [
                    invalid("items.group", "that is not that of all", Value::U32(2), "items[0].request.wait"),
                    invalid("items.group", "missing", Value::U32(0), "items[0].request.wait"),
                    invalid("items.group", "absurd", Value::U32(u32::MAX), "items[0].request.wait"),
                ],
            ),
        ],
    )
}
