//! Guard of a caller's directory against dangerous entries of an untrusted tree.
//!
//! The command line calls [`guard`] for each manifest that a worker sends. No writer and no merge
//! sees the dropped entries.
//!
//! | Dropped | Unless |
//! |---|---|
//! | git hooks, git configuration, entries that lead git to other configuration; configuration of Mercurial and jj | [`Allowed::git_programs`] |
//! | setuid and setgid bits, file capabilities, device nodes, `.gantryignore` | [`Allowed::special`] |
//!
//! Invariant: an entry that the directory already has with the same content and mode is never
//! dropped. A directory that returns unchanged from a worker therefore stays unchanged.

mod programs;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::dirs::Cursor;
use crate::entry::{Entry, EntryKind};
use crate::guard::programs::{
    Repositories, is_below, makes_git_run_programs, makes_others_run_programs, normalize_name,
    target_configured_paths,
};
use crate::manifest::{InvalidManifest, Manifest};
use crate::subtree::Subtree;
use crate::target::{CAPABILITY, SETID, TargetTree};

/// Dangerous entries that the caller accepts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Allowed {
    /// Entries that make git run programs.
    pub git_programs: bool,
    /// Setuid and setgid bits, file capabilities, device nodes, and ignore rules for uploads.
    pub special: bool,
}

/// A tree without the dropped entries.
#[derive(Debug)]
pub struct Guarded {
    /// The remaining tree, with a mapping to the ordinals of the whole tree.
    pub tree: Subtree,
    /// The dropped parts, in the order of paths.
    pub dropped: Vec<Dropped>,
}

/// An entry, or a part of an entry, that was dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Path of the entry, relative to the root.
    pub path: PathBuf,
    /// The dropped part.
    pub what: DroppedKind,
    /// Whether the directory has another entry at the path. That entry stays.
    pub is_other_there: bool,
}

/// The part of an entry that was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DroppedKind {
    /// The whole entry, because it makes git run programs.
    GitProgram,
    /// The whole entry, because it decides what the next upload of the directory ignores.
    IgnoreRules,
    /// The whole entry, because it is a device node.
    Device,
    /// The setuid or setgid bit.
    SetId,
    /// The file capabilities.
    Capability,
}

/// Drops the entries of `manifest` that are dangerous in `target`. A missing target counts as an
/// empty directory.
///
/// # Errors
///
/// Fails only if the whole tree would violate a rule, too.
pub fn guard(target: &Path, manifest: &Manifest, allowed: Allowed) -> Result<Guarded, InvalidManifest> {
    let mut target_tree = TargetTree::new(Cursor::through(target).ok(), manifest);
    let mut dropped = Vec::new();
    // `None` for dropped entries, `Some` for changed entries.
    let mut changed: HashMap<usize, Option<Entry>> = HashMap::new();
    let mut rules = DropRules::new(manifest, &mut target_tree, allowed);
    for (index, entry) in manifest.entries().iter().enumerate() {
        let whole = rules.dropped_kind(entry, &mut target_tree);
        let grants_rights = !allowed.special && grants_rights(entry);
        if whole.is_none() && !grants_rights {
            continue;
        }
        if target_tree.has_entry(entry) {
            continue;
        }
        let mut drop = |what| {
            let is_other_there = target_tree.exists(&entry.path);
            dropped.push(Dropped { path: entry.path().to_owned(), what, is_other_there });
        };
        if let Some(what) = whole {
            // For a directory, the report names its contents.
            if !entry.is_directory() {
                drop(what);
            }
            changed.insert(index, None);
            continue;
        }
        if entry.mode & SETID != 0 {
            drop(DroppedKind::SetId);
        }
        if entry.xattrs.iter().any(|xattr| xattr.name == CAPABILITY) {
            drop(DroppedKind::Capability);
        }
        changed.insert(index, Some(without_rights(entry)));
    }
    let tree = manifest.select(|entry| {
        let index = if changed.is_empty() { None } else { manifest.find(&entry.path) };
        // If the first link of a file is dropped, the file moves to another link.
        let is_moved = index.is_some_and(|index| manifest.entries()[index].kind != entry.kind);
        match index.and_then(|index| changed.get(&index)) {
            _ if is_moved && allowed.special => Some(entry.clone()),
            _ if is_moved => Some(without_rights(entry)),
            Some(changed) => changed.clone(),
            None => Some(entry.clone()),
        }
    })?;
    Ok(Guarded { tree, dropped })
}

