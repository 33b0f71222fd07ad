//! Wire tests of the simulated Garden server: its bytes are those of a genuine worker.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use testing::garden::{Manner, Server, Times};

struct Raw {
    socket: TcpStream,
    read: Vec<u8>,
}

impl Raw {
    fn connect(server: &Server) -> Self {
        let socket = TcpStream::connect(server.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { socket, read: Vec::new() }
    }

    fn send(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).unwrap();
    }

    fn request(&mut self, line: &str, body: &str) {
        let host = "Host: 127.0.0.1:7777\r\n";
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        self.send(&format!("{line} HTTP/1.1\r\n{host}{length}\r\n{body}"));
    }

    /// Reads up to and including `mark`.
    fn until(&mut self, mark: &str) -> String {
        let found = loop {
            if let Some(at) = self.read.windows(mark.len()).position(|part| part == mark.as_bytes()) {
                break at + mark.len();
            }
            let mut part = [0; 1024];
            let read = self.socket.read(&mut part).unwrap();
            assert!(read > 0, "ended after {:?}", String::from_utf8_lossy(&self.read));
            self.read.extend_from_slice(&part[..read]);
        };
        String::from_utf8(self.read.drain(..found).collect()).unwrap()
    }

    /// Reads the head of a response, and removes its date.
    fn head(&mut self) -> String {
        let head = self.until("\r\n\r\n");
        let (before, rest) = head.split_once("Date: ").unwrap();
        let (date, after) = rest.split_once("\r\n").unwrap();
        assert!(date.ends_with(" GMT") && date.len() == 29, "{date}");
        format!("{before}{after}")
    }

    fn rest(mut self) -> std::io::Result<Vec<u8>> {
        self.socket.read_to_end(&mut self.read)?;
        Ok(self.read)
    }
}

fn with_container(manner: Manner) -> Server {
    with_times(manner, Times::default())
}

