//! Tests of the writer of trees.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::sync::Arc;

use crate::common::{as_unprivileged, is_root, manifest_of, noise, set_mode};
use gantry_transfer::*;
use rustix::io::Errno;
use tempfile::{TempDir, tempdir};

/// A tree with a directory, small files and a large file, and an empty directory to write to.
struct Fixture {
    from: TempDir,
    to: TempDir,
    manifest: Arc<Manifest>,
}

impl Fixture {
    fn new() -> Self {
        let from = tempdir().unwrap();
        fs::create_dir(from.path().join("dir")).unwrap();
        fs::write(from.path().join("dir/a"), noise(1, 1000)).unwrap(); // 0
        fs::write(from.path().join("dir/b"), noise(2, 2000)).unwrap(); // 1
        fs::write(from.path().join("large"), noise(3, (2 << 20) + 500)).unwrap(); // 2, 3, 4
        fs::write(from.path().join("small"), noise(4, 10)).unwrap(); // 5
        let manifest = Arc::new(manifest_of(from.path()));
        assert_eq!(manifest.extent_count(), 6);
        Self { from, to: tempdir().unwrap(), manifest }
    }

    fn data(&self, ordinal: u64) -> bytes::Bytes {
        let options = ReadOptions::default();
        TreeReader::new(self.from.path(), self.manifest.clone(), options).unwrap().read(ordinal).unwrap()
    }

    fn writer(&self) -> TreeWriter {
        TreeWriter::new(self.to.path(), self.manifest.clone(), WriteOptions::default()).unwrap()
    }

    fn source(&self, path: &str) -> File {
        File::open(self.from.path().join(path)).unwrap()
    }

    fn entry(&self, path: &str) -> usize {
        self.manifest.find(path.as_bytes()).unwrap()
    }

    #[track_caller]
    fn assert_arrived(&self) {
        assert_eq!(manifest_of(self.to.path()), *self.manifest);
    }
}

/// Returns a manifest of a root and `entries`.
fn manifest(entries: Vec<Entry>) -> Arc<Manifest> {
    let root = entry("", EntryKind::Directory);
    Arc::new(Manifest::new([vec![root], entries].concat(), Limits::default()).unwrap())
}

fn entry(path: &str, kind: EntryKind) -> Entry {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let mode = if matches!(kind, EntryKind::Directory) { 0o755 } else { 0o644 };
    let path = path.as_bytes().to_vec();
    Entry { path, mode, uid, gid, mtime_seconds: 1, mtime_nanos: 2, xattrs: vec![], kind }
}

fn empty_file() -> EntryKind {
    EntryKind::File { size_bytes: 0, extents: vec![] }
}

#[test]
fn wrong_content_is_rejected() {
    let fixture = Fixture::new();
    let mut writer = fixture.writer();
    let right = fixture.data(0);
    let mut wrong = right.to_vec();
    wrong[500] ^= 1;
    for data in [&wrong[..], &right[..999], &[&right[..], b"x"].concat(), b""] {
        let refused = writer.put(0, data);
        assert!(matches!(refused, Err(WriteError::DigestMismatch { path }) if path == Path::new("dir/a")));
    }
    assert!(!fixture.to.path().join("dir/a").exists(), "the file was not created");
    writer.put(0, &right).unwrap();
    assert!(matches!(writer.put(6, b"x"), Err(WriteError::NoSuchExtent(6))));
}

#[test]
fn extents_come_once_in_any_order() {
    let fixture = Fixture::new();
    let mut writer = fixture.writer();
    writer.put(2, &fixture.data(2)).unwrap();
    writer.put(0, &fixture.data(0)).unwrap();
    for ordinal in [0, 2] {
        let refused = writer.put(ordinal, &fixture.data(ordinal));
        assert!(matches!(refused, Err(WriteError::OutOfOrder(n)) if n == ordinal));
    }
    writer.copy_extent(3, &fixture.source("large"), 1 << 20, Trust::Verify).unwrap();
    assert!(matches!(writer.put(3, &fixture.data(3)), Err(WriteError::OutOfOrder(3))));
    let again = writer.copy_extent(2, &fixture.source("large"), 0, Trust::Trusted);
    assert!(matches!(again, Err(WriteError::OutOfOrder(2))));
    let whole = writer.copy_file(fixture.entry("large"), &fixture.source("large"), Trust::Verify);
    assert!(matches!(whole, Err(WriteError::OutOfOrder(2))));
}

