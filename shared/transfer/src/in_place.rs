//! Results in place: the return of a tree to the directory that it was sent from.
//!
//! The command line compares three trees: the *base*, which was sent; the *result*; and the
//! *target* at the arrival of the result.
//!
//! | Command | Target since then | Merge |
//! |---|---|---|
//! | unchanged | any | keeps the target |
//! | changed | unchanged | takes the result |
//! | changed | changed to the same | keeps the target |
//! | changed | changed differently, or removed | keeps both: the result is placed beside, see [`MergeSummary::conflicts`](crate::MergeSummary) |
//! | changed only mode or times | removed | keeps the target |
//! | removed | unchanged | [`remove_gone`] removes the entry |
//! | removed | changed | keeps the target |
//!
//! Entries that the command removed are removed in the target, because the absence of a file can
//! have a meaning. Examples are a loose git reference whose value is packed now, and the log of a
//! database that was written back. Two kinds of removed entries stay: entries that may have been
//! moved to a dropped path, and entries of a repository whose references changed in the target.
//!
//! A SQLite database and its logs (`X`, `X-wal`, `X-journal`) are one unit. If one of them changed
//! in the target, all of the result are placed beside. Otherwise SQLite would replay a log on the
//! wrong database.
//!
//! Invariant: an entry of the target that differs from what was sent is neither overwritten nor
//! removed. The fingerprint of a file is compared again right before the change, so that later
//! changes are detected.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, Stat, statat, unlinkat};
use rustix::io::Errno;

use crate::cache::Fingerprint;
use crate::dirs::{Cursor, list};
use crate::entry::{Entry, EntryKind, as_path, split};
use crate::guard::{Allowed, Dropped, DroppedKind, protected};
use crate::manifest::{InvalidManifest, Manifest};
use crate::subtree::Subtree;
use crate::target::TargetTree;

/// Returns the entries of `result` that the command created or changed, with their parent
/// directories.
///
/// Owners are ignored, because neither sent nor written directories keep them. The mtime of a
/// directory is ignored, because it only tells that a name in it has changed.
///
/// # Errors
///
/// Fails only if the whole tree would violate a rule, too.
pub fn changes(base: &Manifest, result: &Manifest) -> Result<Subtree, InvalidManifest> {
    let entries = result.entries();
    let mut is_taken: Vec<bool> = entries.iter().map(|entry| !is_unchanged(base, result, entry)).collect();
    for index in (1..entries.len()).rev() {
        if is_taken[index]
            && let Some(parent) = result.find(split(&entries[index].path).0)
        {
            is_taken[parent] = true;
        }
    }
    is_taken[0] = true;
    result.select(|entry| {
        let is_taken = result.find(&entry.path).is_some_and(|index| is_taken[index]);
        is_taken.then(|| entry.clone())
    })
}

/// Whether `base` has the same entry at the path of an entry of `tree`.
fn is_unchanged(base: &Manifest, tree: &Manifest, entry: &Entry) -> bool {
    let Some(before) = base.find(&entry.path) else { return false };
    let (Some(before), Some(now)) = (file_of(base, &base.entries()[before]), file_of(tree, entry)) else {
        return false;
    };
    let times = |entry: &Entry| (!entry.is_directory()).then_some((entry.mtime_seconds, entry.mtime_nanos));
    before.kind == now.kind
        && before.mode == now.mode
        && before.xattrs == now.xattrs
        && times(before) == times(now)
}

/// Returns the entry with the content: the file of a hard link, or the entry.
fn file_of<'a>(manifest: &'a Manifest, entry: &'a Entry) -> Option<&'a Entry> {
    match &entry.kind {
        EntryKind::HardLink { to } => Some(&manifest.entries()[manifest.find(to)?]),
        _ => Some(entry),
    }
}

/// A result that was placed beside a changed entry of the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Path of the changed entry, relative to the target.
    pub path: PathBuf,
    /// Path of the result, relative to the target. `None` if the result was not written, because
    /// the target had its content before.
    pub result: Option<PathBuf>,
}

/// The state of a target at the paths of a result.
#[derive(Debug, Default)]
pub struct Standing {
    states: BTreeMap<usize, TargetState>,
    /// Directories that keep their metadata.
    directories: BTreeSet<usize>,
    /// Entries of the base that are removed, with their fingerprints. A directory has none, and is
    /// removed when it is empty.
    removals: Vec<(usize, Option<Fingerprint>)>,
    gone: Gone,
    /// The first removed entry that is a mount point.
    mounted: Option<PathBuf>,
    /// Path of the target.
    target: PathBuf,
    /// Contents of directories that other entries replace.
    contents: BTreeMap<usize, Contents>,
}

