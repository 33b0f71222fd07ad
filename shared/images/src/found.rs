//! An image whose manifest is known, and the checks of its parts.

use bytes::Bytes;
use futures::stream::BoxStream;
use oci_client::manifest::{OciDescriptor, OciImageManifest};

use crate::ImageError;

/// Most bytes of a configuration.
pub(crate) const MAX_CONFIG_BYTES: u64 = 8 << 20;

/// The bytes of a blob. The receiver verifies them.
pub(crate) type ByteStream<'a> = BoxStream<'a, Result<Bytes, ImageError>>;

/// An image whose manifest is known.
#[derive(Debug)]
pub(crate) struct Found<B> {
    /// Name of the image in errors.
    pub(crate) name: String,
    /// Digest that the reference had: of the index, or of the manifest.
    pub(crate) digest: String,
    pub(crate) manifest: OciImageManifest,
    /// The place of the blobs.
    pub(crate) blobs: B,
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
