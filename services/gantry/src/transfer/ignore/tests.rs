use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use super::*;

fn tree<T: AsRef<[u8]>>(files: &[(&str, T)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a directory");
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("below the root")).expect("made");
        fs::write(path, text).expect("written");
    }
    root
}

/// Makes rules without the excludes file of the user who runs the test.
fn rules(root: &Path, gitignore: bool) -> Rules {
    Rules::with_excludes_file(root, gitignore, Vec::new(), |_| Ok(None))
}

fn excluded(rules: &Rules, paths: &[(&str, bool)]) -> Vec<bool> {
    paths.iter().map(|(path, is_directory)| rules.exclude(Path::new(path), *is_directory)).collect()
}

/// Returns the paths that one ignore file excludes. A path that ends in a slash is a directory.
fn left_out<'a, P: AsRef<[u8]> + ?Sized>(text: &[u8], paths: &[&'a P]) -> Vec<&'a [u8]> {
    let root = tree(&[(OURS, text)]);
    let rules = rules(root.path(), false);
    let excludes = |path: &[u8]| {
        let (is_directory, path) = path.strip_suffix(b"/").map_or((false, path), |path| (true, path));
        rules.exclude(Path::new(OsStr::from_bytes(path)), is_directory)
    };
    let left_out = paths.iter().map(|path| (*path).as_ref()).filter(|path| excludes(path)).collect();
    rules.finish().expect("understood");
    left_out
}

/// Returns the error of an upload of the tree at `root`, with `@` in place of `root`.
fn failure(root: &Path, gitignore: bool) -> String {
    let rules = rules(root, gitignore);
    assert!(rules.exclude(Path::new("secret"), false), "nothing is sent");
    let error = rules.finish().expect_err("a problem");
    crate::ending::error::describe(&error).replace(&root.display().to_string(), "@")
}

#[test]
fn deeper_gantryignore_wins() {
    let root = tree(&[(OURS, "*.log\n/target/\n"), ("a/.gantryignore", "!keep.log\n")]);
    let paths = [
        ("x.log", false),
        ("a/x.log", false),
        ("a/keep.log", false),
        ("target", true),
        ("target", false),
        ("a/target", true),
        ("x.txt", false),
    ];
    let rules = rules(root.path(), false);
    assert_eq!(excluded(&rules, &paths), [true, true, false, true, false, false, false]);
}

#[test]
fn gantryignore_wins_over_gitignore() {
    let root = tree(&[(GIT, "generated/\n*.o\n"), (OURS, "!generated/\n")]);
    let asked = rules(root.path(), true);
    assert_eq!(excluded(&asked, &[("generated", true), ("a/b.o", false)]), [false, true]);
    let not = rules(root.path(), false);
    assert_eq!(excluded(&not, &[("a/b.o", false)]), [false]);
}

#[test]
fn gitignore_above_the_root_counts_within_repository() {
    let root = tree(&[
        (GIT, "outside\n"),
        ("repo/.git/HEAD", ""),
        ("repo/.git/info/exclude", "excluded\n"),
        ("repo/.gitignore", "/sub/only-here\n*.o\n"),
        ("repo/sub/x", ""),
    ]);
    let rules = rules(&root.path().join("repo/sub"), true);
    let paths = [
        ("only-here", false),
        ("a/only-here", false),
        ("a.o", false),
        ("outside", false),
        ("excluded", false),
    ];
    assert_eq!(excluded(&rules, &paths), [true, false, true, false, true]);
}

