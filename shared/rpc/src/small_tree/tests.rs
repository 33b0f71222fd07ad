use tonic_types::StatusExt;
use transfer::ArchiveReader;

use super::*;

fn entry(path: impl AsRef<[u8]>, what: What) -> pb::SmallTreeEntry {
    let path = Bytes::copy_from_slice(path.as_ref());
    pb::SmallTreeEntry { path, what: Some(what), ..Default::default() }
}

fn file(path: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> pb::SmallTreeEntry {
    entry(path, What::File(Bytes::copy_from_slice(content.as_ref())))
}

fn tree(entries: Vec<pb::SmallTreeEntry>) -> Result<SmallTree, Status> {
    parse("tree", &pb::SmallTree { entries })
}

/// The field that is at fault.
#[track_caller]
fn fault(entries: Vec<pb::SmallTreeEntry>) -> String {
    let status = tree(entries).expect_err("it is refused");
    let request = status.get_details_bad_request().expect("it names a field");
    request.field_violations[0].field.clone()
}

#[test]
fn it_has_the_digest_of_the_same_tree_in_a_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    std::fs::create_dir_all(root.join("a/b")).expect("made");
    std::fs::write(root.join("a/b/file"), "content").expect("written");
    std::fs::write(root.join("a/empty"), "").expect("written");
    std::os::unix::fs::symlink("../nowhere", root.join("a-link")).expect("made");
    let options = transfer::ScanOptions {
        ownership: transfer::ScannedOwnership::Root,
        ..transfer::ScanOptions::default()
    };
    let manifest = Arc::new(transfer::scan(root, &options, None).expect("scanned").manifest);
    let mut reader =
        transfer::TreeReader::new(root, manifest.clone(), transfer::ReadOptions::default()).expect("opened");
    let wire = from_manifest::<Box<dyn std::error::Error>>(&manifest, |ordinal| Ok(reader.read(ordinal)?));
    let wire = wire.expect("it is small");
    let parsed = parse("tree", &wire).expect("it is fine");
    assert_eq!(parsed.digest(), manifest.tree_digest());
    assert_eq!(parsed.size_bytes(), 7);
    assert_eq!(decode(encode(&wire)).expect("it was encoded"), wire);

    let archive = parsed.archive().expect("packed");
    let read = ArchiveReader::new(&archive[..]).read(Limits::default(), |_| Ok(())).expect("an archive");
    assert_eq!(read.tree_digest(), manifest.tree_digest(), "nor does it change on its way");
}

#[test]
fn what_is_not_said_is_what_is_usual_and_the_order_means_nothing() {
    let plain = tree(vec![file("b/c", "1"), file("a", "2")]).expect("it is fine");
    let mut root = entry("", What::Directory(pb::SmallTreeDirectory {}));
    root.mode = Some(0o755);
    let mut a = file("a", "2");
    a.mode = Some(0o644);
    let said = tree(vec![a, entry("b", What::Directory(pb::SmallTreeDirectory {})), root, file("b/c", "1")]);
    assert_eq!(said.expect("it is fine").digest(), plain.digest());
    let mut other = file("a", "2");
    other.modified_at = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
    assert_ne!(tree(vec![other, file("b/c", "1")]).expect("it is fine").digest(), plain.digest());

    let empty = tree(Vec::new()).expect("it is fine").digest();
    assert_eq!(
        empty.to_string(),
        "b34277c3c2709d039b2c44b9d946137e364b372ca5870a7bed16d1afbb24d5b7",
        "of the empty directory that the contract shows"
    );
}

#[test]
fn what_is_unsafe_or_makes_no_sense_is_refused_and_named() {
    for path in ["/a", "a/", "a//b", "..", "a/../b", ".", "./a", "a\0b", &"x".repeat(256), &"x/".repeat(2049)]
    {
        assert_eq!(fault(vec![file("fine", ""), file(path, "x")]), "tree.entries[1].path", "{path:?}");
    }
    assert_eq!(fault(vec![file("", "x")]), "tree.entries[0].path");
    assert_eq!(fault(vec![file("a", "x"), file("b", "y"), file("a", "x")]), "tree.entries.path");
    assert_eq!(fault(vec![file("a/b", "x"), file("a", "y")]), "tree.entries.path", "a file holds something");
    let link = entry("a", What::Symlink(Bytes::from_static(b"b")));
    assert_eq!(fault(vec![link.clone(), file("a/b", "x")]), "tree.entries.path", "a link holds something");
    for target in [&b""[..], b"a\0b", &[b'x'; 4096]] {
        let link = entry("a", What::Symlink(Bytes::copy_from_slice(target)));
        assert_eq!(fault(vec![link]), "tree.entries[0].symlink");
    }
    let changed = |change: fn(&mut pb::SmallTreeEntry)| {
        let mut entry = file("a", "x");
        change(&mut entry);
        fault(vec![entry])
    };
    assert_eq!(changed(|entry| entry.what = None), "tree.entries[0].what");
    assert_eq!(changed(|entry| entry.mode = Some(0o10000)), "tree.entries[0].mode");
    for nanos in [-1, 1_000_000_000] {
        let mut entry = file("a", "x");
        entry.modified_at = Some(prost_types::Timestamp { seconds: 0, nanos });
        assert_eq!(fault(vec![entry]), "tree.entries[0].modified_at");
    }
    let with_mode = pb::SmallTreeEntry { mode: Some(0o777), ..link };
    assert_eq!(fault(vec![with_mode]), "tree.entries[0].mode");
}

#[test]
fn what_is_too_large_is_refused() {
    let content = vec![7; MOST_BYTES - 1];
    let full = tree(vec![file("a", &content)]).expect("it is just small enough");
    assert!(full.archive().expect("packed").len() > MOST_BYTES);
    assert_eq!(fault(vec![file("ab", &content)]), "tree.entries");
    let many = |count: usize| (0..count).map(|n| file(n.to_string(), "")).collect::<Vec<_>>();
    tree(many(MOST_ENTRIES)).expect("they are just few enough");
    assert_eq!(fault(many(MOST_ENTRIES + 1)), "tree.entries");
    // Directories that are only implied take as much as others do.
    let deep = |depth: usize| vec![file(format!("{}f", "d/".repeat(depth)), "")];
    tree(deep(MOST_ENTRIES - 1)).expect("they are just few enough");
    assert_eq!(fault(deep(MOST_ENTRIES)), "tree.entries");

    let entries = (0..=MOST_ENTRIES).map(|n| directory(format!("{n:04}").into_bytes()));
    let entries = std::iter::once(directory(Vec::new())).chain(entries);
    let manifest = Manifest::new(entries, Limits::default()).expect("a manifest");
    let no_content = |_| -> Result<Bytes, NotSmall> { Err(NotSmall::Bytes) };
    assert_eq!(from_manifest(&manifest, no_content), Err(NotSmall::Entries));
    let pipe = Entry { kind: EntryKind::Fifo, ..directory(b"pipe".to_vec()) };
    let manifest = Manifest::new([directory(Vec::new()), pipe], Limits::default()).expect("a manifest");
    let refused = from_manifest(&manifest, no_content);
    assert_eq!(refused, Err(NotSmall::Kind("pipe".into(), "a named pipe")));
}
