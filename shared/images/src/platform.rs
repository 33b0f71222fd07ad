//! Platforms, and the choice of a manifest from an index.

use std::fmt;
use std::str::FromStr;

use oci_client::manifest::ImageIndexEntry;

/// A platform of an image: operating system, architecture and optionally a variant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Platform {
    os: String,
    architecture: String,
    variant: Option<String>,
}

impl Platform {
    /// Returns the platform of this program.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }

    /// Returns the digest of the manifest for this platform. A manifest with the requested variant
    /// is preferred; without a requested variant, the first one counts.
    pub(crate) fn choose<'a>(&self, entries: &'a [ImageIndexEntry]) -> Option<&'a ImageIndexEntry> {
        let mut fitting = entries.iter().filter(|entry| {
            entry.platform.as_ref().is_some_and(|platform| {
                platform.os.to_string() == self.os
                    && platform.architecture.to_string() == self.architecture
                    && (self.variant.is_none() || platform.variant == self.variant)
            })
        });
        fitting.next()
    }

    /// Whether an image with this configuration runs on the platform.
    pub(crate) fn fits(&self, os: &str, architecture: &str) -> bool {
        (os.is_empty() || os == self.os) && (architecture.is_empty() || architecture == self.architecture)
    }
}

/// Lists the platforms of an index.
pub(crate) fn names(entries: &[ImageIndexEntry]) -> Vec<String> {
    let known = entries.iter().filter_map(|entry| entry.platform.as_ref());
    let name = known.map(|platform| {
        let variant = platform.variant.as_ref().map(|variant| format!("/{variant}")).unwrap_or_default();
        format!("{}/{}{variant}", platform.os, platform.architecture)
    });
    // Attestations have the platform `unknown/unknown`.
    name.filter(|name| !name.starts_with("unknown/")).collect()
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.as_ref().map_or(Ok(()), |variant| write!(f, "/{variant}"))
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<_> = text.split('/').collect();
        let (os, architecture, variant) = match parts[..] {
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant)),
            _ => return Err(format!("{text:?} is not OS/ARCHITECTURE, such as linux/amd64")),
        };
        if [os, architecture, variant.unwrap_or("x")].into_iter().any(str::is_empty) {
            return Err(format!("{text:?} is not OS/ARCHITECTURE, such as linux/amd64"));
        }
        Ok(Self { os: os.into(), architecture: architecture.into(), variant: variant.map(Into::into) })
    }
}
