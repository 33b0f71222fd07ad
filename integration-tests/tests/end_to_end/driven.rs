//! Containers that the holder of a driven lease creates, starts and publishes.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::holder::{Holder, Services, TEAM, block_on, spec, uuid};
use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{may_run_containers, wait_for};
use rpc::Reason;
use rpc::pb::artifacts::FindOrCreateTaskCacheRequest;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::runtime as pb;
use rpc::pb::scheduler as scheduler_pb;
use testing::baggageclaim::Driver;
use testing::garden::Manner;

/// Uploads a directory with one file.
fn uploaded(suite: &Suite) -> String {
    let source = suite.path("source");
    fs::create_dir_all(&source).expect("made");
    fs::write(source.join("file"), "bytes\n").expect("written");
    suite.upload(&source)
}

const SCRIPT: &str = "cat src/file - > out/file; echo ran; exit 3";

#[test]
fn holder_creates_starts_publishes_and_keeps() {
    if may_run_containers() {
        let suite = Suite::start(Shape::ONE, SHORT_TERMS);
        create_start_publish_keep(&suite, None);
    }
}

#[test]
fn holder_reaches_worker_through_proxy() {
    if may_run_containers() {
        // The gateway rejects the token of the holder.
        let suite = Suite::start_walled(Shape { proxies: 1, ..Shape::ONE }, SHORT_TERMS);
        suite.attended("worker-0", "runtime-gateway-0");
        create_start_publish_keep(&suite, None);
    }
}

/// Adds a Concourse worker, and returns the image of its containers.
fn on_concourse_worker(suite: &mut Suite, manner: Manner) -> (ConcourseWorker, String) {
    let servers = ConcourseWorker::start(manner, Driver::Overlay);
    let (garden, volumes) = (servers.garden_address(), servers.volumes_address());
    let settings = [("GANTRY_GARDEN", &*garden), ("GANTRY_BAGGAGECLAIM", &*volumes)];
    suite.attend("runtime-gateway-0", "concourse", &settings);
    suite.attended("concourse", "runtime-gateway-0");
    let image = suite.path("image");
    make_image(&image);
    let image = suite.upload(&image);
    (servers, image)
}

#[test]
fn holder_drives_containers_of_concourse_worker() {
    if may_run_containers() {
        for manner in [Manner::Containerd, Manner::Guardian] {
            let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
            let (_servers, image) = on_concourse_worker(&mut suite, manner);
            create_start_publish_keep(&suite, Some(&image));
        }
    }
}

