//! What is left out of an upload: what `.gantryignore` files say, what `.gitignore` files say when asked, and targets of outputs.
//!
//! Both kinds of file have the syntax and the reach of `.gitignore`: a file speaks for its directory and all below it, the deeper file
//! and the later line win, and nothing below a directory that is left out is looked at. `.gantryignore` wins over `.gitignore`,
//! so that `!generated/` brings back what git ignores.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};

/// The name of our own files.
const OURS: &str = ".gantryignore";
const GIT: &str = ".gitignore";
/// Most bytes of a file of rules: it may come from a result, and have holes.
const MOST_BYTES: u64 = 1 << 20;

/// Rules for one tree.
pub(crate) struct Rules {
    root: PathBuf,
    gitignore: bool,
    /// Relative to the root.
    left_out: Vec<PathBuf>,
    /// From directories above the root up to that of the repository: what to put before a path, and the file. Nearest first.
    above: Vec<(PathBuf, Gitignore)>,
    directories: RefCell<HashMap<PathBuf, Rc<Files>>>,
    problems: RefCell<Vec<String>>,
    /// A file that is too large to be one of rules.
    refused: RefCell<Option<PathBuf>>,
}

/// The files of one directory.
#[derive(Default)]
struct Files {
    ours: Option<Gitignore>,
    git: Option<Gitignore>,
}

impl Files {
    fn ours(&self) -> Option<&Gitignore> {
        self.ours.as_ref()
    }

    fn git(&self) -> Option<&Gitignore> {
        self.git.as_ref()
    }
}

impl Rules {
    /// Rules for the tree at `root`, without the paths `left_out`, which are relative to it.
    pub(crate) fn new(root: &Path, gitignore: bool, left_out: Vec<PathBuf>) -> Self {
        let mut rules = Self {
            root: root.to_owned(),
            gitignore,
            left_out,
            above: Vec::new(),
            directories: RefCell::default(),
            problems: RefCell::default(),
            refused: RefCell::default(),
        };
        if gitignore {
            rules.above = rules.above_root();
        }
        rules
    }

