//! Files and directories: written whole or not at all, removed whether they are there or not.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use runtime::RuntimeError;

/// Wraps what the system says while `doing` something to `path`.
pub(super) fn at(doing: &str, path: &Path) -> impl FnOnce(io::Error) -> RuntimeError {
    let doing = format!("{doing} {}", path.display());
    move |error| RuntimeError::io(doing, error)
}

/// Makes a directory that may be there already.
pub(super) fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// Removes a file that may be gone already.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes a directory with all that is in it, following no links.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Makes what happened in a directory durable.
fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Writes a new file, durably. A crash leaves it absent, or cut short.
fn write_new(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(contents)?;
    file.sync_all()
}

/// Writes a file, or leaves the one that is there, durably.
pub(super) fn write_durably(path: &Path, contents: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    remove_file(&temporary)?;
    write_new(&temporary, contents)?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Writes a file that is not there, durably and whole: whoever dies meanwhile, and however, it is absent or complete. Those who may do so at
/// the same time are told apart by `writer`; one of them succeeds.
pub(super) fn write_once(path: &Path, writer: &str, contents: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension(writer);
    write_new(&temporary, contents)?;
    rename_exclusively(&temporary, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Reads a file that may not be there.
pub(super) fn read_if_there(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether something is there, without following a link.
pub(super) fn exists(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Renames `from`, which must exist, to `to`, which must not. Of several that try with the same `from`, one succeeds.
pub(super) fn rename_exclusively(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags};
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// The handles that things in `directory` are named for, with or without one of `prefixes`; other names are nobody's.
pub(super) fn handles_in<H: std::str::FromStr>(
    directory: &Path,
    prefixes: &[&str],
) -> Result<Vec<H>, RuntimeError> {
    let mut handles = Vec::new();
    for entry in fs::read_dir(directory).map_err(at("list", directory))? {
        let name = entry.map_err(at("list", directory))?.file_name();
        let name = name.to_string_lossy();
        let handle = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(&name);
        handles.extend(handle.parse::<H>().ok());
    }
    Ok(handles)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    /// Where the program that is killed writes.
    const KILLED: &str = "GANTRY_TEST_WRITE_ONCE";
    const LENGTH: usize = 1 << 20;

    #[test]
    fn what_was_killed_while_it_wrote_has_written_all_or_nothing() {
        let name = "host::files::tests::what_was_killed_while_it_wrote_has_written_all_or_nothing";
        if let Some(directory) = std::env::var_os(KILLED) {
            for number in 0.. {
                let path = Path::new(&directory).join(number.to_string());
                write_once(&path, "writer", &vec![b'x'; LENGTH]).expect("written");
                println!("wrote one");
            }
        }
        let (mut whole, mut absent) = (0, 0);
        for round in 0..40 {
            let directory = tempfile::tempdir().expect("a directory");
            let mut writer = Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", name, "--nocapture"])
                .env(KILLED, directory.path())
                .stdout(Stdio::piped())
                .spawn()
                .expect("it starts");
            // It is at the next one; each time it is killed a little later.
            let mut said = BufReader::new(writer.stdout.take().expect("piped")).lines();
            let wrote = said.any(|line| line.is_ok_and(|line| line.contains("wrote one")));
            assert!(wrote, "it ended");
            std::thread::sleep(std::time::Duration::from_micros(75 * round));
            writer.kill().expect("killed");
            writer.wait().expect("ended");
            for entry in fs::read_dir(directory.path()).expect("a list") {
                let path = entry.expect("a file").path();
                if path.extension().is_some() {
                    absent += 1;
                    continue;
                }
                assert_eq!(
                    fs::metadata(&path).expect("it is there").len(),
                    LENGTH as u64,
                    "{}",
                    path.display()
                );
                whole += 1;
            }
        }
        eprintln!("{whole} whole, {absent} absent");
        assert!(whole >= 40 && absent > 0, "{whole} whole, {absent} absent: nothing was cut short");
    }
}
