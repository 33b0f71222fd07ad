//! Tests of the rules of entries and manifests, and of their encoding.

use std::path::Path;

use domain::Digest;
use gantry_transfer::*;
use proptest::prelude::*;

fn entry(path: &str, kind: EntryKind) -> Entry {
    let mode = if matches!(kind, EntryKind::Symlink { .. } | EntryKind::HardLink { .. }) { 0 } else { 0o644 };
    let path = path.as_bytes().to_vec();
    Entry { path, mode, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs: vec![], kind }
}

fn root() -> Entry {
    entry("", EntryKind::Directory)
}

fn file(size_bytes: u64, extents: &[(u64, u32)]) -> EntryKind {
    let digest = Digest([1; 32]);
    let extents = extents.iter().map(|(offset, length)| Extent { offset: *offset, length: *length, digest });
    EntryKind::File { size_bytes, extents: extents.collect() }
}

fn empty() -> EntryKind {
    file(0, &[])
}

fn symlink(target: &[u8]) -> EntryKind {
    EntryKind::Symlink { target: target.to_vec() }
}

fn hard_link(to: &str) -> EntryKind {
    EntryKind::HardLink { to: to.as_bytes().to_vec() }
}

fn xattr(name: &str, value: usize) -> Xattr {
    Xattr { name: name.as_bytes().to_vec(), value: vec![0; value] }
}

fn build(entries: Vec<Entry>) -> Result<Manifest, InvalidManifest> {
    Manifest::new(entries, Limits::default())
}

/// Returns the rule that the last entry violates below a root.
#[track_caller]
fn fault(entries: Vec<Entry>) -> EntryFault {
    let path = entries.last().unwrap().path().to_owned();
    match build([vec![root()], entries].concat()) {
        Err(InvalidManifest::Entry { path: blamed, fault }) => {
            assert_eq!(blamed, path);
            fault
        }
        other => panic!("not rejected: {other:?}"),
    }
}

#[test]
fn unsafe_paths_are_rejected() {
    let long_name = "n".repeat(256);
    let long_path = format!("{}x", "12345678/".repeat(456));
    let too_long = ["a/".repeat(2048), "b".into()].concat();
    assert!(long_path.len() > 4096 && too_long.len() > 4096);
    for path in [
        ".", "..", "a/..", "../a", "a/../b", "./a", "a/.", "/a", "a/", "a//b", "/", "//", "a\0b", &long_name,
        &long_path, &too_long,
    ] {
        assert_eq!(fault(vec![entry(path, empty())]), EntryFault::Path, "{path:?}");
    }
    assert!(build(vec![root(), entry(&"n".repeat(255), empty())]).is_ok());
    assert!(build(vec![root(), entry("...", empty()), entry("..a", empty()), entry(".a", empty())]).is_ok());
}

#[test]
fn first_entry_must_be_root_directory() {
    assert_eq!(build(vec![]), Err(InvalidManifest::NoRoot));
    assert_eq!(build(vec![entry("", empty())]), Err(InvalidManifest::NoRoot));
    assert_eq!(build(vec![entry("a", EntryKind::Directory)]), Err(InvalidManifest::NoRoot));
    assert!(build(vec![root()]).is_ok());
}

#[test]
fn entries_ascend_component_by_component() {
    let dir = |path: &str| entry(path, EntryKind::Directory);
    assert!(build(vec![root(), dir("a"), dir("a/b"), dir("a/b/c"), dir("a.b"), dir("ab")]).is_ok());

    assert_eq!(fault(vec![dir("b"), dir("a")]), EntryFault::Order);
    assert_eq!(fault(vec![dir("a"), dir("a")]), EntryFault::Order);
    assert_eq!(fault(vec![dir("a"), dir("a.b"), dir("a/b")]), EntryFault::Order);
    assert_eq!(fault(vec![root()]), EntryFault::Order);
}

#[test]
fn parent_must_be_a_directory() {
    assert_eq!(fault(vec![entry("a/b", empty())]), EntryFault::Parent);
    assert_eq!(fault(vec![entry("a", empty()), entry("a/b", empty())]), EntryFault::Parent);
    assert_eq!(fault(vec![entry("a", symlink(b"/etc")), entry("a/b", empty())]), EntryFault::Parent);
    let dir = |path: &str| entry(path, EntryKind::Directory);
    assert_eq!(fault(vec![dir("a"), dir("a/b"), dir("b"), entry("b/b/c", empty())]), EntryFault::Parent);
    assert_eq!(fault(vec![dir("aa"), entry("ab/c", empty())]), EntryFault::Parent);
}