#[test]
fn incomplete_tree_is_not_finished() {
    for missing in 0..6 {
        let fixture = Fixture::new();
        let mut writer = fixture.writer();
        for ordinal in (0..6).filter(|ordinal| *ordinal != missing) {
            writer.put(ordinal, &fixture.data(ordinal)).unwrap();
        }
        assert_eq!(writer.missing().ordinals().collect::<Vec<_>>(), [missing]);
        let Err(WriteError::Missing { path, ordinal }) = writer.finish() else { panic!("finished") };
        assert_eq!(ordinal, missing);
        assert!(fixture.from.path().join(path).is_file());
    }
}

#[test]
fn local_content_completes_tree() {
    for trust in [Trust::Verify, Trust::Trusted] {
        let fixture = Fixture::new();
        let elsewhere = tempdir().unwrap();
        let pieces = elsewhere.path().join("pieces");
        fs::write(&pieces, [b"padding", &fixture.data(4)[..], &fixture.data(0)[..]].concat()).unwrap();
        let pieces = File::open(pieces).unwrap();

        // The writer switches between incomplete files.
        let mut writer = fixture.writer();
        writer.put(2, &fixture.data(2)).unwrap();
        writer.copy_extent(0, &pieces, 507, trust).unwrap();
        writer.copy_file(fixture.entry("dir/b"), &fixture.source("dir/b"), trust).unwrap();
        writer.copy_extent(4, &pieces, 7, trust).unwrap();
        writer.copy_file(fixture.entry("small"), &fixture.source("small"), trust).unwrap();
        writer.put(3, &fixture.data(3)).unwrap();
        assert_eq!(writer.finish().unwrap().content_bytes, fixture.manifest.extent_bytes());

        fixture.assert_arrived();
    }
}

#[test]
fn copied_files_are_independent() {
    for trust in [Trust::Verify, Trust::Trusted] {
        let fixture = Fixture::new();
        let mut writer = fixture.writer();
        for path in ["dir/a", "dir/b", "large", "small"] {
            writer.copy_file(fixture.entry(path), &fixture.source(path), trust).unwrap();
        }
        writer.finish().unwrap();
        fixture.assert_arrived();
        fs::write(fixture.from.path().join("large"), b"changed").unwrap();
        assert_eq!(fs::read(fixture.to.path().join("large")).unwrap(), noise(3, (2 << 20) + 500));
    }
}

#[test]
fn wrong_local_content_can_be_replaced() {
    let fixture = Fixture::new();
    let elsewhere = tempdir().unwrap();
    let wrong = elsewhere.path().join("wrong");
    fs::write(&wrong, noise(99, (2 << 20) + 500)).unwrap();
    let wrong = File::open(wrong).unwrap();
    let mut writer = fixture.writer();
    for ordinal in 0..2 {
        let refused = writer.copy_extent(ordinal, &wrong, 0, Trust::Verify);
        assert!(matches!(refused, Err(WriteError::DigestMismatch { .. })));
        // The source is too short, which is an error even for trusted content.
        let refused = writer.copy_extent(ordinal, &wrong, 2 << 20, Trust::Trusted);
        assert!(matches!(refused, Err(WriteError::DigestMismatch { .. })));
    }
    let refused = writer.copy_file(fixture.entry("large"), &wrong, Trust::Verify);
    assert!(matches!(refused, Err(WriteError::DigestMismatch { .. })));
    for ordinal in 0..6 {
        writer.put(ordinal, &fixture.data(ordinal)).unwrap();
    }
    writer.finish().unwrap();
    fixture.assert_arrived();
}

#[test]
fn verified_content_belongs_to_one_tree() {
    let fixture = Fixture::new();
    let elsewhere = tempdir().unwrap();
    fs::write(elsewhere.path().join("file"), noise(1, 1000)).unwrap();
    let other = manifest_of(elsewhere.path());
    let verified = other.verify(0, noise(1, 1000)).unwrap();
    let mut writer = fixture.writer();
    assert!(matches!(writer.put_verified(&verified), Err(WriteError::DigestMismatch { .. })));
    writer.put_verified(&fixture.manifest.verify(0, noise(1, 1000)).unwrap()).unwrap();
}