/// Returns the entries of a tree that are written or removed only with permission of the caller:
/// entries that make programs run, and ignore rules for uploads.
pub(crate) fn protected(manifest: &Manifest, allowed: Allowed) -> Vec<&Entry> {
    let mut target_tree = TargetTree::new(None, manifest);
    let mut rules = DropRules::new(manifest, &mut target_tree, allowed);
    let mut protected = Vec::new();
    for entry in manifest.entries() {
        let kind = rules.dropped_kind(entry, &mut target_tree);
        if matches!(kind, Some(DroppedKind::GitProgram | DroppedKind::IgnoreRules)) {
            protected.push(entry);
        }
    }
    protected
}

/// Rules for entries that are dropped as a whole.
struct DropRules<'a> {
    allowed: Allowed,
    repositories: Repositories<'a>,
    /// Paths that the git configuration of the target names.
    configured_paths: Vec<Vec<u8>>,
}

impl<'a> DropRules<'a> {
    fn new(manifest: &'a Manifest, target_tree: &mut TargetTree<'_>, allowed: Allowed) -> Self {
        Self {
            allowed,
            repositories: Repositories::of(manifest),
            configured_paths: target_configured_paths(target_tree),
        }
    }

    fn dropped_kind(&mut self, entry: &'a Entry, target_tree: &mut TargetTree<'_>) -> Option<DroppedKind> {
        let is_program = !self.allowed.git_programs
            && (makes_git_run_programs(entry)
                || makes_others_run_programs(entry)
                || self.configured_paths.iter().any(|path| is_below(&entry.path, path))
                || self.repositories.has_program(entry, target_tree));
        if is_program {
            Some(DroppedKind::GitProgram)
        } else if self.allowed.special {
            None
        } else if is_ignore_rule(entry) {
            Some(DroppedKind::IgnoreRules)
        } else {
            matches!(entry.kind, EntryKind::Device { .. }).then_some(DroppedKind::Device)
        }
    }
}

/// Whether an entry grants the rights of another user or group to its users.
fn grants_rights(entry: &Entry) -> bool {
    entry.mode & SETID != 0 || entry.xattrs.iter().any(|xattr| xattr.name == CAPABILITY)
}

fn without_rights(entry: &Entry) -> Entry {
    let mut entry = Entry { mode: entry.mode & !SETID, ..entry.clone() };
    entry.xattrs.retain(|xattr| xattr.name != CAPABILITY);
    entry
}

