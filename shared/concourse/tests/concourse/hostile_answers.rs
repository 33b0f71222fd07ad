//! Tests with malformed responses of Garden and Baggageclaim servers. Each response is rejected or
//! parsed in bounded memory.
//!
//! Each case changes some bytes of a valid response, including its head. The changes are derived
//! from a number: see `testing::hostile`.
use std::collections::BTreeMap;
use std::time::Duration;

use gantry_concourse::baggageclaim::{self, Handle, P2pUrl, Timeouts};
use gantry_concourse::garden::{self, Capacity, ContainerInfo, Settings};
use testing::hostile::{Counting, Draws, each, most_allocated};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Number of cases per call without `GANTRY_SOAK`.
const CASES: u64 = 500;
/// Memory limit of a call whose response has a few KiB, in bytes. A declared length must not be
/// allocated in advance.
const MOST: usize = 2 << 20;
/// Timeout of each call.
const PATIENCE: Duration = Duration::from_secs(30);

fn answer(status: &str, body: &str) -> Vec<u8> {
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}", body.len());
    format!("{head}\r\n\r\n{body}").into_bytes()
}

/// A response with this status and body, in two chunks.
fn chunked(status: &str, body: &str) -> Vec<u8> {
    let (first, second) = body.split_at(body.len() / 2);
    let chunks = format!("{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n", first.len(), second.len());
    format!("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}").into_bytes()
}

/// Makes a call. The server sends these bytes on each of its connections, and closes it.
async fn answered<T>(listener: &TcpListener, bytes: &[u8], call: impl Future<Output = T>) -> T {
    let serve = async {
        // The connections end with the call.
        let mut connections = JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.expect("a caller");
            let bytes = bytes.to_vec();
            connections.spawn(async move {
                stream.readable().await.ok();
                // The caller closes the connection when it has read enough.
                stream.write_all(&bytes).await.ok();
                stream.shutdown().await.ok();
                tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.ok();
            });
        }
    };
    let answered = async {
        tokio::select! {
            answered = call => answered,
            () = serve => unreachable!("the server runs forever"),
        }
    };
    tokio::time::timeout(PATIENCE, answered).await.expect("every call ends")
}

/// Runs a call once with the valid response, and then for each case.
fn each_call<T, F, C>(valid: &[u8], client: impl Fn(String) -> C, call: impl Fn(C) -> F, check: impl Fn(T))
where
    F: Future<Output = T>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let make = |bytes: &[u8]| runtime.block_on(answered(&listener, bytes, call(client(address.clone()))));
    check(make(valid));
    each(CASES, |draws: &mut Draws| {
        let bytes = draws.changed(valid);
        let (_, allocated) = most_allocated(|| drop(make(&bytes)));
        assert!(allocated <= MOST, "{allocated} for {} bytes", bytes.len());
    });
}

fn garden(address: String) -> garden::Client {
    let settings = Settings { retry_for: Duration::ZERO, ..Settings::default() };
    garden::Client::new(address, settings)
}

fn baggageclaim(address: String) -> baggageclaim::Client {
    baggageclaim::Client::new(&address, Timeouts::default())
}

