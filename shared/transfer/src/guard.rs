//! What of a foreign tree is not written into a caller's directory unless the caller asks for it.
//!
//! The command line calls this between the manifest that a worker sends and everything that writes: what is dropped here
//! is in no manifest that a writer or a merge sees.
//!
//! | Dropped | Unless |
//! |---|---|
//! | what makes git run programs: hooks, configuration and what leads git to another one; configuration of Mercurial and jj | [`Allowed::git_programs`] |
//! | setuid and setgid bits, file capabilities, device nodes, `.gantryignore` | [`Allowed::special`] |
//!
//! Invariant: what the directory has already, down to the bytes and the mode, is never dropped. So a directory that was
//! sent to a worker and comes back unchanged stays as it is.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use domain::Digest;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, StatxAttributes, StatxFlags, fstat, openat, readlinkat,
    statat, statx,
};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::manifest::{DeviceKind, Entry, EntryKind, InvalidManifest, MAX_EXTENT_BYTES, Manifest, split};
use crate::read::fill;
use crate::subtree::Subtree;
use crate::xattrs;

/// The extended attribute that holds the capabilities of a file.
const CAPABILITY: &[u8] = b"security.capability";
const SETID: u32 = 0o6000;
/// Most bytes that are read of a configuration of git.
const CONFIGURATION: u64 = 1 << 20;

/// What the caller asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Allowed {
    /// What makes git run programs.
    pub git_programs: bool,
    /// Setuid and setgid bits, file capabilities, device nodes, and rules of what is not uploaded.
    pub special: bool,
}

/// A tree without what the caller's directory does not take.
#[derive(Debug)]
pub struct Guarded {
    /// The rest, with the way back to the ordinals of the whole tree.
    pub tree: Subtree,
    /// What was dropped, in the order of paths.
    pub dropped: Vec<Dropped>,
}

/// Something that was dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// The entry, relative to the root.
    pub path: PathBuf,
    /// What of it.
    pub what: DroppedKind,
    /// Whether the directory has something else there, which stays.
    pub is_other_there: bool,
}

/// What was dropped of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DroppedKind {
    /// All of it: it makes git run programs.
    GitProgram,
    /// All of it: it says what the next upload of the directory leaves out.
    IgnoreRules,
    /// All of it: it is a device node.
    Device,
    /// Its setuid or setgid bit.
    SetId,
    /// Its capabilities.
    Capability,
}

