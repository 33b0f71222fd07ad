//! Detection of entries that make git, Mercurial or jj run programs.
//!
//! Names are compared after normalization, because some file systems ignore case or invisible
//! characters.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags, openat};

use crate::entry::{Entry, EntryKind, split};
use crate::manifest::Manifest;
use crate::target::TargetTree;

/// Maximum bytes that are read of a git configuration.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Flag of a directory with a HEAD, which every repository has.
const HEAD: u8 = 1;
/// Flag of a directory with objects, references, or a file that names their location.
const STORE: u8 = 2;
/// Flags of a repository. Git treats a directory with these parts as a repository, and reads its
/// configuration when it is called there.
const REPOSITORY: u8 = HEAD | STORE;
/// Flag of a directory with an entry that decides which programs git runs.
const PROGRAM: u8 = 4;

/// Repositories in directories that are not called `.git`. Their parts may come from the tree and
/// from the target.
pub(super) struct Repositories<'a> {
    /// Flags of the tree's directories.
    tree: HashMap<&'a [u8], u8>,
    /// Flags of the same directories in the target, as far as they were needed.
    target: HashMap<&'a [u8], u8>,
}

impl<'a> Repositories<'a> {
    pub(super) fn of(manifest: &'a Manifest) -> Self {
        let mut tree: HashMap<&[u8], u8> = HashMap::new();
        for entry in manifest.entries() {
            let (parent, name) = split(&entry.path);
            *tree.entry(parent).or_default() |= repository_part(name);
        }
        Self { tree, target: HashMap::new() }
    }

    /// Whether git would run programs because of an entry. Either the entry decides about programs
    /// of a repository, or it turns a directory of the target with such an entry into a repository.
    pub(super) fn has_program(&mut self, entry: &'a Entry, target_tree: &mut TargetTree<'_>) -> bool {
        let mut start = 0;
        for name in entry.path.split(|byte| *byte == b'/') {
            let part = repository_part(name);
            if part != 0 {
                let directory = &entry.path[..start.max(1) - 1];
                let tree = self.tree.get(directory).copied().unwrap_or(0);
                let target =
                    *self.target.entry(directory).or_insert_with(|| target_parts(target_tree, directory));
                let is_made = target & REPOSITORY != REPOSITORY && target & PROGRAM != 0;
                if (tree | target) & REPOSITORY == REPOSITORY && (part & PROGRAM != 0 || is_made) {
                    return true;
                }
            }
            start += name.len() + 1;
        }
        false
    }
}

/// Returns the flags of a directory that contains `name`.
fn repository_part(name: &[u8]) -> u8 {
    let part = match &normalize_name(name)[..] {
        b"head" => HEAD,
        b"objects" | b"refs" | b"commondir" => STORE,
        _ => 0,
    };
    if decides_programs(name) { part | PROGRAM } else { part }
}

/// Whether an entry at or below a directory `.git` may make git run programs, or read a
/// configuration that does.
pub(super) fn makes_git_run_programs(entry: &Entry) -> bool {
    let names: Vec<&[u8]> = entry.path.split(|byte| *byte == b'/').collect();
    names.iter().enumerate().filter(|(_, name)| is_git_directory(name)).any(|(at, _)| {
        let inside = &names[at + 1..];
        let is_inner = inside
            .first()
            .is_some_and(|first| matches!(&normalize_name(first)[..], b"modules" | b"worktrees"));
        match inside {
            // A file or link `.git` leads git to another directory.
            [] => !entry.is_directory(),
            // Repositories of submodules, whose names may have slashes, and of other working trees.
            _ if is_inner => {
                inside.iter().any(|name| decides_programs(name))
                    || matches!(entry.kind, EntryKind::Symlink { .. })
            }
            [first, ..] => decides_programs(first),
        }
    })
}

/// Whether an entry makes Mercurial or jj run programs.
pub(super) fn makes_others_run_programs(entry: &Entry) -> bool {
    let names: Vec<_> = entry.path.split(|byte| *byte == b'/').map(normalize_name).collect();
    names.iter().enumerate().any(|(at, name)| match (&name[..], &names[at + 1..]) {
        (b".hg", [first, ..]) => matches!(&first[..], b"hgrc" | b"hgrc-not-shared" | b"sharedpath"),
        (b".jj", [first, second, ..]) => matches!((&first[..], &second[..]), (b"repo", b"config.toml")),
        (b".jj", [first]) => first[..] == b"repo"[..] && !entry.is_directory(),
        (b".hg", []) => !entry.is_directory(),
        _ => false,
    })
}

/// Whether `path` is `other`, or is below it.
pub(super) fn is_below(path: &[u8], other: &[u8]) -> bool {
    path.strip_prefix(other).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Returns the paths of hooks and further configuration that a git configuration names, relative to
/// the working tree.
///
/// Git resolves hook paths from the working tree, and configuration paths from the directory of the
/// file, which is `.git`.
fn configured_paths(configuration: &str) -> Vec<Vec<u8>> {
    let mut section = String::new();
    let mut paths = Vec::new();
    for line in configuration.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.split([']', ' ', '"']).next().unwrap_or_default().to_ascii_lowercase();
        }
        let pair = line.rsplit(']').next().unwrap_or_default();
        let Some((key, value)) = pair.split_once('=') else { continue };
        let base = match (section.as_str(), key.trim().to_ascii_lowercase().as_str()) {
            ("core", "hookspath") => Path::new(""),
            ("include" | "includeif", "path") => Path::new(".git"),
            _ => continue,
        };
        let mut path = PathBuf::new();
        for component in base.join(value.trim().trim_matches('"')).components() {
            match component {
                Component::Normal(name) => path.push(name),
                Component::ParentDir => _ = path.pop(),
                // An absolute path is outside of the working tree.
                Component::RootDir => path = PathBuf::from("/"),
                Component::CurDir | Component::Prefix(_) => {}
            }
        }
        if path.is_relative() && path != Path::new("") {
            paths.push(path.into_os_string().into_vec());
        }
    }
    paths
}