/// The paths in a directory, with their fingerprints.
type Contents = BTreeMap<Vec<u8>, Fingerprint>;

/// The state of the target at the path of an entry.
#[derive(Debug, Clone, Copy)]
enum TargetState {
    /// The entry as it was sent, or nothing if nothing was sent.
    AsSent(Option<Fingerprint>),
    /// The entry of the result.
    AsResult,
    /// The entry was changed or removed since it was sent.
    Changed,
    /// The entry was removed, and the command did not change its content.
    Removed,
}

/// The action of a merge at the path of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The result replaces the entry of the target.
    Take,
    /// The target stays.
    Leave,
    /// Both stay. The result is placed beside.
    PutBeside,
}

impl Standing {
    /// Compares `target` with the sent tree `base`.
    ///
    /// `result` has the changes that will be written. `whole` is the complete result, and `dropped`
    /// lists the entries of it that are not written.
    #[must_use]
    pub fn of(
        target: &Path,
        base: &Manifest,
        result: &Manifest,
        whole: &Manifest,
        dropped: &[Dropped],
        allowed: Allowed,
    ) -> Self {
        let mut standing = Self { target: target.to_owned(), ..Self::default() };
        let cursor = || Cursor::through(target).ok();
        let mut trees = TargetTrees {
            sent: TargetTree::new(cursor(), base),
            result: TargetTree::new(cursor(), result),
            cursor: Cursor::new(target).ok(),
        };
        for (index, entry) in result.entries().iter().enumerate() {
            let found = trees.sent.stat(&entry.path);
            let is_directory = found.as_ref().is_some_and(is_directory);
            if entry.is_directory() && (is_directory || entry.path.is_empty()) {
                let before = base.find(&entry.path).map(|index| &base.entries()[index]);
                let is_mode = |entry: &&Entry| found.as_ref().is_some_and(|found| mode(found) == entry.mode);
                // The directory gets the metadata of the result if only the command has changed it.
                if !before.is_some_and(|before| !is_unchanged(base, result, entry) && is_mode(&before)) {
                    standing.directories.insert(index);
                }
                continue;
            }
            if is_directory {
                // This comes before the comparison, so that a change during the comparison is
                // detected later.
                standing.contents.insert(index, contents(target, &entry.path).unwrap_or_default());
            }
            let compared = match found {
                None => compare_missing(base, result, entry),
                Some(_) => trees.compare(entry, found.as_ref()),
            };
            let is_taken = matches!(compared, TargetState::AsSent(_));
            let compared = match is_taken && trees.has_changed_database(base, whole, &entry.path) {
                true => TargetState::Changed,
                false => compared,
            };
            standing.states.insert(index, compared);
        }
        standing.restore_needed_directories(result);
        standing.plan_removals(&mut trees, base, whole, &DroppedEntries::of(whole, dropped), allowed);
        standing
    }

    /// Restores removed directories that are the parents of written entries.
    fn restore_needed_directories(&mut self, result: &Manifest) {
        for (index, entry) in result.entries().iter().enumerate().skip(1).rev() {
            if matches!(self.states.get(&index), Some(TargetState::Removed)) {
                continue;
            }
            let parent = result.find(split(&entry.path).0);
            if let Some(TargetState::Removed) = parent.and_then(|parent| self.states.get(&parent))
                && let Some(parent) = parent
            {
                self.states.insert(parent, TargetState::AsSent(None));
            }
        }
    }

