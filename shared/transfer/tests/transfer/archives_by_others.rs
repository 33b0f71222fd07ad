//! Tests of archives from other programs: unordered, damaged or malicious.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{self, Read};
use std::path::Path;

use gantry_transfer::*;
use proptest::prelude::*;

/// An allocator that counts the allocated bytes of each thread.
struct Counting;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: all calls go to the allocator of the system.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.get() + layout.size().cast_signed();
        NOW.set(now);
        PEAK.set(PEAK.get().max(now));
        // SAFETY: the caller guarantees the requirements.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.set(NOW.get() - layout.size().cast_signed());
        // SAFETY: the caller guarantees the requirements.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the peak of allocated bytes during `work`.
fn peak_of(work: impl FnOnce()) -> isize {
    let before = NOW.get();
    PEAK.set(before);
    work();
    PEAK.get() - before
}

/// Returns a header with padded content.
fn member(kind: u8, name: &[u8], link: &[u8], content: &[u8]) -> Vec<u8> {
    let mut bytes = header(kind, name, link, content.len() as u64);
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn header(kind: u8, name: &[u8], link: &[u8], size: u64) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name);
    block[100..107].copy_from_slice(b"0000640");
    block[108..115].copy_from_slice(b"0001750");
    block[116..123].copy_from_slice(b"0001751");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[136..147].copy_from_slice(b"00000000007");
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    seal(block)
}

fn seal(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn file(name: &[u8], content: &[u8]) -> Vec<u8> {
    member(b'0', name, b"", content)
}

fn dir(name: &[u8]) -> Vec<u8> {
    member(b'5', name, b"", b"")
}

fn hard_link(name: &[u8], to: &[u8]) -> Vec<u8> {
    member(b'1', name, to, b"")
}

fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let record = |(key, value): &(&str, &str)| {
        let rest = key.len() + value.len() + 3;
        let length = (rest..).find(|length| *length == rest + length.to_string().len()).unwrap();
        format!("{length} {key}={value}\n")
    };
    member(b'x', b"pax", b"", records.iter().map(record).collect::<String>().as_bytes())
}

fn archive(members: &[Vec<u8>]) -> Vec<u8> {
    [members.concat(), vec![0; 1024]].concat()
}

fn read_with(limits: Limits, archive: impl Read) -> Result<Manifest, ArchiveError> {
    ArchiveReader::new(archive).read(limits, |_| Ok(()))
}

fn read(members: &[Vec<u8>]) -> Result<Manifest, ArchiveError> {
    read_with(Limits::default(), &archive(members)[..])
}

#[track_caller]
fn assert_refused(members: &[Vec<u8>], because: &str) {
    let error = read(members).expect_err(because).to_string();
    assert!(error.contains(because), "{error}");
}

/// Returns a short description of each entry.
fn listing(manifest: &Manifest) -> Vec<String> {
    let line = |entry: &Entry| {
        let path = entry.path().display();
        match &entry.kind {
            EntryKind::Directory => format!("{path}/ {:o}", entry.mode),
            EntryKind::File { size_bytes, .. } => format!("{path} {size_bytes} {:o}", entry.mode),
            EntryKind::HardLink { to } => format!("{path} = {}", String::from_utf8_lossy(to)),
            EntryKind::Symlink { target } => format!("{path} -> {}", String::from_utf8_lossy(target)),
            EntryKind::Fifo => format!("{path} |"),
            EntryKind::Device { major, minor, .. } => format!("{path} {major},{minor}"),
        }
    };
    manifest.entries().iter().map(line).collect()
}

#[test]
fn entries_are_sorted_and_parents_created() {
    let members =
        [file(b"./z", b"1"), dir(b"./b/"), file(b"a-b", b"12"), file(b".//a/./x//y", b""), dir(b"./a")];
    let manifest = read(&members).unwrap();
    assert_eq!(
        listing(&manifest),
        ["/ 755", "a/ 640", "a/x/ 755", "a/x/y 0 640", "a-b 2 640", "b/ 640", "z 1 640"]
    );
    let a = &manifest.entries()[1];
    assert_eq!((a.uid, a.gid, a.mtime_seconds), (0o1750, 0o1751, 7));
    assert_eq!(listing(&read(&[]).unwrap()), ["/ 755"]);
    // A single file, as some servers send it.
    assert_eq!(listing(&read(&[file(b"task.yml", b"abc")]).unwrap()), ["/ 755", "task.yml 3 640"]);
    // Names with a prefix, and directories of very old programs.
    let mut prefixed = file(b"name", b"");
    prefixed[345..348].copy_from_slice(b"p/q");
    let old = member(0, b"old/", b"", b"");
    let found = listing(&read(&[seal(prefixed), old]).unwrap());
    assert_eq!(found, ["/ 755", "old/ 640", "p/ 755", "p/q/ 755", "p/q/name 0 640"]);
}

