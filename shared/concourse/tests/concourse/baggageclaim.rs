//! Tests of the Baggageclaim client against a simulated server with the quirks of the genuine one.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use gantry_concourse::baggageclaim::{
    Archive, ArchiveError, Client, Encoded, Encoding, Error, Handle, Strategy, StreamIn, Timeouts,
    VolumeRequest,
};
use testing::baggageclaim::{Driver, Faults, Server};
use tokio::io::AsyncReadExt as _;

/// Id of root in unprivileged volumes, on the host.
const MAPPED_ROOT: u32 = 4_294_967_294;

fn client(server: &Server) -> Client {
    Client::new(&server.address().to_string(), Timeouts::default())
}

fn handle(name: &str) -> Handle {
    Handle::new(name).expect("a good handle")
}

async fn empty(client: &Client, name: &str) -> Handle {
    let request = VolumeRequest::new(handle(name), Strategy::Empty);
    handle(&client.create(&request).await.expect("a volume").handle)
}

#[tokio::test]
async fn creation_outcome_can_be_deleted_later() {
    let server = Server::start(Driver::Overlay).await;
    let client = client(&server);
    let request = VolumeRequest::new(handle("volume"), Strategy::Empty);
    let (volume, outcome) = client.create_with_outcome(&request).await.expect("a volume");
    assert_eq!(volume.path, server.path("volume").display().to_string());
    let forgets = || server.requests().iter().filter(|line| line.starts_with("DELETE ")).count();
    assert_eq!(forgets(), 0, "{:?}", server.requests());

    // Meanwhile the client must not create the volume again, because deleting the outcome would
    // cancel that creation.
    let mut again = std::pin::pin!(client.create(&request));
    let soon = tokio::time::timeout(Duration::from_millis(100), &mut again).await;
    assert!(soon.is_err(), "{soon:?}");
    outcome.delete().await;
    assert_eq!(forgets(), 1);
    let again = again.await;
    assert!(matches!(again, Err(Error::AlreadyExists)), "{again:?}");
}

/// A tar archive with one file.
fn archive(contents: &[u8]) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::write(directory.path().join("file"), contents).expect("a file");
    tar(directory.path())
}

fn tar(directory: &Path) -> Vec<u8> {
    let tar = std::process::Command::new("tar").args(["-c", "-C"]).arg(directory).arg(".").output();
    tar.expect("tar is installed").stdout
}

/// Contents with two blocks of zeros, which are not the end of the archive.
fn contents() -> Vec<u8> {
    let mut contents = vec![0; 4096];
    contents.extend((0..300_000_u32).flat_map(|i| (i / 7).to_le_bytes()));
    contents
}

async fn fill(client: &Client, volume: &Handle, encoding: Encoding, contents: &[u8]) -> Result<(), Error> {
    let archive = Encoded::new(encoding, io::Cursor::new(archive(contents))).expect("an encoder");
    client.stream_in(volume, &StreamIn::new(encoding), archive).await
}

async fn read(client: &Client, volume: &Handle, path: &str, encoding: Encoding) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut archive = client.stream_out(volume, path, encoding).await.map_err(io::Error::other)?;
    archive.read_to_end(&mut bytes).await.map(|_| bytes)
}

fn why(error: &io::Error) -> Option<&ArchiveError> {
    error.get_ref()?.downcast_ref()
}

#[tokio::test]
async fn archives_survive_a_round_trip_in_every_encoding() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    for encoding in Encoding::ALL {
        let volume = empty(&client, encoding.as_str()).await;
        fill(&client, &volume, encoding, &contents()).await.expect("unpacked");
        assert!(std::fs::read(server.path(encoding.as_str()).join("file")).unwrap() == contents());

        let read = read(&client, &volume, "file", encoding).await.expect("a whole archive");
        let start = &contents()[..4096 + 64];
        let position = read.windows(start.len()).position(|window| window == start);
        assert!(position.is_some(), "{encoding:?}");
    }
}

#[tokio::test]
async fn archive_is_unpacked_below_a_path() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    let how = StreamIn { path: "a/b c".to_owned(), ..StreamIn::new(Encoding::Raw) };
    client.stream_in(&volume, &how, io::Cursor::new(archive(b"below"))).await.expect("unpacked");
    assert_eq!(std::fs::read(server.path("v").join("a/b c/file")).expect("it is there"), b"below");
    assert!(!server.path("v").join("file").exists());
}

