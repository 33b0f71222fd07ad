//! Wire encoding of entries, as the message `gantry.runtime.v1.Entry`.
//!
//! The tree digest is defined over these bytes, so this crate does not depend on generated code.
//! The field numbers and types are those of `proto/gantry/runtime/v1/volumes.proto`.
//!
//! Invariant: [`Entry::encode`] is canonical: fields are in the order of their numbers, and
//! defaults are omitted. [`Entry::decode`] accepts any encoding of an entry.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use domain::Digest;
use prost::Message;

use crate::entry::{DeviceKind, Entry, EntryFault, EntryKind, Extent, Xattr};
use crate::manifest::{InvalidManifest, Limits, Manifest, ManifestBuilder};

#[derive(Clone, PartialEq, Message)]
struct WireEntry {
    #[prost(bytes = "vec", tag = "1")]
    path: Vec<u8>,
    #[prost(uint32, tag = "2")]
    mode: u32,
    #[prost(uint32, tag = "3")]
    uid: u32,
    #[prost(uint32, tag = "4")]
    gid: u32,
    #[prost(sint64, tag = "5")]
    mtime_seconds: i64,
    #[prost(uint32, tag = "6")]
    mtime_nanos: u32,
    #[prost(message, repeated, tag = "7")]
    xattrs: Vec<WireXattr>,
    #[prost(oneof = "WireKind", tags = "8, 9, 10, 11, 12, 13")]
    kind: Option<WireKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum WireKind {
    #[prost(message, tag = "8")]
    Directory(WireDirectory),
    #[prost(message, tag = "9")]
    File(WireFile),
    #[prost(bytes = "vec", tag = "10")]
    Symlink(Vec<u8>),
    #[prost(bytes = "vec", tag = "11")]
    HardLink(Vec<u8>),
    #[prost(message, tag = "12")]
    Fifo(WireFifo),
    #[prost(message, tag = "13")]
    Device(WireDevice),
}

#[derive(Clone, PartialEq, Message)]
struct WireXattr {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct WireDirectory {}

#[derive(Clone, PartialEq, Message)]
struct WireFile {
    #[prost(uint64, tag = "1")]
    size_bytes: u64,
    #[prost(message, repeated, tag = "2")]
    extents: Vec<WireExtent>,
}

/// An extent. The stat cache stores extents in the same form.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct WireExtent {
    #[prost(uint64, tag = "1")]
    offset: u64,
    #[prost(uint32, tag = "2")]
    length: u32,
    #[prost(bytes = "vec", tag = "3")]
    digest: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct WireFifo {}

#[derive(Clone, PartialEq, Message)]
struct WireDevice {
    #[prost(enumeration = "WireDeviceKind", tag = "1")]
    kind: i32,
    #[prost(uint32, tag = "2")]
    major: u32,
    #[prost(uint32, tag = "3")]
    minor: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
enum WireDeviceKind {
    Unspecified = 0,
    Character = 1,
    Block = 2,
}

impl Entry {
    /// Returns the canonical encoding, a `gantry.runtime.v1.Entry`.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        WireEntry::from(self).encode_to_vec()
    }

    /// Returns the canonical encoding after its length (a varint). The tree digest uses this form.
    #[must_use]
    pub fn encode_length_delimited(&self) -> Vec<u8> {
        WireEntry::from(self).encode_length_delimited_to_vec()
    }

    /// Decodes a `gantry.runtime.v1.Entry`, and checks all rules that concern only this entry.
    ///
    /// A [`ManifestBuilder`] checks the rules between entries: order, parents and targets of links.
    ///
    /// # Errors
    ///
    /// Returns the first violated rule.
    pub fn decode(bytes: &[u8]) -> Result<Self, EntryFault> {
        Self::decode_named(bytes).map_err(|(_, fault)| fault)
    }

    /// Decodes an entry. A fault comes with the path, which is empty if it could not be decoded.
    pub(crate) fn decode_named(bytes: &[u8]) -> Result<Self, (PathBuf, EntryFault)> {
        let wire = WireEntry::decode(bytes)
            .map_err(|error| (PathBuf::new(), EntryFault::Malformed(error.to_string())))?;
        let path = PathBuf::from(OsStr::from_bytes(&wire.path));
        let entry = Self::try_from(wire).and_then(|entry| entry.check().map(|()| entry));
        entry.map_err(|fault| (path, fault))
    }
}

impl Manifest {
    /// Encodes all entries, each after its length. The BLAKE3 digest of these bytes is the tree
    /// digest. Files store manifests in this form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.entries().iter().flat_map(Entry::encode_length_delimited).collect()
    }

