//! Tests of scans, copies and reads of trees on disk.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::common::{as_unprivileged, copy, manifest_of, noise, scan_all, set_mode, set_mtime};
use gantry_transfer::*;
use proptest::prelude::*;
use rustix::fs::{XattrFlags, lgetxattr, setxattr};
use rustix::io::Errno;
use tempfile::tempdir;

#[test]
fn tree_of_all_kinds_is_copied_exactly() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    crate::common::everything(from.path());

    let scanned = scan_all(from.path());
    let written = copy(from.path(), to.path(), WriteOptions { sync: true, ..WriteOptions::default() });

    assert!(scanned.problems.is_empty(), "{:?}", scanned.problems);
    assert!(written.skipped.is_empty());
    assert_eq!(written.content_bytes, scanned.manifest.extent_bytes());
    assert_eq!(manifest_of(to.path()), scanned.manifest);
    assert_eq!(manifest_of(to.path()).tree_digest(), scanned.manifest.tree_digest());

    // Without this crate, so that errors of the scan and the writer cannot cancel out.
    let content =
        |name: &str| (fs::read(from.path().join(name)).unwrap(), fs::read(to.path().join(name)).unwrap());
    for name in ["a/file", "large", "very large", "sparse", "zeroes", "with space and\nnewline", "z link"] {
        let (before, after) = content(name);
        assert!(before == after, "{name}");
    }
    let odd = OsStr::from_bytes(b"not \xff utf \xc3\x28 8");
    assert_eq!(fs::read(to.path().join(odd)).unwrap(), b"bytes");
    for name in
        ["", "a", "a/file", "a-b", "none", "empty", "a.b", "pipe", "dangling", "a/deeply/nested", "large"]
    {
        let stat = |root: &Path| {
            let stat = root.join(name).symlink_metadata().unwrap();
            (stat.mode(), stat.mtime(), stat.mtime_nsec(), stat.uid(), stat.gid())
        };
        assert_eq!(stat(to.path()), stat(from.path()), "{name}");
    }
    let inode = |name: &str| to.path().join(name).metadata().unwrap().ino();
    assert_eq!(inode("a/file"), inode("z link"));
    assert_eq!(inode("a/file"), inode("a/deeply/link"));
    assert_eq!(inode("none"), inode("z empty link"));
    assert_eq!(fs::read_link(to.path().join("a/outward")).unwrap(), Path::new("../../../../etc/passwd"));
}

#[test]
fn holes_stay_holes() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    let file = File::create(from.path().join("sparse")).unwrap();
    file.write_all_at(b"x", 64 << 20).unwrap();
    file.set_len(256 << 20).unwrap();
    File::create(from.path().join("hole")).unwrap().set_len(1 << 40).unwrap();

    copy(from.path(), to.path(), WriteOptions::default());

    let manifest = manifest_of(to.path());
    assert_eq!(manifest, manifest_of(from.path()));
    assert_eq!(manifest.size_bytes(), (1 << 40) + (256 << 20));
    assert!(manifest.extent_bytes() <= 1 << 20, "{}", manifest.extent_bytes());
    let stored = |name: &str| to.path().join(name).metadata().unwrap().blocks() * 512;
    assert!(stored("sparse") <= 2 << 20 && stored("hole") <= 64 << 10);
}

#[test]
fn xattrs_are_copied() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    fs::write(from.path().join("read only"), b"content").unwrap();
    fs::write(from.path().join("empty"), b"").unwrap();
    fs::create_dir(from.path().join("dir")).unwrap();
    for name in ["read only", "empty", "dir"] {
        for (attribute, value) in [("user.b", &b"2"[..]), ("user.a", &[0, 255, 10]), ("user.none", b"")] {
            if setxattr(from.path().join(name), attribute, value, XattrFlags::empty())
                == Err(Errno::OPNOTSUPP)
            {
                return; // The file system does not support attributes.
            }
        }
    }
    set_mode(&from.path().join("read only"), 0o444);

    copy(from.path(), to.path(), WriteOptions::default());

    assert_eq!(manifest_of(to.path()), manifest_of(from.path()));
    for name in ["read only", "empty", "dir"] {
        let mut value = [0; 10];
        let length = lgetxattr(to.path().join(name), "user.a", &mut value[..]).unwrap();
        assert_eq!(value[..length], [0, 255, 10]);
        let manifest = manifest_of(to.path());
        let entry = &manifest.entries()[manifest.find(name.as_bytes()).unwrap()];
        let names: Vec<_> = entry.xattrs.iter().map(|xattr| &xattr.name[..]).collect();
        assert_eq!(names, [&b"user.a"[..], b"user.b", b"user.none"]);
    }
}

