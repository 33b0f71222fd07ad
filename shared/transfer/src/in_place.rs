//! Results in place: a tree that was sent comes back to the directory it was sent from.
//!
//! The command line compares three trees: the *base*, which was sent; the *result*; and what stands in the target when
//! the result arrives.
//!
//! | The command | The target since then | The merge |
//! |---|---|---|
//! | left it alone | anything | leaves it alone |
//! | changed it | left it alone, or lost it | takes the result |
//! | changed it | changed it to the same | leaves it alone |
//! | changed it | changed it otherwise | keeps both: the result is put beside, see [`Merged::conflicts`](crate::Merged) |
//! | removed it | left it alone | [`remove_gone`] removes it, [`merge`](crate::merge()) does not |
//! | removed it | changed it | keeps it |
//!
//! Invariant: what stands in the target and is not as it was sent is neither written over nor removed. A file that is
//! changed after it was compared has another fingerprint, which is compared once more right before the change.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, Stat, unlinkat};
use rustix::io::Errno;

use crate::cache::Fingerprint;
use crate::dirs::{Cursor, list};
use crate::guard::{There, is_ignore_rule};
use crate::manifest::{Entry, EntryKind, InvalidManifest, Manifest, split};
use crate::subtree::Subtree;

/// The entries of `result` that the command made or changed, with the directories that lead to them.
///
/// Owners do not count: neither a directory that is sent nor one that is written keeps them. Nor does the time of a
/// directory, which says only that a name in it has changed.
///
/// # Errors
///
/// None that the whole tree would not have had.
pub fn changes(base: &Manifest, result: &Manifest) -> Result<Subtree, InvalidManifest> {
    let entries = result.entries();
    let mut is_taken: Vec<bool> = entries.iter().map(|entry| !is_in(base, result, entry)).collect();
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

/// Whether `base` has the very same at the path of an entry of `tree`.
fn is_in(base: &Manifest, tree: &Manifest, entry: &Entry) -> bool {
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

/// The entry that has the content: of a hard link, its file.
fn file_of<'a>(manifest: &'a Manifest, entry: &'a Entry) -> Option<&'a Entry> {
    match &entry.kind {
        EntryKind::HardLink { to } => Some(&manifest.entries()[manifest.find(to)?]),
        _ => Some(entry),
    }
}

/// What stands in the target at the paths of a result.
#[derive(Debug, Default)]
pub struct Standing {
    found: BTreeMap<usize, Found>,
    /// Directories that stay as they are but for what is put into them.
    directories: BTreeSet<usize>,
}

/// What stands at the path of an entry.
#[derive(Debug, Clone, Copy)]
enum Found {
    /// Nothing, or what was sent.
    AsSent(Option<Fingerprint>),
    /// What the result has, too.
    AsResult,
    /// Something else: it was changed since it was sent.
    Changed,
}

/// What a merge does at the path of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The result takes the place of what stands there.
    Take,
    /// The result stands there already.
    Leave,
    /// Both stay.
    PutBeside,
}

impl Standing {
    /// Compares what stands in `target` with the tree that was sent, `base`, and with `result`, which has changes only.
    #[must_use]
    pub fn of(target: &Path, base: &Manifest, result: &Manifest) -> Self {
        let mut standing = Self::default();
        let cursor = || Cursor::through(target).ok();
        let mut there = Target {
            sent: There::new(cursor(), base),
            result: There::new(cursor(), result),
            cursor: Cursor::new(target).ok(),
        };
        for (index, entry) in result.entries().iter().enumerate() {
            let found = there.sent.stat(&entry.path);
            let is_directory = found.as_ref().is_some_and(is_directory);
            if entry.is_directory() && (is_directory || entry.path.is_empty()) {
                let before = base.find(&entry.path).map(|index| &base.entries()[index]);
                let is_mode = |entry: &&Entry| found.as_ref().is_some_and(|found| mode(found) == entry.mode);
                // The command changed the directory itself, and the target has it as it was sent.
                if !before.is_some_and(|before| !is_in(base, result, entry) && is_mode(&before)) {
                    standing.directories.insert(index);
                }
                continue;
            }
            standing.found.insert(index, there.compare(entry, found.as_ref()));
        }
        standing
    }

    /// Whether a directory keeps its own mode, times and attributes.
    pub(crate) fn keeps_directory(&self, index: usize) -> bool {
        self.directories.contains(&index)
    }

    /// What is done at the path of an entry, where `now` stands.
    pub(crate) fn verdict(&self, index: usize, now: Option<&Stat>) -> Verdict {
        match self.found.get(&index) {
            Some(Found::AsSent(found)) if *found == now.map(Fingerprint::of) => Verdict::Take,
            Some(Found::AsResult) => Verdict::Leave,
            // It was looked at when it was a directory, and still is one.
            None if now.is_none_or(is_directory) => Verdict::Take,
            Some(Found::AsSent(_) | Found::Changed) | None => Verdict::PutBeside,
        }
    }
}

/// The target, compared with two trees.
struct Target<'a> {
    sent: There<'a>,
    result: There<'a>,
    /// For listing directories.
    cursor: Option<Cursor>,
}