/// Performs all steps of a holder, with this image or that of the worker.
fn create_start_publish_keep(suite: &Suite, image: Option<&str>) {
    let input = uploaded(suite);
    let spec = |input: &str| spec(input, image);
    let artifacts: Vec<_> = image.into_iter().chain([&*input]).collect();
    block_on(async {
        let holder = Holder::place(&Services::of(suite), &uuid(), &artifacts).await.expect("placed");
        let created = holder.create("task", spec(&input)).await.expect("created");
        let id = created.container_id.clone();
        assert!(created.processes.is_empty() && created.key == "task", "{created:?}");
        let again = holder.create("task", spec(&input)).await.expect("the same");
        assert_eq!(again, created);
        let other = pb::ContainerSpec { user: "1000".to_owned(), ..spec(&input) };
        let refused = holder.create("task", other).await.expect_err("another spec");
        assert!(refused.is(Reason::ContainerExists), "{refused}");

        // Nothing can join the container yet.
        let refused = holder.run(&id, &uuid(), &["true"], b"").await.expect_err("nothing runs");
        assert!(refused.is(Reason::ContainerNotRunning), "{refused}");
        let command = ["sh", "-c", SCRIPT];
        for _ in 0..2 {
            // The second call attaches to the process that has ended.
            let ran = holder.run(&id, &id, &command, b"input\n").await.expect("it runs");
            assert_eq!(ran, (b"ran\n".to_vec(), 3));
        }
        let seen = holder.container(&id).await.expect("it exists");
        let [main] = &seen.processes[..] else { panic!("{seen:?}") };
        let code = main.exited.as_ref().and_then(|exited| exited.status);
        assert_eq!((main.main, main.state()), (true, pb::ProcessState::Ended));
        assert_eq!(code, Some(pb::exited::Status::Code(3)));

        // After the end, another process sees what the first one left. Garden cannot do that.
        if image.is_none() {
            let looked = holder.run(&id, &uuid(), &["cat", "out/file"], b"").await.expect("it runs");
            assert_eq!(looked, (b"bytes\ninput\n".to_vec(), 0));
        }
        let published = holder.publish(&id, "out").await.expect("published");
        assert_eq!((published.size_bytes, published.entries), (12, 1));
        assert_eq!(holder.publish(&id, "out").await.expect("the same"), published);
        let refused = holder.publish(&id, "none").await.expect_err("no such output");
        assert!(refused.is(Reason::InvalidField), "{refused}");

        let list = pb::ListContainersRequest {
            team: TEAM.to_owned(),
            worker_id: holder.placed.worker_id.clone(),
            labels: BTreeMap::from([("step".to_owned(), "task".to_owned())]),
            ..Default::default()
        };
        let mut listed =
            holder.containers().list_containers(list.clone()).await.expect("listed").into_inner();
        assert_eq!(listed.containers.pop().expect("one").container_id, id);
        let elsewhere = pb::ListContainersRequest { team: "other".to_owned(), ..list };
        let listed = holder.containers().list_containers(elsewhere).await.expect("listed").into_inner();
        assert!(listed.containers.is_empty(), "{listed:?}");

        for _ in 0..2 {
            holder.release(&[&published]).await.expect("released");
        }
        holder.ended().await;
        let refused = holder.create("late", spec(&input)).await.expect_err("the lease has ended");
        assert!(refused.is(Reason::LeaseLost), "{refused}");
        assert_eq!(suite.succeed(&["cat", &published.artifact_id, "file"]), "bytes\ninput\n");
    });
}

/// Returns the keys of the running containers of a team, whose usage is known.
async fn measured(holder: &Holder, team: &str) -> Vec<String> {
    let request = pb::GetUsageRequest { team: team.to_owned(), worker_id: holder.placed.worker_id.clone() };
    let usage = holder.containers().get_usage(request).await.expect("measured").into_inner();
    let is_known = |one: &pb::ContainerUsage| {
        one.cpu_time.is_some() && one.memory_bytes > Some(0) && one.processes > Some(0)
    };
    assert!(usage.containers.iter().all(is_known) && usage.measured_at.is_some(), "{usage:?}");
    let mut keys: Vec<_> = usage.containers.into_iter().map(|one| one.key).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn release_stops_all_processes_of_lease() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let holder = Holder::place(&Services::of(&suite), &uuid(), &[&input]).await.expect("placed");
        let mut ids = Vec::new();
        for key in ["one", "two"] {
            let id = holder.create(key, spec(&input, None)).await.expect("created").container_id;
            ids.push(id);
        }
        let run = async |id: &str| {
            let trap = "trap 'echo stopped; exit 5' TERM; echo up | tee out/up; while :; do sleep 0.05; done";
            holder.run(id, id, &["sh", "-c", trap], b"").await.expect("it runs")
        };
        let release = async {
            for id in &ids {
                loop {
                    let seen = holder.container(id).await.expect("it exists");
                    if seen.processes.first().is_some_and(|main| main.state() == pb::ProcessState::Running) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                // The shell has set its trap.
                let wait = ["sh", "-c", "until [ -e out/up ]; do sleep 0.01; done"];
                assert_eq!(holder.run(id, &uuid(), &wait, b"").await.expect("it runs").1, 0);
                let refused = holder.publish(id, "out").await.expect_err("it runs");
                assert!(refused.is(Reason::ProcessRunning), "{refused}");
            }
            assert_eq!(measured(&holder, TEAM).await, ["one", "two"]);
            assert!(measured(&holder, "other").await.is_empty(), "they belong to another team");
            holder.release(&[]).await.expect("released");
        };
        let (one, two, ()) = tokio::join!(run(&ids[0]), run(&ids[1]), release);
        for ran in [one, two] {
            assert_eq!(ran, (b"up\nstopped\n".to_vec(), 5));
        }
        holder.ended().await;
    });
}

