//! Tests of results in place, with changes in the target.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::manifest_of;
use gantry_transfer::*;
use proptest::prelude::*;
use tempfile::TempDir;

/// The files of a tree, by path.
type Files = BTreeMap<String, String>;

/// The sent tree `base`, the `result` of the command, and the `target`, the directory of the sent
/// tree.
struct Fixture {
    dir: TempDir,
}

/// The outcome of a merge in place.
struct MergeOutcome {
    conflicts: Vec<Conflict>,
    gone: Gone,
}

impl Fixture {
    fn new(base: &Files, result: &Files, target: &Files) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, files) in [("base", base), ("result", result), ("target", target)] {
            fs::create_dir(dir.path().join(name)).unwrap();
            for (path, content) in files {
                let path = dir.path().join(name).join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, content).unwrap();
                // An unchanged file has the same mtime in all trees.
                crate::common::set_mtime(&path, 1_000 + i64::try_from(content.len()).unwrap(), 0);
            }
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn merge(&self, removes: bool) -> MergeOutcome {
        self.merge_with_edit(removes, |_| ())
    }

    /// Merges the result. `edit` changes the target after the comparison.
    fn merge_with_edit(&self, removes: bool, edit: impl FnOnce(&Path)) -> MergeOutcome {
        let base = manifest_of(&self.path("base"));
        let result = manifest_of(&self.path("result"));
        let tree = changes(&base, &result).unwrap();
        let (target, staged) = (self.path("target"), self.path("staged"));
        let Guarded { tree: guarded, dropped } = guard(&target, tree.manifest(), Allowed::default()).unwrap();
        let tree = guarded.within(&tree);
        let manifest = tree.manifest().clone();
        let matches = local_matches(&target, &manifest, &ScanOptions::default(), None).unwrap();
        let standing = Standing::of(&target, &base, &manifest, &result, &dropped, Allowed::default());

        fs::create_dir(&staged).unwrap();
        let mut writer = TreeWriter::new(&staged, manifest.clone(), WriteOptions::default()).unwrap();
        matches.prepare(&target, &mut writer).unwrap();
        let wanted = tree.origins(&writer.missing());
        let options = ReadOptions::default();
        let mut reader =
            TreeReader::new(&self.path("result"), Arc::new(manifest_of(&self.path("result"))), options)
                .unwrap();
        for batch in reader.batches(&wanted) {
            for extent in batch.unwrap() {
                writer.put(tree.ordinal(extent.ordinal).unwrap(), &extent.data).unwrap();
            }
        }
        writer.finish().unwrap();
        edit(&target);

        let options = MergeOptions {
            ownership: WrittenOwnership::Caller,
            strict: true,
            keep_root: true,
            standing: Some(&standing),
        };
        let merged = merge(&staged, &target, &manifest, &matches, options).unwrap();
        let gone = if removes {
            remove_gone(&target, &base, &standing, &merged.conflicts).unwrap()
        } else {
            Gone::default()
        };
        remove_tree(&staged).unwrap();
        MergeOutcome { conflicts: merged.conflicts, gone }
    }

    fn target(&self) -> Files {
        files_of(&self.path("target"))
    }
}

fn files_of(directory: &Path) -> Files {
    let mut files = Files::new();
    let mut rest = vec![directory.to_owned()];
    while let Some(at) = rest.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                rest.push(path);
            } else {
                let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read_to_string(path).unwrap());
            }
        }
    }
    files
}

fn files(files: &[(&str, &str)]) -> Files {
    files.iter().map(|(path, content)| ((*path).to_owned(), (*content).to_owned())).collect()
}

