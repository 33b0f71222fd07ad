//! Trees for tests.
#![allow(dead_code, missing_docs, unreachable_pub, unused)]

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gantry_transfer::*;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, mknodat, utimensat};

pub fn scan_all(root: &Path) -> Scan {
    scan(root, &ScanOptions::default(), None).unwrap()
}

pub fn manifest_of(root: &Path) -> Manifest {
    let scan = scan_all(root);
    assert!(scan.problems.is_empty(), "{:?}", scan.problems);
    scan.manifest
}

/// Copies the tree in `from` into `to`.
pub fn copy(from: &Path, to: &Path, options: WriteOptions) -> WriteSummary {
    let manifest = Arc::new(scan_all(from).manifest);
    let mut reader =
        TreeReader::new(from, manifest.clone(), ReadOptions { verify: true, ..ReadOptions::default() })
            .unwrap();
    let mut writer = TreeWriter::new(to, manifest.clone(), options).unwrap();
    for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
        for extent in batch.unwrap() {
            writer.put(extent.ordinal, &extent.data).unwrap();
        }
    }
    writer.finish().unwrap()
}

pub fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

pub fn set_mtime(path: &Path, seconds: i64, nanos: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Returns reproducible bytes that compress badly.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Creates an entry of every kind that needs no special permission.
pub fn everything(root: &Path) {
    let dir = |name: &str| fs::create_dir_all(root.join(name)).unwrap();
    let file = |name: &str, content: &[u8]| fs::write(root.join(name), content).unwrap();
    dir("empty");
    dir("a/deeply/nested/directory");
    dir("a.b");
    file("a/file", b"a file");
    file("a.b/file", b"sorts after all of a");
    file("a-b", b"sorts between neither");
    file("none", b"");
    file("large", &noise(1, (3 << 20) + 17));
    file("very large", &noise(2, 13 << 20));
    file("exactly one", &noise(3, 1 << 20));
    file("zeroes", &[0; 100_000]);
    file("with space and\nnewline", b"odd");
    file(&"n".repeat(255), b"long name");
    fs::write(root.join(OsStr::from_bytes(b"not \xff utf \xc3\x28 8")), b"bytes").unwrap();

    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.write_all_at(b"in the middle", 5 << 20).unwrap();
    sparse.write_all_at(&noise(4, 70_000), 9 << 20).unwrap();
    sparse.set_len(20 << 20).unwrap();
    File::create(root.join("only a hole")).unwrap().set_len(3 << 20).unwrap();

    symlink("nowhere/at all", root.join("dangling")).unwrap();
    symlink("../../../../etc/passwd", root.join("a/outward")).unwrap();
    symlink("a", root.join("to a directory")).unwrap();
    fs::hard_link(root.join("a/file"), root.join("a/deeply/link")).unwrap();
    fs::hard_link(root.join("a/file"), root.join("z link")).unwrap();
    fs::hard_link(root.join("none"), root.join("z empty link")).unwrap();
    mknodat(CWD, root.join("pipe"), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();

    let closed = if is_root() { 0o000 } else { 0o400 };
    for (name, mode) in
        [("a/file", 0o640), ("a-b", 0o4755), ("none", closed), ("empty", 0o1777), ("a.b", 0o2750)]
    {
        set_mode(&root.join(name), mode);
    }
    set_mtime(&root.join("pipe"), 1, 2);
    set_mtime(&root.join("dangling"), 1_000_000_000, 999_999_999);
    set_mtime(&root.join("a/file"), -5, 1);
    set_mtime(&root.join("large"), 4_000_000_000, 0);
    set_mtime(&root.join("a/deeply/nested"), 5, 5);
    set_mtime(&root.join("a"), 1_234_567_890, 123_456_789);
    set_mtime(root, 1_500_000_000, 42);
}

pub fn long_ago() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs `test` as an unprivileged user. If the process is root, a thread gives up root.
pub fn as_unprivileged<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if is_root() {
                let unprivileged = rustix::fs::Uid::from_raw(65534);
                rustix::thread::set_thread_res_uid(unprivileged, unprivileged, unprivileged).unwrap();
            }
            test()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Creates a directory that [`as_unprivileged`] can write.
pub fn shared_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    set_mode(dir.path(), 0o777);
    dir
}

/// Returns all entries below a directory, for the comparison of a directory that must not change.
pub fn listing(root: &Path) -> Vec<Entry> {
    manifest_of(root).entries().to_vec()
}

/// Returns a tree of the caller with directories that even the owner may not access.
pub fn closed_directories() -> Manifest {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let entry = |path: &str, mode, kind| {
        let path = path.as_bytes().to_vec();
        Entry { path, mode, uid, gid, mtime_seconds: 1, mtime_nanos: 2, xattrs: vec![], kind }
    };
    let entries = [
        entry("", 0o755, EntryKind::Directory),
        entry("a", 0, EntryKind::Directory),
        entry("a/b", 0, EntryKind::Directory),
        entry("a/b/c", 0, EntryKind::Directory),
        entry("a/b/file", 0, EntryKind::File { size_bytes: 0, extents: vec![] }),
    ];
    Manifest::new(entries, Limits::default()).unwrap()
}

/// An entry of a random tree.
#[derive(Debug, Clone)]
pub struct Node {
    pub path: String,
    pub mode: u32,
    pub mtime: (i64, i64),
    pub kind: NodeKind,
}

#[derive(Debug, Clone)]
pub enum NodeKind {
    Directory,
    File { seed: u64, length: usize },
    Sparse { offset: u64, length: usize, size: u64 },
    Symlink(String),
    HardLink(String),
    Fifo,
}

pub mod random {
    use proptest::prelude::*;

    use super::{Node, NodeKind};

    fn name() -> impl Strategy<Value = String> {
        prop_oneof![8 => "[a-c]{1,2}", 2 => "[a-b.]{3}", 1 => "[ \n%ü]{2}"]
    }

    fn path() -> impl Strategy<Value = String> {
        proptest::collection::vec(name(), 1..4).prop_map(|names| names.join("/"))
    }

    fn kind() -> impl Strategy<Value = NodeKind> {
        prop_oneof![
            2 => Just(NodeKind::Directory),
            6 => (0_u64..5, prop_oneof![4 => 0_usize..5000, 1 => 1_040_000_usize..2_200_000])
                .prop_map(|(seed, length)| NodeKind::File { seed, length }),
            1 => (0_u64..3_000_000, 1_usize..10_000, 0_u64..4_000_000)
                .prop_map(|(offset, length, size)| NodeKind::Sparse { offset, length, size }),
            1 => path().prop_map(NodeKind::Symlink),
            2 => path().prop_map(NodeKind::HardLink),
            1 => Just(NodeKind::Fifo),
        ]
    }

    /// Returns entries to create in this order. Some of them may be impossible.
    pub fn tree() -> impl Strategy<Value = Vec<Node>> {
        let mtime = (-1_000_000_000_i64..4_000_000_000, 0_i64..1_000_000_000);
        let node = (path(), 0o400_u32..0o7777, mtime, kind()).prop_map(|(path, mode, mtime, kind)| Node {
            path,
            mode: mode | 0o700,
            mtime,
            kind,
        });
        proptest::collection::vec(node, 0..20)
    }
}

/// Creates a random tree, without its impossible entries.
pub fn make(root: &Path, nodes: &[Node]) {
    let mut made = Vec::new();
    for node in nodes {
        let path = root.join(&node.path);
        if path.symlink_metadata().is_ok() || fs::create_dir_all(path.parent().unwrap()).is_err() {
            continue;
        }
        let done = match &node.kind {
            NodeKind::Directory => fs::create_dir(&path).is_ok(),
            NodeKind::File { seed, length } => fs::write(&path, noise(*seed, *length)).is_ok(),
            NodeKind::Sparse { offset, length, size } => File::create(&path).is_ok_and(|file| {
                file.write_all_at(&noise(9, *length), *offset).unwrap();
                file.set_len(file.metadata().unwrap().len().max(*size)).unwrap();
                true
            }),
            NodeKind::Symlink(target) => symlink(target, &path).is_ok(),
            NodeKind::HardLink(to) => {
                let is_file = root.join(to).symlink_metadata().is_ok_and(|there| there.is_file());
                is_file && fs::hard_link(root.join(to), &path).is_ok()
            }
            NodeKind::Fifo => mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).is_ok(),
        };
        if done {
            made.push(node);
        }
    }
    for node in made.into_iter().rev() {
        let path = root.join(&node.path);
        if !path.is_symlink() {
            set_mode(&path, node.mode);
        }
        set_mtime(&path, node.mtime.0, node.mtime.1);
    }
}
