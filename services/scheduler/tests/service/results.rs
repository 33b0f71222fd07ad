//! Results that gateways report and the scheduler keeps.

use bytes::Bytes;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::exit::Status;
use testing::databases::TestDatabase;

use crate::support::{Gateway, Running, config, registration, spec};

pub(crate) async fn kept_result_is_returned_with_outcome(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let largest = Bytes::from(vec![0xff; 1 << 20]);
    let cases = [
        (true, Status::Code(0), Some(largest.clone()), Some(largest)),
        (true, Status::Code(3), Some(Bytes::new()), Some(Bytes::new())),
        (true, Status::Code(0), None, None),
        (true, Status::Signal(9), Some("{}".into()), None),
        (false, Status::Code(0), Some("{}".into()), None),
    ];
    for (keep_result, status, result, expected) in cases {
        let spec = pb::WorkloadSpec { keep_result, ..spec() };
        let id = scheduler.submit(spec).await.expect("accepted");
        let (_, run) = gateway.run(id).await;
        let finish = pb::FinishAttemptRequest {
            lease_token: run.lease_token,
            exit: Some(pb::Exit { status: Some(status) }),
            result,
            ..pb::FinishAttemptRequest::default()
        };
        for _ in 0..2 {
            scheduler.workloads().finish_attempt(finish.clone()).await.expect("finished");
        }
        assert_eq!(scheduler.finished(id).await.result, expected, "{status:?}");
        assert_eq!(scheduler.get(id).await.result, expected, "{status:?}");
    }
    let request = pb::ListRequest { team: "main".to_owned(), ..pb::ListRequest::default() };
    let listed = scheduler.workloads().list(request).await.expect("listed").into_inner().workloads;
    assert_eq!(listed.len(), 5);
    assert!(listed.iter().all(|workload| workload.result.is_none()), "the list has no results");
    scheduler.stop().await;
}
