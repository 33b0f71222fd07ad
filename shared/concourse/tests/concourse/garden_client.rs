//! Tests of the Garden client against a simulated server with the behavior of each backend.

use std::collections::BTreeMap;
use std::time::Duration;

use gantry_concourse::garden::{
    Client, ContainerSpec, ControlError, Error, Exit, Process, ProcessSpec, Settings, Signal, Tty, WaitError,
    WindowSize,
};
use testing::garden::{Break, Fault, Manner, Server, Times};
use tokio::io::AsyncReadExt;

const ALL: [Manner; 3] = [Manner::Containerd, Manner::Guardian, Manner::Houdini];

fn client(server: &Server) -> Client {
    let settings = Settings { retry_for: Duration::ZERO, ..Settings::default() };
    Client::new(server.address(), settings)
}

async fn with_container(manner: Manner) -> (Server, Client) {
    let server = Server::start(manner);
    let client = client(&server);
    let spec = ContainerSpec { handle: "c".into(), rootfs: "raw:///nowhere".into(), ..Default::default() };
    assert_eq!(client.create(&spec).await.unwrap(), "c");
    (server, client)
}

fn shell(id: &str, script: &str) -> ProcessSpec {
    ProcessSpec {
        id: id.into(),
        path: "sh".into(),
        args: vec!["-c".into(), script.into()],
        ..Default::default()
    }
}

/// Reads both outputs and waits for the exit.
async fn finish(process: &mut Process) -> (String, String, Exit) {
    let (mut stdout, mut stderr) = (process.stdout.take().unwrap(), process.stderr.take().unwrap());
    let (mut out, mut err) = (String::new(), String::new());
    let (read_out, read_err, exit) =
        tokio::join!(stdout.read_to_string(&mut out), stderr.read_to_string(&mut err), process.wait());
    read_out.unwrap();
    read_err.unwrap();
    (out, err, exit.unwrap())
}

#[tokio::test]
async fn calls_understand_each_backend() {
    for manner in ALL {
        let (server, client) = with_container(manner).await;
        client.ping().await.unwrap();
        assert_eq!(client.list(&BTreeMap::new()).await.unwrap(), ["c"]);
        client.set_property("c", "a/b c", "<1>").await.unwrap();
        client.set_property("c", "empty", "").await.unwrap();
        assert_eq!(client.property("c", "a/b c").await.unwrap().as_deref(), Some("<1>"));
        assert_eq!(client.property("c", "none").await.unwrap(), None);
        let containerd = manner == Manner::Containerd;
        assert_eq!(client.property("c", "empty").await.unwrap().is_none(), containerd);
        assert_eq!(client.properties("c").await.unwrap().contains_key("empty"), !containerd);
        let filter = BTreeMap::from([("a/b c".into(), "<1>".into()), ("none".into(), "x".into())]);
        assert_eq!(client.list(&filter).await.unwrap().len(), usize::from(containerd));
        let removed = client.remove_property("c", "a/b c").await;
        assert_eq!(matches!(removed, Err(Error::NotImplemented)), containerd, "{removed:?}");
        assert_eq!(removed.is_ok(), !containerd);
        assert_eq!(matches!(client.info("c").await, Err(Error::NotImplemented)), containerd);
        assert_eq!(matches!(client.capacity().await, Err(Error::NotImplemented)), containerd);
        assert_eq!(client.cpu_limits("c").await.unwrap(), Default::default());

        if manner != Manner::Guardian {
            let missing = client.run("gone", &shell("p", "true")).await.unwrap_err();
            assert!(matches!(missing, Error::ContainerNotFound(_)), "{missing:?}");
        }
        let missing = client.destroy("gone").await.unwrap_err();
        assert!(matches!(missing, Error::ContainerNotFound(_)), "{missing:?}");
        let missing = client.attach("c", "gone").await.unwrap_err();
        assert!(matches!(missing, Error::ProcessNotFound(_)), "{missing:?}");
        let spec = ProcessSpec { path: "no-such-program".into(), ..Default::default() };
        let missing = client.run("c", &spec).await.unwrap_err();
        assert!(matches!(missing, Error::ExecutableNotFound(_)), "{missing:?}");
        if manner == Manner::Guardian {
            assert!(client.properties("gone").await.unwrap().is_empty());
        }
        client.destroy("c").await.unwrap();
        assert!(server.handles().is_empty());
    }
}