#[test]
fn container_is_stopped_and_destroyed_before_its_lease_ends() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let holder = Holder::place(&Services::of(&suite), &uuid(), &[&input]).await.expect("placed");
        let id = holder.create("task", spec(&input, None)).await.expect("created").container_id;
        let command = ["sh", "-c", "trap 'echo stopped; exit 4' TERM; echo up; while :; do sleep 0.05; done"];
        holder.attach(&id, &id, &command, None).await.expect("it starts");
        for _ in 0..2 {
            holder.stop(&id).await.expect("stopped");
        }
        let ran = holder.run(&id, &id, &command, b"").await.expect("it ends");
        assert_eq!(ran, (b"up\nstopped\n".to_vec(), 4));
        holder.destroy(&id).await.expect("destroyed");
        loop {
            match holder.container(&id).await {
                Err(refusal) if refusal.is(Reason::ContainerNotFound) => break,
                seen => _ = seen.expect("not yet"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        holder.destroy(&id).await.expect("a repeat succeeds");
        holder.release(&[]).await.expect("released");
        holder.ended().await;
    });
}

#[test]
fn task_cache_is_published_for_next_lease() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let services = Services::of(&suite);
        let request = FindOrCreateTaskCacheRequest {
            team: TEAM.to_owned(),
            job: "job".to_owned(),
            step: "step".to_owned(),
            path: "/cache".to_owned(),
            ttl: None,
        };
        let mut caches = CachesClient::new(services.connect(suite.address("artifact-store-0")));
        let cache = caches.find_or_create_task_cache(request).await.expect("made").into_inner();
        let cache = cache.cache_id;
        for expected in ["first\n", "first\nagain\n"] {
            let holder = Holder::place_with(&services, |request| {
                request.artifact_ids = vec![input.clone()];
                request.task_cache_ids = vec![cache.clone()];
            })
            .await
            .expect("placed");
            let mount = scheduler_pb::CacheMount { task_cache_id: cache.clone(), path: "/cache".into() };
            let spec = pb::ContainerSpec { caches: vec![mount], ..spec(&input, None) };
            let id = holder.create("task", spec).await.expect("created").container_id;
            let script =
                "word=first; [ ! -e /cache/seen ] || word=again; echo $word >> /cache/seen; cat /cache/seen";
            let ran = holder.run(&id, &id, &["sh", "-c", script], b"").await.expect("it runs");
            assert_eq!(ran, (expected.as_bytes().to_vec(), 0));
            let source = pb::publish_request::Source::TaskCacheId(cache.clone());
            let published = holder.publish_source(&id, source).await.expect("published");
            let owner = scheduler_pb::output_owner::Owner::TaskCacheId(cache.clone());
            holder.release_to(&[&published], &[owner]).await.expect("released");
        }
    });
}

