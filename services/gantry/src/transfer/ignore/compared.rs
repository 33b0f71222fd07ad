//! Comparison of random rules on random trees with git.
//!
//! `GANTRY_SEED` repeats one tree. `GANTRY_TREES` sets the number of trees.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::*;

/// Number of compared trees. Seeds start at 1.
const TREES: u64 = 100;
const NAMES: [&[u8]; 28] = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"abb",
    b"foo",
    b"a.o",
    b".a",
    b"A",
    b"a1",
    b"{a,b}",
    b"a{}",
    b"[a]",
    b"a]",
    b"a b",
    b"a ",
    b" ",
    b"#a",
    b"!a",
    b"a\\",
    b"\\a",
    b"*",
    b"a\r",
    b"-",
    b"\xff",
    b"caf\xe9",
    b"caf\xc3\xa9",
    b"\xef\xbb\xbfa",
];
const PIECES: [&[u8]; 51] = [
    b"*",
    b"*",
    b"**",
    b"***",
    b"?",
    b"/",
    b"/",
    b"/",
    b"**/",
    b"/**",
    b"/**/",
    b"**\\/",
    b"[",
    b"]",
    b"[!",
    b"[^",
    b"[]",
    b"[ab]",
    b"[!b]",
    b"[^a-f]",
    b"[a-",
    b"-",
    b"[a-]",
    b"[]-a]",
    b"[\\]",
    b"[\\]a]",
    b"[a-\\f]",
    b"[[:alpha:]]",
    b"[[:punct:]a]",
    b"[![:space:]]",
    b"[[:word:]]",
    b"[[:alpha]",
    b"[:",
    b":]",
    b"\\",
    b"\\ ",
    b" ",
    b"  ",
    b"\t",
    b"!",
    b"#",
    b"{",
    b"}",
    b"{a,b}",
    b"\r",
    b"\xff",
    b"\xe9",
    b"[\xe0-\xff]",
    b"[\xc3]",
    b"\xef\xbb\xbf",
    b".",
];
const CLASSES: [&str; 12] = [
    "alnum", "alpha", "blank", "cntrl", "digit", "graph", "lower", "print", "punct", "space", "upper",
    "xdigit",
];

/// Repository with rules. Only its directories exist.
struct Tree {
    root: tempfile::TempDir,
    /// Paths relative to the root, parents first, and whether each is a directory.
    paths: Vec<(PathBuf, bool)>,
}

impl Tree {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        for directory in [".git/objects", ".git/refs", ".git/info"] {
            fs::create_dir_all(root.path().join(directory)).expect("made");
        }
        fs::write(root.path().join(".git/HEAD"), "ref: refs/heads/main\n").expect("written");
        Self { root, paths: Vec::new() }
    }

    fn random(random: &mut StdRng) -> Self {
        let mut tree = Self::new();
        tree.grow(random, Path::new(""), 0);
        tree
    }

    fn grow(&mut self, random: &mut StdRng, parent: &Path, depth: usize) {
        let names: BTreeSet<_> =
            (0..random.random_range(2..9)).filter_map(|_| NAMES.choose(random)).collect();
        for name in names {
            let path = parent.join(OsStr::from_bytes(name));
            let is_directory = depth < 3 && random.random_ratio(2, 5);
            self.paths.push((path.clone(), is_directory));
            if is_directory {
                fs::create_dir(self.root.path().join(&path)).expect("made");
                self.grow(random, &path, depth + 1);
            }
        }
    }

    fn write(&self, path: &Path, text: &[u8]) {
        fs::write(self.root.path().join(path), text).expect("written");
    }

    /// Returns the paths that git ignores.
    fn git(&self, excludes: &Path) -> BTreeSet<PathBuf> {
        let mut setting = std::ffi::OsString::from("core.excludesFile=");
        setting.push(excludes);
        let mut git = Command::new("git")
            .arg("-c")
            .arg(setting)
            .args(["check-ignore", "--no-index", "-z", "--stdin"])
            .current_dir(self.root.path())
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env_remove("GIT_DIR")
            .env_remove("GIT_WORK_TREE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("git is installed");
        let mut input = git.stdin.take().expect("piped");
        let paths: Vec<u8> =
            self.paths.iter().flat_map(|(path, _)| [path.as_os_str().as_bytes(), b"\0"].concat()).collect();
        let writer = std::thread::spawn(move || input.write_all(&paths).expect("git reads"));
        let output = git.wait_with_output().expect("git ends");
        writer.join().expect("written");
        assert!(matches!(output.status.code(), Some(0 | 1)), "git fails: {}", output.status);
        let names = output.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        names.map(|name| PathBuf::from(OsStr::from_bytes(name))).collect()
    }

    /// Returns the paths that an upload leaves out.
    fn ours(&self, rules: Rules) -> BTreeSet<PathBuf> {
        let mut left_out = BTreeSet::new();
        for (path, is_directory) in &self.paths {
            let is_below = path.parent().is_some_and(|parent| left_out.contains(parent));
            if is_below || rules.exclude(path, *is_directory) {
                left_out.insert(path.clone());
            }
        }
        rules.finish().expect("all lines are patterns");
        left_out
    }
}

