//! Wire tests of the simulated Baggageclaim server: the answers that a genuine server was seen to
//! give.

use gantry_testing::baggageclaim::{Driver, Faults, Server};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

struct Answer {
    status: u16,
    kind: Option<String>,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }
}

/// Sends a request. `None`: the server closed the connection without an answer.
async fn ask(server: &Server, head: &str, body: &[u8]) -> Option<Answer> {
    let mut stream = TcpStream::connect(server.address()).await.expect("a connection");
    let (line, headers) = head.split_once('\n').unwrap_or((head, ""));
    let headers: String = headers.lines().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    let head = format!(
        "{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).await.expect("sent");
    _ = stream.write_all(body).await; // It may have answered already.
    let mut bytes = Vec::new();
    _ = stream.read_to_end(&mut bytes).await;
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8(bytes[..end].to_vec()).expect("a head");
    let header = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let mut body = bytes[end + 4..].to_vec();
    if header("transfer-encoding: ").is_some() {
        body = unchunk(&body);
    }
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, kind: header("content-type: "), body })
}

fn unchunk(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let size =
            usize::from_str_radix(std::str::from_utf8(&rest[..end]).expect("a size"), 16).expect("a size");
        body.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 2 + size + 2..];
        if size == 0 {
            break;
        }
    }
    body
}

async fn assert_answer(server: &Server, head: &str, body: &str, status: u16, expected: &str) {
    let answer = ask(server, head, body.as_bytes()).await.unwrap_or_else(|| panic!("no answer to {head}"));
    assert_eq!((answer.status, answer.text()), (status, expected), "{head} {body}");
}

async fn create(server: &Server, json: &str) {
    let answer = ask(server, "POST /volumes", json.as_bytes()).await.expect("an answer");
    assert_eq!((answer.status, answer.kind.as_deref()), (201, Some("application/json")));
}

const NOT_CREATED: &str = "{\"error\":\"failed to create volume\"}\n";

#[tokio::test]
async fn futures() {
    let server = Server::start(Driver::Naive).await;
    let json = r#"{"handle":"v","strategy":{"type":"empty"},"properties":{}}"#;
    assert_answer(&server, "GET /volumes-async/v", "", 404, "").await;
    assert_answer(&server, "POST /volumes-async", json, 201, "{\"handle\":\"v\"}\n").await;
    let twice = "{\"error\":\"promise already exists in list\"}\n";
    assert_answer(&server, "POST /volumes-async", json, 500, twice).await;
    assert_eq!(ask(&server, "GET /volumes-async/v", b"").await.unwrap().status, 200);
    assert_answer(&server, "DELETE /volumes-async/v", "", 204, "").await;
    assert_answer(&server, "DELETE /volumes-async/v", "", 404, "").await;

    let orphan = r#"{"handle":"w","strategy":{"type":"cow","volume":"missing"},"properties":{}}"#;
    assert_answer(&server, "POST /volumes-async", orphan, 201, "{\"handle\":\"w\"}\n").await;
    assert_answer(&server, "GET /volumes-async/w", "", 422, NOT_CREATED).await;
    server.restart();
    assert_answer(&server, "GET /volumes-async/w", "", 404, "").await;

    server.set_faults(Faults { never_create: true, ..Faults::default() });
    assert_answer(&server, "POST /volumes-async", orphan, 201, "{\"handle\":\"w\"}\n").await;
    assert_answer(&server, "GET /volumes-async/w", "", 204, "").await;
}

