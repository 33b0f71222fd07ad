//! Images in registries.

use std::error::Error;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Once};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use oci_client::client::{BlobResponse, Certificate, CertificateEncoding, ClientConfig, ClientProtocol};
use oci_client::errors::OciDistributionError;
use oci_client::manifest::{
    IMAGE_MANIFEST_LIST_MEDIA_TYPE, IMAGE_MANIFEST_MEDIA_TYPE, OCI_IMAGE_INDEX_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE, OciDescriptor, OciImageManifest, OciManifest,
};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};

use crate::found::{ByteStream, Found, check_digest, size};
use crate::platform::names;
use crate::{Credentials, ImageError, Platform};

/// Attempts for a manifest, and attempts without any new bytes for a layer.
const TRIES: u32 = 5;
/// Pause before the second attempt. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time without any byte.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Most bytes of a manifest or an index.
const MAX_MANIFEST_BYTES: usize = 16 << 20;
const MANIFESTS: &[&str] = &[
    OCI_IMAGE_INDEX_MEDIA_TYPE,
    IMAGE_MANIFEST_LIST_MEDIA_TYPE,
    OCI_IMAGE_MEDIA_TYPE,
    IMAGE_MANIFEST_MEDIA_TYPE,
];

/// Settings of the access to registries.
#[derive(Debug, Clone, Default)]
pub struct RegistrySettings {
    /// Registries that are asked first, with the registry whose images they have: `(registry,
    /// mirror)`.
    pub mirrors: Vec<(String, String)>,
    /// Registries without TLS. Registries on the loopback of this machine may lack TLS in any case.
    pub plain_http: Vec<String>,
    /// Files with certificates, in PEM, that are trusted in addition to those of the system.
    pub ca_files: Vec<PathBuf>,
}

/// Access to registries.
#[derive(Debug)]
pub struct Registry {
    settings: RegistrySettings,
    certificates: Vec<Certificate>,
    anonymous: Arc<Clients>,
}

/// The clients of one user.
struct Clients {
    https: Client,
    http: Client,
    auth: RegistryAuth,
}

impl std::fmt::Debug for Clients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Clients").finish_non_exhaustive()
    }
}

impl Clients {
    fn new(certificates: &[Certificate], auth: RegistryAuth) -> Result<Self, OciDistributionError> {
        let client = |protocol| {
            Client::try_from(ClientConfig {
                protocol,
                extra_root_certificates: certificates.to_vec(),
                connect_timeout: Some(CONNECT_TIMEOUT),
                read_timeout: Some(READ_TIMEOUT),
                user_agent: concat!("gantry/", env!("CARGO_PKG_VERSION")),
                ..ClientConfig::default()
            })
        };
        Ok(Self { https: client(ClientProtocol::Https)?, http: client(ClientProtocol::Http)?, auth })
    }

    fn client(&self, is_plain: bool) -> &Client {
        if is_plain { &self.http } else { &self.https }
    }
}

/// What a registry is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Digest,
    Manifest,
}

/// The repository from which the blobs of an image come.
#[derive(Debug)]
pub(crate) struct RegistryBlobs {
    clients: Arc<Clients>,
    is_plain: bool,
    reference: Reference,
}

impl Registry {
    /// Creates the access. Reads the certificates.
    ///
    /// # Errors
    ///
    /// Fails if a certificate cannot be read.
    pub fn new(settings: RegistrySettings) -> Result<Self, ImageError> {
        static PROVIDER: Once = Once::new();
        // An error means that the process has a provider already.
        PROVIDER.call_once(|| _ = rustls::crypto::ring::default_provider().install_default());
        let mut certificates = Vec::new();
        for path in &settings.ca_files {
            let data =
                std::fs::read(path).map_err(|source| ImageError::File { path: path.clone(), source })?;
            certificates.push(Certificate { encoding: CertificateEncoding::Pem, data });
        }
        let clients = Clients::new(&certificates, RegistryAuth::Anonymous);
        let clients = clients.map_err(|error| ImageError::of_registry("", "", &error))?;
        Ok(Self { settings, certificates, anonymous: Arc::new(clients) })
    }