#[tokio::test]
async fn trailing_error_is_detected_in_every_encoding() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    fill(&client, &volume, Encoding::Raw, &contents()).await.expect("unpacked");
    server.set_faults(Faults { fail_archives: true, ..Faults::default() });
    for encoding in Encoding::ALL {
        let error = read(&client, &volume, "", encoding).await.expect_err("the archive failed");
        let text = "failed to stream out from volume";
        assert!(
            matches!(why(&error), Some(ArchiveError::Failed(message)) if message == text),
            "{encoding:?}: {error:?}"
        );
    }
}

#[tokio::test]
async fn truncated_archive_is_detected_in_every_encoding() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    fill(&client, &volume, Encoding::Raw, &contents()).await.expect("unpacked");
    server.set_faults(Faults { cut_archives: true, ..Faults::default() });
    for encoding in Encoding::ALL {
        read(&client, &volume, "", encoding).await.expect_err("the archive is truncated");
    }
}

#[tokio::test]
async fn every_shorter_archive_is_truncated() {
    for encoding in Encoding::ALL {
        let mut whole = Vec::new();
        let tar = io::Cursor::new(archive(b"some contents"));
        Encoded::new(encoding, tar).unwrap().read_to_end(&mut whole).await.unwrap();
        // The padding after the two blocks of zeros may be short.
        let least = if encoding == Encoding::Raw { 512 * 4 } else { whole.len() };
        for length in (0..least).step_by(13) {
            let mut archive = Archive::new(encoding, &whole[..length]);
            let read = archive.read_to_end(&mut Vec::new()).await;
            assert!(read.is_err(), "{encoding:?} of {length} bytes out of {}", whole.len());
        }
        let mut archive = Archive::new(encoding, &whole[..]);
        archive.read_to_end(&mut Vec::new()).await.expect("all of it");
    }
}

#[tokio::test]
async fn decoded_archives_end_like_tar() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("d".repeat(120)).join("e".repeat(120));
    std::fs::create_dir_all(&long).unwrap();
    std::fs::write(long.join("file"), contents()).unwrap();
    std::os::unix::fs::symlink("x".repeat(150), directory.path().join("link")).unwrap();
    std::fs::hard_link(long.join("file"), directory.path().join("other")).unwrap();
    // A sparse file with many holes has extra map blocks.
    let sparse = std::fs::File::create(directory.path().join("sparse")).unwrap();
    for i in 0..100 {
        std::os::unix::fs::FileExt::write_at(&sparse, &[1; 4096], i * 65536).unwrap();
    }
    for options in
        [&["--format=gnu"][..], &["--format=posix"], &["--format=gnu", "-S"], &["--format=posix", "-S"]]
    {
        let mut tar = std::process::Command::new("tar");
        let tar =
            tar.args(options).args(["-c", "-C"]).arg(directory.path()).arg(".").output().unwrap().stdout;
        let mut read = Vec::new();
        Archive::new(Encoding::Raw, &tar[..]).read_to_end(&mut read).await.expect("a whole archive");
        assert!(read == tar, "{options:?}");

        let message = b"{\"error\":\"failed to stream out from volume\"}\n";
        for cut in [700, 20_000, tar.len()] {
            let failed = [&tar[..cut], message].concat();
            let error = Archive::new(Encoding::Raw, &failed[..]).read_to_end(&mut read).await.unwrap_err();
            assert!(matches!(why(&error), Some(ArchiveError::Failed(_))), "{options:?} {cut}: {error:?}");
        }
        let followed = [&tar[..], b"x"].concat();
        let error = Archive::new(Encoding::Raw, &followed[..]).read_to_end(&mut read).await.unwrap_err();
        assert!(matches!(why(&error), Some(ArchiveError::Broken(_))), "{options:?}: {error:?}");
    }
}

#[tokio::test]
async fn creation_over_existing_volume_is_rejected() {
    let server = Server::start(Driver::Overlay).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    fill(&client, &volume, Encoding::Gzip, b"kept").await.expect("unpacked");

    let again = client.create(&VolumeRequest::new(volume, Strategy::Empty)).await;

    assert!(matches!(again, Err(Error::AlreadyExists)), "{again:?}");
    assert_eq!(std::fs::read(server.path("v").join("file")).unwrap(), b"kept");
}

