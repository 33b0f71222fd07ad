//! The reasons why an image cannot be used.

use std::io;

use oci_client::errors::{OciDistributionError, OciErrorCode};

use crate::Platform;

/// An image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The text is not a reference.
    #[error("{text:?} is not an image reference: {cause}")]
    Reference {
        /// The text.
        text: String,
        /// The fault.
        cause: String,
    },
    /// The registry or the archive has no such image.
    #[error("there is no image {0}")]
    NotFound(String),
    /// The registry requires other credentials.
    #[error("the registry {registry} denies access to {image}: {cause}")]
    Unauthorized {
        /// The registry.
        registry: String,
        /// The reference.
        image: String,
        /// The answer of the registry.
        cause: String,
    },
    /// The image does not exist for the platform.
    #[error("the image {image} does not exist for {wanted}, only for {}", list(available))]
    Platform {
        /// The reference.
        image: String,
        /// The platform that was requested.
        wanted: Platform,
        /// The platforms of the image.
        available: Vec<String>,
    },
    /// The registry does not answer, or fails. A later attempt may succeed.
    #[error("the registry {registry} failed: {cause}")]
    Registry {
        /// The registry.
        registry: String,
        /// The error, or the answer of the registry.
        cause: String,
    },
    /// The image violates the specification, or has bytes with another digest.
    #[error("the image {image} is invalid: {cause}")]
    Invalid {
        /// The reference, or the digest of a layer.
        image: String,
        /// The fault.
        cause: String,
    },
    /// The cache of layers cannot be written.
    #[error("cannot store a layer")]
    Store(#[source] io::Error),
    /// A file of the image on this machine cannot be read.
    #[error("cannot read {path:?}")]
    File {
        /// Path of the file.
        path: std::path::PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl ImageError {
    /// Creates an error for an invalid image or layer.
    pub(crate) fn invalid(image: &str, cause: impl std::fmt::Display) -> Self {
        Self::Invalid { image: image.to_owned(), cause: cause.to_string() }
    }

    /// Whether a later attempt may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Registry { .. })
    }

    /// Converts an error of the client of registries.
    pub(crate) fn of_registry(registry: &str, image: &str, error: &OciDistributionError) -> Self {
        let unauthorized = |cause: String| Self::Unauthorized {
            registry: registry.to_owned(),
            image: image.to_owned(),
            cause,
        };
        let failed = |cause: String| Self::Registry { registry: registry.to_owned(), cause };
        match error {
            OciDistributionError::RegistryError { envelope, .. } => {
                let cause = envelope
                    .errors
                    .iter()
                    .map(|error| format!("{:?}: {}", error.code, error.message))
                    .collect::<Vec<_>>()
                    .join("; ");
                let has = |code: OciErrorCode| envelope.errors.iter().any(|error| error.code == code);
                if has(OciErrorCode::Unauthorized) || has(OciErrorCode::Denied) {
                    unauthorized(cause)
                } else if has(OciErrorCode::ManifestUnknown)
                    || has(OciErrorCode::NameUnknown)
                    || has(OciErrorCode::NotFound)
                    || has(OciErrorCode::BlobUnknown)
                {
                    Self::NotFound(image.to_owned())
                } else {
                    failed(cause)
                }
            }
            OciDistributionError::UnauthorizedError { .. } => {
                unauthorized("it requires credentials, or other ones".to_owned())
            }
            OciDistributionError::AuthenticationFailure(cause) => unauthorized(cause.trim().to_owned()),
            OciDistributionError::ServerError { code: 401 | 403, message, .. } => {
                unauthorized(message.trim().to_owned())
            }
            OciDistributionError::ServerError { code: 404, .. }
            | OciDistributionError::ImageManifestNotFoundError(_) => Self::NotFound(image.to_owned()),
            OciDistributionError::ServerError { code, message, .. } => {
                failed(format!("HTTP status {code}: {}", message.trim()))
            }
            OciDistributionError::RequestError(error) => failed(domain::error_chain(error)),
            OciDistributionError::IoError(error) => failed(error.to_string()),
            OciDistributionError::DigestError(error) => Self::invalid(image, error),
            error => Self::invalid(image, error),
        }
    }
}

fn list(platforms: &[String]) -> String {
    if platforms.is_empty() { "no platform".to_owned() } else { platforms.join(", ") }
}