    /// Returns the digest that a reference has now, `sha256:…`. A reference with a digest is
    /// answered without the registry.
    ///
    /// # Errors
    ///
    /// Fails if the registry has no such image, does not allow it, or does not answer.
    pub async fn digest(
        &self,
        reference: &Reference,
        credentials: Option<&Credentials>,
    ) -> Result<String, ImageError> {
        if let Some(digest) = reference.digest() {
            return Ok(digest.to_owned());
        }
        Ok(self.first(reference, credentials, Call::Digest).await?.0.1)
    }

    /// Finds the manifest of a reference for a platform.
    pub(crate) async fn open(
        &self,
        reference: &Reference,
        credentials: Option<&Credentials>,
        platform: &Platform,
    ) -> Result<Found<RegistryBlobs>, ImageError> {
        let (manifest, blobs) = self.first(reference, credentials, Call::Manifest).await?;
        let name = reference.to_string();
        let digest = match reference.digest() {
            Some(digest) => digest.to_owned(),
            None => manifest.1,
        };
        check_digest(&name, "manifest", &manifest.0, &digest)?;
        let manifest = match parse_manifest(&name, &manifest.0)? {
            OciManifest::Image(manifest) => manifest,
            OciManifest::ImageIndex(index) => {
                let chosen = platform.choose(&index.manifests).ok_or_else(|| ImageError::Platform {
                    image: name.clone(),
                    wanted: platform.clone(),
                    available: names(&index.manifests),
                })?;
                let part = reference.clone_with_digest(chosen.digest.clone());
                let (manifest, _) = self.first(&part, credentials, Call::Manifest).await?;
                check_digest(&name, "manifest", &manifest.0, &chosen.digest)?;
                image_manifest(&name, &manifest.0)?
            }
        };
        Ok(Found { name, digest, manifest, blobs })
    }

    /// Calls the mirrors of a registry, then the registry, until one succeeds. Returns the error of
    /// the registry.
    async fn first(
        &self,
        reference: &Reference,
        credentials: Option<&Credentials>,
        call: Call,
    ) -> Result<((Bytes, String), RegistryBlobs), ImageError> {
        let registry = reference.registry();
        let mirrors = self.settings.mirrors.iter().filter(|(of, _)| of == registry);
        for (_, mirror) in mirrors {
            let mut mirrored = reference.clone();
            mirrored.set_mirror_registry(mirror.clone());
            // The credentials are for the registry only.
            let blobs = RegistryBlobs {
                clients: self.anonymous.clone(),
                is_plain: self.is_plain(mirror),
                reference: mirrored,
            };
            match blobs.reach(mirror, call).await {
                Ok((called, blobs)) => return Ok((called, blobs)),
                Err(error) => tracing::debug!(mirror, registry, %error, "a mirror cannot be used"),
            }
        }
        let clients = match credentials {
            None => self.anonymous.clone(),
            Some(credentials) => {
                let Credentials { username, password } = credentials.clone();
                let clients = Clients::new(&self.certificates, RegistryAuth::Basic(username, password));
                Arc::new(
                    clients
                        .map_err(|error| ImageError::of_registry(registry, &reference.to_string(), &error))?,
                )
            }
        };
        let blobs =
            RegistryBlobs { clients, is_plain: self.is_plain(registry), reference: reference.clone() };
        let reached = blobs.reach(registry, call).await;
        reached.map_err(|error| {
            ImageError::of_registry(registry, &reference.to_string(), &without_guessed_url(registry, error))
        })
    }

    fn is_plain(&self, registry: &str) -> bool {
        self.settings.plain_http.iter().any(|plain| plain == registry)
    }
}

impl RegistryBlobs {
    fn client(&self) -> &Client {
        self.clients.client(self.is_plain)
    }

