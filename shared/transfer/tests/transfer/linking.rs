//! Tests of files that trees share by hard links.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use crate::common::{is_root, make, manifest_of, noise, random, set_mtime};
use gantry_transfer::*;
use proptest::prelude::*;
use tempfile::tempdir;

/// Writes the tree of `new` to `to`, and links what `old` has. Returns the number of linked files.
fn write(old: &Path, sealed: Arc<Manifest>, new: &Path, to: &Path) -> usize {
    let manifest = Arc::new(manifest_of(new));
    let mut writer = TreeWriter::new(to, manifest.clone(), WriteOptions::default()).unwrap();
    let mut known = HashMap::new();
    for located in sealed.extents() {
        known.insert(located.extent.digest, located.entry);
    }
    let mut source = SealedTree::open(old, sealed).unwrap();
    let mut linked = 0;
    for (index, entry) in manifest.entries().iter().enumerate() {
        let first = entry.extents().first().and_then(|extent| known.get(&extent.digest));
        if let Some(of) = first {
            linked += usize::from(writer.link_file(index, &mut source, *of).unwrap());
        }
    }
    let mut reader = TreeReader::new(new, manifest.clone(), ReadOptions::default()).unwrap();
    for batch in reader.batches(&writer.missing()) {
        for extent in batch.unwrap() {
            writer.put(extent.ordinal, &extent.data).unwrap();
        }
    }
    writer.finish().unwrap();
    assert_eq!(manifest_of(to), *manifest);
    linked
}

#[test]
fn unchanged_files_are_shared() {
    let (old, new, to) = (tempdir().unwrap(), tempdir().unwrap(), tempdir().unwrap());
    for (root, changed) in [(&old, 1), (&new, 2)] {
        let root = root.path();
        let directory = root.join(if changed == 1 { "before" } else { "after" });
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("moved"), noise(3, 5000)).unwrap();
        fs::write(root.join("same"), noise(4, 3_000_000)).unwrap();
        fs::write(root.join("twin-1"), noise(5, 70)).unwrap();
        fs::write(root.join("twin-2"), noise(5, 70)).unwrap();
        fs::write(root.join("edited"), noise(changed, 70)).unwrap();
        fs::write(root.join("touched"), noise(6, 70)).unwrap();
        for name in ["same", "twin-1", "twin-2", "edited"] {
            set_mtime(&root.join(name), 1000, 5);
        }
        set_mtime(&root.join("touched"), 1000, changed as i64);
        set_mtime(&directory.join("moved"), 1000, 5);
    }
    let sealed = Arc::new(manifest_of(old.path()));
    // One of the twins is copied, because they are two files.
    assert_eq!(write(old.path(), sealed, new.path(), to.path()), 3);
    let inode = |root: &Path, name: &str| fs::metadata(root.join(name)).unwrap().ino();
    assert_eq!(inode(old.path(), "same"), inode(to.path(), "same"));
    assert_eq!(inode(old.path(), "before/moved"), inode(to.path(), "after/moved"));
    assert_ne!(inode(to.path(), "twin-1"), inode(to.path(), "twin-2"));
    for name in ["edited", "touched"] {
        assert_ne!(inode(old.path(), name), inode(to.path(), name), "{name}");
    }
    remove_tree(old.path()).unwrap();
    assert_eq!(manifest_of(to.path()).tree_digest(), manifest_of(new.path()).tree_digest());
}

#[test]
fn file_that_differs_from_its_manifest_is_not_shared() {
    let (old, new) = (tempdir().unwrap(), tempdir().unwrap());
    for root in [&old, &new] {
        fs::write(root.path().join("file"), "content").unwrap();
        set_mtime(&root.path().join("file"), 1000, 5);
    }
    let sealed = Arc::new(manifest_of(old.path()));
    let linked = || write(old.path(), sealed.clone(), new.path(), tempdir().unwrap().path());
    assert_eq!(linked(), 1);
    fs::write(old.path().join("file"), "damaged").unwrap();
    assert_eq!(linked(), 0, "another time");
    fs::write(old.path().join("file"), "cut").unwrap();
    set_mtime(&old.path().join("file"), 1000, 5);
    assert_eq!(linked(), 0, "another size");
    fs::remove_file(old.path().join("file")).unwrap();
    assert_eq!(linked(), 0, "no file");
    std::os::unix::fs::symlink("/etc/hostname", old.path().join("file")).unwrap();
    assert_eq!(linked(), 0, "a symbolic link");
}

#[test]
fn file_with_many_names_or_hidden_attributes_is_not_shared() {
    let (old, new, names) = (tempdir().unwrap(), tempdir().unwrap(), tempdir().unwrap());
    let path = old.path().join("file");
    for root in [&old, &new] {
        fs::write(root.path().join("file"), "content").unwrap();
        set_mtime(&root.path().join("file"), 1000, 5);
    }
    let sealed = Arc::new(manifest_of(old.path()));
    let linked = || write(old.path(), sealed.clone(), new.path(), tempdir().unwrap().path());
    for name in 1..10_000 {
        fs::hard_link(&path, names.path().join(name.to_string())).unwrap();
    }
    assert_eq!(linked(), 0, "10,000 names");
    fs::remove_file(names.path().join("1")).unwrap();
    assert_eq!(linked(), 1);
    if is_root() {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&path, "trusted.hidden", b"x", flags).unwrap();
        assert_eq!(linked(), 0, "a manifest leaves this attribute out");
    }
}