#[test]
fn tracked_files_are_not_ignored() {
    let root = tree(&[
        (GIT, "build/\n*.log\n/module/\n/was-file/\n"),
        ("build/kept/file", ""),
        ("build/junk", ""),
        ("kept.log", ""),
        ("secret.log", ""),
        (OURS, "/secret.log\n"),
        ("sub/deep/kept.log", ""),
        ("module/made.log", ""),
        ("module/kept.log", ""),
        ("was-file/secret", ""),
    ]);
    let git = |directory: &str, arguments: &[&str]| {
        let mut git = super::git::git(&root.path().join(directory));
        git.args(["-c", "user.name=n", "-c", "user.email=e", "-c", "protocol.file.allow=always"]);
        let output = git.args(arguments).output().expect("git runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for directory in ["", "module"] {
        git(directory, &["init", "--quiet"]);
    }
    git("module", &["add", "--force", "kept.log"]);
    git("module", &["commit", "--quiet", "--message=m"]);
    let was_file = root.path().join("was-file");
    fs::rename(&was_file, root.path().join("aside")).expect("moved");
    fs::write(&was_file, "").expect("written");
    git("", &["add", "was-file"]);
    fs::remove_file(&was_file).expect("removed");
    fs::rename(root.path().join("aside"), &was_file).expect("moved");
    git("", &["add", "--force", "build/kept/file", "kept.log", "secret.log", "sub/deep/kept.log", "module"]);
    let all = [
        ("build", true),
        ("build/kept", true),
        ("build/kept/file", false),
        ("build/kept/made", false),
        ("build/junk", false),
        ("build/other", true),
        ("kept.log", false),
        ("secret.log", false),
        ("other.log", false),
        ("module", true),
        ("module/kept.log", false),
        ("module/made.log", false),
        ("was-file", true),
    ];
    let left_out = [false, false, false, true, true, true, false, true, true, false, false, true, true];
    let whole = rules(root.path(), true);
    assert_eq!(excluded(&whole, &all), left_out);
    whole.finish().expect("understood");
    let below = [("deep", true), ("deep/kept.log", false), ("deep/made.log", false)];
    assert_eq!(excluded(&rules(&root.path().join("sub"), true), &below), [false, false, true]);

    // An unreadable index fails the upload.
    fs::write(root.path().join(".git/index"), "damaged").expect("written");
    let damaged = rules(root.path(), true);
    assert!(damaged.exclude(Path::new("kept.log"), false));
    let error = crate::ending::error::describe(&damaged.finish().expect_err("a damaged index"));
    assert!(error.starts_with("git cannot list tracked files: ") && error.contains("index"), "{error}");
}

#[test]
fn excludes_of_git_lose_to_gitignore() {
    let root = tree(&[
        ("excludes", "/a\nb\nc\n"),
        ("repo/.git/info/exclude", "!b\nc\n/d\n"),
        ("repo/.gitignore", "!c\n"),
        ("repo/sub/a", ""),
        ("repo/module/.git", "gitdir: ../.git/modules/module\n"),
        ("repo/.git/modules/module/info/exclude", "/only-in-module\n"),
        ("tree/.git", "gitdir: ../repo/.git/worktrees/tree\n"),
        ("repo/.git/worktrees/tree/commondir", "../..\n"),
    ]);
    let (repo, excludes) = (root.path().join("repo"), root.path().join("excludes"));
    let read = |root: &Path| {
        Rules::with_excludes_file(root, true, Vec::new(), |top| {
            assert!(top.join(".git").exists());
            Ok(Some(excludes.clone()))
        })
    };
    let paths =
        ["a", "sub/a", "b", "c", "d", "only-in-module", "module/only-in-module"].map(|path| (path, false));
    assert_eq!(excluded(&read(&repo), &paths), [true, false, false, false, true, false, true]);
    let tree = read(&root.path().join("tree"));
    assert_eq!(excluded(&tree, &paths), [true, false, false, true, true, false, false]);
    let sub = read(&repo.join("sub"));
    assert_eq!(excluded(&sub, &[("a", false), ("d", false)]), [false, false], "they begin above it");
}

#[test]
fn git_names_its_excludes_file() {
    let root = tree(&[("x", "")]);
    let git = |arguments: &[&str]| {
        let git = std::process::Command::new("git").arg("-C").arg(root.path()).args(arguments).output();
        assert!(git.expect("git is installed").status.success());
    };
    git(&["init", "--quiet"]);
    git(&["config", "core.excludesFile", "excludes"]);
    let found = git::excludes_file(root.path()).expect("git runs");
    assert_eq!(found, Some(root.path().join("excludes")));
    git(&["config", "core.excludesFile", ""]);
    assert_eq!(git::excludes_file(root.path()).expect("git runs"), None);
    fs::write(root.path().join(".git/config"), "[").expect("written");
    let error = git::excludes_file(root.path()).expect_err("git fails").to_string();
    assert!(error.contains("bad config line"), "{error}");
}

#[test]
fn targets_of_outputs_are_left_out() {
    let root = tree::<&str>(&[]);
    let rules = Rules::new(root.path(), false, vec![PathBuf::from("out/x")]);
    assert_eq!(excluded(&rules, &[("out", true), ("out/x", true), ("out/xy", true)]), [false, true, false]);
}

#[test]
fn braces_are_literal() {
    assert_eq!(
        left_out(b"*.py{}\na{b,c}\n", &["a.py", "a.py{}", "ab", "a{b,c}"]),
        [&b"a.py{}"[..], b"a{b,c}"]
    );
    assert_eq!(
        left_out(b"{{name}}/x/\n{\n", &["{{name}}/x/", "{{name}}/x", "{"]),
        [&b"{{name}}/x/"[..], b"{"]
    );
}

#[test]
fn bytes_beyond_utf8_concern_their_line() {
    let paths: [&[u8]; 5] = [b"other", b"secret", b"caf\xe9", b"caf\xe8", b"caf"];
    let matched = left_out(b"other\n# caf\xe9\ncaf[\xe9-\xff]\nsecret\n", &paths);
    assert_eq!(matched, [&b"other"[..], b"secret", b"caf\xe9"]);
    assert_eq!(left_out(b"caf?\n", &paths), [&b"caf\xe9"[..], b"caf\xe8"]);
    // Git compares bytes, and this letter has two.
    assert!(left_out(b"caf?\n", &["caf\u{e9}"]).is_empty());
}

#[test]
fn classes_match_as_in_git() {
    let paths = ["a", "b", "c", "-", "]", "^", "\\", "A", "5", "/", "a/b"];
    let matched = |rule: &str| {
        let left_out = left_out(rule.as_bytes(), &paths);
        String::from_utf8(left_out.join(&b' ')).expect("text")
    };
    assert_eq!(matched("[a-b]"), "a b a/b");
    assert_eq!(matched("[!a-c]"), "- ] ^ \\ A 5");
    assert_eq!(matched("[^a-c]"), matched("[!a-c]"));
    assert_eq!(matched("[]a]"), "a ]");
    assert_eq!(matched("[a-]"), "a -");
    assert_eq!(matched("[\\]\\-b]"), "b - ] a/b");
    assert_eq!(matched("[\\\\]"), "\\");
    assert_eq!(matched("[[:upper:][:digit:]]"), "A 5");
    assert_eq!(matched("[c-a]"), "c", "the range is empty, and its first byte counts");
    assert_eq!(matched("a[/]b"), "", "no class matches a slash");
    assert_eq!(matched("a[]b]"), "", "it takes two bytes");
    assert_eq!(matched("[[:alpha]"), "a", "the second bracket is one of the class");
}

#[test]
fn double_star_spans_directories() {
    let paths = ["foo", "x/foo", "foo/bar", "foo/a/bar", "foo/a/b/bar", "xfoo", "foobar", "foo/x"];
    let matched = |rule: &str| {
        let left_out = left_out(rule.as_bytes(), &paths);
        String::from_utf8(left_out.join(&b' ')).expect("text")
    };
    assert_eq!(matched("**/foo"), "foo x/foo");
    assert_eq!(matched("foo/**/bar"), "foo/bar foo/a/bar foo/a/b/bar");
    assert_eq!(matched("foo/**"), "foo/bar foo/a/bar foo/a/b/bar foo/x");
    assert_eq!(matched("**foo"), "foo x/foo xfoo");
    assert_eq!(matched("foo/*"), "foo/bar foo/x");
    assert_eq!(matched("/foo"), "foo");
    assert_eq!(matched("**\\/bar"), "foo/bar foo/a/bar foo/a/b/bar", "its slash is escaped");
    assert_eq!(matched("**\\/foo"), "x/foo", "then it matches one directory at least");
    assert_eq!(matched("foo/b**r"), "foo/bar", "it is not all of a name");
    assert_eq!(matched("foo**/bar"), "foo/bar foo/a/bar foo/a/b/bar foobar", "as git has it");
}

#[test]
fn escapes_and_spaces_match_git() {
    let paths = ["a", "a ", "a\t", "#a", "!a", "\\a", "*", " ", "a\r"];
    let matched = |rule: &str| left_out(rule.as_bytes(), &paths).join(&b'|');
    assert_eq!(matched("a   \n"), b"a");
    assert_eq!(matched("a\\ \n"), b"a ");
    assert_eq!(matched("a\\   \n"), b"a ");
    assert_eq!(matched("a\t\n"), b"a\t", "only spaces are cut");
    assert_eq!(matched("#a\n"), b"");
    assert_eq!(matched("\\#a\n"), b"#a");
    assert_eq!(matched("\\!a\n"), b"!a");
    assert_eq!(matched("\\\\a\n"), b"\\a");
    assert_eq!(matched("\\*\n"), b"*");
    assert_eq!(matched("   \n\\ \n"), b" ");
    assert_eq!(matched("a\r\n\r\n"), b"a");
    assert_eq!(matched("a\r"), b"a", "also in the last line");
    assert_eq!(matched("a\r\r\n"), b"a\r");
    assert_eq!(matched("\u{feff}a\n"), b"a", "an editor has put the mark there");
    assert_eq!(matched("*\n\u{feff}!a\n").len(), paths.join("|").len(), "a mark counts only at the start");
}

#[test]
fn later_line_wins() {
    assert_eq!(left_out(b"*.o\n!a.o\n", &["a.o", "b.o"]), [b"b.o"]);
    assert_eq!(left_out(b"!a.o\n*.o\n", &["a.o", "b.o"]), [b"a.o", b"b.o"]);
    assert_eq!(
        left_out(b"a/\n!a/b\n", &["a/", "a/b"]),
        [b"a/"],
        "entries of an excluded directory are not considered"
    );
}

#[test]
fn patterns_that_match_no_path_are_allowed() {
    assert!(left_out(b"!\n/\n//\n./a\na//b\na//\n", &["a", "a/", "a/b"]).is_empty());
}

#[test]
fn malformed_lines_fail_with_their_number() {
    for (line, cause) in [
        ("[a", "the bracket `[` is not closed; write `\\[` for a bracket in a name"),
        ("a[]b", "the bracket `[` is not closed; write `\\[` for a bracket in a name"),
        ("![a-\\]/", "the bracket `[` is not closed; write `\\[` for a bracket in a name"),
        ("[[:alpha:", "the bracket `[` is not closed; write `\\[` for a bracket in a name"),
        ("foo\\", "the backslash at the end escapes nothing; write `\\\\` for a backslash in a name"),
        ("foo\\/", "the backslash at the end escapes nothing; write `\\\\` for a backslash in a name"),
        ("[[:word:]]", "the text between `[:` and `:]` is not a character class"),
        ("a\0b", "the line has a zero byte; the file must be text in UTF-8"),
    ] {
        let root = tree(&[(OURS, format!("# [\n\n*.log\n{line}\n"))]);
        let expected = format!("cannot parse \"@/.gantryignore:4\": {cause}");
        assert_eq!(failure(root.path(), false), expected, "{line:?}");
        fs::rename(root.path().join(OURS), root.path().join(GIT)).expect("renamed");
        assert_eq!(failure(root.path(), true), expected.replace(OURS, GIT));
        rules(root.path(), false).finish().expect("not asked for");
    }
}

#[test]
fn ten_malformed_lines_are_named() {
    let text = failure(tree(&[(OURS, "[\n".repeat(12))]).path(), false);
    assert!(text.starts_with("ignore files have errors:\n  cannot parse \"@/.gantryignore:1\": "), "{text}");
    assert!(text.ends_with("\n  and 2 more"), "{text}");
    assert_eq!(text.lines().count(), 12);
}

#[test]
fn unreadable_ignore_file_fails() {
    let root = tree::<&str>(&[]);
    let file = root.path().join(OURS);
    for target in ["nowhere", "/etc/hosts"] {
        symlink(target, &file).expect("linked");
        let link = "an ignore file must not be a symbolic link, as in git; use a regular file";
        assert_eq!(failure(root.path(), false), format!("cannot read \"@/.gantryignore\": {link}"));
        fs::remove_file(&file).expect("removed");
    }
    fs::create_dir(&file).expect("made");
    let other = "cannot read \"@/.gantryignore\": not a regular file; remove or rename the entry";
    assert_eq!(failure(root.path(), false), other);
    fs::remove_dir(&file).expect("removed");
    rustix::fs::mkfifoat(CWD, &file, Mode::RUSR).expect("made");
    assert_eq!(failure(root.path(), false), other, "and waits for no writer");
    fs::remove_file(&file).expect("removed");
    let _socket = UnixListener::bind(&file).expect("bound");
    assert!(failure(root.path(), false).starts_with("cannot read \"@/.gantryignore\": "));
    fs::remove_file(&file).expect("removed");
    if !rustix::process::geteuid().is_root() {
        fs::write(&file, "").expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).expect("set");
        assert_eq!(failure(root.path(), false), "cannot read \"@/.gantryignore\": Permission denied");
    }
}

