//! Settings of the streamer.

use std::path::PathBuf;

use images::RegistrySettings;

/// Settings of the streamer.
#[derive(Debug, Clone, clap::Args)]
pub struct Config {
    /// Addresses of the scheduler's replicas, separated by commas: http://host:port or unix:///path
    #[arg(long, env = "GANTRY_SCHEDULER", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    pub scheduler: String,
    /// Addresses of the artifact store's replicas, separated by commas: http://host:port or
    /// unix:///path
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", value_name = "ADDRESSES", value_parser = rpc::client::addresses)]
    pub artifact_store: String,
    /// Cluster token for calls over TCP. `None`: calls carry no token.
    #[arg(skip)]
    pub token: Option<String>,
    /// Images from registries.
    #[command(flatten)]
    pub images: ImageArgs,
}

/// Settings of images from registries.
#[derive(Debug, Clone, clap::Args)]
pub struct ImageArgs {
    /// Registry of images whose reference names none
    #[arg(long, env = "GANTRY_DEFAULT_REGISTRY", value_name = "REGISTRY", default_value = images::DEFAULT_REGISTRY)]
    pub default_registry: String,
    /// Mirrors that are asked before a registry, separated by commas: REGISTRY=MIRROR. A mirror
    /// receives no credentials
    #[arg(long, env = "GANTRY_REGISTRY_MIRROR", value_name = "REGISTRY=MIRROR", value_delimiter = ',', value_parser = mirror)]
    pub registry_mirror: Vec<(String, String)>,
    /// Registries without TLS, separated by commas. Registries at localhost may lack TLS in any
    /// case
    #[arg(long, env = "GANTRY_REGISTRY_PLAIN_HTTP", value_name = "REGISTRY", value_delimiter = ',')]
    pub registry_plain_http: Vec<String>,
    /// Files with certificates (PEM) that registries may use, in addition to those of the system,
    /// separated by commas
    #[arg(long, env = "GANTRY_REGISTRY_CA", value_name = "FILE", value_delimiter = ',')]
    pub registry_ca: Vec<PathBuf>,
    /// Directory with credentials for registries: a file TEAM.json for each team, in the format of
    /// Docker's config.json
    #[arg(long, env = "GANTRY_REGISTRY_CREDENTIALS", value_name = "DIR")]
    pub registry_credentials: Option<PathBuf>,
    /// Directory for unpacked layers. Its files may be deleted at any time. Default:
    /// /var/cache/gantry/images, and in a cluster on one machine the state directory
    #[arg(long, env = "GANTRY_IMAGE_CACHE", value_name = "DIR")]
    pub image_cache: Option<PathBuf>,
    /// Most bytes of unpacked layers. The layers that were not used for the longest time are
    /// deleted first
    #[arg(long, env = "GANTRY_IMAGE_CACHE_BYTES", value_name = "BYTES", default_value_t = IMAGE_CACHE_BYTES)]
    pub image_cache_bytes: u64,
}

impl Default for ImageArgs {
    fn default() -> Self {
        Self {
            default_registry: images::DEFAULT_REGISTRY.to_owned(),
            registry_mirror: Vec::new(),
            registry_plain_http: Vec::new(),
            registry_ca: Vec::new(),
            registry_credentials: None,
            image_cache: None,
            image_cache_bytes: IMAGE_CACHE_BYTES,
        }
    }
}

/// Default of `--image-cache-bytes`.
const IMAGE_CACHE_BYTES: u64 = 10 << 30;
/// Default of `--image-cache`.
const IMAGE_CACHE: &str = "/var/cache/gantry/images";

impl ImageArgs {
    pub(crate) fn image_cache(&self) -> PathBuf {
        self.image_cache.clone().unwrap_or_else(|| IMAGE_CACHE.into())
    }

    pub(crate) fn registry(&self) -> RegistrySettings {
        RegistrySettings {
            mirrors: self.registry_mirror.clone(),
            plain_http: self.registry_plain_http.clone(),
            ca_files: self.registry_ca.clone(),
        }
    }
}

fn mirror(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((registry, mirror)) if !registry.is_empty() && !mirror.is_empty() => {
            Ok((registry.to_owned(), mirror.to_owned()))
        }
        _ => Err("expected REGISTRY=MIRROR, such as docker.io=mirror.example:5000".to_owned()),
    }
}