/// Whether `name` is `.git`, or its short name on FAT file systems.
fn is_git_directory(name: &[u8]) -> bool {
    name.len() >= 4 && matches!(&normalize_name(name)[..], b".git" | b"git~1")
}

/// Whether an entry with `name` in a repository decides which programs git runs.
fn decides_programs(name: &[u8]) -> bool {
    // An unfinished rebase or cherry-pick continues with the commands in its directory. `commondir`
    // names another directory from which git reads all of these.
    matches!(
        &normalize_name(name)[..],
        b"hooks"
            | b"config"
            | b"config.worktree"
            | b"commondir"
            | b"rebase-merge"
            | b"rebase-apply"
            | b"sequencer"
    )
}

/// Normalizes a name like file systems that ignore case or invisible characters.
pub(super) fn normalize_name(name: &[u8]) -> Cow<'_, [u8]> {
    let end = name.iter().rposition(|byte| !matches!(byte, b'.' | b' ')).map_or(0, |last| last + 1);
    let name = &name[..end];
    if name.is_ascii() {
        let is_lower = !name.iter().any(u8::is_ascii_uppercase);
        return if is_lower { Cow::Borrowed(name) } else { Cow::Owned(name.to_ascii_lowercase()) };
    }
    let is_ignored = |c: &char| matches!(c, '\u{200c}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{206a}'..='\u{206f}' | '\u{feff}');
    let text = String::from_utf8_lossy(name);
    let visible: String = text.chars().filter(|c| !is_ignored(c)).collect();
    Cow::Owned(visible.to_lowercase().into_bytes())
}

/// Returns the paths that the git configuration of the target names.
pub(super) fn target_configured_paths(target: &mut TargetTree<'_>) -> Vec<Vec<u8>> {
    let read = |directory: &OwnedFd| {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = openat(directory, "config", flags, Mode::empty()).ok()?;
        let mut text = Vec::new();
        std::fs::File::from(opened).take(MAX_CONFIG_BYTES).read_to_end(&mut text).ok()?;
        Some(configured_paths(&String::from_utf8_lossy(&text)))
    };
    let directory = target.directory(b".git");
    directory.and_then(|directory| read(&directory)).unwrap_or_default()
}

/// Returns the flags of a directory in the target.
fn target_parts(target: &mut TargetTree<'_>, directory: &[u8]) -> u8 {
    let names = ["HEAD", "objects", "refs", "commondir", "config", "config.worktree", "hooks"];
    let separator = if directory.is_empty() { &b""[..] } else { b"/" };
    let has = |name: &&str| target.exists(&[directory, name.as_bytes()].join(separator));
    names.into_iter().filter(has).fold(0, |found, name| found | repository_part(name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        let path = path.as_bytes().to_vec();
        Entry { path, mode: 0, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs: Vec::new(), kind }
    }

    fn file(path: &str) -> Entry {
        entry(path, EntryKind::File { size_bytes: 0, extents: Vec::new() })
    }

    #[test]
    fn git_programs_are_detected_by_path() {
        let withheld = [
            ".git/hooks/pre-commit",
            ".git/config",
            ".git/config.worktree",
            ".git/commondir",
            ".git/rebase-merge/git-rebase-todo",
            ".git/rebase-apply/next",
            ".git/sequencer/opts",
            ".GIT/Hooks/post-checkout",
            ".Git/CONFIG",
            ".g\u{200c}it/config",
            "git~1/config",
            ".git./config",
            ".git/modules/a/hooks/x",
            ".git/modules/a/b/config",
            ".git/modules/refs/config",
            ".git/worktrees/a/config.worktree",
            "deep/down/.git/hooks/x",
            "sub/.git",
            ".git",
        ];
        for path in withheld {
            assert!(makes_git_run_programs(&file(path)), "{path}");
        }
        let kept = [
            ".git/HEAD",
            ".git/objects/ab/cd",
            ".git/refs/heads/hooks",
            ".git/info/exclude",
            ".git/modules/a/HEAD",
            ".gitignore",
            ".gitmodules",
            "git/hooks/x",
            "hooks/pre-commit",
            "config",
        ];
        for path in kept {
            assert!(!makes_git_run_programs(&file(path)), "{path}");
        }
        let link = |path| makes_git_run_programs(&entry(path, EntryKind::Symlink { target: b"x".to_vec() }));
        assert!([".git", ".git/hooks", ".git/modules", ".git/modules/a"].into_iter().all(link));
        assert!(!makes_git_run_programs(&entry(".git", EntryKind::Directory)));
        assert!(makes_git_run_programs(&entry(".git/hooks", EntryKind::Directory)));
    }

    #[test]
    fn configured_paths_are_parsed() {
        let configuration = "[core]\n\tbare = false\n\thooksPath = ./.husky/_\n[include] path = ../.gitconfig\n\
            [includeIf \"gitdir:~/x\"]\n path = \"more\"\n[core] hooksPath=/abs\n[other]\n path = no\n";
        let named: Vec<_> = configured_paths(configuration);
        assert_eq!(named, [&b".husky/_"[..], b".gitconfig", b".git/more"].map(<[u8]>::to_vec));
        assert!(is_below(b".husky/_/pre-commit", b".husky/_") && is_below(b".husky/_", b".husky/_"));
        assert!(!is_below(b".husky/_x", b".husky/_"));
    }
}