    /// Returns the manifest, or nothing, and its digest.
    async fn call(&self, call: Call) -> Result<(Bytes, String), OciDistributionError> {
        let (reference, auth) = (&self.reference, &self.clients.auth);
        if call == Call::Digest {
            return Ok((Bytes::new(), self.client().fetch_manifest_digest(reference, auth).await?));
        }
        let (bytes, digest) = self.client().pull_manifest_raw(reference, auth, MANIFESTS).await?;
        if bytes.len() > MAX_MANIFEST_BYTES {
            let cause = format!("the manifest has {} bytes", bytes.len());
            return Err(OciDistributionError::ManifestParsingError(cause));
        }
        Ok((bytes, digest))
    }

    /// Calls the registry, again after a transient failure. A registry on the loopback that does
    /// not speak TLS is called without.
    async fn reach(
        mut self,
        registry: &str,
        call: Call,
    ) -> Result<((Bytes, String), Self), OciDistributionError> {
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            match self.call(call).await {
                Ok(answer) => return Ok((answer, self)),
                Err(OciDistributionError::RequestError(error))
                    if !self.is_plain && is_loopback(registry) && speaks_no_tls(&error) =>
                {
                    self.is_plain = true;
                }
                Err(OciDistributionError::RequestError(error)) if is_invalid_certificate(&error) => {
                    return Err(OciDistributionError::RequestError(error));
                }
                Err(error) if attempt < TRIES && is_transient(&error) => {
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
        unreachable!("the loop returns")
    }

    /// Streams a blob. After a failure, it continues where the bytes ended.
    pub(crate) fn blob<'a>(&'a self, descriptor: &'a OciDescriptor) -> ByteStream<'a> {
        let start = Fetch { blobs: self, descriptor, arrived: 0, failures: 0, stream: None };
        stream::try_unfold(start, Fetch::next).boxed()
    }
}

/// The fetch of one blob.
struct Fetch<'a> {
    blobs: &'a RegistryBlobs,
    descriptor: &'a OciDescriptor,
    /// Bytes that arrived.
    arrived: u64,
    /// Failures since the last byte.
    failures: u32,
    stream: Option<stream::BoxStream<'static, std::io::Result<Bytes>>>,
}

impl Fetch<'_> {
    async fn next(mut self) -> Result<Option<(Bytes, Self)>, ImageError> {
        let (registry, image) = (self.blobs.reference.resolve_registry(), self.blobs.reference.to_string());
        let total = size(self.descriptor);
        loop {
            if self.arrived == total {
                return Ok(None);
            }
            let cause = match self.piece().await {
                Ok(Some(piece)) => {
                    self.arrived += piece.len() as u64;
                    self.failures = 0;
                    if self.arrived > total {
                        let cause =
                            format!("a layer is larger than the {total} bytes that the manifest declares");
                        return Err(ImageError::invalid(&image, cause));
                    }
                    return Ok(Some((piece, self)));
                }
                Ok(None) => ImageError::Registry {
                    registry: registry.to_owned(),
                    cause: format!("a layer ended after {} of {total} bytes", self.arrived),
                },
                Err(error) => ImageError::of_registry(registry, &image, &error),
            };
            self.stream = None;
            self.failures += 1;
            if !cause.is_transient() || self.failures >= TRIES {
                return Err(cause);
            }
            tracing::debug!(error = %cause, arrived = self.arrived, "the fetch of a layer continues");
            tokio::time::sleep(FIRST_PAUSE * 2_u32.pow(self.failures - 1)).await;
        }
    }

    /// Returns the next bytes. `None`: the answer has ended.
    async fn piece(&mut self) -> Result<Option<Bytes>, OciDistributionError> {
        if self.stream.is_none() {
            let RegistryBlobs { reference, .. } = self.blobs;
            let client = self.blobs.client();
            // Not every registry accepts a range without an end.
            let rest = Some(size(self.descriptor) - self.arrived);
            let opened =
                client.pull_blob_stream_partial(reference, self.descriptor, self.arrived, rest).await?;
            self.stream = Some(match opened {
                BlobResponse::Partial(part) => part.stream,
                BlobResponse::Full(whole) => skip(whole.stream, self.arrived),
            });
        }
        let Some(stream) = &mut self.stream else { return Ok(None) };
        Ok(stream.try_next().await?)
    }
}

