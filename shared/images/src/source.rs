//! Sources of images.

use std::path::Path;

use futures::TryStreamExt;
use oci_client::Reference;
use oci_client::manifest::{OciDescriptor, OciImageManifest};

use crate::found::{ByteStream, Found, MAX_CONFIG_BYTES, check_digest, size};
use crate::local::{self, Blobs};
use crate::metadata::Config;
use crate::registry::RegistryBlobs;
use crate::{Credentials, ImageError, Metadata, Platform, Registry};

/// An image whose manifest is known.
#[derive(Debug)]
pub struct ImageSource(AnySource);

#[derive(Debug)]
enum AnySource {
    Registry(Found<RegistryBlobs>),
    Local(Found<Blobs>),
}

impl ImageSource {
    /// Finds the manifest of a reference for a platform.
    ///
    /// # Errors
    ///
    /// Fails if the registry has no such image, does not allow it or does not answer, or if the
    /// image does not exist for the platform.
    pub async fn in_registry(
        registry: &Registry,
        reference: &Reference,
        credentials: Option<&Credentials>,
        platform: &Platform,
    ) -> Result<Self, ImageError> {
        Ok(Self(AnySource::Registry(registry.open(reference, credentials, platform).await?)))
    }

    /// Opens an image in an OCI layout, which is a directory. Blocks.
    ///
    /// `name` is the annotation `org.opencontainers.image.ref.name` of the image, or its digest. It
    /// may be missing if the layout has only one image.
    ///
    /// # Errors
    ///
    /// Fails if the layout has no such image or is malformed.
    pub fn in_layout(directory: &Path, name: Option<&str>, platform: &Platform) -> Result<Self, ImageError> {
        Ok(Self(AnySource::Local(local::open_layout(directory, name, platform)?)))
    }

    /// Opens an image in a tar archive of an OCI layout. Blocks.
    ///
    /// # Errors
    ///
    /// Fails as [`in_layout`](Self::in_layout) does.
    pub fn in_layout_archive(
        file: &Path,
        name: Option<&str>,
        platform: &Platform,
    ) -> Result<Self, ImageError> {
        Ok(Self(AnySource::Local(local::open_layout_archive(file, name, platform)?)))
    }

    /// Opens an image in an archive of `docker save`. Blocks.
    ///
    /// `name` is the reference under which the image was saved. It may be missing if the archive
    /// has only one image.
    ///
    /// # Errors
    ///
    /// Fails if the archive has no such image or is malformed.
    pub fn in_docker_archive(file: &Path, name: Option<&str>) -> Result<Self, ImageError> {
        Ok(Self(AnySource::Local(local::open_docker_archive(file, name)?)))
    }

    /// Returns the digest of the image, `sha256:…`: of the index if the image has several
    /// platforms, otherwise of the manifest.
    #[must_use]
    pub fn digest(&self) -> &str {
        match &self.0 {
            AnySource::Registry(found) => &found.digest,
            AnySource::Local(found) => &found.digest,
        }
    }

    /// Returns the bytes of all layers, as they are stored in the source.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.layers().iter().map(size).sum()
    }

    /// Returns the name of the image in errors.
    pub(crate) fn name(&self) -> &str {
        match &self.0 {
            AnySource::Registry(found) => &found.name,
            AnySource::Local(found) => &found.name,
        }
    }

    pub(crate) fn layers(&self) -> &[OciDescriptor] {
        &self.manifest().layers
    }

    fn manifest(&self) -> &OciImageManifest {
        match &self.0 {
            AnySource::Registry(found) => &found.manifest,
            AnySource::Local(found) => &found.manifest,
        }
    }

    /// Streams a blob. The receiver verifies it.
    pub(crate) fn blob<'a>(&'a self, descriptor: &'a OciDescriptor) -> ByteStream<'a> {
        match &self.0 {
            AnySource::Registry(found) => found.blobs.blob(descriptor),
            AnySource::Local(found) => found.blobs.blob(&descriptor.digest),
        }
    }

    /// Reads the configuration.
    pub(crate) async fn config(&self, platform: &Platform) -> Result<Metadata, ImageError> {
        let invalid = |cause: String| ImageError::invalid(self.name(), cause);
        let descriptor = &self.manifest().config;
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
        check_digest(self.name(), "configuration", &text, &descriptor.digest)?;
        let config: Config = serde_json::from_slice(&text)
            .map_err(|error| invalid(format!("its configuration is malformed: {error}")))?;
        if !platform.fits(&config.os, &config.architecture) {
            return Err(ImageError::Platform {
                image: self.name().to_owned(),
                wanted: platform.clone(),
                available: vec![format!("{}/{}", config.os, config.architecture)],
            });
        }
        Ok(config.into())
    }
}
