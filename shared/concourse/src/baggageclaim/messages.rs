//! Messages of the Baggageclaim protocol.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;

use serde::{Deserialize, Deserializer, Serialize};

use super::Error;
use super::encoding::Encoding;
pub(super) use crate::exchange::encoded as escape;

/// A valid handle of a volume.
///
/// The worker uses handles as directory names without validation. Therefore a handle has only
/// letters, digits, `-`, `_` and `.`, and is not a reserved name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Handle(String);

/// A name that is not a valid handle.
#[derive(Debug, thiserror::Error)]
#[error("invalid volume handle {0:?}: use letters, digits, `-`, `_` and `.`")]
pub struct InvalidHandle(String);

impl Handle {
    /// Validates a name.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidHandle> {
        let name = name.into();
        let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
        let reserved = matches!(name.as_str(), "" | "." | ".." | "destroy" | "work");
        if reserved || name.len() > 255 || !name.bytes().all(plain) {
            return Err(InvalidHandle(name));
        }
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The initial contents of a new volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Strategy {
    /// No contents.
    Empty,
    /// The contents of an existing volume, which must stay until the child is destroyed.
    Cow {
        /// The parent volume.
        volume: Handle,
    },
    /// A path on the worker's host: the contents of a directory, or of a gzip'ed tar file.
    Import {
        /// The absolute path.
        path: String,
        /// Copies the targets of symbolic links instead of the links.
        follow_symlinks: bool,
    },
}

/// A request to create a volume.
#[derive(Clone, Debug, Serialize)]
pub struct VolumeRequest {
    /// The handle, chosen by the caller and used once.
    pub handle: Handle,
    /// The initial contents.
    pub strategy: Strategy,
    /// Properties. Never null on the wire, because null would crash the worker later.
    pub properties: BTreeMap<String, String>,
    /// Whether ids in the volume are those of the host.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub privileged: bool,
    /// User and group of every file. Older workers ignore this.
    #[serde(flatten, serialize_with = "owner")]
    pub owner: Option<(u32, u32)>,
}

fn owner<S: serde::Serializer>(owner: &Option<(u32, u32)>, serializer: S) -> Result<S::Ok, S::Error> {
    let members = owner.map(|(uid, gid)| BTreeMap::from([("uid", uid), ("gid", gid)])).unwrap_or_default();
    members.serialize(serializer)
}

impl VolumeRequest {
    /// An unprivileged volume without properties.
    pub fn new(handle: Handle, strategy: Strategy) -> Self {
        Self { handle, strategy, properties: BTreeMap::new(), privileged: false, owner: None }
    }
}

/// A volume as reported by a worker.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Volume {
    /// The handle. It may not be a valid [`Handle`], because other clients may have created the
    /// volume.
    pub handle: String,
    /// The directory on the worker's host.
    pub path: String,
    /// The properties.
    #[serde(default, deserialize_with = "null_is_empty")]
    pub properties: BTreeMap<String, String>,
    /// Whether ids in the volume are those of the host.
    #[serde(default)]
    pub privileged: bool,
}

fn null_is_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Options for unpacking an archive into a volume.
#[derive(Clone, Debug)]
pub struct StreamIn {
    /// The directory inside the volume, created if missing. Empty: the whole volume.
    pub path: String,
    /// The encoding of the archive.
    pub encoding: Encoding,
    /// Limit of the encoded archive, in MiB. Zero: no limit.
    pub limit_mib: f64,
}

impl StreamIn {
    /// Unpacks into the whole volume, without a limit.
    pub fn new(encoding: Encoding) -> Self {
        Self { path: String::new(), encoding, limit_mib: 0.0 }
    }

    pub(super) fn query(&self) -> Result<String, Error> {
        // The worker deletes each `..` from the path, also inside a name, so the archive would
        // arrive elsewhere.
        if self.path.contains("..") || self.path.contains('\0') {
            return Err(Error::Invalid("the path of an archive must not contain `..`"));
        }
        if !self.limit_mib.is_finite() || self.limit_mib < 0.0 {
            return Err(Error::Invalid("a limit must be a number and not negative"));
        }
        Ok(format!("path={}&limit={:.6}", escape(path_or_root(&self.path)), self.limit_mib))
    }
}

/// The address at which other workers reach a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct P2pUrl(String);

impl P2pUrl {
    /// Parses the answer of a worker, and adds the missing brackets of an IPv6 address.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let bad = || Error::Protocol(format!("{text:?} is not the address of a worker"));
        let rest = text.trim().strip_prefix("http://").ok_or_else(bad)?.trim_end_matches('/');
        let (host, port) = rest.rsplit_once(':').ok_or_else(bad)?;
        let port: u16 = port.parse().map_err(|_| bad())?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            None if host.contains(':') => Some(host),
            bracketed => bracketed,
        }
        .map(|address| address.parse::<Ipv6Addr>().map(|address| format!("[{address}]")).map_err(|_| bad()))
        .unwrap_or_else(|| Ok(host.to_owned()))?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '[' | ']' | ':');
        if host.is_empty() || !host.chars().all(plain) {
            return Err(bad());
        }
        Ok(Self(format!("http://{host}:{port}")))
    }

    /// The address as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The URL for an archive for volume `handle` of that worker.
    pub fn stream_in(&self, handle: &Handle, how: &StreamIn) -> Result<String, Error> {
        Ok(format!("{}/volumes/{handle}/stream-in?{}", self.0, how.query()?))
    }
}

pub(super) fn path_or_root(path: &str) -> &str {
    if path.is_empty() { "." } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_requests_have_expected_json() {
        let wire = |request: &VolumeRequest| serde_json::to_value(request).unwrap();
        let handle = Handle::new("v").unwrap();
        let mut request = VolumeRequest::new(handle.clone(), Strategy::Empty);
        let plain = serde_json::json!({ "handle": "v", "strategy": { "type": "empty" }, "properties": {} });
        assert_eq!(wire(&request), plain);

        request.strategy = Strategy::Cow { volume: handle };
        request.privileged = true;
        request.owner = Some((1000, 0));
        let strategy = serde_json::json!({ "type": "cow", "volume": "v" });
        let full = serde_json::json!({
            "handle": "v", "strategy": strategy, "properties": {}, "privileged": true, "uid": 1000, "gid": 0,
        });
        assert_eq!(wire(&request), full);

        let strategy = Strategy::Import { path: "/a".to_owned(), follow_symlinks: false };
        let import = serde_json::json!({ "type": "import", "path": "/a", "follow_symlinks": false });
        assert_eq!(serde_json::to_value(strategy).unwrap(), import);
    }

    #[test]
    fn null_properties_parse_as_empty() {
        let json = r#"{"handle":"v","path":"/p","properties":null,"privileged":true,"uid":1}"#;
        let volume: Volume = serde_json::from_str(json).unwrap();
        assert!(volume.properties.is_empty() && volume.privileged);
    }
}