fn random_line(random: &mut StdRng, paths: &[(PathBuf, bool)]) -> Vec<u8> {
    let mut line = Vec::new();
    if random.random_ratio(1, 4) {
        line.push(b'!');
    }
    if random.random_ratio(1, 2) {
        for _ in 0..random.random_range(1..6) {
            let pieces: &[&[u8]] = if random.random_ratio(1, 3) { &NAMES } else { &PIECES };
            line.extend_from_slice(pieces.choose(random).expect("some"));
        }
    } else if let Some((path, _)) = paths.choose(random) {
        // A path of the tree, or its end, with some bytes replaced.
        let path = path.as_os_str().as_bytes();
        let start = random.random_range(0..path.len());
        for byte in &path[if random.random_ratio(1, 2) { 0 } else { start }..] {
            match random.random_range(0..12) {
                0 => line.extend_from_slice(PIECES.choose(random).expect("some")),
                1 => line.extend([b'\\', *byte]),
                2 => line.extend([b'[', *byte, b']']),
                3 if *byte == b'/' => line.extend_from_slice(b"/**/"),
                _ => line.push(*byte),
            }
        }
    }
    for (end, one_in) in [("/", 4), (" ", 8), ("\\ ", 20), ("\r", 8)] {
        if random.random_ratio(1, one_in) {
            line.extend_from_slice(end.as_bytes());
        }
    }
    line
}

/// Makes random valid rules. Invalid lines are collected in `malformed`.
fn random_rules(
    random: &mut StdRng,
    paths: &[(PathBuf, bool)],
    malformed: &mut BTreeSet<Vec<u8>>,
) -> Vec<u8> {
    let mut text = Vec::new();
    if random.random_ratio(1, 8) {
        text.extend_from_slice(b"\xef\xbb\xbf");
    }
    for _ in 0..random.random_range(1..6) {
        let line = random_line(random, paths);
        // The line is checked after another one, because a byte order mark is only special at the
        // start of a file.
        if pattern::parse_lines(&[b"\n", &line[..]].concat()).any(|(_, pattern)| pattern.is_err()) {
            malformed.insert(line);
        } else {
            text.extend(line);
            text.push(b'\n');
        }
    }
    if random.random_ratio(1, 4) {
        text.pop();
    }
    text
}

#[test]
fn rules_match_git() {
    let one = testing::seeds::repeated();
    let trees = testing::seeds::setting("GANTRY_TREES").unwrap_or(TREES);
    let seeds = one.map_or(1..=trees, |seed| seed..=seed);
    let mut malformed = BTreeSet::new();
    let (mut paths, mut left_out) = (0, 0);
    for seed in seeds {
        let mut random = StdRng::seed_from_u64(seed);
        let tree = Tree::random(&mut random);
        let with_git = random.random_ratio(1, 2);
        let mut files = vec![];
        let directories = tree.paths.iter().filter(|(_, is_directory)| *is_directory).map(|(path, _)| path);
        for directory in [&PathBuf::new()].into_iter().chain(directories) {
            if directory == Path::new("") || random.random_ratio(1, 3) {
                files.push(directory.join(GIT));
                if !with_git {
                    files.push(directory.join(OURS));
                }
            }
        }
        let (excludes, nothing) = (PathBuf::from(".git/excludes"), Path::new("/dev/null"));
        if with_git {
            files.extend([excludes.clone(), PathBuf::from(".git/info/exclude")]);
        }
        let mut written: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        for file in files {
            // The .gantryignore has the same text as the .gitignore beside it.
            let text = match written.last() {
                Some((_, text)) if file.ends_with(OURS) => text.clone(),
                _ => random_rules(&mut random, &tree.paths, &mut malformed),
            };
            tree.write(&file, &text);
            written.push((file, text));
        }
        let git = tree.git(if with_git { &excludes } else { nothing });
        let read = |top: &Path| Ok(Some(top.join(&excludes)));
        let ours = tree.ours(Rules::with_excludes_file(tree.root.path(), with_git, Vec::new(), read));
        if let Some(path) = git.symmetric_difference(&ours).next() {
            let written: String = written
                .iter()
                .map(|(file, text)| format!("\n{}: \"{}\"", file.display(), text.escape_ascii()))
                .collect();
            let by_git = git.contains(path);
            panic!("GANTRY_SEED={seed}: git leaves out {path:?}: {by_git}, gantry: {}{written}", !by_git);
        }
        paths += tree.paths.len();
        left_out += git.len();
    }
    if one.is_none() {
        assert!(left_out > paths / 10 && left_out < paths * 9 / 10, "{left_out} of {paths} are left out");
        assert!(malformed.len() > 50, "{} malformed lines", malformed.len());
    }

    // Lines that Gantry rejects match nothing in git.
    let mut tree = Tree::new();
    let join = |name: &&[u8]| {
        NAMES.map(|below| PathBuf::from(OsStr::from_bytes(&[name, &b"/"[..], below].concat())))
    };
    let single = NAMES.iter().map(|name| PathBuf::from(OsStr::from_bytes(name)));
    tree.paths = single.chain(NAMES.iter().flat_map(join)).map(|path| (path, false)).collect();
    let positive = malformed.iter().map(|line| line.strip_prefix(b"!").unwrap_or(line));
    let lines: Vec<_> = positive.filter(|line| !line.starts_with(b"!") && !line.starts_with(b"#")).collect();
    tree.write(Path::new(GIT), &lines.join(&b'\n'));
    assert_eq!(tree.git(Path::new("/dev/null")), BTreeSet::new());
}

#[test]
fn character_classes_match_git() {
    let mut tree = Tree::new();
    for class in CLASSES {
        fs::create_dir(tree.root.path().join(class)).expect("made");
        tree.write(&Path::new(class).join(GIT), format!("x[[:{class}:]]\n").as_bytes());
        let names = (1..=255).filter(|byte| *byte != b'/').map(|byte| [b'x', byte]);
        tree.paths.extend(names.map(|name| (Path::new(class).join(OsStr::from_bytes(&name)), false)));
    }
    let ours = Rules::with_excludes_file(tree.root.path(), true, Vec::new(), |_| Ok(None));
    assert_eq!(tree.ours(ours), tree.git(Path::new("/dev/null")));
}