#[tokio::test]
async fn concurrent_creations_create_one_volume() {
    let server = Server::start(Driver::Overlay).await;
    let client = client(&server);
    let request = VolumeRequest::new(handle("v"), Strategy::Empty);
    let (one, other) = tokio::join!(client.create(&request), client.create(&request));
    assert_eq!([&one, &other].iter().filter(|made| made.is_ok()).count(), 1);
    assert!([&one, &other].iter().any(|made| matches!(made, Err(Error::AlreadyExists))));
}

#[tokio::test]
async fn creation_with_lost_answer_is_not_repeated() {
    let server = Server::start(Driver::Overlay).await;
    let client = client(&server);
    for lost in ["POST /volumes-async", "GET /volumes-async", "DELETE /volumes-async"] {
        server.set_faults(Faults { lose_answers: Some((lost.to_owned(), 1)), ..Faults::default() });
        let name = lost.split(' ').next().unwrap();
        empty(&client, name).await;
        assert!(
            matches!(client.cancel_creation(&handle(name)).await, Err(Error::NotFound)),
            "the outcome was deleted"
        );
    }
    assert_eq!(server.requests().iter().filter(|request| request.starts_with("POST")).count(), 3);
}

#[tokio::test]
async fn endless_creation_is_cancelled() {
    let server = Server::start(Driver::Naive).await;
    server.set_faults(Faults { never_create: true, ..Faults::default() });
    let timeouts = Timeouts { creation: Duration::from_millis(200), ..Timeouts::default() };
    let client = Client::new(&server.address().to_string(), timeouts);
    let made = client.create(&VolumeRequest::new(handle("v"), Strategy::Empty)).await;
    assert!(matches!(made, Err(Error::Lost(_))), "{made:?}");
    assert!(server.requests().contains(&"DELETE /volumes-async/v".to_owned()));
}

#[tokio::test]
async fn creation_is_lost_when_server_restarts() {
    let server = Server::start(Driver::Naive).await;
    server.set_faults(Faults { never_create: true, ..Faults::default() });
    let client = client(&server);
    let request = VolumeRequest::new(handle("v"), Strategy::Empty);
    let restart = async {
        while !server.requests().contains(&"GET /volumes-async/v".to_owned()) {
            tokio::task::yield_now().await;
        }
        server.restart();
    };
    let (made, ()) = tokio::join!(client.create(&request), restart);
    assert!(matches!(made, Err(Error::Lost(_))), "{made:?}");
    assert_eq!(server.requests().iter().filter(|request| request.starts_with("POST")).count(), 1);
}

#[tokio::test]
async fn unknown_parent_is_rejected() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let strategy = Strategy::Cow { volume: handle("missing") };
    let made = client.create(&VolumeRequest::new(handle("v"), strategy)).await;
    assert!(matches!(&made, Err(Error::Refused { status, .. }) if status.as_u16() == 422), "{made:?}");
    assert!(server.requests().contains(&"DELETE /volumes-async/v".to_owned()), "its outcome is dropped");
}

#[tokio::test]
async fn limit_error_is_read_during_upload() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    let how = StreamIn { limit_mib: 0.5, ..StreamIn::new(Encoding::Raw) };
    let sent = client.stream_in(&volume, &how, tokio::io::repeat(7)).await;
    let text = "exceeded volume streaming limit of 524288B";
    assert!(matches!(&sent, Err(Error::LimitExceeded(message)) if message == text), "{sent:?}");
}

#[tokio::test]
async fn limit_applies_to_encoded_bytes() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    // A tenth of the size before compression.
    let how = |encoding| StreamIn { limit_mib: 0.1, ..StreamIn::new(encoding) };
    let sent = async |encoding| {
        let archive = Encoded::new(encoding, io::Cursor::new(archive(&[7; 1 << 20]))).expect("an encoder");
        client.stream_in(&volume, &how(encoding), archive).await
    };
    for encoding in [Encoding::Gzip, Encoding::Zstd, Encoding::S2] {
        sent(encoding).await.unwrap_or_else(|error| panic!("{encoding:?}: {error}"));
    }
    let over = sent(Encoding::Raw).await;
    assert!(matches!(over, Err(Error::LimitExceeded(_))), "{over:?}");
}