#[test]
fn non_empty_directory_is_rejected() {
    let fixture = Fixture::new();
    fs::write(fixture.to.path().join("there"), b"x").unwrap();
    let refused = TreeWriter::new(fixture.to.path(), fixture.manifest.clone(), WriteOptions::default());
    assert!(matches!(refused, Err(WriteError::Unsafe { .. })));
    assert_eq!(fs::read_dir(fixture.to.path()).unwrap().count(), 1);
}

#[test]
fn planted_links_do_not_lead_outside() {
    let fixture = Fixture::new();
    let outside = tempdir().unwrap();
    fs::write(outside.path().join("victim"), b"precious").unwrap();
    set_mode(outside.path(), 0o755); // Unlike that of a directory in the manifest, or it would not show.
    let before = crate::common::listing(outside.path());

    // A link replaces a directory.
    let mut writer = fixture.writer();
    fs::remove_dir(fixture.to.path().join("dir")).unwrap();
    symlink(outside.path(), fixture.to.path().join("dir")).unwrap();
    assert!(matches!(writer.put(0, &fixture.data(0)), Err(WriteError::Io { .. })));
    drop(writer);
    assert_eq!(crate::common::listing(outside.path()), before);

    // Links replace files before and during their writing.
    let fixture = Fixture::new();
    let mut writer = fixture.writer();
    symlink(outside.path().join("victim"), fixture.to.path().join("dir/a")).unwrap();
    fs::hard_link(outside.path().join("victim"), fixture.to.path().join("dir/b")).unwrap();
    symlink(outside.path().join("new"), fixture.to.path().join("small")).unwrap();
    assert!(matches!(writer.put(0, &fixture.data(0)), Err(WriteError::Io { .. })));
    assert!(matches!(writer.put(1, &fixture.data(1)), Err(WriteError::Io { .. })));
    writer.put(2, &fixture.data(2)).unwrap();
    let copied = writer.copy_file(fixture.entry("small"), &fixture.source("small"), Trust::Verify);
    assert!(matches!(copied, Err(WriteError::Io { .. })));
    fs::remove_file(fixture.to.path().join("large")).unwrap();
    symlink(outside.path().join("victim"), fixture.to.path().join("large")).unwrap();
    assert!(matches!(writer.put(3, &fixture.data(3)), Err(WriteError::Io { .. })));
    drop(writer);
    assert_eq!(crate::common::listing(outside.path()), before);

    // A link replaces a directory before its metadata is applied.
    let fixture = Fixture::new();
    let mut writer = fixture.writer();
    for ordinal in 0..6 {
        writer.put(ordinal, &fixture.data(ordinal)).unwrap();
    }
    fs::rename(fixture.to.path().join("dir"), fixture.to.path().join("moved")).unwrap();
    symlink(outside.path(), fixture.to.path().join("dir")).unwrap();
    assert!(matches!(writer.finish(), Err(WriteError::Io { .. })));
    assert_eq!(crate::common::listing(outside.path()), before);
}

#[test]
fn manifest_cannot_lead_through_its_link() {
    let link = entry("a", EntryKind::Symlink { target: b"/tmp".to_vec() });
    let entries = [entry("", EntryKind::Directory), Entry { mode: 0, ..link }, entry("a/b", empty_file())];
    let refused = Manifest::new(entries, Limits::default());
    assert!(matches!(refused, Err(InvalidManifest::Entry { fault: EntryFault::Parent, .. })));
}

#[test]
fn setuid_is_dropped_with_its_owner() {
    let theirs = |path: &str, mode| Entry { mode, uid: 12345, gid: 12345, ..entry(path, empty_file()) };
    let ours = |path: &str, mode| Entry { mode, ..entry(path, empty_file()) };
    let manifest =
        manifest(vec![ours("a", 0o6755), theirs("b", 0o4755), theirs("c", 0o2755), theirs("d", 0o1644)]);
    let modes = |ownership| {
        let to = tempdir().unwrap();
        let options = WriteOptions { ownership, ..WriteOptions::default() };
        TreeWriter::new(to.path(), manifest.clone(), options).unwrap().finish().unwrap();
        let stat = |name: &&str| to.path().join(name).metadata().unwrap();
        let stats = ["a", "b", "c", "d"].iter().map(stat);
        stats.map(|stat| (stat.mode() & 0o7777, stat.uid())).collect::<Vec<_>>()
    };
    let me = rustix::process::geteuid().as_raw();
    assert_eq!(modes(WrittenOwnership::Caller), [(0o6755, me), (0o755, me), (0o755, me), (0o1644, me)]);
    if is_root() {
        let all = modes(WrittenOwnership::Manifest);
        assert_eq!(all, [(0o6755, me), (0o4755, 12345), (0o2755, 12345), (0o1644, 12345)]);
    }
}

