//! Small trees, and what is wrong with others.

use super::*;

/// A tree that is fine.
pub(super) fn tree() -> pb::SmallTree {
    let file = pb::small_tree_entry::What::File("content".into());
    let entry = pb::SmallTreeEntry { path: "a".into(), what: Some(file), ..Default::default() };
    pb::SmallTree { entries: vec![entry] }
}

/// What may be wrong with a tree, and trees that an artifact was not made from.
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
    let twice = |messages: &mut Vec<DynamicMessage>| {
        let field = messages[0].get_field_by_name("tree").expect("a field").into_owned();
        let mut tree = field.as_message().expect("a message").clone();
        let entries = tree.get_field_by_name("entries").expect("a field").into_owned();
        let entry = entries.as_list().expect("a list")[0].clone();
        tree.set_field_by_name("entries", Value::List(vec![entry; 2]));
        messages[0].set_field_by_name("tree", Value::Message(tree));
    };
    let expected = Expected::Refused(InvalidField, "tree.entries.path".to_owned());
    let (field, what) = ("tree.entries".to_owned(), "twice".to_owned());
    bad.push(Bad { field, what, change: Box::new(twice), expected });
    for nanos in [-1, 1_000_000_000] {
        let change = move |messages: &mut Vec<DynamicMessage>| {
            let path = ["tree", "entries", "modified_at", "nanos"];
            set(&mut messages[0], &path, Some(&Value::I32(nanos)));
        };
        let expected = Expected::Refused(InvalidField, "tree.entries[0].modified_at".to_owned());
        let (field, what) = ("tree.entries.modified_at".to_owned(), format!("{nanos} ns"));
        bad.push(Bad { field, what, change: Box::new(change), expected });
    }
    for name in ["uid", "gid"] {
        let made = text(world.of_tree);
        let change = move |messages: &mut Vec<DynamicMessage>| {
            set(&mut messages[0], &["artifact_id"], Some(&made));
            set(&mut messages[0], &["tree", "entries", name], Some(&Value::U32(1)));
        };
        let expected = Expected::Refused(ArtifactExists, String::new());
        let what = "that the artifact was not made with".to_owned();
        bad.push(Bad { field: format!("tree.entries.{name}"), what, change: Box::new(change), expected });
    }
    bad
}
