//! Tests of transfers as archives.

use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::process::Command;

use bytes::Bytes;
use rpc::pb::runtime::read_archive_response::Message as ReadAnswer;
use rpc::pb::runtime::write_archive_request::Message as ArchiveMessage;
use transfer::{ArchiveReader, ArchiveWriter, Limits, Manifest};

use super::*;

/// Most bytes of one message.
const CHUNK: usize = 64 << 10;

/// Makes a tree with every kind of entry that a user can make.
fn everything(root: &Path) {
    std::fs::create_dir_all(root.join("directory/empty")).expect("directories");
    std::fs::write(root.join("directory/file"), "content").expect("write");
    let large: Vec<u8> = (0..2_500_000_u32).map(|at| (at % 251) as u8).collect();
    std::fs::write(root.join("large"), &large).expect("write");
    std::fs::write(root.join("directory/same"), &large).expect("write");
    std::fs::hard_link(root.join("large"), root.join("directory/link")).expect("link");
    symlink("../large", root.join("directory/symbolic")).expect("link");
    symlink("/etc/passwd", root.join("absolute")).expect("link");
    std::fs::write(root.join(format!("{}/{}", "directory", "n".repeat(200))), "long").expect("write");
    let holes = std::fs::File::create(root.join("holes")).expect("make");
    holes.set_len(5 << 20).expect("resize");
    std::os::unix::fs::FileExt::write_all_at(&holes, b"in the middle", 2 << 20).expect("write");
}

fn scanned(root: &Path) -> Arc<Manifest> {
    Arc::new(transfer::scan(root, &transfer::ScanOptions::default(), None).expect("a manifest").manifest)
}

/// Returns the archive that the gateway should send.
fn packed(root: &Path, manifest: &Arc<Manifest>) -> Vec<u8> {
    let mut writer = ArchiveWriter::new(Vec::new(), manifest.clone());
    let options = transfer::ReadOptions::default();
    let mut reader = transfer::TreeReader::new(root, manifest.clone(), options).expect("a reader");
    for ordinal in 0..manifest.extent_count() {
        writer.put(ordinal, &reader.read(ordinal).expect("content")).expect("the next");
    }
    writer.finish().expect("whole")
}

/// Sends an archive in pieces, with or without a commit.
async fn send(
    endpoint: &pb::TransferEndpoint,
    archive: &[u8],
    commit: bool,
) -> Result<runtime_pb::WriteArchiveResponse, Refusal> {
    let open = ArchiveMessage::Open(runtime_pb::WriteOpen { ticket: endpoint.ticket.clone() });
    let data = archive.chunks(CHUNK).map(|piece| ArchiveMessage::Data(Bytes::copy_from_slice(piece)));
    let end = commit.then_some(ArchiveMessage::Commit(runtime_pb::WriteCommit {}));
    let said: Vec<_> = std::iter::once(open)
        .chain(data)
        .chain(end)
        .map(|message| runtime_pb::WriteArchiveRequest { message: Some(message) })
        .collect();
    let gateway = peer(&endpoint.gateway_endpoint, Outgoing::default()).expect("an address");
    Ok(VolumesClient::new(gateway).write_archive(tokio_stream::iter(said)).await?.into_inner())
}

/// Receives the archive of a directory, and the digest at its end.
async fn receive(suite: &Suite, artifact: ArtifactId, path: &str) -> Result<(Vec<u8>, Bytes), Refusal> {
    let request = pb::DownloadRequest {
        team: "main".to_owned(),
        artifact_id: artifact.to_string(),
        ..pb::DownloadRequest::default()
    };
    let found = StreamerClient::new(suite.peer.clone()).download(request).await?.into_inner();
    let endpoint = found.endpoint.expect("where to read");
    let gateway = peer(&endpoint.gateway_endpoint, Outgoing::default()).expect("an address");
    let request = runtime_pb::ReadArchiveRequest { ticket: endpoint.ticket, path: path.to_owned().into() };
    let mut answers = VolumesClient::new(gateway).read_archive(request).await?.into_inner();
    let mut archive = Vec::new();
    loop {
        match answers.message().await?.expect("the stream is complete").message.expect("a message") {
            ReadAnswer::Data(data) => archive.extend_from_slice(&data),
            ReadAnswer::Done(done) => return Ok((archive, done.digest)),
        }
    }
}

/// Uploads an archive and seals it. Returns the artifact and its digest.
async fn upload(suite: &Suite, archive: &[u8]) -> (ArtifactId, Digest) {
    let artifact = ArtifactId::new();
    let (mut upload, answer) = suite.open_when_possible(artifact, None).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    let written = send(&endpoint, archive, true).await.expect("written");
    let digest = Digest::try_from(written.digest.as_ref()).expect("a digest");
    upload.commit(digest).await.expect("sealed");
    (artifact, digest)
}