#[tokio::test]
async fn creation_and_its_errors_match_genuine_server() {
    let server = Server::start(Driver::Naive).await;
    for (json, status) in [
        ("nonsense", 400),
        ("{}", 422),
        (r#"{"strategy":null}"#, 422),
        (r#"{"strategy":{"type":"odd"}}"#, 422),
        (r#"{"strategy":{"type":"cow"}}"#, 422),
        (r#"{"strategy":{"type":"import","path":"/nonexistent"}}"#, 500),
    ] {
        assert_answer(&server, "POST /volumes", json, status, NOT_CREATED).await;
    }
    create(&server, r#"{"handle":"v","strategy":{"type":"empty"},"properties":{"k":"v"}}"#).await;
    assert_answer(
        &server,
        "POST /volumes",
        r#"{"handle":"v","strategy":{"type":"empty"}}"#,
        500,
        NOT_CREATED,
    )
    .await;
    let two = "{\"error\":\"a property may only have a single value: k has many (v, w)\"}\n";
    assert_answer(&server, "GET /volumes?k=v&k=w", "", 422, two).await;
    assert_answer(&server, "GET /volumes?k=w", "", 200, "[]\n").await;
    assert_answer(&server, "GET /volumes/x", "", 404, "{\"error\":\"failed to get volume\"}\n").await;
    let kind = ask(&server, "GET /volumes/x", b"").await.unwrap().kind;
    assert_eq!(kind.as_deref(), Some("text/plain; charset=utf-8"), "wrong, as that of the genuine server");
}

#[tokio::test]
async fn overlay_empties_recreated_volumes_and_orphaned_children() {
    let server = Server::start(Driver::Overlay).await;
    create(&server, r#"{"handle":"p","strategy":{"type":"empty"},"properties":{}}"#).await;
    std::fs::write(server.path("p").join("file"), "x").unwrap();
    create(&server, r#"{"handle":"c","strategy":{"type":"cow","volume":"p"},"properties":{}}"#).await;
    assert!(server.path("c").join("file").exists());
    assert_answer(&server, "DELETE /volumes/p", "", 204, "").await;
    assert!(!server.path("c").join("file").exists());

    std::fs::write(server.path("c").join("file"), "x").unwrap();
    assert_answer(
        &server,
        "POST /volumes",
        r#"{"handle":"c","strategy":{"type":"empty"}}"#,
        500,
        NOT_CREATED,
    )
    .await;
    assert!(!server.path("c").join("file").exists());
    assert_answer(&server, "DELETE /volumes/destroy", r#"["c","unknown"]"#, 204, "").await;
}

#[tokio::test]
async fn setting_property_crashes_when_properties_are_null() {
    let server = Server::start(Driver::Naive).await;
    create(&server, r#"{"handle":"v","strategy":{"type":"empty"},"properties":null}"#).await;
    assert!(ask(&server, "PUT /volumes/v/properties/k", br#"{"value":"x"}"#).await.is_none());
}

#[tokio::test]
async fn archives_have_the_ids_of_the_container() {
    use std::os::unix::fs::{MetadataExt as _, chown};
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    const MAPPED_ROOT: u32 = 4_294_967_294;
    let server = Server::with_ids(Driver::Naive).await;
    let owner = |volume: &str, name: &str| {
        let metadata = server.path(volume).join(name).symlink_metadata().expect("it is there");
        (metadata.uid(), metadata.gid())
    };
    for (name, more, expected) in [
        ("pair", r#","uid":7,"gid":8"#, (7, 8)),
        ("user", r#","uid":7"#, (MAPPED_ROOT, MAPPED_ROOT)),
        ("group", r#","gid":8"#, (MAPPED_ROOT, MAPPED_ROOT)),
        ("neither", r#","uid":-1,"gid":8"#, (MAPPED_ROOT, MAPPED_ROOT)),
        ("root", r#","uid":0,"gid":0"#, (MAPPED_ROOT, MAPPED_ROOT)),
        ("host", r#","uid":0,"gid":0,"privileged":true"#, (0, 0)),
    ] {
        let json = format!(r#"{{"handle":"{name}","strategy":{{"type":"empty"}},"properties":{{}}{more}}}"#);
        create(&server, &json).await;
        assert_eq!(owner(name, ""), expected, "{name}");
        let told = ask(&server, &format!("GET /volumes/{name}"), b"").await.expect("an answer");
        assert!(!told.text().contains("uid"), "the server does not store the owner: {}", told.text());
    }

    // Files of the container's root belong to root in the archive. Other owners stay unchanged.
    let root = server.path("neither");
    for (name, (uid, gid)) in [("root", (MAPPED_ROOT, MAPPED_ROOT)), ("user", (1000, 50))] {
        std::fs::write(root.join(name), name).expect("write");
        chown(root.join(name), Some(uid), Some(gid)).expect("change the owner");
    }
    let out = "PUT /volumes/neither/stream-out?path=.\nAccept-Encoding: raw";
    let tar = ask(&server, out, b"").await.expect("an answer").body;
    let ids = |name: &str| {
        let at = tar.windows(name.len() + 1).position(|window| window == format!("{name}\0").as_bytes());
        let head = &tar[at.expect("an entry")..];
        [&head[108..115], &head[116..123], &head[265..266]]
            .map(|field| String::from_utf8_lossy(field).into_owned())
    };
    assert_eq!(ids("./root"), ["0000000", "0000000", "\0"], "without names");
    assert_eq!(ids("./user"), ["0001750", "0000062", "\0"]);
    let into = "PUT /volumes/group/stream-in\nContent-Encoding: raw";
    assert_eq!(ask(&server, into, &tar).await.expect("an answer").status, 204);
    assert_eq!((owner("group", "root"), owner("group", "user")), ((MAPPED_ROOT, MAPPED_ROOT), (1000, 50)));
    for (privileged, expected) in [(true, 0), (false, MAPPED_ROOT)] {
        let body = format!(r#"{{"value":{privileged}}}"#);
        assert_answer(&server, "PUT /volumes/group/privileged", &body, 204, "").await;
        assert_eq!((owner("group", "root").0, owner("group", "user").0), (expected, 1000));
    }
}

#[tokio::test]
async fn streams() {
    let server = Server::start(Driver::Naive).await;
    create(&server, r#"{"handle":"v","strategy":{"type":"empty"},"properties":{}}"#).await;
    std::fs::write(server.path("v").join("file"), "contents").unwrap();

    let refused = "{\"error\":\"failed to stream out from volume\"}\n";
    assert_answer(&server, "PUT /volumes/v/stream-out", "", 400, refused).await;
    assert_answer(&server, "PUT /volumes/v/stream-out\nAccept-Encoding: gzip, deflate", "", 400, refused)
        .await;
    let missing = "{\"error\":\"no such file or directory\"}\n";
    assert_answer(&server, "PUT /volumes/v/stream-out?path=x\nAccept-Encoding: raw", "", 404, missing).await;
    let tar = ask(&server, "PUT /volumes/v/stream-out?path=.\nAccept-Encoding: raw", b"").await.unwrap();
    assert_eq!(&tar.body[..3], b"./\0");
    server.set_faults(Faults { fail_archives: true, ..Faults::default() });
    let failed = ask(&server, "PUT /volumes/v/stream-out\nAccept-Encoding: raw", b"").await.unwrap();
    assert_eq!(failed.status, 200);
    assert!(failed.body.ends_with(refused.as_bytes()));

    let refused = "{\"error\":\"failed to stream in to volume\"}\n";
    assert_answer(&server, "PUT /volumes/v/stream-in", "", 400, refused).await;
    assert_answer(&server, "PUT /volumes/v/stream-in\nContent-Encoding: raw", "", 400, refused).await;
    assert_answer(&server, "PUT /volumes/x/stream-in\nContent-Encoding: raw", "", 404, refused).await;
    let invalid = "{\"error\":\"invalid limit abc\"}\n";
    assert_answer(&server, "PUT /volumes/v/stream-in?limit=abc\nContent-Encoding: raw", "", 400, invalid)
        .await;
    let into = "PUT /volumes/v/stream-in?path=../../sub\nContent-Encoding: raw";
    assert_eq!(ask(&server, into, &tar.body).await.unwrap().status, 204);
    assert!(server.path("v").join("sub/file").exists(), "dots are removed from the path");

    let over = "PUT /volumes/v/stream-in?path=over&limit=0.002\nContent-Encoding: raw";
    let over = ask(&server, over, &tar.body).await.unwrap();
    let expected = "{\"error\":\"exceeded volume streaming limit of 2097B\"}\n";
    assert_eq!((over.status, over.text()), (403, expected));
    assert!(server.path("v").join("over/file").exists(), "unpacked files stay");

    assert_answer(
        &server,
        "PUT /volumes/v/stream-p2p-out?path=.",
        "",
        400,
        "{\"error\":\"failed to stream p2p out from volume\"}\n",
    )
    .await;
    let p2p = "PUT /volumes/v/stream-p2p-out?path=.&streamInURL=nonsense&encoding=raw";
    let p2p = ask(&server, p2p, b"").await.unwrap();
    assert_eq!((p2p.status, p2p.kind.as_deref()), (200, Some("plain/text")));
    let expected = "failed to stream p2p out from volume: parse \"nonsense\": missing protocol scheme";
    assert_eq!(p2p.text().trim(), expected);
}
