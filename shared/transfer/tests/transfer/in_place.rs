//! Results that come back to the directory whose tree was sent, and what was changed there meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::manifest_of;
use gantry_transfer::*;
use proptest::prelude::*;
use tempfile::TempDir;

/// The files of a tree. What a path below another one's file would be cannot be.
type Files = BTreeMap<String, String>;

/// A tree that was sent, what a command made of it, and the directory that it was sent from.
struct Fixture {
    dir: TempDir,
}

/// What a result did to the directory.
struct WorkerProvided {
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
                // A file that is left alone keeps its time.
                crate::common::set_mtime(&path, 1_000 + i64::try_from(content.len()).unwrap(), 0);
            }
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn bring(&self, removes: bool) -> WorkerProvided {
        self.bring_after(removes, |_| ())
    }

    /// Brings the result; `edit` changes the target after it was compared.
    fn bring_after(&self, removes: bool, edit: impl FnOnce(&Path)) -> WorkerProvided {
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
        WorkerProvided { conflicts: merged.conflicts, gone }
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
fn edits_of_files_that_command_left_alone_stay() {
    let base = files(&[("a", "1"), ("d/b", "1"), ("lost", "1")]);
    let result = files(&[("a", "1"), ("d/b", "1"), ("lost", "1"), ("d/made", "x")]);
    let fixture = Fixture::new(&base, &result, &files(&[("a", "edited"), ("d/b", "1"), ("new", "y")]));
    assert!(fixture.bring(false).conflicts.is_empty());
    let expected = files(&[("a", "edited"), ("d/b", "1"), ("d/made", "x"), ("new", "y")]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn file_that_both_changed_is_there_twice() {
    let base = files(&[("d/a", "1"), ("d/a.gantry-result", "earlier")]);
    let result = files(&[("d/a", "theirs"), ("d/a.gantry-result", "earlier")]);
    let fixture = Fixture::new(&base, &result, &files(&[("d/a", "mine"), ("d/a.gantry-result", "earlier")]));
    let conflict = Conflict { path: "d/a".into(), result: Some("d/a.gantry-result-2".into()) };
    assert_eq!(fixture.bring(false).conflicts, [conflict]);
    let expected =
        files(&[("d/a", "mine"), ("d/a.gantry-result", "earlier"), ("d/a.gantry-result-2", "theirs")]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn same_change_on_both_sides_is_no_conflict() {
    let (base, both) = (files(&[("a", "1")]), files(&[("a", "22")]));
    let fixture = Fixture::new(&base, &both, &both);
    assert!(fixture.bring(true).conflicts.is_empty());
    assert_eq!(fixture.target(), both);
}

#[test]
fn only_what_command_removed_goes() {
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
    let WorkerProvided { gone, .. } = fixture.bring(true);
    assert_eq!((gone.changed, gone.protected), (vec!["b".into()], vec![".gantryignore".into()]));
    assert_eq!(fixture.target(), files(&[("b", "mine"), ("d/never-sent", "x"), (".gantryignore", "x")]));
    assert!(!fixture.path("target/e").exists(), "an empty directory goes");
}

#[test]
fn directory_becomes_file_if_it_is_as_sent() {
    let base = files(&[("d/a", "1"), ("e/a", "1")]);
    let result = files(&[("d", "file"), ("e", "file")]);
    let fixture = Fixture::new(&base, &result, &files(&[("d/a", "1"), ("e/a", "1"), ("e/mine", "x")]));
    let conflict = Conflict { path: "e".into(), result: Some("e.gantry-result".into()) };
    assert_eq!(fixture.bring(false).conflicts, [conflict]);
    let expected = files(&[("d", "file"), ("e/a", "1"), ("e/mine", "x"), ("e.gantry-result", "file")]);
    assert_eq!(fixture.target(), expected);
}

#[test]
fn hard_links_of_the_caller_take_the_result() {
    let both = |content| files(&[("a", content), ("d/b", content)]);
    let fixture = Fixture::new(&both("1"), &both("22"), &both("1"));
    for tree in ["base", "result", "target"] {
        fs::remove_file(fixture.path(tree).join("d/b")).unwrap();
        fs::hard_link(fixture.path(tree).join("a"), fixture.path(tree).join("d/b")).unwrap();
    }
    assert_eq!(fixture.bring(true).conflicts, []);
    assert_eq!(fixture.target(), both("22"));
}

#[test]
fn mode_that_both_changed_stays() {
    let base = files(&[("a", "1")]);
    let fixture = Fixture::new(&base, &base, &base);
    crate::common::set_mode(&fixture.path("result/a"), 0o755);
    crate::common::set_mode(&fixture.path("target/a"), 0o600);
    assert_eq!(fixture.bring(true).conflicts, [Conflict { path: "a".into(), result: None }]);
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
    let WorkerProvided { conflicts, gone } = fixture.bring_after(true, edit);
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
fn loose_reference_goes_when_it_was_packed() {
    let base = files(&[
        (".git/HEAD", "1"),
        (".git/refs/heads/a", "1"),
        (".git/objects/1", "1"),
        (".git/index", "1"),
    ]);
    let result = files(&[(".git/HEAD", "1"), (".git/packed-refs", "a 22"), (".git/index", "1")]);
    let fixture = Fixture::new(&base, &result, &base);
    fixture.bring(true);
    assert_eq!(fixture.target(), result);

    // Another reference was made meanwhile, and may need the objects.
    let mut mine = base.clone();
    mine.insert(".git/refs/heads/mine".to_owned(), "1".to_owned());
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.bring(true).gone.changed, Vec::<PathBuf>::new());
    mine.insert(".git/packed-refs".to_owned(), "a 22".to_owned());
    mine.remove(".git/refs/heads/a");
    assert_eq!(fixture.target(), mine);

    // One that the command deleted, and that was checked out meanwhile, stays.
    let (mut result, mut mine) = (base.clone(), base.clone());
    result.remove(".git/refs/heads/a");
    mine.insert(".git/HEAD".to_owned(), "a".repeat(7));
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.bring(true).gone.changed, [PathBuf::from(".git/refs/heads/a")]);
    assert_eq!(fixture.target(), mine);
}

#[test]
fn loose_reference_stays_when_both_packed() {
    let base = files(&[(".git/HEAD", "1"), (".git/refs/heads/a", "1"), (".git/objects/1", "1")]);
    let result = files(&[(".git/HEAD", "1"), (".git/packed-refs", "a 22"), (".git/objects/1", "1")]);
    let mut mine = base.clone();
    mine.insert(".git/packed-refs".to_owned(), "mine".to_owned());
    let fixture = Fixture::new(&base, &result, &mine);
    let WorkerProvided { conflicts, gone } = fixture.bring(true);
    assert_eq!(gone.changed, [PathBuf::from(".git/refs/heads/a")]);
    assert_eq!(conflicts[0].path, PathBuf::from(".git/packed-refs"));
}

#[test]
fn objects_of_every_repository_stay_when_its_references_changed() {
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
        fixture.bring(true);
        assert_eq!(fixture.target(), mine, "{git}");
        let fixture = Fixture::new(&base, &result, &base);
        fixture.bring(true);
        assert_eq!(fixture.target(), result, "{git}");
    }
}

#[test]
fn what_the_caller_removed_comes_back_as_a_conflict() {
    let base = files(&[("a", "1"), ("d/b", "1"), ("d/c", "1"), ("e/f", "1")]);
    let result = files(&[("a", "22"), ("d/b", "1"), ("d/c", "22"), ("e/f", "1")]);
    let fixture = Fixture::new(&base, &result, &files(&[]));
    // Other modes alone are nothing to bring back.
    crate::common::set_mode(&fixture.path("result/d/b"), 0o755);
    crate::common::set_mode(&fixture.path("result/e"), 0o700);
    crate::common::set_mode(&fixture.path("result/e/f"), 0o600);
    let conflicts = fixture.bring(true).conflicts;
    let results: Vec<_> = conflicts.iter().map(|conflict| conflict.path.to_str().unwrap()).collect();
    assert_eq!(results, ["a", "d/c"]);
    assert_eq!(fixture.target(), files(&[("a.gantry-result", "22"), ("d/c.gantry-result", "22")]));
    assert!(!fixture.path("target/e").exists());
}

#[test]
fn database_and_its_log_are_of_one_side() {
    let base = files(&[("db", "1"), ("other", "1")]);
    let result = files(&[("db", "22"), ("other", "22")]);
    // A program here has opened it, and written to the log.
    let mine = files(&[("db", "1"), ("db-wal", "mine"), ("other", "1")]);
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.bring(true).conflicts.len(), 1);
    let expected = [("db", "1"), ("db-wal", "mine"), ("db.gantry-result", "22"), ("other", "22")];
    assert_eq!(fixture.target(), files(&expected));

    // The log of the command is not for a database that was changed here.
    let result = files(&[("db", "1"), ("db-journal", "theirs"), ("other", "1")]);
    let fixture = Fixture::new(&base, &result, &files(&[("db", "mine"), ("other", "1")]));
    assert_eq!(fixture.bring(true).conflicts.len(), 1);
    let expected = [("db", "mine"), ("db-journal.gantry-result", "theirs"), ("other", "1")];
    assert_eq!(fixture.target(), files(&expected));

    // Nor does a log go that belongs to it.
    let (base, result) = (files(&[("db", "1"), ("db-wal", "1")]), files(&[("db", "22")]));
    let mine = files(&[("db", "mine"), ("db-wal", "1")]);
    let fixture = Fixture::new(&base, &result, &mine);
    assert_eq!(fixture.bring(true).gone.changed, [PathBuf::from("db-wal")]);
    assert_eq!(fixture.target()["db-wal"], "1");
}

#[test]
fn replaced_file_keeps_its_access_list_and_owner() {
    let base = files(&[("a", "1"), ("b", "1")]);
    let fixture = Fixture::new(&base, &files(&[("a", "22"), ("b", "22")]), &base);
    // An entry for the user 1000: version 2, then tag, rights and id of each.
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, u32::MAX), (2, 6, 1000), (4, 0, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend([&tag.to_le_bytes()[..], &rights.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    let (attribute, file) = ("system.posix_acl_access", fixture.path("target/a"));
    let set = rustix::fs::setxattr(&file, attribute, &list, rustix::fs::XattrFlags::empty());
    if set == Err(rustix::io::Errno::OPNOTSUPP) {
        eprintln!("not applicable: no access lists here");
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
    assert_eq!(fixture.bring(true).conflicts, []);
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
fn file_moved_to_where_nothing_is_written_stays() {
    let base = files(&[("a", "hook"), (".git/HEAD", "1"), (".git/config", "mine")]);
    let result = files(&[(".git/HEAD", "1"), (".git/hooks/post-x", "hook")]);
    let fixture = Fixture::new(&base, &result, &base);
    let WorkerProvided { gone, .. } = fixture.bring(true);
    assert_eq!(gone.protected, [".git/config", "a"].map(PathBuf::from));
    assert_eq!(fixture.target(), base);
}

#[test]
fn directory_of_the_caller_keeps_its_mode() {
    let base = files(&[("d/a", "1")]);
    let fixture = Fixture::new(&base, &files(&[("d/a", "22")]), &base);
    crate::common::set_mode(&fixture.path("target/d"), 0o511);
    fixture.bring(false);
    assert_eq!(fixture.target(), files(&[("d/a", "22")]));
    assert_eq!(fixture.path("target/d").metadata().unwrap().permissions().mode() & 0o777, 0o511);
}

/// Paths of which some are directories of others.
const PATHS: [&str; 8] = ["a", "b", "d", "d/a", "d/b", "d/e/a", "d/e", "f/a"];

/// Changes to a tree: for some paths another content, or none.
fn edits() -> impl Strategy<Value = Vec<(usize, bool)>> {
    proptest::collection::vec((0..PATHS.len(), any::<bool>()), 0..6)
}

/// Each content is of one side and one path alone, and of another length than any other.
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
    fn nothing_of_either_side_is_lost(first in edits(), theirs in edits(), mine in edits(), removes: bool) {
        let mut base = Files::new();
        edit(&mut base, 0, &first);
        let (mut result, mut target) = (base.clone(), base.clone());
        edit(&mut result, 1, &theirs);
        edit(&mut target, 2, &mine);

        let fixture = Fixture::new(&base, &result, &target);
        let WorkerProvided { conflicts, .. } = fixture.bring(removes);
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