/// Whether an entry is a `.gantryignore`, or is inside of a directory with that name.
fn is_ignore_rule(entry: &Entry) -> bool {
    entry.path.split(|byte| *byte == b'/').any(|name| normalize_name(name)[..] == b".gantryignore"[..])
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use tempfile::TempDir;

    use super::*;
    use crate::entry::{DeviceKind, Xattr};
    use crate::manifest::Limits;
    use crate::{ScanOptions, scan};

    fn entry(path: &str, kind: EntryKind) -> Entry {
        let mode =
            if matches!(kind, EntryKind::Symlink { .. } | EntryKind::HardLink { .. }) { 0 } else { 0o755 };
        let path = path.as_bytes().to_vec();
        Entry { path, mode, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs: Vec::new(), kind }
    }

    fn file(path: &str) -> Entry {
        entry(path, EntryKind::File { size_bytes: 0, extents: Vec::new() })
    }

    /// Creates a repository with a hook and a configuration.
    fn repository(hook: &str) -> TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at(".git/hooks")).expect("made");
        for (path, text) in
            [(".git/hooks/post-checkout", hook), (".git/config", "[core]"), (".git/HEAD", "ref")]
        {
            fs::write(at(path), text).expect("written");
        }
        fs::set_permissions(at(".git/hooks/post-checkout"), fs::Permissions::from_mode(0o755)).expect("set");
        root
    }

    fn manifest(root: &Path) -> Manifest {
        scan(root, &ScanOptions::default(), None).expect("scanned").manifest
    }

    fn guarded(target: &Path, manifest: &Manifest) -> (Vec<String>, Vec<Dropped>) {
        let guarded = guard(target, manifest, Allowed::default()).expect("valid");
        let entries = guarded.tree.manifest().entries();
        (entries.iter().map(|entry| entry.path().display().to_string()).collect(), guarded.dropped)
    }

    #[test]
    fn repository_is_detected_by_its_parts() {
        let result = tempfile::tempdir().expect("a directory");
        let write = |root: &Path, path: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, "evil").expect("written");
        };
        for path in ["HEAD", "refs/heads/main", "objects/x", "config", "hooks/post-checkout", "deep/HEAD"] {
            write(result.path(), path);
        }
        for path in ["deep/commondir", "deep/config", "plain/config", "plain/hooks/x"] {
            write(result.path(), path);
        }
        let empty = tempfile::tempdir().expect("a directory");
        let (paths, dropped) = guarded(empty.path(), &manifest(result.path()));
        let dropped: Vec<_> = dropped.iter().map(|dropped| dropped.path.display().to_string()).collect();
        assert_eq!(dropped, ["config", "deep/commondir", "deep/config", "hooks/post-checkout"]);
        assert!(paths.contains(&"plain/config".to_owned()) && paths.contains(&"plain/hooks/x".to_owned()));

        // The target has the other parts of the repository.
        let (target, few) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        write(target.path(), "HEAD");
        write(target.path(), "objects/x");
        write(few.path(), "hooks/post-merge");
        write(few.path(), "file");
        let (paths, dropped) = guarded(target.path(), &manifest(few.path()));
        assert_eq!((paths, dropped.len()), (vec![String::new(), "file".to_owned()], 1));

        // The target has a configuration of an earlier result, and this result has the missing
        // parts of the repository.
        let planted = tempfile::tempdir().expect("a directory");
        write(planted.path(), "config");
        for (first, then) in [("objects/x", "HEAD"), ("HEAD", "objects/x")] {
            let target = tempfile::tempdir().expect("a directory");
            write(target.path(), "config");
            assert_eq!(
                guarded(target.path(), &manifest(planted.path())).1,
                [],
                "a file with that name is no repository"
            );
            write(target.path(), first);
            let rest = tempfile::tempdir().expect("a directory");
            write(rest.path(), then);
            let (paths, dropped) = guarded(target.path(), &manifest(rest.path()));
            assert_eq!((paths.len(), dropped.len()), (1, 1), "{then}: {paths:?}, {dropped:?}");
            // A repository of the caller stays a repository. Its own configuration decides about
            // programs.
            write(target.path(), then);
            fs::write(rest.path().join(then), "new").expect("written");
            let (paths, dropped) = guarded(target.path(), &manifest(rest.path()));
            assert!(paths.contains(&then.to_owned()) && dropped.is_empty(), "{paths:?}, {dropped:?}");
        }
    }

    #[test]
    fn configured_hooks_are_dropped() {
        let target = repository("mine");
        fs::write(target.path().join(".git/config"), "[core]\nhooksPath = .hooks").expect("written");
        let result = tempfile::tempdir().expect("a directory");
        for path in [".hooks/pre-commit", ".hg/hgrc", ".jj/repo/config.toml", "plain"] {
            let at = result.path().join(path);
            fs::create_dir_all(at.parent().expect("a directory")).expect("made");
            fs::write(at, "evil").expect("written");
        }
        let (_, dropped) = guarded(target.path(), &manifest(result.path()));
        let dropped: Vec<_> = dropped.iter().map(|dropped| dropped.path.display().to_string()).collect();
        assert_eq!(dropped, [".hg/hgrc", ".hooks/pre-commit", ".jj/repo/config.toml"]);
    }

    #[test]
    fn new_ignore_rules_are_dropped() {
        let write = |root: &Path, text: &str| fs::write(root.join(".gantryignore"), text).expect("written");
        let (result, target) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        write(result.path(), "");
        for is_other_there in [false, true] {
            let (paths, dropped) = guarded(target.path(), &manifest(result.path()));
            let expected =
                Dropped { path: ".gantryignore".into(), what: DroppedKind::IgnoreRules, is_other_there };
            assert_eq!((paths, dropped), (vec![String::new()], vec![expected]));
            write(target.path(), "secret.env");
        }
        write(result.path(), "secret.env");
        assert_eq!(guarded(target.path(), &manifest(result.path())).1, []);
    }

    #[test]
    fn new_git_programs_are_dropped() {
        let result = repository("evil");
        let tree = manifest(result.path());
        let program = |path: &str, is_other_there| Dropped {
            path: path.into(),
            what: DroppedKind::GitProgram,
            is_other_there,
        };
        let empty = tempfile::tempdir().expect("a directory");
        for target in [empty.path(), &empty.path().join("not there")] {
            let (paths, dropped) = guarded(target, &tree);
            assert_eq!(paths, ["", ".git", ".git/HEAD"]);
            assert_eq!(dropped, [program(".git/config", false), program(".git/hooks/post-checkout", false)]);
        }
        let (paths, dropped) = guarded(repository("mine").path(), &tree);
        assert_eq!(paths, ["", ".git", ".git/HEAD", ".git/config", ".git/hooks"]);
        assert_eq!(dropped, [program(".git/hooks/post-checkout", true)]);
        let same = repository("evil");
        assert_eq!(guarded(same.path(), &tree), guarded(result.path(), &tree));
        assert_eq!(guarded(same.path(), &tree).1, []);
        let hook = same.path().join(".git/hooks/post-checkout");
        fs::set_permissions(hook, fs::Permissions::from_mode(0o644)).expect("set");
        assert_eq!(
            guarded(same.path(), &tree).1,
            [program(".git/hooks/post-checkout", true)],
            "the target's hook is not executable"
        );

        let accepted = Allowed { git_programs: true, ..Allowed::default() };
        let accepted = guard(empty.path(), &tree, accepted).expect("valid");
        assert_eq!((accepted.tree.manifest().tree_digest(), accepted.dropped), (tree.tree_digest(), vec![]));
    }

    #[test]
    fn link_to_dropped_file_becomes_file() {
        let result = repository("evil");
        fs::hard_link(result.path().join(".git/hooks/post-checkout"), result.path().join("copy"))
            .expect("linked");
        fs::hard_link(result.path().join(".git/hooks/post-checkout"), result.path().join("other"))
            .expect("linked");
        symlink("elsewhere", result.path().join("link")).expect("linked");
        let tree = manifest(result.path());
        let empty = tempfile::tempdir().expect("a directory");
        let guarded = guard(empty.path(), &tree, Allowed::default()).expect("valid");
        let entries = guarded.tree.manifest();
        let kind = |path: &[u8]| &entries.entries()[entries.find(path).expect("there")].kind;
        assert!(matches!(kind(b"copy"), EntryKind::File { size_bytes: 4, .. }));
        assert_eq!(kind(b"other"), &EntryKind::HardLink { to: b"copy".to_vec() });
        let digests =
            |manifest: &Manifest| manifest.extents().map(|found| found.extent.digest).collect::<Vec<_>>();
        let there = guarded.tree.origins(&crate::OrdinalRanges::all(entries.extent_count()));
        let wanted: Vec<_> =
            there.ordinals().map(|origin| (guarded.tree.ordinal(origin), tree.locate(origin))).collect();
        for (ordinal, located) in &wanted {
            let digest = digests(entries)[usize::try_from(ordinal.expect("kept")).expect("small")];
            assert_eq!(digest, located.expect("an extent").extent.digest);
        }
        assert_eq!(wanted.len() as u64, entries.extent_count());
    }

    #[test]
    fn special_rights_and_devices_are_dropped() {
        let mut setuid = Entry { mode: 0o4755, ..file("setuid") };
        setuid.xattrs = vec![Xattr { name: CAPABILITY.to_vec(), value: vec![1; 20] }];
        let device = EntryKind::Device { kind: DeviceKind::Character, major: 1, minor: 3 };
        let directory = Entry { mode: 0o2755, ..entry("group", EntryKind::Directory) };
        let entries = [entry("", EntryKind::Directory), entry("device", device), directory, setuid];
        let tree = Manifest::new(entries, Limits::default()).expect("valid");

        let target = tempfile::tempdir().expect("a directory");
        let all = guard(target.path(), &tree, Allowed::default()).expect("valid");
        let kinds = |guarded: &Guarded| {
            let dropped = guarded.dropped.iter();
            dropped.map(|dropped| (dropped.path.display().to_string(), dropped.what)).collect::<Vec<_>>()
        };
        let of = |path: &str, what| (path.to_owned(), what);
        let rights = [of("setuid", DroppedKind::SetId), of("setuid", DroppedKind::Capability)];
        let first = [of("device", DroppedKind::Device), of("group", DroppedKind::SetId)];
        assert_eq!(kinds(&all), [&first[..], &rights[..]].concat());
        let left = all.tree.manifest().entries();
        assert_eq!(left.len(), 3);
        assert!(left.iter().all(|entry| !grants_rights(entry)));

        // The target has the setgid directory already.
        fs::create_dir(target.path().join("group")).expect("made");
        fs::set_permissions(target.path().join("group"), fs::Permissions::from_mode(0o2755)).expect("set");
        let again = guard(target.path(), &tree, Allowed::default()).expect("valid");
        assert_eq!(kinds(&again), [&first[..1], &rights[..]].concat());
        let accepted = Allowed { special: true, ..Allowed::default() };
        let accepted = guard(target.path(), &tree, accepted).expect("valid");
        assert_eq!((accepted.tree.manifest().tree_digest(), accepted.dropped), (tree.tree_digest(), vec![]));
    }
}