impl Target<'_> {
    fn compare(&mut self, entry: &Entry, found: Option<&Stat>) -> Found {
        let Some(found) = found else { return Found::AsSent(None) };
        let is_as_sent = if is_directory(found) {
            self.is_directory_as_sent(&entry.path)
        } else {
            self.sent.has_at(&entry.path)
        };
        if is_as_sent {
            Found::AsSent(Some(Fingerprint::of(found)))
        } else if self.result.has_at(&entry.path) {
            Found::AsResult
        } else {
            Found::Changed
        }
    }

    /// Whether a directory has all that was sent of it, and nothing else.
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
                if !self.sent.has_at(&path) {
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

/// What of the target went with the result.
#[derive(Debug, Default)]
pub struct Gone {
    /// How many entries were removed.
    pub removed: u64,
    /// What the command removed and the target keeps, as it was changed there.
    pub changed: Vec<PathBuf>,
    /// Rules of what is not uploaded: without them, what they name would be sent the next time.
    pub rules: Vec<PathBuf>,
}

/// Removes from `target` what was sent and is not in the result, as far as it stands there as it was sent.
///
/// Directories go once they are empty. `removes_rules`: whether a `.gantryignore` goes, too.
///
/// # Errors
///
/// The first entry that cannot be removed, and why.
pub fn remove_gone(
    target: &Path,
    base: &Manifest,
    result: &Manifest,
    removes_rules: bool,
) -> Result<Gone, (PathBuf, io::Error)> {
    let mut gone = Gone::default();
    let Ok(mut cursor) = Cursor::through(target) else { return Ok(gone) };
    let mut there = There::new(Cursor::through(target).ok(), base);
    // What is in a directory comes after it.
    for entry in base.entries().iter().rev().filter(|entry| result.find(&entry.path).is_none()) {
        let path = || entry.path().to_owned();
        let Some(found) = there.stat(&entry.path) else { continue };
        if !removes_rules && is_ignore_rule(entry) && !entry.is_directory() {
            gone.rules.push(path());
            continue;
        }
        if entry.is_directory() != is_directory(&found) || !(entry.is_directory() || there.has(entry)) {
            gone.changed.push(path());
            continue;
        }
        let (parent, name) = split(&entry.path);
        let flags = if entry.is_directory() { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        let removed = cursor.go(parent).and_then(|parent| Ok(unlinkat(&parent, name, flags)?));
        match removed {
            Ok(()) => gone.removed += 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // It has what was never sent, or what is kept.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOTEMPTY) => {}
            Err(error) => return Err((path(), error)),
        }
    }
    gone.changed.reverse();
    gone.rules.reverse();
    Ok(gone)
}
