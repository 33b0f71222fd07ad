//! Gateway for several Concourse workers of a file, and another gateway for a worker that flags
//! describe, behind a proxy.

use std::collections::BTreeSet;
use std::fs;

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, may_run_containers, started};
use rpc::client::{Outgoing, peer};
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::{AttachRequest, Resume, Signal};
use rpc::{Reason, Refusal};
use serde_json::Value;
use testing::baggageclaim::Driver;
use testing::garden::Manner;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

fn connect(suite: &Suite, name: &str) -> rpc::Peer {
    peer(suite.address(name), Outgoing::internal().with_token(Some(suite.token()))).expect("an address")
}

/// Attaches to a workload, sends a signal, and returns why the signal was rejected. `None`: the
/// process ended.
async fn refused_signal(suite: &Suite, workload: &Value, number: u32) -> Option<Refusal> {
    let text = |name: &str| workload["location"][name].as_str().expect("a string").to_owned();
    let resume = Resume {
        team: "main".to_owned(),
        process_id: text("attempt_id"),
        worker_id: text("worker_id"),
        ..Resume::default()
    };
    let says = [Say::Resume(resume), Say::Signal(Signal { number })];
    let says = says.map(|message| AttachRequest { message: Some(message) });
    let call = ContainersClient::new(connect(suite, "proxy-0")).attach(tokio_stream::iter(says)).await;
    let mut responses = match call {
        Ok(responses) => responses.into_inner(),
        Err(status) => return Some(status.into()),
    };
    loop {
        match responses.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => return Some(status.into()),
        }
    }
}

/// Lists the services that reflection names.
async fn reflected(suite: &Suite, name: &str) -> BTreeSet<String> {
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(connect(suite, name));
    let call = client.server_reflection_info(tokio_stream::iter([ask])).await;
    let mut answers = call.expect("it answers").into_inner();
    let answer = answers.message().await.expect("an answer").expect("one");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{name}: {answer:?}")
    };
    list.service.into_iter().map(|service| service.name).collect()
}

#[test]
fn gateways_attend_workers_of_file_and_flags() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape { proxies: 1, ..Shape::NO_WORKER }, SHORT_TERMS);
    let pairs = [Manner::Containerd, Manner::Guardian, Manner::Guardian]
        .map(|manner| ConcourseWorker::start(manner, Driver::Overlay));
    let [first, second, third] = &pairs;
    let entry = |name: &str, pair: &ConcourseWorker| {
        serde_json::json!({
            "name": name, "garden": pair.garden_address(), "baggageclaim": pair.volumes_address(), "tags": [name],
        })
    };
    let file = suite.path("workers.json");
    fs::write(&file, serde_json::json!([entry("first", first), entry("second", second)]).to_string())
        .expect("write");
    suite.attend("both", "both", &[("GANTRY_WORKERS_FILE", &file.display().to_string())]);
    let (garden, volumes) = (third.garden_address(), third.volumes_address());
    let flags = [
        ("GANTRY_GARDEN", garden.as_str()),
        ("GANTRY_BAGGAGECLAIM", &volumes),
        ("GANTRY_WORKER_PLATFORM", "plan9"),
        ("GANTRY_WORKER_TEAM", "main"),
    ];
    suite.attend("third", "third", &flags);
    for worker in ["first", "second"] {
        let shown = suite.attended(worker, "both");
        assert_eq!(
            (&shown["labels"]["platform"], &shown["labels"]["team"]),
            (&"linux".into(), &"".into()),
            "{shown}"
        );
    }
    let shown = suite.attended("third", "third");
    assert_eq!(
        (&shown["labels"]["platform"], &shown["labels"]["team"]),
        (&"plan9".into(), &"main".into()),
        "{shown}"
    );

    make_image(&suite.path("image"));
    let image = format!("artifact:{}", suite.upload(&suite.path("image")));
    for (worker, pair) in [("first", first), ("second", second)] {
        let ran =
            suite.gantry(&["run", "--tag", worker, "--image", &image, "--", "sh", "-c", "exit 7"]).output();
        let ran = ran.expect("gantry runs");
        assert_eq!(ran.status.code(), Some(7), "{worker}: {}", describe(&ran));
        assert_eq!(pair.runs(), 1, "{worker}");
    }

    // A signal that a Garden worker cannot send is rejected with a reason, and the process runs on.
    let run = [
        "run",
        "--no-stdin",
        "--tag",
        "first",
        "--image",
        &image,
        "--",
        "sh",
        "-c",
        "echo ready; exec sleep 1000",
    ];
    let (mut run, _stdout) = started(suite.gantry(&run));
    let listed = suite.succeed(&["list", "workloads", "--json"]);
    let workloads = listed.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let workload = workloads.into_iter().find(|one| one["state"] == "running").expect("it runs");
    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    tokio.block_on(async {
        for number in [2, 1, 10] {
            let refused = refused_signal(&suite, &workload, number).await.expect("refused");
            assert!(refused.is(Reason::Unsupported), "{number}: {refused}");
            assert!(refused.message.contains("TERM and KILL"), "{refused}");
        }
        assert!(refused_signal(&suite, &workload, 15).await.is_none(), "that one ends it");

        for name in suite.names() {
            let services = reflected(&suite, &name).await;
            for service in
                ["gantry.runtime.v1.Containers", "gantry.scheduler.v1.Workloads", "grpc.health.v1.Health"]
            {
                assert!(services.contains(service), "{name}: {service} in {services:?}");
            }
        }
    });
    assert_eq!(run.wait().expect("it ends").code(), Some(128 + 15));
}
