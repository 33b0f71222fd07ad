//! A tree with every property that a copy must preserve.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Writes the tree, with `size` bytes in one file. All calls write the same tree.
pub(crate) fn write(root: &Path, size: u64) {
    let then = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    fs::create_dir_all(root.join("directory/empty")).expect("directories");
    let large = File::create(root.join("large")).expect("create");
    let mut random = 1_u64;
    let mut piece = vec![0; 1 << 20];
    for at in (0..size).step_by(piece.len()) {
        for word in piece.chunks_mut(8) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&random.to_le_bytes());
        }
        large.write_all_at(&piece, at).expect("write");
    }
    let sparse = File::create(root.join("sparse")).expect("create");
    sparse.write_all_at(b"end", 32 << 20).expect("write");
    fs::write(root.join("directory/script"), "#!/bin/sh\n").expect("write");
    fs::set_permissions(root.join("directory/script"), fs::Permissions::from_mode(0o4751)).expect("a mode");
    fs::hard_link(root.join("directory/script"), root.join("same")).expect("a link");
    symlink("../nowhere", root.join("directory/link")).expect("a link");
    let attributed = rustix::fs::setxattr(
        root.join("directory/script"),
        "user.origin",
        b"\0here",
        rustix::fs::XattrFlags::empty(),
    );
    if let Err(error) = attributed {
        eprintln!("extended attributes are not tested here: {error}");
    }
    for name in ["large", "sparse", "directory/script", "directory/empty", "directory"] {
        File::open(root.join(name)).and_then(|file| file.set_modified(then)).expect("a time");
    }
}

/// Returns the number of blocks of a file.
pub(crate) fn blocks(path: &Path) -> u64 {
    path.metadata().expect("metadata").blocks()
}