#[test]
fn deep_tree_needs_few_open_files() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    let mut path = from.path().to_owned();
    for depth in 0..400 {
        path.push("d");
        fs::create_dir(&path).unwrap();
        if depth % 7 == 0 {
            fs::write(path.join("a"), depth.to_string()).unwrap();
            fs::write(path.join("z"), depth.to_string()).unwrap();
        }
    }
    copy(from.path(), to.path(), WriteOptions::default());
    assert_eq!(manifest_of(to.path()), manifest_of(from.path()));
    remove_tree(&to.path().join("d")).unwrap();
    assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
}

#[test]
fn too_long_path_is_reported_and_removable() {
    let dir = tempdir().unwrap();
    let name = "n".repeat(250);
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let mut at = File::open(&root).unwrap();
    for _ in 0..20 {
        rustix::fs::mkdirat(&at, &name, 0o755.into()).unwrap();
        let flags = rustix::fs::OFlags::DIRECTORY;
        at = rustix::fs::openat(&at, &name, flags, rustix::fs::Mode::empty()).unwrap().into();
    }
    let scan = scan_all(&root);
    assert_eq!(scan.manifest.entries().len(), 17);
    let [Problem { path, what: ProblemKind::PathTooLong }] = &scan.problems[..] else {
        panic!("{:?}", scan.problems);
    };
    assert!(path.as_os_str().len() > MAX_PATH_BYTES);
    let exclude = |path: &Path, _| path.as_os_str().len() > MAX_PATH_BYTES;
    let options = ScanOptions { exclude: Some(&exclude), ..ScanOptions::default() };
    assert!(
        gantry_transfer::scan(&root, &options, None).unwrap().problems.is_empty(),
        "an excluded path is no problem"
    );
    remove_tree(&root).unwrap();
    assert!(!root.exists());
}

#[test]
fn scan_keeps_few_directories_open() {
    let dir = tempdir().unwrap();
    let mut at = dir.path().to_owned();
    for _ in 0..1000 {
        at.push("d");
        fs::create_dir(&at).unwrap();
        fs::write(at.join("file"), "x").unwrap();
    }
    let root = dir.path().canonicalize().unwrap();
    let most = std::sync::atomic::AtomicUsize::new(0);
    let after_read = |_: &Path| {
        let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let ours = open.filter_map(|fd| fs::read_link(fd.path()).ok()).filter(|path| path.starts_with(&root));
        most.fetch_max(ours.count(), std::sync::atomic::Ordering::Relaxed);
    };
    let options = ScanOptions { after_read: Some(&after_read), threads: 2, ..ScanOptions::default() };
    assert_eq!(scan(dir.path(), &options, None).unwrap().manifest.entries().len(), 2001);
    let most = most.into_inner();
    assert!(most <= 110, "{most} were open");
}

#[test]
fn manifest_does_not_depend_on_threads() {
    let dir = tempdir().unwrap();
    crate::common::everything(dir.path());
    let with = |threads| {
        let options = ScanOptions { threads, ..ScanOptions::default() };
        scan(dir.path(), &options, None).unwrap().manifest
    };
    let one = with(1);
    for threads in [2, 3, 8] {
        assert_eq!(with(threads), one);
    }
    let extents = one.entries()[one.find(b"very large").unwrap()].extents();
    let offsets: Vec<_> = extents.iter().map(|extent| (extent.offset, extent.length)).collect();
    assert_eq!(offsets, (0..13).map(|n| (n << 20, 1 << 20)).collect::<Vec<_>>());
}