#[tokio::test]
async fn unresponsive_server_times_out() {
    let server = Server::start(Driver::Naive).await;
    let timeouts = Timeouts { answer: Duration::from_millis(100), ..Timeouts::default() };
    let client = Client::new(&server.address().to_string(), timeouts);
    let volume = handle("v");
    client.create(&VolumeRequest::new(volume.clone(), Strategy::Empty)).await.expect("a volume");
    let stalled =
        |what: &str| server.set_faults(Faults { stalls: Some(what.to_owned()), ..Faults::default() });
    stalled("PUT /volumes/v/properties");
    let set = client.set_property(&volume, "name", "value").await;
    assert!(matches!(set, Err(Error::Lost(_))), "it may have been done: {set:?}");
    stalled("PUT /volumes/v/stream-out");
    let read = client.stream_out(&volume, "", Encoding::Raw).await.map(|_| ());
    assert!(matches!(read, Err(Error::Lost(_))), "{read:?}");
    stalled("PUT /volumes/v/stream-in");
    let sent =
        client.stream_in(&volume, &StreamIn::new(Encoding::Raw), tokio::io::repeat(0).take(10_240)).await;
    assert!(matches!(sent, Err(Error::Lost(_))), "it may have been unpacked: {sent:?}");
    // The lost answer created nothing, and no volume is created twice.
    stalled("GET /volumes-async/w");
    let timeouts = Timeouts { creation: Duration::from_millis(500), ..timeouts };
    let client = Client::new(&server.address().to_string(), timeouts);
    let made = client.create(&VolumeRequest::new(handle("w"), Strategy::Empty)).await;
    assert!(matches!(made, Err(Error::Lost(_))), "{made:?}");
    let posts = server.requests().iter().filter(|request| request.starts_with("POST")).count();
    assert_eq!(posts, 2);
}

#[tokio::test]
async fn empty_and_unreadable_archives_have_distinct_errors() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    for encoding in Encoding::ALL {
        let sent = client.stream_in(&volume, &StreamIn::new(encoding), tokio::io::empty()).await;
        assert!(matches!(sent, Err(Error::Refused { .. })), "{encoding:?}: {sent:?}");
    }
    let broken = failing();
    let sent = client.stream_in(&volume, &StreamIn::new(Encoding::Raw), broken).await;
    assert!(matches!(sent, Err(Error::Source(_))), "{sent:?}");
}

/// Returns a thousand bytes, and then an error.
fn failing() -> impl tokio::io::AsyncRead + Send + 'static {
    struct Broken;
    impl tokio::io::AsyncRead for Broken {
        fn poll_read(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
            _: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<io::Result<()>> {
            std::task::Poll::Ready(Err(io::Error::other("a bad disk")))
        }
    }
    tokio::io::repeat(0).take(1000).chain(Broken)
}

#[tokio::test]
async fn paths_stay_in_their_volume() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    let before = server.requests().len();
    for path in ["..", "a/../../b", "/etc"] {
        let read = client.stream_out(&volume, path, Encoding::Raw).await.map(|_| ());
        assert!(matches!(read, Err(Error::Invalid(_))), "{path}");
    }
    let how = StreamIn { path: "a..b".to_owned(), ..StreamIn::new(Encoding::Raw) };
    let sent = client.stream_in(&volume, &how, tokio::io::empty()).await;
    assert!(matches!(sent, Err(Error::Invalid(_))));
    assert_eq!(server.requests().len(), before, "nothing was asked");
    for name in ["", ".", "..", "destroy", "work", "a/b", "a b"] {
        assert!(Handle::new(name).is_err(), "{name}");
    }
}

#[tokio::test]
async fn missing_path_and_missing_volume_differ() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let volume = empty(&client, "v").await;
    let path = client.stream_out(&volume, "a b&c", Encoding::Raw).await.map(|_| ());
    assert!(matches!(path, Err(Error::NoSuchPath)), "{path:?}");
    let unknown = client.stream_out(&handle("w"), "", Encoding::Raw).await.map(|_| ());
    assert!(matches!(unknown, Err(Error::NotFound)), "{unknown:?}");
    assert!(matches!(client.get(&handle("w")).await, Err(Error::NotFound)));
}

#[tokio::test]
async fn properties_and_privilege_can_be_changed() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    let (one, _other) = (empty(&client, "one").await, empty(&client, "other").await);
    client.set_property(&one, "owner of/this", "me & you").await.expect("set");
    let found = client.list(&[("owner of/this", "me & you")]).await.expect("a list");
    assert_eq!(found.iter().map(|volume| &*volume.handle).collect::<Vec<_>>(), ["one"]);
    assert_eq!(client.list(&[]).await.unwrap().len(), 2);
    let twice = client.list(&[("name", "a"), ("name", "b")]).await;
    assert!(matches!(twice, Err(Error::Invalid(_))), "the worker would refuse it: {twice:?}");

    assert!(!client.privileged(&one).await.unwrap());
    client.set_privileged(&one, true).await.expect("set");
    assert!(client.privileged(&one).await.unwrap());

    client.destroy_many(&[one.clone(), handle("unknown")]).await.expect("destroyed");
    assert!(matches!(client.destroy(&one).await, Err(Error::NotFound)));
}