#[test]
fn mutated_garden_response_is_rejected_or_parsed() {
    let info = r#"{"State":"active","Events":["oom"],"HostIP":"10.0.0.1","ProcessIDs":["p"],"Properties":{"a":"é\n"},"MappedPorts":[{"HostPort":7,"ContainerPort":8}]}"#;
    let whole = |found: Result<ContainerInfo, _>| {
        let found = found.expect("it is valid");
        assert_eq!((&found.state[..], &found.properties["a"][..]), ("active", "é\n"));
        assert_eq!((found.mapped_ports[0].host_port, &found.events[0][..]), (7, "oom"));
    };
    for valid in [answer("200 OK", info), chunked("200 OK", info)] {
        each_call(&valid, garden, async |client| client.info("c").await, whole);
    }
    let list = answer("200 OK", r#"{"Handles":["one","two"]}"#);
    let listed = |found: Result<Vec<String>, _>| assert_eq!(found.expect("it is valid"), ["one", "two"]);
    each_call(&list, garden, async |client| client.list(&BTreeMap::new()).await, listed);
    let capacity = Capacity { memory_in_bytes: u64::MAX, max_containers: 250, ..Capacity::default() };
    let text = serde_json::to_string(&capacity).expect("written");
    let had = |found: Result<Capacity, _>| assert_eq!(found.expect("it is valid"), capacity);
    each_call(&answer("200 OK", &text), garden, async |client| client.capacity().await, had);
    let missing = r#"{"Type":"ContainerNotFoundError","Message":"unknown handle: c","Handle":"c"}"#;
    let not_found = |found: Result<ContainerInfo, _>| {
        assert!(matches!(found, Err(garden::Error::ContainerNotFound(handle)) if handle == "c"));
    };
    for valid in [answer("404 Not Found", missing), chunked("404 Not Found", missing)] {
        each_call(&valid, garden, async |client| client.info("c").await, not_found);
        let refused = |found: Result<(), _>| assert!(found.is_err());
        let attach = async |client: garden::Client| client.attach("c", "p").await.map(drop);
        each_call(&valid, garden, attach, refused);
    }
    let metrics = r#"{"c":{"Metrics":{"MemoryStat":{"TotalUsageTowardLimit":7},"Age":9},"Err":null},"d":{"Metrics":{},"Err":{"Type":"","Message":"no"}}}"#;
    let measure = async |client: garden::Client| client.bulk_metrics(&["c", "d"]).await.is_ok();
    each_call(&answer("200 OK", metrics), garden, measure, |ok| assert!(ok));
}

#[test]
fn mutated_process_messages_are_rejected_or_parsed() {
    // The same bytes answer the requests for both output streams.
    let process = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n\
                   {\"process_id\":\"p\",\"stream_id\":\"1\"}\n{\"process_id\":\"p\",\"exit_status\":3}\n";
    let attach = async |client: garden::Client| {
        let mut process = client.attach("c", "p").await.ok()?;
        process.wait().await.ok().map(|exit| exit.status)
    };
    each_call(process.as_bytes(), garden, attach, |exit| assert_eq!(exit, Some(3)));
}

#[test]
fn mutated_baggageclaim_response_is_rejected_or_parsed() {
    let volume = r#"{"handle":"v","path":"/p","properties":{"a":"b"},"privileged":true}"#;
    let handle = Handle::new("v").expect("a handle");
    for valid in [answer("200 OK", volume), chunked("200 OK", volume)] {
        let get = async |client: baggageclaim::Client| client.get(&handle).await;
        let got = |found: Result<baggageclaim::Volume, _>| {
            let found = found.expect("it is valid");
            assert_eq!((&found.handle[..], &found.path[..], found.privileged), ("v", "/p", true));
            assert_eq!(found.properties["a"], "b");
        };
        each_call(&valid, baggageclaim, get, got);
    }
    let list = answer("200 OK", &format!("[{volume},{volume}]"));
    let listed =
        |found: Result<Vec<baggageclaim::Volume>, _>| assert_eq!(found.expect("it is valid").len(), 2);
    each_call(&list, baggageclaim, async |client| client.list(&[]).await, listed);
    let missing = answer("404 Not Found", r#"{"error":"volume not found"}"#);
    let not_found = |found: Result<bool, _>| assert!(matches!(found, Err(baggageclaim::Error::NotFound)));
    each_call(&missing, baggageclaim, async |client| client.privileged(&handle).await, not_found);
    let url = answer("200 OK", "http://fd00::1:7788");
    let reached = |found: Result<P2pUrl, _>| {
        assert_eq!(found.expect("it is valid").as_str(), "http://[fd00::1]:7788");
    };
    each_call(&url, baggageclaim, async |client| client.p2p_url().await, reached);
}