#[test]
fn unreadable_entries_are_reported() {
    let dir = crate::common::shared_dir();
    fs::write(dir.path().join("secret"), b"x").unwrap();
    fs::write(dir.path().join("large secret"), noise(1, 6 << 20)).unwrap();
    fs::hard_link(dir.path().join("secret"), dir.path().join("secret link")).unwrap();
    fs::create_dir(dir.path().join("closed")).unwrap();
    fs::write(dir.path().join("closed/inside"), b"x").unwrap();
    fs::write(dir.path().join("open"), b"x").unwrap();
    for name in ["secret", "large secret", "closed"] {
        set_mode(&dir.path().join(name), 0);
    }

    let scan = as_unprivileged(|| scan_all(dir.path()));

    let paths: Vec<_> = scan.manifest.entries().iter().map(|entry| entry.path().to_str().unwrap()).collect();
    assert_eq!(paths, ["", "closed", "open"]);
    let problems: Vec<_> = scan.problems.iter().map(|problem| problem.path.to_str().unwrap()).collect();
    assert_eq!(problems, ["closed", "large secret", "secret", "secret link"]);
    for problem in &scan.problems {
        let ProblemKind::Unreadable(error) = &problem.what else { panic!("{problem:?}") };
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    }
    set_mode(&dir.path().join("closed"), 0o700);
}

/// Scans a file, and changes it after it was read.
fn scan_changing(length: usize, change: impl Fn(&Path) + Sync) -> Scan {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("file"), noise(1, length)).unwrap();
    fs::write(dir.path().join("other"), b"other").unwrap();
    let path = dir.path().join("file");
    let before = path.metadata().unwrap();
    let after_read = |read: &Path| {
        while read == Path::new("file")
            && path.metadata().is_ok_and(|now| {
                (now.ctime(), now.ctime_nsec(), now.ino())
                    == (before.ctime(), before.ctime_nsec(), before.ino())
            })
        {
            change(&path); // Until the ctime changes, because the clock of the file system may be coarse.
        }
    };
    let options =
        ScanOptions { after_read: Some(&after_read), settle: Duration::ZERO, ..ScanOptions::default() };
    let mut cache = StatCache::new();
    let scan = scan(dir.path(), &options, Some(&mut cache)).unwrap();
    assert_eq!(cache.len(), 1, "the cache does not contain changed files");
    scan
}

#[test]
fn file_changed_during_scan_is_reported() {
    let grow = |path: &Path| File::options().append(true).open(path).unwrap().write_all(b"more").unwrap();
    let shrink = |path: &Path| File::options().write(true).open(path).unwrap().set_len(5).unwrap();
    let touch = |path: &Path| set_mtime(path, 1, 1);
    let rewrite = |path: &Path| {
        File::options().write(true).open(path).unwrap().write_all_at(b"same size", 0).unwrap();
        set_mtime(path, 1_000_000_000, 0);
    };
    let unlink = |path: &Path| fs::remove_file(path).unwrap();
    for length in [100, 9 << 20] {
        for change in [&grow as &(dyn Fn(&Path) + Sync), &shrink, &touch, &rewrite, &unlink] {
            let scan = scan_changing(length, change);
            let [Problem { path, what: ProblemKind::ChangedWhileRead }] = &scan.problems[..] else {
                panic!("{:?}", scan.problems);
            };
            assert_eq!(path, Path::new("file"));
            assert_eq!(scan.manifest.entries().len(), 3, "the file is kept as it was read");
        }
    }
    assert!(scan_changing_nothing().problems.is_empty());
}

fn scan_changing_nothing() -> Scan {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("file"), noise(1, 9 << 20)).unwrap();
    let options = ScanOptions { after_read: Some(&|_| {}), ..ScanOptions::default() };
    scan(dir.path(), &options, None).unwrap()
}

#[test]
fn sockets_are_skipped_and_reported() {
    let dir = tempdir().unwrap();
    let _listener = UnixListener::bind(dir.path().join("socket")).unwrap();
    let scan = scan_all(dir.path());
    assert_eq!(scan.manifest.entries().len(), 1);
    let [Problem { path, what: ProblemKind::SkippedSocket }] = &scan.problems[..] else {
        panic!("{:?}", scan.problems);
    };
    assert_eq!(path, Path::new("socket"));
}

