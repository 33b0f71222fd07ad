//! Trees for tests.
#![allow(dead_code, missing_docs, unreachable_pub)]

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

/// Writes what is in `from` into `to`.
pub fn copy(from: &Path, to: &Path, options: WriteOptions) -> Written {
    let manifest = Arc::new(scan_all(from).manifest);
    let mut reader =
        TreeReader::new(from, manifest.clone(), ReadOptions { verify: true, ..ReadOptions::default() })
            .unwrap();
    let mut writer = TreeWriter::new(to, manifest.clone(), options).unwrap();
    for batch in reader.batches(&Runs::all(manifest.extent_count())) {
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

/// Bytes that compress badly and are the same every time.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// One of everything that needs no rights.
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

    for (name, mode) in
        [("a/file", 0o640), ("a-b", 0o4755), ("none", 0o000), ("empty", 0o1777), ("a.b", 0o2750)]
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