#[test]
fn bad_requests_change_nothing() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let services = Services::of(&suite);
        let holder = Holder::place(&services, &uuid(), &[&input]).await.expect("placed");
        let valid = || spec(&input, None);
        type Change = fn(&mut pb::ContainerSpec);
        let cases: &[(&str, &str, Change)] = &[
            ("", "key", |_| {}),
            ("line\nbreak", "key", |_| {}),
            ("task", "spec.image", |spec| spec.image = None),
            ("task", "spec.privilege", |spec| spec.privilege = 0),
            ("task", "spec.network", |spec| spec.network = 0),
            ("task", "spec.network_container_id", |spec| spec.network_container_id = "x".to_owned()),
            ("task", "spec.inputs[0].artifact_id", |spec| spec.inputs[0].artifact_id.clear()),
            ("task", "spec.outputs[0].owners", |spec| spec.outputs[0].owners.push(Default::default())),
            ("task", "spec.outputs[0].path", |spec| spec.outputs[0].path = vec![b'/', 0xff].into()),
            ("task", "spec.directory", |spec| spec.directory = b"a\0b".as_slice().into()),
        ];
        for (key, field, change) in cases {
            let mut spec = valid();
            change(&mut spec);
            let refused = holder.create(key, spec).await.expect_err(field);
            let text = refused.to_string();
            assert!(refused.is(Reason::InvalidField) && text.contains(field), "{field}: {refused}");
        }
        let unknown = uuid();
        let missing = |spec: &mut pb::ContainerSpec| spec.inputs[0].artifact_id = unknown.clone();
        let mut unpinned = valid();
        missing(&mut unpinned);
        let refused = holder.create("task", unpinned).await.expect_err("the team has no such artifact");
        assert!(refused.is(Reason::InputUnavailable), "{refused}");
        let stranger = pb::ContainerSpec { user: "no-such-user".to_owned(), ..valid() };
        let refused = holder.create("task", stranger).await.expect_err("there is no such user");
        let failure = refused.about.get("failure_reason").map(String::as_str);
        assert!(refused.is(Reason::ContainerFailed) && failure == Some("USER_NOT_FOUND"), "{refused}");
        // A failed creation can be repeated with another spec.
        let id = holder.create("task", valid()).await.expect("created").container_id;

        let other = Holder::place(&services, &uuid(), &[&input]).await.expect("placed");
        let refused = other.publish(&id, "out").await.expect_err("a container of another lease");
        assert!(refused.is(Reason::ContainerNotFound), "{refused}");
        let refused = other.run(&id, &id, &["true"], b"").await.expect_err("a container of another lease");
        assert!(refused.is(Reason::ContainerNotFound), "{refused}");
        let mut forged = Holder { placed: other.placed.clone(), ..Holder { services, ..other } };
        forged.placed.lease_token = "forged".to_owned();
        let refused = forged.create("task", valid()).await.expect_err("forged");
        assert!(refused.is(Reason::InvalidToken), "{refused}");
    });
}

#[test]
fn container_joins_network_of_another_one() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let holder = Holder::place(&Services::of(&suite), &uuid(), &[&input]).await.expect("placed");
        let server = holder.create("server", spec(&input, None)).await.expect("created").container_id;
        let joined =
            |id: &str| pb::ContainerSpec { network_container_id: id.to_owned(), ..spec(&input, None) };
        let refused = holder.create("client", joined(&uuid())).await.expect_err("there is no such container");
        assert!(refused.is(Reason::ContainerNotFound), "{refused}");
        let client = holder.create("client", joined(&server)).await.expect("created").container_id;
        let connect = "import socket; s = socket.create_connection(('localhost', 8080)); print(s.recv(9))";
        let connect = ["python3", "-c", connect];
        let refused = holder.run(&client, &client, &connect, b"").await.expect_err("the server does not run");
        assert!(refused.is(Reason::ContainerNotRunning), "{refused}");
        let listen = "import socket; s = socket.create_server(('localhost', 8080)); print('up', flush=True)
while True: s.accept()[0].sendall(b'hello')";
        let listen = ["python3", "-c", listen];
        holder.attach(&server, &server, &listen, None).await.expect("it listens");
        let ran = holder.run(&client, &client, &connect, b"").await.expect("it runs");
        assert_eq!(ran, (b"b'hello'\n".to_vec(), 0));
        holder.release(&[]).await.expect("released");
        holder.ended().await;
    });
}