#[test]
fn owners_are_right_in_any_directory() {
    if !is_root() {
        return;
    }
    let owned = |path: &str, uid, gid, kind| Entry { uid, gid, ..entry(path, kind) };
    let manifest = manifest(vec![
        owned("a", 0, 0, EntryKind::Directory),
        owned("a/b", 0, 0, empty_file()),
        owned("a/c", 0, 7, empty_file()),
        owned("d", 7, 0, empty_file()),
        Entry { mode: 0, ..owned("e", 0, 0, EntryKind::Symlink { target: b"a".to_vec() }) },
        owned("f", 0, 0, EntryKind::Fifo),
    ]);
    for (mode, uid, gid) in [(0o700, 0, 0), (0o2770, 0, 7), (0o2770, 0, 0), (0o700, 0, 7), (0o700, 7, 0)] {
        let to = tempdir().unwrap();
        std::os::unix::fs::chown(to.path(), Some(uid), Some(gid)).unwrap();
        set_mode(to.path(), mode);
        let options = WriteOptions::default();
        TreeWriter::new(to.path(), manifest.clone(), options).unwrap().finish().unwrap();
        assert_eq!(manifest_of(to.path()), *manifest);
    }
}

#[test]
fn devices_are_created_only_if_permitted() {
    let null = EntryKind::Device { kind: DeviceKind::Character, major: 1, minor: 3 };
    let manifest = manifest(vec![entry("null", null)]);
    let write = |options| {
        let to = tempdir().unwrap();
        let written = TreeWriter::new(to.path(), manifest.clone(), options).and_then(TreeWriter::finish);
        (written, manifest_of(to.path()))
    };
    let options = WriteOptions::default();

    let (refused, there) = write(options);
    assert!(matches!(refused, Err(WriteError::Unsafe { path }) if path == Path::new("null")));
    assert_eq!(there.entries().len(), 1);

    for devices in [false, true] {
        let (written, there) = as_unprivileged_in_own_dir(|to| {
            let options = WriteOptions {
                devices,
                strict: false,
                ownership: WrittenOwnership::Caller,
                ..WriteOptions::default()
            };
            let written = TreeWriter::new(to, manifest.clone(), options).and_then(TreeWriter::finish);
            (written, manifest_of(to))
        });
        let skipped = written.unwrap().skipped;
        assert!(matches!(&skipped[..], [SkippedPart { what: SkippedPartKind::Device, .. }]), "{skipped:?}");
        assert_eq!(there.entries().len(), 1);
    }

    if is_root() {
        match write(WriteOptions { devices: true, ..options }) {
            (Ok(_), there) => assert_eq!(there, *manifest_with_root_of(&manifest, &there)),
            // Some containers forbid device nodes.
            (Err(WriteError::Io { source, .. }), _) => {
                assert_eq!(Errno::from_io_error(&source), Some(Errno::PERM));
            }
            (Err(error), _) => panic!("{error}"),
        }
    }
}

fn as_unprivileged_in_own_dir<T: Send>(test: impl FnOnce(&Path) -> T + Send) -> T {
    let dir = crate::common::shared_dir();
    as_unprivileged(|| {
        let to = dir.path().join("to");
        fs::create_dir(&to).unwrap();
        test(&to)
    })
}

/// Returns `manifest` with the root entry of `other`, for the comparison of the other entries.
fn manifest_with_root_of(manifest: &Manifest, other: &Manifest) -> Arc<Manifest> {
    let entries = [&other.entries()[..1], &manifest.entries()[1..]].concat();
    Arc::new(Manifest::new(entries, Limits::default()).unwrap())
}

