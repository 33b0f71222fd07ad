//! Files in local and remote volumes, for the conformance tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use domain::VolumeHandle;
use runtime::{Contents, RemoteVolume, Runtime, RuntimeError};
use tokio::io::AsyncReadExt;

/// A temporary directory for the contents of a remote volume.
struct ScratchTree(tempfile::TempDir);

impl ScratchTree {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    /// Packs the contents into an archive.
    fn pack(&self) -> Vec<u8> {
        let names =
            std::fs::read_dir(self.0.path()).expect("list").map(|entry| entry.expect("an entry").file_name());
        let tar = Command::new("tar").arg("-c").arg("-C").arg(self.0.path()).args(names).output();
        tar.expect("tar is installed").stdout
    }

    fn unpack(&self, archive: &[u8]) {
        let mut tar = Command::new("tar");
        let tar = tar.args(["-x", "-C"]).arg(self.0.path()).stdin(Stdio::piped());
        let mut tar = tar.spawn().expect("tar is installed");
        std::io::Write::write_all(&mut tar.stdin.take().expect("a pipe"), archive).expect("write");
        assert!(tar.wait().expect("wait").success(), "tar cannot read an archive");
    }
}

/// Number of attempts to read a volume. A concurrent write makes an archive incomplete.
const ATTEMPTS: usize = 50;

async fn fetched(volume: &dyn RemoteVolume, path: &Path) -> Option<ScratchTree> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let mut archive = match volume.read(path).await {
            Ok(archive) => archive,
            Err(RuntimeError::PathNotFound(_)) => return None,
            Err(error) => panic!("{error:?}"),
        };
        let mut bytes = Vec::new();
        match archive.read_to_end(&mut bytes).await {
            Ok(_) => {
                let beside = ScratchTree::new();
                beside.unpack(&bytes);
                return Some(beside);
            }
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("no complete archive: {last:?}")
}

/// Writes a file, and creates its parent directories.
pub async fn put(runtime: &dyn Runtime, volume: VolumeHandle, path: &str, contents: &str) {
    let write = |root: &Path| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a directory above it")).expect("make");
        std::fs::write(path, contents).expect("write");
    };
    match runtime.contents(volume).await.expect("the contents of a volume") {
        Contents::Directory(root) => write(&root),
        Contents::Remote(remote) => {
            let beside = ScratchTree::new();
            write(beside.0.path());
            let archive = Box::pin(std::io::Cursor::new(beside.pack()));
            remote.write(Path::new(""), archive).await.expect("write into a volume");
        }
    }
}

/// Reads a file. `None`: the file does not exist.
pub async fn get(runtime: &dyn Runtime, volume: VolumeHandle, path: &str) -> Option<String> {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    match runtime.contents(volume).await.expect("the contents of a volume") {
        Contents::Directory(root) => read(root.join(path)),
        Contents::Remote(remote) => {
            let beside = fetched(&*remote, Path::new(path)).await?;
            read(beside.0.path().join(Path::new(path).file_name()?))
        }
    }
}

/// Whether a directory exists.
pub async fn is_directory(runtime: &dyn Runtime, volume: VolumeHandle, path: &str) -> bool {
    match runtime.contents(volume).await.expect("the contents of a volume") {
        Contents::Directory(root) => root.join(path).is_dir(),
        Contents::Remote(remote) => match fetched(&*remote, Path::new("")).await {
            Some(beside) => beside.0.path().join(path).is_dir(),
            None => false,
        },
    }
}

/// Counts the lines of a file. A missing file has none.
pub async fn lines(runtime: &dyn Runtime, volume: VolumeHandle, path: &str) -> usize {
    get(runtime, volume, path).await.map_or(0, |text| text.lines().count())
}
