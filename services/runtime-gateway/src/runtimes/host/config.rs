//! Configuration of the host runtime: directories and policy.

use std::fs;
use std::path::{Path, PathBuf};

use runtime::RuntimeError;

use super::filesystem::at;
use super::policy::Policy;

/// Configuration of the host runtime.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// The state directory. Absolute, UTF-8, and on a file system that supports the upper layer of
    /// an overlay.
    pub state_dir: PathBuf,
    /// The directory of short-lived sockets. Absolute, UTF-8.
    pub runtime_dir: PathBuf,
    /// The supervisor program. Its `main` must call [`super::supervise_if_asked`] first.
    pub supervisor: PathBuf,
    /// Stored output per stream, in bytes.
    pub spool_bytes: u64,
    /// Absolute paths that are hidden from all containers, in addition to the directories above.
    pub masked: Vec<PathBuf>,
    /// The operator's policy for workloads.
    pub policy: Policy,
}

impl HostConfig {
    /// Creates a configuration with the defaults: this program is the supervisor, and 32 MiB of
    /// each output are stored.
    ///
    /// Errors: the path of this program is unknown.
    pub fn new(state_dir: impl Into<PathBuf>, runtime_dir: impl Into<PathBuf>) -> std::io::Result<Self> {
        Ok(Self {
            state_dir: state_dir.into(),
            runtime_dir: runtime_dir.into(),
            supervisor: std::env::current_exe()?,
            spool_bytes: 32 << 20,
            masked: Vec::new(),
            policy: Policy::default(),
        })
    }

    /// Returns the name of the worker of this state directory: `given`, or else the stored name.
    /// The host name is stored on first use, because it may change while the contents of the worker
    /// stay the same.
    ///
    /// Errors: the state directory cannot be read or written.
    pub fn worker_name(&self, given: Option<String>) -> std::io::Result<String> {
        if let Some(given) = given {
            return Ok(given);
        }
        let path = self.state_dir.join("worker-name");
        match fs::read_to_string(&path) {
            Ok(name) if !name.trim().is_empty() => return Ok(name.trim().to_owned()),
            // A crash of the machine may have left an empty file.
            Ok(_) => fs::remove_file(&path)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        crate::make_private_directory(&self.state_dir)?;
        let temporary = self.state_dir.join(format!("worker-name.{}", std::process::id()));
        fs::write(&temporary, &name)?;
        // If several processes start at once, one of them sets the name, and the others use it.
        let first = fs::hard_link(&temporary, &path);
        fs::remove_file(&temporary)?;
        match first {
            Ok(()) => Ok(name),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Ok(fs::read_to_string(&path)?.trim().to_owned())
            }
            Err(error) => Err(error),
        }
    }
}

/// Validates the paths, and creates the directories.
pub(super) fn prepared(config: HostConfig) -> Result<HostConfig, RuntimeError> {
    for path in [&config.state_dir, &config.runtime_dir, &config.supervisor] {
        if !path.is_absolute() || path.to_str().is_none() {
            return Err(RuntimeError::Other(format!(
                "cannot use the path {path:?}: it is not absolute, or not UTF-8"
            )));
        }
    }
    if !rustix::process::geteuid().is_root() {
        return Err(RuntimeError::Unsupported(
            "containers need root, or the user namespace of an ordinary user".to_owned(),
        ));
    }
    for path in [&config.state_dir, &config.runtime_dir] {
        crate::make_private_directory(path).map_err(at("make", path))?;
    }
    // The mount table has real paths.
    let real = |path: &Path| fs::canonicalize(path).map_err(at("find", path));
    Ok(HostConfig {
        state_dir: real(&config.state_dir)?,
        runtime_dir: real(&config.runtime_dir)?,
        supervisor: real(&config.supervisor)?,
        ..config
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_keeps_its_first_name() {
        let directory = tempfile::tempdir().expect("a directory");
        let config =
            HostConfig::new(directory.path().join("state"), directory.path().join("run")).expect("a path");
        assert_eq!(config.worker_name(Some("given".to_owned())).expect("a name"), "given");
        let first = config.worker_name(None).expect("a name");
        assert_eq!(first, rustix::system::uname().nodename().to_string_lossy());

        let kept = config.state_dir.join("worker-name");
        fs::write(&kept, "another\n").expect("write");
        assert_eq!(config.worker_name(None).expect("a name"), "another", "the stored name wins");
        fs::write(&kept, "").expect("write");
        assert_eq!(config.worker_name(None).expect("a name"), first, "an empty file counts as missing");
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&config.state_dir).expect("there"));
        assert_eq!(mode & 0o777, 0o700);
        let left = fs::read_dir(&config.state_dir).expect("list").count();
        assert_eq!(left, 1, "only the file with the name remains");
    }
}
