//! Tests of the services over gRPC.

use rpc::pb::runtime::containers_client::ContainersClient;

use std::time::Duration;

use futures::StreamExt;
use rpc::Refusal;
use rpc::pb::runtime::attach_request::Message as AttachMessage;
use rpc::pb::runtime::attach_response::Message as AttachAnswer;
use rpc::pb::runtime::write_request::Message as WriteMessage;
use rpc::pb::scheduler as scheduler_pb;
use transfer::{Limits, Manifest};

use super::attach::{STDIN_MESSAGE_BYTES, touch};
use super::volumes::{DOWNLOAD_PAUSE, UPLOAD_PAUSE, receive_manifest, send};
use super::*;
use crate::test_support::served::TestServer;
use crate::test_support::store::{Store, StoreCall, session};
use crate::test_support::{FakeGateways, UNREACHABLE, gateway_of, within};
use testing::conformance::{self, RuntimeExt, container, programs};
use testing::fake::FakeWorker;

/// Returns the first answer to a `resume` message.
async fn attached(
    containers: &ContainersClient<rpc::Peer>,
    team: &str,
    process: ProcessId,
) -> Result<Option<AttachAnswer>, Status> {
    let resume =
        pb::Resume { team: team.to_owned(), process_id: process.to_string(), ..pb::Resume::default() };
    first_answer(containers, AttachMessage::Resume(resume)).await
}

/// Returns the first answer to a first message.
async fn first_answer(
    containers: &ContainersClient<rpc::Peer>,
    message: AttachMessage,
) -> Result<Option<AttachAnswer>, Status> {
    let requests = tokio_stream::iter([pb::AttachRequest { message: Some(message) }]);
    let mut containers = containers.clone();
    let answer = async {
        let mut answers = containers.attach(requests).await?.into_inner();
        Ok(answers.message().await?.and_then(|response| response.message))
    };
    within("an answer", answer).await
}

