//! Data of git outside of the working tree: `info/exclude`, the excludes file of the user, and
//! tracked paths.
//!
//! [`super::Rules`] uses it with `--gitignore`.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// Prefix of the path in a `.git` that is a file.
const LINK: &[u8] = b"gitdir: ";

/// Returns the path of `info/exclude` for the working tree at `directory`. `None`: it is not a
/// working tree.
pub(super) fn info_exclude(directory: &Path) -> anyhow::Result<Option<PathBuf>> {
    let git = directory.join(".git");
    let common = match git.metadata() {
        Ok(found) if found.is_dir() => git,
        // A submodule, or an additional working tree of a repository.
        Ok(found) if found.is_file() => {
            let text = super::read_file(&git, true)?.unwrap_or_default();
            let Some(target) = text.strip_prefix(LINK) else { return Ok(None) };
            let git = directory.join(path(target));
            match super::read_file(&git.join("commondir"), true)? {
                Some(common) => git.join(path(&common)),
                None => git,
            }
        }
        _ => return Ok(None),
    };
    Ok(Some(common.join("info/exclude")))
}

/// Returns the tracked paths below `directory`, relative to it. Empty: there is no repository.
pub(super) fn tracked(directory: &Path) -> anyhow::Result<BTreeSet<PathBuf>> {
    if !directory.ancestors().any(|directory| directory.join(".git").exists()) {
        return Ok(BTreeSet::new());
    }
    let mut git = git(directory);
    // A repository of another user may be read, but programs that it names must not run. Git runs
    // them to fetch missing objects, for example.
    git.args(["-c", "safe.directory=*", "-c", "core.fsmonitor=false"]);
    git.env("GIT_ALLOW_PROTOCOL", "none").env("GIT_NO_LAZY_FETCH", "1");
    git.args(["ls-files", "-z", "--cached"]);
    let answer = git
        .output()
        .context("cannot run git to list tracked files; install git, or leave out --gitignore")?;
    if !answer.status.success() {
        let why = String::from_utf8_lossy(&answer.stderr);
        if why.contains("not a git repository") {
            return Ok(BTreeSet::new());
        }
        bail!(
            "git cannot list tracked files: {}; repair the repository, or leave out --gitignore",
            why.trim_end()
        );
    }
    let paths = answer.stdout.split(|byte| *byte == 0).filter(|path| !path.is_empty());
    Ok(paths.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect())
}

/// Makes a git command for a working tree, independent of the environment of the caller.
pub(super) fn git(directory: &Path) -> Command {
    let mut git = Command::new("git");
    git.arg("-C").arg(directory).env("LC_ALL", "C").stdin(Stdio::null());
    for variable in [
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_COMMON_DIR",
        "GIT_PREFIX",
        "GIT_CEILING_DIRECTORIES",
    ] {
        git.env_remove(variable);
    }
    git
}

/// Returns the path of the excludes file for the working tree at `top`. `None`: there is none.
pub(super) fn excludes_file(top: &Path) -> anyhow::Result<Option<PathBuf>> {
    let mut git = git(top);
    git.args(["config", "-z", "--type=path", "--get", "core.excludesFile"]);
    let answer = match git.output() {
        // Without git, only the default file can exist.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(default_excludes_file()),
        answer => answer.context("cannot run git to read core.excludesFile")?,
    };
    match answer.status.code() {
        Some(0) => {
            let value = answer.stdout.strip_suffix(&[0]).unwrap_or(&answer.stdout);
            Ok((!value.is_empty()).then(|| top.join(OsStr::from_bytes(value))))
        }
        Some(1) => Ok(default_excludes_file()),
        _ => bail!(
            "git cannot read core.excludesFile: {}; repair the repository, or leave out --gitignore",
            String::from_utf8_lossy(&answer.stderr).trim_end()
        ),
    }
}

fn default_excludes_file() -> Option<PathBuf> {
    let directory = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = directory("XDG_CONFIG_HOME").or_else(|| Some(directory("HOME")?.join(".config")))?;
    Some(config.join("git/ignore"))
}

/// Parses a path that is the first line of a file of git.
fn path(text: &[u8]) -> &Path {
    let end = text.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
    Path::new(OsStr::from_bytes(&text[..end]))
}