#[test]
fn unprivileged_user_writes_read_only_directories() {
    let from = crate::common::shared_dir();
    as_unprivileged_in_own_dir(|to| {
        let from = from.path().join("from");
        for dir in ["from", "from/closed", "from/closed/inner"].map(|dir| from.parent().unwrap().join(dir)) {
            fs::create_dir(dir).unwrap();
        }
        fs::write(from.join("closed/inner/file"), b"x").unwrap();
        symlink("file", from.join("closed/inner/link")).unwrap();
        fs::hard_link(from.join("closed/inner/file"), from.join("z")).unwrap();
        for (dir, mode) in [("closed/inner", 0o500), ("closed", 0o555)] {
            set_mode(&from.join(dir), mode);
        }
        crate::common::copy(&from, to, WriteOptions::default());
        assert_eq!(manifest_of(to), manifest_of(&from));
        for tree in [to, &from] {
            remove_tree(tree).unwrap();
            assert!(!tree.exists());
        }
    });
}

#[test]
fn directory_modes_are_applied_last() {
    let manifest = Arc::new(as_unprivileged(crate::common::closed_directories));
    as_unprivileged_in_own_dir(|to| {
        TreeWriter::new(to, manifest.clone(), WriteOptions::default()).unwrap().finish().unwrap();
        let mode = |path: &Path| path.symlink_metadata().unwrap().mode() & 0o7777;
        assert_eq!(mode(&to.join("a")), 0);
        set_mode(&to.join("a"), 0o700);
        assert_eq!(mode(&to.join("a/b")), 0);
        set_mode(&to.join("a"), 0);
        remove_tree(to).unwrap();
        assert!(!to.exists());
    });
}

#[test]
fn omitted_files_are_not_linked() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    for name in ["a", "b", "empty"] {
        fs::write(from.path().join(name), if name == "empty" { "" } else { name }).unwrap();
    }
    fs::hard_link(from.path().join("a"), from.path().join("link")).unwrap();
    let manifest = Arc::new(manifest_of(from.path()));
    let mut writer = TreeWriter::new(to.path(), manifest.clone(), WriteOptions::default()).unwrap();
    writer.omit(manifest.find(b"a").unwrap());
    writer.omit(manifest.find(b"empty").unwrap());
    assert!(matches!(writer.put(0, b"a"), Err(WriteError::OutOfOrder(0))));
    writer.put(1, b"b").unwrap();
    writer.finish().unwrap();
    let names: Vec<_> = fs::read_dir(to.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["b"]);
}

/// Needs the permission to mount a small file system.
#[test]
fn full_disk_is_detected() {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use rustix::thread::{UnshareFlags, unshare_unsafe};

    if !is_root() {
        return;
    }
    let fixture = Fixture::new();
    let to = fixture.to.path();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The mount namespace of this thread ends with the thread, and the mount with it.
            // SAFETY: this thread does not rely on a shared working directory or shared mounts.
            if unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.is_err() {
                return;
            }
            let private = MountPropagationFlags::REC | MountPropagationFlags::PRIVATE;
            if mount_change("/", private).is_err()
                || mount("tmpfs", to, "tmpfs", MountFlags::empty(), c"size=1m").is_err()
            {
                return;
            }
            let mut writer = fixture.writer();
            let put = (0..6).try_for_each(|ordinal| writer.put(ordinal, &fixture.data(ordinal)));
            assert!(matches!(put, Err(WriteError::DiskFull(_))), "{put:?}");
        });
    });
}

#[test]
fn file_of_holes_has_its_size() {
    let to = tempdir().unwrap();
    let data = noise(1, 100);
    let digest = domain::Digest(*blake3::hash(&data).as_bytes());
    let extents = vec![Extent { offset: 1000, length: 100, digest }];
    let manifest = manifest(vec![entry("file", EntryKind::File { size_bytes: 5000, extents })]);
    let mut writer = TreeWriter::new(to.path(), manifest, WriteOptions::default()).unwrap();
    writer.put(0, &data).unwrap();
    writer.finish().unwrap();
    let file = File::open(to.path().join("file")).unwrap();
    assert_eq!(file.metadata().unwrap().size(), 5000);
    let mut content = vec![1; 5000];
    file.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(content, [&[0; 1000][..], &data, &[0; 3900]].concat());
}