    /// Decodes a manifest that [`Manifest::encode`] has encoded.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are truncated, or if an entry violates a rule.
    pub fn decode(mut bytes: &[u8], limits: Limits) -> Result<Self, InvalidManifest> {
        let mut builder = ManifestBuilder::new(limits);
        while !bytes.is_empty() {
            let length = prost::decode_length_delimiter(&mut bytes).map_err(|_| InvalidManifest::CutOff)?;
            let (entry, rest) = bytes.split_at_checked(length).ok_or(InvalidManifest::CutOff)?;
            builder.push_encoded(entry)?;
            bytes = rest;
        }
        builder.finish()
    }
}

impl From<&Entry> for WireEntry {
    fn from(entry: &Entry) -> Self {
        Self {
            path: entry.path.clone(),
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime_seconds: entry.mtime_seconds,
            mtime_nanos: entry.mtime_nanos,
            xattrs: entry
                .xattrs
                .iter()
                .map(|xattr| WireXattr { name: xattr.name.clone(), value: xattr.value.clone() })
                .collect(),
            kind: Some(match &entry.kind {
                EntryKind::Directory => WireKind::Directory(WireDirectory {}),
                EntryKind::File { size_bytes, extents } => WireKind::File(WireFile {
                    size_bytes: *size_bytes,
                    extents: extents.iter().map(WireExtent::from).collect(),
                }),
                EntryKind::Symlink { target } => WireKind::Symlink(target.clone()),
                EntryKind::HardLink { to } => WireKind::HardLink(to.clone()),
                EntryKind::Fifo => WireKind::Fifo(WireFifo {}),
                EntryKind::Device { kind, major, minor } => WireKind::Device(WireDevice {
                    kind: match kind {
                        DeviceKind::Character => WireDeviceKind::Character,
                        DeviceKind::Block => WireDeviceKind::Block,
                    } as i32,
                    major: *major,
                    minor: *minor,
                }),
            }),
        }
    }
}

impl TryFrom<WireEntry> for Entry {
    type Error = EntryFault;

    fn try_from(wire: WireEntry) -> Result<Self, EntryFault> {
        let kind = match wire.kind.ok_or(EntryFault::NoKind)? {
            WireKind::Directory(WireDirectory {}) => EntryKind::Directory,
            WireKind::File(file) => EntryKind::File {
                size_bytes: file.size_bytes,
                extents: file.extents.into_iter().map(Extent::try_from).collect::<Result<_, _>>()?,
            },
            WireKind::Symlink(target) => EntryKind::Symlink { target },
            WireKind::HardLink(to) => EntryKind::HardLink { to },
            WireKind::Fifo(WireFifo {}) => EntryKind::Fifo,
            WireKind::Device(device) => EntryKind::Device {
                kind: match WireDeviceKind::try_from(device.kind) {
                    Ok(WireDeviceKind::Character) => DeviceKind::Character,
                    Ok(WireDeviceKind::Block) => DeviceKind::Block,
                    Ok(WireDeviceKind::Unspecified) | Err(_) => return Err(EntryFault::DeviceKind),
                },
                major: device.major,
                minor: device.minor,
            },
        };
        Ok(Self {
            path: wire.path,
            mode: wire.mode,
            uid: wire.uid,
            gid: wire.gid,
            mtime_seconds: wire.mtime_seconds,
            mtime_nanos: wire.mtime_nanos,
            xattrs: wire
                .xattrs
                .into_iter()
                .map(|xattr| Xattr { name: xattr.name, value: xattr.value })
                .collect(),
            kind,
        })
    }
}

impl From<&Extent> for WireExtent {
    fn from(extent: &Extent) -> Self {
        Self { offset: extent.offset, length: extent.length, digest: extent.digest.as_bytes().to_vec() }
    }
}

impl TryFrom<WireExtent> for Extent {
    type Error = EntryFault;

    fn try_from(wire: WireExtent) -> Result<Self, EntryFault> {
        let digest = Digest::try_from(&wire.digest[..]).map_err(|_| EntryFault::ExtentDigest)?;
        Ok(Self { offset: wire.offset, length: wire.length, digest })
    }
}
