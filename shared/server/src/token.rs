//! The token file of a cluster: its default path, and functions to read and create it.
//!
//! Every service binary presents the cluster token to the other services, and requires it from
//! callers over TCP. The command line reads the same file.
//!
//! Invariant: services that start at the same time with the same file use the same token. A hard
//! link enforces it, because it never replaces an existing file.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::OFlags;
use rustix::process::geteuid;

/// The directory of the default token file, below the state directory of the user. Gateways and the
/// cluster of `gantry up` keep their state elsewhere.
const DIRECTORY: &str = "gantry-services";
/// Maximum bytes that are read of a default token file.
const MAX_BYTES: u64 = 4096;
/// The state directory of root.
const ROOT_STATE_DIRECTORY: &str = "/var/lib";

/// Returns the default path of the token file: `$XDG_STATE_HOME/gantry-services/token` if the
/// variable is set, otherwise `/var/lib/gantry-services/token` for root and
/// `~/.local/state/gantry-services/token` for other users.
#[must_use]
pub fn default_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    default_file_of(state, geteuid().is_root(), std::env::home_dir())
}

fn default_file_of(state: Option<PathBuf>, root: bool, home: Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let state = match state.filter(absolute) {
        Some(state) => state,
        None if root => ROOT_STATE_DIRECTORY.into(),
        None => home.filter(absolute)?.join(".local/state"),
    };
    Some(state.join(DIRECTORY).join("token"))
}

/// Reads the token in the file at `path`.
///
/// # Errors
///
/// Fails if the file cannot be read, or does not contain exactly one token.
pub fn read(path: &Path) -> anyhow::Result<String> {
    parse(path, &fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?)
}

fn parse(path: &Path, text: &str) -> anyhow::Result<String> {
    let token = text.trim();
    anyhow::ensure!(!token.is_empty(), "cannot use the token file {}: it is empty", path.display());
    // The token must be valid in a header.
    anyhow::ensure!(
        token.bytes().all(|byte| byte.is_ascii_graphic()),
        "cannot use the token file {}: a token must consist of printable ASCII characters without spaces",
        path.display()
    );
    Ok(token.to_owned())
}

/// The default token file or its directory is not under the control of this user, so another user
/// may know the token.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot trust {}: it {why}, so another user may know or choose the token; remove it, or name a token file with --token-file",
    path.display()
)]
pub struct UntrustedFile {
    path: PathBuf,
    why: &'static str,
}

/// Checks that only this user and root may change a directory or file.
fn check_trusted(path: &Path, found: &fs::Metadata) -> Result<(), UntrustedFile> {
    let refuse = |why| Err(UntrustedFile { path: path.to_owned(), why });
    if found.is_symlink() {
        return refuse("is a symbolic link");
    }
    if found.uid() != geteuid().as_raw() && found.uid() != 0 {
        return refuse("belongs to another user");
    }
    if found.mode() & 0o022 != 0 {
        return refuse("is writable by its group or by others");
    }
    Ok(())
}

/// Reads the token in a default token file. The file and its directory must belong to this user or
/// root.
fn read_trusted(path: &Path) -> anyhow::Result<String> {
    let cannot = || format!("cannot read {}", path.display());
    let directory = path.parent().with_context(|| format!("the path {} has no directory", path.display()))?;
    check_trusted(directory, &fs::symlink_metadata(directory).with_context(cannot)?)?;
    check_trusted(path, &fs::symlink_metadata(path).with_context(cannot)?)?;
    // Only this user and root can replace the file between the check and this call.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let mut text = String::new();
    let file = File::options().read(true).custom_flags(flags).open(path).with_context(cannot)?;
    file.take(MAX_BYTES).read_to_string(&mut text).with_context(cannot)?;
    parse(path, &text)
}

/// Reads the token in the default token file. Returns `None` if the file does not exist.
///
/// # Errors
///
/// Fails if the file cannot be read, is an [`UntrustedFile`], or does not contain exactly one
/// token.
pub fn read_default() -> anyhow::Result<Option<(PathBuf, String)>> {
    let Some(path) = default_file() else { return Ok(None) };
    if fs::symlink_metadata(&path).is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(None);
    }
    let token = read_trusted(&path)?;
    Ok(Some((path, token)))
}

/// Reads the token in the file at `path`, and creates a missing file. Afterwards only this user may
/// access its directory.
pub(crate) fn read_or_make_private(path: &Path) -> anyhow::Result<String> {
    let directory = path.parent().with_context(|| format!("the path {} has no directory", path.display()))?;
    make_private(directory)?;
    make_if_missing(path)?;
    read_trusted(path)
}

/// Creates a token file at `path` that only this user may read, unless the file exists. Returns
/// whether it was created.
pub(crate) fn make_if_missing(path: &Path) -> anyhow::Result<bool> {
    if fs::symlink_metadata(path).is_ok() {
        return Ok(false);
    }
    let make = || {
        if let Some(directory) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        // The name is random, because a process in another container with the same directory may
        // have the same id.
        let temporary = path.with_extension(format!("{}.new", &random()?[..16]));
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
        let made = writeln!(file, "{}", random()?)
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::hard_link(&temporary, path));
        fs::remove_file(&temporary)?;
        match made {
            Ok(()) => Ok(true),
            // Another service has created the file at the same time.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    };
    make().with_context(|| format!("cannot create the token file {}", path.display()))
}

/// Replaces the token file at `path` with a new one that only this user may read. Returns the new
/// token.
///
/// # Errors
///
/// Fails if the file cannot be written.
pub fn replace(path: &Path) -> anyhow::Result<String> {
    let new = path.with_extension("new");
    let replace = || {
        // Another process may have the file of an interrupted start open, so it must not be reused.
        if let Err(error) = fs::remove_file(&new)
            && error.kind() != ErrorKind::NotFound
        {
            return Err(error);
        }
        let token = random()?;
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        writeln!(file, "{token}")?;
        fs::rename(&new, path)?;
        Ok(token)
    };
    replace().with_context(|| format!("cannot replace the token file {}", path.display()))
}

/// Returns 256 random bits in hexadecimal.
fn random() -> io::Result<String> {
    let mut bytes = [0_u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a string cannot fail.
        _ = write!(text, "{byte:02x}");
        text
    }))
}