/// Lists the volumes on the worker.
fn volumes(suite: &Suite) -> Vec<std::ffi::OsString> {
    let names = std::fs::read_dir(suite.directory.path().join("worker/volumes")).expect("list");
    names.map(|entry| entry.expect("an entry").file_name()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn archive_survives_upload_and_download() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let root = suite.directory.path().join("tree");
    everything(&root);
    let manifest = scanned(&root);
    let archive = packed(&root, &manifest);
    let (artifact, digest) = upload(&suite, &archive).await;
    assert_eq!(digest, manifest.tree_digest());
    let (again, said) = receive(&suite, artifact, "").await.expect("read");
    assert_eq!(said.as_ref(), digest.as_bytes());
    assert!(again == archive, "{} and {} bytes", again.len(), archive.len());

    let (inside, said) = receive(&suite, artifact, "directory").await.expect("read");
    assert!(said.is_empty(), "a part has no digest");
    let found = ArchiveReader::new(&inside[..]).read(Limits::default(), |_| Ok(())).expect("an archive");
    let subtree = manifest.subtree(b"directory").expect("valid").expect("a directory");
    assert_eq!(found.tree_digest(), subtree.manifest().tree_digest());
    for none in ["nothing", "large", "../tree", "directory/symbolic"] {
        let refused = receive(&suite, artifact, none).await.expect_err("the directory does not exist");
        assert!(refused.is(Reason::PathNotFound), "{none}: {refused}");
    }
    // The tree is known by its digest, even though it came as an archive.
    let (_, answer) = suite.open(ArtifactId::new(), digest).await.expect("known");
    assert_eq!(answer, Answer::Uploaded(pb::Uploaded { artifact_id: artifact.to_string() }));
    suite.stop().await;
}

/// Returns archives of `root` by other programs, with their names.
fn foreign(root: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut run = |name: String, command: &mut Command| match command.current_dir(root).output() {
        Ok(output) => {
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            found.push((name, output.stdout));
        }
        Err(error) => eprintln!("without {name}: {error}"),
    };
    for format in ["gnu", "oldgnu", "pax", "posix"] {
        for sparse in [&["--sparse"][..], &[]] {
            let name = format!("tar --format={format} {sparse:?}");
            run(name, Command::new("tar").arg(format!("--format={format}")).args(sparse).args(["-c", "."]));
        }
    }
    run("tar -P".to_owned(), Command::new("tar").args(["-cP", "--transform", "s,^\\./,/,RHs", "."]));
    for format in ["GNU_FORMAT", "PAX_FORMAT"] {
        let script = format!(
            "import sys, tarfile\nwith tarfile.open(fileobj=sys.stdout.buffer, mode='w|', format=tarfile.{format}) as t: t.add('.')"
        );
        run(format!("python {format}"), Command::new("python3").args(["-c", &script]));
    }
    for format in ["pax", "gnutar"] {
        run(format!("bsdtar {format}"), Command::new("bsdtar").args(["--format", format, "-cf", "-", "."]));
    }
    found
}

/// Lists the entries of a tree, without holes and fractions of seconds, which archives do not
/// preserve uniformly.
fn listing(root: &Path) -> Vec<String> {
    let scan = scanned(root);
    let entries = scan.entries().iter().map(|entry| {
        let content = std::fs::read(root.join(entry.path()));
        let content = match &entry.kind {
            transfer::EntryKind::File { .. } => blake3::hash(&content.expect("content")).to_string(),
            kind => format!("{kind:?}"),
        };
        format!("{:?} {:o} {} {content}", entry.path(), entry.mode, entry.mtime_seconds)
    });
    entries.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn archives_are_exchanged_with_other_programs() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let root = suite.directory.path().join("tree");
    everything(&root);
    let expected = listing(&root);
    for (number, (name, archive)) in foreign(&root).into_iter().enumerate() {
        let (artifact, digest) = upload(&suite, &archive).await;
        let (ours, said) = receive(&suite, artifact, "").await.expect("read");
        assert_eq!(said.as_ref(), digest.as_bytes(), "{name}");
        let unpacked = suite.directory.path().join(format!("unpacked-{number}"));
        std::fs::create_dir(&unpacked).expect("make");
        let mut tar = Command::new("tar");
        let mut tar = tar.args(["-xp", "-C"]).arg(&unpacked).stdin(std::process::Stdio::piped()).spawn();
        let tar = tar.as_mut().expect("tar");
        tar.stdin.take().expect("a pipe").write_all(&ours).expect("tar reads");
        assert!(tar.wait().expect("tar exits").success(), "{name}");
        assert_eq!(listing(&unpacked), expected, "{name}");
    }
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_archive_leaves_nothing_and_can_be_resent() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let root = suite.directory.path().join("tree");
    tree(&root);
    std::fs::write(root.join("directory/more"), vec![7; 60_000]).expect("write");
    let manifest = scanned(&root);
    let archive = packed(&root, &manifest);
    let artifact = ArtifactId::new();
    let (mut upload, answer) = suite.open_when_possible(artifact, None).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    let before = volumes(&suite);
    // The padding at the end is not required.
    for cut in (0..archive.len() - 10_240).step_by(4096) {
        for (commit, reason) in [(true, Reason::InvalidArchive), (false, Reason::TransferTruncated)] {
            let deadline = Instant::now() + TIMEOUT;
            let refused = loop {
                let refused =
                    send(&endpoint, &archive[..cut], commit).await.expect_err("the archive is truncated");
                // The partial volume of the previous caller is still being destroyed.
                if !refused.is(Reason::Unavailable) {
                    break refused;
                }
                assert!(Instant::now() < deadline, "{refused}");
            };
            assert!(refused.is(reason), "after {cut} bytes: {refused}");
            while volumes(&suite) != before {
                assert!(Instant::now() < deadline, "after {cut} bytes: {:?}", volumes(&suite));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    let written = loop {
        match send(&endpoint, &archive, true).await {
            Err(refused) if refused.is(Reason::Unavailable) => {}
            written => break written.expect("the archive is complete"),
        }
    };
    assert_eq!(written.digest.as_ref(), manifest.tree_digest().as_bytes());
    // The same archive is only reported again. Another one is rejected.
    send(&endpoint, &archive, true).await.expect("the same");
    let empty = Arc::new(Manifest::new([manifest.entries()[0].clone()], Limits::default()).expect("valid"));
    let other = send(&endpoint, &packed(&root, &empty), true).await.expect_err("something else");
    assert!(other.is(Reason::ClaimLost), "{other}");
    upload.commit(manifest.tree_digest()).await.expect("sealed");
    suite.stop().await;
}

/// Makes a header block of an archive.
fn header(name: &str, size: u64, kind: u8) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..108].copy_from_slice(b"0000644\0");
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[148..156].fill(b' ');
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = block.iter().copied().map(u32::from).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

#[tokio::test(flavor = "multi_thread")]
async fn unsafe_and_invalid_archives_are_rejected() {
    if !may_be_a_worker() {
        return;
    }
    let suite = Suite::start(true).await;
    let (upload, answer) = suite.open_when_possible(ArtifactId::new(), None).await;
    let Answer::Endpoint(endpoint) = answer else { panic!("{answer:?}") };
    let link = |name: &str, to: &str, kind| {
        let mut block = header(name, 0, kind);
        block[157..157 + to.len()].copy_from_slice(to.as_bytes());
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().copied().map(u32::from).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    };
    let end = || vec![0; 1024];
    let refused = [
        ("above", [header("../a", 0, b'0'), end()].concat(), "unsafe"),
        ("above, further in", [header("a/../../b", 0, b'0'), end()].concat(), "unsafe"),
        ("a link to what is above", [link("a", "../b", b'1'), end()].concat(), "unsafe"),
        (
            "through a link to elsewhere",
            [link("a", "/tmp", b'2'), header("a/b", 0, b'0'), end()].concat(),
            "not a directory",
        ),
        ("headers without an end", [header("a", 1 << 30, b'x'), vec![0; 1 << 20]].concat(), "too large"),
        ("an unknown type", [header("a", 0, b'X'), end()].concat(), "is not supported"),
        ("no archive", b"PK\x03\x04".repeat(1000), "no header"),
        ("nothing", Vec::new(), "truncated"),
    ];
    let before = volumes(&suite);
    for (what, archive, says) in refused {
        let refused = send(&endpoint, &archive, true).await.expect_err(what);
        assert!(
            refused.is(Reason::InvalidArchive) && refused.to_string().contains(says),
            "{what}: {refused}"
        );
        assert_eq!(volumes(&suite), before, "{what}");
    }
    // Of several entries with the same name, the last one counts.
    let content = |text: &str| [text.as_bytes(), &vec![0; 512 - text.len()]].concat();
    let twice =
        [header("/a", 3, b'0'), content("one"), header("./a", 5, b'0'), content("other"), end()].concat();
    let written = send(&endpoint, &twice, true).await.expect("the archive is valid");
    assert_eq!(written.size_bytes, 5);
    drop(upload);
    suite.stop().await;
}