#[test]
fn hard_links_must_point_to_earlier_files() {
    assert!(build(vec![root(), entry("a", empty()), entry("b", hard_link("a"))]).is_ok());

    for (entries, why) in [
        (vec![entry("a", hard_link("b")), entry("b", empty())], "later"),
        (vec![entry("a", hard_link("a"))], "itself"),
        (vec![entry("a", hard_link("nothing"))], "missing"),
        (vec![entry("a", hard_link(""))], "root"),
        (vec![entry("a", hard_link("../../etc/passwd"))], "outside"),
        (vec![entry("a", EntryKind::Directory), entry("b", hard_link("a"))], "directory"),
        (vec![entry("a", symlink(b"c")), entry("b", hard_link("a"))], "symbolic link"),
        (vec![entry("a", empty()), entry("b", hard_link("a")), entry("c", hard_link("b"))], "link"),
    ] {
        let refused = build([vec![root()], entries].concat());
        assert!(
            matches!(refused, Err(InvalidManifest::Entry { fault: EntryFault::HardLinkTarget, .. })),
            "{why}: {refused:?}"
        );
    }
    for change in [
        (|entry: &mut Entry| entry.mode = 1) as fn(&mut Entry),
        |entry| entry.uid = 1,
        |entry| entry.gid = 1,
        |entry| entry.mtime_seconds = 1,
        |entry| entry.mtime_nanos = 1,
    ] {
        let mut link = entry("b", hard_link("a"));
        change(&mut link);
        assert_eq!(fault(vec![entry("a", empty()), link]), EntryFault::HardLinkMetadata);
    }
}

#[test]
fn extents_ascend_within_the_file() {
    const MIB: u32 = 1 << 20;
    for extents in [&[(0, 1), (1, 1), (2, 3)][..], &[(0, MIB), (5 << 20, MIB)], &[(3, 7)], &[]] {
        assert!(build(vec![root(), entry("a", file(6 << 20, extents))]).is_ok(), "{extents:?}");
    }
    for (size, extents) in [
        (10, &[(0, 0)][..]),
        (6 << 20, &[(0, MIB + 1)]),
        (10, &[(0, 11)]),
        (10, &[(10, 1)]),
        (10, &[(0, 5), (4, 1)]),
        (10, &[(5, 1), (0, 1)]),
        (10, &[(0, 1), (0, 1)]),
        (10, &[(u64::MAX, 1)]),
        (10, &[(u64::MAX - 1, MIB)]),
    ] {
        assert_eq!(fault(vec![entry("a", file(size, extents))]), EntryFault::Extents, "{size} {extents:?}");
    }
    assert_eq!(fault(vec![entry("a", file(1 << 63, &[]))]), EntryFault::Size);
    let huge = || file((1 << 63) - 1, &[]);
    let too_much = build(vec![root(), entry("a", huge()), entry("b", huge()), entry("c", huge())]);
    assert_eq!(too_much, Err(InvalidManifest::SizeOverflow));
}

#[test]
fn invalid_metadata_is_rejected() {
    let with = |kind: EntryKind, change: fn(&mut Entry)| {
        let mut entry = entry("a", kind);
        change(&mut entry);
        entry
    };
    assert_eq!(fault(vec![with(empty(), |entry| entry.mode = 0o10000)]), EntryFault::Mode);
    assert_eq!(fault(vec![with(symlink(b"x"), |entry| entry.mode = 0o777)]), EntryFault::Mode);
    assert_eq!(fault(vec![with(empty(), |entry| entry.mtime_nanos = 1_000_000_000)]), EntryFault::Mtime);
    for id in [|entry: &mut Entry| entry.uid = u32::MAX, |entry: &mut Entry| entry.gid = u32::MAX] {
        assert_eq!(fault(vec![with(empty(), id)]), EntryFault::Owner);
    }
    let extreme = |entry: &mut Entry| {
        (entry.mode, entry.uid, entry.gid) = (0o7777, u32::MAX - 1, u32::MAX - 1);
        (entry.mtime_seconds, entry.mtime_nanos) = (i64::MIN, 999_999_999);
    };
    assert!(build(vec![root(), with(empty(), extreme)]).is_ok());
}

