//! The cache of unpacked layers in a directory.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::SystemTime;

use futures::TryStreamExt;
use oci_client::manifest::OciDescriptor;

use crate::found::size;
use crate::pipe::pipe;
use crate::{ImageError, ImageSource, Layer, Progress};

/// The cache of unpacked layers. Its files may be deleted at any time.
#[derive(Debug)]
pub struct LayerStore {
    directory: PathBuf,
    max_bytes: u64,
    /// One lock for each layer that is being fetched.
    fetching: Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>,
}

impl LayerStore {
    /// Creates a cache in a directory, which is created when it is needed. After a layer was added,
    /// those that were not used for the longest time are deleted until the files have at most
    /// `max_bytes`.
    #[must_use]
    pub fn new(directory: PathBuf, max_bytes: u64) -> Self {
        Self { directory, max_bytes, fetching: Mutex::default() }
    }

    /// Returns a layer, and fetches it unless it is in the cache.
    pub(crate) async fn layer(
        &self,
        source: &ImageSource,
        descriptor: &OciDescriptor,
        progress: &Progress,
    ) -> Result<Arc<Layer>, ImageError> {
        let hex = hex_of(source.name(), &descriptor.digest)?;
        let lock = self.lock(&hex);
        let _fetching = lock.lock().await;
        if let Some(layer) = self.open(&hex).await {
            progress.save(size(descriptor));
            return Ok(layer);
        }
        let (inlet, outlet) = pipe();
        let (directory, digest) = (self.directory.clone(), hex.clone());
        let unpacking = tokio::task::spawn_blocking(move || {
            fs::create_dir_all(&directory).map_err(ImageError::Store)?;
            Layer::unpack(&directory, &digest, outlet)
        });
        let mut blob = source.blob(descriptor);
        let mut arrived = 0;
        let sent = async {
            while let Some(piece) = blob.try_next().await? {
                arrived += piece.len() as u64;
                progress.advance(piece.len() as u64);
                if !inlet.send(piece).await {
                    break;
                }
            }
            inlet.end().await;
            Ok::<_, ImageError>(())
        };
        let sent = sent.await;
        let unpacked = unpacking.await.map_err(|error| ImageError::invalid(source.name(), error))?;
        sent?;
        let layer = unpacked?;
        self.evict().await;
        tracing::debug!(digest = descriptor.digest, bytes = arrived, "a layer was fetched");
        Ok(Arc::new(layer))
    }

    fn lock(&self, hex: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut fetching = self.fetching.lock().unwrap_or_else(PoisonError::into_inner);
        fetching.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = fetching.get(hex).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        fetching.insert(hex.to_owned(), Arc::downgrade(&lock));
        lock
    }

    async fn open(&self, hex: &str) -> Option<Arc<Layer>> {
        let (directory, hex) = (self.directory.clone(), hex.to_owned());
        let opened = tokio::task::spawn_blocking(move || {
            let layer = Layer::open(&directory, &hex)?;
            let tree = fs::File::options().append(true).open(directory.join(format!("{hex}.tree"))).ok()?;
            // The time of the last use, for the eviction. A failure only makes an eviction
            // likelier.
            _ = tree.set_modified(SystemTime::now());
            Some(Arc::new(layer))
        });
        opened.await.ok().flatten()
    }

    /// Deletes the layers that were not used for the longest time. A layer in use stays readable.
    async fn evict(&self) {
        let (directory, max_bytes) = (self.directory.clone(), self.max_bytes);
        // An error leaves the layers for the next eviction.
        _ = tokio::task::spawn_blocking(move || evict(&directory, max_bytes)).await;
    }
}

fn evict(directory: &std::path::Path, max_bytes: u64) -> std::io::Result<()> {
    let mut layers = Vec::new();
    for file in fs::read_dir(directory)? {
        let tree = file?.path();
        if tree.extension().is_none_or(|extension| extension != "tree") {
            continue;
        }
        let content = tree.with_extension("content");
        let bytes = fs::metadata(&content).map_or(0, |metadata| metadata.len());
        layers.push((fs::metadata(&tree)?.modified()?, bytes, tree, content));
    }
    layers.sort();
    let mut total: u64 = layers.iter().map(|(_, bytes, ..)| bytes).sum();
    for (_, bytes, tree, content) in layers {
        if total <= max_bytes {
            break;
        }
        fs::remove_file(tree)?;
        fs::remove_file(content)?;
        total -= bytes;
    }
    Ok(())
}

/// Returns the hexadecimal part of a digest, which becomes a file name.
fn hex_of(image: &str, digest: &str) -> Result<String, ImageError> {
    let hex = digest.strip_prefix("sha256:").filter(|hex| {
        hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    });
    let invalid = || ImageError::invalid(image, format!("a layer has the unsupported digest {digest:?}"));
    hex.map(str::to_owned).ok_or_else(invalid)
}
