//! Trees of random images, compared with what `umoci` unpacks.

use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::path::Path;
use std::process::Command;

use gantry_images::{ImageSource, ImageTree, LayerStore, Platform, Progress};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;
use transfer::{Entry, EntryKind, Manifest, ScanOptions, TreeWriter, WriteOptions, scan};

/// Number of random images.
const RUNS: u64 = 40;
/// Names of entries. There are so few that layers meet.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

fn umoci(arguments: &[&str], directory: &Path) -> bool {
    let output = Command::new("umoci").args(arguments).current_dir(directory).output();
    output.expect("umoci, from the package of this name").status.success()
}

/// An archive of a layer, and what it contains.
struct RandomLayer {
    archive: Builder<Vec<u8>>,
    /// Kinds of the entries that the layer has: `d`, `f` or `l`.
    entries: BTreeMap<String, char>,
    /// Paths that the layer removes from the lower ones.
    removed: Vec<String>,
    /// Whether a directory of the layer hides everything in the lower ones.
    is_opaque: bool,
    /// Whether the layer has entries in directories that it does not describe.
    is_sparse: bool,
}

impl RandomLayer {
    fn draw(random: &mut StdRng) -> Self {
        let mut layer = Self {
            archive: Builder::new(Vec::new()),
            entries: BTreeMap::new(),
            removed: Vec::new(),
            is_opaque: false,
            is_sparse: false,
        };
        for _ in 0..random.random_range(1..12) {
            layer.add(random);
        }
        layer
    }

    fn add(&mut self, random: &mut StdRng) {
        let name = |random: &mut StdRng| NAMES[random.random_range(0..NAMES.len())];
        let directories: Vec<_> =
            self.entries.iter().filter(|(_, kind)| **kind == 'd').map(|(path, _)| path.clone()).collect();
        // Some parents are described by a lower layer only.
        let parent = match random.random_range(0..4) {
            0 => String::new(),
            1 => format!("{}/", name(random)),
            _ if directories.is_empty() => String::new(),
            _ => format!("{}/", directories[random.random_range(0..directories.len())]),
        };
        let undescribed = parent.trim_end_matches('/');
        if !undescribed.is_empty() && self.entries.get(undescribed).is_some_and(|kind| *kind != 'd') {
            return;
        }
        let is_sparse = !undescribed.is_empty() && !self.entries.contains_key(undescribed);
        if self.is_opaque && is_sparse {
            return;
        }
        self.is_sparse |= is_sparse;
        let path = format!("{parent}{}", name(random));
        let is_removed =
            self.removed.iter().any(|removed| path == *removed || path.starts_with(&format!("{removed}/")));
        let is_new = !is_removed && !self.has_at(&path);
        match random.random_range(0..10) {
            0..3 if is_new => self.entry(random, &path, EntryType::Directory, None),
            3..6 if is_new => self.entry(random, &path, EntryType::Regular, None),
            6 if is_new => {
                // Two paths to one directory would make the result depend on the order of entries.
                let start = ["", "/", "../"][random.random_range(0..3)];
                let target = format!("{start}x{}", random.random_range(0..u32::MAX));
                self.entry(random, &path, EntryType::Symlink, Some(&target));
            }
            7 if is_new => {
                let files: Vec<_> = self
                    .entries
                    .iter()
                    .filter(|(_, kind)| **kind == 'f')
                    .map(|(path, _)| path.clone())
                    .collect();
                if let Some(target) = files.first() {
                    self.entry(random, &path, EntryType::Link, Some(target));
                }
            }
            8 => self.whiteout(&parent, name(random)),
            // What is left of a directory that the layer does not describe depends on the tool.
            9 if !self.is_sparse && random.random_range(0..3) == 0 => {
                self.is_opaque = true;
                self.whiteout(&parent, ".wh..opq");
            }
            _ => {}
        }
    }

