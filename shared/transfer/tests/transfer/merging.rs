//! Tests of the merge and the replacement of directories.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{as_unprivileged, manifest_of, noise, set_mode, set_mtime};
use gantry_transfer::*;
use proptest::prelude::*;
use tempfile::TempDir;

const OPTIONS: MergeOptions =
    MergeOptions { ownership: WrittenOwnership::Manifest, strict: true, keep_root: false, standing: None };

/// A directory with a tree `from` to download, a `target` to merge into, and an empty `staged`.
struct Fixture {
    dir: TempDir,
}

/// The outcome of a download.
struct Downloaded {
    bytes: u64,
    merged: MergeSummary,
}

impl Fixture {
    fn new() -> Self {
        let dir = crate::common::shared_dir();
        for name in ["from", "target", "outside"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn from(&self, name: &str, content: impl AsRef<[u8]>) {
        self.write("from", name, content.as_ref());
    }

    fn target(&self, name: &str, content: impl AsRef<[u8]>) {
        self.write("target", name, content.as_ref());
    }

    fn write(&self, tree: &str, name: &str, content: &[u8]) {
        let path = self.path(tree).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn stage(&self, manifest: &Arc<Manifest>, matches: &Matches, options: WriteOptions) -> u64 {
        let (staged, target) = (self.path("staged"), self.path("target"));
        _ = remove_tree(&staged);
        fs::create_dir(&staged).unwrap();
        let mut writer = TreeWriter::new(&staged, manifest.clone(), options).unwrap();
        matches.prepare(&target, &mut writer).unwrap();
        let wanted = writer.missing();
        let mut reader =
            TreeReader::new(&self.path("from"), manifest.clone(), ReadOptions::default()).unwrap();
        for extent in reader.batches(&wanted).flat_map(Result::unwrap) {
            writer.put(extent.ordinal, &extent.data).unwrap();
        }
        writer.finish().unwrap();
        manifest.bytes_of(&wanted)
    }

    fn download(&self) -> Result<Downloaded, MergeError> {
        let manifest = Arc::new(manifest_of(&self.path("from")));
        let target = self.path("target");
        let matches = local_matches(&target, &manifest, &ScanOptions::default(), None).unwrap();
        let bytes = self.stage(&manifest, &matches, WriteOptions::default());
        let merged = merge(&self.path("staged"), &target, &manifest, &matches, OPTIONS)?;
        Ok(Downloaded { bytes, merged })
    }

    fn entries(&self, tree: &str) -> BTreeMap<PathBuf, Entry> {
        let manifest = manifest_of(&self.path(tree));
        manifest.entries().iter().map(|entry| (entry.path().to_owned(), entry.clone())).collect()
    }
}

#[test]
fn merge_replaces_its_paths_and_keeps_others() {
    let fixture = Fixture::new();
    crate::common::everything(&fixture.path("from"));
    fixture.target("a/file", "old");
    fixture.target("a/mine", "mine");
    fixture.target("own/file", "mine");
    let mine = fixture.path("target/own");
    set_mtime(&mine, 7, 7);

    let downloaded = fixture.download().unwrap();

    assert_eq!(downloaded.merged.kept, 0);
    let mut there = fixture.entries("target");
    assert_eq!(there.remove(Path::new("own")).unwrap().mtime_seconds, 7);
    assert!(there.remove(Path::new("own/file")).is_some());
    assert!(there.remove(Path::new("a/mine")).is_some());
    assert_eq!(there, fixture.entries("from"));
}

#[test]
fn second_download_keeps_files_in_place() {
    let fixture = Fixture::new();
    for n in 0..20 {
        fixture.from(&format!("dir/{n}"), noise(n, 1000));
    }
    fixture.from("empty", "");
    assert_eq!(fixture.download().unwrap().bytes, 20_000);
    let inode = |name: &str| fixture.path("target").join(name).metadata().unwrap().ino();
    let before = (inode("dir/3"), inode("dir/4"), inode("empty"));

    fixture.from("dir/4", noise(99, 1000));
    let from = fixture.path("from/dir/3");
    set_mode(&from, 0o751);
    set_mtime(&from, 5, 6);
    let again = fixture.download().unwrap();

    assert_eq!((again.bytes, again.merged.kept, again.merged.replaced), (1000, 20, 1));
    assert_eq!((inode("dir/3"), inode("empty")), (before.0, before.2));
    assert_ne!(inode("dir/4"), before.1);
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
}

#[test]
fn correct_file_is_not_touched() {
    let fixture = Fixture::new();
    for name in ["same", "mode", "time"] {
        fixture.from(name, noise(1, 100));
        set_mtime(&fixture.path("from").join(name), 1_000, 5);
    }
    fixture.download().unwrap();
    let changed = |name: &str| {
        let there = fixture.path("target").join(name).metadata().unwrap();
        (there.ctime(), there.ctime_nsec())
    };
    let before = changed("same");
    set_mode(&fixture.path("target/mode"), 0o700);
    set_mtime(&fixture.path("target/time"), 2_000, 5);

    let again = fixture.download().unwrap();

    assert_eq!((again.bytes, again.merged.kept, again.merged.corrected), (0, 3, 2));
    assert_eq!(changed("same"), before);
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
}

#[test]
fn only_settled_files_are_remembered() {
    let fixture = Fixture::new();
    for name in ["old", "written", "other", "young"] {
        fixture.from(name, noise(2, 1000));
        set_mtime(&fixture.path("from").join(name), 1_000, 0);
    }
    File::open(fixture.path("from/young")).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
    fixture.download().unwrap();
    let manifest = manifest_of(&fixture.path("from"));
    let target = fixture.path("target");
    fs::write(target.join("written"), noise(3, 1000)).unwrap();
    fs::write(target.join("other"), "another size").unwrap();
    set_mtime(&target.join("other"), 1_000, 0);

    let mut cache = StatCache::new();
    remember(&target, &manifest, &mut cache, Duration::from_secs(2));

    let at = |tree: &Manifest| tree.entries()[tree.find(b"old").unwrap()].clone();
    for _ in 0..2 {
        let scan = scan(&target, &ScanOptions::default(), Some(&mut cache)).unwrap();
        assert_eq!((scan.files_known, scan.files_read), (1, 3));
        assert_eq!(at(&scan.manifest), at(&manifest));
    }
}

#[test]
fn stat_cache_avoids_reading_target() {
    let fixture = Fixture::new();
    fixture.from("file", noise(1, 1000));
    fixture.download().unwrap();
    fixture.target("foreign", "x");
    let manifest = manifest_of(&fixture.path("from"));
    let mut cache = StatCache::new();
    let read = std::sync::atomic::AtomicUsize::new(0);
    let after_read = |path: &Path| {
        assert_eq!(path, Path::new("file"), "other files are not read");
        read.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    };
    let options =
        ScanOptions { settle: Duration::ZERO, after_read: Some(&after_read), ..ScanOptions::default() };
    for _ in 0..3 {
        let matches = local_matches(&fixture.path("target"), &manifest, &options, Some(&mut cache)).unwrap();
        assert_eq!(matches.kept().count(), 1);
    }
    assert_eq!(read.into_inner(), 1);
}

#[test]
fn only_new_extents_of_grown_file_are_downloaded() {
    let fixture = Fixture::new();
    let log = noise(1, 5 << 20);
    fixture.target("log", &log[..3 << 20]);
    fixture.from("log", &log);
    assert_eq!(fixture.download().unwrap().bytes, 2 << 20);
    assert_eq!(fs::read(fixture.path("target/log")).unwrap(), log);
}

#[test]
fn vanished_local_extents_are_downloaded() {
    let fixture = Fixture::new();
    let log = noise(1, 3 << 20);
    fixture.target("log", &log[..2 << 20]);
    fixture.target("other", &log[..1 << 20]);
    fixture.from("log", &log);
    fixture.from("other", [&log[..1 << 20], b"x"].concat());
    let manifest = Arc::new(manifest_of(&fixture.path("from")));
    let matches = local_matches(&fixture.path("target"), &manifest, &ScanOptions::default(), None).unwrap();
    assert_eq!(matches.local_extents().count(), 3);
    fs::remove_file(fixture.path("target/other")).unwrap();
    File::options().write(true).open(fixture.path("target/log")).unwrap().write_all_at(b"x", 0).unwrap();

    assert_eq!(fixture.stage(&manifest, &matches, WriteOptions::default()), (3 << 20) + 1);
    merge(&fixture.path("staged"), &fixture.path("target"), &manifest, &matches, OPTIONS).unwrap();
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
}

#[test]
fn similar_tree_is_copied_from_matches() {
    for trust in [Trust::Verify, Trust::Trusted] {
        let fixture = Fixture::new();
        crate::common::everything(&fixture.path("from"));
        remove_tree(&fixture.path("target")).unwrap();
        fs::create_dir(fixture.path("target")).unwrap();
        crate::common::everything(&fixture.path("target"));
        fixture.target("a.b/file", "another");
        fixture.target("large", noise(1, 1 << 20));
        fs::remove_file(fixture.path("target/very large")).unwrap();
        let manifest = Arc::new(manifest_of(&fixture.path("from")));
        let target = fixture.path("target");
        let matches = local_matches(&target, &manifest, &ScanOptions::default(), None).unwrap();

        fs::create_dir(fixture.path("new")).unwrap();
        let mut writer =
            TreeWriter::new(&fixture.path("new"), manifest.clone(), WriteOptions::default()).unwrap();
        matches.copy_from(&target, &mut writer, trust).unwrap();
        assert_eq!(writer.missing(), matches.wanted(&manifest));
        assert_eq!(manifest.bytes_of(&writer.missing()), 20 + (2 << 20) + 17 + (13 << 20));
        assert_eq!(writer.content_bytes(), manifest.extent_bytes() - manifest.bytes_of(&writer.missing()));
        let mut reader =
            TreeReader::new(&fixture.path("from"), manifest.clone(), ReadOptions::default()).unwrap();
        for extent in reader.batches(&writer.missing()).flat_map(Result::unwrap) {
            writer.put(extent.ordinal, &extent.data).unwrap();
        }
        writer.finish().unwrap();

        assert_eq!(fixture.entries("new"), fixture.entries("from"));
        let inode = |tree: &str| fixture.path(tree).join("large").metadata().unwrap().ino();
        assert_ne!(inode("new"), inode("target"));
    }
}

#[test]
fn links_in_target_are_never_followed() {
    let fixture = Fixture::new();
    fixture.write("outside", "dir/file", b"precious");
    fixture.write("outside", "file", b"precious");
    let before = fixture.entries("outside");
    fixture.from("dir/file", "new");
    fixture.from("file", "new");
    fixture.from("same", "precious");
    fs::create_dir(fixture.path("from/empty")).unwrap();
    symlink("../outside/dir", fixture.path("target/dir")).unwrap();
    symlink("../outside/file", fixture.path("target/file")).unwrap();
    symlink("../outside/file", fixture.path("target/same")).unwrap();
    symlink("../outside/dir", fixture.path("target/empty")).unwrap();

    fixture.download().unwrap();

    assert_eq!(fixture.entries("target"), fixture.entries("from"));
    assert_eq!(fixture.entries("outside"), before);
}

#[test]
fn file_at_path_of_directory_is_replaced() {
    let fixture = Fixture::new();
    fixture.from("a/b/c", "new");
    fixture.target("a", "old");
    fixture.download().unwrap();
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
}

#[test]
fn non_empty_directory_is_never_removed() {
    let fixture = Fixture::new();
    fixture.from("a", "new");
    fixture.from("b", "new");
    fixture.target("a", "old");
    fixture.target("b/mine", "mine");
    let before = fixture.entries("target");
    let refused = fixture.download().map(|_| ());
    assert!(matches!(refused, Err(MergeError::DirectoryInTheWay { path }) if path == Path::new("b")));
    assert_eq!(fixture.entries("target"), before, "nothing was changed");

    fs::remove_file(fixture.path("target/b/mine")).unwrap();
    fixture.download().unwrap();
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
}

#[test]
fn open_old_file_stays_readable() {
    let fixture = Fixture::new();
    fixture.from("file", "new");
    fixture.target("file", "old");
    let mut open = File::open(fixture.path("target/file")).unwrap();
    fixture.download().unwrap();
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!(content, "old");
    assert_eq!(fs::read(fixture.path("target/file")).unwrap(), b"new");
}

#[test]
fn hard_links_follow_new_and_kept_files() {
    let fixture = Fixture::new();
    fixture.from("dir/a", "content");
    fs::hard_link(fixture.path("from/dir/a"), fixture.path("from/b")).unwrap();
    fs::hard_link(fixture.path("from/dir/a"), fixture.path("from/c")).unwrap();
    for there in [&[][..], &["b"], &["b", "dir/a"], &["dir/a"], &["b", "c", "dir/a"]] {
        remove_tree(&fixture.path("target")).unwrap();
        fs::create_dir(fixture.path("target")).unwrap();
        for name in there {
            fixture.target(name, "content");
        }
        for round in 0..2 {
            fixture.download().unwrap();
            assert_eq!(fixture.entries("target"), fixture.entries("from"), "{there:?}, round {round}");
        }
    }
}

#[test]
fn file_with_other_links_is_not_changed() {
    let fixture = Fixture::new();
    fixture.write("outside", "file", b"content");
    set_mode(&fixture.path("outside/file"), 0o600);
    fs::hard_link(fixture.path("outside/file"), fixture.path("target/file")).unwrap();
    let before = fixture.entries("outside");
    fixture.from("file", "content");
    set_mode(&fixture.path("from/file"), 0o755);

    let downloaded = fixture.download().unwrap();

    assert_eq!(downloaded.bytes, 0, "the content is copied from the target");
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
    assert_eq!(fixture.entries("outside"), before);
}

#[test]
fn target_keeps_its_metadata_if_requested() {
    let fixture = Fixture::new();
    fixture.from("dir/file", "content");
    set_mode(&fixture.path("from"), 0o701);
    let manifest = Arc::new(manifest_of(&fixture.path("from")));
    let target = fixture.path("target");
    let merge_keeping_root = || {
        let matches = local_matches(&target, &manifest, &ScanOptions::default(), None).unwrap();
        fixture.stage(&manifest, &matches, WriteOptions::default());
        let options = MergeOptions { keep_root: true, ..OPTIONS };
        merge(&fixture.path("staged"), &target, &manifest, &matches, options).unwrap();
        target.metadata().unwrap().mode() & 0o7777
    };
    set_mode(&target, 0o750);
    assert_eq!(merge_keeping_root(), 0o750);
    remove_tree(&target).unwrap();
    assert_eq!(merge_keeping_root(), 0o701, "a new target gets the mode of the manifest");
    assert_eq!(fixture.entries("target"), fixture.entries("from"));
}

#[test]
fn file_neither_staged_nor_kept_is_missing() {
    let fixture = Fixture::new();
    fixture.from("a", "1");
    fixture.from("b", "2");
    let manifest = Arc::new(manifest_of(&fixture.path("from")));
    let (staged, target) = (fixture.path("staged"), fixture.path("target"));
    fixture.stage(&manifest, &Matches::default(), WriteOptions::default());
    fs::remove_file(staged.join("b")).unwrap();
    let missing = merge(&staged, &target, &manifest, &Matches::default(), OPTIONS);
    assert!(matches!(missing, Err(MergeError::Missing { path }) if path == Path::new("b")));

    fixture.target("b", "2");
    let matches = local_matches(&target, &manifest, &ScanOptions::default(), None).unwrap();
    fixture.stage(&manifest, &matches, WriteOptions::default());
    fs::remove_file(target.join("b")).unwrap();
    let missing = merge(&staged, &target, &manifest, &matches, OPTIONS);
    assert!(matches!(missing, Err(MergeError::Missing { path }) if path == Path::new("b")));
}

#[test]
fn file_written_during_merge_is_kept() {
    let fixture = Fixture::new();
    fixture.from("a", noise(1, 1000));
    set_mtime(&fixture.path("from/a"), 1_000, 0);
    fixture.download().unwrap();
    let (staged, target) = (fixture.path("staged"), fixture.path("target"));
    let manifest = Arc::new(manifest_of(&fixture.path("from")));
    let matches = local_matches(&target, &manifest, &ScanOptions::default(), None).unwrap();
    assert_eq!(matches.kept().len(), 1);
    fixture.stage(&manifest, &matches, WriteOptions::default());
    let mine = noise(2, 1000);
    fs::write(target.join("a"), &mine).unwrap();

    let changed = merge(&staged, &target, &manifest, &matches, OPTIONS);

    assert!(matches!(changed, Err(MergeError::Changed { path }) if path == Path::new("a")));
    assert_eq!(fs::read(target.join("a")).unwrap(), mine);
    let mut cache = StatCache::new();
    remember(&target, &manifest, &mut cache, Duration::ZERO);
    let matches = local_matches(&target, &manifest, &ScanOptions::default(), Some(&mut cache)).unwrap();
    assert_eq!(matches.kept().len(), 0, "the changed file is no match");
    let downloaded = fixture.download().unwrap();
    assert_eq!((downloaded.bytes, downloaded.merged.replaced), (1000, 1), "the next download replaces it");
}

#[test]
fn merge_to_other_file_system_is_rejected() {
    let fixture = Fixture::new();
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else { return };
    if elsewhere.path().metadata().unwrap().dev() == fixture.dir.path().metadata().unwrap().dev() {
        return;
    }
    fixture.from("a", "1");
    let manifest = Arc::new(manifest_of(&fixture.path("from")));
    fixture.stage(&manifest, &Matches::default(), WriteOptions::default());
    let target = elsewhere.path().join("target");
    let refused = merge(&fixture.path("staged"), &target, &manifest, &Matches::default(), OPTIONS);
    assert!(matches!(refused, Err(MergeError::OtherFileSystem { .. })));
    let refused = replace(&fixture.path("staged"), &target);
    assert!(matches!(refused, Err(ReplaceError::OtherFileSystem)));
}

#[test]
fn unprivileged_user_merges_into_read_only_directories() {
    let fixture = Fixture::new();
    for tree in ["from", "target"] {
        fs::remove_dir(fixture.path(tree)).unwrap();
    }
    as_unprivileged(|| {
        for tree in ["from", "target"] {
            fs::create_dir(fixture.path(tree)).unwrap();
        }
        fixture.from("closed/inner/file", "1");
        fixture.from("closed/kept", "2");
        for dir in ["from/closed/inner", "from/closed", "from"] {
            set_mode(&fixture.path(dir), 0o555);
        }
        fixture.download().unwrap();
        assert_eq!(fixture.entries("target"), fixture.entries("from"));

        let file = fixture.path("from/closed/inner/file");
        fs::write(file, "changed").unwrap();
        let again = fixture.download().unwrap();
        assert_eq!((again.merged.kept, again.merged.replaced), (1, 1));
        assert_eq!(fixture.entries("target"), fixture.entries("from"));
        for tree in ["from", "target", "staged"] {
            remove_tree(&fixture.path(tree)).unwrap();
        }
    });
}

#[test]
fn inaccessible_directories_are_merged_repeatedly() {
    let fixture = Fixture::new();
    fs::remove_dir(fixture.path("target")).unwrap();
    as_unprivileged(|| {
        let manifest = Arc::new(crate::common::closed_directories());
        fixture.target("a/mine", "mine");
        for _ in 0..2 {
            fixture.stage(&manifest, &Matches::default(), WriteOptions::default());
            merge(&fixture.path("staged"), &fixture.path("target"), &manifest, &Matches::default(), OPTIONS)
                .unwrap();
            assert_eq!(fixture.path("target/a").metadata().unwrap().mode() & 0o7777, 0);
        }
        for tree in ["target", "staged"] {
            remove_tree(&fixture.path(tree)).unwrap();
        }
    });
}

// Replacement.

#[test]
fn target_of_any_kind_is_replaced() {
    let fixture = Fixture::new();
    let target = fixture.path("target");
    fixture.write("outside", "precious", b"x");
    let outside = fixture.entries("outside");
    let prepare: [&dyn Fn(); 5] = [
        &|| {},
        &|| fs::write(&target, "a file").unwrap(),
        &|| symlink("outside", &target).unwrap(),
        &|| symlink("nowhere", &target).unwrap(),
        &|| {
            fs::create_dir(&target).unwrap();
            crate::common::everything(&target);
            symlink("../../outside", target.join("a/link")).unwrap();
        },
    ];
    for prepare in prepare {
        remove_tree(&target).unwrap();
        prepare();
        fixture.write("staged", "new", b"new");
        replace(&fixture.path("staged"), &target).unwrap();

        assert!(target.symlink_metadata().unwrap().is_dir());
        assert_eq!(fs::read_dir(&target).unwrap().count(), 1);
        assert_eq!(fs::read(target.join("new")).unwrap(), b"new");
        let mut left: Vec<_> =
            fs::read_dir(fixture.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["from", "outside", "target"], "no temporary directory is left");
        assert_eq!(fixture.entries("outside"), outside);
    }
}

#[test]
fn replacement_by_missing_tree_changes_nothing() {
    let fixture = Fixture::new();
    fixture.target("mine", "x");
    let before = fixture.entries("target");
    assert!(matches!(
        replace(&fixture.path("missing"), &fixture.path("target")),
        Err(ReplaceError::Rename(_))
    ));
    assert_eq!(fixture.entries("target"), before);
}

#[test]
fn removal_does_not_follow_links() {
    let fixture = Fixture::new();
    fixture.write("outside", "precious", b"x");
    fixture.target("dir/file", "x");
    symlink("../outside", fixture.path("target/link")).unwrap();
    symlink("../../outside", fixture.path("target/dir/link")).unwrap();
    symlink("target", fixture.path("to target")).unwrap();

    remove_tree(&fixture.path("to target")).unwrap();
    assert!(fixture.path("target/dir/file").exists());
    remove_tree(&fixture.path("target")).unwrap();
    assert!(!fixture.path("target").exists());
    assert!(fixture.path("outside/precious").exists());
    remove_tree(&fixture.path("target")).unwrap();
    remove_tree(&fixture.path("missing/too")).unwrap();
    assert!(remove_tree(Path::new("/")).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_merges_into_any_other(from in crate::common::random::tree(), target in crate::common::random::tree()) {
        let fixture = Fixture::new();
        crate::common::make(&fixture.path("from"), &from);
        crate::common::make(&fixture.path("target"), &target);
        let (from, before) = (fixture.entries("from"), fixture.entries("target"));
        match fixture.download() {
            Ok(_) => {
                let after = fixture.entries("target");
                let kept = |path: &Path| {
                    // Below a path that became a file, there were only empty directories.
                    !from.contains_key(path)
                        && path.ancestors().skip(1).all(|parent| {
                            from.get(parent).is_none_or(Entry::is_directory)
                        })
                };
                for (path, entry) in &before {
                    let there = after.get(path);
                    if kept(path) && path.ancestors().skip(1).all(|a| before.get(a).is_none_or(Entry::is_directory)) {
                        prop_assert!(there.is_some(), "{:?} is gone", path);
                        // Another link of a file may have become the first one.
                        if !matches!(entry.kind, EntryKind::HardLink { .. } | EntryKind::File { .. })
                            && !entry.is_directory()
                        {
                            prop_assert_eq!(there, Some(entry));
                        }
                        if matches!(entry.kind, EntryKind::File { .. } | EntryKind::HardLink { .. }) {
                            let is_file = fixture.path("target").join(path).symlink_metadata().unwrap().is_file();
                            prop_assert!(is_file);
                        }
                    }
                }
                let came: BTreeMap<_, _> =
                    after.iter().filter(|(path, _)| from.contains_key(*path)).collect();
                prop_assert_eq!(came.len(), from.len());
                for (path, entry) in &from {
                    prop_assert_eq!(came[path], entry);
                }
            }
            Err(MergeError::DirectoryInTheWay { path }) => {
                prop_assert!(!from[&path].is_directory() && before[&path].is_directory());
                prop_assert_eq!(fixture.entries("target"), before);
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error:?}"))),
        }
    }
}
