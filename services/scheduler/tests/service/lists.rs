//! Lists of workers and workloads.

use domain::WorkloadId;
use rpc::pb::scheduler as pb;
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use crate::support::{Gateway, Running, config, hello, spec};

pub(crate) async fn lists_come_in_pages(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateways = Vec::new();
    for name in ["c", "a", "b"] {
        let tagged = pb::WorkerLabels { tags: vec!["x".to_owned()], ..hello(name).labels.expect("labels") };
        let hello = pb::Hello { labels: Some(tagged), ..hello(name) };
        gateways.push(Gateway::connect(&scheduler, hello).await.expect("welcome"));
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
        // Ids of callers are in no order.
        let id = WorkloadId::from_uuid(uuid::Uuid::new_v4());
        scheduler.submit_as(id, spec).await.expect("accepted");
        submitted.push(id.to_string());
    }
    let mut listed = Vec::new();
    let mut page_token = String::new();
    loop {
        let team = "main".to_owned();
        let request = pb::ListRequest { team, page_size: 2, page_token, state: 0 };
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

    // A token goes on with its own list, and with no other.
    let request = pb::ListRequest { team: "main".to_owned(), page_size: 1, ..pb::ListRequest::default() };
    let page_token =
        scheduler.workloads().list(request.clone()).await.expect("a page").into_inner().next_page_token;
    let own = pb::ListRequest { page_token, ..request };
    scheduler.workloads().list(own.clone()).await.expect("the next page");
    let of_all = pb::ListRequest { team: String::new(), ..own.clone() };
    let finished = pb::ListRequest { state: pb::WorkloadState::Finished.into(), ..own.clone() };
    for foreign in [of_all, finished] {
        let refused = scheduler.workloads().list(foreign).await.map_err(Refusal::from).expect_err("foreign");
        assert!(refused.is(Reason::InvalidPageToken), "{refused:?}");
    }
    let workers = pb::ListWorkersRequest { page_size: 1, page_token: own.page_token };
    let refused =
        scheduler.workers().list_workers(workers).await.map_err(Refusal::from).expect_err("foreign");
    assert!(refused.is(Reason::InvalidPageToken), "{refused:?}");
    scheduler.stop().await;
}