#[test]
fn symbolic_links_must_have_a_target() {
    for target in [&b""[..], b"a\0b", &[b'x'; 4096]] {
        assert_eq!(fault(vec![entry("a", symlink(target))]), EntryFault::SymlinkTarget);
    }
    for target in [&b"/"[..], b"../../etc", b"\xff", &[b'x'; 4095]] {
        assert!(build(vec![root(), entry("a", symlink(target))]).is_ok());
    }
}

#[test]
fn unsupported_xattrs_are_rejected() {
    let with = |kind: EntryKind, xattrs: Vec<Xattr>| Entry { xattrs, ..entry("a", kind) };
    let ok = vec![xattr("security.capability", 20), xattr("user.a", 0), xattr("user.b", 64 << 10)];
    assert!(build(vec![root(), with(empty(), ok)]).is_ok());
    assert!(build(vec![root(), with(EntryKind::Directory, vec![xattr("user.a", 1)])]).is_ok());

    let many = (100..200).map(|n| xattr(&format!("user.{n}"), 60_000)).collect();
    for (kind, xattrs) in [
        (empty(), vec![xattr("trusted.overlay.opaque", 1)]),
        (empty(), vec![xattr("system.posix_acl_access", 1)]),
        (empty(), vec![xattr("security.selinux", 1)]),
        (empty(), vec![xattr("user.", 1)]),
        (empty(), vec![xattr("user.\0", 1)]),
        (empty(), vec![xattr(&format!("user.{}", "x".repeat(251)), 1)]),
        (empty(), vec![xattr("user.b", 1), xattr("user.a", 1)]),
        (empty(), vec![xattr("user.a", 1), xattr("user.a", 1)]),
        (empty(), vec![xattr("user.a", (64 << 10) + 1)]),
        (empty(), many),
        (EntryKind::Directory, vec![xattr("security.capability", 20)]),
        (symlink(b"x"), vec![xattr("user.a", 1)]),
        (EntryKind::Fifo, vec![xattr("user.a", 1)]),
    ] {
        assert_eq!(fault(vec![with(kind, xattrs)]), EntryFault::Xattrs);
    }
    let linked = Entry { xattrs: vec![xattr("user.a", 1)], ..entry("b", hard_link("a")) };
    assert_eq!(fault(vec![entry("a", empty()), linked]), EntryFault::Xattrs);
}

#[test]
fn manifest_above_limits_is_rejected() {
    let entries = || vec![root(), entry("a", empty()), entry("b", empty())];
    let size = build(entries()).unwrap().encoded_bytes();
    let limited = |entries_at_most, encoded_bytes| {
        Manifest::new(entries(), Limits { entries: entries_at_most, encoded_bytes, budget: None })
    };
    assert!(limited(3, size).is_ok());
    assert_eq!(limited(2, size), Err(InvalidManifest::TooManyEntries(2)));
    assert_eq!(limited(3, size - 1), Err(InvalidManifest::TooLarge(size - 1)));
}

#[test]
fn size_limit_depends_on_entries() {
    let links = |target: usize| {
        let link = move |n| entry(&format!("{n:05}"), symlink(&vec![b'x'; target]));
        std::iter::once(root()).chain((0..20_000).map(link))
    };
    let limits = Limits::default();
    assert!(Manifest::new(links(3500), limits).is_ok());
    assert!(matches!(Manifest::new(links(4000), limits), Err(InvalidManifest::TooLarge(_))));
}

#[test]
fn builder_continues_after_rejected_entry() {
    let mut builder = ManifestBuilder::new(Limits::default());
    builder.push(root()).unwrap();
    assert!(builder.push(entry("a/b", empty())).is_err());
    assert!(builder.push_encoded(b"\xff").is_err());
    assert!(builder.push_encoded(&[]).is_err());
    builder.push_encoded(&entry("a", empty()).encode()).unwrap();
    assert_eq!(builder.len(), 2);
    assert_eq!(builder.finish(), build(vec![root(), entry("a", empty())]));
}