#[test]
fn hard_links_lead_to_first_path() {
    let expected = ["/ 755", "a 1 640", "b = a", "c = a"];
    // Links may come before their file, and may lead to other links.
    assert_eq!(
        listing(&read(&[file(b"c", b"1"), hard_link(b"./a", b"./c"), hard_link(b"b", b"a")]).unwrap()),
        expected
    );
    assert_eq!(
        listing(&read(&[hard_link(b"a", b"b"), hard_link(b"b", b"c"), file(b"c", b"1")]).unwrap()),
        expected
    );
    // If a file is replaced after it was linked, the link keeps the old file.
    let replaced = [file(b"a", b"12"), hard_link(b"b", b"a"), file(b"a", b"1")];
    assert_eq!(listing(&read(&replaced).unwrap()), ["/ 755", "a 1 640", "b 2 640"]);
    // Manifests have no links to entries other than files.
    let others = [
        member(b'2', b"s", b"to", b""),
        hard_link(b"t", b"s"),
        member(b'6', b"p", b"", b""),
        hard_link(b"q", b"p"),
    ];
    assert_eq!(listing(&read(&others).unwrap()), ["/ 755", "p |", "q |", "s -> to", "t -> to"]);
    // Tar ignores a link to itself.
    assert_eq!(listing(&read(&[file(b"a", b"1"), hard_link(b"a", b"a")]).unwrap()), ["/ 755", "a 1 640"]);

    assert_refused(&[hard_link(b"a", b"nowhere")], "missing");
    assert_refused(&[hard_link(b"a", b"b"), hard_link(b"b", b"a")], "cycle");
    assert_refused(&[dir(b"d"), hard_link(b"a", b"d")], "directory");
    assert_refused(&[hard_link(b"a", b"d"), dir(b"d")], "directory");
    assert_refused(&[hard_link(b"a", b"../b")], "unsafe");
}

#[test]
fn last_entry_at_path_wins() {
    let members = [
        file(b"a", b"1"),
        member(b'2', b"a", b"to", b""),
        file(b"a", b"123"),
        file(b"d", b""),
        dir(b"d"),
        dir(b"e"),
        file(b"e", b""),
    ];
    assert_eq!(listing(&read(&members).unwrap()), ["/ 755", "a 3 640", "d/ 640", "e 0 640"]);
    assert_refused(&[file(b"d/a", b""), file(b"d", b"")], "directory that is not empty");
    assert_refused(&[dir(b"d"), file(b"d/a", b""), hard_link(b"d", b"d/a")], "directory that is not empty");
    assert_refused(&[file(b".", b"")], "directory that is not empty");
}

#[test]
fn unsafe_paths_are_rejected() {
    let absolute = [file(b"//a", b"1"), hard_link(b"/b", b"/a")];
    assert_eq!(listing(&read(&absolute).unwrap()), ["/ 755", "a 1 640", "b = a"]);
    for path in [&b"/.."[..], b"..", b"a/../b", b"../a", b"./..", b"", &[b'n'; 100]] {
        let is_fine = path == [b'n'; 100];
        assert_eq!(read(&[file(path, b"")]).is_ok(), is_fine, "{path:?}");
    }
    for path in ["a\0b", &"n".repeat(256), &"n/".repeat(2049)] {
        assert_refused(&[pax(&[("path", path)]), file(b"a", b"")], "unsafe");
    }
    assert_refused(&[member(b'2', b"a", b"/etc", b""), file(b"a/passwd", b"")], "is not a directory");
    assert_refused(&[file(b"a", b""), file(b"a/b/c", b"")], "is not a directory");
    assert_refused(&[hard_link(b"a", b"d"), file(b"a/b/c", b""), dir(b"d")], "is not a directory");
}