    /// Finds the sent entries that are not in the result and must be removed.
    fn plan_removals(
        &mut self,
        trees: &mut TargetTrees<'_>,
        base: &Manifest,
        whole: &Manifest,
        dropped_entries: &DroppedEntries<'_>,
        allowed: Allowed,
    ) {
        let is_gone = |entry: &Entry| whole.find(&entry.path).is_none();
        if !base.entries().iter().any(is_gone) {
            return;
        }
        let protected: BTreeSet<&[u8]> =
            protected(base, allowed).into_iter().map(|entry| entry.path.as_slice()).collect();
        let mut repositories: BTreeMap<&[u8], Repository> = BTreeMap::new();
        for (index, entry) in base.entries().iter().enumerate().filter(|(_, entry)| is_gone(entry)) {
            let Some(found) = trees.sent.stat(&entry.path) else { continue };
            let path = || entry.path().to_owned();
            if protected.contains(entry.path.as_slice()) || dropped_entries.may_contain(base, entry) {
                // For a directory, the report names its contents.
                if !entry.is_directory() {
                    self.gone.protected.push(path());
                }
                continue;
            }
            if let Some(git) = repository_of(base, &entry.path) {
                let repository =
                    repositories.entry(git).or_insert_with(|| trees.repository(base, whole, git));
                let is_in = |name: &[u8]| is_at_or_below(&entry.path[git.len()..], name);
                if is_in(b"/objects") && !(repository.has_references && repository.has_index) {
                    // Unneeded objects do no harm.
                    continue;
                }
                let is_packed = is_in(b"/refs") && repository.has_packed_references;
                if !repository.has_references && !is_packed {
                    if !entry.is_directory() {
                        self.gone.changed.push(path());
                    }
                    continue;
                }
            }
            if trees.has_changed_database(base, whole, &entry.path) {
                self.gone.changed.push(path());
                continue;
            }
            let is_there = is_directory(&found);
            if entry.is_directory() != is_there || !(is_there || trees.sent.has_entry(entry)) {
                self.gone.changed.push(path());
                continue;
            }
            if self.mounted.is_none() && trees.sent.is_mounted(&entry.path) {
                self.mounted = Some(path());
            }
            self.removals.push((index, (!is_there).then(|| Fingerprint::of(&found))));
        }
    }

    /// Whether a directory keeps its mode, times and attributes.
    pub(crate) fn keeps_directory(&self, index: usize) -> bool {
        self.directories.contains(&index)
    }

    /// Whether the contents of a replaced directory are unchanged since the comparison.
    pub(crate) fn has_same_contents(&self, index: usize, path: &[u8]) -> bool {
        self.contents
            .get(&index)
            .is_some_and(|found| contents(&self.target, path).is_ok_and(|now| now == *found))
    }

    /// Returns the first removed entry that is a mount point.
    pub(crate) fn mounted(&self) -> Option<&Path> {
        self.mounted.as_deref()
    }

    /// Whether an entry was removed in the target and stays removed.
    pub(crate) fn stays_removed(&self, index: usize) -> bool {
        matches!(self.states.get(&index), Some(TargetState::Removed))
    }

    /// Whether the merge replaces or removes an entry of the target.
    #[must_use]
    pub fn replaces(&self) -> bool {
        let is_replaced = |found: &TargetState| matches!(found, TargetState::AsSent(Some(_)));
        !self.removals.is_empty() || self.states.values().any(is_replaced)
    }

    /// Returns the action at the path of an entry, whose current stat in the target is `now`.
    pub(crate) fn verdict(&self, index: usize, now: Option<&Stat>) -> Verdict {
        match self.states.get(&index) {
            Some(TargetState::AsSent(None)) if now.is_none() => Verdict::Take,
            Some(TargetState::AsSent(Some(found)))
                if now.is_some_and(|now| Fingerprint::of(now).is_still(found)) =>
            {
                Verdict::Take
            }
            Some(TargetState::AsResult | TargetState::Removed) => Verdict::Leave,
            // The path was a directory at the comparison, and still is.
            None if now.is_none_or(is_directory) => Verdict::Take,
            Some(TargetState::AsSent(_) | TargetState::Changed) | None => Verdict::PutBeside,
        }
    }
}

/// Returns the contents of a directory in a target.
fn contents(target: &Path, directory: &[u8]) -> io::Result<Contents> {
    let mut cursor = Cursor::new(target)?;
    let mut buffer = Vec::new();
    let mut contents = Contents::new();
    let mut rest = vec![directory.to_vec()];
    while let Some(path) = rest.pop() {
        let opened = cursor.go(&path)?;
        for name in list(&opened, &mut buffer, |_| true)? {
            let stat = statat(&opened, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW)?;
            let path = [&path[..], &name].join(&b'/');
            if is_directory(&stat) {
                rest.push(path.clone());
            }
            contents.insert(path, Fingerprint::of(&stat));
        }
    }
    Ok(contents)
}

/// A target that is compared with the sent tree and with the result.
struct TargetTrees<'a> {
    sent: TargetTree<'a>,
    result: TargetTree<'a>,
    /// Cursor for listing directories.
    cursor: Option<Cursor>,
}

/// Returns the state of a path of `result` that does not exist in the target.
fn compare_missing(base: &Manifest, result: &Manifest, entry: &Entry) -> TargetState {
    let Some(index) = base.find(&entry.path) else { return TargetState::AsSent(None) };
    let before = file_of(base, &base.entries()[index]).map(|file| &file.kind);
    let now = file_of(result, entry).map(|file| &file.kind);
    if before == now { TargetState::Removed } else { TargetState::Changed }
}

/// Suffixes of the logs that SQLite replays on their database.
const LOG_SUFFIXES: [&[u8]; 2] = [b"-wal", b"-journal"];

