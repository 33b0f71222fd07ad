//! Small trees, valid and invalid.

use super::*;

/// Returns a valid tree.
pub(super) fn tree() -> pb::SmallTree {
    let file = pb::small_tree_entry::Content::File("content".into());
    let entry = pb::SmallTreeEntry { path: "a".into(), content: Some(file), ..Default::default() };
    pb::SmallTree { entries: vec![entry] }
}

/// Returns invalid trees, and trees other than that of an existing artifact.
pub(super) fn bad(world: &World<'_>) -> Vec<Bad> {
    let bytes = |bytes: &[u8]| Value::Bytes(bytes.to_vec().into());
    let mut bad = Vec::new();
    for path in ["..", "../a", "/a", "a//b", "a/", "a\0", &"a".repeat(256), &"a/".repeat(3000)] {
        let named = "tree.entries[0].path";
        bad.extend(invalid("tree.entries.path", "unsafe", bytes(path.as_bytes()), named));
    }
    bad.extend(invalid("tree.entries.path", "of the root", bytes(b""), "tree.entries[0].path"));
    bad.extend(invalid("tree.entries.mode", "impossible", Value::U32(0o10000), "tree.entries[0].mode"));
    bad.extend(invalid("tree.entries.file", "too large", bytes(&[7; 1 << 20]), "tree.entries"));
    for target in [&b""[..], b"a\0b", &[b'x'; 4096]] {
        let named = "tree.entries[0].symlink";
        bad.extend(invalid("tree.entries.symlink", "impossible", bytes(target), named));
    }
    bad.extend(twice("tree.entries", "tree.entries.path"));
    for nanos in [-1, 1_000_000_000] {
        let change = move |messages: &mut Vec<DynamicMessage>| {
            let path = ["tree", "entries", "modified_at", "nanos"];
            set(&mut messages[0], &path, Some(&Value::I32(nanos)));
        };
        let expected = refused("tree.entries[0].modified_at");
        bad.extend(otherwise("tree.entries.modified_at", &format!("{nanos} ns"), expected, change));
    }
    for name in ["uid", "gid"] {
        let made = text(world.of_tree);
        let change = move |messages: &mut Vec<DynamicMessage>| {
            set(&mut messages[0], &["artifact_id"], Some(&made));
            set(&mut messages[0], &["tree", "entries", name], Some(&Value::U32(1)));
        };
        let expected = Expected::Refused(ArtifactExists, String::new());
        let field = format!("tree.entries.{name}");
        bad.extend(otherwise(&field, "that the artifact was not made with", expected, change));
    }
    bad
}
