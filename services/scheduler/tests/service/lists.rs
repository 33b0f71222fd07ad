//! Tests of the lists of workers, workloads and leases.

use std::collections::BTreeSet;
use std::time::Duration;

use domain::WorkloadId;
use rpc::pb::scheduler as pb;
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use crate::leases::{of_kind, with_slots};
use crate::support::{Gateway, Running, config, finish, registration, spec, start};

pub(crate) async fn lists_are_paginated(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateways = Vec::new();
    for name in ["c", "a", "b"] {
        let tagged =
            pb::WorkerLabels { tags: vec!["x".to_owned()], ..registration(name).labels.expect("labels") };
        let registration = pb::Registration { labels: Some(tagged), ..registration(name) };
        gateways.push(Gateway::connect(&scheduler, registration).await.expect("welcome"));
    }
    let mut listed = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = pb::ListWorkersRequest { page_size: 2, page_token };
        let page = scheduler.workers().list_workers(request).await.expect("a page").into_inner();
        listed.extend(page.workers.into_iter().map(|worker| worker.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(listed, ["a", "b", "c"]);
    let by_id = scheduler.worker(&gateways[0].welcome.worker_id).await;
    assert_eq!(by_id.name, "c");

    let mut submitted = Vec::new();
    for _ in 0..5 {
        let spec = pb::WorkloadSpec { tags: vec!["x".to_owned()], ..spec() };
        // Ids that callers choose have no order.
        let id = WorkloadId::from_uuid(uuid::Uuid::new_v4());
        scheduler.submit_as(id, spec).await.expect("accepted");
        submitted.push(id.to_string());
    }
    let mut listed = Vec::new();
    let mut page_token = String::new();
    loop {
        let team = "main".to_owned();
        let request = pb::ListRequest { team, page_size: 2, page_token, ..pb::ListRequest::default() };
        let page = scheduler.workloads().list(request).await.expect("a page").into_inner();
        listed.extend(page.workloads.into_iter().map(|workload| workload.workload_id));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    submitted.reverse();
    assert_eq!(listed, submitted, "newest first");

    let of_another = scheduler
        .submit(pb::WorkloadSpec { team: "other".to_owned(), tags: vec!["x".to_owned()], ..spec() })
        .await;
    let of_another = of_another.expect("accepted").to_string();
    let list = async |team: &str| {
        let request = pb::ListRequest { team: team.to_owned(), ..pb::ListRequest::default() };
        let page = scheduler.workloads().list(request).await.expect("a page").into_inner();
        page.workloads.into_iter().map(|workload| workload.workload_id).collect::<Vec<_>>()
    };
    assert_eq!(list("main").await, submitted, "of one team");
    submitted.insert(0, of_another);
    assert_eq!(list("").await, submitted, "of all teams");

    // A page token is valid only for its own list.
    let request = pb::ListRequest { team: "main".to_owned(), page_size: 1, ..pb::ListRequest::default() };
    let page_token =
        scheduler.workloads().list(request.clone()).await.expect("a page").into_inner().next_page_token;
    let own = pb::ListRequest { page_token, ..request };
    scheduler.workloads().list(own.clone()).await.expect("the next page");
    let of_all = pb::ListRequest { team: String::new(), ..own.clone() };
    let finished = pb::ListRequest { state: pb::WorkloadState::Finished.into(), ..own.clone() };
    let aborted = pb::ListRequest { outcome: pb::Outcome::Aborted.into(), ..own.clone() };
    for foreign in [of_all, finished, aborted] {
        let refused = scheduler.workloads().list(foreign).await.map_err(Refusal::from).expect_err("foreign");
        assert!(refused.is(Reason::InvalidPageToken), "{refused:?}");
    }
    let workers = pb::ListWorkersRequest { page_size: 1, page_token: own.page_token };
    let refused =
        scheduler.workers().list_workers(workers).await.map_err(Refusal::from).expect_err("foreign");
    assert!(refused.is(Reason::InvalidPageToken), "{refused:?}");
    scheduler.stop().await;
}

pub(crate) async fn workloads_are_listed_by_outcome(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let queue_timeout = Some(rpc::duration(Duration::from_millis(20)));
    let errored = scheduler.submit(pb::WorkloadSpec { queue_timeout, ..spec() }).await.expect("queued");
    scheduler.finished(errored).await;
    let mut ended = vec![errored];
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    for code in [0, 3] {
        let id = scheduler.submit(spec()).await.expect("accepted");
        let (_, run) = gateway.run(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        finish(&scheduler, &run.lease_token, code).await.expect("finished");
        scheduler.finished(id).await;
        ended.push(id);
    }

    let running = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(running).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let check_stopping = async |expected: pb::StopReason| {
        assert_eq!(scheduler.get(running).await.stopping(), expected);
        let all = pb::ListRequest { team: "main".to_owned(), ..pb::ListRequest::default() };
        let all = scheduler.workloads().list(all).await.expect("a page").into_inner().workloads;
        for workload in all {
            let is_running = workload.workload_id == running.to_string();
            assert_eq!(workload.stopping(), if is_running { expected } else { pb::StopReason::Unspecified });
        }
    };
    check_stopping(pb::StopReason::Unspecified).await;
    scheduler.cancel(running, Duration::from_secs(60)).await;
    check_stopping(pb::StopReason::Cancelled).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    check_stopping(pb::StopReason::Unspecified).await;
    ended.push(running);

    let outcomes = [pb::Outcome::Errored, pb::Outcome::Succeeded, pb::Outcome::Failed, pb::Outcome::Aborted];
    for (outcome, id) in outcomes.into_iter().zip(&ended) {
        let request = pb::ListRequest { outcome: outcome.into(), ..pb::ListRequest::default() };
        let page = scheduler.workloads().list(request).await.expect("a page").into_inner();
        let listed: Vec<_> = page.workloads.into_iter().map(|workload| workload.workload_id).collect();
        assert_eq!(listed, [id.to_string()], "{outcome:?}");
    }
    scheduler.stop().await;
}

pub(crate) async fn workloads_are_found_by_name_and_id(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let find = async |team: &str, reference: &str| {
        let request = pb::FindRequest { team: team.to_owned(), reference: reference.to_owned() };
        let found = scheduler.workloads().find(request).await.map_err(Refusal::from)?.into_inner();
        let ids = found.workloads.into_iter().map(|workload| workload.workload_id);
        Ok::<_, Refusal>((ids.collect::<Vec<_>>(), found.more))
    };
    let queued = async |id: &str, name: &str| {
        let id: WorkloadId = id.parse().expect("an id");
        scheduler.submit_as(id, pb::WorkloadSpec { name: name.to_owned(), ..spec() }).await.expect(name);
        id
    };
    let refused = find("main", "last").await.expect_err("no workload yet");
    assert!(refused.is(Reason::WorkloadNotFound), "{refused:?}");
    let first = queued("abcd0000-0000-4000-8000-000000000001", "build").await;
    let second = queued("abcd0000-0000-4000-8000-000000000002", "build").await;
    let third = queued("abce0000-0000-4000-8000-000000000003", "abcd").await;
    let answer = |ids: &[WorkloadId]| Some((ids.iter().map(ToString::to_string).collect::<Vec<_>>(), false));
    assert_eq!(find("main", "last").await.ok(), answer(&[third]), "the newest");
    assert_eq!(find("main", "build").await.ok(), answer(&[second, first]), "both have not ended");
    assert_eq!(find("main", &first.to_string()).await.ok(), answer(&[first]));
    assert_eq!(find("main", "abcd0000000040008000000000000001").await.ok(), answer(&[first]));
    assert_eq!(find("main", "abcd").await.ok(), answer(&[third]), "a name comes before an id");
    assert_eq!(find("main", "ABCD0").await.ok(), answer(&[second, first]), "two ids begin with it");
    assert_eq!(find("main", "abcd0000-0000-4000-8000-000000000002").await.ok(), answer(&[second]));
    assert_eq!(find("main", "abce0000-00").await.ok(), answer(&[third]));
    for (team, reference) in [("main", "abcf"), ("main", "buil"), ("other", "build"), ("other", "abcd0")] {
        let refused = find(team, reference).await.expect_err(reference);
        assert!(refused.is(Reason::WorkloadNotFound), "{refused:?}");
    }

    let unfinished = async || {
        let request =
            pb::ListRequest { team: "main".to_owned(), unfinished: true, ..pb::ListRequest::default() };
        let page = scheduler.workloads().list(request).await.expect("a page").into_inner();
        page.workloads.into_iter().map(|workload| workload.workload_id).collect::<Vec<_>>()
    };
    assert_eq!(unfinished().await, [third, second, first].map(|id| id.to_string()));
    scheduler.cancel(second, Duration::ZERO).await;
    scheduler.finished(second).await;
    assert_eq!(unfinished().await, [third, first].map(|id| id.to_string()));
    assert_eq!(find("main", "build").await.ok(), answer(&[first]), "the one that has not ended");
    scheduler.cancel(first, Duration::ZERO).await;
    scheduler.finished(first).await;
    assert_eq!(find("main", "build").await.ok(), answer(&[second]), "the newest, although it ended first");

    for number in 0..21 {
        queued(&format!("dddd0000-0000-4000-8000-{number:012}"), "many").await;
    }
    for reference in ["many", "dddd"] {
        let (found, more) = find("main", reference).await.expect("found");
        assert_eq!((found.len(), more), (20, true), "{reference}");
    }
    scheduler.stop().await;
}

pub(crate) async fn leases_are_listed_until_they_end(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let (_one, _two) = (with_slots(&scheduler, "one", 9).await, with_slots(&scheduler, "two", 9).await);
    let on = async |worker: &str, team: &str, kind: pb::PlacementKind| {
        let memory_bytes = 1 << 20;
        let requests = Some(pb::ResourceRequests { memory_bytes, ..Default::default() });
        let avoid_workers = match worker {
            "one" => vec![scheduler.worker("two").await.worker_id],
            _ => vec![scheduler.worker("one").await.worker_id],
        };
        let (team, owner) = (team.to_owned(), format!("{team} on {worker}"));
        let request = pb::PlaceRequest { team, owner, requests, avoid_workers, ..of_kind(kind) };
        let placed = scheduler.placements().place(request.clone()).await.expect("granted").into_inner();
        (request.lease_id, placed)
    };
    let task = on("one", "main", pb::PlacementKind::Task).await;
    let check = on("one", "other", pb::PlacementKind::Check).await;
    let elsewhere = on("two", "main", pb::PlacementKind::Task).await;
    let list = async |team: &str, worker: &str| {
        let (mut listed, mut page_token) = (Vec::new(), String::new());
        loop {
            let (team, worker) = (team.to_owned(), worker.to_owned());
            let request = pb::ListLeasesRequest { team, worker, page_size: 1, page_token };
            let page = scheduler.placements().list_leases(request).await.expect("a page").into_inner();
            assert!(page.leases.len() <= 1);
            listed.extend(page.leases);
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return listed;
            }
        }
    };
    let ids = async |team: &str, worker: &str| {
        list(team, worker).await.into_iter().map(|lease| lease.lease_id).collect::<BTreeSet<_>>()
    };
    let of = |leases: &[&(String, pb::PlaceResponse)]| leases.iter().map(|(id, _)| id.clone()).collect();
    assert_eq!(ids("", "").await, of(&[&task, &check, &elsewhere]));
    assert_eq!(ids("main", "").await, of(&[&task, &elsewhere]));
    assert_eq!(ids("", "one").await, of(&[&task, &check]));
    assert_eq!(ids("", &elsewhere.1.worker_id).await, of(&[&elsewhere]));
    assert_eq!(ids("other", "two").await, of(&[]));
    let shown = list("other", "").await.pop().expect("a lease");
    assert_eq!(
        (shown.kind(), &*shown.worker_name, &*shown.owner),
        (pb::PlacementKind::Check, "one", "other on one")
    );
    let reserved = async || scheduler.worker("one").await.reserved.unwrap_or_default().memory_bytes;
    assert_eq!(reserved().await, 2 << 20);

    let release = pb::ReleaseRequest { lease_token: task.1.lease_token.clone(), settlement: None };
    scheduler.placements().release(release).await.expect("released");
    assert_eq!(ids("", "one").await, of(&[&check]));
    assert_eq!(reserved().await, 1 << 20);
    scheduler.stop().await;
}

pub(crate) async fn pages_of_large_workloads_are_short(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut submitted = Vec::new();
    for bytes in [1, 900_000, 900_000, 900_000, 1, 900_000] {
        let command = vec![b"true".as_slice().into(), vec![b'x'; bytes].into()];
        let id = scheduler.submit(pb::WorkloadSpec { command, ..spec() }).await.expect("accepted");
        submitted.insert(0, id.to_string());
    }
    let (mut pages, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = pb::ListRequest { page_token, ..pb::ListRequest::default() };
        let page = scheduler.workloads().list(request).await.expect("a page").into_inner();
        pages.push(page.workloads.into_iter().map(|workload| workload.workload_id).collect::<Vec<_>>());
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(pages.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(pages.concat(), submitted);
    scheduler.stop().await;
}

pub(crate) async fn large_spec_is_abridged_once_its_workload_has_finished(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let variable =
        pb::EnvironmentVariable { name: b"NAME".as_slice().into(), value: b"value".as_slice().into() };
    for (bytes, kept) in [(7000, 7000), (9000, 0)] {
        let command = vec![b"true".as_slice().into(), vec![b'x'; bytes].into()];
        let large = pb::WorkloadSpec { command, environment: vec![variable.clone()], ..spec() };
        let id = scheduler.submit(large.clone()).await.expect("accepted");
        let (_, run) = gateway.run(id).await;
        let shown = |workload: &pb::Workload| {
            let spec = workload.spec.clone().expect("a spec");
            (spec.command[0].clone(), spec.command.get(1).map_or(0, |argument| argument.len()))
        };
        let live = scheduler.get(id).await;
        assert!(shown(&live) == (b"true".as_slice().into(), bytes) && !live.abridged, "{live:?}");
        start(&scheduler, &run.lease_token).await.expect("started");
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        scheduler.finished(id).await;
        let finished = scheduler.get(id).await;
        assert_eq!(shown(&finished), (b"true".as_slice().into(), kept));
        assert_eq!(finished.abridged, kept == 0);
        scheduler.submit_as(id, large).await.expect("a repeat is the same workload");
    }
    scheduler.stop().await;
}