#[tokio::test]
async fn process_input_output_and_exit_work() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let (_server, client) = with_container(manner).await;
        let mut process = client.run("c", &shell("p", "cat; echo err >&2; exit 3")).await.unwrap();
        assert_eq!(process.id, "p");
        let control = process.control();
        // Characters that span the boundaries of messages.
        let text = format!("four{}", "h\u{e9}\0\u{1f600}<&>".repeat(9000));
        let feed = async {
            control.write("").await.unwrap();
            control.write(&text).await.unwrap();
            control.close_stdin().await.unwrap();
            // Any further message would reset the connection and lose the exit.
            assert!(matches!(control.signal(Signal::Kill).await, Err(ControlError::StdinClosed)));
            assert!(matches!(control.write("more").await, Err(ControlError::StdinClosed)));
        };
        let ((), (out, err, exit)) = tokio::join!(feed, finish(&mut process));
        assert!(out == text, "{} bytes of {}", out.len(), text.len());
        assert_eq!((err.as_str(), exit.status), ("err\n", 3));
        drop(process);
        assert!(matches!(control.close_stdin().await, Err(ControlError::Detached)));
    }
}

#[tokio::test]
async fn wait_ends_after_output_with_any_reader() {
    let (_server, client) = with_container(Manner::Containerd).await;
    // More output than socket buffers hold, and no reader.
    let mut untaken = client.run("c", &shell("p1", "head -c 9000000 /dev/zero; exit 4")).await.unwrap();
    assert_eq!(untaken.wait().await.unwrap().status, 4);
    assert_eq!(untaken.wait().await.unwrap().status, 4);

    let mut process = client.run("c", &shell("p2", "echo out")).await.unwrap();
    let mut stdout = process.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 4]).await.unwrap();
    // The exit is known once an attachment receives it.
    while client.attach("c", "p2").await.unwrap().wait().await.unwrap().status != 0 {}
    let mut wait = Box::pin(process.wait());
    let early = tokio::time::timeout(Duration::from_millis(200), &mut wait).await;
    assert!(early.is_err(), "reported with output unread: {early:?}");
    drop(stdout);
    assert_eq!(wait.await.unwrap().status, 0);
}

#[tokio::test]
async fn end_without_exit_detaches_and_allows_attach() {
    let (server, client) = with_container(Manner::Guardian).await;
    let mut process = client.run("c", &shell("p", "read line; echo got $line; exit 5")).await.unwrap();
    server.break_attachments(Break::End);
    assert!(matches!(process.wait().await, Err(WaitError::Detached)));

    let mut again = client.attach("c", "p").await.unwrap();
    assert_ne!(again.stream_id, process.stream_id);
    again.control().write("it\n").await.unwrap();
    let (out, _, exit) = finish(&mut again).await;
    assert_eq!((out.as_str(), exit.status), ("got it\n", 5));
}

#[tokio::test]
async fn shutdown_detaches_and_reset_is_error() {
    let (server, client) = with_container(Manner::Containerd).await;
    let mut process = client.run("c", &shell("p", "sleep 600")).await.unwrap();
    server.break_attachments(Break::Reset);
    let error = process.wait().await.unwrap_err();
    assert!(matches!(error, WaitError::Connection(_)), "{error:?}");

    let mut process = client.attach("c", "p").await.unwrap();
    let (ended, ()) = tokio::join!(process.wait(), async { drop(server) });
    assert!(matches!(ended, Err(WaitError::Detached) | Ok(Exit { status: 137 })), "{ended:?}");
}

#[tokio::test]
async fn containerd_answers_attach_with_last_exit() {
    let (_server, client) = with_container(Manner::Containerd).await;
    client.run("c", &shell("p", "exit 9")).await.unwrap().wait().await.unwrap();
    let mut other = client.attach("c", "never-was").await.unwrap();
    assert_eq!(other.id, "never-was");
    assert_eq!(other.wait().await.unwrap().status, 9);
}

#[tokio::test]
async fn signals_and_their_exits_differ() {
    for (manner, status) in [(Manner::Guardian, 143), (Manner::Houdini, -1)] {
        let (_server, client) = with_container(manner).await;
        let mut process = client.run("c", &shell("p", "exec sleep 600")).await.unwrap();
        process.control().signal(Signal::Terminate).await.unwrap();
        assert_eq!(process.wait().await.unwrap().status, status);
    }
    let (_server, client) = with_container(Manner::Containerd).await;
    let mut process = client.run("c", &shell("p", "read line; exit 6")).await.unwrap();
    process.control().signal(Signal::Kill).await.unwrap();
    process.control().write("\n").await.unwrap();
    assert_eq!(process.wait().await.unwrap().status, 6);
}