/// Drops what `target` does not take of the tree that `manifest` describes. A target that is not there has nothing.
///
/// # Errors
///
/// None that the whole tree would not have had.
pub fn guard(target: &Path, manifest: &Manifest, allowed: Allowed) -> Result<Guarded, InvalidManifest> {
    let mut there = There::new(Cursor::through(target).ok(), manifest);
    let mut dropped = Vec::new();
    // Entries that are left out, and those that become others.
    let mut changed: HashMap<usize, Option<Entry>> = HashMap::new();
    let mut judge = Judge::new(manifest, &mut there, allowed);
    for (index, entry) in manifest.entries().iter().enumerate() {
        let whole = judge.drops(entry, &mut there);
        let has_rights = !allowed.special && has_rights(entry);
        if whole.is_none() && !has_rights {
            continue;
        }
        if there.has(entry) {
            continue;
        }
        let mut drop = |what| {
            let is_other_there = there.is_anything_at(&entry.path);
            dropped.push(Dropped { path: entry.path().to_owned(), what, is_other_there });
        };
        if let Some(what) = whole {
            // Of a directory, what is in it is named.
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
        // A file of which the first link is left out is placed at another one.
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

/// The entries of a tree that only a caller who asks for it writes or removes: what programs run, and rules of what is not uploaded.
pub(crate) fn protected(manifest: &Manifest, allowed: Allowed) -> Vec<&Entry> {
    let mut there = There::new(None, manifest);
    let mut judge = Judge::new(manifest, &mut there, allowed);
    let mut protected = Vec::new();
    for entry in manifest.entries() {
        let drops = judge.drops(entry, &mut there);
        if matches!(drops, Some(DroppedKind::GitProgram | DroppedKind::IgnoreRules)) {
            protected.push(entry);
        }
    }
    protected
}

/// Decides which entries are dropped as a whole.
struct Judge<'a> {
    allowed: Allowed,
    repositories: Repositories<'a>,
    /// Paths that the configuration of git in the target names.
    named: Vec<Vec<u8>>,
}

impl<'a> Judge<'a> {
    fn new(manifest: &'a Manifest, there: &mut There<'_>, allowed: Allowed) -> Self {
        Self { allowed, repositories: Repositories::of(manifest), named: there.named_by_git() }
    }

    fn drops(&mut self, entry: &'a Entry, there: &mut There<'_>) -> Option<DroppedKind> {
        let is_program = !self.allowed.git_programs
            && (makes_git_run(entry)
                || makes_others_run(entry)
                || self.named.iter().any(|path| is_below(&entry.path, path))
                || self.repositories.has_program(entry, there));
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

/// Whether who runs a file, or makes something in a directory, gets the rights of another.
fn has_rights(entry: &Entry) -> bool {
    entry.mode & SETID != 0 || entry.xattrs.iter().any(|xattr| xattr.name == CAPABILITY)
}

fn without_rights(entry: &Entry) -> Entry {
    let mut entry = Entry { mode: entry.mode & !SETID, ..entry.clone() };
    entry.xattrs.retain(|xattr| xattr.name != CAPABILITY);
    entry
}

/// Something that every repository has: its HEAD.
const HEAD: u8 = 1;
/// Something that every repository has besides: objects, references, or where these are.
const STORE: u8 = 2;
/// Both of them. Git takes a directory for a repository that has the parts of one, and reads its configuration whenever it is called there.
const REPOSITORY: u8 = HEAD | STORE;
/// Something that decides which programs git runs.
const PROGRAM: u8 = 4;

/// Repositories that are not called `.git`. The tree and the target may each have some of the parts of one.
struct Repositories<'a> {
    /// What directories of the tree have.
    tree: HashMap<&'a [u8], u8>,
    /// What the same directories of the target have, where that was looked at.
    target: HashMap<&'a [u8], u8>,
}

impl<'a> Repositories<'a> {
    fn of(manifest: &'a Manifest) -> Self {
        let mut tree: HashMap<&[u8], u8> = HashMap::new();
        for entry in manifest.entries() {
            let (parent, name) = split(&entry.path);
            *tree.entry(parent).or_default() |= part(name);
        }
        Self { tree, target: HashMap::new() }
    }

    /// Whether git would run programs because of an entry: it is one of those that decide which, in a repository, or it makes a repository
    /// of a directory of the target that has one of those.
    fn has_program(&mut self, entry: &'a Entry, there: &mut There<'_>) -> bool {
        let mut start = 0;
        for name in entry.path.split(|byte| *byte == b'/') {
            let part = part(name);
            if part != 0 {
                let directory = &entry.path[..start.max(1) - 1];
                let tree = self.tree.get(directory).copied().unwrap_or(0);
                let target = *self.target.entry(directory).or_insert_with(|| there.parts(directory));
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

/// What a directory with that name in it has.
fn part(name: &[u8]) -> u8 {
    let part = match &plain(name)[..] {
        b"head" => HEAD,
        b"objects" | b"refs" | b"commondir" => STORE,
        _ => 0,
    };
    if is_program(name) { part | PROGRAM } else { part }
}

/// Whether an entry is a `.gantryignore`, or takes the place of one.
fn is_ignore_rule(entry: &Entry) -> bool {
    entry.path.split(|byte| *byte == b'/').any(|name| plain(name)[..] == b".gantryignore"[..])
}

/// Whether an entry may make git run programs that it names, or read a configuration that does, below a directory called `.git`.
fn makes_git_run(entry: &Entry) -> bool {
    let names: Vec<&[u8]> = entry.path.split(|byte| *byte == b'/').collect();
    names.iter().enumerate().filter(|(_, name)| is_git(name)).any(|(at, _)| {
        let inside = &names[at + 1..];
        let is_inner =
            inside.first().is_some_and(|first| matches!(&plain(first)[..], b"modules" | b"worktrees"));
        match inside {
            // A file or a link there leads git to another directory.
            [] => !entry.is_directory(),
            // Repositories of submodules, whose names may have slashes, and of further working trees.
            _ if is_inner => {
                inside.iter().any(|name| is_program(name)) || matches!(entry.kind, EntryKind::Symlink { .. })
            }
            [first, ..] => is_program(first),
        }
    })
}

/// Whether an entry makes Mercurial or jj run programs.
fn makes_others_run(entry: &Entry) -> bool {
    let names: Vec<_> = entry.path.split(|byte| *byte == b'/').map(plain).collect();
    names.iter().enumerate().any(|(at, name)| match (&name[..], &names[at + 1..]) {
        (b".hg", [first, ..]) => matches!(&first[..], b"hgrc" | b"hgrc-not-shared" | b"sharedpath"),
        (b".jj", [first, second, ..]) => matches!((&first[..], &second[..]), (b"repo", b"config.toml")),
        (b".jj", [first]) => first[..] == b"repo"[..] && !entry.is_directory(),
        (b".hg", []) => !entry.is_directory(),
        _ => false,
    })
}

/// Whether a path is another one, or in the directory of that name.
fn is_below(path: &[u8], other: &[u8]) -> bool {
    path.strip_prefix(other).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// The paths that a configuration of git names for hooks and further configuration, relative to the top of the working tree. Hooks are looked for from
/// there, and configuration from the directory of the file, which is `.git`.
fn named_by_git(configuration: &str) -> Vec<Vec<u8>> {
    let mut section = String::new();
    let mut named = Vec::new();
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
                // Not in this directory.
                Component::RootDir => path = PathBuf::from("/"),
                Component::CurDir | Component::Prefix(_) => {}
            }
        }
        if path.is_relative() && path != Path::new("") {
            named.push(path.into_os_string().into_vec());
        }
    }
    named
}

/// Whether a name is that of the directory of a repository.
fn is_git(name: &[u8]) -> bool {
    name.len() >= 4 && matches!(&plain(name)[..], b".git" | b"git~1")
}

/// Whether a name in the directory of a repository is one of those that decide which programs git runs.
fn is_program(name: &[u8]) -> bool {
    // A rebase or a cherry-pick that was begun goes on with the commands and the strategy in its directory. `commondir`
    // names another directory to read all of this from.
    matches!(
        &plain(name)[..],
        b"hooks"
            | b"config"
            | b"config.worktree"
            | b"commondir"
            | b"rebase-merge"
            | b"rebase-apply"
            | b"sequencer"
    )
}

/// A name as file systems compare it that know no case, or leave out what cannot be seen.
fn plain(name: &[u8]) -> Cow<'_, [u8]> {
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

/// What the target has.
pub(crate) struct There<'a> {
    cursor: Option<Cursor>,
    manifest: &'a Manifest,
}

impl<'a> There<'a> {
    /// The directory of `cursor`, as it is compared with `manifest`. `None`: there is no directory.
    pub(crate) fn new(cursor: Option<Cursor>, manifest: &'a Manifest) -> Self {
        Self { cursor, manifest }
    }

    fn is_anything_at(&mut self, path: &[u8]) -> bool {
        self.stat(path).is_some()
    }

    /// The paths that the configuration of its repository names.
    fn named_by_git(&mut self) -> Vec<Vec<u8>> {
        let read = |directory: &OwnedFd| {
            let flags =
                OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            let opened = openat(directory, "config", flags, Mode::empty()).ok()?;
            let mut text = Vec::new();
            std::fs::File::from(opened).take(CONFIGURATION).read_to_end(&mut text).ok()?;
            Some(named_by_git(&String::from_utf8_lossy(&text)))
        };
        let directory = self.cursor.as_mut().and_then(|cursor| cursor.go(b".git").ok());
        directory.and_then(|directory| read(&directory)).unwrap_or_default()
    }

    /// What a directory has of a repository.
    fn parts(&mut self, directory: &[u8]) -> u8 {
        let names = ["HEAD", "objects", "refs", "commondir", "config", "config.worktree", "hooks"];
        let separator = if directory.is_empty() { &b""[..] } else { b"/" };
        let has = |name: &&str| self.is_anything_at(&[directory, name.as_bytes()].join(separator));
        names.into_iter().filter(has).fold(0, |found, name| found | part(name.as_bytes()))
    }

    pub(crate) fn stat(&mut self, path: &[u8]) -> Option<Stat> {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut()?.go(parent).ok()?;
        let name = if name.is_empty() { b"." } else { name };
        statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// Whether something is mounted at a path.
    pub(crate) fn is_mounted(&mut self, path: &[u8]) -> bool {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut().and_then(|cursor| cursor.go(parent).ok());
        directory.is_some_and(|directory| {
            let found = statx(&directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE);
            found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        })
    }

    /// Whether the target has the very same at the path of an entry: the kind, the mode and the content. Of a directory, its
    /// mode as far as setuid and setgid go.
    pub(crate) fn has(&mut self, entry: &Entry) -> bool {
        self.compare(entry).unwrap_or(false)
    }

    /// Whether the target has at a path the very same as the tree.
    pub(crate) fn has_at(&mut self, path: &[u8]) -> bool {
        let manifest = self.manifest;
        manifest.find(path).is_some_and(|index| self.has(&manifest.entries()[index]))
    }

    fn compare(&mut self, entry: &Entry) -> Option<bool> {
        let stat = self.stat(&entry.path)?;
        let mode = Mode::from_raw_mode(stat.st_mode).as_raw_mode();
        let found = FileType::from_raw_mode(stat.st_mode);
        // Of a link, its file is what counts.
        let file = match &entry.kind {
            EntryKind::HardLink { to } => &self.manifest.entries()[self.manifest.find(to)?],
            _ => entry,
        };
        Some(match &file.kind {
            EntryKind::Directory => found == FileType::Directory && mode & SETID == file.mode & SETID,
            EntryKind::File { .. } => {
                found == FileType::RegularFile && mode == file.mode && self.has_content(&entry.path, file)?
            }
            EntryKind::Symlink { target } => {
                found == FileType::Symlink && self.link_at(&entry.path)?.as_slice() == &target[..]
            }
            EntryKind::Device { kind, major, minor } => {
                let node = match kind {
                    DeviceKind::Character => FileType::CharacterDevice,
                    DeviceKind::Block => FileType::BlockDevice,
                };
                found == node && stat.st_rdev == rustix::fs::makedev(*major, *minor)
            }
            EntryKind::Fifo => found == FileType::Fifo,
            EntryKind::HardLink { .. } => false,
        })
    }

    fn link_at(&mut self, path: &[u8]) -> Option<Vec<u8>> {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut()?.go(parent).ok()?;
        Some(readlinkat(&directory, name, Vec::new()).ok()?.into_bytes())
    }

    fn has_content(&mut self, path: &[u8], file: &Entry) -> Option<bool> {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut()?.go(parent).ok()?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = openat(&directory, name, flags, Mode::empty()).ok()?;
        let EntryKind::File { size_bytes, .. } = &file.kind else { return None };
        if fstat(&opened).ok()?.st_size.cast_unsigned() != *size_bytes {
            return Some(false);
        }
        let capability = |xattrs: &[crate::Xattr]| {
            xattrs.iter().find(|xattr| xattr.name == CAPABILITY).map(|xattr| xattr.value.clone())
        };
        if capability(&xattrs::read(&opened, true).ok()?) != capability(&file.xattrs) {
            return Some(false);
        }
        Some(is_content(&opened, *size_bytes, file))
    }
}

/// Whether a file holds the extents of an entry, and zeroes elsewhere.
fn is_content(opened: &OwnedFd, size_bytes: u64, file: &Entry) -> bool {
    let mut buffer = vec![0; MAX_EXTENT_BYTES as usize];
    let mut at = 0;
    let mut zeroes = vec![0; 64 << 10];
    let mut is_zero_until = |end: u64, at: &mut u64| {
        while *at < end {
            // A hole may be larger than can be read in a day.
            match rustix::fs::seek(opened, SeekFrom::Data(*at)) {
                Ok(data) => *at = data,
                Err(Errno::NXIO) => return true,
                Err(_) => return false,
            }
            if *at >= end {
                return true;
            }
            let length = usize::try_from(end - *at).unwrap_or(usize::MAX).min(zeroes.len());
            let piece = &mut zeroes[..length];
            if !fill(opened, piece, *at).is_ok_and(|read| read == length)
                || piece.iter().any(|byte| *byte != 0)
            {
                return false;
            }
            *at += length as u64;
        }
        true
    };
    for extent in file.extents() {
        let data = &mut buffer[..extent.length as usize];
        let is_same = is_zero_until(extent.offset, &mut at)
            && fill(opened, data, extent.offset).is_ok_and(|read| read == data.len())
            && Digest(*blake3::hash(data).as_bytes()) == extent.digest;
        if !is_same {
            return false;
        }
        at = extent.offset + u64::from(extent.length);
    }
    is_zero_until(size_bytes, &mut at)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use tempfile::TempDir;

    use super::*;
    use crate::manifest::{Limits, Xattr};
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

    #[test]
    fn git_programs_are_known_by_their_paths() {
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
            assert!(makes_git_run(&file(path)), "{path}");
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
            assert!(!makes_git_run(&file(path)), "{path}");
        }
        let link = |path| makes_git_run(&entry(path, EntryKind::Symlink { target: b"x".to_vec() }));
        assert!([".git", ".git/hooks", ".git/modules", ".git/modules/a"].into_iter().all(link));
        assert!(!makes_git_run(&entry(".git", EntryKind::Directory)));
        assert!(makes_git_run(&entry(".git/hooks", EntryKind::Directory)));
    }

    /// A directory with a repository that has a hook and a configuration.
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
    fn repository_is_known_by_its_parts() {
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
        let (left, said) = guarded(empty.path(), &manifest(result.path()));
        let dropped: Vec<_> = said.iter().map(|dropped| dropped.path.display().to_string()).collect();
        assert_eq!(dropped, ["config", "deep/commondir", "deep/config", "hooks/post-checkout"]);
        assert!(left.contains(&"plain/config".to_owned()) && left.contains(&"plain/hooks/x".to_owned()));

        // The target has the other parts.
        let (target, few) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        write(target.path(), "HEAD");
        write(target.path(), "objects/x");
        write(few.path(), "hooks/post-merge");
        write(few.path(), "file");
        let (left, said) = guarded(target.path(), &manifest(few.path()));
        assert_eq!((left, said.len()), (vec![String::new(), "file".to_owned()], 1));

        // The target has what decides about programs, from an earlier result, and this one brings what is missing.
        let planted = tempfile::tempdir().expect("a directory");
        write(planted.path(), "config");
        for (first, then) in [("objects/x", "HEAD"), ("HEAD", "objects/x")] {
            let target = tempfile::tempdir().expect("a directory");
            write(target.path(), "config");
            assert_eq!(guarded(target.path(), &manifest(planted.path())).1, [], "a file of that name alone");
            write(target.path(), first);
            let rest = tempfile::tempdir().expect("a directory");
            write(rest.path(), then);
            let (left, said) = guarded(target.path(), &manifest(rest.path()));
            assert_eq!((left.len(), said.len()), (1, 1), "{then}: {left:?}, {said:?}");
            // A repository of the caller stays one: what it has there decides about its programs.
            write(target.path(), then);
            fs::write(rest.path().join(then), "new").expect("written");
            let (left, said) = guarded(target.path(), &manifest(rest.path()));
            assert!(left.contains(&then.to_owned()) && said.is_empty(), "{left:?}, {said:?}");
        }
    }

    #[test]
    fn paths_that_the_configuration_names_are_known() {
        let configuration = "[core]\n\tbare = false\n\thooksPath = ./.husky/_\n[include] path = ../.gitconfig\n\
            [includeIf \"gitdir:~/x\"]\n path = \"more\"\n[core] hooksPath=/abs\n[other]\n path = no\n";
        let named: Vec<_> = named_by_git(configuration);
        assert_eq!(named, [&b".husky/_"[..], b".gitconfig", b".git/more"].map(<[u8]>::to_vec));
        assert!(is_below(b".husky/_/pre-commit", b".husky/_") && is_below(b".husky/_", b".husky/_"));
        assert!(!is_below(b".husky/_x", b".husky/_"));

        let target = repository("mine");
        fs::write(target.path().join(".git/config"), "[core]\nhooksPath = .hooks").expect("written");
        let result = tempfile::tempdir().expect("a directory");
        for path in [".hooks/pre-commit", ".hg/hgrc", ".jj/repo/config.toml", "plain"] {
            let at = result.path().join(path);
            fs::create_dir_all(at.parent().expect("a directory")).expect("made");
            fs::write(at, "evil").expect("written");
        }
        let (_, said) = guarded(target.path(), &manifest(result.path()));
        let dropped: Vec<_> = said.iter().map(|dropped| dropped.path.display().to_string()).collect();
        assert_eq!(dropped, [".hg/hgrc", ".hooks/pre-commit", ".jj/repo/config.toml"]);
    }

    #[test]
    fn ignore_rules_are_dropped_unless_they_are_there() {
        let write = |root: &Path, text: &str| fs::write(root.join(".gantryignore"), text).expect("written");
        let (result, target) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another"));
        write(result.path(), "");
        for is_other_there in [false, true] {
            let (left, said) = guarded(target.path(), &manifest(result.path()));
            let dropped =
                Dropped { path: ".gantryignore".into(), what: DroppedKind::IgnoreRules, is_other_there };
            assert_eq!((left, said), (vec![String::new()], vec![dropped]));
            write(target.path(), "secret.env");
        }
        write(result.path(), "secret.env");
        assert_eq!(guarded(target.path(), &manifest(result.path())).1, []);
    }

    #[test]
    fn git_programs_are_dropped_unless_they_are_there() {
        let result = repository("evil");
        let tree = manifest(result.path());
        let dropped = |path: &str, is_other_there| Dropped {
            path: path.into(),
            what: DroppedKind::GitProgram,
            is_other_there,
        };
        let empty = tempfile::tempdir().expect("a directory");
        for target in [empty.path(), &empty.path().join("not there")] {
            let (left, said) = guarded(target, &tree);
            assert_eq!(left, ["", ".git", ".git/HEAD"]);
            assert_eq!(said, [dropped(".git/config", false), dropped(".git/hooks/post-checkout", false)]);
        }
        let (left, said) = guarded(repository("mine").path(), &tree);
        assert_eq!(left, ["", ".git", ".git/HEAD", ".git/config", ".git/hooks"]);
        assert_eq!(said, [dropped(".git/hooks/post-checkout", true)]);
        let same = repository("evil");
        assert_eq!(guarded(same.path(), &tree), guarded(result.path(), &tree));
        assert_eq!(guarded(same.path(), &tree).1, []);
        let hook = same.path().join(".git/hooks/post-checkout");
        fs::set_permissions(hook, fs::Permissions::from_mode(0o644)).expect("set");
        assert_eq!(
            guarded(same.path(), &tree).1,
            [dropped(".git/hooks/post-checkout", true)],
            "it did not run"
        );

        let asked = Allowed { git_programs: true, ..Allowed::default() };
        let asked = guard(empty.path(), &tree, asked).expect("valid");
        assert_eq!((asked.tree.manifest().tree_digest(), asked.dropped), (tree.tree_digest(), vec![]));
    }

    #[test]
    fn link_to_a_dropped_file_becomes_that_file() {
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
    fn rights_of_others_and_devices_are_dropped() {
        let mut setuid = Entry { mode: 0o4755, ..file("setuid") };
        setuid.xattrs = vec![Xattr { name: CAPABILITY.to_vec(), value: vec![1; 20] }];
        let device = EntryKind::Device { kind: DeviceKind::Character, major: 1, minor: 3 };
        let directory = Entry { mode: 0o2755, ..entry("group", EntryKind::Directory) };
        let entries = [entry("", EntryKind::Directory), entry("device", device), directory, setuid];
        let tree = Manifest::new(entries, Limits::default()).expect("valid");

        let target = tempfile::tempdir().expect("a directory");
        let all = guard(target.path(), &tree, Allowed::default()).expect("valid");
        let said = |guarded: &Guarded| {
            let dropped = guarded.dropped.iter();
            dropped.map(|dropped| (dropped.path.display().to_string(), dropped.what)).collect::<Vec<_>>()
        };
        let of = |path: &str, what| (path.to_owned(), what);
        let rights = [of("setuid", DroppedKind::SetId), of("setuid", DroppedKind::Capability)];
        let first = [of("device", DroppedKind::Device), of("group", DroppedKind::SetId)];
        assert_eq!(said(&all), [&first[..], &rights[..]].concat());
        let left = all.tree.manifest().entries();
        assert_eq!(left.len(), 3);
        assert!(left.iter().all(|entry| !has_rights(entry)));

        // A directory of a group stays one.
        fs::create_dir(target.path().join("group")).expect("made");
        fs::set_permissions(target.path().join("group"), fs::Permissions::from_mode(0o2755)).expect("set");
        let again = guard(target.path(), &tree, Allowed::default()).expect("valid");
        assert_eq!(said(&again), [&first[..1], &rights[..]].concat());
        let asked = Allowed { special: true, ..Allowed::default() };
        let asked = guard(target.path(), &tree, asked).expect("valid");
        assert_eq!((asked.tree.manifest().tree_digest(), asked.dropped), (tree.tree_digest(), vec![]));
    }
}
