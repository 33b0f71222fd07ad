//! Digests of content and of trees.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A BLAKE3 digest of 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

/// The length of a byte string that is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest has 32 bytes, not {0}")]
pub struct DigestLength(pub usize);

impl Digest {
    /// Returns the 32 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<&[u8]> for Digest {
    type Error = DigestLength;

    fn try_from(bytes: &[u8]) -> Result<Self, DigestLength> {
        bytes.try_into().map(Self).map_err(|_| DigestLength(bytes.len()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}
