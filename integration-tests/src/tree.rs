//! Exact comparison of directories.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Properties of an entry that a round trip must preserve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    kind: &'static str,
    mode: u32,
    mtime: (i64, i64),
    /// Content of a file, target of a symbolic link.
    content: Vec<u8>,
    /// Other names of the same file.
    links: Vec<PathBuf>,
    sparse: bool,
}

/// Reads all entries below `root`, by path.
#[must_use]
pub fn read(root: &Path) -> BTreeMap<PathBuf, Entry> {
    let mut entries = BTreeMap::new();
    let mut names: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    walk(root, Path::new(""), &mut entries, &mut names);
    for links in names.values().filter(|links| links.len() > 1) {
        for path in links {
            if let Some(entry) = entries.get_mut(path) {
                entry.links.clone_from(links);
            }
        }
    }
    entries
}

fn walk(
    root: &Path,
    below: &Path,
    entries: &mut BTreeMap<PathBuf, Entry>,
    names: &mut BTreeMap<u64, Vec<PathBuf>>,
) {
    for entry in fs::read_dir(root.join(below)).expect("a directory") {
        let path = below.join(entry.expect("an entry").file_name());
        let full = root.join(&path);
        let metadata = fs::symlink_metadata(&full).expect("metadata");
        let (kind, content) = if metadata.is_dir() {
            ("directory", Vec::new())
        } else if metadata.is_symlink() {
            ("symlink", fs::read_link(&full).expect("a target").as_os_str().as_bytes().to_vec())
        } else {
            names.entry(metadata.ino()).or_default().push(path.clone());
            ("file", fs::read(&full).expect("content"))
        };
        let entry = Entry {
            kind,
            mode: if kind == "symlink" { 0 } else { metadata.permissions().mode() & 0o7777 },
            mtime: (metadata.mtime(), metadata.mtime_nsec()),
            content,
            links: Vec::new(),
            sparse: kind == "file" && metadata.blocks() * 512 + 4096 < metadata.size(),
        };
        entries.insert(path.clone(), entry);
        if kind == "directory" {
            walk(root, &path, entries, names);
        }
    }
}

/// Fails with the first difference.
pub fn assert_same(left: &Path, right: &Path) {
    compare(&read(left), &read(right));
}

/// Compares two trees. `right` is a copy of `left` through tar on a Concourse worker, so it has
/// whole seconds and no holes.
pub fn assert_same_through_tar(left: &Path, right: &Path) {
    let mut left = read(left);
    let mut right = read(right);
    for entry in left.values_mut() {
        entry.mtime.1 = 0;
        entry.sparse = false;
    }
    for entry in right.values_mut() {
        entry.sparse = false;
    }
    compare(&left, &right);
}

fn compare(left: &BTreeMap<PathBuf, Entry>, right: &BTreeMap<PathBuf, Entry>) {
    assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>(), "other names");
    for (path, entry) in left {
        let other = &right[path];
        assert_eq!(entry.content.len(), other.content.len(), "{path:?}: another size");
        assert!(entry.content == other.content, "{path:?}: other content");
        let bare = |entry: &Entry| Entry { content: Vec::new(), ..entry.clone() };
        assert_eq!(bare(entry), bare(other), "{path:?}");
    }
}

/// Makes a directory with difficult entries: odd names, links, holes, old times and missing
/// permissions.
pub fn make_difficult(root: &Path) {
    fs::create_dir_all(root).expect("the root");
    let file = |name: &OsStr, content: &[u8], mode: u32| {
        let path = root.join(name);
        fs::write(&path, content).expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
    };
    file(OsStr::new("plain"), b"hello\n", 0o644);
    file(OsStr::new("empty"), b"", 0o600);
    file(OsStr::new("with space"), b"space", 0o755);
    file(OsStr::new("new\nline"), b"line", 0o640);
    file(OsStr::from_bytes(b"not utf-8 \xff\xfe"), b"bytes", 0o644);
    file(OsStr::new(&"x".repeat(255)), b"long", 0o444);
    file(OsStr::new("-rf"), b"dash", 0o644);
    file(OsStr::new("setuid"), b"#!", 0o4755);
    let large: Vec<u8> =
        (0..5_000_001_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    file(OsStr::new("large"), &large[..5_000_001], 0o644);

    let sparse = File::create(root.join("sparse")).expect("create");
    sparse.set_len(64 << 20).expect("a hole");
    sparse.write_all_at(b"island", 32 << 20).expect("an island");

    fs::create_dir_all(root.join("deep/er/and/deeper")).expect("directories");
    fs::create_dir(root.join("empty directory")).expect("directory");
    fs::write(root.join("deep/er/file"), b"deep").expect("write");
    fs::hard_link(root.join("plain"), root.join("deep/another name of plain")).expect("hard link");
    symlink("plain", root.join("symlink")).expect("symlink");
    symlink("../nowhere/at all", root.join("dangling")).expect("symlink");
    symlink("/etc/passwd", root.join("absolute")).expect("symlink");
    fs::set_permissions(root.join("empty directory"), fs::Permissions::from_mode(0o1777)).expect("chmod");

    let old = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    File::open(root.join("plain")).and_then(|file| file.set_modified(old)).expect("mtime");
    File::open(root.join("deep")).and_then(|file| file.set_modified(old)).expect("mtime");
}