#[test]
fn malformed_entries_are_rejected() {
    for kind in *b"DMNVXAs89\xff" {
        assert_refused(&[member(kind, b"a", b"", b"")], "is not supported");
    }
    for kind in *b"23456" {
        assert_refused(&[member(kind, b"a", b"to", b"content")], "not a file, but has content");
    }
    assert_refused(&[pax(&[("mtime", "1")])], "ends after an extension header");
    assert_refused(&[pax(&[("mtime", "x")]), file(b"a", b"")], "malformed");
    assert_refused(&[pax(&[("uid", "4294967296")]), file(b"a", b"")], "malformed");
    assert_refused(&[member(b'x', b"", b"", b"99 a=b\n"), file(b"a", b"")], "malformed");
    assert_refused(&[member(b'g', b"", b"", b"9 uid=10\n"), file(b"a", b"")], "global");
    assert_eq!(
        read(&[member(b'g', b"", b"", b"13 comment=x\n"), file(b"a", b"")]).unwrap().entries().len(),
        2
    );
    assert_refused(&[member(b'2', b"a", b"", b"")], "cannot make a manifest");
    let sparse = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", "10000")];
    for map in [
        "1\n0\n600\n",
        "2\n0\n1\n",
        "2\n100\n1\n50\n1\n",
        "1\n9999\n2\n",
        "x\n",
        "",
        "99999999999999999999999\n",
        "1\n-1\n1\n",
    ] {
        let content = [map.as_bytes(), &vec![0; 512 - map.len()], b"xx"].concat();
        assert_refused(&[pax(&sparse), file(b"a", &content)], "malformed");
    }
    let right = [&b"1\n4096\n2\n"[..], &[0; 512 - 9], b"xx"].concat();
    assert_eq!(
        read(&[pax(&sparse), file(b"a", &right)]).unwrap().extents().next().unwrap().extent.offset,
        4096
    );
    let unknown = [("GNU.sparse.major", "2"), ("GNU.sparse.realsize", "10000")];
    assert_refused(&[pax(&unknown), file(b"a", &right)], "format of its holes is not supported");
    let impossible = [("GNU.sparse.size", "9223372036854775808"), ("GNU.sparse.map", "0,2")];
    assert_refused(&[pax(&impossible), file(b"a", b"xx")], "size is invalid");
    let mut broken = file(b"a", b"");
    broken[0] = b'b';
    assert_refused(&[broken], "no header at byte 0");
}

#[test]
fn layer_may_lack_zero_blocks_at_its_end() {
    let whole = archive(&[file(b"a", b"content")]);
    let layer = |bytes: &[u8]| ArchiveReader::new(bytes).read_layer(Limits::default(), |_| Ok(()));
    for length in [1024, 1536, whole.len()] {
        let (manifest, _) = layer(&whole[..length]).expect("a layer");
        assert_eq!(listing(&manifest), listing(&read_with(Limits::default(), &whole[..]).unwrap()));
        let is_whole = length == whole.len();
        assert_eq!(read_with(Limits::default(), &whole[..length]).is_ok(), is_whole, "{length}");
    }
    for length in [1, 511, 600, 1023, 1100] {
        assert!(matches!(layer(&whole[..length]), Err(ArchiveError::Truncated { .. })), "{length}");
    }
}

#[test]
fn bytes_after_end_are_shown() {
    let members = [file(b"a", b"abc")];
    let whole = archive(&members);
    let text = "{\"error\":\"failed to stream out from volume\"}\n";
    for padding in [0, 1, 511, 512, 9000, 70_000] {
        let padded = [&whole[..], &vec![0; padding]].concat();
        assert_eq!(read_with(Limits::default(), &padded[..]).unwrap().entries().len(), 2);
        let error = read_with(Limits::default(), &[&padded, text.as_bytes()].concat()[..]).unwrap_err();
        let ArchiveError::Trailing { text: shown } = &error else { panic!("{error}") };
        assert_eq!(shown, text.trim());
        assert!(error.to_string().contains("failed to stream out"));
    }
    // A single zero block is no end.
    let error =
        read_with(Limits::default(), &[&whole[..whole.len() - 512], &members[0]].concat()[..]).unwrap_err();
    assert!(matches!(error, ArchiveError::Trailing { .. }), "{error}");
    for length in 0..whole.len() {
        let error = read_with(Limits::default(), &whole[..length]).unwrap_err();
        assert!(
            matches!(error, ArchiveError::Truncated { offset, .. } if offset == length as u64),
            "{error}"
        );
        let error =
            read_with(Limits::default(), &[&whole[..length], text.as_bytes()].concat()[..]).unwrap_err();
        assert!(error.to_string().contains("failed to stream out"), "{length}: {error}");
    }
}