#[test]
fn files_stay_two_if_two_sources_share_them() {
    let (one, other, to) = (tempdir().unwrap(), tempdir().unwrap(), tempdir().unwrap());
    fs::write(one.path().join("file"), "content").unwrap();
    set_mtime(&one.path().join("file"), 1000, 5);
    fs::hard_link(one.path().join("file"), other.path().join("file")).unwrap();
    let source = |root: &Path| SealedTree::open(root, Arc::new(manifest_of(root))).unwrap();
    let known = manifest_of(one.path());
    let file = known.find(b"file").unwrap();
    let twin = |path: &str| Entry { path: path.into(), ..known.entries()[file].clone() };
    let entries = vec![known.entries()[0].clone(), twin("a"), twin("b")];
    let twins = Arc::new(Manifest::new(entries, Limits::default()).unwrap());
    let mut writer = TreeWriter::new(to.path(), twins, WriteOptions::default()).unwrap();
    assert!(writer.link_file(1, &mut source(one.path()), file).unwrap());
    assert!(!writer.link_file(2, &mut source(other.path()), file).unwrap());
}

#[test]
fn scan_accepts_names_in_other_trees() {
    let (root, other) = (tempdir().unwrap(), tempdir().unwrap());
    fs::write(root.path().join("file"), "content").unwrap();
    let share = |path: &Path| {
        let (path, name) = (root.path().join(path), other.path().join("name"));
        let changed = || fs::metadata(&path).map(|found| (found.ctime(), found.ctime_nsec())).unwrap();
        let before = changed();
        fs::hard_link(&path, &name).unwrap();
        // The clock of the kernel may stand still for some milliseconds.
        while changed() == before {
            fs::remove_file(&name).unwrap();
            fs::hard_link(&path, &name).unwrap();
        }
    };
    for shared_files in [false, true] {
        let options = ScanOptions { shared_files, after_read: Some(&share), ..ScanOptions::default() };
        let scanned = scan(root.path(), &options, None).unwrap();
        assert_eq!(scanned.problems.is_empty(), shared_files);
        fs::remove_file(other.path().join("name")).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A tree that shares files with another one is exact, and neither changes the other.
    #[test]
    fn any_tree_shares_with_any_other(common in random::tree(), before in random::tree(), after in random::tree()) {
        let (old, new, to) = (tempdir().unwrap(), tempdir().unwrap(), tempdir().unwrap());
        make(old.path(), &[&before[..before.len() / 2], &common].concat());
        make(new.path(), &[&after[..after.len() / 2], &common].concat());
        let sealed = Arc::new(manifest_of(old.path()));
        write(old.path(), sealed.clone(), new.path(), to.path());
        prop_assert_eq!(&manifest_of(old.path()), &*sealed);
        remove_tree(to.path()).unwrap();
        prop_assert_eq!(&manifest_of(old.path()), &*sealed);
    }
}

/// A mounted file system, which is unmounted when this is dropped.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn unchanged_extents_share_blocks_on_xfs() {
    const MIB: usize = 1 << 20;
    let directory = tempdir().unwrap();
    let (image, disk) = (directory.path().join("image"), directory.path().join("disk"));
    fs::File::create(&image).and_then(|file| file.set_len(512 << 20)).unwrap();
    fs::create_dir(&disk).unwrap();
    let run = |program: &str, arguments: &[&str], path: &Path| {
        Command::new(program).args(arguments).arg(path).output().is_ok_and(|done| done.status.success())
    };
    let is_mounted = is_root()
        && run("mkfs.xfs", &["-q"], &image)
        && run("mount", &["-o", "loop", image.to_str().unwrap()], &disk);
    if !is_mounted {
        eprintln!("not applicable: this process cannot mount XFS");
        return;
    }
    let mounted = Mounted(disk.clone());
    let [old, new, to] = ["old", "new", "to"].map(|name| disk.join(name));
    for path in [&old, &new, &to] {
        fs::create_dir(path).unwrap();
    }
    let mut content = noise(1, 64 * MIB);
    fs::write(old.join("file"), &content).unwrap();
    content[32 * MIB + 5] ^= 1;
    fs::write(new.join("file"), &content).unwrap();
    let used = || {
        assert!(run("sync", &["-f"], &disk));
        let found = rustix::fs::statvfs(&disk).unwrap();
        (found.f_blocks - found.f_bfree) * found.f_frsize
    };
    let before = used();
    let manifest = Arc::new(manifest_of(&new));
    let mut writer = TreeWriter::new(&to, manifest.clone(), WriteOptions::default()).unwrap();
    let source = fs::File::open(old.join("file")).unwrap();
    for located in manifest.extents() {
        let copied = writer.copy_extent(located.ordinal, &source, located.extent.offset, Trust::Verify);
        assert_eq!(copied.is_ok(), located.ordinal != 32, "{copied:?}");
    }
    writer.put(32, &content[32 * MIB..33 * MIB]).unwrap();
    writer.finish().unwrap();
    assert_eq!(manifest_of(&to), *manifest);
    let grown = used() - before;
    drop((source, mounted));
    assert!((MIB as u64..4 * MIB as u64).contains(&grown), "{grown} bytes");
}
