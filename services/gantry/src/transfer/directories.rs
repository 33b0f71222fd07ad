//! Checks of local paths: the same directory, one inside the other, symbolic links.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::cli::values::{InputArg, OutputArg, Source};

/// Returns whether an output is in place: it has the name and the directory of an input.
pub(crate) fn is_in_place(input: &InputArg, output: &OutputArg) -> bool {
    let (Source::Directory(from), Some(to)) = (&input.source, &output.directory) else { return false };
    // One directory may have several paths.
    let id = |path: &Path| path.metadata().map(|metadata| (metadata.dev(), metadata.ino())).ok();
    input.name == output.name && id(from).is_some() && id(from) == id(to)
}

/// Rejects a path with a symbolic link, which an earlier result may have made.
///
/// Links in the path of the current directory are allowed, because the caller chose them.
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
            "{at:?} is a symbolic link to {target:?}, which an earlier result may have made; use the target of the link, \
             or allow it with --follow-links"
        );
    }
    Ok(())
}

/// Rejects a relative path with a symbolic link. Results are mostly written below the current
/// directory.
pub(crate) fn refuse_links_here(path: &Path) -> anyhow::Result<()> {
    if path.is_relative() { refuse_links(path) } else { Ok(()) }
}

/// Returns the targets of outputs that are inside of an input, relative to it. The input itself
/// does not count.
pub(crate) fn inside<'a>(input: &Path, targets: impl IntoIterator<Item = &'a Path>) -> Vec<PathBuf> {
    let Ok(input) = input.canonicalize() else { return Vec::new() };
    let resolved = targets.into_iter().filter_map(resolve);
    resolved
        .filter_map(|target| target.strip_prefix(&input).ok().map(Path::to_owned))
        .filter(|relative| !relative.as_os_str().is_empty())
        .collect()
}

/// Resolves the symbolic links of a path, whose end need not exist.
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
    fn missing_targets_inside_input_are_found() {
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