fn with_times(manner: Manner, times: Times) -> Server {
    let server = Server::with_times(manner, times);
    let mut raw = Raw::connect(&server);
    raw.request("POST /containers", r#"{"handle":"c-42","rootfs":"raw:///nowhere"} and what is ignored"#);
    assert_eq!(raw.head(), "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n");
    assert_eq!(raw.until("\n"), "{\"Handle\":\"c-42\"}\n");
    server
}

const RUN_HEAD: &str =
    "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
const ATTACH_HEAD: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
const OUTPUT_HEAD: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

#[test]
fn cat_runs_and_can_be_attached() {
    let server = with_container(Manner::Containerd);
    let mut main = Raw::connect(&server);
    let spec = "{\"id\":\"p1\",\"path\":\"sh\",\"args\":[\"-c\",\"cat; echo err \\u003e\\u00262; exit 3\"],\"rlimits\":{},\"image\":{}}\n";
    assert_eq!(spec.len(), 100);
    main.request("POST /containers/c-42/processes", spec);
    assert_eq!(main.head(), RUN_HEAD);
    assert_eq!(main.until("\n"), "{\"process_id\":\"p1\",\"stream_id\":\"2\"}\n");

    let [mut stdout, mut stderr] = [Raw::connect(&server), Raw::connect(&server)];
    stdout.request("GET /containers/c-42/processes/p1/attaches/2/stdout", "");
    stderr.request("GET /containers/of-no/processes/account/attaches/2/stderr", "");
    assert_eq!([stdout.head(), stderr.head()], [OUTPUT_HEAD, OUTPUT_HEAD]);

    main.send("{\"process_id\":\"p1\",\"source\":0,\"data\":\"hel\"}\n");
    main.send(
        "{\"process_id\":\"p1\",\"source\":0,\"data\":\"lo\\n\"}{\"process_id\":\"p1\",\"source\":0}\n",
    );
    assert_eq!(stdout.rest().unwrap(), b"hello\n");
    assert_eq!(stderr.rest().unwrap(), b"err\n");
    assert_eq!(main.rest().unwrap(), b"{\"process_id\":\"p1\",\"exit_status\":3}\n");

    let mut later = Raw::connect(&server);
    later.request("GET /containers/c-42/processes/never-was", "");
    assert_eq!(later.head(), ATTACH_HEAD);
    let both = String::from_utf8(later.rest().unwrap()).unwrap();
    assert!(both.ends_with("\"}\n{\"process_id\":\"never-was\",\"exit_status\":3}\n"), "{both}");
}

#[test]
fn missing_routes_and_objects_match_genuine_errors() {
    let server = with_container(Manner::Guardian);
    // All requests use one connection, because errors leave it open.
    let mut raw = Raw::connect(&server);
    raw.request("GET /nowhere", "");
    assert!(raw.head().starts_with("HTTP/1.1 404 Not Found\r\nContent-Type: text/plain; charset=utf-8\r\n"));
    assert_eq!(raw.until("\n"), "404 page not found\n");
    raw.request("GET /containers/c-42", "");
    let head = raw.head();
    assert!(head.starts_with("HTTP/1.1 405 Method Not Allowed\r\nAllow: DELETE\r\n"), "{head}");
    assert_eq!(raw.until("\n"), "Method Not Allowed\n");
    raw.request("GET /containers/c-42/processes/p9", "");
    assert_eq!(
        raw.head(),
        "HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 105\r\n\r\n"
    );
    assert_eq!(
        raw.until("\n"),
        "{\"Type\":\"ProcessNotFoundError\",\"Message\":\"unknown process: p9\",\"Handle\":\"\",\"ProcessID\":\"p9\",\"Binary\":\"\"}\n"
    );
    raw.request("PUT /containers/c-42/stop", "");
    assert!(raw.head().starts_with("HTTP/1.1 500 Internal Server Error\r\n"));
    assert!(raw.until("\n").contains("\"Message\":\"EOF\""));
    raw.request("GET /containers/gone/properties", "");
    raw.head();
    assert_eq!(raw.until("\n"), "null\n");
    raw.request("GET /containers/bulk_info", "");
    assert_eq!(raw.rest().unwrap(), b"");
}

/// Runs a process that waits for the end of its standard input. Returns its main connection.
fn waiting(server: &Server, script: &str) -> Raw {
    let mut main = Raw::connect(server);
    let spec = serde_json::json!({"id": "p1", "path": "sh", "args": ["-c", script]});
    main.request("POST /containers/c-42/processes", &spec.to_string());
    main.head();
    main.until("\n");
    main
}

#[test]
fn bytes_after_stdin_end_cause_a_reset() {
    let server = with_container(Manner::Containerd);
    let mut main = waiting(&server, "cat; until [ -e go ]; do sleep 0.01; done");
    main.send("{\"process_id\":\"p1\",\"source\":0}\n");
    // The server reads no more input, so these bytes wait in the kernel.
    main.send("{\"process_id\":\"p1\",\"signal\":0}\n");
    let mut other = Raw::connect(&server);
    other.request("POST /containers/c-42/processes", r#"{"path":"touch","args":["go"]}"#);
    other.head();
    let error = main.rest().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn half_closed_client_gets_no_exit() {
    let server = with_container(Manner::Containerd);
    let main = waiting(&server, "sleep 0.1; cat");
    main.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(main.rest().unwrap(), b"");
}

#[test]
fn invalid_utf_8_on_stdin_becomes_replacement_characters() {
    let server = with_container(Manner::Guardian);
    let mut main = waiting(&server, "cat");
    main.socket.write_all(b"{\"source\":0,\"data\":\"\xff\xfe\\u0000\\ud83d\\ude00\"}{}").unwrap();
    let mut stdout = Raw::connect(&server);
    stdout.request("GET /containers/c-42/processes/p1/attaches/2/stdout", "");
    stdout.head();
    assert_eq!(stdout.rest().unwrap(), b"\xef\xbf\xbd\xef\xbf\xbd\0\xf0\x9f\x98\x80");
}

fn fetch(server: &Server, stream: &str) -> Raw {
    let mut raw = Raw::connect(server);
    raw.request(&format!("GET /containers/c-42/processes/p1/attaches/{stream}/stdout"), "");
    assert_eq!(raw.head(), OUTPUT_HEAD);
    raw
}

#[test]
fn output_is_fetched_once_and_unknown_stream_empty() {
    let server = with_container(Manner::Containerd);
    let main = waiting(&server, "echo late");
    assert_eq!(main.rest().unwrap(), b"{\"process_id\":\"p1\",\"exit_status\":0}\n");
    assert_eq!(fetch(&server, "2").rest().unwrap(), b"late\n");
    for stream in ["2", "77", "none"] {
        assert_eq!(fetch(&server, stream).rest().unwrap(), b"");
    }
}

#[test]
fn output_is_lost_when_stream_expires() {
    let server =
        with_times(Manner::Containerd, Times { stream_validity: Duration::ZERO, ..Times::default() });
    waiting(&server, "echo late").rest().unwrap();
    assert_eq!(fetch(&server, "2").rest().unwrap(), b"");
}

#[test]
fn two_readers_of_a_stream_share_it() {
    let server = with_container(Manner::Containerd);
    let mut main = waiting(&server, "cat");
    let readers = [fetch(&server, "2"), fetch(&server, "2")];
    for line in 0..100 {
        main.send(&format!("{{\"source\":0,\"data\":\"{line:03}\"}}"));
    }
    main.send("{\"source\":0}");
    let both = readers.map(|reader| reader.rest().unwrap()).concat();
    assert_eq!(both.len(), 300);
}

#[test]
fn grace_time_destroys_container_unless_called() {
    let server = Server::start(Manner::Guardian);
    let mut raw = Raw::connect(&server);
    raw.request("POST /containers", r#"{"handle":"c","grace_time":50000000}"#);
    raw.until("}\n");
    let until = Instant::now() + Duration::from_secs(60);
    while !server.handles().is_empty() {
        assert!(Instant::now() < until, "never reaped");
        std::thread::sleep(Duration::from_millis(5));
    }
    raw.request("POST /containers", r#"{"handle":"c-42","grace_time":50000000}"#);
    raw.until("}\n");
    let mut main = waiting(&server, "sleep 0.3; exit 7");
    // An attachment keeps the container.
    assert!(main.until("\n").contains("\"exit_status\":7"));
}

/// Returns the rest of an error response, starting at the text of the error.
fn refused(server: &Server, line: &str, body: &str) -> String {
    let mut raw = Raw::connect(server);
    raw.request(line, body);
    assert!(raw.head().starts_with("HTTP/1.1 500 Internal Server Error\r\n"), "{line}");
    raw.until("\n")
}

#[test]
fn containerd_rejects_invalid_names() {
    let server = with_container(Manner::Containerd);
    let long = "x".repeat(77);
    for name in [long.as_str(), "a..b", "-a", "a b"] {
        let create = format!("{{\"handle\":\"{name}\",\"rootfs\":\"raw:///nowhere\"}}");
        assert!(refused(&server, "POST /containers", &create).contains("invalid argument"), "{name}");
        let run = format!("{{\"id\":\"{name}\",\"path\":\"true\"}}");
        assert!(refused(&server, "POST /containers/c-42/processes", &run).contains("invalid argument"));
    }
    let key = format!("PUT /containers/c-42/properties/{}", "k".repeat(2049));
    assert!(refused(&server, &key, "{\"value\":\"v\"}").contains("is too long"));
}

#[test]
fn unreaped_process_rejects_attach_and_stop() {
    let times = Times { stop: Duration::from_millis(50), ..Times::default() };
    let server = with_times(Manner::Containerd, times);
    server.hold_ended(true);
    let _main = waiting(&server, "exit 3");
    while server.held() == 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
    let attach = refused(&server, "GET /containers/c-42/processes/p1", "");
    assert!(attach.contains("\"Message\":\"proc not running: status = stopped\""), "{attach}");
    let stop = refused(&server, "PUT /containers/c-42/stop", "{\"kill\":true}");
    assert!(stop.contains("grace period timeout\""), "{stop}");
}
