use tonic_types::StatusExt;
use transfer::ArchiveReader;

use super::*;

fn entry(path: impl AsRef<[u8]>, what: Content) -> pb::SmallTreeEntry {
    let path = Bytes::copy_from_slice(path.as_ref());
    pb::SmallTreeEntry { path, content: Some(what), ..Default::default() }
}

fn file(path: impl AsRef<[u8]>, content: impl AsRef<[u8]>) -> pb::SmallTreeEntry {
    entry(path, Content::File(Bytes::copy_from_slice(content.as_ref())))
}

fn tree(entries: Vec<pb::SmallTreeEntry>) -> Result<SmallTree, Status> {
    parse("tree", &pb::SmallTree { entries })
}

/// Returns the field of the violation.
#[track_caller]
fn fault(entries: Vec<pb::SmallTreeEntry>) -> String {
    let status = tree(entries).expect_err("an invalid tree");
    let request = status.get_details_bad_request().expect("a field violation");
    request.field_violations[0].field.clone()
}

#[test]
fn small_tree_has_digest_of_uploaded_tree() {
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
    let wire = wire.expect("a small tree");
    let parsed = parse("tree", &wire).expect("a valid tree");
    assert_eq!(parsed.digest(), manifest.tree_digest());
    assert_eq!(parsed.size_bytes(), 7);
    assert_eq!(decode(encode(&wire)).expect("a stored tree"), wire);

    let archive = parsed.archive().expect("packed");
    let read = ArchiveReader::new(&archive[..]).read(Limits::default(), |_| Ok(())).expect("an archive");
    assert_eq!(read.tree_digest(), manifest.tree_digest(), "the archive has another digest");
}

#[test]
fn small_tree_ignores_order_of_entries() {
    let plain = tree(vec![file("b/c", "1"), file("a", "2")]).expect("a valid tree");
    let mut root = entry("", Content::Directory(pb::SmallTreeDirectory {}));
    root.mode = Some(0o755);
    let mut a = file("a", "2");
    a.mode = Some(0o644);
    let explicit =
        tree(vec![a, entry("b", Content::Directory(pb::SmallTreeDirectory {})), root, file("b/c", "1")]);
    assert_eq!(explicit.expect("a valid tree").digest(), plain.digest());
    let mut other = file("a", "2");
    other.modified_at = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
    assert_ne!(tree(vec![other, file("b/c", "1")]).expect("a valid tree").digest(), plain.digest());

    let empty = tree(Vec::new()).expect("a valid tree").digest();
    assert_eq!(
        empty.to_string(),
        "b34277c3c2709d039b2c44b9d946137e364b372ca5870a7bed16d1afbb24d5b7",
        "volumes.proto documents this digest"
    );
}

#[test]
fn invalid_entry_is_rejected_by_field() {
    for path in ["/a", "a/", "a//b", "..", "a/../b", ".", "./a", "a\0b", &"x".repeat(256), &"x/".repeat(2049)]
    {
        assert_eq!(fault(vec![file("fine", ""), file(path, "x")]), "tree.entries[1].path", "{path:?}");
    }
    assert_eq!(fault(vec![file("", "x")]), "tree.entries[0].path");
    assert_eq!(fault(vec![file("a", "x"), file("b", "y"), file("a", "x")]), "tree.entries.path");
    assert_eq!(fault(vec![file("a/b", "x"), file("a", "y")]), "tree.entries.path", "an entry below a file");
    let link = entry("a", Content::Symlink(Bytes::from_static(b"b")));
    assert_eq!(fault(vec![link.clone(), file("a/b", "x")]), "tree.entries.path", "an entry below a link");
    for target in [&b""[..], b"a\0b", &[b'x'; 4096]] {
        let link = entry("a", Content::Symlink(Bytes::copy_from_slice(target)));
        assert_eq!(fault(vec![link]), "tree.entries[0].symlink");
    }
    let changed = |change: fn(&mut pb::SmallTreeEntry)| {
        let mut entry = file("a", "x");
        change(&mut entry);
        fault(vec![entry])
    };
    assert_eq!(changed(|entry| entry.content = None), "tree.entries[0].what");
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
    let content = vec![7; MAX_BYTES - 1];
    let full = tree(vec![file("a", &content)]).expect("it is just small enough");
    assert!(full.archive().expect("packed").len() > MAX_BYTES);
    assert_eq!(fault(vec![file("ab", &content)]), "tree.entries");
    let many = |count: usize| (0..count).map(|n| file(n.to_string(), "")).collect::<Vec<_>>();
    tree(many(MAX_ENTRIES)).expect("the largest valid tree");
    assert_eq!(fault(many(MAX_ENTRIES + 1)), "tree.entries");
    // Implied directories count.
    let deep = |depth: usize| vec![file(format!("{}f", "d/".repeat(depth)), "")];
    tree(deep(MAX_ENTRIES - 1)).expect("the largest valid tree");
    assert_eq!(fault(deep(MAX_ENTRIES)), "tree.entries");

    let entries = (0..=MAX_ENTRIES).map(|n| directory(format!("{n:04}").into_bytes()));
    let entries = std::iter::once(directory(Vec::new())).chain(entries);
    let manifest = Manifest::new(entries, Limits::default()).expect("a manifest");
    let no_content = |_| -> Result<Bytes, NotSmall> { Err(NotSmall::Bytes) };
    assert_eq!(from_manifest(&manifest, no_content), Err(NotSmall::Entries));
    let pipe = Entry { kind: EntryKind::Fifo, ..directory(b"pipe".to_vec()) };
    let manifest = Manifest::new([directory(Vec::new()), pipe], Limits::default()).expect("a manifest");
    let refused = from_manifest(&manifest, no_content);
    assert_eq!(refused, Err(NotSmall::Kind("pipe".into(), "a named pipe")));
}