#[test]
fn source_errors_are_no_archive_errors() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::from(io::ErrorKind::ConnectionReset))
        }
    }
    let whole = archive(&[pax(&[("mtime", "1")]), file(b"a", &[1; 5000])]);
    for length in [0, 100, 512, 600, 1500, 3000, 6800] {
        let error = read_with(Limits::default(), (&whole[..length]).chain(Broken)).unwrap_err();
        assert!(matches!(error, ArchiveError::Source(_)), "{error}");
    }
    let full = |_: ArchivedExtent<'_>| Err(io::Error::from(io::ErrorKind::StorageFull));
    let error = ArchiveReader::new(&whole[..]).read(Limits::default(), full).unwrap_err();
    assert!(matches!(error, ArchiveError::Sink(error) if error.kind() == io::ErrorKind::StorageFull));
}

/// Maximum of allocated bytes: an extent, the headers of an entry, and the buffers of the reader.
const ALLOWED: isize = 16 << 20;

#[test]
fn limits_apply_before_allocation() {
    let limits = Limits { entries: 1000, encoded_bytes: 100_000, budget: None };
    let refused = |because: &str, bomb: &mut dyn Read| {
        let peak = peak_of(|| {
            let error = read_with(limits, bomb).expect_err(because);
            let text = format!("{error} {:?}", std::error::Error::source(&error));
            assert!(text.contains(because), "{text}");
        });
        assert!(peak < ALLOWED, "{because}: {peak}");
    };
    // Endless headers.
    for kind in *b"xgLK" {
        refused("too large", &mut header(kind, b"", b"", 1 << 32).chain(io::repeat(b'n')));
    }
    let small = pax(&[("comment", "x")]);
    refused("too large", &mut Cycle::new(&small));
    // Endless trees: of entries, of long paths, of deep paths, of attributes and of content.
    refused("TooManyEntries(1000)", &mut Cycle::new(&file(b"a", b"")));
    let named = |path: &str| Cycle::new(&[pax(&[("path", path)]), file(b"", b"")].concat());
    refused("TooLarge(100000)", &mut named(&"n".repeat(250)));
    refused("TooLarge(100000)", &mut named(&"n/".repeat(1500)));
    let xattr = pax(&[("SCHILY.xattr.user.a", &"v".repeat(60_000))]);
    refused("TooLarge(100000)", &mut Cycle::new(&[xattr, file(b"a", b"")].concat()));
    let sizes = [("size", "1000000000000000000")];
    refused("TooLarge(100000)", &mut [pax(&sizes), file(b"a", b"")].concat().chain(io::repeat(0)));
}

#[test]
fn number_of_holes_is_bounded() {
    let sparse =
        [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.realsize", "1000000000")];
    let map = |count: usize| (0..count).flat_map(|region| format!("{}\n1\n", region * 2).into_bytes());
    let count = MAX_REGIONS + 1;
    let mut bytes =
        [pax(&sparse), header(b'0', b"a", b"", 1 << 32), format!("{count}\n").into_bytes()].concat();
    bytes.extend(map(count));
    bytes.extend_from_slice(&[0; 512]);
    let peak = peak_of(|| {
        let error = read_with(Limits::default(), &bytes[..]).unwrap_err();
        assert!(error.to_string().contains("too many holes"), "{error}");
    });
    assert!(peak < (MAX_REGIONS as isize) * 16 * 4, "{peak}");
}

/// A reader that repeats the same bytes.
struct Cycle {
    bytes: Vec<u8>,
    at: usize,
    left: usize,
}

impl Cycle {
    fn new(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), at: 0, left: 400 << 20 }
    }
}

impl Read for Cycle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = &self.bytes[self.at..];
        let length = rest.len().min(buffer.len()).min(self.left);
        buffer[..length].copy_from_slice(&rest[..length]);
        self.at = (self.at + length) % self.bytes.len();
        self.left -= length;
        Ok(length)
    }
}

/// Returns a small member of every kind.
fn sample() -> Vec<Vec<u8>> {
    let sparse = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "10000"),
        ("GNU.sparse.name", "s"),
    ];
    let map = [&b"2\n4096\n2\n10000\n0\n"[..], &[0; 512 - 17], b"xx"].concat();
    let old = [("GNU.sparse.size", "9000"), ("GNU.sparse.map", "0,2,512,3")];
    let mut oldest = header(b'S', b"oldest", b"", 5);
    oldest[257..265].copy_from_slice(b"ustar  \0");
    oldest[386..434].copy_from_slice(b"00000000000\x0000000000002\x0000000010000\x0000000000003\0");
    oldest[482] = 1;
    oldest[483..495].copy_from_slice(b"00000100000\0");
    let more = [&b"00000020000\x0000000000000\0"[..], &[0; 512 - 24]].concat();
    let data = [&b"xx"[..], &[0; 510], b"yyy", &[0; 509]].concat();
    vec![
        dir(b"./"),
        pax(&[("path", "long/name"), ("mtime", "5.5"), ("SCHILY.xattr.user.a", "b"), ("uid", "70000")]),
        file(b"n", &[7; 700]),
        hard_link(b"link", b"long/name"),
        member(b'L', b"", b"", b"another/name\0"),
        member(b'2', b"n", b"target", b""),
        [pax(&sparse), file(b"n", &map)].concat(),
        [pax(&old), header(b'0', b"o", b"", 5), data.clone()].concat(),
        [seal(oldest), more, data].concat(),
        member(b'3', b"dev", b"", b""),
        member(b'6', b"pipe", b"", b""),
    ]
}