#[test]
fn links_to_rules_outside_the_tree_are_followed() {
    let root = tree(&[("dotfiles/ignore", "*.o\n"), ("repo/.git/HEAD", "")]);
    let excludes = root.path().join("excludes");
    symlink("dotfiles/ignore", &excludes).expect("linked");
    let repo = root.path().join("repo");
    let rules = Rules::with_excludes_file(&repo, true, Vec::new(), |_| Ok(Some(excludes)));
    assert_eq!(excluded(&rules, &[("a.o", false)]), [true]);
}

#[test]
fn ignore_file_that_is_too_large_is_refused() {
    let root = tree(&[(OURS, "*.log\n")]);
    let file = File::options().write(true).open(root.path().join(OURS)).expect("there");
    file.set_len(2 << 20).expect("grown");
    let expected = "cannot read \"@/.gantryignore\": larger than 1 MiB, the limit of an ignore file";
    assert_eq!(failure(root.path(), false), expected);
}

#[test]
fn rules_in_deep_directories_count() {
    let root = tree::<&str>(&[]);
    let name = "d".repeat(250);
    let mut deep = PathBuf::new();
    let mut at = rustix::fs::open(root.path(), OFlags::PATH, Mode::empty()).expect("opened");
    for _ in 0..20 {
        rustix::fs::mkdirat(&at, &name, Mode::RWXU).expect("made");
        at = openat(&at, &name, OFlags::PATH, Mode::empty()).expect("opened");
        deep.push(&name);
    }
    let file = openat(&at, OURS, OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).expect("made");
    rustix::io::write(&file, b"*.o\n").expect("written");
    let rules = rules(root.path(), false);
    assert!(rules.exclude(&deep.join("a.o"), false));
    assert!(!rules.exclude(&deep.join("a.c"), false));
    rules.finish().expect("all was read");
}

#[test]
fn match_time_is_bounded_for_many_stars() {
    let rule = format!("{}b", "*a".repeat(100));
    assert!(left_out(rule.as_bytes(), &["a".repeat(250).as_str()]).is_empty());
    let rule = format!("{}b", "**/a*/".repeat(100));
    assert!(left_out(rule.as_bytes(), &["a/".repeat(1000).as_str()]).is_empty());
}

#[test]
fn directory_with_unsent_files_is_not_replaced() {
    let root = tree(&[("a/.gantryignore", ".env\n"), ("a/b/sent", "")]);
    refuse_unsent(root.path()).expect("all of it was sent");
    fs::write(root.path().join("a/b/.env"), "secret").expect("written");
    let refused = refuse_unsent(root.path()).expect_err("refused").to_string();
    assert!(refused.contains("\"a/b/.env\""), "{refused}");
    refuse_unsent(&root.path().join("missing")).expect("nothing is lost");
}