impl TargetTrees<'_> {
    /// Whether a path belongs to a SQLite database or its logs, and one of these was changed in the
    /// target.
    fn has_changed_database(&mut self, base: &Manifest, whole: &Manifest, path: &[u8]) -> bool {
        let database = LOG_SUFFIXES.into_iter().find_map(|log| path.strip_suffix(log)).unwrap_or(path);
        let logs = LOG_SUFFIXES.map(|log| [database, log].concat());
        let exists = |path: &Vec<u8>, target: &mut TargetTree<'_>| {
            base.find(path).is_some() || whole.find(path).is_some() || target.stat(path).is_some()
        };
        logs.iter().any(|log| exists(log, &mut self.sent))
            && [database].into_iter().chain(logs.iter().map(Vec::as_slice)).any(|path| {
                match (base.find(path), self.sent.stat(path)) {
                    (None, None) => false,
                    (Some(_), Some(_)) => !self.sent.has_path(path),
                    _ => true,
                }
            })
    }

    fn compare(&mut self, entry: &Entry, found: Option<&Stat>) -> TargetState {
        let Some(found) = found else { return TargetState::AsSent(None) };
        let is_as_sent = if is_directory(found) {
            self.is_directory_as_sent(&entry.path)
        } else {
            self.sent.has_path(&entry.path)
        };
        if is_as_sent {
            TargetState::AsSent(Some(Fingerprint::of(found)))
        } else if self.result.has_path(&entry.path) {
            TargetState::AsResult
        } else {
            TargetState::Changed
        }
    }

    /// Whether all contents of a directory are as they were sent.
    fn is_directory_as_sent(&mut self, path: &[u8]) -> bool {
        let mut buffer = Vec::new();
        let mut rest = vec![path.to_vec()];
        while let Some(path) = rest.pop() {
            let opened = self.cursor.as_mut().and_then(|cursor| cursor.go(&path).ok());
            let Some(names) = opened.and_then(|opened| list(&opened, &mut buffer, |_| true).ok()) else {
                return false;
            };
            for name in names {
                let path = [&path[..], &name].join(&b'/');
                if !self.sent.has_path(&path) {
                    return false;
                }
                if self.sent.stat(&path).as_ref().is_some_and(is_directory) {
                    rest.push(path);
                }
            }
        }
        true
    }
}

fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn mode(stat: &Stat) -> u32 {
    Mode::from_raw_mode(stat.st_mode).as_raw_mode()
}

/// The dropped entries of a result.
struct DroppedEntries<'a> {
    paths: BTreeSet<&'a [u8]>,
    files: Vec<&'a EntryKind>,
}

impl<'a> DroppedEntries<'a> {
    fn of(whole: &'a Manifest, dropped: &'a [Dropped]) -> Self {
        let is_whole =
            |dropped: &&Dropped| !matches!(dropped.what, DroppedKind::SetId | DroppedKind::Capability);
        let paths: BTreeSet<&[u8]> =
            dropped.iter().filter(is_whole).map(|dropped| dropped.path.as_os_str().as_bytes()).collect();
        let entries = paths.iter().filter_map(|path| Some(&whole.entries()[whole.find(path)?]));
        let files = entries.filter_map(|entry| file_of(whole, entry)).map(|entry| &entry.kind).collect();
        Self { paths, files }
    }

    /// Whether an entry of the base may have been moved to a dropped path.
    fn may_contain(&self, base: &Manifest, entry: &Entry) -> bool {
        let Some(file) = file_of(base, entry) else { return true };
        self.paths.iter().any(|path| is_at_or_below(&entry.path, path))
            || (!entry.is_directory() && self.files.contains(&&file.kind))
    }
}

fn is_at_or_below(path: &[u8], directory: &[u8]) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// The state of a git repository in the target.
struct Repository {
    /// Whether the references are as they were sent.
    has_references: bool,
    /// Whether the command packed references, and the target has neither packed others nor checked
    /// out a branch.
    has_packed_references: bool,
    /// Whether the index is as it was sent.
    has_index: bool,
}

/// Returns the innermost git directory around a path: a `.git`, that of a submodule, or a bare
/// repository.
fn repository_of<'a>(base: &Manifest, path: &'a [u8]) -> Option<&'a [u8]> {
    let is_repository = |directory: &[u8]| {
        let has = |name: &[u8]| base.find(&[directory, name].join(&b'/')).is_some();
        has(b"HEAD") && has(b"objects") && has(b"refs")
    };
    let slashes = path.iter().enumerate().rev().filter(|(_, byte)| **byte == b'/');
    slashes.map(|(end, _)| &path[..end]).find(|directory| is_repository(directory))
}