    fn entry(&mut self, random: &mut StdRng, path: &str, kind: EntryType, target: Option<&str>) {
        let mut header = Header::new_ustar();
        let content = match kind {
            EntryType::Regular => format!("{}", random.random_range(0..5)),
            _ => String::new(),
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode([0o644, 0o755, 0o4755, 0o1777][random.random_range(0..4)]);
        header.set_uid(random.random_range(0..3));
        header.set_gid(random.random_range(0..3));
        header.set_mtime(random.random_range(1..2_000_000_000));
        if let Some(target) = target {
            header.set_link_name(target).expect("a target");
        }
        self.archive.append_data(&mut header, path, Cursor::new(content)).expect("an entry");
        let kind = match kind {
            EntryType::Directory => 'd',
            EntryType::Regular => 'f',
            _ => 'l',
        };
        self.entries.insert(path.to_owned(), kind);
    }

    /// Removes a name of the lower layers. A layer either removes a name or has entries there.
    /// Otherwise the result depends on the order of its entries.
    fn whiteout(&mut self, parent: &str, name: &str) {
        let (path, removed) = (format!("{parent}.wh.{name}"), format!("{parent}{name}"));
        let directory = parent.trim_end_matches('/');
        let is_described = directory.is_empty() || self.entries.get(directory) == Some(&'d');
        if self.entries.contains_key(&path) || self.has_at(&removed) || !is_described {
            return;
        }
        let mut header = Header::new_ustar();
        header.set_mode(0o600);
        header.set_size(0);
        self.archive.append_data(&mut header, &path, Cursor::new("")).expect("a whiteout");
        self.entries.insert(path, 'w');
        self.removed.push(removed);
    }

    /// Whether the layer has entries at or below a path.
    fn has_at(&self, path: &str) -> bool {
        self.entries.keys().any(|known| *known == path || known.starts_with(&format!("{path}/")))
    }
}

/// Pulls the image of a layout.
fn pulled(layout: &Path, name: &str) -> Result<ImageTree, gantry_images::ImageError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    let layers = TempDir::new().expect("a directory");
    let store = LayerStore::new(layers.path().to_owned(), u64::MAX);
    let platform = Platform::of_this_machine();
    let source = ImageSource::in_layout(layout, Some(name), &platform)?;
    runtime.block_on(gantry_images::pull(&source, &platform, &store, &Progress::default()))
}

/// Writes the tree of an image into a directory.
fn write(tree: &ImageTree, directory: &Path) {
    let options = WriteOptions { devices: true, ..WriteOptions::default() };
    let mut writer = TreeWriter::new(directory, tree.manifest().clone(), options).expect("a writer");
    for ordinal in 0..tree.manifest().extent_count() {
        writer.put(ordinal, &tree.read(ordinal).expect("content")).expect("written");
    }
    writer.finish().expect("complete");
}

/// Describes the entries of a directory below its root.
fn listing(directory: &Path) -> Vec<String> {
    let scanned = scan(directory, &ScanOptions::default(), None).expect("a scan");
    assert!(scanned.problems.is_empty(), "{:?}", scanned.problems);
    entries(&scanned.manifest)
}

fn entries(manifest: &Manifest) -> Vec<String> {
    let describe = |entry: &Entry| {
        let Entry { mode, uid, gid, mtime_seconds, .. } = entry;
        let what = match &entry.kind {
            EntryKind::Directory => "directory".to_owned(),
            EntryKind::File { extents, .. } => format!("file {:?}", extents.first().map(|it| it.digest)),
            EntryKind::Symlink { target } => format!("link to {}", String::from_utf8_lossy(target)),
            EntryKind::HardLink { to } => format!("hard link to {}", String::from_utf8_lossy(to)),
            other => format!("{other:?}"),
        };
        // umoci changes the time of a directory when a later layer removes its contents.
        let mtime = Some(*mtime_seconds).filter(|_| !entry.is_directory());
        format!("{:?} {mode:o} {uid}:{gid} {mtime:?} {what}", entry.path())
    };
    // The layers do not describe the root.
    manifest.entries().iter().skip(1).map(describe).collect()
}

