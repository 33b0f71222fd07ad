//! Credentials of registries, in the formats of Docker.

use std::path::Path;

use docker_credential::{CredentialRetrievalError, DockerCredential};

/// User name and password of a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub username: String,
    /// Password or token.
    pub password: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("username", &self.username).finish_non_exhaustive()
    }
}

/// Credentials cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the credentials of {registry} from {from}: {cause}")]
pub struct CredentialsError {
    registry: String,
    from: String,
    cause: String,
}

/// A configuration of Docker with credentials.
#[derive(Debug, Clone, Copy)]
pub enum DockerConfig<'a> {
    /// `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`, with the helpers that it names.
    OfUser,
    /// This file. Helpers are not started.
    File(&'a Path),
}

impl DockerConfig<'_> {
    /// Returns the credentials for a registry. `None`: it has none. Blocks.
    ///
    /// # Errors
    ///
    /// Fails if the file is malformed or if a helper fails.
    pub fn credentials(self, registry: &str) -> Result<Option<Credentials>, CredentialsError> {
        // The key of Docker Hub is historical.
        let keys = match registry {
            "docker.io" => ["https://index.docker.io/v1/", "docker.io", "index.docker.io"].as_slice(),
            registry => &[registry],
        };
        for key in keys {
            let found = match self {
                Self::OfUser => docker_credential::get_credential(key),
                Self::File(path) => match std::fs::File::open(path) {
                    Ok(file) => docker_credential::get_credential_from_reader(file, key),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(self.error(registry, &error)),
                },
            };
            match found {
                Ok(DockerCredential::UsernamePassword(username, password)) => {
                    return Ok(Some(Credentials { username, password }));
                }
                Ok(DockerCredential::IdentityToken(_)) => {
                    return Err(self.error(
                        registry,
                        &"identity tokens are not supported; log in with a password or an access token",
                    ));
                }
                Err(
                    CredentialRetrievalError::NoCredentialConfigured
                    | CredentialRetrievalError::ConfigNotFound
                    | CredentialRetrievalError::ConfigReadError,
                ) => {}
                Err(error) => return Err(self.error(registry, &error)),
            }
        }
        Ok(None)
    }

    fn error(self, registry: &str, cause: &dyn std::fmt::Display) -> CredentialsError {
        let from = match self {
            Self::OfUser => "the Docker configuration".to_owned(),
            Self::File(path) => path.display().to_string(),
        };
        CredentialsError { registry: registry.to_owned(), from, cause: cause.to_string() }
    }
}