/// The owner of a file on disk.
fn owner(path: &Path) -> (u32, u32) {
    let metadata = path.symlink_metadata().expect("it is there");
    (metadata.uid(), metadata.gid())
}

#[tokio::test]
async fn volume_owner_needs_user_and_group() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    let server = Server::with_ids(Driver::Overlay).await;
    let client = client(&server);
    let parent = empty(&client, "parent").await;
    fill(&client, &parent, Encoding::Raw, b"contents").await.expect("unpacked");
    // Root of the container has another id on the host.
    for (name, given, on_disk) in [
        ("user", (1000, 2000), (1000, 2000)),
        ("root", (0, 0), (MAPPED_ROOT, MAPPED_ROOT)),
        ("both", (0, 50), (MAPPED_ROOT, 50)),
    ] {
        let strategy = Strategy::Cow { volume: parent.clone() };
        let request = VolumeRequest { owner: Some(given), ..VolumeRequest::new(handle(name), strategy) };
        client.create(&request).await.expect("a volume");
        for path in [server.path(name), server.path(name).join("file")] {
            assert_eq!(owner(&path), on_disk, "{name}: {path:?}");
        }
        let asked = server.creations().pop().expect("a creation");
        assert_eq!(
            (asked["uid"].as_u64(), asked["gid"].as_u64()),
            (Some(given.0.into()), Some(given.1.into()))
        );
        // Later files have the owner of their archive, because the server does not store the owner.
        fill(&client, &handle(name), Encoding::Raw, b"later").await.expect("unpacked");
        assert_eq!(owner(&server.path(name).join("file")), (MAPPED_ROOT, MAPPED_ROOT), "{name}");
    }
    empty(&client, "plain").await;
    let asked = server.creations().pop().expect("a creation");
    assert!(asked.get("uid").is_none() && asked.get("gid").is_none(), "neither alone: {asked}");
}

#[tokio::test]
async fn clean_up_succeeds_on_old_worker() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    client.clean_up().await.expect("cleaned up");
    server.set_faults(Faults { no_cleanup: true, ..Faults::default() });
    client.clean_up().await.expect("left alone");
}

#[tokio::test]
async fn peer_transfer_result_comes_from_text() {
    let (source, destination) = (Server::start(Driver::Naive).await, Server::start(Driver::Naive).await);
    let (from, to) = (client(&source), client(&destination));
    let volume = empty(&from, "s").await;
    fill(&from, &volume, Encoding::Zstd, b"moved").await.expect("unpacked");
    let target = empty(&to, "d").await;
    let how = StreamIn::new(Encoding::S2);

    let url = to.p2p_url().await.expect("an address").stream_in(&target, &how).expect("a URL");
    from.stream_p2p_out(&volume, "", &url, Encoding::S2).await.expect("moved");
    assert_eq!(std::fs::read(destination.path("d").join("file")).unwrap(), b"moved");

    let moved = from.stream_p2p_out(&handle("unknown"), "", &url, Encoding::S2).await;
    let text = "failed to stream p2p out from volume: volume does not exist";
    assert!(matches!(&moved, Err(Error::Transfer(message)) if message == text), "{moved:?}");
}

#[tokio::test]
async fn ipv6_addresses_get_missing_brackets() {
    let server = Server::start(Driver::Naive).await;
    let client = client(&server);
    for (said, meant) in [
        ("http://10.0.0.7:7788", Some("http://10.0.0.7:7788")),
        ("http://fd00::7:7788", Some("http://[fd00::7]:7788")),
        ("http://[fd00::7]:7788", Some("http://[fd00::7]:7788")),
        ("http://fe80::1%eth0:7788", None),
        ("nonsense", None),
    ] {
        server.set_faults(Faults { p2p_url: Some(said.to_owned()), ..Faults::default() });
        let url = client.p2p_url().await;
        assert_eq!(url.as_ref().ok().map(|url| url.as_str()), meant, "{url:?}");
    }
}