#[test]
fn excluded_directory_is_not_entered() {
    let dir = crate::common::shared_dir();
    for name in ["keep", "drop", "keep/drop"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    for name in ["keep/a", "keep/b.o", "drop/a", "drop.o"] {
        fs::write(dir.path().join(name), b"x").unwrap();
    }
    set_mode(&dir.path().join("drop"), 0);
    let exclude = |path: &Path, is_dir: bool| {
        assert!(!path.as_os_str().is_empty());
        if is_dir { path.ends_with("drop") } else { path.extension() == Some(OsStr::new("o")) }
    };
    let scan = as_unprivileged(|| {
        let options = ScanOptions { exclude: Some(&exclude), ..ScanOptions::default() };
        scan(dir.path(), &options, None).unwrap()
    });
    let paths: Vec<_> = scan.manifest.entries().iter().map(|entry| entry.path().to_str().unwrap()).collect();
    assert_eq!(paths, ["", "keep", "keep/a"]);
    assert!(scan.problems.is_empty());
    set_mode(&dir.path().join("drop"), 0o700);
}

#[test]
fn other_file_systems_stay_empty_with_leave() {
    let exclude = |path: &Path, _| path != Path::new("proc") && !path.starts_with("proc");
    let options = ScanOptions {
        exclude: Some(&exclude),
        other_file_systems: OtherFileSystems::Leave,
        ..ScanOptions::default()
    };
    let scan = scan(Path::new("/"), &options, None).unwrap();
    let paths: Vec<_> = scan.manifest.entries().iter().map(|entry| entry.path().to_str().unwrap()).collect();
    assert_eq!(paths, ["", "proc"]);
}

#[test]
fn root_ownership_makes_equal_owners() {
    let dir = crate::common::shared_dir();
    let manifest = as_unprivileged(|| {
        fs::write(dir.path().join("file"), b"x").unwrap();
        let options = ScanOptions { ownership: ScannedOwnership::Root, ..ScanOptions::default() };
        scan(dir.path(), &options, None).unwrap().manifest
    });
    assert!(manifest.entries().iter().all(|entry| (entry.uid, entry.gid) == (0, 0)));
}

#[test]
fn scan_reports_progress_and_stops() {
    let dir = tempdir().unwrap();
    crate::common::everything(dir.path());
    let (progress, stop) = (Progress::default(), AtomicBool::new(false));
    let options = ScanOptions { progress: Some(&progress), stop: Some(&stop), ..ScanOptions::default() };
    let manifest = scan(dir.path(), &options, None).unwrap().manifest;
    let files =
        manifest.entries().iter().filter(|entry| matches!(entry.kind, EntryKind::File { .. })).count();
    assert_eq!(progress.files(), files as u64);
    assert_eq!(progress.bytes(), manifest.extent_bytes());

    // The hook stops the scan after the first file.
    let after_read = |_: &Path| stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let options = ScanOptions { after_read: Some(&after_read), ..options };
    assert!(matches!(scan(dir.path(), &options, None), Err(ScanError::Stopped)));
}

#[test]
fn panic_in_hook_does_not_hang_scan() {
    let dir = tempdir().unwrap();
    for n in 0..3000 {
        fs::write(dir.path().join(n.to_string()), b"x").unwrap();
    }
    let after_read = |_: &Path| panic!("a hook panicked");
    let options = ScanOptions { after_read: Some(&after_read), ..ScanOptions::default() };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| scan(dir.path(), &options, None)));
    assert!(outcome.is_err());
}

#[test]
fn invalid_root_is_an_error() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("file"), b"x").unwrap();
    for path in [dir.path().join("missing"), dir.path().join("file")] {
        assert!(matches!(scan(&path, &ScanOptions::default(), None), Err(ScanError::Root(_))));
    }
    let limits = Limits { entries: 1, ..Limits::default() };
    let options = ScanOptions { limits, ..ScanOptions::default() };
    let refused = scan(dir.path(), &options, None);
    assert!(matches!(refused, Err(ScanError::Manifest(InvalidManifest::TooManyEntries(1)))), "{refused:?}");
}

