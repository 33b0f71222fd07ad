//! Reading the volumes of a worker.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use domain::VolumeHandle;
use runtime::{Contents, RuntimeError};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use tokio::sync::mpsc;
use transfer::{ExtentData, Manifest, OrdinalRanges, ReadOptions, TreeReader};

use super::error::ReadVolumeError;
use super::{Transfers, remote};
use crate::util::blocking::blocking;

/// Most bytes of one message of a file.
const FILE_CHUNK: usize = 1 << 20;

/// Reads extents of a volume, and passes them to `send` on a blocking thread until it returns
/// false, because the caller is gone.
pub(crate) async fn read(
    transfers: &Transfers,
    volume: VolumeHandle,
    manifest: Arc<Manifest>,
    wanted: OrdinalRanges,
    mut send: impl FnMut(Vec<ExtentData>) -> bool + Send + 'static,
) -> Result<(), ReadVolumeError> {
    let root = match transfers.contents(volume).await? {
        Contents::Directory(root) => root,
        Contents::Remote(remote) => return remote::read(&remote, manifest, wanted, send).await,
    };
    blocking(move || {
        let mut reader = TreeReader::new(&root, manifest, ReadOptions::default())?;
        for batch in reader.batches(&wanted) {
            if !send(batch?) {
                return Err(ReadVolumeError::CallerGone);
            }
        }
        Ok(())
    })
    .await
}

/// Reads one regular file of a volume: first its size, then its bytes.
pub(crate) async fn read_file(
    transfers: &Transfers,
    volume: VolumeHandle,
    manifest: Arc<Manifest>,
    path: PathBuf,
    chunks: mpsc::Sender<(u64, Bytes)>,
) -> Result<(), ReadVolumeError> {
    let root = match transfers.contents(volume).await? {
        Contents::Directory(root) => root,
        Contents::Remote(remote) => return remote::read_file(&remote, &manifest, path, chunks).await,
    };
    blocking(move || {
        let failed = |source| RuntimeError::io(format!("read {}", path.display()), source);
        let root = File::open(&root).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = match openat2(&root, &path, flags, Mode::empty(), resolve) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {
                return Err(ReadVolumeError::PathNotFound(path));
            }
            Err(rustix::io::Errno::LOOP) => {
                let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let link = openat2(&root, &path, flags, Mode::empty(), resolve);
                let kind = match link.and_then(|link| rustix::fs::readlinkat(link, "", Vec::new())) {
                    Ok(to) => format!("a symbolic link to {to:?}, and links are not followed"),
                    Err(_) => "behind a symbolic link, and links are not followed".to_owned(),
                };
                return Err(ReadVolumeError::NotAFile { path, kind });
            }
            Err(rustix::io::Errno::XDEV) => {
                return Err(ReadVolumeError::NotAFile { path, kind: "outside of the volume".to_owned() });
            }
            Err(rustix::io::Errno::NXIO) => {
                return Err(ReadVolumeError::NotAFile { path, kind: "not a regular file".to_owned() });
            }
            Err(error) => return Err(failed(error.into()).into()),
        };
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            let kind = if metadata.is_dir() { "a directory" } else { "not a regular file" };
            return Err(ReadVolumeError::NotAFile { path, kind: kind.to_owned() });
        }
        let size = metadata.len();
        let mut offset = 0;
        loop {
            let length = usize::try_from(size - offset).unwrap_or(usize::MAX).min(FILE_CHUNK);
            let mut data = vec![0; length];
            file.read_exact_at(&mut data, offset).map_err(failed)?;
            chunks.blocking_send((size, data.into())).map_err(|_| ReadVolumeError::CallerGone)?;
            offset += u64::try_from(length).unwrap_or(u64::MAX);
            if offset == size {
                return Ok(());
            }
        }
    })
    .await
}