#[test]
fn random_images_are_unpacked_as_by_umoci() {
    let runs = if testing::seeds::repeated().is_some() { 1 } else { RUNS };
    let mut compared = 0;
    for run in 0..runs {
        let seed = testing::seeds::repeated().unwrap_or_else(|| testing::seeds::nth(run));
        eprintln!("GANTRY_SEED={seed}");
        let random = &mut StdRng::seed_from_u64(seed);
        let home = TempDir::new().expect("a directory");
        assert!(umoci(&["init", "--layout", "oci"], home.path()));
        assert!(umoci(&["new", "--image", "oci:image"], home.path()));
        for number in 0..random.random_range(1..5) {
            let name = format!("{number}.tar");
            let archive = RandomLayer::draw(random).archive.into_inner().expect("an archive");
            fs::write(home.path().join(&name), archive).expect("written");
            assert!(umoci(&["raw", "add-layer", "--image", "oci:image", &name], home.path()));
        }
        // umoci rejects some images that have no meaning, such as entries below a file.
        if !umoci(&["unpack", "--image", "oci:image", "bundle"], home.path()) {
            continue;
        }
        let tree = pulled(&home.path().join("oci"), "image").expect("an image");
        let written = home.path().join("written");
        fs::create_dir(&written).expect("a directory");
        write(&tree, &written);
        assert_eq!(listing(&written.join("rootfs")), listing(&home.path().join("bundle/rootfs")), "{seed}");
        compared += 1;
    }
    assert!(compared * 2 >= runs, "umoci rejected most images: only {compared} of {runs} were compared");
}

#[test]
fn devices_in_dev_are_left_out() {
    let home = TempDir::new().expect("a directory");
    assert!(umoci(&["init", "--layout", "oci"], home.path()));
    assert!(umoci(&["new", "--image", "oci:image"], home.path()));
    let mut archive = Builder::new(Vec::new());
    for path in ["dev/console", "dev/pts/ptmx", "srv/null"] {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Char);
        header.set_mode(0o600);
        header.set_size(0);
        header.set_device_major(1).and_then(|()| header.set_device_minor(3)).expect("a device");
        archive.append_data(&mut header, path, Cursor::new("")).expect("an entry");
    }
    fs::write(home.path().join("layer.tar"), archive.into_inner().expect("an archive")).expect("written");
    assert!(umoci(&["raw", "add-layer", "--image", "oci:image", "layer.tar"], home.path()));
    let tree = pulled(&home.path().join("oci"), "image").expect("an image");
    let paths = tree.manifest().entries().iter().map(|entry| entry.path().display().to_string());
    let paths: Vec<_> = paths.filter(|path| path.contains('/')).collect();
    assert_eq!(paths, ["rootfs/dev", "rootfs/dev/pts", "rootfs/srv", "rootfs/srv/null"]);
}

#[test]
fn damaged_layer_is_rejected() {
    let home = TempDir::new().expect("a directory");
    assert!(umoci(&["init", "--layout", "oci"], home.path()));
    assert!(umoci(&["new", "--image", "oci:image"], home.path()));
    let archive = RandomLayer::draw(&mut StdRng::seed_from_u64(1)).archive.into_inner().expect("an archive");
    fs::write(home.path().join("layer.tar"), archive).expect("written");
    assert!(umoci(&["raw", "add-layer", "--image", "oci:image", "layer.tar"], home.path()));
    // The copy has only the blobs of the image.
    let copy = ["copy", "--quiet", "oci:oci:image", "oci:copy:image"];
    let copied = Command::new("skopeo").args(copy).current_dir(home.path()).status();
    assert!(copied.expect("skopeo, from the package of this name").success());
    let layout = home.path().join("copy");
    assert!(pulled(&layout, "image").is_ok());
    let error = pulled(&layout, "other").expect_err("there is no such image").to_string();
    assert!(error.contains("there is no image") && error.contains("it has image"), "{error}");

    // Each blob is the manifest, the configuration or the layer.
    for blob in fs::read_dir(layout.join("blobs/sha256")).expect("blobs") {
        let blob = blob.expect("a blob").path();
        let content = fs::read(&blob).expect("content");
        for damage in [&content[..content.len() - 1], &[&content[..], b" "].concat()] {
            fs::write(&blob, damage).expect("written");
            let error = pulled(&layout, "image").expect_err("it is damaged");
            eprintln!("{error}");
            assert!(matches!(error, gantry_images::ImageError::Invalid { .. }), "{error}");
        }
        fs::write(&blob, content).expect("written");
    }
    assert!(pulled(&layout, "image").is_ok());
}