#[test]
fn scan_reserves_memory_before_storing() {
    let dir = tempdir().unwrap();
    // The path of each name in the last directory is too long.
    let mut deepest: std::os::fd::OwnedFd = fs::File::open(dir.path()).unwrap().into();
    let component = "d".repeat(250);
    for _ in 0..16 {
        rustix::fs::mkdirat(&deepest, &component, 0o755.into()).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        deepest = rustix::fs::openat(&deepest, &component, flags, 0o755.into()).unwrap();
    }
    for n in 0..100 {
        let name = format!("{n:0>200}");
        rustix::fs::mkdirat(&deepest, name, 0o755.into()).unwrap();
    }
    let links = tempdir().unwrap();
    let long = links.path().join("!".repeat(250));
    fs::write(&long, b"x").unwrap();
    for n in 0..1000 {
        fs::hard_link(&long, links.path().join(n.to_string())).unwrap();
    }
    for root in [dir.path(), links.path()] {
        let whole = scan(root, &ScanOptions::default(), None).expect("a small tree");
        let kept = whole.manifest.entries().iter().map(|entry| entry.path().as_os_str().len()).sum::<usize>();
        let limits = Limits { encoded_bytes: kept as u64 + 100_000, ..Limits::default() };
        let refused = scan(root, &ScanOptions { limits, ..ScanOptions::default() }, None);
        assert!(matches!(refused, Err(ScanError::Manifest(InvalidManifest::TooLarge(_)))));

        let budget: &'static Budget = Box::leak(Box::new(Budget::new(100_000)));
        let limits = Limits { budget: Some(budget), ..Limits::default() };
        let refused = scan(root, &ScanOptions { limits, ..ScanOptions::default() }, None);
        assert!(matches!(refused, Err(ScanError::Manifest(InvalidManifest::TooLarge(_)))));
        assert_eq!(budget.reserved(), 0);
    }
}

// The stat cache.

fn scan_with(root: &Path, cache: &mut StatCache) -> Scan {
    let options = ScanOptions { settle: Duration::ZERO, ..ScanOptions::default() };
    scan(root, &options, Some(cache)).unwrap()
}

#[test]
fn cached_files_are_not_read_again() {
    let dir = tempdir().unwrap();
    crate::common::everything(dir.path());
    set_mtime(&dir.path().join("large"), 1_000_000_000, 0); // In the past, like all other files.
    let mut cache = StatCache::new();
    let first = scan_with(dir.path(), &mut cache);
    assert_eq!((first.files_known, first.files_read), (0, cache.len() as u64));

    let elsewhere = tempdir().unwrap();
    let file = elsewhere.path().join("cache");
    cache.save(&file).unwrap();
    let mut cache = StatCache::load(&file).cache;
    let second = scan_with(dir.path(), &mut cache);

    assert_eq!((second.files_known, second.files_read), (first.files_read, 0));
    assert_eq!(second.manifest, first.manifest);
}

#[test]
fn cache_detects_every_change() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, b"before").unwrap();
    set_mtime(&path, 1_000_000_000, 0);
    let mut cache = StatCache::new();
    let before = scan_with(dir.path(), &mut cache).manifest;

    let ctime = |path: &Path| path.metadata().map(|stat| (stat.ctime(), stat.ctime_nsec())).unwrap();
    let old = ctime(&path);
    while ctime(&path) == old {
        // The size, mtime and inode are unchanged.
        File::options().write(true).open(&path).unwrap().write_all(b"behind").unwrap();
        set_mtime(&path, 1_000_000_000, 0);
    }
    let scan = scan_with(dir.path(), &mut cache);
    assert_eq!(scan.files_read, 1);
    assert_ne!(scan.manifest.tree_digest(), before.tree_digest());

    // Another file with the same name.
    fs::write(dir.path().join("new"), b"beyond").unwrap();
    fs::rename(dir.path().join("new"), &path).unwrap();
    assert_eq!(scan_with(dir.path(), &mut cache).files_read, 1);
    // The cache drops deleted files.
    fs::remove_file(&path).unwrap();
    scan_with(dir.path(), &mut cache);
    assert!(cache.is_empty());
}

#[test]
fn unsettled_file_is_not_cached() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("file"), b"young").unwrap();
    let mut cache = StatCache::new();
    for settle in [Duration::from_secs(3600), Duration::MAX] {
        let options = ScanOptions { settle, ..ScanOptions::default() };
        scan(dir.path(), &options, Some(&mut cache)).unwrap();
        assert!(cache.is_empty());
    }
    // A file with an mtime in the future never settles.
    set_mtime(&dir.path().join("file"), 9_000_000_000, 0);
    scan_with(dir.path(), &mut cache);
    assert!(cache.is_empty());
}

// Reading.

