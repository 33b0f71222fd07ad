//! Ignore rules of an upload: `.gantryignore` files, with `--gitignore` the ignore files of git,
//! and directories of outputs.
//!
//! [`crate::transfer::upload`] asks for each path whether it is left out. Both kinds of files have
//! the syntax and the scope of git:
//!
//! - A file applies to its directory and everything below. The deeper file and the later line win.
//! - Entries below an excluded directory are not considered.
//! - `.gantryignore` wins over the files of git, so `!generated/` includes a directory that git
//!   ignores.
//! - The files of git are, in its order, `.gitignore`, `.git/info/exclude` and the excludes file
//!   (`core.excludesFile`).
//! - The files of git never exclude a tracked file, but `.gantryignore` may.
//! - The root is always sent, even if rules above it match it.
//! - A rule that cannot match any path, such as `./a` or `a//b`, is allowed.
//!
//! Invariant: a file that cannot be read or parsed fails the upload, because its entries may be
//! secret. [`Rules::finish`] names the file. Until then, [`Rules::exclude`] excludes everything.

mod git;
mod pattern;

#[cfg(test)]
mod compared;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::ops::Bound;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, bail};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use self::pattern::Pattern;

/// Name of the ignore files of Gantry.
const OURS: &str = ".gantryignore";
/// Name of the ignore files of git.
const GIT: &str = ".gitignore";
/// Maximum size of an ignore file in bytes. A result may have made a huge sparse file.
const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of problems that an error names.
const NAMED_LIMIT: usize = 10;
/// Maximum length in bytes of a path that is opened in one step. The kernel accepts 4095.
const MAX_OPEN_BYTES: usize = 2048;

/// Ignore rules of one tree.
pub(crate) struct Rules {
    root: PathBuf,
    gitignore: bool,
    /// Paths of outputs, relative to the root.
    left_out: Vec<PathBuf>,
    /// Patterns of the directories above the root within the repository, nearest first, then those
    /// of the excludes file. Each has the path from its directory to the root.
    above: Vec<(PathBuf, Vec<Pattern>)>,
    /// Patterns of the visited directories.
    directories: RefCell<HashMap<PathBuf, Rc<Files>>>,
    /// Tracked paths of repositories, read on demand. The key is the directory of the repository,
    /// relative to the root.
    tracked: RefCell<HashMap<PathBuf, Option<BTreeSet<PathBuf>>>>,
    /// Directories that git ignores but that contain tracked files.
    opened: RefCell<HashSet<PathBuf>>,
    /// Errors of files that cannot be read or parsed.
    problems: RefCell<Vec<String>>,
}

/// Patterns of one directory, in the order of their lines.
struct Files {
    directory: PathBuf,
    ours: Vec<Pattern>,
    git: Vec<Pattern>,
    /// Nearest directory above that has patterns.
    outer: Option<Rc<Files>>,
}

impl Rules {
    /// Makes rules for the tree at `root`. The paths `left_out` are relative to it and always
    /// excluded.
    pub(crate) fn new(root: &Path, gitignore: bool, left_out: Vec<PathBuf>) -> Self {
        Self::with_excludes_file(root, gitignore, left_out, git::excludes_file)
    }

    /// Makes rules with a function that finds the excludes file of a working tree.
    fn with_excludes_file(
        root: &Path,
        gitignore: bool,
        left_out: Vec<PathBuf>,
        excludes_file: impl FnOnce(&Path) -> anyhow::Result<Option<PathBuf>>,
    ) -> Self {
        let mut rules = Self {
            root: root.to_owned(),
            gitignore,
            left_out,
            above: Vec::new(),
            directories: RefCell::default(),
            tracked: RefCell::new(HashMap::from([(PathBuf::new(), None)])),
            opened: RefCell::default(),
            problems: RefCell::default(),
        };
        if gitignore {
            rules.above = rules.above_root(excludes_file);
        }
        rules
    }

    /// Returns whether `path`, relative to the root, is excluded. After an error, every path is
    /// excluded.
    pub(crate) fn exclude(&self, path: &Path, is_directory: bool) -> bool {
        if self.left_out.iter().any(|left_out| left_out == path) {
            return true;
        }
        let ours = self.decide(path, is_directory, |files| &files.ours);
        let excluded = ours.unwrap_or_else(|| self.gitignore && self.is_ignored(path, is_directory));
        excluded || !self.problems.borrow().is_empty()
    }

