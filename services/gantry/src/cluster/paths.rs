//! Paths of the cluster on this machine.

use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Maximum length of the path of a socket in bytes, as in `sockaddr_un`.
const MAX_SOCKET_PATH: usize = 107;

/// Paths of the cluster on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Paths {
    /// State directory `$XDG_STATE_HOME/gantry`: databases, volumes and logs. It survives restarts.
    pub(crate) state: PathBuf,
    /// Directory of the socket: `$XDG_RUNTIME_DIR/gantry`, or within the state directory. Only this
    /// user may enter it.
    pub(crate) runtime: PathBuf,
}

impl Paths {
    /// Finds the paths from the environment.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        Self::from(variable("XDG_STATE_HOME"), variable("XDG_RUNTIME_DIR"), std::env::home_dir())
    }

    fn from(state: Option<PathBuf>, runtime: Option<PathBuf>, home: Option<PathBuf>) -> anyhow::Result<Self> {
        let state = match (state, home.filter(|home| home.is_absolute())) {
            (Some(state), _) => state.join("gantry"),
            (None, Some(home)) => home.join(".local/state/gantry"),
            (None, None) => {
                bail!("cannot find a place for the state of the cluster; set XDG_STATE_HOME or HOME")
            }
        };
        // The runtime directory may belong to another user after `su`.
        let usable = |path: &PathBuf| {
            path.metadata().is_ok_and(|metadata| {
                metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw()
            })
        };
        let runtime = match runtime.filter(usable) {
            Some(runtime) => runtime.join("gantry"),
            None => state.join("run"),
        };
        Ok(Self { state, runtime })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.runtime.join("gantry.sock")
    }

    pub(crate) fn endpoint(&self) -> String {
        endpoint(&self.socket())
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.state.join("cluster.lock")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.state.join("cluster.log")
    }

    pub(crate) fn token(&self) -> PathBuf {
        self.state.join("token")
    }

    /// Returns the URL of the database of one service.
    pub(crate) fn database(&self, service: &str) -> String {
        db::sqlite_url(&self.state.join(format!("{service}.db")).display().to_string())
    }

    /// Returns the directory of the worker on this machine.
    pub(crate) fn worker(&self) -> PathBuf {
        self.state.join("worker")
    }

    /// Returns the directory of unpacked layers of images.
    pub(crate) fn images(&self) -> PathBuf {
        self.state.join("images")
    }

    /// Returns the directory with the stat caches of scanned directories, and creates it if
    /// necessary.
    pub(crate) fn stat_caches(&self) -> anyhow::Result<PathBuf> {
        let path = self.state.join("scanned");
        make_private(&self.state)?;
        make_private(&path)?;
        Ok(path)
    }

    /// Creates the directories, so that no other user can enter them.
    pub(crate) fn make(&self) -> anyhow::Result<()> {
        for path in [&self.state, &self.runtime] {
            if path.to_str().is_none() {
                bail!(
                    "cannot use directory {}: its path is not UTF-8; set XDG_STATE_HOME and XDG_RUNTIME_DIR to other directories",
                    path.display()
                );
            }
        }
        if self.runtime.display().to_string().contains(',') {
            bail!(
                "cannot use directory {}: its path must not contain a comma; set XDG_RUNTIME_DIR to another directory",
                self.runtime.display()
            );
        }
        for path in [&self.state, &self.state.join("run"), &self.runtime] {
            make_private(path)?;
        }
        let socket = self.socket();
        if socket.as_os_str().len() > MAX_SOCKET_PATH {
            bail!(
                "cannot use socket {}: its path is longer than {MAX_SOCKET_PATH} bytes; set XDG_RUNTIME_DIR to \
                 a shorter path",
                socket.display()
            );
        }
        Ok(())
    }
}

/// Returns the address of a socket.
pub(crate) fn endpoint(socket: &Path) -> String {
    format!("unix://{}", socket.display())
}

/// Returns whether a directory belongs to this user and no other user can write into it.
pub(crate) fn only_we_write(directory: &Path) -> bool {
    directory.metadata().is_ok_and(|metadata| {
        metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0
    })
}

fn make_private(path: &Path) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot create directory {}", path.display()))?;
    let metadata =
        path.metadata().with_context(|| format!("cannot read the metadata of {}", path.display()))?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        bail!(
            "cannot use directory {}: it belongs to another user; set XDG_STATE_HOME or XDG_RUNTIME_DIR",
            path.display()
        );
    }
    if metadata.mode() & 0o077 != 0 {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
            .with_context(|| format!("cannot make directory {} private", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn paths_follow_environment() {
        let root = tempfile::tempdir().expect("a directory");
        let runtime = root.path().to_owned();
        let home = || Some(PathBuf::from("/home/x"));
        let paths = Paths::from(None, None, home()).expect("found");
        assert_eq!(paths.state, Path::new("/home/x/.local/state/gantry"));
        assert_eq!(paths.socket(), Path::new("/home/x/.local/state/gantry/run/gantry.sock"));
        let paths = Paths::from(Some("/s".into()), Some(runtime.clone()), home()).expect("found");
        assert_eq!((paths.state, paths.runtime), (PathBuf::from("/s/gantry"), runtime.join("gantry")));
        let missing = Paths::from(Some("/s".into()), Some("/nonexistent".into()), home()).expect("found");
        assert_eq!(missing.runtime, Path::new("/s/gantry/run"));
        assert!(Paths::from(None, None, None).is_err());
    }

    #[test]
    fn directories_are_made_private() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(root.path().join("gantry")).expect("made");
        let paths = Paths::from(Some(root.path().into()), None, None).expect("found");
        paths.make().expect("made");
        for path in [&paths.state, &paths.runtime] {
            assert_eq!(path.metadata().expect("there").mode() & 0o777, 0o700);
        }
        for unusable in [b"a\xff".as_slice(), b"a,b"] {
            let runtime = root.path().join(OsStr::from_bytes(unusable));
            let refused = Paths { runtime: runtime.clone(), ..paths.clone() }.make();
            assert!(refused.expect_err("refused").to_string().contains("XDG_RUNTIME_DIR"));
            assert!(!runtime.exists(), "nothing is made");
        }
        let long = Paths { runtime: root.path().join("x".repeat(100)), ..paths };
        assert!(long.make().expect_err("refused").to_string().contains("XDG_RUNTIME_DIR"));
    }
}
