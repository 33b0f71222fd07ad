//! Sources of images, and the pull from any of them.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use oci_client::manifest::{OciDescriptor, OciImageManifest};

use crate::local::Blobs;
use crate::metadata::Config;
use crate::registry::RegistryBlobs;
use crate::{ImageError, ImageTree, LayerStore, Metadata, Platform, Progress, assemble};

/// Layers that are fetched at the same time.
const CONCURRENT_LAYERS: usize = 3;
/// Most bytes of a configuration.
pub(crate) const MAX_CONFIG_BYTES: u64 = 8 << 20;
/// Most layers of an image.
const MAX_LAYERS: usize = 1000;

/// An image whose manifest is known.
#[derive(Debug)]
pub struct ImageSource {
    /// Name of the image in errors.
    pub(crate) name: String,
    /// Digest that the reference had: of the index, or of the manifest.
    pub(crate) digest: String,
    pub(crate) manifest: OciImageManifest,
    pub(crate) blobs: AnyBlobs,
}

/// The place of an image's blobs.
#[derive(Debug)]
pub(crate) enum AnyBlobs {
    Registry(RegistryBlobs),
    Local(Blobs),
}

pub(crate) type ByteStream<'a> = BoxStream<'a, Result<Bytes, ImageError>>;

impl ImageSource {
    /// Returns the digest of the image, `sha256:…`: of the index if the image has several
    /// platforms, otherwise of the manifest.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the bytes of all layers, as they are stored in the source.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.manifest.layers.iter().map(size).sum()
    }

    /// Streams a blob. The receiver verifies it.
    pub(crate) fn blob<'a>(&'a self, descriptor: &'a OciDescriptor) -> ByteStream<'a> {
        match &self.blobs {
            AnyBlobs::Registry(registry) => registry.blob(descriptor),
            AnyBlobs::Local(local) => local.blob(&descriptor.digest),
        }
    }

    async fn config(&self, platform: &Platform) -> Result<Metadata, ImageError> {
        let invalid = |cause: String| ImageError::invalid(&self.name, cause);
        let descriptor = &self.manifest.config;
        if size(descriptor) > MAX_CONFIG_BYTES {
            return Err(invalid(format!("its configuration has {} bytes", descriptor.size)));
        }
        let mut text = Vec::new();
        let mut blob = self.blob(descriptor);
        while let Some(piece) = blob.try_next().await? {
            text.extend_from_slice(&piece);
            if text.len() as u64 > MAX_CONFIG_BYTES {
                return Err(invalid("its configuration is too large".to_owned()));
            }
        }
        check_digest(&self.name, "configuration", &text, &descriptor.digest)?;
        let config: Config = serde_json::from_slice(&text)
            .map_err(|error| invalid(format!("its configuration is malformed: {error}")))?;
        if !platform.fits(&config.os, &config.architecture) {
            return Err(ImageError::Platform {
                image: self.name.clone(),
                wanted: platform.clone(),
                available: vec![format!("{}/{}", config.os, config.architecture)],
            });
        }
        Ok(config.into())
    }
}

/// Fetches the layers that `store` lacks, and returns the tree of the image.
///
/// # Errors
///
/// Fails if the image cannot be fetched, is invalid or does not run on the platform, or if the
/// store cannot be written.
pub async fn pull(
    source: &ImageSource,
    platform: &Platform,
    store: &LayerStore,
    progress: &Progress,
) -> Result<ImageTree, ImageError> {
    progress.expect(source.size_bytes());
    let metadata = source.config(platform).await?;
    if source.manifest.layers.len() > MAX_LAYERS {
        let cause = format!("it has {} layers", source.manifest.layers.len());
        return Err(ImageError::invalid(&source.name, cause));
    }
    let layer = |descriptor| store.layer(source, descriptor, progress).boxed();
    let fetches: Vec<_> = source.manifest.layers.iter().map(layer).collect();
    let layers: Vec<Arc<_>> =
        futures::stream::iter(fetches).buffered(CONCURRENT_LAYERS).try_collect().await?;
    let name = source.name.clone();
    let assembled = tokio::task::spawn_blocking(move || assemble(&name, layers, &metadata)).await;
    assembled.map_err(|error| ImageError::invalid(&source.name, error))?
}

/// Returns the size that a descriptor declares, in bytes.
pub(crate) fn size(descriptor: &OciDescriptor) -> u64 {
    u64::try_from(descriptor.size).unwrap_or(0)
}

/// Checks that `bytes` have a digest.
pub(crate) fn check_digest(image: &str, what: &str, bytes: &[u8], digest: &str) -> Result<(), ImageError> {
    use sha2::Digest as _;
    let found = format!("sha256:{}", hex::encode(sha2::Sha256::digest(bytes)));
    if found == digest {
        return Ok(());
    }
    Err(ImageError::invalid(image, format!("its {what} has the digest {found} instead of {digest}")))
}