    /// Returns whether git ignores `path`.
    fn is_ignored(&self, path: &Path, is_directory: bool) -> bool {
        let is_below_ignored = || path.parent().is_some_and(|parent| self.opened.borrow().contains(parent));
        let by_rules = || {
            let above = || {
                let mut above = self.above.iter();
                above.find_map(|(prefix, patterns)| decide(patterns, &prefix.join(path), is_directory))
            };
            self.decide(path, is_directory, |files| &files.git).or_else(above).unwrap_or(false)
        };
        if !is_below_ignored() && !by_rules() {
            return false;
        }
        let tracked = self.tracked_from(path);
        if is_directory && tracked.as_deref() == Some(path) {
            // A tracked directory is a submodule, unless the tracked entry is a file.
            return !self.root.join(path).join(".git").exists();
        }
        if is_directory && tracked.is_some() {
            self.opened.borrow_mut().insert(path.to_owned());
        }
        tracked.is_none()
    }

    /// Returns the first tracked path that is `path` or below it.
    fn tracked_from(&self, path: &Path) -> Option<PathBuf> {
        let mut tracked = self.tracked.borrow_mut();
        let repository = path.ancestors().skip(1).find(|outer| tracked.contains_key(*outer))?.to_owned();
        let within = path.strip_prefix(&repository).unwrap_or(path);
        let known = tracked.get_mut(&repository)?;
        let paths = known.get_or_insert_with(|| {
            git::tracked(&self.root.join(&repository)).unwrap_or_else(|error| {
                self.problems.borrow_mut().push(crate::ending::error::describe(&error));
                BTreeSet::new()
            })
        });
        // Paths are ordered by their components, so entries of a directory follow it.
        let first = paths
            .range::<Path, _>((Bound::Included(within), Bound::Unbounded))
            .next()
            .filter(|first| first.starts_with(within))?;
        Some(repository.join(first))
    }

    /// Fails if a file could not be read or parsed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        let problems = self.problems.into_inner();
        let more = problems.len().saturating_sub(NAMED_LIMIT);
        match &problems[..] {
            [] => Ok(()),
            [problem] => bail!("{problem}"),
            _ if more > 0 => {
                bail!(
                    "ignore files have errors:\n  {}\n  and {more} more",
                    problems[..NAMED_LIMIT].join("\n  ")
                )
            }
            _ => bail!("ignore files have errors:\n  {}", problems.join("\n  ")),
        }
    }

    /// Returns the decision of the files of one kind, the deepest first.
    fn decide(
        &self,
        path: &Path,
        is_directory: bool,
        kind: impl Fn(&Files) -> &Vec<Pattern>,
    ) -> Option<bool> {
        let mut files = Some(self.files(path.parent()?));
        while let Some(now) = files {
            let below = path.strip_prefix(&now.directory).unwrap_or(path);
            if let Some(decision) = decide(kind(&now), below, is_directory) {
                return Some(decision);
            }
            files = now.outer.clone();
        }
        None
    }

    /// Returns the patterns of a directory, or those of the nearest directory above.
    fn files(&self, directory: &Path) -> Rc<Files> {
        if let Some(files) = self.directories.borrow().get(directory) {
            return files.clone();
        }
        let outer = directory.parent().map(|outer| self.files(outer));
        let at = self.root.join(directory);
        let ours = self.read(&at.join(OURS), false);
        let git = if self.gitignore { self.read_git(&at) } else { Vec::new() };
        if self.gitignore && at.join(".git").exists() {
            self.tracked.borrow_mut().entry(directory.to_owned()).or_default();
        }
        let files = match outer {
            Some(outer) if ours.is_empty() && git.is_empty() => outer,
            outer => Rc::new(Files { directory: directory.to_owned(), ours, git, outer }),
        };
        self.directories.borrow_mut().insert(directory.to_owned(), files.clone());
        files
    }

    /// Reads the files of git for a directory. `.gitignore` follows `info/exclude`, and wins.
    fn read_git(&self, directory: &Path) -> Vec<Pattern> {
        let mut patterns = match git::info_exclude(directory) {
            Ok(file) => file.map(|file| self.read(&file, true)).unwrap_or_default(),
            Err(error) => {
                self.problems.borrow_mut().push(crate::ending::error::describe(&error));
                Vec::new()
            }
        };
        patterns.extend(self.read(&directory.join(GIT), false));
        patterns
    }

    fn read(&self, file: &Path, follow_link: bool) -> Vec<Pattern> {
        let mut problems = self.problems.borrow_mut();
        let text = match read_file(file, follow_link) {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                problems.push(crate::ending::error::describe(&error));
                return Vec::new();
            }
        };
        let mut patterns = Vec::new();
        for (number, pattern) in pattern::parse_lines(&text) {
            match pattern {
                Ok(pattern) => patterns.push(pattern),
                Err(malformed) => {
                    let line = format!("{}:{number}", file.display());
                    problems.push(format!("cannot parse {line:?}: {malformed}"));
                }
            }
        }
        patterns
    }

    fn above_root(
        &self,
        excludes_file: impl FnOnce(&Path) -> anyhow::Result<Option<PathBuf>>,
    ) -> Vec<(PathBuf, Vec<Pattern>)> {
        let root = self.root.canonicalize().unwrap_or_else(|_| self.root.clone());
        let top = root.ancestors().find(|directory| directory.join(".git").exists()).unwrap_or(&root);
        let prefix = |directory| root.strip_prefix(directory).unwrap_or(Path::new("")).to_owned();
        let between = root.ancestors().skip(1).take_while(|directory| directory.starts_with(top));
        let mut above: Vec<_> =
            between.map(|directory| (prefix(directory), self.read_git(directory))).collect();
        match excludes_file(top) {
            Ok(Some(file)) => above.push((prefix(top), self.read(&file, true))),
            Ok(None) => {}
            Err(error) => self.problems.borrow_mut().push(crate::ending::error::describe(&error)),
        }
        above
    }
}

