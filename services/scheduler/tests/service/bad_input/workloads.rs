//! RPCs of the service `Workloads`.

use domain::{CacheId, WorkloadId};
use prost_reflect::Value;
use rpc::Reason::*;
use rpc::pb::scheduler as pb;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Call, Expected};

use super::spec::{self, For};
use super::world::World;
use super::wrong::token;
use super::{OTHER, TEAM};

/// Invalid variants of the team and id of a workload.
pub(super) fn workload(world: &World<'_>) -> Vec<Bad> {
    [
        team("team"),
        but("team", "that does not have it", OTHER, WorkloadNotFound),
        id("workload_id"),
        but("workload_id", "unknown", WorkloadId::new(), WorkloadNotFound),
        but("workload_id", "of another team", world.foreign_workload, WorkloadNotFound),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// RPCs that change nothing if the request is valid.
pub(super) async fn read_calls(world: &World<'_>) -> Vec<Call> {
    let (team, workload_id) = (TEAM.to_owned(), world.finished.to_string());
    let get = pb::GetRequest { team: team.clone(), workload_id: workload_id.clone() };
    let watch = pb::WatchRequest { team, workload_id, after_revision: 0 };
    vec![
        Call::new("Workloads.Get", [get], [workload(world)]),
        Call::new(
            "Workloads.Watch",
            [watch],
            [
                workload(world),
                nothing("after_revision", "that was never reached", Value::U64(1 << 62)),
                nothing("after_revision", "absurd", Value::U64(u64::MAX)),
            ],
        ),
        list(world).await,
        find(world),
    ]
}

fn find(world: &World<'_>) -> Call {
    let find = pb::FindRequest { team: TEAM.to_owned(), reference: world.finished.to_string() };
    let foreign = world.foreign_workload.to_string();
    let malformed = ["", "a b", "-", "a\0b", &"f".repeat(64), &"x".repeat(100_000)];
    let malformed = malformed.into_iter();
    Call::new(
        "Workloads.Find",
        [find],
        [
            team("team"),
            but("team", "that does not have it", OTHER, WorkloadNotFound),
            malformed.flat_map(|given| invalid("reference", "malformed", text(given), "reference")).collect(),
            but("reference", "unknown", "no-such-name", WorkloadNotFound),
            but("reference", "of another team", foreign, WorkloadNotFound),
        ],
    )
}

/// A list accepts only its own page token.
async fn list(world: &World<'_>) -> Call {
    let scheduler = world.scheduler;
    let list = pb::ListRequest { team: TEAM.to_owned(), page_size: 1, ..pb::ListRequest::default() };
    let assigned = pb::ListRequest { state: pb::WorkloadState::Assigned.into(), ..list.clone() };
    let of_all = pb::ListRequest { team: String::new(), ..list.clone() };
    let mut tokens = Vec::new();
    for request in [&list, &assigned, &of_all] {
        let page = scheduler.workloads().list(request.clone()).await.expect("a page");
        tokens.push(page.into_inner().next_page_token);
    }
    let workers = pb::ListWorkersRequest { page_size: 1, ..Default::default() };
    let workers = scheduler.workers().list_workers(workers).await.expect("a page").into_inner();
    let [own, of_state, of_all] = <[String; 3]>::try_from(tokens).expect("three");
    assert!([&own, &of_state, &of_all, &workers.next_page_token].iter().all(|token| !token.is_empty()));
    let mut teams = team("team");
    // An empty team stands for all teams, but the token belongs to a list of one team.
    teams.remove(0);
    Call::new(
        "Workloads.List",
        [pb::ListRequest { page_token: own, ..list }],
        [
            teams,
            but("team", "missing", "", InvalidPageToken),
            but("team", "that the token is not of", OTHER, InvalidPageToken),
            filter("state"),
            filter("outcome"),
            change(
                "unfinished",
                "that the token is not of",
                Value::Bool(true),
                Expected::Refused(InvalidPageToken, String::new()),
            ),
            but_state("that the token is not of"),
            page(&[&of_state, &of_all, &workers.next_page_token]),
        ],
    )
}

fn but_state(what: &str) -> Vec<Bad> {
    let expected = Expected::Refused(InvalidPageToken, String::new());
    change("state", what, Value::EnumNumber(pb::WorkloadState::Finished.into()), expected)
}

/// Invalid variants of the page of a list. `foreign` contains tokens of other lists.
pub(super) fn page(foreign: &[&str]) -> Vec<Bad> {
    let mut bad: Vec<_> = [1001, u32::MAX]
        .into_iter()
        .flat_map(|size| invalid("page_size", "absurd", Value::U32(size), "page_size"))
        .collect();
    bad.extend(but("page_token", "malformed", "?", InvalidPageToken));
    bad.extend(but("page_token", "overlong", "A".repeat(100_000), InvalidPageToken));
    bad.extend(
        foreign.iter().flat_map(|token| but("page_token", "of another list", token, InvalidPageToken)),
    );
    bad
}

/// RPCs that change state.
pub(super) async fn calls(world: &World<'_>) -> Vec<Call> {
    let submit =
        pb::SubmitRequest { workload_id: WorkloadId::new().to_string(), spec: Some(spec::valid(world)) };
    let begin = pb::StartAttemptRequest { lease_token: world.running_token.clone() };
    let cancel = pb::CancelRequest {
        team: TEAM.to_owned(),
        workload_id: world.pending.to_string(),
        grace: Some(rpc::duration(std::time::Duration::from_secs(10))),
    };
    vec![
        Call::new(
            "Workloads.Submit",
            [submit],
            [
                id("workload_id"),
                but("workload_id", "of another spec", world.finished, WorkloadExists),
                but("workload_id", "of another team", world.foreign_workload, WorkloadExists),
                but("workload_id", "that is a lease's, of another team", world.foreign_lease, WorkloadExists),
                but("workload_id", "that is a lease's", &world.driven.lease_id, WorkloadExists),
                but("workload_id", "that was settled long ago", world.forgotten, HolderSettled),
                spec::bad(world, For::Submit),
            ],
        ),
        Call::new(
            "Workloads.StartAttempt",
            [begin],
            [token("lease_token", world, &world.running_token).await, no_attempt(world)],
        ),
        finish_attempt(world).await,
        Call::new("Workloads.Cancel", [cancel], [workload(world), negative("grace")]),
    ]
}

/// Leases that do not permit the start of an attempt.
fn no_attempt(world: &World<'_>) -> Vec<Bad> {
    let mut bad = lost("lease_token", world);
    bad.extend(but("lease_token", "of an attempt that has ended", &world.reported_token, LeaseLost));
    bad.extend(but("lease_token", "of an attempt that must stop", &world.stopping_token, LeaseLost));
    bad
}

/// Lease of an attempt that ended without a report of its gateway, and leases without an attempt.
fn lost(field: &str, world: &World<'_>) -> Vec<Bad> {
    let mut bad = but(field, "of an attempt that was lost with its worker", &world.lost_token, LeaseLost);
    bad.extend(but(field, "of a lease that its holder drives", &world.driven_token, InvalidToken));
    bad.extend(but(field, "of a lease that its holder gave back", &world.released_token, InvalidToken));
    bad.extend(but(
        field,
        "of a driven lease of a worker that was pruned",
        &world.pruned_token,
        InvalidToken,
    ));
    bad
}

async fn finish_attempt(world: &World<'_>) -> Call {
    let mut attempts = world.attempts.iter();
    let mut attempt = || attempts.next().expect("one more").clone();
    let usage = pb::Usage {
        running: Some(rpc::duration(std::time::Duration::from_secs(1))),
        cpu_time: Some(rpc::duration(std::time::Duration::from_secs(1))),
        ..pb::Usage::default()
    };
    let finish = pb::FinishAttemptRequest {
        lease_token: attempt(),
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(255)) }),
        failure: None,
        outputs: vec![pb::PublishedOutput {
            name: "out".to_owned(),
            artifact_id: WorkloadId::new().to_string(),
            size_bytes: 1,
            digest: vec![1; 32].into(),
            entries: 1,
        }],
        started_at: Some(rpc::timestamp(domain::Timestamp::now())),
        caches: vec![pb::PublishedCache {
            task_cache_id: CacheId::new().to_string(),
            artifact_id: WorkloadId::new().to_string(),
            digest: vec![1; 32].into(),
        }],
        usage: Some(usage),
        notes: vec![],
        result: Some("{}".into()),
    };
    let good = finish.lease_token.clone();
    // Each variant ends its own attempt.
    let mut of_another = |bad: Vec<Bad>| {
        let token = text(attempt());
        given(move |sent| put(sent, "lease_token", Some(&token)), [bad])
    };
    let absurd = Value::U64(u64::MAX);
    let strange = [
        taken("failure.reason", "unknown", text("NEVER_HEARD_OF")),
        taken("failure.reason", "with NUL", text("a\0b")),
        taken("failure.message", "with NUL", text("a\0b")),
        taken("failure.message", "overlong", text("x".repeat(100_000))),
        taken(
            "notes",
            "that are many and overlong, with NUL",
            Value::List(vec![text("a\0".repeat(5000)); 100]),
        ),
        taken("outputs.name", "that was not asked for, with NUL", text("a\0b")),
        taken("result", "that was not asked for, with NUL", Value::Bytes("a\0b".into())),
        taken("outputs.size_bytes", "absurd", absurd.clone()),
        taken("outputs.entries", "absurd", absurd.clone()),
        taken("usage.peak_memory_bytes", "absurd", absurd.clone()),
        taken("usage.bytes_in", "absurd", absurd.clone()),
        taken("usage.bytes_out", "absurd", absurd),
        vec![time("usage.running", i64::MAX, 999_999_999, Expected::Taken)],
        vec![time("usage.cpu_time", i64::MAX, 999_999_999, Expected::Taken)],
    ];
    let mut bad: Vec<_> = strange.into_iter().map(&mut of_another).collect();
    // The worker failed before the start of the attempt, so the attempt is retried.
    for message in ["a\0b", &"x".repeat(100_000)] {
        let fault = taken("failure.message", "of a worker", text(message));
        let fault = of_another(fault);
        bad.push(given(
            |sent| {
                put(sent, "exit", None);
                put(sent, "started_at", None);
                put(sent, "failure.reason", Some(&text("START_FAILED")));
            },
            [fault],
        ));
    }
    bad.extend([
        token("lease_token", world, &good).await,
        lost("lease_token", world),
        nothing("lease_token", "of an attempt that has ended", text(&world.reported_token)),
        invalid("exit.code", "absurd", Value::U32(256), "exit.code"),
        invalid("exit.code", "absurd", Value::U32(u32::MAX), "exit.code"),
        invalid("result", "too large", Value::Bytes(vec![0; (1 << 20) + 1].into()), "result"),
        invalid("exit.signal", "absurd", Value::U32(256), "exit.signal"),
        vec![cleared("exit.code", "exit")],
        within("outputs", "outputs[0]", [id("artifact_id"), digests("digest")]),
        within("caches", "caches[0]", [id("task_cache_id"), id("artifact_id"), digests("digest")]),
        negative("started_at"),
        vec![
            time("started_at", i64::MAX, 0, refused("started_at")),
            time("started_at", 253_402_300_800, 0, refused("started_at")),
        ],
        negative("usage.queued"),
        negative("usage.preparing"),
        negative("usage.running"),
        negative("usage.cpu_time"),
    ]);
    Call::new("Workloads.FinishAttempt", [finish], bad)
}