#[tokio::test]
async fn stop_ends_processes_but_keeps_container() {
    let (_server, client) = with_container(Manner::Containerd).await;
    let mut gentle = client.run("c", &shell("p1", "exec sleep 600")).await.unwrap();
    client.stop("c", false).await.unwrap();
    assert_eq!(gentle.wait().await.unwrap().status, 143);
    let mut stubborn = client.run("c", &shell("p2", "trap '' TERM; sleep 600")).await.unwrap();
    client.stop("c", true).await.unwrap();
    assert_eq!(stubborn.wait().await.unwrap().status, 137);
    assert_eq!(client.run("c", &shell("p3", "exit 1")).await.unwrap().wait().await.unwrap().status, 1);
}

#[tokio::test]
async fn second_destroy_fails_immediately() {
    let (server, client) = with_container(Manner::Guardian).await;
    let mut process = client.run("c", &shell("p", "trap 'until [ -e go ]; do sleep 0.01; done; exit' TERM; echo on; while :; do sleep 0.01; done")).await.unwrap();
    let mut on = [0; 3];
    process.stdout.as_mut().unwrap().read_exact(&mut on).await.unwrap();
    let destroy = async || {
        let destroyed = client.destroy("c").await;
        if let Err(Error::BeingDestroyed(_)) = destroyed {
            // Lets the other process end.
            client.run("c", &shell("q", "touch go")).await.unwrap();
        }
        destroyed.is_ok()
    };
    let (one, other) = tokio::join!(destroy(), destroy());
    assert!(one != other, "both {one}");
    assert!(server.handles().is_empty());
}