/// Creates a directory that only this user may access, or restricts an existing one to this user.
/// Rejects a directory that others can write, because they may have put files there.
fn make_private(directory: &Path) -> anyhow::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("cannot create the directory {}", directory.display()))?;
    let found = fs::symlink_metadata(directory)
        .with_context(|| format!("cannot inspect the directory {}", directory.display()))?;
    check_trusted(directory, &found)?;
    anyhow::ensure!(
        found.is_dir() && found.uid() == geteuid().as_raw(),
        "cannot use {}: it is not a directory of this user",
        directory.display()
    );
    if found.mode() & 0o077 != 0 {
        fs::set_permissions(directory, Permissions::from_mode(0o700))
            .with_context(|| format!("cannot restrict the directory {} to this user", directory.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("the file exists").mode() & 0o777
    }

    #[test]
    fn default_file_follows_user_and_environment() {
        let home = || Some(PathBuf::from("/home/x"));
        let default = |state: Option<&str>, root, home| default_file_of(state.map(Into::into), root, home);
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(default(None, true, home()), path("/var/lib/gantry-services/token"));
        assert_eq!(default(None, false, home()), path("/home/x/.local/state/gantry-services/token"));
        for root in [true, false] {
            assert_eq!(default(Some("/s"), root, home()), path("/s/gantry-services/token"));
        }
        assert_eq!(
            default(Some("relative"), false, home()),
            path("/home/x/.local/state/gantry-services/token")
        );
        assert_eq!(default(None, false, None), None);
    }

    #[test]
    fn concurrent_services_share_one_token() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("state/gantry-services/token");
        let together = std::sync::Barrier::new(16);
        let tokens: BTreeSet<_> = std::thread::scope(|scope| {
            let start = || {
                scope.spawn(|| {
                    together.wait();
                    read_or_make_private(&path).expect("a token")
                })
            };
            let starting: Vec<_> = (0..16).map(|_| start()).collect();
            starting.into_iter().map(|service| service.join().expect("no panic")).collect()
        });
        let [token] = &Vec::from_iter(tokens)[..] else { panic!("the services have different tokens") };
        assert_eq!(token.len(), 64);
        assert_eq!((mode(&path), mode(path.parent().expect("a directory"))), (0o600, 0o700));
        let left = fs::read_dir(path.parent().expect("a directory")).expect("read").count();
        assert_eq!(left, 1, "temporary files are removed");
    }

    #[test]
    fn open_directory_is_restricted_to_user() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("open");
        fs::create_dir(&directory).expect("made");
        fs::set_permissions(&directory, Permissions::from_mode(0o755)).expect("opened");
        read_or_make_private(&directory.join("token")).expect("a token");
        assert_eq!(mode(&directory), 0o700);
    }

    #[test]
    fn untrusted_default_file_is_rejected() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("services");
        let path = directory.join("token");
        read_or_make_private(&path).expect("a token");
        let refused = |why: &str| {
            for refused in [read_or_make_private(&path), read_trusted(&path)] {
                let refused = refused.expect_err(why).to_string();
                assert!(refused.contains(why) && refused.contains("--token-file"), "{refused}");
            }
        };
        let open = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("its mode is changed");
        };
        for mode in [0o620, 0o602] {
            open(&path, mode);
            refused("is writable by its group or by others");
        }
        open(&path, 0o644);
        read_or_make_private(&path).expect("the owner may let others read the file");
        for mode in [0o730, 0o703, 0o777] {
            open(&directory, mode);
            refused("is writable by its group or by others");
        }
        open(&directory, 0o700);

        let planted = root.path().join("planted");
        fs::rename(&path, &planted).expect("moved");
        std::os::unix::fs::symlink(&planted, &path).expect("a link");
        refused("is a symbolic link");
        fs::remove_file(&path).expect("removed");
        fs::rename(&planted, &path).expect("moved back");
        if geteuid().is_root() {
            for path in [&path, &directory] {
                std::os::unix::fs::chown(path, Some(65_534), None).expect("given away");
                refused("belongs to another user");
                std::os::unix::fs::chown(path, Some(0), None).expect("taken back");
            }
        } else {
            eprintln!("not applicable: this process is not root");
        }
        read_or_make_private(&path).expect("the file is trusted again");
    }

    #[test]
    fn existing_file_is_kept_until_replaced() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("token");
        assert!(make_if_missing(&path).expect("made"));
        let first = read(&path).expect("a token");
        assert!(!make_if_missing(&path).expect("inspected"));
        assert_eq!(read(&path).expect("a token"), first);
        let second = replace(&path).expect("replaced");
        assert_ne!(first, second);
        assert_eq!((read(&path).expect("a token"), mode(&path)), (second, 0o600));
    }
}
