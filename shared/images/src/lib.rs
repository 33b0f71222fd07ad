//! Container images: from a registry, an OCI layout or an archive to a tree that a worker can run.
//!
//! ```text
//! reference ──▶ Registry ─┐                                 ┌▶ Layer ─┐
//! oci:DIR, archives ──────┴▶ ImageSource ── blobs, verified ┼▶ Layer ─┼─ assemble ──▶ ImageTree
//!                            manifest, config               └▶ Layer ─┘
//! ```
//!
//! - [`parse_reference`], [`Registry`] and [`ImageSource`] find the manifest of a reference or of a
//!   file for a platform.
//! - [`LayerStore`] unpacks each layer once, into its [`Layer`]: a manifest of the archive and a
//!   file with its content. The files are a cache with a limit.
//! - [`assemble()`] applies the layers to one another and adds `metadata.json`. The result is an
//!   image as workers know it: the directory `rootfs`, and the defaults of its processes.
//!
//! Nothing is written outside of the directory of the store, and no path of a layer is ever opened:
//! a layer is data until a worker writes the manifest, which checks every path.
//!
//! Invariant: a layer is used only if its bytes have the digest that the manifest of the image
//! names, and a manifest only if it has the digest of the reference.

mod assemble;
mod credentials;
mod error;
mod found;
mod layer;
mod local;
mod metadata;
mod pipe;
mod platform;
mod progress;
mod pull;
mod reference;
mod registry;
mod source;
mod store;

pub use assemble::{ImageTree, assemble};
pub use credentials::{Credentials, CredentialsError, DockerConfig};
pub use error::ImageError;
pub use layer::Layer;
pub use metadata::Metadata;
pub use oci_client::Reference;
pub use platform::Platform;
pub use progress::Progress;
pub use pull::pull;
pub use reference::{DEFAULT_REGISTRY, parse_reference};
pub use registry::{Registry, RegistrySettings};
pub use source::ImageSource;
pub use store::LayerStore;