#[tokio::test]
async fn ambiguous_requests_are_not_sent() {
    let (server, client) = with_container(Manner::Guardian).await;
    let before = server.requests().len();
    assert!(client.bulk_info(&[]).await.unwrap().is_empty());
    assert!(client.bulk_metrics(&[]).await.unwrap().is_empty());
    assert!(matches!(client.set_grace_time("c", Duration::ZERO).await, Err(Error::Refused(_))));
    assert!(matches!(client.destroy("").await, Err(Error::Refused(_))));
    assert!(matches!(client.bulk_info(&["a,b"]).await, Err(Error::Refused(_))));
    assert_eq!(server.requests().len(), before);

    let infos = client.bulk_info(&["c", "gone"]).await.unwrap();
    assert_eq!(infos["c"].as_ref().unwrap().state, "active");
    assert!(matches!(infos["gone"], Err(Error::ContainerNotFound(_))));
    assert!(client.bulk_metrics(&["c"]).await.unwrap()["c"].is_ok());
    client.set_grace_time("c", Duration::from_millis(20)).await.unwrap();
    while !server.handles().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn only_idempotent_requests_are_repeated() {
    let (server, _) = with_container(Manner::Guardian).await;
    let client = Client::new(server.address(), Settings::default());
    server.inject("GET /ping", Fault::Drop);
    server.inject("GET /ping", Fault::Reset);
    client.ping().await.unwrap();
    assert_eq!(server.requests().iter().filter(|request| *request == "GET /ping").count(), 3);

    server.inject("DELETE", Fault::LoseAnswer);
    let error = client.destroy("c").await.unwrap_err();
    assert!(matches!(error, Error::Connection { sent: true, .. }) && !error.is_safe_to_repeat(), "{error:?}");
    assert!(server.handles().is_empty());
    assert_eq!(server.requests().iter().filter(|request| request.starts_with("DELETE")).count(), 1);

    let address = server.address();
    drop(server);
    let settings = Settings { retry_for: Duration::ZERO, ..Settings::default() };
    let error = Client::new(address, settings).destroy("c").await.unwrap_err();
    assert!(error.is_safe_to_repeat(), "{error:?}");
}

#[tokio::test]
async fn stalled_server_times_out_and_slow_one_works() {
    let (server, client) = with_container(Manner::Guardian).await;
    let settings = Settings { request_timeout: Duration::from_millis(50), ..Settings::default() };
    server.inject("/ping", Fault::Delay(Duration::from_secs(2)));
    let error = Client::new(server.address(), settings).ping().await.unwrap_err();
    assert!(matches!(error, Error::Connection { sent: true, .. }), "{error:?}");

    for pattern in ["POST", "stdout", "stderr"] {
        server.inject(pattern, Fault::Dribble);
    }
    let mut process = client.run("c", &shell("p", "echo out; exit 2")).await.unwrap();
    let (out, _, exit) = finish(&mut process).await;
    assert_eq!((out.as_str(), exit.status), ("out\n", 2));

    // Longer than the buffer of Go, so the response is really chunked.
    let long = "word ".repeat(1000);
    for pattern in ["POST", "GET /ping"] {
        server.inject(pattern, Fault::Answer(long.clone()));
    }
    for error in [client.run("c", &shell("p", "true")).await.err(), client.ping().await.err()] {
        assert!(
            matches!(&error, Some(Error::Other { status: 500, message }) if *message == long),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn names_must_be_unique() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let (_server, client) = with_container(manner).await;
        let spec =
            ContainerSpec { handle: "c".into(), rootfs: "raw:///nowhere".into(), ..Default::default() };
        assert!(matches!(client.create(&spec).await, Err(Error::Exists(_))));
        let _running = client.run("c", &shell("p", "sleep 600")).await.unwrap();
        let taken = client.run("c", &shell("p", "true")).await.unwrap_err();
        assert!(matches!(taken, Error::Exists(_)), "{taken:?}");
    }
}

#[tokio::test]
async fn terminal_has_size_and_no_stderr() {
    let (_server, client) = with_container(Manner::Containerd).await;
    let spec = ProcessSpec {
        tty: Some(Tty { window_size: Some(WindowSize { columns: 500, rows: 400 }) }),
        ..shell("p", "stty -echo; stty size; read line; stty size; echo err >&2")
    };
    let mut process = client.run("c", &spec).await.unwrap();
    let control = process.control();
    let mut first = [0; 9];
    process.stdout.as_mut().unwrap().read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"400 500\r\n");
    control.resize(WindowSize { columns: 7, rows: 9 }).await.unwrap();
    control.write("\n").await.unwrap();
    let (out, err, exit) = finish(&mut process).await;
    assert_eq!((out.as_str(), err.as_str(), exit.status), ("9 7\r\nerr\r\n", "", 0));
}

#[tokio::test]
async fn newer_attachment_takes_or_shares_output() {
    for manner in [Manner::Containerd, Manner::Houdini] {
        let (_server, client) = with_container(manner).await;
        let mut old = client.run("c", &shell("p", "read line; echo out; read line; exit 2")).await.unwrap();
        let mut new = client.attach("c", "p").await.unwrap();
        new.control().write("\n").await.unwrap();
        let mut out = [0; 4];
        new.stdout.as_mut().unwrap().read_exact(&mut out).await.unwrap();
        assert_eq!(&out, b"out\n");
        if manner == Manner::Houdini {
            old.stdout.as_mut().unwrap().read_exact(&mut out).await.unwrap();
        }
        new.control().write("\n").await.unwrap();
        assert_eq!(new.wait().await.unwrap().status, 2);
        // The exit comes to both.
        let (out, _, exit) = finish(&mut old).await;
        assert_eq!((out.as_str(), exit.status), ("", 2));
    }
}

#[tokio::test]
async fn dropped_attachment_leaves_process_running() {
    let (_server, client) = with_container(Manner::Containerd).await;
    drop(client.run("c", &shell("p", "cat; exit 8")).await.unwrap());
    assert_eq!(client.attach("c", "p").await.unwrap().wait().await.unwrap().status, 8);
}

#[tokio::test]
async fn failed_wait_reports_worker_message() {
    let (server, client) = with_container(Manner::Guardian).await;
    let mut process = client.run("c", &shell("p", "sleep 600")).await.unwrap();
    server.break_attachments(Break::Fail("no such shim"));
    let error = process.wait().await.unwrap_err();
    assert!(matches!(&error, WaitError::Failed(words) if words == "no such shim"), "{error:?}");
}

#[tokio::test]
async fn invalid_names_are_not_sent() {
    let (server, client) = with_container(Manner::Guardian).await;
    let before = server.requests().len();
    let long = "x".repeat(77);
    for name in [long.as_str(), "a..b", "-a", "a-", "a b", "a/b"] {
        let spec =
            ContainerSpec { handle: name.into(), rootfs: "raw:///nowhere".into(), ..Default::default() };
        assert!(matches!(client.create(&spec).await, Err(Error::Refused(_))), "{name}");
        let run = client.run("c", &shell(name, "true")).await.err();
        assert!(matches!(run, Some(Error::Refused(_))), "{name}: {run:?}");
    }
    let key = "k".repeat(2049);
    assert!(matches!(client.set_property("c", &key, "value").await, Err(Error::Refused(_))));
    let spec = ContainerSpec {
        handle: "d".into(),
        rootfs: "raw:///nowhere".into(),
        properties: BTreeMap::from([(key, "value".into())]),
        ..Default::default()
    };
    assert!(matches!(client.create(&spec).await, Err(Error::Refused(_))));
    assert_eq!(server.requests().len(), before);

    // The strictest backend accepts names of the maximum length.
    let (_server, client) = with_container(Manner::Containerd).await;
    let (name, key) = ("x".repeat(76), "k".repeat(2048));
    let spec = ContainerSpec {
        handle: name.clone(),
        rootfs: "raw:///nowhere".into(),
        properties: BTreeMap::from([(key.clone(), "value".into())]),
        ..Default::default()
    };
    assert_eq!(client.create(&spec).await.unwrap(), name);
    client.set_property(&name, &key, &"v".repeat(100_000)).await.unwrap();
    assert_eq!(client.run(&name, &shell(&name, "exit 3")).await.unwrap().wait().await.unwrap().status, 3);
}

#[tokio::test]
async fn unreaped_end_and_failed_stop_are_reported() {
    let times = Times { stop: Duration::from_millis(50), ..Times::default() };
    let server = Server::with_times(Manner::Containerd, times);
    let client = client(&server);
    let spec = ContainerSpec { handle: "c".into(), rootfs: "raw:///nowhere".into(), ..Default::default() };
    client.create(&spec).await.unwrap();
    server.hold_ended(true);
    let mut process = client.run("c", &shell("p", "exit 3")).await.unwrap();
    while server.held() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let error = client.attach("c", "p").await.unwrap_err();
    let text = "proc not running: status = stopped";
    assert!(matches!(&error, Error::EndedUnreaped(message) if message == text), "{error:?}");
    for kill in [false, true] {
        let error = client.stop("c", kill).await.unwrap_err();
        assert!(matches!(error, Error::DoesNotEnd(_)), "{error:?}");
    }
    server.hold_ended(false);
    assert_eq!(process.wait().await.unwrap().status, 3);
    client.stop("c", true).await.unwrap();
}

#[tokio::test]
async fn failed_create_can_leave_a_container() {
    let (server, client) = with_container(Manner::Containerd).await;
    let spec = ContainerSpec { handle: "half".into(), rootfs: "raw:///nowhere".into(), ..Default::default() };
    server.inject("POST /containers", Fault::FailAfter("starting task: no".into()));
    let error = client.create(&spec).await.unwrap_err();
    assert!(matches!(error, Error::Other { status: 500, .. }), "{error:?}");
    assert_eq!(client.list(&BTreeMap::new()).await.unwrap(), ["c", "half"]);
    client.destroy("half").await.unwrap();
    assert_eq!(client.list(&BTreeMap::new()).await.unwrap(), ["c"]);
}

#[tokio::test]
async fn worker_rejects_containers_beyond_its_limit() {
    let (_server, client) = with_container(Manner::Containerd).await;
    for number in 1..250 {
        let spec = ContainerSpec {
            handle: format!("c{number}"),
            rootfs: "raw:///nowhere".into(),
            ..Default::default()
        };
        client.create(&spec).await.unwrap();
    }
    let spec = ContainerSpec { handle: "last".into(), rootfs: "raw:///nowhere".into(), ..Default::default() };
    let error = client.create(&spec).await.unwrap_err();
    assert!(matches!(error, Error::Full(_)), "{error:?}");
}

/// Calls work in a task that may move between threads, as in a server handler.
#[tokio::test]
async fn calls_can_be_made_from_a_task() {
    fn on_any_thread<T>(call: impl Future<Output = T> + Send + 'static) -> impl Future<Output = T> + Send {
        call
    }
    let (_server, client) = with_container(Manner::Guardian).await;
    let whole = on_any_thread(async move {
        let mut process = client.run("c", &shell("p", "exit 3")).await?;
        let _ = process.control().write("text").await;
        let exit = process.wait().await;
        client.stop("c", true).await?;
        client.bulk_info(&["c"]).await?;
        client.destroy("c").await?;
        Ok::<_, Error>(exit)
    });
    assert_eq!(whole.await.unwrap().unwrap().status, 3);
}