/// Each service is killed between each two steps of a holder. The holder repeats its calls.
#[test]
fn steps_survive_the_death_of_each_service_between_them() {
    if !may_run_containers() {
        return;
    }
    let settings = [SHORT_TERMS, &[("GANTRY_GC_GRACE", "1s")]].concat();
    let suite = Suite::start(Shape::ONE, &settings);
    let every = ["scheduler-0", "artifact-store-0", "streamer-0", "runtime-gateway-0"];
    kill_between_steps(suite, &every, None);

    let mut suite = Suite::start(Shape::NO_WORKER, &settings);
    let (_servers, image) = on_concourse_worker(&mut suite, Manner::Containerd);
    kill_between_steps(suite, &["runtime-gateway-0"], Some(&image));
}

fn kill_between_steps(mut suite: Suite, killed: &[&str], image: Option<&str>) {
    let input = uploaded(&suite);
    let artifacts: Vec<_> = image.into_iter().chain([&*input]).collect();
    let services = Services::of(&suite);
    for &service in killed {
        for gap in 1..=5 {
            let killed_at = format!("{service} before step {gap}");
            let mut kill = |step| {
                if step == gap {
                    suite.kill(service);
                    suite.spawn(service);
                }
            };
            let published = block_on(async {
                let mut holder = Holder::place(&services, &uuid(), &artifacts).await.expect("placed");
                // A Concourse worker loses input when its gateway dies.
                holder.has_input = image.is_none();
                kill(1);
                let id = holder.create("task", spec(&input, image)).await.expect("created").container_id;
                kill(2);
                let command = ["sh", "-c", "echo ran; cat src/file - > out/file; exit 3"];
                holder.attach(&id, &id, &command, None).await.expect("it starts");
                kill(3);
                let ran = holder.run(&id, &id, &command, b"input\n").await.expect("it ends");
                assert_eq!(ran, (b"ran\n".to_vec(), 3), "{killed_at}");
                kill(4);
                let published = holder.publish(&id, "out").await.expect("published");
                let seen = holder.container(&id).await.expect("it exists");
                assert_eq!(seen.processes.len(), 1, "{killed_at}: {seen:?}");
                kill(5);
                holder.release(&[&published]).await.expect("released");
                holder.ended().await;
                published
            });
            let kept = suite.succeed(&["cat", &published.artifact_id, "file"]);
            let expected = if image.is_none() { "bytes\ninput\n" } else { "bytes\n" };
            assert_eq!(kept, expected, "{killed_at}");
        }
    }
    wait_for("the deletion of all containers", || {
        suite.succeed(&["list", "containers", "--json"]).trim().is_empty().then_some(())
    });
}

/// A holder that dies leaves nothing behind after the term of its lease.
#[test]
fn lease_of_dead_holder_ends_with_its_processes() {
    if !may_run_containers() {
        return;
    }
    let settings = [SHORT_TERMS, &[("GANTRY_GC_GRACE", "1s"), ("GANTRY_LEASE_TERM", "3s")]].concat();
    let suite = Suite::start(Shape::ONE, &settings);
    let input = uploaded(&suite);
    let services = Services::of(&suite);
    block_on(async {
        let holder = Holder::place(&services, &uuid(), &[&input]).await.expect("placed");
        let id = holder.create("task", spec(&input, None)).await.expect("created").container_id;
        holder.attach(&id, &id, &["sh", "-c", "echo up; sleep 1000"], None).await.expect("it starts");
        holder.ended().await;
        let refused = holder.release(&[]).await.map_err(|refusal| refusal.to_string());
        assert_eq!(refused, Ok(()), "a release is repeatable");
    });
    wait_for("the deletion of all containers", || {
        suite.succeed(&["list", "containers", "--json"]).trim().is_empty().then_some(())
    });
}