#[test]
fn ordinals_follow_order_of_entries() {
    let manifest = build(vec![
        root(),
        entry("a", file(30, &[(0, 10), (20, 10)])),
        entry("b", empty()),
        entry("c", EntryKind::Directory),
        entry("c/d", file(5, &[(0, 5)])),
        entry("e", hard_link("c/d")),
        entry("f", file(7, &[(0, 3), (3, 3), (6, 1)])),
    ])
    .unwrap();

    assert_eq!(manifest.extent_count(), 6);
    assert_eq!(manifest.size_bytes(), 42);
    assert_eq!(manifest.extent_bytes(), 32);
    let found: Vec<_> = manifest.extents().map(|l| (l.ordinal, l.entry, l.extent.offset)).collect();
    assert_eq!(found, [(0, 1, 0), (1, 1, 20), (2, 4, 0), (3, 6, 0), (4, 6, 3), (5, 6, 6)]);
    for first in 0..8 {
        for last in first..8 {
            let some: Vec<_> = manifest.extents_in(first..last).map(|located| located.ordinal).collect();
            assert_eq!(some, (first..last.min(6)).collect::<Vec<_>>());
        }
        let located = manifest.locate(first).map(|l| (l.ordinal, l.entry, l.extent.offset));
        assert_eq!(located, found.get(usize::try_from(first).unwrap()).copied());
    }
    assert_eq!(manifest.ordinals_of(1), 0..2);
    assert_eq!(manifest.ordinals_of(4), 2..3);
    assert_eq!(manifest.ordinals_of(6), 3..6);
    assert!([0, 2, 3, 5, 7, 99].into_iter().all(|entry| manifest.ordinals_of(entry).is_empty()));
    assert_eq!(manifest.find(b"c/d"), Some(4));
    assert_eq!(manifest.find(b"c/e"), None);

    let mut some = OrdinalRanges::new();
    some.insert_run(1, 2).unwrap();
    some.insert(5).unwrap();
    assert_eq!(manifest.bytes_of(&some), 16);
}

#[test]
fn parts_are_ordered_and_bounded() {
    let entries: Vec<_> = std::iter::once(root())
        .chain((1000..1500).map(|n| entry(&format!("file-{n}"), file(1 << 20, &[(0, 1 << 20)]))))
        .chain([entry("large", file(9 << 20, &(0..900).map(|n| (n * 10_000, 10_000)).collect::<Vec<_>>()))])
        .collect();
    let manifest = build(entries.clone()).unwrap();
    let parts: Vec<_> = manifest.parts(4096).collect();
    assert_eq!(parts.concat(), entries);
    for part in &parts {
        let bytes: usize = part.iter().map(|entry| entry.encode_length_delimited().len() + 1).sum();
        assert!(bytes <= 4096 || part.len() == 1, "{bytes} bytes in {} entries", part.len());
    }
    assert!(parts.len() < 60, "{}", parts.len());
}

#[test]
fn tree_digest_is_digest_of_encoding() {
    let entries =
        vec![root(), entry("a", file(9, &[(0, 5)])), entry("b", symlink(b"a")), entry("c", hard_link("a"))];
    let manifest = build(entries).unwrap();
    let bytes = manifest.encode();
    assert_eq!(*blake3::hash(&bytes).as_bytes(), manifest.tree_digest().0);
    assert_eq!(bytes.len() as u64, manifest.encoded_bytes());
    assert_eq!(Manifest::decode(&bytes, Limits::default()), Ok(manifest.clone()));
    for cut in 0..bytes.len() {
        // A cut between entries gives a smaller tree with another digest.
        let decoded = Manifest::decode(&bytes[..cut], Limits::default());
        assert!(decoded.map_or(true, |smaller| smaller.tree_digest() != manifest.tree_digest()), "{cut}");
    }
    assert_eq!(Manifest::decode(&[5, 1], Limits::default()), Err(InvalidManifest::CutOff));
    assert_eq!(Manifest::decode(&[0x80], Limits::default()), Err(InvalidManifest::CutOff));
}