#[test]
fn batches_have_requested_size() {
    let dir = tempdir().unwrap();
    for n in 0..100 {
        fs::write(dir.path().join(format!("{n:03}")), noise(n, 10_000)).unwrap();
    }
    fs::write(dir.path().join("large"), noise(1, 3_500_000)).unwrap();
    let manifest = Arc::new(manifest_of(dir.path()));
    let options = ReadOptions { batch_bytes: 100_000, verify: true };
    let mut reader = TreeReader::new(dir.path(), manifest.clone(), options).unwrap();
    let all = OrdinalRanges::all(manifest.extent_count());
    let batches: Vec<_> = reader.batches(&all).map(Result::unwrap).collect();

    let sizes: Vec<Vec<usize>> =
        batches.iter().map(|batch| batch.iter().map(|extent| extent.data.len()).collect()).collect();
    let mut expected = vec![vec![10_000; 10]; 10];
    expected.extend([vec![1 << 20], vec![1 << 20], vec![1 << 20], vec![3_500_000 - (3 << 20)]]);
    assert_eq!(sizes, expected);
    let ordinals: Vec<_> = batches.iter().flatten().map(|extent| extent.ordinal).collect();
    assert_eq!(ordinals, (0..104).collect::<Vec<_>>());
    assert_eq!(reader.batches(&OrdinalRanges::new()).count(), 0);
    assert_eq!(reader.read(5).unwrap(), noise(5, 10_000));
}

#[test]
fn reader_detects_changed_tree() {
    let dir = tempdir().unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        fs::write(dir.path().join(name), noise(1, 1000)).unwrap();
    }
    let manifest = Arc::new(manifest_of(dir.path()));
    File::options().write(true).open(dir.path().join("a")).unwrap().set_len(999).unwrap();
    fs::write(dir.path().join("b"), noise(2, 1000)).unwrap();
    fs::remove_file(dir.path().join("c")).unwrap();
    fs::remove_file(dir.path().join("d")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("d"), 0o600.into()).unwrap();
    fs::rename(dir.path().join("e"), dir.path().join("x")).unwrap();
    std::os::unix::fs::symlink("x", dir.path().join("e")).unwrap();

    let options = ReadOptions { verify: true, ..ReadOptions::default() };
    let mut reader = TreeReader::new(dir.path(), manifest.clone(), options).unwrap();
    assert!(matches!(reader.read(0), Err(ReadError::Shrunk { path }) if path == Path::new("a")));
    assert!(matches!(reader.read(1), Err(ReadError::Changed { path }) if path == Path::new("b")));
    assert!(matches!(reader.read(2), Err(ReadError::Io { path, .. }) if path == Path::new("c")));
    assert!(matches!(reader.read(3), Err(ReadError::Io { path, .. }) if path == Path::new("d")));
    assert!(matches!(reader.read(4), Err(ReadError::Io { path, .. }) if path == Path::new("e")));
    assert!(matches!(reader.read(5), Err(ReadError::NoSuchExtent(5))));
    let all = OrdinalRanges::all(6);
    let mut batches = reader.batches(&all);
    assert!(batches.next().unwrap().is_err());
    assert!(batches.next().is_none(), "the iterator ends after an error");
    assert!(matches!(reader.batches(&OrdinalRanges::all(6)).next(), Some(Err(_))));
    assert!(matches!(TreeReader::new(Path::new("/nonexistent"), manifest, options), Err(ReadError::Root(_))));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_tree_is_copied_exactly(nodes in crate::common::random::tree()) {
        let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
        crate::common::make(from.path(), &nodes);
        copy(from.path(), to.path(), WriteOptions::default());
        let before = manifest_of(from.path());
        // The root is a temporary directory.
        prop_assert_eq!(manifest_of(to.path()), before);
    }

    #[test]
    fn any_choice_of_extents_can_be_read(
        nodes in crate::common::random::tree(),
        choice in any::<u64>(),
        batch_bytes in 1_usize..3_000_000,
    ) {
        let from = tempdir().unwrap();
        crate::common::make(from.path(), &nodes);
        let manifest = Arc::new(manifest_of(from.path()));
        let mut wanted = OrdinalRanges::new();
        for ordinal in (0..manifest.extent_count()).filter(|ordinal| choice >> (ordinal % 64) & 1 == 1) {
            wanted.insert(ordinal).unwrap();
        }
        let options = ReadOptions { batch_bytes, verify: true };
        let mut reader = TreeReader::new(from.path(), manifest.clone(), options).unwrap();
        let read: Vec<_> = reader.batches(&wanted).flat_map(Result::unwrap).collect();
        let ordinals: Vec<_> = read.iter().map(|extent| extent.ordinal).collect();
        prop_assert_eq!(ordinals, wanted.ordinals().collect::<Vec<_>>());
        let bytes: usize = read.iter().map(|extent| extent.data.len()).sum();
        prop_assert_eq!(bytes as u64, manifest.bytes_of(&wanted));
        for extent in read {
            prop_assert!(manifest.verify(extent.ordinal, &extent.data).is_ok());
        }
    }
}

