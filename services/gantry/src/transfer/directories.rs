//! Paths of the caller's directories: which of them is the same, or inside another one, and links in them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::cli::values::{InputArg, OutputArg, Source};

/// Whether an output starts with the contents of a directory and comes back to it.
pub(crate) fn is_in_place(input: &InputArg, output: &OutputArg) -> bool {
    let (Source::Directory(from), Some(to)) = (&input.source, &output.directory) else { return false };
    // One directory may have several paths.
    let id = |path: &Path| path.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok();
    input.name == output.name && id(from).is_some() && id(from) == id(to)
}

/// Refuses a path with a symbolic link in it, which an earlier result may have made.
///
/// The way to the current directory is the caller's own, by whichever name the shell knows it.
pub(crate) fn refuse_links(directory: &Path) -> anyhow::Result<()> {
    let same = |a: &Path, b: &Path| {
        let id = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
        id(a).is_some() && id(a) == id(b)
    };
    let logical = std::env::var_os("PWD").map(PathBuf::from).filter(|here| same(here, Path::new(".")));
    let below = logical.and_then(|here| directory.strip_prefix(&here).ok().map(Path::to_owned));
    let mut at = PathBuf::new();
    for component in below.as_deref().unwrap_or(directory).components() {
        at.push(component);
        let Ok(target) = std::fs::read_link(&at) else { continue };
        bail!(
            "{at:?} is a symbolic link to {target:?}, which an earlier result may have made; name the directory that it leads to, \
             or allow it with --follow-links"
        );
    }
    Ok(())
}

/// Refuses a relative path with a symbolic link in it. Results are mostly below this directory, and links elsewhere are the machine's.
pub(crate) fn refuse_links_here(path: &Path) -> anyhow::Result<()> {
    if path.is_relative() { refuse_links(path) } else { Ok(()) }
}

/// Where the targets of outputs lie inside of an input, relative to it. One that is the input itself is no part of it.
pub(crate) fn inside<'a>(input: &Path, targets: impl IntoIterator<Item = &'a Path>) -> Vec<PathBuf> {
    let Ok(input) = input.canonicalize() else { return Vec::new() };
    let resolved = targets.into_iter().filter_map(resolve);
    resolved
        .filter_map(|target| target.strip_prefix(&input).ok().map(Path::to_owned))
        .filter(|relative| !relative.as_os_str().is_empty())
        .collect()
}

/// The path without symbolic links, also where its end does not exist yet.
pub(crate) fn resolve(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    for (depth, ancestor) in path.ancestors().enumerate() {
        if let Ok(resolved) = ancestor.canonicalize() {
            let rest: PathBuf = path.components().skip(path.components().count() - depth).collect();
            return Some(if depth == 0 { resolved } else { resolved.join(rest) });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn targets_inside_of_an_input_are_found_though_they_do_not_exist_yet() {
        let root = tempfile::tempdir().expect("a directory");
        let input = root.path().join("src");
        fs::create_dir_all(input.join("a")).expect("made");
        std::os::unix::fs::symlink(&input, root.path().join("link")).expect("made");
        let targets = [
            input.join("out"),
            input.join("a/../new/deep"),
            root.path().join("link/a"),
            root.path().join("other"),
            input.clone(),
        ];
        let found = inside(&input, targets.iter().map(PathBuf::as_path));
        assert_eq!(found, ["out", "new/deep", "a"].map(PathBuf::from).to_vec());
    }
}