#[test]
fn sample_is_a_valid_archive() {
    let manifest = read(&sample()).unwrap();
    let expected = [
        "/ 640",
        "another/ 755",
        "another/name -> target",
        "dev 0,0",
        "link 700 640",
        "long/ 755",
        "long/name = link",
        "o 9000 640",
        "oldest 32768 640",
        "pipe |",
        "s 10000 640",
    ];
    assert_eq!(listing(&manifest), expected);
    let offsets = |path: &[u8]| {
        let extents = manifest.entries()[manifest.find(path).unwrap()].extents();
        extents.iter().map(|extent| (extent.offset, extent.length)).collect::<Vec<_>>()
    };
    assert_eq!(offsets(b"s"), [(4096, 2)]);
    assert_eq!(offsets(b"o"), [(0, 2), (512, 3)]);
    assert_eq!(offsets(b"oldest"), [(0, 2), (4096, 3)]);
    let link = &manifest.entries()[4];
    assert_eq!(
        (link.path(), link.uid, link.mtime_nanos, link.xattrs.len()),
        (Path::new("link"), 70_000, 500_000_000, 1)
    );
}

/// A change of an archive.
#[derive(Debug, Clone)]
enum Change {
    Byte(usize, u8),
    Numbers(usize, u8),
    Cut(usize),
    Drop(usize),
    Repeat(usize, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let at = || 0_usize..20_000;
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Change::Byte(at, byte)),
        4 => (at(), any::<u8>()).prop_map(|(at, byte)| Change::Numbers(at, byte)),
        1 => at().prop_map(Change::Cut),
        1 => at().prop_map(Change::Drop),
        2 => (at(), at()).prop_map(|(from, to)| Change::Repeat(from, to)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// A damaged archive gives a manifest or an error, within little memory.
    #[test]
    fn damaged_archive_is_read_or_rejected(changes in proptest::collection::vec(change(), 1..8), resealed in any::<bool>()) {
        let whole = archive(&sample());
        let manifest = read(&sample()).unwrap();
        let mut bytes = whole;
        for change in changes {
            let blocks = bytes.len() / 512;
            let block = |at: usize| at % blocks * 512;
            match change {
                _ if blocks == 0 => {}
                Change::Byte(at, byte) => {
                    let at = at % bytes.len();
                    bytes[at] = byte;
                }
                // The offsets of numbers, the type and the map in a header.
                Change::Numbers(at, byte) => {
                    let field = [124, 125, 130, 134, 136, 156, 257, 386, 398, 409, 482, 483][at % 12];
                    let at = block(at / 12) + field;
                    bytes[at] = byte;
                }
                Change::Cut(at) => bytes.truncate(at),
                Change::Drop(at) => {
                    let at = block(at);
                    bytes.drain(at..at + 512);
                }
                Change::Repeat(from, to) => {
                    let copied = bytes[block(from)..][..512].to_vec();
                    let to = block(to);
                    bytes.splice(to..to, copied);
                }
            }
        }
        if resealed {
            let headers = bytes.chunks_exact_mut(512).filter(|block| block[257..].starts_with(b"ustar"));
            headers.for_each(|header| header.copy_from_slice(&seal(header.to_vec())));
        }
        let peak = peak_of(|| {
            if let Ok(found) = read_with(Limits::default(), &bytes[..]) {
                // The manifest is valid.
                assert_eq!(Manifest::decode(&found.encode(), Limits::default()).unwrap(), found);
            }
            let _ = ArchiveReader::new(&bytes[..]).extents(&manifest, &OrdinalRanges::all(manifest.extent_count()), |extent| {
                assert!(manifest.verify(extent.ordinal, &extent.data).is_ok());
                Ok(())
            });
        });
        prop_assert!(peak < ALLOWED, "{}", peak);
    }
}