#[test]
fn setuid_files_of_others_lose_setuid() {
    use std::os::unix::fs::{PermissionsExt, chown};

    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("file");
    std::fs::write(&path, "#!").expect("write");
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    let mode_after = |owner: u32| {
        chown(&path, Some(owner), Some(owner)).expect("chown");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o6755)).expect("chmod");
        let options = gantry_transfer::ScanOptions {
            ownership: gantry_transfer::ScannedOwnership::Root,
            ..Default::default()
        };
        let scan = gantry_transfer::scan(directory.path(), &options, None).expect("a scan");
        scan.manifest.entries()[1].mode
    };
    assert_eq!(mode_after(1234), 0o755);
    assert_eq!(mode_after(0), 0o6755);
}

/// Scans a file whose content the kernel generates.
fn scan_made_up(directory: &str, name: &str) -> Scan {
    let exclude = |path: &Path, _| path != Path::new(name);
    let options = ScanOptions { exclude: Some(&exclude), ..ScanOptions::default() };
    let mut cache = StatCache::new();
    let scan = scan(Path::new(directory), &options, Some(&mut cache)).unwrap();
    assert!(cache.is_empty(), "the times do not depend on the content");
    scan
}

#[test]
fn file_of_unknown_size_is_read_to_end() {
    // One file with a declared size of 0, and one with the size of a page.
    for (directory, name) in [("/proc/sys/kernel", "ostype"), ("/proc", "version"), ("/sys/kernel", "fscaps")]
    {
        let Ok(content) = fs::read(Path::new(directory).join(name)) else { continue };
        let scan = scan_made_up(directory, name);
        assert!(scan.problems.is_empty(), "{:?}", scan.problems);
        let manifest = Arc::new(scan.manifest);
        assert_eq!(manifest.size_bytes(), content.len() as u64, "{directory}/{name}");
        let options = ReadOptions { verify: true, ..ReadOptions::default() };
        let mut reader = TreeReader::new(Path::new(directory), manifest, options).unwrap();
        assert_eq!(reader.read(0).unwrap(), content);
    }
}

#[test]
fn generated_file_without_end_is_reported() {
    // Only root can open this file, which is as large as the address space.
    let scan = scan_made_up("/proc", "kmsg");
    let [Problem { path, what: ProblemKind::Unreadable(_) }] = &scan.problems[..] else {
        panic!("{:?}", scan.problems);
    };
    assert_eq!((path.as_path(), scan.manifest.entries().len()), (Path::new("kmsg"), 1));
}

#[test]
fn skipped_xattrs_are_reported() {
    let dir = tempdir().unwrap();
    fs::create_dir(dir.path().join("directory")).unwrap();
    fs::write(dir.path().join("file"), b"x").unwrap();
    for path in ["directory", "file"].map(|name| dir.path().join(name)) {
        match setxattr(&path, "trusted.own", b"value", XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::PERM | Errno::OPNOTSUPP) => return eprintln!("not applicable: no trusted attributes"),
            Err(error) => panic!("{error}"),
        }
    }
    let options = ScanOptions { settle: Duration::ZERO, ..ScanOptions::default() };
    let mut cache = StatCache::new();
    for known in [0, 1] {
        let scan = scan(dir.path(), &options, Some(&mut cache)).unwrap();
        assert_eq!(scan.files_known, known);
        let problems: Vec<_> = scan.problems.iter().map(ToString::to_string).collect();
        assert_eq!(
            problems,
            ["directory", "file"].map(|path| {
                format!("{path:?} has the extended attribute \"trusted.own\", which is not supported")
            })
        );
        let file = dir.path().join("cache");
        cache.save(&file).unwrap();
        cache = StatCache::load(&file).cache;
        fs::remove_file(file).unwrap();
    }
}
