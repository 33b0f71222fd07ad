//! Checks of a program file: the interpreter or loader that the kernel needs, and does not name if
//! it is missing.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use crate::runtimes::host::mounts;

/// Size of the file header in which the kernel looks for an interpreter, in bytes.
const HEAD: u64 = 256;
/// Depth limit of interpreters that are scripts.
const SCRIPTS: usize = 4;
/// Directories that are mounted only when the container starts.
const NOT_YET_THERE: [&str; 3] = ["/proc", "/sys", "/dev"];
/// Longest name of a dynamic loader, in bytes.
const LOADER_NAME: usize = 4096;

/// The context of a lookup.
#[derive(Clone, Copy)]
pub(super) struct Lookup<'a> {
    /// The container's root, with all mounts except those in [`NOT_YET_THERE`].
    pub(super) root: BorrowedFd<'a>,
    /// The working directory.
    pub(super) directory: &'a Path,
    /// Whether the user is root, who may execute every file that any user may execute.
    pub(super) as_root: bool,
}

impl Lookup<'_> {
    /// Returns why the first existing path of `candidates` cannot be executed, if a file that it
    /// needs is missing. `None`: the kernel decides.
    pub(super) fn missing_part(self, candidates: &[CString]) -> Option<String> {
        let path = |candidate: &CString| self.directory.join(OsStr::from_bytes(candidate.as_bytes()));
        let mut found = candidates.iter().filter(|candidate| self.exists(&path(candidate)));
        let program = found.next()?;
        let file = self.open(&path(program))?;
        let mode = file.metadata().ok()?.permissions();
        let executed_by = std::os::unix::fs::PermissionsExt::mode(&mode) & 0o111;
        // If the user may not execute the first candidate, the kernel tries the next one.
        let certain =
            if self.as_root { executed_by != 0 } else { executed_by == 0o111 && found.next().is_none() };
        let missing = if certain { self.find_missing_part(&file, SCRIPTS).ok()?? } else { return None };
        Some(format!("`{}` {missing}", program.to_string_lossy()))
    }

    fn find_missing_part(self, file: &File, scripts: usize) -> io::Result<Option<String>> {
        let mut head = Vec::new();
        file.take(HEAD).read_to_end(&mut head)?;
        let (name, what) = match (interpreter(&head), loader(file, &head)?) {
            (Some(interpreter), _) => (interpreter, "interpreter"),
            (None, Some(loader)) => (loader, "dynamic loader"),
            (None, None) => return Ok(None),
        };
        let path = self.directory.join(OsStr::from_bytes(&name));
        if NOT_YET_THERE.iter().any(|place| path.starts_with(place)) {
            return Ok(None);
        }
        let shown = String::from_utf8_lossy(&name).into_owned();
        if !self.exists(&path) {
            return Ok(Some(match shown.strip_suffix('\r') {
                Some(meant) => format!(
                    "has Windows line ends: its first line names the interpreter `{meant}` with a carriage return (\\r) at the end; \
                     remove these, for example with `sed -i 's/\\r$//'`"
                ),
                None => format!("needs the {what} `{shown}`, which does not exist in the image"),
            }));
        }
        match (self.open(&path), scripts.checked_sub(1)) {
            (Some(next), Some(scripts)) if what == "interpreter" => {
                let missing = self.find_missing_part(&next, scripts)?;
                Ok(missing.map(|missing| format!("needs the interpreter `{shown}`, which {missing}")))
            }
            _ => Ok(None),
        }
    }

    /// Whether a file exists, or may exist. A path that cannot be checked is left to the kernel.
    fn exists(self, path: &Path) -> bool {
        match mounts::open_in(self.root, path, OFlags::PATH) {
            Ok(_) => true,
            Err(error) => !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory),
        }
    }

    /// Opens a regular file.
    fn open(self, path: &Path) -> Option<File> {
        let found = mounts::open_in(self.root, path, OFlags::PATH).ok()?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(found.as_fd()).ok()?.st_mode);
        kind.is_file().then(|| File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).ok())?
    }
}

/// The interpreter in the first line of a script.
fn interpreter(head: &[u8]) -> Option<Vec<u8>> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | 0)).filter(|word| !word.is_empty());
    words.next().map(<[u8]>::to_vec)
}