/// Checks the ignore files that apply to the directory at `root` itself.
pub(crate) fn check(root: &Path, gitignore: bool) -> anyhow::Result<()> {
    let rules = Rules::new(root, gitignore, Vec::new());
    rules.files(Path::new(""));
    rules.finish()
}

/// Rejects the replacement of a directory with ignored entries, because no result can contain them.
pub(crate) fn refuse_unsent(directory: &Path) -> anyhow::Result<()> {
    let rules = Rules::new(directory, false, Vec::new());
    let mut rest = vec![PathBuf::new()];
    while let Some(at) = rest.pop() {
        let listed = match std::fs::read_dir(directory.join(&at)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            listed => listed.with_context(|| format!("cannot list {at:?}"))?,
        };
        for entry in listed {
            let entry = entry?;
            let path = at.join(entry.file_name());
            let is_directory = entry.file_type()?.is_dir();
            if rules.exclude(&path, is_directory) {
                rules.finish()?;
                bail!(
                    "--replace would delete {path:?}, which a .gantryignore excludes from uploads; leave out --replace, or \
                     move the entry away"
                );
            }
            if is_directory {
                rest.push(path);
            }
        }
    }
    Ok(())
}

/// Returns whether patterns exclude a path. The last matching pattern decides. `None`: no pattern
/// matches.
fn decide(patterns: &[Pattern], path: &Path, is_directory: bool) -> Option<bool> {
    let path = path.as_os_str().as_bytes();
    let last = patterns.iter().rev().find(|pattern| pattern.matches(path, is_directory))?;
    Some(!last.is_negative)
}

/// Reads a small file. `None`: the file does not exist.
fn read_file(file: &Path, follow_link: bool) -> anyhow::Result<Option<Vec<u8>>> {
    let read = || {
        let file = match open(file, follow_link) {
            Ok(file) => file,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            Err(Errno::LOOP) if !follow_link => {
                bail!("an ignore file must not be a symbolic link, as in git; use a regular file")
            }
            Err(error) => return Err(std::io::Error::from(error).into()),
        };
        if !file.metadata()?.is_file() {
            bail!("not a regular file; remove or rename the entry");
        }
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut text)?;
        if text.len() as u64 > MAX_BYTES {
            bail!("larger than 1 MiB, the limit of an ignore file");
        }
        Ok(Some(text))
    };
    read().with_context(|| format!("cannot read {file:?}"))
}

/// Opens a file without blocking. The path may be longer than the kernel accepts in one call.
fn open(file: &Path, follow_link: bool) -> rustix::io::Result<File> {
    let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    if !follow_link {
        flags |= OFlags::NOFOLLOW;
    }
    let mut directory = None;
    let mut path = PathBuf::new();
    for component in file {
        if path.as_os_str().len() + component.len() > MAX_OPEN_BYTES {
            let through = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            directory = Some(match &directory {
                None => openat(CWD, &path, through, Mode::empty())?,
                Some(outer) => openat(outer, &path, through, Mode::empty())?,
            });
            path.clear();
        }
        path.push(component);
    }
    let opened = match &directory {
        None => openat(CWD, &path, flags, Mode::empty())?,
        Some(directory) => openat(directory, &path, flags, Mode::empty())?,
    };
    Ok(opened.into())
}