    /// Whether `path`, relative to the root, is left out.
    pub(crate) fn exclude(&self, path: &Path, is_directory: bool) -> bool {
        if self.left_out.iter().any(|left_out| left_out == path) {
            return true;
        }
        for kind in [Files::ours, Files::git] {
            match self.decide(path, is_directory, kind) {
                Match::Ignore(()) => return true,
                Match::Whitelist(()) => return false,
                Match::None => {}
            }
        }
        for (prefix, file) in &self.above {
            match file.matched(prefix.join(path), is_directory) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => {}
            }
        }
        false
    }

    /// Lines that are no patterns, and files that could not be read.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.problems.take()
    }

    /// A file of more than 1 MiB: without its rules more would be sent than is meant to be.
    pub(crate) fn refused(&self) -> Option<PathBuf> {
        self.refused.take()
    }

    /// What the files of one kind say, the deepest first.
    fn decide(&self, path: &Path, is_directory: bool, kind: fn(&Files) -> Option<&Gitignore>) -> Match<()> {
        for directory in path.ancestors().skip(1) {
            let files = self.files(directory);
            let Some(file) = kind(&files) else { continue };
            let below = path.strip_prefix(directory).unwrap_or(path);
            match file.matched(below, is_directory) {
                Match::None => {}
                Match::Ignore(_) => return Match::Ignore(()),
                Match::Whitelist(_) => return Match::Whitelist(()),
            }
        }
        Match::None
    }

    fn files(&self, directory: &Path) -> Rc<Files> {
        if let Some(files) = self.directories.borrow().get(directory) {
            return files.clone();
        }
        let at = self.root.join(directory);
        let files = Rc::new(Files {
            ours: self.read(&at.join(OURS)),
            git: if self.gitignore { self.read(&at.join(GIT)) } else { None },
        });
        self.directories.borrow_mut().insert(directory.to_owned(), files.clone());
        files
    }

    fn read(&self, file: &Path) -> Option<Gitignore> {
        let found = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        if found.len() > MOST_BYTES {
            *self.refused.borrow_mut() = Some(file.to_owned());
            return None;
        }
        // Paths are given relative to the directory of the file.
        let mut builder = GitignoreBuilder::new(".");
        if let Some(error) = builder.add(file) {
            self.problems.borrow_mut().push(error.to_string());
        }
        match builder.build() {
            Ok(rules) => (!rules.is_empty()).then_some(rules),
            Err(error) => {
                self.problems.borrow_mut().push(format!("{}: {error}", file.display()));
                None
            }
        }
    }

    fn above_root(&self) -> Vec<(PathBuf, Gitignore)> {
        let Ok(root) = self.root.canonicalize() else { return Vec::new() };
        let Some(top) = root.ancestors().find(|directory| directory.join(".git").exists()) else {
            return Vec::new();
        };
        let mut above = Vec::new();
        for directory in root.ancestors().skip(1).take_while(|directory| directory.starts_with(top)) {
            if let (Ok(prefix), Some(file)) = (root.strip_prefix(directory), self.read(&directory.join(GIT)))
            {
                above.push((prefix.to_owned(), file));
            }
        }
        above
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("below the root")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    fn excluded(rules: &Rules, paths: &[(&str, bool)]) -> Vec<bool> {
        paths.iter().map(|(path, is_directory)| rules.exclude(Path::new(path), *is_directory)).collect()
    }

    #[test]
    fn our_own_files_always_count_and_deeper_ones_win() {
        let root = tree(&[(OURS, "*.log\n/target/\n"), ("a/.gantryignore", "!keep.log\n")]);
        let rules = Rules::new(root.path(), false, vec![]);
        let paths = [
            ("x.log", false),
            ("a/x.log", false),
            ("a/keep.log", false),
            ("target", true),
            ("target", false),
            ("a/target", true),
            ("x.txt", false),
        ];
        assert_eq!(excluded(&rules, &paths), [true, true, false, true, false, false, false]);
    }

    #[test]
    fn git_files_count_when_asked_and_ours_win_over_them() {
        let root = tree(&[(GIT, "generated/\n*.o\n"), (OURS, "!generated/\n")]);
        let asked = Rules::new(root.path(), true, vec![]);
        assert_eq!(excluded(&asked, &[("generated", true), ("a/b.o", false)]), [false, true]);
        let not = Rules::new(root.path(), false, vec![]);
        assert_eq!(excluded(&not, &[("a/b.o", false)]), [false]);
    }

    #[test]
    fn git_files_above_the_root_count_up_to_the_repository() {
        let root = tree(&[
            (GIT, "outside\n"),
            ("repo/.git/HEAD", ""),
            ("repo/.gitignore", "/sub/only-here\n*.o\n"),
            ("repo/sub/x", ""),
        ]);
        let rules = Rules::new(&root.path().join("repo/sub"), true, vec![]);
        let paths = [("only-here", false), ("a/only-here", false), ("a.o", false), ("outside", false)];
        assert_eq!(excluded(&rules, &paths), [true, false, true, false]);
    }

    #[test]
    fn targets_of_outputs_are_left_out() {
        let root = tree(&[]);
        let rules = Rules::new(root.path(), false, vec![PathBuf::from("out/x")]);
        assert_eq!(
            excluded(&rules, &[("out", true), ("out/x", true), ("out/xy", true)]),
            [false, true, false]
        );
    }

    #[test]
    fn a_line_that_is_no_pattern_is_a_problem_and_the_others_count() {
        let root = tree(&[(OURS, "a{\n*.log\n")]);
        let rules = Rules::new(root.path(), false, vec![]);
        assert_eq!(excluded(&rules, &[("x.log", false)]), [true]);
        assert_eq!(rules.problems().len(), 1);
    }

    #[test]
    fn file_of_rules_that_is_too_large_is_refused() {
        let root = tree(&[(OURS, "*.log\n")]);
        std::fs::File::options()
            .write(true)
            .open(root.path().join(OURS))
            .expect("there")
            .set_len(2 << 20)
            .expect("grown");
        let rules = Rules::new(root.path(), false, vec![]);
        excluded(&rules, &[("x.log", false)]);
        assert_eq!(rules.refused(), Some(root.path().join(OURS)));
    }
}
