//! Tests of archives with GNU tar.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::common::{is_root, manifest_of, noise, set_mode, set_mtime};
use gantry_transfer::*;
use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, XattrFlags, lsetxattr, makedev, mknodat};
use tempfile::tempdir;

/// Packs a tree with this crate.
fn pack(root: &Path) -> Vec<u8> {
    let manifest = Arc::new(manifest_of(root));
    let mut reader = TreeReader::new(root, manifest.clone(), ReadOptions::default()).unwrap();
    let mut writer = ArchiveWriter::new(Vec::new(), manifest.clone());
    for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
        for extent in batch.unwrap() {
            writer.put(extent.ordinal, &extent.data).unwrap();
        }
    }
    writer.finish().unwrap()
}

const ATTRIBUTES: [&str; 2] = ["--xattrs", "--xattrs-include=*"];

/// Unpacks an archive with tar, through a pipe.
fn tar_x(archive: &[u8], to: &Path, arguments: &[&str], locale: &str) {
    let mut tar = Command::new("tar")
        .args(["-x", "--numeric-owner", "-p", "--warning=no-timestamp"])
        .args(arguments)
        .arg("-C")
        .arg(to)
        .env("LC_ALL", locale)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    tar.stdin.take().unwrap().write_all(archive).unwrap();
    let output = tar.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

/// Packs a tree with tar.
fn tar_c(from: &Path, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("tar")
        .args(["-c", "--numeric-owner"])
        .args(arguments)
        .arg("-C")
        .arg(from)
        .arg(".")
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

const EVERYTHING: [&str; 4] = ["--format=posix", "--sparse", "--xattrs", "--xattrs-include=*"];

fn read(archive: &[u8]) -> Result<Manifest, ArchiveError> {
    ArchiveReader::new(archive).read(Limits::default(), |_| Ok(()))
}

/// Creates a tree with every kind of entry.
fn everything(root: &Path) {
    crate::common::everything(root);
    let long = root.join("l".repeat(200)).join("m".repeat(200));
    fs::create_dir_all(&long).unwrap();
    fs::write(long.join(OsStr::from_bytes(&[b"n".repeat(99), b"\xff=\n".to_vec()].concat())), b"far")
        .unwrap();
    fs::hard_link(root.join("a-b"), long.join("to a-b")).unwrap();
    fs::hard_link(long.join("to a-b"), root.join("z back")).unwrap();
    fs::create_dir(root.join("d".repeat(97))).unwrap();
    fs::create_dir(root.join("d".repeat(98))).unwrap();
    symlink("t".repeat(100), root.join("link of 100")).unwrap();
    symlink(OsStr::from_bytes(&b"t\xfe".repeat(1000)), root.join("long link")).unwrap();
    for length in [511, 512, 513, 4095, 4096, 4097, (2 << 20) - 1] {
        fs::write(root.join(format!("length {length}")), noise(5, length)).unwrap();
    }
    // A file with many regions, one of them at its end.
    let sparse = File::create(root.join("many holes")).unwrap();
    for hole in 0..60 {
        sparse.write_all_at(&noise(hole, 5000), hole * 70_000).unwrap();
    }
    // A file of the maximum size of many file systems, which exceeds the octal digits of a header.
    let sparse = File::create(root.join("giant")).unwrap();
    sparse.set_len(9 << 40).unwrap();
    sparse.write_all_at(b"far out", 9 << 39).unwrap();
    fs::write(root.join("attributes"), b"x").unwrap();
    for name in ["attributes", "empty"] {
        for (key, value) in
            [("user.a=b%3D%", &b"\0\n=\xff"[..]), ("user.none", b""), ("user.long", &[7; 3000])]
        {
            lsetxattr(root.join(name), key, value, XattrFlags::empty()).unwrap();
        }
    }
    if is_root() {
        let mode = Mode::from_raw_mode(0o620);
        for (name, kind, device) in [
            ("character", FileType::CharacterDevice, makedev(4, 300)),
            ("block", FileType::BlockDevice, makedev(259, 70_000)),
        ] {
            mknodat(CWD, root.join(name), kind, mode, device).unwrap();
        }
        for (name, uid, gid) in [("a-b", 1000, 0), ("large", 3_000_000, 4_294_967_290), ("dangling", 7, 8)] {
            std::os::unix::fs::lchown(root.join(name), Some(uid), Some(gid)).unwrap();
        }
        set_mode(&root.join("a-b"), 0o4755); // Lost with the owner.
        let mut capability = [0; 20];
        (capability[3], capability[5]) = (2, 4); // Version 2, CAP_NET_BIND_SERVICE.
        lsetxattr(root.join("attributes"), "security.capability", &capability, XattrFlags::empty()).unwrap();
    }
    set_mtime(root, 1_500_000_000, 42);
}

#[test]
fn tree_round_trips_through_tar() {
    let from = tempdir().unwrap();
    everything(from.path());
    let manifest = manifest_of(from.path());
    let archive = pack(from.path());
    assert_same(&read(&archive).unwrap(), &manifest);

    // Names are bytes, independent of the locale of tar.
    for locale in ["C", "C.UTF-8"] {
        let to = tempdir().unwrap();
        tar_x(&archive, to.path(), &ATTRIBUTES, locale);
        assert_same(&manifest_of(to.path()), &manifest);
        assert_same(&read(&tar_c(to.path(), &EVERYTHING)).unwrap(), &manifest);
    }

    // Without the option for attributes, tar silently omits only the attributes.
    let to = tempdir().unwrap();
    tar_x(&archive, to.path(), &[], "C");
    let found = manifest_of(to.path());
    let plain = manifest.entries().iter().map(|entry| Entry { xattrs: vec![], ..entry.clone() });
    assert_same(&found, &Manifest::new(plain, Limits::default()).unwrap());
}

/// Compares entry by entry, because whole manifests are too long for a message.
#[track_caller]
fn assert_same(found: &Manifest, expected: &Manifest) {
    for (found, expected) in found.entries().iter().zip(expected.entries()) {
        assert_eq!(found, expected);
    }
    assert_eq!(found.tree_digest(), expected.tree_digest());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_round_trips_through_tar(nodes in crate::common::random::tree()) {
        let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
        crate::common::make(from.path(), &nodes);
        let manifest = manifest_of(from.path());
        let archive = pack(from.path());
        prop_assert_eq!(&read(&archive).unwrap(), &manifest);
        tar_x(&archive, to.path(), &ATTRIBUTES, "C");
        prop_assert_eq!(&manifest_of(to.path()), &manifest);
        prop_assert_eq!(&read(&tar_c(to.path(), &EVERYTHING)).unwrap(), &manifest);
    }
}

#[test]
fn every_format_of_holes_is_read() {
    let from = tempdir().unwrap();
    let sparse = File::create(from.path().join("many")).unwrap();
    for hole in 0..60 {
        sparse.write_all_at(&noise(hole, 5000), hole * 70_000).unwrap();
    }
    let sparse = File::create(from.path().join("few")).unwrap();
    sparse.write_all_at(&noise(1, (2 << 20) + 100), 5 << 20).unwrap();
    sparse.set_len(20 << 20).unwrap();
    File::create(from.path().join(format!("hole {}", "n".repeat(120)))).unwrap().set_len(3 << 20).unwrap();
    for name in fs::read_dir(from.path()).unwrap() {
        set_mtime(&name.unwrap().path(), 1000, 0);
    }
    set_mtime(from.path(), 1000, 0);
    let manifest = manifest_of(from.path());
    assert!(manifest.extent_bytes() < manifest.size_bytes() / 5, "the file system does not support holes");

    for format in [
        &["--format=gnu"][..],
        &["--format=oldgnu"],
        &["--format=posix", "--sparse-version=0.0"],
        &["--format=posix", "--sparse-version=0.1"],
        &["--format=posix", "--sparse-version=1.0"],
    ] {
        let archive = tar_c(from.path(), &[&["--sparse"], format].concat());
        assert!(archive.len() < 4 << 20, "{format:?}");
        assert_same(&read(&archive).unwrap(), &manifest);
    }
}

/// By default, GNU tar keeps no nanoseconds, no attributes and no holes.
#[test]
fn default_tar_loses_only_optional_data() {
    let from = tempdir().unwrap();
    everything(from.path());
    fs::remove_file(from.path().join("giant")).unwrap();
    let found = read(&tar_c(from.path(), &[])).unwrap();
    let expected = manifest_of(from.path());
    assert_eq!(found.entries().len(), expected.entries().len());
    for (found, expected) in found.entries().iter().zip(expected.entries()) {
        let mut expected = Entry { mtime_nanos: 0, xattrs: vec![], ..expected.clone() };
        if let (EntryKind::File { extents, .. }, EntryKind::File { extents: all, size_bytes }) =
            (&mut expected.kind, &found.kind)
            && extents.iter().map(|extent| u64::from(extent.length)).sum::<u64>() < *size_bytes
        {
            assert_eq!(all.iter().map(|extent| u64::from(extent.length)).sum::<u64>(), *size_bytes);
            extents.clone_from(all);
        }
        assert_eq!(found, &expected);
    }
    for format in ["ustar", "v7"] {
        let from = tempdir().unwrap();
        fs::create_dir_all(from.path().join("d".repeat(60)).join("e".repeat(if format == "v7" {
            10
        } else {
            60
        })))
        .unwrap();
        fs::write(from.path().join("file"), noise(1, 1000)).unwrap();
        let (found, expected) =
            (read(&tar_c(from.path(), &["--format", format])).unwrap(), manifest_of(from.path()));
        let plain = |manifest: &Manifest| {
            manifest
                .entries()
                .iter()
                .map(|entry| Entry { mtime_nanos: 0, ..entry.clone() })
                .collect::<Vec<_>>()
        };
        assert_eq!(plain(&found), plain(&expected));
    }
}

/// Extents are found by their offsets, independent of the format of holes.
#[test]
fn second_pass_returns_wanted_extents() {
    let from = tempdir().unwrap();
    everything(from.path());
    fs::remove_file(from.path().join("giant")).unwrap();
    let manifest = Arc::new(manifest_of(from.path()));
    let mut wanted = OrdinalRanges::new();
    (0..manifest.extent_count()).filter(|n| n % 3 != 0).for_each(|n| wanted.insert(n).unwrap());
    for archive in [tar_c(from.path(), &[]), tar_c(from.path(), &EVERYTHING), pack(from.path())] {
        let mut found = Vec::new();
        let keep = |extent: ExtentData| {
            assert!(manifest.verify(extent.ordinal, &extent.data).is_ok());
            found.push(extent.ordinal);
            Ok(())
        };
        ArchiveReader::new(&archive[..]).extents(&manifest, &wanted, keep).unwrap();
        found.sort_unstable();
        assert_eq!(found, wanted.ordinals().collect::<Vec<_>>());
    }

    let reader = || ArchiveReader::new(&b""[..]);
    let error = reader()
        .extents(&manifest, &OrdinalRanges::all(manifest.extent_count() + 1), |_| Ok(()))
        .unwrap_err();
    assert!(matches!(error, ArchiveError::NoSuchExtent(n) if n == manifest.extent_count()), "{error}");

    let before = tar_c(from.path(), &[]);
    fs::write(from.path().join("large"), b"other").unwrap();
    let ordinals = manifest.ordinals_of(manifest.find(b"large").unwrap());
    let error = ArchiveReader::new(&tar_c(from.path(), &[])[..])
        .extents(&manifest, &OrdinalRanges::all(manifest.extent_count()), |extent| {
            assert!(!ordinals.contains(&extent.ordinal));
            Ok(())
        })
        .unwrap_err();
    assert!(matches!(&error, ArchiveError::Changed { path } if path == Path::new("large")), "{error}");
    let refuse = |_: ExtentData| Err(std::io::Error::other("full"));
    let error = ArchiveReader::new(&before[..]).extents(&manifest, &wanted, refuse).unwrap_err();
    assert!(matches!(error, ArchiveError::Sink(_)));
}

#[test]
fn first_pass_returns_all_content() {
    let from = tempdir().unwrap();
    fs::write(from.path().join("large"), noise(3, (2 << 20) + 500)).unwrap();
    fs::write(from.path().join("small"), b"small").unwrap();
    let mut seen = Vec::new();
    let archive = pack(from.path());
    let manifest = ArchiveReader::new(&archive[..])
        .read(Limits::default(), |ArchivedExtent { extent, data }| {
            assert_eq!(extent.digest.as_bytes(), blake3::hash(data).as_bytes());
            assert_eq!(extent.length as usize, data.len());
            seen.push(extent);
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, manifest.extents().map(|located| *located.extent).collect::<Vec<_>>());
    assert_eq!(seen.iter().map(|extent| extent.offset).collect::<Vec<_>>(), [0, 1 << 20, 2 << 20, 0]);
}

#[test]
fn writer_accepts_complete_files_in_any_order() {
    let from = tempdir().unwrap();
    fs::create_dir(from.path().join("d")).unwrap();
    fs::write(from.path().join("a"), b"aa").unwrap();
    fs::write(from.path().join("empty"), b"").unwrap();
    fs::hard_link(from.path().join("a"), from.path().join("d/link")).unwrap();
    let large = vec![7; (1 << 20) + 5];
    fs::write(from.path().join("d/large"), &large).unwrap();
    let manifest = Arc::new(manifest_of(from.path()));
    let (a, large_first) = (0, 1);

    let mut writer = ArchiveWriter::new(Vec::new(), manifest.clone());
    let early = writer.put(large_first + 1, &large[1 << 20..]);
    assert!(matches!(early, Err(ArchiveWriteError::OutOfOrder(_))), "{early:?}");
    writer.put(large_first, &large[..1 << 20]).unwrap();
    let between = writer.put(a, b"aa");
    assert!(matches!(between, Err(ArchiveWriteError::OutOfOrder(_))), "{between:?}");
    writer.put(large_first + 1, &large[1 << 20..]).unwrap();
    writer.put(a, b"aa").unwrap();
    let again = writer.put(large_first, &large[..1 << 20]);
    assert!(matches!(again, Err(ArchiveWriteError::OutOfOrder(_))), "{again:?}");
    let archive = writer.finish().unwrap();

    let found = ArchiveReader::new(&archive[..]).read(Limits::default(), |_| Ok(())).unwrap();
    assert_eq!(found.tree_digest(), manifest.tree_digest());
    let to = tempdir().unwrap();
    let mut tar = std::process::Command::new("tar");
    let mut tar = tar.args(["-xp", "-C"]).arg(to.path()).stdin(std::process::Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut tar.stdin.take().unwrap(), &archive).unwrap();
    assert!(tar.wait().unwrap().success());
    assert_eq!(manifest_of(to.path()).tree_digest(), manifest.tree_digest());
}

#[test]
fn writer_accepts_only_content_of_manifest() {
    let from = tempdir().unwrap();
    fs::write(from.path().join("a"), b"aa").unwrap();
    fs::write(from.path().join("b"), b"bb").unwrap();
    let manifest = Arc::new(manifest_of(from.path()));
    let mut writer = ArchiveWriter::new(Vec::new(), manifest);
    let error = writer.put(0, b"bb").unwrap_err();
    assert!(matches!(error, ArchiveWriteError::Content(WriteError::DigestMismatch { .. })), "{error}");
    writer.put(0, b"aa").unwrap();
    assert!(matches!(writer.put(0, b"aa"), Err(ArchiveWriteError::OutOfOrder(0))));
    let error = writer.finish().unwrap_err();
    assert!(matches!(&error, ArchiveWriteError::Missing { path } if path == Path::new("b")), "{error}");
}

/// Covers extents that a file system with blocks of 4 KiB does not have.
#[test]
fn extents_are_extended_to_archive_blocks() {
    let content = noise(1, 9000);
    let extent = |offset: usize, length: usize| {
        let digest = blake3::hash(&content[offset..offset + length]);
        let digest = domain::Digest(*digest.as_bytes());
        Extent { offset: offset as u64, length: length as u32, digest }
    };
    let entry = |path: &[u8], kind| Entry {
        path: path.to_vec(),
        mode: 0o755,
        uid: 1,
        gid: u32::MAX - 1,
        mtime_seconds: i64::MIN / 4,
        mtime_nanos: 999_999_999,
        xattrs: vec![],
        kind,
    };
    let extents = vec![extent(3, 5), extent(100, 20), extent(2000, 700), extent(8888, 112)];
    let file = EntryKind::File { size_bytes: 9000, extents: extents.clone() };
    let entries = [entry(b"", EntryKind::Directory), entry(b"file", file)];
    let manifest = Arc::new(Manifest::new(entries, Limits::default()).unwrap());
    let mut writer = ArchiveWriter::new(Vec::new(), manifest.clone());
    for (ordinal, extent) in (0..).zip(&extents) {
        let offset = extent.offset as usize;
        writer.put(ordinal, &content[offset..offset + extent.length as usize]).unwrap();
    }
    let archive = writer.finish().unwrap();

    let found = read(&archive).unwrap();
    let offsets: Vec<_> =
        found.extents().map(|located| (located.extent.offset, located.extent.length)).collect();
    assert_eq!(offsets, [(0, 512), (1536, 1536), (8704, 296)]);
    assert_eq!(
        Entry { kind: manifest.entries()[1].kind.clone(), ..found.entries()[1].clone() },
        manifest.entries()[1]
    );
    let mut again = Vec::new();
    let keep = |extent: ExtentData| {
        again.push(extent.ordinal);
        Ok(())
    };
    ArchiveReader::new(&archive[..]).extents(&manifest, &OrdinalRanges::all(4), keep).unwrap();
    assert_eq!(again, [0, 1, 2, 3]);
}

/// The size exceeds eleven octal digits. Tar needs only the header to show it.
#[test]
fn size_of_9_gib_is_written() {
    let extent = zeroes(0, 1 << 20);
    let extents = (0..9 << 10).map(|n| Extent { offset: n << 20, ..extent }).collect();
    let file = EntryKind::File { size_bytes: 9 << 30, extents };
    let file = Entry { uid: 3_000_000, gid: 4_000_000_000, ..bare(b"file".to_vec(), file) };
    let manifest = Manifest::new([bare(vec![], EntryKind::Directory), file], Limits::default()).unwrap();
    let mut archive = Vec::new();
    let mut writer = ArchiveWriter::new(&mut archive, Arc::new(manifest));
    writer.put(0, &vec![0; 1 << 20]).unwrap();
    drop(writer);

    let mut tar = Command::new("tar")
        .args(["-tv", "--numeric-owner"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    tar.stdin.take().unwrap().write_all(&archive).unwrap();
    let listed = tar.wait_with_output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    assert!(listed.contains("3000000/4000000000 9663676416 1970-01-01"), "{listed}");
    let error = read(&archive).unwrap_err();
    assert!(
        matches!(error, ArchiveError::Truncated { offset, .. } if offset == archive.len() as u64),
        "{error}"
    );
}

/// Returns a manifest with zeroes as content. A file system need not support it.
fn any_manifest() -> impl Strategy<Value = Manifest> {
    use proptest::collection::{btree_map, vec};
    let byte = || any::<u8>().prop_map(|byte| if matches!(byte, 0 | b'/' | b'.') { b'x' } else { byte });
    let name = || prop_oneof![3 => vec(byte(), 1..6), 1 => vec(byte(), 80..120), 1 => vec(byte(), 200..255)];
    let number = || prop_oneof![0_u32..5, 0o7_777_770_u32..0o10_000_010, 0..u32::MAX];
    // Lengths of holes and data in archive blocks, then whether the file ends with a hole or within
    // a block.
    let file = (vec((1_u64..3000, 1_u64..3000), 0..4), any::<bool>(), 0_u64..2000, 0_u64..512);
    let file = file.prop_map(|(pieces, begins_with_data, hole, short)| {
        let (mut end, mut extents) = (0, Vec::new());
        for (index, (hole, data)) in pieces.into_iter().enumerate() {
            end += if index == 0 && begins_with_data { 0 } else { hole * 512 };
            let until = end + data * 512;
            while end < until {
                let next = until.min((end >> 20 << 20) + (1 << 20));
                extents.push(zeroes(end, next - end));
                end = next;
            }
        }
        if hole < 1000
            && let Some(last) = extents.pop()
        {
            end -= short;
            extents.push(zeroes(last.offset, end - last.offset));
        } else {
            end += hole * 1000;
        }
        EntryKind::File { size_bytes: end, extents }
    });
    let device =
        (any::<bool>(), number(), number()).prop_map(|(character, major, minor)| EntryKind::Device {
            kind: if character { DeviceKind::Character } else { DeviceKind::Block },
            major,
            minor,
        });
    let kind = prop_oneof![
        3 => file,
        1 => Just(EntryKind::Directory),
        1 => Just(EntryKind::Fifo),
        1 => prop_oneof![vec(1_u8.., 1..150), vec(1_u8.., 4000..4095)].prop_map(|target| EntryKind::Symlink { target }),
        1 => device,
    ];
    let xattrs = btree_map(vec(byte(), 1..50), vec(any::<u8>(), 0..700), 0..3);
    let mtime = (
        prop_oneof![any::<i64>(), -3_i64..3, 8_589_934_590_i64..8_589_934_595],
        prop_oneof![Just(0), 0_u32..1_000_000_000],
    );
    let entry = (0_u32..=0o7777, number(), number(), mtime, xattrs, kind);
    let entries = btree_map(name(), (entry, vec(name(), 0..30)), 0..6);
    (entries, any::<bool>()).prop_map(|(entries, deep)| {
        let mut all = vec![bare(vec![], EntryKind::Directory)];
        for (mut path, ((mode, uid, gid, mtime, xattrs, kind), below)) in entries {
            if deep {
                for name in below {
                    all.push(bare(path.clone(), EntryKind::Directory));
                    let longer = [&path[..], b"/", &name].concat();
                    if longer.len() > MAX_PATH_BYTES {
                        break;
                    }
                    path = longer;
                }
                all.retain(|entry| entry.path != path);
            }
            let keeps = matches!(kind, EntryKind::File { .. } | EntryKind::Directory);
            let xattr = |(name, value)| Xattr { name: [&b"user."[..], name].concat(), value };
            let xattrs = xattrs.iter().map(|(name, value)| xattr((&name[..], value.clone())));
            let is_symlink = matches!(kind, EntryKind::Symlink { .. });
            let is_file = matches!(kind, EntryKind::File { .. });
            all.push(Entry {
                mode: if is_symlink { 0 } else { mode },
                uid,
                gid,
                mtime_seconds: mtime.0,
                mtime_nanos: mtime.1,
                xattrs: xattrs.filter(|_| keeps).collect(),
                ..bare(path.clone(), kind)
            });
            if is_file {
                // The name sorts after all others.
                let link = [&b"\xff\xff\xff\xff\xff\xff\xff"[..], all.len().to_string().as_bytes()].concat();
                all.push(Entry { mode: 0, ..bare(link, EntryKind::HardLink { to: path }) });
            }
        }
        all.sort_by(|a, b| compare_paths(&a.path, &b.path));
        all.dedup_by(|a, b| a.path == b.path);
        Manifest::new(all, Limits::default()).unwrap()
    })
}

fn bare(path: Vec<u8>, kind: EntryKind) -> Entry {
    let mode = if kind == EntryKind::Directory { 0o755 } else { 0 };
    Entry { path, mode, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs: vec![], kind }
}

fn zeroes(offset: u64, length: u64) -> Extent {
    let digest = domain::Digest(*blake3::hash(&vec![0; length as usize]).as_bytes());
    Extent { offset, length: length as u32, digest }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn any_manifest_round_trips(manifest in any_manifest()) {
        let manifest = Arc::new(manifest);
        let mut writer = ArchiveWriter::new(Vec::new(), manifest.clone());
        for located in manifest.extents() {
            writer.put(located.ordinal, &vec![0; located.extent.length as usize]).unwrap();
        }
        prop_assert_eq!(&read(&writer.finish().unwrap()).unwrap(), &*manifest);
    }
}

#[test]
fn comparison_detects_every_difference() {
    let tree = || {
        let dir = tempdir().unwrap();
        crate::common::everything(dir.path());
        let named = [("user.name", &b"value"[..])];
        for (name, value) in named {
            lsetxattr(dir.path().join("large"), name, value, XattrFlags::empty()).unwrap();
        }
        dir
    };
    let compare = |root: &Path, arguments: &[&str], manifest: &Manifest| {
        let mut bytes = 0;
        let compared =
            ArchiveReader::new(&tar_c(root, arguments)[..]).compare(manifest, |extent| bytes += extent);
        compared.map(|()| bytes)
    };
    let dir = tree();
    let manifest = manifest_of(dir.path());
    for arguments in [&["--format=gnu"][..], &["--format=posix"], &EVERYTHING] {
        let compared = compare(dir.path(), arguments, &manifest).unwrap();
        assert_eq!(compared, manifest.extent_bytes(), "{arguments:?}");
    }

    type Change = (&'static str, fn(&Path));
    let write_at = |path: &Path, offset: u64| {
        let modified = fs::metadata(path).unwrap().modified().unwrap();
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(b"other", offset).unwrap();
        file.set_modified(modified).unwrap();
    };
    let changes: [Change; 12] = [
        ("a.b/file", |root| fs::write(root.join("a.b/file"), "Sorts after all of a").unwrap()),
        ("zeroes", |root| {
            File::options().write(true).open(root.join("zeroes")).unwrap().set_len(99_999).unwrap()
        }),
        ("a-b", |root| set_mode(&root.join("a-b"), 0o755)),
        ("large", |root| set_mtime(&root.join("large"), 4_000_000_001, 0)),
        ("a/deeply/nested", |root| set_mtime(&root.join("a/deeply/nested"), 6, 5)),
        ("dangling", |root| {
            fs::remove_file(root.join("dangling")).unwrap();
            symlink("nowhere", root.join("dangling")).unwrap();
            set_mtime(&root.join("dangling"), 1_000_000_000, 0);
        }),
        ("z link", |root| {
            fs::remove_file(root.join("z link")).unwrap();
            fs::copy(root.join("a/file"), root.join("z link")).unwrap();
            set_mtime(&root.join("z link"), -5, 1);
        }),
        ("to a directory", |root| {
            fs::remove_file(root.join("to a directory")).unwrap();
            fs::write(root.join("to a directory"), "a").unwrap();
        }),
        ("none", |root| {
            fs::remove_file(root.join("none")).unwrap();
            fs::create_dir(root.join("none")).unwrap();
        }),
        ("exactly one", |root| fs::remove_file(root.join("exactly one")).unwrap()),
        ("new", |root| fs::write(root.join("new"), "").unwrap()),
        ("pipe", |root| fs::remove_file(root.join("pipe")).unwrap()),
    ];
    for (path, change) in changes {
        let dir = tree();
        let manifest = manifest_of(dir.path());
        change(dir.path());
        // The change inside of a directory also changes the mtime of the directory, which must not
        // count.
        set_mtime(dir.path(), 1_500_000_000, 42);
        let compared = compare(dir.path(), &["--format=gnu"], &manifest);
        let Err(ArchiveError::Changed { path: found }) = &compared else { panic!("{path}: {compared:?}") };
        // The reported path is the changed entry, its first child or its successor.
        let near = [path, "", "a", "a/file", "none", "very large"].map(Path::new);
        assert!(near.contains(&&**found), "{path}: {}", found.display());
    }
    for (path, offset) in
        [("sparse", 0), ("sparse", (20 << 20) - 5), ("only a hole", 1 << 20), ("very large", 5 << 20)]
    {
        let dir = tree();
        let manifest = manifest_of(dir.path());
        write_at(&dir.path().join(path), offset);
        let compared = compare(dir.path(), &["--format=gnu"], &manifest);
        let found =
            matches!(&compared, Err(ArchiveError::Changed { path: found }) if found == Path::new(path));
        assert!(found, "{path} at {offset}: {compared:?}");
    }
}