/// The encoding must never change, because it determines digests.
#[test]
fn encoding_is_canonical() {
    let directory = Entry { mode: 0o755, uid: 1, gid: 2, mtime_seconds: -1, mtime_nanos: 3, ..root() };
    assert_eq!(directory.encode(), [0x10, 0xed, 0x03, 0x18, 1, 0x20, 2, 0x28, 1, 0x30, 3, 0x42, 0]);
    assert_eq!(entry("a", symlink(b"b")).encode(), [0x0a, 1, b'a', 0x52, 1, b'b']);
    assert_eq!(entry("a", hard_link("b")).encode(), [0x0a, 1, b'a', 0x5a, 1, b'b']);
    let file = Entry { mode: 0, xattrs: vec![xattr("user.x", 1)], ..entry("a", file(1, &[(0, 1)])) };
    let mut expected =
        b"\x0a\x01a\x3a\x0b\x0a\x06user.x\x12\x01\x00\x4a\x28\x08\x01\x12\x24\x10\x01\x1a\x20".to_vec();
    expected.extend([1; 32]);
    assert_eq!(file.encode(), expected);
    let kind = EntryKind::Device { kind: DeviceKind::Block, major: 8, minor: 0 };
    assert_eq!(Entry { mode: 0, ..entry("a", kind) }.encode(), [0x0a, 1, b'a', 0x6a, 4, 8, 2, 0x10, 8]);
    let fifo = Entry { mode: 0, ..entry("a", EntryKind::Fifo) };
    assert_eq!(fifo.encode(), [0x0a, 1, b'a', 0x62, 0]);

    let mut hasher = blake3::Hasher::new();
    for entry in [&directory, &fifo] {
        let encoded = entry.encode();
        hasher.update(&[u8::try_from(encoded.len()).unwrap()]);
        hasher.update(&encoded);
    }
    let manifest = build(vec![directory, fifo]).unwrap();
    assert_eq!(manifest.tree_digest(), Digest(*hasher.finalize().as_bytes()));
}

/// `volumes.proto` contains an example tree with its digest, for other implementations of the
/// encoding.
#[test]
fn example_in_proto_is_correct() {
    let empty = Entry { mode: 0o755, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, ..root() };
    let manifest = build(vec![empty]).unwrap();
    let spaced = manifest.encode().iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
    let contract = include_str!("../../../../proto/gantry/runtime/v1/volumes.proto");
    // The comment is wrapped.
    let contract = contract.replace("\n//", "");
    assert!(contract.contains(&format!("`{spaced}`")), "{spaced}");
    assert!(contract.contains(&format!("`{}`", manifest.tree_digest())), "{}", manifest.tree_digest());
}

#[test]
fn malformed_entry_is_rejected() {
    assert_eq!(Entry::decode(&[]), Err(EntryFault::NoKind));
    assert!(matches!(Entry::decode(b"\x0a\x05abc"), Err(EntryFault::Malformed(_))));
    assert_eq!(Entry::decode(b"\x0a\x02..\x62\x00"), Err(EntryFault::Path));
    assert_eq!(Entry::decode(b"\x0a\x01a\x6a\x00"), Err(EntryFault::DeviceKind));
    assert_eq!(Entry::decode(b"\x0a\x01a\x6a\x02\x08\x07"), Err(EntryFault::DeviceKind));
    assert_eq!(
        Entry::decode(b"\x0a\x01a\x4a\x09\x08\x01\x12\x05\x10\x01\x1a\x01x"),
        Err(EntryFault::ExtentDigest)
    );
    let mut builder = ManifestBuilder::new(Limits::default());
    let refused = builder.push_encoded(b"\x0a\x02..\x62\x00").expect_err("an unsafe path");
    assert_eq!(refused.to_string(), r#"entry ".." has an unsafe path"#);
}

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        8 => proptest::collection::vec(prop_oneof![Just(b'a'), Just(b'.'), Just(b'b'), Just(0xff)], 1..4),
        1 => Just(b"..".to_vec()),
        1 => Just(b"".to_vec()),
        1 => Just(b"a\0".to_vec()),
    ]
}

fn any_kind() -> impl Strategy<Value = EntryKind> {
    let extent = (0_u64..100, prop_oneof![Just(0_u32), 1_u32..50, Just((1 << 20) + 1)]);
    prop_oneof![
        4 => Just(EntryKind::Directory),
        3 => (0_u64..200, proptest::collection::vec(extent, 0..3)).prop_map(|(size, extents)| file(size, &extents)),
        1 => proptest::collection::vec(any::<u8>(), 0..5).prop_map(|target| symlink(&target)),
        2 => any_path().prop_map(|to| EntryKind::HardLink { to }),
        1 => Just(EntryKind::Fifo),
        1 => (any::<u32>(), any::<u32>())
            .prop_map(|(major, minor)| EntryKind::Device { kind: DeviceKind::Character, major, minor }),
    ]
}

