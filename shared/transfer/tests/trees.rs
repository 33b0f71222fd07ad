//! Trees on disk: what is scanned is what was written, down to the last bit.

#[path = "common/mod.rs"]
mod common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use common::{copy, manifest_of, scan_all};
use gantry_transfer::*;
use tempfile::tempdir;

#[test]
fn a_tree_with_everything_arrives_as_it_was() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    common::everything(from.path());

    let scanned = scan_all(from.path());
    let written = copy(from.path(), to.path(), WriteOptions::default());

    assert!(scanned.problems.is_empty(), "{:?}", scanned.problems);
    assert!(written.left_out.is_empty());
    assert_eq!(written.content_bytes, scanned.manifest.extent_bytes());
    assert_eq!(manifest_of(to.path()), scanned.manifest);
    assert_eq!(manifest_of(to.path()).tree_digest(), scanned.manifest.tree_digest());
}