#[test]
fn edits_of_unchanged_files_stay() {
    let base = files(&[("a", "1"), ("d/b", "1"), ("lost", "1")]);
    let result = files(&[("a", "1"), ("d/b", "1"), ("lost", "1"), ("d/made", "x")]);
    let fixture = Fixture::new(&base, &result, &files(&[("a", "edited"), ("d/b", "1"), ("new", "y")]));
    assert!(fixture.merge(false).conflicts.is_empty());
    let expected = files(&[("a", "edited"), ("d/b", "1"), ("d/made", "x"), ("new", "y")]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn file_changed_on_both_sides_is_kept_twice() {
    let base = files(&[("d/a", "1"), ("d/a.gantry-result", "earlier")]);
    let result = files(&[("d/a", "theirs"), ("d/a.gantry-result", "earlier")]);
    let fixture = Fixture::new(&base, &result, &files(&[("d/a", "mine"), ("d/a.gantry-result", "earlier")]));
    let conflict = Conflict { path: "d/a".into(), result: Some("d/a.gantry-result-2".into()) };
    assert_eq!(fixture.merge(false).conflicts, [conflict]);
    let expected =
        files(&[("d/a", "mine"), ("d/a.gantry-result", "earlier"), ("d/a.gantry-result-2", "theirs")]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn same_change_on_both_sides_is_no_conflict() {
    let (base, both) = (files(&[("a", "1")]), files(&[("a", "22")]));
    let fixture = Fixture::new(&base, &both, &both);
    assert!(fixture.merge(true).conflicts.is_empty());
    assert_eq!(fixture.target(), both);
}

#[test]
fn only_entries_removed_by_command_are_removed() {
    let base = files(&[("a", "1"), ("b", "1"), ("d/c", "1"), ("e/f", "1"), (".gantryignore", "x")]);
    let target = files(&[
        ("a", "1"),
        ("b", "mine"),
        ("d/c", "1"),
        ("d/never-sent", "x"),
        ("e/f", "1"),
        (".gantryignore", "x"),
    ]);
    let fixture = Fixture::new(&base, &files(&[]), &target);
    let MergeOutcome { gone, .. } = fixture.merge(true);
    assert_eq!((gone.changed, gone.protected), (vec!["b".into()], vec![".gantryignore".into()]));
    assert_eq!(fixture.target(), files(&[("b", "mine"), ("d/never-sent", "x"), (".gantryignore", "x")]));
    assert!(!fixture.path("target/e").exists(), "an empty directory is removed");
}

#[test]
fn unchanged_directory_becomes_file() {
    let base = files(&[("d/a", "1"), ("e/a", "1")]);
    let result = files(&[("d", "file"), ("e", "file")]);
    let fixture = Fixture::new(&base, &result, &files(&[("d/a", "1"), ("e/a", "1"), ("e/mine", "x")]));
    let conflict = Conflict { path: "e".into(), result: Some("e.gantry-result".into()) };
    assert_eq!(fixture.merge(false).conflicts, [conflict]);
    let expected = files(&[("d", "file"), ("e/a", "1"), ("e/mine", "x"), ("e.gantry-result", "file")]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn hard_links_in_target_take_result() {
    let both = |content| files(&[("a", content), ("d/b", content)]);
    let fixture = Fixture::new(&both("1"), &both("22"), &both("1"));
    for tree in ["base", "result", "target"] {
        fs::remove_file(fixture.path(tree).join("d/b")).unwrap();
        fs::hard_link(fixture.path(tree).join("a"), fixture.path(tree).join("d/b")).unwrap();
    }
    assert_eq!(fixture.merge(true).conflicts, []);
    assert_eq!(fixture.target(), both("22"));
}

#[test]
fn mode_changed_on_both_sides_stays() {
    let base = files(&[("a", "1")]);
    let fixture = Fixture::new(&base, &base, &base);
    crate::common::set_mode(&fixture.path("result/a"), 0o755);
    crate::common::set_mode(&fixture.path("target/a"), 0o600);
    assert_eq!(fixture.merge(true).conflicts, [Conflict { path: "a".into(), result: None }]);
    assert_eq!(fixture.path("target/a").metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn edits_between_comparison_and_merge_stay() {
    let base = files(&[("d/a", "1"), ("e", "1"), ("f", "1")]);
    let fixture = Fixture::new(&base, &files(&[("d", "file"), ("e", "22")]), &base);
    let edit = |target: &Path| {
        for path in ["d/a", "e", "f"] {
            fs::write(target.join(path), "mine").unwrap();
        }
    };
    let MergeOutcome { conflicts, gone } = fixture.merge_with_edit(true, edit);
    assert_eq!((conflicts.len(), gone.changed), (2, vec![PathBuf::from("f")]));
    let expected = files(&[
        ("d/a", "mine"),
        ("d.gantry-result", "file"),
        ("e", "mine"),
        ("e.gantry-result", "22"),
        ("f", "mine"),
    ]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn packed_loose_reference_is_removed() {
    let base = files(&[
        (".git/HEAD", "1"),
        (".git/refs/heads/a", "1"),
        (".git/objects/1", "1"),
        (".git/index", "1"),
    ]);
    let result = files(&[(".git/HEAD", "1"), (".git/packed-refs", "a 22"), (".git/index", "1")]);
    let fixture = Fixture::new(&base, &result, &base);
    fixture.merge(true);
    assert_eq!(fixture.target(), result);

    // Another reference was created meanwhile, and may need the objects.
    let mut mine = base.clone();
    mine.insert(".git/refs/heads/mine".to_owned(), "1".to_owned());
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.merge(true).gone.changed, Vec::<PathBuf>::new());
    mine.insert(".git/packed-refs".to_owned(), "a 22".to_owned());
    mine.remove(".git/refs/heads/a");
    assert_eq!(fixture.target(), mine);

    // A deleted reference stays if its branch was checked out meanwhile.
    let (mut result, mut mine) = (base.clone(), base.clone());
    result.remove(".git/refs/heads/a");
    mine.insert(".git/HEAD".to_owned(), "a".repeat(7));
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.merge(true).gone.changed, [PathBuf::from(".git/refs/heads/a")]);
    assert_eq!(fixture.target(), mine);
}

#[test]
fn loose_reference_stays_when_both_packed() {
    let base = files(&[(".git/HEAD", "1"), (".git/refs/heads/a", "1"), (".git/objects/1", "1")]);
    let result = files(&[(".git/HEAD", "1"), (".git/packed-refs", "a 22"), (".git/objects/1", "1")]);
    let mut mine = base.clone();
    mine.insert(".git/packed-refs".to_owned(), "mine".to_owned());
    let fixture = Fixture::new(&base, &result, &mine);
    let MergeOutcome { conflicts, gone } = fixture.merge(true);
    assert_eq!(gone.changed, [PathBuf::from(".git/refs/heads/a")]);
    assert_eq!(conflicts[0].path, PathBuf::from(".git/packed-refs"));
}

#[test]
fn objects_stay_when_references_changed() {
    for git in [".git/modules/sub", "bare.git", "sub/.git"] {
        let at = |path: &str| format!("{git}/{path}");
        let repository = ["HEAD", "refs/heads/a", "objects/1", "objects/2"];
        let mut base: Files = repository.iter().map(|path| (at(path), "1".to_owned())).collect();
        base.insert(".git/HEAD".to_owned(), "1".to_owned());
        let mut result = base.clone();
        result.remove(&at("objects/2"));
        let mut mine = base.clone();
        mine.insert(at("worktrees/w/HEAD"), "2".to_owned());
        let fixture = Fixture::new(&base, &result, &mine);
        fixture.merge(true);
        assert_eq!(fixture.target(), mine, "{git}");
        let fixture = Fixture::new(&base, &result, &base);
        fixture.merge(true);
        assert_eq!(fixture.target(), result, "{git}");
    }
}

#[test]
fn entry_removed_in_target_becomes_conflict() {
    let base = files(&[("a", "1"), ("d/b", "1"), ("d/c", "1"), ("e/f", "1")]);
    let result = files(&[("a", "22"), ("d/b", "1"), ("d/c", "22"), ("e/f", "1")]);
    let fixture = Fixture::new(&base, &result, &files(&[]));
    // A change of the mode alone restores nothing.
    crate::common::set_mode(&fixture.path("result/d/b"), 0o755);
    crate::common::set_mode(&fixture.path("result/e"), 0o700);
    crate::common::set_mode(&fixture.path("result/e/f"), 0o600);
    let conflicts = fixture.merge(true).conflicts;
    let results: Vec<_> = conflicts.iter().map(|conflict| conflict.path.to_str().unwrap()).collect();
    assert_eq!(results, ["a", "d/c"]);
    assert_eq!(fixture.target(), files(&[("a.gantry-result", "22"), ("d/c.gantry-result", "22")]));
    assert!(!fixture.path("target/e").exists());
}

#[test]
fn database_and_log_come_from_same_side() {
    let base = files(&[("db", "1"), ("other", "1")]);
    let result = files(&[("db", "22"), ("other", "22")]);
    // A program has opened the database in the target, and written to its log.
    let mine = files(&[("db", "1"), ("db-wal", "mine"), ("other", "1")]);
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.merge(true).conflicts.len(), 1);
    let expected = [("db", "1"), ("db-wal", "mine"), ("db.gantry-result", "22"), ("other", "22")];
    assert_eq!(fixture.target(), files(&expected));

    // The log of the command does not match a database that was changed in the target.
    let result = files(&[("db", "1"), ("db-journal", "theirs"), ("other", "1")]);
    let fixture = Fixture::new(&base, &result, &files(&[("db", "mine"), ("other", "1")]));
    assert_eq!(fixture.merge(true).conflicts.len(), 1);
    let expected = [("db", "mine"), ("db-journal.gantry-result", "theirs"), ("other", "1")];
    assert_eq!(fixture.target(), files(&expected));

    // The log of a changed database is not removed.
    let (base, result) = (files(&[("db", "1"), ("db-wal", "1")]), files(&[("db", "22")]));
    let mine = files(&[("db", "mine"), ("db-wal", "1")]);
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.merge(true).gone.changed, [PathBuf::from("db-wal")]);
    assert_eq!(fixture.target()["db-wal"], "1");
}

#[test]
fn replaced_file_keeps_acl_and_owner() {
    let base = files(&[("a", "1"), ("b", "1")]);
    let fixture = Fixture::new(&base, &files(&[("a", "22"), ("b", "22")]), &base);
    // A list with an entry for the user 1000: version 2, then the tag, permissions and id of each
    // entry.
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, u32::MAX), (2, 6, 1000), (4, 0, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend([&tag.to_le_bytes()[..], &rights.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    let (attribute, file) = ("system.posix_acl_access", fixture.path("target/a"));
    let set = rustix::fs::setxattr(&file, attribute, &list, rustix::fs::XattrFlags::empty());
    if set == Err(rustix::io::Errno::OPNOTSUPP) {
        eprintln!("not applicable: the file system has no access control lists");
        return;
    }
    set.unwrap();
    for tree in ["base", "result"] {
        for path in ["a", "b"] {
            crate::common::set_mode(&fixture.path(tree).join(path), 0o660);
        }
    }
    crate::common::set_mode(&fixture.path("target/b"), 0o660);
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        std::os::unix::fs::chown(fixture.path("target/b"), Some(1000), Some(1000)).unwrap();
    }
    assert_eq!(fixture.merge(true).conflicts, []);
    assert_eq!(fs::read_to_string(&file).unwrap(), "22");
    let mut found = vec![0; 1024];
    let length = rustix::fs::getxattr(&file, attribute, &mut found[..]).unwrap();
    assert!(found[..length] == list);
    let metadata = fixture.path("target/b").metadata().unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o660);
    if is_root {
        assert_eq!((metadata.uid(), metadata.gid()), (1000, 1000));
    }
}

#[test]
fn file_moved_to_dropped_path_stays() {
    let base = files(&[("a", "hook"), (".git/HEAD", "1"), (".git/config", "mine")]);
    let result = files(&[(".git/HEAD", "1"), (".git/hooks/post-x", "hook")]);
    let fixture = Fixture::new(&base, &result, &base);
    let MergeOutcome { gone, .. } = fixture.merge(true);
    assert_eq!(gone.protected, [".git/config", "a"].map(PathBuf::from));
    assert_eq!(fixture.target(), base);
}

#[test]
fn directory_in_target_keeps_mode() {
    let base = files(&[("d/a", "1")]);
    let fixture = Fixture::new(&base, &files(&[("d/a", "22")]), &base);
    crate::common::set_mode(&fixture.path("target/d"), 0o511);
    fixture.merge(false);
    assert_eq!(fixture.target(), files(&[("d/a", "22")]));
    assert_eq!(fixture.path("target/d").metadata().unwrap().permissions().mode() & 0o777, 0o511);
}

/// Paths, of which some are parents of others.
const PATHS: [&str; 8] = ["a", "b", "d", "d/a", "d/b", "d/e/a", "d/e", "f/a"];

/// Returns changes of a tree: new content or a removal for some paths.
fn edits() -> impl Strategy<Value = Vec<(usize, bool)>> {
    proptest::collection::vec((0..PATHS.len(), any::<bool>()), 0..6)
}

/// Applies changes. Each content has a unique length, by side and path.
fn edit(files: &mut Files, side: usize, edits: &[(usize, bool)]) {
    for (path, is_written) in edits {
        let name = PATHS[*path];
        let is_below = |path: &str, other: &str| path.starts_with(&format!("{other}/"));
        files.retain(|other, _| other != name && !is_below(other, name));
        if *is_written {
            files.retain(|other, _| !is_below(name, other));
            files.insert(name.to_owned(), "x".repeat(1 + side * PATHS.len() + path));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn merge_loses_no_change(first in edits(), theirs in edits(), mine in edits(), removes: bool) {
        let mut base = Files::new();
        edit(&mut base, 0, &first);
        let (mut result, mut target) = (base.clone(), base.clone());
        edit(&mut result, 1, &theirs);
        edit(&mut target, 2, &mine);

        let fixture = Fixture::new(&base, &result, &target);
        let MergeOutcome { conflicts, .. } = fixture.merge(removes);
        let conflicts: BTreeSet<&Path> = conflicts.iter().map(|conflict| conflict.path.as_path()).collect();

        let after = fixture.target();
        for (path, content) in &target {
            let is_mine = base.get(path) != Some(content);
            let is_left_alone = result.get(path).is_some_and(|there| base.get(path) == Some(there));
            if is_mine || is_left_alone {
                prop_assert_eq!(after.get(path), Some(content), "{} of the target", path);
            } else if removes
                && !result.contains_key(path)
                && !Path::new(path).ancestors().any(|path| conflicts.contains(path))
            {
                prop_assert!(after.get(path) != Some(content), "{} was removed by the command", path);
            }
        }
        let contents: BTreeSet<&String> = after.values().collect();
        for (path, content) in &result {
            if base.get(path) != Some(content) {
                prop_assert!(contents.contains(content), "{} of the result", path);
            }
        }
    }
}
