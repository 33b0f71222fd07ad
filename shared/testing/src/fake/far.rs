//! Remote volumes that are read and written by GNU tar, with the same losses as an unmodified
//! Baggageclaim.

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use async_trait::async_trait;
use domain::VolumeHandle;
use runtime::{Archive, RemoteVolume, RuntimeError};
use tokio::process::Command;

pub(super) struct TarVolume {
    pub(super) handle: VolumeHandle,
    pub(super) path: PathBuf,
    /// The path of the stored manifest.
    pub(super) kept: PathBuf,
}

fn io(operation: &str) -> impl FnOnce(std::io::Error) -> RuntimeError {
    let operation = operation.to_owned();
    move |error| RuntimeError::io(operation, error)
}

#[async_trait]
impl RemoteVolume for TarVolume {
    async fn read(&self, path: &Path) -> Result<Archive, RuntimeError> {
        let found = self.path.join(path);
        let (directory, name) = match tokio::fs::symlink_metadata(&found).await {
            Ok(metadata) if metadata.is_dir() => (found.as_path(), Path::new(".")),
            Ok(_) => (found.parent().expect("a directory"), Path::new(found.file_name().expect("a name"))),
            Err(_) if !self.path.exists() => return Err(RuntimeError::VolumeNotFound(self.handle)),
            Err(_) => return Err(RuntimeError::PathNotFound(path.display().to_string())),
        };
        let packed = Command::new("tar").arg("-C").arg(directory).arg("-c").arg(name).output().await;
        let packed = packed.map_err(io("run tar"))?;
        assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
        Ok(Box::pin(Cursor::new(packed.stdout)))
    }

    async fn write(&self, path: &Path, mut archive: Archive) -> Result<(), RuntimeError> {
        let into = self.path.join(path);
        tokio::fs::create_dir_all(&into).await.map_err(io("create a directory"))?;
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(into).args(["-x", "-p"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut tar = tar.kill_on_drop(true).spawn().map_err(io("run tar"))?;
        let mut stdin = tar.stdin.take().expect("a pipe");
        tokio::io::copy(&mut archive, &mut stdin).await.map_err(io("receive an archive"))?;
        drop(stdin);
        let unpacked = tar.wait_with_output().await.map_err(io("run tar"))?;
        if unpacked.status.success() {
            return Ok(());
        }
        Err(RuntimeError::Other(format!("tar: {}", String::from_utf8_lossy(&unpacked.stderr))))
    }

    async fn store_manifest(&self, manifest: Vec<u8>) -> Result<(), RuntimeError> {
        tokio::fs::write(&self.kept, manifest).await.map_err(io("store a manifest"))
    }

    async fn read_manifest(&self) -> Result<Option<Vec<u8>>, RuntimeError> {
        match tokio::fs::read(&self.kept).await {
            Ok(manifest) => Ok(Some(manifest)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(RuntimeError::io("read a manifest", error)),
        }
    }
}