/// Drops the first bytes of a stream.
fn skip(
    stream: stream::BoxStream<'static, std::io::Result<Bytes>>,
    bytes: u64,
) -> stream::BoxStream<'static, std::io::Result<Bytes>> {
    let mut rest = bytes;
    let after = stream.map_ok(move |mut piece| {
        let dropped = rest.min(piece.len() as u64);
        rest -= dropped;
        piece.split_off(dropped as usize) // At most the length of the piece.
    });
    after.try_filter(|piece| std::future::ready(!piece.is_empty())).boxed()
}

fn is_transient(error: &OciDistributionError) -> bool {
    ImageError::of_registry("", "", error).is_transient()
}

/// Whether a server answered a TLS handshake with something else.
fn speaks_no_tls(error: &(dyn Error + 'static)) -> bool {
    matches!(tls_error(error), Some(rustls::Error::InvalidMessage(_)))
}

fn is_invalid_certificate(error: &(dyn Error + 'static)) -> bool {
    matches!(tls_error(error), Some(rustls::Error::InvalidCertificate(_)))
}

/// Returns the error of TLS among the causes of an error.
fn tls_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e rustls::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.is::<rustls::Error>() {
            return error.downcast_ref();
        }
        // An I/O error hides the error that it wraps from its causes.
        let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        cause = wrapped.map(|wrapped| wrapped as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}

/// Removes the URL from an error of a registry on the loopback to which no connection was made: the
/// client had not found out yet whether the registry has TLS.
fn without_guessed_url(registry: &str, error: OciDistributionError) -> OciDistributionError {
    match error {
        OciDistributionError::RequestError(error)
            if is_loopback(registry) && error.is_connect() && tls_error(&error).is_none() =>
        {
            OciDistributionError::RequestError(error.without_url())
        }
        error => error,
    }
}

/// Whether a registry, `HOST[:PORT]`, is on the loopback of this machine.
fn is_loopback(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// Parses a manifest or an index.
pub(crate) fn parse_manifest(image: &str, bytes: &[u8]) -> Result<OciManifest, ImageError> {
    serde_json::from_slice(bytes).map_err(|_| {
        ImageError::invalid(
            image,
            "its manifest has an unknown format; supported are OCI and Docker schema 2",
        )
    })
}

/// Parses the manifest of one platform.
pub(crate) fn image_manifest(image: &str, bytes: &[u8]) -> Result<OciImageManifest, ImageError> {
    match parse_manifest(image, bytes)? {
        OciManifest::Image(manifest) => Ok(manifest),
        OciManifest::ImageIndex(_) => Err(ImageError::invalid(image, "its index contains another index")),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn refused_connection_to_loopback_has_no_url() {
        let unused = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).unwrap().to_string();
        let registry = Registry::new(RegistrySettings::default()).unwrap();
        let reference = format!("{unused}/app:1").parse().unwrap();
        let blobs = RegistryBlobs { clients: registry.anonymous, is_plain: false, reference };
        let refused = without_guessed_url(&unused, blobs.call(Call::Digest).await.unwrap_err());
        let text = ImageError::of_registry(&unused, "", &refused).to_string();
        assert!(text.contains("Connection refused") && !text.contains("://"), "{text}");
    }

    #[test]
    fn loopback_is_recognized() {
        for (registry, expected) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1:5000", true),
            ("[::1]:5000", true),
            ("registry.example:5000", false),
            ("10.0.0.1", false),
            ("localhost.example", false),
        ] {
            assert_eq!(is_loopback(registry), expected, "{registry}");
        }
    }
}