fn any_path() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any_name(), 0..4).prop_map(|names| names.join(&b'/'))
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let mode = prop_oneof![4 => Just(0_u32), 2 => 0_u32..0o10000, 1 => any::<u32>()];
    (any_path(), mode, any::<i64>(), any_kind()).prop_map(|(path, mode, mtime_seconds, kind)| {
        let mtime_seconds = if matches!(kind, EntryKind::HardLink { .. }) { 0 } else { mtime_seconds };
        Entry { path, mode, uid: 0, gid: 0, mtime_seconds, mtime_nanos: 0, xattrs: vec![], kind }
    })
}

/// Checks the rules of manifests with an independent implementation.
fn assert_safe(manifest: &Manifest) {
    let entries = manifest.entries();
    assert!(entries[0].path.is_empty() && entries[0].is_directory());
    let components = |entry: &Entry| {
        entry
            .path
            .split(|byte| *byte == b'/')
            .map(<[u8]>::to_vec)
            .filter(|name| !name.is_empty())
            .collect::<Vec<_>>()
    };
    for pair in entries.windows(2) {
        assert!(components(&pair[0]) < components(&pair[1]));
    }
    for (index, entry) in entries.iter().enumerate().skip(1) {
        let names = components(entry);
        assert_eq!(names.join(&b'/'), entry.path);
        assert!(names.iter().all(|name| name != b"." && name != b".." && !name.contains(&0)));
        let parent = names[..names.len() - 1].join(&b'/');
        assert!(entries[..index].iter().any(|other| other.path == parent && other.is_directory()));
        if let EntryKind::HardLink { to } = &entry.kind {
            let is_target =
                |other: &&Entry| other.path == *to && matches!(other.kind, EntryKind::File { .. });
            assert_eq!(entries[..index].iter().filter(is_target).count(), 1);
        }
    }
    let again = Manifest::new(entries.to_vec(), Limits::default()).unwrap();
    assert_eq!(again.tree_digest(), manifest.tree_digest());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_entries_are_rejected_or_safe(mut entries in proptest::collection::vec(any_entry(), 0..12)) {
        let mut builder = ManifestBuilder::new(Limits::default());
        builder.push(root()).unwrap();
        // In order, so that more than one entry can be valid.
        entries.sort_by(|a, b| compare_paths(&a.path, &b.path));
        for entry in entries {
            _ = builder.push(entry);
        }
        assert_safe(&builder.finish().unwrap());
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(entry) = Entry::decode(&bytes) {
            prop_assert_eq!(entry.check(), Ok(()));
        }
        let mut builder = ManifestBuilder::new(Limits::default());
        _ = builder.push_encoded(&bytes);
    }

    #[test]
    fn entries_with_flipped_bits_are_rejected_or_valid(
        entry in any_entry(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 0_u8..8), 1..4),
    ) {
        let mut bytes = entry.encode();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if let Ok(decoded) = Entry::decode(&bytes) {
            prop_assert_eq!(decoded.check(), Ok(()));
            // Decoded entries have a canonical encoding.
            prop_assert_eq!(Entry::decode(&decoded.encode()), Ok(decoded));
        }
    }

    #[test]
    fn valid_entry_round_trips(entry in any_entry()) {
        match entry.check() {
            Ok(()) => prop_assert_eq!(Entry::decode(&entry.encode()), Ok(entry)),
            Err(fault) => prop_assert_eq!(Entry::decode(&entry.encode()), Err(fault)),
        }
    }

    #[test]
    fn paths_compare_like_lists_of_names(a in any_path(), b in any_path()) {
        let names = |path: &[u8]| path.split(|byte| *byte == b'/').map(<[u8]>::to_vec).collect::<Vec<_>>();
        let plain = |path: &[u8]| path.is_empty() || names(path).iter().all(|n| !n.is_empty() && !n.contains(&0));
        if !plain(&a) || !plain(&b) {
            return Ok(());
        }
        let listed = |path: &[u8]| if path.is_empty() { vec![] } else { names(path) };
        prop_assert_eq!(compare_paths(&a, &b), listed(&a).cmp(&listed(&b)));
    }
}

#[test]
fn error_escapes_odd_paths() {
    let error = build(vec![root(), entry("a\nb/c", empty())]).unwrap_err();
    assert_eq!(error.to_string(), r#"entry "a\nb/c" is in no directory of the manifest"#);
    assert!(matches!(error, InvalidManifest::Entry { path, .. } if path == Path::new("a\nb/c")));
}