/// A valid request to start a process, and requests that differ from it in one field.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_start_is_rejected_with_its_field() {
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    let runtime = machine.runtime();
    let container = runtime.made(container()).await;
    let main = runtime.started(container, conformance::process(&programs::sleep())).await;
    let gateway =
        TestServer::start(|host| host.add_service(containers(gateway_of(&[worker], UNREACHABLE)))).await;
    let peer = rpc::client::peer(&gateway.endpoint, rpc::client::Outgoing::internal()).expect("an address");
    let client = ContainersClient::new(peer);
    let valid = pb::StartProcess {
        team: "main".to_owned(),
        process_id: ProcessId::new().to_string(),
        container_id: main.to_string(),
        spec: Some(pb::ProcessSpec { command: vec!["true".into()], ..pb::ProcessSpec::default() }),
        ..pb::StartProcess::default()
    };
    let refuse = async |change: &dyn Fn(&mut pb::StartProcess)| {
        let mut start = valid.clone();
        change(&mut start);
        Refusal::from(first_answer(&client, AttachMessage::Start(start)).await.expect_err("rejected"))
    };
    // The fake worker runs one process in a container.
    let refused = refuse(&|_| {}).await;
    assert!(refused.is(Reason::Unsupported) && refused.to_string().contains("`exec`"), "{refused}");
    let refused = refuse(&|start| start.team = "other".to_owned()).await;
    assert!(refused.is(Reason::ProcessNotFound), "{refused}");

    type Change = fn(&mut pb::StartProcess);
    fn spec(start: &mut pb::StartProcess) -> &mut pb::ProcessSpec {
        start.spec.as_mut().expect("a spec")
    }
    let variable =
        |name: &str| scheduler_pb::EnvironmentVariable { name: name.to_owned().into(), value: "x".into() };
    let cases: &[(&str, Change)] = &[
        ("start.team", |start| start.team.clear()),
        ("start.process_id", |start| start.process_id = "x".to_owned()),
        ("start.container_id", |start| start.container_id.clear()),
        ("start.spec", |start| start.spec = None),
        ("start.spec.command", |start| spec(start).command.clear()),
        ("start.spec.command", |start| spec(start).command = vec!["x".into(); 4097]),
        ("start.spec.command", |start| spec(start).command = vec!["x".repeat((1 << 20) + 1).into()]),
        ("start.spec.command[1]", |start| spec(start).command.push("a\0b".into())),
        ("start.spec.directory", |start| spec(start).directory = "relative".into()),
        ("start.spec.user", |start| spec(start).user = "a\0b".to_owned()),
        ("start.spec.terminal.rows", |start| {
            spec(start).terminal = Some(scheduler_pb::Terminal { rows: 0, columns: 80 });
        }),
        ("start.spec.terminal.columns", |start| {
            spec(start).terminal = Some(scheduler_pb::Terminal { rows: 24, columns: 65536 });
        }),
        ("start.idle_timeout", |start| start.idle_timeout = Some(rpc::duration(Duration::ZERO))),
    ];
    for (field, change) in cases {
        let refused = refuse(change).await;
        assert!(
            refused.is(Reason::InvalidField) && refused.to_string().contains(field),
            "{field}: {refused}"
        );
    }
    let refused = refuse(&|start| spec(start).environment = vec![variable("A"), variable("A")]).await;
    assert!(refused.to_string().contains("start.spec.environment[1].name"), "{refused}");
    let attempt = valid.process_id.clone();
    let refused = refuse(&|start| {
        start.container_id = attempt.clone();
    })
    .await;
    assert!(refused.to_string().contains("start.lease_token"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_usage_request_is_rejected_with_its_field() {
    let worker = FakeWorker::near().gateway(UNREACHABLE, UNREACHABLE);
    let gateway =
        TestServer::start(|host| host.add_service(containers(gateway_of(&[worker], UNREACHABLE)))).await;
    let peer = rpc::client::peer(&gateway.endpoint, rpc::client::Outgoing::internal()).expect("an address");
    let client = ContainersClient::new(peer);
    let ask = async |team: &str, worker_id: &str| {
        let request = pb::GetUsageRequest { team: team.to_owned(), worker_id: worker_id.to_owned() };
        client.clone().get_usage(request).await.map(Response::into_inner)
    };
    let usage = ask("main", "").await.expect("the only worker");
    assert!(usage.containers.is_empty() && usage.measured_at.is_some(), "{usage:?}");
    for (team, worker_id, field) in [("", "", "team"), ("A B", "", "team"), ("main", "x", "worker_id")] {
        let refused = Refusal::from(ask(team, worker_id).await.expect_err("rejected"));
        assert!(
            refused.is(Reason::InvalidField) && refused.to_string().contains(field),
            "{field}: {refused}"
        );
    }
    let elsewhere = domain::WorkerId::new().to_string();
    let refused = Refusal::from(ask("main", &elsewhere).await.expect_err("not attended"));
    assert!(refused.is(Reason::NotAttended), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn process_of_another_team_looks_nonexistent() {
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    let runtime = machine.runtime();
    let container = runtime.made(container()).await;
    let process = runtime.started(container, conformance::process(&programs::sleep())).await;
    let gateway =
        TestServer::start(|host| host.add_service(containers(gateway_of(&[worker], UNREACHABLE)))).await;
    let peer = rpc::client::peer(&gateway.endpoint, rpc::client::Outgoing::internal()).expect("an address");
    let client = ContainersClient::new(peer);

    let own = attached(&client, "main", process).await;
    assert!(matches!(own, Ok(Some(AttachAnswer::Started(_)))), "{own:?}");
    let refusal = async |team: &str, process| {
        let refused = Refusal::from(attached(&client, team, process).await.expect_err("it is refused"));
        assert!(refused.is(Reason::ProcessNotFound), "{refused}");
        refused.to_string().replace(&process.to_string(), "…")
    };
    let other = refusal("other", process).await;
    assert_eq!(other, refusal("other", ProcessId::new()).await, "the errors do not differ");

    drop(client);
    gateway.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn process_is_abandoned_after_term_of_caller() {
    const TERM: Duration = Duration::from_millis(100);
    let machine = FakeWorker::near();
    let worker = machine.with_caller_term(TERM);
    let runtime = machine.runtime();
    let container = runtime.made(container()).await;
    let spec = runtime::ProcessSpec {
        stdin: domain::workload::Stdin::Attached,
        ..conformance::process(&programs::cat())
    };
    let (stdin, output) = (spec.stdin.clone(), spec.output);
    let process = runtime.started(container, spec).await;
    let attended = worker.clone();
    let gateway =
        TestServer::start(|host| host.add_service(containers(gateway_of(&[attended], UNREACHABLE)))).await;
    let peer = rpc::client::peer(&gateway.endpoint, rpc::client::Outgoing::internal()).expect("an address");
    let client = ContainersClient::new(peer);
    let attach = async |observes, more: Option<AttachMessage>| {
        let resume = pb::Resume {
            team: "main".to_owned(),
            process_id: process.to_string(),
            observer: observes,
            ..pb::Resume::default()
        };
        let messages = [AttachMessage::Resume(resume)].into_iter().chain(more);
        let requests =
            tokio_stream::iter(messages.map(|message| pb::AttachRequest { message: Some(message) }));
        let mut answers = client.clone().attach(requests).await.expect("attached").into_inner();
        assert!(matches!(answers.message().await, Ok(Some(_))));
        answers
    };
    // After a restart of the gateway, callers attach before attempts are resumed.
    let (caller, observer) = (attach(false, None).await, attach(true, None).await);
    let attended = async {
        let attendance = async || {
            let request = pb::GetAttendanceRequest {
                team: "main".to_owned(),
                process_id: process.to_string(),
                ..pb::GetAttendanceRequest::default()
            };
            client.clone().get_attendance(request).await.expect("answered").into_inner()
        };
        tokio::time::sleep(TERM * 3).await;
        let before = attendance().await;
        assert!(
            (before.attached, before.is_abandoned) == (1, false) && before.abandoned_at.is_none(),
            "{before:?}"
        );
        drop(caller);
        // A person who leaves on purpose has an hour to return.
        let hour = loop {
            let detach = AttachMessage::Detach(pb::Detach { keep_input: true });
            drop(attach(false, Some(detach)).await);
            let unattended = async {
                loop {
                    let state = attendance().await;
                    if let (0, Some(since), Some(until)) =
                        (state.attached, state.unattended_since, state.abandoned_at)
                    {
                        return until.seconds - since.seconds;
                    }
                }
            };
            // The call may have ended before its last message was read.
            match within("the end of the call", unattended).await {
                0 | 1 => {}
                term => break term,
            }
        };
        assert!((3599..=3601).contains(&hour), "{hour} s");
        drop(attach(false, None).await);
        // The process exits when its input ends.
        runtime.ended(process).await;
        let after = attendance().await;
        assert!(
            (after.attached, after.is_abandoned) == (0, true) && after.unattended_since.is_some(),
            "{after:?}"
        );
        drop(observer);
    };
    tokio::select! {
        never = crate::worker::attached_callers::enforce_term(&worker.attendance, worker.runtime.as_ref(), process, (&stdin, output)) => match never {},
        () = attended => {}
    }
    drop(client);
    gateway.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_input_is_bounded_in_bytes() {
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, UNREACHABLE);
    let runtime = machine.runtime();
    let gateway =
        TestServer::start(|host| host.add_service(containers(gateway_of(&[worker], UNREACHABLE)))).await;
    let peer = rpc::client::peer(&gateway.endpoint, rpc::client::Outgoing::internal()).expect("an address");
    let client = ContainersClient::new(peer);
    for (messages, bytes, why) in
        [(1, STDIN_MESSAGE_BYTES + 1, "at most 1 MiB"), (100, STDIN_MESSAGE_BYTES, "too far ahead")]
    {
        let container = runtime.made(container()).await;
        let spec = runtime::ProcessSpec {
            stdin: domain::workload::Stdin::Attached,
            ..conformance::process(&programs::sleep())
        };
        let process = runtime.started(container, spec).await;
        let resume =
            pb::Resume { team: "main".to_owned(), process_id: process.to_string(), ..pb::Resume::default() };
        let input = (0..messages).map(move |n| {
            let (offset, data) = (n * bytes as u64, vec![0; bytes].into());
            AttachMessage::Stdin(pb::StdinData { offset, data })
        });
        let requests = std::iter::once(AttachMessage::Resume(resume)).chain(input);
        let requests =
            tokio_stream::iter(requests.map(|message| pb::AttachRequest { message: Some(message) }));
        let mut answers = client.clone().attach(requests).await.expect("attached").into_inner();
        let refused = async {
            loop {
                if let Err(status) = answers.message().await {
                    return Refusal::from(status);
                }
            }
        };
        let refused = within("a refusal", refused).await;
        assert!(refused.is(Reason::InvalidField) && refused.message.contains(why), "{refused}");
    }
    drop(client);
    gateway.end().await;
}

/// Returns the process of the next touch, which the store rejects.
async fn touched(store: &mut Store) -> String {
    let StoreCall::Touch(touched, answer) = store.next_call().await else { panic!("an unexpected call") };
    assert_eq!(touched.session_credential, "credential");
    answer.send(Err(Reason::ContainerNotFound.status("gantry.test", "no"))).expect("the gateway waits");
    touched.attempt_id
}

#[tokio::test(flavor = "multi_thread")]
async fn attached_caller_is_reported_at_intervals() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, &store.endpoint);
    worker.session.set(Some(session("credential")));
    let runtime = machine.runtime();
    let container = runtime.made(container()).await;
    let process = runtime.started(container, conformance::process(&programs::sleep())).await;
    let gateway = TestServer::start(|host| {
        host.add_service(containers(gateway_of(std::slice::from_ref(&worker), UNREACHABLE)))
    })
    .await;
    let peer = rpc::client::peer(&gateway.endpoint, rpc::client::Outgoing::internal()).expect("an address");
    let resume =
        pb::Resume { team: "main".to_owned(), process_id: process.to_string(), ..pb::Resume::default() };
    let requests = tokio_stream::iter([pb::AttachRequest { message: Some(AttachMessage::Resume(resume)) }]);
    let answers = ContainersClient::new(peer).attach(requests).await.expect("attached").into_inner();
    assert_eq!(touched(&mut store).await, process.to_string());
    drop(answers);

    let again = async {
        for _ in 0..3 {
            assert_eq!(touched(&mut store).await, process.to_string());
        }
    };
    tokio::select! {
        never = touch(&worker, process, Duration::from_millis(1)) => match never {},
        () = again => {}
    }
    gateway.end().await;
    store.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_process_is_not_reported_at_once() {
    let mut store = Store::start().await;
    let machine = FakeWorker::near();
    let worker = machine.gateway(UNREACHABLE, &store.endpoint);
    worker.session.set(Some(session("credential")));
    let runtime = machine.runtime();
    let running = runtime.made(container()).await;
    let running = runtime.started(running, conformance::process(&programs::sleep())).await;
    let exited = runtime.made(container()).await;
    let exited = runtime.started(exited, conformance::process(&programs::exit(0))).await;
    runtime.ended(exited).await;

    tokio::select! {
        biased;
        never = touch(&worker, running, Duration::from_hours(1)) => match never {},
        never = touch(&worker, exited, Duration::from_millis(1)) => match never {},
        () = async {
            for _ in 0..3 {
                assert_eq!(touched(&mut store).await, exited.to_string(), "the running process is not reported");
            }
        } => {}
    }
    tokio::select! {
        never = touch(&worker, running, Duration::from_millis(1)) => match never {},
        touched_process = touched(&mut store) => assert_eq!(touched_process, running.to_string(), "the running process is reported later"),
    }
    store.end().await;
}

// The paused clock advances when all tasks wait for it.
#[tokio::test(start_paused = true)]
async fn upload_ends_when_its_caller_pauses() {
    let root = transfer::Entry {
        path: Vec::new(),
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime_seconds: 0,
        mtime_nanos: 0,
        xattrs: Vec::new(),
        kind: transfer::EntryKind::Directory,
    };
    let manifest = Manifest::new(vec![root], Limits::default()).expect("it is valid");
    let manifest_part = |part| pb::WriteRequest { message: Some(WriteMessage::Manifest(part)) };
    let parts: Vec<_> = rpc::tree::manifest_parts(&manifest).map(manifest_part).collect();
    let silence = futures::stream::pending::<Result<pb::WriteRequest, Status>>();
    let mut requests = futures::stream::iter(parts.into_iter().map(Ok)).chain(silence);
    let began = tokio::time::Instant::now();
    let ended = Refusal::from(receive_manifest(&mut requests).await.expect_err("it ends"));
    assert!(ended.is(Reason::TransferTruncated) && ended.message.contains("15 minutes"), "{ended}");
    assert!(began.elapsed() >= UPLOAD_PAUSE);
}

#[tokio::test(start_paused = true)]
async fn download_ends_when_its_caller_pauses() {
    let (answers, _receiver) = mpsc::channel(1);
    let began = tokio::time::Instant::now();
    send(&answers, ()).await.expect("the channel has room");
    let ended = Refusal::from(send(&answers, ()).await.expect_err("the first message is not read"));
    assert!(ended.is(Reason::TransferTruncated) && ended.message.contains("took nothing"), "{ended}");
    assert!(began.elapsed() >= DOWNLOAD_PAUSE);
}

#[tokio::test(start_paused = true)]
async fn transfers_beyond_the_limit_are_refused() {
    let gateway = gateway_of(&[], UNREACHABLE);
    let mut permits = Vec::new();
    while let Ok(permit) = gateway.acquire_transfer(TicketOperation::Read).await {
        permits.push(permit);
    }
    assert!(permits.len() >= 100, "{}", permits.len());
    let refused = gateway.acquire_transfer(TicketOperation::Read).await.expect_err("all permits are taken");
    assert!(Refusal::from(Status::from(refused)).is(Reason::Unavailable));
    drop(
        gateway
            .acquire_transfer(TicketOperation::Write)
            .await
            .expect("the other direction has its own permits"),
    );
    permits.pop();
    drop(gateway.acquire_transfer(TicketOperation::Read).await.expect("a permit was returned"));
}
