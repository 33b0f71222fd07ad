//! Tests of the removal of user and group names from archives.

use std::io::{Read, Write};
use std::process::Command;

use gantry_transfer::*;

/// Creates an archive with every kind of entry with GNU tar.
fn archive(arguments: &[&str]) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    std::fs::create_dir(root.join("below")).expect("make");
    let long = "d".repeat(120);
    std::fs::write(root.join("below").join(&long), vec![7; 100_000]).expect("write");
    std::fs::hard_link(root.join("below").join(&long), root.join("other")).expect("link");
    std::os::unix::fs::symlink("x".repeat(150), root.join("link")).expect("link");
    let holes = std::fs::File::create(root.join("holes")).expect("make");
    for at in 0..50 {
        std::os::unix::fs::FileExt::write_at(&holes, &[1; 4096], at * 65536).expect("write");
    }
    let tar =
        Command::new("tar").args(arguments).args(["--sort=name", "-c", "-C"]).arg(root).arg(".").output();
    let tar = tar.expect("tar is installed");
    assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
    tar.stdout
}

fn read(archive: &[u8]) -> Manifest {
    ArchiveReader::new(archive).read(Limits::default(), |_| Ok(())).expect("an archive")
}

fn has(archive: &[u8], text: &str) -> bool {
    archive.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn archive_is_forwarded_without_names() {
    // The longer names do not fit into a header.
    for (user, group) in [("testuser", "testgroup"), (&*"u".repeat(40), &*"g".repeat(50))] {
        let owner = [format!("--owner={user}:1234"), format!("--group={group}:2345")];
        for format in
            [&["--format=gnu"][..], &["--format=posix"], &["--format=gnu", "-S"], &["--format=posix", "-S"]]
        {
            let arguments: Vec<_> = format.iter().copied().chain(owner.iter().map(String::as_str)).collect();
            let made = archive(&arguments);
            let named = [user, group].map(|name| has(&made, &name[..8]));
            assert_eq!(named, [true; 2], "{format:?}: {user}");
            for piece in [1, 7, 511, 512, 10_000, made.len()] {
                let mut passed = Nameless::new(Vec::new());
                made.chunks(piece).try_for_each(|piece| passed.write_all(piece)).expect("forwarded");
                let passed = passed.finish().expect("complete");
                assert!(![user, group].iter().any(|name| has(&passed, &name[..8])), "{format:?}: {user}");
                assert_eq!(passed.len(), made.len());
                let manifest = read(&passed);
                assert_eq!(manifest.tree_digest(), read(&made).tree_digest(), "{format:?} by {piece}");
                assert_eq!((manifest.entries()[0].uid, manifest.entries()[0].gid), (1234, 2345));
                let mut listed = Command::new("tar");
                let listed = listed.args(["-t", "-v", "-f", "-"]).stdin(std::process::Stdio::piped());
                let mut listed =
                    listed.stdout(std::process::Stdio::piped()).spawn().expect("tar is installed");
                listed.stdin.take().expect("a pipe").write_all(&passed).expect("tar reads it");
                let mut text = String::new();
                listed.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
                assert!(listed.wait().expect("exited").success());
                assert!(
                    text.lines().all(|line| line.contains(" 1234/2345 ") || line.contains("---/---")),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn other_bytes_are_not_forwarded() {
    let mut passed = Nameless::new(Vec::new());
    let refused = passed.write_all(&[b'x'; 1024]).expect_err("not an archive");
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidData);
    // A truncated archive is forwarded.
    let made = archive(&["--owner=testuser:1", "--format=gnu"]);
    let mut passed = Nameless::new(Vec::new());
    passed.write_all(&made[..700]).expect("forwarded");
    assert_eq!(passed.finish().expect("complete").len(), 700);
}