/// The dynamic loader of a 64-bit program for the processors of this machine.
fn loader(file: &File, head: &[u8]) -> io::Result<Option<Vec<u8>>> {
    const NAMES_LOADER: u32 = 3;
    let machine = match std::env::consts::ARCH {
        "x86_64" => 62,
        "aarch64" => 183,
        _ => return Ok(None),
    };
    let number = |bytes: &[u8], at: usize, length: usize| {
        let bytes = bytes.get(at..at + length)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    let is_of_this_machine = head.starts_with(b"\x7fELF\x02\x01") && number(head, 18, 2) == Some(machine);
    let table = (number(head, 32, 8), number(head, 54, 2), number(head, 56, 2));
    let (true, (Some(start), Some(size @ 56..=256), Some(count))) = (is_of_this_machine, table) else {
        return Ok(None);
    };
    for index in 0..count {
        let mut entry = [0; 56];
        if file.read_at(&mut entry, start.saturating_add(index * size))? < entry.len() {
            return Ok(None);
        }
        if number(&entry, 0, 4) == Some(NAMES_LOADER.into()) {
            let (at, length) = (number(&entry, 8, 8).unwrap_or(0), number(&entry, 32, 8).unwrap_or(0));
            let mut name = vec![0; usize::try_from(length).unwrap_or(usize::MAX).min(LOADER_NAME)];
            file.read_exact_at(&mut name, at)?;
            return Ok(name
                .split(|byte| *byte == 0)
                .next()
                .map(<[u8]>::to_vec)
                .filter(|name| !name.is_empty()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::Mode;

    use super::*;

    fn missing(root: &Path, candidates: &[&str], as_root: bool) -> Option<String> {
        let opened = rustix::fs::open(root, OFlags::PATH, Mode::empty()).expect("open");
        let lookup = Lookup { root: opened.as_fd(), directory: Path::new("/work"), as_root };
        let candidates: Vec<_> = candidates.iter().map(|name| CString::new(*name).expect("no NUL")).collect();
        lookup.missing_part(&candidates)
    }

    #[test]
    fn missing_interpreter_is_named() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let root = directory.path();
        let write = |name: &str, text: &[u8], mode| {
            fs::create_dir_all(root.join(name).parent().expect("a directory"))?;
            fs::write(root.join(name), text)?;
            fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode))
        };
        fs::create_dir_all(root.join("bin"))?;
        let sh: &[u8] = b"\x7fELF";
        write("bin/sh", sh, 0o755)?;
        write("work/good", b"#! /bin/sh -e\n", 0o755)?;
        write("work/bad", b"#!/no/such -e\n", 0o755)?;
        write("work/windows", b"#!/bin/sh\r\necho\r\n", 0o755)?;
        write("work/nested", b"#!/work/bad\n", 0o755)?;
        write("work/dev", b"#!/dev/fd/3\n", 0o755)?;
        write("work/closed", b"#!/no/such\n", 0o700)?;
        write("work/none", b"#!/no/such\n", 0o644)?;
        write("bin/bad", b"#!/bin/sh\n", 0o755)?;
        let of = |name: &str| missing(root, &[name], true).unwrap_or_default();
        for fine in ["./good", "/bin/sh", "./dev", "./none", "./absent", "."] {
            assert_eq!(of(fine), "", "{fine}");
        }
        let text = of("./bad");
        assert!(text.starts_with("`./bad` needs the interpreter `/no/such`"), "{text}");
        let text = of("./windows");
        assert!(text.contains("Windows line ends") && text.contains("`/bin/sh`"), "{text}");
        let text = of("nested");
        assert!(text.contains("`/work/bad`, which needs the interpreter `/no/such`"), "{text}");
        assert!(
            missing(root, &["./closed"], true).is_some() && missing(root, &["./closed"], false).is_none()
        );
        let both = ["/work/bad", "/bin/bad"];
        assert!(missing(root, &both, true).is_some(), "root executes the first");
        assert!(missing(root, &both, false).is_none(), "another user may not search its directory");
        assert!(missing(root, &["/absent/bad", "/bin/bad"], true).is_none());
        Ok(())
    }

    #[test]
    fn missing_loader_is_named() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        fs::copy(std::env::current_exe()?, directory.path().join("program"))?;
        let head = fs::read(directory.path().join("program"))?;
        let file = File::open(directory.path().join("program"))?;
        let Some(loader) = loader(&file, &head[..256])? else {
            eprintln!("not applicable: this program is static, or of another machine");
            return Ok(());
        };
        let loader = String::from_utf8_lossy(&loader).into_owned();
        let text = missing(directory.path(), &["/program"], true).expect("missing");
        assert!(text.contains(&format!("the dynamic loader `{loader}`")), "{text}");
        fs::create_dir_all(directory.path().join(&loader[1..]))?;
        assert_eq!(missing(directory.path(), &["/program"], true), None);
        Ok(())
    }
}
