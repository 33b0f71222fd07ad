//! Access to volumes in local directories.

use std::path::PathBuf;

use domain::VolumeHandle;
use runtime::{Contents, Runtime, RuntimeError};

/// Returns the directory with the contents of a volume.
pub(crate) async fn local_directory(
    runtime: &dyn Runtime,
    volume: VolumeHandle,
) -> Result<PathBuf, RuntimeError> {
    match runtime.contents(volume).await? {
        Contents::Directory(path) => Ok(path),
        Contents::Remote(_) => Err(RuntimeError::Unsupported("its volumes are not local".to_owned())),
    }
}
