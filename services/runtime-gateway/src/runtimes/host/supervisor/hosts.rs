//! The `/etc/hosts` of a container: the lines of its image, or of the container whose network it
//! joins, and the names of every container.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use crate::runtimes::host::containers::{is_content_error, read_file};
use crate::runtimes::host::mounts;

pub(super) const HOSTS: &str = "/etc/hosts";

/// Limit of a file for name resolution, in bytes.
const MAX_SIZE: u64 = 1 << 20;

const LOCALHOST: &str = "localhost";

const LOCAL: &str = "127.0.0.1";

/// Returns the `/etc/hosts` of a container. It has the lines of `joined`, or of the image, after
/// those of `local_names`. `None`: the file of the image stays, because it is complete, too large,
/// or a directory.
///
/// A symbolic link is resolved inside the container and replaced, because its target may be in a
/// directory that is empty when the container starts.
pub(super) fn contents(
    root: BorrowedFd<'_>,
    hostname: &str,
    local_names: &[String],
    joined: Option<Vec<u8>>,
) -> io::Result<Option<Vec<u8>>> {
    let kind = match mounts::open_in(root, Path::new(HOSTS), OFlags::PATH | OFlags::NOFOLLOW) {
        Ok(found) => Some(FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode)),
        Err(error) if is_missing(&error) => None,
        Err(error) => return Err(error),
    };
    if kind.is_some_and(FileType::is_dir) {
        return Ok(None);
    }
    let of_image = joined.is_none();
    let kept = if of_image { read(root, HOSTS)? } else { joined };
    let Some(kept) = kept else { return Ok(None) };
    let missing = missing(&kept, hostname);
    let first = missing_local(&kept, local_names);
    if of_image && first.is_empty() && missing.is_empty() && kind.is_some_and(FileType::is_file) {
        return Ok(None);
    }
    // The first address of a name counts.
    let mut contents = first.into_bytes();
    contents.extend_from_slice(&kept);
    if contents.last().is_some_and(|last| *last != b'\n') {
        contents.push(b'\n');
    }
    contents.extend_from_slice(missing.as_bytes());
    Ok(Some(contents))
}

/// Reads a file for name resolution. Empty if the file does not exist, or is not a regular file.
/// `None`: the file is too large.
pub(super) fn read(root: BorrowedFd<'_>, path: &str) -> io::Result<Option<Vec<u8>>> {
    let contents = match mounts::open_in(root, Path::new(path), OFlags::PATH) {
        Ok(found) => read_file(found.as_fd(), MAX_SIZE + 1)?,
        Err(error) if is_missing(&error) => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok((contents.len() as u64 <= MAX_SIZE).then_some(contents))
}

fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || is_content_error(error)
}

/// The lines of names in `local_names` that `contents` does not map to 127.0.0.1.
fn missing_local(contents: &[u8], local_names: &[String]) -> String {
    let is_mapped = |name: &String| {
        let mut first = addresses(contents).filter(|(_, names)| names.contains(&name.as_bytes()));
        first.next().is_some_and(|(address, _)| address == LOCAL.as_bytes())
    };
    local_names.iter().filter(|name| !is_mapped(name)).map(|name| format!("{LOCAL}\t{name}\n")).collect()
}

/// The lines that are missing in `contents`.
fn missing(contents: &[u8], hostname: &str) -> String {
    let named = |name: &str| -> Vec<&[u8]> {
        let of_name = addresses(contents).filter(|(_, names)| names.contains(&name.as_bytes()));
        of_name.map(|(address, _)| address).collect()
    };
    let is_ipv4 = |address: &[u8]| {
        std::str::from_utf8(address).is_ok_and(|address| address.parse::<Ipv4Addr>().is_ok())
    };
    let mut lines = String::new();
    if !named(LOCALHOST).into_iter().any(is_ipv4) {
        lines.push_str("127.0.0.1\tlocalhost\n");
    }
    if named(LOCALHOST).is_empty() {
        lines.push_str("::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    if named(hostname).is_empty() {
        lines.push_str(&format!("127.0.1.1\t{hostname}\n"));
    }
    lines
}

/// Each address with its names.
fn addresses(contents: &[u8]) -> impl Iterator<Item = (&[u8], Vec<&[u8]>)> {
    contents.split(|byte| *byte == b'\n').filter_map(|line| {
        let text = line.split(|byte| *byte == b'#').next().unwrap_or_default();
        let mut words = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        Some((words.next()?, words.collect()))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rustix::fs::Mode;

    use super::*;

    const ALL: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tname\n";

    #[test]
    fn lines_of_the_image_are_kept() {
        assert_eq!(missing(b"", "name"), ALL);
        assert_eq!(missing(b"# 127.0.0.1 localhost name\n", "name"), ALL);
        assert_eq!(missing(b"127.0.0.1 localhost\n10.0.0.1 x name", "name"), "");
        assert_eq!(missing(b"::1 localhost name\n\xff", "name"), "127.0.0.1\tlocalhost\n");
        assert_eq!(missing(b"127.0.0.1 localhost\n", "name"), "127.0.1.1\tname\n");
        assert_eq!(
            missing(b"10.1.1.1 localhost\n", "name"),
            "127.0.1.1\tname\n",
            "an address of the machine is not enough"
        );
    }

    #[test]
    fn local_names_precede_lines_of_the_image() {
        let names = ["db", "cache"].map(str::to_owned);
        assert_eq!(missing_local(b"10.0.0.1 db\n", &names), "127.0.0.1\tdb\n127.0.0.1\tcache\n");
        assert_eq!(missing_local(b"127.0.0.1 db\n10.0.0.1 db\n", &names), "127.0.0.1\tcache\n");
    }

    #[test]
    fn link_is_replaced_with_its_lines() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (root, etc) = (directory.path().join("root"), directory.path().join("root/etc"));
        fs::create_dir_all(&etc)?;
        fs::write(directory.path().join("secret"), "10.0.0.9 secret\n")?;
        let opened = rustix::fs::open(&root, OFlags::PATH, Mode::empty())?;
        let contents = || {
            let contents = contents(opened.as_fd(), "name", &[], None)?;
            Ok::<_, io::Error>(contents.map(|contents| String::from_utf8_lossy(&contents).into_owned()))
        };
        assert_eq!(contents()?.as_deref(), Some(ALL), "no file");
        for target in ["/nowhere", "hosts", "../../secret", "/etc"] {
            symlink(target, etc.join("hosts"))?;
            assert_eq!(contents()?.as_deref(), Some(ALL), "{target}");
            fs::remove_file(etc.join("hosts"))?;
        }
        symlink("/etc/own", etc.join("hosts"))?;
        let own = "127.0.0.1 localhost name other";
        fs::write(etc.join("own"), own)?;
        assert_eq!(contents()?, Some(format!("{own}\n")));
        fs::remove_file(etc.join("hosts"))?;
        fs::rename(etc.join("own"), etc.join("hosts"))?;
        assert_eq!(contents()?, None, "the file is complete");
        fs::write(etc.join("hosts"), vec![b' '; 1 + (1 << 20)])?;
        assert_eq!(contents()?, None, "the file is too large");
        fs::remove_file(etc.join("hosts"))?;
        fs::create_dir(etc.join("hosts"))?;
        assert_eq!(contents()?, None, "the path is a directory");
        Ok(())
    }
}