impl TargetTrees<'_> {
    fn repository(&mut self, base: &Manifest, whole: &Manifest, git: &[u8]) -> Repository {
        let path = |name: &[u8]| [git, name].join(&b'/');
        let mut is_as_sent = |name: &[u8]| {
            let path = path(name);
            match (base.find(&path), self.sent.stat(&path)) {
                (None, None) => true,
                (Some(index), Some(found)) if is_directory(&found) => {
                    base.entries()[index].is_directory() && self.is_directory_as_sent(&path) && {
                        let prefix = [&path[..], b"/"].concat();
                        let sent = base.entries()[index..].iter().skip(1);
                        sent.take_while(|entry| entry.path.starts_with(&prefix))
                            .all(|entry| self.sent.stat(&entry.path).is_some())
                    }
                }
                (Some(_), Some(_)) => self.sent.has_path(&path),
                _ => false,
            }
        };
        // Each additional working tree has a separate HEAD.
        let references = [&b"HEAD"[..], b"packed-refs", b"refs", b"worktrees"];
        let has_references = references.into_iter().all(&mut is_as_sent);
        let has_index = is_as_sent(b"index");
        // The reference of a branch that was checked out meanwhile must stay.
        let has_heads = [&b"HEAD"[..], b"worktrees"].into_iter().all(&mut is_as_sent);
        let is_here = is_as_sent(b"packed-refs") || self.result.has_path(&path(b"packed-refs"));
        let packed = whole.find(&path(b"packed-refs")).map(|index| &whole.entries()[index]);
        let is_packed = packed.is_some_and(|packed| !is_unchanged(base, whole, packed));
        let has_packed_references = has_heads && is_here && is_packed;
        Repository { has_references, has_packed_references, has_index }
    }
}

/// The outcome of the removal of entries that the command removed.
#[derive(Debug, Clone, Default)]
pub struct Gone {
    /// Number of removed entries.
    pub removed: u64,
    /// Removed entries that the target keeps, because they were changed there.
    pub changed: Vec<PathBuf>,
    /// Removed or moved entries that the target keeps, because their change needs the permission of
    /// the caller: git programs, and ignore rules for uploads.
    pub protected: Vec<PathBuf>,
}

/// Removes the entries that `standing` has planned for removal from `target`, unless they were
/// changed meanwhile.
///
/// A directory is removed when it is empty. The contents of `conflicts` stay.
///
/// # Errors
///
/// Returns the first entry that cannot be removed, with the error.
pub fn remove_gone(
    target: &Path,
    base: &Manifest,
    standing: &Standing,
    conflicts: &[Conflict],
) -> Result<Gone, (PathBuf, io::Error)> {
    let mut gone = standing.gone.clone();
    let stays: BTreeSet<&Path> = conflicts.iter().map(|conflict| conflict.path.as_path()).collect();
    let Ok(mut cursor) = Cursor::through(target) else { return Ok(gone) };
    // The reverse order has the contents of a directory before the directory.
    for (index, found) in standing.removals.iter().rev() {
        let entry = &base.entries()[*index];
        if !stays.is_empty() && entry.path().ancestors().any(|path| stays.contains(path)) {
            continue;
        }
        // Loose references must stay if the packed references of the result were placed beside.
        let packed = |git: &[u8]| as_path(&[git, b"packed-refs"].join(&b'/')).to_owned();
        if !stays.is_empty()
            && repository_of(base, &entry.path).is_some_and(|git| {
                is_at_or_below(&entry.path[git.len()..], b"/refs") && stays.contains(packed(git).as_path())
            })
        {
            if found.is_some() {
                gone.changed.push(entry.path().to_owned());
            }
            continue;
        }
        let (parent, name) = split(&entry.path);
        // An unreachable entry does not exist any more.
        let Ok(parent) = cursor.go(parent) else { continue };
        let Ok(now) = statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let flags = match found {
            Some(found) if Fingerprint::of(&now).is_still(found) => AtFlags::empty(),
            None if is_directory(&now) => AtFlags::REMOVEDIR,
            _ => {
                gone.changed.push(entry.path().to_owned());
                continue;
            }
        };
        match unlinkat(&parent, name, flags) {
            Ok(()) => gone.removed += 1,
            // The entry is gone, or the directory has contents that stay.
            Err(Errno::NOENT | Errno::NOTEMPTY) => {}
            Err(error) => return Err((entry.path().to_owned(), error.into())),
        }
    }
    gone.changed.sort();
    Ok(gone)
}
